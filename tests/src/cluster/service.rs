//! A program that is kept running, as an init system would: started, stopped, restarted when it
//! ends by itself, and known by its pid only as long as that pid is its own.
//!
//! Serves the control plane and the kernels on the machine's side, and containerd, kubelet and
//! kube-proxy inside a node.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::kernel;

const RESTART_PAUSE: Duration = Duration::from_millis(300);
const TERM_GRACE: Duration = Duration::from_secs(10);
const KILL_BOUND: Duration = Duration::from_secs(10);

/// What is run, and how.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) name: String,
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    /// Standard output and error are appended to this.
    pub(crate) log: PathBuf,
    /// Whether it is started again when it ends by itself.
    pub(crate) restarts: bool,
    /// Which of the machine's processors it is tied to.
    pub(crate) processor: Option<usize>,
}

/// What can be asked of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Start it, if it is not running.
    Start,
    /// End it with SIGTERM, later SIGKILL, and keep it ended.
    Stop,
    /// Stop and start.
    Restart,
    /// End it with SIGKILL; it is started again if it is one that restarts.
    Kill,
    /// SIGSTOP.
    Pause,
    /// SIGCONT.
    Resume,
}

/// How a service is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// Its name.
    pub name: String,
    /// Its process, as its own pid namespace numbers it.
    pub pid: Option<i32>,
    /// Whether it is stopped by a signal.
    pub is_paused: bool,
    /// How often it was started.
    pub starts: u32,
    /// How it last ended.
    pub last_end: Option<String>,
}

/// A program that is kept running.
#[derive(Debug)]
pub(crate) struct Service {
    spec: Spec,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_wanted: bool,
    pid: Option<Pid>,
    is_paused: bool,
    starts: u32,
    last_end: Option<String>,
}

impl Service {
    /// A service that is not started yet. Its thread lives as long as this process.
    pub(crate) fn new(spec: Spec) -> Arc<Self> {
        let service = Arc::new(Self {
            spec,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let runner = Arc::clone(&service);
        thread::spawn(move || runner.keep_running());
        service
    }

    pub(crate) fn name(&self) -> &str {
        &self.spec.name
    }

    pub(crate) fn status(&self) -> ServiceStatus {
        let state = self.lock();
        ServiceStatus {
            name: self.spec.name.clone(),
            pid: state.pid.map(Pid::as_raw),
            is_paused: state.is_paused,
            starts: state.starts,
            last_end: state.last_end.clone(),
        }
    }

    pub(crate) fn act(&self, action: Action) -> Result<()> {
        match action {
            Action::Start => self.start(),
            Action::Stop => self.stop()?,
            Action::Restart => {
                self.stop()?;
                self.start();
            }
            Action::Kill => self.signal(Signal::SIGKILL)?,
            Action::Pause => self.signal(Signal::SIGSTOP)?,
            Action::Resume => self.signal(Signal::SIGCONT)?,
        }
        Ok(())
    }

    pub(crate) fn start(&self) {
        self.lock().is_wanted = true;
        self.changed.notify_all();
    }

    /// Ends it with SIGKILL, all of its process group, and keeps it ended.
    pub(crate) fn kill_for_good(&self) -> Result<()> {
        let mut state = self.lock();
        state.is_wanted = false;
        self.end_with(state, Signal::SIGKILL, KILL_BOUND)
    }

    fn stop(&self) -> Result<()> {
        let mut state = self.lock();
        state.is_wanted = false;
        if let (Some(pid), true) = (state.pid, state.is_paused) {
            kill(pid, Signal::SIGCONT).context("resume before the stop")?;
        }
        if self.end_with(state, Signal::SIGTERM, TERM_GRACE).is_err() {
            self.end_with(self.lock(), Signal::SIGKILL, KILL_BOUND)?;
        }
        Ok(())
    }

    /// Sends a signal and waits for the end.
    fn end_with(
        &self,
        state: MutexGuard<'_, State>,
        signal: Signal,
        bound: Duration,
    ) -> Result<()> {
        let Some(pid) = state.pid else { return Ok(()) };
        let group = if signal == Signal::SIGKILL {
            killpg(pid, signal)
        } else {
            kill(pid, signal)
        };
        group.with_context(|| format!("{signal} to {}", self.spec.name))?;
        let deadline = Instant::now() + bound;
        let mut state = state;
        while state.pid == Some(pid) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!(
                    "{} has not ended {} s after {signal}",
                    self.spec.name,
                    bound.as_secs()
                );
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let mut state = self.lock();
        // While the lock is held the process is not reaped, so the pid is its own.
        let pid = state
            .pid
            .with_context(|| format!("{} is not running", self.spec.name))?;
        kill(pid, signal).with_context(|| format!("{signal} to {}", self.spec.name))?;
        match signal {
            Signal::SIGSTOP => state.is_paused = true,
            Signal::SIGCONT => state.is_paused = false,
            _ => {}
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep_running(&self) {
        let pinned = self.spec.processor.map_or(Ok(()), kernel::pin);
        loop {
            let mut state = self.lock();
            while !state.is_wanted {
                state = self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            let started = pinned
                .as_ref()
                .map_err(|error| anyhow::anyhow!("{error:#}"));
            match started.and_then(|()| self.spawn()) {
                Ok((child, pid)) => {
                    state.pid = Some(pid);
                    state.is_paused = false;
                    state.starts += 1;
                    drop(state);
                    self.changed.notify_all();
                    self.wait(child, pid);
                }
                Err(error) => state.last_end = Some(format!("{error:#}")),
            }
            self.pause_before_restart();
        }
    }

    fn spawn(&self) -> Result<(Child, Pid)> {
        let path = &self.spec.log;
        let log = File::options().create(true).append(true).open(path);
        let log = log.with_context(|| format!("open {}", path.display()))?;
        let (program, arguments) = self.spec.argv.split_first().context("no program")?;
        let child = Command::new(program)
            .args(arguments)
            .envs(self.spec.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("share the log")?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| format!("run {program}"))?;
        let pid = Pid::from_raw(i32::try_from(child.id()).context("pid out of range")?);
        Ok((child, pid))
    }

    fn wait(&self, mut child: Child, pid: Pid) {
        // Only a look: the pid stays taken until the lock is held and it is forgotten.
        let seen = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        let mut state = self.lock();
        state.pid = None;
        state.is_paused = false;
        state.is_wanted &= self.spec.restarts;
        state.last_end = Some(match (seen, child.wait()) {
            (_, Ok(status)) => status.to_string(),
            (seen, Err(error)) => format!("{seen:?}, {error}"),
        });
        drop(state);
        self.changed.notify_all();
    }

    fn pause_before_restart(&self) {
        let state = self.lock();
        if state.is_wanted {
            // A stop in between must not wait for it: this wait ends at any change.
            drop(self.changed.wait_timeout(state, RESTART_PAUSE));
        }
    }
}

#[cfg(test)]
mod tests;
