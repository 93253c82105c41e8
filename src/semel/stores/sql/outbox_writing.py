"""The rows of an outbox, written in the caller's transaction just before its COMMIT.

In this order: ids that were given are looked up; the aggregates' counters are moved, sorted, so
that two transactions never wait for each other; on PostgreSQL the watermark's lock is taken; the
rows are put. The counter's row lock makes the order of numbers the order of commits, and a
rollback takes numbers back with the rows, so an aggregate's numbers have no gaps.

The easy mistake is to number an event that is then not put, because its id turns out to be there
already: its number would be missing for ever. Such a turn is taken back as a whole, and made
again without that event.

Statements, however many events: PostgreSQL two (one for an event that is alone), and one more to
look up given ids. MariaDB, MySQL and SQLite three (the counters are moved, then read), and one
more; a statement has at most `PIECE` rows and `PIECE_CHARS` characters of payload there.
"""

# The statements are put together from names in this file and `schema`, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, TypeAlias

from sqlalchemy import exc

from semel.errors import IdempotencyConflictError, StoreUnavailableError
from semel.keys import identity
from semel.stores.sql.asking import dense
from semel.stores.sql.faults import Fault, fault_of
from semel.stores.sql.links import Link
from semel.stores.sql.outbox_watermark import LOCKED
from semel.stores.sql.rows import NOTHING, SEPARATOR, stored_json, stored_name
from semel.stores.sql.schema import ID_SEQUENCE
from semel.values import value

# Of one statement: what every server takes in one packet, and SQLite in variables.
PIECE = 500
PIECE_CHARS = 1_000_000

# What readers on PostgreSQL LISTEN to.
CHANNEL = "semel_outbox"


@value
class Entry:
    """An event as it is stored.

    `counter` is the identity of its numbering, a hash of tenant, topic and aggregate, whose first
    byte is the shard. `given`: the id is the application's, so the event may be there already.
    `notify`: readers elsewhere are to be told.
    """

    counter: bytes
    tenant_id: str
    topic: str
    aggregate_type: str
    aggregate_id: str
    event_id: str
    event_type: str
    payload: str
    headers: str | None = None
    ordered: bool = True
    given: bool = False
    notify: bool = False


def counter_of(tenant: str, topic: str, aggregate_type: str, aggregate_id: str) -> bytes:
    """The identity of an aggregate's numbering; its first byte is the slot."""
    parts = (topic.encode(), aggregate_type.encode(), aggregate_id.encode())
    return identity(tenant, *parts)


Numbered: TypeAlias = tuple[Entry, int | None]
Found: TypeAlias = Mapping[str, Sequence[Any]]


async def write(link: Link, entries: Sequence[Entry]) -> None:
    """Put the events: each once, numbered within its aggregate in the order they were added."""
    words, codec = WORDS[link.dialect.name], link.dialect.codec
    if codec != "utf-8":
        entries = [_in_encoding(entry, codec) for entry in entries]
    if len(entries) == 1 and not entries[0].given and await words.put_alone(link, entries[0]):
        return
    fresh, refusal = _once_each(entries), None
    while fresh:
        given = [entry.event_id for entry in fresh if entry.given]
        found = await words.find(link, given, again=refusal is not None) if given else {}
        if refusal is not None and not found:
            raise refusal  # it was not one of their ids that was in the way
        fresh = _without(fresh, found)
        refusal = await _turn(words, link, fresh) if fresh else None
        if refusal is None:
            return


def _in_encoding(entry: Entry, codec: str) -> Entry:
    """The same event in characters that the database's encoding has."""
    return replace(
        entry,
        tenant_id=stored_name(entry.tenant_id, codec),
        topic=stored_name(entry.topic, codec),
        aggregate_type=stored_name(entry.aggregate_type, codec),
        aggregate_id=stored_name(entry.aggregate_id, codec),
        event_id=stored_name(entry.event_id, codec),
        event_type=stored_name(entry.event_type, codec),
        payload=stored_json(entry.payload, codec),
        headers=None if entry.headers is None else stored_json(entry.headers, codec),
    )


