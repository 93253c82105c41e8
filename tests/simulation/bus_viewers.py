"""Those who watch in a simulated world: lines that are cut at any byte, and the real client rules.

Whatever a viewer is shown is checked at once: it follows, in some history of its own job, what it
was shown before; or it is a reset, whose state is that of its position.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

from bus_history import Node

from semel.bus.jobs import event_of, stream_of
from semel.client.feed_rules import (
    Connect,
    Deliver,
    Follower,
    Opening,
    Over,
    Read,
    Reset,
    Terms,
    Update,
)
from semel.entries import Position
from semel.http.sse.frames import written
from semel.http.sse.visit import ABORT
from semel.testing.simulator import Host

TERMS = Terms(silence_s=6.0, grace_s=1.0, backoff_s=0.3, longest_s=4.0)

# So much is buffered for who does not read; then the gateway has to wait.
BUFFER = 900

BLANK = re.compile(b"\n\n")

# What no gateway has given out.
GARBAGE = (
    "0",
    "1.",
    "-1.000000000000",
    "7.9f3c00d1a2b3",
    "1.zzzzzzzzzzzz",
    "\N{SNOWMAN}",
    "9" * 40,
)


class Line:
    """One request, and the bytes that come back: in pieces, late, and cut anywhere."""

    def __init__(
        self, world: Any, gateway: Any, job: str, cursor: str | None, follower: Follower
    ) -> None:
        self.world = world
        self.follower = follower
        self.gateway = gateway
        self.status = 0
        self.answer: asyncio.Future[Opening] = world.loop.create_future()
        self.is_closed = False
        self._buffer = bytearray()
        self._budget: int | None = None
        self._came, self._taken, self._gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_asked = False
        self._headers: dict[bytes, bytes] = {}
        headers = [(b"accept", b"text/event-stream")]
        if cursor is not None:
            headers.append((b"last-event-id", cursor.encode("utf-8")))
        self._scope: dict[str, Any] = {
            "type": "http", "method": "GET", "path": f"/{job}", "query_string": b"",
            "headers": headers, "extensions": {},
        }  # fmt: skip
        if world.chance.random() < 0.5:
            self._scope["extensions"][ABORT] = self.cut
        world.loop.spawn(gateway.host, self._serve())

    @property
    def is_open(self) -> bool:
        return self.status == 200 and not self.is_closed

    # --- the gateway's side ---------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            await self.gateway.app(self._scope, self._receive, self._send)
        except OSError:
            pass  # its own server's, which is told that nobody is there
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a defect
            self.world.wrong(f"the gateway has failed: {error!r}")
        self._close()

    async def _receive(self) -> dict[str, Any]:
        if not self._is_asked:
            self._is_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self.is_closed:
            if self.world.chance.random() < 0.3:
                raise OSError("nobody is there")
            return
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], dict(message["headers"])
            if self.status == 200:
                self._answered(b"")
        elif self.status == 200:
            self._carry(message["body"])
            await self._wait_for_room()
        elif not message.get("more_body", False):
            self._answered(message["body"])

    def _answered(self, body: bytes) -> None:
        retry = self._headers.get(b"retry-after")
        kind = self._headers.get(b"content-type", b"").decode().partition(";")[0]
        told = Opening(self.status, kind, None if retry is None else float(retry), body.decode())
        if not self.answer.done():
            self.answer.set_result(told)

    @property
    def is_free(self) -> bool:
        return not self.is_closed and len(self._buffer) <= BUFFER

    def write(self, body: bytes) -> None:
        self.world.hit("written_at_once")
        self._carry(body)

    def _carry(self, body: bytes) -> None:
        body = self._through_a_box(body)
        if self._budget is not None and len(body) >= self._budget:
            body = body[: self._end_in(body, self._budget)]
            self._buffer += body
            self.world.hit("cut_within" if body and not body.endswith(b"\n\n") else "cut")
            self.lose()
        else:
            self._buffer += body
            self._budget = None if self._budget is None else self._budget - len(body)
        self._came.set()

    def _end_in(self, body: bytes, budget: int) -> int:
        """Anywhere; or before some blank line, which is where one can go wrong."""
        chance, ends = self.world.chance, [at.start() + 1 for at in BLANK.finditer(body[:budget])]
        return int(chance.choice(ends)) if ends and chance.random() < 0.6 else budget

    async def _wait_for_room(self) -> None:
        while len(self._buffer) > BUFFER and not self.is_closed:
            self.world.hit("slow")
            self._taken.clear()
            await self._taken.wait()

    # --- the network ----------------------------------------------------------------------------

    def _through_a_box(self, body: bytes) -> bytes:
        """What a box between gateway and viewer makes of it: an entry is gone, or there twice."""
        world = self.world
        if not world.boxes or self.follower.position is None:
            return body  # who has no place yet would take the second entry for the first
        frames: list[bytes] = []
        for frame in body.split(b"\n\n"):
            is_entry = frame.startswith(b"event: message")
            drawn = world.chance.random() if is_entry and world.box_faults else 1.0
            world.box_faults -= drawn < 2 * world.boxes
            if drawn < world.boxes:
                world.hit("swallowed")
            elif drawn < 2 * world.boxes:
                world.hit("echoed")
                frames += [frame, frame]
            else:
                frames.append(frame)
        return b"\n\n".join(frames)

    def cut_soon(self) -> None:
        self._budget = self.world.chance.randrange(800)

    def cut(self) -> None:
        """With what is on its way."""
        self.world.hit("cut")
        del self._buffer[self.world.chance.randrange(len(self._buffer) + 1) :]
        self.lose()

    def lose(self) -> None:
        """The client hears of it, and the gateway later, if ever."""
        self._close()
        if self.world.chance.random() < 0.8:
            self.world.loop.after(3.0 * self.world.chance.random(), self._gone.set)

    def _close(self) -> None:
        self.is_closed = True
        self._came.set()
        self._taken.set()

    def hang_up(self) -> None:
        self._close()
        self._gone.set()

    # --- the client's side ----------------------------------------------------------------------

    async def read(self, within_s: float) -> bytes | None:
        """A piece; b"" where none came in time, None where no more will."""
        chance = self.world.chance
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    while not self._buffer and not self.is_closed:
                        self._came.clear()
                        await self._came.wait()
                    await asyncio.sleep(0.02 * chance.random())
                    if not self._buffer and self.is_closed:
                        return None
                    if self._buffer:
                        break
        if not self._buffer:
            return b""
        size = len(self._buffer) if chance.random() < 0.5 else chance.randint(1, len(self._buffer))
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._taken.set()
        return piece


class Viewer:
    """Somebody who watches a job. `node` is what it has seen; None where its cursor is nobody's."""

    def __init__(
        self, world: Any, job: str, node: Node | None, after: Position | None, cursor: str | None
    ) -> None:
        self.world = world
        self.job = job
        self.stream = stream_of("scan", job)
        self.node = node
        self.is_over = False
        self.has_left = False
        self.stuck_until = 0.0
        self.line: Line | None = None
        self.follower = self._follower(after)
        self._cursor = cursor  # what it sends until it has one of the gateway's
        world.loop.spawn(Host(f"viewer{len(world.viewers)}"), self._watch())

    def _follower(self, after: Position | None) -> Follower:
        return self.world.plan.follower(TERMS, self.world.chance.random, after=after)  # type: ignore[no-any-return]

    @property
    def is_open(self) -> bool:
        return self.is_over or (self.line is not None and self.line.is_open)

    @property
    def is_at_head(self) -> bool:
        now = self.world.gateways.now[self.stream]
        if self.is_over:
            taken_back = self.world.gateways.taken_back
            return self.has_left or self.node is now or (self.stream, self.node.id) in taken_back
        return self.node is now and not now.ended

    def reload(self) -> None:
        """The page is opened anew; it has kept its cursor."""
        if not self.is_over:
            self.world.hit("reloaded")
            self.follower = self._follower(self.follower.position)

    # --- doing what the rules say ---------------------------------------------------------------

    async def _watch(self) -> None:
        while not self.is_over:
            follower, now = self.follower, self.world.loop.clock_s
            match follower.next(now):
                case Connect(after_s, within_s, cursor):
                    await asyncio.sleep(after_s)
                    await self._connect(follower, within_s, cursor)
                case Read(within_s):
                    await self._read(follower, within_s)
                case Deliver(event):
                    self.world.loop.note("shown", self.job, event.id, type(event).__name__)
                    self._shown(event)
                case Over(error):
                    self._ended(error)
        if self.line is not None:
            self.line.hang_up()

    async def _be_stuck(self) -> None:
        while self.stuck_until > self.world.loop.clock_s:
            await asyncio.sleep(0.2)

    async def _connect(self, follower: Follower, within_s: float, cursor: str | None) -> None:
        await self._be_stuck()
        if self.line is not None:
            self.line.hang_up()
        gateway = self.world.some_gateway()
        if gateway is None:
            self.world.hit("nobody_there")
            follower.closed(self.world.loop.clock_s)
            return
        self.line = line = Line(self.world, gateway, self.job, cursor or self._cursor, follower)
        if self.world.chance.random() < self.world.cuts:
            line.cut_soon()
        try:
            async with asyncio.timeout(within_s):
                answer = await asyncio.shield(line.answer)
        except TimeoutError:
            follower.timed_out(self.world.loop.clock_s)
        else:
            self.world.hit(f"status_{answer.status}")
            follower.opened(self.world.loop.clock_s, answer)

    async def _read(self, follower: Follower, within_s: float) -> None:
        assert self.line is not None
        await self._be_stuck()
        piece = await self.line.read(within_s)
        if piece is None:
            follower.closed(self.world.loop.clock_s)
        elif not piece:
            self.world.hit("silence")
            follower.timed_out(self.world.loop.clock_s)
        else:
            follower.received(piece)

    # --- what must hold -------------------------------------------------------------------------

    def wrong(self, what: str) -> None:
        self.world.wrong(f"{what} ({self.job})")
        self.is_over = self.has_left = True

    def _shown(self, event: Update | Reset) -> None:
        if isinstance(event, Reset):
            self._reset(event)
        elif event.data["job_id"] != self.job:
            self.wrong("somebody was shown another job's event")
        elif self.node is None:
            self.wrong("somebody went on from a cursor that is none of this job's")
        elif event.position.offset != self.node.offset + 1:
            hole = event.position.offset > self.node.offset
            self.wrong("there is a hole" if hole else "something came again")
        else:
            told = event_of(written(event.data))
            node = self.node.children.get(told.id)
            if node is None or node.event is None or node.event.data != told.data:
                self.wrong("two histories were mixed")
            self.node = node

    def _reset(self, event: Reset) -> None:
        stages = event.state["stages"]
        if any(told["job_id"] != self.job for told in stages.values()):
            self.wrong("somebody was shown another job's state")
            return
        is_shaken = self.stream in self.world.gateways.shaken or event.reason == "overrun"
        if self.node is not None and not is_shaken:
            self.wrong(f"a reset ({event.reason}) for nothing")
        state = {name: (told["attempt"], told["seq"]) for name, told in stages.items()}
        meant = self.world.gateways.places[self.stream, event.id]
        self.node = next((node for node in meant if node.stages == state), None)
        self.world.hit(f"reset_{event.reason}")
        if self.node is None:
            self.wrong("a reset has a state that is not that of its position")

    def _ended(self, error: Exception | None) -> None:
        self.is_over = True
        if getattr(error, "status", None) == 404:
            self.has_left = True
            self.world.hit("not_found")
            self.world.come_again(self.job)
        elif error is not None:
            self.wrong(f"somebody gave up: {error}")
        elif self.node is None or not self.node.ended:
            self.wrong("somebody was told the end, and had not all")
        else:
            self.world.hit("end")
