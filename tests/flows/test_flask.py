"""Flask behind the WSGI door: its responses, its errors, its contexts, and rows in one commit."""

from __future__ import annotations

import http.client
import io
import json
import threading
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from flask import Flask, Response, abort, request, session, stream_with_context
from sqlalchemy import event, orm
from werkzeug.datastructures import FileStorage
from werkzeug.serving import make_server
from werkzeug.test import encode_multipart

import semel
from semel.colour import SYNC, run
from semel.errors import SettingsError
from semel.http import Rule, WSGIMiddleware, attempt_of
from semel.stores import MemoryStore, SQLiteStore, SQLStore
from semel.values import State
from support.threads import in_threads

KEY = {"Idempotency-Key": '"k"'}


def guarded(app, **options):
    options = {"scope": "shop", "store": MemoryStore()} | options
    app.wsgi_app = WSGIMiddleware(app.wsgi_app, **options)
    return app.test_client()


@pytest.fixture
def app():
    app = Flask("shop")
    app.secret_key = "secret"
    app.runs = []
    return app


def records(store):
    return run(store.ledger(SYNC).records())


# --- responses ----------------------------------------------------------------------------------


def test_a_repeat_is_the_first_answer_to_the_byte(app):
    @app.post("/orders")
    def order():
        app.runs.append(request.get_json())
        session["cart"] = "empty"
        return {"order": 7}, 201, {"Location": "/orders/7"}

    client = guarded(app)
    first = client.post("/orders", json={"a": 1}, headers=KEY)
    again = app.test_client().post("/orders", json={"a": 1}, headers=KEY)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.data == again.data
    assert again.headers["Location"] == "/orders/7"
    assert again.headers["Content-Length"] == str(len(first.data))
    assert again.headers["Idempotent-Replayed"] == "true"
    assert "Set-Cookie" in first.headers
    assert "Set-Cookie" not in again.headers
    assert app.runs == [{"a": 1}]


def test_a_form_with_a_file_is_read_again(app):
    @app.post("/upload")
    def upload():
        app.runs.append((request.form["name"], request.files["file"].read()))
        return "ok"

    content = bytes(range(256)) * 12_000  # 3 MB: larger than what is kept in memory
    form = {"name": "a", "file": FileStorage(io.BytesIO(content), "a.bin")}
    boundary, body = encode_multipart(form, boundary="b")
    client = guarded(app, rule=Rule(max_body=4_000_000))
    for _ in range(2):
        kind = f"multipart/form-data; boundary={boundary}"
        assert client.post("/upload", data=body, content_type=kind, headers=KEY).data == b"ok"
    assert app.runs == [("a", content)]


def test_a_response_that_is_generated_in_its_context_is_replayed(app):
    @app.post("/report")
    def report():
        @stream_with_context
        def lines():
            for number in range(3):
                app.runs.append(semel.current().key)
                yield f"{request.args['name']} {number}\n"

        return Response(lines(), mimetype="text/plain")

    client = guarded(app)
    first = client.post("/report?name=a", headers=KEY)
    again = client.post("/report?name=a", headers=KEY)
    assert first.data == again.data == b"a 0\na 1\na 2\n"
    assert app.runs == ["k"] * 3


def test_a_large_file_arrives_whole(app, tmp_path):
    (tmp_path / "large").write_bytes(b"0123456789" * 300_000)

    @app.post("/export")
    def export():
        app.runs.append(1)
        return app.send_static_file("large")

    app.static_folder = str(tmp_path)
    client = guarded(app)
    with client.post("/export", headers=KEY) as answer:
        assert answer.data == b"0123456789" * 300_000
    assert client.post("/export", headers=KEY).status_code == 410
    assert app.runs == [1]


def test_events_are_sent_while_they_are_made(app):
    @app.post("/events")
    def events():
        def made():
            for number in range(3):
                app.runs.append(number)
                yield f"data: {number}\n\n"

        return Response(made(), mimetype="text/event-stream")

    client = guarded(app)
    with client.post("/events", headers=KEY, buffered=False) as answer:
        assert next(answer.iter_encoded()) == b"data: 0\n\n"
        assert app.runs == [0]
    assert client.post("/events", headers=KEY).status_code == 410


def test_what_is_to_come_after_the_response_comes_after_it(app):
    @app.post("/orders")
    def order():
        answer = app.make_response("ok")
        answer.call_on_close(lambda: app.runs.append("after"))
        return answer

    client = guarded(app)
    with client.post("/orders", headers=KEY) as answer:
        assert (answer.data, app.runs) == (b"ok", [])
    assert app.runs == ["after"]


# --- errors -------------------------------------------------------------------------------------


def test_an_error_in_a_view_lets_a_retry_run(app):
    @app.post("/orders")
    def order():
        app.runs.append(1)
        if len(app.runs) == 1:
            raise ZeroDivisionError
        return "ok"

    client = guarded(app)
    assert client.post("/orders", headers=KEY).status_code == 500
    assert client.post("/orders", headers=KEY).data == b"ok"
    assert client.post("/orders", headers=KEY).headers["Idempotent-Replayed"] == "true"


def test_an_error_that_flask_lets_through_is_seen_outside(app):
    app.testing = True

    @app.post("/orders")
    def order():
        raise ZeroDivisionError

    store = MemoryStore()
    client = guarded(app, store=store)
    with pytest.raises(ZeroDivisionError):
        client.post("/orders", headers=KEY)
    assert records(store)[0].state == State.FAILED


