//! Whole passes against an API server in memory: what is written in which order, and that no
//! failure of any request changes how a run ends.

use clap::Parser as _;
use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kube::runtime::{reflector::store::Writer, watcher};
use serde_json::{Value, json};
use windtunnel_crds::{
    ChaosExperimentStatus, NodeAgent, NodeAgentSpec, NodeAgentStatus, NodeInjectionStatus,
    conditions::{ConditionType, condition},
    fault::KillMethod,
    injection::{Audit, InjectionPhase, TargetState, TargetStatus},
    status::Phase,
};

use super::*;
use crate::{
    Cli, Command,
    decide::{Action, Kill, testing},
    mock::{LOST, Refusal, Server, When},
};

pub(super) const EXPERIMENT: &str =
    "/apis/windtunnel.dev/v1alpha1/namespaces/shop/chaosexperiments/run";
const INJECTIONS: &str = "/apis/windtunnel.dev/v1alpha1/namespaces/windtunnel/nodeinjections";
const PODS: &str = "/api/v1/namespaces/shop/pods";
const SPEC: &str = "
duration: 1m
faults:
- name: slow
  target: {selector: {matchLabels: {app: orders}}}
  network: {delay: {latency: 100ms}, spare: []}
- name: one-less
  startAfter: 5s
  target: {selector: {matchLabels: {app: orders}}, count: 1}
  podKill: {method: Evict}
";

/// What a replica is started with.
pub(super) fn args() -> Args {
    let line = "operator run --namespace windtunnel --identity me";
    let Command::Run(args) = Cli::parse_from(line.split(' ')).command else {
        unreachable!("run was asked for")
    };
    args
}

/// One replica, the API server, and agents that do at once what they are told.
pub(super) struct Bench {
    pub(super) server: Server,
    pub(super) ctx: Ctx,
    cache: Writer<NodeInjection>,
    lead: watch::Sender<Option<Instant>>,
    pub(super) now: Timestamp,
    /// The cache of node injections is kept current.
    follows: bool,
    _triggered: mpsc::UnboundedReceiver<ObjectRef<ChaosExperiment>>,
}

impl Bench {
    pub(super) fn new() -> Self {
        let server = Server::default();
        let (triggers, triggered) = mpsc::unbounded_channel();
        let (lead, leadership) = watch::channel(Some(Instant::now() + Duration::from_hours(1)));
        let (reader, cache) = reflector::store();
        let (metrics, _) = Metrics::new();
        let (client, caches) = (server.client(), (reader, leadership));
        let ctx = Ctx::new(&args(), &client, caches, triggers, metrics);
        let mut experiment = testing::experiment(SPEC);
        experiment.metadata.finalizers = Some(vec!["example.com/other".to_owned()]);
        server.put(EXPERIMENT, &experiment);
        for (name, node) in [("p0", "node1"), ("p1", "node2")] {
            server.put(&format!("{PODS}/{name}"), &pod(name, node));
            let spec = NodeAgentSpec {
                node_name: node.to_owned(),
            };
            let mut agent = NodeAgent::new(node, spec);
            agent.status = Some(NodeAgentStatus {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                clean: true,
                ..NodeAgentStatus::default()
            });
            ctx.fleet
                .see(agent, Instant::now() + Duration::from_hours(1));
        }
        Self {
            server,
            ctx,
            cache,
            lead,
            now: Timestamp::now(),
            follows: true,
            _triggered: triggered,
        }
    }

    /// So many seconds into the run.
    pub(super) async fn after(seconds: i64) -> Self {
        let mut bench = Self::new();
        bench.settle().await;
        bench.advance(seconds);
        bench.settle().await;
        bench
    }

    pub(super) fn experiment(&self) -> ChaosExperiment {
        self.server.get(EXPERIMENT).unwrap()
    }

    pub(super) fn status(&self) -> ChaosExperimentStatus {
        self.experiment().status.unwrap_or_default()
    }

    pub(super) fn phase(&self) -> Phase {
        self.status().phase.unwrap_or_default()
    }

    pub(super) fn injections(&self) -> Vec<(String, NodeInjection)> {
        self.server.below(INJECTIONS)
    }

