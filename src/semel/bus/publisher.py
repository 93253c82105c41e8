"""Saying how a job goes on: each event once, however often it is said.

    publisher = Publisher("redis://localhost")
    await publisher.publish("job-7", "vision", get_next_seq("vision"), {"label": "bottle"})

True: it is there, by this call. False: it was there, and nothing has changed. So whoever got no
answer, or began anew, says the same again.

Where workers and whoever watches share a store, an event goes to its job's stream, in one call that
also changes the job's state and rings. Where they do not, `shards=` says in how many streams of the
workers' own store the events wait for a router, all of a job in the same one. There, only the
repeat of an event is known, and that too much is waiting: that an attempt is stale, or a job has
ended, is found by the router, who passes the event over and counts it.

The easy mistake is to go on after `StaleAttemptError`: somebody else does the same work by now.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, assert_never

from semel.bus import jobs
from semel.bus.jobs import KEEP_JOB, KEEP_SHARD, Event, Written, named
from semel.bus.stages import FAILED, STAGES, Stages
from semel.colour import ASYNC, SYNC, Colour, run
from semel.entries import Answer, Appended, Ended, Fenced, Full, Keep, Repeated, VersionConflict
from semel.errors import (
    BackPressureError,
    IdempotencyConflictError,
    JobEndedError,
    SettingsError,
    StaleAttemptError,
)
from semel.ports import Answering, LogStore
from semel.settings import as_log_store
from semel.values import Mismatch

__all__ = ["BlockingPublisher", "Publisher"]

# Of an event as it is stored. A gateway holds some of them for each of its connections.
MOST_BYTES = 64 * 1024

# A router that runs takes what waits in less; one that does not run is not there at once.
RETRY_S = 1.0


class _Flow:
    """What both colours do."""

    def __init__(
        self,
        store: LogStore | str,
        colour: Colour,
        domain: str,
        shards: int | None,
        stages: Stages,
        keep: Keep | None,
        most_bytes: int,
    ) -> None:
        match shards:
            case None:
                pass
            case int() if shards >= 1:
                pass
            case _:
                raise SettingsError(f"shards={shards!r}: at least one, or None without a router")
        if not isinstance(stages, Stages):
            raise SettingsError(f"stages={stages!r:.80}: give Stages({{...}})")
        self._domain = jobs.checked_domain(domain)
        self._shards = shards
        self._stages = stages
        self._keep = keep or (KEEP_JOB if shards is None else KEEP_SHARD)
        if shards is not None and (self._keep.entries, self._keep.idle_s) != (None, None):
            raise SettingsError(
                "keep=: with shards, entries and idle_s would drop what no router has taken; leave "
                "them out, and say with full how much may wait"
            )
        self._most_bytes = most_bytes
        self.store = as_log_store(store)
        self.opened = isinstance(store, str)
        self._log = self.store.log(colour)

    async def publish(
        self,
        job_id: str,
        stage: str,
        seq: int,
        data: Any,
        attempt: int,
        failed_in: str = "",
    ) -> bool:
        event = jobs.event(self._domain, job_id, stage, seq, data, attempt, failed_in)
        self._stages.check(event.stage, seq)
        written = self._written(event)
        if self._shards is None:
            answer = await self._to_its_job(event, written)
        else:
            answer = await self._to_a_router(event, written, self._shards)
        return _told(answer, event, self._shards)

    async def fail(self, job_id: str, data: Any, attempt: int, stage: str) -> bool:
        seq = self._stages.next_seq(FAILED)
        return await self.publish(job_id, FAILED, seq, data, attempt, stage)

    def _to_its_job(self, event: Event, written: Written) -> Answering[Answer]:
        ends = self._stages.ends(event.stage)
        return jobs.append(self._log, event, written, ends=ends, keep=self._keep)

    def _to_a_router(self, event: Event, written: Written, shards: int) -> Answering[Answer]:
        id = jobs.id_in_shard(event)
        return self._log.append(
            jobs.shard_stream_of(self._domain, jobs.shard_of(event.job_id, shards)),
            written.entry,
            id=id,
            fingerprint=written.fingerprint,
            keep=self._keep,
        )

    def _written(self, event: Event) -> Written:
        try:
            written = event.written()
        except (TypeError, ValueError, RecursionError) as error:
            raise SettingsError(
                f"the data of {named(event)} cannot be written as JSON: {error}; give plain values"
            ) from error
        if (size := len(written.entry)) > self._most_bytes:
            raise SettingsError(
                f"{named(event)} has {size:,} bytes, more than most_bytes "
                f"({self._most_bytes:,}); store what is large elsewhere and tell where, or raise "
                "most_bytes"
            )
        return written


def _told(answer: Answer, event: Event, shards: int | None) -> bool:
    match answer:
        case Appended():
            return True
        case Repeated():
            return False
        case Mismatch():
            raise IdempotencyConflictError(
                f"{named(event)} was published before with other data; another event has another "
                "seq, and who begins a stage anew another attempt",
                key=f"{event.job_id}:{event.id}",
            )
        case Fenced(_, number):
            raise StaleAttemptError(
                f"stop: attempt {number} has begun; {named(event)} was not published",
                attempt=number,
            )
        case Ended():
            raise JobEndedError(f"job {event.job_id!r} has ended; {named(event)} was not published")
        case Full(length):
            raise BackPressureError(_full(length, event, shards), retry_after=RETRY_S)
        case VersionConflict():
            raise AssertionError("nothing was expected of the stream")
        case _:
            assert_never(answer)


def _full(length: int, event: Event, shards: int | None) -> str:
    if shards is None:
        return f"job {event.job_id!r} has {length:,} events, and keep= lets it have no more"
    return (
        f"{length:,} events wait in the shard of job {event.job_id!r}, and it takes no more; see "
        f"whether a router runs, and publish the same again in {RETRY_S:g} s"
    )


class Publisher:
    """Publishes events of jobs, for async code.

    A store given by its URL is closed with the publisher; one given as it is stays open. `keep`
    says how long a job's stream is kept or, with `shards`, how much may wait in one of these.
    """

    def __init__(
        self,
        store: LogStore | str,
        *,
        domain: str = "scan",
        shards: int | None = None,
        stages: Stages = STAGES,
        keep: Keep | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._flow = _Flow(store, ASYNC, domain, shards, stages, keep, most_bytes)

    async def publish(self, job_id: str, stage: str, seq: int, data: Any, attempt: int = 1) -> bool:
        """Say that this has happened: True when it is new, False when it was said before.

        `IdempotencyConflictError`: the same was said with other data. `StaleAttemptError`: a later
        attempt at the stage has begun. `JobEndedError`: the job has ended. `BackPressureError`: say
        it again later.
        """
        return await self._flow.publish(job_id, stage, seq, data, attempt)

    async def fail(
        self, job_id: str, data: Any = None, attempt: int = 1, *, stage: str = ""
    ) -> bool:
        """Say that the job has failed: it ends with this.

        With `stage`, this attempt at it has failed: not the job, if a later attempt has begun
        (`StaleAttemptError`).
        """
        return await self._flow.fail(job_id, data, attempt, stage)

    async def aclose(self) -> None:
        if self._flow.opened:
            await self._flow.store.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class BlockingPublisher:
    """The same for sync code, such as a Celery task: it blocks, on the caller's own thread."""

    def __init__(
        self,
        store: LogStore | str,
        *,
        domain: str = "scan",
        shards: int | None = None,
        stages: Stages = STAGES,
        keep: Keep | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._flow = _Flow(store, SYNC, domain, shards, stages, keep, most_bytes)

    def publish(self, job_id: str, stage: str, seq: int, data: Any, attempt: int = 1) -> bool:
        """Say that this has happened: True when it is new, False when it was said before."""
        return run(self._flow.publish(job_id, stage, seq, data, attempt))

    def fail(self, job_id: str, data: Any = None, attempt: int = 1, *, stage: str = "") -> bool:
        """Say that the job has failed, or with `stage` this attempt at it: it ends with this."""
        return run(self._flow.fail(job_id, data, attempt, stage))

    def close(self) -> None:
        if self._flow.opened:
            self._flow.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
