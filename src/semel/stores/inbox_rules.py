"""What an inbox decides, pure: what it knows and a message go in, what is to be done comes out.

For each consumer a sequence has a `Mark`: the last number that had its effect, and the first one
that waits. All that is kept about a sequence changes together with its mark, and a mark is only
changed by whoever read its last `turn`. So of two that work on the same sequence, one of them
frozen and forgotten, only one is heard; the other one reads again.

A message without a number is a sequence of its own, with its id for a mark.

The easy mistake is to keep a message for later without touching the mark: whoever takes the last
one that waits at this moment leaves it behind, and nobody ever comes back for it.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal, NoReturn

from semel.errors import (
    BrokerUnavailableError,
    CorruptRecordError,
    SemelError,
    SettingsError,
    StoreUnavailableError,
    said_by,
)
from semel.keys import identity
from semel.messages import (
    Applied,
    Audit,
    Edit,
    Ending,
    Held,
    Message,
    ParkedMessage,
    Replay,
    Seen,
    Settled,
    Settlement,
    Skip,
    Why,
)
from semel.values import value

RETENTION_S = 7 * 86_400.0

# What is kept of an error's text: enough for people, whatever a driver puts into it.
ERROR_CHARS = 4000

# Messages that one call of `retry` runs at most, so that whoever calls it can stop in between.
MOST_RETRIED = 1000


# --- who is who ---------------------------------------------------------------------------------


def is_ordered(message: Message) -> bool:
    """Numbers begin at 1; whoever begins lower is remembered by id, like one without a number."""
    return message.seq is not None and message.seq > 0


def number_of(message: Message) -> int:
    """Its number in its sequence; 0 for one that is alone."""
    return message.seq if message.seq is not None and message.seq > 0 else 0


def sequence_of(consumer: str, message: Message) -> tuple[bytes, int]:
    """The identity of the message's sequence for this consumer, and the slot it is in."""
    m = message
    found = _sequence(consumer, m.tenant, m.topic, m.aggregate_type, m.aggregate_id)
    return found if m.seq is not None and m.seq > 0 else (message_of(consumer, m), found[1])


def message_of(consumer: str, message: Message) -> bytes:
    """The identity of the message itself for this consumer."""
    m = message
    return identity(consumer, b"message", _bytes(m.tenant), _bytes(m.topic), _bytes(m.id))


@lru_cache(maxsize=16_384)
def _sequence(consumer: str, tenant: str, *names: str) -> tuple[bytes, int]:
    aggregate = identity(tenant, *map(_bytes, names))
    return identity(consumer, b"sequence", aggregate), aggregate[0]


def baseline_of(consumer: str, topic: str) -> bytes:
    """The identity of what `baseline` says."""
    return identity(consumer, b"baseline", _bytes(topic))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- failing ------------------------------------------------------------------------------------


class PoisonError(SemelError):
    """Raised by a handler: trying this message again is of no use. It is parked at once.

    An exception of your own says the same with an attribute `poison = True`.
    """

    poison = True


@value
class Failure:
    """Why a message has not had its effect; `delay_s` until the next try, None: people decide."""

    why: Literal["retry", "poison", "crash"]
    error: str
    attempts: int
    delay_s: float | None = None


@value
class Retry:
    """How often a message that fails is tried, and how long after.

    The first time after `first_s`, then `factor` times as long each time, never more than `most_s`,
    and up to `jitter` of that on top, so that what failed together does not return together. After
    `attempts` failures it is parked. So is one that ended the process `crashes` times.
    """

    attempts: int = 5
    first_s: float = 1.0
    factor: float = 2.0
    most_s: float = 300.0
    jitter: float = 0.1
    crashes: int = 3

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.crashes < 1:
            raise SettingsError("a message is tried at least once: attempts and crashes are from 1")
        if not (self.first_s >= 0 and self.factor >= 1 and self.most_s >= 0 and self.jitter >= 0):
            raise SettingsError(
                "a pause is not negative and does not shrink: first_s, most_s and jitter are from "
                "0, factor is from 1"
            )

    def failed(self, error: BaseException, attempts: int) -> Failure:
        """The failure, when this was the last of so many attempts."""
        told = told_of(error)
        if attempts >= self.attempts or _is_poison(error):
            return Failure("poison", told, attempts)
        return Failure("retry", told, attempts, self.delay_s(attempts))

    def crashed(self) -> Failure:
        told = f"it was begun {self.crashes} times, and each time the process ended while it ran"
        return Failure("crash", told, self.crashes)

    def delay_s(self, attempts: int) -> float:
        try:
            pause = min(self.most_s, self.first_s * self.factor ** (attempts - 1))
        except OverflowError:
            pause = self.most_s
        return pause * (1 + random.uniform(0, self.jitter))  # noqa: S311 - nobody gains by guessing


