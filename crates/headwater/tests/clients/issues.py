"""Consumer, reclaimer and producer of `issue_work` as another program writes them. Prints what it read as JSON."""

import json
import sys

import redis

url, role = sys.argv[1:3]
client = redis.Redis.from_url(url, decode_responses=True)

if role == "consume":
    # Read new messages.
    streams = client.xreadgroup(
        "issue-workers", "worker-1", {"issue_work": ">"}, count=1, block=5000
    )
    ((stream, ((message_id, fields),)),) = streams
    assert stream == "issue_work", stream

    # Find pending messages of a worker that died; here at once and not after five minutes.
    pending = client.xpending_range(
        "issue_work", "issue-workers", min="-", max="+", count=10, idle=0
    )
    assert [(p["message_id"], p["consumer"]) for p in pending] == [(message_id, "worker-1")], pending

    # Claim and reprocess.
    for p in pending:
        claimed = client.xclaim(
            "issue_work", "issue-workers", "worker-2", min_idle_time=0, message_ids=[p["message_id"]]
        )
        assert claimed == [(message_id, fields)], claimed

    # After processing.
    assert client.xack("issue_work", "issue-workers", message_id) == 1
    print(json.dumps(fields))
elif role == "produce":
    # After the commit.
    client.xadd("issue_work", {"issue_id": sys.argv[3], "event_log_id": sys.argv[4]})
elif role == "pending":
    print(client.xpending("issue_work", "issue-workers")["pending"])
else:
    raise SystemExit(f"unknown role {role}")
