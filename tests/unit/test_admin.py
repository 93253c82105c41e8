"""The admin flows, on the memory store with a clock of our own."""

from __future__ import annotations

import dataclasses
import time
from datetime import timedelta

import pytest

from semel import admin, idempotent, once, step
from semel.admin import Admin, Changed, Recovered, Refused, Retry
from semel.codec import EncodingError
from semel.colour import ASYNC, SYNC, run
from semel.errors import (
    CorruptRecordError,
    OutcomeUnknownError,
    ResultLostError,
    SettingsError,
)
from semel.keys import HTTP, make_key, new_attempt
from semel.stores.memory import MemoryStore
from semel.stores.rules import PAST_KEPT
from semel.testing.clock import FakeClock
from semel.values import Key, Outcome, State, Terms, Won

HOLD = Terms(takeover=False, hold=True)


class DeclinedError(Exception):
    pass


class KeyboardBreak(BaseException):
    pass


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return MemoryStore(clock=clock)


@pytest.fixture
def desk(store):
    return Admin(store)


@pytest.fixture
def ledger(store):
    return store.ledger(SYNC)


def claim(ledger, key="invoice:7", *, terms=None, **identity):
    answer = run(
        ledger.claim(make_key(key, **identity), attempt=new_attempt(), terms=terms or Terms())
    )
    assert isinstance(answer, Won)
    return answer.claim


def complete(ledger, claimed, data=b'"paid"', kind="value"):
    run(ledger.complete(claimed, Outcome(kind, data)))


# --- explain ------------------------------------------------------------------------------------


def test_nothing_recorded_is_no_story(desk):
    assert desk.explain("invoice:7") is None


def test_a_completed_call_is_told_with_its_result_and_replays(desk, store):
    @idempotent(store=store, key="invoice:{number}")
    def pay(number):
        return {"paid": number}

    pay(7)
    story = desk.explain("invoice:7")

    assert story.record.state is State.COMPLETED
    assert story.outcome.value == {"paid": 7}
    assert story.outcome.text == "{'paid': 7}"
    assert story.lease_left_s is None
    assert [(t.number, t.ending) for t in story.tries] == [(1, "completed")]
    assert story.tries[0].ended_at == story.record.completed_at
    assert story.tries[0].holder == story.record.holder
    assert story.next_call.does == "replay"
    assert "gets the recorded result, until 20" in story.next_call.sentence


def test_a_result_kept_for_ever_says_so(desk, ledger):
    complete(ledger, claim(ledger, terms=Terms(ttl_s=None)))

    assert "for ever" in desk.explain("invoice:7").next_call.sentence


def test_a_running_call_is_busy_until_its_lease_ends(desk, ledger, clock):
    claim(ledger, terms=Terms(lease_s=30))
    clock.advance(10)

    story = desk.explain("invoice:7")

    assert story.lease_left_s == 20
    assert story.tries[-1].ending == "running"
    assert story.tries[-1].ended_at is None
    assert story.next_call.does == "busy"
    assert story.record.holder in story.next_call.sentence


def test_a_vanished_call_is_taken_over(desk, ledger, clock):
    claim(ledger, terms=Terms(lease_s=30))
    clock.advance(45)

    story = desk.explain("invoice:7")

    assert story.lease_left_s == -15
    assert story.tries[-1].ending == "nobody knows"
    assert story.next_call.does == "take over"


def test_a_held_call_that_vanished_is_unknown(desk, ledger, clock):
    claim(ledger, terms=HOLD)
    clock.advance(45)

    story = desk.explain("invoice:7")

    assert story.record.state is State.UNKNOWN
    assert story.next_call.does == "unknown"
    assert "resolve it" in story.next_call.sentence


