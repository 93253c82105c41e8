"""The ledger in one SQLite file: the embedded default, with nothing to install or to start.

A replay is one SELECT: no write lock, no fsync, no waiting for a writer (WAL). Every change is one
transaction that waits for the disk (`synchronous=FULL`). Async callers' changes go to one thread
and share a transaction, and with it the fsync, as they come in.

Two things are easy to get wrong. SQLite finds a connection's file locks by the process, so a
connection that is open across a fork breaks the locks of connections the child opens later, and
commits are lost: every connection is put away before a fork. And SQLite does not notice flipped
bits: every row carries a checksum, and its rowid is made from its id, so that a record which the
index has lost cannot be made a second time.

The table is called `idempotency` like the one of the SQL stores, which write times and results in
another form. Neither opens the other's file: two ledgers side by side would each run the effect.
"""

# The statements are put together from the names in COLUMNS, nothing else.
# ruff: noqa: S608, PTH100, PTH120

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote
from zlib import crc32

from semel.colour import Colour
from semel.errors import CorruptRecordError, SettingsError, StoreUnavailableError
from semel.ports import Clock, StoreLedger
from semel.stores import rules
from semel.stores.batch import Batcher
from semel.stores.clock import SystemClock
from semel.stores.rules import Claiming, Operation, Row
from semel.stores.verbs import OnDisk
from semel.values import Answer, Done, Guarantees, Key, Mismatch, Outcome, Record, State, Terms

T = TypeVar("T")
Call: TypeAlias = Callable[..., Awaitable[Any]]
Values: TypeAlias = tuple[Any, ...]

MEMORY: Final = ":memory:"
VERSION: Final = 1
COMPLETED: Final = State.COMPLETED.value

# A transaction of ours takes milliseconds. A file that is locked for longer than this is held by
# something else, a backup or a shell with an open transaction.
BUSY_S: Final = 5.0

# Set on every connection. FULL: a commit is on disk when it is answered; fullfsync is what macOS
# calls that. cell_size_check finds damaged pages early.
PRAGMAS: Final = (
    "PRAGMA synchronous = FULL",
    "PRAGMA fullfsync = ON",
    "PRAGMA cell_size_check = ON",
)

# A message about a damaged schema quotes it, and need not be UTF-8 then.
ERRORS: Final = (sqlite3.Error, UnicodeError)
DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

FULL: Final = 2  # as PRAGMA synchronous says it

# How long a fork waits for the calls of other threads to come back.
FORK_WAIT_S: Final = 2 * BUSY_S

# Records deleted in one transaction: a sweep must not keep writers waiting.
SWEEP_CHUNK: Final = 200

COLUMNS: Final = (
    "id",
    "idempotency_key",
    "tenant_id",
    "operation",
    "request_hash",
    "state",
    "attempt",
    "fence",
    "number",
    "hold",
    "created_us",
    "started_us",
    "lease_us",
    "completed_us",
    "expires_us",
    "outcome",
    "response",
    "status_code",
    "error",
    "steps",
    "past",
)

# What a replay reads, and what the seal is the checksum of, together with the id.
REPLAYED: Final = (
    "state",
    "operation",
    "request_hash",
    "expires_us",
    "fence",
    "outcome",
    "response",
    "status_code",
)

SCHEMA: Final = """
CREATE TABLE idempotency (
    id BLOB NOT NULL PRIMARY KEY,
    idempotency_key TEXT NOT NULL,
    tenant_id TEXT NOT NULL,
    operation TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    state TEXT NOT NULL,
    attempt TEXT NOT NULL,
    fence INTEGER NOT NULL,
    number INTEGER NOT NULL,
    hold INTEGER NOT NULL,
    created_us INTEGER NOT NULL,
    started_us INTEGER NOT NULL,
    lease_us INTEGER NOT NULL,
    completed_us INTEGER,
    expires_us INTEGER,
    outcome TEXT,
    response BLOB,
    status_code INTEGER,
    error TEXT,
    steps TEXT,
    past TEXT NOT NULL,
    seal INTEGER,
    checksum INTEGER NOT NULL
);
CREATE INDEX ix_idempotency_expires ON idempotency (expires_us);
CREATE TABLE idempotency_floor (fence INTEGER NOT NULL);
INSERT INTO idempotency_floor VALUES (0);
"""

