//! nftables: the table that sends a pod's packets through an ifb, or resets their connections, and
//! that dies with its owner.
//!
//! Owns tables of the families netdev and inet with the flag `owner`, made from a plain plan in one transaction,
//! read back and compared, counted, and changed in place. Only the socket that made a table can
//! change it; when that socket closes, by whatever death of the process, the kernel removes the
//! table. The socket pins its namespace: an injector must leave when the pod does. Closing it waits
//! for an RCU grace period, about 15 ms.

mod decode;
mod encode;
mod expr;
mod intervals;
mod owned;
mod plan;
mod readback;
mod ruleset;

pub use self::decode::{TableInfo, Tally};
pub use self::owned::{Counters, OwnedTable, SelectionCount, delete_table, list_tables};
pub use self::plan::{
    Addresses, Chain, Device, Direction, Family, PlanError, PortRange, Selection, Table, Transport,
    Verdict,
};
pub use self::readback::{Mismatch, Proof};
pub use self::ruleset::Role;
use super::link::LinkError;
use super::netlink::{DecodeError, NetlinkError};

/// Why a table could not be made, changed, read or proven.
#[derive(Debug, thiserror::Error)]
pub enum NftError {
    /// The plan is not possible.
    #[error("plan of a table")]
    Plan(#[from] PlanError),
    /// An update would change more than selections.
    #[error("table {table} cannot be updated to a plan with other chains")]
    OtherChains {
        /// Name of the table.
        table: String,
    },
    /// The exchange with the kernel failed.
    #[error("nftables")]
    Netlink(#[from] NetlinkError),
    /// The links of the namespace could not be read.
    #[error("links of the table's chains")]
    Links(#[from] LinkError),
    /// A set that the kernel shows is none.
    #[error("read set {set} of table {table}")]
    Set {
        /// Name of the table.
        table: String,
        /// Name of the set.
        set: String,
        /// The reason.
        source: DecodeError,
    },
    /// The kernel holds something else than the plan says.
    #[error("table {table} is not as planned: {mismatch}")]
    Mismatch {
        /// Name of the table.
        table: String,
        /// The first difference.
        mismatch: Mismatch,
    },
}
