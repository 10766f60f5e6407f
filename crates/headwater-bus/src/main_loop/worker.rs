//! Workers: processes that execute the requests of a namespace.
//!
//! Upstream: the group `control` on the control stream, shared by all workers of a namespace. Downstream: `executor`.
//! Guarantees: a request is delivered to one worker, and to another one if that worker crashes; a stopping worker
//! finishes what it can within its drain timeout and releases the rest, which does not count as an attempt.
//! Cancellations arrive on the control stream.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_queue::{Outcome, RetryPolicy};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::config::MainLoopConfig;
use super::executor::{REPLY_STORE_TIMEOUT, RequestExecutor};
use super::reply_store::ReplyStore;
use super::request_context::{MainLoop, TypedMainLoop};
use super::request_lock::RequestLocks;
use crate::builtin_events::{MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure};
use crate::bus::{EventBus, EventBusExt, SubscribeOptions};
use crate::error::Result;
use crate::event::ReceivedEvent;
use crate::name::SubscriptionId;
use crate::session::Sessions;

/// Label of the group shared by all workers of a namespace: `wink:cg:<namespace>:control`.
const GROUP: &str = "control";

/// Handler timeout beyond `run_timeout`, for storing the reply.
const REPLY_STORE_MARGIN: Duration = Duration::from_secs(2 * 60 * 60);

// The reply and its copy are stored one after the other. A handler that times out loses the output.
const _: () = assert!(2 * REPLY_STORE_TIMEOUT.as_secs() < REPLY_STORE_MARGIN.as_secs());

/// Executes requests until it is stopped. Dropping it releases its requests.
pub struct MainLoopWorker {
    executor: Arc<RequestExecutor>,
    bus: Arc<dyn EventBus>,
    stop: watch::Sender<Option<Instant>>,
    subscriptions: Mutex<Vec<SubscriptionId>>,
    _upkeep: AbortOnDropHandle<()>,
}

impl MainLoopWorker {
    /// Starts to execute the requests of the bus's namespace, each in its own session.
    ///
    /// A bus has one worker. A namespace may have any number of workers with the same main loop.
    pub async fn start(
        sessions: Sessions,
        main_loop: impl MainLoop,
        config: MainLoopConfig,
    ) -> Result<Self> {
        config.validate()?;
        let bus = Arc::clone(sessions.bus());
        bus.registry().check::<MainLoopRequest>()?;
        bus.registry().check::<MainLoopCompleted>()?;
        bus.registry().check::<MainLoopFailed>()?;
        let reply_store = ReplyStore::new(Arc::clone(&bus), config.replies).await?;
        let locks =
            RequestLocks::new(reply_store.storage.clone(), &reply_store.origin, config.lease)?;
        let (stop, stopping) = watch::channel(None);
        let main_loop = Arc::new(TypedMainLoop(main_loop));
        let executor =
            Arc::new(RequestExecutor { sessions, reply_store, locks, main_loop, config, stopping });
        let maintain = AbortOnDropHandle::new(tokio::spawn(maintain(Arc::clone(&executor))));
        let worker =
            Self { executor, bus, stop, subscriptions: Mutex::default(), _upkeep: maintain };
        worker.subscribe().await?;
        info!(namespace = %worker.executor.reply_store.storage.namespace, "main loop started");
        Ok(worker)
    }