@pytest.mark.parametrize("terms", [Terms(lease_s=30), HOLD])
def test_the_stores_clock_decides_over_a_lease(desk, ledger, clock, terms):
    assert abs(clock.now_us() / 1e6 - time.time()) > 86_400, "or ours would do as well"
    claim(ledger, terms=terms)

    story = desk.explain("invoice:7")

    assert story.next_call.does == "busy"
    assert story.tries[-1].ending == "running"
    assert story.lease_left_s == 30


def test_a_failed_call_runs_again_without_its_steps(desk, store):
    @idempotent(store=store, key="invoice:{number}")
    def pay(number):
        step("reserve", lambda: (number, "reserved"))
        raise DeclinedError("no funds")

    with pytest.raises(DeclinedError):
        pay(7)
    story = desk.explain("invoice:7")

    assert story.record.state is State.FAILED
    assert story.steps["reserve"].value == (7, "reserved")
    assert [t.ending for t in story.tries] == ["failed: DeclinedError: no funds"]
    assert story.next_call.does == "run"
    assert "reserve" in story.next_call.sentence


def test_every_attempt_is_told_in_order(desk, ledger, clock):
    first = claim(ledger)
    run(ledger.release(first, error="no funds"))
    second = claim(ledger)
    clock.advance(60)
    third = claim(ledger)

    story = desk.explain("invoice:7")

    assert [t.number for t in story.tries] == [1, 2, 3]
    assert [t.fence for t in story.tries] == [first.fence, second.fence, third.fence]
    assert [t.ending for t in story.tries] == ["failed: no funds", "lease ran out", "running"]
    assert story.forgotten == 0


def test_attempts_that_are_no_longer_kept_are_counted(desk, ledger):
    for _ in range(PAST_KEPT + 4):
        run(ledger.release(claim(ledger)))

    story = desk.explain("invoice:7")

    assert len(story.tries) == PAST_KEPT
    assert story.forgotten == 4


def test_a_recorded_error_is_shown_as_itself(desk, store):
    @idempotent(store=store, key="invoice:{number}", on_failure="lock")
    def pay(number):
        raise LookupError("no funds")

    with pytest.raises(LookupError):
        pay(7)
    story = desk.explain("invoice:7")

    assert isinstance(story.outcome.value, LookupError)
    assert story.outcome.text == "builtins:LookupError: no funds"
    assert story.tries[-1].ending == "failed for good"
    assert "gets the recorded error" in story.next_call.sentence


def test_an_error_of_a_class_that_is_not_loaded_keeps_its_name(desk, ledger):
    data = b'{"type":"shop.errors:DeclinedError","message":"no funds"}'
    complete(ledger, claim(ledger), data, kind="error")

    assert desk.explain("invoice:7").outcome.text == "shop.errors:DeclinedError: no funds"


def test_a_lost_result_says_why(desk, store):
    @idempotent(store=store, key="invoice:{number}")
    def pay(number):
        return object()

    pay(7)
    story = desk.explain("invoice:7")

    assert not story.outcome.text.startswith("b'")
    assert "ResultLostError" in story.next_call.sentence
    with pytest.raises(ResultLostError):
        pay(7)


def test_a_lost_step_says_why(desk, store):
    @idempotent(store=store, key="invoice:{number}")
    def pay(number):
        step("connect", object)

    pay(7)

    assert desk.explain("invoice:7").steps["connect"].kind == "lost"


@pytest.mark.parametrize("kind", ["value", "error", "lost"])
def test_bytes_that_cannot_be_read_are_shown_as_they_are(desk, ledger, kind):
    complete(ledger, claim(ledger), b"\xff\x00", kind=kind)

    reading = desk.explain("invoice:7").outcome

    assert not reading.decoded
    assert reading.text == r"b'\xff\x00'"
    assert reading.data == b"\xff\x00"


def test_a_step_without_a_tag_is_shown_as_it_is(desk, ledger):
    run(ledger.note(claim(ledger), "odd", b"?odd"))

    assert desk.explain("invoice:7").steps["odd"].text == "b'?odd'"


