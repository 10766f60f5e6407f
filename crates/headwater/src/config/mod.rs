//! Settings: raw values from flags, environment and file become one validated [`Settings`] at startup.
//!
//! Upstream: `entry.rs`. Downstream: `server/run.rs` and `cli`. Guarantees: [`Settings`] is consistent, so later code
//! does not check again; secrets have types whose `Debug` hides them.
//! Flow: `table.rs` (all settings), `value_type.rs` (allowed values) -> `sources.rs` (precedence) ->
//! `integrations.rs` (`[[integration]]`), `notifications.rs`, `tokens.rs`, `endpoints.rs` (`[[model.endpoint]]`), `tools.rs` (`[[tool]]`) -> this file -> `docs.rs` (output), `redact.rs` (hides
//! secrets).

mod docs;
mod endpoints;
mod error;
mod integrations;
mod notifications;
mod redact;
mod redactions;
mod sources;
mod table;
mod tokens;
mod tools;
mod value_type;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use headwater_bus::{BreakerConfig, Namespace, StreamedBusConfig};
use headwater_stream::Retention;
use secrecy::{ExposeSecret, SecretString};

use crate::desk::draft_links::DraftLinks;
use crate::desk::redaction::RedactionRules;
use crate::desk::tool::Tool;
use crate::desk::{DeskConfig, Prices, SearchScope, TokenBudget};
use crate::server::stream_options::PasswordSource;

pub(crate) use crate::config::docs::{as_json, as_markdown, as_text};
pub(crate) use crate::config::endpoints::{DEFAULT_ENDPOINT, ModelEndpointSettings};
pub(crate) use crate::config::error::SettingsError;
pub(crate) use crate::config::integrations::{
    GithubAppSettings, IntegrationSettings, ProviderKind, SecretsPolicy,
};
use crate::config::integrations::{ListSections, Lists};
pub(crate) use crate::config::notifications::{NotificationFormat, NotificationSettings};
pub(crate) use crate::config::redact::url as shown_url;
pub(crate) use crate::config::redactions::RedactionSettings;
pub(crate) use crate::config::sources::{FILE_VARIABLE, RawSettings, SettingSource, SettingValues};
pub(crate) use crate::config::table::{Setting, TABLE};
pub(crate) use crate::config::tokens::{Role, TokenSettings};
pub(crate) use crate::config::value_type::{ValueType, time};

/// Default settings file; it may be missing.
pub(crate) const FILE: &str = "headwater.toml";

/// Minimum length of `desk.link_secret`; a shorter one can be guessed.
const LINK_SECRET_CHARS_MIN: usize = 16;

