//! Looks at a pod from its node, a few times a second, whatever happens to the cluster meanwhile: what
//! runs in its control groups and stands still there, what it uses, and how calls on its volumes and
//! connections to it go.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use windtunnel_tests::cluster::Cluster;
use windtunnel_tests::cluster::poll::reach;
use windtunnel_tests::product::deck::{Fault, Kind, VOLUMES};

/// Between the beginnings of two looks.
const EVERY: Duration = Duration::from_millis(250);
/// How long a connection may take. Only one that is refused tells something.
const CONNECT: Duration = Duration::from_millis(300);
/// The least of what a fault takes of memory, or of a volume.
const TAKEN: u64 = 12 << 20;
/// What a container may use more than before, and a volume have more on it.
const SLACK: u64 = 8 << 20;

/// Arguments: the pod's uid, the directories of its volumes, and those volumes on which calls are tried,
/// for up to a second each. Few programs are started: a node is busy enough.
const SCRIPT: &str = r#"
uid=$1 data=$2 memory=$3; shift 3; commands= threads=
for group in /sys/fs/cgroup/kubepods*/pod$uid/*/ /sys/fs/cgroup/kubepods*/*/pod$uid/*/; do
  [ -r "$group/cgroup.procs" ] || continue
  id=${group%/}; id=${id##*/}
  while read -r pid; do
    echo "process $id $pid"
    commands="$commands /proc/$pid/cmdline" threads="$threads /proc/$pid/task/*/status"
  done <"$group/cgroup.procs"
  read -r bytes <"$group/memory.current" && echo "memory $id $bytes"
