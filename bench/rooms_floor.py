"""The floors of an action: what a room's log has to do for it, by hand, and nothing around it.

On Redis that is the very script that appends, sent with EVALSHA: it looks whether the request was
there, compares the position, adds the entry, replaces the state, keeps the reply, trims and rings.
On PostgreSQL it is one transaction: the version is compared and raised together with the state,
which locks the room's row, the entry is inserted, and so is the request with its reply.

Entry, state and reply are those of an action of the room that is measured, to the byte. Nobody
reads an action, applies rules, or makes them up: they are the same bytes each time. Nothing is
tried again, and an answer that is not as expected ends the measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import psycopg
import redis.asyncio

from bench.floor import CONNECTIONS, hiredis_line
from semel.entries import beginning
from semel.stores.redis.log_words import APPEND

Act = Callable[[int, int], Awaitable[None]]
"""An action in a room, by its number, of one of its users."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Sample:
    """What one action writes."""

    entry: bytes
    state: bytes
    reply: bytes


# --- Redis --------------------------------------------------------------------------------------

# Ids are remembered for five minutes, a thousand entries are kept, and whoever listens is told.
KEPT = ("300000000", "", "", "1000", "", "0", "PUBLISH")


class Streams:
    """The streams of some rooms, and where each of them ends."""

    def __init__(self, sha: str, sample: Sample) -> None:
        self._sha = sha
        self._sample = sample
        self._ends: dict[int, str] = {}
        self._run = next(_numbers)

    def _name(self, room: int) -> str:
        return f"floor-{self._run}-{room}"

    def command(self, room: int, mark: str) -> tuple[Any, ...]:
        """The words of one append, as EVALSHA takes them."""
        name, sample = self._name(room), self._sample
        start = beginning(name)
        keys = (f"floor:{{{name}}}:meta", f"floor:{{{name}}}:log", f"floor:{{{name}}}:state")
        expect = self._ends.get(room) or str(start)
        what = (mark, f"6:user-1:{mark[20:40]}", "1", sample.entry, expect, sample.reply, "0")
        return "EVALSHA", self._sha, "3", *keys, start.tag, *KEPT, *what, sample.state

    def answered(self, room: int, said: Any) -> None:
        self._ends[room] = position_of(said)

    def foresee(self, room: int, mark: str) -> None:
        """Where it will stand, before anybody has answered."""
        offset, _, tag = (self._ends.get(room) or str(beginning(self._name(room)))).partition(".")
        digest = hashlib.sha1((tag + mark).encode(), usedforsecurity=False).hexdigest()
        self._ends[room] = f"{int(offset) + 1}.{digest[:12]}"


def position_of(said: Any) -> str:
    """What an append is answered, if all went well."""
    try:
        return str(said.decode())
    except AttributeError:
        raise RuntimeError(f"an append was answered {said!r}") from None


def _mark() -> str:
    """What tells a request and its outcome from others: two digests, which nobody makes here."""
    return f"{next(_numbers):040x}{0:040x}"


@contextlib.asynccontextmanager
async def redis_py(url: str, sample: Sample) -> AsyncIterator[Act]:
    """One after another in each room; a connection for everybody who asks at the same time."""
    async with redis.asyncio.Redis.from_url(url, max_connections=1000) as client:
        streams = Streams(str(await client.script_load(APPEND.source)), sample)

        async def act(room: int, _user: int) -> None:
            said = await client.execute_command(*streams.command(room, _mark()))
            streams.answered(room, said)

        yield act


@contextlib.asynccontextmanager
async def hiredis(url: str, sample: Sample) -> AsyncIterator[Act]:
    """The same over one connection, by hand; what is asked in one turn leaves in one write."""
    async with hiredis_line(url) as ask:
        streams = Streams((await ask(("SCRIPT", "LOAD", APPEND.source))).decode(), sample)

        async def act(room: int, _user: int) -> None:
            streams.answered(room, await ask(streams.command(room, _mark())))

        yield act


