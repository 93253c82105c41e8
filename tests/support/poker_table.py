"""The example `poker_table`: its rules, itself as a process of ours, and somebody who plays.

`python -m support.poker_table` copies the TypeScript client, as it is built, to the page.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from websockets.sync.client import connect

from semel.rooms.patches import patched
from support import binaries, typescript
from support.process import HOST, ServerProcess, free_port, new_folder
from support.web import Python

EXAMPLE = Path(__file__).parents[2] / "examples" / "poker_table"
CLIENT = EXAMPLE / "page" / "client"

sys.path.insert(0, str(EXAMPLE))

from play import Rules  # noqa: E402
from table import PokerTable  # noqa: E402

__all__ = [
    "CLIENT",
    "EXAMPLE",
    "Player",
    "PokerTable",
    "Rules",
    "Table",
    "client_modules",
    "start_table",
]

# Nothing that is waited for here takes a second; a loaded machine is slow.
WITHIN_S = 30

# Somebody who comes back goes on counting: the ids that were used stay used.
NUMBERS = itertools.count(1)


@dataclass
class Table(ServerProcess):
    """Who listens; the servers are its children."""

    @property
    def url(self):
        return f"http://{HOST}:{self.port}"

    def probe(self):
        assert httpx.get(self.url, timeout=5).is_success


def start_table(*options, url=None, turn_s=60.0, show_s=0.3):
    folder, port = new_folder("poker"), free_port()
    words = [
        *(str(EXAMPLE), "--url", url or f"sqlite:///{folder}/poker.db"),
        *("--port", str(port), "--turn", str(turn_s), *options),
    ]
    variables = (("POKER_SHOW_S", str(show_s)),)
    python = Python("poker_table", Path(sys.executable), "venv", variables)
    return Table(python, words, port, folder).start()


class Player:
    """Somebody at a table, by plain WebSocket; None only watches. Holds what patches make of it."""

    def __init__(self, table, user, room="main", cursor=None):
        self.user, self.room = user, room
        self.view = self.position = self.server = None
        self.events, self.results, self.texts = [], [], []
        self._open = ExitStack()
        # Somebody who does not listen for a while answers no ping either.
        wire = connect(f"ws://{HOST}:{table.port}/rooms", ping_interval=None)
        self._wire = self._open.enter_context(wire)
        who = {"spectate": True} if user is None else {"token": user}
        if cursor is not None:
            who["cursor"] = cursor
        self.send("JOIN", "join", **who)
        self.joined = self.wait_for("JOINED")["payload"]

    def send(self, kind, request_id, **payload):
        message = {"type": kind, "requestId": request_id, "payload": payload}
        message["payload"]["tableId"] = self.room
        self._wire.send(json.dumps(message))

    def act(self, name, request_id=None, **more):
        """The payload of its answer."""
        id = request_id or f"{self.user}-{next(NUMBERS)}"
        self.send("ACTION_REQUEST", id, actionType=name, **more)
        while (answer := self.wait_for("ACTION_RESULT"))["requestId"] != id:
            pass
        return answer["payload"]

    def wait_for(self, kind):
        while (message := self.hear())["type"] != kind:
            pass
        return message

    def wait_until(self, condition):
        while self.view is None or not condition(self.view):
            self.hear()
        return self.view

    def hear(self):
        text = self._wire.recv(timeout=WITHIN_S)
        self.texts.append(text)
        message = json.loads(text)
        payload = message.get("payload", {})
        match message["type"]:
            case "SERVER":
                self.server = payload["name"]
            case "TABLE_SNAPSHOT":
                self.view, self.position = payload["state"], payload["position"]
            case "TABLE_STATE_UPDATE":
                assert payload["previous"] == self.position
                self.view = patched(self.view, payload["patch"])
                self.position = payload["position"]
                self.events += payload["events"]
            case "HAND_RESULT":
                self.results.append(payload["result"])
        return message

    def kill_server(self):
        self._wire.send('{"type":"KILL"}')

    def close(self):
        self._open.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# Of the TypeScript client; what these import comes along.
MODULES = ("button.js", "room.js")


def client_modules(folder):
    """What the page needs of what `make client` has built, by name."""
    names, found = list(MODULES), {}
    while names:
        name = names.pop()
        found[name] = (folder / name).read_text()
        names += {*re.findall(r'from "\./([\w.]+)"', found[name])} - found.keys()
    return found


def copy_client(node):
    """To where the page has them."""
    CLIENT.mkdir(exist_ok=True)
    for path in CLIENT.iterdir():
        path.unlink()
    for name, text in client_modules(typescript.built(node)).items():
        (CLIENT / name).write_text(text)


if __name__ == "__main__":
    copy_client(binaries.find("node"))
