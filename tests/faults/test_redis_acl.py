"""Every part works with the Redis ACL of the docs; with one rule less it fails or is slower."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re

import pytest
import redis.asyncio.cluster

from semel.brokers.redis import RedisBroker
from semel.colour import ASYNC, SYNC
from semel.entries import Field, Keep, Replace
from semel.errors import BrokerUnavailableError, SemelError
from semel.inbox import Retry
from semel.keys import make_key
from semel.messages import Skip, Tail
from semel.stores.redis import RedisStore
from semel.stores.redis.address import address_of
from semel.stores.redis.inbox import RedisInbox
from semel.stores.redis.log_words import place_of
from semel.testing.bells import Ear
from semel.testing.traffic import Sender, message
from semel.values import Outcome, Terms
from support import acl

TOPIC = "orders"
GROUP = "billing"


PATIENCE = {"s": 10.0}
"""How long a notification may take."""


class RefusedError(Exception):
    """A call of a tour failed. `args`: the call's name and the error."""


async def calling(name, awaitable):
    try:
        return await awaitable
    except SemelError as error:
        raise RefusedError(name, error) from error


# --- one tour of each part: every command that its scripts call -----------------------------------


async def tour_of_ledger(url, colour):
    store = RedisStore(url)
    ledger = store.ledger(colour)
    terms = Terms(lease_s=30.0, ttl_s=60.0)
    key = make_key("k", operation="pay")
    try:
        won = await calling("claim", ledger.claim(key, attempt="a", terms=terms))
        await calling("note", ledger.note(won.claim, "step", b"1"))
        await calling("renew", ledger.renew(won.claim))
        await calling("release", ledger.release(won.claim, error="boom"))
        again = await calling("claim again", ledger.claim(key, attempt="b", terms=terms))
        await calling("stale complete", ledger.complete(won.claim, Outcome("value", b"1")))
        await calling("complete", ledger.complete(again.claim, Outcome("value", b"1")))
        await calling("replay", ledger.claim(key, attempt="c", terms=terms))
        await calling("look", ledger.look(key.id))
        held = Terms(lease_s=30.0, ttl_s=None, hold=True)
        kept = make_key("held", operation="pay")
        won = await calling("claim held", ledger.claim(kept, attempt="a", terms=held))
        await calling("complete held", ledger.complete(won.claim, Outcome("value", b"1")))
    finally:
        await store.aclose()


async def tour_of_admin(url, colour):
    store = RedisStore(url)
    ledger = store.ledger(colour)
    key = make_key("k", operation="pay")
    try:
        terms = Terms(lease_s=30.0, ttl_s=60.0)
        await calling("claim", ledger.claim(key, attempt="a", terms=terms))
        await calling("records", ledger.records())
        await calling("forget", ledger.forget(key.id, force=True))
    finally:
        await store.aclose()


async def tour_of_log(url, colour):
    store = RedisStore(url)
    log, bell, ear = store.log(colour), store.bell(), Ear()
    short = Keep(entries=1, ids_s=0.0, idle_s=60.0)
    try:
        await bell.listen("s", ear.wake)
        await calling("append", log.append("s", b"1", id="1"))
        await asyncio.wait_for(ear.hears(), PATIENCE["s"])
        await calling("replace", log.append("s", b"2", id="2", state=Replace(b"s"), keep=short))
        for n in range(3, 12):
            await calling("trimmed append", log.append("s", b"x", id=f"{n}", keep=short))
        await calling("persist", log.append("s", b"x", id="p"))
        await calling("field", log.append("f", b"1", id="1", state=Field("a", 1, b"x")))
        await calling("rank", log.append("f", b"2", id="2", state=Field("a", 2, b"x")))
        await calling("read", log.read("s"))
        await calling("load", log.load("s"))
        await calling("heads", log.heads(["s", "f"]))
        await calling("trim", log.trim("s", 12))
        await calling("begin", log.append("e", b"1", id="1"))
        lose_meta(url, "e")
        await calling("begin again", log.append("e", b"1", id="2"))
        await bell.leave("s", ear.wake)
        await asyncio.sleep(0.02)  # for the server to answer
    except TimeoutError:
        raise RefusedError("listen", "no notification") from None
    finally:
        await bell.aclose()
        await store.aclose()


