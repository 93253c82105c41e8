"""One logical request, from its key to its answer: written once, for both colours.

`Sender.send` sees to the key, sends, asks `retry.decide`, pauses, sends again. What a client
library does in its own way (sending, reading, closing) is behind `Wire`. Sync code drives the
flow with `colour.run`: a wire and a world of the sync colour never suspend.

The order matters: the key is on the request, and an intent's on disk, before the first byte goes
out; an answer that is not wanted is closed before the pause, so that its connection is free.
"""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol, TypeVar, assert_never
from urllib.parse import urlsplit

from semel.client.intents import Intents, fingerprint_of, new_key, quoted
from semel.client.retry import (
    IDEMPOTENT,
    SAFE,
    Again,
    Ending,
    Fault,
    Head,
    Patience,
    Sent,
    Stop,
    decide,
    is_running,
    settles,
)
from semel.errors import SettingsError, StoreUnavailableError

T = TypeVar("T")
R = TypeVar("R")

METHODS: Final = ("POST", "PATCH")

# Bodies up to this size are held in memory: requests to be sent again, answers to be had whole.
HELD: Final = 1 << 20

log = logging.getLogger("semel")


class World:
    """Time and chance for sync code. Tests bring one that neither sleeps nor guesses."""

    def now_s(self) -> float:
        """Monotonic."""
        return time.monotonic()

    def wall_s(self) -> float:
        """Since 1970."""
        return time.time()

    def chance(self) -> float:
        return random.random()  # noqa: S311 - spreads clients, guards nothing

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - the sync colour blocks: that is its nature

    async def aside(self, work: Callable[[], T]) -> T:
        """Do what waits for the disk."""
        return work()


class Wire(Protocol[R]):
    """One request of one client library, in one colour."""

    method: str
    url: str

    @property
    def key(self) -> str | None:
        """The header as it stands, quotes included."""
        ...

    def set_key(self, header: str | None) -> None:
        """Put it on the request, so that a redirect takes it along; None takes it off."""
        ...

    @property
    def is_bound(self) -> bool:
        """Has this key been tied to an intent's request? A redirect inherits that."""
        ...

    def mark_bound(self) -> None: ...

    async def body(self) -> bytes | None:
        """All of the body, which then can be sent again; None when it is too large or a stream."""
        ...

    async def send(self, *, whole: bool) -> R:
        """One try. With `whole` the answer's body is read too, unless it is large or a stream."""
        ...

    def head(self, response: R, wall_s: float) -> Head: ...

    def is_fault(self, error: Exception) -> bool:
        """Was it the connection, rather than the request?"""
        ...

    async def close(self, response: R) -> None:
        """Give the connection back."""
        ...


class Sender:
    """The settings of a client, and the flow over them."""

    def __init__(
        self,
        *,
        patience: Patience | None,
        methods: Collection[str],
        intents: Intents | None,
        world: World,
    ) -> None:
        self.patience = patience or Patience()
        self.methods = _checked(methods)
        self.intents = intents
        self.world = world

    async def send(self, wire: Wire[R]) -> R:
        made = self._give_key(wire)
        repeats = wire.key is not None or wire.method in IDEMPOTENT
        body = await wire.body() if repeats else None
        bound = not made and await self._bind(wire, body)
        response = await self._deliver(wire, repeatable=repeats and body is not None)
        if bound:
            try:
                await self._answered(wire, response)
            except BaseException:  # cancelled: nobody else will close it
                await wire.close(response)
                raise
        return response

    def _give_key(self, wire: Wire[R]) -> bool:
        """See to the key, and say whether it is a new one."""
        if wire.method in SAFE:
            wire.set_key(None)  # it came along from the request that was redirected
        elif wire.key is None and wire.method in self.methods:
            wire.set_key(quoted(new_key()))
            return True
        elif wire.key is None:
            wire.set_key(None)  # blank: some servers would take it for a key, others for none
        return False

    async def _bind(self, wire: Wire[R], body: bytes | None) -> bool:
        intents, key = self.intents, wire.key
        if intents is None or key is None or wire.is_bound:
            return wire.is_bound
        fingerprint = None if body is None else fingerprint_of(wire.method, wire.url, body)
        if await self.world.aside(lambda: intents.bind(key, fingerprint)):
            wire.mark_bound()
        return wire.is_bound

    async def _answered(self, wire: Wire[R], response: R) -> None:
        intents, key = self.intents, wire.key
        if intents is None or key is None:
            return
        if settles(self.patience, wire.head(response, self.world.wall_s())):
            try:
                await self.world.aside(lambda: intents.answered(key))
            except StoreUnavailableError as error:
                # The answer is here and counts more; asked again, the server replays it.
                log.warning("semel: an answer could not be noted: %s", error)

    async def _deliver(self, wire: Wire[R], *, repeatable: bool) -> R:
        started_s, tries = self.world.now_s(), 0
        while True:
            tries += 1
            try:
                response = await wire.send(whole=repeatable)
            except Exception as error:
                sent = Sent(tries, self.world.now_s() - started_s, repeatable)
                delay_s = self._pause(wire, sent, _fault_of(wire, error))
                if delay_s is None:
                    raise
            else:
                sent = Sent(tries, self.world.now_s() - started_s, repeatable)
                head = wire.head(response, self.world.wall_s())
                delay_s = self._pause(wire, sent, head)
                if delay_s is None:
                    return response
                await wire.close(response)
                # Told when to come back, it was no failed try; not told, the pauses have to grow.
                tries -= is_running(head) and head.retry_after_s is not None
            await self.world.sleep(delay_s)

    def _pause(self, wire: Wire[R], sent: Sent, ending: Ending) -> float | None:
        """Seconds until the next try, None for no other."""
        decision = decide(self.patience, sent, ending, self.world.chance())
        match decision:
            case Again(delay_s=delay_s):
                got = ending.status if isinstance(ending, Head) else "no answer"
                said = "semel: %s %s: try %d of %d got %s; again in %.2f s"
                place, most = place_of(wire.url), self.patience.tries
                log.info(said, wire.method, place, sent.tries, most, got, delay_s)
                return delay_s
            case Stop():
                return None
            case _:
                assert_never(decision)


def place_of(url: str) -> str:
    """Host, port and path: what else is in a URL may be a secret."""
    parts = urlsplit(url)
    return f"{parts.netloc.rpartition('@')[2]}{parts.path}"


def _fault_of(wire: Wire[Any], error: Exception) -> Fault:
    return Fault(passing=wire.is_fault(error) and not is_distrusted(error))


def is_distrusted(error: BaseException) -> bool:
    """Was the server's certificate refused? It will be again."""
    chain: list[BaseException | None] = [error]
    for each in chain:
        if isinstance(each, ssl.SSLCertVerificationError):
            return True
        if each is not None:
            chain += (e for e in (each.__cause__, each.__context__) if e not in chain)
    return False


def _checked(methods: Collection[str]) -> frozenset[str]:
    if isinstance(methods, str):
        raise SettingsError(f"methods={methods!r}: give a collection, as in methods=({methods!r},)")
    checked = frozenset(method.upper() for method in methods)
    if useless := sorted(checked & SAFE):
        raise SettingsError(f"methods: {', '.join(useless)} changes nothing and needs no key")
    return checked
