"""Redis loses its tail, its master, its memory, replies and slots while a log and a bell use it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from uuid import uuid4

import pytest
import redis
import redis.asyncio

from semel.colour import ASYNC, SYNC
from semel.entries import Field, FieldValue, Keep, Position, Repeated, Replace, beginning
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.stores.redis import RedisStore
from semel.stores.redis.log_words import place_of
from semel.testing.bells import Ear, bell_of
from semel.testing.log_appending import STREAM, datas, log_of, put
from support import servers
from support.process import wait_until
from support.proxy import Proxy
from support.redis_pair import Pair
from support.slots import Migration

colours = pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])

PLACE = place_of("default", STREAM)


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
    # redis-py forgets, and leaves open, the nodes that it asked for the slots in vain.
    for node in gc.get_objects():
        if type(node) is redis.asyncio.cluster.ClusterNode:
            await node.disconnect()


@pytest.fixture
def proxy(redis_server, redis_url):
    with Proxy(redis_server.port) as proxy:
        yield proxy


def through(proxy):
    return f"redis://{proxy.host}:{proxy.port}/0"


async def lost(log, position):
    return (await log.read(STREAM, position)).lost


# --- failovers ----------------------------------------------------------------------------------


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.stop()


@colours
async def test_a_failover_that_lost_entries_is_noticed_by_whom_it_concerns(pair, opened, colour):
    log = log_of(opened(pair.url), colour)
    kept = [await put(log, f"e{n}") for n in range(3)]
    pair.part()
    gone = [await put(log, f"gone{n}") for n in range(3)]
    pair.fail_over()

    assert [await lost(log, p) for p in (*kept, *gone)] == [False] * 3 + [True] * 3
    again = [await put(log, f"other{n}") for n in range(4)]
    assert [p.offset for p in again[:3]] == [p.offset for p in gone]
    assert [await lost(log, p) for p in (*kept, *gone, *again)] == [False] * 3 + [True] * 3 + [
        False
    ] * 4
    assert [e.id for e in (await log.read(STREAM, kept[2])).entries] == [
        f"other{n}" for n in range(4)
    ]


async def test_entries_that_were_lost_and_come_again_in_order_reset_nobody(pair, opened):
    log = opened(pair.url).log(ASYNC)
    kept = await put(log, "a")
    pair.part()
    gone = [await put(log, f"e{n}", b"%d" % n) for n in range(3)]
    pair.fail_over()
    assert [await put(log, f"e{n}", b"%d" % n) for n in range(3)] == gone
    assert [await lost(log, p) for p in (kept, *gone)] == [False] * 4


async def test_a_promotion_that_loses_nothing_resets_nobody_and_the_bell_rings(pair, opened):
    store = opened(pair.url)
    log, ear = store.log(ASYNC), Ear()
    async with bell_of(store) as bell:
        await bell.listen(STREAM, ear.wake)
        positions = [await put(log, f"e{n}", state=Replace(b"%d" % n)) for n in range(3)]
        await ear.hears()
        wait_until(pair.in_step, "the entries to be copied")
        pair.fail_over()
        await ear.hears()  # it was deaf for a moment
        assert [await lost(log, p) for p in positions] == [False] * 3
        assert (await log.load(STREAM)).state == b"2"
        assert await log.append(STREAM, b"x", id="e2") == Repeated(positions[2])
        await put(log, "after")
        await ear.hears()


@pytest.mark.slow
async def test_behind_sentinel_a_lossy_failover_is_noticed_and_the_bell_rings(
    redis_sentinel, redis_sentinel_url, opened
):
    store = opened(redis_sentinel_url, timeout_s=1)
    log, ear, stream = store.log(ASYNC), Ear(), f"job {uuid4()}"
    async with bell_of(store) as bell:
        await bell.listen(stream, ear.wake)
        kept = (await log.append(stream, b"x", id="kept")).position
        await ear.hears()
        master, replica = redis_sentinel.master, redis_sentinel.replica
        wait_until(lambda: knows(replica, stream), "the entry to be copied")
        # The replica is cut off before the next, and too frozen to come back for it.
        with replica.paused():
            servers.command(master.port, "CLIENT", "KILL", "TYPE", "replica")
            gone = (await log.append(stream, b"x", id="gone")).position
            await ear.hears()
            master.kill()
        await ear.hears()
        page = await patiently(lambda: log.read(stream, gone))
        assert (page.lost, page.head) == (True, kept)
        await patiently(lambda: log.append(stream, b"x", id="other"))
        await ear.hears()
        assert (await log.read(stream, gone)).lost
        assert [e.id for e in (await log.read(stream, kept)).entries] == ["other"]


def knows(server, stream):
    return servers.command(server.port, "EXISTS", place_of("default", stream).log.decode()) == 1


async def patiently(verb):
    """Ask until the answer is not an outage, as a reader would."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await verb()
        except StoreUnavailableError:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


