//! The operator's process: arguments, logs, client, probes; then [`windtunnel_operator::run`].

use std::process::ExitCode;

use clap::Parser as _;
use windtunnel_operator::{Args, RunError, metrics, run_with};
use windtunnel_runtime::{
    AdminError, ClientError, Readiness, chain, client, init_logs, on_signal, serve,
};

#[derive(Debug, thiserror::Error)]
enum MainError {
    #[error("cannot handle signals")]
    Signals(#[source] std::io::Error),
    #[error("no client")]
    Client(#[from] ClientError),
    #[error("the admin port failed")]
    Admin(#[from] AdminError),
    #[error("the operator failed")]
    Run(#[from] RunError),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    init_logs(args.log_format, &args.log);
    match start(args).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = chain(&error), "ending");
            ExitCode::FAILURE
        }
    }
}

async fn start(args: Args) -> Result<(), MainError> {
    let shutdown = on_signal().map_err(MainError::Signals)?;
    let (metrics, registry) = metrics();
    let readiness = Readiness::default();
    let admin = serve(args.admin, readiness.clone(), registry, shutdown.clone());
    let client = client().await?;
    let operator = run_with(args, client, (readiness, metrics), shutdown);
    // Cancel-safe: whichever ends first ends the process.
    tokio::select! {
        result = operator => result.map_err(MainError::from),
        result = admin => result.map_err(MainError::from),
    }
}
