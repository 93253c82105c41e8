"""The floors: what the same work costs with the bare commands, and nothing around them.

A floor keeps less than a guard has to: no key is derived, no result encoded, no lease renewed, no
answer told from another. It is what no guard on this driver, this server and this machine can
beat with one call at a time. The second floor of the concurrent scenarios shows what is left when
calls share their round trips.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.measure import Calls, Contestant

RESULT = json.dumps({"id": 0, "amount": 5}).encode()
TOKEN = "0123456789abcdef0123456789abcdef"

# As many as idemkit's pool has by default.
CONNECTIONS = 20

# --- Redis --------------------------------------------------------------------------------------

COMPLETE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  return 1
end
return 0
"""


def _claim(n: int) -> tuple[str, str, str, str, str, str, str]:
    return "SET", f"floor:{n}", TOKEN, "NX", "GET", "PX", "30000"


def _complete(sha: str, n: int) -> tuple[str, str, str, str, str, bytes, str]:
    return "EVALSHA", sha, "1", f"floor:{n}", TOKEN, RESULT, "86400000"


@contextmanager
def redis_py(url: str) -> Iterator[Calls]:
    import redis

    with closing(redis.Redis.from_url(url)) as client:
        sha = str(client.script_load(COMPLETE))

        def first(n: int) -> None:
            client.execute_command(*_claim(n))
            client.execute_command(*_complete(sha, n))

        def replay(n: int) -> Any:
            return client.execute_command(*_claim(n))

        yield Calls(first, replay)


@asynccontextmanager
async def redis_py_async(url: str) -> AsyncIterator[Calls]:
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(url) as client:
        sha = str(await client.script_load(COMPLETE))

        async def first(n: int) -> None:
            await client.execute_command(*_claim(n))
            await client.execute_command(*_complete(sha, n))

        async def replay(n: int) -> Any:
            return await client.execute_command(*_claim(n))

        yield Calls(first, replay)


class _Pipeline(asyncio.Protocol):
    """Commands of one turn of the event loop leave in one write; replies come back in order."""

    def __init__(self) -> None:
        import hiredis

        self._pack: Any = hiredis.pack_command
        self._reader = hiredis.Reader()
        self._loop = asyncio.get_running_loop()
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            self._asked.popleft().set_result(reply)

    def ask(self, command: tuple[Any, ...]) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        self._asked.append(future)
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(self._pack(command))
        return future

    def _send(self) -> None:
        self.transport.write(b"".join(self._unsent))
        self._unsent.clear()


