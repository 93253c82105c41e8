"""The statements of an inbox, on the link of somebody's transaction.

A batch is read with one statement and kept with one or two, however large: marks are compared by
their `turn` as they are written, so who was overtaken notices and takes everything back. What
waits is dealt with row by row; there is little of it, or something is wrong anyway.
"""

# The statements are put together from names in this file and `schema`, nothing else.
# ruff: noqa: S608

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from semel.cloudevents import NotAnEventError, from_json, to_json
from semel.messages import Audit, Message, ParkedMessage, ParkedSequence
from semel.stores import inbox_rules as rules
from semel.stores.inbox_rules import Change, Course, Failure, Known, Mark, Parking
from semel.stores.rules import EPOCH, moment
from semel.stores.sql.asking import dense
from semel.stores.sql.dialects import MICROSECOND, Dialect
from semel.stores.sql.links import Link
from semel.stores.sql.rows import (
    NOTHING,
    SEPARATOR,
    original_document,
    original_text,
    shortened,
    stored_document,
    stored_json,
    stored_text,
)
from semel.values import value

T = TypeVar("T")

# Of one statement: what every server takes in one packet, and SQLite in variables.
PIECE = 250
PIECE_CHARS = 1_000_000

# Maximum number of characters of a readable name in its column, and of one with escapes, which
# PostgreSQL needs where its encoding lacks characters. An escape has at most three characters for
# each byte in UTF-8, so a name of 255 bytes is never cut.
NAME_CHARS = 255
ESCAPED_CHARS = 3 * NAME_CHARS


class ChangedError(Exception):
    """Somebody else was faster: what was read is not so any more."""


@value
class Row:
    """A message that waits, as it is stored; `problem` says why it cannot be read, if it cannot."""

    id: int
    parked: ParkedMessage
    problem: str = ""

    @property
    def seq(self) -> int:
        return rules.number_of(self.parked.message)


@value
class Head:
    """The first message of a sequence, and the number of the next one that waits."""

    mark: Mark
    row: Row
    following: int | None


Marks: TypeAlias = Sequence[tuple[bytes, Message, Mark]]

# The clock in a subquery, so that the index is asked for it: see `inspection.POSTGRES_SWEEP`.
DUE = (
    "SELECT sequence FROM event_parked WHERE consumer = ? AND due_at <= (SELECT {now}) "
    "AND slot BETWEEN ? AND ? ORDER BY due_at LIMIT ?"
)


@lru_cache(maxsize=4096)  # the same few, over and over
def name(text: str, codec: str) -> str:
    return shortened(text, NAME_CHARS if codec == "utf-8" else ESCAPED_CHARS, codec)


def _names(message: Message, codec: str) -> Iterator[str]:
    m = message
    return (name(text, codec) for text in (m.tenant, m.topic, m.aggregate_type, m.aggregate_id))


def _marks_of(many: int) -> str:
    return ", ".join("?" * many)


def _rows_of(row: str, many: int) -> str:
    return ", ".join([row] * many)


def _pieces(given: Sequence[T], size: int = PIECE) -> Iterator[Sequence[T]]:
    for start in range(0, len(given), size):
        yield given[start : start + size]


@value
class Asked:
    """What a batch asks for: sequences, messages without a number, baselines by identity."""

    ordered: dict[bytes, bytes]
    alone: dict[bytes, None]
    topics: dict[bytes, str]

    @classmethod
    def of(cls, consumer: str, messages: Iterable[Message]) -> Asked:
        asked = cls({}, {}, {})
        baselines: dict[str, bytes] = {}
        for message in messages:
            id, _ = rules.sequence_of(consumer, message)
            if rules.number_of(message) == 0:
                asked.alone[id] = None
                continue
            topic = message.topic
            if topic not in baselines:
                baselines[topic] = rules.baseline_of(consumer, topic)
            asked.ordered[id] = baselines[topic]
        asked.topics.update({id: topic for topic, id in baselines.items()})
        return asked


