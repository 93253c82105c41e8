"""The contract on Redis, Valkey, a cluster and behind Sentinel; and what only Redis has."""

from __future__ import annotations

import pytest

from semel.brokers.redis import RedisBroker
from semel.stores.redis.address import address_of, all_of
from semel.testing.brokers import BrokerContract

pytestmark = pytest.mark.contract


class OnRedis(BrokerContract):
    async def make(self, *, shards, maxlen):
        return RedisBroker(self.url, shards=shards, maxlen=maxlen)

    async def put_raw(self, broker, topic, shard, position, raw):
        admin = address_of(self.url, 5).open_async()
        await admin.xadd(broker._stream(topic, shard).key, {"event": raw}, id=f"{position}-0")
        for client in all_of(admin):
            await client.aclose()
        return True


class TestRedis(OnRedis):
    @pytest.fixture(autouse=True)
    def _place(self, redis_url):
        self.url = redis_url


class TestValkey(OnRedis):
    @pytest.fixture(autouse=True)
    def _place(self, valkey_url):
        self.url = valkey_url


class TestCluster(OnRedis):
    examples = 15

    @pytest.fixture(autouse=True)
    def _place(self, redis_cluster_url):
        self.url = redis_cluster_url


class TestSentinel(OnRedis):
    """In the other mode: attributes as fields."""

    examples = 15

    @pytest.fixture(autouse=True)
    def _place(self, redis_sentinel_url):
        self.url = redis_sentinel_url

    async def make(self, *, shards, maxlen):
        return RedisBroker(self.url, shards=shards, maxlen=maxlen, mode="binary")