def lose_meta(url, stream):
    """Delete the first of a stream's three keys, as another user."""
    admin = address_of(re.sub("//.*@", "//", url), 5.0).open_sync()
    admin.delete(place_of("default", stream).meta)
    admin.close()


async def tour_of_inbox(url):
    inbox = RedisInbox(url, retry=Retry(first_s=0.0, jitter=0.0, attempts=9), lease_s=0.05)
    failing = True

    async def handle(message, session):
        await asyncio.sleep(0.03)  # the lease is renewed
        if failing and message.position == 1:
            raise ValueError("boom")

    try:
        await calling("baseline", inbox.baseline(GROUP, "other"))
        unordered = message("t", 9, seq=None)
        await calling("apply unordered", inbox.apply(GROUP, [unordered], handle))
        batch = [message("t", 1), message("t", 2), message("t", 4)]
        await calling("apply", inbox.apply(GROUP, batch, handle))
        failing = False
        await calling("retry", inbox.retry(GROUP, (0, 255), handle))
        await calling("apply the gap", inbox.apply(GROUP, [message("t", 3)], handle))
        await tour_of_ledger_on(inbox.store)
    finally:
        await inbox.aclose()


async def tour_of_ledger_on(store):
    """As the shard leases of a worker use it."""
    ledger, key = store.ledger(ASYNC), make_key("shard", operation="lease")
    terms = Terms(lease_s=30.0, ttl_s=60.0)
    won = await calling("lease", ledger.claim(key, attempt="a", terms=terms))
    await calling("renew lease", ledger.renew(won.claim))
    await calling("look at lease", ledger.look(key.id))
    await calling("release lease", ledger.release(won.claim))


async def tour_of_parked(url):
    inbox = RedisInbox(url, retry=Retry(first_s=0.0, jitter=0.0, attempts=1))

    async def fails(message, session):
        raise ValueError("boom")

    async def runs(message, session):
        pass

    try:
        await calling("apply", inbox.apply(GROUP, [message("t", 1)], fails))
        await calling("apply", inbox.apply(GROUP, [message("t", 9, seq=None)], runs))
        (parked,) = await calling("sequences", inbox.sequences())
        await calling("waiting", inbox.waiting(parked.sequence))
        await calling("settle", inbox.settle(parked.sequence, Skip(), who="me"))
        await calling("audit", inbox.audit())
        await calling("sweep", inbox.sweep(older_than_s=0.0))
    finally:
        await inbox.aclose()


async def tour_of_relay(url, admin_url):
    workers = RedisBroker(admin_url)
    relays = RedisBroker(url, maxlen=4, groups={TOPIC: [GROUP]})
    sender = Sender(relays, TOPIC)
    try:
        await calling("publish", sender.send(1, 2, 3))
        consumer = await workers.consumer(TOPIC, GROUP, 0, name="w", fence=1)
        await consumer.ack((await consumer.read(3))[:2])
        again = [message(TOPIC, n) for n in (2, 3, 4)]
        await calling("publish again", sender.publish(again, Tail(1, "orders-1")))
        sender.follows = Tail(4, "orders-4")
        await calling("publish and trim", sender.send(5, 6))
        await calling("tail", relays.tail(TOPIC, 0))
        await calling("shards", relays.published_shards(TOPIC))
        await calling("trim", relays.trim(TOPIC, 1))
    finally:
        await workers.aclose()
        await relays.aclose()


