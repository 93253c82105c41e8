"""Handlers that raise while their response is made: `on_error` decides what a retry gets.

Each case runs before the first byte is sent (within `linger`) and after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import subprocess
import sys

import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI
from sqlalchemy.orm import Session
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import semel
from semel.colour import ASYNC, SYNC, run
from semel.http import IdempotencyMiddleware, Rule, WSGIMiddleware, attempt_of
from semel.http.fastapi import Idempotency, IdempotentRoute
from semel.stores import MemoryStore, SQLStore, connect
from semel.testing.clock import FakeClock
from semel.values import State
from support.web import TESTS, Wire, ask, scope_of, until
from support.wrapped import WrappedStore
from support.wsgi import TEXT, Serving, environ_of, raised
from support.wsgi import ask as ask_wsgi

LATER_S = 60
EVENTS = ("Content-Type", "text/event-stream")

# What the record says after a failure, and what a retry gets: status, problem, further runs.
FAILURES = {
    "release": (State.FAILED, (200, None, 1)),
    "store": (State.COMPLETED, (500, "interrupted", 0)),
    "hold": (State.UNKNOWN, (409, "outcome-unknown", 0)),
}


class BrokenHandlerError(Exception):
    """What the handler raises."""


class Effects:
    """Handlers that have an effect, send half of a response and raise; a retry succeeds."""

    def __init__(self):
        self.runs = 0
        self.wire = None
        self.ending = BrokenHandlerError("midway")

    async def pieces(self):
        self.runs += 1
        first = self.runs == 1
        yield b"half"
        if first and self.wire is not None:
            await until(lambda: self.wire.so_far == b"half")
        if first and self.ending is not None:
            raise self.ending
        yield b" whole"


def plain(effects):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async for piece in effects.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


def starlette(effects, middleware=()):
    async def pay(request):
        return StreamingResponse(effects.pieces())

    routes = [Route("/pay", pay, methods=["POST"])]
    return Starlette(routes=routes, middleware=list(middleware))


def asgi_door(app_of, effects, store, rule):
    if app_of is not None:
        return IdempotencyMiddleware(app_of(effects), store=store, scope="shop", rule=rule)
    app = FastAPI()
    app.router.route_class = IdempotentRoute
    idempotency = Idempotency(store=store, scope="shop", rule=rule)

    @app.post("/pay", dependencies=[Depends(idempotency)])
    async def pay():
        return StreamingResponse(effects.pieces())

    return app


async def state(store):
    [record] = await store.ledger(ASYNC).records()
    return record.state


async def send_and_fail(app, wire, **request):
    """Send a request whose handler raises; frameworks may group what it raised."""
    with pytest.raises((BrokenHandlerError, ExceptionGroup)):
        await app(scope_of(key="k", **request), wire.receive, wire.send)


frameworks = pytest.mark.parametrize(
    "app_of",
    [plain, starlette, None],
    ids=["plain", "starlette", "fastapi"],
)
decisions = pytest.mark.parametrize("on_error", FAILURES)


# --- ASGI ---------------------------------------------------------------------------------------


@frameworks
@decisions
@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
async def test_asgi_handler_that_raises_midway_is_settled_as_on_error_says(app_of, on_error, sent):
    effects, store, wire = Effects(), MemoryStore(), Wire(b"{}")
    effects.wire = wire if sent else None
    rule = Rule(on_error=on_error, linger=0.01 if sent else LATER_S)
    app = asgi_door(app_of, effects, store, rule)
    await send_and_fail(app, wire)
    assert (wire.so_far == b"half") is sent
    recorded, (status, problem, more) = FAILURES[on_error]
    assert await state(store) is recorded
    reply = await ask(app, key="k")
    assert (reply.status, reply.problem) == (status, problem)
    assert effects.runs == 1 + more


@pytest.mark.parametrize("on_error", FAILURES)
async def test_asgi_stream_that_returns_without_its_end_has_failed(on_error):
    store, runs = MemoryStore(), []

    async def app(scope, receive, send):
        runs.append(1)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": len(runs) == 1})

    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=Rule(on_error=on_error))
    wire = Wire(b"{}")
    await door(scope_of(key="k"), wire.receive, wire.send)
    assert wire.so_far == b"half"
    recorded, (status, problem, more) = FAILURES[on_error]
    assert await state(store) is recorded
    reply = await ask(door, key="k")
    assert (reply.status, reply.problem, len(runs)) == (status, problem, 1 + more)


LENGTH = (b"content-length", b"10")


def shorter_at_first(*pieces):
    """An app that ends its first response before its Content-Length."""
    runs = []

    async def app(scope, receive, send):
        runs.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": [LENGTH]})
        for piece in pieces if len(runs) == 1 else (b"0123456789",):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app, runs


@decisions
@pytest.mark.parametrize("most", [3, 100], ids=["live", "gathered"])
async def test_response_shorter_than_its_length_has_failed(on_error, most):
    """The client sees that it broke off: a replay without a length would look whole."""
    app, runs = shorter_at_first(b"0123", b"4")
    store = MemoryStore()
    rule = Rule(on_error=on_error, max_response=most)
    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=rule)
    first = await ask(door, key="k")
    recorded, (status, problem, more) = FAILURES[on_error]
    answered = on_error == "store" and most == 100
    assert first.problem == ("interrupted" if answered else None)
    assert await state(store) is recorded
    reply = await ask(door, key="k")
    assert (reply.status, reply.problem, len(runs)) == (status, problem, 1 + more)


async def test_live_response_is_recorded_before_the_byte_that_completes_its_length():
    """The client may retry before the app says that this was the end."""
    store, states = MemoryStore(), []

    async def note(message):
        states.append(await state(store))

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [LENGTH]})
        await send({"type": "http.response.body", "body": b"01234", "more_body": True})
        await send({"type": "http.response.body", "body": b"56789", "more_body": True})
        raise BrokenHandlerError("after the last byte")

    rule = Rule(max_response=3, on_error="hold")
    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=rule)
    await send_and_fail(door, Wire(b"{}", on_send=note))
    assert states == [State.PENDING, State.PENDING, State.COMPLETED]
    assert (await ask(door, key="k")).problem == "response-not-kept"


def in_two_pieces(environ, start_response):
    start_response("200 OK", [TEXT, ("Content-Length", "10")])
    yield b"01234"
    yield b"56789"


def in_one_piece(environ, start_response):
    start_response("200 OK", [TEXT, ("Content-Length", "10")])
    yield b"0123456789"


def written_in_two_pieces(environ, start_response):
    write = start_response("200 OK", [TEXT, ("Content-Length", "10")])
    write(b"01234")
    write(b"56789")
    return []


@pytest.mark.parametrize("app", [in_two_pieces, in_one_piece, written_in_two_pieces])
def test_wsgi_live_response_is_recorded_before_the_byte_that_completes_its_length(app):
    store = MemoryStore()
    served = Serving(wsgi_door(app, store, max_response=3), environ_of())
    body = b"".join(served.reply.pieces)
    while len(body) < 10:
        body += next(served.pieces)
    assert (body, wsgi_state(store)) == (b"0123456789", State.COMPLETED)
    served.hang_up()


@pytest.mark.parametrize(
    ("method", "status"), [("HEAD", 200), ("POST", 304), ("POST", 204)], ids=str
)
async def test_response_without_a_body_may_have_a_length(method, status):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": status, "headers": [LENGTH]})
        await send({"type": "http.response.body", "body": b""})

    rule = Rule(methods=("HEAD", "POST"))
    door = IdempotencyMiddleware(app, store=MemoryStore(), scope="shop", rule=rule)
    await ask(door, method=method, key="k")
    assert (await ask(door, method=method, key="k")).replayed


@decisions
async def test_failure_inside_a_base_http_middleware_shows_where_there_is_a_length(on_error):
    async def hand_on(request, call_next):
        return await call_next(request)

    effects, store = Effects(), MemoryStore()

    async def pay(request):
        return StreamingResponse(effects.pieces(), headers={"Content-Length": "10"})

    routes = [Route("/pay", pay, methods=["POST"])]
    inner = Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=hand_on)])
    app = IdempotencyMiddleware(inner, store=store, scope="shop", rule=Rule(on_error=on_error))
    await send_and_fail(app, Wire(b"{}"))
    assert await state(store) is FAILURES[on_error][0]


async def test_store_outage_at_the_first_byte_still_records_the_end():
    store = WrappedStore(MemoryStore())
    store.line.lose_request["renew"] = 1
    wire = Wire(b"{}")
    effects = Effects()
    effects.wire, effects.ending = wire, None
    app = asgi_door(plain, effects, store, Rule(linger=0.01))
    assert (await ask(app, key="k", wire=wire)).body == b"half whole"
    assert (await ask(app, key="k")).problem == "response-not-kept"


async def test_live_response_that_is_taken_over_does_not_change_the_record():
    clock = FakeClock()
    store, wire, go_on = MemoryStore(clock=clock), Wire(b"{}"), asyncio.Event()
    runs = []

    async def app(scope, receive, send):
        runs.append(1)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if len(runs) == 1:
            await go_on.wait()
        await send({"type": "http.response.body", "body": b"end"})

    door = IdempotencyMiddleware(app, store=store, scope="shop")
    first = asyncio.create_task(ask(door, key="k", wire=wire))
    await until(lambda: wire.sent)
    clock.advance(31)  # its process was frozen, and a retry took over
    assert (await ask(door, key="k")).body == b"end"
    go_on.set()
    assert (await first).body == b"end"
    assert (await ask(door, key="k")).problem == "response-not-kept"


async def test_retry_during_a_live_response_is_in_progress_and_after_it_not_kept():
    store, wire, effects = MemoryStore(), Wire(b"{}"), Effects()
    go_on = asyncio.Event()

    async def app(scope, receive, send):
        effects.runs += 1
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b" whole"})

    door = IdempotencyMiddleware(app, store=store, scope="shop")
    first = asyncio.create_task(ask(door, key="k", wire=wire))
    await until(lambda: wire.so_far == b"half")
    assert (await ask(door, key="k")).problem == "in-progress"
    go_on.set()
    assert (await first).body == b"half whole"
    assert (await ask(door, key="k")).problem == "response-not-kept"
    assert effects.runs == 1


async def test_end_of_a_live_response_is_recorded_before_it_is_sent():
    store, states = MemoryStore(), []

    async def note(message):
        if message["type"] == "http.response.body" and not message.get("more_body"):
            states.append(await state(store))

    wire = Wire(b"{}", on_send=note)
    effects = Effects()
    effects.wire, effects.ending = wire, None
    app = asgi_door(plain, effects, store, Rule(linger=0.01))
    assert (await ask(app, key="k", wire=wire)).body == b"half whole"
    assert states == [State.COMPLETED]


@decisions
@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_client_that_leaves_a_live_response_does_not_make_a_retry_run(on_error, spec_version):
    """Before ASGI 2.4 Starlette listens for the disconnect; since then `send` raises."""
    store, runs = MemoryStore(), []
    wire = Wire(b"{}")

    async def send(message):
        if wire.gone.is_set():
            raise OSError("the client is gone")
        await wire.send(message)

    async def pieces():
        runs.append(1)
        yield b"half"
        await until(lambda: wire.so_far == b"half")
        wire.gone.set()
        await asyncio.sleep(0.01)
        yield b" whole"

    async def pay(request):
        return StreamingResponse(pieces(), media_type="text/event-stream")

    inner = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app = IdempotencyMiddleware(inner, store=store, scope="shop", rule=Rule(on_error=on_error))
    asgi = {"version": "3.0", "spec_version": spec_version}
    with contextlib.suppress(Exception):  # ClientDisconnect, which the server ignores
        await app(scope_of("/pay", key="k", asgi=asgi), wire.receive, send)
    assert (await ask(app, "/pay", key="k")).problem == "response-not-kept"
    assert runs == [1]


@decisions
async def test_handler_that_ends_its_response_early_for_a_client_that_left_has_not_failed(on_error):
    """The response is shorter than its Content-Length, because the handler noticed the client."""
    store, wire, runs = MemoryStore(), Wire(b"{}"), []

    async def app(scope, receive, send):
        runs.append(1)
        headers = [(b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        wire.gone.set()
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": b""})

    rule = Rule(on_error=on_error, max_response=1)
    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=rule)
    await door(scope_of(key="k"), wire.receive, wire.send)
    assert (await ask(door, key="k")).problem == "response-not-kept"
    assert runs == [1]


@decisions
async def test_handler_that_raises_after_its_client_left_has_still_failed(on_error):
    store, wire = MemoryStore(), Wire(b"{}")

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        wire.gone.set()
        assert (await receive())["type"] == "http.request"
        assert (await receive())["type"] == "http.disconnect"
        raise BrokenHandlerError("of its own")

    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=Rule(on_error=on_error))
    await send_and_fail(door, wire)
    assert await state(store) is FAILURES[on_error][0]


@pytest.mark.parametrize(
    ("on_error", "recorded"), [("release", State.FAILED), ("hold", State.UNKNOWN)]
)
async def test_live_response_that_is_cancelled_is_settled_as_a_crash(on_error, recorded):
    store, wire = MemoryStore(), Wire(b"{}")

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.sleep(LATER_S)

    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=Rule(on_error=on_error))
    asking = asyncio.create_task(ask(door, key="k", wire=wire))
    await until(lambda: wire.sent)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await state(store) is recorded


async def test_background_task_that_raises_leaves_the_sent_response_recorded():
    """The response ends with its last byte, and the task runs after it."""
    store, runs = MemoryStore(), []

    def fail():
        raise BrokenHandlerError("in the background")

    async def pay(request):
        runs.append(1)
        return JSONResponse({"paid": len(runs)}, background=BackgroundTask(fail))

    inner = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
    app = IdempotencyMiddleware(inner, store=store, scope="shop", rule=Rule(on_error="hold"))
    wire = Wire(b"{}")
    await send_and_fail(app, wire)
    assert wire.reply().json() == {"paid": 1}
    reply = await ask(app, "/pay", key="k")
    assert (reply.replayed, reply.json(), runs) == (True, {"paid": 1}, [1])


@pytest.mark.parametrize("sent", [False, True], ids=["before", "after"])
async def test_failure_inside_a_base_http_middleware_is_recorded_as_the_client_saw_it(sent):
    """It ends the body as if it were whole, and raises only then: a limit that is documented."""

    async def hand_on(request, call_next):
        return await call_next(request)

    effects, store, wire = Effects(), MemoryStore(), Wire(b"{}")
    effects.wire = wire if sent else None
    inner = starlette(effects, [Middleware(BaseHTTPMiddleware, dispatch=hand_on)])
    rule = Rule(linger=0.01 if sent else LATER_S)
    app = IdempotencyMiddleware(inner, store=store, scope="shop", rule=rule)
    await send_and_fail(app, wire)
    assert wire.reply().body == b"half"
    reply = await ask(app, "/pay", key="k")
    assert reply.problem == "response-not-kept" if sent else reply.body == b"half"
    assert effects.runs == 1


async def test_steps_of_a_live_response_are_replayed_to_the_retry():
    store, charged = MemoryStore(), []

    async def charge():
        charged.append(1)
        return len(charged)

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        receipt = await attempt_of(scope).step("charge", charge)
        if attempt_of(scope).number == 1:
            raise BrokenHandlerError("after the charge")
        await send({"type": "http.response.body", "body": b" receipt %d" % receipt})

    door = IdempotencyMiddleware(app, store=store, scope="shop")
    await send_and_fail(door, Wire(b"{}"))
    assert (await ask(door, key="k")).body == b"half receipt 1"
    assert charged == [1]


async def test_response_that_is_sent_for_longer_than_max_run_counts_as_done():
    """Else a retry would run beside a handler that is still sending."""
    store, wire, recorded = MemoryStore(), Wire(b"{}"), asyncio.Event()

    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await recorded.wait()
        await send({"type": "http.response.body", "body": b"end"})

    rule = Rule(lease=0.06, max_run=0.06)
    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=rule)
    first = asyncio.create_task(ask(door, key="k", wire=wire))
    async with asyncio.timeout(10):
        await until(lambda: wire.sent)
        while await state(store) is not State.COMPLETED:
            await asyncio.sleep(0.005)
    recorded.set()
    assert (await first).body == b"end"
    assert (await ask(door, key="k")).problem == "response-not-kept"


async def test_response_that_begins_after_max_run_is_recorded_before_its_first_byte():
    """The lease is no longer renewed then, and would expire while the handler is sending."""
    store, wire, states = MemoryStore(), Wire(b"{}"), []

    async def app(scope, receive, send):
        await asyncio.sleep(0.1)  # longer than max_run
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        states.append(await state(store))
        await send({"type": "http.response.body", "body": b"end"})

    rule = Rule(lease=0.05, max_run=0.05)
    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=rule)
    assert (await ask(door, key="k", wire=wire)).body == b"end"
    assert states == [State.COMPLETED]
    assert (await ask(door, key="k")).problem == "response-not-kept"


async def test_bound_session_is_committed_before_the_first_byte_of_a_live_response(tmp_path):
    """The commit carries the record: a failure after it cannot take the rows back."""
    url = f"sqlite:///{tmp_path}/shop.db"
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE orders (item VARCHAR(50))"))
    store = SQLStore(url, create=True)

    async def app(scope, receive, send):
        with Session(engine) as session:
            attempt_of(scope).bind(session)
            session.execute(sa.text("INSERT INTO orders VALUES ('book')"))
            headers = [(b"content-type", b"text/event-stream")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            raise BrokenHandlerError("after the commit")

    door = IdempotencyMiddleware(app, store=store, scope="shop")
    try:
        await send_and_fail(door, Wire(b"{}"))
        assert (await ask(door, key="k")).problem == "response-not-kept"
        with engine.begin() as connection:
            assert connection.execute(sa.text("SELECT count(*) FROM orders")).scalar() == 1
    finally:
        await store.aclose()
        engine.dispose()


@decisions
@pytest.mark.parametrize("kind", ["postgres_url", "mariadb_url", "redis_url"])
async def test_stream_that_breaks_off_is_settled_on_every_engine(kind, on_error, request):
    url = request.getfixturevalue(kind)
    store = connect(url) if kind == "redis_url" else SQLStore(url, create=True)
    runs = []

    async def app(scope, receive, send):
        runs.append(1)
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if len(runs) == 1:
            raise BrokenHandlerError("midway")
        await send({"type": "http.response.body", "body": b" whole"})

    tenant = f"{kind} {on_error}"
    door = IdempotencyMiddleware(app, store=store, scope=tenant, rule=Rule(on_error=on_error))
    try:
        await send_and_fail(door, Wire(b"{}"))
        _, (status, problem, more) = FAILURES[on_error]
        reply = await ask(door, key="k")
        assert (reply.status, reply.problem, len(runs)) == (status, problem, 1 + more)
    finally:
        await store.aclose()


# --- WSGI ---------------------------------------------------------------------------------------


def generator(effects, environ, start_response):
    start_response("200 OK", [TEXT])
    effects.runs += 1
    yield b"half"
    yield b", more"
    if effects.runs == 1:
        raise effects.ending
    yield b" whole"


def events(effects, environ, start_response):
    effects.runs += 1
    start_response("200 OK", [EVENTS])
    yield b"half, more"
    if effects.runs == 1:
        raise effects.ending
    yield b" whole"


def eager_events(effects, environ, start_response):
    """Raises before an iterable exists: the server has the head, but not a byte."""
    effects.runs += 1
    start_response("200 OK", [EVENTS])
    if effects.runs == 1:
        raise effects.ending
    return [b"half, more whole"]


def written(effects, environ, start_response):
    effects.runs += 1
    write = start_response("200 OK", [TEXT])
    write(b"half")
    write(b", more")
    if effects.runs == 1:
        raise effects.ending
    return [b" whole"]


class Iterable:
    """An iterable with `__next__` and without `close`."""

    def __init__(self, effects):
        self._effects = effects
        self._pieces = iter([b"half", b", more"])

    def __iter__(self):
        return self

    def __next__(self):
        piece = next(self._pieces, None)
        if piece is not None:
            return piece
        if self._effects.runs == 1:
            raise self._effects.ending
        raise StopIteration


def iterable(effects, environ, start_response):
    effects.runs += 1
    start_response("200 OK", [TEXT])
    return Iterable(effects)


def wsgi_door(app, store, **rule):
    return WSGIMiddleware(app, store=store, scope="shop", rule=Rule(**rule))


def wsgi_state(store):
    [record] = run(store.ledger(SYNC).records())
    return record.state


def check_wsgi_retry(door, effects, store, on_error):
    recorded, (status, problem, more) = FAILURES[on_error]
    assert wsgi_state(store) is recorded
    reply = ask_wsgi(door)
    assert (reply.status, reply.problem if problem else None) == (status, problem)
    assert effects.runs == 1 + more


@decisions
@pytest.mark.parametrize("answer", [generator, iterable, written])
@pytest.mark.parametrize("linger", [0, LATER_S], ids=["after", "before"])
def test_wsgi_handler_that_raises_midway_is_settled_as_on_error_says(answer, on_error, linger):
    effects, store = Effects(), MemoryStore()
    app = functools.partial(answer, effects)
    door = wsgi_door(app, store, on_error=on_error, linger=linger)
    if linger and on_error == "store":
        assert ask_wsgi(door).problem == "interrupted"  # nothing was sent: this is the answer
    else:
        with pytest.raises(BrokenHandlerError):
            ask_wsgi(door)
    check_wsgi_retry(door, effects, store, on_error)


@decisions
@pytest.mark.parametrize("answer", [events, eager_events])
def test_wsgi_stream_that_raises_is_settled_as_on_error_says(answer, on_error):
    effects, store = Effects(), MemoryStore()
    door = wsgi_door(functools.partial(answer, effects), store, on_error=on_error)
    with pytest.raises(BrokenHandlerError):
        ask_wsgi(door)
    check_wsgi_retry(door, effects, store, on_error)


@pytest.mark.parametrize(
    ("on_error", "recorded"), [("release", State.FAILED), ("hold", State.UNKNOWN)]
)
@pytest.mark.parametrize("answer", [events, eager_events, written])
def test_wsgi_worker_that_exits_midway_is_settled_as_a_crash(answer, on_error, recorded):
    """As gunicorn ends a worker that takes too long."""
    effects, store = Effects(), MemoryStore()
    effects.ending = SystemExit(1)
    door = wsgi_door(functools.partial(answer, effects), store, on_error=on_error, linger=0)
    with pytest.raises(SystemExit):
        ask_wsgi(door)
    assert wsgi_state(store) is recorded


class CloseRaises:
    """An iterable whose close() raises."""

    def __init__(self, *pieces):
        self._pieces = pieces

    def __iter__(self):
        return iter(self._pieces)

    def close(self):
        raise BrokenHandlerError("close")


@decisions
@pytest.mark.parametrize("kind", [TEXT, EVENTS], ids=["whole", "stream"])
def test_close_that_raises_after_the_whole_response_leaves_it_recorded(on_error, kind):
    store, runs = MemoryStore(), []

    def app(environ, start_response):
        runs.append(1)
        start_response("200 OK", [kind])
        return CloseRaises(b"one", b"two")

    door = wsgi_door(app, store, on_error=on_error)
    with pytest.raises(BrokenHandlerError, match="close"):
        ask_wsgi(door)
    reply = ask_wsgi(door)
    assert reply.replayed or reply.problem == "response-not-kept"
    assert runs == [1]


@decisions
def test_close_that_raises_in_the_middle_of_a_stream_is_a_failure(on_error):
    store, effects = MemoryStore(), Effects()

    def app(environ, start_response):
        effects.runs += 1
        start_response("200 OK", [EVENTS])
        return CloseRaises(b"half", b"whole") if effects.runs == 1 else [b"whole"]

    door = wsgi_door(app, store, on_error=on_error)
    served = Serving(door, environ_of())
    assert next(served.pieces) == b"half"
    with pytest.raises(BrokenHandlerError, match="close"):
        served.hang_up()
    check_wsgi_retry(door, effects, store, on_error)


@decisions
@pytest.mark.parametrize("read", [0, 1], ids=["unread", "half"])
def test_wsgi_client_that_leaves_a_stream_does_not_make_a_retry_run(on_error, read):
    store, effects = MemoryStore(), Effects()
    effects.runs = 1  # the stream does not raise
    door = wsgi_door(functools.partial(events, effects), store, on_error=on_error)
    served = Serving(door, environ_of())
    for _ in range(read):
        next(served.pieces)
    served.hang_up()
    assert ask_wsgi(door).problem == "response-not-kept"
    assert effects.runs == 2


class GoneServing(Serving):
    """A server whose `write` raises from the second piece on: the client is gone."""

    def start_response(self, status, headers, exc_info=None):
        super().start_response(status, headers, exc_info)
        return self.write

    def write(self, piece):
        if self.reply.pieces:
            raise BrokenPipeError("the client is gone")
        self.reply.pieces.append(piece)


@decisions
@pytest.mark.parametrize("swallows", [False, True], ids=["raises", "returns"])
def test_wsgi_client_that_leaves_during_write_does_not_make_a_retry_run(on_error, swallows):
    store, runs = MemoryStore(), []

    def app(environ, start_response):
        runs.append(1)
        write = start_response("200 OK", [EVENTS, ("Content-Length", "100")])
        with contextlib.suppress(OSError) if swallows else contextlib.nullcontext():
            for _ in range(10):
                write(b"a piece...")
        return []

    door = wsgi_door(app, store, on_error=on_error)
    with contextlib.suppress(OSError):
        GoneServing(door, environ_of()).finish()
    assert ask_wsgi(door).problem == "response-not-kept"
    assert runs == [1]


@pytest.mark.parametrize(
    ("on_error", "recorded"), [("release", State.FAILED), ("hold", State.UNKNOWN)]
)
def test_wsgi_worker_that_is_ended_while_it_sends_is_settled_as_a_crash(on_error, recorded):
    effects, store = Effects(), MemoryStore()
    effects.runs = 1  # the stream does not raise
    door = wsgi_door(functools.partial(events, effects), store, on_error=on_error)
    served = Serving(door, environ_of())
    next(served.pieces)
    with pytest.raises(SystemExit):
        try:
            raise SystemExit(1)
        finally:
            served.hang_up()
    assert wsgi_state(store) is recorded


@decisions
def test_wsgi_stream_with_a_piece_that_is_not_bytes_is_a_failure(on_error):
    effects, store = Effects(), MemoryStore()

    def app(environ, start_response):
        effects.runs += 1
        start_response("200 OK", [EVENTS])
        return [b"half", "text"] if effects.runs == 1 else [b"whole"]

    door = wsgi_door(app, store, on_error=on_error)
    with pytest.raises(TypeError, match="bytes, not str"):
        ask_wsgi(door)
    check_wsgi_retry(door, effects, store, on_error)


@decisions
def test_stream_whose_head_becomes_an_error_is_settled_by_that_status(on_error):
    store, runs = MemoryStore(), []

    def app(environ, start_response):
        runs.append(1)
        start_response("200 OK", [EVENTS])
        if len(runs) == 1:
            start_response("500 Oh", [EVENTS], raised(BrokenHandlerError("before the first byte")))
        return [b"end"]

    door = wsgi_door(app, store, on_error=on_error)
    assert ask_wsgi(door).status == 500
    _, (status, _, more) = FAILURES[on_error]
    # A stream is remembered without its body, also one that says 500.
    assert ask_wsgi(door).status == (410 if on_error == "store" else status)
    assert len(runs) == 1 + more


@decisions
@pytest.mark.parametrize("most", [3, 100], ids=["live", "gathered"])
def test_wsgi_response_shorter_than_its_length_has_failed(on_error, most):
    store, effects = MemoryStore(), Effects()

    def app(environ, start_response):
        effects.runs += 1
        start_response("200 OK", [TEXT, ("Content-Length", "10")])
        return [b"0123", b"4"] if effects.runs == 1 else [b"0123456789"]

    door = wsgi_door(app, store, on_error=on_error, max_response=most)
    answered = on_error == "store" and most == 100
    assert ask_wsgi(door).status == (500 if answered else 200)
    check_wsgi_retry(door, effects, store, on_error)


def test_wsgi_stream_holds_its_key_until_its_last_byte():
    store, effects = MemoryStore(), Effects()
    effects.runs = 1
    door = wsgi_door(functools.partial(events, effects), store)
    served = Serving(door, environ_of())
    next(served.pieces)
    assert ask_wsgi(door).problem == "in-progress"
    served.finish()
    assert ask_wsgi(door).problem == "response-not-kept"


def test_wsgi_stream_takes_steps_while_it_is_read():
    store, charged = MemoryStore(), []

    def app(environ, start_response):
        start_response("200 OK", [EVENTS])
        yield b"half"
        semel.step("charge", lambda: charged.append(1))
        if semel.current().number == 1:
            raise BrokenHandlerError("after the charge")
        yield b" whole"

    door = wsgi_door(app, store)
    with pytest.raises(BrokenHandlerError):
        ask_wsgi(door)
    assert ask_wsgi(door).body == b"half whole"
    assert charged == [1]


# --- a process that dies ------------------------------------------------------------------------

DIES = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from semel.http import Rule, WSGIMiddleware
from support.wsgi import Serving, environ_of

def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)

rule = Rule(on_error={on_error!r}, lease=0.2)
door = WSGIMiddleware(app, store={store!r}, scope="shop", rule=rule)
for piece in Serving(door, environ_of()).pieces:
    print(piece.decode(), flush=True)
"""


@decisions
def test_process_that_dies_in_a_live_response_is_settled_when_its_lease_ends(on_error, tmp_path):
    url = f"sqlite:///{tmp_path}/ledger.db"
    script = DIES.format(tests=str(TESTS), on_error=on_error, store=url)
    died = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=False
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert died.stdout == b"half\n"
    effects = Effects()
    effects.runs = 1
    door = wsgi_door(functools.partial(events, effects), url, on_error=on_error, wait=10)
    reply = ask_wsgi(door)
    _, (status, problem, more) = FAILURES[on_error]
    assert (reply.status, reply.problem if problem else None) == (status, problem)
    assert effects.runs == 1 + more
