//! Workers: processes that carry out the requests of a namespace.
//!
//! Upstream: the group `control` on the control stream, which all workers of a namespace share. Downstream: `carry`.
//! Promises: a request goes to one worker; if that one dies, to another; a worker that stops finishes what it can in its
//! drain time and gives back the rest, which counts as no try. Cancellations are heard on the control stream.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use headwater_queue::{Outcome, RetryPolicy};
use headwater_stream::LeaseName;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{info, warn};

use super::carry::{Carrier, KEEP_MAX};
use super::config::MainLoopConfig;
use super::replies::Replies;
use super::run::{MainLoop, Typed};
use super::running::Running;
use crate::background::AbortOnDrop;
use crate::builtin::{MainLoopCompleted, MainLoopFailed, MainLoopRequest, RequestFailure};
use crate::bus::{EventBus, EventBusExt, Subscribe};
use crate::error::Result;
use crate::event::Received;
use crate::name::SubscriptionId;
use crate::session::Sessions;

/// The label of the group that all workers of a namespace share: `wink:cg:<namespace>:control`.
const GROUP: &str = "control";

/// How much longer than a request may take the bus waits for its handler: the reply has to be kept, too.
const KEEPING: Duration = Duration::from_secs(2 * 60 * 60);

// The reply and its copy, one after the other. A handler that runs out of time loses what was worked out.
const _: () = assert!(2 * KEEP_MAX.as_secs() < KEEPING.as_secs());

/// Carries out requests until it is stopped. Dropping it gives back what it has in hand.
pub struct MainLoopWorker {
    carrier: Arc<Carrier>,
    bus: Arc<dyn EventBus>,
    stop: watch::Sender<Option<Instant>>,
    subscriptions: Mutex<Vec<SubscriptionId>>,
    _upkeep: AbortOnDrop<()>,
}

impl MainLoopWorker {
    /// Begins to carry out the requests of the bus's namespace, each in a session of its own. On a local bus, the requests
    /// of this process.
    ///
    /// A bus has one worker; a namespace has as many as you like, all of the same kind.
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
        let replies = Replies::new(Arc::clone(&bus), config.replies).await?;
        let (running, dropped) =
            Running::new(replies.journal.clone(), &replies.origin, config.lease)?;
        let (stop, stopping) = watch::channel(None);
        let main_loop = Arc::new(Typed(main_loop));
        let carrier = Arc::new(Carrier { sessions, replies, running, main_loop, config, stopping });
        let upkeep = AbortOnDrop(tokio::spawn(upkeep(Arc::clone(&carrier), dropped)));
        let worker = Self { carrier, bus, stop, subscriptions: Mutex::default(), _upkeep: upkeep };
        worker.subscribe().await?;
        info!(namespace = %worker.carrier.replies.journal.namespace, "main loop started");
        Ok(worker)
    }

    async fn subscribe(&self) -> Result<()> {
        // Cancellations first, so that none is missed for a request that is begun. Handlers hold the worker weakly: the bus
        // holds them, and the worker holds the bus.
        let carrier = Arc::downgrade(&self.carrier);
        let hear = move |event: Received<MainLoopFailed>| {
            if event.kind == RequestFailure::Cancelled
                && let Some(carrier) = carrier.upgrade()
            {
                carrier.running.cancel(&event.request_id);
            }
            std::future::ready(())
        };
        let heard = self.bus.subscribe::<MainLoopFailed>(Subscribe::live(), hear).await?;
        self.keep(heard);
        let carrier = Arc::downgrade(&self.carrier);
        let handle = move |event: Received<MainLoopRequest>| {
            let carrier = carrier.upgrade();
            async move {
                match carrier {
                    Some(carrier) => carrier.handle(event).await,
                    None => Outcome::Release,
                }
            }
        };
        let config = &self.carrier.config;
        let subscribe = Subscribe {
            concurrency: config.concurrency,
            // Requests take long: one that is read ahead would wait here while others have nothing to do.
            read_ahead: Some(0),
            handler_timeout: config.run_max + KEEPING,
            // Tries are counted by `carry`, which ends each request with a reply.
            retry: RetryPolicy {
                max_attempts: Some(headwater_queue::limits::ATTEMPTS_MAX),
                max_crashes: headwater_queue::limits::ATTEMPTS_MAX,
                backoff: config.backoff,
            },
            ..Subscribe::durable(GROUP)
        };
        let handled = self.bus.subscribe::<MainLoopRequest>(subscribe, handle).await?;
        self.keep(handled);
        Ok(())
    }

    /// Removes replies whose time is up, of all requesters of the namespace. Done every `sweep_every` by itself.
    pub async fn sweep(&self) -> Result<()> {
        self.carrier.replies.sweep().await
    }

    /// Takes no more requests, lets those that run end within the drain time, and gives back the rest. Must not be
    /// awaited by a request of its own.
    pub async fn stop(&self) -> Result<()> {
        self.begin_stop(self.carrier.config.drain);
        for subscription in self.taken() {
            self.bus.unsubscribe(subscription).await?;
        }
        self.carrier.running.release_all().await;
        info!(namespace = %self.carrier.replies.journal.namespace, "main loop stopped");
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

    fn keep(&self, subscription: SubscriptionId) {
        let mut subscriptions =
            self.subscriptions.lock().expect("no code panics while it holds this lock");
        subscriptions.push(subscription);
    }

    /// The subscriptions, newest first: requests end before cancellations are no longer heard.
    fn taken(&self) -> Vec<SubscriptionId> {
        let mut subscriptions =
            self.subscriptions.lock().expect("no code panics while it holds this lock");
        subscriptions.drain(..).rev().collect()
    }
}

impl Drop for MainLoopWorker {
    fn drop(&mut self) {
        self.begin_stop(Duration::ZERO);
        let subscriptions = self.taken();
        // It leaves its group as soon as it can; until then it gives back what it is given.
        if let Ok(runtime) = tokio::runtime::Handle::try_current()
            && !subscriptions.is_empty()
        {
            let bus = Arc::clone(&self.bus);
            runtime.spawn(async move {
                for subscription in subscriptions {
                    if let Err(error) = bus.unsubscribe(subscription).await {
                        warn!(%error, "a dropped main loop could not leave its group");
                    }
                }
            });
        }
    }
}

impl fmt::Debug for MainLoopWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MainLoopWorker")
            .field("journal", &self.carrier.replies.journal)
            .finish_non_exhaustive()
    }
}

/// What has to be done from time to time, until the worker is gone.
async fn upkeep(carrier: Arc<Carrier>, dropped: mpsc::UnboundedReceiver<LeaseName>) {
    let sweeping = async {
        let mut ticks = interval(carrier.config.sweep_every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Err(error) = carrier.replies.sweep().await {
                warn!(%error, "replies could not be swept");
            }
        }
    };
    tokio::join!(carrier.running.upkeep(dropped), sweeping);
}
