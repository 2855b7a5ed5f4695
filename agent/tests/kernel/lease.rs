//! What ends a process: its lease, its deadline, its parent.

use std::os::unix::process::ExitStatusExt as _;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal, raise};
use windtunnel_agent::kernel::lease::{Lease, die_with_parent};
use windtunnel_agent::kernel::proc::{Proc, boottime};

use crate::support::{Subprocess, eventually, plays, stay};

/// Blocks all signals, starts a lease and stops itself.
#[test]
fn holder() {
    if !plays("lease::holder") {
        return;
    }
    let milliseconds = |name| {
        let value: u64 = std::env::var(name).unwrap().parse().unwrap();
        Duration::from_millis(value)
    };
    SigSet::all().thread_block().unwrap();
    let deadline = boottime().unwrap() + milliseconds("WT_DEADLINE");
    let mut lease = Lease::start(milliseconds("WT_LEASE"), deadline).unwrap();
    for _ in 0..3 {
        assert!(lease.renew(milliseconds("WT_LEASE")).unwrap() <= deadline);
    }
    println!("holder ready");
    raise(Signal::SIGSTOP).unwrap();
    loop {
        std::thread::park();
    }
}

/// How long a holder lived after it was ready.
fn lifetime(lease: u64, deadline: u64) -> Duration {
    let variables = [
        ("WT_LEASE", lease.to_string()),
        ("WT_DEADLINE", deadline.to_string()),
    ];
    let mut holder = Subprocess::start("lease::holder", &variables);
    holder.wait_for("holder ready");
    let ready = Instant::now();
    let status = holder.child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{status:?}");
    ready.elapsed()
}

#[test]
fn a_lease_ends_a_stopped_process_that_blocks_all_signals() {
    let lived = lifetime(1000, 60_000);
    assert!((300..5000).contains(&lived.as_millis()), "{lived:?}");
}

#[test]
fn no_renewal_moves_the_end_past_the_deadline() {
    let lived = lifetime(60_000, 1000);
    assert!((300..5000).contains(&lived.as_millis()), "{lived:?}");
}

/// Starts another process and waits to be killed.
#[test]
fn parent() {
    if !plays("lease::parent") {
        return;
    }
    let mut child = Subprocess::start("lease::child", &[]);
    println!("child pid {}", child.wait_for("child ready "));
    stay();
}

#[test]
fn child() {
    if !plays("lease::child") {
        return;
    }
    die_with_parent().unwrap();
    println!("child ready {}", std::process::id());
    loop {
        std::thread::park();
    }
}

#[test]
fn a_child_dies_with_its_parent() {
    let proc = Proc::default();
    let mut parent = Subprocess::start("lease::parent", &[]);
    let pid: i32 = parent.wait_for("child pid ").trim().parse().unwrap();
    let child = proc.identify(pid).unwrap().unwrap();
    parent.kill();
    eventually("the child is dead", || !proc.is_alive(child).unwrap());
}
