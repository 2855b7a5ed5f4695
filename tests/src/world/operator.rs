//! A replica of the operator: leads or stands by, passes over the experiment, dies and stalls
//! between actions.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use jiff::SignedDuration;
use windtunnel_crds::ChaosExperiment;
use windtunnel_operator::cluster::Candidate;
use windtunnel_operator::decide::{self, Action, Agent, Observed, PodPresence, Policy, needs};
use windtunnel_operator::peers::PeerSet;

use super::api::{Api, Stale};
use super::laws::{Laws, Violation};
use super::wall;

/// How long a lease is good for.
const LEASE: Duration = Duration::from_secs(15);
/// After which time a dead replica is back.
const RESTART: Duration = Duration::from_secs(3);
/// How long an agent may be silent.
const SILENT: Duration = Duration::from_secs(30);

pub(super) struct Operator {
    number: usize,
    pub(super) passes: u64,
    /// Until when it may write.
    leads_until: Option<Duration>,
    /// When it is there again, if it is not.
    back_at: Option<Duration>,
    /// It dies after so many more actions.
    fuse: Option<u8>,
    /// It stalls before one of the next actions, for so long.
    stall: Option<(u8, Duration)>,
    stalled_until: Option<Duration>,
    /// What is left of the pass that it stalled in.
    rest: Option<(Box<ChaosExperiment>, VecDeque<Action>)>,
    /// The API server's version that the last pass saw.
    seen: u64,
    silent: Vec<String>,
    wake: Option<Duration>,
}

impl Operator {
    pub(super) fn new(number: usize) -> Self {
        Self {
            number,
            passes: 0,
            leads_until: None,
            back_at: None,
            fuse: None,
            stall: None,
            stalled_until: None,
            rest: None,
            seen: 0,
            silent: Vec::new(),
            wake: None,
        }
    }

    pub(super) fn due(&self) -> Option<Duration> {
        let all = [self.back_at, self.stalled_until, self.wake];
        all.into_iter().flatten().min()
    }

    pub(super) fn kill(&mut self, after: u8) {
        self.fuse = Some(after);
    }

    /// It dies, and is back at a moment.
    pub(super) fn die(&mut self, back_at: Duration) {
        *self = Self {
            back_at: Some(back_at),
            passes: self.passes,
            ..Self::new(self.number)
        };
    }

    pub(super) fn stall(&mut self, after: u8, stall: Duration) {
        self.stall = Some((after, stall));
    }

    pub(super) fn heal(&mut self) {
        self.fuse = None;
        self.stall = None;
        self.stalled_until = self.stalled_until.map(|_| Duration::ZERO);
        self.back_at = self.back_at.map(|_| Duration::ZERO);
    }

    fn leads(&self, now: Duration) -> bool {
        self.leads_until.is_some_and(|until| now < until)
    }

    /// Renews its lease, or takes it when the other has not for too long.
    pub(super) fn tick(&mut self, now: Duration, api: &mut Api) {
        if self.back_at.is_some() || self.stalled_until.is_some() || !api.is_up(now) {
            return;
        }
        let is_free = api.lease.is_none_or(|(holder, renewed)| {
            (holder == self.number && self.leads_until.is_some()) || now >= renewed + LEASE
        });
        if is_free {
            api.lease = Some((self.number, now));
            if !self.leads(now) {
                self.seen = 0;
            }
            self.leads_until = Some(now + LEASE);
        } else {
            self.leads_until = None;
        }
    }

    /// What is to be done now; whether there was anything.
    pub(super) fn turn(
        &mut self,
        now: Duration,
        api: &mut Api,
        laws: &mut Laws,
    ) -> Result<bool, Violation> {
        if let Some(back_at) = self.back_at {
            if now < back_at {
                return Ok(false);
            }
            self.back_at = None;
        }
        if let Some(until) = self.stalled_until {
            if now < until {
                return Ok(false);
            }
            self.stalled_until = None;
        }
        if !self.leads(now) || !api.is_up(now) {
            self.rest = None;
            return Ok(false);
        }
        if let Some((experiment, actions)) = self.rest.take() {
            self.act(now, api, laws, (experiment, actions))?;
            return Ok(true);
        }
        let silent = silent(now, api);
        let is_due = self.wake.is_some_and(|at| now >= at);
        if self.seen == api.version && !is_due && self.silent == silent {
            return Ok(false);
        }
        self.seen = api.version;
        self.silent = silent;
        api.sweep();
        let Some(experiment) = api.experiment.clone() else {
            self.wake = None;
            return Ok(false);
        };
        self.passes += 1;
        let observed = observe(now, api, experiment);
        let decision = decide::decide(&observed, wall(now));
        if decision != decide::decide(&observed, wall(now)) {
            return Err(Violation::new(
                now,
                "equal observations, different decisions",
            ));
        }
        self.wake = decision.wake_at.map(|at| {
            let start = wall(Duration::ZERO);
            at.duration_since(start).try_into().unwrap_or_default()
        });
        let is_busy = !decision.actions.is_empty();
        self.act(
            now,
            api,
            laws,
            (Box::new(observed.experiment), decision.actions.into()),
        )?;
        Ok(is_busy)
    }

