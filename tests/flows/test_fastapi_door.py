"""The FastAPI door: a dependency claims, a route class records and replays.

Requests go through a whole app, with its middlewares and exception handlers.
"""

import asyncio
import contextlib
from typing import Annotated, Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Depends,
    FastAPI,
    File,
    Form,
    HTTPException,
    Request,
    Response,
    UploadFile,
    WebSocket,
)
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware

import semel
from semel.colour import ASYNC
from semel.errors import SettingsError, StoreUnavailableError
from semel.http import IdempotencyMiddleware, Refusal, problem
from semel.http.fastapi import Idempotency, IdempotentRoute, RequestAttempt, Rule
from semel.stores import MemoryStore, SQLStore
from semel.values import State
from support.fastapi_shop import Order, Shop, name, new_app, replayed, tenant


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def idempotency(store):
    return Idempotency(store=store, scope=tenant)


@pytest.fixture
def shop(store, idempotency):
    """POST /orders makes an order; what else a test needs, it adds."""
    app = new_app()
    shop = Shop(app, store)

    @app.post("/orders", status_code=201)
    async def create(order: Order, attempt: Annotated[RequestAttempt, Depends(idempotency)]):
        shop.seen.append(attempt)
        return {"order": len(shop.seen), "item": order.item}

    return shop


def scope_of(path, key):
    """For what no client would do."""
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [
            (b"x-api-key", b"secret-a"),
            (b"idempotency-key", key.encode()),
            (b"content-type", b"application/json"),
        ],
    }


# --- once ---------------------------------------------------------------------------------------


async def test_a_repeated_request_gets_the_first_response(shop):
    first, second = await shop.post(key="k"), await shop.post(key="k")
    assert (first.status_code, first.json()) == (201, {"order": 1, "item": "book"})
    assert (second.status_code, second.content) == (201, first.content)
    assert (replayed(first), replayed(second)) == (False, True)
    assert len(shop.seen) == 1


async def test_a_first_request_takes_two_round_trips_a_replay_one_and_no_key_none(
    shop, monkeypatch
):
    ledger, asked = shop.store.ledger(ASYNC), []

    def counted(verb, real):
        def ask(*args, **kwargs):
            asked.append(verb)
            return real(*args, **kwargs)

        return ask

    for verb in ("claim", "complete", "release", "renew", "note"):
        monkeypatch.setattr(ledger, verb, counted(verb, getattr(ledger, verb)))
    for key, expected in (("k", ["claim", "complete"]), ("k", ["claim"]), (None, [])):
        asked.clear()
        assert (await shop.post(key=key)).status_code == 201
        assert asked == expected


async def test_the_key_is_the_same_in_quotes_and_another_for_another_tenant(shop):
    await shop.post(key="k")
    assert replayed(await shop.post(key='"k"'))
    other = await shop.post(key="k", api_key="secret-b")
    assert (other.json()["order"], replayed(other)) == (2, False)


async def test_the_same_key_for_another_request_is_refused(shop):
    await shop.post(key="k")
    other = await shop.post(key="k", json={"item": "pen", "amount": 1})
    assert (other.status_code, name(other)) == (422, "key-reused")
    assert len(shop.seen) == 1


async def test_a_second_request_while_the_first_one_runs_is_told_so(shop, idempotency):
    inside, go_on = asyncio.Event(), asyncio.Event()

    @shop.app.post("/slow")
    async def slow(attempt: Annotated[RequestAttempt, Depends(idempotency)]):
        inside.set()
        await go_on.wait()
        return {}

    first = asyncio.create_task(shop.post("/slow", key="k"))
    await inside.wait()
    second = await shop.post("/slow", key="k")
    go_on.set()
    assert (second.status_code, name(second)) == (409, "in-progress")
    assert int(second.headers["retry-after"]) >= 1
    assert (await first).status_code == 200


