//! The network fault: what happens to packets, in which direction, to and from whom.

use kube::{KubeSchema, core::Rule};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    peers::Peers,
    units::{BitRate, GoDuration, Percent, at_most, positive},
};

/// What happens to packets.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new(
    "has(self.delay) || has(self.loss) || has(self.duplicate) || has(self.corrupt) || has(self.reorder) || has(self.bandwidth) || has(self.partition) || has(self.reset)")
    .message("needs at least one of delay, loss, duplicate, corrupt, reorder, bandwidth, or partition or reset"))]
#[x_kube(validation = Rule::new(
    "!has(self.partition) || !(has(self.delay) || has(self.loss) || has(self.duplicate) || has(self.corrupt) || has(self.reorder) || has(self.bandwidth))")
    .message("partition goes alone: of packets that vanish nothing is left to impair").field_path(".partition"))]
#[x_kube(validation = Rule::new(
    "!has(self.reset) || !(has(self.delay) || has(self.loss) || has(self.duplicate) || has(self.corrupt) || has(self.reorder) || has(self.bandwidth) || has(self.partition))")
    .message("reset goes alone: of connections that are reset nothing is left to impair").field_path(".reset"))]
#[x_kube(validation = Rule::new("!has(self.reset) || self.direction == 'Egress'")
    .message("reset acts on connections, both ways, and takes no direction").field_path(".direction"))]
#[x_kube(validation = Rule::new("!has(self.reorder) || has(self.delay)")
    .message("reorder needs delay: the packets that are sent at once overtake the delayed ones").field_path(".reorder"))]
pub struct NetworkFault {
    /// Each packet is held back for a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay: Option<Delay>,

    /// Packets vanish silently, as on a wire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<Loss>,

    /// Packets are sent twice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duplicate: Option<Chance>,

    /// One bit at a random place of the packet is flipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub corrupt: Option<Chance>,

    /// Packets overtake those before them. Needs `delay`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reorder: Option<Reorder>,

    /// The selected packets together pass at no more than this rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,

    /// No packet passes, silently, as if a cable were cut: the sender is told of no error. One way
    /// or both, by `direction`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<Partition>,

    /// TCP connections are reset, whoever opened them: those that are open end at once, and whoever
    /// opens one is refused. Both ends see it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset: Option<Reset>,

    /// Egress: packets that the target sends. Ingress: packets that it receives. Both: each
    /// direction has the whole dose, so that a round trip meets it twice.
    #[serde(default)]
    pub direction: Direction,

    /// Only packets to (egress) or from (ingress) these peers. A packet is meant when its peer is in
    /// any of podSelector, services, cidrs and hosts (if none of them is set: any peer), and its ports
    /// are in `ports` and `localPorts` where those are set. The operator keeps the addresses current
    /// while the fault lasts; a fault may have 4096 of them. Default: all traffic of the pod, loopback
    /// excepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peers: Option<Peers>,

    /// What is left alone even if it matches. Node: every address of the target's own node, so
    /// that probes do not restart the target (traffic that arrives with a node's address, as by
    /// NodePort, is left alone with it). ClusterDNS: the nameservers of the target and of the
    /// cluster, port 53. Default: both; an empty list spares nothing.
    #[serde(default = "spare_all")]
    #[schemars(length(max = 2))]
    #[x_kube(merge_strategy = kube::core::ListMerge::Set)]
    pub spare: Vec<Spare>,
}

fn spare_all() -> Vec<Spare> {
    vec![Spare::Node, Spare::ClusterDNS]
}

/// No packet passes.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {}

/// Connections are reset.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reset {}

/// How long packets are held back.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = jitter_within_latency())]
#[x_kube(validation = Rule::new("has(self.jitter) || !has(self.distribution)")
    .message("distribution needs jitter").field_path(".distribution"))]
pub struct Delay {
    /// The mean delay of a packet, added to what the network takes anyway: above 0s, to 60s.
    #[x_kube(validation = positive(), validation = at_most("60s"))]
    pub latency: GoDuration,

