"""Bounds on connections, for the HTTP and WebSocket protocols of uvicorn.

uvicorn waits for ever for the rest of a request head, and its `limit_concurrency` refuses requests,
not connections. So clients that send half a head could take every file descriptor of the process.
Here a connection counts as waiting from its beginning, and again from the end of each response,
until the next head is whole. It also counts while its client does not read a response, except a
stream, which has limits of its own. A connection that waits for too long is closed, unless its
client is still reading the last response. Where too many connections are open, or too many of one
address wait, one of them is closed.

`Bounds` uses these names of uvicorn's protocols, in httptools and in h11: `client`, `connections`,
`cycle`, `flow`, `transport`, `on_response_complete`, `handle_websocket_upgrade`. In httptools also
`pipeline`. `FrameBounds` uses `conn`, `frames`, `loop`, `transport` and `handle_events` of the
WebSocket protocol `websockets-sansio`, and `Bounds` its `handshake_initiated`.
"""

from __future__ import annotations

import asyncio
import math
from itertools import islice
from typing import Any

from semel.errors import SettingsError
from semel.failures import Failures
from semel.http.sse.direct import abort_open
from semel.http.sse.visit import IS_STREAM

__all__ = ["HEAD_TIMEOUT_S", "PER_ADDRESS", "Waiting", "bounded", "frames_bounded"]

# How long a connection may wait for a whole request head, in seconds. A browser usually sends its
# head in one packet, so this is ample on a slow network, too.
HEAD_TIMEOUT_S = 10.0

# Maximum number of waiting connections per client address. All connections of a reverse proxy have
# one address, and it keeps some of them idle.
PER_ADDRESS = 200

# Connections that may be open beyond those that are served, so that clients in excess get a 503.
# As many as are served, but at least LEAST_SPARE and at most SPARE.
SPARE, LEAST_SPARE = 64, 16

# The limit per address spares connections that have waited for less than this, in seconds, or for
# less than half the head timeout if that is shorter. When all clients of a reverse proxy reconnect
# at once, thousands are accepted before the first head is read.
YOUNG_S = 5.0

# Maximum number of bytes from one whole head to the next: body, trailers and the next head. h11
# limits a head to 16 KiB, httptools has no limit. These servers need no body of a request.
MAX_REQUEST_BYTES = 64 * 1024

# Maximum number of requests that wait for the response to an earlier request on their connection.
# Browsers and the usual reverse proxies send one request at a time.
MAX_PIPELINED = 16

# Maximum number of addresses that are compared when a connection has to be closed. It bounds the
# cost of an accepted connection when clients have thousands of addresses.
COMPARED = 1000

# Maximum number of WebSocket frames per second of one connection, fifty times the messages that a
# room accepts by default. An empty frame has 6 bytes and costs some 10 us, so 600 kB/s of them
# would occupy a processor.
MAX_FRAMES_PER_S = 1000

# Maximum number of frames of one WebSocket message. The size of a message is limited elsewhere, and
# does not count empty frames.
MAX_FRAGMENTS = 1000

# Number of bytes that a WebSocket connection reads between two checks of these limits. They have at
# most 682 empty frames.
PIECE = 4096

UNREADABLE = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\n\r\n"


