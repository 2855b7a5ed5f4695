//! What a fault does to its target, and to what is beside it.

use std::thread;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use super::{Bench, NAMESPACE, SINK};

/// What was measured inside the target.
pub(super) struct Measured {
    /// Of what the fault is for.
    pub(super) hit: String,
    /// Of the same beside it, which the fault is not for.
    pub(super) spared: String,
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
    let [echo, other] = [&bench.echo, &bench.other].map(|ip| format!("{ip}:7"));
    let outcomes = bench.exec(&[
        "probe",
        "--to",
        &echo,
        "--to",
        &other,
        "--count",
        &count,
        "--every-micros",
        &every,
    ])?;
    Ok([outcomes[0].clone(), outcomes[1].clone()])
}

pub(super) fn round_trips(bench: &Bench<'_>) -> Result<Measured> {
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

pub(super) fn losses(bench: &Bench<'_>) -> Result<Measured> {
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

pub(super) fn calls(bench: &Bench<'_>) -> Result<Measured> {
    Ok(Measured {
        hit: calls_told(&bench.disk("/data/file", 200)?),
        spared: calls_told(&bench.disk("/spare/file", 200)?),
    })
}

pub(super) fn hung(bench: &Bench<'_>) -> Result<Measured> {
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

pub(super) fn cores(bench: &Bench<'_>) -> Result<Measured> {
    let usage = bench.exec(&["usage", "--millis", "10000"])?;
    Ok(Measured {
        hit: format!("{}m of 500m used", usage["millicores"]),
        spared: String::new(),
    })
}

pub(super) fn memory(bench: &Bench<'_>) -> Result<Measured> {
    let held = bench.shell("echo $((($(cat $group/memory.current) - used) / 1024))")?;
    Ok(Measured {
        hit: format!("{:.1} of 128 MiB held", held.parse::<f64>()? / 1024.0),
        spared: String::new(),
    })
}

pub(super) fn space(bench: &Bench<'_>) -> Result<Measured> {
    let filled = bench.shell(
        "echo $(((free - $(stat -f -c %f /proc/$pid/root/data)) * $(stat -f -c %S /proc/$pid/root/data) / 1024))",
    )?;
    Ok(Measured {
        hit: format!("{:.1} MiB filled", filled.parse::<f64>()? / 1024.0),
        spared: calls_told(&bench.disk("/spare/file", 200)?),
    })
}

pub(super) fn paused(bench: &Bench<'_>) -> Result<Measured> {
    let stopped = bench.shell("grep -l '^State:.[tT]' /proc/$pid/task/*/status | wc -l")?;
    let all = bench.shell("ls /proc/$pid/task | wc -l")?;
    Ok(Measured {
        hit: format!("{stopped} of {all} threads stopped"),
        spared: String::new(),
    })
}

/// Bits per second that leave the target for each of the two others, by its link's counters.
pub(super) fn rates(bench: &Bench<'_>) -> Result<Measured> {
    Ok(Measured {
        hit: rate(bench, &bench.echo)?,
        spared: rate(bench, &bench.other)?,
    })
}

fn rate(bench: &Bench<'_>, ip: &str) -> Result<String> {
    let to = format!("{ip}:{SINK}");
    let bits = thread::scope(|scope| {
        let blast = scope.spawn(|| bench.exec(&["blast", "--to", &to, "--millis", "6000"]));
        let bits = bench.shell(
            "sent() { awk '$1 == \"eth0:\" { print $10 }' /proc/$pid/net/dev; }
            idle=$(sent); for i in $(seq 500); do [ $(sent) -gt $((idle + 500000)) ] && break; sleep 0.01; done
            from=$(sent); begun=$(date +%s%N); sleep 4
            echo $((($(sent) - from) * 8000 / (($(date +%s%N) - begun) / 1000000)))",
        );
        blast.join().map_err(|_| anyhow!("the blast panicked"))??;
        bits
    })?;
    let bits: f64 = bits.parse().with_context(|| bits.clone())?;
    Ok(format!("{:.2} Mbit/s", bits / 1e6))
}

/// Whether connections can be opened.
pub(super) fn connections(bench: &Bench<'_>) -> Result<Measured> {
    let told = |ip: &str| {
        let said = bench.shell(&format!(
            "nsenter -t $pid -n timeout 10 bash -c ': >/dev/tcp/{ip}/{SINK} && echo opened' 2>&1 | tail -1; true"
        ))?;
        let is_refused = said.contains("refused");
        anyhow::Ok(if is_refused {
            "refused".to_owned()
        } else {
            said
        })
    };
    Ok(Measured {
        hit: told(&bench.echo)?,
        spared: told(&bench.other)?,
    })
}

/// Whether the container is the one it was.
pub(super) fn restarts(bench: &Bench<'_>) -> Result<Measured> {
    let pod = bench
        .cluster
        .get(&["pod", "subject", "--namespace", NAMESPACE])?;
    let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
    let is_there = bench.shell("[ -d /proc/$pid ] && echo yes; true")? == "yes";
    Ok(Measured {
        hit: if is_there {
            "runs".to_owned()
        } else {
            format!("its processes are gone, {restarts} restarts")
        },
        spared: String::new(),
    })
}
