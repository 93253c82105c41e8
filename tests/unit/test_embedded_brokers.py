"""The brokers without a server, where they say more than the contract asks of all brokers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading

import pytest

from semel.brokers import MemoryBroker, SQLiteBroker
from semel.colour import SYNC, run
from semel.errors import BrokerUnavailableError, SettingsError
from semel.keys import make_key
from semel.messages import Batch, Full, Tail, Taken
from semel.stores.sqlite import SQLiteStore, connections
from semel.testing.simulator import SimLoop
from semel.testing.traffic import Sender, message
from semel.values import Terms, Won

TOPIC = "orders"


@pytest.fixture(params=["memory", "sqlite"])
def opened(request, tmp_path):
    """Makes a broker, closed when the test ends."""
    made = []

    def open_broker(**settings):
        if request.param == "memory":
            made.append(MemoryBroker(**settings))
        else:
            made.append(SQLiteBroker(tmp_path / "events.db", **settings))
        return made[-1]

    yield open_broker
    for broker in made:
        asyncio.run(broker.aclose())


@pytest.fixture
def broker(opened):
    return opened()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.db"


@pytest.fixture
async def sqlite(path):
    broker = SQLiteBroker(path)
    yield broker
    await broker.aclose()


@pytest.fixture
def shell(sqlite, path):
    """Somebody else's connection to the same file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as shell:
        yield shell


async def consumer_of(broker, *, fence=1, group="billing"):
    return await broker.consumer(TOPIC, group, 0, name=f"{group}-{fence}", fence=fence)


def at(deliveries):
    return [delivery.message.position for delivery in deliveries]


# --- both ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"shards": 0}, {"maxlen": 0}, {"maxlen": -1}])
def test_settings_that_cannot_work_are_refused(opened, settings):
    with pytest.raises(SettingsError):
        opened(**settings)


async def test_a_shard_that_there_is_not_is_refused(broker):
    batch = Batch(TOPIC, 1, 1, Tail(), [message(TOPIC, 1)])
    for call in (
        broker.publish(batch),
        broker.tail(TOPIC, 1),
        broker.backlog(TOPIC, -1),
        broker.consumer(TOPIC, "billing", 1, name="a", fence=1),
    ):
        with pytest.raises(SettingsError, match="there is no shard"):
            await call


@pytest.mark.parametrize("positions", [(2, 1), (1, 1), (0,)])
async def test_positions_that_do_not_grow_are_the_callers_mistake(broker, positions):
    with pytest.raises(ValueError, match="positions grow"):
        await Sender(broker, TOPIC).send(*positions)
    assert await broker.tail(TOPIC, 0) == Tail()


async def test_a_group_that_has_left_keeps_nobody_waiting(opened):
    broker = opened(maxlen=1)
    await broker.join(TOPIC, "gone")
    sender = Sender(broker, TOPIC)
    reader = await consumer_of(broker)
    await sender.send(1, 2)
    await reader.ack(await reader.read(2))
    assert isinstance(await sender.send(3), Full)
    await broker.leave(TOPIC, "gone")
    assert await sender.send(3) == Taken(1)
    assert [each.group for each in (await broker.backlog(TOPIC, 0)).groups] == ["billing"]


async def test_a_consumer_of_a_group_that_has_left_reads_nothing_and_harms_nothing(broker):
    reader = await consumer_of(broker)
    await Sender(broker, TOPIC).send(1, 2)
    had = await reader.read(1)
    await broker.leave(TOPIC, "billing")
    assert await reader.read(1) == []
    assert await reader.left_over() == []
    await reader.ack(had)


async def test_closing_ends_a_read_that_waits(broker):
    reader = await consumer_of(broker)
    reading = asyncio.create_task(reader.read(1, wait_s=60))
    await asyncio.sleep(0.05)
    await reader.close()
    async with asyncio.timeout(5):
        assert await reading == []
    await Sender(broker, TOPIC).send(1)
    assert await reader.read(1) == []


async def test_a_zombie_that_waits_does_not_spin(broker, monkeypatch):
    """It learns nothing new by asking again at once, so it is let wait."""
    zombie = await consumer_of(broker, fence=1)
    await consumer_of(broker, fence=2)
    await Sender(broker, TOPIC).send(1)
    begun = asyncio.get_running_loop().time()
    assert await zombie.read(1, wait_s=0.1) == []
    assert asyncio.get_running_loop().time() - begun >= 0.09


async def test_a_publish_in_another_thread_wakes_a_reader(broker):
    reader = await consumer_of(broker)
    reading = asyncio.create_task(reader.read(1, wait_s=60))
    await asyncio.sleep(0.05)
    sent = threading.Thread(target=lambda: asyncio.run(Sender(broker, TOPIC).send(1)))
    sent.start()
    async with asyncio.timeout(5):
        assert at(await reading) == [1]
    sent.join()


