//! Long commands: what they do is seen while they run, and kept in a log.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const EVERY: Duration = Duration::from_secs(5);
const TAIL_LINES: usize = 25;

/// Tells the user something, on standard error.
pub(crate) fn say(text: &str) {
    // There is no one to tell that nobody listens.
    let _ = writeln!(io::stderr(), "{text}");
}

/// A command with a name for the user, and a way to see how far it is.
pub(crate) struct Job<'a> {
    pub(crate) name: &'a str,
    pub(crate) log: &'a Path,
    /// What is counted, in the plural: "objects".
    pub(crate) unit: &'a str,
    /// Whether a line of output means that one more is done.
    pub(crate) is_step: fn(&str) -> bool,
}

impl Job<'_> {
    /// Runs the command to its end, saying every few seconds how far it is.
    pub(crate) fn run(&self, command: &mut Command) -> Result<()> {
        let start = Instant::now();
        let mut log = File::options()
            .create(true)
            .append(true)
            .open(self.log)
            .with_context(|| format!("open {}", self.log.display()))?;
        let (reader, writer) = io::pipe().context("create a pipe")?;
        let shared = writer.try_clone().context("share a pipe")?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(writer)
            .stderr(shared)
            .spawn()
            .with_context(|| format!("run {}", command.get_program().display()))?;
        // The command holds the ends of the pipe that must close for it to read as ended.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut tail = VecDeque::new();
        let mut steps = 0;
        let mut told = Instant::now();
        for line in BufReader::new(reader).split(b'\n') {
            let line = line.context("read the output")?;
            let line = String::from_utf8_lossy(&line).into_owned();
            writeln!(log, "{line}").context("write the log")?;
            steps += usize::from((self.is_step)(&line));
            tail.push_back(line);
            if tail.len() > TAIL_LINES {
                tail.pop_front();
            }
            if told.elapsed() >= EVERY {
                told = Instant::now();
                self.tell(start, steps);
            }
        }
        let status = child.wait().context("wait for the command")?;
        if !status.success() {
            let mut text = String::new();
            for line in &tail {
                let _ = writeln!(text, "  {line}");
            }
            bail!(
                "{}: {status}; all of it is in {}\n{text}",
                self.name,
                self.log.display()
            );
        }
        self.tell(start, steps);
        Ok(())
    }

    fn tell(&self, start: Instant, steps: usize) {
        let seconds = start.elapsed().as_secs();
        let (minutes, seconds) = (seconds / 60, seconds % 60);
        say(&format!(
            "{}: {minutes} min {seconds:02} s, {steps} {}",
            self.name, self.unit
        ));
    }
}

/// The output of a short command.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("run {name}"))?;
    if !output.status.success() {
        bail!(
            "{name}: {}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    String::from_utf8(output.stdout).with_context(|| format!("{name}: output is not text"))
}

/// The last lines of a log, with its name, for an error message.
pub(crate) fn tail(log: &Path, lines: usize) -> String {
    // A log that cannot be read has nothing to say.
    let content = std::fs::read(log).unwrap_or_default();
    let content = String::from_utf8_lossy(&content);
    let all: Vec<&str> = content.lines().collect();
    let last = &all[all.len().saturating_sub(lines)..];
    format!("--- {}\n{}", log.display(), last.join("\n"))
}
