//! A server with a custom handler: `cargo run --release -p headwater --example own_handler -- serve`.

use std::process::ExitCode;

use headwater_issue::{HandlerError, Resolution, Run};

async fn answer(run: Run) -> Result<Resolution, HandlerError> {
    let (issue, count) = (&run.issue().external_issue_id, run.events().len());
    let content = format!("We have read {count} new messages about {issue} and look into it.");
    Ok(Resolution::new().reply(serde_json::json!({ "content": content }).to_string()))
}

#[tokio::main]
async fn main() -> ExitCode {
    headwater::main_with(answer).await
}
