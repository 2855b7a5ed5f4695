//! The wires of the cluster, on the machine's side: bridges, TAP devices, routes.
//!
//! `cluster` carries everything of Kubernetes; `management` only the harness's own hands, so that
//! a node that was cut off can still be looked at. A cut node's TAP device is moved to a bridge
//! that leads nowhere: to the node its link stays up, as when a switch dies further off.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::addresses;
use super::kernel::Link;

const CLUSTER: &str = "cluster";
const MANAGEMENT: &str = "management";

/// A node's `vec0` and `vec1`. The addresses are the same at each boot: neighbours that remember
/// others would not reach the node for half a minute.
pub(crate) fn links(node: u8) -> [Link; 2] {
    [("tap", 0), ("mgmt", 1)].map(|(name, network)| Link {
        tap: format!("{name}{node}"),
        mac: format!("0a:00:00:00:{network:02x}:{node:02x}"),
    })
}

/// Makes all devices and routes in the network namespace of this process.
pub(crate) fn create(nodes: u8) -> Result<()> {
    // Tests talk to pods of both nodes from here; nothing else may be forwarded.
    fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0").context("turn off IPv6 DAD")?;
    let mut lines = vec![
        "link set lo up".to_owned(),
        format!("link add {CLUSTER} type bridge"),
        format!("link add {MANAGEMENT} type bridge"),
        format!("address add {}/24 dev {CLUSTER}", addresses::HOST),
        format!("address add {}/64 dev {CLUSTER} nodad", addresses::HOST_V6),
        format!(
            "address add {}/24 dev {MANAGEMENT}",
            addresses::MANAGEMENT_HOST
        ),
        format!("link set {CLUSTER} up"),
        format!("link set {MANAGEMENT} up"),
    ];
    for node in 1..=nodes {
        let [cluster, management] = links(node).map(|link| link.tap);
        lines.extend([
            format!("link add {} type bridge", nowhere(node)),
            format!("link set {} up", nowhere(node)),
            format!("tuntap add {cluster} mode tap"),
            format!("tuntap add {management} mode tap"),
            format!("link set {cluster} master {CLUSTER} up"),
            format!("link set {management} master {MANAGEMENT} up"),
            format!(
                "route add {} via {}",
                addresses::pods_v4(node),
                addresses::node_v4(node)
            ),
            format!(
                "route add {} via {}",
                addresses::pods_v6(node),
                addresses::node_v6(node)
            ),
        ]);
    }
    ip_batch(&lines)
}

/// Takes a node off the cluster network.
pub(crate) fn cut(node: u8) -> Result<()> {
    let [Link { tap, .. }, _] = links(node);
    ip_batch(&[format!("link set {tap} master {}", nowhere(node))])
}

/// Puts a node back on the cluster network.
pub(crate) fn heal(node: u8) -> Result<()> {
    let [Link { tap, .. }, _] = links(node);
    ip_batch(&[format!("link set {tap} master {CLUSTER}")])
}

fn nowhere(node: u8) -> String {
    format!("nowhere{node}")
}

/// Runs several `ip` commands by one program; the first that fails ends it.
pub(crate) fn ip_batch(lines: &[String]) -> Result<()> {
    let mut child = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("run ip")?;
    let mut stdin = child.stdin.take().context("ip has no input")?;
    stdin
        .write_all((lines.join("\n") + "\n").as_bytes())
        .context("write to ip")?;
    drop(stdin);
    let output = child.wait_with_output().context("wait for ip")?;
    if !output.status.success() {
        bail!("ip: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(())
}
