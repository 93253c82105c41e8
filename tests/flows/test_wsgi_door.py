"""The WSGI door: what a server and an app see of it, with a strict validator on either side."""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import threading
from contextlib import closing, contextmanager
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.validate import validator

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from werkzeug.serving import make_server as make_werkzeug_server

import semel
from semel.attempt import CURRENT
from semel.colour import SYNC, run
from semel.errors import SettingsError
from semel.guard import require
from semel.http import Refusal, Response, Rule, WSGIMiddleware, attempt_of, exchange, problem, wsgi
from semel.stores import MemoryStore, SQLiteStore, SQLStore, connect
from semel.values import State
from support.process import free_port
from support.threads import in_threads
from support.wsgi import TEXT, Serving, ask, environ_of, raised

MIB = 1024 * 1024


class App:
    """An app that counts, strictly watched; `answer(environ, start_response)` is its handler."""

    def __init__(self, answer):
        self.answer = answer
        self.runs = 0
        self.closed = 0
        self._watched = validator(self._run)

    def __call__(self, environ, start_response):
        return self._watched(environ, start_response)

    def _run(self, environ, start_response):
        self.runs += 1
        return Closing(self, self.answer(environ, start_response))


class Closing:
    """Counts how often it is closed."""

    def __init__(self, app, pieces):
        self._app = app
        self._pieces = pieces

    def __iter__(self):
        return iter(self._pieces)

    def close(self):
        self._app.closed += 1
        getattr(self._pieces, "close", lambda: None)()


def created(environ, start_response):
    start_response("201 Made To Measure", [TEXT, ("Location", "/orders/7")])
    return [b"order ", b"7"]


def door(app, *, strict=True, **options):
    options = {"scope": "shop", "store": MemoryStore()} | options
    made = WSGIMiddleware(app, **options)
    return validator(made) if strict else made


@pytest.fixture
def store():
    return MemoryStore()


def record(store):
    [found] = run(store.ledger(SYNC).records())
    return found


# --- untouched ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_of",
    [
        pytest.param({"key": None}, id="no key"),
        pytest.param({"method": "GET"}, id="another method"),
        pytest.param({"path": "/files/a/b"}, id="a route without a rule"),
    ],
)
def test_other_requests_are_handed_on_with_the_very_objects(request_of):
    seen = []

    def app(environ, start_response):
        seen.append((environ, start_response))
        return answer

    def start_response(status, headers, exc_info=None):
        raise AssertionError

    answer = [b"untouched"]
    environ = environ_of(b"body", **request_of)
    before = dict(environ)
    made = door(app, strict=False, routes={"/files/*": None})
    assert made(environ, start_response) is answer
    [(its_environ, its_start_response)] = seen
    assert its_environ is environ
    assert its_start_response is start_response
    assert environ == before
    assert environ["wsgi.input"].read() == b"body"


# --- once ---------------------------------------------------------------------------------------


def test_a_repeat_gets_the_same_bytes_and_runs_nothing(store):
    app = App(created)
    guarded = door(app, store=store)
    first, again = ask(guarded, b"{}"), ask(guarded, b"{}")
    assert (first.status, first.body, first.replayed) == (201, b"order 7", False)
    assert first.headers == [TEXT, ("Location", "/orders/7")]
    assert (again.status, again.body, again.replayed) == (201, b"order 7", True)
    assert again.headers[:2] == first.headers
    assert (app.runs, app.closed) == (1, 1)
    assert record(store).key.operation == "POST /orders"


def test_the_first_answer_keeps_its_own_status_line():
    lines = []

    def start_response(status, headers, exc_info=None):
        lines.append(status)

    guarded = door(created, strict=False)
    for _ in range(2):
        guarded(environ_of(), start_response).close()
    assert lines == ["201 Made To Measure", "201 Created"]


def test_a_status_that_nobody_knows_can_be_replayed():
    def answer(environ, start_response):
        start_response("299 Something", [TEXT])
        return [b"ok"]

    guarded = door(App(answer))
    assert [ask(guarded).status, ask(guarded).status] == [299, 299]


def test_an_empty_response_is_one():
    def answer(environ, start_response):
        start_response("204 No Content", [])
        return []

    app = App(answer)
    guarded = door(app)
    assert [(r.status, r.pieces) for r in (ask(guarded), ask(guarded))] == [(204, [])] * 2
    assert app.runs == 1


def test_a_server_can_tell_the_length_of_what_is_whole():
    guarded = door(App(created), strict=False)
    served = Serving(guarded, environ_of())
    assert len(served.iterable) == 1
    served.finish()