async def test_a_reader_can_do_what_it_likes_with_a_message(broker):
    one, other = await consumer_of(broker), await consumer_of(broker, group="mail")
    sent = message(TOPIC, 1, headers={"a": "1"})
    await Sender(broker, TOPIC).send_all([sent])
    (delivery,) = await one.read(1)
    delivery.message.headers.clear()
    assert (await other.read(1))[0].message == sent


# --- memory -------------------------------------------------------------------------------------


def test_waiting_in_memory_takes_simulated_time():
    loop = SimLoop(seed=1)
    broker = MemoryBroker()

    async def waits():
        reader = await consumer_of(broker)
        assert await reader.read(1, wait_s=3600) == []
        return loop.time()

    assert loop.run(waits()) >= 3600


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_call_leaves_no_lock_taken():
    from semel.brokers import memory

    broker = MemoryBroker()
    with memory._lock:
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(asyncio.wait_for(Sender(broker, TOPIC).send(1), 5))
            except BaseException:  # noqa: BLE001 - a child must not return into the parent's tests
                os._exit(1)
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- the file -----------------------------------------------------------------------------------


async def test_entries_are_there_to_read(sqlite, shell):
    await Sender(sqlite, TOPIC).send(1, 2)
    rows = shell.execute(
        "SELECT topic, position, document ->> '$.type', document ->> '$.data.n' FROM broker_entry"
    ).fetchall()
    assert rows == [(TOPIC, 1, "order.placed", 1), (TOPIC, 2, "order.placed", 2)]


async def test_an_applications_file_may_carry_a_broker(path):
    with contextlib.closing(sqlite3.connect(path)) as theirs:
        theirs.execute("CREATE TABLE invoice (id INTEGER PRIMARY KEY)")
        theirs.execute("INSERT INTO invoice VALUES (7)")
        theirs.execute("PRAGMA user_version = 42")
        theirs.commit()
        broker = SQLiteBroker(path)
        assert await Sender(broker, TOPIC).send(1) == Taken(1)
        await broker.aclose()
        assert theirs.execute("SELECT id FROM invoice").fetchall() == [(7,)]
        assert theirs.execute("PRAGMA user_version").fetchone() == (42,)


@pytest.mark.parametrize("first", ["ledger", "broker"])
async def test_a_ledger_and_a_broker_share_a_file(path, first):
    if first == "ledger":
        store, broker = SQLiteStore(path), SQLiteBroker(path)
    else:
        broker, store = SQLiteBroker(path), SQLiteStore(path)
    claim = store.ledger(SYNC).claim(make_key("a"), attempt="a", terms=Terms())
    assert isinstance(run(claim), Won)
    assert await Sender(broker, TOPIC).send(1) == Taken(1)
    await broker.aclose()
    await store.aclose()
    SQLiteStore(path).close()


async def test_a_file_of_other_shards_says_how_many(path):
    await SQLiteBroker(path, shards=4).aclose()
    with pytest.raises(SettingsError, match="laid out in 4 shards, not 1: write shards=4"):
        SQLiteBroker(path)


async def test_a_file_of_another_version_is_refused(path):
    await SQLiteBroker(path).aclose()
    with contextlib.closing(sqlite3.connect(path)) as shell:
        shell.execute("UPDATE broker_layout SET version = 2")
        shell.commit()
    with pytest.raises(SettingsError, match="upgrade Semel"):
        SQLiteBroker(path)


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (":memory:", "memory://"),
        ("redis://h", "no SQLite file"),
        ("sqlite:///a.db?wal=no", "no setting 'wal'"),
        ("/nowhere/at/all.db", "directory that exists"),
    ],
)
def test_a_place_that_cannot_be_is_refused(place, says):
    with pytest.raises(SettingsError, match=says):
        SQLiteBroker(place)


