"""The inbox in an SQL database: marks and effects in one transaction of the handler's own session.

    inbox = SQLInbox("postgresql://app@db/shop")   # sync and async handlers
    inbox = SQLInbox(engine)                       # an Engine or AsyncEngine of yours: these only
    inbox = SQLInbox(engine, session=sessionmaker(class_=MySession))

Its tables are made by `semel db init URL`, by your own migrations, or on first use with
`create=True`. A handler is given a SQLAlchemy session and writes its effect with it; the inbox
commits. A hundred messages are one transaction: two statements of ours, the handlers' own, and the
COMMIT.

The easy mistake is a handler that waits for itself: on SQLite, which has one writer, a guard or a
second session over the same file waits for the transaction that the handler is in. Give them a file
of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import sessionmaker

from semel.colour import ASYNC, SYNC, after_fork, before_fork, run
from semel.errors import SettingsError
from semel.messages import (
    Audit,
    Ending,
    Message,
    ParkedMessage,
    ParkedSequence,
    Settled,
    Settlement,
)
from semel.ports import Handle
from semel.stores import inbox_rules as rules
from semel.stores.inbox_rules import Retry
from semel.stores.sql import SQLStore, lines
from semel.stores.sql.inbox_flow import Flow, Job, Other, Settings
from semel.stores.sql.inbox_sessions import (
    IDLE_S,
    MOST_CONNECTIONS,
    Factory,
    Sessions,
    colour_of,
    open_async_engine,
    open_engine,
    prepare,
)
from semel.stores.sql.inbox_words import WORDS, Words
from semel.stores.sql.lines import AsyncLines, SyncLines
from semel.stores.sql.links import Link

__all__ = ["SQLInbox"]

T = TypeVar("T")

# Sequences that one look for what is due brings: the next look brings more.
MOST_DUE = 100

State = Literal["waiting", "parked"]


class SQLInbox:
    """Marks beside the effects, in PostgreSQL, MariaDB, MySQL or SQLite.

    `session` makes the sessions that handlers get: a sessionmaker or an async_sessionmaker, or
    what else makes them. `retention_s`: for how long a message without a number is remembered;
    `sweep` forgets older ones. `idle_s`: after how long the server ends a transaction of ours in
    which nothing happens, None for never. `create` makes the tables when they are not there.
    """

    def __init__(
        self,
        engine_or_url: sa.Engine | AsyncEngine | SQLStore | str,
        *,
        retry: Retry | None = None,
        retention_s: float = rules.RETENTION_S,
        create: bool = False,
        session: Factory | None = None,
        idle_s: float | None = IDLE_S,
    ) -> None:
        given = engine_or_url
        self._brings_store = not isinstance(given, SQLStore)
        self.store = SQLStore(given, create=create) if not isinstance(given, SQLStore) else given
        """For whoever needs a store beside the inbox, such as a worker: in the same database."""
        opened = self.store.engine_or_url
        self._retention_s = retention_s
        self._settings = Settings(retry or Retry(), retention_s, create, self.store.where)
        self._idle_s = idle_s
        self._engine = opened if isinstance(opened, sa.Engine) else None
        self._async_engine = opened if isinstance(opened, AsyncEngine) else None
        self._url = lines.parse(opened) if isinstance(opened, str) else None
        self._factories = _by_colour(session, self._engine, self._async_engine)
        self._excused: set[bytes] = set()
        self._sync: Flow | None = None
        self._own: sa.Engine | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._homes: dict[asyncio.AbstractEventLoop, _Home] = {}
        self._lock = threading.Lock()
        _inboxes.add(self)

    def __repr__(self) -> str:
        return f"SQLInbox({self.store.where!r})"

    # --- messages ---------------------------------------------------------------------------

    async def apply(
        self, consumer: str, messages: Sequence[Message], handle: Handle, *, singly: bool = False
    ) -> Sequence[Ending]:
        job = Job(consumer, handle, asyncio.get_running_loop())
        endings: list[Ending] = []
        for colour, these in self._runs(messages, handle):
            verb = Flow.apply_singly if singly else Flow.apply
            endings += await self._in(colour, partial(verb, job=job, messages=these))
        return endings

    def _runs(
        self, messages: Sequence[Message], handle: Handle
    ) -> Iterator[tuple[str, Sequence[Message]]]:
        """The messages in runs of one colour."""
        if self._url is None:
            if messages:
                yield self._colour, messages
            return
        for colour, these in itertools.groupby(
            messages, lambda message: colour_of(handle, message, "async")
        ):
            yield colour, list(these)

    @property
    def _colour(self) -> str:
        """In which we do what no handler has a part in."""
        return "async" if self._engine is None else "sync"

    async def retry(
        self, consumer: str, slots: tuple[int, int], handle: Handle
    ) -> Sequence[tuple[Message, Ending]]:
        job = Job(consumer, handle, asyncio.get_running_loop())
        colour = self._colour
        due = await self._in(colour, lambda flow: flow.due(consumer, slots, MOST_DUE))
        ran: list[tuple[Message, Ending]] = []
        for sequence in due:
            colour = await self._drain(job, sequence, colour, ran)
        return ran

    async def _drain(
        self, job: Job, sequence: bytes, colour: str, ran: list[tuple[Message, Ending]]
    ) -> str:
        """Run a sequence, one after another, each in its own colour; the last one of these."""
        both = self._url is not None
        while len(ran) < rules.MOST_RETRIED:
            answer = await self._in(colour, lambda flow: flow.run_head(job, sequence, both=both))
            match answer:
                case None:
                    break
                case Other(other):
                    colour = other
                case _:
                    ran.append(answer)
        return colour

    async def baseline(self, consumer: str, topic: str) -> None:
        await self._on_link(lambda words, link: words.baseline(link, consumer, topic))

    async def sweep(self, *, older_than_s: float | None = None, limit: int = 1000) -> int:
        """Forget messages without a number; without `older_than_s`, as `retention_s` says."""
        age_us = round((self._retention_s if older_than_s is None else older_than_s) * 1_000_000)
        return await self._on_link(lambda words, link: words.sweep(link, age_us, limit))

    # --- what is parked ---------------------------------------------------------------------

    async def sequences(
        self,
        *,
        consumer: str | None = None,
        topic: str | None = None,
        tenant: str | None = None,
        state: State | None = None,
        limit: int = 100,
        after: bytes | None = None,
    ) -> Sequence[ParkedSequence]:
        asked = (("consumer", consumer), ("topic", topic), ("tenant_id", tenant))
        wanted = [(column, text) for column, text in asked if text is not None]
        return await self._on_link(
            lambda words, link: words.sequences(link, wanted, state, limit, after)
        )

    async def waiting(
        self, sequence: bytes, *, limit: int = 1000, after: int = 0
    ) -> Sequence[ParkedMessage]:
        return await self._on_link(lambda words, link: words.waiting(link, sequence, limit, after))

    async def settle(
        self,
        sequence: bytes,
        settlement: Settlement,
        *,
        who: str,
        note: str = "",
        dry_run: bool = False,
    ) -> Settled:
        return await self._in(
            self._colour,
            lambda flow: flow.settle(sequence, settlement, who=who, note=note, dry_run=dry_run),
        )

    async def audit(self, *, sequence: bytes | None = None, limit: int = 100) -> Sequence[Audit]:
        return await self._on_link(lambda words, link: words.audit(link, sequence, limit))

    async def _on_link(self, work: Callable[[Words, Link], Awaitable[T]]) -> T:
        def go(flow: Flow) -> Coroutine[Any, Any, T]:
            return flow.on_link(lambda link: work(WORDS[link.dialect.name], link))

        return await self._in(self._colour, go)

    # --- colours ----------------------------------------------------------------------------

    async def _in(self, colour: str, work: Callable[[Flow], Coroutine[Any, Any, T]]) -> T:
        """Do it in this colour: on the loop, or in a thread."""
        if colour == "async":
            return await work(self._async_flow())
        flow, context = self._sync_flow(), contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool(), context.run, lambda: run(work(flow)))

    def _pool(self) -> ThreadPoolExecutor:
        """Threads of our own: handlers may need the loop's while ours wait for them."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MOST_CONNECTIONS, "semel-inbox")
            return self._threads

    def _sync_flow(self) -> Flow:
        with self._lock:
            if self._sync is None:
                engine = self._engine
                if engine is None:
                    assert self._url is not None, "it was given an engine of the other colour"
                    engine = self._own = open_engine(self._url)
                    prepare(engine, self._idle_s)
                sessions = Sessions(engine, self._factories["sync"], SYNC, self._idle_s)
                source = SyncLines(engine, own=False)
                self._sync = Flow(sessions, source, SYNC, self._settings, self._excused)
            return self._sync

    def _async_flow(self) -> Flow:
        """Of this event loop: a pool's connections cannot leave their loop."""
        loop = asyncio.get_running_loop()
        home = self._homes.get(loop)
        if home is None:
            self._leave_closed()
            home = _Home(self._async_engine, self._url, self._idle_s)
            sessions = Sessions(home.engine, self._factories["async"], ASYNC, self._idle_s)
            source = AsyncLines(home.engine, own=False)
            home.flow = Flow(sessions, source, ASYNC, self._settings, self._excused)
            with self._lock:
                self._homes[loop] = home
        return home.flow

    def _leave_closed(self) -> None:
        with self._lock:  # another thread's loop may be moving in or out
            for loop in [loop for loop in self._homes if loop.is_closed()]:
                self._homes.pop(loop).abandon()

    # --- letting go -------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Let go of the connections that are ours; an engine of yours stays as it is."""
        self._leave_closed()
        with self._lock:
            home = self._homes.pop(asyncio.get_running_loop(), None)
        if home is not None:
            await home.close()
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        if self._own is not None:
            await asyncio.to_thread(self._own.dispose)
        if self._brings_store:
            await self.store.aclose()

    def _before_fork(self) -> None:
        """Close idle sync connections to SQLite: see `SQLStore._lines_to_close`."""
        if self._own is not None and self._own.dialect.name == "sqlite":
            self._own.dispose()

    def _forked(self) -> None:
        """In a child: the parent goes on using these connections, so they are only forgotten."""
        self._lock = threading.Lock()
        self._threads = None
        homes, self._homes = self._homes, {}
        if self._own is not None:
            self._own.dispose(close=False)
        for home in homes.values():
            home.abandon()


