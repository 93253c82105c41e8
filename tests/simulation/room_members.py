"""Servers with rooms in a simulated world, and the lines that lead to them."""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bus_members import Bell
from room_history import ROOM, Tables
from room_table import MOST_BYTES, CardTable
from router_world import LogHere, StoreHere

from semel import colour
from semel.client.room_rules import Guest
from semel.entries import Answer, Page, Position
from semel.errors import StoreUnavailableError
from semel.feed import Feed
from semel.http.ws import Limits, RoomDoor
from semel.rooms import Rooms
from semel.stores.log_rules import Append
from semel.testing.simulator import HOST, Host, NoAnswerError, SimClock

if TYPE_CHECKING:
    from room_clients import Client
    from room_world import World

# So many messages are buffered for who does not read; then the server has to wait.
BUFFER = 12

# Of a line, at most.
LATENCY_S = 0.03


@dataclass(frozen=True)
class Plan:
    """Of what the world is made: the real thing, or one with a defect planted in it.

    `faults` are the only ones there are; None is all of them. `sound` are patches that stay when
    the defect is taken out.
    """

    tables: type[Tables] = Tables
    rooms: type[Rooms] = Rooms
    door: type[RoomDoor] = RoomDoor
    guest: type[Guest] = Guest
    faults: tuple[str, ...] | None = None
    patches: tuple[tuple[Any, str, Any], ...] = ()
    sound: tuple[tuple[Any, str, Any], ...] = ()

    @property
    def healthy(self) -> Plan:
        return Plan(faults=self.faults, sound=self.sound)


# --- the way to the log -------------------------------------------------------------------------


class LogOfRooms(LogHere):
    """Asks once more where no answer came, in some worlds, as drivers do."""

    async def _ask(self, serve: Callable[[], Any]) -> Any:
        world = self._world
        for _ in range(1 + world.retries):  # type: ignore[attr-defined]
            await world.perhaps_stumble()
            if self._name in world.away:
                await asyncio.sleep(0.01)
                raise StoreUnavailableError("away")
            try:
                return await world.network.ask(lambda: colour.run(serve()))
            except NoAnswerError:
                continue
        raise StoreUnavailableError("no answer")

    async def perform(self, op: Append) -> Answer:
        on_the_way = self._world.on_the_way  # type: ignore[attr-defined]
        key = HOST.get(), op.stream
        if on_the_way[key] and op.data is not None and op.stream.startswith(ROOM):
            self._world.hit("pipelined")
        on_the_way[key] += 1
        try:
            return await self._ask(lambda: self._log.perform(op))  # type: ignore[no-any-return]
        finally:
            on_the_way[key] -= 1


class BellOfRooms(Bell):
    """To listen takes its way there and back, and it may ring in between."""

    async def listen(self, stream: str, wake: Any) -> None:
        world, early = self._world, asyncio.Event()
        await asyncio.sleep(world.listens_s * world.chance.random())
        await super().listen(stream, wake)
        self.listeners.add(stream, early.set)
        await asyncio.sleep(world.listens_s * world.chance.random())
        self.listeners.remove(stream, early.set)
        if early.is_set():
            world.hit("rung_early")


class RoomStore(StoreHere):
    def log(self, colour: Any) -> Any:
        return LogOfRooms(self._world, self._log, self._name)

    def bell(self) -> Any:
        return BellOfRooms(self._world, self._log._tower)  # type: ignore[arg-type]


class FeedOfRooms(Feed):
    """Reads a few entries at a time, in some worlds."""

    world: World

    async def read(self, stream: str, after: Position, limit: int = 256) -> Page:
        return await super().read(stream, after, min(limit, self.world.page))


class InOrder(dict[Any, None]):
    """A set of tasks. A real one is in the order of their addresses, another one each time."""

    def add(self, task: Any) -> None:
        self[task] = None

    def discard(self, task: Any) -> None:
        self.pop(task, None)


# --- servers ------------------------------------------------------------------------------------


