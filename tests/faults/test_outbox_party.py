"""From commit to effect, while everything that can die does: producers, relays, workers, servers.

Eight producers commit in any order, roll back, and are killed; strangers keep transactions open;
three relays and three workers are killed and frozen every few hundred milliseconds; Redis and
PostgreSQL are killed and restarted. When the dust has settled, every committed event has had its
effect once, per aggregate in order, and nothing that was not committed was ever seen.

    SEMEL_PARTY_SECONDS=40           how long each party lasts in `make test`
    SEMEL_TORTURE_MINUTES=30         and in `make torture`
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
import sqlalchemy as sa

from semel.stores.sql import init
from support import outbox_party as party
from support.nursery import Nursery
from support.process import wait_until

TESTS = Path(__file__).parents[1]

SECONDS = float(os.environ.get("SEMEL_PARTY_SECONDS", "20"))
MINUTES = float(os.environ.get("SEMEL_TORTURE_MINUTES", "30"))

# Between one misfortune and the next.
EVERY_S = (0.15, 0.45)

# When nothing dies any more: leases run out, frozen ones wake, everything is caught up with.
SETTLES_WITHIN_S = 90.0


class Party:
    """Its processes, their misfortunes, and what came of it."""

    def __init__(self, database: str, broker: str, folder: Path, seed: int) -> None:
        self.database, self.broker, self.folder = database, broker, folder
        self.chance = random.Random(seed)
        self.running: dict[int, str] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.engine = party.engine_of(database)
        init(database)
        party.METADATA.create_all(self.engine)
        with self.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE unrelated (n INTEGER)")
        with (folder / "party.log").open("wb") as errors:
            self.nursery = Nursery("support.outbox_party", errors)
        for number in range(2):
            self.start(f"produce {database} {seed * 10 + number}")
        self.start(f"dawdle {database}")
        for _ in range(3):
            self.start(f"relay {database} {broker}")
            self.start(f"work {database} {broker}")
        wait_until(self.has_begun, "the first effects")

    def start(self, words: str) -> None:
        self.running[self.nursery.start(words=words)] = words

    def has_begun(self) -> bool:
        _, effects, _ = self.counted()
        return effects > 0

    def counted(self) -> list[int]:
        with self.engine.connect() as connection:
            return [
                connection.scalar(sa.select(counted))
                for counted in (
                    sa.func.count(party.TRUTH.c.event_id),
                    sa.func.count(party.EFFECT.c.id),
                    sa.func.count(sa.distinct(party.EFFECT.c.event_id)),
                )
            ]

    def rage(self, seconds: float, misfortunes=()) -> None:
        """Kill or freeze somebody again and again; and let the servers' own misfortunes happen."""
        until = time.monotonic() + seconds
        servers = [(time.monotonic() + at * seconds, what) for at, what in misfortunes]
        frozen: dict[int, float] = {}
        while time.monotonic() < until:
            time.sleep(self.chance.uniform(*EVERY_S))
            self.thaw([pid for pid, due in frozen.items() if due <= time.monotonic()], frozen)
            for due in [s for s in servers if s[0] <= time.monotonic()]:
                servers.remove(due)
                self.counts[due[1].__name__] += 1
                due[1]()
            self.hurt(frozen)
        self.thaw(list(frozen), frozen)

    def hurt(self, frozen: dict[int, float]) -> None:
        pid = self.chance.choice([pid for pid in self.running if pid not in frozen])
        words = self.running[pid]
        role = words.split()[0]
        if self.chance.random() < 0.5:
            self.counts[f"killed {role}"] += 1
            os.kill(pid, signal.SIGKILL)
            del self.running[pid]
            self.start(words)
        else:
            self.counts[f"froze {role}"] += 1
            os.kill(pid, signal.SIGSTOP)
            frozen[pid] = time.monotonic() + self.chance.uniform(0.1, 2.5 * party.LEASE_S)

    def thaw(self, pids: list[int], frozen: dict[int, float]) -> None:
        for pid in pids:
            del frozen[pid]
            os.kill(pid, signal.SIGCONT)

    def settle(self) -> None:
        """The producers stop; the rest goes on until nothing more comes."""
        self.end("produce")
        self.end("dawdle")
        until = time.monotonic() + SETTLES_WITHIN_S
        while time.monotonic() < until:
            self.revive()
            if len({*self.counted()}) == 1:
                return
            time.sleep(0.2)

    def revive(self) -> None:
        """Whoever ended by itself is a finding; but let us see the rest."""
        for pid, words in list(self.running.items()):
            if not alive(pid):
                self.counts[f"{words.split()[0]} ended by itself"] += 1
                del self.running[pid]
                self.start(words)

    def end(self, role: str = "") -> None:
        ending = {pid: words for pid, words in self.running.items() if words.startswith(role)}
        for pid in ending:
            del self.running[pid]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
        until = time.monotonic() + 20
        while any(map(alive, ending)) and time.monotonic() < until:
            time.sleep(0.02)
        for pid in filter(alive, ending):
            self.counts[f"{ending[pid].split()[0]} would not end"] += 1
            for word in (signal.SIGUSR2, signal.SIGUSR1):  # its threads, its tasks: see the log
                os.kill(pid, word)
                time.sleep(0.5)
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.end()
        self.nursery.close()
        self.engine.dispose()

    def judge(self) -> str:
        with self.engine.connect() as connection:
            truth = {row.event_id for row in connection.execute(sa.select(party.TRUTH))}
            effects = connection.execute(sa.select(party.EFFECT).order_by(party.EFFECT.c.id)).all()
        seen = [effect.event_id for effect in effects]
        per_aggregate: dict[tuple[str, int], list[int]] = defaultdict(list)
        for effect in effects:
            per_aggregate[effect.topic, effect.aggregate].append(effect.seq)
        told = (
            f"{len(truth)} committed, {len(seen)} effects, {len(per_aggregate)} sequences, "
            f"{dict(self.counts)}"
        )
        assert truth, f"nothing was committed; {told}"
        assert set(seen) <= truth, f"{len(set(seen) - truth)} were never committed; {told}"
        assert len(seen) == len(set(seen)), f"{len(seen) - len(set(seen))} doubled; {told}"
        assert set(seen) == truth, f"{len(truth - set(seen))} lost or stuck; {told}"
        for name, seqs in per_aggregate.items():
            assert seqs == list(range(1, len(seqs) + 1)), f"{name}: {seqs}; {told}"
        ended = {what: n for what, n in self.counts.items() if "by itself" in what}
        ended |= {what: n for what, n in self.counts.items() if "not end" in what}
        assert not ended, f"{ended}; {told}"
        return told


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def parties(tmp_path):
    made: list[Party] = []

    def make(database: str, broker: str, seed: int) -> Party:
        made.append(Party(database, broker, tmp_path, seed))
        return made[-1]

    yield make
    for each in made:
        each.close()


