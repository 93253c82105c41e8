"""The ledger on Redis: every verb is one script, one round trip."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from semel.stores import rules
from semel.stores.redis import asking, scripts
from semel.stores.redis.durability import guarantees_of
from semel.stores.redis.line import Line
from semel.stores.redis.scripts import SENSELESS, Call, Names, corrupt
from semel.stores.rules import Noting, Operation, Releasing, Renewing
from semel.stores.verbs import Verbs
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

# A listing goes over all keys of the server and keeps this many ids at a time: 10,000 of them are
# a megabyte. A namespace with more than that is listed in several goes.
IDS_AT_ONCE = 10_000
LOOKS_AT_ONCE = 100
SCAN_COUNT = 1000


class RedisLedger(Verbs):
    """One colour's ledger. `line` gives the way to Redis for whoever calls."""

    def __init__(self, line: Callable[[], Line], names: Names, shown: str, *, spare: bool) -> None:
        self._line = line
        self._names = names
        self._shown = shown
        self._can_fail_over = spare

    async def claim(
        self, key: Key, *, attempt: str, fingerprint: bytes = b"", terms: Terms
    ) -> Answer:
        name = self._names.of(key.id)
        call = scripts.claiming(name, key, attempt, fingerprint, terms)
        reply = await self._line().call(call)
        try:
            return scripts.claimed(key, attempt, fingerprint, terms, reply)
        except SENSELESS as error:
            raise corrupt(name, f"its reply was {reply!r}") from error

    def complete(self, claim: Claim, outcome: Outcome) -> Coroutine[Any, Any, Verdict]:
        name = self._names.of(claim.key.id)
        return self._judged(scripts.completing(name, claim, outcome))

    def perform(self, op: Operation) -> Coroutine[Any, Any, Any]:
        """Carry out what is not in every call: an operation as a value would cost those more."""
        assert isinstance(op, Releasing | Renewing | Noting)
        name = self._names.of(op.claim.key.id)
        return self._judged(scripts.changing(name, op))

    async def _judged(self, call: Call) -> Verdict:
        reply = await self._line().call(call)
        try:
            return scripts.verdict(reply)
        except SENSELESS as error:
            raise corrupt(call.key, f"its reply was {reply!r}") from error

    async def sweep(self, limit: int = 1000) -> int:
        """Nothing to do: Redis drops expired records by itself, and held ones never expire."""
        return 0

    # --- for people -------------------------------------------------------------------------

    async def look(self, id: bytes) -> Record | None:
        return (await self._looked_at([id]))[0]

    async def records(
        self,
        *,
        tenant: str | None = None,
        operation: str | None = None,
        state: State | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[Record]:
        found: list[Record] = []
        while len(found) < limit and (ids := await self._ids_after(after)):
            for start in range(0, len(ids), LOOKS_AT_ONCE):
                records = await self._looked_at(ids[start : start + LOOKS_AT_ONCE])
                found += [r for r in records if r and rules.wanted(r, tenant, operation, state)]
                if len(found) >= limit:
                    break
            after = ids[-1]
        return found[:limit]

    async def _looked_at(self, ids: Sequence[bytes]) -> list[Record | None]:
        names = [self._names.of(id) for id in ids]
        replies = await self._line().calls([scripts.looking(name) for name in names])
        found = map(scripts.seen_of, ids, names, replies)
        return [None if seen is None else rules.record(seen.row, seen.now_us) for seen in found]

    async def _ids_after(self, after: bytes | None) -> list[bytes]:
        """The smallest ids behind `after`, in order."""
        ids: set[bytes] = set()
        for server in await asking.servers(self._line()):
            cursor = -1
            while cursor != 0:
                cursor, page = await self._page(max(cursor, 0), server)
                ids.update(id for id in page if after is None or id > after)
                if len(ids) > IDS_AT_ONCE:
                    ids = set(sorted(ids)[:IDS_AT_ONCE])
        return sorted(ids)

    async def _page(self, cursor: int, server: Any) -> tuple[int, list[bytes]]:
        match = ("MATCH", self._names.pattern, "COUNT", SCAN_COUNT)
        cursor, names = await asking.ask(self._line(), server, "SCAN", cursor, *match)
        return cursor, [id for name in names if (id := self._names.id_of(name)) is not None]

    async def resolve(
        self, id: bytes, *, fence: int, outcome: Outcome | None, ttl_s: float | None
    ) -> bool:
        return await self._yes(scripts.resolving(self._names.of(id), fence, outcome, ttl_s))

    async def forget(self, id: bytes, *, force: bool = False) -> bool:
        return await self._yes(scripts.forgetting(self._names.of(id), force))

    async def _yes(self, call: Call) -> bool:
        return bool(await self._line().call(call))

    # --- what the server promises -----------------------------------------------------------

    async def guarantees(self) -> Guarantees:
        line = self._line()
        standings = [await asking.standing(line, server) for server in await asking.servers(line)]
        return guarantees_of(self._shown, standings, can_fail_over=self._can_fail_over)
