"""The processes of one party: producers, relays and workers, each to be killed at any moment.

    python -m support.outbox_party        # then a line for each process that is to start:
    produce DATABASE SEED
    relay DATABASE BROKER
    work DATABASE BROKER

A producer writes a row of `truth` in the same transaction as the event: what is there was
committed. A worker's effect is a row of `effect`, which would take the same event twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import random
import signal
import sys
import threading
import time
import uuid

import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import create_async_engine

from semel.brokers import connect
from semel.inbox import Retry, SQLInbox
from semel.outbox import Event, Outbox
from semel.relay import Relay
from semel.stores.sql import SQLStore
from semel.stores.sql.lines import parse, with_driver
from semel.worker import Worker
from support.nursery import serve

log = logging.getLogger("party")

LEASE_S = 1.5
AGGREGATES = 25
TOPICS = ("party:cases", "party:watches")
GROUP = "party"
PRODUCERS = 4  # in each process

METADATA = sa.MetaData()
TRUTH = sa.Table(
    "truth",
    METADATA,
    sa.Column("event_id", sa.String(64), primary_key=True),
    sa.Column("topic", sa.String(64), nullable=False),
    sa.Column("aggregate", sa.Integer, nullable=False),
)
EFFECT = sa.Table(
    "effect",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("event_id", sa.String(64), nullable=False),
    sa.Column("topic", sa.String(64), nullable=False),
    sa.Column("aggregate", sa.Integer, nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
)


def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(with_driver(parse(url), "sync"), pool_pre_ping=True)


# --- producing ----------------------------------------------------------------------------------


def produce(url: str, seed: int) -> None:
    """Until SIGTERM: transactions that overlap, end in any order, and sometimes not at all."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine, outbox = engine_of(url), Outbox()
    hands = [
        threading.Thread(
            target=_produce, args=(engine, outbox, random.Random(seed * 100 + n), stop)
        )
        for n in range(PRODUCERS)
    ]
    for hand in hands:
        hand.start()
    # Woken now and then: a process that thaws may hear a signal in another thread than this one.
    while any(hand.is_alive() for hand in hands):
        hands[0].join(0.2)


def _produce(engine: sa.Engine, outbox: Outbox, chance: random.Random, stop) -> None:
    while not stop.wait(chance.uniform(0, 0.02)):
        # A server that is down, or was killed under the COMMIT: what is there tells what happened.
        try:
            _transaction(engine, outbox, chance)
        except sa.exc.SQLAlchemyError as error:
            log.warning("not committed, or not known: %s", str(error).splitlines()[0])


def _transaction(engine: sa.Engine, outbox: Outbox, chance: random.Random) -> None:
    with orm.Session(engine) as session:
        for _ in range(chance.randint(1, 3)):
            id, topic, number = (
                str(uuid.uuid4()),
                chance.choice(TOPICS),
                chance.randrange(AGGREGATES),
            )
            session.execute(TRUTH.insert().values(event_id=id, topic=topic, aggregate=number))
            event = Event(
                type="case.changed",
                aggregate_type="case",
                aggregate_id=number,
                payload={"case": number, "note": "x" * chance.randint(0, 300)},
                topic=topic,
                id=id if chance.random() < 0.5 else None,
            )
            added = outbox.add(session, event)
            if added.id != id:
                session.execute(
                    TRUTH.update().where(TRUTH.c.event_id == id).values(event_id=added.id)
                )
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 0.1))
        if chance.random() < 0.2:
            session.rollback()
        else:
            session.commit()


def dawdle(url: str) -> None:
    """Transactions that write, are about something else, and stay open for long."""
    engine = engine_of(url)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while not stop.is_set():
        with contextlib.suppress(sa.exc.SQLAlchemyError), engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO unrelated VALUES (1)")
            stop.wait(5)


# --- relaying and working -----------------------------------------------------------------------


async def _until_told(runs, stop) -> None:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGUSR1, _tell_tasks)
    await runs()


def _tell_tasks() -> None:
    """What each task is at: for whoever wonders why this process does not end."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()


async def relay(url: str, to: str) -> None:
    broker = connect(to)
    store = SQLStore(url)
    relay = Relay(store, broker, lease_s=LEASE_S, batch=50, keep_s=30.0)
    try:
        await _until_told(relay.run, relay.stop)
    finally:
        await broker.aclose()
        await store.aclose()


async def work(url: str, to: str) -> None:
    broker = connect(to)
    store = SQLStore(url)
    engine = create_async_engine(with_driver(parse(url), "async"), pool_pre_ping=True)
    inbox = SQLInbox(engine, retry=Retry(attempts=5, first_s=0.05, most_s=1.0, crashes=1000))
    worker = Worker(broker, group=GROUP, inbox=inbox, store=store, lease_s=LEASE_S, batch=20)

    @worker.on("case.changed", topic=TOPICS)
    async def changed(message, session) -> None:
        await session.execute(
            EFFECT.insert().values(
                event_id=message.id,
                topic=message.topic,
                aggregate=int(message.aggregate_id),
                seq=message.seq,
            )
        )
        if random.random() < 0.002:
            raise RuntimeError("a handler that fails now and then")

    try:
        await _until_told(worker.run, worker.stop)
    finally:
        await broker.aclose()
        await store.aclose()
        await engine.dispose()


# --- who plays what -----------------------------------------------------------------------------


def play(role: str, *words: str) -> None:
    logging.basicConfig(format=f"%(asctime)s {role} %(process)d %(message)s", force=True)
    faulthandler.register(signal.SIGUSR2)
    match role:
        case "produce":
            produce(words[0], int(words[1]))
        case "dawdle":
            dawdle(*words)
        case "relay":
            asyncio.run(relay(*words))
        case "work":
            asyncio.run(work(*words))
        case _:
            raise ValueError(role)


if __name__ == "__main__":
    serve(lambda asked: play(*asked["words"].split()))
