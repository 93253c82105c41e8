"""Connections to one file, over threads, forks and signals.

SQLite finds a connection's file locks by the process, so a connection that is open across a fork
breaks the locks of connections the child opens later, and commits are lost: every connection is
put away before a fork.

Several stores, brokers and other components of one process may use the same file. Each has its own
connections. They share one lock for writers, which is found by the file's device and inode.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote

from semel.colour import after_fork
from semel.errors import DamagedStoreError, StoreUnavailableError
from semel.stores import sqlite_file
from semel.stores.sqlite_file import DatabaseFile, Identity, OpenLog, gate, unavailable

T = TypeVar("T")
Values: TypeAlias = tuple[Any, ...]

MEMORY: Final = ":memory:"

# A transaction of ours takes milliseconds. A file that is locked for longer than this is held by
# something else, a backup or a shell with an open transaction.
BUSY_S: Final = 5.0

# Set on every connection. FULL: a commit is on disk when it is answered; fullfsync is what macOS
# calls that. cell_size_check finds damaged pages early.
PRAGMAS: Final = (
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    "PRAGMA cell_size_check = ON",
)

# A message about a damaged schema quotes it, and need not be UTF-8 then.
ERRORS: Final = (sqlite3.Error, UnicodeError)
DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

# How long a fork waits for the calls of other threads to come back.
FORK_WAIT_S: Final = 2 * BUSY_S


def connections_to(path: str) -> Connections:
    """Return connections to the file; create it, accessible to its owner only, if it is absent."""
    if path == MEMORY:
        return OneConnection()
    sqlite_file.create(os.path.realpath(path))
    return Connections(path)


class _Cursor(sqlite3.Cursor):
    """The cursor by which a connection is kept. `era`: how often the store was closed before.

    `log` is the write-ahead log that the connection has open, once that is known.
    """

    era = 0
    log: OpenLog | None = None


class Connections:
    """Connections to one file: as many as are in use at once, one of them writing.

    Writers of this process queue on a lock, which is fair; SQLite's own waiting sleeps and races.
    A connection is kept by one cursor of its own. Taking one and giving it back is one atomic
    list operation each. One that is lost in between, to a signal handler that raises, is closed
    by Python: nothing but its user holds on to it.
    """

    def __init__(self, path: str) -> None:
        self._file = DatabaseFile(path)
        self.path = self._file.real_path
        self._pool = _Pool(self.path)
        self._idle = self._pool.idle
        self._era = 0
        weakref.finalize(self, self._pool.retire).atexit = False

    # --- use

    def select(self, sql: str, values: Values) -> Values | None:
        """The one row there is. The hot path of every replay, hence written out."""
        try:
            cursor = self._idle.pop()
        except IndexError:
            cursor = self._new()
        try:
            found: Values | None = cursor.execute(sql, values).fetchone()
            return found
        except ERRORS as error:
            raise self._reported(error) from error
        finally:
            self._give(cursor)

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return self._use(work)

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work`, then check that the file at the path still is the one it ran on.

        The check comes last: a claim in a file that was deleted meanwhile must not be answered.
        """
        cursor = self._take()
        try:
            result = work(cursor.connection)
            if cursor.log is None:
                self._learn_log(cursor)
            self._file.check(cursor.log)
            return result
        except ERRORS as error:
            raise self._reported(error) from error
        finally:
            self._give(cursor)

    def data_version(self) -> tuple[object, int]:
        """A connection, and a number that changes for it when another one commits."""
        cursor = self._take()
        try:
            version: int = cursor.execute("PRAGMA data_version").fetchone()[0]
        except ERRORS as error:
            raise self._reported(error) from error
        finally:
            self._give(cursor)
        return cursor, version

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one transaction; what it returns is returned when that is on disk."""
        taken: list[bool] = []
        writing = self._pool.writing
        try:
            # Taking the lock and noting it is one step, in C: a signal handler that raises in
            # between would leave it taken for ever.
            taken.extend(map(writing.acquire, (True,), (BUSY_S,)))
            if True not in taken:
                raise unavailable(self.path, "other threads have been writing for too long")
            return self._use(lambda connection: transact(connection, work))
        finally:
            if True in taken:
                writing.release()

    def _reported(self, error: Exception) -> StoreUnavailableError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in DAMAGED or isinstance(error, UnicodeError):
            return DamagedStoreError(
                f"{self.path} is damaged: {error}. Nothing was run. Restore it from a backup, or "
                f"save what is left with `sqlite3 {self.path} .recover`"
            )
        return unavailable(self.path, str(error))

    # --- open and close

    def _take(self) -> _Cursor:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new()

    def _give(self, cursor: _Cursor) -> None:
        if cursor.connection.in_transaction:  # interrupted where nobody could roll back
            with contextlib.suppress(sqlite3.Error):
                cursor.connection.rollback()
        self._idle.append(cursor)
        if cursor.era != self._era:  # closed meanwhile
            self._pool.drain()

    def _new(self) -> _Cursor:
        with self._pool.opening, gate.lock:
            sqlite_file.refuse_unsafe(self.path)
            # mode=rw: a file that was deleted meanwhile is an error, not an empty ledger.
            cursor = self._connect(f"file:{quote(self.path)}?mode=rw").cursor(_Cursor)
            cursor.era = self._era
            self._pool.open.add(cursor)
        try:
            self._learn_log(cursor)
        except BaseException as error:
            with gate.lock:
                cursor.connection.close()
                self._pool.open.discard(cursor)
            if isinstance(error, ERRORS):
                raise self._reported(error) from error
            raise
        return cursor

    def _learn_log(self, cursor: _Cursor) -> None:
        """Identify the write-ahead log that the connection has open, if the file has one.

        This happens before the first use, so that a later deletion of the log is noticed. The read
        opens the log and takes the lock that keeps SQLite from deleting it.
        """
        cursor.execute("PRAGMA schema_version").fetchone()
        if cursor.execute("PRAGMA journal_mode").fetchone() == ("wal",):
            cursor.log = self._file.open_log(in_wal_mode=True)

    def _connect(self, target: str) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                target, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True
            )
        except ERRORS as error:
            raise self._reported(error) from error
        try:
            for pragma in PRAGMAS:
                connection.execute(pragma)
        except ERRORS as error:
            connection.close()
            raise self._reported(error) from error
        return connection

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back."""
        self._era += 1
        self._pool.drain()


