"""The brokers without a server."""

from __future__ import annotations

import pytest

from semel.brokers import MemoryBroker, SQLiteBroker
from semel.testing.brokers import BrokerContract


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
