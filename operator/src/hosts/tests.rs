//! Tests of what is asked, and what is made of the answers.

use std::sync::atomic::{AtomicUsize, Ordering};

use hickory_resolver::{
    Resolver,
    config::{NameServerConfig, ResolverConfig},
    net::runtime::TokioRuntimeProvider,
    proto::{
        op::{Message, ResponseCode},
        rr::{RData, Record},
    },
};
use tokio::{
    net::UdpSocket,
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

/// A name server that knows `half` and `whole` in the first domain that is searched. Of the former it
/// knows IPv4 addresses, and fails for others; in the second domain nothing has a name.
async fn serve(socket: UdpSocket) {
    let mut buffer = [0; 512];
    while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
        let question = Message::from_vec(&buffer[..length]).unwrap();
        let query = question.queries[0].clone();
        let is_first = query.query_type() == RecordType::A;
        let address = if is_first { "192.0.2.1" } else { "2001:db8::1" };
        let data = RData::from(address.parse::<IpAddr>().unwrap());
        let mut answer = question.into_response();
        let name = query.name().to_string();
        match name.as_str() {
            "half.a.test." if !is_first => answer.metadata.response_code = ResponseCode::ServFail,
            "half.a.test." | "whole.a.test." => {
                answer.add_answer(Record::from_rdata(query.name().clone(), 60, data));
            }
            _ => answer.metadata.response_code = ResponseCode::NXDomain,
        }
        socket
            .send_to(&answer.to_vec().unwrap(), from)
            .await
            .unwrap();
    }
}

/// A family that is not known is not one that there is none of.
#[tokio::test]
async fn a_family_that_cannot_be_asked_for_is_not_absent() {
    let socket = UdpSocket::bind(("127.0.0.1", 0)).await.unwrap();
    let port = socket.local_addr().unwrap().port();
    let server = tokio::spawn(serve(socket));
    let mut nameserver = NameServerConfig::udp([127, 0, 0, 1].into());
    nameserver.connections[0].port = port;
    let search = ["a.test.", "b.test."].map(|name| name.parse().unwrap());
    let config = ResolverConfig::from_parts(None, search.into(), vec![nameserver]);
    let resolver = Resolver::builder_with_config(config, TokioRuntimeProvider::default());
    let resolver = Some(resolver.build().unwrap());
    let (v4, v6) = (address(1), "2001:db8::1".parse().unwrap());
    let whole = resolve(resolver.clone(), "whole".to_owned()).await;
    assert_eq!(whole.map(in_order), Ok(vec![v4, v6]));
    let half = resolve(resolver.clone(), "half".to_owned()).await;
    let Err(NoAddress::Half(found, why)) = half else {
        panic!("{half:?}");
    };
    assert_eq!(found, [v4]);
    let other: IpAddr = "2001:db8::2".parse().unwrap();
    let before = Resolved::Found(vec![address(9), other]);
    let half = NoAddress::Half(found, why.clone());
    let addresses = vec![v4, other];
    assert_eq!(
        resolved(Err(half), Some(before)),
        Resolved::Kept { addresses, why }
    );
    let none = resolve(resolver, "none".to_owned()).await;
    assert!(matches!(none, Err(NoAddress::Absent(_))), "{none:?}");
    server.abort();
}
