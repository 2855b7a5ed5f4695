//! How each component of the control plane is started.

use super::service::Spec;
use super::{addresses, layout, pki};

/// Components in the order that they need each other.
pub(crate) const COMPONENTS: [&str; 4] = ["etcd", "apiserver", "manager", "scheduler"];

const ETCD: &str = "http://127.0.0.1:2379";

/// How a component is run.
pub(crate) fn spec(component: &str) -> Spec {
    let flags = match component {
        "etcd" => etcd(),
        "apiserver" => apiserver(),
        "manager" => manager(),
        _ => scheduler(),
    };
    let mut argv = vec![
        layout::kubernetes().display().to_string(),
        component.to_owned(),
    ];
    argv.extend(
        flags
            .into_iter()
            .map(|(flag, value)| format!("--{flag}={value}")),
    );
    Spec {
        name: component.to_owned(),
        argv,
        env: Vec::new(),
        log: layout::log(component),
        restarts: true,
        processor: None,
    }
}

type Flags = Vec<(&'static str, String)>;

fn etcd() -> Flags {
    vec![
        ("data-dir", layout::state("etcd").display().to_string()),
        // The data is on a tmpfs: there is nothing to sync to.
        ("unsafe-no-fsync", "true".into()),
        ("listen-client-urls", ETCD.into()),
        ("advertise-client-urls", ETCD.into()),
        ("listen-peer-urls", "http://127.0.0.1:2380".into()),
        ("log-level", "warn".into()),
    ]
}

fn apiserver() -> Flags {
    let file = |path: std::path::PathBuf| path.display().to_string();
    vec![
        ("etcd-servers", ETCD.into()),
        ("advertise-address", addresses::HOST.into()),
        ("bind-address", "::".into()),
        ("secure-port", addresses::API_PORT.to_string()),
        ("client-ca-file", file(pki::certificate("ca"))),
        ("tls-cert-file", file(pki::certificate("apiserver"))),
        ("tls-private-key-file", file(pki::key("apiserver"))),
        (
            "service-account-issuer",
            "https://kubernetes.default.svc".into(),
        ),
        (
            "service-account-key-file",
            file(pki::service_account_public()),
        ),
        ("service-account-signing-key-file", file(pki::key("sa"))),
        ("service-cluster-ip-range", addresses::SERVICE_RANGES.into()),
        ("authorization-mode", "Node,RBAC".into()),
        ("enable-admission-plugins", "NodeRestriction".into()),
        ("allow-privileged", "true".into()),
        (
            "kubelet-client-certificate",
            file(pki::certificate("kubelet-client")),
        ),
        ("kubelet-client-key", file(pki::key("kubelet-client"))),
        (
            "kubelet-certificate-authority",
            file(pki::certificate("ca")),
        ),
        // A node's name is resolved nowhere: exec and logs go to its address.
        ("kubelet-preferred-address-types", "InternalIP".into()),
    ]
}

fn manager() -> Flags {
    let file = |path: std::path::PathBuf| path.display().to_string();
    vec![
        ("kubeconfig", file(pki::kubeconfig("manager"))),
        ("service-account-private-key-file", file(pki::key("sa"))),
        ("root-ca-file", file(pki::certificate("ca"))),
        ("cluster-signing-cert-file", file(pki::certificate("ca"))),
        ("cluster-signing-key-file", file(pki::key("ca"))),
        ("use-service-account-credentials", "true".into()),
        ("allocate-node-cidrs", "false".into()),
        ("leader-elect", "false".into()),
        // One account per controller: at the usual rate making them takes five seconds.
        ("kube-api-qps", "300".into()),
        ("kube-api-burst", "300".into()),
        // A lost node is seen in 20 s instead of 50, so that tests need not wait as long.
        ("node-monitor-grace-period", "20s".into()),
        ("node-monitor-period", "2s".into()),
    ]
}

fn scheduler() -> Flags {
    let file = |path: std::path::PathBuf| path.display().to_string();
    vec![
        ("kubeconfig", file(pki::kubeconfig("scheduler"))),
        ("leader-elect", "false".into()),
    ]
}
