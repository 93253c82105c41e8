"""Hearing writers in other processes: LISTEN on PostgreSQL, over a connection of its own."""

from __future__ import annotations

import logging
from typing import Any

from sqlalchemy import URL

from semel.colour import ASYNC, Waiter
from semel.errors import SettingsError
from semel.stores.sql.faults import LONGEST_PAUSE_S
from semel.stores.sql.lines import open_async_engine
from semel.stores.sql.outbox_writing import CHANNEL

log = logging.getLogger("semel")

# After so long without a word the server is asked whether it is still there.
QUIET_S = 30.0


async def hear(url: URL, bell: Waiter) -> None:
    """Ring for every word, until cancelled. A connection that breaks is made anew."""
    try:
        engine = open_async_engine(url)
    except SettingsError as error:
        log.warning("semel: nobody listens for NOTIFY, %s", error)
        return
    try:
        while True:
            try:
                await _hear(engine, bell)
            except Exception as error:  # noqa: BLE001 - whatever it is: this is only a hint
                log.info("semel: listening for NOTIFY was interrupted: %s", error)
                await ASYNC.sleep(LONGEST_PAUSE_S)
    finally:
        await engine.dispose()


async def _hear(engine: Any, bell: Waiter) -> None:
    async with engine.connect() as connection:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        await driver.execute(f"LISTEN {CHANNEL}")
        bell.ring()  # for what was said before
        while True:
            async for _ in driver.notifies(timeout=QUIET_S):
                bell.ring()
            await driver.execute("SELECT 1")
