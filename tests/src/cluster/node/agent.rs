//! The harness inside a node: starts the services in order and keeps them running.

use std::fs;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use super::hands::{NodeFacts, serve};
use super::{config, images};
use crate::cluster::poll::until;
use crate::cluster::progress::say;
use crate::cluster::service::{Service, Spec};
use crate::cluster::{addresses, layout};

/// Services of a node in the order that they need each other.
const SERVICES: [&str; 3] = ["containerd", "kubelet", "proxy"];
const CONTAINERD_BOUND: Duration = Duration::from_mins(2);
/// kubelet's own retries are seconds apart, so it is started when there is an API server; if
/// there is none for this long it is started all the same.
const API_BOUND: Duration = Duration::from_mins(2);

/// Runs the services. Ends only with an error.
pub(crate) fn main(index: u8) -> Result<()> {
    let services: Arc<Vec<Arc<Service>>> = Arc::new(
        SERVICES
            .iter()
            .map(|service| Service::new(spec(service, index)))
            .collect(),
    );
    let facts = NodeFacts::default();
    let facts = Arc::new(std::sync::Mutex::new(facts));
    let starting = (Arc::clone(&services), Arc::clone(&facts));
    std::thread::spawn(move || {
        let (services, facts) = starting;
        if let Err(error) = start(&services, &facts) {
            say(&format!("node agent: {error:#}"));
        }
    });
    serve(&addresses::node_management(index), &services, &facts)
}

fn spec(service: &str, index: u8) -> Spec {
    let directory = layout::node_directory(&addresses::node_name(index));
    Spec {
        name: service.into(),
        argv: config::argv(service, index),
        env: Vec::new(),
        log: directory.join(format!("{service}.log")),
        restarts: true,
        processor: None,
    }
}

fn start(services: &[Arc<Service>], facts: &std::sync::Mutex<NodeFacts>) -> Result<()> {
    let note = |step: &str| {
        let seconds = fs::read_to_string("/proc/uptime").unwrap_or_default();
        let seconds = seconds
            .split(' ')
            .next()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0.0);
        let mut facts = facts
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        facts.steps.push((step.to_owned(), seconds));
    };
    note("booted");
    let [containerd, kubelet, proxy] = services else {
        anyhow::bail!("services are missing")
    };
    containerd.start();
    until("containerd's socket", CONTAINERD_BOUND, || {
        Ok(UnixStream::connect(config::CONTAINERD_SOCKET).ok())
    })?;
    note("containerd");
    images::import_all()?;
    note("images");
    let api = format!("{}:{}", addresses::HOST, addresses::API_PORT);
    if until("the API server", API_BOUND, || {
        Ok(TcpStream::connect(&api).ok())
    })
    .is_err()
    {
        say("node agent: no API server yet, starting without it");
    }
    note("API server");
    kubelet.start();
    proxy.start();
    Ok(())
}
