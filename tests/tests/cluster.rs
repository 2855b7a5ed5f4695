//! Tests that need a real cluster. One cluster serves all of them: the running one named by
//! `WINDTUNNEL_LAB_NAME`, else `default`; if there is none, one is started and ends with this
//! program. Tests run one after the other, since some take nodes and the control plane down.

mod cluster {
    pub(crate) mod gone;
    pub(crate) mod network;
    pub(crate) mod parts;
    pub(crate) mod world;
}

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use libtest_mimic::{Arguments, Trial};
use windtunnel_tests::cluster::Cluster;

use cluster::world::World;
use cluster::{gone, network, parts};

type Test = fn(&World) -> Result<()>;

const TESTS: &[(&str, Test)] = &[
    ("nodes_are_ready_in_both_families", parts::nodes_are_ready),
    (
        "pods_reach_each_other_across_nodes",
        network::pods_reach_each_other,
    ),
    (
        "a_service_is_reached_by_address_and_by_name",
        network::service_is_reached,
    ),
    (
        "this_process_reaches_pods",
        network::this_process_reaches_pods,
    ),
    (
        "a_client_reaches_the_api_server",
        network::client_reaches_the_api_server,
    ),
    ("logs_and_commands_of_a_pod", network::logs_and_commands),
    (
        "a_killed_node_service_is_started_again",
        parts::service_is_started_again,
    ),
    (
        "a_stopped_node_service_stays_stopped",
        parts::service_stays_stopped,
    ),
    (
        "a_paused_api_server_answers_again",
        parts::paused_api_server,
    ),
    (
        "etcd_and_api_server_can_be_restarted",
        parts::control_plane_restarts,
    ),
    ("a_cut_node_is_lost_and_comes_back", parts::cut_node),
    ("a_killed_node_brings_its_pods_back", parts::killed_node),
    (
        "nothing_is_left_when_the_holder_is_killed",
        gone::nothing_is_left,
    ),
    (
        "nothing_is_left_when_a_start_is_killed",
        gone::nothing_is_left_of_a_start,
    ),
    ("a_lone_kernel_runs_a_command", gone::lone_kernel),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(1);
    let world = if arguments.list {
        Ok(None)
    } else {
        start().map(Some)
    };
    let world = match world {
        Ok(world) => world.map(Arc::new),
        Err(error) => {
            let _ = writeln!(io::stderr(), "no cluster to test on: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let trials = TESTS.iter().map(|&(name, test)| {
        let world = world.clone();
        Trial::test(name, move || {
            let world = world
                .context("no cluster")
                .map_err(|error| error.to_string())?;
            test(&world).map_err(|error| format!("{error:#}").into())
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn start() -> Result<World> {
    let cluster = Cluster::attach_or_start()?;
    cluster.enter()?;
    World::new(cluster)
}
