//! Connections that are reset: what is open is ended once, then a table answers whatever is sent on a
//! connection, by either end, with its reset.

use std::{
    io::Read as _,
    net::{Ipv4Addr, TcpListener, TcpStream},
    time::Duration,
};

use windtunnel_runtime::chain;

use super::Effect;
use crate::{
    kernel::{
        link::{LinkName, RouteSocket},
        netns::NetNs,
        nft::{
            Addresses, Chain, Device, Direction, OwnedTable, Role, Selection, Table, Transport,
            Verdict,
        },
        sockets::Sockets,
    },
    model::Counts,
    network,
};

/// Index of the loopback link.
const LOOPBACK: u32 = 1;
/// How long a call of the trial may take.
const TRIAL: Duration = Duration::from_secs(5);

/// The table, and the connections that it is about.
struct Resets {
    table: OwnedTable,
    sockets: Sockets,
    proof: String,
    ended: u64,
    missing: Option<String>,
}

pub(super) fn apply(netns: &NetNs, table: &Table) -> Result<Box<dyn Effect>, String> {
    let mut resets = Resets::install(netns, table)?;
    resets.end_open()?;
    Ok(Box::new(resets))
}

impl Resets {
    fn install(netns: &NetNs, table: &Table) -> Result<Self, String> {
        let sockets = Sockets::open(netns).map_err(|e| chain(&e))?;
        let mut table = OwnedTable::install(netns, table).map_err(|e| chain(&e))?;
        let proof = table.verify().map_err(|e| chain(&e))?.to_string();
        Ok(Self {
            table,
            sockets,
            proof,
            ended: 0,
            missing: None,
        })
    }

    /// Ends what is open; the rules are there already, so that none is opened meanwhile.
    fn end_open(&mut self) -> Result<(), String> {
        for connection in self.sockets.connections().map_err(|e| chain(&e))? {
            let (remote, port) = (connection.remote, connection.local.1);
            if connection.is_own() || !network::selects(self.table.plan(), remote, port) {
                continue;
            }
            match self.sockets.end(&connection) {
                Ok(is_ended) => self.ended += u64::from(is_ended),
                // The rules will end it with its next packet.
                Err(error) => self.missing = Some(chain(&error)),
            }
        }
        Ok(())
    }
}

impl Effect for Resets {
    fn proof(&mut self) -> Result<Option<String>, String> {
        Ok(Some(format!(
            "{}; {} open connections were ended",
            self.proof, self.ended
        )))
    }

    fn note(&self) -> String {
        self.missing.as_ref().map_or(String::new(), |why| {
            format!("open connections end with their next packet, not at once: {why}")
        })
    }

    fn update(&mut self, table: Table) -> Result<(), String> {
        self.table.update(&table).map_err(|e| chain(&e))?;
        self.table.verify().map_err(|e| chain(&e))?;
        self.end_open()
    }

    fn check(&mut self) -> Result<Counts, String> {
        self.table.verify().map_err(|e| chain(&e))?;
        let counters = self.table.counters().map_err(|e| chain(&e))?;
        Ok(Counts {
            matched: counters.sum(Role::Selected).packets,
            ..Counts::measured([("connectionsEnded", self.ended)])
        })
    }
}

/// Resets connections on the loopback link of a namespace of its own, and looks at both ends.
pub(super) fn trial() -> Result<(), String> {
    let netns = NetNs::scratch().map_err(|e| chain(&e))?;
    RouteSocket::open(&netns)
        .and_then(|mut route| route.set_up(LOOPBACK))
        .map_err(|e| chain(&e))?;
    let opened = netns.enter(|| {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let at = listener.local_addr()?;
        let client = TcpStream::connect(at)?;
        let (server, _) = listener.accept()?;
        Ok::<_, std::io::Error>((listener, at, client, server))
    });
    let (_listener, at, client, server) =
        opened.map_err(|e| chain(&e))?.map_err(|e| e.to_string())?;
    let chain_of = |direction| {
        Ok::<_, String>(Chain {
            direction,
            device: Device {
                name: LinkName::new("lo").map_err(|e| chain(&e))?,
                index: LOOPBACK,
            },
            priority: 0,
            spare: Vec::new(),
            select: vec![Selection {
                protocols: vec![Transport::Tcp],
                ..Selection::new("all", Addresses::Any)
            }],
            verdict: Verdict::Reset,
        })
    };
    let table = Table {
        name: "windtunnel-probe".to_owned(),
        chains: vec![chain_of(Direction::Egress)?, chain_of(Direction::Ingress)?],
    };
    let mut resets = Resets::install(&netns, &table)?;
    for connection in resets.sockets.connections().map_err(|e| chain(&e))? {
        // Where the kernel cannot, the rules do it alone.
        let _ = resets.sockets.end(&connection);
    }
    for mut end in [client, server] {
        end.set_read_timeout(Some(TRIAL))
            .map_err(|e| e.to_string())?;
        // Either may have been told of a reset, or be it by what it sends.
        let _ = std::io::Write::write(&mut end, b"x");
        if end.read(&mut [0]).is_ok_and(|length| length > 0) {
            return Err("a connection outlived its reset".to_owned());
        }
    }
    let again = netns.enter(|| TcpStream::connect_timeout(&at, TRIAL).map(drop));
    match again.map_err(|e| chain(&e))? {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Ok(()),
        Err(error) => Err(format!("a connection was not refused: {error}")),
        Ok(()) => Err("a connection was not refused".to_owned()),
    }
}
