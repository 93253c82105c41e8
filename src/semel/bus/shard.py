"""One shard of a router, for as long as it is ours: read, append, acknowledge, and again.

Of one job, nothing overtakes anything; jobs wait for each other no longer than for the batch. Gaps,
and how they end: dead between append and acknowledgement, the next owner appends again, and the
job's log knows the event; dead before, nothing has happened. A former owner that wakes up is
refused by the job's log, which knows the next one's fence.

The easy mistake is to let one event stop a shard. What can never be appended is told of, counted
and passed over. The other one is to pass over what is not the event's fault: where the target has
no tables any more, the router ends; where its file is damaged, it waits as for any outage; and
everything is left where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, assert_never

from semel.bus import jobs
from semel.bus.jobs import Event, Written
from semel.colour import answers_of
from semel.entries import Answer, Appended, Ended, Fenced, Full, Repeated, VersionConflict
from semel.errors import (
    BrokerUnavailableError,
    CorruptRecordError,
    DamagedStoreError,
    SettingsError,
    StoreUnavailableError,
)
from semel.messages import Delivery
from semel.ports import Consumer
from semel.shards import Hold, let_go
from semel.values import Mismatch

if TYPE_CHECKING:
    from semel.bus.router import Router

log = logging.getLogger("semel")

# How long a read waits for the first event: so late is a lost ring, and a shard that is to end.
WAIT_S = 0.5

# After a defect, a shard begins anew so late.
AFTER_DEFECT_S = 5.0

OUTAGE = (BrokerUnavailableError, StoreUnavailableError)

Lane = deque[tuple[Event, Written]]
"""The events of one job that are to be appended, in order."""


class _PutDownError(Exception):
    """The shard is to be handed over, or its lease has run out."""


class _LostError(Exception):
    """A later owner of the shard is at work."""


class Shard:
    """One shard, for as long as it is ours."""

    def __init__(self, router: Router, hold: Hold) -> None:
        self._router = router
        self._hold = hold
        self._fences = {router.fence_of(hold.shard): hold.fence}

    async def run(self) -> None:
        router, hold = self._router, self._hold
        try:
            while hold.live:
                try:
                    await self._follow()
                except OUTAGE as error:
                    router.source_circuit.failed(error, hold.shard)
                    await router.source_circuit.wait(hold.ending, hold.shard)
                except (_PutDownError, _LostError, SettingsError):
                    raise
                except Exception:
                    log.exception("semel: %s: shard %d begins anew", router.shown, hold.shard)
                    await self._rest()
        except _PutDownError:
            pass
        except _LostError as lost:
            log.warning("semel: %s: shard %d: %s", router.shown, hold.shard, lost)
        finally:
            router.source_circuit.gave_up(hold.shard)
            router.target_circuit.gave_up(hold.shard)

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AFTER_DEFECT_S):
                await self._hold.ending.wait()

    async def _follow(self) -> None:
        """What an earlier owner left over, then whatever comes."""
        router, hold = self._router, self._hold
        consumer = await router.source.consumer(hold)
        try:
            while hold.live and (left := await consumer.left_over(router.batch)):
                await self._finish(consumer, left)
            while hold.live:
                new = await consumer.read(router.batch, wait_s=WAIT_S)
                router.source_circuit.passed(hold.shard)
                if new:
                    await self._finish(consumer, new)
        finally:
            await let_go(consumer)

    async def _finish(self, consumer: Consumer, deliveries: Sequence[Delivery]) -> None:
        lanes = self._lanes(deliveries)
        oldest = lanes[0][0][0] if lanes else None
        with self._router.in_hand(self._hold.shard, oldest):
            await self._drain(lanes)
            await consumer.ack(deliveries)

    def _lanes(self, deliveries: Sequence[Delivery]) -> list[Lane]:
        lanes: dict[str, Lane] = {}
        for delivery in deliveries:
            try:
                event, written = self._router.source.event(delivery)
                self._router.check(event)
            except (ValueError, RecursionError) as error:
                self._router.refuse("unreadable", f"shard {self._hold.shard}: {error}")
            else:
                lanes.setdefault(event.job_id, deque()).append((event, written))
        return list(lanes.values())

    async def _drain(self, lanes: Sequence[Lane]) -> None:
        """Append all of it, as often as the target fails, while the shard is ours."""
        circuit, who = self._router.target_circuit, self._hold.shard
        while left := [lane for lane in lanes if lane]:
            try:
                await answers_of([self._append(lane) for lane in left])
            except StoreUnavailableError as error:
                circuit.failed(error, who)
                await circuit.wait(self._hold.ending, who)
            else:
                circuit.passed(who)

    async def _append(self, lane: Lane) -> None:
        router = self._router
        while lane:
            if not self._hold.live:
                raise _PutDownError
            event, written = lane[0]
            try:
                answer = await jobs.append(
                    router.log,
                    event,
                    written,
                    ends=router.stages.ends(event.stage, event.seq),
                    keep=router.keep,
                    fences=self._fences,
                )
            except DamagedStoreError:
                raise
            except CorruptRecordError as error:
                router.refuse("corrupt", f"{jobs.named(event)}: {error}")
            except StoreUnavailableError as error:
                if error.again:
                    raise
                router.refuse("too_large", f"{jobs.named(event)}: {error}")
            else:
                self._settle(event, answer)
            lane.popleft()

    def _settle(self, event: Event, answer: Answer) -> None:
        router = self._router
        match answer:
            case Appended():
                router.counts["routed"] += 1
            case Repeated():
                router.counts["repeated"] += 1
            case Fenced(name, number) if name in self._fences:
                raise _LostError(f"a later owner, with fence {number}, is at work")
            case Fenced(name, number):
                why = f"attempt {number} at {name!r} has begun"
                router.refuse("stale", f"{jobs.named(event)}: {why}")
            case Mismatch():
                router.refuse("conflict", f"{jobs.named(event)} came before with other data")
            case Ended():
                router.refuse("ended", f"{jobs.named(event)}: the job has ended")
            case VersionConflict() | Full():
                raise AssertionError("nothing was expected of the stream, and it is never full")
            case _:
                assert_never(answer)
