//! How an ownership ends: as its owner wishes, or because it is lost.
//!
//! Promises: the input entry is settled first and the lease released second, so nobody can have the stream in between;
//! an end is told once, by whoever removes the slot.

use headwater_stream::{LeaseName, Settlement, StreamError, Then};
use tracing::{debug, warn};

use crate::error::EndError;
use crate::member::Member;
use crate::notification::Disowned;
use crate::owned::{Ending, Owned, Phase, Wish};

impl Member {
    /// Ends an ownership as its owner wishes. May be repeated after a lost reply.
    pub(crate) async fn end(&self, owned: &Owned, wish: Wish) -> Result<(), EndError> {
        let not_owner =
            || EndError::NotOwner { stream: owned.stream().clone(), epoch: owned.epoch() };
        let ending = match owned.begin_end(wish) {
            Ok(ending) => ending,
            // A repetition of a call whose reply was lost.
            Err(Phase::Ended(before)) if before == wish => return Ok(()),
            Err(Phase::Ending) => {
                return Err(EndError::Underway { stream: owned.stream().clone() });
            }
            Err(_) if wish == Wish::Done && owned.done_may_have_happened() => {
                return self.repeat_done(owned).await;
            }
            Err(_) => return Err(not_owner()),
        };
        if !self.slots.owns(owned.stream(), owned.epoch()) {
            ending.failed();
            if wish == Wish::Done && owned.done_may_have_happened() {
                return self.repeat_done(owned).await;
            }
            return Err(not_owner());
        }
        let then = match wish {
            Wish::Done => Then::Delete,
            Wish::GiveBack => Then::Release,
        };
        let settlement = Settlement { id: owned.entry(), then };
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
                    ending.failed();
                }
                return Err(error.into());
            }
        }
        self.finish(owned, ending, wish);
        self.unlock(std::slice::from_ref(&owned.guard().fence().lease)).await;
        Ok(())
    }

    /// Repeats a `done` whose reply was lost and whose stream was taken from us since. The backend knows whether the first
    /// call took effect: it refuses the repetition if it did not and the lease is gone, and if there was another owner.
    async fn repeat_done(&self, owned: &Owned) -> Result<(), EndError> {
        let settlement = Settlement { id: owned.entry(), then: Then::Delete };
        match self.settle(Some(owned.guard().fence()), &[settlement]).await {
            Ok(_) => {
                owned.set_phase(Phase::Ended(Wish::Done));
                debug!(stream = %owned.stream(), epoch = %owned.epoch(), "stream was done before it was disowned");
                Ok(())
            }
            Err(StreamError::Fenced { .. }) => {
                let (stream, epoch) = (owned.stream().clone(), owned.epoch());
                Err(EndError::NotOwner { stream, epoch })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The heartbeat found that an uncertain end did happen.
    pub(crate) fn confirm_end(&self, owned: &Owned, wish: Wish) {
        if let Ok(ending) = owned.begin_end(wish) {
            self.finish(owned, ending, wish);
            self.forsake(owned.stream().clone(), owned.guard().fence().lease.clone());
        }
    }

    fn finish(&self, owned: &Owned, ending: Ending, wish: Wish) {
        if wish == Wish::GiveBack {
            self.given_back().insert(owned.stream().clone(), tokio::time::Instant::now());
        }
        self.slots.remove(owned.stream(), owned.epoch());
        self.count_owned();
        ending.ended();
        debug!(stream = %owned.stream(), epoch = %owned.epoch(), ?wish, "stream ended");
    }

    /// The stream was taken from us. Told once, whoever finds out first.
    pub(crate) fn disown(&self, owned: &Owned, reason: Disowned) {
        if self.slots.remove(owned.stream(), owned.epoch()).is_none() {
            return;
        }
        owned.set_phase(Phase::Disowned);
        self.count_owned();
        if matches!(reason, Disowned::LeaseLost | Disowned::LeaseUnconfirmed) {
            self.metrics.locks_lost(1);
            warn!(stream = %owned.stream(), epoch = %owned.epoch(), ?reason, "stream disowned");
        }
        self.broker.disowned(owned.stream(), reason);
        // Harmless where the lease is gone already, and it lets others have the stream at once where it is not.
        self.forsake(owned.stream().clone(), owned.guard().fence().lease.clone());
    }

    /// Gives streams back so that others get them, all in two round trips. Returns how many.
    ///
    /// They are ours no longer even if that fails: what is left of them then is what a dead owner leaves.
    pub(crate) async fn give_back(
        &self,
        streams: Vec<(Owned, Ending)>,
        reason: Disowned,
    ) -> headwater_stream::Result<usize> {
        let ids: Vec<_> = streams.iter().map(|(owned, _)| owned.entry()).collect();
        let settled = self.give_back_entries(&ids).await;
        let mut leases: Vec<LeaseName> = Vec::with_capacity(streams.len());
        for (owned, ending) in streams {
            self.finish(&owned, ending, Wish::GiveBack);
            self.broker.disowned(owned.stream(), reason);
            leases.push(owned.guard().fence().lease.clone());
        }
        self.unlock(&leases).await;
        settled.map(|()| leases.len())
    }
}
