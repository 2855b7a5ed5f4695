//! The port for probes and metrics. It is served on a thread of its own: however busy the rest of the
//! process is, it is not taken for dead.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    thread,
    time::Duration,
};

use axum::{Router, extract::State, http::StatusCode, routing::get};
use prometheus_client::{encoding::text::encode, registry::Registry};
use thiserror::Error;
use tokio::{sync::oneshot, time::interval};
use tokio_util::sync::CancellationToken;

use crate::{Pulse, Readiness, pulse::STANDSTILL};

/// How often the runtime of the process shows that it turns.
const BEAT: Duration = Duration::from_secs(1);

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
    /// The loop that matters, besides the runtime that serves this.
    pub pulse: Option<Pulse>,
    /// The metrics.
    pub metrics: Arc<Registry>,
}

/// What answers are made of.
#[derive(Clone, Debug)]
struct Shown {
    admin: Admin,
    runtime: Pulse,
}

/// Serves `/livez`, `/readyz` and `/metrics` on `address` until `shutdown`. The process is live while
/// the runtime that this is polled on turns.
///
/// # Errors
/// [`AdminError`] where the address cannot be bound or the server fails.
pub async fn serve(
    address: SocketAddr,
    admin: Admin,
    shutdown: CancellationToken,
) -> Result<(), AdminError> {
    let listener =
        TcpListener::bind(address).map_err(|source| AdminError::Listen { address, source })?;
    let runtime = Pulse::new(STANDSTILL);
    let shown = Shown {
        admin,
        runtime: runtime.clone(),
    };
    let (tell, mut ended) = oneshot::channel();
    let answer = move || {
        // Whoever waits for it may have ended first.
        let _ = tell.send(answer(listener, shown, shutdown));
    };
    // It ends with the process, or tells that it has.
    thread::Builder::new()
        .name("admin".to_owned())
        .spawn(answer)
        .map_err(AdminError::Serve)?;
    let mut beats = interval(BEAT);
    loop {
        // Cancel-safe: neither a beat nor the end is lost when the other comes first.
        tokio::select! {
            _ = beats.tick() => runtime.beat(),
            // A thread that panicked tells nothing.
            result = &mut ended => {
                let silent = || std::io::Error::other("its thread has ended");
                return result.unwrap_or_else(|_| Err(silent())).map_err(AdminError::Serve);
            }
        }
    }
}

/// Answers until `shutdown`.
fn answer(listener: TcpListener, shown: Shown, shutdown: CancellationToken) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let router = Router::new()
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .route("/metrics", get(scrape))
        .with_state(shown);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        axum::serve(listener, router)
            .with_graceful_shutdown(shutdown.cancelled_owned())
            .await
    })
}

async fn livez(State(Shown { admin, runtime }): State<Shown>) -> (StatusCode, &'static str) {
    if runtime.is_live() && admin.pulse.is_none_or(|pulse| pulse.is_live()) {
        (StatusCode::OK, "ok\n")
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "the main loop stands still\n",
        )
    }
}

async fn readyz(State(Shown { admin, .. }): State<Shown>) -> (StatusCode, String) {
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

async fn scrape(State(Shown { admin, .. }): State<Shown>) -> (StatusCode, String) {
    let mut text = String::new();
    match encode(&mut text, &admin.metrics) {
        Ok(()) => (StatusCode::OK, text),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        net::TcpStream,
    };

    use super::*;

    /// Asks without giving the runtime a turn.
    fn ask(address: SocketAddr, path: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    #[tokio::test]
    async fn a_busy_runtime_answers_all_the_same() {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = free.local_addr().unwrap();
        drop(free);
        let readiness = Readiness::default();
        let guard = readiness.block("caches");
        let admin = Admin {
            readiness,
            pulse: None,
            metrics: Arc::default(),
        };
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(serve(address, admin, shutdown.clone()));
        // One turn, in which the port is bound.
        tokio::task::yield_now().await;
        assert!(ask(address, "/livez").unwrap().contains("200 OK"));
        let waiting = ask(address, "/readyz").unwrap();
        assert!(waiting.contains("waiting for caches"), "{waiting}");
        drop(guard);
        assert!(ask(address, "/readyz").unwrap().contains("200 OK"));
        assert!(ask(address, "/metrics").unwrap().contains("200 OK"));
        shutdown.cancel();
        served.await.unwrap().unwrap();
    }
}
