"""Relays, workers, gateways, rooms and the doctor run with the Redis users of the docs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap

import httpx
import pytest
from typer.testing import CliRunner

from semel.brokers.redis import RedisBroker
from semel.bus import Publisher, Stages
from semel.cli.app import app
from semel.inbox import RedisInbox
from semel.relay import Relay
from semel.stores.redis import RedisStore
from semel.stores.sql import schema
from semel.worker import Worker
from support import acl
from support.relay_process import Running, add

EVENTS = 20
SHARDS = 2


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    schema.init(url)
    return url


@pytest.fixture
def user(redis_server, redis_url):
    """Make users of the page; gives the URL for each."""
    with contextlib.ExitStack() as users:

        def make(name, *more):
            rules = (*acl.USERS[name], *more)
            access = users.enter_context(acl.user_on([redis_server.port], name, *rules))
            return redis_url.replace("redis://", f"redis://{access}")

        yield make


async def test_relay_and_worker_with_documented_acl_deliver_every_event(
    user, database, redis_server
):
    add(database, range(EVENTS))
    relays = RedisBroker(user("semel-relay"), shards=SHARDS)
    workers = RedisBroker(user("semel-worker"), shards=SHARDS)
    inbox = RedisInbox(user("semel-inbox"))
    relay, worker = Relay(database, relays), Worker(workers, "billing", inbox)
    handled, everything = [], asyncio.Event()

    @worker.on(topic="orders")
    async def handle(message, _session):
        handled.append(message.data["n"])
        if len(handled) == EVENTS:
            everything.set()

    running = [asyncio.create_task(each.run()) for each in (relay, worker)]
    try:
        await asyncio.wait_for(everything.wait(), 30)
        assert relay.status().ready
        assert worker.status().ready
    finally:
        relay.stop()
        worker.stop()
        await asyncio.gather(*running)
        for each in (relays, workers, inbox):
            await each.aclose()
    assert sorted(handled) == list(range(EVENTS))
    assert acl.refusals(redis_server.port) == set()


SHOP = """
from semel.brokers.redis import RedisBroker
from semel.inbox import RedisInbox
from semel.worker import Worker

worker = Worker(RedisBroker({broker!r}, shards={shards}), "billing", RedisInbox({inbox!r}))

@worker.on(topic="orders")
async def handle(message, session):
    pass
"""


def test_relay_and_worker_commands_with_documented_acl_deliver_every_event(
    user, database, redis_server, tmp_path
):
    add(database, range(EVENTS))
    broker, inbox = user("semel-worker"), user("semel-inbox")
    shop = textwrap.dedent(SHOP).format(broker=broker, inbox=inbox, shards=SHARDS)
    (tmp_path / "acl_shop.py").write_text(shop)
    to = f"{user('semel-relay')}?shards={SHARDS}"
    with (
        Running("relay", database, "--to", to) as relay,
        Running("worker", "acl_shop:worker", cwd=tmp_path) as worker,
    ):
        worker.until(lambda: worker.metric("semel_worker_applied_total") == EVENTS, "effects")
        relay.until(lambda: relay.ready["ready"], "the relay to be ready")
        worker.until(lambda: worker.ready["ready"], "the worker to be ready")
        assert (relay.stop(), worker.stop()) == (0, 0)
    # The worker asks for parked messages once when it starts, and ignores a refusal.
    assert acl.refusals(redis_server.port) <= {"scan"}


# --- parts on the log -----------------------------------------------------------------------------


async def test_gateway_with_documented_acl_is_ready_and_serves_a_job(user, redis_server):
    url = user("semel-log")
    store = RedisStore(url)
    await Publisher(store, stages=Stages({"work": (1, 9)})).publish("7", "work", 1, {"n": 1})
    await store.aclose()
    with Running("gateway", url, "--port", "0") as gateway:
        assert gateway.ready["ready"]
        at = gateway.said.partition("jobs at ")[2].partition("/JOB_ID")[0]
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{at}/7")).status_code == 200
        assert gateway.stop() == 0
    assert acl.refusals(redis_server.port) == set()


TALLY = """
from semel.rooms import Room

class Tally(Room):
    def apply(self, state, action, ctx):
        raise NotImplementedError

    def view(self, state, viewer):
        return state
"""


def test_rooms_with_documented_acl_are_ready(user, redis_server, tmp_path):
    (tmp_path / "tally_of_acl.py").write_text(TALLY)
    words = ("tally_of_acl:Tally", "--store", user("semel-log"), "--port", "0", "--trust")
    with Running("rooms", *words, cwd=tmp_path) as rooms:
        assert rooms.ready["ready"]
        assert rooms.stop() == 0
    assert acl.refusals(redis_server.port) == set()


# --- the doctor -----------------------------------------------------------------------------------


def examine(database, to, *options):
    words = ["doctor", database, "--broker", to, "--wait", "10s", "--json", *options]
    checks = json.loads(CliRunner().invoke(app, words).stdout)["checks"]
    return {check["row"]: check for check in checks}


def test_doctor_with_documented_acl_sees_its_canary(user, database, redis_server):
    doctors = user("semel-worker", *acl.task("canary"), "+info", "+config|get")
    with Running("relay", database, "--to", f"{user('semel-relay')}?shards={SHARDS}") as relay:
        relay.until_owned(SHARDS)
        # Its eleventh canary is the first that is trimmed.
        for _ in range(11):
            found = examine(database, f"{doctors}?shards={SHARDS}")
            assert found["canary"]["verdict"] == "ok", found["canary"]
        relay.until(lambda: relay.ready["ready"], "the relay to be ready")
    assert acl.refusals(redis_server.port) == set()


def test_doctor_without_a_rule_for_its_canary_advises_the_rule(user, database):
    found = examine(database, f"{user('semel-worker')}?shards={SHARDS}")
    assert found["canary"]["verdict"] == "failed"
    assert "ACL SETUSER <user> ~semel.canary." in found["canary"]["advice"]


def test_doctor_without_canary_needs_no_rule_for_it(user, database):
    found = examine(database, f"{user('semel-worker')}?shards={SHARDS}", "--no-canary")
    assert found["canary"]["verdict"] == "not checked"
    assert not [row for row, check in found.items() if "refused" in check["figure"]]
