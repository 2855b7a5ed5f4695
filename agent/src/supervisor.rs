//! Injector processes: started, kept alive by heartbeats, listened to, killed and reaped.
//!
//! All from one plain thread that lives as long as the agent: an injector dies with the thread
//! that started it. Nothing here blocks but a look at what a target controls, for a bounded time.

use std::{
    collections::BTreeMap,
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::process::CommandExt as _,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use thiserror::Error;

use crate::{
    inject,
    kernel::{
        handle::ProcessHandle,
        proc::{Proc, ProcError, ProcessId},
    },
    look::Looks,
    model::{Counts, Key},
    wire::{BEAT, Down, Line, Order, Task, Up, WireError},
};

/// Why an injector could not be started or killed.
#[derive(Debug, Error)]
pub enum SupervisorError {
    /// The line to it could not be made or used.
    #[error("no line to the injector")]
    Line(#[from] WireError),
    /// The process could not be started.
    #[error("cannot start an injector")]
    Start(#[source] io::Error),
    /// The process could not be identified or signalled.
    #[error("cannot handle an injector")]
    Process(#[from] ProcError),
    /// The process was gone before it could be identified.
    #[error("the injector ended at once: {0}")]
    EndedAtOnce(ExitStatus),
}

/// Why an injector ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// It has done what was to be done.
    Done,
    /// It saw its container end.
    ContainerEnded,
    /// It saw its pod end.
    PodEnded,
}

/// An injector as it was last seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Live {
    /// The process.
    pub process: ProcessId,
    /// The order as it stands, with the last update.
    pub order: Order,
    /// When it said that the effect was read back.
    pub applied_at: Option<Timestamp>,
    /// Why it could not bring the effect about.
    pub failure: Option<String>,
    /// What the user should know of how far the effect goes.
    pub note: String,
    /// What is missing of the effect.
    pub vanished: Option<String>,
    /// Why it ended, or is about to, without anything being wrong.
    pub leave: Option<Leave>,
    /// When it last said anything, on the boot clock.
    pub heard_at: Duration,
    /// What its fault has met.
    pub counts: Counts,
    /// It has ended.
    pub has_exited: bool,
    /// With this code, if it ended by itself.
    pub exit_code: Option<i32>,
    /// It has been told of no update that it has not confirmed.
    pub is_current: bool,
    /// The longest it went without a heartbeat of ours.
    pub longest_silence: Duration,
}

#[derive(Debug)]
struct Injector {
    child: Child,
    handle: ProcessHandle,
    line: Line,
    live: Live,
    beaten_at: Duration,
}

/// The injectors of this agent.
#[derive(Debug)]
pub struct Supervisor {
    proc: Proc,
    program: PathBuf,
    injectors: BTreeMap<Key, Injector>,
    looks: Looks,
}

impl Default for Supervisor {
    /// Injectors are this very program.
    fn default() -> Self {
        let [program, _] = inject::COMMAND;
        Self::new(program)
    }
}

impl Supervisor {
    /// Injectors are another program.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            proc: Proc::default(),
            program: program.into(),
            injectors: BTreeMap::new(),
            looks: Looks::default(),
        }
    }

    /// What injectors are.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// Its process that looks at targets.
    pub(crate) fn looks(&mut self) -> &mut Looks {
        &mut self.looks
    }

    /// Starts an injector. It does nothing until it is given its order, and ends if it is given
    /// none: so that it can be written down before it can do anything.
    ///
    /// # Errors
    /// [`SupervisorError`]; nothing is left then.
    pub fn start(
        &mut self,
        key: Key,
        order: Order,
        now: Duration,
    ) -> Result<ProcessId, SupervisorError> {
        let (line, theirs) = Line::pair()?;
        let [name, word] = inject::COMMAND;
        let child = Command::new(&self.program)
            .arg0(name)
            .arg(word)
            .env_clear()
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .map_err(SupervisorError::Start)?;
        let (child, handle) = self.adopt(child)?;
        let process = handle.process();
        let injector = Injector {
            child,
            handle,
            line,
            live: Live::new(process, order, now),
            beaten_at: now,
        };
        self.injectors.insert(key, injector);
        Ok(process)
    }

    /// A handle on a process that was just started; where there is none, the process is seen to its
    /// end.
    fn adopt(&self, mut child: Child) -> Result<(Child, ProcessHandle), SupervisorError> {
        // Not reaped before it is identified: its pid cannot be another's.
        let pid = i32::try_from(child.id()).unwrap_or_default();
        let found = self.proc.identify(pid).and_then(|process| match process {
            Some(process) => self.proc.open(process),
            None => Ok(None),
        });
        match found {
            Ok(Some(handle)) => Ok((child, handle)),
            Ok(None) => {
                let status = child.wait().map_err(SupervisorError::Start)?;
                Err(SupervisorError::EndedAtOnce(status))
            }
            Err(error) => {
                // One that has ended already is what is wanted.
                let _ = child.kill();
                child.wait().map_err(SupervisorError::Start)?;
                Err(error.into())
            }
        }
    }

    /// Gives an injector its order.
    ///
    /// # Errors
    /// [`WireError`] where it does not listen.
    pub fn order(&mut self, key: &Key) -> Result<(), WireError> {
        match self.injectors.get(key) {
            Some(injector) => injector
                .line
                .send(&Down::Order(injector.live.order.clone())),
            None => Err(WireError::Gone),
        }
    }

    /// Ends an injector that was given no order.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn discard(&mut self, key: &Key) -> Result<(), SupervisorError> {
        if let Some(mut injector) = self.injectors.remove(key) {
            injector.handle.kill()?;
            injector.child.wait().map_err(SupervisorError::Start)?;
        }
        Ok(())
    }

    /// Sends an injector other rules.
    ///
    /// # Errors
    /// [`WireError`] where it does not listen.
    pub fn update(&mut self, key: &Key, table: crate::kernel::nft::Table) -> Result<(), WireError> {
        if let Some(injector) = self.injectors.get_mut(key) {
            injector.line.send(&Down::Update(table.clone()))?;
            if let Task::Network(network) = &mut injector.live.order.task {
                network.table = table;
            }
            injector.live.is_current = false;
        }
        Ok(())
    }

    /// Kills an injector; it is still to be reaped.
    ///
    /// # Errors
    /// Where the kernel refuses.
    pub fn kill(&self, key: &Key) -> Result<(), ProcError> {
        self.injectors
            .get(key)
            .map_or(Ok(()), |injector| injector.handle.kill())
    }

    /// Kills all injectors, and sees them end: all of them in one time.
    pub fn end_all(&self, patience: Duration) {
        let handles = || self.injectors.values().map(|injector| &injector.handle);
        for handle in handles() {
            // What cannot be killed dies with this process.
            let _ = handle.kill();
        }
        let until = Instant::now() + patience;
        for handle in handles() {
            // What is still there is found by the checks.
            let _ = handle.ends_within(until.saturating_duration_since(Instant::now()));
        }
    }

    /// Forgets an injector that has exited.
    pub fn forget(&mut self, key: &Key) {
        if self.injectors.get(key).is_some_and(|i| i.live.has_exited) {
            self.injectors.remove(key);
        }
    }

    /// Gives every injector a sign of life, where one is due.
    pub fn beat(&mut self, now: Duration) {
        for injector in self.injectors.values_mut().filter(|i| !i.live.has_exited) {
            let silence = now.saturating_sub(injector.beaten_at);
            injector.live.longest_silence = injector.live.longest_silence.max(silence);
            if silence >= BEAT {
                // One that does not read is found out by its own silence.
                let _ = injector.line.send(&Down::Beat);
                injector.beaten_at = now;
            }
        }
    }

    /// Reads what injectors said and sees which have ended.
    pub fn listen(&mut self, now: Duration, wall: Timestamp) {
        self.looks.reap();
        for (key, injector) in &mut self.injectors {
            // Before its line is read: what it says with its last breath is heard with its end. An
            // error means that it is not our child any more: it has been reaped.
            let ended = if injector.live.has_exited {
                Ok(None)
            } else {
                injector.child.try_wait()
            };
            loop {
                match injector.line.receive::<Up>() {
                    Ok(Some(message)) => injector.live.hear(message, now, wall),
                    Ok(None) | Err(WireError::Gone) => break,
                    Err(error) => {
                        tracing::warn!(?key, %error, "cannot understand an injector");
                        break;
                    }
                }
            }
            if !matches!(ended, Ok(None)) {
                injector.live.has_exited = true;
                injector.live.exit_code = ended.ok().flatten().and_then(|status| status.code());
            }
        }
    }

    /// The injectors as they were last seen.
    #[must_use]
    pub fn live(&self) -> BTreeMap<Key, Live> {
        self.injectors
            .iter()
            .map(|(key, injector)| (key.clone(), injector.live.clone()))
            .collect()
    }

    /// Whether a process is one of the injectors.
    #[must_use]
    pub fn is_injector(&self, pid: i32) -> bool {
        let mut injectors = self.injectors.values();
        injectors.any(|i| !i.live.has_exited && i.live.process.pid == pid)
    }

    /// How many injectors are alive.
    #[must_use]
    pub fn alive(&self) -> usize {
        self.injectors
            .values()
            .filter(|i| !i.live.has_exited)
            .count()
    }

    /// What becomes readable when there is something to listen to.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let running = self.injectors.values().filter(|i| !i.live.has_exited);
        running.flat_map(|i| [i.line.as_fd(), i.handle.as_fd()])
    }
}

