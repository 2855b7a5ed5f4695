//! A whole agent on a pod of its own, told what it is told by the API server; its journal is on a file
//! system that can be full, or read-only.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, atomic::AtomicBool, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::eventfd::{EfdFlags, EventFd};
use serde_json::{Value, json};
use tokio::sync::{mpsc as tokio_mpsc, watch};
use windtunnel_agent::act::Report;
use windtunnel_agent::api::{Inbox, News, Sighting};
use windtunnel_agent::controller::{Controller, Lines};
use windtunnel_agent::kernel::proc::{Proc, boottime};
use windtunnel_agent::metrics::Metrics;
use windtunnel_agent::node::{Node, Settings};
use windtunnel_agent::supervisor::Supervisor;
use windtunnel_agent::targets::Places;
use windtunnel_crds::{NodeAgentStatus, NodeInjection, NodeInjectionStatus};
use windtunnel_runtime::{CancellationToken, Pulse};

use crate::injector::{CGROUPS, Container};
use crate::support::{Pair, SOON, is_held};

const UID: &str = "inj-uid";
const CONTAINER: &str = "app0";
const PROGRAM: &str = env!("CARGO_BIN_EXE_windtunnel-agent");

/// A pod of one container, with a network of its own.
pub(crate) struct Pod {
    uid: String,
    container: Option<Container>,
    pub(crate) network: Pair,
    cgroup: PathBuf,
}

impl Pod {
    fn new(name: &str) -> Self {
        let uid = format!("{name}-{}", std::process::id()).to_lowercase();
        let cgroup = Path::new(CGROUPS).join(format!("pod{uid}"));
        fs::create_dir(&cgroup).unwrap();
        let network = Pair::new();
        let run = || {
            Container::at(
                cgroup.join(CONTAINER),
                &[],
                Command::new("sleep").arg("1000"),
            )
        };
        let container = network.pod.enter(run).unwrap();
        Self {
            uid,
            container: Some(container),
            network,
            cgroup,
        }
    }

    fn pid(&self) -> u32 {
        self.container.as_ref().unwrap().init.id()
    }

    /// Its only container is killed.
    pub(crate) fn end(&mut self) {
        drop(self.container.take());
    }

    pub(crate) fn stands_still(&self) -> bool {
        is_held(self.pid())
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        drop(self.container.take());
        let _ = fs::remove_dir(&self.cgroup);
    }
}

/// How a journal cannot be written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Closed {
    /// Its file system has no space left.
    Full,
    /// Its file system is read-only.
    ReadOnly,
}

impl Closed {
    /// What the kernel says of it.
    pub(crate) fn says(self) -> &'static str {
        match self {
            Self::Full => "No space left on device",
            Self::ReadOnly => "Read-only file system",
        }
    }
}

/// The directory of a journal, a small file system of its own.
pub(crate) struct Place(PathBuf);

impl Place {
    fn new(path: PathBuf) -> Self {
        fs::create_dir(&path).unwrap();
        let options = Some("size=256k");
        mount(
            Some("tmpfs"),
            &path,
            Some("tmpfs"),
            MsFlags::empty(),
            options,
        )
        .unwrap();
        Self(path)
    }

    pub(crate) fn close(&self, how: Closed) {
        match how {
            Closed::Full => {
                let mut ballast = fs::File::create(self.0.join("ballast")).unwrap();
                while ballast.write_all(&[0; 4096]).is_ok() {}
            }
            Closed::ReadOnly => {
                // Through a mount that nothing is open on.
                let none = None::<&str>;
                let flags = MsFlags::MS_BIND;
                mount(Some(&self.0), &self.0, none, flags, none).unwrap();
                let flags = flags | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(none, &self.0, none, flags, none).unwrap();
            }
        }
    }

    pub(crate) fn open(&self, how: Closed) {
        match how {
            Closed::Full => fs::remove_file(self.0.join("ballast")).unwrap(),
            Closed::ReadOnly => umount2(&self.0, MntFlags::MNT_DETACH).unwrap(),
        }
    }

    /// What the entries in it say.
    pub(crate) fn entries(&self) -> Vec<Value> {
        let files = fs::read_dir(&self.0).unwrap().map(|f| f.unwrap().path());
        files
            .filter(|path| path.extension().is_some_and(|e| e == "json"))
            .map(|path| serde_json::from_slice(&fs::read(path).unwrap()).unwrap())
            .collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        while umount2(&self.0, MntFlags::MNT_DETACH).is_ok() {}
    }
}

/// The agent, and the API server's side of it. It is dropped before what it acts on.
pub(crate) struct Agent {
    inbox: Inbox,
    wake: Arc<EventFd>,
    reports: tokio_mpsc::UnboundedReceiver<Report>,
    _view: watch::Receiver<NodeAgentStatus>,
    shutdown: CancellationToken,
    thread: Option<JoinHandle<()>>,
    pub(crate) injection: NodeInjection,
    starts: PathBuf,
    pub(crate) pod: Pod,
    pub(crate) journal: Place,
    directory: tempfile::TempDir,
}

