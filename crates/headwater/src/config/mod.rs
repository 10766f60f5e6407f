//! Settings: raw values from flags, environment and file become one checked [`Settings`], once, at the start.
//!
//! Upstream: `cli` hands over what was said. Downstream: `run` builds every part from it.
//! Promises: what is in [`Settings`] makes sense, so nothing later has to ask; secrets are types that `Debug` does not show.
//! Flow: `table` (what there is) -> `sources` (who says what) -> `lists` (integrations, tokens) -> this file -> `describe`.

mod docs;
mod error;
mod integrations;
mod redact;
mod sources;
mod table;
mod value_type;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};

use crate::desk::{Budget, DeskConfig, Prices, SearchScope};

pub(crate) use crate::config::docs::{as_json, as_markdown, as_text};
pub(crate) use crate::config::error::SettingsError;
use crate::config::integrations::Lists;
pub(crate) use crate::config::integrations::{Integration, Provider, Role, Secrets, Token};
pub(crate) use crate::config::redact::url as shown_url;
pub(crate) use crate::config::sources::{FILE_VARIABLE, Given, Source, Values};
pub(crate) use crate::config::table::TABLE;
pub(crate) use crate::config::value_type::{Kind, time};

/// The file that is read if nobody names one, if it is there.
pub(crate) const FILE: &str = "headwater.toml";

/// All settings, checked.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// Where streams are; may hold a password.
    pub(crate) stream_url: SecretString,
    /// Where events wait while streams are away; empty: nowhere.
    pub(crate) stream_spool: String,
    /// Whether somebody said so, or it is the default.
    pub(crate) stream_spool_is_given: bool,
    /// Where the truth is; may hold a password.
    pub(crate) database_url: SecretString,
    /// Whether somebody said so, or it is the default.
    pub(crate) database_is_given: bool,
    /// The most connections to the database.
    pub(crate) database_connections: u32,
    /// Where analytics is; `None`: nowhere.
    pub(crate) analytics_path: Option<PathBuf>,
    /// How long to wait at the start for a server that is away.
    pub(crate) start_wait: Duration,
    /// HTTP.
    pub(crate) http: Http,
    /// Work on issues.
    pub(crate) work: Work,
    /// The language model.
    pub(crate) model: Model,
    /// The desk.
    pub(crate) desk: DeskConfig,
    /// When entries of programs without heartbeats are taken over.
    pub(crate) desk_reclaim_idle: Duration,
    /// How old a signed webhook may be.
    pub(crate) webhook_tolerance: Duration,
    /// Entries of the audit log that are kept.
    pub(crate) audit_rows_max: u64,
    /// Logs and traces.
    pub(crate) telemetry: Telemetry,
    /// The other sides, the desk among them.
    pub(crate) integrations: Vec<Integration>,
    /// Who may do what. Empty: whoever is on this machine may do everything.
    pub(crate) tokens: Vec<Token>,
}

/// Settings of HTTP.
#[derive(Clone, Debug)]
pub(crate) struct Http {
    /// Where `serve` listens.
    pub(crate) listen: SocketAddr,
    /// Where `worker` answers for health and metrics.
    pub(crate) worker_listen: SocketAddr,
    /// The largest body.
    pub(crate) body_bytes_max: usize,
    /// The largest import of a session.
    pub(crate) import_bytes_max: u64,
    /// Memory for the bodies of all requests.
    pub(crate) body_memory_bytes_max: u64,
    /// The most bytes of headers.
    pub(crate) header_bytes_max: usize,
    /// Connections at once.
    pub(crate) connections_max: usize,
    /// Connections of one client address at once.
    pub(crate) client_connections_max: usize,
    /// How long headers, and then a body, may take.
    pub(crate) read_timeout: Duration,
    /// How long it may take until an answer begins.
    pub(crate) request_timeout: Duration,
    /// Requests per second of one client.
    pub(crate) rate_per_second: u32,
    /// Requests of one client at once.
    pub(crate) rate_burst: u32,
    /// Whether a proxy tells who the client is.
    pub(crate) forwarded: bool,
}

