//! A pause: every thread of the container is held by this process.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use windtunnel_runtime::chain;

use super::Effect;
use crate::{
    kernel::{cgroup, child, proc::Proc, trace::Stopped},
    model::{ContainerEntry, Counts},
};

/// Any hierarchy will do: all processes are in it.
pub(super) const CONTROLLER: &str = "pids";
/// How often threads that are new, or gone, are looked for.
const LOOK: Duration = Duration::from_millis(100);
/// How many times in a row.
const PASSES: usize = 100;
/// How long a trial may take.
const TRIAL: Duration = Duration::from_secs(5);

/// A container that stands still.
struct Pause {
    proc: Proc,
    group: PathBuf,
    stopped: Stopped,
    looked: Instant,
}

pub(super) fn apply(container: &ContainerEntry) -> Result<Box<dyn Effect>, String> {
    let mut pause = Pause {
        proc: Proc::default(),
        group: container.cgroup.clone(),
        stopped: Stopped::default(),
        looked: Instant::now(),
    };
    pause.stop()?;
    Ok(Box::new(pause))
}

impl Pause {
    /// Stops whatever runs, until nothing new is found: a thread may start another before it stops.
    fn stop(&mut self) -> Result<(), String> {
        self.looked = Instant::now();
        for _ in 0..PASSES {
            let mut fresh = 0;
            for pid in cgroup::pids(&self.group).map_err(|e| chain(&e))? {
                // What another fault burns here is no part of the container.
                if !child::is_one(&self.proc, pid) {
                    let held = self.stopped.hold(&self.proc, pid);
                    fresh += held.map_err(|e| chain(&e))?;
                }
            }
            self.stopped.settle().map_err(|e| chain(&e))?;
            if fresh == 0 {
                break;
            }
        }
        Ok(())
    }
}

impl Effect for Pause {
    fn proof(&mut self) -> Result<Option<String>, String> {
        self.stop()?;
        let (threads, all) = self.stopped.count();
        Ok((threads > 0 && all).then(|| format!("{threads} threads stand still")))
    }

    fn due(&self) -> Option<Instant> {
        Some(self.looked + LOOK)
    }

    fn work(&mut self) -> Result<(), String> {
        if self.looked.elapsed() >= LOOK {
            self.stop()?;
        }
        Ok(())
    }

    fn check(&mut self) -> Result<Counts, String> {
        let (threads, _) = self.stopped.count();
        let threads = u64::try_from(threads).unwrap_or(u64::MAX);
        Ok(Counts::measured([("threads", threads)]))
    }
}

/// Stops another process of this program.
pub(super) fn trial() -> Result<(), String> {
    let mut idle = Command::new("/proc/self/exe")
        .args(["try", "--cgroups", "/", "idle"])
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|e| e.to_string())?;
    let result = stop_one(i32::try_from(idle.id()).unwrap_or_default());
    // It ends by itself as well.
    let _ = idle.kill();
    result
}

fn stop_one(pid: i32) -> Result<(), String> {
    let mut stopped = Stopped::default();
    let until = Instant::now() + TRIAL;
    while Instant::now() < until {
        stopped.hold(&Proc::default(), pid).map_err(|e| chain(&e))?;
        stopped.settle().map_err(|e| chain(&e))?;
        if matches!(stopped.count(), (1.., true)) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(1));
    }
    Err("a process did not stop".to_owned())
}

/// Does nothing for as long as a trial may take.
pub(super) fn idle() {
    thread::sleep(TRIAL);
}
