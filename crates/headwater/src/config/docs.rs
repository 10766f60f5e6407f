//! The settings for people: each value with where it came from, and the page of the documentation.
//!
//! Upstream: `headwater config`. Promises: no secret is part of it. `docs/settings.md` is what [`as_markdown`] gives; a test
//! compares them.

use std::fmt::Write;

use serde_json::json;

use crate::config::redact::HIDDEN;
use crate::config::{Integration, Kind, Loaded, TABLE, shown_url};

/// One line per setting: name, value, source.
pub(crate) fn as_text(loaded: &Loaded) -> String {
    let mut text = String::new();
    let names = loaded.values.iter().map(|value| value.setting.name.len()).max().unwrap_or(0);
    let shown: Vec<_> = loaded.values.iter().map(|value| (value, value.shown())).collect();
    let widths = shown.iter().map(|(_, shown)| shown.chars().count()).max().unwrap_or(0);
    for (value, shown) in &shown {
        let (name, source) = (value.setting.name, &value.source);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:names$}  {shown:widths$}  ({source})");
    }
    let place =
        loaded.file.as_ref().map_or("always there".to_owned(), |file| file.display().to_string());
    for one in &loaded.settings.integrations {
        let _ = writeln!(text, "[[integration]] {}  ({place})", describe_integration(one));
    }
    for token in &loaded.settings.tokens {
        let (name, role) = (&token.name, token.role.as_str());
        let _ = writeln!(text, "[[token]] name={name} role={role} token={HIDDEN}  ({place})");
    }
    text
}

fn describe_integration(one: &Integration) -> String {
    let mut text = format!("id={} provider={}", one.id, one.provider.as_str());
    let parts = [
        ("secret", one.secret.as_ref().map(|_| HIDDEN.to_owned())),
        ("reply_token", one.reply_token.as_ref().map(|_| HIDDEN.to_owned())),
        ("base_url", one.base_url.as_deref().map(shown_url)),
        ("bot_login", one.bot_login.clone()),
    ];
    for (name, value) in parts {
        if let Some(value) = value {
            let _ = write!(text, " {name}={value}");
        }
    }
    text
}

/// The same as JSON.
pub(crate) fn as_json(loaded: &Loaded) -> String {
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
                "base_url": one.base_url.as_deref().map(shown_url),
                "bot_login": one.bot_login,
            })
        })
        .collect();
    let tokens: Vec<_> = loaded
        .settings
        .tokens
        .iter()
        .map(|token| json!({"name": token.name, "role": token.role.as_str(), "token": HIDDEN}))
        .collect();
    let all = json!({"settings": values, "integrations": integrations, "tokens": tokens});
    format!("{all:#}")
}

/// `docs/settings.md`.
pub(crate) fn as_markdown() -> String {
    let mut text = String::from(HEAD);
    for setting in TABLE {
        let default = match setting.default {
            "" => "none".to_owned(),
            default => format!("`{default}`"),
        };
        let flag = match setting.kind {
            Kind::Secret => "no flag".to_owned(),
            _ => format!("`--{}`", setting.flag()),
        };
        let (name, variable) = (setting.name, setting.variable());
        let (meaning, allowed) = (setting.meaning, setting.kind.allowed());
        let _ = writeln!(
            text,
            "| `{name}` | {default} | {meaning} Allowed: {allowed}. | {flag}, `{variable}` |"
        );
    }
    text.push_str(TAIL);
    text
}

const HEAD: &str = "\
# Settings

<!-- Made by `headwater config --markdown` from crates/headwater/src/config/table.rs; a test compares them. -->

A setting has one name in all places. A flag goes before a variable of the environment, that before the settings file, and
that before the default. The file is `headwater.toml` in the working directory, or what `--settings FILE` or
`HEADWATER_SETTINGS` names. `http.listen` is written there as

```toml
[http]
listen = \"127.0.0.1:8080\"
```

`headwater config` prints each value and where it came from. What is wrong or unknown stops the start with exit code 2, the
name, the value and what is allowed. Passwords and other secrets are never printed nor logged.

| name | default | meaning | flag, variable |
|---|---|---|---|
";

const TAIL: &str = "
## Integrations

Each `[[integration]]` of the file is another side that sends webhooks to `/webhooks/PROVIDER/ID` and gets replies; see
[webhooks.md](webhooks.md). The integration `desk`, which tickets belong to, is always there.

| field | meaning |
|---|---|
| `id` | its name; 1 to 64 letters, digits, `-`, `_` and `.` |
| `provider` | `github`, `gitlab`, `standard` (Standard Webhooks) or `desk` |
| `secret_env` | the variable that holds the secret of its webhooks |
| `secret` | the secret itself; keep such a file from others |
| `reply_token_env` | the variable that holds the token for replies |
| `base_url` | where its API is; of a `standard` integration, where replies go |
| `bot_login` | the name under which we reply there: what it writes starts nothing |

## Tokens

Each `[[token]]` is a bearer token for HTTP (`Authorization: Bearer TOKEN`). Without any, whoever is on this machine may do
everything, and listening on an address that others can reach is refused.

| field | meaning |
|---|---|
| `name` | who presents it; stands in the audit log |
| `role` | `read`, `write` or `admin`; each includes those before it |
| `token_env` | the variable that holds the token, at least 16 letters |
| `token` | the token itself; keep such a file from others |

```toml
[[integration]]
id = \"shop\"
provider = \"github\"
secret_env = \"SHOP_WEBHOOK_SECRET\"
reply_token_env = \"SHOP_GITHUB_TOKEN\"
bot_login = \"shop-bot\"

[[token]]
name = \"operations\"
role = \"admin\"
token_env = \"OPERATIONS_TOKEN\"
```
";
