"""One shard of a worker's topics, for as long as it is ours.

Each topic has a lane: a task that reads, hands to the inbox, acknowledges, and reads on. So one
topic that is slow holds up no other, and within a lane nothing overtakes anything. What an earlier
owner left over comes first. Beside the lanes, what waits in the inbox is run when it is due.

The order in a lane is the whole secret: read, effect and memory in one commit, acknowledge. Who
dies before the commit has done nothing; who dies behind it has the message delivered again, and
the inbox has seen it.

The easy mistake is to go on reading after a read whose reply was lost: those messages were handed
to us, and the next ones would overtake them. After every outage a lane begins anew, with what was
left over, its own included.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from semel.colour import ASYNC
from semel.errors import (
    BrokerUnavailableError,
    ClaimLostError,
)
from semel.keys import fingerprint
from semel.messages import Delivery, Ending, Held, Message, slots_of
from semel.ports import Consumer
from semel.shards import Hold, let_go
from semel.stores.inbox_rules import is_outage, sequence_of
from semel.worker.copies import Copies
from semel.worker.handlers import UNREADABLE

if TYPE_CHECKING:
    from semel.worker import Worker

T = TypeVar("T")

log = logging.getLogger("semel")

# How long a read waits for the first message: a lane that is to end notices at least this often.
WAIT_S = 0.5

# What waits is asked for so soon after something was put there, and then ever more rarely.
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0

# After a defect, such as an inbox that raises what it should not, a lane begins anew so late.
AFTER_DEFECT_S = 5.0

# Messages of other owners' that idled too long are looked for so often in that time.
LOOKS_PER_IDLE = 5


# For what may run beside anything else.
ANYBODY = contextlib.nullcontext()


class _PutDownError(Exception):
    """The shard is to be handed over, or is lost: begin nothing more."""


class Shard:
    """All topics of one shard."""

    def __init__(self, worker: Worker, hold: Hold) -> None:
        self.worker = worker
        self.hold = hold
        self._wake = asyncio.Event()
        self._copies: Copies | None = None
        if worker.dead_letter is not None:
            self._copies = Copies(
                worker.broker, worker.dead_letter, hold.shard, hold.fence, worker.group
            )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._until_all_end(self._retry_what_waits))
            for topic in self.worker.handlers.topics:
                tasks.create_task(self._until_all_end(_Lane(self, topic).run))

    async def _until_all_end(self, work: Callable[[], Awaitable[None]]) -> None:
        """Whoever finds that the shard is not ours ends it for all of us.

        A lease that has run out may still be renewed, when nobody has taken over: without this the
        shard would be ours again, and some of its work at an end.
        """
        try:
            await work()
        finally:
            self.hold.ending.set()
            self._wake.set()

    async def through(self, work: Callable[[], Awaitable[T]], who: object) -> T:
        """Do it, as often as the store fails, or what a handler needs, while the shard is ours."""
        circuit = self.worker.store_circuit
        try:
            while self.hold.live:
                try:
                    answer = await work()
                except Exception as error:
                    if not is_outage(error):
                        raise
                    circuit.failed(error, who)
                    await circuit.wait(self.hold.ending, who)
                else:
                    circuit.passed(who)
                    return answer
        finally:
            circuit.gave_up(who)
        raise _PutDownError

    async def settle(self, endings: Iterable[tuple[Message, Ending]], *, again: bool) -> None:
        """Count how they ended, tell, and copy what is parked for good."""
        waits = False
        for message, ending in endings:
            self.worker.count(message, ending, again=again)
            if isinstance(ending, Held):
                waits = waits or ending.why in ("retry", "gap")
                self._copy(message, ending)
        if waits:
            self._wake.set()
        if self._copies is not None:
            await self._copies.send()

    def _copy(self, message: Message, held: Held) -> None:
        if self._copies is not None and held.why in ("poison", "crash"):
            self._copies.add(message, held)

    async def copy_again(self, endings: Iterable[tuple[Message, Ending]]) -> None:
        """What came again and is parked for good may have been parked by somebody who then died."""
        waiting = getattr(self.worker.inbox, "waiting", None)
        if self._copies is None or waiting is None:
            return
        for message, ending in endings:
            if ending == Held("behind"):
                sequence, _ = sequence_of(self.worker.group, message)
                rows = await self.through(partial(waiting, sequence, limit=1), self._copies)
                if rows and rows[0].message.id == message.id and rows[0].state == "parked":
                    self._copy(message, Held(rows[0].why, rows[0].error))

    # --- what waits -------------------------------------------------------------------------

    async def _retry_what_waits(self) -> None:
        slots = slots_of(self.hold.shard, self.worker.broker.shards)
        pause_s = FIRST_RETRY_S
        # The first time alone, as what was left over: what ended the process before is due now.
        await self._run_due(slots, self.worker.alone)
        while self.hold.live:
            if await self._woken(pause_s):
                pause_s = FIRST_RETRY_S
                await ASYNC.sleep(pause_s)  # what was just put there is not due at once
            ran = await self._run_due(slots)
            pause_s = FIRST_RETRY_S if ran else min(LAST_RETRY_S, 2 * pause_s)

    async def _woken(self, pause_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        woken = self._wake.is_set()
        self._wake.clear()
        return woken and self.hold.live

    async def _run_due(
        self, slots: tuple[int, int], guard: AbstractAsyncContextManager[None] = ANYBODY
    ) -> bool:
        worker = self.worker

        async def retry() -> Sequence[tuple[Message, Ending]]:
            async with guard:
                return await worker.inbox.retry(worker.group, slots, worker.handlers)

        try:
            ran = await self.through(retry, self)
            await self.settle(ran, again=True)
        except _PutDownError:
            return False
        except BrokerUnavailableError as error:  # a copy that did not get out: later, then
            worker.broken(error)
            return False
        except Exception as error:  # noqa: BLE001 - told there
            await self.after_defect(error, f"what waits in shard {self.hold.shard}")
            return False
        return bool(ran)

    async def after_defect(self, error: Exception, what: str) -> None:
        """Neither an outage nor a message's fault: say so, and begin anew a little later."""
        log.error("semel: %s: %s begins anew: %s", self.worker.shown, what, error, exc_info=error)
        self.worker.broken(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AFTER_DEFECT_S):
                await self.hold.ending.wait()


