"""Hearing writers in other processes: LISTEN on PostgreSQL, over a connection of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL

from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.stores.sql.faults import LONGEST_PAUSE_S
from semel.stores.sql.lines import CONNECT_WITHIN_S, open_async_engine

log = logging.getLogger("semel")

# After so long without a word the server is asked whether it is still there.
QUIET_S = 30.0


async def hear(
    url: URL, channel: str, begun: Callable[[], None], heard: Callable[[str], None]
) -> None:
    """Call `heard` with every word, until cancelled. A connection that breaks is made anew.

    `begun` is called whenever it begins to listen: anything may have been said before.
    """
    try:
        engine = open_async_engine(url)
    except SettingsError as error:
        log.warning("semel: nobody listens for NOTIFY, %s", error)
        return
    try:
        while True:
            try:
                await _hear(engine, channel, begun, heard)
            except Exception as error:  # noqa: BLE001 - whatever it is: this is only a hint
                log.info("semel: listening for NOTIFY was interrupted: %s", error)
                await ASYNC.sleep(LONGEST_PAUSE_S)
    finally:
        await engine.dispose()


async def _hear(
    engine: Any, channel: str, begun: Callable[[], None], heard: Callable[[str], None]
) -> None:
    async with engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        await driver.execute(f"LISTEN {channel}")
        begun()
        while True:
            async for word in driver.notifies(timeout=QUIET_S):
                heard(word.payload)
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await driver.execute("SELECT 1")
