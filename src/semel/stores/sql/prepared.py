"""psycopg's connection with its cursors left out, for the statements that are run all the time.

Making a cursor, taking the statement apart, choosing a dumper for each value: for one short
statement that takes psycopg twice as long as libpq takes to send it and hear the answer. So the
few statements of the hot verbs are prepared once per connection, under a name, and sent through
libpq (`psycopg.pq`) with values that are made here; psycopg's own loaders read the rows.

Only for connections of our own: a prepared statement on somebody else's connection would be in
the way of whoever pools it.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from psycopg import errors, generators, pq
from psycopg.adapt import Transformer

from semel.stores.sql.dialects import Dialect, Postgres
from semel.stores.sql.links import AsyncPsycopgLink, Params, PsycopgLink, Rows

_NUMBERED = Postgres("numeric_dollar")
_INT8 = struct.Struct("!q").pack
_BINARY = pq.Format.BINARY

# A pooler between us and the server: "prepared statement already exists", in one that others use.
_KNOWN_ALREADY = "42P05"


def wired(value: Any) -> bytes | None:
    """A value as PostgreSQL's binary format has it."""
    kind = type(value)
    if kind is str:
        return value.encode()  # type: ignore[no-any-return]
    if kind is bytes or value is None:
        return value  # type: ignore[no-any-return]
    if kind is int:
        return _INT8(value)
    if kind is bool:
        return b"\x01" if value else b"\x00"
    raise TypeError(f"no statement of ours is given a {kind.__name__}")


class _Prepared:
    """The statements that one connection knows."""

    def __init__(self, driver: Any) -> None:
        self._connection: Any = driver.pgconn
        self._reader = Transformer(driver)
        self._names: dict[str, bytes] = {}

    def knows(self, statement: str) -> bool:
        return statement in self._names

    def begin_learning(self, statement: str) -> Any:
        said = _NUMBERED.say(statement).encode()
        self._connection.send_prepare(_name(statement), said)
        return generators.execute(self._connection)

    def end_learning(self, statement: str, results: list[Any]) -> None:
        result = results[-1]
        if result.status != pq.ExecStatus.COMMAND_OK:
            error = errors.error_from_result(result)
            if error.sqlstate != _KNOWN_ALREADY:
                raise error
        self._names[statement] = _name(statement)

    def send(self, statement: str, params: Params) -> Any:
        values = [wired(value) for value in params]
        formats = [_BINARY] * len(values)
        name = self._names[statement]
        self._connection.send_query_prepared(name, values, formats, result_format=_BINARY)
        return generators.execute(self._connection)

    def rows(self, results: list[Any]) -> Rows:
        result = results[-1]
        if result.status != pq.ExecStatus.TUPLES_OK:
            self._names.clear()  # a pooler may have given us a server that knows none of them
            raise errors.error_from_result(result)
        self._reader.set_pgresult(result, format=_BINARY)
        return self._reader.load_rows(0, result.ntuples, tuple)


def _name(statement: str) -> bytes:
    return b"semel_" + hashlib.sha256(statement.encode()).hexdigest()[:16].encode()


class PreparedLink(PsycopgLink):
    """A sync connection of our own."""

    def __init__(self, driver: Any, dialect: Dialect) -> None:
        super().__init__(driver, dialect)
        self._prepared = _Prepared(driver)

    async def ask(self, statement: str, params: Params) -> Rows:
        prepared, wait = self._prepared, self._driver.wait
        if not prepared.knows(statement):
            prepared.end_learning(statement, wait(prepared.begin_learning(statement)))
        return prepared.rows(wait(prepared.send(statement, params)))


class AsyncPreparedLink(AsyncPsycopgLink):
    """An async connection of our own."""

    def __init__(self, driver: Any, dialect: Dialect) -> None:
        super().__init__(driver, dialect)
        self._prepared = _Prepared(driver)

    async def ask(self, statement: str, params: Params) -> Rows:
        prepared, wait = self._prepared, self._driver.wait
        if not prepared.knows(statement):
            prepared.end_learning(statement, await wait(prepared.begin_learning(statement)))
        return prepared.rows(await wait(prepared.send(statement, params)))
