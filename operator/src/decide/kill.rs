//! podKill: drawn when due, the draw written down before the first pod is touched, every pod
//! by its uid, until all of them are gone.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    ChaosExperiment,
    fault::{Fault, KillMethod, PodKill},
    status::{DrawnPod, FaultPhase, FaultStatus},
};

use super::{Observed, PodPresence, draw::Draw, guard, plan};

/// A pod to delete or evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kill {
    /// The pod's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid; a pod of the same name with another uid is left alone.
    pub uid: String,
    /// How long it may take to end by itself, in seconds; `None`: as long as it wants.
    pub grace_period_seconds: Option<i64>,
    /// Delete or evict.
    pub method: KillMethod,
    /// The run's deadline: from then on it is left alone, whoever was held up.
    pub before: Timestamp,
}

/// A try to remove a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// When it was made.
    pub at: Timestamp,
    /// What was said against it; `None`: it was accepted.
    pub refusal: Option<String>,
}

/// How long after a try the next one is made.
pub(crate) const AGAIN: SignedDuration = SignedDuration::from_secs(5);

/// The fault's moment has come.
pub(crate) fn is_due(experiment: &ChaosExperiment, fault: &Fault, now: Timestamp) -> bool {
    let start = experiment
        .status
        .as_ref()
        .and_then(|s| s.start_time.as_ref());
    start.is_some_and(|start| now >= plan::at(start.0, fault.start_after.unwrap_or_default()))
}

/// Moves a podKill fault on; returns the pods to remove now. `others`: what the run has drawn so far.
pub(crate) fn proceed(
    observed: &Observed,
    (fault, kill): (&Fault, &PodKill),
    (status, others): (&mut FaultStatus, &[DrawnPod]),
    now: Timestamp,
) -> Vec<Kill> {
    let experiment = &observed.experiment;
    if !is_due(experiment, fault, now)
        || matches!(status.phase, FaultPhase::Ended | FaultPhase::Failed)
    {
        return Vec::new();
    }
    if status.drawn_at.is_none() && !draw(observed, fault, (status, others), now) {
        return Vec::new();
    }
    let Some(pods) = &observed.pods else {
        return Vec::new();
    };
    let present = |uid: &str| pods.get(uid).copied();
    let there: Vec<_> = status
        .draw
        .iter()
        .filter(|p| present(&p.uid) == Some(PodPresence::There))
        .collect();
    let left = status
        .draw
        .iter()
        .filter(|p| present(&p.uid).is_some())
        .count();
    let is_tried = |uid: &str| {
        let last = observed.attempts.get(uid);
        last.is_some_and(|last| now < last.at + AGAIN)
    };
    let told = experiment.status.as_ref();
    let deadline = told.and_then(|s| s.deadline.as_ref());
    let before = deadline.map_or(Timestamp::MAX, |deadline| deadline.0);
    let kills = there
        .iter()
        .filter(|pod| !is_tried(&pod.uid))
        .map(|pod| Kill {
            namespace: plan::namespace(experiment),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            grace_period_seconds: kill
                .grace_period
                .map(|d| i64::try_from(d.get().as_secs()).unwrap_or(i64::MAX)),
            method: kill.method,
            before,
        })
        .collect();
    count(status, there.len(), left, refusal(observed, status));
    kills
}

/// Draws the pods; false where there are none to draw.
fn draw(
    observed: &Observed,
    fault: &Fault,
    (status, others): (&mut FaultStatus, &[DrawnPod]),
    now: Timestamp,
) -> bool {
    let Some(candidates) = observed.candidates.get(&fault.name) else {
        return false;
    };
    let draw = Draw {
        seed: plan::seed(&observed.experiment),
        fault: &fault.name,
        target: &fault.target,
        candidates,
        fleet: None,
    };
    let drawn = draw.draw(&[]).and_then(|drawn| {
        guard::reach(&observed.policy, drawn.iter().chain(others))?;
        Ok(drawn)
    });
    match drawn {
        Ok(drawn) => {
            status.desired = u32::try_from(drawn.len()).unwrap_or(u32::MAX);
            status.draw = drawn;
            status.drawn_at = Some(MicroTime(now));
            status.phase = FaultPhase::Active;
            true
        }
        Err(refusal) => {
            status.phase = FaultPhase::Failed;
            status.message = refusal.message;
            false
        }
    }
}

/// Counts what is seen: a pod that is leaving was hit, one that is gone has ended.
fn count(status: &mut FaultStatus, there: usize, left: usize, refusal: Option<&str>) {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    status.injected = status.desired - count(there);
    status.recovered = status.desired - count(left);
    if left == 0 {
        status.phase = FaultPhase::Ended;
        status.message = String::new();
        return;
    }
    status.message = match refusal {
        Some(why) if there > 0 => {
            format!("{there} of {} pods not removed yet: {why}", status.desired)
        }
        _ => format!("{left} of {} pods not gone yet", status.desired),
    };
}

/// What was said last against removing one of a fault's pods.
pub(crate) fn refusal<'a>(observed: &'a Observed, status: &FaultStatus) -> Option<&'a str> {
    let mut attempts = status
        .draw
        .iter()
        .filter_map(|pod| observed.attempts.get(&pod.uid));
    attempts.find_map(|attempt| attempt.refusal.as_deref())
}

/// The run is over: pods that are still there will not be removed any more.
pub(crate) fn give_up(status: &mut FaultStatus, refusal: Option<&str>) {
    if status.phase != FaultPhase::Active {
        return;
    }
    status.phase = FaultPhase::Failed;
    status.failed = status.desired - status.injected;
    let (ending, desired) = (status.injected - status.recovered, status.desired);
    let why = refusal.filter(|_| status.failed > 0);
    let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
    status.message = format!(
        "{} of {desired} pods were not removed{why}, {ending} are still ending",
        status.failed
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_that_are_left_say_what_was_said_against_their_removal() {
        let active = FaultStatus {
            phase: FaultPhase::Active,
            desired: 3,
            injected: 1,
            ..FaultStatus::default()
        };
        for (refusal, said) in [
            (
                Some("a budget"),
                "2 of 3 pods were not removed (a budget), 1 are still ending",
            ),
            (None, "2 of 3 pods were not removed, 1 are still ending"),
        ] {
            let mut status = active.clone();
            give_up(&mut status, refusal);
            assert_eq!((status.phase, status.failed), (FaultPhase::Failed, 2));
            assert_eq!(status.message, said);
        }
    }
}