async def tour_of_worker(url, admin_url):
    relays, workers = RedisBroker(admin_url, maxlen=2), RedisBroker(url)
    sender = Sender(relays, TOPIC)
    try:
        await calling("join", workers.join(TOPIC, GROUP))
        await sender.send(1, 2, 3)
        first = await calling("begin", workers.consumer(TOPIC, GROUP, 0, name="first", fence=1))
        await calling("read", first.read(2))
        first._reads -= 1  # as after a lost reply
        await calling("read again", first.read(2))
        second = await calling(
            "take over", workers.consumer(TOPIC, GROUP, 0, name="second", fence=2)
        )
        taken = await calling("left over", second.left_over())
        await calling("ack", second.ack(taken))
        await calling("tidy", second.left_over())
        await calling("ack", second.ack(await calling("read", second.read(2))))
        await calling("wait", second.read(1, wait_s=0.02))
        await calling("reclaim", second.reclaim(0.0))
        await calling("backlog", workers.backlog(TOPIC, 0))
        await calling("shards", workers.published_shards(TOPIC))
    finally:
        await relays.aclose()
        await workers.aclose()


# --- on one server ------------------------------------------------------------------------------

COLOURS = {"sync": SYNC, "async": ASYNC}

PARTS = {
    **{
        f"{part}, {name}": (user, more, lambda url, _admin, t=tour, c=colour: t(url, c))
        for part, user, more, tour in (
            ("guard", "semel-guard", [], tour_of_ledger),
            ("admin", "semel-guard", acl.task("Admin"), tour_of_admin),
            ("log", "semel-log", [], tour_of_log),
        )
        for name, colour in COLOURS.items()
    },
    "inbox": ("semel-inbox", [], lambda url, _admin: tour_of_inbox(url)),
    "parked": ("semel-inbox", acl.task("parked"), lambda url, _admin: tour_of_parked(url)),
    "relay": ("semel-relay", [], tour_of_relay),
    "worker": ("semel-worker", [], tour_of_worker),
}


def one_less():
    """Each part without each of its own commands."""
    for part, (user, more, _tour) in PARTS.items():
        for command in acl.commands(more or acl.USERS[user]):
            yield pytest.param(part, command, id=f"{part} without {command}")


@pytest.mark.parametrize("part", PARTS)
async def test_part_with_documented_acl_is_refused_nothing(part, redis_server, redis_url):
    user, more, tour = PARTS[part]
    with acl.user_on([redis_server.port], user, *acl.USERS[user], *more) as access:
        await tour(redis_url.replace("redis://", f"redis://{access}"), redis_url)
        assert acl.refusals(redis_server.port) == set()


# Without these a part is slower: notifications do not come, a worker polls. redis-py forgives the
# loss of COMMAND once it has asked for it.
SLOWER = {"xread", "publish", "subscribe", "unsubscribe", "spublish", "ssubscribe", "sunsubscribe"}
FORGIVEN = SLOWER | {"command"}
# A worker that may not trim acknowledges all the same.
FORGIVEN_TO_WORKERS = FORGIVEN | {"xlen", "xtrim"}


async def refused_without(command, ports, tour, forgiven=FORGIVEN):
    """Take the tour; check that its failure, if there is one, names the missing rule."""
    try:
        await tour
    except RefusedError as refused:
        call, error = refused.args
        if command not in SLOWER:
            assert f"+{command}" in str(error).partition("ACL SETUSER <user> ")[2].split(), call
    else:
        assert command in forgiven, "no call failed"
    assert command in set().union(*map(acl.refusals, ports))


@pytest.fixture
def impatient(monkeypatch, request):
    if request.getfixturevalue("command") in SLOWER:
        monkeypatch.setitem(PATIENCE, "s", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("part", "command"), list(one_less()))
async def test_part_without_one_command_fails_and_names_it(part, command, redis_server, redis_url):
    user, more, tour = PARTS[part]
    with acl.user_on([redis_server.port], user, *acl.USERS[user], *more, f"-{command}") as access:
        url = redis_url.replace("redis://", f"redis://{access}")
        forgiven = FORGIVEN_TO_WORKERS if part == "worker" else FORGIVEN
        await refused_without(command, [redis_server.port], tour(url, redis_url), forgiven)


