"""Turns that are not played in time: each is timed out once, whoever is there to do it.

In simulated time: whoever is woken next is drawn by lot.
"""

from __future__ import annotations

import asyncio
import copy

import pytest

from semel.circuit import Circuit
from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.rooms import Deadline, Refused
from semel.rooms.clock import StoreClock
from semel.rooms.everything import everything
from semel.rooms.timers import MOST_NOTES, TRIM_EACH
from support.rooms import (
    NOTES,
    ROOM,
    STREAM,
    Cards,
    acted,
    chips_of,
    dealt,
    rooms_on,
    simulated,
    state_of,
)

SHORT_S = 10.0


def servers(store, number, turn_s=SHORT_S, **more):
    homes = [rooms_on(store, Cards(turn_s), **more) for _ in range(number)]
    for home in homes:
        home.start()
    return homes


async def closed(*homes):
    await asyncio.gather(*(home.aclose() for home in homes))


async def timeouts(rooms, room=ROOM):
    """The turns that were timed out, as the log has them."""
    page = await rooms.log.read(rooms.stream_of(room), limit=10_000)
    return [entry.id.rpartition(":")[2] for entry in page.entries if ":timeout:" in entry.id]


async def notes(store, rooms):
    page = await rooms.log.read(NOTES, limit=100_000)
    if page.lost:
        page = await rooms.log.read(NOTES, page.floor, limit=100_000)
    return len(page.entries)


def wrong():
    """The clock of a machine on which nobody has set it."""
    return ASYNC.now()


# --- once ---------------------------------------------------------------------------------------


@simulated(1, 2, 3)
async def test_each_turn_is_timed_out_once_by_whichever_server(store):
    homes = servers(store, 3)
    await dealt(homes[0], "ann", "bob", "cat")
    await asyncio.sleep(9.9)
    assert await timeouts(homes[0]) == []
    await asyncio.sleep(60)
    assert await timeouts(homes[0]) == ["turn-1", "turn-2", "turn-3"]
    state = await state_of(homes[0])
    assert state["passed"] == ["turn-1", "turn-2", "turn-3"]
    assert state["turn"] is None
    assert sum(home.status().timeouts for home in homes) == 3
    assert sum(home.status().requests for home in homes) == 4
    await closed(*homes)


@simulated(1, 2, 3)
async def test_a_turn_is_timed_out_in_time(store):
    homes = servers(store, 2)
    began = store.wall()
    await dealt(homes[0], "ann", "bob")
    await asyncio.sleep(30)
    entries = (await homes[0].log.read(STREAM)).entries
    late = [entry.at_us / 1e6 - began for entry in entries if "timeout" in entry.id]
    assert [round(at, 1) for at in late] == [10.0, 20.0]
    await closed(*homes)


@simulated(1, 2, 3)
async def test_turns_that_are_over_while_everybody_is_down_are_timed_out_by_who_comes(store):
    (first,) = servers(store, 1)
    await dealt(first, "ann", "bob")
    await closed(first)
    await asyncio.sleep(3600)
    (second,) = servers(store, 1)
    await asyncio.sleep(5)
    assert await timeouts(second) == ["turn-1"]
    await asyncio.sleep(10)
    assert await timeouts(second) == ["turn-1", "turn-2"]
    await closed(second)


@simulated(1, 2)
async def test_who_only_acts_need_not_look_after_turns(store):
    acting = rooms_on(store, Cards(SHORT_S))
    await dealt(acting, "ann", "bob")
    (looking,) = servers(store, 1)
    await asyncio.sleep(15)
    assert await timeouts(acting) == ["turn-1"]
    assert looking.status().timeouts == 1
    for _ in range(50):
        await acted(acting, "ann", "deal")
        await asyncio.sleep(SHORT_S / 2)
    timers = acting.timers
    assert max(len(timers._open), len(timers._due), len(timers._noted.get(ROOM, []))) < 10
    await closed(acting, looking)


