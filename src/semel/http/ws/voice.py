"""The way out of one connection: one message after another, and who has to wait.

Answers wait in a queue while something else is written; under uvicorn they do not, as long as the
client takes what is written (see `direct`). A client that has not taken its answers is not listened
to: it may be slow, and have asked for much. Who takes nothing at all is another matter, and not
seen to here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from semel.colour import ASYNC
from semel.http.asgi import Send
from semel.http.sse.direct import abort_open, transport_of
from semel.http.ws.direct import line_of

__all__ = ["MOST_WAITING", "Voice"]

# Answers that a client has not taken, and characters of them: a snapshot of the largest room. With
# so many it is not listened to.
FULL_ANSWERS = 256
FULL_WAITING = 256 * 1024

# Maximum number of queued messages, and of their characters: more than a join and all actions under
# way can queue. A client with more is disconnected. The second limit also holds for the bytes that
# the server has buffered, such as the pongs for a flood of pings.
MOST_ANSWERS = 2048
MOST_WAITING = 8 * 1024 * 1024


class Voice:
    """`gone` is called when the client turns out to have left."""

    def __init__(self, send: Send, gone: Callable[[], None]) -> None:
        self._send = send
        self._gone = gone
        self._line = line_of(send)
        self.answers: deque[str] = deque()
        self.waiting = 0
        """Characters of all answers."""
        self._taken = asyncio.Event()
        self.is_over = False
        self.is_writing = False
        self.wrote_at = ASYNC.now()

    @property
    def is_free(self) -> bool:
        """Can something be written at once, with nothing before it and nobody to wait for?"""
        line = self._line
        return (
            line is not None
            and not self.is_over
            and not self.answers
            and not self.is_writing
            and line.is_free
        )

    @property
    def is_full(self) -> bool:
        return len(self.answers) >= FULL_ANSWERS or self.waiting >= FULL_WAITING

    @property
    def is_overfull(self) -> bool:
        return len(self.answers) > MOST_ANSWERS or self.waiting > MOST_WAITING

    def put(self, text: str) -> None:
        """Behind what waits."""
        self.answers.append(text)
        self.waiting += len(text)

    def next(self) -> str:
        text = self.answers.popleft()
        self.waiting -= len(text)
        self._taken.set()
        return text

    async def taken(self) -> None:
        """Until the client has taken some of its answers, if there are many."""
        while self.is_full:
            self._taken.clear()
            await self._taken.wait()

    def write(self, text: str) -> None:
        """At once; only while it is free."""
        assert self._line is not None
        try:
            self._line.write(text)
        except Exception:  # noqa: BLE001 - whatever it is: others are to be told, too
            self._gone()

    async def say(self, text: str) -> None:
        self.is_writing = True
        self.wrote_at = ASYNC.now()
        try:
            await self._send({"type": "websocket.send", "text": text})
        except (OSError, RuntimeError):  # servers say so that the client is gone
            self._gone()
        finally:
            self.is_writing = False

    async def hang_up(self, code: int, reason: str) -> None:
        await self._send({"type": "websocket.close", "code": code, "reason": reason})

    @property
    def unsent(self) -> int:
        """Bytes that the server has buffered for the client; 0 where it does not show them."""
        size_of = getattr(transport_of(self._send), "get_write_buffer_size", None)
        return 0 if size_of is None else size_of()

    def abort_later(self, within_s: float) -> None:
        """Abort the connection in `within_s` seconds unless it has ended by then.

        The server waits until the client has read what is buffered, which may be never.
        """
        transport = transport_of(self._send)
        if transport is not None:
            asyncio.get_running_loop().call_later(within_s, abort_open, transport)

    def abort(self) -> None:
        """Drop the line, where the server lets us."""
        transport = transport_of(self._send)
        if transport is not None:
            transport.abort()