MARK = (
    "id",
    "consumer",
    "tenant_id",
    "topic",
    "aggregate_type",
    "aggregate_id",
    "seq",
    "head",
    "turn",
)

MOVED = """
    UPDATE SET seq = excluded.seq, head = excluded.head, turn = excluded.turn,
        updated_at = excluded.updated_at
    WHERE inbox_mark.turn = excluded.turn - 1"""

PARKED = (
    "consumer",
    "sequence",
    "slot",
    "tenant_id",
    "topic",
    "aggregate_type",
    "aggregate_id",
    "seq",
    "event_id",
    "event_type",
    "position",
    "message",
    "state",
    "why",
    "attempts",
    "error",
)

STORED_COLUMNS = ("id", *PARKED, "parked_at", "due_at", "edited")
STORED = ", ".join(f"p.{column}" for column in STORED_COLUMNS)
SEQ = STORED_COLUMNS.index("seq")


class Words:
    """What all databases are told alike."""

    keep_first: ClassVar[str]
    """Behind an INSERT that leaves a row as it is that is there already."""
    add: ClassVar[str]
    """Behind an INSERT into `inbox_started`, to count on in a row that is there already."""

    # --- a batch ----------------------------------------------------------------------------

    async def known(
        self, link: Link, consumer: str, messages: Sequence[Message], idle_s: float | None
    ) -> Known:
        """What is known of the sequences in the batch."""
        raise NotImplementedError

    async def lock(self, link: Link, ids: Iterable[bytes]) -> None:
        """Have these marks to ourselves until the transaction ends, whoever else wants them."""
        for piece in _pieces(sorted(set(ids))):
            select = f"SELECT id FROM inbox_mark WHERE id IN ({_marks_of(len(piece))})"
            await link.fetch(f"{select} ORDER BY id FOR UPDATE", piece)

    async def mark(self, link: Link, consumer: str, marks: Marks) -> None:
        """Write the marks, each by its turn, or raise `ChangedError`."""
        raise NotImplementedError

    async def keep(self, link: Link, course: Course) -> None:
        """Keep what the batch has changed."""
        if marks := sorted(course.marks, key=lambda mark: mark[0]):
            await self.mark(link, course.consumer, marks)
        if course.seen:
            await self.remember(link, course.consumer, course.seen.items())
        if course.parked:
            await self._park(link, course.consumer, course.parked)
        for sequence, seq in sorted(course.woken):
            await self.wake(link, sequence, seq)

    async def remember(
        self, link: Link, consumer: str, seen: Iterable[tuple[bytes, Message]]
    ) -> None:
        """Messages without a number that had their effect. Who comes second violates the key."""
        for piece in _pieces(sorted(seen, key=lambda each: each[0])):
            rows = _rows_of("(?, ?, ?, {now})", len(piece))
            now, codec = link.dialect.now_param(), link.dialect.codec
            values = [
                v
                for id, message in piece
                for v in (id, name(consumer, codec), name(message.id, codec), *now)
            ]
            await link.change(
                f"INSERT INTO inbox_message (id, consumer, event_id, received_at) VALUES {rows}",
                values,
            )

    async def _park(self, link: Link, consumer: str, parked: Sequence[Parking]) -> None:
        for piece in _light_pieces(parked, link.dialect.codec):
            row = f"({_marks_of(len(PARKED))}, {{later}}, {{now}}, 0)"
            columns = f"{', '.join(PARKED)}, due_at, parked_at, edited"
            values = [v for each in piece for v in _parked_values(link.dialect, consumer, *each)]
            await link.change(
                f"INSERT INTO event_parked ({columns}) VALUES {_rows_of(row, len(piece))} "
                + self.keep_first,
                values,
            )

    async def wake(self, link: Link, sequence: bytes, seq: int) -> None:
        """What it waited for is behind us: it may run now."""
        update = (
            "UPDATE event_parked SET why = 'retry', due_at = {now} WHERE sequence = ? AND seq = ?"
        )
        await link.change(update, (*link.dialect.now_param(), sequence, seq))

    # --- one that is run alone --------------------------------------------------------------

    async def begin(self, link: Link, id: bytes, consumer: str, message: Message, by: int) -> int:
        """Count that it is begun, once more by so much; the number of beginnings without end."""
        now, codec = link.dialect.now_param(), link.dialect.codec
        told = (id, name(consumer, codec), name(message.id, codec))
        await link.change(self._begun(), (*told, *now, by))
        rows = await link.fetch("SELECT started FROM inbox_started WHERE id = ?", (id,))
        return int(rows[0][0]) if rows else 1

    def _begun(self) -> str:
        return (
            "INSERT INTO inbox_started (id, consumer, event_id, started, updated_at) "
            f"VALUES (?, ?, ?, 1, {{now}}) {self.add}"
        )

    async def take_back(self, link: Link, id: bytes) -> None:
        """As if it had been begun once less."""
        less = "UPDATE inbox_started SET started = started - 1 WHERE id = ? AND started > 0"
        await link.change(less, (id,))

    async def end(self, link: Link, id: bytes) -> None:
        await link.change("DELETE FROM inbox_started WHERE id = ?", (id,))

    # --- what waits -------------------------------------------------------------------------

    async def due(
        self, link: Link, consumer: str, slots: tuple[int, int], limit: int
    ) -> list[bytes]:
        """The sequences in these slots whose first message is due, the longest overdue first."""
        given = (name(consumer, link.dialect.codec), *link.dialect.now_param(), *slots, limit)
        return [bytes(id) for (id,) in await link.fetch(DUE, given)]

    async def due_row(self, link: Link, sequence: bytes) -> Row | None:
        """The first message of a sequence, if it is due."""
        select = (
            f"SELECT {STORED}, CASE WHEN p.due_at <= {{now}} THEN 1 ELSE 0 END "
            "FROM event_parked AS p WHERE p.sequence = ? ORDER BY p.seq LIMIT 1"
        )
        for *row, is_due in await link.fetch(select, (*link.dialect.now_param(), sequence)):
            if is_due:
                return _row(row, link.dialect)
        return None

    async def head(self, link: Link, sequence: bytes) -> Head | None:
        select = f"SELECT {STORED} FROM event_parked AS p WHERE p.sequence = ? ORDER BY p.seq"
        rows = await link.fetch(f"{select} LIMIT 2", (sequence,))
        if not rows:
            return None
        following = int(rows[1][SEQ]) if len(rows) > 1 else None
        return Head(await self._mark_of(link, sequence), _row(rows[0], link.dialect), following)

    async def _mark_of(self, link: Link, sequence: bytes) -> Mark:
        select = "SELECT seq, head, turn FROM inbox_mark WHERE id = ?"
        rows = await link.fetch(select, (sequence,))
        return _mark(*rows[0]) if rows else Mark()

    async def has_seen(self, link: Link, id: bytes) -> bool:
        return bool(await link.fetch("SELECT 1 FROM inbox_message WHERE id = ?", (id,)))

    async def passed(self, link: Link, consumer: str, head: Head) -> None:
        """The first one is behind us: forget it, and let the next one come."""
        await self._drop(link, head.row)
        if head.row.seq:
            moved = rules.passed(head.mark, head.row.seq, head.following)
            await self._move(link, consumer, head.row.parked, *moved)

    async def _drop(self, link: Link, row: Row) -> None:
        delete = "DELETE FROM event_parked WHERE id = ? AND edited = ?"
        _once(await link.change(delete, (row.id, row.parked.edited)))

    async def _move(
        self, link: Link, consumer: str, parked: ParkedMessage, mark: Mark, woken: int | None
    ) -> None:
        await self.mark(link, consumer, [(parked.sequence, parked.message, mark)])
        if woken is not None:
            await self.wake(link, parked.sequence, woken)
        elif mark.head is not None:
            await self._gap(link, parked.sequence, mark.head)

    async def _gap(self, link: Link, sequence: bytes, seq: int) -> None:
        update = (
            "UPDATE event_parked SET why = 'gap', due_at = NULL "
            "WHERE sequence = ? AND seq = ? AND state = 'waiting'"
        )
        await link.change(update, (sequence, seq))

    async def too_early(self, link: Link, row: Row) -> None:
        """One before it has not come: it waits for that."""
        await self._gap(link, row.parked.sequence, row.seq)

    async def failed(self, link: Link, row: Row, failure: Failure) -> None:
        """It has failed again."""
        update = (
            "UPDATE event_parked SET state = ?, why = ?, attempts = ?, error = ?, "
            "due_at = {later} WHERE id = ? AND edited = ? AND attempts = ?"
        )
        state = "waiting" if failure.why == "retry" else "parked"
        later = link.dialect.later_param(_us(failure.delay_s))
        said = stored_text(failure.error, link.dialect.codec)
        told = (state, failure.why, failure.attempts, said, later)
        as_read = (row.id, row.parked.edited, row.parked.attempts)
        _once(await link.change(update, (*told, *as_read)))

    # --- beginnings and ends ----------------------------------------------------------------

    async def baseline(self, link: Link, consumer: str, topic: str) -> None:
        id = rules.baseline_of(consumer, topic)
        if await link.fetch("SELECT 1 FROM inbox_baseline WHERE id = ?", (id,)):
            return
        insert = "INSERT INTO inbox_baseline (id, consumer, topic, created_at)"
        codec = link.dialect.codec
        values = (id, name(consumer, codec), name(topic, codec), *link.dialect.now_param())
        await link.change(f"{insert} VALUES (?, ?, ?, {{now}})", values)

    async def sweep(self, link: Link, before: int, limit: int) -> int:
        """Delete what is older than so many microseconds; the number of messages forgotten."""
        clock = await self.now_us(link)
        old = link.dialect.stamp(max(0, clock - before))
        await link.change("DELETE FROM inbox_started WHERE updated_at < ?", (old,))
        select = f"SELECT id FROM inbox_message WHERE received_at < ? LIMIT {limit:d}"
        ids = [id for (id,) in await link.fetch(select, (old,))]
        for piece in _pieces(ids):
            marks = _marks_of(len(piece))
            await link.change(f"DELETE FROM inbox_message WHERE id IN ({marks})", piece)
        return len(ids)

    async def now_us(self, link: Link) -> int:
        [(now,)] = await link.fetch("SELECT {now}", link.dialect.now_param())
        return link.dialect.micros(now)

    # --- for people -------------------------------------------------------------------------

    async def sequences(
        self,
        link: Link,
        wanted: Sequence[tuple[str, str]],
        state: Literal["waiting", "parked"] | None,
        limit: int,
        after: bytes | None,
    ) -> list[ParkedSequence]:
        """Those whose columns are as wanted."""
        codec = link.dialect.codec
        asked = [(f"p.{column} = ?", name(text, codec)) for column, text in wanted]
        asked += [] if state is None else [("p.state = ?", state)]
        behind: list[tuple[str, Any]] = [] if after is None else [("p.sequence > ?", after)]
        where = "".join(f" AND {test}" for test, _ in (*asked, *behind))
        select = f"""
            SELECT {STORED}, m.seq,
                (SELECT COUNT(*) FROM event_parked AS q WHERE q.sequence = p.sequence)
            FROM event_parked AS p LEFT JOIN inbox_mark AS m ON m.id = p.sequence
            WHERE (p.seq = 0 OR p.seq = COALESCE(m.head, p.seq)){where}
            ORDER BY p.sequence LIMIT {limit:d}"""
        values = [given for _, given in (*asked, *behind)]
        return [_sequence(row, link.dialect) for row in await link.fetch(dense(select), values)]

    async def waiting(
        self, link: Link, sequence: bytes, limit: int, after: int
    ) -> list[ParkedMessage]:
        select = (
            f"SELECT {STORED} FROM event_parked AS p WHERE p.sequence = ? "
            f"AND (p.seq = 0 OR p.seq > ?) ORDER BY p.seq LIMIT {limit:d}"
        )
        rows = await link.fetch(select, (sequence, after))
        return [_row(row, link.dialect).parked for row in rows]

    async def chosen(self, link: Link, sequence: bytes, event_id: str) -> Row | None:
        select = f"SELECT {STORED} FROM event_parked AS p WHERE p.sequence = ? AND p.event_id = ?"
        rows = await link.fetch(select, (sequence, name(event_id, link.dialect.codec)))
        return _row(rows[0], link.dialect) if rows else None

    async def make(self, link: Link, change: Change, row: Row) -> None:
        """What a settlement changes."""
        parked = row.parked
        if change.keep is not None:
            await self._replace(link, row, change.keep)
        if change.drop:
            await self._drop(link, row)
        if change.seen and not await self.has_seen(link, parked.sequence):
            await self.remember(link, parked.consumer, [(parked.sequence, parked.message)])
        if change.mark is not None:
            await self._move(link, parked.consumer, parked, change.mark, change.woken)

    async def _replace(self, link: Link, row: Row, keep: ParkedMessage) -> None:
        update = (
            "UPDATE event_parked SET message = ?, state = ?, why = ?, attempts = ?, due_at = ?, "
            "edited = ? WHERE id = ? AND edited = ? AND attempts = ?"
        )
        due = None if keep.due_at is None else link.dialect.stamp(_micros(keep.due_at))
        document = stored_document(to_json(keep.message), link.dialect.codec)
        told = (document, keep.state, keep.why, keep.attempts, due, keep.edited)
        as_read = (row.id, row.parked.edited, row.parked.attempts)
        _once(await link.change(update, (*told, *as_read)))

    async def write_audit(self, link: Link, audit: Audit) -> None:
        insert = (
            "INSERT INTO event_parked_audit (settled_at, who, verb, consumer, sequence, event_id, "
            f"note, payload_before, payload_after) VALUES ({{now}}, {_marks_of(8)})"
        )
        a = audit
        codec = link.dialect.codec
        who, consumer, event_id = (name(text, codec) for text in (a.who, a.consumer, a.event_id))
        told = (who, a.verb, consumer, a.sequence, event_id, stored_text(a.note, codec))
        payloads = [
            None if text is None else stored_json(text, codec) for text in (a.before, a.after)
        ]
        await link.change(insert, (*link.dialect.now_param(), *told, *payloads))

    async def audit(self, link: Link, sequence: bytes | None, limit: int) -> list[Audit]:
        where, values = ("", ()) if sequence is None else ("WHERE sequence = ?", (sequence,))
        select = (
            "SELECT settled_at, who, verb, consumer, sequence, event_id, note, payload_before, "
            f"payload_after FROM event_parked_audit {where} ORDER BY id DESC LIMIT {limit:d}"
        )
        return [_audit(row, link.dialect) for row in await link.fetch(select, values)]


