"""Where links come from: engines, opened for each colour and each event loop.

Opened by URL, a store has engines of its own: one for the sync colour, and one per event loop for
the async colour, because a pool's connections cannot leave their loop. Given an engine, it takes
connections from that engine's pool, one piece of work at a time, in autocommit mode, and gives
them back as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import re
import time
import weakref
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from semel.colour import ASYNC, SYNC, Colour, after_fork
from semel.errors import SemelError, SettingsError, StoreUnavailableError
from semel.stores import sqlite_file, with_plain_scheme
from semel.stores.sql import encodings
from semel.stores.sql.dialects import Dialect, dialect_named
from semel.stores.sql.faults import TRIES, BrokenError, Fault, fault_of, pause_s, unavailable
from semel.stores.sql.links import AsyncLink, AsyncPsycopgLink, Link, PsycopgLink, SyncLink
from semel.stores.sql.pooler import (
    OPTION,
    PSYCOPG,
    is_pooled,
    is_pooled_async,
    prepare_connections,
    refuse_option,
    without_option,
)
from semel.stores.sql.url_options import refuse_unknown
from semel.stores.sqlite_file import DatabaseFile, gate

T = TypeVar("T")
Work = Callable[[Link], Awaitable[T]]

MEMORY = ":memory:"

# Where a connection's `info` keeps the `OpenLog` of its SQLite file.
LOG = "semel.log"

# How long to wait for a connection to be made before the store counts as unavailable.
CONNECT_WITHIN_S = 10

# How long a frozen server is waited for. No statement of ours takes a second on a healthy one.
ANSWER_WITHIN_S = 30.0

# A claim in flight on each of so many threads; whoever comes on top of that waits for one of them.
MOST_LINKS = 64
LINK_WITHIN_S = 30.0


# Whoever has locked rows and says nothing for so long has been stopped, or cut off: the others go
# on without it. We think for a few milliseconds.
IDLE_S = 5


# --- URLs ---------------------------------------------------------------------------------------

DRIVERS = {
    "postgresql": (("psycopg",), ("psycopg",), "postgres"),
    "mysql": (("pymysql",), ("asyncmy", "aiomysql"), "mysql"),
    "mariadb": (("pymysql",), ("asyncmy", "aiomysql"), "mysql"),
    "sqlite": (("pysqlite",), ("aiosqlite",), "sql"),
}
"""Per database: the drivers of the sync colour, of the async colour, and the extra with both."""


_EMPTY_OPTION = re.compile(rf"[?&]{OPTION}=?(&|$)")


def parse(text: str) -> URL:
    """The URL without a driver; which one serves a colour is ours to say."""
    text = with_plain_scheme(text)
    try:
        url = make_url(text.replace("postgres://", "postgresql://", 1))
    except (exc.ArgumentError, ValueError):
        # What is before the last @ may be a password, and the error's own text has all of it.
        raise SettingsError(
            f"{text.rpartition('@')[2]!r} is not the end of a database URL; write "
            "postgresql://user:password@host:5432/name, mysql://, mariadb:// or sqlite:///path.db, "
            "with what is no letter or digit in a password as in %40"
        ) from None
    dialect_named(url.get_backend_name())
    if _EMPTY_OPTION.search(text):  # which `make_url` leaves out
        url = url.update_query_dict({OPTION: ""})
    refuse_option(url)
    if url.get_backend_name() == "sqlite" and url.database in {None, "", MEMORY}:
        raise SettingsError(
            "an SQLite database in memory belongs to one connection; write sqlite:///path.db, "
            "or use MemoryStore()"
        )
    if url.get_backend_name() == "sqlite":
        url = url.set(database=_file_path(str(url.database)))
    if url.get_backend_name() == "sqlite" and url.query:
        raise SettingsError(
            f"the URL of a SQLite file has no option {next(iter(url.query))!r}; for settings of "
            "the driver give SQLStore an engine: SQLStore(create_engine(...))"
        )
    url = url.set(drivername=url.get_backend_name())
    refuse_unknown(url, _installed_drivers(url))
    return url


def _file_path(path: str) -> str:
    """Return the absolute path. Each engine of a store is made later, maybe after a `chdir`."""
    if path.startswith("file:"):
        raise SettingsError(f"{path!r} is not a path; write sqlite+pysqlite:///path.db")
    return os.path.abspath(path)  # noqa: PTH100 - SQLAlchemy uses it, too


def _installed_drivers(url: URL) -> list[str]:
    """The drivers of both colours; which colour will ask is not known yet. Raises without any."""
    sync, asynchronous, extra = DRIVERS[url.drivername]
    names = dict.fromkeys((*sync, *asynchronous))
    found = [name for name in names if name == "pysqlite" or find_spec(name)]
    if not found:
        raise SettingsError(f"{sync[0]} is not installed: pip install 'semel[{extra}]'")
    return found


def with_driver(url: URL, colour: str) -> URL:
    sync, asynchronous, extra = DRIVERS[url.drivername]
    names = sync if colour == "sync" else asynchronous
    for name in names:
        if name == "pysqlite" or find_spec(name) is not None:
            refuse_unknown(url, [name])
            return without_option(url).set(drivername=f"{url.drivername}+{name}")
    raise SettingsError(f"{names[0]} is not installed: pip install 'semel[{extra}]'")


def _connect_args(url: URL, driver: str) -> dict[str, Any]:
    if url.drivername == "sqlite":
        return {"timeout": CONNECT_WITHIN_S}
    given: dict[str, Any] = dict(TALKING[url.drivername])
    if "connect_timeout" not in url.query:
        given["connect_timeout"] = CONNECT_WITHIN_S
    if driver in {"pymysql", "asyncmy"}:
        given["read_timeout"] = ANSWER_WITHIN_S
    if driver == "psycopg":
        given |= PSYCOPG
    return given


# Settings that the driver makes while it connects, because SQLAlchemy queries the first connection
# before `SESSIONS` are applied. Without them it could not read texts of a SQL_ASCII database, and
# would see ANSI_QUOTES. A pooler applies `client_encoding` to this client alone.
# STRICT_ALL_TABLES: a value that does not fit is an error and is not cut.
_MYSQL = {"charset": "utf8mb4", "sql_mode": "STRICT_ALL_TABLES"}
TALKING = {"postgresql": {"client_encoding": "UTF8"}, "mysql": _MYSQL, "mariadb": _MYSQL}


# READ COMMITTED has no gap locks, which make inserts of different keys deadlock. A statement waits
# for a locked row for a second at most. MariaDB ends a transaction that is idle for `IDLE_S`; MySQL
# has no such setting, and reads it as a comment.
MYSQL_SESSION = (
    "SET SESSION innodb_lock_wait_timeout = 1",
    f"SET @semel = 1 /*M!, SESSION idle_transaction_timeout = {IDLE_S} */",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
)

# Planning a claim takes four times as long as carrying it out, and the plan never depends on the
# values. One made while the table was small may scan it, and would stay while the table grows.
# Behind a transaction pooler these are not set: no plan is kept there, and they would reach other
# clients.
POSTGRES_SESSION = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "jit": "off",
}

SQLITE_SESSION = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
)

SESSIONS = {
    "mysql": MYSQL_SESSION,
    "mariadb": MYSQL_SESSION,
    "sqlite": SQLITE_SESSION,
}


def open_engine(url: URL) -> sa.Engine:
    full = with_driver(url, "sync")
    engine = sa.create_engine(full, poolclass=NullPool, **_settings(url, full))
    create_on_connect(engine, closed_before_fork=True)
    _on_connect(engine, url)
    return engine


def open_async_engine(url: URL) -> AsyncEngine:
    if find_spec("greenlet") is None:
        raise SettingsError("greenlet is not installed: pip install 'semel[sql]'")
    full = with_driver(url, "async")
    engine = create_async_engine(full, poolclass=NullPool, **_settings(url, full))
    create_on_connect(engine.sync_engine)
    _on_connect(engine.sync_engine, url)
    return engine


def _settings(url: URL, full: URL) -> dict[str, Any]:
    """Everything is autocommit, so there is nothing to roll back when a link is given back."""
    return {
        "isolation_level": "AUTOCOMMIT",
        "pool_reset_on_return": None,
        "connect_args": _connect_args(url, full.get_driver_name()),
    }


def create_on_connect(engine: sa.Engine, *, closed_before_fork: bool = False) -> None:
    """Create the SQLite file, accessible to its owner only, before our engine connects to it.

    Sync connections are opened and closed within the gate, so not during a fork. With
    `closed_before_fork`, a fork also closes them, see `SyncLines.before_fork`.
    """
    path = sqlite_path(engine)
    if path is None:
        return
    dialect = engine.dialect

    @event.listens_for(engine, "do_connect")
    def connect(_: Any, __: Any, args: Any, settings: Any) -> Any:
        sqlite_file.create(os.path.realpath(path))
        if dialect.is_async:  # it connects in a thread of its own
            return None
        with gate.lock:
            connection = dialect.connect(*args, **settings)
            if closed_before_fork:
                opened[connection] = path, id(engine)
            return connection

    if not dialect.is_async:
        close = dialect.do_close

        def do_close(connection: Any) -> None:
            with gate.lock:
                try:
                    close(connection)
                finally:
                    opened.pop(connection, None)

        dialect.do_close = do_close  # type: ignore[method-assign, assignment]


opened: dict[Any, tuple[str, int]] = {}
"""The open connections of engines of `open_engine` to SQLite files: the path, the engine's id.

