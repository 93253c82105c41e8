"""Actions a second, in one room and in many, without a door: `Rooms.act` beside the floors.

Everybody takes turns in one process. In one room a floor sends one action after another: what it
compares with is the answer to the one before. We have several users there, who act at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from bench import rooms_floor
from bench.rooms_floor import Act, Sample
from bench.rooms_tally import Tally
from semel.rooms import Rooms
from semel.rooms.requests import kept
from semel.stores.redis import RedisStore
from semel.stores.sql import SQLStore

USERS = 5
ROOMS = 200

Opened = Callable[[str, Sample], AbstractAsyncContextManager[Act]]


@dataclass(frozen=True)
class Entrant:
    """Somebody to be measured: in so many rooms, by so many users in each at the same time."""

    name: str
    role: str
    opened: Opened
    rooms: int = 1
    users: int = 1


@dataclass
class Rates:
    """Actions a second, by round."""

    entrant: Entrant
    by_round: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.by_round)

    def to(self, other: Rates) -> float:
        return statistics.median(a / b for a, b in zip(self.by_round, other.by_round, strict=True))


_numbers = itertools.count(1)


@contextlib.asynccontextmanager
async def rooms_at(url: str, name: str) -> AsyncIterator[Rooms]:
    store = SQLStore(url, create=True) if url.startswith("postgresql") else RedisStore(url)
    try:
        async with Rooms(store, Tally(), name=name) as rooms:
            yield rooms
    finally:
        await store.aclose()


@contextlib.asynccontextmanager
async def semel(url: str, _sample: Sample) -> AsyncIterator[Act]:
    async with rooms_at(url, f"tally-{next(_numbers)}") as rooms:

        async def act(room: int, user: int) -> None:
            number = next(_numbers)
            action = {"actionType": "add", "note": f"@{number:016d}@"}
            request_id = f"client-{number:013d}"
            reply = await rooms.act(f"room-{room}", f"user-{user}", request_id, action)
            if not reply.success or reply.cached:
                raise RuntimeError(f"an action was answered {reply}")

        yield act


async def sample_of(url: str) -> Sample:
    """What the last of a few actions has written, when every user has added something."""
    async with rooms_at(url, "sample") as rooms:
        for n in range(2 * USERS):
            action = {"actionType": "add", "note": f"@{n:016d}@"}
            reply = await rooms.act("room-1", f"user-{n % USERS}", f"client-{n:013d}", action)
        stream = rooms.stream_of("room-1")
        page, snapshot = await rooms.log.read(stream), await rooms.log.load(stream)
    assert snapshot.state is not None
    return Sample(page.entries[-1].data, snapshot.state, kept(reply))


# --- who ----------------------------------------------------------------------------------------

_REDIS_PY = "redis-py, EVALSHA"
_HIREDIS = "hiredis, EVALSHA"
_ROWS = "psycopg, a transaction of three statements"
_ROW = "psycopg, all in one statement"

REDIS_ONE = (
    Entrant(f"{_REDIS_PY}, one after another", "floor", rooms_floor.redis_py),
    Entrant(f"{_HIREDIS}, one after another", "floor", rooms_floor.hiredis),
    Entrant(
        f"{_HIREDIS}, {USERS} at once, positions foreseen",
        "floor",
        rooms_floor.hiredis_foreseen,
        users=USERS,
    ),
    Entrant("semel, one user", "us", semel),
    Entrant(f"semel, {USERS} users at once", "us", semel, users=USERS),
)
REDIS_MANY = (
    Entrant(f"{_REDIS_PY}, {ROOMS} connections", "floor", rooms_floor.redis_py, ROOMS),
    Entrant(f"{_HIREDIS}, a pipeline", "floor", rooms_floor.hiredis, ROOMS),
    Entrant("semel, one user in each", "us", semel, ROOMS),
    Entrant(f"semel, {USERS} users in each", "us", semel, ROOMS, USERS),
)
POSTGRES_ONE = (
    Entrant(f"{_ROWS}, one after another", "floor", rooms_floor.psycopg_rows(at_once=False)),
    Entrant(f"{_ROW}, one after another", "floor", rooms_floor.psycopg_rows(at_once=True)),
    Entrant("semel, one user", "us", semel),
    Entrant(f"semel, {USERS} users at once", "us", semel, users=USERS),
)
_MANY = f"{rooms_floor.CONNECTIONS} connections"
POSTGRES_MANY = (
    Entrant(f"{_ROWS}, {_MANY}", "floor", rooms_floor.psycopg_rows(at_once=False), ROOMS),
    Entrant(f"{_ROW}, {_MANY}", "floor", rooms_floor.psycopg_rows(at_once=True), ROOMS),
    Entrant("semel, one user in each", "us", semel, ROOMS),
    Entrant(f"semel, {USERS} users in each", "us", semel, ROOMS, USERS),
)


# --- how ----------------------------------------------------------------------------------------


async def _work(act: Act, room: int, user: int, until: float) -> int:
    done = 0
    while time.perf_counter() < until:
        await act(room, user)
        done += 1
    return done


async def _block(act: Act, entrant: Entrant, seconds: float) -> float:
    began = time.perf_counter()
    everybody = [(room, user) for room in range(entrant.rooms) for user in range(entrant.users)]
    done = await asyncio.gather(
        *(_work(act, room, user, began + seconds) for room, user in everybody)
    )
    return sum(done) / (time.perf_counter() - began)


async def run(
    url: str, entrants: Sequence[Entrant], *, rounds: int, seconds: float
) -> tuple[list[Rates], Sample]:
    sample = await sample_of(url)
    found = [Rates(entrant) for entrant in entrants]
    async with contextlib.AsyncExitStack() as end:
        acts = [await end.enter_async_context(e.opened(url, sample)) for e in entrants]
        for turn in range(-1, rounds):
            order = list(range(len(entrants)))
            first = turn % len(order)
            for n in order[first:] + order[:first]:
                rate = await _block(acts[n], entrants[n], seconds)
                if turn >= 0:  # the one before pays for connections, scripts and first entries
                    found[n].by_round.append(rate)
    return found, sample
