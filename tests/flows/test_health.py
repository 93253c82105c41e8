"""Probes and metrics of relays, workers and rooms, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families

from semel.brokers import MemoryBroker
from semel.errors import BrokerUnavailableError, SettingsError, StoreUnavailableError
from semel.health import serve, server, watch
from semel.health.metrics import GATEWAY, RELAY, ROOMS, ROUTER, WORKER
from semel.health.server import Answer, listening
from semel.inbox import MemoryInbox
from semel.messages import Forked, Full, Tail
from semel.relay import Relay
from semel.rooms.status import RoomsStatus, Times
from semel.stores import MemoryStore
from semel.stores.sql import SQLStore, schema
from semel.stores.sql.outbox_reading import OutboxReader
from semel.worker import Worker
from support.cli_reference import REFERENCE
from support.relay_process import add


async def ask(url, path="/ok", method="GET", *, raw=None):
    """Status, headers and body, as they are on the wire."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.write(raw or f"{method} {path} HTTP/1.1\r\nHost: probe\r\n\r\n".encode())
    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = said.partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    return int(first.split()[1]), dict(h.split(": ", 1) for h in headers), body


# --- the server ---------------------------------------------------------------------------------


async def ok():
    return Answer(HTTPStatus.OK, b"fine\n")


async def broken():
    raise RuntimeError("a defect")


@pytest.fixture
async def small():
    async with listening("127.0.0.1:0", {"/ok": ok, "/broken": broken}) as url:
        yield url


async def test_a_request_is_answered_and_the_connection_closed(small):
    status, headers, body = await ask(small)

    assert (status, body) == (200, b"fine\n")
    assert headers["Content-Length"] == "5"
    assert headers["Connection"] == "close"


async def test_head_has_the_length_and_no_body(small):
    status, headers, body = await ask(small, method="HEAD")

    assert (status, headers["Content-Length"], body) == (200, "5", b"")


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET /ok?verbose=1 HTTP/1.0", 200),
        ("GET /other HTTP/1.1", 404),
        ("POST /ok HTTP/1.1", 405),
        ("GET /broken HTTP/1.1", 500),
        ("GET /ok HTTP/2.0", 400),
        ("hello", 400),
        ("GET //[ HTTP/1.1", 404),
        ("\xff\x00 \xfe HTTP/1.1", 404),
    ],
)
async def test_every_request_gets_an_answer(small, request_line, status):
    got, headers, _ = await ask(small, raw=request_line.encode("latin-1") + b"\r\n\r\n")

    assert got == status
    assert headers.get("Allow") == ("GET, HEAD" if status == 405 else None)
    assert (await ask(small))[0] == 200


async def test_a_path_that_is_not_there_is_told_what_is(small):
    assert (await ask(small, "/"))[2] == b"there is /ok, /broken\n"


async def test_a_head_that_never_ends_is_refused(small):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(small.rsplit(":", 1)[1]))
    writer.write(b"GET /ok HTTP/1.1\r\nX: " + b"x" * server.HEAD_BYTES + b"\r\nY: y")

    said = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert said.startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_comes_too_slowly_is_refused(small, monkeypatch):
    monkeypatch.setattr(server, "WITHIN_S", 0.05)

    assert (await ask(small, raw=b"GET /ok HTT"))[0] == 408


async def test_one_connection_too_many_is_closed(small, monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 2)
    port = int(small.rsplit(":", 1)[1])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    assert await asyncio.wait_for(reader.read(), 10) == b""

    for each in (writer, *(writer for _, writer in idle)):
        each.close()
    async with asyncio.timeout(10):
        while (await ask_or_nothing(small)) != 200:
            await asyncio.sleep(0.01)


async def ask_or_nothing(url):
    try:
        return (await ask(url))[0]
    except (IndexError, OSError):
        return None


async def test_a_client_that_leaves_is_not_missed(small):
    for raw in (b"", b"GET /ok"):
        _, writer = await asyncio.open_connection("127.0.0.1", int(small.rsplit(":", 1)[1]))
        writer.write(raw)
        writer.close()

    assert (await ask(small))[0] == 200


async def test_closing_waits_for_nobody():
    async with listening("127.0.0.1:0", {"/ok": ok}) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"GET /ok")
        await asyncio.sleep(0)
    writer.close()


