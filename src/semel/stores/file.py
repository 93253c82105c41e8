"""The ledger as a directory of readable files, for one machine without a database.

    ledger/semel.json           says whose directory this is, and the format
    ledger/ab/<id>.json         a record: one line of JSON, then one line with its checksum
    ledger/ab/<id>.next         a change on its way in
    ledger/ab/floor.json        the highest fence that was ever deleted here

A change is written to `.next`, made durable there together with its name, and only then renamed
over the record. So whoever can see a record sees one that survives a power cut, a replay is one
read without a lock, and an error on the way in leaves the old record as it was. A process that
dies in between leaves a whole `.next`, which the next writer finishes, or a torn one, which it
drops.

A shard's directory is its own lock: `flock` on a descriptor opened for this one change keeps out
other threads and other processes alike, and the kernel lets go when the holder dies. The easy
mistake is to rely on closing it: a forked child shares the descriptor and would keep the lock.

Not for Windows (no `flock`) and not for network file systems (no `flock` on directories).
"""

# Every system call is written out: their order is the promise, and the tests fail them one by one.

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from semel.colour import Colour
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.ports import Clock, StoreLedger
from semel.stores import rules
from semel.stores.clock import SystemClock
from semel.stores.rules import Claiming, Operation, Row
from semel.stores.verbs import OnDisk
from semel.values import Busy, Done, Guarantees, Key, Mismatch, Outcome, Record, State

try:
    import fcntl
except ImportError as error:
    raise SettingsError("FileStore needs POSIX file locks; on Windows use SQLiteStore") from error

log = logging.getLogger("semel")

FORMAT: Final = 1
MARK: Final = b'{"semel": "ledger", "format": 1}\n'
MARK_NAME: Final = "semel.json"

# 256 directories hold a million records at four thousand files each, which ext4, xfs and btrfs
# do not feel. A second level would cost a mkdir and two more fsyncs for almost every new key.
SHARDS: Final = frozenset(f"{n:02x}" for n in range(256))

# A change takes milliseconds. A lock that is not had after this long is held by a stopped
# process, and a caller is better told than kept.
LOCK_WAIT_S: Final = 10.0

# Async callers' changes wait for the disk here. The kernel commits concurrent fsyncs together;
# more threads than this gain nothing on one disk.
THREADS: Final = 8

# Deletions under one lock: a sweep must not keep callers of the shard waiting.
SWEEP_CHUNK: Final = 64

RECORD_NAME: Final = re.compile(r"([0-9a-f]{64})\.(json|next)")

Call: TypeAlias = Callable[..., Awaitable[Any]]


class FileStore:
    """Records as files below `path`. Serves both colours; shared by the processes of one machine.

    `fsync=False` gives up surviving a power cut for speed; a killed process still loses nothing.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Clock | None = None, fsync: bool = True
    ) -> None:
        self._path = os.path.abspath(os.fspath(path))
        _prepare(self._path)
        self._files = _Files(self._path, clock or SystemClock(), fsync)
        self._threads = _Threads()
        self._sync = _FileLedger(self._files, _here)
        self._async = _FileLedger(self._files, self._threads.run)

    def ledger(self, colour: Colour) -> StoreLedger:
        """Both colours; changes of the async one wait for the disk on threads of the store."""
        return self._sync if colour.name == "sync" else self._async

    def close(self) -> None:
        """Nothing is held between two sync calls."""

    async def aclose(self) -> None:
        """End the threads; a later call starts new ones."""
        self._threads.close()

    def __repr__(self) -> str:
        return f"FileStore({self._path!r})"


# --- two colours --------------------------------------------------------------------------------


async def _here(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


class _Threads:
    """Where async callers' changes wait for the disk. A child of a fork gets threads of its own.

    Not the event loop's own executor: that one belongs to the application, and a renewal behind
    thirty slow uploads would come too late.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._pool = self._new()

    @staticmethod
    def _new() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(THREADS, thread_name_prefix="semel-file")

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._pid != os.getpid():
            self._pid, self._pool = os.getpid(), self._new()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def close(self) -> None:
        pool, self._pool = self._pool, self._new()
        pool.shutdown(wait=False)


class _FileLedger(OnDisk):
    """Files of a directory."""

    def __init__(self, files: _Files, call: Call) -> None:
        super().__init__(files, call)
        self._files = files

    async def perform(self, op: Operation) -> Any:
        if isinstance(op, Claiming) and (answer := self._files.replay(op)) is not None:
            return answer
        return await self._call(self._files.perform, op)


