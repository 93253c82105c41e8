"""Hearing writers in other processes: LISTEN on PostgreSQL, over a connection of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.stores.sql.lines import CONNECT_WITHIN_S, open_async_engine, place
from semel.stores.sql.pooler import is_pooled_async

log = logging.getLogger("semel")

# After so long without a word the server is asked whether it is still there.
QUIET_S = 30.0


# How long until it is tried again to listen: at first, and at most, if that goes on failing.
SOON_S = 0.5
LATER_S = 8.0


class PooledError(Exception):
    """A transaction pooler is between the listener and the server."""


async def hear(
    source: URL | AsyncEngine,
    channel: str,
    begun: Callable[[], None],
    heard: Callable[[str], None],
) -> None:
    """Call `heard` with the payload of every notification, until cancelled; reconnect if needed.

    Returns where LISTEN is impossible: the driver is missing, or the connection goes through a
    transaction pooler, which does not forward notifications. The caller has to poll then.

    `begun` is called whenever it begins to listen: anything may have been said before. An engine
    is its owner's: it makes the connection, and gets back its place in the pool at once.
    """
    try:
        engine = open_async_engine(source) if isinstance(source, URL) else source
    except SettingsError as error:
        log.warning("semel: nobody listens for NOTIFY, %s", error)
        return
    try:
        await _go_on(engine, channel, begun, heard)
    finally:
        if engine is not source:
            await engine.dispose()


async def _go_on(
    engine: AsyncEngine, channel: str, begun: Callable[[], None], heard: Callable[[str], None]
) -> None:
    pause_s, level = SOON_S, logging.WARNING

    def listening() -> None:
        nonlocal pause_s, level
        pause_s, level = SOON_S, logging.INFO
        begun()

    while True:
        try:
            await _hear(engine, channel, listening, heard)
        except PooledError as error:
            log.warning("semel: %s", error)
            return
        except Exception as error:  # noqa: BLE001 - whatever it is: this is only a hint
            log.log(level, "semel: nobody listens for NOTIFY now, readers are late: %s", error)
        level = logging.INFO
        await ASYNC.sleep(pause_s)
        pause_s = min(LATER_S, 2 * pause_s)


async def _hear(
    engine: AsyncEngine, channel: str, begun: Callable[[], None], heard: Callable[[str], None]
) -> None:
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        if await is_pooled_async(connection):
            raise PooledError(
                f"{place(engine.url)} is behind a transaction pooler, where LISTEN does not work; "
                "readers poll instead"
            )
        driver: Any = (await connection.get_raw_connection()).driver_connection
        await connection.run_sync(lambda ours: ours.detach())
        await connection.invalidate()
    async with driver:
        await driver.execute(f"LISTEN {channel}")
        begun()
        while True:
            async for word in driver.notifies(timeout=QUIET_S):
                heard(word.payload)
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await driver.execute("SELECT 1")
