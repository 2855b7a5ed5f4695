//! The schema of label selectors: metav1's type, with bounds that let the API
//! server estimate the cost of the rules around it, and what a label may be: a selector with others
//! is one that the API server answers with a refusal, or takes for another.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// What a label's key looks like, as an RE2 pattern; the name behind the slash has 63 characters at
/// most.
const KEY: &str = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$";
/// What a label's value looks like.
const VALUE: &str = "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$";

/// What is said of a key that is none.
const KEY_MESSAGE: &str = "must be a label's key, such as app or example.com/app: letters, digits, '-', '_' and '.', with a letter or digit at both ends";

/// A label's value.
fn value() -> Value {
    json!({
        "type": "string",
        "maxLength": 63,
        "x-kubernetes-validations": [{
            "rule": format!("self.matches('{VALUE}')"),
            "message": "must be a label's value: letters, digits, '-', '_' and '.', with a letter or digit at both ends",
        }],
    })
}

/// Schema of a `metav1.LabelSelector` that selects something: at least one requirement.
pub(crate) fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "description": "Labels that a pod must have. Must not be empty.",
        "x-kubernetes-map-type": "atomic",
        "properties": {
            "matchLabels": {
                "type": "object",
                "description": "Labels with exactly these values.",
                "maxProperties": 16,
                "additionalProperties": value(),
                "x-kubernetes-validations": [{
                    "rule": format!("self.all(key, key.size() <= 317 && key.matches('{KEY}'))"),
                    "message": KEY_MESSAGE,
                }],
            },
            "matchExpressions": {
                "type": "array",
                "description": "Requirements on labels; all of them must hold.",
                "maxItems": 16,
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {
                            "type": "string",
                            "description": "The label's key.",
                            "minLength": 1,
                            "maxLength": 317,
                            "x-kubernetes-validations": [{
                                "rule": format!("self.matches('{KEY}')"),
                                "message": KEY_MESSAGE,
                            }],
                        },
                        "operator": {
                            "type": "string",
                            "description": "How the label relates to `values`.",
                            "enum": ["In", "NotIn", "Exists", "DoesNotExist"],
                        },
                        "values": {
                            "type": "array",
                            "description": "Values for In and NotIn.",
                            "maxItems": 16,
                            "items": value(),
                        },
                    },
                    "x-kubernetes-validations": [{
                        "rule": "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
                        "message": "In and NotIn need values, Exists and DoesNotExist take none",
                    }],
                },
            },
        },
        "x-kubernetes-validations": [{
            "rule": "(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",
            "message": "must not be empty: give matchLabels or matchExpressions",
        }],
    })
}
