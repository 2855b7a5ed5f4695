//! The table of accepted and refused manifests, as far as it can be judged without an API server;
//! the cluster tests put the same table to a real one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use kube_cel::Validator;
use serde_json::{Value, json};
use table::Case;
use windtunnel_crds::{ChaosExperiment, definitions, units::GoDuration};

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

/// Judges an experiment by the rules of its definition, as an API server would.
fn judge(new: &ChaosExperiment, old: Option<&ChaosExperiment>) -> Result<(), String> {
    let crd = &definitions()[0].spec.versions[0];
    let schema = crd
        .schema
        .as_ref()
        .unwrap()
        .open_api_v3_schema
        .as_ref()
        .unwrap();
    let value = |experiment: &ChaosExperiment| serde_json::to_value(experiment).unwrap();
    let old = old.map(value);
    let schema = serde_json::to_value(schema).unwrap();
    let judged = Validator::new().validate(&schema, &value(new), old.as_ref());
    judged.map_err(|errors| errors.to_string())
}

#[test]
fn accepted_manifests_parse_and_keep_the_rules() {
    let accepted: Vec<_> = experiments()
        .into_iter()
        .filter(|(case, _)| case.error.is_empty())
        .collect();
    assert!(accepted.len() >= 8);
    for (case, object) in accepted {
        let parsed: ChaosExperiment =
            serde_json::from_value(object).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        judge(&parsed, None).unwrap_or_else(|e| panic!("{}: {e}", case.name));
        let again: ChaosExperiment =
            serde_json::from_value(serde_json::to_value(&parsed).unwrap()).unwrap();
        assert_eq!(again.spec, parsed.spec, "{}", case.name);
    }
}

#[test]
fn rules_refuse_with_the_words_of_the_table() {
    let mut judged = 0;
    for (case, object) in experiments()
        .into_iter()
        .filter(|(case, _)| !case.error.is_empty())
    {
        // What the types cannot hold at all is judged by the API server's schema.
        let Ok(parsed) = serde_json::from_value::<ChaosExperiment>(object) else {
            continue;
        };
        let Err(text) = judge(&parsed, None) else {
            continue;
        };
        judged += 1;
        assert!(
            case.error.iter().skip(1).all(|part| text.contains(part)),
            "{}: {text}",
            case.name
        );
    }
    assert!(
        judged >= 20,
        "only {judged} refusals were judged by CEL rules"
    );
}

#[test]
fn a_spec_cannot_change_but_for_the_abort() {
    let (_, object) = experiments().swap_remove(0);
    let old: ChaosExperiment = serde_json::from_value(object).unwrap();
    let update = |change: fn(&mut ChaosExperiment)| {
        let mut new = old.clone();
        change(&mut new);
        judge(&new, Some(&old))
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
    let error = judge(&old, Some(&aborted)).unwrap_err();
    assert!(error.contains("an abort cannot be taken back"), "{error}");
}
