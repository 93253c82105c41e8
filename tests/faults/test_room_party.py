"""Eight clients play cards over lossy lines while the servers they play through die.

Servers are killed and frozen every few hundred milliseconds, every connection is cut behind any
byte, frozen and slow, a client's as well as those to the store. When the dust has settled, the log
says what happened: each accepted request once, one version after another, and no chip more or less
than there was. Every client has the server's view of it, and was never sent another one's card.

    SEMEL_ROOM_PARTY_SECONDS=30      how long each party lasts in `make test`
    SEMEL_TORTURE_MINUTES=30         and in `make torture`
    SEMEL_TORTURE_ROUND=17           what their seeds begin with
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
from sqlalchemy.engine import make_url

from semel.colour import ASYNC
from semel.rooms import Rooms
from semel.stores.sql import init
from support import room_party as party
from support.card_table import TOTAL, chips_in, turn_of
from support.nursery import Nursery
from support.process import HOST, free_port
from support.proxy import Proxy
from support.routing import until

SECONDS = float(os.environ.get("SEMEL_ROOM_PARTY_SECONDS", "2.5"))
MINUTES = float(os.environ.get("SEMEL_TORTURE_MINUTES", "30"))
ROUND = int(os.environ.get("SEMEL_TORTURE_ROUND", "0"))

# Between one misfortune and the next.
EVERY_S = (0.05, 0.15)
FROZEN_S = (0.1, 0.8)
SETTLES_WITHIN_S = 60.0

# So much is to be accepted while they are hurt, or nothing was shown.
ENOUGH = 20
HURTS = ("killed", "froze")
ENOUGH_HURT = 3

SERVERS = 3
SEATED = ("ann", "bob", "cid", "dan", "eve", "flo")

# A deadline is by the store's clock, which a server knows as well as its line to the store is fast.
# Those here are cut, frozen and slow.
CLOCKS_DIFFER_S = 0.25


class Party:
    """Its servers, the ways to them, and their misfortunes."""

    def __init__(self, folder, seed):
        self.seed = seed
        self.chance = random.Random(seed)
        self.counts = Counter()
        self.ports = [free_port() for _ in range(SERVERS)]
        self.running = {}
        self.thaws = []
        self.errors = folder / "party.log"
        self._ways = contextlib.ExitStack()
        self.store_ways = []
        self.ways = [self.way_to(port) for port in self.ports]
        self.front = self.way_to(self.ports[0])  # leads to one of them, and then to another
        with self.errors.open("wb") as errors:
            self._nursery = Nursery("support.room_party", errors)

    def way_to(self, port):
        """Another port for it, behind which a connection is cut now and then, within a message."""
        proxy = self._ways.enter_context(Proxy(port))
        self._arm(proxy)
        return proxy

    def _arm(self, proxy):
        between = 200_000 if proxy in self.store_ways else 20_000
        proxy.cut_after_bytes(*(self.chance.randrange(between) for _ in range(1000)))

    def way_to_store(self, port):
        self.store_ways.append(self.way_to(port))
        return self.store_ways[-1].port

    def start(self, url):
        for port in self.ports:
            self._start(url, port)

    def _start(self, url, port):
        self.running[port] = self._nursery.start(words=f"serve {url} {port}"), url

    def hurt(self, *, rarely=False):
        self.thaw(by=time.monotonic())
        if rarely and self.chance.random() < 0.7:
            return
        kind = self.chance.choices(["killed", "froze", "cut", "stalled"], [4, 4, 2, 1])[0]
        getattr(self, f"_{kind}")()

    def _killed(self):
        port = self.chance.choice(self.ports)
        pid, url = self.running[port]
        self.counts["killed"] += 1
        self._nursery.signal(pid, signal.SIGKILL)
        self._start(url, port)

    def _froze(self):
        pid, _ = self.running[self.chance.choice(self.ports)]
        self.counts["froze"] += 1
        self._nursery.signal(pid, signal.SIGSTOP)
        self._later(lambda: self._nursery.signal(pid, signal.SIGCONT))

    def _cut(self):
        self.counts["cut"] += 1
        self.front.target = HOST, self.chance.choice(self.ports)
        self.chance.choice([*self.ways, self.front, *self.store_ways]).cut()

    def _stalled(self):
        way = self.chance.choice(self.ways + self.store_ways)
        self.counts["stalled"] += 1
        way.freeze()
        self._later(lambda: self._flows(way))

    def _flows(self, way):
        way.pass_through()
        self._arm(way)

    def _later(self, what):
        self.thaws.append((time.monotonic() + self.chance.uniform(*FROZEN_S), what))

    def thaw(self, by=float("inf")):
        due = [each for each in self.thaws if each[0] <= by]
        self.thaws = [each for each in self.thaws if each[0] > by]
        for _, what in due:
            what()

    def settle(self):
        """From now on, nobody is hurt."""
        self.thaw()
        for way in (*self.ways, self.front, *self.store_ways):
            way.pass_through()

    def close(self):
        self.settle()
        self._nursery.close()
        self._ways.close()


@pytest.fixture
def parties(tmp_path):
    """Parties that end with the test."""
    made = []

    def make(seed):
        made.append(Party(tmp_path, 10 * ROUND + seed))
        return made[-1]

    yield make
    for each in made:
        each.close()


def clients_of(made):
    """Six who play, half of them by our own client; one who never sits down, and one who looks."""
    ports, front, seed = [way.port for way in made.ways], made.front.port, made.seed
    by_hand = [party.Player(u, ports, seed, is_numbered=u != "bob") for u in SEATED[:3]]
    ours = [party.Sitter(user, front, seed) for user in SEATED[3:]]
    idle = party.Player("guy", ports, seed, sits=False)
    return [*by_hand, *ours, idle, party.Sitter("hal", front, seed, spectates=True)]


async def play(made, direct, seconds):
    """Play and hurt for a while; then look at what came of it, by the store itself."""
    clients = clients_of(made)
    living = [asyncio.create_task(client.live()) for client in clients]
    try:
        await until(lambda: all(each.position for each in clients), "everybody", SETTLES_WITHIN_S)
        began = time.monotonic()
        is_over = asyncio.Event()
        playing = [asyncio.create_task(client.play(is_over)) for client in clients]
        while time.monotonic() < began + seconds or not was_enough(made, clients):
            await asyncio.sleep(made.chance.uniform(*EVERY_S))
            made.hurt(rarely=time.monotonic() > began + seconds)
            check_all_live(living)
            assert time.monotonic() < began + seconds + SETTLES_WITHIN_S, "nobody gets on"
        made.settle()
        is_over.set()
        async with asyncio.timeout(SETTLES_WITHIN_S), Rooms(direct, party.ROOM) as rooms:
            await alive(asyncio.gather(*playing), living)
            await alive(clients[0].act({"actionType": "deal"}), living)
            await settled(rooms, clients, living)
            await alive(asyncio.gather(*(client.ask_again(8) for client in clients)), living)
            log = await audited(rooms)
            for client in clients:
                check(client, log, await rooms.standing(party.TABLE))
        tell(made, clients, log, time.monotonic() - began)
    except BaseException:
        print(f"seed {made.seed}, {dict(made.counts)}")  # noqa: T201
        print(made.errors.read_text()[-4000:])  # noqa: T201
        raise
    finally:
        for task in living:
            task.cancel()
        await asyncio.gather(*living, return_exceptions=True)


def was_enough(made, clients):
    """Has so much happened to them, and in spite of it, that it shows something?"""
    accepted = sum(found[0][0] for c in clients for found in c.answers.values())
    return accepted >= ENOUGH and min(made.counts[kind] for kind in HURTS) >= ENOUGH_HURT


def check_all_live(living):
    for task in living:
        if task.done():
            task.result()


async def alive(work, living):
    """Wait for it, unless a client finds that something is wrong."""
    work = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([work, *living], return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def settled(rooms, clients, living):
    """Every hand comes to its end by the clock alone, and everybody has heard of it."""

    async def is_settled():
        check_all_live(living)
        standing = await rooms.standing(party.TABLE)
        head = str(standing.position)
        return standing.deadline is None and all(each.position == head for each in clients)

    await until(is_settled, "everybody to have everything", SETTLES_WITHIN_S)


# --- what came of it ----------------------------------------------------------------------------


class Audit:
    """The log, read from its first entry on."""

    def __init__(self):
        self.versions = {}
        """By the id of a request: the version that it made."""
        self.timeouts = []
        self.view = party.patched(party.ROOM.view(party.ROOM.begin(party.TABLE), None), [])
        self.position = None

    def take(self, entry):
        said, offset = json.loads(entry.data), entry.position.offset
        if self.position is not None:
            assert said["after"] == self.position, "a branch"
            assert offset == int(self.position.split(".")[0]) + 1, "a hole"
        assert entry.id not in self.versions, "twice"
        self.versions[entry.id] = offset
        if entry.id.startswith("0::timeout:"):
            self._time_out(entry)
        self.view = party.patched(self.view, said["all"])
        assert chips_in(self.view) == TOTAL, f"chips at {entry.position}"
        self.position = str(entry.position)

    def _time_out(self, entry):
        turn = entry.id.removeprefix("0::timeout:")
        assert turn == turn_of(self.view), "a turn that was played"
        late_s = entry.at_us / 1e6 - self.view["until"]
        assert late_s > -CLOCKS_DIFFER_S, f"{turn} had {-late_s:.3f} s left"
        self.timeouts.append(late_s)


async def audited(rooms):
    audit, stream = Audit(), rooms.stream_of(party.TABLE)
    log = rooms.store.log(ASYNC)
    page = await log.read(stream)
    while page.entries:
        for entry in page.entries:
            audit.take(entry)
        page = await log.read(stream, page.entries[-1].position)
    assert audit.view == (await rooms.standing(party.TABLE)).view(None)
    return audit


def check(client, audit, standing):
    assert client.strangers_cards() == []
    assert client.state == standing.view(None if client.spectates else client.user)
    assert client.resets == [], "nothing was lost"
    for rid, answers in client.answers.items():
        assert all(answer == answers[0] for answer in answers), (rid, answers)
        success, version, said = answers[0]
        made = audit.versions.get(f"{len(client.user)}:{client.user}:{rid}")
        assert made == (version if success else None), (rid, answers, made)
        assert said not in ("SUPERSEDED", "UNAVAILABLE")
        assert said != "FAILED" or client.asked(rid) == "crash", rid
    assert client.sent.keys() == client.answers.keys()


def tell(made, clients, audit, seconds):
    """For whoever reads it; and something must have happened, or nothing was shown."""
    answered = [answer for client in clients for all_ in client.answers.values() for answer in all_]
    accepted = [version for success, version, _ in answered if success]
    told = {
        **made.counts,
        "lines cut": sum(way.cuts for way in made.ways),
        "store cut": sum(way.cuts for way in made.store_ways),
        "connects": sum(client.connects for client in clients),
        "versions": len(audit.versions),
        "timeouts": len(audit.timeouts),
        "answers": len(answered),
        "conflicts": sum(client.conflicts for client in clients),
        "frames": sum(len(client.frames) for client in clients),
    }
    print(f"seed {made.seed}: {told}, {seconds:.1f} s")  # noqa: T201
    assert min(made.counts[kind] for kind in HURTS) >= ENOUGH_HURT
    assert set(audit.versions.values()) >= set(accepted)
    assert audit.timeouts, "no turn was timed out"
    assert len(accepted) >= ENOUGH


# --- the stores ---------------------------------------------------------------------------------


@pytest.mark.slow
async def test_on_sqlite_every_click_counts_once_whoever_dies(parties, tmp_path):
    url, made = f"sqlite:///{tmp_path}/rooms.db", parties(seed=1)
    made.start(url)
    await play(made, url, SECONDS)


@pytest.mark.slow
async def test_on_redis_every_click_counts_once_whoever_dies(parties, redis_server, redis_url):
    made = parties(seed=2)
    port = made.way_to_store(redis_server.port)
    made.start(redis_url.replace(f":{redis_server.port}", f":{port}"))
    await play(made, redis_url, SECONDS)


@pytest.mark.slow
async def test_on_postgres_every_click_counts_once_whoever_dies(parties, postgres_tables_url):
    made, direct = parties(seed=3), make_url(postgres_tables_url)
    way = direct.set(port=made.way_to_store(direct.port))
    made.start(way.render_as_string(hide_password=False))
    await play(made, postgres_tables_url, SECONDS)


@pytest.mark.slow
async def test_on_a_cluster_every_click_counts_once_whoever_dies(parties, redis_cluster_url):
    made = parties(seed=4)
    made.start(redis_cluster_url)
    await play(made, redis_cluster_url, SECONDS)


@pytest.mark.torture
@pytest.mark.parametrize("engine", ["sqlite", "redis", "postgres"])
async def test_the_play_goes_on(request, parties, tmp_path, engine):
    if engine == "sqlite":
        url = f"sqlite:///{tmp_path}/rooms.db"
    else:
        url = request.getfixturevalue(f"{engine}_url")
    if engine == "postgres":
        init(url)
    made = parties(seed=9)
    made.start(url)
    await play(made, url, MINUTES * 60 / 3)
