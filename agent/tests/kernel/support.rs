//! A pod and a peer in scratch namespaces, and traffic between them.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use windtunnel_agent::kernel::link::{LinkName, RouteSocket};
use windtunnel_agent::kernel::netns::NetNs;
use windtunnel_agent::kernel::nft::{
    Addresses, Chain, Device, Direction, OwnedTable, PortRange, Role, Selection, Table, Verdict,
};
use windtunnel_agent::kernel::qdisc::{Chance, Loss, Netem};

/// Address of the pod, and two of the peer.
pub(crate) const V4: [&str; 3] = ["10.77.0.1", "10.77.0.2", "10.77.0.3"];
pub(crate) const V6: [&str; 3] = ["fd77::1", "fd77::2", "fd77::3"];

/// Longest wait for what must happen.
pub(crate) const SOON: Duration = Duration::from_secs(5);

/// Wait that shows that something does not happen.
pub(crate) const NEVER: Duration = Duration::from_millis(200);

/// A name of our own: each test has its own namespaces.
pub(crate) const TABLE: &str = "wt-test";

/// Whether the kernel is said to have netem; a test that needs it returns otherwise.
pub(crate) fn has_netem() -> bool {
    let is_host = std::env::var("WINDTUNNEL_TEST_KERNEL").is_ok_and(|kernel| kernel == "host");
    if is_host {
        eprintln!("left out: this kernel is said to have no netem");
    }
    !is_host
}

/// Tries until it holds, within a bound.
pub(crate) fn eventually(what: &str, holds: impl FnMut() -> bool) -> Duration {
    within(SOON, what, holds)
}

/// The same, where what is waited for is much.
pub(crate) fn within(bound: Duration, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < bound, "not within {bound:?}: {what}");
        thread::sleep(Duration::from_millis(1));
    }
    start.elapsed()
}

pub(crate) fn name(name: &str) -> LinkName {
    LinkName::new(name).unwrap()
}

/// Two namespaces with a veth pair between them, both families, no packet waiting.
pub(crate) struct Pair {
    pub(crate) pod: NetNs,
    pub(crate) peer: NetNs,
    /// Links of the pod.
    pub(crate) route: RouteSocket,
    /// The pod's link.
    pub(crate) eth0: Device,
}

impl Pair {
    pub(crate) fn new() -> Self {
        let pod = scratch();
        let peer = scratch();
        let mut route = RouteSocket::open(&pod).unwrap();
        let eth0 = route
            .create_veth(&name("eth0"), &name("peer"), &peer)
            .unwrap();
        let mut peer_route = RouteSocket::open(&peer).unwrap();
        let link = peer_route.link_named(&name("peer")).unwrap().unwrap();
        // Up before they have addresses, and without those that the kernel takes a second to try:
        // a pair is usable at once, and nothing in it changes by itself.
        run(&pod, &["ip", "link", "set", "eth0", "addrgenmode", "none"]);
        run(&peer, &["ip", "link", "set", "peer", "addrgenmode", "none"]);
        route.set_up(eth0.index).unwrap();
        peer_route.set_up(link.index).unwrap();
        address(&mut route, eth0.index, &[V4[0], V6[0]]);
        let peers = [V4[1], V4[2], V6[1], V6[2]];
        address(&mut peer_route, link.index, &peers);
        let eth0 = Device {
            name: name("eth0"),
            index: eth0.index,
        };
        let pair = Self {
            pod,
            peer,
            route,
            eth0,
        };
        for to in peers {
            let flow = pair.flow(to, 0);
            eventually("the pair is connected", || flow.out(NEVER).is_some());
            eventually("the pair is connected", || flow.back(NEVER).is_some());
        }
        pair
    }

    /// An ifb that is up, with netem or with what the kernel puts there.
    pub(crate) fn ifb(&mut self, ifb: &str, netem: Option<&Netem>) -> Device {
        let link = self.route.create_ifb(&name(ifb)).unwrap();
        if let Some(netem) = netem {
            self.route.install_netem(link.index, netem).unwrap();
        }
        self.route.set_up(link.index).unwrap();
        Device {
            name: name(ifb),
            index: link.index,
        }
    }

