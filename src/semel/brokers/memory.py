"""The broker in this process's memory: the reference, and the broker for tests.

    broker = MemoryBroker()
    relay = Relay(engine, broker)       # the same object for whoever publishes and whoever reads

One lock guards everything. Entries are kept in their wire form, so that a message arrives here as
it would from any other broker, and nobody's changes to it reach the next reader. Nothing is shared
with other processes and nothing survives this one.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from semel.brokers import rules
from semel.colour import ASYNC, Waiter, after_fork
from semel.messages import (
    Backlog,
    Batch,
    Delivery,
    Features,
    Full,
    GroupBacklog,
    Receipt,
    Tail,
    Taken,
)

__all__ = ["MemoryBroker"]

_lock = threading.Lock()
"""For all brokers of the process: under it, lists are looked at and nothing is waited for."""


class MemoryBroker:
    """Messages in lists, in `shards` shards per topic. One process only.

    What every group has acknowledged is trimmed down to `maxlen` entries per shard; at twice as
    many, publishing answers `Full`. With maxlen=None everything is kept.
    """

    features = Features(fenced=True, dedups="exact", heals=True, bounded=True)

    def __init__(self, *, shards: int = 1, maxlen: int | None = 10_000) -> None:
        rules.check_settings(shards, maxlen)
        self.shards = shards
        self._maxlen = maxlen
        self._logs: dict[tuple[str, int], _Log] = {}

    async def publish(self, batch: Batch) -> Receipt:
        rules.check(batch, self.shards)
        with _lock:
            log = self._log(batch.topic, batch.shard)
            receipt = log.publish(batch, self._maxlen)
            waiters = list(log.waiters)
        for waiter in waiters:
            waiter.ring()
        return receipt

    async def tail(self, topic: str, shard: int) -> Tail:
        with _lock:
            return self._log(topic, shard).tail

    async def join(self, topic: str, group: str) -> None:
        with _lock:
            for shard in range(self.shards):
                self._log(topic, shard).groups.setdefault(group, _Group())

    async def leave(self, topic: str, group: str) -> None:
        """Forget the group: nothing is kept for it any more."""
        with _lock:
            for shard in range(self.shards):
                self._log(topic, shard).groups.pop(group, None)

    async def trim(self, topic: str, keep: int) -> None:
        """Forget all but the last `keep` messages of each shard that every group is done with."""
        with _lock:
            for shard in range(self.shards):
                self._log(topic, shard).trim(keep)

    async def consumer(
        self, topic: str, group: str, shard: int, *, name: str, fence: int
    ) -> MemoryConsumer:
        await self.join(topic, group)
        with _lock:
            log = self._log(topic, shard)
            owner = log.groups[group].open(fence)
        return MemoryConsumer(log, group, owner, name, fence, self._maxlen)

    async def backlog(self, topic: str, shard: int) -> Backlog:
        now = ASYNC.now()
        with _lock:
            log = self._log(topic, shard)
            groups = [log.backlog(group, now) for group in log.groups]
            return Backlog(topic, shard, len(log.entries), self._maxlen, log.tail, groups)

    async def aclose(self) -> None:
        pass

    def _log(self, topic: str, shard: int) -> _Log:
        rules.check_shard(shard, self.shards)
        return self._logs.setdefault((topic, shard), _Log())

    def __repr__(self) -> str:
        return f"MemoryBroker(shards={self.shards})"


class MemoryConsumer:
    """One owner's view of one shard of a topic, for one group."""

    def __init__(
        self, log: _Log, group: str, owner: int, name: str, fence: int, maxlen: int | None
    ) -> None:
        self._log = log
        self._maxlen = maxlen
        self._group = group
        self._owner = owner
        self._name = name
        self._fence = fence
        self._closed = False

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        now = ASYNC.now()
        with _lock:
            return self._log.left_over(self._group, self._owner, self._name, limit, now)

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        until = ASYNC.now() + wait_s
        with self._listening() as waiter:
            while not self._closed:
                with _lock:
                    self._log.look(self._group, self._owner, self._fence)
                    found = self._log.read(
                        self._group, self._owner, self._name, limit, now := ASYNC.now()
                    )
                if found or now >= until:
                    return found
                await waiter.wait(until - now)
        return []

    @contextmanager
    def _listening(self) -> Iterator[Waiter]:
        """Listen before looking, or a ring between the two is lost."""
        waiter = ASYNC.waiter()
        with _lock:
            self._log.waiters.add(waiter)
        try:
            yield waiter
        finally:
            with _lock:
                self._log.waiters.discard(waiter)

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        """Nothing: nobody can read here outside our leases."""
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Not fenced: that a message had its effect is true whoever says it."""
        with _lock:
            if group := self._log.groups.get(self._group):
                for each in deliveries:
                    group.pending.pop(each.token, None)
                if self._maxlen is not None:
                    self._log.trim(self._maxlen)

    async def close(self) -> None:
        """The next owner is handed what is pending anyway; whoever waits here waits no longer."""
        self._closed = True
        with _lock:
            waiters = list(self._log.waiters)
        for waiter in waiters:
            waiter.ring()


# --- one shard of a topic -----------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    position: int
    id: str
    raw: bytes


@dataclass(slots=True)
class _Pending:
    """Who has an entry in hand, since when, and how many have had it."""

    owner: int
    consumer: str
    since: float
    count: int = 1


@dataclass(slots=True)
class _Group:
    """How far a group is. `pending` is by position, in order: it is read in order."""

    read_to: int = 0
    fence: int = 0
    opened: int = 0
    pending: dict[int, _Pending] = field(default_factory=dict[int, _Pending])

    def open(self, fence: int) -> int:
        """The number of the new owner; 0, who is never the owner, for one of the past."""
        if fence < self.fence:
            return 0
        self.fence = fence
        self.opened += 1
        return self.opened

    def owned_by(self, owner: int) -> bool:
        return owner == self.opened

    @property
    def done_to(self) -> int:
        """Up to here everything was read and acknowledged."""
        return next(iter(self.pending), self.read_to + 1) - 1


@dataclass(eq=False, slots=True)
class _Log:
    """The entries of one shard of a topic, and who has read how far. Used under the lock."""

    fence: int = 0
    tail: Tail = field(default_factory=Tail)
    entries: list[_Entry] = field(default_factory=list[_Entry])
    groups: dict[str, _Group] = field(default_factory=dict[str, _Group])
    waiters: set[Waiter] = field(default_factory=set[Waiter])

    # --- publishing

    def publish(self, batch: Batch, maxlen: int | None) -> Receipt:
        documents = rules.documents(batch.messages)
        messages = rules.fresh(batch, self.fence, self.tail, self._ids)
        if not isinstance(messages, Sequence):
            return messages
        self.fence = batch.fence
        if maxlen is not None and messages and (full := self._full(batch, maxlen)):
            return full
        added, refused = rules.written(messages, documents)
        for message, document in added:
            self.append(message.position, message.id, document)
        return refused or Taken(len(added))

    def append(self, position: int, id: str, raw: bytes) -> None:
        self.entries.append(_Entry(position, id, raw))
        self.tail = Tail(position, id)

    def _ids(self, first: int, last: int) -> Mapping[int, str]:
        there = self.entries[self._after(first - 1) : self._after(last)]
        return {entry.position: entry.id for entry in (*self.entries[:1], *there)}

    def _after(self, position: int) -> int:
        return bisect_right(self.entries, position, key=lambda entry: entry.position)

    def _full(self, batch: Batch, maxlen: int) -> Full | None:
        slowest = self.trim(maxlen)
        if len(self.entries) < 2 * maxlen:
            return None
        late = None if slowest is None else self.backlog(slowest, 0.0)
        return Full(len(self.entries), rules.why_full(batch, late))

    def trim(self, maxlen: int) -> str | None:
        """Make room, as far as everybody has read and acknowledged; the slowest group."""
        slowest = min(self.groups, key=lambda name: self.groups[name].done_to, default=None)
        done_to = 0 if slowest is None else self.groups[slowest].done_to
        del self.entries[: max(0, min(self._after(done_to), len(self.entries) - maxlen))]
        return slowest

    # --- reading

    def look(self, group: str, owner: int, fence: int) -> None:
        """Raise for one whose place was taken by another consumer of the same owner."""
        state = self.groups.get(group)
        if state is not None and state.fence == fence and not state.owned_by(owner):
            raise rules.begun_anew(f"a shard for group {group!r}")

    def read(self, group: str, owner: int, name: str, limit: int, now: float) -> list[Delivery]:
        state = self.groups.get(group)
        if state is None or not state.owned_by(owner):
            return []
        start = self._after(state.read_to)
        found = self.entries[start : start + limit]
        for entry in found:
            state.read_to = entry.position
            state.pending[entry.position] = _Pending(owner, name, now)
        return [rules.delivery(entry.position, entry.raw) for entry in found]

    def left_over(
        self, group: str, owner: int, name: str, limit: int, now: float
    ) -> list[Delivery]:
        state = self.groups.get(group)
        if state is None or not state.owned_by(owner):
            return []
        theirs = [at for at, held in state.pending.items() if held.owner != owner]
        return [self._take_over(state, at, owner, name, now) for at in theirs[:limit]]

    def _take_over(
        self, state: _Group, position: int, owner: int, name: str, now: float
    ) -> Delivery:
        before = state.pending[position]
        state.pending[position] = _Pending(owner, name, now, before.count + 1)
        # What is pending is never trimmed, so it is here.
        raw = self.entries[self._after(position) - 1].raw
        return rules.delivery(
            position,
            raw,
            count=before.count + 1,
            consumer=before.consumer,
            idle_s=max(0.0, now - before.since),
        )

    def backlog(self, group: str, now: float) -> GroupBacklog:
        state = self.groups[group]
        oldest = min((held.since for held in state.pending.values()), default=now)
        return GroupBacklog(
            group,
            unread=len(self.entries) - self._after(state.read_to),
            pending=len(state.pending),
            oldest_pending_s=max(0.0, now - oldest),
        )


def _free_lock() -> None:
    """A forked child has one thread; a lock that another one held would be held for ever."""
    global _lock  # noqa: PLW0603 - one per process
    _lock = threading.Lock()


after_fork(_free_lock)
