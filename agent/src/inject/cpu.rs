//! A CPU fault: a burner in the container's control group.

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::unistd::{SysconfVar, sysconf};
use windtunnel_crds::stress::CpuFault;
use windtunnel_runtime::chain;

use super::Effect;
use crate::{
    kernel::{
        cgroup::{self, Hierarchies},
        child::{Child, enter_cgroup_namespace},
        proc::Proc,
    },
    model::{Act, ContainerEntry, Counts},
    prepare::Refusal,
    targets::Container,
};

/// The controller of the control group that it burns in.
pub(super) const CONTROLLER: &str = "cpu";
/// How many checks in a row a burner may say nothing at: each is a second after the last, and so is
/// what it says. One that is stopped says nothing any more, and burns nothing.
const SILENT: u32 = 10;
/// How long a trial may take.
const TRIAL: Duration = Duration::from_secs(5);

/// How much is to be burnt: a share of the limit, or of the cores that are given in its place.
pub(super) fn plan(fault: &CpuFault, found: &Container) -> Result<Act, Refusal> {
    let CpuFault { load, cores } = fault;
    let base = match cores {
        Some(cores) => Some(cores.millis()),
        None => cgroup::cpu_limit(&found.cgroup).map_err(|e| ("NodeUnreadable", chain(&e)))?,
    };
    let base = base.ok_or_else(|| {
        let message = "the container has no CPU limit: say of how many cores, with cpu.cores";
        ("NoCpuLimit", message.to_owned())
    })?;
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of some thousand cores"
    )]
    let millicores = (base as f64 * load.get() / 100.0).round() as u64;
    let millicores = millicores.max(1);
    let all = cores_of_node()? * 1000;
    if millicores > all {
        let message =
            format!("{millicores} thousandths of a core are to be burnt, and this node has {all}");
        return Err(("NodeCpu", message));
    }
    Ok(Act::Cpu { millicores })
}

/// How many CPUs the node has.
fn cores_of_node() -> Result<u64, Refusal> {
    let found =
        sysconf(SysconfVar::_NPROCESSORS_ONLN).map_err(|e| ("NodeUnreadable", chain(&e)))?;
    Ok(found.and_then(|n| u64::try_from(n).ok()).unwrap_or(1))
}

/// A burner at work.
struct Burn {
    child: Child,
    group: PathBuf,
    millicores: u64,
    milliseconds: u64,
    /// Checks since it said anything.
    silent: u32,
}

pub(super) fn apply(
    container: &ContainerEntry,
    millicores: u64,
) -> Result<Box<dyn Effect>, String> {
    Ok(Box::new(Burn::start(&container.cgroup, millicores)?))
}

impl Burn {
    fn start(group: &Path, millicores: u64) -> Result<Self, String> {
        let arguments = ["burn".to_owned(), millicores.to_string()];
        Ok(Self {
            child: Child::start(group, &arguments).map_err(|e| chain(&e))?,
            group: group.to_owned(),
            millicores: 0,
            milliseconds: 0,
            silent: 0,
        })
    }

    /// Reads what the burner has measured; whether it is where it should be.
    fn read(&mut self) -> Result<bool, String> {
        for line in self.child.lines().map_err(|e| chain(&e))? {
            let mut numbers = line.split(' ').filter_map(|n| n.parse().ok());
            if let (Some(millicores), Some(milliseconds)) = (numbers.next(), numbers.next()) {
                (self.millicores, self.milliseconds) = (millicores, milliseconds);
                self.silent = 0;
            }
        }
        if let Some(status) = self.child.ended() {
            return Err(format!("the burner has ended: {status}"));
        }
        let pids = cgroup::pids(&self.group).map_err(|e| chain(&e))?;
        Ok(pids.contains(&self.child.pid()))
    }
}

