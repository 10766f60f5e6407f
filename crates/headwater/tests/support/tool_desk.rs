//! A desk on the real binary with an HTTP tool for every way of recovery.

use anyhow::{Context, Result};
use headwater_testkit::Database;
use serde_json::{Value, json};

use super::desk::{all_idle, answered, by, open};
use super::tool_service::{CallPlan, ToolModel, ToolService};
use super::{Server, ServerDir};

pub(crate) const SQLITE: &str = "sqlite:headwater-data/headwater.db";

/// Tools for every way of recovery, on this service.
fn settings(service: &str) -> String {
    let order = r#"parameters = { type = "object", required = ["order"], additionalProperties = false, properties = { order = { type = "string" } } }"#;
    let refund = |name: &str, more: &str| {
        format!(
            "[[tool]]\nname = \"{name}\"\ndescription = \"Refunds an order.\"\nmethod = \"POST\"\n\
             url = \"{service}/refunds\"\n{order}\ntimeout = \"1s\"\n{more}\n"
        )
    };
    let bad = |kind: &str| {
        format!(
            "[[tool]]\nname = \"{kind}\"\ndescription = \"Bad.\"\nurl = \"{service}/bad/{kind}\"\ntimeout = \"500ms\"\n"
        )
    };
    let reference = "body = { order = \"{order}\", reference = \"{idempotency_key}\" }";
    let tools = [
        refund("repeated", "idempotency_header = \"Idempotency-Key\""),
        refund(
            "looked_up",
            &format!("{reference}\nlookup_url = \"{service}/refunds/{{idempotency_key}}\""),
        ),
        refund("personal", reference),
        refund("approved", "idempotency_header = \"Idempotency-Key\"\napproval = true"),
        format!(
            "[[tool]]\nname = \"status\"\ndescription = \"Status of an order.\"\nurl = \"{service}/orders/{{order}}?user={{issue.user}}\"\n{order}\n\
             [[tool.header]]\nname = \"Authorization\"\nprefix = \"Bearer \"\nsecret_env = \"SHOP_TOKEN\"\n"
        ),
        format!(
            "[[tool]]\nname = \"foreign\"\ndescription = \"Of another integration.\"\nurl = \"{service}/foreign\"\nintegrations = [\"shop\"]\n"
        ),
        bad("html"),
        bad("broken"),
        bad("huge"),
        bad("never"),
        bad("redirect"),
        bad("moved"),
        bad("error"),
    ];
    format!(
        "[[integration]]\nid = \"shop\"\nprovider = \"standard\"\nsecret = \"c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0\"\n{}",
        tools.join("\n")
    )
}

/// A desk with these tools, its model and its service.
pub(crate) struct ToolDesk {
    pub(crate) dir: ServerDir,
    pub(crate) model: ToolModel,
    pub(crate) service: ToolService,
    database: String,
}

impl ToolDesk {
    pub(crate) async fn new(plans: &'static [CallPlan], database: &str) -> Result<Self> {
        Self::with_settings(plans, database, "").await
    }

    /// With more settings than the tools.
    pub(crate) async fn with_settings(
        plans: &'static [CallPlan],
        database: &str,
        more: &str,
    ) -> Result<Self> {
        let (model, model_url) = ToolModel::start(plans).await?;
        let (service, url) = ToolService::start().await?;
        let dir = ServerDir::new()?.settings(&format!("{more}{}", settings(&url)))?;
        let dir =
            dir.variable("SHOP_TOKEN", "a shop token").variable("HEADWATER_MODEL_URL", &model_url);
        let dir = dir.variable("HEADWATER_MODEL_NAME", "m");
        Ok(Self { dir, model, service, database: database.to_owned() })
    }

    pub(crate) fn serve(&self) -> Result<Server> {
        self.serve_with(&[])
    }

    pub(crate) fn serve_with(&self, more: &[&str]) -> Result<Server> {
        let given = ["--issue-quiet", "10ms", "--worker-claim", "1s", "--sweep-every", "200ms"];
        let given = [&given[..], &["--analytics-path", "", "--database-url", &self.database], more];
        self.dir.serve(&given.concat())
    }
}

/// Opens a ticket; its id and its issue.
pub(crate) async fn ask(server: &Server, content: &str) -> Result<(String, i64)> {
    let created = open(server, content).await?;
    let ticket = created["ticket_id"].as_str().context("a ticket")?.to_owned();
    Ok((ticket, created["issue_id"].as_i64().context("an issue")?))
}

/// The only answer of a ticket.
pub(crate) async fn only_answer(server: &Server, ticket: &str) -> Result<String> {
    answered(server, ticket, 1).await?;
    all_idle(server).await?;
    let shown = answered(server, ticket, 1).await?;
    let answers = by(&shown, "assistant");
    assert_eq!(answers.len(), 1, "{shown:#}");
    Ok(answers[0].to_owned())
}

/// The effects of an issue, oldest first.
pub(crate) async fn effects(server: &Server, issue: i64) -> Result<Vec<Value>> {
    let (_, page) = server.get(&format!("/api/v1/effects?issue_id={issue}")).await?;
    let mut effects = page["effects"].as_array().cloned().context("effects")?;
    effects.reverse();
    Ok(effects)
}

/// The pending draft of an issue.
pub(crate) async fn planned(server: &Server, issue: i64) -> Result<Value> {
    let path = format!("/api/v1/drafts?status=pending&issue_id={issue}");
    let page = server.until(&path, |_, body| body["drafts"] != json!([])).await?;
    Ok(page["drafts"][0].clone())
}

pub(crate) async fn decide(
    server: &Server,
    draft: &Value,
    verb: &str,
    body: Value,
) -> Result<(u16, Value)> {
    server.post(&format!("/api/v1/drafts/{}/{verb}", draft["id"]), &body).await
}

/// Ends the database sessions of a killed process, and its leases of outbox rows.
pub(crate) fn end_sessions(database: Option<&Database>) -> Result<()> {
    let Some(database) = database else { return Ok(()) };
    database.query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> 'gate'",
    )?;
    database.query("UPDATE outbox SET due_at = now() WHERE status <> 'delivered'").map(drop)
}
