//! The client itself: silent connections, reconnects, sockets, certificates, credentials, names, metrics.
#![cfg(feature = "redis")]

mod redis_support;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use async_trait::async_trait;
use headwater_stream::{
    AcquireResult, Backend, BoxError, CredentialProvider, Credentials, Fence, Fields, GroupName,
    GroupStart, Options, Range, ReclaimFrom, ReclaimRequest, Renewal, Retention, SettleBatch,
    Settlement, StreamError, StreamName, WatchMode, connect,
};
use headwater_testkit::{Cluster, Proxy, Redis};
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString,
    Unit,
};

use crate::redis_support::*;

const KEEP: Retention = Retention::KEEP_ALL;
const LIMIT: Duration = Duration::from_secs(60);

async fn append(backend: &Arc<dyn Backend>, number: usize) -> Result<(), StreamError> {
    backend.append(&stream("orders"), &[numbered(number)], &KEEP).await.map(drop)
}

async fn length(backend: &Arc<dyn Backend>) -> Result<usize> {
    Ok(backend.range(&stream("orders"), Range::first(1000)).await?.len())
}

async fn until(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !holds()? {
        ensure!(start.elapsed() < LIMIT, "timed out: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_dropped_silently_costs_no_ambiguous_write() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let silence_max = Duration::from_millis(300);
    let options = Options { silence_max, ..Options::default() };
    let backend = connect(&redis.url_at(proxy.addr()), &options).await?;
    append(&backend, 0).await?;

    for round in 1..=3 {
        proxy.drop_silently()?;
        tokio::time::sleep(silence_max + Duration::from_millis(100)).await;
        let start = Instant::now();
        append(&backend, round).await.context("the connection was silent for too long")?;
        // It waits for the reply to the ping, which does not come, then for a new connection.
        ensure!(start.elapsed() < options.call_deadline, "it took {:?}", start.elapsed());
        assert_eq!(length(&backend).await?, round + 1, "it was executed once");
    }
    Ok(())
}

/// Requests for many bytes are held back, as slow transfers hold back what follows on their connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_transfer_does_not_delay_leases_and_acknowledgements() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline: Duration::from_secs(30), ..Options::default() };
    let backend = connect(&redis.url_at(proxy.addr()), &options).await?;
    let (stream, group, ann) = (stream("orders"), group("workers"), consumer("ann"));
    let fields = Fields::new([("payload", "x".repeat(1 << 20))]);
    let ids = backend.append(&stream, &vec![fields; 4], &KEEP).await?;
    backend.ensure_group(&stream, &group, GroupStart::Beginning).await?;
    let mut reader = backend.reader(&group, &ann).await?;
    assert_eq!(read_ids(reader.as_mut(), &stream).await?, ids);
    let (lease, me, ttl) = (lease("orders:0"), holder("ann"), Duration::from_secs(60));
    let acquired = backend.acquire(&lease, &me, ttl).await?;
    let AcquireResult::Won(epoch) = acquired else { panic!("{acquired:?}") };
    let fence = Fence { lease, epoch };

    let range = |backend: Arc<dyn Backend>, stream: StreamName| async move {
        Ok::<_, StreamError>(backend.range(&stream, Range::first(10)).await?.len())
    };
    let reclaim = |backend: Arc<dyn Backend>, stream: StreamName, group: GroupName| async move {
        let request = ReclaimRequest {
            stream: &stream,
            group: &group,
            consumer: &consumer("bob"),
            fence: None,
            from: ReclaimFrom::Anyone,
            min_idle: Duration::ZERO,
            after: None,
            count: 10,
        };
        Ok::<_, StreamError>(backend.reclaim(request).await?.entries.len())
    };
    let (shared, name) = (&backend, &stream);
    type Transfer = tokio::task::JoinHandle<Result<usize, StreamError>>;
    let transfers: [(&str, &dyn Fn() -> Transfer, usize); 2] = [
        ("XRANGE", &|| tokio::spawn(range(Arc::clone(shared), name.clone())), 4),
        ("bob", &|| tokio::spawn(reclaim(Arc::clone(shared), name.clone(), group.clone())), 2),
    ];
    for (number, (pattern, start, entries)) in transfers.into_iter().enumerate() {
        let held = proxy.held();
        proxy.hold(pattern, 1, Duration::from_secs(3))?;
        let transfer = start();
        until("it is held back", || Ok(proxy.held() > held)).await?;
        let renewed = backend.renew(&me, std::slice::from_ref(&fence), ttl).await?;
        assert_eq!(renewed, [Renewal::Kept]);
        let entries_acknowledged = &[Settlement::ack(ids[number])];
        let settle = SettleBatch {
            stream: &stream,
            group: &group,
            consumer: &ann,
            fence: None,
            entries: entries_acknowledged,
        };
        assert_eq!(backend.settle(settle).await?.applied, 1);
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!transfer.is_finished(), "{pattern} was done before the acknowledgement");
        assert_eq!(transfer.await??, entries);
        proxy.heal()?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_kept_alive_by_pings() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { silence_max: Duration::from_millis(50), ..Options::default() };
    let backend = connect(&redis.url_at(proxy.addr()), &options).await?;
    append(&backend, 0).await?;
    let connections = proxy.connections();
    let pings = || -> Result<u64> {
        let stats = redis.command(&["INFO", "commandstats"])?.text();
        let calls =
            stats.split("cmdstat_ping:calls=").nth(1).and_then(|rest| rest.split(',').next());
        Ok(calls.map_or(Ok(0), str::parse)?)
    };

    let before = pings()?;
    until("five pings", || Ok(pings()? >= before + 5)).await?;

    append(&backend, 1).await?;
    assert_eq!(proxy.connections(), connections, "the connection is the same");
    Ok(())
}

/// The kernel has a keep-alive timer (2) for every connection to this server.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn connections_have_tcp_keep_alive() -> Result<()> {
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    append(&backend, 0).await?;
    let _reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    let to_server = format!(":{:04X}", redis.port());
    let timers = || -> Result<Vec<String>> {
        let sockets = std::fs::read_to_string("/proc/net/tcp")?;
        let established = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let ours =
            established.filter(|it| it.len() > 5 && it[2].ends_with(&to_server) && it[3] == "01");
        Ok(ours.map(|it| it[5].split(':').next().unwrap_or_default().to_owned()).collect())
    };
    // For a moment it can be the timer of a retransmission.
    until("keep-alive timers", || {
        let timers = timers()?;
        Ok(!timers.is_empty() && timers.iter().all(|timer| timer == "02"))
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn many_callers_share_the_attempts_to_reconnect() -> Result<()> {
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let options = Options { call_deadline: Duration::from_secs(3), ..Options::default() };
    let backend = connect(&redis.url_at(proxy.addr()), &options).await?;
    append(&backend, 0).await?;
    redis.stop()?;
    let before = proxy.connections();

    // The proxy accepts and closes each connection, because the server is gone.
    let callers = (0..100).map(|_| {
        let backend = Arc::clone(&backend);
        tokio::spawn(async move { backend.now().await.is_err() })
    });
    let failed = futures_util::future::join_all(callers).await;

    assert!(failed.into_iter().all(|failed| failed.unwrap_or(false)), "the server is gone");
    let attempts = proxy.connections() - before;
    // 10 ms doubled to 1 s, half of it random: about ten attempts in three seconds.
    assert!((2..=40).contains(&attempts), "{attempts} attempts of 100 callers in 3 s");
    redis.restart()?;
    let start = Instant::now();
    backend.now().await?;
    ensure!(start.elapsed() < Duration::from_secs(2), "the backoff is at most a second");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_callers_share_the_attempts_to_find_a_cluster() -> Result<()> {
    let cluster = Cluster::start()?;
    let options = Options { call_deadline: Duration::from_secs(3), ..Options::default() };
    let known = connect(&cluster.url(), &options).await?;
    append(&known, 0).await?;
    // One that has never seen the cluster.
    let unknown = connect(&cluster.url(), &options).await?;
    let nodes = cluster.nodes();
    nodes.iter().try_for_each(Redis::kill9)?;
    // They accept and close each connection, as a proxy of a server that is gone.
    let connects = Arc::new(AtomicU64::new(0));
    let mut listeners = tokio::task::JoinSet::new();
    for node in nodes {
        let listener = tokio::net::TcpListener::bind(node.addr()).await?;
        let connects = Arc::clone(&connects);
        listeners.spawn(async move {
            while listener.accept().await.is_ok() {
                connects.fetch_add(1, Ordering::SeqCst);
            }
        });
    }

    for backend in [&known, &unknown] {
        connects.store(0, Ordering::SeqCst);
        let callers = (0..100).map(|_| {
            let backend = Arc::clone(backend);
            tokio::spawn(async move { append(&backend, 1).await.is_err() })
        });
        let failed = futures_util::future::join_all(callers).await;
        assert!(failed.into_iter().all(|failed| failed.unwrap_or(false)), "the nodes are gone");
        let attempts = connects.load(Ordering::SeqCst);
        // About ten attempts in three seconds, each to six nodes, and those to the primary of the slot.
        println!("{attempts} connections of 100 callers in 3 s");
        assert!((2..=200).contains(&attempts), "{attempts} connections of 100 callers in 3 s");
    }
    listeners.shutdown().await;
    for node in nodes {
        node.restart()?;
    }
    cluster.wait_until_ok(LIMIT)?;
    let start = Instant::now();
    append(&known, 2).await?;
    append(&unknown, 3).await?;
    ensure!(start.elapsed() < Duration::from_secs(3), "the backoff is at most a second");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unix_socket_works_like_a_port() -> Result<()> {
    let redis = Redis::builder().unix_socket().start()?;
    let socket = redis.socket().context("it has a socket")?.display();
    for url in [format!("unix://{socket}?db=3"), format!("redis+unix://{socket}?db=3")] {
        let backend = open(&url).await?;
        append(&backend, 1).await?;
        let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
        backend.ensure_group(&stream("orders"), &group("workers"), GroupStart::Beginning).await?;
        assert_eq!(read_ids(&mut *reader, &stream("orders")).await?.len(), 1);
        let watch = backend.watch("lease:").await?;
        assert!(matches!(watch.mode(), WatchMode::All), "{:?}", watch.mode());
        assert!(backend.describe().address.starts_with("unix:///"), "{:?}", backend.describe());
    }
    let mut connection = redis.connect()?;
    connection.command(&["SELECT", "3"])?.ok()?;
    assert_eq!(connection.command(&["XLEN", "orders"])?.int(), Some(2));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_can_require_client_certificates() -> Result<()> {
    let redis = Redis::builder().tls().client_certificates().start()?;
    let ca = redis.ca_certificate().context("it speaks TLS")?.display();
    let (certificate, key) = redis.client_certificate().context("it speaks TLS")?;
    let (certificate, key) = (certificate.display(), key.display());

    let options = Options { call_deadline: Duration::from_millis(500), ..Options::default() };
    let without = connect(&format!("{}?ca={ca}", redis.url()), &options).await.map(drop);
    assert!(matches!(without, Err(StreamError::Unavailable { .. })), "{without:?}");
    let wrong = open(&format!("{}?ca={ca}&cert={key}&key={key}", redis.url())).await.map(drop);
    assert!(format!("{wrong:?}").contains("`cert` in the stream URL"), "{wrong:?}");

    let backend = open(&format!("{}?ca={ca}&cert={certificate}&key={key}", redis.url())).await?;
    append(&backend, 1).await?;
    assert_eq!(length(&backend).await?, 1);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_the_certificate_can_differ_from_the_host() -> Result<()> {
    let redis = Redis::builder().tls().certificate_name("redis.example").start()?;
    let ca = redis.ca_certificate().context("it speaks TLS")?.display();

    let options = Options { call_deadline: Duration::from_millis(500), ..Options::default() };
    let without = connect(&format!("{}?ca={ca}", redis.url()), &options).await.map(drop);
    assert!(matches!(without, Err(StreamError::Unavailable { .. })), "{without:?}");

    let backend = open(&format!("{}?ca={ca}&sni=redis.example", redis.url())).await?;
    append(&backend, 1).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_can_speak_tls() -> Result<()> {
    // All slots on one node: several would have to trust each other's authorities.
    let tls =
        Redis::builder().tls().setting("cluster-enabled", "yes").setting("tls-cluster", "yes");
    let node = tls.setting("cluster-announce-ip", "127.0.0.1").start()?;
    let slots: Vec<String> = (0..16_384).map(|slot: u32| slot.to_string()).collect();
    let all: Vec<&str> =
        ["CLUSTER", "ADDSLOTS"].into_iter().chain(slots.iter().map(String::as_str)).collect();
    node.command(&all)?.ok()?;
    until("the cluster serves its slots", || {
        Ok(node.command(&["CLUSTER", "INFO"])?.text().contains("cluster_state:ok"))
    })
    .await?;

    let ca = node.ca_certificate().context("it speaks TLS")?.display();
    let url = format!("redis-cluster://{}?tls=true", node.addr());
    let options = Options { call_deadline: Duration::from_millis(500), ..Options::default() };
    let without = connect(&url, &options).await.map(drop);
    assert!(matches!(without, Err(StreamError::Unavailable { .. })), "{without:?}");

    let backend = open(&format!("{url}&ca={ca}")).await?;
    append(&backend, 1).await?;
    assert_eq!(length(&backend).await?, 1);
    Ok(())
}

/// Hands out a password that expires; fails while there is none.
#[derive(Debug, Default)]
struct Rotating {
    password: Mutex<Option<String>>,
    lifetime: Duration,
    calls: AtomicU64,
}

impl Rotating {
    fn new(password: &str, lifetime: Duration) -> Arc<Self> {
        let password = Mutex::new(Some(password.to_owned()));
        Arc::new(Self { password, lifetime, calls: AtomicU64::new(0) })
    }

    fn set(&self, password: Option<&str>) {
        *self.password.lock().expect("no panic") = password.map(str::to_owned);
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl CredentialProvider for Rotating {
    async fn credentials(&self) -> Result<Credentials, BoxError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let password = self.password.lock().expect("no panic").clone().ok_or("no token today")?;
        Ok(Credentials { user: None, password, expires_in: Some(self.lifetime) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_renewed_before_their_credentials_expire() -> Result<()> {
    let redis = Redis::builder().user("app", "first", "~* &* +@all").start()?;
    let provider = Rotating::new("first", Duration::from_millis(400));
    let credentials: Arc<dyn CredentialProvider> = Arc::<Rotating>::clone(&provider);
    let options = Options { credentials: Some(credentials), ..Options::default() };
    let url = format!("redis://app@{}/", redis.addr());
    let backend = connect(&url, &options).await?;
    let orders = stream("orders");
    backend.ensure_group(&orders, &group("workers"), GroupStart::Beginning).await?;
    let mut reader = backend.reader(&group("workers"), &consumer("ann")).await?;
    let is_old = |list: &str, ids: &[String]| {
        let id = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
        list.lines().any(|line| line.contains("user=app") && ids.contains(&id(line)))
    };
    let ids = || -> Result<Vec<String>> {
        let list = redis.command(&["CLIENT", "LIST"])?.text();
        let of_app = list.lines().filter(|line| line.contains("user=app"));
        Ok(of_app.map(|line| line.split(' ').next().unwrap_or_default().to_owned()).collect())
    };

    // Every call succeeds, while the password changes and the connections are replaced.
    let mut number = 0;
    for password in ["second", "third"] {
        let (old, calls) = (ids()?, provider.calls());
        redis.command(&["ACL", "SETUSER", "app", "resetpass", &format!(">{password}")])?.ok()?;
        provider.set(Some(password));
        let start = Instant::now();
        loop {
            append(&backend, number).await?;
            assert_eq!(read_ids(&mut *reader, &orders).await?.len(), 1);
            number += 1;
            let list = redis.command(&["CLIENT", "LIST"])?.text();
            if provider.calls() >= calls + 2 && !is_old(&list, &old) {
                break;
            }
            ensure!(start.elapsed() < LIMIT, "not all connections were replaced: {list}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    assert_eq!(length(&backend).await?, number);

    // Without new credentials, the old connections are used as long as the server keeps them.
    provider.set(None);
    let calls = provider.calls();
    while provider.calls() < calls + 2 {
        append(&backend, number).await?;
        assert_eq!(read_ids(&mut *reader, &orders).await?.len(), 1);
        number += 1;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(length(&backend).await?, number);
    Ok(())
}

/// Hands out credentials once, and then never answers.
#[derive(Debug, Default)]
struct Hanging {
    calls: AtomicU64,
}

#[async_trait]
impl CredentialProvider for Hanging {
    async fn credentials(&self) -> Result<Credentials, BoxError> {
        if self.calls.fetch_add(1, Ordering::SeqCst) > 0 {
            std::future::pending::<()>().await;
        }
        let expires_in = Some(Duration::from_millis(400));
        Ok(Credentials { user: None, password: "first".to_owned(), expires_in })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_do_not_wait_for_a_credential_provider_that_does_not_answer() -> Result<()> {
    let redis = Redis::builder().user("app", "first", "~* &* +@all").start()?;
    let provider = Arc::new(Hanging::default());
    let credentials: Arc<dyn CredentialProvider> = Arc::<Hanging>::clone(&provider);
    let options = Options { credentials: Some(credentials), ..Options::default() };
    let backend = connect(&format!("redis://app@{}/", redis.addr()), &options).await?;
    append(&backend, 0).await?;

    let start = Instant::now();
    let (mut number, mut longest) = (1, Duration::ZERO);
    // Longer than the deadline of a call.
    while start.elapsed() < options.call_deadline + Duration::from_secs(1) {
        let callers = (number..number + 10).map(|number| {
            let backend = Arc::clone(&backend);
            tokio::spawn(async move {
                let start = Instant::now();
                append(&backend, number).await.map(|()| start.elapsed())
            })
        });
        for took in futures_util::future::join_all(callers).await {
            longest = longest.max(took??);
            number += 1;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(provider.calls.load(Ordering::SeqCst), 2, "the renewal is due, and waits");
    assert!(longest < options.call_deadline / 2, "a call took {longest:?}");
    let appended = redis.command(&["XLEN", "orders"])?.int();
    assert_eq!(appended, Some(number as i64), "each was appended once");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_without_a_password_needs_a_provider() -> Result<()> {
    let result = open("redis://app@127.0.0.1:1/").await.map(drop);
    let error = result.expect_err("it has no password").to_string();
    assert!(error.contains("user without a password"), "{error}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_have_a_name_and_name_the_library() -> Result<()> {
    let redis = Redis::start()?;
    let plain = open(&redis.url()).await?;
    let named = open(&format!("{}?client_name=billing", redis.url())).await?;
    append(&plain, 1).await?;
    append(&named, 1).await?;
    let list = redis.command(&["CLIENT", "LIST"])?.text();
    assert!(list.contains(" name=headwater "), "{list}");
    assert!(list.contains(" name=billing "), "{list}");
    // Servers before 7.2 do not show it.
    if list.contains(" lib-name=") {
        assert!(list.contains(" lib-name=headwater lib-ver="), "{list}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn notifications_are_not_configured_if_the_options_say_so() -> Result<()> {
    let redis = Redis::start()?;
    let options = Options { configure_notifications: false, ..Options::default() };
    let backend = connect(&redis.url(), &options).await?;
    let watch = backend.watch("lease:").await?;
    let WatchMode::ReleasesOnly { reason } = watch.mode() else { panic!("{:?}", watch.mode()) };
    assert!(reason.contains("configure_notifications"), "{reason}");
    let flags = redis.command(&["CONFIG", "GET", "notify-keyspace-events"])?;
    assert_eq!(flags.items()[1].text(), "", "the server is not changed");

    // Flags that are set are used.
    redis.command(&["CONFIG", "SET", "notify-keyspace-events", "Ex"])?.ok()?;
    assert!(matches!(backend.watch("lease:").await?.mode(), WatchMode::All));
    Ok(())
}

/// On one thread, so that the recorder only sees this test.
#[tokio::test]
async fn connects_disconnects_retries_and_requests_in_flight_are_counted() -> Result<()> {
    let values = MetricTotals::default();
    let _guard = metrics::set_default_local_recorder(&values);
    let redis = Redis::start()?;
    let proxy = Proxy::start(redis.addr())?;
    let backend = open(&redis.url_at(proxy.addr())).await?;
    proxy.delay(Duration::from_millis(100))?;
    let call = tokio::spawn({
        let backend = Arc::clone(&backend);
        async move { append(&backend, 1).await }
    });
    let in_flight = || values.of("headwater_redis_requests_in_flight");
    until("a request in flight", || Ok(in_flight() == 1)).await?;
    call.await??;
    assert_eq!(values.of("headwater_redis_requests_in_flight"), 0);
    assert_eq!(values.of("headwater_redis_connects_total{result=ok}"), 1);
    assert_eq!(values.of("headwater_redis_disconnects_total"), 0);

    proxy.drop_reply()?;
    backend.now().await?;

    assert_eq!(values.of("headwater_redis_connects_total{result=ok}"), 2);
    assert_eq!(values.of("headwater_redis_disconnects_total"), 1);
    assert_eq!(values.of("headwater_redis_retries_total{result=unreachable}"), 1);
    assert_eq!(values.of("headwater_redis_requests_in_flight"), 0);
    Ok(())
}

/// On one thread, so that the recorder only sees this test.
#[tokio::test]
async fn redirections_of_a_cluster_and_refused_calls_are_counted() -> Result<()> {
    let values = MetricTotals::default();
    let _guard = metrics::set_default_local_recorder(&values);
    let cluster = Cluster::start()?;
    let backend = open(&cluster.url()).await?;
    append(&backend, 0).await?;
    let slot = cluster.slot_of("orders")?;
    let from = cluster.primary_of_slot(slot)?;
    let to = cluster.nodes()[..3].iter().find(|node| node.port() != from.port()).context("two")?;
    let id_of = |node: &Redis| anyhow::Ok(node.command(&["CLUSTER", "MYID"])?.text());
    let (from_id, to_id, number) = (id_of(from)?, id_of(to)?, slot.to_string());
    to.command(&["CLUSTER", "SETSLOT", &number, "IMPORTING", &from_id])?.ok()?;
    from.command(&["CLUSTER", "SETSLOT", &number, "MIGRATING", &to_id])?.ok()?;
    from.command(&["MIGRATE", "127.0.0.1", &to.port().to_string(), "orders", "0", "5000"])?.ok()?;

    append(&backend, 1).await?;
    let redirects = || {
        ["ask", "moved"]
            .map(|it| values.of(&format!("headwater_redis_redirects_total{{result={it}}}")))
    };
    assert_eq!(redirects(), [1, 0]);
    for node in [to, from] {
        node.command(&["CLUSTER", "SETSLOT", &number, "NODE", &to_id])?.ok()?;
    }
    append(&backend, 2).await?;
    assert_eq!(redirects(), [1, 1]);
    let refused = || values.of("headwater_redis_retries_total{result=refused}");
    assert_eq!(refused(), 0, "a redirection is not refused");

    // A primary that is demoted for a moment.
    let redis = Redis::start()?;
    let backend = open(&redis.url()).await?;
    redis.command(&["REPLICAOF", "127.0.0.1", "1"])?.ok()?;
    let call = tokio::spawn(async move { append(&backend, 1).await });
    until("a refused call", || Ok(refused() > 0)).await?;
    redis.command(&["REPLICAOF", "NO", "ONE"])?.ok()?;
    call.await??;
    Ok(())
}

/// A recorder that adds up counters and gauges by name and labels.
#[derive(Clone, Default)]
struct MetricTotals(Arc<Mutex<BTreeMap<String, i64>>>);

struct OneTotal(MetricTotals, String);

impl MetricTotals {
    fn of(&self, name: &str) -> i64 {
        self.0.lock().expect("no panic").get(name).copied().unwrap_or(0)
    }

    fn handle(&self, key: &Key) -> Arc<OneTotal> {
        let labels: Vec<String> =
            key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let labels =
            if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        Arc::new(OneTotal(self.clone(), format!("{}{labels}", key.name())))
    }
}

impl OneTotal {
    fn add(&self, value: i64) {
        *self.0.0.lock().expect("no panic").entry(self.1.clone()).or_default() += value;
    }
}

impl CounterFn for OneTotal {
    fn increment(&self, value: u64) {
        self.add(value as i64);
    }

    fn absolute(&self, _value: u64) {}
}

impl GaugeFn for OneTotal {
    fn increment(&self, value: f64) {
        self.add(value as i64);
    }

    fn decrement(&self, value: f64) {
        self.add(-(value as i64));
    }

    fn set(&self, _value: f64) {}
}

impl Recorder for MetricTotals {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.handle(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.handle(key))
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
