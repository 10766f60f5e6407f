//! The desk, put together from its settings: model, tickets, sessions, the way out and the way in for other programs.
//!
//! Upstream: `run`, which starts what is built here. Promises: nothing runs before `run` starts it but the bus, which `close`
//! ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use async_trait::async_trait;
use headwater_bus::{
    BusError, EventBus, EventRegistry, FailurePolicy, Folds, PromptExecuted, Sessions,
    SessionsConfig, SpoolConfig, SpoolError, StreamedBus, StreamedBusConfig, ToolInvoked,
};
use headwater_issue::{Confirmations, DeliverError, Nudger, OutboxRow, Store};
use headwater_stream::Backend;
use secrecy::{ExposeSecret, SecretString};
use tracing::warn;

use crate::config::{IntegrationSettings, ModelSettings, Provider, Settings};
use crate::desk::{
    Desk, LanguageModel, Ledger, OpenAiConfig, OpenAiModel, Reply, ReplyTarget, ScriptedModel,
    TicketSearch,
};
use crate::inbound::ticket_events_consumer::TicketIntake;
use crate::outbound::Outlet;
use crate::outbound::{Destination, Inside, Replies};
use crate::tickets::Tickets;

/// The bus is left after this, whatever it still does.
const CLOSE_MAX: Duration = Duration::from_secs(5);

/// Processes that share a directory of spools.
const SPOOLS_MAX: usize = 100;

/// Sessions of model runs end this long after their last event.
const SESSION_KEPT: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// Everything of the desk.
pub(crate) struct DeskParts {
    pub(crate) tickets: Tickets,
    pub(crate) desk: Arc<Desk>,
    pub(crate) replies: Replies,
    pub(crate) intake: TicketIntake,
    pub(crate) bus: Arc<StreamedBus>,
    pub(crate) sessions: Arc<Sessions>,
}

impl DeskParts {
    /// Builds the desk.
    pub(crate) async fn open(
        settings: &Settings,
        store: &Arc<dyn Store>,
        streams: &Arc<dyn Backend>,
        nudger: &Nudger,
        confirmations: &Confirmations,
    ) -> Result<Self> {
        let config = settings.desk;
        let tickets = Tickets::open(Arc::clone(store), nudger.clone(), config.quiet()).await;
        let tickets = tickets.context("the tables of tickets")?;
        let tickets = tickets.with_confirmations(confirmations.clone());
        let bus = open_bus(settings, streams).await.context("the bus")?;
        let (bus, sessions) = sessions_on(bus).await?;
        let desk = Desk::new(
            model(&settings.model)?,
            Arc::new(tickets.clone()) as Arc<dyn TicketSearch>,
            Arc::new(tickets.clone()) as Arc<dyn Ledger>,
            Arc::clone(&sessions),
            config,
        );
        let outlet = Outlet::new(Arc::clone(streams), bus.control_stream().clone());
        let inside = DeskInside { tickets: tickets.clone(), outlet };
        let destinations = settings.integrations.iter().map(destination).collect::<HashMap<_, _>>();
        let replies = Replies::new(Arc::clone(store), destinations, Arc::new(inside));
        let replies = replies.map_err(|problem| anyhow!("replies: {problem}"))?;
        let intake =
            TicketIntake::new(tickets.clone(), Arc::clone(streams), settings.desk_reclaim_idle);
        Ok(Self { tickets, desk: Arc::new(desk), replies, intake, bus, sessions })
    }
}

/// The sessions of model runs, and the bus they are on, for those who look.
pub(crate) async fn sessions(
    streams: &Arc<dyn Backend>,
) -> Result<(Arc<StreamedBus>, Arc<Sessions>)> {
    let config = bus_config(FailurePolicy::Fail);
    let bus = StreamedBus::open(Arc::clone(streams), EventRegistry::builtin(), config).await;
    sessions_on(bus.context("the bus")?).await
}

async fn sessions_on(bus: StreamedBus) -> Result<(Arc<StreamedBus>, Arc<Sessions>)> {
    let bus = Arc::new(bus);
    let folds = Folds::none().all::<ToolInvoked>(100).all::<PromptExecuted>(100);
    let config = SessionsConfig { ttl: Some(SESSION_KEPT), ..SessionsConfig::default() };
    let on_bus = Arc::clone(&bus) as Arc<dyn EventBus>;
    let sessions = Sessions::new(on_bus, folds, config).await.context("sessions")?;
    Ok((bus, Arc::new(sessions)))
}

fn bus_config(on_failure: FailurePolicy) -> StreamedBusConfig {
    StreamedBusConfig { on_failure, drain: CLOSE_MAX / 2, ..StreamedBusConfig::default() }
}