impl Agent {
    /// One that will be told of these faults on the pod and its container, for a minute.
    pub(crate) fn new(name: &str, faults: &[&str]) -> Self {
        Self::running(name, faults, "")
    }

    /// The same, and it keeps faults for so long without a control plane; what has ended is checked
    /// again after as long.
    pub(crate) fn hasty(name: &str, faults: &[&str], grace: Duration) -> Self {
        let mut agent = Self::with((name, faults), Some(""), grace);
        agent.injection.spec.recheck_after = grace.into();
        agent
    }

    /// The same, and its injectors are started as ever: by their arguments they are known.
    pub(crate) fn plain(name: &str, faults: &[&str]) -> Self {
        Self::with((name, faults), None, Duration::from_mins(10))
    }

    /// The agent that comes next, on a copy of the journal.
    pub(crate) fn successor(&self) -> Node {
        let directory = self.directory.path();
        let copy = directory.join("copy");
        fs::create_dir(&copy).unwrap();
        for file in fs::read_dir(&self.journal.0).unwrap() {
            let file = file.unwrap();
            if file.path().is_file() {
                fs::copy(file.path(), copy.join(file.file_name())).unwrap();
            }
        }
        let mut settings = places(directory, Duration::from_mins(10));
        settings.places.proc = Proc::default();
        Node::new(settings, &copy, Metrics::new().0).unwrap()
    }

    /// The same, and its injectors say nothing.
    pub(crate) fn mute(name: &str, faults: &[&str]) -> Self {
        Self::running(name, faults, "[ $1 != inject ] || exec sleep 600")
    }

    /// The same, and whatever it looks at does not answer.
    pub(crate) fn unanswered(name: &str, faults: &[&str]) -> Self {
        let first = "[ $1 != look ] || { echo look >> $starts; exec sleep 600; }";
        Self::running(name, faults, first)
    }

    fn running(name: &str, faults: &[&str], first: &str) -> Self {
        Self::with((name, faults), Some(first), Duration::from_mins(10))
    }

    fn with((name, faults): (&str, &[&str]), first: Option<&str>, grace: Duration) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let pod = Pod::new(name);
        let journal = Place::new(directory.path().join("journal"));
        let starts = directory.path().join("starts");
        let program = first.map(|first| counted(directory.path(), &starts, first));
        let supervisor = Supervisor::new(program.unwrap_or_else(|| PROGRAM.into()));
        let node = Node::new(
            settings(directory.path(), &pod, grace),
            &journal.0,
            Metrics::new().0,
        );
        let node = node.unwrap().with_supervisor(supervisor);
        let (told, news) = mpsc::channel();
        let (reports, reported) = tokio_mpsc::unbounded_channel();
        let (view, shown) = watch::channel(NodeAgentStatus::default());
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = Arc::new(EventFd::from_flags(flags).unwrap());
        let urgent = Arc::<AtomicBool>::default();
        let inbox = Inbox::new(told, wake.clone(), urgent.clone());
        let lines = Lines {
            news,
            wake: wake.clone(),
            urgent,
            reports,
            agent: view,
        };
        let shutdown = CancellationToken::new();
        let until = shutdown.clone();
        let run = move || {
            let controller = Controller::new(node, lines, Pulse::new(SOON));
            controller.run(Vec::new(), &until).unwrap();
        };
        Self {
            inbox,
            wake,
            reports: reported,
            _view: shown,
            shutdown,
            thread: Some(thread::spawn(run)),
            injection: injection(&pod, faults),
            starts,
            pod,
            journal,
            directory,
        }
    }

    fn tell(&self, news: News) {
        self.inbox.tell(news);
    }

    /// Tells it of the injection, and that everything else is in order.
    pub(crate) fn begin(&self) {
        self.tell(News::Stop(false));
        self.list();
        self.lead();
        let all = BTreeMap::from([(UID.to_owned(), self.injection.clone())]);
        self.tell(News::Listed(all));
    }

    /// Begins and starts its faults.
    pub(crate) fn started(&mut self) {
        self.begin();
        self.until("prepared", |told| told["phase"] == "Prepared");
        self.start();
    }

    /// Begins and starts its faults, and waits for the effect.
    pub(crate) fn injected(&mut self) {
        self.started();
        self.until("injected", |told| told["state"] == "Injected");
    }

    /// Tells it that its injections can be read.
    pub(crate) fn list(&self) {
        let at = boottime().unwrap();
        self.tell(News::Listable { at });
    }

    /// Tells it that the operator has renewed its lease.
    pub(crate) fn lead(&self) {
        let (at, now) = (boottime().unwrap(), Timestamp::now());
        self.tell(News::Lease(Sighting {
            holder: "operator".to_owned(),
            renewed: now,
            arrived: now,
            at,
            is_live: true,
        }));
    }

    pub(crate) fn start(&mut self) {
        self.injection.spec.start_time = Some(MicroTime(Timestamp::now()));
        self.tell(News::Changed(Box::new(self.injection.clone())));
    }

    pub(crate) fn abort(&mut self) {
        self.injection.spec.abort = true;
        self.tell(News::Changed(Box::new(self.injection.clone())));
    }

    /// The first report that says what is waited for, in short, as JSON.
    pub(crate) fn until(&mut self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        self.until_with(what, is_it, |_| {})
    }

    /// The same, while something is done twice a second.
    pub(crate) fn until_with(
        &mut self,
        what: &str,
        is_it: impl Fn(&Value) -> bool,
        meanwhile: impl Fn(&Self),
    ) -> Value {
        let (start, mut done) = (Instant::now(), Instant::now());
        let mut last = Value::Null;
        while start.elapsed() < 4 * SOON {
            if done.elapsed() > Duration::from_millis(500) {
                done = Instant::now();
                meanwhile(self);
            }
            match self.reports.try_recv() {
                Ok(report) => {
                    last = told(&report.status);
                    if is_it(&last) {
                        return last;
                    }
                }
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
        panic!("not told in time: {what}; the last was {last}");
    }

    /// How many injectors were ever started, or looks that do not answer.
    pub(crate) fn starts(&self) -> usize {
        fs::read_to_string(&self.starts)
            .unwrap_or_default()
            .lines()
            .count()
    }
}

impl Agent {
    /// Has it end, as SIGTERM does.
    pub(crate) fn end(&mut self) {
        self.shutdown.cancel();
        let _ = self.wake.write(1);
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || thread::panicking());
        }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.end();
    }
}