impl Live {
    /// One that was started at `now`, and has not said anything.
    #[must_use]
    pub fn new(process: ProcessId, order: Order, now: Duration) -> Self {
        Self {
            process,
            order,
            applied_at: None,
            failure: None,
            vanished: None,
            note: String::new(),
            leave: None,
            heard_at: now,
            counts: Counts::default(),
            has_exited: false,
            exit_code: None,
            is_current: true,
            longest_silence: Duration::ZERO,
        }
    }

    fn hear(&mut self, message: Up, now: Duration, wall: Timestamp) {
        self.heard_at = now;
        match message {
            Up::Applied { proof, note } => {
                self.note = note;
                tracing::debug!(proof, pid = self.process.pid, "in place");
                self.applied_at.get_or_insert(wall);
            }
            Up::Updated => self.is_current = true,
            Up::Beat(counts) => self.counts = counts,
            Up::Failed { message } => self.failure = Some(message),
            Up::Vanished { message } => self.vanished = Some(message),
            Up::Done => self.leave = Some(Leave::Done),
            Up::ContainerEnded => self.leave = Some(Leave::ContainerEnded),
            Up::PodEnded => self.leave = Some(Leave::PodEnded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn started(program: &str) -> Child {
        Command::new(program).spawn().unwrap()
    }

    #[test]
    fn what_is_said_with_the_last_breath_is_heard_with_the_end() {
        let directory = tempfile::tempdir().unwrap();
        let wait = "until dd bs=65536 count=1 >/dev/null 2>&1; do :; done";
        let speak = "printf '\"ContainerEnded\"' >&0";
        let program = testing::program(directory.path(), &format!("{wait}\n{speak}"));
        let mut supervisor = Supervisor::new(program);
        for number in 0..200 {
            let key = testing::key(&number.to_string());
            let order = testing::order();
            supervisor
                .start(key.clone(), order, Duration::ZERO)
                .unwrap();
            supervisor.order(&key).unwrap();
            while !supervisor.injectors[&key].live.has_exited {
                supervisor.listen(Duration::ZERO, Timestamp::UNIX_EPOCH);
            }
            let live = &supervisor.injectors[&key].live;
            assert_eq!(live.leave, Some(Leave::ContainerEnded), "{number}");
            supervisor.forget(&key);
        }
    }

    #[test]
    fn one_that_ended_at_once_is_reaped_and_its_end_is_told() {
        let supervisor = Supervisor::default();
        let child = started("false");
        let pid = i32::try_from(child.id()).unwrap();
        while supervisor.proc.identify(pid).unwrap().is_some() {
            std::thread::yield_now();
        }
        assert!(supervisor.proc.path(pid).exists(), "a zombie");
        let error = supervisor.adopt(child).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the injector ended at once: exit status: 1"
        );
        assert!(!supervisor.proc.path(pid).exists());
    }

    #[test]
    fn one_that_cannot_be_looked_at_is_ended_and_reaped() {
        let nowhere = tempfile::tempdir().unwrap();
        let child = started("cat");
        let (pid, real) = (i32::try_from(child.id()).unwrap(), Proc::default());
        // Its `stat` is a directory.
        let stat = nowhere.path().join(pid.to_string()).join("stat");
        std::fs::create_dir_all(stat).unwrap();
        let supervisor = Supervisor {
            proc: Proc::new(nowhere.path()),
            ..Supervisor::default()
        };
        assert!(matches!(
            supervisor.adopt(child),
            Err(SupervisorError::Process(_))
        ));
        assert!(!real.path(pid).exists());
    }
}