def _once(matched: int) -> None:
    if matched != 1:
        raise ChangedError


# --- rows ---------------------------------------------------------------------------------------

Document: TypeAlias = tuple[Parking, str]


def _light_pieces(parked: Sequence[Parking], codec: str) -> Iterator[Sequence[Document]]:
    """Each with its document, in pieces that fit into one statement."""
    piece: list[Document] = []
    size = 0
    for parking in parked:
        document = stored_document(to_json(parking.message), codec)
        size += len(document)
        if piece and (len(piece) == PIECE or size > PIECE_CHARS):
            yield piece
            piece, size = [], len(document)
        piece.append((parking, document))
    yield piece


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1_000_000)


def _micros(at: Any) -> int:
    micros: int = (at - EPOCH) // MICROSECOND
    return micros


def _parked_values(
    dialect: Dialect, consumer: str, parking: Parking, document: str
) -> tuple[Any, ...]:
    p, m, codec = parking, parking.message, dialect.codec
    return (
        name(consumer, codec),
        p.sequence,
        p.slot,
        *_names(m, codec),
        rules.number_of(m),
        name(m.id, codec),
        name(m.type, codec),
        m.position,
        document,
        p.state,
        p.why,
        p.attempts,
        stored_text(p.error, codec),
        dialect.later_param(_us(p.delay_s)),
        *dialect.now_param(),
    )