# --- restarts, lost replies, forgotten scripts --------------------------------------------------


@colours
async def test_a_restart_resets_nobody(redis_server, redis_url, opened, colour):
    log = log_of(opened(redis_url), colour)
    positions = [await put(log, f"e{n}", fences={"p": n}) for n in range(3)]
    await log.trim(STREAM, 1)
    redis_server.restart()
    assert [await lost(log, p) for p in (None, *positions)] == [True, False, False, False]
    assert await log.append(STREAM, b"x", id="e0") == Repeated(positions[0])
    assert (await put(log, "e3", fences={"p": 2})).offset == 4


@colours
async def test_an_append_whose_reply_is_lost_is_there_once(proxy, opened, colour):
    log = log_of(opened(through(proxy)), colour)
    first = await put(log, "a")
    proxy.cut_after_request(b"EVALSHA")
    answer = await log.append(STREAM, b"2", id="b", reply=b"r")
    assert proxy.cuts == 1
    assert answer == Repeated(Position(2, answer.position.tag), b"r")
    assert await datas(log, first) == [b"2"]


@colours
async def test_an_append_that_nobody_answers_may_be_repeated(proxy, opened, colour):
    log = log_of(opened(through(proxy), timeout_s=0.3), colour)
    await put(log, "a")
    proxy.drop_replies()
    with pytest.raises(StoreUnavailableError, match="unknown"):
        await log.append(STREAM, b"2", id="b")
    proxy.pass_through()
    assert isinstance(await log.append(STREAM, b"2", id="b"), Repeated)
    assert await datas(log) == [b"x", b"2"]


@colours
async def test_scripts_that_were_flushed_are_sent_again(redis_url, opened, colour):
    log = log_of(opened(redis_url), colour)
    with redis.Redis.from_url(redis_url) as admin:
        for n in range(2):
            admin.script_flush()
            await put(log, f"e{n}")
        for verb in (log.read, log.load, lambda s: log.heads([s]), lambda s: log.trim(s, 1)):
            admin.script_flush()
            await verb(STREAM)
    assert (await log.load(STREAM)).position.offset == 2


@colours
async def test_every_verb_is_one_round_trip(redis_url, opened, colour):
    log, ids = log_of(opened(redis_url), colour), itertools.count()
    more = {"state": Field("f", 1, b"s"), "fences": {"p": 1}, "keep": Keep(entries=5, idle_s=60)}
    verbs = {
        "append": lambda: log.append(STREAM, b"x", id=f"e{next(ids)}", **more),
        "repeat": lambda: log.append(STREAM, b"x", id="a"),
        "read": lambda: log.read(STREAM),
        "load": lambda: log.load(STREAM),
        "trim": lambda: log.trim(STREAM, 1),
        "heads": lambda: log.heads([STREAM, *(f"s{n}" for n in range(499))]),
        "sweep": log.sweep,
    }
    await put(log, "a")
    for verb in verbs.values():
        await verb()
    with redis.Redis.from_url(redis_url) as admin:
        for name, verb in verbs.items():
            admin.config_resetstat()
            await verb()
            told = admin.info("commandstats")
            asked = told.get("cmdstat_evalsha", {"calls": 0})["calls"]
            assert asked == (name != "sweep"), name
            assert "cmdstat_eval" not in told, name


# --- memory -------------------------------------------------------------------------------------


@colours
async def test_a_full_memory_changes_nothing(redis_url, opened, colour):
    log = log_of(opened(redis_url), colour)
    asked = {"state": Field("f", 2, b"2"), "fences": {"p": 2}, "keep": Keep(entries=1)}
    head = await put(log, "a", b"1", state=Field("f", 1, b"1"), fences={"p": 1})
    await log.append("over", b"x", id="a", state=Replace(b"s"), keep=Keep(idle_s=0))
    with redis.Redis.from_url(redis_url) as admin:
        before = snapshot(admin)
        admin.config_set("maxmemory", 1)
        try:
            for stream in (STREAM, "new", "over"):
                with pytest.raises(StoreUnavailableError, match="out of memory"):
                    await log.append(stream, b"2", id="b", ends=True, **asked)
                with pytest.raises(StoreUnavailableError, match="out of memory"):
                    await log.append(stream, None, id="b", **asked)
            assert snapshot(admin) == before
            assert await log.trim(STREAM, 1) == 1  # which makes room
        finally:
            admin.config_set("maxmemory", 0)
    assert (await log.load(STREAM)).position == head
    assert (await put(log, "b", b"2", **asked)).offset == 2


