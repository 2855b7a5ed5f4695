//! I/O faults on real mounts: what waits, who does not, and that all go on when the holder dies.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use windtunnel_agent::decide::SILENCE;
use windtunnel_agent::model::{Act, IoAct, IoMode};
use windtunnel_agent::wire::{LEASE, Task, Up};

use crate::injector::{Container, Injector};
use crate::support::{NEVER, SOON, eventually};

pub(crate) fn act(mode: IoMode) -> IoAct {
    IoAct {
        volume: "/mnt/wt-io".to_owned(),
        open: true,
        read: true,
        write: true,
        opened: true,
        percent: 100.0,
        mode,
    }
}

/// A container with a mount namespace of its own, and in it a bind mount of a directory at
/// `/mnt/wt-io`: as a volume is.
pub(crate) fn container(name: &str, volume: &str) -> Container {
    fs::create_dir_all("/mnt/wt-io").unwrap();
    fs::create_dir_all(volume).unwrap();
    fs::write(Path::new(volume).join("file"), "content").unwrap();
    let mut program = Command::new("sleep");
    program.arg("1000");
    let volume = volume.to_owned();
    let entered = move || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>)?;
        let bind = MsFlags::MS_BIND;
        mount(
            Some(volume.as_str()),
            "/mnt/wt-io",
            None::<&str>,
            bind,
            None::<&str>,
        )?;
        Ok(())
    };
    // SAFETY: only system calls are made between fork and exec, and memory that is there is read.
    #[allow(unsafe_code)]
    unsafe {
        program.pre_exec(entered)
    };
    let container = Container::running(name, &[], &mut program);
    let mountinfo = format!("/proc/{}/mountinfo", container.init.id());
    eventually("the volume is mounted", || {
        fs::read_to_string(&mountinfo).is_ok_and(|text| text.contains("/mnt/wt-io"))
    });
    container
}

