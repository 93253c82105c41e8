"""One request, from its head to its last byte: who is it, what do they want, may they have it?"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias

from semel.bus.jobs import stream_of
from semel.bus.watching import Start, start_behind
from semel.colour import ASYNC
from semel.errors import SettingsError, StoreUnavailableError
from semel.failures import Failures
from semel.feed import Feed, Subscription
from semel.http.asgi import ASGIScope, Receive, Send, request_of
from semel.http.parts import Header, NotSentError
from semel.http.protocol import Refusal, Request, Response
from semel.http.refusal import is_refusal
from semel.http.sse import frames
from semel.http.sse.asking import Asked, asked, job_of
from semel.http.sse.cors import Cors
from semel.http.sse.crowd import Crowd
from semel.http.sse.direct import is_gone_of
from semel.http.sse.limits import BACK_S, Seats
from semel.http.sse.problems import forbidden, later, refused, unauthorised
from semel.http.sse.status import GatewayCounts
from semel.http.sse.tickets import Tickets
from semel.http.sse.view import Everything, NotShownError, Project, Some, View
from semel.http.sse.viewer import Viewer
from semel.stores.log_rules import name_of
from semel.values import value

__all__ = ["ABORT", "IS_GONE", "IS_STREAM", "NO_STORE", "Authorise", "House", "Terms", "Visit"]

Authorise: TypeAlias = Callable[[Request, str], Any]
"""From a request and a job's id to the principal, sync or async. Every falsy answer is a refusal,
and so is a `Refusal` that it raises."""

# In scope["extensions"]: drops the connection at once, with whatever waits to be sent on it.
ABORT = "semel.abort"

# There, too: whether the connection is over.
IS_GONE = "semel.is_gone"

# In the scope itself: True once a stream has begun. The gateway closes the streams of slow viewers
# itself. So the server of `semel gateway` limits unread bytes of other responses only.
IS_STREAM = "semel.is_stream"

# Whoever says who may see what has so long for it.
DECIDED_WITHIN_S = 30.0

# A connection ends at its age or a little sooner, so that those that came together part.
AGE_JITTER = 0.2

RETRY_STORE_S = 1.0

NO_STORE: Header = (b"cache-control", b"no-store")
STREAM: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    NO_STORE,
    (b"x-accel-buffering", b"no"),  # nginx would keep frames until it has enough of them
)
ALLOW: Header = (b"allow", b"GET, HEAD, OPTIONS")


@value
class Terms:
    """The settings of a gateway."""

    domain: str
    base: str
    authorise: Authorise | None
    project: Project | None
    tickets: Tickets | None
    cors: Cors
    waits_for_unknown: bool
    heartbeat_s: float
    max_age_s: float
    reauthorise_s: float | None
    retry_ms: tuple[int, int]

    def check(self) -> None:
        """What would fail at each request is told before the first."""
        for name in ("authorise", "project"):
            function = getattr(self, name)
            if function is not None and not callable(function):
                raise SettingsError(f"{name}={function!r} is no function")
        if inspect.iscoroutinefunction(self.project):
            raise SettingsError("project is called for each event and viewer: make it a plain def")
        if not isinstance(self.tickets, Tickets | None):
            raise SettingsError(f"tickets={self.tickets!r}: give Tickets(store)")
        for name in ("heartbeat_s", "max_age_s", "reauthorise_s"):
            span = getattr(self, name)
            if span is not None and not span > 0:
                raise SettingsError(f"{name}={span}: more than 0 seconds")
        match self.retry_ms:
            case (int(least), int(most)) if 0 <= least <= most:
                pass
            case wrong:
                raise SettingsError(f"retry_ms={wrong!r}: from and to, as in (500, 2500)")


@value
class House:
    """What all requests on one event loop share."""

    terms: Terms
    feed: Feed
    crowd: Crowd
    seats: Seats
    counts: GatewayCounts
    everything: Everything
    failures: Failures


class Visit:
    """One request. `answer` gives what is left to be said, or shows a stream to its end."""

    def __init__(self, house: House, scope: ASGIScope, receive: Receive, send: Send) -> None:
        self._house = house
        self._scope = scope
        self._receive = receive
        self._send = send
        self.request = request_of(scope)
        self.headers = house.terms.cors.headers(self.request)
        self.has_begun = False
        """Is it too late for another answer?"""
        self._job_id = ""
        self._stream = ""

    async def answer(self) -> Response | None:
        """None when it was a stream, which is over by now."""
        terms, request = self._house.terms, self.request
        if request.method == "OPTIONS":
            return terms.cors.preflight(request)
        if request.method not in {"GET", "HEAD"}:
            raise refused("method-not-allowed", "Send GET.", headers=(ALLOW,))
        self._house.seats.check_open()
        self._find_job()
        wanted = asked(request)
        try:
            if not wanted.is_stream:
                principal = await self._let_in(wanted.ticket)
                return await self._state(self._view(principal, None))
            with self._house.seats.taken(ASYNC.now()):
                principal = await self._let_in(wanted.ticket)
                with self._house.seats.of(principal):
                    return await self._seated(principal, await self._start(wanted))
        except StoreUnavailableError as error:
            if self.has_begun:
                raise
            self._house.failures.warn("semel: a viewer gets a 503: %s", error)
            raise later("store-unavailable", "Try again later.", RETRY_STORE_S) from error

    async def _start(self, wanted: Asked) -> Start:
        start = Start(wanted.after, wanted.lost)
        if wanted.last_seq is None:
            return start
        behind = await start_behind(self._house.feed, self._stream, wanted.last_seq)
        return behind if start == Start() else replace(start, only_above=behind.only_above)

    # --- who, and what --------------------------------------------------------------------------

    def _find_job(self) -> None:
        terms = self._house.terms
        job_id = job_of(self._scope, terms.base)
        if job_id is None:
            raise refused("job-unknown", f"Jobs are at {terms.base}/JOB_ID.")
        self._job_id = job_id
        self.request.path_params = {**self.request.path_params, "job_id": job_id}
        self._stream = stream_of(terms.domain, job_id)
        try:
            name_of(self._stream, "job")
        except SettingsError:
            raise _unknown() from None

    async def _let_in(self, ticket: str) -> object:
        """The principal."""
        tickets = self._house.terms.tickets
        if tickets is not None and ticket:
            self.request.ticket = await tickets.redeem(ticket, self._job_id)
        return await self._principal()

    async def _principal(self) -> object:
        terms, ticket = self._house.terms, self.request.ticket
        if terms.authorise is not None:
            return await self._authorised(terms.authorise)
        if terms.tickets is not None and ticket is None:
            raise unauthorised()
        return None if ticket is None else ticket.principal

    async def _authorised(self, authorise: Authorise) -> object:
        try:
            found = authorise(self.request, self._job_id)
            if inspect.isawaitable(found):
                found = await self._decided(found)
            if is_refusal(found):
                raise forbidden()
        except NotSentError as error:
            raise forbidden() from error
        except Refusal:
            raise
        except Exception as error:
            self._house.failures.tell(error, "semel: authorise failed; the viewer gets a 503")
            raise _undecided() from error
        return found

    async def _decided(self, deciding: Awaitable[Any]) -> Any:
        """Whoever does not decide keeps nobody waiting for ever, and nobody's seat."""
        try:
            async with asyncio.timeout(DECIDED_WITHIN_S):
                return await deciding
        except TimeoutError as error:
            self._house.failures.tell(
                error, "semel: authorise has not answered for %g s", DECIDED_WITHIN_S
            )
            raise _undecided() from None

    def _view(self, principal: object, only_above: int | None) -> View:
        project = self._house.terms.project
        if project is None and only_above is None:
            return self._house.everything
        return Some(project, principal, only_above, self._house.failures)

    # --- the state ------------------------------------------------------------------------------

    async def _state(self, view: View) -> Response:
        snapshot = await self._house.feed.load(self._stream)
        if snapshot.life == "unknown":
            raise _unknown()
        if snapshot.life == "gone":
            raise _gone()
        try:
            body = frames.written(view.state(snapshot))
        except NotShownError as error:
            raise refused(
                "not-shown", "The server could not show this job; the error is in its log."
            ) from error
        tag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()  # as this viewer sees it
        if self.request.header("if-none-match") == tag.decode():
            return Response(304, ((b"etag", tag),), b"")
        length = (b"content-length", b"%d" % len(body))
        return Response(200, ((b"content-type", b"application/json"), length, (b"etag", tag)), body)

    # --- the stream -----------------------------------------------------------------------------

    async def _seated(self, principal: object, start: Start) -> Response | None:
        house = self._house
        house.seats.check_open()
        following: Subscription | None = None
        try:
            following = house.feed.follow(self._stream, start.after, start.lost)
            await following.ready()
            house.seats.check_open()
            if self._has_had_all(following):
                return Response(204, (), b"")
            await self._show(following, self._view(principal, start.only_above))
            return None
        finally:
            if following is not None:
                following.close()

    def _has_had_all(self, following: Subscription) -> bool:
        """Is there nothing more for whoever has this cursor, now and ever?"""
        if following.life == "unknown" and not self._house.terms.waits_for_unknown:
            raise _unknown()
        if following.is_at_end:
            return True
        if following.life == "gone":
            raise _gone()
        return False

    async def _show(self, following: Subscription, view: View) -> None:
        send, house, terms = self._send, self._house, self._house.terms
        headers = [*STREAM, *self.headers]
        self.has_begun = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.request.method == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        self._scope[IS_STREAM] = True
        counts = house.counts
        counts.opened += 1
        counts.resumed += following.position.offset > 0
        extensions = self._scope.get("extensions") or {}
        age_s = terms.max_age_s * (1 - AGE_JITTER * random.random())  # noqa: S311
        viewer = Viewer(
            following,
            view,
            send,
            pace=terms,
            old_at=ASYNC.now() + age_s,
            may_go_on=self._principal,
            abort=extensions.get(ABORT),
            is_gone=extensions.get(IS_GONE) or is_gone_of(send),
            counts=counts,
        )
        try:
            await house.crowd.watch(viewer, self._receive, random.randint(*terms.retry_ms))  # noqa: S311
        finally:
            counts.closed[viewer.closing or "ended"] += 1


def _unknown() -> Refusal:
    return refused("job-unknown", "Nobody has said anything about this job, or it was forgotten.")


def _undecided() -> Refusal:
    return later("undecided", "The server could not decide whether you may see this.", BACK_S)


def _gone() -> Refusal:
    return refused("job-gone", "There is nothing more to be had of it.")
