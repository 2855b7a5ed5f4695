//! Nobody can do with windtunnel what they could not do without it: forged objects, foreign tokens,
//! protected namespaces, and authors without the rights that a fault amounts to.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::success;
use windtunnel_tests::product::{NAMESPACE, experiment};

use super::scene::{SOON, Scene, silence};
use super::stage::{Space, Stage, Test, Wanted, kubectl};
use super::traces;

pub(crate) const GENTLE: &[Test] = &[
    (
        "node_injections_cannot_be_forged",
        node_injections_cannot_be_forged,
    ),
    (
        "an_agent_speaks_for_its_own_node",
        an_agent_speaks_for_its_own_node,
    ),
    (
        "authors_need_the_rights_of_their_faults",
        authors_need_the_rights_of_their_faults,
    ),
    (
        "protected_namespaces_are_not_hit",
        protected_namespaces_are_not_hit,
    ),
    (
        "the_programs_may_do_no_more_than_they_need",
        the_programs_may_do_no_more_than_they_need,
    ),
];

/// Runs kubectl with a manifest as its input; what it answered, good or bad.
fn pipe(stage: &Stage, arguments: &[&str], manifest: &str) -> Result<String> {
    let mut command = stage.cluster.kubectl_command();
    command.args(arguments);
    let output = stage
        .cluster
        .run_with_input(&mut command, manifest.as_bytes())?;
    Ok(success(&output).unwrap_or_else(|error| error.to_string()))
}

/// A node injection on a pod, as if some experiment of a namespace had asked for it.
fn forged(name: &str, namespace: &str, pod: &super::stage::Pod) -> String {
    format!(
        "
apiVersion: windtunnel.dev/v1alpha1
kind: NodeInjection
metadata:
  name: {name}
  namespace: {NAMESPACE}
  labels: {{windtunnel.dev/experiment-uid: forged}}
spec:
  nodeName: {node}
  experiment: {{namespace: {namespace}, name: forged, uid: forged}}
  duration: 30s
  recheckAfter: 1s
  faults:
  - name: forged
    startAfter: 0s
    duration: 30s
    targets: [{{podName: {pod}, podUid: {uid}}}]
    network: {{impairment: {{loss: {{percent: 100}}}}, direction: Egress}}
",
        node = pod.node,
        pod = pod.name,
        uid = pod.uid
    )
}

fn echo(space: &Space<'_>) -> Result<super::stage::Pod> {
    let wanted = Wanted {
        name: "echo",
        app: "echo",
        node: "node1",
        args: &["echo"],
    };
    space.pods(&[wanted])?.pop().context("no pod")
}

/// Not by administrators, of a namespace or of everything; and what the operator itself may write
/// hits no pod of another namespace.
fn node_injections_cannot_be_forged(stage: &Stage) -> Result<()> {
    let space = stage.space("node_injections_cannot_be_forged")?;
    let pod = echo(&space)?;
    let object = forged("forged", &space.name, &pod);
    let mallory = ["create", "--filename", "-", "--as", "mallory"];
    stage.cluster.apply(&format!(
        "
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: mallory, namespace: {}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: admin}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: mallory}}]
",
        space.name
    ))?;
    let answer = pipe(stage, &mallory, &object)?;
    ensure!(
        answer.contains("forbidden"),
        "a namespace's admin: {answer}"
    );
    let answer = pipe(stage, &["create", "--filename", "-"], &object)?;
    ensure!(
        answer.contains("written by windtunnel's operator only"),
        "the cluster's admin: {answer}"
    );

    what_is_asked_cannot_be_changed(&space)?;
    no_pod_of_another_namespace(stage, &pod)
}

