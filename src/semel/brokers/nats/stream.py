"""One shard of a topic: a JetStream stream, with the events on one subject.

Every message says which sequence number it expects to come behind, and whose, and the server
refuses it when that is not so. So a batch can be sent without waiting for each answer: behind one
that was not taken, none is. The number alone would not do: where one entry of somebody else takes
the place of our first message, our second one finds the number that it expects. A later owner
writes its fence to a second subject of the same stream before
anything else, and the number that a former owner expects is never right again. Who is told that it
is wrong looks at the end of the stream, and finds there what to answer.

The easy mistake is to trust `Nats-Msg-Id`, the server's own memory of what it has seen. It reaches
back for minutes, and it remembers messages that were deleted, so that what is sent again is
confirmed and is not there.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from semel.brokers import rules
from semel.brokers.nats import events
from semel.brokers.nats.events import Mode
from semel.brokers.nats.line import (
    Line,
    Request,
    Wire,
    api_request,
    error_code,
    read,
    refused,
)
from semel.cloudevents import NotAnEventError
from semel.errors import BrokerUnavailableError
from semel.messages import (
    Backlog,
    Batch,
    Behind,
    Fenced,
    Forked,
    Full,
    GroupBacklog,
    Message,
    Receipt,
    Refused,
    Tail,
    Taken,
)
from semel.values import value

log = logging.getLogger("semel")

# JetStream's numbers for what it has to say.
NO_CONSUMER = 10014
NO_MESSAGE = 10037
TOO_LARGE = 10054
OTHER_SETTINGS = 10058
NO_STREAM = 10059
WRONG_LAST_NAME = 10070
WRONG_LAST_SEQUENCE = 10071
NO_ROOM = {10002, 10023, 10047, 10077}
"""Limits of the account, of the server, of its storage, of the stream."""

LONGEST_NAME = 255

# In the metadata of a topic's first stream: in how many shards the topic is published.
SHARDS = "semel-shards"

# So many messages are on their way at once; the server is not asked to hold more.
WINDOW = 1000

# Bytes for what a message expects to come behind: a number, and the longest name there is.
EXPECTING = 1024

# Whoever loses the race for the next number looks again, at most so often.
TRIES = 5

# What a consumer may have in hand, and for how long before the server hands it to somebody else.
# The next owner does not wait for that.
MOST_PENDING = 65_536
ACK_WAIT_S = 3600


def token(text: str) -> str:
    """The text as one token of a subject or as part of a name; `unquote` reads it back."""
    return quote(text, safe="").replace(".", "%2E")


@value
class Settings:
    """How streams are made, and how messages are written."""

    prefix: str
    maxlen: int | None
    replicas: int
    duplicate_window_s: float
    mode: Mode


@value
class End:
    """What is known of a stream's end: its last number, its last event, its owner's fence."""

    wire: Wire
    seq: int
    tail: Tail
    tail_seq: int
    fence: int


@value
class _Stored:
    """An entry as it lies in the stream; `message` is None when it is no event."""

    seq: int
    message: Message | None


Addition: TypeAlias = tuple[Message, dict[str, str], bytes]


class Stream:
    """The stream of one shard. Used by one owner at a time, or it looks again and again."""

    def __init__(self, line: Line, topic: str, shard: int, settings: Settings) -> None:
        self.line = line
        self.topic = topic
        self.shard = shard
        self.name = f"{settings.prefix}-{token(topic)}-{shard}"
        self.subject = f"{settings.prefix}.{token(topic)}.{shard}"
        self._settings = settings
        self._fence_subject = f"{self.subject}.fence"
        self._lock = asyncio.Lock()
        self._is_made = False
        self._end: End | None = None
        self._room = 0
        """So many may be added before it is time to look how long the stream is."""
        if len(self.name) > LONGEST_NAME:
            raise rules.TopicError(
                f"the topic {topic!r} makes a name of {len(self.name)} bytes for its stream, and "
                f"NATS takes {LONGEST_NAME}: choose a shorter one"
            )

    # --- publishing -------------------------------------------------------------------------

    async def publish(self, batch: Batch) -> Receipt:
        async with self._lock:
            try:
                return await self._publish(batch)
            except BaseException:
                # What has arrived is not known, nor whether the stream is still there.
                self._end, self._is_made = None, False
                raise

    async def _publish(self, batch: Batch) -> Receipt:
        added = 0
        if not self._is_made:
            await self.make()
        wire = await self.line.wire()
        known = self._end if self._end and self._end.wire is wire else None
        for _ in range(TRIES):
            end = known or await self.look()
            messages = await self._fresh(batch, end)
            if not isinstance(messages, Sequence):
                if known is None:
                    return messages
                known = None  # somebody else may have published since
                continue
            known = self._end = None
            owned = await self._be_owner(batch.fence, end) if batch.fence > end.fence else end
            if owned is None:
                continue
            if messages and (full := await self._full(batch, owned)):
                return full
            appending = _Appending(self, owned)
            receipt = await appending.all(self._written(messages, owned.wire))
            added += appending.added
            self._room -= appending.added
            if receipt is not None:
                self._end = appending.end
                return Taken(added) if isinstance(receipt, Taken) else receipt
        raise BrokerUnavailableError(
            f"somebody else goes on publishing to {self}: two relays of one outbox share a store "
            "for their shards, and nobody else may write there"
        )

    async def _fresh(self, batch: Batch, end: End) -> Sequence[Message] | Fenced | Behind | Forked:
        ids: Mapping[int, str] = {}
        before = [m.position for m in batch.messages if m.position <= end.tail.position]
        if before and batch.fence >= end.fence:
            ids = await self._ids(before[0], before[-1], end)
        return rules.fresh(batch, end.fence, end.tail, lambda _first, _last: ids)

    async def _be_owner(self, fence: int, end: End) -> End | None:
        """From now on every former owner expects a wrong number. None: somebody was faster."""
        headers = {"Nats-Expected-Last-Sequence": str(end.seq), "Nats-Rollup": "sub"}
        request = Request(self._fence_subject, str(fence).encode(), headers)
        answer = read(await self.line.ask(request))
        match error_code(answer):
            case None:
                return End(end.wire, answer["seq"], end.tail, end.tail_seq, fence)
            case code if code == WRONG_LAST_SEQUENCE:
                return None
        raise refused(answer, f"take a new owner of {self}")

    def _written(self, messages: Iterable[Message], wire: Wire) -> Iterable[Addition | Refused]:
        for message in messages:
            try:
                headers, body = events.write(message, self._settings.mode)
                headers["Nats-Msg-Id"] = events.encoded(message.id)
            except UnicodeEncodeError as error:
                yield Refused(message, f"it cannot be written as UTF-8: {error}")
                return
            # With room for what it expects, which is not known yet.
            if (bytes_ := events.size(headers, body) + EXPECTING) > wire.max_payload:
                why = f"it has {bytes_} bytes, and NATS takes {wire.max_payload} (max_payload)"
                yield Refused(message, why)
                return
            yield message, headers, body

    # --- what is there ----------------------------------------------------------------------

    async def look(self) -> End:
        """The end of the stream."""
        while True:
            wire = await self.line.wire()
            state = (await self._info())["state"]
            # Asked afterwards: what is not newer than `seq` by then is the newest up to `seq`.
            last, fence = await self.line.ask_all(
                [self._get({"last_by_subj": s}) for s in (self.subject, self._fence_subject)]
            )
            tail, marked = self._stored(read(last)), read(fence).get("message")
            if max(tail.seq, marked["seq"] if marked else 0) > state["last_seq"]:
                continue
            while tail.seq >= max(1, state["first_seq"]) and tail.message is None:
                before = tail.seq - 1  # behind our last one lies a stranger's
                tail = self._stored(read(await self.line.ask(self._get({"seq": before}))), before)
            number = int(base64.b64decode(marked["data"])) if marked else 0
            return End(wire, state["last_seq"], _tail(tail.message), tail.seq, number)

    async def _info(self) -> dict[str, Any]:
        """What the server says of the stream; one that is not there is empty."""
        answer = await self.line.api(f"STREAM.INFO.{self.name}", {"subjects_filter": self.subject})
        match error_code(answer):
            case None:
                return answer
            case code if code == NO_STREAM:
                return {"state": {"first_seq": 0, "last_seq": 0}}
        raise refused(answer, f"tell of {self}")

    async def make(self) -> None:
        """One that is there is left as it is: people may have settings of their own."""
        config = {
            "name": self.name,
            "description": f"shard {self.shard} of {self.topic}",
            "subjects": [self.subject, self._fence_subject],
            "retention": "limits",
            "storage": "file",
            "discard": "new",  # at a limit that somebody sets, nothing unread is lost
            "num_replicas": self._settings.replicas,
            "duplicate_window": round(self._settings.duplicate_window_s * 1e9),
            "allow_rollup_hdrs": True,
        }
        answer = await self.line.api(f"STREAM.CREATE.{self.name}", config)
        if error_code(answer) not in {None, OTHER_SETTINGS}:
            raise refused(answer, f"make {self}")
        self._is_made = True

    async def tell_shards(self, shards: int) -> None:
        """Note in how many shards the topic is published."""
        await self.make()
        config = (await self._info()).get("config") or {}
        metadata = config.get("metadata") or {}
        if metadata.get(SHARDS) == str(shards):
            return
        changed = config | {"metadata": metadata | {SHARDS: str(shards)}}
        answer = await self.line.api(f"STREAM.UPDATE.{self.name}", changed)
        if error_code(answer) is not None:
            raise refused(answer, f"note the shards of {self.topic!r}")

    async def told_shards(self) -> int | None:
        config = (await self._info()).get("config") or {}
        told = (config.get("metadata") or {}).get(SHARDS)
        return None if told is None else int(told)

    def _get(self, which: Mapping[str, Any]) -> Request:
        return api_request(f"STREAM.MSG.GET.{self.name}", which)

    def _from(self, seq: int) -> Request:
        """The first entry with this number or a higher one."""
        return self._get({"seq": seq, "next_by_subj": self.subject})

    def _stored(self, answer: Mapping[str, Any], seq: int = 0) -> _Stored:
        """What lies there; nothing at `seq` when it was deleted."""
        if error_code(answer) in {NO_MESSAGE, NO_STREAM}:
            return _Stored(seq, None)
        if error_code(answer) is not None:
            raise refused(answer, f"read {self}")
        found = answer["message"]
        if found["subject"] != self.subject:
            return _Stored(found["seq"], None)
        headers = events.headers_of(base64.b64decode(found.get("hdrs", "")))
        try:
            message = events.read(headers, base64.b64decode(found.get("data", "")))
        except NotAnEventError:
            return _Stored(found["seq"], None)
        return _Stored(found["seq"], message)

    async def _ids(self, first: int, last: int, end: End) -> dict[int, str]:
        """The ids at these positions, as far as they are there, and the very first one.

        Numbers of entries have gaps.
        """
        found: dict[int, str] = {}
        lowest = self._stored(read(await self.line.ask(self._from(1)))).message
        if lowest is not None:
            found[lowest.position] = lowest.id
        seq = await self._seq_of(first, end)
        while seq <= end.tail_seq:
            window = range(seq, min(seq + WINDOW, end.tail_seq + 1))
            answers = await self.line.ask_all([self._get({"seq": each}) for each in window])
            for answer in answers:
                message = self._stored(read(answer)).message
                if message is not None and message.position > last:
                    return found
                if message is not None:
                    found[message.position] = message.id
            seq = window.stop
        return found

    async def _seq_of(self, position: int, end: End) -> int:
        """The number of the first entry at this position or behind it."""
        low, high = 1, end.tail_seq
        while low < high:
            middle = (low + high) // 2
            there = self._stored(read(await self.line.ask(self._from(middle))))
            if there.message is None or there.message.position < position:
                low = max(middle, there.seq) + 1
            else:
                high = middle
        return low

    # --- how long it is ---------------------------------------------------------------------

    async def _full(self, batch: Batch, end: End) -> Full | None:
        """Make room, as far as everybody has read and acknowledged."""
        maxlen = self._settings.maxlen
        if maxlen is None or self._room > 0:
            return None
        length = self._length(await self._info())
        if length >= maxlen:
            length -= await self._trim(maxlen, end)
        if length >= 2 * maxlen:
            groups = await self.groups()
            slowest = max(groups, key=lambda g: (g.unread or 0) + g.pending, default=None)
            return Full(length, rules.why_full(batch, slowest))
        # Short of the target nothing can be trimmed. Beyond it, now and then is often enough.
        room = maxlen - length if length < maxlen else max(1, maxlen // 10)
        self._room = min(room, 2 * maxlen - length)
        return None

    async def tail(self) -> Tail:
        """Return the last event. Trim first if this object has published here."""
        maxlen = None if self._end is None else self._settings.maxlen
        end = await self.look()
        if maxlen is not None and self._length(await self._info()) > maxlen:
            await self._trim(maxlen, end)
        return end.tail

    async def trim(self, keep: int) -> None:
        await self._trim(keep, await self.look())

    async def _trim(self, maxlen: int, end: End) -> int:
        """Never the last one: it says where the stream ends."""
        done = [found["ack_floor"]["stream_seq"] for found in await self._consumers()]
        if not done:
            return 0
        before = min(min(done) + 1, end.tail_seq - maxlen + 1)
        if before <= 1:
            return 0
        which = {"filter": self.subject, "seq": before}
        answer = await self.line.api(f"STREAM.PURGE.{self.name}", which)
        if error_code(answer) is not None:
            raise refused(answer, f"trim {self}")
        return int(answer["purged"])

    def _length(self, info: Mapping[str, Any]) -> int:
        return int((info["state"].get("subjects") or {}).get(self.subject, 0))

    async def backlog(self) -> Backlog:
        end = await self.look()
        length = self._length(await self._info())
        groups = await self.groups()
        return Backlog(self.topic, self.shard, length, self._settings.maxlen, end.tail, groups)

    async def groups(self) -> list[GroupBacklog]:
        return [
            GroupBacklog(
                unquote(found["name"]),
                unread=found["num_pending"],
                pending=found["num_ack_pending"],
                oldest_pending_s=idle_s(found) if found["num_ack_pending"] else 0.0,
            )
            for found in await self._consumers()
        ]

    async def _consumers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            page = await self.line.api(f"CONSUMER.LIST.{self.name}", {"offset": len(found)})
            if error_code(page) == NO_STREAM:
                return found
            if error_code(page) is not None:
                raise refused(page, f"list the groups of {self}")
            found += page["consumers"]
            if not page["consumers"] or len(found) >= page["total"]:
                return found

    # --- groups -----------------------------------------------------------------------------

    async def join(self, group: str) -> None:
        """Make the group's consumer, unless it is there: it may be in the middle of its work."""
        await self.make()
        config = {
            "durable_name": token(group),
            "description": f"group {group} of {self.topic}, shard {self.shard}",
            "filter_subject": self.subject,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": round(ACK_WAIT_S * 1e9),
            "max_deliver": -1,
            "max_ack_pending": MOST_PENDING,
        }
        body = {"stream_name": self.name, "config": config, "action": "create"}
        if error_code(await self.consumer_info(group)) is None:
            return
        answer = await self.line.api(self.consumer_verb("DURABLE.CREATE", group), body)
        if error_code(answer) is not None and error_code(await self.consumer_info(group)):
            raise refused(answer, f"make the group {group!r} of {self}")

    async def leave(self, group: str) -> None:
        answer = await self.line.api(self.consumer_verb("DELETE", group))
        if error_code(answer) not in {None, NO_CONSUMER, NO_STREAM}:
            raise refused(answer, f"forget the group {group!r} of {self}")

    async def consumer_info(self, group: str) -> dict[str, Any]:
        return await self.line.api(self.consumer_verb("INFO", group))

    def consumer_verb(self, verb: str, group: str) -> str:
        return f"CONSUMER.{verb}.{self.name}.{token(group)}"

    def __str__(self) -> str:
        return f"shard {self.shard} of {self.topic!r}"


