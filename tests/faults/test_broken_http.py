"""Attempts to break the doors for requests: each of these once succeeded."""

import asyncio
import io
from datetime import timedelta
from http import HTTPStatus
from threading import current_thread, main_thread
from typing import Annotated

import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, Header, HTTPException, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import SecurityScopes

from semel import SettingsError
from semel.colour import ASYNC
from semel.http import IdempotencyMiddleware, Rule, WSGIMiddleware, attempt_of
from semel.http.fastapi import Idempotency, IdempotentRoute, RequestAttempt
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.values import State
from support.web import Wire, ask, until
from support.wrapped import WrappedStore

MIB = 1024 * 1024
GOOD = [(b"x-token", b"good")]
BAD = [(b"x-token", b"bad")]


@pytest.fixture
def store():
    return MemoryStore()


# --- who is shown a recorded response -----------------------------------------------------------


class Gate:
    """A FastAPI shop whose dependency lets in who has the token, and counts how often it did."""

    def __init__(self, store):
        self.idempotency = Idempotency(scope="shop", store=store)
        self.asked = 0
        self.runs = 0
        self.router = APIRouter(route_class=IdempotentRoute)

    def let_in(self, x_token: Annotated[str, Header()]):
        self.asked += 1
        if x_token != "good":
            raise HTTPException(401)
        return x_token

    def charge(self):
        self.runs += 1
        return {"receipt": self.runs}

    @property
    def app(self):
        app = FastAPI()
        app.include_router(self.router)
        return app


def in_the_route(gate):
    @gate.router.post("/pay", dependencies=[Depends(gate.let_in)])
    async def pay(_: Annotated[RequestAttempt, Depends(gate.idempotency)]):
        return gate.charge()


def beside_the_attempt(gate):
    def service(
        attempt: Annotated[RequestAttempt, Depends(gate.idempotency)],
        _: Annotated[str, Depends(gate.let_in)],
    ):
        return attempt

    @gate.router.post("/pay")
    async def pay(_: Annotated[RequestAttempt, Depends(service)]):
        return gate.charge()


def with_scopes(gate):
    def user(scopes: SecurityScopes, x_token: Annotated[str, Header()]):
        assert scopes.scopes == ["pay"]
        return gate.let_in(x_token)

    @gate.router.post("/pay")
    async def pay(
        _: Annotated[RequestAttempt, Depends(gate.idempotency)],
        __: Annotated[str, Security(user, scopes=["pay"])],
    ):
        return gate.charge()


def asked_anew_each_time(gate):
    @gate.router.post("/pay")
    async def pay(
        _: Annotated[RequestAttempt, Depends(gate.idempotency)],
        __: Annotated[str, Depends(gate.let_in, use_cache=False)],
    ):
        return gate.charge()


@pytest.mark.parametrize("overridden", [False, True], ids=["", "with overrides"])
@pytest.mark.parametrize(
    "place", [in_the_route, beside_the_attempt, with_scopes, asked_anew_each_time]
)
async def test_who_was_not_let_in_is_shown_nothing_whatever_was_wrong(store, place, overridden):
    gate = Gate(store)
    place(gate)
    app = gate.app
    if overridden:  # FastAPI then makes every dependency anew, from its signature
        app.dependency_overrides[object] = lambda: None

    first = await ask(app, key="k", headers=GOOD)
    assert (first.status, gate.asked, gate.runs) == (200, 1, 1)

    stranger = await ask(app, key="k", headers=BAD)
    assert (stranger.status, stranger.replayed) == (401, False)
    nobody = await ask(app, key="k")
    assert (nobody.status, nobody.replayed) == (422, False)
    assert [each["loc"] for each in nobody.json()["detail"]] == [["header", "x-token"]]
    new = await ask(app, key="new")
    assert new.status == 422

    again = await ask(app, key="k", headers=GOOD)
    assert (again.body, again.replayed) == (first.body, True)
    assert gate.runs == 1