A fork looks here and not only at the stores: a store that is being collected is no longer found,
and may still have open connections.
"""


def sqlite_path(engine: sa.Engine) -> str | None:
    """The path of the engine's SQLite file; None for other databases and for one in memory."""
    path = engine.url.database or MEMORY
    if engine.dialect.name != "sqlite" or path == MEMORY or path.startswith("file:"):
        return None
    return os.path.abspath(path)  # noqa: PTH100 - SQLAlchemy uses it, too


def _on_connect(engine: sa.Engine, url: URL) -> None:
    if url.drivername == "postgresql":
        prepare_connections(engine, url, POSTGRES_SESSION)
        return
    statements = SESSIONS[url.drivername]

    @event.listens_for(engine, "connect")
    def prepare(dbapi: Any, _: Any) -> None:
        cursor = dbapi.cursor()
        for statement in statements:
            cursor.execute(statement)
        cursor.close()


def place(url: URL) -> str:
    """The database as it may be named in an error: without user and password.

    It can be pasted into `semel db init`, where `sqlite:` alone would mean SQLiteStore.
    """
    scheme = url.get_backend_name()
    scheme = "sqlite+pysqlite" if scheme == "sqlite" else scheme
    return URL.create(
        scheme, host=url.host, port=url.port, database=url.database
    ).render_as_string()


