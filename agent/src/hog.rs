//! The hog: a child that holds memory, as much as it was told, and gives it back when others in its
//! control group need it.

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use crate::kernel::{cgroup::memory, child::say, pages::Pages, proc::Proc};

/// How much is taken at once.
pub(crate) const CHUNK: u64 = 1 << 20;
/// How often it looks.
const TICK: Duration = Duration::from_millis(50);
/// Between two reports.
const REPORT: Duration = Duration::from_millis(250);

/// What to hold.
#[derive(Clone, Debug, clap::Args)]
pub struct Hog {
    /// So many bytes.
    #[arg(long)]
    pub bytes: u64,
    /// Taken evenly over so many milliseconds.
    #[arg(long, default_value_t = 0)]
    pub ramp_millis: u64,
    /// The control group, and how many bytes may be used in it, this process included.
    #[arg(long, requires = "most")]
    pub group: Option<PathBuf>,
    /// See `group`.
    #[arg(long)]
    pub most: Option<u64>,
    /// How many bytes stay available on the node.
    #[arg(long, default_value_t = 0)]
    pub spare: u64,
}

/// Holds memory, and reports how many bytes. Ends when nobody reads that.
pub fn hold(hog: &Hog) {
    // The kernel is to kill this first. It may always be asked to.
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
    let start = Instant::now();
    let mut held: Vec<Pages> = Vec::new();
    let mut reported: Option<Instant> = None;
    loop {
        adjust(hog, start.elapsed(), &mut held);
        if reported.is_none_or(|at| at.elapsed() >= REPORT) {
            reported = Some(Instant::now());
            if !say(&sum(&held).to_string()) {
                return;
            }
        }
        thread::sleep(TICK);
    }
}

fn sum(held: &[Pages]) -> u64 {
    held.iter().map(|pages| pages.length() as u64).sum()
}

/// Takes what is still to be taken by now, or gives back what others need.
fn adjust(hog: &Hog, elapsed: Duration, held: &mut Vec<Pages>) {
    let wanted = wanted(hog, elapsed);
    let has_room = |more: u64| {
        let in_group = match (&hog.group, hog.most) {
            (Some(group), Some(most)) => memory::usage(group).is_ok_and(|used| used + more <= most),
            _ => true,
        };
        let on_node = || Proc::default().memory().map(|(_, available)| available);
        in_group && (hog.spare == 0 || on_node().is_ok_and(|left| left >= hog.spare + more))
    };
    while !held.is_empty() && !has_room(0) {
        held.pop();
    }
    let mut sum = sum(held);
    while sum < wanted {
        let more = CHUNK.min(wanted - sum);
        let length = usize::try_from(more).unwrap_or_default();
        // Room for one more is left, or the next look would give this one back.
        if !has_room(2 * CHUNK) {
            break;
        }
        let Ok(pages) = Pages::new(length, sum) else {
            break;
        };
        held.push(pages);
        sum += more;
    }
}

/// How much is to be held so long after the start.
fn wanted(hog: &Hog, elapsed: Duration) -> u64 {
    let elapsed = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    if elapsed >= hog.ramp_millis {
        return hog.bytes;
    }
    let share = u128::from(hog.bytes) * u128::from(elapsed) / u128::from(hog.ramp_millis);
    // Whole pieces on the way: a page is the least that can be held.
    u64::try_from(share).unwrap_or(hog.bytes) / CHUNK * CHUNK
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hog(bytes: u64, ramp_millis: u64) -> Hog {
        Hog {
            bytes,
            ramp_millis,
            group: None,
            most: None,
            spare: 0,
        }
    }

    #[test]
    fn memory_is_taken_evenly() {
        let hog = hog(10 * CHUNK + 4096, 1000);
        let at = |millis| wanted(&hog, Duration::from_millis(millis));
        assert_eq!((at(0), at(500)), (0, 5 * CHUNK));
        assert_eq!((at(1000), at(9000)), (10 * CHUNK + 4096, 10 * CHUNK + 4096));
        assert_eq!(wanted(&super::tests::hog(CHUNK, 0), Duration::ZERO), CHUNK);
    }

    #[test]
    fn what_others_need_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let used = |bytes: u64| {
            fs::write(dir.path().join("memory.current"), bytes.to_string()).unwrap();
        };
        fs::write(dir.path().join("memory.stat"), "inactive_file 0\n").unwrap();
        let hog = Hog {
            group: Some(dir.path().to_owned()),
            most: Some(100 * CHUNK),
            ..hog(3 * CHUNK, 0)
        };
        let mut held = Vec::new();
        used(99 * CHUNK);
        adjust(&hog, Duration::ZERO, &mut held);
        assert!(held.is_empty(), "no room");
        used(50 * CHUNK);
        adjust(&hog, Duration::ZERO, &mut held);
        assert_eq!(sum(&held), 3 * CHUNK);
        used(101 * CHUNK);
        adjust(&hog, Duration::ZERO, &mut held);
        assert!(held.is_empty(), "given back");
    }

    #[test]
    fn what_the_node_needs_is_not_taken() {
        let hog = Hog {
            spare: u64::MAX / 2,
            ..hog(3 * CHUNK, 0)
        };
        let mut held = vec![Pages::new(4096, 1).unwrap()];
        adjust(&hog, Duration::ZERO, &mut held);
        assert!(held.is_empty());
    }
}
