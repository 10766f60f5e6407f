//! Folds: state computed from the events of a session, one event at a time.
//!
//! Upstream: `session` applies every event of a session to each fold, in stream order. Downstream: applications read
//! the state; `snapshot` saves it.
//! Guarantees: folds have a name and a version, so a snapshot is only used for the folds it was taken of. A fold that
//! panics fails its session and nothing else.
//! Not here: which entries of a stream count (see `session/state`).

mod retained_events;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use self::retained_events::RetainedEvents;

use crate::error::{BusError, Result};
use crate::event::{Envelope, Event, ReceivedEvent};
use crate::handler::DeliveredEvent;
use crate::limits::{FOLD_NAME_BYTES_MAX, FOLDS_MAX, RETAINED_BYTES_MAX};
use crate::registry::EventRegistry;

/// Name prefixes of the built-in folds.
const LATEST: &str = "latest:";
const ALL: &str = "all:";

/// State computed from events, one at a time.
///
/// `apply` must depend only on the state and the event: no clock, no randomness, no I/O. Then every process computes
/// the same state from the same events. Snapshots store the state as JSON.
///
/// ```
/// use headwater_bus::{Fold, PromptExecuted, SessionEvent};
/// use serde::{Deserialize, Serialize};
///
/// #[derive(Clone, Debug, Default, Serialize, Deserialize)]
/// struct TokensUsed(u64);
///
/// impl Fold for TokensUsed {
///     const NAME: &'static str = "desk.TokensUsed";
///     fn apply(&mut self, event: &SessionEvent) {
///         if let Some(executed) = event.get::<PromptExecuted>() {
///             self.0 += executed.usage["total_tokens"].as_u64().unwrap_or(0);
///         }
///     }
/// }
/// ```
pub trait Fold: Clone + Default + Serialize + DeserializeOwned + Send + Sync + 'static {
    /// Name of the fold in snapshots; unique within an application.
    const NAME: &'static str;

    /// Version of `apply` and of the state. Increment it on every change; snapshots of other versions are not used.
    const VERSION: u32 = 1;

    /// Applies one event. Called for every event of a registered type.
    fn apply(&mut self, event: &SessionEvent);
}

/// An event of a session, as passed to a fold.
#[derive(Clone)]
pub struct SessionEvent(pub(crate) DeliveredEvent);

impl SessionEvent {
    /// The event, if it is of this type.
    pub fn get<E: Event>(&self) -> Option<ReceivedEvent<E>> {
        let event = Arc::clone(&self.0.value).downcast::<E>().ok()?;
        Some(ReceivedEvent { event, envelope: Arc::clone(&self.0.envelope) })
    }

    /// Its envelope.
    pub fn envelope(&self) -> &Envelope {
        &self.0.envelope
    }
}

impl fmt::Debug for SessionEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SessionEvent").field(&self.0.envelope).finish()
    }
}

/// The folds of an application, chosen before a session is opened.
#[derive(Clone, Default)]
pub struct Folds {
    list: Vec<Box<dyn AnyFold>>,
    checks: Vec<fn(&EventRegistry) -> Result<()>>,
}

impl Folds {
    /// No folds: for publishing only, or for maintenance.
    pub fn none() -> Self {
        Self::default()
    }

    /// Keeps the newest event of type `E`.
    pub fn latest<E: Event>(mut self) -> Self {
        self.checks.push(|registry| registry.check::<E>());
        self.add(RetainedEvents::<E>::new(format!("{LATEST}{}", E::TYPE), 1))
    }

    /// Keeps the newest `max` events of type `E` and counts the dropped ones. All event-keeping folds share
    /// [`RETAINED_BYTES_MAX`](crate::limits::RETAINED_BYTES_MAX), so fewer than `max` may be kept.
    pub fn all<E: Event>(mut self, max: usize) -> Self {
        self.checks.push(|registry| registry.check::<E>());
        self.add(RetainedEvents::<E>::new(format!("{ALL}{}:{max}", E::TYPE), max))
    }

    /// Adds a custom fold.
    pub fn with<F: Fold>(self) -> Self {
        self.add(Custom(F::default()))
    }

    fn add(mut self, fold: impl AnyFold) -> Self {
        self.list.push(Box::new(fold));
        self
    }

    /// Checks names, limits and event types.
    pub(crate) fn check(&self, registry: &EventRegistry) -> Result<()> {
        if self.list.len() > FOLDS_MAX {
            let problem = format!("{} folds; the limit is {FOLDS_MAX}", self.list.len());
            return Err(BusError::invalid("folds", problem));
        }
        for (index, fold) in self.list.iter().enumerate() {
            let name = fold.name();
            if name.is_empty()
                || name.len() > FOLD_NAME_BYTES_MAX
                || name.chars().any(char::is_control)
            {
                let problem = format!(
                    "the name must have 1 to {FOLD_NAME_BYTES_MAX} bytes and no control characters"
                );
                return Err(BusError::invalid(format!("fold `{name}`"), problem));
            }
            if self.list[..index].iter().any(|other| other.name() == name) {
                return Err(BusError::invalid(format!("fold `{name}`"), "it is listed twice"));
            }
            fold.check()?;
        }
        self.checks.iter().try_for_each(|check| check(registry))
    }

