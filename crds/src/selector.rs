//! The schema of label selectors: metav1's type, with bounds that let the API
//! server estimate the cost of the rules around it.

use schemars::{Schema, SchemaGenerator, json_schema};

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
                "additionalProperties": {"type": "string", "maxLength": 63},
            },
            "matchExpressions": {
                "type": "array",
                "description": "Requirements on labels; all of them must hold.",
                "maxItems": 16,
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"type": "string", "description": "The label's key.", "minLength": 1, "maxLength": 317},
                        "operator": {
                            "type": "string",
                            "description": "How the label relates to `values`.",
                            "enum": ["In", "NotIn", "Exists", "DoesNotExist"],
                        },
                        "values": {
                            "type": "array",
                            "description": "Values for In and NotIn.",
                            "maxItems": 16,
                            "items": {"type": "string", "maxLength": 63},
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
