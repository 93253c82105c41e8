"""Servers of rooms are killed and frozen at every point of an action.

A room is read, its deadline noted, the action appended and answered; a server can be gone between
any two of these. Whoever asked asks again, elsewhere: it is done once, and answered as it was.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from semel.colour import ASYNC
from semel.rooms import Rooms
from support.nursery import Nursery
from support.process import free_port
from support.room_trapped import POINTS, ROOMS, Guest
from support.routing import until

ROOM = "r1"
LONG_S = 600

# At these the log has it.
DONE = ("after-append", "before-answer")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    with (tmp_path_factory.mktemp("rooms") / "servers.log").open("wb") as errors:
        nursery = Nursery("support.room_trapped", errors)
    yield nursery
    nursery.close()


class Server:
    """A process, and where it listens."""

    def __init__(self, nursery, asked):
        self._nursery = nursery
        self.port = free_port()
        self.pid = nursery.start(port=self.port, **asked)

    async def trapped(self):
        await asyncio.to_thread(self._nursery.heard, "trapped", pid=self.pid)

    def signal(self, number):
        self._nursery.signal(self.pid, number)


@pytest.fixture
def serve(house, url):
    def start(**asked):
        return Server(house, {"url": url, **asked})

    yield start
    house.end_all()


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/rooms.db"
    return request.getfixturevalue({"redis": "redis_url"}.get(request.param, "postgres_tables_url"))


@pytest.fixture
async def rooms(url):
    """Another server, in this process, which does not look after deadlines."""
    made = Rooms(url, ROOMS["turns"])
    yield made
    await made.aclose()


async def entries(rooms, room_id=ROOM):
    page = await rooms.store.log(ASYNC).read(rooms.stream_of(room_id))
    return [entry.id.split(":", 2)[2] for entry in page.entries]


async def has_seen_all(rooms, guest, room_id=ROOM):
    standing = await rooms.standing(room_id)
    return guest.position == str(standing.position) and guest.state == standing.view(None)


# --- an action ----------------------------------------------------------------------------------

TRAPPED = {"actionType": "begin", "s": LONG_S}


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_any_point_an_action_is_done_once(serve, rooms, point):
    server = serve(at=point, do="kill")
    async with Guest(server.port, "ann", ROOM) as ann:
        await ann.say("ACTION_REQUEST", "trap", **TRAPPED)
        await server.trapped()
    assert await entries(rooms) == (["trap"] if point in DONE else [])

    reply = await rooms.act(ROOM, "ann", "trap", TRAPPED)
    assert (reply.success, reply.version, reply.reply) == (True, 1, 1)
    assert reply.cached == (point in DONE)
    assert (await rooms.act(ROOM, "ann", "trap", TRAPPED)).cached
    assert await entries(rooms) == ["trap"]


@pytest.mark.parametrize("point", POINTS)
async def test_frozen_at_any_point_until_others_have_played_it_changes_nothing_twice(
    serve, rooms, point
):
    server = serve(at=point, do="stop")
    async with Guest(server.port, "ann", ROOM) as ann:
        await ann.say("ACTION_REQUEST", "trap", **TRAPPED)
        await server.trapped()
        elsewhere = await rooms.act(ROOM, "ann", "trap", TRAPPED)
        assert (elsewhere.version, elsewhere.reply) == (1, 1)
        await rooms.act(ROOM, "bob", "b1", {"actionType": "add"})
        server.signal(signal.SIGCONT)

        answer = await ann.heard("ACTION_RESULT", "trap")
        assert (answer["success"], answer["stateVersion"], answer["reply"]) == (True, 1, 1)
        assert (await ann.act("a2"))["reply"] == 3
        await until(lambda: has_seen_all(rooms, ann), "what others have played")
    assert await entries(rooms) == ["trap", "b1", "a2"]


@pytest.mark.parametrize("point", ["after-load", "after-note", "before-append"])
async def test_frozen_while_another_plays_it_is_decided_on_what_is_there_then(serve, rooms, point):
    server = serve(at=point, do="stop")
    async with Guest(server.port, "ann", ROOM) as ann:
        await ann.say("ACTION_REQUEST", "trap", **TRAPPED)
        await server.trapped()
        await rooms.act(ROOM, "bob", "b1", {"actionType": "add"})
        server.signal(signal.SIGCONT)
        answer = await ann.heard("ACTION_RESULT", "trap")
        assert (answer["success"], answer["stateVersion"], answer["reply"]) == (True, 2, 2)
        await until(lambda: has_seen_all(rooms, ann), "what others have played")
    assert (await rooms.act(ROOM, "ann", "trap", TRAPPED)).cached
    assert await entries(rooms) == ["b1", "trap"]


# --- the same request, at the same time, elsewhere ----------------------------------------------


class Held:
    """A log whose appends wait until they may."""

    def __init__(self, log):
        self._log = log
        self.may = asyncio.Event()

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def append(self, *told, **more):
        await self.may.wait()
        return await self._log.append(*told, **more)


async def test_what_was_decided_on_cards_that_another_server_dealt_otherwise_is_decided_anew(url):
    """Two servers deal for the same request. The slow one goes on by what it dealt itself."""
    slow, quick = (Rooms(url, ROOMS["cards"]) for _ in range(2))
    for user in ("ann", "bob"):
        await slow.act(ROOM, user, "sit", {"actionType": "sit"})
    deal, tip = {"actionType": "deal"}, {"actionType": "tip", "to": "ann"}
    slow.log = held = Held(slow.log)
    late = asyncio.create_task(slow.act(ROOM, "ann", "deal", deal))
    await asyncio.sleep(0.05)
    await quick.act(ROOM, "ann", "deal", deal)
    dealt = (await quick.standing(ROOM)).state()["cards"]
    behind = asyncio.create_task(slow.act(ROOM, "bob", "tip", tip))
    await asyncio.sleep(0.05)
    held.may.set()
    assert ((await late).cached, (await behind).version) == (True, 4)
    assert (await quick.standing(ROOM)).state()["cards"] == dealt
    for rooms in (slow, quick):
        await rooms.aclose()
