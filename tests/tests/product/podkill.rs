//! podKill: as many as asked, only those, each once, and evictions as the budgets allow.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::Signal;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::Run;

use super::scene::SOON;
use super::stage::{Pod, Space, Stage, Test, Wanted, kubectl};

pub(crate) const GENTLE: &[Test] = &[
    (
        "as_many_pods_are_killed_as_asked",
        as_many_pods_are_killed_as_asked,
    ),
    (
        "the_seed_decides_who_is_killed",
        the_seed_decides_who_is_killed,
    ),
    ("evictions_respect_a_budget", evictions_respect_a_budget),
];

pub(crate) const ROUGH: &[Test] = &[(
    "a_dead_operator_kills_no_one_twice",
    a_dead_operator_kills_no_one_twice,
)];

const NAMES: [&str; 5] = ["p0", "p1", "p2", "p3", "p4"];

fn crowd(space: &Space<'_>) -> Result<Vec<Pod>> {
    let wanted = NAMES.map(|name| Wanted {
        name,
        app: "crowd",
        node: if name < "p2" { "node1" } else { "node2" },
        args: &["idle"],
    });
    space.pods(&wanted)
}

fn spec(seed: &str, dose: &str, grace: &str) -> String {
    format!(
        "
duration: 60s
seed: {seed}
faults:
- name: kill
  target: {{selector: {{matchLabels: {{app: crowd}}}}, {dose}}}
  podKill: {{gracePeriod: {grace}}}
"
    )
}

/// The names of those that a finished run killed: by its own draw, and by who is gone.
fn killed(space: &Space<'_>, run: &Run<'_>, before: &[Pod]) -> Result<BTreeSet<String>> {
    run.wait("Finished", SOON)?;
    let status = run.status()?;
    ensure!(status["phase"] == "Completed", "status: {status}");
    let left: BTreeSet<String> = space
        .ready_with("crowd")?
        .into_iter()
        .map(|p| p.uid)
        .collect();
    let gone = before.iter().filter(|p| !left.contains(&p.uid));
    let gone: BTreeSet<String> = gone.map(|p| p.name.clone()).collect();
    let draw = status["faults"][0]["draw"].as_array();
    let drawn = draw.into_iter().flatten();
    let drawn: BTreeSet<String> = drawn
        .filter_map(|p| p["name"].as_str().map(str::to_owned))
        .collect();
    ensure!(drawn == gone, "{gone:?} are gone: {status}");
    Ok(gone)
}

/// Half of five, by force; then all that are left, within a second; nobody else.
fn as_many_pods_are_killed_as_asked(stage: &Stage) -> Result<()> {
    let space = stage.space("as_many_pods_are_killed_as_asked")?;
    let pods = crowd(&space)?;
    let bystander = Wanted {
        name: "bystander",
        app: "bystander",
        node: "node1",
        args: &["idle"],
    };
    let bystanders = space.pods(&[bystander])?;
    let run = space.run("half", &spec("a", "percent: 50", "0s"))?;
    let half = killed(&space, &run, &pods)?;
    ensure!(half.len() == 3, "half of five is {half:?}");
    let left = space.ready_with("crowd")?;
    let run = space.run("all", &spec("a", "percent: 100", "1s"))?;
    let all = killed(&space, &run, &left)?;
    ensure!(all.len() == 2, "all of two is {all:?}");
    ensure!(
        space.ready_with("bystander")? == bystanders,
        "the bystander is not who it was"
    );
    Ok(())
}

/// The same seed and names draw the same pods, whatever the run is called; another seed others.
fn the_seed_decides_who_is_killed(stage: &Stage) -> Result<()> {
    let space = stage.space("the_seed_decides_who_is_killed")?;
    let mut draws = Vec::new();
    for (name, seed) in [("one", "a"), ("two", "a"), ("three", "c")] {
        let pods = crowd(&space)?;
        let run = space.run(name, &spec(seed, "count: 2", "0s"))?;
        let draw = killed(&space, &run, &pods)?;
        ensure!(draw.len() == 2, "two are {draw:?}");
        draws.push(draw);
        // Killed by force they may still be there: the next of the same name waits for them.
        until("the end of who was killed", SOON, || {
            let pods = kubectl(
                stage,
                &[
                    "get",
                    "pods",
                    "--namespace",
                    &space.name,
                    "--output",
                    "name",
                ],
            )?;
            Ok((pods.lines().count() == 3).then_some(()))
        })?;
    }
    ensure!(draws[0] == draws[1], "the same seed drew {draws:?}");
    ensure!(draws[0] != draws[2], "another seed drew {draws:?}");
    Ok(())
}

/// A budget forbids an eviction: it is asked for again, until it is allowed or the run is over.
fn evictions_respect_a_budget(stage: &Stage) -> Result<()> {
    let space = stage.space("evictions_respect_a_budget")?;
    let pods = crowd(&space)?;
    stage.cluster.apply(&format!(
        "
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{name: all, namespace: {}}}
spec: {{minAvailable: 5, selector: {{matchLabels: {{app: crowd}}}}}}
",
        space.name
    ))?;
    let budget = [
        "get",
        "pdb",
        "all",
        "--namespace",
        &space.name,
        "--output=jsonpath={.status.currentHealthy}",
    ];
    until("a budget that counts", SOON, || {
        Ok((kubectl(stage, &budget)? == "5").then_some(()))
    })?;
    let evict = |duration: &str| {
        spec("a", "count: 2", "0s")
            .replace("duration: 60s", &format!("duration: {duration}"))
            .replace("gracePeriod: 0s", "gracePeriod: 0s, method: Evict")
    };
    let blocked = space.run("blocked", &evict("4s"))?;
    blocked.wait("Finished", SOON)?;
    let status = blocked.status()?;
    let message = status["message"].as_str().unwrap_or_default();
    ensure!(
        status["phase"] == "Failed" && message.contains("disruption budget"),
        "status: {status}"
    );
    ensure!(space.ready_with("crowd")? == pods, "somebody was evicted");
    let freed = space.run("freed", &evict("90s"))?;
    freed.until("evictions that are waited for", SOON, |s| {
        s["faults"][0]["phase"] == "Active"
    })?;
    ensure!(space.ready_with("crowd")? == pods, "somebody was evicted");
    kubectl(stage, &["delete", "pdb", "all", "--namespace", &space.name])?;
    let evicted = killed(&space, &freed, &pods)?;
    ensure!(evicted.len() == 2, "two are {evicted:?}");
    Ok(())
}

/// The leader is killed while it kills: the next one goes by the draw that was written down.
fn a_dead_operator_kills_no_one_twice(stage: &Stage) -> Result<()> {
    let space = stage.space("a_dead_operator_kills_no_one_twice")?;
    let pods = crowd(&space)?;
    let leader = stage.windtunnel.leader()?.context("nobody leads")?;
    let (node, pid) = stage.operator(&leader)?;
    let run = space.run("half", &spec("a", "percent: 50", "2s"))?;
    run.until("a draw", SOON, |s| s["faults"][0]["drawnAt"].is_string())?;
    stage.cluster.node(&node)?.signal(pid, Signal::SIGKILL)?;
    stage.windtunnel.wait_for_operators()?;
    let half = killed(&space, &run, &pods)?;
    ensure!(half.len() == 3, "half of five is {half:?}");
    let after = space.ready_with("crowd")?;
    ensure!(after.len() == 2, "{} are left of five", after.len());
    let status = run.status()?;
    ensure!(status["faults"][0]["recovered"] == 3, "status: {status}");
    Ok(())
}
