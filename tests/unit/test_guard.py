"""The guard's promises, each in both colours, over the memory store with a clock we own."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from dataclasses import dataclass
from uuid import uuid4

import pytest

import semel
from semel import (
    ClaimLostError,
    DuplicateExecutionError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ResultLostError,
    SettingsError,
    current,
    idempotent,
    once,
    step,
)
from semel.colour import ASYNC, SYNC, run
from semel.guard import CannotTell, Recovered, Retry
from semel.keys import make_key, new_attempt
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.values import Outcome, State, Terms, Won


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return MemoryStore(clock=clock)


@dataclass
class Paint:
    """Makes guarded functions of one colour out of plain bodies, and calls them."""

    colour: object

    def guard(self, body, **settings):
        if body.__name__ == "<lambda>":
            settings.setdefault("operation", "work")
        if self.colour is SYNC:
            return idempotent(**settings)(body)
        if inspect.iscoroutinefunction(body):
            return idempotent(**settings)(body)
        return idempotent(**settings)(_made_async(body))

    async def call(self, fn, *args, **kwargs):
        result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def ledger(self, store, verb, *args, **kwargs):
        flow = getattr(store.ledger(self.colour), verb)(*args, **kwargs)
        return await flow


def _made_async(body):
    import functools

    @functools.wraps(body)
    async def painted(*args, **kwargs):
        result = body(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return painted


@pytest.fixture(params=["sync", "async"])
def paint(request):
    return Paint(SYNC if request.param == "sync" else ASYNC)


@pytest.fixture
def calls():
    return []


def claimed_elsewhere(store, key, terms=None, fp=b""):
    """Somebody else, in another process, holds this key."""
    answer = run(
        store.ledger(SYNC).claim(key, attempt=new_attempt(), fingerprint=fp, terms=terms or Terms())
    )
    assert isinstance(answer, Won)
    return answer.claim


# --- the main line ------------------------------------------------------------------------------


async def test_the_body_runs_once_and_the_result_is_replayed(paint, store, calls):
    def pay(order, amount=5):
        calls.append((order, amount))
        return {"order": order, "paid": (amount, 1)}

    pay = paint.guard(pay, store=store)
    first = await paint.call(pay, "o1")
    again = await paint.call(pay, order="o1", amount=5)
    assert first == again == {"order": "o1", "paid": (5, 1)}
    assert calls == [("o1", 5)]
    await paint.call(pay, "o2")
    assert len(calls) == 2


@pytest.mark.parametrize("result", [None, 0, "", [], {}, False, (), 0.0, b""])
async def test_falsy_results_are_replayed_as_they_were(paint, store, calls, result):
    def work():
        calls.append(1)
        return result

    work = paint.guard(work, store=store)
    for _ in range(3):
        got = await paint.call(work)
        assert got == result
        assert type(got) is type(result)
    assert len(calls) == 1


async def test_a_bare_decorator_works(paint, store, calls):
    semel.configure(store=store)
    try:

        def work(x):
            calls.append(x)
            return x

        fn = idempotent(work if paint.colour is SYNC else _made_async(work))
        assert await paint.call(fn, 1) == 1
        assert await paint.call(fn, 1) == 1
        assert calls == [1]
    finally:
        semel.configure(store=None)


async def test_the_wrapper_looks_like_the_function(paint, store):
    def work(a: int, *, b: str = "x") -> str:
        """Doc."""
        return f"{a}{b}"

    fn = paint.guard(work, store=store)
    assert fn.__name__ == "work"
    assert fn.__doc__ == "Doc."
    assert list(inspect.signature(fn).parameters) == ["a", "b"]
    assert inspect.iscoroutinefunction(fn) is (paint.colour is ASYNC)
    with pytest.raises(TypeError):
        await paint.call(fn)


async def test_first_result_is_the_callers_own_and_a_replay_is_a_copy(paint, store):
    shared = {"n": [1]}
    fn = paint.guard(lambda: shared, store=store, key="k")
    first = await paint.call(fn)
    assert first is shared
    shared["n"].append(2)
    assert await paint.call(fn) == {"n": [1]}


# --- keys ---------------------------------------------------------------------------------------


async def test_a_key_template_and_the_arguments_as_fingerprint(paint, store, calls):
    def pay(user, amount):
        calls.append(amount)
        return amount

    pay = paint.guard(pay, store=store, key="invoice:{user}")
    assert await paint.call(pay, 7, 10) == 10
    assert await paint.call(pay, 7, 10) == 10
    with pytest.raises(IdempotencyConflictError, match="other arguments"):
        await paint.call(pay, 7, 11)
    assert calls == [10]


async def test_fingerprint_none_compares_nothing(paint, store, calls):
    def pay(user, amount):
        calls.append(amount)
        return amount

    pay = paint.guard(pay, store=store, key="invoice:{user}", fingerprint=None)
    assert await paint.call(pay, 7, 10) == 10
    assert await paint.call(pay, 7, 11) == 10
    assert calls == [10]


async def test_fingerprint_by_function(paint, store, calls):
    def pay(user, amount, trace=None):
        calls.append(amount)
        return amount

    pay = paint.guard(
        pay, store=store, key="i:{user}", fingerprint=lambda user, amount, trace=None: amount
    )
    await paint.call(pay, 7, 10, trace=object())
    await paint.call(pay, 7, 10, trace=object())
    with pytest.raises(IdempotencyConflictError):
        await paint.call(pay, 7, 12)
    assert calls == [10]


async def test_a_key_function(paint, store, calls):
    def pay(user, amount):
        calls.append(user)
        return user

    pay = paint.guard(pay, store=store, key=lambda user, amount: f"k:{user}")
    await paint.call(pay, 1, 2)
    await paint.call(pay, 1, 2)
    assert calls == [1]
    assert pay.key_for(1, 2).text == "k:1"


@pytest.mark.parametrize("bad", [None, "", 7, "x" * 256])
async def test_a_bad_key_is_refused_and_nothing_runs(paint, store, calls, bad):
    fn = paint.guard(lambda: calls.append(1), store=store, key=lambda: bad)
    with pytest.raises(SettingsError):
        await paint.call(fn)
    assert calls == []


async def test_the_same_key_in_another_function_is_a_conflict(paint, store):
    one = paint.guard(lambda: 1, store=store, key="same", operation="one")
    two = paint.guard(lambda: 2, store=store, key="same", operation="two")
    assert await paint.call(one) == 1
    with pytest.raises(IdempotencyConflictError, match="per_operation") as caught:
        await paint.call(two)
    assert "another operation than 'two'" in str(caught.value)
    assert "keep the old one with operation=" in str(caught.value)


def test_an_operation_without_a_name_is_refused(store):
    with pytest.raises(SettingsError, match="operation=''"):
        idempotent(store=store, operation="")(len)


def test_a_step_with_its_arguments_swapped_says_so(store):
    @idempotent(store=store)
    def pay():
        return step(len, "charge")  # type: ignore[arg-type]

    with pytest.raises(SettingsError, match="its name and then what to do"):
        pay()


async def test_per_operation_makes_them_two(paint, store):
    one = paint.guard(lambda: 1, store=store, key="same", operation="one", per_operation=True)
    two = paint.guard(lambda: 2, store=store, key="same", operation="two", per_operation=True)
    assert await paint.call(one) == 1
    assert await paint.call(two) == 2


async def test_a_new_version_forgets_the_old_results(paint, store):
    one = paint.guard(lambda: 1, store=store, key="k", operation="o")
    two = paint.guard(lambda: 2, store=store, key="k", operation="o", version="2")
    assert await paint.call(one) == 1
    assert await paint.call(two) == 2


async def test_tenants_do_not_share(paint, store, calls):
    def pay(tenant, n):
        calls.append(tenant)
        return tenant

    pay = paint.guard(pay, store=store, key="k:{n}", scope=lambda tenant, n: tenant)
    assert await paint.call(pay, "a", 1) == "a"
    assert await paint.call(pay, "b", 1) == "b"
    assert await paint.call(pay, "a", 1) == "a"
    assert calls == ["a", "b"]


async def test_an_empty_tenant_is_refused(paint, store, calls):
    fn = paint.guard(lambda: calls.append(1), store=store, key="k", scope=lambda: "")
    with pytest.raises(SettingsError, match="scope"):
        await paint.call(fn)
    assert calls == []


async def test_an_argument_that_cannot_be_canonical_is_refused_by_name(paint, store, calls):
    def work(socket):
        calls.append(1)

    work = paint.guard(work, store=store)
    with pytest.raises(SettingsError, match=r"socket.*key="):
        await paint.call(work, object())
    assert calls == []


async def test_arguments_mutated_by_the_body_do_not_change_the_key(paint, store, calls):
    def work(items):
        calls.append(1)
        items.append("more")
        return len(items)

    work = paint.guard(work, store=store)
    assert await paint.call(work, [1]) == 2
    assert await paint.call(work, [1]) == 2
    assert calls == [1]


# --- methods and handlers -----------------------------------------------------------------------


async def test_methods_with_a_key(store, calls):
    class Till:
        @idempotent(key="pay:{order}", store=store)
        def pay(self, order):
            calls.append(order)
            return order

        @idempotent(key="apay:{order}", store=store)
        async def apay(self, order):
            calls.append(order)
            return order

        @idempotent(key="s:{order}", store=store)
        @staticmethod
        def static(order):
            calls.append(order)
            return order

        @classmethod
        @idempotent(store=store, key="m:{order}")
        def made(cls, order):
            calls.append(order)
            return cls.__name__

    till = Till()
    assert till.pay("o") == till.pay("o") == Till().pay("o") == "o"
    assert await till.apay("a") == await till.apay("a") == "a"
    assert Till.static("s") == Till.static("s") == "s"
    assert Till.made("m") == Till.made("m") == "Till"
    assert calls == ["o", "a", "s", "m"]
    assert Till.pay.key_for(till, "o").text == "pay:o"


def test_a_method_without_a_key_is_refused_unless_self_has_one(store, calls):
    class Plain:
        @idempotent(store=store)
        def pay(self, order):
            calls.append(order)

    class Named:
        def __init__(self, name):
            self.name = name

        def __idempotency_key__(self):
            return self.name

        @idempotent(store=store)
        def pay(self, order):
            calls.append((self.name, order))

    with pytest.raises(SettingsError, match=r"self.*key="):
        Plain().pay(1)
    Named("a").pay(1)
    Named("a").pay(1)
    Named("b").pay(1)
    assert calls == [("a", 1), ("b", 1)]


@dataclass
class CreateOrder:
    idempotency_key: str | None
    item: str


def command_handler(cls):
    cls.is_handler = True
    return cls


async def test_command_handler_classes_above_and_below_another_decorator(store, calls):
    @idempotent(operation="CreateOrder", store=store)
    @command_handler
    class Above:
        async def handle(self, command: CreateOrder):
            calls.append(command.item)
            return {"item": command.item}

    @command_handler
    @idempotent(operation="CreateOrderSync", store=store)
    class Below:
        def handle(self, command: CreateOrder):
            calls.append(command.item)
            return command.item

    handler = Above()
    assert Above.is_handler
    assert await handler.handle(CreateOrder("k1", "tea")) == {"item": "tea"}
    assert await Above().handle(CreateOrder("k1", "tea")) == {"item": "tea"}
    with pytest.raises(IdempotencyConflictError):
        await handler.handle(CreateOrder("k1", "coffee"))
    assert Below().handle(CreateOrder("k2", "milk")) == "milk"
    assert Below().handle(CreateOrder("k2", "milk")) == "milk"
    with pytest.raises(IdempotencyConflictError):
        Below().handle(CreateOrder("k1", "tea"))
    assert calls == ["tea", "milk"]
    record = run(store.ledger(SYNC).look(make_key("k1").id))
    assert record.key.operation == "CreateOrder"


@pytest.mark.parametrize("command", [CreateOrder(None, "milk"), {"item": "milk"}])
async def test_command_without_key_runs_unguarded(store, calls, command):
    @idempotent(operation="CreateOrder", store=store)
    class Handler:
        async def handle(self, command):
            calls.append("milk")
            return "milk"

    assert await Handler().handle(command) == "milk"
    assert await Handler().handle(command) == "milk"

    assert calls == ["milk", "milk"]
    with pytest.raises(SettingsError, match="idempotency_key"):
        Handler.handle.key_for(Handler(), command)


async def test_steps_of_a_command_without_key_run_each_time(store, calls):
    @idempotent(operation="CreateOrder", store=store)
    class Handler:
        async def handle(self, command):
            child = current().child_key("charge")
            return await step("charge", calls.append, command["item"]), child

    _, first = await Handler().handle({"item": "milk"})
    _, second = await Handler().handle({"item": "milk"})

    assert calls == ["milk", "milk"]
    assert first != second
    assert run(store.ledger(SYNC).records(tenant=None, operation=None, state=None, limit=9)) == []


def test_command_without_key_needs_no_store_and_its_errors_have_no_other_cause(monkeypatch):
    monkeypatch.setenv("SEMEL_URL", "nonsense://")

    @idempotent(operation="CreateOrder")
    class Handler:
        def handle(self, command):
            raise ValueError("no funds")

    with pytest.raises(ValueError, match="no funds") as caught:
        Handler().handle({})
    assert caught.value.__context__ is None


def test_unguarded_command_may_raise_stop_iteration(store):
    @idempotent(operation="CreateOrder", store=store)
    class Handler:
        def handle(self, command):
            raise StopIteration(7)

    with pytest.raises(StopIteration):
        Handler().handle({})


def test_command_whose_class_has_no_idempotency_key_runs_with_one_warning(store, calls, caplog):
    @dataclass
    class Misspelt:
        idempotency_kye: str

    @idempotent(operation="CreateOrder", store=store)
    class Handler:
        def handle(self, command):
            calls.append(command)

    Handler().handle(Misspelt("k"))
    Handler().handle(Misspelt("k"))

    assert len(calls) == 2
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "Misspelt" in warning
    assert "has no attribute idempotency_key" in warning


def test_key_of_a_command_can_be_a_uuid(store, calls):
    key = uuid4()

    @idempotent(operation="CreateOrder", store=store)
    class Handler:
        def handle(self, command):
            calls.append(command)

    Handler().handle(CreateOrder(key, "milk"))
    Handler().handle(CreateOrder(key, "milk"))

    assert len(calls) == 1
    assert run(store.ledger(SYNC).look(make_key(str(key)).id)) is not None


def test_command_without_key_inside_a_scope_function_is_an_error_of_that_function(store, calls):
    @idempotent(operation="Inner", store=store, key_required=False)
    class Inner:
        def handle(self, command):
            return "tenant"

    @idempotent(
        operation="Outer",
        store=store,
        scope=lambda self, command: Inner.handle.key_for(Inner(), {}).text,
    )
    class Outer:
        def handle(self, command):
            calls.append(command)

    with pytest.raises(SettingsError, match="has no idempotency_key"):
        Outer().handle(CreateOrder("k", "milk"))
    assert calls == []


def test_command_with_empty_key_is_refused(store, calls):
    @idempotent(operation="CreateOrder", store=store)
    class Handler:
        def handle(self, command):
            calls.append(command)

    with pytest.raises(SettingsError, match="must not be empty"):
        Handler().handle(CreateOrder("", "milk"))

    assert calls == []


def test_command_without_key_is_refused_where_key_is_required(store, calls):
    @idempotent(operation="CreateOrder", store=store, key_required=True)
    class Handler:
        def handle(self, command):
            calls.append(command)

    with pytest.raises(SettingsError, match="has no idempotency_key"):
        Handler().handle(CreateOrder(None, "milk"))

    assert calls == []


def test_key_required_on_a_function_is_refused():
    with pytest.raises(SettingsError, match="command-handler class"):

        @idempotent(key_required=True)
        def pay(order):
            return order


def test_a_class_without_handle_is_refused():
    with pytest.raises(SettingsError, match="handle"):

        @idempotent(operation="X")
        class Nothing:
            pass


# --- duplicates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["return", "raise"])
async def test_a_running_call_is_in_progress(paint, store, calls, mode):
    fn = paint.guard(
        lambda: calls.append(1), store=store, key="k", on_duplicate=mode, operation="o"
    )
    claimed_elsewhere(store, make_key("k", operation="o"), fp=_fp(fn))
    with pytest.raises(InProgressError) as caught:
        await paint.call(fn)
    assert caught.value.key == "k"
    assert 0 < caught.value.retry_after <= 30
    assert calls == []


def _fp(fn):
    """The fingerprint a call of fn without arguments has."""
    guard = fn.key_for.__self__
    return guard._identify((), {})[1]


async def test_raise_tells_of_the_first_result(paint, store, calls):
    def work():
        calls.append(1)
        return "first"

    work = paint.guard(work, store=store, on_duplicate="raise")
    assert await paint.call(work) == "first"
    with pytest.raises(DuplicateExecutionError) as caught:
        await paint.call(work)
    assert not isinstance(caught.value, InProgressError)
    assert caught.value.result == "first"
    assert calls == [1]


async def test_raise_with_unstorable_result_says_that_it_was_lost(paint, store, calls, caplog):
    def work():
        calls.append(1)
        return object()

    work = paint.guard(work, store=store, on_duplicate="raise")
    await paint.call(work)

    with pytest.raises(DuplicateExecutionError, match="its result was lost") as caught:
        await paint.call(work)

    assert caught.value.result is None
    assert isinstance(caught.value.__cause__, ResultLostError)
    assert "will raise DuplicateExecutionError" in caplog.text
    assert calls == [1]


async def test_raise_after_locked_failure_names_the_first_error(paint, store):
    def work():
        raise ValueError("no funds")

    work = paint.guard(work, store=store, on_failure="lock", on_duplicate="raise")
    with pytest.raises(ValueError, match="no funds"):
        await paint.call(work)

    with pytest.raises(DuplicateExecutionError, match=r"failed.*no funds") as caught:
        await paint.call(work)

    assert isinstance(caught.value.__cause__, ValueError)


async def test_wait_that_times_out_does_not_recommend_wait(paint, store, clock):
    fn = paint.guard(
        lambda: None, store=store, key="k", on_duplicate="wait", wait_timeout=0.01, operation="o"
    )
    claimed_elsewhere(store, make_key("k", operation="o"), fp=_fp(fn))

    with pytest.raises(InProgressError, match=r"waited for 0\.01s") as caught:
        await paint.call(fn)

    assert "on_duplicate" not in str(caught.value)


async def test_another_payload_is_a_conflict_whatever_the_mode(paint, store):
    for mode in ("return", "raise", "wait"):
        fn = paint.guard(
            lambda x: x, store=store, key=f"k-{mode}", on_duplicate=mode, operation="o"
        )
        await paint.call(fn, 1)
        with pytest.raises(IdempotencyConflictError):
            await paint.call(fn, 2)


# --- failures -----------------------------------------------------------------------------------


async def test_a_failure_unlocks_and_the_retry_runs(paint, store, calls):
    def work():
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no funds")
        return "ok"

    work = paint.guard(work, store=store, key="k", operation="o")
    with pytest.raises(ValueError, match="no funds"):
        await paint.call(work)
    record = await paint.ledger(store, "look", make_key("k").id)
    assert record.state is State.FAILED
    assert record.error == "ValueError: no funds"
    assert await paint.call(work) == "ok"
    assert await paint.call(work) == "ok"
    assert len(calls) == 2


class DeclinedError(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


async def test_a_locked_failure_is_replayed_with_its_type(paint, store, calls):
    def work():
        calls.append(1)
        raise DeclinedError(51, "no funds")

    work = paint.guard(work, store=store, on_failure="lock")
    for _ in range(3):
        with pytest.raises(DeclinedError, match="51: no funds") as caught:
            await paint.call(work)
        assert caught.value.code == 51
    assert calls == [1]


async def test_a_locked_failure_raises_duplicate_where_asked(paint, store, calls):
    def work():
        calls.append(1)
        raise ValueError("x")

    work = paint.guard(work, store=store, on_failure="lock", on_duplicate="raise")
    with pytest.raises(ValueError, match="x"):
        await paint.call(work)
    with pytest.raises(DuplicateExecutionError):
        await paint.call(work)
    assert calls == [1]


async def test_stop_iteration_comes_through_unchanged(store):
    @idempotent(store=store)
    def work():
        raise StopIteration(3)

    @idempotent(store=store, on_failure="lock")
    def locked():
        raise StopIteration(4)

    with pytest.raises(StopIteration):
        work()
    for _ in range(2):
        with pytest.raises(StopIteration):
            locked()


async def test_a_result_that_cannot_be_stored_is_given_once_and_then_said_to_be_lost(
    paint, store, calls, caplog
):
    def work():
        calls.append(1)
        return object()

    work = paint.guard(work, store=store)
    with caplog.at_level(logging.WARNING):
        assert type(await paint.call(work)) is object
    assert "cannot be stored" in caplog.text
    for _ in range(2):
        with pytest.raises(ResultLostError, match="object"):
            await paint.call(work)
    assert calls == [1]


async def test_a_result_over_the_limit_is_lost_not_rerun(paint, store, calls):
    def work():
        calls.append(1)
        return "x" * 2000

    work = paint.guard(work, store=store, max_result=1000)
    assert len(await paint.call(work)) == 2000
    with pytest.raises(ResultLostError, match="max_result"):
        await paint.call(work)
    assert calls == [1]


async def test_a_stored_result_that_cannot_be_read_is_lost_not_rerun(paint, store, calls):
    fn = paint.guard(lambda: calls.append(1), store=store, key="k", operation="o")
    claim = claimed_elsewhere(store, make_key("k", operation="o"), fp=_fp(fn))
    run(store.ledger(SYNC).complete(claim, Outcome("value", b"\xff not json")))
    with pytest.raises(ResultLostError):
        await paint.call(fn)
    assert calls == []


def test_a_sync_function_that_returns_a_coroutine_is_refused(store):
    async def inner():
        return 1

    @idempotent(store=store, key="k")
    def work():
        return inner()

    with pytest.raises(SettingsError, match="guard the async function itself"):
        work()
    assert run(store.ledger(SYNC).look(make_key("k").id)).state is State.FAILED


# --- crashes ------------------------------------------------------------------------------------


class Cut(BaseException):
    """Like KeyboardInterrupt, which an event loop would take for its own."""


async def test_interrupted_with_retry_releases_at_once(paint, store, calls):
    def work():
        calls.append(1)
        if len(calls) == 1:
            raise Cut
        return "ok"

    work = paint.guard(work, store=store)
    with pytest.raises(Cut):
        await paint.call(work)
    assert await paint.call(work) == "ok"


@pytest.mark.parametrize("cut", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_interrupted_with_hold_stays_unknown_until_resolved(store, calls, cut):
    @idempotent(store=store, key="k", operation="o", on_crash="hold")
    def work():
        calls.append(1)
        if len(calls) == 1:
            raise cut
        return "ok"

    with pytest.raises(cut):
        work()
    for _ in range(2):
        with pytest.raises(OutcomeUnknownError, match="resolve"):
            work()
    ledger = store.ledger(SYNC)
    record = run(ledger.look(make_key("k").id))
    assert record.state is State.UNKNOWN
    run(ledger.resolve(record.key.id, fence=record.fence, outcome=None, ttl_s=60))
    assert work() == "ok"
    assert len(calls) == 2


async def test_a_dead_holder_is_taken_over_when_its_lease_ends(paint, store, clock, calls):
    def work():
        calls.append(current().number)
        return "ok"

    work = paint.guard(work, store=store, key="k", operation="o")
    claimed_elsewhere(store, make_key("k", operation="o"), fp=_fp(work))
    with pytest.raises(InProgressError):
        await paint.call(work)
    clock.advance(31)
    assert await paint.call(work) == "ok"
    assert calls == [2]


async def test_hold_never_takes_over(paint, store, clock, calls):
    fn = paint.guard(lambda: calls.append(1), store=store, key="k", operation="o", on_crash="hold")
    claimed_elsewhere(
        store, make_key("k", operation="o"), Terms(takeover=False, hold=True), _fp(fn)
    )
    clock.advance(10**7)
    with pytest.raises(OutcomeUnknownError):
        await paint.call(fn)
    assert calls == []


@pytest.mark.parametrize("found", ["recovered", "retry", "cannot tell"])
async def test_recover_asks_the_world(paint, store, clock, calls, found):
    asked = []

    def recover(attempt):
        asked.append((attempt.key, attempt.number, attempt.child_key("charge")))
        return {
            "recovered": Recovered("from the provider"),
            "retry": Retry(),
            "cannot tell": CannotTell(),
        }[found]

    def work():
        calls.append(1)
        return "ran"

    work = paint.guard(work, store=store, key="k", operation="o", on_crash=recover)
    claimed_elsewhere(
        store, make_key("k", operation="o"), Terms(takeover=True, hold=True), _fp(work)
    )
    clock.advance(31)
    if found == "cannot tell":
        for _ in range(2):
            with pytest.raises(OutcomeUnknownError):
                await paint.call(work)
        assert [n for _, n, _ in asked] == [2, 3]
        assert calls == []
        return
    expected = "from the provider" if found == "recovered" else "ran"
    assert await paint.call(work) == expected
    assert await paint.call(work) == expected
    assert len(asked) == 1
    assert calls == ([] if found == "recovered" else [1])


async def test_recover_is_not_asked_without_a_crash(paint, store, calls):
    def recover(attempt):
        raise AssertionError("not to be asked")

    def work():
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("plain failure")
        return "ok"

    work = paint.guard(work, store=store, on_crash=recover)
    with pytest.raises(ValueError, match="plain"):
        await paint.call(work)
    assert await paint.call(work) == "ok"


async def test_a_recover_that_fails_or_answers_nonsense_leaves_it_unknown(
    paint, store, clock, calls
):
    for answer in ("nonsense", ValueError("world is down")):

        def recover(attempt, answer=answer):
            if isinstance(answer, Exception):
                raise answer
            return answer

        key = f"k{answer}"
        work = paint.guard(
            lambda: calls.append(1),
            store=store,
            key=lambda key=key: key,
            operation="o",
            on_crash=recover,
        )
        claimed_elsewhere(store, make_key(key, operation="o"), Terms(hold=True), _fp(work))
        clock.advance(31)
        with pytest.raises((SettingsError, ValueError)):
            await paint.call(work)
        record = await paint.ledger(store, "look", make_key(key).id)
        assert record.state is State.UNKNOWN
    assert calls == []


async def test_a_late_holder_adopts_the_winners_outcome(paint, store, clock):
    winner = {}

    def work():
        # The process freezes here past its lease; somebody else takes over and finishes.
        clock.advance(31)
        won = claimed_elsewhere(store, make_key("k", operation="o"), fp=winner["fp"])
        run(store.ledger(SYNC).complete(won, Outcome("value", b'"the winner\'s"')))
        return "mine"

    work = paint.guard(work, store=store, key="k", operation="o")
    winner["fp"] = _fp(work)
    assert await paint.call(work) == "the winner's"
    assert await paint.call(work) == "the winner's"


async def test_a_late_holder_that_fails_adopts_too(paint, store, clock):
    winner = {}

    def work():
        clock.advance(31)
        won = claimed_elsewhere(store, make_key("k", operation="o"), fp=winner["fp"])
        run(store.ledger(SYNC).complete(won, Outcome("value", b'"done"')))
        raise ValueError("late and wrong")

    work = paint.guard(work, store=store, key="k", operation="o")
    winner["fp"] = _fp(work)
    assert await paint.call(work) == "done"


async def test_a_late_holder_without_a_winner_yet_is_told_so(paint, store, clock):
    winner = {}

    def work():
        clock.advance(31)
        claimed_elsewhere(store, make_key("k", operation="o"), fp=winner["fp"])
        return "mine"

    work = paint.guard(work, store=store, key="k", operation="o")
    winner["fp"] = _fp(work)
    with pytest.raises(ClaimLostError) as caught:
        await paint.call(work)
    assert caught.value.result == "mine"


# --- context, steps -----------------------------------------------------------------------------


async def test_current_tells_the_body_who_it_is(paint, store):
    seen = {}

    def work():
        attempt = current()
        seen.update(
            key=attempt.key,
            tenant=attempt.tenant,
            number=attempt.number,
            fence=attempt.fence,
            replayed=attempt.replayed,
            operation=attempt.operation,
            child=attempt.child_key("a"),
            same=attempt.child_key("a"),
            other=attempt.child_key("b"),
        )

    work = paint.guard(work, store=store, key="k", operation="o", scope="acme")
    await paint.call(work)
    assert seen["key"] == "k"
    assert seen["tenant"] == "acme"
    assert seen["number"] == 1
    assert seen["fence"] > 0
    assert seen["replayed"] is False
    assert seen["child"] == seen["same"] != seen["other"]
    with pytest.raises(SettingsError, match="no guarded call"):
        current()


async def test_child_keys_are_stable_over_attempts(paint, store, calls):
    def work():
        calls.append(current().child_key("charge"))
        if len(calls) == 1:
            raise ValueError
        return 1

    work = paint.guard(work, store=store)
    with pytest.raises(ValueError):
        await paint.call(work)
    await paint.call(work)
    assert len(set(calls)) == 1


async def test_steps_are_done_once_over_attempts(paint, store, calls):
    def charge(amount):
        calls.append("charge")
        return {"id": amount}

    async def mail():
        calls.append("mail")

    def body():
        a = step("charge", charge, 5)
        calls.append(("got", a["id"]))
        if calls.count("charge") == 1 and len([c for c in calls if c == ("got", 5)]) == 1:
            raise ValueError("fell over after the charge")
        return a

    async def abody():
        a = await step("charge", charge, 5)
        calls.append(("got", a["id"]))
        if len([c for c in calls if c == ("got", 5)]) == 1:
            raise ValueError("fell over after the charge")
        await step("mail", mail)
        return a

    work = paint.guard(body if paint.colour is SYNC else abody, store=store)
    with pytest.raises(ValueError, match="fell over"):
        await paint.call(work)
    assert await paint.call(work) == {"id": 5}
    assert calls.count("charge") == 1


async def test_a_step_whose_result_cannot_be_stored_is_not_repeated(paint, store, calls):
    def charge():
        calls.append(1)
        return object()

    def body():
        step("charge", charge)
        if current().number == 1:
            raise ValueError("again")

    async def abody():
        await step("charge", charge)
        if current().number == 1:
            raise ValueError("again")

    work = paint.guard(body if paint.colour is SYNC else abody, store=store)
    with pytest.raises(ValueError, match="again"):
        await paint.call(work)
    with pytest.raises(ResultLostError, match="charge"):
        await paint.call(work)
    assert calls == [1]


def test_an_async_step_in_a_sync_function_is_refused(store):
    async def charge():
        return 1

    @idempotent(store=store)
    def work():
        return step("charge", charge)

    with pytest.raises(SettingsError, match="async"):
        work()


async def test_a_stale_attempt_cannot_record_a_step(paint, store, clock):
    winner = {}

    def charge():
        clock.advance(31)
        claimed_elsewhere(store, make_key("k", operation="o"), fp=winner["fp"])

    def body():
        step("charge", charge)

    async def abody():
        await step("charge", charge)

    work = paint.guard(body if paint.colour is SYNC else abody, store=store, key="k", operation="o")
    winner["fp"] = _fp(work)
    with pytest.raises(ClaimLostError):
        await paint.call(work)


async def test_nested_guards_keep_apart(paint, store, calls):
    inner = paint.guard(lambda x: calls.append(("inner", x)) or x + 1, store=store, key="i:{x}")

    def outer(x):
        calls.append(("outer", x))
        before = current().key
        value = inner(x)
        assert current().key == before
        return value

    async def aouter(x):
        calls.append(("outer", x))
        before = current().key
        value = await inner(x)
        assert current().key == before
        return value

    fn = paint.guard(outer if paint.colour is SYNC else aouter, store=store, key="o:{x}")
    assert await paint.call(fn, 1) == 2
    assert await paint.call(fn, 1) == 2
    assert await paint.call(inner, 1) == 2
    assert calls == [("outer", 1), ("inner", 1)]


@pytest.mark.parametrize("mode", ["return", "wait"])
async def test_recursion_on_one_key_is_an_error_not_a_deadlock(paint, store, mode):
    def body(n):
        return fn(n)

    async def abody(n):
        return await fn(n)

    fn = paint.guard(
        body if paint.colour is SYNC else abody, store=store, on_duplicate=mode, wait_timeout=60
    )
    with pytest.raises(InProgressError, match="call chain"):
        await paint.call(fn, 1)


async def test_recursion_on_other_keys_works(paint, store):
    def body(n):
        return 1 if n == 0 else n * fn(n - 1)

    async def abody(n):
        return 1 if n == 0 else n * await fn(n - 1)

    fn = paint.guard(body if paint.colour is SYNC else abody, store=store)
    assert await paint.call(fn, 5) == 120


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ttl": -1}, "ttl"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": "1h"}, "seconds or a timedelta"),
        ({"ttl": float("nan")}, "ttl"),
        ({"ttl": 1e12}, "ttl=None"),
        ({"lease": 0}, "lease"),
        ({"lease": 60, "ttl": 30}, "longer than ttl"),
        ({"max_run": 10}, "max_run"),
        ({"wait_timeout": -1}, "wait_timeout"),
        ({"on_duplicate": "skip"}, "'return', 'raise', 'wait'"),
        ({"on_failure": "ignore"}, "'unlock', 'lock'"),
        ({"on_crash": "forget"}, "recover"),
        ({"on_unavailable": "skip"}, "'raise', 'run'"),
        ({"on_unavailable": "run", "on_crash": "hold"}, "voids"),
        ({"on_unavailable": "run", "require": "power_loss"}, "voids"),
        ({"require": "luck"}, "process_crash"),
        ({"key": 7}, "template"),
        ({"key": "invoice:{nobody}"}, "nobody"),
        ({"fingerprint": lambda x: x}, "needs key="),
        ({"store": "nonsense://x"}, "sqlite:///"),
        ({"store": 7}, "semel.stores"),
        ({"max_waiters": 0}, "max_waiters"),
        ({"max_result": -1}, "max_result=-1"),
        ({"codec": 5}, "encode"),
        ({"key": "", "fingerprint": None}, "empty"),
        ({"key": "k:{x}", "fingerprint": "x"}, "function of the arguments"),
        ({"scope": 5}, "tenant"),
        ({"version": 2}, "version"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_decoration(settings, says):
    with pytest.raises(SettingsError, match=says):

        @idempotent(**settings)
        def work(x):
            return x


def test_unknown_options_are_refused():
    with pytest.raises(TypeError):
        idempotent(retries=3)


def test_generators_are_refused_at_decoration():
    with pytest.raises(SettingsError, match="generator"):

        @idempotent()
        def work():
            yield 1

    with pytest.raises(SettingsError, match="generator"):

        @idempotent()
        async def awork():
            yield 1


def test_an_async_recover_under_a_sync_function_is_refused():
    async def recover(attempt):
        return Retry()

    with pytest.raises(SettingsError, match="async"):

        @idempotent(on_crash=recover)
        def work():
            pass


async def test_require_refuses_a_weaker_store(paint, store, calls):
    fn = paint.guard(lambda: calls.append(1), store=store, key="k", require="process_crash")
    with pytest.raises(SettingsError, match=r"process_crash.*memory"):
        await paint.call(fn)
    assert calls == []


def test_without_a_store_there_is_one_warning(monkeypatch, caplog, calls):
    monkeypatch.delenv("SEMEL_URL", raising=False)
    semel.configure(store=None)

    @idempotent
    def work(x):
        calls.append(x)
        return x

    with caplog.at_level(logging.WARNING):
        assert work(1) == work(1) == work(1) == 1
        work(2)
    assert calls == [1, 2]
    assert caplog.text.count("no store given") == 1
    semel.configure(store=None)


def test_the_store_comes_from_the_environment(monkeypatch, tmp_path, calls):
    monkeypatch.setenv("SEMEL_URL", f"sqlite:///{tmp_path}/semel.db")
    semel.configure(store=None)

    @idempotent(key="k")
    def work():
        calls.append(1)
        return 1

    assert work() == work() == 1
    assert calls == [1]
    assert (tmp_path / "semel.db").exists()
    semel.configure(store=None)


async def test_forget_lets_it_run_again(paint, store, calls):
    def work(x):
        calls.append(x)
        return x

    work = paint.guard(work, store=store)
    await paint.call(work, 1)
    assert await paint.call(work.forget, 1) is True
    assert await paint.call(work.forget, 1) is False
    await paint.call(work, 1)
    assert calls == [1, 1]


async def test_a_record_expires_after_its_ttl(paint, store, clock, calls):
    def work():
        calls.append(1)
        return len(calls)

    work = paint.guard(work, store=store, ttl=60)
    assert await paint.call(work) == 1
    clock.advance(59)
    assert await paint.call(work) == 1
    clock.advance(2)
    assert await paint.call(work) == 2


# --- once ---------------------------------------------------------------------------------------


def test_once_runs_a_block_once(store, calls):
    with once("invoice:7", store=store) as attempt:
        assert attempt.number == 1
        assert current() is attempt
        calls.append(1)
        attempt.done({"id": 7})
    with pytest.raises(DuplicateExecutionError) as caught, once("invoice:7", store=store):
        calls.append(2)
    assert caught.value.result == {"id": 7}
    assert calls == [1]


async def test_once_in_async(store, calls):
    for n in range(2):
        async with once("k", store=store, on_duplicate="return") as attempt:
            if attempt.replayed:
                assert n == 1
                assert attempt.result == "r"
            else:
                calls.append(n)
                await step("s", lambda: 1)
                attempt.done("r")
    assert calls == [0]


def test_once_without_asking_for_replayed_is_told(store):
    with once("k", store=store, on_duplicate="return"):
        pass
    with (
        pytest.raises(SettingsError, match=r"attempt\.replayed"),
        once("k", store=store, on_duplicate="return"),
    ):
        pass


def test_once_unlocks_on_failure_and_holds_on_interruption(store):
    with pytest.raises(ValueError, match="x"), once("k", store=store):
        raise ValueError("x")
    with once("k", store=store) as attempt:
        assert attempt.number == 2
    with pytest.raises(SystemExit), once("h", store=store, on_crash="hold"):
        raise SystemExit
    with pytest.raises(OutcomeUnknownError), once("h", store=store, on_crash="hold"):
        raise AssertionError("must not be entered")


def test_once_compares_its_fingerprint_and_operation(store):
    with once("k", store=store, fingerprint={"amount": 5}):
        pass
    with (
        pytest.raises(IdempotencyConflictError),
        once("k", store=store, fingerprint={"amount": 6}),
    ):
        raise AssertionError("must not be entered")


def test_once_recovers(store, clock, calls):
    key = make_key("k", operation="once")
    claimed_elsewhere(store, key, Terms(hold=True))
    clock.advance(31)
    with once(
        "k", store=store, on_duplicate="return", on_crash=lambda attempt: Recovered("found")
    ) as attempt:
        assert attempt.replayed
        assert attempt.result == "found"
    with pytest.raises(DuplicateExecutionError), once("k", store=store):
        raise AssertionError("must not be entered")


def test_once_recovers_a_value_that_cannot_be_stored(store, clock):
    claimed_elsewhere(store, make_key("k", operation="once"), Terms(hold=True))
    clock.advance(31)
    thing = object()
    with once(
        "k", store=store, on_duplicate="return", on_crash=lambda attempt: Recovered(thing)
    ) as attempt:
        assert attempt.replayed
        assert attempt.result is thing
    with (
        pytest.raises(ResultLostError),
        once("k", store=store, on_duplicate="return") as attempt,
    ):
        raise AssertionError("must not be entered")


@pytest.mark.parametrize("key", ["k:{order}", lambda order, session, amount: f"k:{order}"])
def test_argument_without_canonical_form_is_not_compared_where_a_key_is_given(
    store, calls, caplog, key
):
    @idempotent(store=store, key=key)
    def pay(order, session, amount):
        calls.append(order)
        return order

    assert pay(1, object(), 40) == pay(1, object(), 40) == 1

    assert calls == [1]
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "parameter session" in warning
    assert "fingerprint=" in warning
    with pytest.raises(IdempotencyConflictError):
        pay(1, object(), 41)


@dataclass
class Body:
    amount: int
    session: object


@pytest.mark.parametrize(
    "arguments",
    [
        lambda amount: ([Body(amount, object())], {}),
        lambda amount: ([{"amount": amount, "session": object()}], {}),
        lambda amount: ([(amount, object())], {}),
        lambda amount: ([1, amount, object()], {}),
        lambda amount: ([1], {"amount": amount, "session": object()}),
    ],
    ids=["dataclass", "dict", "tuple", "args", "kwargs"],
)
def test_values_beside_one_without_canonical_form_are_compared(store, calls, caplog, arguments):
    @idempotent(store=store, key="k")
    def pay(order, *args, **kwargs):
        calls.append(order)

    for amount in (40, 40):
        args, kwargs = arguments(amount)
        pay(*args, **kwargs)

    assert len(calls) == 1
    assert len(caplog.records) == 1
    args, kwargs = arguments(41)
    with pytest.raises(IdempotencyConflictError):
        pay(*args, **kwargs)


def test_argument_that_contains_itself_is_left_out_as_a_whole(store, calls):
    order = []
    order.append(order)

    @idempotent(store=store, key="k")
    def pay(order, amount, session):
        calls.append(amount)

    pay(order, 40, object())
    pay(order, 40, object())

    assert calls == [40]
    with pytest.raises(IdempotencyConflictError):
        pay(order, 41, object())


def test_template_field_without_text_form_is_refused(store):
    @idempotent(store=store, key="k:{session}")
    def pay(session):
        return 1

    with pytest.raises(SettingsError, match="session"):
        pay(object())


def test_default_lease_is_at_most_the_ttl(store):
    short = idempotent(store=store, ttl=10, operation="short")(lambda: 1)
    long = idempotent(store=store, operation="long")(lambda: 1)

    assert short.key_for.__self__._policy.terms.lease_s == 10
    assert long.key_for.__self__._policy.terms.lease_s == 30
    assert short() == 1
    with once("k", store=store, ttl=10):
        pass


async def test_a_step_after_the_end_is_refused(store, calls):
    import asyncio

    over = asyncio.Event()

    async def straggler():
        await over.wait()
        await step("late", lambda: calls.append(1))

    @idempotent(store=store)
    async def work():
        return asyncio.create_task(straggler()) and 1

    tasks_before = asyncio.all_tasks()
    assert await work() == 1
    over.set()
    (task,) = asyncio.all_tasks() - tasks_before
    with pytest.raises(SettingsError, match="is over"):
        await task
    assert calls == []


NOTHING_LEFT = """
import gc