@contextlib.asynccontextmanager
async def hiredis_foreseen(url: str, sample: Sample) -> AsyncIterator[Act]:
    """Nobody waits for the answer to the one before: where it stands is known without it."""
    async with hiredis_line(url) as ask:
        streams = Streams((await ask(("SCRIPT", "LOAD", APPEND.source))).decode(), sample)

        async def act(room: int, _user: int) -> None:
            mark = _mark()
            command = streams.command(room, mark)
            streams.foresee(room, mark)
            position_of(await ask(command))

        yield act


# --- PostgreSQL ---------------------------------------------------------------------------------

TABLES = """
CREATE TABLE IF NOT EXISTS floor_room (
    room text PRIMARY KEY, version bigint NOT NULL, state bytea NOT NULL
);
CREATE TABLE IF NOT EXISTS floor_entry (
    room text, version bigint, at timestamptz NOT NULL, data bytea NOT NULL,
    PRIMARY KEY (room, version)
);
CREATE TABLE IF NOT EXISTS floor_request (
    room text, request text, fingerprint bytea NOT NULL, version bigint NOT NULL,
    reply bytea NOT NULL, until timestamptz NOT NULL, PRIMARY KEY (room, request)
);
"""
ROOM = "INSERT INTO floor_room VALUES (%s, 0, %s) ON CONFLICT DO NOTHING"
RAISE = "UPDATE floor_room SET version = version + 1, state = %s WHERE room = %s AND version = %s"
ENTRY = "INSERT INTO floor_entry VALUES (%s, %s, clock_timestamp(), %s)"
REQUEST = (
    "INSERT INTO floor_request VALUES (%s, %s, %s, %s, %s, clock_timestamp() + interval '5 min')"
)


AT_ONCE = f"""
WITH raised AS ({RAISE} RETURNING room, version),
entered AS (
    INSERT INTO floor_entry SELECT room, version, clock_timestamp(), %s::bytea FROM raised
)
INSERT INTO floor_request
SELECT room, %s::text, %s::bytea, version, %s::bytea, clock_timestamp() + interval '5 min'
FROM raised
"""


class Rows:
    """The rooms' rows, and their versions."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._versions: dict[int, int] = {}
        self._run = next(_numbers)

    def _name(self, room: int) -> str:
        return f"floor-{self._run}-{room}"

    async def begin(self, connection: Any, room: int) -> None:
        if room not in self._versions:
            await connection.execute(ROOM, (self._name(room), b"{}"))
            self._versions[room] = 0

    async def act(self, connection: Any, room: int) -> None:
        """A transaction of three statements, as people write it: five round trips."""
        name, sample, version = self._name(room), self._sample, self._versions[room]
        mark = _mark()
        async with connection.transaction():
            raised = await connection.execute(RAISE, (sample.state, name, version))
            await connection.execute(ENTRY, (name, version + 1, sample.entry))
            request = (name, mark, mark.encode()[:32], version + 1, sample.reply)
            await connection.execute(REQUEST, request)
        self._raised(room, raised)

    async def act_at_once(self, connection: Any, room: int) -> None:
        """The same in one statement, and one round trip."""
        name, sample, version = self._name(room), self._sample, self._versions[room]
        mark = _mark()
        words = (sample.state, name, version, sample.entry, mark, mark.encode()[:32], sample.reply)
        self._raised(room, await connection.execute(AT_ONCE, words))

    def _raised(self, room: int, done: Any) -> None:
        if done.rowcount != 1:
            raise RuntimeError("somebody else has changed the room")
        self._versions[room] += 1


def psycopg_rows(*, at_once: bool) -> Callable[[str, Sample], Any]:
    """Over as many connections as the other floors have."""

    @contextlib.asynccontextmanager
    async def opened(url: str, sample: Sample) -> AsyncIterator[Act]:
        rows = Rows(sample)
        async with contextlib.AsyncExitStack() as end:
            free: asyncio.Queue[Any] = asyncio.LifoQueue()
            for _ in range(CONNECTIONS):
                opening = psycopg.AsyncConnection.connect(url, autocommit=True)
                free.put_nowait(connection := await end.enter_async_context(await opening))
            await connection.execute(TABLES)

            async def act(room: int, _user: int) -> None:
                connection = await free.get()
                try:
                    await rows.begin(connection, room)
                    await (rows.act_at_once if at_once else rows.act)(connection, room)
                finally:
                    free.put_nowait(connection)

            yield act

    return opened
