"""The processes of the example. Whoever ends is started again; a worker gets a new name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent

# Long enough to see on the page that somebody is missing.
PAUSE_S = 0.3

END_WITHIN_S = 10.0


class Crew:
    """Workers, and others by their names: files to be run, with arguments."""

    def __init__(self, workers: int, **others: Sequence[str]) -> None:
        self.workers: dict[str, asyncio.subprocess.Process] = {}
        self._others: dict[str, asyncio.subprocess.Process] = {}
        self._commands = others
        self._count = workers
        self._numbers = itertools.count(1)
        self._keeping: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._keeping = [
            *(asyncio.create_task(self._keep(name)) for name in self._commands),
            *(asyncio.create_task(self._keep_worker()) for _ in range(self._count)),
        ]

    def kill(self, name: str) -> bool:
        """As if its machine was gone. False when it is not there."""
        return killed(self._others.get(name))

    def kill_worker(self, name: str) -> bool:
        return killed(self.workers.get(name))

    async def end(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        running = [*self.workers.values(), *self._others.values()]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        await asyncio.gather(*(ended(process) for process in running))

    async def _keep(self, name: str) -> None:
        while True:
            process = self._others[name] = await started(self._commands[name])
            await process.wait()
            await asyncio.sleep(PAUSE_S)

    async def _keep_worker(self) -> None:
        while True:
            name = f"w{next(self._numbers)}"
            words = (str(HERE / "worker.py"),)
            process = self.workers[name] = await started(words, SCAN_WORKER=name)
            await process.wait()
            del self.workers[name]
            await asyncio.sleep(PAUSE_S)


async def started(words: Sequence[str], **more: str) -> asyncio.subprocess.Process:
    # In a session of its own: Ctrl-C is for us, and we tell the others.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "leash.py"), *words),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **more},
    )


def killed(process: asyncio.subprocess.Process | None) -> bool:
    if process is None or process.returncode is not None:
        return False
    process.kill()
    return True


async def ended(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