@pytest.mark.parametrize("colour", COLOURS.values(), ids=COLOURS)
async def test_key_outside_the_users_pattern_is_refused_with_the_pattern_to_add(
    colour, redis_server, redis_url
):
    rules = [*acl.USERS["semel-guard"], "resetkeys", "~other:*"]
    with (
        acl.user_on([redis_server.port], "semel-guard", *rules) as access,
        pytest.raises(RefusedError) as refused,
    ):
        await tour_of_ledger(redis_url.replace("redis://", f"redis://{access}"), colour)
    assert "ACL SETUSER <user> ~semel:*" in str(refused.value.args[1])


async def test_topic_outside_the_users_pattern_is_refused_with_the_pattern_to_add(
    redis_server, redis_url
):
    with acl.user_on([redis_server.port], "semel-relay", *acl.USERS["semel-relay"]) as access:
        broker = RedisBroker(redis_url.replace("redis://", f"redis://{access}"))
        with pytest.raises(BrokerUnavailableError, match=r"<user> ~invoices ~semel:\*"):
            await Sender(broker, "invoices").send(1)
        await broker.aclose()


async def test_user_without_channels_appends_and_is_warned_once(redis_server, redis_url, caplog):
    rules = [*acl.USERS["semel-log"], "resetchannels"]
    with acl.user_on([redis_server.port], "semel-log", *rules) as access:
        store = RedisStore(redis_url.replace("redis://", f"redis://{access}"))
        for number in range(3):
            await store.log(ASYNC).append("s", b"x", id=f"{number}")
        await store.aclose()
    assert [r.message.count("&semel:*") for r in caplog.records] == [1]


@pytest.mark.parametrize(
    ("task", "query"), [("a database other than 0", "1"), ("health_check_interval", "0?{}=1")]
)
async def test_option_of_the_url_needs_the_rule_of_its_task(task, query, redis_server, redis_url):
    place = redis_url.removesuffix("/0") + "/" + query.format(task)
    rules = [*acl.USERS["semel-guard"], *acl.task(task)]
    with acl.user_on([redis_server.port], "semel-guard", *rules) as access:
        await tour_of_ledger(place.replace("redis://", f"redis://{access}"), SYNC)
        assert acl.refusals(redis_server.port) == set()


async def test_group_is_left_with_the_rule_of_its_task(redis_server, redis_url):
    rules = [*acl.USERS["semel-worker"], *acl.task("leave(")]
    with acl.user_on([redis_server.port], "semel-worker", *rules) as access:
        broker = RedisBroker(redis_url.replace("redis://", f"redis://{access}"))
        await broker.join(TOPIC, GROUP)
        await broker.leave(TOPIC, GROUP)
        assert (await broker.backlog(TOPIC, 0)).groups == []
        await broker.aclose()


# --- what may be refused: INFO and CONFIG GET ---------------------------------------------------


@pytest.mark.parametrize("colour", COLOURS.values(), ids=COLOURS)
@pytest.mark.parametrize(
    ("permitted", "unseen"),
    [
        ([], ["eviction: the server refuses INFO", "CONFIG GET", "failover: the server refuses"]),
        (["+info"], ["CONFIG GET"]),
        (["+config|get"], ["eviction: the server refuses INFO", "failover: the server refuses"]),
    ],
)
async def test_guarantees_without_info_or_config_promise_nothing_and_say_why(
    permitted, unseen, colour, redis_server, redis_url
):
    rules = [*acl.USERS["semel-guard"], *permitted]
    with acl.user_on([redis_server.port], "semel-guard", *rules) as access:
        store = RedisStore(redis_url.replace("redis://", f"redis://{access}"))
        found = await store.ledger(colour).guarantees()
        await store.aclose()
    assert found.survives == frozenset()
    assert [line for line in found.why if "refuses" in line] == [
        line for line in found.why if any(words in line for words in unseen)
    ]
    assert sum("refuses" in line for line in found.why) == len(unseen)


async def test_broker_without_info_and_config_reports_what_it_cannot_check(redis_server, redis_url):
    with acl.user_on([redis_server.port], "semel-relay", *acl.USERS["semel-relay"]) as access:
        broker = RedisBroker(redis_url.replace("redis://", f"redis://{access}"))
        risks = await broker.risks()
        await broker.aclose()
    assert [risk.rpartition(" ")[2] for risk in risks] == ["+info", "+config|get"]


