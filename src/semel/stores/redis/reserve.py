"""The sync way to one server: connections that stay in hand between calls.

redis-py's pool looks at a connection's socket each time it hands it out, and books it out and in
under a lock. That costs a tenth of a call, so a connection that was used is kept for the next
caller, whichever thread that is, and spoken on directly: written to, and read with hiredis. There
are never more of them than callers at once, and each belongs to one caller at a time.

redis-py's housekeeping (logging in again with a fresh token, moving away before maintenance, the
health check, noticing a closed socket) belongs to its pool, so a connection goes back there when it
has been kept for `KEPT_S`. In between, a socket that broke is noticed by the call that breaks on
it. The easy mistake is to leave a reply unread: whoever is interrupted between asking and reading
closes the connection.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

import hiredis
import redis

from semel.stores.redis.faults import BROKEN, is_forgotten
from semel.stores.redis.scripts import Call
from semel.stores.redis.wire import MORE, PUSH, room

# Tokens are renewed minutes before they end, and maintenance is announced seconds ahead.
KEPT_S = 5.0

# Larger than nearly every reply, and small enough to cost nothing when it is mostly unused.
READ_SIZE = 1 << 14


class Held:
    """One connection of redis-py in somebody's hand."""

    __slots__ = ("_reader", "_socket", "connection", "since")

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._begin()

    def _begin(self) -> None:
        self.since = time.monotonic()
        # redis-py keeps its socket to itself; test_redis_reserve.py notices when it is renamed.
        self._socket = self.connection._sock  # noqa: SLF001
        self._reader = hiredis.Reader(notEnoughData=MORE)

    def renew(self) -> None:
        """Open it again: it broke, or leads to a master that was demoted."""
        self.connection.disconnect()
        self.connection.connect()
        self._begin()

    def ask(self, call: Call) -> Any:
        """The reply; an error that Redis answers with is returned, not raised."""
        try:
            reply = self._swap(call.packed)
            if is_forgotten(reply):
                reply = self._swap(call.in_full())
        except TimeoutError as error:
            silence_s = self._socket.gettimeout()
            raise TimeoutError(f"no reply within {silence_s:g} s") from error
        return reply

    def _swap(self, packed: bytes) -> Any:
        self._socket.sendall(packed)
        reader = self._reader
        reply = MORE
        while reply is MORE or isinstance(reply, PUSH):
            if reply is MORE:
                reader.feed(self._read())
            reply = reader.gets()
        if reader.has_data():
            self._skip_pushes()
        return reply

    def _read(self) -> bytes:
        data: bytes = self._socket.recv(READ_SIZE)
        if not data:
            raise redis.ConnectionError("Redis closed the connection")
        return data

    def _skip_pushes(self) -> None:
        while (reply := self._reader.gets()) is not MORE:
            if not isinstance(reply, PUSH):
                raise redis.ConnectionError("Redis sent a reply that nobody asked for")

    @property
    def is_clean(self) -> bool:
        return not self._reader.has_data()


class Reserve:
    """The connections of one pool that are in nobody's hand just now."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._room = room(pool)
        self._idle: list[Held] = []
        self._pid = os.getpid()

    def take(self) -> Held:
        if self._pid != os.getpid():
            # A forked child: these sockets are its parent's.
            self._idle, self._pid = [], os.getpid()
        try:
            held = self._idle.pop()
        except IndexError:
            return self._borrow()
        if time.monotonic() - held.since < KEPT_S:
            return held
        self.give_up(held)
        return self._borrow()

    def _borrow(self) -> Held:
        connection = self._pool.get_connection()
        try:
            connection.check_health()
            return Held(connection)
        except BaseException:
            self._pool.release(connection)
            raise

    def put_back(self, held: Held) -> None:
        """For the next caller. An append is atomic, as is a pop: no lock, for a fork to hold."""
        if len(self._idle) < self._room:
            self._idle.append(held)
        else:
            self.give_up(held)

    def give_up(self, held: Held, *, broken: bool = False) -> None:
        """Back to the pool; nobody else may read what is left on a connection that is not clean."""
        if broken or not held.is_clean:
            held.connection.disconnect()
        with contextlib.suppress(*BROKEN):  # logging in again fails: the pool opens it anew
            self._pool.release(held.connection)

    def close(self) -> None:
        while self._idle:
            self.give_up(self._idle.pop())
