"""The connection of a room's client over the `websockets` package: asyncio, one task each.

A line is opened, says what it hears, and ends once: with what it was closed with, or with what went
wrong. Whoever hangs up hears nothing more of it. Nothing waits for a line that is hung up on, but
`ended`, which is for those who leave nothing behind.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from urllib.parse import urlsplit

from semel.client.flow import is_distrusted
from semel.client.room_values import RoomError
from semel.errors import SettingsError
from semel.values import value

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

Token: TypeAlias = str | Callable[[], str | Awaitable[str | None] | None] | None
"""Who one is; a function is asked at every connection, so that it can be renewed."""

# Whoever is gone does not say goodbye.
GOODBYE_S: Final = 1.0

TOO_LARGE: Final = 1009

SCHEMES: Final = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class Hears(Protocol):
    """Who is told what happens on a line."""

    def opened(self, line: Line, token: str | None) -> None: ...

    def received(self, line: Line, said: str | bytes) -> None: ...

    def closed(self, line: Line, code: int | None, reason: str) -> None: ...

    def failed(self, line: Line, error: RoomError) -> None:
        """What is wrong will be wrong again."""
        ...


@value
class Address:
    """`limit` is the size of the largest message, in bytes."""

    url: str
    token: Token
    headers: Mapping[str, str]
    limit: int


class Line:
    """One connection. Made in a running loop, it begins at once."""

    def __init__(self, address: Address, within_s: float, hears: Hears) -> None:
        self._address = address
        self._within_s = within_s
        self._hears = hears
        self._to_say: asyncio.Queue[str] = asyncio.Queue()
        self._is_over = False
        self._task = asyncio.ensure_future(self._run())

    def say(self, text: str) -> None:
        self._to_say.put_nowait(text)

    def hang_up(self) -> None:
        self._is_over = True
        self._task.cancel()

    async def ended(self) -> None:
        """The socket is closed."""
        await asyncio.wait([self._task])

    def when_ended(self, tell: Callable[[Line], None]) -> None:
        self._task.add_done_callback(lambda _: tell(self))

    # --- its life -----------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            token = await self._token()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            self._tell(self._hears.failed, _hopeless("there is no token", error))
            return
        try:
            async with self._connected() as socket:
                self._tell(self._hears.opened, token)
                await self._converse(socket)
        except Exception as error:  # noqa: BLE001 - the network, or the other side
            self._end(error)

    async def _token(self) -> str | None:
        token = self._address.token
        if not callable(token):
            return token
        found = token()
        return await found if inspect.isawaitable(found) else found

    def _connected(self) -> Any:
        connect = websockets().asyncio.client.connect
        return connect(
            self._address.url,
            additional_headers=dict(self._address.headers),
            max_size=self._address.limit,
            open_timeout=self._within_s,
            close_timeout=GOODBYE_S,
            ping_interval=None,  # the server's heartbeats say more
        )

    async def _converse(self, socket: ClientConnection) -> None:
        saying = asyncio.ensure_future(self._say_all(socket))
        try:
            while True:
                self._tell(self._hears.received, await socket.recv())
        finally:
            saying.cancel()
            await asyncio.wait([saying])

    async def _say_all(self, socket: ClientConnection) -> None:
        try:
            while True:
                await socket.send(await self._to_say.get())
        except websockets().exceptions.ConnectionClosed:
            pass  # whoever reads hears of it, too

    def _end(self, error: Exception) -> None:
        sent, received = getattr(error, "sent", None), getattr(error, "rcvd", None)
        is_ours = not getattr(error, "rcvd_then_sent", False)
        if is_distrusted(error):
            self._tell(self._hears.failed, _hopeless("the server is not trusted", error))
        elif is_ours and sent is not None and sent.code == TOO_LARGE:
            limit = f"a message is larger than {self._address.limit} bytes: allow more (limit=)"
            self._tell(self._hears.failed, RoomError(limit, code="TOO_LARGE"))
        else:
            code = None if received is None else received.code
            self._tell(self._hears.closed, code, str(error) or type(error).__name__)

    def _tell(self, hear: Callable[..., None], *told: Any) -> None:
        if not self._is_over:
            hear(self, *told)


def websockets() -> ModuleType:
    try:
        import websockets.asyncio.client
        import websockets.exceptions
    except ImportError as error:
        raise SettingsError("websockets is not installed: pip install 'semel[ws]'") from error
    return websockets


def address_of(url: str, *, token: Token, headers: Mapping[str, str] | None, limit: int) -> Address:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES or not parts.hostname:
        raise SettingsError(f"url={url!r} is no address of rooms; it begins with ws:// or wss://")
    if limit < 1:
        raise SettingsError(f"limit={limit!r} must be bytes, more than 0")
    there = parts._replace(scheme=SCHEMES[parts.scheme]).geturl()
    return Address(there, token, dict(headers or {}), limit)


def _hopeless(message: str, cause: BaseException) -> RoomError:
    error = RoomError(f"{message}: {cause}")
    error.__cause__ = cause
    return error