def test_opening_at_once_makes_one_set_of_tables(path):
    barrier, errors = threading.Barrier(4), []

    def opens():
        barrier.wait()
        try:
            asyncio.run(SQLiteBroker(path, shards=2).aclose())
        except Exception as error:  # noqa: BLE001 - shown below
            errors.append(error)

    threads = [threading.Thread(target=opens) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with contextlib.closing(sqlite3.connect(path)) as shell:
        assert shell.execute("SELECT * FROM broker_layout").fetchall() == [(1, 2)]


async def test_a_locked_file_is_unavailable_and_publishing_again_is_right(path, shell, monkeypatch):
    monkeypatch.setattr(connections, "BUSY_S", 0.05)
    broker = SQLiteBroker(path)
    sender = Sender(broker, TOPIC)
    shell.execute("BEGIN IMMEDIATE")
    with pytest.raises(BrokerUnavailableError, match="locked"):
        await sender.send(1)
    shell.execute("COMMIT")
    assert await sender.send(1) == Taken(1)
    await broker.aclose()


async def test_a_damaged_file_is_unavailable(path):
    broker = SQLiteBroker(path)
    await Sender(broker, TOPIC).send(*range(1, 200))
    await broker.aclose()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 40_000)
    with pytest.raises(BrokerUnavailableError, match="damaged"):
        await broker.tail(TOPIC, 0)
    await broker.aclose()


async def test_looking_in_vain_takes_no_lock(sqlite, shell):
    reader = await consumer_of(sqlite)
    shell.execute("BEGIN IMMEDIATE")
    async with asyncio.timeout(2):
        assert await reader.left_over() == []
        assert await reader.read(10, wait_s=0.05) == []
    shell.execute("ROLLBACK")


async def test_reading_costs_one_transaction_and_an_acknowledgement_one(sqlite):
    reader = await consumer_of(sqlite)
    await Sender(sqlite, TOPIC).send(*range(1, 51))
    said = []
    sqlite._connections.read(lambda c: c.set_trace_callback(said.append))
    found = await reader.read(50)
    assert len(found) == 50
    assert said.count("COMMIT") == 1
    await reader.ack(found)
    assert said.count("COMMIT") == 2
    sqlite._connections.read(lambda c: c.set_trace_callback(None))


async def test_readers_that_wait_look_together(sqlite, monkeypatch):
    looks = []
    tails = sqlite._rows.tails
    monkeypatch.setattr(sqlite._rows, "tails", lambda: looks.append(1) or tails())
    readers = [await consumer_of(sqlite, group=f"g{n}") for n in range(10)]
    await asyncio.gather(*(reader.read(1, wait_s=0.3) for reader in readers))
    assert 0 < len(looks) <= 16


async def test_what_a_cancelled_read_was_handed_comes_with_the_next(sqlite):
    """In order, to the same reader: it would park what comes behind a gap."""
    reader = await consumer_of(sqlite)
    sender = Sender(sqlite, TOPIC)
    got = []
    for position in range(1, 31):
        await sender.send(position)
        reading = asyncio.create_task(reader.read(10))
        for _ in range(position % 4):
            await asyncio.sleep(0)
        if position % 3:
            reading.cancel()
        (found,) = await asyncio.gather(reading, return_exceptions=True)
        got += [] if isinstance(found, BaseException) else at(found)
    async with asyncio.timeout(5):
        while len(got) < 30:
            got += at(await reader.read(10, wait_s=1))
    assert got == [*range(1, 31)]


async def test_what_a_cancelled_call_took_over_comes_with_the_next(sqlite):
    first = await consumer_of(sqlite)
    await Sender(sqlite, TOPIC).send(*range(1, 11))
    await first.read(10)
    second = await consumer_of(sqlite, fence=2)
    got = []
    for turn in range(20):
        taking = asyncio.create_task(second.left_over(2))
        await asyncio.sleep(0)
        if turn % 2:
            taking.cancel()
        (found,) = await asyncio.gather(taking, return_exceptions=True)
        got += [] if isinstance(found, BaseException) else at(found)
    assert got == [*range(1, 11)]


async def test_an_entry_that_somebody_deleted_is_handed_over_as_unreadable(sqlite, shell):
    first = await consumer_of(sqlite)
    await Sender(sqlite, TOPIC).send(1, 2)
    await first.read(2)
    shell.execute("DELETE FROM broker_entry WHERE position = 1")
    second = await consumer_of(sqlite, fence=2)
    gone, there = await second.left_over()
    assert (gone.message, bool(gone.problem), there.message.position) == (None, True, 2)


async def test_the_file_does_not_grow_while_everybody_keeps_up(path):
    broker = SQLiteBroker(path, maxlen=50)
    reader, sender = await consumer_of(broker), Sender(broker, TOPIC)
    for turn in range(60):
        await sender.send(*range(turn * 50 + 1, turn * 50 + 51))
        await reader.ack(await reader.read(50))
    await broker.aclose()
    assert path.stat().st_size < 400_000
    with contextlib.closing(sqlite3.connect(path)) as shell:
        assert shell.execute("SELECT count(*) FROM broker_pending").fetchone() == (0,)
        (length,) = shell.execute("SELECT length FROM broker_shard").fetchone()
        assert shell.execute("SELECT count(*) FROM broker_entry").fetchone() == (length,)
        assert length <= 100
