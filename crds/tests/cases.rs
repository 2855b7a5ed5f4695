//! The table of accepted and refused manifests, judged without an API server; the cluster tests put
//! the same table to a real one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use kube_cel::{CompiledSchema, Validator, compile_schema};
use serde_json::{Value, json};
use table::Case;
use windtunnel_crds::{ChaosExperiment, definitions, units::GoDuration};

#[path = "../testdata/shape.rs"]
mod shape;
#[path = "../testdata/table.rs"]
mod table;

fn experiments() -> Vec<(Case, Value)> {
    let with_object = |case: Case| {
        let object = case.object(&json!({"name": "x"}));
        (case, object)
    };
    table::cases()
        .unwrap()
        .into_iter()
        .map(with_object)
        .collect()
}

/// The definition: what fields are, and the rules among them.
struct Definition {
    schema: Value,
    rules: CompiledSchema,
}

impl Definition {
    fn of_experiments() -> Self {
        let schema = serde_json::to_value(&definitions()[0].spec.versions[0].schema).unwrap();
        let schema = schema["openAPIV3Schema"].clone();
        let rules = compile_schema(&schema);
        assert!(!rules.has_errors(), "{:?}", rules.compilation_errors());
        Self { schema, rules }
    }

    /// Judges an experiment by the rules, as an API server would.
    fn rules(&self, new: &Value, old: Option<&Value>) -> Result<(), String> {
        let judged = Validator::new().validate_compiled(&self.rules, new, old);
        judged.map_err(|errors| errors.to_string())
    }

    /// Judges what a user has written. Where a type or length is wrong, the rules are not asked.
    fn judge(&self, mut object: Value) -> Result<(), String> {
        shape::fill(&self.schema, &mut object);
        let mut said = Vec::new();
        shape::judge(
            &self.schema["properties"]["spec"],
            &object["spec"],
            "spec",
            &mut said,
        );
        let blocking = ["Too", "Required", "supported values", "must be of type"];
        let is_blocked = said.iter().any(|s| blocking.iter().any(|b| s.contains(b)));
        if !is_blocked && let Err(error) = self.rules(&object, None) {
            said.push(error);
        }
        if said.is_empty() {
            Ok(())
        } else {
            Err(said.join("\n"))
        }
    }
}

#[test]
fn accepted_manifests_parse_and_keep_the_rules() {
    let definition = Definition::of_experiments();
    let accepted: Vec<_> = experiments()
        .into_iter()
        .filter(|(case, _)| case.error.is_empty())
        .collect();
    assert!(accepted.len() >= 8);
    for (case, object) in accepted {
        let judged = definition.judge(object.clone());
        judged.unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let parsed: ChaosExperiment =
            serde_json::from_value(object).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let again: ChaosExperiment =
            serde_json::from_value(serde_json::to_value(&parsed).unwrap()).unwrap();
        assert_eq!(again.spec, parsed.spec, "{}", case.name);
    }
}

#[test]
fn what_is_refused_is_refused_with_the_words_of_the_table() {
    let definition = Definition::of_experiments();
    for (case, object) in experiments()
        .into_iter()
        .filter(|(case, _)| !case.error.is_empty())
    {
        let Err(text) = definition.judge(object) else {
            panic!("{}: not refused", case.name);
        };
        // Paths are spelled a little differently.
        assert!(
            case.error.iter().skip(1).all(|part| text.contains(part)),
            "{}: {text}",
            case.name
        );
    }
}

#[test]
fn a_spec_cannot_change_but_for_the_abort() {
    let definition = Definition::of_experiments();
    let judge = |new: &ChaosExperiment, old: &ChaosExperiment| {
        let value = |experiment: &ChaosExperiment| serde_json::to_value(experiment).unwrap();
        definition.rules(&value(new), Some(&value(old)))
    };
    let (_, object) = experiments().swap_remove(0);
    let old: ChaosExperiment = serde_json::from_value(object).unwrap();
    let update = |change: fn(&mut ChaosExperiment)| {
        let mut new = old.clone();
        change(&mut new);
        judge(&new, &old)
    };
    assert!(update(|new| new.spec.abort = true).is_ok());
    for (field, change) in [
        (
            "duration",
            (|new| new.spec.duration = GoDuration::from_secs(90)) as fn(&mut ChaosExperiment),
        ),
        ("seed", |new| new.spec.seed = Some("other".to_owned())),
        ("dryRun", |new| new.spec.dry_run = true),
        ("ttlSecondsAfterFinished", |new| {
            new.spec.ttl_seconds_after_finished = Some(1);
        }),
    ] {
        let error = update(change).unwrap_err();
        assert!(
            error.contains(&format!("{field} is immutable")),
            "{field}: {error}"
        );
    }
    let mut aborted = old.clone();
    aborted.spec.abort = true;
    let error = judge(&old, &aborted).unwrap_err();
    assert!(error.contains("an abort cannot be taken back"), "{error}");
}