def snapshot(admin):
    """Everything that is there, but for what Redis drops by itself."""
    keys = [key for key in admin.keys("*") if b"over" not in key]
    return {key: (admin.dump(key), admin.pttl(key) < 0) for key in keys}


async def test_ids_that_are_due_do_not_pile_up(redis_url, opened):
    log = opened(redis_url).log(ASYNC)
    keep = Keep(entries=2, ids_s=0)
    with redis.Redis.from_url(redis_url) as admin:
        for n in range(300):
            await log.append(STREAM, b"x" if n % 3 else None, id=f"e{n}", keep=keep)
        assert admin.hlen(PLACE.meta) < 60
        assert admin.xlen(PLACE.log) == 2


@pytest.mark.parametrize("part", ["log", "meta", "state"])
async def test_what_redis_evicted_is_lost_and_never_a_silent_hole(redis_url, opened, part):
    log = opened(redis_url).log(ASYNC)
    positions = [await put(log, f"e{n}", state=Replace(b"s")) for n in range(3)]
    with redis.Redis.from_url(redis_url) as admin:
        admin.delete(getattr(PLACE, part))
        if part == "log":
            told = [await lost(log, p) for p in (None, *positions)]
            assert told == [True, True, True, False]
            head = await put(log, "e3")
            assert head.offset == 4
            assert [await lost(log, p) for p in (None, *positions, head)] == [True] * 4 + [False]
        elif part == "meta":
            assert (await log.read(STREAM)).life == "unknown"
            assert (await log.load(STREAM)).state is None
            assert (await put(log, "e2", b"other")).offset == 1
            assert await datas(log) == [b"other"]
            assert not admin.exists(PLACE.state)
            assert await lost(log, positions[2])
        else:
            assert await datas(log) == [b"x"] * 3
            said = await log.load(STREAM)
            assert (said.position, said.life, said.state) == (positions[2], "open", None)
            await put(log, "e3", state=Replace(b"again"))
            assert (await log.load(STREAM)).state == b"again"


async def test_of_a_state_that_redis_evicted_fields_are_back_when_they_are_said_again(
    redis_url, opened
):
    """Also by an older value: how far it was is not known any more."""
    log = opened(redis_url).log(ASYNC)
    for n in range(1, 4):
        await put(log, f"e{n}", state=Field("f", n, b"%d" % n))
    with redis.Redis.from_url(redis_url) as admin:
        admin.delete(PLACE.state)
    assert (await log.load(STREAM)).fields == {}
    await put(log, "late", state=Field("f", 2, b"late"))
    assert (await log.load(STREAM)).fields == {"f": FieldValue(2, b"late")}


@pytest.mark.parametrize(
    "damage",
    [
        lambda admin: admin.set(PLACE.meta, "not a hash"),
        lambda admin: admin.hset(PLACE.meta, mapping={"o": "many", "t": "no"}),
        lambda admin: admin.hset(PLACE.meta, mapping={"o": "1"}),
        lambda admin: admin.hset(PLACE.meta, mapping={"o": "1", "t": "no", "p": "x"}),
    ],
    ids=["string", "offset", "tag", "floor"],
)
async def test_what_somebody_else_wrote_there_is_named_and_left_alone(redis_url, opened, damage):
    log = opened(redis_url).log(ASYNC)
    with redis.Redis.from_url(redis_url) as admin:
        damage(admin)
        before = admin.dump(PLACE.meta)
        for verb in (
            lambda: log.append(STREAM, b"x", id="a"),
            lambda: log.read(STREAM),
            lambda: log.load(STREAM),
            lambda: log.trim(STREAM, 1),
        ):
            with pytest.raises(CorruptRecordError, match=STREAM):
                await verb()
        assert admin.dump(PLACE.meta) == before
    other = (await log.append("other", b"x", id="a")).position
    first, ours, last = await log.heads(["other", STREAM, "nobody"])
    assert (first, last) == (other, beginning("nobody"))
    assert ours in {beginning(STREAM), Position(1, "no")}


