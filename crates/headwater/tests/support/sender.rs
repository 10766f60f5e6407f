//! Signed webhooks with payloads in the format of their providers.

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use serde_json::{Value, json};
use sha2::Sha256;

use super::{Server, answer};

pub(crate) const SECRET: &str = "a shared secret";
/// `whsec_` and base64, in the format of Standard Webhooks.
pub(crate) const STANDARD_SECRET: &str = "whsec_c2l4dGVlbiBieXRlcyBvciBtb3Jl";

/// Integrations of all three providers.
pub(crate) fn integrations() -> String {
    format!(
        "
[[integration]]\nid = \"shop\"\nprovider = \"github\"\nsecret = \"{SECRET}\"\nbot_login = \"shop-bot\"
[[integration]]\nid = \"works\"\nprovider = \"gitlab\"\nsecret = \"{SECRET}\"\nbot_login = \"works-bot\"
[[integration]]\nid = \"anybody\"\nprovider = \"standard\"\nsecret = \"{STANDARD_SECRET}\"
"
    )
}

fn sign(key: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("a key of any length");
    parts.iter().for_each(|part| mac.update(part));
    mac.finalize().into_bytes().to_vec()
}

pub(crate) fn github_signature(body: &[u8]) -> String {
    let hex: String =
        sign(SECRET.as_bytes(), &[body]).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256={hex}")
}

/// A request as GitHub sends it.
pub(crate) fn github(
    server: &Server,
    event: &str,
    delivery: &str,
    body: &[u8],
) -> reqwest::RequestBuilder {
    github_to(&server.client, &server.url(""), event, delivery, body)
}

/// The same request to any URL.
pub(crate) fn github_to(
    client: &reqwest::Client,
    url: &str,
    event: &str,
    delivery: &str,
    body: &[u8],
) -> reqwest::RequestBuilder {
    client
        .post(format!("{url}/webhooks/github/shop"))
        .header("content-type", "application/json")
        .header("x-github-event", event)
        .header("x-github-delivery", delivery)
        .header("x-hub-signature-256", github_signature(body))
        .body(body.to_vec())
}

/// A request as GitLab sends it.
pub(crate) fn gitlab(
    server: &Server,
    event: &str,
    uuid: &str,
    payload: &Value,
) -> reqwest::RequestBuilder {
    server
        .client
        .post(server.url("/webhooks/gitlab/works"))
        .header("x-gitlab-event", event)
        .header("x-gitlab-event-uuid", uuid)
        .header("x-gitlab-token", SECRET)
        .json(payload)
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.expect("after 1970").as_secs()
}

/// A Standard Webhooks request, signed at this time.
pub(crate) fn standard(
    server: &Server,
    id: &str,
    signed_at: u64,
    body: &[u8],
) -> reqwest::RequestBuilder {
    standard_to(&server.client, &server.url(""), id, signed_at, body)
}

/// The same request to any URL.
pub(crate) fn standard_to(
    client: &reqwest::Client,
    url: &str,
    id: &str,
    signed_at: u64,
    body: &[u8],
) -> reqwest::RequestBuilder {
    let key = STANDARD.decode(STANDARD_SECRET.trim_start_matches("whsec_")).expect("base64");
    let time = signed_at.to_string();
    let signature = sign(&key, &[id.as_bytes(), b".", time.as_bytes(), b".", body]);
    client
        .post(format!("{url}/webhooks/standard/anybody"))
        .header("content-type", "application/json")
        .header("webhook-id", id)
        .header("webhook-timestamp", time)
        .header("webhook-signature", format!("v1,{}", STANDARD.encode(signature)))
        .body(body.to_vec())
}

pub(crate) async fn send(request: reqwest::RequestBuilder) -> Result<(u16, Value)> {
    answer(request.send().await?).await
}

fn github_person(login: &str) -> Value {
    json!({"login": login, "id": 583_231, "type": "User", "site_admin": false,
           "html_url": format!("https://github.com/{login}")})
}

