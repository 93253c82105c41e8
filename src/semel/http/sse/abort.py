"""Dropping a connection at once, under uvicorn.

ASGI knows how to end a response, and not how to give one up: a server that is told to close waits
until the client has taken what is buffered, and one that takes a byte a second takes it for hours.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from functools import partial
from typing import Any

from semel.http.asgi import ASGIApp, ASGIScope, Receive, Send
from semel.http.sse.direct import transport_of
from semel.http.sse.visit import ABORT, IS_GONE

__all__ = ["abortable"]


def abortable(app: ASGIApp) -> ASGIApp:
    """Let the gateway inside drop connections. To be the outermost, around the whole app.

    What the server hands us to send with is a method of what it keeps of the request, and that has
    the transport: so it is in uvicorn, with httptools and with h11. Where it is not so, nothing is
    offered, and nothing is lost.
    """

    async def offering(scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            transport = transport_of(send)
            if transport is not None:
                abort = partial(_abort, transport)
                own = {ABORT: abort, IS_GONE: transport.is_closing}
                scope["extensions"] = {**(scope.get("extensions") or {}), **own}
        await app(scope, receive, send)

    return offering


def _abort(transport: Any) -> None:
    """Drop it with what the system has buffered, too.

    A socket that is only closed stays, without a process, until the client has taken the last byte
    of up to some megabytes: a byte a second, for weeks.
    """
    line = transport.get_extra_info("socket")
    if line is not None:
        with contextlib.suppress(OSError):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    transport.abort()


# on, and for no time: https://man7.org/linux/man-pages/man7/socket.7.html
_AT_ONCE = struct.pack("ii", 1, 0)
