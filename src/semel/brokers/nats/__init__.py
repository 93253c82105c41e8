"""The broker on NATS JetStream. NATS 2.10 or later.

    NatsBroker("nats://localhost:4222", shards=8, groups={"axiom:events": ["billing", "mail"]})

A shard of a topic is a stream in files, `semel-axiom%3Aevents-3`, whose events come on the subject
`semel.axiom%3Aevents.3`; what NATS does not allow in a name is percent-encoded. A group is a
durable pull consumer of each of them. Messages are CloudEvents, in one document or, with
`mode="binary"`, as headers and payload. Anybody may read with a consumer of their own; nobody else
may write.

What is promised: a message that is published again is there once, whenever that is; a former owner
publishes nothing; a stream that has lost its end is noticed. All three rest on the server's check
of the number that a message is to come behind, and on nothing that it forgets after a while.
`duplicate_window_s` is the window of the server's own memory, which is kept for those who copy
from the stream; a large one costs memory for every message in it.

What is not: with `replicas=1` a stream is lost with its server's disk, and NATS confirms before
what it has is on the disk (`sync_interval`). The relay heals what is still in the outbox.

`maxlen` is what trimming aims at, in messages per shard. It never passes what some group has not
acknowledged; at twice as many the relay is told to wait. The easy mistake is a group that is made
when its first worker starts: what was trimmed by then, it never sees. Name it in `groups`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from semel.brokers import rules
from semel.brokers.shared import check_driver
from semel.brokers.urls import check_query
from semel.errors import BrokerUnavailableError, SettingsError
from semel.messages import Backlog, Batch, Features, Receipt, Tail, Taken

try:
    from nats.aio.client import __version__ as _driver
except ImportError as error:
    raise SettingsError(
        "NatsBroker needs nats-py, which is not installed: pip install 'semel[nats]'"
    ) from error

from semel.brokers.nats.consumer import NatsConsumer
from semel.brokers.nats.events import Mode
from semel.brokers.nats.line import Line, servers_of
from semel.brokers.nats.stream import Settings, Stream

__all__ = ["NatsBroker", "NatsConsumer"]

log = logging.getLogger("semel")

# Before it, nobody is told that a connection was lost.
OLDEST_DRIVER = (2, 15)

_PREFIX = re.compile(r"[A-Za-z0-9_-]+")


class NatsBroker:
    """Messages in JetStream streams. See `semel.brokers.nats`.

    `groups` are the groups of each topic that are there before its first message is. `options` are
    further arguments for `nats.connect`, such as `user_credentials` or `tls`. `timeout_s` is how
    long NATS may stay silent.
    """

    def __init__(
        self,
        url: str,
        *,
        shards: int = 1,
        maxlen: int | None = 10_000,
        groups: Mapping[str, Sequence[str]] | None = None,
        replicas: int = 1,
        duplicate_window_s: float = 120.0,
        mode: Mode = "structured",
        prefix: str = "semel",
        timeout_s: float = 5.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_driver("NatsBroker", "nats-py", _driver, OLDEST_DRIVER, "nats")
        rules.check_settings(shards, maxlen)
        check_query(NatsBroker, url)
        if mode not in {"structured", "binary"}:
            raise SettingsError(f'mode={mode!r}: write "structured" or "binary"')
        if any(isinstance(names, str) for names in (groups or {}).values()):
            raise SettingsError(f"groups={groups!r}: write a list of groups for each topic")
        if replicas < 1 or duplicate_window_s <= 0:
            raise SettingsError("replicas and duplicate_window_s are larger than 0")
        if not _PREFIX.fullmatch(prefix):
            raise SettingsError(
                f"the prefix {prefix!r} cannot begin a subject: use letters, digits, _ and -"
            )
        self.shards = shards
        self.features = Features(
            fenced=True, dedups="exact", heals=True, bounded=maxlen is not None
        )
        self._shown = ",".join(urlsplit(server).netloc for server in servers_of(url))
        self._shown = self._shown.rpartition("@")[2]
        self._groups = {topic: tuple(names) for topic, names in (groups or {}).items()}
        self._settings = Settings(prefix, maxlen, replicas, duplicate_window_s, mode)
        self._line = Line(url, timeout_s, options or {})
        self._streams: dict[tuple[str, int], Stream] = {}
        self._consumers: dict[tuple[str, str, int], NatsConsumer] = {}
        self._declared: set[str] = set()
        self._told: set[str] = set()

    async def publish(self, batch: Batch) -> Receipt:
        rules.check(batch, self.shards)
        if batch.topic not in self._declared:
            for group in self._groups.get(batch.topic, ()):
                await self.join(batch.topic, group)
            self._declared.add(batch.topic)
        receipt = await self._stream(batch.topic, batch.shard).publish(batch)
        # Afterwards: by then it is known that no later owner is at work.
        if isinstance(receipt, Taken) and batch.topic not in self._told:
            self._told.add(batch.topic)
            await self._tell_shards(batch.topic)
        return receipt

    async def _tell_shards(self, topic: str) -> None:
        """Only a note for workers: whoever may not make it publishes all the same."""
        try:
            await self._stream(topic, 0).tell_shards(self.shards)
        except (BrokerUnavailableError, SettingsError) as error:
            log.warning(
                "semel: NATS does not note that %r has %d shards, so a worker with another number "
                "is not told: %s",
                topic,
                self.shards,
                error,
            )

    async def published_shards(self, topic: str) -> int | None:
        return await self._stream(topic, 0).told_shards()

    async def tail(self, topic: str, shard: int) -> Tail:
        """Return the last message of the shard. Trim first if this broker has published there."""
        return await self._stream(topic, shard).tail()

    async def join(self, topic: str, group: str) -> None:
        streams = [self._stream(topic, shard) for shard in range(self.shards)]
        await asyncio.gather(*(stream.join(group) for stream in streams))

    async def leave(self, topic: str, group: str) -> None:
        """Forget the group: nothing is kept for it any more."""
        for shard in range(self.shards):
            await self._stream(topic, shard).leave(group)

    async def trim(self, topic: str, keep: int) -> None:
        """Forget all but the last `keep` messages of each shard that every group is done with."""
        for shard in range(self.shards):
            await self._stream(topic, shard).trim(keep)

    async def consumer(
        self, topic: str, group: str, shard: int, *, name: str, fence: int
    ) -> NatsConsumer:
        consumer = NatsConsumer(self._stream(topic, shard), group, name, fence)
        if await consumer.begin():
            # One reader per shard: a view that was opened here before is not used any more.
            former = self._consumers.pop((topic, group, shard), None)
            self._consumers[topic, group, shard] = consumer
            if former is not None:
                await former.close()
        return consumer

    async def backlog(self, topic: str, shard: int) -> Backlog:
        return await self._stream(topic, shard).backlog()

    async def aclose(self) -> None:
        while self._consumers:
            await self._consumers.popitem()[1].close()
        await self._line.aclose()

    def _stream(self, topic: str, shard: int) -> Stream:
        rules.check_shard(shard, self.shards)
        if (topic, shard) not in self._streams:
            self._streams[topic, shard] = Stream(self._line, topic, shard, self._settings)
        return self._streams[topic, shard]

    def __repr__(self) -> str:
        return f"NatsBroker({self._shown!r}, shards={self.shards})"
