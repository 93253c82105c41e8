"""Random histories of a log, and the log on paper that says what each move is answered.

The model is written apart from the stores' own rules on purpose: two descriptions of one behaviour.
Of tags it knows only that two positions are the same when all that was appended up to them is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from semel.entries import (
    Appended,
    Ended,
    Fenced,
    Field,
    FieldValue,
    Full,
    Keep,
    Life,
    Mismatch,
    Position,
    Repeated,
    Replace,
    StateChange,
    VersionConflict,
    beginning,
)

# Seconds. Ages are tens, durations end in five: a store whose own clock runs on while a history is
# played, for less than five seconds, answers the same.
AGES = (50.0, 110.0, 210.0)
KEEPS = (
    Keep(),
    Keep(ids_s=105.0, ended_s=205.0),
    Keep(ids_s=205.0, ended_s=105.0),
    Keep(entries=2, ids_s=105.0, ended_s=105.0),
    Keep(full=2, ids_s=105.0, ended_s=105.0),
    Keep(ids_s=205.0, ended_s=105.0, idle_s=155.0),
)


@dataclass(frozen=True)
class LogMove:
    """One step of a random history. `place`: which of the positions seen so far, from the end.

    `expects_place`: an append expects that one, whatever `expect` says.
    """

    verb: str
    stream: int = 0
    id: str = "a"
    data: bytes | None = b""
    fences: tuple[tuple[str, int], ...] = ()
    expect: int | None = None
    state: StateChange | None = None
    reply: bytes = b""
    ends: bool = False
    keep: Keep = KEEPS[0]
    rising: tuple[tuple[str, int], ...] = ()
    expects_place: bool = False
    place: int = 0
    limit: int = 1000
    seconds: float = 0.0


# How often each comes. Mostly what is taken: a refusal leaves nothing to be read.
VERBS = ("append",) * 9 + ("read", "read", "read", "age", "trim", "trim to", "sweep")
IDS = "aabbcdefghijklmn"
DATAS = (b"x", b"x", b"x", b"x", b"y", b"", None)
FENCES: tuple[tuple[tuple[str, int], ...], ...] = ((), (), *((("p", n),) for n in range(3)))
RISING: tuple[tuple[tuple[str, int], ...], ...] = ((),) * 6 + tuple(
    ((name, n),) for name in "pq" for n in range(3)
)
VERSIONS = (None,) * 9 + (0, 1, 2)
STATES = (None, Replace(b"1"), *(Field("f", n, b"%d" % n) for n in range(3)), Field("g", 1, b"g"))


def moves_of_a_log() -> st.SearchStrategy[LogMove]:
    stream, place = st.sampled_from((0, 0, 0, 1)), st.integers(0, 6)
    limit = st.sampled_from((1, 1000))
    append = st.builds(
        LogMove,
        st.just("append"),
        stream,
        st.sampled_from(IDS),
        st.sampled_from(DATAS),
        st.sampled_from(FENCES),
        st.sampled_from(VERSIONS),
        st.sampled_from(STATES),
        st.sampled_from((b"", b"r")),
        st.sampled_from((False,) * 11 + (True,)),
        st.sampled_from(KEEPS),
        st.sampled_from(RISING),
        st.sampled_from((False,) * 7 + (True,)),
        st.sampled_from((0, 0, 0, 1, 2)),
    )
    moves = {
        "append": append,
        "read": st.builds(LogMove, st.just("read"), stream, place=place, limit=limit),
        "age": st.builds(LogMove, st.just("age"), seconds=st.sampled_from(AGES)),
    }
    for verb in ("trim", "trim to", "sweep"):
        moves[verb] = st.builds(LogMove, st.just(verb), stream, place=place)
    return st.sampled_from(VERBS).flatmap(moves.__getitem__)


@dataclass
class Told:
    """What was answered for an id: its payload, position and reply, and till when it counts."""

    mark: bytes
    position: Position
    reply: bytes
    until: float


@dataclass
class Paper:
    """One stream on paper. `line[n]` is the position at offset n."""

    line: list[Position]
    appended: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    floor: int = 0
    told: dict[str, Told] = field(default_factory=dict[str, Told])
    fences: dict[str, int] = field(default_factory=dict[str, int])
    state: bytes | None = None
    fields: dict[str, FieldValue] = field(default_factory=dict[str, FieldValue])
    ended: bool = False
    gone: float | None = None
    over: float | None = None

    @property
    def head(self) -> Position:
        return self.line[-1]


class LogModel:
    """The log on paper."""

    def __init__(self, prefix: str) -> None:
        self.names = [f"{prefix}0", f"{prefix}1"]
        self.time = 0.0
        self.papers: dict[str, Paper] = {}
        self.seen: list[Position] = [beginning(name) for name in self.names]
        self.histories: dict[object, Position] = {}

    def paper(self, stream: str) -> Paper | None:
        paper = self.papers.get(stream)
        if paper is not None and paper.over is not None and paper.over <= self.time:
            del self.papers[stream]
            return None
        return paper

    def life(self, stream: str) -> Life:
        paper = self.paper(stream)
        if paper is None:
            return "unknown"
        if paper.gone is not None and paper.gone <= self.time:
            return "gone"
        return "ended" if paper.ended else "open"

    def refusal(self, stream: str, move: LogMove) -> object | None:
        """What is answered when nothing is taken; None when it is."""
        paper = self.paper(stream) or Paper([beginning(stream)])
        told = paper.told.get(move.id)
        if told is not None and (told.until > self.time or told.position.offset > paper.floor):
            same = told.mark == (move.data or b"")
            return Repeated(told.position, told.reply) if same else Mismatch("fingerprint")
        for name, number in {**dict(move.fences), **dict(move.rising)}.items():
            least = paper.fences.get(name, -1) + (name in dict(move.rising))
            if name in paper.fences and number < least:
                return Fenced(name, paper.fences[name])
        if paper.ended:
            return Ended(paper.head)
        expect = self.expected(move)
        if isinstance(expect, Position):
            if expect != paper.head:
                return VersionConflict(paper.head)
        elif expect is not None and expect != paper.head.offset:
            return VersionConflict(paper.head)
        length = paper.head.offset - paper.floor
        if move.data is not None and move.keep.full is not None and length >= move.keep.full:
            return Full(length)
        return None

    def place(self, move: LogMove) -> Position | None:
        return [None, *self.seen][-1 - move.place % (len(self.seen) + 1)]

    def expected(self, move: LogMove) -> int | Position | None:
        return self.place(move) if move.expects_place else move.expect

    def take(self, stream: str, move: LogMove, position: Position) -> None:
        """Write down what was taken, at the position that the log says."""
        paper = self.paper(stream)
        if paper is None:
            paper = self.papers[stream] = Paper([beginning(stream)])
        if move.data is None:
            assert position == paper.head
        else:
            paper.appended.append((move.id, move.data))
            self._place(stream, paper, position)
        until = self.time + move.keep.ids_s
        paper.told[move.id] = Told(move.data or b"", position, move.reply, until)
        paper.fences.update(move.fences)
        paper.fences.update(move.rising)
        self._change(paper, move.state)
        self._keep(paper, move)

    def _place(self, stream: str, paper: Paper, position: Position) -> None:
        assert position.offset == len(paper.line)
        history = (stream, *paper.appended)
        assert self.histories.setdefault(history, position) == position
        assert list(self.histories.values()).count(position) == 1
        paper.line.append(position)
        self.seen.append(position)

    def _change(self, paper: Paper, state: StateChange | None) -> None:
        if isinstance(state, Replace):
            paper.state = state.data
        elif state is not None:
            held = paper.fields.get(state.name)
            if held is None or held.rank < state.rank:
                paper.fields[state.name] = FieldValue(state.rank, state.data)

    def _keep(self, paper: Paper, move: LogMove) -> None:
        keep, paper.ended = move.keep, move.ends
        paper.over = None if keep.idle_s is None else self.time + keep.idle_s
        if move.ends:
            paper.gone = self.time + keep.ended_s
            paper.over = self.time + max(keep.ended_s, keep.ids_s)
        if keep.entries is not None:
            paper.floor = max(paper.floor, paper.head.offset - keep.entries)

    def trim(self, stream: str, upto: int | Position) -> int:
        paper = self.paper(stream)
        if paper is None or self.life(stream) == "gone":
            return 0
        if isinstance(upto, Position):
            if upto not in paper.line[paper.floor :]:
                return 0
            upto = upto.offset
        before = paper.floor
        paper.floor = max(before, min(upto, paper.head.offset))
        return paper.floor - before

    def page(self, stream: str, after: Position | None, limit: int) -> tuple[Any, ...]:
        paper, life = self.paper(stream), self.life(stream)
        behind = after or beginning(stream)
        if paper is None:
            return [], beginning(stream), behind != beginning(stream), life, None
        if life == "gone":
            return [], paper.head, behind != paper.head, life, paper.head
        floor = paper.line[paper.floor] if paper.floor else None
        if behind not in paper.line[paper.floor :]:
            return [], paper.head, True, life, floor
        entries = [
            (position, id, data)
            for position, (id, data) in zip(paper.line[1:], paper.appended, strict=True)
            if position.offset > behind.offset
        ]
        return entries[:limit], paper.head, False, life, floor

    def snapshot(self, stream: str) -> tuple[Position, Life, bytes | None, Mapping[str, Any]]:
        paper, life = self.paper(stream), self.life(stream)
        if paper is None:
            return beginning(stream), life, None, {}
        if life == "gone":
            return paper.head, life, None, {}
        return paper.head, life, paper.state, paper.fields


async def make_move(contract: Any, store: Any, log: Any, model: LogModel, move: LogMove) -> None:
    stream = model.names[move.stream]
    place = model.place(move)
    if move.verb == "age":
        await contract.age(store, move.seconds)
        model.time += move.seconds
    elif move.verb == "sweep":
        await log.sweep()
    elif move.verb.startswith("trim"):
        upto = move.place if move.verb == "trim" or place is None else place
        assert await log.trim(stream, upto) == model.trim(stream, upto)
    elif move.verb == "read":
        await _read(log, model, stream, place, move.limit)
    else:
        await _append(log, model, stream, move)
    await _compare(log, model)


async def _append(log: Any, model: LogModel, stream: str, move: LogMove) -> None:
    expected = model.refusal(stream, move)
    answer = await log.append(
        stream,
        move.data,
        id=move.id,
        fences=dict(move.fences),
        rising=dict(move.rising),
        expect=model.expected(move),
        state=move.state,
        reply=move.reply,
        ends=move.ends,
        keep=move.keep,
    )
    if expected is not None:
        assert answer == expected
        return
    assert isinstance(answer, Appended), answer
    assert answer.reply == move.reply
    model.take(stream, move, answer.position)


async def _read(log: Any, model: LogModel, stream: str, after: Position | None, limit: int) -> None:
    page = await log.read(stream, after, limit)
    entries = [(e.position, e.id, e.data) for e in page.entries]
    found = entries, page.head, page.lost, page.life, page.floor
    assert found == model.page(stream, after, limit)


async def _compare(log: Any, model: LogModel) -> None:
    """Nothing else has changed, whatever the move was."""
    snapshots = [model.snapshot(stream) for stream in model.names]
    assert list(await log.heads(model.names)) == [head for head, *_ in snapshots]
    for stream, expected in zip(model.names, snapshots, strict=True):
        found = await log.load(stream)
        assert (found.position, found.life, found.state, dict(found.fields)) == expected