async def _turn(words: Words, link: Link, fresh: Sequence[Entry]) -> Exception | None:
    """Number and put them; or change nothing, and say why not."""
    counts = _counts(fresh)
    last = await words.count(link, counts, notify=any(entry.notify for entry in fresh))
    refusal = await words.put(link, _in_safe_order(_numbered(fresh, counts, last)))
    if refusal is not None:
        back = [(number, entry.counter) for entry, number in counts]
        await link.change_each("UPDATE event_outbox_seq SET seq = seq - ? WHERE id = ?", back)
    return refusal


# --- events that are there already --------------------------------------------------------------


def _once_each(entries: Iterable[Entry]) -> list[Entry]:
    """Without the repeats within one transaction."""
    fresh: dict[str, Entry] = {}
    for entry in entries:
        first = fresh.setdefault(entry.event_id, entry)
        if first is not entry and not _same(entry, _content(first)):
            raise _conflict(entry)
    return list(fresh.values())


def _without(entries: Sequence[Entry], found: Found) -> list[Entry]:
    for entry in entries:
        if entry.event_id in found and not _same(entry, found[entry.event_id]):
            raise _conflict(entry)
    return [entry for entry in entries if entry.event_id not in found]


CONTENT = ("tenant_id", "topic", "aggregate_type", "aggregate_id", "event_type", "payload")


def _content(entry: Entry) -> Sequence[Any]:
    return [*(getattr(entry, name) for name in CONTENT), entry.ordered]


def _same(entry: Entry, stored: Sequence[Any]) -> bool:
    """Is this the event that is stored? Headers may differ: a retry has a trace of its own."""
    *names, payload, ordered = stored
    *own_names, own_payload, own_ordered = _content(entry)
    if list(names) != own_names or bool(ordered) != own_ordered:
        return False
    return bool(payload == own_payload or _read(payload) == _read(own_payload))


def _read(payload: str) -> Any:
    """JSON without its layout and the order of its members; numbers as they were written."""
    return json.loads(payload, parse_int=_digits, parse_float=_digits)


def _digits(number: str) -> tuple[str]:
    """Equal to no text, and to no truth value."""
    return (number,)


def _conflict(entry: Entry) -> IdempotencyConflictError:
    return IdempotencyConflictError(
        f"event {entry.event_id!r} is in the outbox with another content, so this one was not "
        "added and the transaction was rolled back; give a new event an id of its own, or none",
        key=entry.event_id,
    )


# --- numbers ------------------------------------------------------------------------------------

Counts: TypeAlias = Sequence[tuple[Entry, int]]


def _counts(entries: Iterable[Entry]) -> Counts:
    """For each ordered aggregate one of its events and their number, sorted by counter."""
    ordered = [entry for entry in entries if entry.ordered]
    many = Counter(entry.counter for entry in ordered)
    one = {entry.counter: entry for entry in ordered}
    return [(one[counter], many[counter]) for counter in sorted(many)]


def _numbered(
    entries: Iterable[Entry], counts: Counts, last: Mapping[bytes, int]
) -> Iterator[Numbered]:
    following = {entry.counter: last[entry.counter] - many for entry, many in counts}
    for entry in entries:
        if entry.ordered:
            following[entry.counter] += 1
        yield entry, following[entry.counter] if entry.ordered else None


def _in_safe_order(rows: Iterable[Numbered]) -> list[Numbered]:
    """As they were added; but unordered ids of the application's own by id, at the end.

    Whoever puts an id that another transaction has put waits for that one. No counter's lock sees
    to the order in which these come, so two of them could wait for each other.
    """
    return sorted(rows, key=lambda row: row[0].event_id if row[0].given and not row[1] else "")


# --- words --------------------------------------------------------------------------------------

