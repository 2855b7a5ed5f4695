//! Faults on containers: which they are for, and that they are followed.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use windtunnel_crds::{
    conditions::ConditionType as C,
    injection::{InjectionPhase as I, TargetState as T},
    status::Phase,
};

use super::testing::{LOAD, Sim, candidate, is};

#[test]
fn a_fault_on_containers_names_them_and_follows_their_ids() {
    let mut sim = Sim::new(LOAD, vec![candidate("p0", "node1")]);
    sim.settle();
    let target = |sim: &Sim| sim.observed.injections[0].spec.faults[0].targets[0].clone();
    assert_eq!(target(&sim).containers[0].id, "containerd://p0");
    sim.all(I::Prepared, T::Prepared);
    sim.all(I::Running, T::Injected);
    assert_eq!(sim.fault("hot").matched_packets, None);
    sim.restart_container("p0", "containerd://again");
    sim.settle();
    assert_eq!(target(&sim).containers[0].id, "containerd://again");
}

#[test]
fn a_container_that_a_pod_does_not_have_is_refused_before_any_node_is_asked() {
    let spec = "
duration: 1m
faults:
- name: hot
  target: {selector: {matchLabels: {app: x}}, containers: [sidecar]}
  cpu: {load: 50}
";
    let mut sim = Sim::new(spec, vec![candidate("p0", "node1")]);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Failed);
    assert!(
        sim.status().message.contains("no container sidecar"),
        "{}",
        sim.status().message
    );
    assert!(sim.observed.injections.is_empty());
}

#[test]
fn an_early_end_on_one_container_is_told_while_the_fault_goes_on_on_another() {
    let mut sim = Sim::in_place(LOAD, vec![candidate("p0", "node1")]);
    let now = MicroTime(sim.now);
    let status = sim.observed.injections[0].status.as_mut().unwrap();
    status.targets[0].interrupted_at = Some(now);
    sim.settle();
    assert_eq!(sim.phase(), Phase::Running);
    assert_eq!(sim.condition(C::Injected), is("False", "Interrupted"));
    assert_eq!(sim.fault("hot").interrupted, 1);
}
