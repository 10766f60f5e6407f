//! The receivers of `[[notification]]` sections: signed webhooks, and incoming webhooks of Slack.
//!
//! Upstream: `notifications`, which repeats what fails. Downstream: the receiver, over HTTP.
//! Guarantees: links that decide about drafts are made when a notification is sent, and are stored nowhere; they begin to expire
//! then. Text of users cannot become markup of Slack: its control characters are escaped.

use async_trait::async_trait;
use headwater_issue::DeliverError;
use headwater_stream::clock::{Clock, SystemClock};
use reqwest::Client;
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::desk::draft_links::{DraftLinks, DraftVersion, LinkAction};
use crate::http_client;
use crate::outbound::notifications::{DeskNotification, NotificationSink, TicketNotification};
use crate::outbound::{callback, http};
use crate::text;
use crate::tickets::TicketEvent;
use crate::tickets::desk_events::{DeskEvent, DeskEventType};

/// Maximum bytes of a text of a user in a message to Slack.
const SLACK_TEXT_BYTES_MAX: usize = 2000;

/// Addresses that notifications contain.
#[derive(Clone, Debug, Default)]
pub(crate) struct NotificationLinks {
    /// URL of the server; `None` if it is unknown.
    pub(crate) base_url: Option<String>,
    /// Links that decide about drafts, if they are enabled.
    pub(crate) draft_links: Option<DraftLinks>,
}

impl NotificationLinks {
    /// The page of the console about an event.
    fn page(&self, event: &DeskEvent) -> Option<String> {
        let base = self.base_url.as_deref()?.trim_end_matches('/');
        Some(match (event.event_type, event.ticket_id) {
            (DeskEventType::IssueHandedOver, Some(ticket)) => {
                format!("{base}/console/tickets/{ticket}")
            }
            (DeskEventType::IssueHandedOver, None) => {
                format!("{base}/console/issues/{}", event.issue_id)
            }
            _ => format!("{base}/console/drafts"),
        })
    }

    /// The links that approve and reject the draft of an event.
    fn decisions(&self, event: &DeskEvent) -> Option<[String; 2]> {
        let (links, draft) = (self.draft_links.as_ref()?, event.draft?);
        let draft =
            DraftVersion { number: draft.id, draft_id: draft.draft_id, version: draft.version };
        let now = SystemClock.now();
        Some([LinkAction::Approve, LinkAction::Reject].map(|action| links.url(draft, action, now)))
    }
}

/// Sends events as signed requests (Standard Webhooks).
pub(crate) struct WebhookSink {
    client: Client,
    url: String,
    secret: SecretString,
    links: NotificationLinks,
}

impl WebhookSink {
    /// Sends to this URL, signed with this secret.
    pub(crate) fn new(
        url: &str,
        secret: &SecretString,
        links: NotificationLinks,
    ) -> Result<Self, String> {
        let (url, secret) = (url.to_owned(), secret.clone());
        Ok(Self { client: http_client::build()?, url, secret, links })
    }

    async fn send(&self, id: &str, body: &Value) -> Result<(), DeliverError> {
        let request = callback::signed(&self.client, &self.url, &self.secret, id, body.to_string());
        http::send(&self.client, request).await.map(drop)
    }
}

#[async_trait]
impl NotificationSink for WebhookSink {
    async fn notify(&self, notification: &TicketNotification) -> Result<(), DeliverError> {
        let TicketNotification { id, event } = notification;
        let body = json!({
            "type": event.event_type.as_str(),
            "timestamp": event.payload.timestamp,
            "data": event,
        });
        self.send(id, &body).await
    }

    async fn notify_desk(&self, notification: &DeskNotification) -> Result<(), DeliverError> {
        let DeskNotification { id, event } = notification;
        let mut body = json!({
            "type": event.event_type.as_str(), "timestamp": event.timestamp, "data": event,
        });
        if let Some(page) = self.links.page(event) {
            body["data"]["link"] = json!(page);
        }
        if let Some([approve, reject]) = self.links.decisions(event) {
            body["data"]["approve_link"] = json!(approve);
            body["data"]["reject_link"] = json!(reject);
        }
        self.send(id, &body).await
    }
}

