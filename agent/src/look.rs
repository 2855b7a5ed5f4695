//! Looks at files that a target controls, from a process of its own.
//!
//! To open one may take for ever: its file system may be another host's that is off, or a program's
//! that does not answer, or a fault of ours may hang it. The thread of the node, which injectors wait
//! for, waits for a look no longer than [`PATIENCE`], and gives signs of life meanwhile.

use std::{
    io::{self, Read as _, Write as _},
    net::IpAddr,
    os::{fd::AsFd as _, unix::process::CommandExt as _},
    process::{Child, ChildStdout, Command, Stdio},
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
/// How often injectors are looked after meanwhile.
const TURN: u16 = 100;
/// Most of an answer that is read, in bytes.
const LONGEST: u64 = 1 << 20;
/// The reason of a refusal where a look took too long.
pub(crate) const UNRESPONSIVE: &str = "Unresponsive";

/// Most looks that may not have come to their end.
const MOST: usize = 4;
/// How long one that has answered, or was killed, is waited for.
const FAREWELL: Duration = Duration::from_millis(100);

/// Processes that have looked.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// What the kernel has not let go of yet.
    unreaped: Vec<Child>,
    was_in_vain: bool,
}

impl Looks {
    /// A pass begins.
    pub(crate) fn begin(&mut self) {
        self.was_in_vain = false;
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

/// Looks, in a process of its own, and writes to its standard output what was seen.
///
/// # Errors
/// [`LookError`] where that cannot be told.
pub fn run(what: &str) -> Result<(), LookError> {
    die_with_parent()?;
    let answer = match serde_json::from_str(what)? {
        Look::NameServers { proc, pids } => {
            let seen = pids.into_iter().find_map(|pid| name_servers(&proc, pid));
            serde_json::to_vec(&seen.unwrap_or_default())
        }
        Look::Volume { init, volume } => {
            serde_json::to_vec(&volume::open(init, &volume).map(|(_, mount)| mount))
        }
        Look::Room { init, volume } => serde_json::to_vec(&room(init, &volume)),
    };
    Ok(std::io::stdout().write_all(&answer?)?)
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
        pids: pids.to_vec(),
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

/// Has a process look, and waits for its answer.
fn ask<T: DeserializeOwned>(supervisor: &mut Supervisor, look: &Look) -> Result<T, Refusal> {
    let failed = |message: String| ("NodeUnreadable", format!("cannot look: {message}"));
    supervisor.looks().reap();
    if supervisor.looks().unreaped.len() >= MOST {
        let message = format!("{MOST} looks at other targets do not come to their end");
        return Err((UNRESPONSIVE, message));
    }
    let what = serde_json::to_string(look).map_err(|e| failed(e.to_string()))?;
    let [name, _] = COMMAND;
    let mut child = Command::new(supervisor.program())
        .arg0(name)
        .args(["look", &what])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| failed(e.to_string()))?;
    let answer = child.stdout.take().map(|output| read(output, supervisor));
    supervisor.looks().end(child);
    match answer {
        Some(Ok(Some(answer))) => {
            serde_json::from_slice(&answer).map_err(|e| failed(e.to_string()))
        }
        Some(Ok(None)) => {
            supervisor.looks().was_in_vain = true;
            Err((UNRESPONSIVE, look.unanswered()))
        }
        Some(Err(error)) => Err(failed(error.to_string())),
        None => Err(failed("there is no answer".to_owned())),
    }
}

/// All that is written until the other side closes; `None` if it does not in time.
fn read(output: ChildStdout, supervisor: &mut Supervisor) -> io::Result<Option<Vec<u8>>> {
    let until = Instant::now() + PATIENCE;
    let mut output = output.take(LONGEST);
    let (mut answer, mut part) = (Vec::new(), [0; 4096]);
    while Instant::now() < until {
        let now = boottime().map_err(io::Error::other)?;
        supervisor.beat(now);
        let mut fds = [PollFd::new(output.get_ref().as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, TURN) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => match output.read(&mut part)? {
                0 => return Ok(Some(answer)),
                length => answer.extend_from_slice(&part[..length]),
            },
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(None)
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
mod tests {
    use super::*;
    use crate::{testing, wire::LEASE};

    #[test]
    fn name_servers_are_read_as_resolvers_read_them() {
        let text = "# comment\nsearch a.svc\nnameserver 10.90.0.10\nnameserver fe80::1%eth0\nnameserver\nnameserver x\noptions ndots:5\n";
        let expected: [IpAddr; 2] = ["10.90.0.10".parse().unwrap(), "fe80::1".parse().unwrap()];
        assert_eq!(parse_resolv_conf(text), expected);
    }

    /// What is seen by a program that does something else.
    fn seen(script: &str) -> Result<Vec<IpAddr>, Refusal> {
        let directory = tempfile::tempdir().unwrap();
        let script = format!("[ $1 != inject ] || exec sleep 600\n{script}");
        let program = testing::program(directory.path(), &script);
        let mut supervisor = Supervisor::new(program);
        let (key, begun) = (testing::key("a"), boottime().unwrap());
        let injector = supervisor.start(key.clone(), testing::order(), begun);
        let seen = at_name_servers(&mut supervisor, &Proc::default(), &[]);
        // Whoever is looked for, the injectors hear of their agent.
        let silence = supervisor.live()[&key].longest_silence;
        assert!(silence < LEASE, "{silence:?}");
        let is_vain = matches!(seen, Err((UNRESPONSIVE, _)));
        assert_eq!(supervisor.looks().was_in_vain(), is_vain);
        supervisor.looks().reap();
        assert!(supervisor.looks().unreaped.is_empty());
        injector.and_then(|_| supervisor.discard(&key)).unwrap();
        seen
    }

    #[test]
    fn what_does_not_answer_is_not_waited_for() {
        let begun = Instant::now();
        let (reason, message) = seen("exec sleep 600").unwrap_err();
        assert_eq!(reason, UNRESPONSIVE);
        assert!(message.starts_with("/etc/resolv.conf"), "{message}");
        assert!(begun.elapsed() < PATIENCE * 5);
        assert_eq!(seen("exit 1").unwrap_err().0, "NodeUnreadable");
        assert_eq!(seen("echo '[\"10.0.0.1\"]'").unwrap().len(), 1);
    }
}
