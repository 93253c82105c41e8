"""What a relay, a worker, a router, a gateway or rooms are up to, and what only a store can tell.

A status costs nothing. How far behind a relay is, the database has to be asked, and probes, people
and Prometheus all ask: so it is asked once for all of them, at most once a second. An answer that
does not come is itself an answer: nobody waits for it longer than a probe would.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from semel.bus import Router, RouterStatus
from semel.colour import ASYNC
from semel.errors import SemelError
from semel.http.sse.status import GatewayStatus
from semel.ports import LogStore
from semel.relay import Relay, RelayStatus
from semel.rooms.status import RoomsStatus
from semel.values import value
from semel.worker import Worker, WorkerStatus

if TYPE_CHECKING:
    from semel.stores.sql.outbox_reading import Lag

__all__ = ["Part", "Report", "Shows", "Status", "Watch"]


class Shows(Protocol):
    """A gateway or rooms, alone or with their server."""

    @property
    def store(self) -> LogStore: ...

    @property
    def shown(self) -> str:
        """What people call it."""
        ...

    def status(self) -> GatewayStatus | RoomsStatus: ...


Part: TypeAlias = Relay | Worker | Router | Shows
Status: TypeAlias = RelayStatus | WorkerStatus | RouterStatus | GatewayStatus | RoomsStatus

FRESH_S = 1.0

# Kubernetes gives a probe one second unless it is told otherwise.
PATIENCE_S = 0.8

# A record that nobody has: to ask for it is to ask whether the store answers.
NOBODYS = bytes(32)

# The name of a stream that does not exist. Parts that use the log read it to test the store.
NO_STREAM = "semel.probe"


@value
class Report:
    """A status, and how far a relay is behind; `silence` says why the store did not tell."""

    status: Status
    lag: Lag | None = None
    silence: str = ""

    @property
    def why(self) -> Sequence[str]:
        """What keeps it from its work; empty when it is ready."""
        reasons = [self.silence, self.status.outage]
        if isinstance(self.status, RelayStatus):
            reasons += self.status.stopped.values()
        elif isinstance(self.status, GatewayStatus | RoomsStatus) and self.status.draining:
            reasons.append("it is about to end")
        return [reason for reason in dict.fromkeys(reasons) if reason]

    def as_json(self) -> dict[str, Any]:
        told = {"kind": _KINDS[type(self.status)], "ready": not self.why}
        told |= dataclasses.asdict(self.status)
        if self.lag is not None:  # without the queries of others, which are nobody's business
            told["lag_s"], told["unpublished"] = self.lag.age_s, self.lag.unpublished
        return told


_KINDS = {
    RelayStatus: "relay",
    WorkerStatus: "worker",
    RouterStatus: "router",
    GatewayStatus: "gateway",
    RoomsStatus: "rooms",
}


class Watch:
    """Looks at one of them. `close` ends what it may still be asking."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._asking: asyncio.Task[Any] | None = None
        self._asked_at = -math.inf
        self._lag: Lag | None = None
        self._silence = ""

    @property
    def title(self) -> str:
        """What people call it."""
        part = self._part
        return f"relay {part.name}" if isinstance(part, Relay) else part.shown

    def status(self) -> Status:
        return self._part.status()

    async def report(self) -> Report:
        if self._asking is None and ASYNC.now() - self._asked_at >= FRESH_S:
            self._asked_at = ASYNC.now()
            self._asking = asyncio.create_task(_question(self._part))
        if self._asking is not None:
            await self._await(self._asking)
        return Report(self.status(), self._lag, self._silence)

    async def _await(self, asking: asyncio.Task[Any]) -> None:
        await asyncio.wait([asking], timeout=PATIENCE_S)
        if not asking.done():
            waited_s = ASYNC.now() - self._asked_at
            self._silence = f"the store has not answered for {waited_s:.1f} s"
            return
        self._asking, self._lag = None, None
        try:
            self._lag, self._silence = asking.result(), ""
        except SemelError as error:
            self._silence = str(error)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


def _question(part: Part) -> Coroutine[Any, Any, Lag | None]:
    if isinstance(part, Relay):
        return part.reader.lag()
    return _reach(part)


async def _reach(part: Worker | Router | Shows) -> None:
    """Read from the store what the part itself uses: a Redis ACL may permit nothing else."""
    if isinstance(part, Worker | Router):
        await part.store.ledger(ASYNC).look(NOBODYS)
    else:
        await part.store.log(ASYNC).heads([NO_STREAM])