_LIST: Final = ", ".join(COLUMNS)
SELECT: Final = f"SELECT {_LIST}, checksum FROM idempotency WHERE id = ?"
PAGE: Final = f"SELECT {_LIST}, checksum FROM idempotency WHERE id > ? ORDER BY id LIMIT ?"
REPLAY: Final = f"SELECT {', '.join(REPLAYED)}, seal FROM idempotency WHERE id = ?"
INSERT: Final = (
    f"INSERT INTO idempotency ({_LIST}, checksum, seal, rowid) "
    f"VALUES ({', '.join('?' * (len(COLUMNS) + 3))})"
)
# The id stays out of it: SQLite would take its index for changed.
UPDATE: Final = (
    f"UPDATE idempotency SET {', '.join(f'{name} = ?' for name in COLUMNS[1:])}, "
    f"checksum = ?, seal = ? WHERE id = ?"
)
FLOOR: Final = "SELECT fence FROM idempotency_floor"
RAISE_FLOOR: Final = "UPDATE idempotency_floor SET fence = max(fence, ?)"
DELETE: Final = "DELETE FROM idempotency WHERE id = ?"
DELETE_EXPIRED: Final = (
    "DELETE FROM idempotency WHERE id IN "
    "(SELECT id FROM idempotency WHERE expires_us <= ? LIMIT ?) RETURNING fence"
)


class SQLiteStore:
    """Records in the SQLite file `path`, or in this process with `:memory:`. Serves both colours.

    Shared by the processes of one machine; not on a network file system.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self._path = os.fspath(path)
        self._thread = _Thread()
        self._connections = _connections(self._path)
        rows = _Rows(self._connections, clock or SystemClock())
        rows.prepare()
        self._sync = _SQLiteLedger(rows, _here)
        self._async = _BatchedLedger(rows, self._thread)

    def ledger(self, colour: Colour) -> StoreLedger:
        """Both colours; changes of the async one wait for the disk on a thread of the store."""
        return self._sync if colour.name == "sync" else self._async

    def close(self) -> None:
        """Close the connections; a later call opens new ones, but `:memory:` is gone."""
        self._connections.close()

    async def aclose(self) -> None:
        """End the thread, and close the connections."""
        await self._thread.close()
        self._connections.close()

    def __repr__(self) -> str:
        return f"SQLiteStore({self._path!r})"


def _connections(path: str) -> _Connections:
    """Connections to the file, which is made if need be, readable by its owner alone."""
    if path == MEMORY:
        return _OneConnection()
    path = os.path.abspath(path)
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _sync_directory(os.path.dirname(path))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise SettingsError(
            f"SQLiteStore cannot use {path}: {error.strerror}. Give it a file in a directory that "
            f"exists"
        ) from error
    except OSError as error:
        raise _unavailable(path, str(error.strerror)) from error
    return _Connections(path)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- two colours --------------------------------------------------------------------------------


async def _here(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


class _Thread:
    """Where async callers' changes wait for the disk. A child of a fork gets one of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._pool = self._new()

    @staticmethod
    def _new() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="semel-sqlite")

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        if self._pid != os.getpid():
            self._pid, self._pool = os.getpid(), self._new()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def close(self) -> None:
        """What was sent before is carried out first."""
        pool, self._pool = self._pool, self._new()
        if self._pid == os.getpid():
            await asyncio.to_thread(pool.shutdown)


class _SQLiteLedger(OnDisk):
    """Rows of a SQLite file."""

    def __init__(self, rows: _Rows, call: Call) -> None:
        super().__init__(rows, call)
        self._rows = rows

    async def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answer:
        found = self._rows.glance(key)
        if found is not None and (answer := self._rows.replay(found, key, fingerprint)):
            return answer
        op = Claiming(key, attempt, fingerprint, terms)
        if found is not None and (answer := self._rows.refuse(op)):
            return answer
        won: Answer = await self.perform(op)
        return won

    async def perform(self, op: Operation) -> Any:
        return self._rows.perform(op)


