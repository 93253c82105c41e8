"""Where a client is, as it is told: a position, bound to the rules by which it was shown. Pure.

Updates say how a view has changed, and fit a client that has the view of the same rules. To rules
of another version its cursor is one of another history: whoever comes back gets a snapshot.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from semel.entries import TAG_DIGITS, Position

__all__ = ["bound"]


def bound(position: Position, version: str) -> Position:
    """The position as clients of these rules have it; of what they have, the position. Rules
    without a version give out positions as they are.
    """
    if not version:
        return position
    return Position(position.offset, f"{int(position.tag, 16) ^ _mask(version):0{TAG_DIGITS}x}")


@lru_cache(maxsize=16)
def _mask(version: str) -> int:
    return int(hashlib.sha256(version.encode()).hexdigest()[:TAG_DIGITS], 16)