@pytest.mark.parametrize(
    "other", [{"body": b"5"}, {"path": "/refunds"}, {"QUERY_STRING": "a=1"}, {"method": "PATCH"}]
)
def test_another_request_with_the_key_is_refused(other):
    app = App(created)
    guarded = door(app)
    ask(guarded, b"4")
    answer = ask(guarded, **({"body": b"4"} | other))
    assert (answer.status, answer.problem, app.runs) == (422, "key-reused", 1)


def test_a_request_in_progress_is_answered_with_409():
    inner = []

    def answer(environ, start_response):
        if not inner:
            asked = threading.Thread(target=lambda: inner.append(ask(guarded)))
            inner.append(None)
            asked.start()
            asked.join()
        return created(environ, start_response)

    guarded = door(App(answer))
    assert ask(guarded).status == 201
    assert (inner[1].status, inner[1].problem) == (409, "in-progress")
    assert int(inner[1].header("retry-after")) >= 1


def test_tenants_are_apart():
    app = App(created)
    guarded = door(app, scope=lambda request: request.header("x-tenant"))
    assert not ask(guarded, HTTP_X_TENANT="a").replayed
    assert not ask(guarded, HTTP_X_TENANT="b").replayed
    assert ask(guarded, HTTP_X_TENANT="a").replayed


def test_a_scope_can_turn_a_caller_away():
    def scope(request):
        raise Refusal(Response(401, ((b"content-type", b"text/plain"),), b"who are you?"))

    app = App(created)
    answer = ask(door(app, scope=scope))
    assert (answer.status, answer.body, app.runs) == (401, b"who are you?", 0)


@pytest.mark.parametrize("tenant", [None, False, "", 0, {}, []], ids=repr)
def test_an_empty_tenant_is_refused_and_nothing_is_run(tenant):
    app = App(created)
    answer = ask(door(app, scope=lambda _: tenant))
    assert (answer.status, answer.problem, app.runs) == (403, "tenant-missing", 0)


def test_an_async_scope_is_refused():
    async def scope(request):
        return "shop"

    with pytest.raises(SettingsError, match="plain function"):
        ask(door(App(created), scope=scope))


def test_a_refusal_that_the_app_raises_is_the_servers_to_see():
    def answer(environ, start_response):
        raise Refusal(problem("key-missing", ""))

    with pytest.raises(Refusal):
        ask(door(App(answer)))


def test_a_required_key_is_asked_for():
    app = App(created)
    answer = ask(door(app, rule=Rule(key="required")), key=None)
    assert (answer.status, answer.problem, app.runs) == (400, "key-missing", 0)


@pytest.mark.parametrize("key", ["a,b", '"a", "b"', "", "ключ".encode().decode("latin-1")])
def test_a_key_that_is_no_string_is_refused(key):
    app = App(created)
    answer = ask(door(app), key=key)
    assert (answer.status, answer.problem, app.runs) == (400, "key-malformed", 0)


def test_a_mounted_app_is_known_by_its_whole_path(store):
    guarded = door(App(created), store=store, routes={"/shop/*": Rule(key="required")})
    assert ask(guarded, key=None, path="/orders").status == 201
    assert ask(guarded, key=None, SCRIPT_NAME="/shop").problem == "key-missing"
    ask(guarded, SCRIPT_NAME="/shop")
    assert record(store).key.operation == "POST /shop/orders"


@pytest.mark.parametrize(
    ("raw", "shown"), [("/café".encode(), "/café"), (b"/caf\xe9", "/caf\\xe9"), (b"", "/")]
)
def test_a_path_is_what_the_client_wrote(store, raw, shown):
    guarded = door(App(created), store=store, strict=False)
    path = raw.decode("latin-1")
    replies = [ask(guarded, path=path, SCRIPT_NAME="") for _ in range(2)]
    assert [reply.replayed for reply in replies] == [False, True]
    assert record(store).key.operation == f"POST {shown}"


def test_a_store_that_is_down_runs_nothing():
    app = App(created)
    with closing(connect(f"redis://127.0.0.1:{free_port()}/0")) as store:
        answer = ask(door(app, store=store))
        required = ask(door(app, store=store, rule=Rule(require=["process_crash"])))
    assert (answer.status, answer.problem, app.runs) == (503, "store-unavailable", 0)
    assert required.problem == "store-unavailable"


def test_a_store_that_promises_too_little_is_refused():
    app = App(created)
    with pytest.raises(SettingsError, match="the idempotency middleware"):
        ask(door(app, rule=Rule(require=["process_crash"])))
    assert app.runs == 0