/// Sends events as messages to an incoming webhook of Slack, or of a chat that accepts its format.
pub(crate) struct SlackSink {
    client: Client,
    url: String,
    links: NotificationLinks,
}

impl SlackSink {
    /// Sends to this URL, which is the secret.
    pub(crate) fn new(url: &str, links: NotificationLinks) -> Result<Self, String> {
        Ok(Self { client: http_client::build()?, url: url.to_owned(), links })
    }

    async fn send(&self, text: &str) -> Result<(), DeliverError> {
        let body = json!({ "text": text }).to_string();
        let request = self.client.post(&self.url).header("content-type", "application/json");
        http::send(&self.client, request.body(body)).await.map(drop)
    }
}

#[async_trait]
impl NotificationSink for SlackSink {
    async fn notify(&self, notification: &TicketNotification) -> Result<(), DeliverError> {
        self.send(&ticket_text(&notification.event)).await
    }

    async fn notify_desk(&self, notification: &DeskNotification) -> Result<(), DeliverError> {
        let (event, links) = (&notification.event, &self.links);
        self.send(&desk_text(event, links.page(event), links.decisions(event))).await
    }
}

/// Slack reads `&`, `<` and `>`; everything else of a user is shown as text.
fn escaped(text: &str) -> String {
    let shown = text::cut(text, SLACK_TEXT_BYTES_MAX);
    let cut = if shown.len() < text.len() { " …" } else { "" };
    format!("{shown}{cut}").replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn ticket_text(event: &TicketEvent) -> String {
    let title = event.payload.title.as_deref().map(|title| format!(" {}", escaped(title)));
    let content = escaped(&event.payload.content);
    let head =
        format!("{} {}{}", event.event_type.as_str(), event.ticket_id, title.unwrap_or_default());
    if content.is_empty() { head } else { format!("{head}\n{content}") }
}

fn desk_text(event: &DeskEvent, page: Option<String>, decisions: Option<[String; 2]>) -> String {
    let issue = match event.ticket_id {
        Some(ticket) => format!("Ticket {ticket}"),
        None => format!(
            "Issue {} of {} ({})",
            escaped(&event.external_issue_id),
            escaped(&event.external_project_id),
            escaped(&event.integration)
        ),
    };
    let draft = event.draft.map_or(0, |draft| draft.id);
    let what = match event.event_type {
        DeskEventType::DraftWaiting => format!("draft {draft} waits for a decision"),
        DeskEventType::DraftOverdue => format!("draft {draft} waits for a decision too long"),
        DeskEventType::IssueHandedOver => "handed over to a person".to_owned(),
    };
    let reason = event
        .reason
        .as_deref()
        .map_or(String::new(), |reason| format!("\nReason: {}", escaped(reason)));
    let decisions = decisions.map_or(String::new(), |[approve, reject]| {
        format!("\n<{approve}|Approve> or <{reject}|reject>")
    });
    let page = page.map_or(String::new(), |page| format!("\n{page}"));
    format!("{issue}: {what}{reason}{decisions}{page}")
}

#[cfg(test)]
mod tests {
    use headwater_issue::IssueId;
    use headwater_stream::clock::Timestamp;

    use super::*;
    use crate::tickets::desk_events::EventIssue;

    #[test]
    fn text_of_users_is_no_markup_in_slack() {
        let issue = EventIssue {
            id: IssueId(7),
            integration: "shop",
            external_project_id: "acme/shop",
            external_issue_id: "42",
        };
        let reason = "<!channel> & <https://evil.example|click>";
        let event = DeskEvent::handed_over(issue, reason, Timestamp::from_millis(0));
        let links = NotificationLinks {
            base_url: Some("https://desk.example/".to_owned()),
            draft_links: None,
        };
        let text = desk_text(&event, links.page(&event), links.decisions(&event));
        assert_eq!(
            text,
            "Issue 42 of acme/shop (shop): handed over to a person\n\
             Reason: &lt;!channel&gt; &amp; &lt;https://evil.example|click&gt;\n\
             https://desk.example/console/issues/7"
        );
    }
}
