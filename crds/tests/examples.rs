//! The examples: each parses, and is for what the sample runs, or says what it needs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends")]

use std::{fs, path::Path};

use windtunnel_crds::{ChaosExperiment, fault::Fault};

fn examples() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
    let files = fs::read_dir(folder).unwrap().map(|entry| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        (name, fs::read_to_string(path).unwrap())
    });
    files.collect()
}

/// The volume that a fault is on.
fn volume(fault: &Fault) -> Option<&str> {
    let io = fault.io.as_ref().map(|io| io.volume.as_str());
    io.or(fault.disk_fill.as_ref().map(|disk| disk.volume.as_str()))
}

#[test]
fn an_example_is_for_the_sample_or_says_what_it_needs() {
    let (sample, examples): (Vec<_>, Vec<_>) = examples()
        .into_iter()
        .partition(|(name, _)| name == "sample.yaml");
    let sample = &sample[0].1;
    assert!(examples.len() > 10);
    for (name, text) in examples {
        let parsed: ChaosExperiment =
            serde_saphyr::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        let says = text.lines().any(|line| line.starts_with("# Needs "));
        for fault in &parsed.spec.faults {
            let labels = fault.target.selector.match_labels.iter().flatten();
            let has_pods = labels
                .into_iter()
                .all(|(key, value)| sample.contains(&format!("labels: {{{key}: {value}}}")));
            let has_volume = volume(fault).is_none_or(|volume| sample.contains(volume));
            let fits = has_pods && has_volume;
            assert!(
                fits || says,
                "{name}: fault {} is for nothing in the sample",
                fault.name
            );
        }
    }
}
