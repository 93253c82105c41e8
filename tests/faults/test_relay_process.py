"""`semel relay` as a process: told to end, killed, frozen, cut off from what it needs."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from semel.stores import SQLiteStore
from semel.stores.sql import schema
from support.relay_process import SEMEL, Running, add, are_in_order, lying_in, numbers_of, producing

SHARDS = 4


@pytest.fixture
def database(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    schema.init(url)
    return url


@pytest.fixture
def postgres(postgres_url):
    schema.init(postgres_url)
    return postgres_url


@pytest.fixture
def broker(redis_url):
    return f"{redis_url}?shards={SHARDS}"


def relay(database, broker, *options, **popen):
    return Running("relay", database, "--to", broker, *options, **popen)


def catches_up(running):
    running.until(lambda: running.status.get("unpublished") == 0, "it to catch up")


# --- its end ------------------------------------------------------------------------------------


async def test_told_to_end_under_load_nothing_is_lost_and_the_next_one_need_not_wait(
    postgres, broker
):
    database = postgres
    with contextlib.ExitStack() as stack:
        with producing(database) as numbers:
            first = stack.enter_context(relay(database, broker, "--lease", "60s"))
            first.until(lambda: first.metric("semel_relay_published_total") > 50, "events")
            assert first.stop() == 0
            second = stack.enter_context(relay(database, broker, "--lease", "60s"))
            second.until_owned(SHARDS, within_s=45)  # and not after a lease
            reached = len(numbers)
            second.until(lambda: len(numbers) > reached, "more events")
        catches_up(second)
        assert second.stop() == 0

    found = await lying_in(broker)
    assert numbers_of(found) == numbers
    assert are_in_order(found)
    assert first.said.splitlines()[-1].endswith("relay default: ended")


@pytest.mark.parametrize(
    ("kind", "fate"), [("database", signal.SIGKILL), ("postgres", signal.SIGSTOP)]
)
async def test_a_relay_that_is_gone_is_replaced_when_its_lease_has_run_out(
    request, broker, kind, fate
):
    """Not frozen on SQLite: whoever is stopped in the middle of a transaction stops everybody."""
    database = request.getfixturevalue(kind)
    with contextlib.ExitStack() as stack:
        with producing(database) as numbers:
            first, second = (
                stack.enter_context(relay(database, broker, "--lease", "2s")) for _ in range(2)
            )
            second.until_owned(SHARDS // 2)
            first.until_owned(SHARDS // 2)
            first.signal(fate)
            second.until_owned(SHARDS)
            reached = len(numbers)
            second.until(lambda: len(numbers) > reached, "more events")
        catches_up(second)
        if fate is signal.SIGSTOP:  # it goes on with its next line, and is refused
            first.signal(signal.SIGCONT)
            assert first.stop() == 0
        assert second.stop() == 0

    found = await lying_in(broker)
    assert numbers_of(found) == numbers
    assert are_in_order(found)


@pytest.mark.parametrize(
    ("grace", "told", "why"),
    [("1h", 2, "told to end twice"), ("300ms", 1, "not done 0.3 s after it was told to end")],
)
def test_what_hangs_is_ended_by_a_second_signal_or_after_its_grace(
    redis_server, redis_url, database, grace, told, why
):
    with relay(database, redis_url, "--lease", "60s", "--grace", grace) as running:
        running.until_owned(1)
        with redis_server.paused():
            add(database, range(10))
            running.until(lambda: running.status["unpublished"] == 10, "events to wait")
            for _ in range(told):
                running.signal(signal.SIGTERM)
                running.until(lambda: "ending, as soon as" in running.said, "it to hear of it")
            assert running.ended() == 1
    assert f"semel: {why}; it ends at once" in running.said


@pytest.mark.parametrize("told", [1, 2])
def test_it_ends_also_when_nobody_reads_what_it_says(tmp_path, told):
    """A pipe to something that has ended, such as a collector of logs."""
    SQLiteStore(tmp_path / "log.db").close()
    words = ("gateway", f"sqlite:///{tmp_path}/log.db", "--port", "0", "--drain", "100ms")
    gateway = subprocess.Popen([str(SEMEL), *words], stderr=subprocess.PIPE, text=True)
    while "jobs at" not in gateway.stderr.readline():
        pass
    gateway.stderr.close()
    for _ in range(told):
        gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(30) in {0, told - 1}


BLOCKED = """
import time
from semel.cli.process import _Ending
with _Ending(grace_s=3600):
    print("up", flush=True)
    time.sleep(3600)
"""


def test_a_second_signal_ends_it_also_when_somebody_blocks_its_loop():
    running = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout.readline() == "up\n"
    running.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0.3)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 1
    assert "told to end twice" in said


# --- what it needs ------------------------------------------------------------------------------


def test_a_database_that_is_down_is_waited_for(postgres_server, postgres, tmp_path):
    add(postgres, range(10))
    postgres_server.kill()
    with relay(postgres, f"sqlite:///{tmp_path}/broker.db") as running:
        running.until(lambda: running.ask("/readyz")[0] == 503, "it to notice")
        assert running.ask("/healthz")[0] == 200
        assert "check that the server is up" in running.ready["why"][0]
        assert running.metric("semel_relay_circuit_open") == 1
        assert "semel_relay_lag_seconds{" not in running.ask("/metrics")[1]

        postgres_server.start()
        running.until(lambda: running.ask("/readyz")[0] == 200, "it to come back")
        catches_up(running)
        assert running.metric("semel_relay_published_total") == 10
        assert running.stop() == 0
    assert "relay default: 0 of 1 shards, 0 published, 0/s, lag unknown, " in running.said


def test_told_to_end_while_its_database_is_down_it_ends(postgres_server, postgres_url, tmp_path):
    postgres_server.kill()
    with relay(postgres_url, f"sqlite:///{tmp_path}/broker.db") as running:
        running.until(lambda: running.ask("/readyz")[0] == 503, "it to notice")
        assert running.stop() == 0


async def test_a_broker_that_is_down_is_waited_for(redis_server, redis_url, database):
    with relay(database, redis_url) as running:
        running.until_owned(1)
        redis_server.kill()
        add(database, range(10))
        running.until(lambda: running.ask("/readyz")[0] == 503, "it to notice")
        assert running.metric("semel_relay_circuit_open") == 1
        assert running.ask("/healthz")[0] == 200
        redis_server.start()
        running.until(lambda: running.ask("/readyz")[0] == 200, "it to come back")
        catches_up(running)
        assert running.stop() == 0
    assert numbers_of(await lying_in(redis_url)) == list(range(10))
    assert running.said.count("does not answer, waiting for it") == 1
    assert running.said.count("answers again after") == 1


# --- what it says -------------------------------------------------------------------------------


def test_a_terminal_gets_one_line_that_is_rewritten(database, tmp_path):
    add(database, range(3))
    shown, said = pty.openpty()
    words = ("relay", database, "--to", f"sqlite:///{tmp_path}/broker.db")
    running = subprocess.Popen(
        [sys.executable, "-m", "semel", *words],
        stderr=said,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(said)
    try:
        text = read_until(shown, "1 of 1 shards, 3 published")
        running.send_signal(signal.SIGINT)  # as Ctrl-C does
        text += read_until(shown, "ended\r\n")
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.wait()
        os.close(shown)
    assert "\r\x1b[2Krelay default: " in text
    assert not re.search(r"\d\d:\d\d:\d\dZ", text)


def read_until(terminal, wanted):
    text, deadline = "", time.monotonic() + 30
    while wanted not in text:
        assert time.monotonic() < deadline, text
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 4096).decode()
    return text
