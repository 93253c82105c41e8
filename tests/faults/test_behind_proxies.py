"""A gateway, a room server and an API behind nginx and HAProxy, set up as the docs say."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from semel.bus import Publisher, get_next_seq
from semel.client.feed import Update, feed
from semel.client.room import room
from semel.stores.redis import RedisStore
from support import deployed_app
from support.binaries import Unavailable
from support.process import HOST, free_port, new_folder
from support.proxies import start_proxy
from support.web import TESTS, Python, Web, ask

# In place of the page's 60 s. Servers look for due heartbeats once a second.
TIMEOUT_S = 3.0


class Deployed(Web):
    def probe(self):
        httpx.get(f"{self.url}/up", timeout=2)


def start_server(store_url, folder):
    variables = (("WEB_STORE", store_url), ("WEB_FOLDER", str(folder)))
    python = Python("uvicorn", Path(sys.executable), "venv", variables)
    port = free_port()
    words = [
        *("-m", "uvicorn", "--factory", "support.deployed_app:app", "--app-dir", str(TESTS)),
        *("--host", HOST, "--port", str(port), "--lifespan", "off", "--log-level", "warning"),
    ]
    return Deployed(python, words, port, new_folder("web")).start()


@pytest.fixture(scope="module")
def store_url(redis_server):
    redis_server.ensure_running()
    redis_server.empty()
    return redis_server.url


@pytest.fixture(scope="module")
def bank(tmp_path_factory):
    """The folder of the file with a line per payment."""
    return tmp_path_factory.mktemp("bank")


@pytest.fixture(scope="module")
def servers(store_url, bank):
    with ThreadPoolExecutor() as starting:
        made = list(starting.map(start_server, [store_url] * 2, [bank] * 2))
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def behind(servers):
    """Starts a proxy in front of the two servers, or of others."""
    made = []

    def start(kind, ports=None, **replaced):
        ports = ports or tuple(server.port for server in servers)
        try:
            made.append(start_proxy(kind, ports, **replaced))
        except Unavailable as absent:
            pytest.skip(str(absent))
        return made[-1]

    yield start
    for proxy in made:
        proxy.stop()


@pytest.fixture
async def publish(store_url):
    store = RedisStore(store_url)
    async with Publisher(store) as events:

        async def one(job, number):
            await events.publish(job, "vision", get_next_seq("vision", number), number)

        yield one
    await store.aclose()


proxies = pytest.mark.parametrize("kind", ["nginx", "haproxy"])


# --- streams ------------------------------------------------------------------------------------


@proxies
async def test_event_arrives_within_a_second_and_reconnect_resumes(behind, kind, publish):
    job, proxy = f"{kind}-1", behind(kind)
    await publish(job, 1)
    async with feed(f"http://{proxy.address}/jobs/{job}") as events:
        assert (await anext(events)).data["data"] == 1
        for number in (2, 3):
            began = time.monotonic()
            await publish(job, number)
            assert (await anext(events)).data["data"] == number
            assert time.monotonic() - began < 1
        cursor = events.cursor
    await publish(job, 4)
    async with feed(f"http://{proxy.address}/jobs/{job}", after=cursor) as events:
        update = await anext(events)
    assert (type(update), update.data["data"]) == (Update, 4)


@proxies
async def test_silent_stream_and_room_outlive_the_proxys_timeout(behind, kind, publish):
    """Heartbeats keep both open when nothing happens for longer than the timeout."""
    job, proxy = f"{kind}-2", behind(kind, _60s=f"{TIMEOUT_S:.0f}s")
    await publish(job, 1)
    url, page = f"http://{proxy.address}/jobs/{job}", f"ws://{proxy.address}/rooms"
    async with httpx.AsyncClient() as client, connect(page) as socket:
        join = {"type": "JOIN", "requestId": "1", "payload": {"tableId": job, "token": "ann"}}
        await socket.send(json.dumps(join))
        async with client.stream("GET", url, headers={"accept": "text/event-stream"}) as stream:
            await asyncio.sleep(TIMEOUT_S + 1.0)
            await publish(job, 2)
            await socket.send(json.dumps({"type": "LEAVE", "payload": {"tableId": job}}))
            async with asyncio.timeout(5):
                lines = stream.aiter_lines()
                while '"data":2' not in await anext(lines):
                    pass
                while json.loads(await socket.recv())["type"] != "LEFT":
                    pass


# --- rooms --------------------------------------------------------------------------------------


@proxies
async def test_room_actions_through_proxy_count_once_on_both_servers(behind, kind):
    proxy = behind(kind)
    url = f"ws://{proxy.address}/rooms"
    async with (
        room(url, table_id=f"{kind}-t", token="ann") as ann,
        room(url, table_id=f"{kind}-t", token="bob") as bob,
    ):
        for number, table in enumerate([ann, bob, ann, bob], start=1):
            assert (await table.act({"actionType": "add"}, request_id=f"r{number}")).reply == number
        again = await bob.act({"actionType": "add"}, request_id="r4")
    assert (again.reply, again.cached) == (4, True)


@proxies
async def test_page_of_the_proxys_own_host_may_open_a_room(behind, kind):
    proxy = behind(kind)
    async with connect(f"ws://{proxy.address}/rooms", origin=f"http://{proxy.address}"):
        pass
    with pytest.raises(InvalidStatus, match="403"):
        await connect(f"ws://{proxy.address}/rooms", origin="http://elsewhere.example")


# --- the commands -------------------------------------------------------------------------------

CROWD = 12


@pytest.fixture(scope="module")
def commands(store_url):
    """`semel gateway` and `semel rooms`, which limit unfinished request heads per address."""
    limits = ("--host", HOST, "--per-address", "2", "--quiet")
    words = {
        "gateway": ["gateway", store_url, "--base", "/jobs", "--wait"],
        "rooms": ["rooms", "support.deployed_app:Counter", "--store", store_url, "--trust"],
    }
    semel = Python("semel", Path(sys.executable), "venv", (("PYTHONPATH", str(TESTS)),))

    def start(name):
        port = free_port()
        line = ["-m", "semel", *words[name], *limits, "--port", str(port)]
        return Deployed(semel, line, port, new_folder(name)).start()

    with ThreadPoolExecutor() as starting:
        made = dict(zip(words, starting.map(start, words), strict=True))
    yield made
    for server in made.values():
        server.stop()


@proxies
async def test_gateway_command_serves_many_viewers_of_one_proxy(behind, kind, commands, publish):
    """To the gateway they all have the proxy's address."""
    job, port = f"{kind}-3", commands["gateway"].port
    url = f"http://{behind(kind, (port, port)).address}/jobs/{job}"
    await publish(job, 1)

    async def view(ready):
        async with feed(url) as events:
            assert (await anext(events)).data["data"] == 1
            ready.release()
            return (await anext(events)).data["data"]

    ready = asyncio.Semaphore(0)
    viewers = [asyncio.create_task(view(ready)) for _ in range(CROWD)]
    async with asyncio.timeout(20):
        for _ in viewers:
            await ready.acquire()
        await publish(job, 2)
        assert await asyncio.gather(*viewers) == [2] * CROWD


