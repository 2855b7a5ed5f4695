//! Addresses of host names, whose name servers may be anybody's: asked for in the background, one
//! question a name and a bounded number at once. A pass reads what is known, and waits for nobody.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use hickory_resolver::{
    ResolverBuilder, TokioResolver, lookup_ip::LookupIp, proto::rr::RecordType,
};
use kube::runtime::reflector::ObjectRef;
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::{directory::lock, peers::Resolved, watches::Triggers};

/// How many questions are under way at once.
const AT_ONCE: usize = 16;

/// The addresses of a host, or why there are none.
pub(crate) type Answer = Result<Vec<IpAddr>, NoAddress>;

/// Why there is no address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoAddress {
    /// The name servers say that there is none.
    Absent(String),
    /// They do not answer, or not now: there may be one.
    Unknown(String),
    /// They do not for one family of addresses; these are of the other.
    Half(Vec<IpAddr>, String),
}

/// Asks a name server.
type Ask = Box<dyn Fn(String) -> BoxFuture<'static, Answer> + Send + Sync>;

/// How long what is good, or waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// The addresses of a host are good: less than the minute after which they are asked for again,
    /// so that no turn is missed by a moment.
    pub(crate) good: Duration,
    /// It is taken for true that a host has no address, or that nobody knows.
    pub(crate) none: Duration,
    /// A name server may take.
    pub(crate) answer: Duration,
    /// Who needs a name may wait for the first answer, its turn to be asked for included: as long as
    /// nodes may take to prepare.
    pub(crate) first: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            good: Duration::from_secs(55),
            none: Duration::from_secs(4),
            answer: Duration::from_secs(3),
            first: Duration::from_secs(30),
        }
    }
}

/// What is known of a host.
#[derive(Debug, Default)]
struct Known {
    answer: Option<(Instant, Resolved)>,
    /// Since when a question is under way, if one is.
    asked: Option<Instant>,
    /// The experiments to look at when the answer changes, by namespace and name.
    users: BTreeSet<(String, String)>,
}

/// What is known of all hosts.
pub(crate) struct Hosts {
    ask: Ask,
    times: Times,
    triggers: Triggers,
    known: Arc<Mutex<BTreeMap<String, Known>>>,
    turns: Arc<Semaphore>,
    questions: Mutex<JoinSet<()>>,
}

impl Hosts {
    /// Asks the name servers of this machine. Experiments to look at again are sent to `triggers`.
    pub(crate) fn new(triggers: Triggers) -> Self {
        let resolver = TokioResolver::builder_tokio().and_then(ResolverBuilder::build);
        if let Err(error) = &resolver {
            tracing::warn!(%error, "no name server is known; peers given as hosts will have no address");
        }
        let resolver = resolver.ok();
        let ask = move |host| resolve(resolver.clone(), host).boxed();
        Self::asking(Box::new(ask), Times::default(), triggers)
    }

    /// Asks by `ask`.
    pub(crate) fn asking(ask: Ask, times: Times, triggers: Triggers) -> Self {
        Self {
            ask,
            times,
            triggers,
            known: Arc::default(),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            questions: Mutex::default(),
        }
    }

    /// The last answer about a host; `None`: there is none yet. What is not good any more is asked
    /// for; the experiment is looked at again if the answer is another.
    pub(crate) fn look_up(&self, host: &str, user: (&str, &str)) -> Option<Resolved> {
        let now = Instant::now();
        let mut known = lock(&self.known);
        let is_of_use = |answer: &Option<(Instant, Resolved)>| {
            let at = answer.as_ref().map(|(at, _)| *at);
            at.is_some_and(|at| now < at + self.times.good * 2)
        };
        known.retain(|_, k| k.asked.is_some() || is_of_use(&k.answer));
        let entry = known.entry(host.to_owned()).or_default();
        entry.users.insert((user.0.to_owned(), user.1.to_owned()));
        let is_good = entry.answer.as_ref().is_some_and(|(at, answer)| {
            let is_found = matches!(answer, Resolved::Found(_));
            let Times { good, none, .. } = self.times;
            now < *at + if is_found { good } else { none }
        });
        if !is_good && entry.asked.is_none() {
            entry.asked = Some(now);
            self.question(host);
        }
        match (&entry.answer, entry.asked) {
            (Some((_, answer)), _) => Some(answer.clone()),
            (None, Some(asked)) if now >= asked + self.times.first => {
                Some(Resolved::Unknown("it is not resolved yet".to_owned()))
            }
            (None, _) => None,
        }
    }

