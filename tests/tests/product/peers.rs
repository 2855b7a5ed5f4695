//! Peers: a fault hits the packets to those that were chosen, however they are sent there, and
//! nobody else's.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::product::Run;

use super::measure::Probes;
use super::stage::{ECHO, Pod, Space, Stage, Wanted, at, kubectl};

const SOON: Duration = Duration::from_secs(30);
/// Packets to each destination, and how often they are sent.
const PACKETS: usize = 30;
const ROUNDS: usize = 3;

/// Fails unless exactly those destinations do not answer that are to be cut, and of the packets to the
/// others most are answered; how often packets were sent to all. Answers that are missing may have been
/// lost by the machine, and packets are sent anew; one that is not to be there is one too many.
fn cut(
    space: &Space<'_>,
    from: &Pod,
    (to, cut): (&[String], &[bool]),
    from_port: u16,
) -> Result<usize> {
    let probes = Probes {
        from_port,
        wait: Duration::from_secs(2),
        ..Probes::new(to, PACKETS)
    };
    let mut silent: Vec<&String> = Vec::new();
    for round in 1..=ROUNDS {
        let outcomes = space.probes(from, &probes)?;
        silent.clear();
        for ((outcome, to), cut) in outcomes.iter().zip(to).zip(cut) {
            let answered = outcome.answered;
            ensure!(
                answered == 0 || !cut,
                "{}: {to} is to be cut, and answers {answered} of {PACKETS}",
                from.name
            );
            if !cut && answered * 2 <= PACKETS {
                silent.push(to);
            }
        }
        if silent.is_empty() {
            return Ok(round);
        }
    }
    bail!("{}: {silent:?} are cut and are not to be", from.name)
}

/// What the clients below choose as peers, and which destinations that cuts, in this order: echo
/// over IPv4 and IPv6, its Service over both, echo's other port, another pod over both, a Service
/// that leads to both pods.
const CHOICES: [(&str, &str, [bool; 8]); 6] = {
    const X: bool = true;
    const O: bool = false;
    [
        (
            "pods",
            "{podSelector: {matchLabels: {app: echo}}}",
            [X, X, X, X, X, O, O, O],
        ),
        (
            "ports",
            "{podSelector: {matchLabels: {app: echo}}, ports: [{port: 7, protocol: UDP}]}",
            [X, X, X, X, O, O, O, O],
        ),
        (
            "services",
            "{services: [{name: echo}]}",
            [X, X, X, X, O, O, O, O],
        ),
        (
            "cidrs",
            "{cidrs: [ECHO-V4/32, SERVICE-V6]}",
            [X, O, O, X, X, O, O, O],
        ),
        (
            "hosts",
            "{hosts: [echo.NAMESPACE.svc.cluster.local]}",
            [O, O, X, X, O, O, O, O],
        ),
        (
            "nobody",
            "{cidrs: [192.0.2.0/24]}",
            [O, O, O, O, O, O, O, O],
        ),
    ]
};

/// Every way to choose peers cuts them off and nobody else, and the packets are counted.
pub(crate) fn peers_are_those_chosen(stage: &Stage) -> Result<()> {
    let space = stage.space("peers_are_those_chosen")?;
    let clients: Vec<Wanted<'_>> = CHOICES
        .iter()
        .enumerate()
        .map(|(number, (name, _, _))| Wanted {
            name,
            app: name,
            node: ["node1", "node2"][number % 2],
            args: &["idle"],
        })
        .collect();
    let (_, echo, other) = space.client_and_echoes_on(&["echo", "--port=7", "--port=8"])?;
    let clients = space.pods(&clients)?;
    let (service, both) = services(&space)?;
    let to = [
        at(&echo.v4, ECHO),
        at(&echo.v6, ECHO),
        at(&service.0, 77),
        at(&service.1, 77),
        at(&echo.v4, 8),
        at(&other.v4, ECHO),
        at(&other.v6, ECHO),
        at(&both, 78),
    ];
    let fault = |(name, peers, _): &(&str, &str, [bool; 8])| {
        let peers = peers
            .replace("ECHO-V4", &echo.v4)
            .replace("SERVICE-V6", &service.1)
            .replace("NAMESPACE", &space.name);
        format!(
            "
- name: {name}
  target: {{selector: {{matchLabels: {{app: {name}}}}}}}
  network: {{loss: {{percent: 100}}, peers: {peers}}}"
        )
    };
    let faults: String = CHOICES.iter().map(fault).collect();
    let spec = format!("duration: 5m\nfaults:{faults}");
    let before = snapshots(stage, &clients)?;
    let run = space.run("chosen", &spec)?;
    run.wait("Injected", SOON)?;
    let client = clients.iter().find(|c| c.name == "hosts");
    resolved(&run, client.context("no client")?, &service.0, stage)?;
    // All clients at the same time.
    let rounds: Result<Vec<usize>> = thread::scope(|scope| {
        let all: Vec<_> = clients
            .iter()
            .zip(CHOICES)
            .map(|(client, (_, _, wanted))| {
                let (space, to) = (&space, &to[..]);
                scope.spawn(move || cut(space, client, (to, &wanted), 0))
            })
            .collect();
        all.into_iter()
            .map(|one| one.join().unwrap_or_else(|_| bail!("panicked")))
            .collect()
    });
    let rounds = rounds?;
    run.abort()?;
    run.wait("Clean", SOON)?;
    counted(&run.status()?, &rounds)?;
    cut(&space, &clients[0], (&to, &[false; 8]), 0).context("after the end")?;
    let all = clients.iter().zip(&before);
    all.into_iter()
        .try_for_each(|(pod, before)| stage.unchanged(pod, before))
}

