"""The example `case_outbox`, run for real: on SQLite, and on PostgreSQL and Redis."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import redis

from support.process import HOST, free_port, wait_until

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "case_outbox"
HOW_TO = TESTS.parent / "docs" / "how-to" / "cases-through-an-outbox.md"

pytestmark = pytest.mark.timeout(180)


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CASES_", "SEMEL_"))}
    return {**kept, "CASES_LEASE_S": "2", **more}


def example(*options, folder):
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *options],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


# --- the story ----------------------------------------------------------------------------------

CASES = 40
EVENTS = {
    "vision_group": 6 * CASES,
    "synapse_group": 6 * CASES,
    "watch_cep_group": 2 * CASES,
    "worker_group": 2 * CASES,
}
"""How many each group is to hear of."""


def check_story(done):
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    counted = re.findall(r"\n   (\w+) +(\d+) events, +(\d+) effects: (.*)", done.stdout)
    told = "each once, each case in order"
    assert counted == [(group, str(n), str(n), told) for group, n in EVENTS.items()]
    assert f"{CASES - 1} of {CASES} cases have been read" in done.stdout
    assert re.search(r"\n     \w{12} .* parked +poison ", done.stdout)


def test_the_story_on_sqlite_ends_as_promised(tmp_path):
    check_story(example("try", "--cases", str(CASES), folder=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_story_on_postgresql_and_redis_ends_as_promised(tmp_path, postgres_url, redis_url):
    places = ("--database", postgres_url, "--broker", redis_url)
    check_story(example("try", "--cases", str(CASES), *places, folder=tmp_path))
    with redis.Redis.from_url(redis_url, decode_responses=True) as server:
        groups = {
            topic: {group["name"] for group in server.xinfo_groups(topic)}
            for topic in ("axiom:events", "axiom:watches", "axiom:workers")
        }
    assert groups == {
        "axiom:events": {"vision_group", "synapse_group"},
        "axiom:watches": {"watch_cep_group"},
        "axiom:workers": {"worker_group"},
    }


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("try", "--cases", "3"), "at least 10"),
        (("try", "--cases", "0"), "at least 10"),
        (("try", "--cases", "-3"), "at least 10"),
        (("try", "--cases", "many"), "invalid"),
        (("--cases", "40"), "--cases goes with try"),
    ],
)
def test_a_number_of_cases_that_tells_no_story_is_refused(tmp_path, options, why):
    refused = example(*options, folder=tmp_path)
    assert refused.returncode == 2
    assert why in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_story_that_is_broken_off_ends_cleanly(tmp_path):
    with Example(tmp_path, "try", "--cases", "400") as story:
        story.wait_for(r"2\. In the middle of it, the relay")
        assert story.end(signal.SIGINT) == 130
    said = story.said.read_text()
    assert "Traceback" not in said
    assert said.endswith("\nBroken off.\n")


PLANTED = """
from types import SimpleNamespace as Row
from books import wrong

done = [("one", 2, "a"), ("one", 1, "b"), ("two", 1, "c"), ("two", 2, "c"), ("two", 3, "x")]
rows = [Row(case_id=case, seq=seq, event_id=id) for case, seq, id in done]
print(*wrong(["a", "b", "c", "d"], rows), sep=", ")
"""


def test_its_books_find_what_is_planted(tmp_path):
    env = piece(tmp_path)["env"]
    words = [sys.executable, "-c", PLANTED]
    found = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == (
        "1 had none, 1 were never committed, 1 had more than one, 1 cases out of order"
    )


# --- until Ctrl-C -------------------------------------------------------------------------------


class Example:
    """The example in a process of its own; what it says is in a file."""

    def __init__(self, folder, *options):
        self.said = folder / "said.txt"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE), *options],
                cwd=folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end(signal.SIGKILL)

    def wait_for(self, pattern):
        def has_said_it():
            assert self.process.poll() is None, self.said.read_text()
            return re.search(pattern, self.said.read_text())

        wait_until(has_said_it, pattern, within_s=60)

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(30)


def test_killed_and_started_again_it_goes_on_until_it_is_told_to_end(tmp_path):
    with Example(tmp_path) as first:
        first.wait_for(r"worker_group [1-9]\d* applied, [2-9] held")
    with Example(tmp_path) as second:
        second.wait_for(r"worker_group [1-9]\d* applied, \d+ held")
        assert second.end(signal.SIGINT) == 0
    assert "Traceback" not in second.said.read_text()
    effects = defaultdict(list)
    select = "SELECT group_name, case_id, seq FROM done ORDER BY id"
    for group, case, seq in rows(tmp_path / "build" / "case_outbox" / "cases.db", select):
        effects[group, case].append(seq)
    assert {group for group, _ in effects} == set(EVENTS)
    assert all(seqs == list(range(1, len(seqs) + 1)) for seqs in effects.values())


def rows(path, select):
    with sqlite3.connect(path) as database:
        return database.execute(select).fetchall()


# --- killed -------------------------------------------------------------------------------------

KILLED = {"before its commit": ("before_commit", 0), "after its commit": ("after_commit", 2)}
"""Where, and how many documents are read by then."""


def test_the_page_tells_of_every_place():
    places = re.findall(r"^\| the OCR worker, ([a-z ]+?)[ ,]*\|", HOW_TO.read_text(), re.MULTILINE)
    assert places == list(KILLED)


@pytest.mark.parametrize("place", KILLED)
def test_a_reading_and_its_event_are_there_together_or_not_at_all(place, tmp_path):
    hook, read = KILLED[place]
    stopped = tmp_path / "stopped"
    with subprocess.Popen(**piece(tmp_path, "stop", hook, str(stopped))) as worker:
        try:
            wait_until(stopped.exists, f"the worker to stop {place}", within_s=60)
        finally:
            worker.kill()
    assert counts(tmp_path) == (read, read)

    subprocess.run(**piece(tmp_path, "finish"), timeout=60, check=True)
    assert counts(tmp_path) == (2, 2)


def piece(folder, *words):
    """A part of the example, as a command."""
    return {
        "args": [sys.executable, "-m", "support.case_paused", *words],
        "env": environment(
            CASES_DATABASE=f"sqlite:///{folder}/cases.db",
            CASES_BROKER=f"sqlite:///{folder}/broker.db",
            PYTHONPATH=os.pathsep.join([str(TESTS), str(EXAMPLE)]),
        ),
    }


def counts(folder):
    """Documents that were read, and events that say so."""
    [[readings]] = rows(folder / "cases.db", "SELECT count(*) FROM worker_readings")
    select = "SELECT count(*) FROM event_outbox WHERE event_type = 'document.read'"
    [[events]] = rows(folder / "cases.db", select)
    return readings, events


# --- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--database", "mysql://ann:secret@db/cases"], "SQLite and PostgreSQL"),
        (["--broker", f"redis://:secret@{HOST}:{free_port()}"], "did not answer"),
        (["try", "--broker", "memory://"], "several processes"),
    ],
    ids=["another kind", "nobody answers", "nobody hears"],
)
def test_what_cannot_be_had_is_said_in_a_line(options, words, tmp_path):
    done = example(*options, folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert words in line
    assert "secret" not in line
