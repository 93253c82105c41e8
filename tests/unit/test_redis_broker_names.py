"""What a Redis broker is made with, the names of its keys, and its entries: without a server."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis
from redis.crc import key_slot

from semel.brokers import connect
from semel.brokers.redis import RedisBroker
from semel.brokers.redis.entries import delivery, write
from semel.brokers.redis.scripts import stream_of
from semel.errors import SettingsError
from semel.messages import Features
from semel.testing.traffic import Sender, message

URL = "redis://localhost:6379/0"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"shards": 0}, "at least one shard"),
        ({"maxlen": 0}, "None for all of them"),
        ({"mode": "avro"}, '"structured" or "binary"'),
        ({"groups": {"orders": "billing"}}, "list of groups"),
        ({"timeout_s": 0}, "no time to answer"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_at_once(settings, told):
    with pytest.raises(SettingsError, match=told):
        RedisBroker(URL, **settings)


def test_a_client_of_the_wrong_kind_is_refused_at_once():
    with pytest.raises(SettingsError, match=r"redis\.asyncio"):
        RedisBroker(redis.Redis())
    with pytest.raises(SettingsError, match="RedisBroker takes a URL or a client"):
        RedisBroker(object())


def test_it_is_opened_by_its_url_and_shows_no_password():
    broker = connect("redis://me:secret@localhost:6379/0?shards=8&maxlen=none")
    assert (broker.shards, broker.features.bounded) == (8, False)
    assert repr(broker) == "RedisBroker('redis://localhost:6379/0', shards=8)"


def test_it_promises_everything():
    promised = Features(fenced=True, dedups="exact", heals=True, bounded=True)
    assert RedisBroker(URL).features == promised


@pytest.mark.parametrize("topic", ["", "{orders}", "a{b", "a}b"])
async def test_a_topic_that_would_part_its_keys_is_refused(topic):
    with pytest.raises(SettingsError, match="without them"):
        await Sender(RedisBroker(URL), topic).send(1)


@pytest.mark.parametrize("shards", [1, 16])
@pytest.mark.parametrize("topic", ["axiom:events", "Zürich", "a b", "x"])
def test_the_keys_of_a_stream_lie_together_in_a_cluster(topic, shards):
    streams = [stream_of(topic, shard, shards) for shard in range(shards)]
    assert len({stream.key for stream in streams}) == shards
    for stream in streams:
        assert key_slot(stream.key) == key_slot(stream.helper)


async def test_a_shard_that_is_not_there_and_positions_that_shrink_are_refused():
    broker = RedisBroker(URL, shards=2)
    with pytest.raises(SettingsError, match="no shard 2"):
        await Sender(broker, "orders", 2).send(1)
    with pytest.raises(ValueError, match="positions grow"):
        await Sender(broker, "orders").send(2, 1)


@pytest.mark.parametrize("mode", ["structured", "binary"])
def test_an_entry_is_read_back_whatever_is_written(mode):
    sent = message("orders", 7, headers={"traceparent": "00-1-2-01"})
    (id, *rest), count, unfit = write([sent], mode, 1 << 20)
    words = (b"event", *rest) if mode == "structured" else rest[1:]
    assert (id, count, unfit) == ("7-0", 1, None)
    found = delivery((b"7-0", list(words)), "orders")
    assert found.message == sent


def test_the_entrys_id_is_believed_before_the_document():
    _, document = write([message("orders", 7)], "structured", 1 << 20)[0]
    found = delivery((b"9-0", [b"event", document]), "orders")
    assert found.message == replace(message("orders", 7), position=9)


@pytest.mark.parametrize(
    "words",
    [
        [b"event", b"no JSON"],
        [b"event", b"\xff"],
        [b"specversion", b"1.0", b"id", b"\xff"],
        [b"specversion", b"1.0", b"data", b"{}"],
        [b"a", b"1", b"b", b"2"],
    ],
)
def test_an_entry_that_is_no_event_keeps_what_it_is(words):
    found = delivery((b"9-0", words), "orders", count=2)
    assert (found.message, found.count, found.token) == (None, 2, b"9-0")
    assert found.problem
    assert words[-1] in found.raw