    fn act(
        &mut self,
        now: Duration,
        api: &mut Api,
        laws: &mut Laws,
        (experiment, mut actions): (Box<ChaosExperiment>, VecDeque<Action>),
    ) -> Result<(), Violation> {
        while let Some(action) = actions.pop_front() {
            if let Some((left, stall)) = self.stall.take() {
                if left == 0 {
                    self.stalled_until = Some(now + stall);
                    actions.push_front(action);
                    self.rest = Some((experiment, actions));
                    return Ok(());
                }
                self.stall = Some((left - 1, stall));
            }
            if let Some(left) = self.fuse.take() {
                if left == 0 {
                    self.die(now + RESTART);
                    return Ok(());
                }
                self.fuse = Some(left - 1);
            }
            let Ok(done) = perform(now, api, laws, &experiment, action) else {
                // Decided anew on what is true now.
                self.seen = 0;
                return Ok(());
            };
            done?;
        }
        Ok(())
    }
}

fn silent(now: Duration, api: &Api) -> Vec<String> {
    let silent = api.beats.iter().filter(|(_, at)| now > **at + SILENT);
    silent.map(|(node, _)| node.clone()).collect()
}

fn observe(now: Duration, api: &Api, experiment: ChaosExperiment) -> Observed {
    let injections: Vec<_> = api.injections.values().cloned().collect();
    let needs = needs(&experiment, &injections, api.stopped.is_some(), wall(now));
    let pods = api.pods.iter().map(|p| (p.uid.clone(), PodPresence::There));
    let agent = |at: &Duration| Agent {
        live: now <= *at + SILENT,
        clean: true,
        known_version: true,
        version: "0.1.0".to_owned(),
        matched: BTreeMap::new(),
        effects: BTreeMap::new(),
    };
    Observed {
        experiment,
        injections,
        fleet: api
            .beats
            .iter()
            .map(|(node, at)| (node.clone(), agent(at)))
            .collect(),
        stop: api.stopped.is_some(),
        candidates: needs
            .candidates
            .into_iter()
            .map(|f| (f, api.selected()))
            .collect(),
        pods: needs.pods.then(|| pods.collect()),
        containers: needs.containers.then(|| {
            let containers = |p: &Candidate| (p.uid.clone(), p.containers.clone());
            api.pods.iter().map(containers).collect()
        }),
        peers: needs
            .peers
            .into_iter()
            .map(|f| (f, Ok(PeerSet::default())))
            .collect(),
        cluster_dns: Vec::new(),
        attempts: BTreeMap::new(),
        trouble: None,
        policy: Policy {
            release_namespace: "windtunnel".to_owned(),
            protected_namespaces: ["kube-system".to_owned()].into(),
            max_targets: 100,
            recheck_after: SignedDuration::from_mins(10),
            control_plane_grace: SignedDuration::from_secs(30),
        },
    }
}

fn perform(
    now: Duration,
    api: &mut Api,
    laws: &mut Laws,
    seen: &ChaosExperiment,
    action: Action,
) -> Result<Result<(), Violation>, Stale> {
    match action {
        Action::AddFinalizer => api.set_finalizer(seen, true)?,
        Action::RemoveFinalizer => api.set_finalizer(seen, false)?,
        Action::WriteStatus(status) => {
            laws.told(&status);
            return api.write_status(now, seen, *status);
        }
        Action::Create(injection) => {
            let result = Laws::creates(now, api, &injection);
            api.create(now, *injection)?;
            return Ok(result);
        }
        Action::Patch {
            name,
            resource_version,
            change,
        } => {
            api.patch(&name, resource_version.as_ref(), change)?;
        }
        Action::Delete { name, uid } => api.delete_injection(&name, uid.as_ref()),
        Action::Kill(kill) if wall(now) >= kill.before => {}
        Action::Kill(kill) => {
            let result = laws.kills(now, api, &kill);
            api.pods.retain(|p| p.uid != kill.uid);
            api.version += 1;
            return Ok(result);
        }
        Action::DeleteExperiment => api.delete(now, laws),
        Action::Notify(_) => {}
    }
    Ok(Ok(()))
}
