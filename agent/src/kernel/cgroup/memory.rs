//! What a control group says of memory, in both forms.

use std::path::Path;

use super::{CgroupError, is_gone, read};

/// What the first form says where there is no limit is some page short of all addresses.
const NO_LIMIT: u64 = 1 << 60;

/// The limit of a control group itself, in bytes; `None` without one.
///
/// # Errors
/// When its files cannot be read.
pub fn limit(group: &Path) -> Result<Option<u64>, CgroupError> {
    let text = either(group, "memory.max", "memory.limit_in_bytes")?;
    // "max": no limit.
    Ok(text.trim().parse().ok().filter(|limit| *limit < NO_LIMIT))
}

/// Bytes that are used and that the kernel cannot take back by itself: without what it keeps of
/// files.
///
/// # Errors
/// When its files cannot be read.
pub fn usage(group: &Path) -> Result<u64, CgroupError> {
    let used: u64 = either(group, "memory.current", "memory.usage_in_bytes")?
        .trim()
        .parse()
        .unwrap_or_default();
    let stat = read(&group.join("memory.stat"))?;
    let cached = |name: &str| field(&stat, &format!("total_{name}")).or_else(|| field(&stat, name));
    let files = ["active_file", "inactive_file"].map(|name| cached(name).unwrap_or_default());
    Ok(used.saturating_sub(files.iter().sum()))
}

/// How often the kernel has killed for want of memory; 0 where it does not say.
#[must_use]
pub fn oom_kills(group: &Path) -> u64 {
    let text = either(group, "memory.events", "memory.oom_control").unwrap_or_default();
    field(&text, "oom_kill").unwrap_or_default()
}

/// Whether the kernel kills all of the group when it kills one for want of memory.
#[must_use]
pub fn dies_as_one(group: &Path) -> bool {
    read(&group.join("memory.oom.group")).is_ok_and(|text| text.trim() == "1")
}

/// The number behind a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .find(|(found, _)| *found == name)?
        .1
        .trim()
        .parse()
        .ok()
}

fn either(group: &Path, unified: &str, single: &str) -> Result<String, CgroupError> {
    match read(&group.join(unified)) {
        Err(CgroupError::Read { source, .. }) if is_gone(&source) => read(&group.join(single)),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn group(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn both_forms_are_read() {
        let unified = group(&[
            ("memory.max", "104857600\n"),
            ("memory.current", "50000000\n"),
            (
                "memory.stat",
                "anon 1\ninactive_file 15000000\nactive_file 5000000\n",
            ),
            ("memory.events", "oom 3\noom_kill 2\noom_group_kill 1\n"),
            ("memory.oom.group", "1\n"),
        ]);
        let path = unified.path();
        assert_eq!(limit(path).unwrap(), Some(100 << 20));
        assert_eq!(usage(path).unwrap(), 30_000_000);
        assert_eq!((oom_kills(path), dies_as_one(path)), (2, true));
        let single = group(&[
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory.usage_in_bytes", "50\n"),
            ("memory.stat", "inactive_file 1\ntotal_inactive_file 20\n"),
            (
                "memory.oom_control",
                "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
            ),
        ]);
        let path = single.path();
        assert_eq!(limit(path).unwrap(), None);
        assert_eq!(usage(path).unwrap(), 30);
        assert_eq!((oom_kills(path), dies_as_one(path)), (4, false));
        let endless = group(&[("memory.max", "max\n")]);
        assert_eq!(limit(endless.path()).unwrap(), None);
        assert!(limit(Path::new("/nowhere")).is_err());
    }
}
