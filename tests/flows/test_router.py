"""From the workers' store to the watchers': each event once, a job's in order, whatever fails.

What dies and freezes at any moment is in `tests/simulation/test_router_simulation.py`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from datetime import UTC, datetime

import pytest

from semel import stores
from semel.brokers.memory import MemoryBroker
from semel.bus import Publisher, Router, Stages, shard
from semel.bus.jobs import KEEP_JOB, event, shard_of, shard_stream_of, state_of, stream_of
from semel.colour import ASYNC
from semel.entries import Keep
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.messages import Batch, Message, Tail
from semel.stores import MemoryStore, SQLiteStore
from support.routing import running, told, until, waiting

SHARDS = 4
TIME = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def source():
    return MemoryStore()


@pytest.fixture
def target():
    return MemoryStore()


@pytest.fixture
def publisher(source):
    return Publisher(source, shards=SHARDS)


def router(source, target, **how):
    return Router(source, target, **({"shards": SHARDS, "lease_s": 0.5} | how))


async def drained(source, target, **how):
    """A router that ends when nothing waits any more; its status."""
    routes = router(source, target, **how)
    async with running(routes):
        await until(lambda: _none_wait(source), "the shards to be empty")
    return routes.status()


def refused(status):
    return {why: count for why, count in status.refused.items() if count}


async def _none_wait(source):
    return await waiting(source, SHARDS) == 0


async def put(source, job_id, data, *, id):
    """Into a job's shard, past every check of a publisher."""
    stream = shard_stream_of("scan", shard_of(job_id, SHARDS))
    await source.log(ASYNC).append(stream, data, id=id)


def entry(job_id, stage="vision", seq=10, data=None, attempt=1, domain="scan"):
    return event(domain, job_id, stage, seq, data, attempt).written().entry


# --- what is routed -----------------------------------------------------------------------------


async def test_events_of_many_jobs_come_to_their_logs_in_order(source, target, publisher):
    jobs = [f"job-{n}" for n in range(20)]
    for seq in (10, 11, 12):
        for job in jobs:
            await publisher.publish(job, "vision", seq, {"n": seq})
    for job in jobs:
        await publisher.publish(job, "done", 50, None)

    status = await drained(source, target, batch=7)

    for job in jobs:
        assert [seq for _, seq, _ in await told(target, job)] == [10, 11, 12, 50]
        assert (await target.log(ASYNC).load(stream_of("scan", job))).life == "ended"
    assert (status.routed, status.repeated, refused(status)) == (80, 0, {})
    assert status.lag_s < 60


async def test_what_comes_while_it_runs_is_routed_at_once(source, target, publisher):
    async with running(router(source, target)):
        await publisher.publish("job-1", "vision", 10, None)
        await until(lambda: told(target, "job-1"), "the first")
        await publisher.publish("job-1", "vision", 11, None)
        await until(lambda: _has(target, "job-1", 2), "the second")


async def _has(target, job, count):
    return len(await told(target, job)) == count


async def test_the_entry_is_the_publishers_to_the_byte_and_the_state_follows(source, target):
    raw = entry("job-1", data={"b": 1, "a": "é"})
    await put(source, "job-1", raw, id="1")
    await drained(source, target)
    page = await target.log(ASYNC).read(stream_of("scan", "job-1"))
    assert [one.data for one in page.entries] == [raw]
    state = state_of(await target.log(ASYNC).load(stream_of("scan", "job-1")))
    assert (state["stage"], state["data"]) == ("vision", {"a": "é", "b": 1})


async def test_who_died_before_trimming_is_followed_by_one_who_appends_nothing_twice(
    source, target, publisher, monkeypatch
):
    for seq in (10, 11):
        await publisher.publish("job-1", "vision", seq, None)
    log = source.log(ASYNC)
    trim = log.trim

    async def dies(*_):
        raise SystemError("killed here")

    monkeypatch.setattr(log, "trim", dies)
    first = router(source, target)
    async with running(first):
        await until(lambda: first.status().routed == 2, "both to be appended")
    monkeypatch.setattr(log, "trim", trim)

    status = await drained(source, target)

    assert (status.routed, status.repeated) == (0, 2)
    assert len(await told(target, "job-1")) == 2


async def test_stages_of_ones_own_end_a_job_where_they_say(source, target):
    stages = Stages({"load": (0, 9), "done": (10, 19), "stored": (20, 29)})
    publisher = Publisher(source, shards=SHARDS, stages=stages)
    for stage in ("load", "done", "stored"):
        await publisher.publish("job-1", stage, stages.next_seq(stage), None)
    assert refused(await drained(source, target, stages=stages)) == {}
    assert len(await told(target, "job-1")) == 3


