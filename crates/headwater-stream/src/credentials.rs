//! Credentials that change: tokens of a cloud provider, or a password that is rotated.
//!
//! Upstream: your program, through [`Options::credentials`](crate::Options). Downstream: the Redis backend asks for credentials
//! whenever it opens a connection. Guarantees: a connection is replaced by one with new credentials after three quarters of
//! their lifetime, without failing a call; if that fails, the old connection is used until the server closes it.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::BoxError;

/// Provides the credentials of new connections, such as tokens of AWS IAM or Microsoft Entra.
#[async_trait]
pub trait CredentialProvider: fmt::Debug + Send + Sync {
    /// The current credentials. Called for every new connection, also concurrently: cache what is expensive to get. An error
    /// is treated like an unreachable server: it is retried until the deadline of the call.
    async fn credentials(&self) -> Result<Credentials, BoxError>;
}

/// User, password and lifetime. `Debug` hides the password.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The user; `None` for the one in the URL, or the default user.
    pub user: Option<String>,
    /// The password or token.
    pub password: String,
    /// How long the server accepts them, counted from now; `None` if they do not expire.
    pub expires_in: Option<Duration>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user)
            .field("expires_in", &self.expires_in)
            .finish_non_exhaustive()
    }
}
