"""What happens as the ledger grows: bytes per record, claims at every size, claims during a sweep.

Every size gets a ledger of its own (a numbered database of one Redis, a database of one
PostgreSQL), so that the sizes can take turns like everybody else. Records are made by the store
itself, with concurrent claims and completions; beyond that, PostgreSQL's rows are copied from one
the store has made, with ids of their own.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.machine import ROOT, Machine
from bench.table import Verdict, micros, rendered
from semel.colour import ASYNC, SYNC
from semel.colour import run as run_sync
from semel.stores.redis import RedisStore
from semel.stores.sql import SQLStore
from semel.values import Key, Outcome, Terms, Won

TERMS = Terms()
OUTCOME = Outcome("value", b'{"id": 1234567, "amount": 5}')
FLAT, FELT = 1.3, 2.0

# Made by the store itself, at its own speed; further rows are copies.
MADE = 100_000
AT_ONCE = 500
COPIED_AT_ONCE = 200_000

CLAIMS, ROUNDS = 100, 21


@dataclass(frozen=True)
class Size:
    """How far to go."""

    records: tuple[int, ...]
    swept: int


SIZES = {
    "quick": Size((1_000, 10_000), 10_000),
    "usual": Size((1_000, 10_000, 100_000, 1_000_000), 1_000_000),
    "full": Size((1_000, 10_000, 100_000, 1_000_000), 1_000_000),
}


@dataclass
class Found:
    """Tables, and what they say about the targets."""

    tables: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=lambda: {"scenario": "volume"})

    @property
    def text(self) -> str:
        return "\n\n".join(self.tables)


def run(machine: Machine, size: Size) -> Found:
    found = Found()
    for engine in (_Redis(machine), _Postgres(machine)):
        with engine.ledgers(size.records) as ledgers:
            _growth(found, engine, ledgers)
    _sweep(found, machine, size.swept)
    return found


# --- records ------------------------------------------------------------------------------------


def key(n: int) -> Key:
    """As a guard makes them: a hash, and the key as written."""
    text = f"charge:{n}"
    return Key(hashlib.sha256(text.encode()).digest(), text, "", "shop.billing.charge")


async def _record(ledger: Any, n: int) -> None:
    won = await ledger.claim(key(n), attempt=f"host:{n}", fingerprint=b"f" * 32, terms=TERMS)
    assert isinstance(won, Won)
    await ledger.complete(won.claim, OUTCOME)


async def _fill(store: Any, numbers: Iterator[int]) -> None:
    ledger = store.ledger(ASYNC)

    async def worker() -> None:
        for n in numbers:
            await _record(ledger, n)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    await store.aclose()


def fill(store: Any, count: int) -> None:
    asyncio.run(_fill(store, iter(range(count))))


class _Redis:
    """One server; each size is one of its numbered databases."""

    name = "Redis"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @contextmanager
    def ledgers(self, sizes: Sequence[int]) -> Iterator[dict[int, Any]]:
        self._machine.empty_redis()
        with ExitStack() as end:
            made: dict[int, Any] = {}
            self.bytes_each = 0.0
            for number, size in enumerate(sizes):
                store = RedisStore(self._machine.redis.url.replace("/0", f"/{number}"))
                before = self._memory()
                fill(store, size)
                self.bytes_each = (self._memory() - before) / size
                made[size] = end.enter_context(closing(store)).ledger(SYNC)
            yield made

    def _memory(self) -> int:
        import redis

        with closing(redis.Redis.from_url(self._machine.redis.url)) as client:
            return int(client.info("memory")["used_memory"])


class _Postgres:
    """One server; each size is a database of it."""

    name = "PostgreSQL"

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @contextmanager
    def ledgers(self, sizes: Sequence[int]) -> Iterator[dict[int, Any]]:
        with ExitStack() as end:
            made: dict[int, Any] = {}
            self.bytes_each = 0.0
            for size in sizes:
                url = self._machine.database()
                store = end.enter_context(closing(SQLStore(url, create=True)))
                fill(store, min(size, MADE))
                if size <= MADE:  # what the store writes, not what a copy takes up
                    self.bytes_each = _postgres_bytes(url) / size
                copy_rows(url, range(MADE, size))
                made[size] = store.ledger(SYNC)
            yield made


def _postgres_bytes(url: str) -> int:
    return int(_one(url, "SELECT pg_total_relation_size('idempotency')"))


def _one(url: str, statement: str) -> Any:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        return (connection.execute(statement.encode()).fetchone() or [None])[0]


def copy_rows(url: str, numbers: range, *, expires: str = "expires_at") -> None:
    """Rows like one the store has made, each with an id of its own."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for start in range(numbers.start, numbers.stop, COPIED_AT_ONCE):
            stop = min(start + COPIED_AT_ONCE, numbers.stop) - 1
            connection.execute(_copying(connection, expires), (start, stop))
        connection.execute("VACUUM ANALYZE idempotency")


def _copying(connection: Any, expires: str) -> Any:
    found = connection.execute("SELECT * FROM idempotency LIMIT 0").description
    own = {
        "id": "sha256(convert_to('charge:' || n, 'UTF8'))",
        "idempotency_key": "'charge:' || n",
        "attempt": "'host:' || n",
        "expires_at": expires,
    }
    columns = [column.name for column in found]
    values = ", ".join(own.get(name, name) for name in columns)
    # Postgres's own names, not a user's.
    return (
        f"INSERT INTO idempotency ({', '.join(columns)}) SELECT {values} "
        "FROM (SELECT * FROM idempotency LIMIT 1) AS one, generate_series(%s::int, %s::int) AS n "
        "ON CONFLICT DO NOTHING"
    ).encode()


