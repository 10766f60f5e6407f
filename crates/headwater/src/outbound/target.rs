//! Destinations of replies and their credentials.
//!
//! Upstream: `config`. Downstream: the deliverers. Guarantees: tokens and secrets are never printed.

use std::sync::Arc;

use secrecy::SecretString;

use crate::desk::Provider;
use crate::outbound::github_app::GithubApp;

/// The destination of the replies of an integration.
#[derive(Clone, Debug)]
pub enum Destination {
    /// Comments on issues of GitHub.
    Github {
        /// Base URL of the API, such as `https://api.github.com`.
        base_url: String,
        /// Presented as a bearer token.
        token: SecretString,
        /// Signs the markers in comments.
        secret: SecretString,
    },
    /// Comments on issues of GitHub, by a GitHub App.
    GithubApp {
        /// Base URL of the API, such as `https://api.github.com`.
        base_url: String,
        /// Gets the tokens.
        app: Arc<GithubApp>,
        /// Signs the markers in comments.
        secret: SecretString,
    },
    /// Notes on issues of GitLab.
    Gitlab {
        /// Base URL of the server, such as `https://gitlab.com`.
        base_url: String,
        /// Presented as `PRIVATE-TOKEN`.
        token: SecretString,
        /// Signs the markers in notes.
        secret: SecretString,
    },
    /// A program that receives signed requests (Standard Webhooks).
    Callback {
        /// The URL of the program.
        url: String,
        /// Signs requests: base64 with or without the prefix `whsec_`, or any text.
        secret: SecretString,
    },
    /// A provider of an embedding program.
    Provider {
        /// Delivers the replies.
        provider: Arc<dyn Provider>,
        /// `base_url` of the integration.
        base_url: Option<String>,
        /// The token for replies.
        token: Option<SecretString>,
        /// The secret of the integration.
        secret: SecretString,
    },
    /// Tickets of the desk.
    Tickets,
    /// Replies cannot be delivered; each becomes a dead letter with this problem.
    Unconfigured {
        /// What is missing.
        problem: String,
    },
}
