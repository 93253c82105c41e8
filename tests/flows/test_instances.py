"""Two relays, workers, routers, gateways and room servers of one kind in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import Session

from semel.brokers import MemoryBroker
from semel.bus import Publisher, Router
from semel.errors import SettingsError
from semel.health import serve
from semel.http.sse import Gateway
from semel.inbox import MemoryInbox
from semel.outbox import Event, Outbox
from semel.relay import Relay
from semel.rooms import Rooms
from semel.stores import MemoryStore
from semel.stores.sql import init
from semel.stores.sql.lines import parse, with_driver
from semel.worker import Worker
from support.rooms import Cards, Client, acted, door_to
from support.viewers import Connection

WITHIN_S = 30.0
SHARDS = 4


async def until(condition):
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(*parts):
    """Run them, and stop those that were not stopped."""
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield tasks
    finally:
        for part in parts:
            part.stop()
        await asyncio.gather(*tasks)


# --- outbox to inbox ----------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres and redis", "mariadb and nats"])
def urls(request, tmp_path):
    """A database with an outbox and an inbox, and a broker."""
    if request.param == "sqlite":
        database, broker = f"sqlite+pysqlite:///{tmp_path}/shop.db", f"sqlite:///{tmp_path}/shop.db"
    else:
        server, _, broker = request.param.partition(" and ")
        database = request.getfixturevalue(f"{server}_url")
        broker = request.getfixturevalue(f"{broker}_url")
    init(database)
    return database, f"{broker}?shards={SHARDS}"


# The id orders the effects: without it, PostgreSQL may return rows in any order.
EFFECT = sa.Table(
    "effect",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("said", sa.Text),
)


class Shop:
    """The application: it adds events to its outbox, and its handlers write what they get."""

    def __init__(self, database):
        self.engine = sa.create_engine(with_driver(parse(database), "sync"))
        self.outbox = Outbox(routes={"order.placed": "orders"})
        EFFECT.create(self.engine)

    def place_orders(self, count):
        for number in range(count):
            event = Event(
                type="order.placed",
                aggregate_type="order",
                aggregate_id=number % 8,
                payload={"number": number},
            )
            with Session(self.engine) as session, session.begin():
                self.outbox.add(session, event)

    def worker(self, broker, group, database):
        worker = Worker(broker, group, database, lease_s=5.0)

        @worker.on("order.placed", topic="orders")
        async def placed(message, session):
            said = f"{group} {message.aggregate_id} {message.seq}"
            await session.execute(EFFECT.insert(), {"said": said})

        return worker

    def applied(self):
        """What each group has applied, by aggregate, in order."""
        found = defaultdict(list)
        with self.engine.begin() as connection:
            every = connection.scalars(sa.select(EFFECT.c.said).order_by(EFFECT.c.id)).all()
        for said in every:
            group, aggregate, seq = said.split(" ")
            found[group, aggregate].append(int(seq))
        return found


def are_shared(parts):
    """Return whether every shard has one owner among the parts, and every part owns one."""
    owned = [part.status().owned for part in parts]
    return all(owned) and sorted(shard for some in owned for shard in some) == [*range(SHARDS)]


async def test_relays_and_workers_of_one_process_share_the_shards_and_apply_each_event_once(urls):
    database, broker = urls
    shop = Shop(database)
    relays = [Relay(database, broker, lease_s=5.0) for _ in range(2)]
    workers = [shop.worker(broker, "billing", database) for _ in range(2)]
    alone = shop.worker(broker, "mail", database)
    async with running(*relays, *workers, alone):
        await until(lambda: are_shared(relays) and are_shared(workers) and are_shared([alone]))
        await asyncio.to_thread(shop.place_orders, 40)
        await until(lambda: sum(map(len, shop.applied().values())) >= 80)
        relays[0].stop()
        workers[1].stop()
        await until(lambda: are_shared(relays[1:]) and are_shared(workers[:1]))
        await asyncio.to_thread(shop.place_orders, 40)
        await until(lambda: sum(map(len, shop.applied().values())) >= 160)
    every = {(group, str(n)) for group in ("billing", "mail") for n in range(8)}
    assert shop.applied() == {key: [*range(1, 11)] for key in every}
    shop.engine.dispose()


# --- the event bus and rooms --------------------------------------------------------------------


SERVERS = ("postgres_tables_url", "mariadb_tables_url", "redis_url", "redis_cluster_url")


@pytest.fixture(params=["sqlite", "sqlite+pysqlite", *SERVERS])
def url(request, tmp_path):
    """A store with a log, whose instances are each opened by its URL."""
    if request.param in SERVERS:
        return request.getfixturevalue(request.param)
    url = f"{request.param}:///{tmp_path}/semel.db"
    if request.param == "sqlite+pysqlite":
        init(url)
    return url


STAGES = {"vision": 10, "rule": 20, "answer": 30, "reward": 40, "done": 50}
SHOWN = [*enumerate(STAGES.values(), start=1), "end"]


async def test_routers_and_gateways_of_one_process_show_every_event_once_and_in_order(url):
    routers = [Router(url, url, shards=SHARDS, lease_s=5.0) for _ in range(2)]
    gateways = [Gateway(url, unknown="wait") for _ in range(3)]
    jobs = [f"job-{n}" for n in range(6)]
    async with (
        Publisher(url, shards=SHARDS) as one,
        Publisher(url, shards=SHARDS) as two,
        running(*routers),
    ):
        await until(lambda: are_shared(routers))
        viewers = [Connection(gateway, f"/{job}") for gateway in gateways for job in jobs]
        for number, (stage, seq) in enumerate(STAGES.items()):
            for job in jobs:
                await (one, two)[number % 2].publish(job, stage, seq, None)
            if stage == "rule":
                routers[0].stop()
                await gateways[0].aclose()
        for viewer in viewers[len(jobs) :]:
            await viewer.ended()
            assert viewer.told == SHOWN
        await asyncio.gather(*(viewer.task for viewer in viewers))
    await asyncio.gather(*(gateway.aclose() for gateway in gateways))


def present(client):
    told = client.all("PRESENCE")
    return told[-1]["users"] if told else None


async def test_room_servers_of_one_process_tell_the_members_of_both_and_one_outlives_the_other(url):
    doors = [door_to(Rooms(url, Cards(), name="table"), presence=True) for _ in range(2)]
    await acted(doors[0].rooms, "host", "say")
    ann, bob = (Client(door, user=user) for door, user in zip(doors, ("ann", "bob"), strict=True))
    await ann.join()
    await bob.join()
    for client in (ann, bob):
        await until(lambda client=client: present(client) == ["ann", "bob"])
    assert (await ann.act("sit", "a-1"))["success"]
    again = await bob.act("sit", "b-1")
    assert (again["success"], again["reply"]) == (True, {"seat": 2})
    await doors[0].drain(1)
    await doors[0].aclose()
    await doors[0].rooms.aclose()
    await until(lambda: present(bob) == ["bob"])
    assert (await bob.act("deal"))["success"]
    await bob.hang_up()
    await doors[1].aclose()
    await doors[1].rooms.aclose()


# --- their numbers ------------------------------------------------------------------------------


async def test_two_workers_of_one_group_cannot_be_served_at_one_address():
    """Their numbers have the same labels, and another name would be another group."""
    workers = [Worker(MemoryBroker(), "billing", MemoryInbox(), MemoryStore()) for _ in range(2)]
    with pytest.raises(SettingsError, match=r"called worker billing, .*; serve each at an address"):
        async with serve(*workers, at="127.0.0.1:0"):
            pass
    first, second = (serve(worker, at="127.0.0.1:0") for worker in workers)
    async with first as one, second as two:
        assert one != two
