//! The fixture of the scenarios, and the main loop they use.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use headwater_bus::{
    Backoff, Budget, BusError, BusHealth, EventBus, EventRegistry, ExecuteError, Folds, Handlers,
    MainLoop, MainLoopClient, MainLoopClientConfig, MainLoopConfig, MainLoopWorker, Namespace,
    OutgoingEvent, PublishResult, RequestContext, RequestUsage, Requester, Session, SessionBackend,
    Sessions, SessionsConfig, StreamedBus, StreamedBusConfig, Submission, SubscribeOptions,
    SubscriptionId,
};
use headwater_conformance::bus::{HandlerLog, Noted};
use headwater_stream::{Backend, Entry, LeaseRenewerConfig, Options, Range, StreamName, connect};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, Semaphore};

pub(crate) use crate::backends::quick_lease;
use crate::backends::{Target, new_prefix, quick_queue};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A backend, with a unique key prefix.
pub(crate) struct Fixture {
    target: Target,
    pub(crate) prefix: String,
    lease: LeaseRenewerConfig,
    /// Call deadline of the buses.
    call_deadline: Duration,
}

impl Fixture {
    pub(crate) async fn embedded() -> Self {
        Self::new(Target::embedded().await)
    }

    /// An embedded backend in a directory, which one process at a time can open.
    pub(crate) async fn in_directory(url: &str, prefix: String) -> Self {
        let backend = connect(url, &Options::default()).await.unwrap();
        Self { prefix, ..Self::new(Target::Shared(backend)) }
    }

    pub(crate) fn redis() -> Self {
        Self::new(Target::redis())
    }

    pub(crate) fn cluster() -> Self {
        Self::new(Target::cluster())
    }

    pub(crate) fn at(url: String) -> Self {
        Self::new(Target::Url(url))
    }

    fn new(target: Target) -> Self {
        Self {
            target,
            prefix: new_prefix(),
            lease: LeaseRenewerConfig::default(),
            call_deadline: LIMIT,
        }
    }

    pub(crate) fn with_prefix(url: String, prefix: String) -> Self {
        Self { prefix, ..Self::at(url) }
    }

    /// With short leases: a crash is detected soon, but a slow process may also be considered dead.
    pub(crate) fn with_short_leases(self) -> Self {
        Self { lease: quick_lease(), ..self }
    }

    /// With this call deadline.
    pub(crate) fn with_call_deadline(self, call_deadline: Duration) -> Self {
        Self { call_deadline, ..self }
    }

    /// The same fixture, for another thread.
    pub(crate) fn again(&self) -> Self {
        Self { target: self.target.clone(), prefix: self.prefix.clone(), ..*self }
    }

    pub(crate) async fn backend(&self) -> Arc<dyn Backend> {
        // A server that is only slow must not count as unavailable.
        let options = Options { call_deadline: self.call_deadline, ..Default::default() };
        self.target.connect(&options).await
    }

    /// A bus, as another process would open it.
    pub(crate) async fn bus(&self) -> Arc<dyn EventBus> {
        self.streamed().await
    }

    pub(crate) async fn streamed(&self) -> Arc<StreamedBus> {
        let config = StreamedBusConfig {
            prefix: self.prefix.clone(),
            namespace: Namespace::new("tests").unwrap(),
            queue: quick_queue(self.lease),
            ..Default::default()
        };
        Arc::new(StreamedBus::open(self.backend().await, registry(), config).await.unwrap())
    }

    pub(crate) async fn sessions(&self) -> Sessions {
        sessions(self.bus().await).await
    }

    /// A worker on its own bus.
    pub(crate) async fn worker(&self, main_loop: &Loop) -> MainLoopWorker {
        self.worker_with(main_loop, fast_config()).await
    }

    pub(crate) async fn worker_with(
        &self,
        main_loop: &Loop,
        config: MainLoopConfig,
    ) -> MainLoopWorker {
        let sessions = self.sessions().await;
        MainLoopWorker::start(sessions, main_loop.clone(), config).await.unwrap()
    }

    /// A client on its own bus.
    pub(crate) async fn client(&self, requester: &str) -> MainLoopClient {
        self.client_with(requester, client_config()).await
    }

    pub(crate) async fn client_with(
        &self,
        requester: &str,
        config: MainLoopClientConfig,
    ) -> MainLoopClient {
        let requester = Requester::new(requester).unwrap();
        MainLoopClient::open(self.bus().await, requester, config).await.unwrap()
    }

