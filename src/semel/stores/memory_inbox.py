"""The inbox in this process's memory: the reference, and the one for tests.

A handler's session is a list. What it has put there is in `effects` from the moment the message is
known to have had its effect, and nowhere when it failed: as with a transaction. What a handler
does elsewhere is not taken back.

    inbox = MemoryInbox()
    await inbox.apply("stock", messages, handle)      # handle(message, session)
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal

from semel.colour import ASYNC, in_own_task
from semel.errors import SettingsError
from semel.messages import (
    Applied,
    Audit,
    Ending,
    Held,
    Message,
    ParkedMessage,
    ParkedSequence,
    Seen,
    Settled,
    Settlement,
)
from semel.ports import Clock, Handle
from semel.stores import inbox_rules as rules
from semel.stores.inbox_rules import Course, Failure, Known, Mark, Parking, Retry
from semel.stores.memory import MemoryStore
from semel.stores.rules import moment

__all__ = ["MemoryInbox"]


class _LoopClock:
    """The event loop's time, counted from now: a simulated loop simulates it."""

    _offset: float | None = None

    def now_us(self) -> int:
        now = ASYNC.now()
        if self._offset is None:
            self._offset = time.time() - now
        return round((now + self._offset) * 1_000_000)


class MemoryInbox:
    """Marks in dictionaries. One event loop of one process; nothing survives it."""

    def __init__(
        self,
        *,
        retry: Retry | None = None,
        retention_s: float = rules.RETENTION_S,
        clock: Clock | None = None,
    ) -> None:
        self.effects: list[Any] = []
        """What handlers have put into their sessions, in order."""
        self._retry = retry or Retry()
        self._retention_s = retention_s
        self._clock = clock or _LoopClock()
        self._marks: dict[bytes, Mark] = {}
        self._seen: dict[bytes, datetime] = {}
        self._baselines: set[bytes] = set()
        self._started: dict[bytes, int] = {}
        self._rows: dict[bytes, dict[int, ParkedMessage]] = {}
        self._slots: dict[bytes, int] = {}
        self._audit: list[Audit] = []
        self.store = MemoryStore()
        """For whoever needs a store beside the inbox, such as a worker."""

    async def aclose(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"MemoryInbox({len(self._marks)} sequences, {len(self._rows)} wait)"

    @property
    def _now(self) -> datetime:
        return moment(self._clock.now_us())

    # --- messages that come -----------------------------------------------------------------

    async def apply(
        self, consumer: str, messages: Sequence[Message], handle: Handle, *, singly: bool = False
    ) -> Sequence[Ending]:
        return [await self._apply(consumer, each, handle, singly=singly) for each in messages]

    async def _apply(
        self, consumer: str, message: Message, handle: Handle, *, singly: bool
    ) -> Ending:
        while True:
            course = Course(consumer, self._known(consumer, message))
            effects: list[Any] = []
            ending = course.ask(message)
            if ending is None:
                failure, effects = await self._run(consumer, message, handle, 1, counted=singly)
                ending = course.failed(message, failure) if failure else course.applied(message)
            if self._commit(course):
                self._end(rules.message_of(consumer, message))
                self.effects += effects
                return ending

    def _known(self, consumer: str, message: Message) -> Known:
        id, _ = rules.sequence_of(consumer, message)
        mark = self._marks.get(id)
        begun = rules.baseline_of(consumer, message.topic) in self._baselines
        return Known(
            {} if mark is None else {id: mark},
            self._seen,
            self._rows,
            {message.topic} if begun else (),
        )

    def _commit(self, course: Course) -> bool:
        """Keep what has changed, unless somebody else was faster. Nothing is awaited in here."""
        changed = course.marks
        if any(self._turn(id) != mark.turn - 1 for id, _, mark in changed):
            return False
        if any(id in self._seen for id in course.seen):
            return False
        now = self._now
        self._marks |= {id: mark for id, _, mark in changed}
        self._seen |= dict.fromkeys(course.seen, now)
        for parking in course.parked:
            self._park(parking, course.consumer, now)
        for id, seq in course.woken:
            self._wake(id, seq, now)
        return True

    def _turn(self, id: bytes) -> int:
        return self._marks[id].turn if id in self._marks else 0

    def _park(self, parking: Parking, consumer: str, now: datetime) -> None:
        p, delay_s = parking, parking.delay_s
        due_at = None if delay_s is None else now + timedelta(seconds=delay_s)
        row = ParkedMessage(
            p.sequence, consumer, p.message, p.state, p.why, p.attempts, p.error, now, due_at
        )
        self._slots[p.sequence] = p.slot
        self._rows.setdefault(p.sequence, {}).setdefault(rules.number_of(p.message), row)

    def _wake(self, id: bytes, seq: int, now: datetime) -> None:
        self._rows[id][seq] = replace(self._rows[id][seq], why="retry", due_at=now)

    # --- running ----------------------------------------------------------------------------

    async def _run(
        self, consumer: str, message: Message, handle: Handle, attempt: int, *, counted: bool
    ) -> tuple[Failure | None, list[Any]]:
        """Why it failed, if it did, and what it has put into its session."""
        id = rules.message_of(consumer, message)
        if counted and not self._begin(id):
            return self._retry.crashed(), []
        session: list[Any] = []
        try:
            call = _called(handle, message, session)
            await (in_own_task(call) if counted else call)
        except Exception as error:
            self._end(id)
            if rules.is_outage(error):
                raise rules.outage(message, error) from error
            return self._retry.failed(error, attempt), []
        except asyncio.CancelledError:  # and no other: a process that dies ends nothing
            self._end(id)
            raise
        self._end(id)
        return None, session

    def _begin(self, id: bytes) -> bool:
        """Count that the message is begun; False when it has been begun too often."""
        if self._started.get(id, 0) >= self._retry.crashes:
            del self._started[id]
            return False
        self._started[id] = self._started.get(id, 0) + 1
        return True

    def _end(self, id: bytes) -> None:
        self._started.pop(id, None)

    # --- messages that wait -----------------------------------------------------------------

    async def retry(
        self, consumer: str, slots: tuple[int, int], handle: Handle
    ) -> Sequence[tuple[Message, Ending]]:
        ran: list[tuple[Message, Ending]] = []
        for id in self._due(consumer, slots):
            while len(ran) < rules.MOST_RETRIED and (row := self._due_head(id)) is not None:
                if (ending := await self._run_head(row, handle)) is not None:
                    ran.append((row.message, ending))
        return ran

    def _due(self, consumer: str, slots: tuple[int, int]) -> list[bytes]:
        first, last = slots
        ours = [id for id in self._rows if first <= self._slots[id] <= last]
        heads = [head for id in ours if (head := self._due_head(id)) and head.consumer == consumer]
        heads.sort(key=lambda head: head.due_at or head.parked_at)
        return [head.sequence for head in heads]

    def _head(self, id: bytes) -> ParkedMessage | None:
        rows = self._rows.get(id)
        return rows[min(rows)] if rows else None

    def _due_head(self, id: bytes) -> ParkedMessage | None:
        head = self._head(id)
        return head if head and head.due_at is not None and head.due_at <= self._now else None

    async def _run_head(self, row: ParkedMessage, handle: Handle) -> Ending | None:
        """Run the first of a sequence; None when it was not run after all."""
        id = row.sequence
        mark = self._marks.get(id, Mark())
        effects: list[Any] = []
        todo, failure = rules.turn_of(mark, row, seen=id in self._seen), None
        if todo == "gap":
            self._replace(row, replace(row, why="gap", due_at=None))
            return None
        if todo == "run":
            attempt = row.attempts + 1
            failure, effects = await self._run(
                row.consumer, row.message, handle, attempt, counted=True
            )
        if self._changed(row, mark):
            return None
        if failure is not None:
            return self._failed(row, failure)
        self.effects += effects
        self._pass(row, mark)
        return Seen() if todo == "drop" else Applied()

    def _changed(self, row: ParkedMessage, mark: Mark) -> bool:
        return self._head(row.sequence) != row or self._marks.get(row.sequence, Mark()) != mark

    def _failed(self, row: ParkedMessage, failure: Failure) -> Held:
        delay_s = failure.delay_s
        after = replace(
            row,
            state="waiting" if failure.why == "retry" else "parked",
            why=failure.why,
            attempts=failure.attempts,
            error=failure.error,
            due_at=None if delay_s is None else self._now + timedelta(seconds=delay_s),
        )
        self._replace(row, after)
        return Held(failure.why, failure.error)

    def _replace(self, row: ParkedMessage, after: ParkedMessage) -> None:
        self._rows[row.sequence][rules.number_of(row.message)] = after

    def _pass(self, row: ParkedMessage, mark: Mark) -> None:
        """It is behind us: by its effect, or by a settlement."""
        id, seq = row.sequence, rules.number_of(row.message)
        self._drop(row)
        if seq == 0:
            self._seen.setdefault(id, self._now)
            return
        self._move(id, *rules.passed(mark, seq, rules.following(list(self._rows.get(id, ())), seq)))

    def _drop(self, row: ParkedMessage) -> None:
        rows = self._rows[row.sequence]
        del rows[rules.number_of(row.message)]
        if not rows:
            del self._rows[row.sequence], self._slots[row.sequence]

    def _move(self, id: bytes, mark: Mark, woken: int | None) -> None:
        self._marks[id] = mark
        if woken is not None:
            self._wake(id, woken, self._now)
        elif mark.head is not None:
            row = self._rows[id][mark.head]
            self._replace(row, replace(row, why="gap"))

    # --- beginnings and ends ----------------------------------------------------------------

    async def baseline(self, consumer: str, topic: str) -> None:
        self._baselines.add(rules.baseline_of(consumer, topic))

    async def sweep(self, *, older_than_s: float | None = None, limit: int = 1000) -> int:
        age = self._retention_s if older_than_s is None else older_than_s
        before = self._now - timedelta(seconds=age)
        old = [id for id, at in self._seen.items() if at < before][:limit]
        for id in old:
            del self._seen[id]
        return len(old)

    # --- for people -------------------------------------------------------------------------

    async def sequences(
        self,
        *,
        consumer: str | None = None,
        topic: str | None = None,
        tenant: str | None = None,
        state: Literal["waiting", "parked"] | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[ParkedSequence]:
        found: list[ParkedSequence] = []
        for id in sorted(id for id in self._rows if after is None or id > after):
            each = self._sequence(id)
            head, message = each.head, each.head.message
            if (
                consumer in {None, head.consumer}
                and topic in {None, message.topic}
                and tenant in {None, message.tenant}
                and state in {None, head.state}
            ):
                found.append(each)
        return found[:limit]

    def _sequence(self, id: bytes) -> ParkedSequence:
        head = self._head(id)
        assert head is not None, "what has no rows has no entry"
        mark = self._marks.get(id, Mark()).seq if rules.is_ordered(head.message) else None
        return ParkedSequence(head, len(self._rows[id]) - 1, mark)

    async def waiting(
        self, sequence: bytes, *, limit: int = 1000, after: int = 0
    ) -> Sequence[ParkedMessage]:
        rows = self._rows.get(sequence, {})
        return [rows[seq] for seq in sorted(rows) if seq == 0 or seq > after][:limit]

    async def settle(
        self,
        sequence: bytes,
        settlement: Settlement,
        *,
        who: str,
        note: str = "",
        dry_run: bool = False,
    ) -> Settled:
        change = rules.settled(self._view(sequence, settlement), settlement, sequence)
        if not dry_run:
            self._make(change)
            at = self._now
            self._audit.append(rules.audited(change, settlement, at=at, who=who, note=note))
        return rules.answer(change, dry_run=dry_run)

    def _view(self, id: bytes, settlement: Settlement) -> rules.View | None:
        head = self._head(id)
        if head is None:
            return None
        rows, event_id = self._rows[id], getattr(settlement, "event_id", None)
        seq = rules.number_of(head.message)
        return rules.View(
            mark=self._marks.get(id, Mark()) if seq else None,
            head=head,
            following=rules.following(list(rows), seq),
            chosen=next((row for row in rows.values() if row.message.id == event_id), None),
            now=self._now,
            retention_s=self._retention_s,
        )

    def _make(self, change: rules.Change) -> None:
        row = change.row
        if change.keep is not None:
            self._replace(row, change.keep)
        if change.drop:
            self._drop(row)
        if change.seen:
            self._seen.setdefault(row.sequence, self._now)
        if change.mark is not None:
            self._move(row.sequence, change.mark, change.woken)

    async def audit(self, *, sequence: bytes | None = None, limit: int = 100) -> Sequence[Audit]:
        return [each for each in reversed(self._audit) if sequence in {None, each.sequence}][:limit]


# --- calling ------------------------------------------------------------------------------------


async def _called(handle: Handle, message: Message, session: list[Any]) -> None:
    colour = getattr(handle, "colour", None)
    if colour is not None and colour(message) == "sync":
        # A thread cannot be cancelled: nobody else may begin before it has ended.
        await ASYNC.shield(asyncio.to_thread(_call, handle, message, session))
        return
    result = handle(message, session)
    if result is not None:
        await result


def _call(handle: Handle, message: Message, session: list[Any]) -> None:
    try:
        result = handle(message, session)
    except StopIteration as error:  # no future can carry one
        raise RuntimeError(f"the handler raised {error!r}") from error
    if inspect.isawaitable(result):
        raise SettingsError("a sync handler gave back something to await; write it with async def")