def test_what_a_store_promises_is_asked_once(monkeypatch, tmp_path):
    asked = []

    async def asking(*about):
        asked.append(about)
        await require(*about)

    monkeypatch.setattr(exchange, "require", asking)
    with closing(SQLiteStore(tmp_path / "semel.db")) as store:
        guarded = door(App(created), store=store, rule=Rule(require=["process_crash"]))
        assert [ask(guarded).replayed, ask(guarded).replayed] == [False, True]
    assert len(asked) == 1


def test_a_store_of_the_other_colour_is_refused_where_the_door_is_made():
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(SettingsError, match="sync"):
        door(App(created), store=SQLStore(engine))


def test_a_scope_sees_the_head_of_the_request():
    seen = []

    def scope(request):
        seen.append((request.method, request.path, request.query, request.header("Content-Type")))
        seen.append((request.header("x-a"), request.header("x-b"), request.raw["PATH_INFO"]))
        return "shop"

    more = {"CONTENT_TYPE": "text/css", "HTTP_X_A": "caf\xe9", "QUERY_STRING": "q=1"}
    ask(door(App(created), scope=scope), **more)
    assert seen == [("POST", "/orders", b"q=1", "text/css"), ("caf\xe9", None, "/orders")]


def test_a_door_behind_a_door_does_nothing():
    app = App(created)
    guarded = door(door(app, strict=False, store=MemoryStore()))
    assert [ask(guarded).replayed, ask(guarded).replayed] == [False, True]
    assert app.runs == 1


# --- the body -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, MIB, 3 * MIB])
def test_the_app_reads_the_body_again(size):
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    seen = []

    def answer(environ, start_response):
        seen.append(environ["wsgi.input"].read(size + 10))
        return created(environ, start_response)

    guarded = door(App(answer), rule=Rule(max_body=4 * MIB))
    assert not ask(guarded, body).replayed
    assert ask(guarded, body).replayed
    assert ask(guarded, body + b"x").problem == "key-reused"
    assert seen == [body]


def test_a_body_in_a_file_is_let_go_before_it_is_answered():
    files = []

    def answer(environ, start_response):
        files.append(environ["wsgi.input"].input)
        return created(environ, start_response)

    guarded = door(App(answer), rule=Rule(max_body=4 * MIB))
    served = [Serving(guarded, environ_of(b"x" * 3 * MIB)) for _ in range(2)]
    assert files[0].closed
    for serving in served:
        serving.finish()


