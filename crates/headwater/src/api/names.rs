//! Names of streams, groups and event types that other systems define: kept on the wire, shown under our own names.
//!
//! Upstream: every route that shows or takes such a name. Guarantees: a route takes both names and shows ours; names
//! of users are never changed.

use std::borrow::Cow;

use headwater_issue::STREAM;

use crate::inbound::ticket_events_consumer::AI_PROCESSOR_GROUP;
use crate::tickets::TICKET_EVENTS;
use crate::tickets::desk_events::DESK_EVENTS;

/// Prefixes of stream and group names of the bus: on the wire, and as shown.
const STREAMS: [(&str, &str); 4] = [
    ("wink:events:", "headwater:events:"),
    ("wink:control:", "headwater:control:"),
    ("wink:cg:", "headwater:group:"),
    ("wink:", "headwater:bus:"),
];

/// Prefixes of event types.
const EVENT_TYPES: [(&str, &str); 2] = [
    ("weakincentives.runtime.events.", "headwater.run."),
    ("weakincentives.runtime.main_loop.", "headwater.main_loop."),
];

/// The name shown for [`AI_PROCESSOR_GROUP`].
const DESK_GROUP: &str = "desk";

/// Streams of the server that are not created topics; `topic list --all` shows those that exist.
pub(super) const SYSTEM_TOPICS: [&str; 5] =
    [STREAM, TICKET_EVENTS, DESK_EVENTS, "wink:control:default", "wink:events:unknown"];

fn with_prefix(
    name: &str,
    prefixes: impl Iterator<Item = (&'static str, &'static str)>,
) -> Cow<'_, str> {
    for (from, to) in prefixes {
        if let Some(rest) = name.strip_prefix(from) {
            return Cow::Owned(format!("{to}{rest}"));
        }
    }
    Cow::Borrowed(name)
}

fn reversed<const N: usize>(
    pairs: [(&'static str, &'static str); N],
) -> impl Iterator<Item = (&'static str, &'static str)> {
    pairs.into_iter().map(|(wire, shown)| (shown, wire))
}

/// The name of a topic or stream, as shown.
pub(crate) fn shown_topic(name: &str) -> Cow<'_, str> {
    with_prefix(name, STREAMS.into_iter())
}

/// The name of a topic or stream on the wire.
pub(crate) fn wire_topic(name: String) -> String {
    with_prefix(&name, reversed(STREAMS)).into_owned()
}

/// The name of a group of a topic, as shown.
pub(crate) fn shown_group<'a>(topic: &str, group: &'a str) -> Cow<'a, str> {
    match (topic, group) {
        (TICKET_EVENTS, AI_PROCESSOR_GROUP) => Cow::Borrowed(DESK_GROUP),
        _ => with_prefix(group, STREAMS.into_iter()),
    }
}

/// The name of a topic and of one of its groups on the wire.
pub(crate) fn wire_group((topic, group): (String, String)) -> (String, String) {
    let topic = wire_topic(topic);
    let group = match (topic.as_str(), group.as_str()) {
        (TICKET_EVENTS, DESK_GROUP) => AI_PROCESSOR_GROUP.to_owned(),
        _ => wire_topic(group),
    };
    (topic, group)
}

/// The type of an event of the bus, as shown.
pub(crate) fn shown_event_type(event_type: &str) -> Cow<'_, str> {
    with_prefix(event_type, EVENT_TYPES.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_systems_are_shown_as_ours_and_both_are_taken() {
        for (wire, shown) in [
            ("wink:events:s1", "headwater:events:s1"),
            ("wink:control:default", "headwater:control:default"),
            ("wink:sessions", "headwater:bus:sessions"),
            ("orders", "orders"),
            ("ticket_events", "ticket_events"),
        ] {
            assert_eq!(shown_topic(wire), shown);
            assert_eq!(wire_topic(shown.to_owned()), wire);
            assert_eq!(wire_topic(wire.to_owned()), wire);
        }
        let group = |topic: &str, group: &str| wire_group((topic.to_owned(), group.to_owned())).1;
        assert_eq!(shown_group(TICKET_EVENTS, AI_PROCESSOR_GROUP), "desk");
        assert_eq!(group(TICKET_EVENTS, "desk"), AI_PROCESSOR_GROUP);
        assert_eq!(group(TICKET_EVENTS, AI_PROCESSOR_GROUP), AI_PROCESSOR_GROUP);
        assert_eq!(group("orders", "desk"), "desk", "a group of a user");
        assert_eq!(
            shown_event_type("weakincentives.runtime.events.PromptRendered"),
            "headwater.run.PromptRendered"
        );
    }
}