async def test_a_key_that_is_malformed_or_missing_is_refused(shop, idempotency):
    @shop.app.post("/strict")
    async def strict(_: Annotated[Any, Depends(idempotency.but(key="required"))]):
        shop.seen.append("strict")

    assert name(await shop.post(key='"open')) == "key-malformed"
    missing = await shop.post("/strict")
    assert (missing.status_code, name(missing)) == (400, "key-missing")
    assert shop.seen == []
    assert (await shop.post("/strict", key="k")).status_code == 200


async def test_a_store_that_is_down_is_told_and_nothing_runs(store, idempotency, shop, monkeypatch):
    async def down(*_: Any, **__: Any):
        raise StoreUnavailableError("it is down")

    monkeypatch.setattr(store.ledger(ASYNC), "claim", down)
    refused = await shop.post(key="k")
    assert (refused.status_code, name(refused)) == (503, "store-unavailable")
    assert shop.seen == []


async def test_a_body_over_the_limit_is_refused(shop, idempotency):
    @shop.app.post("/small")
    async def small(request: Request, _: Annotated[Any, Depends(idempotency.but(max_body=10))]):
        return len(await request.body())

    assert (await shop.post("/small", key="k", content=b"1234567890")).json() == 10
    refused = await shop.post("/small", key="l", content=b"12345678901")
    assert (refused.status_code, name(refused)) == (413, "body-too-large")
    assert (await shop.post("/small", content=b"12345678901")).json() == 11


# --- who may ------------------------------------------------------------------------------------


async def test_who_is_not_let_in_is_never_replayed_to(shop):
    await shop.post(key="k")
    refused = await shop.post(key="k", api_key="stolen")
    assert (refused.status_code, refused.json()) == (401, {"detail": "unknown API key"})
    assert (await shop.post(key="k", headers={"x-api-key": ""})).status_code == 401


@pytest.mark.parametrize("first", ["attempt", "permission"])
async def test_a_lost_permission_counts_before_a_replay_in_whatever_order(shop, idempotency, first):
    allowed = [True]

    def permission():
        if not allowed[0]:
            raise HTTPException(403, "not any more")

    attempted, permitted = Depends(idempotency), Depends(permission)

    async def refund(a: Any, b: Any):
        shop.seen.append("refund")
        return {}

    given = (attempted, permitted) if first == "attempt" else (permitted, attempted)
    refund.__defaults__ = given
    shop.app.post("/refunds")(refund)
    assert (await shop.post("/refunds", key="k")).status_code == 200
    allowed[0] = False
    assert (await shop.post("/refunds", key="k")).status_code == 403
    allowed[0] = True
    assert replayed(await shop.post("/refunds", key="k"))
    assert shop.seen == ["refund"]


async def test_a_refusal_of_the_scope_is_sent_as_it_is(store):
    def nobody():
        raise Refusal(problem("key-malformed", "keys are closed today"))

    app = new_app()

    @app.post("/orders", dependencies=[Depends(Idempotency(store=store, scope=nobody))])
    async def create():
        return {}

    shop = Shop(app, store)
    assert name(await shop.post(key="k")) == "key-malformed"
    assert await shop.records() == []


@pytest.mark.parametrize("tenant", [None, False, "", 0, [], {}], ids=repr)
async def test_an_empty_tenant_is_refused_and_nothing_is_run(store, tenant):
    async def scope():
        return tenant

    app, ran = new_app(), []

    @app.post("/orders", dependencies=[Depends(Idempotency(store=store, scope=scope))])
    async def create():
        ran.append(1)

    shop = Shop(app, store)
    answer = await shop.post(key="k")
    assert (answer.status_code, name(answer)) == (403, "tenant-missing")
    assert (await shop.records(), ran) == ([], [])


async def test_scope_that_returns_no_str_is_a_server_error(store):
    app = new_app()

    @app.post("/orders", dependencies=[Depends(Idempotency(store=store, scope=lambda: 7))])
    async def create():
        return {}

    shop = Shop(app, store)
    with pytest.raises(SettingsError, match="a tenant is a str"):
        await httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s").post(
            "/orders", headers={"idempotency-key": "k"}
        )
    assert await shop.records() == []


