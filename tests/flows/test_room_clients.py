"""The room's client against a server that cuts, is silent, late, and refuses; over real sockets."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from dataclasses import replace

import pytest
from websockets.asyncio.server import serve

from semel.client.flow import World
from semel.client.room import (
    ActionError,
    ActionTimeoutError,
    Became,
    Event,
    Presence,
    Result,
    RoomError,
    State,
    Terms,
    Trouble,
    TurnedAway,
    button,
    room,
)
from semel.errors import SettingsError
from support.process import HOST, free_port
from support.room_server import AT_ONCE_S, Script
from support.room_vectors import hand_result, heartbeat, message, result, snapshot, update

# A hundredth of what people wait for.
QUICK = Terms(
    timeout_s=2.0,
    resync_s=0.2,
    grace_s=0.1,
    connect_s=1.0,
    heartbeat_s=1.0,
    backoff_s=0.02,
    longest_s=0.1,
)


class Even(World):
    def chance(self):
        return 0.5


def sit(server, **options):
    options = {"table_id": "t", "terms": QUICK, "world": Even(), **options}
    return room(server.url, **options)


async def until(table, is_there):
    """News up to the one that is waited for."""
    got = []
    async with asyncio.timeout(AT_ONCE_S):
        async for news in table:
            got.append(news)
            if is_there(news):
                return got
    raise AssertionError(got)


def at(version):
    return lambda news: isinstance(news, State) and news.version == version


def states(news):
    return [(each.version, each.state) for each in news if isinstance(each, State)]


# --- seeing -------------------------------------------------------------------------------------


async def test_a_table_is_seen_from_its_snapshot_on_and_its_events_once():
    async def part(seat):
        await seat.show(5, {"n": 5}, viewer="ann")
        await seat.say(update(**{"from": 5}, to=6, patch=[[["n"], 6]], events=["six"]))
        await seat.say(update(**{"from": 5}, to=6, patch=[[["n"], 6]], events=["six"]))
        await seat.say(message("PRESENCE", {"users": ["ann"], "spectators": 1}))
        await seat.say(hand_result(version=6, result="won"))
        await seat.say(message("ERROR", {"code": "INVALID", "message": "?"}))
        await seat.say(update(**{"from": 6}, to=7, patch=[[["n"], 7]]))
        await seat.stay()

    async with Script(part) as server, sit(server, token="secret", spectate=True) as table:
        assert (table.status, table.state, table.version) == ("connecting", None, None)
        got = await until(table, at(7))
        first = State({"n": 5}, {"n": 5}, 5, "ann", 0)  # which the next may have replaced
        assert [news for news in got if news != first] == [
            Became("open"),
            State({"n": 6}, {"n": 6}, 6, "ann", 0),
            Event(6, "six"),
            Presence(("ann",), 1),
            Result(6, "won"),
            Trouble("INVALID", "?"),
            State({"n": 7}, {"n": 7}, 7, "ann", 0),
        ]
        assert (table.state, table.confirmed, table.viewer) == ({"n": 7}, {"n": 7}, "ann")
        assert (table.cursor, table.status) == ("7.000000000007", "open")


async def test_a_join_says_who_one_is_and_where_one_was():
    joins = []

    async def first(seat):
        joins.append(await seat.show(5, 5))
        seat.cut()

    async def second(seat):
        joins.append(await seat.let_in(resumed=True, head=6))
        await seat.say(update(**{"from": 5}, to=6, patch=[[[], 6]]))
        await seat.stay()

    async with Script(first, second) as server, sit(server, token="secret", spectate=True) as table:
        await until(table, at(6))
    told = {"tableId": "t", "token": "secret", "spectate": True}
    assert [join["payload"] for join in joins] == [told, {**told, "cursor": "5.000000000005"}]


async def test_who_comes_later_is_told_how_things_stand_and_every_loop_hears_all():
    async def part(seat):
        await seat.show(5, 5)
        await seat.hear("REQUEST_SNAPSHOT")
        await seat.say(update(**{"from": 5}, to=6, patch=[[[], 6]], events=["e"]))
        await seat.stay()

    async with Script(part) as server, sit(server) as table:
        await until(table, at(5))
        loops = [asyncio.ensure_future(until(table, lambda e: isinstance(e, Event))) for _ in "ab"]
        await asyncio.sleep(0)
        table.request_snapshot()
        one, other = await asyncio.gather(*loops)
        assert one == other
        assert states(one) == [(5, 5), (6, 6)]


async def test_a_loop_that_is_left_is_not_told_for_ever():
    async def part(seat):
        await seat.show(5, 5)
        await seat.stay()

    async with Script(part) as server, sit(server) as table:
        await until(table, at(5))
        async with asyncio.timeout(AT_ONCE_S):
            while table._listeners:
                gc.collect()
                await asyncio.sleep(0)


# --- cuts, silence, and what is missing ---------------------------------------------------------


async def test_a_hole_is_filled_by_one_snapshot_and_what_came_meanwhile():
    async def part(seat):
        await seat.show(5, 5)
        for n in (8, 9, 10):
            await seat.say(update(**{"from": n - 1}, to=n, patch=[[[], n]], events=[n]))
        asked = await seat.hear("REQUEST_SNAPSHOT")
        assert asked["payload"] == {"tableId": "t", "currentVersion": 5, "reason": "gap"}
        await seat.say(snapshot(version=8, state=8, reason="gap"), asked["requestId"])
        await seat.say(update(**{"from": 10}, to=11, patch=[[[], 11]], events=[11]))
        assert await seat.stay() == []

    async with Script(part) as server, sit(server) as table:
        got = await until(table, lambda news: news == Event(11, 11))
        assert [news.data for news in got if isinstance(news, Event)] == [9, 10, 11]
        assert table.version == 11


async def test_a_question_that_is_lost_is_asked_again():
    async def part(seat):
        await seat.show(5, 5)
        await seat.say(heartbeat(6))
        asked = [await seat.hear("REQUEST_SNAPSHOT") for _ in range(3)]
        assert len({each["requestId"] for each in asked}) == 3
        await seat.say(snapshot(version=6, state=6), asked[-1]["requestId"])
        await seat.stay()

    async with Script(part) as server, sit(server) as table:
        await until(table, at(6))


async def test_a_server_that_falls_silent_is_left_and_comes_back_to():
    async def silent(seat):
        await seat.let_in(head=5, heartbeat_ms=100)
        await seat.say(snapshot(version=5, state=5))
        await seat.stay()

    async def second(seat):
        await seat.let_in(resumed=True, head=6)
        await seat.say(update(**{"from": 5}, to=6, patch=[[[], 6]]))
        await seat.stay()

    async with Script(silent, second) as server, sit(server) as table:
        got = await until(table, at(6))
        changes = [news.status for news in got if isinstance(news, Became)]
        assert changes == ["open", "waiting", "connecting", "open"]


async def test_a_server_that_lets_nobody_in_is_left():
    async def deaf(seat):
        await seat.stay()

    async def second(seat):
        await seat.show(5, 5)
        await seat.stay()

    terms = Terms(connect_s=0.1, backoff_s=0.02)
    async with Script(deaf, second) as server, sit(server, terms=terms) as table:
        await until(table, at(5))


@pytest.mark.parametrize("code", [1000, 1001, 1008, 1009, 1011, 1013])
async def test_whatever_it_is_closed_with_it_is_opened_again(code):
    async def closes(seat):
        await seat.show(5, 5)
        await seat.close(code)

    async def second(seat):
        await seat.show(6, 6)
        await seat.stay()

    async with Script(closes, second) as server, sit(server) as table:
        await until(table, at(6))


async def test_a_server_that_is_not_there_yet_is_waited_for_and_said_so_once(caplog):
    async def part(seat):
        await seat.show(5, 5)
        await seat.stay()

    port = free_port()
    with caplog.at_level(logging.INFO, "semel"):
        address = f"ws://{HOST}:{port}/rooms?secret=1"
        async with room(address, table_id="t", terms=QUICK, world=Even()) as table:
            for _ in range(3):
                await until(table, lambda news: news == Became("waiting"))
    said = [record for record in caplog.records if record.name == "semel"]
    assert [record.levelname for record in said][:2] == ["WARNING", "INFO"]
    assert f"{HOST}:{port}/rooms: table t: connecting again" in said[0].getMessage()
    assert "secret" not in caplog.text


async def test_what_was_never_sent_says_with_what_the_door_was_shut():
    def shut(socket, _request):
        return socket.respond(403, "not from there")

    async def nobody(_socket):
        raise AssertionError("somebody is in")

    async with serve(nobody, HOST, 0, process_request=shut) as server:
        port = server.sockets[0].getsockname()[1]
        address, terms = f"ws://{HOST}:{port}/rooms?secret=1", replace(QUICK, timeout_s=0.2)
        async with room(address, table_id="t", terms=terms) as table:
            with pytest.raises(ActionTimeoutError) as raised:
                await table.act({"actionType": "a"})
    said = "no connection (server rejected WebSocket connection: HTTP 403): look at the address"
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)
    assert not raised.value.was_sent


async def test_what_was_never_sent_says_why_the_server_let_nobody_in():
    async def part(seat):
        await seat.refuse("UNAVAILABLE", message="no store", retry=True)
        await seat.stay()

    async with Script(part) as server, sit(server, timeout_s=0.2) as table:
        with pytest.raises(ActionTimeoutError, match="does not let us in: UNAVAILABLE: no store"):
            await table.act({"actionType": "a"})


async def test_noise_is_answered_by_a_question():
    async def part(seat):
        await seat.show(5, 5)
        await seat.say(b"\x00\x01")
        asked = await seat.hear("REQUEST_SNAPSHOT")
        await seat.say("{")
        await seat.say(snapshot(version=6, state=6), asked["requestId"])
        await seat.stay()

    async with Script(part) as server, sit(server) as table:
        await until(table, at(6))


# --- tokens -------------------------------------------------------------------------------------


async def test_a_token_that_is_refused_ends_it_for_everybody():
    async def part(seat):
        await seat.refuse("UNAUTHORIZED")
        await seat.stay()

    async with Script(part) as server, sit(server, token="old") as table:
        answer = table.act({"actionType": "a"})
        with pytest.raises(RoomError, match="UNAUTHORIZED: no") as raised:
            await until(table, lambda _: False)
        assert raised.value.code == "UNAUTHORIZED"
        assert table.status == "failed"
        assert table.turned_away == TurnedAway("UNAUTHORIZED", "no")
        with pytest.raises(RoomError):
            await answer
        with pytest.raises(RoomError):
            table.act({"actionType": "a"})
        await server.empty()


async def test_who_is_turned_away_is_told_why_until_they_are_in(caplog):
    async def refuses(seat):
        join = await seat.hear("JOIN")
        error = {"code": "RATE_LIMITED", "message": "slower", "retry": True, "retryAfterMs": 50}
        await seat.say(message("ERROR", error), join["requestId"])
        await seat.stay()

    async def second(seat):
        await seat.show(5, 5)
        await seat.stay()

    why = TurnedAway("RATE_LIMITED", "slower")
    with caplog.at_level(logging.INFO, "semel"):
        async with Script(refuses, second) as server, sit(server) as table:
            await until(table, lambda news: news == Became("waiting", why))
            assert table.turned_away == why
            await until(table, at(5))
            assert table.turned_away is None
    assert "(RATE_LIMITED: slower)" in caplog.text


async def test_a_token_that_is_tried_twice_is_refused_with_the_words_of_the_server():
    async def part(seat):
        await seat.refuse("UNAUTHORIZED")
        await seat.stay()

    async with Script(part) as server, sit(server, token=lambda: "old") as table:
        with pytest.raises(RoomError, match="UNAUTHORIZED: no"):
            await until(table, lambda _: False)


async def test_a_token_is_asked_for_at_every_connection_and_another_is_tried():
    tokens = iter(["old", "new"])

    async def token():
        await asyncio.sleep(0)
        return next(tokens)

    async def refuses(seat):
        join = await seat.refuse("UNAUTHORIZED")
        assert join["payload"]["token"] == "old"
        await seat.stay()

    async def second(seat):
        join = await seat.show(5, 5)
        assert join["payload"]["token"] == "new"
        await seat.stay()

    async with Script(refuses, second) as server, sit(server, token=token) as table:
        await until(table, at(5))


async def test_a_token_that_cannot_be_had_ends_it():
    def token():
        raise KeyError("none")

    async def part(seat):
        await seat.stay()

    async with Script(part) as server, sit(server, token=token) as table:
        with pytest.raises(RoomError, match="there is no token") as raised:
            await until(table, lambda _: False)
        assert isinstance(raised.value.__cause__, KeyError)
    assert server.seats == []


async def test_a_message_that_is_too_large_ends_it():
    async def part(seat):
        await seat.show(5, "x" * 2000)
        await seat.stay()

    async with Script(part) as server, sit(server, limit=1000) as table:
        with pytest.raises(RoomError, match="larger than 1000 bytes"):
            await until(table, lambda _: False)


# --- acting -------------------------------------------------------------------------------------


async def test_an_action_is_answered_and_those_who_click_twice_get_the_same():
    async def part(seat):
        await seat.show(5, 5)
        asked = await seat.hear("ACTION_REQUEST")
        assert asked["payload"] == {"tableId": "t", "actionType": "raise", "amount": 100}
        assert asked["clientSeq"] == 1
        assert asked["requestId"].startswith(f"{asked['clientId']}-")
        await seat.say(result(version=5, reply={"pot": 100}), asked["requestId"])
        assert await seat.stay() == []

    async with Script(part) as server, sit(server) as table:
        action = {"actionType": "raise", "amount": 100}
        one, other = await asyncio.gather(table.act(action), table.act(dict(action)))
        assert one is other
        assert (one.reply, one.version, one.cached) == ({"pot": 100}, 5, False)


async def test_an_action_survives_cuts_with_its_id_and_number():
    heard = []

    async def cuts(seat):
        await seat.show(5, 5)
        heard.append(await seat.hear("ACTION_REQUEST"))
        seat.cut()

    async def second(seat):
        await seat.let_in(resumed=True, head=6)
        heard.append(await seat.hear("ACTION_REQUEST"))
        await seat.say(result(version=6, cached=True, reply="once"), heard[-1]["requestId"])
        await seat.say(update(**{"from": 5}, to=6, patch=[[[], 6]]))
        await seat.stay()

    async with Script(cuts, second) as server, sit(server) as table:
        answer = await table.act({"actionType": "a"})
        assert (answer.reply, answer.cached) == ("once", True)
        await until(table, at(6))
    assert heard[0] == heard[1]


async def test_a_refusal_is_an_error_with_its_code_and_what_was_shown_is_taken_back():
    async def part(seat):
        await seat.show(5, {"count": 1})
        asked = await seat.hear("ACTION_REQUEST")
        error = {"code": "NOT_YOUR_TURN", "message": "wait"}
        await seat.say(result(version=5, error=error), asked["requestId"])
        await seat.stay()

    def optimistic(state, action):
        state["count"] += action["by"]
        return state

    async with Script(part) as server, sit(server, optimistic=optimistic) as table:
        await until(table, at(5))
        answer = table.act({"actionType": "add", "by": 2})
        assert (table.state, table.confirmed, table.pending) == ({"count": 3}, {"count": 1}, 1)
        with pytest.raises(ActionError, match="NOT_YOUR_TURN: wait") as raised:
            await answer
        assert (raised.value.code, raised.value.message) == ("NOT_YOUR_TURN", "wait")
        assert (table.state, table.pending) == ({"count": 1}, 0)


async def test_one_that_is_not_answered_says_how_to_ask_again_and_a_late_answer_is_ignored():
    async def part(seat):
        await seat.show(5, 5)
        first = await seat.hear("ACTION_REQUEST")
        again = await seat.hear("ACTION_REQUEST")
        assert again == first
        await seat.say(result(version=5, reply="late"), first["requestId"])
        await seat.say(result(version=5, reply="later"), first["requestId"])
        await seat.stay()

    async with Script(part) as server, sit(server, timeout_s=0.1) as table:
        await until(table, at(5))
        with pytest.raises(TimeoutError, match="the outcome is unknown") as raised:
            await table.act({"actionType": "a"})
        assert isinstance(raised.value, ActionTimeoutError)
        assert raised.value.was_sent
        answer = await table.act({"actionType": "a"}, request_id=raised.value.request_id)
        assert answer.reply == "late"


async def test_nothing_was_decided_the_same_again():
    async def part(seat):
        await seat.show(5, 5)
        asked = await seat.hear("ACTION_REQUEST")
        error = {"code": "RATE_LIMITED", "retry": True, "retryAfterMs": 100}
        await seat.say(result(version=5, error=error), asked["requestId"])
        assert await seat.hear("ACTION_REQUEST") == asked
        await seat.say(result(version=5, reply="now"), asked["requestId"])
        await seat.stay()

    async with Script(part) as server, sit(server) as table:
        assert (await table.act({"actionType": "a"})).reply == "now"


async def test_who_stops_waiting_takes_nothing_back():
    async def part(seat):
        await seat.show(5, 5)
        asked = await seat.hear("ACTION_REQUEST")
        await seat.hear("REQUEST_SNAPSHOT")
        await seat.say(result(version=5, reply="done"), asked["requestId"])
        await seat.stay()

    async with Script(part) as server, sit(server) as table:
        task = asyncio.ensure_future(asyncio.wait_for(table.act({"actionType": "a"}), 60))
        await until(table, at(5))
        task.cancel()
        await asyncio.wait([task])
        answer = table.act({"actionType": "a"})
        table.request_snapshot()
        assert (await answer).reply == "done"


async def test_who_does_not_wait_for_an_answer_is_not_told():
    async def part(seat):
        await seat.show(5, 5)
        asked = await seat.hear("ACTION_REQUEST")
        await seat.say(result(version=5, error={"code": "INVALID"}), asked["requestId"])
        await seat.stay()

    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    async with Script(part) as server, sit(server) as table:
        await until(table, at(5))
        table.act({"actionType": "a"})
        await until(table, lambda news: isinstance(news, State) and not news.pending)
        table.act({"actionType": "b"})
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


async def test_what_is_larger_than_the_server_takes_is_not_sent():
    async def part(seat):
        await seat.let_in(head=5, message_bytes=300)
        await seat.say(snapshot(version=5, state=5))
        asked = await seat.hear("ACTION_REQUEST")
        assert asked["payload"]["text"] == "é" * 10
        await seat.say(result(version=5), asked["requestId"])
        assert await seat.stay() == []

    async with Script(part) as server, sit(server) as table:
        await until(table, at(5))
        with pytest.raises(ActionError, match="the server takes 300") as raised:
            await table.act({"actionType": "chat", "text": "é" * 100})
        assert (raised.value.code, raised.value.was_sent) == ("TOO_LARGE", False)
        await table.act({"actionType": "chat", "text": "é" * 10})


async def test_a_button_waits_for_the_state_and_not_for_the_reply():
    async def part(seat):
        await seat.show(5, {"turn": "ann"})
        asked = await seat.hear("ACTION_REQUEST")
        await seat.say(result(version=6), asked["requestId"])
        await seat.hear("REQUEST_SNAPSHOT")
        await seat.say(update(**{"from": 5}, to=6, patch=[[["turn"], "bob"]]))
        await seat.say(update(**{"from": 6}, to=7, patch=[[["turn"], "ann"]]))
        await seat.stay()

    async with Script(part) as server, sit(server) as table:
        fold = button(table, enabled_when=lambda state: state["turn"] == "ann")
        assert not fold.is_enabled
        await until(table, at(5))
        assert fold.is_enabled
        answer = fold.press({"actionType": "fold"})
        assert not fold.is_enabled
        assert fold.press({"actionType": "fold"}) is None
        await answer
        assert not fold.is_enabled
        table.request_snapshot()
        await until(table, at(7))
        assert fold.is_enabled


# --- leaving ------------------------------------------------------------------------------------


async def test_who_leaves_leaves_nothing_behind():
    async def part(seat):
        await seat.show(5, 5)
        await seat.stay()

    before = asyncio.all_tasks()
    async with Script(part) as server:
        async with sit(server) as table:
            await until(table, at(5))
            hearing = asyncio.ensure_future(until(table, lambda _: False))
            answer = table.act({"actionType": "a"})
            await asyncio.sleep(0)
        assert table.status == "closed"
        with pytest.raises(RoomError, match="the outcome is unknown"):
            await answer
        with pytest.raises(AssertionError):  # its loop has ended
            await hearing
        with pytest.raises(RoomError, match="closed"):
            table.request_snapshot()
        await table.aclose()
        await server.empty()
    assert asyncio.all_tasks() == before


async def test_who_leaves_while_connecting_leaves_nothing_behind():
    async def part(seat):
        await seat.stay()

    before = asyncio.all_tasks()
    async with Script(part) as server:
        for turns in range(6):
            async with sit(server):
                for _ in range(turns):
                    await asyncio.sleep(0)
        await server.empty()
    assert asyncio.all_tasks() == before


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "ftp://example.test/rooms"}, "begins with ws"),
        ({"url": "/rooms"}, "begins with ws"),
        ({"table_id": ""}, "which table"),
        ({"client_seq": 4}, "give both"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"limit": 0}, "limit=0"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(options, words):
    options = {"url": "ws://example.test/rooms", "table_id": "t", **options}
    with pytest.raises(SettingsError, match=words):
        room(options.pop("url"), **options)


def test_without_websockets_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.asyncio.client", None)
    with pytest.raises(SettingsError, match=r"pip install 'semel\[ws\]'"):
        room("ws://example.test/rooms", table_id="t")


async def test_an_action_without_a_type_and_a_table_nobody_sits_at_are_refused():
    table = room("https://example.test/rooms", table_id="t")
    with pytest.raises(SettingsError, match="no actionType"):
        table.act({"by": 1})
    with pytest.raises(SettingsError, match="sit down first"):
        table.act({"actionType": "a"})
