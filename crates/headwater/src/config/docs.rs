//! Prints the settings: as text, as JSON, and as the page `docs/settings.md`.
//!
//! Upstream: `headwater config`. Guarantees: no secret is printed. A test compares `docs/settings.md` with
//! [`as_markdown`].

use std::fmt::Write;

use secrecy::ExposeSecret;
use serde_json::json;

use crate::config::redact::HIDDEN;
use crate::config::sources::{SettingValue, SettingValues};
use crate::config::{
    DEFAULT_ENDPOINT, IntegrationSettings, ModelEndpointSettings, NotificationFormat,
    NotificationSettings, ResolvedSettings, TABLE, ValueType, shown_url,
};
use crate::desk::tool::ToolDefinition;

/// One line per setting: name, value, source.
pub(crate) fn as_text(loaded: &ResolvedSettings) -> String {
    let mut text = String::new();
    let names = loaded.values.iter().map(|value| value.setting.name.len()).max().unwrap_or(0);
    let shown: Vec<_> = loaded.values.iter().map(|value| (value, value.shown())).collect();
    let widths = shown.iter().map(|(_, shown)| shown.chars().count()).max().unwrap_or(0);
    for (value, shown) in &shown {
        let (name, source) = (value.setting.name, &value.source);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:names$}  {shown:widths$}  ({source})");
    }
    let location = location(loaded);
    for one in &loaded.settings.integrations {
        let from = if one.is_built_in { BUILT_IN } else { &location };
        let _ = writeln!(text, "[[integration]] {}  ({from})", describe_integration(one));
    }
    for one in further_endpoints(loaded) {
        let _ = writeln!(text, "[[model.endpoint]] {}  ({location})", describe_endpoint(one));
    }
    for one in &loaded.settings.notifications {
        let _ = writeln!(text, "[[notification]] {}  ({location})", describe_notification(one));
    }
    for tool in &loaded.settings.tools {
        let _ = writeln!(text, "[[tool]] {}  ({location})", describe_tool(tool.definition()));
    }
    for one in &loaded.settings.redactions {
        let (name, pattern) = (&one.name, &one.pattern);
        let _ = writeln!(text, "[[redaction]] name={name} pattern={pattern}  ({location})");
    }
    for token in &loaded.settings.tokens {
        let (name, role) = (&token.name, token.role.as_str());
        let of = token.integrations.as_ref().map(|all| format!(" integrations={}", all.join(",")));
        let of = of.unwrap_or_default();
        let _ =
            writeln!(text, "[[token]] name={name} role={role} token={HIDDEN}{of}  ({location})");
    }
    text
}

/// Source of what the program defines.
const BUILT_IN: &str = "built in";

/// The settings file.
fn location(loaded: &ResolvedSettings) -> String {
    loaded.file.as_ref().map_or(BUILT_IN.to_owned(), |file| file.display().to_string())
}

fn some_list(names: &[String]) -> Option<String> {
    (!names.is_empty()).then(|| names.join(","))
}

fn describe_integration(one: &IntegrationSettings) -> String {
    let mut text = format!("id={} provider={}", one.id, one.provider.as_str());
    let parts = [
        ("secret", one.secret.as_ref().map(|_| HIDDEN.to_owned())),
        ("reply_token", one.reply_token.as_ref().map(|_| HIDDEN.to_owned())),
        ("app_id", one.app.as_ref().map(|app| app.id.clone())),
        ("base_url", one.base_url.as_deref().map(shown_url)),
        ("bot_login", one.bot_login.clone()),
        ("agents", some_list(&one.agents)),
        ("author_associations", some_list(&one.author_associations)),
        ("mode", (one.mode != Default::default()).then(|| one.mode.as_str().to_owned())),
        ("models", some_list(&one.models)),
        ("rules", (!one.rules.is_empty()).then(|| one.rules.len().to_string())),
    ];
    for (name, value) in parts {
        if let Some(value) = value {
            let _ = write!(text, " {name}={value}");
        }
    }
    text
}

/// The endpoints of `[[model.endpoint]]`.
fn further_endpoints(loaded: &ResolvedSettings) -> impl Iterator<Item = &ModelEndpointSettings> {
    loaded.settings.models.iter().filter(|one| one.id != DEFAULT_ENDPOINT)
}

fn describe_endpoint(one: &ModelEndpointSettings) -> String {
    let url = shown_url(one.model.url.expose_secret());
    let key = one.model.key.as_ref().map_or(String::new(), |_| format!(" key={HIDDEN}"));
    format!("id={} url={url} name={}{key}", one.id, one.model.name)
}

fn describe_tool(one: &ToolDefinition) -> String {
    let integrations = some_list(&one.integrations);
    let integrations = integrations.map_or(String::new(), |list| format!(" integrations={list}"));
    let ToolDefinition { name, changes, approval, .. } = one;
    format!("name={name} changes={changes} approval={approval}{integrations}")
}

