"""What each driver's errors mean."""

from __future__ import annotations

import sqlite3

import psycopg
import pymysql
import pytest
from sqlalchemy import exc
from sqlalchemy.engine import make_url

from semel.errors import SettingsError, StoreUnavailableError
from semel.stores.sql.faults import (
    LONGEST_PAUSE_S,
    BrokenError,
    Fault,
    fault_of,
    pause_s,
    unavailable,
)
from semel.stores.sql.lines import place


def sqlite_error(statement, setup=""):
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(setup)
        with pytest.raises(sqlite3.Error) as caught:
            connection.execute(statement)
        return caught.value
    finally:
        connection.close()


def sqlite_coded(code):
    error = sqlite3.OperationalError("told")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (psycopg.errors.DeadlockDetected(), Fault.AGAIN),
        (psycopg.errors.SerializationFailure(), Fault.AGAIN),
        (psycopg.errors.LockNotAvailable(), Fault.LOCKED),
        (psycopg.errors.UniqueViolation(), Fault.TAKEN),
        (psycopg.errors.InvalidPassword(), Fault.NO_ENTRY),
        (
            psycopg.OperationalError('FATAL:  password authentication failed for user "me"'),
            Fault.NO_ENTRY,
        ),
        (psycopg.OperationalError("fe_sendauth: no password supplied"), Fault.NO_ENTRY),
        (psycopg.OperationalError("FATAL:  no pg_hba.conf entry for host"), Fault.NO_ENTRY),
        (psycopg.errors.InsufficientPrivilege(), Fault.NO_RIGHT),
        (psycopg.errors.InvalidSqlStatementName(), Fault.AGAIN),
        (psycopg.errors.UndefinedTable(), Fault.NO_TABLE),
        (psycopg.errors.UndefinedColumn(), Fault.NO_COLUMN),
        (psycopg.OperationalError('FATAL:  database "x" does not exist'), Fault.NO_DATABASE),
        (psycopg.errors.ReadOnlySqlTransaction(), Fault.GONE),
        (psycopg.errors.AdminShutdown(), Fault.GONE),
        (psycopg.errors.UntranslatableCharacter(), Fault.REFUSED),
        (psycopg.errors.StringDataRightTruncation(), Fault.REFUSED),
        (psycopg.errors.CheckViolation(), Fault.REFUSED),
        (psycopg.errors.NotNullViolation(), Fault.REFUSED),
        (psycopg.errors.ForeignKeyViolation(), Fault.OTHER),
        (psycopg.errors.DiskFull(), Fault.OTHER),
        (psycopg.OperationalError("connection refused"), Fault.OTHER),
        (pymysql.err.OperationalError(1213, "Deadlock found"), Fault.AGAIN),
        (pymysql.err.OperationalError(1205, "Lock wait timeout"), Fault.LOCKED),
        (pymysql.err.IntegrityError(1062, "Duplicate entry", sqlstate="23000"), Fault.TAKEN),
        (pymysql.err.ProgrammingError(1146, "no such table"), Fault.NO_TABLE),
        (pymysql.err.OperationalError(1054, "Unknown column"), Fault.NO_COLUMN),
        (pymysql.err.OperationalError(1045, "Access denied"), Fault.NO_ENTRY),
        (pymysql.err.OperationalError(1142, "INSERT command denied"), Fault.NO_RIGHT),
        (pymysql.err.OperationalError(1049, "Unknown database"), Fault.NO_DATABASE),
        (pymysql.err.OperationalError(2013, "Lost connection"), Fault.GONE),
        (pymysql.err.DataError(1406, "Data too long"), Fault.REFUSED),
        (pymysql.err.OperationalError(4025, "CONSTRAINT `c` failed"), Fault.REFUSED),
        (pymysql.err.OperationalError(3819, "Check constraint is violated"), Fault.REFUSED),
        (pymysql.err.IntegrityError(1048, "Column cannot be null"), Fault.REFUSED),
        (pymysql.err.OperationalError(1153, "Got a packet bigger than"), Fault.REFUSED),
        (sqlite_coded(sqlite3.SQLITE_BUSY), Fault.AGAIN),
        (sqlite_coded(sqlite3.SQLITE_BUSY | (2 << 8)), Fault.AGAIN),
        (sqlite_coded(sqlite3.SQLITE_LOCKED), Fault.AGAIN),
        (sqlite_coded(sqlite3.SQLITE_FULL), Fault.OTHER),
        (sqlite_error("SELECT * FROM idempotency"), Fault.NO_TABLE),
        (
            sqlite_error(
                "INSERT INTO t VALUES (1)", "CREATE TABLE t (a UNIQUE); INSERT INTO t VALUES (1)"
            ),
            Fault.TAKEN,
        ),
        (
            sqlite_error("INSERT INTO t VALUES (1)", "CREATE TABLE t (a CHECK (a > 1))"),
            Fault.REFUSED,
        ),
        (
            sqlite_error("INSERT INTO t VALUES (NULL)", "CREATE TABLE t (a NOT NULL)"),
            Fault.REFUSED,
        ),
        (ConnectionResetError(), Fault.GONE),
        (EOFError(), Fault.GONE),
        (BrokenError(), Fault.GONE),
        (exc.OperationalError("", {}, pymysql.err.OperationalError(1213, "")), Fault.AGAIN),
        (exc.OperationalError("", {}, Exception(), connection_invalidated=True), Fault.GONE),
        (exc.TimeoutError("the pool is exhausted"), Fault.OTHER),
    ],
    ids=repr,
)
def test_fault(error, fault):
    assert fault_of(error) is fault