/// All settings, validated.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// URL of the stream backend; may contain a password.
    pub(crate) stream_url: SecretString,
    /// Whether `notify-keyspace-events` of Redis may be changed.
    pub(crate) stream_configure_notifications: bool,
    /// Where the password of the stream backend comes from; `None` for its URL.
    pub(crate) stream_password: Option<PasswordSource>,
    /// How long the server accepts that password.
    pub(crate) stream_password_lifetime: Duration,
    /// URL of the database; may contain a password.
    pub(crate) database_url: SecretString,
    /// Whether `database.url` was set explicitly.
    pub(crate) database_is_given: bool,
    /// Maximum number of database connections for work.
    pub(crate) database_connections: u32,
    /// Maximum number of database connections for HTTP requests.
    pub(crate) database_http_connections: u32,
    /// Analytics.
    pub(crate) analytics: AnalyticsSettings,
    /// How long to retry an unreachable database at startup.
    pub(crate) start_wait: Duration,
    /// HTTP server.
    pub(crate) http: HttpSettings,
    /// Work on issues.
    pub(crate) work: WorkSettings,
    /// The language model of the settings `model.…`.
    pub(crate) model: ModelSettings,
    /// All model endpoints, in the order in which they are tried.
    pub(crate) models: Vec<ModelEndpointSettings>,
    /// The desk.
    pub(crate) desk: DeskConfig,
    /// Links to drafts and to the console.
    pub(crate) links: LinkSettings,
    /// When a draft is overdue; `None`: never.
    pub(crate) draft_max_wait: Option<Duration>,
    /// Whether an overdue draft hands its issue over.
    pub(crate) draft_overdue_hands_over: bool,
    /// When pending entries of inactive consumers are reclaimed.
    pub(crate) desk_reclaim_idle: Duration,
    /// Maximum age of a signed webhook.
    pub(crate) webhook_tolerance: Duration,
    /// Maximum number of audit log entries.
    pub(crate) audit_rows_max: u64,
    /// How long data is kept.
    pub(crate) retention: RetentionSettings,
    /// The event bus.
    pub(crate) bus: BusSettings,
    /// Logs and traces.
    pub(crate) telemetry: TelemetrySettings,
    /// All integrations, including the built-in `desk`.
    pub(crate) integrations: Vec<IntegrationSettings>,
    /// Receivers of ticket events.
    pub(crate) notifications: Vec<NotificationSettings>,
    /// What is replaced by placeholders before a model sees it.
    pub(crate) redaction: Arc<RedactionRules>,
    /// The custom patterns of it.
    pub(crate) redactions: Vec<RedactionSettings>,
    /// Tokens. Empty: every local client is an admin.
    pub(crate) tokens: Vec<TokenSettings>,
    /// HTTP endpoints that the model may call.
    pub(crate) tools: Vec<Arc<dyn Tool>>,
    /// Name, value, source and description of each setting, without secrets.
    pub(crate) shown: Arc<Vec<serde_json::Value>>,
}

/// Settings of analytics.
#[derive(Clone, Debug)]
pub(crate) struct AnalyticsSettings {
    /// The DuckDB file; `None` disables analytics.
    pub(crate) path: Option<PathBuf>,
    /// Time limit of a report or a query.
    pub(crate) query_timeout: Duration,
}

/// Settings of the HTTP server.
#[derive(Clone, Debug)]
pub(crate) struct HttpSettings {
    /// Listen address of `serve`.
    pub(crate) listen: SocketAddr,
    /// Listen address of `worker`.
    pub(crate) worker_listen: SocketAddr,
    /// Maximum bytes of a body.
    pub(crate) body_bytes_max: usize,
    /// Maximum bytes of a session import.
    pub(crate) import_bytes_max: u64,
    /// Memory budget for all request bodies.
    pub(crate) body_memory_bytes_max: u64,
    /// Maximum bytes of all headers.
    pub(crate) header_bytes_max: usize,
    /// Maximum open connections.
    pub(crate) connections_max: usize,
    /// Maximum open connections of one client address.
    pub(crate) client_connections_max: usize,
    /// Timeout for the headers, and for the body.
    pub(crate) read_timeout: Duration,
    /// Timeout until a response begins.
    pub(crate) request_timeout: Duration,
    /// Average requests per second of one client.
    pub(crate) rate_per_second: u32,
    /// Maximum burst of one client.
    pub(crate) rate_burst: u32,
    /// Whether the client address comes from `X-Forwarded-For`.
    pub(crate) forwarded: bool,
}

/// Settings of links to this server.
#[derive(Clone, Debug)]
pub(crate) struct LinkSettings {
    /// URL under which people reach `serve`; `None`: that of its listen address, if it is a loopback address.
    public_url: Option<String>,
    /// Signs links to drafts; `None`: there are none.
    secret: Option<SecretString>,
    /// How long links to drafts are valid.
    draft_ttl: Duration,
}

impl LinkSettings {
    /// The URL of a server that listens on this address; `None` if it is unknown.
    pub(crate) fn base_url(&self, listen: SocketAddr) -> Option<String> {
        let local = || listen.ip().is_loopback().then(|| format!("http://{listen}"));
        self.public_url.clone().or_else(local)
    }

    /// Links to drafts of a server that listens on this address.
    pub(crate) fn draft_links(&self, listen: SocketAddr) -> Option<DraftLinks> {
        let (secret, base_url) = (self.secret.clone()?, self.base_url(listen)?);
        Some(DraftLinks::new(secret, &base_url, self.draft_ttl))
    }
}

