"""The gateway behind a real server, over real sockets: alone, mounted, and behind middlewares."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import Counter

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from semel.colour import ASYNC
from semel.http.sse import Gateway, Limits, abortable
from semel.stores import MemoryStore
from support.process import HOST
from support.serving import serving
from support.viewers import JOB, frames_of, publish
from support.web import until

STREAM = {"accept": "text/event-stream", "accept-encoding": "gzip"}


class Reading:
    """The frames of a response, as they come."""

    def __init__(self, response):
        self._pieces = response.aiter_bytes()
        self._so_far = b""

    async def until(self, condition):
        async with asyncio.timeout(20):
            async for piece in self._pieces:
                self._so_far += piece
                if self._so_far.endswith(b"\n\n") and condition(frames_of(self._so_far)):
                    return frames_of(self._so_far)
        raise AssertionError(f"it has ended: {self._so_far}")


def alone(gateway):
    return gateway, ""


def in_starlette(gateway):
    return Starlette(routes=[Mount("/api/jobs", gateway)]), "/api/jobs"


def in_fastapi(gateway):
    app = FastAPI()
    app.mount("/jobs", gateway)
    return app, "/jobs"


def behind_middlewares(gateway):
    async def pass_on(request, call_next):
        return await call_next(request)

    middlewares = [Middleware(GZipMiddleware), Middleware(BaseHTTPMiddleware, dispatch=pass_on)]
    return Starlette(routes=[Mount("/jobs", gateway)], middleware=middlewares), "/jobs"


@pytest.mark.parametrize("made", [alone, in_starlette, in_fastapi, behind_middlewares])
async def test_wherever_it_is_mounted_each_event_comes_when_it_happens(made):
    store = MemoryStore()
    gateway = Gateway(store)
    app, path = made(gateway)
    await publish(store, "vision", job_id="a/b")
    async with serving(app) as (url, _), httpx.AsyncClient(base_url=url) as client:
        async with client.stream("GET", f"{path}/a%2Fb", headers=STREAM) as response:
            assert response.status_code == 200
            frames = await Reading(response).until(lambda f: len(f) == 2)
            await publish(store, "rule", job_id="a/b")
        await until(lambda: gateway.status().connections == 0)
        again = {**STREAM, "last-event-id": frames[-1].id}
        async with client.stream("GET", f"{path}/a%2Fb", headers=again) as response:
            reading = Reading(response)
            await reading.until(lambda f: len(f) == 2)
            await publish(store, "done", job_id="a/b")
            frames = await reading.until(lambda f: f[-1].event == "end")
            told = [frame.json().get("stage") for frame in frames]
            assert told == [None, "rule", "done", None]
        final = {**STREAM, "last-event-id": frames[-1].id}
        assert (await client.get(f"{path}/a%2Fb", headers=final)).status_code == 204
        state = await client.get(f"{path}/a%2Fb")
        assert (state.status_code, state.json()["stage"]) == (200, "done")
        await gateway.aclose()


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_client_that_takes_nothing_is_dropped_with_its_buffers(http):
    """Told to close, a server would wait for as long as that one takes to read."""
    store = MemoryStore()
    gateway = Gateway(store, limits=Limits(write_within_s=3600))
    await publish(store, "vision")
    log, text = store.log(ASYNC), b'{"seq":1,"x":"%b"}' % (60_000 * b"x")
    async with serving(abortable(gateway), http) as (url, server):
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((HOST, httpx.URL(url).port))
            slow.sendall(b"GET /7 HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
            await until(lambda: gateway.status().connections == 1)
            async with asyncio.timeout(30):
                for n in range(10_000):
                    await log.append(f"scan:job:{JOB}", text, id=str(n))
                    await asyncio.sleep(0.005)
                    if gateway.status().closed:
                        break
            assert gateway.status().closed == {"slow": 1}
            await until(lambda: not server.server_state.connections, within_s=2)
        await gateway.aclose()


async def test_under_uvicorn_what_comes_is_written_to_everybody_without_waking_them(monkeypatch):
    """If uvicorn names things otherwise by now, this is how we hear of it."""
    woken = Counter()
    send = RequestResponseCycle.send

    async def counted(self, message):
        woken[message["type"]] += 1
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", counted)
    store = MemoryStore()
    gateway = Gateway(store)
    await publish(store, "vision")
    async with serving(gateway) as (url, _), httpx.AsyncClient(base_url=url) as client:
        async with contextlib.AsyncExitStack() as stack:
            ways = [client.stream("GET", "/7", headers=STREAM) for _ in range(3)]
            readings = [Reading(await stack.enter_async_context(way)) for way in ways]
            for reading in readings:
                await reading.until(lambda f: len(f) == 2)
            before = woken.copy()
            for stage in ("rule", "answer", "reward"):
                await publish(store, stage)
            for reading in readings:
                frames = await reading.until(lambda f: len(f) == 5)
                told = [frame.json().get("stage") for frame in frames]
                assert told == [None, "vision", "rule", "answer", "reward"]
            assert woken == before
            assert gateway.status().events == 12
            await publish(store, "done")
            for reading in readings:
                frames = await reading.until(lambda f: f[-1].event == "end")
                assert [frame.event for frame in frames[-2:]] == ["message", "end"]
        await gateway.aclose()


async def test_whoever_takes_it_late_is_waited_for_and_gets_everything_in_order():
    store = MemoryStore()
    limits = Limits(behind_events=1000, behind_bytes=1 << 24)
    gateway = Gateway(store, limits=limits)
    await publish(store, "vision")
    log, many = store.log(ASYNC), 100
    async with serving(gateway, buffer=4096) as (url, _):
        with socket.socket() as late:
            late.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            late.connect((HOST, httpx.URL(url).port))
            late.sendall(b"GET /7 HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
            await until(lambda: gateway.status().events == 1)
            for n in range(many):
                text = b'{"seq":%d,"x":"%b"}' % (n, 3000 * b"x")
                await log.append(f"scan:job:{JOB}", text, id=str(n))
                await asyncio.sleep(0)
            assert gateway.status().events < many  # it is waited for
            late.setblocking(False)
            said, loop = b"", asyncio.get_running_loop()
            async with asyncio.timeout(20):
                while b'"seq":%d,' % (many - 1) not in said or not said.endswith(b"\n\n\r\n"):
                    said += await loop.sock_recv(late, 1 << 16)
            told = [int(found) for found in re.findall(rb'"seq":(\d+),"x"', said)]
            assert told == list(range(many))
        await gateway.aclose()


@pytest.mark.parametrize("made", [alone, in_fastapi])
async def test_who_asks_twice_on_one_connection_and_leaves_is_let_go_of(made):
    """uvicorn tells the request that waits behind the first, and not the first."""
    store = MemoryStore()
    await publish(store, "vision")
    gateway = Gateway(store, project=lambda event, _: event)
    app, path = made(gateway)
    async with serving(abortable(app)) as (url, _):
        reader, writer = await asyncio.open_connection(HOST, int(url.rpartition(":")[2]))
        words = f"GET {path}/{JOB} HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n"
        writer.write(2 * words.encode())
        await reader.readuntil(b"event: message")
        writer.close()
        await until(lambda: gateway.status().connections == 0, within_s=5)
        assert gateway.status().closed == {"gone": 1}
    await gateway.aclose()


async def test_draining_ends_every_response_as_http_wants_it():
    store = MemoryStore()
    gateway = Gateway(store)
    await publish(store, "vision")
    async with serving(gateway) as (url, _), httpx.AsyncClient(base_url=url) as client:

        async def watch():
            async with client.stream("GET", "/7", headers=STREAM) as response:
                return b"".join([piece async for piece in response.aiter_bytes()])

        crowd = [asyncio.create_task(watch()) for _ in range(20)]
        await until(lambda: gateway.status().events == 20)
        await gateway.drain(within_s=0.5)
        for each in await asyncio.gather(*crowd):  # a body that is cut would raise
            assert [frame.event for frame in frames_of(each)] == ["hello", "message"]
        refused = await client.get("/7", headers=STREAM)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 2
        await gateway.aclose()
