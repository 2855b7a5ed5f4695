//! Tests of netem's options; the bytes were checked once against what `tc` sends.

use proptest::prelude::*;

use super::*;

fn bytes(netem: &Netem) -> Vec<u8> {
    encode(netem).unwrap().finish().unwrap()
}

#[test]
fn percentages_are_scaled_without_wrapping() {
    let scaled = |percent| from_percent("loss", percent).unwrap();
    assert_eq!(scaled(0.0), 0);
    assert_eq!(scaled(100.0), u32::MAX);
    assert_eq!(scaled(20.0), 858_993_459);
    assert_eq!(scaled(99.999_999_999), u32::MAX);
    for percent in [-0.1, 100.1, f64::NAN, f64::INFINITY] {
        assert!(from_percent("loss", percent).is_err(), "{percent}");
    }
}

#[test]
fn impossible_options_are_refused() {
    let with = |change: fn(&mut Netem)| {
        let mut netem = Netem::new(1000);
        change(&mut netem);
        encode(&netem).map(drop)
    };
    assert_eq!(with(|netem| netem.limit = 0), Err(NetemError::Limit));
    assert_eq!(with(|netem| netem.rate = 7), Err(NetemError::Rate(7)));
    assert!(with(|netem| netem.rate = 8).is_ok());
    let jitter = with(|netem| netem.delay.jitter = Duration::from_millis(2148));
    assert!(matches!(jitter, Err(NetemError::TooLong { .. })));
    assert!(with(|netem| netem.delay.jitter = Duration::from_millis(2147)).is_ok());
    let latency = with(|netem| netem.delay.latency = Duration::MAX);
    assert!(matches!(latency, Err(NetemError::TooLong { .. })));
}

#[test]
fn delay_and_loss_have_these_bytes() {
    let mut netem = Netem::new(1000);
    netem.delay.latency = Duration::from_millis(100);
    netem.delay.jitter = Duration::from_millis(10);
    netem.loss = Loss::Random(Chance {
        percent: 20.0,
        correlation: 25.0,
    });
    let mut expected = Vec::new();
    expected.extend(words(&[0, 1000, 858_993_459, 0, 0, 0]));
    expected.extend([12, 0, 10, 0]);
    expected.extend(100_000_000_u64.to_ne_bytes());
    expected.extend([12, 0, 11, 0]);
    expected.extend(10_000_000_u64.to_ne_bytes());
    expected.extend([16, 0, 1, 0]);
    expected.extend(words(&[0, 1_073_741_824, 0]));
    expected.extend([12, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([12, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    expected.extend([20, 0, 6, 0]);
    expected.extend([0; 16]);
    assert_eq!(bytes(&netem), expected);
}

#[test]
fn a_rate_over_four_gigabytes_uses_the_wide_attribute() {
    let mut netem = Netem::new(1000);
    netem.rate = 100_000_000_000;
    let held = decode(&bytes(&netem)).unwrap();
    assert_eq!(held.rate, netem.rate);
}

#[test]
fn a_distribution_adds_its_table() {
    let mut netem = Netem::new(1000);
    let without = bytes(&netem).len();
    netem.delay.distribution = Distribution::Normal;
    assert_eq!(bytes(&netem).len(), without + 4 + 2 * 4096);
    let held = decode(&bytes(&netem)).unwrap();
    assert!(netem.matches(&held).unwrap(), "the kernel does not tell it");
}

#[test]
fn what_differs_does_not_match() {
    let mut netem = Netem::new(1000);
    netem.rate = 8_000_000;
    let mut other = netem.clone();
    other.rate += 7;
    assert!(netem.matches(&other).unwrap(), "below the kernel's unit");
    other.rate += 1;
    assert!(!netem.matches(&other).unwrap());
    other = netem.clone();
    other.delay.latency += Duration::from_nanos(1);
    assert!(!netem.matches(&other).unwrap());
}

fn percent() -> impl Strategy<Value = f64> {
    prop_oneof![Just(0.0), Just(100.0), 0.0..=100.0]
}

fn chance() -> impl Strategy<Value = Chance> {
    (percent(), percent()).prop_map(|(percent, correlation)| Chance {
        percent,
        correlation,
    })
}

fn loss() -> impl Strategy<Value = Loss> {
    let four = (percent(), percent(), percent(), percent());
    prop_oneof![
        chance().prop_map(Loss::Random),
        four.prop_map(|(to_bad, to_good, loss_in_bad, loss_in_good)| {
            Loss::GilbertElliott {
                to_bad,
                to_good,
                loss_in_bad,
                loss_in_good,
            }
        }),
        [percent(), percent(), percent(), percent(), percent()].prop_map(
            |[p13, p31, p32, p23, p14]| Loss::FourState {
                p13,
                p31,
                p32,
                p23,
                p14
            }
        ),
    ]
}

fn delay() -> impl Strategy<Value = Delay> {
    (any::<u32>(), 0..=i32::MAX.cast_unsigned(), percent()).prop_map(
        |(latency, jitter, correlation)| Delay {
            latency: Duration::from_nanos(latency.into()),
            jitter: Duration::from_nanos(jitter.into()),
            correlation,
            distribution: Distribution::default(),
        },
    )
}

fn netem() -> impl Strategy<Value = Netem> {
    let reorder = (chance(), 0_u32..10).prop_map(|(chance, gap)| Reorder { chance, gap });
    let rate = prop_oneof![Just(0), 8_u64..200_000_000_000];
    let chances = (chance(), chance());
    (1_u32.., delay(), loss(), chances, reorder, rate).prop_map(
        |(limit, delay, loss, (duplicate, corrupt), reorder, rate)| Netem {
            limit,
            delay,
            loss,
            duplicate,
            corrupt,
            reorder,
            rate,
        },
    )
}

proptest! {
    #[test]
    fn what_was_encoded_is_decoded(netem in netem()) {
        let held = decode(&bytes(&netem)).unwrap();
        prop_assert!(netem.matches(&held).unwrap(), "{:?} {:?}", netem, held);
    }

    #[test]
    fn percentages_survive_the_kernels_unit(value: u32) {
        prop_assert_eq!(from_percent("loss", to_percent(value)).unwrap(), value);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes);
    }
}
