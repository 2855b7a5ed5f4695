//! The injector: a small process that holds one fault on one target, and with whose end the
//! kernel takes the fault back.
//!
//! It knows neither the API server nor its own history. It dies with its agent, without a
//! heartbeat of its agent, at its deadline, and by any signal; whatever it holds dies with it.

use std::{
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use thiserror::Error;

use crate::{
    kernel::{
        lease::{Lease, LeaseError, die_with_parent},
        nft::Table,
        proc::{ProcError, boottime},
    },
    model::Counts,
    wire::{BEAT, Down, LEASE, Line, Order, Up, WireError},
};

mod network;

/// Why an injector ends by itself.
#[derive(Debug, Error)]
pub enum InjectError {
    /// It cannot be bound to its agent and its lease.
    #[error("no lease")]
    Lease(#[from] LeaseError),
    /// The line to the agent is gone or broken.
    #[error("no agent")]
    Line(#[from] WireError),
    /// The boot clock cannot be read.
    #[error("no clock")]
    Clock(#[from] ProcError),
    /// The line cannot be waited for.
    #[error("cannot wait for the agent")]
    Wait(#[source] nix::Error),
    /// The first packet was no order.
    #[error("the agent gave no order")]
    NoOrder,
    /// The standard input cannot be taken for the line.
    #[error("there is no line to an agent")]
    NoLine(#[source] std::io::Error),
}

/// What an injector holds of the kernel; dropping it gives it back.
trait Effect {
    /// Changes what packets are selected, and reads it back.
    fn update(&mut self, table: Table) -> Result<(), String>;
    /// What the fault has met; an error says what is missing of the effect.
    fn check(&mut self) -> Result<Counts, String>;
}

/// Runs an injector on the line that is its standard input, to its end.
///
/// # Errors
/// [`InjectError`]: why it ended. There is nobody to tell but the log.
pub fn run() -> Result<(), InjectError> {
    die_with_parent()?;
    let stdin = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(InjectError::NoLine)?;
    let line = Line::from_fd(stdin);
    // Until the order is there, the lease alone bounds this process.
    let lease = Lease::start(LEASE, boottime()?.saturating_add(LEASE))?;
    let Some(Down::Order(order)) = wait(&line, Instant::now() + LEASE)? else {
        return Err(InjectError::NoOrder);
    };
    // The new timer holds before the first is gone.
    let holder = Lease::start(LEASE, order.deadline)?;
    drop(lease);
    hold(&line, holder, order)
}

/// Brings the effect about and holds it until the agent is gone.
fn hold(line: &Line, mut lease: Lease, order: Order) -> Result<(), InjectError> {
    let mut effect = match network::apply(order) {
        Ok((effect, proof)) => {
            line.send(&Up::Applied { proof })?;
            effect
        }
        Err(message) => {
            line.send(&Up::Failed { message })?;
            return Ok(());
        }
    };
    let mut next_beat = Instant::now() + BEAT;
    loop {
        match wait(line, next_beat)? {
            Some(Down::Beat) => {
                lease.renew(LEASE)?;
            }
            Some(Down::Update(table)) => match effect.update(table) {
                Ok(()) => line.send(&Up::Updated)?,
                Err(message) => return vanish(line, message),
            },
            Some(Down::Order(_)) => return Err(InjectError::NoOrder),
            None => {}
        }
        if Instant::now() >= next_beat {
            next_beat = Instant::now() + BEAT;
            match effect.check() {
                // An agent that does not read is no reason to end: the lease is.
                Ok(counts) => match line.send(&Up::Beat(counts)) {
                    Err(WireError::Full) => {}
                    other => other?,
                },
                Err(message) => return vanish(line, message),
            }
        }
    }
}

fn vanish(line: &Line, message: String) -> Result<(), InjectError> {
    line.send(&Up::Vanished { message })
        .map_err(InjectError::from)
}

/// The agent's next message, if one comes before `until`.
fn wait(line: &Line, until: Instant) -> Result<Option<Down>, InjectError> {
    loop {
        if let Some(message) = line.receive()? {
            return Ok(Some(message));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        let mut fds = [PollFd::new(line.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, timeout(left)) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => return Err(InjectError::Wait(error)),
        }
    }
}

/// Rounded up to whole milliseconds, so that a wait never ends early and spins.
pub(crate) fn timeout(left: Duration) -> PollTimeout {
    let millis = left.as_micros().div_ceil(1000);
    u16::try_from(millis).map_or(PollTimeout::MAX, PollTimeout::from)
}
