"""Real processes on real servers, killed and frozen at random places, for as long as it is told.

The simulation tries far more histories; this one has real clocks, sockets and disks. A failure
names the round, which can be played again: the choices are the same, the timing is not.

    SEMEL_TORTURE_MINUTES=5 SEMEL_TORTURE_ROUND=17 make torture ARGS="-k real_processes"
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import semel
from semel.colour import SYNC, run
from semel.keys import make_key
from semel.stores.sql import init
from semel.values import State
from support.holder import POINTS, Receiver

TESTS = Path(__file__).parents[1]

# A frozen holder may act after somebody asked the world about it, so there only kills are fair.
POLICIES = {
    "retry": ("dedupes", ("kill", "stop")),
    "hold": ("plain", ("kill", "stop")),
    "ask": ("plain", ("kill",)),
}
TRAPS = (*POINTS, "before-renew", "after-renew", "before-note", "after-note", "in-recover")


@pytest.fixture
def engines(request, tmp_path):
    """The URL of every engine, and its server where it has one."""
    found = {"file": (f"file://{tmp_path}/ledger", None)}
    found["sqlite"] = (f"sqlite:///{tmp_path}/ledger.db", None)
    for name in ("redis", "postgres", "mariadb"):
        url = request.getfixturevalue(f"{name}_url")
        found[name] = (url, request.getfixturevalue(f"{name}_server"))
        if name != "redis":
            init(url)
    return found


@pytest.mark.torture
def test_real_processes_keep_the_promises(engines, tmp_path):
    minutes = float(os.environ.get("SEMEL_TORTURE_MINUTES", "30"))
    until = time.monotonic() + minutes * 60
    for number in itertools.count(int(os.environ.get("SEMEL_TORTURE_ROUND", "0"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        Round(number, engines, folder).play()
        if time.monotonic() > until:
            print(f"{number + 1} rounds")  # noqa: T201
            return


class Round:
    """Some callers of one key, each with a trap of its own, and a server that may fail too."""

    def __init__(self, number, engines, folder):
        chance = random.Random(number)
        self.chance, self.folder, self.key = chance, folder, f"round-{number}"
        self.engine = chance.choice(sorted(engines))
        self.url, self.server = engines[self.engine]
        self.crash = chance.choice(sorted(POLICIES))
        self.receiver, actions = POLICIES[self.crash]
        self.traps = [
            (chance.choice(TRAPS), chance.choice(actions), chance.choice(["sync", "async"]))
            for _ in range(chance.randint(1, 4))
        ]
        self.fault = chance.choice([None, "restart", "pause"]) if self.server else None
        self.said = f"round {number}: {self.engine}, {self.crash}, {self.traps}, {self.fault}"

    def play(self):
        holders = [self.start(*trap) for trap in self.traps]
        wakers = [threading.Thread(target=self.end, args=[holder]) for holder in holders]
        for waker in wakers:
            waker.start()
        self.hurt_the_server()
        for waker in wakers:
            waker.join()
        last = self.start(None, "kill", "sync")
        self.end(last)
        self.judge([holder.out for holder in (*holders, last)])

    def start(self, point, action, colour):
        words = ["--do", action, "--colour", colour, "--crash", self.crash]
        words += ["--receiver", self.receiver] + (["--at", point] if point else [])
        if point and point.endswith("renew"):
            words += ["--then", "linger"]
        return subprocess.Popen(
            [sys.executable, "-m", "support.holder", self.url, self.key, *words],
            cwd=TESTS,
            env={**os.environ, "HOLDER_FOLDER": str(self.folder)},
            stdout=subprocess.PIPE,
            text=True,
        )

    def end(self, holder):
        """Let it run into its trap; wake it, if it only sleeps, when others had their chance."""
        first = holder.stdout.readline()
        if first == "trap\n":
            time.sleep(0.8)
            holder.send_signal(signal.SIGCONT)
        rest, _ = holder.communicate(timeout=90)
        holder.out = (first + rest).removeprefix("trap\n").strip()

    def hurt_the_server(self):
        if self.fault is None:
            return
        time.sleep(self.chance.uniform(0.2, 1.0))
        if self.fault == "restart":
            self.server.restart()
        else:
            with self.server.paused():
                time.sleep(self.chance.uniform(0.1, 1.0))

    def judge(self, outputs):
        effects = Receiver(self.folder, dedupes=False).effects()
        results = {out for out in outputs if out.startswith("result")}
        self.check(len(effects) <= 1, f"{len(effects)} effects")
        self.check(len(results) <= 1, f"different results: {results}")
        self.check(not results or effects, "a result without an effect")
        record = self.look()
        if self.crash == "hold" and record.state is State.UNKNOWN:
            self.check(outputs[-1] == "error OutcomeUnknownError", f"the last call: {outputs[-1]}")
        else:
            self.check(record.state is State.COMPLETED, f"at last it is {record.state}")
            self.check(outputs[-1] in results, f"the last call: {outputs[-1]}")

    def check(self, holds, what):
        assert holds, f"{what} ({self.said})"

    def look(self):
        store = semel.connect(self.url)
        try:
            return run(store.ledger(SYNC).look(make_key(self.key).id))
        finally:
            store.close()