    /// One pass, on caches that are as current as they are to be.
    pub(super) async fn pass(&mut self) -> Result<Option<Timestamp>, Error> {
        if self.follows {
            self.cache.apply_watcher_event(&watcher::Event::Init);
            for (_, injection) in self.injections() {
                let event = watcher::Event::InitApply(injection);
                self.cache.apply_watcher_event(&event);
            }
            self.cache.apply_watcher_event(&watcher::Event::InitDone);
        }
        let experiment = self.ctx.recent.freshest(Arc::new(self.experiment()));
        let result = pass(&self.ctx, experiment.clone(), self.now).await;
        let trouble = result.as_ref().err().map(|error| error.trouble(self.now));
        self.ctx.recent.passed(&experiment, trouble);
        result
    }

    /// Passes, and agents that answer, until nothing is written any more.
    pub(super) async fn settle(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        for _ in 0..30 {
            let result = self.pass().await;
            let answered = self.agents();
            let writes = self.server.writes();
            if result.is_ok() && writes.is_empty() && !answered {
                return all;
            }
            all.extend(writes);
        }
        panic!("no end of writes: {all:#?}");
    }

    /// Agents report that they have done what they were told; whether there was anything new.
    pub(super) fn agents(&self) -> bool {
        let mut has_changed = false;
        for (path, mut injection) in self.injections() {
            let status = Some(report(&injection, self.now));
            if injection.status.as_ref().map(|s| s.phase) != status.as_ref().map(|s| s.phase) {
                injection.status = status;
                self.server.put(&path, &injection);
                has_changed = true;
            }
        }
        has_changed
    }

    pub(super) fn advance(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
    }
}

fn pod(name: &str, node: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "uid": format!("{name}-uid"),
            "labels": {"app": "orders"}},
        "spec": {"nodeName": node, "containers": [{"name": "app"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}],
            "podIPs": [{"ip": "192.0.2.1"}],
            "containerStatuses": [{"name": "app", "containerID": "containerd://1"}]},
    })
}

/// What an agent says that has done what it was told.
fn report(injection: &NodeInjection, now: Timestamp) -> NodeInjectionStatus {
    let spec = &injection.spec;
    let is_over = spec.abort
        || spec.start_time.as_ref().is_some_and(|start| {
            let all = spec.duration.get();
            now >= start.0 + SignedDuration::try_from(all).unwrap()
        });
    let (phase, state) = match &spec.start_time {
        _ if is_over => (InjectionPhase::Recovered, TargetState::Recovered),
        Some(_) => (InjectionPhase::Running, TargetState::Injected),
        None => (InjectionPhase::Prepared, TargetState::Prepared),
    };
    let stamp = MicroTime(now);
    let targets = spec.faults.iter().flat_map(|fault| {
        fault.targets.iter().map(|target| TargetStatus {
            fault: fault.name.clone(),
            pod_name: target.pod_name.clone(),
            pod_uid: target.pod_uid.clone(),
            state,
            injected_at: spec.start_time.clone(),
            reverted_at: is_over.then(|| stamp.clone()),
            ..TargetStatus::default()
        })
    });
    NodeInjectionStatus {
        phase,
        observed_generation: injection.metadata.generation,
        targets: targets.collect(),
        audit: is_over.then(|| Audit {
            checked_at: Some(stamp.clone()),
            ..Audit::default()
        }),
        ..NodeInjectionStatus::default()
    }
}

/// Plays the run from its creation to its end; the writes of it.
pub(super) async fn play(bench: &mut Bench) -> Vec<String> {
    let mut writes = bench.settle().await;
    for seconds in [3, 5, 6, 60, 1] {
        bench.advance(seconds);
        writes.extend(bench.settle().await);
    }
    writes
}

pub(super) fn conditions(status: &ChaosExperimentStatus) -> Vec<(&str, &str)> {
    let types = [
        ConditionType::Prepared,
        ConditionType::Injected,
        ConditionType::Recovered,
        ConditionType::Clean,
        ConditionType::Finished,
    ];
    let found = types
        .into_iter()
        .filter_map(|type_| condition(&status.conditions, type_));
    found
        .map(|c| (c.status.as_str(), c.reason.as_str()))
        .collect()
}

