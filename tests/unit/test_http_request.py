"""The request that `scope`, `authorise` and rules receive: Starlette's names, on every server."""

from __future__ import annotations

import asyncio
import copy
import io
from wsgiref.util import setup_testing_defaults

import pytest
from starlette.requests import Request as StarletteRequest

from semel.http import IdempotencyMiddleware, Request, WSGIMiddleware, asgi, wsgi
from semel.http.rule import Route
from semel.http.sse import Request as GatewayRequest
from semel.http.ws import Visitor
from semel.http.ws.visitor import visitor_of

HEADERS = [
    (b"host", b"shop.example:8443"),
    (b"x-user", b"ann"),
    (b"x-part", b"one"),
    (b"x-part", b"two"),
    (b"cookie", b'session=abc; theme="dark blue"; session=old; broken'),
]


def scope_of(headers=HEADERS, **more):
    return {
        "type": "http",
        "method": "POST",
        "scheme": "https",
        "path": "/orders/7 a",
        "raw_path": b"/orders/7%20a",
        "query_string": b"page=2&tag=a&tag=b&empty=",
        "headers": headers,
        "client": ("192.0.2.7", 4711),
        "server": ("127.0.0.1", 8443),
        "path_params": {"id": "7 a"},
        "state": {"user": "ann"},
    } | more


def environ_of():
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": "/orders/7 a",
        "QUERY_STRING": "page=2&tag=a&tag=b&empty=",
        "HTTP_HOST": "shop.example:8443",
        "HTTP_X_USER": "ann",
        "HTTP_X_PART": "one,two",
        "HTTP_COOKIE": 'session=abc; theme="dark blue"; session=old; broken',
        "wsgi.url_scheme": "https",
        "REMOTE_ADDR": "192.0.2.7",
        "REMOTE_PORT": "4711",
    }
    setup_testing_defaults(environ)
    return environ


KINDS = {
    "asgi": lambda: asgi.request_of(scope_of()),
    "wsgi": lambda: wsgi.request_of(environ_of(), Route("/orders/{id}")),
    "websocket": lambda: visitor_of(scope_of()),
}


@pytest.fixture(params=KINDS)
def request_made(request):
    return KINDS[request.param]()


def test_every_server_gives_the_same_request_class():
    assert GatewayRequest is Request
    assert issubclass(Visitor, Request)
    assert {type(make()) for make in KINDS.values()} == {Request, Visitor}


def test_header_is_found_in_any_case(request_made):
    headers = request_made.headers
    assert headers["x-user"] == headers["X-User"] == headers.get("X-USER") == "ann"
    assert "X-User" in headers
    assert headers.get("x-missing") is None
    assert headers.get("x-missing", "ann") == "ann"


def test_missing_header_is_a_key_error_that_names_it(request_made):
    with pytest.raises(KeyError, match="the request has no header 'x-missing'"):
        request_made.headers["x-missing"]


def test_attributes_have_the_values_of_the_request(request_made):
    assert request_made.cookies["theme"] == "dark blue"
    assert request_made.cookies.get("broken") is None
    assert request_made.query_params["page"] == "2"
    assert request_made.query_params["tag"] == "b"
    assert request_made.query_params.getlist("tag") == ["a", "b"]
    assert request_made.query_params.get("empty") == ""
    assert request_made.url.path == "/orders/7 a"
    assert request_made.url.query == "page=2&tag=a&tag=b&empty="
    assert (
        str(request_made.url) == "https://shop.example:8443/orders/7%20a?page=2&tag=a&tag=b&empty="
    )
    assert request_made.url.hostname == "shop.example"
    assert request_made.client.host == "192.0.2.7"
    assert request_made.client.port == 4711
    assert dict(request_made.path_params) == {"id": "7 a"}


def test_older_names_still_work(request_made):
    assert request_made.header("X-User") == "ann"
    assert request_made.header("x-missing") is None
    assert request_made.cookie("session") == "abc"
    assert request_made.path == "/orders/7 a"
    assert request_made.query == b"page=2&tag=a&tag=b&empty="
    assert request_made.ticket is None
    assert request_made.raw


def test_repeated_header_is_listed(request_made):
    listed = request_made.headers.getlist("X-Part")
    assert listed in (["one", "two"], ["one,two"])  # a WSGI server joins them
    assert request_made.headers.getlist("x-missing") == []


