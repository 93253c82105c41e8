"""SQLite has one writer at a time: has the caller's transaction become it?

What a bound ledger writes on a connection of its own would wait behind that one, which waits for
us. SQLite knows the answer and Python's driver does not pass it on, so it is told from two things:

- rows were changed in this transaction: the driver counts them;
- a transaction is open, which the driver begins by itself before a statement that writes, even if
  that matched nothing. This does not hold where the BEGIN was said by hand: by us before a
  savepoint, or by an application whose driver does not begin.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc, orm
from sqlalchemy.engine import RootTransaction

from semel.errors import SettingsError

# sqlite3.LEGACY_TRANSACTION_CONTROL, which Python 3.11 does not name: it knows nothing else.
BY_ITSELF = -1

_changes: weakref.WeakKeyDictionary[RootTransaction | sa.Connection, int]
_changes = weakref.WeakKeyDictionary()
"""How many rows were changed before: by a transaction's connection when it was first seen, by a
connection when it last began one.
"""

_by_hand: weakref.WeakSet[RootTransaction] = weakref.WeakSet()


def watch_writing(connection: sa.Connection) -> None:
    """See the transaction, as it is before it writes."""
    transaction = connection.get_transaction()
    if connection.dialect.name == "sqlite" and transaction is not None:
        _changes.setdefault(transaction, _driver(connection).total_changes)


def follow_writing(connection: sa.Connection) -> None:
    """The same for every transaction of a connection that has none yet."""
    if connection.dialect.name == "sqlite" and not event.contains(connection, "begin", _began):
        event.listen(connection, "begin", _began)


def _began(connection: sa.Connection) -> None:
    _changes[connection] = _driver(connection).total_changes


def begin_before_savepoints(connection: sa.Connection) -> None:
    """Python's SQLite driver begins no transaction for a savepoint, so its release would commit.

    https://docs.sqlalchemy.org/en/20/dialects/sqlite.html#pysqlite-serializable
    """
    if connection.dialect.name == "sqlite" and not event.contains(connection, "savepoint", _begin):
        event.listen(connection, "savepoint", _begin)


def _begin(connection: sa.Connection, _: str) -> None:
    if _driver(connection).in_transaction:
        return
    connection.exec_driver_sql("BEGIN")
    transaction = connection.get_transaction()
    if transaction is not None:
        _by_hand.add(transaction)


def refuse_writing(connections: Collection[sa.Connection], name: str) -> None:
    """Raise where a step could not be recorded before the caller's transaction ends."""
    if any(map(_is_writing, connections)):
        raise SettingsError(
            f"your session has written and holds SQLite's only writer, so step {name!r} cannot be "
            "recorded; take steps before its first write"
        )


def _is_writing(connection: sa.Connection) -> bool:
    if not _is_file(connection) or connection.closed or connection.invalidated:
        return False
    driver, transaction = _driver(connection), connection.get_transaction()
    if transaction is None or not driver.in_transaction:
        return False
    changes = driver.total_changes
    if _changes.get(transaction, _changes.get(connection, changes)) != changes:
        return True
    return transaction not in _by_hand and _begins_by_itself(driver)


def _is_file(connection: sa.Connection) -> bool:
    """A database in memory is its connection: the store's is the session's, and waits for none."""
    memory = connection.engine.url.database in {None, "", ":memory:"}
    return connection.dialect.name == "sqlite" and not memory


def _begins_by_itself(driver: Any) -> bool:
    control = getattr(getattr(driver, "_conn", driver), "autocommit", BY_ITSELF)
    return driver.isolation_level is not None and control == BY_ITSELF


def _driver(connection: sa.Connection) -> Any:
    return connection.connection.driver_connection


# --- what a session has connected ---------------------------------------------------------------


def joins(session: orm.Session) -> Collection[tuple[sa.Connection, Any, bool, bool]]:
    """What the session has connected already; it has no public word for that.

    Each with the transaction it began there, and whether its commit commits that.
    """
    return getattr(session.get_transaction(), "_connections", {}).values()


def carriers(session: orm.Session) -> Iterator[sa.Connection]:
    """Of these, the one that carries the outcome: it may have others, to other databases."""
    with contextlib.suppress(exc.UnboundExecutionError):
        engine = session.get_bind().engine
        yield from {connection for connection, *_ in joins(session) if connection.engine is engine}
