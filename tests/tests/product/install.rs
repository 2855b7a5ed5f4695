//! The chart: rendered, refused, upgraded and uninstalled while a fault is in place.

use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use windtunnel_tests::cluster::success;
use windtunnel_tests::product::{NAMESPACE, chart};

use super::outage::Absent;
use super::scene::{SOON, Scene};
use super::stage::{Stage, Test, kubectl};
use super::traces;

pub(crate) const GENTLE: &[Test] = &[
    (
        "the_chart_renders_and_refuses_bad_values",
        the_chart_renders_and_refuses_bad_values,
    ),
    ("a_second_release_is_refused", a_second_release_is_refused),
];

pub(crate) const ROUGH: &[Test] = &[
    (
        "an_upgrade_ends_what_is_in_place",
        an_upgrade_ends_what_is_in_place,
    ),
    (
        "uninstallation_takes_everything_back",
        uninstallation_takes_everything_back,
    ),
    (
        "uninstallation_ends_without_an_operator",
        uninstallation_ends_without_an_operator,
    ),
];

fn the_chart_renders_and_refuses_bad_values(stage: &Stage) -> Result<()> {
    let chart = chart();
    let chart = chart.to_str().context("the chart's path")?;
    success(&stage.cluster.helm(&["lint", "--strict", chart])?)?;
    let good = [
        ("operator.replicas=1", "replicas: 1"),
        ("controlPlaneGrace=25s", "--control-plane-grace=25s"),
        ("audit.recheckAfter=1m", "--recheck-after=1m"),
        (
            "experiments.requireNamespaceLabel=true",
            "windtunnel.dev/chaos=allowed",
        ),
        (
            "experiments.protectedNamespaces={a,b}",
            "--protected-namespaces=a,b",
        ),
        ("metrics.serviceMonitor=true", "kind: ServiceMonitor"),
        ("logFormat=json", "--log-format=json"),
        ("image.pullSecrets[0].name=secret", "name: secret"),
        ("agent.journal=/run/other", "path: /run/other"),
        ("clusterDNS=dns/coredns", "--cluster-dns=dns/coredns"),
        ("agent.nodeSelector.zone=a", "zone: a"),
    ];
    for (value, expected) in good {
        let text = success(&rendered(stage, &[value], &[])?).context(value)?;
        ensure!(text.contains(expected), "{value}: no {expected:?} in it");
    }
    let plain = success(&rendered(stage, &[], &[])?)?;
    for expected in [
        "privileged: false",
        "readOnlyRootFilesystem: true",
        "appArmorProfile: {type: Unconfined}",
        "seLinuxOptions: {type: spc_t}",
        "seccompProfile: {type: RuntimeDefault}",
        "hostPID: true",
        "mountPath: /host/var/log/pods, readOnly: true",
        "livenessProbe:",
        "readinessProbe:",
    ] {
        ensure!(plain.contains(expected), "no {expected:?} in the chart");
    }
    for value in [
        "operator.replicas=0",
        "operator.replica=2",
        "controlPlaneGrace=half a minute",
        "controlPlaneGrace=24s",
        "controlPlaneGrace=10000ms",
        "controlPlaneGrace=0m",
        "experiments.maxTargets=0",
        "agent.journal=relative",
        "clusterDNS=kube-dns",
        "logFormat=xml",
        "image.pullPolicy=Sometimes",
        "unknown=1",
    ] {
        let output = rendered(stage, &[value], &[])?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && error.contains("schema"),
            "{value}: {error}"
        );
    }
    the_hook_follows_the_values(stage)
}

/// What ends everything before an uninstallation runs where the operator does, for as long as the
/// agents' grace takes.
fn the_hook_follows_the_values(stage: &Stage) -> Result<()> {
    for (value, expected) in [
        ("controlPlaneGrace=30s", "activeDeadlineSeconds: 180"),
        ("controlPlaneGrace=25000ms", "activeDeadlineSeconds: 175"),
        ("controlPlaneGrace=1h1m1s", "activeDeadlineSeconds: 3811"),
        ("operator.nodeSelector.zone=a", "zone: a"),
        ("operator.tolerations[0].key=only", "key: only"),
        ("operator.resources.limits.memory=99Mi", "memory: 99Mi"),
    ] {
        let only = ["--show-only", "templates/uninstall.yaml"];
        let text = success(&rendered(stage, &[value], &only)?).context(value)?;
        ensure!(text.contains(expected), "{value}: no {expected:?} in it");
    }
    // A quota for the priority classes that some providers want one for.
    let quota = ["--show-only", "templates/quota.yaml"];
    let system = success(&rendered(
        stage,
        &["operator.priorityClassName=own"],
        &quota,
    )?)?;
    ensure!(
        system.contains("system-node-critical") && !system.contains("own"),
        "{system}"
    );
    let own = [
        "operator.priorityClassName=own",
        "agent.priorityClassName=own",
    ];
    let text = success(&rendered(stage, &own, &[])?)?;
    ensure!(!text.contains("ResourceQuota"), "{text}");
    Ok(())
}

