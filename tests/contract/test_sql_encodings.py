"""Every part of an SQL store in databases and over connections whose encoding lacks characters."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from semel import current, idempotent, step
from semel.cli.app import app
from semel.colour import ASYNC, SYNC, run
from semel.entries import Field
from semel.errors import ResultLostError, SettingsError
from semel.http.sqlalchemy import IdempotencyRecord, SqlAlchemyIdempotency
from semel.inbox import SQLInbox
from semel.keys import make_key, new_attempt
from semel.messages import Edit, Message, Tail
from semel.outbox import Event, Outbox
from semel.stores.sql import SQLStore, check, init
from semel.stores.sql.encodings import codec_of
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.outbox_reading import Lane, OutboxReader
from semel.values import Kept, Outcome, Terms, Won
from support.inbox_bench import close

pytestmark = pytest.mark.contract

TEXTS = [
    "40 €",
    "Zürich",
    "😀",
    "שלום עולם",
    "€" * 76,
    "back\\slash \\u20ac",
    "plain",
]
ODD = [*TEXTS, "\ud83d", "a\x00b"]


@pytest.fixture(params=["latin1", "sql_ascii"])
def url(request):
    return request.getfixturevalue(f"{request.param}_tables_url")


@pytest.fixture(params=["url", "sync", "async"])
async def store(request, url):
    """Opened by URL, which serves both colours, and over a given engine of each colour."""
    if request.param == "url":
        store = SQLStore(url)
        yield store
        await store.aclose()
        return
    engine = given_engine(url, request.param)
    store = SQLStore(engine)
    yield store
    await store.aclose()
    if request.param == "async":
        await engine.dispose()
    else:
        engine.dispose()


@pytest.fixture
def sync_store(url):
    with closing(SQLStore(url)) as store:
        yield store


def given_engine(url, colour):
    make = sa.create_engine if colour == "sync" else create_async_engine
    return make(with_driver(parse(url), colour), client_encoding="utf8")


def colours_of(store):
    match store.engine_or_url:
        case str():
            return [SYNC, ASYNC]
        case sa.Engine():
            return [SYNC]
    return [ASYNC]


async def asked(colour, work):
    """Await the work, or run it as sync code does."""
    return run(work) if colour is SYNC else await work


def rows(url, select):
    with opened(url) as connection:
        return connection.exec_driver_sql(select).all()


@contextmanager
def opened(url):
    engine = open_engine(parse(url))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


# --- the guard and the ledger -------------------------------------------------------------------


def test_result_that_the_encoding_lacks_runs_once_and_is_replayed(sync_store):
    calls = []

    @idempotent(store=sync_store, key="pay:{number}", lease=1)
    def pay(number):
        calls.append(number)
        return "40 €"

    assert [pay("€1") for _ in range(4)] == ["40 €"] * 4
    assert calls == ["€1"]


async def test_async_result_that_the_encoding_lacks_runs_once_and_is_replayed(url):
    calls = []
    store = SQLStore(url)

    @idempotent(store=store, key="pay:{number}", lease=1)
    async def pay(number):
        calls.append(number)
        return {"total": "40 €", "to": "😀"}

    assert [await pay("€2") for _ in range(4)] == [{"total": "40 €", "to": "😀"}] * 4
    assert calls == ["€2"]
    await store.aclose()


def test_step_and_error_that_the_encoding_lacks_are_kept(sync_store):
    noted = []

    @idempotent(store=sync_store, key="ship:{number}")
    def ship(number):
        noted.append(step("päckchen €", lambda: f"label {len(noted)}"))
        if current().number == 1:
            raise ValueError("kein Porto für 40 € 😀")
        return noted[-1]

    with pytest.raises(ValueError, match="Porto"):
        ship("€3")
    [record] = run(sync_store.ledger(SYNC).records())
    assert "40 € 😀" in record.error
    assert ship("€3") == "label 0"
    assert noted == ["label 0", "label 0"]


@pytest.mark.parametrize("text", ODD)
async def test_every_text_of_a_record_reads_back(store, text):
    for colour in colours_of(store):
        ledger = store.ledger(colour)
        key = make_key(f"{text} {colour.name}", tenant=f"t{TEXTS[0]}", operation=f"op {text}")
        terms = Terms(lease_s=30, ttl_s=600)
        attempt = f"{new_attempt()} €"
        won = await asked(colour, ledger.claim(key, attempt=attempt, terms=terms))
        assert isinstance(won, Won)
        assert isinstance(await asked(colour, ledger.note(won.claim, text, b"step")), Kept)
        await asked(colour, ledger.release(won.claim, error=f"failed: {text}"))
        again = await asked(colour, ledger.claim(key, attempt=f"{attempt} 2", terms=terms))
        assert isinstance(again, Won)
        assert again.steps == {text: b"step"}
        data = json.dumps([text], ensure_ascii=False).encode("utf-8", "surrogatepass")
        done = await asked(colour, ledger.complete(again.claim, Outcome("value", data)))
        assert isinstance(done, Kept)
        record = await asked(colour, ledger.look(key.id))
        assert record.outcome.data == data
        assert (record.key.text, record.key.operation) == (key.text, key.operation)
        assert record.key.tenant == key.tenant
        assert [past.ending for past in record.past] == [f"failed: failed: {text}"]
        listed = await asked(
            colour, ledger.records(tenant=key.tenant, operation=f"op {text}", limit=10)
        )
        assert key.id in {each.key.id for each in listed}


async def test_names_that_grow_by_escapes_are_cut(store):
    for colour in colours_of(store):
        ledger = store.ledger(colour)
        key = make_key("€" * 80, tenant=colour.name + "ü€" * 50, operation="€" * 80)
        won = await asked(
            colour, ledger.claim(key, attempt="a", terms=Terms(lease_s=30, ttl_s=600))
        )
        assert isinstance(won, Won)
        found = await asked(colour, ledger.records(tenant=key.tenant))
        assert [record.key.id for record in found] == [key.id]


def test_bound_session_keeps_a_result_that_the_encoding_lacks(url, sync_store):
    engine, store = given_engine(url, "sync"), sync_store
    key = make_key("bound €")
    with Session(engine) as session:
        ledger = store.bind(session).ledger(SYNC)
        won = run(ledger.claim(key, attempt="a", terms=Terms(lease_s=30, ttl_s=600)))
        assert isinstance(
            run(ledger.complete(won.claim, Outcome("value", b'"40 \xe2\x82\xac"'))), Kept
        )
        session.commit()
    assert run(store.ledger(SYNC).look(key.id)).outcome.data == '"40 €"'.encode()
    engine.dispose()


def test_handler_that_locks_and_stores_replays_what_the_encoding_lacks(url):
    engine = given_engine(url, "sync")
    with Session(engine) as session:
        handler = SqlAlchemyIdempotency(session, tenant_id="t €")
        handler.lock(idempotency_key="key €", operation="pay €", request_hash="1")
        handler.store_response(idempotency_key="key €", response={"total": "40 €"}, status_code=200)
        session.commit()
    with Session(engine) as session:
        handler = SqlAlchemyIdempotency(session, tenant_id="t €")
        assert handler.get_response("key €", operation="pay €").response == {"total": "40 €"}
        found = session.scalars(
            sa.select(IdempotencyRecord).where(IdempotencyRecord.idempotency_key == "key €")
        ).all()
        assert [(record.tenant_id, record.operation) for record in found] == [("t €", "pay €")]
    engine.dispose()


# --- the log ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
async def test_every_text_of_a_log_reads_back(store, text):
    for colour in colours_of(store):
        log = store.log(colour)
        stream = f"{text} {colour.name}"
        for number in (1, 2):
            await asked(
                colour,
                log.append(
                    stream,
                    text.encode(),
                    id=f"{text} {number}",
                    state=Field(text, number, text.encode()),
                    fences={f"{text} producer": 1},
                ),
            )
        page = await asked(colour, log.read(stream))
        assert [entry.id for entry in page.entries] == [f"{text} 1", f"{text} 2"]
        snapshot = await asked(colour, log.load(stream))
        assert {name: field.data for name, field in snapshot.fields.items()} == {
            text: text.encode()
        }


# --- outbox -------------------------------------------------------------------------------------

OUTBOX = Outbox()


def event(text, **more):
    return Event(
        f"type {text}",
        f"kind {text}",
        f"id {text}",
        {"said": text},
        topic=f"to {text}",
        tenant=f"t {text}",
        headers={"note": text},
        **more,
    )


async def published(url, **options):
    store = SQLStore(url)
    reader = OutboxReader(store, **options)
    cursor = await reader.take(0, 1)
    page = await reader.read(cursor, Lane("", 0), limit=100)
    await reader.advance(
        cursor,
        position=page.upto,
        tails={m.topic: Tail(m.position, m.id) for m in page.messages},
        lanes={"to 40 €": 0},
    )
    assert (await reader.take(0, 2)).lanes == {"to 40 €": 0}
    lane = await reader.read(await reader.take(0, 3), Lane("to 40 €", 0), limit=100)
    assert [message.topic for message in lane.messages] == ["to 40 €"]
    assert (await reader.lag()).behind == ["to 40 €"]
    relays = await reader.relays()
    await store.aclose()
    return page.messages, relays


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_every_text_of_an_event_reads_back(url, colour):
    engine = given_engine(url, colour)
    if colour == "sync":
        with Session(engine) as session:
            for text in TEXTS:
                OUTBOX.add(session, event(text))
            session.commit()
        engine.dispose()
    else:
        async with AsyncSession(engine) as session:
            for text in TEXTS:
                OUTBOX.add(session, event(text))
            await session.commit()
        await engine.dispose()
    messages, relays = await published(url, name="relay €")
    assert relays == {"relay €": 1}
    for text, message in zip(TEXTS, messages, strict=True):
        assert json.loads(message.payload) == {"said": text}
        assert (message.topic, message.tenant) == (f"to {text}", f"t {text}")
        assert (message.type, message.aggregate_type) == (f"type {text}", f"kind {text}")
        assert message.aggregate_id == f"id {text}"
        assert message.headers == {"note": text}


def test_event_with_an_id_of_its_own_is_written_once(url):
    engine = given_engine(url, "sync")
    for _ in range(2):
        with Session(engine) as session:
            OUTBOX.add(session, event("€", id="evt €"))
            session.commit()
    assert rows(url, "SELECT count(*) FROM event_outbox") == [(1,)]
    engine.dispose()


# --- inbox --------------------------------------------------------------------------------------


def said(text):
    return json.dumps({"said": text}, ensure_ascii=False)


def message(text, seq):
    return Message(
        position=seq,
        id=f"evt {text} {seq}",
        type=f"type {text}",
        topic=f"to {text}",
        tenant=f"t {text}",
        aggregate_type=f"kind {text}",
        aggregate_id=f"id {text}",
        seq=seq,
        payload=said(text),
        time=datetime(2026, 1, 1, tzinfo=UTC),
        headers={"note": text},
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("colour", ["url", "sync", "async"])
async def test_every_text_of_a_parked_message_reads_back(url, text, colour):
    inbox = SQLInbox(url if colour == "url" else given_engine(url, colour))
    consumer = f"consumer {text}"

    def fail(session, message):
        raise ValueError(f"cannot take {text}")

    async def fail_async(session, message):
        fail(session, message)

    handle = fail if colour == "sync" else fail_async
    await inbox.apply(consumer, [message(text, 1), message(text, 2)], handle)
    [found] = await inbox.sequences(consumer=consumer, topic=f"to {text}", tenant=f"t {text}")
    parked = found.head
    assert json.loads(parked.message.payload) == {"said": text}
    sent = message(text, 1)
    assert parked.message == replace(
        sent, payload=parked.message.payload, source=parked.message.source
    )
    assert f"cannot take {text}" in parked.error
    assert parked.consumer == consumer
    await inbox.settle(
        parked.sequence, Edit(parked.message.id, said(text * 2)), who=text, note=text
    )
    [audit] = await inbox.audit(sequence=parked.sequence)
    assert audit.who == text
    assert audit.note.endswith(text)
    assert json.loads(audit.before) == {"said": text}
    assert json.loads(audit.after) == {"said": text * 2}
    await close(inbox)


# --- connections that cannot carry what is stored -----------------------------------------------


def test_engine_whose_client_encoding_lacks_characters_is_refused(postgres_tables_url):
    engine = sa.create_engine(
        with_driver(parse(postgres_tables_url), "sync"), client_encoding="latin1"
    )
    with pytest.raises(SettingsError, match="client_encoding LATIN1"):
        run(SQLStore(engine).ledger(SYNC).look(b"\0" * 32))
    with Session(engine) as session, pytest.raises(SettingsError, match="client_encoding LATIN1"):
        OUTBOX.add(session, event("plain"))
        session.commit()
    engine.dispose()


@pytest.mark.parametrize("colour", [SYNC, ASYNC])
async def test_engine_on_sql_ascii_without_client_encoding_is_explained(
    sql_ascii_tables_url, colour
):
    make = sa.create_engine if colour is SYNC else create_async_engine
    engine = make(with_driver(parse(sql_ascii_tables_url), colour.name))
    with pytest.raises(SettingsError, match='client_encoding="utf8"'):
        await asked(colour, SQLStore(engine).ledger(colour).look(b"\0" * 32))
    if colour is SYNC:
        with pytest.raises(SettingsError, match='client_encoding="utf8"'):
            check(engine)


@pytest.mark.parametrize("charset", ["latin1", "utf8"])
@pytest.mark.parametrize("colour", [SYNC, ASYNC])
async def test_mariadb_engine_whose_character_set_lacks_characters_is_refused(
    mariadb_tables_url, charset, colour
):
    make = sa.create_engine if colour is SYNC else create_async_engine
    url = with_driver(parse(mariadb_tables_url), colour.name)
    engine = make(url.update_query_dict({"charset": charset}))
    with pytest.raises(SettingsError, match=r"\?charset=utf8mb4"):
        await asked(colour, SQLStore(engine).ledger(colour).look(b"\0" * 32))
    if colour is SYNC:
        engine.dispose()
    else:
        await engine.dispose()


def test_mariadb_in_latin1_opened_by_url_keeps_every_text(mariadb_server, tables):
    """Also where the URL asks for a character set of its own."""
    url = tables.emptied(mariadb_server, "CHARACTER SET latin1") + "?charset=latin1"
    store = SQLStore(url)

    @idempotent(store=store, key="{text}")
    def say(text):
        return text

    for text in TEXTS:
        assert [say(text), say(text)] == [text, text]
    store.close()


# --- a value that the database refuses for another reason ---------------------------------------

NARROW = {
    "postgres": "ALTER TABLE idempotency ALTER COLUMN response TYPE varchar(10)",
    "mariadb": "ALTER TABLE idempotency MODIFY response VARCHAR(10)",
}


@pytest.fixture(params=list(NARROW))
def narrow_url(request):
    """A database whose column takes short results only."""
    url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    with opened(url) as connection:
        connection.exec_driver_sql(NARROW[request.param])
    return url


def test_result_that_the_database_refuses_is_recorded_as_lost(narrow_url, caplog):
    calls = []
    store = SQLStore(narrow_url)

    @idempotent(store=store, key="{number}", lease=1)
    def pay(number):
        calls.append(number)
        return "x" * 50

    with caplog.at_level(logging.WARNING, logger="semel"):
        assert pay("1") == "x" * 50
    assert "cannot be stored" in caplog.text
    with pytest.raises(ResultLostError, match="the database refuses its result"):
        pay("1")
    assert calls == ["1"]
    store.close()


async def test_refused_result_does_not_spoil_its_batch(narrow_url):
    calls = []
    store = SQLStore(narrow_url)

    @idempotent(store=store, key="{number}", lease=5)
    async def pay(number):
        calls.append(number)
        return "x" * number

    numbers = [1, 50, 2, 60, 3]
    assert await asyncio.gather(*map(pay, numbers)) == ["x" * number for number in numbers]
    again = await asyncio.gather(*map(pay, numbers), return_exceptions=True)
    assert [type(answer) for answer in again] == [str, ResultLostError, str, ResultLostError, str]
    assert sorted(calls) == sorted(numbers)
    await store.aclose()


NARROW_STEPS = {
    "postgres": "ALTER TABLE idempotency ALTER COLUMN steps TYPE varchar(300)",
    "mariadb": "ALTER TABLE idempotency MODIFY steps VARCHAR(300)",
}


@pytest.fixture(params=list(NARROW_STEPS))
def narrow_steps_url(request):
    """A database whose column takes few and short steps only."""
    url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    with opened(url) as connection:
        connection.exec_driver_sql(NARROW_STEPS[request.param])
    return url


def test_step_that_the_database_refuses_is_recorded_as_lost(narrow_steps_url):
    charged = []
    store = SQLStore(narrow_steps_url)

    @idempotent(store=store, key="{number}", lease=5)
    def pay(number):
        step("charge", lambda: charged.append(number) or "x" * 400)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        pay("1")
    with pytest.raises(ResultLostError, match="of step 'charge' could not be stored"):
        pay("1")
    assert charged == ["1"]
    store.close()


async def test_refused_step_does_not_spoil_its_batch(narrow_steps_url):
    charged = []
    store = SQLStore(narrow_steps_url)

    @idempotent(store=store, key="{number}", lease=5)
    async def pay(number):
        await step("charge", lambda: charged.append(number) or "x" * number)
        if current().number == 1:
            raise ConnectionError

    numbers = [1, 400, 2, 500, 3]
    await asyncio.gather(*map(pay, numbers), return_exceptions=True)
    again = await asyncio.gather(*map(pay, numbers), return_exceptions=True)
    assert [type(answer) for answer in again] == [
        type(None), ResultLostError, type(None), ResultLostError, type(None),
    ]  # fmt: skip
    assert sorted(charged) == sorted(numbers)
    await store.aclose()


CONSTRAINTS = {
    "postgres": "length(response::text) < 10",
    "mariadb": "char_length(response) < 10",
}


@pytest.mark.parametrize("database", list(CONSTRAINTS))
def test_result_that_violates_a_check_is_recorded_as_lost(request, database):
    url = request.getfixturevalue(f"{database}_url")
    init(url)
    with opened(url) as connection:
        connection.exec_driver_sql(
            "ALTER TABLE idempotency ADD CONSTRAINT short_response "
            f"CHECK (response IS NULL OR {CONSTRAINTS[database]})"
        )
    calls = []
    store = SQLStore(url)

    @idempotent(store=store, key="{number}", lease=1)
    def pay(number):
        calls.append(number)
        return "x" * 50

    assert pay("1") == "x" * 50
    with pytest.raises(ResultLostError, match="the database refuses its result"):
        pay("1")
    assert calls == ["1"]
    store.close()


# --- what `db init` and `db check` report ---------------------------------------------------------


def test_check_notes_an_encoding_that_lacks_characters(latin1_tables_url):
    report = check(latin1_tables_url)
    assert report.ok
    [note] = report.notes
    assert "the database's encoding is LATIN1" in note


@pytest.mark.parametrize("verb", ["init", "check"])
def test_command_notes_an_encoding_that_lacks_characters_and_succeeds(latin1_tables_url, verb):
    told = CliRunner().invoke(app, ["db", verb, latin1_tables_url])
    assert told.exit_code == 0
    assert "the database's encoding is LATIN1" in " ".join(told.output.split())


def test_check_reports_a_mariadb_table_in_another_character_set(mariadb_url):
    init(mariadb_url)
    with opened(mariadb_url) as connection:
        connection.exec_driver_sql("ALTER TABLE event_outbox CONVERT TO CHARACTER SET latin1")
    [problem] = check(mariadb_url).problems
    assert problem.startswith("the collation of table event_outbox is latin1_swedish_ci")


def test_check_notes_nothing_about_utf8(postgres_tables_url):
    assert check(postgres_tables_url).notes == ()


def test_postgres_takes_every_character_that_its_codec_has(postgres_server):
    """Otherwise a character would be sent without an escape, and refused."""
    names = [*(f"LATIN{n}" for n in range(1, 11)), *(f"ISO_8859_{n}" for n in range(5, 9))]
    names += [f"WIN{n}" for n in (866, 874, *range(1250, 1259))]
    postgres_server.ensure_running()
    for name in names:
        codec = codec_of(name)
        text = "".join(bytes([n]).decode(codec, "ignore") for n in range(1, 256))
        select = (
            f"SELECT convert_from(convert_to('{text.replace(chr(39), '')}', '{name}'), '{name}')"
        )
        [(back,)] = rows(postgres_server.url(), select.replace("%", "%%"))
        assert back == text.replace("'", ""), name
    assert codec_of("EUC_JP") == "ascii"
