//! Builders for tests.

use std::time::Duration;

use windtunnel_crds::{
    injection::{ExperimentRef, Impairment, NodeNetworkFault},
    network::Direction,
};

use crate::{
    kernel::netns::NetNsId,
    model::{Entry, FORMAT, Key, NetworkEntry, State},
};

pub(crate) fn key(pod: &str) -> Key {
    Key {
        injection: "inj-uid".to_owned(),
        fault: "slow".to_owned(),
        pod: pod.to_owned(),
    }
}

pub(crate) fn all_traffic() -> NodeNetworkFault {
    NodeNetworkFault {
        impairment: Impairment::default(),
        direction: Direction::Egress,
        peers: None,
        local_ports: Vec::new(),
        spare: Vec::new(),
    }
}

pub(crate) fn entry(pod: &str) -> Entry {
    Entry {
        format: FORMAT,
        boot_id: "boot".to_owned(),
        key: key(pod),
        injection_name: "run-1".to_owned(),
        experiment: ExperimentRef {
            namespace: "shop".to_owned(),
            name: "run".to_owned(),
            uid: "run-uid".to_owned(),
        },
        pod_name: format!("pod-{pod}"),
        pod_cgroup: "/sys/fs/cgroup/kubepods/pod".into(),
        recheck_after: Duration::from_mins(10),
        network: NetworkEntry {
            netns: NetNsId {
                device: 4,
                inode: 1,
            },
            table: "windtunnel-x".to_owned(),
            priority: 0,
            detours: Vec::new(),
            name_servers: Vec::new(),
            drain: Duration::from_secs(1),
        },
        prepared_at: Duration::from_secs(100),
        window: None,
        state: State::Prepared,
    }
}
