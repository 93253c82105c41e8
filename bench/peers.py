"""The peers, each as its own documentation says, with the store it offers for the scenario.

Nobody is handicapped: scripts are loaded and connections open before anything is timed, what is
written to the log is turned off, and powertools gets the Lambda context it expects.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from bench.measure import Body, Calls, Contestant, guarded

for _chatty in ("idemkit", "exactly_once", "dbos", "aws_lambda_powertools"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="idemkit: ")


# --- idemkit ------------------------------------------------------------------------------------


def _idemkit_redis(url: str) -> Any:
    from idemkit import RedisBackend

    return RedisBackend.from_url(url)


def _idemkit_postgres(url: str) -> Any:
    from idemkit import PostgresBackend

    return PostgresBackend.from_url(url)


def _idemkit_memory(_: Any) -> Any:
    from idemkit import InMemoryBackend

    return InMemoryBackend(max_size=10_000_000)


def _idemkit_config() -> Any:
    from idemkit import MethodConfig

    return MethodConfig(key_fields=["n", "amount"])


def _make_idemkit_table(url: str) -> None:
    """Like `idemkit init-pg`, on a thread of its own: the caller may be in an event loop."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from idemkit.backends.postgres import init_pg

    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(init_pg(url))).result()


def _idemkit_sync(connect: Callable[[Any], Any]) -> Contestant:
    @contextmanager
    def opened(place: Any) -> Iterator[Calls]:
        from idemkit import idempotent_sync
        from idemkit.core.sync_bridge import run_sync

        if connect is _idemkit_postgres:
            _make_idemkit_table(place)
        body, backend = Body(), connect(place)

        @idempotent_sync(backend=backend, config=_idemkit_config())
        def charge(*, n: int, amount: int) -> dict[str, int]:
            return body.charge(n, amount)

        def call(n: int) -> Any:
            return charge(n=n, amount=5)

        body.check_sync(call)
        yield guarded(call)
        run_sync(backend.aclose())

    return Contestant("idemkit", "peer", opened)


def _idemkit_async(connect: Callable[[Any], Any]) -> Contestant:
    @asynccontextmanager
    async def opened(place: Any) -> AsyncIterator[Calls]:
        from idemkit import idempotent

        if connect is _idemkit_postgres:
            _make_idemkit_table(place)
        body = Body()
        async with connect(place) as backend:

            @idempotent(backend=backend, config=_idemkit_config())
            async def charge(*, n: int, amount: int) -> dict[str, int]:
                return body.charge(n, amount)

            async def call(n: int) -> Any:
                return await charge(n=n, amount=5)

            await body.check(call)
            yield guarded(call)

    return Contestant("idemkit", "peer", opened)


# --- exactly-once -------------------------------------------------------------------------------


def _once_redis(url: str) -> Any:
    from exactly_once import Store

    return Store.redis(url)


def _once_postgres(url: str) -> Any:
    from exactly_once import Store

    return Store.postgres(url)


def _once_sqlite(folder: Path) -> Any:
    from exactly_once import Store

    return Store.sqlite(str(folder / "effects.db"))


def _once_memory(_: Any) -> Any:
    from exactly_once import Store

    return Store.memory()


def _once_sync(connect: Callable[[Any], Any], note: str = "") -> Contestant:
    @contextmanager
    def opened(place: Any) -> Iterator[Calls]:
        from exactly_once import once

        body, store = Body(), connect(place)

        @once(store, key=lambda n, **_: f"charge:{n}")
        def charge(n: int, amount: int) -> dict[str, int]:
            return body.charge(n, amount)

        def call(n: int) -> Any:
            return charge(n, amount=5)

        body.check_sync(call)
        yield guarded(call)
        store.close()

    return Contestant("exactly-once", "peer", opened, note)


def _once_async(connect: Callable[[Any], Any], note: str = "") -> Contestant:
    @asynccontextmanager
    async def opened(place: Any) -> AsyncIterator[Calls]:
        from exactly_once import once

        body, store = Body(), connect(place)

        @once(store, key=lambda n, **_: f"charge:{n}")
        async def charge(n: int, amount: int) -> dict[str, int]:
            return body.charge(n, amount)

        async def call(n: int) -> Any:
            return await charge(n, amount=5)

        await body.check(call)
        yield guarded(call)
        await store.aclose()
        store.close()

    return Contestant("exactly-once", "peer", opened, note)


# --- powertools ---------------------------------------------------------------------------------


