"""The crowd: thousands of subscribers in one process of its own, which does as little as it can.

Raw sockets, read by epoll. A chunk is kept with the moment at which it was read, and nobody looks
into it before the last one is there: what the crowd itself costs is the same for everybody, and
small. A message carries the moment it was sent at, `@` on both sides, so a subscriber need not know
how anybody wraps it. All processes of a machine share the monotonic clock.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import heapq
import itertools
import os
import re
import resource
import select
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bench.http_load import FailedError

HOST = "127.0.0.1"

Dialect = Literal["sse", "socket.io"]

STAMP = re.compile(rb"@(\d+)@")
CURSOR = re.compile(rb"^id: ?(.*)$", re.MULTILINE)
RETRY = re.compile(rb"^retry: ?(\d+)$", re.MULTILINE)
RETRY_AFTER = re.compile(rb"^retry-after: ?(\d+)", re.MULTILINE | re.IGNORECASE)
STATUS = re.compile(rb"HTTP/1\.1 (\d+)")

# Smaller than every server's queue of connections that it has not accepted yet.
AT_ONCE = 100
CHUNK = 1 << 16
HEAD_END = b"\r\n\r\n"
OK, SWITCHING, BUSY = 200, 101, 503
CLOSE_AT_ONCE = struct.pack("ii", 1, 0)

# What a browser waits for when the server has not said: Chromium's three seconds.
RECONNECT_MS = 3000


@dataclass(frozen=True)
class Seat:
    """What a subscriber asks for, and how it speaks."""

    port: int
    path: str
    dialect: Dialect = "sse"

    def request(self, cursor: bytes) -> bytes:
        words = f"GET {self.path} HTTP/1.1\r\nHost: {HOST}:{self.port}\r\n".encode()
        if self.dialect == "socket.io":
            words += b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            return words + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        words += b"Accept: text/event-stream\r\n"
        return words + (b"Last-Event-ID: %b\r\n\r\n" % cursor if cursor else b"\r\n")


# The client's part of Socket.IO's greeting: a masked frame of text with "40", by a mask of zeros.
GREETING = b"\x81\x82\x00\x00\x00\x0040"


@dataclass
class Subscriber:
    """One of them."""

    seat: Seat
    line: socket.socket | None = None
    chunks: list[tuple[int, bytes]] = field(default_factory=list)
    """What it read, and when."""
    cursor: bytes = b""
    is_in: bool = False
    has_greeted: bool = False
    refused: int = 0

    @property
    def heard(self) -> bytes:
        return b"".join(chunk for _, chunk in self.chunks)

    def admitted(self) -> float | None:
        """Look whether the server has let it in; seconds to wait when it is to come later."""
        said = self.heard
        if HEAD_END not in said:
            return None
        status = int(STATUS.match(said)[1])  # type: ignore[index] # every server begins with it
        if status == BUSY and (later := RETRY_AFTER.search(said)):
            return float(later[1])
        if status not in (OK, SWITCHING):
            raise FailedError(f"a subscriber was answered {said[:300]!r}")
        if self.seat.dialect == "sse":
            self.is_in = True
        elif not self.has_greeted and b"0{" in said:
            assert self.line is not None
            self.line.send(GREETING)
            self.has_greeted = True
        else:
            self.is_in = b"40{" in said
        return None

    def leave(self) -> None:
        """At once, so that the system does not keep the port for a minute."""
        if self.line is not None:
            with contextlib.suppress(OSError):
                self.line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CLOSE_AT_ONCE)
            self.line.close()
        self.line, self.is_in, self.has_greeted = None, False, False

    def remember(self) -> float:
        """Take the cursor, and tell after how many seconds it comes back."""
        said = self.heard
        self.cursor = (CURSOR.findall(said) or [self.cursor])[-1]
        wait_ms = int((RETRY.findall(said) or [RECONNECT_MS])[-1])
        self.chunks = []
        return wait_ms / 1000


class Subscribers:
    """All of them, in the crowd's own process."""

    kind = Subscriber

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._all: list[Subscriber] = []
        self._by_fd: dict[int, Subscriber] = {}
        self._waits: list[float] = []

    # --- what can be asked ----------------------------------------------------------------------

    def join(self, seats: Sequence[Seat], within_s: float) -> float:
        """Everybody in; how long that took."""
        began = time.monotonic()
        newcomers = [self.kind(seat) for seat in seats]
        self._all += newcomers
        self._admit([(began, subscriber) for subscriber in newcomers], within_s)
        return time.monotonic() - began

    def listen(self) -> None:
        """Forget what was heard so far."""
        self.read(0.0)
        for subscriber in self._all:
            subscriber.chunks = []

    def tell(self, sent: Sequence[int]) -> tuple[bytes, int]:
        """How many nanoseconds each message took to each subscriber, and how many went wrong:
        did not come, came twice or out of order.
        """
        took, wrong = array("q"), 0
        for subscriber in self._all:
            came = list(_stamps(subscriber.chunks))
            took.extend(at - stamp for stamp, at in came)
            if [stamp for stamp, _ in came] != list(sent):
                wrong += max(1, abs(len(came) - len(sent)))
        return took.tobytes(), wrong

    def cut(self) -> None:
        """Nobody has a connection any more; each knows when to come back."""
        self.read(0.0)
        now = time.monotonic()
        for subscriber in self._all:
            self._drop(subscriber)
        self._waits = [now + subscriber.remember() for subscriber in self._all]

    def come_back(
        self, port: int, last: dict[str, int], within_s: float
    ) -> tuple[list[float], int]:
        """Everybody comes back when it is time. By path, the message that was last: how many
        seconds after being told so each had it, and how often somebody was sent away.
        """
        began = time.monotonic()
        for subscriber in self._all:
            subscriber.seat = replace(subscriber.seat, port=port)
        self._admit(list(zip(self._waits, self._all, strict=True)), within_s)
        marks = {path: b"@%d@" % stamp for path, stamp in last.items()}
        away = set(range(len(self._all)))
        while away:
            away = {n for n in away if marks[self._all[n].seat.path] not in self._all[n].heard}
            if time.monotonic() > began + within_s:
                raise FailedError(f"{len(away)} subscribers were not back within {within_s:g} s")
            if away:
                self.read(0.05)
        took = [
            next(at for stamp, at in _stamps(s.chunks) if stamp == last[s.seat.path]) / 1e9 - began
            for s in self._all
        ]
        return took, sum(s.refused for s in self._all)

    def leave(self) -> None:
        for subscriber in self._all:
            self._drop(subscriber)
        self._all = []

    def lost(self) -> int:
        """How many have no connection although they did not leave."""
        self.read(0.0)
        return sum(subscriber.line is None for subscriber in self._all)

    # --- how ------------------------------------------------------------------------------------

    def attend(self, fd: int) -> None:
        self._epoll.register(fd, select.EPOLLIN)

    def read(self, wait_s: float) -> None:
        """Whatever is there, at most one chunk of each."""
        by_fd, now = self._by_fd, time.monotonic_ns
        for fd, _ in self._epoll.poll(wait_s, 4096):
            if (subscriber := by_fd.get(fd)) is None:
                continue
            try:
                chunk = os.read(fd, CHUNK)
            except OSError:
                chunk = b""
            if chunk:
                subscriber.chunks.append((now(), chunk))
            else:
                self._drop(subscriber)

    def _drop(self, subscriber: Subscriber) -> None:
        if subscriber.line is not None:
            fd = subscriber.line.fileno()
            self._epoll.unregister(fd)
            del self._by_fd[fd]
        subscriber.leave()

    def _admit(self, due: list[tuple[float, Subscriber]], within_s: float) -> None:
        numbers = itertools.count()
        queue = [(at, next(numbers), subscriber) for at, subscriber in due]
        heapq.heapify(queue)
        entering: list[Subscriber] = []
        deadline = time.monotonic() + within_s
        while queue or entering:
            now = time.monotonic()
            if now > deadline:
                raise FailedError(
                    f"{len(queue) + len(entering)} subscribers were not in within {within_s:g} s"
                )
            while queue and queue[0][0] <= now and len(entering) < AT_ONCE:
                entering.append(heapq.heappop(queue)[2])
                self._enter(entering[-1])
            self.read(0.02)
            now, still = time.monotonic(), []
            for subscriber in entering:
                wait_s = 0.1 if subscriber.line is None else subscriber.admitted()
                if wait_s is not None:
                    self._drop(subscriber)
                    subscriber.chunks = []
                    subscriber.refused += 1
                    heapq.heappush(queue, (now + wait_s, next(numbers), subscriber))
                elif not subscriber.is_in:
                    still.append(subscriber)
            entering = still

    def _enter(self, subscriber: Subscriber) -> None:
        line = socket.create_connection((HOST, subscriber.seat.port), timeout=10)
        line.sendall(subscriber.seat.request(subscriber.cursor))
        line.setblocking(False)
        subscriber.line = line
        self._by_fd[line.fileno()] = subscriber
        self._epoll.register(line.fileno(), select.EPOLLIN)


def _stamps(chunks: Sequence[tuple[int, bytes]]) -> list[tuple[int, int]]:
    """Each message's moment of sending, and when the chunk was read in which it ended."""
    ends = list(itertools.accumulate(len(chunk) for _, chunk in chunks))
    said = b"".join(chunk for _, chunk in chunks)
    return [
        (int(found[1]), chunks[bisect.bisect_left(ends, found.end())][0])
        for found in STAMP.finditer(said)
    ]


def serve(pipe: Any, kind: type[Subscribers] = Subscribers) -> None:
    """What the crowd's process does: read, and answer what it is asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.disable()  # everything that is kept is kept until the end, and looking through it takes long
    subscribers = kind()
    subscribers.attend(pipe.fileno())
    pipe.send(("answer", None))
    while True:
        subscribers.read(1.0)
        if not pipe.poll():
            continue
        verb, *words = pipe.recv()
        if verb == "end":
            subscribers.leave()
            return
        try:
            pipe.send(("answer", getattr(subscribers, verb)(*words)))
        except Exception as error:  # noqa: BLE001 - told to whoever asked
            pipe.send(("error", f"{type(error).__name__}: {error}"))
