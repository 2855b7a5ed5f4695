//! Builders for tests of decisions.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use windtunnel_crds::{fault::Target, injection::NodeContainer};

use super::Agent;
use crate::cluster::Candidate;

pub(crate) fn agent() -> Agent {
    Agent {
        live: true,
        clean: true,
        known_version: true,
        version: "0.1.0".to_owned(),
        matched: BTreeMap::new(),
        residue: Vec::new(),
    }
}

pub(crate) fn candidate(name: &str, node: &str) -> Candidate {
    Candidate {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        node: node.to_owned(),
        host_network: false,
        eligible: true,
        containers: vec![NodeContainer {
            name: "app".to_owned(),
            id: format!("containerd://{name}"),
        }],
        addresses: Vec::new(),
    }
}

pub(crate) fn target(app: &str) -> Target {
    Target {
        selector: LabelSelector {
            match_labels: Some([("app".to_owned(), app.to_owned())].into()),
            match_expressions: None,
        },
        count: None,
        percent: None,
    }
}
