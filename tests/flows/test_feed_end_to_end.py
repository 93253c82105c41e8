"""From a worker's publish to a client's loop, with every connection cut again and again.

The gateway is the real one, under uvicorn; between it and each client stands a proxy that cuts
behind any byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import threading
import time

import pytest

from semel.bus import BlockingPublisher, get_next_seq
from semel.bus.jobs import stream_of
from semel.client.feed import FeedError, Reset, feed
from semel.colour import SYNC, run
from semel.http.sse import Gateway
from semel.stores import MemoryStore
from support.client_kinds import Metronome
from support.client_server import serve
from support.process import HOST
from support.proxy import Proxy
from support.typescript import FOLDER, environment

JOB = "job-7"
STAGES = ("vision", "rule", "answer", "reward")
EVENTS = [(stage, get_next_seq(stage, n)) for stage in STAGES for n in range(8)]
LAST = ("done", get_next_seq("done", 1))


@pytest.fixture
def store():
    with contextlib.closing(MemoryStore()) as made:
        yield made


@pytest.fixture
def port(store):
    with serve(Gateway(store, retry_ms=(100, 200), cors="*")) as url:
        yield int(url.rpartition(":")[2])


@pytest.fixture
def publisher(store):
    return BlockingPublisher(store)


def publish(publisher, *events):
    for stage, seq in events:
        publisher.publish(JOB, stage, seq, {"text": f"{stage} é€😀 {seq}\n" * 5})


class Watching(threading.Thread):
    """Follows the feed beside the test, and keeps what came."""

    def __init__(self, follow, url):
        super().__init__(daemon=True)
        self.follow = follow
        self.url = url
        self.got = None
        self.start()

    def run(self):
        self.got = self.follow(self.url)

    def ended(self):
        self.join(60)
        assert not self.is_alive(), "the feed did not end"
        return self.got


def in_python(url):
    with feed(url, world=Metronome()) as events:
        return [_kept(event) for event in events]


def in_async_python(url):
    async def main():
        async with feed(url, world=Metronome()) as events:
            return [_kept(event) async for event in events]

    return asyncio.run(main())


def _kept(event):
    return event if isinstance(event, Reset) else [event.id, event.data]


@pytest.fixture
def in_typescript(node, typescript_client):
    def follow(url):
        words = [node.path, "test/record.mjs", url]
        done = subprocess.run(
            words, cwd=FOLDER, env=environment(node), capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    return follow


@pytest.fixture
def in_browser(browser, typescript_client):
    """On a page of another origin than the gateway's."""

    async def page(scope, receive, send):
        file = typescript_client / scope["path"].removeprefix("/")
        kind = b"text/javascript" if file.suffix == ".js" else b"text/html"
        body = file.read_bytes() if file.is_file() else b"<!doctype html><title>feed</title>"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with serve(page) as origin:
        browser.get(f"{origin}/")
        yield lambda url: browser.execute_async_script(IN_BROWSER, url)
        browser.get("about:blank")


IN_BROWSER = """
const [url, done] = arguments;
const sleep = () => new Promise((resolve) => setTimeout(resolve, 1));
const world = { now: () => performance.now(), chance: Math.random, sleep };
const { feed } = await import("/index.js");
const got = [];
for await (const event of feed(url, { world })) got.push([event.id, event.data]);
done(got);
"""


def test_what_is_published_arrives_once_and_in_order_however_it_is_cut(
    port, publisher, in_typescript, in_browser
):
    publish(publisher, EVENTS[0])
    with contextlib.ExitStack() as stack:
        proxies, watching = [], []
        for seed, follow in enumerate((in_python, in_async_python, in_typescript, in_browser)):
            proxy = stack.enter_context(Proxy(port))
            chance = random.Random(seed)
            proxy.cut_after_bytes(*(chance.randrange(1500) for _ in range(12)))
            proxies.append(proxy)
            watching.append(Watching(follow, f"http://{HOST}:{proxy.port}/{JOB}"))
        for event in EVENTS[1:]:
            publish(publisher, event)
            time.sleep(0.01)  # so that some come while somebody is connected
        publish(publisher, LAST)
        records = [each.ended() for each in watching]
    wanted = [[stage, seq] for stage, seq in [*EVENTS, LAST]]
    for record in records:
        assert [int(id.partition(".")[0]) for id, _ in record] == [*range(1, len(wanted) + 1)]
        assert [[data["stage"], data["seq"]] for _, data in record] == wanted
        assert record == records[0]
    assert [proxy.cuts for proxy in proxies] == [12] * 4


def url_of(port, query=""):
    return f"http://{HOST}:{port}/{JOB}{query}"


def seqs(events):
    return [event.data["seq"] for event in events]


def test_who_comes_back_behind_the_end_is_told_that_it_is_over(port, publisher):
    publish(publisher, *EVENTS[:2], LAST)
    with feed(url_of(port)) as events:
        assert seqs(events) == [10, 11, LAST[1]]
        final = events.cursor
    with feed(url_of(port), after=final) as events:
        assert list(events) == []


def test_who_has_missed_what_is_gone_gets_the_state_and_goes_on(port, publisher, store):
    publish(publisher, *EVENTS[:8])
    with feed(url_of(port)) as events:
        assert next(events).data["seq"] == 10
        cursor = events.cursor
    run(store.log(SYNC).trim(stream_of("scan", JOB), 5))
    # Another one: the first has not forgotten what it had read.
    with serve(Gateway(store)) as url, feed(f"{url}/{JOB}", after=cursor) as events:
        reset = next(events)
        assert isinstance(reset, Reset)
        assert (reset.reason, reset.position.offset) == ("trimmed", 8)
        assert reset.state == events.state()
        publish(publisher, EVENTS[8], LAST)
        assert seqs(events) == [EVENTS[8][1], LAST[1]]


def test_a_cursor_of_another_job_is_answered_with_the_state(port, publisher):
    publish(publisher, *EVENTS[:2], LAST)
    with feed(url_of(port), after="1.0123456789ab") as events:
        first, *others = events
    assert isinstance(first, Reset)
    assert others == []


def test_a_job_that_nobody_knows_is_an_error(port):
    with feed(url_of(port)) as events, pytest.raises(FeedError, match="Nobody has said") as caught:
        next(events)
    assert caught.value.status == 404


def test_what_is_not_for_this_viewer_is_passed_over_and_is_no_hole(store, publisher):
    def project(event, principal):
        return event if event["seq"] % 2 == 0 else None

    publish(publisher, *EVENTS[:6], LAST)
    with serve(Gateway(store, project=project)) as url, feed(f"{url}/{JOB}") as events:
        assert seqs(events) == [10, 12, 14]
        assert events.cursor.startswith("7.")


@pytest.mark.parametrize("cut", [0, 200, 350, 500, 650, 800])
def test_what_had_been_seen_before_is_not_seen_again_after_a_cut(port, publisher, cut):
    """Also where the event that was seen last is not in the log."""
    publish(publisher, *EVENTS[:4], *EVENTS[8:10], LAST)
    with Proxy(port) as proxy:
        for last_seq in (11, 15):
            proxy.cut_after_bytes(cut)
            with feed(url_of(proxy.port), last_seq=last_seq, world=Metronome()) as events:
                wanted = [12, 13, 20, 21, LAST[1]] if last_seq == 11 else [20, 21, LAST[1]]
                assert seqs(events) == wanted
