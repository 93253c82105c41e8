"""The sessions in which handlers work: one per transaction, committed by the inbox and nobody else.

Marks and effects go through the session's own connection. A handler that commits would bring in
its effect without its mark, so it is refused; one that rolls back, or whose transaction the server
has given up, takes the others' effects along, which is noticed.

A worker that freezes holds its row locks for as long as its transaction is open. So the server is
told to end a transaction in which nothing happens for `idle_s`: PostgreSQL for this transaction
only, MariaDB for the connection, until it goes back to its pool. SQLite has no server to tell: its
only writer waits for a frozen one until that wakes up or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import sqlalchemy as sa
from sqlalchemy import event, exc, orm
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from semel.colour import ASYNC, SYNC, Colour, from_away, in_own_task
from semel.errors import SettingsError
from semel.messages import Message
from semel.ports import Handle
from semel.stores.inbox_rules import causes_of
from semel.stores.sql import encodings, lines
from semel.stores.sql.bound import bound_link
from semel.stores.sql.committing import Watch
from semel.stores.sql.endings import is_lost, refuse_driver_autocommit, refuse_lost
from semel.stores.sql.faults import Fault, fault_of
from semel.stores.sql.links import Link
from semel.stores.sql.pooler import PSYCOPG, prepare_connections
from semel.stores.sqlite_file import DatabaseFile

GONE = Fault.GONE

IDLE_S = 60.0

# A batch in hand for each of so many shards; whoever comes on top of that waits for one of them.
KEPT_CONNECTIONS = 8
MOST_CONNECTIONS = 64

Factory: TypeAlias = Callable[..., Any]
AnySession: TypeAlias = orm.Session | AsyncSession


async def done(answer: Any) -> Any:
    """The answer of either colour."""
    return await answer if inspect.isawaitable(answer) else answer


# --- engines of our own -------------------------------------------------------------------------


def open_engine(url: URL) -> sa.Engine:
    engine = sa.create_engine(lines.with_driver(url, "sync"), **_settings(url))
    lines.create_on_connect(engine)
    if url.drivername == "postgresql":
        prepare_connections(engine, url, {})
    return engine


def open_async_engine(url: URL) -> AsyncEngine:
    engine = create_async_engine(lines.with_driver(url, "async"), **_settings(url))
    lines.create_on_connect(engine.sync_engine)
    if url.drivername == "postgresql":
        prepare_connections(engine.sync_engine, url, {})
    return engine


def _settings(url: URL) -> dict[str, Any]:
    if url.drivername == "sqlite":
        return {"connect_args": {"timeout": lines.CONNECT_WITHIN_S}}
    within: dict[str, Any] = dict(lines.TALKING[url.drivername])
    if "connect_timeout" not in url.query:
        within["connect_timeout"] = lines.CONNECT_WITHIN_S
    extra = MOST_CONNECTIONS - KEPT_CONNECTIONS
    given = {"connect_args": within, "pool_size": KEPT_CONNECTIONS, "max_overflow": extra}
    if url.drivername == "postgresql":
        given["connect_args"] = {**within, **PSYCOPG}
    else:
        # No gap locks, which are what makes inserts of different keys deadlock.
        given["isolation_level"] = "READ COMMITTED"
    return given


def prepare(engine: sa.Engine, idle_s: float | None = IDLE_S) -> None:
    """Have connections of an engine of our own made ready."""
    mysql = [] if idle_s is None else [_limit(max(1, round(idle_s)))]
    name = engine.dialect.name
    statements = {"mysql": mysql, "mariadb": mysql, "sqlite": lines.SQLITE_SESSION}.get(name, ())

    def connected(dbapi: Any, record: Any) -> None:
        cursor = dbapi.cursor()
        for statement in statements:
            cursor.execute(statement)
        cursor.close()
        record.info[LIMITED] = True

    event.listen(engine, "connect", connected)


# --- a transaction ------------------------------------------------------------------------------


class _InboxWatch(Watch):
    name = "semel.inbox"
    refusal = (
        "this session is committed by the inbox, together with the memory that the message had its "
        "effect, so a handler must not commit it. Return instead. A savepoint "
        "(session.begin_nested()) is fine"
    )

    active = False

    @property
    def on(self) -> bool:
        return self.active


class FailedError(Exception):
    """What a handler did has failed, then or when it was committed; its error is the cause."""

    @property
    def error(self) -> BaseException:
        assert self.__cause__ is not None
        return self.__cause__


async def failing(verb: Callable[[], Any]) -> None:
    """Do it, in either colour; what it fails with is a handler's."""
    try:
        await done(verb())
    except Exception as error:
        raise FailedError from error


