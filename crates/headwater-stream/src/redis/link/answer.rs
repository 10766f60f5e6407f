//! A place for one outcome: the link's task puts it there, the caller takes it.
//!
//! It differs from a oneshot channel in that whoever puts the outcome there decides when the caller is woken: when all
//! replies that came together are in their places.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use super::{Broken, Outcome, closed};

/// The caller's end.
pub(in crate::redis) struct Answer(Arc<Place>);

/// The task's end. If it is dropped, the outcome is lost.
pub(super) struct Promise(Option<Arc<Place>>);

#[derive(Default)]
struct Place(Mutex<Content>);

#[derive(Default)]
struct Content {
    outcome: Option<Outcome>,
    caller: Option<Waker>,
}

/// Both ends of a new place.
pub(super) fn answer() -> (Promise, Answer) {
    let place = Arc::<Place>::default();
    (Promise(Some(Arc::clone(&place))), Answer(place))
}

impl Promise {
    /// Puts the outcome there. Returns whom to wake, if somebody waits already.
    #[must_use = "the caller sleeps until it is woken"]
    pub(super) fn keep(mut self, outcome: Outcome) -> Option<Waker> {
        self.0.take().and_then(|place| place.put(outcome))
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let lost = || Err(Broken::Lost(Arc::new(closed())));
        if let Some(caller) = self.0.take().and_then(|place| place.put(lost())) {
            caller.wake();
        }
    }
}

impl Place {
    fn put(&self, outcome: Outcome) -> Option<Waker> {
        let mut content = self.lock();
        content.outcome = Some(outcome);
        content.caller.take()
    }

    fn lock(&self) -> MutexGuard<'_, Content> {
        self.0.lock().expect("no code panics while it holds this lock")
    }
}

impl Future for Answer {
    type Output = Outcome;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let mut content = self.0.lock();
        if let Some(outcome) = content.outcome.take() {
            return Poll::Ready(outcome);
        }
        match &mut content.caller {
            Some(caller) => caller.clone_from(cx.waker()),
            caller => *caller = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}
