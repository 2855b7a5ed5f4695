//! Three services that call each other, gateway → orders → inventory, and what they measure.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::build::Images;
use crate::cluster::{Cluster, success};

/// The sample's manifest; the image's tag stands in it as `TAG`.
const MANIFEST: &str = include_str!("../../../examples/sample.yaml");
const READY: Duration = Duration::from_mins(2);
const ANSWER: Duration = Duration::from_secs(2);

/// The sample on a cluster.
#[derive(Debug)]
pub struct Sample<'a> {
    cluster: &'a Cluster,
}

/// What a service saw of its calls in one second.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reading {
    /// Seconds since 1970.
    pub at: u64,
    /// Calls that succeeded.
    pub ok: usize,
    /// Calls that failed.
    pub failed: usize,
    /// Median of how long they took, in milliseconds.
    pub p50_millis: u64,
    /// 99th percentile.
    pub p99_millis: u64,
}

impl<'a> Sample<'a> {
    /// The sample's namespace.
    pub const NAMESPACE: &'static str = "shop";

    /// Installs the sample and waits until it is ready.
    ///
    /// # Errors
    /// When it does not come up.
    pub fn install(cluster: &'a Cluster, images: &Images) -> Result<Self> {
        cluster.apply(&MANIFEST.replace("sample:latest", &format!("sample:{}", images.tag)))?;
        rolled_out(cluster, Self::NAMESPACE, "deployment")?;
        Ok(Self { cluster })
    }

    /// The last full second that the only pod of a service has seen.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn reading(&self, app: &str) -> Result<Reading> {
        let address = self.address_of(app)?;
        let body = self.cluster.within(|| get(address, "/stats"))?;
        let seconds: Vec<Reading> = serde_json::from_str(&body).context("read the statistics")?;
        Ok(seconds.last().cloned().unwrap_or_default())
    }

    /// How many pods of a service are ready.
    ///
    /// # Errors
    /// When the API server does not answer.
    pub fn ready(&self, app: &str) -> Result<u64> {
        let deployment = self
            .cluster
            .get(&["deployment", app, "--namespace", Self::NAMESPACE])?;
        Ok(deployment["status"]["readyReplicas"].as_u64().unwrap_or(0))
    }

    fn address_of(&self, app: &str) -> Result<SocketAddr> {
        let selector = format!("app={app}");
        let pods = self.cluster.get(&[
            "pods",
            "--namespace",
            Self::NAMESPACE,
            "--selector",
            &selector,
        ])?;
        let address = pods["items"][0]["status"]["podIP"].as_str();
        let address: IpAddr = address
            .with_context(|| format!("no pod of {app}"))?
            .parse()?;
        Ok(SocketAddr::new(address, 8080))
    }
}

/// Waits until what is named, or all of a kind, runs as its manifest says.
pub(super) fn rolled_out(cluster: &Cluster, namespace: &str, what: &str) -> Result<()> {
    let timeout = format!("--timeout={}s", READY.as_secs());
    let wait = [
        "rollout",
        "status",
        what,
        "--namespace",
        namespace,
        &timeout,
    ];
    success(&cluster.kubectl(&wait)?).map(drop)
}

/// The body of an HTTP answer.
fn get(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, ANSWER)
        .with_context(|| format!("connect to {address}"))?;
    stream.set_read_timeout(Some(ANSWER))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    Ok(body.to_owned())
}
