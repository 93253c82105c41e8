"""What other idempotency middlewares get wrong, one test each: here it does not happen.

The defects were seen in published packages, most of them by running those. They are grouped by the
package in which they were found first; a defect that several share stands once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3

import httpx
import pytest
import redis
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from semel import SettingsError, idempotent
from semel.colour import ASYNC
from semel.http import IdempotencyMiddleware, Refusal, Rule, problem
from semel.http import Response as Recorded
from semel.stores.memory import MemoryStore
from semel.stores.redis import RedisStore
from semel.stores.sqlite import SQLiteStore
from semel.testing.clock import FakeClock
from semel.values import Outcome, State
from support.web import Wire, ask, start_web, until
from support.wrapped import WrappedStore

BODY = b'{"amount": 5}'


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return WrappedStore(MemoryStore(clock=clock))


class Shop:
    """A Starlette app behind the door, whose handler answers with what it is told to.

    `around` is middleware between the two, `runs` counts the handler.
    """

    def __init__(self, store, answer=None, *, scope="shop", around=(), rule=None):
        self.runs = 0
        self._answer = answer or (lambda _request, run: JSONResponse({"run": run}))
        paths = [
            Route(path, self.handle, methods=["POST", "PATCH"]) for path in ("/pay", "/refund")
        ]
        inside = Starlette(routes=paths, middleware=list(around))
        self.app = IdempotencyMiddleware(inside, store=store, scope=scope, rule=rule)

    async def handle(self, request):
        self.runs += 1
        answer = self._answer(request, self.runs)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def ask(self, path="/pay", *, key="k", body=BODY, **more):
        return await ask(self.app, path, key=key, body=body, **more)

    async def twice(self, **request):
        """The first reply and the second, to the same request."""
        return await self.ask(**request), await self.ask(**request)


def principal(request):
    """The user behind a token: `alice.1` and `alice.2` are the same one."""
    token = request.header("authorization")
    if token is None:
        raise Refusal(Recorded(401, (), b"who are you?"))
    return token.partition(".")[0]


def as_user(token):
    return [(b"authorization", token.encode())]


async def record(store):
    (found,) = await store.ledger(ASYNC).records()
    return found


# --- idemkit ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    store = f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db"
    web = start_web(store, app="streams")
    yield web
    web.stop()


AROUND = ("plain", "base", "gzip")
EVENTS = "".join(f"data: {number} False\n\n" for number in range(5))


@pytest.mark.parametrize("around", AROUND)
def test_a_stream_without_a_key_is_whole_on_a_real_server(web, around):
    """The client is there until the end, and the app can ask whether it is."""
    assert httpx.get(f"{web.url}/{around}/events").text == EVENTS


@pytest.mark.parametrize("around", AROUND)
def test_a_stream_with_a_key_is_whole_on_a_real_server(web, around):
    headers = {"Idempotency-Key": f"stream-{around}"}
    assert httpx.post(f"{web.url}/{around}/events", headers=headers).text == EVENTS
    assert httpx.post(f"{web.url}/{around}/events", headers=headers).status_code == 410


@pytest.mark.parametrize("around", AROUND)
def test_middleware_inside_does_not_switch_idempotency_off_on_a_real_server(web, around):
    headers = {"Idempotency-Key": f"pay-{around}"}
    first, again = (
        httpx.post(f"{web.url}/{around}/pay", headers=headers, content=BODY) for _ in range(2)
    )
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert [line[0] for line in web.effects()].count(f"pay-{around}") == 1


def test_compressed_response_is_decoded_for_a_client_that_refuses_gzip_on_a_real_server(web):
    def pay(coding):
        headers = {"Idempotency-Key": "pay-coded", "Accept-Encoding": coding}
        return httpx.post(f"{web.url}/gzip/pay", headers=headers, content=BODY)

    first, other, again = pay("gzip"), pay("identity"), pay("gzip")
    assert first.headers["content-encoding"] == again.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in other.headers
    assert first.content == other.content == again.content
    assert [line[0] for line in web.effects()].count("pay-coded") == 1


async def hand_on(request, call_next):
    return await call_next(request)


BASE = Middleware(BaseHTTPMiddleware, dispatch=hand_on)
GZIP = Middleware(GZipMiddleware, minimum_size=1)
ACCEPTS = [(b"accept-encoding", b"gzip")]


@pytest.mark.parametrize("around", [[BASE], [GZIP], [BASE, GZIP], [BASE, BASE]])
async def test_middleware_inside_does_not_switch_idempotency_off(store, around):
    shop = Shop(store, around=around)
    first, again = await shop.twice(headers=ACCEPTS)
    assert again.replayed
    assert again.body == first.body
    assert again.header("content-encoding") == first.header("content-encoding")
    assert shop.runs == 1


@pytest.mark.parametrize("around", [BASE, GZIP])
async def test_middleware_outside_sees_an_ordinary_app(store, around):
    shop = Shop(store)
    outside = around.cls(shop.app, *around.args, **around.kwargs)
    first = await ask(outside, key="k", headers=ACCEPTS)
    again = await ask(outside, key="k", headers=ACCEPTS)
    assert again.replayed
    assert again.body == first.body
    assert shop.runs == 1


async def test_a_client_that_is_gone_does_not_undo_the_record(store):
    async def gone(message):
        raise OSError("the client is gone")

    shop = Shop(store)
    with contextlib.suppress(OSError):
        await shop.ask(wire=Wire(BODY, on_send=gone))
    assert (await shop.ask()).replayed
    assert shop.runs == 1


async def test_a_retry_during_a_slow_handler_does_not_run_it_again():
    store = WrappedStore(MemoryStore())

    async def slow(request, run):
        await until(lambda: store.line.count["renew"] >= 6)  # twice the lease
        return JSONResponse({"run": run})

    shop = Shop(store, slow, rule=Rule(lease=0.15))
    first = asyncio.create_task(shop.ask())
    while not first.done():
        assert (await shop.ask()).status in (200, 409)
        await asyncio.sleep(0.02)
    assert shop.runs == 1


async def test_in_progress_is_409_with_retry_after_as_a_problem(store):
    go_on = asyncio.Event()

    async def wait(request, run):
        await go_on.wait()
        return JSONResponse({})

    shop = Shop(store, wait)
    first = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs)
    busy = await shop.ask()
    assert (busy.status, busy.problem) == (409, "in-progress")
    assert int(busy.header("retry-after")) >= 1
    go_on.set()
    await first


@pytest.mark.parametrize(
    "status", [200, 201, 202, 204, 301, 302, 303, 307, 400, 402, 409, 412, 422]
)
async def test_every_answer_of_a_handler_is_remembered(store, status):
    shop = Shop(store, lambda *_: Response(status_code=status))
    _, again = await shop.twice()
    assert (again.status, again.replayed) == (status, True)
    assert shop.runs == 1


def with_headers(*lines):
    def answer(_request, run):
        response = PlainTextResponse(f"run {run}")
        response.raw_headers = [*lines, (b"x-run", b"%d" % run), *response.raw_headers]
        return response

    return answer


async def test_repeated_headers_stay_apart_and_in_order(store):
    shop = Shop(store, with_headers((b"link", b"</a>"), (b"x-mid", b"1"), (b"link", b"</b>")))
    first, again = await shop.twice()
    assert again.all("link") == ["</a>", "</b>"]
    assert again.headers == [*first.headers, (b"idempotent-replayed", b"true")]


async def test_headers_of_ones_own_are_kept(store):
    shop = Shop(store, with_headers((b"x-order-id", b"7"), (b"location", b"/orders/7")))
    _, again = await shop.twice()
    assert again.header("x-order-id") == "7"
    assert again.header("location") == "/orders/7"
    assert again.header("x-run") == "1"


@pytest.mark.parametrize("fingerprint", ["bytes", "json"])
@pytest.mark.parametrize(
    "bodies",
    [
        (b"0.1", b"0.1000000000000000055"),
        (b"9007199254740993", b"9007199254740992"),
        (b"1e400", b"1e500"),
        (b"1", b"1.0"),
        (b"1", b"true"),
    ],
)
async def test_numbers_that_a_float_cannot_tell_apart_are_two_requests(store, fingerprint, bodies):
    shop = Shop(store, rule=Rule(fingerprint=fingerprint))
    await shop.ask(body=bodies[0])
    assert (await shop.ask(body=bodies[1])).status == 422
    assert shop.runs == 1


@pytest.mark.parametrize("fingerprint", ["bytes", "json"])
async def test_a_name_that_comes_twice_does_not_hide_another_amount(store, fingerprint):
    shop = Shop(store, rule=Rule(fingerprint=fingerprint))
    replies = [await shop.ask(body=body) for body in (b'{"a":5,"a":6}', b'{"a":9,"a":6}')]
    assert [reply.status for reply in replies] == (
        [200, 422] if fingerprint == "bytes" else [400] * 2
    )


async def test_a_large_request_is_refused_or_protected_and_never_just_passed_on(store):
    body = b"x" * (1024 * 1024 + 1)
    shop = Shop(store)
    assert (await shop.ask(body=body)).problem == "body-too-large"
    assert shop.runs == 0
    larger = Shop(store, rule=Rule(max_body=2 * len(body)))
    _, again = await larger.twice(body=body)
    assert again.replayed
    assert larger.runs == 1


async def test_the_same_key_on_two_paths_is_refused(store):
    shop = Shop(store)
    await shop.ask("/pay")
    assert (await shop.ask("/refund")).status == 422
    assert shop.runs == 1


# --- asgi-idempotency-header --------------------------------------------------------------------


async def test_another_user_with_the_same_key_never_sees_the_response(store):
    shop = Shop(store, scope=principal)
    alice = await shop.ask(headers=as_user("alice.1"))
    bob = await shop.ask(headers=as_user("bob.1"))
    assert not bob.replayed
    assert bob.body != alice.body
    assert shop.runs == 2


@pytest.mark.parametrize(
    "change", [{"path": "/refund"}, {"query": b"dry_run=0"}, {"body": b"{}"}, {"method": "PATCH"}]
)
async def test_another_request_with_the_same_key_is_refused(store, change):
    shop = Shop(store)
    await shop.ask()
    assert (await shop.ask(**change)).problem == "key-reused"
    assert shop.runs == 1


async def test_an_exception_does_not_lock_the_key_for_ever(store):
    def fails_once(_request, run):
        if run == 1:
            raise ZeroDivisionError
        return JSONResponse({"run": run})

    shop = Shop(store, fails_once)
    with pytest.raises(ZeroDivisionError):
        await shop.ask()
    assert (await shop.ask()).json() == {"run": 2}


async def test_a_cancelled_task_does_not_lock_the_key_for_ever(store):
    async def hangs_once(_request, run):
        if run == 1:
            await asyncio.Event().wait()
        return JSONResponse({"run": run})

    shop = Shop(store, hangs_once)
    task = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await shop.ask()).json() == {"run": 2}


async def test_when_a_response_has_expired_its_key_can_be_used_again(store, clock):
    shop = Shop(store, rule=Rule(ttl=60))
    await shop.ask()
    clock.advance(61)
    assert (await shop.ask()).json() == {"run": 2}
    assert (await shop.ask()).replayed


async def test_nothing_is_left_behind_in_redis_without_an_end(redis_url):
    store = RedisStore(redis_url)
    shop = Shop(store, rule=Rule(ttl=60))
    for number in range(5):
        await shop.ask(key=f"k{number}")
    await store.aclose()
    with redis.Redis.from_url(redis_url) as client:
        lives = [client.ttl(name) for name in client.scan_iter()]
    assert len(lives) >= 5
    assert all(0 < life <= 61 for life in lives), lives


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "text/plain", "application/pdf", None]
)
async def test_a_response_of_any_kind_is_remembered(store, kind):
    shop = Shop(store, lambda *_: Response(b"\x00\xff%PDF", media_type=kind))
    first, again = await shop.twice()
    assert again.replayed
    assert again.body == first.body == b"\x00\xff%PDF"


async def test_json_in_pieces_is_remembered_whole(store):
    async def app(scope, receive, send):
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"[", b"1", b"]"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    door = IdempotencyMiddleware(app, store=store, scope="shop")
    assert (await ask(door, key="k")).body == b"[1]"
    assert (await ask(door, key="k")).body == b"[1]"


async def test_a_body_is_shown_again_to_the_byte(store):
    odd = b'{ "b":1,\n"a" :  2.50, "u": "\\u00e4" }\n'
    shop = Shop(store, lambda *_: Response(odd, media_type="application/json"))
    first, again = await shop.twice()
    assert first.body == again.body == odd


@pytest.mark.parametrize("suffix", ["status-code", "-lock", ":response", ":status"])
async def test_no_key_runs_into_another_ones_records(store, suffix):
    shop = Shop(store)
    for key in ("X", f"X{suffix}"):
        _, again = await shop.twice(key=key)
        assert again.replayed
    assert shop.runs == 2


@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
async def test_who_was_turned_away_may_try_again(store, status):
    def answer(_request, run):
        return JSONResponse({"run": run}, status if run == 1 else 200)

    shop = Shop(store, answer)
    first, again = await shop.twice()
    assert (first.status, again.status) == (status, 200)
    assert (await shop.ask()).replayed


# --- fastapi-idempotency (ohshya) ---------------------------------------------------------------


def test_whose_key_it_is_must_be_said(store):
    with pytest.raises(TypeError, match="scope"):
        IdempotencyMiddleware(Starlette(), store=store)
    with pytest.raises(SettingsError, match="whose key"):
        IdempotencyMiddleware(Starlette(), store=store, scope=None)


async def test_two_users_behind_one_address_are_two_users(store):
    shop = Shop(store, scope=principal)
    for user in ("alice.1", "bob.1"):
        await shop.ask(headers=as_user(user), client=("192.0.2.1", 1234))
    assert shop.runs == 2


async def test_two_equal_requests_without_a_key_are_two_requests(store):
    shop = Shop(store)
    await shop.twice(key=None)
    assert shop.runs == 2


async def test_a_cookie_is_no_reason_to_run_again(store):
    shop = Shop(store, with_headers((b"set-cookie", b"session=1")))
    first, again = await shop.twice()
    assert first.header("set-cookie") == "session=1"
    assert again.replayed
    assert again.header("set-cookie") is None
    assert shop.runs == 1


async def test_a_large_response_is_no_reason_to_run_again(store):
    shop = Shop(store, lambda *_: Response(b"x" * 5000), rule=Rule(max_response=1000))
    first, again = await shop.twice()
    assert len(first.body) == 5000
    assert again.problem == "response-not-kept"
    assert shop.runs == 1


@pytest.mark.parametrize(("on_error", "then"), [("store", 500), ("hold", 409)])
async def test_a_5xx_is_no_reason_to_run_again_where_it_must_not(store, on_error, then):
    shop = Shop(store, lambda *_: Response(status_code=500), rule=Rule(on_error=on_error))
    _, again = await shop.twice()
    assert again.status == then
    assert shop.runs == 1


async def test_a_cancellation_is_no_reason_to_run_again_where_it_must_not(store):
    shop = Shop(store, lambda *_: asyncio.Event().wait(), rule=Rule(on_crash="hold"))
    task = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await shop.ask()).problem == "outcome-unknown"
    assert shop.runs == 1


# --- ronango/fastapi-idempotency ----------------------------------------------------------------


async def test_who_lost_the_key_cannot_free_it_for_a_third(store, clock):
    """The first is overtaken and fails; the second still holds what is its own."""
    go_on = {1: asyncio.Event(), 2: asyncio.Event()}

    async def answer(_request, run):
        await go_on[run].wait()
        if run == 1:
            raise ZeroDivisionError
        return JSONResponse({"run": run})

    shop = Shop(store, answer)
    first = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs == 1)
    clock.advance(31)
    second = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs == 2)
    go_on[1].set()
    with pytest.raises(ZeroDivisionError):
        await first
    assert (await shop.ask()).problem == "in-progress"
    go_on[2].set()
    assert (await second).json() == {"run": 2}
    assert shop.runs == 2


# --- fastapi-idempotency-key --------------------------------------------------------------------


async def test_on_redis_an_honest_retry_is_answered(redis_url):
    store = RedisStore(redis_url)
    shop = Shop(store)
    first, again = await shop.twice()
    await store.aclose()
    assert (again.status, again.replayed, again.body) == (first.status, True, first.body)


@pytest.mark.parametrize("ttl", [86_400, None])
async def test_after_a_crash_the_key_is_free_when_the_lease_is_over(store, clock, ttl):
    """Not when the response would have expired: the record of a dead process is no answer."""

    async def dies_once(_request, run):
        if run == 1:
            store.line.last_words = RuntimeError("killed")
            raise RuntimeError("killed")
        return JSONResponse({"run": run})

    shop = Shop(store, dies_once, rule=Rule(lease=30, ttl=ttl))
    with pytest.raises(RuntimeError):
        await shop.ask()
    store.line.last_words = None
    assert (await shop.ask()).problem == "in-progress"
    clock.advance(31)
    assert (await shop.ask()).json() == {"run": 2}


async def test_no_cookie_is_ever_shown_to_another(store):
    cookies = [(b"set-cookie", b"a=1"), (b"Set-Cookie", b"b=2"), (b"SET-COOKIE", b"c=3")]
    shop = Shop(store, with_headers(*cookies))
    _, again = await shop.twice()
    assert again.replayed
    assert again.all("set-cookie") == []
    assert b"a=1" not in (await record(store)).outcome.data


@pytest.mark.parametrize("key", ["", " ", "a b", '"a', "k" * 256, "k\r\nx: y", "ä"])
async def test_a_key_is_looked_at_before_it_is_looked_up(store, key):
    shop = Shop(store)
    assert (await shop.ask(key=key)).problem == "key-malformed"
    assert not store.line.count


# --- fastidempotent -----------------------------------------------------------------------------


async def test_nothing_lies_between_looking_and_taking(store):
    """One question for a first request, one for its end, and one for a repeat."""
    store.line.delay_before["claim"] = 0.005
    store.line.delay_after["claim"] = 0.005
    shop = Shop(store)
    replies = await asyncio.gather(*[shop.ask() for _ in range(20)])
    assert shop.runs == 1
    assert {reply.status for reply in replies} <= {200, 409}
    assert store.line.count == {"claim": 20, "complete": 1}


async def test_the_first_response_keeps_both_its_cookies(store):
    shop = Shop(store, with_headers((b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")))
    first, again = await shop.twice()
    assert first.all("set-cookie") == ["a=1", "b=2"]
    assert again.all("set-cookie") == []


async def test_redis_keeps_a_response_as_long_as_it_is_told(redis_url):
    store = RedisStore(redis_url)
    shop = Shop(store, rule=Rule(ttl=7200))
    await shop.ask()
    found = await record(store)
    await store.aclose()
    assert 7199 < (found.expires_at - found.completed_at).total_seconds() < 7201


# --- idemptx, idempot, pyidempotent -------------------------------------------------------------


async def test_a_retry_may_carry_other_headers(store):
    """A new trace, another agent, a later date: the same request."""
    shop = Shop(store)
    await shop.ask(headers=[(b"traceparent", b"00-1-1-01"), (b"user-agent", b"a/1")])
    again = await shop.ask(headers=[(b"traceparent", b"00-2-2-01"), (b"x-retry", b"2")])
    assert again.replayed


async def test_a_handler_may_return_what_its_framework_allows(store):
    from fastapi import FastAPI

    inside = FastAPI()

    @inside.post("/pay", status_code=201)
    async def pay(order: dict[str, int]) -> dict[str, int]:
        return order

    app = IdempotencyMiddleware(inside, store=store, scope="shop")
    first, again = [await ask(app, key="k", body=BODY) for _ in range(2)]
    assert first.json() == again.json() == {"amount": 5}
    assert (again.status, again.replayed) == (201, True)


async def test_a_key_may_be_one_for_each_endpoint(store):
    shop = Shop(store, rule=Rule(per_operation=True))
    for path in ("/pay", "/refund"):
        await shop.ask(path)
        assert (await shop.ask(path)).replayed
    assert shop.runs == 2


# --- Django's -----------------------------------------------------------------------------------


async def test_four_at_once_are_one_execution(store):
    async def slow(_request, run):
        await asyncio.sleep(0.02)
        return JSONResponse({"run": run})

    shop = Shop(store, slow)
    replies = await asyncio.gather(*[shop.ask() for _ in range(4)])
    assert sorted(reply.status for reply in replies) == [200, 409, 409, 409]
    assert shop.runs == 1


async def test_a_replay_has_the_status_it_had(store):
    shop = Shop(store, lambda *_: JSONResponse({}, 201))
    _, again = await shop.twice()
    assert again.status == 201


async def test_a_refreshed_token_of_the_same_user_still_gets_the_replay(store):
    shop = Shop(store, scope=principal)
    await shop.ask(headers=as_user("alice.1"))
    assert (await shop.ask(headers=as_user("alice.2"))).replayed
    assert shop.runs == 1


async def test_other_keys_do_not_wait_for_this_one(store):
    go_on = asyncio.Event()

    async def wait_for_first(_request, run):
        if run == 1:
            await go_on.wait()
        return JSONResponse({"run": run})

    shop = Shop(store, wait_for_first)
    first = asyncio.create_task(shop.ask(key="a"))
    await until(lambda: shop.runs == 1)
    assert (await shop.ask(key="b")).status == 200
    go_on.set()
    await first


async def test_a_record_is_a_message_and_is_never_unpickled(store):
    shop = Shop(store)
    await shop.ask()
    assert (await record(store)).outcome.data.startswith(b"200\r\ncontent-")
    ledger = store.store._ledger
    (row,) = ledger._rows.values()
    harmful = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94."
    ledger._rows[row.key.id] = row.but(outcome=Outcome("value", harmful))
    assert (await shop.ask()).problem == "response-not-kept"
    assert shop.runs == 1


async def test_who_was_not_signed_in_does_not_poison_the_key(store):
    shop = Shop(store, scope=principal)
    assert (await shop.ask()).status == 401
    assert (await shop.ask(headers=as_user("alice.1"))).status == 200
    assert (await shop.ask()).status == 401  # and is not shown alice's response either


async def test_many_at_once_on_sqlite_are_answered_cleanly(tmp_path):
    store = SQLiteStore(tmp_path / "ledger.db")
    shop = Shop(store)
    replies = await asyncio.gather(*[shop.ask() for _ in range(30)])
    await store.aclose()
    assert {reply.status for reply in replies} <= {200, 409}
    assert shop.runs == 1


async def test_a_visitor_without_a_name_is_protected_as_well(store):
    shop = Shop(store, scope=lambda request: request.header("x-user") or "anonymous")
    _, again = await shop.twice()
    assert again.replayed


async def test_a_key_need_not_be_a_uuid(store):
    shop = Shop(store)
    for key in ("order-7", '"8e03978e-40d5-43dd-bc93-6894a57f9324"', "18446744073709551615"):
        _, again = await shop.twice(key=key)
        assert again.replayed
    assert shop.runs == 3


async def test_what_was_sent_is_not_kept(tmp_path):
    """Of a request the record has a hash; a card number is not in it."""
    store = SQLiteStore(tmp_path / "ledger.db")
    shop = Shop(store)
    await shop.ask(body=b'{"card": "4242424242424242"}', headers=[(b"authorization", b"s3cret")])
    await store.aclose()
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        kept = "\n".join(database.iterdump())
    assert "POST /pay" in kept
    assert "4242" not in kept
    assert b"4242".hex() not in kept.lower()
    assert "s3cret" not in kept


# --- Flask's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [b"idempotent-key", b"x-idempotency-key"])
async def test_a_header_of_another_name_is_no_key(store, name):
    shop = Shop(store)
    await shop.twice(key=None, headers=[(name, b"k")])
    assert shop.runs == 2


# --- Powertools ---------------------------------------------------------------------------------


async def test_who_lost_the_key_cannot_overwrite_what_is_recorded(store, clock):
    go_on = {1: asyncio.Event(), 2: asyncio.Event()}

    async def answer(_request, run):
        await go_on[run].wait()
        return JSONResponse({"run": run})

    shop = Shop(store, answer)
    first = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs == 1)
    clock.advance(31)
    second = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs == 2)
    go_on[2].set()
    assert (await second).json() == {"run": 2}
    go_on[1].set()
    late = await first
    assert late.replayed
    assert late.json() == {"run": 2}
    assert (await shop.ask()).json() == {"run": 2}


async def test_a_failure_leaves_a_record_of_it(store):
    async def fails(scope, receive, send):
        raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError):
        await ask(IdempotencyMiddleware(fails, store=store, scope="shop"), key="k")
    found = await record(store)
    assert found.state is State.FAILED
    assert found.error == "ZeroDivisionError: by zero"


@pytest.mark.parametrize("body", [b"", b"0", b"null", b"false", b'""', b"[]"])
async def test_nothing_is_an_answer_too(store, body):
    shop = Shop(store, lambda *_: Response(body, media_type="application/json"))
    _, again = await shop.twice()
    assert again.replayed
    assert again.body == body
    assert shop.runs == 1


async def test_what_nobody_knows_the_end_of_is_not_run_again_where_it_must_not(store, clock):
    async def hangs(_request, _run):
        await asyncio.Event().wait()

    shop = Shop(store, hangs, rule=Rule(on_crash="hold"))
    hung = asyncio.create_task(shop.ask())
    await until(lambda: shop.runs)
    clock.advance(86_400 * 365)
    assert (await shop.ask()).problem == "outcome-unknown"
    assert shop.runs == 1
    hung.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hung


# --- other languages ----------------------------------------------------------------------------


async def test_a_record_that_cannot_be_read_is_never_run_again(store):
    shop = Shop(store)
    await shop.ask()
    ledger = store.store._ledger
    (row,) = ledger._rows.values()
    ledger._rows[row.key.id] = row.but(outcome=Outcome("value", b"200\r\nno header\r\n\r\n"))
    assert (await shop.ask()).status == 410
    assert shop.runs == 1


async def test_two_customers_may_order_the_same(store):
    shop = Shop(store)
    for key in ("a", "b"):
        assert (await shop.ask(key=key)).status == 200
    assert shop.runs == 2


async def test_it_is_recorded_before_the_first_byte_is_sent(store):
    states = []

    async def look(message):
        states.append((await record(store.store)).state)

    await Shop(store).ask(wire=Wire(BODY, on_send=look))
    assert states == [State.COMPLETED, State.COMPLETED]


async def test_a_replay_says_that_it_is_one(store):
    first, again = await Shop(store).twice()
    assert first.header("idempotent-replayed") is None
    assert again.header("idempotent-replayed") == "true"


async def test_a_key_in_quotes_is_the_same_key(store):
    shop = Shop(store)
    await shop.ask(key="8e03978e")
    assert (await shop.ask(key='"8e03978e"')).replayed


async def test_keys_of_requests_and_of_jobs_are_apart(store):
    """A client that guesses the key of a job can neither block it nor see its result."""

    @idempotent(store=store, key="nightly", scope="shop", operation="POST /pay", fingerprint=None)
    async def job():
        return "secret"

    await job()
    shop = Shop(store)
    reply = await shop.ask(key="nightly")
    assert (reply.status, reply.replayed) == (200, False)
    assert await job() == "secret"


async def test_errors_are_problems_that_a_program_can_tell_apart(store):
    shop = Shop(store)
    await shop.ask()
    refused = await shop.ask(body=b"other")
    said = json.loads(refused.body)
    assert refused.header("content-type") == "application/problem+json"
    assert refused.header("content-language") == "en"
    assert said["type"] == "urn:semel:problem:key-reused"
    assert said["status"] == refused.status == 422
    assert said.keys() == {"type", "title", "status", "detail"}
    assert said == json.loads(problem("key-reused", said["detail"]).body)


async def test_while_the_store_is_down_nothing_is_run_unprotected(store):
    shop = Shop(store)
    store.line.lose_request["claim"] = 1
    reply = await shop.ask()
    assert (reply.status, reply.problem) == (503, "store-unavailable")
    assert shop.runs == 0
