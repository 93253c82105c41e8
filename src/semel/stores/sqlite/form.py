"""A record as a row of the table, and what it takes to notice a flipped bit."""

from __future__ import annotations

import json
import marshal
import sqlite3
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final, TypeAlias
from zlib import crc32

from semel.errors import CorruptRecordError
from semel.stores import rules
from semel.stores.rules import Row
from semel.stores.sqlite.schema import COLUMNS, FLOOR, INSERT, REPLAYED, UPDATE
from semel.values import Key, Outcome, State

Values: TypeAlias = tuple[Any, ...]

COMPLETED: Final = State.COMPLETED.value


def ghost(connection: sqlite3.Connection, key: Key) -> Row:
    (floor,) = connection.execute(FLOOR).fetchone()
    return rules.ghost(key, floor)


def _rowid(id: bytes) -> int:
    return int.from_bytes(id[:8], "big", signed=True)


def put(connection: sqlite3.Connection, row: Row, *, new: bool) -> None:
    values = _values(row)
    id, *rest = values
    sums = checksum(values), _seal(values)
    if not new:
        connection.execute(UPDATE, (*rest, *sums, id))
        return
    try:
        connection.execute(INSERT, (*values, *sums, _rowid(id)))
    except sqlite3.IntegrityError as error:
        # We have just looked, under the write lock: the table has it, the index has lost it.
        raise corrupt(id, "the file is damaged") from error


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


def row_of(values: Values) -> Row:
    if values[-1] != checksum(values[:-1]):
        raise corrupt(values[0], "its checksum does not match its content")
    (
        id, text, tenant, operation, fingerprint, state, attempt, fence, number, hold,
        created_us, started_us, lease_us, completed_us, expires_us,
        kind, data, status, error, steps, past, _,
    ) = values  # fmt: skip
    return Row(
        Key(id, text_of(text), text_of(tenant), text_of(operation)),
        fingerprint,
        text_of(attempt),
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
        None if error is None else text_of(error),
        {} if steps is None else _steps_of(steps),
        past,
    )


def checksum(values: Values, id: bytes = b"") -> int:
    # marshal 2 is a fixed, flat encoding of these types, and the fastest one there is.
    return crc32(marshal.dumps(values, 2), crc32(id))


_replayed = itemgetter(*map(COLUMNS.index, REPLAYED))


def _seal(values: Values) -> int | None:
    """The checksum of what a replay reads; None where there is nothing to replay."""
    replayed = _replayed(values)
    return checksum(replayed, values[0]) if replayed[0] == COMPLETED else None


def _text(text: str) -> str | bytes:
    """SQLite's text is UTF-8; a lone surrogate is not, and is kept as bytes."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def text_of(stored: str | bytes) -> str:
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


def corrupt(id: Any, what: str) -> CorruptRecordError:
    name = id.hex() if isinstance(id, bytes) else repr(id)
    return CorruptRecordError(
        f"record {name} cannot be read: {what}. Nothing was run. Restore the file from a backup, "
        f"or forget the record if the effect may happen again"
    )
