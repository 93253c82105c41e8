"""Processes killed in the middle of publishing, reading and acknowledging, over one SQLite file."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import random
import resource
import signal
import sqlite3
import struct
import time

import pytest

from semel.brokers import SQLiteBroker
from semel.errors import BrokerUnavailableError
from semel.messages import Fenced, Full, Tail, Taken
from semel.testing.traffic import Sender, message
from support.child import Child, kill_before

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

TOPIC = "orders"


@contextlib.asynccontextmanager
async def opened(path, **settings):
    broker = SQLiteBroker(path, **settings)
    try:
        yield broker
    finally:
        await broker.aclose()


async def consumer_of(broker, fence):
    return await broker.consumer(TOPIC, "billing", 0, name=f"billing-{fence}", fence=fence)


def at(deliveries):
    return [delivery.message.position for delivery in deliveries]


def tail(position):
    return Tail(position, f"{TOPIC}-{position}") if position else Tail()


def check_the_books(path):
    """What is counted is what is there."""
    with contextlib.closing(sqlite3.connect(path)) as shell:
        length, last = shell.execute("SELECT length, tail_position FROM broker_shard").fetchone()
        count = "SELECT count(*), max(position) FROM broker_entry"
        assert shell.execute(count).fetchone() == (length, last)
        lost = (
            "SELECT count(*) FROM broker_pending WHERE position NOT IN "
            "(SELECT position FROM broker_entry)"
        )
        assert shell.execute(lost).fetchone() == (0,)


async def prepare(path):
    """Three were published and read, two are done, and the next publish trims."""
    async with opened(path, maxlen=2) as relays, opened(path, maxlen=2) as workers:
        reader = await consumer_of(workers, 1)
        await Sender(relays, TOPIC).send(1, 2, 3)
        await reader.ack((await reader.read(3))[:2])


def dies(path, nth, work, writer):
    def tell(number):
        os.write(writer, struct.pack("q", number))

    async def main():
        async with opened(path, maxlen=2) as broker:
            kill_before(broker._connections, nth)
            await work(broker, tell)

    asyncio.run(main())


def killed_at_every_statement(tmp_path, work, check):
    """Fork, work, die before statement 1, 2, 3 ...; check what is left each time."""
    for nth in itertools.count(1):
        path = tmp_path / f"{nth}.db"
        asyncio.run(prepare(path))
        reader, writer = os.pipe()

        with Child(functools.partial(dies, path, nth, work, writer)) as child:
            code = child.end()
        os.close(writer)
        told = [n for (n,) in struct.iter_unpack("q", os.read(reader, 4096))]
        os.close(reader)
        assert code in {0, -signal.SIGKILL}
        asyncio.run(check(path, told))
        check_the_books(path)
        if code == 0:
            return nth - 1
    raise AssertionError


def test_a_relay_killed_before_any_statement_has_published_all_or_nothing(tmp_path):
    batch = [message(TOPIC, position) for position in (4, 5, 6)]

    async def publish(broker, tell):
        receipt = await Sender(broker, TOPIC, fence=2).publish(batch, tail(3))
        tell(receipt.added)

    seen = set()

    async def check(path, told):
        async with opened(path, maxlen=2) as broker:
            there = (await broker.tail(TOPIC, 0)).position
            assert there in {3, 6}
            assert there == 6 or not told, "it was told that they are there"
            seen.add(there)
            again = await Sender(broker, TOPIC, fence=3).publish(batch, tail(3))
            assert again == Taken(6 - there)
            reader = await consumer_of(broker, 9)
            assert at(await reader.left_over()) == [3]
            assert at(await reader.read(10)) == [4, 5, 6]

    assert killed_at_every_statement(tmp_path, publish, check) > 5
    assert seen == {3, 6}


def test_a_worker_killed_before_any_statement_loses_nothing(tmp_path):
    handed, done = 0, 1_000

    async def work(broker, tell):
        await Sender(broker, TOPIC, fence=2).publish(
            [message(TOPIC, position) for position in (4, 5, 6)], tail(3)
        )
        reader = await consumer_of(broker, 2)
        left = await reader.left_over()
        new = await reader.read(2)
        for delivery in (*left, *new):
            tell(handed + delivery.message.position)
        await reader.ack([left[0], new[0]])
        for delivery in (left[0], new[0]):
            tell(done + delivery.message.position)

    seen = set()

    async def check(path, told):
        async with opened(path, maxlen=2) as broker:
            again = await Sender(broker, TOPIC, fence=3).publish(
                [message(TOPIC, position) for position in (4, 5, 6)], tail(3)
            )
            assert isinstance(again, Taken)
            reader = await consumer_of(broker, 3)
            left, new = await reader.left_over(), await reader.read(10)
            positions = at([*left, *new])
            assert positions in ([3, 4, 5, 6], [5, 6]), "both that were acknowledged, or neither"
            assert all(delivery.count > 1 for delivery in left)
            assert all(delivery.count == 1 for delivery in new)
            acknowledged = {n - done for n in told if n > done}
            assert not acknowledged & set(positions)
            in_hand = {n for n in told if n < done} - acknowledged
            assert in_hand - {3, 4} <= set(at(left))
            seen.add((len(left), len(new)))

    assert killed_at_every_statement(tmp_path, work, check) > 15
    assert seen == {(1, 3), (3, 1), (1, 1)}, "before the read, after it, after the acknowledgement"


def test_an_owner_killed_while_it_takes_over_leaves_the_rest_to_the_next(tmp_path):
    async def take_over(broker, tell):
        reader = await consumer_of(broker, 2)
        for delivery in await reader.left_over():
            tell(delivery.count)

    async def check(path, told):
        assert told in ([], [2])
        async with opened(path, maxlen=2) as broker:
            reader = await consumer_of(broker, 3)
            (left,) = await reader.left_over()
            assert left.message.position == 3
            assert left.count in ({3} if told else {2, 3})
            assert left.consumer in {"billing-1", "billing-2"}

    assert killed_at_every_statement(tmp_path, take_over, check) > 5


# --- at random ----------------------------------------------------------------------------------


async def relay(path, effects, fence):
    """Publishes on and on, beginning a little before the tail, as after a crash."""
    async with opened(path, maxlen=500) as broker:
        sender = Sender(broker, TOPIC, fence=fence)
        sender.follows = tail(max(0, (await broker.tail(TOPIC, 0)).position - 7))
        while not isinstance(receipt := await send_five(sender), Fenced):
            await asyncio.sleep(0.01 if isinstance(receipt, Full) else 0)


async def send_five(sender):
    begin = sender.follows.position + 1
    return await sender.send(*range(begin, begin + 5))


async def worker(path, effects, fence):
    """Writes down what it was handed, and acknowledges it then."""
    fd = os.open(effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    async with opened(path, maxlen=500) as broker:
        reader = await consumer_of(broker, fence)
        while left := await reader.left_over(10):
            await have_effect(reader, left, fd)
        while True:
            await have_effect(reader, await reader.read(10, wait_s=0.05), fd)


async def have_effect(reader, deliveries, fd):
    for delivery in deliveries:
        os.write(fd, struct.pack("q", delivery.message.position))
    await reader.ack(deliveries)


async def finish(path, effects):
    """The last owner finishes what all the others left. Returns where the tail is."""
    fd = os.open(effects, os.O_WRONLY | os.O_APPEND)
    async with opened(path, maxlen=500) as broker:
        reader = await consumer_of(broker, 1_000)
        while left := await reader.left_over(10):
            await have_effect(reader, left, fd)
        while new := await reader.read(100):
            await have_effect(reader, new, fd)
        os.close(fd)
        return (await broker.tail(TOPIC, 0)).position


@pytest.mark.slow
def test_relays_and_workers_killed_and_frozen_at_random_deliver_everything_in_order(tmp_path):
    """A frozen one is replaced, and goes on with its next line as soon as it wakes up."""
    path, effects = tmp_path / "events.db", tmp_path / "effects"
    chance, fences = random.Random(4), itertools.count(1)
    with contextlib.ExitStack() as stack:

        def begin(kind):
            fence = next(fences)
            return stack.enter_context(Child(lambda: asyncio.run(kind(path, effects, fence))))

        running = {kind: begin(kind) for kind in (relay, worker)}
        for turn in range(30):
            time.sleep(chance.uniform(0.01, 0.06))
            kind = (relay, worker)[turn % 2]
            before = running[kind]
            if freeze := chance.random() < 0.4:
                os.kill(before.pid, signal.SIGSTOP)
            else:
                before.kill()
            running[kind] = begin(kind)
            if freeze:
                time.sleep(chance.uniform(0.01, 0.04))
                os.kill(before.pid, signal.SIGCONT)
    last = asyncio.run(finish(path, effects))
    positions = [position for (position,) in struct.iter_unpack("q", effects.read_bytes())]
    assert list(dict.fromkeys(positions)) == [*range(1, last + 1)], "each, and first in order"
    assert last > 50
    assert len(positions) < 2 * last, "what was acknowledged does not come back"
    check_the_books(path)


# --- a full disk --------------------------------------------------------------------------------


def test_a_file_that_may_not_grow_has_published_nothing(tmp_path):
    """The size limit cuts a write in the middle, as a full disk does."""
    path = tmp_path / "events.db"
    asyncio.run(prepare(path))
    size = max(each.stat().st_size for each in tmp_path.iterdir())

    async def fill():
        async with opened(path, maxlen=2) as broker:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5_000, resource.RLIM_INFINITY))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            sender = Sender(broker, TOPIC)
            sender.follows = tail(3)
            large = message(TOPIC, 4, payload='"' + "x" * 1_000_000 + '"')
            with pytest.raises(BrokerUnavailableError):
                await sender.send_all([large])
            assert await broker.tail(TOPIC, 0) == tail(3)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert await sender.send_all([large]) == Taken(1)

    with Child(lambda: asyncio.run(fill())) as child:
        assert child.end() == 0
    check_the_books(path)


# --- forks --------------------------------------------------------------------------------------


def test_a_child_of_a_fork_goes_on_with_its_parents_broker(tmp_path):
    broker = SQLiteBroker(tmp_path / "events.db")

    async def send(*positions):
        sender = Sender(broker, TOPIC)
        sender.follows = await broker.tail(TOPIC, 0)
        assert await sender.send(*positions) == Taken(len(positions))

    asyncio.run(send(1))
    with Child(lambda: asyncio.run(send(2))) as child:
        assert child.end() == 0
    asyncio.run(send(3))

    async def read():
        reader = await consumer_of(broker, 1)
        found = at(await reader.read(10))
        await broker.aclose()
        return found

    assert asyncio.run(read()) == [1, 2, 3]