/// Settings of the worker, sweeper and outbox.
#[derive(Clone, Debug)]
pub(crate) struct WorkSettings {
    /// Maximum issues handled concurrently.
    pub(crate) concurrency: usize,
    /// Lifetime of a claim.
    pub(crate) claim: Duration,
    /// Timeout of one run.
    pub(crate) deadline: Duration,
    /// Failed runs until an issue is quarantined.
    pub(crate) attempts: u32,
    /// Failed deliveries until an outbox row is dead.
    pub(crate) outbox_attempts: u32,
    /// How long shutdown waits for runs in progress.
    pub(crate) drain: Duration,
    /// The debounce window.
    pub(crate) quiet: Duration,
    /// Maximum wait for the debounce window.
    pub(crate) max_wait: Duration,
    /// Maximum events in one run.
    pub(crate) events_max: usize,
    /// Interval of the sweeper.
    pub(crate) sweep_every: Duration,
}

/// How long data is kept; `None` is forever.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RetentionSettings {
    /// Processed event logs.
    pub(crate) events: Option<Duration>,
    /// Issues that nothing is pending for, since their last change.
    pub(crate) issues: Option<Duration>,
    /// Delivered outbox rows and released dead letters.
    pub(crate) outbox: Duration,
    /// Sessions of model runs.
    pub(crate) sessions: Duration,
    /// Minutes of the history of metrics; `None` stores none.
    pub(crate) metrics: Option<Duration>,
    /// Interval of deletion.
    pub(crate) every: Duration,
}

/// Settings of the event bus and the main loop.
#[derive(Clone, Debug)]
pub(crate) struct BusSettings {
    /// Namespace of the control stream.
    pub(crate) namespace: Namespace,
    /// Entries of a control stream.
    pub(crate) stream_len_max: u64,
    /// Interval of health checks; `None` for never.
    pub(crate) health_interval: Option<Duration>,
    /// The circuit breaker.
    pub(crate) breaker: BreakerConfig,
    /// Attempts of a request.
    pub(crate) request_attempts: u32,
    /// First delay between attempts of a request.
    pub(crate) retry_backoff: Duration,
}

impl BusSettings {
    fn read(read: &SettingsReader<'_>) -> Result<Self, SettingsError> {
        let namespace = read.text("bus.namespace");
        let namespace = Namespace::new(namespace).map_err(|error| {
            let shown = crate::text::one_line(namespace, 60);
            SettingsError::new(format!("setting `bus.namespace` = `{shown}` is invalid: {error}"))
        })?;
        Ok(Self {
            namespace,
            stream_len_max: read.count("bus.stream_len_max"),
            health_interval: non_zero(read.time("bus.health_interval")),
            breaker: BreakerConfig {
                failure_threshold: read.count("bus.breaker_failures"),
                recovery: read.time("bus.breaker_recovery"),
            },
            request_attempts: read.count("bus.request_attempts"),
            retry_backoff: read.time("bus.retry_backoff"),
        })
    }

    /// The configuration of a bus.
    pub(crate) fn config(&self) -> StreamedBusConfig {
        StreamedBusConfig {
            namespace: self.namespace.clone(),
            control_retention: Retention::max_len(self.stream_len_max),
            health_every: self.health_interval,
            breaker: self.breaker,
            ..StreamedBusConfig::default()
        }
    }
}

fn non_zero(time: Duration) -> Option<Duration> {
    (!time.is_zero()).then_some(time)
}

/// Settings of the language model.
#[derive(Clone, Debug)]
pub(crate) struct ModelSettings {
    /// Response delay of the scripted model; `None` for an HTTP endpoint.
    pub(crate) scripted: Option<Duration>,
    /// URL of the endpoint; may contain a password.
    pub(crate) url: SecretString,
    /// Name of the model.
    pub(crate) name: String,
    /// API key.
    pub(crate) key: Option<SecretString>,
    /// Timeout of a response.
    pub(crate) timeout: Duration,
    /// Timeout between two chunks.
    pub(crate) idle_timeout: Duration,
}

