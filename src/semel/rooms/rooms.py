"""All rooms of one kind, as one process has them.

    rooms = Rooms("redis://localhost", PokerTable(), name="poker")
    reply = await rooms.act("t1", "ann", "ann-1", {"actionType": "raise", "amount": 100})

A room comes into memory when it is asked for, and leaves when nobody has for a while: the log has
everything. Any number of processes may have the same room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import takewhile
from types import TracebackType
from typing import Any, Self

from semel.colour import ASYNC, keep
from semel.entries import Keep, Position, Snapshot
from semel.errors import SettingsError
from semel.failures import Failures
from semel.feed import Feed, Subscription
from semel.ports import LogStore
from semel.rooms.clock import StoreClock
from semel.rooms.host import Host
from semel.rooms.names import MOST_KIND, MOST_ROOM, TIMEOUT, named
from semel.rooms.requests import Reply, Request
from semel.rooms.room import Room
from semel.rooms.standing import Standing
from semel.rooms.status import Counts, RoomsStatus
from semel.rooms.timers import FAILED_S, SURE_S, Timers
from semel.settings import as_log_store

__all__ = ["Rooms"]

log = logging.getLogger("semel")

# Of a state, and of an entry: with what a server holds of a room at a time.
MOST_BYTES = 256 * 1024

# The log may not have what was played when a turn was over.
PLAYED_S = 0.05

# Rooms of which it is remembered that their turns do not end.
MOST_TOLD = 1000

# Standings that are kept for those who come to the same room at the same time.
MOST_STANDINGS = 256


class Rooms:
    """The rooms of one kind in a store, or in the one at a URL. Belongs to one event loop.

    `name` tells this kind from others in the same store. `replay`: how many of a room's last
    changes are kept for those who come back; who has missed more gets a snapshot. `requests_s`: how
    long the id of a request and its reply are remembered, at least. `most_bytes`: of a room's
    state; what makes it larger is refused. `idle_s`: so long a room that nobody uses stays in
    memory. `forget_s`: a room in which nothing happens for so long is gone; None is never.
    """

    def __init__(
        self,
        store: LogStore | str,
        room: Room,
        *,
        name: str = "table",
        replay: int = 1000,
        requests_s: float = 300.0,
        most_bytes: int = MOST_BYTES,
        idle_s: float = 60.0,
        forget_s: float | None = None,
        wall: Callable[[], float] = time.time,
        entropy: Callable[[], bytes] = lambda: os.urandom(32),
    ) -> None:
        if not isinstance(room, Room):
            raise SettingsError(f"room={room!r:.80}: give an instance of your class of Room")
        if not isinstance(room.view_version, str):
            raise SettingsError(
                f'view_version={room.view_version!r:.80}: the version of a view is text, as "2"'
            )
        if ":" in named("name", name, MOST_KIND):
            raise SettingsError(f"name={name!r}: rooms have a name without a colon, such as table")
        for what, number in (("replay", replay), ("most_bytes", most_bytes), ("idle_s", idle_s)):
            if not number > 0:
                raise SettingsError(f"{what}={number}: more than 0")
        self.room = room
        self.name = name
        self.most_bytes = most_bytes
        self.keep = Keep(entries=replay, ids_s=requests_s, idle_s=forget_s)
        self.counts = Counts()
        self.failures = Failures()
        self.store = as_log_store(store)
        self._is_ours = isinstance(store, str)
        self.log = self.store.log(ASYNC)
        self.feed = Feed(self.store)
        self.clock = StoreClock(self.log, f"{name}:clock", wall)
        self._is_timed = type(room).deadline is not Room.deadline
        self.entropy = entropy
        self.timers = Timers(
            f"{name}:timers", self.log, self.feed, self.clock, self._look, self._is_here
        )
        self._idle_s = idle_s
        self._hosts: OrderedDict[str, Host] = OrderedDict()
        """The one that was used longest ago comes first."""
        self._standings: OrderedDict[str, Standing] = OrderedDict()
        self._looked_after: set[str] = set()
        self._told_of: dict[str, str] = {}
        self._timing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def start(self) -> None:
        """Look after deadlines from now on. Acting does not need it, if others do."""
        if self._timing is None:
            self._timing = asyncio.ensure_future(self._run())
            keep(self._timing)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.timers.run())
            group.create_task(self._tidy())

    async def _tidy(self) -> None:
        while True:
            await ASYNC.sleep(self._idle_s / 4)
            self._sweep()

    async def aclose(self) -> None:
        if self._timing is not None:
            self._timing.cancel()
            await asyncio.wait([self._timing])
        await self.timers.stopped()
        await self.feed.aclose()
        if self._is_ours:
            await self.store.aclose()

    # --- acting ---------------------------------------------------------------------------------

    async def act(
        self,
        room_id: str,
        user: str,
        request_id: str,
        action: Mapping[str, Any],
        *,
        expected_version: int | None = None,
        client_id: str = "",
        client_seq: int | None = None,
    ) -> Reply:
        """What became of a user's action; of one that was asked before, the same as then.

        `ConcurrentActionError`: the user's last one is not answered yet.
        `IdempotencyConflictError`: the id was used for another action. `StoreUnavailableError`:
        nobody knows; ask the same again.
        """
        if user is None:
            raise SettingsError("a user has a name; what nobody does is rooms.system(...)")
        return await self.settle(
            Request(room_id, user, request_id, action, expected_version, client_id, client_seq)
        )

    async def system(self, room_id: str, request_id: str, action: Mapping[str, Any]) -> Reply:
        """What became of something that no user does; `ctx.user` is None."""
        request = Request(room_id, None, request_id, action)
        if request.request_id.startswith(TIMEOUT):
            raise SettingsError(f"request id {request_id!r}: those with {TIMEOUT!r} are timeouts")
        return await self.settle(request)

    async def settle(self, request: Request) -> Reply:
        counts, begun = self.counts, ASYNC.now()
        counts.requests += 1
        if self._is_timed and not self.clock.is_known:
            await self.clock.learn()  # or the first deadline would be by our own clock
        reply = await self._host(request.room_id).act(request)
        assert reply is not None, "only a timeout may not be due"
        counts.action_s.add(ASYNC.now() - begun)
        if reply.cached:
            counts.repeated += 1
        elif reply.success:
            counts.accepted += 1
        else:
            counts.refused[reply.code] += 1
        return reply

    # --- looking --------------------------------------------------------------------------------

    async def standing(self, room_id: str, *, seen: int = 0) -> Standing:
        """How the room stands now, as the log has it. Whoever asks has `seen` that version."""
        stream = self.stream_of(room_id)
        snapshot = await self.feed.load(stream)
        host = self._hosts.get(room_id)
        known = max(seen, 0 if host is None else host.acknowledged)
        if snapshot.position.offset < known:
            snapshot = await self.log.load(stream)  # that one was asked for before
        held = self._standings.get(stream)
        if held is None or held.position != snapshot.position:
            held = Standing.of(self.room, room_id, snapshot)
            self._standings[stream] = held
        self._standings.move_to_end(stream)
        while len(self._standings) > MOST_STANDINGS:
            self._standings.popitem(last=False)
        return held

    def follow(self, room_id: str, after: Position | None) -> Subscription:
        """What happens in the room from there on."""
        return self.feed.follow(self.stream_of(room_id), after)

    def stream_of(self, room_id: str) -> str:
        return f"{self.name}:room:{named('room id', room_id, MOST_ROOM)}"

    def exists(self, room_id: str) -> bool:
        """Return whether the room has an accepted action; False for a room not followed here."""
        head = self.feed.head(self.stream_of(room_id))
        return head is not None and head.offset > 0

    def presence_stream_of(self, room_id: str) -> str:
        return f"{self.name}:here:{room_id}"

    # --- what its parts need --------------------------------------------------------------------

    def now_s(self) -> float:
        return self.clock.now_s()

    async def load(self, stream: str) -> Snapshot:
        return await self.feed.load(stream)

    def head(self, stream: str) -> Position | None:
        return self.feed.head(stream)

    def must_note(self, room_id: str, at_s: float) -> bool:
        return self.timers.must_note(room_id, at_s)

    async def note(self, room_id: str, at_s: float) -> None:
        await self.timers.note(room_id, at_s)

    def look_soon(self, room_id: str) -> None:
        self.timers.look_soon(room_id)

    def _host(self, room_id: str) -> Host:
        host = self._hosts.get(room_id)
        if host is None:
            self._sweep()  # by those who come, too: who only acts is not started
            host = self._hosts[room_id] = Host(self, room_id, self.stream_of(room_id))
        host.used_at = ASYNC.now()
        self._hosts.move_to_end(room_id)
        return host

    def _sweep(self) -> None:
        before = ASYNC.now() - self._idle_s
        for host in list(takewhile(lambda host: host.used_at <= before, self._hosts.values())):
            if not host.is_busy:
                del self._hosts[host.room_id]
        if not self._hosts:
            self._standings.clear()

    # --- deadlines ------------------------------------------------------------------------------

    def _is_here(self, room_id: str) -> bool:
        return room_id in self._hosts or self.feed.head(self.stream_of(room_id)) is not None

    async def _look(self, room_id: str) -> float | None:
        """Time out the turn that is over, and each after it. When is it to be looked at next?"""
        await self.clock.learn()
        last: Reply | None = None
        asked: str | None = None
        while True:
            # Not one that others have asked for: it may be from before the turn began.
            snapshot = await self.log.load(self.stream_of(room_id))
            if not snapshot.position.offset:
                return None  # a timeout would create the room
            deadline = Standing.of(self.room, room_id, snapshot).deadline
            if deadline is None:
                # Nobody may have read what was timed out, and a failover take it back: whoever has
                # done it stays for a moment, and its note with it.
                return None if last is None else self.now_s() + SURE_S
            if deadline.at_s > self.now_s():
                return deadline.at_s
            if last is not None and deadline.turn == asked:
                self._tell_of(room_id, deadline.turn, last)
                return None
            last = await self._timed_out(room_id, deadline.turn)
            if last is None:
                # It was played in time, and the next turn may count on this look. Or so we think: a
                # failover may have taken that back.
                await ASYNC.sleep(PLAYED_S)
                self._host(room_id).forget()
            elif last.code == "FAILED":
                return self.now_s() + FAILED_S
            asked = deadline.turn

    async def _timed_out(self, room_id: str, turn: str) -> Reply | None:
        action = {"actionType": "timeout", "turn": turn}
        request = Request(room_id, None, f"{TIMEOUT}{turn}", action, timeout=turn)
        reply = await self._host(room_id).act(request)
        self.counts.timeouts += reply is not None and reply.success and not reply.cached
        return reply

    def _tell_of(self, room_id: str, turn: str, reply: Reply) -> None:
        """A turn that is over, was answered, and is still there. Once: it may be for long."""
        if self._told_of.get(room_id) == turn:
            return
        self._told_of[room_id] = turn
        while len(self._told_of) > MOST_TOLD:
            del self._told_of[next(iter(self._told_of))]
        if reply.success:
            log.error(
                "semel: turn %r of room %r was timed out before, and has begun again: no two turns "
                "of a room may have the same name, so count them; it lasts until somebody acts",
                *(turn, room_id),
            )
        else:
            log.warning(
                "semel: the rules of room %r refuse to time out turn %r: %s %s; it lasts until "
                "somebody acts",
                *(room_id, turn, reply.code, reply.message),
            )

    def look_after(self, standing: Standing, room_id: str) -> None:
        """Have the timers look at the room if its deadline may not be noted. Called at a join.

        A room that does not exist has no turn, although its first state may have a deadline.
        """
        if not standing.version:
            return
        try:
            deadline = standing.deadline
        except Exception:  # noqa: BLE001 - the rules are somebody else's code; timers tell of it
            return
        if deadline is None or room_id in self._looked_after:
            return
        if self.must_note(room_id, deadline.at_s):
            self._looked_after.add(room_id)  # a crowd that comes is one reason to look
            looking = self.timers.look_soon(room_id)
            looking.add_done_callback(lambda _: self._looked_after.discard(room_id))

    # --- for people -----------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        """What people call it."""
        return f"rooms {self.name}"

    def status(self, *, draining: bool = False) -> RoomsStatus:
        counts = self.counts
        return RoomsStatus(
            name=self.name,
            rooms=len(self._hosts),
            connections=counts.connections,
            joined=counts.joined,
            requests=counts.requests,
            repeated=counts.repeated,
            accepted=counts.accepted,
            refused=dict(counts.refused),
            conflicts=counts.conflicts,
            timeouts=counts.timeouts,
            updates=counts.updates,
            snapshots=dict(counts.snapshots),
            gaps=counts.gaps,
            closed=dict(counts.closed),
            action_s=counts.action_s.seen(),
            outage=self.feed.circuit.error,
            draining=draining,
        )
