//! From a pod's uid to what the kernel knows of it, without asking a runtime: kubelet's log
//! directory says whose pod it is, its control group which processes are in it, and they which
//! namespace they share.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use thiserror::Error;
use windtunnel_crds::injection::{ExperimentRef, NodeTarget};

use crate::kernel::{
    cgroup::{self, CgroupError, Hierarchies},
    netns::{NetNs, NetNsError, NetNsId},
    proc::{Proc, ProcError, ProcessId},
};

/// Why a target cannot be used.
#[derive(Debug, Error)]
pub enum TargetError {
    /// The pod does not belong to the experiment's namespace.
    #[error("pod {pod} with uid {uid} is not one of namespace {namespace} on this node")]
    Foreign {
        /// The pod's name.
        pod: String,
        /// Its uid.
        uid: String,
        /// The experiment's namespace.
        namespace: String,
    },
    /// The pod has no process here any more.
    #[error("pod {0} has no process on this node any more")]
    Gone(String),
    /// The pod shares the node's network namespace.
    #[error("pod {0} shares this node's network namespace")]
    HostNetwork(String),
    /// Its processes are in different network namespaces.
    #[error("the containers of pod {0} are in different network namespaces")]
    ManyNamespaces(String),
    /// The kernel's files could not be read.
    #[error("cannot read control groups")]
    Cgroup(#[from] CgroupError),
    /// A namespace could not be read.
    #[error("cannot read network namespaces")]
    NetNs(#[from] NetNsError),
    /// A process could not be read.
    #[error("cannot read processes")]
    Proc(#[from] ProcError),
}

impl TargetError {
    /// The word that stands for it in a status.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Foreign { .. } => "NotInNamespace",
            Self::Gone(_) => "TargetGone",
            Self::HostNetwork(_) => "HostNetwork",
            Self::ManyNamespaces(_) => "ManyNamespaces",
            Self::Cgroup(_) | Self::NetNs(_) | Self::Proc(_) => "NodeUnreadable",
        }
    }
}

/// Where the node's own files are seen from the agent.
#[derive(Debug, Clone)]
pub struct Places {
    /// `/proc` of the node's pid namespace.
    pub proc: Proc,
    /// Where control groups are mounted.
    pub cgroups: PathBuf,
    /// kubelet's directory of pod logs, one directory a pod: `<namespace>_<name>_<uid>`.
    pub pod_logs: PathBuf,
}

/// A target as the kernel knows it.
#[derive(Debug)]
pub struct Target {
    /// Directory of the pod's control group.
    pub cgroup: PathBuf,
    /// Its network namespace.
    pub netns: NetNs,
    /// The first process of each of its containers.
    pub inits: Vec<i32>,
}

/// Finds a target of an experiment.
///
/// # Errors
/// [`TargetError`]: [`TargetError::Gone`] where there is nothing left to hit, others where it must
/// not or cannot be hit.
pub fn resolve(
    places: &Places,
    experiment: &ExperimentRef,
    target: &NodeTarget,
) -> Result<Target, TargetError> {
    let NodeTarget {
        pod_name,
        pod_uid,
        containers,
    } = target;
    if !is_safe(pod_name)
        || !is_safe(pod_uid)
        || !belongs(places, &experiment.namespace, pod_name, pod_uid)
    {
        return Err(TargetError::Foreign {
            pod: pod_name.clone(),
            uid: pod_uid.clone(),
            namespace: experiment.namespace.clone(),
        });
    }
    let gone = || TargetError::Gone(pod_name.clone());
    let hierarchies = Hierarchies::detect(&places.cgroups)?;
    let root = hierarchies
        .controller("pids")
        .or_else(|| hierarchies.controller("memory"))
        .ok_or_else(gone)?;
    let pod = cgroup::find_pod(root, pod_uid)?.ok_or_else(gone)?;
    let inits = inits(&places.proc, &pod, containers.iter().map(|c| c.id.as_str()))?;
    let netns = common_netns(places, pod_name, &inits)?;
    if netns.is_host(&places.proc)? {
        return Err(TargetError::HostNetwork(pod_name.clone()));
    }
    Ok(Target {
        inits,
        cgroup: pod,
        netns,
    })
}

/// A container as the kernel knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Container {
    /// Directory of its control group, in the hierarchy of the controller that was asked for.
    pub cgroup: PathBuf,
    /// Its first process.
    pub init: ProcessId,
}

