"""Look into a ledger, say what happened, and settle what it cannot settle by itself.

Every flow is one `async def` over a ledger. Async code awaits it, `await explain(ledger, key)`
with `ledger = store.ledger(ASYNC)`; everybody else uses `Admin`, the same flows, blocking.

A key is given as it was given to the guard: its text, with its tenant, and with operation or
version where these are part of the identity, or with `http=True` if it came in a request; as a
`Key`, such as `pay.key_for(7)`; or as its id in hexadecimal, from a listing.

The easy mistake is to settle a record that has moved on since somebody looked at it. Nothing is
settled but the attempt that was read: its fence must still be the current one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, Unpack, runtime_checkable

from semel import keys
from semel.codec import CODEC, Codec, decode_error, encode_error, type_path
from semel.colour import SYNC, run
from semel.errors import CorruptRecordError, ReplayedError, SettingsError
from semel.policy import Recovered, Retry, Seconds, _positive
from semel.ports import Store, StoreLedger
from semel.settings import as_store
from semel.values import Guarantees, Key, Kind, Outcome, Record, State

__all__ = [
    "Admin",
    "Answer",
    "Changed",
    "NextCall",
    "Reading",
    "Recordable",
    "Recovered",
    "Refused",
    "Retry",
    "Settlement",
    "Story",
    "Try",
    "explain",
    "find",
    "forget",
    "guarantees",
    "records",
    "resolve",
    "sweep",
]

log = logging.getLogger("semel")

DAY_S = 86_400

KeyLike: TypeAlias = Key | str | bytes

Settlement: TypeAlias = Recovered | Retry | Exception
"""How to settle: it happened with this value, it did not happen, or it failed with this error."""


# What a response may be settled with: a status below is not the end of one, one above is none.
STATUSES = range(200, 600)


class Identity(TypedDict, total=False):
    """What besides its text makes a key, as in `keys.make_key`; `http`: it came in a request."""

    tenant: str
    operation: str
    per_operation: bool
    version: str
    http: bool


@runtime_checkable
class Recordable(Protocol):
    """A value that says itself how it is recorded for a key of a request.

    `semel.http.Response` is one. The name is such that no value of yours has it by chance.
    """

    def __semel_outcome__(self) -> Outcome:
        """What a door would record; `SettingsError` when it could not be sent."""
        ...


# --- what the flows answer ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt: who, when, and how it ended. `ended_at` is None while nobody has seen an end."""

    number: int
    fence: int
    attempt: str
    started_at: datetime
    ended_at: datetime | None
    ending: str

    @property
    def holder(self) -> str:
        """Host and process."""
        return self.attempt.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class Reading:
    """Stored bytes as people see them.

    `value` is what the codec makes of them (for an error, the exception); where it cannot,
    `decoded` is false and `text` shows the bytes themselves.
    """

    kind: Kind
    data: bytes
    text: str
    value: Any = None
    decoded: bool = False


@dataclass(frozen=True, slots=True)
class NextCall:
    """What the same call gets if it is made now, assuming the settings of the last one."""

    does: Literal["replay", "busy", "take over", "unknown", "run"]
    sentence: str


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known about a key.

    `lease_left_s` is how long the holder may stay silent, negative when its lease ran out that
    long ago, None when nobody is at it. `forgotten` counts the first tries, if their endings are
    no longer kept. `http`: it came in a request.
    """

    record: Record
    tries: tuple[Try, ...]
    forgotten: int
    lease_left_s: float | None
    steps: Mapping[str, Reading]
    outcome: Reading | None
    next_call: NextCall
    http: bool = False


@dataclass(frozen=True, slots=True)
class Changed:
    """It was done as asked."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was changed. `missing`: because there is no such record."""

    why: str
    missing: bool = False

    def __bool__(self) -> bool:
        return False


Answer: TypeAlias = Changed | Refused


# --- finding ------------------------------------------------------------------------------------

_HEX_ID = re.compile(r"[0-9a-fA-F]{64}")


async def _id(ledger: StoreLedger, key: KeyLike, identity: Identity) -> bytes:
    """The identity that is meant. Whoever chooses keys can choose one that reads like an id."""
    if isinstance(key, Key):
        return key.id
    id = _named(key, identity).id
    if not isinstance(key, str) or not _HEX_ID.fullmatch(key):
        return id
    known = [one for one in (id, bytes.fromhex(key)) if await _is_known(ledger, one)]
    if len(known) > 1:
        raise SettingsError(
            f"{key!r} is the text of one key and the id of another; say which one with a Key: "
            "keys.make_key(text), or Key(bytes.fromhex(id), '')"
        )
    return known[0] if known else id