# --- what the answer was ------------------------------------------------------------------------


async def test_a_request_that_is_not_valid_has_not_begun(shop):
    invalid = await shop.post(key="k", json={"item": "book"})
    assert (invalid.status_code, invalid.headers["content-type"]) == (422, "application/json")
    [record] = await shop.records()
    assert record.state is State.FAILED
    again = await shop.post(key="k", json={"item": "book"})
    assert (again.status_code, replayed(again)) == (422, False)
    assert shop.seen == []


async def test_not_json_at_all_is_never_claimed(shop):
    invalid = await shop.post(key="k", content=b"{", headers={"content-type": "application/json"})
    assert invalid.status_code == 422
    assert await shop.records() == []


@pytest.mark.parametrize(
    ("status", "stored"), [(404, True), (409, True), (403, False), (503, False)]
)
async def test_what_the_handler_raises_counts_by_its_status(shop, idempotency, status, stored):
    @shop.app.post("/raise")
    async def refuse(_: Annotated[Any, Depends(idempotency)]):
        shop.seen.append(status)
        raise HTTPException(status, "because", headers={"x-why": "policy"})

    first, second = await shop.post("/raise", key="k"), await shop.post("/raise", key="k")
    assert first.status_code == second.status_code == status
    assert first.content == second.content
    assert second.headers["x-why"] == "policy"
    assert replayed(second) is stored
    assert len(shop.seen) == (1 if stored else 2)


@pytest.mark.parametrize(
    ("on_error", "again", "runs"), [("release", 500, 2), ("store", 500, 1), ("hold", 409, 1)]
)
async def test_an_unhandled_error_means_what_the_rule_says(
    shop, idempotency, on_error, again, runs
):
    @shop.app.post("/fail")
    async def fail(_: Annotated[Any, Depends(idempotency.but(on_error=on_error))]):
        shop.seen.append("ran")
        raise RuntimeError("no")

    assert (await shop.post("/fail", key="k")).status_code == 500
    second = await shop.post("/fail", key="k")
    assert (second.status_code, len(shop.seen)) == (again, runs)


@pytest.mark.parametrize("on_error", ["release", "store", "hold"])
async def test_an_error_of_a_dependency_after_the_claim_gives_it_back(shop, idempotency, on_error):
    door = idempotency.but(on_error=on_error)
    fails = [True]

    async def needs_the_attempt(attempt: Annotated[RequestAttempt, Depends(door)]):
        if fails[0]:
            raise RuntimeError(attempt.key)

    @shop.app.post("/needy", dependencies=[Depends(needs_the_attempt)])
    async def needy():
        shop.seen.append("ran")
        return {}

    assert (await shop.post("/needy", key="k")).status_code == 500
    fails[0] = False
    assert (await shop.post("/needy", key="k")).status_code == 200
    assert shop.seen == ["ran"]


async def test_a_request_cut_off_before_its_handler_gives_the_claim_back(shop, idempotency):
    """Even where an interrupted handler would be held: this one was never called."""
    door = idempotency.but(on_error="hold")
    inside = asyncio.Event()

    async def slow(attempt: Annotated[RequestAttempt, Depends(door)]):
        inside.set()
        await asyncio.sleep(3600)

    @shop.app.post("/cut", dependencies=[Depends(slow)])
    async def cut():
        return {}

    task = asyncio.create_task(shop.post("/cut", key="k"))
    await inside.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    [record] = await shop.records()
    assert record.state is State.FAILED