# --- claims at every size -----------------------------------------------------------------------


def _growth(found: Found, engine: Any, ledgers: dict[int, Any]) -> None:
    blocks = _take_turns(ledgers)
    smallest = blocks[min(blocks)]
    rows: list[Sequence[str]] = [("records", "µs per claim", "best block", "÷ smallest", "target")]
    for size, times in blocks.items():
        flat = statistics.median(t / s for t, s in zip(times, smallest, strict=True))
        mark = f"≤ {FLAT}: {_reached(flat, FLAT)}" if size == max(blocks) else ""
        each_s = statistics.median(times)
        rows.append((f"{size:,}", micros(each_s), micros(min(times)), f"{flat:.2f}", mark))
    found.tables.append(
        f"### {engine.name}: claims of new keys as the ledger grows\n\n{rendered(rows)}\n\n"
        f"A completed record takes {engine.bytes_each:,.0f} bytes."
    )
    title = f"{engine.name}: a claim among {max(blocks):,} records"
    found.verdicts.append(
        Verdict(title, f"≤ {FLAT} × one among {min(blocks):,}", _reached(flat, FLAT))
    )
    found.plain[engine.name] = {"claim_s": blocks, "bytes_per_record": engine.bytes_each}


def _reached(figure: float, limit: float) -> str:
    return f"{'reached' if figure <= limit else 'not reached'} ({figure:.2f})"


def _take_turns(ledgers: dict[int, Any]) -> dict[int, list[float]]:
    numbers = itertools.count(10_000_000)
    blocks: dict[int, list[float]] = {size: [] for size in ledgers}
    for turn in range(-1, ROUNDS):
        for size, ledger in ledgers.items():
            spent = _claim_block(ledger, [key(n) for n in itertools.islice(numbers, CLAIMS)])
            if turn >= 0:  # the first time pays for connections and plans
                blocks[size].append(spent)
    return blocks


def _claim_block(ledger: Any, keys: list[Key]) -> float:
    gc.collect()
    start = time.perf_counter()
    for each in keys:
        run_sync(ledger.claim(each, attempt="a", fingerprint=b"", terms=TERMS))
    spent = (time.perf_counter() - start) / len(keys)
    for each in keys:
        run_sync(ledger.forget(each.id, force=True))
    return spent


# --- claims during a sweep ----------------------------------------------------------------------

SWEEPER = """
import sys
from semel.colour import SYNC, run
from semel.stores.sql import SQLStore

ledger = SQLStore(sys.argv[1]).ledger(SYNC)
print("ready", flush=True)
sys.stdin.readline()
total = 0
while swept := run(ledger.sweep(1000)):
    total += swept
print(total, flush=True)
"""

IDLE_S = 3.0


def _sweep(found: Found, machine: Machine, count: int) -> None:
    """One process sweeps as fast as it can, another claims, and feels it or does not."""
    url = machine.database()
    with closing(SQLStore(url, create=True)) as store:
        run_sync(_record(store.ledger(SYNC), 0))
        copy_rows(url, range(1, count + 1), expires="clock_timestamp() - interval '1 hour'")
        probe = _Probe(store.ledger(SYNC))
        probe.claim_until(_after(0.5))
        idle = probe.claim_until(_after(IDLE_S))
        during, swept, spent_s = _while_sweeping(url, probe)
        idle += probe.claim_until(_after(IDLE_S))
    _tell_sweep(found, idle, during, swept, spent_s)


def _after(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= until


class _Probe:
    """Claims new keys one after the other, and remembers how long each took."""

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self._numbers = itertools.count(20_000_000)

    def claim_until(self, over: Callable[[], bool]) -> list[float]:
        times = []
        while not over():
            each = key(next(self._numbers))
            start = time.perf_counter()
            run_sync(self._ledger.claim(each, attempt="a", fingerprint=b"", terms=TERMS))
            times.append(time.perf_counter() - start)
        return times


def _while_sweeping(url: str, probe: _Probe) -> tuple[list[float], int, float]:
    sweeper = subprocess.Popen(
        [sys.executable, "-c", SWEEPER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with sweeper:
        assert sweeper.stdin is not None
        assert sweeper.stdout is not None
        sweeper.stdout.readline()
        start = time.perf_counter()
        sweeper.stdin.write("go\n")
        sweeper.stdin.flush()
        times = probe.claim_until(lambda: sweeper.poll() is not None)
        return times, int(sweeper.stdout.read() or 0), time.perf_counter() - start


def _tell_sweep(
    found: Found, idle: list[float], during: list[float], swept: int, spent_s: float
) -> None:
    felt = _p99(during) / _p99(idle)
    rows: list[Sequence[str]] = [("claims", "median µs", "p99 µs", "÷ idle p99", "target")]
    rows.append(("idle", micros(statistics.median(idle)), micros(_p99(idle)), "1.00", ""))
    mark = f"≤ {FELT}: {_reached(felt, FELT)}"
    rows.append(
        (
            "during the sweep",
            micros(statistics.median(during)),
            micros(_p99(during)),
            f"{felt:.2f}",
            mark,
        )
    )
    found.tables.append(
        f"### PostgreSQL: claims while {swept:,} expired records are swept\n\n{rendered(rows)}\n\n"
        f"The sweep took {spent_s:.1f} s, {swept / spent_s:,.0f} records a second."
    )
    title = f"PostgreSQL: p99 of a claim while {swept:,} records are swept"
    found.verdicts.append(Verdict(title, f"≤ {FELT} × idle", _reached(felt, FELT)))
    found.plain["sweep"] = {"records": swept, "seconds": spent_s, "idle": idle, "during": during}


def _p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100)[98]
