//! A network fault: the table that sends the target's selected packets through its impairments.

use crate::{
    kernel::{
        link::RouteSocket,
        netns::NetNs,
        nft::{Device, Family, OwnedTable, Role, Table},
        proc::Proc,
        qdisc::Netem,
    },
    model::Counts,
    wire::NetworkTask,
};
use windtunnel_runtime::chain;

use super::{Effect, reset};

/// Most bytes that may wait in the queues of one fault. Their limits count packets, and of those that
/// the network card is to cut up later each may have 64 KiB; the sender is charged for none of them.
const MAX_HELD: u64 = 512 << 20;

/// The table, and the queues that it sends packets to.
#[derive(Debug)]
struct Impairment {
    table: OwnedTable,
    route: RouteSocket,
    /// With what each was found to do to packets.
    queues: Vec<(Device, Netem)>,
    proof: String,
}

/// Installs the table of an order and reads it back; says what the kernel holds.
pub(super) fn apply(task: NetworkTask) -> Result<Box<dyn Effect>, String> {
    let NetworkTask {
        netns: id,
        pid,
        pod: _,
        table,
        queues,
    } = task;
    let netns = NetNs::of_pid(&Proc::default(), pid).map_err(|e| chain(&e))?;
    if netns.id() != id {
        return Err(format!(
            "process {pid} is in network namespace {}, not in {id}",
            netns.id()
        ));
    }
    if table.family() == Family::Inet {
        return reset::apply(&netns, &table);
    }
    let mut route = RouteSocket::open(&netns).map_err(|e| chain(&e))?;
    let with_netem = |queue: Device| {
        let netem = route.netem(queue.index).map_err(|e| chain(&e))?;
        Ok((queue, netem))
    };
    let queues = queues
        .into_iter()
        .map(with_netem)
        .collect::<Result<_, String>>()?;
    let mut table = OwnedTable::install(&netns, &table).map_err(|e| chain(&e))?;
    let proof = table.verify().map_err(|e| chain(&e))?;
    Ok(Box::new(Impairment {
        table,
        route,
        queues,
        proof: proof.to_string(),
    }))
}

impl Effect for Impairment {
    fn proof(&mut self) -> Result<Option<String>, String> {
        Ok(Some(self.proof.clone()))
    }

    fn update(&mut self, table: Table) -> Result<(), String> {
        self.table.update(&table).map_err(|e| chain(&e))?;
        self.table.verify().map(drop).map_err(|e| chain(&e))
    }

    fn check(&mut self) -> Result<Counts, String> {
        self.table.verify().map_err(|e| chain(&e))?;
        let counters = self.table.counters().map_err(|e| chain(&e))?;
        let (mut dropped, mut held) = (Some(0), 0);
        for (queue, netem) in &self.queues {
            let held_now = self.route.netem_and_stats(queue.index);
            let (found, stats) = held_now
                .map_err(|e| chain(&e))?
                .ok_or_else(|| format!("the impairment on {} is gone", queue.name))?;
            if found.as_ref() != Some(netem) {
                return Err(format!(
                    "somebody has changed the impairment on {}",
                    queue.name
                ));
            }
            let full = stats
                .lost
                .map(|lost| u64::from(stats.drops).saturating_sub(lost));
            dropped = dropped.zip(full).map(|(sum, more)| sum + more);
            held += u64::from(stats.backlog_bytes);
        }
        if held > MAX_HELD {
            return Err(format!(
                "{held} bytes of packets waited, of {MAX_HELD} at most: the node's memory comes first"
            ));
        }
        Ok(Counts {
            matched: counters.sum(Role::Selected).packets,
            dropped,
            ..Counts::default()
        })
    }
}
