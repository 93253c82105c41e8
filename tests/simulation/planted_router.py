"""Ways to route that look right, each with one defect; the simulation has to find them all."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from router_world import Gateways, Plan

from semel.bus.shard import Lane, Shard
from semel.bus.sources import LogSource
from semel.entries import Answer
from semel.errors import StoreUnavailableError
from semel.messages import Delivery
from semel.ports import Consumer
from semel.shards import Hold
from semel.stores.log_rules import Append, mark_of

# --- routers ------------------------------------------------------------------------------------


class AcknowledgesFirst(Shard):
    """Whoever dies in between passes something over."""

    async def _finish(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
        await consumer.ack(deliveries)
        await self._drain(self._lanes(deliveries))


class TakesAnOutageForSuccess(Shard):
    """No reply is not yet an append."""

    async def _append(self, lane: Lane) -> None:
        try:
            await super()._append(lane)
        except StoreUnavailableError:
            lane.clear()


class AppendsAllAtOnce(Shard):
    """Of one job, too: what is sent first need not arrive first."""

    def _lanes(self, deliveries: Sequence[Delivery]) -> list[Lane]:
        return [deque([each]) for lane in super()._lanes(deliveries) for each in lane]


class StopsAtWhatIsNoEvent(Shard):
    """One entry holds up all that are behind it."""

    def _lanes(self, deliveries: Sequence[Delivery]) -> list[Lane]:
        for delivery in deliveries:
            self._router.source.event(delivery)
        return super()._lanes(deliveries)


class TrimsByNumber(LogSource):
    """After a failover, the same number is that of another event, which nobody has read."""

    async def consumer(self, hold: Hold) -> Consumer:
        consumer: Any = await super().consumer(hold)
        log = consumer._log

        class ByNumber:
            def __getattr__(self, name: str) -> Any:
                return getattr(log, name)

            async def trim(self, stream: str, upto: Any) -> int:
                return int(await log.trim(stream, upto.offset))

        consumer._log = ByNumber()
        return consumer  # type: ignore[no-any-return]


class GoesOnWhereItWas(LogSource):
    """A source that was brought back is read on from the number one was at: what has come there
    meanwhile is taken for what was read.
    """

    async def consumer(self, hold: Hold) -> Consumer:
        consumer: Any = await super().consumer(hold)
        log = consumer._log

        class ByNumber:
            def __getattr__(self, name: str) -> Any:
                return getattr(log, name)

            async def read(self, stream: str, after: Any, limit: int) -> Any:
                page = await log.read(stream, after, limit)
                if not page.lost or after is None:
                    return page
                all_there = await log.read(stream, page.floor, 1000)
                fresh = [e for e in all_there.entries if e.position.offset > after.offset]
                return replace(all_there, entries=fresh[:limit])

        consumer._log = ByNumber()
        return consumer  # type: ignore[no-any-return]


# --- logs ---------------------------------------------------------------------------------------


class KnowsNoIds(Gateways):
    """What is appended again is there again."""

    async def accept(self, op: Append) -> Answer:
        self.__dict__["count"] = count = self.__dict__.get("count", 0) + 1
        id = f"{op.id} {count}"
        return await super().accept(replace(op, id=id, mark=mark_of(id, b"")))


class ForgetsTheOwner(Gateways):
    """Of routers: a former owner is told from the current one by nobody."""

    async def accept(self, op: Append) -> Answer:
        owners = self.world.owner_of(op)
        fences = {name: n for name, n in op.fences.items() if name not in owners}
        return await super().accept(replace(op, fences=fences))


PLANTS = {
    "acknowledges first": Plan(shard=AcknowledgesFirst),
    "takes an outage for success": Plan(shard=TakesAnOutageForSuccess),
    "appends all at once": Plan(shard=AppendsAllAtOnce),
    "stops at what is no event": Plan(shard=StopsAtWhatIsNoEvent),
    "trims by number": Plan(source=TrimsByNumber, only_falls=True),
    "goes on where it was": Plan(source=GoesOnWhereItWas, only_falls=True),
    "the log knows no ids": Plan(gateways=KnowsNoIds),
    "the log forgets the owner": Plan(gateways=ForgetsTheOwner, only_falls=True),
}
