"""The contracts on Redis, as users with the smallest ACL that docs/reference/stores.md gives."""

from __future__ import annotations

import pytest

from contract import test_redis_broker as broker
from contract import test_redis_inbox as inbox
from contract import test_redis_ledger as ledger
from contract import test_redis_log as log
from contract import test_rooms as rooms
from semel.brokers.redis import RedisBroker
from semel.stores.redis import RedisStore
from support import acl

LOOKING = acl.task("guarantees()")


@pytest.fixture
def as_user(redis_server, redis_url):
    """Makes a user, and gives the URL with which it connects."""
    made = []

    def make(name, *more):
        user = acl.user_on([redis_server.port], name, *acl.USERS[name], *more)
        made.append(user)
        return redis_url.replace("redis://", f"redis://{user.__enter__()}")

    yield make
    for user in made:
        user.__exit__(None, None, None)


class TestLedgerWithSmallestACL(ledger.OnRedis):
    examples = 5

    @pytest.fixture
    async def store(self, redis_url, as_user):
        await self.open(redis_url).aclose()  # makes the client that ages records
        self.url = as_user("semel-guard", *acl.task("Admin"), *LOOKING)
        store = RedisStore(self.url)
        yield store
        await self.shut(store)


class TestLogWithSmallestACL(log.OnRedis):
    examples = 5

    @pytest.fixture
    async def store(self, redis_url, as_user):
        await self.open(redis_url).aclose()
        self.url = as_user("semel-log")
        store = RedisStore(self.url)
        yield store
        await self.shut(store)


class TestNotifierWithSmallestACL(log.BellOnRedis):
    @pytest.fixture
    async def store(self, as_user):
        store = self.open(as_user("semel-log"))
        yield store
        await store.aclose()


class TestRoomsWithSmallestACL(rooms.OnServer):
    @pytest.fixture
    async def store(self, as_user):
        self.url = as_user("semel-log")
        store = self.made(self.url)
        yield store
        await store.aclose()


class TestInboxWithSmallestACL(inbox.OnRedis):
    url = "inbox_url"

    @pytest.fixture
    def inbox_url(self, as_user):
        self.user_url = as_user("semel-inbox", *acl.task("parked"))
        return self.user_url

    def open(self, url):
        return super().open(self.user_url)  # another one is opened by a URL without the user


class TestBrokerWithSmallestACL(broker.OnRedis):
    """One user publishes and reads here, on topics that the contract names."""

    examples = 5

    @pytest.fixture(autouse=True)
    def _place(self, redis_url, as_user):
        self.url = redis_url
        relay = [f"+{command}" for command in acl.commands(acl.USERS["semel-relay"])]
        self.user_url = as_user("semel-worker", *relay, *acl.task("leave("), "allkeys")

    async def make(self, *, shards, maxlen):
        return RedisBroker(self.user_url, shards=shards, maxlen=maxlen)
