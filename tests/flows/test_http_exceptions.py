"""`add_exception_handlers`: errors of Semel as problem documents, on FastAPI and Starlette."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import asdict, dataclass

import httpx
import pytest
import sqlalchemy as sa
from fastapi import Depends, FastAPI, Header, WebSocket
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from starlette.applications import Starlette
from starlette.routing import Route

import semel
from semel import errors
from semel.http import IdempotencyMiddleware, Rule
from semel.http.fastapi import (
    Idempotency,
    IdempotentRoute,
    add_exception_handlers,
    exception_handlers,
)
from semel.http.sqlalchemy import IdempotencyRecord, SqlAlchemyIdempotency, hash_request
from semel.stores import MemoryStore
from semel.stores.sql import init
from semel.stores.sql.lines import parse, with_driver

pytestmark = pytest.mark.timeout(60)


async def post(app, path="/", **request):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return await client.post(path, **request)


def name(response):
    assert response.headers["content-type"] == "application/problem+json"
    said = response.json()
    assert said["status"] == response.status_code
    return said["type"].removeprefix("urn:semel:problem:")


def fastapi_app(endpoint):
    app = FastAPI()
    add_exception_handlers(app)
    app.add_api_route("/", endpoint, methods=["POST"])
    return app


def starlette_app(endpoint):
    app = starlette_mapped(endpoint)
    app.exception_handlers.clear()
    add_exception_handlers(app)
    return app


def starlette_mapped(endpoint):
    async def called(_request):
        return JSONResponse(await endpoint())

    routes = [Route("/", called, methods=["POST"])]
    return Starlette(routes=routes, exception_handlers=exception_handlers)


@pytest.fixture(params=[fastapi_app, starlette_app, starlette_mapped])
def make_app(request):
    return request.param


def raising(error):
    async def endpoint():
        raise error

    return endpoint


# --- each error ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "problem", "retry_after"),
    [
        (errors.InProgressError("sesame", retry_after=20.0), 409, "in-progress", "1"),
        (errors.ClaimLostError("sesame"), 409, "in-progress", "1"),
        (errors.DuplicateExecutionError("sesame", result=7), 409, "duplicate", None),
        (errors.IdempotencyConflictError("sesame"), 422, "key-reused", None),
        (errors.OutcomeUnknownError("sesame"), 409, "outcome-unknown", None),
        (errors.ResultLostError("sesame"), 410, "response-not-kept", None),
        (errors.StoreUnavailableError("sesame"), 503, "store-unavailable", "1"),
        (errors.CorruptRecordError("sesame"), 503, "store-unavailable", "1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
async def test_error_in_endpoint_becomes_problem_document(
    make_app, error, status, problem, retry_after
):
    response = await post(make_app(raising(error)))
    assert (response.status_code, name(response)) == (status, problem)
    assert response.headers.get("retry-after") == retry_after
    assert "sesame" not in response.text


async def test_effect_that_could_not_be_recorded_is_not_called_undone(make_app):
    error = errors.StoreUnavailableError("down", happened=True, result=7)
    response = await post(make_app(raising(error)))
    assert response.status_code == 503
    assert "took effect" in response.json()["detail"]
    assert "retry-after" not in response.headers


@pytest.mark.parametrize("kind", [errors.SettingsError, errors.ReplayedError, RuntimeError])
async def test_error_of_the_server_stays_a_500(make_app, kind):
    response = await post(make_app(raising(kind("wrong"))))
    assert (response.status_code, response.text) == (500, "Internal Server Error")


async def test_browser_script_can_read_retry_after(make_app):
    app = make_app(raising(errors.InProgressError("running")))
    response = await post(app, headers={"origin": "https://shop.example"})
    assert "Retry-After" in response.headers["access-control-expose-headers"]


@pytest.mark.parametrize("happened", [False, True])
async def test_refusal_that_people_must_look_into_is_logged(make_app, caplog, happened):
    await post(make_app(raising(errors.StoreUnavailableError("disk full", happened=happened))))
    assert "disk full" in caplog.text


async def test_handler_of_the_application_stays():
    app = FastAPI(exception_handlers={errors.InProgressError: lambda *_: JSONResponse({}, 425)})
    add_exception_handlers(app)
    app.add_api_route("/", raising(errors.InProgressError("running")), methods=["POST"])
    assert (await post(app)).status_code == 425


async def test_error_in_websocket_endpoint_is_still_raised():
    app = FastAPI()
    add_exception_handlers(app)

    @app.websocket("/live")
    async def live(_: WebSocket):
        raise errors.InProgressError("running")

    async def receive():
        return {"type": "websocket.connect"}

    async def send(_message):
        pass

    scope = {"type": "websocket", "path": "/live", "headers": [], "query_string": b""}
    with pytest.raises(errors.InProgressError):
        await app(scope, receive, send)


def test_starlette_form_does_not_import_fastapi():
    code = (
        "import sys; import semel.http.starlette; "
        "assert 'starlette' in sys.modules and 'fastapi' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- with guards and middlewares ----------------------------------------------------------------


async def test_guarded_function_in_progress_gives_409_and_the_result_later(make_app):
    running, finish = asyncio.Event(), asyncio.Event()

    @semel.idempotent(key="charge", store=MemoryStore(), on_duplicate="raise")
    async def charge():
        running.set()
        await finish.wait()

    app = make_app(charge)
    first = asyncio.ensure_future(post(app))
    await running.wait()
    assert name(await post(app)) == "in-progress"
    finish.set()
    assert (await first).status_code == 200
    assert name(await post(app)) == "duplicate"


def guarded_by_middleware(endpoint, rule):
    app = fastapi_app(endpoint)
    app.add_middleware(IdempotencyMiddleware, store=MemoryStore(), scope="shop", rule=rule)
    return app


def guarded_by_route(endpoint, rule):
    app = FastAPI()
    add_exception_handlers(app)
    app.router.route_class = IdempotentRoute
    idempotency = Idempotency(store=MemoryStore(), scope="shop", rule=rule)
    app.post("/", dependencies=[Depends(idempotency)])(endpoint)
    return app


@pytest.fixture(params=[guarded_by_middleware, guarded_by_route])
def guarded(request):
    return request.param


KEY = {"idempotency-key": "k"}


def failing_once(error):
    left = [error]

    async def endpoint():
        if left:
            raise left.pop()
        return "done"

    return endpoint


async def test_problem_of_a_handler_is_not_recorded_under_the_request_key(guarded):
    app = guarded(failing_once(errors.InProgressError("running")), Rule())
    assert name(await post(app, headers=KEY)) == "in-progress"
    again = await post(app, headers=KEY)
    assert (again.status_code, again.json()) == (200, "done")


async def test_problem_of_a_handler_is_held_where_exceptions_are(guarded):
    app = guarded(failing_once(errors.StoreUnavailableError("down")), Rule(on_error="hold"))
    assert name(await post(app, headers=KEY)) == "store-unavailable"
    assert name(await post(app, headers=KEY)) == "outcome-unknown"


async def test_response_after_a_problem_of_an_earlier_try_is_recorded():
    """A middleware between the two calls the application again after a 409."""
    app, effects = FastAPI(), []
    add_exception_handlers(app)
    fails = [errors.InProgressError("running")]

    @app.post("/", status_code=201)
    async def endpoint():
        effects.append(1)
        if fails:
            raise fails.pop()
        return len(effects)

    async def again(scope, receive, send):
        sent = []

        async def keep(message):
            sent.append(message)

        await app(scope, receive, keep)
        if sent[0].get("status") == 409:
            sent.clear()
            await app(scope, receive, keep)
        for message in sent:
            await send(message)

    outer = IdempotencyMiddleware(again, store=MemoryStore(), scope="shop")
    assert (await post(outer, headers=KEY)).status_code == 201
    repeat = await post(outer, headers=KEY)
    assert (repeat.status_code, repeat.json(), len(effects)) == (201, 2, 2)


@pytest.mark.parametrize("on_error", ["release", "store", "hold"])
async def test_response_that_lock_has_found_is_no_failure_of_the_handler(guarded, on_error):
    found = IdempotencyRecord(response={"order": 1}, status_code=201)
    error = errors.DuplicateExecutionError("done", result=found)
    app = guarded(raising(error), Rule(on_error=on_error))
    for _ in range(2):
        response = await post(app, headers=KEY)
        assert (response.status_code, response.json()) == (201, {"order": 1})


@dataclass
class Payment:
    status_code: int
    response: str


async def test_result_of_a_guard_with_a_status_code_is_not_sent_as_a_response(make_app):
    @semel.idempotent(key="charge", store=MemoryStore(), on_duplicate="raise")
    async def charge():
        return Payment(201, "secret")

    async def endpoint():
        await charge()
        return "charged"

    app = make_app(endpoint)
    assert (await post(app)).status_code == 200
    again = await post(app)
    assert name(again) == "duplicate"
    assert "secret" not in again.text


@pytest.mark.parametrize(
    "error",
    [
        errors.InProgressError("running"),
        errors.IdempotencyConflictError("other"),
        errors.StoreUnavailableError("down"),
    ],
)
async def test_problem_of_a_guarded_call_says_nothing_of_the_request(make_app, error):
    """The endpoint has no key of the request, and may have done something before the call."""
    said = (await post(make_app(raising(error)))).json()
    for word in ("Idempotency-Key", "request", "method", "othing was done", "was not done"):
        assert word not in said["title"] + said["detail"]


# --- the usual handler, step by step, without an `except` of its own ------------------------------


class CreateOrderCommand(BaseModel):
    amount: int


@dataclass
class Order:
    amount: int
    number: int

    def to_dict(self):
        return asdict(self)


class Handler:
    """The business logic; a test replaces `before`."""

    executed = 0

    async def before(self):
        pass

    async def execute(self, command):
        await self.before()
        self.executed += 1
        return Order(command.amount, self.executed)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request, tmp_path):
    if request.param == "sqlite":
        init(url := f"sqlite:///{tmp_path}/shop.db")
        return url
    return request.getfixturevalue("postgres_tables_url")


@pytest.fixture
async def engine(url):
    engine = create_async_engine(with_driver(parse(url), "async"))
    yield engine
    await engine.dispose()


@pytest.fixture
def handler():
    return Handler()


@pytest.fixture
def orders(engine, handler):
    app = FastAPI()
    add_exception_handlers(app)

    async def get_session():
        async with AsyncSession(engine) as session:
            yield session

    @app.post("/orders", status_code=201)
    async def create_order(
        command: CreateOrderCommand,
        idempotency_key: str | None = Header(None, alias="Idempotency-Key"),  # noqa: FAST002
        session: AsyncSession = Depends(get_session),  # noqa: B008, FAST002 - as people write it
    ):
        if not idempotency_key:
            return await handler.execute(command)

        idempotency = SqlAlchemyIdempotency(session)

        cached = await idempotency.get_response(idempotency_key)
        if cached:
            return JSONResponse(
                content=cached.response,
                status_code=cached.status_code,
            )

        await idempotency.lock(
            idempotency_key=idempotency_key,
            operation="CreateOrder",
            request_hash=hash_request(command),
        )

        try:
            result = await handler.execute(command)

            await idempotency.store_response(
                idempotency_key=idempotency_key,
                response=result.to_dict(),
                status_code=201,
            )
            await session.commit()

            return result

        except Exception:
            await idempotency.mark_failed(idempotency_key)
            await session.commit()
            raise

    return app


def order(app, amount=40, key="order-1"):
    headers = {} if key is None else {"Idempotency-Key": key}
    return post(app, "/orders", json={"amount": amount}, headers=headers)


async def test_repeat_gets_the_first_response_with_its_status(orders, handler):
    first, again = await order(orders), await order(orders)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json() == again.json() == {"amount": 40, "number": 1}
    assert handler.executed == 1


async def test_requests_without_a_key_are_each_executed(orders, handler):
    assert [(await order(orders, key=None)).status_code for _ in range(2)] == [201, 201]
    assert handler.executed == 2


async def test_concurrent_request_gets_409_and_other_payload_422(orders, handler):
    running, finish = asyncio.Event(), asyncio.Event()

    async def wait():
        running.set()
        await finish.wait()

    handler.before = wait
    first = asyncio.ensure_future(order(orders))
    await running.wait()
    busy = await order(orders)
    assert (busy.status_code, name(busy), busy.headers["retry-after"]) == (409, "in-progress", "1")
    other = await order(orders, amount=41)
    assert (other.status_code, name(other)) == (422, "key-reused")
    finish.set()
    assert (await first).status_code == 201
    assert handler.executed == 1


async def test_request_that_failed_can_be_sent_again(orders, handler):
    async def fail():
        del handler.before
        raise LookupError("no such product")

    handler.before = fail
    assert (await order(orders)).status_code == 500
    assert (await order(orders)).status_code == 201


async def test_response_stored_between_look_up_and_lock_is_replayed(orders, monkeypatch):
    assert (await order(orders)).status_code == 201

    async def nothing_yet(*_):
        return None

    monkeypatch.setattr(SqlAlchemyIdempotency, "get_response", nothing_yet)
    late = await order(orders)
    assert (late.status_code, late.json()) == (201, {"amount": 40, "number": 1})
    assert late.headers["idempotent-replayed"] == "true"


async def test_database_without_tables_is_an_error_of_the_server(orders, engine):
    async with engine.begin() as connection:
        await connection.execute(sa.text("ALTER TABLE idempotency RENAME TO elsewhere"))
    try:
        assert (await order(orders)).status_code == 500
    finally:
        async with engine.begin() as connection:
            await connection.execute(sa.text("ALTER TABLE elsewhere RENAME TO idempotency"))
