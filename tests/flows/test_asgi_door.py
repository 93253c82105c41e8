"""The ASGI door, spoken to by hand: what it hands on, refuses, records and shows again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import traceback
from threading import current_thread, main_thread
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse

import semel
from semel import SettingsError
from semel.colour import ASYNC
from semel.guard import CannotTell, Recovered, Retry
from semel.http import IdempotencyMiddleware, Refusal, Response, Rule, asgi, attempt_of, problem
from semel.http.body import Body
from semel.http.exchange import Exchange
from semel.stores.memory import MemoryStore
from semel.testing.clock import FakeClock
from semel.values import State
from support.web import Wire, ask, scope_of, until
from support.wrapped import WrappedStore

KIB = 1024
MIB = 1024 * KIB
LARGE = [b"x" * MIB, b"y" * MIB]


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return WrappedStore(MemoryStore(clock=clock))


def tenant_of(request):
    return request.header("x-tenant") or "shop"


async def read(receive):
    pieces, more = [], True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        pieces.append(message["body"])
        more = message["more_body"]
    return b"".join(pieces)


async def say(send, body=b"ok", *, status=200, headers=()):
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


class Shop:
    """An app that remembers what reached it, and answers with how often it was asked."""

    def __init__(self, answer=None):
        self.bodies = []
        self.scopes = []
        self._answer = answer

    @property
    def runs(self):
        return len(self.scopes)

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        if self._answer is not None:
            await self._answer(scope, receive, send)
            return
        self.bodies.append(await read(receive))
        await say(send, b'{"run": %d}' % self.runs, status=201)


@pytest.fixture
def shop():
    return Shop()


@pytest.fixture
def door(store):
    def make(app, rule=None, **more):
        return IdempotencyMiddleware(app, store=store, scope=tenant_of, rule=rule, **more)

    return make


def answering(*args, **kwargs):
    """An app that always answers this."""

    async def answer(scope, receive, send):
        await say(send, *args, **kwargs)

    return Shop(answer)


async def records(store):
    return await store.store.ledger(ASYNC).records()


async def state(store):
    (found,) = await records(store)
    return found.state


# --- what is not ours ---------------------------------------------------------------------------


class Witness:
    """An app that keeps the very objects it was handed."""

    async def __call__(self, *handed):
        self.handed = handed


@pytest.mark.parametrize(
    "scope",
    [
        scope_of(),
        scope_of(method="GET", key="k"),
        scope_of(method="PUT", key="k"),
        scope_of(method="DELETE", key="k"),
        scope_of(method="OPTIONS", key="k"),
        scope_of("/free", key="k"),
        {"type": "websocket", "path": "/pay", "headers": [(b"idempotency-key", b"k")]},
        {"type": "lifespan"},
    ],
    ids=["no key", "GET", "PUT", "DELETE", "OPTIONS", "free route", "websocket", "lifespan"],
)
async def test_what_has_no_meaning_here_is_handed_on_with_the_very_same_objects(door, store, scope):
    app, wire = Witness(), Wire()
    before = dict(scope)
    receive, send = wire.receive, wire.send
    await door(app, routes={"/free": None})(scope, receive, send)
    assert app.handed[0] is scope
    assert app.handed[1] is receive
    assert app.handed[2] is send
    assert scope == before
    assert not store.line.count


async def test_a_repeat_is_shown_the_first_response_and_nothing_is_run(door, shop, store):
    app = door(shop)
    first = await ask(app, key="k", body=b'{"amount": 5}')
    again = await ask(app, key="k", body=b'{"amount": 5}')
    assert (first.status, first.body, first.replayed) == (201, b'{"run": 1}', False)
    assert (again.status, again.body, again.replayed) == (201, b'{"run": 1}', True)
    assert shop.bodies == [b'{"amount": 5}']
    assert store.line.count == {"claim": 2, "complete": 1}


# --- the key ------------------------------------------------------------------------------------


async def test_a_request_without_the_key_it_needs_is_refused(door, shop, store):
    app = door(shop, routes={"/pay": Rule(key="required")})
    refused = await ask(app)
    assert refused.status == 400
    assert refused.problem == "key-missing"
    assert refused.header("content-language") == "en"
    assert shop.runs == 0
    assert not store.line.count
    assert (await ask(app, "/elsewhere")).status == 201


MALFORMED = [
    b"",
    b" ",
    b'""',
    b'"',
    b'"a',
    b'a"',
    b'"a" "b"',
    b'"a", "b"',
    b"a, b",
    b"a b",
    b"a;q=1",
    b'"a";q=1',
    b'"a\\n"',
    b'"a\\"',
    b'"\x7f"',
    b'"\x00"',
    b"\xc3\xa4",
    b'"\xc3\xa4"',
    b"a\tb",
    b"a\r\nset-cookie: x=1",
    b'"a\r\nset-cookie: x=1"',
    b'"a\nb"',
    b"a\\b",
    b"k" * 256,
    b'"' + b"k" * 256 + b'"',
]


@pytest.mark.parametrize("content", MALFORMED)
async def test_what_is_no_single_string_is_refused_before_anything_is_looked_up(
    door, shop, store, content
):
    refused = await ask(door(shop), key=content)
    assert refused.status == 400
    assert refused.problem == "key-malformed"
    assert refused.header("set-cookie") is None
    assert shop.runs == 0
    assert not store.line.count


async def test_a_key_that_comes_twice_is_refused(door, shop, store):
    refused = await ask(door(shop), key=["k", "k"])
    assert refused.problem == "key-malformed"
    assert shop.runs == 0
    assert not store.line.count


@pytest.mark.parametrize("key", ["k" * 255, '"' + "k" * 255 + '"', '"a b"', "a:b/c=d+e", '"\\""'])
async def test_the_longest_and_the_oddest_keys_are_keys(door, shop, key):
    app = door(shop)
    assert (await ask(app, key=key)).status == 201
    assert (await ask(app, key=key)).replayed


@pytest.mark.parametrize("spelt", ['"k"', ' "k"', "k\t", ' "k" '])
async def test_a_quoted_key_and_a_bare_one_are_the_same(door, shop, spelt):
    app = door(shop)
    await ask(app, key="k")
    assert (await ask(app, key=spelt)).replayed


ANYTHING = st.binary(max_size=300)
ALMOST = st.lists(
    st.sampled_from([b'"', b"\\", b",", b";", b" ", b"\r\n", b"\x00", b"k", b"=", b"\xff"]),
    max_size=12,
).map(b"".join)


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=ANYTHING | ALMOST)
@example(b'"\\\\"')
@example(b"\x85")
@example("٣".encode())
async def test_no_header_makes_the_door_fall_over(content):
    """Every byte string is a key or is refused; what is refused leaves nothing behind."""
    store, shop = WrappedStore(MemoryStore()), Shop()
    app = IdempotencyMiddleware(shop, store=store, scope="shop")
    reply = await ask(app, key=content)
    if reply.status == 400:
        assert reply.problem == "key-malformed"
        assert shop.runs == 0
        assert not store.line.count
    else:
        assert reply.status == 201
        again = await ask(app, key=content)
        assert again.replayed
        assert again.body == reply.body
        assert shop.runs == 1
    for name, said in reply.headers:
        assert b"\r" not in name + said
        assert b"\n" not in name + said


WORDS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=60)


@settings(deadline=None, max_examples=100)
@given(word=WORDS)
async def test_whatever_can_be_said_both_ways_is_the_same_key(word):
    shop = Shop()
    app = IdempotencyMiddleware(shop, store=MemoryStore(), scope="shop")
    quoted = '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
    assert (await ask(app, key=quoted)).status == 201
    bare = await ask(app, key=word)
    if any(c in word for c in '",;\\'):
        assert not bare.replayed
    else:
        assert bare.replayed
        assert shop.runs == 1


# --- header injection ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        (b"x-note", b"a\r\nset-cookie: session=1"),
        (b"x-note", b"a\r\n\r\n<script>"),
        (b"x-note", b"a\nb"),
        (b"x-note", b"a\rb"),
        (b"x-note\r\nset-cookie", b"session=1"),
        (b"x-note\nset-cookie", b"session=1"),
    ],
)
async def test_a_header_that_carries_another_is_not_shown_again(door, header):
    """What a server would have refused the first time must not become two headers in a replay."""
    shop = answering(b"body", headers=[(b"x-one", b"1"), header, (b"x-two", b"2")])
    app = door(shop)
    await ask(app, key="k")
    again = await ask(app, key="k")
    assert again.headers == [
        (b"x-one", b"1"),
        (b"x-two", b"2"),
        (b"idempotent-replayed", b"true"),
    ]
    assert again.body == b"body"
    assert shop.runs == 1


# A server knows no name with a colon in it, and neither does a replay.
NAMES = st.binary(min_size=1, max_size=20).filter(lambda name: b":" not in name)


@settings(deadline=None, max_examples=200)
@given(
    headers=st.lists(st.tuples(NAMES, st.binary(max_size=30)), max_size=5),
    body=st.binary(max_size=100),
)
@example(headers=[(b"a\r", b"\nb")], body=b"\r\n\r\n")
@example(headers=[(b"a", b"")], body=b"\r\n")
@example(headers=[(b"\r\n", b"x")], body=b"")
async def test_no_header_of_an_app_changes_the_body_of_a_replay(headers, body):
    shop = answering(body, headers=headers)
    app = IdempotencyMiddleware(shop, store=MemoryStore(), scope="shop")
    first = await ask(app, key="k")
    again = await ask(app, key="k")
    assert first.headers == headers
    assert again.body == body
    assert again.status == 200
    kept = [header for header in again.headers if header in headers]
    assert kept == again.headers[:-1]


# --- tenants ------------------------------------------------------------------------------------


async def test_tenants_never_share_a_key(door, shop):
    app = door(shop)
    answers = [
        await ask(app, key="k", headers=[(b"x-tenant", name)]) for name in (b"a", b"b", b"a")
    ]
    assert [answer.body for answer in answers] == [b'{"run": 1}', b'{"run": 2}', b'{"run": 1}']


@pytest.mark.parametrize("pair", [("a", "bk", "ab", "k"), ("http", "k", "", "k")])
async def test_no_tenant_and_key_run_together(store, shop, pair):
    tenant, key, other_tenant, other_key = pair
    app = IdempotencyMiddleware(shop, store=store, scope=lambda r: r.header("x-tenant") or "none")
    await ask(app, key=key, headers=[(b"x-tenant", tenant.encode())])
    other = await ask(app, key=other_key, headers=[(b"x-tenant", other_tenant.encode())])
    assert not other.replayed
    assert shop.runs == 2


async def test_a_caller_is_let_in_again_before_every_replay(store, shop):
    """Who has lost the right to ask has lost the right to be shown the old answer."""
    welcome = True
    asked = []

    async def scope(request):
        asked.append(request.path)
        await asyncio.sleep(0)
        if not welcome:
            raise Refusal(Response(401, ((b"www-authenticate", b"Bearer"),), b"who?"))
        return "shop"

    app = IdempotencyMiddleware(shop, store=store, scope=scope)
    assert (await ask(app, key="k")).status == 201
    welcome = False
    refused = await ask(app, key="k")
    assert (refused.status, refused.body) == (401, b"who?")
    assert refused.header("www-authenticate") == "Bearer"
    assert not refused.replayed
    welcome = True
    assert (await ask(app, key="k")).replayed
    assert asked == ["/pay"] * 3
    assert shop.runs == 1


@pytest.mark.parametrize("tenant", [None, False, "", 0, {}, []], ids=repr)
async def test_an_empty_tenant_is_refused_and_nothing_is_run(store, shop, tenant):
    async def later(request):
        return tenant

    for scope in (lambda _: tenant, later):
        for app in (
            IdempotencyMiddleware(shop, store=store, scope=scope),
            IdempotencyMiddleware(shop, store=store, scope="shop", rule=Rule(scope=scope)),
        ):
            answer = await ask(app, key="k")
            assert (answer.status, answer.problem) == (403, "tenant-missing")
    assert shop.runs == 0
    assert not store.line.count


async def _tenant():
    return "shop"


@pytest.mark.parametrize(
    "undecided",
    [
        pytest.param(_tenant, id="a coroutine"),
        pytest.param(lambda: asyncio.get_running_loop().create_future(), id="a future"),
        pytest.param(lambda: Refusal(Response(401, (), b"")), id="a returned refusal"),
        pytest.param(lambda: PermissionError("no"), id="a returned error"),
        pytest.param(lambda: NotImplemented, id="NotImplemented"),
    ],
)
@pytest.mark.filterwarnings("error")
async def test_answer_of_scope_that_decides_nothing_is_refused(store, shop, undecided):
    async def later(request):
        return undecided()

    answer = await ask(IdempotencyMiddleware(shop, store=store, scope=later), key="k")
    assert (answer.status, answer.problem) == (403, "tenant-missing")
    assert shop.runs == 0


@pytest.mark.parametrize("tenant", [7, True, b"shop"])
async def test_a_tenant_that_is_no_text_is_an_error_and_nothing_is_run(store, shop, tenant):
    app = IdempotencyMiddleware(shop, store=store, scope=lambda _: tenant)
    with pytest.raises(SettingsError, match="scope="):
        await ask(app, key="k")
    assert shop.runs == 0
    assert not store.line.count


@pytest.mark.parametrize("scope", [None, "", 7])
def test_a_door_without_a_scope_is_refused(shop, scope):
    with pytest.raises(SettingsError, match="whose key"):
        IdempotencyMiddleware(shop, store=MemoryStore(), scope=scope)


# --- request bodies -----------------------------------------------------------------------------


async def test_what_says_itself_too_large_is_refused_before_it_is_asked_for(door, shop, store):
    wire = Wire(b"x", b"y", b"z")
    length = [(b"content-length", b"%d" % (MIB + 1))]
    refused = await ask(door(shop), key="k", headers=length, wire=wire)
    assert refused.status == 413
    assert refused.problem == "body-too-large"
    assert wire.pieces == [b"x", b"y", b"z"]  # or a client that waits for 100 Continue would send
    assert shop.runs == 0
    assert not store.line.count


async def test_what_turns_out_too_large_is_refused_where_it_does(door, shop, store):
    wire = Wire(*[b"x" * 10] * 12)
    refused = await ask(door(shop, Rule(max_body=100)), key="k", wire=wire)
    assert refused.status == 413
    assert len(wire.pieces) == 1
    assert shop.runs == 0
    assert not store.line.count


@pytest.mark.parametrize("size", [0, 1, 100])
async def test_a_body_up_to_the_limit_is_let_in(door, shop, size):
    assert (await ask(door(shop, Rule(max_body=100)), key="k", body=b"x" * size)).status == 201
    assert shop.bodies == [b"x" * size]


@pytest.mark.parametrize("length", [b"", b"-1", b"abc", b"1e9", "٣".encode(), b"9" * 30])
async def test_a_length_that_is_none_is_no_reason_to_fall_over(door, shop, length):
    wire = Wire(b"x", b"y")
    reply = await ask(door(shop), key="k", headers=[(b"content-length", length)], wire=wire)
    assert reply.status == (413 if length == b"9" * 30 else 201)


async def test_a_length_of_five_thousand_digits_is_too_large(door, shop):
    length = [(b"content-length", b"9" * 5000)]
    reply = await ask(door(shop), key="k", headers=length, wire=Wire(b"x", b"y"))
    assert reply.status == 413


@pytest.mark.parametrize(
    "fingerprint", ["bytes", None, lambda request, body: hashlib.md5(body).digest()]
)
async def test_a_large_body_arrives_as_it_was_sent(door, shop, fingerprint):
    """Beyond what is kept in memory it goes through a file."""
    pieces = [bytes([number]) * 300 * KIB for number in range(9)]
    app = door(shop, Rule(max_body=4 * MIB, fingerprint=fingerprint))
    assert (await ask(app, key="k", wire=Wire(*pieces))).status == 201
    assert shop.bodies == [b"".join(pieces)]
    assert (await ask(app, key="k", wire=Wire(*pieces))).replayed
    pieces[4] = pieces[4][:-1] + b"!"
    other = await ask(app, key="k", wire=Wire(*pieces))
    assert other.status == (422 if fingerprint else 201)
    assert shop.runs == 1


async def test_a_large_body_is_compared_beside_the_loop(door, shop, monkeypatch):
    """Hashing a hundred megabytes takes as long as hundreds of requests."""
    threads = []
    feed = Body.feed
    monkeypatch.setattr(
        Body, "feed", lambda body, update: threads.append(current_thread()) or feed(body, update)
    )
    app = door(shop, Rule(max_body=4 * MIB))
    await ask(app, key="large", wire=Wire(*LARGE))
    await ask(app, key="small")
    assert [thread is main_thread() for thread in threads] == [False, True]


async def test_where_a_body_is_cut_into_pieces_makes_no_difference(door, shop):
    app = door(shop, Rule(max_body=4 * MIB))
    body = bytes(range(256)) * 8 * KIB
    await ask(app, key="k", body=body)
    pieces = [body[at : at + 100_001] for at in range(0, len(body), 100_001)]
    assert (await ask(app, key="k", wire=Wire(*pieces, b""))).replayed


async def test_a_client_that_leaves_before_its_body_is_whole_leaves_nothing(door, shop, store):
    wire = Wire(b"half")

    async def receive():
        if wire.pieces:
            return {"type": "http.request", "body": wire.pieces.pop(), "more_body": True}
        return {"type": "http.disconnect"}

    await door(shop)(scope_of(key="k"), receive, wire.send)
    assert wire.sent == []
    assert shop.runs == 0
    assert not store.line.count


async def test_no_key_is_held_while_a_body_arrives(door, shop):
    app = door(shop)
    rest = asyncio.Event()
    slow = Wire(b'{"amount"', b": 5}")
    receive = slow.receive

    async def dribble():
        if len(slow.pieces) == 1:
            await rest.wait()
        return await receive()

    slow.receive = dribble
    waiting = asyncio.create_task(ask(app, key="k", wire=slow))
    await until(lambda: len(slow.pieces) == 1)
    assert (await ask(app, key="k", body=b'{"amount": 5}')).status == 201
    rest.set()
    assert (await waiting).replayed
    assert shop.runs == 1


class Piece(bytes):
    """Bytes that say when they are gone."""

    gone: ClassVar[list[int]] = []

    def __del__(self):
        self.gone.append(len(self))


async def test_a_body_is_dropped_when_the_app_has_read_it(door):
    Piece.gone.clear()
    seen = []

    async def answer(scope, receive, send):
        await receive()
        gc.collect()
        seen.append(list(Piece.gone))
        await say(send)

    await ask(door(Shop(answer)), key="k", wire=Wire(Piece(b"x" * 1000)))
    assert seen == [[1000]]


@pytest.fixture
def spooled(monkeypatch):
    """The files that bodies went to."""
    import tempfile

    files = []
    make = tempfile.TemporaryFile

    def remember(*args, **kwargs):
        files.append(make(*args, **kwargs))
        return files[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", remember)
    return files


async def test_the_file_of_a_body_is_closed_when_the_app_has_read_it(door, spooled):
    open_inside = []

    async def answer(scope, receive, send):
        await read(receive)
        open_inside.append([file.closed for file in spooled])
        await say(send)

    await ask(door(Shop(answer), Rule(max_body=4 * MIB)), key="k", wire=Wire(*LARGE))
    assert open_inside == [[True]]


async def test_the_file_of_a_body_is_closed_when_nobody_reads_it(door, spooled):
    app = door(answering(b"not today", status=403), Rule(max_body=4 * MIB))
    assert (await ask(app, key="k", wire=Wire(*LARGE))).status == 403
    assert [file.closed for file in spooled] == [True]


@pytest.mark.parametrize("what", ["too large", "no JSON", "gone", "cancelled", "other body"])
async def test_the_file_of_a_body_that_is_refused_is_closed(door, shop, spooled, what):
    most = 2 * MIB if what == "too large" else 8 * MIB
    fingerprint = "json" if what == "no JSON" else "bytes"
    app = door(shop, Rule(max_body=most, fingerprint=fingerprint))
    pieces = [*LARGE, b"z"]
    wire = Wire(*pieces)
    if what in ("gone", "cancelled"):
        receive = wire.receive

        async def interrupted():
            if len(wire.pieces) > 1:
                return await receive()
            if what == "cancelled":
                raise asyncio.CancelledError
            return {"type": "http.disconnect"}

        wire.receive = interrupted
    if what == "other body":
        await ask(app, key="k", body=b"{}")
    with contextlib.suppress(asyncio.CancelledError):
        await app(scope_of(key="k"), wire.receive, wire.send)
    assert [file.closed for file in spooled] == [True]
    assert shop.runs == (1 if what == "other body" else 0)


async def test_behind_the_body_an_app_hears_from_the_server_itself(door):
    """Never an invented disconnect, and the real one when the response is recorded."""
    wire = Wire(b"{}")
    heard = []

    async def answer(scope, receive, send):
        await receive()
        listening = asyncio.create_task(receive())
        if attempt_of(scope).key == "gone":
            wire.gone.set()
        await asyncio.sleep(0.01)
        heard.append(listening.done())
        await say(send)
        await asyncio.sleep(0.01)
        heard.append(listening.done())
        wire.gone.set()
        heard.append((await listening)["type"])

    app = door(Shop(answer))
    await ask(app, key="there", wire=wire)
    assert heard == [False, False, "http.disconnect"]
    heard.clear()
    wire = Wire(b"{}")
    await ask(app, key="gone", wire=wire)
    assert heard == [False, True, "http.disconnect"]


# --- responses ----------------------------------------------------------------------------------


async def test_a_response_that_is_too_large_is_sent_whole_and_remembered_without_it(door):
    body = bytes(range(256)) * 10
    shop = answering(body, headers=[(b"content-length", b"%d" % len(body))])
    app = door(shop, Rule(max_response=1000))
    assert (await ask(app, key="k")).body == body
    again = await ask(app, key="k")
    assert again.status == 410
    assert again.problem == "response-not-kept"
    assert shop.runs == 1


@pytest.mark.parametrize("size", [0, 999, 1000])
async def test_a_response_up_to_the_limit_is_kept(door, size):
    shop = answering(b"x" * size)
    app = door(shop, Rule(max_response=1000))
    await ask(app, key="k")
    again = await ask(app, key="k")
    assert again.replayed
    assert again.body == b"x" * size


async def test_more_than_is_kept_goes_out_as_it_comes(door):
    wire = Wire(b"{}")
    seen = []

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(4):
            await send({"type": "http.response.body", "body": b"x" * 400, "more_body": True})
            seen.append(len(wire.so_far))
        await send({"type": "http.response.body", "body": b"end"})

    reply = await ask(door(Shop(answer), Rule(max_response=1000)), key="k", wire=wire)
    assert seen == [0, 0, 1200, 1600]
    assert reply.body == b"x" * 1600 + b"end"


@pytest.mark.parametrize("kind", [b"text/event-stream", b"Text/Event-Stream; charset=utf-8"])
async def test_events_are_live_and_the_request_is_not_repeated(door, kind):
    wire = Wire(b"{}")
    seen = []

    async def answer(scope, receive, send):
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(3):
            event = b"data: %d\n\n" % number
            await send({"type": "http.response.body", "body": event, "more_body": True})
            seen.append(wire.so_far.count(b"data"))
        await send({"type": "http.response.body", "body": b""})

    shop = Shop(answer)
    app = door(shop)
    reply = await ask(app, key="k", wire=wire)
    assert seen == [1, 2, 3]
    assert reply.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert (await ask(app, key="k")).status == 410
    assert shop.runs == 1


async def test_a_response_of_unknown_length_that_lingers_becomes_live(door):
    wire = Wire(b"{}")

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        assert wire.sent == []
        await until(lambda: wire.so_far == b"one ")
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    shop = Shop(answer)
    app = door(shop, Rule(linger=0.02))
    assert (await ask(app, key="k", wire=wire)).body == b"one two"
    assert (await ask(app, key="k")).problem == "response-not-kept"
    assert shop.runs == 1


async def test_pieces_that_follow_each_other_are_one_response(door):
    """Behind a BaseHTTPMiddleware every response looks like this."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        for piece in (b"[", b"1", b"", b"]"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    shop = Shop(answer)
    app = door(shop)
    assert (await ask(app, key="k")).body == b"[1]"
    again = await ask(app, key="k")
    assert again.replayed
    assert again.body == b"[1]"


