"""A job's events as entries of a log, and its state as people ask for it. Pure.

A job is one stream. An event's id is its stage, attempt and number, and where a stage has failed
that stage, so that it is there once however often it is sent. The state has a field for each stage,
in which the last attempt's last event stays; a late one is in the log all the same, and moves
nothing back.

Where workers have a store of their own, events lie there in `{domain}:events:{shard}` until a
router takes them to their job's stream, `{domain}:job:{job_id}`. Neither a domain nor a stage has
a colon, so that no job's name is that of a shard, or of a job elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from json.encoder import encode_basestring as _quoted
from typing import Any, NamedTuple

from semel.bus.stages import FAILED, MOST_SEQ
from semel.entries import Answer, Entry, Field, FieldValue, Keep, Snapshot
from semel.errors import SettingsError
from semel.keys import plain
from semel.ports import Answering, Log
from semel.stores.log_rules import MOST_BYTES, name_of
from semel.values import value

__all__ = ["KEEP_JOB", "KEEP_SHARD", "Event", "event_of", "seq_of", "state_of", "stream_of"]

# Beside a number of 32 bits, in one of 53.
MOST_ATTEMPT = 2**21 - 1

# The seed's times, counted from the event that ends the job. A job that nobody ends goes when
# nothing was heard of it for a day: by then nobody works on it, and nobody waits for it.
KEEP_JOB = Keep(ids_s=7200.0, ended_s=3600.0, idle_s=86_400.0)

# What a router has taken is trimmed by it, and nothing else ever is: who publishes more than it
# can take is told so.
KEEP_SHARD = Keep(full=10_000, ids_s=7200.0)


@value
class Event:
    """What happened to a job: an event of one stage, by one attempt at it.

    `failed_in` is the stage in which a job has failed, where somebody has said so.
    """

    job_id: str
    domain: str
    stage: str
    seq: int
    data: Any
    timestamp: str
    attempt: int = 1
    failed_in: str = ""

    @property
    def id(self) -> str:
        """What tells two events of one job apart."""
        # What no number is made of: then no other event of a shard can have this id.
        failed_in = f"@{self.failed_in}" if self.failed_in else ""
        return f"{self.stage}:{self.attempt}:{self.seq}{failed_in}"

    @property
    def rank(self) -> int:
        """Of two events of one stage, the later attempt's counts, then the larger number."""
        return (self.attempt << 32) + self.seq

    @property
    def fences(self) -> dict[str, int]:
        """Nobody whose attempt at a stage has been given up tells of it, nor fails the job."""
        if self.failed_in:
            return {self.stage: self.attempt, self.failed_in: self.attempt}
        return {self.stage: self.attempt}

    def written(self, entry: bytes | None = None) -> Written:
        """As a log has it; `entry` where it was written before. What is no JSON raises."""
        data = _WRITTEN(self.data)
        # Objects may have their members in another order when they come again.
        same = _SORTED(self.data) if "{" in data else data
        return Written(self._entry(data) if entry is None else entry, same.encode())

    def _entry(self, data: str) -> bytes:
        failed_in = f',"failed_in":{_quoted(self.failed_in)}' if self.failed_in else ""
        return (
            f'{{"job_id":{_quoted(self.job_id)},"domain":{_quoted(self.domain)},'
            f'"stage":{_quoted(self.stage)},"seq":{self.seq},"data":{data},'
            f'"timestamp":{_quoted(self.timestamp)},"attempt":{self.attempt}{failed_in}}}'
        ).encode()


class Written(NamedTuple):
    """An event's entry, and what must be the same when it is sent again: not the time of that."""

    entry: bytes
    fingerprint: bytes


_WRITTEN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_SORTED = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True
).encode


def event(
    domain: str,
    job_id: str,
    stage: str,
    seq: int,
    data: Any,
    attempt: int = 1,
    failed_in: str = "",
) -> Event:
    """An event that happens now."""
    job_id, stage = plain("job_id", job_id), plain("stage", stage)
    failed_in = plain("stage", failed_in)
    now = datetime.now(UTC).isoformat()
    made = Event(job_id, domain, stage, seq, data, now, attempt, failed_in)
    if fault := _fault(made):
        raise SettingsError(fault)
    return made


