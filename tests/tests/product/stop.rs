//! The emergency stop: one `ConfigMap` ends every fault of the cluster, from whatever phase, and
//! lets none begin.

use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, PostParams};
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::{NAMESPACE, Run};

use super::scene::{GONE, SOON, Scene, Stopped, ended, silence};
use super::stage::{Pod, Stage, Test, Wanted, kubectl};
use super::traces;

pub(crate) const ROUGH: &[Test] = &[
    (
        "the_emergency_stop_ends_and_refuses_everything",
        the_emergency_stop_ends_and_refuses_everything,
    ),
    (
        "the_emergency_stop_ends_every_phase",
        the_emergency_stop_ends_every_phase,
    ),
];

const NAME: &str = "windtunnel-stop";
/// What is there on a node while the end of its faults is waited for.
const WATCHED: &str = "/tmp/windtunnel-watched";
/// By when every fault of the cluster is gone.
const PROMISED: Duration = Duration::from_secs(2);

/// The `ConfigMap` of the emergency stop, for as long as this value lives.
struct Stop<'a>(&'a Stage);

impl<'a> Stop<'a> {
    /// Makes it, and says when: between the request and its answer.
    fn pull(stage: &'a Stage) -> Result<(Self, Instant)> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("start a runtime")?;
        let asked = runtime.block_on(async {
            let api: Api<ConfigMap> = Api::namespaced(stage.cluster.client().await?, NAMESPACE);
            // With the connection open the request is all that is timed.
            api.get_opt(NAME).await.context("ask for the stop")?;
            let stop = serde_json::from_value(serde_json::json!({"metadata": {"name": NAME}}))?;
            let asked = Instant::now();
            let created = api.create(&PostParams::default(), &stop).await;
            created.context("create the stop")?;
            anyhow::Ok(asked)
        })?;
        Ok((Self(stage), asked))
    }
}

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        let arguments = ["delete", "configmap", NAME, "--namespace", NAMESPACE];
        // Where this fails everything that follows is refused, and says why.
        let _ = kubectl(self.0, &arguments);
    }
}

/// Four faults on each of two nodes: what they do in the targets' network namespaces and control
/// groups is over within the promised time; what comes later is refused, until the stop is gone.
fn the_emergency_stop_ends_and_refuses_everything(stage: &Stage) -> Result<()> {
    let one = Hit::set(stage, "the_emergency_stop_one", "node1")?;
    let two = Hit::set(stage, "the_emergency_stop_two", "node2")?;
    let runs = [one.begin()?, two.begin()?];
    let (stop, over) = thread::scope(|scope| {
        let watched = [&one, &two].map(|hit| scope.spawn(|| hit.is_over()));
        for hit in [&one, &two] {
            hit.is_watched()?;
        }
        let (stop, asked) = Stop::pull(stage)?;
        let mut over = Duration::ZERO;
        for seen in watched {
            let seen = seen.join().unwrap_or_else(|_| bail!("panicked"))?;
            over = over.max(seen.duration_since(asked));
        }
        for hit in [&one, &two] {
            over = over.max(hit.scene.lamp.comes_back(asked, SOON)?);
        }
        anyhow::Ok((stop, over))
    })?;
    let _ = writeln!(
        io::stderr(),
        "eight faults on two nodes were over {over:?} after the emergency stop"
    );
    ensure!(
        over < PROMISED,
        "the last fault ended {over:?} after the stop"
    );
    for ((run, uid), hit) in runs.iter().zip([&one, &two]) {
        ended(run, "Aborted", "EmergencyStop")?;
        for pod in [&hit.scene.echo, &hit.busy, &hit.still] {
            let target = traces::target(stage, uid, pod)?;
            ensure!(target["state"] == "Recovered", "the agent says {target}");
        }
        hit.scene.is_as_before()?;
    }
    let scene = &one.scene;
    let refused = scene.silence("refused", "20s", "0s")?;
    ended(&refused, "Aborted", "EmergencyStop")?;
    let message = refused.status()?["message"].to_string();
    ensure!(message.contains(NAME), "it says {message}");
    let asked = traces::injections(stage, &traces::uid(&scene.space, "refused")?)?;
    ensure!(asked.is_empty(), "a node was asked: {asked:?}");
    drop(stop);
    chaos_goes_on(scene)
}

/// The operator and the agents see the end of a stop each for themselves: the first tries may be early.
fn chaos_goes_on(scene: &Scene<'_>) -> Result<()> {
    let again = until("a run after the emergency stop", SOON * 2, || {
        let run = scene.silence("again", "60s", "0s")?;
        run.wait("Finished", Duration::from_secs(1)).ok();
        match run.phase()?.as_str() {
            "Running" | "Preparing" => Ok(Some(run)),
            _ => {
                run.delete(SOON)?;
                Ok(None)
            }
        }
    })?;
    again.wait("Injected", SOON)?;
    again.delete(SOON)?;
    scene.is_as_before()
}

/// Pods of a node that faults of four kinds are on.
struct Hit<'a> {
    scene: Scene<'a>,
    /// Its CPU time is burnt, and its memory held.
    busy: Pod,
    /// It stands still.
    still: Pod,
    /// How many processes each of them has by itself.
    processes: [usize; 3],
}

