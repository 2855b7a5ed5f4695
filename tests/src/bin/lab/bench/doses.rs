//! How exact each fault is, what it does to what it is not for, and how quickly its end undoes it.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use windtunnel_tests::cluster::poll::until;
use windtunnel_tests::cluster::{Cluster, success};
use windtunnel_tests::product::{Installation, Run};

use super::{NODE, Series, echo};
use crate::print;

const NAMESPACE: &str = "doses";
const BOUND: Duration = Duration::from_mins(1);

/// A fault and how it is measured.
struct Dose {
    /// The YAML of its kind.
    fault: &'static str,
    measure: fn(&Bench<'_>) -> Result<Measured>,
    /// Shell on the node: what to begin before the injector is killed, and what holds when its
    /// effect is gone. `$pid` is the target's, `$group` its memory control group, `$free` and
    /// `$used` what was free on its volume and used of its memory before.
    undo: Option<(&'static str, &'static str)>,
}

/// What was measured inside the target.
struct Measured {
    /// Of what the fault is for.
    hit: String,
    /// Of the same beside it, which the fault is not for.
    spared: String,
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
        "| fault | measured in the target | before the fault | the same beside it | injector killed → undone, p50 / max ms |",
    );
    print::line("| --- | --- | --- | --- | --- |");
    for dose in DOSES {
        let before = (dose.measure)(&bench)?.hit;
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
            "| `{}` | {hit} | {before} | {spared} | {undone} |",
            dose.fault
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
            echo("echo", NAMESPACE, tag),
            echo("other", NAMESPACE, tag)
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
            echo: format!("{}:7", address("echo")?.0),
            other: format!("{}:7", address("other")?.0),
            facts: String::new(),
        };
        bench.disk("/data/file", 1)?;
        bench.disk("/spare/file", 1)?;
        let facts = bench.shell(&format!(
            "group=$(ls -d /sys/fs/cgroup/kubepods*/pod{uid} /sys/fs/cgroup/kubepods*/*/pod{uid} 2>/dev/null)
            pid=$(cat $group/*/cgroup.procs | sort -n | tail -1)
            echo \"pid=$pid; group=$group; free=$(stat -f -c %f /proc/$pid/root/data); used=$(cat $group/memory.current)\""
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

/// Numbers at a place of some outcomes, with the others left out.
fn numbers(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_f64)
        .collect()
}

/// Mean and standard deviation.
fn spread(all: &[f64]) -> (f64, f64) {
    #[expect(clippy::cast_precision_loss, reason = "a few thousand numbers")]
    let count = all.len() as f64;
    let mean = all.iter().sum::<f64>() / count;
    let square = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
    (mean, square.sqrt())
}

/// Half are below it.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Probes of both echoes at the same time.
fn probes(bench: &Bench<'_>, count: usize, every_micros: u64) -> Result<[Value; 2]> {
    let (count, every) = (count.to_string(), every_micros.to_string());
    let outcomes = bench.exec(&[
        "probe",
        "--to",
        &bench.echo,
        "--to",
        &bench.other,
        "--count",
        &count,
        "--every-micros",
        &every,
    ])?;
    Ok([outcomes[0].clone(), outcomes[1].clone()])
}

fn round_trips(bench: &Bench<'_>) -> Result<Measured> {
    let told = |outcome: &Value| {
        let all = numbers(&outcome["millis"]);
        let (mean, deviation) = spread(&all);
        format!(
            "round trip {mean:.1} ± {deviation:.1} ms, p50 {:.1}, n {}",
            median(all.clone()),
            all.len()
        )
    };
    let [echo, other] = probes(bench, 500, 10_000)?;
    Ok(Measured {
        hit: told(&echo),
        spared: told(&other),
    })
}

fn losses(bench: &Bench<'_>) -> Result<Measured> {
    let told = |outcome: &Value| {
        let count = |name: &str| outcome[name].as_f64().unwrap_or(f64::NAN);
        let percent = |part: f64| part * 100.0 / count("sent");
        format!(
            "{:.1} % lost, {:.1} % doubled, n {}",
            percent(count("sent") - count("answered")),
            percent(count("duplicates")),
            count("sent")
        )
    };
    let [echo, other] = probes(bench, 4000, 2_000)?;
    Ok(Measured {
        hit: told(&echo),
        spared: told(&other),
    })
}

fn calls_told(outcome: &Value) -> String {
    let told = ["open", "read", "write"].map(|call| {
        let took = numbers(&outcome[call]["millis"]);
        let failed = numbers(&outcome[call]["errors"]).len();
        let all = took.len() + failed;
        if failed > 0 {
            format!("{call} {failed} of {all} fail")
        } else {
            format!("{call} {:.2} ms", median(took))
        }
    });
    told.join(", ")
}

fn calls(bench: &Bench<'_>) -> Result<Measured> {
    Ok(Measured {
        hit: calls_told(&bench.disk("/data/file", 200)?),
        spared: calls_told(&bench.disk("/spare/file", 200)?),
    })
}

fn hung(bench: &Bench<'_>) -> Result<Measured> {
    let outcome = bench.disk("/data/file", 1)?;
    let hangs = outcome["open"]["hung"] == 1;
    Ok(Measured {
        hit: if hangs {
            "open hangs".to_owned()
        } else {
            calls_told(&outcome)
        },
        spared: calls_told(&bench.disk("/spare/file", 200)?),
    })
}

fn cores(bench: &Bench<'_>) -> Result<Measured> {
    let usage = bench.exec(&["usage", "--millis", "10000"])?;
    Ok(Measured {
        hit: format!("{}m of 500m used", usage["millicores"]),
        spared: String::new(),
    })
}

fn memory(bench: &Bench<'_>) -> Result<Measured> {
    let held = bench.shell("echo $((($(cat $group/memory.current) - used) / 1024))")?;
    Ok(Measured {
        hit: format!("{:.1} of 128 MiB held", held.parse::<f64>()? / 1024.0),
        spared: String::new(),
    })
}

fn space(bench: &Bench<'_>) -> Result<Measured> {
    let filled = bench.shell(
        "echo $(((free - $(stat -f -c %f /proc/$pid/root/data)) * $(stat -f -c %S /proc/$pid/root/data) / 1024))",
    )?;
    Ok(Measured {
        hit: format!("{:.1} MiB filled", filled.parse::<f64>()? / 1024.0),
        spared: calls_told(&bench.disk("/spare/file", 200)?),
    })
}

fn paused(bench: &Bench<'_>) -> Result<Measured> {
    let stopped = bench.shell("grep -l '^State:.[tT]' /proc/$pid/task/*/status | wc -l")?;
    let all = bench.shell("ls /proc/$pid/task | wc -l")?;
    Ok(Measured {
        hit: format!("{stopped} of {all} threads stopped"),
        spared: String::new(),
    })
}
