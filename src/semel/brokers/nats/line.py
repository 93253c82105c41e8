"""The way to NATS: one connection for all of a broker, replaced when it breaks.

nats-py can reconnect by itself, and is told not to. It would keep what could not be sent and send
it later, at a time that nobody knows; and a request that timed out may end its reading for good.
Here silence or a broken connection ends the connection, whoever waits on it is told, and the next
call opens another. Whether what was sent has arrived is then not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from semel.brokers.shared import Shared
from semel.errors import BrokerUnavailableError, SettingsError
from semel.values import value

log = logging.getLogger("semel")

BROKEN = (OSError, TimeoutError, nats.errors.Error)

# A connection that is not closed politely within this is cut.
CLOSING_S = 1.0

# Answers of the server that are not JSON come with a status instead: nobody serves the subject.
NO_RESPONDERS = 503

BAD_REQUEST = 400
NO_REPLICAS = 10074  # told as if the server had failed; a single one cannot have any


@value
class Request:
    """What is sent, and where to."""

    subject: str
    payload: bytes = b""
    headers: Mapping[str, str] | None = None


Heard: TypeAlias = Callable[[Msg], None]


class Wire:
    """One connection, from its opening to its end."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended = False
        self._client = client
        self._timeout_s = timeout_s
        self._inbox = client.new_inbox()
        self._asked: dict[str, asyncio.Future[Msg]] = {}
        self._promises: set[asyncio.Future[Any]] = set()
        self._number = 0

    async def begin(self) -> None:
        await self._client.subscribe(f"{self._inbox}.*", cb=self._answered)

    @property
    def max_payload(self) -> int:
        """How many bytes a message may have, its headers included."""
        return self._client.max_payload

    # --- asking -----------------------------------------------------------------------------

    async def send(self, request: Request) -> asyncio.Future[Msg]:
        """Send it, and promise its answer."""
        self._number += 1
        token = str(self._number)
        answer: asyncio.Future[Msg] = self.promise()
        self._asked[token] = answer
        answer.add_done_callback(lambda _: self._asked.pop(token, None))
        await self.tell(request, reply=f"{self._inbox}.{token}")
        return answer

    async def tell(self, request: Request, *, reply: str = "") -> None:
        """Send it, and expect no answer."""
        if self.ended:
            raise ConnectionError("the connection is closed")
        headers = None if request.headers is None else dict(request.headers)
        await self._client.publish(request.subject, request.payload, reply, headers)

    async def ask_all(self, requests: Iterable[Request]) -> list[Msg]:
        """Send all of them, in order, then hear all answers. Each may be late, not silent."""
        asked: list[asyncio.Future[Msg]] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                asked.extend([await self.send(request) for request in requests])
            return [await self.kept(answer) for answer in asked]
        finally:
            for answer in asked:
                answer.cancel()

    async def kept(self, promise: asyncio.Future[Any], *, within_s: float = 0.0) -> Any:
        """What was promised, as long after `within_s` as the server may be silent."""
        if not promise.done():
            async with asyncio.timeout(within_s + self._timeout_s):
                await asyncio.wait([promise])
        return promise.result()

    def promise(self) -> asyncio.Future[Any]:
        """Something to wait for, at most until the connection ends."""
        promise: asyncio.Future[Any] = self.loop.create_future()
        self._promises.add(promise)
        promise.add_done_callback(self._promises.discard)
        return promise

    async def _answered(self, message: Msg) -> None:
        answer = self._asked.get(message.subject.rpartition(".")[2])
        if answer is not None and not answer.done():
            answer.set_result(message)

    # --- listening --------------------------------------------------------------------------

    async def listen(self, heard: Heard) -> tuple[str, Subscription]:
        """An inbox of one's own: what comes to `<inbox>.*` is heard, in order."""
        inbox = self._client.new_inbox()

        async def hear(message: Msg) -> None:
            heard(message)

        # Without limits: what comes was asked for, and is not to be dropped for being much.
        return inbox, await self._client.subscribe(
            f"{inbox}.*", cb=hear, pending_msgs_limit=0, pending_bytes_limit=0
        )

    # --- the end ----------------------------------------------------------------------------

    async def lost(self) -> None:
        """nats-py has closed the connection."""
        self.ended = True
        for promise in list(self._promises):
            if not promise.done():
                promise.set_exception(ConnectionError("the connection was lost"))
                promise.exception()  # nobody may be waiting for this one any more

    async def end(self, *, cut: bool = False) -> None:
        await self.lost()
        if cut:
            _cut(self._client)
        with contextlib.suppress(*BROKEN):
            async with asyncio.timeout(CLOSING_S):
                await self._client.close()


def _cut(client: Client) -> None:
    """Drop the connection with all that waits to be sent: closing would send it first, and wait."""
    client._pending = []  # noqa: SLF001 - there is no other way to give up
    client._pending_data_size = 0  # noqa: SLF001
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001
    if writer is not None:
        writer.transport.abort()


