"""Where it is measured: private servers, a real disk, and what has to be said about the machine.

Servers are those of the tests (`tests/support`): loopback only, on ports and folders of their
own. They run with the settings that make the *client's* share of the time largest, because that is
what is compared: Valkey without persistence, PostgreSQL without fsync. Durability costs everybody
the same; `postgres-disk` and `sqlite-sync` are there to measure with it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import itertools
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import binaries, servers  # noqa: E402 - found by the line above
from support.process import family  # noqa: E402

# From here on, what else runs on the machine decides more than what is measured.
QUIET_LOAD = 0.5
QUIET_CORES = 0.2

DISTRIBUTIONS = (
    "idemkit",
    "exactly-once",
    "aws-lambda-powertools",
    "dbos",
    "redis",
    "hiredis",
    "psycopg",
    "asyncpg",
)

IN_MEMORY = {"tmpfs", "ramfs"}


class Machine:
    """Servers and folders, started when first asked for and gone at the end."""

    def __init__(self, disk: Path | None = None) -> None:
        self._end = contextlib.ExitStack()
        self._disk = disk
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def _until_the_end(self, server: Any) -> Any:
        self._end.callback(server.stop)
        return server

    @functools.cached_property
    def redis(self) -> Any:
        binary = first_found("valkey", "redis")
        return self._until_the_end(servers.start_redis(binary, "--appendonly", "no"))

    @functools.cached_property
    def postgres(self) -> Any:
        return self._until_the_end(servers.start_postgres())

    @functools.cached_property
    def durable_postgres(self) -> Any:
        """PostgreSQL as people run it: every commit waits for the disk."""
        with (
            _replaced(servers, "POSTGRES_SETTINGS", DURABLE),
            _replaced(servers, "new_folder", lambda _kind: self.folder()),
        ):
            return self._until_the_end(servers.start_postgres())

    def database(self, *, durable: bool = False) -> str:
        """The URL of a new, empty database."""
        server = self.durable_postgres if durable else self.postgres
        name = f"bench_{next(self._numbers)}"
        server.create_database(name)
        url: str = server.url(name)
        return url

    def empty_redis(self) -> str:
        self.redis.empty()
        url: str = self.redis.url
        return url

    def folder(self) -> Path:
        """A new folder on a real disk."""
        made = tempfile.TemporaryDirectory(prefix="semel-bench-", dir=disk_folder(self._disk))
        return Path(self._end.enter_context(made))


DURABLE = servers.POSTGRES_SETTINGS | {"fsync": "on", "full_page_writes": "on"}


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def first_found(*kinds: str) -> binaries.Binary:
    found = [binary for kind in kinds for binary in binaries.candidates(kind)]
    return found[0] if found else binaries.find(kinds[0])


# --- the disk -----------------------------------------------------------------------------------


def disk_folder(wished: Path | None = None) -> Path:
    """A folder that a power loss would not empty: fsync costs nothing in memory."""
    for folder in (wished, Path(tempfile.gettempdir()), Path("/var/tmp"), ROOT):
        if folder is not None and file_system(folder) not in IN_MEMORY:
            return folder
    raise SystemExit("no folder on a real disk was found; name one with --disk DIR")


def file_system(folder: Path) -> str:
    """The type of the file system a folder lies on, "unknown" where there is no /proc."""
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        real = folder.resolve()
        under = [m for m in mounts if real.is_relative_to(m[1])]
        return max(under, key=lambda mount: len(mount[1]))[2]
    return "unknown"


# --- what has to be said ------------------------------------------------------------------------


def load() -> float:
    return os.getloadavg()[0]


class Others:
    """How many cores everybody else on this machine used since this was made.

    The load at the start says nothing about the minutes after it, and a measurement makes load
    itself. None where there is no /proc.
    """

    def __init__(self) -> None:
        self._start = self._used()

    def cores(self) -> float | None:
        now = self._used()
        if now is None or self._start is None:
            return None
        (all_s, ours_s, at), (all_0, ours_0, at_0) = now, self._start
        return max(0.0, (all_s - all_0 - (ours_s - ours_0)) / (at - at_0))

    def _used(self) -> tuple[float, float, float] | None:
        """Processor seconds of all processes and of ours, and when."""
        try:
            words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        except OSError:
            return None
        user, nice, system, _idle, _waiting, irq, softirq, *_ = map(int, words)
        ticks = os.sysconf("SC_CLK_TCK")
        ours = sum(map(_spent, family(os.getpid())))
        return (user + nice + system + irq + softirq) / ticks, ours / ticks, time.monotonic()


def _spent(pid: int) -> int:
    """A process's own time and that of its children that have ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15]))
    return 0


def cpu_s(pid: int) -> float | None:
    """Seconds that the threads of a process have spent on a processor; None without /proc."""
    spent = 0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            spent += int((task / "schedstat").read_text().split()[0])
    except (OSError, IndexError):
        return None
    return spent / 1e9


def resident(pid: int) -> int:
    """Bytes of memory that a process has; only with /proc."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def facts() -> dict[str, str]:
    """What a figure means nothing without."""
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} "
        f"{platform.release()}, disk {file_system(disk_folder())}",
        "Python": platform.python_version(),
        "servers": ", ".join(_labels()),
        "packages": ", ".join(f"{name} {version(name)}" for name in DISTRIBUTIONS),
        "load": f"{load():.2f} at the start",
    }


def _labels() -> Iterator[str]:
    for find in (lambda: first_found("valkey", "redis"), lambda: binaries.find("postgres")):
        yield _or_missing(find)


def _or_missing(find: Callable[[], binaries.Binary]) -> str:
    try:
        return str(find().label).replace("-", " ")
    except binaries.Unavailable as error:
        return str(error)


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
