//! The run is over: faults are taken back, and waited for no longer than they can last.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    NodeInjection,
    conditions::{ConditionStatus as Is, ConditionType, condition},
    status::Phase,
};

use super::{Pass, patch};
use crate::decide::{BOUNDS, Change, cleanup, ending::Ending, plan, rollup};

/// How long after the deadline nodes may take to report before they are told again.
const REPORT: SignedDuration = SignedDuration::from_secs(2);

impl Pass<'_> {
    /// The run is over; what is in place is taken back.
    pub(super) fn recover(&mut self, ending: Ending, message: &str) {
        self.status.phase = Some(Phase::Recovering);
        self.status.end_time.get_or_insert(MicroTime(self.now));
        self.set(ConditionType::Finished, Is::False, ending.reason(), message);
        self.recovering();
    }

    pub(super) fn recovering(&mut self) {
        let (ending, message) = self.ending();
        let ended = self.status.end_time.as_ref().map_or(self.now, |t| t.0);
        if ending != Ending::DeadlineReached || self.now >= ended + REPORT {
            self.abort_where(|_| true);
        } else {
            self.wake(ended + REPORT);
        }
        if self.status.start_time.is_some() {
            rollup::roll_up(self.observed, &mut self.status, self.now);
        } else {
            self.nothing_started();
        }
        let left = Vec::from_iter(self.nodes_left());
        let give_up = self.give_up_at(ended);
        if left.is_empty() || self.now >= give_up {
            if !left.is_empty() {
                self.doubt(&left);
            }
            return self.end(ending, &message);
        }
        self.status.message = format!(
            "taking faults back ({message}); waiting for {}",
            left.join(", ")
        );
        rollup::summarize(&mut self.status);
        self.wake(give_up);
    }

    /// Tells the nodes of these injections that the run is over, unless they know.
    pub(super) fn abort_where(&mut self, is_meant: impl Fn(&NodeInjection) -> bool) {
        let injections = self.observed.injections.iter();
        let open = injections.filter(|i| !i.spec.abort && is_meant(i));
        self.actions.extend(open.map(|i| patch(i, Change::Abort)));
    }

    /// Nothing was injected: says so, and whether the nodes are clean.
    pub(super) fn nothing_started(&mut self) {
        self.set(
            ConditionType::Injected,
            Is::False,
            "NotStarted",
            "nothing was injected",
        );
        self.set(
            ConditionType::Recovered,
            Is::True,
            "NothingToUndo",
            "nothing was injected",
        );
        cleanup::check(self.observed, &mut self.status, self.now);
    }

    /// From when on a silent node is no longer waited for: by then its agent or the kernel has
    /// taken everything back, whether it can say so or not.
    pub(super) fn give_up_at(&self, ended: Timestamp) -> Timestamp {
        let bound = ended + self.observed.policy.control_plane_grace;
        let deadline = self.status.deadline.as_ref().map_or(bound, |t| t.0);
        bound.min(deadline.max(ended)) + BOUNDS
    }

    /// Nodes were not heard of until the end.
    pub(super) fn doubt(&mut self, nodes: &[String]) {
        let message = cleanup::nobody_has_looked(nodes);
        let withdrawn = plan::withdrawn(self.observed, &self.status);
        let reason = if withdrawn.is_empty() {
            cleanup::NOT_REPORTED
        } else {
            cleanup::WITHDRAWN
        };
        // Those may report yet.
        let awaited = nodes.iter().filter(|node| !withdrawn.contains(*node));
        let cleanup = self.status.cleanup.get_or_insert_default();
        cleanup.not_reported = awaited.cloned().collect();
        // Without a start nothing can have been injected, whoever is silent; and where every target
        // was told to be over, only the look is missing.
        let recovered = condition(&self.status.conditions, ConditionType::Recovered);
        let is_told = recovered.is_some_and(|c| c.status == Is::True.as_str());
        if self.status.start_time.is_some() && !is_told {
            self.set(ConditionType::Recovered, Is::Unknown, reason, &message);
        }
        // What was found elsewhere is worse, and told instead.
        cleanup::check(self.observed, &mut self.status, self.now);
    }

    /// Nodes whose injection is not known to be over and checked, and those that had something to
    /// do and whose injection somebody has deleted.
    pub(super) fn nodes_left(&self) -> BTreeSet<String> {
        let injections = self.observed.injections.iter();
        let open = injections.filter(|i| !cleanup::is_over(i));
        let open = open.map(|i| i.spec.node_name.clone());
        let lost = plan::withdrawn(self.observed, &self.status);
        open.chain(lost).collect()
    }
}
