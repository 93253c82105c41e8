"""Replays of compressed responses: each client gets a coding that its `Accept-Encoding` allows."""

from __future__ import annotations

import gzip
import zlib

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from semel.http import IdempotencyMiddleware, Rule, WSGIMiddleware
from semel.stores import MemoryStore
from support.web import ask
from support.wsgi import ask as ask_wsgi

TEXT = b"a receipt " * 200


def gzipped(text):
    """Leave the time out: it would make the names of tests differ between processes."""
    return gzip.compress(text, mtime=0)


GZIP = gzipped(TEXT)
RAW_DEFLATE = zlib.compress(TEXT, wbits=-15)


class App:
    """An app that answers every request with the same coded body."""

    def __init__(self, body, coding, *headers):
        self.runs = 0
        self._body = body
        length = (b"Content-Length", b"%d" % len(body))
        self._headers = [(b"Content-Encoding", coding), length, *headers]

    async def __call__(self, scope, receive, send):
        self.runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})


def door(app, **rule):
    return IdempotencyMiddleware(app, store=MemoryStore(), scope="shop", rule=Rule(**rule))


def accepting(*lines):
    return [(b"accept-encoding", line) for line in lines]


async def retried(app, *lines, **rule):
    """The replay for a client that accepts this, after one that accepts everything."""
    guarded = door(app, **rule)
    await ask(guarded, key="k", headers=accepting(b"*"))
    reply = await ask(guarded, key="k", headers=accepting(*lines))
    assert app.runs == 1
    return reply


# --- with GZipMiddleware inside -----------------------------------------------------------------


@pytest.mark.parametrize("line", [b"identity", b"", b"gzip;q=0", b"br", None])
async def test_response_that_was_compressed_inside_is_decoded_for_other_clients(line):
    async def pay(request):
        return PlainTextResponse(TEXT)

    routes = [Route("/pay", pay, methods=["POST"])]
    inner = Starlette(routes=routes, middleware=[Middleware(GZipMiddleware)])
    app = door(inner)
    first = await ask(app, "/pay", key="k", headers=accepting(b"gzip"))
    assert first.header("content-encoding") == "gzip"
    again = await ask(app, "/pay", key="k", headers=accepting(b"gzip"))
    assert (again.body, again.header("content-encoding")) == (first.body, "gzip")
    other = await ask(app, "/pay", key="k", headers=[] if line is None else accepting(line))
    assert other.replayed
    assert other.body == TEXT
    assert other.header("content-encoding") is None
    assert other.header("content-length") == str(len(TEXT))
    assert other.all("vary") == ["Accept-Encoding"]


# --- what is accepted ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        [b"gzip"],
        [b"x-gzip"],
        [b"GZIP;Q=0.5"],
        [b"deflate, gzip;q=0.001, br"],
        [b"*"],
        [b"identity;q=0, *"],
        [b"identity", b"gzip"],
        [b"gzip ; q = 1.000"],
        [b"identity;q=0, gzip"],
    ],
)
async def test_accepted_coding_is_replayed_to_the_byte(lines):
    reply = await retried(App(GZIP, b"gzip", (b"ETag", b'"1"')), *lines)
    assert (reply.body, reply.header("content-encoding")) == (GZIP, "gzip")
    assert reply.header("etag") == '"1"'


@pytest.mark.parametrize(
    "lines",
    [
        [b"identity"],
        [b""],
        [b" , "],
        [b"br, zstd"],
        [b"gzip;q=0"],
        [b"gzip;q=0.000, *"],
        [b"gzip;q=high"],
        [b"gzip;q=-1"],
        [b"gzip;q=1;q=0"],
        [b"gzip, gzip;q=0"],
        [b"*;q=0, identity"],
        [b"gzipped"],
    ],
)
async def test_refused_coding_is_decoded(lines):
    reply = await retried(App(GZIP, b"gzip"), *lines)
    assert (reply.status, reply.body) == (200, TEXT)
    assert reply.header("content-encoding") is None


async def test_without_the_header_a_response_that_was_not_negotiated_is_replayed_as_it_was():
    guarded = door(App(GZIP, b"gzip"))
    for _ in range(2):
        reply = await ask(guarded, key="k")
        assert (reply.body, reply.header("content-encoding")) == (GZIP, "gzip")


@pytest.mark.parametrize("line", [b"identity;q=0", b"*;q=0", b"br"])
async def test_response_without_a_coding_is_replayed_whatever_is_accepted(line):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": TEXT})

    guarded = door(app)
    for _ in range(2):
        reply = await ask(guarded, key="k", headers=accepting(line))
        assert (reply.status, reply.body) == (200, TEXT)


