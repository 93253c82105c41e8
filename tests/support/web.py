"""Speak to a door: by hand in this process, or over loopback to a real server.

`ask` is the server of one request. It is strict: one head, then the body, and nothing after its
end, so a door that breaks the rules of ASGI fails whatever test it is in.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx

from support.binaries import Binary
from support.process import HOST, ServerProcess, free_port, new_folder

TESTS = Path(__file__).parents[1]
TYPE = "urn:semel:problem:"


# --- by hand ------------------------------------------------------------------------------------


@dataclass
class Reply:
    """What a client got."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def all(self, name):
        wanted = name.lower().encode()
        return [content.decode("latin-1") for n, content in self.headers if n.lower() == wanted]

    def header(self, name):
        return next(iter(self.all(name)), None)

    @property
    def replayed(self):
        return self.header("idempotent-replayed") == "true"

    @property
    def problem(self):
        """The name of the problem this is, or None."""
        if self.header("content-type") != "application/problem+json":
            return None
        said = self.json()
        assert said["status"] == self.status
        assert said["title"]
        assert said["detail"]
        return said["type"].removeprefix(TYPE)

    def json(self):
        return json.loads(self.body)


class Wire:
    """The server's side of one request: what an app receives, and where it sends.

    When the body is over, `receive` waits until the client is `gone`, as a server's does.
    `on_send` sees every message before it is taken.
    """

    def __init__(self, *pieces, on_send=None):
        self.pieces = list(pieces or (b"",))
        self.gone = asyncio.Event()
        self.sent = []
        self.informed = []
        self._on_send = on_send
        self._state = "head"

    async def receive(self):
        if self.pieces:
            piece = self.pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if self._on_send is not None:
            await self._on_send(message)
        kind = message["type"]
        if kind == "http.response.start":
            assert self._state == "head", "a second head"
            self._state = "body"
        elif kind == "http.response.body":
            assert self._state == "body", f"a body in the state {self._state}"
            self._state = "body" if message.get("more_body", False) else "over"
        else:
            self.informed.append(message)
            return
        self.sent.append(message)

    @property
    def over(self):
        return self._state == "over"

    @property
    def so_far(self):
        """The body as far as it was sent."""
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    def reply(self):
        assert self.over, "the response has no end"
        start = self.sent[0]
        return Reply(start["status"], list(start.get("headers", ())), self.so_far)


def scope_of(path="/pay", *, method="POST", key=None, headers=(), query=b"", **more):
    """The scope of a request; `key` is the header's content, several if it is a list."""
    keys = [] if key is None else [key] if isinstance(key, (str, bytes)) else key
    lines = [(b"host", b"shop.example"), (b"content-type", b"application/json"), *headers]
    for content in keys:
        data = content.encode("latin-1") if isinstance(content, str) else content
        lines.append((b"idempotency-key", data))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogatepass"),
        "query_string": query,
        "root_path": "",
        "headers": lines,
        "client": (HOST, 1),
        "server": (HOST, 80),
        "extensions": {},
        **more,
    }


async def ask(app, path="/pay", *, body=b"{}", wire=None, **request):
    """One request, whole; `wire` to see more of it than the reply."""
    wire = wire or Wire(body)
    await app(scope_of(path, **request), wire.receive, wire.send)
    return wire.reply()


async def until(condition, *, within_s=10.0):
    """Let others run until it is so."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.001)


# --- a real server ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Python(Binary):
    """The interpreter that runs this, with some variables more."""

    variables: tuple[tuple[str, str], ...] = ()

    def environment(self):
        return {**os.environ, **dict(self.variables)}


class Web(ServerProcess):
    """uvicorn and an app from `support.http_app`."""

    @property
    def url(self):
        return f"http://{HOST}:{self.port}"

    def probe(self):
        answer = httpx.get(f"{self.url}/peak", timeout=2)
        assert answer.status_code < 500, answer

    def effects(self):
        """The key of every execution, and the process it was in."""
        file = self.folder / "effects"
        lines = file.read_text().splitlines() if file.exists() else []
        return [tuple(line.split()) for line in lines]

    def runs(self, key):
        """The processes in which this key was executed."""
        return [int(found[1]) for found in self.effects() if found[0] == key]

    def open_gate(self, name):
        """Let requests go on that wait for this name."""
        (self.folder / name).touch()

    def connect(self):
        """A connection of one's own, for what no client would do."""
        return socket.create_connection((HOST, self.port), 10)


def start_web(store, *, app="charges", workers=1, http="httptools", patience_s=None):
    folder = new_folder("web")
    variables = [("WEB_STORE", store), ("WEB_FOLDER", str(folder))]
    if patience_s is not None:
        variables.append(("WEB_PATIENCE", str(patience_s)))
    python = Python("uvicorn", Path(sys.executable), "venv", tuple(variables))
    port = free_port()
    words = [
        *("-m", "uvicorn", "--factory", f"support.http_app:{app}", "--app-dir", str(TESTS)),
        *("--host", HOST, "--port", str(port), "--http", http, "--workers", str(workers)),
        *("--lifespan", "off", "--no-access-log", "--log-level", "warning"),
        *("--timeout-worker-healthcheck", "60"),  # a frozen worker is ours to thaw
    ]
    return Web(python, words, port, folder).start()


def request_head(path, key, *headers):
    """A request's head as bytes, for a connection of one's own."""
    lines = [f"POST {path} HTTP/1.1", "Host: shop.example", f"Idempotency-Key: {key}", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def read_response(connection):
    """The response on a connection of one's own, whose head says how long it is."""
    with connection.makefile("rb") as file:
        head = b"".join(iter(file.readline, b"\r\n"))
        reply = parse_head(head)
        reply.body = file.read(int(reply.header("content-length") or 0))
        return reply


def parse_head(head):
    status, *lines = head.split(b"\r\n")
    headers = [line.partition(b": ")[::2] for line in lines if line]
    return Reply(int(status.split()[1]), headers, b"")


async def fetch(web, path, key, body=b'{"amount": 5}'):
    """One request on a connection of its own; a client with a pool is slow with hundreds."""
    reader, writer = await asyncio.open_connection(HOST, web.port)
    try:
        length = f"Content-Length: {len(body)}"
        writer.write(request_head(path, key, length, "Connection: close") + body)
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if not head:
        raise ConnectionError("no answer")
    reply = parse_head(head)
    reply.body = rest
    assert len(rest) == int(reply.header("content-length"))
    return reply


__all__ = [
    "Reply",
    "Web",
    "Wire",
    "ask",
    "fetch",
    "read_response",
    "request_head",
    "scope_of",
    "start_web",
    "until",
]