# --- the records --------------------------------------------------------------------------------


class _Files:
    """The verbs over the directory, blocking."""

    def __init__(self, root: str, clock: Clock, fsync: bool) -> None:
        self._root = root
        self._clock = clock
        self._fsync = fsync
        self._rooted: set[str] = set()

    def _shard(self, name: str) -> _Shard:
        return _Shard(self._root, name, self._fsync, self._rooted)

    def _shards(self) -> list[str]:
        with _reported(self._root):
            return sorted(SHARDS.intersection(os.listdir(self._root)))

    def _shard_of(self, id: bytes) -> _Shard:
        return self._shard(id.hex()[:2])

    def replay(self, op: Claiming) -> Done | Busy | Mismatch | None:
        """The answer, if it can be had by one read; None when something may have to change."""
        stem = op.key.id.hex()
        row = _load_row(f"{self._root}/{stem[:2]}", stem)
        if row is None:
            return None
        answer, changed = rules.claim(row, op, self._clock.now_us())
        if changed is None and isinstance(answer, Done | Busy | Mismatch):
            return answer
        return None

    def perform(self, op: Operation) -> Any:
        key = rules.key_of(op)
        with self._shard_of(key.id) as shard:
            row = shard.row(key.id) or rules.ghost(key, shard.floor())
            answer, changed = rules.apply(row, op, self._clock.now_us())
            if changed is not None:
                shard.put(changed)
            return answer

    def look(self, id: bytes) -> Record | None:
        row = self._row(id.hex()[:2], id.hex())
        now_us = self._clock.now_us()
        return None if row is None or rules.expired(row, now_us) else rules.record(row, now_us)

    def records(
        self,
        tenant: str | None,
        operation: str | None,
        state: State | None,
        limit: int,
        after: bytes | None,
    ) -> Sequence[Record]:
        now_us = self._clock.now_us()
        found = (
            rules.record(row, now_us)
            for row in self._rows(b"" if after is None else after)
            if not rules.expired(row, now_us)
        )
        wanted = (r for r in found if rules.wanted(r, tenant, operation, state))
        return list(itertools.islice(wanted, limit))

    def _rows(self, after: bytes) -> Iterator[Row]:
        stem = after.hex()
        for name in self._shards():
            if name < stem[:2]:
                continue
            for each in _ids(f"{self._root}/{name}"):
                if each > stem and (row := self._row(name, each)) is not None:
                    yield row

    def _row(self, shard: str, stem: str) -> Row | None:
        path = f"{self._root}/{shard}"
        if os.path.exists(f"{path}/{stem}.next"):
            with self._shard(shard) as locked:
                locked.finish(stem)
        return _load_row(path, stem)

    def resolve(self, id: bytes, fence: int, outcome: Outcome | None, ttl_s: float | None) -> bool:
        with self._shard_of(id) as shard:
            row = rules.resolve(shard.row(id), fence, outcome, ttl_s, self._clock.now_us())
            if row is not None:
                shard.put(row)
            return row is not None

    def forget(self, id: bytes, force: bool) -> bool:
        """Also the way out of a corrupt record: with `force` it is deleted unread."""
        with self._shard_of(id) as shard:
            now_us = self._clock.now_us()
            try:
                row = shard.row(id)
            except CorruptRecordError:
                if not force:
                    raise
                return shard.delete({id.hex(): now_us})
            if row is None or not rules.forgettable(row, force, now_us):
                return False
            return shard.delete({id.hex(): row.fence})

    def sweep(self, limit: int) -> int:
        swept = 0
        for name in self._shards():
            due = self._due(name)
            while chunk := list(itertools.islice(due, min(SWEEP_CHUNK, limit - swept))):
                swept += self._delete_expired(name, chunk)
        return swept

    def _due(self, shard: str) -> Iterator[str]:
        now_us = self._clock.now_us()
        for stem in _ids(f"{self._root}/{shard}"):
            try:
                row = self._row(shard, stem)
            except CorruptRecordError as error:
                log.warning("semel: not swept: %s", error)
                continue
            if row is not None and rules.expired(row, now_us):
                yield stem

    def _delete_expired(self, name: str, chosen: list[str]) -> int:
        now_us = self._clock.now_us()
        with self._shard(name) as shard:
            # Looked at again under the lock: somebody may have claimed it meanwhile.
            rows = ((stem, shard.row(bytes.fromhex(stem))) for stem in chosen)
            dead = {h: r.fence for h, r in rows if r is not None and rules.expired(r, now_us)}
            shard.delete(dead)
        return len(dead)

    def guarantees(self) -> Guarantees:
        if self._fsync:
            return Guarantees(
                store="file",
                survives=frozenset({"process_crash", "power_loss"}),
                shared=True,
                why=(
                    "every change is fsynced with its directory before it can be seen",
                    "one directory on one machine: nothing to fail over to",
                ),
            )
        return Guarantees(
            store="file",
            survives=frozenset({"process_crash"}),
            shared=True,
            why=(
                "fsync=False: changes outlive a killed process, but not a power cut",
                "one directory on one machine: nothing to fail over to",
            ),
        )


