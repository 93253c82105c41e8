"""A cluster whose master hands over, or dies and is replaced by its replica."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
import redis.asyncio

from semel.colour import ASYNC, SYNC
from semel.errors import StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.redis import RedisStore
from semel.stores.redis.scripts import Names
from semel.testing.contracts import ledger_of
from semel.values import Busy, Done, Kept, Outcome, Terms, Won
from support import binaries, servers
from support.process import HOST, wait_until

pytestmark = pytest.mark.slow

TERMS = Terms(lease_s=60, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')

colours = pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])


class Pair:
    """One master of a cluster, and the replica that is to follow it."""

    def __init__(self, cluster, replica):
        self.cluster = cluster
        self.servers = [cluster.nodes[0], replica]
        first, *_ = cluster.nodes
        servers.command(first.port, "CLUSTER", "MEET", HOST, replica.port)
        wait_until(lambda: len(self.known_by(replica)) == 4, "the replica to know the masters")
        servers.command(replica.port, "CLUSTER", "REPLICATE", id_of(first))
        cluster.nodes.append(replica)
        self.settle()

    def known_by(self, server):
        return servers.command(server.port, "CLUSTER", "NODES").splitlines()

    def settle(self):
        """Both are there, one follows the other, and everybody knows it."""
        self.cluster.ensure_running()
        wait_until(self.in_step, "the replica to be in step")

    def in_step(self):
        roles = [servers.command(server.port, "INFO", "replication") for server in self.servers]
        followed = any("master_link_status:up\r\n" in role for role in roles)
        return followed and all(self.known_to_follow(node) for node in self.cluster.nodes)

    def known_to_follow(self, node):
        healthy = [line for line in self.known_by(node) if "fail" not in line and "?" not in line]
        return len(healthy) == 4 and sum("slave" in line for line in healthy) == 1

    @property
    def master(self):
        return next(server for server in self.servers if role_of(server) == "master")

    @property
    def replica(self):
        return next(server for server in self.servers if server is not self.master)


def id_of(server):
    return servers.command(server.port, "CLUSTER", "MYID")


def role_of(server):
    return servers.command(server.port, "ROLE")[0]


@pytest.fixture(scope="module")
def cluster():
    try:
        binary = binaries.find("redis")
    except binaries.Unavailable as absent:
        pytest.skip(str(absent))
    made = servers.start_redis_cluster(binary)
    mode = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
    replica = servers.start_redis(binary, *mode)
    yield Pair(made, replica)
    made.stop()
    replica.stop()


@pytest.fixture
async def store(cluster):
    cluster.settle()
    store = RedisStore(cluster.cluster.url, timeout_s=2)
    yield store
    await store.aclose()
    # redis-py forgets, and leaves open, the nodes that it asked for the slots in vain.
    for node in gc.get_objects():
        if type(node) is redis.asyncio.cluster.ClusterNode:
            await node.disconnect()


def key_on(server):
    """A key nobody had before, in a slot of this server."""
    shards = servers.command(server.port, "CLUSTER", "SLOTS")
    ours = next((low, high) for low, high, (_, port, *_), *_ in shards if port == server.port)
    while True:
        key = make_key(new_attempt(), operation="pay")
        name = Names("default").of(key.id).decode()
        if ours[0] <= servers.command(server.port, "CLUSTER", "KEYSLOT", name) <= ours[1]:
            return key


async def patiently(verb):
    """Ask until the answer is not an outage, as a guard would."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await verb()
        except StoreUnavailableError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def goes_on(ledger, claim, key):
    """What was claimed before can be completed, and new claims are answered."""
    assert await patiently(lambda: ledger.complete(claim, VALUE)) == Kept()
    attempt = new_attempt()
    again = await patiently(lambda: ledger.claim(claim.key, attempt=attempt, terms=TERMS))
    assert again == Done(VALUE, claim.fence)
    won = await patiently(lambda: ledger.claim(key, attempt=attempt, terms=TERMS))
    assert isinstance(won, Won)
    assert isinstance(await ledger.claim(key, attempt=new_attempt(), terms=TERMS), Busy)


@colours
async def test_a_master_that_hands_over_is_followed(cluster, store, colour):
    ledger = ledger_of(store, colour)
    old, new = cluster.master, cluster.replica
    key, fresh = key_on(old), key_on(old)
    claim = (await ledger.claim(key, attempt=new_attempt(), terms=TERMS)).claim
    servers.command(new.port, "CLUSTER", "FAILOVER")
    wait_until(lambda: role_of(new) == "master", "the replica to take over")
    await goes_on(ledger, claim, fresh)


@colours
async def test_a_master_that_dies_is_replaced_by_its_replica(cluster, store, colour):
    ledger = ledger_of(store, colour)
    old, new = cluster.master, cluster.replica
    key, fresh = key_on(old), key_on(old)
    claim = (await ledger.claim(key, attempt=new_attempt(), terms=TERMS)).claim
    # A claim that the replica had not heard of would be forgotten: that is not what is tried here.
    name = Names("default").of(key.id).decode()
    wait_until(lambda: name in servers.command(new.port, "KEYS", "*"), "the claim to be copied")
    old.kill()
    wait_until(lambda: role_of(new) == "master", "the replica to be elected")
    await goes_on(ledger, claim, fresh)
