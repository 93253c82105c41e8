"""Events as values: what is refused, and what is made of them. No database."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
import time
from decimal import Decimal
from uuid import UUID

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from semel.errors import SettingsError
from semel.outbox import Event, Outbox

OUTBOX = Outbox(routes={"placed": "orders"})


def placed(**more):
    given = {"type": "placed", "aggregate_type": "order", "aggregate_id": "7", "payload": {}}
    return Event(**(given | more))


def entry(**more):
    return OUTBOX._entry(placed(**more))


# --- routes -------------------------------------------------------------------------------------


def test_a_topic_of_its_own_goes_before_the_route():
    assert entry().topic == "orders"
    assert entry(topic="audit").topic == "audit"


def test_a_topic_of_the_doctors_is_refused():
    with pytest.raises(SettingsError, match="semel doctor"):
        OUTBOX.add(Session(), placed(topic="semel.canary.mine"))


def test_an_event_that_goes_nowhere_is_refused_when_it_is_added():
    with pytest.raises(SettingsError, match=r"'cancelled' go.*Event\(topic=.*routes=\{'cancelled'"):
        OUTBOX.add(Session(), placed(type="cancelled"))


@pytest.mark.parametrize("routes", [{"": "orders"}, {"placed": ""}, {"placed": 5}, {5: "orders"}])
def test_a_route_that_cannot_work_is_refused_where_it_is_made(routes):
    with pytest.raises(SettingsError):
        Outbox(routes)


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["type", "aggregate_type", "aggregate_id", "topic", "id"])
@pytest.mark.parametrize(
    "bad", ["", "a ", " a", "a\x1fb", "a\nb", "a\x00", "\ud800", "é" * 128, b"x", 1.5]
)
def test_a_name_that_no_column_holds_is_refused(field, bad):
    with pytest.raises(SettingsError):
        Outbox({"placed": "orders"}).add(Session(), placed(**{"topic": "orders", field: bad}))


def test_an_odd_tenant_is_refused_and_none_is_fine():
    assert entry().tenant_id == ""
    with pytest.raises(SettingsError, match="tenant"):
        entry(tenant="a\x1e")


def test_ids_may_be_numbers_and_uuids():
    some = UUID("0191d6c0-0000-7000-8000-000000000001")
    assert entry(aggregate_id=7).aggregate_id == "7"
    assert entry(aggregate_id=some, id=some).aggregate_id == str(some)
    assert entry(id=some).event_id == str(some)
    with pytest.raises(SettingsError, match="bool"):
        entry(aggregate_id=True)


def test_members_of_an_enum_are_names_like_any_other():
    class Kind(enum.StrEnum):
        ORDER = "order"

    assert type(entry(aggregate_type=Kind.ORDER).aggregate_type) is str


def test_an_id_is_made_where_none_is_given():
    before = time.time_ns() // 1_000_000
    made = [entry() for _ in range(3)]
    for one in made:
        id = UUID(one.event_id)
        assert (id.version, id.variant) == (7, "specified in RFC 4122")
        assert 0 <= (id.int >> 80) - before < 10_000
        assert not one.given
    assert len({one.event_id for one in made}) == 3
    assert entry(id="mine").given


# --- where it belongs ---------------------------------------------------------------------------


def test_the_counter_and_its_shard_are_the_same_for_ever():
    """They are stored, and readers own shards: a change here would reorder what is under way."""
    assert entry().counter.hex() == (
        "22243f91f52df649ddd0b1195771296d35cc8fc8c0d8cfb18797dea50f7fa9d4"
    )


def test_each_part_tells_counters_apart():
    counters = [
        entry(),
        entry(tenant="acme"),
        entry(topic="audit"),
        entry(aggregate_type="invoice"),
        entry(aggregate_id="8"),
        entry(aggregate_type="order7", aggregate_id="7"),
        entry(aggregate_type="order", aggregate_id="77"),
    ]
    assert len({one.counter for one in counters}) == len(counters)


def test_shards_are_used_evenly():
    used = [entry(aggregate_id=n).counter[0] for n in range(10_000)]
    assert set(used) == set(range(256))


# --- payloads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({"b": 1, "a": "é"}, '{"b":1,"a":"é"}'),
        ([1.5, None, True], "[1.5,null,true]"),
        (None, "null"),
        ('{ "a" : 1.00 }', '{ "a" : 1.00 }'),
        (b'{"a":\t"\xc3\xa9"}', '{"a":\t"é"}'),
        (bytearray(b"5"), "5"),
        ("1" * 5_000, "1" * 5_000),
    ],
    ids=str,
)
def test_a_payload_is_json_and_json_is_kept_to_the_byte(payload, text):
    assert entry(payload=payload).payload == text


@pytest.mark.parametrize(
    "payload",
    [
        "hello",
        "",
        '{"a": NaN}',
        "{'a': 1}",
        b"\xff",
        '"a\x1fb"',
        "[" * 100_000,
        {"a": Decimal(1)},
        {"a": float("nan")},
        {"a": b"bytes"},
        {"a": "\ud800"},
        '"\ud800"',
    ],
    ids=lambda payload: repr(payload)[:20],
)
def test_what_is_no_json_is_refused_by_the_type_of_its_event(payload):
    with pytest.raises(SettingsError, match="'placed'"):
        entry(payload=payload)


def test_a_payload_has_a_limit_in_bytes():
    small = Outbox({"placed": "orders"}, max_payload=10)
    assert small._entry(placed(payload=["ééab"])).payload == '["ééab"]'
    with pytest.raises(SettingsError, match=r"has 11 bytes.*max_payload \(10\)"):
        small._entry(placed(payload=["ééabc"]))


def test_headers_are_texts_by_name():
    assert entry().headers is None
    assert json.loads(entry(headers={"é": "\n"}).headers) == {"é": "\n"}
    for bad in ({"a": 1}, {1: "a"}, {"a": "\ud800"}):
        with pytest.raises(SettingsError, match="headers of 'placed'"):
            entry(headers=bad)


# --- sessions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [None, 5, "sqlite://", sa.create_engine("sqlite://")], ids=str)
def test_what_has_no_transaction_is_refused(session):
    with pytest.raises(SettingsError, match="give the SQLAlchemy session or connection"):
        OUTBOX.add(session, placed())


def test_only_events_are_added():
    with pytest.raises(SettingsError, match="takes an Event, not a dict"):
        OUTBOX.add(Session(), {"type": "placed"})


def test_a_session_without_one_engine_for_everything_is_told_to_give_the_connection():
    with pytest.raises(SettingsError, match=r"session\.connection\(bind_arguments"):
        OUTBOX.add(Session(), placed())


async def test_an_async_connection_that_is_not_open_is_refused():
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(SettingsError, match="not open yet"):
        OUTBOX.add(engine.connect(), placed())
    await engine.dispose()


async def test_a_session_that_begins_nothing_by_itself_has_to_be_begun():
    engine = create_async_engine("sqlite+aiosqlite://")
    async with AsyncSession(engine, autobegin=False) as session:
        with pytest.raises(SettingsError, match="begin it before"):
            OUTBOX.add(session, placed())
        async with session.begin():
            OUTBOX.add(session, placed())
            await session.rollback()
    await engine.dispose()


async def test_a_connection_whose_begin_has_to_be_awaited_is_to_be_begun_before():
    engine = create_async_engine("sqlite+aiosqlite://")

    @sa.event.listens_for(engine.sync_engine, "begin")
    def begin(connection):
        connection.exec_driver_sql("BEGIN")

    async with engine.connect() as connection:
        with pytest.raises(SettingsError, match=r"await connection\.begin\(\)"):
            OUTBOX.add(connection, placed())
        await connection.begin()
        OUTBOX.add(connection, placed())
        await connection.rollback()
    await engine.dispose()


def test_importing_events_needs_no_sqlalchemy():
    said = "import sys, semel.outbox; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", said], check=False).returncode == 0