class _BatchedLedger(_SQLiteLedger):
    """Changes of concurrent callers share one transaction, gathered per event loop."""

    def __init__(self, rows: _Rows, thread: _Thread) -> None:
        super().__init__(rows, thread.run)
        self._local = threading.local()

    async def perform(self, op: Operation) -> Any:
        return await self._batcher().submit(op)

    def _batcher(self) -> Batcher[Operation]:
        loop = asyncio.get_running_loop()
        known: tuple[Any, Batcher[Operation]] | None = getattr(self._local, "known", None)
        if known is None or known[0]() is not loop:
            known = weakref.ref(loop), Batcher(self._together)
            self._local.known = known
        return known[1]

    async def _together(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers: Sequence[Any] = await self._call(self._rows.perform_all, ops)
        return answers


# --- the records --------------------------------------------------------------------------------


class _Rows:
    """The verbs over the table, blocking."""

    def __init__(self, connections: _Connections, clock: Clock) -> None:
        self._connections = connections
        self._clock = clock

    def prepare(self) -> None:
        """Make or check the schema. A file that says it has one is never given an empty one."""
        self._connections.read(_wal)
        version = self._connections.read(_user_version)
        if version > VERSION:
            raise SettingsError(
                f"{self._connections.path} has user_version {version}, this version of Semel knows "
                f"{VERSION}; upgrade Semel, or give SQLiteStore a file of its own"
            )
        if version < VERSION:
            self._connections.write(_create)
        self._connections.read(lambda c: c.execute(SELECT, (b"",)).fetchone())

    def glance(self, key: Key) -> Values | None:
        """What a replay needs of the record, if there is one."""
        return self._connections.select(REPLAY, (key.id,))

    def replay(self, found: Values, key: Key, fingerprint: bytes) -> Answer | None:
        """The answer from a finished record, by the rules of `rules.claim`; None without one."""
        state, operation, request_hash, expires_us, fence, kind, data, status, seal = found
        if state != COMPLETED:
            return None
        if seal != _checksum(found[:-1], key.id):
            raise _corrupt(key.id, "its checksum does not match its content")
        if expires_us is not None and expires_us <= self._clock.now_us():
            return None
        if operation != key.operation and _str(operation) != key.operation:
            return Mismatch("operation")
        if request_hash != fingerprint:
            return Mismatch("fingerprint")
        return Done(Outcome(kind, data, status), fence)

    def refuse(self, op: Claiming) -> Answer | None:
        """The answer, if nothing has to change for it: a poll takes no write lock."""
        found = self._connections.select(SELECT, (op.key.id,))
        if found is None:
            return None
        answer, changed = rules.claim(_row(found), op, self._clock.now_us())
        return answer if changed is None else None

    def perform(self, op: Operation) -> Any:
        return self._connections.write(lambda c: self._apply(c, op))

    def perform_all(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """One transaction. A record that cannot be read is its own caller's error alone."""
        return self._connections.write(lambda c: [self._apply_or_error(c, op) for op in ops])

    def _apply_or_error(self, connection: sqlite3.Connection, op: Operation) -> Any:
        try:
            return self._apply(connection, op)
        except CorruptRecordError as error:
            return error

    def _apply(self, connection: sqlite3.Connection, op: Operation) -> Any:
        key = rules.key_of(op)
        found = connection.execute(SELECT, (key.id,)).fetchone()
        row = _ghost(connection, key) if found is None else _row(found)
        answer, changed = rules.apply(row, op, self._clock.now_us())
        if changed is not None:
            _put(connection, changed, new=found is None)
        return answer

    def look(self, id: bytes) -> Record | None:
        values = self._connections.select(SELECT, (id,))
        now_us = self._clock.now_us()
        if values is None or rules.expired(row := _row(values), now_us):
            return None
        return rules.record(row, now_us)

    def records(
        self,
        tenant: str | None,
        operation: str | None,
        state: State | None,
        limit: int,
        after: bytes | None,
    ) -> Sequence[Record]:
        found: list[Record] = []
        now_us = self._clock.now_us()
        for row in self._pages(b"" if after is None else after):
            if len(found) >= limit:
                break
            record = rules.record(row, now_us)
            if not rules.expired(row, now_us) and rules.wanted(record, tenant, operation, state):
                found.append(record)
        return found

    def _pages(self, after: bytes) -> Iterator[Row]:
        """All rows behind `after`. Page by page: a long read would keep the WAL from shrinking."""
        while page := self._connections.read(
            lambda c, after=after: c.execute(PAGE, (after, SWEEP_CHUNK)).fetchall()  # type: ignore[misc]
        ):
            yield from map(_row, page)
            after = page[-1][0]

    def resolve(self, id: bytes, fence: int, outcome: Outcome | None, ttl_s: float | None) -> bool:
        def settle(connection: sqlite3.Connection) -> bool:
            found = connection.execute(SELECT, (id,)).fetchone()
            row = None if found is None else _row(found)
            settled = rules.resolve(row, fence, outcome, ttl_s, self._clock.now_us())
            if settled is not None:
                _put(connection, settled, new=False)
            return settled is not None

        return self._connections.write(settle)

    def forget(self, id: bytes, force: bool) -> bool:
        """Also the way out of a corrupt record: with `force` it is deleted unread."""

        def delete(connection: sqlite3.Connection) -> bool:
            now_us = self._clock.now_us()
            found = connection.execute(SELECT, (id,)).fetchone()
            if found is None or not (force or rules.forgettable(_row(found), force, now_us)):
                return False
            fence = found[COLUMNS.index("fence")]
            connection.execute(DELETE, (id,))
            connection.execute(RAISE_FLOOR, (fence if isinstance(fence, int) else now_us,))
            return True

        return self._connections.write(delete)

    def sweep(self, limit: int) -> int:
        swept = 0
        while (want := min(SWEEP_CHUNK, limit - swept)) > 0:
            count = self._connections.write(lambda c, want=want: self._sweep_chunk(c, want))  # type: ignore[misc]
            swept += count
            if count < want:
                break
        return swept

    def _sweep_chunk(self, connection: sqlite3.Connection, limit: int) -> int:
        due = connection.execute(DELETE_EXPIRED, (self._clock.now_us(), limit)).fetchall()
        if due:
            connection.execute(RAISE_FLOOR, (max(fence for (fence,) in due),))
        return len(due)

    def guarantees(self) -> Guarantees:
        if self._connections.path == MEMORY:
            return Guarantees(
                store="sqlite",
                survives=frozenset(),
                shared=False,
                why=("a `:memory:` database ends with this process",),
            )
        return self._connections.read(_guarantees)


def _wal(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")


def _user_version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _create(connection: sqlite3.Connection) -> None:
    if _user_version(connection) == VERSION:  # another process was faster
        return
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'idempotency'").fetchone():
        raise SettingsError(
            "this file has a table idempotency that SQLiteStore did not make; open it with the "
            "store that made it, SQLStore perhaps, or give SQLiteStore a file of its own"
        )
    for statement in SCHEMA.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _guarantees(connection: sqlite3.Connection) -> Guarantees:
    level = connection.execute("PRAGMA synchronous").fetchone()[0]
    mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
    durable = level >= FULL and mode != "off"
    why = [
        f"PRAGMA synchronous is {level}, journal_mode is {mode}: "
        + ("a commit waits for the disk" if durable else "a commit does not wait for the disk"),
        "one file on one machine: nothing to fail over to",
    ]
    return Guarantees(
        store="sqlite",
        survives=frozenset({"process_crash", "power_loss"} if durable else {"process_crash"}),
        shared=True,
        why=tuple(why),
    )


# --- rows ---------------------------------------------------------------------------------------


def _ghost(connection: sqlite3.Connection, key: Key) -> Row:
    (floor,) = connection.execute(FLOOR).fetchone()
    return rules.ghost(key, floor)


def _rowid(id: bytes) -> int:
    return int.from_bytes(id[:8], "big", signed=True)


def _put(connection: sqlite3.Connection, row: Row, *, new: bool) -> None:
    values = _values(row)
    id, *rest = values
    sums = _checksum(values), _seal(values)
    if not new:
        connection.execute(UPDATE, (*rest, *sums, id))
        return
    try:
        connection.execute(INSERT, (*values, *sums, _rowid(id)))
    except sqlite3.IntegrityError as error:
        # We have just looked, under the write lock: the table has it, the index has lost it.
        raise _corrupt(id, "the file is damaged") from error


def _values(row: Row) -> Values:
    key, outcome = row.key, row.outcome
    return (
        key.id,
        _text(key.text),
        _text(key.tenant),
        _text(key.operation),
        row.fingerprint,
        row.state,
        _text(row.attempt),
        row.fence,
        row.number,
        int(row.hold),
        row.created_us,
        row.started_us,
        row.lease_us,
        row.completed_us,
        row.expires_us,
        None if outcome is None else outcome.kind,
        None if outcome is None else outcome.data,
        None if outcome is None else outcome.status,
        None if row.error is None else _text(row.error),
        _steps_text(row.steps) if row.steps else None,
        row.past,
    )


def _row(values: Values) -> Row:
    if values[-1] != _checksum(values[:-1]):
        raise _corrupt(values[0], "its checksum does not match its content")
    (
        id, text, tenant, operation, fingerprint, state, attempt, fence, number, hold,
        created_us, started_us, lease_us, completed_us, expires_us,
        kind, data, status, error, steps, past, _,
    ) = values  # fmt: skip
    return Row(
        Key(id, _str(text), _str(tenant), _str(operation)),
        fingerprint,
        _str(attempt),
        fence,
        number,
        state,
        bool(hold),
        created_us,
        started_us,
        lease_us,
        completed_us,
        expires_us,
        None if kind is None else Outcome(kind, data, status),
        None if error is None else _str(error),
        {} if steps is None else _steps_of(steps),
        past,
    )


def _checksum(values: Values, id: bytes = b"") -> int:
    # marshal 2 is a fixed, flat encoding of these types, and the fastest one there is.
    return crc32(marshal.dumps(values, 2), crc32(id))


_replayed = itemgetter(*map(COLUMNS.index, REPLAYED))


def _seal(values: Values) -> int | None:
    """The checksum of what a replay reads; None where there is nothing to replay."""
    replayed = _replayed(values)
    return _checksum(replayed, values[0]) if replayed[0] == COMPLETED else None


def _text(text: str) -> str | bytes:
    """SQLite's text is UTF-8; a lone surrogate is not, and is kept as bytes."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _str(stored: str | bytes) -> str:
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


def _steps_text(steps: Mapping[str, bytes]) -> str:
    pairs = [
        [name.encode("utf-8", "surrogatepass").hex(), data.hex()] for name, data in steps.items()
    ]
    return json.dumps(pairs)


def _steps_of(text: str) -> dict[str, bytes]:
    return {
        bytes.fromhex(name).decode("utf-8", "surrogatepass"): bytes.fromhex(data)
        for name, data in json.loads(text)
    }


# --- connections --------------------------------------------------------------------------------


class _Connections:
    """Connections to one file: as many as are in use at once, one of them writing.

    Writers of this process queue on a lock, which is fair; SQLite's own waiting sleeps and races.
    A connection is kept by one cursor of its own. Taking one and giving it back is one atomic
    list operation each.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._idle: list[sqlite3.Cursor] = []
        self._open: set[sqlite3.Cursor] = set()
        self._broken = False
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._opening = threading.Lock()

    # --- use

    def select(self, sql: str, values: Values) -> Values | None:
        """The one row there is. The hot path of every replay, hence written out."""
        try:
            cursor = self._idle.pop()
        except IndexError:
            cursor = self._new()
        try:
            found: Values | None = cursor.execute(sql, values).fetchone()
            return found
        except ERRORS as error:
            raise self._reported(error) from error
        finally:
            self._give(cursor)

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        cursor = self._take()
        try:
            return work(cursor.connection)
        except ERRORS as error:
            raise self._reported(error) from error
        finally:
            self._give(cursor)

    def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in one transaction; what it returns is returned when that is on disk."""
        taken = False
        try:
            # A signal that raises between these two would leave the lock held for ever.
            taken = self._writing.acquire(timeout=BUSY_S)
            if not taken:
                raise _unavailable(self.path, "other threads have been writing for too long")
            return self.read(lambda connection: _transact(connection, work))
        finally:
            if taken:
                self._writing.release()

    def _reported(self, error: Exception) -> StoreUnavailableError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in DAMAGED or isinstance(error, UnicodeError):
            return CorruptRecordError(
                f"{self.path} is damaged: {error}. Nothing was run. Restore it from a backup, or "
                f"save what is left with `sqlite3 {self.path} .recover`"
            )
        return _unavailable(self.path, str(error))

    # --- open and close

    def _take(self) -> sqlite3.Cursor:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new()

    def _give(self, cursor: sqlite3.Cursor) -> None:
        if cursor.connection.in_transaction:  # interrupted where nobody could roll back
            with contextlib.suppress(sqlite3.Error):
                cursor.connection.rollback()
        self._idle.append(cursor)
        if cursor not in self._open:  # closed meanwhile
            self._drain()

    def _new(self) -> sqlite3.Cursor:
        with self._opening:
            if self._broken:
                raise _unavailable(
                    self.path,
                    "this process was forked while the file was in use, which breaks SQLite's "
                    "locks; open the store after the fork",
                )
            # mode=rw: a file that was deleted meanwhile is an error, not an empty ledger.
            cursor = self._connect(f"file:{quote(self.path)}?mode=rw").cursor()
            self._open.add(cursor)
        return cursor

    def _connect(self, target: str) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                target, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True
            )
        except ERRORS as error:
            raise self._reported(error) from error
        try:
            for pragma in PRAGMAS:
                connection.execute(pragma)
        except ERRORS as error:
            connection.close()
            raise self._reported(error) from error
        return connection

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back."""
        self._open = set()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                cursor = self._idle.pop()
                self._open.discard(cursor)
                cursor.connection.close()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._drain()
        else:
            _inherited.extend(self._idle)

    # --- fork

    def before_fork(self) -> None:
        """Have no connection open and no lock taken when the process is copied."""
        self._writing.acquire()
        self._opening.acquire()
        deadline = time.monotonic() + FORK_WAIT_S
        self._drain()
        while self._open and time.monotonic() < deadline:
            time.sleep(0.001)
            self._drain()

    def after_fork_in_parent(self) -> None:
        self._opening.release()
        self._writing.release()

    def after_fork_in_child(self) -> None:
        self._reset()
        # Not put away in time, or forked by something that does not ask Python first.
        self._broken = bool(self._open)
        _inherited.extend(self._idle)
        self._idle.clear()


class _OneConnection(_Connections):
    """A `:memory:` database is its connection: all threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        super().__init__(MEMORY)
        self._only: sqlite3.Cursor | None = self._connect(MEMORY).cursor()

    def select(self, sql: str, values: Values) -> Values | None:
        found: Values | None = self.read(lambda c: c.execute(sql, values).fetchone())
        return found

    def _take(self) -> sqlite3.Cursor:
        self._turn.acquire()
        if self._only is None:
            self._turn.release()
            raise _unavailable(self.path, "the store is closed and its records are gone")
        return self._only

    def _give(self, cursor: sqlite3.Cursor) -> None:
        self._turn.release()

    def close(self) -> None:
        with self._turn:
            only, self._only = self._only, None
        if only is not None:
            only.connection.close()

    def __del__(self) -> None:
        if getattr(self, "_only", None) is not None:
            self.close()

    def before_fork(self) -> None:
        self._writing.acquire()
        self._turn.acquire()

    def after_fork_in_parent(self) -> None:
        self._turn.release()
        self._writing.release()

    def after_fork_in_child(self) -> None:
        """The child goes on with a copy of its own; there are no file locks to break."""
        self._writing = threading.Lock()
        self._turn = threading.Lock()


def _transact(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
    try:
        connection.execute("BEGIN IMMEDIATE")
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.rollback()
        raise
    return result


# Connections of a parent that forked behind Python's back: not even to be closed.
_inherited: list[sqlite3.Cursor] = []
_all: weakref.WeakSet[_Connections] = weakref.WeakSet()


class _Fork:
    """Puts the connections away before a fork, and lets both sides open theirs afterwards."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._stopped: list[_Connections] = []

    def before(self) -> None:
        self._one_at_a_time.acquire()
        for each in list(_all):
            each.before_fork()
            self._stopped.append(each)

    def after_in_parent(self) -> None:
        while self._stopped:
            self._stopped.pop().after_fork_in_parent()
        self._one_at_a_time.release()

    def after_in_child(self) -> None:
        self._stopped.clear()
        self._one_at_a_time = threading.Lock()
        for each in list(_all):
            each.after_fork_in_child()


_fork = _Fork()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_fork.before,
        after_in_parent=_fork.after_in_parent,
        after_in_child=_fork.after_in_child,
    )


def _unavailable(path: str, what: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"SQLite file {path}: {what}. Check free space, permissions of the file and its "
        f"directory, and who else has it open (`fuser {path}`)"
    )


def _corrupt(id: Any, what: str) -> CorruptRecordError:
    name = id.hex() if isinstance(id, bytes) else repr(id)
    return CorruptRecordError(
        f"record {name} cannot be read: {what}. Nothing was run. Restore the file from a backup, "
        f"or forget the record if the effect may happen again"
    )
