"""Semel as its README shows it: a template as the key, everything else as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import semel
from bench.measure import Body, Calls, Contestant, guarded
from semel.stores import MemoryStore, SQLiteStore


def _redis(url: str) -> Any:
    return semel.connect(url)


def _postgres(url: str) -> Any:
    from semel.stores.sql import SQLStore

    return SQLStore(url, create=True)


def _sqlite(folder: Path) -> Any:
    return SQLiteStore(folder / "semel.db")


def _memory(_: Any) -> Any:
    return MemoryStore()


def _sync(connect: Callable[[Any], Any]) -> Contestant:
    @contextmanager
    def opened(place: Any) -> Iterator[Calls]:
        body, store = Body(), connect(place)

        @semel.idempotent(key="charge:{n}", store=store)
        def charge(n: int, amount: int) -> dict[str, int]:
            return body.charge(n, amount)

        def call(n: int) -> dict[str, int]:
            return charge(n, 5)

        body.check_sync(call)
        yield guarded(call)
        store.close()

    return Contestant("semel", "us", opened)


def _async(connect: Callable[[Any], Any]) -> Contestant:
    @asynccontextmanager
    async def opened(place: Any) -> AsyncIterator[Calls]:
        body, store = Body(), connect(place)

        @semel.idempotent(key="charge:{n}", store=store)
        async def charge(n: int, amount: int) -> dict[str, int]:
            return body.charge(n, amount)

        async def call(n: int) -> dict[str, int]:
            return await charge(n, 5)

        await body.check(call)
        yield guarded(call)
        await store.aclose()

    return Contestant("semel", "us", opened)


REDIS_SYNC, REDIS_ASYNC = _sync(_redis), _async(_redis)
POSTGRES_SYNC, POSTGRES_ASYNC = _sync(_postgres), _async(_postgres)
SQLITE_SYNC = _sync(_sqlite)
MEMORY_SYNC, MEMORY_ASYNC = _sync(_memory), _async(_memory)
