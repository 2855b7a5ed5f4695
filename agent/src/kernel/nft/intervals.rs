//! Intervals of addresses, ports and protocols, as interval sets of nftables hold them.
//!
//! Pure arithmetic. The kernel refuses elements that overlap, so lists are merged first; adjacent
//! intervals are merged too, so that equal coverage always gives equal sets. In a set, an interval
//! is a start and an exclusive end; one that reaches the largest key has no end.

use ipnet::IpNet;

use crate::kernel::netlink::DecodeError;

/// What the keys of a set are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Ipv4,
    Ipv6,
    Protocol,
    Port,
}

impl Key {
    pub(super) const ALL: [Self; 4] = [Self::Ipv4, Self::Ipv6, Self::Protocol, Self::Port];

    /// Bytes of a key.
    pub(super) const fn width(self) -> u32 {
        match self {
            Self::Ipv4 => 4,
            Self::Ipv6 => 16,
            Self::Protocol => 1,
            Self::Port => 2,
        }
    }

    /// The number that the `nft` program knows the type by; the kernel only stores it.
    pub(super) const fn datatype(self) -> u32 {
        match self {
            Self::Ipv4 => 7,
            Self::Ipv6 => 8,
            Self::Protocol => 12,
            Self::Port => 13,
        }
    }

    const fn largest(self) -> u128 {
        u128::MAX >> (128 - 8 * self.width())
    }

    /// The key's bytes in network order.
    fn bytes(self, value: u128) -> Vec<u8> {
        let bytes = value.to_be_bytes();
        let width = usize::try_from(self.width()).unwrap_or(bytes.len());
        bytes[bytes.len() - width..].to_vec()
    }
}

/// From the first to the last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Interval {
    pub(super) first: u128,
    pub(super) last: u128,
}

impl Interval {
    pub(super) fn new(first: impl Into<u128>, last: impl Into<u128>) -> Self {
        Self {
            first: first.into(),
            last: last.into(),
        }
    }
}

/// One element of an interval set.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Element {
    pub(super) key: Vec<u8>,
    /// The end of an interval, not itself in it.
    pub(super) is_end: bool,
}

/// The same coverage in as few intervals as possible, ascending.
pub(super) fn merge(mut intervals: Vec<Interval>) -> Vec<Interval> {
    intervals.sort_unstable();
    let mut merged: Vec<Interval> = Vec::with_capacity(intervals.len());
    for interval in intervals {
        match merged.last_mut() {
            Some(before) if interval.first <= before.last.saturating_add(1) => {
                before.last = before.last.max(interval.last);
            }
            _ => merged.push(interval),
        }
    }
    merged
}

/// The merged addresses of one family among networks of both.
pub(super) fn of_networks(key: Key, networks: &[IpNet]) -> Vec<Interval> {
    let intervals = networks.iter().filter_map(|network| match (key, network) {
        (Key::Ipv4, IpNet::V4(network)) => Some(Interval::new(
            u32::from(network.network()),
            u32::from(network.broadcast()),
        )),
        (Key::Ipv6, IpNet::V6(network)) => Some(Interval::new(
            u128::from(network.network()),
            u128::from(network.broadcast()),
        )),
        _ => None,
    });
    merge(intervals.collect())
}

/// The elements of a set with these merged intervals, ascending.
pub(super) fn to_elements(key: Key, intervals: &[Interval]) -> Vec<Element> {
    let mut elements = Vec::with_capacity(2 * intervals.len());
    for interval in intervals {
        elements.push(Element {
            key: key.bytes(interval.first),
            is_end: false,
        });
        if interval.last < key.largest() {
            elements.push(Element {
                key: key.bytes(interval.last + 1),
                is_end: true,
            });
        }
    }
    elements
}

/// The intervals of a set with these elements, in whatever order the kernel shows them.
pub(super) fn from_elements(
    key: Key,
    elements: Vec<Element>,
) -> Result<Vec<Interval>, DecodeError> {
    let mut points = elements
        .into_iter()
        .map(|element| Ok((value(key, &element.key)?, !element.is_end)))
        .collect::<Result<Vec<_>, DecodeError>>()?;
    // Where one interval ends and the next starts, the end comes first.
    points.sort_unstable();
    let mut intervals = Vec::new();
    let mut open = None;
    for (point, is_start) in points {
        match (open, is_start) {
            (None, true) => open = Some(point),
            (Some(first), false) => {
                let last = point - 1;
                intervals.push(Interval { first, last });
                open = None;
            }
            // The `nft` program closes what is before the first interval.
            (None, false) if point == 0 => {}
            (None, false) | (Some(_), true) => return Err(unpaired(point)),
        }
    }
    intervals.extend(open.map(|first| Interval {
        first,
        last: key.largest(),
    }));
    Ok(intervals)
}

fn value(key: Key, bytes: &[u8]) -> Result<u128, DecodeError> {
    let width = usize::try_from(key.width()).unwrap_or_default();
    if bytes.len() != width {
        return Err(DecodeError::Length {
            what: "a set's key",
            length: width,
            available: bytes.len(),
        });
    }
    Ok(bytes
        .iter()
        .fold(0, |value, byte| value << 8 | u128::from(*byte)))
}