impl Effect for Burn {
    fn proof(&mut self) -> Result<Option<String>, String> {
        let is_there = self.read()?;
        Ok((is_there && self.milliseconds > 0).then(|| {
            format!(
                "process {} has used {} ms of CPU time in {}",
                self.child.pid(),
                self.milliseconds,
                self.group.display()
            )
        }))
    }

    fn check(&mut self) -> Result<Counts, String> {
        // Before it shows it need not be there yet.
        if !self.read()? && self.milliseconds > 0 {
            return Err("the burner is not in the container's control group".to_owned());
        }
        // Until it has said anything, it is the proof that is waited for, and looked for more often.
        self.silent += u32::from(self.milliseconds > 0);
        // One that is given no CPU is late; the effect is what it can be.
        if self.silent > SILENT && Proc::default().is_stopped(self.child.pid()) {
            return Err("the burner is stopped".to_owned());
        }
        Ok(Counts::measured([
            ("millicores", self.millicores),
            ("cpuMilliseconds", self.milliseconds),
        ]))
    }
}

/// Burns for a moment in the control group that this process is in.
pub(super) fn trial(cgroups: &Path) -> Result<(), String> {
    let own = own_group(cgroups, CONTROLLER)?;
    until_proved(&mut Burn::start(&own, 100)?)
}

/// The control group that this process is in, in the hierarchy of a controller.
pub(super) fn own_group(cgroups: &Path, controller: &str) -> Result<PathBuf, String> {
    let hierarchies = Hierarchies::detect(cgroups).map_err(|e| chain(&e))?;
    let root = hierarchies
        .controller(controller)
        .ok_or("there is no such controller")?;
    enter_cgroup_namespace().map_err(|e| chain(&e))?;
    let text = fs::read_to_string("/proc/self/cgroup").map_err(|e| e.to_string())?;
    let own = text
        .lines()
        .filter_map(|line| line.split_once(':')?.1.split_once(':'))
        .find(|(controllers, _)| {
            controllers.is_empty() || controllers.split(',').any(|c| c == controller)
        })
        .map(|(_, path)| root.join(path.trim_start_matches('/')));
    own.ok_or_else(|| "this process is in no control group".to_owned())
}

/// Waits until an effect shows.
pub(super) fn until_proved(effect: &mut dyn Effect) -> Result<(), String> {
    let until = Instant::now() + TRIAL;
    while Instant::now() < until {
        if effect.proof()?.is_some() {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
    Err("the effect does not show".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::proc::ProcessId;

    fn planned(limit: &str, fault: serde_json::Value) -> Result<Act, Refusal> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cpu.max"), limit).unwrap();
        let found = Container {
            cgroup: dir.path().to_owned(),
            init: ProcessId {
                pid: 1,
                start_time: 1,
            },
        };
        plan(&serde_json::from_value(fault).unwrap(), &found)
    }

    #[test]
    fn a_load_is_a_share_of_the_limit_or_of_the_given_cores() {
        use serde_json::json;
        let limited = "50000 100000";
        let millicores = |act: Result<Act, Refusal>| -> Result<u64, Refusal> {
            let Act::Cpu { millicores } = act? else {
                panic!("another act")
            };
            Ok(millicores)
        };
        assert_eq!(millicores(planned(limited, json!({"load": 60}))), Ok(300));
        assert_eq!(millicores(planned(limited, json!({"load": 0.01}))), Ok(1));
        let cores = json!({"load": 50, "cores": 2});
        assert_eq!(millicores(planned(limited, cores.clone())), Ok(1000));
        assert_eq!(millicores(planned("max 100000", cores)), Ok(1000));
        let refused = planned("max 100000", json!({"load": 60})).unwrap_err();
        assert_eq!(refused.0, "NoCpuLimit");
        let all = json!({"load": 100, "cores": cores_of_node().unwrap()});
        assert!(planned(limited, all).is_ok());
        let more = json!({"load": 100, "cores": cores_of_node().unwrap() + 1});
        assert_eq!(planned(limited, more).unwrap_err().0, "NodeCpu");
    }
}
