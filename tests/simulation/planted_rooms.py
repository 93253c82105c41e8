"""Ways to keep a room that look right, each with one defect; all of them have to be found.

Many are how it is usually done: a marker in a cache beside the state, a lock that expires, a timer
in memory, a broadcast to whoever is connected, and a browser that compares numbers.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from planted_bus import as_ours
from planted_guests import (
    AsksOnce,
    BelievesSilence,
    ComparesVersions,
    CountsResends,
    KeepsItsState,
    LeavesWhatWasRefused,
    SendsAnew,
    ShowsItOnAnySnapshot,
    ShowsResultsAgain,
    StaysOnItsGround,
    TakesAnySnapshot,
    TakesTheAnswerForTheState,
    TakesWhatComes,
    TakesWhatIsLarger,
    WaitsForTheAnswer,
)
from room_history import ROOM, Tables
from room_members import Plan

from semel import feed
from semel.client import room_rules
from semel.client.room_replica import Replica
from semel.client.room_requests import Requests
from semel.colour import keep
from semel.entries import Answer, Appended, Entry, Page, Position, VersionConflict
from semel.errors import StoreUnavailableError
from semel.feed import Feed
from semel.feed.reader import Reader
from semel.http.ws import RoomDoor, hearing
from semel.http.ws.joining import Joining
from semel.rooms import Reply, Rooms, messages, requests
from semel.rooms import rooms as rooms_module
from semel.rooms.clock import StoreClock
from semel.rooms.host import Host, conflict
from semel.rooms.news import Told
from semel.rooms.requests import Request
from semel.stores.log_rules import Append, mark_of

COUNT = itertools.count()


def is_change(op: Append) -> bool:
    return op.stream.startswith(ROOM) and op.data is not None


def known_by(op: Append, id: str) -> Append:
    return replace(op, id=id, mark=mark_of(id, b""))


# --- the log ------------------------------------------------------------------------------------


class ExpectsNothing(Tables):
    """Whoever comes writes: the last one wins."""

    async def accept(self, op: Append) -> Answer:
        return await super().accept(replace(op, expect=None) if is_change(op) else op)


class ExpectsANumber(Tables):
    """After a failover, version 8 is another one, and is taken for the one that was seen."""

    async def accept(self, op: Append) -> Answer:
        if is_change(op) and isinstance(op.expect, Position):
            op = replace(op, expect=op.expect.offset)
        return await super().accept(op)


class SealsNothing(Tables):
    """A position stands for what was asked, and not for what came of it."""

    async def accept(self, op: Append) -> Answer:
        return await super().accept(replace(op, seal=""))


class KnowsNoUser(Tables):
    """A request is known by its id alone."""

    async def accept(self, op: Append) -> Answer:
        if op.stream.startswith(ROOM) and not op.id.startswith("0:"):
            op = known_by(op, op.id.split(":", 2)[2])
        return await super().accept(op)


class KnowsNoIds(Tables):
    """What is sent again is another request."""

    async def accept(self, op: Append) -> Answer:
        if op.stream.startswith(ROOM):
            op = known_by(op, f"{op.id} {next(COUNT)}")
        return await super().accept(op)


class KeepsNoReply(Tables):
    """That it was done is remembered, and not what came of it."""

    async def accept(self, op: Append) -> Answer:
        return await super().accept(replace(op, reply=b'{"reply":null}') if is_change(op) else op)


class WritesTheStateApart(Tables):
    """The entry, and then the state: at times somebody dies in between."""

    async def accept(self, op: Append) -> Answer:
        is_lost = is_change(op) and self.world.chance.random() < 0.1
        return await super().accept(replace(op, state=None) if is_lost else op)


class MarksLater(Tables):
    """The entry, and then its marker: at times somebody dies in between."""

    async def accept(self, op: Append) -> Answer:
        answer = await super().accept(op)
        if isinstance(answer, Appended) and is_change(op) and self.world.chance.random() < 0.1:
            self._streams[op.stream].marks.pop(op.id, None)
        return answer


class ForgetsMarks(Tables):
    """Markers expire while somebody may still send it again."""

    async def accept(self, op: Append) -> Answer:
        stream = self._streams.get(op.stream)
        if stream is not None:
            lately_us = self._clock.now_us() - 500_000 + round(op.keep.ids_s * 1e6)
            stream.marks = {id: m for id, m in stream.marks.items() if m.until_us > lately_us}
        return await super().accept(op)


class KeepsWhatSucceeded(Tables):
    """A refusal is not worth remembering: the same request may do something later."""

    async def accept(self, op: Append) -> Answer:
        answer = await super().accept(op)
        if isinstance(answer, Appended) and op.stream.startswith(ROOM) and op.data is None:
            self._streams[op.stream].marks.pop(op.id, None)
        return answer


class KeepsMarksElsewhere(Tables):
    """Markers are in a cache, which fails over by itself, and the rooms are not."""

    def fail_over(self) -> None:
        if self._copy is None:
            self.keep_a_copy()
            return
        for name, stream in self._streams.items():
            then = self._copy[0].get(name)
            if name.startswith(ROOM):
                stream.marks = {} if then is None else dict(then.marks)


class ComparesNumbers(Tables):
    """A cursor is a number: 6 follows 5, whichever 5 that was."""

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        with as_ours(lambda row, after, _: row.floor.offset <= after.offset <= row.head.offset):
            return await super().read(stream, after, limit)


# --- exists, setex, a lock, and a delete ----------------------------------------------------------


class ByHand(Rooms):
    """A marker beside the log, which knows no ids itself."""

    lasts_s = 300.0
    locks_s = 0.0

    async def settle(self, request: Request) -> Reply:
        key = f"{request.room_id} {request.id}"
        if (found := await self._found(key, request)) is not None:
            return found
        return await self._locked(key, request)

    async def _found(self, key: str, request: Request) -> Reply | None:
        found = await self.ask(lambda: self.get(key))
        if found is not None and found[0] != request.fingerprint:
            raise conflict(request)
        return None if found is None else replace(found[1], cached=True)

    async def _locked(self, key: str, request: Request) -> Reply:
        token = next(COUNT)
        while self.locks_s and not await self.ask(lambda: self.set_new(f"lock {key}", token)):
            await asyncio.sleep(0.05)
            if (found := await self._found(key, request)) is not None:
                return found
        reply = await super().settle(request)
        await self.ask(lambda: self.set(key, (request.fingerprint, reply), self.lasts_s))
        if self.locks_s:
            await self.ask(lambda: self.delete(f"lock {key}", token))
        return reply

    # A cache, and its time.

    async def ask(self, serve: Any) -> Any:
        async def served() -> Any:
            return serve()

        return await self.log._ask(served)  # type: ignore[attr-defined]

    @property
    def _held(self) -> dict[str, tuple[Any, float]]:
        return self.world.cache  # type: ignore[no-any-return]

    @property
    def world(self) -> Any:
        return self.store._world  # type: ignore[attr-defined]

    def get(self, key: str) -> Any:
        found, until = self._held.get(key, (None, 0.0))
        return found if until > self.world.loop.clock_s else None

    def set(self, key: str, what: Any, lasts_s: float) -> bool:
        self._held[key] = what, self.world.loop.clock_s + lasts_s
        return True

    def set_new(self, key: str, token: int) -> bool:
        return self.get(key) in (None, token) and self.set(key, token, self.locks_s)

    def delete(self, key: str, token: int) -> bool:
        return self.get(key) == token and self.set(key, None, 0.0)


class LocksForAWhile(ByHand):
    """And a lock, with a token, that ends by itself, so that nobody's is for ever."""

    locks_s = 0.5


