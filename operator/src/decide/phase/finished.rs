//! A terminal phase: the nodes are checked again, then everything of the run goes.

use jiff::{SignedDuration, Timestamp};
use windtunnel_crds::{NodeInjection, residue::has_left};

use super::{Pass, delete};
use crate::decide::{
    Action, BOUNDS,
    cleanup::{self, audit},
    ending::Ending,
    rollup,
};

impl Pass<'_> {
    pub(super) fn finished(&mut self) {
        let now = self.now;
        if !self.observed.injections.is_empty() && self.ending().0 != Ending::DryRun {
            cleanup::check(self.observed, &mut self.status, now);
            rollup::summarize(&mut self.status);
        }
        let leaving = self
            .observed
            .experiment
            .metadata
            .deletion_timestamp
            .is_some();
        let ended = self.status.end_time.as_ref().map_or(now, |t| t.0);
        let policy = &self.observed.policy;
        let late = ended + policy.recheck_after + policy.control_plane_grace + BOUNDS;
        let injected = self
            .status
            .faults
            .iter()
            .any(|f| f.injected > 0 && !f.draw.is_empty());
        let rechecked = |i: &NodeInjection| audit(i).is_some_and(|a| a.rechecked_at.is_some());
        // What is left is told until it is gone, while there is somebody to tell, or may be again.
        let fleet = &self.observed.fleet;
        let tries = |i: &NodeInjection| {
            let is_live = fleet.get(&i.spec.node_name).is_some_and(|a| a.live);
            (is_live || now < late) && audit(i).is_some_and(|a| has_left(&a.residue))
        };
        // Where nothing was injected there is nothing to check again, once the node has said so.
        let left = self.nodes_left();
        // A node that was not heard of until the end is still to know that there is one.
        self.abort_where(|i| left.contains(&i.spec.node_name) && !i.spec.dry_run);
        let told = |i: &NodeInjection| i.spec.dry_run || !left.contains(&i.spec.node_name);
        // Where one is doubted, the others stay: one that is missing then is not told for.
        let is_doubted = cleanup::is_doubted(&self.status);
        let is_over = |i: &NodeInjection| {
            now >= late || (!is_doubted && (rechecked(i) || (!injected && told(i))))
        };
        let done = |i: &&NodeInjection| leaving || (is_over(i) && !tries(i));
        let deletions: Vec<Action> = self
            .observed
            .injections
            .iter()
            .filter(done)
            .map(delete)
            .collect();
        let all_done = deletions.len() == self.observed.injections.len();
        self.actions.extend(deletions);
        self.release_finalizer();
        if !self.observed.injections.is_empty() && !all_done {
            let again = now + policy.control_plane_grace;
            return self.wake(if now < late { late } else { again });
        }
        let ttl = self.observed.experiment.spec.ttl_seconds_after_finished;
        if let (Some(ttl), false) = (ttl, leaving) {
            let due = ended
                .saturating_add(SignedDuration::from_secs(ttl))
                .unwrap_or(Timestamp::MAX);
            if now >= due {
                self.actions.push(Action::DeleteExperiment);
            } else {
                self.wake(due);
            }
        }
    }
}
