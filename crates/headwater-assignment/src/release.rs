//! Ending an ownership: by its owner, or because the lease was lost.
//!
//! Guarantees: the input entry is settled before the lease is released, so no other consumer can acquire the
//! stream in between. The task that removes the slot sends the notification, so it is sent once.

use headwater_stream::{LeaseName, SettleAction, Settlement, StreamError};
use tracing::{debug, warn};

use crate::error::EndError;
use crate::member::AssignmentMember;
use crate::metrics::LOCKS_LOST;
use crate::notification::{Disowned, Notification};
use crate::owned::{EndAttempt, EndReason, Owned, OwnershipPhase};

impl AssignmentMember {
    /// Ends an ownership for its owner. May be retried after a lost reply.
    pub(crate) async fn end(&self, owned: &Owned, reason: EndReason) -> Result<(), EndError> {
        let not_owner =
            || EndError::NotOwner { stream: owned.stream().clone(), epoch: owned.epoch() };
        let attempt = match owned.begin_end(reason) {
            Ok(attempt) => attempt,
            // A retry of a call whose reply was lost.
            Err(OwnershipPhase::Ended(before)) if before == reason => return Ok(()),
            Err(OwnershipPhase::Ending) => {
                return Err(EndError::InProgress { stream: owned.stream().clone() });
            }
            Err(_) if reason == EndReason::Done && owned.done_may_have_applied() => {
                return self.retry_done(owned).await;
            }
            Err(_) => return Err(not_owner()),
        };
        if !self.owned_set.owns(owned.stream(), owned.epoch()) {
            attempt.failed();
            if reason == EndReason::Done && owned.done_may_have_applied() {
                return self.retry_done(owned).await;
            }
            return Err(not_owner());
        }
        let then = match reason {
            EndReason::Done => SettleAction::Delete,
            EndReason::Release => SettleAction::Release,
        };
        let settlement = Settlement { id: owned.entry(), action: then };
        match self.settle(Some(owned.guard().fence()), &[settlement]).await {
            Ok(_) => {}
            Err(StreamError::Fenced { .. }) => {
                self.disown(owned, Disowned::LeaseLost);
                return Err(not_owner());
            }
            Err(error) => {
                let no_effect = matches!(
                    error,
                    StreamError::Invalid { .. }
                        | StreamError::WrongType { .. }
                        | StreamError::NoGroup { .. }
                );
                if no_effect {
                    attempt.failed();
                }
                return Err(error.into());
            }
        }
        self.finish(owned, attempt, reason);
        self.release_leases(std::slice::from_ref(&owned.guard().fence().lease)).await;
        Ok(())
    }

    /// Retries a `done` whose reply was lost and whose stream was disowned since. The backend rejects the retry
    /// if the first call had no effect and the lease has expired, or if there was another owner.
    async fn retry_done(&self, owned: &Owned) -> Result<(), EndError> {
        let settlement = Settlement { id: owned.entry(), action: SettleAction::Delete };
        match self.settle(Some(owned.guard().fence()), &[settlement]).await {
            Ok(_) => {
                owned.set_phase(OwnershipPhase::Ended(EndReason::Done));
                debug!(stream = %owned.stream(), epoch = %owned.epoch(), "stream was completed before it was disowned");
                Ok(())
            }
            Err(StreamError::Fenced { .. }) => {
                let (stream, epoch) = (owned.stream().clone(), owned.epoch());
                Err(EndError::NotOwner { stream, epoch })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Completes an uncertain end that the heartbeat found to have taken effect.
    pub(crate) fn confirm_end(&self, owned: &Owned, reason: EndReason) {
        if let Ok(attempt) = owned.begin_end(reason) {
            self.finish(owned, attempt, reason);
            self.renewer.release_later(&owned.guard().fence().lease);
        }
    }

    fn finish(&self, owned: &Owned, attempt: EndAttempt, reason: EndReason) {
        if reason == EndReason::Release {
            self.recently_released().insert(owned.stream().clone(), tokio::time::Instant::now());
        }
        self.owned_set.remove(owned.stream(), owned.epoch());
        self.count_owned();
        attempt.ended();
        debug!(stream = %owned.stream(), epoch = %owned.epoch(), ?reason, "stream ended");
    }

    /// Disowns a lost stream. Notifies once, however many tasks detect the loss.
    pub(crate) fn disown(&self, owned: &Owned, reason: Disowned) {
        if self.owned_set.remove(owned.stream(), owned.epoch()).is_none() {
            return;
        }
        owned.set_phase(OwnershipPhase::Disowned);
        self.count_owned();
        if matches!(reason, Disowned::LeaseLost | Disowned::LeaseUnconfirmed) {
            self.metrics.count(LOCKS_LOST, 1);
            warn!(stream = %owned.stream(), epoch = %owned.epoch(), ?reason, "stream disowned");
        }
        let stream = owned.stream().clone();
        self.notification_queue.send(Notification::Disowned { stream, reason });
        // If this process still holds the lease, releasing it lets another consumer acquire the stream at once.
        self.renewer.release_later(&owned.guard().fence().lease);
    }

    /// Releases streams to other consumers in two round trips. Returns how many.
    ///
    /// Ownership ends even on failure: the streams are then left as by a dead owner.
    pub(crate) async fn release_streams(
        &self,
        streams: Vec<(Owned, EndAttempt)>,
        reason: Disowned,
    ) -> headwater_stream::Result<usize> {
        let ids: Vec<_> = streams.iter().map(|(owned, _)| owned.entry()).collect();
        let settled = self.release_entries(&ids).await;
        let mut leases: Vec<LeaseName> = Vec::with_capacity(streams.len());
        for (owned, attempt) in streams {
            self.finish(&owned, attempt, EndReason::Release);
            let stream = owned.stream().clone();
            self.notification_queue.send(Notification::Disowned { stream, reason });
            leases.push(owned.guard().fence().lease.clone());
        }
        self.release_leases(&leases).await;
        settled.map(|()| leases.len())
    }
}
