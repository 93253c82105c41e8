"""The inbox on Redis, for handlers whose effect is in no SQL database.

    inbox = RedisInbox("redis://localhost:6379/0")
    worker = Worker(broker, "billing", inbox)

There is no transaction around an effect and its memory here. A message is begun, which keeps others
off it for as long as a lease lasts and is renewed; it has its effect; and then, in one call, that
is remembered and what waits behind it may run. Only what *ended well* is passed over when it comes
again: a message whose worker died in the middle is run again, and so its effect may happen twice.
Hand the message's id to whoever can tell two requests with the same id from one.

The easy mistake is to remember first and act afterwards (`SET NX`, then the effect): a crash in
between loses the effect, and a second worker that finds the key acknowledges what the first one has
yet to fail at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence
from typing import Any

from semel.colour import ASYNC, Timer, in_own_task
from semel.errors import CorruptRecordError, SemelError, SettingsError, StoreUnavailableError
from semel.keys import new_attempt
from semel.messages import SLOTS, Applied, Ending, Held, Message, Seen
from semel.ports import Handle
from semel.stores import inbox_rules as rules
from semel.stores.inbox_rules import Failure, Retry
from semel.stores.redis import RedisStore
from semel.stores.redis import inbox_words as words
from semel.stores.redis.inbox_parked import Parked
from semel.stores.redis.inbox_words import Place
from semel.stores.redis.line import Line
from semel.stores.redis.scripts import SENSELESS, Call, text
from semel.stores.redis.way import way_to
from semel.stores.rules import micros

__all__ = ["RedisInbox"]

log = logging.getLogger("semel")

LEASE_S = 10.0

# As for a guarded call: two renewals in a row may fail before the lease is at risk.
RENEWALS_PER_LEASE = 3

# A message that somebody else runs is asked for again so often, and for so many leases.
POLL_S = 0.25
PATIENCE = 2

# Sequences of one slot that one call of `retry` looks at.
DUE_AT_ONCE = 100


class RedisInbox(Parked):
    """Marks, and what waits, in Redis: a single server, behind Sentinel, or a cluster.

    `lease_s` is how long a message stays with a worker that is silent. `retention_s`: for how long
    a message without a number is remembered; one with a number needs no such limit. Given a client
    of redis.asyncio, it is left open.
    """

    def __init__(
        self,
        client_or_url: Any,
        *,
        namespace: str = "default",
        retry: Retry | None = None,
        retention_s: float = rules.RETENTION_S,
        lease_s: float = LEASE_S,
        timeout_s: float = 5.0,
    ) -> None:
        if lease_s <= 0 or retention_s <= 0:
            raise SettingsError("lease_s and retention_s must be more than zero")
        way = way_to(client_or_url, timeout_s, "RedisInbox")
        if "async" not in way.lines:
            raise SettingsError(
                "RedisInbox is used by async code and was given a client for sync code: give it a "
                "URL, RedisInbox('redis://localhost:6379/0'), or a redis.asyncio.Redis client"
            )
        self.store = RedisStore(client_or_url, namespace=namespace, timeout_s=timeout_s)
        """For whoever needs a store beside the inbox, such as a worker."""
        super().__init__(way.lines["async"], namespace, retention_s)
        self.rules = retry or Retry()
        self.lease_s = lease_s
        self._way = way

    async def aclose(self) -> None:
        await self._way.aclose()
        await self.store.aclose()

    def __repr__(self) -> str:
        return f"RedisInbox({self._way.shown!r})"

    # --- what comes, and what waits ---------------------------------------------------------

    async def apply(
        self, consumer: str, messages: Sequence[Message], handle: Handle, *, singly: bool = False
    ) -> Sequence[Ending]:
        return await _Pass(self, consumer, handle, counted=singly).over(messages)

    async def retry(
        self, consumer: str, slots: tuple[int, int], handle: Handle
    ) -> Sequence[tuple[Message, Ending]]:
        places = [Place(self.namespace, consumer, slot) for slot in range(slots[0], slots[1] + 1)]
        asked = [place.call_all(words.DUE, b"due", DUE_AT_ONCE) for place in places]
        found = await self.line().calls(asked)
        due = [(place, id) for place, ids in zip(places, found, strict=True) for id in ids]
        ran: list[tuple[Message, Ending]] = []
        running = _Pass(self, consumer, handle, counted=True)
        for place, id in due:
            await running.through_what_waits(place, id, ran)
        return ran

    async def baseline(self, consumer: str, topic: str) -> None:
        places = [Place(self.namespace, consumer, slot) for slot in range(SLOTS)]
        asked = [place.call_all(words.BASELINE, b"begins", topic) for place in places]
        await self.line().calls(asked)

    async def sweep(self, *, older_than_s: float | None = None, limit: int = 1000) -> int:
        """By itself, Redis forgets what is older than `retention_s`: only less is swept here."""
        if older_than_s is None or older_than_s >= self.retention_s:
            return 0
        return await self.forget(older_than_s, limit)


class _Pass:
    """One call of `apply` or `retry`: its messages one after the other, under one attempt."""

    def __init__(self, inbox: RedisInbox, consumer: str, handle: Handle, *, counted: bool) -> None:
        self._inbox = inbox
        self._consumer = consumer
        self._handle = handle
        self._counted = b"1" if counted else b"0"
        self._attempt = new_attempt()
        self._lease_us = micros(inbox.lease_s)
        self._kept_ms = round(inbox.retention_s * 1000) + 1
        self._waits_until = 0.0

    @property
    def _line(self) -> Line:
        return self._inbox.line()

    # --- messages that come -----------------------------------------------------------------

    async def over(self, messages: Sequence[Message]) -> Sequence[Ending]:
        endings: list[Ending] = []
        begun: list[Any] | None = None
        for at, message in enumerate(messages, 1):
            following = self._apart(message, messages[at]) if at < len(messages) else None
            ending: Ending | None = None
            self._waits_until = ASYNC.now() + PATIENCE * self._inbox.lease_s
            while ending is None:
                found: list[Any] = begun or await self._line.call(self._beginning(message))
                ending, begun = await self._one(message, found, following)
            endings.append(ending)
        return endings

    def _apart(self, message: Message, following: Message) -> Message | None:
        """The following one, if what becomes of it does not depend on the message.

        Two calls that are sent together may change places: a server that does not know a script
        yet is asked again.
        """
        return None if self._place(message)[1] == self._place(following)[1] else following

    async def _one(
        self, message: Message, begun: Sequence[Any], following: Message | None
    ) -> tuple[Ending | None, list[Any] | None]:
        """How the message ended, None to ask again; and what was said of the following one."""
        failure: Failure | None = None
        match begun[0]:
            case b"run":
                failure = await self._run(message, 1)
            case b"crashed":
                failure = self._inbox.rules.crashed()
            case b"seen":
                return Seen(), None
            case b"there":
                return Held("behind"), None
            case b"held":
                return Held(begun[1].decode()), None
            case b"wait":
                return None, await self._line.call(self._beginning(message, words.written(message)))
            case b"busy":
                await self._others(message, begun[1] / 1e6)
                return None, None
            case unknown:
                raise ValueError(f"Redis answered {unknown!r} to begin a message")
        return await self._recorded(message, failure, following)

    def _beginning(self, message: Message, *document: bytes) -> Call:
        place, id = self._place(message)
        return place.call(
            words.BEGIN,
            id,
            rules.number_of(message),
            self._attempt,
            self._lease_us,
            self._counted,
            self._inbox.rules.crashes,
            message.topic,
            self._kept_ms,
            *document,
        )

    def _place(self, message: Message) -> tuple[Place, bytes]:
        id, slot = rules.sequence_of(self._consumer, message)
        return Place(self._inbox.namespace, self._consumer, slot), id

    async def _others(self, message: Message, left_s: float) -> None:
        """Somebody else runs it; nobody knows how that will end, so it may not be acknowledged."""
        if ASYNC.now() >= self._waits_until:
            raise StoreUnavailableError(
                f"event {message.id} ({message.type}) is being handled by another worker, which "
                "goes on for long; it is asked for again"
            )
        await ASYNC.sleep(min(POLL_S, left_s + 0.001))

    # --- running ----------------------------------------------------------------------------

    async def _run(self, message: Message, attempts: int) -> Failure | None:
        place, id = self._place(message)
        lease = _Lease(self._inbox, place, id, self._attempt, self._lease_us)
        try:
            result = self._handle(message, None)
            if result is not None:
                await (in_own_task(result) if self._counted == b"1" else result)
        except Exception as error:
            if rules.is_outage(error):
                await lease.release()
                raise rules.outage(message, error) from error
            return self._inbox.rules.failed(error, attempts)
        except asyncio.CancelledError:  # and no other: a process that dies ends nothing
            await ASYNC.shield(lease.release())
            raise
        finally:
            lease.end()
        return None

    async def _recorded(
        self,
        message: Message,
        failure: Failure | None,
        following: Message | None,
        meta: bytes = b"",
    ) -> tuple[Ending | None, list[Any] | None]:
        """Remember how it ended and begin the next one, in one round trip."""
        asked = [self._recording(message, failure, meta)]
        if following is not None:
            asked.append(self._beginning(following))
        try:
            said: list[Any] = await asyncio.gather(
                *map(self._line.call, asked), return_exceptions=True
            )
        except asyncio.CancelledError:
            # It has had its effect, or failed. Remembered twice is remembered once.
            await ASYNC.shield(_quietly(self._line.call(asked[0])))
            raise
        if failed := next((each for each in said if isinstance(each, BaseException)), None):
            if following is not None and said[1] == [b"run"]:
                await _Lease(self._inbox, *self._place(following), self._attempt, 0).release()
            raise failed
        verdict, *begun = said
        ending = self._ending(message, failure, verdict[0])
        return ending, None if ending is None else next(iter(begun), None)

    def _recording(self, message: Message, failure: Failure | None, meta: bytes) -> Call:
        place, id = self._place(message)
        number = rules.number_of(message)
        if failure is None:
            return place.call(words.APPLY, id, number, self._attempt, meta, self._kept_ms)
        delay_s = failure.delay_s
        return place.call(
            words.FAIL,
            id,
            number,
            self._attempt,
            meta,
            failure.why,
            failure.attempts,
            text(failure.error),
            b"" if delay_s is None else micros(delay_s),
            words.written(message),
        )

    def _ending(self, message: Message, failure: Failure | None, verdict: bytes) -> Ending | None:
        match verdict:
            case b"kept":
                return Applied() if failure is None else Held(failure.why, failure.error)
            case b"seen":
                return Seen()
            case b"changed":
                return None
            case b"lost":
                log.warning(
                    "semel: event %s was taken over while it ran here for longer than its lease; "
                    "its effect may happen twice",
                    message.id,
                )
                return None
        raise ValueError(f"Redis answered {verdict!r} to the end of a message")

    # --- messages that wait -----------------------------------------------------------------

    async def through_what_waits(
        self, place: Place, id: bytes, ran: list[tuple[Message, Ending]]
    ) -> None:
        """Run a sequence from its first message on, until one of it is not due."""
        crashes = self._inbox.rules.crashes
        asking = place.call(words.HEAD, id, self._attempt, self._lease_us, crashes)
        while len(ran) < rules.MOST_RETRIED:
            what, *said = await self._line.call(asking)
            match what:
                case b"run" | b"crashed":
                    ended = await self._again(id, what, said)
                    ran += [] if ended is None else [ended]
                case b"drop":
                    ran.append((words.message_in(said[0]), Seen()))
                case b"gap":
                    continue
                case _:
                    return

    async def _again(
        self, id: bytes, what: bytes, said: Sequence[Any]
    ) -> tuple[Message, Ending] | None:
        try:
            row = words.row_of(id, self._consumer, *said[1:])
        except SENSELESS as error:
            raise CorruptRecordError(f"what waits in {id.hex()} cannot be read: {error}") from error
        if what == b"run":
            failure = await self._run(row.message, row.attempts + 1)
        else:
            failure = self._inbox.rules.crashed()
        ending, _ = await self._recorded(row.message, failure, None, said[2])
        return None if ending is None else (row.message, ending)


class _Lease:
    """Keeps others off a message while it runs."""

    def __init__(
        self, inbox: RedisInbox, place: Place, id: bytes, attempt: str, lease_us: int
    ) -> None:
        self._inbox = inbox
        self._place = place
        self._id = id
        self._attempt = attempt
        self._lease_us = lease_us
        self._timer: Timer | None = None
        self._ended = False
        self._set()

    def _set(self) -> None:
        if not self._ended:
            pause_s = self._inbox.lease_s / RENEWALS_PER_LEASE
            self._timer = ASYNC.later(pause_s, self._renew)

    async def _renew(self) -> None:
        if self._ended:
            return
        renewing = self._place.call(words.RENEW, self._id, self._attempt, self._lease_us)
        with contextlib.suppress(SemelError):  # it may still be ours: only Redis can tell
            if not await self._inbox.line().call(renewing):
                return
        self._set()

    def end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    async def release(self) -> None:
        """A courtesy: a lease that is not released runs out."""
        self.end()
        releasing = self._place.call(words.RELEASE, self._id, self._attempt)
        await _quietly(self._inbox.line().call(releasing))


async def _quietly(work: Awaitable[Any]) -> None:
    with contextlib.suppress(SemelError):
        await work
