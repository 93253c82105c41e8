"""A connection as the ledger sees it: two verbs, in either colour.

Work on a link is written once as `async def`. A link of the sync colour never suspends. Links are
in autocommit mode: a statement is committed when it is answered, unless the work says `begin`.
Links bypass SQLAlchemy's statement layer, which would cost as much as the statement itself, and
keep its pools, its dialects and its knowledge of drivers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection

from semel.stores.sql.dialects import Dialect

log = logging.getLogger("semel")

Params: TypeAlias = Sequence[Any]
Rows: TypeAlias = list[Any]
Said: TypeAlias = tuple[str, Params]
"""A statement, and what it is given."""


class Link(Protocol):
    """One connection, in autocommit mode."""

    dialect: Dialect

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        """Run it and return its rows."""
        ...

    async def ask(self, statement: str, params: Params) -> Rows:
        """`fetch` for a statement that is run all the time, with texts, bytes, whole numbers."""
        ...

    async def change(self, statement: str, params: Params = ()) -> int:
        """Run it and return the number of rows that matched."""
        ...

    async def change_each(self, statement: str, many: Sequence[Params]) -> int:
        """Run it once per set of values; the sum of the rows that matched."""
        ...

    async def learn(self, statements: Sequence[str]) -> None:
        """Get ready to be asked these, before a transaction that is to be short."""
        ...

    async def together(self, asked: Sequence[Said], hint: Said | None = None) -> list[Rows]:
        """Run them one after another, up to the first that fails; the rows of each, if it has any.

        In one round trip where the driver can: only such statements as are run all the time, and
        given what `ask` takes, or an `Array`. What is said as a `hint` comes last, in a
        transaction of its own, and nobody is told if it fails.
        """
        ...


class Array(list[Any]):
    """A column of values for PostgreSQL. `oid` is the type of each."""

    def __init__(self, values: Iterable[Any], oid: int) -> None:
        super().__init__(values)
        self.oid = oid


async def roll_back(link: Link) -> None:
    """Roll back after an error, and raise no second one: the first says more.

    There may be no transaction, or no connection.
    """
    with contextlib.suppress(Exception):
        await link.fetch("ROLLBACK")


# --- any driver ---------------------------------------------------------------------------------


def _fetch(dbapi: Any, statement: str, params: Params) -> Rows:
    cursor = dbapi.cursor()
    try:
        cursor.execute(statement, tuple(params))
        return [] if cursor.description is None else list(cursor.fetchall())
    finally:
        cursor.close()


def _change(dbapi: Any, statement: str, params: Params) -> int:
    cursor = dbapi.cursor()
    try:
        cursor.execute(statement, tuple(params))
        return int(cursor.rowcount)
    finally:
        cursor.close()


def _change_each(dbapi: Any, statement: str, many: Sequence[Params]) -> int:
    cursor = dbapi.cursor()
    try:
        cursor.executemany(statement, [tuple(params) for params in many])
        return int(cursor.rowcount)
    finally:
        cursor.close()


class _Asks:
    """Where there is nothing better, what is asked all the time is asked like anything else."""

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        raise NotImplementedError

    async def ask(self, statement: str, params: Params) -> Rows:
        return await self.fetch(statement, params)

    async def learn(self, statements: Sequence[str]) -> None:
        pass

    async def together(self, asked: Sequence[Said], hint: Said | None = None) -> list[Rows]:
        answers = [await self.ask(statement, params) for statement, params in asked]
        if hint is not None:
            await self.hinted(hint)
        return answers

    async def hinted(self, hint: Said) -> None:
        try:
            await self.ask(*hint)
        except Exception as error:  # noqa: BLE001 - what counts was said before
            log.info("semel: %s was not said: %s", hint[0], error)


class SyncLink(_Asks):
    """A driver's connection, on this thread."""

    def __init__(self, connection: sa.Connection, dialect: Dialect) -> None:
        self._dbapi = connection.connection
        self.dialect = dialect

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        return _fetch(self._dbapi, self.dialect.say(statement), params)

    async def change(self, statement: str, params: Params = ()) -> int:
        return _change(self._dbapi, self.dialect.say(statement), params)

    async def change_each(self, statement: str, many: Sequence[Params]) -> int:
        return _change_each(self._dbapi, self.dialect.say(statement), many)


class AsyncLink(_Asks):
    """An async driver's connection, through SQLAlchemy's adapter for it."""

    def __init__(self, connection: AsyncConnection, dialect: Dialect) -> None:
        self._connection = connection
        self.dialect = dialect

    async def _run(self, work: Any, statement: str, given: Any) -> Any:
        said = self.dialect.say(statement)
        return await self._connection.run_sync(lambda c: work(c.connection, said, given))

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        rows: Rows = await self._run(_fetch, statement, params)
        return rows

    async def change(self, statement: str, params: Params = ()) -> int:
        count: int = await self._run(_change, statement, params)
        return count

    async def change_each(self, statement: str, many: Sequence[Params]) -> int:
        count: int = await self._run(_change_each, statement, many)
        return count


class _OneByOne(_Asks):
    """And many changes are one after another."""

    async def change(self, statement: str, params: Params = ()) -> int:
        raise NotImplementedError

    async def change_each(self, statement: str, many: Sequence[Params]) -> int:
        return sum([await self.change(statement, params) for params in many])