# --- carrying work out --------------------------------------------------------------------------


class Lines(Protocol):
    """Runs a piece of work on a link."""

    dialect: Dialect
    where: str
    errors: tuple[type[Exception], ...]

    async def use(self, work: Work[T]) -> T:
        """Run it once. A connection that broke is not used again, and leaves as `BrokenError`."""
        ...


async def carry(
    lines: Lines,
    work: Work[T],
    colour: Colour,
    told: Callable[[str, BaseException], SemelError] = unavailable,
) -> T:
    """Run the work: again after passing trouble, once more after a broken connection."""
    reconnected = False
    for turn in range(TRIES):
        try:
            return await lines.use(work)
        except lines.errors as error:
            fault = fault_of(error)
            if turn == TRIES - 1 or fault not in PASSING or (reconnected and fault is Fault.GONE):
                raise told(lines.where, error) from error
            reconnected = reconnected or fault is Fault.GONE
            if fault is not Fault.GONE:
                await colour.sleep(pause_s(turn))
    raise AssertionError("the last turn returns or raises")


PASSING = (Fault.AGAIN, Fault.LOCKED, Fault.GONE)


def _undressed(dbapi: Any) -> tuple[type[Exception], ...]:
    """What SQLAlchemy 2.0 lets through as asyncpg raised it when no connection could be made."""
    asyncpg = getattr(dbapi, "asyncpg", None)
    return () if asyncpg is None else (asyncpg.PostgresError, asyncpg.InterfaceError)


