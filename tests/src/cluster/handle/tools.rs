//! kubectl, helm and images: what is done to a cluster by way of its own programs.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};

use super::Cluster;
use crate::cluster::node::PATIENCE;
use crate::cluster::poll::until;
use crate::cluster::{layout, netns};

/// What kubectl says when nothing was asked for yet.
const NOT_BEGUN: [&str; 2] = ["TLS handshake timeout", "error dialing backend"];
/// What it says when nobody knows what became of it.
const BROKEN_OFF: [&str; 4] = [
    "etcdserver: request timed out",
    "etcdserver: leader changed",
    "client connection lost",
    "unexpected EOF",
];
/// What may be done twice.
const REPEATABLE: [&str; 5] = ["get", "logs", "apply", "patch", "wait"];

impl Cluster {
    /// A command with the environment that kubectl, helm and other clients need.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("KUBECONFIG", self.kubeconfig())
            .env("KUBECACHEDIR", self.path("helm/kubectl"))
            .env("HELM_CACHE_HOME", self.path("helm/cache"))
            .env("HELM_CONFIG_HOME", self.path("helm/config"))
            .env("HELM_DATA_HOME", self.path("helm/data"));
        // Both programs by their own names, for shells and scripts.
        let path = std::env::var_os("PATH").unwrap_or_default();
        let paths = [self.path("bin")]
            .into_iter()
            .chain(std::env::split_paths(&path));
        if let Ok(path) = std::env::join_paths(paths) {
            command.env("PATH", path);
        }
        command
    }

    /// kubectl of the cluster's version, not yet run.
    #[must_use]
    pub fn kubectl_command(&self) -> Command {
        let mut command = self.command(self.path("bin/kubernetes"));
        command.arg("kubectl");
        command
    }

    /// helm, not yet run.
    #[must_use]
    pub fn helm_command(&self) -> Command {
        self.command(self.path("bin/helm"))
    }

    /// Runs kubectl to its end; again where an API server that stands still kept it from its work.
    ///
    /// # Errors
    /// When it cannot be run; how it ended is in the output.
    pub fn kubectl(&self, arguments: &[&str]) -> Result<Output> {
        patiently(arguments, || {
            self.run(self.kubectl_command().args(arguments))
        })
    }

    /// Runs helm to its end.
    ///
    /// # Errors
    /// When it cannot be run; how it ended is in the output.
    pub fn helm(&self, arguments: &[&str]) -> Result<Output> {
        self.run(self.helm_command().args(arguments))
    }

    /// Runs a command in the cluster's network.
    ///
    /// # Errors
    /// When it cannot be run; how it ended is in the output.
    pub fn run(&self, command: &mut Command) -> Result<Output> {
        netns::within(&self.namespace, || {
            let name = command.get_program().display().to_string();
            command.output().with_context(|| format!("run {name}"))
        })
    }

    /// What `kubectl get` says of something, as JSON; null for nothing.
    ///
    /// # Errors
    /// When kubectl refuses, or its answer cannot be read.
    pub fn get(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let mut all = vec!["get", "--output", "json"];
        all.extend(arguments);
        let answer = success(&self.kubectl(&all)?)?;
        if answer.trim().is_empty() {
            return Ok(serde_json::Value::Null);
        }
        serde_json::from_str(&answer).context("read kubectl's answer")
    }

    /// Applies a manifest.
    ///
    /// # Errors
    /// When kubectl refuses, with what it said.
    pub fn apply(&self, manifest: &str) -> Result<()> {
        let arguments = ["apply", "--filename", "-"];
        let applied = patiently(&arguments, || {
            let mut command = self.kubectl_command();
            self.run_with_input(command.args(arguments), manifest.as_bytes())
        })?;
        success(&applied).map(drop)
    }

    /// Runs a command in the cluster's network and writes to its standard input.
    ///
    /// # Errors
    /// When it cannot be run; how it ended is in the output.
    pub fn run_with_input(&self, command: &mut Command, input: &[u8]) -> Result<Output> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let name = command.get_program().display().to_string();
        let mut child = netns::within(&self.namespace, || {
            command.spawn().with_context(|| format!("run {name}"))
        })?;
        let stdin = child.stdin.take();
        thread::scope(|scope| {
            // A command may end without reading its input.
            scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
            child
                .wait_with_output()
                .with_context(|| format!("wait for {name}"))
        })
    }

    /// Runs a command in a container and returns what it wrote to standard output.
    ///
    /// # Errors
    /// When it did not succeed.
    pub fn pod_exec(
        &self,
        namespace: &str,
        pod: &str,
        container: &str,
        argv: &[&str],
    ) -> Result<String> {
        let mut arguments = vec![
            "exec",
            "--namespace",
            namespace,
            pod,
            "--container",
            container,
            "--",
        ];
        arguments.extend(argv);
        success(&self.kubectl(&arguments)?)
    }

    /// The log of a container.
    ///
    /// # Errors
    /// When there is no such container.
    pub fn logs(&self, namespace: &str, pod: &str, container: &str) -> Result<String> {
        success(&self.kubectl(&[
            "logs",
            "--namespace",
            namespace,
            pod,
            "--container",
            container,
        ])?)
    }

    /// Gives all nodes the images of an archive, now and whenever they boot again.
    ///
    /// # Errors
    /// When the archive cannot be read, or a node that is running does not take it.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        let name = archive
            .file_stem()
            .context("the archive has no name")?
            .to_string_lossy();
        let relative = format!("images/{name}.tar");
        let partial = self.path(&format!("images/{name}.partial"));
        fs::copy(archive, &partial).with_context(|| format!("copy {}", archive.display()))?;
        fs::rename(&partial, self.path(&relative)).context("keep the archive")?;
        for node in self.nodes()? {
            if node.is_running()? {
                node.hands().import(&layout::state(&relative))?;
            }
        }
        Ok(())
    }
}

