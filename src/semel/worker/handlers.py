"""Which function a message is for, and how it is called.

`Handlers` is what a worker hands to its inbox: called with a message and the inbox's session, it
lets the message have its effect. A message of a type that nobody asked for does nothing, and that
counts: the next one of its sequence may come. A stand-in, which has no payload, is for people: no
function sees it.

An effect outside the database is run through the guard, under a key made of the group and the
message's id. The easy mistake is to give such a handler the inbox's session as well: the guard
remembers the effect before the session commits, so what was written there could be lost and never
written again. It is refused.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from semel.colour import ASYNC, SYNC
from semel.errors import InProgressError, SettingsError, StoreUnavailableError
from semel.guard import idempotent
from semel.inbox import PoisonError
from semel.messages import Message
from semel.policy import OnCrash
from semel.ports import Store

__all__ = ["UNREADABLE", "Handlers"]

UNREADABLE = "semel.unreadable"
"""The type of a message that stands for something that is no event of ours."""

# For how long the guard remembers an effect: as long as a message may take to be acknowledged.
REMEMBERED_S = 7 * 86_400

# How long a call waits for the same call elsewhere before the whole batch is put off.
PATIENCE_S = 30

# What a key may have; a longer one keeps its head.
KEY_BYTES = 255

Name = Literal["sync", "async"]
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Handler:
    """A function of the user's. `call` is given the message and the session."""

    call: Callable[[Message, Any], Awaitable[None] | None]
    colour: Name
    outside: bool = False
    takes_session: bool = False


class Handlers:
    """Handlers by topic and type of message."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._by_name: dict[tuple[str, str | None], Handler] = {}
        self._colours: dict[str, Name] = {}

    @property
    def topics(self) -> Sequence[str]:
        return tuple(self._colours)

    def add(self, topics: Iterable[str], types: Iterable[str | None], handler: Handler) -> None:
        names = [(topic, kind) for topic in topics for kind in types]
        for topic, kind in names:
            if (topic, kind) in self._by_name:
                raise SettingsError(
                    f"{'every other type' if kind is None else repr(kind)} of topic {topic!r} has "
                    "a handler already; call both functions from one handler, or give the second "
                    "one a group, and so a worker, of its own"
                )
        for topic, kind in names:
            self._by_name[topic, kind] = handler
            self._colours.setdefault(topic, handler.colour)

    def find(self, message: Message) -> Handler | None:
        named = self._by_name.get((message.topic, message.type))
        if named is None and message.type == UNREADABLE:
            raise PoisonError(message.data["problem"])
        if message.topic not in self._colours:
            # It waits since somebody had a handler for it; another version of us may have one.
            raise SettingsError(
                f"no worker of group {self._group!r} here reads topic {message.topic!r}, to which "
                f"event {message.id} belongs; give it a handler, or skip it"
            )
        found = named or self._by_name.get((message.topic, None))
        if found is not None and message.refused:
            raise PoisonError(
                f"the broker refused it: {message.refused}; its payload is kept in event_outbox: "
                "give it back with `semel parked edit`, then replay"
            )
        return found

    def __call__(self, message: Message, session: Any) -> Awaitable[None] | None:
        handler = self.find(message)
        return None if handler is None else handler.call(message, session)

    def colour(self, message: Message) -> Name:
        """How the message's handler is written; whatever fits where there is none."""
        found = self._found(message)
        return found.colour if found else self._colours.get(message.topic, "async")

    def outside(self, message: Message) -> bool:
        """Is its effect outside the inbox's database?"""
        found = self._found(message)
        return found is not None and found.outside

    def _found(self, message: Message) -> Handler | None:
        named = self._by_name.get((message.topic, message.type))
        return named or self._by_name.get((message.topic, None))


# --- calling ------------------------------------------------------------------------------------


