"""The inbox on Redis: what every inbox promises, and what only it has to be asked about."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis.exceptions

from semel.errors import SettingsError, StoreUnavailableError
from semel.inbox import MemoryInbox, Retry
from semel.messages import Applied, Edit, Held, Message, Replay, Seen, Skip
from semel.stores import inbox_rules as rules
from semel.stores.redis import inbox_words as words
from semel.stores.redis.address import address_of
from semel.stores.redis.inbox import RedisInbox
from semel.testing.inboxes import InboxContract

ALL = (0, 255)


def message(number: int, case: str = "1", *, ordered: bool = True, topic: str = "t") -> Message:
    return Message(
        position=number,
        id=f"{topic}-{case}-{number}",
        type="case.created",
        topic=topic,
        tenant="acme",
        aggregate_type="case",
        aggregate_id=case,
        seq=number if ordered else None,
        payload=f'{{"number": {number}, "ü":1.50}}',
        time=datetime(2026, 3, 1, 12, 30, 15, 250_000, tzinfo=UTC),
        headers={"a": "b"},
        source="/axiom",
    )


@pytest.fixture(params=["redis_url", "redis_cluster_url"])
async def inbox(request: pytest.FixtureRequest) -> AsyncIterator[RedisInbox]:
    url = request.getfixturevalue(request.param)
    made = RedisInbox(url, retry=Retry(first_s=0.0, jitter=0.0), lease_s=0.5)
    yield made
    await made.aclose()


# --- what every inbox promises ------------------------------------------------------------------


class OnRedis(InboxContract):
    """Effects are in a list, for which no Redis can promise anything."""

    takes_back = False
    url = ""

    @pytest.fixture
    async def inbox(self, request: pytest.FixtureRequest) -> AsyncIterator[RedisInbox]:
        url = request.getfixturevalue(self.url)
        self.log: list[str] = []
        self.opened: list[RedisInbox] = []
        yield self.open(url)
        for each in self.opened:
            await each.aclose()

    def open(self, url: str) -> RedisInbox:
        self.opened.append(RedisInbox(url, retry=self.retry, lease_s=0.1))
        return self.opened[-1]

    def effect(self, session, message):
        assert session is None
        self.log.append(self.said(message))

    async def effects(self, inbox):
        return self.log

    def check(self, stands: list[str], expected: list[str]) -> None:
        """Whatever failed, the last time that each had its effect was in order."""
        last = list(dict.fromkeys(reversed(stands)))[::-1]
        assert [each for each in last if each in expected] == expected

    def another(self, inbox):
        """As one that comes when the leases of the dead have run out."""
        for client in self._clients(inbox):
            for key in client.scan_iter("semel:*:inbox:*", count=1000):
                if words.is_state(key) and client.hget(key, "l"):
                    client.hset(key, "l", 0)
        return self.open(inbox._way.shown)

    async def age(self, inbox, seconds):
        us = round(seconds * 1_000_000)
        for client in self._clients(inbox):
            for key in client.scan_iter("semel:*:inbox:*", count=1000):
                _older(client, key, us)

    def _clients(self, inbox) -> list[Any]:
        address = address_of(inbox._way.shown, 5.0)
        client = address.open_sync()
        if not address.is_cluster:
            return [client]
        return [client.get_redis_connection(node) for node in client.get_primaries()]


def _older(client: Any, key: bytes, us: int) -> None:
    if key.endswith(b":due"):
        for member, score in client.zrange(key, 0, -1, withscores=True):
            client.zadd(key, {member: score - us})
    elif key.endswith(b":rows"):
        for field, value in client.hgetall(key).items():
            if field.endswith(b"d"):
                client.hset(key, field, int(value) - us)
            elif field.endswith(b"s"):
                why, attempts, since, edited = value.split(b" ")
                older = b"%d" % (int(since) - us)
                client.hset(key, field, b" ".join([why, attempts, older, edited]))
    elif words.is_state(key):
        if done := client.hget(key, "d"):
            client.hset(key, "d", int(done) - us)
        if (left_ms := client.pttl(key)) > 0:
            client.pexpire(key, max(0, left_ms - us // 1000))


class TestRedisInbox(OnRedis):
    url = "redis_url"


class TestRedisInboxOnACluster(OnRedis):
    url = "redis_cluster_url"


# --- beside the reference -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
async def test_random_traffic_ends_as_in_memory(inbox, seed):
    """Every answer, every listing and every mark is what the inbox in memory says."""
    chance = random.Random(seed)
    memory = MemoryInbox(retry=Retry(first_s=0.0, jitter=0.0, attempts=3))
    inbox.rules = Retry(first_s=0.0, jitter=0.0, attempts=3)
    if chance.random() < 0.3:
        await memory.baseline("g", "t")
        await inbox.baseline("g", "t")
    for _ in range(40):
        await _one_step(chance, memory, inbox)
        assert await _told(inbox) == await _told(memory)
    audits = [_audited(await each.audit(limit=1000)) for each in (inbox, memory)]
    assert audits[0] == audits[1]


async def _one_step(chance: random.Random, memory: MemoryInbox, inbox: RedisInbox) -> None:
    failing = {chance.randrange(1, 9) for _ in range(chance.randrange(3))}

    async def handle(message: Message, session: Any) -> None:
        if message.position in failing:
            raise ValueError(f"number {message.position}")

    step = chance.random()
    if step < 0.6:
        batch = [
            message(chance.randrange(1, 9), chance.choice("ab"), ordered=chance.random() < 0.8)
            for _ in range(chance.randrange(1, 5))
        ]
        singly = chance.random() < 0.3
        said = [await each.apply("g", batch, handle, singly=singly) for each in (memory, inbox)]
        assert said[0] == said[1]
    elif step < 0.8:
        ran = [await each.retry("g", ALL, handle) for each in (memory, inbox)]
        assert sorted(map(repr, ran[0])) == sorted(map(repr, ran[1]))
    else:
        await _settle_both(chance, memory, inbox)


async def _settle_both(chance: random.Random, memory: MemoryInbox, inbox: RedisInbox) -> None:
    found = await memory.sequences()
    if not found:
        return
    chosen = chance.choice(found)
    rows = await memory.waiting(chosen.sequence)
    some_id = chance.choice([row.message.id for row in rows])
    settlement = chance.choice(
        [Replay(), Skip(), Skip(some_id), Edit(some_id, '{"edited":true}'), Edit("?", "1")]
    )
    dry_run = chance.random() < 0.3
    said = []
    for each in (memory, inbox):
        try:
            said.append(await each.settle(chosen.sequence, settlement, who="me", dry_run=dry_run))
        except SettingsError as error:
            said.append(str(error))
    assert said[0] == said[1]


async def _told(inbox: Any) -> list[Any]:
    told = []
    for each in await inbox.sequences(limit=1000):
        rows = await inbox.waiting(each.sequence)
        assert rows[0] == each.head
        told.append(
            (
                each.sequence,
                each.behind,
                each.mark,
                [
                    (r.consumer, r.message, r.state, r.why, r.attempts, r.edited, r.error)
                    for r in rows
                ],
                [r.due_at is not None for r in rows],
            )
        )
    return told


def _audited(audits: Any) -> list[Any]:
    return [(a.who, a.verb, a.sequence, a.event_id, a.note, a.before, a.after) for a in audits]


# --- its own ------------------------------------------------------------------------------------


async def test_only_what_ended_well_is_passed_over(inbox):
    """The seed set its key before the effect: a crash in between lost the effect for a week."""

    class Killed(BaseException):
        pass

    async def dies(message, session):
        raise Killed

    with pytest.raises(Killed):
        await inbox.apply("g", [message(1)], dies)
    ran: list[int] = []

    async def runs(message, session):
        ran.append(message.seq)

    assert await inbox.apply("g", [message(1)], runs) == [Applied()], "after the lease"
    assert await inbox.apply("g", [message(1)], runs) == [Seen()]
    assert ran == [1]


async def test_a_second_worker_waits_for_the_first_and_runs_what_that_fails_at(inbox):
    """The seed's second worker acknowledged what the first one had yet to fail at."""
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def fails(message, session):
        inside.set()
        await go_on.wait()
        raise ValueError("after all")

    async def runs(message, session):
        raise AssertionError("it waits its turn")

    first = asyncio.create_task(inbox.apply("g", [message(1)], fails))
    await inside.wait()
    second = asyncio.create_task(inbox.apply("g", [message(1)], runs))
    await asyncio.sleep(0.8)  # the lease alone would be over
    assert not second.done()
    go_on.set()
    assert [type(each) for each in await first] == [Held]
    assert await second == [Held("behind")], "it is kept, not lost"
    (waits,) = await inbox.sequences()
    assert waits.head.error.startswith("ValueError: after all")


