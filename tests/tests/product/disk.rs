//! Disk faults, measured by writes from inside the target.

use std::time::Duration;

use anyhow::{Result, ensure};
use windtunnel_tests::cluster::{Signal, poll::until};

use super::io::disk;
use super::stage::{Space, Stage, Test};
use super::traces;

/// Tests that touch only what is in their own namespace.
pub(crate) const GENTLE: &[Test] = &[(
    "a_disk_is_full_and_has_its_space_back",
    a_disk_is_full_and_has_its_space_back,
)];

const SOON: Duration = Duration::from_mins(1);
/// The node that they are on.
pub(crate) const NODE: &str = "node2";
/// What a write is told where there is no space.
const ENOSPC: i32 = 28;

/// A file system of the node's, on a disk of its own; it is unmounted with this value.
pub(crate) struct Disk<'a> {
    stage: &'a Stage,
    /// Where it is mounted.
    pub(crate) place: String,
}

impl<'a> Disk<'a> {
    /// Makes one for a test.
    pub(crate) fn mount(space: &Space<'a>) -> Result<Self> {
        let disk = Self {
            stage: space.stage,
            place: format!("/mnt/{}", space.name),
        };
        let (place, image) = (&disk.place, format!("/var/lib/{}.img", space.name));
        disk.run(&format!(
            "mkdir -p {place} && truncate -s 64M {image} && mkfs.ext4 -q {image} && mount -o loop {image} {place} && rm {image}"
        ))?;
        Ok(disk)
    }

    fn run(&self, script: &str) -> Result<String> {
        let node = self.stage.cluster.node(NODE)?;
        node.run(&["sh", "-c", script])?.text()
    }
}

impl Drop for Disk<'_> {
    fn drop(&mut self) {
        // Nobody else uses the place; what is left ends with the node.
        let _ = self.run(&format!("umount -l {}", self.place));
    }
}

/// A pod with a volume on that disk, one in memory, and one on the node's own disk.
fn store(space: &Space<'_>, disk: &Disk<'_>) -> Result<()> {
    space.stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: store, namespace: {space}, labels: {{app: store}}}}
spec:
  nodeName: {NODE}
  terminationGracePeriodSeconds: 0
  volumes:
  - {{name: data, hostPath: {{path: {place}}}}}
  - {{name: memory, emptyDir: {{medium: Memory, sizeLimit: 16Mi}}}}
  - {{name: nodes, emptyDir: {{sizeLimit: 64Mi}}}}
  containers:
  - name: app
    image: 'windtunnel/sample:{tag}'
    imagePullPolicy: Never
    args: [idle]
    resources: {{limits: {{memory: 128Mi}}, requests: {{memory: 16Mi}}}}
    volumeMounts: [{{name: data, mountPath: /data}}, {{name: memory, mountPath: /memory}}, {{name: nodes, mountPath: /nodes}}]
",
        space = space.name,
        place = disk.place,
        tag = space.stage.windtunnel.images.tag,
    ))
}

/// Fails unless a new file can be written on a volume, or cannot for want of space.
fn writes(space: &Space<'_>, file: &str, is_full: bool) -> Result<()> {
    let calls = disk(space, "app", file, (1, 20_000))?;
    let errors = if is_full { vec![ENOSPC] } else { Vec::new() };
    ensure!(calls.write.errors == errors, "{file}: {calls:?}");
    Ok(())
}

/// A disk and a volume in memory are full while the fault lasts, and have their space back when it is
/// deleted, and when its injectors are killed; the node's own disk is refused.
fn a_disk_is_full_and_has_its_space_back(stage: &Stage) -> Result<()> {
    let space = stage.space("a_disk_is_full_and_has_its_space_back")?;
    let own = Disk::mount(&space)?;
    store(&space, &own)?;
    let pod = space.ready("store")?;
    for volume in ["/data", "/memory"] {
        writes(&space, &format!("{volume}/before"), false)?;
    }
    let fault = |name: &str, volume: &str| {
        format!(
            "
- name: {name}
  target: {{selector: {{matchLabels: {{app: store}}}}}}
  diskFill: {{volume: {volume}, percent: 100}}"
        )
    };
    let spec = format!(
        "duration: 3m\nfaults:{}{}",
        fault("full", "/data"),
        fault("memory", "/memory")
    );
    for round in ["deleted", "killed"] {
        let run = space.run(round, &spec)?;
        run.wait("Injected", SOON)?;
        let status = run.until("what was taken", SOON, |status| {
            let bytes = |n: usize| status["faults"][n]["effect"]["bytes"].as_i64();
            bytes(0) > Some(40 << 20) && bytes(1) > Some(14 << 20)
        })?;
        for volume in ["/data", "/memory"] {
            writes(&space, &format!("{volume}/{round}"), true)
                .map_err(|e| e.context(format!("status: {status}")))?;
        }
        if round == "deleted" {
            run.delete(SOON)?;
        } else {
            while let Ok(injector) = traces::injector(stage, &pod) {
                stage
                    .cluster
                    .node(NODE)?
                    .signal(injector, Signal::SIGKILL)?;
                traces::process_ends(stage, NODE, injector)?;
                until("the end is written down", SOON, || {
                    let next = traces::injector(stage, &pod).ok();
                    Ok((next != Some(injector)).then_some(()))
                })?;
            }
        }
        until("the space is back", SOON, || {
            let all =
                ["/data", "/memory"].map(|v| writes(&space, &format!("{v}/after-{round}"), false));
            Ok(all.iter().all(Result::is_ok).then_some(()))
        })?;
        if round == "killed" {
            run.wait("Finished", SOON)?;
            let status = run.status()?;
            ensure!(status["faults"][0]["interrupted"] == 1, "status: {status}");
            ensure!(run.condition("Clean")?.0 == "True", "status: {status}");
        }
    }
    let refused = space.run(
        "refused",
        &format!("duration: 1m\nfaults:{}", fault("nodes", "/nodes")),
    )?;
    refused.wait("Finished", SOON)?;
    let status = refused.status()?;
    ensure!(
        status["phase"] == "Failed" && status.to_string().contains("NodeDisk"),
        "the node's own disk is not refused: {status}"
    );
    Ok(())
}
