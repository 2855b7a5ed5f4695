//! The filler: a child that takes space for a file, as much as it was told, and gives it back when the
//! node needs it.

use std::{
    fs::{File, OpenOptions},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use nix::errno::Errno;

use crate::kernel::{
    child::say,
    space::{self, Space},
};

/// How much is taken at once.
const CHUNK: u64 = 64 << 20;
/// The least that is tried where there is no more.
const LEAST: u64 = 4096;
/// How often the reserve is looked at, once everything is taken.
const LOOK: Duration = Duration::from_millis(250);

/// What to take.
#[derive(Clone, Debug, clap::Args)]
pub struct Fill {
    /// The file: one that the injector has open.
    #[arg(long)]
    pub file: PathBuf,
    /// So many bytes, or all that there are.
    #[arg(long)]
    pub bytes: u64,
    /// How many bytes stay available.
    #[arg(long, default_value_t = 0)]
    pub reserve: u64,
}

/// Takes space and holds it; reports how much, and whether that is all. Ends when nobody reads that.
pub fn fill(fill: &Fill) {
    let opened = OpenOptions::new().read(true).write(true).open(&fill.file);
    let result = opened
        .map_err(|e| format!("open the file: {e}"))
        .and_then(|file| hold(&file, fill));
    if let Err(message) = result {
        // Nobody may be there to read.
        let _ = say(&format!("failed: {message}"));
    }
}

/// What was taken, and how much may still be.
#[derive(Debug)]
struct Taken {
    bytes: u64,
    /// What is asked for next; 0 when there is no more.
    chunk: u64,
}

fn hold(file: &File, order: &Fill) -> Result<(), String> {
    let mut taken = Taken {
        bytes: 0,
        chunk: CHUNK,
    };
    let mut told = None;
    loop {
        let is_all = !advance(file, order, &mut taken)?;
        if told.is_none_or(|at: Instant| is_all || at.elapsed() >= LOOK) {
            told = Some(Instant::now());
            if !say(&format!("{} {}", taken.bytes, u8::from(is_all))) {
                return Ok(());
            }
        }
        if is_all {
            thread::sleep(LOOK);
        }
    }
}

/// Takes the next piece, or gives back what the node needs; whether there is more to take.
fn advance(file: &File, order: &Fill, taken: &mut Taken) -> Result<bool, String> {
    let available = Space::of(file).map_err(|e| e.to_string())?.available;
    let lacking = order.reserve.saturating_sub(available).min(taken.bytes);
    if lacking > 0 {
        // What was given back is not taken again: the node would be at its limit for ever.
        (taken.bytes, taken.chunk) = (taken.bytes - lacking, 0);
        file.set_len(taken.bytes).map_err(|e| e.to_string())?;
        return Ok(false);
    }
    let room = match order.reserve {
        0 => u64::MAX,
        reserve => available.saturating_sub(reserve),
    };
    let length = taken.chunk.min(order.bytes - taken.bytes).min(room);
    if length < LEAST.min(order.bytes - taken.bytes).max(1) {
        return Ok(false);
    }
    match space::take(file, taken.bytes, length) {
        Ok(()) => taken.bytes += length,
        Err(Errno::ENOSPC | Errno::EDQUOT) if length <= LEAST => taken.chunk = 0,
        Err(Errno::ENOSPC | Errno::EDQUOT) => taken.chunk = length / 2,
        Err(error) => return Err(format!("take {length} bytes: {error}")),
    }
    Ok(taken.chunk > 0 && taken.bytes < order.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> File {
        tempfile::tempfile().unwrap()
    }

    fn order(bytes: u64, reserve: u64) -> Fill {
        Fill {
            file: PathBuf::new(),
            bytes,
            reserve,
        }
    }

    fn taken(bytes: u64) -> Taken {
        Taken {
            bytes,
            chunk: CHUNK,
        }
    }

    #[test]
    fn as_much_as_asked_for_is_taken_in_pieces() {
        let (file, order, mut taken) = (file(), order(5000, 0), taken(0));
        taken.chunk = LEAST;
        assert!(advance(&file, &order, &mut taken).unwrap());
        assert!(!advance(&file, &order, &mut taken).unwrap());
        assert_eq!((taken.bytes, file.metadata().unwrap().len()), (5000, 5000));
        assert!(!advance(&file, &order, &mut taken).unwrap());
    }

    #[test]
    fn what_the_node_needs_is_not_taken_and_given_back() {
        let (file, order) = (file(), order(1 << 20, u64::MAX));
        let mut fresh = taken(0);
        assert!(!advance(&file, &order, &mut fresh).unwrap());
        assert_eq!(fresh.bytes, 0);
        space::take(&file, 0, 8192).unwrap();
        let mut held = taken(8192);
        assert!(!advance(&file, &order, &mut held).unwrap());
        assert_eq!((held.bytes, file.metadata().unwrap().len()), (0, 0));
    }
}