/// Finds a container of a pod by its id; the pod is one of [`resolve`]'s.
///
/// # Errors
/// [`TargetError::Gone`] where it has no process.
pub fn container(
    places: &Places,
    target: &NodeTarget,
    id: &str,
    controller: &str,
) -> Result<Container, TargetError> {
    let gone = || TargetError::Gone(target.pod_name.clone());
    let hierarchies = Hierarchies::detect(&places.cgroups)?;
    let root = hierarchies.controller(controller).ok_or_else(gone)?;
    let pod = cgroup::find_pod(root, &target.pod_uid)?.ok_or_else(gone)?;
    let cgroup = cgroup::find_container(&pod, id)?.ok_or_else(gone)?;
    let init = cgroup::init(&places.proc, &cgroup)?.ok_or_else(gone)?;
    Ok(Container { cgroup, init })
}

/// Names from the API become parts of paths: nothing in them may leave the directory.
fn is_safe(name: &str) -> bool {
    !name.is_empty()
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.')
        && !name.starts_with('.')
}

/// kubelet itself made this directory for the pod.
fn belongs(places: &Places, namespace: &str, pod: &str, uid: &str) -> bool {
    is_safe(namespace)
        && places
            .pod_logs
            .join(format!("{namespace}_{pod}_{uid}"))
            .is_dir()
}

/// The first process of each of the pod's containers that lives.
fn inits<'a>(
    proc: &Proc,
    pod: &Path,
    ids: impl Iterator<Item = &'a str>,
) -> Result<Vec<i32>, TargetError> {
    let mut inits = Vec::new();
    for id in ids {
        if let Some(container) = cgroup::find_container(pod, id)? {
            inits.extend(cgroup::init(proc, &container)?.map(|process| process.pid));
        }
    }
    Ok(inits)
}

fn common_netns(places: &Places, pod: &str, inits: &[i32]) -> Result<NetNs, TargetError> {
    let mut ids = BTreeSet::new();
    for pid in inits {
        ids.extend(NetNsId::of_pid(&places.proc, *pid)?);
    }
    if ids.len() > 1 {
        return Err(TargetError::ManyNamespaces(pod.to_owned()));
    }
    inits
        .iter()
        .find_map(|pid| NetNs::of_pid(&places.proc, *pid).ok())
        .ok_or_else(|| TargetError::Gone(pod.to_owned()))
}

/// Whether no process is left in a pod's control group.
#[must_use]
pub fn is_deserted(pod: &Path) -> bool {
    cgroup::pids(pod).is_ok_and(|pids| pids.is_empty())
}

/// Whether a process is in a pod's control group.
#[must_use]
pub fn is_alive(pod: &Path) -> bool {
    cgroup::pids(pod).is_ok_and(|pids| !pids.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_the_directory() {
        for name in ["", "..", "../x", "a/b", ".hidden", "a\0", "a_b"] {
            assert!(!is_safe(name), "{name:?}");
        }
        assert!(is_safe("web-7d4b9c.x-2") && is_safe("0b1c2d3e-4f50-6172-8394-a5b6c7d8e9f0"));
    }

    #[test]
    fn a_pod_of_another_namespace_is_foreign() {
        let logs = tempfile::tempdir().unwrap();
        std::fs::create_dir(logs.path().join("kube-system_dns_uid-1")).unwrap();
        let places = Places {
            proc: Proc::default(),
            cgroups: logs.path().to_owned(),
            pod_logs: logs.path().to_owned(),
        };
        let target = NodeTarget {
            pod_name: "dns".to_owned(),
            pod_uid: "uid-1".to_owned(),
            containers: Vec::new(),
        };
        let experiment = |namespace: &str| ExperimentRef {
            namespace: namespace.to_owned(),
            name: "x".to_owned(),
            uid: "x".to_owned(),
        };
        let error = resolve(&places, &experiment("shop"), &target).unwrap_err();
        assert_eq!(error.reason(), "NotInNamespace");
        let error = resolve(&places, &experiment("kube-system"), &target).unwrap_err();
        assert_eq!(error.reason(), "TargetGone");
    }
}