def _tail(message: Message | None) -> Tail:
    return Tail() if message is None else Tail(message.position, message.id)


def idle_s(info: Mapping[str, Any]) -> float:
    """For how long a consumer has been handed nothing, by the server's clock."""
    from datetime import datetime

    last, now = info["delivered"].get("last_active"), info.get("ts")
    if not last or not now:
        return 0.0
    past = datetime.fromisoformat(now) - datetime.fromisoformat(last)
    return max(0.0, past.total_seconds())


class _Appending:
    """Sends additions one behind the other; `end` and `added` follow what was taken."""

    def __init__(self, stream: Stream, end: End) -> None:
        self._stream = stream
        self.end = end
        self.added = 0

    async def all(self, additions: Iterable[Addition | Refused]) -> Receipt | None:
        """None when somebody else has written meanwhile."""
        coming = iter(additions)
        while window := list(islice(coming, WINDOW)):
            refused = window.pop() if isinstance(window[-1], Refused) else None
            receipt = await self._window([each for each in window if not isinstance(each, Refused)])
            if not isinstance(receipt, Taken):
                return receipt
            if isinstance(refused, Refused):
                return refused
        return Taken(self.added)

    async def _window(self, additions: Sequence[Addition]) -> Receipt | None:
        requests = [
            self._request(each, self.end.seq + i, additions[i - 1] if i else None)
            for i, each in enumerate(additions)
        ]
        answers = await self._stream.line.ask_all(requests)
        for i, ((message, _, _), answer) in enumerate(zip(additions, answers, strict=True)):
            said = read(answer)
            if error_code(said) is not None:
                return self._not_taken(message, said)
            if said.get("duplicate") or said["seq"] != self.end.seq + 1:
                # The server remembers its name, which proves nothing: it may have been deleted.
                return await self._nameless(additions[i:])
            self._took(message, said["seq"])
        return Taken(self.added)

    async def _nameless(self, additions: Sequence[Addition]) -> Receipt | None:
        """One by one: without a name only the number tells, and only to who has just read it."""
        for message, headers, body in additions:
            plain = {name: text for name, text in headers.items() if name != "Nats-Msg-Id"}
            request = self._request((message, plain, body), self.end.seq, None)
            said = read(await self._stream.line.ask(request))
            if error_code(said) is not None:
                return self._not_taken(message, said)
            if said["seq"] != self.end.seq + 1:
                return None
            self._took(message, said["seq"])
        return Taken(self.added)

    def _took(self, message: Message, seq: int) -> None:
        tail = Tail(message.position, message.id)
        self.added += 1
        self.end = End(self.end.wire, seq, tail, seq, self.end.fence)

    def _request(self, addition: Addition, seq: int, behind: Addition | None) -> Request:
        _, headers, body = addition
        expects = {"Nats-Expected-Last-Sequence": str(seq)}
        if behind is not None:
            expects["Nats-Expected-Last-Msg-Id"] = behind[1]["Nats-Msg-Id"]
        return Request(self._stream.subject, body, headers | expects)

    def _not_taken(self, message: Message, said: Mapping[str, Any]) -> Receipt | None:
        code, why = error_code(said), said["error"].get("description", "")
        if code in {WRONG_LAST_SEQUENCE, WRONG_LAST_NAME}:
            return None
        if code == TOO_LARGE:
            return Refused(message, f"NATS: {why}")
        if code in NO_ROOM:
            return Full(self.end.seq, f"NATS has no room for {self._stream}: {why}")
        raise refused(said, f"take messages for {self._stream}")
