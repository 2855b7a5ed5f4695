//! The burner: a child that uses CPU time, as much as it was told, by its own measurement.

use std::{
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::prctl::set_timerslack,
    time::{ClockId, clock_gettime},
};

use crate::kernel::child::say;

/// How often a thread looks at what it has used.
const PERIOD: Duration = Duration::from_millis(10);
/// How much that could not be used is made up for: a period of the kernel's own CPU limits.
const CATCH_UP: Duration = Duration::from_millis(100);
/// Until the first report, and between two others.
const FIRST: Duration = Duration::from_millis(250);
const REPORT: Duration = Duration::from_secs(1);

/// Uses so many thousandths of a core, and reports once a second: thousandths of a core used since
/// the report before, and milliseconds of CPU time since the start. Ends when nobody reads that.
pub fn burn(millicores: u64) {
    let threads = millicores.div_ceil(1000).max(1);
    #[expect(clippy::cast_precision_loss, reason = "at most 1 024 000")]
    let share = millicores as f64 / 1000.0 / threads as f64;
    // Without it the kernel may wake a thread late; the measurement makes up for that.
    let _ = set_timerslack(1);
    for _ in 0..threads {
        thread::spawn(move || spin(share));
    }
    report();
}

/// Uses a share of one core, for ever.
fn spin(share: f64) {
    let mut start = Instant::now();
    let mut used_before = cpu(ClockId::CLOCK_THREAD_CPUTIME_ID);
    loop {
        let begin = Instant::now();
        let wanted = (begin - start + PERIOD).mul_f64(share);
        let used = || cpu(ClockId::CLOCK_THREAD_CPUTIME_ID).saturating_sub(used_before);
        while used() < wanted && begin.elapsed() < PERIOD {
            for i in 0..2_000 {
                std::hint::black_box(i);
            }
        }
        if wanted.saturating_sub(used()) > CATCH_UP {
            // What others would not let it use is not made up for.
            start = Instant::now();
            used_before = cpu(ClockId::CLOCK_THREAD_CPUTIME_ID);
        }
        thread::sleep(PERIOD.saturating_sub(begin.elapsed()));
    }
}

fn report() {
    let (mut at, mut before) = (Instant::now(), Duration::ZERO);
    let mut wait = FIRST;
    loop {
        thread::sleep(wait);
        let (now, used) = (Instant::now(), cpu(ClockId::CLOCK_PROCESS_CPUTIME_ID));
        let millicores =
            (used.saturating_sub(before)).as_micros() * 1000 / (now - at).as_micros().max(1);
        if !say(&format!("{millicores} {}", used.as_millis())) {
            return;
        }
        (at, before, wait) = (now, used, REPORT);
    }
}

fn cpu(clock: ClockId) -> Duration {
    // Both clocks are always there.
    clock_gettime(clock).map_or(Duration::ZERO, Duration::from)
}