fn rendered(stage: &Stage, values: &[&str], options: &[&str]) -> Result<Output> {
    let chart = chart();
    let chart = chart.to_str().context("the chart's path")?;
    let mut arguments = vec!["template", "wt", chart, "--kube-version=1.33.0"];
    arguments.push("--namespace=ns");
    for value in values {
        arguments.extend(["--set", value]);
    }
    arguments.extend(options);
    stage.cluster.helm(&arguments)
}

/// Agents of two releases would share each node's journal.
fn a_second_release_is_refused(stage: &Stage) -> Result<()> {
    let chart = chart();
    let chart = chart.to_str().context("the chart's path")?;
    let arguments = ["install", "second", chart, "--namespace=second"];
    let arguments = [&arguments[..], &["--dry-run=server"]].concat();
    let output = stage.cluster.helm(&arguments)?;
    let error = String::from_utf8_lossy(&output.stderr);
    let expected = format!("windtunnel is installed in namespace {NAMESPACE} already");
    ensure!(
        !output.status.success() && error.contains(&expected),
        "{error}"
    );
    Ok(())
}

/// Every agent is replaced while a fault is in place.
fn an_upgrade_ends_what_is_in_place(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "an_upgrade_ends_what_is_in_place", "node1")?;
    let (run, uid) = scene.silenced("run", "120s")?;
    let moment = Instant::now();
    let upgraded = stage.windtunnel.install(&["log=debug"]);
    let restored = stage.windtunnel.install(&[]);
    upgraded?;
    restored?;
    scene.lamp.comes_back(moment, SOON)?;
    run.wait("Finished", SOON)?;
    let status = run.status()?;
    ensure!(status["phase"] == "Failed", "status: {status}");
    ensure!(run.condition("Clean")?.0 == "True", "status: {status}");
    let target = traces::target(stage, &uid, &scene.echo)?;
    ensure!(target["state"] == "Interrupted", "the agent says {target}");
    scene.is_as_before()
}

/// `helm uninstall` with a fault in place: it ends, and nothing stays that only windtunnel could
/// release. Installed again, windtunnel works.
fn uninstallation_takes_everything_back(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "uninstallation_takes_everything_back", "node1")?;
    let (run, uid) = scene.silenced("run", "300s")?;
    let moment = Instant::now();
    let uninstalled = stage.windtunnel.uninstall();
    let seen = uninstalled
        .and_then(|()| scene.lamp.comes_back(moment, SOON))
        .and_then(|_| nothing_stays(&scene, &uid))
        .and_then(|()| {
            let phase = run.phase()?;
            ensure!(phase == "Aborted", "status: {}", run.status()?);
            run.delete(SOON)
        });
    stage.windtunnel.install(&[])?;
    seen?;
    let (run, uid) = scene.silenced("again", "60s")?;
    run.delete(SOON)?;
    traces::is_forgotten(&scene.space, "again", &uid)?;
    scene.is_as_before()
}

/// The same where nobody is there to answer: the uninstallation is bounded by itself.
fn uninstallation_ends_without_an_operator(stage: &Stage) -> Result<()> {
    let scene = Scene::set(stage, "uninstallation_ends_without_an_operator", "node2")?;
    let (run, uid) = scene.silenced("run", "300s")?;
    let moment = Instant::now();
    let absent = Absent::send_away(stage)?;
    let uninstalled = stage.windtunnel.uninstall();
    let seen = uninstalled
        .and_then(|()| scene.lamp.comes_back(moment, SOON))
        .and_then(|_| nothing_stays(&scene, &uid))
        .and_then(|()| run.delete(SOON));
    drop(absent);
    stage.windtunnel.install(&[])?;
    seen?;
    ensure!(
        moment.elapsed() < Duration::from_mins(5),
        "the fault would have ended by itself by now"
    );
    scene.is_as_before()
}

/// Nothing of windtunnel is in the way of anybody.
fn nothing_stays(scene: &Scene<'_>, uid: &str) -> Result<()> {
    let stage = scene.space.stage;
    let experiments = stage
        .cluster
        .get(&["chaosexperiments", "--all-namespaces"])?;
    let held = experiments["items"].as_array().into_iter().flatten();
    let held: Vec<_> = held
        .filter(|e| !e["metadata"]["finalizers"].is_null())
        .collect();
    ensure!(held.is_empty(), "finalizers are left: {held:?}");
    let left = traces::injections(stage, uid)?;
    ensure!(left.is_empty(), "node injections are left: {left:?}");
    let kinds = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings";
    let left = kubectl(stage, &["get", kinds, "--output", "name"])?;
    let left: Vec<&str> = left.lines().filter(|l| l.contains("windtunnel")).collect();
    ensure!(left.is_empty(), "left in the cluster: {left:?}");
    let all = "deployments,daemonsets,jobs,serviceaccounts,roles,rolebindings";
    let left = kubectl(
        stage,
        &["get", all, "--namespace", NAMESPACE, "--output", "name"],
    )?;
    let left: Vec<&str> = left.lines().filter(|l| l.contains("windtunnel")).collect();
    ensure!(left.is_empty(), "left in the namespace: {left:?}");
    let network = stage.snapshot(&scene.echo)?;
    ensure!(
        network == scene.before(),
        "the network of the echo is\n{network}"
    );
    Ok(())
}
