//! The injector program itself, given orders as the agent gives them, on a container that is a process
//! in a control group.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use windtunnel_agent::kernel::cgroup;
use windtunnel_agent::kernel::proc::{Proc, ProcessId, boottime};
use windtunnel_agent::model::{Act, ContainerEntry, Counts};
use windtunnel_agent::wire::{Down, Line, Order, Task, Up};

use crate::support::SOON;

/// The mount of control groups.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// A container: a process that waits, in a control group of its own.
pub(crate) struct Container {
    pub(crate) cgroup: PathBuf,
    pub(crate) init: Child,
}

impl Container {
    /// With these files of its control group set. The controllers are those of the root's.
    pub(crate) fn new(name: &str, files: &[(&str, &str)]) -> Self {
        Self::running(name, files, Command::new("sleep").arg("1000"))
    }

    pub(crate) fn running(name: &str, files: &[(&str, &str)], program: &mut Command) -> Self {
        let root = Path::new(CGROUPS);
        fs::write(root.join("cgroup.subtree_control"), "+cpu +memory +pids").unwrap();
        let cgroup = root.join(format!("wt-{name}-{}", std::process::id()));
        Self::at(cgroup, files, program)
    }

    /// In a control group at this place.
    pub(crate) fn at(cgroup: PathBuf, files: &[(&str, &str)], program: &mut Command) -> Self {
        fs::create_dir(&cgroup).unwrap();
        for (file, text) in files {
            fs::write(cgroup.join(file), text).unwrap();
        }
        let init = program.stdin(Stdio::null()).spawn().unwrap();
        fs::write(cgroup.join("cgroup.procs"), init.id().to_string()).unwrap();
        Self { cgroup, init }
    }

    pub(crate) fn entry(&self, act: Act) -> ContainerEntry {
        ContainerEntry {
            id: "containerd://test".to_owned(),
            cgroup: self.cgroup.clone(),
            init: self.id(),
            act,
            is_successor: false,
        }
    }

    fn id(&self) -> ProcessId {
        let pid = i32::try_from(self.init.id()).unwrap();
        Proc::default().identify(pid).unwrap().unwrap()
    }

    /// How many processes are in it besides its first.
    pub(crate) fn others(&self) -> usize {
        let pids = cgroup::pids(&self.cgroup).unwrap();
        let init = i32::try_from(self.init.id()).unwrap();
        pids.into_iter().filter(|pid| *pid != init).count()
    }

    /// CPU time used in it.
    pub(crate) fn used(&self) -> Duration {
        let text = fs::read_to_string(self.cgroup.join("cpu.stat")).unwrap();
        let usage = text
            .lines()
            .find_map(|line| line.strip_prefix("usage_usec "))
            .unwrap();
        Duration::from_micros(usage.parse().unwrap())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let _ = self.init.kill();
        let _ = self.init.wait();
        let start = Instant::now();
        // Its own groups first.
        let inner = fs::read_dir(&self.cgroup).into_iter().flatten().flatten();
        for group in inner.filter(|entry| entry.path().is_dir()) {
            let _ = fs::remove_dir(group.path());
        }
        while fs::remove_dir(&self.cgroup).is_err() && start.elapsed() < SOON {
            std::thread::yield_now();
        }
    }
}

/// A running injector, and what it has said.
pub(crate) struct Injector {
    pub(crate) process: Child,
    line: Line,
    /// The last counters that it told.
    pub(crate) counts: Counts,
    /// The longest that it gave no sign of life.
    pub(crate) silence: Duration,
    heard: Instant,
    beaten: Instant,
}

impl Injector {
    /// Starts one with its order, for a minute.
    pub(crate) fn start(task: Task) -> Self {
        Self::start_for(task, Duration::from_mins(1))
    }

    fn start_for(task: Task, time: Duration) -> Self {
        let (line, theirs) = Line::pair().unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_windtunnel-agent"))
            .arg0("/proc/self/exe")
            .arg("inject")
            .stdin(Stdio::from(theirs))
            .spawn()
            .unwrap();
        let deadline = boottime().unwrap() + time;
        line.send(&Down::Order(Order { deadline, task })).unwrap();
        Self {
            process,
            line,
            counts: Counts::default(),
            silence: Duration::ZERO,
            heard: Instant::now(),
            beaten: Instant::now(),
        }
    }

    /// Starts one on a container, and waits for its proof.
    pub(crate) fn applied(container: &Container, act: Act) -> Self {
        Self::started(
            Task::Container(container.entry(act)),
            Duration::from_mins(1),
        )
    }

    /// Starts one that lives so long at most, and waits for its proof.
    pub(crate) fn started(task: Task, life: Duration) -> Self {
        let mut injector = Self::start_for(task, life);
        let said = injector.until("the proof", |said| matches!(said, Up::Applied { .. }));
        eprintln!("{said:?}");
        injector
    }

    /// What it says that is no sign of life, once it says what is waited for.
    pub(crate) fn until(&mut self, what: &str, is_it: impl Fn(&Up) -> bool) -> Up {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < 4 * SOON, "not said in time: {what}");
            match self.hear() {
                Some(said) if is_it(&said) => return said,
                Some(said @ (Up::Failed { .. } | Up::Vanished { .. })) => panic!("{said:?}"),
                _ => {}
            }
        }
    }

    /// The first that it says and that is no sign of life.
    pub(crate) fn first(&mut self) -> Up {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < 4 * SOON, "nothing is said in time");
            match self.hear() {
                None | Some(Up::Beat(_)) => {}
                Some(said) => return said,
            }
        }
    }

    /// Keeps it alive for a time.
    pub(crate) fn hold(&mut self, time: Duration) {
        let start = Instant::now();
        loop {
            if let Some(said @ (Up::Failed { .. } | Up::Vanished { .. })) = self.hear() {
                panic!("{said:?}");
            }
            if start.elapsed() >= time {
                break;
            }
        }
    }

    fn hear(&mut self) -> Option<Up> {
        if self.beaten.elapsed() > Duration::from_millis(500) {
            self.beaten = Instant::now();
            // One that has ended is found out by what it said.
            let _ = self.line.send(&Down::Beat);
        }
        let said = self.line.receive().ok().flatten();
        self.silence = self.silence.max(self.heard.elapsed());
        if let Some(Up::Beat(counts)) = &said {
            self.counts = counts.clone();
            self.heard = Instant::now();
        }
        if said.is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
        said
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
