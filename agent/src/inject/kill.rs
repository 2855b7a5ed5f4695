//! A signal for a container's first process, once or again and again.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use windtunnel_crds::container::{ContainerKill, Signal as Named};
use windtunnel_runtime::chain;

use super::Effect;
use crate::{
    kernel::{handle::ProcessHandle, proc::Proc},
    model::{Act, ContainerEntry, Counts},
};

/// Any hierarchy will do: only the container's first process is needed.
pub(super) const CONTROLLER: &str = "pids";
/// How long SIGKILL may take.
const DEATH: Duration = Duration::from_secs(5);

pub(super) fn plan(fault: &ContainerKill) -> Act {
    let ContainerKill { signal, every } = fault;
    let signal = match signal {
        Named::SIGKILL => Signal::SIGKILL,
        Named::SIGTERM => Signal::SIGTERM,
        Named::SIGINT => Signal::SIGINT,
        Named::SIGQUIT => Signal::SIGQUIT,
        Named::SIGHUP => Signal::SIGHUP,
        Named::SIGABRT => Signal::SIGABRT,
        Named::SIGSEGV => Signal::SIGSEGV,
        Named::SIGUSR1 => Signal::SIGUSR1,
        Named::SIGUSR2 => Signal::SIGUSR2,
    };
    Act::Kill {
        signal: signal as i32,
        every: every.map(windtunnel_crds::units::GoDuration::get),
    }
}

/// Signals that were sent, and the next one.
struct Kill {
    init: ProcessHandle,
    signal: Signal,
    every: Option<Duration>,
    next: Option<Instant>,
    sent: u64,
    since: Instant,
}

pub(super) fn apply(
    container: &ContainerEntry,
    signal: i32,
    every: Option<Duration>,
) -> Result<Box<dyn Effect>, String> {
    let init = Proc::default()
        .open(container.init)
        .map_err(|e| chain(&e))?;
    let wait = every.filter(|_| container.is_successor).unwrap_or_default();
    Ok(Box::new(Kill {
        init: init.ok_or("the container has ended")?,
        signal: Signal::try_from(signal).map_err(|e| e.to_string())?,
        every,
        next: Some(Instant::now() + wait),
        sent: 0,
        since: Instant::now(),
    }))
}

impl Effect for Kill {
    fn proof(&mut self) -> Result<Option<String>, String> {
        self.work()?;
        if self.sent == 0 {
            // A later one is not due yet: that it will be sent is all that can be said.
            let is_later = self.next.is_some_and(|next| next > Instant::now());
            return Ok(is_later.then(|| "the next signal is not due yet".to_owned()));
        }
        let dead = self.init.has_ended().map_err(|e| chain(&e))?;
        if self.signal == Signal::SIGKILL && !dead && self.since.elapsed() < DEATH {
            return Ok(None);
        }
        Ok(Some(format!("{} was sent", self.signal)))
    }

    fn ends_the_container(&self) -> bool {
        true
    }

    fn is_done(&self) -> bool {
        self.sent > 0 && self.every.is_none()
    }

    fn due(&self) -> Option<Instant> {
        self.next
    }

    fn work(&mut self) -> Result<(), String> {
        if self.next.is_some_and(|next| next <= Instant::now()) {
            self.init.send(self.signal).map_err(|e| chain(&e))?;
            self.sent += 1;
            self.since = Instant::now();
            self.next = self.every.map(|every| Instant::now() + every);
        }
        Ok(())
    }

    fn check(&mut self) -> Result<Counts, String> {
        Ok(Counts::measured([("signals", self.sent)]))
    }
}