    pub(crate) fn chain(
        &self,
        direction: Direction,
        select: Vec<Selection>,
        ifb: &Device,
    ) -> Chain {
        Chain {
            direction,
            device: self.eth0.clone(),
            priority: 0,
            spare: Vec::new(),
            select,
            verdict: Verdict::Forward(ifb.clone()),
        }
    }

    /// Installs and proves a table with one chain.
    pub(crate) fn install(&self, chain: Chain) -> OwnedTable {
        let mut table = OwnedTable::install(&self.pod, &table(vec![chain])).unwrap();
        table.verify().unwrap();
        table
    }

    /// Sockets for UDP between the pod and an address of the peer; port 0 is any.
    pub(crate) fn flow(&self, peer: &str, peer_port: u16) -> Flow {
        self.flow_from(0, peer, peer_port)
    }

    pub(crate) fn flow_from(&self, pod_port: u16, peer: &str, peer_port: u16) -> Flow {
        let peer: IpAddr = peer.parse().unwrap();
        let pod = if peer.is_ipv4() { V4[0] } else { V6[0] };
        let pod = SocketAddr::new(pod.parse().unwrap(), pod_port);
        let peer = SocketAddr::new(peer, peer_port);
        let bind = |netns: &NetNs, to| netns.enter(|| UdpSocket::bind(to)).unwrap().unwrap();
        Flow {
            pod: bind(&self.pod, pod),
            peer: bind(&self.peer, peer),
        }
    }

    /// Everything in the pod's namespace, as the system's own tools show it.
    pub(crate) fn state(&self) -> String {
        let commands: [&[&str]; 5] = [
            &["ip", "-details", "link"],
            &["ip", "address"],
            &["ip", "-6", "route", "show", "table", "all"],
            &["tc", "qdisc"],
            &["nft", "list", "ruleset"],
        ];
        commands.map(|command| run(&self.pod, command)).join("\n")
    }
}

/// UDP between the pod and the peer.
pub(crate) struct Flow {
    pub(crate) pod: UdpSocket,
    pub(crate) peer: UdpSocket,
}

impl Flow {
    /// Sends a datagram out of the pod and waits for it; how long it took.
    pub(crate) fn out(&self, wait: Duration) -> Option<Duration> {
        pass(&self.pod, &self.peer, wait)
    }

    /// Sends a datagram into the pod and waits for it; how long it took.
    pub(crate) fn back(&self, wait: Duration) -> Option<Duration> {
        pass(&self.peer, &self.pod, wait)
    }

    /// Sends datagrams out of the pod and counts those that arrive.
    pub(crate) fn burst_out(&self, count: u32) -> usize {
        for _ in 0..count {
            self.send_out();
        }
        let mut buffer = [0; 64];
        self.peer.set_read_timeout(Some(NEVER)).unwrap();
        let received = std::iter::from_fn(|| self.peer.recv(&mut buffer).ok());
        received.count()
    }

    /// Sends a datagram out of the pod; whether it is there at once. No socket's wait is short
    /// enough to measure with.
    pub(crate) fn is_open(&self) -> bool {
        self.peer.set_nonblocking(true).unwrap();
        self.send_out();
        self.peer.recv(&mut [0; 64]).is_ok()
    }

    pub(crate) fn send_out(&self) {
        let to = self.peer.local_addr().unwrap();
        self.pod.send_to(b"burst", to).unwrap();
    }
}

fn pass(from: &UdpSocket, to: &UdpSocket, wait: Duration) -> Option<Duration> {
    let mut buffer = [0; 64];
    let stale = "older datagrams are read away";
    to.set_nonblocking(true).expect(stale);
    while to.recv(&mut buffer).is_ok() {}
    to.set_nonblocking(false).expect(stale);
    let sent = Instant::now();
    from.send_to(b"one", to.local_addr().unwrap()).unwrap();
    to.set_read_timeout(Some(wait)).unwrap();
    match to.recv(&mut buffer) {
        Ok(_) => Some(sent.elapsed()),
        Err(error) => {
            assert!(matches!(
                error.kind(),
                ErrorKind::WouldBlock | ErrorKind::TimedOut
            ));
            None
        }
    }
}

