"""The page of `scan_pipeline` in a real browser, while everything around it breaks."""

from __future__ import annotations

import random

import httpx
import pytest
from selenium.webdriver.common.by import By

from semel.bus import BlockingPublisher, get_next_seq
from semel.client.feed import feed
from support.process import HOST, free_port, wait_until
from support.proxy import Proxy
from support.relay_process import Running
from support.scan_pipeline import start_pipeline

pytestmark = pytest.mark.timeout(180)

SCANS = 8


@pytest.fixture(scope="module")
def proxy():
    """Between the browser and the gateway."""
    with Proxy(free_port()) as between:
        yield between


@pytest.fixture(scope="module")
def pipeline(proxy):
    _, gateway_port = proxy.target
    behind = ("--public-gateway", f"http://{HOST}:{proxy.port}")
    started = start_pipeline(*behind, crash=0.04, gateway_port=gateway_port)
    yield started
    started.stop()


@pytest.fixture
def page(browser, pipeline, proxy):
    proxy.pass_through()
    opened = Page(browser, pipeline)
    yield opened
    browser.execute_script("sessionStorage.clear()")
    browser.get("about:blank")


class Page:
    """What somebody who looks at it sees, and what it says it has applied."""

    def __init__(self, browser, pipeline):
        self.browser = browser
        self.pipeline = pipeline
        browser.get(pipeline.url)

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def click(self, id):
        self.browser.find_element(By.ID, id).click()

    def scan(self, count=1):
        for _ in range(count):
            self.browser.find_element(By.CSS_SELECTOR, "#start button").click()

    @property
    def applied(self):
        """By scan, the positions of what was applied, in that order."""
        return self.run("return window.applied ?? {}")

    @property
    def lives(self):
        """By scan, as it is shown."""
        cards = "Array.from(document.querySelectorAll('article'), (c) => [c.id, c.dataset.life])"
        found = self.run(f"return {cards}")
        return {id.removeprefix("scan-"): life for id, life in found}

    @property
    def is_over(self):
        lives = self.lives
        return bool(lives) and set(lives.values()) <= {"done", "failed"}

    def story(self, scan):
        """The numbers beside what happened, as they are shown."""
        card = f"document.querySelectorAll('#scan-{scan} .story .event')"
        return self.run(f"return Array.from({card}, (line) => line.value)")

    def wait_until_over(self):
        wait_until(lambda: self.is_over, "every scan to end", within_s=60)


def offsets(record):
    return [int(position.partition(".")[0]) for position in record]


def truth(pipeline, scan):
    """The positions of what happened, from the gateway itself."""
    with feed(f"{pipeline.gateway_url}/{scan}") as told:
        return [each.id for each in told]


# --- whatever breaks ----------------------------------------------------------------------------


def test_it_never_goes_back_never_misses_and_never_repeats(page, pipeline, proxy):
    chance = random.Random()
    seen = {}

    def look():
        """What is there now begins with what was there before."""
        applied = page.applied
        for scan, record in seen.items():
            assert applied[scan][: len(record)] == record, scan
        for scan, record in applied.items():
            assert offsets(record) == list(range(1, len(record) + 1)), (scan, record)
        moved = applied != seen
        seen.update(applied)
        return moved

    def kill_some_worker():
        # All may have just died by themselves: those who follow them are on their way.
        wait_until(lambda: pipeline.tally()["workers"], "a worker")
        pipeline.kill_worker(chance.choice(pipeline.tally()["workers"] or ["w1"]))

    def lose_the_network():
        proxy.refuse()
        look()
        proxy.pass_through()

    faults = 2 * [
        lambda: wait_until(pipeline.kill_gateway, "a gateway to kill"),
        proxy.cut,
        lambda: proxy.cut_after_bytes(chance.randrange(1, 4000)),
        lose_the_network,
        kill_some_worker,
        page.browser.refresh,
    ]
    chance.shuffle(faults)
    page.scan(SCANS)
    for fault in faults:
        if page.is_over:
            page.scan()
        fault()
        wait_until(look, "something to happen")
    page.wait_until_over()

    look()
    assert len(seen) >= SCANS
    for scan, record in seen.items():
        assert record == truth(pipeline, scan)
        assert page.story(scan) == offsets(record)
    assert pipeline.tally()["rewards"] >= SCANS
    assert "Traceback" not in pipeline.log_tail(100_000)