ROW = (
    "shard",
    "tenant_id",
    "topic",
    "aggregate_type",
    "aggregate_id",
    "seq",
    "event_id",
    "event_type",
    "payload",
    "headers",
)
COUNTER = ("id", "tenant_id", "topic", "aggregate_type", "aggregate_id", "seq")

SELECT = f"SELECT event_id, {', '.join(CONTENT)}, seq IS NOT NULL FROM event_outbox"


def _row(entry: Entry, number: int | None) -> tuple[Any, ...]:
    return (
        entry.counter[0],
        entry.tenant_id,
        entry.topic,
        entry.aggregate_type,
        entry.aggregate_id,
        number,
        entry.event_id,
        entry.event_type,
        entry.payload,
        entry.headers,
    )


def _counter(entry: Entry, many: int) -> tuple[Any, ...]:
    named = (entry.tenant_id, entry.topic, entry.aggregate_type, entry.aggregate_id)
    return (entry.counter, *named, many)


class Words(Protocol):
    """How one database is told."""

    async def find(self, link: Link, ids: Sequence[str], *, again: bool) -> Found:
        """The contents of the events with these ids that are there.

        `again`: one of them is there that an earlier look did not see.
        """
        ...

    async def count(self, link: Link, counts: Counts, *, notify: bool) -> Mapping[bytes, int]:
        """Move the counters, one after another, and return where they are now."""
        ...

    async def put(self, link: Link, rows: Sequence[Numbered]) -> Exception | None:
        """Insert the rows; or none of them, and say why, when a given id is there already."""
        ...

    async def put_alone(self, link: Link, entry: Entry) -> bool:
        """Number and insert one event whose id is ours; False where there is no short way."""
        ...


# --- PostgreSQL ---------------------------------------------------------------------------------


def _given(names: Sequence[str]) -> str:
    """Columns as a table, each sent as one text: every driver can, and no length is in the SQL."""
    arrays = ", ".join("string_to_array(?::text, chr(31), chr(30))" for _ in names)
    return f"unnest({arrays}) WITH ORDINALITY AS u ({', '.join(names)}, n)"


def _columns(rows: Sequence[Sequence[Any]], width: int) -> list[str]:
    columns = zip(*rows, strict=True) if rows else [()] * width
    return [SEPARATOR.join([NOTHING if v is None else str(v) for v in c]) for c in columns]


# One event's names, given once and used for the counter and for the row.
_AGGREGATE = ("id", "tenant_id", "topic", "aggregate_type", "aggregate_id")
NAMES_ALONE = (*_AGGREGATE, "event_id", "event_type", "payload", "headers")

INSERT_ALONE = f"""
INSERT INTO event_outbox (shard, {", ".join(NAMES_ALONE[1:])}, seq, created_at)
SELECT get_byte(e.id, 0), {", ".join(f"e.{name}" for name in NAMES_ALONE[1:])}, {{seq}},
    clock_timestamp()
FROM locked, e"""


@lru_cache
def _telling(statement: str) -> str:
    """The same statement, which has readers told at the commit."""
    lock = dense(LOCKED)
    return statement.replace(lock, f"{lock},pg_notify('{CHANNEL}','')::text")


