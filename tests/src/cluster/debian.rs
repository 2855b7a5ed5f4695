//! What comes from Debian: packages that the machine lacks, the kernel's source, and programs that
//! images are made of.
//!
//! Installing is the only change that the harness makes to the machine. What is only fetched is
//! fetched with a configuration and lists of the harness's own: the machine's stay as they are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::Cache;
use super::progress::{Job, output, say};

/// Needed to build the parts.
pub(crate) const BUILD: [&str; 9] = [
    "bc",
    "bison",
    "flex",
    "gcc",
    "libc6-dev",
    "libelf-dev",
    "make",
    "python3-minimal",
    "xz-utils",
];
/// Needed to run the cluster, and what is tested on its nodes.
pub(crate) const RUN: [&str; 7] = [
    "containerd",
    "containernetworking-plugins",
    "e2fsprogs",
    "iproute2",
    "iputils-ping",
    "nftables",
    "runc",
];

/// Where the kernel's source is from.
const KERNEL_SUITE: &str = "trixie-backports";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Installs those of the packages that are missing, and says so.
pub(crate) fn ensure_installed(packages: &[&str]) -> Result<()> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    say(&format!(
        "installing Debian packages: {}",
        missing.join(" ")
    ));
    let apt = || {
        let mut command = Command::new("apt-get");
        // Offline: a service manager is not asked to start what is installed.
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("SYSTEMD_OFFLINE", "1");
        command
    };
    output(apt().arg("update")).context("update the package lists")?;
    output(
        apt()
            .args(["install", "--yes", "--no-install-recommends"])
            .args(&missing),
    )
    .with_context(|| format!("install {}", missing.join(" ")))?;
    Ok(())
}

fn missing<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    // Fails for a name that was never installed, and still prints the others.
    let found = Command::new("dpkg-query")
        .args(["--show", "--showformat", "${Package} ${db:Status-Status}\n"])
        .args(packages)
        .output()
        .context("run dpkg-query (the harness needs a Debian system)")?;
    let found = String::from_utf8_lossy(&found.stdout).into_owned();
    let installed: BTreeSet<&str> = found
        .lines()
        .filter_map(|line| line.strip_suffix(" installed"))
        .collect();
    Ok(packages
        .iter()
        .copied()
        .filter(|package| !installed.contains(package))
        .collect())
}

/// A source package of the kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KernelSource {
    pub(crate) package: String,
    pub(crate) version: String,
}

/// The package chosen when the cache was new; its name is part of the kernel's inputs, so looking
/// for a newer one is left to who empties the cache.
pub(crate) fn kernel_source(cache: &Cache) -> Result<KernelSource> {
    let path = cache.directory("sources")?.join("kernel.json");
    if let Ok(text) = fs::read_to_string(&path) {
        return serde_json::from_str(&text).with_context(|| format!("read {}", path.display()));
    }
    say(&format!(
        "looking for the newest kernel source in {KERNEL_SUITE}"
    ));
    let apt = Apt::open(cache, KERNEL_SUITE)?;
    let source = apt.newest_kernel()?;
    let text = serde_json::to_string(&source).context("write the kernel's version")?;
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(source)
}

/// Fetches the source package, once, and returns its file.
pub(crate) fn download(cache: &Cache, source: &KernelSource) -> Result<PathBuf> {
    let directory = cache.directory("sources")?;
    let existing = |directory: &Path| -> Result<Option<PathBuf>> {
        let prefix = format!("{}_", source.package);
        let escaped = source.version.replace(':', "%3a");
        for entry in fs::read_dir(directory).context("list the sources")? {
            let name = entry.context("list the sources")?.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(&prefix) && name.contains(&escaped) && name.ends_with(".deb") {
                return Ok(Some(directory.join(name.as_ref())));
            }
        }
        Ok(None)
    };
    if let Some(file) = existing(&directory)? {
        return Ok(file);
    }
    let apt = Apt::open(cache, KERNEL_SUITE)?;
    let partial = directory.join("partial");
    fs::create_dir_all(&partial).context("create the download directory")?;
    let log = cache.directory("logs")?.join("kernel-source.log");
    let job = Job {
        name: "kernel source",
        log: &log,
        unit: "downloads",
        is_step: |line| line.starts_with("Get:"),
    };
    let wanted = format!("{}={}", source.package, source.version);
    job.run(
        apt.command("apt-get")
            .arg("download")
            .arg(&wanted)
            .current_dir(&partial),
    )?;
    let file = existing(&partial)?.context("apt-get download left no package")?;
    let target = directory.join(file.file_name().context("package without a name")?);
    fs::rename(&file, &target).with_context(|| format!("keep {}", target.display()))?;
    Ok(target)
}

/// The name of the suite that this machine runs.
pub(crate) fn own_suite() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(name
        .context("/etc/os-release names no suite")?
        .trim_matches('"')
        .to_owned())
}

