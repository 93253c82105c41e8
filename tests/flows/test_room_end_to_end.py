"""From one click to everybody's screen: the clients, the door under uvicorn, and cuts between."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import subprocess

import pytest
import uvicorn

from semel.client.room import (
    ActionError,
    ActionTimeoutError,
    Event,
    Presence,
    Result,
    RoomError,
    State,
    Terms,
    room,
)
from semel.http.ws import Limits, RoomDoor, Spectator
from semel.rooms import ALL, Accepted, Refused, Room, Rooms
from semel.stores import MemoryStore
from support.process import HOST
from support.proxy import Proxy
from support.typescript import FOLDER, environment

ROOM = "t1"
AT_ONCE_S = 20.0
QUICK = Terms(timeout_s=2.0, resync_s=1.0, grace_s=0.3, backoff_s=0.02, longest_s=0.2)


class Tally(Room):
    """Everybody adds, and sees alone how much of it was theirs. So many are a hand."""

    def __init__(self, hand):
        self.hand = hand

    def begin(self, room_id):
        return {"count": 0, "by": {}}

    def apply(self, state, action, ctx):
        if action["actionType"] != "add":
            return Refused("INVALID", "there is nothing to do but add")
        by = {**state["by"], ctx.user: state["by"].get(ctx.user, 0) + 1}
        count = state["count"] + 1
        return Accepted({"count": count, "by": by}, {"count": count}, [(ALL, {"count": count})])

    def members(self, state):
        return state["by"]

    def view(self, state, viewer):
        return {"count": state["count"], "mine": state["by"].get(viewer)}

    def result(self, state, viewer):
        return None if state["count"] % self.hand else {"hand": state["count"] // self.hand}


@contextlib.asynccontextmanager
async def serving(store, port=0, *, hand=10, replay=1000, deflates=True, **options):
    """A door of its own to the rooms in this store; yields its port."""
    rooms = Rooms(store, Tally(hand), replay=replay)
    door = RoomDoor(rooms, **{"authorise": lambda v, _: v.token or Spectator(), **options})
    with socket.create_server((HOST, port)) as listener:
        config = uvicorn.Config(
            door,
            ws="websockets-sansio",
            ws_per_message_deflate=deflates,
            lifespan="off",
            log_config=None,
        )
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            await door.drain(0.2)
            server.should_exit = True
            await running
            await door.aclose()


@pytest.fixture
def store():
    with contextlib.closing(MemoryStore()) as made:
        yield made


def sit(port, user, **options):
    options = {"table_id": ROOM, "token": user, "terms": QUICK, **options}
    return room(f"ws://{HOST}:{port}/rooms", **options)


async def heard(table, is_there):
    """All news, up to the one that is waited for."""
    got = []
    async with asyncio.timeout(AT_ONCE_S):
        async for news in table:
            got.append(news)
            if is_there(news):
                return got
    raise AssertionError(got)


def at(version):
    return lambda news: isinstance(news, State) and news.version == version


async def acted(table, action, **options):
    """However long it takes, once."""
    try:
        return await table.act(action, **options)
    except ActionTimeoutError as error:
        return await acted(table, action, request_id=error.request_id)


async def add(table, count):
    return [(await acted(table, {"actionType": "add", "n": n})).reply for n in range(count)]


# --- as it should be ----------------------------------------------------------------------------


async def test_everybody_sees_everything_once_and_what_is_theirs(store):
    async with (
        serving(store) as port,
        sit(port, "ann") as ann,
        sit(port, "bob") as bob,
        sit(port, None) as eve,
    ):
        loops = [asyncio.ensure_future(heard(table, at(40))) for table in (ann, bob, eve)]
        await asyncio.gather(*(heard(table, at(0)) for table in (ann, bob, eve)))
        replies = await asyncio.gather(add(ann, 20), add(bob, 20))
        everything = await asyncio.gather(*loops)
        assert sorted(each["count"] for some in replies for each in some) == list(range(1, 41))
        for got in everything:
            told = [each.data["count"] for each in got if isinstance(each, Event)]
            assert told == list(range(1, 40))  # the last comes behind its state
            hands = [each.result["hand"] for each in got if isinstance(each, Result)]
            assert hands == [0, 1, 2, 3]
        assert ann.confirmed == bob.confirmed == {"count": 40, "mine": 20}
        assert eve.confirmed == {"count": 40, "mine": None}
        assert (ann.viewer, eve.viewer) == ("ann", None)


async def test_refusals_have_their_codes_and_watchers_cannot_act(store):
    async with serving(store) as port, sit(port, "ann") as ann, sit(port, None) as eve:
        with pytest.raises(ActionError) as refused:
            await ann.act({"actionType": "subtract"})
        assert refused.value.code == "INVALID"
        with pytest.raises(ActionError) as refused:
            await eve.act({"actionType": "add"})
        assert refused.value.code == "UNAUTHORIZED"
        await heard(ann, at(0))
        with pytest.raises(ActionError) as refused:
            await ann.act({"actionType": "add", "expectedVersion": 7})
        assert refused.value.code == "STATE_STALE_VERSION"
        await heard(ann, at(0))


async def test_who_is_here_is_told(store):
    async with serving(store) as port, sit(port, "ann") as ann, sit(port, "bob"):
        await heard(
            ann, lambda news: isinstance(news, Presence) and set(news.users) == {"ann", "bob"}
        )


async def test_whoever_may_not_come_in_is_told_so(store):
    authorise = {"ann": "ann"}.get
    async with serving(store, authorise=lambda v, _: authorise(v.token)) as port:
        async with sit(port, "mallory") as table:
            with pytest.raises(RoomError) as refused:
                await heard(table, lambda _: False)
            assert refused.value.code == "UNAUTHORIZED"
        tokens = iter(["old", "ann"])
        async with sit(port, lambda: next(tokens)) as table:
            await heard(table, at(0))


async def test_what_is_shown_beforehand_is_never_seen_to_go_back(store):
    def guess(state, action):
        return {**state, "count": state["count"] + 1}

    async with serving(store) as port, sit(port, "ann", optimistic=guess) as ann:
        await heard(ann, at(0))
        loop = asyncio.ensure_future(heard(ann, lambda news: at(10)(news) and not news.pending))
        await asyncio.sleep(0)
        await add(ann, 10)
        counts = [each.state["count"] for each in await loop if isinstance(each, State)]
        assert counts == sorted(counts)
        assert counts[-1] == 10


async def test_what_the_server_would_not_take_is_refused_before_it_is_sent(store):
    async with serving(store, limits=Limits(message_bytes=400)) as port, sit(port, "ann") as ann:
        await heard(ann, at(0))
        for note in ("x" * 400, "\N{SNOWMAN}" * 134):  # of three bytes each
            with pytest.raises(ActionError, match="the server takes 400") as raised:
                await ann.act({"actionType": "add", "note": note})
            assert (raised.value.code, raised.value.was_sent) == ("TOO_LARGE", False)
        await ann.act({"actionType": "add", "note": "\N{SNOWMAN}" * 60})
        await heard(ann, at(1))


async def test_a_wish_for_a_snapshot_is_granted(store):
    async with serving(store) as port, sit(port, "ann") as ann:
        await heard(ann, at(0))
        await add(ann, 3)
        await heard(ann, at(3))
        loop = asyncio.ensure_future(heard(ann, lambda _: False))
        await asyncio.sleep(0)
        ann.request_snapshot()
        async with asyncio.timeout(AT_ONCE_S):
            while ann._guest._replica._ask is not None:
                await asyncio.sleep(0.01)
        loop.cancel()
        assert ann.confirmed == {"count": 3, "mine": 3}


# --- as it is -----------------------------------------------------------------------------------


async def test_a_server_that_ends_is_left_for_another_and_nothing_is_done_twice(store):
    async with contextlib.AsyncExitStack() as tables:
        async with serving(store) as port:
            ann = await tables.enter_async_context(sit(port, "ann"))
            bob = await tables.enter_async_context(sit(port, "bob"))
            adding = [asyncio.ensure_future(add(table, 60)) for table in (ann, bob)]
            await heard(ann, lambda news: isinstance(news, State) and news.version > 20)
        for _ in range(3):
            before = ann.version
            async with serving(store, port):
                await heard(ann, lambda n, b=before: isinstance(n, State) and n.version > b)
        async with serving(store, port):
            replies = await asyncio.gather(*adding)
            await asyncio.gather(*(heard(table, at(120)) for table in (ann, bob)))
    assert sorted(each["count"] for some in replies for each in some) == list(range(1, 121))
    assert ann.confirmed == bob.confirmed == {"count": 120, "mine": 60}
    assert ann.cursor == bob.cursor


@pytest.mark.parametrize("replay", [1000, 2], ids=["missed updates", "snapshots"])
async def test_cuts_behind_any_byte_lose_nothing_and_do_nothing_twice(store, replay):
    chance = random.Random(replay)
    # Who comes back to a finished hand gets a snapshot: there is none but the first.
    async with serving(store, replay=replay, hand=1000) as port:
        with Proxy(port) as one, Proxy(port) as other:
            for proxy in (one, other):
                proxy.cut_after_bytes(*(chance.randrange(100, 900) for _ in range(25)))
            async with sit(one.port, "ann") as ann, sit(other.port, "bob") as bob:
                loops = [asyncio.ensure_future(heard(table, at(100))) for table in (ann, bob)]
                await asyncio.gather(*(heard(table, at(0)) for table in (ann, bob)))
                replies = await asyncio.gather(add(ann, 50), add(bob, 50))
                everything = await asyncio.gather(*loops)
                assert ann.confirmed == bob.confirmed == {"count": 100, "mine": 50}
                assert ann.cursor == bob.cursor
            assert one.cuts + other.cuts > 10
    assert sorted(each["count"] for some in replies for each in some) == list(range(1, 101))
    for got in everything:
        versions = [each.version for each in got if isinstance(each, State)]
        assert versions == sorted(versions)
        told = [each.data["count"] for each in got if isinstance(each, Event)]
        assert told == sorted(set(told))  # each at most once, in order
        if replay == 1000:
            assert told == list(range(1, 100))


@pytest.mark.parametrize("deflates", [True, False], ids=["by send", "past send"])
async def test_who_has_missed_more_than_a_page_gets_all_of_it(store, deflates):
    missed = 700
    async with contextlib.AsyncExitStack() as stack:
        async with serving(store, hand=1000) as port:
            ann = await stack.enter_async_context(sit(port, "ann"))
            await heard(ann, at(0))
            loop = asyncio.ensure_future(heard(ann, at(missed)))
            await asyncio.sleep(0)
        rooms = Rooms(store, Tally(1000))
        for n in range(missed):
            await rooms.act(ROOM, "bob", f"bob-{n}", {"actionType": "add"})
        await rooms.aclose()
        # Nothing else happens there that could remind the server of what it has not told.
        async with serving(store, port, hand=1000, heartbeat_s=60.0, deflates=deflates):
            got = await loop
        await stack.aclose()
    told = [each.data["count"] for each in got if isinstance(each, Event)]
    assert told == list(range(1, missed))  # and that of the last state follows it


async def test_a_server_that_freezes_is_left_and_what_it_did_is_not_done_again(store):
    async with serving(store, heartbeat_s=0.2) as port:
        with Proxy(port) as proxy:
            async with sit(proxy.port, "ann") as ann:
                await heard(ann, at(0))
                proxy.cut_after_request(b"")
                answer = asyncio.ensure_future(add(ann, 1))
                await answer
                proxy.freeze()
                answer = asyncio.ensure_future(add(ann, 1))
                await heard(ann, lambda news: getattr(news, "status", "") == "waiting")
                proxy.cut()
                proxy.pass_through()
                await answer
                await heard(ann, at(2))
                assert ann.confirmed == {"count": 2, "mine": 2}


# --- the other client ---------------------------------------------------------------------------


async def sitting(node, port, user, count, goal):
    url = f"ws://{HOST}:{port}/rooms"
    child = await asyncio.create_subprocess_exec(
        node.path,
        *flags(node),
        FOLDER / "test" / "sit.mjs",
        *(url, user, str(count), str(goal)),
        env=environment(node),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(90):
        said, _ = await child.communicate()
    assert child.returncode == 0
    return json.loads(said)


def flags(node):
    """Before Node 22 it has to be told that it has a WebSocket."""
    said = subprocess.run([node.path, "--version"], capture_output=True, text=True, check=True)
    major = int(said.stdout.lstrip("v").partition(".")[0])
    return ["--experimental-websocket"] if major < 22 else []


async def test_both_clients_play_at_one_table_through_cuts(store, node, typescript_client):
    chance = random.Random(1)
    async with serving(store) as port:
        with Proxy(port) as proxy:
            proxy.cut_after_bytes(*(chance.randrange(300, 3000) for _ in range(20)))
            async with sit(port, "ann") as ann:
                seen, _, _ = await asyncio.gather(
                    sitting(node, proxy.port, "bob", 40, 80),
                    add(ann, 40),
                    heard(ann, at(80)),
                )
                assert ann.confirmed == seen["state"] == {"count": 80, "mine": 40}
                assert ann.cursor == seen["cursor"]
    assert seen["versions"] == sorted(seen["versions"])
    told = [each["count"] for each in seen["events"]]
    assert told == sorted(set(told))
