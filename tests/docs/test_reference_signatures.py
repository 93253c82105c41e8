"""The reference has every parameter of the calls that it describes, with its default."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import semel
from semel.admin import Admin
from semel.brokers import MemoryBroker, NatsBroker, RabbitBroker, RedisBroker, SQLiteBroker
from semel.bus import BlockingPublisher, Publisher, Router, Stages, Watcher, get_next_seq
from semel.client import Intents, Patience
from semel.client.feed import Feed, feed
from semel.client.httpx import AsyncIdempotentTransport, IdempotentTransport
from semel.client.requests import IdempotentAdapter
from semel.client.room import Table, room
from semel.doctor import Thresholds
from semel.entries import (
    Entry,
    Field,
    FieldValue,
    Keep,
    Page,
    Position,
    Replace,
    Snapshot,
    beginning,
)
from semel.http.sqlalchemy import SqlAlchemyIdempotency
from semel.http.sse import Gateway, Tickets
from semel.http.sse import Limits as GatewayLimits
from semel.http.ws import Limits as DoorLimits
from semel.http.ws import RoomDoor
from semel.inbox import MemoryInbox, RedisInbox, Retry, SQLInbox
from semel.outbox import Event, Outbox
from semel.parked import Parked
from semel.ports import Bell, Log
from semel.relay import Relay
from semel.rooms import Room, Rooms
from semel.stores import FileStore, MemoryStore, RedisStore, SQLiteStore, SQLStore
from semel.worker import Worker

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"

# Seams for tests of our own, not settings.
SEAMS = {Intents: {"clock"}, MemoryInbox: {"clock"}, Relay: {"reader"}, Rooms: {"wall", "entropy"}}


# Kinds of `SettingsError` and `StoreUnavailableError` that no user has to tell apart.
INNER_ERRORS = {"PayloadError", "TopicError", "TroubledError"}


def modules():
    """Every module of the package."""
    for found in pkgutil.walk_packages(semel.__path__, "semel."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def test_every_error_has_a_row_and_the_module_that_it_is_imported_from():
    page = (REFERENCE / "errors.md").read_text()
    errors = {
        name
        for module in modules()
        for name, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, semel.SemelError) and name[0] != "_"
    }
    rows = set(re.findall(r"^\| `(\w+)` \| [^`]", page, re.MULTILINE))
    homes = dict(re.findall(r"^\| `(semel[\w.]*)` \| (.*) \|$", page, re.MULTILINE))
    imported = {home: re.findall(r"`(\w+)`", names) for home, names in homes.items()}
    assert errors - INNER_ERRORS == rows - {"Refusal"}
    assert rows == {name for names in imported.values() for name in names}
    for home, names in imported.items():
        assert all(hasattr(importlib.import_module(home), name) for name in names), home


def section(page, heading):
    """The text below a heading, to the next one."""
    text = (REFERENCE / page).read_text()
    found = re.search(rf"^##+ {re.escape(heading)}$(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no heading {heading!r}"
    return found[1]


def tables(page, heading):
    """The name of the first column of each table below a heading, and the table's rows."""
    for text in re.findall(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE):
        head, _, *rows = (
            [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            for line in text.splitlines()
        )
        yield head[0], rows


def parameters(called):
    return {
        p.name: p.default
        for p in inspect.signature(called).parameters.values()
        if p.name not in {"self", *SEAMS.get(called, ())}
    }


def options(called):
    """What is given by its name: the options, or the fields of a value."""
    by_name = {
        p.name for p in inspect.signature(called).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    return {k: v for k, v in parameters(called).items() if k in by_name} or parameters(called)


def written_options(page, heading):
    """The names in tables of options, and their defaults as they are written."""
    found = {}
    for head, rows in tables(page, heading):
        if head in {"Option", "Field", "Limit", "Setting", "`Limits`"}:
            for row in rows:
                names = re.findall(r"`(\w+)(?:\([^`]*\))?`", row[0])
                defaults = re.findall(r"`([^`]*)`", row[1]) if len(row) > 2 else []
                found |= dict.fromkeys(names) | dict(zip(names, defaults, strict=False))
    return found


def literal(text):
    """The value of a default; None where it is described in words, or made by a call."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):  # TypeError: not written at all
        return None


@pytest.mark.parametrize(
    ("page", "heading", "called"),
    [
        ("log.md", "`append`", [Log.append]),
        ("log.md", "`Keep`", [Keep]),
        ("log.md", "`Page`", [Page]),
        ("log.md", "`Entry`", [Entry]),
        ("log.md", "`Snapshot`", [Snapshot]),
        (
            "bus.md",
            "`Publisher(store, *, …)`, `BlockingPublisher(store, *, …)`",
            [Publisher, BlockingPublisher],
        ),
        ("bus.md", "`Router`", [Router]),
        ("gateway.md", "`Gateway(store, *, …)`", [Gateway]),
        ("gateway.md", "`Limits`", [GatewayLimits]),
        ("relay.md", "`Relay(store, broker, *, …)`", [Relay]),
        ("worker.md", "`Worker(broker, group, inbox, store=None, *, …)`", [Worker]),
        ("rooms.md", "Rooms", [Rooms]),
        ("rooms.md", "RoomDoor", [RoomDoor, DoorLimits]),
        ("inbox.md", "What is remembered", [MemoryInbox, RedisInbox, SQLInbox]),
        ("inbox.md", "`Retry`", [Retry]),
        ("outbox.md", "`Event`", [Event]),
        (
            "client.md",
            "Options",
            [IdempotentTransport, AsyncIdempotentTransport, IdempotentAdapter],
        ),
        ("client.md", "Patience", [Patience]),
        ("feed-client.md", "Python", [feed]),
        ("room-client.md", "Python", [room]),
        ("doctor.md", "From Python", [Thresholds]),
        (
            "brokers.md",
            "Settings",
            [MemoryBroker, NatsBroker, RabbitBroker, RedisBroker, SQLiteBroker],
        ),
    ],
)
def test_table_of_options_has_every_one_and_its_default(page, heading, called):
    written = written_options(page, heading)
    told = set(re.findall(r"`(\w+)`", section(page, heading)))
    for one in called:
        assert set(options(one)) <= told, one
        for name, default in options(one).items():
            given = literal(written.get(name))
            if given is not None and isinstance(default, int | float | str | tuple):
                assert given == default, f"{one.__name__}: {name}"
    assert set(written) <= {name for one in called for name in parameters(one)}


def signatures(text):
    """The code in a text that reads as a signature, by the name of what is called."""
    for span in re.findall(r"`(?:await |[\w.]*\.)?(\w+\([^`]*\))`", text):
        try:
            [made] = ast.parse(f"def {span}: pass").body
        except SyntaxError:
            continue
        arguments = made.args
        names = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
        named = [a.arg for a in (arguments.vararg, arguments.kwarg) if a]
        yield made.name, span, names + named


@pytest.mark.parametrize(
    ("page", "heading", "owner"),
    [
        ("log.md", "Verbs", Log),
        ("log.md", "The bell", Bell),
        (
            "bus.md",
            "`Publisher(store, *, …)`, `BlockingPublisher(store, *, …)`",
            BlockingPublisher,
        ),
        ("bus.md", "`Router`", Router),
        ("bus.md", "`Watcher`", Watcher),
        ("gateway.md", "`Gateway(store, *, …)`", Gateway),
        ("relay.md", "`Relay(store, broker, *, …)`", Relay),
        ("rooms.md", "Room", Room),
        ("rooms.md", "Rooms", Rooms),
        ("admin.md", "Methods", Admin),
        ("inbox.md", "Parked", Parked),
        ("client.md", "Intents", Intents),
        ("feed-client.md", "Python", Feed),
        ("room-client.md", "Python", Table),
        ("sqlalchemy-idempotency.md", "The class", SqlAlchemyIdempotency),
    ],
)
def test_table_of_methods_has_every_parameter(page, heading, owner):
    cells = [row[0] for head, rows in tables(page, heading) for row in rows if head != "Option"]
    found = [one for one in signatures("\n".join(cells)) if hasattr(owner, one[0])]
    assert found
    for name, span, names in found:
        assert set(names) == set(parameters(getattr(owner, name))), span


@pytest.mark.parametrize(
    ("page", "called"),
    [
        ("admin.md", Admin),
        ("bus.md", Stages),
        ("bus.md", Watcher),
        ("bus.md", get_next_seq),
        ("client.md", Intents),
        ("gateway.md", Tickets),
        ("inbox.md", Parked),
        ("log.md", Field),
        ("log.md", FieldValue),
        ("log.md", Position),
        ("log.md", Replace),
        ("log.md", beginning),
        ("outbox.md", Outbox),
        ("sqlalchemy-idempotency.md", SqlAlchemyIdempotency),
        ("stores.md", FileStore),
        ("stores.md", MemoryStore),
        ("stores.md", RedisStore),
        ("stores.md", SQLStore),
        ("stores.md", SQLiteStore),
    ],
)
def test_signature_in_the_text_has_every_parameter(page, called):
    spans = signatures((REFERENCE / page).read_text())
    found = [set(names) for name, _, names in spans if name == called.__name__]
    assert set(parameters(called)) in found