async def test_broker_with_info_and_config_reports_no_risk(redis_server, redis_url):
    rules = [*acl.USERS["semel-relay"], *acl.task("guarantees()")]
    with acl.user_on([redis_server.port], "semel-relay", *rules) as access:
        broker = RedisBroker(redis_url.replace("redis://", f"redis://{access}"))
        assert await broker.risks() == []
        await broker.aclose()


# --- on a cluster -------------------------------------------------------------------------------

ON_CLUSTER = acl.task("every part on a cluster")
SHARDED = acl.task("sharded")
CLUSTERED = {
    **{f"guard, {name}": ("semel-guard", [], tour_of_ledger, c) for name, c in COLOURS.items()},
    **{f"log, {name}": ("semel-log", SHARDED, tour_of_log, c) for name, c in COLOURS.items()},
}


@pytest.fixture
async def no_nodes_left():
    """Close the nodes that redis-py leaves open after a refused CLUSTER SLOTS."""
    yield
    for node in gc.get_objects():
        if type(node) is redis.asyncio.cluster.ClusterNode:
            await node.disconnect()


@pytest.mark.parametrize("part", CLUSTERED)
async def test_part_on_cluster_with_documented_acl_is_refused_nothing(
    part, redis_cluster, redis_cluster_url
):
    user, more, tour, colour = CLUSTERED[part]
    ports = [node.port for node in redis_cluster.nodes]
    with acl.user_on(ports, user, *acl.USERS[user], *more, *ON_CLUSTER) as access:
        await tour(redis_cluster_url.replace("://", f"://{access}"), colour)
        assert set().union(*map(acl.refusals, ports)) == set()


@pytest.mark.usefixtures("impatient", "no_nodes_left")
@pytest.mark.parametrize(
    ("part", "command"),
    [
        (part, command)
        for part, (_, more, *_) in CLUSTERED.items()
        for command in acl.commands([*more, *ON_CLUSTER])
    ],
)
async def test_part_on_cluster_without_one_command_fails_and_names_it(
    part, command, redis_cluster, redis_cluster_url
):
    user, more, tour, colour = CLUSTERED[part]
    ports = [node.port for node in redis_cluster.nodes]
    rules = [*acl.USERS[user], *more, *ON_CLUSTER, f"-{command}"]
    with acl.user_on(ports, user, *rules) as access:
        url = redis_cluster_url.replace("://", f"://{access}")
        await refused_without(command, ports, tour(url, colour))


# --- behind Sentinel ----------------------------------------------------------------------------


@pytest.fixture
def sentinel_user(redis_sentinel, redis_sentinel_url):
    """Make both users, with further rules for the sentinels; gives the URL."""
    with contextlib.ExitStack() as users:

        def make(*more):
            data = [server.port for server in redis_sentinel.data]
            sentinels = [server.port for server in redis_sentinel.sentinels]
            guard = acl.USERS["semel-guard"]
            access = users.enter_context(acl.user_on(data, "semel-guard", *guard))
            rules = [*acl.task("Sentinel"), *more]
            users.enter_context(acl.user_on(sentinels, "semel-sentinel", *rules))
            query = "?sentinel_username=semel-sentinel&sentinel_password=secret"
            return redis_sentinel_url.replace("://", f"://{access}") + query

        yield make


@pytest.mark.parametrize("colour", COLOURS.values(), ids=COLOURS)
async def test_guard_behind_sentinel_with_documented_acl_is_refused_nothing(
    colour, sentinel_user, redis_sentinel
):
    await tour_of_ledger(sentinel_user(), colour)
    for server in (*redis_sentinel.data, *redis_sentinel.sentinels):
        assert acl.refusals(server.port) == set()


@pytest.mark.parametrize("colour", COLOURS.values(), ids=COLOURS)
async def test_guard_behind_sentinel_without_its_rule_fails_and_names_it(colour, sentinel_user):
    with pytest.raises(RefusedError, match=r"ACL SETUSER <user> \+sentinel\|masters"):
        await tour_of_ledger(sentinel_user("-sentinel|masters"), colour)
