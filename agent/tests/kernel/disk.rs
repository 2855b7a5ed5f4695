//! Disk faults on real file systems: what is taken, that it has no name, and that it comes back.

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use windtunnel_agent::kernel::space::Space;
use windtunnel_agent::model::{Act, FillAct, Until};

use crate::injector::{Container, Injector};
use crate::io::{container, inside, outcome, outcome_under};
use crate::support::{SOON, eventually};

const MIB: u64 = 1 << 20;

fn fill(until: Until, reserve: u64) -> Act {
    Act::Fill(FillAct {
        volume: "/mnt/wt-io".to_owned(),
        until,
        reserve,
        limit: None,
    })
}

/// A file system of its own, of 64 MiB; it is gone with the namespace of the test's kernel.
fn small(name: &str, kind: &str) -> String {
    let place = format!("/mnt/wt-small-{name}");
    fs::create_dir_all(&place).unwrap();
    let mut mount = Command::new("mount");
    if kind == "tmpfs" {
        mount.args(["-t", "tmpfs", "-o", "size=64m", "tmpfs", &place]);
    } else {
        let image = format!("/tmp/wt-small-{name}.img");
        fs::File::create(&image).unwrap().set_len(64 * MIB).unwrap();
        let made = Command::new("mkfs.ext4").args(["-q", &image]).status();
        assert!(made.unwrap().success());
        mount.args(["-o", "loop", &image, &place]);
    }
    let mounted = mount.status();
    assert!(mounted.unwrap().success(), "{place}");
    place
}

fn space(place: &str) -> Space {
    Space::of(fs::File::open(place).unwrap()).unwrap()
}

/// A program in the container that writes a file of so many KiB.
fn write(container: &Container, kibibytes: u64) -> Child {
    let script = format!(
        "dd if=/dev/zero of=/mnt/wt-io/new bs=1k count={kibibytes} conv=fsync 2>&1; rm -f /mnt/wt-io/new"
    );
    inside(container, &script)
}

#[test]
fn a_full_disk_has_no_space_and_has_it_back_when_the_injector_dies() {
    for kind in ["ext4", "tmpfs"] {
        let place = small(&format!("full-{kind}"), kind);
        let container = container("full", &place);
        let before = space(&place);
        let mut injector = Injector::applied(&container, fill(Until::Percent(100.0), 0));
        injector.hold(Duration::from_secs(1));
        let full = space(&place);
        // ext4 keeps some for its own tables.
        let is_full = full.available == 0 && full.free < 2 * MIB;
        assert!(is_full, "{kind}: {full:?}");
        assert!(
            injector.counts.effect["bytes"] > before.free - 2 * MIB,
            "{kind}"
        );
        let dd = write(&container, 2048);
        let (_, said) = outcome_under(&mut injector, dd, 2 * SOON).expect("dd ends");
        assert!(said.contains("No space left on device"), "{kind}: {said}");
        let names: Vec<_> = fs::read_dir(&place).unwrap().flatten().collect();
        let ours =
            |name: &fs::DirEntry| name.file_name() != "file" && name.file_name() != "lost+found";
        assert!(!names.iter().any(ours), "{kind}: {names:?}");
        assert_eq!(container.others(), 1, "{kind}");
        injector.kill();
        let took = eventually("the space is back", || {
            space(&place).free + MIB > before.free
        });
        eprintln!("{kind}: the space was back after {took:?}");
        let (_, said) = outcome(write(&container, 2048), 2 * SOON).expect("dd ends");
        assert!(!said.contains("No space"), "{kind}: {said}");
    }
}

#[test]
fn as_much_is_taken_as_told() {
    for (name, volume, kind) in [("ext4", "/mnt/ext4/wt-size", "ext4"), ("share", "", "ext4")] {
        let made = if volume.is_empty() {
            small(name, kind)
        } else {
            volume.to_owned()
        };
        let container = container(name, &made);
        let before = space(&made);
        let (until, wanted) = if volume.is_empty() {
            let half = u64::midpoint(before.used(), before.available);
            (Until::Percent(50.0), half - before.used())
        } else {
            (Until::Size(20 * MIB), 20 * MIB)
        };
        let mut injector = Injector::applied(&container, fill(until, 0));
        injector.hold(Duration::from_secs(1));
        let taken = before.available - space(&made).available;
        assert!(
            wanted.abs_diff(taken) < 2 * MIB,
            "{name}: {taken}, not {wanted}"
        );
        assert!(
            wanted.abs_diff(injector.counts.effect["bytes"]) < MIB,
            "{name}"
        );
        injector.kill();
    }
}

#[test]
fn what_the_node_needs_is_given_back_to_whoever_writes() {
    let place = small("reserve", "ext4");
    let container = container("reserve", &place);
    let reserve = 20 * MIB;
    let mut injector = Injector::applied(&container, fill(Until::Percent(100.0), reserve));
    injector.hold(Duration::from_secs(1));
    let left = space(&place).available;
    assert!((reserve..reserve + 2 * MIB).contains(&left), "{left}");
    let held = injector.counts.effect["bytes"];
    fs::write(Path::new(&place).join("of-the-node"), vec![1; 10 << 20]).unwrap();
    let image = fs::File::open(Path::new(&place).join("of-the-node")).unwrap();
    image.sync_all().unwrap();
    eventually("space is given back", || {
        injector.hold(Duration::from_millis(100));
        space(&place).available >= reserve
    });
    injector.hold(Duration::from_secs(2));
    let now = injector.counts.effect["bytes"];
    assert!(now <= held - 9 * MIB, "{now} of {held}");
}