fn describe_notification(one: &NotificationSettings) -> String {
    let url = shown_url(one.url.expose_secret());
    let events = event_names(one).join(",");
    let how = match one.format {
        NotificationFormat::Webhook => format!("secret={HIDDEN}"),
        NotificationFormat::Slack => "format=slack".to_owned(),
    };
    format!("id={} url={url} {how} events={events}", one.config.id)
}

fn event_names(one: &NotificationSettings) -> Vec<&'static str> {
    let of_tickets = one.config.events.iter().map(|event| event.as_str());
    of_tickets.chain(one.config.desk_events.iter().map(|event| event.as_str())).collect()
}

/// Name, value, source and description of each setting.
pub(super) fn shown(values: &SettingValues) -> Vec<serde_json::Value> {
    let one = |value: &SettingValue| {
        json!({
            "name": value.setting.name,
            "value": value.shown(),
            "source": value.source.to_string(),
            "description": value.setting.description,
        })
    };
    values.iter().map(one).collect()
}

/// All settings as JSON.
pub(crate) fn as_json(loaded: &ResolvedSettings) -> String {
    let values: Vec<_> = loaded
        .values
        .iter()
        .map(|value| {
            json!({
                "name": value.setting.name,
                "value": value.shown(),
                "source": value.source.to_string(),
            })
        })
        .collect();
    let integrations: Vec<_> = loaded
        .settings
        .integrations
        .iter()
        .map(|one| {
            json!({
                "id": one.id,
                "provider": one.provider.as_str(),
                "secret": one.secret.as_ref().map(|_| HIDDEN),
                "reply_token": one.reply_token.as_ref().map(|_| HIDDEN),
                "app_id": one.app.as_ref().map(|app| &app.id),
                "base_url": one.base_url.as_deref().map(shown_url),
                "bot_login": one.bot_login,
                "models": one.models,
                "source": if one.is_built_in { BUILT_IN.to_owned() } else { location(loaded) },
            })
        })
        .collect();
    let notifications: Vec<_> = loaded
        .settings
        .notifications
        .iter()
        .map(|one| {
            json!({
                "id": one.config.id,
                "url": shown_url(one.url.expose_secret()),
                "secret": one.secret.as_ref().map(|_| HIDDEN),
                "format": one.format.as_str(),
                "events": event_names(one),
                "attempts": one.config.attempts,
            })
        })
        .collect();
    let endpoints: Vec<_> = further_endpoints(loaded)
        .map(|one| {
            json!({
                "id": one.id,
                "url": shown_url(one.model.url.expose_secret()),
                "name": one.model.name,
                "key": one.model.key.as_ref().map(|_| HIDDEN),
            })
        })
        .collect();
    let tools: Vec<_> = loaded
        .settings
        .tools
        .iter()
        .map(|tool| {
            let one = tool.definition();
            json!({
                "name": one.name,
                "description": one.description,
                "integrations": one.integrations,
                "changes": one.changes,
                "approval": one.approval,
            })
        })
        .collect();
    let tokens: Vec<_> = loaded
        .settings
        .tokens
        .iter()
        .map(|token| {
            json!({
                "name": token.name, "role": token.role.as_str(), "token": HIDDEN,
                "integrations": token.integrations.as_deref(),
            })
        })
        .collect();
    let redactions: Vec<_> = loaded
        .settings
        .redactions
        .iter()
        .map(|one| json!({"name": one.name, "pattern": one.pattern}))
        .collect();
    let all = json!({
        "settings": values, "integrations": integrations, "endpoints": endpoints,
        "notifications": notifications, "redactions": redactions, "tools": tools, "tokens": tokens,
    });
    format!("{all:#}")
}

/// The content of `docs/settings.md`.
pub(crate) fn as_markdown() -> String {
    let mut text = String::from(HEAD);
    for setting in TABLE {
        let default = match setting.default {
            "" => "none".to_owned(),
            default => format!("`{default}`"),
        };
        let flag = match setting.value_type {
            ValueType::Secret => "no flag".to_owned(),
            _ => format!("`--{}`", setting.flag()),
        };
        let (name, variable) = (setting.name, setting.variable());
        let (description, allowed) = (setting.description, setting.value_type.allowed());
        let _ = writeln!(
            text,
            "| `{name}` | {default} | {description} Allowed: {allowed}. | {flag}, `{variable}` |"
        );
    }
    text.push_str(TAIL);
    text
}

const HEAD: &str = "\
# Settings

<!-- Generated by `headwater config --markdown` from crates/headwater/src/config/table.rs; a test compares them. -->

