"""One owner's view of one queue.

RabbitMQ gives each message to one reader and keeps it for him until he acknowledges it, or is gone:
then it is put back where it was. The queue has a single active consumer, so that nobody overtakes
what another still has in hand. A reader who freezes keeps his place until the server has missed
enough of his heartbeats.

The easy mistake is to cancel the consumer before handing back what it has. The next one is active
at once, and is given what comes behind. Here the whole channel is closed, which is one step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from semel.brokers.rabbit import events
from semel.brokers.rabbit.line import BROKEN, CLOSING_S, Line, Link
from semel.cloudevents import NotAnEventError
from semel.colour import ASYNC
from semel.errors import BrokerUnavailableError
from semel.messages import Delivery

# So many are given to us before they are asked for. What we die with is delivered again, so that
# more would make more of those; fewer would make us wait.
AHEAD = 300


class RabbitConsumer:
    """What `RabbitBroker.consumer` returns."""

    def __init__(
        self, line: Line, joined: Callable[[], Awaitable[Link]], queue: str, topic: str, name: str
    ) -> None:
        self._line = line
        self._joined = joined
        self._queue = queue
        self._topic = topic
        self._name = name
        self._link: Link | None = None
        self._channel: AbstractChannel | None = None
        self._channels = 0
        self._ahead: list[AbstractIncomingMessage] = []
        """Given to us, and not given out yet."""
        self._held: dict[tuple[int, int], AbstractIncomingMessage] = {}
        """Given out and not acknowledged, by channel and number."""
        self._came = asyncio.Event()
        self._one = asyncio.Lock()
        self._is_closed = False

    @property
    def pending(self) -> int:
        return len(self._held)

    @property
    def ahead(self) -> int:
        return len(self._ahead)

    # --- giving out -------------------------------------------------------------------------

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        """As far as RabbitMQ knows by now: of whoever is not gone yet, it comes with `read`."""
        async with self._one:
            if not await self._ready():
                return []
            old = list(takewhile(lambda each: each.redelivered, self._ahead[:limit]))
            return self._give_out(len(old))

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        until = ASYNC.now() + wait_s
        async with self._one:
            while await self._ready():
                left_s = until - ASYNC.now()
                if self._ahead or left_s <= 0:
                    return self._give_out(limit)
                self._came.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._came.wait()
                self._check()
            return []

    def _give_out(self, limit: int) -> list[Delivery]:
        given, self._ahead = self._ahead[:limit], self._ahead[limit:]
        return [self._delivery(each) for each in given]

    def _delivery(self, found: AbstractIncomingMessage) -> Delivery:
        token = (self._channels, found.delivery_tag or 0)
        self._held[token] = found
        # A quorum queue counts; of any other we know only whether it was the first time.
        times = found.headers.get("x-delivery-count", int(bool(found.redelivered)))
        count = 1 + (times if isinstance(times, int) else 0)
        try:
            message = events.read(found.content_type, found.headers, found.body)
        except NotAnEventError as error:
            return Delivery(token, None, count, problem=str(error), raw=found.body)
        if not message.topic:
            message = replace(message, topic=self._topic)
        return Delivery(token, message, count)

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        """Nothing: RabbitMQ hands out by itself what a reader left."""
        return []

    # --- the channel ------------------------------------------------------------------------

    async def _ready(self) -> bool:
        """Is there a channel that gives to us? What was given over an earlier one comes again."""
        if self._is_closed:
            return False
        link = await self._joined()
        if self._link is not link or self._channel is None or self._channel.is_closed:
            await self._begin(link)
        return not self._is_closed

    async def _begin(self, link: Link) -> None:
        self._forget()
        self._channels += 1
        async with self._line.using(link):
            channel = await link.channel()
            self._link, self._channel = link, channel
            channel.close_callbacks.add(self._lost)
            await channel.set_qos(prefetch_count=AHEAD)
            queue = await channel.get_queue(self._queue)
            await queue.consume(self._given)
            # What there is to give is on its way by then, and comes before the second answer.
            for _ in range(2):
                await queue.declare()

    def _check(self) -> None:
        if not self._is_closed and (self._channel is None or self._channel.is_closed):
            raise BrokerUnavailableError(
                "the channel to RabbitMQ was closed; what was given over it comes again"
            )

    async def _given(self, found: AbstractIncomingMessage) -> None:
        self._ahead.append(found)
        self._came.set()

    def _lost(self, *_: Any) -> None:
        self._came.set()

    def _forget(self) -> None:
        self._ahead.clear()
        self._held.clear()

    # --- and then ---------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Of a channel that is closed nothing is pending: it comes again."""
        channel = self._channel
        if channel is None or channel.is_closed:
            self._forget()
            return
        ours = [each.token for each in deliveries if each.token in self._held]
        if not ours:
            return
        async with self._line.using(self._link):
            for token, everything in self._grouped(ours):
                await self._held[token].ack(multiple=everything)
            # An acknowledgement has no answer. This has, and comes behind them.
            await channel.set_qos(prefetch_count=AHEAD)
        for token in ours:
            self._held.pop(token, None)

    def _grouped(self, tokens: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], bool]]:
        """One for all, when they are all that was given out up to the last of them."""
        last = max(tokens)
        if set(tokens) == {token for token in self._held if token <= last}:
            return [(last, True)]
        return [(token, False) for token in tokens]

    async def close(self) -> None:
        """RabbitMQ puts back what was not acknowledged."""
        self._is_closed = True
        self._came.set()
        channel, self._channel = self._channel, None
        self._forget()
        if channel is not None and not channel.is_closed:
            with contextlib.suppress(*BROKEN, asyncio.CancelledError):
                async with asyncio.timeout(CLOSING_S):
                    await channel.close()

    def __repr__(self) -> str:
        return f"RabbitConsumer({self._queue!r}, {self._name!r})"