class ServerHere:
    """A process with rooms and a door. Its own clock may be wrong."""

    kind = "server"

    def __init__(self, world: World, host: Host) -> None:
        self.world = world
        self.host = host
        self._stopping = asyncio.Event()
        chance = world.chance
        host.offset = 1000.0 * chance.random()
        host.skew_s = chance.choice(world.skews)
        clock = SimClock(world.loop)
        self.rooms = world.plan.rooms(
            RoomStore(world, world.tables, "log"),  # type: ignore[arg-type]
            CardTable(),
            replay=world.replay,
            requests_s=world.requests_s,
            most_bytes=MOST_BYTES,
            idle_s=chance.choice([2.0, 60.0]),
            wall=lambda: clock.now_us() / 1e6 + host.skew_s,
            entropy=lambda: chance.randbytes(32),
        )
        self.door = world.plan.door(
            self.rooms,
            authorise=world.authorise,
            presence=world.tells_presence,
            heartbeat_s=1.5,
            reauthorise_s=2.0,
            max_age_s=chance.choice([600.0, 8.0]),
            limits=Limits(write_within_s=3.0, behind_events=4, messages_per_s=world.per_s),
        )
        self._take_chances()
        self._count_looks()

    def _take_chances(self) -> None:
        """From this world, and no other."""
        chance, rooms, presence = self.world.chance, self.rooms, self.door._house.presence
        rooms.feed.__class__ = FeedOfRooms
        rooms.feed.world = self.world  # type: ignore[attr-defined]
        rooms.timers._looking = InOrder()  # type: ignore[assignment]
        rooms.feed._random = rooms.timers._chance = chance
        for circuit in (rooms.feed.circuit, rooms.timers._circuit):
            circuit._random = chance
        if presence is not None:
            presence._random = presence._circuit._random = chance

    def _count_looks(self) -> None:
        hit, timers, rooms = self.world.hit, self.rooms.timers, self.rooms
        look, is_here, soon = timers._look, timers._is_here, timers.look_soon
        timed_out = rooms._timed_out

        async def looked(room_id: str) -> float | None:
            at_s = await look(room_id)
            hit("nothing_due" if at_s is None else "not_due")
            return at_s

        def here(room_id: str) -> bool:
            return is_here(room_id) or bool(hit("stranger"))

        def looked_soon(room_id: str) -> Any:
            hit("look_soon")
            return soon(room_id)

        async def asked(room_id: str, turn: str) -> Any:
            reply = await timed_out(room_id, turn)
            hit("played_in_time" if reply is None else "asked_to_time_out")
            return reply

        timers._look, timers._is_here, timers.look_soon = looked, here, looked_soon
        rooms._timed_out = asked

    async def run(self) -> None:
        self.door.start()
        await self._stopping.wait()
        await self.door.drain(1.0)
        self.world.hit("drained")
        await self.door.aclose()

    def stop(self) -> None:
        self._stopping.set()

    @property
    def has_failed(self) -> bool:
        timing = self.rooms._timing
        return timing is not None and timing.done()


# --- lines --------------------------------------------------------------------------------------


