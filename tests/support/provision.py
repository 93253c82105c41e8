"""`python -m support.provision [--all]`: get servers and a browser that no wheel carries, rootless.

Debian's own signed packages are downloaded by apt-get and unpacked below ~/.cache/semel-servers.
Nothing is installed: no service, no system user, no package lock. With `--all`, PostgreSQL comes
too, as a second version beside the wheel's.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support import binaries

PACKAGES = {
    "redis": ["redis-server"],
    "mariadb": ["mariadb-server-core", "mariadb-client-core"],
    "rabbitmq": ["rabbitmq-server"],
    "postgres": ["postgresql-15"],
    "pgbouncer": ["pgbouncer"],
    "chromium": ["chromium", "chromium-driver"],
    "haproxy": ["haproxy"],
    "nginx": ["nginx"],
}

ALONE = {"promtool": ["prometheus"]}
"""Without what they need: nothing but libc is for the programs, and the rest for web pages."""

BASE = binaries.CACHE / "deb"
UNPACKING = BASE / "unpacking"
"""There while packages are being unpacked; left behind when that was interrupted."""


def main(arguments: Sequence[str]) -> int:
    wanted = _wanted(everything="--all" in arguments)
    if wanted and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        _fetch(wanted)
    for kind in binaries.KINDS:
        found = ", ".join(map(str, binaries.candidates(kind)))
        print(f"{kind:9} {found or 'MISSING. To get it: ' + binaries.HOW_TO_GET[kind]}")
    return 0


def _wanted(*, everything: bool) -> list[str]:
    """The kinds to fetch: what only a wheel has, or nobody, or an unpacking that was cut short."""
    broken = UNPACKING.exists()
    wanted = []
    fetched = ("redis", "mariadb", "rabbitmq", "pgbouncer", "nginx", "haproxy", "chromium")
    for kind in (*fetched, "promtool"):
        sources = {binary.source for binary in binaries.candidates(kind)}
        if not sources & ({"env", "path"} if broken else {"env", "path", "deb"}):
            wanted.append(kind)
    if len(binaries.engines("postgres")) < (2 if everything else 1):
        wanted.append("postgres")
    return wanted


def _fetch(kinds: list[str]) -> None:
    packages = [package for kind in kinds for package in PACKAGES.get(kind, ())]
    alone = [package for kind in kinds for package in ALONE.get(kind, ())]
    named = ", ".join([*packages, *alone])
    start = time.monotonic()
    try:
        unpack(packages, alone)
    except subprocess.CalledProcessError as error:
        print(f"apt-get could not download {named}:\n{error.stderr.strip()[-500:]}")
    else:
        print(f"unpacked {named} in {time.monotonic() - start:.1f} s")


def unpack(packages: Sequence[str], alone: Sequence[str] = ()) -> None:
    """Download these packages with what they need, others without it, and unpack them all."""
    archives = BASE / "cache" / "archives"
    for folder in (BASE / "lists" / "partial", archives / "partial", BASE / "log"):
        folder.mkdir(parents=True, exist_ok=True)
    binaries.DEB_ROOT.mkdir(exist_ok=True)
    with (BASE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two checkouts may be setting themselves up at once
        _apt_get("update")
        _apt_get("install", "-y", "--no-install-recommends", "--download-only", *packages)
        if alone:
            _apt_get("download", *alone, cwd=archives)
        UNPACKING.touch()
        for deb in sorted(archives.glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", deb, binaries.DEB_ROOT], check=True)
            deb.unlink()
        _move_erlang()
        UNPACKING.unlink()
        shutil.rmtree(BASE / "lists")


def _move_erlang() -> None:
    """Erlang's start scripts are the only ones that name the folder they were built for."""
    built_for = b"ROOTDIR=/usr/lib/erlang"
    here = f"ROOTDIR={binaries.DEB_ROOT}/usr/lib/erlang".encode()
    erlang = binaries.DEB_ROOT / "usr/lib/erlang"
    for script in (*erlang.glob("bin/*"), *erlang.glob("erts-*/bin/*")):
        if script.is_file() and built_for in (text := script.read_bytes()):
            script.write_bytes(text.replace(built_for, here))


def _apt_get(*words: str, cwd: Path | None = None) -> None:
    """apt-get with every folder it writes to moved to ours, so that it needs no privilege."""
    options = {
        "Dir::State::Lists": BASE / "lists",
        "Dir::State::extended_states": BASE / "extended_states",
        "Dir::Cache": BASE / "cache",
        "Dir::Log": BASE / "log",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "",
        "Acquire::Retries": "3",
        **_sources(),
    }
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    subprocess.run(
        ["apt-get", "-qq", *settings, *words],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"LC_ALL": "C"},
        cwd=cwd,
    )


def _sources() -> dict[str, str]:
    """Only the distribution's own archive, where it has a file to itself: others may be down."""
    own = Path("/etc/apt/sources.list.d/debian.sources")
    if not own.exists():
        return {}
    return {"Dir::Etc::SourceParts": "-", "Dir::Etc::SourceList": str(own)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