/// Settings of logs and traces.
#[derive(Clone, Debug)]
pub(crate) struct TelemetrySettings {
    /// `auto`, `text` or `json`.
    pub(crate) format: String,
    /// Log filter.
    pub(crate) level: String,
    /// URL of the trace collector.
    pub(crate) otlp_url: Option<SecretString>,
}

/// The settings with the source of each value.
#[derive(Debug)]
pub(crate) struct ResolvedSettings {
    /// Validated settings.
    pub(crate) settings: Settings,
    /// Each value with its source.
    pub(crate) values: SettingValues,
    /// The settings file, if one was read.
    pub(crate) file: Option<PathBuf>,
}

/// Resolves and validates the settings.
pub(crate) fn load(
    given: &RawSettings,
    secrets: SecretsPolicy,
) -> Result<ResolvedSettings, SettingsError> {
    let (mut file, path) = match &given.file {
        Some((path, text)) => {
            let parsed = text.parse::<toml::Table>().map_err(|error| unreadable(path, &error))?;
            (parsed, Some(path.clone()))
        }
        None => (toml::Table::new(), None),
    };
    let lists = ["integration", "notification", "redaction", "token", "tool"].into_iter();
    let mut lists: toml::Table =
        lists.filter_map(|list| Some((list.to_owned(), file.remove(list)?))).collect();
    match file.get_mut("model") {
        Some(toml::Value::Table(model)) => {
            let endpoints = model.remove("endpoint");
            lists.extend(endpoints.map(|list| ("model.endpoint".to_owned(), list)));
        }
        Some(toml::Value::Array(_)) => {
            return Err(SettingsError::new(
                "[[model]] is not a section; write `[[model.endpoint]]` for each further model",
            ));
        }
        _ => {}
    }
    let lists = lists
        .try_into::<ListSections>()
        .map_err(|error| unreadable(path.as_deref().unwrap_or_else(|| FILE.as_ref()), &error))?;
    let values = SettingValues::resolve(given, &file, &lists.variables())?;
    let has_tokens = lists.has_tokens();
    let lists = lists.check(&given.environment, secrets, &given.providers)?;
    let settings = Settings::from_values(&values, lists)?;
    settings.check(has_tokens)?;
    Ok(ResolvedSettings { settings, values, file: path })
}

/// Uses only the message: the excerpt that TOML would show may contain a secret.
fn unreadable(path: &std::path::Path, error: &toml::de::Error) -> SettingsError {
    let problem = error.message();
    SettingsError::new(format!("invalid settings file `{}`: {problem}", path.display()))
}