class EndedError(Exception):
    """A handler has ended the transaction that it shares with others."""


class CutOffError(Exception):
    """The connection broke while handlers used it, and nobody said so."""


class IdleError(Exception):
    """A handler did nothing with its session for so long that the server has ended it."""


class WaitsForItselfError(Exception):
    """A handler waits, elsewhere, for the lock that its own transaction holds."""


class Work:
    """One transaction: handlers' effects and the inbox' own rows."""

    def __init__(
        self,
        session: AnySession,
        colour: Colour,
        home: asyncio.AbstractEventLoop | None,
        engine: sa.Engine,
        file: DatabaseFile | None,
    ) -> None:
        self.session = session
        self._engine = engine
        self._file = file
        self._info: dict[Any, Any] = {}
        self._colour = colour
        self._home = home
        sync = session.sync_session if isinstance(session, AsyncSession) else session
        self._watch = _InboxWatch.of(sync)
        self._watch.active, self._watch.ended = True, False
        self._connection: Any = None
        self._is_only_writer = False
        self.own_task = False
        """Are handlers to be kept from cancelling us?"""
        self.longest_s = 0.0
        """How long the slowest handler took."""
        self.at = colour.now()
        """When the last one ended."""
        self.link: Link

    @property
    def _sync_connection(self) -> sa.Connection:
        connection: sa.Connection = getattr(self._connection, "sync_connection", self._connection)
        return connection

    @property
    def _is_cut_off(self) -> bool:
        connection = self._sync_connection
        transaction = None if connection.closed else connection.get_transaction()
        return connection.invalidated or transaction is None or not transaction.is_active

    async def begin(self, idle_s: float | None) -> None:
        try:
            with encodings.explaining_bytes(self.session.get_bind()):
                self._connection = await done(self.session.connection())
        except exc.UnboundExecutionError as error:
            raise SettingsError(
                "the inbox' session has no engine for everything; give SQLInbox(session=) a "
                "factory whose sessions have a bind"
            ) from error
        self.link = bound_link(self._connection)
        self._info = self._sync_connection.info
        match self.link.dialect.name:
            case "sqlite":
                # A transaction that reads first and then writes can fail in the middle.
                driver: Any = self._sync_connection.connection.driver_connection
                if not driver.in_transaction:
                    await self.link.change(self.link.dialect.begin)
                    self._is_only_writer = True
                self._learn_file()
            case "mysql" if idle_s is not None:
                await self._limit(idle_s)
        refuse_driver_autocommit(
            self._sync_connection, "an effect would stand without the memory of it"
        )

    async def _limit(self, idle_s: float) -> None:
        connection = self._sync_connection
        if not connection.info.get(LIMITED):
            _reset_on_return(connection.engine)
            await self.link.change(_limit(max(1, round(idle_s))))
            connection.info[LIMITED] = True

    async def call(self, handle: Handle, message: Message) -> None:
        """Let the message have its effect, in this transaction; or raise `FailedError`.

        All in one: each coroutine that is waited through costs every handler that waits.
        """
        try:
            if colour_of(handle, message, self._colour.name) != self._colour.name:
                await self._call_without_session(handle, message)
            elif (result := handle(message, self.session)) is not None:
                if self._colour is SYNC:
                    _refuse_to_await(result)
                elif inspect.isawaitable(result):
                    await (in_own_task(result) if self.own_task else result)
        except Exception as error:  # noqa: BLE001 - a handler's: it is the cause of ours
            raise FailedError from self._own_lock(error)
        except asyncio.CancelledError as error:
            if _is_asked_to_stop():
                raise
            raise FailedError from _cancelled_within(error)
        finally:
            now = self._colour.now()
            self.longest_s, self.at = max(self.longest_s, now - self.at), now
        if self._watch.ended:
            ended = EndedError("the handler has committed, rolled back or closed its session")
            raise FailedError from ended

    def _own_lock(self, error: Exception) -> Exception:
        if not (self._is_only_writer and _is_busy(error)):
            return error
        return WaitsForItselfError(
            "the handler waited for SQLite's only writer, which is the transaction that it runs "
            f"in: {error}. Give its guard, or its other session, a file of its own"
        )

    async def _call_without_session(self, handle: Handle, message: Message) -> None:
        if self._colour is SYNC:
            assert self._home is not None, "a sync flow is driven from a loop's thread"
            from_away(self._home, _on_the_loop(handle, message, _NO_SESSION["async"]))
        else:
            # A thread cannot be cancelled: nobody else may begin before it has ended.
            call = asyncio.to_thread(_in_thread, handle, message, _NO_SESSION["sync"])
            await ASYNC.shield(call)

    async def apart(self, handle: Handle, message: Message) -> BaseException | None:
        """The same in a savepoint. What it failed with, if the transaction is as it was before."""
        nested = await done(self.session.begin_nested())
        try:
            await self.call(handle, message)
            await failing(nested.commit)
        except FailedError as failed:
            if self._watch.ended or self._is_cut_off or is_lost(self._sync_connection):
                raise
            await failing(nested.rollback)
            return failed.error
        if is_lost(self._sync_connection):
            ended = EndedError("the server has rolled back the transaction, and nobody said so")
            raise FailedError from ended
        return None

    async def finish(self) -> None:
        """All handlers have run: send what is left to send, and see that all of it stands."""
        await failing(self._finish)

    async def _finish(self) -> None:
        await done(self.session.flush())
        if self._is_cut_off:
            raise CutOffError("the connection broke while handlers ran, and none of them said so")
        if isinstance(self.session, AsyncSession):
            await self._connection.run_sync(refuse_lost)
        else:
            refuse_lost(self._sync_connection)

    async def commit(self) -> None:
        """Commit; raise `DamagedStoreError` if that went to a SQLite file that was replaced."""
        with self._watch.open():
            await failing(self.session.commit)
        if self._file is not None:
            self._file.check(self._info.get(lines.LOG))  # gone with a connection that is closed

    def _learn_file(self) -> None:
        if self._sync_connection.engine is not self._engine:
            self._file = None  # the application's factory has an engine of its own
        elif self._file is not None:
            lines.check_file(self._file, self._info)

    async def close(self) -> None:
        """Let go; what was not committed is rolled back."""
        self._watch.active = False
        try:
            await done(self.session.close())
        except Exception:  # noqa: BLE001 - whatever it is, this connection is not to be used again
            await self.hang_up()

    async def hang_up(self) -> None:
        """The same for a connection that may be in the middle of an answer."""
        self._watch.active = False
        with contextlib.suppress(Exception):
            await done(self.session.invalidate())


