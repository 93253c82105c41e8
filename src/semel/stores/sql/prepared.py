"""psycopg's connection with its cursors left out, for the statements that are run all the time.

Making a cursor, taking the statement apart, choosing a dumper for each value: for one short
statement that takes psycopg twice as long as libpq takes to send it and hear the answer. So the
few statements of the hot verbs are prepared once per connection, under a name, and sent through
libpq (`psycopg.pq`) with values that are made here; psycopg's own loaders read the rows.

Behind a transaction pooler no statement is named: each is sent with its text, in one round trip.
Where a pooler was not recognised, a name can be missing or taken on the server; after that error
the connection names no statement. Names are hashes of the statement's text, so a name means the
same statement for every client.

Only for connections of our own: a prepared statement on somebody else's connection would be in
the way of whoever pools it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Generator, Sequence
from typing import Any

from psycopg import errors, generators, pq
from psycopg.adapt import Transformer
from psycopg.waiting import Ready, Wait

from semel.stores.sql.dialects import Dialect, Postgres
from semel.stores.sql.links import Array, AsyncPsycopgLink, Params, PsycopgLink, Rows, Said, log

_NUMBERED = Postgres("numeric_dollar")
_INT8 = struct.Struct("!q").pack
_SIZE = struct.Struct("!i").pack
_ARRAY = struct.Struct("!iiIii").pack
_BINARY = pq.Format.BINARY
_OK = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)

# On a connection of our own, only a pooler can cause these: duplicate_prepared_statement,
# invalid_sql_statement_name.
_KNOWN_ALREADY = "42P05"
_UNKNOWN = "26000"


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
    if kind is Array:
        return _wired_array(value)
    if isinstance(value, str):  # a member of an enum, as below
        return value.encode()
    if isinstance(value, int):
        return _INT8(value)
    raise TypeError(f"no statement of ours is given a {kind.__name__}")


def _wired_array(values: Array) -> bytes:
    """One dimension, counted from 1: its size, and each value behind its own."""
    parts = [_ARRAY(1, 1, values.oid, len(values), 1)]
    for value in values:
        said = wired(value)
        parts.append(_SIZE(-1) if said is None else _SIZE(len(said)) + said)
    return b"".join(parts)


class _Prepared:
    """The prepared statements of one connection; behind a pooler it has none."""

    def __init__(self, driver: Any, *, named: bool) -> None:
        self._connection: Any = driver.pgconn
        self._reader = Transformer(driver)
        self._is_named = named
        self._names: dict[str, bytes] = {}

    def knows(self, statement: str) -> bool:
        return statement in self._names or not self._is_named

    def unknown(self, statements: Sequence[str]) -> list[str]:
        return [s for s in dict.fromkeys(statements) if not self.knows(s)]

    def begin_learning(self, statement: str) -> Any:
        self._send_prepare(statement)
        return generators.execute(self._connection)

    def _send_prepare(self, statement: str) -> None:
        said = _NUMBERED.say(statement).encode()
        self._connection.send_prepare(_name(statement), said)

    def end_learning(self, statement: str, results: list[Any]) -> None:
        result = results[-1]
        if result.status != pq.ExecStatus.COMMAND_OK:
            error = errors.error_from_result(result)
            if error.sqlstate != _KNOWN_ALREADY:
                raise error
            self._is_named = False
        self._names[statement] = _name(statement)

    def send(self, statement: str, params: Params) -> Any:
        self._send(statement, [wired(value) for value in params])
        return generators.execute(self._connection)

    def _send(self, statement: str, values: list[bytes | None]) -> None:
        formats, send = [_BINARY] * len(values), self._connection
        if self._is_named:
            name = self._names[statement]
            send.send_query_prepared(name, values, formats, result_format=_BINARY)
        else:
            text = _NUMBERED.say(statement).encode()
            send.send_query_params(text, values, None, formats, result_format=_BINARY)

    def rows(self, results: list[Any]) -> Rows:
        result = results[-1]
        if result.status not in _OK:
            error = errors.error_from_result(result)
            if error.sqlstate == _UNKNOWN:
                self._is_named = False
            raise error
        self._reader.set_pgresult(result, format=_BINARY)
        return self._reader.load_rows(0, result.ntuples, tuple)

    # --- several at once ------------------------------------------------------------------------

    def learn_all(self, statements: Sequence[str]) -> Generator[Wait, Ready, None]:
        """Each for itself: that a pooler's server knows one of them stops none of the others."""
        connection = self._connection
        connection.enter_pipeline_mode()
        for statement in statements:
            self._send_prepare(statement)
            connection.pipeline_sync()
        answers = yield from _exchanged(connection, len(statements))
        connection.exit_pipeline_mode()
        for statement, [results] in zip(statements, answers, strict=True):
            self.end_learning(statement, results)

    def send_all(self, said: Sequence[Said]) -> Generator[Wait, Ready, list[Any]]:
        """What is answered to each."""
        wires = [(statement, [wired(value) for value in params]) for statement, params in said]
        connection = self._connection
        connection.enter_pipeline_mode()
        for statement, values in wires:
            self._send(statement, values)
        connection.pipeline_sync()
        [answers] = yield from _exchanged(connection, 1)
        connection.exit_pipeline_mode()
        return answers

    def all_rows(self, answers: list[Any], count: int) -> list[Rows]:
        """Of so many; what follows them is a hint, which may fail by itself or at its commit."""
        rows = [self.rows(results) for results in answers[:count]]
        for results in answers[count:]:
            if results[-1].status not in _OK:
                log.info("semel: a hint was not given: %s", errors.error_from_result(results[-1]))
        return rows


