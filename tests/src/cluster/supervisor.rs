//! The process that runs a cluster, inside its namespaces.
//!
//! Keeps the control plane and the nodes' kernels running, brings them up in order ([`start`]),
//! and answers the control socket. It decides nothing about what happens in the cluster.

mod start;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::control::{self, NodeAction, NodeStatus, Phase, Reply, Request, Status, Step};
use super::guardian::Order;
use super::service::{Action, Service};
use super::{addresses, control_plane, network, node};

/// A running cluster.
pub(crate) struct Supervisor {
    order: Order,
    started: Instant,
    components: BTreeMap<&'static str, Arc<Service>>,
    nodes: Vec<Node>,
    progress: Mutex<Progress>,
}

struct Node {
    index: u8,
    kernel: Arc<Service>,
    is_cut: AtomicBool,
}

struct Progress {
    phase: Phase,
    steps: Vec<Step>,
}

/// Runs the cluster until it is asked to stop. Standard input is the listening control socket.
pub(crate) fn main(order: Order) -> Result<()> {
    let started = Instant::now();
    let socket = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("take the control socket")?;
    let listener = UnixListener::from(socket);
    let supervisor = Arc::new(Supervisor::new(order, started));
    let bring_up = Arc::clone(&supervisor);
    thread::spawn(move || bring_up.start());
    let (stop, stopped) = channel();
    thread::spawn(move || supervisor.serve(&listener, &stop));
    // The end of this process ends the cluster. A lost sender means that the server is gone.
    let _ = stopped.recv();
    Ok(())
}

impl Supervisor {
    fn new(order: Order, started: Instant) -> Self {
        let components = control_plane::COMPONENTS
            .map(|component| (component, Service::new(control_plane::spec(component))));
        let nodes = (1..=order.nodes)
            .map(|index| Node {
                index,
                kernel: Service::new(node::kernel_spec(index)),
                is_cut: AtomicBool::new(false),
            })
            .collect();
        Self {
            order,
            started,
            components: BTreeMap::from(components),
            nodes,
            progress: Mutex::new(Progress {
                phase: Phase::Starting,
                steps: Vec::new(),
            }),
        }
    }

    fn serve(self: &Arc<Self>, listener: &UnixListener, stop: &Sender<()>) {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            let (supervisor, stop) = (Arc::clone(self), stop.clone());
            thread::spawn(move || {
                let request = control::receive(&stream);
                let is_stop = matches!(request, Ok(Request::Stop));
                supervisor.reply(&mut stream, request);
                if is_stop {
                    // Whoever takes it has the process end; if nobody does it is ending.
                    let _ = stop.send(());
                }
            });
        }
    }

    fn reply(&self, stream: &mut UnixStream, request: Result<Request>) {
        let reply = request.and_then(|request| self.answer(request));
        let reply = reply.unwrap_or_else(|error| Reply::Failed(format!("{error:#}")));
        if let Err(error) = control::send(stream, &reply) {
            super::progress::say(&format!("control socket: {error:#}"));
        }
    }

    fn answer(&self, request: Request) -> Result<Reply> {
        match request {
            Request::Status => return Ok(Reply::Status(Box::new(self.status()))),
            Request::Stop => {}
            Request::Component { component, action } => self.component(&component)?.act(action)?,
            Request::Node { node, action } => self.act_on_node(&node, action)?,
        }
        Ok(Reply::Done)
    }

    fn status(&self) -> Status {
        let progress = self.progress();
        Status {
            name: self.order.name.clone(),
            phase: progress.phase.clone(),
            steps: progress.steps.clone(),
            components: self
                .components
                .values()
                .map(|service| service.status())
                .collect(),
            nodes: (self.nodes.iter())
                .map(|node| NodeStatus {
                    kernel: node.kernel.status(),
                    is_cut: node.is_cut.load(Ordering::Relaxed),
                })
                .collect(),
        }
    }

    fn component(&self, name: &str) -> Result<&Arc<Service>> {
        self.components.get(name).with_context(|| {
            format!(
                "no component {name}; there are {}",
                control_plane::COMPONENTS.join(", ")
            )
        })
    }

    fn act_on_node(&self, name: &str, action: NodeAction) -> Result<()> {
        let node = self
            .nodes
            .iter()
            .find(|node| addresses::node_name(node.index) == name)
            .with_context(|| format!("no node {name}; there are {}", self.nodes.len()))?;
        match action {
            NodeAction::Kill => node.kernel.kill_for_good(),
            NodeAction::Boot => {
                if node.kernel.status().pid.is_some() {
                    bail!("{name} is running");
                }
                node.kernel.act(Action::Start)
            }
            NodeAction::Cut => {
                network::cut(node.index)?;
                node.is_cut.store(true, Ordering::Relaxed);
                Ok(())
            }
            NodeAction::Heal => {
                network::heal(node.index)?;
                node.is_cut.store(false, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
