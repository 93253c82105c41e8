"""What is said to Redis: one script per verb, each with a stream and the hash beside it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import hiredis

from semel.brokers.rules import TopicError
from semel.stores.redis.scripts import Call, Script
from semel.values import value

_LUA = files("semel.brokers") / "lua"


def _script(*parts: str) -> Script:
    return Script("stream", *parts, folder=_LUA)


PUBLISH = _script("needed", "publish")
TRIM = _script("needed", "trim")
TAIL = _script("needed", "tail")
FIND = _script("find")
BACKLOG = _script("backlog")
SHARDS = _script("shards")
JOIN = _script("join")
LEAVE = _script("leave")
OWN = _script("owner", "own")
READ = _script("owner", "read")
CLAIM = _script("owner", "claim")
TIDY = _script("owner", "tidy")
PENDING = _script("pending")
ACK = _script("needed", "ack")


@value
class Stream:
    """One shard of a topic, and the names of its keys."""

    topic: str
    shard: int
    key: bytes
    helper: bytes

    def __str__(self) -> str:
        return self.key.decode()

    def call(self, script: Script, *args: Any) -> Call:
        words: Any = (b"EVALSHA", script.sha, 2, self.key, self.helper, *args)
        return Call(script, self.key, hiredis.pack_command(words))


def stream_of(topic: str, shard: int, shards: int) -> Stream:
    """The hash's name has the stream's name in braces: a cluster keeps the two together."""
    if not topic or "{" in topic or "}" in topic:
        raise TopicError(
            f"the topic {topic!r} cannot be the name of a Redis stream here: braces say where a "
            "cluster keeps a key; give it a name without them"
        )
    name = topic if shards == 1 else f"{topic}:{shard}"
    return Stream(topic, shard, name.encode(), f"semel:{{{name}}}:broker".encode())
