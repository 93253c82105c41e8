"""The seams. What a store promises, one sentence per clause.

Every verb is awaited. A ledger of the sync colour never suspends: its coroutines run to the
end on the caller's thread when driven (see `colour`). A ledger of the async colour awaits a
native driver. A store hands out one ledger per colour.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from semel.colour import Colour
from semel.entries import Answer as AppendAnswer
from semel.entries import Keep, Page, Position, Snapshot, StateChange
from semel.messages import (
    Audit,
    Backlog,
    Batch,
    Delivery,
    Ending,
    Features,
    Message,
    ParkedMessage,
    ParkedSequence,
    Receipt,
    Settled,
    Settlement,
    Tail,
)
from semel.values import (
    Answer,
    Claim,
    Guarantees,
    Key,
    Outcome,
    Record,
    State,
    Terms,
    Verdict,
)

T = TypeVar("T")

# Whatever `async def` makes; a verb may also be a plain function that hands one on.
Answering: TypeAlias = Coroutine[Any, Any, T]

KEEP = Keep()


class Ledger(Protocol):
    """Remembers what has been done.

    At most one live claim exists per key. A stale claim can change nothing. Every verb is one
    atomic call that may be repeated: a repeat after a lost reply gets the first answer. Time is
    the store's own clock. A store that cannot answer raises `StoreUnavailableError`; it never
    guesses.
    """

    def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answering[Answer]:
        """Ask for the right to run.

        `Won` when nobody has it, when the last attempt failed, or when its holder's lease ran
        out and `terms.takeover` allows it; the same attempt asking again gets its own `Won`.
        `Mismatch` comes before every other answer. A doubled request that arrives after its own
        attempt was released or given up is `Busy(0.0)`: it must not claim for nobody. A fence is
        larger than every earlier one of the key: max(previous + 1, the store's clock in
        microseconds).
        """
        ...

    def complete(self, claim: Claim, outcome: Outcome) -> Answering[Verdict]:
        """Record how it ended, and keep that for `claim.terms.ttl_s`.

        A late completion under the current fence counts. Repeating it with the same outcome is
        `Kept`; with another one it is `Lost` with the recorded outcome.
        """
        ...

    def release(self, claim: Claim, *, error: str | None = None) -> Answering[Verdict]:
        """Give the claim up as failed: it can be claimed again at once; its steps are kept."""
        ...

    def renew(self, claim: Claim, *, lease_s: float | None = None) -> Answering[Verdict]:
        """Extend the lease by `claim.terms.lease_s` from now, or by `lease_s`.

        `lease_s=0` ends the lease at once and leaves the outcome unknown. From then on this
        attempt can still say how it ended, and nothing else: it is not renewed any more.
        """
        ...

    def note(self, claim: Claim, name: str, data: bytes) -> Answering[Verdict]:
        """Record a step, and extend the lease."""
        ...

    async def sweep(self, limit: int = 1000) -> int:
        """Delete at most `limit` expired records; never a live or a held one. Returns the count."""
        ...


class Inspect(Protocol):
    """Looks into a ledger and settles what it cannot settle by itself."""

    async def look(self, id: bytes) -> Record | None:
        """The record with this identity, expired ones excluded."""
        ...

    async def records(
        self,
        *,
        tenant: str | None = None,
        operation: str | None = None,
        state: State | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[Record]:
        """At most `limit` records in the order of their ids, beginning behind `after`."""
        ...

    async def resolve(
        self, id: bytes, *, fence: int, outcome: Outcome | None, ttl_s: float | None
    ) -> bool:
        """Settle a record whose lease has run out: with an outcome, or None to let it run again.

        The record's past tells of it. False, and nothing changed, when the fence is not the
        current one, when the lease is live, or when an outcome is recorded already.
        """
        ...

    async def forget(self, id: bytes, *, force: bool = False) -> bool:
        """Delete a record. False when there is none, or its lease is live and not `force`."""
        ...

    async def guarantees(self) -> Guarantees:
        """What the store's answers survive, read from the live server's settings."""
        ...


class StoreLedger(Ledger, Inspect, Protocol):
    """What a store hands out for one colour."""


@runtime_checkable
class Store(Protocol):
    """A place where records live. Stores carry no settings of any guard and may be shared."""

    def ledger(self, colour: Colour) -> StoreLedger:
        """The ledger for this colour; `SettingsError` when the store cannot serve it."""
        ...

    def close(self) -> None:
        """Let go of what the sync colour holds."""
        ...

    async def aclose(self) -> None:
        """Let go of what both colours hold."""
        ...


# --- brokers ------------------------------------------------------------------------------------


class Consumer(Protocol):
    """One owner's view of one shard of a topic, for one group.

    Messages come in the order of their positions. What was handed out is pending until it is
    acknowledged; acknowledging twice, or what is no longer pending, changes nothing.
    """

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        """What earlier owners were handed and did not finish, in order; this owner's from now on.

        Asked until it is empty, before anything new is read. `count` tells how often each was
        handed out before.
        """
        ...

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        """New messages, at most `limit`; waits up to `wait_s` for the first. May be empty.

        A former owner is handed nothing. One whose place another consumer with the same fence has
        taken, by a request that came late, hears of it by `BrokerUnavailableError`, and opens anew.
        """
        ...

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        """What somebody outside our leases was handed longer than `idle_s` ago; ours from now on.

        Paged: each call looks further. Empty when all was looked at, and begins anew then. Empty
        where a broker hands such messages out by itself.
        """
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None: ...

    async def close(self) -> None:
        """Hand back what was read and not acknowledged, so that the next owner gets it first."""
        ...


class Broker(Protocol):
    """Carries messages from a relay to groups of consumers, in `shards` shards per topic.

    At least once: a message that was `Taken` is delivered to every group that was there. A broker
    that cannot be reached, or did not confirm, raises `BrokerUnavailableError`: whether the batch
    is there is not known, and publishing it again is right.
    """

    features: Features
    shards: int

    async def publish(self, batch: Batch) -> Receipt:
        """Append the batch: all of it, unless the receipt says otherwise."""
        ...

    async def tail(self, topic: str, shard: int) -> Tail | None:
        """The last message there; None where the broker cannot tell."""
        ...

    async def join(self, topic: str, group: str) -> None:
        """Make the group known for every shard of the topic: from now on nothing is lost to it.

        A group that is new begins with the oldest message there is.
        """
        ...

    async def consumer(
        self, topic: str, group: str, shard: int, *, name: str, fence: int
    ) -> Consumer:
        """A view for the shard's owner. `name` tells people who it is.

        Where the broker can, a consumer with a smaller fence than the last one reads nothing more.
        """
        ...

    async def backlog(self, topic: str, shard: int) -> Backlog:
        """What lies there, for people and for back-pressure."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class TellsShards(Protocol):
    """A broker that remembers in how many shards a topic is published.

    For one in which a reader with another number would find nothing, and nobody would notice.
    """

    async def published_shards(self, topic: str) -> int | None:
        """As of the last owner of a shard who began to publish; None where nobody has said."""
        ...


