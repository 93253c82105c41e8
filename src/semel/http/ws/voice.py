"""The way out of one connection: one message after another, and who has to wait.

Answers wait in a queue while something else is written; under uvicorn they do not, as long as the
client takes what is written (see `direct`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from semel.colour import ASYNC
from semel.http.asgi import Send
from semel.http.sse.direct import transport_of
from semel.http.ws.direct import line_of

__all__ = ["MOST_ANSWERS", "MOST_WAITING", "Voice"]

# Answers that a client has not taken. It has a few requests in flight at most, so it takes none.
MOST_ANSWERS = 256

# Of all of them together: a few snapshots of the largest rooms.
MOST_WAITING = 1024 * 1024


class Voice:
    """`gone` is called when the client turns out to have left."""

    def __init__(self, send: Send, gone: Callable[[], None]) -> None:
        self._send = send
        self._gone = gone
        self._line = line_of(send)
        self.answers: deque[str] = deque()
        self.waiting = 0
        """Characters of all answers."""
        self.is_writing = False
        self.wrote_at = ASYNC.now()

    @property
    def is_free(self) -> bool:
        """Can something be written at once, with nothing before it and nobody to wait for?"""
        line = self._line
        return line is not None and not self.answers and not self.is_writing and line.is_free

    def put(self, text: str) -> None:
        """Behind what waits."""
        self.answers.append(text)
        self.waiting += len(text)

    def next(self) -> str:
        text = self.answers.popleft()
        self.waiting -= len(text)
        return text

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

    def abort(self) -> None:
        """Drop the line, where the server lets us."""
        transport = transport_of(self._send)
        if transport is not None:
            transport.abort()