    /// How far the delay of a packet may lie from `latency`, on either side (for the
    /// distributions but Uniform: its standard deviation). At most 2s, and no more than `latency`. Packets
    /// with different delays overtake each other, as on a real path. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = at_most("2s"))]
    pub jitter: Option<GoDuration>,

    /// How the delays are spread. Uniform: evenly from latency - jitter to latency + jitter. Normal: as a
    /// bell curve. Pareto: with a long tail. ParetoNormal: a quarter bell curve, three quarters long
    /// tail. Default: Uniform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distribution: Option<Distribution>,
}

fn jitter_within_latency() -> Rule {
    let pattern = crate::units::DURATION_PATTERN;
    Rule::new(format!(
        "!has(self.jitter) || !self.jitter.matches(r'{pattern}') || !self.latency.matches(r'{pattern}') \
         || duration(self.jitter) <= duration(self.latency)"
    ))
    .message("jitter must not exceed latency: a packet cannot arrive before it is sent")
    .field_path(".jitter")
}

/// How delays are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Distribution {
    /// Evenly between latency - jitter and latency + jitter.
    Uniform,
    /// As a bell curve.
    Normal,
    /// With a long tail.
    Pareto,
    /// A quarter bell curve, three quarters long tail.
    ParetoNormal,
}

/// Which packets vanish: a share of them, or bursts.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.percent) != has(self.gilbertElliott)")
    .message("give either percent or gilbertElliott"))]
#[x_kube(validation = Rule::new("!has(self.correlation) || has(self.percent)")
    .message("correlation goes with percent; a burst is described by gilbertElliott").field_path(".correlation"))]
pub struct Loss {
    /// The share of packets that vanish, each independent of the others but for `correlation`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub percent: Option<Percent>,

    /// How much the fate of a packet depends on that of the one before; the share of packets stays
    /// what `percent` says. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation: Option<Percent>,

    /// Loss in bursts, by the Gilbert-Elliott model: the link is in a good or in a bad state, and
    /// each packet may change it. Each value is the chance per packet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gilbert_elliott: Option<GilbertElliott>,
}

/// A link with a good and a bad state.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GilbertElliott {
    /// p: the chance that a good link turns bad.
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub good_to_bad: Percent,
    /// r: the chance that a bad link turns good. A burst is 100 / badToGood packets long on average.
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub bad_to_good: Percent,
    /// 1-h: the share of packets lost while the link is bad. Default: 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_in_bad: Option<Percent>,
    /// 1-k: the share of packets lost while the link is good. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_in_good: Option<Percent>,
}

/// Something that happens to a share of the packets.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Chance {
    /// The share of packets, above 0, to 100.
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub percent: Percent,
    /// How much the fate of a packet depends on that of the one before, reckoned with up to 99; the
    /// share of packets stays what `percent` says. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation: Option<Percent>,
}

/// Which packets overtake others.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Reorder {
    /// The share of packets that are sent at once instead of being delayed, above 0, to 100.
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub percent: Percent,
    /// How much the fate of a packet depends on that of the one before, reckoned with up to 99; the
    /// share of packets stays what `percent` says. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correlation: Option<Percent>,
    /// Only every so many packets one may be sent at once. Default: 1, any packet may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub gap: Option<u32>,
}

/// How fast packets may pass.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bandwidth {
    /// Bits per second, Ethernet headers included, as a quantity: 512k, 10M, 1G. From 8k to 1T.
    pub rate: BitRate,
}

/// Which way packets go, seen from the target.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
pub enum Direction {
    /// From the target.
    #[default]
    Egress,
    /// To the target.
    Ingress,
    /// Either way.
    Both,
}

/// Traffic that a network fault leaves alone.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[schemars(inline)]
pub enum Spare {
    /// Every address of the target's own node.
    Node,
    /// The nameservers of the target and of the cluster, port 53.
    ClusterDNS,
}
