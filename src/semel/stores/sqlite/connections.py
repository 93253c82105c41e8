"""Connections to one file, over threads, forks and signals.

SQLite finds a connection's file locks by the process, so a connection that is open across a fork
breaks the locks of connections the child opens later, and commits are lost: every connection is
put away before a fork.
"""

# ruff: noqa: PTH100, PTH120

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

from semel.errors import DamagedStoreError, SettingsError, StoreUnavailableError

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
    """Connections to the file, which is made if need be, readable by its owner alone."""
    if path == MEMORY:
        return OneConnection()
    path = os.path.abspath(path)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _sync_directory(os.path.dirname(path))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise SettingsError(
            f"SQLite cannot use {path}: {error.strerror}. Give it a file in a directory that exists"
        ) from error
    except OSError as error:
        raise unavailable(path, str(error.strerror)) from error
    return Connections(path)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Cursor(sqlite3.Cursor):
    """The cursor by which a connection is kept. `era`: how often the store was closed before."""

    era = 0


class Connections:
    """Connections to one file: as many as are in use at once, one of them writing.

    Writers of this process queue on a lock, which is fair; SQLite's own waiting sleeps and races.
    A connection is kept by one cursor of its own. Taking one and giving it back is one atomic
    list operation each. One that is lost in between, to a signal handler that raises, is closed
    by Python: nothing but its user holds on to it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._idle: list[_Cursor] = []
        self._open: weakref.WeakSet[_Cursor] = weakref.WeakSet()
        self._era = 0
        self._broken = False
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._opening = threading.Lock()

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
        cursor = self._take()
        try:
            return work(cursor.connection)
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
        try:
            # Taking the lock and noting it is one step, in C: a signal handler that raises in
            # between would leave it taken for ever.
            taken.extend(map(self._writing.acquire, (True,), (BUSY_S,)))
            if True not in taken:
                raise unavailable(self.path, "other threads have been writing for too long")
            return self.read(lambda connection: transact(connection, work))
        finally:
            if True in taken:
                self._writing.release()

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
            self._drain()

    def _new(self) -> _Cursor:
        with self._opening:
            if self._broken:
                raise unavailable(
                    self.path,
                    "this process was forked while the file was in use, which breaks SQLite's "
                    "locks; open the store after the fork",
                )
            # mode=rw: a file that was deleted meanwhile is an error, not an empty ledger.
            cursor = self._connect(f"file:{quote(self.path)}?mode=rw").cursor(_Cursor)
            cursor.era = self._era
            self._open.add(cursor)
        return cursor

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
        self._open = weakref.WeakSet()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                cursor = self._idle.pop()
                self._open.discard(cursor)
                cursor.connection.close()

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # our own module may be empty by now, and the process takes the rest
            return
        if self._pid == os.getpid():
            self._drain()
        else:
            _inherited.extend(self._idle)

    # --- fork

    def before_fork(self) -> None:
        """Have no connection open and no lock taken when the process is copied."""
        self._writing.acquire()
        self._opening.acquire()
        deadline = time.monotonic() + FORK_WAIT_S
        self._drain()
        while self._open and time.monotonic() < deadline:
            time.sleep(0.001)
            self._drain()

    def after_fork_in_parent(self) -> None:
        self._opening.release()
        self._writing.release()

    def after_fork_in_child(self) -> None:
        self._reset()
        # Not put away in time, or forked by something that does not ask Python first.
        self._broken = bool(self._open)
        _inherited.extend(self._idle)
        self._idle.clear()


class OneConnection(Connections):
    """A `:memory:` database is its connection: all threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        super().__init__(MEMORY)
        self._only: sqlite3.Connection | None = self._connect(MEMORY)

    def select(self, sql: str, values: Values) -> Values | None:
        found: Values | None = self.read(lambda c: c.execute(sql, values).fetchone())
        return found

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
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
        self._writing.acquire()
        self._turn.acquire()

    def after_fork_in_parent(self) -> None:
        self._turn.release()
        self._writing.release()

    def after_fork_in_child(self) -> None:
        """The child goes on with a copy of its own; there are no file locks to break."""
        self._writing = threading.Lock()
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
_all: weakref.WeakSet[Connections] = weakref.WeakSet()


class _Fork:
    """Puts the connections away before a fork, and lets both sides open theirs afterwards."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._stopped: list[Connections] = []

    def before(self) -> None:
        self._one_at_a_time.acquire()
        for each in list(_all):
            each.before_fork()
            self._stopped.append(each)

    def after_in_parent(self) -> None:
        while self._stopped:
            self._stopped.pop().after_fork_in_parent()
        self._one_at_a_time.release()

    def after_in_child(self) -> None:
        self._stopped.clear()
        self._one_at_a_time = threading.Lock()
        for each in list(_all):
            each.after_fork_in_child()


_fork = _Fork()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_fork.before,
        after_in_parent=_fork.after_in_parent,
        after_in_child=_fork.after_in_child,
    )


def unavailable(path: str, what: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"SQLite file {path}: {what}. Check free space, permissions of the file and its "
        f"directory, and who else has it open (`fuser {path}`)"
    )
