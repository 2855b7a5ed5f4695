//! Which pods a fault hits: the draw depends on the seed, the fault's name and the pods' names,
//! and on nothing else.

use windtunnel_crds::{fault::Target, names::hash, status::DrawnPod};

use super::{Fleet, ending::Ending};
use crate::cluster::Candidate;

/// Why a fault has no targets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) ending: Ending,
    pub(crate) message: String,
}

impl Refusal {
    pub(crate) fn new(ending: Ending, message: impl Into<String>) -> Self {
        Self {
            ending,
            message: message.into(),
        }
    }
}

/// What a draw is made from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draw<'a> {
    pub(crate) seed: &'a str,
    pub(crate) fault: &'a str,
    pub(crate) target: &'a Target,
    pub(crate) candidates: &'a [Candidate],
    /// The fault needs an agent on the target's node.
    pub(crate) fleet: Option<&'a Fleet>,
}

impl Draw<'_> {
    /// Draws the fault's targets, keeping those of `kept` that are still there.
    ///
    /// # Errors
    /// [`Refusal`] where fewer pods can be hit than were asked for, with both numbers.
    pub(crate) fn draw(&self, kept: &[DrawnPod]) -> Result<Vec<DrawnPod>, Refusal> {
        let eligible: Vec<&Candidate> = self.candidates.iter().filter(|c| c.eligible).collect();
        if let Some(pod) = eligible
            .iter()
            .find(|c| c.host_network && self.fleet.is_some())
        {
            return Err(self.refuse(
                Ending::NotAllowed,
                format!(
                    "pod {} shares its node's network; a fault on it would hit the node",
                    pod.name
                ),
            ));
        }
        let wanted = self.wanted(eligible.len())?;
        let mut usable: Vec<&Candidate> = eligible
            .iter()
            .copied()
            .filter(|c| self.unusable(c).is_none())
            .collect();
        if usable.len() < wanted {
            let why: Vec<String> = eligible
                .iter()
                .filter_map(|c| {
                    self.unusable(c)
                        .map(|why| format!("pod {} on node {}: {why}", c.name, c.node))
                })
                .take(3)
                .collect();
            return Err(self.refuse(
                Ending::NodeUnavailable,
                format!(
                    "{wanted} pods are wanted, {} can be hit ({})",
                    usable.len(),
                    why.join("; ")
                ),
            ));
        }
        usable.sort_by_cached_key(|c| {
            let fresh = !kept.iter().any(|pod| pod.uid == c.uid);
            (
                fresh,
                hash(&[self.seed, self.fault, &c.name], 32),
                c.name.clone(),
            )
        });
        Ok(usable.into_iter().take(wanted).map(drawn).collect())
    }

    /// How many of `total` eligible pods are wanted.
    fn wanted(&self, total: usize) -> Result<usize, Refusal> {
        let Target {
            selector: _,
            count,
            percent,
            containers: _,
        } = self.target;
        if total == 0 {
            return Err(self.refuse(
                Ending::TargetsMissing,
                "the selector matches no pod that is Running and Ready",
            ));
        }
        match (count, percent) {
            (Some(count), _) => {
                let count = usize::try_from(*count).unwrap_or(usize::MAX);
                if count > total {
                    return Err(self.refuse(
                        Ending::TargetsMissing,
                        format!("count is {count}, but the selector matches {total} pods that are Running and Ready"),
                    ));
                }
                Ok(count)
            }
            (None, Some(percent)) => Ok(percent.of(total)),
            (None, None) => Ok(total),
        }
    }

    fn unusable(&self, candidate: &Candidate) -> Option<String> {
        match self.fleet?.get(&candidate.node) {
            None => Some("it has no agent".to_owned()),
            Some(agent) => agent.refusal(),
        }
    }

    fn refuse(&self, ending: Ending, message: impl AsRef<str>) -> Refusal {
        Refusal::new(
            ending,
            format!("fault {}: {}", self.fault, message.as_ref()),
        )
    }
}

