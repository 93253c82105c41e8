"""How a batch has its effects: together if it can, apart if it must, alone if nothing else helps.

Together: one transaction, no savepoints, and all is well for all but a few batches in a lifetime.
When something in it fails, everything is taken back and done again with a savepoint for each
message, which tells whose fault it was; that one is parked, the others have their effects. When it
was nobody's in particular, such as a COMMIT that is refused, each message has a transaction of its
own.

Nothing is decided from memory: each transaction reads the marks itself and compares them as it
writes. So a COMMIT without a reply is no riddle, and what was rolled back by mistake or doubled by
a frozen process is not doubled in the database.

Passing trouble (a deadlock, a lock, somebody who was faster) is tried again; an outage is raised.
Neither is held against a message. But what a handler meets may only look like an outage: its own
lock, a row that is too large for the server, a statement that ends its connection. Waiting for the
end of that would hold up everybody for ever. So the database itself is asked, each time: when it
has answered, and the handlers have not got through, `ROUNDS` times in a row, each message is run
alone, and what one meets then is its failure, like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, TypeAlias, TypeVar

from sqlalchemy import exc

from semel.colour import ASYNC, Colour
from semel.errors import SemelError, StoreUnavailableError, said_by
from semel.messages import (
    Applied,
    Edit,
    Ending,
    Held,
    Message,
    Seen,
    Settled,
    Settlement,
)
from semel.ports import Handle
from semel.stores import inbox_rules as rules
from semel.stores.inbox_rules import Course, Failure, Retry
from semel.stores.rules import moment
from semel.stores.sql import schema
from semel.stores.sql.faults import (
    TRIES,
    Fault,
    fault_of,
    part_unavailable,
    pause_s,
)
from semel.stores.sql.inbox_sessions import (
    CutOffError,
    FailedError,
    IdleError,
    Sessions,
    Work,
    call_outside,
    colour_of,
    failing,
    is_outside,
)
from semel.stores.sql.inbox_words import WORDS, ChangedError, Head, Row, Words
from semel.stores.sql.lines import Lines, carry
from semel.stores.sql.links import Link
from semel.values import value

T = TypeVar("T")

One: TypeAlias = Callable[[Work, Course, Message], Awaitable[Ending]]
"""How one message of a batch is run."""

# So many of what was begun and met an outage are known not to have ended their process.
MOST_EXCUSED = 10_000

# So often in a row what looks like an outage is met by handlers, and not by us, until it is theirs.
ROUNDS = 5

# Whoever is stopped has so long to say that it was: others wait for its shard.
STOPPING_S = 1.0

# A transaction with so much behind it is committed, and the rest of the batch has another: locks
# are others' time.
MOST_OPEN_S = 1.0


class OursError(Exception):
    """A statement of the inbox itself has failed; the driver's error is the cause."""


class TroubledError(StoreUnavailableError):
    """What looks like an outage, and was met by a handler; its error is the cause."""

    @property
    def error(self) -> BaseException:
        assert self.__cause__ is not None
        return self.__cause__


@value
class Other:
    """The next message is for a handler of the other colour."""

    colour: str


@value
class Settings:
    """What an inbox was told."""

    retry: Retry
    retention_s: float
    create: bool
    where: str


@value
class Job:
    """What messages are to do, for which consumer, and the event loop that it was asked in."""

    consumer: str
    handle: Handle
    home: asyncio.AbstractEventLoop

    def is_outside(self, message: Message) -> bool:
        return is_outside(self.handle, message)


