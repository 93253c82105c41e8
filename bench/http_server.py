"""The app of http_app.py in a process of its own, and plain requests to it."""

from __future__ import annotations

import json
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.http_load import RECORDED, FailedError, key
from support.binaries import Binary
from support.process import HOST, ServerProcess, free_port, new_folder

PATIENCE_S = 30.0
CREATED = 201


class AppServer(ServerProcess):
    """One uvicorn with one worker."""

    def probe(self) -> None:
        self.count()

    def ask(self, method: str, path: str, key: str | None = None) -> tuple[int, bytes]:
        """A status and a body, over a connection of its own."""
        connection = HTTPConnection(HOST, self.port, timeout=PATIENCE_S)
        try:
            connection.request(method, path, *content(key) if method == "POST" else ())
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def count(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.ask("GET", "/count")[1])
        return found

    def record(self, stamp: str) -> None:
        """Make the requests whose answers are going to be replayed."""
        for number in range(RECORDED):
            status, body = self.ask("POST", "/charges", key(stamp, number))
            if status != CREATED:
                raise FailedError(f"a request was answered {status}: {body[:200]!r}")


def content(key: str | None) -> tuple[bytes, dict[str, str]]:
    """The body and the headers that http.lua sends too."""
    headers = {"X-User-Id": "shop-1", "Content-Type": "application/json"}
    if key is not None:
        headers["Idempotency-Key"] = key
    return b'{"amount":5,"currency":"EUR"}', headers


def start(door: str, store: str) -> AppServer:
    """A new app; `FailedError` when it does not come up."""
    port = free_port()
    words = ["-m", "bench.http_app", door, store, str(port)]
    python: Any = Binary("python", Path(sys.executable), "path")
    server = AppServer(python, words, port, new_folder("app"))
    try:
        return server.start()
    except (RuntimeError, TimeoutError) as error:
        raise FailedError(str(error)) from error
