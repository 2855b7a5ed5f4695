//! Mounts as `/proc` shows them: what is mounted where for a process, and what a descriptor lies on.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use super::proc::Proc;

/// Why mounts cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// A file could not be read.
    #[error("read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file does not say what it should.
    #[error("{} names no mount", .0.display())]
    Unnamed(PathBuf),
}

/// The id of the mount that a descriptor lies on.
///
/// # Errors
/// When the kernel does not say.
pub fn id_of(fd: BorrowedFd<'_>) -> Result<u64, MountError> {
    let path = PathBuf::from(format!("/proc/self/fdinfo/{}", fd.as_raw_fd()));
    let text = String::from_utf8_lossy(&read(&path)?).into_owned();
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.and_then(|id| id.trim().parse().ok())
        .ok_or(MountError::Unnamed(path))
}

/// The mounts of a process: the id of each, and where it is for that process.
///
/// # Errors
/// When the process is gone or may not be looked at.
pub fn mount_points(proc: &Proc, pid: i32) -> Result<Vec<(u64, PathBuf)>, MountError> {
    let bytes = read(&proc.path(pid).join("mountinfo"))?;
    Ok(bytes
        .split(|byte| *byte == b'\n')
        .filter_map(parse)
        .collect())
}

/// "36 35 98:0 /root /point options …": the first field and the fifth.
fn parse(line: &[u8]) -> Option<(u64, PathBuf)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let point = unescape(fields.nth(3)?);
    Some((id, PathBuf::from(std::ffi::OsString::from_vec(point))))
}

/// Blanks and backslashes stand as three octal digits behind a backslash.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|d| std::str::from_utf8(d).ok());
        let octal = octal.and_then(|d| u8::from_str_radix(d, 8).ok());
        if let Some(byte) = octal.filter(|_| *first == b'\\') {
            plain.push(byte);
            rest = &after[3..];
        } else {
            plain.push(*first);
            rest = after;
        }
    }
    plain
}

fn read(path: &Path) -> Result<Vec<u8>, MountError> {
    fs::read(path).map_err(|source| MountError::Read {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_line_is_read_with_all_that_can_stand_in_a_path() {
        let line = br"36 35 98:0 /mnt1 /a\040b\134c rw,noatime master:1 - ext3 /dev/root rw";
        assert_eq!(parse(line), Some((36, PathBuf::from(r"/a b\c"))));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"x y z"), None);
    }

    #[test]
    fn a_descriptor_lies_on_one_of_the_own_mounts() {
        let own = i32::try_from(std::process::id()).unwrap();
        let id = id_of(File::open("/proc/version").unwrap().as_fd()).unwrap();
        let all = mount_points(&Proc::default(), own).unwrap();
        assert!(all.contains(&(id, PathBuf::from("/proc"))), "{id}: {all:?}");
    }
}
