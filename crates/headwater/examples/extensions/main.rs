//! A server with its own model, routes and provider of webhooks: `cargo run --release -p headwater --example extensions -- serve`.

mod chat;

use std::process::ExitCode;

use async_trait::async_trait;
use headwater::desk::model::{ModelPrompt, ResponseChunk, ResponseStream};
use headwater::desk::{LanguageModel, ModelError};

/// A model that thanks for every message.
#[derive(Debug)]
struct Thanks;

#[async_trait]
impl LanguageModel for Thanks {
    fn name(&self) -> &str {
        "thanks"
    }

    fn is_free(&self) -> bool {
        true
    }

    async fn complete(&self, _: &ModelPrompt) -> Result<ResponseStream, ModelError> {
        Ok(ResponseStream::ready(vec![ResponseChunk::Text(
            "Thank you for your message.".to_owned(),
        )]))
    }
}

async fn hours() -> &'static str {
    "Monday to Friday, 9 to 17\n"
}

#[tokio::main]
async fn main() -> ExitCode {
    use headwater::axum::Router;
    use headwater::axum::routing::get;

    // Below `/x`: `GET /x/hours`.
    let routes = Router::new().route("/hours", get(hours).post(|body: String| async { body }));
    let extensions = headwater::Extensions::default().model(Thanks).routes(routes);
    // `provider = "chat"` of an `[[integration]]`.
    let extensions = extensions.provider(chat::Chat);
    headwater::main_with_extensions(extensions).await
}
