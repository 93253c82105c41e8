"""Keys that outlive the process: a client that was killed after sending asks with the same key.

    intents = Intents("payments.db")
    client = httpx.Client(transport=IdempotentTransport(intents=intents))
    client.post(url, json=order, headers=intents.headers("invoice-7"))

An intent is the caller's name for one logical request. Its key is on disk before `headers`
returns, and with it, before the first byte is sent, what the request is: the same intent for
another request is refused. When an answer has come that says how it ended, the intent is
answered; until its `ttl` ends it sends the same key again, and the server replays.

Beyond its `ttl` the server may have forgotten the key. An intent that was never answered gets no
new one then, for that could do it twice: somebody has to find out, and `forget` it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Final, Self, TypeAlias

from semel.errors import IdempotencyConflictError, OutcomeUnknownError, SettingsError
from semel.policy import LONGEST_S, Seconds
from semel.ports import Clock
from semel.stores.clock import SystemClock
from semel.stores.sqlite.connections import MEMORY, Connections, connections_to
from semel.stores.sqlite.schema import wal
from semel.values import value

HEADER: Final = "Idempotency-Key"

DAY_S: Final = 86_400
SECOND_US: Final = 1_000_000

SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS semel_intents (
        name TEXT NOT NULL PRIMARY KEY,
        idempotency_key TEXT NOT NULL UNIQUE,
        request_hash BLOB,
        created_us INTEGER NOT NULL,
        answered_us INTEGER
    )
    """,
    "CREATE INDEX IF NOT EXISTS ix_semel_intents_created ON semel_intents (created_us)",
)
TABLES: Final = "SELECT name FROM sqlite_schema WHERE type = 'table'"
FIND: Final = "SELECT idempotency_key, created_us, answered_us FROM semel_intents WHERE name = ?"
ADD: Final = "INSERT INTO semel_intents (name, idempotency_key, created_us) VALUES (?, ?, ?)"
DROP: Final = "DELETE FROM semel_intents WHERE name = ?"
BOUND: Final = (
    "SELECT name, request_hash, idempotency_key, created_us, answered_us FROM semel_intents "
    "WHERE idempotency_key = ?"
)
BIND: Final = "UPDATE semel_intents SET request_hash = ? WHERE idempotency_key = ?"
ANSWER: Final = (
    "UPDATE semel_intents SET answered_us = ? WHERE idempotency_key = ? AND answered_us IS NULL"
)
OPEN: Final = (
    "SELECT name, idempotency_key, created_us FROM semel_intents "
    "WHERE answered_us IS NULL ORDER BY created_us, name"
)
# With every new intent at most this many old ones go, so that none waits long and none piles up.
SWEPT: Final = 10
SWEEP: Final = (
    "DELETE FROM semel_intents WHERE name IN (SELECT name FROM semel_intents "
    "WHERE created_us <= ? AND answered_us IS NOT NULL LIMIT ?)"
)

Row: TypeAlias = tuple[str, int, int | None]


@value
class Unanswered:
    """An intent nobody has seen the end of. `key` is what the server knows it by."""

    name: str
    key: str
    created_at: datetime


