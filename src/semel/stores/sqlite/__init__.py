"""The ledger in one SQLite file: the embedded default, with nothing to install or to start.

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
    records       the verbs over all of them
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from semel.colour import Colour
from semel.ports import Clock, StoreLedger
from semel.stores.batch import Batcher
from semel.stores.clock import SystemClock
from semel.stores.rules import Claiming, Operation
from semel.stores.sqlite.connections import connections_to
from semel.stores.sqlite.records import Rows
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
        self._thread = Thread()
        self._connections = connections_to(self._path)
        rows = Rows(self._connections, clock or SystemClock())
        rows.prepare()
        self._sync = _SQLiteLedger(rows, _here)
        self._async = _BatchedLedger(rows, self._thread)

    def ledger(self, colour: Colour) -> StoreLedger:
        """Both colours; changes of the async one wait for the disk on a thread of the store."""
        return self._sync if colour.name == "sync" else self._async

    def close(self) -> None:
        """Close the connections; a later call opens new ones, but `:memory:` is gone."""
        self._connections.close()

    async def aclose(self) -> None:
        """End the thread, and close the connections."""
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
        self._local = threading.local()

    async def perform(self, op: Operation) -> Any:
        return await self._batcher().submit(op)

    def _batcher(self) -> Batcher[Operation]:
        loop = asyncio.get_running_loop()
        known: tuple[Any, Batcher[Operation]] | None = getattr(self._local, "known", None)
        if known is None or known[0]() is not loop:
            known = weakref.ref(loop), Batcher(self._together)
            self._local.known = known
        return known[1]

    async def _together(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers: Sequence[Any] = await self._call(self._rows.perform_all, ops)
        return answers