async def test_a_stage_that_fails_ends_the_job_though_another_ones_failure_was_stale(
    source, target, publisher
):
    await publisher.publish("job-1", "vision", 10, None, attempt=2)
    assert await publisher.fail("job-1", attempt=1, stage="vision")
    assert await publisher.fail("job-1", attempt=1, stage="rule")
    assert refused(await drained(source, target)) == {"stale": 1}
    assert (await target.log(ASYNC).load(stream_of("scan", "job-1"))).life == "ended"


# --- what is passed over ------------------------------------------------------------------------


async def test_what_can_never_be_appended_is_told_once_counted_and_holds_up_nobody(
    source, target, publisher, caplog
):
    job, late = "job-1", "job-2"
    poison = [
        (b"no event", "unreadable"),
        (b"[" * 100_000, "unreadable"),
        (entry(job, domain="other"), "unreadable"),
        (entry(job).replace(b'"vision"', b'"%s"' % (b"v" * 252)), "unreadable"),
        (entry(job).replace(b"}", b',"failed_in":"%s"}' % (b"v" * 256)), "unreadable"),
        (entry(job, seq=10, data="other"), "conflict"),
        (entry(job, seq=12, attempt=1), "stale"),
        (entry(late, stage="rule", seq=20), "ended"),
    ]
    await publisher.publish(job, "vision", 10, None)
    await publisher.publish(job, "vision", 11, None, attempt=2)
    await publisher.publish(late, "done", 50, None)
    for n, (data, _) in enumerate(poison):
        await put(source, late if b'"rule"' in data else job, data, id=str(n))
    await publisher.publish(job, "rule", 20, None)

    status = await drained(source, target)

    assert refused(status) == {"unreadable": 5, "conflict": 1, "stale": 1, "ended": 1}
    assert [seq for _, seq, _ in await told(target, job)] == [10, 11, 20]
    assert [seq for _, seq, _ in await told(target, late)] == [50]
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "passed over" in line]) == len(poison)


async def test_a_job_whose_log_cannot_be_read_holds_up_no_other(
    source, target, publisher, monkeypatch
):
    await publisher.publish("job-1", "vision", 10, None)
    await publisher.publish("job-2", "vision", 10, None)
    log = target.log(ASYNC)
    perform = log.perform

    async def corrupt(op):
        if op.stream == stream_of("scan", "job-1"):
            raise CorruptRecordError("it is of another version")
        return await perform(op)

    monkeypatch.setattr(log, "perform", corrupt)
    assert refused(await drained(source, target)) == {"corrupt": 1}
    assert await _has(target, "job-2", 1)


async def test_a_damaged_target_is_an_outage_and_nothing_is_passed_over(
    source, publisher, tmp_path
):
    path = tmp_path / "gateways.db"
    target = SQLiteStore(path)
    routes = router(source, target, store=MemoryStore())
    async with running(routes):
        await publisher.publish("job-1", "vision", 10, None)
        await until(lambda: _none_wait(source), "the first")
        target.close()
        whole = path.read_bytes()
        path.write_bytes(bytes(4096) + whole[4096:])
        await publisher.publish("job-1", "vision", 11, None)
        await until(lambda: "damaged" in routes.status().outage, "it to be told")
        assert (await waiting(source, SHARDS), refused(routes.status())) == (1, {})
        path.write_bytes(whole)
        await until(lambda: _none_wait(source), "the second")
    assert await _has(target, "job-1", 2)
    target.close()


async def test_what_is_too_large_for_the_target_holds_up_nobody(
    source, target, publisher, monkeypatch, caplog
):
    for seq in (10, 11):
        await publisher.publish("job-1", "vision", seq, None)
    log = target.log(ASYNC)
    perform = log.perform

    async def narrow(op):
        if op.id == "vision:1:10":
            raise StoreUnavailableError("it does not fit into max_allowed_packet", again=False)
        return await perform(op)

    monkeypatch.setattr(log, "perform", narrow)
    assert refused(await drained(source, target)) == {"too_large": 1}
    assert [seq for _, seq, _ in await told(target, "job-1")] == [11]
    assert "passed over (too_large): event 10 of stage 'vision'" in caplog.text


