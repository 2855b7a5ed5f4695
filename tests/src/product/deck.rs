//! What chance deals to the rounds of the torture: faults that may act beside each other on one pod, a
//! deed, and an end. Cards come from shuffled decks, so that each is met before any comes again.
//!
//! Pure: the same seed deals the same rounds.

use std::fmt::{self, Display, Formatter};

/// Numbers of chance from a seed (splitmix64).
#[derive(Debug, Clone)]
pub struct Chance(pub u64);

impl Chance {
    /// A number below a bound that is not 0.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % bound as u64).unwrap_or(0)
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// Cards that are shuffled, and drawn one by one.
#[derive(Debug, Clone)]
struct Deck<T> {
    all: Vec<T>,
    left: Vec<T>,
}

impl<T: Copy> Deck<T> {
    fn new(all: impl IntoIterator<Item = T>) -> Self {
        Self {
            all: all.into_iter().collect(),
            left: Vec::new(),
        }
    }

    /// The first that fits of those left. Where none does, the whole deck is shuffled in behind them:
    /// what did not fit comes first the next time.
    fn draw(&mut self, chance: &mut Chance, fits: impl Fn(T) -> bool) -> Option<T> {
        if !self.left.iter().any(|card| fits(*card)) {
            let mut fresh = self.all.clone();
            while !fresh.is_empty() {
                self.left.push(fresh.swap_remove(chance.below(fresh.len())));
            }
        }
        let at = self.left.iter().position(|card| fits(*card))?;
        Some(self.left.remove(at))
    }
}

/// A kind of fault, as the torture tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Packets of the first echo are late.
    Delay,
    /// All packets of the second echo are lost.
    Loss,
    /// The third echo is cut off.
    Partition,
    /// Connections to the sink are reset.
    Reset,
    /// Calls on a volume hang.
    IoHang,
    /// Calls on a volume are late.
    IoLatency,
    /// Calls on a volume fail.
    IoError,
    /// CPU time is burnt.
    Cpu,
    /// Memory is held.
    Memory,
    /// A volume is full.
    DiskFill,
    /// The container stands still.
    ContainerPause,
    /// The container is killed, once or again and again.
    ContainerKill,
    /// The pod is deleted.
    PodKill,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 13] = [
        Self::Delay,
        Self::Loss,
        Self::Partition,
        Self::Reset,
        Self::IoHang,
        Self::IoLatency,
        Self::IoError,
        Self::Cpu,
        Self::Memory,
        Self::DiskFill,
        Self::ContainerPause,
        Self::ContainerKill,
        Self::PodKill,
    ];

    /// Its name, and that of its fault.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Delay => "delay",
            Self::Loss => "loss",
            Self::Partition => "partition",
            Self::Reset => "reset",
            Self::IoHang => "io-hang",
            Self::IoLatency => "io-latency",
            Self::IoError => "io-error",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::DiskFill => "disk-fill",
            Self::ContainerPause => "container-pause",
            Self::ContainerKill => "container-kill",
            Self::PodKill => "pod-kill",
        }
    }

    /// Whether it takes the container, or the pod, away.
    #[must_use]
    pub const fn kills(self) -> bool {
        matches!(self, Self::ContainerKill | Self::PodKill)
    }

    /// Whether calls on a volume are what it hits.
    #[must_use]
    pub const fn is_io(self) -> bool {
        matches!(self, Self::IoHang | Self::IoLatency | Self::IoError)
    }

    const fn is_on_volume(self) -> bool {
        self.is_io() || matches!(self, Self::DiskFill)
    }

    /// Whether both may act on one pod at once, if on different volumes: two of a kind compete, and
    /// one of two that kill would find nobody.
    fn goes_with(self, other: Self) -> bool {
        self != other && !(self.kills() && other.kills())
    }
}

/// Where the two volumes of the target are mounted: a disk, and memory.
pub const VOLUMES: [&str; 2] = ["/data", "/memory"];
/// The ports that the target echoes UDP at: for the delay, the loss and the partition.
pub const ECHOES: [u16; 3] = [7, 8, 9];
/// The TCP port of the sink beside it.
pub const SINK: u16 = 10;

/// A fault of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// What it is.
    pub kind: Kind,
    /// The volume that it is on; empty if it is on none.
    pub volume: &'static str,
    /// The second of its two doses.
    pub is_other: bool,
}

