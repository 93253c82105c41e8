"""The gateways' log in a simulated world, and everything that was ever true of it.

Each entry that was ever there is a node, whose parents are all that stood before it. A failover
makes the log go back to an earlier node, and from there it may grow another branch: another
history. What a viewer is shown is held against this tree, which knows nothing of tags.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from router_world import Workers

from semel.bus.jobs import Event, event_of
from semel.bus.stages import STAGES
from semel.entries import Answer, Appended, Ended, Fenced, Position, beginning
from semel.stores.bells import Tower
from semel.stores.log_rules import Append
from semel.stores.memory_log import MemoryLog
from semel.testing.simulator import SimClock

Stages = dict[str, tuple[int, int]]
"""By stage, the attempt and the number that its state must have."""


class Node:
    """An entry in a history, or the beginning of all of a stream's."""

    def __init__(
        self, parent: Node | None = None, event: Event | None = None, op: Append | None = None
    ) -> None:
        self.parent = parent
        self.op = op
        self.event = event
        self.children: dict[str, Node] = {}
        self.offset = 0 if parent is None else parent.offset + 1
        self.stages: Stages = {} if parent is None else dict(parent.stages)
        self.ended = False
        if event is not None:
            told = event.attempt, event.seq
            self.stages[event.stage] = max(told, self.stages.get(event.stage, told))
            self.ended = STAGES.ends(event.stage)

    @property
    def id(self) -> str:
        return "" if self.event is None else self.event.id

    def line(self) -> Iterator[Node]:
        """It and all before it, but the beginning; the last one first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def __repr__(self) -> str:
        return f"{self.offset}({self.id})"


class Jobs(MemoryLog):
    """The gateways' log, and what must hold of every entry."""

    def __init__(self, world: Any) -> None:
        super().__init__(SimClock(world.loop), Tower())
        self.world = world
        self.roots: dict[str, Node] = defaultdict(Node)
        self.now: dict[str, Node] = {}
        """By stream, where its log ends."""
        self.places: dict[tuple[str, str], list[Node]] = defaultdict(list)
        """By stream and cursor, what that may stand for."""
        self.taken_back: set[tuple[str, str]] = set()
        """Streams and events that a failover has taken back, now or once."""
        self.refused: set[tuple[str, str]] = set()
        """Streams and events for which it was too late, in some history."""
        self.shaken: set[str] = set()
        """Streams of which anything was ever trimmed, or taken back."""
        self._copy: tuple[dict[str, Any], dict[str, Node]] | None = None

    def begin(self, stream: str) -> None:
        self.now[stream] = self.roots[stream]
        self.places[stream, str(beginning(stream))].append(self.roots[stream])

    async def perform(self, op: Append) -> Answer:
        answer = await self.accept(op)
        self.world.hit(type(answer).__name__)
        if isinstance(answer, Appended):
            self._check(op, answer.position)
        elif isinstance(answer, Ended) or (isinstance(answer, Fenced) and ":" not in answer.name):
            self.refused.add((op.stream, op.id))
        return answer

    async def accept(self, op: Append) -> Answer:
        return await super().perform(op)

    def _check(self, op: Append, position: Position) -> None:
        event = event_of(op.data or b"")
        before = self.now[op.stream]
        self.world.loop.note("appended", op.stream, event.id, str(position))
        if any(node.id == event.id for node in before.line()):
            self.world.wrong("an event is there twice")
        if before.ended:
            self.world.wrong("there is something behind the end")
        if before.stages.get(event.stage, (0, 0))[0] > event.attempt:
            self.world.wrong("an attempt that was given up still tells of its stage")
        node = before.children.get(event.id)
        if node is None:
            if before.children:
                self.world.hit("forked")
            node = before.children[event.id] = Node(before, event, op)
        else:
            self.world.hit("same_again")
        self.now[op.stream] = node
        self.places[op.stream, str(position)].append(node)
        self._check_state(op.stream, node)
        if self._streams[op.stream].row.floor.offset:
            self._trimmed(op.stream)

    def _trimmed(self, stream: str) -> None:
        self.shaken.add(stream)
        self.world.hit("trimmed")

    def _check_state(self, stream: str, node: Node) -> None:
        fields = self._streams[stream].fields
        held = {name: (f.rank >> 32, f.rank & 0xFFFFFFFF) for name, f in fields.items()}
        for name, least in node.stages.items():
            if held.get(name, (0, 0)) < least:
                self.world.wrong("the state has moved back")

    async def trim(self, stream: str, upto: int | Position) -> int:
        count = await super().trim(stream, upto)
        if count:
            self._trimmed(stream)
        return count

    # A failover.

    def keep_a_copy(self) -> None:
        self._copy = copy.deepcopy(self._streams), dict(self.now)

    def fail_over(self) -> list[list[Append]]:
        """To the copy that a replica has. What is gone with that, by stream, in order."""
        if self._copy is None:
            self.keep_a_copy()
            return []
        (self._streams, then), self._copy = self._copy, None
        return [
            self._go_back(name, then[name]) for name in self.now if self.now[name] != then[name]
        ]

    def _go_back(self, stream: str, to: Node) -> list[Append]:
        node, self.now[stream] = self.now[stream], to
        self.world.hit("taken_back")
        self.world.loop.note("taken back", stream, node, to)
        self.shaken.add(stream)
        kept = set(to.line())
        gone = [each for each in node.line() if each not in kept]
        self.taken_back |= {(stream, each.id) for each in gone}
        return [each.op for each in reversed(gone) if each.op is not None]


class Shards(Workers):
    """The workers' log, in which nothing is trimmed that was not routed."""

    async def trim(self, stream: str, upto: int | Position) -> int:
        found = self._streams.get(stream)
        before = [] if found is None else list(found.entries)
        count = await super().trim(stream, upto)
        for entry in before[:count]:
            event = event_of(entry.data)
            if not self.world.is_done(event.job_id, event.id):  # type: ignore[attr-defined]
                self.world.wrong("an event was trimmed that nobody has routed")
        return count
