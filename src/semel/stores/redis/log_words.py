"""What a log says to Redis and what it says back: one script per verb, pure.

Everything about a stream lies in one slot of a cluster, under keys that begin with
`semel:<namespace>:{<stream>}:`. The scripts state the rules of `semel.stores.log_rules` next to the
data (`stores/lua/log`; what lies where is written down in `stream.lua`); what a page or a snapshot
is, the rules themselves decide from the row that comes back.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import hiredis
from redis.crc import key_slot

from semel.entries import (
    Answer,
    Appended,
    Ended,
    Entry,
    Fenced,
    Field,
    FieldValue,
    Full,
    Keep,
    Mismatch,
    Page,
    Position,
    Repeated,
    Replace,
    Snapshot,
    StateChange,
    VersionConflict,
    beginning,
)
from semel.errors import CorruptRecordError
from semel.stores import log_rules as rules
from semel.stores.log_rules import Row, micros, name_of
from semel.stores.redis.scripts import FOR_EVER_US, SENSELESS, Call, Script

_LUA = files("semel.stores") / "lua" / "log"


def _script(verb: str) -> Script:
    return Script("stream", verb, folder=_LUA)


APPEND = _script("append")
READ = _script("read")
LOAD = _script("load")
TRIM = _script("trim")
HEADS = _script("heads")

# A script runs while every other caller waits: so many streams take it half a millisecond.
HEADS_AT_ONCE = 500


# --- where it lies ------------------------------------------------------------------------------


class Place:
    """Where one stream lies, with what is said in every append to it."""

    __slots__ = ("log", "meta", "packed", "slot", "start", "state", "stream")

    def __init__(self, namespace: str, stream: str) -> None:
        before = f"semel:{namespace}:{{{quote(stream, safe=':/')}}}:".encode()
        self.stream = stream
        self.start = beginning(stream)
        self.meta, self.log, self.state = before + b"meta", before + b"log", before + b"state"
        self.slot: int = key_slot(self.meta)
        keys = (self.meta, self.log, self.state)
        self.packed = b"".join(map(_word, (b"3", *keys, self.start.tag.encode())))

    @property
    def channel(self) -> bytes:
        """What is published here rings. A channel with a name of its own would be one more key of
        the append, and one that is nowhere: a cluster that moves the slot would refuse to serve it.
        """
        return self.log


@lru_cache(maxsize=8192)
def place_of(namespace: str, stream: str) -> Place:
    return Place(namespace, name_of(stream, "stream"))


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _call(script: Script, keys: Sequence[bytes], *args: Any) -> Call:
    words: Any = (b"EVALSHA", script.sha, len(keys), *keys, *args)
    return Call(script, keys[0], hiredis.pack_command(words))


# --- appending ----------------------------------------------------------------------------------

# What stays the same from call to call is packed once: the keys, and how long a stream is kept.
_WORDS = 21
_OPENING = b"*%d\r\n" % _WORDS + APPEND.by_hash
_NOTHING = b"$0\r\n\r\n"
_NO_ENTRY = b"$1\r\n0\r\n" + _NOTHING
_NO_FENCES = b"$1\r\n0\r\n"


def appending(
    place: Place,
    mark: str,
    id: str,
    data: bytes | None,
    reply: bytes,
    expect: int | Position | None,
    keep: bytes,
) -> bytes:
    """The command, without fences and without a change of the state. The mark may be sealed."""
    name = id.encode()
    return b"".join(
        (
            _OPENING,
            place.packed,
            keep,
            b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(mark), mark.encode(), len(name), name),
            _NO_ENTRY if data is None else b"$1\r\n1\r\n$%d\r\n%b\r\n" % (len(data), data),
            _NOTHING if expect is None else _word(str(expect).encode()),
            _word(reply) if reply else _NOTHING,
            _NO_FENCES,
        )
    )


def with_more(
    packed: bytes, fences: Mapping[str, int], rising: Container[str], state: StateChange | None
) -> bytes:
    """The command, with both. A number that must grow has a plus in front of it."""
    words: list[bytes] = []
    for name, number in fences.items():
        words += (name.encode(), b"+%d" % number if name in rising else b"%d" % number)
    match state:
        case Field(name, rank, data):
            words += (name.encode(), b"%d" % rank, data)
        case Replace(data):
            words.append(data)
        case None:
            pass
    opening = b"*%d\r\n" % (_WORDS + len(words)) + APPEND.by_hash
    rest = map(_word, (b"%d" % len(fences), *words))
    return b"".join((opening, packed[len(_OPENING) : -len(_NO_FENCES)], *rest))


@lru_cache(maxsize=256)
def packed_keep(keep: Keep, ends: bool, is_cluster: bool) -> bytes:
    gone, over = (keep.ended_s, max(keep.ids_s, keep.ended_s)) if ends else (None, keep.idle_s)
    return b"".join(
        map(
            _word,
            (
                b"%d" % max(0, min(micros(keep.ids_s), FOR_EVER_US)),
                _span(gone),
                _span(over),
                _number(keep.entries),
                _number(keep.full),
                b"1" if ends else b"0",
                b"SPUBLISH" if is_cluster else b"PUBLISH",
            ),
        )
    )


def _span(seconds: float | None) -> bytes:
    """Microseconds; empty for what is never."""
    us = FOR_EVER_US if seconds is None else micros(seconds)
    return b"" if us >= FOR_EVER_US else b"%d" % us


def _number(number: int | None) -> bytes:
    return b"" if number is None else b"%d" % number


def answered(said: Any, fences: Mapping[str, int] | None, reply: bytes) -> Answer:
    match said:
        case [b"repeated", offset, tag, kept]:
            return Repeated(Position(offset, tag.decode()), kept)
        case [b"mismatch"]:
            return Mismatch("fingerprint")
        case [b"fenced", which, number]:
            return Fenced(list(fences or ())[which - 1], number)
        case [b"ended", offset, tag]:
            return Ended(Position(offset, tag.decode()))
        case [b"conflict", offset, tag]:
            return VersionConflict(Position(offset, tag.decode()))
        case [b"full", length]:
            return Full(length)
        case [b"silent", offset, tag, _]:
            return Appended(Position(offset, tag.decode()), reply)
    raise ValueError("it is no answer to an append")


def why_silent(said: Any) -> str | None:
    """Why it could not be rung for what was appended."""
    return said[3].decode("utf-8", "replace") if said[0] == b"silent" else None


# --- reading ------------------------------------------------------------------------------------


def reading(place: Place, after: Position | None, limit: int) -> Call:
    # One more: the entry at the position itself, which tells whether it is the reader's own.
    return _call(READ, (place.meta, place.log), rules.offset_of(after), limit + 1)


def loading(place: Place) -> Call:
    return _call(LOAD, (place.meta, place.state))


def trimming(place: Place, upto: int | Position) -> Call:
    offset = rules.offset_of(upto)
    tag = (upto.tag,) if isinstance(upto, Position) else ()
    return _call(TRIM, (place.meta, place.log), offset, *tag)


def page_of(place: Place, after: Position | None, limit: int, reply: Any) -> Page:
    now_us, row, found = _row_of(place, reply)
    entries = [_entry_of(words) for words in found]
    ours = entries.pop(0) if entries and row and _is_at(after, entries[0], row) else None
    page, behind = rules.opened(
        place.stream, row, after, lambda _: None if ours is None else ours.position.tag, now_us
    )
    if behind is None:
        return page
    del entries[limit:]
    last = entries[-1].position.offset if entries else behind
    if last != behind + len(entries) or (limit and not entries and behind < page.head.offset):
        # Evicted, or somebody else deleted them: there must be no hole that nobody sees.
        return replace(page, lost=True)
    return replace(page, entries=entries)


def _is_at(after: Position | None, first: Entry, row: Row) -> bool:
    """Is the first entry the one at the reader's position, and not one that follows it?"""
    return after is not None and first.position.offset == after.offset > row.floor.offset


