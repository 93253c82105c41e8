"""The SQLite database file: create it, and check that it still is the file that was opened.

When a process closes *any* descriptor of a file, the operating system drops *every* lock of that
process on the file (https://www.sqlite.org/howtocorrupt.html, section 2.2). SQLite keeps its own
descriptors open for that reason; a descriptor of ours would take its locks away. The next process
that closes the database would then find no other user and delete the write-ahead log. Later commits
of this process would go to a deleted file. So an existing database file, its `-wal` and its
`-shm` are never opened here. `os.stat` needs no descriptor.

Several stores, brokers and engines of one process may use one file. What they must agree on is kept
here, by the file's device and inode: which `-wal` and `-shm` they have open, and whether this
process inherited open connections to the file.
"""

# ruff: noqa: PTH100, PTH116, PTH120

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
import weakref
from typing import Final, Protocol, TypeAlias

from semel.errors import DamagedStoreError, SettingsError, StoreUnavailableError

__all__ = [
    "DatabaseFile",
    "Identity",
    "OpenLog",
    "create",
    "gate",
    "identity_of",
    "mark_inherited",
    "refuse_unsafe",
    "unavailable",
]

Identity: TypeAlias = tuple[int, int]
"""Device and inode."""

# Why a write-ahead log can be missing although no person has deleted it.
LOG_DELETED: Final = (
    "SQLite deletes the log when it finds no lock of another process. A process loses its locks "
    "when it opens and closes the file by itself. A child that was forked with an open connection "
    "has none. "
)


# How long a fork waits for connections that are opened or closed meanwhile, in seconds. Each takes
# milliseconds.
FORK_WITHIN_S: Final = 5.0


class ClosesBeforeFork(Protocol):
    """A kind of store whose connections to SQLite files must not be open across a fork."""

    def stop(self) -> None:
        """Close the connections of all known stores, and let them open none until `resume`.

        A connection that stays in use for too long remains open.
        """
        ...

    def is_stopped(self) -> bool:
        """Return whether `stop` has reached every store that may have open connections.

        Called while the gate is held. False if a store was made after the last `stop`.
        """
        ...

    def resume(self) -> None:
        """Let the stores open connections again, in the process that has forked."""
        ...


class Gate:
    """A lock that sync code of Semel holds while it opens or closes a connection to a SQLite file.

    A fork holds it, too. Otherwise another thread could be inside SQLite at that moment. The child
    does not have that thread: there, SQLite's mutexes would stay locked and its lists of file locks
    would be wrong. Async engines connect in threads of their driver, without this lock.
    """

    def __init__(self) -> None:
        self.kinds: list[ClosesBeforeFork] = []
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._before, after_in_parent=self._after, after_in_child=self._reset
            )

    def _reset(self) -> None:
        self._is_held = False
        self.lock = threading.RLock()
        self._one_fork_at_a_time = threading.Lock()

    def _before(self) -> None:
        self._one_fork_at_a_time.acquire()
        deadline = time.monotonic() + FORK_WITHIN_S
        while True:
            for kind in self.kinds:
                kind.stop()
            self._is_held = self.lock.acquire()
            if all(kind.is_stopped() for kind in self.kinds) or time.monotonic() > deadline:
                return
            self._is_held = False
            self.lock.release()
            time.sleep(0.001)  # a store was made meanwhile, or is being collected

    def _after(self) -> None:
        """Undo `_before`, also if a signal interrupted it: Python forks all the same."""
        if self._is_held:
            self._is_held = False
            self.lock.release()
        for kind in self.kinds:
            kind.resume()
        self._one_fork_at_a_time.release()


gate: Final = Gate()

_inherited: set[Identity] = set()
"""Files for which `mark_inherited` was called, in this process or in an ancestor of it."""


def mark_inherited(path: str) -> None:
    """Make `refuse_unsafe` refuse this file. Called in a child that inherited open connections."""
    if (identity := identity_of(path)) is not None:
        _inherited.add(identity)


def create(path: str) -> None:
    """Create the file if it is absent, accessible to its owner only.

    `path` is absolute and has no symbolic links. SQLite itself would create it with the permissions
    that the umask leaves, often readable by all.
    """
    refuse_unsafe(path)
    try:
        with gate.lock:  # no thread connects to the file while it is open here
            _create_if_absent(path)
        _sync_directory(os.path.dirname(path))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise _not_a_file(path, str(error.strerror)) from error
    except OSError as error:
        raise unavailable(path, str(error.strerror)) from error


