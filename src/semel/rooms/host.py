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
import logging
import math
from dataclasses import replace
from typing import Any, Protocol, assert_never

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
    SettingsError,
    StoreUnavailableError,
)
from semel.ports import Log
from semel.rooms.news import written
from semel.rooms.requests import MOST_REQUEST, Reply, Request, kept, reply_of
from semel.rooms.room import Accepted, Context, Deadline, Refused, Room
from semel.rooms.standing import Standing, plain, said
from semel.rooms.status import Counts
from semel.stores.log_rules import following, mark_of, seal_of
from semel.values import value

__all__ = ["TIMEOUT", "Host", "House"]

log = logging.getLogger("semel")

# What the id of a turn's timeout begins with.
TIMEOUT = "timeout:"

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


@value
class _Decided:
    """What a request comes to, on one standing, and its reply as it is kept.

    Where nothing changes, `after` and `entry` are None.
    """

    reply: Reply
    kept: bytes
    after: Standing | None = None
    entry: bytes | None = None

    @property
    def ends_s(self) -> float:
        """When the turn that begins by it is over."""
        deadline = None if self.after is None else self.after.deadline
        return math.inf if deadline is None else deadline.at_s


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
        """The last version that the log has told us of."""
        self._chain = 0
        """Grows whenever something was not as expected: what was sent before is of another one."""
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
                return await self._failed(request, decided)
            ends_s = decided.ends_s
            if ends_s < noted_s and self._house.must_note(self.room_id, ends_s):
                await self._house.note(self.room_id, ends_s)
                noted_s = ends_s  # once: a turn may be over before anything is noted
                continue  # which took time: it may stand otherwise by now
            answer = await self._sent(tip, request, decided)
            reply = self._told(answer, request, decided.reply, tip.version)
            if reply is not None:
                if isinstance(answer, Repeated) and tip.deadline is not None:
                    ends_s = tip.deadline.at_s  # whoever had sent it may be dead by now
                if ends_s < math.inf and self._house.must_note(self.room_id, ends_s):
                    # Whoever looked when that was due may not have seen this turn.
                    self._house.look_soon(self.room_id)
                return reply
            self._house.counts.conflicts += 1

    def _is_due(self, tip: Standing, turn: str) -> bool:
        deadline = tip.deadline
        return (
            deadline is not None and deadline.turn == turn and deadline.at_s <= self._house.now_s()
        )

    async def _sent(self, tip: Standing, request: Request, decided: _Decided) -> Answer:
        house = self._house
        after = decided.after
        state = None if after is None else after.text.encode()
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
            seal=state,
        )
        chain = self._chain
        if after is not None:
            self._tip = after
        is_as_expected = False
        try:
            answer = await sending
            is_as_expected = isinstance(answer, Appended) or (
                after is None and not isinstance(answer, VersionConflict)
            )
        finally:
            if not is_as_expected and chain == self._chain:  # or nobody knows
                self._chain += 1
                self._tip = None
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
        return self._tip or Standing.of(self._house.room, self.room_id, snapshot)

    def forget(self) -> None:
        """What is known here may not be so: the next one asks the log."""
        self._tip = None

    # --- deciding -------------------------------------------------------------------------------

    def _decide(self, tip: Standing, request: Request) -> _Decided | Exception:
        try:
            return self._decided(tip, request)
        except Exception as error:  # noqa: BLE001 - the rules are somebody else's code
            return error

    def _decided(self, tip: Standing, request: Request) -> _Decided:
        expected = request.expected_version
        if expected is not None and expected != tip.version:
            return _refused(tip, "STATE_STALE_VERSION", f"the version is {tip.version}")
        ctx = self._context(tip, request)
        if request.timeout is None:
            decision = tip.room.apply(tip.state(), request.action, ctx)
        else:
            decision = tip.room.timeout(tip.state(), request.timeout, ctx)
        match decision:
            case Refused(code, message):
                return _refused(tip, code, message)
            case Accepted():
                return self._accepted(tip, request, decision)
            case _:
                raise TypeError(
                    f"apply gave a {type(decision).__name__}; it is to give Accepted or Refused"
                )

    def _context(self, tip: Standing, request: Request) -> Context:
        house = self._house
        return Context(self.room_id, request.user, tip.version + 1, house.now_s(), house.entropy())

    def _accepted(self, tip: Standing, request: Request, decision: Accepted) -> _Decided:
        text = said(decision.state)
        # Sealed: another server may have carried out the same request, with other cards.
        mark = mark_of(request.id, request.fingerprint) + seal_of(text.encode())
        position = following(tip.position, mark)
        after = Standing(tip.room, position, text)
        _check_deadline(after.deadline)
        entry = written(self.room_id, tip, after, decision.events).encode()
        reply = Reply(position.offset, plain(decision.reply))  # as it is when it comes again
        answer = kept(reply)  # what cannot be kept fails here, before anything is sent
        most = self._house.most_bytes
        if (size := max(len(text.encode()), len(entry), len(answer))) > most:
            return _refused(
                tip, "TOO_LARGE", f"the room would have {size:,} bytes, and may have {most:,}"
            )
        return _Decided(reply, answer, after, entry)

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
        log.error(
            "semel: the rules of room %r failed for %r of %r: nothing has changed",
            self.room_id,
            request.action.get("actionType", request.request_id),
            request.user,
            exc_info=error,
        )
        return failed


def _refused(tip: Standing, code: str, message: str) -> _Decided:
    reply = Reply(tip.version, None, str(code) or "INVALID", str(message))
    return _Decided(reply, kept(reply))


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


def _check_deadline(deadline: Any) -> None:
    match deadline:
        case None:
            return
        case Deadline(str(turn), int() | float() as at_s) if math.isfinite(at_s):
            if 0 < len(turn.encode()) <= MOST_REQUEST - len(TIMEOUT) and turn.isprintable():
                return
    raise SettingsError(
        f"deadline gave {deadline!r:.80}; it is to give Deadline(turn, at_s), with a turn of up to "
        f"{MOST_REQUEST - len(TIMEOUT)} bytes that can be printed, or None"
    )