def _mark_values(
    codec: str, consumer: str, sequence: bytes, message: Message, mark: Mark
) -> tuple[Any, ...]:
    names = (name(consumer, codec), *_names(message, codec))
    return (sequence, *names, mark.seq, mark.head, mark.turn)


def _mark(seq: Any, head: Any, turn: Any) -> Mark:
    return Mark(int(seq), None if head is None else int(head), int(turn))


def _row(stored: Sequence[Any], dialect: Dialect) -> Row:
    v: dict[str, Any] = dict(zip(STORED_COLUMNS, stored, strict=True))
    parked_at, due_at = moment(dialect.micros(v["parked_at"])), v["due_at"]
    message, problem = _message(v, parked_at)
    parked = ParkedMessage(
        bytes(v["sequence"]),
        original_text(v["consumer"]),
        message,
        v["state"],
        v["why"],
        int(v["attempts"]),
        original_text(v["error"]),
        parked_at,
        None if due_at is None else moment(dialect.micros(due_at)),
        int(v["edited"]),
    )
    return Row(int(v["id"]), parked, problem)


def _message(stored: Mapping[str, Any], parked_at: datetime) -> tuple[Message, str]:
    """The message; or, of one that somebody has spoilt by hand, what its columns say."""
    v = stored
    try:
        return from_json(original_document(v["message"])), ""
    except NotAnEventError as error:
        problem = f"table event_parked, id {v['id']}: the message cannot be read: {error}"
    told = Message(
        position=int(v["position"]),
        id=original_text(v["event_id"]),
        type=original_text(v["event_type"]),
        topic=original_text(v["topic"]),
        tenant=original_text(v["tenant_id"]),
        aggregate_type=original_text(v["aggregate_type"]),
        aggregate_id=original_text(v["aggregate_id"]),
        seq=int(v["seq"]) or None,
        payload=json.dumps(v["message"]),
        time=parked_at,
    )
    return told, problem


