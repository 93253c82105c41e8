"""What is examined, and what the checks know of it together: each is asked for once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from semel.colour import answers_of
from semel.messages import CANARY, Backlog
from semel.ports import Broker
from semel.relay import KEEP_S
from semel.stores.inbox_rules import RETENTION_S
from semel.values import value

if TYPE_CHECKING:
    from semel.stores.sql import SQLStore
    from semel.stores.sql.doctor import Numbers, Waiting
    from semel.stores.sql.links import Link
    from semel.stores.sql.outbox_cursor import Cursor
    from semel.stores.sql.outbox_lag import Lag
    from semel.stores.sql.outbox_reading import OutboxReader

__all__ = ["Finding", "Patient", "Thresholds", "Verdict", "span"]

T = TypeVar("T")

Verdict: TypeAlias = Literal["ok", "warning", "failed", "not checked"]

# Shards of topics that are looked at at the broker, and how many at the same time.
PLACES = 1000
TOGETHER = 16


@value
class Thresholds:
    """From when on something is worth a warning, or has failed. Durations are seconds.

    `lag_warning_s`, `lag_s`: the oldest event that is not published. `held_up_s`: a writer that
    relays do not pass. `open_s`: any transaction. `gap_s`: a message that waits for one that has
    not come. `parked_s`: a sequence that waits for people. `pending_s`: a message in somebody's
    hands. `retention_s`: for how long the inbox remembers ids. `keep_s`: for how long relays keep
    what is published, None for ever. `dead_rows`: dead rows of a table, if there are more of them
    than live ones.
    """

    lag_warning_s: float = 10.0
    lag_s: float = 60.0
    held_up_s: float = 5.0
    open_s: float = 60.0
    gap_s: float = 300.0
    parked_s: float = 86_400.0
    pending_s: float = 300.0
    retention_s: float = RETENTION_S
    keep_s: float | None = KEEP_S
    dead_rows: int = 10_000


@value
class Finding:
    """One thing that a check has found. Without advice there is nothing to do."""

    verdict: Verdict
    figure: str
    advice: str = ""


class Patient:
    """The outbox and the inboxes of a database, the relays of one name, and their broker."""

    def __init__(
        self,
        store: SQLStore,
        broker: Broker | None,
        consumers: Sequence[str],
        name: str,
        wait_s: float,
        thresholds: Thresholds,
    ) -> None:
        self.store = store
        self._broker = broker
        self.consumers = tuple(dict.fromkeys(consumers))
        self.name = name
        self.wait_s = wait_s
        self.thresholds = thresholds
        self._known: dict[str, Any] = {}

    @property
    def broker(self) -> Broker:
        assert self._broker is not None, "checks that need a broker are not run without one"
        return self._broker

    @property
    def has_broker(self) -> bool:
        return self._broker is not None

    async def ask(self, work: Callable[[Link], Awaitable[T]]) -> T:
        from semel.stores.sql.doctor import ask

        return await ask(self.store, work)

    async def _once(self, what: str, find: Callable[[], Awaitable[T]]) -> T:
        if what not in self._known:
            self._known[what] = await find()
        found: T = self._known[what]
        return found

    def wants(self, consumer: str) -> bool:
        return not self.consumers or consumer in self.consumers

    # --- relays -----------------------------------------------------------------------------

    def reader(self, shards: int) -> OutboxReader:
        from semel.stores.sql.outbox_reading import OutboxReader

        return OutboxReader(self.store, name=self.name, shards=shards)

    async def shards(self) -> int | None:
        """How many shards the relays of this name have; None where none has ever run."""
        return (await self.relays()).get(self.name)

    async def relays(self) -> Mapping[str, int]:
        return await self._once("relays", self.reader(1).relays)

    async def lag(self) -> Lag:
        shards = await self.shards()
        return await self._once("lag", self.reader(shards or 1).lag)

    async def news(self) -> int:
        """Up to where relays may read now."""
        return await self.reader(1).news()

    async def cursors(self) -> Sequence[Cursor]:
        """As they are now."""
        from semel.stores.sql.doctor import cursors

        return await self.ask(lambda link: cursors(link, self.name))

    # --- numbers, and what waits ------------------------------------------------------------

    async def numbers(self) -> Sequence[Numbers]:
        from semel.stores.sql.doctor import numbers

        return await self._once("numbers", lambda: self.ask(numbers))

    async def waiting(self) -> Sequence[Waiting]:
        """Of the consumers that are asked for."""
        from semel.stores.sql.doctor import waiting

        found = await self._once("waiting", lambda: self.ask(waiting))
        return [each for each in found if self.wants(each.consumer)]

    # --- the broker -------------------------------------------------------------------------

    async def places(self) -> Sequence[tuple[str, int]]:
        """Shards of topics that were published to, the doctor's own topic apart."""
        found = {
            (topic, cursor.shard)
            for cursor in await self.cursors()
            for topic in cursor.tails
            if not topic.startswith(CANARY)
        }
        return sorted(found)[:PLACES]

    async def backlogs(self) -> Sequence[Backlog]:
        return await self._once("backlogs", self._backlogs)

    async def _backlogs(self) -> Sequence[Backlog]:
        turn = asyncio.Semaphore(TOGETHER)

        async def look(topic: str, shard: int) -> Backlog:
            async with turn:
                return await self.broker.backlog(topic, shard)

        return await answers_of([look(topic, shard) for topic, shard in await self.places()])


MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400


def span(seconds: float) -> str:
    """A duration for people."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < MINUTE_S:
        return f"{seconds:.1f} s"
    if seconds < HOUR_S:
        return f"{seconds / MINUTE_S:.0f} min"
    return f"{seconds / HOUR_S:.0f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} d"
