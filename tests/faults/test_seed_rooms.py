"""The usual table server on Redis, and what goes wrong with it.

A key says that a request was answered, a lock keeps a user to one at a time, a counter in memory is
the version, a timer folds. Written that way it has known defects. Here each of them is provoked, in
that server and in ours.
"""

from __future__ import annotations

import asyncio
import json

import pytest
import redis.asyncio

from semel.errors import ConcurrentActionError, IdempotencyConflictError
from semel.rooms import Accepted, Deadline, Refused, Room, Rooms
from semel.stores import RedisStore
from support import seed_rooms as seed
from support.room_vectors import Walk
from support.routing import until

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")

TABLE = "t1"
RAISE = {"actionType": "raise", "amount": 100}


class Pot(Room):
    """Raises; now and then slowly, or not at all. Two take turns by the clock."""

    def begin(self, room_id):
        return {"pot": 0, "turn": 0, "until": None, "folded": []}

    def apply(self, state, action, ctx):
        match action["actionType"]:
            case "raise":
                return Accepted({**state, "pot": state["pot"] + action["amount"]}, {"is": "in"})
            case "play":
                return Accepted(self._next(state, ctx, action["s"]))
            case "break":
                raise RuntimeError("broken")
        return Refused("INVALID", "")

    def _next(self, state, ctx, lasts_s=None):
        until = None if lasts_s is None else ctx.now_s + lasts_s
        return {**state, "turn": state["turn"] + 1, "until": until}

    def view(self, state, viewer):
        return state

    def deadline(self, state):
        return None if state["until"] is None else Deadline(str(state["turn"]), state["until"])

    def timeout(self, state, turn, ctx):
        return Accepted(self._next({**state, "folded": [*state["folded"], turn]}, ctx))


@pytest.fixture
async def raw(redis_url):
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


@pytest.fixture
async def servers(redis_url):
    """Two, with a line to Redis each."""
    stores = [RedisStore(redis_url), RedisStore(redis_url)]
    made = [Rooms(store, Pot(), requests_s=300.0) for store in stores]
    yield made
    for rooms, store in zip(made, stores, strict=True):
        await rooms.aclose()
        await store.aclose()


@pytest.fixture
def server(servers):
    return servers[0]


async def pot(rooms):
    return (await rooms.standing(TABLE)).state()["pot"]


class Pots:
    """The seed's action: adds to the pot, and takes a moment."""

    def __init__(self):
        self.pot = 0
        self.at_once = self.most_at_once = 0

    async def raise_it(self):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.05)
        self.pot += 100
        self.at_once -= 1
        return {"is": "in"}


# --- a request that comes again (2.3, 6.2) ------------------------------------------------------


async def test_01_a_double_click_counts_once_on_any_server(raw, servers):
    pots = Pots()
    await asyncio.gather(*(seed.answered(raw, TABLE, "ann", "r1", pots.raise_it) for _ in "12"))
    assert pots.pot == 200, "the defect"

    replies = await asyncio.gather(
        *(rooms.act(TABLE, "ann", "r1", RAISE) for rooms in (*servers, *servers))
    )
    assert await pot(servers[0]) == 100
    assert [(reply.version, reply.reply) for reply in replies] == [(1, {"is": "in"})] * 4
    assert sorted(reply.cached for reply in replies) == [False, True, True, True]


async def test_02_an_action_and_its_answer_are_kept_together(raw, servers, monkeypatch):
    """Killed between the two, or refused by Redis: the seed's next try does it again."""
    pots = Pots()

    async def killed(*_):
        raise ConnectionError

    monkeypatch.setattr(raw, "setex", killed)
    with pytest.raises(ConnectionError):
        await seed.answered(raw, TABLE, "ann", "r1", pots.raise_it)
    monkeypatch.undo()
    await seed.answered(raw, TABLE, "ann", "r1", pots.raise_it)
    assert pots.pot == 200, "the defect"

    await servers[0].act(TABLE, "ann", "r1", RAISE)  # and nobody hears the answer
    assert (await servers[1].act(TABLE, "ann", "r1", RAISE)).cached
    assert await pot(servers[0]) == 100


