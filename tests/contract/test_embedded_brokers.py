"""The brokers without a server."""

from __future__ import annotations

import pytest

from semel.brokers import MemoryBroker, SQLiteBroker
from semel.testing.brokers import BrokerContract
from semel.testing.traffic import Sender


class TestMemoryBroker(BrokerContract):
    quiet_s = 0.01

    @pytest.fixture(autouse=True)
    def _place(self):
        self.brokers = {}

    async def make(self, *, shards, maxlen):
        """There is no other process: both are the same object."""
        return self.brokers.setdefault((shards, maxlen), MemoryBroker(shards=shards, maxlen=maxlen))

    async def put_raw(self, broker, topic, shard, position, raw):
        broker._log(topic, shard).append(position, "", raw)
        return True


class TestSQLiteBroker(BrokerContract):
    examples = 25  # every step of a history waits for the disk
    quiet_s = 0.05

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path):
        self.path = tmp_path / "events.db"

    async def make(self, *, shards, maxlen):
        return SQLiteBroker(self.path, shards=shards, maxlen=maxlen)

    async def put_raw(self, broker, topic, shard, position, raw):
        def put(connection):
            connection.execute(
                "INSERT INTO broker_entry VALUES (?, ?, ?, '', ?)", (topic, shard, position, raw)
            )
            connection.execute("UPDATE broker_shard SET tail_position = ?", (position,))

        broker._connections.write(put)
        return True


@pytest.mark.parametrize("of", ["memory", "sqlite"])
async def test_last_ack_trims_to_the_target_of_the_broker_that_publishes(of, tmp_path):
    path = tmp_path / "events.db"
    broker = MemoryBroker(maxlen=5) if of == "memory" else SQLiteBroker(path, maxlen=5)
    consumer = await broker.consumer("orders", "billing", 0, name="w", fence=1)
    await Sender(broker, "orders").send(*range(1, 31))
    await consumer.ack(await consumer.read(100))
    assert (await broker.backlog("orders", 0)).length == 5
    await broker.aclose()


@pytest.mark.parametrize(("maxlen", "left"), [(None, 30), (20, 20)])
async def test_sqlite_worker_leaves_trimming_to_the_process_that_publishes(maxlen, left, tmp_path):
    path = tmp_path / "events.db"
    relays, workers = SQLiteBroker(path, maxlen=maxlen), SQLiteBroker(path, maxlen=5)
    await Sender(relays, "orders").send(*range(1, 31))
    consumer = await workers.consumer("orders", "billing", 0, name="w", fence=1)
    await consumer.ack(await consumer.read(100))
    await workers.tail("orders", 0)
    assert (await workers.backlog("orders", 0)).length == 30
    await relays.tail("orders", 0)
    assert (await workers.backlog("orders", 0)).length == left
    await relays.aclose()
    await workers.aclose()
