"""What appending and reading mean, for every log. Pure.

`decide` is told what a stream's row, the id's mark, the producer's fences and the field's rank say,
and answers what the append is told, and what is to be written in the same transaction. The scripts
in `lua/log` state the same next to the data.

The easy mistake is to check the id last. A producer whose reply was lost asks again when its
stream has moved on, has ended, or has another producer: it must hear what became of its entry, and
not what would become of it now.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

from semel.entries import (
    MOST_NUMBER,
    TAG_DIGITS,
    Answer,
    Appended,
    Ended,
    Entry,
    Fenced,
    Field,
    Full,
    Keep,
    Life,
    Mismatch,
    Page,
    Position,
    Repeated,
    StateChange,
    VersionConflict,
    beginning,
)
from semel.errors import SettingsError
from semel.ports import KEEP, Answering
from semel.values import value

# Names of streams, ids, fields and fences: enough for anybody's, and an index takes them.
MOST_BYTES = 255

# Entries that one append trims, where more than `keep.entries` are there: an append stays short.
TRIMS_PER_APPEND = 16

# Marks of ids that one append forgets: it adds one, so memory shrinks back to what is needed.
FORGETS_PER_APPEND = 4

# Streams that nobody can read any more, deleted with every new stream.
SWEEPS_PER_STREAM = 2


@value
class Append:
    """An append, ready for a store. `mark` is made from id and fingerprint: 40 hex digits.

    `rising` are those of the fences that must grow with each append. `seal` is what else the
    entry's position is made from: nothing, or 40 hex digits.
    """

    stream: str
    data: bytes | None
    id: str
    mark: str
    fences: Mapping[str, int]
    rising: frozenset[str]
    expect: int | Position | None
    state: StateChange | None
    reply: bytes
    ends: bool
    keep: Keep
    seal: str = ""


@value
class Row:
    """What a log knows of a stream besides its entries.

    `floor` is the last position that was trimmed. Entries and state are gone from `gone_us` on,
    everything from `until_us` on; None is never.
    """

    head: Position
    floor: Position
    ended: bool = False
    gone_us: int | None = None
    until_us: int | None = None


@value
class Mark:
    """What became of an id. It may be forgotten from `until_us` on, if its entry has gone."""

    mark: str
    position: Position
    reply: bytes
    until_us: int


@value
class Seen:
    """What the store holds of the stream, id, fences and field that an append names."""

    row: Row | None = None
    mark: Mark | None = None
    fences: Mapping[str, int] = field(default_factory=dict[str, int])
    rank: int | None = None


@value
class Change:
    """What to write. `anew`: whatever is there of an earlier stream of that name goes first.

    `state` is None when it stays as it is. `trim_to`: forget entries up to this offset, and say so
    in the row.
    """

    row: Row
    mark: Mark
    entry: Entry | None
    fences: Mapping[str, int]
    state: StateChange | None
    anew: bool
    trim_to: int | None


def decide(seen: Seen, op: Append, now_us: int) -> tuple[Answer, Change | None]:
    anew = seen.row is None or is_over(seen.row, now_us)
    if anew:
        start = beginning(op.stream)
        seen = Seen(Row(start, start))
    row = seen.row
    assert row is not None, "made above where there was none"
    mark = seen.mark
    if mark is not None and not is_forgotten(mark, row, now_us):
        if mark.mark != op.mark:
            return Mismatch("fingerprint"), None
        return Repeated(mark.position, mark.reply), None
    refusal = _refusal(row, seen.fences, op)
    return (refusal, None) if refusal is not None else _taken(row, seen.rank, op, now_us, anew)


def _refusal(row: Row, fences: Mapping[str, int], op: Append) -> Answer | None:
    for name, number in op.fences.items():
        held = fences.get(name)
        if held is not None and (held > number or (held == number and name in op.rising)):
            return Fenced(name, held)
    if row.ended:
        return Ended(row.head)
    if op.expect is not None and op.expect not in (row.head, row.head.offset):
        return VersionConflict(row.head)
    length = row.head.offset - row.floor.offset
    if op.data is not None and op.keep.full is not None and length >= op.keep.full:
        return Full(length)
    return None


def _taken(
    row: Row, rank: int | None, op: Append, now_us: int, anew: bool
) -> tuple[Answer, Change]:
    head = row.head if op.data is None else following(row.head, op.mark + op.seal)
    gone_us, until_us = ending(op, now_us)
    row = replace(row, head=head, ended=op.ends, gone_us=gone_us, until_us=until_us)
    entry = None if op.data is None else Entry(head, op.id, op.data, now_us)
    mark = Mark(op.mark, head, op.reply, now_us + micros(op.keep.ids_s))
    change = Change(row, mark, entry, op.fences, moved(op.state, rank), anew, trim_to(row, op.keep))
    return Appended(head, op.reply), change


def following(head: Position, mark: str) -> Position:
    """The position of the next entry. Its tag stands for all before it, too."""
    digest = hashlib.sha1((head.tag + mark).encode(), usedforsecurity=False)
    return Position(head.offset + 1, digest.hexdigest()[:TAG_DIGITS])


def ending(op: Append, now_us: int) -> tuple[int | None, int | None]:
    """When entries and state go, and when all does."""
    keep = op.keep
    if op.ends:
        stays_s = max(keep.ids_s, keep.ended_s)
        return now_us + micros(keep.ended_s), now_us + micros(stays_s)
    return None, None if keep.idle_s is None else now_us + micros(keep.idle_s)


def moved(state: StateChange | None, rank: int | None) -> StateChange | None:
    """The change, unless the field has a larger or the same rank already."""
    if isinstance(state, Field) and rank is not None and rank >= state.rank:
        return None
    return state


def trim_to(row: Row, keep: Keep) -> int | None:
    """A few of what is too much."""
    if keep.entries is None:
        return None
    over = row.head.offset - row.floor.offset - keep.entries
    return None if over <= 0 else row.floor.offset + min(over, TRIMS_PER_APPEND)


def is_over(row: Row, now_us: int) -> bool:
    """Is there nothing left of the stream?"""
    return row.until_us is not None and row.until_us <= now_us


def is_forgotten(mark: Mark, row: Row, now_us: int) -> bool:
    """An id lives as long as its entry, and at least for its time.

    Once true it stays so, whether or not a store has deleted the mark by then.
    """
    return mark.until_us <= now_us and mark.position.offset <= row.floor.offset


def life(row: Row | None, now_us: int) -> Life:
    if row is None or is_over(row, now_us):
        return "unknown"
    if row.gone_us is not None and row.gone_us <= now_us:
        return "gone"
    return "ended" if row.ended else "open"


def rings(change: Change) -> bool:
    """Is there something for readers: an entry, or that no more will come?"""
    return change.entry is not None or change.row.ended


def micros(seconds: float) -> int:
    return round(seconds * 1_000_000)


# --- reading ------------------------------------------------------------------------------------


def opened(
    stream: str,
    row: Row | None,
    after: Position | None,
    tag_at: Callable[[int], str | None],
    now_us: int,
) -> tuple[Page, int | None]:
    """The page without its entries, and the offset they follow; None where there are none.

    `tag_at` tells the tag of an entry between floor and head, None where that is not there.
    """
    alive = life(row, now_us)
    start = beginning(stream)
    after = after or start
    if row is None or alive == "unknown":
        return Page((), start, lost=after != start, life="unknown"), None
    if alive == "gone":
        return Page((), row.head, lost=after != row.head, life=alive, floor=row.head), None
    floor = row.floor if row.floor.offset else None
    if not is_ours(row, after, tag_at):
        return Page((), row.head, lost=True, life=alive, floor=floor), None
    return Page((), row.head, life=alive, floor=floor), after.offset


def is_ours(row: Row, after: Position, tag_at: Callable[[int], str | None]) -> bool:
    """Does the log have the reader's own last entry, and everything behind it?"""
    if not row.floor.offset <= after.offset <= row.head.offset:
        return False
    if after.offset == row.floor.offset:
        return after.tag == row.floor.tag
    if after.offset == row.head.offset:
        return after.tag == row.head.tag
    return after.tag == tag_at(after.offset)