class Sessions:
    """Opens transactions of one colour."""

    def __init__(
        self,
        engine: sa.Engine | AsyncEngine,
        factory: Factory | None,
        colour: Colour,
        idle_s: float | None,
    ) -> None:
        self.engine = engine
        self.idle_s = idle_s
        self._factory = factory
        self._colour = colour
        self._sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        self._file = lines.file_of(self._sync_engine)

    @asynccontextmanager
    async def open(self, home: asyncio.AbstractEventLoop | None = None) -> AsyncIterator[Work]:
        work = Work(self._new(), self._colour, home, self._sync_engine, self._file)
        try:
            yield work
        except BaseException as error:
            # In the middle of an answer, or with a server that was the primary once.
            gone = not isinstance(error, Exception) or fault_of(error.__cause__ or error) is GONE
            await self._colour.shield(work.hang_up() if gone else work.close())
            raise
        await self._colour.shield(work.close())

    def _new(self) -> AnySession:
        expected: Any = orm.Session if self._colour is SYNC else AsyncSession
        if self._factory is None:
            made: Any = expected(self.engine, expire_on_commit=False)
        elif isinstance(self._factory, orm.sessionmaker | async_sessionmaker):
            made = self._factory(bind=self.engine)
        else:
            made = self._factory()
        if not isinstance(made, expected):
            raise SettingsError(
                f"SQLInbox(session=) made a {type(made).__name__}, and this inbox needs a "
                f"{expected.__name__}; give it a {'' if expected is orm.Session else 'async_'}"
                "sessionmaker"
            )
        session: AnySession = made
        return session


