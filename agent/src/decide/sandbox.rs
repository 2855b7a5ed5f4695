//! A pod whose processes have all ended: it, or only its sandbox, is gone.

use windtunnel_crds::injection::TargetState;

use super::{Now, Observed};
use crate::{
    model::{Ended, Entry, Key},
    supervisor::{Leave, Live},
};

/// Why a fault on the network ends where a pod is given another network.
pub(super) const REPLACED: (&str, &str) = (
    "SandboxReplaced",
    "the pod was given another sandbox, whose network has no fault",
);

/// All processes of the pod have ended, and its network with them. Whether that is the pod's end, or its
/// sandbox's, is not known yet.
pub(super) fn is_ending(o: &Observed, key: &Key, live: &Live) -> bool {
    let is_known = o.deserted.contains(key) || o.revived.contains(key);
    live.leave == Some(Leave::PodEnded) && !is_known && o.forbidden(key).is_none()
}

/// What was taken for the end of the pod was the end of its sandbox: the pod has another by now, with a
/// network of its own, that the fault was never on.
pub(super) fn replaced(
    o: &Observed,
    key: &Key,
    (entry, ended): (&Entry, &Ended),
    now: Now,
) -> Option<Ended> {
    let is_open = entry.window.is_some_and(|window| now.boot < window.end);
    let was_hit = ended.outcome == TargetState::Gone && ended.injected_at.is_some();
    let is_wanted = o.fault(key).is_some() && o.forbidden(key).is_none();
    let is_on_network = entry.network().is_some() && is_wanted;
    (is_open && was_hit && is_on_network && o.revived.contains(key)).then(|| Ended {
        outcome: TargetState::Interrupted,
        reason: REPLACED.0.to_owned(),
        message: REPLACED.1.to_owned(),
        ..ended.clone()
    })
}

#[cfg(test)]
mod tests {
    use windtunnel_crds::residue::ReclaimedBy;

    use super::*;
    use crate::{decide::testing::Sim, testing::key};

    #[test]
    fn a_pod_that_ends_with_its_links_is_gone() {
        for vanished in [None, Some("link 2 named eth0 is gone".to_owned())] {
            let mut sim = Sim::injected(&["a"]);
            let live = sim.live("a");
            (live.vanished, live.leave) = (vanished, Some(Leave::PodEnded));
            live.has_exited = true;
            sim.o.deserted = vec![key("a")];
            sim.settle();
            let target = sim.target("a");
            let told = (target.state, target.reason.as_str());
            assert_eq!(told, (TargetState::Gone, "TargetGone"));
            assert_eq!(target.reclaimed_by, Some(ReclaimedBy::Kernel));
        }
    }

    /// Its first process, which held the network, has died; the pod is there as before.
    #[test]
    fn a_pod_with_another_sandbox_is_not_gone() {
        for is_late in [false, true] {
            let mut sim = Sim::injected(&["a", "b"]);
            sim.o.deserted = vec![key("a"), key("b")];
            sim.settle();
            assert_eq!(sim.target("a").state, TargetState::Gone);
            sim.injection().status = Some(sim.last().clone());
            sim.advance(if is_late { 60_000 } else { 5_000 });
            sim.o.revived = vec![key("a")];
            sim.settle();
            let told =
                ["a", "b"].map(|pod| (sim.target(pod).state, sim.target(pod).reason.as_str()));
            let gone = (TargetState::Gone, "TargetGone");
            let replaced = (TargetState::Interrupted, "SandboxReplaced");
            assert_eq!(told, [if is_late { gone } else { replaced }, gone]);
            assert_eq!(sim.starts, 2, "nothing is injected anew");
        }
    }

    /// It is known by what becomes of the pod's control group.
    #[test]
    fn whether_a_pod_or_its_sandbox_has_ended_is_waited_for() {
        type Known = fn(&mut Sim);
        let table: [(Known, TargetState, &str); 4] = [
            (
                |sim| sim.o.deserted = vec![key("a")],
                TargetState::Gone,
                "TargetGone",
            ),
            (
                |sim| sim.o.revived = vec![key("a")],
                TargetState::Interrupted,
                "SandboxReplaced",
            ),
            (
                |sim| sim.injection().spec.abort = true,
                TargetState::Gone,
                "TargetGone",
            ),
            (|sim| sim.advance(60_000), TargetState::Recovered, ""),
        ];
        for (known, state, reason) in table {
            let mut sim = Sim::injected(&["a"]);
            let live = sim.o.live.get_mut(&key("a")).unwrap();
            (live.leave, live.has_exited) = (Some(Leave::PodEnded), true);
            sim.settle();
            let told = (sim.target("a").state, sim.target("a").reason.as_str());
            assert_eq!(told, (TargetState::Injected, "PodEnding"));
            known(&mut sim);
            sim.settle();
            let told = (sim.target("a").state, sim.target("a").reason.as_str());
            assert_eq!(told, (state, reason));
        }
    }
}
