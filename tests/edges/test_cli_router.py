"""`semel router` as a process: what it answers, its end, its death, and to which mistakes."""

from __future__ import annotations

import contextlib
import signal

import pytest
from typer.testing import CliRunner

from semel.bus import BlockingPublisher, RouterStatus
from semel.cli import command, line
from semel.cli.app import app
from semel.colour import SYNC, run
from semel.health import Report
from semel.settings import as_log_store
from semel.stores import SQLiteStore
from support.relay_process import Running

JOBS = [f"job-{n}" for n in range(12)]


@pytest.fixture
def stores(tmp_path):
    """The URLs of the workers' store and the gateways'."""
    for name in ("workers", "gateways"):
        SQLiteStore(tmp_path / f"{name}.db").close()
    return f"sqlite:///{tmp_path}/workers.db", f"sqlite:///{tmp_path}/gateways.db"


@pytest.fixture
def databases(redis_url):
    """The same, in two databases of one Redis."""
    return redis_url, f"{redis_url.rpartition('/')[0]}/1"


def router(stores, *options):
    return Running("router", *stores, "--shards", "2", "--lease", "1s", *options)


def publish(stores, seqs, stage="vision"):
    with BlockingPublisher(stores[0], shards=2) as publisher:
        for seq in seqs:
            for job in JOBS:
                publisher.publish(job, stage, seq, None)


def routed(stores):
    """The numbers that came to each job's log."""
    store = as_log_store(stores[1])
    log = store.log(SYNC)
    found = {job: run(log.read(f"scan:job:{job}")).entries for job in JOBS}
    store.close()
    return {job: [int(e.id.rpartition(":")[2]) for e in entries] for job, entries in found.items()}


@pytest.mark.parametrize(
    ("kind", "fate"), [("stores", signal.SIGKILL), ("databases", signal.SIGSTOP)]
)
def test_a_router_that_is_gone_is_replaced_and_nothing_is_lost_or_twice(request, kind, fate):
    """Not frozen on SQLite: whoever is stopped in the middle of a transaction stops everybody."""
    stores = request.getfixturevalue(kind)
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(router(stores)) for _ in range(2))
        publish(stores, [10, 11])
        second.until_owned(1)
        first.until_owned(1)
        publish(stores, [12, 13])
        first.signal(fate)
        publish(stores, [14, 15])
        second.until_owned(2)
        wanted = {(10, 11, 12, 13, 14, 15)}
        second.until(lambda: set(map(tuple, routed(stores).values())) == wanted, "all")
        if fate is signal.SIGSTOP:  # it goes on with its next line
            first.signal(signal.SIGCONT)
        publish(stores, [50], stage="done")
        wanted = {(10, 11, 12, 13, 14, 15, 50)}
        second.until(lambda: set(map(tuple, routed(stores).values())) == wanted, "the end")
        if fate is signal.SIGSTOP:
            assert first.stop() == 0
        assert second.metric("semel_router_refused_total") == 0
        assert second.status["kind"] == "router"
        assert second.ask("/healthz")[0] == 200
        assert second.stop() == 0
    assert second.said.splitlines()[-1].endswith("router scan: ended")
    assert f"router scan: from {stores[0]} to {stores[1]}" in second.said


# --- mistakes -----------------------------------------------------------------------------------


def semel_cli(*args):
    return CliRunner().invoke(app, list(args))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: ("memory://", s[1]), "lives inside the process"),
        (lambda s: (s[0], "memory://"), "lives inside the process"),
        (lambda s: (s[0] + "x", s[1]), "there is nothing at"),
        (lambda s: (*s, "--lease", "10ms"), "too short to be renewed"),
        (lambda s: (*s, "--domain", "a:b"), "without a colon"),
        (lambda s: ("memory://", s[1], "--topic", "scan"), "heard by nobody"),
    ],
)
def test_what_cannot_work_is_told_in_a_sentence(stores, change, why):
    result = semel_cli("router", *change(stores))
    assert result.exit_code == command.BAD_INPUT
    assert why in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_router_with_fewer_shards_than_the_publishers_ends_and_says_so(stores):
    publish(stores, [10])
    result = semel_cli("router", *stores, "--shards", "1", "--quiet")
    assert result.exit_code == command.BAD_INPUT
    assert "this router has 1 shards" in result.stderr


def test_its_line_says_how_far_it_is_and_what_went_wrong():
    status = RouterStatus(
        "scan", 8, (0, 1), 4, routed=1200, refused={"stale": 2, "ended": 1}, lost=1, lag_s=0.25
    )
    told = line._told(Report(status), 300)
    assert told == (
        "2 of 8 shards, 1,200 routed, 300/s, 3 passed over, events lost 1 times, lag 0.2 s"
    )
    assert line._state(status)[-1] == 1


def test_final_number_given_ends_jobs_there(stores):
    with router(stores, "--final", "51") as running:
        publish(stores, [50, 51], stage="done")
        running.until(lambda: set(map(tuple, routed(stores).values())) == {(50, 51)}, "both")
        assert running.metric("semel_router_refused_total") == 0
        assert running.stop() == 0
    store = as_log_store(stores[1])
    assert run(store.log(SYNC).load(f"scan:job:{JOBS[0]}")).life == "ended"
    store.close()