impl Settings {
    fn from_values(
        values: &SettingValues,
        Lists { integrations, notifications, tokens, endpoints, redactions, tools }: Lists,
    ) -> Result<Self, SettingsError> {
        let read = SettingsReader(values);
        let http = HttpSettings {
            listen: read.listen("http.listen")?,
            worker_listen: read.listen("worker.listen")?,
            body_bytes_max: read.count("http.body_bytes_max"),
            import_bytes_max: read.count("http.import_bytes_max"),
            body_memory_bytes_max: read.count("http.body_memory_bytes_max"),
            header_bytes_max: read.count("http.header_bytes_max"),
            connections_max: read.count("http.connections_max"),
            client_connections_max: read.count("http.client_connections_max"),
            read_timeout: read.time("http.read_timeout"),
            request_timeout: read.time("http.request_timeout"),
            rate_per_second: read.count("http.rate_per_second"),
            rate_burst: read.count("http.rate_burst"),
            forwarded: read.text("http.forwarded") == "true",
        };
        let work = WorkSettings {
            concurrency: read.count("worker.concurrency"),
            claim: read.time("worker.claim"),
            deadline: read.time("worker.deadline"),
            attempts: read.count("worker.attempts"),
            outbox_attempts: read.count("outbox.attempts"),
            drain: read.time("worker.drain"),
            quiet: read.time("issue.quiet"),
            max_wait: read.time("issue.max_wait"),
            events_max: read.count("issue.events_max"),
            sweep_every: read.time("sweep.every"),
        };
        let model = read.model();
        let prices =
            Prices { input: read.price("model.price_in"), output: read.price("model.price_out") };
        let default =
            ModelEndpointSettings { id: DEFAULT_ENDPOINT.to_owned(), model: model.clone(), prices };
        // Beside other endpoints, the default one counts only if somebody has set it: the scripted model is no fallback.
        let has_default = endpoints.is_empty() || read.is_given("model.url");
        let names_default =
            |one: &&IntegrationSettings| one.models.iter().any(|id| id == DEFAULT_ENDPOINT);
        if let Some(integration) = integrations.iter().find(names_default).filter(|_| !has_default)
        {
            return Err(SettingsError::new(format!(
                "[[integration]] `{}` names the model `{DEFAULT_ENDPOINT}`, but `model.url` is not set; set it, or remove the name",
                integration.id
            )));
        }
        let further = endpoints.into_iter().map(|endpoint| endpoint.complete(&model));
        let models = has_default.then_some(default).into_iter().chain(further).collect();
        let desk = DeskConfig {
            quiet: work.quiet,
            max_wait: work.max_wait,
            events_max: work.events_max,
            supersede_max: read.count("desk.supersede_max"),
            output_tokens_max: read.count("model.output_tokens_max"),
            unreachable_pause: DeskConfig::default().unreachable_pause,
            budget: TokenBudget {
                issue_tokens_max: read.count("desk.issue_tokens_max"),
                day_tokens_max: read.count("desk.day_tokens_max"),
                user_tokens_max: read.count("desk.user_tokens_max"),
                strangers_tokens_max: read.count("desk.strangers_tokens_max"),
            },
            search: match read.text("desk.search") {
                "all" => SearchScope::AllTickets,
                _ => SearchScope::OwnTickets,
            },
            prices,
        };
        let telemetry = TelemetrySettings {
            format: read.text("log.format").to_owned(),
            level: read.text("log.level").to_owned(),
            otlp_url: read.optional("otlp.url").map(SecretString::from),
        };
        let settings = Self {
            stream_url: read.text("stream.url").into(),
            stream_configure_notifications: read.text("stream.configure_notifications") == "true",
            stream_password: password_source(&read)?,
            stream_password_lifetime: read.time("stream.password_lifetime"),
            database_url: read.text("database.url").into(),
            database_is_given: read.is_given("database.url"),
            database_connections: read.count("database.connections"),
            database_http_connections: read.count("database.http_connections"),
            analytics: AnalyticsSettings {
                path: read.optional("analytics.path").map(PathBuf::from),
                query_timeout: read.time("analytics.query_timeout"),
            },
            start_wait: read.time("start.wait"),
            http,
            work,
            model,
            models,
            desk,
            links: LinkSettings {
                public_url: read.optional("http.public_url"),
                secret: read.optional("desk.link_secret").map(SecretString::from),
                draft_ttl: read.time("desk.draft_link_ttl"),
            },
            draft_max_wait: non_zero(read.time("desk.draft_max_wait")),
            draft_overdue_hands_over: read.text("desk.draft_overdue") == "hand_over",
            desk_reclaim_idle: read.time("desk.reclaim_idle"),
            webhook_tolerance: read.time("webhook.tolerance"),
            audit_rows_max: read.count("audit.rows_max"),
            retention: RetentionSettings {
                events: non_zero(read.time("retention.events")),
                issues: non_zero(read.time("retention.issues")),
                outbox: read.time("retention.outbox"),
                sessions: read.time("retention.sessions"),
                metrics: non_zero(read.time("history.keep")),
                every: read.time("retention.every"),
            },
            bus: BusSettings::read(&read)?,
            telemetry,
            integrations,
            notifications,
            redaction: Arc::new(redactions::rules(&redactions, read.text("desk.redact"))?),
            redactions,
            tokens,
            tools,
            shown: Arc::new(docs::shown(values)),
        };
        Ok(settings)
    }