async def test_03_what_is_forgotten_is_never_answered_with_nothing(raw, redis_url, monkeypatch):
    pots = Pots()
    await seed.answered(raw, TABLE, "ann", "r1", pots.raise_it)
    get = raw.get

    async def five_minutes_later(key):
        await raw.delete(key)
        return await get(key)

    monkeypatch.setattr(raw, "get", five_minutes_later)
    assert await seed.answered(raw, TABLE, "ann", "r1", pots.raise_it) is None, "the defect"
    monkeypatch.undo()
    await seed.answered(raw, TABLE, "ann", "r1", pots.raise_it)
    assert pots.pot == 200, "and then it is done again"

    store = RedisStore(redis_url)
    async with Rooms(store, Pot(), requests_s=0.0, replay=1) as rooms:
        for n in range(1, 3):
            await rooms.act(TABLE, "ann", f"r{n}", RAISE, client_id="c", client_seq=n)
        late = await rooms.act(TABLE, "ann", "r1", RAISE, client_id="c", client_seq=1)
        assert (late.success, late.code) == (False, "SUPERSEDED")
        assert await pot(rooms) == 200
    await store.aclose()


async def test_04_an_id_belongs_to_one_action(raw, server):
    pots = Pots()
    await seed.answered(raw, TABLE, "ann", "r1", pots.raise_it)

    async def fold():
        raise AssertionError("never asked")

    assert json.loads(await seed.answered(raw, TABLE, "ann", "r1", fold)) == {"is": "in"}, (
        "the defect"
    )

    await server.act(TABLE, "ann", "r1", RAISE)
    with pytest.raises(IdempotencyConflictError):
        await server.act(TABLE, "ann", "r1", {**RAISE, "amount": 200})
    assert await pot(server) == 100


async def test_05_an_answer_that_is_nothing_is_an_answer(raw, server, monkeypatch):
    """And what is to be stored has to be done before anybody looks whether it was."""
    store, pots = seed.IdempotencyStore(raw), Pots()
    for known in (None, {"is": "in"}):
        assert await store.check_and_set("k", await pots.raise_it()) == known
    assert pots.pot == 200, "the defect: done twice, whatever the store says"
    get, both = raw.get, asyncio.Barrier(2)

    async def get_with_another(key):
        found = await get(key)
        await both.wait()
        return found

    monkeypatch.setattr(raw, "get", get_with_another)
    firsts = await asyncio.gather(*(store.check_and_set("other", n) for n in (1, 2)))
    assert firsts == [None, None], "the defect: both are the first"

    action = {"actionType": "play", "s": 600}
    first = await server.act(TABLE, "ann", "r1", action)
    assert (first.reply, first.cached) == (None, False)
    again = await server.act(TABLE, "ann", "r1", action)
    assert (again.reply, again.cached, again.version) == (None, True, 1)


# --- versions (3.2, 3.3) ------------------------------------------------------------------------


async def test_06_two_servers_never_make_the_same_version_twice(servers):
    def count(state):
        return seed.TableState(state.count + 1)

    managers = [seed.TableStateManager(TABLE), seed.TableStateManager(TABLE)]
    made = [await manager.apply_transition(count) for manager in managers]
    assert made == [seed.TableState(1, 1)] * 2, "the defect: two clicks, one version, count 1"

    replies = await asyncio.gather(
        *(r.act(TABLE, user, "r1", RAISE) for r, user in zip(servers, "ab", strict=True))
    )
    assert sorted(reply.version for reply in replies) == [1, 2]
    assert await pot(servers[0]) == 200


async def test_07_what_fails_leaves_no_hole_and_a_restart_begins_nothing_anew(servers):
    def fails(state):
        raise RuntimeError

    manager = seed.TableStateManager(TABLE)
    with pytest.raises(RuntimeError):
        await manager.apply_transition(fails)
    state = await manager.apply_transition(lambda state: state)
    assert state.state_version == 2, "the defect: nobody will ever be told of 1"
    manager = seed.TableStateManager(TABLE)  # restarted
    assert (await manager.apply_transition(lambda s: s)).state_version == 1, "the defect"

    assert (await servers[0].act(TABLE, "ann", "r1", {"actionType": "break"})).code == "FAILED"
    assert (await servers[0].act(TABLE, "ann", "r2", RAISE)).version == 1
    assert (await servers[1].act(TABLE, "ann", "r3", RAISE)).version == 2


