//! The inert half of a network fault: ifbs with their queueing disciplines, made before the start
//! and removed after the end. Nothing passes them until an injector's table says so.

use thiserror::Error;

use crate::{
    kernel::{
        link::{Link, LinkError, LinkName, RouteSocket},
        netns::{NetNs, NetNsError},
        nft::{self, Device, NftError, OwnedTable},
        qdisc::QdiscError,
    },
    model::Detour,
    network::{self, LINK_PREFIX, TABLE_PREFIX},
};

/// The kind of links that are made for faults.
const IFB: &str = "ifb";
/// Kinds of links that faults were tested on.
const TESTED: [&str; 1] = ["veth"];

/// Why an impairment cannot be built, removed or looked for.
#[derive(Debug, Error)]
pub enum ImpairError {
    /// A link is of a kind that was never tested.
    #[error("link {name} is of kind {kind}; faults were tested on {} only", TESTED.join(", "))]
    LinkKind {
        /// The link.
        name: String,
        /// Its kind.
        kind: String,
    },
    /// There is no link but loopback.
    #[error("the target has no link that is up")]
    NoLink,
    /// A link could not be handled.
    #[error("links")]
    Link(#[from] LinkError),
    /// A queueing discipline could not be handled.
    #[error("queueing discipline of {link}")]
    Qdisc {
        /// The ifb.
        link: String,
        /// Why.
        #[source]
        source: QdiscError,
    },
    /// What the kernel holds is not what it was asked for.
    #[error("the queueing discipline of {0} is not what was asked for")]
    NotAsAsked(String),
    /// A namespace for the rehearsal could not be made.
    #[error("a namespace to try the fault in")]
    Scratch(#[from] NetNsError),
    /// The tables of a namespace could not be handled.
    #[error("tables")]
    Tables(#[from] NftError),
}

impl ImpairError {
    /// The word that stands for it in a status.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::LinkKind { .. } | Self::NoLink => "LinkKind",
            Self::Link(LinkError::KindUnknown { .. })
            | Self::Qdisc {
                source: QdiscError::Unsupported(_),
                ..
            } => "KernelModule",
            Self::Link(_)
            | Self::Qdisc { .. }
            | Self::NotAsAsked(_)
            | Self::Scratch(_)
            | Self::Tables(_) => "KernelRefused",
        }
    }
}

/// Refuses a namespace with a link that faults were never tested on.
///
/// # Errors
/// [`ImpairError::LinkKind`] or [`ImpairError::NoLink`].
pub fn check_links(links: &[crate::kernel::link::Link]) -> Result<(), ImpairError> {
    let mut used = links
        .iter()
        .filter(|l| network::carries_traffic(l))
        .peekable();
    if used.peek().is_none() {
        return Err(ImpairError::NoLink);
    }
    match used.find(|l| !TESTED.contains(&l.kind.as_str())) {
        Some(link) => Err(ImpairError::LinkKind {
            name: link.name.clone(),
            kind: if link.kind.is_empty() {
                "physical".to_owned()
            } else {
                link.kind.clone()
            },
        }),
        None => Ok(()),
    }
}

/// Makes the ifbs of some detours, reads their queueing disciplines back, and notes the indices.
///
/// # Errors
/// [`ImpairError`]; what was made until then is removed again.
pub fn build(netns: &NetNs, detours: &mut [Detour]) -> Result<(), ImpairError> {
    let mut route = RouteSocket::open(netns)?;
    let built = detours
        .iter_mut()
        .try_for_each(|detour| build_one(&mut route, detour));
    if built.is_err() {
        for detour in detours {
            // The first error says more than what follows from it; the audit looks again.
            let _ = remove_one(&mut route, detour);
        }
    }
    built
}

fn build_one(route: &mut RouteSocket, detour: &mut Detour) -> Result<(), ImpairError> {
    let link = route.create_ifb(&detour.ifb)?;
    detour.ifb_index = Some(link.index);
    let failed = |source| ImpairError::Qdisc {
        link: link.name.clone(),
        source,
    };
    route
        .install_netem(link.index, &detour.netem)
        .map_err(failed)?;
    let held = route.netem(link.index).map_err(failed)?;
    let is_as_asked = detour.netem.matches(&held).is_ok_and(|same| same);
    if !is_as_asked {
        return Err(ImpairError::NotAsAsked(link.name));
    }
    route.set_up(link.index)?;
    Ok(())
}

/// Removes the ifbs of some detours that hold no packet, or all of them; true if none is left.
///
/// # Errors
/// The first [`ImpairError`]; the others are tried all the same.
pub fn remove(netns: &NetNs, detours: &[Detour], even_full: bool) -> Result<bool, ImpairError> {
    let mut route = RouteSocket::open(netns)?;
    let (mut is_gone, mut first) = (true, None);
    for detour in detours {
        let result = match find(&mut route, detour) {
            Ok(None) => Ok(()),
            Ok(Some(link)) if !even_full && holds_packets(&mut route, link.index) => {
                is_gone = false;
                Ok(())
            }
            Ok(Some(link)) => delete(&mut route, &link),
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            is_gone = false;
            first.get_or_insert(error);
        }
    }
    first.map_or(Ok(is_gone), Err)
}

/// Removes a link by its name.
///
/// # Errors
/// Where it cannot be removed, or is none that we could have made.
pub fn remove_named(netns: &NetNs, name: &str) -> Result<(), ImpairError> {
    let name = LinkName::new(name)?;
    let mut route = RouteSocket::open(netns)?;
    let link = route.link_named(&name)?;
    link.map_or(Ok(()), |link| delete(&mut route, &link))
}

fn remove_one(route: &mut RouteSocket, detour: &Detour) -> Result<(), ImpairError> {
    find(route, detour)?.map_or(Ok(()), |link| delete(route, &link))
}

/// The ifb of a detour, whatever it is called by now: a namespace gives no index twice until it has
/// given them all.
fn find(route: &mut RouteSocket, detour: &Detour) -> Result<Option<Link>, ImpairError> {
    let mut found = route.link_named(&detour.ifb)?;
    if let (None, Some(index)) = (&found, detour.ifb_index) {
        found = route.link(index)?;
    }
    Ok(found.filter(|link| link.kind == IFB))
}

fn delete(route: &mut RouteSocket, link: &Link) -> Result<(), ImpairError> {
    route.delete(link.index, &LinkName::new(&*link.name)?)?;
    Ok(())
}

/// An ifb that cannot be looked into is taken for empty: it has to go in any case.
fn holds_packets(route: &mut RouteSocket, index: u32) -> bool {
    matches!(route.qdisc_stats(index), Ok(Some(stats)) if stats.backlog_packets > 0)
}

/// What carries our marks in a namespace: names of tables and of links, of the forms that we give them.
///
/// # Errors
/// Where the namespace cannot be read.
pub fn marked(netns: &NetNs) -> Result<(Vec<String>, Vec<String>), ImpairError> {
    let tables = nft::list_tables(netns, TABLE_PREFIX)?;
    let links = RouteSocket::open(netns)?.links()?;
    Ok((
        tables
            .into_iter()
            .map(|t| t.name)
            .filter(|name| network::is_table_name(name))
            .collect(),
        links
            .into_iter()
            .filter(|l| l.kind == IFB && network::is_ifb_name(&l.name))
            .map(|l| l.name)
            .collect(),
    ))
}

/// Tries a whole fault where it cannot hurt: in a namespace of its own, on a link of the tested
/// kind, with the very same options.
///
/// # Errors
/// [`ImpairError`]: what this kernel does not do.
pub fn rehearse(
    detours: &[Detour],
    table: impl FnOnce(&[Detour]) -> nft::Table,
) -> Result<(), ImpairError> {
    let netns = NetNs::scratch()?;
    let mut detours = detours.to_vec();
    connect(&netns, detours.iter_mut().map(|d| &mut d.device).collect())?;
    build(&netns, &mut detours)?;
    OwnedTable::install(&netns, &table(&detours))?.verify()?;
    Ok(())
}

/// Tries a table that resets connections the same way.
///
/// # Errors
/// [`ImpairError`]: what this kernel does not do.
pub fn rehearse_resets(mut table: nft::Table) -> Result<(), ImpairError> {
    let netns = NetNs::scratch()?;
    connect(
        &netns,
        table.chains.iter_mut().map(|c| &mut c.device).collect(),
    )?;
    OwnedTable::install(&netns, &table)?.verify()?;
    Ok(())
}

/// Makes links of the tested kind by the names of some devices, and notes their indices.
fn connect(netns: &NetNs, devices: Vec<&mut Device>) -> Result<(), ImpairError> {
    let mut route = RouteSocket::open(netns)?;
    let mut made: Vec<Device> = Vec::new();
    for device in devices {
        let known = made.iter().find(|other| other.name == device.name);
        device.index = if let Some(known) = known {
            known.index
        } else {
            let peer = LinkName::new(format!("{LINK_PREFIX}peer{}", made.len()))?;
            let link = route.create_veth(&device.name, &peer, netns)?;
            route.set_up(link.index)?;
            made.push(Device {
                name: device.name.clone(),
                index: link.index,
            });
            link.index
        };
    }
    Ok(())
}
