"""What a ledger must do, as tests. Prove your own store by subclassing `LedgerContract`:

    class TestMyLedger(LedgerContract):
        @pytest.fixture
        async def store(self):
            store = MyStore(...)
            yield store
            await store.aclose()

        async def age(self, store, seconds):
            ...make every record `seconds` older...

The tests are `async def` and run in both colours; over the sync colour every verb is driven to
its end on this thread, which also proves that it never suspends. Time is not slept: `age` makes
the stored records older (or moves the store's injected clock). Needs pytest-asyncio, in either
mode, and hypothesis.

A process often has several stores on one place: one by `configure`, one of the HTTP middleware.
If your store allows that, give another one; the contract closes it:

        async def another(self, store):
            return MyStore(...)  # the same place, as a second component of the process opens it

Without `another`, these tests use the one store several times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from semel.colour import ASYNC, SYNC, Colour, run
from semel.keys import make_key, new_attempt
from semel.ports import Store
from semel.testing.driven import Driven, InBothColours, at_once, opened, play_histories
from semel.testing.history import (
    FP,
    HOLD,
    LEASE_S,
    OTHER_FP,
    RECOVER,
    TERMS,
    TTL_S,
    Model,
    Move,
    make,
    moves,
)
from semel.values import (
    Busy,
    Done,
    Kept,
    Key,
    Lost,
    Mismatch,
    Orphan,
    Outcome,
    State,
    Terms,
    Won,
)

VALUE = Outcome("value", b'{"paid":true}')
OTHER = Outcome("value", b'"other"')


def ledger_of(store: Store, colour: Colour) -> Any:
    ledger = store.ledger(colour)
    return Driven(ledger) if colour.name == "sync" else ledger


class LedgerContract(InBothColours):
    """Every promise of the `Ledger` and `Inspect` ports, one test each."""

    examples: ClassVar[int] = 40

    async def age(self, store: Any, seconds: float) -> None:
        """Make every record of the store this much older."""
        raise NotImplementedError

    async def another(self, store: Any) -> Any:
        """Return a second store on the same place; by default, the store itself."""
        return store

    @asynccontextmanager
    async def three_ledgers(self, store: Any, colour: Colour) -> AsyncIterator[Sequence[Any]]:
        """Yield the ledgers of three stores, the last one in the other colour if there is one."""
        opposite = ASYNC if colour is SYNC else SYNC
        last = opposite if opposite.name in self.colours else colour
        async with opened(self, store) as second, opened(self, store) as third:
            yield [ledger_of(store, colour), ledger_of(second, colour), ledger_of(third, last)]

    @pytest.fixture
    def ledger(self, store: Store, colour: Colour) -> Any:
        return ledger_of(store, colour)

    @staticmethod
    def key(text: str = "order-1", *, tenant: str = "", operation: str = "pay") -> Key:
        return make_key(text, tenant=tenant, operation=operation)

    @staticmethod
    async def win(ledger: Any, key: Key, terms: Terms = TERMS, fp: bytes = FP) -> Won:
        answer = await ledger.claim(key, attempt=new_attempt(), fingerprint=fp, terms=terms)
        assert isinstance(answer, Won), answer
        return answer

    @staticmethod
    async def ask(ledger: Any, key: Key, terms: Terms = TERMS, fp: bytes = FP) -> Any:
        return await ledger.claim(key, attempt=new_attempt(), fingerprint=fp, terms=terms)

    # --- claim --------------------------------------------------------------------------------

    async def test_first_claim_wins(self, ledger: Any) -> None:
        attempt = new_attempt()
        won = await ledger.claim(self.key(), attempt=attempt, fingerprint=FP, terms=TERMS)
        assert isinstance(won, Won)
        assert won.claim.attempt == attempt
        assert won.claim.key == self.key()
        assert won.claim.fingerprint == FP
        assert won.claim.number == 1
        assert won.claim.fence > 1_500_000_000_000_000
        assert dict(won.steps) == {}
        assert won.orphan is None

    async def test_second_claim_is_busy(self, ledger: Any) -> None:
        await self.win(ledger, self.key())
        answer = await self.ask(ledger, self.key())
        assert isinstance(answer, Busy)
        assert LEASE_S - 20 < answer.left_s <= LEASE_S

    async def test_same_attempt_gets_its_own_claim_again(self, ledger: Any) -> None:
        attempt = new_attempt()
        first = await ledger.claim(self.key(), attempt=attempt, fingerprint=FP, terms=TERMS)
        again = await ledger.claim(self.key(), attempt=attempt, fingerprint=FP, terms=TERMS)
        assert isinstance(again, Won)
        assert again.claim == first.claim

    async def test_a_repeated_takeover_is_told_of_the_orphan_again(
        self, store: Any, ledger: Any
    ) -> None:
        await self.win(ledger, self.key(), RECOVER)
        await self.age(store, LEASE_S + 1)
        attempt = new_attempt()
        first = await ledger.claim(self.key(), attempt=attempt, fingerprint=FP, terms=RECOVER)
        again = await ledger.claim(self.key(), attempt=attempt, fingerprint=FP, terms=RECOVER)
        assert first.orphan is not None
        assert again == first
        await ledger.release(first.claim, error="boom")
        assert (await self.win(ledger, self.key(), RECOVER)).orphan is None

    @pytest.mark.parametrize(
        "outcome",
        [
            Outcome("value", b""),
            Outcome("value", b"0"),
            Outcome("value", b"null"),
            Outcome("value", bytes(range(256))),
            Outcome("value", b"x" * 1_000_000),
            Outcome("value", b"[1]", 201),
            Outcome("error", b'{"type":"builtins.ValueError"}'),
            Outcome("lost", b"why"),
        ],
        ids=["empty", "zero", "null", "not-utf8", "1MB", "status", "error", "lost"],
    )
    async def test_outcome_replays_to_the_byte(self, ledger: Any, outcome: Outcome) -> None:
        won = await self.win(ledger, self.key())
        assert await ledger.complete(won.claim, outcome) == Kept()
        answer = await self.ask(ledger, self.key())
        assert answer == Done(outcome, won.claim.fence)

    async def test_other_fingerprint_is_refused_running_done_and_failed(self, ledger: Any) -> None:
        won = await self.win(ledger, self.key())
        assert await self.ask(ledger, self.key(), fp=OTHER_FP) == Mismatch("fingerprint")
        await ledger.release(won.claim, error="boom")
        assert await self.ask(ledger, self.key(), fp=OTHER_FP) == Mismatch("fingerprint")
        won = await self.win(ledger, self.key())
        await ledger.complete(won.claim, VALUE)
        assert await self.ask(ledger, self.key(), fp=OTHER_FP) == Mismatch("fingerprint")
        assert await self.ask(ledger, self.key()) == Done(VALUE, won.claim.fence)

    async def test_other_operation_is_refused_running_and_done(self, ledger: Any) -> None:
        won = await self.win(ledger, self.key())
        refund = self.key(operation="refund")
        assert await self.ask(ledger, refund) == Mismatch("operation")
        await ledger.complete(won.claim, VALUE)
        assert await self.ask(ledger, refund) == Mismatch("operation")

    async def test_expired_lease_is_taken_over_with_a_larger_fence(
        self, store: Any, ledger: Any
    ) -> None:
        first = await self.win(ledger, self.key())
        await self.age(store, LEASE_S + 1)
        second = await self.win(ledger, self.key())
        assert second.claim.fence > first.claim.fence
        assert second.claim.number == 2
        assert second.orphan is not None
        assert second.orphan.fence == first.claim.fence

    async def test_without_takeover_an_orphan_is_reported_and_unchanged(
        self, store: Any, ledger: Any
    ) -> None:
        first = await self.win(ledger, self.key(), HOLD)
        await self.age(store, LEASE_S + 1)
        for _ in range(2):
            answer = await self.ask(ledger, self.key(), HOLD)
            assert isinstance(answer, Orphan)
            assert answer.fence == first.claim.fence
        assert await ledger.complete(first.claim, VALUE) == Kept()

    async def test_a_held_record_is_not_taken_by_a_claim_that_does_not_hold(
        self, store: Any, ledger: Any
    ) -> None:
        await self.win(ledger, self.key(), HOLD)
        await self.age(store, LEASE_S + 1)
        assert isinstance(await self.ask(ledger, self.key(), TERMS), Orphan)
        won = await self.win(ledger, self.key(), RECOVER)
        assert won.orphan is not None

    async def test_a_running_record_outlives_its_lease_by_the_ttl(
        self, store: Any, ledger: Any
    ) -> None:
        first = await self.win(ledger, self.key())
        await self.age(store, LEASE_S + TTL_S - 5)
        second = await self.win(ledger, self.key())
        assert second.claim.number == 2
        await self.age(store, LEASE_S + TTL_S + 5)
        third = await self.win(ledger, self.key())
        assert third.claim.number == 1
        assert third.claim.fence > second.claim.fence > first.claim.fence

    async def test_a_held_record_never_expires(self, store: Any, ledger: Any) -> None:
        await self.win(ledger, self.key(), HOLD)
        await self.age(store, 100 * TTL_S)
        await ledger.sweep()
        assert isinstance(await self.ask(ledger, self.key(), HOLD), Orphan)

    async def test_a_finished_record_expires(self, store: Any, ledger: Any) -> None:
        won = await self.win(ledger, self.key())
        await ledger.note(won.claim, "a", b"1")
        await ledger.complete(won.claim, VALUE)
        await self.age(store, TTL_S - 5)
        assert isinstance(await self.ask(ledger, self.key()), Done)
        await self.age(store, 10)
        again = await self.win(ledger, self.key(), fp=OTHER_FP)
        assert again.claim.fence > won.claim.fence
        assert again.claim.number == 1
        assert dict(again.steps) == {}

    async def test_ttl_none_never_expires(self, store: Any, ledger: Any) -> None:
        won = await self.win(ledger, self.key(), replace(TERMS, ttl_s=None))
        await ledger.complete(won.claim, VALUE)
        await self.age(store, 10_000 * TTL_S)
        await ledger.sweep()
        assert isinstance(await self.ask(ledger, self.key()), Done)

    async def test_a_doubled_claim_after_release_claims_for_nobody(self, ledger: Any) -> None:
        won = await self.win(ledger, self.key())
        await ledger.release(won.claim)
        late = await ledger.claim(
            self.key(), attempt=won.claim.attempt, fingerprint=FP, terms=TERMS
        )
        assert late == Busy(0.0)
        assert isinstance(await self.ask(ledger, self.key()), Won)

    # --- complete, release, renew, note -------------------------------------------------------

    async def test_release_frees_at_once(self, ledger: Any) -> None:
        first = await self.win(ledger, self.key())
        assert await ledger.release(first.claim, error="card declined") == Kept()
        second = await self.win(ledger, self.key())
        assert second.claim.fence > first.claim.fence
        assert second.claim.number == 2
        assert second.orphan is None

    async def test_release_by_attempt_without_a_fence(self, ledger: Any) -> None:
        first = await self.win(ledger, self.key())
        assert await ledger.release(replace(first.claim, fence=0)) == Kept()
        assert isinstance(await self.ask(ledger, self.key()), Won)

    async def test_release_twice_is_kept_and_does_not_touch_the_next_holder(
        self, ledger: Any
    ) -> None:
        first = await self.win(ledger, self.key())
        assert await ledger.release(first.claim) == Kept()
        assert await ledger.release(first.claim) == Kept()
        second = await self.win(ledger, self.key())
        assert await ledger.release(first.claim) == Lost()
        assert await ledger.complete(second.claim, VALUE) == Kept()

    async def test_a_stale_claim_changes_nothing(self, store: Any, ledger: Any) -> None:
        stale = (await self.win(ledger, self.key())).claim
        await self.age(store, LEASE_S + 1)
        fresh = (await self.win(ledger, self.key())).claim
        assert await ledger.complete(stale, OTHER) == Lost()
        assert await ledger.renew(stale) == Lost()
        assert await ledger.note(stale, "step", b"x") == Lost()
        assert await ledger.release(stale) == Lost()
        assert isinstance(await self.ask(ledger, self.key()), Busy)
        assert await ledger.complete(fresh, VALUE) == Kept()
        for verdict in (
            await ledger.complete(stale, OTHER),
            await ledger.renew(stale),
            await ledger.note(stale, "step", b"x"),
            await ledger.release(stale),
        ):
            assert verdict == Lost(VALUE)
        assert await self.ask(ledger, self.key()) == Done(VALUE, fresh.fence)

    async def test_a_wrong_fence_changes_nothing(self, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        wrong = replace(claim, fence=claim.fence + 1)
        assert await ledger.complete(wrong, VALUE) == Lost()
        assert await ledger.release(wrong) == Lost()
        assert isinstance(await self.ask(ledger, self.key()), Busy)

    async def test_only_an_outcome_of_the_same_call_is_handed_to_a_stale_claim(
        self, store: Any, ledger: Any
    ) -> None:
        stale = (await self.win(ledger, self.key())).claim
        await self.age(store, LEASE_S + TTL_S + 5)
        other = (await self.win(ledger, self.key(), fp=OTHER_FP)).claim
        await ledger.complete(other, OTHER)
        assert await ledger.complete(stale, VALUE) == Lost()

    async def test_completing_twice_is_kept(self, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        assert await ledger.complete(claim, VALUE) == Kept()
        assert await ledger.complete(claim, VALUE) == Kept()
        assert await ledger.complete(claim, OTHER) == Lost(VALUE)
        assert await self.ask(ledger, self.key()) == Done(VALUE, claim.fence)

    async def test_a_late_complete_under_the_current_fence_counts(
        self, store: Any, ledger: Any
    ) -> None:
        claim = (await self.win(ledger, self.key())).claim
        await self.age(store, LEASE_S + 1)
        assert await ledger.complete(claim, VALUE) == Kept()
        assert await self.ask(ledger, self.key()) == Done(VALUE, claim.fence)

    async def test_release_after_complete_is_lost(self, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        await ledger.complete(claim, VALUE)
        assert await ledger.release(claim) == Lost(VALUE)
        assert await ledger.renew(claim) == Lost(VALUE)
        assert isinstance(await self.ask(ledger, self.key()), Done)

    async def test_complete_after_release_is_lost(self, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        await ledger.release(claim)
        assert await ledger.complete(claim, VALUE) == Lost()
        assert isinstance(await self.ask(ledger, self.key()), Won)

    async def test_renew_extends_the_lease(self, store: Any, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        await self.age(store, LEASE_S - 5)
        assert await ledger.renew(claim) == Kept()
        await self.age(store, LEASE_S - 5)
        assert isinstance(await self.ask(ledger, self.key()), Busy)
        await self.age(store, 10)
        assert isinstance(await self.ask(ledger, self.key()), Won)

    async def test_renewing_for_nothing_leaves_the_outcome_unknown(self, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key(), HOLD)).claim
        assert await ledger.renew(claim, lease_s=0) == Kept()
        assert isinstance(await self.ask(ledger, self.key(), HOLD), Orphan)
        record = await ledger.look(self.key().id)
        assert record.state is State.UNKNOWN
        won = await self.win(ledger, self.key(), RECOVER)
        assert won.orphan is not None

    async def test_an_attempt_given_up_cannot_be_revived(self, ledger: Any) -> None:
        # A doubled claim, a renewal or a note that was under way when the holder gave up: each
        # would make a key look alive that nobody works on.
        claim = (await self.win(ledger, self.key(), HOLD)).claim
        await ledger.renew(claim, lease_s=0)
        assert await ledger.renew(claim) == Lost()
        assert await ledger.note(claim, "late", b"1") == Lost()
        again = await ledger.claim(claim.key, attempt=claim.attempt, fingerprint=FP, terms=HOLD)
        assert again == Busy(0.0)
        assert await ledger.renew(claim, lease_s=0) == Kept()
        record = await ledger.look(claim.key.id)
        assert (record.state, dict(record.steps)) == (State.UNKNOWN, {})

    async def test_an_attempt_given_up_may_still_say_how_it_ended(self, ledger: Any) -> None:
        for ending in ("complete", "release"):
            claim = (await self.win(ledger, self.key(ending), HOLD)).claim
            await ledger.renew(claim, lease_s=0)
            if ending == "complete":
                assert await ledger.complete(claim, VALUE) == Kept()
                assert isinstance(await self.ask(ledger, self.key(ending), HOLD), Done)
            else:
                assert await ledger.release(claim) == Kept()
                assert isinstance(await self.ask(ledger, self.key(ending), HOLD), Won)

    async def test_steps_are_handed_to_the_next_attempt(self, store: Any, ledger: Any) -> None:
        first = (await self.win(ledger, self.key())).claim
        assert await ledger.note(first, "charge", b"\x00\xff") == Kept()
        assert await ledger.note(first, "m\u00e4il \u2713", b"") == Kept()
        steps = {"charge": b"\x00\xff", "m\u00e4il \u2713": b""}
        await self.age(store, LEASE_S + 1)
        second = await self.win(ledger, self.key())
        assert dict(second.steps) == steps
        await ledger.release(second.claim, error="again")
        third = await self.win(ledger, self.key())
        assert dict(third.steps) == steps

    async def test_noting_a_step_extends_the_lease(self, store: Any, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        await self.age(store, LEASE_S - 5)
        await ledger.note(claim, "a", b"1")
        await self.age(store, LEASE_S - 5)
        assert isinstance(await self.ask(ledger, self.key()), Busy)

    async def test_fences_grow_over_release_expiry_and_forgetting(
        self, store: Any, ledger: Any
    ) -> None:
        fences = []
        for _ in range(3):
            won = await self.win(ledger, self.key())
            fences.append(won.claim.fence)
            await ledger.release(won.claim)
        won = await self.win(ledger, self.key())
        fences.append(won.claim.fence)
        await ledger.forget(self.key().id, force=True)
        won = await self.win(ledger, self.key())
        fences.append(won.claim.fence)
        assert fences == sorted(set(fences))

    # --- identity -----------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            (("AbC", ""), ("abc ", "")),
            (("a", ""), ("a ", "")),
            (("\u00e9", ""), ("e\u0301", "")),
            (("a\x00b", ""), ("a", "")),
            (("a:b", "c"), ("b", "c:a")),
            (("b", "a"), ("ab", "")),
            (("k", "t1"), ("k", "t2")),
            (("x" * 255, ""), ("x" * 254, "")),
            (("\ud800", ""), ("\udfff", "")),
            (("../../etc/passwd", ""), ("passwd", "")),
            (("*", ""), ("?", "")),
            (("{a}", ""), ("{a}b", "")),
        ],
    )
    async def test_odd_keys_do_not_bleed(
        self, ledger: Any, one: tuple[str, str], two: tuple[str, str]
    ) -> None:
        a = self.key(one[0], tenant=one[1])
        b = self.key(two[0], tenant=two[1])
        won_a = await self.win(ledger, a)
        won_b = await self.win(ledger, b)
        await ledger.complete(won_a.claim, VALUE)
        await ledger.complete(won_b.claim, OTHER)
        assert await self.ask(ledger, a) == Done(VALUE, won_a.claim.fence)
        assert await self.ask(ledger, b) == Done(OTHER, won_b.claim.fence)
        assert (await ledger.look(a.id)).key.tenant == one[1]

    # --- many at once -------------------------------------------------------------------------

    async def test_many_claims_at_once_have_one_winner(
        self, store: Any, ledger: Any, colour: Colour
    ) -> None:
        answers = await at_once(colour, [lambda: self.ask(ledger, self.key())] * 32)
        assert [type(a).__name__ for a in answers].count("Won") == 1
        assert [type(a).__name__ for a in answers].count("Busy") == 31

    async def test_many_different_keys_at_once_all_win(
        self, store: Any, ledger: Any, colour: Colour
    ) -> None:
        keys = [self.key(f"k{i}") for i in range(50)]

        async def whole(key: Key) -> Any:
            won = await self.win(ledger, key)
            verdict = await ledger.complete(won.claim, Outcome("value", key.id))
            return verdict, await self.ask(ledger, key)

        if colour.name == "async":
            answers = await asyncio.gather(*(whole(key) for key in keys))
        else:
            answers = [run(whole(key)) for key in keys]
        for key, (verdict, done) in zip(keys, answers, strict=True):
            assert verdict == Kept()
            assert done.outcome.data == key.id

    # --- several stores on one place ----------------------------------------------------------

    async def test_claim_through_one_store_is_busy_and_then_done_through_the_others(
        self, store: Any, colour: Colour
    ) -> None:
        async with self.three_ledgers(store, colour) as ledgers:
            for number, holder in enumerate(ledgers):
                key = self.key(f"k{number}")
                won = await self.win(holder, key)
                for ledger in ledgers:
                    assert isinstance(await self.ask(ledger, key), Busy)
                assert await holder.complete(won.claim, VALUE) == Kept()
                for ledger in ledgers:
                    assert await self.ask(ledger, key) == Done(VALUE, won.claim.fence)

    async def test_claim_of_one_store_is_ended_through_another(
        self, store: Any, colour: Colour
    ) -> None:
        async with self.three_ledgers(store, colour) as (one, two, three):
            claim = (await self.win(one, self.key())).claim
            assert await two.note(claim, "charge", b"1") == Kept()
            assert await three.release(claim) == Kept()
            again = await self.win(two, self.key())
            assert dict(again.steps) == {"charge": b"1"}
            assert await one.complete(claim, OTHER) == Lost()
            assert await three.complete(again.claim, VALUE) == Kept()
            assert await one.complete(claim, OTHER) == Lost(VALUE)

    async def test_fences_grow_across_stores(self, store: Any, colour: Colour) -> None:
        async with self.three_ledgers(store, colour) as ledgers:
            fences = []
            for ledger in [*ledgers, *reversed(ledgers)]:
                won = await self.win(ledger, self.key())
                fences.append(won.claim.fence)
                await ledger.release(won.claim)
        assert fences == sorted(set(fences))

    async def test_many_claims_at_once_through_several_stores_have_one_winner(
        self, store: Any, colour: Colour
    ) -> None:
        async with opened(self, store) as second, opened(self, store) as third:
            ledgers = [ledger_of(each, colour) for each in (store, second, third)]
            asks = [lambda n=n: self.ask(ledgers[n % 3], self.key()) for n in range(24)]
            answers = await at_once(colour, asks)
        assert [type(a).__name__ for a in answers].count("Won") == 1
        assert [type(a).__name__ for a in answers].count("Busy") == 23

    async def test_closing_a_store_leaves_the_others_working(
        self, store: Any, colour: Colour
    ) -> None:
        ledger = ledger_of(store, colour)
        async with opened(self, store) as stays:
            beside = ledger_of(stays, colour)
            first = await self.win(beside, self.key("held by one that stays"))
            async with opened(self, store) as goes:
                mine = await self.win(ledger_of(goes, colour), self.key("held by one that goes"))
            for number, each in enumerate((ledger, beside)):
                won = await self.win(each, self.key(f"new {number}"))
                assert await each.complete(won.claim, VALUE) == Kept()
            assert isinstance(await self.ask(ledger, first.claim.key), Busy)
            assert await ledger.complete(mine.claim, VALUE) == Kept()
            assert await self.ask(beside, mine.claim.key) == Done(VALUE, mine.claim.fence)

    # --- inspect ------------------------------------------------------------------------------

    async def test_look_tells_the_whole_story(self, store: Any, ledger: Any) -> None:
        first = (await self.win(ledger, self.key(tenant="acme"))).claim
        await ledger.release(first, error="ValueError: no funds")
        second = (await self.win(ledger, self.key(tenant="acme"))).claim
        await ledger.note(second, "charge", b"42")
        await self.age(store, LEASE_S + 1)
        third = (await self.win(ledger, self.key(tenant="acme"))).claim
        await ledger.complete(third, VALUE)
        record = await ledger.look(self.key(tenant="acme").id)
        assert record.key == self.key(tenant="acme")
        assert record.state is State.COMPLETED
        assert (record.attempt, record.number, record.fence) == (third.attempt, 3, third.fence)
        assert record.fingerprint == FP
        assert record.outcome == VALUE
        assert dict(record.steps) == {"charge": b"42"}
        assert [(p.number, p.fence, p.attempt) for p in record.past] == [
            (1, first.fence, first.attempt),
            (2, second.fence, second.attempt),
        ]
        assert "no funds" in record.past[0].ending
        assert "lease ran out" in record.past[1].ending
        assert record.holder in third.attempt
        assert record.completed_at is not None
        assert record.expires_at is not None
        assert record.created_at <= record.started_at <= record.completed_at < record.expires_at
        assert record.completed_at <= record.seen_at < record.expires_at

    async def test_look_shows_a_failure_and_its_error(self, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        await ledger.release(claim, error="boom \u2713")
        record = await ledger.look(self.key().id)
        assert record.state is State.FAILED
        assert record.error == "boom \u2713"

    async def test_look_finds_nothing_where_nothing_is(self, ledger: Any) -> None:
        assert await ledger.look(self.key("nobody").id) is None

    async def test_a_held_orphan_is_seen_as_unknown(self, store: Any, ledger: Any) -> None:
        await self.win(ledger, self.key(), HOLD)
        assert (await ledger.look(self.key().id)).state is State.PENDING
        await self.age(store, LEASE_S + 1)
        assert (await ledger.look(self.key().id)).state is State.UNKNOWN
        found = await ledger.records(state=State.UNKNOWN)
        assert [r.key.text for r in found] == ["order-1"]

    async def test_records_are_listed_in_pages_and_filtered(self, ledger: Any) -> None:
        for i in range(7):
            won = await self.win(ledger, self.key(f"k{i}", tenant=f"t{i % 2}"))
            if i % 3 == 0:
                await ledger.complete(won.claim, VALUE)
        everything = await ledger.records(limit=100)
        assert len(everything) == 7
        ids = [r.key.id for r in everything]
        assert ids == sorted(ids)
        paged: list[bytes] = []
        after = None
        while page := await ledger.records(limit=3, after=after):
            paged += [r.key.id for r in page]
            after = paged[-1]
        assert paged == ids
        assert len(await ledger.records(tenant="t1")) == 3
        assert len(await ledger.records(state=State.COMPLETED)) == 3
        assert len(await ledger.records(operation="pay")) == 7
        assert not await ledger.records(operation="other")

    async def test_resolve_settles_an_orphan_with_an_outcome(self, store: Any, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key(), HOLD)).claim
        id = self.key().id
        settle = {"fence": claim.fence, "outcome": VALUE, "ttl_s": TTL_S}
        assert not await ledger.resolve(id, **settle)  # the lease is live
        await self.age(store, LEASE_S + 1)
        assert not await ledger.resolve(id, **{**settle, "fence": claim.fence - 1})
        assert await ledger.resolve(id, **settle)
        assert not await ledger.resolve(id, **settle)
        assert await self.ask(ledger, self.key(), HOLD) == Done(VALUE, claim.fence)
        assert await ledger.complete(claim, OTHER) == Lost(VALUE)
        record = await ledger.look(id)
        assert [(p.number, p.fence) for p in record.past] == [(1, claim.fence)]
        assert record.past[0].ending == "resolved by hand: it happened"

    async def test_resolve_lets_an_orphan_run_again(self, store: Any, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key(), HOLD)).claim
        await self.age(store, LEASE_S + 1)
        assert await ledger.resolve(self.key().id, fence=claim.fence, outcome=None, ttl_s=TTL_S)
        again = await self.win(ledger, self.key(), HOLD)
        assert again.claim.fence > claim.fence
        assert await ledger.complete(claim, OTHER) == Lost()

    async def test_resolve_answers_no_where_nothing_is(self, ledger: Any) -> None:
        assert not await ledger.resolve(b"\x01" * 32, fence=1, outcome=VALUE, ttl_s=None)

    async def test_forget_deletes_but_spares_a_live_lease(self, ledger: Any) -> None:
        id = self.key().id
        claim = (await self.win(ledger, self.key())).claim
        await ledger.note(claim, "a", b"1")
        assert not await ledger.forget(id)
        assert await ledger.forget(id, force=True)
        assert await ledger.look(id) is None
        assert not await ledger.forget(id)
        again = await self.win(ledger, self.key())
        assert dict(again.steps) == {}
        await ledger.complete(again.claim, VALUE)
        assert await ledger.forget(id)

    async def test_complete_after_forgetting_is_lost(self, ledger: Any) -> None:
        claim = (await self.win(ledger, self.key())).claim
        await ledger.forget(self.key().id, force=True)
        assert await ledger.complete(claim, VALUE) == Lost()
        assert isinstance(await self.ask(ledger, self.key()), Won)

    async def test_sweep_spares_live_held_and_unexpired_records(
        self, store: Any, ledger: Any
    ) -> None:
        for i in range(3):
            won = await self.win(ledger, self.key(f"old{i}"))
            await ledger.complete(won.claim, VALUE)
        held = await self.win(ledger, self.key("held"), HOLD)
        await self.age(store, TTL_S + 1)
        fresh = await self.win(ledger, self.key("fresh"))
        live = await self.win(ledger, self.key("live"))
        await ledger.complete(fresh.claim, VALUE)
        assert await ledger.sweep(limit=2) <= 2
        assert await ledger.sweep() <= 3
        assert len(await ledger.records()) == 3
        assert isinstance(await self.ask(ledger, self.key("fresh")), Done)
        assert isinstance(await self.ask(ledger, self.key("live")), Busy)
        assert isinstance(await self.ask(ledger, self.key("held"), HOLD), Orphan)
        assert await ledger.complete(live.claim, VALUE) == Kept()
        assert await ledger.complete(held.claim, VALUE) == Kept()

    async def test_guarantees_come_with_reasons(self, ledger: Any) -> None:
        found = await ledger.guarantees()
        assert found.store
        assert found.why
        assert found.survives <= {"process_crash", "power_loss", "failover"}

    # --- against a model ----------------------------------------------------------------------

    async def test_any_history_agrees_with_the_model(
        self, store: Any, ledger: Any, colour: Colour
    ) -> None:
        """Random histories, step by step against `Model`; a failure shrinks to its shortest."""
        serial = iter(range(10**9))

        async def play(moves: Sequence[Move]) -> None:
            model = Model()
            prefix = f"h{next(serial)}-"
            for move in moves:
                await make(self, store, ledger, model, prefix, move)

        await play_histories(moves(), play, examples=self.examples, most=25)