done 2>/dev/null
[ -n "$commands" ] && grep -aHs . $commands && grep -aHs ^State: $threads
stat -f -c 'space %n %S %b %f' "$data" "$memory" 2>/dev/null
for volume in "$@"; do
  app=$(grep -lasz '^echo$' $commands /dev/null) && app=${app#/proc/} && app=${app%%/*} || continue
  outcome=$(nsenter --target "$app" --mount -- /windtunnel-sample disk --file "$volume/look" --count 1 --wait-millis 1000 2>/dev/null)
  echo "disk $volume $outcome"
done
exit 0
"#;

/// A process in a control group of the pod.
#[derive(Debug, Clone)]
struct Process {
    group: String,
    pid: i32,
    command: String,
    /// The letters of its threads' states.
    states: String,
}

/// What a look has shown.
#[derive(Debug, Clone)]
pub(super) struct Look {
    /// When it was begun.
    pub(super) at: Instant,
    processes: Vec<Process>,
    /// Bytes that the target's container uses.
    memory: u64,
    /// Bytes in use on each volume.
    space: BTreeMap<String, u64>,
    /// Volumes on which a call has failed, or not returned.
    bad: BTreeSet<String>,
    /// Whether a connection to the sink was refused.
    is_refused: bool,
}

impl Look {
    /// The target's own process.
    pub(super) fn app(&self) -> Option<i32> {
        self.sample("echo").map(|process| process.pid)
    }

    /// The process of the container beside it.
    fn beside(&self) -> Option<&Process> {
        self.sample("sink")
    }

    fn sample(&self, argument: &str) -> Option<&Process> {
        let command = format!("/windtunnel-sample {argument}");
        let mut all = self.processes.iter();
        all.find(|process| process.command.starts_with(&command))
    }

    /// Whether both containers run, and both volumes are there.
    pub(super) fn is_complete(&self) -> bool {
        let has = |volume: &&str| self.space.contains_key(*volume);
        self.app().is_some() && self.beside().is_some() && VOLUMES.iter().all(has)
    }

    /// Whether a child of an injector does something in the pod.
    fn has_child(&self, what: &str) -> bool {
        let command = format!("windtunnel-child child {what}");
        let mut all = self.processes.iter();
        all.any(|process| process.command.starts_with(&command))
    }

    fn space(&self, volume: &str) -> u64 {
        self.space.get(volume).copied().unwrap_or_default()
    }

    /// Whether a fault shows, by what is not as before. Those on packets are seen by lamps, and those that
    /// kill by what is gone since the look before.
    pub(super) fn shows(&self, fault: &Fault, before: &Self) -> bool {
        match fault.kind {
            Kind::Delay | Kind::Loss | Kind::Partition => false,
            // One that has died and was not seen off yet is listed, but has no command any more.
            Kind::ContainerKill | Kind::PodKill => {
                before.app().is_some() && self.app() != before.app()
            }
            Kind::Reset => self.is_refused,
            Kind::IoHang | Kind::IoLatency | Kind::IoError => self.bad.contains(fault.volume),
            Kind::Cpu => self.has_child("burn"),
            Kind::Memory => self.has_child("hog") || self.memory > before.memory + TAKEN,
            Kind::DiskFill => {
                self.has_child("fill")
                    || self.space(fault.volume) > before.space(fault.volume) + TAKEN
            }
            Kind::ContainerPause => self.stands_still().next().is_some(),
        }
    }

    /// Processes with a thread that is stopped or traced.
    fn stands_still(&self) -> impl Iterator<Item = &Process> {
        let all = self.processes.iter();
        all.filter(|process| process.states.contains(['T', 't']))
    }

    /// What is not as it was before any fault.
    pub(super) fn remains(&self, before: &Self) -> Vec<String> {
        let mut all = Vec::new();
        for process in &self.processes {
            let is_known = |other: &Process| other.command == process.command;
            if !before.processes.iter().any(is_known) {
                all.push(format!("there is {process:?}"));
            }
        }
        let still = self.stands_still();
        all.extend(still.map(|process| format!("{process:?} stands still")));
        if self.app().is_none() {
            all.push("the target does not run".to_owned());
        }
        if self.memory > before.memory + SLACK {
            all.push(format!("{} bytes of memory in use", self.memory));
        }
        all.extend(VOLUMES.iter().filter_map(|v| self.fuller(v, before)));
        all.extend(self.bad.iter().map(|v| format!("calls on {v} fail")));
        if self.is_refused {
            all.push("connections are refused".to_owned());
        }
        all
    }

    /// What a pod that is gone has left: processes, and space on its disk.
    pub(super) fn remains_of_dead(&self, before: &Self) -> Vec<String> {
        let all = self.processes.iter();
        let mut all: Vec<String> = all.map(|p| format!("there is {p:?}")).collect();
        all.extend(self.fuller(VOLUMES[0], before));
        all
    }

    fn fuller(&self, volume: &str, before: &Self) -> Option<String> {
        let (now, then) = (self.space(volume), before.space(volume));
        (now.abs_diff(then) > SLACK).then(|| format!("{now} bytes on {volume}, {then} before"))
    }

    /// What of the container beside the target is not as before: it is never one.
    pub(super) fn trespasses(&self, before: &Self) -> Option<String> {
        let (Some(now), Some(then)) = (self.beside(), before.beside()) else {
            return Some("the container beside the target is gone".to_owned());
        };
        if now.pid != then.pid || now.states.contains(['T', 't']) {
            return Some(format!("{then:?} is {now:?}"));
        }
        let mut all = self.processes.iter();
        let strange = all.find(|p| p.group == then.group && p.pid != then.pid)?;
        Some(format!("beside the target there is {strange:?}"))
    }
}

/// Who looks, and at what.
#[derive(Clone)]
pub(super) struct Eye {
    pub(super) cluster: &'static Cluster,
    pub(super) node: String,
    pub(super) uid: String,
    /// The directory of the pod's disk.
    pub(super) data: String,
    /// The pod's sink.
    pub(super) sink: SocketAddr,
}

impl Eye {
    /// Looks, and tries calls on some volumes.
    pub(super) fn look(&self, volumes: &[&str]) -> Result<Look> {
        let memory = format!(
            "/var/lib/kubelet/pods/{}/volumes/kubernetes.io~empty-dir/memory",
            self.uid
        );
        let (data, uid) = (&self.data, &self.uid);
        let mut argv = vec!["sh", "-c", SCRIPT, "look", uid, data, &memory];
        argv.extend(volumes);
        let at = Instant::now();
        // Not later: what it shows is of this moment.
        let text = self
            .cluster
            .node(&self.node)?
            .at_once()
            .run(&argv)?
            .text()?;
        let connected = self
            .cluster
            .within(|| Ok(TcpStream::connect_timeout(&self.sink, CONNECT).map(drop)))?;
        let mut look = read(at, &text, [(VOLUMES[0], data), (VOLUMES[1], &memory)])?;
        look.is_refused = connected.is_err_and(|e| {
            matches!(
                e.kind(),
                ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset
            )
        });
        Ok(look)
    }
}

fn read(at: Instant, text: &str, volumes: [(&str, &str); 2]) -> Result<Look> {
    let mut look = Look {
        at,
        processes: Vec::new(),
        memory: 0,
        space: BTreeMap::new(),
        bad: BTreeSet::new(),
        is_refused: false,
    };
    let mut memory = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        match words[..] {
            ["process", group, pid] => look.processes.push(Process {
                group: group.to_owned(),
                pid: pid.parse()?,
                command: String::new(),
                states: String::new(),
            }),
            ["memory", group, bytes] => {
                memory.insert(group, bytes.parse()?);
            }
            ["space", directory, blocks] => {
                let found = volumes.iter().find(|(_, at)| *at == directory);
                let (volume, _) = found.context("an unknown volume")?;
                look.space.insert((*volume).to_owned(), used(blocks)?);
            }
            ["disk", volume, outcome] if is_bad(outcome) => {
                look.bad.insert(volume.to_owned());
            }
            ["disk", ..] => {}
            _ => told_by_proc(&mut look, line),
        }
    }
    let target = look.sample("echo");
    let memory = target.and_then(|target| memory.get(target.group.as_str()));
    look.memory = memory.copied().unwrap_or_default();
    Ok(look)
}

