//! A memory fault: a hog in the container's control group.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use windtunnel_crds::stress::MemoryFault;
use windtunnel_runtime::chain;

use super::Effect;
use crate::{
    hog::CHUNK,
    kernel::{
        cgroup::{self, memory},
        child::Child,
        proc::Proc,
    },
    model::{Act, ContainerEntry, Counts, MemoryAct},
    prepare::Refusal,
    targets::Container,
};

/// The controller of the control group that it holds memory in.
pub(super) const CONTROLLER: &str = "memory";
/// The least that is left free of a limit.
const HEADROOM: u64 = 16 << 20;
/// After which time a hog that the kernel killed is started again.
const AGAIN: Duration = Duration::from_secs(1);

/// How much is to be held, and how much may be used with it.
pub(super) fn plan(fault: &MemoryFault, found: &Container) -> Result<Act, Refusal> {
    let MemoryFault {
        size,
        percent,
        ramp,
        oom_kill,
    } = fault;
    let unreadable = |e: cgroup::CgroupError| ("NodeUnreadable", chain(&e));
    let limit = memory::limit(&found.cgroup).map_err(unreadable)?;
    let bytes = match (size, percent, limit) {
        (Some(size), _, _) => size.bytes(),
        (None, Some(percent), Some(limit)) => share(limit, percent.get()),
        (None, ..) => {
            let message = "the container has no memory limit: say how much, with memory.size";
            return Err(("NoMemoryLimit", message.to_owned()));
        }
    };
    let most = limit.filter(|_| !oom_kill).map(below);
    let used = memory::usage(&found.cgroup).map_err(unreadable)?;
    if most.is_some_and(|most| used + 2 * CHUNK > most) {
        return Err((
            "NoHeadroom",
            format!(
                "the container uses {used} bytes: next to nothing can be held beside that below its limit; oomKill: true lets the kernel kill"
            ),
        ));
    }
    let taken = bytes.min(limit.map_or(u64::MAX, |limit| limit.saturating_sub(used)));
    let spare = spare_the_node(taken)?;
    Ok(Act::Memory(MemoryAct {
        bytes,
        ramp: ramp.unwrap_or_default().get(),
        most,
        spare,
        is_limited: limit.is_some(),
    }))
}

/// How much may be used of a limit without the kernel being brought to kill.
pub(super) fn below(limit: u64) -> u64 {
    limit.saturating_sub(HEADROOM.max(limit / 20))
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of what fits into memory"
)]
pub(super) fn share(limit: u64, percent: f64) -> u64 {
    (limit as f64 * percent / 100.0) as u64
}

/// A tenth of the node's memory stays available: how much that is.
pub(super) fn spare_the_node(bytes: u64) -> Result<u64, Refusal> {
    let proc = Proc::default();
    let (total, available) = proc.memory().map_err(|e| ("NodeUnreadable", chain(&e)))?;
    let spare = total / 10;
    if bytes > available.saturating_sub(spare) {
        return Err((
            "NodeMemory",
            format!(
                "{available} bytes of this node's {total} are available; a tenth of them all must stay so"
            ),
        ));
    }
    Ok(spare)
}

/// A hog at work.
struct Hold {
    child: Option<Child>,
    group: PathBuf,
    act: MemoryAct,
    taken: u64,
    bytes: u64,
    kills_before: u64,
    kills: u64,
    /// As there were when the hog at work was started.
    kills_at_start: u64,
    again: Instant,
    is_there: bool,
}

pub(super) fn apply(container: &ContainerEntry, act: MemoryAct) -> Result<Box<dyn Effect>, String> {
    Ok(Box::new(Hold::start(&container.cgroup, act)?))
}

impl Hold {
    fn start(group: &Path, act: MemoryAct) -> Result<Self, String> {
        Ok(Self {
            child: Some(hog(group, act)?),
            group: group.to_owned(),
            act,
            taken: 0,
            bytes: 0,
            kills_before: memory::oom_kills(group),
            kills: 0,
            kills_at_start: 0,
            again: Instant::now(),
            is_there: false,
        })
    }

    /// How often the kernel has killed since the start.
    fn count(&mut self) {
        let kills = memory::oom_kills(&self.group).saturating_sub(self.kills_before);
        // A control group that is gone says nothing.
        self.kills = self.kills.max(kills);
    }