fn snapshots(stage: &Stage, pods: &[Pod]) -> Result<Vec<String>> {
    pods.iter().map(|pod| stage.snapshot(pod)).collect()
}

/// Waits until the host's address is in the kernel: a name server may be late, and then it is asked
/// again.
fn resolved(run: &Run<'_>, client: &Pod, address: &str, stage: &Stage) -> Result<()> {
    run.until("addresses of the host", SOON, |status| {
        !status["faults"].to_string().contains("has no address")
    })?;
    until("the host's addresses in the kernel", SOON, || {
        let held = stage.in_netns(client, &["nft", "list", "ruleset"])?;
        Ok(held.contains(address).then_some(()))
    })
}

/// The ClusterIPs of the Service echo, and the IPv4 one of a Service that leads to echo and other.
fn services(space: &Space<'_>) -> Result<((String, String), String)> {
    let mut label = vec!["label", "pods", "echo", "other", "group=both"];
    label.extend(["--namespace", &space.name]);
    kubectl(space.stage, &label)?;
    space.stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Service
metadata: {{name: both, namespace: {}}}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {{group: both}}
  ports: [{{protocol: UDP, port: 78, targetPort: {ECHO}}}]
",
        space.name
    ))?;
    // Until the endpoints are known, a Service leads nowhere, and nothing can be said about it.
    for (name, endpoints) in [("echo", 1), ("both", 2)] {
        until(&format!("endpoints of {name}"), SOON, || {
            let selector = format!("kubernetes.io/service-name={name}");
            let mut get = vec!["endpointslices", "--selector", &selector];
            get.extend(["--namespace", &space.name]);
            let slices = space.stage.cluster.get(&get)?;
            let slices = slices["items"].as_array().cloned().unwrap_or_default();
            let ready = |slice: &Value| slice["endpoints"].as_array().map_or(0, Vec::len);
            Ok((slices.len() == 2 && slices.iter().all(|s| ready(s) == endpoints)).then_some(()))
        })?;
    }
    Ok((space.cluster_ips("echo")?, space.cluster_ips("both")?.0))
}

/// The status counts exactly what was sent to the chosen, and says where nothing was.
fn counted(status: &Value, rounds: &[usize]) -> Result<()> {
    for ((name, _, cut), rounds) in CHOICES.iter().zip(rounds) {
        let faults = status["faults"].as_array().into_iter().flatten();
        let fault = faults.clone().find(|f| f["name"] == *name);
        let fault = fault.with_context(|| format!("no fault {name} in {status}"))?;
        let sent = cut.iter().filter(|cut| **cut).count() * PACKETS * rounds;
        ensure!(
            fault["matchedPackets"] == sent,
            "{name}: sent {sent}: {fault}"
        );
        let message = fault["message"].as_str().unwrap_or_default();
        ensure!(
            message.contains("no packet matched") == (sent == 0),
            "{name}: {message}"
        );
        let notes = fault["notes"].to_string();
        ensure!(
            notes.contains("Service both leads to other pods too")
                == (cut[0] && cut[2] && *name != "services"),
            "{name}: {notes}"
        );
    }
    Ok(())
}

/// The target's own port chooses packets too, whoever they go to.
pub(crate) fn local_ports_are_those_of_the_target(stage: &Stage) -> Result<()> {
    let space = stage.space("local_ports_are_those_of_the_target")?;
    let (client, echo, other) = space.client_and_echoes()?;
    let run = space.run(
        "ports",
        "
duration: 5m
faults:
- name: own
  target: {selector: {matchLabels: {app: client}}}
  network:
    loss: {percent: 100}
    peers: {localPorts: [{port: 5000, endPort: 5001, protocol: UDP}]}
",
    )?;
    run.wait("Injected", SOON)?;
    for ip in [&echo.v4, &other.v6] {
        for (port, wanted) in [(5000, true), (5001, true), (5002, false)] {
            cut(&space, &client, (&[at(ip, ECHO)], &[wanted]), port)
                .with_context(|| format!("from port {port}"))?;
        }
    }
    run.abort()?;
    run.wait("Clean", SOON)
}

