"""`semel tail`: a job line by line, from its store and through a gateway."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading

import pytest
from typer.testing import CliRunner

from semel.bus import BlockingPublisher
from semel.bus.jobs import stream_of
from semel.cli import command
from semel.cli.app import app
from semel.colour import SYNC, run
from semel.entries import Position
from semel.http.sse import Gateway, unauthorised
from semel.stores import MemoryStore, SQLiteStore
from support.cli_reference import documented_fields
from support.client_server import serve
from support.process import wait_until
from support.relay_process import SEMEL

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path}/semel.db"


@pytest.fixture
def publisher(url):
    with BlockingPublisher(url) as made:
        made.publish("job-7", "vision", 10, {"label": "bottle"})
        made.publish("job-7", "vision", 11, None)
        yield made


def tail(*args, **env):
    return CliRunner().invoke(app, ["tail", *args], env=env)


def lines(result):
    assert result.exit_code == 0, result.output
    return [line.split("\t") for line in result.stdout.splitlines()]


def told(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


# --- from the store -----------------------------------------------------------------------------


def test_a_job_is_told_line_by_line_until_it_has_ended(url, publisher):
    publisher.publish("job-7", "done", 50, [1, "é\n\x1b[31m"])
    result = tail(url, "job-7")
    times, *rest = zip(*lines(result), strict=True)
    assert list(zip(*rest, strict=True)) == [
        ("vision", "10", "1", '{"label": "bottle"}'),
        ("vision", "11", "1", "null"),
        ("done", "50", "1", '[1, "é\\n\\u001b[31m"]'),
    ]
    assert all(re.fullmatch(TIME, time) for time in times)
    assert result.stderr == "semel: the job has ended\n"


def test_the_url_may_be_in_the_environment(url, publisher):
    publisher.fail("job-7")
    assert len(lines(tail("job-7", SEMEL_URL=url))) == 3


def test_as_json_it_is_one_object_per_line_with_its_cursor(url, publisher):
    publisher.fail("job-7", {"why": "no bottle"}, stage="rule")
    updates = told(tail(url, "job-7", "--json"))
    assert [each["kind"] for each in updates] == ["update", "update", "update", "end"]
    assert updates[2]["event"]["failed_in"] == "rule"
    cursors = [Position.parse(each["cursor"]) for each in updates]
    assert [cursor.offset for cursor in cursors] == [1, 2, 3, 3]

    after = told(tail(url, "job-7", "--json", "--after", updates[1]["cursor"]))
    assert after == updates[2:]


def test_what_cannot_be_had_any_more_is_told_with_the_state_in_its_place(url, publisher, tmp_path):
    publisher.publish("job-7", "done", 50, None)
    store = SQLiteStore(tmp_path / "semel.db")
    run(store.log(SYNC).trim(stream_of("scan", "job-7"), 2))
    store.close()
    result = tail(url, "job-7")
    assert [line[1:3] for line in lines(result)] == [["vision", "11"], ["done", "50"]]
    assert "cannot be had (trimmed); it stands so:" in result.stderr
    reset, end = told(tail(url, "job-7", "--json"))
    assert (reset["kind"], reset["reason"], end["kind"]) == ("reset", "trimmed", "end")
    assert documented_fields("`tail`") == list(dict.fromkeys([*_UPDATE, *reset]))


_UPDATE = ("kind", "cursor", "event")


def test_a_stream_may_have_what_is_no_event(url, publisher, tmp_path):
    store = SQLiteStore(tmp_path / "semel.db")
    log, stream = store.log(SYNC), stream_of("scan", "odd")
    for n, data in enumerate([b"\xff", b"7", b'{"stage": "x", "timestamp": 7}']):
        run(log.append(stream, data, id=str(n), ends=n == 2))
    store.close()
    assert lines(tail(url, "odd")) == [
        ["", "", "", "", '"�"'],
        ["", "", "", "", "7"],
        ["", "x", "", "", '{"timestamp": 7}'],
    ]


class Following:
    """A tail as a process, by whoever types it; on a terminal, its stdout is one."""

    def __init__(self, *args, terminal=False):
        self._reading, writing = pty.openpty() if terminal else os.pipe()
        self._popen = subprocess.Popen(
            [str(SEMEL), "tail", *args], stdout=writing, stderr=subprocess.PIPE, text=True
        )
        os.close(writing)
        self.said = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self):
        try:
            while got := os.read(self._reading, 4096):
                self.said += got.decode()
        except OSError:  # a terminal whose other side is gone
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._popen.kill()
        self._popen.wait()
        self._thread.join()
        self._popen.stderr.close()
        os.close(self._reading)

    def until(self, text):
        wait_until(lambda: text in self.said, text)

    def interrupt(self):
        self._popen.send_signal(signal.SIGINT)
        return self._popen.wait(30), self._popen.stderr.read()


def test_it_shows_what_happens_as_it_happens_and_ends_cleanly_when_told_to(url, publisher):
    with Following(url, "job-7", terminal=True) as following:
        following.until("bottle")
        publisher.publish("job-7", "rule", 20, "now")
        following.until('"now"')
        assert "\x1b[1mrule" in following.said
        code, said = following.interrupt()
    assert code == 0
    assert re.fullmatch(r"semel: to go on from here: --after 3\.[0-9a-f]{12}\n", said)


def test_whoever_has_seen_enough_need_not_see_more(url, publisher):
    publisher.publish("job-7", "done", 50, None)
    command = f"{SEMEL} tail {url} job-7 | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert len(result.stdout.splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert "Broken" not in result.stderr


# --- through a gateway --------------------------------------------------------------------------


def keyed(request, job_id):
    if request.header("authorization") != "Bearer seven":
        raise unauthorised()
    return "somebody"


@pytest.fixture
def gateway():
    store = MemoryStore()
    publisher = BlockingPublisher(store)
    publisher.publish("job/7", "vision", 10, {"label": "bottle"})
    publisher.publish("job/7", "done", 50, None)
    with serve(Gateway(store, authorise=keyed)) as url:
        yield url


def test_a_gateway_shows_the_same(gateway):
    header = ("--header", "Authorization: Bearer seven")
    assert [line[1:] for line in lines(tail(gateway, "job/7", *header))] == [
        ["vision", "10", "1", '{"label": "bottle"}'],
        ["done", "50", "1", "null"],
    ]
    updates = told(tail(f"{gateway}/", "job/7", "--json", *header))
    assert [each["kind"] for each in updates] == ["update", "update", "end"]
    after = tail(gateway, "job/7", "--json", *header, "--after", updates[0]["cursor"])
    assert told(after) == updates[1:]


def test_who_may_not_see_it_is_told_so(gateway):
    result = tail(gateway, "job/7")
    assert result.exit_code == command.REFUSED
    assert "401" in result.stderr


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((), "give the store's URL and the job"),
        (("memory://", "job-7"), "lives inside the process"),
        (("sqlite:///nowhere.db", "job-7"), "there is nothing at"),
        (("sqlite:///x.db", "job-7", "--after", "7"), "is no cursor"),
        (("sqlite:///x.db", "job-7", "--domain", "a:b"), "without a colon"),
        (("sqlite:///x.db", "x" * 300), "1 to 255 bytes"),
        (("sqlite:///x.db", ""), "1 to 255 bytes"),
        (("http://127.0.0.1:1", "job-7", "--header", "no"), "is not NAME:VALUE"),
    ],
)
def test_what_cannot_work_is_told_in_a_sentence(args, why, monkeypatch):
    monkeypatch.delenv("SEMEL_URL", raising=False)
    result = tail(*args)
    assert result.exit_code == command.BAD_INPUT
    assert why in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_store_that_does_not_answer_is_told_at_once():
    result = tail("redis://127.0.0.1:1", "job-7")
    assert result.exit_code == command.UNAVAILABLE