def _entry_of(words: Any) -> Entry:
    id, (_, about, _, data) = words
    tag, at_us, name = about.decode().split(" ", 2)
    return Entry(Position(int(id[:-2]), tag), name, data, int(at_us))


def snapshot_of(place: Place, reply: Any) -> Snapshot:
    now_us, row, words = _row_of(place, reply)
    life = rules.life(row, now_us)
    if row is None or life == "unknown":
        return Snapshot(place.start, "unknown")
    if life == "gone":
        return Snapshot(row.head, life)
    held: dict[bytes, bytes] = dict(zip(words[::2], words[1::2], strict=True))
    fields = {
        name[1:].decode(): FieldValue(int(rank), held[b"d" + name[1:]])
        for name, rank in held.items()
        if name[:1] == b"r"
    }
    return Snapshot(row.head, life, held.get(b"s"), fields)


def _row_of(place: Place, reply: Any) -> tuple[int, Row | None, Any]:
    if reply is None:
        return 0, None, ()
    now_us, (offset, tag, floor, floor_tag, ended, gone_us, until_us), more = reply
    row = Row(
        Position(int(offset), str(tag, "ascii")),
        place.start if floor is None else Position(int(floor), str(floor_tag, "ascii")),
        ended is not None,
        int(gone_us) if gone_us else None,
        int(until_us) if until_us else None,
    )
    return int(now_us), row, more


# --- many streams -------------------------------------------------------------------------------


def asking_heads(places: Sequence[Place], *, is_cluster: bool) -> tuple[list[Call], list[Place]]:
    """The calls, and whose heads they tell, in order. In a cluster, one for each slot."""
    groups: Iterable[list[Place]] = (list(places),)
    if is_cluster:
        by_slot: dict[int, list[Place]] = {}
        for place in places:
            by_slot.setdefault(place.slot, []).append(place)
        groups = by_slot.values()
    parts = [
        group[start : start + HEADS_AT_ONCE]
        for group in groups
        for start in range(0, len(group), HEADS_AT_ONCE)
    ]
    calls = [_call(HEADS, [place.meta for place in part]) for part in parts]
    return calls, [place for part in parts for place in part]


def heads_of(places: Sequence[Place], replies: Iterable[Any]) -> dict[str, Position]:
    told = iter([word for reply in replies for word in reply])
    return {
        place.stream: place.start if offset is None else _head_of(place, offset, tag)
        for place, offset, tag in zip(places, told, told, strict=True)
    }


def _head_of(place: Place, offset: Any, tag: Any) -> Position:
    """As if there were no such stream, where it cannot be read: its own reader is told."""
    try:
        return Position(int(offset), str(tag, "ascii"))
    except SENSELESS:
        return place.start


def corrupt(place: Place, reply: Any) -> CorruptRecordError:
    return CorruptRecordError(
        f"the stream {place.stream!r} at the Redis key {place.meta.decode()} cannot be read: "
        f"{reply!r:.200}. If something else wrote there, give the store another namespace; to "
        "start over, delete the keys that begin like this one"
    )
