//! Tests of who answers, and who is not waited for.

use super::*;
use crate::{testing, wire::LEASE};

#[test]
fn name_servers_are_read_as_resolvers_read_them() {
    let text = "# comment\nsearch a.svc\nnameserver 10.90.0.10\nnameserver fe80::1%eth0\nnameserver\nnameserver x\noptions ndots:5\n";
    let expected: [IpAddr; 2] = ["10.90.0.10".parse().unwrap(), "fe80::1".parse().unwrap()];
    assert_eq!(parse_resolv_conf(text), expected);
}

/// What is seen by a program that does something else.
fn seen(script: &str) -> Result<Vec<IpAddr>, Refusal> {
    let directory = tempfile::tempdir().unwrap();
    let script = format!("[ $1 != inject ] || exec sleep 600\n{script}");
    let program = testing::program(directory.path(), &script);
    let mut supervisor = Supervisor::new(program);
    let (key, begun) = (testing::key("a"), boottime().unwrap());
    let injector = supervisor.start(key.clone(), testing::order(), begun);
    let seen = at_name_servers(&mut supervisor, &Proc::default(), &[]);
    // Whoever is looked for, the injectors hear of their agent.
    let silence = supervisor.live()[&key].longest_silence;
    assert!(silence < LEASE, "{silence:?}");
    let is_vain = matches!(seen, Err((UNRESPONSIVE, _)));
    assert_eq!(supervisor.looks().was_in_vain(), is_vain);
    supervisor.looks().reap();
    assert!(supervisor.looks().unreaped.is_empty());
    injector.and_then(|_| supervisor.discard(&key)).unwrap();
    seen
}

#[test]
fn what_does_not_answer_is_not_waited_for() {
    let begun = Instant::now();
    let (reason, message) = seen("exec sleep 600").unwrap_err();
    assert_eq!(reason, UNRESPONSIVE);
    assert!(message.starts_with("/etc/resolv.conf"), "{message}");
    assert!(begun.elapsed() < PATIENCE * 5);
    for silent in ["exit 1", "read question", "read question; echo '['"] {
        assert_eq!(seen(silent).unwrap_err().0, "NodeUnreadable", "{silent}");
    }
    let answer = "while read question; do echo '[\"10.0.0.1\"]'; done";
    assert_eq!(seen(answer).unwrap().len(), 1);
}

#[test]
fn what_does_not_wait_puts_a_look_off() {
    let directory = tempfile::tempdir().unwrap();
    let program = testing::program(directory.path(), "exec sleep 600");
    let mut supervisor = Supervisor::new(program);
    let urgent = Arc::new(AtomicBool::new(true));
    supervisor.looks().heed(Arc::clone(&urgent));
    let begun = Instant::now();
    let mut look = || at_name_servers(&mut supervisor, &Proc::default(), &[]);
    assert_eq!(look().unwrap_err().0, PUT_OFF);
    assert!(begun.elapsed() < PATIENCE);
    urgent.store(false, Ordering::Relaxed);
    assert_eq!(look().unwrap_err().0, UNRESPONSIVE);
}

/// Somebody may end the process at any time.
#[test]
fn where_one_dies_another_is_asked() {
    let directory = tempfile::tempdir().unwrap();
    let died = directory.path().join("died");
    let script = format!(
        "read question; [ -e {died} ] || {{ echo > {died}; exit 1; }}; echo '[]'; read question",
        died = died.display()
    );
    let program = testing::program(directory.path(), &script);
    let mut supervisor = Supervisor::new(program);
    let seen = at_name_servers(&mut supervisor, &Proc::default(), &[]);
    assert_eq!(seen.unwrap().len(), 0);
}

/// A question is written in one go: whoever does not read it holds nobody up.
#[test]
fn a_question_is_shorter_than_a_pipe_holds() {
    let directory = tempfile::tempdir().unwrap();
    let program = testing::program(directory.path(), "exec sleep 600");
    let mut supervisor = Supervisor::new(program);
    let begun = Instant::now();
    let pids = vec![i32::MAX; 100_000];
    let seen = at_name_servers(&mut supervisor, &Proc::default(), &pids);
    assert_eq!(seen.unwrap_err().0, UNRESPONSIVE);
    assert!(begun.elapsed() < PATIENCE * 5);
}

/// Answers that come in time, but late: aborts wait for the pass.
#[test]
fn looks_together_take_no_longer_than_a_pass_may() {
    let directory = tempfile::tempdir().unwrap();
    let slow = "while read question; do sleep 1; echo \"[]\"; done";
    let program = testing::program(directory.path(), slow);
    let mut supervisor = Supervisor::new(program);
    let begun = Instant::now();
    let mut look = || at_name_servers(&mut supervisor, &Proc::default(), &[]);
    let answered = std::iter::from_fn(|| look().ok()).take(20).count();
    assert!((1..=8).contains(&answered), "{answered}");
    assert!(begun.elapsed() < BUDGET + PATIENCE * 2);
    assert!(supervisor.looks().was_in_vain());
    supervisor.looks().begin();
    assert!(at_name_servers(&mut supervisor, &Proc::default(), &[]).is_ok());
}

/// One process answers all; where somebody ends it, another does.
#[test]
fn one_process_looks_while_it_answers() {
    let directory = tempfile::tempdir().unwrap();
    let answer = "while read question; do echo \"[\\\"10.0.0.1\\\"]\"; done";
    let program = testing::program(directory.path(), answer);
    let mut supervisor = Supervisor::new(program.clone());
    supervisor.looks().open(&program).unwrap();
    let mut look = || {
        let seen = at_name_servers(&mut supervisor, &Proc::default(), &[]);
        assert_eq!(seen.unwrap().len(), 1);
        let looker = supervisor.looks().idle.as_mut().unwrap();
        assert!(matches!(looker.child.try_wait(), Ok(None)));
        looker.child.id()
    };
    let first = look();
    assert_eq!(look(), first);
    let pid = nix::unistd::Pid::from_raw(i32::try_from(first).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    // Until it is dead, there is nobody else's answer.
    nix::sys::wait::waitid(
        nix::sys::wait::Id::Pid(pid),
        nix::sys::wait::WaitPidFlag::WEXITED | nix::sys::wait::WaitPidFlag::WNOWAIT,
    )
    .unwrap();
    assert_ne!(look(), first);
}
