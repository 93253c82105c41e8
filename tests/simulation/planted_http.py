"""Defects to plant in the HTTP door: each is one that a published middleware, a framework's own
tool or a tired afternoon has. The campaign must find every one of them.

Those of handlers that do without the door, over a table with transactions, are in `planted_sql`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
from planted import ClaimInTwoSteps, ReleaseWithoutToken
from web_world import Plant

from semel.call import Call
from semel.errors import StoreUnavailableError
from semel.http import asgi, door, exchange, protocol, rule
from semel.http.asgi import Again, Conversation
from semel.http.exchange import Exchange
from semel.http.protocol import Response

# Every defect, and the promise that it must be seen to break.
PLANTS: dict[str, tuple[Plant, str]] = {}

TWICE = "a handler ran twice"
TWICE_FOR_NOTHING = "a handler ran twice without a crash"
UNRECORDED = "a response was sent before it was recorded"
OTHER_HEADERS = "a response has other headers than it should"
CHANGED = "a response changed on its way"


def planted(name: str, breaks: str, **plant: Any) -> None:
    PLANTS[name] = (Plant(**plant), breaks)


def swapped(name: str, breaks: str, target: Any, attribute: str, new: Any) -> None:
    planted(name, breaks, patch=lambda: mock.patch.object(target, attribute, new))


def conversation(breaks: str) -> Callable[[type], type]:
    """Plant a conversation."""

    def plant(cls: type) -> type:
        swapped(name_of(cls), breaks, asgi, "Conversation", cls)
        return cls

    return plant


def exchanged(breaks: str) -> Callable[[type], type]:
    """Plant an exchange."""

    def plant(cls: type) -> type:
        swapped(name_of(cls), breaks, door, "Exchange", cls)
        return cls

    return plant


def instead_of(target: Any, attribute: str, breaks: str) -> Callable[[Any], Any]:
    """Plant a function in the place of another."""

    def plant(fn: Any) -> Any:
        swapped(fn.__name__, breaks, target, attribute, fn)
        return fn

    return plant


def name_of(cls: type) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).strip("_")


planted("check_then_claim", TWICE_FOR_NOTHING, ledger=ClaimInTwoSteps)
planted("release_without_token", TWICE, server=ReleaseWithoutToken)


# --- when it is recorded ------------------------------------------------------------------------


@conversation(UNRECORDED)
class SentThenRecorded(Conversation):
    async def _finish(self) -> None:
        body = b"".join(self._pieces)
        response = self._closing(body)
        await self._send_whole(body)
        await self._exchange.close(response)


@conversation(UNRECORDED)
class RecordedInTheBackground(Conversation):
    async def _finish(self) -> None:
        body = b"".join(self._pieces)
        response = self._closing(body)
        await self._send_whole(body)
        self._exchange.closed = True
        asgi.keep(asyncio.ensure_future(self._exchange.close(response)))


@conversation(TWICE_FOR_NOTHING)
class ReleasedWhenSendRaises(Conversation):
    """A client that hangs up looks like a handler that failed."""

    async def _finish(self) -> None:
        body = b"".join(self._pieces)
        response = self._closing(body)
        try:
            await self._send_whole(body)
        except OSError as error:
            await self._exchange.failed(error)
            raise
        await self._exchange.close(response)


@conversation(TWICE_FOR_NOTHING)
class StreamsAreNotStored(Conversation):
    """`more_body` is taken for a stream, as every response has it behind some middleware."""

    async def _gather_piece(self, message: Any) -> None:
        if message.get("more_body", False):
            await self._exchange.failed(RuntimeError("a stream is not stored"))
            self._pieces.append(message["body"])
            await self._pass_on()
        else:
            await super()._gather_piece(message)


@conversation(CHANGED)
class OnlyTheLastPieceRecorded(Conversation):
    async def _finish(self) -> None:
        answer = await self._exchange.close(self._closing(self._pieces[-1]))
        whole = b"".join(self._pieces)
        await (self._send_whole(whole) if answer.body == self._pieces[-1] else self._say(answer))


# --- clients that hang up -----------------------------------------------------------------------


@conversation(TWICE)
class DisconnectIsFailure(Conversation):
    """Nobody waits for the answer any more, so why go on?"""

    async def hold(self, app: Any, scope: Any) -> None:
        talk = asyncio.ensure_future(super().hold(app, scope))
        leaving = asyncio.ensure_future(self._left())
        await asyncio.wait([talk, leaving], return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not talk.done():
            talk.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talk
            return
        await talk

    async def _left(self) -> None:
        while (await self.receive._receive())["type"] != "http.disconnect":
            pass


@conversation(TWICE_FOR_NOTHING)
class HintsToNobodyFailTheHandler(Conversation):
    async def _gather(self, message: Any) -> None:
        if message["type"] == "http.response.early_hint":
            await self._send(message)
        else:
            await super()._gather(message)


@instead_of(Again, "keep_back", TWICE_FOR_NOTHING)
def disconnect_heard_before_the_record(self: Again, most_s: float) -> None:
    """The framework stops its handler, or its response in the middle."""


@instead_of(Again, "_until_let_through", "left without a whole response")
async def disconnect_invented_after_the_body(self: Again, most_s: float) -> None:
    async def gone() -> Any:
        return {"type": "http.disconnect"}

    self._receive = gone


# --- whose key it is, and for what --------------------------------------------------------------


@instead_of(asgi, "tenant_of", "another tenant's response")
async def key_without_tenant(scope: Any, request: Any) -> str:
    return "everybody"


@instead_of(asgi, "fingerprint_of", "the response for another payload")
def payload_never_compared(ruling: Any, request: Any, body: Any) -> bytes:
    return b""


@instead_of(exchange.protocol, "refusal", "a last client was told in-progress")
def conflict_told_to_wait(error: Any, pace_s: float = 1.0) -> Response:
    """Another payload is told to come again, and again."""
    said = _refusal(error, pace_s)
    return protocol.problem("in-progress", "Ask again.") if said.status == 422 else said


_refusal = protocol.refusal


# --- the lease and the store --------------------------------------------------------------------


@instead_of(Call, "_keep_lease", "a healthy handler's lease ran out")
def lease_never_renewed(self: Call, delay_s: float) -> None:
    pass


@conversation(TWICE)
class StoreDownRunsAnyway(Conversation):
    """Rather a double than an error."""

    async def hold(self, app: Any, scope: Any) -> None:
        answer = await self._exchange.open()

        async def opened() -> Response | None:
            return answer

        if answer is not None and b"store-unavailable" in (answer.body or b""):
            await app(scope, self.receive, self._send)
            return
        self._exchange.open = opened
        await super().hold(app, scope)


@exchanged("told that the store is down")
class UnrecordedIsUnavailable(Exchange):
    """The client is told that nothing was done, when only the record was not."""

    def _sent(self, response: Response, settled: Any) -> Response:
        error = getattr(settled, "error", None)
        if isinstance(error, StoreUnavailableError):
            return self._refused(error)
        return super()._sent(response, settled)


@exchanged("another response than the recorded one")
class OwnAnswerInsteadOfTheRecorded(Exchange):
    def _sent(self, response: Response, settled: Any) -> Response:
        return response


# --- failures -----------------------------------------------------------------------------------


@exchanged("ran twice under on_crash=hold")
class HeldFailureRunsAgain(Exchange):
    """A 5xx is retried, whatever the rule says."""

    async def _server_error(self, response: Response) -> Response:
        return self._sent(response, await self.fail(exchange.Unrecorded(response.status)))


@exchanged("still holds its key")
class FailureLeftPending(Exchange):
    """`except Exception` logs it, and leaves the key to its lease."""

    async def failed(self, error: Exception) -> Response | None:
        self.closed = True
        return None


@exchanged("ran twice under on_crash=store")
class CrashStoredOnlyLikeAnError(Exchange):
    """What was found out after a crash is treated like what the handler answers."""

    async def _settle_for(self, found: Response) -> Response:
        return await self.close(found)


swapped("refusals_stored", "a 429 was replayed", rule, "NEVER_STORED", frozenset())
swapped("no_route_stored", "a 404 was replayed", rule, "NO_ROUTE", frozenset())


@instead_of(rule.Ruling, "keeps", TWICE_FOR_NOTHING)
def only_success_stored(self: Any, status: int, *, routed: bool) -> bool:
    return status in (200, 201, 202)


# --- what is replayed ---------------------------------------------------------------------------

swapped("cookies_replayed", OTHER_HEADERS, protocol, "NEVER_KEPT", frozenset())


@instead_of(protocol, "written", CHANGED)
def body_written_anew(response: Response, never: Any = frozenset()) -> bytes:
    """Read as JSON, and written as another."""
    with contextlib.suppress(ValueError):
        said = json.dumps(json.loads(response.body or b""), sort_keys=True, indent=1).encode()
        response = Response(response.status, response.headers, said)
    return _written(response, never)


@instead_of(protocol, "written", OTHER_HEADERS)
def repeated_headers_collapsed(response: Response, never: Any = frozenset()) -> bytes:
    headers = tuple(dict(response.headers).items())
    return _written(Response(response.status, headers, response.body), never)


_written = protocol.written


@instead_of(protocol, "replayed", OTHER_HEADERS)
def replay_not_marked(response: Response, request: Any) -> Response:
    return response
