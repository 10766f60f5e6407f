//! What the server tells the console beside requests and responses: who calls, and whether a failed change has begun.

use axum::http::Extensions;

/// The role of a caller. A role includes the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConsoleRole {
    /// May read.
    Read,
    /// May also change tickets and issues, replay and produce.
    Write,
    /// May also delete, purge and reset.
    Admin,
}

impl ConsoleRole {
    /// The name of the role in the settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Admin => "admin",
        }
    }
}

/// An extension of a response of the API with an error status: the change has not begun. Without it, a change whose response has a
/// status of 500 or above may have been made.
#[derive(Clone, Copy, Debug)]
pub struct NotBegun;

/// The caller of a request, an extension that the authentication of the server adds.
#[derive(Clone, Debug)]
pub struct ConsoleUser {
    /// Name of the token, or `local`.
    pub name: String,
    /// Its role.
    pub role: ConsoleRole,
    /// What the caller can see, beside the role: answers of the API are shared by callers for whom both are equal.
    pub view: String,
    /// Whether the caller logged in with a cookie and can log out.
    pub has_session: bool,
    /// Added to every call of the API: what its middleware needs to know about the caller.
    pub forwarded: Extensions,
}