def test_a_stream_may_read_the_body_while_it_is_sent():
    def answer(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        yield from iter(lambda: environ["wsgi.input"].read(MIB), b"")

    body = bytes(range(256)) * 12 * 1024
    assert ask(door(App(answer), rule=Rule(max_body=4 * MIB)), body).body == body


def test_lines_can_be_read_as_well():
    seen = []

    def answer(environ, start_response):
        seen.extend([environ["wsgi.input"].readline(), *environ["wsgi.input"]])
        return created(environ, start_response)

    ask(door(App(answer)), b"a\nb\nc")
    assert seen == [b"a\n", b"b\n", b"c"]


def test_no_more_is_read_than_the_request_has():
    stream = io.BytesIO(b"bodyGET /next HTTP/1.1")
    ask(door(App(created)), b"body", **{"wsgi.input": stream})
    assert stream.read() == b"GET /next HTTP/1.1"


CHUNKED = {"CONTENT_LENGTH": None, "HTTP_TRANSFER_ENCODING": "chunked"}


def test_a_chunked_body_is_read_where_the_server_ends_it():
    guarded = door(App(created))
    ended = CHUNKED | {"wsgi.input_terminated": True}
    assert not ask(guarded, b"one", **ended).replayed
    assert ask(guarded, b"one", **ended).replayed
    assert ask(guarded, b"two", **ended).problem == "key-reused"


def test_a_chunked_body_has_no_other_length():
    guarded = door(App(created))
    ended = CHUNKED | {"wsgi.input_terminated": True, "CONTENT_LENGTH": "3"}
    assert not ask(guarded, b"one", **ended).replayed
    assert ask(guarded, b"onetwo", **ended).problem == "key-reused"


def test_a_chunked_body_without_an_end_is_refused():
    app = App(created)
    answer = ask(door(app), b"one", **CHUNKED)
    assert (answer.status, answer.problem, app.runs) == (400, "body-malformed", 0)


@pytest.mark.parametrize("length", ["9", "four", "-1", "\xb2"])
def test_a_body_of_another_length_than_it_says_is_refused(length, store):
    app = App(created)
    made = door(app, strict=False, store=store)
    answer = ask(made, b"body", CONTENT_LENGTH=length)
    assert (answer.status, answer.problem, app.runs) == (400, "body-malformed", 0)
    assert not run(store.ledger(SYNC).records())


@pytest.mark.parametrize("said", [{}, CHUNKED | {"wsgi.input_terminated": True}])
def test_a_body_that_is_too_large_is_refused(said):
    app = App(created)
    answer = ask(door(app, rule=Rule(max_body=10)), b"x" * 11, **said)
    assert (answer.status, answer.problem, app.runs) == (413, "body-too-large", 0)
    assert ask(door(app, rule=Rule(max_body=10)), b"x" * 10).status == 201


def test_a_body_that_says_that_it_is_too_large_is_not_read():
    stream = io.BytesIO(b"x" * 11)
    answer = ask(door(App(created), rule=Rule(max_body=10)), b"x" * 11, **{"wsgi.input": stream})
    assert (answer.status, stream.tell()) == (413, 0)


def test_a_body_in_a_file_that_is_refused_is_let_go():
    """What is left open is warned of, and a warning is an error here."""
    rule = Rule(fingerprint="json", max_body=4 * MIB)
    answer = ask(door(App(created), rule=rule), b"x" * 3 * MIB)
    assert (answer.status, answer.problem) == (400, "body-malformed")


# --- the response -------------------------------------------------------------------------------


def test_what_is_written_is_part_of_the_response():
    def answer(environ, start_response):
        write = start_response("200 OK", [TEXT])
        write(b"hello ")
        return [b"wor", b"", b"ld"]

    app = App(answer)
    guarded = door(app)
    assert [ask(guarded).body, ask(guarded).body] == [b"hello world"] * 2
    assert app.runs == 1


PIECE = 7 * 100_000


def numbered(size):
    return b"%06d\n" % size * (PIECE // 7)


def in_pieces(environ, start_response):
    start_response("200 OK", [TEXT, ("Content-Length", str(3 * PIECE))])
    for number in range(3):
        yield numbered(number)


def written(environ, start_response):
    write = start_response("200 OK", [TEXT])
    for number in range(3):
        write(numbered(number))
    return []


def half_written(environ, start_response):
    write = start_response("200 OK", [TEXT])
    write(numbered(0))
    write(numbered(1))
    return [numbered(2)]


@pytest.mark.parametrize("answer", [in_pieces, written, half_written])
def test_more_than_is_kept_arrives_whole_and_is_not_repeated(answer, store):
    app = App(answer)
    guarded = door(app, store=store)
    assert ask(guarded).body == numbered(0) + numbered(1) + numbered(2)
    again = ask(guarded)
    assert (again.status, again.problem) == (410, "response-not-kept")
    assert (app.runs, app.closed) == (1, 1)
    assert record(store).outcome.kind == "lost"
    assert record(store).outcome.status == 200


def test_as_much_as_is_kept_is_kept():
    def answer(environ, start_response):
        start_response("200 OK", [TEXT])
        return [b"x" * 5, b"y" * 5]

    guarded = door(App(answer), rule=Rule(max_response=10))
    assert [ask(guarded).body, ask(guarded).body] == [b"xxxxxyyyyy"] * 2


def events(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/event-stream; charset=utf-8")])
    for number in range(3):
        environ["test.made"].append(number)
        yield b"data: %d\n\n" % number


def eager_events(environ, start_response):
    """As Flask and Django do it: start_response first, then an iterable."""
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    return rest_of_events(environ)


def rest_of_events(environ):
    for number in range(3):
        environ["test.made"].append(number)
        yield b"data: %d\n\n" % number


@pytest.mark.parametrize("answer", [events, eager_events])
def test_a_stream_is_sent_while_it_is_made(answer, store):
    app, made = App(answer), []
    served = Serving(door(app, store=store), environ_of(**{"test.made": made}))
    assert record(store).state == State.PENDING  # recorded with the last byte
    assert next(served.pieces) == b"data: 0\n\n"
    assert made == [0]
    assert app.closed == 0
    served.reply.pieces.append(b"data: 0\n\n")
    assert served.finish().body == b"".join(b"data: %d\n\n" % n for n in range(3))
    assert record(store).outcome.kind == "lost"
    assert (app.runs, app.closed) == (1, 1)


def test_a_stream_is_not_repeated():
    app = App(events)
    guarded = door(app)
    ask(guarded, **{"test.made": []})
    assert ask(guarded).problem == "response-not-kept"
    assert app.runs == 1


def test_a_client_that_leaves_a_stream_closes_it():
    app = App(events)
    served = Serving(door(app, strict=False), environ_of(**{"test.made": []}))
    next(served.pieces)
    served.hang_up()
    assert app.closed == 1


def test_a_server_that_closes_twice_closes_once():
    app = App(created)
    served = Serving(door(app, strict=False), environ_of())
    served.finish()
    served.hang_up()
    assert app.closed == 1


def slowly(environ, start_response):
    start_response("200 OK", [TEXT])
    for number in range(3):
        environ["test.made"].append(number)
        yield b"%d" % number


def test_what_lingers_goes_out_with_its_next_piece():
    app, made = App(slowly), []
    guarded = door(app, rule=Rule(linger=0))
    served = Serving(guarded, environ_of(**{"test.made": made}))
    assert made == [0, 1]
    assert next(served.pieces) == b"01"
    served.reply.pieces.append(b"01")
    assert served.finish().body == b"012"
    assert ask(guarded).problem == "response-not-kept"
    assert (app.runs, app.closed) == (1, 1)


def test_what_says_its_length_may_linger():
    def answer(environ, start_response):
        start_response("200 OK", [TEXT, ("content-length", "3")])
        return [b"a", b"b", b"c"]

    guarded = door(App(answer), rule=Rule(linger=0))
    assert [ask(guarded).body, ask(guarded).body] == [b"abc"] * 2


def test_a_response_is_recorded_before_it_is_sent_and_closed_after(store):
    states = []

    class Watching:
        def __iter__(self):
            return iter([b"ok"])

        def close(self):
            states.append(record(store).state)

    def answer(environ, start_response):
        start_response("200 OK", [TEXT])
        return Watching()

    served = Serving(door(App(answer), store=store), environ_of())
    assert record(store).state == State.COMPLETED
    assert states == []
    served.finish()
    assert states == [State.COMPLETED]


def test_a_client_that_hangs_up_finds_the_response_waiting():
    app = App(created)
    guarded = door(app, strict=False)
    Serving(guarded, environ_of()).hang_up()
    assert ask(guarded).replayed
    assert (app.runs, app.closed) == (1, 1)


@pytest.mark.parametrize("status", ["404 Not Found", "405 Method Not Allowed"])
@pytest.mark.parametrize(
    ("stores", "runs"),
    [(None, 2), (lambda status: status < 500, 2), ((200, 404, 405), 1), ((200,), 2)],
)
def test_no_handler_is_recorded_only_where_it_is_named(status, stores, runs):
    def answer(environ, start_response):
        start_response(status, [TEXT])
        return [b"no"]

    app = App(answer)
    guarded = door(app, rule=Rule(stores=stores))
    assert [ask(guarded).body, ask(guarded).body] == [b"no", b"no"]
    assert app.runs == runs


@pytest.mark.parametrize("status", ["401 Unauthorized", "429 Too Many Requests"])
def test_who_was_not_let_in_may_try_again(status):
    def answer(environ, start_response):
        start_response(status, [TEXT])
        return [b"no"]

    app = App(answer)
    guarded = door(app)
    ask(guarded), ask(guarded)
    assert app.runs == 2


def test_cookies_are_sent_once_and_repeated_headers_are_kept():
    def answer(environ, start_response):
        links = [("Link", "</a>"), ("Link", "</b>")]
        start_response("200 OK", [TEXT, ("Set-Cookie", "a=1"), *links, ("X-Name", "caf\xe9")])
        return [b"ok"]

    guarded = door(App(answer))
    first, again = ask(guarded), ask(guarded)
    assert ("Set-Cookie", "a=1") in first.headers
    kept = [TEXT, ("Link", "</a>"), ("Link", "</b>"), ("X-Name", "caf\xe9")]
    assert again.headers == [*kept, ("idempotent-replayed", "true")]


# --- start_response, as PEP 3333 has it ---------------------------------------------------------


def test_an_app_may_change_its_mind_before_the_first_byte():
    def answer(environ, start_response):
        start_response("200 OK", [TEXT])
        yield b""
        start_response("202 Accepted", [TEXT, ("X-Second", "1")], raised(ValueError("late")))
        yield b"later"

    guarded = door(App(answer))
    for _ in range(2):
        reply = ask(guarded)
        assert (reply.status, reply.body, reply.header("x-second")) == (202, b"later", "1")


@pytest.mark.parametrize("answer_type", [TEXT, ("Content-Type", "text/event-stream")])
def test_after_the_first_byte_it_is_told_that_it_is_too_late(answer_type):
    def answer(environ, start_response):
        start_response("200 OK", [answer_type])
        yield b"half"
        start_response("500 Oh", [TEXT], raised(ValueError("late")))
        yield b"never"

    app = App(answer)
    with pytest.raises(ValueError, match="late"):
        ask(door(app, strict=False))
    assert app.closed == 1


def test_a_stream_may_change_its_mind_before_its_first_byte():
    def answer(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        yield b""
        start_response("202 Accepted", [TEXT], raised(ValueError("late")))
        yield b"later"

    reply = ask(door(App(answer), strict=False))
    assert (reply.status, reply.body) == (202, b"later")


def twice(environ, start_response):
    start_response("200 OK", [TEXT])
    start_response("200 OK", [TEXT])
    return [b"ok"]


def never(environ, start_response):
    return []


def too_late(environ, start_response):
    yield b"ok"
    start_response("200 OK", [TEXT])


def as_text(environ, start_response):
    start_response("200 OK", [TEXT])
    return ["ok"]


@pytest.mark.parametrize(
    ("app", "error"),
    [
        (twice, AssertionError),
        (never, AssertionError),
        (too_late, AssertionError),
        (as_text, TypeError),
    ],
)
def test_an_app_that_breaks_the_rules_is_told_and_records_nothing(app, error, store):
    with pytest.raises(error, match=r"start_response|answers with bytes"):
        ask(door(app, strict=False, store=store))
    assert record(store).state == State.FAILED


# --- errors -------------------------------------------------------------------------------------


class Failing:
    """Raises on the first run, in the app itself or while its iterable is read."""

    def __init__(self, error, where):
        self._error = error
        self._where = where
        self.app = App(self._answer)

    def _answer(self, environ, start_response):
        if self.app.runs > 1:
            return created(environ, start_response)
        if self._where == "app":
            raise self._error
        return self._pieces(start_response)

    def _pieces(self, start_response):
        start_response("200 OK", [TEXT])
        yield b"half"
        raise self._error


@pytest.mark.parametrize("where", ["app", "iterable"])
def test_an_error_is_the_servers_to_see_and_a_retry_runs(where, store):
    app = Failing(ZeroDivisionError("oops"), where).app
    guarded = door(app, store=store)
    with pytest.raises(ZeroDivisionError, match="oops"):
        ask(guarded)
    assert record(store).state == State.FAILED
    assert app.closed == (where == "iterable")
    assert (ask(guarded).body, app.runs) == (b"order 7", 2)


@pytest.mark.parametrize("where", ["app", "iterable"])
def test_a_stored_error_is_the_answer_from_now_on(where, caplog):
    app = Failing(ZeroDivisionError("oops"), where).app
    guarded = door(app, rule=Rule(on_error="store"))
    with caplog.at_level(logging.ERROR, "semel"):
        first = ask(guarded)
    assert "oops" in caplog.text
    assert (first.status, first.problem) == (500, "interrupted")
    assert ask(guarded).replayed
    assert (app.runs, app.closed) == (1, where == "iterable")


@pytest.mark.parametrize("where", ["app", "iterable"])
@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), GeneratorExit()])
def test_what_is_held_is_not_repeated(where, error):
    app = Failing(error, where).app
    guarded = door(app, rule=Rule(on_error="hold"))
    with pytest.raises(type(error)):
        ask(guarded)
    assert ask(guarded).problem == "outcome-unknown"
    assert (app.runs, app.closed) == (1, where == "iterable")


@pytest.mark.parametrize("where", ["app", "iterable"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), SystemExit()])
def test_who_is_interrupted_gives_its_claim_up_at_once(where, error, store):
    app = Failing(error, where).app
    guarded = door(app, store=store)
    with pytest.raises(type(error)):
        ask(guarded)
    assert record(store).state == State.FAILED
    assert (ask(guarded).status, app.runs) == (201, 2)