/// A node injection that the operator made stays as it is.
fn what_is_asked_cannot_be_changed(space: &Space<'_>) -> Result<()> {
    let stage = space.stage;
    let run = space.run("real", &silence("60s", "50s"))?;
    run.wait("Prepared", SOON)?;
    let uid = traces::uid(space, "real")?;
    let real = traces::injections(stage, &uid)?;
    let real = real[0]["metadata"]["name"].as_str().context("no name")?;
    let patch = |what: &str, extra: &[&str]| {
        let mut arguments = vec![
            "patch",
            "nodeinjection",
            real,
            "--namespace",
            NAMESPACE,
            "--type=merge",
            "--patch",
            what,
        ];
        arguments.extend(extra);
        pipe(stage, &arguments, "")
    };
    let answer = patch(r#"{"spec": {"duration": "24h"}}"#, &[])?;
    ensure!(
        answer.contains("written by windtunnel's operator only"),
        "another spec: {answer}"
    );
    let answer = patch(
        r#"{"status": {"phase": "Recovered"}}"#,
        &["--subresource=status"],
    )?;
    ensure!(
        answer.contains("only the agent of node"),
        "another status: {answer}"
    );
    Ok(())
}

/// Not even for the operator: the agent sees for itself whose pod it is.
fn no_pod_of_another_namespace(stage: &Stage, pod: &super::stage::Pod) -> Result<()> {
    let operator = format!("system:serviceaccount:{NAMESPACE}:windtunnel-operator");
    let foreign = forged("foreign", "default", pod);
    let refused = until("a refusal by the agent", SOON * 2, || {
        // It is swept when the operator finds that it belongs to nobody.
        pipe(
            stage,
            &["create", "--filename", "-", "--as", &operator],
            &foreign,
        )?;
        let object = stage.cluster.get(&[
            "nodeinjection",
            "foreign",
            "--namespace",
            NAMESPACE,
            "--ignore-not-found",
        ])?;
        let status = object["status"].clone();
        Ok((!status.is_null()).then_some(status))
    })?;
    pipe(
        stage,
        &[
            "delete",
            "nodeinjection",
            "foreign",
            "--namespace",
            NAMESPACE,
            "--ignore-not-found",
        ],
        "",
    )?;
    ensure!(
        refused["phase"] == "Refused" && refused["targets"][0]["reason"] == "NotInNamespace",
        "the agent says {refused}"
    );
    Ok(())
}

/// Applies objects with a token of a node's agent, and nothing else; what was answered, good or bad.
fn as_agent<'a>(stage: &'a Stage, node: &str) -> Result<impl Fn(&str) -> Result<String> + 'a> {
    let name = stage.windtunnel.agent_on(node)?;
    let pods = stage.windtunnel.pods("agent")?;
    let pod = pods.iter().find(|p| p["metadata"]["name"] == name.as_str());
    let uid = pod
        .and_then(|p| p["metadata"]["uid"].as_str())
        .context("no uid")?;
    let token = kubectl(
        stage,
        &[
            "create",
            "token",
            "windtunnel-agent",
            "--namespace",
            NAMESPACE,
            "--bound-object-kind=Pod",
            "--bound-object-name",
            &name,
            "--bound-object-uid",
            uid,
        ],
    )?;
    let view = kubectl(
        stage,
        &["config", "view", "--raw", "--minify", "--output=json"],
    )?;
    let view: Value = serde_json::from_str(&view)?;
    let cluster = &view["clusters"][0]["cluster"];
    let server = cluster["server"].as_str().context("no server")?.to_owned();
    // Without the administrator's certificate: the token alone speaks.
    let token = token.trim().to_owned();
    // As the agent does it: it may not read what it patches.
    Ok(move |object: &str| {
        let mut command = stage.cluster.kubectl_command();
        command.args([
            "--kubeconfig=/dev/null",
            "--server",
            &server,
            "--insecure-skip-tls-verify",
            "--token",
            &token,
            "apply",
            "--server-side",
            "--force-conflicts",
            "--validate=false",
            "--subresource=status",
            "--filename=-",
        ]);
        let output = stage
            .cluster
            .run_with_input(&mut command, object.as_bytes())?;
        Ok(success(&output).unwrap_or_else(|error| error.to_string()))
    })
}