async def test_exception_handlers_of_the_app_answer_and_are_recorded(shop, idempotency):
    class SoldOutError(Exception):
        pass

    @shop.app.exception_handler(SoldOutError)
    async def sold_out(_request: Request, _error: Exception):
        shop.seen.append("handler")
        return JSONResponse({"sold": "out"}, 409)

    @shop.app.post("/rare")
    async def rare(_: Annotated[Any, Depends(idempotency)]):
        raise SoldOutError

    first, second = await shop.post("/rare", key="k"), await shop.post("/rare", key="k")
    assert (first.status_code, first.content) == (second.status_code, second.content)
    assert replayed(second)
    assert shop.seen == ["handler"]


async def test_a_replay_or_refusal_is_no_exception_to_the_app(shop):
    @shop.app.exception_handler(HTTPException)
    async def seen(_request: Request, error: HTTPException):
        shop.seen.append(error)
        return JSONResponse({}, error.status_code)

    @shop.app.exception_handler(Exception)
    async def unexpected(_request: Request, error: Exception):
        shop.seen.append(error)
        return JSONResponse({}, 500)

    await shop.post(key="k")
    shop.seen.clear()
    assert replayed(await shop.post(key="k"))
    assert name(await shop.post(key="k", json={"item": "pen", "amount": 1})) == "key-reused"
    assert name(await shop.post(key='"')) == "key-malformed"
    assert shop.seen == []


async def test_a_handler_of_invalid_requests_can_still_read_the_body(shop, idempotency):
    bodies = []

    @shop.app.exception_handler(RequestValidationError)
    async def invalid(request: Request, _error: Exception):
        bodies.append(await request.body())
        return JSONResponse({}, 422)

    @shop.app.post("/params")
    async def params(page: int, _: Annotated[Any, Depends(idempotency)]):
        return {}

    assert (await shop.post("/params", key="k", content=b"abc")).status_code == 422
    assert (await shop.post(key="l", content=b"{}")).status_code == 422
    assert bodies == [b"abc", b"{}"]


async def test_once_the_claim_is_given_back_the_app_may_know_that_its_client_is_gone(shop):
    heard = []

    @shop.app.exception_handler(RequestValidationError)
    async def invalid(request: Request, _error: Exception):
        heard.append((await request.receive())["type"])
        return JSONResponse({}, 422)

    arriving = iter([{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}])

    async def receive():
        return next(arriving)

    async def send(_message: Any):
        pass

    async with asyncio.timeout(10):
        await shop.app(scope_of("/orders", "k"), receive, send)
    assert heard == ["http.disconnect"]


async def test_a_replay_ends_other_dependencies_in_peace(shop, idempotency):
    """No dependency sees an exception because a request was answered before."""
    ended = []

    def sync():
        try:
            yield
        except BaseException as error:  # whatever it is, there must be none
            ended.append(error)
            raise
        ended.append("sync")

    async def asynchronous():
        try:
            yield
        except BaseException as error:
            ended.append(error)
            raise
        ended.append("async")

    @shop.app.post(
        "/tidy", dependencies=[Depends(sync), Depends(asynchronous), Depends(idempotency)]
    )
    async def tidy():
        return {}

    for _ in range(2):
        ended.clear()
        assert (await shop.post("/tidy", key="k")).status_code == 200
        assert ended == ["async", "sync"]


# --- without a key ------------------------------------------------------------------------------


async def test_without_a_key_the_handler_runs_each_time_and_nothing_is_kept(shop):
    assert [(await shop.post()).json()["order"] for _ in range(2)] == [1, 2]
    first, second = shop.seen
    assert not first.keyed
    assert not first.replayed
    assert first.tenant == "a"
    assert first.child_key("pay") != second.child_key("pay")
    assert await shop.records() == []


async def test_the_same_handler_takes_steps_with_and_without_a_key(shop, idempotency):
    charges = []

    async def charge(key: str):
        charges.append(key)
        return len(charges)

    @shop.app.post("/pay")
    async def pay(attempt: Annotated[RequestAttempt, Depends(idempotency)]):
        assert semel.current() is attempt
        receipt = await attempt.step("charge", charge, attempt.child_key("charge"))
        if receipt == 1:
            raise HTTPException(503)
        return receipt

    assert (await shop.post("/pay", key="k")).status_code == 503
    assert (await shop.post("/pay", key="k")).status_code == 503  # the step is not taken again
    assert len(charges) == 1
    assert (await shop.post("/pay")).json() == 2
    assert (await shop.post("/pay")).json() == 3
    assert len(set(charges)) == 3