async def test_a_message_that_another_handles_for_ever_is_an_outage(inbox):
    inside = asyncio.Event()

    async def hangs(message, session):
        inside.set()
        await asyncio.Event().wait()

    first = asyncio.create_task(inbox.apply("g", [message(1)], hangs))
    await inside.wait()
    with pytest.raises(StoreUnavailableError, match="is being handled by another worker"):
        await inbox.apply("g", [message(1)], hangs)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    async def runs(message, session):
        pass

    assert await asyncio.wait_for(inbox.apply("g", [message(1)], runs), 0.4) == [Applied()]


async def test_who_comes_back_after_its_lease_finds_the_message_taken_over(inbox):
    inbox.lease_s = 0.2
    ran: list[str] = []
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def frozen(message, session):
        ran.append("frozen")
        inside.set()
        await go_on.wait()

    async def runs(message, session):
        ran.append("second")

    first = asyncio.create_task(inbox.apply("g", [message(1), message(2)], frozen))
    await inside.wait()
    await _forget_runner(inbox)  # as a renewal that never came
    assert await inbox.apply("g", [message(1)], runs) == [Applied()]
    go_on.set()
    assert await first == [Applied(), Applied()]
    assert ran == ["frozen", "second", "frozen"], "the first was run twice, and remembered once"