/// With a token of the agent of node2.
fn an_agent_speaks_for_its_own_node(stage: &Stage) -> Result<()> {
    let apply = as_agent(stage, "node2")?;
    let status = |kind: &str, name: &str, status: &str| {
        apply(&format!(
            "{{apiVersion: windtunnel.dev/v1alpha1, kind: {kind}, metadata: {{name: {name}, namespace: {NAMESPACE}}}, status: {status}}}"
        ))
    };
    let own = status("NodeAgent", "node2", "{summary: network}")?;
    ensure!(own.contains("serverside-applied"), "its own node: {own}");
    let other = status("NodeAgent", "node1", "{summary: network}")?;
    ensure!(
        other.contains("only the agent of node node1"),
        "another node: {other}"
    );
    let scene = Scene::set(stage, "an_agent_speaks_for_its_own_node", "node1")?;
    let (run, uid) = scene.silenced("run", "60s")?;
    let injections = traces::injections(stage, &uid)?;
    let name = injections[0]["metadata"]["name"].as_str();
    let lie = status(
        "NodeInjection",
        name.context("no name")?,
        "{phase: Recovered}",
    )?;
    ensure!(
        lie.contains("only the agent of node node1"),
        "an injection of another node: {lie}"
    );
    run.abort()?;
    run.wait("Clean", SOON)?;
    scene.is_as_before()
}

/// Who may create experiments, but not delete pods.
fn authors_need_the_rights_of_their_faults(stage: &Stage) -> Result<()> {
    let space = stage.space("authors_need_the_rights_of_their_faults")?;
    for (user, extra) in [
        ("author", ""),
        (
            "evictor",
            ", {apiGroups: [''], resources: [pods/eviction], verbs: [create]}",
        ),
        (
            "deleter",
            ", {apiGroups: [''], resources: [pods], verbs: [delete]}",
        ),
    ] {
        stage.cluster.apply(&format!(
            "
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: {user}, namespace: {space}}}
rules: [{{apiGroups: [windtunnel.dev], resources: [chaosexperiments], verbs: [create]}}{extra}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{name: {user}, namespace: {space}}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: Role, name: {user}}}
subjects: [{{apiGroup: rbac.authorization.k8s.io, kind: User, name: {user}}}]
",
            space = space.name
        ))?;
    }
    let network = silence("10s", "0s");
    let kill = |method: &str| {
        format!(
            "duration: 10s\nfaults:\n- name: kill\n  target: {{selector: {{matchLabels: {{app: a}}}}}}\n  podKill: {{method: {method}}}\n"
        )
    };
    let dry = format!("{network}dryRun: true\n");
    let (deleting, evicting) = ("amount to deleting pods", "needs the right to evict pods");
    let table = [
        ("author", &network, deleting),
        ("author", &kill("Delete"), deleting),
        ("author", &kill("Evict"), evicting),
        ("author", &dry, "created"),
        ("evictor", &kill("Evict"), "created"),
        ("evictor", &kill("Delete"), deleting),
        ("evictor", &network, deleting),
        ("deleter", &network, "created"),
        ("deleter", &kill("Delete"), "created"),
        ("deleter", &kill("Evict"), "created"),
    ];
    for (user, spec, expected) in table {
        let arguments = [
            "create",
            "--dry-run=server",
            "--filename",
            "-",
            "--as",
            user,
        ];
        let answer = pipe(stage, &arguments, &experiment(&space.name, "tried", spec))?;
        ensure!(answer.contains(expected), "{user}: {answer}: {spec}");
    }
    Ok(())
}

fn protected_namespaces_are_not_hit(stage: &Stage) -> Result<()> {
    for namespace in ["kube-system", NAMESPACE] {
        let spec = "
duration: 10s
faults:
- name: network
  target: {selector: {matchExpressions: [{key: nobody, operator: DoesNotExist}]}}
  network: {loss: {percent: 100}}
";
        let cluster = stage.cluster;
        let run = windtunnel_tests::product::Run::apply(cluster, namespace, "forbidden", spec)?;
        run.wait("Finished", SOON)?;
        let (_, reason) = run.condition("Finished")?;
        let status = run.status()?;
        ensure!(
            reason == "NotAllowed" && status["message"].to_string().contains("is protected"),
            "{namespace}: {status}"
        );
    }
    Ok(())
}