async def test_a_response_that_says_its_length_is_gathered_however_long_it_takes(door):
    async def answer(scope, receive, send):
        headers = [(b"Content-Length", b"6")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await asyncio.sleep(0.03)
        await send({"type": "http.response.body", "body": b"two"})

    app = door(Shop(answer), Rule(linger=0.005))
    await ask(app, key="k")
    assert (await ask(app, key="k")).body == b"onetwo"


async def without_more_body(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"{}"})


async def with_more_body(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"{}", "more_body": False})


async def without_body(scope, receive, send):
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize(
    ("app", "body"),
    [
        (JSONResponse({}), b"{}"),
        (without_more_body, b"{}"),
        (with_more_body, b"{}"),
        (without_body, b""),
    ],
)
async def test_whole_response_is_recorded_from_send_itself(door, monkeypatch, app, body):
    """Each further coroutine would wait, and keep its frame, until the store has answered."""
    waiting = []
    close = Exchange.close

    def spied(self, *args, **kwargs):
        frames = traceback.extract_stack()
        waiting.extend(frame.name for frame in frames if frame.filename == asgi.__file__)
        return close(self, *args, **kwargs)

    monkeypatch.setattr(Exchange, "close", spied)
    shop = door(Shop(app))
    first = await ask(shop, key="k")
    assert waiting == ["__call__", "hold", "send", "_finish"]
    again = await ask(shop, key="k")
    assert (first.body, again.body, again.replayed) == (body, body, True)


