//! Privileged tests of the kernel module: they prove effects on real packets.
//!
//! They need root and change nothing outside scratch namespaces of their own. On a kernel without
//! netem, run them with `WINDTUNNEL_TEST_KERNEL=host`: those that need it are then left out, each
//! saying so. Times are bounds for safety, not measurements.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr)]

mod agent;
mod contract;
mod cpu;
mod death;
mod disk;
mod effects;
mod faults;
mod injector;
mod io;
mod journal;
mod layers;
mod lease;
mod links;
mod memory;
mod netem;
mod processes;
mod reset;
mod supervision;
mod support;
mod sweep;
mod tables;
mod together;
mod update;
mod vanished;
