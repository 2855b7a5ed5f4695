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

/// All cases; each is the table's base, changed in one thing.
pub(crate) fn cases() -> Result<Vec<Case>, serde_saphyr::Error> {
    let Table { base, mut cases } = serde_saphyr::from_str(include_str!("experiments.yaml"))?;
    for case in &mut cases {
        let patch = std::mem::replace(&mut case.spec, base.clone());
        case.spec.extend(patch);
    }
    Ok(cases)
}
