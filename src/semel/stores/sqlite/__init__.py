"""Ledger and log in one SQLite file: the embedded default, with nothing to install or to start.

A replay is one SELECT: no write lock, no fsync, no waiting for a writer (WAL). Every change is one
transaction that waits for the disk (`synchronous=FULL`). Async callers' changes go to one thread
and share a transaction, and with it the fsync, as they come in.

Two things are easy to get wrong. SQLite finds a connection's file locks by the process, so a
connection that is open across a fork breaks the locks of connections the child opens later, and
commits are lost: every connection is put away before a fork. And SQLite does not notice flipped
bits: every row carries a checksum, and its rowid is made from its id, so that a record which the
index has lost cannot be made a second time.

The table is called `idempotency` like the one of the SQL stores, which write times and results in
another form. Neither opens the other's file: two ledgers side by side would each run the effect.

    schema        the table and its statements
    form          a record as a row, and its checksum
    connections   over threads, forks and signals
    thread        where async callers' changes wait for the disk
    records       the ledger's verbs over all of them
    log_schema    the log's tables and their statements
    streams       the log's verbs over them
    log, bell     in both colours, and who hears of it
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from semel.colour import Colour
from semel.ports import Bell, Clock, Log, StoreLedger
from semel.stores.batch import BatchPerLoop
from semel.stores.bells import LocalBell, Tower
from semel.stores.clock import SystemClock
from semel.stores.rules import Claiming, Operation
from semel.stores.sqlite.bell import SQLiteBell, Watch
from semel.stores.sqlite.connections import MEMORY, connections_to
from semel.stores.sqlite.log import BatchedLog, SQLiteLog
from semel.stores.sqlite.records import Rows
from semel.stores.sqlite.streams import Streams
from semel.stores.sqlite.thread import Thread
from semel.stores.verbs import OnDisk
from semel.values import Answer, Key, Terms

__all__ = ["SQLiteStore"]

Call: TypeAlias = Callable[..., Awaitable[Any]]


class SQLiteStore:
    """Records in the SQLite file `path`, or in this process with `:memory:`. Serves both colours.

    Shared by the processes of one machine; not on a network file system.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self._path = os.fspath(path)
        clock = clock or SystemClock()
        self._thread = Thread()
        self._reading = Thread()
        self._connections = connections_to(self._path)
        rows = Rows(self._connections, clock)
        rows.prepare()
        self._sync = _SQLiteLedger(rows, _here)
        self._async = _BatchedLedger(rows, self._thread)
        self._tower = Tower()
        self._streams = Streams(self._connections, clock)
        self._sync_log = SQLiteLog(self._streams, self._tower, _here, _here)
        self._async_log = BatchedLog(
            self._streams, self._tower, self._reading.run, self._thread.run
        )

    def ledger(self, colour: Colour) -> StoreLedger:
        """Both colours; changes of the async one wait for the disk on a thread of the store."""
        return self._sync if colour.name == "sync" else self._async

    def log(self, colour: Colour) -> Log:
        """Both colours. The first one makes its tables in the file."""
        self._streams.prepare()
        return self._sync_log if colour.name == "sync" else self._async_log

    def bell(self) -> Bell:
        """Hears other processes too: a fraction of a second later, and as long as it is open."""
        self._streams.prepare()
        if self._path == MEMORY:
            return LocalBell(self._tower)
        return SQLiteBell(self._tower, Watch(self._connections, self._streams), self._reading.run)

    def close(self) -> None:
        """Close the connections; a later call opens new ones, but `:memory:` is gone."""
        self._connections.close()

    async def aclose(self) -> None:
        """End the threads, and close the connections."""
        await self._reading.close()
        await self._thread.close()
        self._connections.close()

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path!r})"


async def _here(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


class _SQLiteLedger(OnDisk):
    """Rows of a SQLite file."""

    def __init__(self, rows: Rows, call: Call) -> None:
        super().__init__(rows, call)
        self._rows = rows

    async def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answer:
        found = self._rows.glance(key)
        if found is not None and (answer := self._rows.replay(found, key, fingerprint)):
            return answer
        op = Claiming(key, attempt, fingerprint, terms)
        if found is not None and (answer := self._rows.refuse(op)):
            return answer
        won: Answer = await self.perform(op)
        return won

    async def perform(self, op: Operation) -> Any:
        return self._rows.perform(op)


class _BatchedLedger(_SQLiteLedger):
    """Changes of concurrent callers share one transaction, gathered per event loop."""

    def __init__(self, rows: Rows, thread: Thread) -> None:
        super().__init__(rows, thread.run)
        self._batches = BatchPerLoop(self._together)

    async def perform(self, op: Operation) -> Any:
        return await self._batches.submit(op)

    async def _together(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers: Sequence[Any] = await self._call(self._rows.perform_all, ops)
        return answers
