//! Passes over runs that cannot begin, against an API server in memory.

use std::{sync::Arc, time::Duration};

use futures::FutureExt as _;
use tokio::time::{sleep, timeout};
use windtunnel_crds::{ChaosExperiment, ChaosExperimentStatus, network::Spare, status::Phase};

use super::{
    pass,
    tests::{Bench, EXPERIMENT, conditions, is_as_it_should_be, play},
};
use crate::{
    hosts::{Hosts, Times},
    mock::Refusal,
};

/// Longer than whatever needs no answer takes, and shorter than forty waits one after the other.
const AT_ONCE: Duration = Duration::from_secs(10);

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
        let words = "cannot begin: cannot read the pods of fault slow";
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

/// The run does not speak of targets where it is something else that is refused.
#[tokio::test]
async fn what_is_refused_is_told() {
    for (request, what) in [
        ("GET services", "the cluster's DNS Service"),
        ("GET endpointslices", "the endpoints of the cluster's DNS"),
    ] {
        let mut bench = Bench::new();
        let mut experiment = bench.experiment();
        let network = experiment.spec.faults[0].network.as_mut().unwrap();
        network.spare = vec![Spare::ClusterDNS];
        bench.server.put(EXPERIMENT, &experiment);
        bench.server.refuse(Refusal::always(request, 400));
        for _ in 0..4 {
            let _ = bench.pass().await;
        }
        let message = bench.status().message;
        let words = format!("cannot begin: cannot read {what}: ");
        assert!(message.starts_with(&words), "{message}");
        assert_eq!(bench.phase(), Phase::Failed);
    }
}

/// Rights may come into force after the API server is back: its outage is no part of that time.
#[tokio::test]
async fn being_refused_after_an_outage_is_no_lasting_refusal() {
    let mut bench = Bench::new();
    for (seconds, code, phase) in [
        (0, 500, Phase::Pending),
        (20, 500, Phase::Pending),
        (1, 403, Phase::Pending),
        (9, 403, Phase::Pending),
        (1, 403, Phase::Failed),
    ] {
        bench.advance(seconds);
        bench.server.refuse(Refusal::always("GET pods", code));
        for _ in 0..4 {
            let _ = bench.pass().await;
        }
        assert_eq!(bench.phase(), phase, "{code}: {:#?}", bench.status());
    }
    // One that is over by the next pass keeps nothing from beginning.
    let mut bench = Bench::new();
    bench.server.refuse(Refusal::always("GET pods", 403));
    for _ in 0..4 {
        let _ = bench.pass().await;
    }
    bench.server.refuse(None);
    bench.pass().await.unwrap();
    assert_eq!(bench.phase(), Phase::Preparing);
}

/// A run whose peer is a host, beside the bench's.
fn with_host(bench: &Bench, number: usize) -> (String, ChaosExperiment) {
    let name = format!("waits-{number}");
    let mut experiment = bench.experiment();
    let peers = format!("{{hosts: [h{number}.example.com]}}");
    let network = &mut experiment.spec.faults[0].network;
    network.as_mut().unwrap().peers = Some(serde_saphyr::from_str(&peers).unwrap());
    experiment.metadata.name = Some(name.clone());
    experiment.metadata.uid = Some(format!("{name}-uid"));
    experiment.metadata.finalizers = Some(vec!["windtunnel.dev/reclaim".to_owned()]);
    experiment.status = None;
    let path = EXPERIMENT.replace("/run", &format!("/{name}"));
    bench.server.put(&path, &experiment);
    (path.clone(), bench.server.get(&path).unwrap())
}

/// Name servers that never answer are waited for by the runs that need them, and hold up nobody else.
#[tokio::test]
async fn names_that_are_not_resolved_delay_no_abort() {
    let mut bench = Bench::after(3).await;
    let never = Box::new(|_| std::future::pending().boxed());
    let times = Times {
        first: Duration::from_millis(500),
        ..Times::default()
    };
    let triggers = tokio::sync::mpsc::unbounded_channel().0;
    bench.ctx.directories.hosts = Hosts::asking(never, times, triggers);
    let waiting: Vec<_> = (0..40).map(|n| with_host(&bench, n)).collect();
    let mut aborted = bench.experiment();
    aborted.spec.abort = true;
    bench.server.put(EXPERIMENT, &aborted);
    let passes = async {
        for (_, experiment) in &waiting {
            pass(&bench.ctx, Arc::new(experiment.clone()), bench.now)
                .await
                .unwrap();
        }
    };
    timeout(AT_ONCE, passes).await.unwrap();
    timeout(AT_ONCE, bench.pass()).await.unwrap().unwrap();
    let injections = bench.injections();
    assert!(!injections.is_empty() && injections.iter().all(|(_, i)| i.spec.abort));
    let status = |path: &str| -> ChaosExperimentStatus {
        let experiment: ChaosExperiment = bench.server.get(path).unwrap();
        experiment.status.unwrap()
    };
    let (path, _) = &waiting[39];
    assert_eq!(status(path).phase, Some(Phase::Pending));
    let message = status(path).message;
    assert_eq!(message, "waiting for the addresses of host h39.example.com");
    // Not for ever: it begins without them, and says so.
    sleep(times.first).await;
    let experiment = Arc::new(bench.server.get(path).unwrap());
    pass(&bench.ctx, experiment, bench.now).await.unwrap();
    assert_eq!(status(path).phase, Some(Phase::Preparing));
    let notes = &status(path).faults[0].notes;
    assert_eq!(
        notes[0],
        "host h39.example.com has no address: it is not resolved yet"
    );
}
