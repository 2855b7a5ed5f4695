//! The port for probes and metrics.

use std::{net::SocketAddr, sync::Arc};

use axum::{Router, extract::State, http::StatusCode, routing::get};
use prometheus_client::{encoding::text::encode, registry::Registry};
use thiserror::Error;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::Readiness;

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

#[derive(Clone, Debug)]
struct Admin {
    readiness: Readiness,
    metrics: Arc<Registry>,
}

/// Serves `/livez`, `/readyz` and `/metrics` on `address` until `shutdown`.
///
/// # Errors
/// [`AdminError`] where the address cannot be bound or the server fails.
pub async fn serve(
    address: SocketAddr,
    readiness: Readiness,
    metrics: Registry,
    shutdown: CancellationToken,
) -> Result<(), AdminError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| AdminError::Listen { address, source })?;
    let router = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .with_state(Admin {
            readiness,
            metrics: Arc::new(metrics),
        });
    axum::serve(listener, router)
        .with_graceful_shutdown(shutdown.cancelled_owned())
        .await
        .map_err(AdminError::Serve)
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
