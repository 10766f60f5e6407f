"""Finds a topic in the registry, takes over a message of a dead consumer, and adds a stream to be assigned."""

import json
import sys

import redis

url, topic = sys.argv[1:3]
client = redis.Redis.from_url(url, decode_responses=True)

assert topic in client.smembers("streaming:mq:topics:registry")
assert client.hget(f"streaming:mq:topic:{topic}:meta", "partitionCount") == "2"
partitions = client.smembers(f"streaming:mq:topic:{topic}:partitions")
assert partitions == {f"stream:topic:{topic}:p:0", f"stream:topic:{topic}:p:1"}, partitions

payloads = []
for stream in sorted(partitions):
    client.xgroup_create(stream, "python", id="0")
    client.xreadgroup("python", "dead", {stream: ">"}, count=10)
    _, messages, _ = client.xautoclaim(stream, "python", "alive", min_idle_time=0)
    for message_id, fields in messages:
        assert fields["topic"] == topic and fields["partitionId"] == stream[-1], fields
        payloads.append(fields["payload"])
        assert client.xack(stream, "python", message_id) == 1
    assert client.xpending(stream, "python")["pending"] == 0

client.xadd("calls-input", {"lbs-input": json.dumps({"DataStreamName": "call:7", "Info": {"who": "ada"}})})
print(json.dumps(payloads))