    /// Has a host asked for.
    fn question(&self, host: &str) {
        let (host, answer) = (host.to_owned(), (self.ask)(host.to_owned()));
        let (known, turns) = (self.known.clone(), self.turns.clone());
        let (patience, triggers) = (self.times.answer, self.triggers.clone());
        let mut questions = lock(&self.questions);
        while questions.try_join_next().is_some() {}
        questions.spawn(async move {
            // Nobody closes it.
            let turn = turns.acquire().await;
            let answer = timeout(patience, answer).await;
            drop(turn);
            let silence = "no answer from the name server".to_owned();
            let silent = |_| Err(NoAddress::Unknown(silence));
            for (namespace, name) in note(&known, &host, answer.unwrap_or_else(silent)) {
                // The receiver lives as long as the controller; without it there is nobody to tell.
                let _ = triggers.send(ObjectRef::new(&name).within(&namespace));
            }
        });
    }
}

/// Notes an answer; who is to be told, if it is another than before.
fn note(
    known: &Mutex<BTreeMap<String, Known>>,
    host: &str,
    answer: Answer,
) -> BTreeSet<(String, String)> {
    let mut known = lock(known);
    let entry = known.entry(host.to_owned()).or_default();
    let before = entry.answer.take().map(|(_, old)| old);
    let now = resolved(answer, before.clone());
    let is_news = before.is_none_or(|old| old != now);
    entry.asked = None;
    entry.answer = Some((Instant::now(), now));
    let users = std::mem::take(&mut entry.users);
    if is_news { users } else { BTreeSet::new() }
}

/// What is known after an answer. One that says nothing takes nothing away.
fn resolved(answer: Answer, before: Option<Resolved>) -> Resolved {
    match (answer, before) {
        (Ok(addresses), _) => Resolved::Found(in_order(addresses)),
        (Err(NoAddress::Half(mut addresses, why)), before) => {
            let is_known =
                |family: &IpAddr| addresses.iter().any(|a| a.is_ipv4() == family.is_ipv4());
            let kept: Vec<IpAddr> = before
                .map(Resolved::into_addresses)
                .unwrap_or_default()
                .into_iter()
                .filter(|a| !is_known(a))
                .collect();
            addresses.extend(kept);
            let addresses = in_order(addresses);
            Resolved::Kept { addresses, why }
        }
        // What was said for certain counts until something else is.
        (Err(NoAddress::Absent(why)), _)
        | (Err(NoAddress::Unknown(_)), Some(Resolved::Absent(why))) => Resolved::Absent(why),
        (
            Err(NoAddress::Unknown(why)),
            Some(Resolved::Found(addresses) | Resolved::Kept { addresses, .. }),
        ) => Resolved::Kept { addresses, why },
        (Err(NoAddress::Unknown(why)), _) => Resolved::Unknown(why),
    }
}

/// Servers turn them around.
fn in_order(mut addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    addresses.sort();
    addresses.dedup();
    addresses
}

async fn resolve(resolver: Option<TokioResolver>, host: String) -> Answer {
    let Some(resolver) = resolver else {
        return Err(NoAddress::Unknown("no name server is known".to_owned()));
    };
    let error = match resolver.lookup_ip(&*host).await {
        Ok(found) => return with_other_family(&resolver, &found).await,
        Err(error) => error,
    };
    let is_absent = if error.is_no_records_found() && !error.is_nx_domain() {
        // That is said of one kind of address, and the question for the other may have failed.
        let found = resolver.ipv4_lookup(&*host).await;
        found.is_err_and(|error| error.is_no_records_found())
    } else {
        error.is_nx_domain()
    };
    let why = error.to_string();
    Err(if is_absent {
        NoAddress::Absent(why)
    } else {
        NoAddress::Unknown(why)
    })
}

/// What was found, and what the name that was found has of the other family: found of one alone, the
/// question for the other may have failed.
async fn with_other_family(resolver: &TokioResolver, found: &LookupIp) -> Answer {
    let mut addresses: Vec<IpAddr> = found.iter().collect();
    let other = match (
        addresses.iter().any(IpAddr::is_ipv4),
        addresses.iter().any(IpAddr::is_ipv6),
    ) {
        (true, false) => RecordType::AAAA,
        (false, true) => RecordType::A,
        _ => return Ok(addresses),
    };
    match resolver.lookup(found.query().name().clone(), other).await {
        Ok(more) => {
            addresses.extend(more.answers().iter().filter_map(|r| r.data.ip_addr()));
            Ok(addresses)
        }
        Err(error) if error.is_no_records_found() || error.is_nx_domain() => Ok(addresses),
        Err(error) => Err(NoAddress::Half(addresses, error.to_string())),
    }
}

#[cfg(test)]
mod tests;
