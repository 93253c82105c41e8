"""Processes with several instances on one place, at random, and what must hold of them.

    with World(place, seed) as world:
        world.play(rounds=10)

Two long-lived processes open and close instances, each with one of several spellings of the URL.
Other processes open, call and exit, or are killed. Every key has one effect, and every caller of a
key gets the same result. In the end, every acknowledged log entry, message and row is there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from support.instances import Process

STORES = ("store", "default", "engine", "async engine")


@dataclass
class Place:
    """One place of an engine, in several spellings of its URL.

    `kinds` are the instances that can be opened there; every process opens the first. `file` is the
    SQLite file, whose locks are looked at.
    """

    folder: Path
    urls: Sequence[str]
    kinds: Sequence[str] = ("store", "default", "middleware")
    has_log: bool = True
    file: Path | None = None


class World:
    """The processes, and what was acknowledged to them."""

    def __init__(self, place: Place, seed: int) -> None:
        self.place = place
        self.chance = random.Random(seed)
        self.kinds: dict[str, str] = {}
        self.results: dict[str, str] = {}
        self.appended: dict[str, int] = {}
        self.inserted: list[str] = []
        self.published = self.taken = self.fence = 0
        self.started: list[Process] = []
        self.stay: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            process.kill()

    def play(self, rounds: int) -> None:
        steps = [self.open_one_more, self.open_one_more, self.close_one]
        steps += [self.come_and_go, self.come_and_be_killed]
        if self.place.kinds[0] == "store":
            steps += [self.fork, self.race]
        self.stay = [self.start(), self.start()]
        for process in self.stay:
            self.meet(process)
        for _ in range(rounds):
            self.chance.choice(steps)()
            self.meet(self.chance.choice(self.stay))
        if self.place.kinds[0] == "store":
            self.be_killed_before_the_effect()
        self.check()

    def start(self) -> Process:
        process = Process(self.place.folder)
        self.started.append(process)
        self.open(process, self.place.kinds[0])
        return process

    def open(self, process: Process, kind: str | None = None) -> str:
        kind = kind or self.chance.choice(self.place.kinds)
        url = self.chance.choice(self.place.urls)
        if kind == "broker":  # it has no form for SQLAlchemy
            url = url.replace("sqlite+pysqlite", "sqlite")
        name = process.open(self.new(kind), kind, url)
        self.kinds[name] = kind
        return name

    def new(self, what: str) -> str:
        return f"{what}-{self.chance.getrandbits(48):x}"

    # --- one step -----------------------------------------------------------------------------

    def open_one_more(self) -> None:
        process = self.chance.choice(self.stay)
        if len(process.names) < 4:
            self.open(process)

    def close_one(self) -> None:
        process = self.chance.choice(self.stay)
        if len(process.names) > 1:
            process.close(self.chance.choice(process.names[1:]))

    def come_and_go(self) -> None:
        process = self.start()
        self.open(process)
        self.use(process, self.some_key())
        process.end(close=self.chance.random() < 0.7)

    def come_and_be_killed(self) -> None:
        process = self.start()
        self.open(process)
        self.use(process, self.some_key())
        process.kill()

    def be_killed_before_the_effect(self) -> None:
        """The lease of a second runs out, and another process runs the body."""
        process, key = self.start(), self.new("key")
        process.ask("do", name=process.names[0], verb="hang", arguments=[key])
        process.kill()
        self.use(self.chance.choice(self.stay), key)

    def fork(self) -> None:
        """A forked child calls, and calls again after its parent has closed all that it had."""
        process, first, last = self.chance.choice(self.stay), self.new("key"), self.new("key")
        process.ask("fork", name=process.names[0], first=first, last=last)
        for name in list(process.names):
            process.close(name)
        self.come_and_go()
        assert process.ask("end_child") == 0
        self.open(process, self.place.kinds[0])
        self.use(process, first)
        self.use(process, last)

    def race(self) -> None:
        """Both processes call with a new key at once, through every store that they have."""
        key, every = self.new("key"), []
        for process in self.stay:
            stores = [name for name in process.names if self.kinds[name] in STORES]
            every.append([(name, colour, key) for name in stores for colour in ("sync", "async")])
            process.begin("call", calls=every[-1])
        for process, calls in zip(self.stay, every, strict=True):
            self.take_results(calls, process.told())

    def some_key(self) -> str:
        """One that was called before, or a new one."""
        known = [key for key in self.results if not key.startswith("http")]
        return self.chance.choice([*known[-5:], self.new("key")])

    # --- using what is open -------------------------------------------------------------------

    def use(self, process: Process, key: str) -> None:
        """Call with the key through one instance or several at once, and do what else they can."""
        stores = [name for name in process.names if self.kinds[name] in STORES]
        some = self.chance.sample(stores, self.chance.randint(1, len(stores))) if stores else []
        self.call(process, [(name, self.chance.choice(("sync", "async")), key) for name in some])
        for name in process.names:
            self.use_one(process, name)

    def use_one(self, process: Process, name: str) -> None:
        match self.kinds[name]:
            case "middleware":
                key = f"http-{len(self.results) // 3}"  # the same one several times
                self.call(process, [(name, "async", key), (name, "async", key)])
            case "broker":
                self.publish(process, name)
            case "application":
                self.inserted.append(self.new("order"))
                process.ask("do", name=name, verb="insert", arguments=[self.inserted[-1]])
            case "store" if self.place.has_log:
                id, colour = self.new("entry"), self.chance.choice(("sync", "async"))
                offset = process.ask("do", name=name, verb="append", arguments=[colour, id])
                self.appended[id] = offset

    def call(self, process: Process, calls: Sequence[tuple[str, str, str]]) -> None:
        self.take_results(calls, process.ask("call", calls=calls))

    def take_results(self, calls: Sequence[tuple[str, str, str]], results: Sequence[str]) -> None:
        for (_, _, key), result in zip(calls, results, strict=True):
            assert self.results.setdefault(key, result) == result, f"{key} ran again"

    def publish(self, process: Process, name: str) -> None:
        self.published += 1
        told = process.ask("do", name=name, verb="publish", arguments=[self.published])
        assert told == "Taken(added=1)", told
        if self.chance.random() < 0.3:
            self.take(process, name)

    def take(self, process: Process, name: str) -> None:
        """Own the shard through this broker, and read what was published since the last time."""
        self.fence += 1
        count = self.published - self.taken
        found = process.ask("do", name=name, verb="take", arguments=[self.fence, count])
        assert found == [*range(self.taken + 1, self.published + 1)]
        self.taken = self.published

    def meet(self, process: Process) -> None:
        """A new key: called in one process, then in another one that opens, calls and exits."""
        key = self.new("key")
        self.use(process, key)
        self.look_at_files(process)
        visitor = self.start()
        self.use(visitor, key)
        visitor.end()
        self.look_at_files(process)

    # --- what must hold -----------------------------------------------------------------------

    def look_at_files(self, process: Process) -> None:
        """Assert that a process that has just used the SQLite file has locks on it.

        And that no file that it has open was unlinked.
        """
        if self.place.file is None:
            return
        links = Path(f"/proc/{process.pid}/fd").iterdir()
        targets = [str(link.readlink()) for link in links if link.is_symlink()]
        gone = [each for each in targets if "semel.db" in each and each.endswith("(deleted)")]
        assert not gone, f"unlinked while it is open: {gone}"
        for suffix in ("", "-shm"):
            inode = Path(f"{self.place.file}{suffix}").stat().st_ino
            assert inode in locked_inodes(process.pid), f"no lock on semel.db{suffix}"

    def check(self) -> None:
        """Assert that what was acknowledged is there, once."""
        marks = {file.name: file.read_text() for file in (self.place.folder / "effects").iterdir()}
        assert {key: len(mark) for key, mark in marks.items() if mark != "x"} == {}
        assert marks.keys() == self.results.keys()
        for process in self.stay:
            self.check_log(process)
        if self.inserted:
            name = self.open(self.stay[0], "application")
            rows = self.stay[0].ask("do", name=name, verb="rows")
            assert sorted(rows) == sorted(self.inserted)
        if self.published > self.taken:
            self.take(self.stay[0], self.open(self.stay[0], "broker"))
        for process in self.stay:
            process.end()

    def check_log(self, process: Process) -> None:
        stores = [name for name in process.names if self.kinds[name] == "store"]
        for name in stores if self.place.has_log else ():
            entries = process.ask("do", name=name, verb="entries")
            assert [offset for offset, _ in entries] == [*range(1, len(self.appended) + 1)]
            assert {id: offset for offset, id in entries} == self.appended


def locked_inodes(pid: int) -> set[int]:
    """The files on which a process has POSIX locks."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    held = [line for line in lines if line[1] == "POSIX" and int(line[4]) == pid]
    return {int(line[5].rpartition(":")[2]) for line in held}
