"""Events without a number of their own; on every engine in tests/flows/test_bus_numbers.py."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from semel.bus import (
    BackPressureError,
    BlockingPublisher,
    JobEndedError,
    Publisher,
    Stages,
    StaleAttemptError,
)
from semel.bus import numbers as numbers_module
from semel.bus.jobs import shard_stream_of, state_of, stream_of
from semel.colour import ASYNC
from semel.entries import Keep
from semel.errors import IdempotencyConflictError, SettingsError, StoreUnavailableError
from semel.stores import MemoryStore

JOB = stream_of("scan", "job-1")
SHARD = shard_stream_of("scan", 0)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def publisher(store):
    return Publisher(store)


async def events(store, stream=JOB):
    log = store.log(ASYNC)
    page = await log.read(stream)
    if page.lost:
        page = await log.read(stream, page.floor)
    return [json.loads(entry.data) for entry in page.entries]


async def seqs(store, stream=JOB):
    return [event["seq"] for event in await events(store, stream)]


async def state(store):
    return state_of(await store.log(ASYNC).load(JOB))


# --- counting -----------------------------------------------------------------------------------


async def test_events_without_seq_are_numbered_from_one(store, publisher):
    for n in range(25):
        assert await publisher.publish("job-1", stage="progress", data={"percent": n}) is True
    assert await publisher.publish("job-1", "done", data=None) is True
    assert await seqs(store) == [*range(1, 26), 50]


async def test_last_stage_after_many_events_takes_next_number(store, publisher):
    for n in range(100):
        await publisher.publish("job-1", "progress", data=n)
    await publisher.publish("job-1", "done")
    assert (await seqs(store))[-1] == 101
    assert (await state(store))["stage"] == "done"


async def test_same_data_without_seq_twice_are_two_events(store, publisher):
    for _ in range(2):
        assert await publisher.publish("job-1", "progress", data="tick") is True
    assert await seqs(store) == [1, 2]


async def test_explicit_number_raises_next_automatic_one(store, publisher):
    await publisher.publish("job-1", "progress", data=1)
    await publisher.publish("job-1", "rule", 23, None)
    await publisher.publish("job-1", "progress", data=2)
    assert await seqs(store) == [1, 23, 24]


async def test_automatic_number_is_at_least_first_of_its_stage(store, publisher):
    for stage in ("progress", "vision", "vision", "progress", "rule"):
        await publisher.publish("job-1", stage)
    assert await seqs(store) == [1, 10, 11, 12, 20]


async def test_second_attempt_at_only_stage_counts_from_one(store, publisher):
    for attempt in (1, 1, 2, 2):
        await publisher.publish("job-1", "progress", data=attempt, attempt=attempt)
    assert await seqs(store) == [1, 2, 1, 2]


async def test_second_attempt_numbers_above_stages_it_does_not_repeat(store, publisher):
    """Or the state would stay at the finished stage, whose numbers are larger."""
    for n in range(80):
        await publisher.publish("job-1", "upload", data=n)
    await publisher.publish("job-1", "convert", attempt=2)
    assert (await state(store))["stage"] == "convert"
    await publisher.publish("job-1", "done", attempt=2)
    assert (await seqs(store))[-2:] == [81, 82]
    assert (await state(store))["stage"] == "done"


async def test_publishers_own_ranges_do_not_limit_automatic_numbers(store):
    own = Publisher(store, stages=Stages({"upload": (1, 3), "published": (10, 19)}))
    for _ in range(12):
        await own.publish("job-1", "upload")
    await own.publish("job-1", "published")
    assert await seqs(store) == list(range(1, 14))


async def test_stage_missing_from_own_stages_is_refused_without_seq(store):
    own = Publisher(store, stages=Stages({"upload": (1, 3), "published": (10, 19)}))
    with pytest.raises(SettingsError, match="no stage 'publishd'"):
        await own.publish("job-1", "publishd")


async def test_automatic_event_of_last_stage_ends_job_also_with_final(store):
    await Publisher(store, stages=Stages(final=51)).publish("job-1", "done")
    assert await seqs(store) == [51]
    assert (await state(store))["life"] == "ended"


async def test_data_given_in_place_of_seq_is_refused_with_advice(publisher):
    with pytest.raises(SettingsError, match=r"data=\.\.\."):
        await publisher.publish("job-1", "progress", {"percent": 10})


async def test_event_after_end_without_seq_is_refused(publisher):
    await publisher.publish("job-1", "progress")
    await publisher.publish("job-1", "done")
    for stage in ("progress", "done"):
        with pytest.raises(JobEndedError):
            await publisher.publish("job-1", stage)


async def test_stale_attempt_without_seq_is_refused(publisher):
    await publisher.publish("job-1", "progress", attempt=2)
    with pytest.raises(StaleAttemptError):
        await publisher.publish("job-1", "progress", attempt=1)


def test_number_after_the_largest_is_an_overflow():
    numbers = numbers_module.Numbers()
    numbers.saw(("job-1", 1), 2**32 - 1)
    with pytest.raises(OverflowError, match="begin another attempt"):
        numbers.take(("job-1", 1), 1)


# --- failing ------------------------------------------------------------------------------------


async def test_failure_after_many_events_has_largest_number_and_is_there_once(store, publisher):
    for n in range(70):
        await publisher.publish("job-1", "progress", data=n)
    assert await publisher.fail("job-1", {"why": "tired"}) is True
    assert await publisher.fail("job-1", {"why": "tired"}) is False
    assert await Publisher(store).fail("job-1", {"why": "tired"}) is False
    assert (await seqs(store))[-1] == 71
    assert (await state(store))["stage"] == "failed"


async def test_failure_told_by_another_publisher_has_largest_number(store, publisher):
    for n in range(70):
        await publisher.publish("job-1", "progress", data=n)
    assert await Publisher(store).fail("job-1") is True
    assert (await seqs(store))[-1] == 71


async def test_failure_for_a_router_counts_what_this_publisher_published(store):
    publisher = Publisher(store, shards=1)
    for n in range(70):
        await publisher.publish("job-1", "progress", data=n)
    assert await publisher.fail("job-1") is True
    assert await publisher.fail("job-1") is False
    assert (await seqs(store, SHARD))[-1] == 71


# --- several publishers -------------------------------------------------------------------------


async def test_new_publisher_continues_after_what_is_there(store, publisher):
    for _ in range(3):
        await publisher.publish("job-1", "progress")
    other = Publisher(store)
    for _ in range(2):
        await other.publish("job-1", "progress")
    assert await seqs(store) == [1, 2, 3, 4, 5]


async def test_two_publishers_in_turns_never_go_back_and_lose_nothing(store):
    one, other = Publisher(store), Publisher(store)
    order = [one, other, other, other, other, one, other, one, one, one, one, one, other] * 3
    for n, publisher in enumerate(order):
        assert await publisher.publish("job-1", "progress", data=n) is True
    told = await events(store)
    assert [event["data"] for event in told] == list(range(len(order)))
    numbers = [event["seq"] for event in told]
    assert numbers == sorted(set(numbers))
    assert (await state(store))["data"] == len(order) - 1


async def test_two_publishers_with_equal_data_publish_two_events(store):
    one, other = Publisher(store), Publisher(store)
    for publisher in (one, other, one, other):
        assert await publisher.publish("job-1", "progress", data="tick") is True
    assert len(await seqs(store)) == 4


@pytest.mark.parametrize("shards", [None, 1])
async def test_concurrent_publishes_take_distinct_numbers(store, shards):
    publisher = Publisher(store, shards=shards)
    done = await asyncio.gather(
        *(publisher.publish("job-1", "progress", data=n) for n in range(20))
    )
    assert done == [True] * 20
    told = await events(store, SHARD if shards else JOB)
    assert sorted(event["data"] for event in told) == list(range(20))
    assert len({event["seq"] for event in told}) == 20


def test_threads_take_distinct_numbers(store):
    publisher = BlockingPublisher(store, shards=1)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: publisher.publish("job-1", "progress", data=n), range(200)))
    assert done == [True] * 200
    assert sorted(asyncio.run(seqs(store, SHARD))) == list(range(1, 201))


async def test_new_publisher_for_a_router_finds_a_free_number_in_a_few_calls(store, monkeypatch):
    first = Publisher(store, shards=1)
    for n in range(100):
        await first.publish("job-1", "progress", data=n)
    log, calls = store.log(ASYNC), []
    append = log.append
    monkeypatch.setattr(log, "append", lambda *a, **k: calls.append(1) or append(*a, **k))
    assert await Publisher(store, shards=1).publish("job-1", "progress", data=100) is True
    assert len(calls) < 16
    assert await seqs(store, SHARD) == [*range(1, 102)]


@pytest.mark.parametrize("each", [1, 3])
async def test_publishers_of_one_attempt_for_a_router_leave_no_gap_in_turns(store, each):
    for n in range(100):
        publisher = Publisher(store, shards=1)
        for m in range(each):
            assert await publisher.publish("job-1", "progress", data=[n, m]) is True
    assert await seqs(store, SHARD) == [*range(1, 100 * each + 1)]


async def test_after_a_fork_numbers_are_not_shared_with_the_parent(store, monkeypatch):
    """A process that forks has one publisher in two processes: both would say they are the same."""
    publisher = Publisher(store, shards=1)
    await publisher.publish("job-1", "progress", data="first")
    monkeypatch.setattr(numbers_module.os, "getpid", lambda: -1)
    child = await publisher.publish("job-1", "progress", data="tick")
    monkeypatch.undo()
    parent = await publisher.publish("job-1", "progress", data="tick")
    assert (child, parent) == (True, True)
    assert len(await seqs(store, SHARD)) == 3


async def test_counts_are_bounded_and_ended_jobs_are_forgotten(store, monkeypatch):
    monkeypatch.setattr(numbers_module, "MOST_JOBS", 3)
    publisher = Publisher(store)
    for n in range(5):
        await publisher.publish(f"job-{n}", "progress")
    counts = publisher._flow.numbers
    assert len(counts) == 3
    assert await publisher.publish("job-0", "progress") is True, "read again from the log"
    await publisher.publish("job-0", "done")
    assert len(counts) == 2


# --- an unknown outcome -------------------------------------------------------------------------


class Unsure:
    """A log whose next answer is lost, before or after the append."""

    def __init__(self, log, monkeypatch):
        self._append, self.lose = log.append, ""
        monkeypatch.setattr(log, "append", self.append)

    async def append(self, *what, **how):
        lose, self.lose = self.lose, ""
        if lose == "before":
            raise StoreUnavailableError("lost")
        answer = await self._append(*what, **how)
        if lose == "after":
            raise StoreUnavailableError("lost")
        return answer


@pytest.fixture
def unsure(store, monkeypatch):
    return Unsure(store.log(ASYNC), monkeypatch)


@pytest.mark.parametrize("shards", [None, 1])
@pytest.mark.parametrize(("lose", "is_new"), [("before", True), ("after", False)])
async def test_repeat_after_lost_answer_takes_the_same_number(store, unsure, lose, is_new, shards):
    publisher = Publisher(store, shards=shards)
    await publisher.publish("job-1", "progress", data=1)
    unsure.lose = lose
    with pytest.raises(StoreUnavailableError):
        await publisher.publish("job-1", "progress", data={"a": 2, "b": 2})
    assert await publisher.publish("job-1", "progress", data={"b": 2, "a": 2}) is is_new
    assert await publisher.publish("job-1", "progress", data=3) is True
    assert await seqs(store, SHARD if shards else JOB) == [1, 2, 3]


@pytest.mark.parametrize("lose", ["before", "after"])
async def test_repeat_after_later_events_is_there_once_and_never_goes_back(store, unsure, lose):
    publisher = Publisher(store)
    unsure.lose = lose
    with pytest.raises(StoreUnavailableError):
        await publisher.publish("job-1", "progress", data="lost")
    await publisher.publish("job-1", "progress", data="later")
    await publisher.publish("job-1", "progress", data="lost")
    told = await events(store)
    assert sorted(event["data"] for event in told) == ["later", "lost"]
    assert [event["seq"] for event in told] == sorted(event["seq"] for event in told)


async def test_repeat_after_back_pressure_takes_the_same_number(store):
    publisher = Publisher(store, shards=1, keep=Keep(full=1))
    await publisher.publish("job-1", "progress", data=1)
    with pytest.raises(BackPressureError):
        await publisher.publish("job-1", "progress", data=2)
    await store.log(ASYNC).trim(SHARD, 1)
    assert await publisher.publish("job-1", "progress", data=2) is True
    assert await seqs(store, SHARD) == [2]


async def test_last_event_repeated_after_lost_answer_is_known(store, unsure):
    publisher = Publisher(store)
    unsure.lose = "after"
    with pytest.raises(StoreUnavailableError):
        await publisher.publish("job-1", "done", data="end")
    assert await publisher.publish("job-1", "done", data="end") is False


# --- a conflict ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [None, 1])
async def test_conflict_to_be_skipped_returns_false(store, shards):
    publisher = Publisher(store, shards=shards, on_conflict="skip")
    assert await publisher.publish("job-1", "vision", 10, {"n": 1}) is True
    assert await publisher.publish("job-1", "vision", 10, {"n": 2}) is False
    assert [e["data"] for e in await events(store, SHARD if shards else JOB)] == [{"n": 1}]


def test_conflict_to_be_skipped_in_sync_code_returns_false(store):
    publisher = BlockingPublisher(store, on_conflict="skip")
    assert publisher.publish("job-1", "vision", 10, 1) is True
    assert publisher.publish("job-1", "vision", 10, 2) is False


async def test_conflict_by_default_raises(store):
    publisher = Publisher(store, on_conflict="raise")
    await publisher.publish("job-1", "vision", 10, {"n": 1})
    with pytest.raises(IdempotencyConflictError):
        await publisher.publish("job-1", "vision", 10, {"n": 2})


def test_unknown_on_conflict_value_is_refused(store):
    with pytest.raises(SettingsError, match=r'on_conflict=.*"raise" or "skip"'):
        Publisher(store, on_conflict="ignore")  # type: ignore[arg-type]
