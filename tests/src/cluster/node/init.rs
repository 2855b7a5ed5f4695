//! Init of a node: makes a system out of a bare kernel, then reaps until the end.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::unistd::sethostname;

use super::{clock, config};
use crate::cluster::guest::{
    PATH, make_dirs, mount_base, mount_disk, mount_host, mount_new, power_off,
};
use crate::cluster::isolation::{mount_tmpfs, reap_until};
use crate::cluster::network::ip_batch;
use crate::cluster::{addresses, entry, layout};

/// Runs the node to its end. An error is told on the console, and the kernel ends in any case.
pub(crate) fn main(index: u8) -> Result<ExitCode> {
    let result = run(index);
    if let Err(error) = &result {
        crate::cluster::progress::say(&format!("node init: {error:#}"));
    }
    power_off()?;
    result.map(|()| ExitCode::FAILURE)
}

fn run(index: u8) -> Result<()> {
    let name = addresses::node_name(index);
    sethostname(&name).context("set the host name")?;
    mount_base()?;
    mount_host(
        &layout::node_directory(&name).display().to_string(),
        MsFlags::empty(),
    )?;
    clock::set(&layout::node_directory(&name))?;
    mount_writable()?;
    fake_clock_speed()?;
    tune()?;
    connect(index)?;
    config::write(index)?;
    // Inherited by the services, and by commands of the harness.
    let mut agent = entry::child("node-agent", &[&index.to_string()])
        .env("PATH", PATH)
        .env("HOME", "/root")
        .env("TMPDIR", "/run/tmp")
        .spawn()
        .context("start the agent")?;
    let status = reap_until(&mut agent)?;
    anyhow::bail!("the agent ended: {status}")
}

/// The root is read-only: what must be written to is covered. What a real node has on its disk
/// is on the block device, and is still there after the node was killed.
fn mount_writable() -> Result<()> {
    for directory in ["/mnt", "/tmp", "/var/tmp"] {
        mount_tmpfs(directory, "mode=1777")?;
    }
    make_dirs(&["/run/etc/upper", "/run/etc/work"])?;
    let layers = "lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work";
    mount_new("etc", "/etc", "overlay", MsFlags::empty(), layers)?;
    mount_disk("/var/lib")?;
    mount_new(
        "none",
        "/var/lib",
        "",
        MsFlags::MS_REC | MsFlags::MS_SHARED,
        "",
    )?;
    make_dirs(&[
        "/etc/cni/net.d",
        "/run/tmp",
        "/var/lib/cni",
        "/var/lib/containerd",
        "/var/lib/kubelet",
        "/var/lib/log/containers",
        "/var/lib/log/pods",
    ])?;
    // Its files are not synced: a killed node would find them empty, and fail on that.
    mount_tmpfs("/var/lib/cni", "mode=755")?;
    mount_new("/var/lib/log", "/var/log", "", MsFlags::MS_BIND, "")
}

/// kubelet reads the processor's clock speed and ends without it; this kernel does not tell.
fn fake_clock_speed() -> Result<()> {
    let text = fs::read_to_string("/proc/cpuinfo").context("read /proc/cpuinfo")?;
    let text = text.replace("bogomips", "cpu MHz\t\t: 2000.000\nbogomips");
    fs::write("/run/cpuinfo", text).context("write /run/cpuinfo")?;
    mount(
        Some("/run/cpuinfo"),
        "/proc/cpuinfo",
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .context("cover /proc/cpuinfo")
}

fn tune() -> Result<()> {
    for (key, value) in [
        ("net/bridge/bridge-nf-call-ip6tables", "1"),
        // Without it a reply between pods of one node goes around the Service's translation.
        ("net/bridge/bridge-nf-call-iptables", "1"),
        // Duplicate address detection delays each new pod by a second.
        ("net/ipv6/conf/all/accept_dad", "0"),
        ("net/ipv6/conf/default/accept_dad", "0"),
        ("net/ipv6/conf/all/forwarding", "1"),
        ("net/ipv4/ip_forward", "1"),
        ("vm/overcommit_memory", "1"),
    ] {
        let path = Path::new("/proc/sys").join(key);
        fs::write(&path, value).with_context(|| format!("set {key} to {value}"))?;
    }
    Ok(())
}

/// `vec0` is the cluster's network, `vec1` the harness's own.
fn connect(index: u8) -> Result<()> {
    let mut lines = vec![
        "link set lo up".to_owned(),
        format!("address add {}/24 dev vec0", addresses::node_v4(index)),
        format!(
            "address add {}/64 dev vec0 nodad",
            addresses::node_v6(index)
        ),
        format!(
            "address add {}/24 dev vec1",
            addresses::node_management(index)
        ),
        "link set vec0 up".to_owned(),
        "link set vec1 up".to_owned(),
        format!("route add default via {}", addresses::HOST),
        format!("route add ::/0 via {}", addresses::HOST_V6),
    ];
    // Of nodes that are not there, too: the number of nodes is not known here.
    for other in (1..=addresses::MOST_NODES).filter(|&other| other != index) {
        lines.push(format!(
            "route add {} via {}",
            addresses::pods_v4(other),
            addresses::node_v4(other)
        ));
        lines.push(format!(
            "route add {} via {}",
            addresses::pods_v6(other),
            addresses::node_v6(other)
        ));
    }
    ip_batch(&lines)
}