class _Home:
    """An async engine and its flow, on one event loop."""

    flow: Flow

    def __init__(self, given: AsyncEngine | None, url: Any, idle_s: float | None) -> None:
        self._own = given is None
        self.engine = given or open_async_engine(url)
        self._resident: AsyncGenerator[None, None] | None = None
        if self._own:
            prepare(self.engine.sync_engine, idle_s)
            self._resident = self._stay()
            with contextlib.suppress(StopIteration):
                anext(self._resident).__await__().send(None)

    async def _stay(self) -> AsyncGenerator[None, None]:
        """Closes the engine when the event loop ends: `asyncio.run` closes every generator then."""
        try:
            yield
        finally:
            await self.engine.dispose()

    async def close(self) -> None:
        if self._resident is not None:
            await self._resident.aclose()

    def abandon(self) -> None:
        if self._own:
            self.engine.sync_engine.dispose(close=False)


def _by_colour(
    factory: Factory | None, engine: sa.Engine | None, async_engine: AsyncEngine | None
) -> dict[str, Factory | None]:
    """The factory, for the colour of the sessions that it makes."""
    found: dict[str, Factory | None] = {"sync": None, "async": None}
    if factory is None:
        return found
    if isinstance(factory, async_sessionmaker):
        colour = "async"
    elif isinstance(factory, sessionmaker):
        colour = "sync"
    elif engine is None and async_engine is None:
        raise SettingsError(
            "an inbox that was given a URL needs a sessionmaker or an async_sessionmaker for "
            "session=; from anything else it cannot tell which handlers it is for"
        )
    else:
        colour = "sync" if engine is not None else "async"
    wrong = async_engine if colour == "sync" else engine
    if wrong is not None:
        raise SettingsError(
            f"session= makes sessions of the {colour} colour, and the inbox was given "
            f"{'an AsyncEngine' if wrong is async_engine else 'an Engine'}; give it the "
            f"{'async_sessionmaker' if colour == 'sync' else 'sessionmaker'}"
        )
    found[colour] = factory
    return found


# --- fork ---------------------------------------------------------------------------------------

_inboxes: weakref.WeakSet[SQLInbox] = weakref.WeakSet()


def _before_fork() -> None:
    for inbox in list(_inboxes):
        inbox._before_fork()  # noqa: SLF001 - one module, one class


def _after_fork() -> None:
    for inbox in list(_inboxes):
        inbox._forked()  # noqa: SLF001 - one module, one class


before_fork(_before_fork)
after_fork(_after_fork)
