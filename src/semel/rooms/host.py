"""One room in this process: its requests are applied one after another, to what the log has.

Nobody owns a room. An action is applied to the state as it is known here, and appended with the
position that state belongs to: if another process was faster, the log says so, and the action is
applied again, to what is there now. Whoever was frozen in the middle and wakes up is told the same.

The next action need not wait for the log to answer: where an entry will stand is known before it is
there. It is applied to what is expected, and sent behind the one before. If that one fails, so does
every one that was sent behind it, and all of them begin anew. It fails, too, when another process
has carried out the same request: by another clock, and with other random numbers. So a position
stands for the state, and not only for what was asked.

The easy mistake is to await anything between deciding and appending: what was decided on would not
be the last any more.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Protocol, assert_never

from semel.colour import ASYNC
from semel.entries import (
    Answer,
    Appended,
    Ended,
    Fenced,
    Full,
    Keep,
    Mismatch,
    Position,
    Repeated,
    Replace,
    Snapshot,
    VersionConflict,
)
from semel.errors import (
    ConcurrentActionError,
    IdempotencyConflictError,
    SemelError,
    StoreUnavailableError,
)
from semel.failures import Failures
from semel.ports import Log
from semel.rooms.deciding import Decided, decide
from semel.rooms.requests import Reply, Request, reply_of
from semel.rooms.room import Context, Room
from semel.rooms.standing import Standing
from semel.rooms.status import Counts

__all__ = ["Host", "House"]

# For so long a request waits for a store that does not answer; whoever asked may ask again.
PATIENCE_S = 5.0
AGAIN_S = 0.05

# An offset that no stream ends at: whoever expects it learns what is kept of an id, and no more.
NOWHERE = -1


class House(Protocol):
    """What all rooms of a process share."""

    room: Room
    log: Log
    keep: Keep
    most_bytes: int
    counts: Counts
    failures: Failures

    def now_s(self) -> float:
        """By the store's clock."""
        ...

    def entropy(self) -> bytes: ...

    async def load(self, stream: str) -> Snapshot: ...

    def head(self, stream: str) -> Position | None:
        """Where the room's log ends, as far as anybody here knows."""
        ...

    def must_note(self, room_id: str, at_s: float) -> bool:
        """Is there nobody yet who will look at the room at that time?"""
        ...

    async def note(self, room_id: str, at_s: float) -> None: ...

    def look_soon(self, room_id: str) -> None: ...