class Line:
    """Asks NATS, over whatever connection there is."""

    def __init__(self, url: str, timeout_s: float, options: Mapping[str, Any]) -> None:
        if timeout_s <= 0:
            raise SettingsError(f"timeout_s={timeout_s} leaves NATS no time to answer: write 5.0")
        self.timeout_s = timeout_s
        self._servers = servers_of(url)
        self._options = options
        self._shared = Shared(self._open)

    async def wire(self) -> Wire:
        try:
            return await self._shared.get()
        except BROKEN as error:
            raise unavailable(error) from error

    async def _open(self) -> Wire:
        client, troubles = Client(), list[Exception]()

        async def note(error: Exception) -> None:
            """By default every one is printed with its traceback."""
            troubles.append(error)
            log.debug("semel: NATS: %s", error)

        async def closed() -> None:
            await wire.lost()

        wire = Wire(client, self.timeout_s)
        once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
        try:
            async with asyncio.timeout(self.timeout_s):
                await client.connect(
                    self._servers,
                    error_cb=note,
                    closed_cb=closed,
                    connect_timeout=self.timeout_s,  # type: ignore[arg-type]
                    **{"name": "semel", **self._options, **once},
                )
                await wire.begin()
        except BaseException as error:
            await wire.end(cut=True)
            if isinstance(error, nats.errors.NoServersError) and troubles:
                raise ConnectionError(str(troubles[-1])) from error
            raise
        return wire

    async def ask(self, request: Request) -> Msg:
        (answer,) = await self.ask_all([request])
        return answer

    async def ask_all(self, requests: Sequence[Request]) -> list[Msg]:
        wire = await self.wire()
        async with self.using(wire):
            return await wire.ask_all(requests)

    async def api(self, verb: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """JetStream's answer. A refusal has an `error`."""
        return read(await self.ask(api_request(verb, body)))

    @contextlib.asynccontextmanager
    async def using(self, wire: Wire) -> AsyncIterator[None]:
        """What goes wrong on the wire ends it, and is told as what it means to us."""
        try:
            yield
        except BROKEN as error:
            await wire.end(cut=True)
            raise unavailable(error) from error

    async def aclose(self) -> None:
        await self._shared.aclose()


def servers_of(url: str) -> list[str]:
    """`nats://a,b:4223` are two servers of one cluster, with the same credentials."""
    scheme, _, rest = url.partition("://")
    schemes = {"nats": "nats", "tls": "tls", "nats+tls": "tls"}
    if scheme.lower() not in schemes or not rest:
        raise SettingsError(
            "NatsBroker takes a URL like nats://localhost:4222, or nats+tls:// for TLS"
        )
    credentials, at, places = rest.rpartition("@")
    found = [
        f"{schemes[scheme.lower()]}://{credentials}{at}{place}"
        for place in places.rstrip("/").split(",")
    ]
    for server in found:
        if not urlsplit(server).hostname:
            raise SettingsError("the URL names no server: write nats://localhost:4222")
    return found


# --- JetStream's words --------------------------------------------------------------------------


def api_request(verb: str, body: Mapping[str, Any] | None = None) -> Request:
    return Request(f"$JS.API.{verb}", b"" if body is None else json.dumps(body).encode())


def read(answer: Msg) -> dict[str, Any]:
    status = (answer.headers or {}).get("Status")
    if status is not None:
        why = (answer.headers or {}).get("Description") or "nobody serves this subject"
        return {"error": {"code": int(status), "err_code": 0, "description": why}}
    found: dict[str, Any] = json.loads(answer.data)
    return found


def error_code(answer: Mapping[str, Any]) -> int | None:
    """JetStream's number for what is wrong, NO_RESPONDERS when it is not there, None if nothing."""
    if "error" not in answer:
        return None
    return int(answer["error"].get("err_code") or answer["error"]["code"])


def refused(answer: Mapping[str, Any], what: str) -> BrokerUnavailableError | SettingsError:
    """Why JetStream will not, for people."""
    why = answer["error"].get("description", "")
    if error_code(answer) == NO_RESPONDERS:
        return BrokerUnavailableError(
            f"NATS cannot {what}: JetStream does not answer. Start the server with -js, and see "
            "that this user may use $JS.API.>"
        )
    if answer["error"]["code"] == BAD_REQUEST or error_code(answer) == NO_REPLICAS:
        return SettingsError(f"NATS will not {what}: {why}")
    return BrokerUnavailableError(f"NATS cannot {what}: {why}")


def unavailable(error: BaseException) -> BrokerUnavailableError:
    reason = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = "it was silent for too long"
    return BrokerUnavailableError(
        f"NATS did not answer: {reason.removeprefix('nats: ')}. Whether it has what was sent is "
        "unknown; sending it again is right. Check that the server runs and can be reached from "
        "here"
    )
