"""The guard where calls, arguments, results and errors are odd: rows of tests/edges.toml."""

from __future__ import annotations

import asyncio
import collections
import functools
import inspect
import io
import json
import logging
import time
import traceback
import types
import typing
from dataclasses import dataclass
from decimal import Decimal

import pytest

from semel import (
    ClaimLostError,
    DuplicateExecutionError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ReplayedError,
    ResultLostError,
    SettingsError,
    current,
    idempotent,
    once,
    step,
)
from semel.colour import SYNC, run
from semel.keys import make_key, new_attempt
from semel.stores.memory import MemoryStore
from semel.stores.rules import PAST_KEPT
from semel.testing.clock import FakeClock
from semel.values import Kept, Lost, Outcome, State, Terms, Won


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return MemoryStore(clock=clock)


@pytest.fixture
def calls():
    return []


def look(store, key="k"):
    return run(store.ledger(SYNC).look(make_key(key).id))


def everything(store):
    return run(store.ledger(SYNC).records())


# --- which calls are the same -------------------------------------------------------------------


def order(a, b=2, *rest, c=3, **more):
    return (a, b, rest, c, tuple(sorted(more)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (((1,), {}), ((1, 2), {"c": 3})),
        (((1,), {}), ((), {"c": 3, "b": 2, "a": 1})),
        (((1, 2, 9), {"x": 1, "y": 2}), ((1, 2, 9), {"y": 2, "x": 1})),
    ],
)
def test_one_call_in_two_spellings_runs_once(store, calls, one, other):
    fn = idempotent(store=store)(order)
    assert fn.key_for(*one[0], **one[1]) == fn.key_for(*other[0], **other[1])
    assert fn(*one[0], **one[1]) == fn(*other[0], **other[1])
    assert len(everything(store)) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [1, True, 1.0, "1", b"1", Decimal(1), [1], (1,), {1}],
        [{1: "x"}, {"1": "x"}, {True: "x"}],
        [0.0, -0.0, float("nan"), "nan", None, ""],
        [10**5000, 10**5000 + 1, -(10**5000)],
        ["\u00e9", "e\u0301"],
    ],
    ids=["ones", "dict keys", "zeros", "huge", "unicode"],
)
def test_arguments_that_python_calls_equal_are_not_one_call(store, calls, arguments):
    @idempotent(store=store)
    def work(x):
        calls.append(x)
        return len(calls)

    for expected, argument in enumerate(arguments, 1):
        assert work(argument) == expected
        assert work(argument) == expected
    assert len(calls) == len(arguments)


def test_a_default_counts_as_if_it_were_written_out(store):
    def old(order, currency="EUR"): ...

    def new(order, currency="USD"): ...

    before = idempotent(store=store, operation="pay")(old)
    after = idempotent(store=store, operation="pay")(new)
    assert before.key_for(1) == after.key_for(1, "EUR")
    assert before.key_for(1) != after.key_for(1)


def test_a_mutable_default_counts_as_it_stands_at_the_call(store, calls):
    @idempotent(store=store)
    def work(items=[]):  # noqa: B006
        items.append(len(items))
        calls.append(list(items))
        return list(items)

    assert work() == [0]
    assert work([]) == [0]  # the same arguments as the first call had
    assert work() == [0, 1]  # the default has changed meanwhile
    assert calls == [[0], [0, 1]]


def test_a_partial_counts_with_what_it_holds(store, calls):
    def pay(shop, order, note=""):
        calls.append((shop, order))
        return shop, order

    one = idempotent(store=store)(functools.partial(pay, "one"))
    two = idempotent(store=store)(functools.partial(pay, "two", note=""))
    whole = idempotent(store=store)(pay)
    assert one(1) == one(order=1) == whole("one", 1) == ("one", 1)
    assert two(1) == ("two", 1)
    assert calls == [("one", 1), ("two", 1)]


async def test_an_async_partial_is_awaited(store, calls):
    async def pay(shop, order):
        calls.append(order)
        return order

    fn = idempotent(store=store)(functools.partial(pay, "shop"))
    assert await fn(1) == await fn(1) == 1
    assert calls == [1]


@dataclass
class Till:
    name: str

    def __call__(self, order):
        return self.name, order


class Sender:
    async def __call__(self, order):
        return order


async def test_a_callable_object_is_guarded_with_its_state(store):
    one, two = (idempotent(store=store)(Till(name)) for name in ("a", "b"))
    assert one(1) == one(1) == ("a", 1)
    assert two(1) == ("b", 1)
    send = idempotent(store=store, key="s:{order}")(Sender())
    assert await send(1) == await send(1) == 1
    assert len(everything(store)) == 3


