//! The port for probes and metrics.

use std::{net::SocketAddr, sync::Arc};

use axum::{Router, extract::State, http::StatusCode, routing::get};
use prometheus_client::{encoding::text::encode, registry::Registry};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{Pulse, Readiness};

/// Why the admin port is not served.
#[derive(Debug, Error)]
pub enum AdminError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The server ended by itself.
    #[error("cannot serve the admin port")]
    Serve(#[source] std::io::Error),
}

/// What the admin port shows.
#[derive(Clone, Debug)]
pub struct Admin {
    /// What the process still waits for.
    pub readiness: Readiness,
    /// The loop that matters, if it is not this server's own.
    pub pulse: Option<Pulse>,
    /// The metrics.
    pub metrics: Arc<Registry>,
}

/// Serves `/livez`, `/readyz` and `/metrics` on `address` until `shutdown`.
///
/// # Errors
/// [`AdminError`] where the address cannot be bound or the server fails.
pub async fn serve(
    address: SocketAddr,
    admin: Admin,
    shutdown: CancellationToken,
) -> Result<(), AdminError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| AdminError::Listen { address, source })?;
    let router = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .with_state(admin);
    axum::serve(listener, router)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
        .map_err(AdminError::Serve)
}

async fn livez(State(admin): State<Admin>) -> (StatusCode, &'static str) {
    if admin.pulse.is_none_or(|pulse| pulse.is_live()) {
        (StatusCode::OK, "ok\n")
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the main loop stands still\n",
        )
    }
}

async fn readyz(State(admin): State<Admin>) -> (StatusCode, String) {
    let missing = admin.readiness.missing();
    if missing.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        let names = missing.join(", ");
        (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("waiting for {names}\n"),
        )
    }
}

async fn scrape(State(admin): State<Admin>) -> (StatusCode, String) {
    let mut text = String::new();
    match encode(&mut text, &admin.metrics) {
        Ok(()) => (StatusCode::OK, text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}
