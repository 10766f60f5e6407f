//! The provider `chat`: rooms of a chat service are issues, and replies are messages in them.
//!
//! The service signs a webhook with `X-Chat-Signature`, the HMAC-SHA256 of its body in hexadecimal digits, and accepts
//! `POST /rooms/ROOM/messages` with a `client_id`: a second message with the same one is not shown.

use async_trait::async_trait;
use headwater::desk::ReplyTarget;
use headwater::desk::provider::{
    DeliverError, MappedWebhook, Provider, ProviderEvent, ProviderMessage, ProviderReply,
    ReceivedWebhook,
};
use serde_json::{Value, json};

/// The provider.
#[derive(Debug)]
pub(crate) struct Chat;

#[async_trait]
impl Provider for Chat {
    fn name(&self) -> &str {
        "chat"
    }

    async fn verify(&self, webhook: &ReceivedWebhook<'_>) -> Result<(), String> {
        let signature = webhook.header("x-chat-signature").ok_or("X-Chat-Signature is missing")?;
        let signature = hex::decode(signature)
            .map_err(|_| "X-Chat-Signature has other characters than hexadecimal digits")?;
        if webhook.has_hmac_sha256(&signature, &[webhook.body]) {
            Ok(())
        } else {
            Err("invalid signature: check that both sides use the same secret".to_owned())
        }
    }

    fn map(&self, _: &ReceivedWebhook<'_>, payload: &Value) -> Result<MappedWebhook, String> {
        let text = |name: &str| payload[name].as_str().map(str::to_owned);
        let required =
            |name: &str| text(name).ok_or_else(|| format!("`{name}` is missing in the payload"));
        if payload["event"] != "message" {
            return Ok(MappedWebhook::Ignored("only messages are handled".to_owned()));
        }
        Ok(MappedWebhook::Event(ProviderEvent {
            issue: required("room")?,
            event_type: "message".to_owned(),
            dedup_key: Some(required("id")?),
            message: Some(ProviderMessage {
                author: text("from"),
                text: required("text")?,
                is_by_bot: payload["bot"] == true,
            }),
            ..ProviderEvent::default()
        }))
    }

    async fn deliver(&self, reply: &ProviderReply<'_>) -> Result<(), DeliverError> {
        // The last answer says that the desk hands the issue over, or closes it.
        if reply.target != ReplyTarget::Answer {
            return Ok(());
        }
        let missing = |what: &str| DeliverError::Held(format!("the integration has no {what}"));
        let base_url = reply.base_url.ok_or_else(|| missing("base_url"))?;
        let token = reply.token.ok_or_else(|| missing("reply_token_env"))?;
        let url = format!("{base_url}/rooms/{}/messages", reply.issue);
        let message = json!({"text": reply.content, "client_id": reply.idempotency_key});
        let authorization = format!("Bearer {token}");
        reply.send("POST", &url, &[("authorization", &authorization)], Some(&message)).await?;
        Ok(())
    }
}
