"""The ledger as a directory of readable files, for one machine without a database.

    ledger/semel.json           says whose directory this is, and the format
    ledger/ab/<id>.json         a record: one line of JSON, then one line with its checksum
    ledger/ab/<id>.next         a change on its way in
    ledger/ab/floor.json        the highest fence that was ever deleted here

A change is written to `.next`, made durable there together with its name, and only then renamed
over the record. So whoever can see a record sees one that survives a power cut, a replay is one
read without a lock, and an error on the way in leaves the old record as it was. A process that
dies in between leaves a whole `.next`, which the next writer finishes, or a torn one, which it
drops.

A shard's directory is its own lock: `flock` on a descriptor opened for this one change keeps out
other threads and other processes alike, and the kernel lets go when the holder dies. The easy
mistake is to rely on closing it: a forked child shares the descriptor and would keep the lock.

Not for Windows (no `flock`) and not for network file systems (no `flock` on directories).

    disk      files and directories by system calls; here their order is the promise
    form      a record as bytes
    shard     one directory, locked
    records   the verbs over all of them
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeAlias

from semel.colour import Colour
from semel.ports import Clock, StoreLedger
from semel.stores.clock import SystemClock
from semel.stores.file.disk import prepare
from semel.stores.file.records import Files
from semel.stores.rules import Claiming, Operation
from semel.stores.verbs import OnDisk

__all__ = ["FileStore"]

# Async callers' changes wait for the disk here. The kernel commits concurrent fsyncs together;
# more threads than this gain nothing on one disk.
THREADS: Final = 8

Call: TypeAlias = Callable[..., Awaitable[Any]]


class FileStore:
    """Records as files below `path`. Serves both colours; shared by the processes of one machine.

    `fsync=False` gives up surviving a power cut for speed; a killed process still loses nothing.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Clock | None = None, fsync: bool = True
    ) -> None:
        self._path = os.path.abspath(os.fspath(path))
        prepare(self._path)
        self._files = Files(self._path, clock or SystemClock(), fsync)
        self._threads = _Threads()
        self._sync = _FileLedger(self._files, _here)
        self._async = _FileLedger(self._files, self._threads.run)

    def ledger(self, colour: Colour) -> StoreLedger:
        """Both colours; changes of the async one wait for the disk on threads of the store."""
        return self._sync if colour.name == "sync" else self._async

    def close(self) -> None:
        """Nothing is held between two sync calls."""

    async def aclose(self) -> None:
        """End the threads; a later call starts new ones."""
        self._threads.close()

    def __repr__(self) -> str:
        return f"FileStore({self._path!r})"


async def _here(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


class _Threads:
    """Where async callers' changes wait for the disk. A child of a fork gets threads of its own.

    Not the event loop's own executor: that one belongs to the application, and a renewal behind
    thirty slow uploads would come too late.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._pool = self._new()

    @staticmethod
    def _new() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="semel-file")

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._pid != os.getpid():
            self._pid, self._pool = os.getpid(), self._new()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        pool, self._pool = self._pool, self._new()
        pool.shutdown(wait=False)


class _FileLedger(OnDisk):
    """Files of a directory."""

    def __init__(self, files: Files, call: Call) -> None:
        super().__init__(files, call)
        self._files = files

    async def perform(self, op: Operation) -> Any:
        if isinstance(op, Claiming) and (answer := self._files.replay(op)) is not None:
            return answer
        return await self._call(self._files.perform, op)
