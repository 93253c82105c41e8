"""What a log holds and answers, as values.

A `Position` says how far somebody has read: an offset, and a tag that stands for everything up to
it. An `Entry` is something that happened. Every verb of a log answers with one of the values below,
to be matched exhaustively; an exception means that the store itself failed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

from semel.errors import SettingsError
from semel.values import Mismatch, value

__all__ = [
    "Answer",
    "Appended",
    "Ended",
    "Entry",
    "Fenced",
    "Field",
    "FieldValue",
    "Full",
    "Keep",
    "Life",
    "Mismatch",
    "Page",
    "Position",
    "Repeated",
    "Replace",
    "Snapshot",
    "StateChange",
    "VersionConflict",
    "beginning",
]

# 48 bits: two histories that differ pass for the same one once in 280 million million.
TAG_DIGITS = 12

# Exact in a double, which is what Lua counts in.
MOST_NUMBER = 2**53 - 1

# A hundred years: every store can write the moment, and longer than that nobody means.
LONGEST_S = 100 * 366 * 86_400.0

_POSITION = re.compile(r"(0|[1-9][0-9]{0,15})\.([0-9a-f]{12})")


@value
class Position:
    """How far somebody has read in one stream. Printed, it is a cursor: `42.9f3c00d1a2b3`.

    The tag is made from the entry at the offset and the tag before it, and the first one from the
    stream's name. Who holds a position whose tag the log does not have at that offset has read
    another history: of another stream, or one that a failover has taken back.
    """

    offset: int
    tag: str

    def __str__(self) -> str:
        return f"{self.offset}.{self.tag}"

    @classmethod
    def parse(cls, text: str) -> Position | None:
        """The position that was printed so; None for anything else."""
        found = _POSITION.fullmatch(text)
        return None if found is None else cls(int(found[1]), found[2])


def beginning(stream: str) -> Position:
    """Before the first entry of the stream."""
    digest = hashlib.sha1(b"semel:" + stream.encode(), usedforsecurity=False)
    return Position(0, digest.hexdigest()[:TAG_DIGITS])


@value
class Entry:
    """Something that happened, and where it stands. `data` comes back to the byte.

    `at_us` is when the store took it, by its own clock, in microseconds since 1970.
    """

    position: Position
    id: str
    data: bytes
    at_us: int

    @property
    def at(self) -> datetime:
        return datetime.fromtimestamp(self.at_us / 1_000_000, UTC)


# --- appending ----------------------------------------------------------------------------------


@value
class Replace:
    """The state is this, from now on."""

    data: bytes


@value
class Field:
    """The state has a field, in which the value with the larger rank stays.

    A rank is a whole number below 2**53.
    """

    name: str
    rank: int
    data: bytes


StateChange: TypeAlias = Replace | Field


@value
class Keep:
    """How long a stream is kept. Durations are seconds, by the store's clock, up to `LONGEST_S`.

    `entries`: at most so many, the oldest go first. `full`: so many that nobody has trimmed, and
    the next is refused. `ids_s`: how long an id is remembered after its entry came; it is never
    forgotten before its entry is. `ended_s`: how long entries and state stay once the stream has
    ended; its ids, and that it was there, stay for `ids_s`, or as long as the entries if that is
    more. `idle_s`: a stream that has not ended and gets nothing for so long is dropped; None is
    never.
    """

    entries: int | None = None
    full: int | None = None
    ids_s: float = 7200.0
    ended_s: float = 3600.0
    idle_s: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("entries", self.entries), ("full", self.full)):
            if number is not None and not _is_within(number, int, MOST_NUMBER):
                raise SettingsError(f"Keep: {name} is {number!r}: write 0 to 2**53 - 1, or None")
        idle_s = 0 if self.idle_s is None else self.idle_s
        for name, span in (("ids_s", self.ids_s), ("ended_s", self.ended_s), ("idle_s", idle_s)):
            if not _is_within(span, (int, float), LONGEST_S):
                raise SettingsError(
                    f"Keep: {name} is {span!r}: write seconds, from 0 to {LONGEST_S:.0f}"
                )


def _is_within(number: Any, kind: Any, most: float) -> bool:
    return isinstance(number, kind) and not isinstance(number, bool) and 0 <= number <= most


@value
class Appended:
    """It is in the log, at this position. Without an entry, only the reply is kept, and the
    position is where the log ended.
    """

    position: Position
    reply: bytes = b""


@value
class Repeated:
    """It was there before: its position, and the reply that was kept with it."""

    position: Position
    reply: bytes = b""


@value
class VersionConflict:
    """The log does not end where `expect` said. Nothing was added."""

    head: Position


@value
class Fenced:
    """A later holder of the name has appended already, with this number. Nothing was added."""

    name: str
    number: int


@value
class Full:
    """There are so many entries that nobody has trimmed. Nothing was added; ask again later."""

    length: int


@value
class Ended:
    """The stream has ended, at this position. Nothing was added."""

    head: Position


Answer: TypeAlias = Appended | Repeated | Mismatch | VersionConflict | Fenced | Full | Ended


# --- reading ------------------------------------------------------------------------------------

Life: TypeAlias = Literal["unknown", "open", "ended", "gone"]
"""Of a stream: never heard of, or forgotten; it may get more; it gets nothing more; it has ended,
and its entries and state are not kept any more."""


@value
class Page:
    """Entries in order, without a hole, from behind the reader's position.

    `head` is where the log ends. `lost`: the log cannot go on from where the reader is, because
    that was trimmed, is ahead of the log or belongs to another history. Then there are no entries;
    `load` has the state, and a position to go on from. `floor` is the last position that was
    trimmed, None where none was: whoever reads behind it gets all that is kept.
    """

    entries: Sequence[Entry]
    head: Position
    lost: bool = False
    life: Life = "open"
    floor: Position | None = None


@value
class FieldValue:
    """What a field of the state holds, and its rank."""

    rank: int
    data: bytes


@value
class Snapshot:
    """The state, as all entries up to the position have left it."""

    position: Position
    life: Life
    state: bytes | None = None
    fields: Mapping[str, FieldValue] = field(default_factory=dict[str, FieldValue])
