//! How exact each fault is, what it does to what it is not for, and how quickly its end undoes it.

mod measure;

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Cluster, success};
use windtunnel_tests::product::{Installation, Run};

use super::{NODE, Series};
use crate::print;
use measure::{
    Measured, calls, connections, cores, hung, losses, memory, paused, rates, restarts,
    round_trips, space,
};

const NAMESPACE: &str = "doses";
const BOUND: Duration = Duration::from_mins(1);
/// The port that takes in bytes.
const SINK: u16 = 9;

/// A fault and how it is measured.
struct Dose {
    /// The YAML of its kind.
    fault: &'static str,
    measure: fn(&Bench<'_>) -> Result<Measured>,
    /// Shell on the node: what to begin before the injector is killed, and what holds when its
    /// effect is gone. `$pid` is the target's, `$group` its memory control group, `$free` and
    /// `$used` what was free on its volume and used of its memory before, `$echo` its peer's address.
    undo: Option<(&'static str, &'static str)>,
}

const DOSES: &[Dose] = &[
    Dose {
        fault: "network: {delay: {latency: 100ms}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: round_trips,
        undo: None,
    },
    Dose {
        fault: "network: {delay: {latency: 500ms, jitter: 100ms}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: round_trips,
        undo: None,
    },
    Dose {
        fault: "network: {loss: {percent: 20}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: losses,
        undo: None,
    },
    Dose {
        fault: "network: {partition: {}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: losses,
        undo: None,
    },
    Dose {
        fault: "network: {bandwidth: {rate: 10M}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: rates,
        undo: None,
    },
    Dose {
        fault: "network: {delay: {latency: 20ms}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: rates,
        undo: None,
    },
    Dose {
        fault: "network: {reset: {}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: connections,
        undo: Some((
            "",
            "nsenter -t $pid -n bash -c \": >/dev/tcp/$echo/9\" 2>/dev/null",
        )),
    },
    Dose {
        fault: "network: {duplicate: {percent: 10, correlation: 50}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: losses,
        undo: None,
    },
    Dose {
        fault: "network: {duplicate: {percent: 10}, peers: {podSelector: {matchLabels: {app: echo}}}}",
        measure: losses,
        undo: None,
    },
    Dose {
        fault: "io: {volume: /data, latency: {delay: 10ms}}",
        measure: calls,
        undo: None,
    },
    Dose {
        fault: "io: {volume: /data, error: {errno: ENOSPC}, operations: [Open], percent: 50}",
        measure: calls,
        undo: None,
    },
    Dose {
        fault: "io: {volume: /data, hang: {}}",
        measure: hung,
        undo: Some((
            "rm -f /run/went-on; (cat /proc/$pid/root/data/file >/dev/null; : >/run/went-on) & sleep 0.2",
            "[ -e /run/went-on ]",
        )),
    },
    Dose {
        fault: "cpu: {load: 50}",
        measure: cores,
        undo: Some(("", "! pgrep -f '^windtunnel-[c]hild' >/dev/null")),
    },
    Dose {
        fault: "memory: {percent: 50}",
        measure: memory,
        undo: Some((
            "",
            "[ $(cat $group/memory.current) -lt $((used + 4194304)) ]",
        )),
    },
    Dose {
        fault: "diskFill: {volume: /data, size: 64Mi}",
        measure: space,
        undo: Some((
            "",
            "[ $(stat -f -c %f /proc/$pid/root/data) -ge $((free - 256)) ]",
        )),
    },
    Dose {
        fault: "containerPause: {}",
        measure: paused,
        undo: Some(("", "! grep -q '^State:.[tT]' /proc/$pid/status")),
    },
    // The target is another after this.
    Dose {
        fault: "containerKill: {}",
        measure: restarts,
        undo: None,
    },
];

/// The pods that are measured with.
struct Bench<'a> {
    cluster: &'a Cluster,
    echo: String,
    other: String,
    /// The target's first process, its memory control group, and what was free and used before.
    facts: String,
}