# --- what is decoded ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"gzip", GZIP),
        (b"X-GZip", GZIP),
        (b"deflate", zlib.compress(TEXT)),
        (b"deflate", RAW_DEFLATE),
        (b"deflate, gzip", gzipped(zlib.compress(TEXT))),
        (b"identity, gzip", GZIP),
        (b"gzip", gzipped(TEXT[:7]) + gzipped(TEXT[7:])),
    ],
)
async def test_codings_of_the_standard_library_are_decoded(coding, body):
    assert (await retried(App(body, coding), b"identity")).body == TEXT


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"br", b"\x0b\x02\x80hello\x03"),
        (b"zstd", b"\x28\xb5\x2f\xfd"),
        (b"br, gzip", GZIP),
        (b"gzip", GZIP[:-9]),
        (b"gzip", b"no gzip at all"),
        (b"gzip", GZIP + b"more"),
        (b"gzip", gzipped(b"") * 100_000),
    ],
)
async def test_coding_that_cannot_be_decoded_is_named_in_a_406(coding, body):
    app = App(body, coding)
    guarded = door(app, max_response=10_000_000)
    await ask(guarded, key="k", headers=accepting(b"*"))
    refused = await ask(guarded, key="k", headers=accepting(b"identity"))
    assert (refused.status, refused.problem) == (406, "coding-not-accepted")
    assert coding.decode() in refused.json()["detail"]
    again = await ask(guarded, key="k", headers=accepting(coding))
    assert (again.body, again.replayed, app.runs) == (body, True, 1)


@pytest.mark.parametrize("line", [b"*;q=0", b"identity;q=0", b"identity;q=0, br"])
async def test_client_that_accepts_neither_the_coding_nor_identity_gets_406(line):
    assert (await retried(App(GZIP, b"gzip"), line)).problem == "coding-not-accepted"


@pytest.mark.parametrize(("most", "status"), [(len(TEXT), 200), (len(TEXT) - 1, 406)])
async def test_decoded_body_is_bounded_by_max_response(most, status):
    """Else a body of a kilobyte could fill the memory."""
    assert (await retried(App(GZIP, b"gzip"), b"identity", max_response=most)).status == status


async def test_headers_of_the_coded_bytes_are_not_replayed_with_the_decoded_ones():
    headers = [
        (b"ETag", b'"strong"'),
        (b"Content-Digest", b"sha-256=:x:"),
        (b"Repr-Digest", b"sha-256=:x:"),
        (b"Content-MD5", b"x"),
        (b"Vary", b"Origin"),
        (b"Link", b"</a>"),
        (b"Link", b"</b>"),
    ]
    reply = await retried(App(GZIP, b"gzip", *headers), b"identity")
    assert reply.header("etag") == 'W/"strong"'
    assert reply.all("vary") == ["Origin", "Accept-Encoding"]
    assert reply.all("link") == ["</a>", "</b>"]
    assert not any(reply.all(name) for name in ("content-digest", "repr-digest", "content-md5"))


async def test_part_of_a_coded_response_is_not_decoded():
    """`Content-Range` counts bytes of the coded response."""
    part = App(GZIP, b"gzip", (b"Content-Range", b"bytes 0-9/10"))
    guarded = IdempotencyMiddleware(part, store=MemoryStore(), scope="shop")
    await ask(guarded, key="k", headers=[(b"accept-encoding", b"gzip")])
    reply = await ask(guarded, key="k", headers=[(b"accept-encoding", b"identity")])
    assert (reply.status, reply.problem) == (406, "coding-not-accepted")


async def test_weak_etag_stays_as_it_is():
    reply = await retried(App(GZIP, b"gzip", (b"ETag", b'W/"1"')), b"identity")
    assert reply.header("etag") == 'W/"1"'


@pytest.mark.parametrize("status", [204, 304])
async def test_response_without_a_body_is_replayed_as_it_was(status):
    async def app(scope, receive, send):
        headers = [(b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body"})

    guarded = door(app)
    for _ in range(2):
        reply = await ask(guarded, key="k", headers=accepting(b"identity"))
        assert (reply.status, reply.body) == (status, b"")


async def test_coding_problem_is_readable_for_a_browser():
    guarded = door(App(b"?", b"br"))
    origin = (b"origin", b"https://shop.example")
    await ask(guarded, key="k", headers=accepting(b"br"))
    reply = await ask(guarded, key="k", headers=[origin, *accepting(b"identity")])
    assert reply.status == 406
    assert reply.header("access-control-expose-headers")


# --- WSGI ---------------------------------------------------------------------------------------


def test_wsgi_replay_honours_accept_encoding():
    def app(environ, start_response):
        start_response("200 OK", [("Content-Encoding", "gzip"), ("Content-Type", "text/plain")])
        return [GZIP]

    guarded = WSGIMiddleware(app, store=MemoryStore(), scope="shop")
    assert ask_wsgi(guarded, HTTP_ACCEPT_ENCODING="gzip").body == GZIP
    reply = ask_wsgi(guarded, HTTP_ACCEPT_ENCODING="identity")
    assert (reply.body, reply.header("content-encoding")) == (TEXT, None)
    assert ask_wsgi(guarded, HTTP_ACCEPT_ENCODING="gzip").body == GZIP