def file_of(engine: sa.Engine) -> DatabaseFile | None:
    """Return the engine's SQLite file, whose connections are compared with it from now on."""
    path = sqlite_path(engine)
    if path is None:
        return None
    if not event.contains(engine, "close", _forget_log):
        event.listen(engine, "close", _forget_log)
    return DatabaseFile(path)


def check_file(file: DatabaseFile, info: dict[Any, Any]) -> None:
    """Raise `DamagedStoreError` if the SQLite file was deleted or replaced while open.

    `info` is that of a connection that was just used.
    """
    log = info.get(LOG)
    file.check(log)
    if log is None:  # an engine of the application's may use another journal mode
        info[LOG] = file.open_log()


def _forget_log(_: Any, record: Any) -> None:
    log = record.info.pop(LOG, None)
    if log is not None:
        log.close()


class _Engine:
    """What the links of one engine have in common."""

    def __init__(self, engine: sa.Engine, *, own: bool) -> None:
        self.engine = engine
        self._own = own
        self.where = place(engine.url)
        self.file = file_of(engine)
        self.is_psycopg = engine.dialect.driver in {"psycopg", "psycopg_async"}
        style = "psycopg" if self.is_psycopg else engine.dialect.paramstyle
        self.dialect = dialect_named(engine.dialect.name, style)
        dbapi: Any = engine.dialect.loaded_dbapi
        self.errors: tuple[type[Exception], ...] = (
            exc.SQLAlchemyError,
            dbapi.Error,
            OSError,
            EOFError,
            BrokenError,
            *_undressed(dbapi),
        )

    def psycopg_link(self, driver: Any, *, pooled: bool) -> Link:
        is_async = self.engine.dialect.is_async
        if self._own:
            from semel.stores.sql.prepared import AsyncPreparedLink, PreparedLink

            made = AsyncPreparedLink if is_async else PreparedLink
            return made(driver, self.dialect, pooled=pooled)
        given = AsyncPsycopgLink if is_async else PsycopgLink
        return given(driver, self.dialect, pooled=pooled)

    def broke(self, error: Exception, connection: sa.Connection) -> bool:
        if fault_of(error) is Fault.GONE:
            return True
        if self.is_psycopg:
            driver: Any = connection.connection.driver_connection
            return bool(driver is None or driver.closed)
        dbapi: Any = connection.connection
        return self.engine.dialect.is_disconnect(error, dbapi, None)  # type: ignore[arg-type]

    def check_file(self, connection: sa.Connection) -> None:
        if self.file is not None:
            check_file(self.file, connection.info)


async def in_time(work: Work[T], link: Link, colour: Colour) -> T:
    """Run the work, and hang up on a server that does not answer.

    psycopg waits for ever; the MySQL drivers have a timeout of their own.
    """
    if not isinstance(link, PsycopgLink | AsyncPsycopgLink):
        return await work(link)
    timer = colour.later(ANSWER_WITHIN_S, link.hang_up)
    try:
        return await work(link)
    finally:
        timer.cancel()


Kept = tuple[sa.Connection, Link]


