//! What product tests stand on: a cluster with windtunnel installed, and namespaces with pods that
//! can measure the network from inside.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Cluster, Node, success};
use windtunnel_tests::product::{Installation, Profile, Run};

pub(crate) use super::measure::Outcome;
use super::measure::Probes;

/// How long pods may take to be ready, or to be gone.
const BOUND: Duration = Duration::from_mins(1);
/// The port of `sample echo`.
pub(crate) const ECHO: u16 = 7;

/// A test and its name.
pub(crate) type Test = (&'static str, fn(&Stage) -> Result<()>);

/// The context of an error that no stall of a machine makes: what was promised was seen broken, and a
/// second try that goes well takes nothing of that back.
#[derive(Debug)]
pub(crate) struct Broken;

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a promise is broken")
    }
}

/// The cluster, with windtunnel on it.
pub(crate) struct Stage {
    pub(crate) cluster: &'static Cluster,
    pub(crate) windtunnel: Installation<'static>,
}

/// A namespace of one test; it goes with this value.
pub(crate) struct Space<'a> {
    pub(crate) stage: &'a Stage,
    pub(crate) name: String,
}

/// A pod to be made.
#[derive(Debug, Clone)]
pub(crate) struct Wanted<'a> {
    pub(crate) name: &'a str,
    /// The label `app`.
    pub(crate) app: &'a str,
    pub(crate) node: &'a str,
    /// Arguments of the sample program.
    pub(crate) args: &'a [&'a str],
}

/// A ready pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pod {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) node: String,
    pub(crate) v4: String,
    pub(crate) v6: String,
}

impl Stage {
    /// The running cluster, or a new one, with what is in this checkout on it.
    pub(crate) fn set() -> Result<Self> {
        let cluster = Cluster::attach_or_start()?;
        cluster.enter()?;
        // It ends with the process.
        let cluster: &'static Cluster = Box::leak(Box::new(cluster));
        let windtunnel = Installation::load(cluster, Profile::Dev)?;
        windtunnel.install(&[])?;
        for node in cluster.nodes()? {
            deepen(&node)?;
        }
        Ok(Self {
            cluster,
            windtunnel,
        })
    }