@simulated(1)
async def test_who_only_acts_forgets_what_it_has_noted(store):
    home = rooms_on(store, Cards(3600.0))
    for number in range(MOST_NOTES + 200):
        await acted(home, "ann", "sit", room=f"r{number}")
        await acted(home, "ann", "deal", room=f"r{number}")
    assert store.asked["append", NOTES] == MOST_NOTES + 200
    assert len(home.timers._noted) == MOST_NOTES
    await closed(home)


@simulated(1, 2, 3)
async def test_a_turn_that_is_played_in_time_is_never_timed_out(store):
    homes = servers(store, 2)
    await dealt(homes[0], "ann", "bob", "cat")
    for user in ("ann", "bob", "cat"):
        await asyncio.sleep(SHORT_S * 0.99)
        assert (await acted(homes[1], user, "play")).success
    await asyncio.sleep(100)
    assert await timeouts(homes[0]) == []
    assert sum(home.status().timeouts for home in homes) == 0
    await closed(*homes)


@simulated(1, 2, 3, 4, 5)
async def test_who_plays_at_the_last_moment_leaves_the_next_turn_its_time(store):
    """What is on its way when everybody looks is not in the log; the next turn ends as well."""
    homes = servers(store, 2)
    for early_s, takes_s in ((0.005, 0.05), (0.01, 0.6), (0.5, 0.6), (1.5, 3.0)):
        await dealt(homes[0], "ann", "bob")
        before = len(await timeouts(homes[0]))
        state = await state_of(homes[0])
        await asyncio.sleep(state["ends_s"] - store.wall() - early_s)
        store.hold()
        playing = asyncio.ensure_future(acted(homes[0], "ann", "play"))
        await asyncio.sleep(takes_s)
        store.let_go()
        played = await playing
        assert played.success or played.code == "NOT_YOUR_TURN"
        await asyncio.sleep(3 * SHORT_S)
        assert (await state_of(homes[0]))["turn"] is None, "nobody looks at it any more"
        assert len(await timeouts(homes[0])) - before == (1 if played.success else 2)
    await closed(*homes)


@simulated(1, 2, 3)
async def test_a_turn_that_takes_long_to_begin_is_timed_out(store):
    """The look that it counts on was over when it began."""
    homes = servers(store, 2)
    await dealt(homes[0], "ann", "bob")
    await acted(homes[0], "ann", "rest")
    await asyncio.sleep(5)
    store.hold()
    dealing = asyncio.ensure_future(acted(homes[0], "ann", "deal"))
    await asyncio.sleep(8)  # the note of the first hand is due meanwhile
    store.let_go()
    await dealing
    await asyncio.sleep(3 * SHORT_S)
    assert (await state_of(homes[0]))["turn"] is None
    await closed(*homes)


@simulated(1, 2)
async def test_of_two_turns_with_different_times_the_shorter_later_one_is_not_late(store):
    (home,) = servers(store, 1, turn_s=3600)
    await dealt(home, "ann", "bob")
    home.room.turn_s = 5
    await acted(home, "ann", "play")
    await asyncio.sleep(5.5)
    assert await timeouts(home) == ["turn-2"]
    await closed(home)


@pytest.mark.parametrize("turn_s", [-3600.0, 0.0, 0.001, 0.5])
@simulated(1, 2)
async def test_a_turn_that_is_over_as_soon_as_it_begins_is_timed_out(store, turn_s):
    """It costs a few notes, and does not keep whoever begins it for ever."""
    store.delay_s = 0.005
    (home,) = servers(store, 1, turn_s=turn_s)
    await dealt(home, "ann", "bob", "cat")
    await asyncio.sleep(5)
    assert await timeouts(home) == ["turn-1", "turn-2", "turn-3"]
    assert store.asked["append", NOTES] <= 12
    await closed(home)


