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

Without a number, an event takes the next one of its job and attempt:

    await publisher.publish("job-7", "progress", data={"percent": 40})

Then two calls are two events. Only after an error, the same call of the same publisher repeats the
event: it takes the same number. In the job's stream, automatic numbers grow with each event, also
with several publishers: the log knows the last one. In a shard it does not. There each
publisher adds a random token to the fingerprint of its automatic events, so that a number that
another publisher has taken is answered as a mismatch.

The easy mistake is to go on after `StaleAttemptError`: somebody else does the same work by now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, assert_never

from semel.bus import jobs
from semel.bus.jobs import KEEP_JOB, KEEP_SHARD, Event, Written, named
from semel.bus.numbers import Numbers, highest_in
from semel.bus.stages import FAILED, MOST_SEQ, STAGES, Stages
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

__all__ = ["BlockingPublisher", "OnConflict", "Publisher", "publish_event"]

OnConflict: TypeAlias = Literal["raise", "skip"]
"""What `publish` does with other data under a published number: raise, or return False."""

# Of an event as it is stored. A gateway holds some of them for each of its connections.
MOST_BYTES = 64 * 1024

# A router that runs takes what waits in less; one that does not run is not there at once.
RETRY_S = 1.0

# Appends of one automatically numbered event. Each refusal means that another publisher has the
# number or a larger one.
MOST_TRIES = 64

