//! The Kubernetes components, `CoreDNS`, helm and a probe: one Go module, so that what they share
//! is compiled once. The versions are those of the module.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cluster::cache::{Cache, Inputs};
use crate::cluster::progress::{Job, output};

/// Files of the module.
const SOURCES: [(&str, &str); 5] = [
    ("go.mod", include_str!("../../../cluster/kubernetes/go.mod")),
    ("go.sum", include_str!("../../../cluster/kubernetes/go.sum")),
    (
        "main.go",
        include_str!("../../../cluster/kubernetes/main.go"),
    ),
    (
        "coredns/main.go",
        include_str!("../../../cluster/kubernetes/coredns/main.go"),
    ),
    (
        "probe/main.go",
        include_str!("../../../cluster/kubernetes/probe/main.go"),
    ),
];
/// Each program is named by the last part of its package.
const PACKAGES: [&str; 4] = [".", "./coredns", "./probe", "helm.sh/helm/v3/cmd/helm"];

/// The directory of the programs `kubernetes`, `coredns`, `helm` and `probe`.
pub(super) fn build(cache: &Cache) -> Result<PathBuf> {
    let go =
        output(Command::new("go").arg("version")).context("Go is needed to build Kubernetes")?;
    let flags = linker_flags()?;
    let mut inputs = Inputs::default()
        .note("compiler", go.trim())
        .note("flags", &flags);
    for (name, text) in SOURCES {
        inputs = inputs.file(name, text.as_bytes());
    }
    cache.artefact("kubernetes", &inputs, |staging| {
        compile(cache, &flags, staging)
    })
}

/// Versions that the programs report: without them kubelet names no version at all.
fn linker_flags() -> Result<String> {
    let (kubernetes, helm) = (required("k8s.io/kubernetes")?, required("helm.sh/helm/v3")?);
    let mut parts = kubernetes.trim_start_matches('v').split('.');
    let (major, minor) = (
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    );
    let version = "k8s.io/component-base/version";
    Ok(format!(
        "-s -w -X {version}.gitVersion={kubernetes} -X {version}.gitMajor={major} \
         -X {version}.gitMinor={minor} -X helm.sh/helm/v3/internal/version.version={helm}"
    ))
}

/// The version of a module that go.mod asks for.
fn required(module: &str) -> Result<&'static str> {
    let (_, go_mod) = SOURCES[0];
    go_mod
        .lines()
        .find_map(|line| {
            let mut words = line
                .split_whitespace()
                .skip_while(|&word| word == "require");
            (words.next() == Some(module))
                .then(|| words.next())
                .flatten()
        })
        .with_context(|| format!("go.mod does not require {module}"))
}

fn compile(cache: &Cache, flags: &str, staging: &Path) -> Result<()> {
    let source = staging.join("source");
    for (name, text) in SOURCES {
        let path = source.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&source)).context("create the module")?;
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    let log = cache.directory("logs")?.join("kubernetes.log");
    fs::write(&log, "").with_context(|| format!("write {}", log.display()))?;
    let job = Job {
        name: "Kubernetes",
        log: &log,
        unit: "packages",
        // What is not a package that was compiled is a word about downloads, or an error.
        is_step: |line| !line.contains(' '),
    };
    job.run(
        Command::new("go")
            .args(["build", "-v", "-trimpath", "-ldflags", flags, "-o"])
            .arg(staging)
            .args(PACKAGES)
            .current_dir(&source)
            .env("CGO_ENABLED", "0")
            .env("GOFLAGS", "-mod=readonly -buildvcs=false"),
    )?;
    fs::remove_dir_all(&source).context("remove the module")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_the_module() {
        let flags = linker_flags().unwrap();
        for part in [
            "version.gitVersion=v1.",
            "version.gitMajor=1 ",
            "internal/version.version=v3.",
        ] {
            assert!(flags.contains(part), "{part} is not in {flags}");
        }
        assert!(required("example.org/none").is_err());
    }
}