def refuse_unsafe(path: str) -> None:
    """Raise an error if SQLite must not open the file at `path`, or a new one there.

    Called before Semel opens a connection: opening and closing an empty file is enough for SQLite
    to delete the log beside it.
    """
    wal = _status(f"{path}-wal")  # first, see `_refuse_without_content`
    status = _status(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise _not_a_file(path, "it is a directory")
    if status is not None:
        _refuse_hard_links(path, status)
        if _inherited and (status.st_dev, status.st_ino) in _inherited:
            raise unavailable(
                path,
                "this process was forked while the file was in use, which breaks SQLite's locks; "
                "open the file only after the fork, or start the child with spawn",
            )
    if wal is not None and wal.st_size > 0:
        _refuse_without_content(path, status)


def _create_if_absent(path: str) -> None:
    """Create the file. With O_EXCL, one that exists is an error and is not opened."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse_hard_links(path: str, status: os.stat_result) -> None:
    if status.st_nlink > 1:
        raise SettingsError(
            f"{path} has {status.st_nlink} hard links. SQLite names its write-ahead log after the "
            "path, so processes that use different names lose each other's commits. Remove the "
            "other names; a symbolic link is safe"
        )


def _refuse_without_content(path: str, status: os.stat_result | None) -> None:
    """Raise `DamagedStoreError` if the file beside a log with content is missing or empty.

    SQLite writes the first page of a file before the first entry of its log. So if the log has
    content, and the file, looked at after it, has none, the file has lost its content. SQLite would
    delete that log.
    """
    if status is None or status.st_size == 0:
        raise DamagedStoreError(
            f"{path} is {'missing' if status is None else 'empty'}, but {path}-wal is not: the "
            "file was truncated, deleted, renamed or replaced while it was in use. Nothing was "
            "run. Stop every process that uses it, and put the file back or restore a backup; to "
            "begin with an empty store, delete both files"
        )


class DatabaseFile:
    """Compares the file at `path` with the one that this process has open.

    A process that has a deleted file open reads and commits as before. It shares nothing with
    processes that open the new file of that name. `path` may lead there through symbolic links,
    which are followed again with each check; SQLite keeps the log beside the file itself.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self.real_path = os.path.realpath(path)
        self._wal_path = f"{self.real_path}-wal"
        # Learned by the first check: an overlay file system copies a file when it is first opened
        # for writing. The copy may have another inode.
        self._identity: Identity | None = None

    def check(self, log: OpenLog | None) -> None:
        """Raise `DamagedStoreError` if the file, its `-wal` or its `-shm` was deleted or replaced.

        `log` is what the connection has open, None while that is unknown. While a connection is
        open, SQLite replaces these files neither in a checkpoint nor in another process.
        """
        status = _status(self.path)
        identity = None if status is None else (status.st_dev, status.st_ino)
        if self._identity is None:
            self._identity = identity
        elif identity != self._identity:
            raise self._damaged(f"{self.path} was deleted, renamed or replaced")
        if log is None:
            return
        self._compare(log, self._log_files())
        if status is not None and status.st_size == 0:
            raise self._damaged(f"{self.path} was truncated")

    def open_log(self, *, in_wal_mode: bool = False) -> OpenLog | None:
        """Return the log files of a new connection of the caller; None without a `-wal`.

        Raises `DamagedStoreError` if another connection of this process to the same file has other
        log files open. Then SQLite has opened a new `-wal` here, and both use the old `-shm`.
        `in_wal_mode`: whether the connection has a log. Then a missing `-wal` was deleted.
        """
        files = self._log_files()
        if in_wal_mode and files[0] is None:
            raise self._log_deleted()
        identity = identity_of(self.real_path)
        if files[0] is None or identity is None:
            return None
        with gate.lock:
            # A copy: the garbage collector may close other connections during the loop.
            for other in list(_open_logs.get(identity, ())):
                self._compare(other, files)
            opened = OpenLog(identity, files)
            _open_logs.setdefault(identity, weakref.WeakSet()).add(opened)
            return opened

    def _log_deleted(self) -> DamagedStoreError:
        return self._damaged(f"{self._wal_path} was deleted or replaced", LOG_DELETED)

    def _log_files(self) -> LogFiles:
        return identity_of(self._wal_path), identity_of(f"{self.real_path}-shm")

    def _compare(self, log: OpenLog, files: LogFiles) -> None:
        if log.files[0] != files[0]:
            raise self._log_deleted()
        if log.files[1] != files[1]:
            raise self._damaged(f"{self.real_path}-shm was deleted or replaced")

    def _damaged(self, what: str, cause: str = "") -> DamagedStoreError:
        return DamagedStoreError(
            f"{what} while this process had it open, so what other processes record is not seen "
            f"here. Nothing more is run. {cause}Stop every process that uses the file and restore "
            "it: put moved files back, or delete the file with its -wal and -shm and copy a backup "
            f"there. To copy an open database, run `sqlite3 {self.path} '.backup copy.db'`"
        )


LogFiles: TypeAlias = tuple[Identity | None, Identity | None]
"""The `-wal` and the `-shm`."""


class OpenLog:
    """The `-wal` and `-shm` that one connection has open, until `close`."""

    def __init__(self, file: Identity, files: LogFiles) -> None:
        self._file = file
        self.files = files

    def close(self) -> None:
        """Forget the files, before the connection is closed: SQLite may delete them then."""
        with gate.lock:
            logs = _open_logs.get(self._file)
            if logs is not None:
                logs.discard(self)
                if not logs:
                    del _open_logs[self._file]


_open_logs: dict[Identity, weakref.WeakSet[OpenLog]] = {}
"""The logs that connections of this process have open, by the identity of the database file."""


def identity_of(path: str) -> Identity | None:
    """Device and inode of the file at `path`, None without one."""
    status = _status(path)
    return None if status is None else (status.st_dev, status.st_ino)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unavailable(path, str(error.strerror)) from error


def _not_a_file(path: str, why: str) -> SettingsError:
    return SettingsError(
        f"SQLite cannot use {path}: {why}. Give it a file in a directory that exists"
    )


def unavailable(path: str, what: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"SQLite file {path}: {what}. Check free space, permissions of the file and its "
        f"directory, and who else has it open (`fuser {path}`)"
    )
