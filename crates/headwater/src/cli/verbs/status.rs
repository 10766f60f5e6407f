//! `headwater status`: health, topics with lag, issues, workers, outbox, model and budget on one screen.
//!
//! Upstream: `cli/mod.rs`. Downstream: the routes `/status`, topics and groups. Guarantees: read-only.

use serde_json::{Value, json};

use crate::cli::ConnectionArgs;
use crate::cli::api_client::ApiClient;
use crate::cli::output::{self, cell};
use crate::cli::progress;
use crate::cli::status_view;
use crate::cli::top_view::TopSnapshot;
use crate::cli::verbs::top;
use crate::exit::CliError;

/// Show the status of the system on one screen.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
}

impl StatusArgs {
    pub(in crate::cli) async fn run(&self, client: &ApiClient) -> Result<(), CliError> {
        let style = self.connection.style();
        let reading = async {
            let status = client.get("/status", &[]).await?;
            // Without streams there are no topics to read.
            let snapshot = match status["streams"]["ok"].as_bool() {
                Some(true) => top::snapshot(client, &[]).await?,
                _ => TopSnapshot::empty(),
            };
            Ok::<_, CliError>((status, snapshot))
        };
        let (mut status, snapshot) = progress::waiting("reading the status", reading).await?;
        if style.json {
            let groups = |topic: &Value| {
                let is_of = |group: &&Value| group["topic"] == topic["name"];
                snapshot.groups.iter().filter(is_of).map(group_counts).collect::<Vec<_>>()
            };
            let topics = snapshot.topics.iter().map(|topic| {
                let mut counts = topic_counts(topic);
                counts["groups"] = json!(groups(topic));
                counts
            });
            status["topics"] = topics.collect();
            return output::object(style, &status);
        }
        status_view::lines(&status).iter().try_for_each(|line| output::exact(line))?;
        if snapshot.topics.is_empty() {
            return Ok(());
        }
        output::exact("")?;
        output::print_table(&table(&snapshot), style.width(), "")?;
        match snapshot.left_out {
            true => output::exact(&top::left_out()),
            false => Ok(()),
        }
    }
}

fn topic_counts(topic: &Value) -> Value {
    json!({"name": topic["name"], "length": topic["length"], "delayed": topic["delayed"], "dead_letters": topic["dead_letters"]})
}

fn group_counts(group: &Value) -> Value {
    let members = group["members"].as_array().map_or(0, Vec::len);
    json!({"group": group["group"], "lag": group["lag"], "pending": group["pending"], "members": members})
}

/// One row for each group; a topic without groups has one row.
fn table(snapshot: &TopSnapshot) -> Vec<Vec<String>> {
    let headings = ["TOPIC", "LENGTH", "DEAD LETTERS", "GROUP", "LAG", "PENDING", "MEMBERS"];
    let mut rows = vec![headings.map(str::to_owned).to_vec()];
    for topic in &snapshot.topics {
        let counts = topic_counts(topic);
        let start = ["name", "length", "dead_letters"].map(|name| cell(name, &counts[name]));
        let groups = snapshot.groups.iter().filter(|group| group["topic"] == topic["name"]);
        let groups: Vec<Value> = groups.map(group_counts).collect();
        if groups.is_empty() {
            rows.push(start.to_vec());
        }
        for group in groups {
            let end = ["group", "lag", "pending", "members"].map(|name| cell(name, &group[name]));
            rows.push([start.clone().to_vec(), end.to_vec()].concat());
        }
    }
    rows
}
