//! Certificates and kubeconfigs of one cluster, new for each and gone with it.
//!
//! One authority signs everything. Keys are ECDSA P-256, the one for service accounts too.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair, KeyUsagePurpose,
};

use super::{addresses, layout};

/// A certificate's holder.
struct Holder<'a> {
    /// Name of its files.
    file: &'a str,
    user: String,
    group: Option<&'a str>,
    names: Vec<String>,
}

impl<'a> Holder<'a> {
    fn client(file: &'a str, user: &str) -> Self {
        Self {
            file,
            user: user.into(),
            group: None,
            names: Vec::new(),
        }
    }

    fn admin(file: &'a str, user: &str) -> Self {
        Self {
            group: Some("system:masters"),
            ..Self::client(file, user)
        }
    }
}

pub(crate) fn certificate(name: &str) -> PathBuf {
    layout::state("pki").join(format!("{name}.crt"))
}

pub(crate) fn key(name: &str) -> PathBuf {
    layout::state("pki").join(format!("{name}.key"))
}

pub(crate) fn kubeconfig(name: &str) -> PathBuf {
    layout::state("pki").join(format!("{name}.kubeconfig"))
}

/// The public key that service account tokens are checked with.
pub(crate) fn service_account_public() -> PathBuf {
    layout::state("pki/sa.pub")
}

/// Makes everything that a cluster with this many nodes needs.
pub(crate) fn create(nodes: u8) -> Result<()> {
    let authority = authority()?;
    write(&certificate("ca"), &authority.pem())?;
    write(&key("ca"), &authority.key().serialize_pem())?;
    let accounts = KeyPair::generate().context("make the service account key")?;
    write(&key("sa"), &accounts.serialize_pem())?;
    write(&service_account_public(), &accounts.public_key_pem())?;

    let mut holders = vec![
        Holder {
            names: api_names(),
            ..Holder::client("apiserver", "kube-apiserver")
        },
        Holder::admin("kubelet-client", "kubelet-client"),
        Holder::admin("admin", "admin"),
        Holder::client("manager", "system:kube-controller-manager"),
        Holder::client("scheduler", "system:kube-scheduler"),
        Holder::client("proxy", "system:kube-proxy"),
    ];
    let names: Vec<String> = (1..=nodes).map(addresses::node_name).collect();
    holders.extend(names.iter().zip(1..).map(|(name, index)| Holder {
        file: name,
        user: format!("system:node:{name}"),
        group: Some("system:nodes"),
        names: vec![
            name.clone(),
            addresses::node_v4(index),
            addresses::node_v6(index),
        ],
    }));
    for holder in &holders {
        issue(&authority, holder).with_context(|| format!("certificate of {}", holder.file))?;
    }
    Ok(())
}

fn api_names() -> Vec<String> {
    [
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "localhost",
        "127.0.0.1",
        "::1",
    ]
    .into_iter()
    .chain([addresses::HOST, addresses::HOST_V6])
    .chain(addresses::API_SERVICE)
    .map(str::to_owned)
    .collect()
}

fn authority() -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "lab");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    let key = KeyPair::generate().context("make the authority's key")?;
    CertifiedIssuer::self_signed(params, key).context("make the authority")
}

fn issue(authority: &CertifiedIssuer<'static, KeyPair>, holder: &Holder<'_>) -> Result<()> {
    let mut params = CertificateParams::new(holder.names.clone())?;
    params
        .distinguished_name
        .push(DnType::CommonName, holder.user.as_str());
    if let Some(group) = holder.group {
        params
            .distinguished_name
            .push(DnType::OrganizationName, group);
    }
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    params.use_authority_key_identifier_extension = true;
    let pair = KeyPair::generate()?;
    let signed = params.signed_by(&pair, authority)?;
    write(&certificate(holder.file), &signed.pem())?;
    write(&key(holder.file), &pair.serialize_pem())?;
    let config = kubeconfig_text(holder.file);
    write(&kubeconfig(holder.file), &config.to_string())
}

/// A kubeconfig with paths relative to itself: it is read by several names, from inside the
/// cluster's namespaces and from outside.
fn kubeconfig_text(name: &str) -> serde_json::Value {
    let server = format!("https://{}:{}", addresses::HOST, addresses::API_PORT);
    serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "lab", "cluster": {
            "server": server,
            "certificate-authority": "ca.crt",
        }}],
        "users": [{"name": name, "user": {
            "client-certificate": format!("{name}.crt"),
            "client-key": format!("{name}.key"),
        }}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
        "current-context": "lab",
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}
