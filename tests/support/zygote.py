"""Programs that start in a moment: forked from a process that has imported what they need.

    process = spawn("support.holder", [url, "order-1"], env={"HOLDER_FOLDER": folder})
    process.stdout.readline()

An interpreter needs a second to import SQLAlchemy and the drivers, and the tests that kill
processes start hundreds. One per test process is started when it is first needed, and ends with it.
What `spawn` gives is used as a `subprocess.Popen` is, with text.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

PRELOADED = (
    "aio_pika",
    "aiosqlite",
    "asyncmy",
    "fastapi",
    "httpx",
    "nats",
    "psycopg",
    "pymysql",
    "redis.asyncio",
    "semel.stores.redis",
    "semel.stores.sql",
    "semel.stores.sqlite",
    "sqlalchemy.ext.asyncio",
    "sqlalchemy.orm",
    "support.bound_holder",
    "support.holder",
    "support.instances",
)


# --- the process that forks ---------------------------------------------------------------------


def main(path: str) -> None:
    """Fork whatever is asked for at the socket, until whoever started this is gone."""
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    asked, rung = socket.socket(socket.AF_UNIX), os.pipe()
    for end in rung:
        os.set_blocking(end, False)
    asked.bind(path)
    asked.listen()
    signal.set_wakeup_fd(rung[1])
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([asked, rung[0], sys.stdin], [], [])
        if rung[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(rung[0], 4096)
        if asked in ready:
            line, _ = asked.accept()
            waiting[_forked(line, asked)] = line
        if sys.stdin in ready:
            return
        _tell_endings(waiting)


def _tell_endings(waiting: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with waiting.pop(pid) as line, contextlib.suppress(OSError):
                line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _forked(line: socket.socket, asked: socket.socket) -> int:
    message, fds, _, _ = socket.recv_fds(line, 65536, 3)
    wanted = json.loads(message)
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        line.sendall(b"%d\n" % pid)
        return pid
    code = 70
    try:
        asked.close()
        line.close()
        code = _played(wanted, fds)
    except BaseException:  # noqa: BLE001 - it has nobody else to tell
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _played(wanted: dict[str, Any], fds: list[int]) -> int:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, mode, closefd=False), write_through=True)
        for number, mode in enumerate(("r", "w", "w"))
    )
    os.environ.clear()
    os.environ.update(wanted["env"])
    sys.argv = [wanted["module"], *wanted["words"]]
    try:
        if wanted["folder"]:
            os.chdir(wanted["folder"])
            sys.path[0] = str(Path(wanted["module"]).parent)
            runpy.run_path(wanted["module"], run_name="__main__")
        else:
            importlib.import_module(wanted["module"]).main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


# --- the test's end -----------------------------------------------------------------------------


class Zygote:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="semel-zygote-")
        self.path = f"{self._folder.name}/ask"
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "support.zygote", self.path],
            cwd=TESTS,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline() == b"ready\n"

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()
        self._folder.cleanup()


@functools.cache
def _zygote() -> Zygote:
    made = Zygote()
    atexit.register(made.close)
    return made


def spawn(module: str, words: list[str], env: dict[str, str] | None = None) -> Forked:
    """The module's `main`, with these words, in a process of its own."""
    asked = {"module": module, "words": words, "env": {**os.environ, **(env or {})}, "folder": ""}
    return Forked(_zygote().path, asked, 2)


def script(path: Path, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """A whole program, run in this folder: how it ended, and what it said as errors."""
    asked = {"module": str(path), "words": [], "env": env, "folder": str(folder)}
    with tempfile.TemporaryFile("w+") as errors:
        process = Forked(_zygote().path, asked, errors.fileno())
        try:
            process.communicate(60)
        finally:
            process.kill()
        errors.seek(0)
        return process.wait(10), errors.read()


class Forked:
    """A process, as `Popen` shows one."""

    def __init__(self, path: str, asked: dict[str, Any], errors: int) -> None:
        its_in, self._in = os.pipe()
        self._out, its_out = os.pipe()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(path)
        socket.send_fds(self._line, [json.dumps(asked).encode()], [its_in, its_out, errors])
        os.close(its_in)
        os.close(its_out)
        self.stdin = os.fdopen(self._in, "w")
        self.stdout = os.fdopen(self._out)
        self._told = self._line.makefile("r")
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self._ended()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
            self._ended()
        assert self.returncode is not None
        return self.returncode

    def _ended(self) -> None:
        self.returncode = int(self._told.readline())
        self._told.close()
        self._line.close()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it says until it ends; it says less than a pipe holds."""
        with contextlib.suppress(OSError, ValueError):
            self.stdin.close()
        self.wait(timeout)
        said = self.stdout.read()
        self.stdout.close()
        return said, None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
