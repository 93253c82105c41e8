"""The way to RabbitMQ: one connection for all of a broker, replaced when it breaks.

aio-pika can reconnect by itself, and is not asked to. What was sent and not confirmed is not known
to have arrived, and only whoever sent it can send it again. Here silence or a broken connection
ends the connection, whoever waits on it is told, and the next call opens another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractExchange
from aio_pika.exceptions import CONNECTION_EXCEPTIONS, ChannelPreconditionFailed

from semel.brokers.shared import Shared
from semel.errors import BrokerUnavailableError, SettingsError

BROKEN = (*CONNECTION_EXCEPTIONS, TimeoutError)

# A connection that is not closed politely within this is cut.
CLOSING_S = 1.0

# The driver goes round the loop so often to tell itself that it is closed.
AFTERWARDS = 5

# Whoever freezes is cut off by the server after two or three of these, and his messages are
# given to the next. RabbitMQ's own default is a minute.
HEARTBEAT_S = 10


# What aio-pika and aiormq read from a URL.
IN_A_URL = frozenset(
    {"auth", "heartbeat", "name", "timeout", "happy_eyeballs_delay", "interleave"}
    | {"cadata", "cafile", "capath", "certfile", "keyfile", "no_verify_ssl"}
)


class Link:
    """One connection, from its opening to its end, and the channel that publishes."""

    def __init__(self, connection: AbstractConnection) -> None:
        self.loop = asyncio.get_running_loop()
        self.routable: set[tuple[str, int]] = set()
        """Where a message has found a queue."""
        self.joined: set[tuple[str, str]] = set()
        """Topics, and groups that have joined them over this connection."""
        self._connection = connection
        self._publishing: AbstractChannel | None = None
        self._exchanges: dict[str, AbstractExchange] = {}
        self._one = asyncio.Lock()

    @property
    def ended(self) -> bool:
        transport = self._connection.transport
        return transport is None or not transport.connection.is_opened

    async def channel(self) -> AbstractChannel:
        """One that is closed by the first thing that goes wrong on it."""
        channel = self._connection.channel(publisher_confirms=False)
        await channel.initialize()
        return channel

    async def exchange(self, name: str) -> AbstractExchange:
        """Where messages are published and confirmed, or returned to us."""
        async with self._one:
            if self._publishing is None or self._publishing.is_closed:
                self._exchanges.clear()
                self._publishing = self._connection.channel(
                    publisher_confirms=True, on_return_raises=True
                )
                await self._publishing.initialize()
            if name not in self._exchanges:
                self._exchanges[name] = await self._publishing.declare_exchange(
                    name, aio_pika.ExchangeType.DIRECT, durable=True
                )
            return self._exchanges[name]

    async def end(self, *, cut: bool = False) -> None:
        if cut:
            self._cut()
        with contextlib.suppress(*BROKEN, asyncio.CancelledError):
            async with asyncio.timeout(CLOSING_S):
                await self._connection.close()
        for _ in range(AFTERWARDS):
            await asyncio.sleep(0)

    def _cut(self) -> None:
        """Closing waits for an answer, and first for all to be sent, unless the server is known
        to be stuck. There is no other way to say so than to make it look like it.
        """
        transport = self._connection.transport
        if transport is not None:
            long_ago = self.loop.time() - 10**9
            transport.connection._Connection__last_frame_time = long_ago  # type: ignore[attr-defined] # noqa: SLF001


class Line:
    """Leads to RabbitMQ, over whatever connection there is."""

    def __init__(self, url: str, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise SettingsError(
                f"timeout_s={timeout_s} leaves RabbitMQ no time to answer: write 5.0"
            )
        if not url.startswith(("amqp://", "amqps://")):
            raise SettingsError("RabbitBroker takes a URL like amqp://user:password@localhost/")
        self.timeout_s = timeout_s
        self._url = url
        if "heartbeat=" not in url:
            self._url += f"{'&' if '?' in url else '?'}heartbeat={HEARTBEAT_S}"
        self._shared = Shared(self._open)

    async def link(self) -> Link:
        try:
            return await self._shared.get()
        except BROKEN as error:
            raise unavailable(error) from error

    async def _open(self) -> Link:
        async with asyncio.timeout(self.timeout_s):
            return Link(await aio_pika.connect(self._url))

    @contextlib.asynccontextmanager
    async def using(self, link: Link | None = None) -> AsyncIterator[Link]:
        """What goes wrong ends the connection, and is told as what it means to us."""
        link = link or await self.link()
        try:
            async with asyncio.timeout(self.timeout_s):
                yield link
        except BROKEN as error:
            await link.end(cut=True)
            raise unavailable(error) from error
        except asyncio.CancelledError:
            # The driver says this, too, when its connection is closed under it.
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                await link.end(cut=True)
                raise unavailable(ConnectionError("the connection was closed")) from None
            raise

    @contextlib.asynccontextmanager
    async def declaring(self) -> AsyncIterator[AbstractChannel]:
        """A channel to declare things on."""
        async with self.using() as link:
            channel = await link.channel()
            try:
                yield channel
            except ChannelPreconditionFailed as error:
                raise SettingsError(
                    f"RabbitMQ has it with other settings: {error}. Give every broker of a topic "
                    "the same maxlen, or delete the queue"
                ) from error
            finally:
                if not channel.is_closed:
                    await channel.close()

    async def aclose(self) -> None:
        await self._shared.aclose()


def unavailable(error: BaseException) -> BrokerUnavailableError:
    reason = str(error) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = "it was silent for too long"
    return BrokerUnavailableError(
        f"RabbitMQ did not answer: {reason}. Whether it has what was sent is unknown; sending it "
        "again is right. Check that the server runs and can be reached from here"
    )


async def all_of(work: Sequence[asyncio.Task[None]]) -> list[BaseException | None]:
    """How each of them ended. None is left running when we are told to stop."""
    try:
        await asyncio.wait(work)
    except BaseException:
        for each in work:
            each.cancel()
        await asyncio.wait(work)
        raise
    return [_error(each) for each in work]


def _error(task: asyncio.Task[None]) -> BaseException | None:
    return ConnectionError("the channel was closed") if task.cancelled() else task.exception()