class Intents:
    """Names of logical requests and their keys, in an SQLite file that is made if need be.

    Any number of threads and processes may share the file. `ttl` counts from an intent's first
    use and must not be longer than the server remembers a key.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, ttl: Seconds = DAY_S, clock: Clock | None = None
    ) -> None:
        self._settings = (path, ttl, clock)
        self._ttl_us = _microseconds(ttl)
        self._clock = clock or SystemClock()
        self._file = _opened(os.fspath(path))

    # --- what a caller says

    def headers(self, name: str) -> dict[str, str]:
        """The header of this intent's requests. It waits for the disk, the first time."""
        return {HEADER: quoted(self.key(name))}

    def key(self, name: str) -> str:
        """The bare key, for a client library that takes one as an argument."""
        given: object = name
        if not isinstance(given, str) or not name or not _is_text(name):
            raise SettingsError(f"{name!r} cannot name an intent; give it a text that is not empty")
        now_us = self._clock.now_us()
        found: Row | None = self._file.select(FIND, (name,))
        if found is not None and self._is_current(name, found, now_us):
            return found[0]
        return self._file.write(lambda connection: self._made(connection, name, now_us))

    def forget(self, name: str) -> bool:
        """Let the next request of this name be a new one. False when there is no such intent.

        Only when it is known how it ended, or that it was never sent: the effect happens again.
        """
        return self._file.write(lambda c: c.execute(DROP, (name,)).rowcount > 0)

    def unanswered(self) -> list[Unanswered]:
        """What was begun and has no answer yet, oldest first."""
        rows = self._file.read(lambda connection: connection.execute(OPEN).fetchall())
        return [Unanswered(name, key, _moment(created_us)) for name, key, created_us in rows]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        """A `requests.Session` is pickled with its adapters."""
        return _again, self._settings

    # --- what a transport says

    def bind(self, header: str, fingerprint: bytes | None) -> bool:
        """Tie the key in this header to its request, on disk. False when it is no intent's.

        Without a fingerprint nobody could tell later what the request was: it is refused.
        """
        key = header.strip().strip('"')
        found = self._file.select(BOUND, (key,))
        if found is None:
            return False
        name, bound, *row = found
        if not self._is_current(name, tuple(row), self._clock.now_us()):
            raise SettingsError(
                f"intent {name!r} was answered and its time is over: the server may have "
                f"forgotten its key. Ask intents.headers({name!r}) again for a new request"
            )
        if fingerprint is None:
            raise SettingsError(
                f"the body of intent {name!r} is a stream, or too large to hold, so that it could "
                f"not be sent again; give it as bytes"
            )
        if bound is None:
            return self._file.write(lambda connection: _bound(connection, key, name, fingerprint))
        _compare(key, name, bound, fingerprint)
        return True

    def answered(self, header: str) -> None:
        """An answer has come that says how it ended."""
        values = (self._clock.now_us(), header.strip().strip('"'))
        self._file.write(lambda connection: connection.execute(ANSWER, values))

    # --- inside

    def _made(self, connection: sqlite3.Connection, name: str, now_us: int) -> str:
        found: Row | None = connection.execute(FIND, (name,)).fetchone()
        if found is not None and self._is_current(name, found, now_us):
            return found[0]  # another thread or process was faster
        key = new_key()
        connection.execute(DROP, (name,))
        connection.execute(ADD, (name, key, now_us))
        connection.execute(SWEEP, (now_us - self._ttl_us, SWEPT))
        return key

    def _is_current(self, name: str, found: Row, now_us: int) -> bool:
        key, created_us, answered_us = found
        if now_us < created_us + self._ttl_us:
            return True
        if answered_us is None:
            raise OutcomeUnknownError(
                f"intent {name!r} was begun at {_moment(created_us):%Y-%m-%d %H:%M} UTC and its "
                f"answer never came. The server may have forgotten its key {key} by now: sending "
                f"it again could do it twice. Find out whether it happened; if it did not, "
                f"intents.forget({name!r}) and send it again",
                key=key,
            )
        return False


def new_key() -> str:
    """128 random bits."""
    return secrets.token_hex(16)


def said(header: str | None) -> str | None:
    """The header, if it holds a key: blanks and empty quotes are none."""
    return header if header and header.strip(' \t"') else None


def quoted(key: str) -> str:
    """As a string of a structured field (RFC 8941): what the draft asks of the header."""
    return f'"{key}"'


def fingerprint_of(method: str, url: str, body: bytes) -> bytes:
    """What the request is. Header fields are left out: credentials change, the request does not."""
    digest = hashlib.sha256()
    for part in (method.encode(), url.encode(), body):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def _opened(path: str) -> Connections:
    if path == MEMORY:
        raise SettingsError("Intents outlive the process; give a file instead of :memory:")
    file = connections_to(path)
    file.read(_refuse_foreign)
    file.read(wal)  # with it, a commit that was answered is on disk
    file.write(_create)
    return file


def _refuse_foreign(connection: sqlite3.Connection) -> None:
    """Before anything is changed in a file that is another's, its journal mode included."""
    tables = {name for (name,) in connection.execute(TABLES)}
    if tables and "semel_intents" not in tables:
        raise SettingsError("this SQLite file is another's; give Intents a file of its own")


def _create(connection: sqlite3.Connection) -> None:
    for statement in SCHEMA:
        connection.execute(statement)


def _bound(connection: sqlite3.Connection, key: str, name: str, fingerprint: bytes) -> bool:
    _, found, *_ = connection.execute(BOUND, (key,)).fetchone() or (name, fingerprint)
    if found is None:
        connection.execute(BIND, (fingerprint, key))
    else:
        _compare(key, name, found, fingerprint)
    return True


def _compare(key: str, name: str, bound: bytes, fingerprint: bytes) -> None:
    if bound != fingerprint:
        raise IdempotencyConflictError(
            f"intent {name!r} was used for a request with another method, URL or body; nothing was "
            f"sent. Name this one differently. If it is the same request, made of the same parts, "
            f"make them in the same order, and give a multipart body a fixed boundary. If the "
            f"first was refused and this is its correction, intents.forget({name!r}) first",
            key=key,
        )


def _microseconds(ttl: Seconds) -> int:
    seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
    if not 0 < seconds <= LONGEST_S:
        raise SettingsError(f"ttl={ttl!r}: give seconds or a timedelta, more than zero and finite")
    return round(seconds * SECOND_US)


def _moment(us: int) -> datetime:
    return datetime.fromtimestamp(us / SECOND_US, UTC)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _again(path: str | os.PathLike[str], ttl: Seconds, clock: Clock | None) -> Intents:
    return Intents(path, ttl=ttl, clock=clock)