    /// The same folds, each with an equal share of `RETAINED_BYTES_MAX`.
    pub(crate) fn limited(mut self) -> Self {
        let keep = self.iter().filter(|fold| fold.keeps_events()).count();
        if let Some(share) = RETAINED_BYTES_MAX.checked_div(keep) {
            self.iter_mut().for_each(|fold| fold.limit(share));
        }
        self
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Names and versions, sorted: the identity of a snapshot.
    pub(crate) fn names(&self) -> Vec<(String, u32)> {
        let mut names: Vec<(String, u32)> =
            self.list.iter().map(|fold| (fold.name().to_owned(), fold.version())).collect();
        names.sort();
        names
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &dyn AnyFold> {
        self.list.iter().map(|fold| &**fold)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn AnyFold>> {
        self.list.iter_mut()
    }

    /// The newest event of type `E`, if [`latest`](Self::latest) or [`all`](Self::all) keeps it.
    pub(crate) fn get_latest<E: Event>(&self) -> Option<ReceivedEvent<E>> {
        self.kept::<E>(LATEST).or_else(|| self.kept::<E>(ALL))?.events.back().cloned()
    }

    /// The events that [`all`](Self::all) keeps.
    pub(crate) fn get_all<E: Event>(&self) -> Option<AllEvents<E>> {
        let kept = self.kept::<E>(ALL)?;
        Some(AllEvents { events: kept.events.iter().cloned().collect(), dropped: kept.dropped })
    }

    pub(crate) fn get<F: Fold>(&self) -> Option<&F> {
        let found = self.iter().find_map(|fold| fold.as_any().downcast_ref::<Custom<F>>());
        found.map(|custom| &custom.0)
    }

    fn kept<E: Event>(&self, kind: &str) -> Option<&RetainedEvents<E>> {
        self.iter()
            .filter_map(|fold| fold.as_any().downcast_ref::<RetainedEvents<E>>())
            .find(|kept| kept.name.starts_with(kind))
    }
}

impl fmt::Debug for Folds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().map(|fold| (fold.name(), fold.version()))).finish()
    }
}

/// The events kept by [`Folds::all`].
#[derive(Clone, Debug)]
pub struct AllEvents<E> {
    /// The newest events, oldest first.
    pub events: Vec<ReceivedEvent<E>>,
    /// Number of older events that were dropped.
    pub dropped: u64,
}

/// A fold with its type erased.
pub(crate) trait AnyFold: Send + Sync + 'static {
    fn name(&self) -> &str;
    fn version(&self) -> u32;
    fn check(&self) -> Result<()>;
    /// Whether it keeps whole events.
    fn keeps_events(&self) -> bool {
        false
    }
    /// Sets the approximate number of snapshot bytes that its events may use.
    fn limit(&mut self, _bytes: usize) {}
    fn apply(&mut self, event: &SessionEvent);
    fn save(&self) -> serde_json::Result<Box<RawValue>>;
    /// Replaces the state with a saved one; `Err` tells why that is not possible.
    fn load(&mut self, saved: &RawValue, registry: &EventRegistry) -> Result<(), String>;
    fn as_any(&self) -> &dyn Any;
    fn boxed(&self) -> Box<dyn AnyFold>;
}

impl Clone for Box<dyn AnyFold> {
    fn clone(&self) -> Self {
        self.boxed()
    }
}

/// A fold of the application.
#[derive(Clone)]
struct Custom<F>(F);

impl<F: Fold> AnyFold for Custom<F> {
    fn name(&self) -> &str {
        F::NAME
    }

    fn version(&self) -> u32 {
        F::VERSION
    }

    fn check(&self) -> Result<()> {
        if F::NAME.starts_with(LATEST) || F::NAME.starts_with(ALL) {
            let problem = "names starting with `latest:` or `all:` are reserved";
            return Err(BusError::invalid(format!("fold `{}`", F::NAME), problem));
        }
        Ok(())
    }

    fn apply(&mut self, event: &SessionEvent) {
        self.0.apply(event);
    }

    fn save(&self) -> serde_json::Result<Box<RawValue>> {
        serde_json::value::to_raw_value(&self.0)
    }

    fn load(&mut self, saved: &RawValue, _: &EventRegistry) -> Result<(), String> {
        self.0 = serde_json::from_str(saved.get()).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn boxed(&self) -> Box<dyn AnyFold> {
        Box::new(self.clone())
    }
}