@pytest.mark.parametrize("state", [Replace(b"new"), Field("f", 2, b"new")], ids=["whole", "field"])
async def test_a_state_that_somebody_else_wrote_is_found_out_before_anything_is_changed(
    redis_url, opened, state
):
    log = opened(redis_url).log(ASYNC)
    head = await put(log, "a", state=Field("f", 1, b"old"))
    with redis.Redis.from_url(redis_url) as admin:
        admin.set(PLACE.state, "not a hash")
        before = snapshot(admin)
        for verb in (
            lambda: log.append(STREAM, b"x", id="b", state=state),
            lambda: log.load(STREAM),
        ):
            with pytest.raises(CorruptRecordError, match=f"{STREAM}.*:state"):
                await verb()
        assert snapshot(admin) == before
        assert list(await log.heads([STREAM])) == [head]
        assert await datas(log) == [b"x"]
        admin.delete(PLACE.state)
        assert (await put(log, "b", state=state)).offset == 2


async def test_entries_of_somebody_else_are_named(redis_url, opened):
    log = opened(redis_url).log(ASYNC)
    await put(log, "a")
    with redis.Redis.from_url(redis_url) as admin:
        admin.xadd(PLACE.log, {"x": "y"}, id="2-0")
        with pytest.raises(StoreUnavailableError, match="equal or smaller"):
            await log.append(STREAM, b"x", id="b")
        admin.hset(PLACE.meta, "o", 2)
        with pytest.raises(CorruptRecordError, match=STREAM):
            await log.read(STREAM)


# --- slots --------------------------------------------------------------------------------------


@colours
async def test_a_slot_that_moves_resets_nobody(redis_cluster, redis_cluster_url, opened, colour):
    log = log_of(opened(redis_cluster_url), colour)
    more = {"state": Replace(b"s")}
    positions = [await put(log, f"e{n}", **more) for n in range(2)]
    with Migration(redis_cluster, PLACE.meta) as migration:
        positions.append(await put(log, "migrating", **more))
        migration.move_keys()
        positions.append(await put(log, "asked", **more))  # ASK
        assert [await lost(log, p) for p in positions] == [False] * 4
        migration.finish()
        positions.append(await put(log, "moved", **more))  # MOVED
        assert [await lost(log, p) for p in positions] == [False] * 5
        assert list(await log.heads([STREAM])) == [positions[-1]]
    assert len(await datas(log)) == 5


async def test_an_append_waits_for_a_slot_whose_keys_are_on_two_servers(
    redis_cluster, redis_cluster_url, opened
):
    log = opened(redis_cluster_url).log(ASYNC)
    await put(log, "a", state=Replace(b"s"))
    with Migration(redis_cluster, PLACE.meta) as migration:
        migration.move_keys(1)
        waiting = asyncio.ensure_future(put(log, "b"))
        await asyncio.sleep(0.6)  # longer than redis-py tries by itself
        assert not waiting.done()
        migration.move_keys()
        assert (await waiting).offset == 2
        migration.finish()


# --- the bell -----------------------------------------------------------------------------------


async def test_a_bell_whose_connection_breaks_rings_when_it_hears_again(proxy, opened):
    store = opened(through(proxy))
    log, ears = store.log(ASYNC), [Ear() for _ in range(3)]
    async with bell_of(store) as bell:
        for n, ear in enumerate(ears):
            await bell.listen(f"s{n}", ear.wake)
        await bell.leave("s2", ears[2].wake)
        proxy.cut()
        for ear in ears[:2]:
            await ear.hears()
        await log.append("s1", b"x", id="a")
        await ears[1].hears()
    assert ears[2].rings == 0


async def test_listening_to_a_server_that_is_down_does_not_fail_and_goes_on_trying(proxy, opened):
    store = opened(through(proxy), timeout_s=1)
    log, ear = store.log(ASYNC), Ear()
    async with bell_of(store) as bell:
        proxy.refuse()
        await bell.listen(STREAM, ear.wake)
        assert ear.rings == 0
        proxy.pass_through()
        await ear.hears()
        await put(log, "a")
        await ear.hears()


async def test_a_server_that_falls_silent_is_noticed(proxy, opened):
    store = opened(through(proxy), timeout_s=0.2)
    log, ear = store.log(ASYNC), Ear()
    async with bell_of(store) as bell:
        await bell.listen(STREAM, ear.wake)
        proxy.freeze()
        await silent(bell)
        proxy.pass_through()
        proxy.cut()
        await ear.hears()
        await patiently(lambda: log.append(STREAM, b"x", id="a"))
        await ear.hears()