@simulated(1)
async def test_a_long_time_is_waited_for(store):
    homes = servers(store, 2, turn_s=3600)
    await dealt(homes[0], "ann", "bob")
    await asyncio.sleep(3540)
    assert await timeouts(homes[0]) == []
    await asyncio.sleep(120)
    assert await timeouts(homes[0]) == ["turn-1"]
    await closed(*homes)


# --- what it costs ------------------------------------------------------------------------------


@simulated(1, 2)
async def test_turns_that_are_played_are_noted_once_for_many(store):
    (home,) = servers(store, 1, turn_s=30)
    await dealt(home, "ann", "bob")
    store.asked.clear()
    for _ in range(100):
        for user in ("ann", "bob"):
            assert (await acted(home, user, "play")).success
            await asyncio.sleep(0.5)
        await acted(home, "ann", "deal")
    # 100 seconds: looked at each half a minute, and noted anew
    assert store.asked["append", NOTES] <= 8
    assert store.asked["append", STREAM] == 300
    await closed(home)


@simulated(1)
async def test_notes_are_trimmed_however_many_turns_there_are(store):
    homes = servers(store, 3, turn_s=2)
    for number in range(20):
        await dealt(homes[number % 3], "ann", "bob", room=f"r{number}")
    most = 0
    for _ in range(30):
        await asyncio.sleep(2)
        most = max(most, await notes(store, homes[0]))
        for number in range(20):
            await acted(homes[number % 3], "ann", "deal", room=f"r{number}")
    assert store.asked["append", NOTES] > 500
    assert most <= 20 * 6 + TRIM_EACH
    await asyncio.sleep(60)
    assert await notes(store, homes[0]) <= TRIM_EACH
    for home in homes:
        assert len(home.timers._noted) == 0
        assert len(home.timers._due) == 0
        assert len(home.timers._open) == 0
    await closed(*homes)


@simulated(1, 2)
async def test_turns_shorter_than_a_look_is_sure_of_are_noted_once_each(store):
    """Each of three servers noted whatever another had: three times as many each time."""
    homes = servers(store, 3, turn_s=0.8)
    await dealt(homes[0], "ann", "bob")
    for number in range(100):
        for user in ("ann", "bob"):
            await asyncio.sleep(0.3)
            assert (await acted(homes[number % 3], user, "play")).success
        await acted(homes[number % 3], "ann", "deal")
        assert store.asked["append", NOTES] <= 3 * number + 6
    assert await notes(store, homes[0]) <= TRIM_EACH + 6
    await asyncio.sleep(10)
    assert len(await timeouts(homes[0])) == 2
    for home in homes:
        assert not home.timers._looks
        assert not home.timers._open
    await closed(*homes)


@simulated(1, 2, 3)
async def test_looks_at_one_room_are_one_at_a_time(store):
    store.delay_s = 0.05
    (home,) = servers(store, 1, turn_s=30)
    await dealt(home, "ann", "bob")
    await asyncio.sleep(1)
    store.asked.clear()
    for _ in range(20):
        home.look_soon(ROOM)
    await asyncio.sleep(1)
    assert store.asked["load", STREAM] <= 2
    await closed(home)


@simulated(1)
async def test_many_open_notes_are_not_renewed(store, monkeypatch):
    """Each renewal is an open note more: with as many as are allowed, there was no end to it."""
    monkeypatch.setattr("semel.rooms.timers.MOST_NOTES", 20)
    homes = servers(store, 2, turn_s=3600)
    for number in range(50):
        await dealt(homes[0], "ann", "bob", room=f"r{number}")
    assert store.asked["append", NOTES] == 50
    await asyncio.sleep(600)
    assert store.asked["append", NOTES] == 50
    await asyncio.sleep(3100)
    for number in range(50):
        assert await timeouts(homes[0], f"r{number}") == ["turn-1"]
    await closed(*homes)


