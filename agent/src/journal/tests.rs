//! What survives an agent, and what stops nothing.

use std::{collections::BTreeSet, os::unix::fs::symlink, time::Duration};

use nix::{sys::stat::Mode, unistd::mkfifo};

use super::*;
use crate::{
    model::{Act, Objects, State, Window},
    testing::entry,
};

#[test]
fn what_was_written_is_read_by_the_next_agent() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, aside) = Journal::open(dir.path()).unwrap();
    assert!(aside.is_empty());
    journal.write(entry("a")).unwrap();
    journal.write(entry("b")).unwrap();
    journal.forget(&entry("a").key);
    journal.forget(&entry("a").key);
    drop(journal);
    let (journal, aside) = Journal::open(dir.path()).unwrap();
    assert!(aside.is_empty());
    assert_eq!(
        journal.entries().values().collect::<Vec<_>>(),
        [&entry("b")]
    );
}

#[test]
fn two_agents_cannot_hold_it() {
    let dir = tempfile::tempdir().unwrap();
    let _first = Journal::open(dir.path()).unwrap();
    assert!(matches!(
        Journal::open(dir.path()),
        Err(JournalError::Locked(_))
    ));
}

#[test]
fn what_is_no_entry_is_set_aside_and_the_rest_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    journal.write(entry("a")).unwrap();
    let good = journal.path(&entry("a").key);
    drop(journal);
    let newer = fs::read_to_string(&good)
        .unwrap()
        .replace("\"format\":1", "\"format\":2");
    for (name, content) in [
        ("cut.json", "{\"format\":1,"),
        ("foreign.json", "{}"),
        ("empty.json", ""),
        ("newer.json", &newer),
        ("renamed.json", &fs::read_to_string(&good).unwrap()),
        ("half.new", "{"),
    ] {
        fs::write(dir.path().join(name), content).unwrap();
    }
    fs::write(dir.path().join("large.json"), vec![b' '; 100_000]).unwrap();
    let (journal, aside) = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.entries().len(), 1);
    let mut names: Vec<_> = aside.iter().map(|a| a.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "cut.json",
            "empty.json",
            "foreign.json",
            "large.json",
            "newer.json",
            "renamed.json"
        ]
    );
    assert!(dir.path().join("aside/cut.json").exists());
    drop(journal);
    let (_, again) = Journal::open(dir.path()).unwrap();
    let sorted = |mut aside: Vec<SetAside>| {
        aside.sort_by(|a, b| a.name.cmp(&b.name));
        aside
    };
    assert_eq!(sorted(again), sorted(aside), "told until it is removed");
}

#[test]
fn nothing_that_is_no_file_keeps_the_rest_from_being_read() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    journal.write(entry("a")).unwrap();
    drop(journal);
    let at = |name| dir.path().join(name);
    mkfifo(&at("pipe.json"), Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", at("zero.json")).unwrap();
    symlink("/", at("root.json")).unwrap();
    // Its place is taken by what cannot be replaced.
    fs::write(at("stuck.json"), "{}").unwrap();
    fs::create_dir(at("aside").join("stuck.json")).unwrap();
    fs::create_dir(at("half.new")).unwrap();
    let (journal, aside) = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.entries().len(), 1);
    let mut names: Vec<&str> = aside.iter().map(|f| f.name.as_str()).collect();
    names.sort_unstable();
    let expected = ["pipe.json", "root.json", "stuck.json", "zero.json"];
    assert_eq!(names, expected);
    let stuck = aside.iter().find(|f| f.name == "stuck.json").unwrap();
    assert!(stuck.message.contains("cannot be set aside"), "{stuck:?}");
}

#[test]
fn a_full_journal_takes_what_it_has_and_no_more() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    for number in 0..MAX_ENTRIES {
        let entry = entry(&number.to_string());
        journal.entries.insert(entry.key.clone(), entry);
    }
    journal.write(entry("0")).unwrap();
    let refused = journal.write(entry("one more"));
    assert!(matches!(refused, Err(JournalError::Full)));
    journal.forget(&entry("0").key);
    journal.write(entry("one more")).unwrap();
}