fn github_issue(number: u64, title: &str, body: &str) -> Value {
    json!({
        "id": 1_700_000_000 + number, "node_id": "I_kwDOA", "number": number, "title": title, "body": body,
        "user": github_person("ann"), "labels": [], "state": "open", "locked": false, "assignees": [],
        "milestone": null, "comments": 0, "created_at": "2026-11-01T08:00:00Z", "updated_at": "2026-11-01T08:00:00Z",
        "author_association": "NONE", "html_url": format!("https://github.com/acme/shop/issues/{number}"),
    })
}

fn github_payload(action: &str, mut payload: Value) -> Value {
    payload["action"] = action.into();
    payload["sender"] = github_person("ann");
    payload["repository"] = json!({
        "id": 35_129_377, "name": "shop", "full_name": "acme/shop", "private": false,
        "owner": github_person("acme"), "html_url": "https://github.com/acme/shop", "default_branch": "main",
    });
    payload["organization"] = json!({"login": "acme", "id": 9_919});
    payload
}

/// Payload of a GitHub issue event.
pub(crate) fn github_issues(action: &str, number: u64, body: &str) -> Value {
    github_payload(action, json!({"issue": github_issue(number, "My parcel is late", body)}))
}

/// Payload of a GitHub comment event.
pub(crate) fn github_comment(number: u64, login: &str, body: &str) -> Value {
    let comment = json!({
        "id": 99_262_140, "body": body, "user": github_person(login), "author_association": "NONE",
        "created_at": "2026-11-01T08:05:00Z", "updated_at": "2026-11-01T08:05:00Z",
        "html_url": format!("https://github.com/acme/shop/issues/{number}#issuecomment-99262140"),
    });
    let issue = github_issue(number, "My parcel is late", "Where is it?");
    github_payload("created", json!({"issue": issue, "comment": comment}))
}

fn gitlab_payload(kind: &str, username: &str, mut payload: Value) -> Value {
    payload["object_kind"] = kind.into();
    payload["event_type"] = kind.into();
    payload["user"] = json!({"id": 1, "name": "Ann", "username": username, "email": "[REDACTED]"});
    payload["project"] = json!({
        "id": 5, "name": "Works", "path_with_namespace": "acme/works", "visibility_level": 20,
        "web_url": "https://gitlab.example/acme/works", "default_branch": "main",
    });
    payload["repository"] =
        json!({"name": "Works", "url": "https://gitlab.example/acme/works.git"});
    payload
}

/// Payload of a GitLab issue event.
pub(crate) fn gitlab_issue(action: &str, iid: u64, changes: Value) -> Value {
    let attributes = json!({
        "id": 301, "iid": iid, "title": "My parcel is late", "description": "Where is it?", "project_id": 5,
        "author_id": 1, "state": "opened", "action": action, "confidential": false,
        "created_at": "2026-11-01 08:00:00 UTC", "updated_at": "2026-11-01 08:00:00 UTC",
    });
    gitlab_payload(
        "issue",
        "ann",
        json!({"object_attributes": attributes, "labels": [], "changes": changes}),
    )
}

/// Payload of a GitLab note event.
pub(crate) fn gitlab_note(iid: u64, username: &str, note: &str, more: Value) -> Value {
    let mut attributes = json!({
        "id": 1241, "note": note, "noteable_type": "Issue", "author_id": 1, "noteable_id": 301, "system": false,
        "internal": false, "action": "create", "project_id": 5, "created_at": "2026-11-01 08:05:00 UTC",
        "url": format!("https://gitlab.example/acme/works/-/issues/{iid}#note_1241"),
    });
    for (name, value) in more.as_object().into_iter().flatten() {
        attributes[name] = value.clone();
    }
    let issue = json!({"id": 301, "iid": iid, "title": "My parcel is late", "state": "opened"});
    gitlab_payload(
        "note",
        username,
        json!({"object_attributes": attributes, "issue": issue, "project_id": 5}),
    )
}