impl Fault {
    /// The YAML of the fault, with what it does to the pods `app=store`.
    fn yaml(&self) -> String {
        let begin = if self.kind.kills() { "4s" } else { "0s" };
        format!(
            "- name: {}\n  startAfter: {begin}\n  target: {{selector: {{matchLabels: {{app: store}}}}}}\n  {}\n",
            self.kind.name(),
            self.dose()
        )
    }

    fn dose(&self) -> String {
        let volume = self.volume;
        let of = |one: &'static str, other| if self.is_other { other } else { one };
        let direction = of("", ", direction: Both");
        let network = |what: &str, port: u16, protocol: &str| {
            format!(
                "network: {{{what}, peers: {{localPorts: [{{port: {port}, protocol: {protocol}}}]}}}}"
            )
        };
        match self.kind {
            Kind::Delay => {
                let delay = format!("delay: {{latency: 1900ms}}{direction}");
                network(&delay, ECHOES[0], "UDP")
            }
            Kind::Loss => {
                let loss = format!("loss: {{percent: 100}}{direction}");
                network(&loss, ECHOES[1], "UDP")
            }
            Kind::Partition => {
                let partition = format!("partition: {{}}{direction}");
                network(&partition, ECHOES[2], "UDP")
            }
            Kind::Reset => network("reset: {}", SINK, "TCP"),
            Kind::IoHang => format!("io: {{volume: {volume}, hang: {{}}}}"),
            Kind::IoLatency => {
                let jitter = of("", ", jitter: 200ms");
                format!("io: {{volume: {volume}, latency: {{delay: 1500ms{jitter}}}}}")
            }
            Kind::IoError => {
                let errno = of("EIO", "EPERM");
                format!("io: {{volume: {volume}, error: {{errno: {errno}}}}}")
            }
            Kind::Cpu => format!("cpu: {{load: {}}}", of("30", "60")),
            Kind::Memory => format!("memory: {{{}}}", of("size: 48Mi", "percent: 30, ramp: 1s")),
            Kind::DiskFill => {
                let much = of("percent: 100", "percent: 80");
                format!("diskFill: {{volume: {volume}, {much}}}")
            }
            Kind::ContainerPause => "containerPause: {}".to_owned(),
            Kind::ContainerKill => format!("containerKill: {{{}}}", of("", "every: 2s")),
            Kind::PodKill => format!("podKill: {{{}}}", of("gracePeriod: 1s", "method: Evict")),
        }
    }
}

impl Display for Fault {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kind.name())?;
        if self.volume.is_empty() {
            Ok(())
        } else {
            write!(f, " on {}", self.volume)
        }
    }
}

/// How a run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// With its window.
    Window,
    /// It is aborted.
    Abort,
    /// It is deleted.
    Delete,
}

/// What is played in a round.
#[derive(Debug, Clone)]
pub struct Round {
    /// From one to four.
    pub faults: Vec<Fault>,
    /// Which of the deeds.
    pub deed: usize,
    /// The deed is done before the faults were seen.
    pub is_early: bool,
    /// How it ends.
    pub end: End,
}

impl Round {
    /// The YAML of the run's spec.
    #[must_use]
    pub fn spec(&self, duration: &str) -> String {
        let faults: String = self.faults.iter().map(Fault::yaml).collect();
        format!("duration: {duration}\nfaults:\n{faults}")
    }

    /// Whether it has a fault of a kind.
    #[must_use]
    pub fn has(&self, kind: Kind) -> bool {
        self.faults.iter().any(|fault| fault.kind == kind)
    }

    /// Whether the container or the pod is taken away in it.
    #[must_use]
    pub fn kills(&self) -> bool {
        self.faults.iter().any(|fault| fault.kind.kills())
    }
}

/// Deals rounds.
#[derive(Debug, Clone)]
pub struct Dealer {
    chance: Chance,
    kinds: Deck<Kind>,
    /// How many faults a round has in which they are seen before the deed.
    sizes: Deck<usize>,
    deeds: Deck<usize>,
    early: Deck<bool>,
}

impl Dealer {
    /// Deals from a seed, with so many deeds.
    #[must_use]
    pub fn new(seed: u64, deeds: usize) -> Self {
        Self {
            chance: Chance(seed),
            kinds: Deck::new(Kind::ALL),
            // So that eight rounds meet all kinds.
            sizes: Deck::new([1, 2, 3, 3, 4, 4]),
            deeds: Deck::new(0..deeds),
            early: Deck::new([true, false, false, false]),
        }
    }

