"""Counts the automatic numbers of a publisher's events, per job and attempt. No I/O.

A number is taken without an await between reading and advancing the count, and under a lock, so
that concurrent publishes of one process get distinct numbers. Publishers of other processes may
take the same one: the log refuses the second, and that publisher takes a later number.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeAlias

from semel.bus.jobs import Event, Written
from semel.bus.stages import FAILED, MOST_SEQ
from semel.entries import FieldValue

__all__ = ["Numbers", "highest_in"]

# Counts (one per job and attempt) and failed calls that are kept, to bound memory. A forgotten
# count is read from the job's log again; with shards, it begins at the first number.
MOST_JOBS = 10_000

Count: TypeAlias = tuple[str, int]
"""A job's id, and an attempt."""

Call: TypeAlias = tuple[str, int, str, bytes]
"""Job, attempt, stage and a digest of the data: what a call and its repeat have in common."""


class Numbers:
    """The highest number of each job and attempt, and the numbers of calls that have failed.

    It belongs to one process. A forked process would have the same token, so its events would be
    taken for the parent's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._token = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._highest: OrderedDict[Count, int] = OrderedDict()
        self._unsettled: OrderedDict[Call, list[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._highest)

    @property
    def is_ours(self) -> bool:
        """Whether this process created the counts."""
        return self._pid == os.getpid()

    def signed(self, written: Written) -> Written:
        """Add this publisher's token to the fingerprint, so that equal data of others differ."""
        return Written(written.entry, self._token + written.fingerprint)

    def highest(self, count: Count) -> int | None:
        """The highest number that is known; None if the count has not begun."""
        return self._highest.get(count)

    def saw(self, count: Count, seq: int) -> None:
        """Raise the count to this number, or begin with it."""
        with self._lock:
            self._set(count, max(seq, self._highest.get(count, 0)))

    def take(self, count: Count, least: int) -> int:
        """Return the next number, which is at least `least`, and advance the count to it."""
        with self._lock:
            seq = max(least, self._highest.get(count, 0) + 1)
            if seq > MOST_SEQ:
                raise OverflowError(
                    f"job {count[0]!r} has no number after 2**32 - 1: begin another attempt"
                )
            self._set(count, seq)
            return seq

    def _set(self, count: Count, seq: int) -> None:
        self._highest[count] = seq
        self._highest.move_to_end(count)
        if len(self._highest) > MOST_JOBS:
            self._highest.popitem(last=False)

    def forget(self, count: Count) -> None:
        self._highest.pop(count, None)

    # --- calls that have failed -----------------------------------------------------------------

    @property
    def has_unsettled(self) -> bool:
        return bool(self._unsettled)

    def unsettle(self, event: Event, written: Written) -> None:
        """Keep the number for the repeat of this call: the event may be there."""
        with self._lock:
            self._unsettled.setdefault(_call(event, written), []).append(event.seq)
            if len(self._unsettled) > MOST_JOBS:
                self._unsettled.popitem(last=False)

    def resume(self, event: Event, written: Written) -> int | None:
        """Return the number of the same call that has failed, once; None if there is none."""
        with self._lock:
            call = _call(event, written)
            numbers = self._unsettled.get(call)
            if numbers is None:
                return None
            seq = numbers.pop(0)
            if not numbers:
                del self._unsettled[call]
            return seq


def _call(event: Event, written: Written) -> Call:
    digest = hashlib.blake2b(written.fingerprint, digest_size=16).digest()
    return event.job_id, event.attempt, event.stage, digest


def highest_in(fields: Mapping[str, FieldValue], stage: str, attempt: int) -> int:
    """The number above which a stage's attempt begins to count.

    An earlier attempt at the same stage does not count. One at another stage does: its event stays
    in the state, which shows the event with the largest number.
    """
    ranks = [
        held.rank & MOST_SEQ
        for name, held in fields.items()
        if name != FAILED and (name != stage or held.rank >> 32 == attempt)
    ]
    return max(ranks, default=0)