@simulated(1)
async def test_a_note_that_is_due_in_an_hour_is_renewed_and_does_not_become_many(
    store, monkeypatch
):
    monkeypatch.setattr("semel.rooms.timers.MOST_NOTES", 50)
    assert MOST_NOTES == 1000
    homes = servers(store, 3, turn_s=3600)
    await dealt(homes[0], "ann", "bob", room="slow")
    for home in homes:
        home.room.turn_s = 1
    for number in range(300):
        await acted(homes[number % 3], "ann", "sit", room="fast")
        await acted(homes[number % 3], "ann", "deal", room="fast")
        await asyncio.sleep(1.7)
    assert store.asked["append", NOTES] > 300
    assert store.asked["append", NOTES] < 1500
    assert await notes(store, homes[0]) < 150
    assert await timeouts(homes[0], "slow") == []
    await asyncio.sleep(3200)
    assert await timeouts(homes[0], "slow") == ["turn-1", "turn-2"]
    await closed(*homes)


# --- what goes wrong ----------------------------------------------------------------------------


@simulated(1, 2)
async def test_a_room_whose_rules_fail_at_the_end_of_a_turn_is_looked_at_again(store, caplog):
    (home,) = servers(store, 1)
    await dealt(home, "ann", "bob")
    await dealt(home, "ann", "bob", room="t2")
    home.room.fails = {"timeout"}
    caplog.clear()
    before = store.asked["append", STREAM]
    await asyncio.sleep(60)
    assert await timeouts(home) == []
    assert 5 <= store.asked["append", STREAM] - before <= 30  # it asks whether that was answered
    assert 1 <= caplog.text.count("the rules of room") <= 2
    assert not home.status().refused  # nobody has asked
    home.room.fails = set()
    await asyncio.sleep(30)
    assert await timeouts(home) == await timeouts(home, "t2") == ["turn-1", "turn-2"]
    await closed(home)


@simulated(1)
async def test_rules_that_cannot_tell_when_a_turn_is_over_harm_no_other_room(store, caplog):
    (home,) = servers(store, 1)
    await dealt(home, "ann", "bob")
    home.room.fails = {"deadline"}
    await asyncio.sleep(15)
    assert "nobody can tell whether a turn" in caplog.text
    home.room.fails = set()
    await asyncio.sleep(15)
    assert await timeouts(home) == ["turn-1", "turn-2"]
    await closed(home)


class ZoeIsOdd(Cards):
    """Where she sits, nobody can tell when a turn is over, for as long as that is so."""

    is_odd = False

    def deadline(self, state):
        if self.is_odd and "zoe" in state["seats"]:
            raise ZeroDivisionError("deadline has failed")
        return super().deadline(state)


@simulated(1)
async def test_rules_that_cannot_tell_when_a_turn_is_over_keep_no_notes_of_other_rooms(
    store, caplog
):
    homes = [rooms_on(store, ZoeIsOdd(2.0)) for _ in range(2)]
    for home in homes:
        home.start()
    await dealt(homes[0], "zoe", "bob", room="odd")
    for home in homes:
        home.room.is_odd = True
    for number in range(100):
        await acted(homes[number % 2], "ann", "sit", room="fine")
        await acted(homes[number % 2], "ann", "deal", room="fine")
        await asyncio.sleep(3)
    assert "nobody can tell whether a turn of room 'odd' is over" in caplog.text
    assert caplog.text.count("nobody can tell") <= 2 * 300 / 5 + 4
    assert store.asked["append", NOTES] > 150
    assert await notes(store, homes[0]) <= TRIM_EACH + 12
    for home in homes:
        home.room.is_odd = False
    await asyncio.sleep(30)
    assert await timeouts(homes[0], "odd") == ["turn-1", "turn-2"]
    await closed(*homes)


