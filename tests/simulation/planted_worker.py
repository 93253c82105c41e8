"""Ways to consume that look right, each with one defect; the simulation has to find them all.

Most are of the consumer that everybody writes first: `SET NX`, the handler, acknowledge, and a
process that recovers what stays pending.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from party_world import LEASE_S
from planted import TwoSteps
from worker_world import GROUP, ConsumerHere, InboxHere, LedgerHere, Opened, Plan, Streams

from semel.errors import BrokerUnavailableError, StoreUnavailableError
from semel.messages import Delivery, Ending, Message, Seen
from semel.ports import Consumer, StoreLedger
from semel.shards import Hold, Shards
from semel.stores.inbox_rules import Course, Failure, Mark, number_of, sequence_of
from semel.stores.rules import Claiming
from semel.values import Won
from semel.worker.shard import _Lane

Run = tuple[Failure | None, list[Any]]

# --- inboxes ------------------------------------------------------------------------------------


class SetNX(InboxHere):
    """The marker first, then the handler; when that raises, the marker is deleted.

    Whoever dies in between, or is cancelled, or cannot delete it, has lost the effect. And whoever
    finds the marker of somebody at work acknowledges what that one has yet to fail at.
    """

    async def _apply_all(self, consumer: str, messages: Sequence[Message], handle: Any) -> Any:
        return [await self._apply(consumer, each, handle, singly=False) for each in messages]

    async def _apply(self, consumer: str, message: Message, handle: Any, *, singly: bool) -> Ending:
        course = Course(consumer, self._known(consumer, message))
        ending = course.ask(message)
        if ending is not None:
            self._commit(course)
            return ending
        ending = course.applied(message)
        if not self._commit(course):
            return Seen()
        failure, effects = await self._run(consumer, message, handle, 1, counted=False)
        if failure is None:
            self.effects += effects
            return ending
        await self.way("asked_in_vain")
        self._delete(consumer, message)
        course = Course(consumer, self._known(consumer, message))
        course.ask(message)
        ending = course.failed(message, failure)
        self._commit(course)
        return ending

    def _delete(self, consumer: str, message: Message) -> None:
        """Whoever has set it."""
        id, _ = sequence_of(consumer, message)
        mark, seq = self._marks.get(id, Mark()), number_of(message)
        if seq and mark.seq == seq:
            self._marks[id] = Mark(seq - 1, mark.head, mark.turn + 1)
        self._seen.pop(id, None)


class KeepsWhatFailed(InboxHere):
    """The effect is there although its handler has failed behind it: the next try makes another."""

    async def _run(
        self, consumer: str, message: Message, handle: Any, attempt: int, *, counted: bool
    ) -> Run:
        written: list[Any] = []

        async def seen(message: Message, session: list[Any]) -> None:
            try:
                await handle(message, session)
            finally:
                written.extend(session)

        failure, effects = await super()._run(consumer, message, seen, attempt, counted=counted)
        return failure, written if failure else effects


class ForgetsForOthers(SetNX):
    """Whoever fails deletes the marker, at times so late that it is the next one's by now."""

    async def _apply(self, consumer: str, message: Message, handle: Any, *, singly: bool) -> Ending:
        return await InboxHere._apply(self, consumer, message, handle, singly=singly)

    async def _run(
        self, consumer: str, message: Message, handle: Any, attempt: int, *, counted: bool
    ) -> Run:
        async def forgetting(message: Message, session: list[Any]) -> None:
            try:
                await handle(message, session)
            except Exception:
                late_s = self.world.chance.choice([0.0, LEASE_S])
                self.world.loop.after(late_s, self._delete, consumer, message)
                raise

        return await super()._run(consumer, message, forgetting, attempt, counted=counted)


class ForgetsInTime(InboxHere):
    """Markers that expire before the last delivery."""

    async def apply(
        self, consumer: str, messages: Sequence[Message], handle: Any, *, singly: bool = False
    ) -> Sequence[Ending]:
        await self.sweep(older_than_s=1.0)
        return await super().apply(consumer, messages, handle, singly=singly)


class TwoWrites(InboxHere):
    """The effect in one place, and then the memory of it in another."""

    async def _run(
        self, consumer: str, message: Message, handle: Any, attempt: int, *, counted: bool
    ) -> Run:
        failure, effects = await super()._run(consumer, message, handle, attempt, counted=counted)
        if failure is None:
            self.effects += effects
            effects = []
            await self.way("commit_lost")
        return failure, effects


