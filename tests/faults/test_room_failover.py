"""The store of rooms forgets what it has acknowledged, or is away for a while."""

from __future__ import annotations

import pytest

from semel.colour import ASYNC
from semel.rooms import Rooms
from support.card_table import TOTAL, chips_in
from support.nursery import Nursery
from support.process import free_port
from support.proxy import Proxy
from support.redis_pair import Pair
from support.room_trapped import ROOMS, Guest
from support.routing import until

ROOM = "r1"


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    with (tmp_path_factory.mktemp("rooms") / "servers.log").open("wb") as errors:
        nursery = Nursery("support.room_trapped", errors)
    yield nursery
    nursery.close()


@pytest.fixture
def serve(house):
    def start(url, **asked):
        port = free_port()
        house.start(**{"url": url, "port": port, **asked})
        return port

    yield start
    house.end_all()


async def entries(rooms):
    page = await rooms.store.log(ASYNC).read(rooms.stream_of(ROOM))
    return [entry.id.split(":", 2)[2] for entry in page.entries]


# --- a failover that forgets --------------------------------------------------------------------


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.stop()


@pytest.fixture
async def cards(pair):
    """How things stand, by whichever is the master."""
    made = Rooms(pair.url, ROOMS["cards"])
    yield made
    await made.aclose()


async def show_the_same(rooms, **guests):
    standing = await rooms.standing(ROOM)
    return all(
        (guest.position, guest.state) == (str(standing.position), standing.view(user))
        for user, guest in guests.items()
    )


async def sat_down(*guests):
    for guest in guests:
        assert (await guest.act("sit", "sit"))["success"]


@pytest.mark.slow
async def test_what_a_failover_forgot_is_built_on_by_nobody_and_told_as_a_snapshot(
    pair, serve, cards
):
    port = serve(pair.url, room="cards")
    async with Guest(port, "ann", ROOM) as ann, Guest(port, "bob", ROOM) as bob:
        await sat_down(ann, bob)
        pair.part()
        assert (await ann.act("a1", "tip", to="bob"))["reply"] == {"left": 99}
        assert (await bob.act("b1", "deal"))["stateVersion"] == 4
        await until(lambda: ann.state["hand"] == bob.state["hand"] == 1, "what will be lost")
        lost = ann.position
        pair.fail_over()

        # Another server goes on, as far as this one was. This one has in memory what was lost.
        for n in range(2):
            tip = {"actionType": "tip", "to": "ann"}
            assert (await cards.act(ROOM, "bob", f"c{n}", tip)).version == 3 + n
        assert (await bob.act("b2", "tip", to="ann"))["reply"] == {"left": 97}
        await until(lambda: show_the_same(cards, ann=ann, bob=bob), "the same for all")
        assert ann.reasons()[-1] in {"ahead", "forked"}
        async with Guest(port, "ann", ROOM, cursor=lost) as again:
            assert (await again.heard("JOINED"))["resumed"] is False
            assert (await again.heard("TABLE_SNAPSHOT"))["reason"] in {"ahead", "forked"}

        # What was lost is asked for again, and done once more.
        answer = await ann.act("a1", "tip", to="bob")
        assert (answer["success"], answer["cached"], answer["stateVersion"]) == (True, False, 6)
        assert (await ann.act("a1", "tip", to="bob"))["cached"]
        await until(lambda: show_the_same(cards, ann=ann, bob=bob), "the same for all")
        assert chips_in(ann.state) == TOTAL
    assert await entries(cards) == ["sit", "sit", "c0", "c1", "b2", "a1"]


@pytest.mark.slow
async def test_the_same_request_after_a_failover_deals_other_cards_and_nobody_holds_the_old_ones(
    pair, serve, cards
):
    port = serve(pair.url, room="cards")
    async with Guest(port, "ann", ROOM) as ann, Guest(port, "bob", ROOM) as bob:
        await sat_down(ann, bob)
        pair.part()
        assert (await ann.act("a1", "deal"))["stateVersion"] == 3
        await until(lambda: bob.state["cards"], "the cards that will be lost")
        lost, dealt = bob.position, bob.state["cards"]
        pair.fail_over()
        assert (await ann.act("a1", "deal"))["stateVersion"] == 3
        await until(lambda: show_the_same(cards, ann=ann, bob=bob), "the same for all")
        assert bob.state["cards"] != dealt
        assert bob.position != lost
        async with Guest(port, "bob", ROOM, cursor=lost) as again:
            assert (await again.heard("JOINED"))["resumed"] is False
            await until(lambda: again.state == bob.state, "the same again")


