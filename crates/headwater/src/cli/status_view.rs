//! The head of `status` and `top`: servers, issues, outbox, workers, model and budget, as lines.
//!
//! Upstream: `verbs/status.rs` and `top_view.rs`. Guarantees: the lines are escaped for the terminal.

use serde_json::Value;

use crate::cli::in_process::NO_DATABASE;
use crate::cli::output::{self, heading, plain};
use crate::cli::units::show_milliseconds;
use crate::text::counted;

/// Width of the labels.
const LABEL: usize = 8;

/// The lines of a response of `/status`.
pub(super) fn lines(status: &Value) -> Vec<String> {
    let health = word(status, "health");
    let shown = output::state_color(&health).apply_to(&health);
    let mut lines = vec![line("health", &format!("{shown}, version {}", word(status, "version")))];
    // A server has a worker. Without one, data in memory stands for data that does not exist.
    let has_workers = status["workers"].as_array().is_some_and(|workers| !workers.is_empty());
    for name in ["streams", "database"] {
        let server = &status[name];
        let is_in_memory =
            matches!(word(server, "address").as_str(), "embedded memory" | NO_DATABASE);
        if is_in_memory && !has_workers {
            lines.push(line(name, "none yet; `headwater serve` creates it"));
            continue;
        }
        let state = if server["ok"] == true { "ok" } else { "unreachable" };
        let problem = server["problem"].as_str().map(|problem| format!(": {}", plain(problem)));
        let shown = output::state_color(state).apply_to(state);
        let address = word(server, "address");
        lines.push(line(name, &format!("{shown}, {address}{}", problem.unwrap_or_default())));
    }
    let count = |of: &str, name: &str| status[of][name].as_u64().unwrap_or(0);
    if status["issues"].is_object() {
        let [queued, processing, quarantined] =
            ["queued", "processing", "quarantined"].map(|name| count("issues", name));
        let mut text =
            format!("{queued} queued, {processing} processing, {quarantined} quarantined");
        if quarantined > 0 {
            text = format!("{text} (`headwater issue list --status quarantined`)");
        }
        lines.push(line("issues", &text));
    }
    if status["outbox"].is_object() {
        let (pending, dead) = (count("outbox", "pending"), count("outbox", "dead"));
        let mut text = format!("{pending} pending, {dead} dead");
        if pending > 0 {
            text = format!("{text}, oldest {}", show_milliseconds(count("outbox", "lag_ms")));
        }
        if dead > 0 {
            text = format!("{text} (`headwater outbox list`)");
        }
        lines.push(line("outbox", &text));
    }
    if let Some(workers) = status["workers"].as_array() {
        let claims = workers.iter().filter_map(|worker| worker["claims"].as_u64()).sum();
        let claims = counted(claims, "issue", "issues");
        let text = match workers.len() {
            0 => "none active; start `headwater serve` or `headwater worker`".to_owned(),
            active => format!("{active} active, processing {claims}"),
        };
        lines.push(line("workers", &text));
    }
    let models =
        status["models"].as_array().map_or(std::slice::from_ref(&status["model"]), |all| all);
    for model in models {
        let model = [word(model, "url"), word(model, "name")];
        lines.push(line("model", model.join(" ").trim_end()));
    }
    for budget in status["budget"].as_array().into_iter().flatten() {
        let (used, max) = (number(budget, "used_tokens"), number(budget, "max_tokens"));
        let percent = (used * 100).checked_div(max).unwrap_or(100);
        let integration = word(budget, "integration");
        let text = format!("{integration}: {used} of {max} tokens today ({percent}%)");
        lines.push(line("budget", &text));
    }
    lines
}

fn line(label: &str, text: &str) -> String {
    format!("{}  {text}", heading(&format!("{label:<LABEL$}")))
}

fn word(value: &Value, name: &str) -> String {
    plain(value[name].as_str().unwrap_or_default())
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_status_is_a_few_lines_that_name_what_to_do() {
        let status = json!({
            "health": "not ready", "version": "1.0.0",
            "streams": {"address": "redis a:1", "ok": false, "problem": "refused\u{1b}"},
            "database": {"address": "sqlite:x", "ok": true},
            "issues": {"queued": 2, "processing": 0, "quarantined": 1},
            "outbox": {"pending": 3, "dead": 1, "lag_ms": 90_000},
            "workers": [], "model": {"url": "scripted:", "name": ""},
            "budget": [{"integration": "desk", "used_tokens": 50, "max_tokens": 200}],
        });
        let expected = [
            "health    not ready, version 1.0.0",
            "streams   unreachable, redis a:1: refused\\u001b",
            "database  ok, sqlite:x",
            "issues    2 queued, 0 processing, 1 quarantined (`headwater issue list --status quarantined`)",
            "outbox    3 pending, 1 dead, oldest 1.5 m (`headwater outbox list`)",
            "workers   none active; start `headwater serve` or `headwater worker`",
            "model     scripted:",
            "budget    desk: 50 of 200 tokens today (25%)",
        ];
        assert_eq!(lines(&status), expected);
    }
}
