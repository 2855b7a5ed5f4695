//! I/O faults, measured by calls on a volume from inside the target.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::stage::{Space, Stage, Test};

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[
    (
        "io_hangs_on_one_volume_of_one_container",
        io_hangs_on_one_volume_of_one_container,
    ),
    (
        "io_fails_as_asked_and_only_on_volumes",
        io_fails_as_asked_and_only_on_volumes,
    ),
];

const SOON: Duration = Duration::from_secs(40);

#[derive(Debug, Deserialize)]
pub(crate) struct Calls {
    millis: Vec<f64>,
    pub(crate) errors: Vec<i32>,
    hung: usize,
}

impl Calls {
    fn least(&self) -> f64 {
        self.millis.iter().copied().fold(f64::INFINITY, f64::min)
    }
}

#[derive(Debug, Deserialize)]
pub(crate) struct Disk {
    open: Calls,
    read: Calls,
    pub(crate) write: Calls,
}

impl Disk {
    /// Whether so many calls of each kind succeeded.
    pub(crate) fn is_well(&self, count: usize) -> bool {
        [&self.open, &self.read, &self.write]
            .iter()
            .all(|calls| calls.millis.len() == count)
    }
}

/// Calls on a file, from inside a container of the pod `store`; after one that takes longer than the wait no more.
pub(crate) fn disk(
    space: &Space<'_>,
    container: &str,
    file: &str,
    (count, wait): (usize, u64),
) -> Result<Disk> {
    let (count, wait) = (count.to_string(), wait.to_string());
    let argv = [
        "/windtunnel-sample",
        "disk",
        "--file",
        file,
        "--count",
        &count,
        "--wait-millis",
        &wait,
    ];
    let text = space
        .stage
        .cluster
        .pod_exec(&space.name, "store", container, &argv)?;
    serde_json::from_str(&text).with_context(|| text.clone())
}

/// A pod of two containers with the same two volumes.
fn store(space: &Space<'_>) -> Result<()> {
    let tag = &space.stage.windtunnel.images.tag;
    let container = |name: &str| {
        format!(
            "{{name: {name}, image: 'windtunnel/sample:{tag}', imagePullPolicy: Never, args: [idle], volumeMounts: [{{name: data, mountPath: /data}}, {{name: memory, mountPath: /memory, subPath: part}}]}}"
        )
    };
    space.stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: store, namespace: {space}, labels: {{app: store}}}}
spec:
  nodeName: node2
  terminationGracePeriodSeconds: 0
  volumes: [{{name: data, emptyDir: {{}}}}, {{name: memory, emptyDir: {{medium: Memory}}}}]
  containers:
  - {app}
  - {sidecar}
",
        space = space.name,
        app = container("app"),
        sidecar = container("sidecar"),
    ))?;
    space.ready("store").map(drop)
}

/// Calls on a volume of one container hang until the fault ends, and only those.
pub(crate) fn io_hangs_on_one_volume_of_one_container(stage: &Stage) -> Result<()> {
    let space = stage.space("io_hangs_on_one_volume_of_one_container")?;
    store(&space)?;
    for file in ["/data/file", "/memory/file", "/file"] {
        ensure!(
            disk(&space, "app", file, (3, 20_000))?.is_well(3),
            "before the fault"
        );
    }
    let run = space.run(
        "hang",
        "
duration: 90s
faults:
- name: hang
  target: {selector: {matchLabels: {app: store}}}
  io: {volume: /data, hang: {}}
- name: late
  target: {selector: {matchLabels: {app: store}}}
  io: {volume: /memory, latency: {delay: 300ms}}
- name: root
  target: {selector: {matchLabels: {app: store}}}
  io: {volume: /, latency: {delay: 200ms}}
",
    )?;
    run.wait("Injected", SOON)?;
    let hung = disk(&space, "app", "/data/file", (1, 2_000))?;
    ensure!(hung.open.hung == 1, "it does not hang: {hung:?}");
    let late = disk(&space, "app", "/memory/file", (3, 20_000))?;
    ensure!(
        late.open.least() >= 300.0 && late.read.least() >= 300.0,
        "not late: {late:?}"
    );
    let root = disk(&space, "app", "/file", (3, 20_000))?;
    ensure!(
        (200.0..300.0).contains(&root.open.least()),
        "the container's own file system is not late: {root:?}"
    );
    the_other_container_is_well(&space)?;
    let status = run.until("what was met", SOON, |status| {
        status["faults"][0]["effect"]["hit"].as_i64() > Some(0)
    })?;
    let message = status["faults"][0]["message"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    ensure!(
        message.contains("covers opens"),
        "the coverage is not told: {status}"
    );
    thread::scope(|scope| {
        let waiting = scope.spawn(|| disk(&space, "app", "/data/file", (1, 60_000)));
        // It hangs, or comes too late to: both must return.
        run.abort()?;
        run.wait("Finished", SOON)?;
        let waited = waiting.join().map_err(|_| anyhow::anyhow!("a panic"))??;
        ensure!(waited.is_well(1), "a call did not go on: {waited:?}");
        Ok(())
    })?;
    ensure!(
        disk(&space, "app", "/memory/file", (3, 20_000))?.is_well(3),
        "after the fault"
    );
    ensure!(
        run.condition("Clean")?.0 == "True",
        "status: {}",
        run.status()?
    );
    Ok(())
}

fn the_other_container_is_well(space: &Space<'_>) -> Result<()> {
    for file in ["/data/file", "/memory/file", "/file"] {
        let other = disk(space, "sidecar", file, (3, 20_000))?;
        ensure!(
            other.is_well(3) && other.open.least() < 200.0,
            "the other container is hit: {file}: {other:?}"
        );
    }
    Ok(())
}

/// Calls fail with the errno that was asked for; a path that is no volume is refused.
pub(crate) fn io_fails_as_asked_and_only_on_volumes(stage: &Stage) -> Result<()> {
    let space = stage.space("io_fails_as_asked_and_only_on_volumes")?;
    store(&space)?;
    let run = space.run(
        "error",
        "
duration: 60s
faults:
- name: full
  target: {selector: {matchLabels: {app: store}}}
  io: {volume: /data, error: {errno: ENOSPC}, operations: [Open], percent: 50}
",
    )?;
    run.wait("Injected", SOON)?;
    let failed = disk(&space, "app", "/data/file", (10, 20_000))?;
    ensure!(
        failed.open.errors == [28; 5] && failed.open.millis.len() == 5,
        "half of the opens are to fail with ENOSPC: {failed:?}"
    );
    run.abort()?;
    run.wait("Finished", SOON)?;
    ensure!(
        disk(&space, "app", "/data/file", (3, 20_000))?.is_well(3),
        "after the fault"
    );
    for (name, volume) in [
        ("proc", "/proc"),
        ("inside", "/data/sub"),
        ("up", "/data/../.."),
    ] {
        let refused = space.run(
            name,
            &format!(
                "
duration: 60s
faults:
- name: refused
  target: {{selector: {{matchLabels: {{app: store}}}}}}
  io: {{volume: {volume}, hang: {{}}}}
"
            ),
        )?;
        refused.wait("Finished", SOON)?;
        let status = refused.status()?;
        ensure!(
            status["phase"] == "Failed" && status.to_string().contains("NotAVolume"),
            "{volume} is not refused: {status}"
        );
    }
    Ok(())
}