def play(made: Party, seconds: float, misfortunes) -> None:
    made.rage(seconds, misfortunes)
    made.settle()
    print(made.judge())  # noqa: T201


def redis_dies(server):
    def redis_was_killed() -> None:
        server.kill()
        time.sleep(0.5)
        server.ensure_running()

    return redis_was_killed


def postgres_dies(server):
    def came_back() -> bool:
        try:
            server.ensure_running()
        except RuntimeError:  # a process of the old one is not quite gone yet
            return False
        return True

    def postgres_crashed() -> None:
        server.kill()
        wait_until(came_back, "PostgreSQL to be back")

    return postgres_crashed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_committed_event_has_its_effect_once_and_in_order(
    parties, postgres_server, postgres_url, redis_server, redis_url
):
    made = parties(postgres_url, f"{redis_url}?shards=4&maxlen=500", seed=1)
    misfortunes = [
        (0.3, redis_dies(redis_server)),
        (0.5, postgres_dies(postgres_server)),
        (0.7, redis_dies(redis_server)),
    ]
    play(made, SECONDS, misfortunes)


def failover(sentinel):
    def sentinel_promoted_a_stale_replica() -> None:
        """What the master acknowledged while its replica slept is gone with it."""
        master, replica = sentinel.master, sentinel.replica
        with replica.paused():
            time.sleep(0.3)
            master.kill()
        wait_until(lambda: sentinel.master is replica, "the replica to be promoted")
        sentinel.ensure_running()

    return sentinel_promoted_a_stale_replica


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_failover_that_loses_the_tail_loses_no_effect(
    parties, postgres_url, redis_sentinel, redis_sentinel_url
):
    made = parties(postgres_url, f"{redis_sentinel_url}?shards=2&maxlen=500", seed=2)
    play(made, SECONDS / 2, [(0.5, failover(redis_sentinel))])


@pytest.mark.torture
def test_the_party_goes_on(parties, postgres_server, postgres_url, redis_server, redis_url):
    seed = int(os.environ.get("SEMEL_TORTURE_ROUND", str(random.randrange(1000))))
    made = parties(postgres_url, f"{redis_url}?shards=4&maxlen=500", seed=seed)
    rounds = max(1, int(MINUTES * 2))
    misfortunes = [
        (n / rounds, which)
        for n in range(1, rounds)
        for which in (redis_dies(redis_server), postgres_dies(postgres_server))
    ]
    play(made, MINUTES * 60, misfortunes)
