"""The ledger in an SQL database: PostgreSQL, MariaDB, MySQL or SQLite, through SQLAlchemy 2.

    store = SQLStore("postgresql://app@db/shop")       # both colours, drivers of our choice
    store = SQLStore(engine)                           # an Engine or AsyncEngine of yours

    with Session(engine) as session:
        bound = store.bind(session)                    # complete() joins the session's transaction

Records are rows of table `idempotency`, made by `semel db init URL`, by your own migrations (see
`schema.ddl`), or on first use with `create=True`. PostgreSQL carries out each verb as one
statement (`postgres`), the others read, decide and write if unchanged (`generic`, `fenced`).

The easy mistake is to complete on a connection of one's own what another connection's
transaction has done: the one can be committed without the other. That is what `bind` is for.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

try:
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncEngine
except ImportError as error:  # pragma: no cover - every test environment has it
    from semel.errors import SettingsError

    # SQLAlchemy itself may be there, without what its async half needs.
    missing = "SQLAlchemy" if error.name in (None, "sqlalchemy") else error.name
    raise SettingsError(
        f"{missing} is not installed: pip install 'semel[sql]', or [postgres] or [mysql], which "
        "bring the driver too"
    ) from error

from semel.colour import ASYNC, SYNC, Colour, after_fork, run
from semel.entries import Position
from semel.errors import SettingsError
from semel.imports import importing
from semel.ports import Bell, Log, StoreLedger
from semel.stores.bells import Tower
from semel.stores.sql import lines
from semel.stores.sql.bell import NotifyBell, PollBell, can_hear
from semel.stores.sql.bound import BoundStore, Session
from semel.stores.sql.committing import CommittingStore
from semel.stores.sql.dialects import dialect_named
from semel.stores.sql.faults import NoTableError
from semel.stores.sql.ledger import AsyncLedger, SyncLedger
from semel.stores.sql.lines import AsyncLines, SyncLines
from semel.stores.sql.log import AsyncLog, SyncLog
from semel.stores.sql.schema import Report, check, ddl, init, upgrade
from semel.stores.sqlite_file import DatabaseFile

__all__ = ["BoundStore", "NoTableError", "Report", "SQLStore", "check", "ddl", "init", "upgrade"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)

L = TypeVar("L", SyncLines, AsyncLines)


class SQLStore:
    """Records in a table. Opened by URL it serves both colours, given an engine that one's.

    `create` makes the tables on first use when they are not there.
    """

    def __init__(
        self, engine_or_url: sa.Engine | AsyncEngine | str, *, create: bool = False
    ) -> None:
        self._create = create
        self._lock = threading.Lock()
        self._sync: SyncLedger | None = None
        self._async: AsyncLedger | None = None
        self._engine: sa.Engine | None = None
        self._async_engine: AsyncEngine | None = None
        self._lines: SyncLines | None = None
        self._file: DatabaseFile | None = None
        self._sync_log: SyncLog | None = None
        self._async_log: AsyncLog | None = None
        self._tower = Tower()
        self._given = not isinstance(engine_or_url, str)
        if isinstance(engine_or_url, str):
            self._url = lines.parse(engine_or_url)
        else:
            self._take(engine_or_url)
        _stores.add(self)

    def _take(self, engine: Any) -> None:
        if isinstance(engine, AsyncEngine):
            self._async_engine = engine
        elif isinstance(engine, sa.Engine):
            self._engine = engine
        else:
            raise SettingsError(
                f"SQLStore takes an Engine, an AsyncEngine or a URL, not {type(engine).__name__}"
            )
        self._url = engine.url
        dialect_named(engine.dialect.name)

    @property
    def engine_or_url(self) -> sa.Engine | AsyncEngine | str:
        """What the store was opened with."""
        given = (self._async_engine or self._engine) if self._given else None
        return given or self._url.render_as_string(hide_password=False)

    @property
    def file_path(self) -> str | None:
        """The path of the SQLite file, without symbolic links; None for other databases."""
        path = self._url.database or ""
        is_file = path not in ("", ":memory:") and not path.startswith("file:")
        if self._url.get_backend_name() != "sqlite" or not is_file:
            return None
        return os.path.realpath(path)

    @property
    def where(self) -> str:
        """The database, without user and password."""
        return lines.place(self._url)

    @property
    def url(self) -> sa.URL:
        """The database, with user and password and without a driver."""
        return self._url.set(drivername=self._url.get_backend_name())

    @property
    def heard_at(self) -> sa.URL | AsyncEngine:
        """Where to listen: a given engine knows more of how to connect than its URL tells."""
        engine = self._async_engine if self._given else None
        return engine if engine is not None and engine.driver == "psycopg" else self.url

    def ledger(self, colour: Colour) -> StoreLedger:
        return self._ledger(colour.name)

    def _ledger(self, colour: str) -> SyncLedger | AsyncLedger:
        with self._lock:
            if colour == "sync":
                self._sync = self._sync or self._open_sync()
                return self._sync
            self._async = self._async or self._open_async()
            return self._async

    def log(self, colour: Colour) -> Log:
        ledger = self._ledger(colour.name)
        with self._lock:
            if isinstance(ledger, AsyncLedger):
                made = self._async_log or AsyncLog(ledger, self._tower, create=self._create)
                self._async_log = made
                return made
            assert self._lines is not None, "opened with the ledger"
            self._sync_log = self._sync_log or SyncLog(
                self._lines, self._tower, create=self._create
            )
            return self._sync_log

    def bell(self) -> Bell:
        if self._url.get_backend_name() == "postgresql" and can_hear():
            return NotifyBell(self.heard_at, self._tower, self._heads)
        return PollBell(self._tower, self._heads)

    async def _heads(self, streams: Sequence[str]) -> Sequence[Position]:
        """In the colour that the store has; a bell rings in async code, whatever that is."""
        if self._given and self._async_engine is None:
            log = self.log(SYNC)
            return await asyncio.to_thread(lambda: run(log.heads(streams)))
        return await self.log(ASYNC).heads(streams)

    def bind(self, session: Session, *, commit: bool = False) -> BoundStore:
        """This store with `complete` inside the caller's transaction.

        Everything else is committed at once on connections of the store's own. On SQLite, claim
        before the session writes anything: there can be only one writer at a time.

        With `commit`, `complete` commits the session too, and nobody else may until then: when it
        is answered, record and rows are there together. An outcome whose status is an error takes
        the session's rows back first.
        """
        return CommittingStore(self, session) if commit else BoundStore(self, session)

    def _open_sync(self) -> SyncLedger:
        if self._given and self._engine is None:
            raise _wrong_colour("an AsyncEngine", "async", "create_engine(...)")
        if self._engine is None:
            self._engine = lines.open_engine(self._url)
        self._lines = self._on_one_file(SyncLines(self._engine, own=not self._given))
        return SyncLedger(self._lines, create=self._create)

    def _open_async(self) -> AsyncLedger:
        if self._given and self._async_engine is None:
            raise _wrong_colour("an Engine", "sync", "create_async_engine(...)")
        return AsyncLedger(self._async_lines, create=self._create)

    def _async_lines(self) -> AsyncLines:
        """For one event loop: SQLAlchemy ties an engine to the loop that first connects it."""
        if self._async_engine is not None:
            return self._on_one_file(AsyncLines(self._async_engine, own=False))
        return self._on_one_file(AsyncLines(lines.open_async_engine(self._url), own=True))

    def _on_one_file(self, made: L) -> L:
        """Give all engines of the store the same `DatabaseFile`.

        So one engine notices the deletion of a file that another engine has open.
        """
        self._file = made.file = self._file or made.file
        return made

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    async def aclose(self) -> None:
        if self._async is not None:
            await self._async.close()
        self.close()

    def __repr__(self) -> str:
        return f"SQLStore({self.where!r})"

    def _forked(self) -> None:
        """In a child: the parent goes on using these connections, so they are only forgotten."""
        self._lock = threading.Lock()
        if self._async is not None:
            _inherited.extend(self._async.forked())
        if self._lines is not None:
            _inherited.append(self._lines.forked())


def _wrong_colour(given: str, colour: str, instead: str) -> SettingsError:
    other = "sync" if colour == "async" else "async"
    return SettingsError(
        f"this SQLStore was given {given} and serves {colour} code only; for {other} code give it "
        f"{instead}, or open it by URL to serve both"
    )


# --- fork ---------------------------------------------------------------------------------------

_stores: weakref.WeakSet[SQLStore] = weakref.WeakSet()

_inherited: list[Any] = []
"""Connections of the parent, never to be closed here: closing would end them over there too."""


def _after_fork() -> None:
    for store in list(_stores):
        store._forked()  # noqa: SLF001 - one module, one class


after_fork(_after_fork)
