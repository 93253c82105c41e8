"""Redis dies, freezes, forgets its scripts, changes its master and moves its slots."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from dataclasses import replace

import pytest
import redis
import redis.asyncio

from semel.colour import ASYNC, SYNC, run
from semel.errors import CorruptRecordError, StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.redis import RedisStore
from semel.stores.redis.line import AsyncClusterLine
from semel.stores.redis.scripts import Names
from semel.testing.contracts import ledger_of
from semel.values import Busy, Done, Kept, Lost, Outcome, State, Terms, Won
from support import servers
from support.process import free_port, wait_until
from support.proxy import Proxy
from support.slots import Migration

TERMS = Terms(lease_s=30, ttl_s=600)
VALUE = Outcome("value", b'{"paid":true}')
PAY = make_key("order-1", operation="pay")
NAME = Names("default").of(PAY.id)

colours = pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])


@pytest.fixture
async def opened():
    """Opens stores that are closed when the test is over."""
    stores = []

    def open_store(url, **settings):
        stores.append(RedisStore(url, **settings))
        return stores[-1]

    yield open_store
    for store in stores:
        await store.aclose()


@pytest.fixture
def proxy(redis_server, redis_url):
    with Proxy(redis_server.port) as proxy:
        yield proxy


def through(proxy):
    return f"redis://{proxy.host}:{proxy.port}/0"


async def ask(ledger, key=PAY, attempt=None):
    return await ledger.claim(key, attempt=attempt or new_attempt(), fingerprint=b"f", terms=TERMS)


# --- lost replies ------------------------------------------------------------------------------


@colours
async def test_a_claim_whose_reply_is_lost_gets_its_own_won(proxy, opened, colour):
    ledger = ledger_of(opened(through(proxy)), colour)
    await ask(ledger, make_key("warm"))
    proxy.cut_after_request(b"EVALSHA")
    answer = await ask(ledger)
    assert proxy.cuts == 1
    assert isinstance(answer, Won)
    assert answer.claim.number == 1
    assert (await ledger.look(PAY.id)).fence == answer.claim.fence


@colours
async def test_a_completion_whose_reply_is_lost_is_kept_once(proxy, opened, colour):
    ledger = ledger_of(opened(through(proxy)), colour)
    claim = (await ask(ledger)).claim
    await ledger.complete((await ask(ledger, make_key("warm"))).claim, VALUE)
    proxy.cut_after_request(b"EVALSHA")
    assert await ledger.complete(claim, VALUE) == Kept()
    assert proxy.cuts == 1
    assert await ask(ledger) == Done(VALUE, claim.fence)


@colours
async def test_replies_lost_twice_are_unknown_and_the_same_attempt_may_ask_again(
    proxy, opened, colour
):
    ledger = ledger_of(opened(through(proxy), timeout_s=0.3), colour)
    await ask(ledger, make_key("warm"))
    attempt = new_attempt()
    proxy.drop_replies()
    with pytest.raises(StoreUnavailableError, match="unknown"):
        await ask(ledger, attempt=attempt)
    proxy.pass_through()
    answer = await ask(ledger, attempt=attempt)
    assert isinstance(answer, Won)
    assert answer.claim.number == 1


async def test_a_lost_batch_is_sent_again_whole(proxy, opened):
    ledger = opened(through(proxy)).ledger(ASYNC)
    await ask(ledger, make_key("warm"))
    proxy.cut_after_request(b"EVALSHA")
    keys = [make_key(f"k{i}") for i in range(20)]
    answers = await asyncio.gather(*(ask(ledger, key) for key in keys))
    assert proxy.cuts == 1
    assert all(isinstance(answer, Won) and answer.claim.number == 1 for answer in answers)


async def test_an_unreachable_server_fails_every_caller_of_the_batch(proxy, opened):
    ledger = opened(through(proxy)).ledger(ASYNC)
    await ask(ledger, make_key("warm"))
    proxy.refuse()
    answers = await asyncio.gather(
        *(ask(ledger, make_key(f"k{i}")) for i in range(10)), return_exceptions=True
    )
    assert {type(answer) for answer in answers} == {StoreUnavailableError}


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
@colours
async def test_a_server_that_is_not_there_is_unavailable_for_every_verb(opened, colour, scheme):
    nobody = free_port()
    ledger = ledger_of(opened(f"{scheme}://127.0.0.1:{nobody}/{'mm' * ('s' in scheme[5:])}",
                              timeout_s=1), colour)  # fmt: skip
    for verb in (
        lambda: ask(ledger),
        lambda: ledger.look(PAY.id),
        ledger.records,
        ledger.guarantees,
    ):
        with pytest.raises(StoreUnavailableError):
            await verb()


# --- silence and death -------------------------------------------------------------------------


@colours
async def test_a_frozen_server_is_unavailable_within_the_timeout(
    redis_server, redis_url, opened, colour
):
    ledger = ledger_of(opened(redis_url, timeout_s=0.3), colour)
    await ask(ledger, make_key("warm"))
    with redis_server.paused():
        began = time.monotonic()
        with pytest.raises(StoreUnavailableError, match=r"no reply within 0\.3 s"):
            await ask(ledger)
        assert time.monotonic() - began < 2
    assert isinstance(await ask(ledger, make_key("after")), Won)


async def test_callers_that_wait_behind_a_frozen_batch_fail_too(redis_server, redis_url, opened):
    ledger = opened(redis_url, timeout_s=0.3).ledger(ASYNC)
    await ask(ledger, make_key("warm"))
    with redis_server.paused():
        began = time.monotonic()
        first = asyncio.ensure_future(ask(ledger))
        await asyncio.sleep(0.05)
        behind = [asyncio.ensure_future(ask(ledger, make_key(f"k{i}"))) for i in range(5)]
        answers = await asyncio.gather(first, *behind, return_exceptions=True)
        assert time.monotonic() - began < 3
    assert {type(answer) for answer in answers} == {StoreUnavailableError}


@colours
async def test_a_claim_survives_a_server_that_is_killed_and_restarted(
    redis_server, redis_url, opened, colour
):
    ledger = ledger_of(opened(redis_url), colour)
    claim = (await ask(ledger)).claim
    redis_server.kill()
    with pytest.raises(StoreUnavailableError):
        await ask(ledger)
    redis_server.restart()
    assert isinstance(await ask(ledger), Busy)
    assert await ledger.complete(claim, VALUE) == Kept()
    assert await ask(ledger) == Done(VALUE, claim.fence)


@colours
async def test_scripts_that_were_flushed_are_sent_again(redis_url, opened, colour):
    ledger = ledger_of(opened(redis_url), colour)
    claim = (await ask(ledger)).claim
    with redis.Redis.from_url(redis_url) as admin:
        admin.script_flush()
        assert await ledger.complete(claim, VALUE) == Kept()
        admin.script_flush()
        assert await ask(ledger) == Done(VALUE, claim.fence)


async def test_a_batch_teaches_each_script_once(redis_url, opened):
    ledger = opened(redis_url).ledger(ASYNC)
    claims = [(await ask(ledger, make_key(f"old{i}"))).claim for i in range(10)]
    with redis.Redis.from_url(redis_url) as admin:
        admin.script_flush()
        admin.config_resetstat()
        await asyncio.gather(
            *(ask(ledger, make_key(f"new{i}")) for i in range(10)),
            *(ledger.complete(claim, VALUE) for claim in claims),
        )
        assert admin.info("commandstats")["cmdstat_eval"]["calls"] == 2


@colours
async def test_a_full_memory_changes_nothing(redis_url, opened, colour):
    ledger = ledger_of(opened(redis_url), colour)
    claim = (await ask(ledger)).claim
    before = await ledger.look(PAY.id)
    with redis.Redis.from_url(redis_url) as admin:
        admin.config_set("maxmemory", 1)
        try:
            with pytest.raises(StoreUnavailableError, match="out of memory"):
                await ask(ledger, make_key("new"))
            with pytest.raises(StoreUnavailableError, match="out of memory"):
                await ledger.complete(claim, VALUE)
        finally:
            admin.config_set("maxmemory", 0)
    assert await ledger.look(make_key("new").id) is None
    after = await ledger.look(PAY.id)
    assert replace(after, seen_at=before.seen_at) == before


@pytest.mark.parametrize("protocol", [2, 3])
@colours
async def test_a_missing_password_is_named(opened, colour, protocol):
    server = servers.start_redis(None)
    try:
        servers.command(server.port, "CONFIG", "SET", "requirepass", "s3cret")
        locked_out = ledger_of(opened(f"{server.url}?protocol={protocol}"), colour)
        with pytest.raises(StoreUnavailableError, match="password"):
            await ask(locked_out)
        let_in = ledger_of(opened(f"redis://:s3cret@{server.url.removeprefix('redis://')}"), colour)
        assert isinstance(await ask(let_in), Won)
    finally:
        server.kill()
        server.stop()


# --- records nobody can read -------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda admin: admin.set(NAME, "not a hash"),
        lambda admin: admin.hset(NAME, "colour", "blue"),
        lambda admin: admin.hset(NAME, mapping={"s": "Z", "a": "h/1", "e": "1", "l": "1"}),
        lambda admin: admin.hset(NAME, mapping={"s": "P", "a": "h/1", "e": "x", "l": "1"}),
        lambda admin: admin.hset(NAME, mapping={"s": "P", "a": "h/1", "e": "1"}),
    ],
    ids=["string", "foreign hash", "state", "fence", "lease"],
)
@colours
async def test_an_unreadable_record_is_named_and_left_alone(redis_url, opened, colour, damage):
    ledger = ledger_of(opened(redis_url), colour)
    claim = (await ask(ledger, make_key("other"))).claim
    with redis.Redis.from_url(redis_url) as admin:
        damage(admin)
        before = admin.dump(NAME)
        for verb in (
            lambda: ask(ledger),
            lambda: ledger.complete(replace(claim, key=PAY), VALUE),
            lambda: ledger.renew(replace(claim, key=PAY)),
            lambda: ledger.resolve(PAY.id, fence=1, outcome=VALUE, ttl_s=1),
        ):
            with pytest.raises(CorruptRecordError, match=NAME.decode()):
                await verb()
        assert admin.dump(NAME) == before
    assert await ledger.forget(PAY.id, force=True)
    assert isinstance(await ask(ledger), Won)


@colours
async def test_a_completed_record_without_its_data_is_not_replayed(redis_url, opened, colour):
    ledger = ledger_of(opened(redis_url), colour)
    await ledger.complete((await ask(ledger)).claim, VALUE)
    with redis.Redis.from_url(redis_url) as admin:
        admin.hdel(NAME, "r")
    with pytest.raises(CorruptRecordError, match=NAME.decode()):
        await ask(ledger)
    with pytest.raises(CorruptRecordError, match=NAME.decode()):
        await ledger.look(PAY.id)


@colours
async def test_one_unreadable_record_spoils_only_its_own_call(redis_url, opened, colour):
    ledger = ledger_of(opened(redis_url), colour)
    with redis.Redis.from_url(redis_url) as admin:
        admin.set(NAME, "not a hash")
    answers = await asyncio.gather(
        ask(ledger), ask(ledger, make_key("sound")), return_exceptions=True
    )
    assert isinstance(answers[0], CorruptRecordError)
    assert isinstance(answers[1], Won)


# --- callers that go away ----------------------------------------------------------------------


async def test_a_cancelled_caller_leaves_the_others_alone(redis_url, opened):
    ledger = opened(redis_url).ledger(ASYNC)
    await ask(ledger, make_key("warm"))
    tasks = [asyncio.ensure_future(ask(ledger, make_key(f"k{i}"))) for i in range(20)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert all(isinstance(answer, Won) for answer in answers[1::2])


def test_a_second_event_loop_gets_its_own_connection(redis_url):
    store = RedisStore(redis_url)
    ledger = store.ledger(ASYNC)

    async def claimed(text):
        return await ask(ledger, make_key(text))

    assert isinstance(asyncio.run(claimed("one")), Won)
    assert isinstance(asyncio.run(claimed("two")), Won)
    assert isinstance(asyncio.run(claimed("one")), Busy)


def test_a_loop_that_ends_leaves_no_connection_behind(redis_url):
    store = RedisStore(redis_url)
    with redis.Redis.from_url(redis_url) as admin:
        before = len(admin.client_list())
        asyncio.run(ask(store.ledger(ASYNC)))
        wait_until(lambda: len(admin.client_list()) == before, "the connection to go")


def test_a_fork_after_first_use_claims_on_its_own_connection(redis_url):
    store = RedisStore(redis_url)
    ledger = store.ledger(SYNC)
    assert isinstance(run(ask(ledger)), Won)
    child = os.fork()
    if child == 0:
        answers = [run(ask(ledger)), run(ask(ledger, make_key("child")))]
        told = [type(answer).__name__ for answer in answers]
        os._exit(0 if told == ["Busy", "Won"] else 1)
    assert isinstance(run(ask(ledger, make_key("parent"))), Won)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert isinstance(run(ask(ledger, make_key("child"))), Busy)
    store.close()


# --- sentinel ----------------------------------------------------------------------------------


async def eventually_won(ledger, key):
    """Claim until the answer is not an outage, as a patient caller would."""
    deadline, attempt = time.monotonic() + 30, new_attempt()
    while True:
        try:
            return await ask(ledger, key, attempt)
        except StoreUnavailableError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


@colours
async def test_a_dead_sentinel_is_passed_over(redis_sentinel_url, opened, colour):
    """Within the timeout: redis-py would knock ten times before it asks the next one."""
    scheme, _, rest = redis_sentinel_url.partition("://")
    url = f"{scheme}://127.0.0.1:{free_port()},{rest}"
    ledger = ledger_of(opened(url, timeout_s=1), colour)
    began = time.monotonic()
    assert isinstance(await ask(ledger), Won)
    assert time.monotonic() - began < 2


@pytest.mark.slow
@colours
async def test_the_new_master_is_found_after_the_old_one_was_killed(
    redis_sentinel, redis_sentinel_url, opened, colour
):
    ledger = ledger_of(opened(redis_sentinel_url, timeout_s=1), colour)
    await ask(ledger)
    redis_sentinel.master.kill()
    # A key nobody had before: the new master may not have heard that the old one was emptied.
    after = make_key(f"after {new_attempt()}")
    assert isinstance(await eventually_won(ledger, after), Won)
    assert isinstance(await ask(ledger, after), Busy)


@pytest.mark.slow
@colours
async def test_a_failover_to_a_replica_that_missed_the_claim_forgets_it(
    redis_sentinel, redis_sentinel_url, opened, colour
):
    """What no Redis promises: the key is handed out again. Its first holder is still fenced."""
    ledger = ledger_of(opened(redis_sentinel_url, timeout_s=1), colour)
    key = make_key(f"missed {new_attempt()}")
    master, replica = redis_sentinel.master, redis_sentinel.replica
    # The replica is cut off before the claim, and too frozen to come back for it.
    with replica.paused():
        servers.command(master.port, "CLIENT", "KILL", "TYPE", "replica")
        first = await ask(ledger, key)
        assert isinstance(first, Won)
        assert isinstance(await ask(ledger, key), Busy)
        master.kill()

    second = await eventually_won(ledger, key)
    assert redis_sentinel.master is replica
    assert (second.claim.number, second.claim.attempt == first.claim.attempt) == (1, False)
    assert second.claim.fence > first.claim.fence
    assert await ledger.complete(first.claim, VALUE) == Lost()
    assert await ledger.complete(second.claim, VALUE) == Kept()


def asked_to_fail_over(group):
    with contextlib.suppress(RuntimeError):  # it has not heard of the replica for a while
        servers.command(group.sentinels[0].port, "SENTINEL", "FAILOVER", "mm")
        return True
    return False


@colours
async def test_a_master_that_became_a_replica_is_left(
    redis_sentinel, redis_sentinel_url, opened, colour
):
    ledger = ledger_of(opened(redis_sentinel_url, timeout_s=2), colour)
    await ask(ledger)
    old = redis_sentinel.master
    wait_until(lambda: asked_to_fail_over(redis_sentinel), "the sentinels to agree")
    wait_until(lambda: redis_sentinel.master is not old, "another master")
    after = make_key(f"after {new_attempt()}")
    assert isinstance(await eventually_won(ledger, after), Won)
    assert "semel" in str(servers.command(redis_sentinel.master.port, "KEYS", "*"))


# --- cluster -----------------------------------------------------------------------------------


@colours
async def test_a_slot_that_moves_is_followed(redis_cluster, redis_cluster_url, opened, colour):
    ledger = ledger_of(opened(redis_cluster_url), colour)
    claim = (await ask(ledger)).claim
    with Migration(redis_cluster, NAME) as migration:
        assert isinstance(await ask(ledger), Busy)
        migration.move_keys()
        assert isinstance(await ask(ledger), Busy)  # ASK
        assert await ledger.complete(claim, VALUE) == Kept()
        migration.finish()
        assert await ask(ledger) == Done(VALUE, claim.fence)  # MOVED
        assert await ask(ledger) == Done(VALUE, claim.fence)


async def test_many_callers_follow_a_moving_slot(redis_cluster, redis_cluster_url, opened):
    ledger = opened(redis_cluster_url).ledger(ASYNC)
    claim = (await ask(ledger)).claim
    with Migration(redis_cluster, NAME) as migration:
        migration.move_keys()
        answers = await asyncio.gather(*(ask(ledger) for _ in range(16)))
        assert {type(answer) for answer in answers} == {Busy}
        migration.finish()
        answers = await asyncio.gather(*(ask(ledger) for _ in range(16)))
        assert {type(answer) for answer in answers} == {Busy}
    assert await ledger.complete(claim, VALUE) == Kept()


async def test_a_withdrawal_does_not_overtake_a_claim_that_was_redirected(
    redis_cluster, redis_cluster_url, opened
):
    ledger = opened(redis_cluster_url).ledger(ASYNC)
    claim = (await ask(ledger)).claim
    await ledger.release(claim)
    with Migration(redis_cluster, NAME) as migration:
        await ledger.forget(PAY.id, force=True)
        for turns in range(16):  # a key that is not there yet is asked for on the other side
            attempt = new_attempt()
            task = asyncio.ensure_future(ask(ledger, attempt=attempt))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await ledger.release(replace(claim, attempt=attempt, fence=0))
            record = await ledger.look(PAY.id)
            assert record is None or record.state is State.FAILED, turns
            await ledger.forget(PAY.id, force=True)
        migration.finish()


async def test_whatever_is_wrong_with_a_line_whoever_was_sent_elsewhere_is_told(
    redis_cluster, redis_cluster_url, opened, monkeypatch
):
    """uvloop raises RuntimeError where a line was closed meanwhile: nobody is to wait for ever."""
    ledger = opened(redis_cluster_url).ledger(ASYNC)

    async def closed_meanwhile(line, call, redirection):
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")

    await ask(ledger)
    with Migration(redis_cluster, NAME) as migration:
        migration.move_keys()
        monkeypatch.setattr(AsyncClusterLine, "_reply_to", closed_meanwhile)
        with pytest.raises(StoreUnavailableError, match="TCPTransport closed"):
            async with asyncio.timeout(20):
                await ask(ledger)
        monkeypatch.undo()
        assert isinstance(await ask(ledger), Busy)
        migration.finish()


@pytest.mark.slow
@colours
async def test_a_cluster_node_that_dies_is_unavailable_and_comes_back(
    redis_cluster, redis_cluster_url, opened, colour
):
    ledger = ledger_of(opened(redis_cluster_url, timeout_s=1), colour)
    claim = (await ask(ledger)).claim
    owner = Migration(redis_cluster, NAME).source
    owner.kill()
    with pytest.raises(StoreUnavailableError):
        await ask(ledger)
    redis_cluster.ensure_running()
    assert isinstance(await eventually_won(ledger, make_key("after")), Won)
    assert await ledger.complete(claim, VALUE) in (Kept(), Lost(VALUE))
    # redis-py forgets, and leaves open, the nodes that it asked for the slots in vain.
    for node in gc.get_objects():
        # By type: some of all objects need settings to say what they are an instance of.
        if type(node) is redis.asyncio.cluster.ClusterNode:
            await node.disconnect()