@pytest.mark.parametrize(
    ("on_error", "status", "runs"), [("release", 500, 2), ("store", 500, 1), ("hold", 409, 1)]
)
def test_a_500_is_what_the_rule_says(on_error, status, runs):
    def answer(environ, start_response):
        start_response("500 Oh", [TEXT])
        return [b"sorry"]

    app = App(answer)
    guarded = door(app, rule=Rule(on_error=on_error))
    assert ask(guarded).body == b"sorry"
    assert ask(guarded).status == status
    assert app.runs == runs


def test_an_error_of_close_comes_after_the_record():
    class Clumsy:
        def __iter__(self):
            return iter([b"ok"])

        def close(self):
            raise OSError("close")

    def app(environ, start_response):
        start_response("200 OK", [TEXT])
        return Clumsy()

    guarded = door(app, strict=False)
    with pytest.raises(OSError, match="close"):
        ask(guarded)
    assert ask(guarded).replayed


# --- the attempt --------------------------------------------------------------------------------


def test_the_attempt_is_there_while_the_app_runs_and_is_read():
    seen = []

    def answer(environ, start_response):
        seen.append((semel.current().key, attempt_of(environ) is semel.current()))
        start_response("200 OK", [TEXT])
        return pieces()

    def pieces():
        for _ in range(2):
            seen.append(semel.current().child_key("bank"))
            yield b"ok"

    ask(door(App(answer)), key='"k"')
    assert seen[0] == ("k", True)
    assert seen[1] == seen[2]
    assert CURRENT.get() is None