impl<'a> Hit<'a> {
    fn set(stage: &'a Stage, test: &str, node: &str) -> Result<Self> {
        let scene = Scene::set(stage, test, node)?;
        stage
            .cluster
            .node(node)?
            .run(&["rm", "-f", WATCHED])?
            .text()?;
        let wanted = ["busy", "still"].map(|name| Wanted {
            name,
            app: name,
            node,
            args: &["idle"],
        });
        let mut pods = scene.space.pods(&wanted)?;
        let (still, busy) = (pods.pop(), pods.pop());
        let (still, busy) = (still.context("no pod")?, busy.context("no pod")?);
        let count = |pod: &Pod| anyhow::Ok(stage.pids(node, &pod.uid)?.len());
        Ok(Self {
            processes: [count(&scene.echo)?, count(&busy)?, count(&still)?],
            scene,
            busy,
            still,
        })
    }

    /// Applies the run, and waits until its faults are in place.
    fn begin(&self) -> Result<(Run<'a>, String)> {
        let applied = Instant::now();
        let faults = "- name: busy
  target: {selector: {matchLabels: {app: busy}}}
  cpu: {load: 40, cores: 500m}
- name: full
  target: {selector: {matchLabels: {app: busy}}}
  memory: {size: 32Mi}
- name: still
  target: {selector: {matchLabels: {app: still}}}
  containerPause: {}
";
        let spec = format!("{}{faults}", silence("90s", "0s"));
        let run = self.scene.space.run("run", &spec)?;
        run.wait("Injected", SOON)?;
        self.scene.lamp.goes_out(applied, GONE)?;
        let uid = traces::uid(&self.scene.space, "run")?;
        Ok((run, uid))
    }

    /// Waits until somebody waits for the end of the faults.
    fn is_watched(&self) -> Result<()> {
        let node = self.scene.space.stage.cluster.node(&self.scene.echo.node)?;
        until("a look at the faults", SOON, || {
            let seen = node.run(&["test", "-e", WATCHED])?;
            Ok(seen.text().is_ok().then_some(()))
        })
    }

    /// Waits until no pod has a table, a process of somebody else, or one that is held; when that was.
    fn is_over(&self) -> Result<Instant> {
        let stage = self.scene.space.stage;
        let node = &self.scene.echo.node;
        let pods = [&self.scene.echo, &self.busy, &self.still];
        let checks = pods.iter().zip(self.processes).map(|(pod, processes)| {
            let first = stage.pid(pod)?;
            Ok(format!("is_free {first} {} {processes}", pod.uid))
        });
        let checks = checks.collect::<Result<Vec<_>>>()?.join(" && ");
        let script = format!(
            "is_free() {{
                tables=$(nsenter --target $1 --net nft list tables) && [ -z \"$tables\" ] || return 1
                pids=$(cat /sys/fs/cgroup/kubepods*/pod$2/*/cgroup.procs /sys/fs/cgroup/kubepods*/*/pod$2/*/cgroup.procs 2>/dev/null)
                [ -n \"$pids\" ] && [ $(echo \"$pids\" | wc -l) -le $3 ] || return 1
                for pid in $pids; do ! grep -q '^TracerPid:.*[1-9]' /proc/$pid/status || return 1; done
            }}
            ! ( {checks} ) || exit 1
            touch {WATCHED}
            until {checks}; do sleep 0.02; done
            rm {WATCHED}"
        );
        let run = stage.cluster.node(node)?.run(&["sh", "-c", &script])?;
        run.text().context("wait for the end of the faults")?;
        Ok(Instant::now())
    }
}

/// A node that stands still holds two runs up, one while it prepares and one while it recovers; on the
/// other a window is open, and one is not open yet.
fn the_emergency_stop_ends_every_phase(stage: &Stage) -> Result<()> {
    let held = Scene::set(stage, "the_emergency_stop_held_up", "node1")?;
    let far = Scene::set(stage, "the_emergency_stop_far", "node2")?;
    let early = Scene::set(stage, "the_emergency_stop_early", "node2")?;
    let waiting = early.silence("waiting", "90s", "80s")?;
    waiting.wait("Prepared", SOON)?;
    let (open, _) = far.silenced("open", "90s")?;
    let (recovering, _) = held.silenced("recovering", "90s")?;
    let stopped = Stopped::agent(stage, &held.echo.node)?;
    recovering.abort()?;
    let preparing = held.silence("preparing", "90s", "0s")?;
    for (run, phase) in [
        (&recovering, "Recovering"),
        (&preparing, "Preparing"),
        (&waiting, "Running"),
        (&open, "Running"),
    ] {
        run.until(phase, SOON, |status| status["phase"] == phase)?;
    }
    let (stop, asked) = Stop::pull(stage)?;
    let took = far.lamp.comes_back(asked, SOON)?;
    ensure!(took < PROMISED, "a fault ended {took:?} after the stop");
    for run in [&open, &waiting] {
        ended(run, "Aborted", "EmergencyStop")?;
    }
    preparing.until("the stop in its status", SOON, |status| {
        status["phase"] == "Recovering" && status["message"].to_string().contains(NAME)
    })?;
    stopped.resume()?;
    ended(&preparing, "Aborted", "EmergencyStop")?;
    // It had been ended before, by the user.
    ended(&recovering, "Aborted", "AbortRequested")?;
    drop(stop);
    for scene in [&far, &early, &held] {
        scene.is_as_before()?;
    }
    chaos_goes_on(&early)
}
