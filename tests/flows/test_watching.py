"""Watching jobs by the numbers of their events."""

from __future__ import annotations

import asyncio

import pytest

from semel.bus import Watcher
from semel.errors import SettingsError
from semel.stores import MemoryStore
from support.feeds import simulated
from support.viewers import JOB, publish


async def numbers(watcher, count=None, **how):
    """Of the events that are told: all until the job ends, or so many."""
    found = []
    events = watcher.subscribe(JOB, **how)
    async for event in events:
        found.append(event.get("seq", event.get("reset")))
        if len(found) == count:
            break
    await events.aclose()
    return found


async def out_of_order(store):
    for stage, sub_seq in (("rule", 0), ("vision", 0), ("rule", 1), ("vision", 1)):
        await publish(store, stage, sub_seq=sub_seq)


@simulated()
async def test_everything_is_told_in_the_order_of_the_log_however_it_is_numbered(store):
    await out_of_order(store)
    async with Watcher(store) as watcher:
        telling = asyncio.ensure_future(numbers(watcher))
        await asyncio.sleep(1)
        await publish(store, "done")
        assert await telling == [20, 10, 21, 11, 50]


@simulated(1)
async def test_it_goes_on_behind_the_last_event_of_that_number_and_tells_nothing_twice(store):
    await out_of_order(store)
    await publish(store, "done")
    async with Watcher(store) as watcher:
        assert await numbers(watcher, last_seq=20) == [10, 21, 11, 50]
        assert await numbers(watcher, last_seq=11) == [50]
        assert await numbers(watcher, last_seq=50) == []


@simulated(1)
async def test_of_a_number_that_is_not_there_only_larger_ones_are_told(store):
    await out_of_order(store)
    await publish(store, "done")
    async with Watcher(store) as watcher:
        assert await numbers(watcher, last_seq=15) == [20, 21, 50]


@simulated(1)
async def test_what_comes_late_with_a_smaller_number_is_told_to_who_was_there(store):
    """The seed's own filter takes each number for the new mark, and swallows it."""
    await publish(store, "rule")
    async with Watcher(store) as watcher:
        telling = asyncio.ensure_future(numbers(watcher, last_seq=20))
        await asyncio.sleep(1)
        await publish(store, "answer", "vision", "done")
        assert await telling == [30, 10, 50]


@simulated(1)
async def test_where_events_were_trimmed_it_goes_on_if_its_own_is_there_and_is_told_else(store):
    await out_of_order(store)
    await store.trim(2, "scan:job:7")
    async with Watcher(store) as watcher:
        telling = [asyncio.ensure_future(numbers(watcher, last_seq=n)) for n in (21, 20)]
        await asyncio.sleep(1)
        await publish(store, "vision", "done", sub_seq=2)
        assert await telling[0] == [11, 12, 52]
        assert await telling[1] == ["trimmed", 12, 52]
        events = watcher.subscribe(JOB)
        reset = await anext(events)
        assert reset["reset"] == "trimmed"
        assert reset["state"]["stages"]["rule"]["seq"] == 21
        await events.aclose()


@simulated(1)
async def test_who_has_missed_too_much_gets_the_state(store):
    for n in range(1001):
        await store.append(f'{{"seq":{n}}}', "scan:job:7")
    await store.append('{"no":"seq"}', "scan:job:7")
    async with Watcher(store) as watcher:
        assert await numbers(watcher, 1, last_seq=999) == ["overrun"]


@simulated(1)
async def test_by_a_cursor_or_by_a_number_and_not_by_both(store):
    await publish(store, "vision", "rule", "done")
    async with Watcher(store) as watcher:
        state = await watcher.state(JOB)
        assert state["stage"] == "done"
        assert await numbers(watcher, after=state["position"]) == []
        assert await numbers(watcher, after="garbage") == ["unreadable"]
        assert (await watcher.state("unknown"))["life"] == "unknown"
        with pytest.raises(SettingsError, match="not both"):
            await numbers(watcher, last_seq=10, after=state["position"])


@simulated(1)
async def test_what_is_no_name_of_a_job_is_refused_and_takes_nothing_from_others(store):
    store.is_deaf = True
    async with Watcher(store) as watcher:
        telling = asyncio.ensure_future(numbers(watcher))
        for name in ("", "x" * 300, "\ud800", "a\0b"):
            for how in ({}, {"last_seq": 7}):
                with pytest.raises(SettingsError, match="job"):
                    await anext(watcher.subscribe(name, **how))
            with pytest.raises(SettingsError, match="job"):
                await watcher.state(name)
        await publish(store, "vision", "done")
        assert await telling == [10, 50]


def test_a_domain_is_checked():
    with pytest.raises(SettingsError, match="domain"):
        Watcher(MemoryStore(), domain="a:b")
