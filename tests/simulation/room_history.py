"""The rooms' log in a simulated world, and everything that was ever true of it.

Each change that was ever made is a node with its state, whose parents are all that stood before
it. A failover makes the log go back to an earlier node, and from there it may grow another branch:
another history. What a client is told is held against this tree, which knows nothing of tags.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from room_table import CHIPS, CardTable, chips

from semel.entries import Answer, Appended, Position, Replace, beginning
from semel.rooms import Deadline
from semel.stores.bells import Tower
from semel.stores.log_rules import Append
from semel.stores.memory_log import MemoryLog
from semel.testing.simulator import SimClock

TABLE = CardTable()

ROOM = "table:room:"

NOTES = "table:timers"

TIMEOUT = "0::timeout:"

# How much sooner than at its deadline a turn may be timed out: nobody knows the store's clock
# better than by half of what a call takes.
SOONER_S = 0.15


class Node:
    """A change in a history, or the beginning of all of a room's."""

    def __init__(self, parent: Node | None, state: Any, position: Position, id: str = "") -> None:
        self.parent = parent
        self.state = state
        self.position = position
        self.id = id
        self.click = ""
        self.children: dict[tuple[str, str], Node] = {}
        self._views: dict[str | None, Any] = {}
        self.finished = None if parent is None else self._since(parent)
        """Where the result that is shown came to be; None where none is."""

    def _since(self, parent: Node) -> Node | None:
        members = (*TABLE.members(parent.state), *TABLE.members(self.state))
        shown = [user for user in (None, *members) if self.result(user) is not None]
        if any(self.result(user) != parent.result(user) for user in shown):
            return self
        return parent.finished if shown else None

    @property
    def offset(self) -> int:
        return self.position.offset

    def line(self) -> Iterator[Node]:
        """It and all before it, but the beginning; the last one first."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def has(self, id: str) -> bool:
        return any(node.id == id for node in self.line())

    @property
    def deadline(self) -> Deadline | None:
        return TABLE.deadline(self.state)

    def view(self, user: str | None) -> Any:
        viewer = user if user in TABLE.members(self.state) else None
        if viewer not in self._views:
            self._views[viewer] = json.loads(json.dumps(TABLE.view(self.state, viewer)))
        return self._views[viewer]

    def result(self, user: str | None) -> Any:
        viewer = user if user in TABLE.members(self.state) else None
        return TABLE.result(self.state, viewer)

    def __repr__(self) -> str:
        return f"{self.position}({self.id})"


class Tables(MemoryLog):
    """The log, and what must hold of every change."""

    def __init__(self, world: Any) -> None:
        super().__init__(SimClock(world.loop), Tower())
        self.world = world
        self.now: dict[str, Node] = {}
        """By room's stream, where its log ends."""
        self.places: dict[tuple[str, str], list[Node]] = defaultdict(list)
        """By stream and cursor, what that may stand for."""
        self.decided: dict[tuple[str, str], list[tuple[int, bytes]]] = defaultdict(list)
        """By stream and id, at which version it was decided on, and what was answered."""
        self.taken_back: set[tuple[str, str]] = set()
        """Streams and ids that a failover has taken back, now or once."""
        self.shaken: set[str] = set()
        """Streams of which anything was ever taken back."""
        self.is_armed = False
        """The next timeout will be taken back."""
        self.has_lost_notes = False
        """A turn may be noted nowhere, until somebody comes to its room."""
        self._cursors: dict[tuple[str, int], set[str]] = defaultdict(set)
        self._forgotten_us: dict[tuple[str, str], int] = {}
        self._copy: tuple[dict[str, Any], dict[str, Node], dict[Any, int]] | None = None

    def begin(self, stream: str) -> None:
        state = TABLE.begin(stream.removeprefix(ROOM))
        node = self.now[stream] = Node(None, state, beginning(stream))
        self.places[stream, str(node.position)].append(node)
        self._cursors[stream, 0].add(str(node.position))

    async def perform(self, op: Append) -> Answer:
        if self.is_armed and op.stream.startswith(ROOM) and op.id.startswith(TIMEOUT):
            self.is_armed = False
            self.keep_a_copy()
            self.world.fail_over_soon()
        answer = await self.accept(op)
        if op.stream.startswith(ROOM):
            self.world.hit(type(answer).__name__)
            if isinstance(answer, Appended):
                self._decided(op, answer.position)
        elif op.stream == NOTES:
            self._noted(op)
        return answer

    def _noted(self, op: Append) -> None:
        self.world.hit("noted")
        if any(entry.data == op.data for entry in list(self._streams[NOTES].entries)[:-1]):
            self.world.hit("note_renewed")

    async def trim(self, stream: str, upto: int | Position) -> int:
        count = await super().trim(stream, upto)
        if count and stream == NOTES:
            self.world.hit("notes_trimmed")
        return count

    async def accept(self, op: Append) -> Answer:
        return await super().perform(op)

    # --- what must hold of it -------------------------------------------------------------------

    def _decided(self, op: Append, position: Position) -> None:
        key, now_us = (op.stream, op.id), self._clock.now_us()
        if key in self.decided and key not in self.taken_back:
            if self._is_remembered(op, key, now_us):
                self.world.wrong(f"a request was decided on twice: {op.id}")
            self.world.hit("forgotten")
        self.decided[key].append((position.offset, op.reply))
        self._forgotten_us[key] = now_us + round(op.keep.ids_s * 1e6)
        if op.data is not None:
            self._changed(op, position)

    def _is_remembered(self, op: Append, key: tuple[str, str], now_us: int) -> bool:
        """An id is known for its time, and as long as its entry; a number is for ever."""
        if "#" in op.id:
            return any(node.id == op.id for node in self.now[op.stream].line())
        floor = self._streams[op.stream].row.floor.offset
        return now_us < self._forgotten_us[key] or self.decided[key][-1][0] > floor

    def _changed(self, op: Append, position: Position) -> None:
        assert isinstance(op.state, Replace)
        before, state = self.now[op.stream], json.loads(op.state.data.partition(b"\n")[0])
        self.world.loop.note("changed", op.stream, op.id, str(position))
        if not state["n"] == before.state["n"] + 1 == position.offset == before.offset + 1:
            self.world.wrong("a change was made to another version than the last")
        if chips(state) != CHIPS:
            self.world.wrong("chips were made, or are lost")
        if op.id.startswith(TIMEOUT):
            self._timed_out(op, before)
        else:
            self._acted(op, before, state)
        self._grow(op, position, before, state)

    def _acted(self, op: Append, before: Node, state: Any) -> None:
        user, click = op.id.split(":")[1], json.loads(op.reply)["reply"]["click"]
        if any(node.click == click and node.id != op.id for node in before.line()):
            self.world.wrong(f"a click was done twice, as two requests: {click}")
        did = {**before.state["did"], user: before.state["did"].get(user, 0) + 1}
        if state["did"] != did:
            self.world.wrong(f"what was done before is not in the state: {op.id}")
        if "#" in op.id:
            self._numbered(op, before)

    def _numbered(self, op: Append, before: Node) -> None:
        client, _, number = op.id.partition("#")
        for node in before.line():
            other, _, earlier = node.id.partition("#")
            if other == client and _whole(earlier) >= _whole(number):
                self.world.wrong(f"a number was done twice, or after a later one: {op.id}")
                return

    def _timed_out(self, op: Append, before: Node) -> None:
        self.world.hit("timeout")
        deadline, turn = before.deadline, op.id.removeprefix(TIMEOUT)
        if deadline is None or deadline.turn != turn:
            self.world.wrong(f"a turn was timed out that is over: {turn}")
        elif self._clock.now_us() / 1e6 < deadline.at_s - SOONER_S - self.world.doubt_s():
            sooner_s = deadline.at_s - self._clock.now_us() / 1e6
            self.world.wrong(f"a turn was timed out {sooner_s:.1f} s before its time: {turn}")

    def _grow(self, op: Append, position: Position, before: Node, state: Any) -> None:
        key = op.mark, json.dumps(state)
        node = before.children.get(key)
        if node is None:
            if before.children:
                self.world.hit("forked")
            node = before.children[key] = Node(before, state, position, op.id)
            node.click = (json.loads(op.reply)["reply"] or {}).get("click", "")
        self.now[op.stream] = node
        self.places[op.stream, str(position)].append(node)
        self._cursors[op.stream, position.offset].add(str(position))
        if self._streams[op.stream].row.floor.offset:
            self.world.hit("trimmed")

    def by_version(self, stream: str, version: int) -> list[tuple[str, list[Node]]]:
        """What that version was, in any history."""
        cursors = self._cursors[stream, version]
        return [(cursor, self.places[stream, cursor]) for cursor in sorted(cursors)]

    def overdue_s(self) -> float:
        """For how long a turn has been over that nobody has timed out."""
        now_s = self._clock.now_us() / 1e6
        found = [now_s - node.deadline.at_s for node in self.now.values() if node.deadline]
        return max(found, default=0.0)

    @property
    def is_quiet(self) -> bool:
        return all(node.deadline is None for node in self.now.values())

    # --- a failover -----------------------------------------------------------------------------

    def keep_a_copy(self) -> None:
        known = {key: len(decided) for key, decided in self.decided.items()}
        self._copy = copy.deepcopy(self._streams), dict(self.now), known

    def fail_over(self) -> None:
        """To the copy that a replica has."""
        if self._copy is None:
            self.keep_a_copy()
            return
        (streams, then, known) = self._copy
        self.has_lost_notes |= NOTES in self._streams
        self._streams = copy.deepcopy(streams)
        self.taken_back |= {
            key for key, decided in self.decided.items() if len(decided) > known.get(key, 0)
        }
        for stream, node in self.now.items():
            if node is not then[stream]:
                self.world.hit("taken_back")
                self.world.loop.note("taken back", stream, node, then[stream])
                self.taken_back |= {(stream, gone.id) for gone in _behind(node, then[stream])}
                self.shaken.add(stream)
        self.now = dict(then)


def _behind(node: Node, then: Node) -> list[Node]:
    kept = set(then.line())
    return [each for each in node.line() if each not in kept]


def _whole(number: str) -> int:
    digits = "".join(digit for digit in number if digit.isdigit())
    return int(digits or 0)
