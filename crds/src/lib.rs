//! windtunnel's API: the types behind its three custom resources, their units, names and
//! conditions. Types only: no client, no clock, no async.
//!
//! The YAML in `crds/generated` and in the chart is written from these types by `crdgen`
//! (`cargo lab generate`); doc comments here are what
//! `kubectl explain` shows.

#![allow(
    unreachable_pub,
    reason = "kube's derive makes a second, private struct of each type"
)]
#![allow(
    clippy::doc_markdown,
    reason = "doc comments are read with `kubectl explain`"
)]

pub mod conditions;
pub mod container;
pub mod disk;
pub mod experiment;
pub mod fault;
pub mod injection;
pub mod io;
pub mod names;
pub mod network;
pub mod node_agent;
pub mod peers;
pub mod residue;
mod selector;
pub mod status;
pub mod stress;
pub mod units;

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::{CustomResourceExt as _, Resource};
use schemars::{JsonSchema, schema_for};
use serde_json::{Value, json};

pub use experiment::{ChaosExperiment, ChaosExperimentSpec};
pub use injection::{NodeInjection, NodeInjectionSpec, NodeInjectionStatus};
pub use node_agent::{NodeAgent, NodeAgentSpec, NodeAgentStatus};
pub use status::ChaosExperimentStatus;

/// The one that is set, where exactly one is.
fn only<T>(options: impl IntoIterator<Item = Option<T>>) -> Option<T> {
    let mut set = options.into_iter().flatten();
    let first = set.next();
    first.filter(|_| set.next().is_none())
}

/// The definitions of all custom resources, as installed by the chart.
#[must_use]
pub fn definitions() -> Vec<CustomResourceDefinition> {
    let mut all = vec![
        ChaosExperiment::crd(),
        NodeInjection::crd(),
        NodeAgent::crd(),
    ];
    let words = BTreeMap::from([
        words::<ChaosExperiment, ChaosExperimentSpec, ChaosExperimentStatus>(),
        words::<NodeInjection, NodeInjectionSpec, NodeInjectionStatus>(),
        words::<NodeAgent, NodeAgentSpec, NodeAgentStatus>(),
    ]);
    for crd in &mut all {
        for version in &mut crd.spec.versions {
            if let Some(schema) = version
                .schema
                .as_mut()
                .and_then(|s| s.open_api_v3_schema.as_mut())
            {
                refuse_null(schema);
                if let Some(words) = words.get(&crd.spec.names.kind) {
                    keep_words(schema, words);
                }
            }
        }
    }
    all
}

/// A kind, and the schemas of its two parts as they are derived.
fn words<K, Spec, Status>() -> (String, Value)
where
    K: Resource<DynamicType = ()>,
    Spec: JsonSchema,
    Status: JsonSchema,
{
    let (spec, status) = (schema_for!(Spec), schema_for!(Status));
    let both = json!({"properties": {"spec": spec, "status": status}});
    (K::kind(&()).into_owned(), both)
}

/// Has each field described by its own words: of an optional enum the definition keeps those of the
/// type alone.
fn keep_words(schema: &mut JSONSchemaProps, words: &Value) {
    let options = words["anyOf"].as_array().into_iter().flatten();
    let words = options
        .into_iter()
        .find(|option| option["type"] != "null")
        .unwrap_or(words);
    for (name, property) in schema.properties.iter_mut().flatten() {
        let words = &words["properties"][name];
        if let Some(own) = words["description"].as_str() {
            property.description = Some(own.to_owned());
        }
        keep_words(property, words);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        keep_words(items, &words["items"]);
    }
}

/// Makes a null mean what it means everywhere in Kubernetes: the field is not set. The derived
/// schemas would keep it as a value of its own.
fn refuse_null(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    for property in schema.properties.iter_mut().flat_map(|p| p.values_mut()) {
        refuse_null(property);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        refuse_null(items);
    }
    if let Some(JSONSchemaPropsOrBool::Schema(values)) = &mut schema.additional_properties {
        refuse_null(values);
    }
}
