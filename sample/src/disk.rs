//! Calls on files: what tests measure a volume with, from inside a pod.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read as _, Seek as _, Write as _},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;

use crate::probe::print;

/// A series of calls.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Settings {
    /// The file, which is made if it is missing.
    #[arg(long)]
    file: PathBuf,
    /// How many rounds of open, read and write.
    #[arg(long, default_value_t = 10)]
    count: usize,
    /// How long a call may take, in milliseconds; after the first that takes longer no more are made.
    #[arg(long, default_value_t = 2_000)]
    wait_millis: u64,
}

/// What became of the calls of one kind.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Calls {
    /// Milliseconds, of those that succeeded.
    millis: Vec<f64>,
    /// Errno of those that failed.
    errors: Vec<i32>,
    /// How many did not return in time.
    hung: usize,
}

#[derive(Debug, Default, Serialize)]
struct Outcome {
    open: Calls,
    read: Calls,
    write: Calls,
}

/// A call that has returned.
enum Done {
    Open(io::Result<()>),
    Read(io::Result<()>),
    Write(io::Result<()>),
}

/// Makes the calls and prints the outcome.
pub(crate) fn disk(settings: &Settings) -> anyhow::Result<()> {
    let (done, seen) = mpsc::channel();
    let (file, count) = (settings.file.clone(), settings.count);
    // A call that hangs dies with the process.
    thread::spawn(move || calls(&file, count, &done));
    let wait = Duration::from_millis(settings.wait_millis);
    let mut outcome = Outcome::default();
    let mut next = "open";
    loop {
        let (result, took) = match seen.recv_timeout(wait) {
            Ok(Some((result, took))) => (result, took),
            Ok(None) => break,
            Err(_) => {
                let hung = match next {
                    "open" => &mut outcome.open,
                    "read" => &mut outcome.read,
                    _ => &mut outcome.write,
                };
                hung.hung += 1;
                break;
            }
        };
        let (calls, result) = match result {
            Done::Open(result) => {
                next = if result.is_ok() { "read" } else { "open" };
                (&mut outcome.open, result)
            }
            Done::Read(result) => {
                next = "write";
                (&mut outcome.read, result)
            }
            Done::Write(result) => {
                next = "open";
                (&mut outcome.write, result)
            }
        };
        match result {
            Ok(()) => calls.millis.push(took.as_secs_f64() * 1000.0),
            Err(error) => calls.errors.push(error.raw_os_error().unwrap_or(0)),
        }
    }
    print(&outcome)
}

type Report = mpsc::Sender<Option<(Done, Duration)>>;

/// Nobody who listens has stopped waiting: what cannot be told is not missed.
fn calls(path: &Path, count: usize, done: &Report) {
    for _ in 0..count {
        let start = Instant::now();
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let (file, result) = match opened {
            Ok(file) => (Some(file), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let _ = done.send(Some((Done::Open(result), start.elapsed())));
        let Some(mut file) = file else { continue };
        timed(done, Done::Read, || file.read(&mut [0; 16]).map(drop));
        timed(done, Done::Write, || write(&mut file));
    }
    let _ = done.send(None);
}

fn write(file: &mut File) -> io::Result<()> {
    file.rewind()?;
    file.write_all(b"windtunnel")
}

fn timed(done: &Report, kind: fn(io::Result<()>) -> Done, call: impl FnOnce() -> io::Result<()>) {
    let start = Instant::now();
    let result = call();
    let _ = done.send(Some((kind(result), start.elapsed())));
}
