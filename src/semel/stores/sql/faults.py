"""What a driver's error means for us.

Passing trouble (a deadlock, a lock not had in time, a serialization failure, a busy file) is tried
again and never becomes an answer. A value that the database refuses is not tried again. Only the
ledger sends the operations of a refused batch once more, one by one, to find the refused one.
After a broken connection it is unknown whether the statement took effect; every verb can be
repeated, so it is, once. Most other errors are raised as `StoreUnavailableError`.
"""

from __future__ import annotations

import enum
import random
import re
import shlex
from typing import Any

from sqlalchemy import exc

from semel.errors import (
    DamagedStoreError,
    SemelError,
    SettingsError,
    StoreUnavailableError,
    said_by,
)
from semel.stores.sql.pooler import statement_pooling


class BrokenError(Exception):
    """The connection is gone; the driver's error is the cause."""


class NoTableError(SettingsError):
    """The schema is not there."""


class Fault(enum.Enum):
    """What to do about it."""

    AGAIN = "passing trouble: the statement had no effect, try again"
    LOCKED = "somebody's transaction has the row: the statement had no effect, try again"
    GONE = "the connection is gone: connect anew and repeat"
    TAKEN = "somebody else inserted the row first"
    DONE = "the column or the index is there, or gone, already"
    NO_TABLE = "there is no such table"
    NO_COLUMN = "the table is there and not ours"
    NO_DATABASE = "there is no such database"
    NO_ENTRY = "the server knows this user, or this password, not"
    NO_RIGHT = "the user may not do this to the table"
    REFUSED = "the database refuses this value"
    DAMAGED = "the SQLite file is damaged"
    OTHER = "the store cannot answer"


# https://www.postgresql.org/docs/current/errcodes-appendix.html
SQLSTATES = {
    "40001": Fault.AGAIN,  # serialization_failure
    "40P01": Fault.AGAIN,  # deadlock_detected
    "55P03": Fault.LOCKED,  # lock_not_available
    "26000": Fault.AGAIN,  # invalid_sql_statement_name: a pooler gave us another server process
    "0A000": Fault.GONE,  # feature_not_supported: the table was changed under a prepared statement
    "23505": Fault.TAKEN,  # unique_violation
    "23502": Fault.REFUSED,  # not_null_violation
    "23514": Fault.REFUSED,  # check_violation
    "42P01": Fault.NO_TABLE,  # undefined_table
    "42703": Fault.NO_COLUMN,  # undefined_column
    "3D000": Fault.NO_DATABASE,  # invalid_catalog_name
    "28000": Fault.NO_ENTRY,  # invalid_authorization_specification
    "28P01": Fault.NO_ENTRY,  # invalid_password
    "42501": Fault.NO_RIGHT,  # insufficient_privilege
    "57P01": Fault.GONE,  # admin_shutdown
    "57P02": Fault.GONE,  # crash_shutdown
    "25006": Fault.GONE,  # read_only_sql_transaction: this was the primary before a failover
}

# The class of data exceptions, such as 22P05 untranslatable_character.
REFUSED_CLASS = "22"

# https://mariadb.com/kb/en/mariadb-error-codes/
MYSQL_CODES = {
    1205: Fault.LOCKED,  # lock wait timeout
    1213: Fault.AGAIN,  # deadlock
    1020: Fault.AGAIN,  # record has changed since last read, innodb_snapshot_isolation
    3572: Fault.LOCKED,  # NOWAIT is set
    1062: Fault.TAKEN,  # duplicate entry
    1060: Fault.DONE,  # duplicate column name
    1061: Fault.DONE,  # duplicate key name
    1091: Fault.DONE,  # cannot drop it, it is not there
    1146: Fault.NO_TABLE,
    1054: Fault.NO_COLUMN,  # unknown column
    1049: Fault.NO_DATABASE,  # unknown database
    1044: Fault.NO_ENTRY,  # access denied for user to database
    1045: Fault.NO_ENTRY,  # access denied for user, using password
    1130: Fault.NO_ENTRY,  # host is not allowed to connect
    1698: Fault.NO_ENTRY,  # access denied for user, by an authentication plugin
    1142: Fault.NO_RIGHT,  # command denied to user for table
    1143: Fault.NO_RIGHT,  # command denied to user for column
    1227: Fault.NO_RIGHT,  # a privilege of the whole server is needed
    1048: Fault.REFUSED,  # column cannot be null
    1153: Fault.REFUSED,  # larger than max_allowed_packet; the server then closes the connection
    1264: Fault.REFUSED,  # out of range value for column
    1300: Fault.REFUSED,  # invalid character string
    1364: Fault.REFUSED,  # field does not have a default value
    1366: Fault.REFUSED,  # incorrect string value for column
    1406: Fault.REFUSED,  # data too long for column
    3819: Fault.REFUSED,  # a CHECK constraint is violated, MySQL
    4025: Fault.REFUSED,  # a CHECK constraint is violated, MariaDB
    1053: Fault.GONE,  # server shutdown in progress
    1290: Fault.GONE,  # --read-only: this was the primary before a failover
    1836: Fault.GONE,  # running in read-only mode
    1927: Fault.GONE,  # connection was killed
    2006: Fault.GONE,  # server has gone away
    2013: Fault.GONE,  # lost connection during query
    2014: Fault.GONE,  # commands out of sync
    2055: Fault.GONE,  # lost connection, system error
    4031: Fault.GONE,  # disconnected by the server because of inactivity
}

