"""The contract on Redis, Valkey, a cluster and behind Sentinel, in both colours."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import redis.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.colour import ASYNC
from semel.keys import make_key
from semel.stores.memory import MemoryStore
from semel.stores.redis import RedisStore
from semel.stores.redis.address import address_of, all_of
from semel.testing.contracts import LedgerContract
from semel.values import Busy, Done, Orphan, Outcome, Record, Terms, Won

pytestmark = pytest.mark.contract


class OnRedis(LedgerContract):
    """Ages records through a client of its own: leases and expiries move back."""

    def open(self, url):
        self.url = url
        self.admin = address_of(url, 5).open_sync()
        return RedisStore(url)

    async def another(self, store):
        return RedisStore(self.url)

    async def age(self, store, seconds):
        by_us = round(seconds * 1_000_000)
        for name in list(self.admin.scan_iter(match="semel:*", count=1000)):
            lease = int(self.admin.hget(name, "l"))
            left_ms = self.admin.pttl(name)
            self.admin.hset(name, "l", lease - by_us)
            if left_ms >= 0:
                self.admin.pexpire(name, left_ms - by_us // 1000)

    def done_with_admin(self):
        for client in all_of(self.admin):
            client.close()

    async def shut(self, store):
        await store.aclose()
        self.done_with_admin()


class TestRedis(OnRedis):
    @pytest.fixture
    async def store(self, redis_url):
        store = self.open(redis_url)
        yield store
        await self.shut(store)

    async def test_any_history_is_told_as_the_memory_store_tells_it(self, store, ledger):
        """Every answer and every record, with all terms, stale claims and `resolve`."""
        loop = asyncio.get_running_loop()

        def play(moves):
            self.admin.flushall()
            asyncio.run_coroutine_threadsafe(self.play(store, ledger, moves), loop).result()

        check = settings(
            max_examples=60,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(given(st.lists(moves(), max_size=30))(play))
        await asyncio.to_thread(check)

    async def play(self, store, ledger, moves):
        clock = Skewed()
        memory = MemoryStore(clock=clock).ledger(ASYNC)
        claims = [], []
        for move in moves:
            if move[0] == "age":
                await self.age(store, move[1])
                clock.ahead_us += round(move[1] * 1_000_000)
                await memory.sweep()  # Redis drops what has expired by itself
                continue
            ours = await perform(ledger, move, claims[0])
            theirs = await perform(memory, move, claims[1])
            assert told(ours) == told(theirs), move
            assert told(await ledger.look(KEY.id)) == told(await memory.look(KEY.id)), move


class Skewed:
    """The time for the memory store: records age when the clock runs ahead."""

    def __init__(self):
        self.ahead_us = 0

    def now_us(self):
        return time.time_ns() // 1000 + self.ahead_us


KEY = make_key("k", operation="pay")
TTL_S = 600.0


def moves():
    who = st.integers(0, 3)
    terms = st.builds(
        Terms,
        lease_s=st.just(30.0),
        ttl_s=st.sampled_from([TTL_S, TTL_S, None]),
        takeover=st.booleans(),
        hold=st.booleans(),
    )
    outcome = st.builds(
        Outcome,
        st.sampled_from(["value", "error", "lost"]),
        st.binary(max_size=2),
        st.sampled_from([None, 200]),
    )
    claim = st.tuples(
        st.just("claim"), who, st.sampled_from([b"", b"f"]), st.sampled_from(["pay", ""]), terms
    )
    return st.one_of(
        claim,
        claim,
        st.tuples(st.just("complete"), who, outcome),
        st.tuples(st.just("release"), who, st.sampled_from([None, "", "boom"])),
        st.tuples(st.just("renew"), who, st.sampled_from([None, 0, 60.0])),
        st.tuples(st.just("note"), who, st.sampled_from(["a", "b"]), st.binary(max_size=2)),
        st.tuples(st.just("blind"), who),
        st.tuples(st.just("resolve"), who, st.none() | outcome),
        st.tuples(st.just("forget"), st.booleans()),
        st.tuples(st.just("age"), st.sampled_from([10.0, 33.0, TTL_S + 7.0])),
    )


async def perform(ledger, move, claims):
    verb, who, *rest = move
    if verb == "claim":
        fingerprint, operation, terms = rest
        key = replace(KEY, operation=operation)
        answer = await ledger.claim(
            key, attempt=f"h/{who}-{len(claims)}", fingerprint=fingerprint, terms=terms
        )
        if isinstance(answer, Won):
            claims.append(answer.claim)
        return answer
    if verb == "forget":
        return await ledger.forget(KEY.id, force=who)
    if not claims:
        return None
    claim = claims[-1 - who % len(claims)]
    if verb == "complete":
        return await ledger.complete(claim, rest[0])
    if verb == "release":
        return await ledger.release(claim, error=rest[0])
    if verb == "renew":
        return await ledger.renew(claim, lease_s=rest[0])
    if verb == "note":
        return await ledger.note(claim, *rest)
    if verb == "blind":
        return await ledger.release(replace(claim, fence=0))
    return await ledger.resolve(KEY.id, fence=claim.fence, outcome=rest[0], ttl_s=TTL_S)


def told(answer):
    """The answer without what two stores cannot agree on: fences and moments."""
    match answer:
        case Won(claim, steps, orphan):
            return ("Won", replace(claim, fence=0), dict(steps), orphan is not None)
        case Done(outcome):
            return ("Done", outcome)
        case Busy(left_s):
            return ("Busy", round(left_s / 5))
        case Orphan():
            return "Orphan"
        case Record():
            return (
                replace(answer.key, text=""),
                (answer.state, answer.fingerprint, answer.attempt, answer.number, answer.held),
                (answer.outcome, answer.error, dict(answer.steps)),
                (answer.completed_at is None, answer.expires_at is None),
                [(past.number, past.attempt, past.ending) for past in answer.past],
            )
        case _:
            return answer


class TestValkey(OnRedis):
    @pytest.fixture
    async def store(self, valkey_url):
        store = self.open(valkey_url)
        yield store
        await self.shut(store)


class TestCluster(OnRedis):
    examples = 15

    @pytest.fixture
    async def store(self, redis_cluster_url):
        store = self.open(redis_cluster_url)
        yield store
        await self.shut(store)


class TestSentinel(OnRedis):
    examples = 15

    @pytest.fixture
    async def store(self, redis_sentinel_url):
        store = self.open(redis_sentinel_url)
        yield store
        await self.shut(store)


class TestGivenSyncClient(OnRedis):
    """A client somebody set to decode replies must not decode outcomes."""

    colours = ("sync",)
    examples = 5

    @pytest.fixture
    async def store(self, redis_url):
        await self.shut(self.open(redis_url))
        self.client = redis.Redis.from_url(redis_url, decode_responses=True)
        yield RedisStore(self.client)
        self.client.close()
        self.done_with_admin()

    async def another(self, store):
        return RedisStore(self.client)


class TestGivenAsyncClient(OnRedis):
    colours = ("async",)
    examples = 5

    @pytest.fixture
    async def store(self, redis_url):
        await self.shut(self.open(redis_url))
        self.client = redis.asyncio.Redis.from_url(redis_url, decode_responses=True, protocol=2)
        yield RedisStore(self.client)
        await self.client.aclose()
        self.done_with_admin()

    async def another(self, store):
        return RedisStore(self.client)