async def test_early_hints_go_out_at_once_and_are_no_part_of_the_response(door):
    wire = Wire(b"{}")
    hint = {"type": "http.response.early_hint", "links": [b"</style.css>; rel=preload"]}

    async def answer(scope, receive, send):
        await send(hint)
        assert wire.informed == [hint]
        await say(send)

    app = door(Shop(answer))
    await ask(app, key="k", wire=wire)
    again = Wire(b"{}")
    assert (await ask(app, key="k", wire=again)).replayed
    assert again.informed == []


async def test_ways_to_send_that_could_not_be_recorded_are_not_offered(door, shop):
    offered = {
        "http.response.pathsend": {},
        "http.response.zerocopysend": {},
        "http.response.trailers": {},
        "http.response.early_hint": {},
        "tls": {"tls_version": 772},
    }
    app = door(shop)
    await ask(app, key="k", extensions=dict(offered))
    assert set(shop.scopes[0]["extensions"]) == {"http.response.early_hint", "tls"}
    await ask(app, extensions=dict(offered))
    assert shop.scopes[1]["extensions"] == offered


@pytest.mark.parametrize("extensions", [None, {}])
async def test_a_server_that_offers_nothing_is_fine(door, shop, extensions):
    assert (await ask(door(shop), key="k", extensions=extensions)).status == 201


