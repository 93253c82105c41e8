"""What the contract asks of a broker that declares as little as it may."""

from __future__ import annotations

import pytest

from semel.testing.brokers import BrokerContract
from support.plain_queue import PlainQueue


class TestPlainQueue(BrokerContract):
    quiet_s = 0.02

    @pytest.fixture(autouse=True)
    def _place(self):
        self.brokers = {}

    async def make(self, *, shards, maxlen):
        return self.brokers.setdefault(shards, PlainQueue(shards=shards))

    async def die(self, broker, consumer):
        await consumer.close()
