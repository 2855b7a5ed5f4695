//! Whom a network fault is between: the peers of the target, in all their forms.

use std::{borrow::Cow, net::IpAddr};

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize};

/// The peers of the target.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "[has(self.podSelector), has(self.services), has(self.cidrs), has(self.hosts), has(self.ports), has(self.localPorts)].exists(x, x)")
    .message("must not be empty: leave peers out to mean all traffic"))]
#[x_kube(validation = Rule::new(
    "!(has(self.ports) && has(self.services) && !has(self.podSelector) && !has(self.cidrs) && !has(self.hosts))")
    .message("services bring their own ports; ports narrows podSelector, cidrs and hosts").field_path(".ports"))]
pub struct Peers {
    /// Pods of the experiment's own namespace with these labels: their addresses, and the
    /// ClusterIPs of the Services all of whose endpoints are among them (the target's own packets
    /// carry the ClusterIP; it is the node that replaces it). A Service that is only partly
    /// covered is left out, and named in the fault's message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "crate::selector::schema")]
    pub pod_selector: Option<LabelSelector>,

    /// Services: their ClusterIPs with the service's ports, and their endpoints with the target
    /// ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 16))]
    pub services: Vec<ServicePeer>,

    /// Address ranges, or single addresses, of either family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 256))]
    pub cidrs: Vec<Cidr>,

    /// DNS names, resolved by the operator again each minute, to addresses of both families.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 32))]
    pub hosts: Vec<Host>,

    /// The peer's ports: destination ports on egress, source ports on ingress. Narrows
    /// podSelector, cidrs and hosts. For pods these are the pods' own ports; packets to a Service
    /// that maps another port to them are meant as well. Default: any port and any protocol.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 16))]
    pub ports: Vec<PortRange>,

    /// The target's own ports: source ports on egress, destination ports on ingress. Default: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 16))]
    pub local_ports: Vec<PortRange>,
}

/// A Service by name.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePeer {
    /// The Service's name.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The Service's namespace. Default: the experiment's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub namespace: Option<String>,
}

/// A range of ports of one protocol.
#[derive(
    KubeSchema, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.endPort) || self.endPort >= self.port")
    .message("endPort must not be less than port").field_path(".endPort"))]
pub struct PortRange {
    /// The first port, 1 to 65535.
    #[schemars(range(min = 1, max = 65_535))]
    pub port: u16,
    /// The last port. Default: the same as `port`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_535))]
    pub end_port: Option<u16>,
    /// The protocol. Default: TCP.
    #[serde(default)]
    pub protocol: Protocol,
}

impl PortRange {
    /// The last port of the range, itself included.
    #[must_use]
    pub fn last(&self) -> u16 {
        self.end_port.unwrap_or(self.port)
    }
}

/// A transport protocol.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
#[serde(rename_all = "UPPERCASE")]
pub enum Protocol {
    /// TCP.
    #[default]
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

/// An address range; a single address is a range of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Cidr(pub IpNet);

impl<'de> Deserialize<'de> for Cidr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse::<IpNet>()
            .or_else(|_| text.parse::<IpAddr>().map(IpNet::from))
            .map(|net| Self(net.trunc()))
            .map_err(|_| {
                serde::de::Error::custom(format!("{text:?} is neither an address nor a CIDR"))
            })
    }
}

impl JsonSchema for Cidr {
    fn schema_name() -> Cow<'static, str> {
        "Cidr".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": 43,
            "x-kubernetes-validations": [{
                "rule": "isCIDR(self) || isIP(self)",
                "message": "must be an address or a CIDR, such as 10.0.0.0/8, 192.0.2.7 or fd00::/64",
            }],
        })
    }
}

/// A DNS name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Host(pub String);

impl JsonSchema for Host {
    fn schema_name() -> Cow<'static, str> {
        "Host".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "string",
            "maxLength": 253,
            "x-kubernetes-validations": [{
                "rule": r"self.matches('^[a-zA-Z0-9_][-a-zA-Z0-9_.]*$') && !isIP(self)",
                "message": "must be a DNS name such as db.example.com; addresses belong into cidrs",
            }],
        })
    }
}