class PostgresWords:
    """One statement each; the second of a commit takes the lock, the last one the ids.

    An event that is alone, which most are, is counted, locked for and put by one statement.
    """

    # Names are never empty, except a tenant: and a single empty text is no array of one text.
    COUNT = dense(f"""
        WITH counted AS (
            INSERT INTO event_outbox_seq AS c ({", ".join(COUNTER)})
            SELECT decode(u.id, 'hex'), COALESCE(u.tenant_id, ''), u.topic, u.aggregate_type,
                u.aggregate_id, u.seq::int8
            FROM {_given(COUNTER)} ORDER BY u.n
            ON CONFLICT (id) DO UPDATE SET seq = c.seq + excluded.seq
            RETURNING c.id, c.seq
        ), moved AS (SELECT string_agg(seq::text, ',' ORDER BY id) AS seqs FROM counted)
        SELECT moved.seqs, {LOCKED} FROM moved, {ID_SEQUENCE} AS s""")

    PUT = dense(f"""
        INSERT INTO event_outbox ({", ".join(ROW)}, created_at)
        SELECT u.shard::int2, COALESCE(u.tenant_id, ''), u.topic, u.aggregate_type,
            u.aggregate_id, u.seq::int8, u.event_id, u.event_type, u.payload, u.headers,
            clock_timestamp()
        FROM {_given(ROW)} ORDER BY u.n""")

    # Whatever follows from `locked` is worked out behind it, and so is the id that the row takes.
    ALONE = dense(f"""
        WITH e ({", ".join(NAMES_ALONE)}) AS (
            VALUES (decode(?::text, 'hex'){", ?::text" * (len(NAMES_ALONE) - 1)})
        ), counted AS (
            INSERT INTO event_outbox_seq AS c ({", ".join(COUNTER)})
            SELECT {", ".join(f"e.{name}" for name in COUNTER[:-1])}, 1 FROM e
            ON CONFLICT (id) DO UPDATE SET seq = c.seq + 1
            RETURNING c.seq
        ), locked AS MATERIALIZED (
            SELECT counted.seq, {LOCKED} FROM counted, {ID_SEQUENCE} AS s
        ) {INSERT_ALONE.format(seq="locked.seq")}""")

    ALONE_UNORDERED = dense(f"""
        WITH e ({", ".join(NAMES_ALONE)}) AS (
            VALUES (decode(?::text, 'hex'){", ?::text" * (len(NAMES_ALONE) - 1)})
        ), locked AS MATERIALIZED (SELECT {LOCKED} FROM {ID_SEQUENCE} AS s)
        {INSERT_ALONE.format(seq="NULL::int8")}""")

    PUT_GIVEN = f"{PUT} ON CONFLICT (event_id) DO NOTHING RETURNING event_id"

    ANY = "event_id = ANY (string_to_array(?::text, chr(31)))"

    async def find(self, link: Link, ids: Sequence[str], *, again: bool) -> Found:
        rows = await link.fetch(f"{SELECT} WHERE {self.ANY}", [SEPARATOR.join(ids)])
        return {id: content for id, *content in rows}

    async def count(self, link: Link, counts: Counts, *, notify: bool) -> Mapping[bytes, int]:
        rows = [_counter(entry, many) for entry, many in counts]
        named = [(counter.hex(), *more) for counter, *more in rows]
        statement = _telling(self.COUNT) if notify else self.COUNT
        [(seqs, *_)] = await link.fetch(statement, _columns(named, len(COUNTER)))
        last = map(int, seqs.split(",")) if seqs else ()
        return dict(zip([entry.counter for entry, _ in counts], last, strict=True))

    async def put_alone(self, link: Link, entry: Entry) -> bool:
        statement = self.ALONE if entry.ordered else self.ALONE_UNORDERED
        statement = _telling(statement) if entry.notify else statement
        named = (entry.tenant_id, entry.topic, entry.aggregate_type, entry.aggregate_id)
        said = (entry.event_id, entry.event_type, entry.payload, entry.headers)
        await link.change(statement, (entry.counter.hex(), *named, *said))
        return True

    async def put(self, link: Link, rows: Sequence[Numbered]) -> Exception | None:
        sent = _columns([_row(entry, number) for entry, number in rows], len(ROW))
        if not any(entry.given for entry, _ in rows):
            await link.change(self.PUT, sent)
            return None
        done = [id for (id,) in await link.fetch(self.PUT_GIVEN, sent)]
        if len(done) == len(rows):
            return None
        await link.change(f"DELETE FROM event_outbox WHERE {self.ANY}", [SEPARATOR.join(done)])
        return StoreUnavailableError("an event's id is in the outbox and cannot be seen; repeat")


# --- MariaDB, MySQL, SQLite ---------------------------------------------------------------------


def _marks(many: int) -> str:
    return ", ".join("?" * many)