/// A program run in the container's mount namespace.
pub(crate) fn inside(container: &Container, script: &str) -> Child {
    Command::new("nsenter")
        .args([
            "--target",
            &container.init.id().to_string(),
            "--mount",
            "--",
        ])
        .args(["sh", "-c", script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// How long it took, and what it wrote, if it ends.
pub(crate) fn outcome(mut child: Child, within: Duration) -> Option<(Duration, String)> {
    let start = Instant::now();
    while start.elapsed() < within {
        if child.try_wait().unwrap().is_some() {
            let took = start.elapsed();
            let output = child.wait_with_output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            return Some((took, String::from_utf8_lossy(&text).into_owned()));
        }
        thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    None
}

/// The same of one whose calls an injector is kept alive for.
pub(crate) fn outcome_under(
    injector: &mut Injector,
    child: Child,
    within: Duration,
) -> Option<(Duration, String)> {
    let watched = thread::spawn(move || outcome(child, within));
    while !watched.is_finished() {
        injector.hold(Duration::from_millis(5));
    }
    watched.join().unwrap()
}

const READ: &str = "cat /mnt/wt-io/file";

#[test]
fn calls_hang_on_one_mount_only_and_go_on_when_the_injector_dies() {
    for volume in ["/mnt/ext4/wt-hang", "/tmp/wt-hang"] {
        let container = container("hang", volume);
        let mut injector = Injector::applied(&container, Act::Io(act(IoMode::Hang)));
        let mut blocked: Vec<Child> = (0..5).map(|_| inside(&container, READ)).collect();
        let killable = inside(&container, READ);
        assert_eq!(
            outcome_under(&mut injector, killable, 5 * NEVER),
            None,
            "it hangs, and dies when it is killed"
        );
        for child in &mut blocked {
            assert!(child.try_wait().unwrap().is_none(), "it hangs");
        }
        let outside = Path::new(volume).join("file");
        assert_eq!(
            fs::read_to_string(outside).unwrap(),
            "content",
            "not through another mount"
        );
        injector.hold(Duration::from_millis(1500));
        assert!(
            injector.counts.effect["waiting"] >= 5,
            "{:?}",
            injector.counts
        );
        injector.kill();
        for child in blocked {
            let (_, text) = outcome(child, SOON).expect("it goes on");
            assert_eq!(text, "content");
        }
        let (_, text) = outcome(inside(&container, READ), SOON).expect("as before");
        assert_eq!(text, "content");
    }
}

#[test]
fn calls_fail_with_the_errno_that_was_asked_for() {
    let container = container("error", "/mnt/ext4/wt-error");
    for (errno, text) in [
        (libc::EIO, "Input/output error"),
        (libc::ENOSPC, "No space left on device"),
        (libc::EPERM, "Operation not permitted"),
    ] {
        let mut injector = Injector::applied(&container, Act::Io(act(IoMode::Error(errno))));
        let child = inside(&container, READ);
        let (_, said) = outcome_under(&mut injector, child, 2 * SOON).unwrap();
        assert!(said.contains(text), "{errno}: {said}");
        injector.kill();
        assert_eq!(
            outcome(inside(&container, READ), SOON).unwrap().1,
            "content"
        );
    }
}

#[test]
fn calls_are_late_by_what_was_asked_for_writes_too() {
    let container = container("late", "/mnt/ext4/wt-late");
    let delay = Duration::from_millis(300);
    let mode = IoMode::Latency {
        delay,
        jitter: Duration::ZERO,
    };
    let mut injector = Injector::applied(&container, Act::Io(act(mode)));
    let timed = |injector: &mut Injector, script: &str| {
        let start = Instant::now();
        let child = inside(&container, script);
        outcome_under(injector, child, 2 * SOON).expect("it ends");
        start.elapsed()
    };
    // The shell opens and writes: two calls. Reading is open, read, and read again to the end.
    let write = timed(&mut injector, "printf x > /mnt/wt-io/new");
    let read = timed(&mut injector, READ);
    assert!(write >= 2 * delay, "{write:?}");
    assert!(read >= 3 * delay, "{read:?}");
    injector.kill();
    assert_eq!(fs::read_to_string("/mnt/ext4/wt-late/new").unwrap(), "x");
}

/// Runs in a thread that sees the container's mounts, as a program in it would.
fn among<T: Send>(container: &Container, run: impl FnOnce() -> T + Send) -> T {
    unshare(CloneFlags::CLONE_FS).unwrap();
    let mounts = format!("/proc/{}/ns/mnt", container.init.id());
    setns(fs::File::open(mounts).unwrap(), CloneFlags::CLONE_NEWNS).unwrap();
    run()
}

#[test]
fn no_call_is_early_and_how_late_it_is_is_told() {
    let container = container("exact", "/mnt/ext4/wt-exact");
    let delay = Duration::from_millis(10);
    let mode = IoMode::Latency {
        delay,
        jitter: Duration::ZERO,
    };
    let mut injector = Injector::applied(&container, Act::Io(act(mode)));
    let open = || {
        let start = Instant::now();
        fs::File::open("/mnt/wt-io/file").unwrap();
        start.elapsed()
    };
    let opens = || (0..200).map(|_| open()).collect::<Vec<_>>();
    let mut took = thread::scope(|scope| {
        let caller = scope.spawn(|| among(&container, opens));
        while !caller.is_finished() {
            injector.hold(Duration::from_millis(50));
        }
        caller.join().unwrap()
    });
    took.sort_unstable();
    let within = took
        .iter()
        .filter(|t| **t < delay + Duration::from_millis(1));
    eprintln!(
        "200 opens that are to take 10 ms: {} within a millisecond, p50 {:?}, p99 {:?}, longest {:?}",
        within.count(),
        took[100],
        took[198],
        took[199],
    );
    assert!(took[0] >= delay, "{:?}", took[0]);
}

/// Reads and writes on a file; whether each failed.
fn read_and_write(mut file: fs::File, injector: &mut Injector) -> [bool; 2] {
    let calls = move || [file.read(&mut [0]).is_err(), file.write(b"x").is_err()];
    let called = thread::spawn(calls);
    while !called.is_finished() {
        injector.hold(Duration::from_millis(20));
    }
    called.join().unwrap()
}

#[test]
fn what_was_open_before_is_hit_or_said_not_to_be() {
    let tried = Command::new(env!("CARGO_BIN_EXE_windtunnel-agent"))
        .args(["try", "--cgroups", "/", "io.opened"])
        .stdout(Stdio::null())
        .status();
    let opened = tried.unwrap().success();
    let container = container("before", "/mnt/ext4/wt-before");
    let calls = IoAct {
        open: false,
        opened,
        ..act(IoMode::Error(libc::EPERM))
    };
    let open = || {
        let mut file = fs::File::options();
        let file = file.read(true).write(true).open("/mnt/wt-io/file");
        file.unwrap()
    };
    let open = || thread::scope(|s| s.spawn(|| among(&container, open)).join().unwrap());
    let before = open();
    let mut injector = Injector::start(Task::Container(container.entry(Act::Io(calls))));
    let Up::Applied { note, .. } = injector.first() else {
        panic!("it is not applied");
    };
    eprintln!("{note}");
    assert_eq!(note.contains("open before"), !opened, "{note}");
    let after = open();
    assert_eq!(read_and_write(before, &mut injector), [opened; 2]);
    assert_eq!(read_and_write(after, &mut injector), [true; 2]);
}

#[test]
fn a_pipe_without_a_writer_keeps_nobody_from_an_answer() {
    let container = container("io-pipe", "/tmp/wt-io-pipe");
    let pipe = Path::new("/tmp/wt-io-pipe/pipe");
    mkfifo(pipe, Mode::S_IRWXU).unwrap();
    let mode = IoMode::Latency {
        delay: Duration::from_millis(10),
        jitter: Duration::ZERO,
    };
    let mut injector = Injector::applied(&container, Act::Io(act(mode)));
    let mut reader = inside(&container, "cat /mnt/wt-io/pipe");
    injector.hold(Duration::from_secs(1));
    let mut other = inside(&container, "cat /mnt/wt-io/file");
    eventually("a call beside it is answered", || {
        injector.hold(Duration::from_millis(50));
        other.try_wait().unwrap().is_some()
    });
    assert!(reader.try_wait().unwrap().is_none(), "nobody has written");
    fs::write(pipe, "said").unwrap();
    let output = reader.wait_with_output().unwrap();
    assert_eq!(output.stdout, b"said");
    fs::remove_file(pipe).unwrap();
}

#[test]
fn half_of_the_calls_are_half_of_the_calls() {
    let container = container("half", "/tmp/wt-half");
    let half = IoAct {
        percent: 50.0,
        read: false,
        write: false,
        ..act(IoMode::Error(libc::EIO))
    };
    let mut injector = Injector::applied(&container, Act::Io(half));
    let script = "for i in 1 2 3 4 5 6 7 8 9 10; do cat /mnt/wt-io/file 2>&1; echo; done";
    let child = inside(&container, script);
    let (_, said) = outcome_under(&mut injector, child, 2 * SOON).unwrap();
    assert_eq!(said.matches("content").count(), 5, "{said}");
}

#[test]
// With two processors or more: with one, the injector always sees the end of the queue.
fn a_busy_volume_keeps_no_injector_from_its_heartbeats() {
    let container = container("busy", "/tmp/wt-busy");
    let fifth = IoAct {
        percent: 20.0,
        ..act(IoMode::Error(libc::EIO))
    };
    let mut injector = Injector::applied(&container, Act::Io(fifth));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let busy = || among(&container, || open_until(&is_over));
        let busy: Vec<_> = (0..16).map(|_| scope.spawn(busy)).collect();
        // Longer than its lease lasts without a heartbeat.
        let held = catch_unwind(AssertUnwindSafe(|| injector.hold(2 * LEASE)));
        is_over.store(true, Ordering::Relaxed);
        let lives = injector.process.try_wait().unwrap().is_none();
        injector.kill();
        for thread in busy {
            thread.join().unwrap();
        }
        assert!(held.is_ok() && lives);
    });
    let (asked, hit) = (
        injector.counts.effect["asked"],
        injector.counts.effect["hit"],
    );
    eprintln!(
        "{asked} calls, {hit} hit, silent for {:?}",
        injector.silence
    );
    assert!(injector.silence < SILENCE, "{:?}", injector.silence);
    assert!(hit.abs_diff(asked / 5) <= 1, "{hit} of {asked}");
    let (_, text) = outcome(inside(&container, READ), SOON).expect("it is over");
    assert_eq!(text, "content");
}

/// Opens a file of the container's volume again and again.
fn open_until(is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        // One in five fails.
        let _ = fs::File::open("/mnt/wt-io/file");
    }
}

#[test]
fn a_way_out_of_the_container_is_refused() {
    let container = container("escape", "/tmp/wt-escape");
    for (name, to) in [
        ("root", "/proc/1/root"),
        ("proc", "/proc"),
        ("up", "/../.."),
    ] {
        // It may be there from a container before.
        let _ = std::os::unix::fs::symlink(to, format!("/tmp/wt-escape/{name}"));
    }
    for volume in [
        "/mnt/wt-io/root",
        "/mnt/wt-io/proc",
        "/mnt/wt-io/up",
        "/mnt/wt-io/../..",
    ] {
        let way_out = IoAct {
            volume: volume.to_owned(),
            ..act(IoMode::Hang)
        };
        let mut injector = Injector::start(Task::Container(container.entry(Act::Io(way_out))));
        let said = injector.first();
        assert!(matches!(said, Up::Failed { .. }), "{volume}: {said:?}");
    }
}
