"""Files and directories by system calls, none of which loses its descriptor."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
from collections.abc import Iterator
from itertools import repeat, takewhile
from typing import Final

from semel.errors import DamagedStoreError, SemelError, SettingsError, StoreUnavailableError

try:
    import fcntl
except ImportError as error:
    raise SettingsError("FileStore needs POSIX file locks; on Windows use SQLiteStore") from error

MARK: Final = b'{"semel": "ledger", "format": 1}\n'
MARK_NAME: Final = "semel.json"

# 256 directories hold a million records at four thousand files each, which ext4, xfs and btrfs
# do not feel. A second level would cost a mkdir and two more fsyncs for almost every new key.
SHARDS: Final = frozenset(f"{n:02x}" for n in range(256))

RECORD_NAME: Final = re.compile(r"([0-9a-f]{64})\.(json|next)")

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def closing(fds: list[int]) -> Iterator[None]:
    """Takes each number from the list and closes it, as it is iterated over: all of it in C."""
    return map(os.close, map(list.pop, takewhile(bool, repeat(fds))))


def open_into(fds: list[int], path: str, flags: int) -> int:
    """Open, and add the number to the list: all of it in C."""
    fds.extend(map(os.open, (path,), (flags,), (0o600,)))
    return fds[0]


@contextlib.contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor that does not get lost.

    A signal handler that raises does so between two steps of Python, and most often right behind
    a system call: `fd = os.open(...)` has opened a file then that nobody knows the number of. So
    opening it and noting its number are one step, and so are forgetting the number and closing
    it; nothing can come between `finally` and the first step of a loop. Where `with` itself is
    interrupted, the generator closes it as it goes.
    """
    fds: list[int] = []
    close = closing(fds)
    try:
        yield open_into(fds, path, flags)
    finally:
        for _ in close:
            pass


def prepare(root: str) -> None:
    """Make the directory a ledger, or find out now why it cannot be one."""
    try:
        _make(root)
        _probe(root)
        _mark(root)
    except OSError as error:
        raise SettingsError(
            f"FileStore cannot keep records in {root}: {error.strerror}. Give it a directory on a "
            f"local disk that this process may write to"
        ) from error


def _make(path: str) -> None:
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    _make(parent)
    mkdir(path)
    sync_directory(parent)


def mkdir(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def sync_directory(path: str) -> None:
    with opened(path, DIRECTORY) as fd:
        os.fsync(fd)


def _mark(root: str) -> None:
    path = f"{root}/{MARK_NAME}"
    found = read(path)
    if found == MARK:
        return
    if found is None and set(os.listdir(root)) - {MARK_NAME, *SHARDS}:
        raise SettingsError(
            f"{root} is not empty and not a ledger; give FileStore a directory of its own"
        )
    # A prefix is the mark of a process that is writing it now, or died doing so.
    if not MARK.startswith(found or b""):
        raise mark_error(path, found or b"")
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC) as fd:
        write_all(fd, MARK)
        os.fsync(fd)


def mark_error(path: str, found: bytes) -> SemelError:
    """Return the error for a mark other than ours: its format is newer, or it is damaged."""
    try:
        match json.loads(found):
            case {"semel": "ledger", "format": int(number)} if number > 1:
                return SettingsError(
                    f"{path} is of another format ({number}) than this version of Semel knows (1); "
                    f"upgrade Semel, or use another directory"
                )
    except (ValueError, RecursionError):
        pass
    content = MARK.decode().strip()
    return DamagedStoreError(
        f"{path} is damaged: it has {len(found)} bytes, {found[:40]!r}, and should be one line, "
        f"{content}. If the records beside it are Semel's, write it again: "
        f"echo {shlex.quote(content)} > {shlex.quote(path)}. Each record has a checksum of its own"
    )


def _probe(root: str) -> None:
    """Is it ours to write, and can it be locked?"""
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with opened(root, DIRECTORY) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.fsync(fd)


def ids(path: str) -> list[str]:
    with reported(path):
        names = os.listdir(path)
    return sorted({m[1] for name in names if (m := RECORD_NAME.fullmatch(name))})


def read(path: str) -> bytes | None:
    try:
        with opened(path, os.O_RDONLY | os.O_CLOEXEC) as fd:
            return read_all(fd)
    except FileNotFoundError:
        return None


def read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def reported(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unavailable(path, error) from error


def unavailable(path: str, error: OSError) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{path}: {error.strerror}; the record is as it was. Check the disk: free space, "
        f"permissions, errors in the system log"
    )
