//! Passes over runs that cannot begin, against an API server in memory.

use windtunnel_crds::status::Phase;

use super::tests::{Bench, conditions, is_as_it_should_be, play};
use crate::mock::Refusal;

/// A selection that the API server does not take ends the run with its words; one that it cannot
/// make now is made later, and told meanwhile.
#[tokio::test]
async fn targets_that_are_not_listed_do_not_leave_the_run_hanging_in_silence() {
    for (code, at_once, later) in [
        (400, Phase::Failed, Phase::Failed),
        (403, Phase::Pending, Phase::Failed),
        (500, Phase::Pending, Phase::Pending),
    ] {
        let mut bench = Bench::new();
        bench.server.refuse(Refusal::always("GET pods", code));
        for (seconds, phase) in [(0, at_once), (10, later)] {
            bench.advance(seconds);
            for _ in 0..4 {
                let _ = bench.pass().await;
            }
            assert_eq!(bench.phase(), phase, "{code}: {:#?}", bench.status());
        }
        let status = bench.status();
        let words = "cannot select the targets: cannot read the pods of fault slow";
        assert!(status.message.starts_with(words), "{}", status.message);
        assert!(status.message.contains("refused: "), "{}", status.message);
        assert_eq!(conditions(&status)[0].0, "False");
        assert!(bench.injections().is_empty());
        bench.server.refuse(None);
        play(&mut bench).await;
        if code == 500 {
            is_as_it_should_be(&bench, "listed at last");
        } else {
            assert_eq!(bench.phase(), Phase::Failed);
        }
    }
}
