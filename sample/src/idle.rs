//! Waits, and says which signals it hears: the first process of a container has no default action.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Waits for ever.
pub(crate) async fn idle() -> anyhow::Result<()> {
    let mut all = tokio::task::JoinSet::new();
    // SIGTERM ends the program.
    for (name, kind) in [
        ("SIGHUP", SignalKind::hangup()),
        ("SIGINT", SignalKind::interrupt()),
        ("SIGQUIT", SignalKind::quit()),
        ("SIGUSR1", SignalKind::user_defined1()),
        ("SIGUSR2", SignalKind::user_defined2()),
    ] {
        all.spawn(listen(name, signal(kind)?));
    }
    // None of them ends.
    all.join_all().await;
    Ok(())
}

#[expect(
    clippy::print_stdout,
    reason = "the container's log is what tests read"
)]
async fn listen(name: &'static str, mut signal: Signal) {
    while signal.recv().await.is_some() {
        println!("{name}");
    }
}