fn drawn(candidate: &Candidate) -> DrawnPod {
    DrawnPod {
        name: candidate.name.clone(),
        uid: candidate.uid.clone(),
        node: candidate.node.clone(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use windtunnel_crds::units::Percent;

    use super::*;
    use crate::decide::testing::{agent, candidate, target};

    fn fleet() -> Fleet {
        [("node1".to_owned(), agent()), ("node2".to_owned(), agent())].into()
    }

    fn draw(
        target: &Target,
        candidates: &[Candidate],
        fleet: &Fleet,
    ) -> Result<Vec<String>, Refusal> {
        let draw = Draw {
            seed: "s",
            fault: "f",
            target,
            candidates,
            fleet: Some(fleet),
        };
        draw.draw(&[])
            .map(|pods| pods.into_iter().map(|p| p.name).collect())
    }

    #[test]
    fn half_of_five_is_three_and_all_is_all() {
        let pods: Vec<_> = (0..5)
            .map(|i| candidate(&format!("p{i}"), "node1"))
            .collect();
        let half = Target {
            percent: Some(Percent::new(50.0).unwrap()),
            ..target("a")
        };
        assert_eq!(draw(&half, &pods, &fleet()).unwrap().len(), 3);
        assert_eq!(draw(&target("a"), &pods, &fleet()).unwrap().len(), 5);
    }

    #[test]
    fn too_few_pods_are_refused_with_both_numbers() {
        let pods = [candidate("p0", "node1")];
        let three = Target {
            count: Some(3),
            ..target("a")
        };
        let refusal = draw(&three, &pods, &fleet()).unwrap_err();
        assert_eq!(refusal.ending, Ending::TargetsMissing);
        assert!(
            refusal.message.contains("count is 3") && refusal.message.contains("matches 1"),
            "{}",
            refusal.message
        );
    }

    #[test]
    fn pods_on_a_silent_node_are_drawn_last_and_never() {
        let pods: Vec<_> = (0..4)
            .map(|i| candidate(&format!("p{i}"), ["node1", "node2"][i % 2]))
            .collect();
        let mut fleet = fleet();
        fleet.get_mut("node2").unwrap().live = false;
        let two = Target {
            count: Some(2),
            ..target("a")
        };
        assert_eq!(draw(&two, &pods, &fleet).unwrap().len(), 2);
        let refusal = draw(&target("a"), &pods, &fleet).unwrap_err();
        assert_eq!(refusal.ending, Ending::NodeUnavailable);
        assert!(
            refusal.message.contains("node2") && refusal.message.contains("silent"),
            "{}",
            refusal.message
        );
    }

    #[test]
    fn host_network_pods_are_refused() {
        let mut pod = candidate("p0", "node1");
        pod.host_network = true;
        assert_eq!(
            draw(&target("a"), &[pod], &fleet()).unwrap_err().ending,
            Ending::NotAllowed
        );
    }

    proptest! {
        #[test]
        fn same_pods_in_any_order_give_the_same_draw(
            order in Just((0..12).collect::<Vec<usize>>()).prop_shuffle(), percent in 1.0f64..100.0,
        ) {
            let pods: Vec<_> = (0..12).map(|i| candidate(&format!("p{i}"), "node1")).collect();
            let shuffled: Vec<_> = order.iter().map(|i| pods[*i].clone()).collect();
            let share = Target { percent: Some(Percent::new(percent).unwrap()), ..target("a") };
            let drawn = draw(&share, &pods, &fleet()).unwrap();
            prop_assert_eq!(&drawn, &draw(&share, &shuffled, &fleet()).unwrap());
            prop_assert_eq!(drawn.len(), share.percent.unwrap().of(12));
        }

        #[test]
        fn a_draw_anew_keeps_who_is_still_there(gone in 0usize..4, seed in "[a-z]{1,8}") {
            let pods: Vec<_> = (0..8).map(|i| candidate(&format!("p{i}"), "node1")).collect();
            let four = Target { count: Some(4), ..target("a") };
            let fleet = fleet();
            let first = Draw { seed: &seed, fault: "f", target: &four, candidates: &pods, fleet: Some(&fleet) }.draw(&[]).unwrap();
            let left: Vec<_> = pods.iter().filter(|p| p.name != first[gone].name).cloned().collect();
            let again = Draw { seed: &seed, fault: "f", target: &four, candidates: &left, fleet: Some(&fleet) }.draw(&first).unwrap();
            prop_assert_eq!(again.len(), 4);
            for pod in first.iter().filter(|p| p.name != first[gone].name) {
                prop_assert!(again.contains(pod));
            }
        }
    }
}
