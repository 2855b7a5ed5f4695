//! Which replica may write: a `coordination.k8s.io` Lease, held by one, watched by the agents
//! as the operator's sign of life.
//!
//! `evaluate` is pure; the loop around it only reads, writes and waits. Time is measured on this
//! process's own monotonic clock, never compared with another machine's.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{Api, Client, api::PostParams};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, timeout},
};
use windtunnel_crds::names::LEASE;
use windtunnel_runtime::CancellationToken;

/// How long a lease is good for after its last renewal.
pub(crate) const DURATION: Duration = Duration::from_secs(15);
/// How often it is renewed, and how often the others look at it.
pub(crate) const RENEW: Duration = Duration::from_secs(2);
/// How long one request for it may take.
const REQUEST: Duration = Duration::from_secs(5);

/// What was seen of the lease, and since when it has looked like this.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sighting {
    /// Who holds it; empty: nobody.
    pub(crate) holder: String,
    /// Its last renewal, as its holder wrote it. Compared for equality only.
    pub(crate) renewed: Option<Timestamp>,
    /// When this state was first seen.
    pub(crate) since: Instant,
}

/// What to do about the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// Take it: nobody holds it, or its holder has let it expire.
    Acquire,
    /// Renew it: it is ours.
    Renew,
    /// Leave it: another replica holds it.
    Wait,
}

/// Decides from what was seen.
#[must_use]
pub(crate) fn evaluate(seen: Option<&Sighting>, me: &str, now: Instant) -> Move {
    match seen {
        None => Move::Acquire,
        Some(lease) if lease.holder == me => Move::Renew,
        Some(lease) if lease.holder.is_empty() => Move::Acquire,
        Some(lease) if now.saturating_duration_since(lease.since) > DURATION => Move::Acquire,
        Some(_) => Move::Wait,
    }
}

/// Until when this process may write: `None` while it does not hold the lease.
pub(crate) type Leadership = watch::Receiver<Option<Instant>>;

/// Whether the holder of `leadership` may write now.
#[must_use]
pub(crate) fn may_write(leadership: &Leadership) -> bool {
    leadership
        .borrow()
        .is_some_and(|until| Instant::now() < until)
}

/// Competes for the lease until `shutdown`, then gives it back. A lease that was lost is competed
/// for again: an outage of the API server must not cost a restart on top, since the agents' grace
/// runs meanwhile. What a pass had begun stops at its next action, see [`may_write`].
pub(crate) async fn compete(
    client: Client,
    namespace: &str,
    me: &str,
    leadership: watch::Sender<Option<Instant>>,
    shutdown: CancellationToken,
) {
    let api: Api<Lease> = Api::namespaced(client, namespace);
    let mut sighting: Option<Sighting> = None;
    let mut ticks = interval(RENEW);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // Cancel-safe: nothing is under way while waiting.
        tokio::select! {
            () = shutdown.cancelled() => break,
            _ = ticks.tick() => {}
        }
        let asked = Instant::now();
        match timeout(REQUEST, step(&api, me, &mut sighting)).await {
            Ok(Ok(true)) => {
                leadership.send_replace(Some(asked + DURATION));
            }
            Ok(Ok(false)) => lose(&leadership),
            Ok(Err(error)) => tracing::warn!(%error, "cannot see to the lease"),
            Err(_) => tracing::warn!("no answer about the lease"),
        }
        let until = *leadership.borrow();
        if until.is_some_and(|until| Instant::now() >= until) {
            lose(&leadership);
        }
    }
    if leadership.borrow().is_some() {
        leadership.send_replace(None);
        release(&api, me).await;
    }
}

/// Another may lead from now on.
fn lose(leadership: &watch::Sender<Option<Instant>>) {
    if leadership.borrow().is_some() {
        tracing::warn!("the lease was lost");
        leadership.send_replace(None);
    }
}

/// One look at the lease, and one write if it is due; true if it is ours after that.
async fn step(
    api: &Api<Lease>,
    me: &str,
    sighting: &mut Option<Sighting>,
) -> Result<bool, kube::Error> {
    let now = Instant::now();
    let lease = api.get_opt(LEASE).await?;
    let spec = lease
        .as_ref()
        .and_then(|l| l.spec.clone())
        .unwrap_or_default();
    let seen = lease.as_ref().map(|_| Sighting {
        holder: spec.holder_identity.clone().unwrap_or_default(),
        renewed: spec.renew_time.as_ref().map(|t| t.0),
        since: now,
    });
    // Unchanged since it was last seen: it keeps its age.
    match (&seen, &*sighting) {
        (Some(new), Some(old)) if new.holder == old.holder && new.renewed == old.renewed => {}
        _ => *sighting = seen,
    }
    let acquired = match evaluate(sighting.as_ref(), me, now) {
        Move::Wait => return Ok(false),
        Move::Acquire => Some(MicroTime(Timestamp::now())),
        Move::Renew => spec.acquire_time.clone(),
    };
    let takes = sighting.as_ref().is_none_or(|s| s.holder != me);
    let wanted = Lease {
        metadata: ObjectMeta {
            name: Some(LEASE.to_owned()),
            resource_version: lease
                .as_ref()
                .and_then(|l| l.metadata.resource_version.clone()),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(me.to_owned()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: acquired,
            renew_time: Some(MicroTime(Timestamp::now())),
            lease_transitions: Some(spec.lease_transitions.unwrap_or(0) + i32::from(takes)),
            ..LeaseSpec::default()
        }),
    };
    let written = match &lease {
        None => api.create(&PostParams::default(), &wanted).await,
        Some(_) => api.replace(LEASE, &PostParams::default(), &wanted).await,
    };
    match written {
        Ok(_) => Ok(true),
        // Another replica was faster.
        Err(kube::Error::Api(status)) if status.is_conflict() || status.is_already_exists() => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Gives the lease back, so that the other replica need not wait for it to expire.
async fn release(api: &Api<Lease>, me: &str) {
    let give = async {
        let mut lease = api.get(LEASE).await?;
        if let Some(spec) = lease
            .spec
            .as_mut()
            .filter(|s| s.holder_identity.as_deref() == Some(me))
        {
            spec.holder_identity = Some(String::new());
            api.replace(LEASE, &PostParams::default(), &lease).await?;
        }
        Ok::<(), kube::Error>(())
    };
    match timeout(REQUEST, give).await {
        Ok(Ok(())) => tracing::info!("gave the lease back"),
        Ok(Err(error)) => tracing::warn!(%error, "cannot give the lease back"),
        Err(_) => tracing::warn!("no answer when giving the lease back"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_when_free_or_expired_and_never_otherwise() {
        let now = Instant::now() + DURATION * 3;
        let held = |holder: &str, age: Duration| Sighting {
            holder: holder.to_owned(),
            renewed: None,
            since: now - age,
        };
        let second = Duration::from_secs(1);
        for (seen, expected) in [
            (None, Move::Acquire),
            (Some(held("me", second)), Move::Renew),
            (Some(held("me", DURATION * 2)), Move::Renew),
            (Some(held("", second)), Move::Acquire),
            (Some(held("other", second)), Move::Wait),
            (Some(held("other", DURATION)), Move::Wait),
            (Some(held("other", DURATION + second)), Move::Acquire),
        ] {
            assert_eq!(evaluate(seen.as_ref(), "me", now), expected, "{seen:?}");
        }
    }
}
