"""httpx, async httpx and requests behind one face, so that a test is written once."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import httpx
import requests

from semel.client.flow import World
from semel.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from semel.client.requests import IdempotentAdapter

FAILED = (httpx.TransportError, requests.exceptions.RequestException)


class Metronome(World):
    """Time that passes when somebody sleeps, and no other; chance is a half."""

    def __init__(self):
        self.slept = []

    def now_s(self):
        return sum(self.slept)

    def wall_s(self):
        return 1_700_000_000.0

    def chance(self):
        return 0.5

    async def sleep(self, seconds):
        self.slept.append(seconds)


@dataclass
class Got:
    """An answer, read."""

    status: int
    headers: dict[str, str]
    body: bytes
    path: str


def _from_httpx(response):
    assert response.elapsed is not None
    return Got(response.status_code, dict(response.headers), response.content, response.url.path)


class SyncHttpx:
    """One client for a number of requests; `options` are the transport's."""

    def __init__(self, *, connections=None, **options):
        limits = httpx.Limits(max_connections=connections)
        inner = httpx.HTTPTransport(limits=limits, trust_env=False)
        self._client = httpx.Client(
            transport=IdempotentTransport(inner, **options), follow_redirects=True, trust_env=False
        )

    def ask(self, method, url, *, timeout=5.0, **kwargs):
        return _from_httpx(self._client.request(method, url, timeout=timeout, **kwargs))

    def first_of_stream(self, url, then):
        with self._client.stream("POST", url) as response:
            chunks = response.iter_raw()
            first = next(chunks)
            then()
            return first, b"".join(chunks)

    def close(self):
        self._client.close()


class AsyncHttpx:
    """The same for async httpx, on a loop of its own."""

    def __init__(self, *, connections=None, **options):
        limits = httpx.Limits(max_connections=connections)
        self._runner = asyncio.Runner()
        inner = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)
        self._client = httpx.AsyncClient(
            transport=AsyncIdempotentTransport(inner, **options),
            follow_redirects=True,
            trust_env=False,
        )

    def ask(self, method, url, *, timeout=5.0, **kwargs):
        if hasattr(kwargs.get("content"), "__next__"):
            kwargs["content"] = _async(kwargs["content"])
        asked = self._client.request(method, url, timeout=timeout, **kwargs)
        return _from_httpx(self._runner.run(asked))

    def first_of_stream(self, url, then):
        return self._runner.run(self._first_of_stream(url, then))

    async def _first_of_stream(self, url, then):
        async with self._client.stream("POST", url) as response:
            chunks = response.aiter_raw()
            first = await anext(chunks)
            then()
            return first, b"".join([chunk async for chunk in chunks])

    def close(self):
        self._runner.run(self._client.aclose())
        self._runner.close()


async def _async(chunks):
    for chunk in chunks:
        yield chunk


class Requests:
    """The same for requests."""

    def __init__(self, *, connections=None, **options):
        self.session = requests.Session()
        self.session.trust_env = False
        if connections is not None:
            options |= {"pool_maxsize": connections, "pool_block": True}
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, IdempotentAdapter(**options))

    def ask(self, method, url, *, timeout=5.0, content=None, **kwargs):
        got = self.session.request(method, url, timeout=timeout, data=content, **kwargs)
        path = got.request.path_url
        return Got(
            got.status_code, {k.lower(): v for k, v in got.headers.items()}, got.content, path
        )

    def first_of_stream(self, url, then):
        with self.session.post(url, stream=True, timeout=5) as response:
            chunks = response.iter_content(None)
            first = next(chunks)
            then()
            return first, b"".join(chunks)

    def close(self):
        self.session.close()


KINDS = {"httpx": SyncHttpx, "async-httpx": AsyncHttpx, "requests": Requests}


@contextlib.contextmanager
def client(kind, **options):
    made = KINDS[kind](**options)
    try:
        yield made
    finally:
        made.close()
