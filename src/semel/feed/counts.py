"""What a feed has done so far."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(slots=True)
class Counts:
    """`rings` were heard, `found` is what no ring has told of, and so often was the log asked."""

    rings: int = 0
    found: int = 0
    reads: int = 0
    snapshots: int = 0
