//! Faults of one injection that cannot act together, in a run and where a run is only asked about.

use crate::agent::Agent;

#[test]
fn what_cannot_act_together_is_refused_in_a_dry_run_as_well() {
    let pause = r#"{"containerPause": {}}"#;
    let reset = r#"{"network": {"impairment": {"reset": {}}, "direction": "Both"}}"#;
    for (name, fault) in [("pause", pause), ("reset", reset)] {
        for dry_run in [true, false] {
            let mut agent = Agent::new(&format!("{name}-{dry_run}"), &[fault, fault]);
            agent.injection.spec.dry_run = dry_run;
            agent.begin();
            let told = agent.until("a verdict", |told| !told["phase"].is_null());
            assert_eq!(told["phase"], "Refused", "{name}: {told}");
            assert_eq!(told["refused"], "Conflict", "{name}: {told}");
            let message = told["message"].as_str().unwrap();
            assert!(message.contains("fault fault-0 of"), "{name}: {message}");
            assert!(agent.journal.entries().is_empty(), "nothing of it stays");
        }
    }
    for dry_run in [true, false] {
        let mut agent = Agent::new(&format!("both-{dry_run}"), &[pause, reset]);
        agent.injection.spec.dry_run = dry_run;
        agent.begin();
        let told = agent.until("a verdict", |told| !told["phase"].is_null());
        assert_eq!(told["phase"], "Prepared", "{told}");
    }
}