def _sequence(stored: Sequence[Any], dialect: Dialect) -> ParkedSequence:
    *row, mark, waiting = stored
    head = _row(row, dialect)
    return ParkedSequence(head.parked, int(waiting) - 1, int(mark or 0) if head.seq else None)


def _audit(stored: Sequence[Any], dialect: Dialect) -> Audit:
    settled_at, who, verb, consumer, sequence, event_id, note, before, after = stored
    names = (original_text(who), verb, original_text(consumer), bytes(sequence))
    told = (original_text(event_id), original_text(note))
    return Audit(moment(dialect.micros(settled_at)), *names, *told, before, after)


# --- PostgreSQL ---------------------------------------------------------------------------------

_ARRAY = "string_to_array(?::text, chr(31), chr(30))"


def _columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Columns, each sent as one text: every driver can, and no length is in the SQL."""
    return [
        SEPARATOR.join([NOTHING if v is None else str(v) for v in column])
        for column in zip(*rows, strict=True)
    ]


class PostgresWords(Words):
    """One statement to read, one to write.

    Each row is looked up by a subquery of its own, which uses the index whatever the planner
    believes about a table that was empty a minute ago.
    """

    keep_first = "ON CONFLICT (sequence, seq) DO NOTHING"
    add = (
        "ON CONFLICT (id) DO UPDATE SET started = inbox_started.started + ?::int, "
        "updated_at = excluded.updated_at"
    )

    LIMIT = "SELECT 0, length(set_config('idle_in_transaction_session_timeout', ?::text, true)), "
    LIMIT += "NULL, NULL, NULL"

    KNOWN = dense("""
        SELECT u.n::int4, m.seq, m.head, m.turn, CASE WHEN m.turn IS NULL THEN
            (SELECT 1 FROM inbox_baseline AS b WHERE b.id = decode(u.topic, 'hex')) END
        FROM unnest(string_to_array(?::text, ','), string_to_array(?::text, ','))
            WITH ORDINALITY AS u (id, topic, n)
        LEFT JOIN LATERAL (SELECT k.seq, k.head, k.turn FROM inbox_mark AS k
            WHERE k.id = decode(u.id, 'hex') LIMIT 1) AS m ON true""")

    ALONE = dense("""
        SELECT -u.n::int4, (SELECT 1 FROM inbox_message AS k WHERE k.id = decode(u.id, 'hex')),
            (SELECT 1 FROM event_parked AS p WHERE p.sequence = decode(u.id, 'hex') LIMIT 1),
            NULL, NULL
        FROM unnest(string_to_array(?::text, ',')) WITH ORDINALITY AS u (id, n)""")

    MARK = dense(f"""
        INSERT INTO inbox_mark ({", ".join(MARK)}, updated_at)
        SELECT decode(u.id, 'hex'), u.consumer, COALESCE(u.tenant_id, ''), COALESCE(u.topic, ''),
            COALESCE(u.aggregate_type, ''), COALESCE(u.aggregate_id, ''), u.seq::int8,
            u.head::int8, u.turn::int8, clock_timestamp()
        FROM unnest({", ".join([_ARRAY] * len(MARK))})
            WITH ORDINALITY AS u ({", ".join(MARK)}, n)
        ORDER BY u.n
        ON CONFLICT (id) DO {MOVED}""")

    async def known(
        self, link: Link, consumer: str, messages: Sequence[Message], idle_s: float | None
    ) -> Known:
        asked = Asked.of(consumer, messages)
        ordered, alone = list(asked.ordered), list(asked.alone)
        statements, values = [], []
        if idle_s is not None:
            statements, values = [self.LIMIT], [str(round(idle_s * 1000))]
        if ordered:
            statements.append(self.KNOWN)
            values += [_hex(ordered), _hex(asked.ordered.values())]
        if alone:
            statements.append(self.ALONE)
            values.append(_hex(alone))
        rows = await link.fetch(" UNION ALL ".join(statements), values)
        found = [(n, row) for n, *row in rows if n]
        begun = {asked.ordered[ordered[n - 1]] for n, row in found if n > 0 and row[3]}
        return Known(
            {ordered[n - 1]: _mark(*row[:3]) for n, row in found if n > 0 and row[2] is not None},
            {alone[-n - 1] for n, row in found if n < 0 and row[0]},
            {alone[-n - 1] for n, row in found if n < 0 and row[1]},
            {asked.topics[id] for id in begun},
        )

    async def begin(self, link: Link, id: bytes, consumer: str, message: Message, by: int) -> int:
        codec = link.dialect.codec
        values = (id, name(consumer, codec), name(message.id, codec), by)
        [(started,)] = await link.fetch(f"{self._begun()} RETURNING started", values)
        return int(started)

    async def mark(self, link: Link, consumer: str, marks: Marks) -> None:
        rows = [_mark_values(link.dialect.codec, consumer, *each) for each in marks]
        sent = _columns([(id.hex(), *more) for id, *more in rows])
        if await link.change(self.MARK, sent) != len(marks):
            raise ChangedError


def _hex(ids: Iterable[bytes]) -> str:
    return ",".join([id.hex() for id in ids])


# --- MariaDB, MySQL, SQLite ---------------------------------------------------------------------


class PlainWords(Words):
    """Lists of values, in pieces."""

    async def known(
        self, link: Link, consumer: str, messages: Sequence[Message], idle_s: float | None
    ) -> Known:
        asked = Asked.of(consumer, messages)
        marks: dict[bytes, Mark] = {}
        seen: set[bytes] = set()
        waits: set[bytes] = set()
        begun: set[str] = set()
        for kind, id, *mark in await self._look_up(link, asked):
            match kind:
                case 1:
                    marks[bytes(id)] = _mark(*mark)
                case 2:
                    begun.add(asked.topics[bytes(id)])
                case 3:
                    seen.add(bytes(id))
                case _:
                    waits.add(bytes(id))
        return Known(marks, seen, waits, begun)

    async def _look_up(self, link: Link, asked: Asked) -> list[Any]:
        kinds: list[tuple[str, Sequence[bytes]]] = [
            ("SELECT 1, id, seq, head, turn FROM inbox_mark WHERE id", list(asked.ordered)),
            ("SELECT 2, id, 0, 0, 0 FROM inbox_baseline WHERE id", list(asked.topics)),
            ("SELECT 3, id, 0, 0, 0 FROM inbox_message WHERE id", list(asked.alone)),
            ("SELECT 4, sequence, 0, 0, 0 FROM event_parked WHERE sequence", list(asked.alone)),
        ]
        rows: list[Any] = []
        for start in range(0, max(len(asked.ordered), len(asked.alone)), PIECE):
            pieces = [(select, ids[start : start + PIECE]) for select, ids in kinds]
            pieces = [(select, ids) for select, ids in pieces if ids]
            said = [f"{select} IN ({_marks_of(len(ids))})" for select, ids in pieces]
            values = [id for _, ids in pieces for id in ids]
            rows += await link.fetch(" UNION ALL ".join(said), values)
        return rows


class SQLiteWords(PlainWords):
    """Whoever writes is alone."""

    keep_first = "ON CONFLICT (sequence, seq) DO NOTHING"
    add = (
        "ON CONFLICT (id) DO UPDATE SET started = inbox_started.started + ?, "
        "updated_at = excluded.updated_at"
    )

    async def lock(self, link: Link, ids: Iterable[bytes]) -> None:
        pass

    async def mark(self, link: Link, consumer: str, marks: Marks) -> None:
        insert = f"INSERT INTO inbox_mark ({', '.join(MARK)}, updated_at) VALUES"
        for piece in _pieces(marks):
            rows = _rows_of(f"({_marks_of(len(MARK))}, {{now}})", len(piece))
            now = link.dialect.now_param()
            values = [
                v
                for each in piece
                for v in (*_mark_values(link.dialect.codec, consumer, *each), *now)
            ]
            moved = f"{insert} {rows} ON CONFLICT (id) DO {MOVED}"
            if await link.change(moved, values) != len(piece):
                raise ChangedError


class MySQLWords(PlainWords):
    """A row that is there is told from one that is not: its counts of rows would not tell."""

    keep_first = "ON DUPLICATE KEY UPDATE edited = edited"
    add = "ON DUPLICATE KEY UPDATE started = started + ?, updated_at = VALUES(updated_at)"

    async def mark(self, link: Link, consumer: str, marks: Marks) -> None:
        for piece in _pieces([each for each in marks if each[2].turn > 1]):
            await self._update(link, piece)
        for piece in _pieces([each for each in marks if each[2].turn == 1]):
            rows = _rows_of(f"({_marks_of(len(MARK))}, {{now}})", len(piece))
            insert = f"INSERT INTO inbox_mark ({', '.join(MARK)}, updated_at) VALUES {rows}"
            await link.change(
                insert,
                [v for each in piece for v in _mark_values(link.dialect.codec, consumer, *each)],
            )

    async def _update(self, link: Link, marks: Marks) -> None:
        by_id = f"CASE id {' '.join(['WHEN ? THEN ?'] * len(marks))} END"
        update = (
            f"UPDATE inbox_mark SET seq = {by_id}, head = {by_id}, turn = turn + 1, "
            f"updated_at = {{now}} WHERE id IN ({_marks_of(len(marks))}) AND turn = {by_id}"
        )
        seqs = [v for id, _, mark in marks for v in (id, mark.seq)]
        heads = [v for id, _, mark in marks for v in (id, mark.head)]
        turns = [v for id, _, mark in marks for v in (id, mark.turn - 1)]
        ids = [id for id, _, _ in marks]
        if await link.change(update, [*seqs, *heads, *ids, *turns]) != len(marks):
            raise ChangedError


WORDS: dict[str, Words] = {
    "postgresql": PostgresWords(),
    "mysql": MySQLWords(),
    "sqlite": SQLiteWords(),
}
