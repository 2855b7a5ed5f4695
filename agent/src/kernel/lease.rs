//! What ends an injector whatever happens to it: a timer that kills, and the death of its parent.
//!
//! Both are the kernel's: they work while the process is stopped and whatever signals it blocks.
//! A process that is the first of its pid namespace is immune to signals from within, this timer's
//! too: the lease holder must not be one. The timer is neither inherited by a fork nor kept by an
//! exec, and it is gone when the [`Lease`] is dropped. The death signal follows the parent *thread*
//! and is lost at each change of credentials: ask for it last, and check the lifeline afterwards.

use std::time::Duration;

use nix::errno::Errno;
use nix::sys::prctl::{get_pdeathsig, set_pdeathsig};
use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;

use super::proc::{ProcError, boottime};

/// Why a process could not be bound to a lease or to its parent.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The timer could not be made.
    #[error("create the lease timer")]
    Create(#[source] Errno),
    /// The timer could not be set, and what it was set to before still holds.
    #[error("arm the lease timer")]
    Arm(#[source] Errno),
    /// The timer could not be read, or is not armed although it was set.
    #[error("read the lease timer back")]
    ReadBack(#[source] Errno),
    /// The signal for the parent's death could not be set or read.
    #[error("set the death signal")]
    DeathSignal(#[source] Errno),
    /// The signal for the parent's death is not what was set.
    #[error("the death signal is {found:?} instead of SIGKILL")]
    DeathSignalLost {
        /// What the kernel holds.
        found: Option<Signal>,
    },
    /// The boot clock could not be read.
    #[error("read the boot clock")]
    Clock(#[from] ProcError),
}

/// Has the kernel kill this process when the thread that started it ends, and reads that back.
///
/// The parent may have ended before: check the lifeline after this call.
///
/// # Errors
/// When the kernel refuses or holds another signal afterwards.
pub fn die_with_parent() -> Result<(), LeaseError> {
    set_pdeathsig(Signal::SIGKILL).map_err(LeaseError::DeathSignal)?;
    match get_pdeathsig().map_err(LeaseError::DeathSignal)? {
        Some(Signal::SIGKILL) => Ok(()),
        found => Err(LeaseError::DeathSignalLost { found }),
    }
}

/// A timer that kills this process with SIGKILL unless it is renewed.
#[derive(Debug)]
pub struct Lease {
    timer: Timer,
    deadline: Duration,
}

impl Lease {
    /// Starts a lease that ends `length` from now, and never after `deadline` on the boot clock.
    ///
    /// # Errors
    /// When the timer cannot be made or set.
    pub fn start(length: Duration, deadline: Duration) -> Result<Self, LeaseError> {
        let notify = SigevNotify::SigevSignal {
            signal: Signal::SIGKILL,
            si_value: 0,
        };
        let timer = Timer::new(ClockId::CLOCK_BOOTTIME, SigEvent::new(notify));
        let timer = timer.map_err(LeaseError::Create)?;
        let mut lease = Self { timer, deadline };
        lease.renew(length)?;
        Ok(lease)
    }

    /// Sets the end to `length` from now, or to the deadline if that comes first, and tells which
    /// time on the boot clock it is. A deadline that has passed kills at once.
    ///
    /// # Errors
    /// When the timer cannot be set or is not armed afterwards.
    pub fn renew(&mut self, length: Duration) -> Result<Duration, LeaseError> {
        let end = self.deadline.min(boottime()?.saturating_add(length));
        // Zero would disarm the timer; a time that has passed fires at once.
        let end = end.max(Duration::from_nanos(1));
        let once = Expiration::OneShot(TimeSpec::from_duration(end));
        self.timer
            .set(once, TimerSetTimeFlags::TFD_TIMER_ABSTIME)
            .map_err(LeaseError::Arm)?;
        match self.timer.get().map_err(LeaseError::ReadBack)? {
            Some(_) => Ok(end),
            None => Err(LeaseError::ReadBack(Errno::ENOENT)),
        }
    }

    /// The time on the boot clock that no renewal can move the end past.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }
}