# --- psycopg, without anything in between -------------------------------------------------------


@cache
def _pipelines() -> bool:
    """Does several statements in one round trip: libpq from 14 on."""
    from psycopg import Pipeline

    return Pipeline.is_supported()


class _Psycopg(_OneByOne):
    def __init__(self, driver: Any, dialect: Dialect, *, pooled: bool = False) -> None:
        self._driver = driver
        # Behind a transaction pooler, psycopg's statement names can mean other clients' statements.
        self._options: dict[str, Any] = {"prepare": False} if pooled else {}
        self.dialect = dialect
        self.pipelines = _pipelines()

    async def hang_up(self) -> None:
        """End the connection under whoever waits for its answer."""
        if not self._driver.closed:
            with socket.socket(fileno=os.dup(self._driver.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)


class PsycopgLink(_Psycopg):
    """psycopg's own sync connection; values and rows travel in binary."""

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        said, options = self.dialect.say(statement), self._options
        cursor = self._driver.execute(said, params, binary=True, **options)
        return [] if cursor.description is None else list(cursor.fetchall())

    async def change(self, statement: str, params: Params = ()) -> int:
        said = self.dialect.say(statement)
        return int(self._driver.execute(said, params, **self._options).rowcount)

    async def together(self, asked: Sequence[Said], hint: Said | None = None) -> list[Rows]:
        if not self.pipelines:
            return await super().together(asked, hint)
        execute, say, options = self._driver.execute, self.dialect.say, self._options
        with self._driver.pipeline():
            cursors = [execute(say(said), params, binary=True, **options) for said, params in asked]
        if hint is not None:
            await self.hinted(hint)
        return [[] if c.description is None else list(c.fetchall()) for c in cursors]


class AsyncPsycopgLink(_Psycopg):
    """psycopg's own async connection."""

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        said, options = self.dialect.say(statement), self._options
        cursor = await self._driver.execute(said, params, binary=True, **options)
        return [] if cursor.description is None else list(await cursor.fetchall())

    async def change(self, statement: str, params: Params = ()) -> int:
        said = self.dialect.say(statement)
        cursor = await self._driver.execute(said, params, **self._options)
        return int(cursor.rowcount)

    async def together(self, asked: Sequence[Said], hint: Said | None = None) -> list[Rows]:
        if not self.pipelines:
            return await super().together(asked, hint)
        execute, say, options = self._driver.execute, self.dialect.say, self._options
        async with self._driver.pipeline():
            cursors = [
                await execute(say(said), params, binary=True, **options) for said, params in asked
            ]
        if hint is not None:
            await self.hinted(hint)
        return [[] if c.description is None else list(await c.fetchall()) for c in cursors]


# --- in somebody's transaction ------------------------------------------------------------------


class BoundLink(_OneByOne):
    """The caller's own connection, inside the caller's own transaction."""

    def __init__(self, connection: sa.Connection, dialect: Dialect) -> None:
        self._connection = connection
        self.dialect = dialect

    def _run(self, statement: str, params: Params) -> sa.CursorResult[Any]:
        return self._connection.exec_driver_sql(self.dialect.say(statement), tuple(params))

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        return [tuple(row) for row in self._run(statement, params).all()]

    async def change(self, statement: str, params: Params = ()) -> int:
        if _is_direct(self._connection):
            return self._change(self.dialect.say(statement), params)
        return self._run(statement, params).rowcount

    def _change(self, said: str, params: Params) -> int:
        driver: Any = self._connection.connection.driver_connection
        dbapi: Any = self._connection.dialect.loaded_dbapi
        try:
            return int(driver.execute(said, params).rowcount)
        except dbapi.Error as error:
            # As SQLAlchemy has it: whoever repeats a transaction knows by the class when to.
            raise exc.DBAPIError.instance(said, tuple(params), error, dbapi.Error) from error


def _is_direct(connection: sa.Connection) -> bool:
    """May a statement go to psycopg without SQLAlchemy? Where nobody wants to hear of statements.

    To make a context and a result for it takes longer than to send it.
    """
    dialect: Any = connection.dialect
    heard: Any = connection.dispatch
    return (
        dialect.driver == "psycopg"
        and not dialect.is_async
        and connection.in_transaction()  # without it, SQLAlchemy would begin one, and has to know
        and not (heard.before_cursor_execute or heard.after_cursor_execute)
        and not dialect.dispatch.handle_error
        and not _ENGINE_LOG.isEnabledFor(logging.INFO)
        and not connection.engine.echo
    )


_ENGINE_LOG = logging.getLogger("sqlalchemy.engine.Engine")


class AsyncBoundLink(_OneByOne):
    """The same, for an async connection."""

    def __init__(self, connection: AsyncConnection, dialect: Dialect) -> None:
        self._connection = connection
        self.dialect = dialect

    async def _run(self, statement: str, params: Params) -> sa.CursorResult[Any]:
        return await self._connection.exec_driver_sql(self.dialect.say(statement), tuple(params))

    async def fetch(self, statement: str, params: Params = ()) -> Rows:
        return [tuple(row) for row in (await self._run(statement, params)).all()]

    async def change(self, statement: str, params: Params = ()) -> int:
        return (await self._run(statement, params)).rowcount
