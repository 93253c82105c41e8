"""What travels from an outbox to the effects it has, and what brokers and inboxes answer.

A `Message` is an event on its way. A `Batch` of them is published to one shard of a topic and gets
a receipt; a `Delivery` is a message that a consumer was handed; an `Ending` says what became of it.
All are to be matched exhaustively; an exception means that the broker or the store itself failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from semel.values import value

__all__ = [
    "SLOTS",
    "Applied",
    "Audit",
    "Backlog",
    "Batch",
    "Behind",
    "Delivery",
    "Edit",
    "Ending",
    "Features",
    "Fenced",
    "Forked",
    "Full",
    "GroupBacklog",
    "Held",
    "Message",
    "ParkedMessage",
    "ParkedSequence",
    "Receipt",
    "Refused",
    "Replay",
    "Seen",
    "Settled",
    "Settlement",
    "Skip",
    "Tail",
    "Taken",
    "Why",
    "shard_of",
    "slots_of",
]

SLOTS = 256
"""The slots an outbox row can be in: the first byte of its aggregate's identity."""

CANARY = "semel.canary."
"""How the topics of `semel doctor` begin."""


def shard_of(slot: int, shards: int) -> int:
    """Which of so many shards a slot belongs to. Neighbouring slots stay together."""
    return slot * shards // SLOTS


