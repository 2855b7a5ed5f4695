//! Addresses of the cluster, in both families. All are private to its network namespace.
//!
//! The machine's side has .1 of both networks; node N has .1N of both and a pod range of its own.

/// The machine's side of the cluster network: the control plane is here.
pub(crate) const HOST: &str = "10.88.0.1";
pub(crate) const HOST_V6: &str = "fd00:88::1";
/// The machine's side of the management network.
pub(crate) const MANAGEMENT_HOST: &str = "10.87.0.1";
/// Where a node's hands listen, on the management network.
pub(crate) const HANDS_PORT: u16 = 7000;
pub(crate) const API_PORT: u16 = 6443;

/// How many nodes a cluster can have.
pub(crate) const MOST_NODES: u8 = 3;

pub(crate) const POD_RANGES: &str = "10.89.0.0/16,fd00:89::/32";
pub(crate) const SERVICE_RANGES: &str = "10.90.0.0/16,fd00:90::/108";
/// The API server's own Service.
pub(crate) const API_SERVICE: [&str; 2] = ["10.90.0.1", "fd00:90::1"];
/// The cluster's DNS Service.
pub(crate) const DNS: &str = "10.90.0.10";

pub(crate) fn node_v4(index: u8) -> String {
    format!("10.88.0.1{index}")
}

pub(crate) fn node_v6(index: u8) -> String {
    format!("fd00:88::1{index}")
}

pub(crate) fn node_management(index: u8) -> String {
    format!("10.87.0.1{index}")
}

pub(crate) fn pods_v4(index: u8) -> String {
    format!("10.89.{index}.0/24")
}

pub(crate) fn pods_v6(index: u8) -> String {
    format!("fd00:89:{index}::/64")
}

/// Name of a node in Kubernetes, on its console and in the harness.
pub(crate) fn node_name(index: u8) -> String {
    format!("node{index}")
}

/// The node of a name.
pub(crate) fn node_index(name: &str) -> Option<u8> {
    name.strip_prefix("node")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_found_by_its_name() {
        assert_eq!(node_index(&node_name(2)), Some(2));
        assert_eq!(node_index("pod2"), None);
    }
}
