//! The node agent: carries out node injections by injector processes that die with it, and sees
//! to it that nothing is left of them.
//!
//! `controller` shows the order: listen → observe → decide → act. `decide` is pure; `kernel` is
//! the only home of `unsafe`.

pub mod act;
pub mod api;
pub mod args;
pub mod audit;
pub mod burn;
pub mod clock;
pub mod controller;
pub mod decide;
pub mod fill;
pub mod hog;
pub mod impair;
pub mod inject;
pub mod journal;
pub mod kernel;
pub mod look;
pub mod metrics;
pub mod model;
pub mod network;
pub mod node;
pub mod prepare;
pub mod probe;
pub mod replay;
pub mod supervisor;
pub mod sweep;
pub mod targets;
#[cfg(test)]
mod testing;
pub mod wire;
