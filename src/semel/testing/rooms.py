"""What any log must give rooms, as tests. Prove your own store by subclassing `RoomsContract`:

    class TestMyRooms(RoomsContract):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)
            yield store
            await store.aclose()

Rooms ask a log for all they promise: that an action is taken once, whoever sends it again and
through whichever process; that nobody decides on what is not so any more; and that everybody who
follows is told the same. Where several stores can share one place, say so by `another`. Needs
pytest-asyncio, in either mode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.entries import Keep, Position, beginning
from semel.errors import ConcurrentActionError, IdempotencyConflictError
from semel.feed import Reset
from semel.rooms import ALL, Accepted, Context, Deadline, Decision, Refused, Reply, Room, Rooms
from semel.rooms.news import told
from semel.rooms.patches import patched
from semel.testing.driven import opened

__all__ = ["Purse", "RoomsContract"]

ROOM = "table 1"

# For whatever must come: long, because only a failure waits for it.
WITHIN_S = 20.0

ODD: dict[str, Any] = {
    "text": 'é\u2713\U0001f600 "\\ \x00\x7f',
    "": [None, True, 1.5, -1, 10**25],
    "deep": [[{}]],
}


class Purse(Room):
    """A purse into which everybody puts coins, and a secret for each."""

    def __init__(self, turn_s: float | None = None) -> None:
        self.turn_s = turn_s
        self.fails = False

    def begin(self, room_id: str) -> Any:
        return {"coins": 0, "secrets": {}, "turns": 0, "ends_s": None, "over": []}

    def apply(self, state: Any, action: Mapping[str, Any], ctx: Context) -> Decision:
        if self.fails:
            raise ZeroDivisionError
        match action:
            case {"actionType": "put", "coins": int(coins)}:
                state["coins"] += coins
                return Accepted(state, action.get("note"), [(ALL, {"put": coins})])
            case {"actionType": "tell", "secret": str(secret)}:
                state["secrets"][ctx.user] = secret
                return Accepted(state, None, [([str(ctx.user)], {"told": secret})])
            case {"actionType": "wait"}:
                state |= {"turns": state["turns"] + 1, "ends_s": ctx.now_s + (self.turn_s or 0)}
                return Accepted(state)
            case _:
                return Refused("INVALID", "put coins, tell a secret, or wait")

    def timeout(self, state: Any, turn: str, ctx: Context) -> Decision:
        return Accepted({**state, "ends_s": None, "over": [*state["over"], turn]})

    def view(self, state: Any, viewer: str | None) -> Any:
        return {"coins": state["coins"], "mine": state["secrets"].get(viewer)}

    def members(self, state: Any) -> Any:
        return state["secrets"]

    def deadline(self, state: Any) -> Deadline | None:
        ends_s = state["ends_s"]
        return None if ends_s is None else Deadline(f"turn {state['turns']}", ends_s)


async def put(rooms: Rooms, user: str, id: str, coins: int = 1, **more: Any) -> Reply:
    how = {name: more.pop(name) for name in _HOW if name in more}
    action = {"actionType": "put", "coins": coins, **more}
    return await rooms.act(ROOM, user, id, action, **how)


_HOW = ("expected_version", "client_id", "client_seq")


class RoomsContract:
    """What rooms promise, on a store of yours."""

    async def another(self, store: Any) -> Any:
        """Return a second store on the same place; by default, the store itself."""
        return store

    @asynccontextmanager
    async def both(
        self, store: Any, room: Room | None = None
    ) -> AsyncIterator[tuple[Rooms, Rooms]]:
        """The same rooms in two processes."""
        room = room or Purse()
        async with opened(self, store) as other:
            pair = Rooms(store, room), Rooms(other, room)
            try:
                yield pair
            finally:
                for rooms in pair:
                    await rooms.aclose()

    @pytest.fixture
    async def rooms(self, store: Any) -> AsyncIterator[Rooms]:
        rooms = Rooms(store, Purse())
        yield rooms
        await rooms.aclose()

    # --- once -----------------------------------------------------------------------------------

    async def test_a_request_is_done_once_and_answered_the_same_to_the_byte(
        self, store: Any
    ) -> None:
        async with self.both(store) as (here, there):
            first = await put(here, "ann", "a-1", 5, note=ODD)
            await put(there, "bob", "b-1", 7)
            for rooms in (here, there, here):
                again = await put(rooms, "ann", "a-1", 5, note=ODD)
                assert (again.version, again.cached, again.success) == (1, True, True)
                assert repr(again.reply) == repr(first.reply) == repr(ODD)
            standing = await there.standing(ROOM)
            assert (standing.version, standing.state()["coins"]) == (2, 12)

    async def test_a_refusal_is_kept_and_changes_nothing(self, store: Any) -> None:
        async with self.both(store) as (here, there):
            refused = await here.act(ROOM, "ann", "a-1", {"actionType": "dance"})
            await put(here, "bob", "b-1")
            again = await there.act(ROOM, "ann", "a-1", {"actionType": "dance"})
            assert (refused.code, refused.version, refused.cached) == ("INVALID", 0, False)
            assert (again.code, again.version, again.cached) == ("INVALID", 0, True)
            assert again.message == refused.message
            assert len((await here.log.read(here.stream_of(ROOM))).entries) == 1

    async def test_an_id_that_was_used_for_something_else_is_refused(self, store: Any) -> None:
        async with self.both(store) as (here, there):
            await put(here, "ann", "a-1", 5)
            for rooms in (here, there):
                with pytest.raises(IdempotencyConflictError):
                    await put(rooms, "ann", "a-1", 6)
                assert (await put(rooms, "ann", "a-1", 5)).cached
            assert (await put(there, "bob", "a-1", 6)).version == 2

    async def test_of_the_same_request_at_once_one_is_done(self, store: Any) -> None:
        async with self.both(store) as pair:
            asked = [put(pair[number % 2], "ann", "a-1", 3) for number in range(8)]
            replies = await asyncio.gather(*asked)
            assert [reply.cached for reply in replies].count(False) == 1
            assert {reply.version for reply in replies} == {1}
            assert (await pair[0].standing(ROOM)).state()["coins"] == 3

    async def test_another_one_of_the_same_user_waits_for_the_first(self, rooms: Rooms) -> None:
        first = asyncio.ensure_future(put(rooms, "ann", "a-1"))
        await asyncio.sleep(0)
        with pytest.raises(ConcurrentActionError):
            await put(rooms, "ann", "a-2")
        assert (await first).version == 1
        assert (await put(rooms, "ann", "a-2")).version == 2

    async def test_numbers_of_a_client_only_grow(self, store: Any) -> None:
        async with self.both(store) as (here, there):
            one: dict[str, Any] = {"client_id": "tab", "client_seq": 1}
            assert (await put(here, "ann", "a-1", **one)).success
            assert (await put(there, "ann", "a-1", **one)).cached
            assert (await put(there, "ann", "a-9", client_id="tab", client_seq=9)).version == 2
            for number in (1, 8, 9):
                late = await put(here, "ann", "late", client_id="tab", client_seq=number)
                assert late.code == "SUPERSEDED"
                assert late.version <= 2
            assert (await put(here, "ann", "a-1", **one)).cached
            assert (await put(here, "ann", "b-1", client_id="phone", client_seq=1)).version == 3
            assert (await put(there, "bob", "a-1", **one)).version == 4

    # --- versions -------------------------------------------------------------------------------

    async def test_an_expected_version_is_the_rooms_or_it_is_refused(self, store: Any) -> None:
        async with self.both(store) as (here, there):
            assert (await put(here, "ann", "a-1", expected_version=0)).version == 1
            assert (await put(there, "bob", "b-1", expected_version=1)).version == 2
            for id, expected in (("a-2", 1), ("a-3", 3), ("a-4", 2**53 - 1)):
                stale = await put(here, "ann", id, expected_version=expected)
                assert (stale.code, stale.version) == ("STATE_STALE_VERSION", 2)

    async def test_two_processes_both_get_on_and_lose_nothing(self, store: Any) -> None:
        users, each = 6, 5
        async with self.both(store) as pair:

            async def play(number: int) -> list[int]:
                rooms = pair[number % 2]
                replies = [await put(rooms, f"u{number}", f"{n}", number) for n in range(each)]
                return [reply.version for reply in replies]

            versions = await asyncio.gather(*(play(number) for number in range(users)))
            assert all(mine == sorted(mine) for mine in versions)
            assert sorted(v for mine in versions for v in mine) == list(range(1, users * each + 1))
            page = await pair[0].log.read(pair[0].stream_of(ROOM))
            offsets = [entry.position.offset for entry in page.entries]
            assert offsets == list(range(1, users * each + 1))
            coins = (await pair[1].standing(ROOM)).state()["coins"]
            assert coins == each * sum(range(users))

    async def test_many_on_their_way_in_one_room_all_arrive(self, rooms: Rooms) -> None:
        replies = await asyncio.gather(*(put(rooms, f"u{n}", "1", n) for n in range(20)))
        assert sorted(reply.version for reply in replies) == list(range(1, 21))
        assert (await rooms.standing(ROOM)).state()["coins"] == sum(range(20))

    async def test_rules_that_fail_change_nothing_and_take_no_answer_back(
        self, rooms: Rooms
    ) -> None:
        await put(rooms, "ann", "a-1", 5, client_id="tab", client_seq=1)
        assert isinstance(rooms.room, Purse)
        rooms.room.fails = True
        failed = await put(rooms, "ann", "a-2")
        assert (failed.code, failed.version) == ("FAILED", 1)
        assert (await put(rooms, "ann", "a-1", 5, client_id="tab", client_seq=1)).cached
        with pytest.raises(IdempotencyConflictError):
            await put(rooms, "ann", "a-1", 6)
        late = await put(rooms, "ann", "a-0", client_id="tab", client_seq=1)
        assert late.code == "SUPERSEDED"
        other = Rooms(rooms.store, rooms.room)
        assert (await other.act("empty", "ann", "1", {"actionType": "put"})).version == 0
        await other.aclose()
        rooms.room.fails = False
        assert (await put(rooms, "ann", "a-2")).version == 2

    # --- those who follow -----------------------------------------------------------------------

    async def test_everybody_is_told_the_same_without_a_hole_and_only_their_own(
        self, store: Any
    ) -> None:
        async with self.both(store) as (here, there):
            following = asyncio.ensure_future(_followed(there, 5))
            for user in ("ann", "bob"):
                await here.act(ROOM, user, "1", {"actionType": "tell", "secret": f"of {user}"})
            for n in range(3):
                await put(here, "ann", f"a-{n}", n)
            entries = await asyncio.wait_for(following, WITHIN_S)
            standing = await here.standing(ROOM)
            for viewer in ("ann", "bob", None):
                view: Any = Purse().view(Purse().begin(ROOM), None)
                at = beginning(there.stream_of(ROOM))
                for entry in entries:
                    news = told(entry)
                    assert news.after == at
                    view, at = patched(view, news.patch(viewer)), news.position
                assert view == standing.view(viewer)
                assert at == standing.position
                heard = [event for entry in entries for event in told(entry).events(viewer)]
                secrets = [] if viewer is None else [{"told": f"of {viewer}"}]
                assert [event for event in heard if "told" in event] == secrets

    async def test_who_has_missed_more_than_is_kept_is_told_how_things_stand(
        self, store: Any
    ) -> None:
        rooms = Rooms(store, Purse(), replay=5)
        for number in range(30):
            await put(rooms, "ann", f"a-{number}")
        position = Position(2, "000000000000")
        following = rooms.follow(ROOM, position)
        news = await asyncio.wait_for(following.next(), WITHIN_S)
        assert isinstance(news, Reset)
        assert news.snapshot.position == (await rooms.standing(ROOM)).position
        following.close()
        await rooms.aclose()

    # --- turns ----------------------------------------------------------------------------------

    async def test_a_turn_is_timed_out_once_by_one_of_two_processes(self, store: Any) -> None:
        async with self.both(store, Purse(turn_s=0.2)) as pair:
            for rooms in pair:
                rooms.start()
            await pair[0].act(ROOM, "ann", "1", {"actionType": "wait"})
            async with asyncio.timeout(WITHIN_S):
                while not (await pair[1].standing(ROOM)).state()["over"]:  # noqa: ASYNC110 - nothing tells
                    await asyncio.sleep(0.01)
            await put(pair[1], "bob", "b-1")
            standing = await pair[0].standing(ROOM)
            assert standing.state()["over"] == ["turn 1"]
            assert standing.version == 3
            assert sum(rooms.status().timeouts for rooms in pair) == 1

    async def test_the_stores_clock_is_the_same_for_all(self, store: Any) -> None:
        async with opened(self, store) as other:
            slow = Rooms(store, Purse(1.0), wall=lambda: 0.0)
            fast = Rooms(other, Purse(1.0), wall=lambda: 4e9)
            await asyncio.gather(slow.clock.learn(), fast.clock.learn())
            assert abs(slow.now_s() - fast.now_s()) < 1
            assert slow.now_s() > 1_500_000_000
            await asyncio.gather(slow.aclose(), fast.aclose())

    async def test_closing_one_of_three_rooms_objects_leaves_the_others_following(
        self, store: Any, rooms: Rooms
    ) -> None:
        async with self.both(store) as (_, stays):
            following = asyncio.create_task(_followed(stays, 3))
            async with self.both(store) as (_, goes):
                await put(goes, "ann", "a-1")
            await put(rooms, "bob", "b-1")
            again = await put(stays, "ann", "a-1")
            assert (again.version, again.cached) == (1, True)
            await put(stays, "cid", "c-1")
            async with asyncio.timeout(WITHIN_S):
                entries = await following
        assert [entry.position.offset for entry in entries] == [1, 2, 3]

    async def test_notes_that_were_looked_at_are_trimmed(self, store: Any) -> None:
        log = Rooms(store, Purse()).log
        last = None
        for number in range(5):
            answer = await log.append("notes", b"x", id=f"{number}", keep=Keep(ids_s=0.0))
            last = getattr(answer, "position", None)
        assert isinstance(last, Position)
        await log.trim("notes", last)
        page = await log.read("notes", last)
        assert (list(page.entries), page.lost, page.head) == ([], False, last)


async def _followed(rooms: Rooms, number: int) -> list[Any]:
    following = rooms.follow(ROOM, None)
    entries: list[Any] = []
    try:
        while len(entries) < number:
            news = await following.next()
            assert not isinstance(news, Reset)
            entries += getattr(news, "entries", ())
    finally:
        following.close()
    return entries
