//! Folds: what is known after a number of events, made of them one by one.
//!
//! Upstream: `session` gives each fold every event of a session, in the order of its stream. Downstream: applications
//! read the result; `snapshot` keeps it.
//! Promises: folds are named and versioned, so that what was kept under one set of folds is never taken for another's.
//! A fold that panics is an error of its session and hurts nobody else.
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

/// How the names of the built-in folds begin.
const LATEST: &str = "latest:";
const ALL: &str = "all:";

/// A state that is made of events, one after the other.
///
/// `apply` must depend on nothing but the state and the event: no clock, no randomness, no I/O. Then every process that
/// folds the same events has the same state. It is kept in snapshots as JSON.
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
    /// What the fold is known by in snapshots: unique among the folds of an application.
    const NAME: &'static str;

    /// Counts the changes of `apply` and of the state. After a change, snapshots of other versions are not used.
    const VERSION: u32 = 1;

    /// Takes one more event into account. It is called for every event whose type the bus allows.
    fn apply(&mut self, event: &SessionEvent);
}

/// An event of a session as a fold sees it.
#[derive(Clone)]
pub struct SessionEvent(pub(crate) DeliveredEvent);

impl SessionEvent {
    /// The event, if it is of this type.
    pub fn get<E: Event>(&self) -> Option<ReceivedEvent<E>> {
        let event = Arc::clone(&self.0.value).downcast::<E>().ok()?;
        Some(ReceivedEvent { event, envelope: Arc::clone(&self.0.envelope) })
    }

    /// What surrounds it.
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
    /// None: for whoever only publishes, or looks after sessions.
    pub fn none() -> Self {
        Self::default()
    }

    /// Keeps the newest event of type `E`.
    pub fn latest<E: Event>(mut self) -> Self {
        self.checks.push(|registry| registry.check::<E>());
        self.add(RetainedEvents::<E>::new(format!("{LATEST}{}", E::TYPE), 1))
    }

    /// Keeps the newest `max` events of type `E`, and counts those that had to go. All folds that keep events share
    /// [`RETAINED_BYTES_MAX`](crate::limits::FOLDED_BYTES_MAX), so that snapshots can hold them: fewer than `max` may stay.
    pub fn all<E: Event>(mut self, max: usize) -> Self {
        self.checks.push(|registry| registry.check::<E>());
        self.add(RetainedEvents::<E>::new(format!("{ALL}{}:{max}", E::TYPE), max))
    }

    /// Keeps a state of the application's own.
    pub fn with<F: Fold>(self) -> Self {
        self.add(Custom(F::default()))
    }

    fn add(mut self, fold: impl AnyFold) -> Self {
        self.list.push(Box::new(fold));
        self
    }

    /// Checks names and limits, and that the types are allowed.
    pub(crate) fn check(&self, registry: &EventRegistry) -> Result<()> {
        if self.list.len() > FOLDS_MAX {
            let problem = format!("{}; at most {FOLDS_MAX}", self.list.len());
            return Err(BusError::invalid("folds", problem));
        }
        for (index, fold) in self.list.iter().enumerate() {
            let name = fold.name();
            if name.is_empty()
                || name.len() > FOLD_NAME_BYTES_MAX
                || name.chars().any(char::is_control)
            {
                let problem = format!("1 to {FOLD_NAME_BYTES_MAX} bytes, no control characters");
                return Err(BusError::invalid(format!("the fold `{name}`"), problem));
            }
            if self.list[..index].iter().any(|other| other.name() == name) {
                return Err(BusError::invalid(format!("the fold `{name}`"), "it is there twice"));
            }
            fold.check()?;
        }
        self.checks.iter().try_for_each(|check| check(registry))
    }

    /// The same folds, each with its share of what all may keep.
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

    /// Names and versions, sorted: what a snapshot says it is of.
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

    /// The newest event of type `E`, if [`latest`](Self::latest) or [`all`](Self::all) keep it.
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

/// The events that [`Folds::all`] keeps.
#[derive(Clone, Debug)]
pub struct AllEvents<E> {
    /// The newest ones, oldest first.
    pub events: Vec<ReceivedEvent<E>>,
    /// How many older ones had to go.
    pub dropped: u64,
}

/// A fold that forgot its type.
pub(crate) trait AnyFold: Send + Sync + 'static {
    fn name(&self) -> &str;
    fn version(&self) -> u32;
    fn check(&self) -> Result<()>;
    /// Whether it keeps events as they are.
    fn keeps_events(&self) -> bool {
        false
    }
    /// About how many bytes the events that it keeps may have in a snapshot.
    fn limit(&mut self, _bytes: usize) {}
    fn apply(&mut self, event: &SessionEvent);
    fn save(&self) -> serde_json::Result<Box<RawValue>>;
    /// Replaces the state by one that was saved; an error says why it does not fit.
    fn load(&mut self, saved: &RawValue, registry: &EventRegistry) -> Result<(), String>;
    fn as_any(&self) -> &dyn Any;
    fn boxed(&self) -> Box<dyn AnyFold>;
}

impl Clone for Box<dyn AnyFold> {
    fn clone(&self) -> Self {
        self.boxed()
    }
}

/// A fold of the application's.
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
            let problem = "names that begin with `latest:` or `all:` are taken";
            return Err(BusError::invalid(format!("the fold `{}`", F::NAME), problem));
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
