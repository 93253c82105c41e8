"""Checks of the broker: who has not read what, what could be lost there, is it the outbox's?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from semel.colour import ASYNC
from semel.doctor.patient import PLACES, Finding, Patient, span
from semel.messages import Backlog, GroupBacklog, Tail

if TYPE_CHECKING:
    from semel.stores.sql.outbox_cursor import Cursor

__all__ = ["EVICTION", "Risks", "durability", "fullness", "pending", "tails"]

# What differs by more than a message that is just on its way still does so then.
LOOK_AGAIN_S = 1.0

# What loses messages that nobody has read, whatever else is done, is told with this word.
EVICTION = "eviction"


@runtime_checkable
class Risks(Protocol):
    """A broker that can tell what its servers are set up to forget."""

    async def risks(self) -> Sequence[str]:
        """Sentences for people; those that begin with "eviction" tell of unread messages."""
        ...


async def pending(patient: Patient) -> Sequence[Finding]:
    """Has somebody been handed messages, and never acknowledged them?"""
    late: list[Finding] = []
    unread: Counter[str] = Counter()
    held: Counter[str] = Counter()
    for backlog in await patient.backlogs():
        for group in backlog.groups:
            if patient.wants(group.group):
                unread[group.group] += group.unread or 0
                held[group.group] += group.pending
                late += _late(patient, backlog, group)
    knows_all = patient.broker.features.heals  # or tells of those only that it was told of
    if knows_all:
        late += [_absent(each) for each in patient.consumers if each not in unread]
    if late:
        return late
    if not unread:
        return [Finding("ok" if knows_all else "not checked", "no group is known")]
    return [
        Finding("ok", f"{name}: {count:,} unread, {held[name]:,} pending")
        for name, count in sorted(unread.items())
    ]


def _late(patient: Patient, backlog: Backlog, group: GroupBacklog) -> Iterator[Finding]:
    if group.oldest_pending_s > patient.thresholds.pending_s:
        yield Finding(
            "failed",
            f"{group.group}: {group.pending:,} pending in {_place(backlog)}, the oldest for "
            f"{span(group.oldest_pending_s)}",
            "see the log of its workers; one that is started takes them over",
        )


def _absent(consumer: str) -> Finding:
    figure = f"{consumer} has joined none of the topics that were published to"
    return Finding("warning", figure, "start its worker, or check the name")


def _place(backlog: Backlog) -> str:
    return f"shard {backlog.shard} of {backlog.topic}"


async def fullness(patient: Patient) -> Sequence[Finding]:
    """Is a topic about to take no more, because its readers are too far behind?"""
    backlogs = await patient.backlogs()
    found = [*_without_group(patient, backlogs), *(f for each in backlogs for f in _full(each))]
    if found:
        return found
    longest = max(backlogs, key=lambda backlog: backlog.length, default=None)
    if longest is None:
        return [Finding("ok", "nothing was published yet")]
    most = "no limit" if longest.target is None else f"{longest.target:,}"
    looked = f"; the first {PLACES:,} shards looked at" if len(backlogs) == PLACES else ""
    return [Finding("ok", f"at most {longest.length:,} in a shard, target {most}{looked}")]


def _without_group(patient: Patient, backlogs: Sequence[Backlog]) -> Iterator[Finding]:
    """Topics that nobody has joined, where the broker would know."""
    if not patient.broker.features.heals:
        return
    alone: dict[str, list[Backlog]] = {}
    for backlog in backlogs:
        if not backlog.groups:
            alone.setdefault(backlog.topic, []).append(backlog)
    for topic, shards in alone.items():
        is_full = any(each.target and each.length >= 2 * each.target for each in shards)
        length = sum(each.length for each in shards)
        yield Finding(
            "failed" if is_full else "warning",
            f"{topic} has {length:,} entries and no group, so nothing of it may be trimmed",
            "start its workers, or name its groups in the relay's broker",
        )


def _full(backlog: Backlog) -> Iterator[Finding]:
    """A stream of the length it aims at is as it should be, unless somebody keeps it there."""
    slowest, target = max(backlog.groups, key=_left, default=None), backlog.target
    if slowest is None or target is None or not _left(slowest):
        return
    length = f"{_place(backlog)} has {backlog.length:,} entries"
    if backlog.length >= 2 * target:
        figure = f"{length}, twice its target: the relay waits for group {slowest.group}"
        advice = f"start the workers of {slowest.group}; if it is gone for good, `leave` it"
        yield Finding("failed", figure, advice)
    elif backlog.length >= target and 2 * _left(slowest) >= target:
        figure = f"{length}, {_left(slowest):,} of them for group {slowest.group}"
        advice = f"the relay stops at {2 * target:,}: start more workers of {slowest.group}"
        yield Finding("warning", figure, advice)


def _left(group: GroupBacklog) -> int:
    return (group.unread or 0) + group.pending


async def durability(patient: Patient) -> Sequence[Finding]:
    """Is the broker set up to lose what it was given?"""
    broker = patient.broker
    if not isinstance(broker, Risks):
        return [Finding("not checked", "this broker does not tell")]
    return [
        Finding(
            "failed" if risk.startswith(EVICTION) else "warning",
            *(part.strip() for part in risk.rpartition(";")[::2]),
        )
        for risk in await broker.risks()
    ] or [Finding("ok", "nothing is evicted, and it is written to disk")]


# --- the broker against the outbox --------------------------------------------------------------

Place: TypeAlias = tuple[str, int]


async def tails(patient: Patient) -> Sequence[Finding]:
    """Does the broker end where the relays' cursors say it does?"""
    if not patient.broker.features.heals:
        return [Finding("not checked", "this broker does not tell what its last message is")]
    found = await _differences(patient)
    if found:  # a relay may have been between its broker and its cursor
        await ASYNC.sleep(LOOK_AGAIN_S)
        again = await _differences(patient)
        found = {place: finding for place, finding in again.items() if place in found}
    return list(found.values()) or [Finding("ok", "the broker ends where the outbox says")]


