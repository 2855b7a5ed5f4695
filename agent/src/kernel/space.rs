//! Space on file systems, and files without a name that take some of it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, OFlag, PosixFadviseAdvice, fallocate, openat, posix_fadvise};
use nix::sys::stat::Mode;
use nix::sys::statvfs::fstatvfs;

/// What is written at once where the file system reserves nothing.
const PIECE: usize = 1 << 20;

/// The space of a file system, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Space {
    /// All that there is.
    pub total: u64,
    /// Not in use; some of it may be kept for root.
    pub free: u64,
    /// Free for everybody.
    pub available: u64,
}

impl Space {
    /// That of the file system that a descriptor lies on.
    ///
    /// # Errors
    /// When it does not say.
    pub fn of(fd: impl AsFd) -> Result<Self, Errno> {
        let found = fstatvfs(fd)?;
        let size = found.fragment_size();
        let bytes = |blocks: u64| blocks.saturating_mul(size);
        Ok(Self {
            total: bytes(found.blocks()),
            free: bytes(found.blocks_free()),
            available: bytes(found.blocks_available()),
        })
    }

    /// How much is in use.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.total.saturating_sub(self.free)
    }
}

/// A file in a directory that has no name: it is gone when nobody has it open.
///
/// # Errors
/// When the file system has no such files, or may not be written to.
pub fn nameless(directory: BorrowedFd<'_>) -> Result<File, Errno> {
    let flags = OFlag::O_TMPFILE | OFlag::O_RDWR | OFlag::O_CLOEXEC;
    openat(directory, ".", flags, Mode::S_IRUSR | Mode::S_IWUSR).map(File::from)
}

/// How many bytes of space a file takes, and whether it has no name.
///
/// # Errors
/// When its file system does not say.
pub fn taken(file: &File) -> std::io::Result<(u64, bool)> {
    let found = file.metadata()?;
    Ok((found.blocks().saturating_mul(512), found.nlink() == 0))
}

/// Takes space for a part of a file: reserves it, or writes it where nothing can be reserved.
///
/// # Errors
/// `ENOSPC` and `EDQUOT` where there is not so much.
pub fn take(file: &File, offset: u64, length: u64) -> Result<(), Errno> {
    let wide = |n: u64| i64::try_from(n).map_err(|_| Errno::EFBIG);
    loop {
        match fallocate(file, FallocateFlags::empty(), wide(offset)?, wide(length)?) {
            Err(Errno::EINTR) => {}
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return write(file, offset, length),
            result => return result,
        }
    }
}

/// Writes what cannot be made smaller, and has it on the disk: what is only cached takes no space.
fn write(file: &File, offset: u64, length: u64) -> Result<(), Errno> {
    let errno = |e: std::io::Error| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
    let mut piece = vec![0; PIECE];
    let mut state = offset | 1;
    for word in piece.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_ne_bytes());
    }
    let mut done = 0;
    while done < length {
        let part = usize::try_from(length - done).map_or(PIECE, |left| left.min(PIECE));
        file.write_all_at(&piece[..part], offset + done)
            .map_err(errno)?;
        file.sync_data().map_err(errno)?;
        done += part as u64;
    }
    // Of no use to anybody; what stays in the cache is only in the way.
    let _ = posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_is_taken_either_way_and_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let directory = File::open(dir.path()).unwrap();
        for way in [take, write] {
            let file = nameless(directory.as_fd()).unwrap();
            way(&file, 0, 3 << 20).unwrap();
            let (bytes, is_nameless) = taken(&file).unwrap();
            assert!(bytes >= 3 << 20 && is_nameless, "{bytes}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let space = Space::of(&directory).unwrap();
        assert!(space.total >= space.free && space.free >= space.available);
    }
}
