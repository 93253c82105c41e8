"""The clients of rooms: a process of its own with raw sockets, as the crowd of the gateway's.

Whoever acts does so when it is time, whether or not the ones before were answered. What is read is
kept with the moment at which it was, and looked into when all is over, but for pings, which are
answered by and by.
"""

from __future__ import annotations

import bisect
import itertools
import random
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.http_load import FailedError
from bench.realtime_crowd import HEAD_END, STATUS, SWITCHING, Subscriber, Subscribers
from bench.rooms_dialects import PING, PONG, STAMP, Kind, frames, masked, said

# A server asks whether somebody is there every 20 s or so, and hangs up 20 s later.
TEND_S = 2.0

# What was sent last needs a moment to arrive.
SETTLE_S = 0.5


@dataclass
class Client(Subscriber):
    """One of them. `seat` is a `Place`."""

    step: int = 0
    seen: int = 0
    """How much of what was heard was looked into: for the next step, or for pings."""
    sent: list[int] = field(default_factory=list)

    @property
    def place(self) -> Any:
        return self.seat

    def admitted(self) -> float | None:
        heard, steps = self.heard, self.place.steps()
        if HEAD_END in heard and (status := int(STATUS.match(heard)[1])) != SWITCHING:  # type: ignore[index]
            raise FailedError(f"a client was answered {status}")
        marker, words = steps[self.step]
        found = heard.find(marker, self.seen)
        if found >= 0:
            self.seen = found + len(marker)
            self.step += 1
            if words:
                self.say(words)
            self.is_in = self.step == len(steps)
        return None

    def say(self, words: str) -> None:
        assert self.line is not None
        self.line.send(said(words))

    def listen(self) -> None:
        """Forget what was heard so far. Nothing is on its way."""
        self.chunks, self.sent, self.seen = [], [], 0

    def act(self, number: int) -> int:
        stamp = time.monotonic_ns()
        self.say(self.place.action(stamp, number))
        self.sent.append(stamp)
        return stamp

    def tend(self) -> None:
        """Say that somebody is here, if that was asked."""
        for opcode, content, end in frames(self.heard, self.seen):
            self.seen = end
            if self.line is None:
                return
            if opcode == PING:
                self.line.send(masked(PONG, content))
            elif (answer := self.place.answer(content)) is not None:
                self.say(answer)

    def told(self) -> Iterator[tuple[Kind, int, int]]:
        """Of each message about an action: its kind, its stamp, and when it was here."""
        ends = list(itertools.accumulate(len(chunk) for _, chunk in self.chunks))
        for _, content, end in frames(self.heard, 0):
            kind = self.place.kind(content)
            if kind != "other" and (stamp := STAMP.search(content)):
                yield kind, int(stamp[1]), self.chunks[bisect.bisect_left(ends, end)][0]


class Clients(Subscribers):
    """All of them."""

    kind = Client
    _all: list[Client]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self._tended = 0.0
        self._numbers = itertools.count(1)

    def read(self, wait_s: float) -> None:
        super().read(wait_s)
        now = time.monotonic()
        if now > self._tended + TEND_S:
            self._tended = now
            for client in self._all:
                if client.is_in:
                    client.tend()

    def listen(self) -> None:
        """Forget what was heard so far."""
        self.read(0.05)
        for client in self._all:
            client.tend()
            client.listen()

    def play(self, rate: float, seconds: float) -> float:
        """So many actions a second in all, at random moments; the rooms by turns, and in each its
        users by turns. By how much the crowd itself was late at most: seconds.
        """
        actors = self._in_turn()
        chance = random.Random(1)
        begin = time.monotonic()
        due, late_s = begin, 0.0
        while (due := due + chance.expovariate(rate)) < begin + seconds:
            while (wait_s := due - time.monotonic()) > 0:
                self.read(wait_s)
            late_s = max(late_s, time.monotonic() - due)
            next(actors).act(next(self._numbers))
            self.read(0.0)
        self._wait(SETTLE_S)
        return late_s

    def _in_turn(self) -> Iterator[Client]:
        rooms: defaultdict[str, list[Client]] = defaultdict(list)
        for client in self._all:
            if client.place.user:
                rooms[client.place.room].append(client)
        return itertools.cycle([users[n] for n in range(_least(rooms)) for users in rooms.values()])

    def act_each(self, every_s: float, actions: int) -> None:
        """The first who can acts, again and again."""
        actor = next(self._in_turn())
        begin = time.monotonic()
        for n in range(actions):
            self._wait(begin + n * every_s - time.monotonic())
            actor.act(next(self._numbers))
        self._wait(SETTLE_S)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (wait_s := until - time.monotonic()) > 0:
            self.read(wait_s)

    def told(self) -> tuple[bytes, bytes, bytes, dict[str, int]]:
        """In nanoseconds from sending: to the answer, to each update, and to the last update of
        each action; and what went wrong, by what it is.
        """
        results, each, last = array("q"), array("q"), array("q")
        wrong: Counter[str] = Counter()
        came: Counter[int] = Counter()
        latest: dict[int, int] = {}
        here = Counter(client.place.room for client in self._all)
        for client in self._all:
            answered = set()
            for kind, stamp, at in client.told():
                if kind == "update":
                    came[stamp] += 1
                    latest[stamp] = max(latest.get(stamp, 0), at)
                    each.append(at - stamp)
                elif kind == "refusal":
                    wrong["refused"] += 1
                else:
                    answered.add(stamp)
                    results.append(at - stamp)
            if answered and (missing := set(client.sent) - answered):
                wrong["not answered"] += len(missing)
        for client in self._all:
            for stamp in client.sent:
                if came[stamp] != here[client.place.room]:
                    wrong["not told to everybody once"] += 1
                else:
                    last.append(latest[stamp] - stamp)
        return results.tobytes(), each.tobytes(), last.tobytes(), dict(wrong)


def _least(rooms: dict[str, Sequence[Client]]) -> int:
    return min(map(len, rooms.values()))