/// Runs kubectl, for some time, until it is not an API server that stands still that it fails on. One
/// that refuses connections has been stopped, and that is told.
fn patiently(arguments: &[&str], mut run: impl FnMut() -> Result<Output>) -> Result<Output> {
    let mut last = None;
    let done = until("an answer to kubectl", PATIENCE, || {
        let output = run()?;
        if output.status.success() || !is_stall(arguments, &output.stderr) {
            return Ok(Some(output));
        }
        last = Some(output);
        Ok(None)
    });
    done.or_else(|error| last.ok_or(error))
}

/// Whether kubectl was kept from its work, and may be asked for it again.
fn is_stall(arguments: &[&str], stderr: &[u8]) -> bool {
    let said = String::from_utf8_lossy(stderr);
    let says = |texts: &[&str]| texts.iter().any(|text| said.contains(text));
    let has = |argument: &str| arguments.contains(&argument);
    if says(&["refused"]) || has("--request-timeout") {
        return false;
    }
    let verb = arguments.first().copied().unwrap_or_default();
    let is_repeatable = REPEATABLE.contains(&verb) || has("--ignore-not-found");
    says(&NOT_BEGUN) || (is_repeatable && says(&BROKEN_OFF))
}

/// Standard output of a command that succeeded.
///
/// # Errors
/// When it did not, with what it wrote to standard error.
pub fn success(output: &Output) -> Result<String> {
    if !output.status.success() {
        bail!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_done_twice_is_tried_again() {
        let shaken = b"Unable to connect to the server: net/http: TLS handshake timeout";
        let broken = b"Error from server: etcdserver: request timed out";
        let refused = b"error dialing backend: dial tcp: connection refused";
        for (arguments, stderr, again) in [
            (&["get", "pods"][..], &shaken[..], true),
            (&["create", "ns", "a"], shaken, true),
            (&["get", "pods", "--request-timeout", "2s"], shaken, false),
            (&["patch", "pod", "a"], broken, true),
            (&["create", "ns", "a"], broken, false),
            (&["delete", "ns", "a", "--ignore-not-found"], broken, true),
            (&["exec", "a", "--", "b"], broken, false),
            (&["exec", "a", "--", "b"], refused, false),
            (&["get", "pods"], b"Error from server (NotFound)", false),
        ] {
            assert_eq!(is_stall(arguments, stderr), again, "{arguments:?}");
        }
    }
}
