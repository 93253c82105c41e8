"""Ways to tell how a job goes on that look right, each with one defect; all have to be found.

Many are how it is usually done: `XADD`, then `SETEX` of a marker, then `PUBLISH` to whoever listens
just then, and a browser that compares numbers.
"""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bus_history import Jobs, Shards
from bus_members import FeedHere, Plan

from semel.bus import Publisher
from semel.client.feed_rules import Follower, Update, parsed
from semel.entries import Answer, Appended, Field, FieldValue, Page, Position, Snapshot
from semel.errors import StoreUnavailableError
from semel.feed import Reset
from semel.feed.reader import Reader
from semel.feed.values import Burst
from semel.feed.window import Window
from semel.http.sse import frames
from semel.http.sse.view import Everything
from semel.stores import log_rules
from semel.stores.log_rules import Append, mark_of

# --- the log ------------------------------------------------------------------------------------


class MarksLater(Jobs):
    """The entry, and then its marker: at times something comes in between."""

    async def accept(self, op: Append) -> Answer:
        answer = await super().accept(op)
        if isinstance(answer, Appended) and self.world.chance.random() < 0.1:
            self._streams[op.stream].marks.pop(op.id, None)
        return answer


class ForgetsMarks(Jobs):
    """Markers expire while somebody may still send it again."""

    async def accept(self, op: Append) -> Answer:
        stream = self._streams.get(op.stream)
        if stream is not None:
            lately_us = self._clock.now_us() - 500_000 + log_rules.micros(op.keep.ids_s)
            stream.marks = {id: m for id, m in stream.marks.items() if m.until_us > lately_us}
        return await super().accept(op)


class KnowsByNumber(Jobs):
    """An event is known by its stage and number: the next attempt's is taken for a repeat."""

    async def accept(self, op: Append) -> Answer:
        return await super().accept(known_by(op, re.sub(r":\d+:", ":", op.id)))


class KnowsNoStage(Jobs):
    """An event is known by its attempt and number, whatever stage it is of."""

    async def accept(self, op: Append) -> Answer:
        return await super().accept(known_by(op, op.id.partition(":")[2]))


class KnowsNoIds(Jobs):
    """What is sent again is another event."""

    count = 0

    async def accept(self, op: Append) -> Answer:
        KnowsNoIds.count += 1
        return await super().accept(known_by(op, f"{op.id} {self.count}"))


def known_by(op: Append, id: str) -> Append:
    return replace(op, id=id, mark=mark_of(id, b""))


class HasNoRank(Jobs):
    """The state is what came last."""

    async def accept(self, op: Append) -> Answer:
        answer = await super().accept(op)
        if isinstance(answer, Appended) and isinstance(op.state, Field):
            state = FieldValue(op.state.rank, op.state.data)
            self._streams[op.stream].fields[op.state.name] = state
        return answer


class LetsEverybodyIn(Jobs):
    """Of two attempts at a stage, whoever comes is believed."""

    async def accept(self, op: Append) -> Answer:
        routers = {name: n for name, n in op.fences.items() if ":" in name}
        return await super().accept(replace(op, fences=routers))


class ComparesNumbers(Jobs):
    """A cursor is a number: 6 follows 5, whichever 5 that was."""

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        with as_ours(lambda row, after, _: row.floor.offset <= after.offset <= row.head.offset):
            return await super().read(stream, after, limit)


class KeepsAnEpoch(Jobs):
    """A cursor is a number and an epoch, which a replica has, too: it notices only who is ahead."""

    async def read(self, stream: str, after: Position | None = None, limit: int = 1000) -> Page:
        own = {position.tag for position in map(Position.parse, self._cursors(stream)) if position}
        epoch_is_ours = after is None or after.tag in own

        def is_ours(row: Any, after: Position, _: Any) -> bool:
            return epoch_is_ours and row.floor.offset <= after.offset <= row.head.offset

        with as_ours(is_ours):
            return await super().read(stream, after, limit)

    def _cursors(self, stream: str) -> list[str]:
        return [cursor for of, cursor in self.places if of == stream]


class TagsOneEntry(Jobs):
    """A tag is made of the entry alone: two histories may agree in it, and in nothing before."""

    async def accept(self, op: Append) -> Answer:
        before = log_rules.following
        log_rules.following = lambda head, mark: Position(head.offset + 1, mark[:12])
        try:
            return await super().accept(op)
        finally:
            log_rules.following = before


