//! Finding processes by what they are called with.

use std::fs;

use anyhow::{Context, Result};

/// Pids whose command line, its arguments joined by spaces, contains `pattern`; kernel threads,
/// this process and the init have none that counts.
pub(crate) fn matching(pattern: &str) -> Result<Vec<i32>> {
    let own = i32::try_from(std::process::id()).context("pid out of range")?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("list processes")? {
        let name = entry.context("list processes")?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        // A process that has ended in between reads as empty.
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        if pid != 1 && pid != own && line.contains(pattern) {
            found.push(pid);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cluster::poll::until;

    #[test]
    fn finds_a_program_by_its_arguments() {
        let seconds = format!("1000.{}", std::process::id());
        let mut child = std::process::Command::new("sleep")
            .arg(&seconds)
            .spawn()
            .unwrap();
        // It may be seen between its exec and the moment its arguments are in place.
        let found = until("a program", Duration::from_secs(5), || {
            let found = matching(&format!("sleep {seconds}"))?;
            Ok((!found.is_empty()).then_some(found))
        });
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.unwrap(), [i32::try_from(child.id()).unwrap()]);
    }
}
