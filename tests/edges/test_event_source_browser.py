"""The page of `run-a-gateway.md` in a real browser: what it shows, and how often it asks."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from semel.bus import BlockingPublisher
from semel.bus.jobs import stream_of
from semel.colour import SYNC, run
from semel.http.sse import Gateway
from semel.stores import MemoryStore
from support.client_server import serve
from support.process import wait_until

pytestmark = pytest.mark.timeout(120)

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "run-a-gateway.md"
[FOLLOW] = re.findall(r"^```js\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)

START = f"""
{FOLLOW}
const [url, cursor] = arguments;
window.shown = [];
window.over = null;
follow(url, cursor, (event) => window.shown.push(event.seq), (status) => (window.over = status));
"""

# Longer than the pauses of the first tries. A page that asks without a pause asks 1,000 times.
LOOK_S = 3.0


class Served:
    """A blank page, and a gateway that counts its requests and may be away."""

    def __init__(self, store):
        self._gateway = Gateway(store, retry_ms=(50, 100))
        self.asked = []
        self.away = 0
        """Requests that are still answered by `status`, with a page of HTML."""
        self.status = 503

    async def __call__(self, scope, receive, send):
        if scope["path"] in {"/", "/favicon.ico"}:
            await self._reply(send, 200)
            return
        accept = dict(scope["headers"]).get(b"accept", b"")
        self.asked.append("stream" if b"event-stream" in accept else "state")
        if self.away > 0:
            self.away -= 1
            await self._reply(send, self.status)
        else:
            await self._gateway(scope, receive, send)

    async def _reply(self, send, status):
        headers = [(b"content-type", b"text/html")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"<!doctype html><title>job</title>"})


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def publisher(store):
    return BlockingPublisher(store)


@pytest.fixture
def served(store):
    return Served(store)


@pytest.fixture
def page(browser, served):
    with serve(served) as origin:
        browser.get(f"{origin}/")
        yield browser
        browser.get("about:blank")


def follow(page, job="7", cursor=None):
    page.execute_script(START, f"/{job}", cursor)


def shown(page):
    return page.execute_script("return window.shown")


def wait_until_over(page):
    wait_until(lambda: page.execute_script("return window.over !== null"), "the end", within_s=60)
    return page.execute_script("return window.over")


def finish(publisher):
    for n in range(3):
        publisher.publish("7", "progress", data=n)
    publisher.publish("7", "done")


def end_of(store):
    return str(run(store.log(SYNC).load(stream_of("scan", "7"))).position)


def test_finished_job_is_asked_for_once(page, served, publisher):
    finish(publisher)
    follow(page)
    assert wait_until_over(page) == 200
    time.sleep(LOOK_S)
    assert shown(page) == [1, 2, 3, 50]
    assert served.asked == ["stream"]


def test_finished_job_whose_end_was_seen_is_asked_for_twice(page, served, publisher, store):
    """The stream's answer is 204. The page does not learn the status, so it gets the state."""
    finish(publisher)
    follow(page, cursor=end_of(store))
    assert wait_until_over(page) == 200
    time.sleep(LOOK_S)
    assert shown(page) == []
    assert served.asked == ["stream", "state"]


def test_gateway_that_is_away_is_asked_with_growing_pauses(page, served, publisher):
    publisher.publish("7", "progress", data=0)
    served.away = 1_000_000
    follow(page)
    time.sleep(LOOK_S)
    assert 2 <= len(served.asked) <= 14
    served.away = 0
    wait_until(lambda: shown(page) == [1], "the first event", within_s=60)
    publisher.publish("7", "progress", data=1)
    publisher.publish("7", "done")
    assert wait_until_over(page) == 200
    assert shown(page) == [1, 2, 50]


def test_events_missed_while_gateway_was_away_are_shown_after_job_has_ended(
    page, served, publisher, store
):
    publisher.publish("7", "progress", data=0)
    cursor = end_of(store)
    publisher.publish("7", "progress", data=1)
    publisher.publish("7", "done")
    served.away = 3
    follow(page, cursor=cursor)
    assert wait_until_over(page) == 200
    assert shown(page) == [2, 50]


def test_html_instead_of_stream_and_state_is_asked_for_again(page, served, publisher):
    """As of a proxy that answers by a page of its own."""
    finish(publisher)
    served.away, served.status = 4, 200
    follow(page)
    assert wait_until_over(page) == 200
    assert shown(page) == [1, 2, 3, 50]


def test_job_that_is_not_there_is_not_asked_for_again(page, served):
    follow(page, job="unknown")
    assert wait_until_over(page) == 404
    time.sleep(LOOK_S)
    assert served.asked == ["stream", "state"]


def test_plain_event_source_on_finished_job_asks_twice(page, served, publisher):
    """Without the page's code: the browser reconnects after the end, and stops at the 204."""
    finish(publisher)
    page.execute_script("window.plain = new EventSource('/7')")
    wait_until(lambda: page.execute_script("return window.plain.readyState") == 2, "the 204")
    time.sleep(LOOK_S)
    assert served.asked == ["stream", "stream"]
