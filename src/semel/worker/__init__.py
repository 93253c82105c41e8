"""From a broker to the effects: each message once, in order, whoever dies on the way.

    worker = Worker(broker, "billing", SQLInbox(engine))

    @worker.on("order.placed", topic="orders")
    async def placed(message: Message, session: AsyncSession) -> None:
        session.add(Invoice(order_id=message.data["order_id"]))

    await worker.run()

A handler writes its effect with the session it is given, and the inbox commits the effect together
with the memory that it happened. A message that comes again is not handled again. One that fails
waits for its next try, and the later ones of its aggregate behind it; all others go on.

Workers of one group share the shards: each shard has one owner at a time, so that nothing of an
aggregate overtakes anything. An outage of the broker or of a store is nobody's fault: the worker
waits, and blames no message for it.

The easy mistake is a handler that does what no rollback undoes: sends a mail, calls a provider.
Say `outside=True`, and it is run through the guard (`semel.idempotent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from semel.circuit import Circuit
from semel.colour import ASYNC, SYNC
from semel.errors import SemelError, SettingsError, StoreUnavailableError
from semel.imports import importing
from semel.inbox import as_inbox
from semel.messages import Applied, Ending, Held, Message, Seen
from semel.policy import OnCrash
from semel.ports import Broker, Inbox, Store, TellsShards
from semel.settings import as_broker, as_store
from semel.shards import CLOSING_S, LEASE_S, Hold, Shards
from semel.values import value
from semel.worker.handlers import Handler, Handlers, named, outside, plain
from semel.worker.shard import Shard

__all__ = ["TopicStatus", "Worker", "WorkerStatus"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)

F = TypeVar("F", bound=Callable[..., Any])

log = logging.getLogger("semel")

BATCH = 100

# Messages in the hands of somebody who is no member of the party are taken from them after this.
IDLE_S = 300.0

# How often the inbox is swept, and how many ids in one call.
SWEEP_EVERY_S = 60.0
SWEEP_IDS = 1000

# How often the broker is asked whether the relays still have as many shards.
COMPARE_EVERY_S = 10.0

# What a process is usually given between the request to end and its end is 30 s.
GRACE_S = 25.0


@value
class TopicStatus:
    """How messages of a topic have ended here, since this worker was made.

    `held`: put into the parked store. `failed`: tries that failed, first and later ones.
    `unreadable`: what is no event of ours; these are held, too.
    """

    applied: int = 0
    seen: int = 0
    held: int = 0
    failed: int = 0
    unreadable: int = 0


@value
class WorkerStatus:
    """What a worker is doing, for people and probes.

    `waits_for` are those who may have shards that fall to it, by host and process, until they let
    go or their leases run out. `outage` says what it waits for, empty if for nothing. `error` is
    the last that went wrong. `lag_s` is how old the last message was when it was handled. `turning`
    is False when it has not done anything for so long that only a restart can help.
    """

    group: str
    name: str
    shards: int
    owned: tuple[int, ...] = ()
    members: int = 0
    waits_for: tuple[str, ...] = ()
    topics: Mapping[str, TopicStatus] = field(default_factory=dict[str, TopicStatus])
    outage: str = ""
    error: str = ""
    lag_s: float | None = None
    turning: bool = True

    @property
    def ready(self) -> bool:
        return not self.outage


@dataclass(slots=True)
class _Counts:
    applied: int = 0
    seen: int = 0
    held: int = 0
    failed: int = 0
    unreadable: int = 0


class Worker:
    """Handles the messages of some topics, as one of the workers of a group.

    Broker and inbox may be URLs; what is opened for them is closed with the run. `store` is where
    the workers of a group agree on who owns which shard; an inbox in a database brings its own,
    which for SQLite is a second file, `<database>-workers`. `begin`: a group that
    is new expects every sequence from its first message, "oldest", or takes what it sees first as
    the beginning, "seen". `dead_letter` is a topic that gets a copy of what is parked for good.
    `idle_s`: messages that somebody outside the group's workers was handed so long ago are taken
    over. `grace_s`: how long what is in hand may take after `stop`.
    """

    def __init__(
        self,
        broker: Broker | str,
        group: str,
        inbox: Inbox | str,
        store: Store | str | None = None,
        *,
        name: str | None = None,
        batch: int = BATCH,
        lease_s: float = LEASE_S,
        idle_s: float = IDLE_S,
        begin: Literal["oldest", "seen"] = "oldest",
        dead_letter: str | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        _check(group, batch, begin, lease_s=lease_s, idle_s=idle_s, grace_s=grace_s)
        self.broker = as_broker(broker)
        self.group = group
        self.inbox = as_inbox(inbox)
        self._opened: list[Any] = [self.broker] if isinstance(broker, str) else []
        self._opened += [self.inbox] if isinstance(inbox, str) else []
        self.name = f"{platform.node()[:40]}:{os.getpid()}" if name is None else name
        self.batch = batch
        self.idle_s = idle_s
        self.dead_letter = dead_letter
        self.handlers = Handlers(group)
        self.shown = f"worker {group}"
        self.broker_circuit = Circuit(f"the broker of {self.shown}")
        self.store_circuit = Circuit(f"the store of {self.shown}")
        self._given = _store_of(self.inbox, store)
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._begins_seen = begin == "seen"
        self.alone = asyncio.Lock()
        """Held while a message runs that may have ended a process: no other such one does."""
        self._stopping = asyncio.Event()
        self._shards: Shards | None = None
        self._works: set[asyncio.Task[Any]] = set()
        self._fault: Exception | None = None
        self._counts: dict[str, _Counts] = {}
        self._error = ""
        self._lag_s: float | None = None

    @functools.cached_property
    def store(self) -> Store:
        """Where shards are owned, and what handlers do outside the database is guarded.

        An inbox on SQLite has it in a file of its own, beside the database: while a handler's
        transaction is open nobody else can write there, and no lease could be renewed.
        """
        brought = self._given is getattr(self.inbox, "store", None)
        return _brought(self._given) if brought else self._given

    def on(
        self,
        *types: str | None,
        topic: str | Iterable[str],
        outside: bool = False,
        on_crash: OnCrash = "retry",
    ) -> Callable[[F], F]:
        """Handle messages of these types, or of every other type, of a topic or several.

        The function takes (message) or (message, session), and is async or not. With
        `outside=True` its effect is not in the inbox's database: it is run through the guard, and
        `on_crash` says what is right when a worker died in the middle of it: "retry", "hold" until
        somebody resolves it, or a function that finds out.
        """
        topics = _topics(topic)
        if self.dead_letter in topics:
            raise SettingsError(
                f"{self.dead_letter!r} is this worker's dead_letter: what fails there would be "
                "copied there again. Read it with a worker of another group"
            )
        if self._shards is not None:
            raise SettingsError("this worker is running already; give handlers before run()")

        def decorate(fn: F) -> F:
            self.handlers.add(topics, types or [None], self._handler(fn, outside, on_crash))
            return fn

        return decorate

    def _handler(self, fn: Callable[..., Any], is_outside: bool, on_crash: OnCrash) -> Any:
        if is_outside:
            return outside(fn, group=self.group, store=self.store, on_crash=on_crash)
        if on_crash != "retry":
            raise SettingsError("on_crash= is for an effect outside the database: outside=True")
        handler = plain(fn)
        _check_session(fn, handler, self.inbox)
        return handler

    # --- running ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop`. What is in hand is finished, and every shard handed over.

        Cancelled, it drops everything at once: what was not committed did not happen. What no
        waiting mends, such as another number of shards than the relays have, raises
        `SettingsError`.
        """
        if not self.handlers.topics:
            raise SettingsError("this worker has no handler; give one with @worker.on(...)")
        if self._shards is not None:
            raise SettingsError("this worker is running already; make another one")
        self.alone = asyncio.Lock()
        self._shards = Shards(
            self.store,
            f"worker:{self.group}",
            self.broker.shards,
            lease_s=self._lease_s,
            grace_s=self._grace_s,
        )
        try:
            await self._begin()
            if not self._stopping.is_set():
                await self._take_part(self._shards)
        finally:
            self._shards = None
            self._stopping.clear()
            if self.store is not self._given:
                await self.store.aclose()
            for each in self._opened:
                await each.aclose()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    async def _begin(self) -> None:
        """A baseline is set before the first message is seen, or that one would wait for others."""
        topics = list(self.handlers.topics) if self._begins_seen else []
        while topics and not self._stopping.is_set():
            try:
                await self.inbox.baseline(self.group, topics[0])
            except StoreUnavailableError as error:
                self.store_circuit.failed(error)
                await self.store_circuit.wait(self._stopping)
            else:
                self.store_circuit.passed()
                del topics[0]
        self.store_circuit.gave_up()

    async def _take_part(self, shards: Shards) -> None:
        party = asyncio.create_task(shards.run(self._own))
        beside = [
            asyncio.create_task(work) for work in (self._sweep(shards), self._compare_shards())
        ]
        try:
            await asyncio.shield(party)
        except BaseException:
            for work in self._works:
                work.cancel()
            party.cancel()
            raise
        finally:
            for each in beside:
                each.cancel()
            await asyncio.wait([party])
            if self._works:  # cut off at the end of their grace; a thread goes on all the same
                await asyncio.wait(self._works, timeout=CLOSING_S)

    async def _sweep(self, shards: Shards) -> None:
        """Whoever owns the first shard has the inbox forget what it need not remember."""
        while True:
            await ASYNC.sleep(SWEEP_EVERY_S)
            with contextlib.suppress(SemelError):  # later, then
                while 0 in shards.owned and await self.inbox.sweep(limit=SWEEP_IDS) == SWEEP_IDS:
                    pass

    async def _compare_shards(self) -> None:
        """With another number than the relays' some messages would be read by nobody."""
        while isinstance(self.broker, TellsShards):
            for topic in self.handlers.topics:
                with contextlib.suppress(SemelError):  # the lanes tell of that
                    published = await self.broker.published_shards(topic)
                    if published not in (None, self.broker.shards):
                        self._fault = _other_shards(topic, published, self.broker.shards)
                        self.stop()
                        return
            await ASYNC.sleep(COMPARE_EVERY_S)

    async def _own(self, hold: Hold) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        await Shard(self, hold).run()

    def stop(self) -> None:
        """Begin nothing more; `run` returns when what is in hand is finished."""
        self._stopping.set()
        if self._shards is not None:
            self._shards.stop()

    # --- telling ----------------------------------------------------------------------------

    def status(self) -> WorkerStatus:
        counts = {topic: self._counts.get(topic, _Counts()) for topic in self.handlers.topics}
        return WorkerStatus(
            self.group,
            self.name,
            self.broker.shards,
            tuple(self._shards.owned) if self._shards else (),
            self._shards.members if self._shards else 0,
            self._shards.waits_for if self._shards else (),
            {
                topic: TopicStatus(c.applied, c.seen, c.held, c.failed, c.unreadable)
                for topic, c in counts.items()
            },
            self.broker_circuit.error or self.store_circuit.error,
            self._error,
            self._lag_s,
            self._shards.turning if self._shards else True,
        )

    def count(self, message: Message, ending: Ending, *, again: bool) -> None:
        """One message has ended; `again`: it waited here and was tried again."""
        counts = self._counts.setdefault(message.topic, _Counts())
        match ending:
            case Applied():
                counts.applied += 1
            case Seen():
                counts.seen += 1
            case Held(why, error):
                counts.held += not again
                if error and why in ("retry", "poison", "crash"):
                    counts.failed += 1
                    self._error = f"{message.type} {message.id} ({why}): {error}"
                    log.log(
                        logging.WARNING if why == "retry" else logging.ERROR,
                        "semel: %s: %s %s of %s/%s failed (%s): %s",
                        self.shown,
                        message.type,
                        message.id,
                        message.aggregate_type,
                        message.aggregate_id,
                        "it is tried again" if why == "retry" else "it is parked",
                        error,
                    )

    def handled(self, message: Message) -> None:
        """This was the last one of a batch."""
        self._lag_s = (datetime.now(UTC) - message.time).total_seconds()

    def count_unreadable(self, topic: str) -> None:
        self._counts.setdefault(topic, _Counts()).unreadable += 1

    def broken(self, error: Exception) -> None:
        self._error = str(error) or type(error).__name__


