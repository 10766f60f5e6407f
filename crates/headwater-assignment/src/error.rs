//! What can go wrong when a stream is claimed or ended, split by what the caller does next.

use headwater_stream::{Epoch, HolderName, StreamError, StreamName};

/// Why a stream could not be claimed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// Somebody owns it, perhaps this very process. There is nothing to do.
    #[error("stream `{stream}` is already claimed{}", by_whom(.by.as_ref()))]
    AlreadyClaimed {
        /// The stream.
        stream: StreamName,
        /// Its owner, unless it gave the stream up in the same moment.
        by: Option<HolderName>,
    },

    /// No input entry that was handed out names it: it is done, was never added, or still waits to be handed out.
    #[error("stream `{stream}` is not among those that were handed out and not done")]
    Unknown {
        /// The stream.
        stream: StreamName,
    },

    /// It wore out too many owners and is in the dead letters now. A person must look at it.
    #[error("stream `{stream}` is quarantined after {owners} owners")]
    Quarantined {
        /// The stream.
        stream: StreamName,
        /// How many owners it had.
        owners: u64,
    },

    /// This process owns as many streams as it may. End one, or raise `streams_max`.
    #[error("this consumer owns {streams_max} streams and may not own more")]
    AtCapacity {
        /// The setting.
        streams_max: usize,
    },

    /// The assignment is shutting down or has ended.
    #[error("the assignment is shutting down")]
    Closed,

    /// The backend failed. If it is unavailable, the stream may be ours for the life of a lease; claim it again.
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
    /// It is no longer ours in this epoch; nothing was changed. Drop what was done for it.
    #[error("stream `{stream}` is no longer owned with epoch {epoch}: nothing was changed")]
    NotOwner {
        /// The stream.
        stream: StreamName,
        /// The epoch in which it was owned.
        epoch: Epoch,
    },

    /// Another call is ending it right now.
    #[error("stream `{stream}` is being ended by another call")]
    InProgress {
        /// The stream.
        stream: StreamName,
    },

    /// The backend failed. If it is unavailable, the stream may have ended; the same call may be repeated.
    #[error(transparent)]
    Backend(#[from] StreamError),
}
