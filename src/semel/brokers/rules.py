"""What publishing and reading mean, for brokers that hold their own entries. Pure.

A batch names what it follows. From that and the broker's own tail follows the rest: the broker has
lost messages (`Behind`), it has others (`Forked`), or some of the batch are there already, by a
publish whose reply was lost, and are passed over.

The easy mistake is to pass over by position alone. Of two databases, one brought back from an
older copy, the positions are the same and the events are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from semel.cloudevents import NotAnEventError, from_json, to_json
from semel.errors import BrokerUnavailableError, SettingsError
from semel.messages import (
    Batch,
    Behind,
    Delivery,
    Fenced,
    Forked,
    GroupBacklog,
    Message,
    Refused,
    Tail,
)

Ids: TypeAlias = Callable[[int, int], Mapping[int, str]]
"""The ids at the positions from the first to the last, as far as they are there, and with them the
lowest position there is: what is missing before it was trimmed, what is missing behind it never
came."""


class TopicError(SettingsError):
    """A topic that this broker has no name for. Others it can have."""


def check_settings(shards: int, maxlen: int | None) -> None:
    if shards < 1:
        raise SettingsError(f"shards={shards}: a topic has at least one shard")
    if maxlen is not None and maxlen < 1:
        raise SettingsError(f"maxlen={maxlen}: keep at least one entry, or None for all of them")


def check_shard(shard: int, shards: int) -> None:
    if not 0 <= shard < shards:
        raise SettingsError(
            f"there is no shard {shard} of {shards}; give every relay, worker and broker of a "
            f"topic the same number of shards"
        )


def check(batch: Batch, shards: int) -> None:
    """Refuse what no owner of a shard should ever send."""
    check_shard(batch.shard, shards)
    last = batch.follows.position
    for message in batch.messages:
        if message.position <= last:
            raise ValueError(
                f"position {message.position} comes after {last} in a batch for "
                f"{batch.topic!r}; positions grow, beginning behind what the batch follows"
            )
        last = message.position


def fresh(
    batch: Batch, fence: int, tail: Tail, ids: Ids
) -> Sequence[Message] | Fenced | Behind | Forked:
    """What of the batch is not there yet, or why nothing of it may be added."""
    if fence > batch.fence:
        return Fenced(fence)
    if tail.position < batch.follows.position:
        return Behind(tail)
    if tail.position == batch.follows.position:
        return batch.messages if tail.id == batch.follows.id else Forked(tail)
    return behind_the_tail(batch.messages, tail, ids)


def behind_the_tail(
    messages: Sequence[Message], tail: Tail, ids: Ids
) -> Sequence[Message] | Forked:
    """A batch that begins before the tail, as after a lost reply or a crash.

    To pass over what never came would lose it: a database brought back from an older copy gives
    out positions again, among them such as this topic has no entry for.
    """
    old = [message for message in messages if message.position <= tail.position]
    new = messages[len(old) :]
    if new and (not old or old[-1].position != tail.position):
        return Forked(tail)  # the outbox has nothing where the broker has its tail
    there = ids(old[0].position, old[-1].position) if old else {}
    lowest = min(there, default=None)
    for message in old:
        found = there.get(message.position, "")
        trimmed = lowest is None or message.position < lowest
        if found != message.id and not trimmed:
            return Forked(Tail(message.position, found))
    return new


Documents: TypeAlias = Mapping[int, bytes | Refused]
"""What is stored, by position, or why it cannot be."""


def documents(messages: Iterable[Message]) -> Documents:
    return {message.position: _document(message) for message in messages}


def _document(message: Message) -> bytes | Refused:
    try:
        return to_json(message).encode()
    except UnicodeEncodeError as error:
        return Refused(message, f"it cannot be written as UTF-8: {error}")


def written(
    messages: Iterable[Message], documents: Documents
) -> tuple[list[tuple[Message, bytes]], Refused | None]:
    """What is to be added, up to the first that is refused."""
    added: list[tuple[Message, bytes]] = []
    for message in messages:
        document = documents[message.position]
        if isinstance(document, Refused):
            return added, document
        added.append((message, document))
    return added, None


def delivery(
    token: Any, raw: bytes, *, count: int = 1, consumer: str = "", idle_s: float = 0.0
) -> Delivery:
    """An entry in somebody's hands, readable or not."""
    try:
        message = from_json(raw)
    except NotAnEventError as error:
        return Delivery(token, None, count, consumer, idle_s, problem=str(error), raw=raw)
    return Delivery(token, message, count, consumer, idle_s)


def begun_anew(where: object) -> BrokerUnavailableError:
    """For a consumer whose place another one of the same owner has taken.

    The request to open that other one was given up, and came late. Nobody reads from it; so whoever
    does read must hear of it, and open once more, or the shard would be read by nobody.
    """
    return BrokerUnavailableError(
        f"an earlier request of ours to read {where} came late and took the place of this one; "
        "reading begins anew"
    )


def why_full(batch: Batch, slowest: GroupBacklog | None) -> str:
    """For people: who keeps the entries from being trimmed."""
    where = f"shard {batch.shard} of {batch.topic!r}"
    if slowest is None:
        return f"no group has joined {where}, so nothing may be trimmed; start a worker"
    return (
        f"group {slowest.group!r} has {slowest.unread} unread and {slowest.pending} pending in "
        f"{where}; start its workers, or see what holds them up"
    )
