"""`semel gateway` as a process: told to end under load, or killed, with viewers that come back."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path

import httpx
import pytest

from semel.bus import Publisher, Stages
from semel.stores import SQLiteStore
from support.relay_process import Running

VIEWERS = 25
STAGES = Stages({"work": (1, 9999), "done": (10_000, 10_009)})


@pytest.fixture
def url(tmp_path):
    SQLiteStore(tmp_path / "log.db").close()
    return f"sqlite:///{tmp_path}/log.db"


def gateway(url, *options, **popen):
    return Running("gateway", url, "--port", "0", *options, **popen)


def where(running):
    return re.search(r"jobs at (\S+)/JOB_ID", running.said)[1]


@contextlib.asynccontextmanager
async def publishing(url):
    """Events of one job, while the block runs; then its last one."""
    store = SQLiteStore(url.removeprefix("sqlite:///"))
    publisher = Publisher(store, stages=STAGES)

    async def publish():
        number = 0
        while True:
            number += 1
            await publisher.publish("7", "work", number, {"n": number})
            await asyncio.sleep(0.005)

    await publisher.publish("7", "work", 9999, {"n": 0})
    task = asyncio.create_task(publish())
    yield
    task.cancel()
    await asyncio.wait([task])
    await publisher.publish("7", "done", 10_000, {})
    await store.aclose()


class Viewer:
    """Comes back with its cursor until the job has ended."""

    def __init__(self, client, gateways):
        self.cursor = None
        self.offsets = []
        self.others = []
        self.endings = []
        self._client = client
        self._gateways = gateways

    async def watch(self):
        async with asyncio.timeout(60):
            while "end" not in self.others:
                try:
                    await self._visit()
                    self.endings.append("whole")
                except httpx.HTTPError:
                    self.endings.append("cut")
                    await asyncio.sleep(0.02)

    async def _visit(self):
        headers = {"accept": "text/event-stream"}
        if self.cursor is not None:
            headers["last-event-id"] = self.cursor
        at = f"{self._gateways[-1]}/7"
        body = b""
        async with self._client.stream("GET", at, headers=headers) as response:
            if response.status_code != 200:
                await asyncio.sleep(0.02)
                return
            async for piece in response.aiter_bytes():
                *whole, body = (body + piece).split(b"\n\n")
                for frame in whole:
                    self._take(frame)
        assert body == b"", "ended within a frame"

    def _take(self, frame):
        event = re.search(rb"^event: (\w+)$", frame, re.MULTILINE)[1].decode()
        id = re.search(rb"^id: (\S+)$", frame, re.MULTILINE)
        if id is not None:
            self.cursor = id[1].decode()
        if event == "message":
            self.offsets.append(int(self.cursor.partition(".")[0]))
        elif event not in {"hello", "head"}:
            self.others.append(event)


async def test_gateways_that_are_killed_or_told_to_end_under_load_leave_no_hole(url):
    with contextlib.ExitStack() as stack:
        begun = [gateway(url), gateway(url, "--drain", "2s"), gateway(url)]
        killed, told, last = [await asyncio.to_thread(stack.enter_context, each) for each in begun]
        gateways = [where(killed)]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:
            crowd = [Viewer(client, gateways) for _ in range(VIEWERS)]
            async with publishing(url):
                watching = [asyncio.create_task(viewer.watch()) for viewer in crowd]
                await _until(lambda: all(len(viewer.offsets) > 10 for viewer in crowd))

                gateways.append(where(told))
                killed.kill()
                await _all_go_on(crowd)
                endings = [len(viewer.endings) for viewer in crowd]

                gateways.append(where(last))
                told_at = time.monotonic()
                assert await asyncio.to_thread(told.stop) == 0
                assert time.monotonic() - told_at < 10
                await _all_go_on(crowd)
            await asyncio.gather(*watching)

        for viewer, cut in zip(crowd, endings, strict=True):
            assert viewer.offsets == list(range(1, viewer.offsets[-1] + 1))
            assert viewer.others == ["end"]
            assert set(viewer.endings[cut:]) == {"whole"}
        assert len({viewer.offsets[-1] for viewer in crowd}) == 1
        assert "gateway scan: ended" in told.said
        assert last.metric("semel_gateway_resumed_total") == VIEWERS
        assert last.metric("semel_gateway_rings_total") > 0
        assert last.status["resets"] == {}


async def _all_go_on(crowd):
    reached = max(viewer.offsets[-1] for viewer in crowd)
    await _until(lambda: all(viewer.offsets[-1] > reached + 10 for viewer in crowd))


async def _until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


def test_gateway_whose_file_was_deleted_is_not_ready_and_logs_it_once_a_minute(url):
    with gateway(url) as running:
        assert running.ready["ready"]
        Path(url.removeprefix("sqlite:///")).unlink()
        answers = [httpx.get(f"{where(running)}/7", timeout=10) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503] * 3
        running.until(lambda: not running.ready["ready"], "the probe to notice")
        status, told = running.ask("/readyz")
        assert (status, "log.db" in told) == (503, True)
        running.until(lambda: "a viewer gets a 503" in running.said, "its line")
        assert running.stop() == 0
    assert running.said.count("a viewer gets a 503") == 1
