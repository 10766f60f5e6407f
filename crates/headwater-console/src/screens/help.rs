//! Help: keys, roles, and what the words mean.

use axum::response::Response;
use maud::html;

use crate::components::{facts, table};
use crate::screen::{Screen, ScreenContent};

const KEYS: [(&str, &str); 9] = [
    ("/", "Search"),
    (
        "g o",
        "Go to the overview; g t tickets, g i issues, g v drafts, g n sessions, g s topics, g m assignment, g l tail, g f failures, g y replay plans, g b outbox, \
         g r reports, g q SQL, g c consistency, g p processes, g w webhooks, g d doctor, g e settings, g a audit",
    ),
    ("j, k", "Next or previous row"),
    ("Enter", "Open the row"),
    ("x", "Select the row"),
    ("p", "Pause or resume live updates"),
    ("y", "Copy the command line of this page"),
    ("?", "This page"),
    ("Esc", "Leave a field"),
];

pub(crate) async fn show(screen: Screen) -> Response {
    let content = html! {
        h2 { "Keys" }
        (table("Keys", &["Key", "What it does"], &html! {
            @for (key, what) in KEYS { tr { th scope="row" { kbd { (key) } } td { (what) } } }
        }))
        p { label { input #no-keys type="checkbox"; " Switch single keys off in this browser" } }
        h2 { "Appearance" }
        p {
            label for="theme" { "Colours " }
            select #theme { option value="" { "As the system" } option value="light" { "Light" } option value="dark" { "Dark" } }
        }
        h2 { "Roles" }
        (facts(&[
            ("read", html! { "sees everything except Doctor, Settings and Audit" }),
            ("write", html! { "also replies, closes, retries, releases, replays and produces" }),
            ("admin", html! { "also deletes, purges and resets, and sees Doctor, Settings and Audit" }),
        ]))
        h2 { "Words" }
        (facts(&[
            ("Issue", html! { "the unit of work: everything that belongs together is processed by one worker at a time" }),
            ("Quarantined", html! { "failed too often; waits until a person releases it" }),
            ("Outbox", html! { "replies and events that were committed and are delivered afterwards" }),
            ("Dead letter", html! { "a message whose last attempt has failed" }),
            ("Replay plan", html! { "replays the dead letters of a cause, a few first, and stops when they fail again" }),
            ("Lag", html! { "messages that a group has not been given yet" }),
            ("Pending", html! { "messages given to a consumer and not yet settled" }),
        ]))
    };
    let title = "Help".to_owned();
    screen.page(ScreenContent {
        title,
        path: Vec::new(),
        command: "headwater help".to_owned(),
        content,
    })
}
