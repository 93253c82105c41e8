"""The reader's side of an outbox: what is new, in order, for the one who owns a shard.

    reader = OutboxReader(store, shards=8)
    cursor = await reader.take(shard, fence)                    # None: somebody later has it
    news = await reader.news()
    page = await reader.read(cursor, Lane("", cursor.position), limit=1000, bound=news)
    ...                                                         # publish
    cursor = await reader.advance(cursor, position=page.upto, tails={...}, lanes={})

`news` says how far a reader may go; nothing up to there can appear any more (`outbox_watermark`,
and `outbox_placing` for MariaDB and MySQL). Whoever dies before `advance` reads the same messages
again, at the same positions. Whoever was deposed reads nothing, and moves nothing.

The easy mistake is to read up to the newest row instead of `news`: whatever was written before it
and committed after it is passed over, and never seen.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from semel.colour import ASYNC, Waiter
from semel.errors import SettingsError
from semel.keys import plain
from semel.messages import SLOTS, Message, Tail, slots_of
from semel.stores.owners import owners
from semel.stores.sql import SQLStore
from semel.stores.sql import outbox_cursor as cursors
from semel.stores.sql.faults import NoTableError, pasted
from semel.stores.sql.ledger import AsyncLedger, Home
from semel.stores.sql.lines import AsyncLines, Work
from semel.stores.sql.links import Link
from semel.stores.sql.notify import hear
from semel.stores.sql.outbox_cursor import Cursor, Party
from semel.stores.sql.outbox_lag import Holder, Lag, lag, long_transactions
from semel.stores.sql.outbox_pages import ANY_READER, Stretch, fetch, messages
from semel.stores.sql.outbox_placing import place
from semel.stores.sql.outbox_reshard import refused, reshard
from semel.stores.sql.outbox_sweep import CHUNK, checked_keep, keep, sweep
from semel.stores.sql.outbox_watermark import decided
from semel.stores.sql.outbox_writing import CHANNEL
from semel.stores.sql.rows import stored_name
from semel.values import value

__all__ = ["Cursor", "Holder", "Lag", "Lane", "OutboxReader", "Page"]

T = TypeVar("T")

# The shard's own lane: no topic has an empty name.
OWN = ""

# Shards are read, published and moved side by side; more links than this would only wait.
MOST_LINKS = 4

# A page ends at so many bytes of payload, whatever the limit says.
PAGE_BYTES = 8 * 1024 * 1024

# One statement looks at no more positions than this, so that none takes long: in a shard, or for a
# topic, that little was written to, a page could lie a long way behind.
SPAN = 100_000

NAME_BYTES = 255


@value
class Lane:
    """How far one topic of a shard is; "" is the shard's own lane, with every topic."""

    topic: str
    position: int


@value
class Page:
    """Messages by position. With all of them published the lane is at `upto`.

    `more`: the bound is not reached; read on from `upto`.
    """

    messages: Sequence[Message]
    upto: int
    more: bool


