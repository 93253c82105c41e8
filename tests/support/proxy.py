"""A TCP proxy that fails on command: between a client under test and a real server.

    with Proxy(redis_server.port) as proxy:
        proxy.cut_after_request(b"EVALSHA")     # the server does it, the client never hears
        ...
        proxy.freeze()                          # open connections, no bytes either way
        proxy.refuse()                          # nobody listens any more
        proxy.pass_through()                    # all is well again

Bytes are moved as they arrive, one `recv` at a time: a "reply" below is what the server sent in
one go, which for the short answers these tests deal in is one reply.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from support.process import HOST

CHUNK = 65_536


class Mode(enum.Enum):
    """What happens to bytes."""

    PASS = "pass"
    FREEZE = "freeze"
    DROP_REPLIES = "drop replies"
    REFUSE = "refuse"


class Fate(NamedTuple):
    """What happens to one chunk: so much of it is delivered, and perhaps the connection is cut."""

    delivered: bytes
    is_cut: bool = False


CUT = Fate(b"", is_cut=True)


class Proxy:
    """Listens on a port of its own and speaks for the server on `target_port`."""

    def __init__(self, target_port: int, *, target_host: str = HOST) -> None:
        self.target = (target_host, target_port)
        self.cuts = 0
        """How many connections were cut by a trap."""
        self._mode = Mode.PASS
        self._request_trap: Trap | None = None
        self._reply_trap: Trap | None = None
        self._bytes_left: list[int] = []
        self._links: set[Link] = set()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]
        self.host = HOST

    # --- what a test says ---------------------------------------------------------------------

    def pass_through(self) -> None:
        """Behave: deliver everything, listen again, forget every trap."""
        with self._changed:
            self._request_trap = self._reply_trap = None
            self._bytes_left = []
        if self._mode is Mode.REFUSE:
            self._listener = self._listen(self.port)
        self._switch(Mode.PASS)

    def freeze(self) -> None:
        """Hold every byte, both ways, until told otherwise. Connections stay open."""
        self._switch(Mode.FREEZE)

    def drop_replies(self) -> None:
        """Deliver requests and lose the answers."""
        self._switch(Mode.DROP_REPLIES)

    def refuse(self) -> None:
        """Cut every connection and refuse new ones, as if the server were gone."""
        if self._mode is not Mode.REFUSE:
            _close_listener(self._listener)
        self._switch(Mode.REFUSE)
        self.cut()

    def cut(self) -> None:
        """Cut the connections that are open now."""
        with self._changed:
            links = list(self._links)
        for link in links:
            link.cut()

    def cut_before_request(self, pattern: bytes) -> None:
        """Cut, once, instead of delivering the next request that holds `pattern`."""
        self._request_trap = Trap(pattern, deliver=False)

    def cut_after_request(self, pattern: bytes) -> None:
        """Deliver the next request that holds `pattern`, then, once, cut instead of answering.

        The cut comes when the server answers, so by then it has done what was asked.
        """
        self._request_trap = Trap(pattern, deliver=True)

    def cut_on_reply(self, pattern: bytes) -> None:
        """Cut, once, instead of delivering the next reply that holds `pattern`."""
        self._reply_trap = Trap(pattern)

    def cut_after_replies(self, count: int) -> None:
        """Deliver this many more replies, then, once, cut instead of delivering the next."""
        self._reply_trap = Trap(b"", skip=count)

    def cut_after_bytes(self, *counts: int) -> None:
        """Deliver this many more bytes of replies, then cut: anywhere within a reply.

        With several, cut again after so many more, on whichever connection they are.
        """
        with self._changed:
            self._bytes_left = list(counts)

    def close(self) -> None:
        """End every connection and every thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._mode is not Mode.REFUSE:
            _close_listener(self._listener)
        self.cut()
        for thread in list(self._threads):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} did not end"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- what the threads do ------------------------------------------------------------------

    def _switch(self, mode: Mode) -> None:
        with self._changed:
            self._mode = mode
            self._changed.notify_all()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.create_server((HOST, port), backlog=128)
        self._run(self._accept, listener)
        return listener

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(
            target=work, args=arguments, name=f"proxy {work.__name__}", daemon=True
        )
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed: refusing, or done
            try:
                server = socket.create_connection(self.target, 5)
            except OSError:
                client.close()  # the real server is gone, and so are we
                continue
            server.settimeout(None)
            link = Link(client, server)
            with self._changed:
                self._links.add(link)
            if self._closed or self._mode is Mode.REFUSE:
                link.cut()
            self._run(self._pump, link, client, server, self._judge_request)
            self._run(self._pump, link, server, client, self._judge_reply)

    def _pump(
        self,
        link: Link,
        source: socket.socket,
        sink: socket.socket,
        judge: Callable[[Link, bytes], Fate],
    ) -> None:
        """Move bytes one way until either side ends."""
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK):
                fate = judge(link, chunk)
                sink.sendall(fate.delivered)
                if fate.is_cut:
                    break
        link.cut()
        if link.finished_one_way():
            with self._changed:
                self._links.discard(link)

    def _judge_request(self, link: Link, chunk: bytes) -> Fate:
        with self._changed:
            self._thaw(link)
            if (trap := self._request_trap) is None or not trap.sprung_by(chunk):
                return Fate(chunk)
            self._request_trap = None
            if trap.deliver:
                link.doomed = True
                return Fate(chunk)
            self.cuts += 1
            return CUT

    def _judge_reply(self, link: Link, chunk: bytes) -> Fate:
        with self._changed:
            self._thaw(link)
            trap = self._reply_trap
            if link.doomed or (trap is not None and trap.sprung_by(chunk)):
                if not link.doomed:
                    self._reply_trap = None
                self.cuts += 1
                return CUT
            if self._mode is Mode.DROP_REPLIES:
                return Fate(b"")
            return self._count(chunk)

    def _count(self, chunk: bytes) -> Fate:
        if not self._bytes_left:
            return Fate(chunk)
        left = self._bytes_left[0]
        if left > len(chunk):
            self._bytes_left[0] -= len(chunk)
            return Fate(chunk)
        del self._bytes_left[0]
        self.cuts += 1
        return Fate(chunk[:left], is_cut=True)

    def _thaw(self, link: Link) -> None:
        """Wait, holding `_changed`, while frozen."""
        while self._mode is Mode.FREEZE and not self._closed and not link.is_cut:
            self._changed.wait(0.05)


class Trap:
    """Waits for a chunk that holds a pattern, letting the first `skip` of them go by."""

    def __init__(self, pattern: bytes, *, deliver: bool = False, skip: int = 0) -> None:
        self.pattern = pattern
        self.deliver = deliver
        self.skip = skip

    def sprung_by(self, chunk: bytes) -> bool:
        if self.pattern not in chunk:
            return False
        self.skip -= 1
        return self.skip < 0


class Link:
    """One client's connection and the one made for it to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.sockets = (client, server)
        self.doomed = False
        """The next reply is not delivered; the connection is cut instead."""
        self.is_cut = False
        self._open_ways = 2
        self._lock = threading.Lock()

    def cut(self) -> None:
        """End both connections; whoever is reading them wakes up."""
        self.is_cut = True
        for end in self.sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def finished_one_way(self) -> bool:
        """Called by each of the two pumps as it ends: is it the last?"""
        with self._lock:
            self._open_ways -= 1
            last = self._open_ways == 0
        if last:  # closed only now, so that no pump ever reads a descriptor given to another
            for end in self.sockets:
                end.close()
        return last


def _close_listener(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes a thread that is waiting in accept
    listener.close()