def told(previous, version, state):
    return {"previousVersion": previous, "stateVersion": version, "state": state}


class Ours(Walk):
    """Our client's rules at a version, and what they ask the server for."""

    def __init__(self, at, state):
        super().__init__({"at": at, "state": state}, chance=0.5)

    def hears(self, since, to, state):
        self.take({"update": {"from": since, "to": to, "patch": [[[], state]]}})

    @property
    def asked(self):
        return [each["reason"] for each in self.seen if each.get("send") == "REQUEST_SNAPSHOT"]


def test_08_f1_an_update_over_several_versions_is_not_dropped_without_a_word():
    theirs, ours = seed.Client(6, "six"), Ours(6, "six")
    theirs.handle_state_update(told(4, 8, "eight"))
    assert (theirs.state, theirs.snapshots_asked) == ("six", 0), "the defect: stuck at 6"

    ours.hears(4, 8, "eight")
    assert ours.asked == ["gap"]


def test_09_f2_a_server_that_counts_anew_does_not_freeze_its_clients():
    theirs, ours = seed.Client(100, "old"), Ours(100, "old")
    for n in range(1, 6):
        theirs.handle_state_update(told(n - 1, n, f"new {n}"))
    assert (theirs.state, theirs.snapshots_asked) == ("old", 0), "the defect: for 100 versions"

    for n in range(1, 3):
        ours.hears(f"{n - 1}.{'a' * 12}", f"{n}.{'a' * 12}", f"new {n}")
        ours.take({"heartbeat": f"{n}.{'a' * 12}"})
        ours.take({"pass_ms": 10_000})
    assert ours.asked, "signs of life say where the server is, in which history"


def test_10_f3_another_history_is_not_taken_for_ours():
    theirs, ours = seed.Client(6, ["x"]), Ours(6, ["x"])
    theirs.handle_state_update(told(5, 6, ["y"]))
    theirs.handle_state_update(told(6, 7, [*theirs.state, "z"]))  # a patch: what is there, and z
    assert theirs.state == ["x", "z"], "the defect: the server has y and z, at the same version"

    other = f"6.{'b' * 12}"
    ours.hears(5, other, ["y"])
    ours.take({"update": {"from": other, "to": f"7.{'b' * 12}", "patch": [[[1], "z"]]}})
    assert ours.guest.confirmed == ["x"]
    assert ours.asked == ["gap"]
    ours.take({"snapshot": {"version": f"7.{'b' * 12}", "state": ["y", "z"]}})
    assert ours.guest.confirmed == ["y", "z"]


# --- one after another (6.1, 7.1) ---------------------------------------------------------------


async def test_11_whoever_asks_for_what_fails_is_told_and_the_next_is_served(server):
    done = []

    async def process(request):
        if request == "break":
            raise RuntimeError(request)
        done.append(request)

    processor = seed.TableProcessor(TABLE, process)
    assert [await processor.submit(each) for each in ("break", "raise")] == [None, None]
    await processor.queue.join()
    assert done == ["raise"], "the defect: and nobody was told which of the two it was"
    processor.task.cancel()

    replies = await asyncio.gather(
        server.act(TABLE, "ann", "r1", {"actionType": "break"}),
        server.act(TABLE, "bob", "r1", RAISE),
    )
    assert [(reply.success, reply.code) for reply in replies] == [(False, "FAILED"), (True, "")]


async def test_12_two_loops_of_two_servers_are_not_one_after_another(servers):
    balance, lasts = {"pot": 0}, asyncio.Event()

    async def process(amount):
        held = balance["pot"]
        await lasts.wait()  # for the database
        balance["pot"] = held + amount

    processors = [seed.TableProcessor(TABLE, process) for _ in range(2)]
    for processor in processors:
        await processor.submit(100)
    await asyncio.sleep(0)
    lasts.set()
    await asyncio.gather(*(processor.queue.join() for processor in processors))
    assert balance["pot"] == 100, "the defect: two raises"
    for processor in processors:
        processor.task.cancel()

    users = [f"user-{n}" for n in range(10)]
    acts = [rooms.act(TABLE, user, "r1", RAISE) for rooms in servers for user in users]
    replies = await asyncio.gather(*acts)
    assert await pot(servers[0]) == 1000, "once each, though both servers were asked"
    assert {reply.version for reply in replies} == {*range(1, 11)}


