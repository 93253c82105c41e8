"""The servers, which share one listening socket. Whoever ends is started again, with a new name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import sys
from pathlib import Path

HERE = Path(__file__).parent

# Long enough to see on the page that somebody is missing.
PAUSE_S = 0.3

END_WITHIN_S = 10.0


class Crew:
    """So many servers behind one socket. A connection goes to whoever takes it first."""

    def __init__(self, count: int, listening: socket.socket) -> None:
        self._count = count
        self._listening = listening
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._numbers = itertools.count(1)

    async def run(self, stopped: asyncio.Event) -> None:
        """Until it is told to stop; then everybody goes."""
        keeping = [asyncio.create_task(self._keep()) for _ in range(self._count)]
        await stopped.wait()
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.gather(*map(ended, self._running.values()))

    async def _keep(self) -> None:
        while True:
            name = f"s{next(self._numbers)}"
            process = self._running[name] = await started(name, self._listening)
            await process.wait()
            del self._running[name]
            await asyncio.sleep(PAUSE_S)


async def started(name: str, listening: socket.socket) -> asyncio.subprocess.Process:
    # In a session of its own: Ctrl-C is for us, and we tell the others.
    number = listening.fileno()
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "leash.py"), str(HERE / "server.py"), str(number)),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=[number],
        env={**os.environ, "POKER_SERVER": name},
    )


async def ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
