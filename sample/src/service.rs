//! A service: answers, and calls the next one for each request or at a steady pace.

use std::{
    net::{Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use axum::{Json, Router, extract::State, http::StatusCode, routing::get};
use http_body_util::Empty;
use hyper::{Request, body::Bytes, client::conn::http1};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{MissedTickBehavior, interval, timeout},
};

use crate::stats::{Second, Stats};

/// What kind of service.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Settings {
    /// Where to listen.
    #[arg(long, default_value_t = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 8080))]
    listen: SocketAddr,

    /// The service to call for each request: host:port.
    #[arg(long)]
    calls: Option<String>,

    /// Call it by itself, so many times a second.
    #[arg(long, default_value_t = 0)]
    per_second: u32,

    /// How long a call may take, in milliseconds.
    #[arg(long, default_value_t = 5_000)]
    timeout_millis: u64,
}

struct Service {
    calls: Option<String>,
    timeout: Duration,
    stats: Stats,
}

/// Runs a service.
pub(crate) async fn serve(settings: Settings) -> anyhow::Result<()> {
    let Settings {
        listen,
        calls,
        per_second,
        timeout_millis,
    } = settings;
    let service = Arc::new(Service {
        calls,
        timeout: Duration::from_millis(timeout_millis),
        stats: Stats::default(),
    });
    let router = Router::new()
        .route("/", get(answer))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/stats", get(stats))
        .with_state(service.clone());
    let listener = TcpListener::bind(listen)
        .await
        .with_context(|| format!("listen on {listen}"))?;
    let pace = tokio::spawn(keep_calling(service, per_second));
    axum::serve(listener, router).await.context("serve")?;
    pace.abort();
    Ok(())
}

async fn answer(State(service): State<Arc<Service>>) -> (StatusCode, String) {
    match service.call().await {
        Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error:#}\n")),
    }
}

async fn stats(State(service): State<Arc<Service>>) -> Json<Vec<Second>> {
    Json(service.stats.seconds())
}

/// Starts calls at a steady pace, whether earlier ones have ended or not.
async fn keep_calling(service: Arc<Service>, per_second: u32) {
    if per_second == 0 {
        return;
    }
    let mut ticks = interval(Duration::from_secs(1) / per_second);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        let service = service.clone();
        // Bounded by its timeout; what it found is in the statistics.
        tokio::spawn(async move { service.call().await });
    }
}

impl Service {
    /// Calls the next service, if there is one, on a connection of its own.
    async fn call(&self) -> anyhow::Result<()> {
        let Some(host) = &self.calls else {
            return Ok(());
        };
        let started = Instant::now();
        let result = match timeout(self.timeout, request(host)).await {
            Ok(result) => result,
            Err(_) => Err(anyhow::anyhow!("no answer from {host} in time")),
        };
        self.stats.count(result.is_ok(), started.elapsed());
        result
    }
}

async fn request(host: &str) -> anyhow::Result<()> {
    let stream = TcpStream::connect(host)
        .await
        .with_context(|| format!("connect to {host}"))?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let connection = tokio::spawn(connection);
    let request = Request::get("/")
        .header("host", host)
        .body(Empty::<Bytes>::new())?;
    let status = sender.send_request(request).await.map(|r| r.status());
    connection.abort();
    let status = status.with_context(|| format!("request to {host}"))?;
    if !status.is_success() {
        bail!("{host} answered {status}");
    }
    Ok(())
}
