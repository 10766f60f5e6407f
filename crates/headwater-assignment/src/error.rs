//! Errors of claiming and ending streams, split by what the caller does next.

use headwater_stream::{Epoch, HolderName, LeaseName, StreamError, StreamName};

/// Why a stream could not be claimed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// Another consumer or this process owns it. Nothing to do.
    #[error("stream `{stream}` is already claimed{}", by_whom(.by.as_ref()))]
    AlreadyClaimed {
        /// The stream.
        stream: StreamName,
        /// Its owner, unless it released the stream at the same moment.
        by: Option<HolderName>,
    },

    /// No pending input entry names it: it is done, was never added, or was not delivered yet.
    #[error(
        "stream `{stream}` has no pending input entry: it is done, was never added, or is not assigned yet"
    )]
    Unknown {
        /// The stream.
        stream: StreamName,
    },

    /// More than `owners_max` owners died with it; it is in the dead letters. An operator must look at it.
    #[error("stream `{stream}` is quarantined: {owners} owners died with it; see the dead letters")]
    Quarantined {
        /// The stream.
        stream: StreamName,
        /// How many owners it had.
        owners: u64,
    },

    /// This process owns `streams_max` streams. End one, or raise `streams_max`.
    #[error(
        "this consumer already owns `streams_max` = {streams_max} streams; end one or raise the limit"
    )]
    AtCapacity {
        /// The setting.
        streams_max: usize,
    },

    /// The assignment is shutting down or has terminated.
    #[error("the assignment is shutting down")]
    Closed,

    /// The backend failed. If it is unavailable, the claim may have succeeded until the lease expires; claim
    /// again.
    #[error(transparent)]
    Backend(#[from] StreamError),
}

fn by_whom(holder: Option<&HolderName>) -> String {
    holder.map_or_else(String::new, |holder| format!(" by `{holder}`"))
}

/// Why a stream could not be ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndError {
    /// This process no longer owns it in this epoch; nothing was changed. Discard the work.
    #[error("stream `{stream}` is no longer owned with epoch {epoch}: nothing was changed")]
    NotOwner {
        /// The stream.
        stream: StreamName,
        /// The epoch in which it was owned.
        epoch: Epoch,
    },

    /// Another call is ending it.
    #[error("another call is ending stream `{stream}`; wait for it")]
    InProgress {
        /// The stream.
        stream: StreamName,
    },

    /// The backend failed. If it is unavailable, the stream may have ended; retry the call.
    #[error(transparent)]
    Backend(#[from] StreamError),
}

/// Why an operator could not release a stream. Nothing was changed, except as [`ReleaseError::Backend`] says.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReleaseError {
    /// No input entry names the stream: it is done or was never added.
    #[error(
        "stream `{stream}` is not in the input of service `{service}`: it is done or was never added"
    )]
    NotFound {
        /// The stream.
        stream: StreamName,
        /// The service.
        service: String,
    },

    /// No consumer has read its entry yet, so there is no owner to take it from.
    #[error("stream `{stream}` has no owner: it waits for a consumer with free capacity")]
    NotOwned {
        /// The stream.
        stream: StreamName,
    },

    /// Another program holds the lease without an epoch. It could not be fenced, so it would keep working on the stream.
    #[error(
        "stream `{stream}` is held by `{holder}`, another program without an epoch, which cannot be fenced: stop \
         that program, or delete the key `{lease}`"
    )]
    ForeignOwner {
        /// The stream.
        stream: StreamName,
        /// The holder of the lease.
        holder: HolderName,
        /// The lease.
        lease: LeaseName,
    },

    /// The lease key holds a value of another type.
    #[error("the key `{lease}` of stream `{stream}` holds a value of another type: delete the key")]
    Blocked {
        /// The stream.
        stream: StreamName,
        /// The lease.
        lease: LeaseName,
    },

    /// The backend failed. If it is unavailable, the stream may have been released; retry the call.
    #[error(transparent)]
    Backend(#[from] StreamError),
}