async def _by_text(ledger: StoreLedger, key: KeyLike, identity: Identity) -> list[bytes]:
    """Return the ids of the records with this text, if it may be the text of a default key.

    The id of a default key cannot be computed from its text, so all records of the tenant are read.
    """
    is_more_than_text = any(given for name, given in identity.items() if name != "tenant")
    if not isinstance(key, str) or is_more_than_text or not keys.looks_default(key):
        return []
    found, after = list[bytes](), None
    try:
        while page := await ledger.records(
            tenant=identity.get("tenant", ""), operation=None, state=None, limit=1000, after=after
        ):
            found += [record.key.id for record in page if record.key.text == key]
            after = page[-1].key.id
    except CorruptRecordError:
        log.warning("semel: a damaged record has ended the search for %r; give its id", key)
    return found


def _ambiguous(key: KeyLike, ids: Sequence[bytes]) -> str:
    """Explain that a record is named by its id: another key can have the same text."""
    count = "a record" if len(ids) == 1 else f"{len(ids)} records"
    return f"{key!r} is the text of {count}; give an id: {', '.join(id.hex() for id in ids)}"


def _named(text: str | bytes, identity: Identity) -> Key:
    return keys.make_key(
        text,
        tenant=identity.get("tenant", ""),
        operation=identity.get("operation", ""),
        per_operation=identity.get("per_operation", False),
        version=_version(identity),
    )


def _version(identity: Identity) -> str:
    version = identity.get("version", "")
    if not identity.get("http"):
        return version
    if version not in ("", keys.HTTP):
        raise SettingsError(
            f"a key that came in a request has no version, and version={version!r} was given "
            "with http (--http); leave one of them out"
        )
    return keys.HTTP


_REQUEST = re.compile(r"[A-Z-]+ /")


def _by_request(record: Record, identity: Identity) -> bool:
    """Did it come in a request? An id does not tell; whoever named it, or its operation, does."""
    named = _version(identity) == keys.HTTP
    return named or _REQUEST.match(record.key.operation) is not None


async def _is_known(ledger: StoreLedger, id: bytes) -> bool:
    try:
        return await ledger.look(id) is not None
    except CorruptRecordError:
        return True


async def find(ledger: StoreLedger, key: KeyLike, **identity: Unpack[Identity]) -> Record | None:
    """Return the record of this key, or else the record of a default key with this text."""
    record = await ledger.look(await _id(ledger, key, identity))
    if record is not None:
        return record
    found = await _by_text(ledger, key, identity)
    if len(found) > 1:
        raise SettingsError(_ambiguous(key, found))
    return await ledger.look(found[0]) if found else None


async def _not_found(ledger: StoreLedger, key: KeyLike, identity: Identity) -> Refused:
    """Refuse to change a record that is named by its text alone."""
    found = await _by_text(ledger, key, identity)
    return Refused(_ambiguous(key, found)) if found else missing(key, identity)


IN_PYTHON = (
    "tenant=, version=, operation= with per_operation=True, or http=True if it came in a request"
)


def missing(key: KeyLike, identity: Identity, spelled: str = IN_PYTHON) -> Refused:
    """Why nothing can be done about a key that is not there, and how to `spell` the rest of it."""
    name = key.text if isinstance(key, Key) else key
    tenant = identity.get("tenant", "")
    return Refused(
        f"nothing is recorded for {name!r}"
        + (f" of tenant {tenant!r}" if tenant else "")
        + ": it never ran here, or it was forgotten or has expired. If more than its text makes "
        f"the key, name that too ({spelled}), or give its id from a listing",
        missing=True,
    )


async def records(
    ledger: StoreLedger,
    *,
    tenant: str | None = None,
    operation: str | None = None,
    state: State | str | None = None,
    limit: int = 100,
    after: Record | bytes | None = None,
) -> Sequence[Record]:
    """At most `limit` records in the order of their ids, beginning behind `after`."""
    if limit < 1:
        raise SettingsError(f"limit={limit} must be at least 1")
    return await ledger.records(
        tenant=tenant,
        operation=operation,
        state=None if state is None else _state(state),
        limit=limit,
        after=after.key.id if isinstance(after, Record) else after,
    )


def _state(name: str) -> State:
    try:
        return State(name.upper())
    except ValueError:
        choices = ", ".join(State)
        raise SettingsError(f"state={name!r} is unknown; choose one of {choices}") from None


