//! Builders for tests.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use windtunnel_crds::{
    NodeInjection, NodeInjectionSpec,
    injection::{
        ExperimentRef, Impairment, NodeContainer, NodeFault, NodeNetworkFault, NodeTarget,
    },
    network::Direction,
    stress::CpuFault,
    units::{GoDuration, Percent},
};

use crate::{
    kernel::{
        self,
        link::LinkName,
        netns::NetNsId,
        nft::{Device, Table},
        proc::{Proc, ProcessId},
        qdisc::Netem,
    },
    metrics::Metrics,
    model::{
        Act, ContainerEntry, Counts, Detour, Entry, FORMAT, Key, NetworkEntry, Objects, State,
    },
    node::{Node, Settings},
    targets::Places,
    wire::{NetworkTask, Order, Task},
};

/// A node with this journal, on which there is nothing else.
pub(crate) fn node(journal: &Path) -> Node {
    let settings = Settings {
        places: Places {
            proc: Proc::default(),
            cgroups: "/nowhere".into(),
            pod_logs: "/nowhere".into(),
        },
        grace: Duration::from_secs(30),
        fill_node_disk: false,
    };
    Node::new(settings, journal, Metrics::new().0).unwrap()
}

pub(crate) fn key(pod: &str) -> Key {
    Key {
        injection: "inj-uid".to_owned(),
        fault: "slow".to_owned(),
        pod: pod.to_owned(),
        container: String::new(),
    }
}

/// An injection of one fault `slow` on some pods, for a minute.
pub(crate) fn injection(uid: &str, pods: &[&str], network: NodeNetworkFault) -> NodeInjection {
    let target = |pod: &&str| NodeTarget {
        pod_name: format!("pod-{pod}"),
        pod_uid: (*pod).to_owned(),
        containers: Vec::new(),
    };
    let fault = NodeFault {
        name: "slow".to_owned(),
        start_after: GoDuration::default(),
        duration: GoDuration::from_secs(60),
        targets: pods.iter().map(target).collect(),
        network: Some(network),
        cpu: None,
        memory: None,
        io: None,
        disk_fill: None,
        container_kill: None,
        container_pause: None,
    };
    let spec = NodeInjectionSpec {
        node_name: "node1".to_owned(),
        experiment: experiment(),
        duration: GoDuration::from_secs(60),
        start_time: None,
        abort: false,
        dry_run: false,
        recheck_after: GoDuration::from_secs(600),
        cluster_dns: Vec::new(),
        faults: vec![fault],
    };
    let mut injection = NodeInjection::new("run-1", spec);
    injection.metadata.uid = Some(uid.to_owned());
    injection.metadata.generation = Some(1);
    injection.metadata.creation_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
    injection
}

fn device(name: &str, index: u32) -> Device {
    Device {
        name: LinkName::new(name).unwrap(),
        index,
    }
}

fn experiment() -> ExperimentRef {
    ExperimentRef {
        namespace: "shop".to_owned(),
        name: "run".to_owned(),
        uid: "run-uid".to_owned(),
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
        experiment: experiment(),
        pod_name: format!("pod-{pod}"),
        pod_cgroup: "/sys/fs/cgroup/kubepods/pod".into(),
        recheck_after: Duration::from_mins(10),
        objects: Objects::Network(NetworkEntry {
            netns: NetNsId {
                device: 4,
                inode: 1,
            },
            table: "windtunnel-x".to_owned(),
            priority: 0,
            resets: Vec::new(),
            detours: vec![Detour {
                direction: kernel::nft::Direction::Egress,
                device: device("eth0", 2),
                ifb: device("wt0", 3).name,
                ifb_index: Some(3),
                netem: Netem::new(1000),
            }],
            name_servers: Vec::new(),
            drain: Duration::from_secs(1),
        }),
        prepared_at: Duration::from_secs(100),
        window: None,
        counts_before: Counts::default(),
        injected_before: None,
        state: State::Prepared,
    }
}

/// What an injector is told to do to a pod's network until ten minutes after boot.
pub(crate) fn order() -> Order {
    Order {
        deadline: Duration::from_mins(10),
        task: Task::Network(NetworkTask {
            netns: NetNsId {
                device: 4,
                inode: 1,
            },
            pid: 1,
            pod: "/sys/fs/cgroup/kubepods/pod".into(),
            table: Table {
                name: "windtunnel-x".to_owned(),
                chains: Vec::new(),
            },
            queues: Vec::new(),
        }),
    }
}

/// A shell script. Another process writes it: while this one has it open, so would what other tests
/// start meanwhile, and it could not be run.
pub(crate) fn program(directory: &Path, script: &str) -> PathBuf {
    let path = directory.join("program");
    let mut write = Command::new("sh")
        .args(["-c", "cat >\"$0\" && chmod 755 \"$0\""])
        .arg(&path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = write.stdin.take().unwrap();
    write!(input, "#!/bin/sh\n{script}\n").unwrap();
    drop(input);
    assert!(write.wait().unwrap().success());
    path
}

/// The same fault on containers instead: of each pod the container `app`, `containerd://1`.
pub(crate) fn on_containers(injection: &mut NodeInjection) {
    for fault in &mut injection.spec.faults {
        fault.network = None;
        fault.cpu = Some(CpuFault {
            load: Percent::ALL,
            cores: None,
        });
        for target in &mut fault.targets {
            target.containers = vec![NodeContainer {
                name: "app".to_owned(),
                id: "containerd://1".to_owned(),
                volume_mounts: Vec::new(),
                storage_limits: std::collections::BTreeMap::new(),
            }];
        }
    }
}

/// An entry of such a fault.
pub(crate) fn container_entry(pod: &str) -> Entry {
    let mut entry = entry(pod);
    "app".clone_into(&mut entry.key.container);
    entry.objects = Objects::Container(ContainerEntry {
        id: "containerd://1".to_owned(),
        cgroup: "/sys/fs/cgroup/kubepods/pod/app".into(),
        init: ProcessId {
            pid: 10,
            start_time: 10,
        },
        act: Act::Cpu { millicores: 500 },
        is_successor: false,
    });
    entry
}