def test_the_attempt_is_there_while_a_stream_is_read():
    seen = []

    def answer(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/event-stream")])
        for _ in range(3):
            seen.append(semel.current().key)
            yield b"ok"

    served = Serving(door(App(answer)), environ_of())
    for piece in served.pieces:
        assert CURRENT.get() is None
        served.reply.pieces.append(piece)
    served.finish()
    assert seen == ["k"] * 3


def test_without_a_key_there_is_no_attempt():
    seen = []

    def answer(environ, start_response):
        seen.append(attempt_of(environ))
        return created(environ, start_response)

    ask(door(App(answer)), key=None)
    assert seen == [None]


def test_a_step_is_taken_once_over_two_tries():
    sent = []

    def answer(environ, start_response):
        semel.step("charge", sent.append, 40)
        if semel.current().number == 1:
            raise ConnectionError
        return created(environ, start_response)

    guarded = door(App(answer))
    with pytest.raises(ConnectionError):
        ask(guarded)
    assert ask(guarded).status == 201
    assert sent == [40]


def test_who_is_cut_off_before_its_app_runs_keeps_no_lease(monkeypatch):
    seen = []

    def cut(self, app):
        seen.append(semel.current())
        raise KeyboardInterrupt

    monkeypatch.setattr(wsgi.Conversation, "_run", cut)
    with pytest.raises(KeyboardInterrupt):
        ask(door(App(created), strict=False))
    assert not seen[0]._active


class Overtaken:
    """In its first run, its claim is taken away and another request is answered meanwhile."""

    def __init__(self, first):
        self.store = MemoryStore()
        self.first = first
        self.app = App(self._answer)
        self.door = door(self.app, store=self.store)
        self.winners = None

    def _answer(self, environ, start_response):
        if self.app.runs > 1:
            return created(environ, start_response)
        return self.first(self.overtake, start_response)

    def overtake(self):
        run(self.store.ledger(SYNC).forget(record(self.store).key.id, force=True))
        other = threading.Thread(target=self._win)
        other.start()
        other.join()

    def _win(self):
        self.winners = ask(self.door)


def losing_whole(overtake, start_response):
    start_response("200 OK", [TEXT])
    overtake()
    return [b"mine"]


def losing_stream(overtake, start_response):
    overtake()
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    return [b"mine"]


def losing_lazy_stream(overtake, start_response):
    overtake()
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    yield b"mine"
    yield b"mine"


def losing_twice(overtake, start_response):
    overtake()
    start_response("200 OK", [("Content-Type", "text/event-stream")])
    late = raised(ValueError("late"))
    start_response("202 Accepted", [("Content-Type", "text/event-stream")], late)
    return [b"mine"]


def losing_large(overtake, start_response):
    start_response("200 OK", [TEXT])
    overtake()
    yield numbered(0)
    yield numbered(1)
    yield numbered(2)


def losing_written(overtake, start_response):
    write = start_response("200 OK", [TEXT])
    overtake()
    write(numbered(0))
    write(numbered(1))
    write(numbered(2))
    return [b"mine"]


@pytest.mark.parametrize(
    "first",
    [losing_whole, losing_stream, losing_twice, losing_lazy_stream, losing_large, losing_written],
)
def test_who_was_overtaken_answers_what_is_recorded(first):
    overtaken = Overtaken(first)
    reply = ask(overtaken.door)
    assert overtaken.winners.status == 201
    assert (reply.status, reply.body, reply.replayed) == (201, b"order 7", True)
    assert (overtaken.app.runs, overtaken.app.closed) == (2, 2)


# --- real servers -------------------------------------------------------------------------------


class ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128


class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass


def wsgiref_server(app):
    return make_server("127.0.0.1", 0, app, ThreadingServer, Quiet)


def werkzeug_server(app):
    logging.getLogger("werkzeug").setLevel(logging.ERROR)

    def strictly(environ, start_response):
        environ["REMOTE_PORT"] = str(environ["REMOTE_PORT"])  # an int, which PEP 3333 knows not
        return app(environ, start_response)

    return make_werkzeug_server("127.0.0.1", 0, strictly, threaded=True)


@contextmanager
def served(make, app):
    server = make(app)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def post(port, body=b"{}", *, path="/orders", headers=(), **options):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("POST", path, body, {"Idempotency-Key": '"k"', **dict(headers)}, **options)
        answer = line.getresponse()
        return answer.status, answer.read(), answer.getheader("Idempotent-Replayed")
    finally:
        line.close()


SERVERS = pytest.mark.parametrize("make", [wsgiref_server, werkzeug_server])


class Crowd:
    """Lets its app answer when this many requests have come."""

    def __init__(self, count, app):
        self._app = app
        self._missing = iter(range(count - 1, -1, -1))
        self._all_here = threading.Event()

    def __call__(self, environ, start_response):
        if next(self._missing) == 0:
            self._all_here.set()
        return self._app(environ, start_response)

    def wait(self):
        assert self._all_here.wait(30)


@SERVERS
def test_fifty_at_once_are_one_execution(make):
    def answer(environ, start_response):
        crowd.wait()
        return created(environ, start_response)

    app = App(answer)
    crowd = Crowd(50, door(app, rule=Rule(wait=30)))
    with served(make, crowd) as port:
        replies = in_threads(lambda: post(port), 50)
    assert {(status, body) for status, body, _ in replies} == {(201, b"order 7")}
    assert sorted(replayed or "" for *_, replayed in replies) == [""] + ["true"] * 49
    assert (app.runs, app.closed) == (1, 1)


@SERVERS
def test_fifty_at_once_that_do_not_wait_are_one_execution(make):
    held, go_on = threading.Event(), threading.Event()

    def answer(environ, start_response):
        held.set()
        go_on.wait(30)
        return created(environ, start_response)

    app = App(answer)
    with served(make, door(app)) as port:
        first = threading.Thread(target=post, args=(port,))
        first.start()
        held.wait(30)
        statuses = [status for status, *_ in in_threads(lambda: post(port), 50)]
        go_on.set()
        first.join()
        assert post(port) == (201, b"order 7", "true")
    assert statuses == [409] * 50
    assert app.runs == 1


@SERVERS
def test_a_large_response_arrives_whole_over_the_line(make):
    app = App(in_pieces)
    with served(make, door(app)) as port:
        assert post(port)[:2] == (200, numbered(0) + numbered(1) + numbered(2))
        assert post(port)[0] == 410
    assert (app.runs, app.closed) == (1, 1)


@SERVERS
def test_a_client_that_hung_up_gets_its_response_later(make):
    held, go_on = threading.Event(), threading.Event()

    def answer(environ, start_response):
        held.set()
        go_on.wait(30)
        return created(environ, start_response)

    app = App(answer)
    head = (
        b'POST /orders HTTP/1.1\r\nHost: a\r\nIdempotency-Key: "k"\r\nContent-Length: 2\r\n\r\n{}'
    )
    with served(make, door(app, rule=Rule(wait=30))) as port:
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(head)
            held.wait(30)
        go_on.set()
        assert post(port, headers={"Content-Type": ""}) == (201, b"order 7", "true")
    assert app.runs == 1


def test_a_body_in_chunks_over_the_line():
    app = App(created)

    def chunks(*pieces):
        return {"body": iter(pieces), "encode_chunked": True}

    with served(werkzeug_server, door(app)) as port:
        headers = {"Transfer-Encoding": "chunked"}
        assert post(port, **chunks(b"one", b"two"), headers=headers)[0] == 201
        assert post(port, **chunks(b"onet", b"wo"), headers=headers)[2] == "true"
        assert post(port, **chunks(b"onetwo", b"!"), headers=headers)[0] == 422
    assert app.runs == 1


def test_escaped_slash_sent_to_a_real_server_is_another_path():
    app = App(created)
    with served(werkzeug_server, door(app)) as port:
        assert post(port, path="/orders/a%2Fb")[0] == 201
        assert post(port, path="/orders/a/b")[0] == 422
        assert post(port, path="/orders/a%2fb")[2] == "true"
    assert app.runs == 1


@SERVERS
def test_a_key_that_is_sent_twice_is_refused(make):
    app = App(created)
    with served(make, door(app)) as port:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        line.putrequest("POST", "/orders")
        line.putheader("Idempotency-Key", "a")
        line.putheader("Idempotency-Key", "b")
        line.putheader("Content-Length", "0")
        line.endheaders()
        answer = line.getresponse()
        assert (answer.status, json.load(answer)["title"]) == (400, "Idempotency-Key is malformed")
        line.close()
    assert app.runs == 0
