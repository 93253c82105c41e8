"""What a publisher answers; on every engine in tests/flows/test_bus_stores.py."""

from __future__ import annotations

import json

import pytest

from semel.bus import (
    BackPressureError,
    BlockingPublisher,
    JobEndedError,
    Publisher,
    Stages,
    StaleAttemptError,
    get_next_seq,
)
from semel.bus import publisher as publisher_module
from semel.bus.jobs import shard_of, shard_stream_of, stream_of
from semel.colour import ASYNC, SYNC
from semel.entries import Keep
from semel.errors import IdempotencyConflictError, SettingsError
from semel.stores import FileStore, MemoryStore
from semel.testing.clock import FakeClock

JOB = stream_of("scan", "job-1")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store(clock):
    return MemoryStore(clock=clock)


@pytest.fixture
def publisher(store):
    return Publisher(store)


async def told(store, stream=JOB):
    page = await store.log(ASYNC).read(stream)
    return [(e["stage"], e["seq"], e["data"]) for e in (json.loads(x.data) for x in page.entries)]


# --- into the job's own stream ------------------------------------------------------------------


async def test_what_is_published_twice_is_there_once(store, publisher):
    assert await publisher.publish("job-1", "vision", 10, {"status": "done"}) is True
    assert await publisher.publish("job-1", "vision", 10, {"status": "done"}) is False
    assert await told(store) == [("vision", 10, {"status": "done"})]


async def test_the_same_event_with_other_data_is_refused(store, publisher):
    await publisher.publish("job-1", "vision", 10, {"n": 1})
    with pytest.raises(IdempotencyConflictError, match="with other data") as refused:
        await publisher.publish("job-1", "vision", 10, {"n": 2})
    assert refused.value.key == "job-1:vision:1:10"
    assert await told(store) == [("vision", 10, {"n": 1})]


async def test_who_begins_a_stage_anew_begins_its_numbers_anew(store, publisher):
    await publisher.publish("job-1", "vision", 10, {"n": 1})
    assert await publisher.publish("job-1", "vision", 10, {"n": 2}, attempt=2)
    assert len(await told(store)) == 2


async def test_a_worker_that_was_given_up_is_told_to_stop(store, publisher):
    await publisher.publish("job-1", "vision", 10, None, attempt=2)
    with pytest.raises(StaleAttemptError, match="stop: attempt 2 has begun") as stale:
        await publisher.publish("job-1", "vision", 11, None, attempt=1)
    assert stale.value.attempt == 2
    assert await publisher.publish("job-1", "rule", 20, None, attempt=1), "another stage's attempt"


async def test_a_job_that_has_ended_takes_nothing_more_but_knows_what_it_took(publisher):
    await publisher.publish("job-1", "vision", 10, None)
    await publisher.publish("job-1", "done", 51, None)
    with pytest.raises(JobEndedError, match="job 'job-1' has ended"):
        await publisher.publish("job-1", "reward", 40, None)
    assert await publisher.publish("job-1", "vision", 10, None) is False
    assert await publisher.publish("job-1", "done", 51, None) is False


async def test_a_job_that_has_failed_has_ended(store, publisher):
    assert await publisher.fail("job-1", {"why": "no bottle"})
    assert await publisher.fail("job-1", {"why": "no bottle"}) is False
    assert await told(store) == [("failed", get_next_seq("failed"), {"why": "no bottle"})]
    with pytest.raises(JobEndedError):
        await publisher.publish("job-1", "vision", 10, None)


async def test_a_worker_that_was_given_up_cannot_fail_the_job_for_its_successor(store, publisher):
    await publisher.publish("job-1", "vision", 10, None, attempt=2)
    with pytest.raises(StaleAttemptError):
        await publisher.fail("job-1", None, 1, stage="vision")
    assert await publisher.fail("job-1", None, 2, stage="vision")


async def test_two_stages_that_fail_say_two_things(store, publisher):
    assert await publisher.fail("job-1", stage="vision")
    assert await publisher.fail("job-1", stage="vision") is False
    with pytest.raises(JobEndedError):
        await publisher.fail("job-1", stage="rule")


async def test_a_jobs_time_begins_when_it_has_ended(store, publisher, clock):
    await publisher.publish("job-1", "vision", 10, None)
    clock.advance(3 * 3600)  # its markers would be gone, if they counted from here
    assert await publisher.publish("job-1", "vision", 10, None) is False
    await publisher.publish("job-1", "done", 50, None)
    clock.advance(3599)
    assert (await store.log(ASYNC).load(JOB)).life == "ended"
    assert len(await told(store)) == 2
    clock.advance(2)
    assert (await store.log(ASYNC).load(JOB)).life == "gone"
    assert await publisher.publish("job-1", "vision", 10, None) is False
    clock.advance(3600)
    assert (await store.log(ASYNC).load(JOB)).life == "unknown"


async def test_a_job_that_nobody_ends_is_forgotten_after_a_day(store, publisher, clock):
    await publisher.publish("job-1", "vision", 10, None)
    clock.advance(86_399)
    assert len(await told(store)) == 1
    clock.advance(2)
    assert (await store.log(ASYNC).load(JOB)).life == "unknown"


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [{1, 2}, b"bytes", float("nan"), "\ud800", {"a": object()}, {1: 2, "a": 3}]
)
async def test_data_that_are_no_json_are_refused(store, publisher, data):
    with pytest.raises(SettingsError, match="the data of event 10 of stage 'vision'"):
        await publisher.publish("job-1", "vision", 10, data)
    assert await told(store) == []


async def test_data_that_are_too_deep_are_refused(publisher):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(SettingsError, match="as JSON"):
        await publisher.publish("job-1", "vision", 10, deep)
    while deep:  # or their end is as deep
        deep = deep.pop()


