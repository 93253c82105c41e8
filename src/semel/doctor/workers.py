"""The check of groups: has somebody something to do, and nobody to do it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from semel.doctor.outbox import owned
from semel.doctor.patient import Finding, Patient
from semel.values import value

if TYPE_CHECKING:
    from semel.ports import Store
    from semel.stores.sqlite import SQLiteStore

__all__ = ["workers"]

ADVICE = (
    "start its workers; those with a store of their own (store=, RedisInbox) are not seen from here"
)


@value
class _Todo:
    """What a group has not done: by shard at the broker, and of what waits in this inbox."""

    unread: Counter[int]
    pending: Counter[int]
    again: int


async def workers(patient: Patient) -> Sequence[Finding]:
    """Does every group that has something to do have workers?"""
    groups = await _groups(patient)
    if not groups:
        knows_all = patient.broker.features.heals  # or tells of those only that it was told of
        return [Finding("ok" if knows_all else "not checked", "no group is known")]
    async with _store(patient) as store:
        return [
            _told(patient, group, todo, await _owned(patient, store, group))
            for group, todo in sorted(groups.items())
        ]


async def _groups(patient: Patient) -> Mapping[str, _Todo]:
    unread: dict[str, Counter[int]] = {}
    pending: dict[str, Counter[int]] = {}
    for backlog in await patient.backlogs():
        for group in backlog.groups:
            if patient.wants(group.group):
                unread.setdefault(group.group, Counter())[backlog.shard] += group.unread or 0
                pending.setdefault(group.group, Counter())[backlog.shard] += group.pending
    again: Counter[str] = Counter()
    for each in await patient.waiting():
        if each.why == "retry":
            again[each.consumer] += each.count
    return {
        group: _Todo(unread.get(group, Counter()), pending.get(group, Counter()), again[group])
        for group in {*unread, *again}
    }


@asynccontextmanager
async def _store(patient: Patient) -> AsyncIterator[Store | None]:
    """Where the workers of an inbox in this database own their shards; None: there was never one.

    Beside an SQLite file it is another one, which is not made by looking.
    """
    path = patient.store.file_path
    if path is None:
        yield patient.store
        return
    store = _file(f"{path}-workers")
    try:
        yield store
    finally:
        if store is not None:
            store.close()


def _file(path: str) -> SQLiteStore | None:
    from semel.stores.sqlite import SQLiteStore

    return SQLiteStore(path) if Path(path).exists() else None


async def _owned(patient: Patient, store: Store | None, group: str) -> Mapping[int, str]:
    return await owned(store, f"worker:{group}", patient.broker.shards) if store else {}


def _told(patient: Patient, group: str, todo: _Todo, owners: Mapping[int, str]) -> Finding:
    count = patient.broker.shards
    nobodys = [shard for shard in range(count) if shard not in owners]
    counted = {
        "unread": sum(todo.unread[shard] for shard in nobodys),
        "pending": sum(todo.pending[shard] for shard in nobodys),
        "to be tried again": 0 if owners else todo.again,
    }
    left = ", ".join(f"{number:,} {what}" for what, number in counted.items() if number)
    if left:
        where = f" on shard {', '.join(map(str, nobodys))}" if owners else ""
        return Finding("warning", f"{group}: {left}, and no worker of it is seen{where}", ADVICE)
    if not owners:
        return Finding("ok", f"{group}: nothing to do, no worker")
    holders = ", ".join(sorted({*owners.values()}))
    return Finding("ok", f"{group}: {len(owners)} of {count} shards owned by {holders}")
