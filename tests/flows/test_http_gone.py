"""Clients that are gone before their answer is, and handlers that died: what a retry gets.

Each of these ran a handler twice, or said so in the log, until the simulation met it
(`tests/simulation/test_http_simulation.py`).
"""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest
from starlette.responses import StreamingResponse

from semel import keys
from semel.colour import ASYNC
from semel.http import IdempotencyMiddleware, Response, Rule
from semel.http.asgi import request_of
from semel.http.protocol import compared
from semel.http.request import record_key
from semel.policy import Recovered
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock


class Line:
    """A client that hangs up when told to; then what is sent to it raises, as of ASGI 2.4."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent = []
        self._body = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive(self):
        if self._body:
            return self._body.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self.gone.is_set():
            raise OSError("gone")
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def body(self):
        return b"".join(message["body"] for message in self.sent[1:])


def scope(spec_version="2.3"):
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": spec_version},
        "method": "POST",
        "path": "/pay",
        "query_string": b"",
        "headers": [(b"idempotency-key", b'"k"')],
    }


class Shop:
    """An app that counts its runs; `answer` is the rest of it."""

    def __init__(self, answer) -> None:
        self.runs = 0
        self.line = Line()
        self._answer = answer

    async def __call__(self, scope, receive, send):
        self.runs += 1
        await receive()
        await self._answer(self, scope, receive, send)

    async def first(self, door) -> None:
        """The request whose client hangs up."""
        try:
            await door(scope(), self.line.receive, self.line.send)
        except OSError:
            assert self.line.gone.is_set()

    async def again(self, door) -> Line:
        line = Line()
        await door(scope(), line.receive, line.send)
        return line


def door_of(app, **rule):
    settings = SimpleNamespace(clock=FakeClock())
    settings.store = MemoryStore(clock=settings.clock)
    door = IdempotencyMiddleware(app, scope="all", store=settings.store, rule=Rule(**rule))
    return door, settings


# --- gone while the handler runs ----------------------------------------------------------------


async def stream(shop, scope, receive, send):
    async def pieces():
        yield b"on"
        await asyncio.sleep(0.01)
        yield b"ce"

    shop.line.gone.set()
    await StreamingResponse(pieces(), 201)(scope, receive, send)


async def cancelled_by_its_framework(shop, scope, receive, send):
    """As Django's handler runs a view."""

    async def view():
        shop.line.gone.set()
        await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"once"})

    tasks = [asyncio.ensure_future(receive()), asyncio.ensure_future(view())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def with_hints(shop, scope, receive, send):
    shop.line.gone.set()
    await send({"type": "http.response.early_hint", "links": [b"</style.css>"]})
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"once"})


@pytest.mark.parametrize("answer", [stream, cancelled_by_its_framework, with_hints])
async def test_a_client_that_hangs_up_finds_the_whole_response_when_it_asks_again(answer):
    shop = Shop(answer)
    door, _ = door_of(shop)
    await shop.first(door)
    line = await shop.again(door)
    assert (line.status, line.body) == (201, b"once")
    assert line.headers[b"idempotent-replayed"] == b"true"
    assert shop.runs == 1


async def test_an_app_hears_of_it_when_its_response_is_recorded():
    heard = asyncio.Event()

    async def events(shop, scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        shop.line.gone.set()
        assert (await receive())["type"] == "http.disconnect"
        heard.set()

    shop = Shop(events)
    door, _ = door_of(shop)
    await shop.first(door)
    assert heard.is_set()


async def test_an_app_that_waits_for_nothing_else_hears_of_it_after_max_run():
    async def waits(shop, scope, receive, send):
        shop.line.gone.set()
        assert (await receive())["type"] == "http.disconnect"

    shop = Shop(waits)
    door, _ = door_of(shop, lease=0.05, max_run=0.05)
    async with asyncio.timeout(10):
        await shop.first(door)


# --- gone while a response gathers --------------------------------------------------------------


async def test_a_response_that_goes_live_for_nobody_is_no_error_of_ours(caplog):
    recorded = asyncio.Event()

    async def slowly(shop, scope, receive, send):
        await send({"type": "http.response.start", "status": 201})
        shop.line.gone.set()
        await send({"type": "http.response.body", "body": b"on", "more_body": True})
        await asyncio.sleep(0.05)
        recorded.set()
        await send({"type": "http.response.body", "body": b"ce"})

    shop = Shop(slowly)
    door, _ = door_of(shop, linger=0.01)
    with caplog.at_level(logging.ERROR, "semel"):
        await shop.first(door)
    assert recorded.is_set()
    assert caplog.text == ""
    assert (await shop.again(door)).status == 410
    assert shop.runs == 1


# --- handlers that died -------------------------------------------------------------------------


async def died(door, settings):
    """A process that claimed the key, and was never heard of again."""
    ruling, request = door._rules.common, request_of(scope())
    key = record_key(ruling, request, "k", "all")
    await settings.store.ledger(ASYNC).claim(
        key,
        attempt=keys.new_attempt(),
        fingerprint=compared("bytes", request, b"{}"),
        terms=ruling.policy.terms,
    )
    settings.clock.advance(31)


async def test_a_crash_that_is_stored_is_the_answer_whatever_an_error_is():
    shop = Shop(with_hints)
    door, settings = door_of(shop, on_error="release", on_crash="store")
    await died(door, settings)
    first, second = await shop.again(door), await shop.again(door)
    assert (first.status, second.status) == (500, 500)
    assert second.headers[b"idempotent-replayed"] == b"true"
    assert shop.runs == 0


@pytest.mark.parametrize("status", [200, 429, 503])
async def test_what_was_found_out_is_the_answer_whatever_its_status(status):
    shop = Shop(with_hints)
    found = Recovered(Response(status, (), b"found"))
    door, settings = door_of(shop, on_crash=lambda attempt: found)
    await died(door, settings)
    first, second = await shop.again(door), await shop.again(door)
    assert (first.status, first.body) == (second.status, second.body) == (status, b"found")
    assert shop.runs == 0