class OutboxReader:
    """Reads one outbox for the relays of one name.

    `source` is what its messages say where they come from. `shards` must be the same for all
    relays of the name; `reshard` changes it.
    """

    def __init__(
        self, store: SQLStore, *, name: str = "default", shards: int = 1, source: str = ""
    ) -> None:
        self._store = store
        self._party = Party(_checked_name(name), _checked_shards(shards))
        self._source = source
        self._there: dict[int, str] = {}
        """By shard: where PostgreSQL has its cursor's row."""
        self._links: weakref.WeakKeyDictionary[Home, _Links] = weakref.WeakKeyDictionary()

    async def news(self) -> int:
        """How far one may read; it changes when there may be something new, in whatever shard."""
        return await self._run(news)

    async def take(self, shard: int, fence: int) -> Cursor | None:
        """Make the shard ours and say where it is; None when a larger fence is there."""
        return await self._run(
            lambda link: cursors.take(link, self._party, self._checked(shard), fence)
        )

    async def read(
        self, cursor: Cursor, lane: Lane, *, limit: int, bound: int | None = None
    ) -> Page:
        """The next messages of a lane, up to `bound`: what `news` has said, or says now.

        A topic's own lane goes no further than the shard's position. Nothing is found when the
        cursor is not the shard's any more.
        """
        return await self._run(lambda link: self._read(link, cursor, lane, limit, bound))

    async def advance(
        self,
        cursor: Cursor,
        *,
        position: int,
        tails: Mapping[str, Tail],
        lanes: Mapping[str, int | None],
    ) -> Cursor | None:
        """Write down where the shard is, with the tails and lanes that have changed, at once.

        A lane that is None has caught up. None, and nothing written, when the shard is not ours
        any more. After giving a topic a lane that lies behind, ask `swept_to` what is left there.
        """
        after = cursors.moved(cursor, position, tails, lanes)
        back = any(at is not None and at < cursor.position for at in lanes.values())
        return after if await self._run(lambda link: self._write(link, after, back)) else None

    async def _write(self, link: Link, cursor: Cursor, back: bool) -> bool:
        if link.dialect.name != "postgresql":
            return await cursors.write(link, self._party, cursor, back=back)
        there = self._there.pop(cursor.shard, "")
        now = await cursors.write_postgres(link, self._party, cursor, there, back=back)
        if now is not None:
            self._there[cursor.shard] = now
        return now is not None

    async def swept_to(self) -> int:
        """Rows up to this position may have been deleted."""
        return await self._run(cursors.swept)

    async def keep(self, position: int) -> None:
        """Have the event at this position never swept: nobody else has its payload."""
        await self._run(partial(keep, position=position))

    async def sweep(self, *, keep_s: float, limit: int = 10_000) -> int:
        """Delete rows that all relays have published and that are older than this.

        A chunk at a time, with a rest after each, so that others come in between; a short one, for
        an outbox must not grow faster than it is swept.
        """
        keep_us, swept = checked_keep(keep_s), 0
        while swept < limit:
            began = ASYNC.now()
            size = min(CHUNK, limit - swept)
            deleted, more = await self._run(partial(sweep, keep_us=keep_us, size=size))
            swept += deleted
            if not more:
                break
            await ASYNC.sleep((ASYNC.now() - began) / 4)
        return swept

    async def reshard(self, shards: int) -> None:
        """Change the number of shards, with the relays stopped and everything published.

        Refused when something is not. Relays with the old number stop at once.
        """
        wanted = _checked_shards(shards)
        await self._refuse_owned()
        await self._run(lambda link: reshard(link, self._party.name, wanted, news))
        self._party = Party(self._party.name, wanted)

    async def _refuse_owned(self) -> None:
        """Relays at work would be left with another number of shards than theirs, and end."""
        name = self._party.name
        count = (await self.relays()).get(name, 0)
        owned = await owners(self._store, f"relay:{name}", count)
        if owned:
            raise refused(name, f"{_told(owned)}: stop these relays")

    # --- for people -------------------------------------------------------------------------

    async def relays(self) -> Mapping[str, int]:
        """The names under which this outbox is read, and how many shards each has."""
        return await self._run(cursors.relays)

    async def lag(self) -> Lag:
        return await self._run(lambda link: lag(link, self._party))

    async def long_transactions(self, older_than_s: float) -> Sequence[Holder]:
        """Transactions that have been open for longer than this; none on SQLite."""
        return await self._run(lambda link: long_transactions(link, older_than_s))

    async def listen(self, bell: Waiter) -> None:
        """Ring when a writer elsewhere says so (`Outbox(notify=True)`), until cancelled.

        Over a connection of its own, which is made anew when it breaks: what is said meanwhile is
        missed, so this is never the only reason to look. Ends at once where there is no NOTIFY.
        """
        if self._store.url.drivername == "postgresql":
            await hear(self._store.heard_at, CHANNEL, begun=bell.ring, heard=lambda _: bell.ring())

    # --- pages ------------------------------------------------------------------------------

    async def _read(
        self, link: Link, cursor: Cursor, lane: Lane, limit: int, bound: int | None
    ) -> Page:
        if lane.topic != OWN:
            bound = cursor.position if bound is None else min(bound, cursor.position)
        elif bound is None:
            bound = await news(link)
        if bound <= lane.position:
            return Page((), lane.position, more=False)
        slots = slots_of(cursor.shard, self._party.shards)
        stretch = Stretch(
            after=lane.position,
            upto=min(bound, lane.position + SPAN),
            slots=None if self._party.shards == 1 else slots,
            topic=None if lane.topic == OWN else stored_name(lane.topic, link.dialect.codec),
        )
        rows, cut = await self._fetch(link, cursor, stretch, limit)
        upto = int(rows[-1][0]) if cut else stretch.upto
        return Page(messages(rows, link.dialect, self._source), upto, more=upto < bound)

    async def _fetch(
        self, link: Link, cursor: Cursor, stretch: Stretch, limit: int
    ) -> tuple[list[Any], bool]:
        there = self._there.get(cursor.shard, "")
        owned = cursors.owned(link, self._party, cursor, there)
        rows, cut = await fetch(link, stretch, owned, limit, PAGE_BYTES)
        if rows or not there or await cursors.is_there(link, owned):
            return rows, cut
        return await fetch(
            link, stretch, cursors.owned(link, self._party, cursor), limit, PAGE_BYTES
        )

    # --- links ------------------------------------------------------------------------------

    def _checked(self, shard: int) -> int:
        if not 0 <= shard < self._party.shards:
            raise SettingsError(f"there is no shard {shard} of {self._party.shards}")
        return shard

    async def _run(self, work: Work[T]) -> T:
        ledger = cast("AsyncLedger", self._store.ledger(ASYNC))
        home = ledger.home()
        links = self._links.get(home)
        if links is None:
            links = self._links[home] = _Links()
        try:
            return await links.run(home, ledger, work)
        except NoTableError as error:
            raise NoTableError(
                f"{self._store.where} has no outbox that can be read; run "
                f"`semel db init {pasted(self._store.where)}`, or upgrade where older tables are"
            ) from error

    def __repr__(self) -> str:
        return f"OutboxReader({self._store!r}, name={self._party.name!r})"