def test_a_lambda_needs_a_name(store):
    with pytest.raises(SettingsError, match="operation="):
        idempotent(store=store)(lambda: 1)
    with pytest.raises(SettingsError, match="operation="):
        idempotent(store=store, key="k")(functools.partial(lambda x: x, 1))
    assert idempotent(store=store, operation="one")(lambda: 1)() == 1


def made(factor):
    def scaled(x):
        return x * factor

    return scaled


def test_a_local_function_goes_by_its_place_and_what_it_captured_is_no_argument(store):
    double = idempotent(store=store)(made(2))
    triple = idempotent(store=store)(made(3))
    assert double.key_for(5).operation.endswith("made.<locals>.scaled")
    assert double.key_for(5) == triple.key_for(5)
    apart = idempotent(store=store, operation="triple")(made(3))
    assert (double(5), triple(5), apart(5)) == (10, 10, 15)


def test_functions_of_one_name_in_two_modules_keep_apart(store):
    pays = []
    for name in ("billing", "payroll"):
        module = types.ModuleType(name)
        exec(f"def pay(n): return '{name}'", module.__dict__)
        pays.append(idempotent(store=store)(module.pay))
    assert [pay(1) for pay in pays] == ["billing", "payroll"]
    assert pays[0].key_for(1) != pays[1].key_for(1)


def test_a_renamed_function_keeps_its_records_under_its_operation(store, calls):
    def old_name(n):
        calls.append(n)
        return n

    def new_name(n):
        calls.append(n)
        return n

    assert idempotent(store=store, operation="pay")(old_name)(1) == 1
    assert idempotent(store=store, operation="pay")(new_name)(1) == 1
    assert calls == [1]


def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


def counted(calls):
    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(*args, **kwargs):
            calls.append("counted")
            return fn(*args, **kwargs)

        return wrapper

    return decorate


def test_other_decorators_above_and_below(store, calls):
    def pay(order, amount=5):
        calls.append("pay")
        return order

    above = counted(calls)(idempotent(store=store)(pay))
    below = idempotent(store=store)(counted(calls)(pay))
    assert above("o") == above(order="o", amount=5) == "o"
    assert calls == ["counted", "pay", "counted"]
    assert below.key_for("o") == above.key_for("o")
    assert below("o") == "o"
    assert len(calls) == 3


async def test_a_sync_decorator_between_guard_and_async_function_is_refused(store):
    @idempotent(store=store)
    @logged
    async def pay():
        return 1

    with pytest.raises(SettingsError, match="has not run yet"):
        pay()


class Account:
    def __init__(self, number):
        self.number = number

    def __idempotency_key__(self):
        return self.number


class Savings(Account):
    pass


def test_instances_and_subclasses_keep_apart(store, calls):
    @idempotent(store=store)
    def close(self, day):
        calls.append((type(self).__name__, self.number, day))

    Account.close = Savings.close = close
    for account in (Account(1), Account(2), Savings(1), Account(1), Savings(1)):
        account.close("monday")
    assert calls == [("Account", 1, "monday"), ("Account", 2, "monday"), ("Savings", 1, "monday")]


@dataclass
class Drawer:
    name: str

    def pay(self, order):
        return self.name, order


def test_a_dataclass_counts_with_its_fields(store):
    pay = idempotent(store=store)(Drawer.pay)
    assert pay(Drawer("a"), 1) == pay(Drawer("a"), 1) == ("a", 1)
    assert pay(Drawer("b"), 1) == ("b", 1)


@pytest.mark.parametrize("broken", ["key", "scope", "fingerprint"])
def test_a_setting_that_raises_is_the_callers_error_and_nothing_runs(store, calls, broken):
    def fails(*args):
        raise LookupError("no such order")

    settings = {"key": "k", "scope": "t", broken: fails}

    @idempotent(store=store, **settings)
    def work(n):
        calls.append(n)

    with pytest.raises(LookupError, match="no such order"):
        work(1)
    assert calls == []
    assert not everything(store)


def test_a_key_that_looks_like_two_does_not_become_one(store, calls):
    @idempotent(store=store, key="{a}:{b}", fingerprint=None)
    def work(a, b):
        calls.append((a, b))
        return a, b

    assert work("x:y", "z") == ("x:y", "z")
    assert work("x", "y:z") == ("x", "y:z")
    assert len(calls) == 2


