"""Steps whose values the store refuses for good: recorded as lost, and not run again."""

from __future__ import annotations

import asyncio
import logging

import pytest

from semel import current, idempotent, once, step
from semel.errors import (
    CorruptRecordError,
    ResultLostError,
    SettingsError,
    StoreUnavailableError,
)
from semel.stores import MemoryStore


class Refusing:
    """A ledger that raises `error` for notes of more than `most` bytes; the rest is passed on."""

    def __init__(self, ledger, error, most):
        self._ledger = ledger
        self._error = error
        self._most = most
        self.hung = None

    def __getattr__(self, name):
        return getattr(self._ledger, name)

    async def note(self, claim, name, data):
        if self.hung is not None:
            hung, self.hung = self.hung, None
            hung.set()
            await asyncio.sleep(60)
        if len(data) > self._most:
            raise self._error
        return await self._ledger.note(claim, name, data)


class RefusingStore(MemoryStore):
    def __init__(self, error, most=200):
        super().__init__()
        self.refusing = {}
        self._refusal = (error, most)

    def ledger(self, colour):
        made = self.refusing.get(colour.name)
        if made is None:
            made = self.refusing[colour.name] = Refusing(super().ledger(colour), *self._refusal)
        return made


REFUSALS = [
    SettingsError("the database refuses a value"),
    StoreUnavailableError("it does not fit into max_allowed_packet", again=False),
]


@pytest.fixture(params=REFUSALS, ids=["refused", "too-large"])
def store(request):
    return RefusingStore(request.param)


def test_refused_step_is_recorded_as_lost_and_does_not_run_again(store, caplog):
    charged = []

    @idempotent(key="k", store=store)
    def pay():
        charged.append(step("charge", lambda: "x" * 500))
        if current().number == 1:
            raise ConnectionError
        raise AssertionError("not reached")

    with caplog.at_level(logging.WARNING, logger="semel"), pytest.raises(ConnectionError):
        pay()
    assert charged == ["x" * 500]
    assert "step 'charge' of 'k' happened, but its result cannot be stored" in caplog.text
    assert "refuses a value" in caplog.text or "max_allowed_packet" in caplog.text
    with pytest.raises(ResultLostError, match="of step 'charge' could not be stored"):
        pay()
    assert len(charged) == 1


async def test_refused_step_of_an_async_call_does_not_stop_the_call(store):
    done = []

    @idempotent(key="k", store=store)
    async def pay():
        done.append(await step("charge", lambda: "x" * 500))
        return await step("mail", lambda: "sent")

    assert [await pay(), await pay()] == ["sent", "sent"]
    assert done == ["x" * 500]


def test_error_says_that_the_step_happened_when_even_the_marker_is_refused():
    for refusal in REFUSALS:
        store = RefusingStore(refusal, most=0)
        with (
            pytest.raises(type(refusal), match="step 'charge' of 'k' happened, but") as caught,
            once("k", store=store),
        ):
            step("charge", lambda: 1)
        assert str(refusal) in str(caught.value)
        assert not getattr(caught.value, "happened", False)


def test_unreadable_record_is_not_answered_with_a_marker():
    store = RefusingStore(CorruptRecordError("the record cannot be read"))
    with (
        pytest.raises(CorruptRecordError, match=r"^the record cannot be read$"),
        once("k", store=store),
    ):
        step("charge", lambda: "x" * 500)


async def test_refused_step_of_a_cancelled_call_is_recorded_as_lost(store):
    runs = []

    @idempotent(key="k", store=store)
    async def pay():
        await step("charge", lambda: runs.append(1) or "x" * 500)

    async with once("other", store=store):
        pass
    [ledger] = store.refusing.values()
    hung = ledger.hung = asyncio.Event()
    task = asyncio.create_task(pay())
    await hung.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ResultLostError, match="of step 'charge'"):
        await pay()
    assert runs == [1]
