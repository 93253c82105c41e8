"""A process that opens several stores, brokers and middlewares on one place, one command at a time.

    process = Process(folder)
    process.ask("open", name="a", kind="store", url="sqlite:///semel.db")
    process.ask("call", calls=[["a", "sync", "key-1"], ["a", "async", "key-1"]])
    process.end()

Each effect appends one byte to the file of its key in `folder/effects`. Relative paths begin at
`folder`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

import semel
from semel import brokers
from semel.colour import ASYNC, SYNC, run
from semel.http import IdempotencyMiddleware
from semel.messages import Batch, Tail
from semel.stores.sql import SQLStore
from semel.stores.sql.lines import parse, with_driver
from semel.testing.traffic import message
from support.zygote import spawn

STREAM = "job-1"
TOPIC = "orders"

# Long enough for a slow machine: a lease that ran out would allow a second effect.
LEASE_S = 30.0


# --- the test's side ----------------------------------------------------------------------------


class Process:
    """A process to which the test sends commands."""

    def __init__(self, folder: Path) -> None:
        (folder / "effects").mkdir(exist_ok=True)
        self._forked = spawn("support.instances", [str(folder)])
        self.pid = self._forked.pid
        self.names: list[str] = []
        """What is open there."""

    def ask(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.told()

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a command; `told` returns what it answers."""
        self._forked.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self._forked.stdin.flush()

    def told(self) -> Any:
        line = self._forked.stdout.readline()
        assert line, "the process ended before it answered"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["told"]

    def open(self, name: str, kind: str, url: str) -> str:
        self.ask("open", name=name, kind=kind, url=url)
        self.names.append(name)
        return name

    def close(self, name: str) -> None:
        self.ask("close", name=name)
        self.names.remove(name)

    def end(self, *, close: bool = True) -> None:
        """End the process; without `close`, as a program that forgets to."""
        for name in list(self.names) if close else []:
            self.close(name)
        self._forked.communicate(30)
        assert self._forked.returncode == 0

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._forked.send_signal(signal.SIGKILL)
        self._forked.wait(30)
        with contextlib.suppress(BrokenPipeError):
            self._forked.stdin.close()
        self._forked.stdout.close()


# --- the process --------------------------------------------------------------------------------


