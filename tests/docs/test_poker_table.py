"""The example `poker_table`, run for real: hands are played while its servers are killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from support.poker_table import CLIENT, EXAMPLE, Player, client_modules, start_table
from support.process import HOST, family, free_port, wait_until

pytestmark = pytest.mark.timeout(120)

COPY = "to copy it: PYTHONPATH=tests .venv/bin/python -m support.poker_table"


@pytest.fixture(params=["sqlite", "redis", "postgres"])
def table(request):
    url = None if request.param == "sqlite" else request.getfixturevalue(f"{request.param}_url")
    started = start_table(url=url)
    try:
        yield started
        everybody = family(started.pid)
        with Player(started, None):
            number = signal.SIGTERM if request.param == "sqlite" else signal.SIGINT
            assert started.end(number) == 0
        assert not [pid for pid in everybody if is_alive(pid)]
        assert "Traceback" not in started.log_tail(100_000)
    finally:
        started.stop()


@pytest.fixture(scope="module")
def sqlite_table():
    started = start_table()
    yield started
    started.stop()


def is_alive(pid):
    """Is it there, and not only waited for?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def sit_down(*players):
    for seat, player in enumerate(players):
        assert player.act("sit", seat=seat, buyIn=1000)["success"]


def is_mine(player):
    return lambda view: view["actor"] == player.user


def is_over(view):
    return view["phase"] == "over"


def test_a_hand_is_played_by_two_on_whichever_server_while_somebody_watches(table):
    with Player(table, "ann") as ann, Player(table, "ben") as ben, Player(table, None) as watcher:
        sit_down(ann, ben)
        ann.wait_until(is_mine(ann))  # dealt by itself
        assert ben.act("check")["error"]["code"] == "NOT_YOUR_TURN"
        turn = ann.view["turn"]  # an update may change the view before the answer arrives
        first = ann.act("raise", "r1", amount=60, turn=turn)
        again = ann.act("raise", "r1", amount=60, turn=turn)
        assert (first["success"], first["cached"], again["cached"]) == (True, False, True)
        assert again["reply"] == first["reply"]
        other = ann.act("raise", "r1", amount=80, turn=turn)
        assert other["error"]["code"] == "REQUEST_CONFLICT"
        ben.wait_until(is_mine(ben))
        assert ben.act("call")["success"]
        for _ in range(3):  # flop, turn and river
            for player in (ben, ann):
                player.wait_until(is_mine(player))
                assert player.act("check")["success"]
        everybody = (ann, ben, watcher)
        for each in everybody:
            each.wait_until(is_over)
            each.wait_until(lambda _, each=each: each.results)  # perhaps before its own answer
        [result] = {str(each.results[0]) for each in everybody}
        assert [pot["amount"] for pot in ann.results[0]["pots"]] == [120]
        assert sum(seat["stack"] for seat in ann.view["seats"] if seat) == 2000
        assert result
        mine = ann.view["cards"]
        assert len(mine) == 2
        assert watcher.view["cards"] == []
        assert watcher.act("fold")["error"]["code"] == "UNAUTHORIZED"


def test_a_server_is_killed_in_the_middle_and_the_hand_goes_on(table):
    with Player(table, "ann") as ann, Player(table, "ben") as ben:
        sit_down(ann, ben)
        ann.wait_until(is_mine(ann))
        assert ann.act("raise", "r1", amount=60)["success"]
        ann.kill_server()
        with pytest.raises(ConnectionClosed):
            ann.wait_for("nothing")
    with Player(table, "ann", cursor=ann.position) as back, Player(table, "ben") as ben:
        assert back.joined["resumed"]
        back.view, back.position = ann.view, ann.position
        assert back.act("raise", "r1", amount=60)["cached"]
        ben.wait_until(is_mine(ben))
        assert ben.act("fold")["success"]
        back.wait_until(is_over)
        assert back.view["cards"] == ann.view["cards"]
        stacks = {seat["user"]: seat["stack"] for seat in back.view["seats"] if seat}
        assert stacks == {"ann": 1020, "ben": 980}


def test_a_turn_that_nobody_plays_ends_though_nobody_is_connected(redis_url):
    table = start_table(url=redis_url, turn_s=0.5)
    try:
        with Player(table, "ann") as ann, Player(table, "ben") as ben:
            sit_down(ann, ben)
            ann.wait_until(is_mine(ann))
        with Player(table, None) as later:
            # Folded twice, and away: nobody is left to be dealt to.
            later.wait_until(lambda view: any(seat and seat["away"] for seat in view["seats"]))
            later.wait_until(lambda view: view["turn"] is None)
            assert sum(seat["stack"] for seat in later.view["seats"] if seat) == 2000
    finally:
        table.stop()


