//! What windtunnel's programs need as processes: logs, probes and metrics, readiness, signals
//! and a client. Knows no fault and no custom resource.

mod admin;
mod client;
mod pulse;
mod readiness;
mod report;
mod shutdown;
mod telemetry;

pub use admin::{Admin, AdminError, serve};
pub use client::{ClientError, Steady, client, watching};
pub use pulse::{Pulse, STANDSTILL};
pub use readiness::{Guard, Readiness};
pub use report::chain;
pub use shutdown::on_signal;
pub use telemetry::{LogFormat, init_logs};
pub use tokio_util::sync::CancellationToken;
