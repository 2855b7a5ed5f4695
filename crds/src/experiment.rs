//! `ChaosExperiment`: what a user writes. Its status is in [`crate::status`].

use kube::{
    CustomResource, KubeSchema,
    core::{Message, Rule},
};
use serde::{Deserialize, Serialize};

use crate::{
    fault::Fault,
    status::ChaosExperimentStatus,
    units::{DURATION_PATTERN, GoDuration, at_least, at_most},
};

/// A chaos experiment: faults on pods of this namespace, on one timeline, with a hard end.
///
/// Applying it starts the run; it runs once. To end it early set `abort: true` or delete it.
/// To run it again create a new object (`metadata.generateName` works).
/// Wait for it with `kubectl wait --for=condition=Injected`, `Recovered`, `Clean` or `Finished`.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "windtunnel.dev",
    version = "v1alpha1",
    kind = "ChaosExperiment",
    namespaced,
    shortname = "chaos",
    category = "windtunnel",
    derive = "PartialEq",
    status = "ChaosExperimentStatus",
    doc = "A chaos experiment: faults on pods of this namespace, on one timeline, with a hard end. Applying it starts the run, and it runs once; to end it early set spec.abort or delete it. Wait for it with `kubectl wait --for=condition=Injected` (or Recovered, Clean, Finished).",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Injected",
        type_ = "string",
        json_path = ".status.summary.injected"
    ),
    printcolumn(
        name = "Recovered",
        type_ = "string",
        json_path = ".status.summary.recovered"
    ),
    printcolumn(name = "Clean", type_ = "string", json_path = ".status.summary.clean"),
    printcolumn(
        name = "Deadline",
        type_ = "string",
        json_path = ".status.summary.deadline"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    ),
    printcolumn(
        name = "Message",
        type_ = "string",
        json_path = ".status.message",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = fits_the_run(), validation = begins_within_the_run())]
#[x_kube(validation = unchanged("duration"), validation = unchanged_if_any("seed"))]
#[x_kube(validation = unchanged("dryRun"), validation = unchanged_if_any("ttlSecondsAfterFinished"))]
pub struct ChaosExperimentSpec {
    /// How long the whole run may take, from the moment the first fault may begin. A hard bound:
    /// when it is over every fault is taken back, whatever else happens, and nothing can extend it.
    /// From 1s to 24h.
    #[x_kube(validation = at_least("1s"), validation = at_most("24h"))]
    pub duration: GoDuration,

    /// The faults, each with a name of its own, each of exactly one kind (`network`, `podKill`,
    /// `cpu`, `memory`, `io`, `diskFill`, `containerKill`, `containerPause`).
    /// They share one clock: each has its window, `startAfter` to `startAfter` + `duration`.
    #[schemars(length(min = 1, max = 32))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Map(vec!["name".into()]))]
    pub faults: Vec<Fault>,

    /// What the draw of targets depends on, besides the name of the fault and of the pods: the
    /// same seed on the same pods draws the same ones. Default: the name of the experiment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub seed: Option<String>,

    /// Select the targets and check on their nodes that each fault could be injected, report it,
    /// and touch nothing.
    #[serde(default)]
    pub dry_run: bool,

    /// Set to true to end the run at once and take back every fault. It cannot be unset.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self || !oldSelf").message("an abort cannot be taken back"))]
    pub abort: bool,

    /// Delete this object so many seconds after it has finished, and not before its nodes were checked
    /// for residue the second time (by default ten minutes after its end) and nothing is left. Default:
    /// never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub ttl_seconds_after_finished: Option<i64>,
}

/// The window of every fault must end within the run.
fn fits_the_run() -> Rule {
    let end = format!("{} + {}", part("startAfter"), part("duration"));
    no_fault(
        &format!("{end} > duration(self.duration)"),
        "the window of fault",
        "ends after the run: startAfter + duration must not exceed",
    )
}

/// No fault may begin when everything ends: it could only fail.
fn begins_within_the_run() -> Rule {
    no_fault(
        &format!("{} >= duration(self.duration)", part("startAfter")),
        "fault",
        "begins when the run is over: startAfter must be less than",
    )
}

fn is_duration(field: &str) -> String {
    format!("{field}.matches(r'{DURATION_PATTERN}')")
}

/// A duration of a fault, none where it is not set, or is none.
fn part(field: &str) -> String {
    format!(
        "(has(f.{field}) && {} ? duration(f.{field}) : duration('0s'))",
        is_duration(&format!("f.{field}"))
    )
}

/// No fault may be `late`; what is said of the first that is.
fn no_fault(late: &str, subject: &str, said: &str) -> Rule {
    Rule::new(format!(
        "!{} || !self.faults.exists(f, {late})",
        is_duration("self.duration")
    ))
    .message(Message::Expression(format!(
        "'{subject} \"' + self.faults.map(f, {late}, f.name)[0] + '\" {said} spec.duration (' + self.duration + ')'"
    )))
    .field_path(".faults")
}

/// `field` cannot be changed once the object exists.
fn unchanged(field: &str) -> Rule {
    Rule::new(format!("self.{field} == oldSelf.{field}"))
        .message(Message::Message(format!(
            "{field} is immutable: a run happens once; create a new experiment to run it again"
        )))
        .field_path(format!(".{field}"))
}

/// The optional `field` cannot be changed, set or unset once the object exists.
fn unchanged_if_any(field: &str) -> Rule {
    Rule {
        rule: format!(
            "has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
        ),
        ..unchanged(field)
    }
}