/// How every run here ends.
pub(super) fn is_as_it_should_be(bench: &Bench, told: &str) {
    let status = bench.status();
    assert_eq!(status.phase, Some(Phase::Completed), "{told}: {status:#?}");
    let expected = [
        ("True", "Prepared"),
        ("True", "ReadBack"),
        ("True", "Recovered"),
        ("True", "Checked"),
        ("True", "DeadlineReached"),
    ];
    assert_eq!(conditions(&status), expected, "{told}");
    assert_eq!(status.summary.injected, "3/3", "{told}");
    assert_eq!(status.summary.recovered, "3/3", "{told}");
    let finalizers = bench.experiment().metadata.finalizers;
    assert_eq!(
        finalizers,
        Some(vec!["example.com/other".to_owned()]),
        "{told}"
    );
    let pods = bench.server.below::<Value>(PODS);
    assert_eq!(pods.len(), 1, "{told}: one pod was evicted, one is left");
}

#[tokio::test]
async fn a_removal_that_was_held_up_beyond_the_deadline_is_not_made() {
    let bench = Bench::new();
    let kill = |before| {
        Action::Kill(Kill {
            namespace: "shop".to_owned(),
            name: "p0".to_owned(),
            uid: "p0-uid".to_owned(),
            grace_period_seconds: None,
            method: KillMethod::Delete,
            before,
        })
    };
    let made = act::Made {
        at: bench.now,
        since: Instant::now() - Duration::from_secs(10),
    };
    let experiment = bench.experiment();
    for (seconds, writes) in [(9, 0), (60, 1)] {
        let before = bench.now + SignedDuration::from_secs(seconds);
        let done = act::act(&bench.ctx, &experiment, vec![kill(before)], made).await;
        done.unwrap();
        let written = bench.server.writes();
        assert_eq!(written.len(), writes, "{written:?}");
    }
}

#[tokio::test]
async fn a_run_takes_no_more_writes_than_it_needs() {
    let mut bench = Bench::new();
    let writes = play(&mut bench).await;
    is_as_it_should_be(&bench, "undisturbed");
    let count = |what: &str| writes.iter().filter(|w| w.contains(what)).count();
    assert_eq!(count("POST /apis/windtunnel.dev"), 2, "{writes:#?}");
    assert_eq!(count("/eviction"), 1, "{writes:#?}");
    // Its finalizer is put on first and taken off last.
    assert_eq!(writes[0], format!("PATCH {EXPERIMENT}"));
    assert_eq!(writes.last(), Some(&format!("PATCH {EXPERIMENT}")));
    assert!(writes.len() < 20, "{writes:#?}");
}

/// Whatever request fails, once, before or after it was carried out, and however: the run ends as
/// if it had not.
#[tokio::test]
async fn no_failed_request_changes_how_a_run_ends() {
    let undisturbed = play(&mut Bench::new()).await.len();
    for (of, code, when) in [
        ("", 500, When::Before),
        ("", 500, When::After),
        ("", 403, When::Before),
        ("", 409, When::Before),
        ("", 429, When::Before),
        ("GET ", 500, When::Before),
        ("GET ", 403, When::Before),
    ] {
        for countdown in 0..undisturbed {
            let mut bench = Bench::new();
            bench.server.refuse(Refusal {
                countdown,
                stays: false,
                of,
                code,
                when,
            });
            play(&mut bench).await;
            is_as_it_should_be(&bench, &format!("{of}{code} {when:?} at {countdown}"));
        }
    }
}

#[tokio::test]
async fn a_lost_answer_holds_up_no_run_for_ever() {
    let mut bench = Bench::new();
    bench.ctx.patience = Duration::from_millis(20);
    bench.settle().await;
    // The second window is open, and its pods are asked for.
    bench.advance(6);
    bench.server.refuse(Refusal::always("GET ", LOST));
    let error = bench.pass().await.unwrap_err();
    assert!(chain(&error).contains("no answer in time"), "{error}");
    bench.advance(60);
    bench.settle().await;
    assert!(bench.phase().is_terminal(), "{:#?}", bench.status());
}

