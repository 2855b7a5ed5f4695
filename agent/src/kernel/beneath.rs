//! Files of a container, opened beneath its root.
//!
//! What a container shows as a path may be a link to anywhere, a pipe that nobody writes to, or a
//! file without end. Paths are resolved with the container's root as `/`, no magic link is followed,
//! only a regular file is read, and no more of it than the caller allows. Reading a file on a FUSE
//! mount of the container may block: never call this from a thread that others wait for.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

/// Longest `resolv.conf` that is read, in bytes.
const RESOLV_CONF: u64 = 64 * 1024;

/// Why a container's file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum BeneathError {
    /// It could not be opened or read.
    #[error("read {} of the container", path.display())]
    Read {
        /// The path inside the container.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// It is no regular file.
    #[error("{} of the container is no regular file", path.display())]
    NotAFile {
        /// The path inside the container.
        path: PathBuf,
    },
    /// It is longer than allowed.
    #[error("{} of the container has more than {limit} bytes", path.display())]
    TooLong {
        /// The path inside the container.
        path: PathBuf,
        /// The most that is read, in bytes.
        limit: u64,
    },
}

/// Opens a path of a container as a location only (`O_PATH`), with its root as `/`.
///
/// # Errors
/// When it does not exist, leads through a magic link, or may not be reached.
pub fn open(root: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd, BeneathError> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    openat2(root, path, how).map_err(|source| BeneathError::Read {
        path: path.to_owned(),
        source: source.into(),
    })
}

/// Reads a regular file of a container, of `limit` bytes at most.
///
/// # Errors
/// When it is something else, too long, or cannot be read.
pub fn read(root: BorrowedFd<'_>, path: &Path, limit: u64) -> Result<Vec<u8>, BeneathError> {
    let failed = |source| BeneathError::Read {
        path: path.to_owned(),
        source,
    };
    let location = File::from(open(root, path)?);
    if !location.metadata().map_err(failed)?.is_file() {
        let path = path.to_owned();
        return Err(BeneathError::NotAFile { path });
    }
    // What was checked is what is opened, whatever the path means by now.
    let reopened = format!("/proc/self/fd/{}", location.as_raw_fd());
    let mut bytes = Vec::new();
    File::open(reopened)
        .and_then(|file| file.take(limit + 1).read_to_end(&mut bytes))
        .map_err(failed)?;
    if bytes.len() as u64 > limit {
        let path = path.to_owned();
        return Err(BeneathError::TooLong { path, limit });
    }
    Ok(bytes)
}

/// Reads `/etc/resolv.conf` of a container; bytes that are not UTF-8 are replaced.
///
/// # Errors
/// As [`read`].
pub fn resolv_conf(root: BorrowedFd<'_>) -> Result<String, BeneathError> {
    let bytes = read(root, Path::new("etc/resolv.conf"), RESOLV_CONF)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    /// A root with `etc/`, and a secret beside it.
    fn container() -> (tempfile::TempDir, PathBuf, File) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        let opened = File::open(&root).unwrap();
        (dir, root, opened)
    }

    #[test]
    fn resolv_conf_is_read() {
        let (_dir, root, opened) = container();
        fs::write(root.join("etc/resolv.conf"), "nameserver 10.90.0.10\n").unwrap();
        let text = resolv_conf(opened.as_fd()).unwrap();
        assert_eq!(text, "nameserver 10.90.0.10\n");
    }

    #[test]
    fn links_stay_beneath_the_root() {
        let (dir, root, opened) = container();
        let link = root.join("etc/resolv.conf");

        symlink("/etc/real", &link).unwrap();
        fs::write(root.join("etc/real"), "nameserver 1.2.3.4").unwrap();
        assert_eq!(resolv_conf(opened.as_fd()).unwrap(), "nameserver 1.2.3.4");

        for target in ["../../secret", "/../../secret"] {
            fs::remove_file(&link).unwrap();
            symlink(target, &link).unwrap();
            assert!(resolv_conf(opened.as_fd()).is_err(), "{target}");
        }
        fs::remove_file(&link).unwrap();
        symlink(dir.path().join("secret"), &link).unwrap();
        assert!(resolv_conf(opened.as_fd()).is_err());
    }

    #[test]
    fn pipes_and_directories_are_refused_at_once() {
        let (_dir, root, opened) = container();
        let path = root.join("etc/resolv.conf");

        mkfifo(&path, Mode::S_IRWXU).unwrap();
        let refused = resolv_conf(opened.as_fd());
        assert!(matches!(refused, Err(BeneathError::NotAFile { .. })));

        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let refused = resolv_conf(opened.as_fd());
        assert!(matches!(refused, Err(BeneathError::NotAFile { .. })));
    }

    #[test]
    fn a_file_over_the_limit_is_refused() {
        let (_dir, root, opened) = container();
        fs::write(root.join("f"), [b'x'; 10]).unwrap();
        let path = Path::new("f");
        assert_eq!(read(opened.as_fd(), path, 10).unwrap().len(), 10);
        let refused = read(opened.as_fd(), path, 9);
        assert!(matches!(refused, Err(BeneathError::TooLong { .. })));
    }
}