async def silent(bell):
    deadline = time.monotonic() + 10
    while bell._ears:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_thousand_streams_are_one_connection(redis_url, opened):
    store = opened(redis_url)
    log, ear = store.log(ASYNC), Ear()
    with redis.Redis.from_url(redis_url) as admin:
        async with bell_of(store) as bell:
            await asyncio.gather(*(bell.listen(f"s{n}", ear.wake) for n in range(1000)))
            heard = [c for c in admin.client_list(_type="pubsub") if c["sub"] == "1000"]
            assert len(heard) == 1
            await log.append("s999", b"x", id="a")
            await ear.hears()
            for n in range(1000):
                await bell.leave(f"s{n}", ear.wake)
        wait_until(lambda: not admin.client_list(_type="pubsub"), "the connection to go")
    assert ear.rings == 1


@pytest.mark.parametrize("protocol", [2, 3])
async def test_leaving_and_listening_again_at_once_is_heard(redis_url, opened, protocol):
    store = opened(f"{redis_url}?protocol={protocol}")
    log, ear = store.log(ASYNC), Ear()
    async with bell_of(store) as bell:
        for n in range(5):
            await bell.listen(STREAM, ear.wake)
            await put(log, f"e{n}")
            await ear.hears()
            await bell.leave(STREAM, ear.wake)


async def test_namespaces_do_not_hear_one_another(redis_url, opened):
    ours, theirs = opened(redis_url), opened(redis_url, namespace="theirs")
    ear, other = Ear(), Ear()
    async with bell_of(ours) as bell, bell_of(theirs) as bell_too:
        await bell.listen(STREAM, ear.wake)
        await bell_too.listen(STREAM, other.wake)
        await put(theirs.log(ASYNC), "a")
        await other.hears()
        await put(ours.log(ASYNC), "a")
        await ear.hears()
    assert (ear.rings, other.rings) == (1, 1)


async def test_a_user_who_may_not_publish_appends_and_is_told(redis_url, opened, caplog):
    user = redis_url.replace("redis://", "redis://quiet:s3cret@")
    with redis.Redis.from_url(redis_url) as admin:
        rights = ("on", ">s3cret", "~semel:*", "+@all", "resetchannels")
        admin.execute_command("ACL", "SETUSER", "quiet", *rights)
        try:
            store = opened(user)
            log, ear = store.log(ASYNC), Ear()
            async with bell_of(store) as bell:
                await bell.listen(STREAM, ear.wake)
                assert [(await put(log, id)).offset for id in "ab"] == [1, 2]
            assert await datas(log) == [b"x", b"x"]
            await store.aclose()
        finally:
            admin.execute_command("ACL", "DELUSER", "quiet")
    told = [r.message for r in caplog.records if "readers are late" in r.message]
    assert ["user subscribe" in told[0], "user publish" in told[1], len(told)] == [True, True, 2]


async def test_the_bell_follows_a_slot_to_another_server(redis_cluster, redis_cluster_url, opened):
    store = opened(redis_cluster_url)
    log, ear = store.log(ASYNC), Ear()
    async with bell_of(store) as bell:
        await bell.listen(STREAM, ear.wake)
        await put(log, "a", state=Replace(b"s"))
        await ear.hears()
        with Migration(redis_cluster, PLACE.meta) as migration:
            migration.move_keys()
            migration.finish()
            await ear.hears()
            await put(log, "b")
            await ear.hears()
        await ear.hears()
        await put(log, "c")
        await ear.hears()


@pytest.mark.slow
async def test_the_bell_finds_a_server_of_a_cluster_that_came_back(
    redis_cluster, redis_cluster_url, opened
):
    store = opened(redis_cluster_url, timeout_s=1)
    log, ear, names = store.log(ASYNC), Ear(), [f"s{n}" for n in range(6)]
    async with bell_of(store) as bell:
        for name in names:
            await bell.listen(name, ear.wake)
        victim = redis_cluster.nodes[1]
        victim.kill()
        redis_cluster.ensure_running()
        await ear.hears()
        for name in names:
            before = ear.rings
            await patiently(lambda name=name: log.append(name, b"x", id="a"))
            while ear.rings == before:
                await ear.hears()


def test_a_store_with_a_sync_client_has_no_bell(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        with pytest.raises(SettingsError, match="give it a URL"):
            RedisStore(client).bell()
        with pytest.raises(SettingsError, match="give it a URL"):
            RedisStore(client).log(ASYNC)
