"""Who works on which shard: fenced owners, by claims that are renewed.

    shards = Shards(store, "relay:default", 8)
    await shards.run(own)       # own(hold) is begun for every shard that falls to us

A party of several processes shares the shards of one name. Each party member has a seat, the
lowest that was free, which is a claim like any other; who sits where says which shards are whose,
so nobody has to negotiate. A shard that is somebody else's by now is let go when its work has been
put down; one that became ours is claimed as soon as its owner has let go, or has died and its lease
has run out. Each new owner has a larger fence than the one before.

The easy mistake is to believe that one still owns a shard because nobody said otherwise. A frozen
process wakes up and goes on with its next line. `hold.live` tells as much as a process can know by
itself; what really keeps a former owner out is the fence, checked where the effect lands.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from semel.colour import ASYNC, answers_of
from semel.errors import SemelError, in_one_line
from semel.keys import new_attempt
from semel.ports import Consumer, Store, StoreLedger
from semel.stores.owners import is_live, key_of, owners
from semel.values import Claim, Kept, Key, Record, Terms, Won

__all__ = ["Hold", "Shards", "let_go", "owners"]

T = TypeVar("T")

log = logging.getLogger("semel")

LEASE_S = 10.0

# A lease is renewed so often while it lasts: one renewal may be lost, and the next be late.
TURNS = 3

# How long letting go of a consumer may take: who comes next does not depend on it.
CLOSING_S = 1.0

# Whoever has not turned for so long, or for three leases, will not do so by itself.
STUCK_S = 30.0


class Hold:
    """The right to work on one shard, until it is asked to end or its lease runs out."""

    def __init__(self, shard: int, claim: Claim, sent: float) -> None:
        self.shard = shard
        self.claim = claim
        self.ending = asyncio.Event()
        """Set when the work is to be put down: finish what is in hand, begin nothing."""
        self.tasks: list[asyncio.Task[None]] = []
        """What is cut off when the hold is over."""
        self.unheard = False
        """Was it asked in vain for the lease since that was last renewed?"""
        self._good_until = sent + claim.terms.lease_s
        self._ends_at = math.inf

    @property
    def fence(self) -> int:
        return self.claim.fence

    @property
    def live(self) -> bool:
        """Is the lease known to be ours? Counted from before it was asked for."""
        return not self.ending.is_set() and self.left_s > 0

    @property
    def left_s(self) -> float:
        """How long the work may go on: as long as the lease, or the time to put it down."""
        return min(self._good_until, self._ends_at) - ASYNC.now()

    @property
    def wanted(self) -> bool:
        """Is the lease to be renewed?"""
        return self.left_s > 0 and self._good_until < self._ends_at

    @property
    def overslept(self) -> bool:
        """Has the lease run out before anybody could ask? Then it may still be ours."""
        return self._good_until <= ASYNC.now() < self._ends_at and not self.unheard

    def renewed(self, sent: float) -> None:
        self.unheard = False
        self._good_until = max(self._good_until, sent + self.claim.terms.lease_s)

    def end(self, grace_s: float) -> None:
        """Have the work put down, within what is left of the lease or `grace_s`."""
        if self._ends_at == math.inf:
            self._ends_at = max(self._good_until, ASYNC.now() + grace_s)
        self.ending.set()

    def over(self) -> None:
        """It is somebody else's, or the time is up: nothing works for us any more."""
        self._ends_at = -math.inf
        self.ending.set()
        for task in self.tasks:
            task.cancel()


Own = Callable[[Hold], Coroutine[Any, Any, None]]