class _Shelf:
    """Links that nobody uses just now, the last one first, and places for links to be made."""

    def __init__(self) -> None:
        self._places: queue.LifoQueue[Kept | None] = queue.LifoQueue()
        for _ in range(MOST_LINKS):
            self._places.put(None)

    def take(self, where: str) -> Kept | None:
        """A link, or None: make one. Either way something is to be put back."""
        try:
            return self._places.get(timeout=LINK_WITHIN_S)
        except queue.Empty:
            raise StoreUnavailableError(
                f"all {MOST_LINKS} connections to {where} have been in use for "
                f"{LINK_WITHIN_S:g} s; call from fewer threads at once"
            ) from None

    def put(self, kept: Kept | None) -> None:
        self._places.put(kept)

    def empty(self) -> None:
        """Close what is on the shelf."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._places.get_nowait())
        for kept in found:
            try:
                if kept is not None:
                    kept[0].close()
            finally:
                self._places.put(None)  # only now: to `close_all`, None means a closed link

    def close_all(self, within_s: float) -> int:
        """Take every place and close every link; return how many places were taken in time.

        A link that is in use is waited for. No link is made until `put` returns the places.
        """
        deadline = time.monotonic() + within_s
        taken = 0
        try:
            while taken < MOST_LINKS:
                kept = self._places.get(timeout=max(0.0, deadline - time.monotonic()))
                taken += 1
                if kept is not None:
                    kept[0].close()
        except queue.Empty:
            pass
        except BaseException:  # interrupted
            for _ in range(taken):
                self._places.put(None)
            raise
        return taken


class SyncLines(_Engine):
    """Links from a sync engine's pool, or, when it is our own, links that are kept.

    SQLAlchemy's way through its pool takes as long as half a statement; a kept link is taken from
    a shelf and put back, the last one first.
    """

    def __init__(self, engine: sa.Engine, *, own: bool) -> None:
        super().__init__(engine, own=own)
        self._shelf = _Shelf()
        self._taken = 0
        if own and self.file is not None:
            _fork.every.add(self)

    async def use(self, work: Work[T]) -> T:
        if not self._own:
            with encodings.explaining_bytes(self.engine):
                given = self.engine.connect()
            with given as connection:
                return await self._watched(work, connection, self._link(connection))
        kept = self._shelf.take(self.where)
        try:
            if kept is None:
                kept = self._open()
            return await self._watched(work, *kept)
        except BaseException:
            if kept is not None and kept[0].invalidated:
                kept[0].close()
                kept = None
            raise
        finally:
            self._shelf.put(kept)

    def _open(self) -> Kept:
        connection = self.engine.connect()
        try:
            self.check_file(connection)
            return connection, self._link(connection)
        except BaseException:  # refused, or interrupted
            connection.close()
            raise

    async def _watched(self, work: Work[T], connection: sa.Connection, link: Link) -> T:
        try:
            done = await in_time(work, link, SYNC)
            self.check_file(connection)
            return done
        except self.errors as error:
            if not self.broke(error, connection):
                raise
            self._drop(connection)
            raise BrokenError from error
        except BaseException as error:
            if not isinstance(error, Exception):
                connection.invalidate()  # interrupted in the middle of an answer
            raise

    def _link(self, connection: sa.Connection) -> Link:
        if not self._own:
            connection.execution_options(isolation_level="AUTOCOMMIT")
        encodings.learn(self.dialect, connection)
        if self.is_psycopg:
            driver = connection.connection.driver_connection
            return self.psycopg_link(driver, pooled=is_pooled(connection))
        return SyncLink(connection, self.dialect)

    def _drop(self, connection: sa.Connection) -> None:
        """When one connection broke, the others in the pool are likely to be broken too."""
        connection.invalidate()
        self.engine.dispose()
        self.close()

    def close(self) -> None:
        self._shelf.empty()

    def before_fork(self) -> None:
        """Close every connection, and open none until `after_fork_in_parent` or `forked`.

        A connection that stays in use for `LINK_WITHIN_S` seconds remains open.
        """
        self._taken = self._shelf.close_all(LINK_WITHIN_S)

    def after_fork_in_parent(self) -> None:
        taken, self._taken = self._taken, 0
        for _ in range(taken):
            self._shelf.put(None)

    def forked(self) -> Any:
        """Start over without the parent's links, which the caller must not let die."""
        shelf, self._shelf = self._shelf, _Shelf()
        return shelf


