//! The server setting that lets us hear of expired keys.
//!
//! Flags that somebody else set are never removed; what is missing is added.

use std::sync::Arc;

use tokio::time::Instant;

use super::command::Commands;
use super::node::Node;
use super::reply::{Cursor, Value};

/// The setting's name.
pub(super) const SETTING: &str = "notify-keyspace-events";

/// Makes sure that this server tells of expired keys; the error says why it does not.
pub(super) async fn prepare(node: &Arc<Node>, deadline: Instant) -> Result<(), String> {
    let get = Commands::one(&["CONFIG", "GET", SETTING]).pack();
    let replies = match node.send(&get.bytes, 1, deadline).await {
        Ok(Ok(replies)) => replies,
        Ok(Err(broken)) => return Err(broken.to_string()),
        Err(error) => return Err(error.to_string()),
    };
    let flags = read_flags(&mut replies.cursor())?;
    let Some(wanted) = with_expired(&flags) else { return Ok(()) };
    let set = Commands::one(&["CONFIG", "SET", SETTING, &wanted]).pack();
    match node.send(&set.bytes, 1, deadline).await {
        Ok(Ok(replies)) => match replies.cursor().value() {
            Ok(Value::Text(_)) => Ok(()),
            Ok(Value::Error(text)) => Err(String::from_utf8_lossy(text).into_owned()),
            _ => Err("the server did not confirm the setting".to_owned()),
        },
        Ok(Err(broken)) => Err(broken.to_string()),
        Err(error) => Err(error.to_string()),
    }
}

/// Reads the reply of `CONFIG GET`; the error says why the flags are unknown.
pub(super) fn read_flags(cursor: &mut Cursor<'_>) -> Result<String, String> {
    match cursor.value() {
        Ok(Value::Array(2)) => {}
        Ok(Value::Error(text)) => return Err(String::from_utf8_lossy(text).into_owned()),
        _ => return Err(format!("the server does not know {SETTING}")),
    }
    match (cursor.value(), cursor.value()) {
        (Ok(_), Ok(Value::Text(flags))) => Ok(String::from_utf8_lossy(flags).into_owned()),
        _ => Err(format!("the server did not tell {SETTING}")),
    }
}

/// The flags with those we need; `None` if they are there already.
fn with_expired(flags: &str) -> Option<String> {
    let mut wanted = flags.to_owned();
    if !flags.contains('E') {
        wanted.push('E');
    }
    if !flags.contains(['x', 'A']) {
        wanted.push('x');
    }
    (wanted != flags).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_added_and_never_removed() {
        assert_eq!(with_expired("").as_deref(), Some("Ex"));
        assert_eq!(with_expired("Kg").as_deref(), Some("KgEx"));
        assert_eq!(with_expired("x").as_deref(), Some("xE"));
        assert_eq!(with_expired("Ex"), None);
        assert_eq!(with_expired("AKE"), None);
    }
}
