//! The target of the torture: a pod that every kind of fault can be put on, and what it was like before.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::deck::{ECHOES, Fault, Kind, Round, SINK, VOLUMES};

use super::look::{Eye, Look};
use super::loses_target;
use crate::product::disk::{Disk, NODE};
use crate::product::io::disk;
use crate::product::lamp::Lamp;
use crate::product::scene::SOON;
use crate::product::stage::{Broken, Pod, Space, Stage, Wanted, at, kubectl};
use crate::product::traces;

/// By when after its window a fault must be gone, whatever was done: the longest lease, and a
/// loaded machine's patience.
pub(super) const BOUND: Duration = Duration::from_secs(8);
/// Packets that are away for so long are delayed.
const AWAY: Duration = Duration::from_millis(1500);
/// By how much the silence of a node may differ from pod to pod.
const ASTRAY: Duration = Duration::from_millis(500);
/// How long after it was first seen a container that was restarted may not listen yet.
const STARTED: Duration = Duration::from_secs(3);
/// The target's name, and its label.
const STORE: &str = "store";

/// What stays from round to round: a disk for the target, and a pod that is never one.
pub(super) struct Ground<'a> {
    pub(super) space: Space<'a>,
    disk: Disk<'a>,
    pub(super) other: Lamp,
}

/// The target, and what it was like before.
pub(super) struct Body<'a> {
    ground: &'a Ground<'a>,
    pod: Pod,
    /// One for each of its echoes.
    lamps: Vec<Lamp>,
    pub(super) eye: Eye,
    network: String,
    pub(super) before: Look,
}

impl<'a> Ground<'a> {
    pub(super) fn lay(stage: &'a Stage, test: &str) -> Result<Self> {
        let space = stage.space(test)?;
        let mut pods = space.pods(&[Wanted {
            name: "other",
            app: "other",
            node: NODE,
            args: &["echo"],
        }])?;
        let other = pods.pop().context("no other")?;
        Ok(Self {
            other: Lamp::light(stage, &other)?,
            disk: Disk::mount(&space)?,
            space,
        })
    }

    /// A new target in place of the one that there was.
    pub(super) fn body(&'a self) -> Result<Body<'a>> {
        let (space, stage) = (&self.space, self.space.stage);
        kubectl(
            stage,
            &[
                "delete",
                "pod",
                STORE,
                "--namespace",
                &space.name,
                "--ignore-not-found",
                "--timeout=60s",
            ],
        )?;
        stage.cluster.apply(&manifest(space, &self.disk.place))?;
        let pod = space.ready(STORE)?;
        let light = |port: &u16| Lamp::light_at(stage, &pod, *port);
        let eye = Eye {
            cluster: stage.cluster,
            node: pod.node.clone(),
            uid: pod.uid.clone(),
            data: self.disk.place.clone(),
            sink: at(&pod.v4, SINK).parse().context("the sink's address")?,
        };
        Ok(Body {
            lamps: ECHOES.iter().map(light).collect::<Result<_>>()?,
            network: stage.snapshot(&pod)?,
            before: until("a look at the target", SOON, || {
                let look = eye.look(&[])?;
                Ok(look.is_complete().then_some(look))
            })?,
            ground: self,
            pod,
            eye,
        })
    }
}

/// The target: echoes with a disk, memory and limits, and a sink beside them that only shares the
/// network and the volumes.
fn manifest(space: &Space<'_>, disk: &str) -> String {
    let container = |name: &str, args: &str, resources: &str| {
        format!(
            "{{name: {name}, image: 'windtunnel/sample:{}', imagePullPolicy: Never, args: [{args}], resources: {resources}, volumeMounts: [{{name: data, mountPath: {}}}, {{name: memory, mountPath: {}, subPath: part}}]}}",
            space.stage.windtunnel.images.tag, VOLUMES[0], VOLUMES[1]
        )
    };
    let echoes = ECHOES.map(|port| format!("--port={port}")).join(", ");
    format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: {STORE}, namespace: {}, labels: {{app: {STORE}}}}}
spec:
  nodeName: {NODE}
  terminationGracePeriodSeconds: 0
  volumes:
  - {{name: data, hostPath: {{path: {disk}}}}}
  - {{name: memory, emptyDir: {{medium: Memory, sizeLimit: 32Mi}}}}
  containers:
  - {}
  - {}
",
        space.name,
        container(
            "app",
            &format!("echo, {echoes}"),
            "{limits: {cpu: 500m, memory: 192Mi}, requests: {cpu: 10m, memory: 16Mi}}"
        ),
        container("beside", &format!("sink, --port={SINK}"), "{}"),
    )
}

/// Whether the target ran at a moment, by the looks before and after, and had not just been started.
fn ran(looks: &[Look], moment: Instant) -> bool {
    let next = looks.partition_point(|look| look.at < moment);
    let (past, after) = (&looks[..next], looks.get(next).or(looks.last()));
    let Some(app) = after.map(Look::app) else {
        return true;
    };
    let same = past.iter().rev().take_while(|look| look.app() == app);
    let life = &past[past.len() - same.count()..];
    let is_old = life.first().is_some_and(|look| look.at + STARTED <= moment);
    app.is_some() && (life.len() == past.len() || is_old)
}

