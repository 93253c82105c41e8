"""`semel rooms`: what it says to mistakes, what it takes from the application, how it ends."""

from __future__ import annotations

import json
import socket
import sys
from contextlib import ExitStack

import pytest
from typer.testing import CliRunner
from websockets.sync.client import connect

from semel.cli.app import app
from semel.http.ws.visitor import check_authorise
from semel.stores import SQLiteStore
from support.process import HOST
from support.relay_process import Running

GAME = """
from semel.rooms import Accepted, Refused, Room

class Tally(Room):
    def begin(self, room_id):
        return {"count": 0}

    def apply(self, state, action, ctx):
        if action["actionType"] != "add":
            return Refused("INVALID", "there is nothing to do but add")
        return Accepted({"count": state["count"] + 1}, {"by": ctx.user})

    def view(self, state, viewer):
        return state

class Blind(Room):
    def apply(self, state, action, ctx):
        return Refused()

class Sized(Tally):
    def __init__(self, size, *, rules=None):
        self.size = size

tally = Tally()
sized = Sized(3)
other = 7

def user_of(visitor, room_id):
    return visitor.header("x-user")

def user_alone(visitor):
    return visitor.header("x-user")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tally_game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tally_game", raising=False)
    return tmp_path


@pytest.fixture
def url(folder):
    SQLiteStore(folder / "log.db").close()
    return f"sqlite:///{folder}/log.db"


def semel_cli(*words):
    return CliRunner().invoke(app, ["rooms", *words])


@pytest.mark.parametrize(
    ("where", "options", "said"),
    [
        ("tally_game", (), "is not MODULE:NAME"),
        ("nowhere:table", (), "there is no module 'nowhere'"),
        ("tally_game:missing", (), "tally_game:tally"),
        ("tally_game:other", (), "is a int, not a Room"),
        ("tally_game:Blind", (), "tally_game:Blind has no view; a class of Room says"),
        ("tally_game:Sized", (), "without its arguments, (size, *, rules=None)"),
        ("tally_game:Sized", (), "room = Sized(...), and name that: tally_game:room"),
        ("tally_game:tally", ("--name", "a:b"), "a name without a colon"),
        ("tally_game:tally", ("--heartbeat", "soon"), "is not a duration"),
        ("tally_game:tally", ("--requests", "later"), "is not a duration"),
        ("tally_game:tally", ("--origin", "shop.example"), "scheme and host"),
        ("tally_game:tally", ("--authorise", "tally_game"), "is not MODULE:NAME"),
        ("tally_game:tally", ("--authorise", "tally_game:other"), "is no function"),
        (
            "tally_game:tally",
            ("--authorise", "tally_game:user_alone"),
            "authorise=user_alone(visitor) is asked as user_alone(visitor, room_id)",
        ),
        ("tally_game:tally", ("--trust", "--authorise", "tally_game:user_of"), "give one"),
    ],
)
def test_what_cannot_work_is_said_and_ends_it(url, where, options, said):
    answer = semel_cli(where, "--store", url, "--port", "0", "--drain", "1s", *options)
    assert answer.exit_code == 2
    assert said in " ".join(answer.stderr.split())
    assert "Traceback" not in answer.stderr


def annotated(visitor: str, room_id: str) -> str:
    return visitor


# As Python 3.14 has it of a name that is there for type checkers only.
annotated.__signature__ = "none"


@pytest.mark.parametrize(
    "authorise",
    [dict, min, annotated, lambda *both: both, lambda visitor, room, why="": why],
    ids=["in C", "any number", "not to be inspected", "both", "more"],
)
def test_what_can_be_asked_or_cannot_be_inspected_may_say_who_somebody_is(authorise):
    check_authorise(authorise)


def test_a_port_that_is_taken_is_said(url):
    with socket.create_server((HOST, 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = semel_cli("tally_game:tally", "--store", url, "--port", port)
    assert answer.exit_code == 2
    assert f"cannot listen at {HOST}:{port}" in answer.stderr


def test_a_store_that_is_not_there_or_has_no_log_is_refused(folder):
    for store, said in (
        ("", "URL"),
        ("memory://", "lives inside the process"),
        (f"file://{folder}/files", "has no log"),
    ):
        answer = semel_cli("tally_game:tally", "--store", store, "--port", "0")
        assert answer.exit_code == 2, store
        assert said in answer.stderr


def test_a_database_without_the_logs_tables_is_refused(folder, postgres_url):
    answer = semel_cli("tally_game:tally", "--store", postgres_url, "--port", "0")
    assert answer.exit_code == 2
    assert "semel db" in answer.stderr


def test_without_a_server_the_extra_is_named(url, monkeypatch):
    monkeypatch.setattr("semel.cli.serving.find_spec", lambda _: None)
    answer = semel_cli("tally_game:tally", "--store", url)
    assert answer.exit_code == 2
    assert "pip install 'semel[rooms]'" in answer.stderr


class Wire:
    def __init__(self, running, **more):
        at = running.said.partition("rooms at ")[2].split()[0]
        self._open = ExitStack()
        self._wire = self._open.enter_context(connect(at, compression=None, **more))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._open.close()

    def say(self, kind, id, **payload):
        payload = {"tableId": "t1", **payload}
        self._wire.send(json.dumps({"type": kind, "requestId": id, "payload": payload}))

    def hear(self, kind):
        while (message := json.loads(self._wire.recv(timeout=20)))["type"] != kind:
            pass
        return message["payload"]

    def act(self, name, id):
        self.say("ACTION_REQUEST", id, actionType=name)
        return self.hear("ACTION_RESULT")

    @property
    def code(self):
        return self._wire.close_code


def running(url, folder, *options):
    words = ("tally_game:Tally", "--store", url, "--port", "0", "--drain", "1s", *options)
    return Running("rooms", *words, cwd=folder)


def test_by_trust_a_name_is_a_user_and_a_restart_forgets_nothing(url, folder):
    for again in (False, True):
        with running(url, folder, "--trust") as server, Wire(server) as wire:
            assert "tally_game:Tally" in server.said
            wire.say("JOIN", "j", token="ann")
            assert wire.hear("JOINED")["viewer"] == "ann"
            assert wire.hear("TABLE_SNAPSHOT")["state"] == {"count": int(again)}
            answer = wire.act("add", "a-1")
            assert (answer["reply"], answer["cached"]) == ({"by": "ann"}, again)
            assert wire.act("dance", "a-2")["error"]["code"] == "INVALID"
            wire.say("REQUEST_SNAPSHOT", "s", reason="gap")
            assert wire.hear("TABLE_SNAPSHOT")["state"] == {"count": 1}
            assert server.metric("semel_rooms_requests_total") == 2
            assert server.metric("semel_rooms_repeated_total") == (2 if again else 0)
            assert server.metric("semel_rooms_gaps_total") == 1
            assert server.metric("semel_rooms_joined") == 1
            assert server.metric("semel_rooms_action_seconds_count") == 2
            assert server.status["accepted"] == int(not again)
            assert server.ready["ready"]
            assert server.stop() == 0
            with pytest.raises(Exception, match="1001"):
                wire.hear("nothing")
            assert wire.code == 1001


def test_it_says_under_which_name_its_rooms_are_and_an_instance_is_taken_as_it_is(url, folder):
    for options, name in (((), "table"), (("--name", "tallies"), "tallies")):
        words = ("tally_game:sized", "--store", url, "--port", "0", "--drain", "1s", *options)
        with Running("rooms", *words, cwd=folder) as server:
            said = f"tally_game:sized in {url}, under the name {name!r}; another --name has other"
            assert said in server.said
            assert server.stop() == 0


def test_functions_of_the_application_say_who_may_do_what(url, folder):
    with running(url, folder, "--authorise", "tally_game:user_of") as server:
        with Wire(server) as nobody:
            nobody.say("JOIN", "j", token="ann")
            assert nobody.hear("ERROR")["code"] == "UNAUTHORIZED"
        with Wire(server, additional_headers={"x-user": "eve"}) as eve:
            eve.say("JOIN", "j")
            assert eve.hear("JOINED")["viewer"] == "eve"
            assert eve.act("add", "1")["success"]
        assert "nobody act" not in server.said
        assert server.stop() == 0


def test_without_a_word_on_who_somebody_is_everybody_may_look(url, folder):
    with running(url, folder) as server, Wire(server) as wire:
        wire.say("JOIN", "j", token="ann")
        assert wire.hear("JOINED")["viewer"] is None
        assert wire.act("add", "1")["error"]["code"] == "UNAUTHORIZED"
        assert "everybody may look, and nobody act; give --authorise" in server.said
        assert server.stop() == 0