class Waiting:
    """The connections of one server, on one event loop, that wait for a request head.

    `connections`: how many are served at once; up to `SPARE` more may be open. `per_address`: how
    many of one address may wait. `head_timeout_s`: how long a connection may wait, in seconds.
    """

    def __init__(self, connections: int, per_address: int, head_timeout_s: float) -> None:
        if not head_timeout_s > 0:
            raise SettingsError(f"--head-timeout {head_timeout_s:g}s is not positive; write 10s")
        self._sockets = connections + min(SPARE, max(connections, LEAST_SPARE))
        self._per_address = per_address
        self.head_timeout_s = head_timeout_s
        self._young_s = min(YOUNG_S, head_timeout_s / 2)
        self._since: dict[Bounds, float] = {}
        """When each began to wait. The one that has waited longest comes first."""
        self._by_address: dict[str, dict[Bounds, None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._failures = Failures()

    def __len__(self) -> int:
        return len(self._since)

    def add(self, protocol: Bounds) -> None:
        """Count the protocol as waiting from now on; where there are too many, close one.

        If too many connections are open, it is one of the address with most waiting connections,
        among the first `COMPARED` addresses. Otherwise it is one of the protocol's own address, if
        this has too many and they are not too young. Of the address, the one that has waited
        longest is closed.
        """
        self.remove(protocol)
        loop = asyncio.get_running_loop()
        self._since[protocol] = now = loop.time()
        address = address_of(protocol)
        here = self._by_address.setdefault(address, {})
        here[protocol] = None
        if self._timer is None:
            self._timer = loop.call_later(self.head_timeout_s, self._close_due)
        if len(protocol.connections) > self._sockets:
            self._failures.warn(
                "semel: more than %d connections are open; one of the address with most waiting "
                "connections was closed",
                self._sockets,
            )
            most = max(islice(self._by_address.values(), COMPARED), key=len)
            self._close(next(iter(most)))
        elif len(here) > self._per_address and now - self._since[next(iter(here))] >= self._young_s:
            self._failures.warn(
                "semel: %d connections from %s have sent no whole request head, or do not read a "
                "response; the oldest was closed",
                len(here),
                address,
            )
            self._close(next(iter(here)))

    def remove(self, protocol: Bounds) -> None:
        """Stop counting the protocol: its head is whole, or its connection has ended."""
        if self._since.pop(protocol, None) is not None:
            address = address_of(protocol)
            here = self._by_address[address]
            del here[protocol]
            if not here:
                del self._by_address[address]

    def _close_due(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() - self.head_timeout_s
        for protocol, since in list(self._since.items()):
            if since > due:
                break
            if protocol.takes_response():
                self.add(protocol)
                continue
            has = "read nothing of a response" if protocol.unsent else "sent no whole request head"
            self._failures.warn(
                f"semel: a connection from %s has {has} for %g s, and was closed",
                address_of(protocol),
                self.head_timeout_s,
            )
            self._close(protocol)
        self._timer = None
        if self._since:
            oldest = next(iter(self._since.values()))
            wait_s = max(0.0, oldest + self.head_timeout_s - loop.time())
            self._timer = loop.call_later(wait_s, self._close_due)

    def close_too_large(self, protocol: Bounds) -> None:
        self._failures.warn(
            "semel: a request from %s has more than %d bytes, or more than %d requests follow it; "
            "the connection was closed",
            address_of(protocol),
            MAX_REQUEST_BYTES,
            MAX_PIPELINED,
        )
        if protocol in self._since:
            protocol.transport.write(TOO_LARGE)
            protocol.transport.close()  # still counted: aborted if the client does not read this
        else:
            self._close(protocol)

    def close_unreadable(self, protocol: Bounds) -> None:
        """Answer an upgrade that the WebSocket protocol could not parse, and close the connection.

        uvicorn would keep it open without a request.
        """
        self._failures.warn(
            "semel: a WebSocket upgrade from %s could not be parsed, for example because of a body "
            "or a line of more than 8 KiB; the connection was closed",
            address_of(protocol),
        )
        protocol.transport.write(UNREADABLE)
        protocol.transport.close()
        loop = asyncio.get_running_loop()
        loop.call_later(self.head_timeout_s, abort_open, protocol.transport)

    def close_flood(self, protocol: FrameBounds) -> None:
        self._failures.warn(
            "semel: a connection from %s has sent more than %d WebSocket frames in a second, or "
            "more than %d of one message, and was closed",
            address_of(protocol),
            MAX_FRAMES_PER_S,
            MAX_FRAGMENTS,
        )
        protocol.transport.abort()

    def _close(self, protocol: Bounds) -> None:
        self.remove(protocol)
        protocol.connections.discard(protocol)  # uvicorn removes it later, when it is lost
        protocol.transport.abort()


def address_of(protocol: Bounds | FrameBounds) -> str:
    return str(protocol.client[0]) if protocol.client else ""


class Bounds(asyncio.Protocol):
    """Mixin for a protocol class of uvicorn: tells `Waiting` when a connection waits."""

    waiting: Waiting
    cycle: Any
    flow: Any
    client: tuple[str, int] | None
    connections: set[Any]
    transport: asyncio.Transport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._received = 0.0
        """Bytes since the last whole head."""
        self.unsent = math.inf
        """Bytes that were unsent at the last call of `takes_response`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.waiting.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.waiting.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            if not self.flow.write_paused:
                self.waiting.remove(self)
            self._received = 0
        else:
            self._received += len(data)
        if self._is_too_much() and not self.transport.is_closing():
            self.waiting.close_too_large(self)

    def _is_too_much(self) -> bool:
        queued = getattr(self, "pipeline", ())  # h11 has none: it reads one request at a time
        return self._received > MAX_REQUEST_BYTES or len(queued) > MAX_PIPELINED

    def on_response_complete(self) -> None:
        super().on_response_complete()  # type: ignore[misc]
        if self.cycle.response_complete and self in self.connections:
            self.unsent = math.inf
            self.waiting.add(self)

    def pause_writing(self) -> None:
        """Count the connection while its response waits for the client to read."""
        super().pause_writing()
        if self.cycle is not None and not self.cycle.scope.get(IS_STREAM):
            self.unsent = math.inf
            self.waiting.add(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.cycle is not None and not self.cycle.response_complete:
            self.waiting.remove(self)

    def handle_websocket_upgrade(self, *args: Any) -> None:
        self._received = -math.inf  # WebSocket frames follow, which `FrameBounds` limits
        super().handle_websocket_upgrade(*args)  # type: ignore[misc]
        self.waiting.remove(self)
        if not getattr(self.transport.get_protocol(), "handshake_initiated", True):
            self.waiting.close_unreadable(self)

    def takes_response(self) -> bool:
        """Return whether bytes of the last response are unsent, and fewer than at the last call."""
        before, self.unsent = self.unsent, self.transport.get_write_buffer_size()
        return 0 < self.unsent < before


class FrameBounds(asyncio.Protocol):
    """Mixin for uvicorn's protocol `websockets-sansio`: limits the frames of a connection.

    It counts every kind of frame. A room counts whole messages only, and never sees a ping.
    """

    waiting: Waiting
    conn: Any
    frames: list[bytes]
    loop: asyncio.AbstractEventLoop
    client: tuple[str, int] | None
    transport: asyncio.Transport

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._count = 0
        """Frames in the current second, which ends at `_ends_at`."""
        self._ends_at = 0.0

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            super().data_received(data[start : start + PIECE])
            if self.transport.is_closing():
                return
            if self._count > MAX_FRAMES_PER_S or len(self.frames) > MAX_FRAGMENTS:
                self.waiting.close_flood(self)
                return

    def handle_events(self) -> None:
        now = self.loop.time()
        if now >= self._ends_at:
            self._count, self._ends_at = 0, now + 1
        self._count += len(self.conn.events)
        super().handle_events()  # type: ignore[misc]


def bounded(kind: type[asyncio.Protocol], waiting: Waiting) -> type[asyncio.Protocol]:
    """Return a subclass of a protocol class of uvicorn whose connections `waiting` counts."""
    return type("Bounded", (Bounds, kind), {"waiting": waiting})


def frames_bounded(kind: type[asyncio.Protocol], waiting: Waiting) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's protocol `websockets-sansio` with limits on its frames."""
    return type("FramesBounded", (FrameBounds, kind), {"waiting": waiting})
