"""The log's contract on Redis, a cluster and behind Sentinel."""

from __future__ import annotations

import pytest
import redis

from semel.stores.redis import RedisStore
from semel.stores.redis.address import address_of, all_of
from semel.testing.bells import BellContract
from semel.testing.logs import LogContract


class OnRedis(LogContract):
    """Ages streams through a client of its own: every time that was written moves back."""

    def open(self, url):
        self.url = url
        self.admin = address_of(url, 5).open_sync()
        return RedisStore(url)

    async def another(self, store):
        return RedisStore(self.url)

    async def age(self, store, seconds):
        keys = list(self.admin.scan_iter(match="semel:*", count=1000))
        is_cluster = isinstance(self.admin, redis.RedisCluster)
        for some in [[key] for key in keys] if is_cluster else [keys] if keys else []:
            self.admin.eval(AGE, len(some), *some, round(seconds * 1_000_000))

    async def streams_left(self, store):
        return len(list(self.admin.scan_iter(match="semel:*:meta", count=1000)))

    async def shut(self, store):
        await store.aclose()
        for client in all_of(self.admin):
            client.close()


AGE = """
local by_us = tonumber(ARGV[1])
local function earlier(time)
  return string.format('%.0f', time - by_us)
end
for _, key in ipairs(KEYS) do
  if string.sub(key, -5) == ':meta' then
    local all = redis.call('HGETALL', key)
    for n = 1, #all, 2 do
      local name, word = all[n], all[n + 1]
      if (name == 'g' or name == 'u') and word ~= '' then
        redis.call('HSET', key, name, earlier(word))
      elseif string.sub(name, 1, 1) == 'i' then
        local before, came, rest = string.match(word, '^(%x+ %d+ %x+ )(%d+)(.*)$')
        redis.call('HSET', key, name, before .. earlier(came) .. rest)
      end
    end
  end
  local left_ms = redis.call('PTTL', key)
  if left_ms >= 0 then redis.call('PEXPIRE', key, left_ms - by_us / 1000) end
end
"""


def only(*names):
    """These tests of a contract: enough where the code is the same, and another server answers."""

    def choose(cls):
        for name in dir(cls):
            if name.startswith("test_") and name not in names:
                setattr(cls, name, None)
        return cls

    return choose


FEW = (
    "test_any_history_agrees_with_the_model",
    "test_many_writers_make_no_gap_and_no_twin",
    "test_heads_are_told_in_the_order_they_were_asked_for",
    "test_entries_and_state_of_an_ended_stream_go_and_its_ids_stay",
)


class TestRedis(OnRedis):
    @pytest.fixture
    async def store(self, redis_url):
        store = self.open(redis_url)
        yield store
        await self.shut(store)


@only(*FEW)
class TestValkey(OnRedis):
    examples = 5

    @pytest.fixture
    async def store(self, valkey_url):
        store = self.open(valkey_url)
        yield store
        await self.shut(store)


@only(*FEW, "test_odd_names_never_bleed_into_one_another")
class TestCluster(OnRedis):
    examples = 5

    @pytest.fixture
    async def store(self, redis_cluster_url):
        store = self.open(redis_cluster_url)
        yield store
        await self.shut(store)


@only(*FEW)
class TestSentinel(OnRedis):
    examples = 5

    @pytest.fixture
    async def store(self, redis_sentinel_url):
        store = self.open(redis_sentinel_url)
        yield store
        await self.shut(store)


class BellOnRedis(BellContract):
    def open(self, url):
        self.url = url
        return RedisStore(url)

    async def another(self, store):
        return RedisStore(self.url)


class TestRedisBell(BellOnRedis):
    @pytest.fixture
    async def store(self, redis_url):
        store = self.open(redis_url)
        yield store
        await store.aclose()


class TestClusterBell(BellOnRedis):
    @pytest.fixture
    async def store(self, redis_cluster_url):
        store = self.open(redis_cluster_url)
        yield store
        await store.aclose()


class TestSentinelBell(BellOnRedis):
    colours = ("async",)

    @pytest.fixture
    async def store(self, redis_sentinel_url):
        store = self.open(redis_sentinel_url)
        yield store
        await store.aclose()
