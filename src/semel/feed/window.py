"""The last entries of a stream, kept once for everybody who follows it. Pure.

Each entry is encoded once, when it comes. Who follows has only a position in here: all who are at
the same one are given the very same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from semel.entries import Entry, Position
from semel.feed.values import Burst

__all__ = ["CHUNK_BYTES", "KEEP_BYTES", "KEEP_ENTRIES", "Encode", "Window"]

Encode = Callable[[Entry], bytes]

# Who is further behind than this is served from the log, which costs a read.
KEEP_ENTRIES = 256
KEEP_BYTES = 256 * 1024

# What is written at once: enough to be worth a system call, and no more than a server buffers for
# a client before it makes us wait.
CHUNK_BYTES = 64 * 1024

# Bursts that are kept for others at the same offset: most are at the head. Of each there may be a
# chunk, which is more than the window itself where many are behind.
MOST_BURSTS = 8


class _Kept:
    __slots__ = ("entry", "frame", "upto")

    def __init__(self, entry: Entry, frame: bytes, upto: int) -> None:
        self.entry = entry
        self.frame = frame
        self.upto = upto
        """Bytes of all frames so far, this one among them."""


class Window:
    """Entries from behind `floor` to `head`, without a hole."""

    def __init__(self, floor: Position, encode: Encode) -> None:
        self.floor = floor
        self.head = floor
        self._encode = encode
        self._kept: list[_Kept] = []
        self._begins = 0  # of the first frame, in bytes
        self._ends = 0
        self._bursts: dict[int, Burst] = {}

    def __len__(self) -> int:
        return len(self._kept)

    # --- filling --------------------------------------------------------------------------------

    def add(self, entries: Sequence[Entry]) -> None:
        """What follows the head.

        All of it stays until the next time, however much it is: everybody who was at the head can
        take it from here.
        """
        if not entries:
            return
        self.trim()
        for entry in entries:
            frame = self._encode(entry)
            self._ends += len(frame)
            self._kept.append(_Kept(entry, frame, self._ends))
        self.head = entries[-1].position
        self._bursts.clear()

    def precede(self, after: Position, entries: Sequence[Entry]) -> bool:
        """Keep also what somebody has read of the time before, from behind `after` on.

        False, and nothing is kept, if it does not reach up to the floor, or is too much.
        """
        missing = self.floor.offset - after.offset
        if not 0 < missing <= len(entries) or entries[missing - 1].position != self.floor:
            return False
        before = [(entry, self._encode(entry)) for entry in entries[:missing]]
        size = sum(len(frame) for _, frame in before)
        if len(self) + missing > KEEP_ENTRIES or self._ends - self._begins + size > KEEP_BYTES:
            return False
        upto = self._begins = self._begins - size
        kept: list[_Kept] = []
        for entry, frame in before:
            upto += len(frame)
            kept.append(_Kept(entry, frame, upto))
        self._kept[:0] = kept
        self.floor = after
        return True

    def trim(self) -> None:
        """Let go of what nobody need have any more."""
        over = max(0, len(self._kept) - KEEP_ENTRIES)
        while over < len(self._kept) and self._ends - self._begun_at(over) > KEEP_BYTES:
            over += 1
        if over:
            self.floor = self._kept[over - 1].entry.position
            self._begins = self._kept[over - 1].upto
            del self._kept[:over]

    def _begun_at(self, index: int) -> int:
        return self._kept[index - 1].upto if index else self._begins

    # --- taking ---------------------------------------------------------------------------------

    def has(self, position: Position) -> bool:
        """Is it a position in here?"""
        index = position.offset - self.floor.offset
        if not 0 <= index <= len(self._kept):
            return False
        found = self._kept[index - 1].entry.position if index else self.floor
        return found == position

    def burst(self, offset: int) -> Burst:
        """What follows an offset between floor and head: all of it, or a chunk."""
        found = self._bursts.get(offset)
        if found is None:
            if len(self._bursts) >= MOST_BURSTS:
                self._bursts.clear()
            found = self._bursts[offset] = self._burst(offset - self.floor.offset)
        return found

    def _burst(self, index: int) -> Burst:
        size, last = 0, index
        while last < len(self._kept) and size < CHUNK_BYTES:
            size += len(self._kept[last].frame)
            last += 1
        kept = self._kept[index:last]
        frames = kept[0].frame if len(kept) == 1 else b"".join(one.frame for one in kept)
        return Burst([one.entry for one in kept], kept[-1].entry.position, frames)

    def bytes_after(self, offset: int) -> int:
        """How much whoever is at this offset has not got; all there is, if it is below."""
        index = offset - self.floor.offset
        return self._ends - self._begun_at(min(max(index, 0), len(self._kept)))
