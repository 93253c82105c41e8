"""From the outbox to a broker: every committed event, in order, whoever dies on the way.

    relay = Relay("postgresql://app@db/shop", RedisBroker("redis://localhost"))
    await relay.run()

Any number of relays may run. Each shard has one owner at a time (`semel.shards`), who reads the
outbox behind the shard's cursor, publishes, and moves the cursor. The order of these three is the
whole secret: a relay that dies in between publishes again, and never passes anything over. What
the second copy meets is the broker's business: Redis refuses it by its position, others by its id,
and every inbox by its number.

A topic that cannot take more gets a lane of its own, behind the others, so that it holds up nobody
else; and so does a topic whose broker has lost its tail: its lane begins where the broker ends, and
what was lost is published again.

For an event that the broker refuses, such as one that is too large for it, a stand-in is published:
the same, without its payload. The easy mistake is to leave the event out: an empty place is how a
database shows that it was brought back from an older copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from semel.circuit import Circuit
from semel.colour import ASYNC
from semel.errors import SettingsError, StoreUnavailableError
from semel.imports import importing
from semel.ports import Broker
from semel.relay.shard import OUTAGE, Shard
from semel.settings import as_broker
from semel.shards import LEASE_S, Hold, Shards
from semel.values import value

if TYPE_CHECKING:
    from semel.stores.sql import SQLStore
    from semel.stores.sql.outbox_reading import OutboxReader

__all__ = ["Relay", "RelayStatus"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)

log = logging.getLogger("semel")

BATCH = 1000

# How often the outbox is looked at: while events come, and when none have come for long.
BUSY_S = 0.002
IDLE_S = 0.25

# How long published rows are kept, to publish them again to a broker that has lost its tail.
KEEP_S = 3600.0
SWEEP_EVERY_S = 5.0
SWEEP_ROWS = 20_000


@value
class RelayStatus:
    """What a relay is doing, for people and probes.

    `waits_for` are those who may have shards that fall to it, by host and process, until they let
    go or their leases run out. `refused` counts the events that were published as stand-ins,
    because the broker refused them.
    `held` says why a topic lags behind, and `stopped` why a shard stands still until people decide.
    `turning` is False when it has not done anything for so long that only a restart can help.
    """

    name: str
    shards: int
    owned: Sequence[int] = ()
    members: int = 0
    waits_for: tuple[str, ...] = ()
    published: int = 0
    repeated: int = 0
    refused: int = 0
    swept: int = 0
    outage: str = ""
    held: Mapping[str, str] = field(default_factory=dict[str, str])
    stopped: Mapping[int, str] = field(default_factory=dict[int, str])
    turning: bool = True

    @property
    def ready(self) -> bool:
        return not self.outage and not self.stopped


class Relay:
    """Publishes the events of one outbox to one broker, or the one at a URL.

    `name` tells relays of the same outbox apart that publish to different brokers. `source` is the
    CloudEvents source of everything published. `keep_s`: for how long rows stay after they are
    published; None keeps them until somebody else deletes them. `reader` stands for the outbox in
    tests.
    """

    def __init__(
        self,
        store: SQLStore | Any,
        broker: Broker | str,
        *,
        name: str = "default",
        source: str = "",
        batch: int = BATCH,
        lease_s: float = LEASE_S,
        idle_s: float = IDLE_S,
        keep_s: float | None = KEEP_S,
        notify: bool = False,
        reader: OutboxReader | None = None,
    ) -> None:
        from semel.stores.sql import SQLStore
        from semel.stores.sql.outbox_reading import OutboxReader

        self._opened = reader is None and not isinstance(store, SQLStore)
        self._store: SQLStore = (
            store if reader is not None or isinstance(store, SQLStore) else SQLStore(store)
        )
        self.name = name
        self.broker = as_broker(broker)
        self._opened_broker = isinstance(broker, str)
        self.batch = batch
        self.reader = reader or OutboxReader(
            self._store, name=name, shards=self.broker.shards, source=source
        )
        self.broker_circuit = Circuit(f"the broker of relay {name}")
        self.store_circuit = Circuit(f"the store of relay {name}")
        self._shards = Shards(self._store, f"relay:{name}", self.broker.shards, lease_s=lease_s)
        self._idle_s = idle_s
        self._keep_s = keep_s
        self._notify = notify
        self._stopping = asyncio.Event()
        self.news = -1
        """What the outbox last said of itself."""
        self._waiting: dict[asyncio.Event, None] = {}
        """Who waits for news, in the order they came."""
        self._fault: Exception | None = None
        self.counts = {"published": 0, "repeated": 0, "refused": 0, "swept": 0}
        self.held: dict[tuple[int, str], str] = {}
        self.stopped: dict[int, str] = {}

    async def run(self) -> None:
        """Relay until `stop`. What is in hand is finished, and every shard handed over.

        A store or a broker that does not answer is waited for. What no waiting mends, such as
        missing tables or another number of shards, raises `SettingsError`.
        """
        beside: list[asyncio.Task[None]] = []
        try:
            await self._reach()
            beside += [asyncio.create_task(self._beside(w)) for w in (self._watch, self._sweep)]
            await self._shards.run(self._own)
        finally:
            await _cut_off(beside)
            if self._opened:
                await self._store.aclose()
            if self._opened_broker:
                await self.broker.aclose()
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        self._stopping.set()
        self._shards.stop()

    async def _reach(self) -> None:
        """Until the store has answered: so it is known that what we need is there."""
        while not self._stopping.is_set():
            try:
                await self._store.ledger(ASYNC).look(bytes(32))
                await self.reader.news()
            except StoreUnavailableError as error:
                self.store_circuit.failed(error, "outbox")
                await self.store_circuit.wait(self._stopping, "outbox")
            else:
                self.store_circuit.passed("outbox")
                break
        self.store_circuit.gave_up("outbox")

    async def _beside(self, work: Callable[[], Awaitable[None]]) -> None:
        """Work without which the others would wait for ever: when it fails, the relay ends."""
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - raised by `run`
            self._end_with(error)

    def _end_with(self, error: Exception) -> None:
        self._fault = self._fault or error
        self.stop()

    def status(self) -> RelayStatus:
        held = {topic: why for (_, topic), why in sorted(self.held.items())}
        return RelayStatus(
            self.name,
            self.broker.shards,
            tuple(self._shards.owned),
            self._shards.members,
            self._shards.waits_for,
            **self.counts,
            outage=self.broker_circuit.error or self.store_circuit.error,
            held=held,
            stopped=dict(self.stopped),
            turning=self._shards.turning,
        )

    async def _own(self, hold: Hold) -> None:
        try:
            await Shard(self, hold).run()
        except SettingsError as error:
            self._end_with(error)

    # --- news -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at the outbox: often while events come, seldom when none do."""
        from semel.stores.sql.outbox_bell import listen

        pause_s = BUSY_S
        with listen() as bell:
            hearing = asyncio.create_task(self.reader.listen(bell)) if self._notify else None
            try:
                while True:
                    pause_s = BUSY_S if await self._look() else min(self._idle_s, pause_s * 1.3)
                    if await bell.wait(pause_s):
                        pause_s = BUSY_S
            finally:
                if hearing is not None:
                    hearing.cancel()

    async def _look(self) -> bool:
        try:
            news = await self.reader.news()
        except StoreUnavailableError as error:
            self.store_circuit.failed(error, "outbox")
            await self.store_circuit.wait(self._stopping, "outbox")
            return False
        self.store_circuit.passed("outbox")
        if news == self.news:
            return False
        self.news = news
        for waiting in self._waiting:
            waiting.set()
        return True

    async def until_news(self, since: int, hold: Hold, wait_s: float) -> None:
        """Until the outbox has moved on, the shard is to be put down, or the time is up."""
        if self.news != since or hold.ending.is_set():
            return
        woken = asyncio.Event()
        self._waiting[woken] = None
        ending = asyncio.ensure_future(hold.ending.wait())
        ending.add_done_callback(lambda _: woken.set())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await woken.wait()
        finally:
            ending.cancel()
            del self._waiting[woken]

    # --- cleaning up ------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Whoever owns the first shard deletes what is published and old enough."""
        swept = 0
        while self._keep_s is not None:
            # At once where there is more: it rests by itself, and an outbox must not grow faster.
            if swept < SWEEP_ROWS:
                await ASYNC.sleep(SWEEP_EVERY_S)
            swept = 0
            if 0 not in self._shards.owned:
                continue
            with contextlib.suppress(*OUTAGE):
                swept = await self.reader.sweep(keep_s=self._keep_s, limit=SWEEP_ROWS)
                self.counts["swept"] += swept


async def _cut_off(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel them until they end: `asyncio.wait_for`, in a driver, can swallow a cancellation."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=1.0)
