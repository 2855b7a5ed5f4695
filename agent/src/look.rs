//! Looks at files that a target controls, from a process of its own.
//!
//! To open one may take for ever: its file system may be another host's that is off, or a program's
//! that does not answer, or a fault of ours may hang it. The thread of the node, which injectors wait
//! for, waits for a look no longer than [`PATIENCE`], and gives signs of life meanwhile.

use std::{
    error::Error,
    io::{self, Read as _, Write as _},
    net::IpAddr,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, poll},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use thiserror::Error;

use crate::{
    inject::{COMMAND, volume},
    kernel::{
        beneath,
        lease::{LeaseError, die_with_parent},
        mounts::Mount,
        proc::{Proc, ProcessId, boottime},
        space::{self, Space},
    },
    prepare::Refusal,
    supervisor::Supervisor,
};

/// How long a look may take.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// How long all looks of a pass may take: aborts and kills wait for its end.
const BUDGET: Duration = Duration::from_secs(8);
/// How often injectors are looked after meanwhile.
const TURN: u16 = 100;
/// Most of an answer that is read, in bytes.
const LONGEST: usize = 1 << 20;
/// The reason of a refusal where a look took too long.
pub(crate) const UNRESPONSIVE: &str = "Unresponsive";
/// The reason where a look is put off for what does not wait. It is told to nobody.
pub(crate) const PUT_OFF: &str = "PutOff";

/// Most looks that may not have come to their end.
const MOST: usize = 4;
/// How long one that has answered, or was killed, is waited for.
const FAREWELL: Duration = Duration::from_millis(100);
/// Most processes whose name servers are asked for: a question is to be shorter than a pipe holds.
const PIDS: usize = 256;

/// The process that looks, and those that have looked.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// It waits for a question.
    idle: Option<Looker>,
    /// What the kernel has not let go of yet.
    unreaped: Vec<Child>,
    was_in_vain: bool,
    /// What the looks of this pass have taken.
    spent: Duration,
    /// Something was said that does not wait: a fault is to end.
    urgent: Arc<AtomicBool>,
}

/// What comes of a question.
enum Heard {
    Answer(Vec<u8>),
    /// Nothing, in time.
    Nothing,
    /// Something else does not wait.
    PutOff,
}

/// A process that answers questions, each a line, and ends with the agent.
#[derive(Debug)]
struct Looker {
    child: Child,
    questions: ChildStdin,
    answers: ChildStdout,
}

impl Looker {
    fn start(program: &Path) -> io::Result<Self> {
        let [name, _] = COMMAND;
        let mut child = Command::new(program)
            .arg0(name)
            .arg("look")
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(questions), Some(answers)) => Ok(Self {
                child,
                questions,
                answers,
            }),
            _ => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// What is answered.
    fn ask(&mut self, question: &str, supervisor: &mut Supervisor) -> io::Result<Heard> {
        // A question is shorter than a pipe holds, and the one before was read.
        self.questions.write_all(question.as_bytes())?;
        let until = Instant::now() + PATIENCE;
        let (mut answer, mut part) = (Vec::new(), [0; 4096]);
        while Instant::now() < until {
            let now = boottime().map_err(io::Error::other)?;
            supervisor.beat(now);
            if supervisor.looks().urgent.load(Ordering::Relaxed) {
                return Ok(Heard::PutOff);
            }
            let mut fds = [PollFd::new(self.answers.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, TURN) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => match self.answers.read(&mut part)? {
                    0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                    length => answer.extend_from_slice(&part[..length]),
                },
                Err(errno) => return Err(errno.into()),
            }
            if answer.ends_with(b"\n") {
                return Ok(Heard::Answer(answer));
            }
            if answer.len() > LONGEST {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
        }
        Ok(Heard::Nothing)
    }
}

impl Looks {
    /// Has looks put off while this is set.
    pub(crate) fn heed(&mut self, urgent: Arc<AtomicBool>) {
        self.urgent = urgent;
    }

    /// A pass begins.
    pub(crate) fn begin(&mut self) {
        self.was_in_vain = false;
        self.spent = Duration::ZERO;
    }

