"""Where a client is, as it is told: a position, bound to the view that it was shown. Pure.

Updates say how a view has changed, and fit a client that has one of the same version. To any other
its cursor is one of another history: whoever comes back gets a snapshot.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from semel.entries import TAG_DIGITS, Position

__all__ = ["bound"]


def bound(position: Position, view_version: str) -> Position:
    """The position as clients with such a view have it; of what they have, the position. Without a
    version, positions are given out as they are.
    """
    if not view_version:
        return position
    return Position(
        position.offset, f"{int(position.tag, 16) ^ _mask(view_version):0{TAG_DIGITS}x}"
    )


@lru_cache(maxsize=16)
def _mask(view_version: str) -> int:
    return int(hashlib.sha256(view_version.encode()).hexdigest()[:TAG_DIGITS], 16)
