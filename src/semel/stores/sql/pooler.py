"""PostgreSQL connections behind a transaction pooler, such as PgBouncer.

A transaction pooler runs each transaction of a client on any of its server connections. So a client
has nothing that lasts longer than a transaction: no prepared statement, no session setting, no
LISTEN. Each new connection is tested once. When a client connects, a server sends its own process
id. A pooler sends an invented one, which differs from `pg_backend_pid()`. The URL option `pooler`
overrides the test:

    postgresql://app@db/shop?pooler=transaction     use nothing that belongs to a session
    postgresql://app@db/shop?pooler=session         use it, although the test finds a pooler
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from semel.errors import SettingsError

OPTION = "pooler"
MODES = ("transaction", "session")

POOLED = "semel.pooled"
"""The key in the `info` of a DBAPI connection: whether a transaction pooler serves it."""


# --- the URL option -----------------------------------------------------------------------------


def refuse_option(url: URL) -> None:
    """Raise unless the option is absent or valid."""
    mode = url.query.get(OPTION)
    if mode is None:
        return
    if url.get_backend_name() != "postgresql":
        raise SettingsError(
            f"{OPTION}={mode} is for PostgreSQL, not for {url.get_backend_name()}; remove it"
        )
    if mode not in MODES:
        raise SettingsError(
            f"{OPTION}={mode!r} is unknown; write {OPTION}=transaction, {OPTION}=session, or "
            "nothing to have each connection tested"
        )


def without_option(url: URL) -> URL:
    """Return the URL as a driver accepts it."""
    return url.difference_update_query([OPTION])


# --- connections of our own ---------------------------------------------------------------------

# psycopg prepares repeated statements under names that every client uses. Through a pooler that was
# not recognised, such a name could mean a statement of another client. Our own names cannot.
PSYCOPG: Mapping[str, Any] = {"prepare_threshold": None}
"""Arguments for psycopg in each engine of our own."""


def prepare_connections(engine: sa.Engine, url: URL, session: Mapping[str, str]) -> None:
    """Test each new connection; apply the settings of `session` unless it is pooled."""
    mode = url.query.get(OPTION)

    @event.listens_for(engine, "connect")
    def connected(dbapi: Any, record: Any) -> None:
        driver = getattr(dbapi, "driver_connection", dbapi)  # SQLAlchemy wraps an async one
        cursor = dbapi.cursor()
        try:
            own = "true" if mode == "session" else _is_own_session(driver)
            pooled = mode == "transaction" or not _set(cursor, session, own)
            if pooled:
                _try_transaction(driver, cursor)
            dbapi.commit()
        except Exception as error:
            raise (statement_pooling(error) or error) from error
        cursor.close()
        record.info[POOLED] = pooled


def _is_own_session(driver: Any) -> str:
    return f"pg_backend_pid() = {driver.info.backend_pid}"


def _set(cursor: Any, session: Mapping[str, str], condition: str) -> bool:
    """Apply the settings if the condition holds; return whether it does.

    One statement does both, so that the settings cannot reach another client of a pooler.
    """
    sets = [f"set_config('{name}', '{value}', false)" for name, value in session.items()]
    cursor.execute(f"SELECT {', '.join(sets) or '1'} WHERE {condition}")
    return cursor.fetchone() is not None


def _try_transaction(driver: Any, cursor: Any) -> None:
    """Begin and end a transaction, which PgBouncer refuses in statement pooling mode."""
    cursor.execute("BEGIN" if driver.autocommit else "SELECT 1")  # psycopg begins by itself
    cursor.execute("COMMIT")


STATEMENT_POOLING = "transaction blocks not allowed in statement pooling mode"
"""What PgBouncer answers to BEGIN in that mode."""


def statement_pooling(error: BaseException) -> SettingsError | None:
    """Return the refusal to raise if PgBouncer has refused a transaction."""
    if STATEMENT_POOLING not in str(error):
        return None
    return SettingsError(
        "the connection goes through PgBouncer in statement pooling mode, which allows no "
        "transactions; set pool_mode = transaction for this database in pgbouncer.ini"
    )


# --- connections of an application's engine -----------------------------------------------------


def is_pooled(connection: sa.Connection) -> bool:
    """Return whether a transaction pooler serves this psycopg connection; tested once for each."""
    known: bool | None = connection.info.get(POOLED)
    if known is None:
        driver: Any = connection.connection.driver_connection
        [found] = driver.execute(_test(driver), prepare=False).fetchone()
        known = connection.info[POOLED] = not found
    return known


async def is_pooled_async(connection: AsyncConnection) -> bool:
    """The same, for an async connection."""
    info = (await connection.get_raw_connection()).info
    known: bool | None = info.get(POOLED)
    if known is None:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        cursor = await driver.execute(_test(driver), prepare=False)
        [found] = await cursor.fetchone()
        known = info[POOLED] = not found
    return known


def _test(driver: Any) -> str:
    return f"SELECT {_is_own_session(driver)}"
