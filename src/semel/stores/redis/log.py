"""The log on Redis: every verb is one script, one round trip."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from semel.entries import Answer, Appended, Keep, Page, Position, Snapshot, StateChange
from semel.ports import KEEP
from semel.stores.log_rules import (
    check_append,
    checked_fences,
    checked_state,
    limit_of,
    mark_of,
    name_of,
    seal_of,
)
from semel.stores.redis import log_words as words
from semel.stores.redis.line import Line
from semel.stores.redis.log_words import Place, place_of
from semel.stores.redis.scripts import SENSELESS, Call

log = logging.getLogger("semel")

T = TypeVar("T")


class RedisLog:
    """One colour's log. `line` gives the way to Redis for whoever calls."""

    def __init__(self, line: Callable[[], Line], namespace: str) -> None:
        self._line = line
        self._namespace = namespace
        self._has_warned = False

    async def append(
        self,
        stream: str,
        data: bytes | None,
        *,
        id: str,
        fingerprint: bytes | None = None,
        fences: Mapping[str, int] | None = None,
        rising: Mapping[str, int] | None = None,
        expect: int | Position | None = None,
        state: StateChange | None = None,
        reply: bytes = b"",
        ends: bool = False,
        keep: Keep = KEEP,
        seal: bytes | None = None,
    ) -> Answer:
        # Said directly, as a claim is: an operation as a value would cost a tenth of the call.
        place, line = place_of(self._namespace, stream), self._line()
        check_append(data, fingerprint, expect, reply)
        mark = mark_of(name_of(id, "id"), fingerprint if fingerprint is not None else data or b"")
        if seal is not None:
            mark += seal_of(seal)
        packed = words.appending(
            place, mark, id, data, reply, expect, words.packed_keep(keep, ends, line.is_cluster)
        )
        if fences or rising or state is not None:
            fences = checked_fences(fences, rising)
            packed = words.with_more(packed, fences, rising or (), checked_state(state))
        said = await line.call(Call(words.APPEND, place.meta, packed))
        if type(said) is bytes:
            offset, _, tag = said.partition(b".")
            return Appended(Position(int(offset), tag.decode()), reply)
        try:
            answer = words.answered(said, fences, reply)
        except SENSELESS as error:
            raise words.corrupt(place, said) from error
        if why := words.why_silent(said):
            self._warn(why)
        return answer

    def _warn(self, why: str) -> None:
        """The entry is there, and readers find it: later than they should."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "semel: Redis does not let this user publish, so readers are late: %s. Let it "
                "publish: ACL SETUSER <user> &semel:* +publish (on a cluster +spublish)",
                why,
            )

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        place = place_of(self._namespace, stream)
        most = limit_of(limit)
        call = words.reading(place, after, most)
        return await self._told(place, call, lambda said: words.page_of(place, after, most, said))

    async def load(self, stream: str) -> Snapshot:
        place = place_of(self._namespace, stream)
        call = words.loading(place)
        return await self._told(place, call, lambda said: words.snapshot_of(place, said))

    async def trim(self, stream: str, upto: int | Position) -> int:
        place = place_of(self._namespace, stream)
        return await self._told(place, words.trimming(place, upto), int)

    async def _told(self, place: Place, call: Call, understand: Callable[[Any], T]) -> T:
        reply = await self._line().call(call)
        try:
            return understand(reply)
        except SENSELESS as error:
            raise words.corrupt(place, reply) from error

    async def heads(self, streams: Sequence[str]) -> Sequence[Position]:
        line = self._line()
        places = [place_of(self._namespace, stream) for stream in streams]
        calls, asked = words.asking_heads(places, is_cluster=line.is_cluster)
        told = words.heads_of(asked, await line.calls(calls))
        return [told[stream] for stream in streams]

    async def sweep(self, limit: int = 1000) -> int:
        """Nothing to do: Redis drops streams by itself when their time is over."""
        limit_of(limit)
        return 0
