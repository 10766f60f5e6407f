//! `headwater audit`: consistency check of all events, and the log of changes.

use clap::Subcommand;
use headwater_issue::limits::CONSISTENCY_PAGE;
use serde_json::{Value, json};

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, OutputRows};
use crate::cli::progress;
use crate::cli::units::{limit, moment};
use crate::exit::CliError;

/// Maximum number of inconsistent issues that are listed.
const DISCREPANCIES_MAX: usize = 1000;

/// Check consistency or list changes.
#[derive(Debug, clap::Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(subcommand)]
    command: Option<AuditCommand>,
}

#[derive(Debug, Subcommand)]
enum AuditCommand {
    /// Check that recorded = processed + pending + quarantined for all events (default).
    Books {
        /// Resume a check that failed: skip the issues up to this id.
        #[arg(long, value_name = "ISSUE_ID")]
        after: Option<i64>,
    },
    /// List changes made over HTTP and by commands, newest first.
    Log {
        /// Only those of this caller: the name of a token, or cli:USER.
        #[arg(long, value_name = "NAME")]
        caller: Option<String>,
        /// Only those whose path contains this text, such as `purge`.
        #[arg(long, value_name = "TEXT")]
        path: Option<String>,
        /// Only those of this time or later: 2026-11-15T10:00:00Z, or an age such as 1h.
        #[arg(long, value_name = "TIME", value_parser = moment)]
        from: Option<String>,
        /// Maximum number of entries.
        #[arg(long, value_name = "N", default_value = "100", value_parser = limit)]
        limit: usize,
    },
}

impl AuditArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        match self.command.as_ref().unwrap_or(&AuditCommand::Books { after: None }) {
            AuditCommand::Books { after } => {
                let checking = check_books(client, *after);
                let (books, failure) = progress::waiting("checking all events", checking).await;
                if books["issues"] != 0 || failure.is_none() {
                    output::object(style, &books)?;
                }
                if let (Some(_), Some(last)) = (&failure, books["next_cursor"].as_i64()) {
                    output::note(&format!(
                        "checked up to issue {last}; `headwater audit books --after {last}` resumes the check"
                    ));
                }
                match (failure, &books["balances"]) {
                    (Some(failure), _) => Err(failure),
                    (None, Value::Bool(true)) => Ok(()),
                    _ => Err(CliError::new("events are not fully accounted for; see above")),
                }
            }
            AuditCommand::Log { caller, path, from, limit } => {
                let filter = [("caller", caller), ("path", path), ("from", from)];
                let filter =
                    filter.into_iter().filter_map(|(name, value)| Some((name, value.clone()?)));
                let filter: Vec<_> = filter.collect();
                let columns = &[
                    ("AT", "/at"),
                    ("CALLER", "/caller"),
                    ("ROLE", "/role"),
                    ("CLIENT", "/client"),
                    ("METHOD", "/method"),
                    ("PATH", "/path"),
                    ("STATUS", "/status"),
                ];
                client
                    .show_pages(
                        OutputRows::new(style, columns),
                        "/audit",
                        &filter,
                        "entries",
                        *limit,
                    )
                    .await
            }
        }
    }
}

/// Checks the issues after `after`, page by page. Returns the totals of all checked pages, and why the check ended early, if it
/// did; `next_cursor` of the totals is where it resumes then.
pub(in crate::cli) async fn check_books(
    client: &ApiClient,
    after: Option<i64>,
) -> (Value, Option<CliError>) {
    let mut totals = json!({
        "balances": true, "issues": 0, "recorded": 0, "processed": 0, "pending": 0, "quarantined": 0,
        "discrepancies_total": 0, "discrepancies": [], "next_cursor": after,
    });
    let mut limit = CONSISTENCY_PAGE;
    loop {
        let cursor = totals["next_cursor"].as_i64().map(|cursor| ("cursor", cursor.to_string()));
        let query: Vec<_> = cursor.into_iter().chain([("limit", limit.to_string())]).collect();
        let page = match client.get("/audit/books", &query).await {
            Ok(page) => page,
            Err(failure) => return (totals, Some(failure)),
        };
        limit = headwater_issue::next_page(page["issues"].as_u64().unwrap_or(0), limit);
        add_page(&mut totals, page);
        if totals["next_cursor"].is_null() {
            return (totals, None);
        }
    }
}

/// Adds the numbers of a page to the totals, and its inconsistent issues up to [`DISCREPANCIES_MAX`].
fn add_page(totals: &mut Value, mut page: Value) {
    let Value::Object(totals) = totals else { return };
    for (name, total) in totals {
        let found = page[name.as_str()].take();
        *total = match (total.take(), found) {
            (Value::Bool(so_far), found) => Value::Bool(so_far && found == true),
            (Value::Array(mut items), Value::Array(found)) => {
                items.extend(found);
                items.truncate(DISCREPANCIES_MAX);
                Value::Array(items)
            }
            (_, found) if name == "next_cursor" => found,
            (so_far, found) => {
                json!(so_far.as_u64().unwrap_or_default() + found.as_u64().unwrap_or_default())
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_added_up() {
        let page = |issues: u64, balances: bool, next: Value| json!({"balances": balances, "issues": issues, "discrepancies": [issues], "next_cursor": next});
        let mut totals = page(1, true, json!(7));
        add_page(&mut totals, page(2, false, json!(9)));
        assert_eq!(
            totals,
            json!({"balances": false, "issues": 3, "discrepancies": [1, 2], "next_cursor": 9})
        );
        add_page(&mut totals, page(4, true, Value::Null));
        assert_eq!((&totals["balances"], &totals["next_cursor"]), (&json!(false), &Value::Null));
    }
}
