"""Events that are there exactly when the rows are: written in the caller's own transaction.

    outbox = Outbox(routes={"order.placed": "orders"})

    with Session(engine) as session, session.begin():
        session.add(order)
        outbox.add(
            session,
            Event(
                type="order.placed",
                aggregate_type="order",
                aggregate_id=order.id,
                payload={"total": 40},
            ),
        )

`add` only remembers; the COMMIT writes rows and events together, or neither. So it is a plain call
for sync and for async sessions. Within one tenant, topic and aggregate, events are numbered
without gaps in the order of their commits.

The easy mistake is to send a message after the commit, or before it: a process that dies between
the two has told of what never happened, or never tells of what did.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast
from uuid import UUID

from semel.cloudevents import is_clean
from semel.colour import ASYNC, SYNC, Colour, run
from semel.errors import SettingsError
from semel.imports import importing
from semel.keys import plain
from semel.messages import CANARY, Message
from semel.values import value

if TYPE_CHECKING:
    from semel.stores.sql import SQLStore
    from semel.stores.sql.bound import Session
    from semel.stores.sql.ledger import SQLLedger
    from semel.stores.sql.outbox_writing import Entry

__all__ = ["BlockingEventReader", "Event", "EventReader", "Outbox"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)

# What brokers take without being told otherwise.
MAX_PAYLOAD = 1024 * 1024

# What a column holds and an index can have in full.
NAME_BYTES = 255


@value
class Event:
    """What happened, to which aggregate, for whoever wants to know.

    `payload` is anything that JSON can say, or JSON itself as a str or bytes, which is kept to the
    byte. `topic` is where it goes; without one, the outbox's routes say. An `id` of your own makes
    a repeat harmless: an event that is there already is not added again. With `ordered=False` the
    event gets no number and never waits for another of its aggregate.
    """

    type: str
    aggregate_type: str
    aggregate_id: str | int | UUID
    payload: Any
    topic: str | None = None
    tenant: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    id: str | UUID | None = None
    ordered: bool = True


class Outbox:
    """Adds events to transactions. `routes` says which type of event goes to which topic.

    With `notify`, a commit on PostgreSQL also tells relays in other processes to look
    (`Relay(notify=True)`). They look anyway, a little later, and PostgreSQL lets one such commit
    through at a time, which halves how many there can be.
    """

    _reserved: ClassVar[tuple[str, ...]] = (CANARY,)
    """How topics begin that are not for applications."""

    def __init__(
        self,
        routes: Mapping[str, str] | None = None,
        *,
        max_payload: int = MAX_PAYLOAD,
        notify: bool = False,
    ) -> None:
        self._routes = {
            _name("a type in routes", kind): _name(f"the topic of {kind!r}", topic)
            for kind, topic in (routes or {}).items()
        }
        self._max_payload = max_payload
        self._notify = notify

    def add(self, session: Session, event: Event) -> Event:
        """Have the event committed with the session's transaction, or not at all.

        Takes a Session or Connection of SQLAlchemy, sync or async, or a scoped one; nothing is
        awaited. Returns the event with its topic and id. What cannot be written is refused here;
        an id that is taken by another event, by the commit (`IdempotencyConflictError`).
        """
        from semel.stores.sql.outbox import collect

        entry = self._entry(event)
        collect(session, entry)
        return Event(
            event.type,
            event.aggregate_type,
            event.aggregate_id,
            event.payload,
            entry.topic,
            event.tenant,
            event.headers,
            entry.event_id,
            event.ordered,
        )

    def _entry(self, event: Event) -> Entry:
        from semel.stores.sql.outbox_writing import Entry, counter_of

        if not isinstance(event, Event):
            raise SettingsError(f"add() takes an Event, not a {type(event).__name__}")
        tenant = "" if event.tenant == "" else _name("a tenant", event.tenant)
        topic = self._topic(event)
        aggregate_type = _known("an aggregate_type", event.aggregate_type)
        aggregate_id = _name("an aggregate_id", _written(event.aggregate_id))
        return Entry(
            counter=counter_of(tenant, topic, aggregate_type, aggregate_id),
            tenant_id=tenant,
            topic=topic,
            aggregate_type=aggregate_type,
            aggregate_id=aggregate_id,
            event_id=_new_id() if event.id is None else _name("an id", _written(event.id)),
            event_type=_known("a type", event.type),
            payload=self._payload(event),
            headers=_headers(event),
            ordered=event.ordered,
            given=event.id is not None,
            notify=self._notify,
        )

    def _topic(self, event: Event) -> str:
        topic = self._routes.get(event.type) if event.topic is None else event.topic
        if topic is None:
            raise SettingsError(
                f"nothing says where events of type {event.type!r} go; give Event(topic=...), or "
                f"Outbox(routes={{{event.type!r}: ...}})"
            )
        named = _known("a topic", topic)
        if named.startswith(self._reserved):
            raise SettingsError(f"topics that begin with {CANARY!r} are those of `semel doctor`")
        return named

    def _payload(self, event: Event) -> str:
        text = _json_text(event)
        size = len(_utf8(text, f"the payload of {event.type!r}"))
        if size > self._max_payload:
            raise SettingsError(
                f"the payload of {event.type!r} has {size:,} bytes, more than max_payload "
                f"({self._max_payload:,}); store it elsewhere and tell where, or raise max_payload"
            )
        return text


# --- reading ------------------------------------------------------------------------------------

# Events per page.
LIMIT = 100


class EventReader:
    """Reads the committed events of an outbox, in order, for a relay of your own.

    It takes no lease and stores no position: the caller stores the position of the last event
    that it has processed. Any number of readers can read the same outbox.
    """

    def __init__(self, store: SQLStore) -> None:
        self._store = _checked_store(store)

    async def read(self, after: int | None = None, limit: int = LIMIT) -> list[Message]:
        """Return the next committed events after a position, by position.

        `after=None` begins with the oldest event in the table. An empty list means that there is
        nothing to read yet; a list can be shorter than `limit` although there is more. No event is
        returned while an open transaction can still commit one before it. `SettingsError`: a
        relay may have deleted events after this position.
        """
        return await _read(self._store, ASYNC, after, limit)


class BlockingEventReader:
    """The same for sync code."""

    def __init__(self, store: SQLStore) -> None:
        self._store = _checked_store(store)

    def read(self, after: int | None = None, limit: int = LIMIT) -> list[Message]:
        """Return the next committed events after a position; see `EventReader.read`."""
        return run(_read(self._store, SYNC, after, limit))


async def _read(store: SQLStore, colour: Colour, after: int | None, limit: int) -> list[Message]:
    from semel.stores.sql.outbox_reading import committed

    if type(limit) is not int or limit < 1:
        raise SettingsError(f"limit is a number of events from 1 on, not {limit!r:.80}")
    if after is not None and type(after) is not int:
        raise SettingsError(
            f"after is an int, the position of an event, not {after!r:.80}; write after=int(...)"
        )
    ledger = cast("SQLLedger", store.ledger(colour))
    return await ledger.run(lambda link: committed(link, after, limit))


def _checked_store(store: SQLStore) -> SQLStore:
    from semel.stores.sql import SQLStore

    if not isinstance(store, SQLStore):
        raise SettingsError(
            f"a reader takes an SQLStore, not a {type(store).__name__}; write SQLStore(url) or "
            "SQLStore(engine), from semel.stores.sql"
        )
    return store


# --- names --------------------------------------------------------------------------------------


def _name(what: str, given: Any) -> str:
    """Text that every column, broker and header can hold."""
    if not isinstance(given, str):
        raise SettingsError(f"{what} is a str, not {type(given).__name__}; write it as text")
    text = plain(what, given)
    if not text:
        raise SettingsError(f"{what} must not be empty")
    if text != text.strip():  # MariaDB compares without the spaces at the end
        raise SettingsError(f"{what} must not begin or end with a space: {text!r}")
    if not is_clean(text):
        raise SettingsError(f"{what} must not hold control characters or lone surrogates: {text!r}")
    if len(text.encode()) > NAME_BYTES:
        raise SettingsError(f"{what} has at most {NAME_BYTES} bytes: {text[:40]!r}...")
    return text


_seen = lru_cache(maxsize=1024)(_name)


def _known(what: str, given: Any) -> str:
    """`_name` for names that an application has few of."""
    return _seen(what, given) if type(given) is str else _name(what, given)


def _written(id: Any) -> Any:
    """Whole numbers and UUIDs are ids that everybody writes the same way."""
    return str(id) if type(id) is int or isinstance(id, UUID) else id


def _new_id() -> str:
    """A UUID that grows with time (version 7, RFC 9562 section 5.7): neighbours in the index."""
    random = int.from_bytes(os.urandom(10), "big")
    number = (time.time_ns() // 1_000_000) << 80 | random
    number = number & ~(0xF << 76) | 7 << 76
    return str(UUID(int=number & ~(0x3 << 62) | 2 << 62))


# --- JSON ---------------------------------------------------------------------------------------


def _json_text(event: Event) -> str:
    payload: object = event.payload
    if not isinstance(payload, str | bytes | bytearray):
        return _dumped(event)
    try:
        text = payload if isinstance(payload, str) else payload.decode()
        _JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"the payload of {event.type!r} is {type(payload).__name__}, which is taken for JSON, "
            f"and is none: {error}; give the object itself, or json.dumps of it"
        ) from error
    return str.__str__(text)


def _dumped(event: Event) -> str:
    try:
        return _WRITE(event.payload)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingsError(
            f"the payload of {event.type!r} cannot be written as JSON: {error}; give plain "
            "values, or JSON that you have made yourself"
        ) from error


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Numbers need not be made of what is only looked at: some are longer than Python would read.
_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refused)
_WRITE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def _headers(event: Event) -> str | None:
    headers: Mapping[Any, Any] = event.headers
    for name, text in headers.items():
        if not (isinstance(name, str) and isinstance(text, str)):
            raise SettingsError(
                f"headers of {event.type!r} are texts by name; {name!r}: {text!r} is none"
            )
    if not headers:
        return None
    written = _WRITE(dict(headers))
    _utf8(written, f"the headers of {event.type!r}")
    return written


def _utf8(text: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise SettingsError(f"{what} hold a lone surrogate, which is no text: {error}") from error