# --- one shard, locked --------------------------------------------------------------------------

# Descriptors that are locked at this moment. A child of a fork closes its copies, or it would
# hold on to the locks of a parent that is killed.
_held: set[int] = set()


def _after_fork() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Shard:
    """One directory of records that nobody else changes meanwhile."""

    def __init__(self, root: str, name: str, fsync: bool, rooted: set[str]) -> None:
        self._root = root
        self._path = f"{root}/{name}"
        self._fsync = fsync
        self._rooted = rooted
        self._fd = -1

    def __enter__(self) -> Self:
        with _reported(self._path):
            try:
                self._fd = _open_directory(self._path)
            except FileNotFoundError:
                # Without the mark this is no new shard but a ledger that was taken away.
                os.stat(f"{self._root}/{MARK_NAME}")
                _mkdir(self._path)
                self._fd = _open_directory(self._path)
        _held.add(self._fd)
        try:
            _lock(self._fd, self._path)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Unlocked by name: closing would leave the lock with a child forked in the meantime.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        # Taken from the set first: the number may be another file's as soon as it is closed.
        _held.discard(self._fd)
        os.close(self._fd)

    def row(self, id: bytes) -> Row | None:
        self.finish(id.hex())
        return _load_row(self._path, id.hex())

    def put(self, row: Row) -> None:
        self._write(row.key.id.hex(), _pack(_fields(row)))

    def floor(self) -> int:
        """The highest fence that was ever deleted here."""
        self.finish("floor")
        path = f"{self._path}/floor.json"
        fields = _load(path)
        if fields is None:
            return 0
        if not isinstance(floor := fields.get("fence"), int):
            raise _corrupt(path, "it has no fence")
        return floor

    def delete(self, fences: dict[str, int]) -> bool:
        """Delete these records; their fences are remembered first."""
        if not fences:
            return False
        highest = max(fences.values())
        if highest > self.floor():
            self._write("floor", _pack({"format": FORMAT, "fence": highest}))
        with _reported(self._path):
            for stem in fences:
                os.unlink(f"{self._path}/{stem}.json")
            self._sync(self._fd)
        return True

    def _write(self, stem: str, content: bytes) -> None:
        coming = f"{self._path}/{stem}.next"
        with _reported(coming):
            try:
                fd = os.open(coming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    _write_all(fd, content)
                    self._sync(fd)
                finally:
                    os.close(fd)
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
            _sync_directory(self._root)
            self._rooted.add(self._path)

    def finish(self, stem: str) -> None:
        """Finish, or drop, what a writer that died left behind."""
        coming = f"{self._path}/{stem}.next"
        with _reported(coming):
            try:
                fd = os.open(coming, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                whole = _intact(_read_all(fd))
                if whole:
                    self._sync(fd)
            finally:
                os.close(fd)
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
            raise _unavailable(path, error) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.01)


# --- files --------------------------------------------------------------------------------------


def _prepare(root: str) -> None:
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
    _mkdir(path)
    _sync_directory(parent)


def _mkdir(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _open_directory(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _sync_directory(path: str) -> None:
    fd = _open_directory(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mark(root: str) -> None:
    path = f"{root}/{MARK_NAME}"
    found = _read(path)
    if found == MARK:
        return
    if found is None and set(os.listdir(root)) - {MARK_NAME, *SHARDS}:
        raise SettingsError(
            f"{root} is not empty and not a ledger; give FileStore a directory of its own"
        )
    # A prefix is the mark of a process that is writing it now, or died doing so.
    if not MARK.startswith(found or b""):
        raise SettingsError(
            f"{path} is of another format than this version of Semel knows; upgrade Semel, or "
            f"give FileStore another directory"
        )
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, MARK)
        os.fsync(fd)
    finally:
        os.close(fd)


def _probe(root: str) -> None:
    """Is it ours to write, and can it be locked?"""
    if not os.access(root, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    fd = _open_directory(root)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.fsync(fd)
    finally:
        os.close(fd)


def _ids(path: str) -> list[str]:
    with _reported(path):
        names = os.listdir(path)
    return sorted({m[1] for name in names if (m := RECORD_NAME.fullmatch(name))})


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _read_all(fd)
    finally:
        os.close(fd)


def _read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 16):
        parts.append(part)
    return b"".join(parts)


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def _reported(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _unavailable(path, error) from error


def _unavailable(path: str, error: OSError) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"{path}: {error.strerror}; the record is as it was. Check the disk: free space, "
        f"permissions, errors in the system log"
    )


def _corrupt(path: str, what: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"{path} cannot be read: {what}. Nothing was run. Restore the file, or delete it if the "
        f"effect may happen again"
    )


# --- the format ---------------------------------------------------------------------------------


def _pack(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode() + b"\n"
    return body + _seal(body)


def _seal(body: bytes) -> bytes:
    return b'{"sha256": "%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def _intact(content: bytes) -> bool:
    body, newline, seal = content.partition(b"\n")
    return seal == _seal(body + newline)


def _load(path: str) -> dict[str, Any] | None:
    with _reported(path):
        content = _read(path)
    if content is None:
        return None
    if not _intact(content):
        raise _corrupt(path, "its checksum does not match its content")
    fields: dict[str, Any] = json.loads(content[: content.index(b"\n")])
    if fields.get("format") != FORMAT:
        raise _corrupt(path, f"its format is {fields.get('format')!r}, this version knows {FORMAT}")
    return fields


def _load_row(shard: str, stem: str) -> Row | None:
    path = f"{shard}/{stem}.json"
    fields = _load(path)
    if fields is None:
        return None
    if fields.get("id") != stem:
        raise _corrupt(path, f"it is the record {fields.get('id')}")
    try:
        return _row_of(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise _corrupt(path, f"{type(error).__name__}: {error}") from error


def _fields(row: Row) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "id": row.key.id.hex(),
        "key": _plain(row.key.text),
        "tenant": _plain(row.key.tenant),
        "operation": _plain(row.key.operation),
        "state": row.state,
        "fingerprint": row.fingerprint.hex(),
        "attempt": _plain(row.attempt),
        "fence": row.fence,
        "number": row.number,
        "hold": row.hold,
        "created_us": row.created_us,
        "started_us": row.started_us,
        "lease_us": row.lease_us,
        "completed_us": row.completed_us,
        "expires_us": row.expires_us,
        "outcome": None if row.outcome is None else _outcome_fields(row.outcome),
        "error": None if row.error is None else _plain(row.error),
        "steps": {_plain(name): _bytes_fields(data) for name, data in row.steps.items()},
        "past": json.loads(row.past),
    }


def _row_of(fields: dict[str, Any]) -> Row:
    outcome, error = fields["outcome"], fields["error"]
    return Row(
        key=Key(
            id=bytes.fromhex(fields["id"]),
            text=_unplain(fields["key"]),
            tenant=_unplain(fields["tenant"]),
            operation=_unplain(fields["operation"]),
        ),
        fingerprint=bytes.fromhex(fields["fingerprint"]),
        attempt=_unplain(fields["attempt"]),
        fence=fields["fence"],
        number=fields["number"],
        state=State(fields["state"]).value,
        hold=fields["hold"],
        created_us=fields["created_us"],
        started_us=fields["started_us"],
        lease_us=fields["lease_us"],
        completed_us=fields["completed_us"],
        expires_us=fields["expires_us"],
        outcome=None if outcome is None else _outcome_of(outcome),
        error=None if error is None else _unplain(error),
        steps={_unplain(name): _bytes_of(data) for name, data in fields["steps"].items()},
        past=json.dumps(fields["past"]),
    )


def _outcome_fields(outcome: Outcome) -> dict[str, Any]:
    return {"kind": outcome.kind, "status": outcome.status, **_bytes_fields(outcome.data)}


def _outcome_of(fields: dict[str, Any]) -> Outcome:
    return Outcome(fields["kind"], _bytes_of(fields), fields["status"])


def _bytes_fields(data: bytes) -> dict[str, str]:
    """Readable where it is text, and the same bytes again either way."""
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _bytes_of(fields: dict[str, str]) -> bytes:
    text = fields.get("text")
    return base64.b64decode(fields["base64"]) if text is None else text.encode()


def _plain(text: str) -> str:
    """The text as JSON brings it back: two lone surrogates in a row would become one character."""
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")


def _unplain(text: str) -> str:
    if text.isascii():
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogatepass")