class _Pool:
    """The open connections of one `Connections`.

    It outlives a `Connections` that is garbage, until its connections are closed: a fork at that
    moment has to find them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.idle: list[_Cursor] = []
        self.open: weakref.WeakSet[_Cursor] = weakref.WeakSet()
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self.writing = _writer_lock(sqlite_file.identity_of(self.path))
        self.opening = threading.Lock()

    def drain(self) -> None:
        """Close the idle connections. Each stays in `open` until then, so a fork waits for it."""
        with gate.lock, contextlib.suppress(IndexError):
            while True:
                cursor = self.idle.pop()
                if cursor.log is not None:
                    cursor.log.close()
                cursor.connection.close()
                self.open.discard(cursor)

    def retire(self) -> None:
        """Close the idle connections. No other is open, because the `Connections` is garbage."""
        if self._pid == os.getpid():
            self.drain()
        else:
            _inherited.extend(self.idle)
        _pools.discard(self)

    def before_fork(self) -> None:
        """Close every connection; wait up to `FORK_WAIT_S` seconds for those in use.

        `_Fork` holds the writer lock, so no write is under way.
        """
        self.opening.acquire()
        deadline = time.monotonic() + FORK_WAIT_S
        self.drain()
        while self.open and time.monotonic() < deadline:
            time.sleep(0.001)
            self.drain()

    def after_fork_in_parent(self) -> None:
        self.opening.release()

    def after_fork_in_child(self) -> None:
        self._reset()
        # Not put away in time, or forked by something that does not ask Python first.
        if self.open:
            sqlite_file.mark_inherited(self.path)
        _inherited.extend(self.idle)
        self.idle.clear()


class OneConnection(Connections):
    """A `:memory:` database is its connection: all threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        super().__init__(MEMORY)
        self.path = MEMORY
        self._only: sqlite3.Connection | None = self._connect(MEMORY)
        _in_memory.add(self)

    def select(self, sql: str, values: Values) -> Values | None:
        found: Values | None = self.read(lambda c: c.execute(sql, values).fetchone())
        return found

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._turn:
            if self._only is None:
                raise unavailable(self.path, "the store is closed and its records are gone")
            try:
                return work(self._only)
            except ERRORS as error:
                raise self._reported(error) from error

    def close(self) -> None:
        with self._turn:
            only, self._only = self._only, None
        if only is not None:
            only.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending() and getattr(self, "_only", None) is not None:
            self.close()

    def before_fork(self) -> None:
        self._turn.acquire()

    def after_fork_in_parent(self) -> None:
        self._turn.release()

    def after_fork_in_child(self) -> None:
        """The child has a copy of its own; there are no file locks to break."""
        self._turn = threading.Lock()


def transact(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    try:
        connection.execute("BEGIN IMMEDIATE")
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.rollback()
        raise
    return result


# Connections of a parent that forked behind Python's back: not even to be closed.
_inherited: list[_Cursor] = []
_pools: set[_Pool] = set()
_in_memory: weakref.WeakSet[OneConnection] = weakref.WeakSet()

_writer_locks: weakref.WeakValueDictionary[Identity, threading.Lock] = weakref.WeakValueDictionary()
"""One lock per open file, by device and inode: a path can be spelled in many ways."""


def _writer_lock(identity: Identity | None) -> threading.Lock:
    lock = threading.Lock()
    return lock if identity is None else _writer_locks.setdefault(identity, lock)


class _Fork:
    """Closes the connections before a fork, and lets both sides open theirs afterwards."""

    def __init__(self) -> None:
        self._stopped: set[_Pool | OneConnection] = set()
        self._locks: set[threading.Lock] = set()

    def stop(self) -> None:
        for pool in _pools - self._stopped:
            if pool.writing not in self._locks:
                pool.writing.acquire()
                self._locks.add(pool.writing)
            self._stopped.add(pool)
            pool.before_fork()
        for memory in set(_in_memory) - self._stopped:
            self._stopped.add(memory)
            memory.before_fork()

    def is_stopped(self) -> bool:
        return not _pools - self._stopped

    def resume(self) -> None:
        while self._stopped:
            self._stopped.pop().after_fork_in_parent()
        while self._locks:
            self._locks.pop().release()

    def after_in_child(self) -> None:
        self._stopped.clear()
        self._locks.clear()
        _writer_locks.clear()
        for pool in list(_pools):
            pool.after_fork_in_child()
        for memory in list(_in_memory):
            memory.after_fork_in_child()


_fork = _Fork()
gate.kinds.append(_fork)
after_fork(_fork.after_in_child)
