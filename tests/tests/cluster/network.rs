//! The network of the cluster works as that of a real one, in both families.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::Api;
use kube::api::ListParams;
use windtunnel_tests::cluster::poll::until;

use super::world::{NAMESPACE, PORT, World};

const BOUND: Duration = Duration::from_secs(20);

pub(crate) fn pods_reach_each_other(world: &World) -> Result<()> {
    let probes = world.probes()?;
    for from in &probes {
        for to in &probes {
            let v4 = world.exec(from, &["get", "tcp4", &format!("{}:{PORT}", to.v4)])?;
            let v6 = world.exec(from, &["get", "tcp6", &format!("[{}]:{PORT}", to.v6)])?;
            ensure!(
                v4 == to.name && v6 == to.name,
                "{from:?} reached {v4:?} and {v6:?}, not {to:?}"
            );
        }
    }
    Ok(())
}

pub(crate) fn service_is_reached(world: &World) -> Result<()> {
    let services: Vec<Service> = world.list(&["services", "--namespace", NAMESPACE])?;
    let spec = services
        .first()
        .and_then(|service| service.spec.as_ref())
        .context("no Service")?;
    let mut addresses = spec.cluster_ips.iter().flatten();
    let v4 = format!("{}:80", addresses.next().context("no IPv4 address")?);
    let v6 = format!("[{}]:80", addresses.next().context("no IPv6 address")?);
    let name = format!("probe.{NAMESPACE}.svc.cluster.local:80");
    let probes = world.probes()?;
    for from in &probes {
        for (network, address) in [
            ("tcp4", &v4),
            ("tcp6", &v6),
            ("tcp4", &name),
            ("tcp6", &name),
        ] {
            // kube-proxy follows the endpoints with a delay; each must answer in the end.
            for to in &probes {
                until(
                    &format!("{} through {network} {address}", to.name),
                    BOUND,
                    || {
                        let answer = world.exec(from, &["get", network, address]);
                        Ok(answer.ok().filter(|answer| *answer == to.name))
                    },
                )?;
            }
        }
    }
    Ok(())
}

pub(crate) fn this_process_reaches_pods(world: &World) -> Result<()> {
    for probe in world.probes()? {
        for address in [
            format!("{}:{PORT}", probe.v4),
            format!("[{}]:{PORT}", probe.v6),
        ] {
            let mut answer = String::new();
            TcpStream::connect(&address)
                .and_then(|mut stream| stream.read_to_string(&mut answer))
                .with_context(|| format!("ask {address}"))?;
            ensure!(
                answer.trim_end() == probe.name,
                "{address} answered {answer:?}"
            );
        }
    }
    Ok(())
}

pub(crate) fn client_reaches_the_api_server(world: &World) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let pods = runtime.block_on(async {
        let api: Api<Pod> = Api::namespaced(world.cluster.client().await?, NAMESPACE);
        Ok::<_, anyhow::Error>(api.list(&ListParams::default()).await?)
    })?;
    ensure!(!pods.items.is_empty(), "no pods listed");
    Ok(())
}

pub(crate) fn logs_and_commands(world: &World) -> Result<()> {
    let probes = world.probes()?;
    let probe = probes.first().context("no pods")?;
    let refused = world.exec(probe, &["get", "tcp4", "127.0.0.1:1"]);
    let told = refused
        .err()
        .is_some_and(|error| format!("{error:#}").contains("refused"));
    ensure!(told, "the error of a command was lost");
    let log = world.cluster.logs(NAMESPACE, &probe.name, "probe")?;
    ensure!(log.is_empty(), "the probe wrote {log:?}");
    Ok(())
}