fn unpaired(point: u128) -> DecodeError {
    DecodeError::Unknown {
        what: "unpaired element of a set",
        value: u64::try_from(point).unwrap_or(u64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn networks_are_merged_by_family() {
        let networks = ["10.0.0.0/25", "10.0.0.128/25", "10.0.0.7/32", "fd00::/64"];
        let networks = networks.map(|network| network.parse().unwrap());
        let expected = Interval::new(0x0a00_0000_u32, 0x0a00_00ff_u32);
        assert_eq!(of_networks(Key::Ipv4, &networks), [expected]);
        let first = 0xfd00_u128 << 112;
        let expected = Interval::new(first, first | u128::from(u64::MAX));
        assert_eq!(of_networks(Key::Ipv6, &networks), [expected]);
    }

    #[test]
    fn an_interval_to_the_largest_key_has_no_end() {
        let all = [Interval::new(0_u32, u32::MAX)];
        let elements = to_elements(Key::Ipv4, &all);
        assert_eq!(elements.len(), 1);
        assert_eq!(from_elements(Key::Ipv4, elements).unwrap(), all);

        let everything = ["::/0".parse().unwrap()];
        let all = of_networks(Key::Ipv6, &everything);
        assert_eq!(to_elements(Key::Ipv6, &all).len(), 1);
    }

    #[test]
    fn the_end_that_nft_puts_first_is_ignored() {
        let element = |key: [u8; 2], is_end| Element {
            key: key.to_vec(),
            is_end,
        };
        let elements = vec![
            element([0, 81], true),
            element([0, 80], false),
            element([0, 0], true),
        ];
        let expected = [Interval::new(80_u16, 80_u16)];
        assert_eq!(from_elements(Key::Port, elements).unwrap(), expected);
    }

    #[test]
    fn elements_without_their_other_half_are_errors() {
        let element = |last, is_end| Element {
            key: vec![0, last],
            is_end,
        };
        for elements in [
            vec![element(80, true)],
            vec![element(80, false), element(90, false)],
            vec![element(80, false), element(90, true), element(95, true)],
        ] {
            assert!(from_elements(Key::Port, elements).is_err());
        }
    }

    fn key() -> impl Strategy<Value = Key> {
        prop::sample::select(&Key::ALL[..])
    }

    /// Intervals near each other and near both ends of the keys.
    fn intervals(key: Key) -> impl Strategy<Value = Vec<Interval>> {
        let largest = key.largest();
        let point = prop_oneof![
            (0..=60_u128).prop_map(move |low| low.min(largest)),
            (0..=60_u128).prop_map(move |below| largest - below.min(largest)),
            any::<u128>().prop_map(move |any| any & largest),
        ];
        let interval = (point, 0..=10_u128).prop_map(move |(first, length)| {
            let last = first.saturating_add(length).min(largest);
            Interval { first, last }
        });
        prop::collection::vec(interval, 0..30)
    }

    fn holds(intervals: &[Interval], point: u128) -> bool {
        intervals
            .iter()
            .any(|interval| (interval.first..=interval.last).contains(&point))
    }

    fn keyed() -> impl Strategy<Value = (Key, Vec<Interval>)> {
        key().prop_flat_map(|key| (Just(key), intervals(key)))
    }

    proptest! {
        #[test]
        fn merging_keeps_the_coverage((_, intervals) in keyed()) {
            let merged = merge(intervals.clone());
            for interval in intervals.iter().chain(&merged) {
                for point in [
                    interval.first.saturating_sub(1),
                    interval.first,
                    interval.last,
                    interval.last.saturating_add(1),
                ] {
                    prop_assert_eq!(holds(&intervals, point), holds(&merged, point));
                }
            }
        }

        #[test]
        fn merged_intervals_are_ascending_and_apart((_, intervals) in keyed()) {
            let merged = merge(intervals);
            for pair in merged.windows(2) {
                prop_assert!(pair[0].last + 1 < pair[1].first, "{:?}", pair);
            }
        }

        #[test]
        fn merging_depends_on_nothing_but_the_coverage((_, intervals) in keyed()) {
            let merged = merge(intervals.clone());
            prop_assert_eq!(merge(merged.clone()), merged.clone());
            let mut reversed = intervals.clone();
            reversed.reverse();
            reversed.extend(intervals);
            prop_assert_eq!(merge(reversed), merged);
        }

        #[test]
        fn elements_in_any_order_give_the_intervals_back((key, intervals) in keyed(), seed: u64) {
            let merged = merge(intervals);
            let mut elements = to_elements(key, &merged);
            if !elements.is_empty() {
                let middle = usize::try_from(seed).unwrap() % elements.len();
                elements.rotate_left(middle);
            }
            prop_assert_eq!(from_elements(key, elements).unwrap(), merged);
        }

        #[test]
        fn arbitrary_elements_never_panic(key in key(), elements in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..18), any::<bool>()), 0..20)) {
            let elements = elements.into_iter().map(|(key, is_end)| Element { key, is_end });
            let _ = from_elements(key, elements.collect());
        }
    }
}
