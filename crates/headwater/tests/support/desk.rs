//! Helpers for tickets over HTTP.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::Server;

pub(crate) fn new_ticket(content: &str) -> Value {
    json!({"title": "Parcel", "content": content, "user_id": "ada"})
}

/// The messages of an author in a ticket.
pub(crate) fn by<'a>(ticket: &'a Value, author: &str) -> Vec<&'a str> {
    let messages = ticket["messages"].as_array().into_iter().flatten();
    let mine = messages.filter(|message| message["author"] == author);
    mine.filter_map(|message| message["content"].as_str()).collect()
}

/// Opens a ticket.
pub(crate) async fn open(server: &Server, content: &str) -> Result<Value> {
    let (status, body) = server.post("/api/v1/tickets", &new_ticket(content)).await?;
    ensure!(status == 201, "{status} {body}");
    Ok(body)
}

/// Waits until a ticket has at least `answers` answers.
pub(crate) async fn answered(server: &Server, ticket_id: &str, answers: usize) -> Result<Value> {
    let path = format!("/api/v1/tickets/{ticket_id}");
    let is_answered =
        |status: u16, body: &Value| status == 200 && by(body, "assistant").len() >= answers;
    server.until(&path, is_answered).await
}

/// Waits until all issues are idle; afterwards no run can add a reply.
pub(crate) async fn all_idle(server: &Server) -> Result<()> {
    for status in ["queued", "processing", "queued"] {
        let path = format!("/api/v1/issues?status={status}");
        server.until(&path, |_, body| body["issues"] == json!([])).await?;
    }
    Ok(())
}