@simulated(1)
async def test_a_room_whose_node_is_away_keeps_no_notes_of_other_rooms(store):
    """As in a cluster, where the notes are on another one."""
    homes = servers(store, 2, turn_s=2.0)
    await dealt(homes[0], "zoe", "bob", room="away")
    for verb in ("load", "read", "append"):
        store.lose_request[verb, "table:room:away"] = 10**9
    for number in range(200):
        await acted(homes[number % 2], "ann", "sit", room="fine")
        await acted(homes[number % 2], "ann", "deal", room="fine")
        await asyncio.sleep(3)
    assert store.asked["append", NOTES] > 100
    assert await notes(store, homes[0]) <= TRIM_EACH + 30
    store.lose_request.clear()
    await asyncio.sleep(30)
    assert await timeouts(homes[0], "away") == ["turn-1", "turn-2"]
    await closed(*homes)


class EndsAtOnce(Cards):
    """Rules with a deadline that is not a number."""

    def deadline(self, state):
        return Deadline("t", float("nan"))


@simulated(1)
async def test_a_first_deadline_that_is_no_time_is_told_of_and_keeps_nobody_busy(store, caplog):
    before = rooms_on(store)
    await acted(before, "ann", "sit")
    await closed(before)
    home = rooms_on(store, EndsAtOnce())
    home.start()
    home.look_soon(ROOM)
    home.look_after(await home.standing(ROOM), ROOM)
    await asyncio.sleep(60)
    assert "deadline gave Deadline(turn='t', at_s=nan)" in caplog.text
    assert store.asked["load", STREAM] < 40
    await closed(home)


@simulated(1, 2)
async def test_who_stays_for_the_end_of_a_turn_and_dies_leaves_its_note(store):
    (first,) = servers(store, 1, turn_s=0.9)
    await dealt(first, "ann", "bob")
    await asyncio.sleep(0.5)
    await acted(first, "ann", "play")
    await asyncio.sleep(0.6)  # the first note was due, and bob's turn has 0.3 s left
    assert first.timers._looks
    await closed(first)
    await asyncio.sleep(60)
    (second,) = servers(store, 1, turn_s=0.9)
    await asyncio.sleep(5)
    assert await timeouts(second) == ["turn-2"]
    await closed(second)


@simulated(1, 2)
async def test_the_repeat_of_a_dead_servers_request_has_its_turn_looked_after(store):
    """It was appended, and whoever had sent it died before anything else."""
    (first,) = servers(store, 1)
    for user in ("ann", "bob"):
        await acted(first, user, "sit")
    store.hold()
    dealing = asyncio.ensure_future(acted(first, "ann", "deal", id="deal"))
    await asyncio.sleep(SHORT_S + 5)  # its note was looked at, in vain
    store.lose_reply["append", STREAM] = 1
    store.let_go()
    await asyncio.sleep(0.01)
    dealing.cancel()  # who has sent it is dead before anything is heard of it
    await asyncio.wait([dealing])
    await closed(first)
    (second,) = servers(store, 1)
    await asyncio.sleep(30)
    assert await timeouts(second) == []
    assert (await acted(second, "ann", "deal", id="deal")).cached
    await asyncio.sleep(5)
    assert (await timeouts(second))[0] == "turn-1"
    await closed(second)


class OneName(Cards):
    """Every turn of it is called the same. `ends`: whether one can be timed out."""

    ends = True

    def deadline(self, state):
        found = super().deadline(state)
        return found and Deadline("turn", found.at_s)

    def timeout(self, state, turn, ctx):
        return super().timeout(state, turn, ctx) if self.ends else Refused("NO", "take your time")