class _Lane:
    """One topic of one shard, strictly in order."""

    def __init__(self, shard: Shard, topic: str) -> None:
        self._shard = shard
        self._worker = shard.worker
        self._hold = shard.hold
        self._topic = topic
        self._looks_at = ASYNC.now()
        """When to look next for what idled too long."""

    async def run(self) -> None:
        circuit = self._worker.broker_circuit
        try:
            while self._hold.live:
                try:
                    await self._follow()
                except _PutDownError:
                    return
                except ClaimLostError as lost:
                    log.warning("semel: %s: %s is lost: %s", self._worker.shown, self, lost)
                    self._hold.ending.set()
                except BrokerUnavailableError as error:
                    self._worker.broken(error)
                    circuit.failed(error, self)
                    await circuit.wait(self._hold.ending, self)
                except Exception as error:  # noqa: BLE001 - other topics go on; told there
                    await self._shard.after_defect(error, str(self))
        finally:
            circuit.gave_up(self)

    async def _follow(self) -> None:
        """What was left over first, then whatever comes."""
        worker, hold = self._worker, self._hold
        await worker.broker.join(self._topic, worker.group)
        consumer = await worker.broker.consumer(
            self._topic, worker.group, hold.shard, name=worker.name, fence=hold.fence
        )
        try:
            while hold.live and (left := await consumer.left_over(worker.batch)):
                await self._finish(consumer, left, singly=True)
            worker.broker_circuit.passed(self)
            while hold.live:
                await self._look_for_idle(consumer)
                new = await consumer.read(worker.batch, wait_s=min(WAIT_S, worker.idle_s))
                worker.broker_circuit.passed(self)
                if new:
                    await self._finish(consumer, new, singly=False)
        finally:
            await let_go(consumer)

    async def _look_for_idle(self, consumer: Consumer) -> None:
        worker = self._worker
        if ASYNC.now() < self._looks_at:
            return
        while self._hold.live and (page := await consumer.reclaim(worker.idle_s)):
            for each in page:
                log.info(
                    "semel: %s: took over %s, which %s had for %.1f s; delivered %d times",
                    worker.shown,
                    each.message.id if each.message else each.token,
                    each.consumer or "somebody",
                    each.idle_s,
                    each.count,
                )
            await self._finish(consumer, page, singly=True)
        self._looks_at = ASYNC.now() + worker.idle_s / LOOKS_PER_IDLE

    async def _finish(
        self, consumer: Consumer, deliveries: Sequence[Delivery], *, singly: bool
    ) -> None:
        """`singly`: they were begun before and not finished; one of them may have been why."""
        messages = [self._message(each) for each in deliveries]
        apply = self._alone if singly else self._applied
        endings = await apply(messages)
        both = list(zip(messages, endings, strict=True))
        if singly:
            await self._shard.copy_again(both)
        await self._shard.settle(both, again=False)
        await consumer.ack(deliveries)
        self._worker.handled(messages[-1])

    async def _applied(self, messages: Sequence[Message]) -> Sequence[Ending]:
        inbox, group, handlers = self._worker.inbox, self._worker.group, self._worker.handlers
        return await self._shard.through(lambda: inbox.apply(group, messages, handlers), self)

    async def _alone(self, messages: Sequence[Message]) -> Sequence[Ending]:
        """That each is begun is counted: if the process dies now, it must be by that message."""
        inbox, group, handlers = self._worker.inbox, self._worker.group, self._worker.handlers

        async def apply(message: Message) -> Sequence[Ending]:
            async with self._worker.alone:
                return await inbox.apply(group, [message], handlers, singly=True)

        found = [await self._shard.through(partial(apply, each), self) for each in messages]
        return [ending for (ending,) in found]

    def _message(self, delivery: Delivery) -> Message:
        message = delivery.message
        if message is None:
            return self._unreadable(delivery)
        # What somebody else published may not say where.
        return message if message.topic == self._topic else replace(message, topic=self._topic)

    def _unreadable(self, delivery: Delivery) -> Message:
        """For what is no event of ours: nobody can handle it, so it is parked, alone."""
        worker = self._worker
        worker.count_unreadable(self._topic)
        id = f"unreadable-{fingerprint(self._topic.encode(), delivery.raw)[:16].hex()}"
        log.error(
            "semel: %s: %s has what is no event, parked as %s: %s",
            worker.shown,
            self,
            id,
            delivery.problem,
        )
        raw = base64.b64encode(delivery.raw).decode()
        return Message(
            position=0,
            id=id,
            type=UNREADABLE,
            topic=self._topic,
            tenant="",
            aggregate_type=UNREADABLE,
            aggregate_id=id,
            seq=None,
            payload=json.dumps({"problem": delivery.problem, "raw": raw}),
            time=datetime.now(UTC),
        )

    def __str__(self) -> str:
        return f"{self._topic!r}, shard {self._hold.shard}"