async def test_a_target_without_its_tables_ends_the_router_and_nothing_is_passed_over(
    source, target, publisher, monkeypatch
):
    await publisher.publish("job-1", "vision", 10, None)

    async def has_no_tables(_):
        raise SettingsError("the database has no tables; run semel db init")

    monkeypatch.setattr(target.log(ASYNC), "perform", has_no_tables)
    routes = router(source, target)
    with pytest.raises(SettingsError, match="no tables"):
        await routes.run()
    assert await waiting(source, SHARDS) == 1
    assert refused(routes.status()) == {}


# --- several of them ----------------------------------------------------------------------------


async def test_routers_share_the_shards_and_take_over_from_each_other(source, target, publisher):
    one, other = router(source, target), router(source, target)
    async with running(one):
        async with running(other):
            await until(
                lambda: len(one.status().owned) == len(other.status().owned) == SHARDS // 2, "half"
            )
            assert one.status().members == 2
        await until(lambda: len(one.status().owned) == SHARDS, "all of them")
        await publisher.publish("job-1", "vision", 10, None)
        await until(lambda: _has(target, "job-1", 1), "the event")


async def test_a_former_owner_is_refused_by_the_jobs_log(source, target, publisher, caplog):
    """Frozen longer than its lease, it goes on with its next line."""
    await publisher.publish("job-1", "vision", 10, None)
    routes = router(source, target)
    later = {routes.fence_of(shard_of("job-1", SHARDS)): 2**53 - 1}
    made = event("scan", "job-1", "vision", 19, None)
    await target.log(ASYNC).append(
        stream_of("scan", "job-1"), b"by a later owner", id=made.id, fences=later
    )
    async with running(routes):
        await until(lambda: "a later owner" in caplog.text, "it to be refused")
    assert await waiting(source, SHARDS) == 1, "what is not routed is not acknowledged"
    assert routes.status().routed == 0


async def test_routers_of_two_domains_are_strangers_though_they_have_one_name(source, target):
    for domain in ("scan", "pay"):
        publisher = Publisher(source, domain=domain, shards=SHARDS)
        for n in range(20):
            await publisher.publish(f"job-{n}", "vision", 10, None)
    both = [router(source, target, domain=domain, name="main") for domain in ("scan", "pay")]
    async with running(*both):
        await until(lambda: [one.status().routed for one in both] == [20, 20], "all of both")


# --- outages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["source", "target"])
async def test_an_outage_of_either_side_is_waited_for_and_nothing_is_lost(
    source, target, publisher, side, monkeypatch, caplog
):
    store = {"source": source, "target": target}[side]
    verb = {"source": "read", "target": "perform"}[side]
    log, is_away = store.log(ASYNC), True
    real = getattr(log, verb)

    async def asked(*given):
        if is_away:
            raise StoreUnavailableError("it is away")
        return await real(*given)

    for seq in (10, 11, 12):
        await publisher.publish("job-1", "vision", seq, None)
    monkeypatch.setattr(log, verb, asked)
    routes = router(source, target)
    async with running(routes):
        await until(lambda: routes.status().outage, "the outage to be told")
        assert not routes.status().ready
        is_away = False
        await until(lambda: _none_wait(source), "all of it")
        await until(lambda: routes.status().ready, "the end of the outage to be told")
    assert [seq for _, seq, _ in await told(target, "job-1")] == [10, 11, 12]
    assert routes.status().routed == 3
    assert caplog.text.count("does not answer") == 1


async def test_the_lag_grows_while_the_target_is_away(source, target, publisher, monkeypatch):
    async def away(_):
        raise StoreUnavailableError("it is away")

    monkeypatch.setattr(target.log(ASYNC), "perform", away)
    old = entry("job-1").replace(b'"timestamp":"20', b'"timestamp":"19')
    await put(source, "job-1", old, id="1")
    await put(source, "job-1", entry("job-1", seq=11), id="2")
    routes = router(source, target)
    async with running(routes):
        await until(lambda: routes.status().outage, "the outage")
        first = routes.status().lag_s
        assert first > 86_400
        await until(lambda: routes.status().lag_s > first, "it to grow")
    assert routes.status().lag_s is None, "nothing is in hand"


async def test_a_defect_is_told_and_the_shard_begins_anew(
    source, target, publisher, monkeypatch, caplog
):
    monkeypatch.setattr(shard, "AFTER_DEFECT_S", 0.01)
    log, failures = target.log(ASYNC), [ZeroDivisionError("a defect")]
    perform = log.perform

    async def fails_once(op):
        if failures:
            raise failures.pop()
        return await perform(op)

    monkeypatch.setattr(log, "perform", fails_once)
    await publisher.publish("job-1", "vision", 10, None)
    await drained(source, target)
    assert "begins anew" in caplog.text
    assert await _has(target, "job-1", 1)


