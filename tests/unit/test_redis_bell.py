"""The bell, at a server that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib

import hiredis
import pytest
import redis.asyncio

from semel.errors import SettingsError
from semel.stores.redis.bell import RedisBell
from semel.stores.redis.log_words import place_of
from semel.testing.bells import Ear


class Node:
    """One server of a cluster, and all there is of it. `known` says which commands it knows."""

    is_cluster = True
    name = "node"
    connection_class = redis.asyncio.Connection

    def __init__(self, known):
        self.known = known
        self.heard = []
        self.found = 0
        self.is_lost = False

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.connection_kwargs = {"host": "127.0.0.1", "port": port, "protocol": 2}
        return self

    async def __aexit__(self, *_):
        self.server.close()
        await self.server.wait_closed()

    async def serve(self, reader, writer):
        self.writer = writer
        parser = hiredis.Reader()
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                parser.feed(data)
                while words := parser.gets():
                    writer.write(self.answer(*words))

    def answer(self, verb, *words):
        if not verb.endswith(b"SUBSCRIBE"):
            return b"+OK\r\n"
        self.heard.append(verb)
        if verb not in self.known:
            return b"-ERR unknown command '%b'\r\n" % verb
        return hiredis.pack_command((verb.lower(), words[0], b"1"))

    def server_of(self, _key):
        return self

    async def find(self, _key):
        self.found += 1
        if self.is_lost:
            raise redis.exceptions.ClusterDownError("The cluster is down")


@contextlib.asynccontextmanager
async def bell_at(node, timeout_s=5.0):
    bell = RedisBell(node, "default", timeout_s)
    try:
        yield bell
    finally:
        await bell.aclose()


def published(verb, stream="s"):
    return hiredis.pack_command((verb, place_of("default", stream).channel, b""))


async def test_a_cluster_before_7_is_listened_to_without_shards():
    ear = Ear()
    async with Node({b"SUBSCRIBE", b"UNSUBSCRIBE"}) as node, bell_at(node) as bell:
        await bell.listen("s", ear.wake)
        assert node.heard[0] == b"SSUBSCRIBE"
        assert node.heard[-1] == b"SUBSCRIBE"
        node.writer.write(published(b"message"))
        await ear.hears()
        await bell.listen("t", ear.wake)
        assert node.heard.count(b"SSUBSCRIBE") == 1


async def test_a_server_that_was_upgraded_to_7_is_listened_to_with_shards():
    ear = Ear()
    async with Node({b"SUBSCRIBE"}) as node, bell_at(node) as bell:
        await bell.listen("s", ear.wake)
        node.known |= {b"SSUBSCRIBE"}
        node.heard.clear()
        node.writer.close()
        await ear.hears()
        await bell.listen("t", ear.wake)
        assert set(node.heard) == {b"SSUBSCRIBE"}
        node.writer.write(published(b"smessage"))
        await ear.hears()


async def test_a_crowd_at_a_cluster_before_7_is_heard_also_where_some_have_left():
    ears = [Ear() for _ in range(4)]
    before_7 = {b"SUBSCRIBE", b"UNSUBSCRIBE"}
    async with Node(before_7) as node, bell_at(node) as bell:
        listening = [
            asyncio.ensure_future(bell.listen(f"s{n}", ear.wake)) for n, ear in enumerate(ears)
        ]
        while not any(channel.ear for channel in bell._channels.values()):
            await asyncio.sleep(0)
        await bell.leave("s0", ears[0].wake)
        await bell.leave("s1", ears[1].wake)
        listening.append(asyncio.ensure_future(bell.listen("s1", ears[1].wake)))
        await asyncio.gather(*listening)
        for n, ear in enumerate(ears[1:], 1):
            node.writer.write(published(b"message", f"s{n}"))
            await ear.hears()
        assert [ear.rings for ear in ears] == [0, 1, 1, 1]


@pytest.mark.parametrize("turns", range(14))
async def test_whoever_comes_while_others_are_seen_to_is_seen_to_as_well(turns):
    ear = Ear()
    async with Node({b"SSUBSCRIBE"}) as node, bell_at(node) as bell:
        await bell.listen("warm", ear.wake)
        first = asyncio.ensure_future(bell.listen("s", ear.wake))
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(bell.listen("t", ear.wake), 2)
        assert [channel.is_heard for channel in bell._channels.values()] == [True] * 3
        await first


async def test_who_did_not_wait_until_it_was_heard_is_rung_for_when_it_is():
    ears = Ear(), Ear()
    async with Node({b"SSUBSCRIBE"}) as node, bell_at(node, timeout_s=0.1) as bell:
        node.answer, answer = (
            lambda verb, *_: b"" if verb == b"SSUBSCRIBE" else b"+OK\r\n",
            node.answer,
        )
        for ear in ears:
            await bell.listen("s", ear.wake)
        assert [ear.rings for ear in ears] == [0, 0]
        node.answer = answer
        node.writer.close()
        for ear in ears:
            await ear.hears()


async def test_what_is_no_name_of_a_stream_leaves_nobody_behind():
    async with Node({b"SSUBSCRIBE"}) as node, bell_at(node) as bell:
        with pytest.raises(SettingsError, match="1 to 255 bytes"):
            await bell.listen("x" * 256, Ear().wake)
        assert len(bell.listeners) == 0


async def test_a_channel_that_the_server_gives_up_is_looked_for_and_rings():
    ear = Ear()
    async with Node({b"SSUBSCRIBE"}) as node, bell_at(node) as bell:
        await bell.listen("s", ear.wake)
        assert (node.found, ear.rings) == (0, 0)
        node.writer.write(published(b"sunsubscribe"))
        await ear.hears()
        assert node.found == 1
        node.writer.write(published(b"smessage"))
        await ear.hears()
        node.writer.write(published(b"sunsubscribe", "nobody") + published(b"smessage", "nobody"))
        node.writer.write(published(b"smessage"))
        await ear.hears()
        assert node.found == 1


async def test_whoever_has_lost_count_connects_again_and_rings():
    ear = Ear()
    async with Node({b"SSUBSCRIBE"}) as node, bell_at(node) as bell:
        await bell.listen("s", ear.wake)
        for surprise in (published(b"ssubscribe"), b"-ERR what\r\n", b"?\r\n"):
            before = node.writer
            before.write(surprise)
            await ear.hears()
            assert node.writer is not before


async def test_a_cluster_that_knows_nothing_of_a_channel_is_asked_again():
    ears = Ear(), Ear()
    async with Node({b"SSUBSCRIBE"}) as node, bell_at(node) as bell:
        for ear, stream in zip(ears, "st", strict=True):
            await bell.listen(stream, ear.wake)
        node.is_lost = True
        node.writer.write(published(b"sunsubscribe", "s") + published(b"sunsubscribe", "t"))
        deadline = asyncio.get_running_loop().time() + 10
        while node.found < 3:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert [ear.rings for ear in ears] == [0, 0]
        node.is_lost = False
        for ear in ears:
            await ear.hears()


async def test_who_is_cancelled_while_he_waits_to_listen_does_not_listen():
    ear = Ear()
    async with Node(set()) as node, bell_at(node) as bell:
        node.answer = lambda verb, *_: b"" if verb == b"SSUBSCRIBE" else b"+OK\r\n"
        listening = asyncio.ensure_future(bell.listen("s", ear.wake))
        await asyncio.wait([listening], timeout=0.05)
        listening.cancel()
        await asyncio.wait([listening])
        assert listening.cancelled()
        assert "s" not in bell.listeners


async def test_where_nobody_listens_any_more_nobody_is_connected():
    ear = Ear()
    both = {b"SSUBSCRIBE", b"SUNSUBSCRIBE"}
    async with Node(both) as node, bell_at(node, timeout_s=0.02) as bell:
        await bell.listen("s", ear.wake)
        await bell.leave("s", ear.wake)
        await asyncio.wait_for(node.writer.wait_closed(), 10)
        await bell.listen("s", ear.wake)
        node.writer.write(published(b"smessage"))
        await ear.hears()