#[test]
fn a_bounded_number_of_files_is_kept_aside() {
    let dir = tempfile::tempdir().unwrap();
    for i in 0..=MAX_ASIDE {
        fs::write(dir.path().join(format!("{i}.json")), "{}").unwrap();
    }
    let (_, aside) = Journal::open(dir.path()).unwrap();
    assert_eq!(aside.len(), MAX_ASIDE);
    let kept = fs::read_dir(dir.path().join("aside")).unwrap();
    assert_eq!(kept.count(), MAX_ASIDE);
}

#[test]
fn an_entry_that_cannot_be_written_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    journal.write(entry("a")).unwrap();
    let mut large = entry("a");
    large.pod_name = "x".repeat(100_000);
    assert!(matches!(
        journal.write(large),
        Err(JournalError::TooLarge(_))
    ));
    assert_eq!(journal.entries()[&entry("a").key], entry("a"));
    // The directory is gone, as on a tmpfs that was unmounted.
    fs::remove_dir_all(dir.path()).unwrap();
    assert!(matches!(
        journal.write(entry("b")),
        Err(JournalError::Io { .. })
    ));
    assert_eq!(journal.entries().len(), 1);
}

#[test]
fn what_has_happened_is_known_at_once_and_written_when_it_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(dir.path()).unwrap();
    let window = |end| {
        let window = Window {
            begin: Duration::ZERO,
            end: Duration::from_secs(end),
        };
        Entry {
            window: Some(window),
            ..entry("a")
        }
    };
    for pod in ["a", "b"] {
        journal.write(entry(pod)).unwrap();
    }
    // A file is in the directory's place for a while.
    let (there, away) = (dir.path(), dir.path().with_extension("away"));
    fs::rename(there, &away).unwrap();
    fs::write(there, "").unwrap();
    journal.note(window(1));
    journal.note(window(2));
    journal.forget(&entry("b").key);
    let known: Vec<_> = journal.entries().values().cloned().collect();
    assert_eq!(known, [window(2)]);
    journal.flush();
    fs::remove_file(there).unwrap();
    fs::rename(&away, there).unwrap();
    journal.flush();
    let next = |journal| {
        drop::<Journal>(journal);
        let (journal, _) = Journal::open(dir.path()).unwrap();
        journal.entries().values().cloned().collect::<Vec<_>>()
    };
    assert_eq!(next(journal), [window(2)]);
}

/// What agents of this format have written is read, and means the same: whoever changes the form of an
/// entry gives it another number. A kind that comes to it is added to the file.
#[test]
fn entries_of_this_format_are_read_for_good() {
    let written = include_str!("../../testdata/journal-format-1.jsonl");
    assert_eq!(FORMAT, 1);
    let dir = tempfile::tempdir().unwrap();
    let mut met = BTreeSet::new();
    for line in written.lines() {
        let raw: serde_json::Value = serde_json::from_str(line).unwrap();
        let entry: Entry = serde_json::from_str(line).unwrap();
        assert_eq!(serde_json::to_value(&entry).unwrap(), raw);
        met.insert(match &entry.state {
            State::Prepared => "prepared",
            State::Injecting { .. } => "injecting",
            State::Injected { .. } => "injected",
            State::Waiting { .. } => "waiting",
            State::Ended(_) => "ended",
        });
        met.insert(match &entry.objects {
            Objects::Network(_) => "network",
            Objects::Container(container) => match container.act {
                Act::Cpu { .. } => "cpu",
                Act::Memory(_) => "memory",
                Act::Io(_) => "io",
                Act::Fill(_) => "fill",
                Act::Kill { .. } => "kill",
                Act::Pause => "pause",
            },
        });
        let (mut journal, _) = Journal::open(dir.path()).unwrap();
        journal.write(entry.clone()).unwrap();
        fs::write(journal.path(&entry.key), line).unwrap();
        drop(journal);
        let (journal, aside) = Journal::open(dir.path()).unwrap();
        assert!(aside.is_empty(), "{aside:?}");
        assert_eq!(journal.entries()[&entry.key], entry);
    }
    assert_eq!(met.len(), 12, "{met:?}");
    let of_netem = [
        "Random",
        "GilbertElliott",
        "FourState",
        "Uniform",
        "Normal",
        "Pareto",
    ];
    for word in of_netem
        .into_iter()
        .chain(["ParetoNormal", "Egress", "Ingress"])
    {
        assert!(written.contains(&format!("\"{word}\"")), "{word}");
    }
}
