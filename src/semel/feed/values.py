"""What somebody who follows a stream is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from semel.entries import Entry, Page, Position, Snapshot
from semel.values import value

__all__ = ["Burst", "End", "News", "Reason", "Reset", "Update", "reason_of"]

Reason: TypeAlias = Literal["trimmed", "ahead", "forked", "unreadable", "gone", "overrun"]
"""Why there is a hole: what comes next is not kept any more; the log ends before the cursor; the
cursor belongs to another history, or to another stream; it is none; nothing is left of the stream;
so much has come since that the state is the shorter way.
"""


@value
class Update:
    """The next entry: it follows the last one without a hole."""

    entry: Entry


@value
class Reset:
    """There is a hole here. The state is this, and what follows goes on from its position."""

    reason: Reason
    snapshot: Snapshot


@value
class End:
    """The stream has ended, and this is where."""

    position: Position


News: TypeAlias = Update | Reset | End


@value
class Burst:
    """Entries that follow one another, the last one's position, and all of them as one write."""

    entries: Sequence[Entry]
    position: Position
    frames: bytes = b""


def reason_of(page: Page, after: Position) -> Reason:
    """Why this page is lost to whoever has read up to `after`."""
    if page.life in {"unknown", "gone"}:
        return "gone"
    if after.offset > page.head.offset:
        return "ahead"
    floor = 0 if page.floor is None else page.floor.offset
    return "trimmed" if after.offset < floor else "forked"
