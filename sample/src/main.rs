//! The sample that faults are shown on: a gateway calls orders, orders call inventory, and each
//! measures what it sees. And the probes that tests measure faults with.

mod disk;
mod idle;
mod probe;
mod service;
mod stats;
mod usage;

use clap::{Parser, Subcommand};

/// Sample services and probes.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// A service over HTTP.
    Serve(service::Settings),
    /// Answers each UDP packet with itself.
    Echo {
        /// The ports, of both families.
        #[arg(long, default_values_t = [7])]
        port: Vec<u16>,
    },
    /// Sends UDP packets to echoes at a steady pace, and prints what came back as JSON.
    Probe(probe::Settings),
    /// Sends bytes over TCP as fast as they go, and prints the rate as JSON.
    Blast(probe::Blast),
    /// Takes in bytes over TCP.
    Sink {
        /// The port, of both families.
        #[arg(long, default_value_t = 9)]
        port: u16,
    },
    /// Prints what the container uses, as JSON.
    Usage(usage::Settings),
    /// Opens, reads and writes a file, and prints how that went as JSON.
    Disk(disk::Settings),
    /// Waits until it is told to end, and prints the other signals that it hears.
    Idle,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    // The first process of a container gets no default action: it must listen to SIGTERM itself.
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    // Cancel-safe: the process ends either way.
    tokio::select! {
        _ = term.recv() => Ok(()),
        result = run(args.command) => result,
    }
}

async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Serve(settings) => service::serve(settings).await,
        Command::Echo { port } => probe::echo(port).await,
        Command::Probe(settings) => probe::probe(settings).await,
        Command::Blast(settings) => probe::blast(settings).await,
        Command::Sink { port } => probe::sink(port).await,
        Command::Usage(settings) => usage::usage(settings).await,
        Command::Disk(settings) => disk::disk(&settings),
        Command::Idle => idle::idle().await,
    }
}