    /// The next round. What a deed at once may keep from coming is drawn from a deck of its own: all
    /// kinds of the first are met for certain.
    pub fn deal(&mut self) -> Round {
        let chance = &mut self.chance;
        let is_early = self.early.draw(chance, |_| true).unwrap_or_default();
        let deed = self.deeds.draw(chance, |_| true).unwrap_or_default();
        let faults = if is_early {
            let size = 1 + chance.below(4);
            hand(size, &mut Deck::new(Kind::ALL), chance)
        } else {
            let size = self.sizes.draw(chance, |_| true).unwrap_or(1);
            hand(size, &mut self.kinds, chance)
        };
        let end = chance.pick(&[
            End::Window,
            End::Window,
            End::Window,
            End::Window,
            End::Abort,
            End::Delete,
        ]);
        Round {
            faults,
            deed,
            is_early,
            end,
        }
    }
}

/// So many faults that may act at once on one pod.
fn hand(size: usize, kinds: &mut Deck<Kind>, chance: &mut Chance) -> Vec<Fault> {
    let mut faults: Vec<Fault> = Vec::new();
    let mut volumes = VOLUMES.to_vec();
    while faults.len() < size {
        let fits = |kind: Kind| {
            faults.iter().all(|fault| fault.kind.goes_with(kind))
                && !(kind.is_on_volume() && volumes.is_empty())
        };
        let Some(kind) = kinds.draw(chance, fits) else {
            break;
        };
        let volume = if kind.is_on_volume() {
            volumes.swap_remove(chance.below(volumes.len()))
        } else {
            ""
        };
        faults.push(Fault {
            kind,
            volume,
            is_other: chance.below(2) == 1,
        });
    }
    faults
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use windtunnel_crds::ChaosExperimentSpec;

    use super::*;

    const SEEDS: std::ops::Range<u64> = 0..500;
    const DEEDS: usize = 20;

    fn rounds(seed: u64, count: usize) -> Vec<Round> {
        let mut dealer = Dealer::new(seed, DEEDS);
        (0..count).map(|_| dealer.deal()).collect()
    }

    #[test]
    fn the_same_seed_deals_the_same_rounds() {
        let told = |seed| format!("{:?}", rounds(seed, 20));
        assert_eq!(told(7), told(7));
        assert_ne!(told(7), told(8));
    }

    #[test]
    fn eight_rounds_meet_every_kind_and_as_many_as_deeds_every_deed() {
        for seed in SEEDS {
            let rounds = rounds(seed, DEEDS);
            let seen = rounds.iter().take(8).filter(|round| !round.is_early);
            let kinds: BTreeSet<Kind> = seen.flat_map(|r| &r.faults).map(|f| f.kind).collect();
            assert_eq!(kinds, BTreeSet::from(Kind::ALL), "seed {seed}");
            let deeds: BTreeSet<usize> = rounds.iter().map(|round| round.deed).collect();
            assert_eq!(deeds.len(), DEEDS, "seed {seed}");
        }
    }

    #[test]
    fn faults_of_a_round_do_not_compete() {
        for round in SEEDS.flat_map(|seed| rounds(seed, 20)) {
            assert!((1..=4).contains(&round.faults.len()), "{round:?}");
            for (at, one) in round.faults.iter().enumerate() {
                assert_eq!(one.volume.is_empty(), !one.kind.is_on_volume(), "{round:?}");
                for other in &round.faults[at + 1..] {
                    assert!(one.kind.goes_with(other.kind), "{round:?}");
                    assert!(
                        one.volume.is_empty() || one.volume != other.volume,
                        "{round:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_fault_is_read_as_the_kind_that_it_is() {
        for kind in Kind::ALL {
            for is_other in [false, true] {
                let volume = if kind.is_on_volume() { VOLUMES[0] } else { "" };
                let round = Round {
                    faults: vec![Fault {
                        kind,
                        volume,
                        is_other,
                    }],
                    deed: 0,
                    is_early: false,
                    end: End::Window,
                };
                let spec: ChaosExperimentSpec = serde_saphyr::from_str(&round.spec("8s")).unwrap();
                let fault = &spec.faults[0];
                assert_eq!(fault.name, kind.name());
                let found = fault.kind().unwrap();
                let on_container = !matches!(
                    kind,
                    Kind::Delay | Kind::Loss | Kind::Partition | Kind::Reset | Kind::PodKill
                );
                assert_eq!(found.is_on_containers(), on_container, "{kind:?}");
                assert_eq!(found.is_on_node(), kind != Kind::PodKill, "{kind:?}");
            }
        }
    }
}
