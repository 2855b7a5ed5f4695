//! A new agent finds what stands in no journal.

use std::os::unix::fs::symlink;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use windtunnel_agent::act::act;
use windtunnel_agent::decide::{Decision, Now, Step};
use windtunnel_agent::kernel::child;
use windtunnel_agent::kernel::nft::{Direction, OwnedTable, Table};
use windtunnel_agent::kernel::proc::Proc;
use windtunnel_agent::metrics::Metrics;
use windtunnel_agent::model::Sweep;
use windtunnel_agent::node::{Node, Settings, now};
use windtunnel_agent::targets::Places;

use crate::support::{Pair, Process, eventually, everything};

/// One that looks like an injector.
fn injector(directory: &Path) -> Process {
    mkfifo(&directory.join("inject"), Mode::S_IRWXU).unwrap();
    let mut cat = Command::new("cat");
    cat.arg0("/proc/self/exe").arg("inject");
    Process(cat.current_dir(directory).spawn().unwrap())
}

/// A new agent, on a node that has no other processes than these.
fn node(directory: &Path, pids: &[i32]) -> Node {
    let proc = directory.join("proc");
    std::fs::create_dir(&proc).unwrap();
    let pids = pids.iter().map(ToString::to_string);
    for name in pids.chain(["1".to_owned(), "sys".to_owned()]) {
        symlink(Path::new("/proc").join(&name), proc.join(name)).unwrap();
    }
    let places = Places {
        proc: Proc::new(proc),
        cgroups: "/sys/fs/cgroup".into(),
        pod_logs: directory.to_owned(),
    };
    let grace = Duration::from_secs(30);
    let settings = Settings {
        places,
        grace,
        fill_node_disk: false,
    };
    let journal = directory.join("journal");
    std::fs::create_dir(&journal).unwrap();
    std::fs::write(journal.join("lost.json"), "{").unwrap();
    Node::new(settings, &journal, Metrics::new().0).unwrap()
}

fn sweep(node: &mut Node) -> Sweep {
    let decision = Decision {
        steps: vec![Step::Sweep],
        wake_at: None,
    };
    let clock = || -> Now { now().unwrap() };
    act(node, decision, clock);
    node.observe(Duration::ZERO).sweep.unwrap()
}

#[test]
fn what_no_entry_speaks_of_is_found_removed_and_told() {
    let directory = tempfile::tempdir().unwrap();
    let mut pair = Pair::new();
    let ifb = pair.ifb("wt0123456789abe", None);
    let foreign = ["foreign0", "wtforeign0", "wt0123456789ab"];
    for link in foreign {
        pair.ifb(link, None);
    }
    let held = Table {
        name: "windtunnel-0123456789abcdef".to_owned(),
        chains: vec![pair.chain(Direction::Egress, vec![everything()], &ifb)],
    };
    let held = OwnedTable::install(&pair.pod, &held).unwrap();
    let inhabitant = Process::in_netns(&pair.pod);
    let mut orphan = injector(directory.path());
    let mut node = node(directory.path(), &[inhabitant.pid(), orphan.pid()]);
    assert!(
        node.residue().iter().any(|r| !r.removed),
        "nobody has looked"
    );

    let first = sweep(&mut node);
    assert_eq!(first.unread, None);
    let told: Vec<_> = first
        .residue
        .iter()
        .map(|r| (r.name.as_str(), r.removed))
        .collect();
    let pid = orphan.0.id().to_string();
    assert_eq!(
        told,
        [
            ("windtunnel-0123456789abcdef", false),
            ("wt0123456789abe", true),
            (&pid, true)
        ],
        "the table is held by this very test"
    );
    assert_eq!(orphan.0.wait().unwrap().signal(), Some(libc::SIGKILL));
    let links = pair.route.links().unwrap();
    let is_there = |wanted: &str| links.iter().any(|l| l.name == wanted);
    assert!(!is_there("wt0123456789abe") && is_there("eth0"));
    assert!(foreign.iter().all(|link| is_there(link)));
    assert!(node.observe(Duration::ZERO).is_unclean);

    drop(held);
    let second = sweep(&mut node);
    assert!(second.is_complete(), "{second:?}");
    assert_eq!(second.residue.len(), 3, "the record is kept");
    assert!(!node.observe(Duration::ZERO).is_unclean);
    assert!(node.residue().iter().all(|r| r.removed));
}

#[test]
fn what_an_agent_tries_meanwhile_is_no_residue() {
    let directory = tempfile::tempdir().unwrap();
    let trial = WithChild::new(directory.path(), "try");
    let lost = WithChild::new(directory.path(), "lost");
    let pids = [&trial, &lost].map(|p| [p.process.pid(), p.child]);
    let mut node = node(directory.path(), pids.as_flattened());
    let found = sweep(&mut node).residue;
    let names: Vec<&str> = found.iter().map(|r| r.name.as_str()).collect();
    assert_eq!(names, [lost.child.to_string()]);
    assert!(child::is_one(&Proc::new("/proc"), trial.child));
    // What calls itself so and is another program is none.
    let mut other = Command::new("cat");
    let other = other.arg0("windtunnel-child").stdin(Stdio::piped());
    let other = Process(other.spawn().unwrap());
    assert!(!child::is_one(&Proc::new("/proc"), other.pid()));
}

/// A process of this test with a child that looks like an injector's, and ends with it.
struct WithChild {
    process: Process,
    child: i32,
}

impl WithChild {
    fn new(directory: &Path, command: &str) -> Self {
        // By its name and its program an injector's child is known.
        let program = directory.join("windtunnel-agent");
        if !program.exists() {
            std::fs::copy("/bin/cat", program).unwrap();
        }
        let script = "coproc exec -a windtunnel-child ./windtunnel-agent\nwait\n";
        std::fs::write(directory.join(command), script).unwrap();
        let mut bash = Command::new("bash");
        bash.arg0("/proc/self/exe").arg(command);
        let process = Process(bash.current_dir(directory).spawn().unwrap());
        let proc = Proc::new("/proc");
        let mut child = 0;
        eventually("a child", || {
            let mut pids = proc.pids().unwrap().into_iter();
            let parent = Some(process.pid());
            child = pids.find(|&pid| proc.parent(pid) == parent).unwrap_or(0);
            child::is_one(&proc, child)
        });
        Self { process, child }
    }
}
