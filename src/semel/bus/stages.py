"""The stages a job goes through, and the numbers their events have.

    get_next_seq("vision")        # 10
    get_next_seq("vision", 3)     # 13

A stage has a range of numbers, so that an event's number tells its stage and its place in it. The
last stage ends the job: its first event is the job's last, or with `final` the first one that has
this number or a larger one. So does `failed`, which need not be named, and whose range follows that
of the last stage. A publisher's automatic numbers are at least the first number of the
stage's range, and may lie after its last.
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
    """Stages by name, in their order, each with its first and last number.

    Without `ranges`, a stage that is not among `SEQ_RANGES` has the numbers 0 to 9. Where they are
    given, one that is not among them is refused: misspelt, the last one would never end its job.
    `final` is the number from which an event of the last stage ends the job; without it, each does.
    """

    def __init__(
        self, ranges: Mapping[str, tuple[int, int]] | None = None, *, final: int | None = None
    ) -> None:
        self._takes_others = ranges is None
        ranges = SEQ_RANGES if ranges is None else ranges
        _check(ranges)
        self._last = list(ranges)[-1]
        first, last = ranges[self._last]
        self.ranges = {**ranges, FAILED: (last + 1, 2 * last + 1 - first)}
        _check_numbers(FAILED, *self.ranges[FAILED])
        if final is not None and not (type(final) is int and first <= final <= last):
            raise SettingsError(
                f"final={final!r:.80} is no number of the last stage, {self._last!r}, which has "
                f"{first} to {last}"
            )
        self._final = final

    def next_seq(self, stage: str, sub_seq: int = 0) -> int:
        """The number of the stage's event `sub_seq`, from 0. `OverflowError` behind its last."""
        first, last = self._range(stage)
        if not 0 <= sub_seq <= last - first:
            raise OverflowError(
                f"stage {stage!r} has the numbers {first} to {last}, and there is no number "
                f"{sub_seq} among them (from 0): leave seq out of publish(), or give the stage a "
                f"wider range, Stages({{{stage!r}: ({first}, ...)}})"
            )
        return first + sub_seq

    def check(self, stage: str, seq: int) -> None:
        """Refuse a number that is another stage's."""
        first, last = self._range(stage)
        if not first <= seq <= last:
            raise SettingsError(
                f"seq={seq} is no number of stage {stage!r}, which has {first} to {last}: "
                f"{self._giver}({stage!r}, n) gives the one of its n-th event, from 0, and "
                f"stages=Stages({{{stage!r}: (..., ...)}}) another range"
            )

    def least_seq(self, stage: str) -> int:
        """The first automatic number of a stage, from 1. In the last stage it ends the job."""
        first, _ = self._range(stage)
        if stage == self._last and self._final is not None:
            first = self._final
        return max(first, 1)

    def ends(self, stage: str, seq: int | None = None) -> bool:
        """Return whether an event of this stage and number ends the job.

        Without a number: whether some event of the stage does.
        """
        if stage == self._last:
            return self._final is None or seq is None or seq >= self._final
        return stage == FAILED

    @property
    def _giver(self) -> str:
        """What gives out their numbers, for people."""
        return "get_next_seq" if self._takes_others else "next_seq of the publisher's own Stages"

    def _range(self, stage: str) -> tuple[int, int]:
        found = self.ranges.get(stage)
        if found is None:
            if not self._takes_others:
                raise SettingsError(
                    f"there is no stage {stage!r}, only {', '.join(map(repr, self.ranges))}: name "
                    "it in Stages, too"
                )
            found = UNKNOWN
        return found


def _check(ranges: Mapping[str, tuple[int, int]]) -> None:
    if not isinstance(ranges, Mapping):
        raise SettingsError(
            f"{ranges!r:.80} are no stages: give each its numbers, as in "
            'Stages({"upload": (1, 99), "published": (100, 109)})'
        )
    if not ranges:
        raise SettingsError("a job has at least one stage: the last one ends it")
    if FAILED in ranges:
        raise SettingsError(f"the stage {FAILED!r} need not be named: it follows the last one")
    for stage, (first, last) in ranges.items():
        _check_numbers(stage, first, last)
    for (one, (_, last)), (other, (first, _)) in pairwise(ranges.items()):
        if first <= last:
            raise SettingsError(
                f"stage {other!r} comes after {one!r}, which has numbers up to {last}, and begins "
                f"with {first}: name the stages in their order, each with numbers of its own"
            )


def _check_numbers(stage: str, first: int, last: int) -> None:
    if not 0 <= first <= last <= MOST_SEQ:
        raise SettingsError(
            f"stage {stage!r} cannot have the numbers {first} to {last}: they are 0 to 2**32 - 1"
        )


STAGES = Stages()


def get_next_seq(stage: str, sub_seq: int = 0) -> int:
    """The number of a stage's event, by `SEQ_RANGES`; an unknown stage has 0 to 9."""
    return STAGES.next_seq(stage, sub_seq)
