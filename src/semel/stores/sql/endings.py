"""Transactions that end behind SQLAlchemy's back, and must not look as if they were committed.

- PostgreSQL answers a COMMIT in a failed transaction with ROLLBACK, and no driver calls that an
  error: whoever has swallowed the error of a statement is told that all is well.
- MariaDB and MySQL roll the whole transaction back when it loses a deadlock. The next statement
  begins another, and its COMMIT brings in only what came after.
- A COMMIT or ROLLBACK in the text of a statement is nothing to SQLAlchemy.
- A listener that refuses a commit leaves the transaction open in the database, and a connection
  that is closed then goes back to its pool as it is: the next one's commit commits it too.
- A driver's connection in autocommit commits each statement, and SQLAlchemy knows nothing of it.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.engine import ExceptionContext, RootTransaction

from semel.errors import SettingsError

# What a server of this kind rolls a whole transaction back for: a deadlock, a row that has changed
# since the snapshot (innodb_snapshot_isolation), a full lock table.
LOST = {1213, 1020, 1206}

# libpq's name for a transaction that can only be rolled back.
FAILED = 3

# Comments may come first. ROLLBACK TO a savepoint ends nothing.
_ENDING = re.compile(
    r"(?:\s|/\*.*?\*/|--[^\n]*\n)*(COMMIT|END|ABORT|ROLLBACK(?!(\s+\w+)?\s+TO\b))\b",
    re.IGNORECASE | re.DOTALL,
)

_lost: weakref.WeakSet[RootTransaction] = weakref.WeakSet()


def take_back(connection: sa.Connection) -> None:
    """In the database, if need be by hanging up: the rows must not be committed any more."""
    try:
        connection.dialect.do_rollback(connection.connection)
    except Exception:  # noqa: BLE001 - whatever it is, this connection is not to be used again
        with contextlib.suppress(exc.SQLAlchemyError):
            connection.invalidate()


def watch_losses(connection: sa.Connection) -> None:
    """Have it noted when the server rolls back this connection's whole transaction."""
    engine, gives_up = connection.engine, connection.dialect.name in {"mysql", "mariadb"}
    if gives_up and not event.contains(engine, "handle_error", _note_loss):
        event.listen(engine, "handle_error", _note_loss)


def _note_loss(context: ExceptionContext) -> None:
    error: Any = context.original_exception
    connection = context.connection
    transaction = None if connection is None else connection.get_transaction()
    if transaction is not None and error.args and error.args[0] in LOST:
        _lost.add(transaction)


def is_lost(connection: sa.Connection) -> bool:
    """Has the server rolled back this connection's whole transaction? Savepoints are gone, too."""
    return connection.get_transaction() in _lost


def refuse_lost(connection: sa.Connection) -> None:
    """Before its COMMIT: raise, and roll back, when the server has given the transaction up."""
    if is_lost(connection) or _has_failed(connection):
        take_back(connection)
        raise SettingsError(
            "a statement in this transaction has failed, and its error was swallowed: the "
            "database has rolled the rows back, and would not say so at the commit. Nothing has "
            "happened. Let the error out, or run what may fail in a savepoint "
            "(session.begin_nested())"
        )


def _has_failed(connection: sa.Connection) -> bool:
    if connection.dialect.name != "postgresql":
        return False
    driver: Any = connection.connection.driver_connection
    known = getattr(driver, "pgconn", None) or getattr(driver, "info", None)
    if known is not None:  # psycopg, psycopg2: it is known without asking
        return bool(known.transaction_status == FAILED)
    try:
        connection.exec_driver_sql("SELECT 1")
    except exc.DBAPIError:
        return True
    return False


def ends(statement: str) -> bool:
    """Does this text end the transaction?"""
    return _ENDING.match(statement) is not None


def refuse_driver_autocommit(connection: sa.Connection, so: str) -> None:
    """`so`: what follows from a driver that commits by itself."""
    driver: Any = connection.connection.driver_connection
    own = getattr(driver, "autocommit", None)  # PyMySQL's is a function, sqlite3's may be -1
    asked = getattr(driver, "get_autocommit", None)
    alone = connection.dialect.name == "sqlite" and _never_begins(driver)
    if own is True or alone or (asked is not None and asked()):
        raise SettingsError(
            f"the driver's connection is in autocommit mode, so {so}; connect without it"
        )


def _never_begins(driver: Any) -> bool:
    """Told to begin nothing by itself, and nobody has done it."""
    return driver.isolation_level is None and not driver.in_transaction