/// The rights of both service accounts, and of the agent's process: a change shows here.
fn the_programs_may_do_no_more_than_they_need(stage: &Stage) -> Result<()> {
    for (name, namespace, expected) in RIGHTS {
        let user = format!("system:serviceaccount:{NAMESPACE}:windtunnel-{name}");
        let groups = [
            "--as-group=system:serviceaccounts",
            "--as-group=system:authenticated",
        ];
        let mut arguments = vec![
            "auth",
            "can-i",
            "--list",
            "--no-headers",
            "--namespace",
            namespace,
            "--as",
            &user,
        ];
        arguments.extend(groups);
        let listed = kubectl(stage, &arguments)?;
        let mut rights: Vec<String> = listed
            .lines()
            // What everybody may: look at himself and at the API.
            .filter(|l| !l.contains("selfsubject") && !l.contains(" [/"))
            .map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "))
            .filter(|l| !l.is_empty())
            .collect();
        rights.sort();
        ensure!(rights == expected, "{name} in {namespace} may {rights:#?}");
    }
    let pods = stage.windtunnel.pods("agent")?;
    let spec = &pods[0]["spec"];
    let context = &spec["containers"][0]["securityContext"];
    ensure!(
        context["privileged"] == false && context["allowPrivilegeEscalation"] == false,
        "the agent's container: {context}"
    );
    let mut added: Vec<&str> = context["capabilities"]["add"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    added.sort_unstable();
    ensure!(
        added
            == [
                "DAC_OVERRIDE",
                "KILL",
                "NET_ADMIN",
                "SYS_ADMIN",
                "SYS_PTRACE"
            ]
            && context["capabilities"]["drop"] == serde_json::json!(["ALL"]),
        "the agent's capabilities: {context}"
    );
    ensure!(
        spec["hostNetwork"].is_null() && spec["hostIPC"].is_null(),
        "the agent's pod: {spec}"
    );
    Ok(())
}

/// Program, namespace, and what `kubectl auth can-i --list` says, sorted.
const RIGHTS: [(&str, &str, &[&str]); 4] = [
    (
        "agent",
        NAMESPACE,
        &[
            "configmaps [] [windtunnel-stop] [get list watch]",
            "leases.coordination.k8s.io [] [windtunnel-operator] [get list watch]",
            "nodeagents.windtunnel.dev [] [] [create]",
            "nodeagents.windtunnel.dev/status [] [] [patch]",
            "nodeinjections.windtunnel.dev [] [] [get list watch]",
            "nodeinjections.windtunnel.dev/status [] [] [patch]",
        ],
    ),
    ("agent", "default", &[]),
    (
        "operator",
        NAMESPACE,
        &[
            "chaosexperiments.windtunnel.dev [] [] [list watch patch delete]",
            "chaosexperiments.windtunnel.dev/status [] [] [update]",
            "configmaps [] [windtunnel-stop] [list watch]",
            "endpointslices.discovery.k8s.io [] [] [list watch]",
            "events.events.k8s.io [] [] [create patch]",
            "leases.coordination.k8s.io [] [] [create]",
            "leases.coordination.k8s.io [] [windtunnel-operator] [get update]",
            "nodeagents.windtunnel.dev [] [] [list watch delete]",
            "nodeinjections.windtunnel.dev [] [] [list watch create patch delete]",
            "nodes [] [] [list]",
            "pods [] [] [list watch delete]",
            "pods/eviction [] [] [create]",
            "services [] [] [get list watch]",
        ],
    ),
    (
        "operator",
        "default",
        &[
            "chaosexperiments.windtunnel.dev [] [] [list watch patch delete]",
            "chaosexperiments.windtunnel.dev/status [] [] [update]",
            "endpointslices.discovery.k8s.io [] [] [list watch]",
            "events.events.k8s.io [] [] [create patch]",
            "nodes [] [] [list]",
            "pods [] [] [list watch delete]",
            "pods/eviction [] [] [create]",
            "services [] [] [get list watch]",
        ],
    ),
];