/// Unpacks packages of the machine's own suite below a directory, with all that they need but what
/// is not wanted. Nothing is installed.
pub(crate) fn unpack(
    cache: &Cache,
    packages: &[&str],
    is_wanted: impl Fn(&str) -> bool,
    directory: &Path,
) -> Result<()> {
    let apt = Apt::open(cache, &own_suite()?)?;
    // Where nothing is installed, all that is needed would be, in the suite's own versions.
    let apt_get = || {
        let mut command = apt.command("apt-get");
        command.args(["-o", "Dir::State::status=/dev/null"]);
        command
    };
    let all = output(
        apt_get()
            .args(["install", "--simulate", "--no-install-recommends"])
            .args(packages),
    )?;
    let names = all
        .lines()
        .filter_map(|line| line.strip_prefix("Inst ")?.split(' ').next())
        .filter(|name| is_wanted(name));
    let downloads = directory.with_extension("packages");
    fs::create_dir_all(&downloads).context("create the download directory")?;
    let log = cache.directory("logs")?.join("packages.log");
    Job {
        name: packages.first().copied().unwrap_or_default(),
        log: &log,
        unit: "downloads",
        is_step: |line| line.starts_with("Get:"),
    }
    .run(
        apt_get()
            .arg("download")
            .args(names)
            .current_dir(&downloads),
    )?;
    for entry in fs::read_dir(&downloads).context("list the packages")? {
        let package = entry.context("list the packages")?.path();
        output(
            Command::new("dpkg-deb")
                .arg("--extract")
                .arg(package)
                .arg(directory),
        )?;
    }
    fs::remove_dir_all(&downloads).context("remove the packages")
}

/// apt with a configuration and lists of its own.
struct Apt {
    lists: PathBuf,
    sources: PathBuf,
}

impl Apt {
    fn open(cache: &Cache, suite: &str) -> Result<Self> {
        let directory = cache.directory(&format!("sources/apt/{suite}"))?;
        let apt = Self {
            lists: directory.join("lists"),
            sources: directory.join("sources.list"),
        };
        fs::create_dir_all(&apt.lists).context("create the package lists")?;
        let line = format!("deb [signed-by={KEYRING}] {} {suite} main\n", mirror()?);
        fs::write(&apt.sources, line).context("write the apt configuration")?;
        output(apt.command("apt-get").arg("update"))
            .with_context(|| format!("read the package lists of {suite}"))?;
        Ok(apt)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        for (option, value) in [
            ("Dir::Etc::sourcelist", self.sources.as_path()),
            ("Dir::Etc::sourceparts", Path::new("/dev/null")),
            ("Dir::State::lists", self.lists.as_path()),
            ("APT::Sandbox::User", Path::new("root")),
        ] {
            command
                .arg("-o")
                .arg(format!("{option}={}", value.display()));
        }
        command
    }

    fn newest_kernel(&self) -> Result<KernelSource> {
        let found = output(self.command("apt-cache").args([
            "search",
            "--names-only",
            "^linux-source-[0-9.]+$",
        ]))?;
        let package = found
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .max_by_key(|name| version_key(name.trim_start_matches("linux-source-")))
            .with_context(|| format!("{KERNEL_SUITE} has no kernel source"))?
            .to_owned();
        let policy = output(
            self.command("apt-cache")
                .arg("show")
                .arg("--no-all-versions")
                .arg(&package),
        )?;
        let version = policy
            .lines()
            .find_map(|line| line.strip_prefix("Version: "))
            .with_context(|| format!("{package} has no version"))?;
        Ok(KernelSource {
            version: version.to_owned(),
            package,
        })
    }
}

fn version_key(version: &str) -> Vec<u32> {
    version
        .split('.')
        .map(|part| part.parse().unwrap_or(0))
        .collect()
}

/// The machine's own mirror of Debian, from its apt configuration.
fn mirror() -> Result<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|entry| entry.path()));
    }
    files.sort();
    let found = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .find_map(|text| mirror_in(&text));
    match found {
        Some(mirror) => Ok(mirror),
        None => bail!("no Debian mirror in /etc/apt/sources.list or sources.list.d"),
    }
}

/// The first archive in a file of either format that is not the security archive.
fn mirror_in(text: &str) -> Option<String> {
    text.lines()
        .filter(|line| line.starts_with("URIs:") || line.starts_with("deb "))
        .flat_map(str::split_whitespace)
        .find(|word| word.contains("://") && !word.contains("security"))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_mirror_in_both_formats() {
        let deb822 = "Types: deb\nURIs: http://mirror.example/debian-security\nSuites: x\n\n\
                      URIs: http://mirror.example/debian\n";
        let one_line = "# deb http://old.example/debian x main\n\
                        deb [signed-by=/k] http://mirror.example/debian bookworm main\n";
        for text in [deb822, one_line] {
            assert_eq!(
                mirror_in(text).as_deref(),
                Some("http://mirror.example/debian")
            );
        }
    }

    #[test]
    fn versions_are_ordered_by_number() {
        assert!(version_key("6.12") > version_key("6.9"));
        assert!(version_key("7.2") > version_key("6.12"));
    }
}