fn scratch() -> NetNs {
    let netns = NetNs::scratch().expect("these tests need root");
    let mut route = RouteSocket::open(&netns).unwrap();
    let lo = route.link_named(&name("lo")).unwrap().unwrap();
    route.set_up(lo.index).unwrap();
    netns
}

fn address(route: &mut RouteSocket, link: u32, addresses: &[&str]) {
    for address in addresses {
        let length = if address.contains(':') { 64 } else { 24 };
        let address = format!("{address}/{length}").parse().unwrap();
        route.add_address(link, address).unwrap();
    }
}

pub(crate) fn table(chains: Vec<Chain>) -> Table {
    Table {
        name: TABLE.to_owned(),
        chains,
    }
}

/// All traffic with these addresses.
pub(crate) fn peers(addresses: &[&str]) -> Selection {
    let networks = addresses.iter().map(|address| {
        let address: IpAddr = address.parse().unwrap();
        address.into()
    });
    Selection::new("peers", Addresses::In(networks.collect()))
}

pub(crate) fn everything() -> Selection {
    Selection::new("everything", Addresses::Any)
}

pub(crate) fn port(port: u16) -> Vec<PortRange> {
    vec![PortRange::one(port)]
}

pub(crate) fn selected(table: &mut OwnedTable) -> u64 {
    table.counters().unwrap().sum(Role::Selected).packets
}

pub(crate) fn delay(milliseconds: u64) -> Netem {
    let mut netem = Netem::new(1000);
    netem.delay.latency = Duration::from_millis(milliseconds);
    netem
}

pub(crate) fn loss(percent: f64) -> Netem {
    let mut netem = Netem::new(1000);
    netem.loss = Loss::Random(Chance {
        percent,
        correlation: 0.0,
    });
    netem
}

/// Output of a program run inside a namespace.
pub(crate) fn run(netns: &NetNs, command: &[&str]) -> String {
    let output = netns
        .enter(|| Command::new(command[0]).args(&command[1..]).output())
        .unwrap()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text} {error}");
    text
}

/// The variable that names the part that a process of this test program plays.
const PART: &str = "WT_PART";

/// Whether this process was started to play the part; parts are tests, so that the test program
/// finds them by name, and end at once where nobody asked for them.
pub(crate) fn plays(part: &str) -> bool {
    std::env::var(PART).is_ok_and(|asked| asked == part)
}

/// Another process of this test program that plays one of its parts.
pub(crate) struct Subprocess {
    pub(crate) child: Child,
    lines: Box<dyn Iterator<Item = String> + Send>,
}

impl Subprocess {
    /// Starts a process in the calling thread's namespaces.
    pub(crate) fn start(part: &str, variables: &[(&str, String)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", part, "--nocapture", "--test-threads=1"])
            .env(PART, part)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .arg0("kernel-test")
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let lines = Box::new(output.lines().map_while(Result::ok));
        Self { child, lines }
    }

    /// Waits for a line that starts so, and gives what follows.
    pub(crate) fn wait_for(&mut self, prefix: &str) -> String {
        let mut found = self
            .lines
            .by_ref()
            .filter_map(|line| line.split_once(prefix).map(|(_, rest)| rest.to_owned()));
        found.next().expect("the process says it")
    }

    /// Kills the process, and returns when it is dead.
    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// A process of the test; it ends with it.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn in_netns(netns: &NetNs) -> Self {
        let mut sleep = Command::new("sleep");
        sleep.arg("600");
        Self(netns.enter(|| sleep.spawn()).unwrap().unwrap())
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether a process is held by a tracer.
pub(crate) fn is_held(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.contains("\nState:\tt")
}

/// What a process does until it is killed, or the test that started it is gone.
pub(crate) fn stay() {
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

impl Drop for Subprocess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The ifb that a chain forwards to.
pub(crate) fn forward_to(chain: &mut Chain) -> &mut Device {
    let Verdict::Forward(to) = &mut chain.verdict else {
        panic!("the chain forwards nothing")
    };
    to
}
