//! A beacon: packets to an echo in the cluster, at a steady pace, from this process, on this
//! process's own clock. What a fault does to them says when it came and when it went.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cluster::Cluster;

/// Between two packets, where nothing else is asked for.
const EVERY: Duration = Duration::from_millis(1);

/// When each packet left, and when it came back.
#[derive(Debug, Clone, Copy)]
pub struct Flight {
    /// When it left.
    pub left: Instant,
    /// When it came back, if it did.
    pub back: Option<Instant>,
}

impl Flight {
    /// How long it was away.
    #[must_use]
    pub fn took(&self) -> Option<Duration> {
        Some(self.back?.duration_since(self.left))
    }
}

/// A running beacon; it ends with this value.
#[derive(Debug)]
pub struct Beacon {
    flights: Arc<Mutex<Vec<Flight>>>,
    is_over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Beacon {
    /// Starts sending to an echo, from the cluster's network, a thousand packets a second.
    ///
    /// # Errors
    /// When there is no socket to be had.
    pub fn start(cluster: &Cluster, echo: SocketAddr) -> Result<Self> {
        Self::paced(cluster, echo, EVERY)
    }

    /// Starts sending to an echo, from the cluster's network, one packet `every` so often.
    ///
    /// # Errors
    /// When there is no socket to be had.
    pub fn paced(cluster: &Cluster, echo: SocketAddr, every: Duration) -> Result<Self> {
        let socket = cluster.within(|| {
            let any = if echo.is_ipv4() {
                "0.0.0.0:0"
            } else {
                "[::]:0"
            };
            let socket = UdpSocket::bind(any).context("bind")?;
            socket.connect(echo).context("connect")?;
            socket.set_read_timeout(Some(Duration::from_millis(100)))?;
            Ok(socket)
        })?;
        let flights: Arc<Mutex<Vec<Flight>>> = Arc::default();
        let is_over = Arc::new(AtomicBool::new(false));
        let sender = {
            let (socket, flights, is_over) =
                (socket.try_clone()?, flights.clone(), is_over.clone());
            thread::spawn(move || send(&socket, every, &flights, &is_over))
        };
        let receiver = {
            let (flights, is_over) = (flights.clone(), is_over.clone());
            thread::spawn(move || receive(&socket, &flights, &is_over))
        };
        Ok(Self {
            flights,
            is_over,
            threads: vec![sender, receiver],
        })
    }

    /// The packets that left after a moment, so far.
    #[must_use]
    pub fn since(&self, moment: Instant) -> Vec<Flight> {
        let flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        let first = flights.partition_point(|flight| flight.left < moment);
        flights[first..].to_vec()
    }
}

impl Drop for Beacon {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic of a thread shows in what it did not record.
            let _ = thread.join();
        }
    }
}

fn send(socket: &UdpSocket, every: Duration, flights: &Mutex<Vec<Flight>>, is_over: &AtomicBool) {
    let mut next = Instant::now();
    while !is_over.load(Ordering::Relaxed) {
        let number = {
            let mut flights = flights.lock().unwrap_or_else(PoisonError::into_inner);
            flights.push(Flight {
                left: Instant::now(),
                back: None,
            });
            flights.len() - 1
        };
        // A packet that could not be sent never comes back.
        let _ = socket.send(&(number as u64).to_be_bytes());
        next += every;
        let now = Instant::now();
        if next > now {
            thread::park_timeout(next - now);
        } else {
            next = now;
        }
    }
}

fn receive(socket: &UdpSocket, flights: &Mutex<Vec<Flight>>, is_over: &AtomicBool) {
    let mut packet = [0; 16];
    while !is_over.load(Ordering::Relaxed) {
        let Ok(8) = socket.recv(&mut packet) else {
            continue;
        };
        let now = Instant::now();
        let number = packet.first_chunk::<8>().map(|n| u64::from_be_bytes(*n));
        let number = number.and_then(|n| usize::try_from(n).ok());
        let mut flights = flights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = number.and_then(|n| flights.get_mut(n)) {
            flight.back.get_or_insert(now);
        }
    }
}