# --- explaining ---------------------------------------------------------------------------------


async def explain(
    ledger: StoreLedger,
    key: KeyLike,
    *,
    codec: Codec = CODEC,
    **identity: Unpack[Identity],
) -> Story | None:
    """A key's whole story, or None when nothing is recorded.

    It is told as of the moment when the store looked, by the store's own clock.
    """
    record = await find(ledger, key, **identity)
    if record is None:
        return None
    return tell(record, codec, http=_by_request(record, identity))


def tell(record: Record, codec: Codec = CODEC, *, http: bool = False) -> Story:
    """The story of a record, as of the moment it was read; `http`: it came in a request."""
    tries = _tries(record)
    return Story(
        record=record,
        tries=tries,
        forgotten=record.number - len(tries),
        lease_left_s=_lease_left_s(record),
        steps={name: _read_step(data, codec) for name, data in record.steps.items()},
        outcome=None if record.outcome is None else _ended(record.outcome, codec, http=http),
        next_call=_next_call(record, REQUEST if http else CALL),
        http=http,
    )


def _lease_left_s(record: Record) -> float | None:
    if record.state not in (State.PENDING, State.UNKNOWN):
        return None
    return (record.lease_until - record.seen_at).total_seconds()


def _live(record: Record) -> bool:
    """Is somebody at it? By the clock that its lease counts by, not by ours."""
    return record.state == State.PENDING and record.lease_until > record.seen_at


def _tries(record: Record) -> tuple[Try, ...]:
    past = tuple(
        Try(p.number, p.fence, p.attempt, p.started_at, p.ended_at, p.ending) for p in record.past
    )
    if past and past[-1].number == record.number:
        return past
    ended_at, ending = _ending(record)
    last = Try(record.number, record.fence, record.attempt, record.started_at, ended_at, ending)
    return (*past, last)


def _ending(record: Record) -> tuple[datetime | None, str]:
    if record.outcome is not None:
        endings = {"value": "completed", "error": "failed for good", "lost": "completed"}
        return record.completed_at, endings[record.outcome.kind]
    if record.state == State.FAILED:
        return record.lease_until, f"failed: {record.error}" if record.error else "released"
    return None, "running" if _live(record) else "nobody knows"


# --- stored bytes -------------------------------------------------------------------------------


def _ended(outcome: Outcome, codec: Codec, *, http: bool) -> Reading:
    """A response is shown with its status, whoever recorded it."""
    kind, data = outcome.kind, outcome.data
    if not http or kind != "value":
        return _read(kind, data, codec)
    # First, since the message "200" without headers and body is also JSON.
    if message := _message(data):
        return Reading(kind, data, message)
    found = _read(kind, data, codec)
    return replace(found, text=f"{outcome.status or 200} | {found.text}")


def _read(kind: Kind, data: bytes, codec: Codec) -> Reading:
    try:
        match kind:
            case "value":
                value = codec.decode(data)
                return Reading(kind, data, repr(value), value, decoded=True)
            case "error":
                error = decode_error(data)
                return Reading(kind, data, _error_line(error), error, decoded=True)
            case "lost":
                why = data.decode()
                return Reading(kind, data, why, why, decoded=True)
    except Exception:  # noqa: BLE001 - a codec or a repr of the user's; the bytes are always there
        return Reading(kind, data, _message(data) or repr(data))


def _message(data: bytes) -> str:
    """A recorded HTTP response in one line; nothing when it is none that people could read."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or not head[:3].isdigit():
        return ""
    try:
        said = body.decode()
    except UnicodeDecodeError:
        said = f"{len(body)} bytes"
    return " | ".join([*head.decode("latin-1").split("\r\n"), said])


def _error_line(error: BaseException) -> str:
    path = error.type_path if isinstance(error, ReplayedError) else ""
    return f"{path or type_path(type(error))}: {error}"


def _read_step(data: bytes, codec: Codec) -> Reading:
    """A step's first byte says whether its value follows, or why it could not be stored."""
    match data[:1]:
        case b"v":
            return _read("value", data[1:], codec)
        case b"l":
            return _read("lost", data[1:], codec)
        case _:
            return Reading("value", data, repr(data))


# --- the next call ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Words:
    """What whoever comes next meets, in the words of a guard or of a door."""

    replays: Mapping[Kind, str]
    busy: str
    unknown: str
    unless: str


