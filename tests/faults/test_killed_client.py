"""SIGKILL of a client around its request; started again, it asks with the same key.

The server behind a door that dedupes by key counts what it does. Killed at any point, the client
gets its receipt in the end, and the server has done it once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from semel.client import Intents
from semel.http import IdempotencyMiddleware
from semel.stores import MemoryStore
from support.client_kinds import KINDS
from support.client_server import Script, answer, problem, serve

TESTS = Path(__file__).parents[1]


class Till:
    """An app that takes money. Its answer waits until `let_go` is set, as it is at first."""

    def __init__(self):
        self.taken = []
        self.took_one = threading.Event()
        self.let_go = threading.Event()
        self.let_go.set()

    async def __call__(self, scope, receive, send):
        await Script(self.take)(scope, receive, send)

    async def take(self, seen, send):
        self.taken.append(seen.key)
        self.took_one.set()
        await asyncio.to_thread(self.let_go.wait, 30)
        await answer(201, {"receipt": len(self.taken)})(seen, send)


class Dictionary:
    """The smallest door: one run per key, its answer kept in memory."""

    def __init__(self, app):
        self._app = app
        self._answers = {}

    async def __call__(self, scope, receive, send):
        key = dict(scope["headers"])[b"idempotency-key"]
        if key not in self._answers:
            self._answers[key] = kept = []
            await self._app(scope, receive, _keeping(kept, send))
        elif kept := self._answers[key]:
            for message in kept:
                await send(message)
        else:
            await problem(409, "in-progress", retry_after=1)(None, send)


def _keeping(kept, send):
    """Record, then send: what is kept is there before the client can hear of it."""
    whole = []

    async def keep(message):
        whole.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            kept.extend(whole)
            for each in whole:
                await send(each)

    return keep


# What dedupes: an app in, an app out. Every door is put through every kill.
DOORS = {
    "dictionary": Dictionary,
    "semel": lambda app: IdempotencyMiddleware(app, store=MemoryStore(), scope="shop"),
}


@pytest.fixture(params=DOORS)
def door(request):
    return DOORS[request.param]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def start(kind, url, file, *flags):
    return subprocess.Popen(
        [sys.executable, "-m", "support.client_process", kind, url, str(file), *flags],
        cwd=TESTS,
        env=os.environ,
        stdout=subprocess.PIPE,
        text=True,
    )


def ended(process):
    out, _ = process.communicate(timeout=60)
    return process.returncode, out.strip()


def finish(kind, url, file):
    """Start the client again, and say which receipt it got."""
    code, out = ended(start(kind, url, file))
    assert code == 0
    status, _, body = out.partition(" ")
    assert status == "201"
    return json.loads(body)["receipt"]


def left(file):
    with Intents(file) as intents:
        return [each.name for each in intents.unanswered()]


def test_a_client_killed_while_it_waits_for_its_answer(kind, door, tmp_path):
    till, file = Till(), tmp_path / "keys.db"
    till.let_go.clear()
    with serve(door(till)) as url:
        first = start(kind, url, file)
        try:
            assert till.took_one.wait(30)
        finally:
            first.kill()
        assert ended(first) == (-signal.SIGKILL, "")
        assert left(file) == ["invoice-7"]
        again = start(kind, url, file)  # finds the first request still running, or done
        till.let_go.set()
        code, out = ended(again)
        assert (code, out) == (0, '201 {"receipt": 1}')
        assert finish(kind, url, file) == 1
    assert len(till.taken) == 1
    assert left(file) == []


@pytest.mark.parametrize("point", ["after-key", "after-answer"])
def test_a_client_killed_before_it_sends_and_before_it_notes_the_answer(
    kind, door, tmp_path, point
):
    till, file = Till(), tmp_path / "keys.db"
    with serve(door(till)) as url:
        assert ended(start(kind, url, file, "--at", point)) == (-signal.SIGKILL, "")
        assert len(till.taken) == (0 if point == "after-key" else 1)
        assert left(file) == ["invoice-7"]
        assert finish(kind, url, file) == 1
    assert len(till.taken) == 1
    assert left(file) == []