class Flow:
    """An inbox over one engine, in its colour."""

    def __init__(
        self,
        sessions: Sessions,
        lines: Lines,
        colour: Colour,
        settings: Settings,
        excused: set[bytes],
    ) -> None:
        self._sessions = sessions
        self._lines = lines
        self._colour = colour
        self._settings = settings
        self._excused = excused
        self._words: Words = WORDS[lines.dialect.name]
        self._rounds: dict[bytes, int] = {}
        """By the first message of what was run: how often in a row only handlers had trouble."""

    # --- messages that come -----------------------------------------------------------------

    async def apply(self, job: Job, messages: Sequence[Message]) -> Sequence[Ending]:
        if not messages:
            return []
        first = rules.message_of(job.consumer, messages[0])
        return await self._patiently(first, lambda lasts: self._runs(job, messages, lasts=lasts))

    async def _runs(
        self, job: Job, messages: Sequence[Message], *, lasts: bool
    ) -> Sequence[Ending]:
        endings: list[Ending] = []
        for outside, these in itertools.groupby(messages, job.is_outside):
            rest = list(these)
            while rest:
                verb = self._apply_outside if outside else self._apply
                endings += (done := await verb(job, rest, lasts=lasts))
                rest = rest[len(done) :]
        return endings

    async def _apply(
        self, job: Job, messages: Sequence[Message], *, lasts: bool
    ) -> Sequence[Ending]:
        """Of these, or of the first of them when all would take too long."""
        if lasts:
            return [await self._alone(job, each, lasts=True) for each in messages]
        try:
            together = self._together(job)
            return await self._firmly(lambda lock: self._each(job, messages, together, lock=lock))
        except FailedError:
            pass
        if len(messages) > 1:
            try:
                apart = self._apart(job)
                return await self._firmly(lambda lock: self._each(job, messages, apart, lock=lock))
            except FailedError:
                pass
        return [await self._alone(job, each) for each in messages]

    async def apply_singly(self, job: Job, messages: Sequence[Message]) -> Sequence[Ending]:
        return [await self._counted(job, each) for each in messages]

    def _together(self, job: Job) -> One:
        async def one(work: Work, course: Course, message: Message) -> Ending:
            await work.call(job.handle, message)
            return course.applied(message)

        return one

    def _apart(self, job: Job) -> One:
        async def one(work: Work, course: Course, message: Message) -> Ending:
            error = await work.apart(job.handle, message)
            if error is None:
                return course.applied(message)
            if _fault(error) is not None:
                raise FailedError from error
            return course.failed(message, self._settings.retry.failed(error, 1))

        return one

    async def _each(
        self,
        job: Job,
        messages: Sequence[Message],
        one: One,
        started: bytes | None = None,
        *,
        lock: bool,
    ) -> list[Ending]:
        """One transaction; not for longer than it should hold its locks, if they are many."""
        async with self._transaction(job) as work:
            work.own_task = started is not None
            course = await self._course(work, job.consumer, messages, lock=lock)
            until = work.at + MOST_OPEN_S
            endings: list[Ending] = []
            for message in messages:
                endings.append(course.ask(message) or await one(work, course, message))
                if work.at > until:
                    break
            await self._keep(work, course, started)
            return endings

    async def _apply_outside(
        self,
        job: Job,
        messages: Sequence[Message],
        started: bytes | None = None,
        *,
        lasts: bool,
    ) -> Sequence[Ending]:
        """No transaction is open while they run: they may be repeated, so they come first."""

        async def turn(_: bool) -> list[Ending]:
            async with self._transaction() as work:
                course = await self._course(work, job.consumer, messages, lock=False)
            until = self._colour.now() + MOST_OPEN_S
            endings: list[Ending] = []
            for message in messages:
                ending = course.ask(message)
                endings.append(ending or await self._one_outside(job, course, message, lasts=lasts))
                if self._colour.now() > until:
                    break
            async with self._transaction() as work:
                await self._keep(work, course, started)
            return endings

        return await self._firmly(turn)

    async def _one_outside(
        self, job: Job, course: Course, message: Message, *, lasts: bool
    ) -> Ending:
        try:
            await call_outside(job.handle, message, self._colour, job.home)
        except Exception as error:
            is_its_own = lasts and not rules.is_outage(error) and await self._answers()
            if _fault(error) is not None and not is_its_own:
                raise FailedError from error
            return course.failed(message, self._settings.retry.failed(error, 1))
        return course.applied(message)

    async def _alone(
        self, job: Job, message: Message, started: bytes | None = None, *, lasts: bool = False
    ) -> Ending:
        try:
            one = self._together(job)
            [ending] = await self._firmly(
                lambda lock: self._each(job, [message], one, started, lock=lock)
            )
            return ending
        except TroubledError as trouble:
            if not (lasts and await self._answers()):
                raise
            failure = self._settings.retry.failed(trouble.error, 1)
        except FailedError as failed:
            failure = self._settings.retry.failed(failed.error, 1)
        return await self._park(job.consumer, message, failure, started)

    async def _park(
        self, consumer: str, message: Message, failure: Failure, started: bytes | None
    ) -> Ending:
        """It has failed and left nothing behind. Meanwhile it may have had its effect elsewhere."""

        async def turn(lock: bool) -> Ending:
            async with self._transaction() as work:
                course = await self._course(work, consumer, [message], lock=lock)
                ending = course.ask(message) or course.failed(message, failure)
                await self._keep(work, course, started)
                return ending

        return await self._firmly(turn)

    async def _counted(self, job: Job, message: Message) -> Ending:
        """Begun before and not finished: counted before it begins, in case that it ends us."""
        id = rules.message_of(job.consumer, message)
        if not await self._begin(id, job.consumer, message):
            failure = self._settings.retry.crashed()
            return await self._park(job.consumer, message, failure, id)

        async def run(lasts: bool) -> Ending:
            if not job.is_outside(message):
                return await self._alone(job, message, id, lasts=lasts)
            [ending] = await self._apply_outside(job, [message], id, lasts=lasts)
            return ending

        return await self._patiently(id, lambda lasts: self._excusing(id, run(lasts)))

    async def _begin(self, id: bytes, consumer: str, message: Message) -> bool:
        """Count that it is begun; False when it has been begun too often."""
        by = 0 if id in self._excused else 1
        begun = await self.on_link(lambda link: self._words.begin(link, id, consumer, message, by))
        return begun <= self._settings.retry.crashes

    async def _excusing(self, id: bytes, work: Awaitable[T]) -> T:
        """What met an outage, or was stopped, while it was counted has not ended its process."""
        self._excused.discard(id)
        try:
            return await work
        except SemelError:
            await self._take_back(id)
            raise
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                await ASYNC.shield(asyncio.wait_for(self._take_back(id), STOPPING_S))
            raise

    async def _take_back(self, id: bytes) -> None:
        """In the database, for whoever comes after us; here, for as long as it does not answer."""
        if len(self._excused) >= MOST_EXCUSED:
            self._excused.clear()
        self._excused.add(id)
        with contextlib.suppress(SemelError):
            await self.on_link(lambda link: self._words.take_back(link, id))
            self._excused.discard(id)

    async def _patiently(self, key: bytes, work: Callable[[bool], Awaitable[T]]) -> T:
        """Do it, and tell it whether trouble of its handlers lasts while the database answers."""
        rounds = self._rounds.get(key, 0)
        try:
            answer = await work(rounds >= ROUNDS)
        except TroubledError:
            if len(self._rounds) >= MOST_EXCUSED:
                self._rounds.clear()
            # Once without an answer it may have been an outage all the time.
            self._rounds[key] = rounds + 1 if await self._answers() else 0
            raise
        self._rounds.pop(key, None)
        return answer

    async def _answers(self) -> bool:
        try:
            await self.on_link(self._words.now_us)
        except SemelError:
            return False
        return True

    # --- messages that wait -----------------------------------------------------------------

    async def due(self, consumer: str, slots: tuple[int, int], limit: int) -> Sequence[bytes]:
        return await self.on_link(lambda link: self._words.due(link, consumer, slots, limit))

    async def run_head(
        self, job: Job, sequence: bytes, *, both: bool
    ) -> tuple[Message, Ending] | Other | None:
        """Run the first of a sequence, if it is due; None when there is nothing to run.

        `both`: a handler of the other colour has a flow of its own.
        """
        row = await self.on_link(lambda link: self._words.due_row(link, sequence))
        if row is None:
            return None
        message, own = row.parked.message, self._colour.name
        if both and (other := colour_of(job.handle, message, own)) != own:
            return Other(other)
        id = rules.message_of(job.consumer, message)
        ending: Ending | None
        if row.problem:
            unreadable = Failure("poison", row.problem, row.parked.attempts + 1)
            ending = await self._fail_row(row, unreadable, id)
        elif await self._begin(id, job.consumer, message):
            ending = await self._patiently(
                id, lambda lasts: self._excusing(id, self._run_row(job, row, id, lasts=lasts))
            )
        else:
            failure = self._settings.retry.crashed()
            ending = await self._fail_row(row, failure, id)
        return None if ending is None else (message, ending)

    async def _run_row(self, job: Job, row: Row, started: bytes, *, lasts: bool) -> Ending | None:
        attempts = row.parked.attempts + 1
        try:
            if job.is_outside(row.parked.message):
                await self._firmly(lambda _: self._run_outside(job, row))
            return await self._firmly(lambda lock: self._turn(job, row, started, lock=lock))
        except TroubledError as trouble:
            if not (lasts and await self._answers()):
                raise
            failure = self._settings.retry.failed(trouble.error, attempts)
        except FailedError as failed:
            failure = self._settings.retry.failed(failed.error, attempts)
        return await self._fail_row(row, failure, started)

    async def _run_outside(self, job: Job, row: Row) -> None:
        """Before the transaction that forgets it, if it is to run at all."""
        head = await self.on_link(lambda link: self._same_head(link, row, lock=False))
        if head is None or await self.on_link(lambda link: self._todo(link, head)) != "run":
            return
        message = row.parked.message
        await failing(lambda: call_outside(job.handle, message, self._colour, job.home))

    async def _todo(self, link: Link, head: Head) -> Literal["run", "drop", "gap"]:
        alone = not head.row.seq
        seen = alone and await self._words.has_seen(link, head.row.parked.sequence)
        return rules.turn_of(head.mark, head.row.parked, seen=seen)

    async def _turn(self, job: Job, row: Row, started: bytes, *, lock: bool) -> Ending | None:
        async with self._transaction(job) as work:
            work.own_task = True
            head = await self._ours(self._same_head(work.link, row, lock=lock))
            ending = None if head is None else await self._end_head(work, job, head)
            await self._ours(self._words.end(work.link, started))
            await work.commit()
            return ending

    async def _end_head(self, work: Work, job: Job, head: Head) -> Ending | None:
        words, row = self._words, head.row
        sequence, message = row.parked.sequence, row.parked.message
        todo = await self._ours(self._todo(work.link, head))
        if todo == "gap":
            await self._ours(words.too_early(work.link, row))
            return None
        if todo == "run":
            if not job.is_outside(message):
                await work.call(job.handle, message)
                await work.finish()
            if not row.seq:
                seen_now = [(sequence, message)]
                await self._ours(words.remember(work.link, job.consumer, seen_now))
        await self._ours(words.passed(work.link, job.consumer, head))
        return Applied() if todo == "run" else Seen()

    async def _same_head(self, link: Link, row: Row, *, lock: bool) -> Head | None:
        """The sequence as it is now, if this row is still the first of it, and as it was read."""
        if lock:
            await self._words.lock(link, [row.parked.sequence])
        head = await self._words.head(link, row.parked.sequence)
        return head if head is not None and head.row == row else None

    async def _fail_row(self, row: Row, failure: Failure, started: bytes) -> Held | None:
        """None: somebody has run, settled or changed it meanwhile, and that counts."""

        async def turn(lock: bool) -> Held | None:
            async with self._transaction() as work:
                same = await self._ours(self._same_head(work.link, row, lock=lock))
                if same is not None:
                    await self._ours(self._words.failed(work.link, row, failure))
                await self._ours(self._words.end(work.link, started))
                await work.commit()
                return None if same is None else Held(failure.why, failure.error)

        return await self._firmly(turn)

    # --- for people -------------------------------------------------------------------------

    async def settle(
        self, sequence: bytes, settlement: Settlement, *, who: str, note: str, dry_run: bool
    ) -> Settled:
        async def turn(lock: bool) -> Settled:
            async with self._transaction() as work:
                if lock:
                    await self._ours(self._words.lock(work.link, [sequence]))
                view, rows = await self._ours(self._view(work.link, sequence, settlement))
                change = rules.settled(view, settlement, sequence)
                if not dry_run:
                    [row] = [each for each in rows if each.parked == change.row][:1]
                    now = moment(await self._ours(self._words.now_us(work.link)))
                    audit = rules.audited(change, settlement, at=now, who=who, note=note)
                    await self._ours(self._words.make(work.link, change, row))
                    await self._ours(self._words.write_audit(work.link, audit))
                    await work.commit()
                return rules.answer(change, dry_run=dry_run)

        return await self._firmly(turn)

    async def _view(
        self, link: Link, sequence: bytes, settlement: Settlement
    ) -> tuple[rules.View | None, list[Row]]:
        words = self._words
        head = await words.head(link, sequence)
        if head is None:
            return None, []
        rows = [head.row]
        if isinstance(settlement, Edit):
            chosen = await words.chosen(link, sequence, settlement.event_id)
            rows += [] if chosen is None else [chosen]
        view = rules.View(
            head.mark if head.row.seq else None,
            head.row.parked,
            head.following,
            rows[-1].parked if len(rows) > 1 else None,
            moment(await words.now_us(link)),
            self._settings.retention_s,
        )
        return view, rows

    # --- transactions -----------------------------------------------------------------------

    @asynccontextmanager
    async def _transaction(self, job: Job | None = None) -> AsyncIterator[Work]:
        async with self._sessions.open(None if job is None else job.home) as work:
            await self._ours(work.begin(self._sessions.idle_s))
            try:
                yield work
            except (FailedError, OursError) as error:
                if (idle := self._idle(work, error)) is not None:
                    raise FailedError from idle
                raise

    def _idle(self, work: Work, error: FailedError | OursError) -> IdleError | None:
        """Was it a handler that took too long, and no outage? Else it would be tried for ever."""
        idle_s, cause = self._sessions.idle_s, error.__cause__
        gone = isinstance(cause, exc.DBAPIError) and fault_of(cause) is Fault.GONE
        if idle_s is None or work.longest_s < idle_s or not gone:
            return None
        return IdleError(
            f"a handler took {work.longest_s:.1f} s, and the server ends a transaction in which "
            f"nothing happens for idle_s={idle_s:g} s: {cause}. Do what takes long outside of it, "
            "or give SQLInbox(idle_s=...)"
        )

    async def _course(
        self, work: Work, consumer: str, messages: Sequence[Message], *, lock: bool
    ) -> Course:
        idle_s = self._sessions.idle_s
        if lock:
            ids = [rules.sequence_of(consumer, each)[0] for each in messages]
            await self._ours(self._words.lock(work.link, ids))
        known = self._words.known(work.link, consumer, messages, idle_s)
        return Course(consumer, await self._ours(known))

    async def _keep(self, work: Work, course: Course, started: bytes | None = None) -> None:
        await work.finish()
        await self._ours(self._words.keep(work.link, course))
        if started is not None:
            await self._ours(self._words.end(work.link, started))
        await work.commit()

    async def _ours(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except self._lines.errors as error:
            raise OursError from error

    async def _firmly(self, work: Callable[[bool], Awaitable[T]]) -> T:
        """Do it, again after passing trouble; what it failed with by itself is a `FailedError`.

        Who was overtaken is told to lock what it reads: one with much to do would otherwise be
        overtaken again and again by one with little.
        """
        last: BaseException | None = None
        reconnected = overtaken = troubled = False
        for turn in range(TRIES):
            if turn:
                await self._colour.sleep(pause_s(turn - 1))
            troubled = False
            try:
                return await work(overtaken)
            except ChangedError as changed:
                last, overtaken = changed, True
            except OursError as ours:
                last = ours.__cause__
                if await self._is_final(ours, reconnected=reconnected):
                    raise _told(self._settings.where, last) from last
                reconnected = reconnected or fault_of(last or ours) is Fault.GONE
            except FailedError as failed:
                last, troubled = failed.error, True
                match _fault(last):
                    case None:
                        raise
                    case Fault.GONE:
                        raise _outage(self._settings.where, last) from last
        told = _told(self._settings.where, last)
        raise (TroubledError(str(told)) if troubled else told) from last

    async def _is_final(self, ours: OursError, *, reconnected: bool) -> bool:
        """Is trying again of no use?"""
        fault = fault_of(ours.__cause__ or ours)
        if fault is Fault.NO_TABLE and self._settings.create:
            await carry(self._lines, schema.create, self._colour)
            return False
        # Who was overtaken by somebody that inserted the same reads again, too.
        passing = fault in {Fault.AGAIN, Fault.LOCKED, Fault.TAKEN}
        return not passing and (fault is not Fault.GONE or reconnected)

    async def on_link(self, work: Callable[[Link], Awaitable[T]]) -> T:
        """A piece of work that is committed by itself, statement by statement."""
        creates = self._settings.create
        return await schema.with_tables(
            self._lines, work, self._colour, creates=creates, told=_told
        )


def _fault(error: BaseException | None) -> Fault | None:
    """What this means when it is no fault of a message's: go again, or an outage; else None."""
    if rules.is_outage(error):
        return Fault.GONE
    for each in rules.causes_of(error):
        if isinstance(each, exc.TimeoutError | CutOffError):  # no connection to be had
            return Fault.GONE
        if isinstance(each, exc.DBAPIError) and (fault := _passing(each)) is not None:
            return fault
    return None


# feature_not_supported: of a statement of ours, a plan that a migration has spoilt; of a handler's,
# just what it says.
UNSUPPORTED = "0A000"


def _passing(error: exc.DBAPIError) -> Fault | None:
    fault = fault_of(error)
    if fault is Fault.GONE and getattr(error.orig, "sqlstate", None) == UNSUPPORTED:
        return None
    return fault if fault in {Fault.AGAIN, Fault.LOCKED, Fault.GONE} else None


# --- telling ------------------------------------------------------------------------------------


PART = ("the inbox", "SQLInbox")


def _told(where: str, error: BaseException | None) -> SemelError:
    if error is None or isinstance(error, ChangedError):
        return StoreUnavailableError(
            f"others work on the same sequences in {where}, and were faster {TRIES} times; "
            "nothing has happened"
        )
    return part_unavailable(where, error, *PART)


def _outage(where: str, error: BaseException) -> StoreUnavailableError:
    """A handler that says by itself that it is one is believed."""
    kind = StoreUnavailableError if rules.is_outage(error) else TroubledError
    return kind(
        f"an outage while messages had their effects, told by {where} or a handler: "
        f"{said_by(error)}. What "
        "was committed is remembered; nothing is held against a message"
    )
