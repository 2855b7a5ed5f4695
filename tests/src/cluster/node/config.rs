//! Configuration files of a node's services.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::cluster::{addresses, layout, pki};

/// Image that holds a pod's namespaces.
const PAUSE_IMAGE: &str = "lab/pause:1";

pub(crate) const CONTAINERD: &str = "/run/containerd.toml";
pub(crate) const KUBELET: &str = "/run/kubelet.json";
pub(crate) const PROXY: &str = "/run/proxy.json";
pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";
const CNI: &str = "/etc/cni/net.d/10-lab.conflist";

/// Writes the configuration of every service.
pub(crate) fn write(index: u8) -> Result<()> {
    let name = addresses::node_name(index);
    write_file(CNI, &cni(index).to_string())?;
    write_file(CONTAINERD, &containerd())?;
    write_file(KUBELET, &kubelet(&name).to_string())?;
    write_file(PROXY, &proxy(&name).to_string())?;
    // What pods with the node's own DNS see: no one listens there.
    write_file(
        "/etc/resolv.conf",
        &format!("nameserver {}\n", addresses::HOST),
    )?;
    write_file("/etc/hostname", &format!("{name}\n"))?;
    write_file("/etc/machine-id", &format!("{index:032x}\n"))
}

fn write_file(path: &str, text: &str) -> Result<()> {
    fs::write(Path::new(path), text).with_context(|| format!("write {path}"))
}

fn cni(index: u8) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "lab",
        "plugins": [{
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": true,
            "ipMasq": false,
            "hairpinMode": true,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/cni-addresses",
                "ranges": [
                    [{"subnet": addresses::pods_v4(index)}],
                    [{"subnet": addresses::pods_v6(index)}],
                ],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            },
        }],
    })
}

fn containerd() -> String {
    format!(
        r#"version = 2
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.internal.v1.tracing",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.native",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "/etc/cni/net.d"
"#
    )
}

fn kubelet(name: &str) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": pki::certificate("ca")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": pki::certificate(name),
        "tlsPrivateKeyFile": pki::key(name),
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "cgroupDriver": "cgroupfs",
        "clusterDNS": [addresses::DNS],
        "clusterDomain": "cluster.local",
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "50Mi"},
        "failSwapOn": false,
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": false,
        // A lost node is seen within 20 s (the manager's grace period).
        "nodeLeaseDurationSeconds": 16,
        "nodeStatusUpdateFrequency": "4s",
        "resolvConf": "/etc/resolv.conf",
        "volumePluginDir": "/var/lib/kubelet/plugins-exec",
    })
}

fn proxy(name: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": pki::kubeconfig("proxy")},
        "clusterCIDR": addresses::POD_RANGES,
        "conntrack": {"maxPerCore": 0},
        "hostnameOverride": name,
    })
}

/// Program and arguments of a service.
pub(crate) fn argv(service: &str, index: u8) -> Vec<String> {
    let kubernetes = layout::kubernetes().display().to_string();
    let name = addresses::node_name(index);
    let path = |path: PathBuf| path.display().to_string();
    match service {
        "containerd" => vec!["containerd".into(), "--config".into(), CONTAINERD.into()],
        "kubelet" => vec![
            kubernetes,
            "kubelet".into(),
            format!("--config={KUBELET}"),
            format!("--kubeconfig={}", path(pki::kubeconfig(&name))),
            format!("--hostname-override={name}"),
            format!(
                "--node-ip={},{}",
                addresses::node_v4(index),
                addresses::node_v6(index)
            ),
            "--root-dir=/var/lib/kubelet".into(),
            "--v=2".into(),
        ],
        _ => vec![
            kubernetes,
            "proxy".into(),
            format!("--config={PROXY}"),
            "--v=2".into(),
        ],
    }
}