/// Ends what runs by itself, within five seconds.
pub(crate) async fn close(bus: Arc<StreamedBus>) {
    match tokio::time::timeout(CLOSE_MAX, bus.close()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => warn!(%error, "the bus did not close well"),
        Err(_) => warn!("the bus did not close in time"),
    }
}

/// The bus, with a spool where streams can go away: the steps of model runs wait in it and reach their sessions later.
async fn open_bus(settings: &Settings, streams: &Arc<dyn Backend>) -> Result<StreamedBus> {
    let open = async |on_failure| {
        StreamedBus::open(Arc::clone(streams), EventRegistry::builtin(), bus_config(on_failure))
            .await
    };
    let Some(directory) = settings.spool() else { return Ok(open(FailurePolicy::Fail).await?) };
    for place in 0..SPOOLS_MAX {
        let file = directory.join(format!("{place}.spool"));
        match open(FailurePolicy::Spool(SpoolConfig::new(file))).await {
            // Another process of this directory has it. One that has died has left its own to us, with what is in it.
            Err(BusError::Spool(SpoolError::InUse { .. })) => {}
            // Nobody asked for this directory, and what waits in it never fails a run: the process works without.
            Err(BusError::Spool(error)) if !settings.stream_spool_is_given => {
                warn!(%error, "the spool is left as it is; mend it, or set `stream.spool`");
                let is_of_one_file =
                    matches!(error, SpoolError::Corrupt { .. } | SpoolError::WrongOwner { .. });
                if !is_of_one_file {
                    break;
                }
            }
            Err(error) => {
                let directory = directory.display();
                return Err(error)
                    .with_context(|| format!("the setting `stream.spool`, {directory}"));
            }
            Ok(bus) => return Ok(bus),
        }
    }
    let directory = directory.display();
    if !settings.stream_spool_is_given {
        warn!(%directory, "no spool: steps of model runs are lost while streams are away");
        return Ok(open(FailurePolicy::Fail).await?);
    }
    bail!(
        "the setting `stream.spool`: {SPOOLS_MAX} processes use {directory}; give this one another directory"
    )
}

/// The model that the settings name.
fn model(settings: &ModelSettings) -> Result<Arc<dyn LanguageModel>> {
    if let Some(delay) = &settings.scripted {
        return Ok(Arc::new(ScriptedModel::default().slow(*delay)));
    }
    let config = OpenAiConfig {
        total_timeout: settings.timeout,
        idle_timeout: settings.idle_timeout,
        ..OpenAiConfig::new(settings.url.expose_secret(), &settings.name, settings.key.clone())
    };
    let model = OpenAiModel::new(config).map_err(|problem| anyhow!("the model: {problem}"))?;
    Ok(Arc::new(model))
}

/// Where replies of an integration go.
fn destination(one: &IntegrationSettings) -> (String, Destination) {
    let nowhere = |what: &str| Destination::Nowhere {
        problem: format!("[[integration]] `{}` has no {what}, so nobody gets its replies", one.id),
    };
    let or = |default: &str| one.base_url.clone().unwrap_or_else(|| default.to_owned());
    let secret = |token: &SecretString| one.secret.clone().unwrap_or_else(|| token.clone());
    let destination = match (one.provider, &one.reply_token) {
        (Provider::Desk, _) => Destination::Tickets,
        (Provider::Github, Some(token)) => Destination::Github {
            base_url: or("https://api.github.com"),
            token: token.clone(),
            secret: secret(token),
        },
        (Provider::Gitlab, Some(token)) => Destination::Gitlab {
            base_url: or("https://gitlab.com"),
            token: token.clone(),
            secret: secret(token),
        },
        (Provider::Github | Provider::Gitlab, None) => nowhere("reply_token_env"),
        (Provider::Standard, _) => match (&one.base_url, &one.secret) {
            (Some(url), Some(secret)) => {
                Destination::Callback { url: url.clone(), secret: secret.clone() }
            }
            _ => nowhere("base_url"),
        },
    };
    (one.id.clone(), destination)
}

/// The parts of the way out that stay here.
struct DeskInside {
    tickets: Tickets,
    outlet: Outlet,
}

#[async_trait]
impl Inside for DeskInside {
    async fn reply(
        &self,
        row: &OutboxRow,
        target: ReplyTarget,
        reply: Reply,
    ) -> Result<(), DeliverError> {
        self.tickets.deliver(row, target, &reply).await
    }

    async fn event(&self, row: &OutboxRow) -> Result<(), DeliverError> {
        self.outlet.publish(row).await
    }
}
