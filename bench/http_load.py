"""The load: `wrk` with the requests of http.lua, and the processor time the app took for them."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.machine import ROOT, cpu_s
from support import binaries, provision
from support.binaries import Binary

Phase = Literal["first", "replay", "unkeyed"]

SCRIPT = ROOT / "bench" / "http.lua"
HOW_TO_GET = "apt install wrk, brew install wrk, or SEMEL_BENCH_WRK=/path/to/wrk"

# How many recorded keys replays take turns with: one for each connection.
RECORDED = 64


@dataclass(frozen=True)
class Block:
    """What one run of wrk found."""

    requests: int
    seconds: float
    p50_s: float
    p99_s: float
    cpu_s: float | None
    """The app's processor time, where the system tells it."""

    @property
    def rate(self) -> float:
        return self.requests / self.seconds

    @property
    def cpu_each_s(self) -> float | None:
        return None if self.cpu_s is None else self.cpu_s / self.requests


class FailedError(Exception):
    """A block that says nothing about speed, because requests failed in it."""


# --- the program --------------------------------------------------------------------------------


@functools.cache
def wrk() -> Binary:
    """wrk, fetched as the tests fetch servers if it is not here; or how to get it."""
    found = _find()
    if found is None and shutil.which("apt-get") and shutil.which("dpkg-deb"):
        with contextlib.suppress(subprocess.CalledProcessError):
            provision.unpack(["wrk"])
        found = _find()
    if found is None:
        raise SystemExit(
            f"the HTTP scenario needs wrk, which is not here. To get it: {HOW_TO_GET}. "
            "To measure without it, name the other scenarios."
        )
    return found


def _find() -> Binary | None:
    unpacked = binaries.DEB_ROOT / "usr/bin/wrk"
    for path, source in (
        (os.environ.get("SEMEL_BENCH_WRK"), "env"),
        (shutil.which("wrk"), "path"),
        (unpacked if unpacked.exists() else None, "deb"),
    ):
        if path:
            return Binary("wrk", Path(path), source)
    return None


def version() -> str:
    binary = wrk()
    said = subprocess.run(
        [binary.path, "-v"], env=binary.environment(), capture_output=True, text=True, check=False
    )
    number = re.search(r"\d+(?:\.\d+)+", said.stdout)
    return number.group() if number else "of unknown version"


# --- one block ----------------------------------------------------------------------------------


def new_stamp() -> str:
    """The first part of keys that nobody has used."""
    digits = secrets.token_hex(10)
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20])) + "-"


def key(stamp: str, number: int) -> str:
    """A key as http.lua writes it."""
    return f"{stamp}{number:012x}"


def run(port: int, pid: int, phase: Phase, *, connections: int, seconds: int, stamp: str) -> Block:
    """Ask as fast as it answers, over so many connections."""
    binary = wrk()
    before = cpu_s(pid)
    done = subprocess.run(
        [
            binary.path,
            *("-t", "1", "-c", str(connections), "-d", f"{seconds}s", "-s", SCRIPT),
            *("--timeout", "10s"),
            *(f"http://127.0.0.1:{port}", "--", phase, stamp, str(RECORDED)),
        ],
        env=binary.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    after = cpu_s(pid)
    spent = after - before if after is not None and before is not None else None
    return _read(done.stdout + done.stderr, spent)


def _read(said: str, cpu_s: float | None) -> Block:
    line = re.search(r"^found (.*)$", said, re.MULTILINE)
    if line is None:
        raise FailedError(f"wrk did not come to its end: {said.strip()[-300:]}")
    found = {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", line[1])}
    if found["refused"] or found["broken"] or not found["requests"]:
        raise FailedError(f"wrk counted {line[1]}")
    us = 1e-6
    return Block(found["requests"], found["us"] * us, found["p50"] * us, found["p99"] * us, cpu_s)
