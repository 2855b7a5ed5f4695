//! The operator's process: arguments, logs, client, probes; then [`windtunnel_operator::run`].

use std::{process::ExitCode, time::Duration};

use clap::Parser as _;
use windtunnel_operator::{
    Args, Bounds, Cli, Command, RunError, UninstallError, metrics, run_with, uninstall,
};
use windtunnel_runtime::{
    Admin, AdminError, ClientError, LogFormat, Readiness, chain, client, init_logs, on_signal,
    serve,
};

#[derive(Debug, thiserror::Error)]
enum MainError {
    #[error("cannot handle signals")]
    Signals(#[source] std::io::Error),
    #[error("no client")]
    Client(#[from] ClientError),
    #[error("the admin port failed")]
    Admin(#[from] AdminError),
    #[error("cannot end all runs")]
    Uninstall(#[source] UninstallError),
    #[error("the operator failed")]
    Run(#[from] RunError),
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(args) => {
            init_logs(args.log_format, &args.log);
            start(args).await
        }
        Command::Uninstall(settings) => {
            init_logs(LogFormat::Text, "info");
            end_all(&settings.namespace, settings.wait.get()).await
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = chain(&error), "ending");
            ExitCode::FAILURE
        }
    }
}

async fn end_all(namespace: &str, wait: Duration) -> Result<(), MainError> {
    uninstall(client().await?, namespace, Bounds::after(wait))
        .await
        .map_err(MainError::Uninstall)
}

async fn start(args: Args) -> Result<(), MainError> {
    let shutdown = on_signal().map_err(MainError::Signals)?;
    let (metrics, registry) = metrics();
    let readiness = Readiness::default();
    let admin = Admin {
        readiness: readiness.clone(),
        pulse: None,
        metrics: registry.into(),
    };
    let admin = serve(args.admin, admin, shutdown.clone());
    let client = client().await?;
    let operator = run_with(args, client, (readiness, metrics), shutdown);
    let mut operator = std::pin::pin!(operator);
    // Cancel-safe: the operator goes on where the admin port ends first.
    tokio::select! {
        result = &mut operator => result?,
        // It ends well with the shutdown only, and then the operator has a lease to give back.
        result = admin => {
            result?;
            operator.await?;
        }
    }
    Ok(())
}
