"""The bell, at a server that says what the test wants."""

from __future__ import annotations

import asyncio
import contextlib

import hiredis
import redis.asyncio

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


@contextlib.asynccontextmanager
async def bell_at(node):
    bell = RedisBell(node, "default", 5.0)
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