@pytest.mark.parametrize("key", ["k", None])
async def test_a_def_endpoint_takes_steps_without_await(shop, idempotency, key):
    @shop.app.post("/pay")
    def pay(attempt: Annotated[RequestAttempt, Depends(idempotency)]):
        once = attempt.step("charge", lambda: "receipt")
        return [once, semel.step("mail", len, once)]

    assert (await shop.post("/pay", key=key)).json() == ["receipt", 7]
    assert replayed(await shop.post("/pay", key=key)) is (key is not None)


async def test_a_step_has_one_name_without_a_key_too(shop, idempotency):
    @shop.app.post("/pay")
    async def pay(attempt: Annotated[RequestAttempt, Depends(idempotency)]):
        await attempt.step("charge", int)
        await attempt.step("charge", int)

    with pytest.raises(SettingsError, match="taken already"):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(shop.app), base_url="http://s"
        ) as client:
            await client.post("/pay", headers={"x-api-key": "secret-a"})


async def test_other_methods_pass_with_an_attempt_that_has_no_key(shop, idempotency):
    @shop.app.get("/orders")
    async def orders(attempt: Annotated[RequestAttempt, Depends(idempotency)]):
        shop.seen.append(attempt)
        return {}

    headers = {"x-api-key": "secret-a", "idempotency-key": "k"}
    for _ in range(2):
        assert not replayed(await shop.ask("GET", "/orders", headers=headers))
    assert [attempt.keyed for attempt in shop.seen] == [False, False]
    assert await shop.records() == []


# --- bodies and responses of every kind -----------------------------------------------------------


async def test_forms_and_uploads_are_read_and_compared(shop, idempotency):
    @shop.app.post("/upload")
    async def upload(
        title: Annotated[str, Form()],
        file: Annotated[UploadFile, File()],
        _: Annotated[Any, Depends(idempotency.but(max_body=8 * 2**20))],
    ):
        data = await file.read()
        shop.seen.append(title)
        return {"title": title, "size": len(data), "last": data[-1]}

    content_type = {"content-type": "multipart/form-data; boundary=b1"}

    def multipart(data):
        return (
            b'--b1\r\ncontent-disposition: form-data; name="title"\r\n\r\nhello\r\n'
            b'--b1\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            + data
            + b"\r\n--b1--\r\n"
        )

    for size in (10, 3 * 2**20):  # in memory, and in a file
        body = multipart(b"x" * (size - 1) + b"y")
        first = await shop.post("/upload", key=f"k{size}", content=body, headers=content_type)
        assert first.json() == {"title": "hello", "size": size, "last": ord("y")}
        second = await shop.post("/upload", key=f"k{size}", content=body, headers=content_type)
        assert replayed(second)
        other = multipart(b"x" * size)
        third = await shop.post("/upload", key=f"k{size}", content=other, headers=content_type)
        assert name(third) == "key-reused"
    assert len(shop.seen) == 2


async def test_responses_of_every_kind_are_replayed(shop, idempotency, tmp_path):
    file = tmp_path / "receipt.txt"
    file.write_bytes(b"receipt\n" * 20_000)
    door = Depends(idempotency)

    @shop.app.post("/file", dependencies=[door])
    async def as_file():
        return FileResponse(file)

    @shop.app.post("/nothing", status_code=204, dependencies=[door])
    async def nothing():
        return None

    @shop.app.post("/stream", dependencies=[door])
    async def stream():
        return StreamingResponse(iter([b"a", b"b", b"c"]), media_type="text/plain")

    @shop.app.post("/headers", dependencies=[door])
    async def headers(response: Response):
        response.headers.append("link", "<a>")
        response.headers.append("link", "<b>")
        response.set_cookie("session", "secret")
        return {}

    expected = {"/file": file.read_bytes(), "/nothing": b"", "/stream": b"abc", "/headers": b"{}"}
    for path, content in expected.items():
        first, second = await shop.post(path, key=path), await shop.post(path, key=path)
        assert first.content == second.content == content, path
        assert first.status_code == second.status_code
        assert replayed(second)
    assert second.headers.get_list("link") == ["<a>", "<b>"]
    assert "set-cookie" in first.headers
    assert "set-cookie" not in second.headers


