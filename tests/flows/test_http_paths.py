"""Paths and tenants as they come: which are the same operation, and which cannot be used."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import unquote

import pytest
from fastapi import Depends, FastAPI, Header
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from semel.errors import SettingsError
from semel.http import IdempotencyMiddleware, Rule, WSGIMiddleware
from semel.http.fastapi import Idempotency, IdempotentRoute
from semel.http.sqlalchemy import SqlAlchemyIdempotency
from semel.stores import MemoryStore
from support.web import ask
from support.wsgi import TEXT
from support.wsgi import ask as ask_wsgi

# Pairs of paths that a client and a proxy tell apart.
DIFFERENT = [
    ("/a%2Fb", "/a/b"),
    ("/a%2Fb", "/a%252Fb"),
    ("/a%25b", "/a%2525b"),
    ("/a%FF", "/a%FE"),
    ("/a%FF", "/a%25FF"),
    ("/a%2F/b", "/a//b"),
    # A `%` that begins no escape, and what follows it.
    ("/a%%32Fb", "/a%2Fb"),
    ("/a%2%46b", "/a%2Fb"),
    ("/a%%325b", "/a%25b"),
    ("/%%46F", "/%FF"),
]

# Pairs that are two spellings of one path (RFC 3986 section 6.2.2).
SAME = [
    ("/a%2fb", "/a%2Fb"),
    ("/%61%2e", "/a."),
    ("/caf%c3%a9", "/caf%C3%A9"),
    ("/a%ff", "/a%FF"),
]


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def door(inner=app, **options):
    options = {"scope": "shop", "store": MemoryStore()} | options
    return IdempotencyMiddleware(inner, **options)


async def send_raw(guarded, raw, *, root="", **request):
    """A request for this path, as a server hands it on."""
    request |= {"raw_path": raw.encode("latin-1"), "root_path": root}
    return await ask(guarded, unquote(raw), key="k", **request)


# --- ASGI ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
@pytest.mark.parametrize("fingerprint", ["bytes", "json", None])
async def test_paths_that_differ_before_decoding_are_two_operations(first, second, fingerprint):
    guarded = door(rule=Rule(fingerprint=fingerprint))
    assert (await send_raw(guarded, first)).status == 200
    assert (await send_raw(guarded, second)).problem == "key-reused"
    assert (await send_raw(guarded, first)).replayed


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
async def test_with_per_operation_each_path_has_its_own_record(first, second):
    guarded = door(rule=Rule(per_operation=True))
    for path in (first, second):
        assert not (await send_raw(guarded, path)).replayed
        assert (await send_raw(guarded, path)).replayed


@pytest.mark.parametrize(("first", "second"), SAME)
async def test_spellings_of_one_path_are_one_operation(first, second):
    guarded = door()
    assert not (await send_raw(guarded, first)).replayed
    assert (await send_raw(guarded, second)).replayed


@pytest.mark.parametrize("raw", [None, b"", b"/elsewhere%2F", b"/a%2Fb?x=1"])
async def test_raw_path_that_is_missing_or_of_another_path_is_not_used(raw):
    guarded = door()
    assert (await ask(guarded, "/a/b", key="k", raw_path=raw)).status == 200
    same = raw is None or not raw.startswith(b"/a")
    again = await ask(guarded, "/a/b", key="k", raw_path=b"/a/b")
    assert (again.replayed, again.problem) == ((True, None) if same else (False, "key-reused"))


async def test_path_that_a_middleware_changed_is_not_taken_for_an_escaped_one():
    """Decoded, it is `/a%2Fb`. The other request was sent as `/a%2Fb`; decoded, it is `/a/b`."""
    guarded = door()
    assert (await ask(guarded, "/a%2Fb", key="k", raw_path=b"/v1/a%252Fb")).status == 200
    assert (await send_raw(guarded, "/a%2Fb")).problem == "key-reused"


async def test_scope_without_raw_path_is_served():
    guarded = door()

    async def without(scope, receive, send):
        del scope["raw_path"]
        await guarded(scope, receive, send)

    assert (await ask(without, "/a b", key="k")).status == 200
    assert (await ask(without, "/a b", key="k")).replayed


async def test_rules_match_the_decoded_path():
    guarded = door(routes={"/pay/*": Rule(key="required"), "/free/{id}": None})
    assert (await ask(guarded, "/pay/a", raw_path=b"/pay%2Fa")).problem == "key-missing"
    assert not (await send_raw(guarded, "/free/%61")).replayed
    assert not (await send_raw(guarded, "/free/%61")).replayed


async def test_mounted_app_tells_escaped_slashes_apart():
    async def pay(request):
        return PlainTextResponse(request.path_params["item"])

    inner = Starlette(routes=[Route("/pay/{item:path}", pay, methods=["POST"])])
    mounted = Starlette(routes=[Mount("/shop", door(inner))])
    assert (await send_raw(mounted, "/shop/pay/a%2Fb")).status == 200
    assert (await send_raw(mounted, "/shop/pay/a/b")).problem == "key-reused"
    assert (await send_raw(mounted, "/shop/pay/a%2fb")).replayed


async def test_mount_that_strips_the_path_tells_escaped_slashes_apart():
    guarded = door()
    mount = {"root": "/shop", "path": "/a/b"}

    async def stripped(raw):
        request = {"raw_path": raw, "root_path": mount["root"]}
        return await ask(guarded, mount["path"], key="k", **request)

    assert (await stripped(b"/shop/a%2Fb")).status == 200
    assert (await stripped(b"/shop/a/b")).problem == "key-reused"
    assert (await stripped(b"/shop/a%2fb")).replayed


async def test_fastapi_tells_escaped_slashes_apart():
    api = FastAPI()
    api.router.route_class = IdempotentRoute
    idempotency = Idempotency(store=MemoryStore(), scope="shop")

    @api.post("/pay/{item:path}", dependencies=[Depends(idempotency)])
    async def pay(item: str):
        return item

    assert (await send_raw(api, "/pay/a%2Fb")).status == 200
    assert (await send_raw(api, "/pay/a/b")).problem == "key-reused"
    assert (await send_raw(api, "/pay/a%2fb")).replayed


# --- WSGI ---------------------------------------------------------------------------------------


def wsgi_app(environ, start_response):
    start_response("200 OK", [TEXT])
    return [environ["PATH_INFO"].encode("latin-1")]


def wsgi_door(**options):
    options = {"scope": "shop", "store": MemoryStore()} | options
    return WSGIMiddleware(wsgi_app, **options)


def send_wsgi(guarded, raw, *, name="RAW_URI", prefix="", query="", mount=""):
    path = unquote(raw.removeprefix(mount), "latin-1")
    target = f"{prefix}{raw}" + (f"?{query}" if query else "")
    more = {name: target, "SCRIPT_NAME": mount, "QUERY_STRING": query}
    return ask_wsgi(guarded, path=path, **more)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
@pytest.mark.parametrize(
    "server",
    [
        {"name": "RAW_URI"},
        {"name": "REQUEST_URI", "query": "a=%2F"},
        {"prefix": "http://shop.example:80"},
    ],
    ids=["gunicorn", "uwsgi", "absolute form"],
)
def test_wsgi_paths_that_differ_before_decoding_are_two_operations(first, second, server):
    guarded = wsgi_door()
    assert send_wsgi(guarded, first, **server).status == 200
    assert send_wsgi(guarded, second, **server).problem == "key-reused"
    assert send_wsgi(guarded, first, **server).replayed


@pytest.mark.parametrize(("first", "second"), SAME)
def test_wsgi_spellings_of_one_path_are_one_operation(first, second):
    guarded = wsgi_door()
    assert not send_wsgi(guarded, first).replayed
    assert send_wsgi(guarded, second).replayed


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_paths_from_the_server_of_werkzeug_are_told_apart(first, second):
    """It replaces bytes that are not UTF-8 in `PATH_INFO`."""

    def send(raw):
        path = unquote(raw).encode().decode("latin-1")
        return ask_wsgi(guarded, path=path, RAW_URI=raw)

    guarded = wsgi_door()
    assert send(first).status == 200
    assert send(second).problem == "key-reused"


def test_wsgi_app_with_a_script_name_tells_escaped_slashes_apart():
    guarded = wsgi_door()
    assert send_wsgi(guarded, "/shop/a%2Fb", mount="/shop").status == 200
    assert send_wsgi(guarded, "/shop/a/b", mount="/shop").problem == "key-reused"


@pytest.mark.parametrize("target", [None, "", "*", "/other%2Fpath", "http://", "\u20ac%2F"])
def test_wsgi_server_that_says_nothing_of_the_path_is_served(target):
    """The documented limit: then both spellings are one operation."""
    guarded = wsgi_door()
    assert ask_wsgi(guarded, path="/a/b", RAW_URI=target).status == 200
    assert ask_wsgi(guarded, path="/a/b").replayed


# --- tenants ------------------------------------------------------------------------------------

UNUSABLE = ["x" * 256, "\u00e9" * 128, "a\0b", "a\ud800"]


@pytest.mark.parametrize("tenant", UNUSABLE)
async def test_tenant_that_no_record_can_hold_is_a_400(tenant):
    guarded = door(scope=lambda _: tenant)
    reply = await ask(guarded, key="k")
    assert (reply.status, reply.problem) == (400, "tenant-malformed")
    wsgi = ask_wsgi(wsgi_door(scope=lambda _: tenant))
    assert (wsgi.status, wsgi.problem) == (400, "tenant-malformed")


@pytest.mark.parametrize("tenant", ["x" * 255, "\u00e9" * 127])
async def test_tenant_of_at_most_255_bytes_is_served(tenant):
    assert (await ask(door(scope=lambda _: tenant), key="k")).status == 200


@pytest.mark.parametrize("key", ["k", None])
async def test_fastapi_tenant_that_is_too_long_is_a_400(key):
    runs = []

    def tenant(x_tenant: Annotated[str, Header()]) -> str:
        return x_tenant

    api = FastAPI()
    api.router.route_class = IdempotentRoute
    idempotency = Idempotency(store=MemoryStore(), scope=tenant)

    @api.post("/pay", dependencies=[Depends(idempotency)])
    async def pay():
        runs.append(1)

    reply = await ask(api, "/pay", key=key, headers=[(b"x-tenant", b"x" * 256)])
    assert (reply.status, reply.problem) == (400, "tenant-malformed")
    assert "this one has 256" in reply.json()["detail"]
    assert runs == []


@pytest.mark.parametrize("tenant", UNUSABLE)
def test_tenant_that_is_fixed_is_checked_where_it_is_given(tenant, tmp_path):
    with pytest.raises(SettingsError, match="tenant"):
        door(scope=tenant)
    with pytest.raises(SettingsError, match="tenant"):
        Idempotency(store=MemoryStore(), scope=tenant)
    with pytest.raises(SettingsError, match="tenant"):
        door(rule=Rule(scope=tenant))


@pytest.mark.parametrize("tenant", UNUSABLE)
def test_sqlalchemy_tenant_that_no_record_can_hold_is_refused_at_once(tenant, tmp_path):
    import sqlalchemy as sa
    from sqlalchemy.orm import Session

    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with Session(engine) as session, pytest.raises(SettingsError, match="tenant"):
        SqlAlchemyIdempotency(session, tenant_id=tenant)
    engine.dispose()