@pytest.mark.parametrize("ends", [True, False])
@simulated(1)
async def test_turns_of_the_same_name_are_told_of_once_and_keep_nobody_busy(store, ends, caplog):
    """Each server that looked had it looked at again at once, for ever."""
    homes = [rooms_on(store, OneName(2.0)) for _ in range(2)]
    for home in homes:
        home.room.ends = ends
        home.start()
    await dealt(homes[0], "ann", "bob")
    await asyncio.sleep(10)
    store.asked.clear()
    for _ in range(20):
        await acted(homes[0], "ann", "say", text="is anybody there?")
        await asyncio.sleep(1)
    assert store.asked["append", NOTES] <= 2
    assert store.asked["append", STREAM] <= 60
    said = "no two turns" if ends else "refuse to time out turn"
    assert 1 <= caplog.text.count(said) <= 2  # by each of them
    assert (await acted(homes[1], "bob" if ends else "ann", "play")).success
    await closed(*homes)


@simulated(1, 2)
async def test_a_database_without_tables_is_waited_for(store, caplog):
    """`semel db init` comes later: whoever looks after turns had given up by then."""
    caplog.clear()
    store.is_down, store.error = True, SettingsError
    homes = servers(store, 2)
    await asyncio.sleep(30)
    assert caplog.text.count("the log of deadlines does not answer") == 2
    assert store.asked["read", NOTES] < 40  # more and more slowly
    store.is_down = False
    await asyncio.sleep(30)
    assert caplog.text.count("the log of deadlines answers again") == 2
    await dealt(homes[0], "ann", "bob")
    await asyncio.sleep(1.5 * SHORT_S)
    assert await timeouts(homes[0]) == ["turn-1"]
    await closed(*homes)


@simulated(1, 2)
async def test_nobody_looks_for_who_is_closed_whatever_is_on_its_way(store):
    (home,) = servers(store, 1, turn_s=0.5)
    for user in ("ann", "bob"):
        await acted(home, user, "sit")
    store.hold()
    dealing = asyncio.ensure_future(acted(home, "ann", "deal"))
    await asyncio.sleep(0.01)
    await home.aclose()
    store.let_go()
    assert (await dealing).success
    store.asked.clear()
    await asyncio.sleep(60)
    assert home.counts.timeouts == 0
    assert not store.asked
    assert not home.timers._looks


@simulated(1, 2)
async def test_a_timeout_that_nobody_has_read_and_a_failover_takes_back_is_made_again(store):
    """Nobody is in the room, so nobody sees that it has gone back."""
    (home,) = servers(store, 1)
    await dealt(home, "ann", "bob")
    await asyncio.sleep(1.5 * SHORT_S)
    assert await timeouts(home) == ["turn-1"]
    streams = store.inner._log._streams
    before = copy.deepcopy(streams[STREAM])
    while await timeouts(home) != ["turn-1", "turn-2"]:
        await asyncio.sleep(0.01)
    streams[STREAM] = before
    await asyncio.sleep(3)
    assert await timeouts(home) == ["turn-1", "turn-2"]
    await closed(home)


@simulated(1)
async def test_what_is_kept_of_a_trimmed_stream_is_not_over_before_it_is_read(store):
    """After a failover, every room would be looked at and noted again, by every server."""
    homes = servers(store, 2, turn_s=3600)
    for number in range(5):
        await dealt(homes[0], "ann", "bob", room=f"r{number}")
    log = store.log(ASYNC)
    await log.append(NOTES, b"no note of ours", id="first")
    page = await log.read(NOTES)
    await log.trim(NOTES, page.entries[0].position)
    circuit, told = Circuit("test"), []
    reading = everything(homes[0].feed, NOTES, circuit)
    while len(told) < 3:
        told.append(await anext(reading))
    assert [None if entries is None else len(entries) for entries in told] == [None, 5, 0]
    await reading.aclose()
    await closed(*homes)


@simulated(1)
async def test_rules_that_refuse_to_end_a_turn_are_told_of_once_and_left_alone(store, caplog):
    (home,) = servers(store, 1)
    home.room.timeout = lambda state, turn, ctx: Refused("NO", "take your time")
    await dealt(home, "ann", "bob")
    await asyncio.sleep(100)
    assert "take your time" in caplog.text
    assert store.asked["append", STREAM] <= 6
    assert (await acted(home, "ann", "play")).success
    await closed(home)