CALL = _Words(
    {
        "value": "gets the recorded result",
        "error": "gets the recorded error",
        "lost": "raises ResultLostError, for it happened but its result could not be stored",
    },
    busy="is told that {} is at it",
    unknown="raises OutcomeUnknownError",
    unless="a guard with a recover function takes over and asks it",
)
REQUEST = _Words(
    {
        "value": "is answered with the recorded response",
        "error": "is answered with 500 interrupted, saying the recorded error, which is raised "
        "instead where its class is known",
        "lost": "is answered with 410 response-not-kept, for it happened but its response could "
        "not be kept",
    },
    busy="is answered with 409 in-progress, or waits for it: {} is at it",
    unknown="is answered with 409 outcome-unknown",
    unless="a rule whose on_crash is a function takes over and asks it, one with 'store' answers "
    "500 interrupted",
)


def _next_call(record: Record, words: _Words) -> NextCall:
    if record.outcome is not None:
        replays = words.replays[record.outcome.kind]
        return NextCall("replay", f"{replays}, {_kept(record)}; nothing runs")
    if record.state == State.FAILED:
        return NextCall("run", f"runs: the last attempt failed{_with_steps(record)}")
    if _live(record):
        return NextCall(
            "busy",
            f"{words.busy.format(record.holder)}, until that ends or its lease runs out, at "
            f"{_time(record.lease_until)} unless renewed",
        )
    if record.held:
        return NextCall(
            "unknown",
            f"{words.unknown}: find out whether it happened, then resolve it ({words.unless})",
        )
    return NextCall(
        "take over",
        f"takes over: {record.holder} vanished, its lease ran out at "
        f"{_time(record.lease_until)}{_with_steps(record)}",
    )


def _kept(record: Record) -> str:
    return f"until {_time(record.expires_at)}" if record.expires_at else "for ever"


def _with_steps(record: Record) -> str:
    if not record.steps:
        return ""
    return f"; these steps are not done again: {', '.join(record.steps)}"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


# --- settling -----------------------------------------------------------------------------------


async def resolve(
    ledger: StoreLedger,
    key: KeyLike,
    settlement: Settlement,
    *,
    fence: int | None = None,
    ttl: Seconds | None = DAY_S,
    status: int | None = None,
    codec: Codec = CODEC,
    **identity: Unpack[Identity],
) -> Answer:
    """Settle an attempt that vanished.

    `Recovered(value)`: it happened, and duplicates get this value. An exception: it is over, and
    duplicates get this error. `Retry()`: it did not happen, and the next call runs it.

    `fence` is that of the attempt you looked at: if another one has begun since, nothing is
    changed. Without it, the attempt that is read here is settled. `ttl` is how long the
    settlement is kept.

    A key that came in a request is settled with a `semel.http.Response`, or with what JSON can
    say and `status`, 200 unless given.
    """
    _check_status(settlement, status)
    ttl_s = None if ttl is None else _positive("ttl", ttl)
    record = await ledger.look(await _id(ledger, key, identity))
    if record is None:
        return await _not_found(ledger, key, identity)
    outcome = _outcome(settlement, codec, status, http=_by_request(record, identity))
    fence = record.fence if fence is None else fence
    if await ledger.resolve(record.key.id, fence=fence, outcome=outcome, ttl_s=ttl_s):
        return Changed()
    record = await ledger.look(record.key.id)
    return missing(key, identity) if record is None else Refused(_why_open(record, fence))


def _check_status(settlement: Settlement, status: int | None) -> None:
    if status is None:
        return
    if not isinstance(settlement, Recovered):
        raise SettingsError(
            f"status goes with Recovered(value), not with {type(settlement).__name__}; to settle "
            'with a refusal: Recovered({"detail": "card declined"}), status=402'
        )
    if isinstance(settlement.value, Recordable):
        raise SettingsError(
            f"a {type(settlement.value).__name__} has its own status; leave status={status!r} out"
        )
    _check_range(status)


def _check_range(status: object) -> None:
    if not isinstance(status, int) or status not in STATUSES:
        raise SettingsError(
            f"status={status!r} is not that of a response; give a number from 200 to 599"
        )


def _outcome(
    settlement: Settlement, codec: Codec, status: int | None, *, http: bool
) -> Outcome | None:
    match settlement:
        case Recovered(Recordable() as value) if http:
            outcome = value.__semel_outcome__()
            _check_range(outcome.status)
            return outcome
        case Recovered(value):
            return Outcome("value", codec.encode(value), status)
        case Retry():
            return None
        case Exception():
            return Outcome("error", encode_error(settlement))
        case other:
            raise SettingsError(
                f"{other!r} settles nothing; give Recovered(value), Retry() or an exception"
            )