def test_a_turn_that_ends_while_both_servers_are_dead_ends_once(redis_url):
    table = start_table(url=redis_url, turn_s=2.0)
    try:
        with Player(table, "ann") as ann, Player(table, "ben") as ben:
            sit_down(ann, ben)
            ann.wait_until(is_mine(ann))
            _, *servers = family(table.pid)
            for pid in servers:
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, servers)), "the servers to be dead")
        wait_until(lambda: answers(table.port), "others")
        with Player(table, "ann", cursor=ann.position) as later:
            later.view, later.position = ann.view, ann.position
            later.wait_until(is_over)
            assert [each["event"] for each in later.events][:3] == ["late", "folded", "won"]
    finally:
        table.stop()


@pytest.mark.parametrize("name", ["", " ann", "a" * 21, "ann\u200b", "ann\n"])
def test_who_says_no_name_may_only_watch(sqlite_table, name):
    with Player(sqlite_table, None) as watcher:
        watcher.send("JOIN", "j2", token=name)
        assert watcher.wait_for("ERROR")["payload"]["code"] == "UNAUTHORIZED"


def test_without_a_url_it_is_in_a_file_of_its_own(tmp_path):
    port = free_port()
    words = [sys.executable, str(EXAMPLE), "--port", str(port)]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as started:
        wait_until(lambda: answers(port), "the page")
        started.send_signal(signal.SIGINT)
        said, _ = started.communicate(timeout=30)
    file = tmp_path / "build" / "poker_table" / "poker.db"
    assert started.returncode == 0
    assert f"sqlite:///{file}" in said
    assert f"with any name. To forget all of them, end it and remove {file.parent}." in plain(said)
    assert file.exists()


def plain(said):
    return " ".join(said.split())


def answers(port):
    try:
        return httpx.get(f"http://{HOST}:{port}", timeout=5).is_success
    except httpx.HTTPError:
        return False


def test_it_says_where_it_is_and_how_long_it_takes_until_a_hand_is_dealt(sqlite_table):
    said = plain(sqlite_table.log_tail(100_000))
    assert f"http://{HOST}:{sqlite_table.port}" in said
    assert 'the first hand is dealt after 0.3 seconds, or at once by "Deal now"' in said
    assert f"is at http://{HOST}:{sqlite_table.port}/?table=NAME, with any name." in said
    assert "remove" not in said  # what a URL names is not ours


def test_its_servers_do_not_outlive_it():
    table = start_table()
    try:
        _, *servers = family(table.pid)
        assert len(servers) == 2
        os.kill(table.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_alive, servers)), "the servers to end", within_s=10)
    finally:
        table.stop()


# --- the page's client --------------------------------------------------------------------------


def test_the_page_has_the_client_as_it_is_built(typescript_client):
    copied = {path.name: path.read_text() for path in CLIENT.iterdir()}
    built = client_modules(typescript_client)
    assert sorted(copied) == sorted(built), COPY
    assert [name for name in built if copied[name] != built[name]] == [], COPY


def test_all_that_the_page_loads_is_there():
    table = start_table()
    try:
        for path in (EXAMPLE / "page").rglob("*.*"):
            name = path.relative_to(EXAMPLE)
            assert httpx.get(f"{table.url}/{name}", timeout=5).is_success, name
    finally:
        table.stop()


# --- what cannot be -----------------------------------------------------------------------------


def example(*options, folder):
    words = [sys.executable, str(EXAMPLE), *options]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--url", "memory://"], "two servers"),
        (["--url", f"redis://:secret@{HOST}:{free_port()}"], "did not answer"),
        (["--url", f"postgresql://me:secret@{HOST}:{free_port()}/poker"], "did not answer"),
        (["--url", "poker"], "not a store's URL"),
    ],
    ids=["nobody sees", "no Redis", "no PostgreSQL", "no URL"],
)
def test_what_cannot_be_had_is_said_in_a_line(options, words, tmp_path):
    done = example(*options, "--port", str(free_port()), folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert words in line
    assert "secret" not in line


def test_a_port_that_is_taken_is_said_with_what_to_write(tmp_path):
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        done = example("--port", port, folder=tmp_path)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1
    assert f"port {port} is not free" in line


@pytest.mark.parametrize("options", [["--servers", "0"], ["--turn", "0"], ["--turn", "long"]])
def test_settings_with_which_nobody_can_play_are_refused(options, tmp_path):
    done = example(*options, folder=tmp_path)
    assert done.returncode == 2
    assert options[0] in done.stderr