def test_a_value_whose_repr_fails_is_shown_as_bytes(desk, ledger):
    class Sulky:
        def __repr__(self):
            raise RuntimeError

    class Codec:
        def encode(self, value):
            raise NotImplementedError

        def decode(self, data):
            return Sulky()

    complete(ledger, claim(ledger), b"1")

    assert run(admin.explain(ledger, "invoice:7", codec=Codec())).outcome.text == "b'1'"


# --- finding a key ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identity",
    [
        {},
        {"tenant": "acme"},
        {"version": "2"},
        {"operation": "pay", "per_operation": True},
    ],
    ids=str,
)
def test_a_key_is_found_by_text_by_key_and_by_id(desk, ledger, identity):
    key = claim(ledger, **identity).key

    assert desk.explain("invoice:7", **identity).record.key == key
    assert desk.explain(key).record.key == key
    assert desk.explain(key.id.hex()).record.key == key
    assert desk.explain(key.id.hex().upper()).record.key == key


def test_a_key_of_a_request_is_found_with_http(desk, ledger):
    key = claim(ledger, tenant="acme", version=HTTP).key

    assert desk.explain("invoice:7", tenant="acme", http=True).record.key == key
    assert desk.explain("invoice:7", tenant="acme") is None
    assert desk.explain(key, http=True).record.key == key
    assert desk.resolve("invoice:7", Retry(), tenant="acme", http=True).why
    assert desk.forget("invoice:7", tenant="acme", http=True, force=True)


def test_a_key_of_a_request_has_no_version(desk):
    for verb in (desk.explain, desk.forget):
        with pytest.raises(SettingsError, match="leave one of them out"):
            verb("invoice:7", version="2", http=True)


def test_keys_of_bytes_and_of_guarded_functions_are_found(desk, ledger, store):
    @idempotent(store=store)
    def pay(number):
        return number

    pay(7)
    claim(ledger, b"\xff")

    assert desk.explain(pay.key_for(7)).outcome.value == 7
    assert desk.explain(b"\xff").record.key.text == r"\xff"


def test_another_tenants_key_is_not_found(desk, ledger):
    claim(ledger, tenant="acme")

    assert desk.explain("invoice:7") is None
    assert desk.explain("invoice:7", tenant="other") is None


def test_a_text_that_reads_like_an_id_is_a_text(desk, ledger):
    text = "ab" * 32
    claim(ledger, text)

    assert desk.explain(text).record.key.text == text


def test_a_text_that_is_anothers_id_is_refused_and_nothing_is_deleted(desk, ledger):
    victim = claim(ledger, "invoice:7").key
    decoy = claim(ledger, victim.id.hex()).key

    for verb in (desk.explain, desk.forget):
        with pytest.raises(SettingsError, match="the text of one key and the id of another"):
            verb(victim.id.hex())

    assert desk.explain(decoy).record.key == decoy
    assert desk.explain(Key(victim.id, "")).record.key == victim


# --- records ------------------------------------------------------------------------------------


def test_records_are_filtered_and_paged(desk, ledger):
    for number in range(5):
        complete(ledger, claim(ledger, f"invoice:{number}", tenant="acme", operation="pay"))
    claim(ledger, "other", operation="refund")

    done = desk.records(tenant="acme", operation="pay", state="completed", limit=3)
    rest = desk.records(tenant="acme", after=done[-1])

    assert len(done) == 3
    assert len(rest) == 2
    assert desk.records(tenant="acme", after=done[-1].key.id) == rest
    assert [r.key.text for r in desk.records(state=State.PENDING)] == ["other"]


def test_a_state_or_limit_that_cannot_be_is_refused(desk):
    with pytest.raises(SettingsError, match="choose one of PENDING, COMPLETED, FAILED, UNKNOWN"):
        desk.records(state="open")
    with pytest.raises(SettingsError, match="limit=0"):
        desk.records(limit=0)


