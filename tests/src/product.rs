//! windtunnel itself on a cluster: built, put into images, installed with its chart, and the sample
//! that faults are shown on.
//!
//! Knows the harness and the product; holds no test and no judgement.

mod beacon;
mod build;
mod database;
pub mod deck;
mod install;
mod run;
mod sample;

pub use beacon::{Beacon, Flight};
pub use build::{Profile, images};
pub use database::{Database, Second};
pub use install::{Installation, NAMESPACE, chart};
pub use run::{Run, experiment};
pub use sample::{Reading, Sample};
