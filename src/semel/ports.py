"""The seams. What a store promises, one sentence per clause.

Every verb is awaited. A ledger of the sync colour never suspends: its coroutines run to the
end on the caller's thread when driven (see `colour`). A ledger of the async colour awaits a
native driver. A store hands out one ledger per colour.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from semel.colour import Colour
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


class Bell(Protocol):
    """Says "look now". May be lost, may be spurious, carries nothing."""

    def ring(self, id: bytes) -> None:
        """Wake whoever waits for this id."""
        ...


class Clock(Protocol):
    """The time of a store that has no server: microseconds since 1970, injected in tests."""

    def now_us(self) -> int: ...
