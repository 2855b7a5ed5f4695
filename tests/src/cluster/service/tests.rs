//! A service against a real program, `sleep`.

use super::*;
use crate::cluster::poll::until;

fn sleeper(name: &str, restarts: bool) -> Arc<Service> {
    Service::new(Spec {
        name: name.into(),
        argv: ["sleep", "1000"].map(Into::into).to_vec(),
        env: Vec::new(),
        log: "/dev/null".into(),
        restarts,
        processor: None,
    })
}

fn running(service: &Service, starts: u32) -> i32 {
    until("running", Duration::from_secs(5), || {
        let status = service.status();
        Ok(status.pid.filter(|_| status.starts == starts))
    })
    .unwrap()
}

#[test]
fn is_started_again_when_killed_but_not_when_stopped() {
    let service = sleeper("restarting", true);
    service.start();
    let first = running(&service, 1);
    service.act(Action::Kill).unwrap();
    assert_ne!(running(&service, 2), first);
    service.act(Action::Stop).unwrap();
    assert_eq!(service.status().pid, None);
    assert_eq!(service.status().starts, 2);
}

#[test]
fn a_paused_one_can_be_stopped() {
    let service = sleeper("paused", true);
    service.start();
    running(&service, 1);
    service.act(Action::Pause).unwrap();
    assert!(service.status().is_paused);
    service.act(Action::Stop).unwrap();
    assert_eq!(service.status().pid, None);
}

#[test]
fn one_that_does_not_restart_stays_ended() {
    let service = sleeper("once", false);
    service.start();
    running(&service, 1);
    service.kill_for_good().unwrap();
    assert_eq!(service.status().pid, None);
    service.start();
    running(&service, 2);
    service.kill_for_good().unwrap();
}