class DeletesAnyLock(LocksForAWhile):
    """Whoever has done with it deletes the lock, whosever it is by now."""

    locks_s = 2.0

    def delete(self, key: str, token: int) -> bool:
        return self.set(key, None, 0.0)


class AsksWhetherThenWhat(Rooms):
    """EXISTS, and then GET: it may be gone in between."""

    async def settle(self, request: Request) -> Reply:
        reply = await super().settle(request)
        is_gone = reply.cached and self.store._world.chance.random() < 0.1  # type: ignore[attr-defined]
        return Reply(reply.version, cached=True) if is_gone else reply


class TellsTheLoserItIsDone(Rooms):
    """Who does not get the lock is told that somebody else is at it, which is as good as done."""

    async def settle(self, request: Request) -> Reply:
        host = self._host(request.room_id)
        if any(running.id == request.id for running in host._running.values()):
            version = 0 if host._tip is None else host._tip.version
            return Reply(version, {"n": version, "of": "", "by": request.user}, cached=True)
        return await super().settle(request)


class KeepsRepliesById(Rooms):
    """Replies are at hand by the request's id, which another user has as well."""

    async def settle(self, request: Request) -> Reply:
        kept = self.__dict__.setdefault("kept", {})
        key = request.room_id, request.request_id
        if key in kept:
            return replace(kept[key], cached=True)
        reply = await super().settle(request)
        if reply.success:
            kept[key] = reply
        return reply