async def test_events_flow_while_they_are_made_and_are_not_kept(shop, idempotency):
    @shop.app.post("/events", dependencies=[Depends(idempotency)])
    async def events():
        async def some():
            for number in range(3):
                yield f"data: {number}\n\n"

        return StreamingResponse(some(), media_type="text/event-stream")

    assert (await shop.post("/events", key="k")).text.count("data:") == 3
    again = await shop.post("/events", key="k")
    assert (again.status_code, name(again)) == (410, "response-not-kept")


async def test_background_tasks_run_once_behind_the_response(shop, idempotency):
    @shop.app.post("/mail", dependencies=[Depends(idempotency)])
    async def mail(tasks: BackgroundTasks):
        tasks.add_task(shop.seen.append, "mail")
        return {}

    for _ in range(2):
        assert (await shop.post("/mail", key="k")).status_code == 200
    assert shop.seen == ["mail"]


async def test_a_websocket_on_a_guarded_router_is_left_alone(store, idempotency):
    router = APIRouter(route_class=IdempotentRoute, dependencies=[Depends(idempotency)])

    @router.websocket("/live")
    async def live(websocket: WebSocket):
        await websocket.accept()
        await websocket.send_text("hello")
        await websocket.close()

    app = FastAPI()
    app.include_router(router)
    sent = []
    arriving = iter([{"type": "websocket.connect"}])

    async def receive():
        return next(arriving)

    async def send(message):
        sent.append(message["type"])

    scope = {
        "type": "websocket",
        "asgi": {"version": "3.0"},
        "path": "/live",
        "raw_path": b"/live",
        "root_path": "",
        "scheme": "ws",
        "query_string": b"",
        "headers": [(b"x-api-key", b"secret-a"), (b"idempotency-key", b"k")],
        "subprotocols": [],
    }
    await app(scope, receive, send)
    assert sent == ["websocket.accept", "websocket.send", "websocket.close"]


async def test_middlewares_see_a_replay_as_any_response(shop):
    async def stamp(request: Request, call_next: Any):
        response = await call_next(request)
        response.headers["x-stamp"] = "yes"
        return response

    shop.app.add_middleware(BaseHTTPMiddleware, dispatch=stamp)
    shop.app.add_middleware(GZipMiddleware, minimum_size=1)
    first, second = await shop.post(key="k"), await shop.post(key="k")
    assert first.content == second.content
    assert replayed(second)
    assert second.headers["x-stamp"] == "yes"
    assert second.headers["content-encoding"] == "gzip"


async def test_a_client_that_leaves_before_its_body_is_whole_has_claimed_nothing(shop):
    async def gone():
        return {"type": "http.disconnect"}

    async def nobody(_message: Any):
        pass

    await shop.app(scope_of("/orders", "k"), gone, nobody)
    assert shop.seen == []
    assert await shop.records() == []


async def test_behind_the_middleware_the_dependency_gives_its_attempt(store, idempotency, shop):
    shop.app.add_middleware(IdempotencyMiddleware, store=store, scope="outer")
    assert not replayed(await shop.post(key="k"))
    assert replayed(await shop.post(key="k"))
    [record] = await shop.records()
    assert record.key.tenant == shop.seen[0].tenant == "outer"


# --- places -------------------------------------------------------------------------------------


