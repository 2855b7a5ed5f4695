//! Logs, to standard error.

use clap::ValueEnum;
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// How a log line looks.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging to standard error; `filter` is a list of `target=level` directives.
///
/// An unreadable filter falls back to `info`, and says so. A second call has no effect.
pub fn init_logs(format: LogFormat, filter: &str) {
    let parsed = EnvFilter::try_new(filter);
    let complaint = parsed.as_ref().err().map(ToString::to_string);
    let filter = parsed.unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    let started = match format {
        LogFormat::Text => registry
            .with(fmt::layer().with_writer(std::io::stderr).with_ansi(false))
            .try_init(),
        LogFormat::Json => registry
            .with(fmt::layer().json().with_writer(std::io::stderr))
            .try_init(),
    };
    if let (Ok(()), Some(complaint)) = (started, complaint) {
        tracing::warn!(complaint, "log filter is not readable, using info");
    }
}
