//! Memory that is really there: pages of this process, each written to, given back when dropped.

#![allow(unsafe_code)]

use std::ptr::NonNull;

use nix::errno::Errno;

/// Some pages.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<libc::c_void>,
    length: usize,
}

impl Pages {
    /// So many bytes, with contents that no two pages share: what is alike could be kept once.
    ///
    /// # Errors
    /// Where there are no addresses for them.
    pub fn new(length: usize, seed: u64) -> Result<Self, Errno> {
        // SAFETY: asks for new memory, at an address that is the kernel's to choose.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        let start = NonNull::new(start).ok_or(Errno::ENOMEM)?;
        let mut pages = Self { start, length };
        let mut state = seed | 1;
        for word in pages.words() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state;
        }
        Ok(pages)
    }

    /// Bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    fn words(&mut self) -> &mut [u64] {
        let count = self.length / size_of::<u64>();
        // SAFETY: the memory belongs to this value alone, is as long as that, aligned to a page, and
        // any bytes are numbers.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast().as_ptr(), count) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the memory was mapped by this value, and nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_written_and_differ() {
        let mut pages = Pages::new(1 << 20, 7).unwrap();
        assert_eq!(pages.length(), 1 << 20);
        let words = pages.words();
        assert!(words.iter().all(|word| *word != 0));
        assert_ne!(words[..512], words[512..1024]);
    }
}