impl Body<'_> {
    /// When a fault's effect was first and last seen since a moment, where the target ran and its node
    /// was not silent as a whole.
    pub(super) fn seen(
        &self,
        fault: &Fault,
        looks: &[Look],
        since: Instant,
    ) -> (Option<Instant>, Option<Instant>) {
        let (lamp, away) = match fault.kind {
            Kind::Delay => (0, Some(AWAY)),
            Kind::Loss => (1, None),
            Kind::Partition => (2, None),
            kind => {
                let mut all = looks.windows(2).filter(|pair| {
                    let before = if kind.kills() { &pair[0] } else { &self.before };
                    pair[1].shows(fault, before)
                });
                let first = all.next().map(|pair| pair[1].at);
                return (first, all.next_back().map(|pair| pair[1].at).or(first));
            }
        };
        // Where the pod beside it is silent as well, it is the node that is.
        let silent = self.ground.other.spans(since, away.unwrap_or(AWAY));
        let of_node = |moment: Instant| {
            let mut all = silent.iter();
            all.any(|(from, to)| *from <= moment + ASTRAY && moment <= *to + ASTRAY)
        };
        self.lamps[lamp].dim(since, away, |moment| ran(looks, moment) && !of_node(moment))
    }

    /// Fails unless, within the bound, nothing of a round is left, on the target or of it.
    pub(super) fn is_free(&self, round: &Round) -> Result<()> {
        let (space, stage) = (&self.ground.space, self.ground.space.stage);
        let is_alive = || -> Result<bool> {
            let arguments = [
                "pod",
                STORE,
                "--namespace",
                &space.name,
                "--ignore-not-found",
            ];
            let pod = stage.cluster.get(&arguments)?;
            Ok(pod["metadata"]["uid"] == self.pod.uid.as_str()
                && pod["metadata"]["deletionTimestamp"].is_null())
        };
        if is_alive()? {
            self.is_as_before(round)?;
        } else {
            ensure!(round.has(Kind::PodKill), "the target's pod is gone");
            self.has_gone()?;
        }
        for_good(|| {
            let open = traces::open_entries(stage, &self.pod)?;
            ensure!(open.is_empty(), "the journal still has {open:?}");
            Ok(())
        })
    }

    fn is_as_before(&self, round: &Round) -> Result<()> {
        let (space, stage) = (&self.ground.space, self.ground.space.stage);
        // It is kubelet that starts a container that was killed, with a pause if that happens again.
        let bound = if loses_target(round) { SOON * 2 } else { BOUND };
        self.nothing_is_left(bound, |look| {
            let mut left = look.remains(&self.before);
            if !loses_target(round) && look.app() != self.before.app() {
                left.push("another process in place of the target".to_owned());
            }
            Ok(left)
        })?;
        for lamp in &self.lamps {
            lamp.comes_back(Instant::now(), BOUND)?;
        }
        for_good(|| stage.unchanged(&self.pod, &self.network))?;
        for volume in VOLUMES {
            let calls = disk(space, "app", &format!("{volume}/file"), (3, 10_000))?;
            ensure!(calls.is_well(3), "{volume}: {calls:?}");
        }
        Ok(())
    }

    /// Fails unless a pod that is no more has left nothing on its node.
    fn has_gone(&self) -> Result<()> {
        let node = self.ground.space.stage.cluster.node(NODE)?;
        let script = format!("grep {} /proc/mounts || true", self.pod.uid);
        self.nothing_is_left(SOON * 2, |look| {
            let mut left = look.remains_of_dead(&self.before);
            let mounts = node.run(&["sh", "-c", &script])?.text()?;
            left.extend(mounts.lines().map(str::to_owned));
            Ok(left)
        })
    }

    fn nothing_is_left(
        &self,
        bound: Duration,
        left: impl Fn(&Look) -> Result<Vec<String>>,
    ) -> Result<()> {
        let stage = self.ground.space.stage;
        let look = || {
            let mut all = left(&self.eye.look(&VOLUMES)?)?;
            let injectors = stage.injectors(NODE)?;
            all.extend(injectors.iter().map(|pid| format!("injector {pid}")));
            anyhow::Ok(all)
        };
        let mut all = Vec::new();
        let waited = until("nothing that is left", bound, || {
            all = look()?;
            Ok(all.is_empty().then_some(()))
        });
        if waited.is_err() {
            for_good(|| {
                let left = look()?;
                ensure!(left.is_empty(), "left: {left:?}");
                Ok(())
            })?;
        }
        waited.with_context(|| format!("left: {all:?}"))
    }
}

/// Fails with what a look fails with; as broken where it fails for long after as well, which no stall of
/// a machine makes.
fn for_good(look: impl Fn() -> Result<()>) -> Result<()> {
    let Err(error) = look() else { return Ok(()) };
    match until("nothing that is left later", SOON, || Ok(look().ok())) {
        Ok(()) => Err(error),
        Err(_) => Err(error.context(Broken)),
    }
}
