"""Feeds on every engine: what one process publishes, another one follows."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from semel.bus import Publisher, Stages
from semel.bus.jobs import stream_of
from semel.feed import End, Feed, Reset, Update
from semel.stores import SQLiteStore
from support.feeds import Following
from support.web import until

STAGES = Stages({"work": (1, 999), "done": (1000, 1009)})
ENGINES = {
    "sqlite": "sqlite_url",
    "redis": "redis_url",
    "redis cluster": "redis_cluster_url",
    "postgres": "postgres_tables_url",
    "mariadb": "mariadb_tables_url",
}


@pytest.fixture
def sqlite_url(tmp_path):
    SQLiteStore(tmp_path / "log.db").close()
    return f"sqlite:///{tmp_path}/log.db"


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def url(request):
    return request.getfixturevalue(request.param)


async def test_what_is_published_elsewhere_is_followed_here(url, request):
    """Live, with a cursor, from the floor on, and to its end: and the bell is what tells of it."""
    job = request.node.name
    stream = stream_of("scan", job)

    async def publish(*numbers, stage="work"):
        for number in numbers:
            await publisher.publish(job, stage, number, {"n": number})

    async with contextlib.AsyncExitStack() as stack:
        publisher = await stack.enter_async_context(Publisher(url, stages=STAGES))
        feed = await stack.enter_async_context(Feed(url))
        await publish(1, 2, 3)
        live = [Following(feed, stream) for _ in range(5)]
        await until(lambda: all(len(each.told) == 3 for each in live))
        for number in range(4, 24):
            await publish(number)
            await asyncio.sleep(0.005)
        await until(lambda: all(len(each.told) == 23 for each in live))
        third = live[0].told[2].entry.position

        again = Following(feed, stream, third)
        await until(lambda: len(again.told) == 20)
        await feed.log.trim(stream, 10)
        async with Feed(url) as other:
            late = Following(other, stream, third)
            await until(lambda: late.told)
            await publish(1000, stage="done")
            for each in (*live, again, late):
                await until(lambda each=each: each.over)

        whole = [*range(1, 24), 1000]
        assert [_numbers(each) for each in live] == [whole] * 5
        assert _numbers(again) == whole[3:]
        assert _numbers(late) == ["trimmed", 1000]
        assert feed.counts.rings > 0
        assert feed.counts.found <= 1  # the net may be quicker than a ring, once in a while


def _numbers(following):
    told = []
    for news in following.told[:-1]:
        match news:
            case Update(entry):
                told.append(int(entry.data.partition(b'"seq":')[2].partition(b",")[0]))
            case Reset(reason):
                told.append(reason)
    assert isinstance(following.told[-1], End)
    return told