class _Running:
    """A request that is not answered yet, and those who have asked the same."""

    def __init__(self, request: Request) -> None:
        self.id = request.id
        self.fingerprint = request.fingerprint
        self._answer: asyncio.Future[Reply | None] | None = None

    async def wait(self) -> Reply | None:
        """Its answer; None when there was none, so that one may ask for oneself."""
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._answer)

    def end(self, reply: Reply | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(reply)


class Host:
    """Carries out the requests to one room."""

    def __init__(self, house: House, room_id: str, stream: str) -> None:
        self._house = house
        self.room_id = room_id
        self.stream = stream
        self._tip: Standing | None = None
        """How the room stands when everything has arrived that was sent."""
        self.acknowledged = 0
        """The last version that the log has told us of, in whatever history."""
        self._come = 0
        """The last one that it is known to have."""
        self._chain = 0
        """Grows whenever something was not as expected: what was sent before is of another one."""
        self._on_the_way = 0
        """Changes that were sent, and are not answered."""
        self._arrived = asyncio.Event()
        self._running: dict[tuple[str | None, str], _Running] = {}
        self.used_at = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    # --- requests -------------------------------------------------------------------------------

    async def act(self, request: Request) -> Reply | None:
        """What became of the request; None for a timeout that is not due.

        `ConcurrentActionError`, `IdempotencyConflictError` and `StoreUnavailableError` say that
        nothing is known to have been done by it.
        """
        # What nobody does does not wait for another one.
        who = (request.user, "" if request.user is not None else request.id)
        while (other := self._running.get(who)) is not None:
            _check_same(other, request)
            reply = await other.wait()
            if reply is not None:
                return replace(reply, cached=True)
        running = self._running[who] = _Running(request)
        reply = None
        try:
            reply = await self._settled(request)
        finally:
            del self._running[who]
            running.end(reply)
        return reply

    async def _settled(self, request: Request) -> Reply | None:
        until = ASYNC.now() + PATIENCE_S
        while True:
            try:
                return await self._tried(request)
            except StoreUnavailableError as error:
                # It may have been taken. It is known by its id, so asking again is right.
                if not error.again or ASYNC.now() >= until:
                    raise
            await ASYNC.sleep(AGAIN_S)

    async def _tried(self, request: Request) -> Reply | None:
        noted_s = math.inf
        while True:
            try:
                tip = await self._known()
            except SemelError:
                raise
            except Exception as error:  # noqa: BLE001 - the rules do not know how a room begins
                return await self._failed(request, error)
            if request.timeout is not None and not self._is_due(tip, request.timeout):
                return None
            decided = self._decide(tip, request)
            if isinstance(decided, Exception):
                if await self._has_come(tip):
                    return await self._failed(request, decided)
                continue  # what they have failed on was never so
            ends_s = decided.ends_s
            if ends_s < noted_s and self._must_note(tip, ends_s):
                await self._house.note(self.room_id, ends_s)
                noted_s = ends_s  # once: a turn may be over before anything is noted
                continue  # which took time: it may stand otherwise by now
            answer = await self._sent(tip, request, decided)
            reply = self._told(answer, request, decided.reply, tip.version)
            if reply is not None:
                if isinstance(answer, Repeated) and request.timeout is None:
                    ends_s = _ends_s(tip)  # whoever had sent it may be dead by now
                self._look_after(ends_s)
                return reply
            self._house.counts.conflicts += 1

    def _must_note(self, tip: Standing, ends_s: float) -> bool:
        if ends_s == _ends_s(tip) and ends_s <= self._house.now_s():
            return False  # it does not begin, and is over: nobody has to wait for it
        return self._house.must_note(self.room_id, ends_s)

    def _look_after(self, ends_s: float) -> None:
        """Whoever looked when that was due may not have seen this turn."""
        if ends_s < math.inf and self._house.must_note(self.room_id, ends_s):
            self._house.look_soon(self.room_id)

    def _is_due(self, tip: Standing, turn: str) -> bool:
        deadline = tip.deadline
        return (
            deadline is not None and deadline.turn == turn and deadline.at_s <= self._house.now_s()
        )

    async def _sent(self, tip: Standing, request: Request, decided: Decided) -> Answer:
        house = self._house
        after = decided.after
        state = None if after is None else after.kept()
        sending = house.log.append(
            self.stream,
            decided.entry,
            id=request.id,
            fingerprint=request.fingerprint,
            rising=request.rising,
            expect=tip.position,
            state=None if state is None else Replace(state),
            reply=decided.kept,
            keep=house.keep,
            seal=None if after is None else after.text.encode(),
        )
        chain = self._chain
        if after is not None:
            self._tip = after
            self._on_the_way += 1
        is_as_expected = False
        try:
            answer = await sending
            is_as_expected = isinstance(answer, Appended) or (
                after is None and not isinstance(answer, VersionConflict)
            )
            if isinstance(answer, Appended) and chain == self._chain:
                self._come = max(self._come, answer.position.offset)
        finally:
            if not is_as_expected and chain == self._chain:  # or nobody knows
                self._chain += 1
                self._tip = None
            if after is not None:
                self._on_the_way -= 1
                self._arrived.set()
        return answer

    def _told(self, answer: Answer, request: Request, reply: Reply, version: int) -> Reply | None:
        """None when another process was faster. `version`: what it was decided on."""
        match answer:
            case Appended(position):
                self.acknowledged = max(self.acknowledged, position.offset)
                return reply
            case Repeated(position, data):
                return reply_of(data, position.offset)
            case Mismatch():
                raise conflict(request)
            case Fenced(_, number):
                return Reply(version, None, "SUPERSEDED", _superseded(number))
            case VersionConflict():
                return None
            case Ended() | Full():
                raise AssertionError("no room ends, and none is full")
            case _:
                assert_never(answer)

    # --- what is known --------------------------------------------------------------------------

    async def _known(self) -> Standing:
        """How the room stands, or will."""
        tip = self._tip
        if tip is not None:
            head = self._house.head(self.stream)
            if head is None or head.offset <= tip.version:
                return tip
        snapshot = await self._house.load(self.stream)
        if self._tip is tip:  # nobody else has found out in the meantime
            self._tip = Standing.of(self._house.room, self.room_id, snapshot)
            self._come = self._tip.version
        return self._tip or Standing.of(self._house.room, self.room_id, snapshot)

    def forget(self) -> None:
        """What is known here may not be so: the next one asks the log."""
        self._tip = None

    # --- deciding -------------------------------------------------------------------------------

    def _decide(self, tip: Standing, request: Request) -> Decided | Exception:
        house = self._house
        user, version = request.user, tip.version + 1
        ctx = Context(self.room_id, user, version, house.now_s(), house.entropy())
        try:
            return decide(tip, request, ctx, house.most_bytes)
        except Exception as error:  # noqa: BLE001 - the rules are somebody else's code
            return error

    async def _has_come(self, tip: Standing) -> bool:
        """Does the log have all that this stands on? Waits for what is on its way."""
        chain = self._chain
        while chain == self._chain and self._on_the_way and self._come < tip.version:
            self._arrived.clear()
            await self._arrived.wait()
        return chain == self._chain

    async def _failed(self, request: Request, error: Exception) -> Reply:
        """The rules have failed. Nothing changes, unless the request was answered before."""
        try:
            answer = await self._house.log.append(
                self.stream,
                None,
                id=request.id,
                fingerprint=request.fingerprint,
                rising=request.rising,
                expect=NOWHERE,
            )
        except StoreUnavailableError:
            self._tip = None
            raise
        known = 0 if self._tip is None else self._tip.version
        version = answer.head.offset if isinstance(answer, VersionConflict) else known
        failed = Reply(version, None, "FAILED", "this could not be done; nothing has changed")
        reply = self._told(answer, request, failed, version)
        if reply is not None:
            return reply
        self._house.failures.tell(
            error,
            "semel: the rules of room %r failed for %.80r of %r: nothing has changed",
            self.room_id,
            request.action.get("actionType", request.request_id),
            request.user,
        )
        return failed


def _ends_s(tip: Standing) -> float:
    """When its turn is over, as far as the rules can tell."""
    try:
        deadline = tip.deadline
    except Exception:  # noqa: BLE001 - the rules are somebody else's code; timers tell of it
        return math.inf
    return math.inf if deadline is None else deadline.at_s


def _check_same(other: _Running, request: Request) -> None:
    if other.id != request.id:
        raise ConcurrentActionError(
            f"another action of {request.user!r} is on its way in this room; ask again when it is "
            "answered"
        )
    if other.fingerprint != request.fingerprint:
        raise conflict(request)


def conflict(request: Request) -> IdempotencyConflictError:
    return IdempotencyConflictError(
        f"request {request.request_id!r} was sent before with another action; another action has "
        "another requestId",
        key=request.request_id,
    )


def _superseded(number: int) -> str:
    return f"request {number} of this client was taken already: this one is not done any more"