def test_with_a_key_arguments_stay_out_of_the_record_unless_the_key_names_them(store):
    @idempotent(store=store, key="order:{order}")
    def charge(order, card):
        return True

    charge(7, "4111 1111 1111 1111")
    assert "4111" not in repr(everything(store))


def test_ordinary_calls_log_nothing(store, caplog):
    caplog.set_level(logging.DEBUG)

    @idempotent(store=store, key="card:{card}", on_duplicate="wait")
    def pay(card, amount=1):
        if amount < 0:
            raise ValueError(card)
        return card

    pay("4111")
    pay("4111")
    with pytest.raises(IdempotencyConflictError):
        pay("4111", 2)
    with pytest.raises(ValueError):
        pay("4222", -1)
    assert [r for r in caplog.records if r.name == "semel"] == []


# --- what comes back ----------------------------------------------------------------------------


@dataclass
class Receipt:
    total: Decimal


@dataclass
class Refund(Receipt):
    reason: str = ""


class Bill(typing.TypedDict):
    total: int


def gives_less_than_it_says() -> Receipt:
    return Refund(Decimal("1.50"), "broken")


def gives_a_union() -> int | Receipt | None:
    return Receipt(Decimal(1))


def gives_a_typed_dict() -> Bill:
    return {"total": 1}


@pytest.mark.parametrize("fn", [gives_less_than_it_says, gives_a_union, gives_a_typed_dict])
def test_the_value_decides_its_type_not_the_annotation(store, fn):
    guarded = idempotent(store=store)(fn)
    first, again = guarded(), guarded()
    assert first == again
    assert type(first) is type(again)


def test_the_annotations_of_the_function_stay(store):
    guarded = idempotent(store=store)(gives_a_union)
    assert typing.get_type_hints(guarded) == {"return": int | Receipt | None}
    assert inspect.signature(guarded) == inspect.signature(gives_a_union)
    assert guarded.__wrapped__ is gives_a_union


def test_a_replay_is_nobody_elses_object(store):
    @idempotent(store=store)
    def work():
        return {"n": [1]}

    work()["n"].append(2)
    work()["n"].append(3)
    assert work() == {"n": [1]}


def async_generator():
    async def numbers():
        yield 1

    return numbers()


class Awaitable:
    def __await__(self):
        yield


def awaitable():
    return Awaitable()


@pytest.mark.parametrize(
    "unfinished",
    [lambda: (n for n in [1]), async_generator, awaitable],
    ids=["generator", "async generator", "awaitable"],
)
def test_work_that_has_not_run_yet_is_no_result(store, unfinished):
    fn = idempotent(store=store, key="k", operation="o")(unfinished)
    with pytest.raises(SettingsError, match="has not run yet"):
        fn()
    assert look(store).state is State.FAILED


@pytest.mark.parametrize(
    "make",
    [lambda: iter([1]), lambda: map(str, [1]), io.StringIO, lambda: memoryview(b"x"), object],
    ids=["iterator", "map", "file", "memoryview", "object"],
)
def test_what_cannot_be_kept_is_given_once_and_never_made_again(store, calls, make):
    @idempotent(store=store)
    def work():
        calls.append(1)
        return make()

    assert type(work()) is type(make())
    for _ in range(2):
        with pytest.raises(ResultLostError):
            work()
    assert calls == [1]


def test_a_generator_object_that_is_called_is_refused(store):
    class Numbers:
        def __call__(self):
            yield 1

    with pytest.raises(SettingsError, match="has not run yet"):
        idempotent(store=store, key="k")(Numbers())()


class PlainJSON:
    """A codec as a user would write it first: its errors are those of json."""

    def encode(self, value):
        return json.dumps(value).encode()

    def decode(self, data):
        return json.loads(data)


def test_a_codec_that_fails_in_its_own_way_loses_the_result_not_the_effect(store, calls):
    @idempotent(store=store, key="k", codec=PlainJSON())
    def work():
        calls.append(1)
        return object()

    work()
    assert look(store).state is State.COMPLETED
    with pytest.raises(ResultLostError, match="TypeError"):
        work()
    assert calls == [1]


def test_a_step_under_such_a_codec_is_not_repeated(store, calls):
    @idempotent(store=store, key="k", codec=PlainJSON())
    def work():
        step("charge", lambda: calls.append(1) or {1, 2})
        raise ValueError("after the charge")

    with pytest.raises(ValueError, match="after the charge"):
        work()
    with pytest.raises(ResultLostError, match="charge"):
        work()
    assert calls == [1]