    /// Checks rules that involve several settings.
    fn check(&self, has_tokens: bool) -> Result<(), SettingsError> {
        if self.model.scripted.is_none() && self.model.name.is_empty() {
            return Err(SettingsError::new(
                "setting `model.name` is empty; set it to a model of the endpoint in `model.url`",
            ));
        }
        for (name, listen) in
            [("http.listen", self.http.listen), ("worker.listen", self.http.worker_listen)]
        {
            if !listen.ip().is_loopback() && !has_tokens {
                return Err(SettingsError::new(format!(
                    "setting `{name}` = `{listen}` is not a loopback address, but no [[token]] is configured; \
                     add a [[token]], or use a loopback address such as `127.0.0.1:{}`",
                    listen.port()
                )));
            }
        }
        if let Some(secret) = &self.links.secret {
            let letters = secret.expose_secret().len();
            if letters < LINK_SECRET_CHARS_MIN {
                return Err(SettingsError::new(format!(
                    "setting `desk.link_secret` has {letters} characters; at least {LINK_SECRET_CHARS_MIN} are required"
                )));
            }
            if self.links.base_url(self.http.listen).is_none() {
                return Err(SettingsError::new(format!(
                    "setting `desk.link_secret` is set, but links need an address: set `http.public_url`, because \
                     `http.listen` = `{}` is not a loopback address",
                    self.http.listen
                )));
            }
        }
        if self.work.max_wait < self.work.quiet {
            return Err(SettingsError::new(format!(
                "setting `issue.max_wait` = `{:?}` is less than `issue.quiet` = `{:?}`; raise it",
                self.work.max_wait, self.work.quiet
            )));
        }
        Ok(())
    }

    /// The stream URL with its password hidden.
    pub(crate) fn stream_shown(&self) -> String {
        shown_url(self.stream_url.expose_secret())
    }

    /// The database URL with its password hidden.
    pub(crate) fn database_shown(&self) -> String {
        shown_url(self.database_url.expose_secret())
    }
}

fn password_source(read: &SettingsReader<'_>) -> Result<Option<PasswordSource>, SettingsError> {
    let file = read.optional("stream.password_file").map(|file| PasswordSource::File(file.into()));
    let command = read.optional("stream.password_command").map(PasswordSource::Command);
    match (file, command) {
        (Some(_), Some(_)) => Err(SettingsError::new(
            "settings `stream.password_file` and `stream.password_command` are both set; keep one",
        )),
        (file, command) => Ok(file.or(command)),
    }
}

/// Reads values that were validated by their type.
struct SettingsReader<'a>(&'a SettingValues);

impl SettingsReader<'_> {
    fn text(&self, name: &str) -> &str {
        self.0.get(name).text()
    }

    fn is_given(&self, name: &str) -> bool {
        self.0.get(name).source != sources::SettingSource::Default
    }

    fn optional(&self, name: &str) -> Option<String> {
        Some(self.text(name)).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    fn count<T: TryFrom<u64>>(&self, name: &str) -> T {
        let count = self.text(name).parse::<u64>().ok();
        count.and_then(|count| T::try_from(count).ok()).expect("validated by its type")
    }

    fn time(&self, name: &str) -> Duration {
        value_type::time(self.text(name)).expect("validated by its type")
    }

    fn price(&self, name: &str) -> f64 {
        value_type::price(self.text(name)).expect("validated by its type")
    }

    fn model(&self) -> ModelSettings {
        let url = self.text("model.url");
        let scripted = url.strip_prefix(value_type::SCRIPTED);
        ModelSettings {
            scripted: scripted.map(|delay| value_type::time(delay).unwrap_or_default()),
            name: self.text("model.name").to_owned(),
            key: self.optional("model.key").map(SecretString::from),
            timeout: self.time("model.timeout"),
            idle_timeout: self.time("model.idle_timeout"),
            url: url.into(),
        }
    }

    /// Resolves the host name again, which may fail since validation.
    fn listen(&self, name: &str) -> Result<SocketAddr, SettingsError> {
        value_type::listen(self.text(name))
            .ok_or_else(|| SettingsError::invalid_value(self.0.get(name)))
    }
}

#[cfg(test)]
mod tests;