def _topics(given: Any) -> list[str]:
    topics = [given] if isinstance(given, str) else list(given)
    if not topics or not all(isinstance(each, str) and each for each in topics):
        raise SettingsError(f"topic={given!r} is no topic; write topic='orders', or several")
    return topics


def _other_shards(topic: str, published: int | None, ours: int) -> SettingsError:
    return SettingsError(
        f"{topic!r} is published in {published} shards, and this worker was told {ours} shards, so "
        f"some messages would be read by nobody: give its broker shards={published}, as in "
        f"connect('redis://localhost?shards={published}')"
    )


def _store_of(inbox: Inbox, store: Store | str | None) -> Store:
    found: Store | str | None = getattr(inbox, "store", None) if store is None else store
    if found is None:
        raise SettingsError(
            f"a worker needs a store in which its group agrees on who owns which shard, and "
            f"{type(inbox).__name__} brings none: give store=, such as "
            "RedisStore('redis://localhost') or MemoryStore() for one process"
        )
    return as_store(found)


def _brought(store: Store) -> Store:
    """The inbox' own, or one in its place that can be used for leases."""
    beside = _beside(store)
    url = getattr(store, "url", None)
    if beside is not store or url is None or _serves(store, "async"):
        return beside
    # An engine for sync code. Its connections are the handlers', and leases cannot wait for them.
    return as_store(url.render_as_string(hide_password=False))


