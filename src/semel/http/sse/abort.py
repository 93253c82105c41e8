"""Dropping a connection at once, under uvicorn.

ASGI knows how to end a response, and not how to give one up: a server that is told to close waits
until the client has taken what is buffered, and one that takes a byte a second takes it for hours.
"""

from __future__ import annotations

from semel.http.asgi import ASGIApp, ASGIScope, Receive, Send
from semel.http.sse.visit import ABORT

__all__ = ["abortable"]


def abortable(app: ASGIApp) -> ASGIApp:
    """Let the gateway inside drop connections. To be the outermost, around the whole app.

    What the server hands us to send with is a method of what it keeps of the request, and that has
    the transport: so it is in uvicorn, with httptools and with h11. Where it is not so, nothing is
    offered, and nothing is lost.
    """

    async def offering(scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            transport = getattr(getattr(send, "__self__", None), "transport", None)
            abort = getattr(transport, "abort", None)
            if abort is not None:
                scope["extensions"] = {**(scope.get("extensions") or {}), ABORT: abort}
        await app(scope, receive, send)

    return offering
