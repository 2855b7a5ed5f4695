//! What cannot be written down is not begun; what is in place ends all the same.

use serde_json::Value;

use crate::agent::{Agent, Closed};
use crate::support::eventually;

/// An agent that knows of a pause of its pod.
fn agent(name: &str, how: Closed) -> Agent {
    Agent::new(&format!("{name}-{how:?}"), &[r#"{"containerPause": {}}"#])
}

fn is_held_up(told: &Value, how: Closed) -> bool {
    let message = told["message"].as_str().unwrap_or_default();
    told["reason"] == "JournalUnwritable" && message.contains(how.says())
}

fn goes_on_once_it_can_be_written(how: Closed) {
    let mut agent = agent("goes-on", how);
    agent.begin();
    agent.until("prepared", |told| told["phase"] == "Prepared");
    agent.journal.close(how);
    agent.start();
    let told = agent.until("why nothing begins", |told| is_held_up(told, how));
    assert_eq!(told["state"], "Prepared");
    assert_eq!((agent.starts(), agent.pod.stands_still()), (0, false));
    agent.journal.open(how);
    agent.until("injected", |told| told["state"] == "Injected");
    assert_eq!((agent.starts(), agent.pod.stands_still()), (1, true));
    // What is in place ends, and is told to, whatever becomes of the journal; that catches up.
    agent.journal.close(how);
    agent.abort();
    let told = agent.until("recovered", |told| told["checked"] == true);
    assert_eq!(told["state"], "Recovered");
    assert!(!agent.pod.stands_still());
    let has_ended = || agent.journal.entries()[0]["state"].get("Ended").is_some();
    assert!(!has_ended(), "it could be written");
    agent.journal.open(how);
    eventually("the journal has caught up", has_ended);
}

fn fails_if_it_cannot_be_written_for_long(how: Closed) {
    let mut agent = agent("fails", how);
    agent.begin();
    agent.until("prepared", |told| told["phase"] == "Prepared");
    agent.journal.close(how);
    agent.start();
    let told = agent.until("its end", |told| told["checked"] == true);
    assert_eq!(told["state"], "Failed");
    assert!(is_held_up(&told, how), "{told}");
    assert_eq!((agent.starts(), agent.pod.stands_still()), (0, false));
}

fn refuses_what_it_cannot_write_down(how: Closed) {
    let mut agent = agent("refuses", how);
    agent.journal.close(how);
    agent.begin();
    let told = agent.until("refused", |told| told["phase"] == "Refused");
    assert_eq!(told["refused"], "JournalUnwritable");
    assert!(is_held_up(&told, how), "{told}");
    assert!(agent.journal.entries().is_empty());
}

#[test]
fn a_journal_without_space_holds_up_what_is_not_in_it_and_nothing_else() {
    goes_on_once_it_can_be_written(Closed::Full);
    fails_if_it_cannot_be_written_for_long(Closed::Full);
    refuses_what_it_cannot_write_down(Closed::Full);
}

#[test]
fn a_read_only_journal_holds_up_what_is_not_in_it_and_nothing_else() {
    goes_on_once_it_can_be_written(Closed::ReadOnly);
    fails_if_it_cannot_be_written_for_long(Closed::ReadOnly);
    refuses_what_it_cannot_write_down(Closed::ReadOnly);
}