@simulated(1, 2, 3)
async def test_a_store_that_is_away_when_a_turn_is_over_is_waited_for(store, caplog):
    homes = servers(store, 2)
    await dealt(homes[0], "ann", "bob")
    await asyncio.sleep(5)
    store.is_down = True
    await asyncio.sleep(60)
    store.is_down = False
    await asyncio.sleep(8)
    assert (await timeouts(homes[0]))[0] == "turn-1"
    await asyncio.sleep(20)
    assert await timeouts(homes[0]) == ["turn-1", "turn-2"]
    await closed(*homes)


@simulated(1, 2)
async def test_a_store_that_is_away_when_it_begins_is_waited_for(store, caplog):
    (first,) = servers(store, 1)
    await dealt(first, "ann", "bob")
    await closed(first)
    store.is_down = True
    (second,) = servers(store, 1)
    await asyncio.sleep(30)
    store.is_down = False
    await asyncio.sleep(30)
    assert await timeouts(second) == ["turn-1", "turn-2"]
    await closed(second)


@simulated(1, 2)
async def test_a_failover_that_takes_notes_back_takes_no_turn_from_who_begins_anew(store):
    homes = servers(store, 2)
    await dealt(homes[0], "ann", "bob")
    streams = store.inner._log._streams
    before = copy.deepcopy(streams)
    await dealt(homes[0], "ann", "bob", room="t2")
    streams.clear()
    streams.update(before)
    await asyncio.sleep(3)
    await dealt(homes[1], "ann", "bob", room="t3")
    await asyncio.sleep(30)
    assert await timeouts(homes[0]) == await timeouts(homes[0], "t3") == ["turn-1", "turn-2"]
    await closed(*homes)


@simulated(1)
async def test_what_is_no_note_is_told_of_and_passed_over(store, caplog):
    (home,) = servers(store, 1)
    for number, data in enumerate((b"", b"{}", b"[]", b'{"room": "t1"}', b'{"room":1,"at":"x"}')):
        await home.log.append(NOTES, data, id=f"odd-{number}")
    await dealt(home, "ann", "bob")
    await asyncio.sleep(30)
    assert await timeouts(home) == ["turn-1", "turn-2"]
    said = {line for line in caplog.text.splitlines() if "is no note of ours" in line}
    assert len(said) == 5
    await closed(home)


# --- clocks -------------------------------------------------------------------------------------


@simulated(1, 2, 3)
async def test_servers_whose_own_clocks_differ_agree_on_when_a_turn_is_over(store):
    skews = (0.0, 3600.0, -3600.0)
    homes = [
        rooms_on(store, Cards(SHORT_S), wall=lambda skew=skew: store.wall() + skew)
        for skew in skews
    ]
    for home in homes:
        home.start()
    store.delay_s = 0.01
    began = store.wall()
    await dealt(homes[1], "ann", "bob")  # the very first is by the store's clock
    await asyncio.sleep(9)
    assert await timeouts(homes[0]) == []
    await asyncio.sleep(30)
    assert await timeouts(homes[0]) == ["turn-1", "turn-2"]
    entries = (await homes[0].log.read(STREAM)).entries
    late = [entry.at_us / 1e6 - began for entry in entries if "timeout" in entry.id]
    assert late[0] == pytest.approx(SHORT_S, abs=0.5)
    assert late[1] == pytest.approx(2 * SHORT_S, abs=1)
    await closed(*homes)


@simulated(1, 2)
async def test_the_stores_time_is_known_to_half_of_what_an_answer_takes(store):
    clock = StoreClock(store.log(None), "table:clock", wrong)
    assert not clock.is_known
    assert clock.now_s() == 0.0
    store.delay_s = 0.2
    await clock.learn()
    assert clock.is_known
    assert clock.now_s() == pytest.approx(store.wall(), abs=0.11)
    asked = store.asked["append", "table:clock"]
    await clock.learn()
    await asyncio.gather(*(clock.learn() for _ in range(10)))
    assert store.asked["append", "table:clock"] == asked == 1
    await asyncio.sleep(61)
    await asyncio.gather(*(clock.learn() for _ in range(10)))
    assert store.asked["append", "table:clock"] == 2