    /// A namespace of its own for a test.
    pub(crate) fn space(&self, test: &str) -> Result<Space<'_>> {
        let name = test.replace('_', "-");
        let name = format!(
            "t-{}",
            name.chars()
                .take(50)
                .collect::<String>()
                .trim_end_matches('-')
        );
        // One of an earlier try may still be ending, or nobody could be told to end it.
        let delete = [
            "delete",
            "namespace",
            &name,
            "--ignore-not-found",
            "--wait=false",
        ];
        success(&self.cluster.kubectl(&delete)?)?;
        until(&format!("no namespace {name}"), BOUND * 2, || {
            let old = self
                .cluster
                .get(&["namespace", &name, "--ignore-not-found"])?;
            Ok(old.is_null().then_some(()))
        })?;
        self.cluster.apply(&format!(
            "{{apiVersion: v1, kind: Namespace, metadata: {{name: {name}}}}}"
        ))?;
        Ok(Space { stage: self, name })
    }

    /// Runs a program in the network namespace of a pod, on its node; what it wrote.
    pub(crate) fn in_netns(&self, pod: &Pod, argv: &[&str]) -> Result<String> {
        let pid = self.pid(pod)?.to_string();
        let mut all = vec!["nsenter", "--target", &pid, "--net", "--"];
        all.extend(argv);
        self.cluster.node(&pod.node)?.run(&all)?.text()
    }

    /// The first process of a pod, as its node counts.
    pub(crate) fn pid(&self, pod: &Pod) -> Result<i32> {
        self.first_pid(&pod.node, &pod.uid)
            .with_context(|| pod.name.clone())
    }

    /// The first process of the pod with this uid on a node, as the node counts.
    pub(crate) fn first_pid(&self, node: &str, uid: &str) -> Result<i32> {
        self.pids(node, uid)?.first().copied().context("no process")
    }

    /// The processes of the pod with this uid on a node, as the node counts, from the lowest number on.
    pub(crate) fn pids(&self, node: &str, uid: &str) -> Result<Vec<i32>> {
        let script = format!(
            "cat /sys/fs/cgroup/kubepods*/pod{uid}/*/cgroup.procs /sys/fs/cgroup/kubepods*/*/pod{uid}/*/cgroup.procs 2>/dev/null | sort -n"
        );
        let text = self
            .cluster
            .node(node)?
            .run(&["sh", "-c", &script])?
            .text()?;
        let pids = text.lines().map(|line| line.trim().parse());
        pids.collect::<Result<_, _>>()
            .with_context(|| format!("processes: {text:?}"))
    }

    /// A counter of the kernel's own in a pod's network namespace: `Udp InDatagrams`, or
    /// `Udp6InDatagrams` for IPv6.
    pub(crate) fn counter(&self, pod: &Pod, name: &str) -> Result<u64> {
        let text = self.in_netns(pod, &["cat", "/proc/net/snmp", "/proc/net/snmp6"])?;
        counter(&text, name).with_context(|| format!("no counter {name} in {text}"))
    }

    /// Everything of a pod's network that a fault could change: links, queueing disciplines, tables,
    /// addresses and routes, without counters and times.
    pub(crate) fn snapshot(&self, pod: &Pod) -> Result<String> {
        let mut all = String::new();
        for argv in [
            &["ip", "-d", "link"][..],
            &["ip", "address"],
            &["ip", "route"],
            &["ip", "-6", "route"],
            &["tc", "qdisc"],
            &["nft", "-s", "list", "ruleset"],
        ] {
            all.push_str(&self.in_netns(pod, argv)?);
        }
        Ok(all)
    }

    /// Fails unless a pod's network is as an earlier snapshot says.
    pub(crate) fn unchanged(&self, pod: &Pod, before: &str) -> Result<()> {
        let now = self.snapshot(pod)?;
        let lines = |these: &str, those: &str| {
            let new = these.lines().filter(|line| !those.contains(*line));
            new.collect::<Vec<_>>().join("\n")
        };
        ensure!(
            now == before,
            "the network of pod {} is not as before; new: {:?}; gone: {:?}",
            pod.name,
            lines(&now, before),
            lines(before, &now)
        );
        Ok(())
    }

    /// The pids of the injectors on a node.
    pub(crate) fn injectors(&self, node: &str) -> Result<Vec<i32>> {
        // The bracket keeps the pattern from matching the program that looks for it.
        let found = self
            .cluster
            .node(node)?
            .run(&["sh", "-c", "pgrep -f '^/proc/self/exe [i]nject' || true"])?
            .text()?;
        Ok(found
            .lines()
            .filter_map(|line| line.trim().parse().ok())
            .collect())
    }

    /// The pid of the agent on a node.
    pub(crate) fn agent(&self, node: &str) -> Result<i32> {
        let found = self
            .cluster
            .node(node)?
            .run(&["sh", "-c", "pgrep -o -f '^/windtunnel-agent [r]un'"])?
            .text()?;
        found
            .trim()
            .parse()
            .with_context(|| format!("no agent on {node}"))
    }

    /// Node and pid of a replica of the operator, by its pod's name.
    pub(crate) fn operator(&self, pod: &str) -> Result<(String, i32)> {
        let pods = self.windtunnel.pods("operator")?;
        let named = pods.iter().find(|p| p["metadata"]["name"] == pod);
        let node = named.and_then(|p| p["spec"]["nodeName"].as_str());
        let node = node.with_context(|| format!("no operator {pod}"))?;
        let script = format!(
            "grep -lz WINDTUNNEL_IDENTITY={pod} /proc/[0-9]*/environ 2>/dev/null | grep -o '[0-9]*' || true"
        );
        let found = self
            .cluster
            .node(node)?
            .run(&["sh", "-c", &script])?
            .text()?;
        let Some(Ok(pid)) = found.lines().next().map(str::parse) else {
            bail!("no process of {pod} on {node}");
        };
        Ok((node.to_owned(), pid))
    }
}