    /// Reads what the hog has reported, and starts another where the kernel was brought to kill.
    fn read(&mut self) -> Result<(), String> {
        self.count();
        let Some(child) = &mut self.child else {
            if Instant::now() >= self.again {
                self.child = Some(hog(&self.group, self.act)?);
                self.kills_at_start = self.kills;
            }
            return Ok(());
        };
        for line in child.lines().map_err(|e| chain(&e))? {
            self.taken = line.trim().parse().unwrap_or(self.taken);
        }
        if let Some(status) = child.ended() {
            (self.child, self.taken, self.bytes) = (None, 0, 0);
            // The kernel counts before it kills.
            self.count();
            self.again = Instant::now() + AGAIN;
            return if self.kills > self.kills_at_start {
                Ok(())
            } else {
                Err(format!("what held the memory has ended: {status}"))
            };
        }
        let pids = cgroup::pids(&self.group).map_err(|e| chain(&e))?;
        self.is_there = pids.contains(&child.pid());
        // What has been taken and is still in memory, by the kernel's own account.
        let resident = Proc::default().anonymous(child.pid());
        self.bytes = self.taken.min(resident.unwrap_or_default());
        Ok(())
    }
}

fn hog(group: &Path, act: MemoryAct) -> Result<Child, String> {
    let MemoryAct {
        bytes,
        ramp,
        most,
        spare,
        is_limited: _,
    } = act;
    let mut arguments = vec![
        "hog".to_owned(),
        format!("--bytes={bytes}"),
        format!("--ramp-millis={}", ramp.as_millis()),
        format!("--spare={spare}"),
    ];
    if let Some(most) = most {
        arguments.push(format!("--group={}", group.display()));
        arguments.push(format!("--most={most}"));
    }
    Child::start(group, &arguments).map_err(|e| chain(&e))
}

impl Effect for Hold {
    fn proof(&mut self) -> Result<Option<String>, String> {
        self.read()?;
        let is_held = self.is_there && self.bytes > 0;
        Ok((is_held || self.kills > 0).then(|| {
            format!(
                "{} bytes are held in {}, {} kills",
                self.bytes,
                self.group.display(),
                self.kills
            )
        }))
    }

    fn note(&self) -> String {
        match self.act.most {
            None if !self.act.is_limited => "the container has no limit".to_owned(),
            None if memory::dies_as_one(&self.group) => {
                "at its limit the whole container is killed (memory.oom.group)".to_owned()
            }
            None => "at its limit what holds the memory is killed first".to_owned(),
            Some(most) => format!("held as far as no more than {most} bytes are used in all"),
        }
    }

    fn check(&mut self) -> Result<Counts, String> {
        let was_there = self.is_there;
        self.read()?;
        let strayed = was_there && !self.is_there;
        // One that is being killed is in no group any more; its end is read when it is over.
        let is_at_work = |child: &Child| !Proc::default().is_exiting(child.pid());
        if strayed && self.child.as_ref().is_some_and(is_at_work) {
            return Err("what holds the memory is not in the container's control group".to_owned());
        }
        Ok(Counts::measured([
            ("bytes", self.bytes),
            ("oomKills", self.kills),
        ]))
    }
}

/// Holds something in the control group that this process is in.
pub(super) fn trial(cgroups: &Path) -> Result<(), String> {
    let own = super::cpu::own_group(cgroups, CONTROLLER)?;
    let act = MemoryAct {
        bytes: CHUNK,
        ramp: Duration::ZERO,
        most: None,
        spare: 0,
        is_limited: false,
    };
    let mut hold = Hold::start(&own, act)?;
    super::cpu::until_proved(&mut hold)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::kernel::proc::ProcessId;

    fn planned(limit: &str, used: u64, fault: serde_json::Value) -> Result<MemoryAct, Refusal> {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("memory.max", limit);
        write("memory.current", &used.to_string());
        write("memory.stat", "inactive_file 0\n");
        let found = Container {
            cgroup: dir.path().to_owned(),
            init: ProcessId {
                pid: 1,
                start_time: 1,
            },
        };
        let act = plan(&serde_json::from_value(fault).unwrap(), &found)?;
        let Act::Memory(act) = act else {
            panic!("another act")
        };
        Ok(act)
    }

    #[test]
    fn headroom_is_left_unless_a_kill_is_asked_for() {
        let limit = (64u64 << 20).to_string();
        let half = planned(&limit, 1 << 20, json!({"percent": 50})).unwrap();
        assert_eq!((half.bytes, half.most), (32 << 20, Some(48 << 20)));
        let all = planned(&limit, 1 << 20, json!({"percent": 100, "oomKill": true})).unwrap();
        assert_eq!((all.bytes, all.most), (64 << 20, None));
        let free = planned("max", 1 << 20, json!({"size": "8Mi", "ramp": "2s"})).unwrap();
        assert_eq!((free.most, free.ramp), (None, Duration::from_secs(2)));
    }

    #[test]
    fn what_cannot_be_held_is_refused() {
        let limit = (64u64 << 20).to_string();
        for (limit, used, fault, reason) in [
            ("max", 0, json!({"percent": 50}), "NoMemoryLimit"),
            (
                limit.as_str(),
                48 << 20,
                json!({"size": "8Mi"}),
                "NoHeadroom",
            ),
            ("max", 0, json!({"size": "1000Ti"}), "NodeMemory"),
        ] {
            assert_eq!(planned(limit, used, fault).unwrap_err().0, reason);
        }
    }
}