# The low byte of https://www.sqlite.org/rescode.html
SQLITE_CODES = {
    5: Fault.AGAIN,  # BUSY
    6: Fault.AGAIN,  # LOCKED
    11: Fault.DAMAGED,  # CORRUPT
    18: Fault.REFUSED,  # TOOBIG
    26: Fault.DAMAGED,  # NOTADB
}
SQLITE_TAKEN = (1555, 2067)  # CONSTRAINT_PRIMARYKEY, CONSTRAINT_UNIQUE
SQLITE_REFUSED = (275, 1299)  # CONSTRAINT_CHECK, CONSTRAINT_NOTNULL

# Six tries with these pauses give a deadlock storm a good second to pass.
TRIES = 6
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5


def pause_s(turn: int) -> float:
    """How long to wait after so many tries; jittered, so that two losers part."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**turn)
    return random.uniform(longest / 2, longest)  # noqa: S311 - nobody gains by guessing it


def fault_of(error: BaseException) -> Fault:
    if isinstance(error, BrokenError):
        return Fault.GONE
    if isinstance(error, exc.DBAPIError):
        if error.connection_invalidated:
            return Fault.GONE
        error = error.orig or error
    if isinstance(error, OSError | EOFError):
        return Fault.GONE
    if hasattr(error, "sqlite_errorcode"):
        return _sqlite_fault(error)
    # PyMySQL's errors have an SQLSTATE too, but it says less than their number.
    if error.args and isinstance(error.args[0], int):
        return MYSQL_CODES.get(error.args[0], Fault.OTHER)
    sqlstate = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if sqlstate is None:
        return _refused_fault(said_by(error))
    refused = str(sqlstate).startswith(REFUSED_CLASS)
    return SQLSTATES.get(str(sqlstate), Fault.REFUSED if refused else Fault.OTHER)


# psycopg has no SQLSTATE for a connection that was refused, only the server's sentence, or libpq's.
REFUSALS = (
    (re.compile(r'FATAL:\s+database ".*" does not exist'), Fault.NO_DATABASE),
    (re.compile(r'FATAL:\s+role ".*" does not exist'), Fault.NO_ENTRY),
    (re.compile(r"FATAL:\s+.*authentication failed"), Fault.NO_ENTRY),
    (re.compile(r"FATAL:\s+no pg_hba.conf entry"), Fault.NO_ENTRY),
    (re.compile(r"no password supplied"), Fault.NO_ENTRY),
    (re.compile(r"FATAL:\s+permission denied for database"), Fault.NO_ENTRY),
)


def _refused_fault(said: str) -> Fault:
    return next((fault for sentence, fault in REFUSALS if sentence.search(said)), Fault.OTHER)


def _sqlite_fault(error: Any) -> Fault:
    code: int = error.sqlite_errorcode
    if code in SQLITE_TAKEN:
        return Fault.TAKEN
    if code in SQLITE_REFUSED:
        return Fault.REFUSED
    if "no such table" in str(error):
        return Fault.NO_TABLE
    if "no such column" in str(error) or "has no column named" in str(error):
        return Fault.NO_COLUMN
    return SQLITE_CODES.get(code & 0xFF, Fault.OTHER)


def pasted(where: str) -> str:
    """The database as it can be given to a command."""
    return shlex.quote(where) if _is_file(where) else "URL"  # a server's lacks its user


def no_table(where: str) -> NoTableError:
    return NoTableError(
        f"there is no table idempotency in {where}; run `semel db init {pasted(where)}`, "
        "or open the store with SQLStore(..., create=True)"
    )


def elsewhere(error: BaseException) -> SettingsError | None:
    """The claim was won, so the table is there: where the session writes, it is not."""
    if fault_of(error) is not Fault.NO_TABLE:
        return None
    return SettingsError(
        "the session's database has no table idempotency; is the store over the same database as "
        "the session? Its transaction was rolled back, and nothing has happened"
    )


def _is_file(where: str) -> bool:
    return where.startswith("sqlite")


def foreign(where: str, said: str) -> SettingsError:
    """The table has our name and other columns; in an SQLite file, most likely SQLiteStore's."""
    if _is_file(where):
        url = where.replace("sqlite+pysqlite:", "sqlite:", 1)
        return SettingsError(
            f"{where} was made by SQLiteStore, or by something else ({said}); open a file of "
            f"SQLiteStore with semel.connect({url!r}), or give SQLStore another file"
        )
    return SettingsError(
        f"the table idempotency in {where} is not as it should be ({said}); "
        "`semel db check URL` tells the differences"
    )


