"""A server on loopback that answers by script, and notes what it was asked.

with serve(Script(answer(409, retry_after=1), answer(201, {"id": 7}))) as url:
    ...
assert len(script.seen) == 2
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from support.process import HOST

TLS = Path(__file__).parent / "tls"


@dataclass
class Seen:
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self):
        return self.headers.get("idempotency-key")


class Script:
    """An ASGI app: one step per request, in order. A request too many is answered 418."""

    def __init__(self, *steps):
        self.steps = deque(steps)
        self.seen = []

    async def __call__(self, scope, receive, send):
        assert scope["type"] == "http"
        seen = await _received(scope, receive)
        self.seen.append(seen)
        step = self.steps.popleft() if self.steps else answer(418)
        await step(seen, send)

    @property
    def keys(self):
        return [seen.key for seen in self.seen]


class Stage:
    """A server that stays up while the scripts change: starting one takes longer than a test."""

    def __init__(self):
        self._script = None
        self.url = ""

    async def __call__(self, scope, receive, send):
        await self._script(scope, receive, send)

    @contextlib.contextmanager
    def plays(self, script):
        """The script, at the URL that is yielded."""
        self._script = script
        yield self.url


async def _received(scope, receive):
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    return Seen(scope["method"], scope["path"], headers, body)


# --- steps --------------------------------------------------------------------------------------


def answer(status, content=None, *, length=True, headers=(), **named):
    """An answer in one piece. `retry_after=3` and the like are header fields."""
    if isinstance(content, bytes):
        body = content
    else:
        body = b"" if content is None else json.dumps(content).encode()
    fields = {"content-type": "application/json", **dict(headers)}
    fields |= {name.replace("_", "-"): str(value) for name, value in named.items()}
    if length:
        fields["content-length"] = str(len(body))

    async def step(seen, send):
        await _start(send, status, fields)
        await send({"type": "http.response.body", "body": body})

    return step


def problem(status, name, **named):
    kind = {"content-type": "application/problem+json; charset=utf-8"}
    document = {"type": f"urn:semel:problem:{name}", "title": name, "status": status}
    return answer(status, document, headers=kind, **named)


def broken_off(body, *, length):
    """The head and a part of the body; then the connection ends."""

    async def step(seen, send):
        fields = {"content-type": "application/json"}
        if length:
            fields["content-length"] = str(len(body) + 10)
        await _start(send, 201, fields)
        await send({"type": "http.response.body", "body": body, "more_body": True})
        raise ConnectionAbortedError

    return step


def held(release, then):
    """Answer when the (threading) event is set."""

    async def step(seen, send):
        await asyncio.to_thread(release.wait, 30)
        await then(seen, send)

    return step


def events(release, *, first, last):
    """A stream whose end comes when the event is set."""

    async def step(seen, send):
        await _start(send, 200, {"content-type": "text/event-stream"})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        await asyncio.to_thread(release.wait, 30)
        await send({"type": "http.response.body", "body": last})

    return step


async def _start(send, status, fields):
    headers = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})


# --- the server ---------------------------------------------------------------------------------


@contextlib.contextmanager
def serve(app, *, tls=False):
    """The app under uvicorn, in a thread; yields its URL."""
    options = {}
    if tls:
        options = {"ssl_certfile": TLS / "certificate.pem", "ssl_keyfile": TLS / "key.pem"}
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", ws="none", http="h11", access_log=False, **options
    )
    server = uvicorn.Server(config)
    listener = socket.create_server((HOST, 0))
    thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn", daemon=True)
    thread.start()
    try:
        # The socket listens already: a client that comes too early waits in its queue.
        yield f"{'https' if tls else 'http'}://{HOST}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(15)
        listener.close()
        assert not thread.is_alive(), "the server did not end"