async def test_an_event_that_is_too_large_is_refused(store):
    publisher = Publisher(store, most_bytes=300)
    assert await publisher.publish("job-1", "vision", 10, "x" * 100)
    with pytest.raises(SettingsError, match=r"bytes, more than most_bytes \(300\)"):
        await publisher.publish("job-1", "vision", 11, "x" * 300)


async def test_a_number_of_another_stage_is_refused(store):
    with pytest.raises(SettingsError, match="is no number of stage 'vision'"):
        await Publisher(store).publish("job-1", "vision", 20, None)
    wider = Publisher(store, stages=Stages({"vision": (0, 99), "done": (100, 109)}))
    assert await wider.publish("job-1", "vision", 20, None)
    assert await wider.publish("job-1", "done", 100, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shards": 0},
        {"domain": "a:b"},
        {"domain": ""},
        {"shards": 1, "keep": Keep(full=10, entries=5)},
        {"shards": 1, "keep": Keep(full=10, idle_s=60)},
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_opened(monkeypatch, wrong):
    opened = []
    monkeypatch.setattr(publisher_module, "as_log_store", opened.append)
    for kind in (Publisher, BlockingPublisher):
        with pytest.raises(SettingsError):
            kind("memory://", **wrong)
    assert not opened


async def test_a_job_that_keeps_so_much_only_says_that_it_is_full(store):
    publisher = Publisher(store, keep=Keep(full=1))
    await publisher.publish("job-1", "vision", 10, None)
    with pytest.raises(BackPressureError, match="job 'job-1' has 1 events") as full:
        await publisher.publish("job-1", "vision", 11, None)
    assert "shard" not in str(full.value)


def test_a_store_without_a_log_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="a FileStore has no log"):
        Publisher(FileStore(tmp_path))


# --- for a router -------------------------------------------------------------------------------


async def test_with_shards_an_event_waits_in_its_jobs_shard_once(store):
    publisher = Publisher(store, shards=8)
    assert await publisher.publish("job-1", "vision", 10, None) is True
    assert await publisher.publish("job-1", "vision", 10, None) is False
    with pytest.raises(IdempotencyConflictError):
        await publisher.publish("job-1", "vision", 10, 7)
    shard = shard_stream_of("scan", shard_of("job-1", 8))
    assert await told(store, shard) == [("vision", 10, None)]
    assert await told(store) == []


async def test_a_shard_that_is_full_says_so_instead_of_losing_what_is_unread(store):
    publisher = Publisher(store, shards=1, keep=Keep(full=3))
    for n in range(3):
        await publisher.publish(f"job-{n}", "vision", 10, n)
    with pytest.raises(BackPressureError, match="3 events wait") as full:
        await publisher.publish("job-3", "vision", 10, 3)
    assert full.value.retry_after == 1.0
    assert await publisher.publish("job-0", "vision", 10, 0) is False, "it is there"
    stream = shard_stream_of("scan", 0)
    assert len(await told(store, stream)) == 3
    await store.log(ASYNC).trim(stream, 1)
    assert await publisher.publish("job-3", "vision", 10, 3)


async def test_a_shard_remembers_no_more_of_a_job_than_its_events(store):
    """No fence per job: a shard's stream never ends, and they would be there for ever."""
    publisher = Publisher(store, shards=1)
    await publisher.publish("job-1", "vision", 10, None, attempt=2)
    assert await publisher.publish("job-1", "vision", 10, None, attempt=1), "the router refuses it"
    snapshot = await store.log(ASYNC).load(shard_stream_of("scan", 0))
    assert (snapshot.fields, snapshot.life) == ({}, "open")


# --- blocking -----------------------------------------------------------------------------------


def test_sync_code_publishes_on_its_own_thread(store):
    publisher = BlockingPublisher(store)
    assert publisher.publish("job-1", "vision", 10, None) is True
    assert publisher.publish("job-1", "vision", 10, None) is False
    with pytest.raises(StaleAttemptError):
        publisher.publish("job-1", "vision", 11, None, attempt=2)
        publisher.publish("job-1", "vision", 12, None, attempt=1)
    assert publisher.fail("job-1", {"why": "tired"}, stage="rule")
    with pytest.raises(JobEndedError):
        publisher.publish("job-1", "rule", 20, None)


class OneColour(MemoryStore):
    """As one that was given an async client."""

    def log(self, colour):
        if colour is SYNC:
            raise SettingsError("give it a URL, which serves both colours")
        return super().log(colour)


def test_a_store_of_the_other_colour_is_refused_before_anything_is_sent():
    with pytest.raises(SettingsError, match="both colours"):
        BlockingPublisher(OneColour())
    Publisher(OneColour())


def test_a_store_that_was_opened_by_its_url_is_closed_and_one_that_was_given_is_not(monkeypatch):
    closed = []
    monkeypatch.setattr(MemoryStore, "close", lambda _: closed.append(1))
    with BlockingPublisher("memory://") as publisher:
        publisher.publish("job-1", "vision", 10, None)
    assert len(closed) == 1
    with BlockingPublisher(MemoryStore()):
        pass
    assert len(closed) == 1


async def test_the_same_for_an_async_one(monkeypatch):
    closed = []

    async def aclose(store):
        closed.append(store)

    monkeypatch.setattr(MemoryStore, "aclose", aclose)
    async with Publisher("memory://"):
        pass
    async with Publisher(MemoryStore()):
        pass
    assert len(closed) == 1


@pytest.mark.parametrize("settings", [{"shards": "8"}, {"stages": {"load": (0, 9)}}])
def test_settings_that_cannot_work_are_told_before_the_first_event(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        Publisher(MemoryStore(), **settings)