class _Links:
    """A few links on one event loop, closed with the ledger's own; the last one used first."""

    def __init__(self) -> None:
        self._free: list[AsyncLines] = []
        self._turn = asyncio.Semaphore(MOST_LINKS)

    async def run(self, home: Home, ledger: AsyncLedger, work: Work[T]) -> T:
        async with self._turn:
            lines = self._free.pop() if self._free else home.open()
            try:
                return await ledger.on(lines, work)
            finally:
                self._free.append(lines)


def _checked_name(name: str) -> str:
    text = plain("a name of relays", name)
    if not text or text != text.strip() or len(text.encode()) > NAME_BYTES:
        raise SettingsError(
            f"a name of relays has 1 to {NAME_BYTES} bytes and no space at its ends: {text!r}"
        )
    return text


def _told(owned: Mapping[int, str]) -> str:
    shards, holders = ", ".join(map(str, sorted(owned))), ", ".join(sorted({*owned.values()}))
    one = len(owned) == 1
    return f"{'shard' if one else 'shards'} {shards} {'is' if one else 'are'} owned by {holders}"


def _checked_shards(shards: int) -> int:
    if not 1 <= shards <= SLOTS:
        raise SettingsError(f"an outbox has 1 to {SLOTS} shards, not {shards}")
    return shards


# --- what is new --------------------------------------------------------------------------------


async def news(link: Link) -> int:
    """Where ids say nothing about what is still to come, positions are given out first."""
    found = await decided(link)
    return await place(link) if found is None else found


async def committed(link: Link, after: int | None, limit: int) -> list[Message]:
    """The next committed events after a position, up to the high-water mark, for any reader.

    The sweep's mark is read last: a sweep between the other statements is noticed.
    """
    stretch = Stretch(after=after or 0, upto=await news(link), slots=None, topic=None)
    rows, _ = await fetch(link, stretch, ANY_READER, limit, PAGE_BYTES)
    if after is not None and after < (gone := await cursors.swept(link)):
        raise SettingsError(
            f"events up to position {gone} of the outbox may have been deleted, and this reader is "
            f"at {after}; keep events for longer (`semel relay --keep`), and read with after=None "
            "to begin with the oldest event that is left"
        )
    return messages(rows, link.dialect, source="")