/// Whatever of the user's or the operator's own is refused for ever, an abort reaches the nodes.
#[tokio::test]
async fn an_abort_is_held_up_by_nothing() {
    for of in ["PUT status", "PATCH chaosexperiments", "DELETE ", "POST "] {
        for how in ["abort", "delete", "delete late"] {
            let mut bench = Bench::after(3).await;
            bench.server.refuse(Refusal::always(of, 500));
            let mut ended = bench.experiment();
            match how {
                "abort" => ended.spec.abort = true,
                _ => ended.metadata.deletion_timestamp = Some(Time(bench.now)),
            }
            bench.server.put(EXPERIMENT, &ended);
            // Nobody led when it was deleted, nor for some time after.
            if how == "delete late" {
                bench.advance(55);
            }
            let _ = bench.pass().await;
            for (_, injection) in bench.injections() {
                assert!(injection.spec.abort, "{how}, {of} refused");
            }
        }
    }
}

/// A deleted experiment goes, whatever is refused for ever but the removal of its finalizer.
#[tokio::test]
async fn a_deletion_ends_whatever_is_refused() {
    for of in ["PUT status", "PATCH nodeinjections", "DELETE "] {
        for seconds in [0, 3] {
            let mut bench = Bench::after(seconds).await;
            bench.server.refuse(Refusal::always(of, 500));
            let mut deleted = bench.experiment();
            deleted.metadata.deletion_timestamp = Some(Time(bench.now));
            bench.server.put(EXPERIMENT, &deleted);
            for wait in [0, 60, 21] {
                bench.advance(wait);
                for _ in 0..5 {
                    let _ = bench.pass().await;
                    bench.agents();
                }
            }
            let left = bench.experiment().metadata.finalizers;
            let others = Some(vec!["example.com/other".to_owned()]);
            assert_eq!(left, others, "{of} at {seconds} s");
        }
    }
}

#[tokio::test]
async fn a_cache_that_lags_makes_nothing_twice_and_nothing_lost() {
    let mut bench = Bench::new();
    bench.follows = false;
    for _ in 0..10 {
        bench.pass().await.unwrap();
        bench.agents();
    }
    let writes = bench.server.writes();
    let created = writes.iter().filter(|w| w.starts_with("POST")).count();
    assert_eq!(created, 2, "{writes:#?}");
    assert_eq!(bench.phase(), Phase::Running, "{:#?}", bench.status());
    assert_eq!(conditions(&bench.status())[1], ("True", "ReadBack"));
}

#[tokio::test]
async fn who_does_not_lead_writes_nothing() {
    let mut bench = Bench::new();
    bench.lead.send_replace(Some(Instant::now()));
    assert!(bench.pass().await.is_err());
    assert!(bench.server.writes().is_empty());
}

#[tokio::test]
async fn an_eviction_that_is_always_refused_holds_up_nobody() {
    for code in [403, 429, 500] {
        let mut bench = Bench::new();
        bench.server.refuse(Refusal::always("POST /eviction", code));
        for seconds in [0, 3, 5] {
            bench.advance(seconds);
            for _ in 0..10 {
                let _ = bench.pass().await;
                bench.agents();
            }
        }
        let status = bench.status();
        let fault = status.faults.iter().find(|f| f.name == "one-less").unwrap();
        assert!(
            fault.message.contains("not removed yet"),
            "{code}: {fault:#?}"
        );
        assert!(
            fault.message.contains("cannot evict a pod"),
            "{code}: {fault:#?}"
        );
        let asked = bench.server.writes();
        let asked = asked.iter().filter(|w| w.contains("eviction")).count();
        assert_eq!(asked, 1, "{code}: not asked for again at once");
        // Peers and ends of others are seen to meanwhile.
        for (_, injection) in bench.injections() {
            assert_eq!(injection.spec.start_time, status.start_time);
        }
        bench.advance(60);
        for _ in 0..10 {
            let _ = bench.pass().await;
            bench.agents();
        }
        assert_eq!(bench.phase(), Phase::Failed, "{code}");
        let slow = bench.status().faults[0].clone();
        assert_eq!((slow.injected, slow.recovered, slow.failed), (2, 2, 0));
    }
}

#[tokio::test]
async fn injections_that_cannot_be_made_end_the_run_in_time() {
    let mut bench = Bench::new();
    bench
        .server
        .refuse(Refusal::always("POST nodeinjections", 403));
    for (seconds, phase) in [(0, Phase::Preparing), (31, Phase::Failed)] {
        bench.advance(seconds);
        for _ in 0..5 {
            let _ = bench.pass().await;
        }
        assert_eq!(bench.phase(), phase);
        let message = bench.status().message;
        assert!(
            message.contains("cannot create a node injection"),
            "{message}"
        );
    }
}