    async fn subscribe(&self) -> Result<()> {
        // Cancellations first, so that none is missed. The handlers hold the worker weakly: the bus holds the
        // handlers, and the worker holds the bus.
        let executor = Arc::downgrade(&self.executor);
        let on_failed = move |event: ReceivedEvent<MainLoopFailed>| {
            if event.kind == RequestFailure::Cancelled
                && let Some(executor) = executor.upgrade()
            {
                executor.locks.cancel(&event.request_id);
            }
            std::future::ready(())
        };
        let cancellations =
            self.bus.subscribe::<MainLoopFailed>(SubscribeOptions::live(), on_failed).await?;
        self.add_subscription(cancellations);
        let executor = Arc::downgrade(&self.executor);
        let handle = move |event: ReceivedEvent<MainLoopRequest>| {
            let executor = executor.upgrade();
            async move {
                match executor {
                    Some(executor) => executor.handle(event).await,
                    None => Outcome::Release,
                }
            }
        };
        let config = &self.executor.config;
        let subscribe = SubscribeOptions {
            concurrency: config.concurrency,
            // Requests run long: a prefetched one would wait here while other workers are idle.
            read_ahead: Some(0),
            handler_timeout: config.run_timeout + REPLY_STORE_MARGIN,
            // Attempts are counted by `executor`, which ends each request with a reply.
            retry: RetryPolicy {
                max_attempts: Some(headwater_queue::limits::ATTEMPTS_MAX),
                max_crashes: headwater_queue::limits::ATTEMPTS_MAX,
                backoff: config.backoff,
            },
            ..SubscribeOptions::durable(GROUP)
        };
        let requests = self.bus.subscribe::<MainLoopRequest>(subscribe, handle).await?;
        self.add_subscription(requests);
        Ok(())
    }

    /// Removes expired replies of all requesters of the namespace. Runs automatically every `sweep_every`.
    pub async fn sweep(&self) -> Result<()> {
        self.executor.reply_store.sweep().await
    }

    /// Takes no new requests, waits up to the drain timeout for running ones, and releases the rest. Must not be
    /// awaited by a request of this worker.
    pub async fn stop(&self) -> Result<()> {
        self.begin_stop(self.executor.config.drain);
        for subscription in self.take_subscriptions() {
            self.bus.unsubscribe(subscription).await?;
        }
        self.executor.locks.release_all().await;
        info!(namespace = %self.executor.reply_store.storage.namespace, "main loop stopped");
        Ok(())
    }

    fn begin_stop(&self, drain: Duration) {
        let until = Instant::now() + drain;
        self.stop.send_if_modified(|stopping| {
            let is_sooner = stopping.is_none_or(|known| until < known);
            if is_sooner {
                *stopping = Some(until);
            }
            is_sooner
        });
    }

    fn add_subscription(&self, subscription: SubscriptionId) {
        let mut subscriptions =
            self.subscriptions.lock().expect("no code panics while it holds this lock");
        subscriptions.push(subscription);
    }

    /// The subscriptions, newest first: requests end before cancellations are unsubscribed.
    fn take_subscriptions(&self) -> Vec<SubscriptionId> {
        let mut subscriptions =
            self.subscriptions.lock().expect("no code panics while it holds this lock");
        subscriptions.drain(..).rev().collect()
    }
}

impl Drop for MainLoopWorker {
    fn drop(&mut self) {
        self.begin_stop(Duration::ZERO);
        let subscriptions = self.take_subscriptions();
        // It leaves its group in the background; until then it releases what is delivered.
        if let Ok(runtime) = tokio::runtime::Handle::try_current()
            && !subscriptions.is_empty()
        {
            let bus = Arc::clone(&self.bus);
            runtime.spawn(async move {
                for subscription in subscriptions {
                    if let Err(error) = bus.unsubscribe(subscription).await {
                        warn!(%error, "dropped main loop worker could not leave its group");
                    }
                }
            });
        }
    }
}

impl fmt::Debug for MainLoopWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MainLoopWorker")
            .field("session_backend", &self.executor.reply_store.storage)
            .finish_non_exhaustive()
    }
}

/// Periodic work of the worker.
async fn maintain(executor: Arc<RequestExecutor>) {
    let sweeping = async {
        let mut ticks = interval(executor.config.sweep_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Err(error) = executor.reply_store.sweep().await {
                warn!(%error, "reply streams could not be swept");
            }
        }
    };
    tokio::join!(executor.locks.run(), sweeping);
}