# --- a room in a process ------------------------------------------------------------------------


class KeepsItsTip(Host):
    """Another process was faster; what is known here stays what it was."""

    async def _sent(self, tip: Any, request: Any, decided: Any) -> Answer:
        answer = await super()._sent(tip, request, decided)
        if isinstance(answer, VersionConflict) and self._tip is None:
            self._tip = tip
        return answer


class AnswersAtOnce(Host):
    """The log will take it: why wait?"""

    async def _sent(self, tip: Any, request: Any, decided: Any) -> Answer:
        if decided.after is None:
            return await super()._sent(tip, request, decided)
        keep(asyncio.ensure_future(super()._sent(tip, request, decided)))
        return Appended(decided.after.position, decided.kept)


class ShowsAtOnce(Host):
    """Whoever is here is shown it while it is on its way to the log."""

    async def _sent(self, tip: Any, request: Any, decided: Any) -> Answer:
        if decided.after is not None:
            entry = Entry(decided.after.position, request.id, decided.entry, 0)
            self._house.shout(self.room_id, entry)  # type: ignore[attr-defined]
        return await super()._sent(tip, request, decided)


class Shouting(RoomDoor):
    def __init__(self, rooms: Rooms, **how: Any) -> None:
        super().__init__(rooms, **how)
        rooms.shout = self._shout  # type: ignore[attr-defined]

    def _shout(self, room_id: str, entry: Entry) -> None:
        for each in self._house.connections:
            if (seat := each.seats.get(room_id)) is not None:
                for text in messages.for_viewer(entry, seat.user):
                    each.tell(text)


class StopsForGood(Host):
    """One task does everything in a room; what it does not catch ends it."""

    _is_over = False

    async def _failed(self, request: Any, error: Exception) -> Reply:
        self._is_over = True
        return await super()._failed(request, error)

    async def act(self, request: Any) -> Reply | None:
        if self._is_over:
            await asyncio.get_running_loop().create_future()
        return await super().act(request)


class BelievesAnOutage(Host):
    """No answer: then it was not taken, and whoever asked is told so."""

    async def _sent(self, tip: Any, request: Any, decided: Any) -> Answer:
        try:
            return await super()._sent(tip, request, decided)
        except StoreUnavailableError:
            self._tip = None
            return Appended(tip.position, decided.kept)


# --- deadlines ----------------------------------------------------------------------------------


class NotesNothing(Rooms):
    """Deadlines are in the memory of who began the turn; when that is gone, so are they."""

    def must_note(self, room_id: str, at_s: float) -> bool:
        if super().must_note(room_id, at_s):
            self.timers._add(room_id, at_s, Position(10**9 + next(COUNT), ""))
        return False


class NotesLater(Rooms):
    """The turn begins, and then it is noted: whoever dies in between leaves it for ever."""

    def must_note(self, room_id: str, at_s: float) -> bool:
        if super().must_note(room_id, at_s):
            keep(asyncio.ensure_future(self._note_later(room_id, at_s)))
        return False

    async def _note_later(self, room_id: str, at_s: float) -> None:
        await asyncio.sleep(1.0)
        await self.note(room_id, at_s)


def due_whichever(self: Host, tip: Any, turn: str) -> bool:
    """Somebody's turn is over, and whoever's it is now is timed out."""
    return tip.deadline is not None


class IsSlowToTimeOut(Rooms):
    """Between the look and what comes of it, a turn may be played."""

    async def _timed_out(self, room_id: str, turn: str) -> Reply | None:
        await asyncio.sleep(0.3)
        return await super()._timed_out(room_id, turn)