/// A pod that joins the chosen ones is hit, and one that leaves is forgotten.
pub(crate) fn peers_follow_the_cluster(stage: &Stage) -> Result<()> {
    let space = stage.space("peers_follow_the_cluster")?;
    let (client, echo, _) = space.client_and_echoes()?;
    let run = space.run(
        "follows",
        "
duration: 5m
faults:
- name: cut
  target: {selector: {matchLabels: {app: client}}}
  network: {loss: {percent: 100}, peers: {podSelector: {matchLabels: {app: echo}}}}
",
    )?;
    run.wait("Injected", SOON)?;
    let rules = || stage.in_netns(&client, &["nft", "list", "ruleset"]);
    let held = rules()?;
    ensure!(
        held.contains(&echo.v4) && held.contains(&echo.v6),
        "rules: {held}"
    );
    let late = Wanted {
        name: "late",
        app: "echo",
        node: "node1",
        args: &["echo"],
    };
    let late = space.pods(&[late])?.pop().context("no pod")?;
    let to = [at(&late.v4, ECHO), at(&late.v6, ECHO)];
    until("a new peer is cut off", SOON, || {
        Ok((cut_or_half(&space, &client, &to)? == [true, true]).then_some(()))
    })?;
    kubectl(
        stage,
        &["delete", "pod", "late", "--namespace", &space.name],
    )?;
    until("the peer that went is forgotten", SOON, || {
        let held = rules()?;
        Ok((!held.contains(&late.v4) && !held.contains(&late.v6)).then_some(()))
    })?;
    let still = [at(&echo.v4, ECHO), at(&echo.v6, ECHO)];
    cut(&space, &client, (&still, &[true; 2]), 0).context("the other peer")?;
    run.abort()?;
    run.wait("Clean", SOON)
}

/// As [`cut`], while that may just change.
fn cut_or_half(space: &Space<'_>, from: &Pod, to: &[String]) -> Result<Vec<bool>> {
    let probes = Probes {
        wait: Duration::from_millis(500),
        ..Probes::new(to, 5)
    };
    let outcomes = space.probes(from, &probes)?;
    Ok(outcomes.iter().map(|o| o.answered == 0).collect())
}

/// A pod whose traffic is all lost keeps its probes and its names unless they are not spared.
pub(crate) fn probes_and_names_are_spared(stage: &Stage) -> Result<()> {
    let space = stage.space("probes_and_names_are_spared")?;
    let (neighbour, echo, _) = space.client_and_echoes()?;
    let spared = probed(&space, "spared", ("livenessProbe", 2))?;
    let bare = probed(&space, "bare", ("readinessProbe", 4))?;
    let service = space.cluster_ips("echo")?;
    let run = space.run(
        "all",
        "
duration: 5m
faults:
- name: spared
  target: {selector: {matchLabels: {app: spared}}}
  network: {loss: {percent: 100}, direction: Both}
- name: bare
  target: {selector: {matchLabels: {app: bare}}}
  network: {loss: {percent: 100}, direction: Both, spare: []}
",
    )?;
    run.wait("Injected", SOON)?;
    let to = [at(&echo.v4, ECHO), at(&echo.v6, ECHO), at(&service.0, 77)];
    for pod in [&spared, &bare] {
        cut(&space, pod, (&to, &[true; 3]), 0)?;
    }
    cut(&space, &neighbour, (&to, &[false; 3]), 0)?;
    // The name is found, and the packets to what it stands for are lost.
    let name = format!("echo.{}.svc.cluster.local:77", space.name);
    let name = std::slice::from_ref(&name);
    cut(&space, &spared, (name, &[true]), 0).context("a name")?;
    let unknown = cut(&space, &bare, (name, &[true]), 0);
    ensure!(
        unknown.is_err(),
        "a name was found without its server being spared"
    );
    let seen = |pod: &Pod| -> Result<(u64, bool)> {
        let get = ["pod", &pod.name, "--namespace", &space.name];
        let status = stage.cluster.get(&get)?["status"].clone();
        let restarts = status["containerStatuses"][0]["restartCount"].as_u64();
        let ready = status["containerStatuses"][0]["ready"].as_bool();
        Ok((restarts.unwrap_or(0), ready.unwrap_or(false)))
    };
    // That takes four failed probes in a row; two would restart the other.
    until("the bare one is not ready", Duration::from_mins(1), || {
        Ok((!seen(&bare)?.1).then_some(()))
    })?;
    let found = seen(&spared)?;
    ensure!(
        found == (0, true),
        "the spared one: restarts and readiness {found:?}"
    );
    run.abort()?;
    run.wait("Clean", SOON)?;
    until(
        "the bare one is ready again",
        Duration::from_mins(1),
        || Ok(seen(&bare)?.1.then_some(())),
    )
}

/// A pod that kubelet probes.
fn probed(space: &Space<'_>, name: &str, (probe, failures): (&str, u32)) -> Result<Pod> {
    space.stage.cluster.apply(&format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {}, labels: {{app: {name}}}}}
spec:
  nodeName: node1
  terminationGracePeriodSeconds: 0
  containers:
  - name: sample
    image: windtunnel/sample:{}
    imagePullPolicy: Never
    args: [serve]
    {probe}: {{httpGet: {{path: /healthz, port: 8080}}, periodSeconds: 1, timeoutSeconds: 3, failureThreshold: {failures}}}
",
        space.name, space.stage.windtunnel.images.tag
    ))?;
    space.ready(name)
}
