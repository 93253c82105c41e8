"""The words of the house, as values.

A `Key` names an effect. A `Claim` is the right to perform it, until its lease runs out. Every
verb of a ledger answers with one of the values below, to be matched exhaustively; an exception
means that the store itself failed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, dataclass_transform

__all__ = [
    "Answer",
    "Busy",
    "Claim",
    "Done",
    "Guarantees",
    "Kept",
    "Key",
    "Kind",
    "Lost",
    "Mismatch",
    "Orphan",
    "Outcome",
    "Past",
    "Record",
    "State",
    "Survives",
    "Terms",
    "Verdict",
    "Won",
    "value",
]

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: type[T]) -> type[T]:
    """A dataclass that nobody changes: type checkers refuse it, and at run time nothing does.

    A truly frozen dataclass takes four times as long to make, and a guarded call makes seven.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@value
class Key:
    """What is to happen once: a tenant's key, for one operation.

    `id` is the identity, a 32-byte hash of tenant and key; two keys are the same record exactly
    when their ids are equal. `text` and `tenant` are for people. `operation` is compared, not
    part of the identity (unless the guard says `per_operation=True`).
    """

    id: bytes
    text: str
    tenant: str = ""
    operation: str = ""
    _write: Callable[[], str] = field(init=False, repr=False, compare=False)

    @classmethod
    def described(cls, id: bytes, tenant: str, operation: str, write: Callable[[], str]) -> Key:
        """Make a key whose text is written by `write()` when it is first read.

        Most replays never read it, and writing it costs more than claiming the key in memory.
        """
        key: Any = object.__new__(cls)  # without __init__, which would set the text
        key.id, key.tenant, key.operation = id, tenant, operation
        key._write = write  # noqa: SLF001
        return cast("Key", key)

    if not TYPE_CHECKING:  # a checker would accept every attribute

        def __getattr__(self, name: str) -> str:
            """Write `text`; Python calls this only while the attribute is not set."""
            if name != "text":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self.text = self._write()
            return self.text


@value
class Terms:
    """How a claim is held. Durations are seconds.

    `lease_s`: how long a silent holder keeps the key. `ttl_s`: how long a finished record is
    kept, None for ever. `takeover`: may this claim take over from a holder whose lease ran out?
    `hold`: does the record stay until its outcome is known, however long that takes? A record
    claimed with `hold` is never taken over by a claim without it.
    """

    lease_s: float = 30.0
    ttl_s: float | None = 86_400.0
    takeover: bool = True
    hold: bool = False


@value
class Claim:
    """The right to perform an effect, and to record how it ended.

    `attempt` is the random id of this try, `holder/random`. `fence` grows with every new holder
    of the key, over release, expiry, sweep and failover. `number` counts the tries, from 1.
    A `fence` of 0 means "whatever fence this attempt got": a caller that was cut off in the
    middle of claiming releases by attempt.
    """

    key: Key
    attempt: str
    fingerprint: bytes
    terms: Terms
    fence: int = 0
    number: int = 1


Kind: TypeAlias = Literal["value", "error", "lost"]


@value
class Outcome:
    """How it ended: a value, an error, or a result that happened but could not be stored.

    `data` is what the codec made of it and comes back to the byte. `status` is the HTTP status
    where there is one.
    """

    kind: Kind
    data: bytes
    status: int | None = None


@value
class Orphan:
    """The holder's lease ran out at `since` and nobody knows how it ended. Nothing was changed."""

    fence: int
    since: datetime


@value
class Won:
    """Run it. `steps` are the recovery points that earlier attempts recorded.

    `orphan` is set when this claim took over from a holder that vanished.
    """

    claim: Claim
    steps: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    orphan: Orphan | None = None


@value
class Done:
    """It happened: replay."""

    outcome: Outcome
    fence: int = 0


@value
class Busy:
    """Somebody holds a live lease, for `left_s` more seconds by the store's clock."""

    left_s: float


@value
class Mismatch:
    """The key was used for another operation, or with another fingerprint."""

    what: Literal["operation", "fingerprint"]


Answer: TypeAlias = Won | Done | Busy | Mismatch | Orphan


@value
class Kept:
    """The claim was the current one, and the change is stored."""


@value
class Lost:
    """The claim was not the current one, and nothing was changed.

    `outcome` is what somebody else recorded for the same operation and fingerprint, if anything.
    """

    outcome: Outcome | None = None


Verdict: TypeAlias = Kept | Lost


class State(enum.StrEnum):
    """The state of a record as people see it."""

    PENDING = "PENDING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    UNKNOWN = "UNKNOWN"


@value
class Past:
    """An attempt that is over: who, when, and how it ended."""

    number: int
    fence: int
    attempt: str
    started_at: datetime
    ended_at: datetime
    ending: str


@value
class Record:
    """A key's whole story, for people.

    `seen_at` is when the store looked, by its own clock: the one that its leases count by.
    """

    key: Key
    state: State
    fingerprint: bytes
    attempt: str
    number: int
    fence: int
    held: bool
    created_at: datetime
    started_at: datetime
    lease_until: datetime
    seen_at: datetime
    completed_at: datetime | None = None
    expires_at: datetime | None = None
    outcome: Outcome | None = None
    error: str | None = None
    steps: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    past: tuple[Past, ...] = ()

    @property
    def holder(self) -> str:
        """Host and process of the last attempt. A row that another program wrote names none."""
        return self.attempt.rpartition("/")[0] or "another program"


Survives: TypeAlias = Literal["process_crash", "power_loss", "failover"]


@value
class Guarantees:
    """What a store's answers survive, as configured right now, and why.

    `shared` says whether other processes see the same records.
    """

    store: str
    survives: frozenset[Survives]
    shared: bool
    why: tuple[str, ...] = ()