def _exchanged(connection: Any, groups: int) -> Generator[Wait, Ready, list[list[Any]]]:
    """The results, by group and statement.

    Reads while it sends: a server that nobody reads from may stop reading, too.
    """
    while connection.flush():
        ready = yield Wait.RW
        if ready and ready & Ready.R:
            connection.consume_input()
    answers: list[list[Any]] = [[]]
    results: list[Any] = []
    while len(answers) <= groups:
        while connection.is_busy():
            if (yield Wait.R):
                connection.consume_input()
        result = connection.get_result()
        if result is None:
            _refuse_lost(connection, results)
            answers[-1].append(results)
            results = []
        elif result.status == pq.ExecStatus.PIPELINE_SYNC:
            answers[-1] += [results] if results else []  # an error of the commit that this is
            results = []
            answers.append([])
        else:
            results.append(result)
    return answers[:-1]


def _refuse_lost(connection: Any, results: list[Any]) -> None:
    """Nothing more comes over a connection that is gone, and libpq goes on saying so."""
    if not results or connection.status == pq.ConnStatus.BAD:
        raise errors.OperationalError("the connection is lost")


def _name(statement: str) -> bytes:
    return b"semel_" + hashlib.sha256(statement.encode()).hexdigest()[:16].encode()


class PreparedLink(PsycopgLink):
    """A sync connection of our own."""

    def __init__(self, driver: Any, dialect: Dialect, *, pooled: bool = False) -> None:
        super().__init__(driver, dialect, pooled=pooled)
        self._prepared = _Prepared(driver, named=not pooled)

    async def ask(self, statement: str, params: Params) -> Rows:
        prepared, wait = self._prepared, self._driver.wait
        if not prepared.knows(statement):
            await self.learn([statement])
        return prepared.rows(wait(prepared.send(statement, params)))

    async def learn(self, statements: Sequence[str]) -> None:
        prepared, wait = self._prepared, self._driver.wait
        unknown = prepared.unknown(statements)
        if self.pipelines and len(unknown) > 1:
            wait(prepared.learn_all(unknown))
            return
        for statement in unknown:
            prepared.end_learning(statement, wait(prepared.begin_learning(statement)))

    async def together(self, asked: Sequence[Said], hint: Said | None = None) -> list[Rows]:
        if not self.pipelines:
            return await super().together(asked, hint)
        said = asked if hint is None else [*asked, hint]
        await self.learn([statement for statement, _ in said])
        prepared, wait = self._prepared, self._driver.wait
        return prepared.all_rows(wait(prepared.send_all(said)), len(asked))


class AsyncPreparedLink(AsyncPsycopgLink):
    """An async connection of our own."""

    def __init__(self, driver: Any, dialect: Dialect, *, pooled: bool = False) -> None:
        super().__init__(driver, dialect, pooled=pooled)
        self._prepared = _Prepared(driver, named=not pooled)

    async def ask(self, statement: str, params: Params) -> Rows:
        prepared, wait = self._prepared, self._driver.wait
        if not prepared.knows(statement):
            await self.learn([statement])
        return prepared.rows(await wait(prepared.send(statement, params)))

    async def learn(self, statements: Sequence[str]) -> None:
        prepared, wait = self._prepared, self._driver.wait
        unknown = prepared.unknown(statements)
        if self.pipelines and len(unknown) > 1:
            await wait(prepared.learn_all(unknown))
            return
        for statement in unknown:
            prepared.end_learning(statement, await wait(prepared.begin_learning(statement)))

    async def together(self, asked: Sequence[Said], hint: Said | None = None) -> list[Rows]:
        if not self.pipelines:
            return await super().together(asked, hint)
        said = asked if hint is None else [*asked, hint]
        await self.learn([statement for statement, _ in said])
        prepared, wait = self._prepared, self._driver.wait
        return prepared.all_rows(await wait(prepared.send_all(said)), len(asked))