/// `/proc/1/cmdline:…` or `/proc/1/task/1/status:State: S …`. What has ended meanwhile says nothing.
fn told_by_proc(look: &mut Look, line: &str) {
    let Some((path, text)) = line.split_once(':') else {
        return;
    };
    let pid = path.split('/').nth(2).and_then(|pid| pid.parse().ok());
    let mut all = look.processes.iter_mut();
    let Some(process) = all.find(|process| Some(process.pid) == pid) else {
        return;
    };
    match text.strip_prefix("State:") {
        Some(state) => process.states.extend(state.trim_start().chars().next()),
        None => process.command = text.trim_end_matches('\0').replace('\0', " "),
    }
}

/// Bytes in use: the size of a block, how many there are, and how many are free.
fn used(blocks: &str) -> Result<u64> {
    let numbers: Vec<u64> = blocks
        .split(' ')
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let [size, all, free] = numbers[..] else {
        bail!("no three numbers: {blocks:?}");
    };
    Ok(all.saturating_sub(free) * size)
}

/// Whether a call has failed or not returned. One that has died with its container tells nothing.
fn is_bad(outcome: &str) -> bool {
    let outcome: Value = serde_json::from_str(outcome).unwrap_or_default();
    ["open", "read", "write"].iter().any(|call| {
        let calls = &outcome[call];
        let failed = calls["errors"].as_array();
        calls["hung"].as_u64() > Some(0) || failed.is_some_and(|errors| !errors.is_empty())
    })
}

/// Looks again and again, for as long as this value lives.
pub(super) struct Watch {
    looks: Arc<Mutex<Vec<Look>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Begins to look, and to try calls on some volumes.
    pub(super) fn begin(eye: Eye, volumes: Vec<&'static str>) -> Self {
        let looks: Arc<Mutex<Vec<Look>>> = Arc::default();
        let is_over = Arc::new(AtomicBool::new(false));
        let thread = {
            let (looks, is_over) = (looks.clone(), is_over.clone());
            thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let next = Instant::now() + EVERY;
                    // A look that fails shows nothing; what was to be seen in it is missed.
                    if let Ok(look) = eye.look(&volumes) {
                        let mut looks = looks.lock().unwrap_or_else(PoisonError::into_inner);
                        looks.push(look);
                    }
                    reach(next);
                }
            })
        };
        Self {
            looks,
            is_over,
            thread: Some(thread),
        }
    }

    /// What was seen so far.
    pub(super) fn looks(&self) -> Vec<Look> {
        let looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        looks.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic of it shows in what it did not see.
            let _ = thread.join();
        }
    }
}
