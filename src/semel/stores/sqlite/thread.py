"""Where async callers' changes wait for the disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Thread:
    """One thread, made on first use. A child of a fork gets one of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._pool = self._new()

    @staticmethod
    def _new() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="semel-sqlite")

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._pid != os.getpid():
            self._pid, self._pool = os.getpid(), self._new()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def close(self) -> None:
        """What was sent before is carried out first."""
        pool, self._pool = self._pool, self._new()
        if self._pid == os.getpid():
            await asyncio.to_thread(pool.shutdown)