def named(event: Event) -> str:
    """For people."""
    return (
        f"event {event.seq} of stage {event.stage!r}, attempt {event.attempt}, "
        f"of job {event.job_id!r}"
    )


def event_of(data: bytes | str) -> Event:
    """The event in an entry; `ValueError` when there is none. What else is there is no matter."""
    try:
        read = json.loads(data)
        found = Event(
            **{name: read[name] for name in _NEEDED},
            attempt=read.get("attempt", 1),
            failed_in=read.get("failed_in", ""),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"this is no event of a job: {type(error).__name__}: {error}") from error
    if fault := _fault(found):
        raise ValueError(f"this is no event of a job: {fault}")
    return found


_NEEDED = ("job_id", "domain", "stage", "seq", "data", "timestamp")


def _fault(event: Any) -> str:
    """Why it cannot be an event; "" if it can. What was read may be anything."""
    if not (isinstance(event.job_id, str) and event.job_id):
        return f"job_id={event.job_id!r:.80}: a job has a name, which is a str"
    if not (isinstance(event.stage, str) and event.stage and ":" not in event.stage):
        return f"stage={event.stage!r:.80}: a stage has a name, which is a str without a colon"
    if not (isinstance(event.failed_in, str) and ":" not in event.failed_in):
        return f"stage={event.failed_in!r:.80}: a stage has a name, which is a str without a colon"
    if not (type(event.seq) is int and 0 <= event.seq <= MOST_SEQ):
        return (
            f"seq={event.seq!r:.80}: an event's number is 0 to 2**32 - 1; without a number, name "
            "the data: publish(job_id, stage, data=...)"
        )
    if not (type(event.attempt) is int and 1 <= event.attempt <= MOST_ATTEMPT):
        return f"attempt={event.attempt!r:.80}: attempts are counted from 1, to 2**21 - 1"
    return ""


def append(
    log: Log,
    event: Event,
    written: Written,
    *,
    ends: bool,
    keep: Keep,
    fences: Mapping[str, int] | None = None,
    rising: Mapping[str, int] | None = None,
) -> Answering[Answer]:
    """Add the event to its job's stream: entry, state and ring in one call.

    `fences` are those of the router. `rising` has numbers that must grow with each append.
    """
    return log.append(
        stream_of(event.domain, event.job_id),
        written.entry,
        id=event.id,
        fingerprint=written.fingerprint,
        fences={**event.fences, **fences} if fences else event.fences,
        rising=rising,
        state=Field(event.stage, event.rank, written.entry),
        ends=ends,
        keep=keep,
    )


# --- streams ------------------------------------------------------------------------------------


def checked_domain(domain: str) -> str:
    """The name itself, if it makes a job's stream nobody else's."""
    if not domain or ":" in domain:
        raise SettingsError(f"domain={domain!r}: a domain has a name without a colon, such as scan")
    return name_of(domain, "domain")


def stream_of(domain: str, job_id: str) -> str:
    """Where a job's events are, for whoever watches it."""
    return f"{domain}:job:{job_id}"


def shard_stream_of(domain: str, shard: int) -> str:
    """Where workers put the events of a shard's jobs, for a router."""
    return f"{domain}:events:{shard}"


def shard_of(job_id: str, shards: int) -> int:
    """The shard of a job, for everybody the same: MD5 of its name, as a number, by the count."""
    digest = hashlib.md5(job_id.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest, "big") % shards


def check_names(event: Event) -> None:
    """`SettingsError` for what no job's log could keep."""
    name_of(stream_of(event.domain, event.job_id), "job")
    name_of(event.id, "event")


def id_in_shard(event: Event) -> str:
    """What tells two events of one shard apart, hashed where it would be too long.

    What no job's log could keep is refused here: a router could only pass it over.
    """
    check_names(event)
    id = f"{event.job_id}:{event.id}"
    data = id.encode()
    return id if len(data) <= MOST_BYTES else hashlib.sha256(data).hexdigest()


# --- reading ------------------------------------------------------------------------------------


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
    """In the order of their numbers. A failure is last: nothing comes after it."""
    return sorted(
        fields.items(), key=lambda item: (item[0] == FAILED, item[1].rank & MOST_SEQ, item[0])
    )
