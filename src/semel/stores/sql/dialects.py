"""What PostgreSQL, MariaDB/MySQL and SQLite say differently.

Statements are written once, with `?` where a value goes, `{now}` where the store's clock is read
`{later}` for so many microseconds from now and `{json}` for a value that is JSON; a dialect puts
in its own words. No statement may hold a `?` or a `%` of its own.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, ClassVar

from semel.errors import SettingsError
from semel.stores.rules import EPOCH

MICROSECOND = timedelta(microseconds=1)

# 9999-12-31T23:59:59.999999Z, the last moment that all three databases and Python can write.
LAST_US = 253_402_300_799_999_999

# The longest time a server is asked to add to its clock, 7,900 years: the sum has four digits.
LONGEST_US = 249_300_000_000_000_000


class Dialect:
    """How one database says it. `placeholder` belongs to the driver, the rest to the database."""

    name: ClassVar[str]
    clock: ClassVar[str]
    later: ClassVar[str]
    json: ClassVar[str] = "?"
    begin: ClassVar[str] = "BEGIN"
    locks_rows: ClassVar[bool] = False
    """Must a row be locked before it is written, so as not to wait for somebody who has it?"""
    at_once: ClassVar[str] = ""
    """Before an UPDATE that is not to wait for a lock."""
    response: ClassVar[str] = "response"
    """How to read the JSON column as the text that was written."""

    def __init__(self, paramstyle: str) -> None:
        self.paramstyle = paramstyle
        self.packet: int | None = None
        self.codec = "utf-8"
        """A Python codec; characters that it lacks are escaped in text columns. See `encodings`."""
        self.is_known = False
        """Whether `encodings.learn` has set `codec`."""
        # Statements over many rows differ by their number; the sizes in use are few.
        self.say = lru_cache(maxsize=256)(self._say)

    def _say(self, statement: str) -> str:
        """The statement in the words of this database and its driver."""
        for word, said in (("{now}", self.clock), ("{later}", self.later), ("{json}", self.json)):
            statement = statement.replace(word, said)
        if self.paramstyle in {"format", "pyformat"}:
            return statement.replace("?", "%s")
        if self.paramstyle == "psycopg":
            return statement.replace("?", "%b")
        if self.paramstyle == "qmark":
            return statement
        head, *rest = statement.split("?")
        mark = "$" if self.paramstyle == "numeric_dollar" else ":"
        return head + "".join(f"{mark}{n}{part}" for n, part in enumerate(rest, 1))

    def now_param(self) -> tuple[Any, ...]:
        """What goes with `{now}`: nothing where the server has a clock."""
        return ()

    def later_param(self, us: int | None) -> Any:
        """What goes with `{later}`; None is never."""
        return None if us is None else min(us, LONGEST_US)

    def stamp(self, us: int) -> Any:
        """Microseconds since 1970 as the database's timestamp."""
        raise NotImplementedError

    def micros(self, stamp: Any) -> int:
        """The database's timestamp as microseconds since 1970."""
        raise NotImplementedError


class Postgres(Dialect):
    """PostgreSQL, from version 12 on."""

    name = "postgresql"
    clock = "clock_timestamp()"  # now() stands still inside a transaction
    later = "clock_timestamp() + CAST(? AS bigint) * INTERVAL '1 microsecond'"
    json = "CAST(? AS json)"
    response = "CAST(response AS text)"

    def stamp(self, us: int) -> datetime:
        return EPOCH + timedelta(microseconds=min(us, LAST_US))

    def micros(self, stamp: datetime) -> int:
        return (stamp - EPOCH) // MICROSECOND


class MySQL(Dialect):
    """MariaDB from 10.6 on, MySQL from 8.0. Timestamps are UTC in columns without a zone."""

    name = "mysql"
    clock = "UTC_TIMESTAMP(6)"
    later = "UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND"
    begin = "START TRANSACTION"
    locks_rows = True
    # A comment to MySQL, which waits for as long as its session says.
    at_once = "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ "

    def stamp(self, us: int) -> datetime:
        return (EPOCH + timedelta(microseconds=min(us, LAST_US))).replace(tzinfo=None)

    def micros(self, stamp: datetime) -> int:
        return (stamp.replace(tzinfo=UTC) - EPOCH) // MICROSECOND


class SQLite(Dialect):
    """One machine, so its own clock is the store's. Timestamps are text that sorts like time."""

    name = "sqlite"
    clock = "?"
    later = "?"
    # A transaction that reads first and then writes can fail with BUSY in the middle.
    begin = "BEGIN IMMEDIATE"

    def now_param(self) -> tuple[Any, ...]:
        return (self.stamp(time.time_ns() // 1000),)

    def later_param(self, us: int | None) -> str | None:
        return None if us is None else self.stamp(time.time_ns() // 1000 + us)

    def stamp(self, us: int) -> str:
        moment = EPOCH + timedelta(microseconds=min(us, LAST_US))
        return moment.strftime("%Y-%m-%d %H:%M:%S.%f").rjust(26, "0")

    def micros(self, stamp: str) -> int:
        return (datetime.fromisoformat(stamp).replace(tzinfo=UTC) - EPOCH) // MICROSECOND


DIALECTS: dict[str, type[Dialect]] = {
    "postgresql": Postgres,
    "mysql": MySQL,
    "mariadb": MySQL,
    "sqlite": SQLite,
}


def refuse_unknown(name: str) -> None:
    if name not in DIALECTS:
        raise SettingsError(f"{name} is not supported; use PostgreSQL, MariaDB, MySQL or SQLite")


def dialect_named(name: str, paramstyle: str = "qmark") -> Dialect:
    refuse_unknown(name)
    return DIALECTS[name](paramstyle)