class _LambdaContext:
    """What Lambda hands to every handler."""

    def get_remaining_time_in_millis(self) -> int:
        return 30_000


@contextmanager
def _powertools(url: str) -> Iterator[Calls]:
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    config = IdempotencyConfig(event_key_jmespath="n")
    config.register_lambda_context(_LambdaContext())  # type: ignore[arg-type]
    body, layer = Body(), CachePersistenceLayer(url=url)

    @idempotent_function(data_keyword_argument="order", config=config, persistence_store=layer)
    def charge(order: dict[str, int]) -> dict[str, int]:
        return body.charge(order["n"], order["amount"])

    def call(n: int) -> Any:
        return charge(order={"n": n, "amount": 5})

    body.check_sync(call)
    yield guarded(call)


# --- dbos ---------------------------------------------------------------------------------------


@contextmanager
def _dbos_running(url: str) -> Iterator[Any]:
    """DBOS is one per process: it is launched for the scenario, and taken down after it."""
    from dbos import DBOS, DBOSConfig

    config: DBOSConfig = {
        "name": "bench",
        "system_database_url": url,
        "log_level": "ERROR",
        "application_version": "1",
    }
    DBOS(config=config)
    try:
        yield DBOS
    finally:
        DBOS.destroy(destroy_registry=True)


def _dbos_url(place: Any) -> str:
    return f"sqlite:///{place / 'dbos.sqlite'}" if isinstance(place, Path) else str(place)


@contextmanager
def _dbos_sync(place: Any) -> Iterator[Calls]:
    from dbos import SetWorkflowID

    body = Body()
    with _dbos_running(_dbos_url(place)) as dbos:

        @dbos.workflow(name="charge")
        def charge(n: int, amount: int) -> dict[str, int]:
            return body.charge(n, amount)

        dbos.launch()

        def call(n: int) -> Any:
            with SetWorkflowID(f"charge:{n}"):
                return charge(n, 5)

        body.check_sync(call)
        yield guarded(call)


@asynccontextmanager
async def _dbos_async(place: Any) -> AsyncIterator[Calls]:
    from dbos import SetWorkflowID

    body = Body()
    with _dbos_running(_dbos_url(place)) as dbos:

        @dbos.workflow(name="charge")
        async def charge(n: int, amount: int) -> dict[str, int]:
            return body.charge(n, amount)

        dbos.launch()

        async def call(n: int) -> Any:
            with SetWorkflowID(f"charge:{n}"):
                return await charge(n, 5)

        await body.check(call)
        yield guarded(call)


# --- by scenario --------------------------------------------------------------------------------


def unable(name: str, why: str) -> Contestant:
    """A peer that offers nothing for this scenario."""
    return Contestant(name, "peer", None, why)


IDEMKIT, ONCE, POWERTOOLS, DBOS = "idemkit", "exactly-once", "powertools", "dbos"

REDIS_SYNC = [
    _idemkit_sync(_idemkit_redis),
    _once_sync(_once_redis),
    Contestant(POWERTOOLS, "peer", _powertools),
    unable(DBOS, "no Redis store"),
]
REDIS_ASYNC = [
    _idemkit_async(_idemkit_redis),
    _once_async(_once_redis),
    unable(POWERTOOLS, "sync only"),
    unable(DBOS, "no Redis store"),
]
POSTGRES_SYNC = [
    _idemkit_sync(_idemkit_postgres),
    _once_sync(_once_postgres),
    unable(POWERTOOLS, "no SQL store"),
    Contestant(DBOS, "peer", _dbos_sync),
]
POSTGRES_ASYNC = [
    _idemkit_async(_idemkit_postgres),
    _once_async(_once_postgres, "one connection for all callers"),
    unable(POWERTOOLS, "no SQL store"),
    Contestant(DBOS, "peer", _dbos_async),
]
SQLITE_SYNC = [
    unable(IDEMKIT, "no SQLite store"),
    _once_sync(_once_sqlite, "synchronous=NORMAL, so that no commit waits for the disk"),
    unable(POWERTOOLS, "no SQLite store"),
    Contestant(DBOS, "peer", _dbos_sync),
]
MEMORY_SYNC = [
    _idemkit_sync(_idemkit_memory),
    _once_sync(_once_memory),
    unable(POWERTOOLS, "no memory store"),
    unable(DBOS, "no memory store"),
]
MEMORY_ASYNC = [
    _idemkit_async(_idemkit_memory),
    _once_async(_once_memory),
    unable(POWERTOOLS, "sync only"),
    unable(DBOS, "no memory store"),
]
