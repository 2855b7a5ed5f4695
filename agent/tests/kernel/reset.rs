//! Connections that are reset: what either end is told, who is left alone, and what is left afterwards.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};

use windtunnel_agent::kernel::netns::NetNs;
use windtunnel_agent::kernel::nft::{
    Chain, Direction, OwnedTable, Role, Selection, Table, Transport, Verdict, list_tables,
};
use windtunnel_agent::kernel::sockets::Sockets;
use windtunnel_agent::network::selects;

use crate::support::{Pair, SOON, TABLE, V4, V6, peers, table};

/// A reset of all connections with some peers, both ways.
fn resets(pair: &Pair, selected: &[&str]) -> Table {
    let chain = |direction| Chain {
        direction,
        device: pair.eth0.clone(),
        priority: 0,
        spare: Vec::new(),
        select: vec![Selection {
            protocols: vec![Transport::Tcp],
            ..peers(selected)
        }],
        verdict: Verdict::Reset,
    };
    table(vec![chain(Direction::Egress), chain(Direction::Ingress)])
}

fn listen(netns: &NetNs, address: &str) -> TcpListener {
    let at = SocketAddr::new(address.parse().unwrap(), 0);
    netns.enter(|| TcpListener::bind(at)).unwrap().unwrap()
}

fn connect(netns: &NetNs, to: &TcpListener) -> std::io::Result<TcpStream> {
    let to = to.local_addr().unwrap();
    netns
        .enter(|| TcpStream::connect_timeout(&to, SOON))
        .unwrap()
}

/// Both ends of a connection.
fn open(netns: &NetNs, to: &TcpListener) -> (TcpStream, TcpStream) {
    let client = connect(netns, to).unwrap();
    let (server, _) = to.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(SOON)).unwrap();
    }
    (client, server)
}

fn passes((client, server): &mut (TcpStream, TcpStream)) {
    client.write_all(b"x").unwrap();
    server.read_exact(&mut [0]).unwrap();
}

/// What an end is told that waits for something.
fn told(mut end: &TcpStream) -> ErrorKind {
    end.read(&mut [0]).expect_err("nothing was sent").kind()
}

#[test]
fn open_connections_end_for_both_and_new_ones_are_refused() {
    for (pod, peer, other) in [(V4[0], V4[1], V4[2]), (V6[0], V6[1], V6[2])] {
        let pair = Pair::new();
        let (remote, spared, local) = (
            listen(&pair.peer, peer),
            listen(&pair.peer, other),
            listen(&pair.pod, pod),
        );
        let (mut out, mut left) = (open(&pair.pod, &remote), open(&pair.pod, &spared));
        let mut table = OwnedTable::install(&pair.pod, &resets(&pair, &[peer])).unwrap();
        table.verify().unwrap();
        let mut sockets = Sockets::open(&pair.pod).unwrap();
        let mut ended = 0;
        for connection in sockets.connections().unwrap() {
            if selects(table.plan(), connection.remote, connection.local.1) {
                ended += usize::from(sockets.end(&connection).unwrap());
            }
        }
        assert_eq!(ended, 1, "{peer}");
        assert_eq!(
            told(&out.0),
            ErrorKind::ConnectionAborted,
            "{peer}: the pod"
        );
        assert_eq!(told(&out.1), ErrorKind::ConnectionReset, "{peer}: its peer");
        let refused = connect(&pair.pod, &remote).map(drop).unwrap_err();
        assert_eq!(
            refused.kind(),
            ErrorKind::ConnectionRefused,
            "{peer}: from the pod"
        );
        // By IPv6 the peer may come from its other address.
        if pod == V4[0] {
            let refused = connect(&pair.peer, &local).map(drop).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused, "to the pod");
        }
        passes(&mut left);
        assert!(table.counters().unwrap().sum(Role::Selected).packets >= 1);
        drop(table);
        assert!(list_tables(&pair.pod, TABLE).unwrap().is_empty());
        out = open(&pair.pod, &remote);
        passes(&mut out);
    }
}

#[test]
fn without_the_kernels_help_each_end_is_told_by_the_next_packet() {
    let pair = Pair::new();
    let remote = listen(&pair.peer, V4[1]);
    let mut first = open(&pair.pod, &remote);
    let mut second = open(&pair.pod, &remote);
    let _table = OwnedTable::install(&pair.pod, &resets(&pair, &[V4[1]])).unwrap();
    first.0.write_all(b"x").unwrap();
    assert_eq!(told(&first.0), ErrorKind::ConnectionReset, "the pod sends");
    second.1.write_all(b"x").unwrap();
    assert_eq!(
        told(&second.1),
        ErrorKind::ConnectionReset,
        "its peer sends"
    );
}
