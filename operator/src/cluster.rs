//! Trimmed views of the cluster's own objects: only what decisions read is kept in memory.

use std::net::IpAddr;

use k8s_openapi::api::{core::v1, discovery::v1 as discovery};
use kube::{
    Resource, ResourceExt as _,
    core::{ApiResource, object::Object},
};
use serde::{Deserialize, Serialize};
use windtunnel_crds::injection::NodeContainer;

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
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Container {
    name: String,
    volume_mounts: Vec<VolumeMount>,
    ports: Vec<ContainerPort>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct VolumeMount {
    mount_path: String,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ContainerPort {
    name: String,
    container_port: u16,
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
