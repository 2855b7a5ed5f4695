//! Packets that a fault is asked to hit and an older one has: two selections that were apart when
//! they were prepared, and of which one was widened since by an update of its peers.

use super::Observed;
use crate::{
    model::{Entry, State},
    network,
};

/// What is said of a fault in place some of whose packets an older one on the same pod has.
pub(super) fn told(o: &Observed, entry: &Entry) -> Option<String> {
    let asked = |key| o.fault(key)?.1.network.as_ref();
    let (own, fault) = (entry.network()?, asked(&entry.key)?);
    let is_older = |other: &&Entry| {
        other.key.pod == entry.key.pod
            && matches!(other.state, State::Injected { .. })
            && other
                .network()
                .is_some_and(|other| other.priority < own.priority)
    };
    let older =
        o.entries.values().filter(is_older).find(|other| {
            asked(&other.key).is_some_and(|theirs| network::compete(fault, theirs))
        })?;
    Some(format!(
        "fault {} of experiment {}, which is older, has the packets that both select by now",
        older.key.fault, older.experiment.name
    ))
}

#[cfg(test)]
mod tests {
    use windtunnel_crds::injection::NodeNetworkFault;

    use super::*;
    use crate::{
        decide::testing::{Sim, UID},
        model::Objects,
        testing::{all_traffic, entry, injection},
    };

    /// A fault in place on a pod, and an older one of another experiment beside it.
    fn two() -> Sim {
        let mut sim = Sim::injected(&["a"]);
        let mut other = entry("a");
        other.key.injection = "older".to_owned();
        other.experiment.name = "first".to_owned();
        other.state = sim.o.entries.values().next().unwrap().state.clone();
        for own in sim.o.entries.values_mut() {
            if let Objects::Network(network) = &mut own.objects {
                network.priority = 1;
            }
        }
        sim.o.entries.insert(other.key.clone(), other);
        let peers_apart = NodeNetworkFault {
            peers: Some(Vec::new()),
            ..all_traffic()
        };
        let older = injection("older", &["a"], peers_apart);
        sim.o
            .injections
            .as_mut()
            .unwrap()
            .insert("older".to_owned(), older);
        sim
    }

    fn said(sim: &Sim, of: &str) -> Option<String> {
        let entry = sim.o.entries.values().find(|e| e.key.injection == of);
        told(&sim.o, entry.unwrap())
    }

    #[test]
    fn the_younger_says_who_has_its_packets() {
        let mut sim = two();
        assert_eq!(said(&sim, UID), None, "they are apart");
        let injections = sim.o.injections.as_mut().unwrap();
        injections.get_mut("older").unwrap().spec.faults[0].network = Some(all_traffic());
        let said_by_younger = said(&sim, UID).unwrap();
        assert!(
            said_by_younger.contains("of experiment first"),
            "{said_by_younger}"
        );
        assert_eq!(said(&sim, "older"), None, "the older has them all");
    }
}
