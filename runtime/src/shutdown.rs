//! The end of a process: SIGTERM or SIGINT.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that is cancelled by the first SIGTERM or SIGINT. Must be called within a runtime.
///
/// # Errors
/// Where the signal handlers cannot be installed.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let cancelled = token.clone();
    // Owned by the runtime: it lives as long as the process, and ends with it.
    tokio::spawn(async move {
        // Cancel-safe: a signal that is not received by one arm stays pending.
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        tracing::info!("asked to end");
        cancelled.cancel();
    });
    Ok(token)
}