async def test_without_a_bell_it_is_late_and_loses_nothing(source, target, publisher, monkeypatch):
    monkeypatch.setattr(source._tower, "ring", lambda _: None)
    monkeypatch.setattr(shard, "WAIT_S", 0.05)
    async with running(router(source, target)):
        await asyncio.sleep(0)
        await publisher.publish("job-1", "vision", 10, None)
        await until(lambda: _has(target, "job-1", 1), "the event")


# --- a source that has lost its end -------------------------------------------------------------


def backup(store):
    return copy.deepcopy(store._log._streams)


async def test_a_source_that_has_lost_its_end_is_told_of_and_what_it_has_now_is_routed(
    source, target, publisher, caplog
):
    """A failover of the workers' Redis: numbers that were given once are given again."""
    routes = router(source, target)
    async with running(routes):
        await publisher.publish("job-1", "vision", 10, None)
        await until(lambda: _none_wait(source), "the first")
        older = backup(source)
        for seq in (11, 12, 13):
            await publisher.publish("job-1", "vision", seq, None)
        await until(lambda: _none_wait(source), "those that will be lost")

        source._log._streams = older
        for seq in (14, 15):  # at the offsets of 11 and 12
            await publisher.publish("job-1", "vision", seq, None)
        await until(lambda: _has(target, "job-1", 6), "what came since")

    assert [seq for _, seq, _ in await told(target, "job-1")] == [10, 11, 12, 13, 14, 15]
    assert routes.status().lost == 1
    assert caplog.text.count("has lost events: it was read up to 4.") == 1


async def test_what_was_read_before_a_failover_is_not_trimmed_after_it(
    source, target, publisher, monkeypatch
):
    """The router has read an entry, its log is another one now, and only then does it trim."""
    await publisher.publish("job-1", "vision", 10, None)
    older = {}
    log, perform = source.log(ASYNC), target.log(ASYNC).perform

    async def fails_over(op):
        if not older:
            older["there"] = True
            source._log._streams = {}
            await publisher.publish("job-1", "vision", 11, None)
        return await perform(op)

    monkeypatch.setattr(target.log(ASYNC), "perform", fails_over)
    routes = router(source, target)
    async with running(routes):
        await until(lambda: _has(target, "job-1", 2), "both")
    assert [seq for _, seq, _ in await told(target, "job-1")] == [10, 11]
    assert log is source.log(ASYNC)
    assert routes.status().lost == 1


# --- settings -----------------------------------------------------------------------------------


async def test_a_router_with_fewer_shards_than_the_publishers_says_so(source, target, publisher):
    jobs = iter(range(1000))
    while shard_of(job := f"job-{next(jobs)}", SHARDS) < 2:
        pass
    await publisher.publish(job, "vision", 10, None)
    with pytest.raises(SettingsError, match="this router has 2 shards"):
        await router(source, target, shards=2).run()
    await drained(source, target)
    routes = router(source, target, shards=2)  # nothing waits elsewhere: they may be fewer now
    async with running(routes):
        await until(lambda: len(routes.status().owned) == 2, "its shards")


async def test_a_router_finds_publishers_with_twice_its_shards_however_many_it_has(source, target):
    publisher, jobs = Publisher(source, shards=200), iter(range(10_000))
    while shard_of(job := f"job-{next(jobs)}", 200) != 199:
        pass
    await publisher.publish(job, "vision", 10, None)
    with pytest.raises(SettingsError, match="this router has 100 shards"):
        await router(source, target, shards=100).run()


async def test_a_defect_of_what_looks_for_other_shards_ends_the_router(source, target, monkeypatch):
    async def fails(_):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(source.log(ASYNC), "heads", fails)
    with pytest.raises(ZeroDivisionError):
        await router(source, target).run()


class Opened(MemoryStore):
    def __init__(self, is_open):
        super().__init__()
        self.is_open = is_open
        is_open.add(self)

    def close(self):
        self.is_open.discard(self)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shards": 0},
        {"domain": "a:b"},
        {"name": "n" * 255},
        {"keep": Keep(full=2)},
        {"topic": "scan", "shards": 4},
        {"target": "nothing://"},
        {"store": "nothing://"},
    ],
)
def test_settings_that_cannot_work_are_refused_and_no_store_is_left_open(monkeypatch, wrong):
    is_open = set()

    def opened(url):
        if url == "nothing://":
            raise SettingsError("there is no such store")
        return Opened(is_open)

    monkeypatch.setattr(stores, "connect", opened)
    with pytest.raises(SettingsError):
        router(**{"source": "memory://", "target": "memory://"} | wrong)
    assert not is_open


