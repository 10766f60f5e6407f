//! Builds the desk from its settings: model, tickets, sessions, outbox delivery and the consumer of `ticket_events`.
//!
//! Upstream: `server::run` starts the services built here. Guarantees: only the bus runs before `server::run` starts the
//! services; `close` stops the bus.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use async_trait::async_trait;
use headwater_bus::{
    EventBus, EventRegistry, Folds, PromptExecuted, Sessions, SessionsConfig, StreamedBus,
    StreamedBusConfig, ToolInvoked,
};
use headwater_issue::{CommitVerifier, DeliverError, Nudger, OutboxRow, Store};
use headwater_stream::Backend;
use secrecy::{ExposeSecret, SecretString};
use tracing::warn;

use crate::config::{
    BusSettings, DEFAULT_ENDPOINT, GithubAppSettings, IntegrationSettings, ModelEndpointSettings,
    ModelSettings, ProviderKind, Settings,
};
use crate::desk::provisional::ProvisionalAnswers;
use crate::desk::{
    Desk, DeskReply, IntegrationPolicy, LanguageModel, Ledger, ModelEndpoint, OpenAiConfig,
    OpenAiModel, ReplyTarget, ScriptedModel, TicketSearch, Tool, Toolbox,
};
use crate::inbound::ticket_events_consumer::TicketEventsConsumer;
use crate::outbound::TicketEventsPublisher;
use crate::outbound::github_app::GithubApp;
use crate::outbound::{Destination, LocalDelivery, OutboxDeliverer};
use crate::tickets::Tickets;

/// Deadline of [`close`].
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The services of the desk.
pub(crate) struct DeskServices {
    pub(crate) tickets: Tickets,
    pub(crate) desk: Arc<Desk>,
    pub(crate) delivery: OutboxDeliverer,
    pub(crate) ticket_events: TicketEventsConsumer,
    pub(crate) bus: Arc<StreamedBus>,
    pub(crate) sessions: Arc<Sessions>,
    /// Answers that are being written.
    pub(crate) provisional: ProvisionalAnswers,
}

/// Model and tools of an embedding program.
pub(crate) type OwnParts = (Option<Arc<dyn LanguageModel>>, Vec<Arc<dyn Tool>>);

impl DeskServices {
    /// Opens the ticket tables, the bus and the sessions. Fails if one of them cannot be opened or a setting is
    /// invalid.
    pub(crate) async fn open(
        settings: &Settings,
        store: &Arc<dyn Store>,
        streams: &Arc<dyn Backend>,
        nudger: &Nudger,
        confirmations: &CommitVerifier,
        (own_model, own_tools): OwnParts,
    ) -> Result<Self> {
        let config = settings.desk;
        let tickets =
            Tickets::open(Arc::clone(store), nudger.clone(), config.debounce_window()).await;
        let tickets = tickets.context("opening the ticket tables")?;
        let tickets = tickets.with_confirmations(confirmations.clone());
        let (bus, sessions) = sessions(streams, &settings.bus, settings.retention.sessions).await?;
        let models = models(settings, own_model)?;
        let provisional = ProvisionalAnswers::new(streams);
        let tools = settings.tools.iter().cloned().chain(own_tools).collect();
        let toolbox = Toolbox::new(tools).map_err(|problem| anyhow!("tools: {problem}"))?;
        let first = models.first().context("no model is configured")?;
        let desk = Desk::new(
            Arc::clone(&first.model),
            Arc::new(tickets.clone()) as Arc<dyn TicketSearch>,
            Arc::new(tickets.clone()) as Arc<dyn Ledger>,
            Arc::clone(store),
            config,
        );
        let desk = desk
            .with_models(models)
            .with_policies(settings.integrations.iter().map(policy).collect())
            .with_drafts(Arc::new(tickets.clone()))
            .with_prompts(Arc::new(tickets.clone()))
            .with_tools(toolbox, Arc::new(tickets.clone()))
            .with_provisional(provisional.clone())
            .with_redaction(Arc::clone(&settings.redaction));
        let control = bus.control_stream().clone();
        let publisher =
            TicketEventsPublisher::new(Arc::clone(streams), control, Arc::clone(&sessions));
        let local = DeskDelivery { tickets: tickets.clone(), publisher };
        let destinations = settings.integrations.iter().map(destination);
        let destinations = destinations.collect::<Result<HashMap<_, _>>>()?;
        let delivery = OutboxDeliverer::new(Arc::clone(store), destinations, Arc::new(local));
        let delivery = delivery
            .map_err(|problem| anyhow!("building the HTTP client for replies: {problem}"))?;
        let ticket_events = TicketEventsConsumer::new(
            tickets.clone(),
            Arc::clone(streams),
            settings.desk_reclaim_idle,
        );
        let desk = Arc::new(desk);
        Ok(Self { tickets, desk, delivery, ticket_events, bus, sessions, provisional })
    }
}

/// Opens the sessions of model runs, which are deleted `ttl` after their last event, and their bus.
pub(crate) async fn sessions(
    streams: &Arc<dyn Backend>,
    settings: &BusSettings,
    ttl: Duration,
) -> Result<(Arc<StreamedBus>, Arc<Sessions>)> {
    let config = StreamedBusConfig { drain: CLOSE_TIMEOUT / 2, ..settings.config() };
    let bus = StreamedBus::open(Arc::clone(streams), EventRegistry::builtin(), config).await;
    let bus = Arc::new(bus.context("opening the bus")?);
    let folds = Folds::none().all::<ToolInvoked>(100).all::<PromptExecuted>(100);
    let config = SessionsConfig { ttl: Some(ttl), ..SessionsConfig::default() };
    let on_bus = Arc::clone(&bus) as Arc<dyn EventBus>;
    let sessions = Sessions::new(on_bus, folds, config).await.context("opening the sessions")?;
    Ok((bus, Arc::new(sessions)))
}

