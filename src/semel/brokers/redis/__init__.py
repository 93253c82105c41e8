"""The broker on Redis Streams or Valkey: a single server, behind Sentinel, or a cluster.

    RedisBroker("redis://localhost:6379/0", shards=8, groups={"axiom:events": ["billing", "mail"]})

A shard of a topic is a stream. With one shard the stream's key is the topic itself, `axiom:events`;
with more it is `axiom:events:3`. What the broker has to remember of it lies in the hash
`semel:{axiom:events:3}:broker`, in the same slot of a cluster. An entry's id is `<position>-0`, so
what is published twice is there once, whenever that is. Entries have one field `event`, a whole
CloudEvent, or its attributes as fields and `data` (`mode="binary"`). Anybody may read with a group
of their own; nobody else may write: behind an entry of a stranger the relay stops.

`maxlen` is what trimming aims at. It never passes what some group has not read or acknowledged; at
twice as many entries the relay is told to wait. The easy mistake is a group that is made when its
first worker starts: what was trimmed by then, it never sees. Name it in `groups`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from semel.brokers import rules
from semel.brokers.urls import check_query
from semel.errors import SettingsError
from semel.messages import (
    Backlog,
    Batch,
    Behind,
    Features,
    Fenced,
    Forked,
    Full,
    GroupBacklog,
    Message,
    Receipt,
    Refused,
    Tail,
    Taken,
)

try:
    from semel.stores.redis.address import in_a_url
    from semel.stores.redis.way import way_to
except ImportError as error:
    raise SettingsError(
        "RedisBroker needs redis-py and hiredis, and one of them is not installed: "
        "pip install 'semel[redis]'"
    ) from error

from semel.brokers.redis import scripts
from semel.brokers.redis.consumer import RedisConsumer
from semel.brokers.redis.entries import EVENT, Mode, event_id, position_of, write
from semel.brokers.redis.link import Link
from semel.brokers.redis.scripts import Stream, stream_of
from semel.stores.redis.durability import Standing

__all__ = ["RedisBroker", "RedisConsumer"]

log = logging.getLogger("semel")

# Redis can be told to take less than its 512 MB in one piece, but not less than one.
SURELY_TAKEN = 1024 * 1024
USUALLY_TAKEN = 512 * 1024 * 1024


class RedisBroker:
    """Messages in Redis streams. See `semel.brokers.redis`.

    Given a client of redis.asyncio, the broker leaves it open. Given a URL, it opens its own, one
    for each event loop. `groups` are the groups of each topic that are there before its first
    message is. `timeout_s` is how long Redis may stay silent.
    """

    def __init__(
        self,
        client_or_url: Any,
        *,
        shards: int = 1,
        maxlen: int | None = 10_000,
        groups: Mapping[str, Sequence[str]] | None = None,
        mode: Mode = "structured",
        timeout_s: float = 5.0,
    ) -> None:
        rules.check_settings(shards, maxlen)
        if mode not in {"structured", "binary"}:
            raise SettingsError(f'mode={mode!r}: write "structured" or "binary"')
        if any(isinstance(names, str) for names in (groups or {}).values()):
            raise SettingsError(f"groups={groups!r}: write a list of groups for each topic")
        if isinstance(client_or_url, str):
            check_query(
                RedisBroker,
                client_or_url,
                driver="redis-py",
                known=in_a_url(),
                such="health_check_interval",
            )
        way = way_to(client_or_url, timeout_s, "RedisBroker")
        if "async" not in way.lines:
            raise SettingsError(
                "RedisBroker is used by async code and was given a client for sync code: give it "
                "a URL, RedisBroker('redis://localhost:6379/0'), or a redis.asyncio.Redis client"
            )
        self.shards = shards
        self.features = Features(
            fenced=True, dedups="exact", heals=True, bounded=maxlen is not None
        )
        self._maxlen = maxlen
        self._groups = {topic: tuple(names) for topic, names in (groups or {}).items() if names}
        self._mode: Mode = mode
        self._link = Link(way, timeout_s)
        self._streams: dict[tuple[str, int], Stream] = {}
        self._declared: set[Stream] = set()
        self._told: set[str] = set()
        """The topics of which Redis knows in how many shards they are."""
        self._most = SURELY_TAKEN
        """How many bytes Redis takes in one piece, as far as we had to know."""

    # --- publishing -------------------------------------------------------------------------

    async def publish(self, batch: Batch) -> Receipt:
        rules.check(batch, self.shards)
        receipt = await self._publish(batch)
        # Afterwards: by then it is known that no later owner is at work.
        if isinstance(receipt, Taken) and batch.topic not in self._told:
            await self._link.ask(self._whole(batch.topic).call(scripts.SHARDS, self.shards))
            self._told.add(batch.topic)
        return receipt

    async def _publish(self, batch: Batch) -> Receipt:
        stream = self._stream(batch.topic, batch.shard)
        if stream not in self._declared:
            await self._declare(stream)
        words, count, unfit = write(batch.messages, self._mode, self._most)
        if unfit is not None and unfit.is_large and self._most == SURELY_TAKEN:
            await self._ask_how_much(stream)
            words, count, unfit = write(batch.messages, self._mode, self._most)
        if unfit is None:
            return await self._append(stream, batch, words)
        receipt = await self._append(stream, replace(batch, messages=batch.messages[:count]), words)
        return Refused(unfit.message, unfit.why) if isinstance(receipt, Taken) else receipt

    async def _append(self, stream: Stream, batch: Batch, words: Sequence[Any]) -> Receipt:
        what, *said = await self._link.ask(self._publishing(stream, batch, words))
        match what:
            case b"taken":
                return Taken(len(batch.messages))
            case b"fenced":
                return Fenced(int(said[0]))
            case b"behind":
                return Behind(_tail(said))
            case b"forked":
                return Forked(_tail(said))
            case b"ahead":
                return await self._append_rest(stream, batch, _tail(said))
            case b"absent":
                await self._declare(stream)
                return await self._append(stream, batch, words)
            case b"strange":
                return self._strange(stream, int(said[0]))
            case b"full":
                return await self._full(batch, *said)
            case b"oom":
                return Full(said[0], "Redis is out of memory: raise maxmemory, or lower maxlen")
            case unknown:
                raise RuntimeError(f"the script answered {unknown!r}")

    def _publishing(self, stream: Stream, batch: Batch, words: Sequence[Any]) -> Any:
        last = batch.messages[-1] if batch.messages else batch.follows
        return stream.call(
            scripts.PUBLISH,
            batch.fence,
            batch.follows.position,
            batch.follows.id,
            self._maxlen or "",
            "1" if batch.topic in self._groups else "0",
            len(batch.messages),
            last.position,
            last.id,
            EVENT if self._mode == "structured" else "",
            *words,
        )

    async def _append_rest(self, stream: Stream, batch: Batch, tail: Tail) -> Receipt:
        """The stream has more than the batch follows: an earlier call has added the beginning."""
        old = [message for message in batch.messages if message.position <= tail.position]
        there = await self._there(stream, old) if old else {}
        new = rules.behind_the_tail(batch.messages, tail, lambda _first, _last: there)
        if isinstance(new, Forked):
            return new
        if not new:
            return Taken(0)
        rest = replace(batch, follows=Tail(tail.position, old[-1].id), messages=new)
        words, _, _ = write(new, self._mode, self._most)
        return await self._append(stream, rest, words)

    async def _there(self, stream: Stream, messages: Sequence[Message]) -> Mapping[int, str]:
        """The ids at the messages' positions and at the first one there is.

        Where nobody knows how the stream ends, nobody knows what was trimmed either: then nothing
        counts as trimmed.
        """
        between = messages[0].position, messages[-1].position
        entries, first, is_ours = await self._link.ask(stream.call(scripts.FIND, *between))
        there = {position_of(entry[0]): event_id(entry) for entry in (*first, *entries)}
        return there if is_ours else {0: "", **there}

    def _strange(self, stream: Stream, position: int) -> Forked:
        log.error(
            "semel: the Redis stream %s ends with an entry that no relay has written (%d): nothing "
            "of the outbox can follow it. Find out who writes there; give the topic another name, "
            "or delete the stream and it is filled anew",
            stream,
            position,
        )
        return Forked(Tail(position))

    async def _full(self, batch: Batch, length: int, group: bytes | None) -> Full:
        groups = (await self.backlog(batch.topic, batch.shard)).groups
        name = None if group is None else group.decode("utf-8", "replace")
        slowest = next((each for each in groups if each.group == name), None)
        return Full(length, rules.why_full(batch, slowest))

    async def _ask_how_much(self, stream: Stream) -> None:
        told = await self._link.number(stream.key, "proto-max-bulk-len")
        self._most = told or USUALLY_TAKEN

    async def _declare(self, stream: Stream) -> None:
        for group in self._groups.get(stream.topic, ()):
            await self._link.ask(stream.call(scripts.JOIN, group))
        self._declared.add(stream)

    # --- consuming --------------------------------------------------------------------------

    async def join(self, topic: str, group: str) -> None:
        streams = [self._stream(topic, shard) for shard in range(self.shards)]
        calls = [stream.call(scripts.JOIN, group) for stream in streams]
        await asyncio.gather(*map(self._link.ask, calls))

    async def leave(self, topic: str, group: str) -> None:
        """Forget the group: nothing is kept for it any more."""
        streams = [self._stream(topic, shard) for shard in range(self.shards)]
        calls = [stream.call(scripts.LEAVE, group) for stream in streams]
        await asyncio.gather(*map(self._link.ask, calls))

    async def trim(self, topic: str, keep: int) -> None:
        """Forget all but the last `keep` messages of each shard that every group is done with."""
        streams = [self._stream(topic, shard) for shard in range(self.shards)]
        calls = [stream.call(scripts.TRIM, keep) for stream in streams]
        await asyncio.gather(*map(self._link.ask, calls))

    async def consumer(
        self, topic: str, group: str, shard: int, *, name: str, fence: int
    ) -> RedisConsumer:
        consumer = RedisConsumer(self._link, self._stream(topic, shard), group, name, fence)
        await consumer.begin()
        return consumer

    # --- looking ----------------------------------------------------------------------------

    async def published_shards(self, topic: str) -> int | None:
        told = await self._link.ask(self._whole(topic).call(scripts.SHARDS))
        return None if told is None else int(told)

    async def tail(self, topic: str, shard: int) -> Tail:
        """Return the last message of the shard. Trim first if this broker has published there."""
        stream = self._stream(topic, shard)
        # Only where this broker publishes: others may have another `maxlen`, or may not write.
        target = self._maxlen if stream in self._declared else None
        return _tail(await self._link.ask(stream.call(scripts.TAIL, target or "")))

    async def backlog(self, topic: str, shard: int) -> Backlog:
        stream = self._stream(topic, shard)
        length, position, id, rows = await self._link.ask(stream.call(scripts.BACKLOG))
        groups = [
            GroupBacklog(
                name.decode("utf-8", "replace"), None if unread < 0 else unread, pending, ms / 1000
            )
            for name, unread, pending, ms in rows
        ]
        return Backlog(topic, shard, length, self._maxlen, _tail((position, id)), groups)

    async def risks(self) -> Sequence[str]:
        """What the servers are set up to forget, for people; what loses unread messages first."""
        risks = [risk for standing in await self._link.standings() for risk in _risks(standing)]
        return sorted(dict.fromkeys(risks))

    async def aclose(self) -> None:
        await self._link.aclose()

    def _stream(self, topic: str, shard: int) -> Stream:
        stream = self._streams.get((topic, shard))
        if stream is None:
            rules.check_shard(shard, self.shards)
            stream = self._streams[topic, shard] = stream_of(topic, shard, self.shards)
        return stream

    def _whole(self, topic: str) -> Stream:
        """What is known of a topic by those, too, who do not know how many shards it has."""
        return stream_of(topic, 0, 1)

    def __repr__(self) -> str:
        return f"RedisBroker({self._link.shown!r}, shards={self.shards})"


def _tail(said: Sequence[bytes]) -> Tail:
    return Tail(int(said[0]), said[1].decode())


def _risks(standing: Standing) -> Iterator[str]:
    """Streams never expire by themselves, so policies for what expires do not touch them."""
    if standing.maxmemory is None:
        yield (
            "memory: the server refuses INFO, so whether it evicts streams cannot be checked; "
            "permit it: ACL SETUSER <user> +info"
        )
    if standing.appendonly is None:
        yield (
            "restart: the server refuses CONFIG GET, so whether streams are written to disk cannot "
            "be checked; permit it: ACL SETUSER <user> +config|get"
        )
    if standing.maxmemory and standing.policy.startswith("allkeys"):
        yield (
            f"eviction: maxmemory-policy {standing.policy} deletes streams when memory is short, "
            "and what nobody has read with them; set maxmemory-policy noeviction"
        )
    if standing.appendonly is False and not standing.snapshots:
        yield (
            "restart: nothing is written to disk, so a restart empties every stream, and what the "
            "outbox has swept by then is lost to groups that had not read it; set appendonly yes"
        )