async def test_13_a_lock_is_released_by_nobody_but_who_holds_it(raw, servers):
    pots, slow = Pots(), asyncio.Event()

    async def takes_six_seconds():
        await slow.wait()
        return await pots.raise_it()

    first = asyncio.create_task(seed.locked(raw, TABLE, "ann", takes_six_seconds))
    await until(lambda: raw.exists(f"action_lock:{TABLE}:ann"), "the lock")
    await raw.delete(f"action_lock:{TABLE}:ann")  # after five of them
    second = asyncio.create_task(seed.locked(raw, TABLE, "ann", pots.raise_it))
    await until(lambda: raw.exists(f"action_lock:{TABLE}:ann"), "the lock")
    slow.set()
    await asyncio.gather(first, second)
    assert pots.most_at_once == 2, "the defect"

    gone = asyncio.create_task(seed.locked(raw, TABLE, "ann", pots.raise_it))
    await until(lambda: raw.exists(f"action_lock:{TABLE}:ann"), "the lock")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)

    # There is no lock: what is decided on an old state is refused, and decided again.
    replies = await asyncio.gather(
        *(rooms.act(TABLE, "ann", f"r{n}", RAISE) for n, rooms in enumerate(servers))
    )
    assert sorted(reply.version for reply in replies) == [1, 2]
    assert await pot(servers[0]) == 200


async def test_14_of_one_users_requests_at_once_one_is_done_and_the_other_may_come_again(server):
    first = asyncio.create_task(server.act(TABLE, "ann", "r1", RAISE))
    await asyncio.sleep(0)
    with pytest.raises(ConcurrentActionError):
        await server.act(TABLE, "ann", "r2", RAISE)
    assert (await first).version == 1
    assert (await server.act(TABLE, "ann", "r2", RAISE)).version == 2


async def test_15_who_is_killed_holds_up_nobody(raw, servers):
    """For five seconds, the user of a killed server can do nothing."""
    assert await raw.set(f"action_lock:{TABLE}:ann", "1", nx=True, ex=5)  # and it is killed
    with pytest.raises(seed.ConcurrentActionError):
        await seed.locked(raw, TABLE, "ann", Pots().raise_it)

    doomed = asyncio.create_task(servers[0].act(TABLE, "ann", "r1", RAISE))
    await asyncio.sleep(0)
    doomed.cancel()
    assert (await servers[1].act(TABLE, "ann", "r1", RAISE)).success
    assert await pot(servers[1]) == 100


# --- turns (7.2) --------------------------------------------------------------------------------


async def test_16_a_timer_of_a_turn_long_ago_ends_no_other_turn(servers):
    table = seed.Table(players=2)
    late = 0  # its timer was set when it was 0's turn
    table.play()
    table.play()
    await table.handle_turn_timeout(late)
    assert table.folded == [0], "the defect: it was 0's turn again, and had just begun"

    rooms = servers[0]
    rooms.start()
    await rooms.act(TABLE, "ann", "r1", {"actionType": "play", "s": 0.3})
    await rooms.act(TABLE, "bob", "r1", {"actionType": "play", "s": 0.3})
    await rooms.act(TABLE, "ann", "r2", {"actionType": "play", "s": 600})
    await asyncio.sleep(0.6)
    standing = await rooms.standing(TABLE)
    assert (standing.version, standing.state()["folded"]) == (3, [])


async def test_17_a_turn_is_timed_out_once_by_any_number_of_servers(servers):
    tables = [seed.Table(players=3), seed.Table(players=3)]  # each server has its own
    for table in tables:
        await table.handle_turn_timeout(0)
    assert [table.folded for table in tables] == [[0], [0]], "the defect: folded twice"

    for rooms in servers:
        rooms.start()
    await servers[0].act(TABLE, "ann", "r1", {"actionType": "play", "s": 0.2})

    async def is_folded():
        return (await servers[1].standing(TABLE)).state()["folded"]

    await until(is_folded, "the turn's end")
    await asyncio.sleep(0.5)
    assert await is_folded() == ["1"]
    assert sum(rooms.status().timeouts for rooms in servers) == 1
