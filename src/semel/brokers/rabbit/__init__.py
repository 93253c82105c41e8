"""The broker on RabbitMQ, with publisher confirms. RabbitMQ 3.8 or later.

    RabbitBroker("amqp://user:password@localhost/", groups={"axiom:events": ["billing", "mail"]})

A topic is a durable exchange, `semel/axiom:events`. A group has a durable queue for each shard,
`semel/axiom:events/billing/3`, bound to it with the shard's number. Messages are persistent
CloudEvents, in one document or, with `mode="binary"`, as headers and payload.

RabbitMQ is a post office and no log, and promises less than the other brokers. What was
acknowledged is gone, so a new group begins with what comes then. Nobody can tell what lies at the
end, so a lost end is not noticed. A message that is published again is there again, and a former
owner may publish: each message comes at least once, for the first time in order, and the inbox
passes over the rest. Before the first group is there, publishing answers `Full`: RabbitMQ would
confirm what it throws away. One that is killed soon after a group joined may have forgotten which
topic its queue belongs to, so that whoever connects anew joins again.

`maxlen` limits what waits in each queue. Beyond it RabbitMQ refuses, and the relay waits; a group
that reads meanwhile is sent the same message with every try. With it, each message waits for the
confirmation of the one before, so that nothing overtakes what was refused: that is slow. Give the
relay and the workers the same. The easy mistake is a limit by a policy, of which nobody here knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import quote, urlsplit

from semel.brokers import rules
from semel.brokers.shared import check_driver
from semel.brokers.urls import check_query
from semel.errors import SettingsError
from semel.messages import (
    Backlog,
    Batch,
    Features,
    Full,
    GroupBacklog,
    Message,
    Receipt,
    Refused,
    Taken,
)

try:
    from aio_pika import __version__ as _driver
except ImportError as error:
    raise SettingsError(
        "RabbitBroker needs aio-pika, which is not installed: pip install 'semel[rabbitmq]'"
    ) from error

from aio_pika import Message as Parcel
from aio_pika.abc import AbstractExchange
from aio_pika.exceptions import (
    ChannelNotFoundEntity,
    ChannelPreconditionFailed,
    DeliveryError,
    PublishError,
)

from semel.brokers.rabbit.consumer import RabbitConsumer
from semel.brokers.rabbit.events import SHORT, Mode, write
from semel.brokers.rabbit.line import IN_A_URL, Line, Link, all_of

__all__ = ["RabbitBroker", "RabbitConsumer"]

# Before it, a connection that is closed cancels whoever waits on it.
OLDEST_DRIVER = (10, 0)

# So many messages are on their way at once.
WINDOW = 500

LONGEST_EXCHANGE = 127


class RabbitBroker:
    """Messages in RabbitMQ queues. See `semel.brokers.rabbit`.

    `groups` are the groups of each topic that are there before its first message is. `timeout_s` is
    how long RabbitMQ may stay silent. The URL is aio-pika's, with its settings behind a `?`.
    """

    features = Features(fenced=False, dedups="none", heals=False, bounded=False, leases=False)

    def __init__(
        self,
        url: str,
        *,
        shards: int = 1,
        maxlen: int | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
        mode: Mode = "structured",
        prefix: str = "semel",
        timeout_s: float = 5.0,
    ) -> None:
        check_driver("RabbitBroker", "aio-pika", _driver, OLDEST_DRIVER, "rabbitmq")
        rules.check_settings(shards, maxlen)
        check_query(RabbitBroker, url, driver="aio-pika", known=IN_A_URL, such="heartbeat")
        if mode not in {"structured", "binary"}:
            raise SettingsError(f'mode={mode!r}: write "structured" or "binary"')
        if any(isinstance(names, str) for names in (groups or {}).values()):
            raise SettingsError(f"groups={groups!r}: write a list of groups for each topic")
        self.shards = shards
        self._shown = f"{urlsplit(url).netloc.rpartition('@')[2]}{urlsplit(url).path}"
        self._line = Line(url, timeout_s)
        self._maxlen = maxlen
        self._groups = {topic: set(names) for topic, names in (groups or {}).items()}
        """Those we know of."""
        self._mode: Mode = mode
        self._prefix = prefix
        self._locks: dict[tuple[str, int], asyncio.Lock] = {}
        self._consumers: dict[tuple[str, str, int], RabbitConsumer] = {}

    # --- publishing -------------------------------------------------------------------------

    async def publish(self, batch: Batch) -> Receipt:
        rules.check(batch, self.shards)
        written, refused = write(batch.messages, self._mode)
        lock = self._locks.setdefault((batch.topic, batch.shard), asyncio.Lock())
        async with lock:
            receipt = await self._send(batch, written)
        return refused if refused is not None and isinstance(receipt, Taken) else receipt

    async def _send(self, batch: Batch, written: Sequence[tuple[Message, Parcel]]) -> Receipt:
        sent = 0
        while sent < len(written):
            window = written[sent : sent + await self._at_once(batch)]
            receipt = await self._confirmed(batch, window)
            if receipt is not None:
                return receipt
            sent += len(window)
        return Taken(sent)

    async def _at_once(self, batch: Batch) -> int:
        """One at a time, where one may be refused and must not be overtaken.

        That it finds no queue is such a case: a group may join between two messages.
        """
        link = await self._joined(batch.topic)
        known = (batch.topic, batch.shard) in link.routable
        return WINDOW if known and self._maxlen is None else 1

    async def _confirmed(
        self, batch: Batch, window: Sequence[tuple[Message, Parcel]]
    ) -> Receipt | None:
        """None when all of them are there."""
        place = (batch.topic, batch.shard)
        async with self._line.using(await self._joined(batch.topic)) as link:
            exchange = await link.exchange(self._exchange(batch.topic))
            key = str(batch.shard)
            # Begun in order, they are sent in order: each waits in line for the channel.
            errors = await all_of(
                [asyncio.ensure_future(_publish(exchange, parcel, key)) for _, parcel in window]
            )
            for error in errors:
                match error:
                    case None:
                        link.routable.add(place)
                    case PublishError():
                        link.routable.discard(place)
                        return Full(0, self._nobody(batch))
                    case DeliveryError():
                        return Full(self._maxlen or 0, self._refuses(batch))
                    case ChannelPreconditionFailed() if "size" in str(error):
                        break
                    case _:
                        raise error
            else:
                return None
        return await self._too_large(batch, window, str(error))

    async def _too_large(
        self, batch: Batch, window: Sequence[tuple[Message, Parcel]], why: str
    ) -> Receipt | None:
        """One of them is. RabbitMQ does not say which, and has closed the channel."""
        if len(window) == 1:
            return Refused(window[0][0], f"RabbitMQ: {why}")
        for each in window:
            receipt = await self._confirmed(batch, [each])
            if receipt is not None:
                return receipt
        return None

    def _nobody(self, batch: Batch) -> str:
        return (
            f"no group has joined {batch.topic!r}, shard {batch.shard}, and RabbitMQ keeps nothing "
            "for nobody: start a worker, or name the groups, RabbitBroker(..., groups=...)"
        )

    def _refuses(self, batch: Batch) -> str:
        return (
            f"a queue of {batch.topic!r}, shard {batch.shard}, takes no more: start its group's "
            "workers, or see what holds them up"
        )

    async def tail(self, topic: str, shard: int) -> None:
        """A queue does not tell. That nobody answers is told all the same."""
        rules.check_shard(shard, self.shards)
        await self._line.link()

    # --- groups -----------------------------------------------------------------------------

    async def join(self, topic: str, group: str) -> None:
        arguments: dict[str, bool | int | str] = {"x-single-active-consumer": True}
        if self._maxlen is not None:
            arguments |= {"x-max-length": self._maxlen, "x-overflow": "reject-publish"}
        exchange = self._exchange(topic)
        link = await self._line.link()
        async with self._line.declaring() as channel:
            await channel.declare_exchange(exchange, "direct", durable=True)
            for shard in range(self.shards):
                queue = await channel.declare_queue(
                    self._queue(topic, group, shard), durable=True, arguments=dict(arguments)
                )
                await queue.bind(exchange, str(shard))
        self._groups.setdefault(topic, set()).add(group)
        link.joined.add((topic, group))

    async def _joined(self, topic: str, group: str | None = None) -> Link:
        """A connection over which the group has joined, or all that we know of.

        A server that was killed may have kept a queue and lost its binding.
        """
        link = await self._line.link()
        for name in sorted(self._groups.get(topic, ())) if group is None else [group]:
            if (topic, name) not in link.joined:
                await self.join(topic, name)
        return link

    async def leave(self, topic: str, group: str) -> None:
        """Forget the group and what lies in its queues."""
        self._groups.get(topic, set()).discard(group)
        async with self._line.declaring() as channel:
            for shard in range(self.shards):
                await channel.queue_delete(self._queue(topic, group, shard))

    async def consumer(
        self, topic: str, group: str, shard: int, *, name: str, fence: int
    ) -> RabbitConsumer:
        rules.check_shard(shard, self.shards)
        await self.join(topic, group)
        # One reader per shard: a view that was opened here before would keep its place.
        if former := self._consumers.pop((topic, group, shard), None):
            await former.close()
        queue, joined = self._queue(topic, group, shard), partial(self._joined, topic, group)
        consumer = RabbitConsumer(self._line, joined, queue, topic, name)
        self._consumers[topic, group, shard] = consumer
        return consumer

    async def backlog(self, topic: str, shard: int) -> Backlog:
        """Of the groups that are known here. What other processes have in hand is not told."""
        rules.check_shard(shard, self.shards)
        groups = [
            found
            for group in sorted(self._groups.get(topic, ()))
            if (found := await self._group(topic, group, shard))
        ]
        length = max(((group.unread or 0) + group.pending for group in groups), default=0)
        return Backlog(topic, shard, length, self._maxlen, None, groups)

    async def _group(self, topic: str, group: str, shard: int) -> GroupBacklog | None:
        async with self._line.declaring() as channel:
            try:
                queue = await channel.get_queue(self._queue(topic, group, shard))
            except ChannelNotFoundEntity:
                return None
        waiting = queue.declaration_result.message_count or 0
        reader = self._consumers.get((topic, group, shard))
        ahead, pending = (reader.ahead, reader.pending) if reader else (0, 0)
        return GroupBacklog(group, unread=waiting + ahead, pending=pending)

    # --- names ------------------------------------------------------------------------------

    def _exchange(self, topic: str) -> str:
        return _name(LONGEST_EXCHANGE, self._prefix, topic)

    def _queue(self, topic: str, group: str, shard: int) -> str:
        return _name(SHORT, self._prefix, topic, group, str(shard))

    async def aclose(self) -> None:
        while self._consumers:
            await self._consumers.popitem()[1].close()
        await self._line.aclose()

    def __repr__(self) -> str:
        return f"RabbitBroker({self._shown!r}, shards={self.shards})"


async def _publish(exchange: AbstractExchange, parcel: Parcel, key: str) -> None:
    await exchange.publish(parcel, key, mandatory=True)


def _name(longest: int, *words: str) -> str:
    """Between slashes; what a name may not have is `#` and its code, like `%` in a URL."""
    name = "/".join(quote(word, safe=":@,").replace("~", "%7E") for word in words)
    if len(name) > longest:
        raise rules.TopicError(
            f"{words!r} make a name of {len(name)} bytes, and RabbitMQ's driver takes {longest}: "
            "choose shorter ones"
        )
    return name.replace("%", "#")