@proxies
async def test_rooms_command_serves_many_members_of_one_proxy(behind, kind, commands):
    port = commands["rooms"].port
    url = f"ws://{behind(kind, (port, port)).address}/rooms"

    async def add(user):
        async with room(url, table_id=f"{kind}-crowd", token=user) as table:
            return (await table.act({"actionType": "add"})).reply

    async with asyncio.timeout(20):
        replies = await asyncio.gather(*(add(f"user-{n}") for n in range(CROWD)))
    assert sorted(replies) == [*range(1, CROWD + 1)]


# --- restarts -----------------------------------------------------------------------------------


async def respond(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
    await writer.drain()
    writer.close()


@proxies
async def test_restart_of_one_server_after_the_other_leaves_no_request_unserved(kind, behind):
    """A server that was away for a moment is used again when the other one is away."""
    ports = free_port(), free_port()
    running = {port: await asyncio.start_server(respond, HOST, port) for port in ports}
    proxy, statuses = behind(kind, ports), []
    async with httpx.AsyncClient(base_url=f"http://{proxy.address}") as client:
        for port in ports:
            running[port].close()
            await running[port].wait_closed()
            statuses += [(await client.get("/")).status_code for _ in range(4)]
            running[port] = await asyncio.start_server(respond, HOST, port)
    for server in running.values():
        server.close()
    assert statuses == [200] * 8


# --- retries ------------------------------------------------------------------------------------


def effects(bank):
    file = bank / "effects"
    return file.read_text().split() if file.exists() else []


@pytest.fixture
async def one_dies(store_url, bank, servers, behind, monkeypatch):
    """Start a proxy in front of a server that never answers, and of one that does.

    The first one carries out a request, records its response, and drops the connection.
    """
    monkeypatch.setenv("WEB_STORE", store_url)
    monkeypatch.setenv("WEB_FOLDER", str(bank))
    (bank / "effects").unlink(missing_ok=True)
    app = deployed_app.app()

    async def serve(reader, writer):
        line, _, head = (await reader.readuntil(b"\r\n\r\n")).decode().partition("\r\n")
        headers = dict(row.lower().split(": ", 1) for row in head.split("\r\n") if row)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = line.split()
        await ask(app, path, method=method, key=headers.get("idempotency-key"), body=body)
        writer.close()

    first = await asyncio.start_server(serve, HOST, free_port())
    port = first.sockets[0].getsockname()[1]
    yield lambda kind: behind(kind, (port, servers[1].port))
    first.close()
    await first.wait_closed()


@proxies
async def test_payment_with_key_repeated_by_proxy_has_one_effect(kind, one_dies, bank):
    """The second server replays the response that the first one recorded and did not send."""
    proxy = one_dies(kind)
    async with httpx.AsyncClient(base_url=f"http://{proxy.address}") as client:
        headers = {"idempotency-key": f"{kind}-pay"}
        answers = [await client.post("/payments", headers=headers, json={}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201] * 3, [a.text for a in answers]
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == ["true"] * 3
    assert effects(bank) == [f"{os.getpid()}"], "only the first server was paid"


@pytest.mark.parametrize(
    ("kind", "method", "path"),
    [
        ("nginx", "POST", "/orders"),
        ("nginx", "POST", "/payments/5/refund"),  # which the rule for /payments does not match
        ("haproxy", "POST", "/orders"),
        ("haproxy", "PUT", "/orders"),
    ],
)
async def test_request_without_key_is_not_repeated_by_proxy(kind, method, path, one_dies, bank):
    proxy, statuses = one_dies(kind), []
    async with httpx.AsyncClient(base_url=f"http://{proxy.address}") as client:
        while f"{os.getpid()}" not in effects(bank):
            statuses.append((await client.request(method, path, json={})).status_code)
    assert statuses[-1] == 502
    assert len(effects(bank)) == len(statuses)
