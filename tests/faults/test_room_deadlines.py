"""Turns that nobody plays, while servers are down, frozen, many, or cut off from their store.

Each is timed out once, whoever is there to do it, and none that was played.
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from semel.colour import ASYNC
from semel.rooms import Rooms
from semel.rooms.clock import StoreClock
from semel.stores import MemoryStore
from support.nursery import Nursery
from support.process import free_port
from support.proxy import Proxy
from support.room_trapped import ROOMS, Guest
from support.routing import until

ROOM = "r1"
LASTS_S = 0.4
# So long after it is over, everybody who wants to time it out has tried.
OVER_S = 0.7


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    with (tmp_path_factory.mktemp("rooms") / "servers.log").open("wb") as errors:
        nursery = Nursery("support.room_trapped", errors)
    yield nursery
    nursery.close()


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/rooms.db"
    return request.getfixturevalue({"redis": "redis_url"}.get(request.param, "postgres_tables_url"))


@pytest.fixture
def serve(house, url):
    def start(**asked):
        port = free_port()
        return port, house.start(**{"url": url, "port": port, **asked})

    yield start
    house.end_all()


@pytest.fixture
async def rooms(url):
    """For looking: it does not look after deadlines."""
    made = Rooms(url, ROOMS["turns"])
    yield made
    await made.aclose()


async def log_of(rooms):
    page = await rooms.store.log(ASYNC).read(rooms.stream_of(ROOM))
    return [entry.id.split(":", 2)[2] for entry in page.entries]


async def is_late(rooms, *turns):
    return (await rooms.standing(ROOM)).state()["late"] == list(turns)


async def begin(port, rid, lasts_s=LASTS_S):
    async with Guest(port, "ann", ROOM) as ann:
        assert (await ann.act(rid, "begin", s=lasts_s))["success"]


@pytest.mark.slow
async def test_all_were_down_when_it_was_over_and_it_is_timed_out_once_by_who_comes(
    serve, house, rooms
):
    port, pid = serve()
    await begin(port, "a1")
    house.signal(pid, signal.SIGKILL)
    ends_at = (await rooms.standing(ROOM)).state()["until"]
    await until(lambda: time.time() > ends_at + 0.1, "its end")
    assert await log_of(rooms) == ["a1"]

    ports = [serve()[0] for _ in range(3)]
    await until(lambda: is_late(rooms, "turn-1"), "the first to look")
    # And while all of them are there.
    await begin(ports[0], "a2")
    await until(lambda: is_late(rooms, "turn-1", "turn-2"), "one of three")
    # Who plays in time is not late, however many look.
    await begin(ports[1], "a3")
    assert (await rooms.act(ROOM, "bob", "b1", {"actionType": "play"})).success
    await asyncio.sleep(LASTS_S + OVER_S)
    played = ["a1", "timeout:turn-1", "a2", "timeout:turn-2", "a3", "b1"]
    assert await log_of(rooms) == played


@pytest.mark.slow
async def test_who_was_frozen_when_it_was_over_wakes_up_and_times_out_nothing_again(
    serve, house, rooms
):
    (port, pid), (other, _) = serve(), serve()
    async with Guest(other, "bob", ROOM) as bob, Guest(port, "ann", ROOM) as ann:
        await bob.heard("JOINED")
        await ann.act("a1", "begin", s=LASTS_S)
        house.signal(pid, signal.SIGSTOP)
        await until(lambda: is_late(rooms, "turn-1"), "the other one")
        assert (await bob.act("b1", "begin", s=LASTS_S))["success"]
        await until(lambda: is_late(rooms, "turn-1", "turn-2"), "the other one")
        house.signal(pid, signal.SIGCONT)
        await until(lambda: ann.state["late"] == ["turn-1", "turn-2"], "what has happened")
        assert (await ann.act("a2"))["reply"] == 3
    await asyncio.sleep(OVER_S)
    assert await log_of(rooms) == ["a1", "timeout:turn-1", "b1", "timeout:turn-2", "a2"]


@pytest.mark.slow
async def test_a_turn_that_begins_when_its_note_was_looked_at_is_timed_out_all_the_same(
    serve, house, rooms
):
    """Frozen between the note and the append, until the turn would have been over."""
    port, pid = serve(at="after-note", do="stop")
    other, _ = serve()
    async with Guest(other, "bob", ROOM) as bob, Guest(port, "ann", ROOM) as ann:
        await bob.heard("JOINED")
        await ann.say("ACTION_REQUEST", "trap", actionType="begin", s=LASTS_S)
        await asyncio.to_thread(house.heard, "trapped", pid=pid)
        await asyncio.sleep(LASTS_S + OVER_S)
        house.signal(pid, signal.SIGCONT)
        assert (await ann.heard("ACTION_RESULT", "trap"))["success"]
        await until(lambda: is_late(rooms, "turn-1"), "somebody to look")
    await asyncio.sleep(OVER_S)
    assert await log_of(rooms) == ["trap", "timeout:turn-1"]


@pytest.fixture
def proxy(redis_server, redis_url):
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.mark.slow
async def test_a_note_whose_reply_is_lost_is_a_note(proxy, redis_url):
    url = f"redis://{proxy.host}:{proxy.port}/0"
    async with Rooms(url, ROOMS["turns"]) as rooms:
        await rooms.act(ROOM, "ann", "a1", {"actionType": "add"})
        proxy.cut_after_request(b'"at"')
        assert (await rooms.act(ROOM, "ann", "a2", {"actionType": "begin", "s": LASTS_S})).success
        assert proxy.cuts == 1
        await until(lambda: is_late(rooms, "turn-1"), "its end")
        assert await log_of(rooms) == ["a1", "a2", "timeout:turn-1"]


class Late:
    """A log whose first answers are late, as they are to a process that was frozen meanwhile."""

    def __init__(self, log, *pauses_s):
        self._log = log
        self._pauses_s = list(pauses_s)

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def append(self, *told, **more):
        answer = await self._log.append(*told, **more)
        if self._pauses_s:
            await asyncio.sleep(self._pauses_s.pop(0))
        return answer


@pytest.mark.parametrize("pauses_s", [(0.8,), (0.8, 0.6)])
async def test_who_was_frozen_while_it_asked_for_the_time_does_not_believe_the_answer(pauses_s):
    clock = StoreClock(Late(MemoryStore().log(ASYNC), *pauses_s), "clock")
    await clock.learn()
    assert abs(clock.now_s() - time.time()) < 0.2


async def test_a_store_that_is_always_slow_tells_the_time_as_well_as_it_can():
    clock = StoreClock(Late(MemoryStore().log(ASYNC), *[0.3] * 50), "clock")
    async with asyncio.timeout(5):
        await clock.learn()
    assert abs(clock.now_s() - time.time()) < 0.2
