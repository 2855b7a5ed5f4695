//! The emergency stop: one `ConfigMap` ends every fault of the cluster, from whatever phase, and
//! lets none begin.

use std::io::{self, Write};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, PostParams};
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::{NAMESPACE, Run};

use super::lamp::Lamp;
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
/// By when every fault of the cluster is gone.
const PROMISED: Duration = Duration::from_secs(2);
/// How far apart looks around that moment may be.
const CLOSE: Duration = Duration::from_secs(1);
/// How often the stop is pulled where they are farther.
const TRIES: usize = 3;

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
    let hits = [&one, &two];
    let mut tries = 1..=TRIES;
    let stop = loop {
        ensure!(tries.next().is_some(), "looks were too far apart each time");
        let (stop, is_decided) = stopped(stage, hits)?;
        if is_decided {
            break stop;
        }
        drop(stop);
        for hit in hits {
            chaos_goes_on(&hit.scene)?;
        }
    };
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

/// Faults and the stop that ends them, and whether looks were close enough to say that it was in time.
fn stopped<'a>(stage: &'a Stage, hits: [&Hit<'a>; 2]) -> Result<(Stop<'a>, bool)> {
    let runs = [hits[0].begin()?, hits[1].begin()?];
    let (stop, asked, looks) = thread::scope(|scope| {
        let (shows, see) = mpsc::channel();
        let watched = hits.map(|hit| {
            let shows = shows.clone();
            scope.spawn(move || hit.watch(&shows))
        });
        drop(shows);
        for _ in hits {
            see.recv().context("nobody looks at the faults")?;
        }
        let (stop, asked) = Stop::pull(stage)?;
        let looks = watched.map(|looks| looks.join().unwrap_or_else(|_| bail!("panicked")));
        anyhow::Ok((stop, asked, looks))
    })?;
    let mut is_decided = true;
    for (looks, hit) in looks.into_iter().zip(hits) {
        is_decided &= in_time(&looks?, asked)?;
        is_decided &= was_lit_in_time(&hit.scene.lamp, asked)?;
    }
    for ((run, uid), hit) in runs.iter().zip(hits) {
        ended(run, "Aborted", "EmergencyStop")?;
        for pod in [&hit.scene.echo, &hit.busy, &hit.still] {
            let target = traces::target(stage, uid, pod)?;
            ensure!(target["state"] == "Recovered", "the agent says {target}");
        }
        hit.scene.is_as_before()?;
    }
    Ok((stop, is_decided))
}

/// What a look at the pods of a node has shown.
struct Look {
    begun: Instant,
    ended: Instant,
    /// What there is of faults; empty if they are over.
    shows: String,
}

/// Fails if a look that began when all was to be over still showed a fault. Whether the looks around
/// that moment were close enough to say that none was there.
fn in_time(looks: &[Look], asked: Instant) -> Result<bool> {
    for look in looks {
        let after = |moment: Instant| moment.saturating_duration_since(asked).as_secs_f64();
        let _ = writeln!(
            io::stderr(),
            "  {:.2} to {:.2} s after the stop: {:?}",
            after(look.begun),
            after(look.ended),
            look.shows
        );
    }
    let due = asked + PROMISED;
    let late = looks.iter().find(|l| l.begun >= due && !l.shows.is_empty());
    ensure!(
        late.is_none(),
        "a fault was there {:?} after the stop: {}",
        late.map(|look| look.begun.duration_since(asked)),
        late.map_or("", |look| &look.shows)
    );
    let [.., before, free] = looks else {
        bail!("too few looks")
    };
    let gap = (free.begun - before.begun).max(free.ended - free.begun);
    Ok(free.ended < due || gap <= CLOSE)
}

/// The same of an echo that answers again.
fn was_lit_in_time(lamp: &Lamp, asked: Instant) -> Result<bool> {
    let (dark, back) = lamp.silence(asked, SOON)?;
    let _ = writeln!(
        io::stderr(),
        "  silent {dark:.2?} and lit {back:.2?} after the stop"
    );
    ensure!(
        dark < PROMISED,
        "an echo was silent {dark:?} after the stop"
    );
    Ok(back < PROMISED || back.saturating_sub(dark) <= CLOSE)
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

    /// Looks at the pods until, once there was something to see, no pod has a table, a process of somebody
    /// else, or one that is held; what each look has shown. Says when there is something to see.
    fn watch(&self, shows: &Sender<()>) -> Result<Vec<Look>> {
        let stage = self.scene.space.stage;
        let node = stage.cluster.node(&self.scene.echo.node)?.at_once();
        let pods = [&self.scene.echo, &self.busy, &self.still];
        let checks = pods.iter().zip(self.processes).map(|(pod, processes)| {
            let first = stage.pid(pod)?;
            Ok(format!("look {first} {} {processes}", pod.uid))
        });
        let checks = checks.collect::<Result<Vec<_>>>()?.join("\n");
        let script = format!(
            "look() {{
                tables=$(nsenter --target $1 --net nft list tables) || exit 3
                [ -z \"$tables\" ] || echo \"$tables\"
                pids=$(cat /sys/fs/cgroup/kubepods*/pod$2/*/cgroup.procs /sys/fs/cgroup/kubepods*/*/pod$2/*/cgroup.procs 2>/dev/null)
                [ -n \"$pids\" ] || exit 3
                [ $(echo \"$pids\" | wc -l) -le $3 ] || echo more processes
                for pid in $pids; do ! grep -qs '^TracerPid:.*[1-9]' /proc/$pid/status || echo $pid is held; done
            }}
            {checks}"
        );
        let mut looks = Vec::new();
        until("the end of the faults", SOON * 2, || {
            let begun = Instant::now();
            // A look that fails shows nothing.
            let ran = node.run(&["sh", "-c", &script]).and_then(|ran| ran.text());
            let Ok(text) = ran else { return Ok(None) };
            if looks.is_empty() {
                if text.is_empty() {
                    return Ok(None);
                }
                shows.send(())?;
            }
            looks.push(Look {
                begun,
                ended: Instant::now(),
                shows: text.trim().replace('\n', ", "),
            });
            Ok(text.is_empty().then_some(()))
        })?;
        Ok(looks)
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
    let is_decided = was_lit_in_time(&far.lamp, asked)?;
    ensure!(is_decided, "packets were too far apart");
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