def _why_open(record: Record, fence: int) -> str:
    """Why this attempt cannot be settled."""
    name = record.key.text
    if record.outcome is not None:
        return (
            f"{name!r} has an outcome already; look at it with explain, and forget the record "
            "if it is to run again"
        )
    if record.fence != fence:
        return (
            f"{name!r} has moved on: attempt {record.number} by {record.holder} has begun since; "
            "look at it with explain first"
        )
    if record.state == State.FAILED:
        return f"{name!r} is not open: its last attempt failed, and the next call runs it again"
    return (
        f"{name!r} is held by {record.holder}, with a lease until {_time(record.lease_until)}; "
        "only an attempt whose lease has run out can be settled, so wait, or stop that process"
    )


async def forget(
    ledger: StoreLedger, key: KeyLike, *, force: bool = False, **identity: Unpack[Identity]
) -> Answer:
    """Delete a record, so that the next call runs. One with a live lease needs `force`.

    A holder that is still running loses its claim, and its effect may happen a second time.
    """
    id = await _id(ledger, key, identity)
    # Delete before reading: a record that cannot be read must be deletable.
    if await ledger.forget(id, force=force):
        return Changed()
    record = await ledger.look(id)
    if record is None:
        return await _not_found(ledger, key, identity)
    return Refused(
        f"{record.key.text!r} is held by {record.holder}, with a lease until "
        f"{_time(record.lease_until)}; wait until it is over, or use force, which lets it run a "
        "second time"
    )


async def sweep(ledger: StoreLedger, *, all: bool = True, limit: int = 1000) -> int:  # noqa: A002
    """Delete expired records and count them: all of them in chunks of `limit`, or one chunk."""
    if limit < 1:
        raise SettingsError(f"limit={limit} must be at least 1")
    total = count = await ledger.sweep(limit)
    while all and count:
        count = await ledger.sweep(limit)
        total += count
    return total


async def guarantees(ledger: StoreLedger) -> Guarantees:
    """What the store's answers survive, as it is configured right now."""
    return await ledger.guarantees()


# --- the blocking face --------------------------------------------------------------------------


class Admin:
    """The flows above for one store, blocking.

    with Admin("sqlite:///semel.db") as admin:
        admin.resolve("invoice:7", Recovered({"id": "ch_1"}))

    A store given by its URL is closed at the end; one given as it is stays open.
    """

    def __init__(self, store: Store | str, *, codec: Codec = CODEC) -> None:
        self._store = as_store(store)
        self._own = isinstance(store, str)
        self._ledger = self._store.ledger(SYNC)
        self._codec = codec

    def records(
        self,
        *,
        tenant: str | None = None,
        operation: str | None = None,
        state: State | str | None = None,
        limit: int = 100,
        after: Record | bytes | None = None,
    ) -> Sequence[Record]:
        """At most `limit` records in the order of their ids, beginning behind `after`."""
        return run(
            records(
                self._ledger,
                tenant=tenant,
                operation=operation,
                state=state,
                limit=limit,
                after=after,
            )
        )

    def explain(self, key: KeyLike, **identity: Unpack[Identity]) -> Story | None:
        """A key's whole story, or None when nothing is recorded."""
        return run(explain(self._ledger, key, codec=self._codec, **identity))

    def resolve(
        self,
        key: KeyLike,
        settlement: Settlement,
        *,
        fence: int | None = None,
        ttl: Seconds | None = DAY_S,
        status: int | None = None,
        **identity: Unpack[Identity],
    ) -> Answer:
        """Settle an attempt that vanished: `Recovered(value)`, an exception, or `Retry()`."""
        return run(
            resolve(
                self._ledger,
                key,
                settlement,
                fence=fence,
                ttl=ttl,
                status=status,
                codec=self._codec,
                **identity,
            )
        )

    def forget(self, key: KeyLike, *, force: bool = False, **identity: Unpack[Identity]) -> Answer:
        """Delete a record, so that the next call runs. One with a live lease needs `force`."""
        return run(forget(self._ledger, key, force=force, **identity))

    def sweep(self, *, all: bool = True, limit: int = 1000) -> int:  # noqa: A002
        """Delete expired records and count them."""
        return run(sweep(self._ledger, all=all, limit=limit))

    def guarantees(self) -> Guarantees:
        """What the store's answers survive, as it is configured right now."""
        return run(guarantees(self._ledger))

    def close(self) -> None:
        """Let go of a store that was opened here."""
        if self._own:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
