//! The agent's process. The main thread is the node's: it starts the injectors, which die with
//! it; everything asynchronous runs on a second thread.

use std::{
    io::Write as _,
    path::PathBuf,
    process::ExitCode,
    sync::{Arc, atomic::AtomicBool, mpsc},
    thread,
    time::Duration,
};

use clap::Parser as _;
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::{mpsc as tokio_mpsc, watch};
use windtunnel_agent::{
    api::{self, Inbox, News, Outbox},
    args::{Args, Child, Command, Run},
    burn,
    controller::{ControlError, Controller, Lines},
    fill, hog, inject,
    kernel::{
        child::{ChildError, become_one},
        proc::Proc,
    },
    look,
    metrics::Metrics,
    node::{Node, NodeError, Settings},
    probe,
    targets::Places,
};
use windtunnel_crds::NodeAgentStatus;
use windtunnel_runtime::{
    Admin, AdminError, CancellationToken, ClientError, LogFormat, Pulse, Readiness, STANDSTILL,
    chain, client, init_logs, on_signal, serve,
};

/// After which time what the node could not do is tried again at first, and then after twice the
/// time each time: a node that was too busy is soon found able, one that cannot costs nothing.
const AGAIN: Duration = Duration::from_mins(1);
/// The longest of these times.
const AT_MOST: Duration = Duration::from_hours(1);

#[derive(Debug, thiserror::Error)]
enum MainError {
    #[error("the grace without a control plane must be 25s at least")]
    Grace,
    #[error("cannot take over the node")]
    Node(#[from] NodeError),
    #[error("cannot wake the node's thread")]
    Wake(#[source] nix::Error),
    #[error("cannot start the API side")]
    Start(#[source] std::io::Error),
    #[error("no client")]
    Client(#[from] ClientError),
    #[error("the admin port failed")]
    Admin(#[from] AdminError),
    #[error("the node's thread failed")]
    Control(#[from] ControlError),
    #[error("a part of the API side ended")]
    Ended,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let (what, result) = match args.command {
        Command::Inject => {
            init_logs(LogFormat::Text, "warn");
            ("injector", inject::run().map_err(|e| chain(&e)))
        }
        Command::Child(what) => {
            init_logs(LogFormat::Text, "warn");
            ("child", child(what).map_err(|e| chain(&e)))
        }
        Command::Look => {
            init_logs(LogFormat::Text, "warn");
            ("look", look::run().map_err(|e| chain(&e)))
        }
        Command::Try { cgroups, kind } => {
            init_logs(LogFormat::Text, "off");
            let tried = probe::try_here(&cgroups, &kind);
            if let Err(message) = &tried {
                // The agent that asked reads it.
                let _ = std::io::stdout().write_all(message.as_bytes());
            }
            ("trial", tried)
        }
        Command::Run(run) => {
            init_logs(run.log_format, &run.log);
            ("agent", start(run).map_err(|e| chain(&e)))
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error, "the {what} ends");
            ExitCode::FAILURE
        }
    }
}

/// A child of an injector: it joins the target's control group first.
fn child(what: Child) -> Result<(), ChildError> {
    become_one()?;
    match what {
        Child::Burn { millicores } => burn::burn(millicores),
        Child::Hog(hog) => hog::hold(&hog),
        Child::Fill(fill) => fill::fill(&fill),
    }
    Ok(())
}

fn start(run: Run) -> Result<(), MainError> {
    let grace = run.control_plane_grace.get();
    if grace < Duration::from_secs(25) {
        return Err(MainError::Grace);
    }
    let settings = Settings {
        places: Places {
            proc: Proc::default(),
            cgroups: run.cgroups.clone(),
            pod_logs: run.pod_logs.clone(),
        },
        grace,
        fill_node_disk: run.fill_node_disk,
    };
    let (metrics, registry) = Metrics::new();
    let node = Node::new(settings, &run.journal, metrics)?;
    let capabilities = probe::capabilities(&run.cgroups);
    let failed = capabilities.iter().filter(|c| !c.available);
    let failed = failed.map(|c| c.name.clone()).collect();
    let node = node.with_capabilities(capabilities).ready_to_look();
    let wake = Arc::new(
        EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(MainError::Wake)?,
    );
    let (news, heard) = mpsc::channel();
    let (reports, reported) = tokio_mpsc::unbounded_channel();
    let (agent, shown) = watch::channel(NodeAgentStatus::default());
    let readiness = Readiness::default();
    // Injectors have died of a standstill long before it ends the agent.
    let pulse = Pulse::new(STANDSTILL);
    let admin = Admin {
        readiness: readiness.clone(),
        pulse: Some(pulse.clone()),
        metrics: registry.into(),
    };
    let guards = vec![readiness.block("the API server and the operator")];
    let urgent = Arc::<AtomicBool>::default();
    let inbox = Inbox::new(news, wake.clone(), urgent.clone());
    try_again(failed, run.cgroups.clone(), inbox.clone()).map_err(MainError::Start)?;
    let outbox = Outbox {
        reports: reported,
        agent: shown,
    };
    let shutdown = CancellationToken::new();
    let api_side = ApiSide {
        run,
        grace,
        admin,
        shutdown: shutdown.clone(),
    };
    let api = thread::Builder::new()
        .name("api".to_owned())
        .spawn(move || api_side.run(inbox, outbox))
        .map_err(MainError::Start)?;
    let lines = Lines {
        news: heard,
        wake,
        urgent,
        reports,
        agent,
    };
    Controller::new(node, lines, pulse).run(guards, &shutdown)?;
    // It has cancelled the token, or seen it cancelled: it is ending.
    api.join().unwrap_or(Err(MainError::Ended))
}

/// Tries in the background, now and then, what the node could not do. The thread ends with the process.
fn try_again(failed: Vec<String>, cgroups: PathBuf, inbox: Inbox) -> std::io::Result<()> {
    let work = move || {
        let mut pauses = std::iter::successors(Some(AGAIN), |last| Some(AT_MOST.min(*last * 2)));
        probe::again(
            failed,
            || pauses.next().into_iter().for_each(thread::sleep),
            |kind| probe::attempt(&cgroups, kind),
            |capability| inbox.tell(News::Capable(capability)),
        );
    };
    let trials = thread::Builder::new().name("trials".to_owned());
    trials.spawn(work).map(drop)
}

/// What the API side's thread runs.
struct ApiSide {
    run: Run,
    grace: Duration,
    admin: Admin,
    shutdown: CancellationToken,
}

impl ApiSide {
    /// Runs until a signal, or until a part fails; the node's thread ends with it either way.
    fn run(self, inbox: Inbox, outbox: Outbox) -> Result<(), MainError> {
        let shutdown = self.shutdown.clone();
        let end = shutdown.drop_guard();
        let node = inbox.clone();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(MainError::Start)?;
        let served = runtime.block_on(self.serve(inbox, outbox));
        drop(end);
        node.hurry();
        served
    }

    async fn serve(self, inbox: Inbox, outbox: Outbox) -> Result<(), MainError> {
        let signal = on_signal().map_err(MainError::Start)?;
        let admin = serve(self.run.admin, self.admin, signal.clone());
        let client = client().await?;
        let ids = (self.run.namespace, self.run.node);
        let api = api::run(client, ids, self.grace, inbox, outbox);
        // Cancel-safe: whichever ends first ends the process.
        tokio::select! {
            () = signal.cancelled() => Ok(()),
            () = api => Err(MainError::Ended),
            result = admin => result.map_err(MainError::from),
        }
    }
}