def _pieces(rows: Sequence[Numbered]) -> Iterator[Sequence[Numbered]]:
    """The rows in pieces that fit into one statement."""
    piece: list[Numbered] = []
    size = 0
    for row in rows:
        size += len(row[0].payload)
        if piece and (len(piece) == PIECE or size > PIECE_CHARS):
            yield piece
            piece, size = [], len(row[0].payload)
        piece.append(row)
    yield piece


class PlainWords:
    """Many rows in one statement, and no RETURNING: MySQL has none, nor has an older SQLite."""

    on_conflict: ClassVar[str]
    latest: ClassVar[str] = ""
    """Behind a SELECT that is to see what was committed since the transaction's snapshot."""

    async def find(self, link: Link, ids: Sequence[str], *, again: bool) -> Found:
        found: dict[str, Sequence[Any]] = {}
        for start in range(0, len(ids), PIECE):
            piece = ids[start : start + PIECE]
            select = f"{SELECT} WHERE event_id IN ({_marks(len(piece))})"
            rows = await link.fetch(select + self.latest if again else select, piece)
            found |= {id: content for id, *content in rows}
        return found

    async def count(self, link: Link, counts: Counts, *, notify: bool) -> Mapping[bytes, int]:
        del notify  # only PostgreSQL can
        last: dict[bytes, int] = {}
        for start in range(0, len(counts), PIECE):
            last |= await self._count(link, counts[start : start + PIECE])
        return last

    async def _count(self, link: Link, counts: Counts) -> Mapping[bytes, int]:
        rows = ", ".join([f"({_marks(len(COUNTER))})"] * len(counts))
        insert = f"INSERT INTO event_outbox_seq ({', '.join(COUNTER)}) VALUES {rows}"
        values = [v for entry, many in counts for v in _counter(entry, many)]
        await link.change(f"{insert} {self.on_conflict}", values)
        ids = [entry.counter for entry, _ in counts]
        select = f"SELECT id, seq FROM event_outbox_seq WHERE id IN ({_marks(len(ids))})"
        return {bytes(id): int(seq) for id, seq in await link.fetch(select, ids)}

    async def put(self, link: Link, rows: Sequence[Numbered]) -> Exception | None:
        done: list[str] = []
        for piece in _pieces(rows):
            try:
                await self._put(link, piece)
            except exc.IntegrityError as error:
                if fault_of(error) is not Fault.TAKEN or not any(e.given for e, _ in rows):
                    raise
                await self._take_back(link, done)
                return error
            done += [entry.event_id for entry, _ in piece]
        return None

    async def put_alone(self, link: Link, entry: Entry) -> bool:
        return False

    async def _put(self, link: Link, piece: Sequence[Numbered]) -> None:
        rows = ", ".join([f"({_marks(len(ROW))}, {{now}})"] * len(piece))
        now = link.dialect.now_param()
        values = [v for entry, number in piece for v in (*_row(entry, number), *now)]
        insert = f"INSERT INTO event_outbox ({', '.join(ROW)}, created_at) VALUES {rows}"
        await link.change(insert, values)

    async def _take_back(self, link: Link, ids: Sequence[str]) -> None:
        """The pieces before the one that failed, which took itself back."""
        for start in range(0, len(ids), PIECE):
            piece = ids[start : start + PIECE]
            delete = f"DELETE FROM event_outbox WHERE event_id IN ({_marks(len(piece))})"
            await link.change(delete, piece)


class MySQLWords(PlainWords):
    """The row that was in the way is newer than the snapshot, so it takes a locking read."""

    on_conflict = "ON DUPLICATE KEY UPDATE seq = seq + VALUES(seq)"
    latest = " LOCK IN SHARE MODE"


class SQLiteWords(PlainWords):
    """Whoever writes is alone."""

    on_conflict = "ON CONFLICT (id) DO UPDATE SET seq = seq + excluded.seq"


WORDS: Mapping[str, Words] = {
    "postgresql": PostgresWords(),
    "mysql": MySQLWords(),
    "sqlite": SQLiteWords(),
}