async def test_no_byte_is_sent_before_the_record_is_there(door, store):
    states = []

    async def look(message):
        states.append((message["type"], await state(store)))

    await ask(door(answering()), key="k", wire=Wire(b"{}", on_send=look))
    assert states == [
        ("http.response.start", State.COMPLETED),
        ("http.response.body", State.COMPLETED),
    ]


async def test_a_client_that_hung_up_does_not_undo_the_record(door, shop):
    async def broken(message):
        raise OSError("gone")

    app = door(shop)
    with pytest.raises(OSError, match="gone"):
        await ask(app, key="k", wire=Wire(b"{}", on_send=broken))
    again = await ask(app, key="k")
    assert again.replayed
    assert shop.runs == 1


async def test_an_app_that_returns_without_a_response_is_run_again(door, store):
    async def nothing(scope, receive, send):
        pass

    shop = Shop(nothing)
    app = door(shop)
    for _ in range(2):
        wire = Wire(b"{}")
        await app(scope_of(key="k"), wire.receive, wire.send)
        assert wire.sent == []
        assert await state(store) is State.FAILED
    assert shop.runs == 2


@pytest.mark.parametrize("pieces", [(), (b"half",)])
async def test_half_a_response_reaches_the_server_that_can_judge_it(door, store, pieces):
    async def half(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    app, wire = door(Shop(half)), Wire(b"{}")
    await app(scope_of(key="k"), wire.receive, wire.send)
    assert [message["type"] for message in wire.sent][:1] == ["http.response.start"]
    assert wire.so_far == b"".join(pieces)
    assert not wire.over
    assert await state(store) is State.FAILED


async def test_cookies_dates_and_the_connections_own_are_never_shown_again(door):
    headers = [
        (b"Set-Cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"Date", b"Mon, 01 Jan 2024 00:00:00 GMT"),
        (b"Connection", b"close, X-Hop"),
        (b"X-Hop", b"1"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Upgrade", b"h2c"),
        (b"X-Secret", b"s"),
        (b"Location", b"/orders/1"),
        (b"Link", b"</a>"),
        (b"ETag", b'"1"'),
        (b"Link", b"</b>"),
    ]
    app = door(answering(headers=headers), Rule(never_kept=["x-secret"]))
    assert (await ask(app, key="k")).headers == headers
    again = await ask(app, key="k")
    assert again.headers == [*headers[-4:], (b"idempotent-replayed", b"true")]


async def test_a_browser_is_allowed_to_see_that_it_is_a_replay(door, shop):
    app = door(shop)
    origin = [(b"origin", b"https://shop.example")]
    first = await ask(app, key="k", headers=origin)
    again = await ask(app, key="k", headers=origin)
    other = await ask(app, key="k", headers=origin, body=b"other")
    assert first.header("access-control-expose-headers") is None
    assert again.header("access-control-expose-headers") == "Idempotent-Replayed, Retry-After"
    assert other.header("access-control-expose-headers") == "Idempotent-Replayed, Retry-After"
    assert (await ask(app, key="k")).header("access-control-expose-headers") is None


# --- which statuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "status", [200, 201, 202, 204, 206, 301, 302, 303, 304, 400, 402, 409, 410, 418, 422]
)
async def test_an_answer_is_an_answer(door, status):
    shop = answering(b"", status=status)
    app = door(shop)
    await ask(app, key="k")
    again = await ask(app, key="k")
    assert (again.status, again.replayed) == (status, True)
    assert shop.runs == 1


@pytest.mark.parametrize("status", [401, 403, 404, 405, 408, 413, 425, 429])
async def test_who_was_not_let_in_may_come_again(door, status):
    shop = answering(b"no", status=status)
    app = door(shop)
    for _ in range(2):
        reply = await ask(app, key="k")
        assert (reply.status, reply.replayed, reply.body) == (status, False, b"no")
    assert shop.runs == 2


@pytest.mark.parametrize("status", [404, 405])
async def test_what_is_not_there_is_an_answer_when_a_handler_says_so(door, status):
    async def answer(scope, receive, send):
        scope["endpoint"] = answer  # as a router does that has found one
        await say(send, b"no such order", status=status)

    shop = Shop(answer)
    app = door(shop)
    await ask(app, key="k")
    assert (await ask(app, key="k")).replayed
    assert shop.runs == 1


@pytest.mark.parametrize("stores", [{200, 201}, lambda status: status < 300])
async def test_one_may_choose_what_is_kept(door, stores):
    shop = answering(b"", status=409)
    app = door(shop, Rule(stores=stores))
    await ask(app, key="k")
    await ask(app, key="k")
    assert shop.runs == 2
    kept = answering(b"", status=201)
    app = door(kept, Rule(stores=stores))
    await ask(app, key="other")
    assert (await ask(app, key="other")).replayed


# --- errors -------------------------------------------------------------------------------------


async def fall(scope, receive, send):
    raise ZeroDivisionError("oops")


async def ask_badly(app, **request):
    """Ask an app that raises; what the client got by then, if anything."""
    wire = Wire(b"{}")
    with pytest.raises(ZeroDivisionError):
        await app(scope_of(**request), wire.receive, wire.send)
    return wire.reply() if wire.over else None


async def test_an_exception_frees_the_key_and_is_the_servers_to_answer(door, store):
    shop = Shop(fall)
    app = door(shop)
    assert await ask_badly(app, key="k") is None
    assert await state(store) is State.FAILED
    assert await ask_badly(app, key="k") is None
    assert shop.runs == 2


async def test_an_exception_can_be_the_answer_from_now_on(door):
    shop = Shop(fall)
    app = door(shop, Rule(on_error="store"))
    first = await ask_badly(app, key="k")
    again = await ask(app, key="k")
    assert first.status == again.status == 500
    assert first.problem == again.problem == "interrupted"
    assert again.replayed
    assert not first.replayed
    assert shop.runs == 1


async def test_an_exception_can_mean_that_nobody_knows(door, store):
    shop = Shop(fall)
    app = door(shop, Rule(on_error="hold"))
    assert await ask_badly(app, key="k") is None
    assert await state(store) is State.UNKNOWN
    for _ in range(2):
        reply = await ask(app, key="k")
        assert reply.status == 409
        assert reply.problem == "outcome-unknown"
        assert reply.header("retry-after") is None
    assert shop.runs == 1


@pytest.mark.parametrize(
    ("on_error", "second", "replayed", "runs"),
    [("release", 503, False, 2), ("store", 503, True, 1), ("hold", 409, False, 1)],
)
async def test_a_5xx_means_what_the_rule_says(door, on_error, second, replayed, runs):
    shop = answering(b"down", status=503)
    app = door(shop, Rule(on_error=on_error))
    assert (await ask(app, key="k")).body == b"down"
    again = await ask(app, key="k")
    assert (again.status, again.replayed, shop.runs) == (second, replayed, runs)


async def test_an_exception_after_the_response_changes_nothing(door, store):
    async def answer(scope, receive, send):
        await say(send, b"paid")
        raise ZeroDivisionError

    app = door(Shop(answer), Rule(on_error="hold"))
    assert (await ask_badly(app, key="k")).body == b"paid"
    assert (await ask(app, key="k")).body == b"paid"


async def test_an_exception_in_the_middle_of_a_response_frees_the_key(door, store):
    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ZeroDivisionError

    app = door(Shop(answer))
    assert await ask_badly(app, key="k") is None
    assert await state(store) is State.FAILED


async def cancelled_inside(app):
    """A request whose task is cancelled while the app runs."""
    wire = Wire(b"{}")
    task = asyncio.create_task(app(scope_of(key="k"), wire.receive, wire.send))
    await until(lambda: app.app.runs == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert wire.sent == []


async def stay(scope, receive, send):
    if attempt_of(scope).number == 1:
        await asyncio.Event().wait()
    await say(send, b"second")


@pytest.mark.parametrize(
    ("rule", "status", "runs"),
    [
        (Rule(), 200, 2),
        (Rule(on_crash="hold"), 409, 1),
        (Rule(on_crash="store"), 500, 1),
        (Rule(on_crash=lambda _: Retry()), 200, 2),
        (Rule(on_crash=lambda _: CannotTell()), 409, 1),
        (Rule(on_crash=lambda _: Recovered(Response(202, (), b"found"))), 202, 1),
    ],
    ids=["release", "hold", "store", "retry", "cannot tell", "recovered"],
)
async def test_a_request_that_was_cut_off_is_a_crash(door, rule, status, runs):
    shop = Shop(stay)
    app = door(shop, rule)
    await cancelled_inside(app)
    reply = await ask(app, key="k")
    assert (reply.status, shop.runs) == (status, runs)
    if status in (202, 500):
        assert (await ask(app, key="k")).replayed
        assert shop.runs == 1


async def test_what_a_crash_left_can_be_found_out_from_the_attempt(door):
    asked = []

    async def find_out(attempt):
        asked.append((attempt.key, attempt.number, attempt.child_key("charge")))
        return Recovered(problem("interrupted", "it was charged"))

    shop = Shop(stay)
    app = door(shop, Rule(on_crash=find_out))
    await cancelled_inside(app)
    child = attempt_of(shop.scopes[0]).child_key("charge")
    assert (await ask(app, key="k")).json()["detail"] == "it was charged"
    assert asked == [("k", 2, child)]


async def test_an_answer_from_the_world_may_be_too_large_to_keep(door):
    found = Recovered(Response(200, (), b"x" * 2000))
    shop = Shop(stay)
    app = door(shop, Rule(on_crash=lambda _: found, max_response=1000))
    await cancelled_inside(app)
    assert (await ask(app, key="k")).body == b"x" * 2000
    assert (await ask(app, key="k")).problem == "response-not-kept"
    assert shop.runs == 1


async def test_an_answer_from_the_world_that_is_no_response_is_an_error(door):
    app = door(Shop(stay), Rule(on_crash=lambda _: Recovered({"paid": True})))
    await cancelled_inside(app)
    with pytest.raises(SettingsError, match=r"semel\.http\.Response"):
        await ask(app, key="k")


async def test_cancelled_while_it_is_recorded_it_is_recorded(door, shop, store):
    store.line.delay_after["complete"] = 0.01
    app, wire = door(shop), Wire(b"{}")
    task = asyncio.create_task(app(scope_of(key="k"), wire.receive, wire.send))
    await until(lambda: store.line.count["complete"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.line.delay_after.clear()
    assert (await ask(app, key="k")).replayed
    assert shop.runs == 1


async def test_cancelled_while_it_asks_it_leaves_nothing_behind(door, shop, store):
    store.line.delay_after["claim"] = 0.01
    app, wire = door(shop), Wire(b"{}")
    task = asyncio.create_task(app(scope_of(key="k"), wire.receive, wire.send))
    await until(lambda: store.line.count["claim"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    store.line.delay_after.clear()
    assert shop.runs == 0
    assert (await ask(app, key="k")).status == 201


# --- one at a time ------------------------------------------------------------------------------


class Slow(Shop):
    """An app that answers when it is told to."""

    def __init__(self):
        super().__init__(self.answer_late)
        self.go_on = asyncio.Event()

    async def answer_late(self, scope, receive, send):
        body = await read(receive)
        await self.go_on.wait()
        await say(send, b'{"run": %d, "of": %d}' % (self.runs, len(body)))


async def test_meanwhile_the_others_are_told_to_come_again(door):
    shop = Slow()
    app = door(shop)
    first = asyncio.create_task(ask(app, key="k"))
    await until(lambda: shop.runs == 1)
    busy = await ask(app, key="k")
    assert busy.status == 409
    assert busy.problem == "in-progress"
    assert 1 <= int(busy.header("retry-after")) <= 30
    other = await ask(app, key="k", body=b"other")
    assert other.status == 422
    assert other.problem == "key-reused"
    shop.go_on.set()
    await first
    assert (await ask(app, key="k")).replayed
    assert shop.runs == 1


async def test_retry_after_is_about_as_long_as_requests_take(door, clock):
    """Asking after a second what takes a minute is asking in vain sixty times."""
    shop = Slow()
    app = door(shop, Rule(lease=30))
    app._door._pace.seconds = 12.4
    first = asyncio.create_task(ask(app, key="k"))
    await until(lambda: shop.runs == 1)
    assert (await ask(app, key="k")).header("retry-after") == "13"
    clock.advance(25)  # and never longer than the lease can last
    assert (await ask(app, key="k")).header("retry-after") == "5"
    shop.go_on.set()
    await first


async def test_who_may_wait_gets_the_first_ones_answer(door):
    shop = Slow()
    app = door(shop, Rule(wait=10))
    asking = [asyncio.create_task(ask(app, key="k")) for _ in range(20)]
    await until(lambda: shop.runs == 1)
    await asyncio.sleep(0.02)
    shop.go_on.set()
    replies = await asyncio.gather(*asking)
    assert {reply.body for reply in replies} == {b'{"run": 1, "of": 2}'}
    assert sum(reply.replayed for reply in replies) == 19
    assert shop.runs == 1


async def test_waiting_has_an_end(door):
    shop = Slow()
    app = door(shop, Rule(wait=0.05))
    first = asyncio.create_task(ask(app, key="k"))
    await until(lambda: shop.runs == 1)
    assert (await ask(app, key="k")).problem == "in-progress"
    shop.go_on.set()
    await first


async def test_more_than_may_wait_are_told_to_come_again(door):
    shop = Slow()
    app = door(shop, Rule(wait=10, max_waiters=2))
    asking = [asyncio.create_task(ask(app, key="k")) for _ in range(5)]
    await until(lambda: sum(task.done() for task in asking) == 2)
    shop.go_on.set()
    replies = await asyncio.gather(*asking)
    assert sorted(reply.status for reply in replies) == [200, 200, 200, 409, 409]
    assert shop.runs == 1


async def test_who_waits_takes_over_when_the_first_fails(door):
    shop = Slow()
    answer = shop._answer

    async def fail_first(scope, receive, send):
        await answer(scope, receive, send if shop.runs > 1 else fall_when_called)

    async def fall_when_called(message):
        raise ZeroDivisionError

    shop._answer = fail_first
    app = door(shop, Rule(wait=10))
    first = asyncio.create_task(ask_badly(app, key="k"))
    await until(lambda: shop.runs == 1)
    second = asyncio.create_task(ask(app, key="k"))
    await asyncio.sleep(0.02)
    shop.go_on.set()
    await first
    assert (await second).body == b'{"run": 2, "of": 2}'


async def test_a_late_one_shows_what_the_one_who_took_over_recorded(door, clock):
    shop = Slow()
    app = door(shop)
    late = asyncio.create_task(ask(app, key="k"))
    await until(lambda: shop.runs == 1)
    clock.advance(31)  # its lease is over and nobody has renewed it
    winner = asyncio.create_task(ask(app, key="k"))
    await until(lambda: shop.runs == 2)
    shop.go_on.set()
    await asyncio.gather(late, winner)
    replies = [await late, await winner]
    assert len({reply.body for reply in replies}) == 2 - sum(r.replayed for r in replies)
    recorded = await ask(app, key="k")
    assert recorded.replayed
    assert [reply.body for reply in replies if reply.status == 200][-1] == recorded.body


async def test_a_late_one_that_fails_does_not_free_anothers_key(door, clock, store):
    """A release that does not ask whose claim it is lets a third one in."""
    go_on = [asyncio.Event(), asyncio.Event()]

    async def answer(scope, receive, send):
        number = attempt_of(scope).number
        await go_on[number - 1].wait()
        if number == 1:
            raise ZeroDivisionError
        await say(send, b"second")

    shop = Shop(answer)
    app = door(shop)
    late = asyncio.create_task(ask_badly(app, key="k"))
    await until(lambda: shop.runs == 1)
    clock.advance(31)
    winner = asyncio.create_task(ask(app, key="k"))
    await until(lambda: shop.runs == 2)
    go_on[0].set()
    await late
    assert await state(store) is State.PENDING
    assert (await ask(app, key="k")).problem == "in-progress"
    go_on[1].set()
    assert (await winner).body == b"second"
    assert (await ask(app, key="k")).body == b"second"


async def test_a_slow_handler_keeps_its_key(store):
    async def answer(scope, receive, send):
        while store.line.count["renew"] < 6:  # twice the lease has gone by
            await asyncio.sleep(0.005)
        await say(send, b"slow")

    store.store = MemoryStore()
    shop = Shop(answer)
    app = IdempotencyMiddleware(shop, store=store, scope="shop", rule=Rule(lease=0.15))
    first = asyncio.create_task(ask(app, key="k"))
    while not first.done():
        await asyncio.sleep(0.01)
        if not first.done():
            assert (await ask(app, key="k")).problem == "in-progress"
    assert (await ask(app, key="k")).body == b"slow"
    assert shop.runs == 1


# --- rules --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/orders", 201),
        ("/orders/7/pay", 400),
        ("/orders/7/pay/", 201),
        ("/orders//pay", 201),
        ("/orders/7/8/pay", 201),
        ("/orders/7/pays", 201),
        ("/admin/", 400),
        ("/admin/a/b", 400),
        ("/admin", 201),
        ("/a.c", 400),
        ("/abc", 201),
        ("/orders/7/pay\n", 201),
    ],
)
async def test_a_route_is_for_its_own_paths(door, shop, path, status):
    need = Rule(key="required")
    app = door(shop, routes={"/orders/{id}/pay": need, "/admin/*": need, "/a.c": need})
    assert (await ask(app, path)).status == status


async def test_the_first_route_that_fits_is_the_one(door, shop):
    app = door(shop, routes={"/a/b": None, "/a/*": Rule(key="required")})
    assert (await ask(app, "/a/b")).status == 201
    assert (await ask(app, "/a/c")).status == 400


async def test_methods_are_the_rules(door, shop):
    app = door(shop, Rule(methods=("PUT", "delete")))
    for method in ("PUT", "DELETE"):
        await ask(app, method=method, key=method)
        assert (await ask(app, method=method, key=method)).replayed
    assert not (await ask(app, key="k")).replayed
    assert not (await ask(app, key="k")).replayed


async def test_a_route_may_have_a_tenant_of_its_own(door, shop):
    app = door(shop, routes={"/public/*": Rule(scope="everybody")})
    for tenant in (b"a", b"b"):
        await ask(app, "/public/x", key="k", headers=[(b"x-tenant", tenant)])
    assert shop.runs == 1


@pytest.mark.parametrize(
    "change",
    [
        {"path": "/refund"},
        {"method": "PATCH"},
        {"query": b"a=1"},
        {"body": b"{} "},
        {"body": b""},
    ],
    ids=["path", "method", "query", "body", "no body"],
)
async def test_a_key_is_for_one_request(door, shop, change):
    app = door(shop)
    await ask(app, path="/pay", key="k", body=b"{}")
    other = await ask(app, **{"path": "/pay", "key": "k", "body": b"{}"} | change)
    assert other.status == 422
    assert other.problem == "key-reused"
    assert shop.runs == 1


async def test_a_key_may_be_for_each_operation(door, shop):
    app = door(shop, Rule(per_operation=True))
    for path in ("/pay", "/refund", "/pay"):
        await ask(app, path, key="k")
    assert shop.runs == 2
    assert (await ask(app, "/pay", key="k", body=b"other")).status == 422


@pytest.mark.parametrize(
    "rule", [Rule(fingerprint=None), Rule(fingerprint=None, per_operation=True)]
)
async def test_two_long_paths_are_two_paths(door, shop, rule):
    """What is shown to people is cut; what is compared is not."""
    app = door(shop, rule)
    root = "/" + "x" * 300
    await ask(app, root + "/1", key="k")
    other = await ask(app, root + "/2", key="k")
    assert not other.replayed
    assert other.status == (201 if rule.per_operation else 422)


async def test_nothing_need_be_compared_but_the_operation(door, shop):
    app = door(shop, Rule(fingerprint=None))
    await ask(app, key="k")
    assert (await ask(app, key="k", body=b"other", query=b"x=1")).replayed
    assert (await ask(app, "/refund", key="k")).status == 422


SAME_JSON = [
    b'{"amount": 5, "to": ["a", null]}',
    b'{"to":["a",null],"amount":5}',
    b' {\n"amount" : 5, "to" : [ "a" , null ] } ',
    b'{"amount": 5, "t\\u006f": ["a", null]}',
]
OTHER_JSON = [
    b'{"amount": 5.0, "to": ["a", null]}',
    b'{"amount": "5", "to": ["a", null]}',
    b'{"amount": 5, "to": [null, "a"]}',
    b'{"amount": 5, "to": ["a"]}',
    b'{"amount": 5}',
    b"[]",
    b"null",
    b"",
    b'{"amount": true, "to": ["a", null]}',
]


@pytest.mark.parametrize("body", SAME_JSON)
async def test_json_is_the_same_however_it_is_written(door, shop, body):
    app = door(shop, Rule(fingerprint="json"))
    await ask(app, key="k", body=SAME_JSON[0])
    assert (await ask(app, key="k", body=body)).replayed


@pytest.mark.parametrize("body", OTHER_JSON)
async def test_json_that_means_something_else_is_another_request(door, shop, body):
    app = door(shop, Rule(fingerprint="json"))
    await ask(app, key="k", body=SAME_JSON[0])
    assert (await ask(app, key="k", body=body)).status == 422
    assert shop.runs == 1


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"\xff",
        b'{"a": 1, "a": 1}',
        b'{"a": {"b": 1, "b": 2}}',
        b"NaN",
        b"-Infinity",
        b"1 2",
        b"[" * 100_000,
        b"1" * 5000,
        b'"\\ud800"',
        b"\xef\xbb\xbf{}",
    ],
    ids=[
        "cut",
        "bytes",
        "twice",
        "twice inside",
        "nan",
        "inf",
        "two",
        "deep",
        "long",
        "half",
        "bom",
    ],
)
async def test_json_that_cannot_be_compared_is_refused_or_compared(door, shop, store, body):
    reply = await ask(door(shop, Rule(fingerprint="json")), key="k", body=body)
    assert reply.status in (201, 400)
    if reply.status == 400:
        assert reply.problem == "body-malformed"
        assert shop.runs == 0
        assert not store.line.count


@pytest.mark.parametrize("body", [b"1e999999999", b"1e-999999999", b"1E+9999999999999999999"])
async def test_a_number_of_a_billion_digits_is_never_written_out(door, shop, body):
    reply = await ask(door(shop, Rule(fingerprint="json")), key="k", body=body)
    assert reply.status in (201, 400)


async def test_one_may_choose_what_is_compared(door, shop):
    def amount(request, body):
        return request.path, json.loads(body)["amount"]

    app = door(shop, Rule(fingerprint=amount))
    await ask(app, key="k", body=b'{"amount": 5, "sent_at": 1}')
    assert (await ask(app, key="k", body=b'{"amount": 5, "sent_at": 2}')).replayed
    assert (await ask(app, key="k", body=b'{"amount": 6, "sent_at": 2}')).status == 422


@pytest.mark.parametrize(
    "path", ["/\x00", "/\ud800", "/ä", "/" + "x" * 5000, "", "/%00", "/a\r\nb"]
)
@pytest.mark.parametrize("per_operation", [True, False])
async def test_no_path_makes_the_door_fall_over(door, shop, path, per_operation):
    app = door(shop, Rule(per_operation=per_operation))
    first = await ask(app, path, key="k")
    assert first.status == 201
    assert (await ask(app, path, key="k")).replayed


async def test_when_its_time_is_over_a_key_is_new(door, shop, clock):
    app = door(shop, Rule(ttl=3600))
    await ask(app, key="k")
    clock.advance(3599)
    assert (await ask(app, key="k")).replayed
    clock.advance(2)
    assert not (await ask(app, key="k", body=b"other")).replayed
    assert shop.runs == 2


# --- around it ----------------------------------------------------------------------------------


async def test_background_tasks_run_when_the_record_is_there(door, store):
    from starlette.background import BackgroundTask
    from starlette.responses import JSONResponse

    seen = []

    async def later():
        seen.append(await state(store))
        seen.append((await ask(app, key="k")).replayed)

    async def answer(scope, receive, send):
        await JSONResponse({}, background=BackgroundTask(later))(scope, receive, send)

    shop = Shop(answer)
    app = door(shop)
    await ask(app, key="k")
    assert seen == [State.COMPLETED, True]
    assert shop.runs == 1


async def test_a_background_task_that_fails_changes_nothing(door):
    async def answer(scope, receive, send):
        await say(send, b"paid")
        await asyncio.sleep(0)
        raise ZeroDivisionError

    app = door(Shop(answer), Rule(on_error="store"))
    await ask_badly(app, key="k")
    assert (await ask(app, key="k")).body == b"paid"


async def test_a_handler_sees_its_attempt(door):
    seen = []

    async def answer(scope, receive, send):
        attempt = attempt_of(scope)
        assert semel.current() is attempt
        seen.append((attempt.key, attempt.tenant, attempt.operation, attempt.number))
        await say(send)

    await ask(door(Shop(answer)), key='"k"')
    assert seen == [("k", "shop", "POST /pay", 1)]
    assert attempt_of(scope_of()) is None


async def test_a_step_of_a_handler_is_done_once(door):
    charged = []

    async def answer(scope, receive, send):
        receipt = await semel.step("charge", lambda: charged.append(1) or "r-1")
        if attempt_of(scope).number == 1:
            raise ZeroDivisionError
        await say(send, receipt.encode())

    app = door(Shop(answer))
    await ask_badly(app, key="k")
    assert (await ask(app, key="k")).body == b"r-1"
    assert charged == [1]


async def test_a_guard_inside_a_handler_with_the_same_key_is_another_matter(door, store):
    """A client that guesses the key of a job must not be able to block it, nor to show it."""

    @semel.idempotent(store=store, key="k", operation="job", scope="shop")
    async def job():
        return "done"

    async def answer(scope, receive, send):
        await say(send, (await job()).encode())

    app = door(Shop(answer))
    assert (await ask(app, key="k")).body == b"done"
    assert await job() == "done"


async def test_a_door_behind_a_door_does_nothing(door, shop, store):
    app = door(door(shop))
    assert (await ask(app, key="k")).status == 201
    assert (await ask(app, key="k")).replayed
    assert store.line.count == {"claim": 2, "complete": 1}


async def test_a_store_of_the_other_colour_is_refused_when_the_door_is_made(shop):
    import redis

    from semel.stores.redis import RedisStore

    store = RedisStore(redis.Redis())
    with pytest.raises(SettingsError):
        IdempotencyMiddleware(shop, store=store, scope="shop")


async def test_a_store_that_is_too_weak_is_refused(shop):
    rule = Rule(require=["process_crash"])
    app = IdempotencyMiddleware(shop, store=MemoryStore(), scope="shop", rule=rule)
    with pytest.raises(SettingsError, match="process_crash"):
        await ask(app, key="k")
    assert shop.runs == 0


# --- a store in trouble -------------------------------------------------------------------------


async def test_without_a_store_nothing_is_done(door, shop, store):
    app = door(shop)
    store.line.lose_request["claim"] = 1
    refused = await ask(app, key="k")
    assert refused.status == 503
    assert refused.problem == "store-unavailable"
    assert refused.header("retry-after") == "1"
    assert shop.runs == 0
    assert (await ask(app, key="k")).status == 201


async def test_a_record_whose_confirmation_is_lost_is_written_again(door, shop, store):
    app = door(shop)
    store.line.lose_reply["complete"] = 2
    assert (await ask(app, key="k")).status == 201
    assert store.line.count["complete"] == 3
    assert (await ask(app, key="k")).replayed
    assert shop.runs == 1


async def test_what_happened_is_said_even_if_it_cannot_be_recorded(door, shop, store, caplog):
    app = door(shop, Rule(lease=0.2))
    store.line.lose_request["complete"] = 1000
    with caplog.at_level(logging.ERROR):
        reply = await ask(app, key="k")
    assert (reply.status, reply.body) == (201, b'{"run": 1}')
    assert "without a record" in caplog.text


async def test_a_record_that_cannot_be_read_is_never_run_again(door, shop, store, clock):
    app = door(shop)
    await ask(app, key="k")
    inside = store.store._ledger
    (row,) = inside._rows.values()
    inside._rows[row.key.id] = row.but(outcome=semel.values.Outcome("value", b"\x80\x04]."))
    reply = await ask(app, key="k")
    assert reply.status == 410
    assert shop.runs == 1