def forget_nothing(self: Host) -> None:
    """It was timed out, as far as anybody here remembers; a failover has taken that back."""


class TimesOutWhoeverLooks(Rooms):
    """It was looked at because a turn is over: which one need not be asked."""

    async def _look(self, room_id: str) -> float | None:
        standing = await self.standing(room_id)
        if standing.deadline is not None:
            await self._timed_out(room_id, standing.deadline.turn)
        return None


def wall_s(self: StoreClock) -> float:
    return self._wall()


# --- the bell -----------------------------------------------------------------------------------


class ReadsFirst(Reader):
    """Reads, then listens: what comes in between is heard of with the next one, if there is one."""

    async def _listen(self) -> None:
        keep(asyncio.ensure_future(self._listen_behind()))

    async def _listen_behind(self) -> None:
        await self._tried.wait()
        await super()._listen()


async def look_nowhere(self: Feed) -> None:
    """Nobody looks unless a bell rings."""


NO_NET = ((Feed, "_look", look_nowhere),)
"""Else whoever misses a ring is late by a second, which is no more than is promised."""


# --- who is shown what --------------------------------------------------------------------------


class ReplaysByNow(Joining):
    """Who comes back is shown what happened as they may see it now."""

    async def _resume(self, standing: Any, cursor: Position) -> Position:
        user, self._user = self._user, standing.viewer_of(self._user)
        position = await super()._resume(standing, cursor)
        self.texts = [_as_of(text, user) for text in self.texts]
        return position


def _as_of(text: str, user: str | None) -> str:
    return (
        text.replace('"viewer":null', f'"viewer":"{user}"') if user and "JOINED" in text else text
    )


def patch_of_somebody(self: Told, user: str | None) -> Any:
    """Everybody is sent what somebody is to see."""
    return next(iter(self.changes.get("own", {}).values()), self.changes["all"])


def events_of_all(self: Told, user: str | None) -> list[Any]:
    """Who an event is for is the browsers' business."""
    return [payload for _, payload in self.happened]