    /// Whether one was waited for in vain since the pass began.
    pub(crate) fn was_in_vain(&self) -> bool {
        self.was_in_vain
    }

    /// Forgets what has ended.
    pub(crate) fn reap(&mut self) {
        self.unreaped
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    /// Starts the process that looks, so that nobody waits for its start later.
    ///
    /// # Errors
    /// Where too many of its kind do not come to their end, or it cannot be started.
    pub(crate) fn open(&mut self, program: &Path) -> Result<(), Refusal> {
        self.idle = Some(self.take(program)?);
        Ok(())
    }

    fn take(&mut self, program: &Path) -> Result<Looker, Refusal> {
        self.reap();
        if let Some(mut looker) = self.idle.take() {
            if matches!(looker.child.try_wait(), Ok(None)) {
                return Ok(looker);
            }
            self.end(looker.child);
        }
        if self.unreaped.len() >= MOST {
            let message = format!("{MOST} looks at other targets do not come to their end");
            return Err((UNRESPONSIVE, message));
        }
        Looker::start(program).map_err(|e| failed(&e))
    }

    /// Sees a process to its end. One that the kernel does not let go of ends when it does.
    fn end(&mut self, mut child: Child) {
        // One that has ended already is what is wanted.
        let _ = child.kill();
        let until = Instant::now() + FAREWELL;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() >= until {
                self.unreaped.push(child);
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// What is looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Look {
    /// The name servers that a process is told: of some processes, the first that says any.
    NameServers {
        /// Where `/proc` is.
        proc: Proc,
        /// The processes.
        pids: Vec<i32>,
    },
    /// The mount of a volume.
    Volume {
        /// The container's first process.
        init: ProcessId,
        /// Where it is mounted.
        volume: String,
    },
    /// The mount of a volume, and its space, or why no file can be made there.
    Room {
        /// The container's first process.
        init: ProcessId,
        /// Where it is mounted.
        volume: String,
    },
}

/// Why a look failed in its own process.
#[derive(Debug, Error)]
pub enum LookError {
    /// It cannot be bound to the agent.
    #[error("bind to the agent")]
    Parent(#[from] LeaseError),
    /// The question or the answer is none.
    #[error("what is looked at")]
    Text(#[from] serde_json::Error),
    /// The answer cannot be told.
    #[error("tell the answer")]
    Tell(#[from] std::io::Error),
}

/// Answers, in a process of its own, each question on its standard input by a line on its standard
/// output, until the input closes.
///
/// # Errors
/// [`LookError`] where a question is none, or its answer cannot be told.
pub fn run() -> Result<(), LookError> {
    die_with_parent()?;
    let mut output = io::stdout();
    for question in io::stdin().lines() {
        let mut answer = match serde_json::from_str(&question?)? {
            Look::NameServers { proc, pids } => {
                let seen = pids.into_iter().find_map(|pid| name_servers(&proc, pid));
                serde_json::to_vec(&seen.unwrap_or_default())
            }
            Look::Volume { init, volume } => {
                serde_json::to_vec(&volume::open(init, &volume).map(|(_, mount)| mount))
            }
            Look::Room { init, volume } => serde_json::to_vec(&room(init, &volume)),
        }?;
        answer.push(b'\n');
        output.write_all(&answer)?;
        output.flush()?;
    }
    Ok(())
}

/// The name servers that a target's processes are told; none where they are told none.
///
/// # Errors
/// Where nobody answers.
pub(crate) fn at_name_servers(
    supervisor: &mut Supervisor,
    proc: &Proc,
    pids: &[i32],
) -> Result<Vec<IpAddr>, Refusal> {
    let look = Look::NameServers {
        proc: proc.clone(),
        pids: pids.iter().copied().take(PIDS).collect(),
    };
    ask(supervisor, &look)
}

/// A volume of a container.
///
/// # Errors
/// Where nobody answers, or it is none.
pub(crate) fn at_volume(
    supervisor: &mut Supervisor,
    init: ProcessId,
    volume: &str,
) -> Result<Mount, Refusal> {
    let volume = volume.to_owned();
    let seen: Result<Mount, String> = ask(supervisor, &Look::Volume { init, volume })?;
    seen.map_err(|message| ("NotAVolume", message))
}

/// A volume of a container, and its space, or why no file can be made there.
///
/// # Errors
/// As [`at_volume`].
pub(crate) fn at_room(
    supervisor: &mut Supervisor,
    init: ProcessId,
    volume: &str,
) -> Result<(Mount, Result<Space, String>), Refusal> {
    let volume = volume.to_owned();
    let seen: Result<_, String> = ask(supervisor, &Look::Room { init, volume })?;
    seen.map_err(|message| ("NotAVolume", message))
}

/// Has a process look, and waits for its answer. Where somebody ends it meanwhile, another is asked.
fn ask<T: DeserializeOwned>(supervisor: &mut Supervisor, look: &Look) -> Result<T, Refusal> {
    let mut question = serde_json::to_string(look).map_err(|e| failed(&e))?;
    question.push('\n');
    let heard = match ask_one(supervisor, &question)? {
        Err(error) if has_died(&error) => ask_one(supervisor, &question)?,
        heard => heard,
    };
    let unanswered = match heard.map_err(|e| failed(&e))? {
        Heard::Answer(answer) => return serde_json::from_slice(&answer).map_err(|e| failed(&e)),
        Heard::Nothing => (UNRESPONSIVE, look.unanswered()),
        Heard::PutOff => (PUT_OFF, "a fault is to end first".to_owned()),
    };
    supervisor.looks().was_in_vain = true;
    Err(unanswered)
}

/// Asks the process that waits for a question, or a new one. Only one that has answered is asked again.
fn ask_one(supervisor: &mut Supervisor, question: &str) -> Result<io::Result<Heard>, Refusal> {
    let program = supervisor.program().to_owned();
    let looks = supervisor.looks();
    if looks.spent >= BUDGET {
        looks.was_in_vain = true;
        let message = "looks at other targets have taken all the time there is".to_owned();
        return Err((UNRESPONSIVE, message));
    }
    let mut looker = looks.take(&program)?;
    let begun = Instant::now();
    let heard = looker.ask(question, supervisor);
    let looks = supervisor.looks();
    looks.spent += begun.elapsed();
    match heard {
        Ok(Heard::Answer(_)) => looks.idle = Some(looker),
        _ => looks.end(looker.child),
    }
    Ok(heard)
}

/// Whether a process has died that was asked.
fn has_died(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | UnexpectedEof)
}

fn failed(error: &dyn Error) -> Refusal {
    ("NodeUnreadable", format!("cannot look: {error}"))
}

impl Look {
    fn unanswered(&self) -> String {
        let what = match self {
            Self::NameServers { .. } => "/etc/resolv.conf",
            Self::Volume { volume, .. } | Self::Room { volume, .. } => volume,
        };
        let seconds = PATIENCE.as_secs();
        format!(
            "{what} of the container could not be opened within {seconds} s: what serves it does not answer"
        )
    }
}

/// The name servers that a process is told; the file is opened beneath the process's own root.
fn name_servers(proc: &Proc, pid: i32) -> Option<Vec<IpAddr>> {
    let root = proc.open_root(pid).ok()?;
    let text = beneath::resolv_conf(root.as_fd()).ok()?;
    Some(parse_resolv_conf(&text))
}

fn parse_resolv_conf(text: &str) -> Vec<IpAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == "nameserver").then(|| words.next())?
    });
    // An IPv6 address may carry the link it is reached by.
    servers
        .filter_map(|address| address.split('%').next()?.parse().ok())
        .collect()
}

fn room(init: ProcessId, volume: &str) -> Result<(Mount, Result<Space, String>), String> {
    let (opened, mount) = volume::open(init, volume)?;
    let space = match space::nameless(opened.as_fd()) {
        Ok(_) => Space::of(&opened).map_err(|e| format!("the space of {volume} is unknown: {e}")),
        Err(e) => Err(format!("no file can be made at {volume}: {e}")),
    };
    Ok((mount, space))
}

#[cfg(test)]
mod tests;