async def test_routers_bring_the_dependency_to_all_their_routes(store, idempotency):
    """Of the router itself, of `include_router`, and nested; each is documented too."""
    seen = []

    def orders(**more: Any):
        router = APIRouter(route_class=IdempotentRoute, **more)

        @router.post("/orders")
        async def create():
            seen.append("order")
            return {}

        return router

    door = [Depends(idempotency)]
    app = FastAPI()
    app.include_router(orders(dependencies=door), prefix="/own")
    app.include_router(orders(), prefix="/included", dependencies=door)
    outer = APIRouter(prefix="/outer", dependencies=door)
    outer.include_router(orders(), prefix="/inner")
    app.include_router(outer)
    app.include_router(orders(), prefix="/free")
    shop = Shop(app, store)
    guarded = ["/own/orders", "/included/orders", "/outer/inner/orders"]
    for path in [*guarded, "/free/orders"]:
        seen.clear()
        answers = [await shop.post(path, key=path) for _ in range(2)]
        assert [replayed(answer) for answer in answers] == [False, path in guarded], path
    said = app.openapi()
    for path in guarded:
        assert "x-idempotency-retention" in said["paths"][path]["post"], path
        assert [p["name"] for p in said["paths"][path]["post"]["parameters"]] == [
            "x-api-key",
            "Idempotency-Key",
        ]
    assert "x-idempotency-retention" not in said["paths"]["/free/orders"]["post"]
    assert "IdempotencyProblem" in said["components"]["schemas"]


async def test_one_key_for_two_paths_is_refused(shop, idempotency):
    @shop.app.post("/orders/{number}/pay", dependencies=[Depends(idempotency)])
    async def pay(number: int):
        return number

    assert (await shop.post("/orders/1/pay", key="k")).json() == 1
    assert name(await shop.post("/orders/2/pay", key="k")) == "key-reused"


async def test_a_route_class_above_ours_sees_responses(store, idempotency):
    class Timed(IdempotentRoute):
        def get_route_handler(self):
            handler = super().get_route_handler()

            async def timed(request):
                response = await handler(request)
                response.headers["x-timed"] = "yes"
                return response

            return timed

    app = FastAPI()
    app.router.route_class = Timed

    @app.post("/orders", dependencies=[Depends(idempotency)])
    async def create():
        return {}

    shop = Shop(app, store)
    for again in (False, True):
        answer = await shop.post(key="k")
        assert (answer.headers["x-timed"], replayed(answer)) == ("yes", again)


async def test_overridden_dependencies_are_the_ones_that_count(shop, idempotency):
    shop.app.dependency_overrides[tenant] = lambda: "z"
    await shop.post(key="k", api_key="whatever")
    [record] = await shop.records()
    assert record.key.tenant == "z"
    shop.app.dependency_overrides[idempotency] = lambda: None
    assert not replayed(await shop.post(key="k"))


# --- settings that cannot work ------------------------------------------------------------------


async def test_the_dependency_without_the_route_class_says_what_to_write(store, idempotency):
    app = FastAPI()

    @app.post("/orders", dependencies=[Depends(idempotency)])
    async def create():
        return {}

    with pytest.raises(SettingsError, match="route_class"):
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://s"
        ) as client:
            await client.post("/orders", headers={"x-api-key": "secret-a"})


def test_two_doors_on_one_route_are_refused(shop, idempotency):
    with pytest.raises(SettingsError, match="2 Idempotency objects"):

        @shop.app.post("/twice", dependencies=[Depends(idempotency), Depends(idempotency.but())])
        async def twice():
            return {}


def test_settings_are_checked_where_they_are_made(store):
    with pytest.raises(SettingsError, match="scope="):
        Idempotency(store=store, scope="")
    with pytest.raises(SettingsError, match="Rule\\(scope=\\)"):
        Idempotency(store=store, scope="one", rule=Rule(scope="two"))
    with pytest.raises(SettingsError, match="SQLStore"):
        Idempotency(store=store, scope="one", session=lambda: None)
    with pytest.raises(SettingsError, match="serves sync code only"):
        Idempotency(store=SQLStore(sa.create_engine("sqlite://")), scope="one")
    with pytest.raises(SettingsError, match="on_error"):
        Idempotency(store=store, scope="one").but(on_error="ignore")


