//! Trimmed views of the cluster's own objects: only what decisions read is kept in memory.

use std::{collections::BTreeMap, net::IpAddr};

use k8s_openapi::api::{core::v1, discovery::v1 as discovery};
use kube::{
    Resource, ResourceExt as _,
    core::{ApiResource, object::Object},
};
use serde::{Deserialize, Serialize};
use windtunnel_crds::{injection::NodeContainer, units};

/// Names the container of a pod that tools act on by default.
const DEFAULT_CONTAINER: &str = "kubectl.kubernetes.io/default-container";

/// A pod, trimmed.
pub type Pod = Object<PodSpec, PodStatus>;
/// A Service, trimmed.
pub type Service = Object<ServiceSpec, NoStatus>;

/// What is read of a pod's spec.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    node_name: String,
    host_network: bool,
    containers: Vec<Container>,
    volumes: Vec<Volume>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Volume {
    name: String,
    empty_dir: Option<EmptyDir>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct EmptyDir {
    medium: String,
    size_limit: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Resources {
    limits: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    volume_mounts: Vec<VolumeMount>,
    resources: Resources,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct VolumeMount {
    name: String,
    mount_path: String,
}

/// What is read of a pod's status.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    phase: String,
    conditions: Vec<PodCondition>,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodIp>,
    container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct PodCondition {
    r#type: String,
    status: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct PodIp {
    ip: IpAddr,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerStatus {
    name: String,
    #[serde(rename = "containerID")]
    container_id: String,
}

/// What is read of a Service's spec.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    #[serde(rename = "clusterIPs")]
    pub(crate) cluster_ips: Vec<String>,
    pub(crate) ports: Vec<ServicePort>,
}

/// A port of a Service.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServicePort {
    pub(crate) name: String,
    pub(crate) port: u16,
    pub(crate) protocol: Option<windtunnel_crds::peers::Protocol>,
}

/// The status of something whose status nobody reads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NoStatus {}

/// The API resource behind a trimmed view.
#[must_use]
pub fn resource<K: Resource<DynamicType = ()>>() -> ApiResource {
    ApiResource::erase::<K>(&())
}

/// The API resource of pods.
#[must_use]
pub fn pods() -> ApiResource {
    resource::<v1::Pod>()
}

/// The API resource of Services.
#[must_use]
pub fn services() -> ApiResource {
    resource::<v1::Service>()
}

/// The API resource of endpoint slices, which are read untrimmed.
pub type EndpointSlice = discovery::EndpointSlice;

impl PodSpec {
    /// Where volumes are mounted in a container.
    fn mounts(&self, container: &str) -> Vec<String> {
        let its = self.containers.iter().filter(|c| c.name == container);
        let mounts = its.flat_map(|c| &c.volume_mounts);
        mounts.map(|mount| mount.mount_path.clone()).collect()
    }

    /// How many bytes the pod may store at those mounts that are on the node's own disk.
    fn storage_limits(&self, container: &str) -> BTreeMap<String, i64> {
        let limit = |c: &Container| units::bytes(c.resources.limits.get("ephemeral-storage")?);
        let of_pod = self
            .containers
            .iter()
            .filter_map(limit)
            .reduce(u64::saturating_add);
        let on_disk = |name: &str| {
            let volume = self.volumes.iter().find(|v| v.name == name);
            volume?.empty_dir.as_ref().filter(|e| e.medium.is_empty())
        };
        let its = self.containers.iter().filter(|c| c.name == container);
        its.flat_map(|c| &c.volume_mounts)
            .filter_map(|mount| {
                let size = on_disk(&mount.name)?.size_limit.as_deref();
                let limits = [size.and_then(units::bytes), of_pod];
                let least = limits.into_iter().flatten().min()?;
                let least = i64::try_from(least).unwrap_or(i64::MAX);
                Some((mount.mount_path.clone(), least))
            })
            .collect()
    }
}

/// A pod as a possible target or peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Name.
    pub name: String,
    /// Uid.
    pub uid: String,
    /// The node it runs on; empty while unscheduled.
    pub node: String,
    /// It shares the node's network namespace.
    pub host_network: bool,
    /// It is Running and Ready, and not on its way out.
    pub eligible: bool,
    /// Its running containers.
    pub containers: Vec<NodeContainer>,
    /// The name of the container that is meant where none is named.
    pub default_container: String,
    /// Its addresses, of both families.
    pub addresses: Vec<IpAddr>,
}

impl From<&Pod> for Candidate {
    fn from(pod: &Pod) -> Self {
        let status = pod.status.clone().unwrap_or_default();
        let ready = status
            .conditions
            .iter()
            .any(|c| c.r#type == "Ready" && c.status == "True");
        let leaving = pod.metadata.deletion_timestamp.is_some();
        Self {
            name: pod.name_any(),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            node: pod.spec.node_name.clone(),
            host_network: pod.spec.host_network,
            eligible: status.phase == "Running" && ready && !leaving,
            containers: status
                .container_statuses
                .into_iter()
                .filter(|c| !c.container_id.is_empty())
                .map(|c| NodeContainer {
                    volume_mounts: pod.spec.mounts(&c.name),
                    storage_limits: pod.spec.storage_limits(&c.name),
                    name: c.name,
                    id: c.container_id,
                })
                .collect(),
            default_container: pod
                .annotations()
                .get(DEFAULT_CONTAINER)
                .or(pod.spec.containers.first().map(|c| &c.name))
                .cloned()
                .unwrap_or_default(),
            addresses: status.pod_ips.into_iter().map(|ip| ip.ip).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pod_may_store_is_the_least_of_its_limits() {
        let spec: PodSpec = serde_json::from_value(serde_json::json!({
            "containers": [
                {
                    "name": "app",
                    "resources": {"limits": {"ephemeral-storage": "1Gi", "memory": "1Mi"}},
                    "volumeMounts": [
                        {"name": "small", "mountPath": "/small"},
                        {"name": "free", "mountPath": "/free"},
                        {"name": "memory", "mountPath": "/memory"},
                        {"name": "claim", "mountPath": "/claim"},
                    ],
                },
                {"name": "sidecar", "resources": {"limits": {"ephemeral-storage": "1Gi"}}},
            ],
            "volumes": [
                {"name": "small", "emptyDir": {"sizeLimit": "64Mi"}},
                {"name": "free", "emptyDir": {}},
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
                {"name": "claim", "persistentVolumeClaim": {"claimName": "x"}},
            ],
        }))
        .unwrap();
        let limits = spec.storage_limits("app");
        let expected = [
            ("/free".to_owned(), 2 << 30),
            ("/small".to_owned(), 64 << 20),
        ];
        assert_eq!(limits, expected.into());
        assert!(spec.storage_limits("sidecar").is_empty());
    }
}
