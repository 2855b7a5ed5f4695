//! The table of accepted and refused manifests, for the tests of this crate and for those on a real
//! API server.

use serde::Deserialize;
use serde_json::{Map, Value, json};

#[derive(Deserialize)]
struct Table {
    base: Map<String, Value>,
    cases: Vec<Case>,
}

/// A manifest, and what must be said of it.
#[derive(Deserialize)]
pub(crate) struct Case {
    pub(crate) name: String,
    /// Words of the refusal; none where it is accepted.
    #[serde(default)]
    pub(crate) error: Vec<String>,
    /// The spec of the experiment.
    #[serde(flatten)]
    spec: Map<String, Value>,
}

impl Case {
    /// The experiment with this metadata.
    pub(crate) fn object(&self, metadata: &Value) -> Value {
        json!({
            "apiVersion": "windtunnel.dev/v1alpha1",
            "kind": "ChaosExperiment",
            "metadata": metadata,
            "spec": self.spec,
        })
    }
}

/// Writes out what stands short in a case. In a list `{times: 3, of: item}` is three items, with their
/// number for each `#` in them; anywhere else `{times: 3, text: ab}` is ababab.
fn expand(value: Value) -> Value {
    let times = |value: &Value| usize::try_from(value["times"].as_u64()?).ok();
    match value {
        Value::Array(items) => {
            let expanded = items.into_iter().flat_map(|item| match times(&item) {
                Some(times) if item.get("of").is_some() => {
                    let number = |n| expand(numbered(&item["of"], n));
                    (0..times).map(number).collect()
                }
                _ => vec![expand(item)],
            });
            expanded.collect()
        }
        Value::Object(fields) => {
            if let (Some(times), Some(Value::String(text))) =
                (times(&json!(fields)), fields.get("text"))
            {
                return text.repeat(times).into();
            }
            let fields = fields.into_iter();
            fields.map(|(name, value)| (name, expand(value))).collect()
        }
        other => other,
    }
}

fn numbered(value: &Value, number: usize) -> Value {
    match value {
        Value::String(text) => text.replace('#', &number.to_string()).into(),
        Value::Array(items) => items.iter().map(|item| numbered(item, number)).collect(),
        Value::Object(fields) => {
            let numbered = |(name, value): (&String, &Value)| {
                let name = name.replace('#', &number.to_string());
                (name, numbered(value, number))
            };
            fields.iter().map(numbered).collect()
        }
        other => other.clone(),
    }
}

/// All cases; each is the table's base, changed in one thing.
pub(crate) fn cases() -> Result<Vec<Case>, serde_saphyr::Error> {
    let Table { base, mut cases } = serde_saphyr::from_str(include_str!("experiments.yaml"))?;
    for case in &mut cases {
        let patch = std::mem::replace(&mut case.spec, base.clone());
        case.spec
            .extend(patch.into_iter().map(|(name, value)| (name, expand(value))));
    }
    Ok(cases)
}
