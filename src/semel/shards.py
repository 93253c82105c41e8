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
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from semel.colour import ASYNC
from semel.errors import SemelError
from semel.keys import make_key, new_attempt
from semel.ports import Store, StoreLedger
from semel.values import Claim, Kept, Key, Record, State, Terms, Won

__all__ = ["Hold", "Shards"]

log = logging.getLogger("semel")

LEASE_S = 10.0

# A lease is renewed so often while it lasts.
TURNS = 3

# Whoever has not turned for so long, or for three leases, will not do so by itself.
STUCK_S = 30.0


class Hold:
    """The right to work on one shard, until it is asked to end or its lease runs out."""

    def __init__(self, shard: int, claim: Claim, sent: float) -> None:
        self.shard = shard
        self.claim = claim
        self.ending = asyncio.Event()
        """Set when the work is to be put down: finish what is in hand, begin nothing."""
        self._good_until = sent + claim.terms.lease_s

    @property
    def fence(self) -> int:
        return self.claim.fence

    @property
    def live(self) -> bool:
        """Is the lease known to be ours? Counted from before it was asked for."""
        return not self.ending.is_set() and ASYNC.now() < self._good_until

    @property
    def left_s(self) -> float:
        return self._good_until - ASYNC.now()

    def renewed(self, sent: float) -> None:
        self._good_until = sent + self.claim.terms.lease_s


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
        self._owned: dict[int, tuple[Hold, asyncio.Task[None]]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._turned_at: float | None = None
        self.members = 0
        """How many seats were taken when we last looked."""

    @property
    def owned(self) -> list[int]:
        return sorted(self._owned)

    @property
    def turning(self) -> bool:
        """Does it still turn? An outage does not keep it from that, so a restart would help."""
        limit_s = max(STUCK_S, TURNS * self._terms.lease_s)
        return self._turned_at is None or ASYNC.now() - self._turned_at < limit_s

    def stop(self) -> None:
        """Put everything down and hand it over; `run` returns when that is done."""
        self._stopping.set()

    async def run(self, own: Own) -> None:
        """Own what falls to us, until `stop`. A piece of work that raises is begun anew later."""
        ledger = self._store.ledger(ASYNC)
        try:
            while not self._stopping.is_set():
                self._turned_at = ASYNC.now()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(self._turn_s, self._terms.lease_s)):
                        await self._turn(ledger, own)
                await self._rest()
        finally:
            await self._leave(ledger)

    async def _rest(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._turn_s):
                await self._stopping.wait()

    # --- one turn ---------------------------------------------------------------------------

    async def _turn(self, ledger: StoreLedger, own: Own) -> None:
        try:
            await self._renew(ledger)
            if self._seat is None:
                self._seat = await self._sit_down(ledger)
            ours = await self._ours(ledger)
            self._let_go(ledger, [s for s in self._owned if s not in ours])
            await self._take(ledger, [s for s in sorted(ours) if s not in self._owned], own)
        except SemelError as error:
            log.warning("semel: %s: the store of the shards did not answer: %s", self._name, error)
        self._drop_dead()

    async def _renew(self, ledger: StoreLedger) -> None:
        holds = [hold for hold, _ in self._owned.values()]
        holds += [self._seat] if self._seat else []
        await asyncio.gather(*(self._renew_one(ledger, hold) for hold in holds))

    async def _renew_one(self, ledger: StoreLedger, hold: Hold) -> None:
        """A lease whose renewal failed may still be ours, until it runs out."""
        sent = ASYNC.now()
        with contextlib.suppress(SemelError):
            if isinstance(await ledger.renew(hold.claim), Kept):
                hold.renewed(sent)
            else:
                hold._good_until = 0.0  # noqa: SLF001 - one module, one story

    async def _sit_down(self, ledger: StoreLedger) -> Hold | None:
        for seat in range(self._count):
            if hold := await self._claim(ledger, f"seat {seat}", seat):
                return hold
        return None  # more of us than shards: we wait until somebody leaves

    async def _ours(self, ledger: StoreLedger) -> set[int]:
        """The shards that fall to us, by where everybody sits."""
        if self._seat is None:
            return set()
        keys = [self._key(f"seat {seat}") for seat in range(self._count)]
        seen = await asyncio.gather(*(ledger.look(key.id) for key in keys))
        taken = [seat for seat, record in enumerate(seen) if record and _is_live(record)]
        self.members = len(taken)
        if self._seat.shard not in taken:
            return set()
        rank = taken.index(self._seat.shard)
        return {shard for shard in range(self._count) if shard % len(taken) == rank}

    async def _take(self, ledger: StoreLedger, wanted: Iterable[int], own: Own) -> None:
        holds = await asyncio.gather(*(self._claim(ledger, f"shard {s}", s) for s in wanted))
        for hold in holds:
            if hold is not None:
                log.info("semel: %s: took shard %d, fence %d", self._name, hold.shard, hold.fence)
                self._owned[hold.shard] = hold, asyncio.create_task(self._work(hold, own))

    async def _claim(self, ledger: StoreLedger, what: str, shard: int) -> Hold | None:
        sent = ASYNC.now()
        answer = await ledger.claim(self._key(what), attempt=new_attempt(), terms=self._terms)
        return Hold(shard, answer.claim, sent) if isinstance(answer, Won) else None

    def _key(self, what: str) -> Key:
        return make_key(f"{self._name} {what}", operation="semel.shards", per_operation=True)

    async def _work(self, hold: Hold, own: Own) -> None:
        try:
            await own(hold)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("semel: %s: work on shard %d ended", self._name, hold.shard)

    # --- letting go -------------------------------------------------------------------------

    def _drop_dead(self) -> None:
        """Shards that are lost, or whose work has ended by itself."""
        for shard, (hold, task) in list(self._owned.items()):
            if task.done() and hold.left_s > 0:
                hold.ending.set()
            if hold.left_s <= 0:
                log.warning("semel: %s: lost shard %d", self._name, shard)
                hold.ending.set()
                task.cancel()
                del self._owned[shard]
        if self._seat is not None and self._seat.left_s <= 0:
            self._seat = None

    def _let_go(self, ledger: StoreLedger, shards: Iterable[int]) -> None:
        ended = [s for s, (_, task) in self._owned.items() if task.done()]
        leaving = [self._owned.pop(shard) for shard in {*shards, *ended}]
        for hold, task in leaving:
            hold.ending.set()
            # In the background: the shards that stay ours are to be renewed meanwhile.
            self._leaving.add(handing := asyncio.create_task(self._hand_over(ledger, hold, task)))
            handing.add_done_callback(self._leaving.discard)

    async def _hand_over(self, ledger: StoreLedger, hold: Hold, task: asyncio.Task[None]) -> None:
        """When the work has been put down, or its time for that is over, by then without it."""
        until = ASYNC.now() + max(self._grace_s, hold.left_s)
        while not task.done() and (left_s := min(hold.left_s, until - ASYNC.now())) > 0:
            await asyncio.wait([task], timeout=min(self._turn_s, left_s))
            if not task.done() and hold.left_s < until - ASYNC.now():
                await self._renew_one(ledger, hold)
        task.cancel()
        await _quietly(ledger.release(hold.claim))

    async def _leave(self, ledger: StoreLedger) -> None:
        self._let_go(ledger, list(self._owned))
        if self._leaving:
            await asyncio.wait(self._leaving)
        if self._seat is not None:
            await _quietly(ledger.release(self._seat.claim))
            self._seat = None


def _is_live(record: Record) -> bool:
    return record.state is State.PENDING and record.lease_until > record.seen_at


async def _quietly(work: Awaitable[Any]) -> None:
    """Letting go is a courtesy: a lease that is not released runs out."""
    with contextlib.suppress(SemelError):
        await work