# --- an idle transaction on MariaDB -------------------------------------------------------------

LIMITED = "semel.limited"


def _limit(idle_s: int | str) -> str:
    """MySQL has no such setting; to it, what is between the marks is a comment."""
    return f"SET @semel = 1 /*M!, SESSION idle_transaction_timeout = {idle_s} */"


def _reset_on_return(engine: sa.Engine) -> None:
    if not event.contains(engine, "reset", _unlimited):
        event.listen(engine, "reset", _unlimited)


def _unlimited(dbapi: Any, record: Any, state: Any) -> None:
    if record is None or state.terminate_only or not record.info.pop(LIMITED, False):
        return
    cursor = dbapi.cursor()
    cursor.execute(_limit("DEFAULT"))
    cursor.close()


# --- calling ------------------------------------------------------------------------------------


def _is_busy(error: BaseException) -> bool:
    for each in causes_of(error):
        driver = getattr(each, "orig", None) or each
        if hasattr(driver, "sqlite_errorcode") and fault_of(driver) is Fault.AGAIN:
            return True
    return False


def is_outside(handle: Handle, message: Message) -> bool:
    """Is the effect elsewhere, and may be repeated?"""
    told = getattr(handle, "outside", None)
    return told is not None and bool(told(message))


async def call_outside(
    handle: Handle, message: Message, colour: Colour, home: asyncio.AbstractEventLoop
) -> None:
    """Without a session: whatever it is, it runs on the loop."""
    work = _on_the_loop(handle, message, None)
    if colour is SYNC:
        from_away(home, work)
    else:
        await in_own_task(work)


def colour_of(handle: Handle, message: Message, otherwise: str) -> str:
    """How the message's handler is written, where that can be told."""
    told = getattr(handle, "colour", None)
    if told is not None:
        return str(told(message))
    called = getattr(handle, "__call__", None)  # noqa: B004 - an object with an async __call__
    is_async = inspect.iscoroutinefunction(handle) or inspect.iscoroutinefunction(called)
    return "async" if is_async else otherwise


class _NoSession:
    """What a handler of the other colour gets: it may do without, or be told."""

    def __init__(self, handler: str, engine: str) -> None:
        self._told = (
            f"this handler is {handler}, and the inbox has no session for it: give SQLInbox a URL "
            f"to serve both kinds, or {engine}"
        )

    def __getattr__(self, _: str) -> NoReturn:
        raise SettingsError(self._told)


_NO_SESSION = {
    "sync": _NoSession("no async function", "an Engine to serve these"),
    "async": _NoSession("an async function", "an AsyncEngine to serve these"),
}


async def _on_the_loop(handle: Handle, message: Message, session: Any) -> None:
    try:
        result = handle(message, session)
        if inspect.isawaitable(result):
            await result
    except asyncio.CancelledError as error:
        if _is_asked_to_stop():
            raise
        raise _cancelled_within(error) from error


def _is_asked_to_stop() -> bool:
    """Or has a handler merely cancelled something of its own?"""
    task = asyncio.current_task()
    return task is None or bool(task.cancelling())


def _cancelled_within(error: asyncio.CancelledError) -> RuntimeError:
    return RuntimeError(f"the handler was cancelled from within: {error!r}")


def _in_thread(handle: Handle, message: Message, session: Any) -> None:
    try:
        result = handle(message, session)
    except StopIteration as error:  # no future can carry one
        raise RuntimeError(f"the handler raised {error!r}") from error
    if inspect.isawaitable(result):
        _refuse_to_await(result)


def _refuse_to_await(result: Any) -> None:
    """What a sync handler gives back is nobody's business, unless it has not even run."""
    if not inspect.isawaitable(result):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise SettingsError(
        "a handler gave back something to await where nobody can; write it with async def, and "
        "give SQLInbox an AsyncEngine, or a URL"
    )
