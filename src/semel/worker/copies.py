"""Copies of what was parked for good, on a topic of their own.

The parked store has the message itself, and people settle it there; the copy tells others. It goes
out before the original is acknowledged, again after a lost reply or a crash, and later when the
topic is full. Of what failed for the last time in a later try, and was acknowledged long before, a
crash at that very moment leaves no copy; the parked store has it all the same.

A dead-letter topic has no owner of its own: several groups may copy to it. Each copy names the tail
that it follows, so that of two that come at once the second one is refused and asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime

from semel.messages import Batch, Behind, Fenced, Forked, Full, Held, Message, Refused, Tail, Taken
from semel.ports import Broker

__all__ = ["Copies"]

log = logging.getLogger("semel")

# So many wait in memory for a topic that is full; the parked store has them all.
MOST_WAITING = 1000

# Two groups that copy at once ask again this often before they let the other one be.
TRIES = 20


class Copies:
    """What is to be copied to one shard of the dead-letter topic."""

    def __init__(self, broker: Broker, topic: str, shard: int, fence: int, group: str) -> None:
        self._broker = broker
        self._topic = topic
        self._shard = shard
        self._fence = fence
        self._group = group
        self._waiting: deque[Message] = deque(maxlen=MOST_WAITING)
        self._lock = asyncio.Lock()
        self._full = ""

    def add(self, message: Message, held: Held) -> None:
        told = {
            "semel-group": self._group,
            "semel-topic": message.topic,
            "semel-why": held.why,
            "semel-error": held.error[:1000],
        }
        if message.seq is not None:
            told["semel-seq"] = str(message.seq)
        if message.refused:
            told["semel-refused"] = message.refused
        headers = {**message.headers, **told}
        # Without its number: here it has no predecessor, and nobody should wait for one. And no
        # stand-in: it is for whoever is to hear of it, and would be parked here too.
        self._waiting.append(
            replace(message, topic=self._topic, seq=None, headers=headers, refused="")
        )

    async def send(self) -> None:
        """Publish what waits, in order, until the topic is full."""
        if not self._waiting:
            return
        async with self._lock:
            while self._waiting and await self._sent(self._waiting[0]):
                self._waiting.popleft()

    async def _sent(self, message: Message) -> bool:
        for _ in range(TRIES):
            receipt = await self._broker.publish(await self._batch(message))
            match receipt:
                case Taken():
                    self._full = ""
                    return True
                case Fenced(fence):
                    self._fence = fence
                case Behind() | Forked():
                    pass  # somebody else has published: behind that, then
                case Full(_, why):
                    self._say_full(why)
                    return False
                case Refused(_, why):
                    log.error("semel: %s refuses a copy of %s: %s", self._topic, message.id, why)
                    return True
        return False

    async def _batch(self, message: Message) -> Batch:
        tail = await self._broker.tail(self._topic, self._shard)
        if tail is None:  # a broker that cannot tell does not compare either
            tail = Tail(int(datetime.now(UTC).timestamp() * 1_000_000))
        copy = replace(message, position=tail.position + 1)
        return Batch(self._topic, self._shard, self._fence, tail, [copy])

    def _say_full(self, why: str) -> None:
        if not self._full:
            log.warning("semel: %s takes no copies of what is parked: %s", self._topic, why)
        self._full = why