# --- effects ------------------------------------------------------------------------------------

Handle: TypeAlias = Callable[[Message, Any], Awaitable[None] | None]
"""What a message is to do: called with the message and the inbox's session, None without one.

It may have a method `colour(message)` that says "sync" or "async". An inbox with sessions calls a
sync one in a thread, with a sync session, and it gives back nothing to await. It may have a method
`outside(message)` that says whether the effect is elsewhere, and may be repeated: then the inbox
keeps no transaction open for it, and gives it no session.
"""


class Inbox(Protocol):
    """Remembers, beside the effects themselves, which messages have had theirs.

    For each (consumer, sequence), where a sequence is a tenant, topic and aggregate, one number:
    the last `seq` that had its effect. For each message without a number, its id. And whatever
    waits, in the order of its sequence. `consumer` is the group's name.
    """

    async def apply(
        self,
        consumer: str,
        messages: Sequence[Message],
        handle: Handle,
        *,
        singly: bool = False,
    ) -> Sequence[Ending]:
        """Let each message that has not had its effect have it now, in order; then tell.

        Effect and memory are committed together. When this returns, every message may be
        acknowledged. A message that fails waits for another try, and its sequence behind it; the
        others have their effects. `singly`: the messages were begun before and not finished, so
        each has a transaction of its own, and is counted before it begins: one that ends the
        process three times is parked (`crash`).

        An outage (of the inbox's own store, or a handler that raised `StoreUnavailableError`)
        raises, and nothing is counted against any message.
        """
        ...

    async def retry(
        self, consumer: str, slots: tuple[int, int], handle: Handle
    ) -> Sequence[tuple[Message, Ending]]:
        """Run what waits and is due, of sequences from the first to the last of these slots.

        A sequence is drained in order, until one of it fails again, or enough was run for one
        call: the rest is due at once. Returns what was run; empty when nothing was due.
        """
        ...

    async def baseline(self, consumer: str, topic: str) -> None:
        """Say that this consumer begins with whatever comes first in each sequence of the topic."""
        ...

    async def sweep(self, *, older_than_s: float | None = None, limit: int = 1000) -> int:
        """Forget ids of messages without a number that are older than this, or than `retention_s`.

        Returns how many; fewer than `limit` when no more are.
        """
        ...