def test_reading_agrees_with_starlette():
    scope = scope_of()
    ours, theirs = asgi.request_of(scope), StarletteRequest(scope)
    assert dict(ours.headers) == dict(theirs.headers)
    assert ours.headers.raw == theirs.headers.raw
    assert ours.headers.getlist("x-part") == theirs.headers.getlist("x-part")
    assert dict(ours.query_params) == dict(theirs.query_params)
    assert ours.method == theirs.method
    assert ours.url.path == theirs.url.path
    assert ours.client == theirs.client
    assert ours.path_params == theirs.path_params
    assert ours.state.user == theirs.state.user == "ann"
    assert ours.cookies["theme"] == theirs.cookies["theme"]


@pytest.mark.parametrize(
    ("changes", "url"),
    [
        ({"headers": []}, "https://127.0.0.1:8443/orders/7%20a"),
        ({"headers": [], "server": ("::1", 443)}, "https://[::1]/orders/7%20a"),
        ({"headers": [], "server": ("/run/app.sock", None)}, "https:///run/app.sock/orders/7%20a"),
    ],
)
def test_url_without_a_host_header_names_the_server(changes, url):
    assert str(asgi.request_of(scope_of(query_string=b"", **changes)).url) == url


def test_request_without_a_client_has_none():
    assert asgi.request_of(scope_of(client=None)).client is None


def test_missing_state_names_the_order_of_middlewares():
    with pytest.raises(AttributeError, match=r"'tenant'.*add it afterwards"):
        _ = asgi.request_of(scope_of()).state.tenant


@pytest.mark.parametrize("scope", [lambda r: r.headers["x-tenant"], lambda r: r.cookies["tenant"]])
@pytest.mark.parametrize("server", ["asgi", "wsgi"])
def test_scope_that_reads_a_missing_header_refuses_the_request(scope, server):
    assert SERVERS[server](scope) == 403


def asked_by_asgi(scope):
    async def asked():
        sent = []
        app = IdempotencyMiddleware(unreachable, store="memory://", scope=scope)
        headers = [(b"idempotency-key", b"k1")]
        await app(scope_of(headers), _empty_body, lambda message: _append(sent, message))
        return sent[0]["status"]

    return asyncio.run(asked())


async def _empty_body():
    return {"type": "http.request", "body": b"", "more_body": False}


async def _append(sent, message):
    sent.append(message)


def asked_by_wsgi(scope):
    statuses = []
    app = WSGIMiddleware(unreachable, store="memory://", scope=scope)
    environ = environ_of() | {"HTTP_IDEMPOTENCY_KEY": "k1", "wsgi.input": io.BytesIO()}
    list(app(environ, lambda status, headers, *_: statuses.append(status)))
    return int(statuses[0][:3])


def unreachable(*_):
    raise AssertionError("the application must not be called")


SERVERS = {"asgi": asked_by_asgi, "wsgi": asked_by_wsgi}


def test_path_params_of_a_router_and_of_the_route_are_both_there():
    found = asgi.request_of(scope_of(path_params={"org": "acme"}), Route("/orders/{id}"))
    assert found.path_params == {"org": "acme", "id": "7 a"}


def test_header_name_that_cannot_be_sent_is_not_there(request_made):
    assert request_made.headers.get("x-☃") is None
    assert "x-☃" not in request_made.headers
    assert request_made.headers.getlist("x-☃") == []


def test_state_can_be_copied():
    state = copy.deepcopy(asgi.request_of(scope_of()).state)
    assert state.user == "ann"


def test_port_of_a_wsgi_client_can_be_an_int():
    environ = environ_of() | {"REMOTE_PORT": 4711, "SERVER_PORT": 8443}
    del environ["HTTP_HOST"]
    found = wsgi.request_of(environ)
    assert found.client == ("192.0.2.7", 4711)
    assert found.url.netloc == "127.0.0.1:8443"


def test_wsgi_server_on_a_unix_socket_has_no_client_and_no_port():
    environ = environ_of() | {"REMOTE_ADDR": "", "REMOTE_PORT": "", "SERVER_PORT": ""}
    del environ["HTTP_HOST"]
    found = wsgi.request_of(environ)
    assert found.client is None
    assert str(found.url).startswith("https://127.0.0.1/orders")