@simulated(1)
async def test_many_who_ask_the_time_at_once_all_learn_it(store):
    store.delay_s = 0.01
    clocks = [StoreClock(store.log(None), "table:clock", wrong) for _ in range(100)]
    await asyncio.gather(*(clock.learn() for clock in clocks))
    assert all(abs(clock.now_s() - store.wall()) < 0.1 for clock in clocks)


@simulated(1, 2)
async def test_a_server_whose_machine_has_slept_asks_again_what_time_it_is(store):
    """Its loop stood still meanwhile: a turn would begin in the past."""
    slept_s = 0.0
    home = rooms_on(store, Cards(SHORT_S), wall=lambda: store.wall() + slept_s)
    home.start()
    await acted(home, "ann", "sit")
    await acted(home, "bob", "sit")
    home.clock._ahead_s -= 1000.0  # as if the loop had stood still for so long
    slept_s = 1000.0
    assert not home.clock.is_known
    assert (await acted(home, "ann", "deal")).success
    assert (await state_of(home))["ends_s"] - store.wall() == pytest.approx(SHORT_S, abs=0.2)
    assert home.clock.is_known
    await asyncio.sleep(SHORT_S - 1)
    assert await timeouts(home) == []
    await asyncio.sleep(2)
    assert await timeouts(home) == ["turn-1"]
    await closed(home)


@simulated(1)
async def test_a_machine_that_sleeps_while_it_asks_what_time_it_is_asks_again(store):
    slept_s = 0.0

    class Sleepy:
        """It falls asleep when the store has answered, and before it has heard."""

        async def append(self, *words, **more):
            nonlocal slept_s
            answer = await store.log(ASYNC).append(*words, **more)
            slept_s += 0.0 if slept_s else 3600.0
            return answer

        def __getattr__(self, verb):
            return getattr(store.log(ASYNC), verb)

    # By the store, and by everybody awake, so much time has passed.
    clock = StoreClock(Sleepy(), "table:clock", lambda: store.wall() + slept_s)
    await clock.learn()
    assert clock.is_known
    assert store.asked["append", "table:clock"] == 2


@simulated(1, 2)
async def test_no_chip_is_made_or_lost_when_turns_are_played_and_timed_out_at_once(store):
    store.delay_s = 0.03
    homes = servers(store, 2, turn_s=1.0)
    await dealt(homes[0], "ann", "bob", "cat")
    for number in range(40):
        state = await state_of(homes[0])
        if state["turn"] is None:
            await acted(homes[0], "ann", "deal")
            continue
        await asyncio.sleep(max(0.0, state["ends_s"] - store.wall() - 0.03 * (number % 3)))
        await acted(homes[number % 2], state["turn"], "play", amount=2)
    state = await state_of(homes[0])
    assert chips_of(state) == 300
    passed = await timeouts(homes[0])
    assert len(passed) == len(set(passed)) > 0
    await closed(*homes)


@simulated(1)
async def test_a_turn_whose_note_is_lost_is_noted_when_somebody_comes(store):
    (home,) = servers(store, 1)
    await dealt(home, "ann", "bob")
    await closed(home)
    log = store.log(ASYNC)
    [head] = await log.heads(["table:timers"])
    await log.trim("table:timers", head)  # as a failover might do that kept the room
    (again,) = servers(store, 1)
    await asyncio.sleep(60)
    assert await timeouts(again) == []
    again.look_after(await again.standing("t1"), "t1")
    await asyncio.sleep(60)
    assert (await timeouts(again))[:1] == ["turn-1"]
    await closed(again)
