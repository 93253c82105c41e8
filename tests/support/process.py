"""A private server process: started on a port of its own, and ours to kill, freeze and restart."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from support.binaries import Binary

HOST = "127.0.0.1"

# A loaded two-core machine has taken 8 s for what an idle one does in half a second.
READY_WITHIN_S = 30.0

# Below the kernel's ephemeral range, and such that a Redis Cluster bus (port + 10000) can never
# be another server's port.
PORTS = range(11_000, 21_000)
BUS_OFFSET = 10_000

FOLDER_PREFIX = "semel-server-"

# A minimal Linux has no ps and no pgrep; a Mac has both, and no /proc.
HAS_PROC = Path("/proc/self/stat").exists()


# --- ports and folders --------------------------------------------------------------------------

_reserved: dict[int, int] = {}
"""Ports this process has taken, with the open lock file that keeps other runs off them."""


def free_port() -> int:
    """A port nobody listens on, kept for this process until it ends.

    The lock outlives the server: a killed server's port is still its own when it restarts, even
    while another test run on this machine is looking for ports.
    """
    locks = Path(tempfile.gettempdir()) / f"semel-ports-{os.geteuid()}"
    locks.mkdir(mode=0o700, exist_ok=True)
    for port in random.SystemRandom().sample(PORTS, 500):
        if port in _reserved:
            continue
        lock = os.open(locks / str(port), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_unused(port, port + BUS_OFFSET)
        except OSError:
            os.close(lock)
            continue
        _reserved[port] = lock
        return port
    raise RuntimeError("no free port in 500 tries")


def _check_unused(*ports: int) -> None:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))


@functools.cache
def fast_folder() -> Path:
    """A folder in memory when there is room: CREATE DATABASE is ten times faster there."""
    memory = Path("/dev/shm")
    with contextlib.suppress(OSError):
        room = os.statvfs(memory)
        if room.f_bavail * room.f_frsize > 2 << 30 and os.access(memory, os.W_OK):
            return memory
    return Path(tempfile.gettempdir())


def new_folder(kind: str) -> Path:
    """A folder for one server, marked with its maker, so that `sweep` knows when it is nobody's."""
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{kind}-", dir=fast_folder()))
    (folder / "owner").write_text(f"{os.getpid()} {_born(os.getpid())}")
    return folder


def sweep() -> None:
    """Remove the folders of test runs that were killed before they could do it."""
    for folder in fast_folder().glob(f"{FOLDER_PREFIX}*"):
        try:
            pid, born = (folder / "owner").read_text().split(" ", 1)
        except (OSError, ValueError):
            continue
        if _born(int(pid)) != born:
            shutil.rmtree(folder, ignore_errors=True)


def _born(pid: int) -> str:
    """When a process started, so that a reused pid is not taken for the old one; "" when gone."""
    if HAS_PROC:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return ""
    listing = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return listing.stdout.strip()


# --- privilege ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """How a program is made to run as somebody: words before its own, and who that is."""

    prefix: tuple[str, ...] = ()
    popen: Mapping[str, Any] = field(default_factory=dict)
    uid: int | None = None
    """Whose the data folder must be, when not ours."""


NOBODY = 65534


@functools.cache
def not_root() -> Identity:
    """How to run a program that refuses to run as root, as PostgreSQL does.

    A user namespace is the better way: the program may lie under a folder only root can enter.
    Containers often forbid it; then the process really becomes nobody.
    """
    if os.geteuid() != 0:
        return Identity()
    namespace = ("unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", "--")
    if works([*namespace, "true"]):
        return Identity(prefix=namespace)
    who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return Identity(popen=who, uid=NOBODY)


@functools.cache
def _dies_with_us() -> tuple[str, ...]:
    """Words that make the kernel end the server if this process is killed."""
    words = ("setpriv", "--pdeathsig", "KILL", "--")
    return words if sys.platform == "linux" and works([*words, "true"]) else ()