@pytest.mark.parametrize(
    "address",
    ["", "8080", ":8080", "localhost", "localhost:", "localhost:http", "a:1:2", "u@localhost:1",
     "localhost:1/healthz", "localhost:99999"],
)  # fmt: skip
async def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(SettingsError, match="is not HOST:PORT; write"):
        async with listening(address, {}):
            pass


async def test_an_address_that_is_taken_is_refused(small):
    with pytest.raises(SettingsError, match=r"cannot listen at 127\.0\.0\.1:.*choose another"):
        async with listening(small.removeprefix("http://"), {}):
            pass


def test_an_ipv6_address_may_be_given():
    assert server._parsed("[::1]:8080") == ("::1", 8080)


# --- a relay ------------------------------------------------------------------------------------


class Sulking(MemoryBroker):
    """Answers for a topic what it was told to."""

    def __init__(self):
        super().__init__(shards=2)
        self.says = {}

    async def publish(self, batch):
        answer = self.says.get(batch.topic)
        if isinstance(answer, Exception):
            raise answer
        return answer or await super().publish(batch)


@pytest.fixture
def database(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "FRESH_S", 0.0)
    url = f"sqlite:///{tmp_path}/shop.db"
    schema.init(url)
    return url


@contextlib.asynccontextmanager
async def running(part):
    task = asyncio.create_task(part.run())
    try:
        yield
    finally:
        part.stop()
        await task


@contextlib.asynccontextmanager
async def relaying(database, broker=None, **settings):
    """A relay at work, and where it can be asked."""
    store = SQLStore(database)
    relay = Relay(store, broker or MemoryBroker(shards=2), **settings)
    async with serve(relay, at="127.0.0.1:0") as url, running(relay):
        yield url
    await store.aclose()


async def until(url, path, met):
    """Ask until the answer is as wanted; the body then, as JSON if it is."""
    async with asyncio.timeout(20):
        while True:
            status, headers, body = await ask(url, path)
            json_ = headers["Content-Type"] == "application/json"
            told = json.loads(body) if json_ else metrics_in(body)
            if met(status, told):
                return told
            await asyncio.sleep(0.02)


