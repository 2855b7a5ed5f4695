//! Test programs, and once more what failed in them.
//!
//! The machines that tests run on are shared and stand still for seconds at a time, which no bound can
//! tell from what it is there for. So a failure counts when it happens again, alone; the first is told
//! in any case. What is made by chance is not tried again: the next would be another.

use std::collections::BTreeSet;
use std::io::Read;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::print;

/// What proptest says of what it found, and the test whose scripts are others each time.
const BY_CHANCE: [&str; 2] = ["minimal failing input", "---- no_script_breaks_a_law "];

/// What has become of a test program.
pub(crate) struct Ran {
    pub(crate) is_success: bool,
    /// Its standard output.
    text: String,
}

/// Runs a test program with these arguments, passing its output on; once more if no test was begun:
/// then what they stand on did not come up.
pub(crate) fn begun(
    arguments: &[&str],
    command: impl Fn(&[&str]) -> Result<Command>,
) -> Result<Ran> {
    let ran = run(command(arguments)?)?;
    if ran.is_success || programs(&ran.text) > 0 {
        return Ok(ran);
    }
    print::error("no test was begun: once more");
    run(command(arguments)?)
}

/// Runs a test program, and then what failed in it.
pub(crate) fn twice(
    arguments: &[&str],
    command: impl Fn(&[&str]) -> Result<Command>,
) -> Result<()> {
    let first = begun(arguments, &command)?;
    if first.is_success {
        return Ok(());
    }
    for name in failed(&first.text)? {
        print::error(&format!("{name} failed and is run once more"));
        let second = run(command(&["--exact", &name])?)?;
        ensure!(
            second.is_success && results(&second.text, "passed") > 0,
            "{name} failed twice"
        );
    }
    Ok(())
}

fn run(mut command: Command) -> Result<Ran> {
    let name = command.get_program().display().to_string();
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("run {name}"))?;
    let mut stdout = child.stdout.take().context("no output")?;
    let (mut all, mut part) = (Vec::new(), [0; 4096]);
    loop {
        let read = stdout.read(&mut part).context("read the output")?;
        if read == 0 {
            break;
        }
        print::bytes(&part[..read]);
        all.extend_from_slice(&part[..read]);
    }
    let status = child.wait().with_context(|| format!("wait for {name}"))?;
    Ok(Ran {
        is_success: status.success(),
        text: String::from_utf8_lossy(&all).into_owned(),
    })
}

/// The names of the tests that failed. An error where that cannot be all that went wrong.
fn failed(text: &str) -> Result<BTreeSet<String>> {
    ensure!(
        !BY_CHANCE.iter().any(|chance| text.contains(chance)),
        "tests failed, and what is made by chance is not tried again"
    );
    let ended = text.lines().filter(|line| line.starts_with(RESULT));
    ensure!(
        programs(text) == ended.count(),
        "a test program did not run to its end"
    );
    let (mut names, mut listed, mut is_list) = (BTreeSet::new(), 0, false);
    for line in text.lines() {
        is_list = line == "failures:" || is_list && line.starts_with("    ");
        if let Some(name) = line.strip_prefix("    ").filter(|_| is_list) {
            names.insert(name.to_owned());
            listed += 1;
        }
    }
    let told = results(text, "failed");
    ensure!(
        told > 0 && told == listed,
        "tests failed: {told}, of which {listed} have names"
    );
    Ok(names)
}

const RESULT: &str = "test result: ";

/// How many test programs have begun.
fn programs(text: &str) -> usize {
    let begun = text
        .lines()
        .filter_map(|line| line.strip_prefix("running "));
    begun
        .filter(|rest| rest.ends_with(" test") || rest.ends_with(" tests"))
        .count()
}

/// How many tests `passed` or `failed`, by what the programs say at their ends.
fn results(text: &str, what: &str) -> usize {
    let ends = text.lines().filter_map(|line| line.strip_prefix(RESULT));
    let parts = ends.flat_map(|end| end.split([';', '.']));
    let counts = parts.filter_map(|part| part.trim().strip_suffix(what));
    counts
        .filter_map(|count| count.trim().parse::<usize>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSED: &str = "
running 2 tests
..
test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 7 filtered out; finished in 0.00s
";

    const FAILED: &str = "
running 3 tests
.FF
failures:

---- a::b stdout ----

thread 'a::b' panicked at a.rs:1:2:
not within 5s
failures:
---- d stdout ----
    no name

failures:
    a::b
    d

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    fn names(text: &str) -> Option<Vec<String>> {
        failed(text).ok().map(|names| names.into_iter().collect())
    }

    #[test]
    fn what_failed_has_a_name() {
        assert_eq!(
            names(&format!("{PASSED}{FAILED}{PASSED}")),
            Some(vec!["a::b".to_owned(), "d".to_owned()])
        );
        assert_eq!(
            (results(FAILED, "passed"), results(FAILED, "failed")),
            (1, 2)
        );
    }

    #[test]
    fn what_has_no_name_is_not_tried_again() {
        // Nothing failed, and yet it did not succeed.
        assert_eq!(names(PASSED), None);
        // A program was killed.
        assert_eq!(names(&format!("{FAILED}\nrunning 5 tests\n.")), None);
        // A name is missing.
        assert_eq!(names(&FAILED.replace("    a::b\n", "")), None);
        assert_eq!(programs(&format!("{FAILED}\nrunning 1 test\n")), 2);
        assert_eq!(programs("error: could not compile"), 0);
    }

    #[test]
    fn what_is_made_by_chance_is_not_tried_again() {
        for chance in [
            "Test failed: no.\nminimal failing input: 3",
            "---- no_script_breaks_a_law stdout ----",
        ] {
            assert_eq!(names(&FAILED.replace("not within 5s", chance)), None);
        }
    }
}