# --- from verbs to operations -------------------------------------------------------------------


class LogVerbs(ABC):
    """Turns an append into an operation, so that a log says only how it carries that out."""

    @abstractmethod
    def perform(self, op: Append) -> Answering[Answer]:
        """Carry it out, atomically, and answer."""

    def append(
        self,
        stream: str,
        data: bytes | None,
        *,
        id: str,
        fingerprint: bytes | None = None,
        fences: Mapping[str, int] | None = None,
        rising: Mapping[str, int] | None = None,
        expect: int | Position | None = None,
        state: StateChange | None = None,
        reply: bytes = b"",
        ends: bool = False,
        keep: Keep = KEEP,
        seal: bytes | None = None,
    ) -> Answering[Answer]:
        check_append(data, fingerprint, expect, reply)
        return self.perform(
            Append(
                name_of(stream, "stream"),
                data,
                name_of(id, "id"),
                mark_of(id, fingerprint if fingerprint is not None else data or b""),
                checked_fences(fences, rising),
                frozenset(rising) if rising else _NO_RISING,
                expect,
                checked_state(state),
                reply,
                ends,
                keep,
                seal_of(seal),
            )
        )


def mark_of(id: str, fingerprint: bytes) -> str:
    name = id.encode()
    text = b"%d:%b%b" % (len(name), name, fingerprint)
    return hashlib.sha1(text, usedforsecurity=False).hexdigest()


