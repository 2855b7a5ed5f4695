//! Addresses of host names, whose name servers may be anybody's: asked for in the background, one
//! question a name and a bounded number at once. A pass reads what is known, and waits for nobody.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{
    FutureExt as _,
    future::{BoxFuture, join},
};
use hickory_resolver::{
    ResolverBuilder, TokioResolver,
    proto::rr::{RData, RecordType},
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
}

/// A family of addresses. Name servers are asked for one at a time, and may fail at one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn has(self, address: IpAddr) -> bool {
        address.is_ipv4() == (self == Self::V4)
    }
}

/// Asks a name server for the addresses of a host in one family.
type Ask = Box<dyn Fn(String, Family) -> BoxFuture<'static, Answer> + Send + Sync>;

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
        let ask = move |host, family| resolve(resolver.clone(), host, family).boxed();
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
        let host = host.to_owned();
        let patience = self.times.answer;
        let [v4, v6] =
            Family::ALL.map(|family| timeout(patience, (self.ask)(host.clone(), family)));
        let (known, turns) = (self.known.clone(), self.turns.clone());
        let triggers = self.triggers.clone();
        let mut questions = lock(&self.questions);
        while questions.try_join_next().is_some() {}
        questions.spawn(async move {
            // Nobody closes it.
            let turn = turns.acquire().await;
            let (v4, v6) = join(v4, v6).await;
            drop(turn);
            let silence = "no answer from the name server";
            let silent = |_| Err(NoAddress::Unknown(silence.to_owned()));
            let answers = [v4, v6].map(|answer| answer.unwrap_or_else(silent));
            for (namespace, name) in note(&known, &host, answers) {
                // The receiver lives as long as the controller; without it there is nobody to tell.
                let _ = triggers.send(ObjectRef::new(&name).within(&namespace));
            }
        });
    }
}

/// Notes the answers for each family; who is to be told, if they are others than before.
fn note(
    known: &Mutex<BTreeMap<String, Known>>,
    host: &str,
    answers: [Answer; 2],
) -> BTreeSet<(String, String)> {
    let mut known = lock(known);
    let entry = known.entry(host.to_owned()).or_default();
    let before = entry.answer.take().map(|(_, old)| old);
    let now = resolved(answers, before.as_ref());
    let is_news = before.is_none_or(|old| old != now);
    entry.asked = None;
    entry.answer = Some((Instant::now(), now));
    let users = std::mem::take(&mut entry.users);
    if is_news { users } else { BTreeSet::new() }
}

/// What is known after the answers. One that says nothing takes nothing away.
fn resolved(answers: [Answer; 2], before: Option<&Resolved>) -> Resolved {
    let known = match before {
        Some(Resolved::Found(addresses) | Resolved::Kept { addresses, .. }) => &addresses[..],
        _ => &[],
    };
    let (mut addresses, mut silence, mut absence) = (Vec::new(), None, String::new());
    for (answer, family) in answers.into_iter().zip(Family::ALL) {
        match answer {
            Ok(found) => addresses.extend(found),
            Err(NoAddress::Absent(why)) => absence = why,
            Err(NoAddress::Unknown(why)) => {
                addresses.extend(known.iter().filter(|address| family.has(**address)));
                silence.get_or_insert(why);
            }
        }
    }
    // Servers turn them around.
    addresses.sort();
    addresses.dedup();
    match (addresses.is_empty(), silence, before) {
        (false, None, _) => Resolved::Found(addresses),
        (false, Some(why), _) => Resolved::Kept { addresses, why },
        (true, None, _) => Resolved::Absent(absence),
        // What was said for certain counts until something else is.
        (true, Some(_), Some(Resolved::Absent(why))) => Resolved::Absent(why.clone()),
        (true, Some(why), _) => Resolved::Unknown(why),
    }
}

async fn resolve(resolver: Option<TokioResolver>, host: String, family: Family) -> Answer {
    let Some(resolver) = resolver else {
        return Err(NoAddress::Unknown("no name server is known".to_owned()));
    };
    let kind = match family {
        Family::V4 => RecordType::A,
        Family::V6 => RecordType::AAAA,
    };
    match resolver.lookup(&*host, kind).await {
        // What the name is another name for is among the answers.
        Ok(found) => {
            let data = found.answers().iter().map(|record| &record.data);
            Ok(data.filter_map(RData::ip_addr).collect())
        }
        Err(error) if error.is_nx_domain() || error.is_no_records_found() => {
            Err(NoAddress::Absent(error.to_string()))
        }
        Err(error) => Err(NoAddress::Unknown(error.to_string())),
    }
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

    /// There is no such address.
    fn none() -> BoxFuture<'static, Answer> {
        let absent = NoAddress::Absent("no such host".to_owned());
        futures::future::ready(Err(absent)).boxed()
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
            move |_, family| {
                if family == Family::V6 {
                    return none();
                }
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
        let never = Box::new(|_, _| std::future::pending().boxed());
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
        let ask = move |_, family| {
            if family == Family::V6 {
                return none();
            }
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

    #[test]
    fn what_fails_for_one_family_takes_nothing_of_it_away() {
        let [old, new]: [IpAddr; 2] = ["2001:db8::1", "2001:db8::2"].map(|a| a.parse().unwrap());
        let found = |addresses: &[IpAddr]| Resolved::Found(addresses.to_vec());
        let kept = |addresses: &[IpAddr]| Resolved::Kept {
            addresses: addresses.to_vec(),
            why: "busy".to_owned(),
        };
        let silent = || Err(NoAddress::Unknown("busy".to_owned()));
        let absent = || Err(NoAddress::Absent("no such host".to_owned()));
        let both = found(&[address(1), old]);
        let cases = [
            (
                Ok(vec![address(2)]),
                silent(),
                Some(&both),
                kept(&[address(2), old]),
            ),
            (
                silent(),
                Ok(vec![new]),
                Some(&both),
                kept(&[address(1), new]),
            ),
            (silent(), silent(), Some(&both), kept(&[address(1), old])),
            (absent(), silent(), Some(&both), kept(&[old])),
            (
                Ok(vec![address(2)]),
                absent(),
                Some(&both),
                found(&[address(2)]),
            ),
            (Ok(vec![address(2)]), silent(), None, kept(&[address(2)])),
            (
                absent(),
                silent(),
                None,
                Resolved::Unknown("busy".to_owned()),
            ),
        ];
        for (v4, v6, before, expected) in cases {
            assert_eq!(resolved([v4, v6], before), expected);
        }
    }

    #[tokio::test]
    async fn only_so_many_are_asked_for_at_once_and_nobody_waits_for_ever() {
        let open = Arc::new(AtomicUsize::new(0));
        let end = Arc::new(Semaphore::new(0));
        let ask = {
            let (open, end) = (open.clone(), end.clone());
            move |_, family| {
                if family == Family::V6 {
                    return none();
                }
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