def test_a_refused_request_is_recorded_and_one_nobody_took_is_not(app):
    @app.post("/orders")
    def order():
        app.runs.append(1)
        abort(422 if request.args else 404)

    client = guarded(app)
    refused = {"Idempotency-Key": '"refused"'}
    for _ in range(2):
        assert client.post("/orders?a", headers=refused).status_code == 422
        assert client.post("/orders", headers=KEY).status_code == 404
        assert client.post("/nowhere", headers={"Idempotency-Key": "x"}).status_code == 404
    assert len(app.runs) == 3


def test_the_attempt_is_there_in_a_view(app):
    @app.post("/orders")
    def order():
        attempt = attempt_of(request)
        if attempt is None:
            return "no key"
        assert attempt is semel.current()
        return f"{attempt.tenant} {attempt.key} {attempt.number}"

    client = guarded(app)
    assert client.post("/orders", headers=KEY).text == "shop k 1"
    assert client.post("/orders").text == "no key"


# --- a real server ------------------------------------------------------------------------------


@contextmanager
def served(app):
    server = make_server("127.0.0.1", 0, app, threaded=True)
    server.log_startup = server.log = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def post(port, path):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        line.request("POST", path, b"{}", {**KEY, "Content-Type": "application/json"})
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def test_fifty_at_once_are_one_execution(app, tmp_path):
    @app.post("/orders")
    def order():
        app.runs.append(1)
        return {"order": len(app.runs)}, 201

    store = SQLiteStore(tmp_path / "semel.db")
    guarded(app, store=store, rule=Rule(wait=30))
    with served(app) as port:
        replies = in_threads(lambda: post(port, "/orders"), 50)
    store.close()
    assert {status for status, _ in replies} == {201}
    assert {json.loads(body)["order"] for _, body in replies} == {1}
    assert app.runs == [1]


# --- rows and record in one commit --------------------------------------------------------------


class Base(orm.DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    amount: orm.Mapped[int] = orm.mapped_column(unique=True)


class Shop:
    """A database with orders, and what is done to it."""

    def __init__(self, path):
        self.engine = sa.create_engine(f"sqlite:///{path}")
        Base.metadata.create_all(self.engine)
        self.store = SQLStore(self.engine, create=True)
        self.told = []
        event.listen(self.engine, "before_cursor_execute", self._executed)
        event.listen(self.engine, "commit", lambda line: self.told.append((id(line), "COMMIT")))

    def _executed(self, line, _cursor, statement, *_):
        self.told.append((id(line), statement.split("(")[0].strip()))

    def amounts(self):
        with orm.Session(self.engine) as session:
            return list(session.scalars(sa.select(Order.amount)))

    def transaction(self):
        """What was done in the transaction that made the orders, from its first row to the end."""
        [line] = {line for line, said in self.told if "INSERT INTO orders" in said}
        words = [said.split()[0] for one, said in self.told if one == line]
        return words[words.index("INSERT") :]


@pytest.fixture
def shop(tmp_path):
    shop = Shop(tmp_path / "shop.db")
    yield shop
    shop.store.close()
    shop.engine.dispose()


@pytest.fixture
def client(app, shop):
    """`/orders` makes an order of ?amount, and answers ?status or raises."""
    app.testing = True

    @app.post("/orders")
    def order():
        app.runs.append(1)
        made = orm.Session(shop.engine)
        attempt_of(request).bind(made)
        made.add(Order(amount=request.args["amount"]))
        made.flush()
        if request.args["status"] == "raise":
            raise ZeroDivisionError
        return f"made {request.args['amount']}", int(request.args["status"])

    return guarded(app, store=shop.store)


def test_rows_and_record_are_one_commit(app, client, shop):
    first = client.post("/orders?amount=40&status=201", headers=KEY)
    assert shop.transaction() == ["INSERT", "UPDATE", "COMMIT"]
    assert shop.amounts() == [40]
    again = client.post("/orders?amount=40&status=201", headers=KEY)
    assert (first.data, again.data) == (b"made 40", b"made 40")
    assert again.headers["Idempotent-Replayed"] == "true"
    assert (app.runs, shop.amounts()) == ([1], [40])


def test_rows_of_a_refusal_are_taken_back_and_it_is_recorded(app, client, shop):
    for _ in range(2):
        assert client.post("/orders?amount=40&status=422", headers=KEY).status_code == 422
    assert (app.runs, shop.amounts()) == ([1], [])


@pytest.mark.parametrize("status", ["500", "404"])
def test_rows_of_what_is_not_recorded_are_taken_back(app, client, shop, status):
    for _ in range(2):
        answer = client.post(f"/orders?amount=40&status={status}", headers=KEY)
        assert answer.status_code == int(status)
    assert (app.runs, shop.amounts()) == ([1, 1], [])


def test_rows_of_a_view_that_raised_are_taken_back(app, client, shop):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            client.post("/orders?amount=40&status=raise", headers=KEY)
    assert (app.runs, shop.amounts()) == ([1, 1], [])


def test_rows_that_cannot_be_committed_are_the_views_error(app, client, shop):
    assert client.post("/orders?amount=40&status=201", headers=KEY).status_code == 201
    with pytest.raises(sa.exc.IntegrityError):
        client.post("/orders?amount=40&status=201", headers={"Idempotency-Key": "other"})
    assert shop.amounts() == [40]


def test_a_session_that_is_closed_with_the_context_is_told_of(app, shop):
    """As extensions do it: one session per context, closed before anybody has read the response."""
    app.testing = True
    current = orm.scoped_session(orm.sessionmaker(shop.engine))
    app.teardown_appcontext(lambda _error: current.remove())

    @app.post("/orders")
    def order():
        attempt_of(request).bind(current)
        current.add(Order(amount=40))
        return "made", 201

    client = guarded(app, store=shop.store)
    with pytest.raises(SettingsError, match="ended before the response"):
        client.post("/orders", headers=KEY)
    assert shop.amounts() == []
    assert records(shop.store)[0].state == State.FAILED