class Cut(BaseException):
    pass


class CutCodec(PlainJSON):
    def encode(self, value):
        raise Cut


@pytest.mark.parametrize(("policy", "state"), [("retry", State.FAILED), ("hold", State.UNKNOWN)])
def test_cut_off_while_encoding_follows_the_policy(store, policy, state):
    @idempotent(store=store, key="k", on_crash=policy, codec=CutCodec())
    def work():
        return 1

    with pytest.raises(Cut):
        work()
    assert look(store).state is state
    with pytest.raises(Cut), once("o", store=store, on_crash=policy, codec=CutCodec()):
        pass
    assert look(store, "o").state is state


def test_another_codec_than_the_one_that_wrote(store, calls):
    def work():
        calls.append(1)
        return (1, 2)

    settings = {"store": store, "key": "k", "operation": "o"}
    idempotent(**settings)(work)()

    class Strict(PlainJSON):
        def decode(self, data):
            raise ValueError("not ours \ud800")

    with pytest.raises(ResultLostError, match="not ours"):
        idempotent(**settings, codec=Strict())(work)()
    assert calls == [1]


class Sealed(PlainJSON):
    """Stands for encryption: nothing of the value is readable in the store."""

    def encode(self, value):
        return bytes(byte ^ 0x5A for byte in super().encode(value))

    def decode(self, data):
        return super().decode(bytes(byte ^ 0x5A for byte in data))


def test_a_codec_may_seal_results_and_steps(store):
    @idempotent(store=store, key="k", codec=Sealed())
    def work():
        return [step("s", lambda: "secret one"), "secret two"]

    assert work() == work() == ["secret one", "secret two"]
    assert b"secret" not in look(store).outcome.data
    assert b"secret" not in look(store).steps["s"]


def test_a_class_that_was_renamed_since_is_a_lost_result(store, calls, monkeypatch):
    @idempotent(store=store)
    def work():
        calls.append(1)
        return Receipt(Decimal(1))

    work()
    monkeypatch.delitem(globals(), "Receipt")
    with pytest.raises(ResultLostError, match="renamed"):
        work()
    assert calls == [1]


# --- errors -------------------------------------------------------------------------------------


class ManyError(Exception):
    def __init__(self, code, *, reason, retry):
        super().__init__(f"{code} {reason}")
        self.code, self.reason, self.retry = code, reason, retry


class HoldingError(Exception):
    def __init__(self, thing):
        super().__init__("holds something")
        self.thing = thing


class SilentError(Exception):
    def __str__(self):
        raise RuntimeError("cannot say")


def raising(store, error, **settings):
    @idempotent(store=store, key="k", operation="o", **settings)
    def work():
        raise error

    return work


def test_a_locked_error_with_many_arguments_comes_back_whole(store):
    work = raising(store, ManyError(7, reason="no", retry=False), on_failure="lock")
    for _ in range(2):
        with pytest.raises(ManyError) as caught:
            work()
        assert (caught.value.code, caught.value.reason, caught.value.retry) == (7, "no", False)


@pytest.mark.parametrize(
    "error",
    [
        HoldingError(object()),
        ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
        type("Local", (Exception,), {})("local"),
        SilentError(),
    ],
    ids=["unpicklable", "group", "not importable", "no message"],
)
def test_a_locked_error_that_cannot_be_rebuilt_is_replayed_by_name(store, error):
    work = raising(store, error, on_failure="lock")
    with pytest.raises(type(error)) as first:
        work()
    assert first.value is error
    for _ in range(2):
        with pytest.raises(ReplayedError) as caught:
            work()
        assert caught.value.type_path.endswith(type(error).__qualname__)


@pytest.mark.parametrize("error", [HoldingError(object()), SilentError(), MemoryError()])
def test_any_error_unlocks_and_is_the_callers_own(store, error):
    work = raising(store, error)
    with pytest.raises(type(error)) as caught:
        work()
    assert caught.value is error
    assert look(store).state is State.FAILED
    assert look(store).error.startswith(type(error).__name__)


