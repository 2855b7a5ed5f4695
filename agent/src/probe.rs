//! What this node's kernel can do, found out by doing it where it cannot hurt.

use std::time::Duration;

use windtunnel_crds::node_agent::Capability;
use windtunnel_runtime::chain;

use crate::{
    impair::{self, ImpairError},
    kernel::{
        link::LinkName,
        nft::{Addresses, Chain, Device, Direction, Selection, Table},
        qdisc::{Delay, Netem},
    },
    model::Detour,
};

/// Tries every kind of fault.
#[must_use]
pub fn capabilities() -> Vec<Capability> {
    vec![capability("network", network())]
}

fn capability(name: &str, tried: Result<(), ImpairError>) -> Capability {
    Capability {
        name: name.to_owned(),
        available: tried.is_ok(),
        message: tried.err().map(|e| chain(&e)).unwrap_or_default(),
    }
}

/// Delay in both directions, through a table that is owned.
fn network() -> Result<(), ImpairError> {
    let device = LinkName::new("eth0")?;
    let detour = |direction, ifb: &str| {
        Ok::<Detour, ImpairError>(Detour {
            direction,
            device: Device {
                name: device.clone(),
                index: 0,
            },
            ifb: LinkName::new(ifb)?,
            ifb_index: None,
            netem: Netem {
                delay: Delay {
                    latency: Duration::from_millis(1),
                    ..Delay::default()
                },
                ..Netem::new(1000)
            },
        })
    };
    let detours = [
        detour(Direction::Egress, "wtprobee")?,
        detour(Direction::Ingress, "wtprobei")?,
    ];
    impair::rehearse(&detours, |detours| Table {
        name: "windtunnel-probe".to_owned(),
        chains: detours.iter().filter_map(chain_of).collect(),
    })
}

fn chain_of(detour: &Detour) -> Option<Chain> {
    Some(Chain {
        direction: detour.direction,
        device: detour.device.clone(),
        priority: 0,
        spare: Vec::new(),
        select: vec![Selection::new("all", Addresses::Any)],
        forward_to: Device {
            name: detour.ifb.clone(),
            index: detour.ifb_index?,
        },
    })
}
