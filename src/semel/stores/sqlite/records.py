"""The verbs over the table, blocking."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, Final

from semel.errors import CorruptRecordError, SettingsError
from semel.ports import Clock
from semel.stores import rules
from semel.stores.rules import Claiming, Operation, Row
from semel.stores.sqlite.connections import MEMORY, Connections
from semel.stores.sqlite.form import (
    COMPLETED,
    Values,
    checksum,
    corrupt,
    ghost,
    put,
    row_of,
    text_of,
)
from semel.stores.sqlite.schema import (
    COLUMNS,
    DELETE,
    DELETE_EXPIRED,
    PAGE,
    RAISE_FLOOR,
    REPLAY,
    SELECT,
    VERSION,
    create,
    guarantees_of,
    refuse_foreign,
    user_version,
    wal,
)
from semel.values import Answer, Done, Guarantees, Key, Mismatch, Outcome, Record, State

# Records deleted in one transaction: a sweep must not keep writers waiting.
SWEEP_CHUNK: Final = 200


class Rows:
    """The verbs over the table, blocking."""

    def __init__(self, connections: Connections, clock: Clock) -> None:
        self._connections = connections
        self._clock = clock

    def prepare(self) -> None:
        """Make or check the schema. A file that says it has one is never given an empty one."""
        path = self._connections.path
        version = self._connections.read(user_version)
        self._connections.read(lambda c: refuse_foreign(c, path))
        if version > VERSION:
            raise SettingsError(
                f"{path} has user_version {version}, this version of Semel knows "
                f"{VERSION}; upgrade Semel, or give SQLiteStore a file of its own"
            )
        self._connections.read(wal)
        if version < VERSION:
            self._connections.write(create)
        self._connections.read(lambda c: c.execute(SELECT, (b"",)).fetchone())

    def glance(self, key: Key) -> Values | None:
        """What a replay needs of the record, if there is one."""
        return self._connections.select(REPLAY, (key.id,))

    def replay(self, found: Values, key: Key, fingerprint: bytes) -> Answer | None:
        """The answer from a finished record, by the rules of `rules.claim`; None without one."""
        state, operation, request_hash, expires_us, fence, kind, data, status, seal = found
        if state != COMPLETED:
            return None
        if seal != checksum(found[:-1], key.id):
            raise corrupt(key.id, "its checksum does not match its content")
        if expires_us is not None and expires_us <= self._clock.now_us():
            return None
        if operation != key.operation and text_of(operation) != key.operation:
            return Mismatch("operation")
        if request_hash != fingerprint:
            return Mismatch("fingerprint")
        return Done(Outcome(kind, data, status), fence)

    def refuse(self, op: Claiming) -> Answer | None:
        """The answer, if nothing has to change for it: a poll takes no write lock.

        Also checks the file. Processes that open the new file cannot end a claim in a deleted one,
        so a poll of such a claim would wait in vain.
        """
        found = self._connections.read(lambda c: c.execute(SELECT, (op.key.id,)).fetchone())
        if found is None:
            return None
        answer, changed = rules.claim(row_of(found), op, self._clock.now_us())
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
        row = ghost(connection, key) if found is None else row_of(found)
        answer, changed = rules.apply(row, op, self._clock.now_us())
        if changed is not None:
            put(connection, changed, new=found is None)
        return answer

    def look(self, id: bytes) -> Record | None:
        values = self._connections.select(SELECT, (id,))
        now_us = self._clock.now_us()
        if values is None or rules.expired(row := row_of(values), now_us):
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
            yield from map(row_of, page)
            after = page[-1][0]

    def resolve(self, id: bytes, fence: int, outcome: Outcome | None, ttl_s: float | None) -> bool:
        def settle(connection: sqlite3.Connection) -> bool:
            found = connection.execute(SELECT, (id,)).fetchone()
            row = None if found is None else row_of(found)
            settled = rules.resolve(row, fence, outcome, ttl_s, self._clock.now_us())
            if settled is not None:
                put(connection, settled, new=False)
            return settled is not None

        return self._connections.write(settle)

    def forget(self, id: bytes, force: bool) -> bool:
        """Also the way out of a corrupt record: with `force` it is deleted unread."""

        def delete(connection: sqlite3.Connection) -> bool:
            now_us = self._clock.now_us()
            found = connection.execute(SELECT, (id,)).fetchone()
            if found is None or not (force or rules.forgettable(row_of(found), force, now_us)):
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
        return self._connections.read(guarantees_of)
