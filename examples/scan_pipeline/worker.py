"""A worker: takes scans from the tray, one at a time, until it is told to end, or dies."""

from __future__ import annotations

import asyncio
import logging
import signal

from pieces import LEASE_S
from pipeline import events, scan, store
from tray import STREAM, Scan, Tray

from semel.errors import InProgressError, SemelError

log = logging.getLogger("worker")


async def main() -> None:
    tray, bell = Tray(store), store.bell()
    stopped, rung = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await bell.listen(STREAM, rung.set)
    while not stopped.is_set():
        rung.clear()
        for waiting in await tray.look():
            if not stopped.is_set() and await is_finished(waiting):
                await tray.take_out(waiting)
        await either(rung, stopped, within_s=LEASE_S / 2)  # somebody may have died by then
    await bell.aclose()
    await events.aclose()
    await store.aclose()


async def is_finished(waiting: Scan) -> bool:
    """Do it, unless somebody does."""
    try:
        await scan(waiting.id, waiting.picture)
    except InProgressError:
        return False
    except SemelError as error:  # somebody took over while we were frozen, or the store is away
        log.warning("%s: %s", waiting.id, error)
        return False
    return True


async def either(*signs: asyncio.Event, within_s: float) -> None:
    waiting = [asyncio.create_task(sign.wait()) for sign in signs]
    await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main())
