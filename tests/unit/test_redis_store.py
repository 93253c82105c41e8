"""What the store is given, what it costs, and what it leaves alone; on a real server."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio
from redis.auth.token import SimpleToken

from semel.colour import ASYNC, SYNC, run
from semel.errors import SettingsError, StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.redis import RedisStore, ledger
from semel.testing.contracts import ledger_of
from semel.values import Busy, Done, Kept, Outcome, Terms, Won
from support.process import wait_until

TERMS = Terms(lease_s=30, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')
PAY = make_key("order-1", operation="pay")

colours = pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])


@pytest.fixture
async def store(redis_url):
    store = RedisStore(redis_url)
    yield store
    await store.aclose()


@pytest.fixture
def admin(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        yield client


async def ask(ledger, key=PAY):
    return await ledger.claim(key, attempt=new_attempt(), fingerprint=b"f", terms=TERMS)


# --- what it is given --------------------------------------------------------------------------


async def test_a_sync_client_serves_sync_code_only(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        store = RedisStore(client)
        assert isinstance(run(ask(store.ledger(SYNC))), Won)
        with pytest.raises(SettingsError, match=r"redis\.asyncio\.Redis"):
            store.ledger(ASYNC)
        await store.aclose()
        assert client.ping(), "a client that was given is left open"


async def test_an_async_client_serves_async_code_only(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        store = RedisStore(client)
        assert isinstance(await ask(store.ledger(ASYNC)), Won)
        with pytest.raises(SettingsError, match=r"redis\.Redis"):
            store.ledger(SYNC)
        await store.aclose()
        assert await client.ping(), "a client that was given is left open"


async def test_cluster_clients_are_taken_too(redis_cluster_url):
    host, port = redis_cluster_url.removeprefix("redis+cluster://").split(":")
    with redis.RedisCluster(host, int(port)) as client:
        assert isinstance(run(ask(RedisStore(client).ledger(SYNC))), Won)
    async with redis.asyncio.RedisCluster(host, int(port)) as client:
        assert isinstance(await ask(RedisStore(client).ledger(ASYNC)), Busy)


def test_an_async_client_belongs_to_one_loop(redis_url):
    client = redis.asyncio.Redis.from_url(redis_url)
    ledger = RedisStore(client).ledger(ASYNC)

    async def first():
        await ask(ledger)
        await client.aclose()

    other = asyncio.new_event_loop()
    try:
        other.run_until_complete(first())
        with pytest.raises(SettingsError, match="another event loop"):
            asyncio.run(ask(ledger))
    finally:
        other.close()


def test_an_async_client_may_be_used_by_one_loop_after_another(redis_url):
    client = redis.asyncio.Redis.from_url(redis_url)
    ledger = RedisStore(client).ledger(ASYNC)

    async def whole_life():
        answer = await ask(ledger)
        await client.aclose()
        return answer

    assert isinstance(asyncio.run(whole_life()), Won)
    assert isinstance(asyncio.run(whole_life()), Busy)


@pytest.mark.parametrize("given", [None, 5, b"redis://h", object()])
def test_anything_else_is_refused(given):
    with pytest.raises(SettingsError, match="takes a URL or a client"):
        RedisStore(given)


@pytest.mark.parametrize("namespace", ["", "a{b", "a}b", "a*", "a b", "a?", "[a]", "a\\", "é"])
def test_a_namespace_that_would_break_the_keys_is_refused(namespace):
    with pytest.raises(SettingsError, match="namespace"):
        RedisStore("redis://h", namespace=namespace)


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_a_timeout_that_leaves_no_time_is_refused(timeout_s):
    with pytest.raises(SettingsError, match="timeout_s"):
        RedisStore("redis://h", timeout_s=timeout_s)


def test_a_client_that_would_wait_for_ever_is_warned_about(caplog):
    with caplog.at_level(logging.WARNING, "semel"):
        RedisStore(redis.Redis(socket_timeout=5))
        assert not caplog.records
        RedisStore(redis.Redis(socket_timeout=None))
    assert "socket_timeout=5" in caplog.text


# --- what it costs -----------------------------------------------------------------------------


def commands(admin):
    """Commands that clients sent since the last look, by name."""
    stats = admin.info("commandstats")
    admin.config_resetstat()
    ours = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_script|load", "cmdstat_ping")
    return {name: stats[name]["calls"] for name in ours if name in stats}


@colours
async def test_a_first_call_is_two_round_trips_and_a_duplicate_one(store, admin, colour):
    ledger = ledger_of(store, colour)
    await ledger.complete((await ask(ledger, make_key("warm"))).claim, VALUE)
    commands(admin)
    won = await ask(ledger)
    assert await ledger.complete(won.claim, VALUE) == Kept()
    assert commands(admin) == {"cmdstat_evalsha": 2}
    assert isinstance(await ask(ledger), Done)
    assert commands(admin) == {"cmdstat_evalsha": 1}


async def test_concurrent_claims_share_one_connection(store, admin):
    ledger = store.ledger(ASYNC)
    before = len(admin.client_list())
    answers = await asyncio.gather(*(ask(ledger, make_key(f"k{i}")) for i in range(300)))
    assert all(isinstance(answer, Won) for answer in answers)
    assert len(admin.client_list()) == before + 1


async def test_64_tasks_one_winner(store):
    answers = await asyncio.gather(*(ask(store.ledger(ASYNC)) for _ in range(64)))
    assert sorted(type(answer).__name__ for answer in answers) == ["Busy"] * 63 + ["Won"]


# --- the connection it keeps in async code -----------------------------------------------------


async def quiet(pool):
    """Until nothing of the pool is borrowed."""
    deadline = time.monotonic() + 10
    while pool._in_use_connections:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_line_that_is_not_used_gives_its_connection_back(redis_url, admin):
    async with redis.asyncio.Redis.from_url(redis_url, max_connections=100) as client:
        ledger = RedisStore(client, timeout_s=0.2).ledger(ASYNC)
        for number in range(2):
            assert isinstance(await ask(ledger, make_key(f"k{number}")), Won)
            assert len(client.connection_pool._in_use_connections) == 1
            await quiet(client.connection_pool)
        assert len(client.connection_pool._available_connections) == 1, "the same one both times"


async def test_a_line_that_is_always_used_logs_in_again_with_a_fresh_token(redis_url, admin):
    """The connection goes back for a moment, and redis-py does what it has to."""
    async with redis.asyncio.Redis.from_url(redis_url, max_connections=100) as client:
        ledger = RedisStore(client, timeout_s=0.2).ledger(ASYNC)
        await ask(ledger)
        admin.acl_setuser("fresh", enabled=True, passwords=["+token"], categories=["+@all"],
                          keys=["*"])  # fmt: skip
        await client.connection_pool.re_auth_callback(SimpleToken("token", -1, 0, {"oid": "fresh"}))
        deadline = time.monotonic() + 10

        async def caller():
            while all(other["user"] != "fresh" for other in admin.client_list()):
                assert isinstance(await ask(ledger), Busy)
                assert time.monotonic() < deadline

        try:
            await asyncio.gather(*(caller() for _ in range(20)))
        finally:
            admin.acl_deluser("fresh")


@pytest.mark.parametrize(
    "kind", [redis.asyncio.ConnectionPool, redis.asyncio.BlockingConnectionPool]
)
async def test_a_pool_with_one_connection_is_shared(redis_url, kind):
    pool = kind.from_url(redis_url, max_connections=1)
    client = redis.asyncio.Redis(connection_pool=pool)
    ledger = RedisStore(client).ledger(ASYNC)
    for number in range(3):
        keys = [make_key(f"k{number}-{i}") for i in range(5)]
        answers = await asyncio.gather(*(ask(ledger, key) for key in keys))
        assert all(isinstance(answer, Won) for answer in answers)
        await quiet(pool)
        assert await client.ping()
    await pool.disconnect()


async def test_a_closed_store_gives_back_what_it_borrowed(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url, max_connections=100) as client:
        store = RedisStore(client)
        assert isinstance(await ask(store.ledger(ASYNC)), Won)
        await store.aclose()
        assert not client.connection_pool._in_use_connections
        assert await client.ping()
        assert isinstance(await ask(store.ledger(ASYNC)), Busy), "and may be used again"


async def test_a_client_that_is_closed_takes_our_connection_with_it(redis_url, admin):
    before = len(admin.client_list())
    client = redis.asyncio.Redis.from_url(redis_url, max_connections=100)
    ledger = RedisStore(client).ledger(ASYNC)
    assert isinstance(await ask(ledger), Won)
    await client.aclose()
    wait_until(lambda: len(admin.client_list()) == before, "the connection to go")
    assert isinstance(await ask(ledger), Busy), "and is opened again when it is needed"
    await client.aclose()


async def test_a_connection_that_was_closed_meanwhile_is_opened_again(store, admin):
    ledger = store.ledger(ASYNC)
    before = {client["addr"] for client in admin.client_list()}
    await ask(ledger)
    for client in admin.client_list():
        if client["addr"] not in before:
            admin.client_kill(client["addr"])
    assert isinstance(await ask(ledger), Busy)


def test_event_loops_in_many_threads_do_not_disturb_each_other(redis_url):
    store = RedisStore(redis_url)
    ledger = store.ledger(ASYNC)

    def lives(thread):
        for number in range(10):
            key = make_key(f"k{thread}-{number}")
            assert isinstance(asyncio.run(ask(ledger, key)), Won)
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lives, range(8)))


ABANDONED = """
import asyncio, sys
from semel.colour import ASYNC
from semel.keys import make_key, new_attempt
from semel.stores.redis import RedisStore
from semel.values import Terms

