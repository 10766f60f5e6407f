//! Where replies of an integration go, and what is presented there.
//!
//! Upstream: `settings` says so. Downstream: the deliverers. Promises: tokens and secrets are types that nobody prints.

use secrecy::SecretString;

/// The other side of an integration.
#[derive(Clone, Debug)]
pub enum Destination {
    /// Comments on issues of GitHub.
    Github {
        /// The API, such as `https://api.github.com`.
        base_url: String,
        /// Presented as a bearer token.
        token: SecretString,
        /// What the marks in comments are signed with.
        secret: SecretString,
    },
    /// Notes on issues of GitLab.
    Gitlab {
        /// The server, such as `https://gitlab.com`.
        base_url: String,
        /// Presented as `PRIVATE-TOKEN`.
        token: SecretString,
        /// What the marks in notes are signed with.
        secret: SecretString,
    },
    /// A program that takes signed requests (Standard Webhooks).
    Callback {
        /// Where it listens.
        url: String,
        /// What requests are signed with: base64 with or without `whsec_` before it, or any text.
        secret: SecretString,
    },
    /// Our own tickets.
    Tickets,
    /// Nobody takes replies of this integration; each is a dead letter that says what is missing.
    Nowhere {
        /// What is missing.
        problem: String,
    },
}
