"""One owner's view of one stream, for one group: a durable pull consumer of JetStream.

The server keeps what was handed out and not acknowledged, and how often. What it does not keep is
who may read: it gives to whoever asks. So an owner writes its name to the consumer, and looks with
every read whether it still stands there. And it counts along: deliveries are numbered without
gaps, so a gap says that somebody else was handed something, or that it was lost on the way.

After a takeover, a new connection and a gap, an owner gathers. It hands back, in everybody's name,
what is pending and is not in its own hands, until all of it is; the server then gives those before
anything new. Only what is gathered is given out, in order.

The easy mistake is to leave that to the server's own `ack_wait`. New messages flow meanwhile, and
those that were pending come behind them.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from semel.brokers import rules
from semel.brokers.nats import events
from semel.brokers.nats.line import (
    BROKEN,
    CLOSING_S,
    Line,
    Request,
    Wire,
    api_request,
    error_code,
    read,
    refused,
)
from semel.brokers.nats.stream import NO_CONSUMER, NO_STREAM, Stream, idle_s, token
from semel.cloudevents import NotAnEventError
from semel.colour import ASYNC
from semel.errors import BrokerUnavailableError
from semel.messages import Delivery

log = logging.getLogger("semel")

# What an owner writes to the consumer.
FENCE, OWNER, NAME = "semel-fence", "semel-owner", "semel-name"

ACK, NAK = b"+ACK", b"-NAK"

# Between two looks at what somebody else still holds.
PAUSE_S = 0.02


@dataclass(slots=True, eq=False)
class _Held:
    """An entry in our hands. `at` is where to acknowledge it."""

    seq: int
    count: int
    at: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, eq=False)
class _Pull:
    """Something we have asked for: so many entries, at the latest at `until`."""

    inbox: str
    wanted: int
    until: float
    done: asyncio.Future[None]


class NatsConsumer:
    """What `NatsBroker.consumer` returns."""

    def __init__(self, stream: Stream, group: str, name: str, fence: int) -> None:
        self._stream = stream
        self._line: Line = stream.line
        self._group = group
        self._name = name
        self._fence = fence
        self._me = secrets.token_hex(8)
        self._former = ""
        self._idle_s = 0.0
        self._held: dict[int, _Held] = {}
        """In our hands, by number: given out or not."""
        self._ahead: list[_Held] = []
        """Of these, what was not given out yet, in order."""
        self._last = 0
        """The number of the last delivery that we know of."""
        self._gap = False
        self._wire: Wire | None = None
        self._inbox = ""
        self._listening: Subscription | None = None
        self._pulls: dict[str, _Pull] = {}
        """What we have asked for and not got yet, by where it is to come."""
        self._asked = 0
        self._waiting: _Pull | None = None
        self._one = asyncio.Lock()
        self._closed = asyncio.Event()
        self._is_deposed = False

    async def begin(self) -> bool:
        """Be the one who reads; False when a later owner is."""
        info = await self._stream.consumer_info(self._group)
        if error_code(info) in {NO_CONSUMER, NO_STREAM}:
            await self._stream.join(self._group)
            info = await self._stream.consumer_info(self._group)
        if error_code(info) is not None:
            raise refused(info, f"tell of the group {self._group!r} of {self._stream}")
        said = info["config"].get("metadata") or {}
        if int(said.get(FENCE, 0)) > self._fence:
            self._depose(said)
            return False
        self._former = said.get(NAME, "")
        ours = said | {FENCE: str(self._fence), OWNER: self._me, NAME: self._name}
        config = info["config"] | {"metadata": ours}
        body = {"stream_name": self._stream.name, "config": config, "action": "update"}
        answer = await self._api("DURABLE.CREATE", body)
        if error_code(answer) is not None:
            raise refused(answer, f"take a new owner of the group {self._group!r}")
        return True

    # --- giving out -------------------------------------------------------------------------

    async def left_over(self, limit: int = 1000) -> Sequence[Delivery]:
        async with self._one:
            if not await self._ready():
                return []
            old = list(takewhile(lambda held: held.count > 1, self._ahead[:limit]))
            return self._give_out(len(old))

    async def read(self, limit: int, *, wait_s: float = 0.0) -> Sequence[Delivery]:
        until = ASYNC.now() + wait_s
        async with self._one:
            while await self._ready():
                if len(self._ahead) < limit:
                    await self._fetch(limit - len(self._ahead))
                if self._gap and not self._is_deposed:
                    await self._gather()
                if self._ahead or ASYNC.now() >= until:
                    break
                await self._wait(until)
            if self._is_deposed:
                await self._pass_time(until)
            return self._give_out(limit)

    async def _pass_time(self, until: float) -> None:
        """A former owner has nothing to wait for, and must not ask without rest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - ASYNC.now())):
                await self._closed.wait()

    def _give_out(self, limit: int) -> list[Delivery]:
        given, self._ahead = self._ahead[:limit], self._ahead[limit:]
        return [self._delivery(held) for held in given]

    def _delivery(self, held: _Held) -> Delivery:
        who, idle_s = (self._former, self._idle_s) if held.count > 1 else ("", 0.0)
        try:
            message = events.read(held.headers, held.body)
        except NotAnEventError as error:
            return Delivery(held.at, None, held.count, who, idle_s, str(error), held.body)
        if not message.topic:
            message = replace(message, topic=self._stream.topic)
        return Delivery(held.at, message, held.count, who, idle_s)

    async def reclaim(self, idle_s: float, limit: int = 100) -> Sequence[Delivery]:
        """Nothing: what somebody else was handed is noticed by the next read, and taken back."""
        return []

    # --- gathering --------------------------------------------------------------------------

    async def _ready(self) -> bool:
        """Is it ours to read? With a new connection comes the question what was lost with the old.

        What we hold stays ours: it is pending at the server, whatever it was sent through.
        """
        if self._closed.is_set() or self._is_deposed:
            return False
        wire = await self._line.wire()
        if self._wire is not wire:
            async with self._line.using(wire):
                self._inbox, self._listening = await wire.listen(self._heard)
            self._wire, self._waiting = wire, None
            self._pulls.clear()
            self._gap = True
        if self._gap:
            await self._gather()
        return not self._is_deposed

    async def _gather(self) -> None:
        until = ASYNC.now() + self._line.timeout_s
        while info := self._still_ours(await self._stream.consumer_info(self._group)):
            there = range(info["ack_floor"]["stream_seq"] + 1, info["delivered"]["stream_seq"] + 1)
            missing = info["num_ack_pending"] - len(self._held)
            others = [seq for seq in there if seq not in self._held]
            if missing <= 0 or not others:
                self._idle_s = idle_s(info)
                self._last, self._gap = info["delivered"]["consumer_seq"], False
                return
            before = len(self._held)
            await self._hand_back(others, info["delivered"]["consumer_seq"])
            await self._ask_for(missing)
            if len(self._held) == before:
                await ASYNC.sleep(PAUSE_S)  # somebody has asked before us, and is given them
            if ASYNC.now() > until:
                raise BrokerUnavailableError(
                    f"somebody else goes on reading {self._stream} for the group "
                    f"{self._group!r}: nobody may, besides its workers"
                )

    def _still_ours(self, info: dict[str, Any]) -> dict[str, Any] | None:
        if error_code(info) in {NO_CONSUMER, NO_STREAM}:
            raise BrokerUnavailableError(
                f"NATS has lost the group {self._group!r} of {self._stream}; it begins again with "
                "the oldest message there is"
            )
        if error_code(info) is not None:
            raise refused(info, f"tell of the group {self._group!r} of {self._stream}")
        said = info["config"].get("metadata") or {}
        if said.get(OWNER) == self._me:
            return info
        if int(said.get(FENCE, 0)) == self._fence:
            raise rules.begun_anew(f"{self._stream} for group {self._group!r}")
        self._depose(said)
        return None

    def _depose(self, said: dict[str, str]) -> None:
        self._is_deposed = True
        self._ahead.clear()
        log.warning(
            "semel: %s, group %s: %s reads now (its fence is %s, ours %d); we are handed nothing "
            "any more",
            self._stream,
            self._group,
            said.get(NAME) or "somebody else",
            said.get(FENCE),
            self._fence,
        )

    async def _hand_back(self, seqs: Sequence[int], delivered: int) -> None:
        """In the name of whoever had them. What was acknowledged stays so."""
        name = f"{self._stream.name}.{token(self._group)}"
        await self._say(NAK, [f"$JS.ACK.{name}.1.{seq}.{delivered}.0.0" for seq in seqs])

    async def _say(self, what: bytes, places: Sequence[str]) -> None:
        """They are heard in order, so the answer to the last one stands for all."""
        wire = await self._line.wire()
        async with self._line.using(wire):
            for place in places[:-1]:
                await wire.tell(Request(place, what))
            await wire.ask_all([Request(places[-1], what)])

    # --- asking -----------------------------------------------------------------------------

    async def _fetch(self, limit: int) -> None:
        """What is there now; and are we still the one who reads? Both are asked at once."""
        wire = self._on()
        async with self._line.using(wire):
            asked = await wire.send(api_request(self._stream.consumer_verb("INFO", self._group)))
            try:
                await self._ask_for(limit)
                info = self._still_ours(read(await wire.kept(asked)))
            finally:
                asked.cancel()
        if info is not None and info["num_ack_pending"] > len(self._held):
            self._gap = True

    async def _ask_for(self, limit: int) -> None:
        """At most so many, as far as they are there."""
        wire = self._on()
        async with self._line.using(wire):
            pull = await self._send_pull(limit, {"no_wait": True}, ASYNC.now())
            await wire.kept(pull.done)

    async def _wait(self, until: float) -> None:
        """For one entry. What an earlier call has asked for, and did not wait for, is still good.

        The server says when the time is up; one that does not is silent.
        """
        wire, pull = self._on(), self._waiting
        async with self._line.using(wire):
            if pull is None or pull.done.done():
                expires = {"expires": max(1, round((until - ASYNC.now()) * 1e9))}
                pull = self._waiting = await self._send_pull(1, expires, until)
            await asyncio.wait([pull.done], timeout=max(0.0, min(until, pull.until) - ASYNC.now()))
            if pull.done.done() or ASYNC.now() >= pull.until:
                await wire.kept(pull.done)

    async def _send_pull(self, wanted: int, terms: dict[str, Any], until: float) -> _Pull:
        wire = self._on()
        self._asked += 1
        pull = _Pull(f"{self._inbox}.{self._asked}", wanted, until, wire.promise())
        self._pulls[pull.inbox] = pull
        asking = api_request(
            self._stream.consumer_verb("MSG.NEXT", self._group), {"batch": wanted, **terms}
        )
        await wire.tell(asking, reply=pull.inbox)
        return pull

    def _on(self) -> Wire:
        if self._wire is None or self._wire.ended:
            raise BrokerUnavailableError("the connection to NATS was lost; ask again")
        return self._wire

    # --- hearing ----------------------------------------------------------------------------

    def _heard(self, message: Msg) -> None:
        if message.reply.startswith("$JS.ACK."):
            self._take(message)
        elif pull := self._pulls.pop(message.subject, None):
            status = (message.headers or {}).get("Status")
            _end(pull, None if status in NOTHING_MORE else _refusal(message, self))

    def _take(self, message: Msg) -> None:
        """Whichever pull it is for: each of them has one less to expect, or is asked again."""
        count, seq, delivered = _numbers(message.reply)
        self._gap = self._gap or delivered > self._last + 1
        self._last = delivered
        for pull in list(self._pulls.values()):
            pull.wanted -= 1
            if pull.wanted <= 0:
                del self._pulls[pull.inbox]
                _end(pull)
        if seq in self._held or self._is_deposed:
            return
        held = _Held(seq, count, message.reply, message.headers or {}, message.data)
        self._held[seq] = held
        bisect.insort(self._ahead, held, key=lambda each: each.seq)

    # --- and then ---------------------------------------------------------------------------

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        """Not fenced: that a message had its effect is true whoever says it."""
        ours = f".{self._stream.name}.{token(self._group)}."
        places = [each.token for each in deliveries if ours in str(each.token)]
        if places:
            await self._say(ACK, places)
        for place in places:
            self._held.pop(_numbers(place)[1], None)

    async def close(self) -> None:
        """What is pending stays so, and the next owner gathers it; a read stops waiting."""
        self._closed.set()
        for pull in self._pulls.values():
            _end(pull)
        self._pulls.clear()
        listening, self._listening = self._listening, None
        if listening is not None:
            with contextlib.suppress(*BROKEN):
                async with asyncio.timeout(CLOSING_S):
                    await listening.unsubscribe()

    async def _api(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        return await self._line.api(self._stream.consumer_verb(verb, self._group), body)

    def __repr__(self) -> str:
        return f"NatsConsumer({str(self._stream)!r}, {self._group!r}, {self._name!r})"


# How the server ends a pull: there is nothing there, or the time is up.
NOTHING_MORE = {"404", "408"}


def _end(pull: _Pull, error: Exception | None = None) -> None:
    if pull.done.done():
        return
    if error is None:
        pull.done.set_result(None)
    else:
        pull.done.set_exception(error)
        pull.done.exception()  # nobody may be waiting for it any more


def _refusal(message: Msg, consumer: NatsConsumer) -> BrokerUnavailableError:
    why = (message.headers or {}).get("Description", "it does not say why")
    return BrokerUnavailableError(f"NATS hands nothing to {consumer!r}: {why}")


def _numbers(place: str) -> tuple[int, int, int]:
    """How often it was handed out, its number in the stream, and that of the delivery.

    They stand in the subject at which it is acknowledged, behind the names of stream and consumer;
    newer servers put a domain and an account before those.
    """
    words = place.split(".")
    at = SHORT if len(words) == LENGTH else SHORT + 2
    count, seq, delivered = words[at : at + 3]
    return int(count), int(seq), int(delivered)


# $JS.ACK.stream.consumer.count.seq.delivered.time.pending
LENGTH, SHORT = 9, 4
