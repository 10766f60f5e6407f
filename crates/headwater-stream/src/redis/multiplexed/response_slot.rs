//! A slot for the result of one request: the connection task completes it, the caller awaits it.
//!
//! Unlike a oneshot channel, completing the slot returns the waker instead of waking the caller: the task wakes callers
//! after all replies that arrived together are in their slots.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use super::{RequestError, RequestResult, closed};

/// The caller's end.
pub(in crate::redis) struct ResponseFuture(Arc<ResponseSlot>);

/// The task's end. Dropping it completes the slot with [`RequestError::ReplyLost`].
pub(super) struct ResponseSender(Option<Arc<ResponseSlot>>);

#[derive(Default)]
struct ResponseSlot(Mutex<SlotState>);

#[derive(Default)]
struct SlotState {
    result: Option<RequestResult>,
    caller: Option<Waker>,
}

/// Creates a slot and returns both ends.
pub(super) fn response_slot() -> (ResponseSender, ResponseFuture) {
    let slot = Arc::<ResponseSlot>::default();
    (ResponseSender(Some(Arc::clone(&slot))), ResponseFuture(slot))
}

impl ResponseSender {
    /// Stores the result. Returns the waker of the caller if it already waits.
    #[must_use = "the caller sleeps until it is woken"]
    pub(super) fn complete(mut self, result: RequestResult) -> Option<Waker> {
        self.0.take().and_then(|slot| slot.set(result))
    }
}

impl Drop for ResponseSender {
    fn drop(&mut self) {
        let lost = || Err(RequestError::ReplyLost(Arc::new(closed())));
        if let Some(caller) = self.0.take().and_then(|slot| slot.set(lost())) {
            caller.wake();
        }
    }
}

impl ResponseSlot {
    fn set(&self, result: RequestResult) -> Option<Waker> {
        let mut state = self.lock();
        state.result = Some(result);
        state.caller.take()
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.0.lock().expect("no code panics while it holds this lock")
    }
}

impl Future for ResponseFuture {
    type Output = RequestResult;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RequestResult> {
        let mut state = self.0.lock();
        if let Some(result) = state.result.take() {
            return Poll::Ready(result);
        }
        match &mut state.caller {
            Some(caller) => caller.clone_from(cx.waker()),
            caller => *caller = Some(cx.waker().clone()),
        }
        Poll::Pending
    }
}