impl<'a> Space<'a> {
    /// Makes pods and waits until all are ready.
    pub(crate) fn pods(&self, wanted: &[Wanted<'_>]) -> Result<Vec<Pod>> {
        let tag = &self.stage.windtunnel.images.tag;
        for Wanted {
            name,
            app,
            node,
            args,
        } in wanted
        {
            let args = serde_json::to_string(args)?;
            self.stage.cluster.apply(&format!(
                "
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {space}, labels: {{app: {app}}}}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: sample, image: 'windtunnel/sample:{tag}', imagePullPolicy: Never, args: {args}}}
",
                space = self.name
            ))?;
        }
        wanted.iter().map(|w| self.ready(w.name)).collect()
    }

    /// Two echoes and a client: `client` on node1, `echo` on node2 behind the Service `echo` (port 77),
    /// `other` on node2 as well.
    pub(crate) fn client_and_echoes(&self) -> Result<(Pod, Pod, Pod)> {
        self.client_and_echoes_on(&["echo"])
    }

    /// The same, with other arguments of `echo`.
    pub(crate) fn client_and_echoes_on(&self, args: &[&str]) -> Result<(Pod, Pod, Pod)> {
        let mut pods = self.pods(&[
            Wanted {
                name: "client",
                app: "client",
                node: "node1",
                args: &["idle"],
            },
            Wanted {
                name: "echo",
                app: "echo",
                node: "node2",
                args,
            },
            Wanted {
                name: "other",
                app: "other",
                node: "node2",
                args: &["echo"],
            },
        ])?;
        self.stage.cluster.apply(&format!(
            "
apiVersion: v1
kind: Service
metadata: {{name: echo, namespace: {}}}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {{app: echo}}
  ports: [{{protocol: UDP, port: 77, targetPort: {ECHO}}}]
",
            self.name
        ))?;
        let (other, echo, client) = (pods.pop(), pods.pop(), pods.pop());
        Ok((
            client.context("no client")?,
            echo.context("no echo")?,
            other.context("no other")?,
        ))
    }

    /// The pod of this name, once it is ready.
    pub(crate) fn ready(&self, name: &str) -> Result<Pod> {
        until(&format!("pod {name} ready"), BOUND, || {
            let pod = self.stage.cluster.get(&[
                "pod",
                name,
                "--namespace",
                &self.name,
                "--ignore-not-found",
            ])?;
            Ok(ready(&pod))
        })
    }

    /// Pods with a label that are ready and not on their way out.
    pub(crate) fn ready_with(&self, app: &str) -> Result<Vec<Pod>> {
        let selector = format!("app={app}");
        let pods = self.stage.cluster.get(&[
            "pods",
            "--namespace",
            &self.name,
            "--selector",
            &selector,
        ])?;
        Ok(pods["items"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(ready)
            .collect())
    }

    /// The ClusterIPs of a Service, IPv4 and IPv6.
    pub(crate) fn cluster_ips(&self, service: &str) -> Result<(String, String)> {
        let service = self
            .stage
            .cluster
            .get(&["service", service, "--namespace", &self.name])?;
        let ip = |at: usize| {
            service["spec"]["clusterIPs"][at]
                .as_str()
                .map(str::to_owned)
        };
        Ok((
            ip(0).context("no IPv4 ClusterIP")?,
            ip(1).context("no IPv6 ClusterIP")?,
        ))
    }

    /// Sends UDP probes from a pod and says what came back.
    pub(crate) fn probe(
        &self,
        from: &Pod,
        to: &str,
        count: usize,
        every: Duration,
    ) -> Result<Outcome> {
        let probes = Probes {
            every,
            ..Probes::new(&[to.to_owned()], count)
        };
        let outcome = self.probes(from, &probes)?.pop();
        outcome.context("no outcome of the probes")
    }

    /// Applies an experiment with the YAML of its spec.
    pub(crate) fn run(&self, name: &str, spec: &str) -> Result<Run<'a>> {
        Run::apply(self.stage.cluster, &self.name, name, spec)
    }

    /// An experiment that was applied before, or is no more.
    pub(crate) fn known(&self, name: &str) -> Run<'a> {
        Run::named(self.stage.cluster, &self.name, name)
    }
}

/// Lets probes wait in their sockets while a busy machine lets nobody read them, until a node's next
/// boot.
pub(crate) fn deepen(node: &Node<'_>) -> Result<()> {
    let write = "echo 8388608 >/proc/sys/net/core/rmem_max";
    node.run(&["sh", "-c", write])?.text().map(drop)
}

/// A counter of `/proc/net/snmp` or `snmp6`.
pub(crate) fn counter(text: &str, name: &str) -> Option<u64> {
    let Some((group, field)) = name.split_once(' ') else {
        let line = text.lines().find(|l| l.split(' ').next() == Some(name))?;
        return line.split_whitespace().nth(1)?.parse().ok();
    };
    let mut lines = text.lines().filter(|l| l.split(':').next() == Some(group));
    let at = lines.next()?.split(' ').position(|f| f == field)?;
    lines.next()?.split(' ').nth(at)?.parse().ok()
}

/// `address:port` of either family.
pub(crate) fn at(address: &str, port: u16) -> String {
    if address.contains(':') {
        format!("[{address}]:{port}")
    } else {
        format!("{address}:{port}")
    }
}

fn ready(pod: &Value) -> Option<Pod> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let conditions = pod["status"]["conditions"].as_array()?;
    let is_ready = conditions
        .iter()
        .any(|c| c["type"] == "Ready" && c["status"] == "True");
    if !is_ready || !pod["metadata"]["deletionTimestamp"].is_null() {
        return None;
    }
    Some(Pod {
        name: text(&pod["metadata"]["name"])?,
        uid: text(&pod["metadata"]["uid"])?,
        node: text(&pod["spec"]["nodeName"])?,
        v4: text(&pod["status"]["podIPs"][0]["ip"])?,
        v6: text(&pod["status"]["podIPs"][1]["ip"])?,
    })
}

impl Drop for Space<'_> {
    fn drop(&mut self) {
        // Nobody waits for it: names differ from test to test, and a later run of the same test is
        // told if the namespace is still ending.
        let _ = self
            .stage
            .cluster
            .kubectl(&["delete", "namespace", &self.name, "--wait=false"]);
    }
}

/// Fails unless `found` is within `share` of `wanted`.
pub(crate) fn close(what: &str, found: f64, wanted: f64, share: f64) -> Result<()> {
    ensure!(
        (found - wanted).abs() <= wanted * share,
        "{what}: {found:.2} is not within {:.1} % of {wanted:.2}",
        share * 100.0
    );
    Ok(())
}

/// What kubectl wrote, if it succeeded.
pub(crate) fn kubectl(stage: &Stage, arguments: &[&str]) -> Result<String> {
    success(&stage.cluster.kubectl(arguments)?)
}