def _serves(store: Store, colour: str) -> bool:
    if isinstance(getattr(store, "engine_or_url", ""), str):
        return True  # by URL it serves both, and nothing need be opened to see that
    try:
        store.ledger(ASYNC if colour == "async" else SYNC)
    except SettingsError:
        return False
    return True


def _check_session(fn: Callable[..., Any], handler: Handler, inbox: Inbox) -> None:
    """Found out with its first message, it would be too late: that one would be parked."""
    store: Any = getattr(inbox, "store", None)
    if not handler.takes_session or not hasattr(store, "bind") or _serves(store, handler.colour):
        return
    is_async = handler.colour == "async"
    raise SettingsError(
        f"{named(fn)} is {'' if is_async else 'not '}async and takes a session, and {inbox!r} has "
        f"an engine for {'sync' if is_async else 'async'} code only: write it with "
        f"{'def' if is_async else 'async def'}, give the inbox "
        f"{'create_async_engine' if is_async else 'create_engine'}(...), or open it by URL to "
        "serve both"
    )


def _beside(store: Store) -> Store:
    path: str | None = getattr(store, "file_path", None)
    if path is None:
        return store
    from semel.stores.sqlite import SQLiteStore

    return SQLiteStore(f"{path}-workers")


def _check(group: Any, batch: Any, begin: str, **durations: float) -> None:
    if not isinstance(group, str) or not group:
        raise SettingsError(f"group={group!r} is no name; workers of one group share its messages")
    if not isinstance(batch, int) or batch < 1:
        raise SettingsError(f"batch={batch!r} must be a whole number of at least 1")
    if begin not in ("oldest", "seen"):
        raise SettingsError(f"begin={begin!r} is unknown; choose 'oldest' or 'seen'")
    for name, seconds in durations.items():
        if not 0 < seconds < float("inf"):
            raise SettingsError(f"{name}={seconds!r} must be more than zero, and finite")