store = RedisStore(sys.argv[1])
ledger = store.ledger(ASYNC)

async def ask(number):
    return await ledger.claim(make_key(f"k{number}"), attempt=new_attempt(), terms=Terms())

async def main(crowd):
    if crowd == "warm":
        await ask(0)
    tasks = [asyncio.create_task(ask(number)) for number in range(50)]
    await asyncio.sleep(0)
    if crowd == "under way":
        await asyncio.sleep(0)

for crowd in ("cold", "warm", "under way"):
    asyncio.run(main(crowd))
loop = asyncio.new_event_loop()
waiting = loop.create_task(ask(0))
loop.run_until_complete(asyncio.sleep(0))
waiting.cancel()
loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
loop.run_until_complete(store.aclose())
loop.close()
print(type(asyncio.run(ask("last"))).__name__)
"""


def test_a_loop_that_ends_while_calls_wait_leaves_nothing_behind(redis_url):
    said = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", ABANDONED, redis_url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (said.stdout, said.stderr) == ("Won\n", "")


# --- what it leaves alone ----------------------------------------------------------------------


@colours
async def test_namespaces_do_not_bleed(redis_url, colour):
    stores = [RedisStore(redis_url, namespace=name) for name in ("a", "a:b", "b", "default")]
    ledgers = [ledger_of(store, colour) for store in stores]
    for each in ledgers:
        assert isinstance(await ask(each), Won)
        assert len(await each.records()) == 1
    assert await ledgers[0].forget(PAY.id, force=True)
    assert [len(await each.records()) for each in ledgers] == [0, 1, 1, 1]
    for store in stores:
        await store.aclose()


@colours
async def test_a_listing_longer_than_memory_allows_is_complete(store, admin, colour, monkeypatch):
    monkeypatch.setattr(ledger, "IDS_AT_ONCE", 10)
    monkeypatch.setattr(ledger, "LOOKS_AT_ONCE", 3)
    monkeypatch.setattr(ledger, "SCAN_COUNT", 5)
    admin.mset({f"other:{i}": "x" for i in range(50)})
    admin.set("semel:default:{not-an-id}:ledger", "x")
    keys = [make_key(f"k{i}", operation="even" if i % 2 == 0 else "odd") for i in range(45)]
    ours = ledger_of(store, colour)
    for key in keys:
        await ask(ours, key)
    ids = sorted(key.id for key in keys)
    assert [record.key.id for record in await ours.records(limit=1000)] == ids
    assert [record.key.id for record in await ours.records(limit=7)] == ids[:7]
    assert [record.key.id for record in await ours.records(after=ids[30])] == ids[31:]
    even = await ours.records(operation="even", limit=1000)
    assert [r.key.id for r in even] == sorted(k.id for k in keys if k.operation == "even")


# --- what the server promises ------------------------------------------------------------------


@colours
async def test_guarantees_are_read_from_the_live_server(store, admin, colour):
    ours = ledger_of(store, colour)
    assert (await ours.guarantees()).survives == {"process_crash", "power_loss"}
    admin.config_set("appendfsync", "no")
    try:
        assert (await ours.guarantees()).survives == {"process_crash"}
        admin.config_set("appendfsync", "everysec")
        found = await ours.guarantees()
        assert found.survives == set()
        assert found.why[0].startswith("process crash: appendfsync everysec")
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("maxmemory", 1 << 30)
        found = await ours.guarantees()
        assert found.survives == set()
        assert found.why[0].startswith("eviction")
    finally:
        admin.config_set("appendfsync", "always")
        admin.config_set("maxmemory", 0)
        admin.config_set("maxmemory-policy", "noeviction")


@colours
async def test_a_server_that_refuses_config_promises_nothing(redis_url, admin, colour):
    admin.acl_setuser(
        "plain", enabled=True, passwords=["+pw"], categories=["+@all"], commands=["-config"],
        keys=["*"],
    )  # fmt: skip
    store = RedisStore(redis_url.replace("redis://", "redis://plain:pw@"))
    try:
        found = await ledger_of(store, colour).guarantees()
        assert found.survives == set()
        assert any("refuses CONFIG" in line for line in found.why)
    finally:
        await store.aclose()
        admin.acl_deluser("plain")


@colours
async def test_replicas_and_their_master_are_told_apart(redis_sentinel, redis_sentinel_url, colour):
    """Asked directly, without the sentinels, whose address alone would give it away."""
    lines = {}
    for server in (redis_sentinel.master, redis_sentinel.replica):
        store = RedisStore(server.url)
        found = await ledger_of(store, colour).guarantees()
        lines[server.port] = found.why[-1]
        assert "failover" not in found.survives
        await store.aclose()
    assert lines[redis_sentinel.master.port].startswith("failover: replication is asynchronous")
    assert lines[redis_sentinel.replica.port].startswith("this server is a replica")


@colours
async def test_a_replica_refuses_a_claim_and_is_named(redis_sentinel, redis_sentinel_url, colour):
    store = RedisStore(redis_sentinel.replica.url)
    with pytest.raises(StoreUnavailableError, match="this server is a replica: connect to the"):
        await ask(ledger_of(store, colour))
    await store.aclose()


@colours
async def test_a_master_short_of_replicas_refuses_a_claim(redis_url, admin, colour):
    """min-replicas-to-write makes Redis refuse instead of forgetting; what it keeps is the same."""
    admin.config_set("min-replicas-to-write", 1)
    store = RedisStore(redis_url)
    try:
        with pytest.raises(StoreUnavailableError, match="NOREPLICAS"):
            await ask(ledger_of(store, colour))
        assert (
            (await ledger_of(store, colour).guarantees()).why[-1].startswith("failover: there is")
        )
    finally:
        admin.config_set("min-replicas-to-write", 0)
        await store.aclose()


@colours
async def test_a_cluster_and_sentinels_can_fail_over(redis_cluster_url, redis_sentinel_url, colour):
    for url in (redis_cluster_url, redis_sentinel_url):
        store = RedisStore(url)
        found = await ledger_of(store, colour).guarantees()
        assert found.survives == {"process_crash", "power_loss"}
        assert any("asynchronous" in line for line in found.why)
        await store.aclose()


@pytest.mark.parametrize("module", ["redis", "hiredis"])
def test_without_the_extra_a_broker_is_told_what_to_install(module):
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from semel.brokers import connect\n"
        "from semel.errors import SettingsError\n"
        "try:\n    connect('redis://localhost')\n"
        "except SettingsError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "pip install 'semel[redis]'" in done.stdout
    assert "RedisStore" not in done.stdout