# No log ends here. An append that expects this offset adds nothing, but tells whether its id is
# known.
NOWHERE = 2**53 - 1


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
        on_conflict: OnConflict,
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
        if on_conflict not in {"raise", "skip"}:
            raise SettingsError(f'on_conflict={on_conflict!r:.80}: "raise" or "skip"')
        self._skips = on_conflict == "skip"
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
        self._numbers = Numbers()

    async def publish(
        self, job_id: str, stage: str, seq: int | None, data: Any, attempt: int
    ) -> bool:
        if seq is None:
            return await self._publish_next(job_id, stage, data, attempt)
        event = jobs.event(self._domain, job_id, stage, seq, data, attempt)
        self._stages.check(event.stage, seq)
        self._count(event)
        return await self._publish(event)

    async def fail(self, job_id: str, data: Any, attempt: int, stage: str) -> bool:
        """Publish the failure. It is not counted, so that a repeat has the same number."""
        seq = self._stages.next_seq(FAILED)
        event = jobs.event(self._domain, job_id, FAILED, seq, data, attempt, stage)
        return await self._publish(replace(event, seq=max(seq, await self._highest(event) + 1)))

    async def _publish(self, event: Event) -> bool:
        answer = await self._append(event, self._written(event))
        if self._skips and isinstance(answer, Mismatch):
            return False
        return _told(answer, event, self._shards)

    def _append(
        self, event: Event, written: Written, rising: Mapping[str, int] | None = None
    ) -> Answering[Answer]:
        if self._shards is None:
            return self._to_its_job(event, written, rising)
        return self._to_a_router(event, written, self._shards)

    # --- automatic numbers ----------------------------------------------------------------------

    @property
    def numbers(self) -> Numbers:
        """The counts of this process: a fork begins its own."""
        if not self._numbers.is_ours:
            self._numbers = Numbers()
        return self._numbers

    def _count(self, event: Event) -> None:
        """Count a number that was given. Without shards, only where counting has begun."""
        if self._shards is None and not self._numbers:
            return
        count = (event.job_id, event.attempt)
        if self._shards is not None or self.numbers.highest(count) is not None:
            self.numbers.saw(count, event.seq)

    async def _highest(self, event: Event) -> int:
        """The highest number of the job, as far as it is known."""
        highest = self.numbers.highest((event.job_id, event.attempt))
        return await self._highest_in_log(event) if highest is None else highest

    async def _highest_in_log(self, event: Event) -> int:
        """The highest number in the job's log; 0 with shards, where the log is in another store."""
        if self._shards is not None:
            return 0
        snapshot = await self._log.load(jobs.stream_of(self._domain, event.job_id))
        return highest_in(snapshot.fields, event.stage, event.attempt)

    async def _highest_taken(self, event: Event) -> int:
        """The highest number that other publishers have taken, where the event's own is taken.

        A shard does not keep it. The search looks for the end of the taken numbers in steps that
        double until a number is free, and are then halved.
        """
        if self._shards is None:
            return await self._highest_in_log(event)
        highest, step = event.seq, 1
        while await self._is_taken(replace(event, seq=highest + step), self._shards):
            highest, step = highest + step, 2 * step
        while step > 1:
            step //= 2
            if await self._is_taken(replace(event, seq=highest + step), self._shards):
                highest += step
        return highest

    async def _is_taken(self, event: Event, shards: int) -> bool:
        """Return whether the shard knows an event of this stage, attempt and number."""
        if event.seq > MOST_SEQ:
            return False
        answer = await self._to_a_router(event, self._written(event), shards, expect=NOWHERE)
        return isinstance(answer, (Repeated, Mismatch))

    async def _publish_next(self, job_id: str, stage: str, data: Any, attempt: int) -> bool:
        event = jobs.event(self._domain, job_id, stage, 0, data, attempt)
        numbers, count = self.numbers, (event.job_id, event.attempt)
        event = replace(event, seq=await self._first_seq(event))
        for _ in range(MOST_TRIES):
            answer = await self._append_as(event, numbers)
            match answer:
                case Mismatch():
                    numbers.saw(count, await self._highest_taken(event))
                    least = event.seq + 1
                case Fenced(name, number) if name == _fence(event):
                    least = number + 1
                case _:
                    if isinstance(answer, Ended) or self._stages.ends(event.stage, event.seq):
                        numbers.forget(count)
                    return _told(answer, event, self._shards)
            event = replace(event, seq=numbers.take(count, least))
        raise BackPressureError(
            f"other publishers have taken {MOST_TRIES} numbers that {named(event)} could have had; "
            f"publish the same again in {RETRY_S:g} s",
            retry_after=RETRY_S,
        )

    async def _first_seq(self, event: Event) -> int:
        """The number of this call when it failed before, or else the next one."""
        numbers, count = self.numbers, (event.job_id, event.attempt)
        least = self._stages.least_seq(event.stage)
        if numbers.has_unsettled:
            seq = numbers.resume(event, self._written(event))
            if seq is not None:
                return seq
        if numbers.highest(count) is None:
            numbers.saw(count, await self._highest_in_log(event))
        return numbers.take(count, least)

    async def _append_as(self, event: Event, numbers: Numbers) -> Answer:
        """Append the event with this publisher's token. If that fails, a repeat gets its number."""
        written, rising = self._written(event), {_fence(event): event.seq}
        try:
            answer = await self._append(event, numbers.signed(written), rising)
        except BaseException:
            numbers.unsettle(event, written)
            raise
        if isinstance(answer, Full):
            numbers.unsettle(event, written)
        return answer

    # --- appending ------------------------------------------------------------------------------

    def _to_its_job(
        self, event: Event, written: Written, rising: Mapping[str, int] | None
    ) -> Answering[Answer]:
        ends = self._stages.ends(event.stage, event.seq)
        return jobs.append(self._log, event, written, ends=ends, keep=self._keep, rising=rising)

    def _to_a_router(
        self, event: Event, written: Written, shards: int, expect: int | None = None
    ) -> Answering[Answer]:
        id = jobs.id_in_shard(event)
        return self._log.append(
            jobs.shard_stream_of(self._domain, jobs.shard_of(event.job_id, shards)),
            written.entry,
            id=id,
            fingerprint=written.fingerprint,
            expect=expect,
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


def _fence(event: Event) -> str:
    """The name under which a job's log knows an attempt's last automatic number.

    It cannot be the fence of a stage, because no stage has a colon in its name.
    """
    return f"seq:{event.attempt}"


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
    `on_conflict="skip"`: `publish` returns False for other data under a published number, and
    raises nothing.
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
        on_conflict: OnConflict = "raise",
    ) -> None:
        self._flow = _Flow(store, ASYNC, domain, shards, stages, keep, most_bytes, on_conflict)

    async def publish(
        self, job_id: str, stage: str, seq: int | None = None, data: Any = None, attempt: int = 1
    ) -> bool:
        """Publish an event: True when it is new, False when it was published before.

        Without `seq` it takes the next number of the job and attempt, and is new each time; only
        the repeat of a call that has failed is the same event.

        `IdempotencyConflictError`: it was published with other data (with `on_conflict="skip"`,
        False). `StaleAttemptError`: a later attempt at the stage has begun. `JobEndedError`: the
        job has ended. `BackPressureError`: publish it again later.
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
        on_conflict: OnConflict = "raise",
    ) -> None:
        self._flow = _Flow(store, SYNC, domain, shards, stages, keep, most_bytes, on_conflict)

    def publish(
        self, job_id: str, stage: str, seq: int | None = None, data: Any = None, attempt: int = 1
    ) -> bool:
        """Publish an event: True when it is new, False when it was published before."""
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


# --- with a client ------------------------------------------------------------------------------

# As in the first table of stages: 50 is an event of `done`, and 51 ends the job.
FINAL_51 = Stages(final=51)


async def publish_event(
    redis: Any,
    domain: str,
    job_id: str,
    stage: str,
    seq: int,
    data: Any,
    *,
    shards: int | None = None,
    stages: Stages = FINAL_51,
) -> bool:
    """Publish an event through a client of `redis.asyncio`, or in a store with a log.

    True: it is new. False: an event of this stage and number is there, with these data or others.
    `shards` and `stages` are those of a `Publisher`. By default a job ends with the first event of
    `done` from number 51 on.
    """
    publisher = Publisher(
        _store_of(redis), domain=domain, shards=shards, stages=stages, on_conflict="skip"
    )
    return await publisher.publish(job_id, stage, seq, data)


def _store_of(client: Any) -> LogStore:
    """The store over a client: one, an attribute of the client, so that it lives as long.

    A `WeakKeyDictionary` would never drop it, because the store refers to the client.
    """
    if isinstance(client, LogStore):
        return client
    if isinstance(client, str):
        raise SettingsError(
            "publish_event takes a client, Redis.from_url(...) of redis.asyncio, or a store; with "
            "a URL it would connect for each event: keep a Publisher(url) instead"
        )
    store: LogStore | None = getattr(client, _STORE, None)
    if store is None:
        from semel.stores import RedisStore

        store = RedisStore(client)
        setattr(client, _STORE, store)
    return store


_STORE = "_semel_store"