class CountsNoCrashes(InboxHere):
    """What ends the process is begun again for ever, and nothing behind it ever runs."""

    def _begin(self, id: bytes) -> bool:
        return True


class NeverGivesUp(InboxHere):
    """What can never succeed is tried for ever, and no person hears of it."""

    async def _run(
        self, consumer: str, message: Message, handle: Any, attempt: int, *, counted: bool
    ) -> Run:
        failure, effects = await super()._run(consumer, message, handle, attempt, counted=counted)
        if failure is not None and failure.why == "poison":
            failure = replace(failure, why="retry", delay_s=1.0)
        return failure, effects


class NoTurn(InboxHere):
    """Whoever wakes up commits, whatever others have done meanwhile."""

    def _commit(self, course: Course) -> bool:
        now = self._now
        self._marks |= {id: mark for id, _, mark in course.marks}
        self._seen |= dict.fromkeys(course.seen, now)
        for parking in course.parked:
            self._park(parking, course.consumer, now)
        for id, seq in course.woken:
            if seq in self._rows.get(id, {}):
                self._wake(id, seq, now)
        return True


class BlamesTheMessage(InboxHere):
    """What the handler needs is away, and that is counted like a failure of its own."""

    async def _run(
        self, consumer: str, message: Message, handle: Any, attempt: int, *, counted: bool
    ) -> Run:
        async def blamed(message: Message, session: list[Any]) -> None:
            try:
                await handle(message, session)
            except StoreUnavailableError as error:
                raise RuntimeError(str(error)) from None

        return await super()._run(consumer, message, blamed, attempt, counted=counted)


class ById(InboxHere):
    """Remembers ids alone: one that fails is overtaken by the next of its aggregate."""

    async def apply(
        self, consumer: str, messages: Sequence[Message], handle: Any, *, singly: bool = False
    ) -> Sequence[Ending]:
        alone = [replace(message, seq=None) for message in messages]
        return await super().apply(consumer, alone, handle, singly=singly)


class WaitsForNobody(InboxHere):
    """Takes what it sees for the next one, and a gap for nothing."""

    def _known(self, consumer: str, message: Message) -> Any:
        self._close_gap(consumer, message)
        return super()._known(consumer, message)

    def _known_of(self, consumer: str, messages: Sequence[Message]) -> Any:
        for message in messages:
            self._close_gap(consumer, message)
        return super()._known_of(consumer, messages)

    def _close_gap(self, consumer: str, message: Message) -> None:
        id, _ = sequence_of(consumer, message)
        mark, seq = self._marks.get(id, Mark()), number_of(message)
        if mark.head is None and seq > mark.seq + 1:
            self._marks[id] = Mark(seq - 1, None, mark.turn + 1)


class KeepsItWithoutAMark(InboxHere):
    """Puts a message behind one that waits, and does not see that this one is gone by now."""

    def _commit(self, course: Course) -> bool:
        whys = {parking.why for parking in course.parked}
        if whys == {"behind"} and not course.woken and not course.seen:
            for parking in course.parked:
                self._park(parking, course.consumer, self._now)
            return True
        return super()._commit(course)


# --- workers ------------------------------------------------------------------------------------


class AcknowledgesFirst(_Lane):
    """Tells the broker before the effect is committed."""

    async def _finish(
        self, consumer: Consumer, deliveries: Sequence[Delivery], *, singly: bool
    ) -> None:
        await consumer.ack(deliveries)
        await super()._finish(consumer, deliveries, singly=singly)


class NeverRenews(Shards):
    """A lease that is as long as handlers usually take."""

    async def _renew(self, ledger: StoreLedger, hold: Hold) -> bool:
        hold.unheard = True
        return False


# --- owners -------------------------------------------------------------------------------------


class TakesInTwoSteps(LedgerHere, TwoSteps):
    """Two see that the owner is gone, and both take its place."""


class TakesWithoutALease(LedgerHere):
    """Compares and sets the owner, and leaves the lease that has run out to its first renewal."""

    async def perform(self, op: Any) -> Any:
        if isinstance(op, Claiming):
            return await self.ask(lambda: self._serve(op))
        return await super().perform(op)

    def _serve(self, op: Claiming) -> Any:
        before, answer = self.server.row(op.key.id), self.server.serve(op)
        row = self.server.row(op.key.id)
        if before is not None and row is not None and isinstance(answer, Won):
            self.server._put(op.key.id, row.but(lease_us=self.server.now_us()))
        return answer


