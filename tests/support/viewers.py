"""A browser's side of the gateway: one connection by hand, and the frames that came on it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from semel.bus import Publisher, get_next_seq
from support.web import Wire, scope_of

JOB = "7"


@dataclass
class Frame:
    """One event as it came."""

    event: str
    data: str
    id: str | None
    raw: bytes

    def json(self):
        return json.loads(self.data)


def frames_of(body):
    """Every whole frame; what is behind the last blank line must be nothing."""
    *whole, rest = body.split(b"\n\n")
    assert rest == b"", f"cut within a frame: {rest!r}"
    return [_frame(raw + b"\n\n") for raw in whole]


def _frame(raw):
    lines = raw.decode().split("\n")
    assert "\r" not in raw.decode()
    fields = [line.partition(": ")[::2] for line in lines if line]
    names = [name for name, _ in fields]
    assert "id" not in names or names[-1] == "id", "an id comes last"
    told = dict(fields)
    data = "\n".join(text for name, text in fields if name == "data")
    return Frame(told.get("event", "message"), data, told.get("id"), raw)


class Connection(Wire):
    """One request to a gateway. While it is `stuck`, whatever is sent waits; else for `pace_s`."""

    def __init__(
        self, gateway, path=f"/{JOB}", *, cursor=None, accept="text/event-stream", **request
    ):
        super().__init__(on_send=self._take)
        self.stuck = False
        self.pace_s = 0.0
        self.aborted = False
        self._moved = asyncio.Event()
        headers = [(b"accept", accept.encode()), *request.pop("headers", ())]
        if cursor is not None:
            headers.append((b"last-event-id", cursor.encode("latin-1")))
        request = {"method": "GET", **request}
        self.scope = scope_of(path, headers=headers, **request)
        self.task = asyncio.ensure_future(gateway(self.scope, self.receive, self.send))

    def can_abort(self):
        """As under uvicorn."""
        self.scope["extensions"]["semel.abort"] = self._abort
        return self

    def _abort(self):
        self.aborted = True
        self.stick(False)
        self.gone.set()

    async def _take(self, message):
        await asyncio.sleep(self.pace_s)
        while self.stuck:
            self._moved.clear()
            await self._moved.wait()

    def stick(self, stuck=True):
        self.stuck = stuck
        self._moved.set()

    @property
    def status(self):
        return self.sent[0]["status"] if self.sent else None

    @property
    def frames(self):
        return frames_of(self.so_far)

    @property
    def told(self):
        """Its entries as (offset, seq), and other frames by their names, but signs of life."""
        told = []
        for frame in self.frames:
            if frame.event == "message":
                told.append((int(frame.id.partition(".")[0]), frame.json()["seq"]))
            elif frame.event not in {"hello", "head"}:
                told.append(frame.event)
        return told

    @property
    def cursor(self):
        """What a browser has as its last id."""
        return next((frame.id for frame in reversed(self.frames) if frame.id is not None), None)

    async def until(self, condition, within_s=60):
        async with asyncio.timeout(within_s):
            while not condition(self):
                if self.task.done():
                    self.task.result()
                    assert condition(self), f"it has ended: {self.so_far}"
                await asyncio.sleep(0.01)
        return self

    async def opened(self):
        return await self.until(lambda c: c.status is not None)

    async def ended(self):
        """The reply, whole."""
        async with asyncio.timeout(60):
            await self.task
        return self.reply()

    async def hang_up(self):
        self.gone.set()
        async with asyncio.timeout(60):
            await self.task


async def publish(store, *stages, job_id=JOB, data=None, **more):
    """The next event of each of these stages; `done` is the last one."""
    publisher = Publisher(store)
    seen = {}
    for stage in stages:
        seq = get_next_seq(stage, seen.get(stage, more.get("sub_seq", 0)))
        seen[stage] = seen.get(stage, more.get("sub_seq", 0)) + 1
        await publisher.publish(job_id, stage, seq, {"of": stage} if data is None else data)


__all__ = ["JOB", "Connection", "Frame", "frames_of", "publish"]