/// Measures each dose once, and its end so many times, and prints the table.
pub(super) fn measure(cluster: &Cluster, windtunnel: &Installation<'_>, runs: usize) -> Result<()> {
    let bench = Bench::make(cluster, windtunnel)?;
    print::line(
        "| fault | measured in the target | without the fault | beside it | beside it without | injector killed → undone, p50 / max ms |",
    );
    print::line("| --- | --- | --- | --- | --- | --- |");
    for dose in DOSES {
        let before = (dose.measure)(&bench)?;
        let mut undone = Series::default();
        let mut measured = None;
        for run in 0..runs {
            // A network is the whole pod's.
            let containers = if dose.fault.starts_with("network") {
                ""
            } else {
                ", containers: [app]"
            };
            let spec = format!(
                "duration: 2m\nfaults:\n- name: dose\n  target: {{selector: {{matchLabels: {{app: subject}}}}{containers}}}\n  {}",
                dose.fault
            );
            let run = Run::apply(cluster, NAMESPACE, &format!("dose-{run}"), &spec)?;
            run.wait("Injected", BOUND)?;
            if measured.is_none() {
                measured = Some((dose.measure)(&bench)?);
            }
            match dose.undo {
                Some(undo) => undone.add(bench.kill(undo)?),
                // The first table has it, by packets and calls.
                None => break,
            }
        }
        let Measured { hit, spared } = measured.context("no runs")?;
        let undone = dose.undo.map_or_else(String::new, |_| undone.brief());
        print::line(&format!(
            "| `{}` | {hit} | {} | {spared} | {} | {undone} |",
            dose.fault, before.hit, before.spared
        ));
    }
    success(&cluster.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"])?).map(drop)
}

impl<'a> Bench<'a> {
    fn make(cluster: &'a Cluster, windtunnel: &Installation<'_>) -> Result<Self> {
        let tag = &windtunnel.images.tag;
        cluster.apply(&format!(
            "
apiVersion: v1
kind: Namespace
metadata: {{name: {NAMESPACE}}}
---
apiVersion: v1
kind: Pod
metadata: {{name: subject, namespace: {NAMESPACE}, labels: {{app: subject}}}}
spec:
  nodeName: {NODE}
  terminationGracePeriodSeconds: 0
  volumes: [{{name: data, emptyDir: {{}}}}, {{name: spare, emptyDir: {{}}}}]
  containers:
  - name: app
    image: 'windtunnel/sample:{tag}'
    imagePullPolicy: Never
    args: [idle]
    resources: {{limits: {{cpu: 500m, memory: 128Mi}}, requests: {{cpu: 10m}}}}
    volumeMounts: [{{name: data, mountPath: /data}}, {{name: spare, mountPath: /spare}}]
{}{}",
            peer("echo", tag),
            peer("other", tag)
        ))?;
        let address = |name: &str| {
            until(&format!("pod {name}"), BOUND, || {
                let pod = cluster.get(&["pod", name, "--namespace", NAMESPACE])?;
                let is_ready = pod["status"]["containerStatuses"][0]["ready"] == true;
                let uid = pod["metadata"]["uid"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                let ip = pod["status"]["podIP"].as_str().map(str::to_owned);
                Ok(ip.filter(|_| is_ready).map(|ip| (ip, uid)))
            })
        };
        let (_, uid) = address("subject")?;
        let bench = Self {
            cluster,
            echo: address("echo")?.0,
            other: address("other")?.0,
            facts: String::new(),
        };
        bench.disk("/data/file", 1)?;
        bench.disk("/spare/file", 1)?;
        let facts = bench.shell(&format!(
            "group=$(ls -d /sys/fs/cgroup/kubepods*/pod{uid} /sys/fs/cgroup/kubepods*/*/pod{uid} 2>/dev/null)
            pid=$(cat $group/*/cgroup.procs | sort -n | tail -1)
            echo \"pid=$pid; group=$group; free=$(stat -f -c %f /proc/$pid/root/data); used=$(cat $group/memory.current); echo={}\"",
            bench.echo
        ))?;
        Ok(Self { facts, ..bench })
    }

    fn exec(&self, arguments: &[&str]) -> Result<Value> {
        let mut argv = vec!["/windtunnel-sample"];
        argv.extend(arguments);
        let text = self.cluster.pod_exec(NAMESPACE, "subject", "app", &argv)?;
        serde_json::from_str(&text).with_context(|| text.clone())
    }

    fn disk(&self, file: &str, count: usize) -> Result<Value> {
        let count = count.to_string();
        self.exec(&["disk", "--file", file, "--count", &count])
    }

    /// Runs shell on the node; what it wrote.
    fn shell(&self, script: &str) -> Result<String> {
        let script = format!("{}\n{script}", self.facts);
        let node = self.cluster.node(NODE)?;
        Ok(node.run(&["sh", "-c", &script])?.text()?.trim().to_owned())
    }

    /// Kills the injector; how long until its effect is gone.
    fn kill(&self, (first, gone): (&str, &str)) -> Result<Duration> {
        let micros = self.shell(&format!(
            "{first}
            injector=$(pgrep -f '^/proc/self/exe [i]nject') || exit 1
            before=$(date +%s%N); kill -9 $injector
            until {gone}; do :; done
            echo $((($(date +%s%N) - before) / 1000))"
        ))?;
        Ok(Duration::from_micros(
            micros.parse().with_context(|| micros.clone())?,
        ))
    }
}

/// The manifest of a pod that echoes and takes in bytes, by its name as its label.
fn peer(name: &str, tag: &str) -> String {
    format!(
        "
---
apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {NAMESPACE}, labels: {{app: {name}}}}}
spec:
  nodeName: {NODE}
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: echo, image: 'windtunnel/sample:{tag}', imagePullPolicy: Never, args: [echo]}}
  - {{name: sink, image: 'windtunnel/sample:{tag}', imagePullPolicy: Never, args: [sink, --port={SINK}]}}
"
    )
}
