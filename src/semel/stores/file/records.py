"""The verbs over the directory, blocking."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Final

from semel.errors import CorruptRecordError
from semel.ports import Clock
from semel.stores import rules
from semel.stores.file.disk import SHARDS, ids, reported
from semel.stores.file.form import load_row
from semel.stores.file.shard import Shard, locked
from semel.stores.rules import Claiming, Operation, Row
from semel.values import Busy, Done, Guarantees, Mismatch, Outcome, Record, State

log = logging.getLogger("semel")

# Deletions under one lock: a sweep must not keep callers of the shard waiting.
SWEEP_CHUNK: Final = 64


class Files:
    """The verbs over the directory, blocking."""

    def __init__(self, root: str, clock: Clock, fsync: bool) -> None:
        self._root = root
        self._clock = clock
        self._fsync = fsync
        self._rooted: set[str] = set()

    @contextlib.contextmanager
    def _shard(self, name: str) -> Iterator[Shard]:
        path = f"{self._root}/{name}"
        with locked(path) as fd:
            yield Shard(path, fd, self._fsync, self._rooted)

    def _shard_of(self, id: bytes) -> contextlib.AbstractContextManager[Shard]:
        return self._shard(id.hex()[:2])

    def _shards(self) -> list[str]:
        with reported(self._root):
            return sorted(SHARDS.intersection(os.listdir(self._root)))

    def replay(self, op: Claiming) -> Done | Busy | Mismatch | None:
        """The answer, if it can be had by one read; None when something may have to change."""
        stem = op.key.id.hex()
        row = load_row(f"{self._root}/{stem[:2]}", stem)
        if row is None:
            return None
        answer, changed = rules.claim(row, op, self._clock.now_us())
        if changed is None and isinstance(answer, Done | Busy | Mismatch):
            return answer
        return None

    def perform(self, op: Operation) -> Any:
        key = rules.key_of(op)
        with self._shard_of(key.id) as shard:
            row = shard.row(key.id) or rules.ghost(key, shard.floor())
            answer, changed = rules.apply(row, op, self._clock.now_us())
            if changed is not None:
                shard.put(changed)
            return answer

    def look(self, id: bytes) -> Record | None:
        row = self._row(id.hex()[:2], id.hex())
        now_us = self._clock.now_us()
        return None if row is None or rules.expired(row, now_us) else rules.record(row, now_us)

    def records(
        self,
        tenant: str | None,
        operation: str | None,
        state: State | None,
        limit: int,
        after: bytes | None,
    ) -> Sequence[Record]:
        now_us = self._clock.now_us()
        found = (
            rules.record(row, now_us)
            for row in self._rows(b"" if after is None else after)
            if not rules.expired(row, now_us)
        )
        wanted = (r for r in found if rules.wanted(r, tenant, operation, state))
        return list(itertools.islice(wanted, limit))

    def _rows(self, after: bytes) -> Iterator[Row]:
        stem = after.hex()
        for name in self._shards():
            if name < stem[:2]:
                continue
            for each in ids(f"{self._root}/{name}"):
                if each > stem and (row := self._row(name, each)) is not None:
                    yield row

    def _row(self, shard: str, stem: str) -> Row | None:
        path = f"{self._root}/{shard}"
        if os.path.exists(f"{path}/{stem}.next"):
            with self._shard(shard) as held:
                held.finish(stem)
        return load_row(path, stem)

    def resolve(self, id: bytes, fence: int, outcome: Outcome | None, ttl_s: float | None) -> bool:
        with self._shard_of(id) as shard:
            row = rules.resolve(shard.row(id), fence, outcome, ttl_s, self._clock.now_us())
            if row is not None:
                shard.put(row)
            return row is not None

    def forget(self, id: bytes, force: bool) -> bool:
        """Also the way out of a corrupt record: with `force` it is deleted unread."""
        with self._shard_of(id) as shard:
            now_us = self._clock.now_us()
            try:
                row = shard.row(id)
            except CorruptRecordError:
                if not force:
                    raise
                return shard.delete({id.hex(): now_us})
            if row is None or not rules.forgettable(row, force, now_us):
                return False
            return shard.delete({id.hex(): row.fence})

    def sweep(self, limit: int) -> int:
        swept = 0
        for name in self._shards():
            due = self._due(name)
            while chunk := list(itertools.islice(due, min(SWEEP_CHUNK, limit - swept))):
                swept += self._delete_expired(name, chunk)
        return swept

    def _due(self, shard: str) -> Iterator[str]:
        now_us = self._clock.now_us()
        for stem in ids(f"{self._root}/{shard}"):
            try:
                row = self._row(shard, stem)
            except CorruptRecordError as error:
                log.warning("semel: not swept: %s", error)
                continue
            if row is not None and rules.expired(row, now_us):
                yield stem

    def _delete_expired(self, name: str, chosen: list[str]) -> int:
        now_us = self._clock.now_us()
        with self._shard(name) as shard:
            # Looked at again under the lock: somebody may have claimed it meanwhile.
            rows = ((stem, shard.row(bytes.fromhex(stem))) for stem in chosen)
            dead = {h: r.fence for h, r in rows if r is not None and rules.expired(r, now_us)}
            shard.delete(dead)
        return len(dead)

    def guarantees(self) -> Guarantees:
        if self._fsync:
            return Guarantees(
                store="file",
                survives=frozenset({"process_crash", "power_loss"}),
                shared=True,
                why=(
                    "every change is fsynced with its directory before it can be seen",
                    "one directory on one machine: nothing to fail over to",
                ),
            )
        return Guarantees(
            store="file",
            survives=frozenset({"process_crash"}),
            shared=True,
            why=(
                "fsync=False: changes outlive a killed process, but not a power cut",
                "one directory on one machine: nothing to fail over to",
            ),
        )