async def test_stores_that_were_given_by_their_urls_are_closed_with_the_run(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path}/workers.db", f"sqlite:///{tmp_path}/gateways.db"
    async with Publisher(url[0], shards=1) as publisher:
        await publisher.publish("job-1", "vision", 10, None)
    routes = router(*url, shards=1)
    async with running(routes):
        await until(lambda: routes.status().routed == 1, "the event")
    async with Publisher(url[1]) as there:
        assert await there.publish("job-1", "vision", 10, None) is False


# --- from a broker ------------------------------------------------------------------------------


def message(position, payload, **more):
    return Message(
        position,
        f"id-{position}",
        "scan.event",
        "scan",
        "",
        "job",
        "1",
        None,
        payload,
        TIME,
        **more,
    )


async def test_events_that_an_outbox_has_relayed_are_routed_from_the_broker(target, caplog):
    """As others write them: in lines, and without an attempt."""
    broker = MemoryBroker(shards=1)
    envelope = json.loads(entry("job-1", data={"n": 1}))
    del envelope["attempt"]
    messages = [
        message(1, json.dumps(envelope, indent=2)),
        message(2, json.dumps(envelope, indent=2)),
        message(3, '{"order": 7}'),
        message(4, "null", refused="too large"),
        message(5, json.dumps(envelope | {"seq": 11})),
    ]
    await broker.publish(Batch("scan", 0, 1, Tail(), messages))
    routes = Router(broker, target, lease_s=0.5)
    async with running(routes):
        await until(lambda: _has(target, "job-1", 2), "both events")

    status = routes.status()
    assert (status.routed, status.repeated, refused(status)) == (2, 1, {"unreadable": 2})
    assert "it came without its payload: too large" in caplog.text
    page = await target.log(ASYNC).read(stream_of("scan", "job-1"))
    assert json.loads(page.entries[0].data) == envelope | {"attempt": 1}
    assert b"\n" not in page.entries[0].data
    backlog = await broker.backlog("scan", 0)
    assert backlog.groups[0].pending == 0


async def test_a_brokers_messages_that_were_begun_and_not_finished_come_first(target):
    broker = MemoryBroker(shards=1)
    messages = [message(n, entry("job-1", seq=9 + n).decode()) for n in (1, 2)]
    await broker.publish(Batch("scan", 0, 1, Tail(), messages[:1]))
    await broker.join("scan", "router:scan")
    died = await broker.consumer("scan", "router:scan", 0, name="died", fence=1)
    assert len(await died.read(1)) == 1
    await broker.publish(Batch("scan", 0, 1, Tail(1, "id-1"), messages[1:]))
    async with running(Router(broker, target, lease_s=0.5)):
        await until(lambda: _has(target, "job-1", 2), "both")
    assert [seq for _, seq, _ in await told(target, "job-1")] == [10, 11]


def _handled(one):
    return one.status().routed + sum(one.status().refused.values())


@pytest.mark.parametrize("name", [None, "main"])
async def test_routers_of_two_domains_on_one_topic_take_nothing_from_each_other(target, name):
    broker = MemoryBroker(shards=1)
    both = [
        Router(broker, target, domain=domain, topic="events", name=name, lease_s=0.5)
        for domain in ("scan", "pay")
    ]
    entries = [entry("job-1", seq=10 + n, domain=d) for n in range(5) for d in ("scan", "pay")]
    messages = [message(n, one.decode()) for n, one in enumerate(entries, 1)]
    async with running(*both):
        await until(lambda: all(one.status().owned for one in both), "both to read")
        for n, each in enumerate(messages):
            tail = Tail(n, f"id-{n}") if n else Tail()
            await broker.publish(Batch("events", 0, 1, tail, [each]))
            await until(lambda n=n: sum(map(_handled, both)) > n, "somebody to have it")
        await until(lambda: [one.status().routed for one in both] == [5, 5], "all of both", 5.0)
    for domain in ("scan", "pay"):
        assert [seq for _, seq, _ in await told(target, "job-1", domain)] == [10, 11, 12, 13, 14]


def test_a_broker_has_its_own_shards(target):
    with pytest.raises(SettingsError, match="the broker has 2"):
        Router(MemoryBroker(shards=2), target, shards=4)


def test_what_is_kept_of_a_job_is_what_the_seed_says():
    assert (KEEP_JOB.ended_s, KEEP_JOB.ids_s) == (3600, 7200)
