"""The broker on NATS JetStream."""

from __future__ import annotations

import pytest

from semel.brokers import NatsBroker
from semel.brokers.nats.line import Request
from semel.messages import Taken
from semel.testing.brokers import ODD, BrokerContract
from semel.testing.traffic import Sender, message


class TestNatsBroker(BrokerContract):
    examples = 15  # every step of a history is several round trips

    @pytest.fixture(autouse=True)
    def _place(self, nats_server):
        nats_server.ensure_running()
        self.url = nats_server.url

    async def make(self, *, shards, maxlen):
        return NatsBroker(self.url, shards=shards, maxlen=maxlen)

    async def put_raw(self, broker, topic, shard, position, raw):
        await broker._line.ask(Request(broker._stream(topic, shard).subject, raw))
        return True


@pytest.mark.parametrize("odd", ODD)
async def test_a_message_in_binary_mode_arrives_to_the_byte(nats_url, odd):
    broker = NatsBroker(nats_url, mode="binary")
    sent = message("orders", 1, **ODD[odd])
    assert await Sender(broker, "orders").send_all([sent]) == Taken(1)
    assert (await broker.tail("orders", 0)).id == sent.id
    consumer = await broker.consumer("orders", "billing", 0, name="a", fence=1)
    (delivery,) = await consumer.read(10)
    assert delivery.message == sent
    await broker.aclose()
