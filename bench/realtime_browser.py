"""From publishing to a page: an EventSource in a real Chromium, on the same machine.

Both sides read the system's clock: the publisher when it begins to publish, the page when its
listener is called, by `performance.timeOrigin + performance.now()`, which counts in tenths of
milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.realtime_crowd import HOST, STAMP
from bench.realtime_servers import Missing, Publish, Running, message
from support import binaries
from support.process import wait_until

EVERY_S = 0.1
WARM = 10

LISTEN = """
const [path] = arguments;
window.heard = [];
window.source = new EventSource(path);
window.source.addEventListener("message", (message) => {
  window.heard.push([performance.timeOrigin + performance.now(), message.data]);
});
"""


def run(running: Running, messages: int) -> list[float]:
    """How many milliseconds each message took."""
    try:
        from support.browser import start_browser

        browser = start_browser()
    except (binaries.Unavailable, ImportError) as error:
        raise Missing(str(error)) from error
    try:
        with running.place() as (seat, publish):
            # Whatever is there: its scripts are of the same origin.
            browser.get(f"http://{HOST}:{seat.port}/")
            browser.execute_script(LISTEN, seat.path)
            _wait(lambda: browser.execute_script("return window.source.readyState") == 1)
            return _measured(browser, publish, messages)
    finally:
        browser.stop()


def _measured(browser: Any, publish: Publish, messages: int) -> list[float]:
    for _ in range(WARM):  # connections, scripts, and what a browser makes ready when it is used
        publish(message(0))
    for _ in range(messages):
        time.sleep(EVERY_S)
        publish(message(time.time_ns()))
    _wait(lambda: browser.execute_script("return window.heard.length") >= WARM + messages)
    took = []
    for at_ms, said in browser.execute_script("return window.heard"):
        found = STAMP.search(said.encode())
        assert found is not None, said
        if sent_ns := int(found[1]):
            took.append(at_ms - sent_ns / 1e6)
    return took


def _wait(condition: Callable[[], bool]) -> None:
    wait_until(condition, "the page", within_s=20)
