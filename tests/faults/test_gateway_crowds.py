"""`semel gateway` as a process, before crowds that are cut, clients that dribble, and odd cursors.

SEMEL_SLOW_MINUTES=5     how long clients take a byte a second in `make torture`
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import time

import pytest

from semel.bus import Publisher, Stages
from semel.bus.jobs import stream_of
from semel.colour import ASYNC
from semel.entries import Keep
from semel.settings import as_log_store
from semel.stores import SQLiteStore
from support.crowds import Dribble, Viewer, rss_mib
from support.relay_process import Running

MINUTES = float(os.environ.get("SEMEL_SLOW_MINUTES", "5"))
STAGES = Stages({"work": (1, 999_999), "done": (1_000_000, 1_000_009)})


@pytest.fixture
def url(tmp_path):
    SQLiteStore(tmp_path / "log.db").close()
    return f"sqlite:///{tmp_path}/log.db"


@contextlib.asynccontextmanager
async def opened(url):
    """The store, beside the gateway."""
    store = as_log_store(url)
    yield store
    await store.aclose()


@contextlib.asynccontextmanager
async def gateway(url, *options):
    """A gateway, and its port."""
    running = Running("gateway", url, "--port", "0", *options)
    await asyncio.to_thread(running.__enter__)
    try:
        yield running, int(re.search(r"jobs at \S+:(\d+)/JOB_ID", running.said)[1])
    finally:
        running.__exit__()


# --- crowds -------------------------------------------------------------------------------------

SUBJECTS = [f"job-{n}" for n in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [300, pytest.param(2000, marks=pytest.mark.torture)])
async def test_a_crowd_that_is_cut_at_once_is_back_with_few_questions(url, size):
    async with gateway(url) as (running, port), opened(url) as store:
        publisher = Publisher(store, stages=STAGES)
        for job in SUBJECTS:
            for seq in range(1, 6):
                await publisher.publish(job, "work", seq, {"n": seq})
        crowd = [Viewer(port, SUBJECTS[n % len(SUBJECTS)]) for n in range(size)]
        try:
            await asyncio.gather(*(viewer.connect() for viewer in crowd))
            await reached(crowd, 5)
            for viewer in crowd:
                viewer.cut()
            for job in SUBJECTS:
                for seq in range(6, 11):
                    await publisher.publish(job, "work", seq, {"n": seq})
            await come_back(crowd)
            await reached(crowd, 10)
            assert all(viewer.offsets == [*range(1, 11)] for viewer in crowd)
            assert running.metric("semel_gateway_snapshots_total") == 0

            for viewer in crowd:
                viewer.cut()
            for job in SUBJECTS:
                await publisher.publish(job, "work", 11, {"n": 11})
                await publisher.publish(job, "work", 12, {"n": 12})
                await store.log(ASYNC).trim(stream_of("scan", job), 11)
            await asyncio.gather(*(viewer.connect() for viewer in crowd))
            await reached(crowd, 12)
            # From where they were it goes on in the gateway's memory, or with the state.
            assert {tuple(viewer.offsets[10:]) for viewer in crowd} <= {(None,), (11, 12)}
            assert running.metric("semel_gateway_snapshots_total") <= len(SUBJECTS)
        finally:
            for viewer in crowd:
                await viewer.close()


async def come_back(crowd):
    """As browsers do: each after the pause that it was told."""

    async def back(viewer):
        await asyncio.sleep(viewer.retry_s)
        await viewer.connect()

    began = time.monotonic()
    await asyncio.gather(*map(back, crowd))
    print(f"{len(crowd)} are back after {time.monotonic() - began:.2f} s")  # noqa: T201


async def reached(crowd, offset):
    await asyncio.gather(*(viewer.until(lambda v: v.reached == offset) for viewer in crowd))


# --- cursors that lead nowhere ------------------------------------------------------------------


async def test_whatever_somebody_has_for_a_cursor_it_gets_the_state_of_this_job_and_no_other(url):
    async with gateway(url) as (running, port), opened(url) as store:
        publisher = Publisher(store, stages=STAGES)
        for job in ("mine", "yours"):
            for seq in range(1, 7):
                await publisher.publish(job, "work", seq, {"secret": f"of {job}"})
        log = store.log(ASYNC)
        page = await log.read(stream_of("scan", "mine"))
        yours = (await log.read(stream_of("scan", "yours"))).entries
        await log.trim(stream_of("scan", "mine"), 3)
        here = [str(entry.position) for entry in page.entries]
        viewers = {
            "trimmed": Viewer(port, "mine", here[1]),
            "ahead": Viewer(port, "mine", f"900.{here[5][-12:]}"),
            "another's": Viewer(port, "mine", str(yours[4].position)),
            "at the floor": Viewer(port, "mine", here[2]),
        }
        chance = random.Random(5)
        for n in range(40):
            viewers[f"garbage {n}"] = Viewer(port, "mine", garbage(chance, here))
        try:
            await asyncio.gather(*(viewer.connect() for viewer in viewers.values()))
            await publisher.publish("mine", "work", 7, {"secret": "of mine"})
            await publisher.publish("mine", "done", 1_000_000, {})
            for viewer in viewers.values():
                await viewer.until(lambda v: "end" in v.others)
            assert viewers["at the floor"].offsets == [4, 5, 6, 7, 8]
            for why, viewer in viewers.items() - {("at the floor", viewers["at the floor"])}:
                first, *rest = viewer.offsets
                assert first is None, why
                assert rest == [*range(9 - len(rest), 9)], why
                told = b"".join([*viewer.data, *viewer.states])
                assert b"of mine" in told, why
                assert b"of yours" not in told, why
            resets = running.status["resets"]
            assert {"trimmed", "ahead", "forked", "unreadable"} == set(resets)
            assert sum(resets.values()) == len(viewers) - 1
        finally:
            for viewer in viewers.values():
                await viewer.close()


def garbage(chance, cursors):
    """A cursor with something wrong, or nothing of one; never one that is good, and never none."""
    text = list(chance.choice(cursors))
    for _ in range(chance.randint(1, 4)):
        text[chance.randrange(len(text))] = chance.choice("0123456789abcdef.-%;\xe9 \t")
    made = "".join(text).strip() or "x"
    return f"{made}!" if made in cursors else made


# --- a client that takes a byte a second --------------------------------------------------------


class Traffic:
    """Large events of some jobs, and one who watches how late they come."""

    def __init__(self, store, port, jobs, *, size, every_s):
        self._publisher = Publisher(store, stages=STAGES, keep=Keep(entries=300))
        self._jobs, self._text, self._every_s = jobs, "x" * size, every_s
        self._port = port
        self._watchers = []
        self.published = 0
        self.latest_s = 0.0

    async def __aenter__(self):
        for job in self._jobs:
            await self._publisher.publish(job, "work", 1, {"n": 1})
        for job in self._jobs:
            self._watchers.append(await Viewer(self._port, job).connect())
        self.published = 1
        return self

    async def go_on(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.published += 1
            began = time.monotonic()
            for job in self._jobs:
                await self._publisher.publish(job, "work", self.published, {"text": self._text})
            for watcher in self._watchers:
                await watcher.until(lambda w: w.reached == self.published)
                watcher.data.clear()
            self.latest_s = max(self.latest_s, time.monotonic() - began)
            await asyncio.sleep(self._every_s)

    async def __aexit__(self, *_):
        for watcher in self._watchers:
            await watcher.close()

    def check(self):
        for watcher in self._watchers:
            assert watcher.offsets == [*range(1, self.published + 1)]


@contextlib.contextmanager
def dribbling(port, jobs):
    slow = [Dribble(port, job) for job in jobs]
    yield slow
    for each in slow:
        each.close()


@pytest.mark.slow
async def test_clients_that_take_a_byte_a_second_are_dropped_and_delay_nobody(url):
    async with (
        gateway(url) as (running, port),
        opened(url) as store,
        Traffic(store, port, ["a"], size=60_000, every_s=0.0) as traffic,
    ):
        with dribbling(port, "aaa") as slow:
            await traffic.go_on(0.5)
            before = rss_mib(running.pid)
            for _ in range(30):
                for each in slow:
                    each.step()
                await traffic.go_on(0.2)
                if all(each.dropped for each in slow):
                    break
        # They are told at once: what lay ready for them in the system's buffers is gone, too.
        assert all(each.dropped for each in slow)
        assert running.status["closed"]["slow"] >= len(slow)
        assert rss_mib(running.pid) - before < 64
        assert traffic.latest_s < 2
        traffic.check()


@pytest.mark.torture
async def test_memory_does_not_grow_with_clients_that_take_a_byte_a_second(url):
    """For minutes: from the first to the last, by less than 64 MiB."""
    async with (
        gateway(url) as (running, port),
        opened(url) as store,
        Traffic(store, port, ["a", "b", "c"], size=20_000, every_s=0.05) as traffic,
    ):
        began, told = time.monotonic(), []
        with dribbling(port, "abc" * 8) as slow:
            while (minutes := (time.monotonic() - began) / 60) < MINUTES:
                for each in slow:
                    each.step()
                await traffic.go_on(1.0)
                if minutes >= len(told):
                    told.append(rss_mib(running.pid))
            told.append(rss_mib(running.pid))
        dropped = running.status["closed"].get("slow", 0)
        print(  # noqa: T201
            f"RSS by the minute, MiB: {[round(mib) for mib in told]}; {dropped} dropped; "
            f"{traffic.published} x 3 events, the latest after {traffic.latest_s:.2f} s"
        )
        assert dropped >= len(slow)
        assert told[-1] - told[1] < 64
        traffic.check()
