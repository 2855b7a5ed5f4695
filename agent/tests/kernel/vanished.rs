//! Effects that somebody takes away while their injector lives: it says so, and is to be ended.

use windtunnel_agent::kernel::cgroup;
use windtunnel_agent::model::{Act, IoMode};
use windtunnel_agent::wire::Up;

use crate::injector::{Container, Injector};
use crate::io;

/// What it says of an effect that is not there any more.
fn vanished(injector: &mut Injector) -> String {
    match injector.first() {
        Up::Vanished { message } => message,
        said => panic!("{said:?}"),
    }
}

#[test]
fn a_burner_that_somebody_stops_is_no_effect() {
    let container = Container::new("stopped", &[]);
    let mut injector = Injector::applied(&container, Act::Cpu { millicores: 100 });
    let init = i32::try_from(container.init.id()).unwrap();
    let burners = cgroup::pids(&container.cgroup).unwrap();
    for burner in burners.into_iter().filter(|pid| *pid != init) {
        let burner = nix::unistd::Pid::from_raw(burner);
        nix::sys::signal::kill(burner, nix::sys::signal::Signal::SIGSTOP).unwrap();
    }
    let message = vanished(&mut injector);
    assert!(message == "the burner is stopped", "{message}");
}

#[test]
fn a_volume_that_somebody_takes_away_or_hides_is_no_effect() {
    for script in ["umount --lazy /mnt/wt-io", "mount -t tmpfs none /mnt/wt-io"] {
        let container = io::container("unmounted", "/dev/shm/wt-unmounted");
        let act = Act::Io(io::act(IoMode::Hang));
        let mut injector = Injector::applied(&container, act);
        let done = io::inside(&container, script).wait_with_output().unwrap();
        assert!(done.status.success(), "{done:?}");
        let message = vanished(&mut injector);
        assert!(message.starts_with("/mnt/wt-io is not"), "{message}");
    }
}