def test_a_locked_error_keeps_its_cause_as_text(store):
    @idempotent(store=store, on_failure="lock")
    def work():
        raise ValueError("outer") from KeyError("inner")

    for kind in (KeyError, ReplayedError):
        with pytest.raises(ValueError, match="outer") as caught:
            work()
        assert type(caught.value.__cause__) is kind
        assert "inner" in str(caught.value.__cause__)


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_a_traceback_ends_in_the_users_own_line(store, colour):
    def deep():
        raise ValueError("here")

    async def adeep():
        deep()

    fn = idempotent(store=store)(deep if colour == "sync" else adeep)
    with pytest.raises(ValueError, match="here") as caught:
        await fn() if colour == "async" else fn()
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.name, last.line) == ("deep", 'raise ValueError("here")')
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_a_base_exception_group_is_a_cut(store):
    def work():
        raise BaseExceptionGroup("cut", [Cut(), ValueError("a")])

    fn = idempotent(store=store, key="k", on_crash="hold")(work)
    with pytest.raises(BaseExceptionGroup):
        fn()
    assert look(store).state is State.UNKNOWN


# --- policy, leases, time -----------------------------------------------------------------------


def test_guards_with_different_settings_share_a_store(store, clock, calls):
    """A store that carried one guard's settings would give them to the other."""

    @idempotent(store=store, ttl=60, on_failure="lock", scope="a", codec=Sealed())
    def strict(n):
        calls.append("strict")
        raise ValueError("once")

    @idempotent(store=store, ttl=600, on_duplicate="raise", key="n:{n}", version="2")
    def loud(n):
        calls.append("loud")
        return n

    @idempotent(store=store, ttl=None)
    def plain(n):
        calls.append("plain")
        return n

    for _ in range(2):
        with pytest.raises(ValueError, match="once"):
            strict(1)
        assert plain(1) == 1
    assert loud(1) == 1
    with pytest.raises(DuplicateExecutionError):
        loud(1)
    assert calls == ["strict", "plain", "loud"]
    clock.advance(120)
    with pytest.raises(ValueError, match="once"):
        strict(1)
    with pytest.raises(DuplicateExecutionError):
        loud(1)
    clock.advance(1000)
    assert loud(1) == plain(1) == 1
    assert calls == ["strict", "plain", "loud", "strict", "loud"]


def test_a_key_that_always_fails_has_a_story_of_bounded_length(store, calls):
    @idempotent(store=store, key="k")
    def work():
        calls.append(current().number)
        raise ValueError("x" * 5000)

    for _ in range(40):
        with pytest.raises(ValueError):
            work()
    record = look(store)
    assert calls == list(range(1, 41))
    assert record.number == 40
    assert len(record.past) == PAST_KEPT
    assert len(record.error) == 1000


def test_a_body_may_give_up_on_a_poisoned_key(store, calls):
    @idempotent(store=store, key="k", on_failure="lock")
    def work():
        calls.append(1)
        if current().number > 3:
            raise RuntimeError("tried three times")
        raise Cut

    for _ in range(3):
        with pytest.raises(Cut):
            work()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="tried three times"):
            work()
    assert len(calls) == 4


def test_a_record_without_a_ttl_can_still_be_taken_over(store, clock):
    terms = Terms(lease_s=30, ttl_s=None)
    key = make_key("k", operation="o")
    run(store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=terms))
    fn = idempotent(store=store, key="k", operation="o", ttl=None, fingerprint=None)(made(2))
    with pytest.raises(InProgressError):
        fn(1)
    clock.advance(31)
    assert fn(1) == 2
    clock.advance(10**8)
    assert look(store).expires_at is None
    assert fn(1) == 2


def test_a_ttl_that_ends_while_the_body_runs_does_not_take_its_record(store, clock):
    @idempotent(store=store, key="k", lease=10, ttl=10, max_run=3600)
    def work():
        clock.advance(15)  # lease and ttl, counted from the claim, are over by now
        return current().number

    assert work() == 1
    assert work() == 1
    assert look(store).state is State.COMPLETED


def test_a_late_renewal_does_not_bring_a_finished_record_back(store):
    ledger = store.ledger(SYNC)
    for ending in ("complete", "release"):
        key = make_key(ending)
        won = run(ledger.claim(key, attempt=new_attempt(), terms=Terms()))
        assert isinstance(won, Won)
        if ending == "complete":
            run(ledger.complete(won.claim, Outcome("value", b"1")))
        else:
            run(ledger.release(won.claim))
        before = run(ledger.look(key.id))
        assert isinstance(run(ledger.renew(won.claim)), Lost)
        assert run(ledger.look(key.id)) == before