    pub(crate) fn control(&self) -> StreamName {
        StreamName::new(format!("{}:control:tests", self.prefix)).unwrap()
    }

    pub(crate) fn replies(&self, requester: &str) -> StreamName {
        StreamName::new(format!("{}:reply:{requester}", self.control())).unwrap()
    }

    /// The first 1000 entries of a stream.
    pub(crate) async fn entries(&self, stream: &StreamName) -> Vec<Entry> {
        self.backend().await.range(stream, Range::first(1000)).await.unwrap()
    }

    /// Waits until the group of workers has acknowledged all requests.
    pub(crate) async fn requests_settle(&self) {
        let backend = self.backend().await;
        let deadline = tokio::time::Instant::now() + LIMIT;
        loop {
            let stats = backend.stats(&self.control()).await.unwrap().unwrap();
            let group = stats.groups.iter().find(|group| group.name.as_str().ends_with(":control"));
            if group.is_some_and(|group| group.pending == 0 && group.lag == Some(0)) {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{stats:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the control stream has `count` events of a type, and asserts that no more follow.
    pub(crate) async fn control_settles_at(&self, event_type: &str, count: usize) {
        let backend = self.backend().await;
        let deadline = tokio::time::Instant::now() + LIMIT;
        let of_type = || async {
            let entries = backend.range(&self.control(), Range::first(1000)).await.unwrap();
            let is_one = |entry: &&Entry| entry.fields.get("type").unwrap() == event_type;
            entries.iter().filter(is_one).count()
        };
        while of_type().await < count {
            assert!(tokio::time::Instant::now() < deadline, "waited for {count} {event_type}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(of_type().await, count, "{event_type}");
    }
}

/// A bus that publishes nothing: it prints a line and never returns, or fails.
pub(crate) struct Mute {
    pub(crate) bus: Arc<dyn EventBus>,
    pub(crate) refuses: bool,
}

#[async_trait]
impl EventBus for Mute {
    fn registry(&self) -> &EventRegistry {
        self.bus.registry()
    }

    async fn subscribe_handlers(
        &self,
        subscribe: SubscribeOptions,
        handlers: Handlers,
    ) -> Result<SubscriptionId, BusError> {
        self.bus.subscribe_handlers(subscribe, handlers).await
    }

    async fn unsubscribe(&self, subscription: SubscriptionId) -> Result<bool, BusError> {
        self.bus.unsubscribe(subscription).await
    }

    async fn publish_all(
        &self,
        _: Vec<OutgoingEvent>,
    ) -> Result<Vec<Result<PublishResult, BusError>>, BusError> {
        if self.refuses {
            return Err(BusError::BreakerOpen { retry_after: Duration::from_secs(1) });
        }
        println!("PUBLISHING");
        std::future::pending().await
    }

    async fn session_backend(&self) -> Result<SessionBackend, BusError> {
        self.bus.session_backend().await
    }

    async fn health(&self) -> BusHealth {
        self.bus.health().await
    }

    async fn close(&self) -> Result<(), BusError> {
        self.bus.close().await
    }
}

pub(crate) async fn sessions(bus: Arc<dyn EventBus>) -> Sessions {
    let folds = Folds::none().all::<Noted>(100);
    Sessions::new(bus, folds, SessionsConfig::default()).await.unwrap()
}

pub(crate) fn registry() -> EventRegistry {
    EventRegistry::builtin().with::<Noted>().unwrap()
}

/// Settings without long waits.
pub(crate) fn fast_config() -> MainLoopConfig {
    MainLoopConfig {
        backoff: Backoff::Fixed(Duration::from_millis(5)),
        drain: Duration::from_secs(10),
        ..Default::default()
    }
}

fn client_config() -> MainLoopClientConfig {
    MainLoopClientConfig { timeout: LIMIT, ..Default::default() }
}

/// Requests of the test main loop.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Return the text.
    Echo(String),
    /// Block the thread for this many milliseconds, then wait forever.
    Block(u64),
    /// Return the text when the gate is open.
    Wait(String),
    /// Fail this many times, then return the attempt number.
    FailTimes(u32),
    /// Fail permanently.
    GiveUp,
    /// Panic.
    Panic,
    /// Charge `tokens`, `charges` times. A stubborn request ignores the error.
    Spend { tokens: u64, charges: u64, is_stubborn: bool },
    /// Return this many characters.
    Big(usize),
    /// Publish the number in the session, then return all numbers.
    Note(u64),
    /// Charge tokens, then submit a sub-request and return its limits.
    Delegate { tokens: u64 },
    /// Return the limits.
    Limits,
    /// Abort the process, if `dies` is set.
    Die,
}

/// The limits of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Given {
    pub(crate) budget: Budget,
    pub(crate) time_left_ms: u64,
    pub(crate) resources: serde_json::Value,
}

/// A main loop that logs what it does. Clones share it.
#[derive(Clone)]
pub(crate) struct Loop {
    pub(crate) log: HandlerLog,
    pub(crate) gate: Arc<Semaphore>,
    pub(crate) begun: Arc<Notify>,
    pub(crate) client: Arc<Mutex<Option<Arc<MainLoopClient>>>>,
    pub(crate) dies: bool,
}

impl Default for Loop {
    fn default() -> Self {
        Self {
            log: HandlerLog::default(),
            gate: Arc::new(Semaphore::new(0)),
            begun: Arc::default(),
            client: Arc::default(),
            dies: false,
        }
    }
}

/// Logs that a run was dropped before its end.
struct Unfinished(HandlerLog, String);

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.1.is_empty() {
            self.0.add(format!("dropped {}", self.1));
        }
    }
}

impl Loop {
    /// Opens the gate permanently.
    pub(crate) fn open_gate(&self) {
        self.gate.add_permits(10_000);
    }

    async fn answer(
        &self,
        ask: Ask,
        session: &Session,
        context: &RequestContext,
    ) -> Result<serde_json::Value, ExecuteError> {
        let meter = context.meter();
        Ok(match ask {
            Ask::Echo(text) => text.into(),
            Ask::Block(ms) => {
                std::thread::sleep(Duration::from_millis(ms));
                std::future::pending().await
            }
            Ask::Wait(text) => {
                self.gate.acquire().await?.forget();
                text.into()
            }
            Ask::FailTimes(times) if context.attempt() <= times => {
                return Err(ExecuteError::retry("not yet"));
            }
            Ask::FailTimes(_) => context.attempt().into(),
            Ask::GiveUp => return Err(ExecuteError::give_up("never")),
            Ask::Panic => panic!("as it was asked to"),
            Ask::Spend { tokens, charges, is_stubborn } => {
                for _ in 0..charges {
                    let charged = meter.charge_model(tokens, 0, 1);
                    if !is_stubborn {
                        charged?;
                    }
                    tokio::task::yield_now().await;
                }
                serde_json::to_value(meter.used())?
            }
            Ask::Big(size) => "x".repeat(size).into(),
            Ask::Note(number) => {
                session.publish(Noted { number, ..Default::default() }).await?;
                let all = session.all::<Noted>().map(|all| all.events).unwrap_or_default();
                all.iter().map(|event| event.number).collect::<Vec<u64>>().into()
            }
            Ask::Delegate { tokens } => {
                meter.charge_model(tokens, 0, 0)?;
                let client = self.client.lock().unwrap().clone().unwrap();
                let asked = Submission::new(Ask::Limits);
                let given = client.submit_within::<_, Given>(context, asked).await?;
                serde_json::to_value((given.output, meter.used()))?
            }
            Ask::Limits => {
                let given = Given {
                    budget: meter.left(),
                    time_left_ms: context.time_left().as_millis() as u64,
                    resources: context.resources().clone(),
                };
                meter.charge(RequestUsage { input_tokens: 7, ..RequestUsage::default() })?;
                serde_json::to_value(given)?
            }
            Ask::Die if self.dies => std::process::abort(),
            Ask::Die => "alive".into(),
        })
    }
}

#[async_trait]
impl MainLoop for Loop {
    type Request = Ask;
    type Output = serde_json::Value;

    async fn execute(
        &self,
        request: Ask,
        session: &Session,
        context: &RequestContext,
    ) -> Result<serde_json::Value, ExecuteError> {
        self.log.add(format!("begun {}", context.request_id()));
        let mut unfinished = Unfinished(self.log.clone(), context.request_id().to_string());
        self.begun.notify_one();
        let answer = self.answer(request, session, context).await;
        unfinished.1.clear();
        answer
    }
}

/// How often a request was started.
pub(crate) fn begun(main_loop: &Loop, request: &str) -> usize {
    let line = format!("begun {request}");
    main_loop.log.lines().iter().filter(|other| **other == line).count()
}