def told_of(error: BaseException) -> str:
    """An error for people: what it is, what it says, and where it comes from."""
    name, said = type(error).__name__, said_by(error)
    text = name if said == name else f"{name}: {said}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return text[: ERROR_CHARS - len(where)] + where


def _is_poison(error: BaseException) -> bool:
    try:
        return getattr(error, "poison", False) is True
    except Exception:  # noqa: BLE001 - it does not say so
        return False


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it says it comes from, and so on. One that comes from itself ends it."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__


def is_outage(error: BaseException | None) -> bool:
    """Is this, or what it says it comes from, no fault of the message?"""
    for each in causes_of(error):
        if isinstance(each, CorruptRecordError):
            return False
        if isinstance(each, StoreUnavailableError | BrokerUnavailableError):
            return True
    return False


def outage(message: Message, error: BaseException) -> StoreUnavailableError:
    """What an inbox raises when a handler met one."""
    return StoreUnavailableError(
        f"event {message.id} ({message.type}) met an outage, and waits for its end: "
        f"{said_by(error)}"
    )


# --- a batch ------------------------------------------------------------------------------------


@value
class Mark:
    """How far a sequence is: the last number that had its effect, the first that waits.

    `turn` counts the changes; 0: nothing is stored yet.
    """

    seq: int = 0
    head: int | None = None
    turn: int = 0


@value
class Known:
    """What an inbox knows before a batch, of the sequences in it.

    `seen` and `waits` are about messages without a number. `baselines` are topics.
    """

    marks: Mapping[bytes, Mark]
    seen: Container[bytes] = ()
    waits: Container[bytes] = ()
    baselines: Container[str] = ()


@value
class Parking:
    """A message to be kept; `delay_s` after which it is due, None: not by time."""

    sequence: bytes
    slot: int
    message: Message
    why: Why
    attempts: int = 0
    error: str = ""
    delay_s: float | None = None

    @property
    def state(self) -> Literal["waiting", "parked"]:
        return "parked" if self.why in {"poison", "crash"} else "waiting"


class Course:
    """A batch on its way through an inbox: which of it is to run, and what is to be kept after.

    Asked about each message in order, and told how each that ran has ended.
    """

    def __init__(self, consumer: str, known: Known) -> None:
        self.consumer = consumer
        self._known = known
        self._marks: dict[bytes, Mark] = {}
        self._changed: dict[bytes, Message] = {}
        self._waits: set[bytes] = set()
        self._last: tuple[Message | None, tuple[bytes, int]] = None, (b"", 0)
        self.seen: dict[bytes, Message] = {}
        """Messages without a number that had their effect, by identity."""
        self.parked: list[Parking] = []
        """What is to be kept; what is there already is left as it is."""
        self.woken: set[tuple[bytes, int]] = set()
        """Sequence and number of what waits, and may run now. After `parked` is kept."""

    @property
    def marks(self) -> list[tuple[bytes, Message, Mark]]:
        """The marks that changed, each with its next turn and a message of its sequence."""
        changed = [(id, message, self._marks[id]) for id, message in self._changed.items()]
        return [(id, message, Mark(m.seq, m.head, m.turn + 1)) for id, message, m in changed]

    def ask(self, message: Message) -> Ending | None:
        """How the message ends without running; None: run it."""
        id, slot = found = sequence_of(self.consumer, message)
        self._last = message, found
        if (seq := number_of(message)) == 0:
            return self._ask_alone(id)
        mark = self._mark(id, message)
        if seq <= mark.seq:
            return Seen()
        if seq == mark.head:
            return Held("behind")  # it is there already
        if mark.head is not None and seq > mark.head:
            return self._hold(id, Parking(id, slot, message, "behind"), mark.head)
        if seq == mark.seq + 1:
            return None
        return self._hold(id, Parking(id, slot, message, "gap"), seq)

    def _ask_alone(self, id: bytes) -> Ending | None:
        if id in self.seen or id in self._known.seen:
            return Seen()
        if id in self._waits or id in self._known.waits:
            return Held("behind")
        return None

    def _mark(self, id: bytes, message: Message) -> Mark:
        mark = self._marks.get(id) or self._known.marks.get(id)
        if mark is None:
            begun = message.topic in self._known.baselines
            mark = Mark(number_of(message) - 1) if begun else Mark()
        self._marks[id] = mark
        return mark

    def _hold(self, id: bytes, parking: Parking, head: int) -> Held:
        self.parked.append(parking)
        mark = self._marks[id]
        self._marks[id] = Mark(mark.seq, head, mark.turn)
        self._changed[id] = parking.message
        return Held(parking.why, parking.error)

    def _asked(self, message: Message) -> tuple[bytes, int]:
        """Its sequence and slot, which were mostly asked for a moment ago."""
        last, found = self._last
        return found if last is message else sequence_of(self.consumer, message)

    def applied(self, message: Message) -> Applied:
        id, _ = self._asked(message)
        if (seq := number_of(message)) == 0:
            self.seen[id] = message
            return Applied()
        mark = self._marks[id]
        self._marks[id] = Mark(seq, mark.head, mark.turn)
        self._changed[id] = message
        if mark.head == seq + 1:
            self.woken.add((id, seq + 1))
        return Applied()

    def failed(self, message: Message, failure: Failure) -> Held:
        id, slot = self._asked(message)
        why, error = failure.why, failure.error
        parking = Parking(id, slot, message, why, failure.attempts, error, failure.delay_s)
        if is_ordered(message):
            return self._hold(id, parking, number_of(message))
        self._waits.add(id)
        self.parked.append(parking)
        return Held(why, error)