def effect(key: str) -> str:
    """Append a byte to the key's file; return what only this run of the body returns."""
    fd = os.open(f"effects/{key}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, b"x")
    finally:
        os.close(fd)
    return f"{key} by {os.getpid()}/{os.urandom(4).hex()}"


class OpenedStore:
    """A store, and guards over it in each colour that it has."""

    def __init__(self, store: Any, close: Callable[[], Any] = lambda: None) -> None:
        self.store = store
        self._close = close
        settings = {"key": "{key}", "operation": "charge", "store": store, "on_duplicate": "wait"}

        def charge(key: str) -> str:
            return effect(key)

        async def acharge(key: str) -> str:
            await asyncio.sleep(0)
            return effect(key)

        self._guards = {}
        for colour, body in (("sync", charge), ("async", acharge)):
            with contextlib.suppress(semel.SettingsError):  # an engine has one colour
                self._guards[colour] = semel.idempotent(**settings, lease=LEASE_S)(body)

    def _colour(self, wanted: str) -> str:
        return wanted if wanted in self._guards else next(iter(self._guards))

    async def call(self, colour: str, key: str) -> str:
        colour = self._colour(colour)
        answer = self._guards[colour]
        return await (answer(key) if colour == "async" else asyncio.to_thread(answer, key))

    def call_here(self, key: str) -> str:
        return self._guards["sync"](key)

    async def hang(self, key: str) -> str:
        """Claim the key for a second, and stop before the effect."""
        inside = asyncio.Event()
        settings = {"key": "{key}", "operation": "charge", "store": self.store}

        @semel.idempotent(**settings, lease=1.0)
        async def stops(key: str) -> None:
            inside.set()
            await asyncio.Event().wait()

        @semel.idempotent(**settings, lease=1.0)
        def blocks(key: str) -> None:
            loop.call_soon_threadsafe(inside.set)
            threading.Event().wait()

        loop = asyncio.get_running_loop()
        if self._colour("async") == "async":
            self.hanging: Any = asyncio.ensure_future(stops(key))
        else:
            self.hanging = threading.Thread(target=blocks, args=[key], daemon=True)
            self.hanging.start()
        await inside.wait()
        return key

    async def append(self, colour: str, id: str) -> int:
        colour = self._colour(colour)
        log = self.store.log(ASYNC if colour == "async" else SYNC)
        asked = log.append(STREAM, id.encode(), id=id)
        answer = await (asked if colour == "async" else asyncio.to_thread(run, asked))
        return answer.position.offset

    async def entries(self) -> list[tuple[int, str]]:
        colour = self._colour("async")
        asked = self.store.log(ASYNC if colour == "async" else SYNC).read(STREAM, limit=10_000)
        page = await (asked if colour == "async" else asyncio.to_thread(run, asked))
        return [(entry.position.offset, entry.id) for entry in page.entries]

    async def close(self) -> None:
        if self.store is not None:
            await self.store.aclose()
        closed = self._close()
        if closed is not None:
            await closed


class OpenedMiddleware:
    """An application as the README shows it."""

    def __init__(self, url: str) -> None:
        app = IdempotencyMiddleware(_charge, store=url, scope=lambda request: "shop")
        transport = httpx.ASGITransport(app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://shop")

    async def call(self, colour: str, key: str) -> str:
        while True:
            answer = await self._client.post("/", headers={"Idempotency-Key": f'"{key}"'})
            if answer.status_code != 409:
                assert answer.status_code == 201, answer.text
                return answer.text
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Its store is closed with the process."""
        await self._client.aclose()


async def _charge(scope: Any, receive: Any, send: Any) -> None:
    key = dict(scope["headers"])[b"idempotency-key"].decode().strip('"')
    body = effect(key).encode()
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": body})


class OpenedBroker:
    def __init__(self, url: str) -> None:
        settings = {"groups": {TOPIC: ["billing"]}} if url.startswith("amqp") else {}
        self._broker = brokers.connect(url, **settings)

    async def publish(self, position: int) -> str:
        follows = Tail(position - 1, f"{TOPIC}-{position - 1}") if position > 1 else Tail()
        batch = Batch(TOPIC, 0, 1, follows, [message(TOPIC, position)])
        return repr(await self._broker.publish(batch))

    async def take(self, fence: int, count: int) -> list[int]:
        """Read this many messages as the owner with this fence, acknowledge them, and close."""
        await self._broker.join(TOPIC, "billing")
        consumer = await self._broker.consumer(TOPIC, "billing", 0, name="test", fence=fence)
        found: list[Any] = list(await consumer.left_over())
        async with asyncio.timeout(20):
            while len(found) < count:
                found += await consumer.read(count - len(found), wait_s=1.0)
        await consumer.ack(found)
        await consumer.close()
        return [delivery.message.position for delivery in found]

    async def close(self) -> None:
        await self._broker.aclose()


class OpenedApplication:
    """The application's own engine on the SQLite file, with a table of its own."""

    def __init__(self, url: str) -> None:
        path = url.partition("///")[2]
        self._engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": 30})
        with self._engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS app_order (id TEXT)")

    async def insert(self, id: str) -> None:
        with self._engine.begin() as connection:
            connection.exec_driver_sql("INSERT INTO app_order VALUES (?)", (id,))

    async def rows(self) -> list[str]:
        with self._engine.connect() as connection:
            return list(connection.exec_driver_sql("SELECT id FROM app_order").scalars())

    async def close(self) -> None:
        self._engine.dispose()


class Instances:
    """What is open in this process, by name. Each method is a command."""

    def __init__(self) -> None:
        self._opened: dict[str, Any] = {}

    async def open(self, name: str, kind: str, url: str) -> None:
        self._opened[name] = _open(kind, url)

    async def close(self, name: str) -> None:
        await self._opened.pop(name).close()

    async def call(self, calls: Sequence[tuple[str, str, str]]) -> list[str]:
        """Call at once: each is the name of an instance, a colour and a key."""
        works = [self._opened[name].call(colour, key) for name, colour, key in calls]
        return list(await asyncio.gather(*works))

    async def fork(self, name: str, first: str, last: str) -> None:
        """Fork a child that inherits everything; it calls with the first key and waits."""
        to_child, from_parent = os.pipe()
        to_parent, from_child = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(from_parent)
                self._opened[name].call_here(first)
                os.write(from_child, b"1")
                os.read(to_child, 1)
                self._opened[name].call_here(last)
                code = 0
            finally:
                os._exit(code)
        os.close(to_child)
        os.close(from_child)
        await asyncio.to_thread(os.read, to_parent, 1)
        os.close(to_parent)
        self._child = pid, from_parent

    async def end_child(self) -> int:
        """Let the child call with the last key; return its exit code."""
        pid, from_parent = self._child
        os.write(from_parent, b"1")
        os.close(from_parent)
        return os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])

    async def do(self, name: str, verb: str, arguments: Sequence[Any] = ()) -> Any:
        return await getattr(self._opened[name], verb)(*arguments)


def _open(kind: str, url: str) -> Any:
    match kind:
        case "store":
            return OpenedStore(semel.connect(url))
        case "default":
            semel.configure(store=url)
            return OpenedStore(None)
        case "engine":
            engine = sa.create_engine(with_driver(parse(url), "sync"))
            return OpenedStore(SQLStore(engine), engine.dispose)
        case "async engine":
            async_engine = create_async_engine(with_driver(parse(url), "async"))
            return OpenedStore(SQLStore(async_engine), async_engine.dispose)
        case "middleware":
            return OpenedMiddleware(url)
        case "broker":
            return OpenedBroker(url)
        case "application":
            return OpenedApplication(url)
    raise AssertionError(kind)


async def _serve() -> None:
    instances = Instances()
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        try:
            told = {"told": await getattr(instances, asked.pop("do"))(**asked)}
        except Exception as error:  # noqa: BLE001 - the test raises it
            told = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


def main() -> None:
    os.chdir(sys.argv[1])
    asyncio.run(_serve())
