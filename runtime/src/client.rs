//! A client for the API server that this process belongs to.

use std::time::Duration;

use kube::{
    Client, Config,
    runtime::{utils::Backoff, watcher},
};
use thiserror::Error;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a written request may wait for the server's window.
const WRITE: Duration = Duration::from_secs(10);

/// After how many seconds a watch is opened anew, from where it was. A watch only listens: one whose
/// connection was lost without a word, by a balancer or a firewall on the way, looks like one that
/// has nothing to say, for the 295 s that kube gives it by default.
const WATCH: u32 = 30;
/// How long an answer, or the next part of one, may take; longer than a watch has nothing to say.
const READ: Duration = Duration::from_secs(WATCH as u64 + 10);

/// Between two tries of a watch.
const RETRY: Duration = Duration::from_secs(1);

/// The same wait between any two tries of a watch, however long it has failed: kube's own grows to a
/// minute, and what was away (the API server, a definition) would be back for as long before it is
/// heard of.
#[derive(Debug)]
pub struct Steady;

impl Iterator for Steady {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(RETRY)
    }
}

impl Backoff for Steady {
    fn reset(&mut self) {}
}

/// How everything is watched: no lost connection goes unnoticed for long.
#[must_use]
pub fn watching() -> watcher::Config {
    watcher::Config::default().timeout(WATCH)
}

/// Why there is no client.
#[derive(Debug, Error)]
pub enum ClientError {
    /// Neither a kubeconfig nor a service account was found.
    #[error("cannot find out how to reach the API server")]
    Config(#[source] kube::config::InferConfigError),
    /// The configuration cannot be used.
    #[error("cannot make a client for the API server")]
    Client(#[source] kube::Error),
}

/// A client from the environment: kubeconfig, or the pod's service account.
///
/// It does not repeat failed requests by itself: reconciling does, with what is true by then.
///
/// # Errors
/// [`ClientError`] where there is no usable configuration.
pub async fn client() -> Result<Client, ClientError> {
    // One provider per process, named: a second one in the dependency tree must not be picked up.
    // An error says that it is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut config = Config::infer().await.map_err(ClientError::Config)?;
    config.connect_timeout = Some(CONNECT);
    config.write_timeout = Some(WRITE);
    config.read_timeout = Some(READ);
    config.default_retry = false;
    Client::try_from(config).map_err(ClientError::Client)
}
