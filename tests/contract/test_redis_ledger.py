"""The contract on Redis, Valkey, a cluster and behind Sentinel, in both colours."""

from __future__ import annotations

import pytest
import redis.asyncio

from semel.stores.redis import RedisStore
from semel.stores.redis.address import address_of, all_of
from semel.testing.contracts import LedgerContract

pytestmark = pytest.mark.contract


class OnRedis(LedgerContract):
    """Ages records through a client of its own: leases and expiries move back."""

    def open(self, url):
        self.admin = address_of(url, 5).open_sync()
        return RedisStore(url)

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
        client = redis.Redis.from_url(redis_url, decode_responses=True)
        yield RedisStore(client)
        client.close()
        self.done_with_admin()


class TestGivenAsyncClient(OnRedis):
    colours = ("async",)
    examples = 5

    @pytest.fixture
    async def store(self, redis_url):
        await self.shut(self.open(redis_url))
        client = redis.asyncio.Redis.from_url(redis_url, decode_responses=True, protocol=2)
        yield RedisStore(client)
        await client.aclose()
        self.done_with_admin()
