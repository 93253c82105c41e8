"""The example `scan_pipeline`, run for real: workers die, and every scan is told of once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from semel.client.feed import feed
from support.process import HOST, family, free_port, wait_until
from support.scan_pipeline import EXAMPLE, start_pipeline

pytestmark = pytest.mark.timeout(120)

SCANS = ["one", "two", "three"]
BLURRED = "two"
LIVE = {"Accept": "text/event-stream"}
STAGES = ["queued", "vision", "rule", "answer", "reward", "done"]


@pytest.fixture(params=["sqlite", "two redis"])
def pipeline(request):
    places, number, exit_code = {}, signal.SIGTERM, -signal.SIGTERM
    if request.param == "two redis":
        workers, gateway = map(request.getfixturevalue, ("redis_url", "valkey_url"))
        places, number, exit_code = {"url": workers, "feed_url": gateway}, signal.SIGINT, 0
    # Slow enough to be killed in the middle.
    started = start_pipeline(**places, crash=0.03, pace_s=0.1)
    try:
        yield started
        everybody = family(started.pid)
        with httpx.stream("GET", f"{started.gateway_url}/later", headers=LIVE, timeout=10):
            assert started.end(number) == exit_code
        assert not [pid for pid in everybody if is_alive(pid)]
        assert "Traceback" not in started.log_tail(100_000)
    finally:
        started.stop()


def heard(pipeline, scan):
    """What the gateway tells of a scan, to its end; the first one's worker is killed on the way."""
    events, is_killed = [], scan != SCANS[0]
    with feed(f"{pipeline.gateway_url}/{scan}") as told:
        for each in told:
            events.append((each.position.offset, each.data))
            if each.data["stage"] == "vision" and not is_killed:
                is_killed = pipeline.kill_worker(each.data["data"]["worker"])
    return events


def test_each_scan_is_told_of_once_and_rewarded_once_while_workers_die(pipeline):
    with ThreadPoolExecutor(len(SCANS)) as pool:
        hearing = {scan: pool.submit(heard, pipeline, scan) for scan in SCANS}
        for scan in SCANS * 2:  # a double click
            assert pipeline.scan(scan, "mess" if scan == BLURRED else "can").status_code == 202
        told = {scan: each.result() for scan, each in hearing.items()}

    for scan, events in told.items():
        assert [offset for offset, _ in events] == list(range(1, len(events) + 1)), scan
        assert {event["job_id"] for _, event in events} == {scan}
        expected = ["queued", "vision", "failed"] if scan == BLURRED else STAGES
        assert list(dict.fromkeys(event["stage"] for _, event in events)) == expected
    attempts = {event["attempt"] for events in told.values() for _, event in events}
    assert max(attempts) > 1, pipeline.log_tail()
    wait_until(lambda: pipeline.tally()["rewards"] == len(SCANS) - 1, "every reward")
    assert pipeline.scan(SCANS[0], "newspaper").status_code == 409


def test_its_processes_do_not_outlive_it(redis_url):
    pipeline = start_pipeline(url=redis_url)
    try:
        pipeline.scan("alone")
        assert heard(pipeline, "alone")
        _, *others = family(pipeline.pid)
        assert len(others) == 2 + 1  # workers, and the gateway
        os.kill(pipeline.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, others)), "the others to end", within_s=10)
    finally:
        pipeline.stop()


def is_alive(pid):
    """Is it there, and not only waited for?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- what cannot be -----------------------------------------------------------------------------


def example(*options, folder):
    words = [sys.executable, str(EXAMPLE), *options]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_help_tells_of_two_servers(tmp_path):
    said = example("--help", folder=tmp_path).stdout
    assert "workers write to shards of theirs, and a router carries the events over" in said
    assert "--feed-url redis://..." in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "memory://"], "several processes"),
        (["--url", f"redis://:secret@{HOST}:{free_port()}"], "did not answer"),
        (["--feed-url", "redis://b"], "--feed-url goes with --url"),
        (["--url", "scans"], "not a store's URL"),
    ],
    ids=["nobody sees", "nobody answers", "half", "no URL"],
)
def test_what_cannot_be_had_is_said_in_a_line(options, words, tmp_path):
    ports = ("--port", str(free_port()), "--gateway-port", str(free_port()))
    done = example(*options, *ports, folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert words in line
    assert "secret" not in line


def test_a_port_that_is_taken_is_said_with_what_to_write(tmp_path):
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        done = example("--port", str(free_port()), "--gateway-port", port, folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1
    assert f"port {port} is not free" in line
    assert "--gateway-port" in line


@pytest.mark.parametrize("options", [["--crash", "0.9"], ["--workers", "0"], ["--crash", "often"]])
def test_settings_with_which_nothing_is_ever_done_are_refused(options, tmp_path):
    done = example(*options, folder=tmp_path)
    assert done.returncode == 2
    assert options[0] in done.stderr
