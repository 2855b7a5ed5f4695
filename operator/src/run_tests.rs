//! The whole operator against an API server in memory: how it starts and ends.

use k8s_openapi::api::coordination::v1::Lease;
use tokio::{
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::*;
use crate::mock::{LOST, Refusal, Server};

const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/windtunnel/leases/windtunnel-operator";

/// An operator that has come to lead, and what ends it.
async fn leader(server: &Server) -> (JoinHandle<Result<(), RunError>>, CancellationToken) {
    let shutdown = CancellationToken::new();
    let parts = (Readiness::default(), Metrics::new().0);
    let operator = run_with(tests::args(), server.client(), parts, shutdown.clone());
    let operator = tokio::spawn(operator);
    while holder(server).as_deref() != Some("me") {
        sleep(Duration::from_millis(10)).await;
    }
    (operator, shutdown)
}

fn holder(server: &Server) -> Option<String> {
    let lease: Lease = server.get(LEASE)?;
    lease.spec?.holder_identity
}

#[tokio::test]
async fn the_lease_is_given_back_before_the_process_ends() {
    let server = Server::default();
    server.slow(Duration::from_millis(20));
    let (operator, shutdown) = leader(&server).await;
    shutdown.cancel();
    let ended = timeout(Duration::from_secs(10), operator).await;
    assert!(matches!(ended, Ok(Ok(Ok(())))), "{ended:?}");
    assert_eq!(holder(&server).as_deref(), Some(""));
}

#[tokio::test]
async fn a_lease_that_cannot_be_given_back_does_not_keep_the_process() {
    let server = Server::default();
    let (operator, shutdown) = leader(&server).await;
    server.refuse(Refusal::always("GET leases", LOST));
    shutdown.cancel();
    let ended = timeout(Duration::from_secs(10), operator).await;
    assert!(matches!(ended, Ok(Ok(Ok(())))), "{ended:?}");
    assert_eq!(holder(&server).as_deref(), Some("me"));
}