def works(argv: Sequence[str], **popen: Any) -> bool:
    """Can this command be run here?"""
    try:
        return (
            subprocess.run(argv, capture_output=True, timeout=20, check=False, **popen).returncode
            == 0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


# --- the process --------------------------------------------------------------------------------

# The kernel's parent-death signal fires when the *thread* that started the server ends, so every
# server is started by this one, which lives as long as we do.
_starter = ThreadPoolExecutor(1, thread_name_prefix="semel-server-starter")


@dataclass
class ServerProcess:
    """One server, ready to be used when `start` returns. Subclasses say how it answers."""

    binary: Binary
    words: list[str]
    """Its command line after the program's own name."""
    port: int
    folder: Path
    identity: Identity = Identity()
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    _popen: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    def probe(self) -> None:
        """Raise until the server answers."""
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """The environment it runs in."""
        return self.binary.environment()

    @property
    def name(self) -> str:
        return f"{self.binary.kind} on port {self.port}"

    @property
    def pid(self) -> int:
        assert self._popen is not None, f"{self.name} was never started"
        return self._popen.pid

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> Self:
        """Start it on its port and data folder, and wait until it answers."""
        with self._lock:
            assert not self.running, f"{self.name} is running already"
            self._popen = _starter.submit(self._spawn).result()
            try:
                wait_until(self._answers, f"{self.name} to answer")
            except BaseException:
                self.kill()
                raise
        return self

    def kill(self) -> None:
        """Crash it: SIGKILL to the whole family at once, with nothing flushed or closed."""
        with self._lock:
            if self._popen is None:
                return
            if self.running:
                self._kill_family()
            self._popen.wait()

    def _kill_family(self) -> None:
        """None is left behind: a backend that dies a moment later keeps PostgreSQL's memory, and
        who starts anew meanwhile is refused.
        """
        self._popen.send_signal(signal.SIGSTOP)  # it starts no more children
        wait_until(lambda: _is_frozen(self.pid), f"{self.name} to freeze")
        members = family(self.pid)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()
        wait_until(lambda: all(map(_is_over, members)), f"{self.name} to be gone")

    def pause(self) -> None:
        """Freeze it: connections stay open and nobody answers."""
        self._signal(signal.SIGSTOP)
        # A thread on another core goes on for a moment, long enough to answer a request.
        wait_until(lambda: all(map(_is_frozen, family(self.pid))), f"{self.name} to freeze")

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def restart(self) -> Self:
        """Start it again on the same port and the same data, killing it first if it runs."""
        with self._lock:
            self.kill()
            return self.start()

    def ensure_running(self) -> None:
        """Undo whatever a test did to it."""
        with self._lock:
            if self.running:
                self.resume()
            else:
                self.start()

    def end(self, number: signal.Signals) -> int:
        """Ask it to end, wait until it has, and tell its exit code."""
        assert self._popen is not None, f"{self.name} was never started"
        self._popen.send_signal(number)
        return self._popen.wait(READY_WITHIN_S)

    def stop(self) -> None:
        """End it and remove its data."""
        with self._lock:
            if self._popen is not None and self.running:
                self.resume()
                self._popen.send_signal(self.stop_signal)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._popen.wait(10)
            self.kill()
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, size: int = 2000) -> str:
        """The end of what the server has printed."""
        return (self.folder / "server.log").read_bytes()[-size:].decode(errors="replace")

    def _spawn(self) -> subprocess.Popen[bytes]:
        with (self.folder / "server.log").open("ab") as log:
            return subprocess.Popen(
                [*self.identity.prefix, *_dies_with_us(), str(self.binary.path), *self.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,
                **self.identity.popen,
            )

    def _answers(self) -> bool:
        try:
            self.probe()
        except Exception as error:
            if not self.running:
                raise RuntimeError(f"{self.name} ended at once:\n{self.log_tail()}") from error
            return False
        # Somebody else on our port would have answered too; then ours has ended, or is about to.
        return self.running

    def _signal(self, number: signal.Signals) -> None:
        """To the server first, then to its children."""
        if not self.running:
            return
        for pid in family(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def family(pid: int) -> list[int]:
    """A process and its descendants, parents first.

    The process group will not do: every PostgreSQL backend makes a group of its own, so a group
    frozen by SIGSTOP goes on answering open connections.
    """
    members = [pid]
    for parent in members:
        members += _children(parent)
    return members


def _is_frozen(pid: int) -> bool:
    """Have all its threads stopped, or ended?"""
    return _are_all_in(pid, "TtZX")


def _is_over(pid: int) -> bool:
    """Has it ended? Whether anybody has asked how is no matter."""
    return _are_all_in(pid, "ZX")


def _are_all_in(pid: int, states: str) -> bool:
    if not HAS_PROC:
        return True
    for thread in list(Path(f"/proc/{pid}/task").glob("*/stat")):
        with contextlib.suppress(OSError):  # ended while we were looking
            if thread.read_text().rpartition(")")[2].split()[0] not in states:
                return False
    return True


def _children(pid: int) -> list[int]:
    if not HAS_PROC:
        listing = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, check=False)
        return [int(child) for child in listing.stdout.split()]
    children: list[int] = []
    with contextlib.suppress(OSError):  # ended while we were looking
        for thread in list(Path(f"/proc/{pid}/task").glob("*/children")):
            with contextlib.suppress(OSError):  # only this thread has
                children += map(int, thread.read_text().split())
    return children


def wait_until(
    condition: Callable[[], bool], what: str, *, within_s: float = READY_WITHIN_S
) -> None:
    """Ask until the answer is yes: any fixed sleep is too long when idle and too short when not."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {within_s:g} s for {what}")
        time.sleep(0.01)