A setting has the same name everywhere. Precedence: command line flag, environment variable, settings file, default. The
settings file is `headwater.toml` in the working directory; `--settings FILE` or `HEADWATER_SETTINGS` selects another one.
In the file, `http.listen` is written as

```toml
[http]
listen = \"127.0.0.1:8080\"
```

`headwater config` prints each value and its source. An invalid or unknown setting stops the process at startup with exit
code 2; the message names the setting, its value and the allowed values. Secrets are never printed or logged.

| name | default | description | flag, variable |
|---|---|---|---|
";

const TAIL: &str = "
## Integrations

Each `[[integration]]` section defines a system that sends webhooks to `/webhooks/PROVIDER/ID` and receives replies; see
[webhooks.md](webhooks.md). The integration `desk`, to which tickets belong, is built in.

| field | description |
|---|---|
| `id` | unique id; 1 to 64 letters, digits, `-`, `_` and `.` |
| `provider` | `github`, `gitlab`, `standard` (Standard Webhooks), `desk`, or a provider of your own program; see [desk.md](desk.md#write-a-custom-provider) |
| `secret_env` | variable with the webhook signing secret |
| `secret` | the secret itself; restrict access to the file |
| `reply_token_env` | variable with the token for sending replies |
| `app_id`, `app_key_env` | only for `github`, instead of `reply_token_env`: a GitHub App posts the replies, with its id and the variable with its private key (PEM); see [webhooks.md](webhooks.md#a-github-app) |
| `installation_id` | installation of that App; default: the one that sent the webhook |
| `base_url` | base URL of the API; for `standard`, the callback URL of replies |
| `bot_login` | login under which replies are posted; its own comments are ignored |
| `agents` | logins of people of your team; who of them answers takes the issue over. On GitHub, owners, members and collaborators are agents without this |
| `author_associations` | only for `github`: messages of authors with another association are ignored, such as `[\"OWNER\", \"MEMBER\", \"COLLABORATOR\", \"CONTRIBUTOR\"]`; empty: all are handled |
| `models` | ids of the model endpoints that answer, in the order in which they are tried, such as `[\"default\", \"spare\"]`; default: all; see [Model endpoints](#model-endpoints) |
| `mode` | what becomes of an answer: `auto` (posted, the default), `draft` (posted when a person approves it) or `note` (never posted); see [desk.md](desk.md#a-person-in-the-loop) |

`[[integration.rule]]` sections below an integration choose another mode. The first rule whose conditions all hold decides:

| field | description |
|---|---|
| `mode` | `auto`, `draft` or `note` |
| `author_associations` | the author of the newest message has one of these associations (GitHub) |
| `first_contact` | `true`: the desk has not answered in this conversation before; `false`: it has |
| `tools` | the model called one of these tools: `search_tickets`, `close_ticket`, `hand_over`, or one of a `[[tool]]` section |
| `words` | a new message of a user contains one of these texts, in any case |
| `hours` | hours of the day in UTC, such as `22-6` |

## Model endpoints

The settings `model.url`, `model.name` and so on define the model endpoint `default`. Each `[[model.endpoint]]` section defines a further one. If a call of one
fails, the run goes on with the next one: first `default`, then the sections in their order, unless `models` of the integration says otherwise. Beside sections,
`default` takes part only if `model.url` is set. See [desk.md](desk.md#several-models).

| field | description |
|---|---|
| `id` | unique id; 1 to 64 letters, digits, `-`, `_` and `.`; not `default` |
| `url` | like `model.url` |
| `name` | name of the model at that endpoint |
| `key_env` | variable with the API key |
| `key` | the key itself; restrict access to the file |
| `timeout`, `idle_timeout` | like `model.timeout` and `model.idle_timeout`, which are the defaults |
| `price_in`, `price_out` | prices of a million tokens; default: unknown |

## Tools

Each `[[tool]]` section defines an HTTP endpoint that the model may call; see [desk.md](desk.md#tools).

| field | description |
|---|---|
| `name` | unique name, as the model sees it: 1 to 64 letters, digits, `-` and `_`; not that of a built-in tool |
| `description` | what it does, for the model |
| `parameters` | JSON Schema of the arguments, with `type = \"object\"`: a table, or JSON as text; default: no arguments |
| `method` | `GET` (default), `POST`, `PUT`, `PATCH` or `DELETE` |
| `url` | URL; `{name}` in its path or query is replaced by the percent-encoded argument `name`. Also `{idempotency_key}`, `{issue.integration}`, `{issue.project}`, `{issue.id}` and `{issue.user}`, which the model cannot choose |
| `body` | JSON, as a table or text, with the same variables in its strings; a string that is one variable becomes its value. Default: the arguments as JSON, or nothing with `GET` and `DELETE` |
| `timeout` | limit of one call, `100ms` to `60s`; default: `10s` |
| `response_bytes_max` | maximum bytes of a response, at most 65536; default: 16384 |
| `allowed_hosts` | hosts to which requests may go; default: the host of `url`. A redirect is followed only to these, and only by a call that changes nothing |
| `integrations` | ids of the integrations whose issues may use it; default: all |
| `changes` | whether a call changes something; default: `true`, with `GET` `false` |
| `approval` | `true`: a person has to approve each call; default: `false` |
| `idempotency_header` | header with the idempotency key of a call, such as `Idempotency-Key`, if the endpoint carries out each key once |
| `lookup_url` | URL that tells what the call with `{idempotency_key}` has done: 404 if nothing |

`[[tool.header]]` sections below a tool define headers:

| field | description |
|---|---|
| `name` | name of the header |
| `secret_env` | variable with its value |
| `value` | the value itself; restrict access to the file if it is secret |
| `prefix` | text before the value, such as `Bearer ` |

## Notifications

Each `[[notification]]` section forwards events to a receiver, as signed webhooks (Standard Webhooks) or as messages of Slack; see
[desk.md](desk.md#notifications).

| field | description |
|---|---|
| `id` | unique id; 1 to 64 letters, digits, `-`, `_` and `.`; the consumer group is `notification:ID` |
| `url` | where to send the events |
| `format` | `webhook` (default) or `slack`: `{\"text\": ...}` for an incoming webhook of Slack, without a secret |
| `secret_env` | variable with the signing secret |
| `secret` | the secret itself; restrict access to the file |
| `events` | which of `TICKET_CREATED`, `MESSAGE_RECEIVED`, `AI_RESPONSE_GENERATED`, `TICKET_CLOSED` (default: these four), `DRAFT_WAITING`, `DRAFT_OVERDUE`, `ISSUE_HANDED_OVER` |
| `attempts` | failed attempts until an event becomes a dead letter, 1 to 1000; default: 50, which take several hours |
| `timeout` | timeout of one attempt, at most `10s`, which is the default |
| `from` | `now` (default): events after the first start with this id; `beginning`: also those that the stream still has |

## Redactions

Each `[[redaction]]` section is a pattern of text that no model sees, beside those of `desk.redact`; see [desk.md](desk.md#redaction).

| field | description |
|---|---|
| `name` | unique name, in placeholders: `order` gives `[ORDER_1]`; 1 to 32 of `a-z`, `0-9` and `_` |
| `pattern` | a regular expression of the [regex](https://docs.rs/regex) crate, at most 1000 bytes; there may be 32 sections |

## Tokens

Each `[[token]]` section defines a bearer token for the HTTP API (`Authorization: Bearer TOKEN`). Without tokens, every
local client has the role `admin`, the server only listens on loopback addresses, and requests that come through a proxy are
rejected: those with a header of a proxy, and those in HTTP/1.0, which older versions of nginx use for `proxy_pass`. `/health` and
the pages below it are answered all the same. A proxy that sends HTTP/1.1 and adds no header cannot be recognized: configure a token
before you put any proxy in front.

| field | description |
|---|---|
| `name` | name of the principal, as in the audit log |
| `role` | `read`, `write` or `admin`; each includes those before it |
| `token_env` | variable with the token, at least 16 characters |
| `token` | the token itself; restrict access to the file |
| `integrations` | ids of the integrations whose issues, drafts, replies, sessions and prompts the token can see and change, such as `[\"shop\"]`; tickets belong to `desk`. Everything else, such as topics, reports and metrics, is refused. Default: no limit |

```toml
[[integration]]
id = \"shop\"
provider = \"github\"
secret_env = \"SHOP_WEBHOOK_SECRET\"
reply_token_env = \"SHOP_GITHUB_TOKEN\"
bot_login = \"shop-bot\"
models = [\"spare\"]

[[model.endpoint]]
id = \"spare\"
url = \"https://models.example/v1\"
name = \"some-model\"
key_env = \"SPARE_KEY\"

[[tool]]
name = \"order_status\"
description = \"Status of an order of the user.\"
url = \"https://shop.example/orders/{order}?user={issue.user}\"
parameters = { type = \"object\", required = [\"order\"], properties = { order = { type = \"string\" } } }

[[tool.header]]
name = \"Authorization\"
prefix = \"Bearer \"
secret_env = \"SHOP_TOKEN\"

[[notification]]
id = \"crm\"
url = \"https://crm.example/hooks/tickets\"
secret_env = \"CRM_SECRET\"
events = [\"TICKET_CREATED\", \"TICKET_CLOSED\"]

[[redaction]]
name = \"order\"
pattern = 'ORD-[0-9]{6}'

[[token]]
name = \"operations\"
role = \"admin\"
token_env = \"OPERATIONS_TOKEN\"
```
";