# --- what waits ---------------------------------------------------------------------------------


def turn_of(mark: Mark, row: ParkedMessage, *, seen: bool) -> Literal["run", "drop", "gap"]:
    """What to do with the first message of a sequence, when it is due.

    `seen`: one without a number is known to have had its effect.
    """
    seq = number_of(row.message)
    if seen or (seq and seq <= mark.seq):
        return "drop"
    return "gap" if seq and seq > mark.seq + 1 else "run"


def passed(mark: Mark, seq: int, following: int | None) -> tuple[Mark, int | None]:
    """The mark behind `seq`, when `following` is what waits next, and that if it may run now."""
    after = Mark(max(mark.seq, seq), following, mark.turn + 1)
    return after, following if following == after.seq + 1 else None


# --- settlements --------------------------------------------------------------------------------


class PayloadError(SettingsError):
    """What was to be the payload of a message is no JSON."""


@value
class View:
    """What a settlement is about: the first message that waits, and the number of the next one.

    `chosen` is the message that the settlement names, if it names one and it waits. `mark` is None
    for a message without a number.
    """

    mark: Mark | None
    head: ParkedMessage
    following: int | None
    chosen: ParkedMessage | None
    now: datetime
    retention_s: float


@value
class Change:
    """What a settlement changes: the mark, a message that goes, one that stays, one that may run.

    Only if all of it is as it was seen: the mark's turn, and the row's `attempts` and `edited`.
    `seen`: a message without a number is to be taken for one that had its effect.
    """

    told: str
    row: ParkedMessage
    mark: Mark | None = None
    drop: bool = False
    seen: bool = False
    keep: ParkedMessage | None = None
    woken: int | None = None
    before: str | None = None
    after: str | None = None


def settled(view: View | None, settlement: Settlement, sequence: bytes) -> Change:
    """What is to be changed; `SettingsError` when it cannot be."""
    if view is None:
        raise SettingsError(
            f"nothing of sequence {sequence.hex()} waits; it may have been run, or settled, "
            "meanwhile. List what is parked"
        )
    match settlement:
        case Edit(event_id, payload):
            return _edited(view, event_id, payload)
        case Replay(force):
            return _replayed(view, force=force)
        case Skip(event_id):
            return _skipped(view, event_id)


def _edited(view: View, event_id: str, payload: str) -> Change:
    row = view.chosen
    if row is None:
        raise _not_there(view, event_id)
    _check_json(payload)
    message = replace(row.message, payload=payload, refused="")
    keep = replace(row, message=message, edited=row.edited + 1)
    told = f"gives {_named(row)} another payload"
    return Change(told, row, keep=keep, before=row.message.payload, after=payload)


