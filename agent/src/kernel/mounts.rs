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

/// A mount, as a process sees it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mount {
    /// Its id.
    pub id: u64,
    /// The device of its file system: `major:minor`.
    pub device: String,
    /// What of its file system it shows.
    pub root: String,
    /// Where it is.
    pub point: PathBuf,
    /// The type of its file system.
    pub kind: String,
    /// What its file system is on, as that says.
    pub source: String,
    /// Where an overlay keeps what is written to it.
    pub upper: Option<PathBuf>,
}

impl Mount {
    /// Whether the file system is the same as another's; one that has several devices is known by
    /// what it is on.
    #[must_use]
    pub fn shares_file_system_with(&self, other: &Self) -> bool {
        let is_on_disk = self.source.starts_with('/');
        self.device == other.device || (is_on_disk && self.source == other.source)
    }
}

/// The mount that a path of a process lies on.
#[must_use]
pub fn covering<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    let above = mounts.iter().filter(|mount| path.starts_with(&mount.point));
    // Of two at one place the later covers the other.
    above.max_by_key(|mount| mount.point.components().count())
}

/// The mounts of a process, each after what it is mounted on.
///
/// # Errors
/// When the process is gone or may not be looked at.
pub fn of_process(proc: &Proc, pid: i32) -> Result<Vec<Mount>, MountError> {
    let bytes = read(&proc.path(pid).join("mountinfo"))?;
    Ok(bytes
        .split(|byte| *byte == b'\n')
        .filter_map(parse)
        .collect())
}

/// "36 35 98:0 /root /point options optional… - type source options".
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let text = |field: &[u8]| String::from_utf8_lossy(&unescape(field)).into_owned();
    let id = text(fields.next()?).parse().ok()?;
    let device = text(fields.nth(1)?);
    let root = text(fields.next()?);
    let path = |field: &[u8]| PathBuf::from(std::ffi::OsString::from_vec(unescape(field)));
    let point = path(fields.next()?);
    fields.find(|field| *field == b"-")?;
    let (kind, source) = (text(fields.next()?), text(fields.next()?));
    let mut options = fields
        .next()
        .unwrap_or_default()
        .split(|byte| *byte == b',');
    let upper = options.find_map(|option| option.strip_prefix(b"upperdir="));
    Some(Mount {
        id,
        device,
        root,
        point,
        kind,
        source,
        upper: upper.map(path),
    })
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
        let mount = Mount {
            id: 36,
            device: "98:0".to_owned(),
            root: "/mnt1".to_owned(),
            point: PathBuf::from(r"/a b\c"),
            kind: "ext3".to_owned(),
            source: "/dev/root".to_owned(),
            upper: None,
        };
        assert_eq!(parse(line), Some(mount));
        let overlay =
            b"1 2 0:9 / / rw - overlay overlay rw,lowerdir=/a:/b,upperdir=/c/fs,workdir=/c/w";
        let upper = parse(overlay).unwrap().upper;
        assert_eq!(upper, Some(PathBuf::from("/c/fs")));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"x y z"), None);
    }

    #[test]
    fn a_descriptor_lies_on_one_of_the_own_mounts() {
        let own = i32::try_from(std::process::id()).unwrap();
        let id = id_of(File::open("/proc/version").unwrap().as_fd()).unwrap();
        let all = of_process(&Proc::default(), own).unwrap();
        let proc = all.iter().find(|mount| mount.id == id).unwrap();
        assert_eq!(proc.point, Path::new("/proc"));
        assert_eq!(covering(&all, Path::new("/proc/version")), Some(proc));
    }

    #[test]
    fn file_systems_are_told_apart_by_device_and_by_disk() {
        let mount = |device: &str, source: &str, point: &str| Mount {
            id: 1,
            device: device.to_owned(),
            root: "/".to_owned(),
            point: point.into(),
            kind: "btrfs".to_owned(),
            source: source.to_owned(),
            upper: None,
        };
        let root = mount("0:30", "/dev/sda1", "/");
        assert!(root.shares_file_system_with(&mount("0:31", "/dev/sda1", "/x")));
        assert!(root.shares_file_system_with(&mount("0:30", "none", "/x")));
        assert!(!root.shares_file_system_with(&mount("0:31", "/dev/sdb1", "/x")));
        let memory = mount("0:40", "tmpfs", "/var/lib");
        assert!(!memory.shares_file_system_with(&mount("0:41", "tmpfs", "/x")));
        let all = [root.clone(), memory.clone()];
        let at = |path: &str| covering(&all, Path::new(path));
        assert_eq!(at("/var/lib/kubelet"), Some(&memory));
        assert_eq!(at("/var/library"), Some(&root));
    }
}