/// A report: its phase and reason, and what it says of the last target.
fn told(status: &NodeInjectionStatus) -> Value {
    let target = status.targets.last().unwrap();
    json!({
        "phase": status.phase,
        "refused": status.reason,
        "state": target.state,
        "reason": target.reason,
        "message": target.message,
        "by": target.reclaimed_by,
        "checked": status.audit.as_ref().is_some_and(|audit| audit.checked_at.is_some()),
        "rechecked": status.audit.as_ref().is_some_and(|audit| audit.rechecked_at.is_some()),
        "residue": status.audit.as_ref().map(|audit| &audit.residue),
    })
}

/// The agent's program, and before an injector a line in a file.
fn counted(directory: &Path, starts: &Path, first: &str) -> PathBuf {
    let path = directory.join("injector");
    let starts = starts.display();
    let script = format!(
        "#!/bin/sh\nstarts={starts}\n{first}\n[ $1 != inject ] || echo started >> $starts\nexec {PROGRAM} \"$@\"\n"
    );
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The agent's node has no other processes than the pod's.
fn settings(directory: &Path, pod: &Pod, grace: Duration) -> Settings {
    let (proc, logs) = (directory.join("proc"), directory.join("logs"));
    fs::create_dir(&proc).unwrap();
    for name in [&pod.pid().to_string(), "1", "sys"] {
        symlink(Path::new("/proc").join(name), proc.join(name)).unwrap();
    }
    let log = logs.join(format!("shop_pod_{}", pod.uid));
    fs::create_dir_all(log).unwrap();
    places(directory, grace)
}

fn places(directory: &Path, grace: Duration) -> Settings {
    Settings {
        places: Places {
            proc: Proc::new(directory.join("proc")),
            cgroups: CGROUPS.into(),
            pod_logs: directory.join("logs"),
        },
        grace,
        fill_node_disk: false,
    }
}

fn injection(pod: &Pod, faults: &[&str]) -> NodeInjection {
    let id = format!("containerd://{CONTAINER}");
    let target = json!({
        "podName": "pod", "podUid": pod.uid, "containers": [{"name": "app", "id": id}]
    });
    let fault = |(number, kind): (usize, &&str)| {
        let mut fault: Value = serde_json::from_str(kind).unwrap();
        fault["name"] = format!("fault-{number}").into();
        fault["startAfter"] = "0s".into();
        fault["duration"] = "1m".into();
        fault["targets"] = json!([target]);
        fault
    };
    let faults: Vec<Value> = faults.iter().enumerate().map(fault).collect();
    let spec = json!({
        "nodeName": "node1",
        "experiment": {"namespace": "shop", "name": "run", "uid": "run-uid"},
        "duration": "1m", "recheckAfter": "10m", "faults": faults
    });
    let mut injection = NodeInjection::new("run-1", serde_json::from_value(spec).unwrap());
    injection.metadata.uid = Some(UID.to_owned());
    injection.metadata.generation = Some(1);
    injection
}