def test_a_holder_whose_record_was_made_anew_changes_nothing(store, clock):
    """Forgotten and claimed again for something else: the old holder must not write over it."""

    def work():
        ledger = store.ledger(SYNC)
        run(ledger.forget(make_key("k").id, force=True))
        clock.advance(1)
        run(
            ledger.claim(
                make_key("k", operation="o"),
                attempt=new_attempt(),
                fingerprint=b"another call",
                terms=Terms(),
            )
        )
        return "mine"

    fn = idempotent(store=store, key="k", operation="o")(work)
    with pytest.raises(ClaimLostError) as caught:
        fn()
    assert caught.value.result == "mine"
    assert look(store).state is State.PENDING
    assert look(store).fingerprint == b"another call"


def test_only_the_stores_clock_decides(store, clock, monkeypatch):
    """The wall clock of this machine is never asked; it may be wrong or jump."""

    def asked():
        raise AssertionError("the wall clock was asked")

    @idempotent(store=store, key="k")
    def work():
        return current().number

    with monkeypatch.context() as patched:
        patched.setattr(time, "time", asked)
        patched.setattr(time, "time_ns", asked)
        assert work() == 1
        clock.advance(-3600)
        assert work() == 1
    assert look(store).state is State.COMPLETED


def test_a_clock_that_goes_back_does_not_shorten_a_fence(store, clock):
    fences = []

    @idempotent(store=store, key="k")
    def work():
        fences.append(current().fence)
        raise ValueError

    for jump in (0, -3600, 7200, -7200):
        clock.advance(jump)
        with pytest.raises(ValueError):
            work()
    assert fences == sorted(set(fences))


def test_steps_go_with_their_record(store, clock, calls):
    @idempotent(store=store, key="k", ttl=60)
    def work():
        return step("s", lambda: calls.append(1) or len(calls))

    assert work() == 1
    assert look(store).steps
    clock.advance(61)
    assert work() == 2
    run(store.ledger(SYNC).forget(make_key("k").id))
    assert work() == 3


def test_a_failure_after_a_partial_effect_repeats_only_what_is_no_step(store, calls):
    @idempotent(store=store)
    def work():
        step("charge", calls.append, "charge")
        calls.append("plain")
        if current().number < 4:
            raise ValueError("again")

    for _ in range(3):
        with pytest.raises(ValueError, match="again"):
            work()
    work()
    assert calls.count("charge") == 1
    assert calls.count("plain") == 4


def test_mutual_recursion_is_found_over_two_keys(store):
    @idempotent(store=store, on_duplicate="wait")
    def ping(n):
        return pong(n)

    @idempotent(store=store, on_duplicate="wait")
    def pong(n):
        return ping(n)

    with pytest.raises(InProgressError, match="call chain"):
        ping(1)
    assert {record.state for record in everything(store)} == {State.FAILED}


async def test_a_child_task_belongs_to_its_parents_chain(store):
    later = []

    @idempotent(store=store, on_duplicate="wait")
    async def work(n):
        later.append(asyncio.create_task(replayed()))
        with pytest.raises(InProgressError, match="call chain"):
            await asyncio.create_task(work(n))
        return n

    done = asyncio.Event()

    async def replayed():
        await done.wait()
        return await work(1)

    assert await work(1) == 1
    done.set()
    assert await later[0] == 1  # once the parent is through, its child may ask


def test_the_same_key_with_other_arguments_after_a_failure(store, calls):
    @idempotent(store=store, key="k")
    def work(amount):
        calls.append(amount)
        raise ValueError

    with pytest.raises(ValueError):
        work(1)
    with pytest.raises(IdempotencyConflictError):
        work(2)
    assert calls == [1]


def test_settled_by_hand_the_key_answers_again(store):
    @idempotent(store=store, key="k", on_crash="hold")
    def work():
        raise Cut

    with pytest.raises(Cut):
        work()
    with pytest.raises(OutcomeUnknownError):
        work()
    record = look(store)
    ledger = store.ledger(SYNC)
    assert run(
        ledger.resolve(record.key.id, fence=record.fence, outcome=Outcome("value", b"7"), ttl_s=60)
    )
    assert work() == 7


def test_a_completion_that_is_repeated_is_kept(store):
    ledger = store.ledger(SYNC)
    won = run(ledger.claim(make_key("k"), attempt=new_attempt(), terms=Terms()))
    for _ in range(3):
        assert run(ledger.complete(won.claim, Outcome("value", b"1"))) == Kept()


def test_a_variety_of_dict_is_not_turned_into_a_plain_one(store):
    fn = idempotent(store=store)(ordered)
    assert type(fn()) is collections.OrderedDict
    with pytest.raises(ResultLostError, match="plain dict"):
        fn()


def ordered():
    return collections.OrderedDict(a=1)