# --- resolve ------------------------------------------------------------------------------------


@pytest.fixture
def pay(store):
    """A guarded call that was cut off in the middle."""
    ran = []

    @idempotent(store=store, key="invoice:{number}", on_crash="hold")
    def pay(number):
        ran.append(number)
        if len(ran) == 1:
            raise KeyboardBreak
        return "paid at last"

    with pytest.raises(KeyboardBreak):
        pay(7)
    with pytest.raises(OutcomeUnknownError):
        pay(7)
    return pay


@pytest.mark.parametrize("value", [{"id": "ch_1"}, None, (1, 2)])
def test_settled_with_a_value_it_replays_that_value(desk, pay, value):
    assert desk.resolve("invoice:7", Recovered(value)) == Changed()

    assert pay(7) == value


def test_settled_with_an_error_it_raises_that_error(desk, pay):
    assert desk.resolve("invoice:7", DeclinedError("no funds"))

    with pytest.raises(DeclinedError, match="no funds"):
        pay(7)


def test_settled_with_retry_it_runs(desk, pay):
    assert desk.resolve("invoice:7", Retry())

    assert desk.explain("invoice:7").tries[-1].ending == "resolved by hand: let it run again"
    assert pay(7) == "paid at last"


def test_a_settlement_is_kept_for_its_ttl(desk, pay, clock):
    desk.resolve("invoice:7", Recovered("paid"), ttl=timedelta(hours=1))
    clock.advance(3601)

    assert desk.explain("invoice:7") is None


def test_a_settlement_may_be_kept_for_ever(desk, pay):
    desk.resolve("invoice:7", Recovered("paid"), ttl=None)

    assert desk.explain("invoice:7").record.expires_at is None


def test_a_plain_orphan_can_be_settled_too(desk, ledger, clock):
    claim(ledger, terms=Terms(lease_s=30))
    clock.advance(31)

    assert desk.resolve("invoice:7", Recovered("paid"))


def test_settling_nothing_is_refused(desk):
    answer = desk.resolve("invoice:7", Retry(), tenant="acme")

    assert isinstance(answer, Refused)
    assert not answer
    assert answer.missing
    assert "nothing is recorded for 'invoice:7' of tenant 'acme'" in answer.why
    assert "http=True if it came in a request" in answer.why
    assert "--" not in answer.why


def test_settling_a_live_attempt_is_refused(desk, ledger):
    claim(ledger)

    answer = desk.resolve("invoice:7", Retry())

    assert not answer.missing
    assert "only an attempt whose lease has run out can be settled" in answer.why


def test_settling_what_is_settled_is_refused(desk, pay):
    desk.resolve("invoice:7", Recovered("paid"))

    answer = desk.resolve("invoice:7", Recovered("twice"))

    assert "has an outcome already" in answer.why
    assert pay(7) == "paid"


def test_settling_what_failed_is_refused(desk, ledger):
    run(ledger.release(claim(ledger)))

    assert "the next call runs it again" in desk.resolve("invoice:7", Recovered(1)).why


def test_an_attempt_that_nobody_looked_at_is_not_settled(desk, ledger, clock):
    seen = claim(ledger)
    clock.advance(60)
    claim(ledger)
    clock.advance(60)

    answer = desk.resolve("invoice:7", Recovered("paid"), fence=seen.fence)

    assert "has moved on: attempt 2" in answer.why
    assert desk.explain("invoice:7").outcome is None


def test_a_record_that_vanishes_meanwhile_is_missing(desk, ledger, clock, monkeypatch):
    claim(ledger)
    clock.advance(60)

    async def swept(id, **_):
        await ledger.forget(id)
        return False

    monkeypatch.setattr(ledger, "resolve", swept)

    assert desk.resolve("invoice:7", Retry()).missing