class _Fork:
    """Closes the connections of our sync engines to SQLite files before a fork."""

    def __init__(self) -> None:
        self.every: weakref.WeakSet[SyncLines] = weakref.WeakSet()
        self._closed: set[SyncLines] = set()

    def stop(self) -> None:
        for each in set(self.every) - self._closed:
            self._closed.add(each)
            each.before_fork()

    def is_stopped(self) -> bool:
        closed = {id(each.engine) for each in self._closed}
        return all(engine in closed for _, engine in list(opened.values()))

    def resume(self) -> None:
        while self._closed:
            self._closed.pop().after_fork_in_parent()

    def after_in_child(self) -> None:
        """Start over. A file with a connection that stayed in use too long is refused here."""
        self._closed.clear()
        for path, _ in opened.values():
            sqlite_file.mark_inherited(path)
        opened.clear()


_fork = _Fork()
gate.kinds.append(_fork)
after_fork(_fork.after_in_child)


class AsyncLines(_Engine):
    """Links from an async engine's pool, or, when it is our own, one link that is kept.

    A kept link saves the way through the pool, which takes longer than a statement. It serves
    one piece of work at a time.
    """

    def __init__(self, engine: AsyncEngine, *, own: bool) -> None:
        super().__init__(engine.sync_engine, own=own)
        self._engine = engine
        self._kept: tuple[AsyncConnection, Link] | None = None
        self._turn = asyncio.Lock()

    async def use(self, work: Work[T]) -> T:
        if not self._own:
            async with contextlib.AsyncExitStack() as stack:
                with encodings.explaining_bytes(self.engine):
                    connection = await stack.enter_async_context(self._engine.connect())
                link = await self._link(connection)
                return await self._watched(work, connection, link)
        async with self._turn:
            if self._kept is None:
                self._kept = await self._open()
            return await self._watched(work, *self._kept)

    async def _open(self) -> tuple[AsyncConnection, Link]:
        connection = self._engine.connect()
        try:
            # The thread of aiosqlite must not outlive the event loop, so a cancelled connect is
            # waited for. Other drivers end a cancelled connect at once, and their server may hang.
            started = connection.start()
            await (started if self.file is None else ASYNC.shield(started))
            return connection, await self._link(connection)
        except BaseException:  # refused, or cancelled
            if connection.sync_connection is not None:
                await ASYNC.shield(connection.close())
            raise

    async def _watched(self, work: Work[T], connection: AsyncConnection, link: Link) -> T:
        try:
            done = await in_time(work, link, ASYNC)
            self.check_file(_sync(connection))
            return done
        except self.errors as error:
            if not self.broke(error, _sync(connection)):
                raise
            await ASYNC.shield(self._drop(connection))
            raise BrokenError from error
        except BaseException as error:
            if not isinstance(error, Exception):
                # Interrupted in the middle of an answer. A second cancellation must not leave the
                # connection to the garbage collector, which cannot close it.
                await ASYNC.shield(self._drop(connection))
            raise

    async def _link(self, connection: AsyncConnection) -> Link:
        if not self._own:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
        encodings.learn(self.dialect, _sync(connection))
        if self.is_psycopg:
            raw = await connection.get_raw_connection()
            pooled = await is_pooled_async(connection)
            return self.psycopg_link(raw.driver_connection, pooled=pooled)
        return AsyncLink(connection, self.dialect)

    async def _drop(self, connection: AsyncConnection) -> None:
        self._kept = None
        await connection.invalidate()
        await connection.close()
        if not self._own:
            await self._engine.dispose()

    async def close(self) -> None:
        """Wait for the work that is under way, then close the connection."""
        async with self._turn:
            if self._kept is not None:
                connection, self._kept = self._kept[0], None
                await ASYNC.shield(connection.close())

    def abandon(self) -> None:
        """Let go of a connection whose event loop was closed over it."""
        if self._kept is None:
            return
        connection, self._kept = self._kept[0], None
        raw: Any = _sync(connection).connection
        if self.is_psycopg:
            raw.driver_connection.pgconn.finish()
        raw.detach()


def _sync(connection: AsyncConnection) -> sa.Connection:
    sync = connection.sync_connection
    assert sync is not None, "a connection that was started has a sync side"
    return sync