from semel import idempotent
from semel.stores import MemoryStore


@idempotent(store=MemoryStore())
def work(n):
    return n


work(0)
gc.collect()
gc.disable()
for n in range(1, 50):
    work(n)
    work(n)
assert gc.collect() == 0
"""


def test_a_call_leaves_nothing_for_the_garbage_collector():
    """In a process of its own: here, others' threads leave garbage of theirs."""
    ended = subprocess.run(
        [sys.executable, "-c", NOTHING_LEFT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


async def test_an_error_of_ours_that_will_pass_is_never_locked_in(paint, store, calls):
    def work():
        calls.append(1)
        if len(calls) == 1:
            raise InProgressError("an inner guard is busy", key="inner")
        return "ok"

    work = paint.guard(work, store=store, on_failure="lock")
    with pytest.raises(InProgressError, match="inner"):
        await paint.call(work)
    assert await paint.call(work) == "ok"


@pytest.mark.parametrize(("policy", "state"), [("hold", State.UNKNOWN), ("retry", State.FAILED)])
async def test_a_body_may_say_that_it_cannot_tell(paint, store, calls, policy, state):
    def work():
        calls.append(1)
        raise OutcomeUnknownError("the provider did not answer in time")

    work = paint.guard(work, store=store, key="k", on_crash=policy, on_failure="lock")
    with pytest.raises(OutcomeUnknownError, match="provider"):
        await paint.call(work)
    assert (await paint.ledger(store, "look", make_key("k").id)).state is state


async def test_functions_of_the_call_get_the_defaults_too(paint, store, calls):
    def pay(order, amount=5, *items, note="", **more):
        calls.append(order)
        return order

    def seen(order, amount, *items, note, **more):
        return f"{order}-{amount}-{items}-{note}-{more}"

    pay = paint.guard(pay, store=store, key=seen, fingerprint=seen, scope=seen)
    await paint.call(pay, 1)
    await paint.call(pay, order=1, amount=5, note="")
    assert calls == [1]
    assert pay.key_for(1, 5, "a", note="n", extra=2).text == "1-5-('a',)-n-{'extra': 2}"


async def test_a_step_name_is_taken_once_per_attempt(paint, store, calls):
    def body():
        for item in "ab":
            step("ship", calls.append, item)

    async def abody():
        for item in "ab":
            await step("ship", calls.append, item)

    work = paint.guard(body if paint.colour is SYNC else abody, store=store)
    with pytest.raises(SettingsError, match="its own name"):
        await paint.call(work)
    assert calls == ["a"]


async def test_a_step_that_failed_may_be_tried_again_in_the_same_attempt(paint, store, calls):
    def flaky():
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("blip")
        return "ok"

    def body():
        try:
            return step("charge", flaky)
        except ConnectionError:
            return step("charge", flaky)

    async def abody():
        try:
            return await step("charge", flaky)
        except ConnectionError:
            return await step("charge", flaky)

    work = paint.guard(body if paint.colour is SYNC else abody, store=store)
    assert await paint.call(work) == "ok"
    assert len(calls) == 2