def unavailable(where: str, error: BaseException) -> SemelError:
    """The error to raise when trying again did not help."""
    if isinstance(error, SemelError):
        return error
    if (refusal := statement_pooling(error.__cause__ or error)) is not None:
        return refusal
    fault = fault_of(error)
    if isinstance(error, BrokenError):
        error = error.__cause__ or error
    said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    return _told(where, fault, said)


def _told(where: str, fault: Fault, said: str) -> SemelError:
    match fault:
        case Fault.NO_TABLE:
            return no_table(where)
        case Fault.NO_COLUMN:
            return foreign(where, said)
        case Fault.NO_DATABASE:
            return SettingsError(
                f"there is no database at {where}; make it with CREATE DATABASE, or check its "
                "name in the URL"
            )
        case Fault.NO_ENTRY:
            return StoreUnavailableError(
                f"{where} let us not in: {said}; check user and password in the URL, and that this "
                "user may connect from here to this database"
            )
        case Fault.NO_RIGHT:
            return StoreUnavailableError(
                f"the user may not use the table idempotency in {where}: {said}; "
                "GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency to that user"
            )
        case Fault.REFUSED:
            return SettingsError(
                f"{where} refuses a value, and sending it again would not help: {said}; "
                "`semel db check URL` reports columns that are not as they should be"
            )
        case Fault.DAMAGED:
            return DamagedStoreError(
                f"{where} is damaged: {said}. Nothing more is run. Restore the file from a backup"
            )
        case Fault.LOCKED:
            return StoreUnavailableError(
                f"a row of {where} is locked by another transaction: {said}; "
                "commit or roll back what holds it"
            )
    return _silent(where, fault, said)


def part_unavailable(where: str, error: BaseException, part: str, opener: str) -> SemelError:
    """The same of tables that belong to a part of the schema, as in "the log"."""
    match fault_of(error):
        case Fault.NO_TABLE:
            return no_tables(where, part, opener)
        case Fault.NO_COLUMN:
            return SettingsError(
                f"the tables of {part} in {where} are not as they should be: {error}; "
                "`semel db check URL` tells the differences"
            )
        case Fault.NO_RIGHT:
            return StoreUnavailableError(
                f"the user may not use the tables of {part} in {where}: {error}; GRANT SELECT, "
                "INSERT, UPDATE, DELETE on them to that user"
            )
    return unavailable(where, error)


def no_tables(where: str, part: str, opener: str) -> NoTableError:
    return NoTableError(
        f"there are no tables of {part} in {where}; run `semel db init {pasted(where)}`, or "
        f"`semel db upgrade` where those of an older release are, or open it with "
        f"{opener}(..., create=True)"
    )


def _silent(where: str, fault: Fault, said: str) -> StoreUnavailableError:
    """A file has no server that could be down: it is busy, or out of reach."""
    if not _is_file(where):
        advice = "check that the server is up and takes connections"
    elif fault is Fault.AGAIN:
        return StoreUnavailableError(
            f"another connection is writing to this file, {where}: {said}; commit or roll back "
            "what holds it"
        )
    else:
        advice = "check free space, and the permissions of the file and its directory"
    return StoreUnavailableError(f"{where} did not answer: {said}; {advice}")