def plain(fn: Function) -> Handler:
    """A handler whose effect is in the inbox's database, or needs no more than the inbox."""
    takes = _parameters(fn)
    if _is_async(fn):
        return Handler(
            lambda message, session: fn(*(message, session)[:takes]),
            "async",
            takes_session=takes > 1,
        )

    def call(message: Message, session: Any) -> Awaitable[None] | None:
        work = functools.partial(fn, *(message, session)[:takes])
        # An inbox with a session calls from where the session may be used; one without it, from
        # the loop. A thread cannot be cancelled: nobody else may begin before it has ended.
        if session is None:
            return ASYNC.shield(_in_thread(work))
        _finished(work())
        return None

    return Handler(call, "sync", takes_session=takes > 1)


def outside(fn: Function, *, group: str, store: Store, on_crash: OnCrash) -> Handler:
    """A handler whose effect is outside the database: run through the guard."""
    if _parameters(fn) != 1:
        raise SettingsError(
            f"{named(fn)} takes a session, and outside=True says that its effect is outside the "
            "database: what it wrote there would not be committed with that effect. Take the "
            "message only, or leave out outside=True"
        )
    guard = idempotent(
        key=lambda message: _key(group, message),
        fingerprint=None,
        operation=f"worker:{group}",
        store=_of_both_colours(fn, store),
        ttl=REMEMBERED_S,
        on_duplicate="wait",
        wait_timeout=PATIENCE_S,
        on_crash=on_crash,
    )
    run = _guarded(fn, guard)

    async def call(message: Message, _session: Any) -> None:
        try:
            await run(message)
        except InProgressError as error:
            raise StoreUnavailableError(
                f"event {message.id} is being handled by somebody else: {error}"
            ) from error

    return Handler(call, "async", outside=True)


def _guarded(fn: Function, guard: Callable[..., Any]) -> Callable[[Message], Awaitable[None]]:
    """What the handler returns is nobody's business, and need not be storable."""
    if _is_async(fn):

        async def awaited(message: Message) -> None:
            await fn(message)

        on_the_loop: Callable[[Message], Awaitable[None]] = guard(awaited)
        return on_the_loop

    def called(message: Message) -> None:
        _finished(fn(message))

    # The guard goes into the thread too: if we are cut off, the thread goes on, and so does its
    # claim.
    in_thread = guard(called)
    return lambda message: _in_thread(functools.partial(in_thread, message))


def _of_both_colours(fn: Function, store: Store) -> Store:
    colour = ASYNC if _is_async(fn) else SYNC
    try:
        store.ledger(colour)
    except SettingsError as error:
        raise SettingsError(
            f"{named(fn)} is {'async' if colour is ASYNC else 'not async'}, and the worker's "
            f"store cannot serve that: {error}"
        ) from error
    return store


def _key(group: str, message: Message) -> str:
    key = f"{group}:{message.id}"
    if len(key.encode("utf-8", "surrogatepass")) <= KEY_BYTES:
        return key
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{key[: (KEY_BYTES - len(digest) - 1) // 4]}:{digest}"


async def _in_thread(work: Callable[[], Any]) -> None:
    def run() -> None:
        try:
            _finished(work())
        except StopIteration as error:
            # A future cannot carry one: whoever waits for it would wait for ever.
            raise RuntimeError(f"the handler raised {error!r}") from error

    await asyncio.to_thread(run)


def _finished(value: Any) -> None:
    """A coroutine that a plain function gave back has not run."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise SettingsError("a handler gave back something to await; write it with async def")


# --- what a function looks like -----------------------------------------------------------------

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(fn: Function) -> int:
    """1 when it takes the message, 2 when the session too."""
    if not callable(fn):
        raise SettingsError(f"{fn!r} cannot be a handler; put @worker.on(...) on a function")
    parameters = list(inspect.signature(fn).parameters.values())
    places = [p for p in parameters if p.kind in _POSITIONAL]
    needed = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    takes_session = len(places) > 1 and (places[1] in needed or places[1].name == "session")
    takes = 2 if takes_session else 1
    if any(p not in places[:takes] and p.kind != p.VAR_POSITIONAL for p in needed) or not places:
        raise SettingsError(
            f"{named(fn)}{inspect.signature(fn)} cannot be a handler: write it with the "
            "parameters (message) or (message, session)"
        )
    return takes


def named(fn: Function) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _is_async(fn: Any) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    called = getattr(fn, "__call__", None)  # noqa: B004 - an object with an async __call__
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(called)