def _check_json(payload: Any) -> None:
    if not isinstance(payload, str):
        raise PayloadError(f"a payload is JSON as a str, not {type(payload).__name__}")
    try:
        payload.encode()
        _JSON.decode(payload)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"the payload is no JSON: {error}; nothing was changed") from error


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refused)


def _replayed(view: View, *, force: bool) -> Change:
    row, missing = view.head, _missing(view)
    if missing:
        raise SettingsError(
            f"{_named(row)} waits for {missing}, which has not come, so there is nothing to "
            "replay; it runs by itself when that comes. Skip goes on without"
        )
    if view.mark is None and not force and _is_forgotten(view):
        raise SettingsError(
            f"{_named(row)} has no number and waits for longer than the inbox remembers "
            f"({view.retention_s / 86_400:g} days), so it could have had its effect without our "
            "knowing. Look whether it has; then replay it with force, or skip it"
        )
    keep = replace(row, state="waiting", why="retry", attempts=0, due_at=view.now)
    told = f"lets {_named(row)} run {_by_a_worker(row)}{_and_behind(view)}"
    return Change(told, row, keep=keep)


def _is_forgotten(view: View) -> bool:
    return view.now - view.head.parked_at > timedelta(seconds=view.retention_s)


def _skipped(view: View, event_id: str | None) -> Change:
    row, mark, missing = view.head, view.mark, _missing(view)
    if event_id is not None and row.message.id != event_id:
        raise _not_there(view, event_id)
    if event_id is None and _is_only_due(row):
        raise SettingsError(
            f"{_named(row)} may run and has not failed, so it is not skipped unasked: it runs "
            f"{_by_a_worker(row)}. Should it never run, skip it by its event id (`event_id`, or "
            "--event)"
        )
    if mark is None:
        told = f"goes on without {_named(row)}"
        return Change(told, row, drop=True, seen=True, before=row.message.payload)
    if missing and event_id is None:
        after, woken = passed(mark, number_of(row.message) - 1, number_of(row.message))
        told = f"goes on without {missing}: {_named(row)} runs {_by_a_worker(row)}"
        return Change(told, row, after, woken=woken)
    after, woken = passed(mark, number_of(row.message), view.following)
    told = f"goes on without {_named(row)}{f' and {missing}' if missing else ''}{_then(view)}"
    return Change(told, row, after, drop=True, woken=woken, before=row.message.payload)


def _is_only_due(row: ParkedMessage) -> bool:
    """Nothing is wrong with it any more, as far as we know: who skips twice means another one."""
    return row.state == "waiting" and row.due_at is not None and row.attempts == 0


def _by_a_worker(row: ParkedMessage) -> str:
    return f"when a worker of {row.consumer} does"


def _missing(view: View) -> str:
    """The numbers that have not come, before the first that waits."""
    if view.mark is None:
        return ""
    first, last = view.mark.seq + 1, number_of(view.head.message) - 1
    if first > last:
        return ""
    return f"number {first}" if first == last else f"numbers {first} to {last}"


def _named(row: ParkedMessage) -> str:
    seq = number_of(row.message)
    return f"event {row.message.id} ({row.message.type}{f', number {seq}' if seq else ''})"


def _and_behind(view: View) -> str:
    return "" if view.following is None else ", and what waits behind it, in order"


def _then(view: View) -> str:
    return "" if view.following is None else "; what waits behind it follows"


def _not_there(view: View, event_id: str) -> SettingsError:
    return SettingsError(
        f"event {event_id} is not what can be settled here: first in its sequence is "
        f"{_named(view.head)}. Nothing was changed"
    )


def answer(change: Change, *, dry_run: bool) -> Settled:
    row = change.row
    return Settled(row.sequence, row.message.id, change.told, dry_run)


VERBS: Mapping[type, str] = {Edit: "edit", Replay: "replay", Skip: "skip"}


def audited(change: Change, settlement: Settlement, *, at: datetime, who: str, note: str) -> Audit:
    row, verb = change.row, VERBS[type(settlement)]
    told = f"{change.told}: {note}" if note else change.told
    consumer, id = row.consumer, row.message.id
    return Audit(at, who, verb, consumer, row.sequence, id, told, change.before, change.after)


def following(numbers: Sequence[int], seq: int) -> int | None:
    """The smallest of these numbers that is larger."""
    return min((number for number in numbers if number > seq), default=None)
