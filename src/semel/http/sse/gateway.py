"""The gateway as an ASGI app."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Literal
from weakref import WeakKeyDictionary

from semel.bus.jobs import checked_domain
from semel.errors import SettingsError
from semel.failures import Failures
from semel.feed import Feed
from semel.http.asgi import ASGIScope, Receive, Send, reply
from semel.http.protocol import Refusal, Response
from semel.http.sse import frames
from semel.http.sse.cors import Cors
from semel.http.sse.crowd import Crowd
from semel.http.sse.limits import Limits, Seats
from semel.http.sse.status import GatewayCounts, GatewayStatus
from semel.http.sse.tickets import Tickets
from semel.http.sse.view import Everything, Project
from semel.http.sse.visit import NO_STORE, Authorise, House, Terms, Visit
from semel.ports import LogStore
from semel.settings import as_log_store

__all__ = ["Gateway"]


class Gateway:
    """Shows the jobs of one domain to those who may see them. An ASGI app.

    `authorise(request, job_id)` says who may: asked at every connect, and every `reauthorise_s`
    while connected. Without it, everybody who knows a job's id may see it. `project(event,
    principal)` says what of an event somebody is shown; None is nothing. `tickets` are taken as
    `?ticket=`. `cors`: origins that may read; `credentials`: with cookies. `base`: the path below
    which jobs are, besides where the app is mounted. `unknown`: what becomes of those who ask for
    a job that nobody has heard of. `retry_ms`: how long a browser waits before it comes back, from
    and to. A connection ends after `max_age_s`, and is followed by another one.
    """

    def __init__(
        self,
        store: LogStore | str,
        *,
        domain: str = "scan",
        base: str = "",
        authorise: Authorise | None = None,
        project: Project | None = None,
        tickets: Tickets | None = None,
        cors: Iterable[str] | str | None = None,
        credentials: bool = False,
        unknown: Literal["refuse", "wait"] = "refuse",
        heartbeat_s: float = 15.0,
        max_age_s: float = 600.0,
        reauthorise_s: float | None = 60.0,
        retry_ms: tuple[int, int] = (500, 2500),
        limits: Limits | None = None,
    ) -> None:
        if unknown not in {"refuse", "wait"}:
            raise SettingsError(f'unknown={unknown!r}: "refuse" or "wait"')
        self._limits = limits or Limits()
        self._limits.check()
        self._terms = Terms(
            domain=checked_domain(domain),
            base=_checked_base(base),
            authorise=authorise,
            project=project,
            tickets=tickets,
            cors=Cors(cors, credentials=credentials),
            waits_for_unknown=unknown == "wait",
            heartbeat_s=heartbeat_s,
            max_age_s=max_age_s,
            reauthorise_s=reauthorise_s if authorise is not None else None,
            retry_ms=retry_ms,
        )
        self._terms.check()
        self.store = as_log_store(store)
        self._is_ours = isinstance(store, str)
        self._seats = Seats(self._limits)
        self._everything = Everything()
        self._counts = GatewayCounts()
        self._failures = Failures()
        self._houses: WeakKeyDictionary[asyncio.AbstractEventLoop, House] = WeakKeyDictionary()

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000})
            case other:
                raise SettingsError(f"a gateway is for HTTP, and this is {other}")

    async def _http(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        visit = Visit(self._house(), scope, receive, send)
        try:
            response = await visit.answer()
        except Refusal as refusal:
            if visit.has_begun:
                raise
            response = refusal.response
            self._counts.refused[response.status] += 1
        if response is not None:
            body = b"" if visit.request.method == "HEAD" else response.body
            headers = (*response.headers, NO_STORE, *visit.headers)
            await reply(send, Response(response.status, headers, body))

    def _house(self) -> House:
        """Made when it is first needed: an app that is mounted is not told when a loop begins."""
        loop = asyncio.get_running_loop()
        house = self._houses.get(loop)
        if house is None:
            feed = Feed(self.store, encode=frames.entry)
            crowd = Crowd(self._limits)
            house = House(
                self._terms,
                feed,
                crowd,
                self._seats,
                self._counts,
                self._everything,
                self._failures,
            )
            self._houses[loop] = house
        return house

    # --- its end --------------------------------------------------------------------------------

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await self.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def drain(self, within_s: float = 10.0) -> None:
        """Let nobody in any more, and close what is open, between two frames and not all at once.

        To be awaited before the server is told to end: most servers wait for open connections, and
        these would stay open until they are `max_age_s` old.
        """
        self._seats.is_closed = True
        await self._house().crowd.drain(within_s)

    async def aclose(self) -> None:
        """Let go of the store. Whoever is still connected is told to leave."""
        self._seats.is_closed = True
        house = self._houses.pop(asyncio.get_running_loop(), None)
        if house is not None:
            house.crowd.close()
            await house.feed.aclose()
        if self._is_ours:
            await self.store.aclose()

    # --- for people -----------------------------------------------------------------------------

    @property
    def shown(self) -> str:
        """What people call it."""
        return f"gateway {self._terms.domain}"

    def status(self) -> GatewayStatus:
        feeds = [house.feed for house in self._houses.values()]
        counts = self._counts
        return GatewayStatus(
            domain=self._terms.domain,
            connections=len(self._seats),
            streams=sum(len(feed) for feed in feeds),
            opened=counts.opened,
            resumed=counts.resumed,
            events=counts.events,
            resets=dict(counts.resets),
            closed=dict(counts.closed),
            refused={str(status): count for status, count in counts.refused.items()},
            rings=sum(feed.counts.rings for feed in feeds),
            found=sum(feed.counts.found for feed in feeds),
            snapshots=sum(feed.counts.snapshots for feed in feeds),
            outage=next((feed.circuit.error for feed in feeds if feed.circuit.is_open), ""),
            draining=self._seats.is_closed,
        )


def _checked_base(base: str) -> str:
    if base and (not base.startswith("/") or base.endswith("/")):
        raise SettingsError(f'base={base!r}: a path as in "/jobs", or "" for none')
    return base
