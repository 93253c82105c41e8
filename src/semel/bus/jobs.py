"""A job's events as entries of a log, and its state as people ask for it. Pure.

A job is one stream. An event's id is its stage, attempt and number, so that it is there once
however often it is sent. The state has a field for each stage, in which the last attempt's last
event stays; a late one is in the log all the same, and moves nothing back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from semel.bus.stages import MOST_SEQ
from semel.entries import Entry, Field, FieldValue, Snapshot
from semel.errors import SettingsError
from semel.values import value

__all__ = ["Event", "event_of", "seq_of", "state_of", "stream_of"]

# Beside a number of 32 bits, in one of 53.
MOST_ATTEMPT = 2**21 - 1


@value
class Event:
    """What happened to a job: an event of one stage, by one attempt at it."""

    job_id: str
    domain: str
    stage: str
    seq: int
    data: Any
    timestamp: str
    attempt: int = 1

    @property
    def id(self) -> str:
        """What tells two events of one job apart."""
        return f"{self.stage}:{self.attempt}:{self.seq}"

    @property
    def rank(self) -> int:
        """Of two events of one stage, the later attempt's counts, then the larger number."""
        return (self.attempt << 32) + self.seq

    @property
    def fences(self) -> Mapping[str, int]:
        return {self.stage: self.attempt}

    def fingerprint(self) -> bytes:
        """What must be the same when it is sent again: not the time of sending."""
        return _json(self.data, sort_keys=True)

    def entry(self) -> bytes:
        return _json(
            {
                "job_id": self.job_id,
                "domain": self.domain,
                "stage": self.stage,
                "seq": self.seq,
                "data": self.data,
                "timestamp": self.timestamp,
                "attempt": self.attempt,
            }
        )


def event(domain: str, job_id: str, stage: str, seq: int, data: Any, attempt: int = 1) -> Event:
    """An event that happens now."""
    if not 0 <= seq <= MOST_SEQ:
        raise SettingsError(f"seq={seq}: an event's number is 0 to 2**32 - 1")
    if not 1 <= attempt <= MOST_ATTEMPT:
        raise SettingsError(f"attempt={attempt}: attempts are counted from 1, to 2**21 - 1")
    now = datetime.now(UTC).isoformat()
    return Event(job_id, domain, stage, seq, data, now, attempt)


def event_of(data: bytes) -> Event:
    """The event in an entry; `ValueError` when there is none."""
    try:
        return Event(**json.loads(data))
    except TypeError as error:
        raise ValueError(f"this is no event of a job: {error}") from error


def field_of(event: Event, entry: bytes) -> Field:
    """What the event does to the job's state."""
    return Field(event.stage, event.rank, entry)


def stream_of(domain: str, job_id: str) -> str:
    return f"{domain}:{job_id}"


def seq_of(entry: Entry) -> int:
    seq: int = json.loads(entry.data)["seq"]
    return seq


def state_of(snapshot: Snapshot) -> dict[str, Any]:
    """The job as it stands: its furthest stage's last event, and each stage's."""
    stages = {name: json.loads(held.data) for name, held in _by_seq(snapshot.fields)}
    furthest = list(stages)[-1:]
    return {
        **(stages[furthest[0]] if furthest else {}),
        "stages": stages,
        "life": snapshot.life,
        "position": str(snapshot.position),
    }


def _by_seq(fields: Mapping[str, FieldValue]) -> list[tuple[str, FieldValue]]:
    return sorted(fields.items(), key=lambda item: item[1].rank & MOST_SEQ)


def _json(value: Any, *, sort_keys: bool = False) -> bytes:
    text = json.dumps(
        value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=sort_keys
    )
    return text.encode()