@asynccontextmanager
async def hiredis_line(url: str) -> AsyncIterator[Callable[[tuple[Any, ...]], Awaitable[Any]]]:
    """Asks over one connection."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, line = await loop.create_connection(_Pipeline, address.hostname, address.port)
    try:
        yield line.ask
    finally:
        line.transport.close()


@asynccontextmanager
async def hiredis_pipeline(url: str) -> AsyncIterator[Calls]:
    async with hiredis_line(url) as ask:
        sha = (await ask(("SCRIPT", "LOAD", COMPLETE))).decode()

        async def first(n: int) -> None:
            await ask(_claim(n))
            await ask(_complete(sha, n))

        async def replay(n: int) -> Any:
            return await ask(_claim(n))

        yield Calls(first, replay)


# --- PostgreSQL ---------------------------------------------------------------------------------

TABLE = """
CREATE TABLE IF NOT EXISTS floor (
    id text PRIMARY KEY, attempt text NOT NULL, lease_until timestamptz NOT NULL, result json
)
"""
CLAIM_ROW = (
    "INSERT INTO floor (id, attempt, lease_until) "
    "VALUES (%s, %s, clock_timestamp() + interval '30 s') ON CONFLICT (id) DO NOTHING RETURNING id"
)
COMPLETE_ROW = "UPDATE floor SET result = %s::json WHERE id = %s AND attempt = %s"
READ_ROW = "SELECT result FROM floor WHERE id = %s"

CLAIM_ROWS = (
    "INSERT INTO floor (id, attempt, lease_until) "
    "SELECT id, %s, clock_timestamp() + interval '30 s' FROM unnest(%s::text[]) AS a (id) "
    "ON CONFLICT (id) DO NOTHING RETURNING id"
)
COMPLETE_ROWS = (
    "UPDATE floor AS f SET result = a.result::json "
    "FROM unnest(%s::text[], %s::text[]) AS a (id, result) "
    "WHERE f.id = a.id AND f.attempt = %s"
)
READ_ROWS = "SELECT id, result FROM floor WHERE id = ANY (%s::text[])"


@contextmanager
def psycopg_sync(url: str) -> Iterator[Calls]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)

        def first(n: int) -> None:
            connection.execute(CLAIM_ROW, (f"{n}", TOKEN)).fetchone()
            connection.execute(COMPLETE_ROW, (RESULT.decode(), f"{n}", TOKEN))

        def replay(n: int) -> Any:
            return connection.execute(READ_ROW, (f"{n}",)).fetchone()

        yield Calls(first, replay)


@asynccontextmanager
async def _pool(url: str, size: int) -> AsyncIterator[asyncio.Queue[Any]]:
    """Connections to be taken and put back: the least a pool can do."""
    import psycopg

    async with AsyncExitStack() as end:
        free: asyncio.Queue[Any] = asyncio.LifoQueue()
        for _ in range(size):
            connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
            await end.enter_async_context(connection)
            free.put_nowait(connection)
        await connection.execute(TABLE)
        yield free


def psycopg_pool(size: int) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Calls]:
        async with _pool(url, size) as free:

            async def fetch(statement: str, *values: str) -> Any:
                connection = await free.get()
                try:
                    cursor = await connection.execute(statement, values)
                    return await cursor.fetchone() if cursor.description else None
                finally:
                    free.put_nowait(connection)

            async def first(n: int) -> None:
                await fetch(CLAIM_ROW, f"{n}", TOKEN)
                await fetch(COMPLETE_ROW, RESULT.decode(), f"{n}", TOKEN)

            async def replay(n: int) -> Any:
                return await fetch(READ_ROW, f"{n}")

            yield Calls(first, replay)

    return opened


def psycopg_rows(rows: int) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Calls]:
        async with _pool(url, 1) as free:
            connection = free.get_nowait()

            async def first(numbers: Sequence[int]) -> None:
                ids = [f"r{n}" for n in numbers]
                await (await connection.execute(CLAIM_ROWS, (TOKEN, ids))).fetchall()
                results = [RESULT.decode()] * len(ids)
                await connection.execute(COMPLETE_ROWS, (ids, results, TOKEN))

            async def replay(numbers: Sequence[int]) -> Any:
                ids = [f"r{n}" for n in numbers]
                return await (await connection.execute(READ_ROWS, (ids,))).fetchall()

            yield Calls(first, replay, rows)

    return opened


# --- SQLite and memory --------------------------------------------------------------------------


@contextmanager
def sqlite_full(folder: Path) -> Iterator[Calls]:
    """With the durability of our store: WAL, and a commit that waits for the disk."""
    with closing(sqlite3.connect(folder / "floor.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(
            "CREATE TABLE floor (id TEXT PRIMARY KEY, attempt TEXT, lease_until REAL, result TEXT)"
        )

        def first(n: int) -> None:
            connection.execute(
                "INSERT OR IGNORE INTO floor VALUES (?, ?, ?, NULL)", (f"{n}", TOKEN, 0.0)
            )
            connection.execute(
                "UPDATE floor SET result = ? WHERE id = ? AND attempt = ?", (RESULT, f"{n}", TOKEN)
            )

        def replay(n: int) -> Any:
            read = "SELECT attempt, result FROM floor WHERE id = ?"
            return connection.execute(read, (f"{n}",)).fetchone()

        yield Calls(first, replay)


def _dictionary() -> tuple[Callable[[int], None], Callable[[int], Any]]:
    kept: dict[str, Any] = {}

    def first(n: int) -> None:
        kept.setdefault(f"{n}", TOKEN)
        kept[f"{n}"] = json.dumps({"id": n, "amount": 5})

    def replay(n: int) -> Any:
        return json.loads(kept[f"{n}"])

    return first, replay


@contextmanager
def dictionary(_: Any) -> Iterator[Calls]:
    first, replay = _dictionary()
    yield Calls(first, replay)


@asynccontextmanager
async def dictionary_async(_: Any) -> AsyncIterator[Calls]:
    first, replay = _dictionary()

    async def first_async(n: int) -> None:
        first(n)

    async def replay_async(n: int) -> Any:
        return replay(n)

    yield Calls(first_async, replay_async)


# --- by scenario --------------------------------------------------------------------------------


def floor(name: str, replay_name: str, opened: Callable[[Any], Any]) -> Contestant:
    return Contestant(name, "floor", opened, replay_name=replay_name)


_TWO, _ONE = "redis-py, SET NX GET + EVALSHA", "redis-py, SET NX GET"
REDIS_SYNC = floor(_TWO, _ONE, redis_py)
REDIS_ASYNC = floor(_TWO, _ONE, redis_py_async)
REDIS_PIPELINE = floor("hiredis, both in a pipeline", "hiredis, a pipeline", hiredis_pipeline)

_TWO, _ONE = "psycopg, INSERT + UPDATE", "psycopg, SELECT"
POSTGRES_SYNC = floor(_TWO, _ONE, psycopg_sync)
POSTGRES_ASYNC = floor(_TWO, _ONE, psycopg_pool(1))
_MANY = f", {CONNECTIONS} connections"
POSTGRES_POOL = floor(_TWO + _MANY, _ONE + _MANY, psycopg_pool(CONNECTIONS))
POSTGRES_ROWS = floor(_TWO + " of 100 rows", _ONE + " of 100 rows", psycopg_rows(100))

SQLITE = floor("sqlite3, INSERT + UPDATE, synchronous=FULL", "sqlite3, SELECT", sqlite_full)
_TWO, _ONE = "a dict and json.dumps", "a dict and json.loads"
MEMORY_SYNC = floor(_TWO, _ONE, dictionary)
MEMORY_ASYNC = floor(_TWO, _ONE, dictionary_async)