async def _forget_runner(inbox: RedisInbox) -> None:
    id, slot = rules.sequence_of("g", message(1))
    place = words.Place("default", "g", slot)
    (key, *_) = words._keys(place.before, id)
    line = inbox.line()
    for server in await line.servers():
        with contextlib.suppress(redis.exceptions.MovedError):  # another server has it
            await line.ask(server, "HSET", key, "l", "0")


async def test_a_handler_that_is_not_async_is_called_as_it_is(inbox):
    ran: list[int] = []

    def handle(message, session):
        assert session is None
        ran.append(message.seq)
        if message.seq == 2:
            raise ValueError("no")

    endings = await inbox.apply("g", [message(n) for n in (1, 2, 3)], handle)
    assert [type(each) for each in endings] == [Applied, Held, Held]
    assert ran == [1, 2]


async def test_a_long_handler_keeps_its_lease(inbox):
    inside = asyncio.Event()

    async def slow(message, session):
        inside.set()
        await asyncio.sleep(0.8)  # the lease alone would be over

    async def other(message, session):
        raise AssertionError("it is somebody else's")

    first = asyncio.create_task(inbox.apply("g", [message(1)], slow))
    await inside.wait()
    assert await inbox.apply("g", [message(1)], other) == [Seen()]
    assert await first == [Applied()]


async def test_an_effect_whose_caller_is_cut_off_while_it_is_remembered_is_remembered(inbox):
    task: asyncio.Task[Any]

    async def handle(message, session):
        asyncio.get_running_loop().call_soon(task.cancel)

    task = asyncio.create_task(inbox.apply("g", [message(1)], handle))
    with pytest.raises(asyncio.CancelledError):
        await task

    async def never(message, session):
        raise AssertionError("it had its effect")

    assert await inbox.apply("g", [message(1)], never) == [Seen()]


async def test_what_has_no_number_is_forgotten_by_itself_after_the_retention(inbox):
    inbox.retention_s = 0.3
    alone = message(1, ordered=False)

    async def handle(message, session):
        pass

    assert await inbox.apply("g", [alone], handle) == [Applied()]
    assert await inbox.apply("g", [alone], handle) == [Seen()]
    deadline = asyncio.get_running_loop().time() + 5
    while await inbox.apply("g", [alone], handle) == [Seen()]:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)
    assert await inbox.sweep() == 0


async def test_names_with_braces_and_slashes_do_not_bleed(inbox):
    async def handle(message, session):
        raise ValueError("no")

    names = ["a{b}", "}{", "a/b", "a", "ü:%2F"]
    for name in names:
        await inbox.apply(name, [message(1)], handle)
    found = {each.head.consumer for each in await inbox.sequences()}
    assert found == set(names)
    for name in names:
        assert len(await inbox.sequences(consumer=name)) == 1


async def test_a_listing_of_many_is_in_order_and_in_pages(inbox):
    async def handle(message, session):
        raise ValueError("no")

    await inbox.apply("g", [message(1, case=str(n)) for n in range(250)], handle)
    pages, after = [], None
    while page := await inbox.sequences(limit=40, after=after):
        pages += page
        after = page[-1].sequence
    ids = [each.sequence for each in pages]
    assert ids == sorted(set(ids))
    assert len(ids) == 250


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(SettingsError, match="client for sync code"):
        RedisInbox(redis.Redis(socket_timeout=1))
    with pytest.raises(SettingsError, match="more than zero"):
        RedisInbox("redis://localhost", lease_s=0)
    with pytest.raises(SettingsError, match="namespace"):
        RedisInbox("redis://localhost", namespace="a{b}")
    with pytest.raises(SettingsError, match="RedisInbox"):
        RedisInbox(object())