def metrics_in(body):
    """Each sample by its name and labels."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


async def test_a_relay_at_work_is_alive_ready_and_counted(database):
    add(database, range(30))
    async with relaying(database) as url:
        told = await until(
            url, "/metrics", lambda _, m: m.get(("semel_relay_unpublished", "default")) == 0
        )
        assert told == {
            ("semel_relay_published_total", "default"): 30,
            ("semel_relay_repeated_total", "default"): 0,
            ("semel_relay_refused_total", "default"): 0,
            ("semel_relay_swept_total", "default"): 0,
            ("semel_relay_lag_seconds", "default"): 0,
            ("semel_relay_unpublished", "default"): 0,
            ("semel_relay_shards", "default"): 2,
            ("semel_relay_shards_owned", "default"): 2,
            ("semel_relay_members", "default"): 1,
            ("semel_relay_circuit_open", "default"): 0,
        }
        assert (await ask(url, "/healthz"))[::2] == (200, b"ok\n")
        status, _, body = await ask(url, "/readyz")
        assert status == 200
        ready = json.loads(body)
        assert (ready["ready"], ready["why"]) == (True, [])
        [part] = ready["parts"]
        assert (part["kind"], part["name"], part["owned"]) == ("relay", "default", [0, 1])
        assert (part["published"], part["lag_s"], part["unpublished"]) == (30, 0.0, 0)


async def test_a_topic_that_waits_is_told_and_keeps_nobody_from_being_ready(database):
    broker = Sulking()
    broker.says["slow"] = Full(9, "its readers are too far behind")
    add(database, range(5), topic="slow", aggregates=1)
    async with relaying(database, broker) as url:
        held = ("semel_relay_topic_held", "default", "slow")
        told = await until(url, "/metrics", lambda _, m: held in m)
        assert told["semel_relay_lag_seconds", "default"] > 0
        assert told["semel_relay_unpublished", "default"] == 5
        assert (await ask(url, "/readyz"))[0] == 200
        broker.says.clear()
        await until(url, "/metrics", lambda _, m: held not in m)


async def test_a_shard_that_stands_still_is_not_ready_and_says_why(database):
    broker = Sulking()
    broker.says["orders"] = Forked(Tail(7, "another"))
    add(database, range(5), aggregates=1)
    async with relaying(database, broker) as url:
        told = await until(url, "/readyz", lambda status, _: status == 503)
        assert "restored from an older copy" in told["why"][0]
        [shard] = told["parts"][0]["stopped"]
        assert (await samples(url))["semel_relay_shard_stopped", "default", shard] == 1
        assert (await ask(url, "/healthz"))[0] == 200


async def samples(url):
    return metrics_in((await ask(url, "/metrics"))[2])


async def test_a_broker_that_does_not_answer_is_an_open_circuit(database):
    broker = Sulking()
    broker.says["orders"] = BrokerUnavailableError("the broker is down")
    add(database, range(5), aggregates=1)
    async with relaying(database, broker) as url:
        told = await until(url, "/readyz", lambda status, _: status == 503)
        assert told["why"] == ["the broker is down"]
        assert (await samples(url))["semel_relay_circuit_open", "default"] == 1
        broker.says.clear()
        await until(url, "/readyz", lambda status, _: status == 200)


async def test_a_store_that_does_not_answer_is_not_ready_and_has_no_lag(database, monkeypatch):
    async with relaying(database) as url:
        await until(url, "/readyz", lambda status, _: status == 200)

        async def down(_):
            raise StoreUnavailableError("the store is down")

        monkeypatch.setattr(OutboxReader, "lag", down)
        status, _, body = await ask(url, "/readyz")
        assert (status, json.loads(body)["why"]) == (503, ["the store is down"])
        assert ("semel_relay_lag_seconds", "default") not in await samples(url)


async def test_nobody_waits_for_a_store_that_hangs(database, monkeypatch):
    monkeypatch.setattr(watch, "PATIENCE_S", 0.05)
    asked = []

    async def hanging(_):
        asked.append(1)
        await asyncio.sleep(3600)

    monkeypatch.setattr(OutboxReader, "lag", hanging)
    async with relaying(database) as url:
        for _ in range(3):
            status, _, body = await ask(url, "/readyz")
            assert status == 503
            assert "the store has not answered for 0." in json.loads(body)["why"][0]
        assert len(asked) == 1, "each probe leaves another question behind"


async def test_many_probes_are_one_question(database, monkeypatch):
    monkeypatch.setattr(watch, "FRESH_S", 3600.0)
    asked, plain = [], OutboxReader.lag

    async def counted(reader):
        asked.append(1)
        return await plain(reader)

    monkeypatch.setattr(OutboxReader, "lag", counted)
    async with relaying(database) as url:
        await asyncio.gather(*(ask(url, path) for path in ("/readyz", "/metrics") * 5))
    assert len(asked) == 1


async def test_a_relay_that_does_not_turn_is_not_alive(database, monkeypatch):
    async with relaying(database) as url:
        assert (await ask(url, "/healthz"))[0] == 200
        monkeypatch.setattr("semel.shards.Shards.turning", False)
        assert (await ask(url, "/healthz"))[::2] == (503, b"relay default: does not turn\n")


async def test_without_its_library_the_metrics_say_what_to_install(database, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "semel.health.metrics", raising=False)
    async with relaying(database) as url:
        status, _, body = await ask(url, "/metrics")
        assert status == 501
        assert b"pip install 'semel[metrics]'" in body
        assert (await ask(url, "/healthz"))[0] == 200


# --- a worker -----------------------------------------------------------------------------------


async def test_a_worker_at_work_is_alive_ready_and_counted(database):
    broker, inbox = MemoryBroker(shards=2), MemoryInbox()
    worker = Worker(broker, "billing", inbox)

    @worker.on(topic="orders")
    async def placed(message):
        if message.data["n"] == 7:
            raise RuntimeError("no")

    add(database, range(10), aggregates=10)
    store = SQLStore(database)
    relay = Relay(store, broker)
    async with serve(relay, worker, at="127.0.0.1:0") as url, running(relay), running(worker):
        applied, held = (f"semel_worker_{each}_total" for each in ("applied", "held"))
        told = await until(
            url,
            "/metrics",
            lambda _, m: (m[applied, "billing", "orders"], m[held, "billing", "orders"]) == (9, 1),
        )
        assert told["semel_worker_failed_total", "billing", "orders"] >= 1
        assert told["semel_worker_seen_total", "billing", "orders"] == 0
        assert told["semel_worker_unreadable_total", "billing", "orders"] == 0
        assert told["semel_worker_shards_owned", "billing"] == 2
        assert told["semel_worker_circuit_open", "billing"] == 0
        assert told["semel_worker_lag_seconds", "billing"] > 0
        assert told["semel_relay_published_total", "default"] == 10
        _, _, body = await ask(url, "/readyz")
        kinds = [(part["kind"], part["ready"]) for part in json.loads(body)["parts"]]
        assert kinds == [("relay", True), ("worker", True)]
    await store.aclose()


async def test_two_of_one_name_cannot_be_told_apart(database):
    store = SQLStore(database)
    relays = [Relay(store, MemoryBroker()) for _ in range(2)]
    with pytest.raises(SettingsError, match="two parts are called relay default"):
        async with serve(*relays, at="127.0.0.1:0"):
            pass
    await store.aclose()


# --- rooms --------------------------------------------------------------------------------------


class Tables:
    """Rooms whose status is what a test says."""

    def __init__(self, name="table", **told):
        self.store = MemoryStore()
        self.shown = f"rooms {name}"
        self.told = RoomsStatus(name, **told)

    def status(self):
        return self.told


def times(*seconds):
    taken = Times()
    for each in seconds:
        taken.add(each)
    return taken.seen()


COUNTED = ("requests", "repeated", "accepted", "conflicts", "timeouts", "updates", "gaps")


async def test_rooms_at_work_are_alive_ready_and_counted():
    tables = Tables(
        rooms=3, connections=40, joined=50, requests=100, repeated=7, accepted=80, conflicts=2,
        timeouts=4, updates=4000, gaps=5, refused={"NOT_YOUR_TURN": 13},
        snapshots={"join": 40, "gap": 5, "recovered": 1}, closed={"slow": 1},
        action_s=times(0.003, 0.003, 60.0),
    )  # fmt: skip
    async with serve(tables, at="127.0.0.1:0") as url:
        told = await samples(url)
        for name in ("rooms", "connections", "joined"):
            assert told[f"semel_rooms_{name}", "table"] == getattr(tables.told, name)
        for name in COUNTED:
            assert told[f"semel_rooms_{name}_total", "table"] == getattr(tables.told, name)
        assert told["semel_rooms_refused_total", "NOT_YOUR_TURN", "table"] == 13
        assert told["semel_rooms_snapshots_total", "table", "gap"] == 5
        assert told["semel_rooms_snapshots_total", "table", "recovered"] == 1
        assert told["semel_rooms_snapshots_total", "table", "stale"] == 0
        assert told["semel_rooms_closed_total", "table", "slow"] == 1
        assert told["semel_rooms_action_seconds_count", "table"] == 3
        assert told["semel_rooms_circuit_open", "table"] == 0
        assert told["semel_rooms_draining", "table"] == 0
        assert (await ask(url, "/healthz"))[::2] == (200, b"ok\n")
        status, _, body = await ask(url, "/readyz")
        [part] = json.loads(body)["parts"]
        assert (status, part["kind"], part["ready"], part["requests"]) == (200, "rooms", True, 100)
        assert part["action_s"]["sum_s"] == pytest.approx(60.006)


@pytest.mark.parametrize(
    ("told", "why", "metric"),
    [
        ({"outage": "the log is down"}, "the log is down", "semel_rooms_circuit_open"),
        ({"draining": True}, "it is about to end", "semel_rooms_draining"),
    ],
)
async def test_rooms_that_cannot_be_played_in_are_not_ready(told, why, metric):
    async with serve(Tables(**told), at="127.0.0.1:0") as url:
        status, _, body = await ask(url, "/readyz")
        assert (status, json.loads(body)["why"]) == (503, [why])
        assert (await samples(url))[metric, "table"] == 1
        assert (await ask(url, "/healthz"))[0] == 200


async def test_rooms_of_two_names_are_told_apart():
    parts = (Tables("table", rooms=1), Tables("lobby", rooms=2))
    async with serve(*parts, at="127.0.0.1:0") as url:
        told = await samples(url)
    assert (told["semel_rooms_rooms", "table"], told["semel_rooms_rooms", "lobby"]) == (1, 2)


def test_the_reference_names_every_metric():
    page = REFERENCE.read_text()
    named = re.findall(r"^\| `(semel_[\w{},]+)` \|", page, re.MULTILINE)
    documented = {
        name.replace("{relay,worker,router}", kind)
        for name in named
        for kind in ("relay", "worker", "router")
    }
    told = [one.family("", []) for one in (*RELAY, *WORKER, *ROUTER, *GATEWAY, *ROOMS)]
    there = {f"{one.name}{'_total' if one.type == 'counter' else ''}" for one in told}
    assert documented == there