@pytest.mark.slow
@pytest.mark.parametrize("was_heard", [True, False], ids=["heard", "own"])
async def test_a_turn_that_begins_anew_after_a_failover_is_timed_out(pair, was_heard):
    """What was noted for the turn before was forgotten, too, and is not counted on."""
    async with Rooms(pair.url, ROOMS["turns"]) as rooms:
        await rooms.act(ROOM, "ann", "a1", {"actionType": "add"})
        pair.part()
        await rooms.act(ROOM, "ann", "a2", {"actionType": "begin", "s": 1.4})
        noted = f"{rooms.name}:timers"
        if was_heard:
            await until(lambda: has_entries(rooms.feed.head(noted)), "the note that will be lost")
        pair.fail_over()
        assert (await rooms.act(ROOM, "ann", "a3", {"actionType": "begin", "s": 1.5})).success

        async def is_late():
            return (await rooms.standing(ROOM)).state()["late"]

        await until(is_late, "the turn's end", within_s=10)
        assert await entries(rooms) == ["a1", "a3", "timeout:turn-1"]


def has_entries(head):
    return head is not None and head.offset > 0


# --- a store that is away -----------------------------------------------------------------------


@pytest.fixture
def proxy(redis_server, redis_url):
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
async def turns(redis_url):
    """Another server, which is not cut off."""
    made = Rooms(redis_url, ROOMS["turns"])
    yield made
    await made.aclose()


def through(proxy):
    return f"redis://{proxy.host}:{proxy.port}/0"


@pytest.mark.slow
async def test_while_the_store_is_away_nothing_is_decided_and_nobody_is_told_anything_wrong(
    proxy, serve, turns
):
    port = serve(through(proxy), patience_s=0.3, timeout_s=0.5)
    async with Guest(port, "ann", ROOM) as ann:
        assert (await ann.act("a1"))["reply"] == 1
        await until(lambda: ann.state["count"] == 1, "the first")
        proxy.refuse()
        told = await ann.act("a2")
        assert (told["success"], told["error"]["code"]) == (False, "UNAVAILABLE")
        assert told["error"]["retry"] is True
        assert told["error"]["retryAfterMs"] > 0
        async with Guest(port, "bob", ROOM) as bob:
            refused = await bob.heard("ERROR", "join")
            assert (refused["code"], refused["retry"]) == ("UNAVAILABLE", True)
        for n in range(3):  # elsewhere it goes on
            await turns.act(ROOM, "cid", f"c{n}", {"actionType": "add"})
        assert ann.state["count"] == 1, "late"

        proxy.pass_through()
        answer = await ann.act("a2")
        while "error" in answer:
            assert answer["error"]["code"] == "UNAVAILABLE"
            answer = await ann.act("a2")
        assert (answer["reply"], answer["cached"]) == (5, False)
        await until(lambda: ann.state["count"] == 5, "what was missed")
        versions = [m["payload"]["stateVersion"] for m in ann.told if "UPDATE" in m["type"]]
        assert versions == [1, 2, 3, 4, 5], "in order, and none of it a snapshot"
        async with Guest(port, "bob", ROOM) as bob:
            assert (await bob.heard("TABLE_SNAPSHOT"))["state"] == ann.state
    assert await entries(turns) == ["a1", "c0", "c1", "c2", "a2"]


@pytest.mark.slow
async def test_an_action_whose_answer_the_store_did_not_get_out_is_not_done_again(
    proxy, serve, turns
):
    port = serve(through(proxy), patience_s=0.3, timeout_s=0.5)
    async with Guest(port, "ann", ROOM) as ann:
        await ann.act("a1")
        proxy.drop_replies()
        assert (await ann.act("a2"))["error"]["retry"] is True
        proxy.pass_through()
        proxy.cut()  # what was promised on these lines never comes
        answer = await ann.act("a2")
        while "error" in answer:
            assert answer["error"]["code"] == "UNAVAILABLE"
            answer = await ann.act("a2")
        assert (answer["reply"], answer["cached"], answer["stateVersion"]) == (2, True, 2)
        await until(lambda: ann.state["count"] == 2, "its own")
    assert await entries(turns) == ["a1", "a2"]