# --- reading ------------------------------------------------------------------------------------


class LooksOnce(ConsumerHere):
    """Takes over the lowest that are pending, and never what comes behind these."""

    has_looked = False

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        if self.has_looked:
            return []
        found = await super().left_over(limit)
        self.has_looked = True
        return found


class GoesOnReading(ConsumerHere):
    """A reply was lost, and with it what was handed out: reads on as if there had been nothing."""

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        try:
            return await super().read(limit, wait_s=wait_s)
        except BrokerUnavailableError:
            return []


class NeverMissesItsPlace(Streams):
    """A request to open that came late has the reader's place, and the reader is not told."""

    def open(self, topic: str, shard: int, name: str, fence: int) -> Opened:
        opened = super().open(topic, shard, name, fence)
        opened.consumer._fence = -1
        return opened


class NoOwner(Streams):
    """Hands out to whoever asks: that nobody else is at it was looked at before, by the asker."""

    def left_over(self, owner: Opened, limit: int) -> Sequence[Delivery]:
        self._own(owner)
        return super().left_over(owner, limit)

    def read(self, owner: Opened, limit: int) -> Sequence[Delivery]:
        self._own(owner)
        return super().read(owner, limit)

    def _own(self, owner: Opened) -> None:
        group = self.broker._log(owner.topic, owner.shard).groups[GROUP]
        owner.consumer._owner = group.opened


class ByName(Streams):
    """Everybody has the same name, and the name is all that an owner is known by."""

    def open(self, topic: str, shard: int, name: str, fence: int) -> Opened:
        opened = super().open(topic, shard, name, fence)
        group = self.broker._log(topic, shard).groups[GROUP]
        opened.consumer._owner = group.opened = 1
        return opened


class TrimsWhatIsPending(Streams):
    """Keeps so many entries, whoever still needs the others, and forgets that they were pending."""

    def publish(self, message: Message) -> bool:
        taken = super().publish(message)
        for log in self.broker._logs.values():
            read_to = min((group.read_to for group in log.groups.values()), default=0)
            old = [entry for entry in log.entries[:-2] if entry.position <= read_to]
            del log.entries[: len(old)]
            for group in log.groups.values():
                for entry in old:
                    group.pending.pop(entry.position, None)
        return taken


FROZEN = ("freeze", "stumble", "join")

PLANTS = {
    "the marker first, and a crash": Plan(inbox=SetNX, faults=("crash", "die_here")),
    "the marker first, and a freeze": Plan(inbox=SetNX, faults=FROZEN),
    "what failed keeps its effect": Plan(inbox=KeepsWhatFailed, faults=()),
    "the marker first, and nobody deletes it": Plan(inbox=SetNX, faults=("stop", "join", "inbox")),
    "the marker is deleted for others": Plan(inbox=ForgetsForOthers, faults=FROZEN),
    "markers expire": Plan(inbox=ForgetsInTime, faults=("rewind",)),
    "effect and memory are two writes": Plan(inbox=TwoWrites),
    "only the lowest pending are taken over": Plan(consumer=LooksOnce),
    "a late request keeps the reader's place": Plan(
        streams=NeverMissesItsPlace, faults=("weather", "broker")
    ),
    "nobody checks who reads": Plan(streams=NoOwner, faults=FROZEN),
    "leases are not renewed": Plan(shards=NeverRenews, faults=()),
    "crashes are not counted": Plan(inbox=CountsNoCrashes, faults=("killer",)),
    "nothing is ever parked": Plan(inbox=NeverGivesUp, faults=()),
    "pending entries are trimmed": Plan(streams=TrimsWhatIsPending),
    "owners are known by a name": Plan(streams=ByName),
    "a former owner commits": Plan(inbox=NoTurn, faults=FROZEN),
    "ownership is taken in two steps": Plan(ledger=TakesInTwoSteps),
    "ownership is taken without a lease": Plan(ledger=TakesWithoutALease),
    "acknowledged before the commit": Plan(lane=AcknowledgesFirst),
    "read on after a lost reply": Plan(consumer=GoesOnReading, faults=("weather",)),
    "an outage is counted against the message": Plan(inbox=BlamesTheMessage, faults=("handler",)),
    "order is not remembered": Plan(inbox=ById, faults=()),
    "a gap is not waited for": Plan(inbox=WaitsForNobody, faults=()),
    "what waits is kept without its mark": Plan(inbox=KeepsItWithoutAMark, faults=()),
}