class Shards:
    """Our part of the shards of one name. `count` must be the same for the whole party.

    Work that is to be put down has what is left of its lease for it, or `grace_s` if that is more:
    until then the lease is renewed. After that it is cancelled.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        count: int,
        *,
        lease_s: float = LEASE_S,
        grace_s: float = 0.0,
    ) -> None:
        self._store = store
        self._name = name
        self._count = count
        self._terms = Terms(lease_s=lease_s, ttl_s=max(60.0, 6 * lease_s))
        self._turn_s = lease_s / TURNS
        self._grace_s = grace_s
        self._seat: Hold | None = None
        self._holds: dict[int, Hold] = {}
        """Every shard that we work on, or have not put down yet."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._turned_at: float | None = None
        self._silent = False
        self.members = 0
        """How many seats were taken when we last looked."""
        self.waits_for: tuple[str, ...] = ()
        """Who may have what falls to us, by host and process: until they let go, or their leases
        run out."""
        self._others: tuple[str, ...] = ()

    @property
    def owned(self) -> list[int]:
        return sorted(shard for shard, hold in self._holds.items() if hold.live)

    @property
    def turning(self) -> bool:
        """Does it still turn? An outage does not keep it from that, so a restart would help."""
        limit_s = max(STUCK_S, TURNS * self._terms.lease_s)
        return self._turned_at is None or ASYNC.now() - self._turned_at < limit_s

    def stop(self) -> None:
        """Put everything down and hand it over; `run` returns when that is done."""
        self._stopping.set()

    async def run(self, own: Own) -> None:
        """Own what falls to us, until `stop`. Work that ends or raises is begun anew next turn."""
        ledger = self._store.ledger(ASYNC)
        try:
            while not self._stopping.is_set():
                self._turned_at = ASYNC.now()
                await self._turn(ledger, own)
                await self._rest()
        finally:
            self._turned_at = None
            await self._leave(ledger)

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._turn_s):
                await self._stopping.wait()

    # --- keeping it -------------------------------------------------------------------------

    async def _keep(self, ledger: StoreLedger, hold: Hold) -> None:
        """Renew it, apart from the turns and from the others: what is slow may cost only itself."""
        pause_s = self._turn_s
        while hold.wanted:
            await ASYNC.sleep(pause_s)
            pause_s = self._turn_s if await self._renew(ledger, hold) else self._turn_s / 4

    async def _renew(self, ledger: StoreLedger, hold: Hold) -> bool:
        sent = ASYNC.now()
        try:
            async with asyncio.timeout(self._terms.lease_s / 2):
                verdict = await ledger.renew(hold.claim)
        except (SemelError, TimeoutError) as error:
            self._heard(error)
            hold.unheard = True
            return False
        if isinstance(verdict, Kept):
            hold.renewed(sent)
        else:
            hold.over()
        return True

    # --- one turn ---------------------------------------------------------------------------

    async def _turn(self, ledger: StoreLedger, own: Own) -> None:
        """See who is there, and take and leave what follows from that."""
        try:
            async with asyncio.timeout(self._terms.lease_s):
                ours = await self._ours(ledger)
                for shard, hold in self._holds.items():
                    if shard not in ours:
                        hold.end(self._grace_s)
                wanted = [shard for shard in ours if shard not in self._holds]
                took = await answers_of([self._take(ledger, shard, own) for shard in wanted])
                self.waits_for = self._others if not all(took) or self._seat is None else ()
        except (SemelError, TimeoutError) as error:
            self._heard(error)
        else:
            self._heard(None)

    async def _ours(self, ledger: StoreLedger) -> Sequence[int]:
        """The shards that fall to us, by where everybody sits."""
        seen = await answers_of(
            [ledger.look(self._key(f"seat {n}").id) for n in range(self._count)]
        )
        taken = {n: record for n, record in enumerate(seen) if record and is_live(record)}
        mine = await self._sit(ledger, taken)
        seats = sorted({*taken} if mine is None else {*taken, mine})
        self.members = len(seats)
        others = {record.holder for n, record in taken.items() if n != mine}
        self._others = tuple(sorted(others))
        return [] if mine is None else range(seats.index(mine), self._count, len(seats))

    async def _sit(self, ledger: StoreLedger, taken: dict[int, Record]) -> int | None:
        """Our seat; None where there are more of us than shards, and we wait for one to leave."""
        seat = self._seat
        if seat is not None:
            record = taken.get(seat.shard)
            if seat.live and record is not None and record.attempt == seat.claim.attempt:
                return seat.shard
            self._seat = None
            seat.over()
            self._begin(self._release(ledger, seat.claim))
        for n in range(self._count):
            if n not in taken and (seat := await self._claim(ledger, f"seat {n}", n)):
                self._seat = seat
                return n
        return None

    async def _take(self, ledger: StoreLedger, shard: int, own: Own) -> bool:
        hold = await self._claim(ledger, f"shard {shard}", shard)
        if hold is not None:
            log.info("semel: %s: took shard %d, fence %d", self._name, shard, hold.fence)
            self._holds[shard] = hold
            self._begin(self._tend(ledger, hold, own))
        return hold is not None

    async def _claim(self, ledger: StoreLedger, what: str, shard: int) -> Hold | None:
        sent, key, attempt = ASYNC.now(), self._key(what), new_attempt()
        try:
            answer = await ledger.claim(key, attempt=attempt, terms=self._terms)
        except (SemelError, asyncio.CancelledError):
            # It may have been won all the same, and would be nobody's for a whole lease.
            self._begin(self._release(ledger, Claim(key, attempt, b"", self._terms)))
            raise
        if not isinstance(answer, Won):
            return None
        hold = Hold(shard, answer.claim, sent)
        hold.tasks.append(self._begin(self._keep(ledger, hold)))
        return hold

    def _key(self, what: str) -> Key:
        return key_of(self._name, what)

    def _heard(self, error: Exception | None) -> None:
        """An outage is told once, and its end."""
        if error is not None and not self._silent:
            log.warning(
                "semel: %s: the store of the shards does not answer: %s",
                self._name,
                in_one_line(error),
            )
        elif error is None and self._silent:
            log.warning("semel: %s: the store of the shards answers again", self._name)
        self._silent = error is not None

    # --- working, and letting go ------------------------------------------------------------

    async def _tend(self, ledger: StoreLedger, hold: Hold, own: Own) -> None:
        """Have it worked on, until that ends, by itself or by its time; then let go of it."""
        work = asyncio.create_task(own(hold))
        hold.tasks.append(work)
        while not work.done() and (hold.left_s > 0 or hold.overslept):
            if hold.left_s > 0:
                await asyncio.wait([work], timeout=hold.left_s)
            else:  # the loop stood still, in somebody's hands or with its machine
                await self._renew(ledger, hold)
        if not work.done():
            log.warning("semel: %s: shard %d is lost, or took too long", self._name, hold.shard)
        hold.over()
        await asyncio.wait([work])
        if not work.cancelled() and (error := work.exception()) is not None:
            log.error("semel: %s: work on shard %d ended", self._name, hold.shard, exc_info=error)
        try:
            await self._release(ledger, hold.claim)
        finally:
            del self._holds[hold.shard]

    async def _leave(self, ledger: StoreLedger) -> None:
        for hold in self._holds.values():
            hold.end(self._grace_s)
        seat, self._seat = self._seat, None
        if seat is not None:  # first, so that the others take each shard as it is put down
            seat.over()
            await self._release(ledger, seat.claim)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _release(self, ledger: StoreLedger, claim: Claim) -> None:
        """A courtesy: a lease that is not released runs out."""
        with contextlib.suppress(SemelError, TimeoutError):
            async with asyncio.timeout(self._terms.lease_s):
                await ledger.release(claim)


async def let_go(consumer: Consumer) -> None:
    """Close it: a courtesy, for the next owner gets what is pending anyway.

    A coroutine that is being closed cannot await any more, so nothing is done for it.
    """
    if isinstance(sys.exception(), GeneratorExit):
        return
    with contextlib.suppress(SemelError, TimeoutError):
        async with asyncio.timeout(CLOSING_S):
            await consumer.close()
