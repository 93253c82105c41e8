"""What waits in an inbox on Redis, for people.

A listing goes over all keys of the server, as that of a ledger does: it is for people, and keeps no
index of its own up to date. Whatever is changed is changed in one call, if it is as it was seen.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

from semel.errors import StoreUnavailableError
from semel.messages import Audit, ParkedMessage, ParkedSequence, Settled, Settlement
from semel.stores import inbox_rules as rules
from semel.stores.inbox_rules import Change, Mark, View
from semel.stores.redis import asking
from semel.stores.redis import inbox_words as words
from semel.stores.redis.inbox_words import Place
from semel.stores.redis.line import Line
from semel.stores.rules import micros, moment
from semel.values import value

SCAN_COUNT = 1000
AT_ONCE = 100
PAGE = 1000

# Each time something changed meanwhile, it is looked at again.
TRIES = 10


@value
class _Look:
    """A sequence as it was at a moment."""

    now_us: int
    seq: int
    turn: int
    count: int
    rows: Sequence[ParkedMessage]


class Parked:
    """The verbs for people. Stands below the inbox."""

    def __init__(self, line: Callable[[], Line], namespace: str, retention_s: float) -> None:
        self.line = line
        self.namespace = namespace
        self.retention_s = retention_s

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
        places = [p for p in await self._places("waits") if consumer in {None, p.consumer}]
        found: list[ParkedSequence] = []
        while len(found) < limit and (page := await self._listed(places, after)):
            looks = await self._looked([(place, id, 0, 1) for id, place in page])
            there = (look for look in looks if look.rows)
            found += [_sequence(look) for look in there if _wanted(look, topic, tenant, state)]
            after = page[-1][0]
        return found[:limit]

    async def _listed(
        self, places: Sequence[Place], after: bytes | None
    ) -> Sequence[tuple[bytes, Place]]:
        """The next identities behind `after`, in order, and where each lies."""
        asked = [p.call_all(words.LISTED, b"waits", after or b"", AT_ONCE) for p in places]
        found = await self.line().calls(asked)
        pairs = ((id, p) for p, ids in zip(places, found, strict=True) for id in ids)
        return heapq.nsmallest(AT_ONCE, pairs, key=lambda pair: pair[0])

    async def waiting(
        self, sequence: bytes, *, limit: int = 1000, after: int = 0
    ) -> Sequence[ParkedMessage]:
        place = await self._place_of(sequence)
        if place is None:
            return []
        found = [row async for row in self._rows(place, sequence, after, limit)]
        return found[:limit]

    async def _rows(
        self, place: Place, id: bytes, after: int = 0, limit: int = PAGE
    ) -> AsyncIterator[ParkedMessage]:
        """A message without a number is told whatever `after` says."""
        begin = f"({after}" if after else 0
        while True:
            (look,) = await self._looked([(place, id, begin, min(limit, PAGE))])
            for row in look.rows:
                yield row
            if len(look.rows) < min(limit, PAGE):
                return
            begin = f"({rules.number_of(look.rows[-1].message)}"

    async def settle(
        self,
        sequence: bytes,
        settlement: Settlement,
        *,
        who: str,
        note: str = "",
        dry_run: bool = False,
    ) -> Settled:
        for _ in range(TRIES):
            found = await self._found(sequence)
            view = None if found is None else await self._view(*found, settlement)
            change = rules.settled(view, settlement, sequence)
            if dry_run or found is None:
                return rules.answer(change, dry_run=True)
            place, look = found
            at = moment(look.now_us)
            audit = rules.audited(change, settlement, at=at, who=who, note=note)
            if await self.line().call(self._changing(place, look, change, audit)):
                return rules.answer(change, dry_run=False)
        raise StoreUnavailableError(
            f"sequence {sequence.hex()} changes all the time; nothing was settled. Try again"
        )

    async def _found(self, sequence: bytes) -> tuple[Place, _Look] | None:
        """Where it waits, and its first two messages."""
        place = await self._place_of(sequence)
        if place is None:
            return None
        (look,) = await self._looked([(place, sequence, 0, 2)])
        return (place, look) if look.rows else None

    async def _view(self, place: Place, look: _Look, settlement: Settlement) -> View:
        head, *next_one = look.rows
        number = rules.number_of(head.message)
        event_id = getattr(settlement, "event_id", None)
        return View(
            mark=Mark(look.seq, number, look.turn) if number else None,
            head=head,
            following=rules.number_of(next_one[0].message) if next_one else None,
            chosen=await self._chosen(place, head.sequence, event_id),
            now=moment(look.now_us),
            retention_s=self.retention_s,
        )

    async def _chosen(self, place: Place, id: bytes, event_id: str | None) -> ParkedMessage | None:
        if event_id is None:
            return None
        async for row in self._rows(place, id):
            if row.message.id == event_id:
                return row
        return None

    def _changing(self, place: Place, look: _Look, change: Change, audit: Audit) -> Any:
        row, keep, mark = change.row, change.keep, change.mark
        return place.call(
            words.SETTLE,
            row.sequence,
            rules.number_of(row.message),
            look.turn,
            words.meta(row),
            b"" if mark is None else mark.seq,
            b"1" if change.drop else b"0",
            b"1" if change.seen else b"0",
            round(self.retention_s * 1000) + 1,
            b"" if keep is None else words.written(keep.message),
            b"" if keep is None else words.meta(keep),
            b"" if keep is None else words.due_us(keep),
            words.audit_text(audit),
        )

    async def audit(self, *, sequence: bytes | None = None, limit: int = 100) -> Sequence[Audit]:
        places = list(await self._places("audit"))
        most = limit if sequence is None else 10_000
        found = await self.line().calls([p.call_all(words.AUDITS, b"audit", most) for p in places])
        audits = [words.audit_in(each) for page in found for each in page]
        wanted = [each for each in audits if sequence in {None, each.sequence}]
        return sorted(wanted, key=lambda each: each.at, reverse=True)[:limit]

    async def forget(self, older_than_s: float, limit: int) -> int:
        """Forget messages without a number that had their effect longer ago than this."""
        count, age_us = 0, micros(older_than_s)
        async for keys in self._keys("*"):
            asked = [words.forgetting(key, age_us) for key in keys if words.is_state(key)]
            count += sum(await self.line().calls(asked[: limit - count]))
            if count >= limit:
                break
        return count

    # --- looking ----------------------------------------------------------------------------

    async def _looked(self, asked: Sequence[tuple[Place, bytes, Any, int]]) -> Sequence[_Look]:
        calls = [place.call(words.LOOK, id, begin, limit) for place, id, begin, limit in asked]
        replies = await self.line().calls(calls)
        return [
            _look(place, id, *said) for (place, id, *_), said in zip(asked, replies, strict=True)
        ]

    async def _place_of(self, sequence: bytes) -> Place | None:
        places = list(await self._places("waits"))
        # Everything from just before the sequence itself: the first one there is it, or is not.
        asked = [p.call_all(words.LISTED, b"waits", _before(sequence), 1) for p in places]
        for place, ids in zip(places, await self.line().calls(asked), strict=True):
            if ids == [sequence]:
                return place
        return None

    async def _places(self, name: str) -> Sequence[Place]:
        keys = {key async for page in self._keys(name) for key in page}
        places = [words.place_of(self.namespace, key) for key in sorted(keys)]
        return [place for place in places if place is not None]

    async def _keys(self, name: str) -> AsyncIterator[Sequence[bytes]]:
        """Of all servers, in pages; some may come twice."""
        match = ("MATCH", words.pattern(self.namespace, name), "COUNT", SCAN_COUNT)
        for server in await asking.servers(self.line()):
            cursor = -1
            while cursor != 0:
                page_after = ("SCAN", max(cursor, 0), *match)
                cursor, page = await asking.ask(self.line(), server, *page_after)
                yield page


def _wanted(look: _Look, topic: str | None, tenant: str | None, state: str | None) -> bool:
    head, message = look.rows[0], look.rows[0].message
    return (
        topic in {None, message.topic}
        and tenant in {None, message.tenant}
        and state in {None, head.state}
    )


def _sequence(look: _Look) -> ParkedSequence:
    head = look.rows[0]
    mark = look.seq if rules.is_ordered(head.message) else None
    return ParkedSequence(head, look.count - 1, mark)


def _look(
    place: Place, id: bytes, now: bytes, seq: bytes, turn: bytes, count: int, rows: Sequence[Any]
) -> _Look:
    return _Look(
        now_us=int(now),
        seq=int(seq),
        turn=int(turn),
        count=count,
        rows=[
            words.row_of(id, place.consumer, document, meta, error, due)
            for _, document, meta, due, error in rows
        ],
    )


def _before(id: bytes) -> bytes:
    """The identity just before this one."""
    number = int.from_bytes(id, "big") - 1
    return b"" if number < 0 else number.to_bytes(len(id), "big")