def seal_of(seal: bytes | None) -> str:
    if seal is None:
        return ""
    _check_bytes(seal, "seal")
    return hashlib.sha1(seal, usedforsecurity=False).hexdigest()


def name_of(given: str, what: str) -> str:
    """The name itself, if a store can keep it."""
    try:
        size = len(given.encode())
    except UnicodeEncodeError as error:
        raise SettingsError(f"the {what} {given!r} cannot be written as UTF-8") from error
    if not 0 < size <= MOST_BYTES or "\0" in given:
        raise SettingsError(
            f"the {what} {given[:40]!r} is {size} bytes long: names have 1 to {MOST_BYTES} bytes, "
            "and no NUL among them"
        )
    return given


def check_append(data: Any, fingerprint: Any, expect: Any, reply: Any) -> None:
    """Refuse what a store could not write: its batch would fail, and everybody's in it."""
    if data is not None:
        _check_bytes(data, "data")
    if fingerprint is not None:
        _check_bytes(fingerprint, "fingerprint")
    if expect is not None:
        whole(expect.offset if isinstance(expect, Position) else expect, "expect")
    _check_bytes(reply, "reply")


def _check_bytes(given: Any, what: str) -> None:
    if not isinstance(given, bytes):
        raise SettingsError(f"{what} is a {type(given).__name__}: write bytes")


def whole(number: Any, what: str) -> int:
    """The number itself, if it is a whole one."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise SettingsError(f"{what} is {number!r}: write a whole number")
    return number


def _counted(number: Any, what: str) -> None:
    if not 0 <= whole(number, what) <= MOST_NUMBER:
        raise SettingsError(f"{what} is {number}: write 0 to 2**53 - 1")


def limit_of(limit: Any) -> int:
    """The limit, or the largest that every store takes."""
    number = whole(limit, "the limit")
    if number < 0:
        raise SettingsError(f"the limit is {number}: write 0 or more")
    return min(number, MOST_NUMBER)


def offset_of(place: int | Position | None) -> int:
    """The offset, or one as far out that every store takes; 0 where there is none."""
    if place is None:
        return 0
    offset = whole(place.offset if isinstance(place, Position) else place, "the offset")
    return max(-1, min(offset, MOST_NUMBER))


_NO_FENCES: Mapping[str, int] = {}
_NO_RISING: frozenset[str] = frozenset()


def checked_fences(
    fences: Mapping[str, int] | None, rising: Mapping[str, int] | None = None
) -> Mapping[str, int]:
    """All of them, those that must grow last."""
    if not fences and not rising:
        return _NO_FENCES
    fences = {**(fences or _NO_FENCES), **(rising or _NO_FENCES)}
    for name, number in fences.items():
        name_of(name, "fence's name")
        _counted(number, f"the fence {name!r}")
    return fences


def checked_state(state: StateChange | None) -> StateChange | None:
    if isinstance(state, Field):
        name_of(state.name, "field")
        _counted(state.rank, f"the rank of {state.name!r}")
    if state is not None:
        _check_bytes(state.data, "the state")
    return state