# --- the end ------------------------------------------------------------------------------------

LISTEN = """
const [url, done] = arguments;
const source = new EventSource(url), ids = [];
source.onmessage = ({ lastEventId }) => ids.push(lastEventId);
source.onerror = () => source.readyState === EventSource.CLOSED && done(ids);
"""


def test_who_knows_of_no_end_is_told_by_204_and_does_not_come_back(page, pipeline, proxy):
    """`EventSource` as it is: it reconnects whenever a stream is over, unless that is answered."""
    page.scan()
    page.wait_until_over()
    [(scan, record)] = page.applied.items()
    url = f"http://{HOST}:{proxy.port}/{scan}"
    assert page.browser.execute_async_script(LISTEN, url) == record
    answer = httpx.get(
        url, headers={"Accept": "text/event-stream", "Last-Event-ID": record[-1]}, timeout=10
    )
    assert answer.status_code == 204


def change(page, scan, script):
    """Change what the page has kept of a scan, and load it again."""
    page.run(
        "const name = `scan:${arguments[0]}`, kept = JSON.parse(sessionStorage.getItem(name));"
        f"{script}; sessionStorage.setItem(name, JSON.stringify(kept));",
        scan,
    )
    page.browser.refresh()


def test_a_page_that_was_away_when_its_scan_ended_hears_of_it_once(page, pipeline):
    page.scan()
    wait_until(lambda: any(page.applied.values()), "the first event")
    [scan] = page.applied
    page.browser.switch_to.new_window("tab")
    away = page.browser.current_window_handle
    assert truth(pipeline, scan)
    [there] = set(page.browser.window_handles) - {away}
    page.browser.close()
    page.browser.switch_to.window(there)
    page.wait_until_over()
    assert page.applied == {scan: truth(pipeline, scan)}

    # Everything was heard but the end.
    change(page, scan, "kept.life = 'w1'")
    page.wait_until_over()
    assert page.applied == {scan: truth(pipeline, scan)}


# --- what is not for this viewer ----------------------------------------------------------------

FOLLOW = """
const [url, done] = arguments, told = [];
import("/page/follow.js").then(({ follow }) => follow(url, null, {
  event: (event) => told.push(event.stage),
  passed: () => told.push("passed"),
  reset: () => told.push("reset"),
  line: () => {},
  end: () => done(told),
}));
"""


def test_what_is_not_for_this_viewer_is_no_hole(page, pipeline, tmp_path):
    (tmp_path / "views.py").write_text(
        "def shown(event, principal):\n    return None if event['stage'] == 'reward' else event\n"
    )
    url = f"sqlite:///{tmp_path}/jobs.db"
    with BlockingPublisher(url) as publisher:
        for stage, number in (("vision", 0), ("reward", 0), ("reward", 1), ("done", 0)):
            publisher.publish("7", stage, get_next_seq(stage, number), {})
    options = ("--project", "views:shown", "--cors", pipeline.url, "--port", "0")
    with Running("gateway", url, *options, cwd=tmp_path) as gateway:
        at = gateway.said.partition("jobs at ")[2].partition("JOB_ID")[0]
        page.browser.set_script_timeout(30)
        told = page.browser.execute_async_script(FOLLOW, f"{at}7")
        assert told == ["vision", "passed", "passed", "done"]
        assert gateway.status["opened"] == 1


# --- what is lost is said -----------------------------------------------------------------------


def test_a_page_with_another_history_is_reset_and_says_so(page, pipeline):
    page.scan()
    page.wait_until_over()
    [scan] = page.applied
    happened = truth(pipeline, scan)
    change(page, scan, "kept.cursor = '3.ffffffffffff'; kept.applied.length = 3; kept.life = 'w1'")
    page.wait_until_over()
    assert page.applied == {scan: [*happened[:3], f"reset {happened[-1]}"]}
    reset = page.browser.find_element(By.CSS_SELECTOR, f"#scan-{scan} .story .reset")
    assert "something is missing here (forked)" in reset.text
