"""Processes that are forked from one which has imported everything already.

An interpreter needs a second to import a database and its driver. Where many have to die in a short
time, one process does so once (`serve`), takes a JSON object per line and forks whoever is asked
for. `Nursery` is the test's end of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

# For anything that a process is waited for to say.
WITHIN_S = 30.0


def say(**told: Any) -> None:
    """From a forked process, to whoever listens at the other end."""
    sys.stdout.write(json.dumps({"pid": os.getpid()} | told) + "\n")
    sys.stdout.flush()


def serve(play: Callable[[dict[str, Any]], None]) -> None:
    """Fork a process per line and let it play its part; for as long as the input is open."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to be waited for
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(0)
                play(json.loads(line))
                code = 0
            finally:
                os._exit(code)
        say(forked=pid)


class Nursery:
    """Starts processes, hears what they say, and ends them."""

    def __init__(self, module: str, stderr: Any = None) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()
        self._started: set[int] = set()

    def _hear(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._said.put(json.loads(line))

    def start(self, **asked: Any) -> int:
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(asked) + "\n")
        self._popen.stdin.flush()
        pid: int = self.heard("forked")["forked"]
        self._started.add(pid)
        return pid

    def heard(self, *words: str, pid: int | None = None, within_s: float = WITHIN_S) -> Any:
        """The next thing with one of these words that is said, by anybody or by this process."""
        while True:
            for told in self._kept:
                if pid in (None, told["pid"]) and any(word in told for word in words):
                    self._kept.remove(told)
                    return told
            self._kept.append(self._said.get(timeout=within_s))

    def signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def end_all(self) -> None:
        """For the next test: nobody is there, and nothing was said."""
        while self._started:
            self.signal(self._started.pop(), signal.SIGKILL)
        self._kept.clear()
        with contextlib.suppress(queue.Empty):
            while True:
                self._said.get_nowait()

    def close(self) -> None:
        self.end_all()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(10)
        self._hearing.join(10)
        self._popen.stdout.close()