/// Settings of the work on issues.
#[derive(Clone, Debug)]
pub(crate) struct Work {
    /// Issues at once.
    pub(crate) concurrency: usize,
    /// The life of a claim.
    pub(crate) claim: Duration,
    /// How long one run may take.
    pub(crate) deadline: Duration,
    /// Failed tries until an operator is needed.
    pub(crate) attempts: u32,
    /// Failed deliveries before a row of the outbox is dead.
    pub(crate) outbox_attempts: u32,
    /// How long a stop waits.
    pub(crate) drain: Duration,
    /// The quiet window.
    pub(crate) quiet: Duration,
    /// The longest wait for quiet.
    pub(crate) max_wait: Duration,
    /// Events in one run.
    pub(crate) events_max: usize,
    /// How often to sweep.
    pub(crate) sweep_every: Duration,
}

/// Settings of the language model.
#[derive(Clone, Debug)]
pub(crate) struct Model {
    /// The built-in model and how slow it is; `None`: a service.
    pub(crate) scripted: Option<Duration>,
    /// Where the service is; it may hold a password.
    pub(crate) url: SecretString,
    /// Which model.
    pub(crate) name: String,
    /// What is presented there.
    pub(crate) key: Option<SecretString>,
    /// How long an answer may take.
    pub(crate) timeout: Duration,
    /// How long it may say nothing.
    pub(crate) idle_timeout: Duration,
}

/// Settings of logs and traces.
#[derive(Clone, Debug)]
pub(crate) struct Telemetry {
    /// `auto`, `text` or `json`.
    pub(crate) format: String,
    /// What is logged.
    pub(crate) level: String,
    /// Where traces go.
    pub(crate) otlp_url: Option<SecretString>,
}

/// The settings, with where each came from.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// Checked.
    pub(crate) settings: Settings,
    /// As they were said.
    pub(crate) values: Values,
    /// The settings file, if there is one.
    pub(crate) file: Option<PathBuf>,
}

/// Makes settings of what was said, or says what is wrong.
pub(crate) fn load(given: &Given, secrets: Secrets) -> Result<Loaded, SettingsError> {
    let (mut file, path) = match &given.file {
        Some((path, text)) => {
            let parsed = text.parse::<toml::Table>().map_err(|error| unreadable(path, &error))?;
            (parsed, Some(path.clone()))
        }
        None => (toml::Table::new(), None),
    };
    let lists = ["integration", "token"].into_iter();
    let lists: toml::Table =
        lists.filter_map(|list| Some((list.to_owned(), file.remove(list)?))).collect();
    let lists = lists
        .try_into::<Lists>()
        .map_err(|error| unreadable(path.as_deref().unwrap_or_else(|| FILE.as_ref()), &error))?;
    let values = Values::resolve(given, &file, &lists.variables())?;
    let has_tokens = lists.has_tokens();
    let (integrations, tokens) = lists.integrations(&given.environment, secrets)?;
    let settings = Settings::from_values(&values, integrations, tokens)?;
    settings.check(has_tokens)?;
    Ok(Loaded { settings, values, file: path })
}

/// The message alone: the place in the file that TOML would show may hold a secret.
fn unreadable(path: &std::path::Path, error: &toml::de::Error) -> SettingsError {
    let problem = error.message();
    SettingsError::new(format!("the settings file {} is wrong: {problem}", path.display()))
}