class ParkedStore(Protocol):
    """What waits in an inbox, for people. Every verb is one transaction."""

    async def sequences(
        self,
        *,
        consumer: str | None = None,
        topic: str | None = None,
        tenant: str | None = None,
        state: Literal["waiting", "parked"] | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[ParkedSequence]:
        """At most `limit` sequences that wait, by identity, beginning behind `after`.

        `state` is that of the first message.
        """
        ...

    async def waiting(
        self, sequence: bytes, *, limit: int = 1000, after: int = 0
    ) -> Sequence[ParkedMessage]:
        """The messages of a sequence that wait, in order, with a number larger than `after`.

        A message without a number waits alone, and is always told.
        """
        ...

    async def settle(
        self,
        sequence: bytes,
        settlement: Settlement,
        *,
        who: str,
        note: str = "",
        dry_run: bool = False,
    ) -> Settled:
        """Make the settlement, and keep that it was made; with `dry_run`, change nothing.

        `SettingsError` when it cannot be made, or what it is about does not wait any more.
        """
        ...

    async def audit(self, *, sequence: bytes | None = None, limit: int = 100) -> Sequence[Audit]:
        """The last settlements that were made, the newest first."""
        ...


# --- logs ---------------------------------------------------------------------------------------


class Log(Protocol):
    """Remembers what has happened, in order, in streams that know nothing of one another.

    Offsets of a stream are 1, 2, 3, and become visible in that order. Every verb is one atomic
    call that may be repeated. Time is the store's own clock. A store that cannot answer raises
    `StoreUnavailableError`; it never guesses.
    """

    def append(
        self,
        stream: str,
        data: bytes | None,
        *,
        id: str,
        fingerprint: bytes | None = None,
        fences: Mapping[str, int] | None = None,
        rising: Mapping[str, int] | None = None,
        expect: int | Position | None = None,
        state: StateChange | None = None,
        reply: bytes = b"",
        ends: bool = False,
        keep: Keep = KEEP,
        seal: bytes | None = None,
    ) -> Answering[AppendAnswer]:
        """Add an entry, change the state, keep the reply and ring the bell: all of it, or nothing.

        The first of these that holds is the answer. The id is known: `Repeated`, or `Mismatch`
        when the fingerprint is another one (by default, that of `data`). A name in `fences` has a
        larger number already, or one in `rising` a larger or the same: `Fenced`. The stream has
        ended: `Ended`. It does not end at `expect`, an offset, or a position, which stands for the
        history, too: `VersionConflict`. It holds `keep.full` entries: `Full`. Otherwise `Appended`.

        Without `data` the id and the reply are kept, and there is no entry. `ends`: this is the
        last entry. A position stands for the id and the fingerprint of its entry, and for `seal`:
        whoever may say the same with another content says by it which one this is.
        """
        ...

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        """What follows a position, at most `limit` entries; None is before the first.

        As long as nothing was trimmed, None and `beginning(stream)` are the same. Afterwards None
        is `lost` like any position that is too old.
        """
        ...

    async def load(self, stream: str) -> Snapshot:
        """The state, and the position it belongs to."""
        ...

    async def trim(self, stream: str, upto: int | Position) -> int:
        """Forget the entries up to this offset; how many there were. Readers there are not lost.

        A position that is not this log's trims nothing: what stands there now is not what somebody
        has read before a failover.
        """
        ...

    async def heads(self, streams: Sequence[str]) -> Sequence[Position]:
        """Where each of the streams ends, in their order: cheap, for thousands at a time."""
        ...

    async def sweep(self, limit: int = 1000) -> int:
        """Delete what is left of at most `limit` streams that nobody can read. Returns the count.

        Appending does so, too, a few at a time.
        """
        ...


class Bell(Protocol):
    """Says "look now". May be lost, may be spurious, carries nothing.

    A log rings for a stream when something was appended to it, in whichever process.
    """

    async def listen(self, stream: str, wake: Callable[[], None]) -> None:
        """From when this returns, `wake` is called, on this loop, when the stream's bell rings.

        A bell that was deaf for a while calls it, too. Cannot fail: one that hears nothing now
        goes on trying.
        """
        ...

    async def leave(self, stream: str, wake: Callable[[], None]) -> None:
        """Do not call it any more."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class LogStore(Store, Protocol):
    """A store that has a log and a bell besides its ledger."""

    def log(self, colour: Colour) -> Log:
        """The log for this colour; `SettingsError` when the store cannot serve it."""
        ...

    def bell(self) -> Bell:
        """A bell for the running event loop, to be closed by whoever asked for it."""
        ...


class Clock(Protocol):
    """The time of a store that has no server: microseconds since 1970, injected in tests."""

    def now_us(self) -> int: ...