class Line:
    """A WebSocket: what is said comes in order, and late; and is cut anywhere, with what is on it.

    The client's side is a queue of what came: None when it is open, text, or the code of its end.
    """

    def __init__(self, world: World, server: ServerHere, client: Client) -> None:
        self.world = world
        self.server = server
        self.client = client
        self.came: deque[str | int | None] = deque()
        self.is_over = False
        self._heard: deque[str] = deque()
        # Of what arrives at the same moment, which comes first is drawn by lot; not on a line.
        self._there: deque[str] = deque()
        self._back: deque[str | int | None] = deque()
        self._there_at = self._back_at = 0.0
        self._budget: int | None = None
        self._is_connected = self._is_gone = False
        self._something, self._taken = asyncio.Event(), asyncio.Event()
        self._held: str | None = None
        self._network = contextvars.Context()
        world.loop.spawn(server.host, self._serve())

    # --- the server's side ----------------------------------------------------------------------

    async def _serve(self) -> None:
        await asyncio.sleep(0.02 * self.world.chance.random())
        scope = {"type": "websocket", "path": "/", "query_string": b"", "headers": []}
        try:
            await self.server.door(scope, self._receive, self._send)
        except OSError:
            pass  # its own server's, which is told that nobody is there
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a defect
            self.world.wrong(f"the door has failed: {error!r}")
        self._say(1006)

    async def _receive(self) -> dict[str, Any]:
        if not self._is_connected:
            self._is_connected = True
            return {"type": "websocket.connect"}
        while not self._heard and not self._is_gone:
            self._something.clear()
            await self._something.wait()
        if self._heard:
            return {"type": "websocket.receive", "text": self._heard.popleft()}
        return {"type": "websocket.disconnect", "code": 1005}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.is_over:
            if self.world.chance.random() < 0.3:
                raise OSError("nobody is there")
            return
        match message["type"]:
            case "websocket.accept":
                self._say(None)
            case "websocket.close":
                self.world.hit(f"closed_{message['code']}")
                self._say(message["code"])
            case _:
                for text in self._through_a_box(message["text"]):
                    self._say(text)
                await self._wait_for_room()

    def _say(self, what: str | int | None) -> None:
        if self._budget is not None:
            self._budget -= 1
            if self._budget < 0:
                self.cut()
                return
        self._back.append(what)
        self._back_at = self._later(self._back_at)
        self._at(self._back_at, self._arrive)

    def _arrive(self) -> None:
        what = self._back.popleft()
        if not self.is_over:
            self.came.append(what)
            self.is_over = isinstance(what, int)
            self.client.woken.set()

    async def _wait_for_room(self) -> None:
        while len(self.came) + len(self._back) > BUFFER and not self.is_over:
            self.world.hit("slow")
            self._taken.clear()
            await self._taken.wait()

    # --- the network ----------------------------------------------------------------------------

    def _later(self, after: float) -> float:
        latency_s = LATENCY_S * self.world.chance.random()
        return max(after, self.world.loop.clock_s + latency_s)

    def _at(self, when: float, arrive: Callable[[], None]) -> None:
        loop = self.world.loop
        loop.after(when - loop.clock_s, arrive, context=self._network)

    def _through_a_box(self, text: str) -> list[str]:
        """What a box on the way makes of it: it is gone, or there twice, or after the next one."""
        world = self.world
        held, self._held = self._held, None
        texts = [text] if held is None else [text, held]
        if world.is_last:
            likely = 0.5 * ("TABLE_STATE_UPDATE" in text[:30])
        else:
            # There are few of them, and much hangs on each.
            likely = world.boxes * (5 if "TABLE_SNAPSHOT" in text[:30] else 1)
        if not likely or world.chance.random() >= likely or not world.box_faults:
            return texts
        if "JOINED" in text[:20] or "LEFT" in text[:20]:
            return texts  # who does not hear of that believes to be there
        world.box_faults -= 1
        match world.chance.choice(self._box_kinds(text)):
            case "swallowed":
                world.hit("swallowed")
                return texts[1:]
            case "echoed":
                world.hit("echoed")
                return [*texts, text]
            case _:
                world.hit("overtaken")
                self._held = text
                return texts[1:]

    def _box_kinds(self, text: str) -> tuple[str, ...]:
        if self.world.is_last:
            return ("swallowed",)
        # What follows a join is believed wherever one is: an update before it would be taken back.
        is_first = text.startswith('{"type":"TABLE_SNAPSHOT","payload"')
        return ("swallowed", "echoed") if is_first else ("swallowed", "echoed", "overtaken")

    def cut_soon(self) -> None:
        self._budget = self.world.chance.randrange(8)

    def cut(self) -> None:
        """With what is on its way. The server hears of it later, if ever."""
        self.world.hit("cut")
        self.end()
        if self.world.chance.random() < 0.8:
            self._at(self.world.loop.clock_s + 3.0 * self.world.chance.random(), self._go)

    def end(self) -> None:
        if not self.is_over:
            while self.came and self.world.chance.random() < 0.5:
                self.came.pop()
            self.came.append(1006)
            self.is_over = True
        self._taken.set()
        self.client.woken.set()

    def _go(self) -> None:
        self._is_gone = True
        self._something.set()

    # --- the client's side ----------------------------------------------------------------------

    def say(self, text: str) -> None:
        if not self.is_over:
            self._there_at = self._later(self._there_at)
            self._there.append(text)
            self._at(self._there_at, self._hear)

    def _hear(self) -> None:
        text = self._there.popleft()
        if not self.is_over and not self.server.host.dead:
            self._heard.append(text)
            self._something.set()

    def take(self) -> str | int | None:
        self._taken.set()
        return self.came.popleft()

    def hang_up(self) -> None:
        self.is_over = True
        self.came.clear()
        self._taken.set()
        self._at(self.world.loop.clock_s + 0.02, self._go)


def message(kind: str, request_id: str | None, **payload: Any) -> str:
    told = {"type": kind, "requestId": request_id, "payload": payload}
    return json.dumps({name: what for name, what in told.items() if what is not None})
