"""One event per shard, all the way: written, relayed, read back, acknowledged.

It goes to a topic of its own, `semel.canary.` and a name that no other outbox has: two outboxes in
one topic would each take the other's events for a fork. The doctor reads it with a group of its
own, and trims what it has read.

One doctor at a time: a claim in the ledger sees to that, gives the fence to read with, and
remembers which canaries are out. One that is still on its way is waited for instead of sending
another behind it, so however often nobody relays, there is one per shard.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from uuid import uuid4

from semel.colour import ASYNC, answers_of
from semel.doctor.patient import Finding, Patient, span
from semel.errors import SemelError
from semel.keys import make_key, new_attempt
from semel.messages import CANARY, Delivery, shard_of
from semel.outbox import Event, Outbox
from semel.ports import Broker, Consumer
from semel.shards import owners
from semel.values import Busy, Claim, Terms, Won

if TYPE_CHECKING:
    from semel.stores.sql.outbox_cursor import Cursor

__all__ = ["GROUP", "Trims", "canary"]


class _Outbox(Outbox):
    """One that may write to the topics of canaries."""

    _reserved = ()


GROUP = "semel-doctor"

# How often is looked whether they have arrived; times are not more exact than this.
LOOK_S = 0.01

# Messages that stay of each shard.
KEPT = 10

# Longer than an examination takes, and short enough to wait for after a crash.
LEASE_S = 60.0


@runtime_checkable
class Trims(Protocol):
    """A broker that can be told to forget early."""

    async def trim(self, topic: str, keep: int) -> None: ...


async def canary(patient: Patient) -> Sequence[Finding]:
    """Does an event of every shard arrive, and how soon?"""
    ledger = patient.store.ledger(ASYNC)
    key = make_key(f"canary {patient.name}", operation="semel.doctor", per_operation=True)
    # For ever: it has the name of the topic.
    terms = Terms(lease_s=LEASE_S + patient.wait_s, ttl_s=None)
    answer = await ledger.claim(key, attempt=new_attempt(), terms=terms)
    match answer:
        case Won(claim, steps):
            try:
                return await _Flight(patient, claim, steps).run()
            finally:
                with contextlib.suppress(SemelError):
                    await ledger.release(claim)
        case Busy(left_s):
            advice = f"repeat when it is done, or in {span(left_s)}"
            return [Finding("not checked", "another doctor is at it", advice)]
        case _:
            raise AssertionError(f"nobody completes this claim: {answer}")


class _Flight:
    """The canaries of one examination."""

    def __init__(self, patient: Patient, claim: Claim, steps: Mapping[str, bytes]) -> None:
        self._patient = patient
        self._broker: Broker = patient.broker
        self._shards = range(self._broker.shards)
        self._claim = claim
        self._steps = steps
        self._topic = CANARY + steps.get("topic", b"").decode()
        self._waited: dict[int, str] = {}
        """By shard, the event that is waited for."""
        self._took_s: dict[int, float] = {}
        self._held: dict[int, list[Delivery]] = {shard: [] for shard in self._shards}
        """By shard, what was read. Acknowledged only when it is noted that it has come: a relay may
        publish long before it moves its cursor, and meanwhile it looks as if it were on its way."""

    async def run(self) -> Sequence[Finding]:
        if "topic" not in self._steps:
            name = uuid4().hex
            await self._note("topic", name)
            self._topic = CANARY + name
        await self._broker.join(self._topic, GROUP)
        readers = await answers_of([self._reader(shard) for shard in self._shards])
        cursors = {cursor.shard: cursor for cursor in await self._patient.cursors()}
        astray = [shard for shard in self._shards if await self._is_astray(cursors.get(shard))]
        await self._send([shard for shard in self._shards if shard not in astray], cursors)
        try:
            await self._wait(readers)
            await self._note_sent({shard: self._waited[shard] for shard in self._left()})
            await answers_of([reader.ack(self._held[n]) for n, reader in enumerate(readers)])
        finally:
            await answers_of([reader.close() for reader in readers])
        if isinstance(self._broker, Trims):
            await self._broker.trim(self._topic, KEPT)
        return [*_astray(astray), *await self._missing(), *self._arrived()]

    async def _note(self, name: str, text: str) -> None:
        await self._patient.store.ledger(ASYNC).note(self._claim, name, text.encode())

    async def _note_sent(self, sent: Mapping[int, str]) -> None:
        await self._note("sent", json.dumps([len(self._shards), sent]))

    async def _reader(self, shard: int) -> Consumer:
        name = f"{platform.node()[:40]}:{os.getpid()}"
        reader = await self._broker.consumer(
            self._topic, GROUP, shard, name=name, fence=self._claim.fence
        )
        while left := await reader.left_over():  # of a doctor that died
            self._held[shard] += left
        return reader

    async def _is_astray(self, cursor: Cursor | None) -> bool:
        """Was the last one published, and not here? Another would go astray, too."""
        if cursor is None or self._topic not in cursor.tails:
            return False
        tail = await self._broker.tail(self._topic, cursor.shard)
        return tail is not None and tail.position < cursor.tails[self._topic].position

    # --- sending ----------------------------------------------------------------------------

    async def _send(self, shards: Sequence[int], cursors: Mapping[int, Cursor]) -> None:
        from semel.stores.sql.doctor import within

        under_way = await self._under_way(cursors)
        fresh = {shard: str(uuid4()) for shard in shards if shard not in under_way}
        self._waited = {shard: under_way.get(shard) or fresh[shard] for shard in shards}
        # Before they are sent: one that is noted and never sent is not found, and sent anew.
        await self._note_sent(self._waited)
        aggregates, outbox = self._aggregates(), _Outbox()

        def add(session: object) -> None:
            for shard, id in fresh.items():
                event = Event(
                    type="semel.canary",
                    aggregate_type=self._patient.name,
                    aggregate_id=aggregates[shard],
                    payload={"shard": shard},
                    topic=self._topic,
                    id=id,
                )
                outbox.add(session, event)  # type: ignore[arg-type]

        if fresh:
            await within(self._patient.store, add)

    async def _under_way(self, cursors: Mapping[int, Cursor]) -> Mapping[int, str]:
        """Those of earlier examinations that no relay has published yet, by shard."""
        from semel.stores.sql.doctor import is_published

        shards, sent = json.loads(self._steps.get("sent", b"[0, {}]"))
        if shards != len(self._shards):
            return {}
        found: dict[int, str] = {}
        for shard, id in ((int(shard), id) for shard, id in sent.items()):
            cursor = cursors.get(shard)
            if self._has_come(shard, id):
                continue
            if await self._patient.ask(lambda link: is_published(link, id, cursor)) is False:  # noqa: B023
                found[shard] = id
        return found

    def _aggregates(self) -> Mapping[int, str]:
        """For each shard an aggregate that belongs to it: always the same ones."""
        from semel.stores.sql.outbox_writing import counter_of

        found: dict[int, str] = {}
        for n in count():
            counter = counter_of("", self._topic, self._patient.name, str(n))
            found.setdefault(shard_of(counter[0], len(self._shards)), str(n))
            if len(found) == len(self._shards):
                return found
        raise AssertionError("every shard has slots")

    # --- waiting ----------------------------------------------------------------------------

    async def _wait(self, readers: Sequence[Consumer]) -> None:
        began = ASYNC.now()
        while True:
            await answers_of([self._read(shard, readers[shard], began) for shard in self._left()])
            if not self._left() or ASYNC.now() - began > self._patient.wait_s:
                return
            await ASYNC.sleep(LOOK_S)

    def _left(self) -> Sequence[int]:
        return [shard for shard in self._waited if shard not in self._took_s]

    async def _read(self, shard: int, reader: Consumer, began: float) -> None:
        while found := await reader.read(100):
            self._held[shard] += found
        if self._has_come(shard, self._waited[shard]):
            self._took_s[shard] = ASYNC.now() - began

    def _has_come(self, shard: int, id: str) -> bool:
        return any(each.message and each.message.id == id for each in self._held[shard])

    # --- telling ----------------------------------------------------------------------------

    def _arrived(self) -> Sequence[Finding]:
        times = sorted(self._took_s.values())
        if not times:
            return []
        took = span(times[0]) if len(times) == 1 else f"{span(times[0])} to {span(times[-1])}"
        return [Finding("ok", f"{len(times)} of {len(self._shards)} shards, in {took}")]

    async def _missing(self) -> Sequence[Finding]:
        if not (left := self._left()):
            return []
        owned = await owners(self._patient.store, f"relay:{self._patient.name}", len(self._shards))
        cursors = {cursor.shard: cursor for cursor in await self._patient.cursors()}
        by_advice: dict[str, list[int]] = {}
        for shard in left:
            by_advice.setdefault(await self._advice(shard, owned, cursors), []).append(shard)
        late = f"not here after {span(self._patient.wait_s)}"
        return [
            Finding("failed", f"{_listed(shards)}: {late}", advice)
            for advice, shards in by_advice.items()
        ]

    async def _advice(
        self, shard: int, owned: Mapping[int, str], cursors: Mapping[int, Cursor]
    ) -> str:
        from semel.stores.sql.doctor import is_published

        id, cursor = self._waited[shard], cursors.get(shard)
        if await self._patient.ask(lambda link: is_published(link, id, cursor)):
            return ELSEWHERE
        if shard in owned:
            return f"its relay, {owned[shard]}, does not publish it: see its log and /readyz"
        return f"no relay owns it: start `semel relay URL --to URL --name {self._patient.name}`"


ELSEWHERE = "it was published, and not to this broker: give --broker the URL that relays have"


def _listed(shards: Sequence[int]) -> str:
    return f"shard {', '.join(map(str, shards))}"


def _astray(shards: Sequence[int]) -> Sequence[Finding]:
    if not shards:
        return []
    return [Finding("failed", f"{_listed(shards)}: the last one never came", ELSEWHERE)]