def test_a_settlement_that_cannot_be_stored_is_an_error_before_anything_changes(desk, pay):
    with pytest.raises(EncodingError):
        desk.resolve("invoice:7", Recovered(object()))
    with pytest.raises(SettingsError, match="settles nothing"):
        desk.resolve("invoice:7", "paid")
    with pytest.raises(SettingsError, match="ttl"):
        desk.resolve("invoice:7", Retry(), ttl=0)

    assert desk.explain("invoice:7").record.state is State.UNKNOWN


# --- forget, sweep, guarantees ------------------------------------------------------------------


def test_a_forgotten_key_runs_again(desk, store):
    with once("invoice:7", store=store):
        pass

    assert desk.forget("invoice:7") == Changed()

    with once("invoice:7", store=store):
        pass


def test_a_live_record_is_forgotten_by_force_only(desk, ledger):
    claim(ledger)

    answer = desk.forget("invoice:7")

    assert "use force" in answer.why
    assert desk.forget("invoice:7", force=True)
    assert desk.forget("invoice:7").missing


def test_a_record_that_cannot_be_read_can_be_forgotten(desk, ledger, monkeypatch):
    key = claim(ledger).key

    async def unreadable(id):
        raise CorruptRecordError("not ours")

    monkeypatch.setattr(ledger, "look", unreadable)

    assert desk.forget(key, force=True)


def test_an_unreadable_record_counts_when_a_text_may_be_an_id(desk, ledger, monkeypatch):
    async def unreadable(id):
        raise CorruptRecordError("not ours")

    monkeypatch.setattr(ledger, "look", unreadable)

    with pytest.raises(SettingsError, match="the text of one key"):
        desk.forget("ab" * 32)


def swept_in(chunks):
    class Ledger:
        def __init__(self):
            self.asked = []

        async def sweep(self, limit):
            self.asked.append(limit)
            return chunks.pop(0)

    return Ledger()


def test_sweeping_goes_on_until_nothing_is_left():
    ledger = swept_in([10, 3, 10, 0])

    assert run(admin.sweep(ledger, limit=10)) == 23
    assert ledger.asked == [10, 10, 10, 10]


def test_sweeping_one_chunk():
    assert run(admin.sweep(swept_in([10, 10]), all=False, limit=10)) == 10


def test_sweeping_deletes_what_has_expired(desk, ledger, clock):
    for number in range(5):
        complete(ledger, claim(ledger, str(number)))
    clock.advance(90_000)

    assert desk.sweep(limit=2) == 5
    with pytest.raises(SettingsError, match="limit"):
        desk.sweep(limit=0)


def test_guarantees_are_the_stores(desk):
    assert desk.guarantees().store == "memory"


# --- both colours, and who closes ---------------------------------------------------------------


async def test_async_code_awaits_the_same_flows(store, clock):
    @idempotent(store=store, key="invoice:{number}")
    async def pay(number):
        return "paid"

    await pay(7)
    ledger = store.ledger(ASYNC)

    story = await admin.explain(ledger, "invoice:7")
    assert story.outcome.value == "paid"
    assert [r.key for r in await admin.records(ledger)] == [story.record.key]
    assert (await admin.resolve(ledger, "invoice:7", Retry())).why
    assert await admin.forget(ledger, "invoice:7")
    assert await admin.sweep(ledger) == 0
    assert (await admin.guarantees(ledger)).store == "memory"


def test_a_store_opened_by_url_is_closed_at_the_end(monkeypatch):
    closed = []

    def close(self):
        closed.append(self)

    monkeypatch.setattr(MemoryStore, "close", close)

    with Admin("memory://"):
        pass
    with Admin(MemoryStore()):
        pass

    assert len(closed) == 1


def test_stories_are_values(desk, ledger):
    claim(ledger)

    assert desk.explain("invoice:7") == desk.explain("invoice:7")
    with pytest.raises(dataclasses.FrozenInstanceError):
        desk.explain("invoice:7").forgotten = 1
