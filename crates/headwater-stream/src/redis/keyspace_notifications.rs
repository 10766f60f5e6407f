//! Enables keyspace notifications about expired keys.
//!
//! Missing flags are added, if the options allow it; existing flags are never removed.

use std::sync::Arc;

use tokio::time::Instant;

use super::command::Commands;
use super::node::Node;
use super::reply::{Cursor, RespValue};

/// The setting's name.
pub(super) const SETTING: &str = "notify-keyspace-events";

/// Enables notifications about expired keys on this server. The error is the reason why it cannot.
pub(super) async fn enable(
    node: &Arc<Node>,
    may_configure: bool,
    deadline: Instant,
) -> Result<(), String> {
    let request = async |words: &[&str]| {
        node.request(Commands::one(words), deadline).await.map_err(|error| error.to_string())
    };
    let flags = read_flags(&mut request(&["CONFIG", "GET", SETTING]).await?.cursor())?;
    let Some(wanted) = with_expired(&flags) else { return Ok(()) };
    if !may_configure {
        return Err(format!("{SETTING} is {flags:?}, and `configure_notifications` is off"));
    }
    match request(&["CONFIG", "SET", SETTING, &wanted]).await?.cursor().value() {
        Ok(RespValue::Text(_)) => Ok(()),
        Ok(RespValue::Error(text)) => Err(String::from_utf8_lossy(text).into_owned()),
        _ => Err("unexpected reply to CONFIG SET".to_owned()),
    }
}

/// Parses the reply of `CONFIG GET`. The error is the reason why the flags are unknown.
pub(super) fn read_flags(cursor: &mut Cursor<'_>) -> Result<String, String> {
    match cursor.value() {
        Ok(RespValue::Array(2)) => {}
        Ok(RespValue::Error(text)) => return Err(String::from_utf8_lossy(text).into_owned()),
        _ => return Err(format!("the server has no setting {SETTING}")),
    }
    match (cursor.value(), cursor.value()) {
        (Ok(_), Ok(RespValue::Text(flags))) => Ok(String::from_utf8_lossy(flags).into_owned()),
        _ => Err(format!("unexpected reply to CONFIG GET {SETTING}")),
    }
}

/// The flags plus those for expired keys; `None` if nothing is missing.
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
    fn missing_flags_are_added_and_existing_flags_are_kept() {
        assert_eq!(with_expired("").as_deref(), Some("Ex"));
        assert_eq!(with_expired("Kg").as_deref(), Some("KgEx"));
        assert_eq!(with_expired("x").as_deref(), Some("xE"));
        assert_eq!(with_expired("Ex"), None);
        assert_eq!(with_expired("AKE"), None);
    }
}
