"""What an action costs at a table with rules worth the name: `examples/poker_table`, six players.

Hands are played to the end, by whoever's turn it is, one action after another. The rules' part is
timed where they are asked: what an action comes to, and what each of the seven views shows (six
players', and everybody else's), twice where a hand is finished. The rest is ours and the store's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from bench.machine import ROOT
from bench.realtime_servers import Missing
from semel.rooms import Rooms

EXAMPLE = ROOT / "examples" / "poker_table"
PLAYERS = 6
TABLE = "table-1"
FIRST_HANDS = 3  # not counted
RULES = ("apply", "view", "result")


@dataclass
class Cost:
    """Of each action: microseconds, in all and of its parts, and bytes."""

    act: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {m: [] for m in RULES})
    state_bytes: int = 0
    entry_bytes: list[int] = field(default_factory=list)

    def median(self, part: str = "") -> float:
        return statistics.median(self.parts[part] if part else self.act)

    @property
    def entry_median(self) -> float:
        return statistics.median(self.entry_bytes)


class Watch:
    """How long the rules were asked for, by method, since the last look."""

    def __init__(self) -> None:
        self._spent: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, method: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._spent[method] += time.perf_counter() - began

    def look(self) -> dict[str, float]:
        found, self._spent = dict(self._spent), defaultdict(float)
        return found


def timed(room: Any, watch: Watch) -> Any:
    """The room, with a watch beside its rules."""

    def beside(method: str) -> Callable[..., Any]:
        rule = getattr(room, method)

        def asked(*words: Any) -> Any:
            with watch.on(method):
                return rule(*words)

        return asked

    for method in RULES:
        setattr(room, method, beside(method))
    return room


def table() -> Any:
    if not (EXAMPLE / "table.py").exists() or find_spec("pokerkit") is None:
        raise Missing("the poker table needs examples/poker_table, and pokerkit")
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    from table import PokerTable

    return PokerTable()


class Play:
    """Somebody who plays for everybody."""

    def __init__(self, rooms: Rooms, watch: Watch, cost: Cost) -> None:
        self._rooms = rooms
        self._watch = watch
        self._cost = cost
        self._number = 0

    async def act(self, user: str, name: str, *, counts: bool, **more: Any) -> None:
        self._number += 1
        self._watch.look()
        began = time.perf_counter()
        action = {"actionType": name, **more}
        reply = await self._rooms.act(TABLE, user, f"client-{self._number:013d}", action)
        took = time.perf_counter() - began
        if not reply.success:
            raise RuntimeError(f"{name} of {user} was answered {reply}")
        if counts:
            spent = self._watch.look()
            self._cost.act.append(took * 1e6)
            for method in RULES:
                self._cost.parts[method].append(spent.get(method, 0.0) * 1e6)

    async def sit(self) -> None:
        for seat in range(PLAYERS):
            await self.act(f"user-{seat}", "sit", counts=False, seat=seat, buyIn=4000)

    async def hand(self, *, counts: bool) -> None:
        """From the deal to the last card. Everybody stays in, so that nobody is ever broke."""
        await self.act("user-0", "deal", counts=counts)
        while (shown := (await self._rooms.standing(TABLE)).view(None))["actor"] is not None:
            name = "call" if shown["can"]["call"] else "check"
            await self.act(shown["actor"], name, counts=counts)


async def run(url: str, hands: int) -> Cost:
    cost, watch = Cost(), Watch()
    async with Rooms(url, timed(table(), watch), name="poker") as rooms:
        play = Play(rooms, watch, cost)
        await play.sit()
        for n in range(FIRST_HANDS + hands):
            await play.hand(counts=n >= FIRST_HANDS)
        stream = rooms.stream_of(TABLE)
        snapshot, page = await rooms.log.load(stream), await rooms.log.read(stream)
        if page.lost and page.floor is not None:  # the first hands are gone by now
            page = await rooms.log.read(stream, page.floor)
    cost.state_bytes = len(snapshot.state or b"")
    cost.entry_bytes = [len(entry.data) for entry in page.entries]
    return cost
