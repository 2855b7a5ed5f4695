//! Addresses of host names, whose name servers may be anybody's: asked for in the background, one
//! question a name and a bounded number at once. A pass reads what is known, and waits for nobody.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use hickory_resolver::{ResolverBuilder, TokioResolver};
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
    let answer = answer.map(|mut addresses| {
        // Servers turn them around.
        addresses.sort();
        addresses.dedup();
        addresses
    });
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
        (Ok(addresses), _) => Resolved::Found(addresses),
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

async fn resolve(resolver: Option<TokioResolver>, host: String) -> Answer {
    let Some(resolver) = resolver else {
        return Err(NoAddress::Unknown("no name server is known".to_owned()));
    };
    let error = match resolver.lookup_ip(&*host).await {
        Ok(found) => return Ok(found.iter().collect()),
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::{
        sync::mpsc,
        time::{sleep, timeout},
    };

    use super::*;

    const USER: (&str, &str) = ("shop", "run");
    const SOON: Duration = Duration::from_mins(1);

    fn address(last: u8) -> IpAddr {
        [192, 0, 2, last].into()
    }

    /// As if this long had gone by for a host.
    fn age(hosts: &Hosts, host: &str, by: Duration) {
        let mut known = lock(&hosts.known);
        let entry = known.get_mut(host).unwrap();
        let answered = entry.answer.as_mut().map(|(at, _)| at);
        for at in answered.into_iter().chain(&mut entry.asked) {
            *at -= by;
        }
    }

    /// Waits until something is so.
    async fn until(is_so: impl Fn() -> bool) {
        let so = async {
            while !is_so() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(SOON, so).await.unwrap();
    }

    /// Waits until no question about a host is under way.
    async fn answered(hosts: &Hosts, host: &str) {
        until(|| lock(&hosts.known)[host].asked.is_none()).await;
    }

    #[tokio::test]
    async fn a_name_is_asked_for_once_and_again_when_it_is_old() {
        let (triggers, mut triggered) = mpsc::unbounded_channel();
        let asked = Arc::new(AtomicUsize::new(0));
        let ask = {
            let asked = asked.clone();
            move |_| {
                // The second answer is the first turned around, the third is another.
                let found = match asked.fetch_add(1, Ordering::SeqCst) {
                    0 => vec![address(1), address(2)],
                    1 => vec![address(2), address(1)],
                    _ => vec![address(3)],
                };
                async move { Ok(found) }.boxed()
            }
        };
        let times = Times::default();
        let hosts = Hosts::asking(Box::new(ask), times, triggers);
        assert_eq!(hosts.look_up("a", USER), None);
        assert_eq!(hosts.look_up("a", USER), None);
        timeout(SOON, triggered.recv()).await.unwrap().unwrap();
        let first = Some(Resolved::Found(vec![address(1), address(2)]));
        for questions in [1, 2] {
            assert_eq!(hosts.look_up("a", USER), first);
            assert_eq!(asked.load(Ordering::SeqCst), questions);
            age(&hosts, "a", times.good);
            let meanwhile = hosts.look_up("a", USER);
            assert_eq!(meanwhile, first, "what was known is told meanwhile");
            answered(&hosts, "a").await;
        }
        timeout(SOON, triggered.recv()).await.unwrap().unwrap();
        let third = Some(Resolved::Found(vec![address(3)]));
        assert_eq!(hosts.look_up("a", USER), third);
        assert!(triggered.try_recv().is_err(), "told of news only");
    }

    #[tokio::test]
    async fn silence_is_an_answer_in_time() {
        let never = Box::new(|_| std::future::pending().boxed());
        let times = Times {
            answer: Duration::from_millis(1),
            ..Times::default()
        };
        let hosts = Hosts::asking(never, times, mpsc::unbounded_channel().0);
        assert_eq!(hosts.look_up("a", USER), None);
        answered(&hosts, "a").await;
        let silence = Resolved::Unknown("no answer from the name server".to_owned());
        assert_eq!(hosts.look_up("a", USER), Some(silence));
    }

    #[tokio::test]
    async fn a_name_server_that_fails_takes_no_address_away() {
        let absent = |why: &str| Err(NoAddress::Absent(why.to_owned()));
        let unknown = |why: &str| Err(NoAddress::Unknown(why.to_owned()));
        let found = |last| Resolved::Found(vec![address(last)]);
        let kept = |why: &str| Resolved::Kept {
            addresses: vec![address(1)],
            why: why.to_owned(),
        };
        let gone = || Resolved::Absent("no such host".to_owned());
        let steps = [
            (unknown("busy"), Resolved::Unknown("busy".to_owned())),
            (Ok(vec![address(1)]), found(1)),
            (unknown("busy"), kept("busy")),
            (unknown("silence"), kept("silence")),
            (absent("no such host"), gone()),
            (unknown("busy"), gone()),
            (Ok(vec![address(2)]), found(2)),
        ];
        let (triggers, mut triggered) = mpsc::unbounded_channel();
        let (answers, expected): (Vec<Answer>, Vec<_>) = steps.into_iter().unzip();
        let answers = Mutex::new(answers.into_iter());
        let ask = move |_| {
            let answer = lock(&answers).next().unwrap();
            async move { answer }.boxed()
        };
        let hosts = Hosts::asking(Box::new(ask), Times::default(), triggers);
        let mut before = None;
        for expected in expected {
            assert_eq!(hosts.look_up("a", USER), before);
            answered(&hosts, "a").await;
            let is_news = before.as_ref() != Some(&expected);
            assert_eq!(triggered.try_recv().is_ok(), is_news, "{expected:?}");
            assert_eq!(hosts.look_up("a", USER).as_ref(), Some(&expected));
            age(&hosts, "a", hosts.times.good);
            before = Some(expected);
        }
    }

    #[tokio::test]
    async fn only_so_many_are_asked_for_at_once_and_nobody_waits_for_ever() {
        let open = Arc::new(AtomicUsize::new(0));
        let end = Arc::new(Semaphore::new(0));
        let ask = {
            let (open, end) = (open.clone(), end.clone());
            move |_| {
                let (open, end) = (open.clone(), end.clone());
                async move {
                    open.fetch_add(1, Ordering::SeqCst);
                    let _turn = end.acquire().await;
                    Ok(Vec::new())
                }
                .boxed()
            }
        };
        let times = Times {
            answer: SOON,
            ..Times::default()
        };
        let hosts = Hosts::asking(Box::new(ask), times, mpsc::unbounded_channel().0);
        for host in 0..AT_ONCE + 5 {
            assert_eq!(hosts.look_up(&host.to_string(), USER), None);
        }
        let last = (AT_ONCE + 4).to_string();
        until(|| open.load(Ordering::SeqCst) >= AT_ONCE).await;
        assert_eq!(hosts.look_up(&last, USER), None);
        age(&hosts, &last, times.first);
        let waited = Resolved::Unknown("it is not resolved yet".to_owned());
        assert_eq!(hosts.look_up(&last, USER), Some(waited));
        assert_eq!(open.load(Ordering::SeqCst), AT_ONCE);
        end.add_permits(1);
        answered(&hosts, &last).await;
        assert_eq!(open.load(Ordering::SeqCst), AT_ONCE + 5);
    }
}
