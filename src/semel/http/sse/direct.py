"""Writing to a connection without waking anybody, under uvicorn.

Most of what a viewer costs is not the write: it is the task that is woken for it, the message it
hands to `send`, and the chunk that the server makes of it, for each viewer anew. Where the gateway
was handed uvicorn's own `send`, nobody is between it and the transport who would have to see what
is sent. Then the chunk is made once for all viewers, and written at once.

Whatever is in between (a middleware that compresses) has a `send` of its own, and is respected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from semel.http.asgi import Send

__all__ = ["Line", "abort_open", "is_gone_of", "line_of", "transport_of"]

# What uvicorn keeps of a request when httptools reads it. h11 counts what it sends by itself.
CYCLE = ("uvicorn.protocols.http.httptools_impl", "RequestResponseCycle")
USED = ("transport", "flow", "disconnected", "chunked_encoding")


class Line:
    """The way to one client, past `send`."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: Any) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def is_free(self) -> bool:
        """Is it there, and does it take something without anybody having to wait?"""
        cycle = self._cycle
        return (
            not self._flow.write_paused
            and not cycle.disconnected
            and cycle.chunked_encoding is True
            and not self._transport.is_closing()
        )

    def write(self, body: bytes) -> None:
        """A part of the body, and not the last."""
        self._transport.write(_chunk(body))


@lru_cache(maxsize=8)
def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def line_of(send: Send) -> Line | None:
    """None where `send` is somebody else's, or where what is needed has another name by now."""
    cycle: Any = getattr(send, "__self__", None)
    kind = type(cycle)
    if (kind.__module__, kind.__qualname__) != CYCLE:
        return None
    if not all(hasattr(cycle, name) for name in USED) or not hasattr(cycle.flow, "write_paused"):
        return None
    return Line(cycle)


def transport_of(send: Send) -> Any:
    """What is behind a server's own `send`, as in uvicorn; None where nobody shows it."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    return transport if hasattr(transport, "is_closing") else None


def is_gone_of(send: Send) -> Callable[[], bool] | None:
    """What tells whether the connection is over, where a server's own `send` shows it."""
    transport = transport_of(send)
    return None if transport is None else transport.is_closing


def abort_open(transport: Any) -> None:
    """Abort the connection unless it has ended: asyncio raises if an ended one is aborted."""
    if transport.get_protocol() is not None:
        transport.abort()
