"""The brokers without a server."""

from __future__ import annotations

import pytest

from semel.brokers import MemoryBroker
from semel.testing.brokers import BrokerContract


class TestMemoryBroker(BrokerContract):
    @pytest.fixture(autouse=True)
    def _place(self):
        self.brokers = {}

    async def make(self, *, shards, maxlen):
        """There is no other process: both are the same object."""
        return self.brokers.setdefault((shards, maxlen), MemoryBroker(shards=shards, maxlen=maxlen))

    async def put_raw(self, broker, topic, shard, position, raw):
        broker._log(topic, shard).append(position, "", raw)
        return True
