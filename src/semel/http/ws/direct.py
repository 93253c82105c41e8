"""Writing to a connection without waking anybody, under uvicorn.

Most of what a spectator costs is not the write: it is the task that is woken for it, and the frame
that the server makes of the text, for each spectator anew. Where the door was handed uvicorn's own
`send`, a frame is made once for all who are shown the same, and written at once.

Whatever is in between (a middleware, or compression) has a way of its own, and is respected.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from semel.http.asgi import Send

__all__ = ["Line", "line_of"]

# The method `send` of uvicorn's protocol for ws="websockets-sansio". It is compared, and not the
# class, so that a subclass with the same `send` is recognised.
SEND = ("uvicorn.protocols.websockets.websockets_sansio_impl", "WebSocketsSansIOProtocol.send")
USED = ("transport", "writable", "conn", "handshake_complete", "close_sent", "disconnected")

# RFC 6455, 5.2: the whole of a text in one frame, and how its length is written.
TEXT = 0x81
SHORT, MIDDLE = 126, 1 << 16


class Line:
    """The way to one client, past `send`."""

    __slots__ = ("_protocol", "_transport")

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._transport = protocol.transport

    @property
    def is_free(self) -> bool:
        """Is it there, and does it take something without anybody having to wait?"""
        protocol = self._protocol
        return (
            protocol.handshake_complete
            and protocol.writable.is_set()
            and not protocol.close_sent
            and not protocol.disconnected
            and not self._transport.is_closing()
        )

    def write(self, text: str) -> None:
        self._transport.write(_frame(text))


@lru_cache(maxsize=8)
def _frame(text: str) -> bytes:
    content = text.encode()
    size = len(content)
    if size < SHORT:
        return bytes((TEXT, size)) + content
    if size < MIDDLE:
        return bytes((TEXT, 126)) + size.to_bytes(2, "big") + content
    return bytes((TEXT, 127)) + size.to_bytes(8, "big") + content


def line_of(send: Send) -> Line | None:
    """None where `send` is somebody else's, where the client was promised something else than plain
    frames, or where what is needed has another name by now.
    """
    protocol: Any = getattr(send, "__self__", None)
    if (getattr(send, "__module__", ""), getattr(send, "__qualname__", "")) != SEND:
        return None
    if not all(hasattr(protocol, name) for name in USED):
        return None
    return None if getattr(protocol.conn, "extensions", True) else Line(protocol)
