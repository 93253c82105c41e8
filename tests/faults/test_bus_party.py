"""From a worker's publish to a client's loop, while everything between them dies.

Workers, routers and gateways are killed and frozen every few hundred milliseconds, every connection
is cut behind any byte, a client's as well as those to Redis, rings are lost, and Redis is killed
and restarted. Each client keeps a record; when the dust has settled, each is its job's events, each
once, in order, and no reset, since nothing was lost. Where a failover does lose something, whoever
had it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter

import pytest

from semel.bus import Publisher
from semel.bus.jobs import stream_of
from semel.client.feed import Reset, feed
from semel.client.httpx import AsyncWorld
from semel.colour import ASYNC
from semel.errors import StoreUnavailableError
from semel.settings import as_log_store
from support import bus_party as party
from support import servers
from support.nursery import Nursery
from support.process import HOST, free_port
from support.proxy import Proxy
from support.routing import until

# Between one misfortune and the next, and for how long they go on.
EVERY_S = (0.1, 0.3)
SECONDS = float(os.environ.get("SEMEL_BUS_PARTY_SECONDS", "3.5"))
SETTLES_WITHIN_S = 60.0

CLIENTS = 3  # per job


class Party:
    """Its processes, and their misfortunes."""

    def __init__(self, folder, seed):
        self.chance = random.Random(seed)
        self.running = {}
        self.frozen = {}
        self.counts = Counter()
        self.redis_ways = []
        self._ways = contextlib.ExitStack()
        with (folder / "party.log").open("wb") as errors:
            self._nursery = Nursery("support.bus_party", errors)

    def start(self, *words):
        line = " ".join(map(str, words))
        self.running[self._nursery.start(words=line)] = line

    def way_to(self, port, *, bytes_between=8000):
        """Another port for it, behind which a connection is cut now and then, within a reply."""
        proxy = self._ways.enter_context(Proxy(port))
        proxy.cut_after_bytes(*(self.chance.randrange(bytes_between) for _ in range(60)))
        return proxy

    def way_to_redis(self, server, url):
        """As above, as a URL. Redis says more to a process than that to a client."""
        proxy = self.way_to(server.port, bytes_between=40_000)
        self.redis_ways.append(proxy)
        return url.replace(f":{server.port}", f":{proxy.port}")

    def hurt(self):
        """Kill or freeze somebody; a worker that has finished begins anew."""
        self.thaw(by=time.monotonic())
        able = [pid for pid in self.running if pid not in self.frozen]
        if not able:
            return
        pid = self.chance.choice(able)
        role = self.running[pid].split()[0]
        if self.chance.random() < 0.5:
            self.counts[f"killed {role}"] += 1
            self._nursery.signal(pid, signal.SIGKILL)
            self.start(self.running.pop(pid))
        else:
            self.counts[f"froze {role}"] += 1
            self._nursery.signal(pid, signal.SIGSTOP)
            self.frozen[pid] = time.monotonic() + self.chance.uniform(0.5, 2 * party.LEASE_S)

    def thaw(self, by=float("inf")):
        for pid, due in list(self.frozen.items()):
            if due <= by:
                del self.frozen[pid]
                self._nursery.signal(pid, signal.SIGCONT)

    def close(self):
        self.thaw()
        self._nursery.close()
        self._ways.close()


@pytest.fixture
def made(tmp_path):
    made = Party(tmp_path, seed=7)
    yield made
    made.close()


class Hasty(AsyncWorld):
    """Real time, and pauses that are short: how long they are is no matter here."""

    async def sleep(self, seconds):
        await super().sleep(min(seconds, 0.1))


class Client:
    """Follows a job to its end, and keeps what it was handed."""

    def __init__(self, proxy, job):
        self.job = job
        self.record = []
        self.resets = []
        self.cursor = None
        self.url = f"http://{HOST}:{proxy.port}/{job}"

    async def follow(self):
        async with feed(self.url, after=self.cursor, silence_s=5.0, world=Hasty()) as events:
            async for event in events:
                if isinstance(event, Reset):
                    self.resets.append(event)
                    self.record = [None] * event.position.offset
                else:
                    self.record.append(event)

    def check(self):
        assert [event.position.offset for event in self.record] == [
            *range(1, len(party.EVENTS) + 1)
        ]
        assert [(e.data["stage"], e.data["seq"]) for e in self.record] == party.EVENTS
        for event in self.record:
            assert event.data["job_id"] == self.job
            assert event.data["data"] == party.said(self.job, event.data["seq"])
        assert self.resets == []


async def play(made, gateway_ports, misfortunes):
    """Hurt everybody for a while, with clients connected; then let the clients come to the end."""
    ways = [made.way_to(port) for port in gateway_ports]
    clients = [Client(ways[n % 2], job) for job in party.JOBS for n in range(CLIENTS)]
    following = [asyncio.create_task(client.follow()) for client in clients]
    began = time.monotonic()
    due = [(began + at * SECONDS, what) for at, what in misfortunes]
    while time.monotonic() < began + SECONDS:
        await asyncio.sleep(made.chance.uniform(*EVERY_S))
        for each in [d for d in due if d[0] <= time.monotonic()]:
            due.remove(each)
            made.counts[each[1].__name__] += 1
            await asyncio.to_thread(each[1])
        made.hurt()
    made.thaw()
    try:
        async with asyncio.timeout(SETTLES_WITHIN_S):
            await asyncio.gather(*following)
    except TimeoutError:
        left = [(client.job, len(client.record)) for client in clients]
        raise AssertionError(f"{left} have not come to an end; {made.counts}") from None
    cuts = [way.cuts for way in (*ways, *made.redis_ways)]
    print(f"{dict(made.counts)}, cut {cuts}, {time.monotonic() - began:.1f} s")  # noqa: T201
    assert all(cuts), "somebody was never cut off"
    for role in {line.split()[0] for line in made.running.values()}:
        assert made.counts[f"killed {role}"] + made.counts[f"froze {role}"], f"no {role} was hurt"
    for client in clients:
        client.check()


def deaf(server):
    def pubsub_connections_were_killed():
        servers.command(server.port, "CLIENT", "KILL", "TYPE", "pubsub")

    return pubsub_connections_were_killed


def dies(server):
    def redis_was_killed():
        server.restart()

    return redis_was_killed


@pytest.mark.slow
async def test_without_a_router_everybody_gets_everything_once(made, redis_server, redis_url):
    ports, url = [free_port(), free_port()], made.way_to_redis(redis_server, redis_url)
    for port in ports:
        made.start("gateway", url, port)
    for seed in range(2):
        made.start("work", url, 0, seed)
    misfortunes = [(n / 10, deaf(redis_server)) for n in range(1, 10)]
    await play(made, ports, [*misfortunes, (0.4, dies(redis_server)), (0.8, dies(redis_server))])


@pytest.fixture
def workers_redis():
    server = servers.start_redis()
    yield server
    server.stop()


@pytest.fixture
def quiet_url(redis_server, redis_url):
    """Of a Redis at which nobody may ring, nor listen."""
    rights = ("on", ">s3cret", "~semel:*", "+@all", "resetchannels")
    servers.command(redis_server.port, "ACL", "SETUSER", "quiet", *rights)
    yield redis_url.replace("redis://", "redis://quiet:s3cret@")
    servers.command(redis_server.port, "ACL", "DELUSER", "quiet")


@pytest.mark.slow
async def test_with_routers_between_two_servers_and_no_bell_everybody_gets_everything_once(
    made, redis_server, quiet_url, workers_redis
):
    ports = [free_port(), free_port()]
    workers = made.way_to_redis(workers_redis, workers_redis.url)
    gateways = made.way_to_redis(redis_server, quiet_url)
    for port in ports:
        made.start("gateway", gateways, port)
    for seed in range(2):
        made.start("work", workers, party.SHARDS, seed)
        made.start("router", workers, gateways)
    await play(made, ports, [(0.5, dies(workers_redis))])


# --- a failover that loses something ------------------------------------------------------------


class Publishing:
    """Publishes in the order it is told to, as often as it takes."""

    def __init__(self, url):
        self.store = as_log_store(url)
        self._publisher = Publisher(self.store, stages=party.STAGES)

    async def publish(self, job, *seqs):
        for seq in seqs:
            stage = "done" if seq == 1000 else "work"
            async with asyncio.timeout(SETTLES_WITHIN_S):
                while True:
                    try:
                        await self._publisher.publish(job, stage, seq, party.said(job, seq))
                        break
                    except StoreUnavailableError:
                        await asyncio.sleep(0.1)

    async def log(self, job):
        page = await self.store.log(ASYNC).read(stream_of("scan", job))
        return [(entry.position, json.loads(entry.data)) for entry in page.entries]


@pytest.fixture
async def publishing(redis_sentinel_url):
    publishing = Publishing(f"{redis_sentinel_url}?socket_timeout=1")
    yield publishing
    await publishing.store.aclose()


@pytest.mark.slow
async def test_a_failover_that_loses_events_resets_whoever_had_them_and_nobody_else(
    made, redis_sentinel, redis_sentinel_url, publishing
):
    port, (hit, spared) = free_port(), party.JOBS[:2]
    made.start("gateway", redis_sentinel_url, port)
    master, replica = redis_sentinel.master, redis_sentinel.replica
    await publishing.publish(hit, 1, 2, 3)
    await publishing.publish(spared, 1, 2, 3)
    with Proxy(port) as proxy:
        concerned, away, other = Client(proxy, hit), Client(proxy, hit), Client(proxy, spared)
        following = [asyncio.create_task(client.follow()) for client in (concerned, other)]
        await reading(away, 3)
        await until(lambda: in_step(master, replica), "the replica to have everything")
        with replica.paused():
            servers.command(master.port, "CLIENT", "KILL", "TYPE", "replica")
            await publishing.publish(hit, 4, 5)
            await until(lambda: len(concerned.record) == 5, "everybody to have what will be lost")
            master.kill()
        await publishing.publish(hit, 6, 7, 1000)
        await publishing.publish(spared, 4, 1000)
        # Before its gateway knows of the failover, it would be told what is lost, and of that.
        await until(lambda: concerned.resets, "the reset")
        following.append(asyncio.create_task(away.follow()))
        async with asyncio.timeout(SETTLES_WITHIN_S):
            await asyncio.gather(*following)

    log = await publishing.log(hit)
    assert [event["seq"] for _, event in log] == [1, 2, 3, 6, 7, 1000]
    (reset,) = concerned.resets
    assert reset.reason in {"ahead", "forked"}
    assert (away.resets, other.resets) == ([], [])
    assert told(away) == [*log]
    assert told(concerned) == log[reset.position.offset :]
    shown = {seq for _, event in log[: reset.position.offset] for seq in [event["seq"]]}
    assert reset.state["stages"]["work"]["seq"] == max(shown & {1, 2, 3, 6, 7})
    assert told(other) == await publishing.log(spared)


async def reading(client, count):
    """Follow for so many events, and leave."""
    async with feed(client.url, world=Hasty()) as events:
        async for event in events:
            client.record.append(event)
            if len(client.record) == count:
                client.cursor = events.cursor
                return


def told(client):
    return [(event.position, event.data) for event in client.record if event is not None]


def in_step(master, replica):
    offsets = [servers.replication(server)["master_repl_offset"] for server in (master, replica)]
    return offsets[0] == offsets[1]
