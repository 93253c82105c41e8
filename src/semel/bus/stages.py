"""The stages a job goes through, and the numbers their events have.

    get_next_seq("vision")        # 10
    get_next_seq("vision", 3)     # 13

A stage has a range of numbers, so that an event's number tells its stage and its place in it. The
last stage ends the job, and so does `failed`, whose range follows that of the last stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from semel.errors import SettingsError

__all__ = ["FAILED", "SEQ_RANGES", "Stages", "get_next_seq"]

SEQ_RANGES: Mapping[str, tuple[int, int]] = {
    "vision": (10, 19),
    "rule": (20, 29),
    "answer": (30, 39),
    "reward": (40, 49),
    "done": (50, 59),
}

FAILED = "failed"

# Of stages that nobody has named.
UNKNOWN = (0, 9)

# Exact beside an attempt in one number of 53 bits.
MOST_SEQ = 2**32 - 1


class Stages:
    """Stages by name, each with its first and last number; the last one named ends the job."""

    def __init__(self, ranges: Mapping[str, tuple[int, int]] | None = None) -> None:
        ranges = SEQ_RANGES if ranges is None else ranges
        _check(ranges)
        self._last = list(ranges)[-1]
        top = max(last for _, last in ranges.values())
        width = ranges[self._last][1] - ranges[self._last][0]
        self.ranges = {FAILED: (top + 1, top + 1 + width), **ranges}

    def next_seq(self, stage: str, sub_seq: int = 0) -> int:
        """The number of the stage's event `sub_seq`, from 0. `OverflowError` behind its last."""
        first, last = self.ranges.get(stage, UNKNOWN)
        if not 0 <= sub_seq <= last - first:
            raise OverflowError(
                f"stage {stage!r} has the numbers {first} to {last}, and there is no number "
                f"{sub_seq} among them (from 0): give it a wider range, Stages({{{stage!r}: "
                f"({first}, ...)}})"
            )
        return first + sub_seq

    def ends(self, stage: str) -> bool:
        """Is it over with an event of this stage?"""
        return stage in {self._last, FAILED}


def _check(ranges: Mapping[str, tuple[int, int]]) -> None:
    if not ranges:
        raise SettingsError("a job has at least one stage: the last one ends it")
    for stage, (first, last) in ranges.items():
        if not 0 <= first <= last <= MOST_SEQ:
            raise SettingsError(f"stage {stage!r} cannot have the numbers {first} to {last}")
    in_order = sorted(ranges.items(), key=lambda item: item[1])
    for (one, (_, last)), (other, (first, _)) in pairwise(in_order):
        if first <= last:
            raise SettingsError(f"the stages {one!r} and {other!r} share the number {first}")


STAGES = Stages()


def get_next_seq(stage: str, sub_seq: int = 0) -> int:
    """The number of a stage's event, by `SEQ_RANGES`; an unknown stage has 0 to 9."""
    return STAGES.next_seq(stage, sub_seq)