/// Closes the bus. Returns after [`CLOSE_TIMEOUT`] at the latest; failures are logged.
pub(crate) async fn close(bus: Arc<StreamedBus>) {
    match tokio::time::timeout(CLOSE_TIMEOUT, bus.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "closing the bus failed"),
        Err(_) => warn!("closing the bus timed out"),
    }
}

/// The models, in the order in which they are tried: the configured ones, with `own` instead of the default one.
fn models(settings: &Settings, own: Option<Arc<dyn LanguageModel>>) -> Result<Vec<ModelEndpoint>> {
    let has_own = own.is_some();
    let is_replaced = |one: &&ModelEndpointSettings| has_own && one.id == DEFAULT_ENDPOINT;
    let configured: Vec<_> = settings.models.iter().filter(|one| !is_replaced(one)).collect();
    let has_fallback = configured.len() > 1 || has_own;
    let build = |one: &ModelEndpointSettings| {
        let model = model(&one.model, has_fallback);
        let model = model.with_context(|| format!("model endpoint `{}`", one.id))?;
        Ok(ModelEndpoint { id: one.id.clone(), model, prices: one.prices })
    };
    let prices = settings.desk.prices;
    let own = own.map(|model| Ok(ModelEndpoint { id: DEFAULT_ENDPOINT.to_owned(), model, prices }));
    own.into_iter().chain(configured.into_iter().map(build)).collect()
}

/// A configured model. With a fallback, a failed call is not repeated: the next endpoint is called instead.
fn model(settings: &ModelSettings, has_fallback: bool) -> Result<Arc<dyn LanguageModel>> {
    if let Some(delay) = &settings.scripted {
        return Ok(Arc::new(ScriptedModel::default().with_delay(*delay)));
    }
    let default =
        OpenAiConfig::new(settings.url.expose_secret(), &settings.name, settings.key.clone());
    let config = OpenAiConfig {
        attempts_max: if has_fallback { 1 } else { default.attempts_max },
        total_timeout: settings.timeout,
        idle_timeout: settings.idle_timeout,
        ..default
    };
    let model =
        OpenAiModel::new(config).map_err(|problem| anyhow!("setting up the model: {problem}"))?;
    Ok(Arc::new(model))
}

/// The policy of an integration.
fn policy(one: &IntegrationSettings) -> (String, IntegrationPolicy) {
    let (agents, rules, models) = (one.agents.clone(), one.rules.clone(), one.models.clone());
    (one.id.clone(), IntegrationPolicy { agents, mode: one.mode, rules, models })
}

/// The destination of replies of an integration.
fn destination(one: &IntegrationSettings) -> Result<(String, Destination)> {
    let unconfigured = |what: &str| Destination::Unconfigured {
        problem: format!(
            "[[integration]] `{}` has no {what}, so its replies cannot be delivered",
            one.id
        ),
    };
    let or = |default: &str| one.base_url.clone().unwrap_or_else(|| default.to_owned());
    let secret = |token: &SecretString| one.secret.clone().unwrap_or_else(|| token.clone());
    if let Some(GithubAppSettings { id, key, installation }) = &one.app {
        let app = GithubApp::new(id, key, *installation)
            .map_err(|problem| anyhow!("[[integration]] `{}`: {problem}", one.id))?;
        let destination = Destination::GithubApp {
            base_url: or("https://api.github.com"),
            app: Arc::new(app),
            secret: secret(key),
        };
        return Ok((one.id.clone(), destination));
    }
    let destination = match (&one.provider, &one.reply_token) {
        (ProviderKind::Desk, _) => Destination::Tickets,
        (ProviderKind::Github, Some(token)) => Destination::Github {
            base_url: or("https://api.github.com"),
            token: token.clone(),
            secret: secret(token),
        },
        (ProviderKind::Gitlab, Some(token)) => Destination::Gitlab {
            base_url: or("https://gitlab.com"),
            token: token.clone(),
            secret: secret(token),
        },
        (ProviderKind::Github, None) => unconfigured("reply_token_env or app_id"),
        (ProviderKind::Gitlab, None) => unconfigured("reply_token_env"),
        (ProviderKind::Embedded(provider), token) => match &one.secret {
            Some(secret) => Destination::Provider {
                provider: Arc::clone(provider),
                base_url: one.base_url.clone(),
                token: token.clone(),
                secret: secret.clone(),
            },
            None => unconfigured("secret"),
        },
        (ProviderKind::Standard, _) => match (&one.base_url, &one.secret) {
            (Some(url), Some(secret)) => {
                Destination::Callback { url: url.clone(), secret: secret.clone() }
            }
            _ => unconfigured("base_url"),
        },
    };
    Ok((one.id.clone(), destination))
}

/// Delivers replies to tickets and events to streams.
struct DeskDelivery {
    tickets: Tickets,
    publisher: TicketEventsPublisher,
}

#[async_trait]
impl LocalDelivery for DeskDelivery {
    async fn deliver_reply(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        reply: DeskReply,
    ) -> Result<(), DeliverError> {
        self.tickets.deliver(row, target, &reply).await
    }

    async fn publish_event(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        self.publisher.publish(row).await
    }
}