class as_ours:  # noqa: N801 - a context
    """The rule that says whether a log can go on from a cursor, for one call that never waits."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule

    def __enter__(self) -> None:
        self._before = log_rules.is_ours
        log_rules.is_ours = self._rule

    def __exit__(self, *_: object) -> None:
        log_rules.is_ours = self._before


class LosesTheState(Jobs):
    """The state expires while the stream goes on."""

    async def load(self, stream: str) -> Snapshot:
        snapshot = await super().load(stream)
        return replace(snapshot, fields={})


class TrimsUnread(Shards):
    """Keeps so many entries, whoever has not read the others."""

    async def perform(self, op: Append) -> Answer:
        answer = await super().perform(op)
        await Jobs.__mro__[1].trim(
            self, op.stream, max(0, self._streams[op.stream].row.head.offset - 2)
        )
        return answer


# --- the gateway --------------------------------------------------------------------------------


class HasNoNet(FeedHere):
    """Nobody looks unless a bell rings."""

    async def _look(self) -> None:
        pass


class ReadsFirst(HasNoNet):
    """Reads, then listens: what comes in between is heard of with the next one, if there is one."""

    @property
    def bell(self) -> Any:
        return _LateEars(super().bell)


class _LateEars:
    def __init__(self, bell: Any) -> None:
        self._bell = bell
        self.leave = bell.leave

    async def listen(self, stream: str, wake: Any) -> None:
        asyncio.get_running_loop().call_later(0.2, self._bell.listeners.add, stream, wake)


class TrustsTheRing(FeedHere):
    """What is shown came with a ring; what came while nobody listened is never asked for."""

    def __init__(self, world: Any, store: Any, encode: Any) -> None:
        super().__init__(world, store, encode)
        self._heard: set[tuple[str, Position]] = set()
        tower = world.gateways._tower
        bell, ring = self.bell, self.bell.ring

        def heard(stream: str) -> None:
            if world.chance.random() >= world.deafness:
                self._heard.add((stream, world.gateways._streams[stream].row.head))
            ring(stream)

        bell.ring = heard
        tower.add(bell)

    async def read(self, stream: str, after: Position, limit: int = 256) -> Page:
        page = await super().read(stream, after, limit)
        heard = [e for e in page.entries if (stream, e.position) in self._heard]
        return page if len(heard) == len(page.entries) else replace(page, entries=heard)


class TellsNewcomers(FeedHere):
    """Of a hole, those who were here before it are not told."""

    def follow(self, *how: Any) -> Any:
        following = super().follow(*how)
        following.reader.__class__ = _Quiet
        return following


class _Quiet(Reader):
    async def _lost(self, page: Page) -> bool:
        before = self.generation
        try:
            return await super()._lost(page)
        finally:
            self.generation = before


class PassesHolesOver(FeedHere):
    """Where the log cannot go on from a cursor, it goes on from what there is."""

    async def read(self, stream: str, after: Position, limit: int = 256) -> Page:
        page = await super().read(stream, after, limit)
        if not page.lost:
            return page
        return replace(page, lost=False, entries=())


class ReadsStateApart(FeedHere):
    """The state, and then where it stands."""

    async def _load(self, stream: str) -> Snapshot:
        snapshot = await super()._load(stream)
        (head,) = await self.log.heads([stream])
        return replace(snapshot, position=head)


def hello_anyway(head: Position, cursor: Position | None, retry_ms: int) -> bytes:
    """Says from where it will go on, before it has said that there is a hole."""
    return HELLO(head, cursor or head, retry_ms)


def burst_of_the_newest(self: Window, offset: int) -> Burst:
    """Whoever is behind is sent what is newest, and the rest is left out."""
    found = BURST(self, offset)
    if len(found.entries) < 3:
        return found
    return Burst(found.entries[-1:], found.position, self._kept[-1].frame)


HELLO, BURST = frames.hello, Window.burst


class ResetsByNumber(Everything):
    """What was made for one job is shown to whoever is at the same number of another."""

    def reset(self, reset: Reset) -> bytes:
        asked = reset.reason, str(reset.snapshot.position.offset)
        if asked not in self._resets:
            self._resets[asked] = super().reset(reset)
        return self._resets[asked]


# --- the client ---------------------------------------------------------------------------------


class MovesWithTheId(Follower):
    """The cursor moves with the id, and not with the event that this belongs to."""

    def closed(self, now_s: float) -> None:
        self.position = parsed(self._frames._id) or self.position
        super().closed(now_s)


class TakesWhatIsLarger(Follower):
    """A larger number is news, whatever is missing before it."""

    def _message(self, frame: Any, position: Any, now_s: float) -> Update | None:
        if self.position is not None and position.offset > self.position.offset:
            self.position = Position(position.offset - 1, position.tag)
        return super()._message(frame, position, now_s)


class TakesWhatComes(Follower):
    """A connection does not repeat itself, and what a box in between does is not its business."""

    def _message(self, frame: Any, position: Any, now_s: float) -> Update | None:
        if self.position is not None and position.offset <= self.position.offset:
            self.position = Position(position.offset - 1, position.tag)
        return super()._message(frame, position, now_s)


class BelievesSilence(Follower):
    """What the server says of its end is nothing to it: what is missing comes with the next one."""

    def _is_behind(self) -> bool:
        return False


class KeepsItsState(Follower):
    """A reset is for those who have nothing yet."""

    def _reset(self, frame: Any, position: Any) -> Any:
        return super()._reset(frame, position) if self.position is None else None


class BelievesTheEnd(Follower):
    """It is over when it is said to be, whatever has not come."""

    def _end(self, frame: Any, position: Any, now_s: float) -> None:
        self.stop()


# --- the publisher ------------------------------------------------------------------------------


class TakesAnOutageForSuccess(Publisher):
    """No answer is not yet an append."""

    async def publish(self, *what: Any) -> bool:
        try:
            return await super().publish(*what)
        except StoreUnavailableError:
            return True


# --- all of them --------------------------------------------------------------------------------

PLANTS = {
    "the marker is written after the entry": Plan(jobs=MarksLater, routed=False),
    "markers expire too early": Plan(jobs=ForgetsMarks, routed=False),
    "an event is known by its number": Plan(jobs=KnowsByNumber, routed=False),
    "an event is known without its stage": Plan(jobs=KnowsNoStage, routed=False),
    "what is sent again is another event": Plan(jobs=KnowsNoIds),
    "the state has no rank": Plan(jobs=HasNoRank),
    "no answer is taken for success": Plan(publisher=TakesAnOutageForSuccess),
    "a former attempt is let in": Plan(jobs=LetsEverybodyIn, routed=False),
    "cursors are numbers": Plan(jobs=ComparesNumbers),
    "cursors have an epoch": Plan(jobs=KeepsAnEpoch, faults=("failover", "rings")),
    "a tag is of one entry": Plan(jobs=TagsOneEntry, faults=("failover", "rings")),
    "the state expires": Plan(jobs=LosesTheState),
    "what is unread is trimmed": Plan(workers=TrimsUnread, routed=True),
    "there is no net": Plan(feed=HasNoNet),
    "read, then listen": Plan(feed=ReadsFirst, sound=HasNoNet, faults=("crash", "stop", "weather")),
    "the ring is the truth": Plan(feed=TrustsTheRing),
    "a hole is passed over": Plan(feed=PassesHolesOver),
    "state and position are read apart": Plan(feed=ReadsStateApart),
    "only newcomers are told of a hole": Plan(feed=TellsNewcomers, faults=("failover", "rings")),
    "the hello passes a hole": Plan(
        patches=((frames, "hello", hello_anyway),), faults=("cut", "odd", "reload")
    ),
    "the slow are sent the newest": Plan(patches=((Window, "burst", burst_of_the_newest),)),
    "resets are kept by number": Plan(everything=ResetsByNumber, faults=("trim", "small")),
    "the cursor moves before the blank line": Plan(follower=MovesWithTheId, faults=("cut",)),
    "a gap is shown": Plan(follower=TakesWhatIsLarger, faults=("boxes",)),
    "a repeat is shown": Plan(follower=TakesWhatComes, faults=("boxes",)),
    "silence is believed": Plan(follower=BelievesSilence, faults=("boxes",)),
    "a reset is not heeded": Plan(follower=KeepsItsState),
    "the end is believed": Plan(follower=BelievesTheEnd, faults=("boxes",)),
}