def slots_of(shard: int, shards: int) -> tuple[int, int]:
    """The first and the last slot of a shard."""
    return -(-shard * SLOTS // shards), -(-(shard + 1) * SLOTS // shards) - 1


# --- on the way ---------------------------------------------------------------------------------


@value
class Message:
    """An event on its way.

    `position` is its place in its shard: it grows, and never belongs to another event. `seq` is
    its number within tenant, topic and aggregate, without gaps; None when nobody asked for order.
    `payload` is JSON, to the byte as it was written.

    `refused` says why a broker would not have it. Then this is a stand-in: the same in all else,
    with `null` for its payload.
    """

    position: int
    id: str
    type: str
    topic: str
    tenant: str
    aggregate_type: str
    aggregate_id: str
    seq: int | None
    payload: str
    time: datetime
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    source: str = ""
    refused: str = ""

    @property
    def data(self) -> Any:
        """The payload as Python values."""
        import json

        return json.loads(self.payload)


# --- publishing ---------------------------------------------------------------------------------


@value
class Tail:
    """The last message of a shard of a topic; position 0 and no id where there is none."""

    position: int = 0
    id: str = ""


@value
class Batch:
    """Messages for one shard of one topic, by position, from the shard's owner.

    `follows` is the last message that the owner believes to be there.
    """

    topic: str
    shard: int
    fence: int
    follows: Tail
    messages: Sequence[Message]


@value
class Taken:
    """All messages of the batch are there; `added` of them came by this call."""

    added: int


@value
class Behind:
    """The broker ends before what the batch follows: it has lost its tail. Nothing was added."""

    tail: Tail


@value
class Full:
    """Readers are too far behind. Nothing was added; ask again later. `why` is for people."""

    length: int
    why: str


@value
class Fenced:
    """A later owner of the shard has published already. Nothing was added."""

    fence: int


@value
class Forked:
    """At `tail` the broker has another event than the outbox, or none. Nothing was added.

    One of the two was brought back from an older copy; people have to say which is right.
    """

    tail: Tail


@value
class Refused:
    """The broker does not want this very message, however often it is asked.

    Those before it in the batch were added, those behind it were not.
    """

    message: Message
    why: str


Receipt: TypeAlias = Taken | Behind | Full | Fenced | Forked | Refused


@value
class Features:
    """What a broker promises, so that nobody has to guess.

    `fenced`: a batch of a former owner is refused. `dedups`: a message published twice is there
    once: always, for a time, or never. `heals`: it knows its tail, so that a lost one is noticed.
    `bounded`: it trims what every group has read, and says `Full` instead of losing what is
    unread. `leases`: one reader per shard and group is seen to by our leases; otherwise the
    broker does it.
    """

    fenced: bool
    dedups: Literal["exact", "window", "none"]
    heals: bool
    bounded: bool
    leases: bool = True


# --- consuming ----------------------------------------------------------------------------------


@value
class Delivery:
    """A message that a consumer was handed, until it is acknowledged.

    `token` is the broker's. `count` says how often it has been handed out, from 1. `consumer` is
    who had it before, and `idle_s` for how long, where it was taken from somebody. `message` is
    None, and `problem` says why, when what is there is no event of ours; `raw` is what is there.
    """

    token: Any
    message: Message | None
    count: int = 1
    consumer: str = ""
    idle_s: float = 0.0
    problem: str = ""
    raw: bytes = b""


@value
class GroupBacklog:
    """How far a group is: entries it has not read, entries handed out and not acknowledged."""

    group: str
    unread: int | None
    pending: int
    oldest_pending_s: float = 0.0


@value
class Backlog:
    """What lies in one shard of a topic. `target` is what trimming aims at, None for no limit."""

    topic: str
    shard: int
    length: int
    target: int | None
    tail: Tail | None
    groups: Sequence[GroupBacklog] = ()


# --- effects ------------------------------------------------------------------------------------


@value
class Applied:
    """It has had its effect, by this call."""


@value
class Seen:
    """It had its effect before. Nothing was done."""


Why: TypeAlias = Literal["retry", "poison", "crash", "behind", "gap"]


@value
class Held:
    """It waits in the parked store, with its sequence, and may be acknowledged.

    `why`: it failed and will be tried again, or what it waited for is behind it and it may run
    (`retry`), it failed too often (`poison`), it kills the process that runs it (`crash`), an
    earlier one of its sequence waits, or it waits there already (`behind`), or one before it has
    not come (`gap`).
    """

    why: Why
    error: str = ""


Ending: TypeAlias = Applied | Seen | Held


# --- parked -------------------------------------------------------------------------------------


@value
class ParkedMessage:
    """A message that waits, in its sequence, for one consumer.

    `sequence` is the identity of both together. `waiting`: it runs by itself, at `due_at`, or when
    its turn comes. `parked`: it waits for people. `edited` counts how often they changed it.
    """

    sequence: bytes
    consumer: str
    message: Message
    state: Literal["waiting", "parked"]
    why: Why
    attempts: int
    error: str
    parked_at: datetime
    due_at: datetime | None = None
    edited: int = 0


@value
class ParkedSequence:
    """A sequence that waits: its first message, and how many more wait behind that.

    `mark` is the last number that has had its effect, None for a message without a number, which
    waits alone. Numbers between `mark` and the first message have not come.
    """

    head: ParkedMessage
    behind: int
    mark: int | None

    @property
    def sequence(self) -> bytes:
        return self.head.sequence


@value
class Edit:
    """Give a message that waits another payload. It keeps its number and its id."""

    event_id: str
    payload: str


@value
class Replay:
    """Run the sequence now, as if its first message had never failed.

    A message without a number that waits for longer than the inbox remembers is refused, because
    nothing would tell whether it has had its effect meanwhile; `force` runs it all the same.
    """

    force: bool = False


@value
class Skip:
    """Go on without the first message; or, when it waits for others that never came, without those.

    `event_id` names the first message, which is then skipped whatever it waits for. Unnamed, one
    that may run and has not failed is refused: whoever skips twice has not meant it.
    """

    event_id: str | None = None


Settlement: TypeAlias = Edit | Replay | Skip


@value
class Settled:
    """What a settlement has done, or would do: `told` is for people."""

    sequence: bytes
    event_id: str
    told: str
    dry_run: bool = False


@value
class Audit:
    """A settlement that was made, by whom, and of what."""

    at: datetime
    who: str
    verb: str
    consumer: str
    sequence: bytes
    event_id: str
    note: str = ""
    before: str | None = None
    after: str | None = None