def test_what_leaves_says_what_to_check():
    error = BrokenError()
    error.__cause__ = psycopg.OperationalError("server closed the connection")
    left = unavailable("postgresql://db/shop", error)
    assert isinstance(left, StoreUnavailableError)
    assert "server closed the connection" in str(left)
    assert "check that the server is up" in str(left)


def test_a_missing_table_says_what_to_run():
    left = unavailable("mysql://db/x", pymysql.err.ProgrammingError(1146, "doesn't exist"))
    assert isinstance(left, SettingsError)
    assert "`semel db init URL`" in str(left)
    assert "create=True" in str(left)


def test_a_missing_table_in_a_file_says_the_whole_command():
    where = place(make_url("sqlite+aiosqlite:///my shop.db"))
    left = unavailable(where, sqlite_error("SELECT * FROM idempotency"))
    assert isinstance(left, SettingsError)
    assert "run `semel db init 'sqlite+pysqlite:///my shop.db'`" in str(left)


def test_a_file_of_the_other_store_says_how_to_open_it():
    error = sqlite_error("SELECT b FROM t", "CREATE TABLE t (a)")
    left = unavailable(place(make_url("sqlite:///a.db")), error)
    assert "semel.connect('sqlite:///a.db')" in str(left)


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_FULL])
def test_a_file_is_no_server(code):
    left = unavailable("sqlite+pysqlite:///a.db", sqlite_coded(code))
    assert isinstance(left, StoreUnavailableError)
    assert "server" not in str(left)
    busy = code == sqlite3.SQLITE_BUSY
    assert ("another connection is writing to this file" in str(left)) is busy


@pytest.mark.parametrize(
    ("where", "error", "hint"),
    [
        ("mysql://db/x", pymysql.err.OperationalError(1049, "Unknown database"), "CREATE DATABASE"),
        ("mysql://db/x", pymysql.err.OperationalError(1054, "Unknown column"), "semel db check"),
        ("sqlite:///a.db", sqlite_error("SELECT b FROM t", "CREATE TABLE t (a)"), "SQLiteStore"),
    ],
    ids=repr,
)
def test_a_database_that_is_not_ours_is_a_mistake_in_the_settings(where, error, hint):
    left = unavailable(where, error)
    assert isinstance(left, SettingsError)
    assert hint in str(left)
    assert "is up" not in str(left)


def test_pauses_grow_and_are_bounded():
    assert pause_s(0) < pause_s(3) <= LONGEST_PAUSE_S
    assert pause_s(50) <= LONGEST_PAUSE_S