# --- apps and servers that are harder to please than most ---------------------------------------


def door(app, store, rule=None, **more):
    return IdempotencyMiddleware(app, scope="shop", store=store, rule=rule, **more)


async def start(send, *headers, status=200):
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def go_on(send, body, *, more=True):
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def record(store):
    (found,) = await store.ledger(ASYNC).records()
    return found


async def test_headers_that_can_be_gone_through_once_are_sent_and_kept(store):
    async def app(scope, receive, send):
        headers = ((name, b"1") for name in (b"x-first", b"x-second"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await go_on(send, b"ok", more=False)

    wanted = [(b"x-first", b"1"), (b"x-second", b"1")]
    guarded = door(app, store)
    assert (await ask(guarded, key="k")).headers == wanted
    assert (await ask(guarded, key="k")).headers[:2] == wanted


async def test_a_buffer_that_is_used_again_does_not_change_what_was_sent(store):
    async def app(scope, receive, send):
        await start(send)
        buffer = bytearray(b"one ")
        await go_on(send, memoryview(buffer))
        buffer[:] = b"two "
        await go_on(send, buffer)
        buffer[:] = b"done"
        await go_on(send, memoryview(buffer), more=False)

    guarded = door(app, store)
    assert (await ask(guarded, key="k")).body == b"one two done"
    assert (await ask(guarded, key="k")).body == b"one two done"


async def test_a_second_head_is_refused_as_by_a_server(store):
    async def app(scope, receive, send):
        await start(send)
        await go_on(send, b"half")
        await start(send, status=500)

    with pytest.raises(RuntimeError, match="a second time"):
        await ask(door(app, store), key="k")
    assert (await record(store)).state is State.FAILED


async def test_an_app_that_fails_while_it_goes_live_has_its_head_already(store):
    """Else the server would say 500, and then hear of a 200."""
    slow = WrappedStore(store)
    slow.line.delay_before["renew"] = 0.05

    async def app(scope, receive, send):
        await start(send)
        await go_on(send, b"begun")
        await until(lambda: slow.line.count["renew"])
        raise ValueError("after its first piece")

    wire = Wire(b"{}")
    with pytest.raises(ValueError, match="after its first piece"):
        await ask(door(app, slow, Rule(linger=0.01)), key="k", wire=wire)
    assert [message["type"] for message in wire.sent][:1] == ["http.response.start"]
    assert (await record(store)).state is State.FAILED


@pytest.mark.parametrize("on_error", ["release", "hold"])
async def test_what_is_cut_off_does_not_go_live_while_it_is_given_up(store, on_error):
    slow = WrappedStore(store)
    slow.line.delay_before |= {"release": 0.1, "renew": 0.1}
    begun = asyncio.Event()

    async def app(scope, receive, send):
        await start(send)
        await go_on(send, b"half")
        begun.set()
        await asyncio.sleep(60)

    wire = Wire(b"{}")
    rule = Rule(on_error=on_error, linger=0.05)
    asking = asyncio.create_task(ask(door(app, slow, rule), key="k", wire=wire))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert wire.sent == []
    assert slow.line.count["complete"] == 0
    wanted = {"release": State.FAILED, "hold": State.UNKNOWN}
    assert (await record(store)).state is wanted[on_error]


@pytest.mark.parametrize("method", ["patch", "Patch", "post"])
async def test_a_method_in_small_letters_is_guarded_too(store, method):
    """Django and Flask take `patch` for PATCH, and so browsers send it."""
    runs = []

    async def app(scope, receive, send):
        runs.append(scope["method"])
        await start(send)
        await go_on(send, b"ok", more=False)

    guarded = door(app, store)
    await ask(guarded, method=method, key="k")
    assert (await ask(guarded, method=method, key="k")).replayed
    assert runs == [method]


async def test_the_mark_of_another_replay_is_not_kept(store):
    async def app(scope, receive, send):
        await start(send, (b"Idempotent-Replayed", b"true"))
        await go_on(send, b"ok", more=False)

    guarded = door(app, store)
    await ask(guarded, key="k")
    assert (await ask(guarded, key="k")).all("idempotent-replayed") == ["true"]


async def test_a_line_end_in_a_path_is_no_way_around_a_rule(store):
    async def app(scope, receive, send):
        raise AssertionError("it was let through")

    guarded = door(app, store, routes={"/payments/*": Rule(key="required")})
    assert (await ask(guarded, "/payments/a\nb")).problem == "key-missing"


@pytest.mark.parametrize("on_error", ["release", "hold"])
async def test_a_stores_that_raises_is_an_error_like_any(store, on_error):
    def stores(status):
        raise ValueError("no idea")

    async def app(scope, receive, send):
        await start(send)
        await go_on(send, b"ok", more=False)

    with pytest.raises(ValueError, match="no idea"):
        await ask(door(app, store, Rule(stores=stores, on_error=on_error)), key="k")
    wanted = {"release": State.FAILED, "hold": State.UNKNOWN}
    assert (await record(store)).state is wanted[on_error]


@pytest.mark.parametrize(
    "wrong",
    [
        {"stores": 201},
        {"stores": "201"},
        {"stores": [201, "202"]},
        {"never_kept": "x-secret"},
        {"never_kept": [b"x-secret"]},
        {"methods": 5},
        {"linger": "long"},
        {"linger": -1},
        {"linger": float("nan")},
        {"linger": True},
    ],
    ids=str,
)
def test_a_rule_that_would_fail_a_request_is_refused_where_it_is_made(store, wrong):
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        door(None, store, Rule(**wrong))


async def test_a_linger_may_be_a_timedelta(store):
    async def app(scope, receive, send):
        await start(send)
        await go_on(send, b"o")
        await go_on(send, b"k", more=False)

    guarded = door(app, store, Rule(linger=timedelta(seconds=1), stores=[HTTPStatus.OK]))
    await ask(guarded, key="k")
    assert (await ask(guarded, key="k")).replayed


# --- what never began ---------------------------------------------------------------------------


class Counting:
    def __init__(self):
        self.runs = 0

    async def __call__(self, scope, receive, send):
        self.runs += 1
        await start(send, status=201)
        await go_on(send, b"ok", more=False)


async def test_a_lost_claim_is_no_interruption_that_is_stored(store):
    """The client was told that nothing was done, and to ask again with the same key."""
    line, shop = WrappedStore(store), Counting()
    guarded = door(shop, line, Rule(on_error="store"))
    line.line.lose_reply["claim"] = 1
    assert (await ask(guarded, key="k")).problem == "store-unavailable"
    assert (await ask(guarded, key="k")).status == 201
    assert shop.runs == 1


async def test_who_is_cut_off_while_it_asks_stores_no_interruption(store):
    line, shop = WrappedStore(store), Counting()
    guarded = door(shop, line, Rule(on_error="store"))
    line.line.delay_after["claim"] = 60
    asking = asyncio.create_task(ask(guarded, key="k"))
    await until(lambda: line.line.count["claim"])
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    line.line.delay_after.clear()
    assert (await ask(guarded, key="k")).status == 201


async def test_a_lost_claim_that_took_over_still_answers_for_who_began():
    clock = FakeClock()
    line, shop = WrappedStore(MemoryStore(clock=clock)), Counting()
    hanging = asyncio.Event()

    async def app(scope, receive, send):
        if not hanging.is_set():
            hanging.set()
            await asyncio.sleep(60)
        await shop(scope, receive, send)

    guarded = door(app, line, Rule(on_error="store"))
    first = asyncio.create_task(ask(guarded, key="k"))
    await hanging.wait()
    clock.advance(31)
    line.line.lose_reply["claim"] = 1
    assert (await ask(guarded, key="k")).problem == "store-unavailable"
    assert (await ask(guarded, key="k")).status == 500
    assert shop.runs == 0
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


# --- WSGI ---------------------------------------------------------------------------------------


def test_a_length_with_thousands_of_zeros_is_a_length(store):
    def app(environ, start_response):
        start_response("200 OK", [])
        return [environ["wsgi.input"].read()]

    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/pay",
        "HTTP_IDEMPOTENCY_KEY": "k",
        "CONTENT_LENGTH": "0" * 5000 + "2",
        "wsgi.input": io.BytesIO(b"{}more"),
    }
    answer = WSGIMiddleware(app, scope="shop", store=store)(environ, lambda *_: None)
    assert list(answer) == [b"{}"]


# --- FastAPI ------------------------------------------------------------------------------------


def fastapi_app(store, handler, **rule):
    idempotency = Idempotency(scope="shop", store=store, rule=Rule(**rule))
    app = FastAPI()
    app.router.route_class = IdempotentRoute
    app.post("/pay", dependencies=[Depends(idempotency)])(handler)
    return app


async def test_a_handler_that_calls_its_request_invalid_has_run_all_the_same(store):
    """FastAPI has the same error for what it finds before it calls anybody."""
    runs = []

    async def pay(amount: Annotated[int, Body(embed=True)]):
        runs.append(amount)
        raise RequestValidationError([{"type": "late", "loc": ("body",), "msg": "too much"}])

    app = fastapi_app(store, pay, on_error="hold")
    assert (await ask(app, key="k", body=b'{"amount": "?"}')).status == 422
    assert (await record(store)).state is State.FAILED
    first = await ask(app, key="run", body=b'{"amount": 5}')
    again = await ask(app, key="run", body=b'{"amount": 5}')
    assert (first.status, again.body, again.replayed) == (422, first.body, True)
    assert runs == [5]


async def test_a_dependency_may_say_in_its_own_words_that_a_request_is_invalid(store):
    def refused():
        raise RequestValidationError(({"said": "no"},))

    async def pay(_: Annotated[None, Depends(refused)]):
        raise AssertionError("it was let in")

    reply = await ask(fastapi_app(store, pay), key="k")
    assert (reply.status, reply.json()) == (422, {"detail": [{"said": "no"}]})


async def test_a_large_body_is_compared_beside_the_loop_in_fastapi_too(store):
    threads = []

    def compared(request, body):
        threads.append(current_thread())
        return len(body)

    async def pay(request: Request):
        return {"size": len(await request.body())}

    app = fastapi_app(store, pay, fingerprint=compared, max_body=4 * MIB)
    wire = Wire(b"x" * MIB, b"y" * MIB)
    assert (await ask(app, key="k", wire=wire)).json() == {"size": 2 * MIB}
    assert threads != [main_thread()]


# --- when to ask again --------------------------------------------------------------------------


async def test_who_was_frozen_for_hours_does_not_send_its_client_away_for_hours():
    clock = FakeClock()
    thaw, finish = asyncio.Event(), asyncio.Event()
    begun = []

    async def app(scope, receive, send):
        begun.append(attempt_of(scope).call)
        await (thaw if len(begun) == 1 else finish).wait()
        await start(send)
        await go_on(send, b"ok", more=False)

    guarded = door(app, MemoryStore(clock=clock))
    frozen = asyncio.create_task(ask(guarded, key="k"))
    await until(lambda: len(begun) == 1)
    clock.advance(31)
    other = asyncio.create_task(ask(guarded, key="k"))
    await until(lambda: len(begun) == 2)
    begun[0]._started -= 36_000  # as its own clock has it by now
    thaw.set()
    late = await frozen
    assert late.problem == "in-progress"
    assert int(late.header("retry-after")) <= 30
    finish.set()
    assert (await other).body == b"ok"
