"""What an inbox must do, as tests. Prove your own by subclassing `InboxContract`:

    class TestMyInbox(InboxContract):
        @pytest.fixture
        async def inbox(self):
            inbox = MyInbox(..., retry=self.retry)
            yield inbox
            await inbox.aclose()

        def effect(self, session, message): ...write `self.said(message)` with the session...
        async def effects(self, inbox): ...all that was written, in order...
        async def age(self, inbox, seconds): ...make everything stored so much older...

Tests share whatever `inbox` stands on: each has consumers of its own. Time is not slept. An inbox
whose handlers' effects are elsewhere says `takes_back = False`: what a failed handler did stays
done. One with a single writer at a time says `many_writers = False`. Needs pytest-asyncio.

If a process may have several inboxes on one place, give another one; you close it:

        def another(self, inbox): ...another inbox on the same place...

Without `another`, the tests over several inboxes use the one inbox several times.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

import pytest

from semel.errors import BrokerUnavailableError, SettingsError, StoreUnavailableError
from semel.messages import Applied, Ending, Held, Message, Seen
from semel.parked import Parked
from semel.stores.inbox_rules import PoisonError, Retry, sequence_of

ALL = (0, 255)

HOUR_S = 3600.0


class Died(BaseException):
    """Stands for a process that ends while it runs a handler."""


def message(seq: int | None, aggregate: str = "7", **more: Any) -> Message:
    """One of topic "orders", unless it is told otherwise."""
    first = Message(
        position=seq or 0,
        id=f"{more.get('topic', 'orders')}-{aggregate}-{seq}",
        type="placed",
        topic="orders",
        tenant="",
        aggregate_type="order",
        aggregate_id=aggregate,
        seq=seq,
        payload=f'{{"n": {seq or 0}}}',
        time=datetime(2026, 1, 1, tzinfo=UTC),
    )
    return replace(first, **more)


def messages(*seqs: int, aggregate: str = "7") -> list[Message]:
    return [message(seq, aggregate) for seq in seqs]


def endings(given: Any) -> list[str]:
    """How they ended, in a word each; or what was run, and how that ended."""
    return [
        f"{each[0].id.rpartition('-')[2]} {_word(each[1])}"
        if isinstance(each, tuple)
        else _word(each)
        for each in given
    ]


def _word(ending: Ending) -> str:
    match ending:
        case Applied():
            return "applied"
        case Seen():
            return "seen"
        case Held(why):
            return why


class Handler:
    """Writes what a message says, and then fails if it is told to."""

    def __init__(self, contract: InboxContract) -> None:
        self._contract = contract
        self.fails: dict[str, BaseException | type[BaseException]] = {}
        """What to raise, by id."""
        self.before: dict[str, Callable[[], Any]] = {}
        """What to do or await before the effect, by id, once."""
        self.ran: list[str] = []

    def colour(self, _: Message) -> str:
        return self._contract.colour

    def __call__(self, message: Message, session: Any) -> Any:
        if self._contract.colour == "async":
            return self._run(message, session)
        if message.id in self.before:
            self.before.pop(message.id)()
        self._contract.effect(session, message)
        return self._end(message)

    async def _run(self, message: Message, session: Any) -> None:
        if message.id in self.before and inspect.isawaitable(
            first := self.before.pop(message.id)()
        ):
            await first
        written = self._contract.effect(session, message)
        if inspect.isawaitable(written):
            await written
        self._end(message)

    def _end(self, message: Message) -> None:
        self.ran.append(message.id)
        if message.id in self.fails:
            raise self.fails[message.id]


Test = TypeVar("Test", bound=Callable[..., Any])


def where(condition: Callable[[type[InboxContract]], bool]) -> Callable[[Test], Test]:
    """A test that is there for those of which this is true."""

    def mark(test: Test) -> Test:
        test.where = condition  # type: ignore[attr-defined]
        return test

    return mark


def _on_the_loop(contract: type[InboxContract]) -> bool:
    return contract.colour == "async"


def _side_by_side(contract: type[InboxContract]) -> bool:
    """One transaction waits in the middle while others come and go."""
    return _on_the_loop(contract) and contract.many_writers


class InboxContract:
    """Every promise of the `Inbox` and `ParkedStore` ports, one test each."""

    def __init_subclass__(cls) -> None:
        for name, test in vars(InboxContract).items():
            if hasattr(test, "where"):
                setattr(cls, name, test if test.where(cls) else None)

    colour: ClassVar[str] = "async"
    takes_back: ClassVar[bool] = True
    many_writers: ClassVar[bool] = True
    retry: ClassVar[Retry] = Retry(
        attempts=3, first_s=HOUR_S, factor=2, most_s=8 * HOUR_S, jitter=0
    )

    # --- what a subclass says ---------------------------------------------------------------

    def effect(self, session: Any, message: Message) -> Any:
        """Write `self.said(message)` with the session; may be awaited."""
        raise NotImplementedError

    async def effects(self, inbox: Any) -> list[str]:
        """All that was written and stands, in order."""
        raise NotImplementedError

    async def age(self, inbox: Any, seconds: float) -> None:
        """Make everything that is stored this much older."""
        raise NotImplementedError

    def another(self, inbox: Any) -> Any:
        """Another inbox on the same place, closed by the subclass; by default, the inbox itself."""
        return inbox

    # --- words ------------------------------------------------------------------------------

    @pytest.fixture
    def consumer(self) -> str:
        return f"stock-{uuid4().hex[:12]}"

    @pytest.fixture
    def handler(self, consumer: str) -> Handler:
        self._consumer = consumer
        return Handler(self)

    def said(self, message: Message) -> str:
        """What a handler writes: whose it is, and which message."""
        return (
            f"{self._consumer} {message.aggregate_id}:{message.seq or message.id} {message.payload}"
        )

    async def stands(self, inbox: Any) -> list[str]:
        """The messages of this test's consumer that have had their effect, in order."""
        mine = [each for each in await self.effects(inbox) if each.startswith(self._consumer)]
        return [each.split(" ")[1] for each in mine]

    async def due(self, inbox: Any, consumer: str, handler: Handler) -> list[str]:
        return endings(await inbox.retry(consumer, ALL, handler))

    async def later(self, inbox: Any, consumer: str, handler: Handler) -> list[str]:
        """What is run when everything that waits for its time is due."""
        await self.age(inbox, 100 * HOUR_S)
        return await self.due(inbox, consumer, handler)

    async def only(self, inbox: Any, consumer: str) -> Any:
        [sequence] = await Parked(inbox).list(consumer=consumer)
        return sequence

    def check(self, stands: list[str], expected: list[str]) -> None:
        """What stands; where nothing is taken back, what failed stands as often as it ran."""
        if self.takes_back:
            assert stands == expected
        else:
            assert list(dict.fromkeys(stands)) == list(dict.fromkeys(expected))

    # --- once, in order ---------------------------------------------------------------------

    async def test_each_message_has_its_effect_once_and_in_order(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = messages(1, 2, 3)
        assert endings(await inbox.apply(consumer, batch, handler)) == ["applied"] * 3
        assert endings(await inbox.apply(consumer, batch, handler)) == ["seen"] * 3
        more = messages(2, 3, 4)
        assert endings(await inbox.apply(consumer, more, handler)) == ["seen", "seen", "applied"]
        assert await self.stands(inbox) == ["7:1", "7:2", "7:3", "7:4"]

    async def test_a_message_twice_in_a_batch_has_one_effect(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = [*messages(1, 1, 2, 1), message(None, id="u"), message(None, id="u")]
        assert endings(await inbox.apply(consumer, batch, handler)) == [
            *("applied", "seen", "applied", "seen"),
            *("applied", "seen"),
        ]
        assert await self.stands(inbox) == ["7:1", "7:2", "7:u"]

    async def test_an_empty_batch_is_nothing(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        assert list(await inbox.apply(consumer, [], handler)) == []

    async def test_aggregates_tenants_topics_and_consumers_do_not_touch(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        others = [
            message(1),
            message(1, "8"),
            message(1, tenant="acme", id="a"),
            message(1, topic="bills", id="b"),
            message(1, aggregate_type="basket", id="c"),
            message(None, id="u"),
            message(None, id="u", tenant="acme"),
            message(None, id="u", topic="bills"),
        ]
        assert endings(await inbox.apply(consumer, others, handler)) == ["applied"] * len(others)
        assert endings(await inbox.apply(f"{consumer}-2", others, handler)) == (
            ["applied"] * len(others)
        )
        assert endings(await inbox.apply(consumer, others, handler)) == ["seen"] * len(others)

    async def test_a_message_that_does_nothing_moves_the_mark(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        def nothing(message: Message, session: Any) -> None:
            pass

        assert endings(await inbox.apply(consumer, messages(1, 2), nothing)) == ["applied"] * 2
        assert endings(await inbox.apply(consumer, messages(2, 3), handler)) == ["seen", "applied"]

    async def test_a_large_batch_over_many_aggregates(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = [message(seq, str(n)) for seq in (1, 2) for n in range(300)]
        batch += [message(None, id=f"u{n}") for n in range(300)]
        assert endings(await inbox.apply(consumer, batch, handler)) == ["applied"] * 900
        assert endings(await inbox.apply(consumer, batch, handler)) == ["seen"] * 900
        assert len(await self.stands(inbox)) == 900

    async def test_names_and_payloads_come_back_as_they_were(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        consumer = f"{consumer} ünï-\\-\x1f-{'x' * 300}"
        odd = message(
            2,
            "é" * 300,
            id="i" * 300,
            tenant="\\ tenant",
            topic="t" * 300,
            payload='{"a":  1.50, "b": "\\u0000 ü",\n "c": 9007199254740993}',
            headers={"traceparent": "00-1-2-03", "x": "ü"},
            position=2**47,
        )
        assert endings(await inbox.apply(consumer, [odd], handler)) == ["gap"]
        [row] = await Parked(inbox).show(sequence_of(consumer, odd)[0])
        assert replace(row.message, source="") == odd
        assert row.message.payload == odd.payload
        found = await Parked(inbox).list(topic="t" * 300, tenant="\\ tenant")
        assert sequence_of(consumer, odd)[0] in [each.sequence for each in found]

    # --- gaps -------------------------------------------------------------------------------

    async def test_a_gap_holds_and_is_healed_by_itself(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        assert endings(await inbox.apply(consumer, messages(1, 3, 4), handler)) == [
            *("applied", "gap", "behind")
        ]
        assert await self.later(inbox, consumer, handler) == []
        assert endings(await inbox.apply(consumer, messages(5), handler)) == ["behind"]
        assert endings(await inbox.apply(consumer, messages(2), handler)) == ["applied"]
        assert await self.due(inbox, consumer, handler) == ["3 applied", "4 applied", "5 applied"]
        assert await self.due(inbox, consumer, handler) == []
        assert await self.stands(inbox) == ["7:1", "7:2", "7:3", "7:4", "7:5"]
        assert endings(await inbox.apply(consumer, messages(5, 6), handler)) == ["seen", "applied"]

    async def test_a_gap_within_a_batch_is_healed(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = messages(2, 3, 1, 2)
        assert endings(await inbox.apply(consumer, batch, handler)) == [
            *("gap", "behind", "applied", "behind")
        ]
        assert await self.due(inbox, consumer, handler) == ["2 applied", "3 applied"]
        assert await self.stands(inbox) == ["7:1", "7:2", "7:3"]

    async def test_a_gap_behind_a_gap(self, inbox: Any, consumer: str, handler: Handler) -> None:
        assert endings(await inbox.apply(consumer, messages(6, 4, 3), handler)) == ["gap"] * 3
        assert endings(await inbox.apply(consumer, messages(1, 2), handler)) == ["applied"] * 2
        assert await self.due(inbox, consumer, handler) == ["3 applied", "4 applied"]
        assert (await self.only(inbox, consumer)).head.why == "gap"
        assert endings(await inbox.apply(consumer, messages(5), handler)) == ["applied"]
        assert await self.due(inbox, consumer, handler) == ["6 applied"]

    async def test_a_baseline_begins_with_what_comes_first(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await inbox.baseline(consumer, "orders")
        await inbox.baseline(consumer, "orders")
        assert endings(await inbox.apply(consumer, messages(41, 42, 44), handler)) == [
            *("applied", "applied", "gap")
        ]
        assert endings(await inbox.apply(consumer, messages(40, 41), handler)) == ["seen", "seen"]
        elsewhere = [message(5, topic="bills"), message(5, "8")]
        assert endings(await inbox.apply(consumer, elsewhere, handler)) == ["gap", "applied"]
        assert endings(await inbox.apply(f"{consumer}-2", messages(41), handler)) == ["gap"]

    async def test_the_first_message_after_a_baseline_may_fail(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await inbox.baseline(consumer, "orders")
        handler.fails["orders-7-41"] = ValueError("not yet")
        assert endings(await inbox.apply(consumer, messages(41, 42), handler)) == [
            *("retry", "behind")
        ]
        handler.fails.clear()
        assert await self.later(inbox, consumer, handler) == ["41 applied", "42 applied"]

    # --- failing ----------------------------------------------------------------------------

    async def test_a_message_that_fails_waits_and_its_sequence_behind_it(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-2"] = ValueError("no such order")
        batch = [*messages(1, 2, 3), *messages(1, 2, aggregate="8")]
        assert endings(await inbox.apply(consumer, batch, handler)) == [
            *("applied", "retry", "behind"),
            *("applied", "applied"),
        ]
        self.check(await self.stands(inbox), ["7:1", "8:1", "8:2"])
        assert endings(await inbox.apply(consumer, messages(2, 4), handler)) == ["behind"] * 2
        assert await self.due(inbox, consumer, handler) == []  # its time has not come
        handler.fails.clear()
        assert await self.later(inbox, consumer, handler) == [
            *("2 applied", "3 applied", "4 applied")
        ]
        self.check(await self.stands(inbox), ["7:1", "8:1", "8:2", "7:2", "7:3", "7:4"])

    async def test_the_ending_tells_what_it_failed_with(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("no such order\x00 \ud800")
        [ending] = await inbox.apply(consumer, messages(1), handler)
        assert "ValueError: no such order" in ending.error
        parked = await self.only(inbox, consumer)
        assert "ValueError: no such order" in parked.head.error
        assert (parked.head.state, parked.head.attempts) == ("waiting", 1)

    async def test_what_fails_too_often_is_parked_and_stops_its_own_aggregate_only(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("never")
        assert endings(await inbox.apply(consumer, messages(1, 2), handler)) == ["retry", "behind"]
        assert await self.later(inbox, consumer, handler) == ["1 retry"]
        assert await self.later(inbox, consumer, handler) == ["1 poison"]
        assert await self.later(inbox, consumer, handler) == []
        parked = await self.only(inbox, consumer)
        assert (parked.head.state, parked.head.attempts, parked.behind) == ("parked", 3, 1)
        batch = [message(3), message(1, "8")]
        assert endings(await inbox.apply(consumer, batch, handler)) == ["behind", "applied"]
        assert handler.ran.count("orders-7-1") >= 3

    async def test_the_pause_grows(self, inbox: Any, consumer: str, handler: Handler) -> None:
        handler.fails["orders-7-1"] = ValueError("never")
        await inbox.apply(consumer, messages(1), handler)
        await self.age(inbox, HOUR_S)
        assert await self.due(inbox, consumer, handler) == ["1 retry"]
        await self.age(inbox, 2 * HOUR_S - 60)
        assert await self.due(inbox, consumer, handler) == []
        await self.age(inbox, 60)
        assert await self.due(inbox, consumer, handler) == ["1 poison"]

    @pytest.mark.parametrize("how", ["raised", "attribute"])
    async def test_poison_is_parked_at_once(
        self, inbox: Any, consumer: str, handler: Handler, how: str
    ) -> None:
        class OfMyOwnError(ValueError):
            poison = True

        handler.fails["orders-7-1"] = PoisonError("bad") if how == "raised" else OfMyOwnError("bad")
        assert endings(await inbox.apply(consumer, messages(1, 2), handler)) == ["poison", "behind"]
        assert await self.later(inbox, consumer, handler) == []

    async def test_several_fail_in_one_batch(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = [message(1, str(n)) for n in range(6)] + [message(2, str(n)) for n in range(6)]
        handler.fails = {f"orders-{n}-1": ValueError("odd") for n in (1, 3, 5)}
        assert endings(await inbox.apply(consumer, batch, handler)) == [
            *("applied", "retry") * 3,
            *("applied", "behind") * 3,
        ]
        handler.fails.clear()
        ran = await self.later(inbox, consumer, handler)
        assert sorted(ran) == ["1 applied"] * 3 + ["2 applied"] * 3
        stands = await self.stands(inbox)
        assert sorted(set(stands)) == sorted(f"{n}:{seq}" for n in range(6) for seq in (1, 2))
        assert len(stands) == 12 or not self.takes_back

    async def test_the_one_that_heals_a_gap_may_fail(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await inbox.apply(consumer, messages(1, 3), handler)
        handler.fails["orders-7-2"] = ValueError("not yet")
        assert endings(await inbox.apply(consumer, messages(2), handler)) == ["retry"]
        assert await self.due(inbox, consumer, handler) == []
        handler.fails = {"orders-7-3": ValueError("not yet")}
        assert await self.later(inbox, consumer, handler) == ["2 applied", "3 retry"]
        handler.fails.clear()
        assert await self.later(inbox, consumer, handler) == ["3 applied"]
        self.check(await self.stands(inbox), ["7:1", "7:2", "7:3"])

    async def test_only_the_slots_that_are_asked_for_are_run(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        one = message(1)
        _, slot = sequence_of(consumer, one)
        handler.fails[one.id] = ValueError("not yet")
        await inbox.apply(consumer, [one], handler)
        handler.fails.clear()
        await self.age(inbox, HOUR_S)
        below, above = (0, slot - 1), (slot + 1, 255)
        for slots in (below, above):
            if slots[0] <= slots[1]:
                assert list(await inbox.retry(consumer, slots, handler)) == []
        assert list(await inbox.retry(f"{consumer}-2", ALL, handler)) == []
        assert endings(await inbox.retry(consumer, (slot, slot), handler)) == ["1 applied"]

    # --- without a number -------------------------------------------------------------------

    async def test_messages_without_a_number_never_wait_for_each_other(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = [message(None, id=id) for id in ("b", "a", "c")]
        handler.fails["a"] = ValueError("not yet")
        assert endings(await inbox.apply(consumer, batch, handler)) == [
            *("applied", "retry", "applied")
        ]
        assert endings(await inbox.apply(consumer, batch, handler)) == ["seen", "behind", "seen"]
        parked = await self.only(inbox, consumer)
        assert (parked.head.message.id, parked.behind, parked.mark) == ("a", 0, None)
        handler.fails.clear()
        assert await self.later(inbox, consumer, handler) == ["a applied"]
        assert endings(await inbox.apply(consumer, batch, handler)) == ["seen"] * 3
        self.check(await self.stands(inbox), ["7:b", "7:c", "7:a"])

    async def test_a_number_below_1_is_none(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = messages(0, 0, 1)
        assert endings(await inbox.apply(consumer, batch, handler)) == [
            *("applied", "seen", "applied")
        ]

    async def test_ids_are_forgotten_when_they_are_old_and_marks_never(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = [message(None, id="u"), message(1)]
        await inbox.apply(consumer, batch, handler)
        await inbox.sweep(older_than_s=HOUR_S)
        assert endings(await inbox.apply(consumer, batch, handler)) == ["seen", "seen"]
        await self.age(inbox, 2 * HOUR_S)
        assert await inbox.sweep(older_than_s=HOUR_S, limit=10_000) >= 1
        assert endings(await inbox.apply(consumer, batch, handler)) == ["applied", "seen"]

    async def test_a_sweep_forgets_no_more_than_it_is_told(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await self.age(inbox, 2 * HOUR_S)
        while await inbox.sweep(older_than_s=HOUR_S):
            pass
        await inbox.apply(consumer, [message(None, id=f"u{n}") for n in range(5)], handler)
        await self.age(inbox, 2 * HOUR_S)
        assert await inbox.sweep(older_than_s=HOUR_S, limit=3) == 3
        assert await inbox.sweep(older_than_s=HOUR_S, limit=3) == 2

    # --- outages and crashes ----------------------------------------------------------------

    @pytest.mark.parametrize("error", [StoreUnavailableError, BrokerUnavailableError])
    @pytest.mark.parametrize("singly", [False, True])
    async def test_an_outage_is_raised_and_held_against_nobody(
        self, inbox: Any, consumer: str, handler: Handler, error: type[Exception], singly: bool
    ) -> None:
        handler.fails["orders-7-2"] = error("down")
        for _ in range(5):
            with pytest.raises(StoreUnavailableError, match="down"):
                await inbox.apply(consumer, messages(1, 2, 3), handler, singly=singly)
        handler.fails.clear()
        done = endings(await inbox.apply(consumer, messages(1, 2, 3), handler, singly=singly))
        assert done[1:] == ["applied", "applied"]
        assert list(await Parked(inbox).list(consumer=consumer)) == []
        self.check(await self.stands(inbox), ["7:1", "7:2", "7:3"])

    async def test_an_outage_while_what_waits_is_run_counts_no_attempt(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("not yet")
        await inbox.apply(consumer, messages(1), handler)
        handler.fails["orders-7-1"] = StoreUnavailableError("down")
        await self.age(inbox, HOUR_S)
        for _ in range(5):
            with pytest.raises(StoreUnavailableError, match="down"):
                await inbox.retry(consumer, ALL, handler)
        assert (await self.only(inbox, consumer)).head.attempts == 1
        handler.fails.clear()
        assert await self.due(inbox, consumer, handler) == ["1 applied"]

    async def test_an_outage_that_outlasts_several_processes_is_no_crash(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("not yet")
        await inbox.apply(consumer, messages(1), handler)
        await self.age(inbox, HOUR_S)
        for each in ("orders-7-1", "orders-8-1"):
            handler.fails[each] = StoreUnavailableError("down")
        for _ in range(5):
            process = self.another(inbox)
            with pytest.raises(StoreUnavailableError, match="down"):
                await process.apply(consumer, [message(1, "8")], handler, singly=True)
            with pytest.raises(StoreUnavailableError, match="down"):
                await process.retry(consumer, ALL, handler)
        handler.fails.clear()
        done = await inbox.apply(consumer, [message(1, "8")], handler, singly=True)
        assert endings(done) == ["applied"]
        assert await self.due(inbox, consumer, handler) == ["1 applied"]

    @where(_on_the_loop)  # a thread is not cancelled
    async def test_a_message_that_is_cut_off_again_and_again_is_no_crash(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        for _ in range(5):
            reached = asyncio.Event()

            async def hang(reached: asyncio.Event = reached) -> None:
                reached.set()
                await asyncio.Event().wait()

            handler.before["orders-7-1"] = hang
            process = self.another(inbox)
            task = asyncio.create_task(process.apply(consumer, messages(1), handler, singly=True))
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        done = await inbox.apply(consumer, messages(1), handler, singly=True)
        assert endings(done) == ["applied"]

    @where(_on_the_loop)  # a thread is not cancelled
    async def test_a_handler_that_cancels_its_own_task_has_failed(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        """For who runs it together with others it looks as if they were told to stop."""

        async def cancel() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        handler.before["orders-7-1"] = cancel
        done = await inbox.apply(consumer, messages(1), handler, singly=True)
        assert endings(done) == ["retry"]
        handler.before["orders-7-1"] = cancel
        assert await self.later(inbox, consumer, handler) == ["1 retry"]
        assert (await self.only(inbox, consumer)).head.attempts == 2

    async def test_a_message_that_ends_the_process_three_times_is_parked(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-2"] = Died
        with pytest.raises(Died):
            await inbox.apply(consumer, messages(1, 2, 3), handler)
        for _ in range(3):
            with pytest.raises(Died):
                await self.another(inbox).apply(consumer, messages(1, 2, 3), handler, singly=True)
        batch = [*messages(1, 2, 3), message(1, "8")]
        done = await self.another(inbox).apply(consumer, batch, handler, singly=True)
        assert endings(done) == ["seen", "crash", "behind", "applied"]
        parked = await self.only(inbox, consumer)
        assert (parked.head.state, parked.head.why) == ("parked", "crash")
        self.check(await self.stands(inbox), ["7:1", "8:1"])

    async def test_what_waits_and_ends_the_process_is_parked_too(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("not yet")
        await inbox.apply(consumer, messages(1), handler)
        handler.fails["orders-7-1"] = Died
        await self.age(inbox, HOUR_S)
        for _ in range(3):
            with pytest.raises(Died):
                await self.another(inbox).retry(consumer, ALL, handler)
        assert endings(await self.another(inbox).retry(consumer, ALL, handler)) == ["1 crash"]
        assert (await self.only(inbox, consumer)).head.state == "parked"

    async def test_one_that_ends_after_all_is_not_counted_any_more(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        for turn in range(1, 8):
            handler.fails[f"orders-7-{turn}"] = Died
            for _ in range(2):
                with pytest.raises(Died):
                    await inbox.apply(consumer, messages(turn), handler, singly=True)
            handler.fails.clear()
            done = await inbox.apply(consumer, messages(turn), handler, singly=True)
            assert endings(done) == ["applied"]

    async def test_singly_is_in_order_too(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-2"] = ValueError("not yet")
        batch = [*messages(1, 2, 3), message(1, "8"), message(None, id="u")]
        assert endings(await inbox.apply(consumer, batch, handler, singly=True)) == [
            *("applied", "retry", "behind"),
            *("applied", "applied"),
        ]
        assert endings(await inbox.apply(consumer, batch, handler, singly=True)) == [
            *("seen", "behind", "behind"),
            *("seen", "seen"),
        ]

    @where(_on_the_loop)  # a thread is not cancelled
    async def test_a_call_that_is_cancelled_has_done_nothing_or_all(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        reached = asyncio.Event()

        async def hang() -> None:
            reached.set()
            await asyncio.Event().wait()

        handler.before["orders-7-2"] = hang
        task = asyncio.create_task(inbox.apply(consumer, messages(1, 2), handler))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done = endings(await inbox.apply(consumer, messages(1, 2), handler))
        assert done[1] == "applied"
        self.check(await self.stands(inbox), ["7:1", "7:2"])

    # --- two at once ------------------------------------------------------------------------

    async def test_two_that_apply_the_same_batch_at_once_have_one_effect(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = [message(seq, str(n)) for seq in (1, 2, 3) for n in range(5)]
        batch += [message(None, id=f"u{n}") for n in range(5)]
        both = [
            inbox.apply(consumer, batch, handler),
            self.another(inbox).apply(consumer, batch, handler),
        ]
        one, other = await asyncio.gather(*both)
        for mine, yours in zip(endings(one), endings(other), strict=True):
            assert {mine, yours} <= {"applied", "seen"}
            assert (mine, yours) != ("seen", "seen")
        stands = await self.stands(inbox)
        assert sorted(set(stands)) == sorted(self.said(each).split(" ")[1] for each in batch)
        assert len(stands) == len(batch) or not self.takes_back

    async def test_closing_an_inbox_leaves_another_on_the_same_place_working(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        other = self.another(inbox)
        assert endings(await other.apply(consumer, messages(1), handler)) == ["applied"]
        if other is not inbox:
            await other.aclose()
        done = endings(await inbox.apply(consumer, messages(1, 2), handler))
        assert done == ["seen", "applied"]
        assert await self.stands(inbox) == ["7:1", "7:2"]

    @where(lambda contract: _side_by_side(contract) and contract.takes_back)
    async def test_one_that_was_frozen_in_the_middle_finds_out(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        frozen, thawed = asyncio.Event(), asyncio.Event()

        async def freeze() -> None:
            frozen.set()
            await thawed.wait()

        handler.before["orders-7-1"] = freeze
        zombie = asyncio.create_task(inbox.apply(consumer, messages(1, 2), handler))
        await frozen.wait()
        owner = self.another(inbox)
        assert endings(await owner.apply(consumer, messages(1, 2), handler)) == ["applied"] * 2
        thawed.set()
        assert endings(await zombie) == ["seen"] * 2
        assert await self.stands(inbox) == ["7:1", "7:2"]

    @where(_side_by_side)
    async def test_what_is_parked_while_another_runs_the_one_before_is_not_left_behind(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await inbox.apply(consumer, messages(1), handler)
        reached, go = asyncio.Event(), asyncio.Event()

        async def pause() -> None:
            reached.set()
            await go.wait()

        handler.before["orders-7-2"] = pause
        slow = asyncio.create_task(inbox.apply(consumer, messages(2), handler))
        await reached.wait()
        other = self.another(inbox)
        assert endings(await other.apply(consumer, messages(3, 4), handler)) == ["gap", "behind"]
        go.set()
        assert endings(await slow) == ["applied"]
        assert await self.due(inbox, consumer, handler) == ["3 applied", "4 applied"]

    @where(_side_by_side)
    async def test_what_is_put_behind_while_the_last_one_runs_is_not_left_behind(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("not yet")
        await inbox.apply(consumer, messages(1), handler)
        handler.fails.clear()
        await self.age(inbox, HOUR_S)
        other = self.another(inbox)
        put: list[Any] = []

        async def put_behind() -> None:
            put.extend(await other.apply(consumer, messages(2), handler))

        handler.before["orders-7-1"] = put_behind
        ran = await self.due(inbox, consumer, handler)
        ran += await self.due(inbox, consumer, handler)
        assert endings(put) == ["behind"]
        assert ran == ["1 applied", "2 applied"]

    async def test_what_waits_is_run_by_one_of_two(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails = {f"orders-{n}-1": ValueError("not yet") for n in range(6)}
        batch = [message(seq, str(n)) for seq in (1, 2) for n in range(6)]
        await inbox.apply(consumer, batch, handler)
        handler.fails.clear()
        await self.age(inbox, HOUR_S)
        other = self.another(inbox)
        ran = await asyncio.gather(
            inbox.retry(consumer, ALL, handler), other.retry(consumer, ALL, handler)
        )
        applied = [each[0].id for part in ran for each in part if each[1] == Applied()]
        assert sorted(applied) == sorted(each.id for each in batch)
        stands = await self.stands(inbox)
        assert len(stands) == 12 or not self.takes_back
        assert list(await Parked(inbox).list(consumer=consumer)) == []

    # --- for people -------------------------------------------------------------------------

    async def parked(self, inbox: Any, consumer: str, handler: Handler, *seqs: int) -> bytes:
        """A sequence whose first message is poison."""
        handler.fails[f"orders-7-{seqs[0]}"] = PoisonError("bad")
        await inbox.apply(consumer, messages(*range(1, seqs[0]), *seqs), handler)
        handler.fails.clear()
        sequence: bytes = (await self.only(inbox, consumer)).sequence
        return sequence

    async def test_a_listing_shows_the_first_and_how_many_wait_behind(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails = {"orders-7-2": PoisonError("bad"), "u": ValueError("not yet")}
        other = message(3, "9", topic="bills", tenant="acme")
        batch = [*messages(1, 2, 3, 4), message(None, id="u"), other]
        await inbox.apply(consumer, batch, handler)
        people = Parked(inbox)
        found = {each.head.message.id: each for each in await people.list(consumer=consumer)}
        poison = found["orders-7-2"]
        assert (poison.behind, poison.mark, poison.head.state) == (2, 1, "parked")
        assert found["u"].head.state == "waiting"
        assert (found[other.id].head.why, found[other.id].mark) == ("gap", 0)
        expected: list[tuple[dict[str, Any], set[str]]] = [
            ({"state": "parked"}, {"orders-7-2"}),
            ({"state": "waiting"}, {"u", other.id}),
            ({"topic": "bills"}, {other.id}),
            ({"tenant": "acme"}, {other.id}),
            ({"tenant": "", "topic": "orders"}, {"orders-7-2", "u"}),
        ]
        for filters, ids in expected:
            some = await people.list(consumer=consumer, **filters)
            assert {each.head.message.id for each in some} == ids
        pages = [await people.list(consumer=consumer, limit=2)]
        pages.append(await people.list(consumer=consumer, limit=2, after=pages[0][-1].sequence))
        assert [len(page) for page in pages] == [2, 1]
        assert {each.head.message.id for page in pages for each in page} == set(found)
        assert list(await people.list(consumer=f"{consumer}-2")) == []

    async def test_a_sequence_is_shown_in_order_page_by_page(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 2, 4, 3)
        people = Parked(inbox)
        rows = await people.show(sequence.hex())
        assert [row.message.seq for row in rows] == [2, 3, 4]
        assert [row.why for row in rows] == ["poison", "behind", "behind"]
        assert rows[0].consumer == consumer
        assert [row.message.seq for row in await people.show(sequence, limit=2)] == [2, 3]
        assert [row.message.seq for row in await people.show(sequence, after=3)] == [4]
        with pytest.raises(SettingsError, match="waits"):
            await people.show(b"\0" * 32)
        with pytest.raises(SettingsError, match="names no sequence"):
            await people.show("nonsense")

    async def test_replay_runs_the_sequence_in_order(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 1, 2, 3)
        people = Parked(inbox, who="ann")
        told = await people.replay(sequence, dry_run=True)
        assert told.dry_run
        assert "orders-7-1" in told.told
        assert await self.due(inbox, consumer, handler) == []
        assert list(await people.audit(sequence=sequence)) == []
        assert not (await people.replay(sequence)).dry_run
        assert await self.due(inbox, consumer, handler) == ["1 applied", "2 applied", "3 applied"]
        with pytest.raises(SettingsError, match="waits"):
            await people.replay(sequence)
        [audit] = await people.audit(sequence=sequence)
        assert (audit.who, audit.verb, audit.event_id) == ("ann", "replay", "orders-7-1")

    async def test_a_replay_counts_attempts_from_the_beginning(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 1)
        await Parked(inbox).replay(sequence)
        handler.fails["orders-7-1"] = ValueError("again")
        assert await self.due(inbox, consumer, handler) == ["1 retry"]
        assert (await self.only(inbox, consumer)).head.attempts == 1

    async def test_replay_brings_forward_what_is_waiting(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("not yet")
        await inbox.apply(consumer, messages(1), handler)
        handler.fails.clear()
        await Parked(inbox).replay((await self.only(inbox, consumer)).sequence)
        assert await self.due(inbox, consumer, handler) == ["1 applied"]

    async def test_a_gap_is_not_replayed(self, inbox: Any, consumer: str, handler: Handler) -> None:
        await inbox.apply(consumer, messages(1, 4), handler)
        with pytest.raises(SettingsError, match="numbers 2 to 3"):
            await Parked(inbox).replay((await self.only(inbox, consumer)).sequence)
        assert await self.due(inbox, consumer, handler) == []

    async def test_an_old_message_without_a_number_is_replayed_only_by_force(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["u"] = PoisonError("bad")
        await inbox.apply(consumer, [message(None, id="u")], handler)
        handler.fails.clear()
        sequence = (await self.only(inbox, consumer)).sequence
        people = Parked(inbox)
        assert (await people.replay(sequence, dry_run=True)).dry_run
        await self.age(inbox, 8 * 24 * HOUR_S)
        with pytest.raises(SettingsError, match="force"):
            await people.replay(sequence)
        assert await self.due(inbox, consumer, handler) == []
        await people.replay(sequence, force=True)
        assert await self.due(inbox, consumer, handler) == ["u applied"]

    async def test_what_is_edited_keeps_its_number_and_its_id(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 1, 2)
        people = Parked(inbox, who="ann")
        await people.edit(sequence, "orders-7-1", '{"n": 99}', dry_run=True)
        assert (await people.show(sequence))[0].message.payload == '{"n": 1}'
        await people.edit(sequence, "orders-7-1", '{"n": 99}', note="typo")
        await people.edit(sequence, "orders-7-2", '{"n":  98}')
        first, second = await people.show(sequence)
        assert (first.message.seq, first.message.id) == (1, "orders-7-1")
        assert (first.message.payload, first.edited) == ('{"n": 99}', 1)
        assert second.message.payload == '{"n":  98}'
        for wrong in ("{", "NaN", "", '"\ud800"'):
            with pytest.raises(SettingsError, match="JSON"):
                await people.edit(sequence, "orders-7-1", wrong)
        with pytest.raises(SettingsError, match="nobody"):
            await people.edit(sequence, "nobody", "{}")
        await people.replay(sequence)
        assert await self.due(inbox, consumer, handler) == ["1 applied", "2 applied"]
        written = [each for each in await self.effects(inbox) if each.startswith(consumer)]
        assert [each.split(" ", 2)[2] for each in written][-2:] == ['{"n": 99}', '{"n":  98}']
        audits = await people.audit(sequence=sequence)
        assert [each.verb for each in audits] == ["replay", "edit", "edit"]
        assert (audits[2].before, audits[2].after) == ('{"n": 1}', '{"n": 99}')
        assert "typo" in audits[2].note

    async def test_a_stand_in_is_one_until_it_is_given_a_payload(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        stand_in = message(1, payload="null", refused='too large: "1 MB"', source="/shop")
        handler.fails[stand_in.id] = PoisonError("it has no payload")
        assert endings(await inbox.apply(consumer, [stand_in, message(2)], handler)) == [
            "poison",
            "behind",
        ]
        people, sequence = Parked(inbox), (await self.only(inbox, consumer)).sequence
        await people.replay(sequence)
        assert await self.due(inbox, consumer, handler) == ["1 poison"]
        assert [each.message.refused for each in await people.show(sequence)] == [
            stand_in.refused,
            "",
        ]
        assert (await self.only(inbox, consumer)).head.message == stand_in
        await people.edit(sequence, stand_in.id, '{"n": 1}')
        given = replace(stand_in, payload='{"n": 1}', refused="")
        assert (await self.only(inbox, consumer)).head.message == given
        handler.fails.clear()
        await people.replay(sequence)
        assert await self.due(inbox, consumer, handler) == ["1 applied", "2 applied"]

    async def test_skip_goes_on_without_the_first(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 2, 3, 5)
        people = Parked(inbox)
        with pytest.raises(SettingsError, match="orders-7-2"):
            await people.skip(sequence, "orders-7-3")
        told = await people.skip(sequence, dry_run=True)
        assert "orders-7-2" in told.told
        assert len(await people.show(sequence)) == 3
        await people.skip(sequence, "orders-7-2")
        assert await self.due(inbox, consumer, handler) == ["3 applied"]
        assert (await self.only(inbox, consumer)).head.why == "gap"
        assert endings(await inbox.apply(consumer, messages(2, 4), handler)) == ["seen", "applied"]
        assert await self.due(inbox, consumer, handler) == ["5 applied"]
        [audit] = await people.audit(sequence=sequence)
        assert (audit.verb, audit.event_id, audit.before) == ("skip", "orders-7-2", '{"n": 2}')
        self.check(
            [s for s in await self.stands(inbox) if s != "7:2"], ["7:1", "7:3", "7:4", "7:5"]
        )

    async def test_skip_goes_on_without_what_never_came(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await inbox.apply(consumer, messages(1, 4, 5), handler)
        sequence = (await self.only(inbox, consumer)).sequence
        assert "numbers 2 to 3" in (await Parked(inbox).skip(sequence)).told
        assert await self.due(inbox, consumer, handler) == ["4 applied", "5 applied"]
        assert endings(await inbox.apply(consumer, messages(2, 3), handler)) == ["seen", "seen"]

    async def test_what_may_run_after_a_skip_is_not_skipped_unless_it_is_named(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await inbox.apply(consumer, messages(1, 3, 4), handler)
        people = Parked(inbox)
        sequence = (await self.only(inbox, consumer)).sequence
        assert f"runs when a worker of {consumer} does" in (await people.skip(sequence)).told
        assert (await self.only(inbox, consumer)).head.why == "retry"
        for dry_run in (True, False):
            with pytest.raises(SettingsError, match="orders-7-3"):
                await people.skip(sequence, dry_run=dry_run)
        await people.skip(sequence, "orders-7-3")
        assert (await self.only(inbox, consumer)).head.why == "retry"
        with pytest.raises(SettingsError, match="orders-7-4"):
            await people.skip(sequence)
        assert await self.due(inbox, consumer, handler) == ["4 applied"]
        assert [each.event_id for each in await people.audit(sequence=sequence)] == [
            "orders-7-3",
            "orders-7-3",
        ]

    async def test_what_was_replayed_is_not_skipped_unless_it_is_named_or_fails_again(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 1)
        people = Parked(inbox)
        await people.replay(sequence)
        with pytest.raises(SettingsError, match=f"a worker of {consumer}"):
            await people.skip(sequence)
        handler.fails["orders-7-1"] = ValueError("again")
        assert await self.due(inbox, consumer, handler) == ["1 retry"]
        assert "orders-7-1" in (await people.skip(sequence)).told

    async def test_a_named_message_is_skipped_with_what_never_came(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        await inbox.apply(consumer, messages(1, 4, 5), handler)
        sequence = (await self.only(inbox, consumer)).sequence
        await Parked(inbox).skip(sequence, "orders-7-4")
        assert await self.due(inbox, consumer, handler) == ["5 applied"]
        assert await self.stands(inbox) == ["7:1", "7:5"]

    async def test_a_message_without_a_number_that_is_skipped_is_not_run_when_it_comes_again(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["u"] = PoisonError("bad")
        await inbox.apply(consumer, [message(None, id="u")], handler)
        handler.fails.clear()
        await Parked(inbox).skip((await self.only(inbox, consumer)).sequence)
        done = await inbox.apply(consumer, [message(None, id="u")], handler)
        assert endings(done) == ["seen"]

    async def test_all_of_a_kind_are_replayed_and_what_cannot_be_is_told(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        batch = [message(1, str(n)) for n in range(4)]
        handler.fails = {each.id: PoisonError("bad") for each in batch}
        await inbox.apply(consumer, [*batch, message(3, "9")], handler)
        handler.fails.clear()
        people = Parked(inbox)
        dry = await people.replay_all(consumer=consumer, state=None, dry_run=True)
        assert [isinstance(each, SettingsError) for each in dry].count(True) == 1
        assert len(dry) == 5
        assert await self.due(inbox, consumer, handler) == []
        assert len(await people.replay_all(consumer=consumer)) == 4
        assert await self.due(inbox, consumer, handler) == ["1 applied"] * 4

    @where(_side_by_side)
    async def test_what_is_edited_while_it_runs_is_run_again_as_edited(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 1)
        await Parked(inbox).replay(sequence)
        other = Parked(self.another(inbox))
        handler.before["orders-7-1"] = lambda: other.edit(sequence, "orders-7-1", '{"n": 99}')
        ran = await self.due(inbox, consumer, handler)
        ran += await self.due(inbox, consumer, handler)
        assert ran == ["1 applied"]
        written = [each for each in await self.effects(inbox) if each.startswith(consumer)]
        assert written[-1].endswith('{"n": 99}')
        assert len(written) == 1 or not self.takes_back

    @where(_side_by_side)
    async def test_what_is_skipped_while_it_runs_has_no_effect(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        sequence = await self.parked(inbox, consumer, handler, 1, 2)
        await Parked(inbox).replay(sequence)
        other = Parked(self.another(inbox))
        handler.before["orders-7-1"] = lambda: other.skip(sequence, "orders-7-1")
        ran = await self.due(inbox, consumer, handler)
        ran += await self.due(inbox, consumer, handler)
        assert ran == ["2 applied"]
        assert not self.takes_back or await self.stands(inbox) == ["7:2"]

    @where(_side_by_side)
    async def test_a_replay_while_it_fails_is_not_lost(
        self, inbox: Any, consumer: str, handler: Handler
    ) -> None:
        handler.fails["orders-7-1"] = ValueError("not yet")
        await inbox.apply(consumer, messages(1), handler)
        sequence = (await self.only(inbox, consumer)).sequence
        await self.later(inbox, consumer, handler)
        await self.age(inbox, 100 * HOUR_S)
        other = Parked(self.another(inbox))
        handler.before["orders-7-1"] = lambda: other.replay(sequence)
        await self.due(inbox, consumer, handler)
        assert (await self.only(inbox, consumer)).head.attempts <= 1

    # --- all of it --------------------------------------------------------------------------

    @pytest.mark.parametrize("seed", range(2))
    async def test_whatever_comes_ends_once_and_in_order(
        self, inbox: Any, consumer: str, handler: Handler, seed: int
    ) -> None:
        """Deliveries doubled, mixed and failing: in the end everything, once, in order."""
        dice = random.Random(seed)  # noqa: S311 - the same dice every time
        wanted = [message(seq, str(n)) for n in range(4) for seq in range(1, 9)]
        deliveries = [*wanted, *dice.sample(wanted, 10)]
        dice.shuffle(deliveries)
        while deliveries:
            handler.fails = {each.id: ValueError("x") for each in dice.sample(wanted, 4)}
            batch = [deliveries.pop() for _ in range(min(len(deliveries), dice.randint(1, 9)))]
            await inbox.apply(consumer, batch, handler, singly=dice.random() < 0.2)
            if dice.random() < 0.3:
                await self.later(inbox, consumer, handler)
        handler.fails.clear()
        await Parked(inbox).replay_all(consumer=consumer)
        await self.later(inbox, consumer, handler)
        assert list(await Parked(inbox).list(consumer=consumer)) == []
        stands = await self.stands(inbox)
        for n in range(4):
            mine = [each for each in stands if each.startswith(f"{n}:")]
            assert list(dict.fromkeys(mine)) == [f"{n}:{seq}" for seq in range(1, 9)]
            assert len(mine) == 8 or not self.takes_back