impl Settings {
    fn from_values(
        values: &Values,
        integrations: Vec<Integration>,
        tokens: Vec<Token>,
    ) -> Result<Self, SettingsError> {
        let read = Reader(values);
        let http = Http {
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
        let work = Work {
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
        let desk = DeskConfig {
            quiet: work.quiet,
            max_wait: work.max_wait,
            events_max: work.events_max,
            supersede_max: read.count("desk.supersede_max"),
            output_tokens_max: read.count("model.output_tokens_max"),
            away_pause: DeskConfig::default().away_pause,
            budget: Budget {
                issue_tokens_max: read.count("desk.issue_tokens_max"),
                day_tokens_max: read.count("desk.day_tokens_max"),
            },
            search: match read.text("desk.search") {
                "all" => SearchScope::AllTickets,
                _ => SearchScope::OwnTickets,
            },
            prices: Prices {
                input: read.price("model.price_in"),
                output: read.price("model.price_out"),
            },
        };
        let telemetry = Telemetry {
            format: read.text("log.format").to_owned(),
            level: read.text("log.level").to_owned(),
            otlp_url: read.optional("otlp.url").map(SecretString::from),
        };
        let settings = Self {
            stream_url: read.text("stream.url").into(),
            stream_spool: read.text("stream.spool").to_owned(),
            stream_spool_is_given: read.is_given("stream.spool"),
            database_url: read.text("database.url").into(),
            database_is_given: read.is_given("database.url"),
            database_connections: read.count("database.connections"),
            analytics_path: read.optional("analytics.path").map(PathBuf::from),
            start_wait: read.time("start.wait"),
            http,
            work,
            model,
            desk,
            desk_reclaim_idle: read.time("desk.reclaim_idle"),
            webhook_tolerance: read.time("webhook.tolerance"),
            audit_rows_max: read.count("audit.rows_max"),
            telemetry,
            integrations,
            tokens,
        };
        Ok(settings)
    }

    /// What no setting can say alone.
    fn check(&self, has_tokens: bool) -> Result<(), SettingsError> {
        if self.model.scripted.is_none() && self.model.name.is_empty() {
            return Err(SettingsError::new(
                "the setting `model.name` is empty, but `model.url` names a service; allowed is the name of one of its models",
            ));
        }
        for (name, listen) in
            [("http.listen", self.http.listen), ("worker.listen", self.http.worker_listen)]
        {
            if !listen.ip().is_loopback() && !has_tokens {
                return Err(SettingsError::new(format!(
                    "the setting `{name}` is `{listen}`, which others can reach, but there is no [[token]]; \
                     allowed without one is an address of this machine alone, such as `127.0.0.1:{}`",
                    listen.port()
                )));
            }
        }
        if self.work.max_wait < self.work.quiet {
            return Err(SettingsError::new(format!(
                "the setting `issue.max_wait` is `{:?}`; allowed is at least `issue.quiet`, which is `{:?}`",
                self.work.max_wait, self.work.quiet
            )));
        }
        Ok(())
    }

    /// Where events wait while streams are away. Streams of this process are never away.
    pub(crate) fn spool(&self) -> Option<&Path> {
        let is_embedded = self.stream_url.expose_secret().starts_with("embedded:");
        let directory = Some(self.stream_spool.as_str()).filter(|name| !name.is_empty())?;
        (!is_embedded).then(|| Path::new(directory))
    }

    /// The stream URL as people may see it.
    pub(crate) fn stream_shown(&self) -> String {
        shown_url(self.stream_url.expose_secret())
    }

    /// The database URL as people may see it.
    pub(crate) fn database_shown(&self) -> String {
        shown_url(self.database_url.expose_secret())
    }
}

/// Reads values that have passed the check of their kind.
struct Reader<'a>(&'a Values);

impl Reader<'_> {
    fn text(&self, name: &str) -> &str {
        self.0.get(name).text()
    }

    fn is_given(&self, name: &str) -> bool {
        self.0.get(name).source != sources::Source::Default
    }

    fn optional(&self, name: &str) -> Option<String> {
        Some(self.text(name)).filter(|text| !text.is_empty()).map(str::to_owned)
    }

    fn count<T: TryFrom<u64>>(&self, name: &str) -> T {
        let count = self.text(name).parse::<u64>().ok();
        count.and_then(|count| T::try_from(count).ok()).expect("checked by its kind")
    }

    fn time(&self, name: &str) -> Duration {
        value_type::time(self.text(name)).expect("checked by its kind")
    }

    fn price(&self, name: &str) -> f64 {
        value_type::price(self.text(name)).expect("checked by its kind")
    }

    fn model(&self) -> Model {
        let url = self.text("model.url");
        let scripted = url.strip_prefix(value_type::SCRIPTED);
        Model {
            scripted: scripted.map(|delay| value_type::time(delay).unwrap_or_default()),
            name: self.text("model.name").to_owned(),
            key: self.optional("model.key").map(SecretString::from),
            timeout: self.time("model.timeout"),
            idle_timeout: self.time("model.idle_timeout"),
            url: url.into(),
        }
    }

    /// A name that was found a moment ago may be gone by now.
    fn listen(&self, name: &str) -> Result<SocketAddr, SettingsError> {
        value_type::listen(self.text(name)).ok_or_else(|| SettingsError::wrong(self.0.get(name)))
    }
}

#[cfg(test)]
mod tests;