async def _differences(patient: Patient) -> Mapping[Place, Finding]:
    found: dict[Place, Finding] = {}
    places = set(await patient.places())
    for cursor in await patient.cursors():
        for topic, known in cursor.tails.items():
            if (topic, cursor.shard) in places:
                finding = await _difference(patient, cursor, topic, known)
                if finding is not None:
                    found[topic, cursor.shard] = finding
    return found


async def _difference(patient: Patient, cursor: Cursor, topic: str, known: Tail) -> Finding | None:
    tail = await patient.broker.tail(topic, cursor.shard)
    where = f"shard {cursor.shard} of {topic}"
    if tail is None:
        return None
    if tail.position < known.position:
        return await _lost(patient, where, known, tail)
    if tail.position == known.position:
        same = not tail.id or not known.id or tail.id == known.id
        return None if same else _forked(where, tail)
    return await _ahead(patient, where, tail)


async def _lost(patient: Patient, where: str, known: Tail, tail: Tail) -> Finding:
    swept = await patient.reader(1).swept_to()
    gone = f"; events up to {swept} are swept and gone" if swept > tail.position else ""
    figure = f"{where} ends at {tail.position}, and {known.position} was published{gone}"
    advice = "it has lost its end: a running relay publishes again what the outbox still has"
    return Finding("failed", figure, advice)


async def _ahead(patient: Patient, where: str, tail: Tail) -> Finding | None:
    """As it is between publishing and moving the cursor, if the outbox has that event, there."""
    from semel.stores.sql.doctor import last_id, place_of

    if tail.id:
        there = await patient.ask(lambda link: place_of(link, tail.id))
        return None if there == tail else _forked(where, tail)
    return _forked(where, tail) if tail.position > await patient.ask(last_id) else None


def _forked(where: str, tail: Tail) -> Finding:
    return Finding(
        "failed",
        f"{where} has event {tail.id or 'unknown'} at {tail.position}, the outbox has not",
        "one of the two was restored from an older copy, or somebody else writes there: bring back "
        "the right one, or delete the broker's stream to have it filled anew",
    )
