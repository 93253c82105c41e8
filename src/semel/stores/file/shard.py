"""One directory of records, locked while it is changed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import repeat
from typing import Final

from semel.errors import StoreUnavailableError
from semel.stores.file.disk import (
    DIRECTORY,
    MARK_NAME,
    closing,
    mkdir,
    open_into,
    opened,
    read_all,
    reported,
    sync_directory,
    unavailable,
    write_all,
)
from semel.stores.file.form import FORMAT, corrupt, fields_of, intact, load, load_row, pack
from semel.stores.rules import Row

# A change takes milliseconds. A lock that is not had after this long is held by a stopped
# process, and a caller is better told than kept.
LOCK_WAIT_S: Final = 10.0

WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


# The descriptors of directories that are locked at this moment, or about to be. A child of a fork
# closes its copies, or it would hold on to the locks of a parent that is killed.
_held: dict[int, list[int]] = {}


def _after_fork() -> None:
    for fds in _held.values():
        with contextlib.suppress(OSError):
            deque(closing(fds), 0)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def locked(path: str) -> Iterator[int]:
    """The directory's descriptor, with its lock held. How none of both is lost: see `opened`."""
    fds: list[int] = []
    # Unlocked by name: closing would leave the lock with a child forked in the meantime.
    unlock = map(fcntl.flock, fds, repeat(fcntl.LOCK_UN))
    close = closing(fds)
    _held[id(fds)] = fds
    try:
        with reported(path):
            fd = _open_shard(fds, path)
        _lock(fd, path)
        yield fd
    finally:
        try:
            for _ in unlock:
                pass
        finally:
            for _ in close:
                pass
            _held.pop(id(fds), None)


def _open_shard(fds: list[int], path: str) -> int:
    try:
        return open_into(fds, path, DIRECTORY)
    except FileNotFoundError:
        # Without the mark this is no new shard but a ledger that was taken away.
        os.stat(f"{os.path.dirname(path)}/{MARK_NAME}")
        mkdir(path)
        return open_into(fds, path, DIRECTORY)


class Shard:
    """The records of one directory, which nobody else changes meanwhile: it is `locked`."""

    def __init__(self, path: str, fd: int, fsync: bool, rooted: set[str]) -> None:
        self._path = path
        self._fd = fd
        self._fsync = fsync
        self._rooted = rooted

    def row(self, id: bytes) -> Row | None:
        self.finish(id.hex())
        return load_row(self._path, id.hex())

    def put(self, row: Row) -> None:
        self._write(row.key.id.hex(), pack(fields_of(row)))

    def floor(self) -> int:
        """The highest fence that was ever deleted here."""
        self.finish("floor")
        path = f"{self._path}/floor.json"
        fields = load(path)
        if fields is None:
            return 0
        if not isinstance(floor := fields.get("fence"), int):
            raise corrupt(path, "it has no fence")
        return floor

    def delete(self, fences: dict[str, int]) -> bool:
        """Delete these records; their fences are remembered first."""
        if not fences:
            return False
        highest = max(fences.values())
        if highest > self.floor():
            self._write("floor", pack({"format": FORMAT, "fence": highest}))
        with reported(self._path):
            for stem in fences:
                os.unlink(f"{self._path}/{stem}.json")
            self._sync(self._fd)
        return True

    def _write(self, stem: str, content: bytes) -> None:
        coming = f"{self._path}/{stem}.next"
        with reported(coming):
            try:
                with opened(coming, WRITE) as fd:
                    write_all(fd, content)
                    self._sync(fd)
                self._show(stem)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(coming)
                raise

    def _show(self, stem: str) -> None:
        # The name is made durable before anybody can see the change. Renamed first, a reader
        # could replay a result that a power cut then takes back.
        self._sync(self._fd)
        self._root_it()
        os.replace(f"{self._path}/{stem}.next", f"{self._path}/{stem}.json")

    def _root_it(self) -> None:
        """The shard itself must be on disk: whoever made it may have died before it was."""
        if self._fsync and self._path not in self._rooted:
            sync_directory(os.path.dirname(self._path))
            self._rooted.add(self._path)

    def finish(self, stem: str) -> None:
        """Finish, or drop, what a writer that died left behind."""
        coming = f"{self._path}/{stem}.next"
        with reported(coming):
            try:
                with opened(coming, os.O_RDWR | os.O_CLOEXEC) as fd:
                    whole = intact(read_all(fd))
                    if whole:
                        self._sync(fd)
            except FileNotFoundError:
                return
            if whole:
                self._show(stem)
            else:
                os.unlink(coming)

    def _sync(self, fd: int) -> None:
        if self._fsync:
            os.fsync(fd)


def _lock(fd: int, path: str) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    pause_s = 0.0002
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise StoreUnavailableError(
                    f"{path} has been locked for {LOCK_WAIT_S:g} s; look for a stopped process "
                    f"with `fuser {path}`"
                ) from None
        except OSError as error:
            raise unavailable(path, error) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)
