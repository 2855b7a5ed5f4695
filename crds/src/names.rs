//! Names that both programs and the chart agree on, and names made to fit their limits.

use sha2::{Digest, Sha256};

/// The API group.
pub const GROUP: &str = "windtunnel.dev";
/// The API version.
pub const VERSION: &str = "v1alpha1";
/// On an experiment from Preparing to its terminal phase: its faults are taken back before it goes.
pub const FINALIZER: &str = "windtunnel.dev/reclaim";
/// Label on a `NodeInjection`: the uid of its experiment.
pub const LABEL_EXPERIMENT_UID: &str = "windtunnel.dev/experiment-uid";
/// Field manager of the operator.
pub const OPERATOR: &str = "windtunnel-operator";
/// Field manager of the agents.
pub const AGENT: &str = "windtunnel-agent";
/// The Lease that the operator's replicas compete for, in the release namespace.
pub const LEASE: &str = "windtunnel-operator";
/// The `ConfigMap` whose existence in the release namespace ends every fault and refuses new ones.
pub const STOP_CONFIG_MAP: &str = "windtunnel-stop";

/// Longest name of an object.
const OBJECT_NAME: usize = 253;
/// Hexadecimal digits of a hash in a name: 40 bits.
const HASH_DIGITS: usize = 10;

/// The name of an experiment's `NodeInjection` on a node: as much of the experiment's name as fits,
/// and a hash of its uid and the node.
#[must_use]
pub fn injection_name(experiment: &str, uid: &str, node: &str) -> String {
    let hash = hash(&[uid, node], HASH_DIGITS);
    let room = OBJECT_NAME - HASH_DIGITS - 1;
    let kept = truncate(experiment, room).trim_end_matches(['-', '.']);
    format!("{kept}-{hash}")
}

/// The first `digits` hexadecimal digits (at most 64) of a hash over `parts`; where a part ends is hashed too.
#[must_use]
pub fn hash(parts: &[&str], digits: usize) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part.as_bytes());
    }
    let mut text = String::with_capacity(64);
    for byte in hasher.finalize() {
        use std::fmt::Write as _;
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text.truncate(digits);
    text
}

/// At most `limit` bytes of `text`, cut at a character's end.
#[must_use]
pub fn truncate(text: &str, limit: usize) -> &str {
    let mut end = limit.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn injection_names_fit_and_differ() {
        let long = "a".repeat(253);
        let name = injection_name(&long, "uid", "node");
        assert_eq!(name.len(), 253);
        assert_ne!(name, injection_name(&long, "uid", "node2"));
        assert_ne!(name, injection_name(&long, "uid2", "node"));
        // A name cut behind a dot or dash would give an empty or ill-formed label.
        let dotted = format!("{}.{}", "a".repeat(241), "b".repeat(11));
        let name = injection_name(&dotted, "uid", "node");
        assert!(!name.contains(".-") && !name.contains("--"), "{name}");
    }

    #[test]
    fn parts_of_a_hash_are_told_apart() {
        assert_ne!(hash(&["ab", "c"], 16), hash(&["a", "bc"], 16));
        assert_eq!(hash(&["a"], 16).len(), 16);
    }
}
