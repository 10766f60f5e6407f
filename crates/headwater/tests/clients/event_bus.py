"""Sends a request to the main loop, reads its reply in a group of its own, and checks the health of the streams."""

import json
import sys
import time
from datetime import datetime, timezone
from uuid import uuid4

import redis

url, namespace, session_id = sys.argv[1:4]
client = redis.Redis.from_url(url, decode_responses=True)
stream_key, group_name = f"wink:control:{namespace}", "python:replies"


def serialize_event(type_name, payload):
    return {
        "type": type_name,
        "payload": json.dumps(payload),
        "timestamp": datetime.now(timezone.utc).isoformat(),
    }


# Telemetry of a session of this program.
event = {"name": "my_tool", "params": {}, "result": {"message": "ok", "success": True}}
client.xadd(
    f"wink:events:{session_id}",
    serialize_event("weakincentives.runtime.events.ToolInvoked", event),
    maxlen=10_000,
)

# A request, and a consumer of replies.
try:
    client.xgroup_create(stream_key, group_name, id="0", mkstream=True)
except redis.ResponseError as exc:
    if "BUSYGROUP" not in str(exc):
        raise
request_id = str(uuid4())
request = {"request_id": request_id, "request": {"file": "main.rs"}}
client.xadd(
    stream_key,
    serialize_event("weakincentives.runtime.main_loop.MainLoopRequest", request),
    maxlen=10_000,
)
completed, deadline = None, time.monotonic() + 60
while completed is None:
    assert time.monotonic() < deadline, "no reply"
    entries = client.xreadgroup(group_name, "dead", {stream_key: ">"}, count=100, block=1000)
    for _, messages in entries:
        for entry_id, data in messages:
            if data["type"].endswith(".MainLoopCompleted"):
                completed = json.loads(data["payload"])

# The consumer died before it acknowledged: another one reclaims its entries.
pending = client.xpending_range(stream_key, group_name, min="-", max="+", count=100)
assert len(pending) >= 2 and all(entry["consumer"] == "dead" for entry in pending), pending
for entry in pending:
    claimed = client.xclaim(
        stream_key, group_name, "alive", min_idle_time=0, message_ids=[entry["message_id"]]
    )
    for entry_id, data in claimed:
        assert client.xack(stream_key, group_name, entry_id) == 1

# Health.
assert client.ping()
assert client.xinfo_stream(stream_key)["length"] >= 2
groups = {group["name"]: group["pending"] for group in client.xinfo_groups(stream_key)}
assert groups[group_name] == 0 and f"wink:cg:{namespace}:control" in groups, groups

assert completed["request_id"] == request_id, completed
print(json.dumps(completed["response"]))
