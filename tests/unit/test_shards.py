"""A party that shares shards, in simulated time: who owns what, and what ends whose work.

A failure of the campaign names its seed; `run_party(seed)` runs the same way again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from semel import shards as shards_module
from semel.colour import ASYNC
from semel.errors import StoreUnavailableError
from semel.shards import Hold, Shards
from semel.stores.memory import MemoryStore
from semel.stores.redis import RedisStore
from semel.stores.sql import SQLStore
from semel.stores.sqlite import SQLiteStore
from semel.testing.simulator import (
    HOST,
    FaultyLedger,
    Host,
    Network,
    Server,
    SimClock,
    SimLoop,
    Weather,
)

LEASE_S = 3.0
TURN_S = LEASE_S / shards_module.TURNS

CALM = Weather(latency_s=0.005, timeout_s=0.5)


class Ledger(FaultyLedger):
    """One that can be out of order: for a while, for some verbs, or without an answer at all."""

    down = False
    hangs: Callable[[Any], bool] = staticmethod(lambda _: False)

    async def perform(self, op: Any) -> Any:
        if self.hangs(op):
            await asyncio.get_running_loop().create_future()
        return await super().perform(op)

    async def ask(self, serve: Callable[[], Any]) -> Any:
        if self.down:
            raise StoreUnavailableError("down")
        return await super().ask(serve)


class Store:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def ledger(self, colour: Any) -> Any:
        return self._ledger


class Member:
    """A process with a part in the party, and what it was given to do."""

    def __init__(self, party: Party, name: str, **settings: Any) -> None:
        self.party = party
        self.host = Host(name)
        self.ledger = Ledger(party.server, party.network)
        self.shards = Shards(Store(self.ledger), "t", party.count, lease_s=LEASE_S, **settings)
        self.begun: list[tuple[float, int]] = []
        self.ended: list[tuple[float, int]] = []
        self.holds: dict[int, Hold] = {}
        self.running: asyncio.Task[None] | None = None

    def start(self) -> Member:
        self.running = self.party.loop.spawn(self.host, self.shards.run(self.own))
        return self

    async def own(self, hold: Hold) -> None:
        self.begun.append((self.party.loop.clock_s, hold.shard))
        self.holds[hold.shard] = hold
        try:
            await self.work(hold)
        finally:
            self.ended.append((self.party.loop.clock_s, hold.shard))
            if self.holds.get(hold.shard) is hold:
                del self.holds[hold.shard]

    async def work(self, hold: Hold) -> None:
        while hold.live:
            self.party.check(self, hold)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await hold.ending.wait()

    @property
    def owned(self) -> list[int]:
        """As the member itself sees it."""
        context = contextvars.copy_context()
        context.run(HOST.set, self.host)
        return context.run(lambda: sorted(s for s, hold in self.holds.items() if hold.live))

    @property
    def is_there(self) -> bool:
        return not self.host.dead and self.running is not None and not self.running.done()


class Party:
    def __init__(self, count: int = 4, *, seed: int = 1, weather: Weather = CALM) -> None:
        self.loop = SimLoop(seed, budget=1_000_000)
        self.server = Server(self.loop)
        self.network = Network(self.loop, weather)
        self.count = count
        self.members: list[Member] = []
        self.wrong: list[str] = []

    def join(self, **settings: Any) -> Member:
        member = Member(self, f"m{len(self.members)}", **settings)
        self.members.append(member)
        return member.start()

    def key(self, shard: int) -> Any:
        return Shards(Store(Ledger(self.server, self.network)), "t", 1)._key(f"shard {shard}")

    def is_owner(self, hold: Hold) -> bool:
        """Does the store say so, right now?"""
        row = self.server.row(hold.claim.key.id)
        return (
            row is not None
            and (row.attempt, row.fence) == (hold.claim.attempt, hold.fence)
            and row.state == "PENDING"
            and row.lease_us > self.server.now_us()
        )

    def check(self, member: Member, hold: Hold) -> None:
        if not self.is_owner(hold):
            self.wrong.append(f"{member.host} believes that shard {hold.shard} is its own")

    def shares(self) -> dict[str, list[int]]:
        return {m.host.name: m.owned for m in self.members if m.is_there}

    def settled(self) -> str | None:
        """None when every shard has one owner and the shares are even; what is wrong else."""
        shares = self.shares()
        owned = sorted(shard for share in shares.values() for shard in share)
        sizes = [len(share) for share in shares.values()]
        if owned != list(range(self.count)) or max(sizes) - min(sizes) > 1:
            return str(shares)
        return None

    def run(self, story: Coroutine[Any, Any, Any]) -> Any:
        told = self.loop.run(story)
        assert not self.wrong, self.wrong[:3]
        return told


# --- sharing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "members"), [(1, 1), (4, 1), (4, 2), (5, 3), (8, 3), (3, 3)])
def test_every_shard_has_one_owner_and_shares_are_even(count: int, members: int) -> None:
    party = Party(count)

    async def story() -> None:
        for _ in range(members):
            party.join()
        await asyncio.sleep(3 * TURN_S)
        assert party.settled() is None
        assert {member.shards.members for member in party.members} == {members}

    party.run(story())


def test_more_members_than_shards_wait_until_somebody_leaves() -> None:
    party = Party(2)

    async def story() -> None:
        for _ in range(5):
            party.join()
        await asyncio.sleep(3 * TURN_S)
        assert party.settled() is None
        working = [member for member in party.members if member.owned]
        assert len(working) == 2
        working[0].shards.stop()
        await asyncio.sleep(2 * TURN_S + 0.1)
        assert party.settled() is None
        assert sum(bool(member.owned) for member in party.members) == 2

    party.run(story())


def test_whoever_joins_gets_its_share_within_three_turns() -> None:
    party = Party(6)

    async def story() -> None:
        party.join()
        await asyncio.sleep(1.0)
        assert len(party.members[0].owned) == 6
        party.join()
        await asyncio.sleep(3 * TURN_S + 0.1)
        assert party.shares() == {"m0": [0, 2, 4], "m1": [1, 3, 5]}

    party.run(story())


def test_shards_that_stay_ours_are_not_begun_anew() -> None:
    party = Party(4)

    async def story() -> None:
        party.join()
        await asyncio.sleep(10 * LEASE_S)
        party.join()
        await asyncio.sleep(10 * LEASE_S)
        assert Counter(shard for _, shard in party.members[0].begun) == {0: 1, 1: 1, 2: 1, 3: 1}
        assert Counter(shard for _, shard in party.members[1].begun) == {1: 1, 3: 1}

    party.run(story())


def test_each_owner_has_a_larger_fence_than_the_one_before() -> None:
    party, fences = Party(1), []

    async def story() -> None:
        for _ in range(4):
            member = party.join()
            await asyncio.sleep(TURN_S)
            fences.append(member.holds[0].fence)
            member.shards.stop()
            await asyncio.sleep(TURN_S)

    party.run(story())
    assert fences == sorted(set(fences))


# --- leaving ------------------------------------------------------------------------------------


def test_who_stops_hands_over_at_once() -> None:
    party = Party(4)

    async def story() -> float:
        first, second = party.join(), party.join()
        await asyncio.sleep(5 * TURN_S)
        first.shards.stop()
        await first.running
        assert first.owned == []
        began = party.loop.clock_s
        while party.settled() is not None:
            await asyncio.sleep(0.01)
        assert second.owned == [0, 1, 2, 3]
        return party.loop.clock_s - began

    assert party.run(story()) <= TURN_S + 0.1


def test_who_stops_gives_each_shard_away_as_soon_as_it_is_put_down() -> None:
    party = Party(4)

    async def slowly(hold: Hold) -> None:
        await hold.ending.wait()
        await asyncio.sleep(0.0 if hold.shard == 0 else 1.5 * TURN_S)

    async def story() -> None:
        first = party.join()
        first.work = slowly
        await asyncio.sleep(TURN_S)
        second = party.join()
        first.shards.stop()
        await asyncio.sleep(1.2 * TURN_S)
        assert second.owned == [0]
        await asyncio.sleep(1.5 * TURN_S)
        assert second.owned == [0, 1, 2, 3]

    party.run(story())


def test_who_crashes_is_replaced_when_its_lease_is_over_and_not_before() -> None:
    party = Party(4)

    async def story() -> float:
        first, second = party.join(), party.join()
        await asyncio.sleep(5 * TURN_S)
        leases = [party.server.row(hold.claim.key.id).lease_us for hold in first.holds.values()]
        first.host.dead = True
        while second.owned != [0, 1, 2, 3]:
            assert len(second.owned) == 2 or party.server.now_us() >= min(leases)
            await asyncio.sleep(0.01)
        return (party.server.now_us() - max(leases)) / 1e6

    assert 0.0 <= party.run(story()) <= TURN_S + 0.1


@pytest.mark.parametrize("count", [1, 4])
def test_who_comes_after_a_crash_says_whose_leases_it_waits_for(count: int) -> None:
    """With one shard it has not even a seat yet."""
    party = Party(count)

    async def story() -> None:
        first = party.join()
        await asyncio.sleep(5 * TURN_S)
        assert first.shards.waits_for == ()
        first.host.dead = True
        second = party.join()
        await asyncio.sleep(TURN_S / 2)
        row = party.server.row(party.key(0).id)
        assert second.shards.waits_for == (row.attempt.partition("/")[0],)
        await asyncio.sleep(3 * LEASE_S)
        assert len(second.owned) == count
        assert second.shards.waits_for == ()

    party.run(story())


def test_a_run_that_is_cancelled_hands_over_too() -> None:
    party = Party(4)

    async def story() -> None:
        first, second = party.join(), party.join()
        await asyncio.sleep(5 * TURN_S)
        first.running.cancel()
        await asyncio.wait([first.running])
        await asyncio.sleep(TURN_S + 0.1)
        assert second.owned == [0, 1, 2, 3]

    party.run(story())


def test_a_stop_before_the_first_turn_ends_it() -> None:
    party = Party(4)

    async def story() -> None:
        member = Member(party, "m")
        member.shards.stop()
        await member.shards.run(member.own)
        assert member.begun == []

    party.run(story())


# --- work that does not do as it is told --------------------------------------------------------


async def _never(hold: Hold) -> None:
    await asyncio.get_running_loop().create_future()


def test_work_that_does_not_end_is_cut_off_with_its_lease() -> None:
    party = Party(2)

    async def story() -> None:
        first = party.join()
        first.work = _never
        await asyncio.sleep(5 * TURN_S)
        began = party.loop.clock_s
        second = party.join()
        await asyncio.sleep(LEASE_S + 2.5 * TURN_S)
        (ended_s, shard), *others = first.ended
        assert (shard, others) == (1, [])
        assert ended_s - began <= LEASE_S + TURN_S
        assert second.owned == [1]

    party.run(story())


def test_work_has_its_grace_to_be_put_down_and_its_lease_meanwhile() -> None:
    party = Party(1)

    async def story() -> None:
        first = party.join(grace_s=4 * LEASE_S)

        async def slowly(hold: Hold) -> None:
            await hold.ending.wait()
            for _ in range(30):
                await asyncio.sleep(0.1 * LEASE_S)
                party.check(first, hold)

        first.work = slowly
        await asyncio.sleep(TURN_S)
        second = party.join()
        first.shards.stop()
        began = party.loop.clock_s
        await first.running
        assert 3 * LEASE_S <= party.loop.clock_s - began <= 3.2 * LEASE_S
        assert second.begun == []
        await asyncio.sleep(TURN_S + 0.1)
        assert second.owned == [0]

    party.run(story())


def test_a_grace_is_over_some_time() -> None:
    party = Party(1)

    async def story() -> None:
        first = party.join(grace_s=2 * LEASE_S)
        first.work = _never
        await asyncio.sleep(TURN_S)
        first.shards.stop()
        began = party.loop.clock_s
        await first.running
        assert 2 * LEASE_S <= party.loop.clock_s - began <= 2.1 * LEASE_S

    party.run(story())


def test_work_that_raises_is_begun_anew_once_a_turn() -> None:
    party = Party(2)

    async def fails(hold: Hold) -> None:
        if hold.shard == 0:
            raise ValueError("no")
        await Member.work(party.members[0], hold)

    async def story() -> None:
        member = party.join()
        member.work = fails
        await asyncio.sleep(10.5 * TURN_S)
        begun = Counter(shard for _, shard in member.begun)
        assert 8 <= begun[0] <= 12
        assert begun[1] == 1

    party.run(story())


def test_work_that_raised_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    party = Party(1)

    async def fails(hold: Hold) -> None:
        raise ValueError("the reason")

    async def story() -> None:
        party.join().work = fails
        await asyncio.sleep(0.5)

    party.run(story())
    assert "work on shard 0 ended" in caplog.text
    assert "the reason" in caplog.text


def test_work_that_returns_is_begun_anew() -> None:
    party = Party(1)

    async def returns(hold: Hold) -> None:
        pass

    async def story() -> None:
        party.join().work = returns
        await asyncio.sleep(5 * TURN_S)
        assert 4 <= len(party.members[0].begun) <= 6

    party.run(story())


# --- a store that fails -------------------------------------------------------------------------


def test_an_outage_of_half_a_lease_is_not_felt() -> None:
    party = Party(4)

    async def story() -> None:
        first, second = party.join(), party.join()
        await asyncio.sleep(5 * TURN_S)
        begun = len(first.begun) + len(second.begun)
        for _ in range(5):
            first.ledger.down = second.ledger.down = True
            await asyncio.sleep(LEASE_S / 2)
            first.ledger.down = second.ledger.down = False
            await asyncio.sleep(TURN_S + 0.1)
        assert party.settled() is None
        assert len(first.begun) + len(second.begun) == begun

    party.run(story())


def test_an_outage_longer_than_a_lease_ends_all_work_at_its_deadline() -> None:
    party = Party(4)

    async def story() -> None:
        first = party.join()
        first.work = _never
        await asyncio.sleep(5 * TURN_S)
        leases = {
            shard: (party.server.row(hold.claim.key.id).lease_us - SimClock.BEGAN_US) / 1e6
            for shard, hold in first.holds.items()
        }
        first.ledger.down = True
        await asyncio.sleep(4 * LEASE_S)
        assert len(first.ended) == 4
        assert all(at <= leases[shard] for at, shard in first.ended)
        first.ledger.down = False
        await asyncio.sleep(TURN_S + 0.1)
        assert first.owned == [0, 1, 2, 3]

    party.run(story())


def test_an_outage_is_told_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    party = Party(4)

    async def story() -> None:
        member = party.join()
        await asyncio.sleep(5 * TURN_S)
        member.ledger.down = True
        await asyncio.sleep(5 * LEASE_S)
        member.ledger.down = False
        await asyncio.sleep(5 * LEASE_S)

    party.run(story())
    assert caplog.text.count("does not answer: down") == 1
    assert caplog.text.count("answers again") == 1


def test_one_renewal_without_an_answer_costs_nobody_else_anything() -> None:
    party = Party(4)

    async def story() -> None:
        member = party.join()
        await asyncio.sleep(5 * TURN_S)
        stuck = member.holds[2].claim.key.id
        member.ledger.hangs = lambda op: (
            type(op).__name__ == "Renewing" and (op.claim.key.id == stuck)
        )
        await asyncio.sleep(10 * LEASE_S)
        begun = Counter(shard for _, shard in member.begun)
        assert (begun[0], begun[1], begun[3]) == (1, 1, 1)
        assert begun[2] > 1

    party.run(story())


def test_claims_without_an_answer_cost_what_is_ours_nothing() -> None:
    """A turn that takes its whole time must not delay the next renewals."""
    party = Party(4)

    async def story() -> None:
        first, second = party.join(), party.join()
        await asyncio.sleep(5 * TURN_S)
        first.ledger.hangs = lambda op: type(op).__name__ == "Claiming"
        second.shards.stop()
        ended = len(first.ended)
        await asyncio.sleep(10 * LEASE_S)
        assert first.owned == [0, 2]
        assert len(first.ended) == ended
        first.ledger.hangs = lambda _: False
        await asyncio.sleep(LEASE_S + TURN_S + 0.1)
        assert first.owned == [0, 1, 2, 3]

    party.run(story())


def test_a_claim_that_was_won_without_our_hearing_of_it_is_given_back() -> None:
    party = Party(4)
    spoiled: list[Any] = []

    async def story() -> None:
        member = Member(party, "m0")
        serve = party.server.serve

        def lose_the_answer(op: Any) -> Any:
            answer = serve(op)
            if type(op).__name__ == "Claiming" and op.key == party.key(1) and len(spoiled) < 2:
                spoiled.append(answer)
                raise StoreUnavailableError("the answer got lost")
            return answer

        async def perform(op: Any) -> Any:
            return lose_the_answer(op)

        member.ledger.perform = perform
        party.members.append(member)
        member.start()
        await asyncio.sleep(3 * TURN_S)
        assert member.owned == [0, 1, 2, 3]

    party.run(story())
    assert [type(answer).__name__ for answer in spoiled] == ["Won", "Won"]


def test_a_claim_that_is_cut_off_in_the_middle_is_given_back() -> None:
    """Won on the server, while the turn's time was over: not nobody's for a whole lease."""
    party = Party(2)

    async def story() -> None:
        first = party.join()
        perform, slow = first.ledger.perform, []

        async def late(op: Any) -> Any:
            answer = await perform(op)
            if type(op).__name__ == "Claiming" and op.key == party.key(1) and not slow:
                slow.append(answer)
                await asyncio.get_running_loop().create_future()
            return answer

        first.ledger.perform = late
        await asyncio.sleep(LEASE_S + TURN_S + 0.2)
        assert [type(answer).__name__ for answer in slow] == ["Won"]
        assert first.owned == [0, 1]

    party.run(story())


def test_one_claim_that_fails_does_not_lose_the_others() -> None:
    party = Party(3)

    async def story() -> None:
        first = party.join()
        perform = first.ledger.perform

        async def failing(op: Any) -> Any:
            if type(op).__name__ == "Claiming" and op.key == party.key(0):
                raise StoreUnavailableError("not this one")
            return await perform(op)

        first.ledger.perform = failing
        await asyncio.sleep(0.5)
        assert first.owned == [1, 2]
        await asyncio.sleep(5 * LEASE_S)
        assert Counter(shard for _, shard in first.begun) == {1: 1, 2: 1}

    party.run(story())


def test_a_stop_in_an_outage_ends_all_the_same() -> None:
    party = Party(4)

    async def story() -> None:
        member = party.join()
        await asyncio.sleep(5 * TURN_S)
        member.ledger.hangs = lambda _: True
        await asyncio.sleep(0.1)
        member.shards.stop()
        began = party.loop.clock_s
        await member.running
        assert party.loop.clock_s - began <= 3 * LEASE_S

    party.run(story())


# --- a process that stands still ----------------------------------------------------------------


def test_who_was_frozen_knows_that_it_lost_everything() -> None:
    party = Party(2)

    async def story() -> None:
        first, second = party.join(), party.join()
        await asyncio.sleep(5 * TURN_S)
        (hold,) = first.holds.values()
        first.host.paused_until = party.loop.clock_s + 3 * LEASE_S
        await asyncio.sleep(LEASE_S + TURN_S + 0.2)
        assert second.owned == [0, 1]
        await asyncio.sleep(2 * LEASE_S)
        assert hold.ending.is_set()
        await asyncio.sleep(3 * TURN_S)
        assert party.settled() is None

    party.run(story())


def test_who_stood_still_and_was_not_replaced_asks_before_it_drops_its_work() -> None:
    """A loop that a handler blocks for longer than a lease: cut off, it would never get done."""
    party = Party(1)

    async def story() -> None:
        member = party.join()
        member.work = _never
        await asyncio.sleep(5 * TURN_S)
        (hold,) = member.holds.values()
        member.host.paused_until = party.loop.clock_s + 1.5 * LEASE_S
        await asyncio.sleep(1.5 * LEASE_S + TURN_S)
        assert member.ended == []
        assert member.holds == {0: hold}
        assert member.owned == [0]
        await asyncio.sleep(3 * LEASE_S)  # and it is renewed as before
        assert member.owned == [0]

    party.run(story())


def test_who_stood_still_and_hears_nothing_drops_its_work() -> None:
    party = Party(1)

    async def story() -> None:
        member = party.join()
        member.work = _never
        await asyncio.sleep(5 * TURN_S)
        member.ledger.down = True
        member.host.paused_until = party.loop.clock_s + 1.5 * LEASE_S
        await asyncio.sleep(1.5 * LEASE_S + TURN_S)
        assert len(member.ended) == 1

    party.run(story())


def test_a_lease_that_somebody_took_ends_the_work_at_once() -> None:
    party = Party(1)

    async def story() -> None:
        member = party.join()
        member.work = _never
        await asyncio.sleep(TURN_S)
        (hold,) = member.holds.values()
        assert await party.server.forget(hold.claim.key.id, force=True)
        await asyncio.sleep(TURN_S + 0.1)
        assert hold.ending.is_set()
        assert len(member.ended) == 1
        await asyncio.sleep(TURN_S)
        assert member.owned == [0]
        assert member.holds[0].fence > hold.fence

    party.run(story())


def test_whether_it_still_turns_is_told() -> None:
    party = Party(1)

    async def story() -> None:
        member = party.join()
        await asyncio.sleep(5 * TURN_S)
        assert member.shards.turning
        member.ledger.hangs = lambda _: True
        await asyncio.sleep(100.0)
        assert member.shards.turning
        member.host.dead = True
        await asyncio.sleep(100.0)
        assert not member.shards.turning

    party.run(story())


# --- everything at once -------------------------------------------------------------------------


class Chances:
    """One story by seed: who comes and goes, and what fails meanwhile; then quiet."""

    def __init__(self, seed: int) -> None:
        self.is_over = False
        self.party = Party(seed=seed)
        self.chance = self.party.loop.chance
        self.party.count = self.chance.randint(1, 6)
        self.party.network.weather = Weather(
            request_lost=0.05 * self.chance.random(),
            reply_lost=0.05 * self.chance.random(),
            doubled=0.05 * self.chance.random(),
            late=0.05 * self.chance.random(),
            latency_s=0.1 * self.chance.random(),
            timeout_s=0.3,
            latest_s=LEASE_S,
        )

    async def story(self) -> str | None:
        happens = [self.join, self.stop, self.crash, self.freeze, self.cut, self.down]
        for _ in range(self.chance.randint(1, 4)):
            self.join()
        for _ in range(self.chance.randint(3, 12)):
            await asyncio.sleep(self.chance.random() * 2 * LEASE_S)
            self.chance.choice(happens)()
        await asyncio.sleep(3 * LEASE_S)
        self.join()
        self.is_over = True
        self.party.network.weather = CALM
        for member in self.party.members:
            member.ledger.down = False
        # The last late request has to arrive, and what it may have claimed to run out.
        await asyncio.sleep(3 * LEASE_S + 3 * TURN_S)
        return self.party.settled()

    def join(self) -> None:
        member = self.party.join(grace_s=self.chance.choice([0.0, 0.0, 2 * LEASE_S]))
        member.host.offset = 1000 * self.chance.random()
        if self.chance.random() < 0.3:
            member.work = self.odd(member)

    def odd(self, member: Member) -> Any:
        async def work(hold: Hold) -> None:
            began = ASYNC.now()
            while self.chance.random() < 0.95 and not self.is_over:
                if hold.live:
                    self.party.check(member, hold)
                elif ASYNC.now() - began > 10 * LEASE_S:
                    self.party.wrong.append("work went on for long after it was to end")
                await asyncio.sleep(0.3)
            if self.chance.random() < 0.5:
                raise ValueError("at random")
            while self.is_over and hold.live:
                await Member.work(member, hold)

        return work

    def somebody(self) -> Member | None:
        there = [member for member in self.party.members if member.is_there]
        return self.chance.choice(there) if there else None

    def stop(self) -> None:
        if member := self.somebody():
            member.shards.stop()

    def crash(self) -> None:
        if member := self.somebody():
            member.host.dead = True

    def freeze(self) -> None:
        if member := self.somebody():
            member.host.paused_until = self.party.loop.clock_s + self.chance.random() * 2 * LEASE_S

    def cut(self) -> None:
        if member := self.somebody():
            until_s = self.party.loop.clock_s + self.chance.random() * 2 * LEASE_S
            member.host.cut_off_until = until_s

    def down(self) -> None:
        if member := self.somebody():
            member.ledger.down = not member.ledger.down


def run_party(seed: int) -> None:
    chances = Chances(seed)
    assert chances.party.run(chances.story()) is None


SEEDS = int(os.environ.get("SEMEL_SHARDS_SEEDS", "60"))


def test_at_most_one_owner_ever_and_one_for_each_shard_in_the_end() -> None:
    logging.getLogger("semel").setLevel(logging.CRITICAL)
    try:
        for seed in range(SEEDS):
            try:
                run_party(seed)
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
    finally:
        logging.getLogger("semel").setLevel(logging.NOTSET)


# --- on real stores -----------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    match request.param:
        case "memory":
            return MemoryStore()
        case "sqlite":
            return SQLiteStore(tmp_path / "ledger.db")
        case "postgres":
            return SQLStore(request.getfixturevalue("postgres_url"), create=True)
        case _:
            return RedisStore(request.getfixturevalue("redis_url"))


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_two_share_and_hand_over_on_a_real_store(store: Any) -> None:
    async def own(hold: Hold) -> None:
        await hold.ending.wait()

    one, other = (Shards(store, "t", 4, lease_s=1.5) for _ in range(2))
    running = [asyncio.create_task(shards.run(own)) for shards in (one, other)]
    await _until(lambda: sorted(one.owned + other.owned) == [0, 1, 2, 3])
    await _until(lambda: len(one.owned) == len(other.owned) == 2)
    one.stop()
    await running[0]
    await _until(lambda: other.owned == [0, 1, 2, 3])
    other.stop()
    await running[1]
    assert other.owned == []
    await store.aclose()