# --- OpenAPI ------------------------------------------------------------------------------------


def test_the_api_says_what_it_does_with_keys(shop, idempotency):
    strict = idempotency.but(key="required", ttl=7 * 86_400, on_error="hold")

    @shop.app.post("/strict", responses={409: {"description": "Sold out"}})
    async def pay(order: Order, _: Annotated[Any, Depends(strict)]):
        return {}

    @shop.app.get("/orders")
    async def orders():
        return []

    said = shop.app.openapi()
    operation = said["paths"]["/orders"]["post"]
    [parameter] = [p for p in operation["parameters"] if p["name"] == "Idempotency-Key"]
    assert (parameter["in"], parameter["required"]) == ("header", False)
    assert parameter["schema"]["maxLength"] == 255
    assert "kept for 24 hours" in parameter["description"]
    assert operation["x-idempotency-retention"] == 86_400
    assert "Idempotent-Replayed" in operation["responses"]["201"]["headers"]
    assert set(operation["responses"]) == {
        "201",
        "400",
        "403",
        "406",
        "409",
        "410",
        "413",
        "422",
        "503",
    }
    for status in ("400", "403", "406", "409", "410", "413", "422", "503"):
        response = operation["responses"][status]
        assert response["description"]
        assert response["content"]["application/problem+json"]["schema"] == {
            "$ref": "#/components/schemas/IdempotencyProblem"
        }
    for status in ("400", "422"):  # FastAPI says them too, in its own way
        assert set(operation["responses"][status]["content"]) == {
            "application/json",
            "application/problem+json",
        }
    assert "Retry-After" in operation["responses"]["409"]["headers"]
    assert "Retry-After" in operation["responses"]["503"]["headers"]
    assert "IdempotencyProblem" in said["components"]["schemas"]
    assert "HTTPValidationError" in said["components"]["schemas"]

    strict_operation = said["paths"]["/strict"]["post"]
    [parameter] = [p for p in strict_operation["parameters"] if p["name"] == "Idempotency-Key"]
    assert parameter["required"]
    assert "kept for 7 days" in parameter["description"]
    assert strict_operation["responses"]["409"]["description"] == "Sold out"
    assert "key-missing" in strict_operation["responses"]["400"]["description"]
    assert "x-idempotency-retention" not in said["paths"]["/orders"]["get"]


def test_what_fastapi_says_of_422_stays_in_front(shop, idempotency):
    reads_nothing = Idempotency(store=shop.store, scope="shop")

    @shop.app.post("/bare")
    async def bare(_: Annotated[Any, Depends(reads_nothing)]):
        return {}

    @shop.app.post("/own", responses={422: {"description": "Not for sale"}})
    async def own(order: Order, _: Annotated[Any, Depends(idempotency)]):
        return {}

    paths = shop.app.openapi()["paths"]
    validated, unvalidated, told = (
        paths[path]["post"]["responses"]["422"]["description"]
        for path in ("/orders", "/bare", "/own")
    )
    assert validated == f"Validation Error. {unvalidated}"
    assert "key-reused" in unvalidated
    assert told == "Not for sale"


def test_what_the_route_says_itself_is_kept(shop, idempotency):
    @shop.app.post("/own", openapi_extra={"x-mine": 1, "responses": {"410": {"x-more": 2}}})
    async def own(_: Annotated[Any, Depends(idempotency)]):
        return {}

    operation = shop.app.openapi()["paths"]["/own"]["post"]
    assert operation["x-mine"] == 1
    assert operation["responses"]["410"]["x-more"] == 2
    assert "application/problem+json" in operation["responses"]["410"]["content"]