class Snapshots:
    """Made once for everybody at a version."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def __call__(self, room_id: str, standing: Any, *rest: Any) -> str:
        made = self._made.setdefault((room_id, standing.position), standing)
        user, reason, request_id = rest
        first = self._made.setdefault((made, "first"), user)
        return SNAPSHOT(room_id, standing, first, reason, request_id)


SNAPSHOT = messages.snapshot


def result_of_now(room_id: str, standing: Any, *rest: Any) -> Any:
    """A result is that of the state with which it is sent."""
    moved = copy.copy(standing)
    moved.finished = moved.finished and moved.position
    return RESULTS(room_id, moved, *rest)


def no_results(*rest: Any) -> list[str]:
    """What came of a hand was told when it was over."""
    return []


RESULTS = messages.results


# --- all of them --------------------------------------------------------------------------------


def host(planted: type[Host], *patches: Any, **how: Any) -> Plan:
    return Plan(patches=((rooms_module, "Host", planted), *patches), **how)


def replica(planted: type[Replica], *faults: str) -> Plan:
    return Plan(patches=((room_rules, "Replica", planted),), faults=faults or None)


def asking(planted: type[Requests], *faults: str) -> Plan:
    return Plan(patches=((room_rules, "Requests", planted),), faults=faults or None)


def by_hand(rooms: type[Rooms], **how: Any) -> Plan:
    return Plan(tables=KnowsNoIds, rooms=rooms, **how)


COMPARES_VERSIONS = ((room_rules, "Replica", ComparesVersions),)
"""It is safe as long as servers tell them of every other history."""


PLANTS = {
    "nothing is expected": Plan(tables=ExpectsNothing),
    "a number is expected": Plan(tables=ExpectsANumber, faults=("failover", "rings")),
    "a position stands for what was asked": Plan(
        tables=SealsNothing, faults=("failover", "rings", "weather")
    ),
    "a request is known without its user": Plan(tables=KnowsNoUser),
    "a request has no fingerprint": Plan(
        patches=((requests, "_fingerprint", lambda action, version: b""),)
    ),
    "what is sent again is another request": Plan(tables=KnowsNoIds),
    "the reply is not kept": Plan(tables=KeepsNoReply),
    "the state is written apart": Plan(tables=WritesTheStateApart),
    "the marker is written after the change": Plan(tables=MarksLater),
    "markers expire too early": Plan(tables=ForgetsMarks),
    "only what succeeded is kept": Plan(tables=KeepsWhatSucceeded),
    "markers fail over by themselves": Plan(tables=KeepsMarksElsewhere),
    "cursors are numbers": Plan(
        tables=ComparesNumbers, faults=("failover", "rings", "cut"), sound=COMPARES_VERSIONS
    ),
    "look, then do": by_hand(ByHand),
    "a lock that expires": by_hand(LocksForAWhile),
    "anybody deletes the lock": by_hand(DeletesAnyLock),
    "whether, and then what": Plan(rooms=AsksWhetherThenWhat),
    "the loser is told it is done": Plan(rooms=TellsTheLoserItIsDone),
    "replies are at hand by id": Plan(rooms=KeepsRepliesById),
    "the tip is kept after a conflict": host(KeepsItsTip, faults=("weather", "skew")),
    "the answer does not wait for the log": host(AnswersAtOnce),
    "what is shown does not wait for the log": host(ShowsAtOnce, door=Shouting),
    "one failure stops the room": host(StopsForGood),
    "an outage is believed": host(BelievesAnOutage),
    "numbers are not remembered": Plan(
        patches=((Request, "rising", None),), faults=("trim", "odd", "weather", "cut")
    ),
    "deadlines are in memory": Plan(rooms=NotesNothing),
    "a turn is noted after it has begun": Plan(
        rooms=NotesLater, faults=("crash", "black_out", "odd")
    ),
    "whichever turn it is is timed out": Plan(
        rooms=IsSlowToTimeOut, patches=((Host, "_is_due", due_whichever),)
    ),
    "memory says that it is over": Plan(
        patches=((Host, "forget", forget_nothing),), faults=("failover",)
    ),
    "whoever looks times out": Plan(rooms=TimesOutWhoeverLooks),
    "deadlines are by everybody's own clock": Plan(
        patches=((StoreClock, "now_s", wall_s),), faults=("skew",)
    ),
    "read, then listen": Plan(
        patches=((feed, "Reader", ReadsFirst),), faults=("cut", "crash", "stop"), sound=NO_NET
    ),
    "a replay is as one sees now": Plan(
        patches=((hearing, "Joining", ReplaysByNow),), faults=("cut",)
    ),
    "one's own changes go to everybody": Plan(patches=((Told, "patch", patch_of_somebody),)),
    "events go to everybody": Plan(patches=((Told, "events", events_of_all),)),
    "a snapshot is made once": Plan(patches=((messages, "snapshot", Snapshots()),)),
    "versions are compared, and not histories": replica(
        ComparesVersions, "failover", "rings", "boxes", "cut", "crash"
    ),
    "a gap is shown": replica(TakesWhatIsLarger, "boxes"),
    "a repeat is shown": replica(TakesWhatComes, "boxes"),
    "any snapshot is taken": replica(TakesAnySnapshot, "boxes"),
    "a snapshot is asked for once": replica(AsksOnce, "boxes"),
    "silence is believed": replica(BelievesSilence, "boxes"),
    "a snapshot is not heeded": replica(KeepsItsState),
    "a resend has a new id": asking(SendsAnew, "cut", "crash", "weather"),
    "a resend has a new number": asking(CountsResends, "cut", "weather", "trim", "away"),
    "it is on top until it is answered": asking(WaitsForTheAnswer),
    "an answer is taken for the state": asking(TakesTheAnswerForTheState),
    "what was refused is left on top": asking(LeavesWhatWasRefused),
    "what is on top stays on its ground": asking(StaysOnItsGround),
    "it is on top of any snapshot": asking(ShowsItOnAnySnapshot),
    "a result is shown again": Plan(guest=ShowsResultsAgain),
    "a result is told when it comes to be": Plan(patches=((messages, "results", no_results),)),
    "a result is where the room stands": Plan(patches=((messages, "results", result_of_now),)),
}
