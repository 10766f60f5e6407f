"""Opens a ticket through `ticket_events`, follows it in a group of its own, and reads the session of the answer."""

import json
import sys
import time
import uuid

import redis

client = redis.Redis.from_url(sys.argv[1], decode_responses=True)
deadline = time.monotonic() + 60

# The desk has created its group.
try:
    client.xgroup_create("ticket_events", "ai_processor_group", id="$", mkstream=True)
    raise SystemExit("the group of the desk did not exist")
except redis.ResponseError as error:
    assert str(error).startswith("BUSYGROUP"), error
client.xgroup_create("ticket_events", "notify_group", id="$", mkstream=True)

ticket_id, message_id = str(uuid.uuid4()), str(uuid.uuid4())
event = {
    "event_type": "MESSAGE_RECEIVED",
    "ticket_id": ticket_id,
    "message_id": message_id,
    "user_id": str(uuid.uuid4()),
    "payload": {"content": "Where is my parcel?", "timestamp": "2026-01-01T00:00:00Z"},
}
client.xadd("ticket_events", {"data": json.dumps(event)}, maxlen=10_000, approximate=True)

seen = []
while "AI_RESPONSE_GENERATED" not in seen:
    assert time.monotonic() < deadline, seen
    for _, messages in client.xreadgroup(
        "notify_group", "notifier:1", {"ticket_events": ">"}, count=1, block=5000
    ):
        for entry_id, fields in messages:
            data = json.loads(fields["data"])
            assert data["ticket_id"] == ticket_id, data
            seen.append(data["event_type"])
            assert client.xack("ticket_events", "notify_group", entry_id) == 1
assert seen[0] == "MESSAGE_RECEIVED", seen
assert client.xpending("ticket_events", "notify_group")["pending"] == 0

# The model run is a session; its steps are events of the documented types.
allowed = {
    "weakincentives.runtime.events.PromptRendered",
    "weakincentives.runtime.events.ToolInvoked",
    "weakincentives.runtime.events.PromptExecuted",
}
types = set()
while "weakincentives.runtime.events.PromptExecuted" not in types:
    assert time.monotonic() < deadline, types
    for stream_key in client.scan_iter("wink:events:*"):
        for entry_id, data in client.xrange(stream_key, "-", "+"):
            assert data["type"] in allowed, data
            json.loads(data["payload"])
            assert data["timestamp"], data
            types.add(data["type"])

# The audit of pending entries.
while client.xpending_range("ticket_events", "ai_processor_group", min="-", max="+", count=10):
    assert time.monotonic() < deadline
print(ticket_id)
