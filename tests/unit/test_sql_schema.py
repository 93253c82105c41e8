"""Making, upgrading and checking the tables, and the page that shows them.

`python tests/unit/test_sql_schema.py` writes the statements into the page anew.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from semel.colour import SYNC, run
from semel.errors import (
    DuplicateExecutionError,
    IdempotencyConflictError,
    SettingsError,
    StoreUnavailableError,
)
from semel.http.sqlalchemy import SqlAlchemyIdempotency
from semel.keys import make_key, new_attempt
from semel.stores import SQLiteStore
from semel.stores.sql import SQLStore, check, ddl, init, upgrade
from semel.stores.sql.lines import open_engine, parse, with_driver
from semel.stores.sql.schema import OUTBOX_TABLES, PARTS
from semel.values import State, Terms

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "schema.md"


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def execute(url):
    engine = open_engine(parse(url))

    def run_statement(statement):
        with engine.connect() as connection:
            return connection.exec_driver_sql(statement)

    yield run_statement
    engine.dispose()


def test_init_makes_what_check_wants(url):
    before = check(url)
    assert not before.ok
    assert before.exit_status == 1
    assert "semel db init" in str(before)
    assert init(url).problems == ()
    after = check(url)
    assert after.problems == ()
    assert (after.version, after.exit_status) == (2, 0)
    assert "ledger 2, outbox 2, inbox 1, log 1, as it should be" in str(after)


@pytest.mark.parametrize("create", [False, True])
def test_a_file_of_the_sqlite_store_is_refused_and_left_as_it_is(tmp_path, create):
    path = tmp_path / "semel.db"
    theirs = SQLiteStore(path)
    run(theirs.ledger(SYNC).look(b"none"))
    store = SQLStore(f"sqlite:///{path}", create=create)
    with pytest.raises(SettingsError, match="made by SQLiteStore"):
        run(store.ledger(SYNC).look(b"none"))
    told = f"made by SQLiteStore; write sqlite:///{path},"
    with pytest.raises(SettingsError, match=told):
        init(f"sqlite:///{path}")
    [problem] = check(f"sqlite:///{path}").problems
    assert told in problem
    store.close()
    engine = sa.create_engine(f"sqlite:///{path}")
    assert "semel_schema" not in sa.inspect(engine).get_table_names()
    engine.dispose()
    assert run(theirs.ledger(SYNC).look(b"none")) is None
    theirs.close()


def test_a_database_that_is_not_there_is_no_server_that_is_down(postgres_url, mariadb_url):
    for url in (postgres_url, mariadb_url):
        there = parse(url)
        store = SQLStore(there.set(database="no_such").render_as_string(hide_password=False))
        with pytest.raises(SettingsError, match="there is no database"):
            run(store.ledger(SYNC).look(b"none"))
        store.close()


def test_init_and_upgrade_can_be_repeated(url):
    assert init(url).ok
    assert init(url).ok
    assert upgrade(url).ok


def test_the_published_statements_make_what_check_wants(url, execute):
    for statement in ddl(parse(url).drivername):
        execute(statement)
    assert check(url).problems == ()


def test_check_names_every_missing_and_odd_thing(url, execute):
    init(url)
    execute("ALTER TABLE idempotency DROP COLUMN steps")
    execute("ALTER TABLE idempotency ADD COLUMN mine INTEGER NOT NULL DEFAULT 1")
    on = " ON idempotency" if "mysql" in url or "mariadb" in url else ""
    execute(f"DROP INDEX ix_idempotency_tenant{on}")
    execute("UPDATE semel_schema SET version = 7")
    found = str(check(url))
    assert "column idempotency.steps is missing" in found
    assert "ix_idempotency_tenant is missing" in found
    assert "ledger: schema version 7 is newer" in found
    assert "outbox: schema version 7 is newer" in found
    assert "mine" not in found


def test_check_names_a_column_of_another_type_and_an_index_elsewhere(postgres_url):
    init(postgres_url)
    engine = open_engine(parse(postgres_url))
    with engine.connect() as connection:
        connection.exec_driver_sql("ALTER TABLE idempotency ALTER COLUMN fence TYPE integer")
        connection.exec_driver_sql("ALTER TABLE idempotency ALTER COLUMN fence DROP NOT NULL")
        connection.exec_driver_sql("ALTER TABLE idempotency ADD COLUMN mine integer NOT NULL")
        connection.exec_driver_sql("DROP INDEX ix_idempotency_expires")
        connection.exec_driver_sql("CREATE INDEX ix_idempotency_expires ON idempotency (fence)")
    engine.dispose()
    found = check(postgres_url).problems
    assert "column idempotency.fence is INTEGER, wanted BIGINT" in found
    assert "column idempotency.fence is to be NOT NULL" in found
    assert any("column idempotency.mine is not ours" in problem for problem in found)
    assert any("ix_idempotency_expires is on ['fence']" in problem for problem in found)


# --- rows of other programs ---------------------------------------------------------------------


ID = "11" * 32
ROW = (
    "INSERT INTO idempotency (id, idempotency_key, tenant_id, operation) "
    "VALUES ({}, 'order-1', 'shop', 'CreateOrder')"
)


def row_of_another_program(url, execute):
    """A row with the columns that have no default, and the ledger's record of it."""
    literal = f"decode('{ID}', 'hex')" if url.startswith("postgresql") else f"x'{ID}'"
    execute(ROW.format(literal))
    store = SQLStore(url)
    record = run(store.ledger(SYNC).look(bytes.fromhex(ID)))
    store.close()
    return record


def status_of(url):
    engine = open_engine(parse(url))
    with engine.connect() as connection:
        status = connection.exec_driver_sql("SELECT status_code FROM idempotency").scalar_one()
    engine.dispose()
    return status


def defaults_of(url):
    engine = open_engine(parse(url))
    columns = sa.inspect(engine).get_columns("idempotency")
    engine.dispose()
    return {column["name"]: column["default"] for column in columns if column["default"]}


def test_row_of_another_program_is_a_pending_record_with_the_default_lease(url, execute):
    init(url)
    record = row_of_another_program(url, execute)
    assert record.state == State.PENDING
    assert (record.key.text, record.key.tenant, record.number) == ("order-1", "shop", 1)
    assert abs(record.seen_at - record.created_at) < timedelta(minutes=1)
    assert record.created_at == record.started_at
    assert record.lease_until - record.created_at == timedelta(seconds=30)
    assert status_of(url) == 200


def test_row_of_the_ledger_has_no_status_before_it_is_completed(url):
    init(url)
    store = SQLStore(url)
    claim = store.ledger(SYNC).claim(make_key("k"), attempt=new_attempt(), terms=Terms(lease_s=60))
    run(claim)
    store.close()
    assert status_of(url) is None


def test_first_ledger_is_told_so_and_upgraded_to_have_defaults(url, execute):
    init(url)
    new = defaults_of(url)
    assert {"status_code", "state", "created_at", "started_at", "lease_until"} < new.keys()
    if url.startswith("sqlite"):  # which cannot alter a column: the page says so
        return
    execute(
        "ALTER TABLE idempotency "
        + ", ".join(f"ALTER COLUMN {column} DROP DEFAULT" for column in new)
    )
    execute("UPDATE semel_schema SET version = 1 WHERE part = 'ledger'")
    assert not defaults_of(url)
    assert (
        "ledger: schema version is 1, wanted 2; run `semel db upgrade URL`" in check(url).problems
    )
    assert upgrade(url).problems == ()
    assert defaults_of(url) == new
    assert row_of_another_program(url, execute).state == State.PENDING


@pytest.mark.parametrize("database", ["postgresql", "mysql"])
def test_response_that_another_program_recorded_is_found_by_its_documented_id(request, database):
    url = request.getfixturevalue({"postgresql": "postgres_url", "mysql": "mariadb_url"}[database])
    init(url)
    marked = rf"<!-- name: id-{database} -->\n```sql\n(.*?)```"
    [block] = re.findall(marked, DOCS.read_text(), re.DOTALL)
    engine = sa.create_engine(with_driver(parse(url), "sync"))
    with Session(engine) as session:
        connection = session.connection()
        for statement in (*block.strip().split("\n\n"), "DROP FUNCTION semel_id"):
            connection.exec_driver_sql(statement)
        session.commit()
        idempotency = SqlAlchemyIdempotency(session, tenant_id="shop")
        found = idempotency.get_response("order-1")
        assert (found.response, found.status_code) == ({"number": 1}, 201)
        with pytest.raises(DuplicateExecutionError) as caught:
            idempotency.lock(idempotency_key="order-1", operation="CreateOrder")
        assert caught.value.result.response == {"number": 1}
        with pytest.raises(IdempotencyConflictError):
            idempotency.lock(idempotency_key="order-1", operation="Refund")
    engine.dispose()


# --- the outbox ---------------------------------------------------------------------------------


def older(url, execute):
    """A database as the release before the outbox made it."""
    init(url)
    for table in OUTBOX_TABLES:
        execute(f"DROP TABLE {table.name}")
    execute("DELETE FROM semel_schema WHERE part = 'outbox'")


def first_outbox(url, execute):
    """A database as the first version of the outbox made it, with an event in it."""
    init(url)
    if not url.startswith(("postgresql", "sqlite")):
        execute("ALTER TABLE event_outbox DROP COLUMN position")
    execute("CREATE INDEX ix_event_outbox_shard ON event_outbox (shard, id)")
    execute("DROP TABLE event_outbox_cursor")
    execute("DROP TABLE event_outbox_mark")
    execute("UPDATE semel_schema SET version = 1 WHERE part = 'outbox'")
    names = "shard, tenant_id, topic, aggregate_type, aggregate_id, event_id, event_type, payload"
    execute(
        f"INSERT INTO event_outbox ({names}, created_at) "
        "VALUES (7, '', 't', 'order', '1', 'e-1', 'placed', '{}', '2026-01-01 00:00:00')"
    )


def test_a_database_without_the_outbox_is_told_so_and_upgraded(url, execute):
    older(url, execute)
    found = check(url)
    assert found.version == 2
    assert found.problems == (
        "outbox: schema version is 0, wanted 2; run `semel db upgrade URL`",
        *(f"table {table.name} is missing" for table in OUTBOX_TABLES),
    )
    assert upgrade(url).problems == ()
    assert check(url).problems == ()


@pytest.mark.parametrize("halfway", [False, True])
def test_the_first_outbox_is_told_so_and_upgraded_with_what_is_in_it(url, execute, halfway):
    first_outbox(url, execute)
    found = check(url).problems
    assert "outbox: schema version is 1, wanted 2; run `semel db upgrade URL`" in found
    assert "table event_outbox_cursor is missing" in found
    assert "table event_outbox_mark is missing" in found
    if url.startswith(("mysql", "mariadb")):
        assert "column event_outbox.position is missing: BIGINT" in found
        assert any("ux_event_outbox_position is missing" in problem for problem in found)
    if halfway:  # killed between its last statement and the mark
        upgrade(url)
        execute("UPDATE semel_schema SET version = 1 WHERE part = 'outbox'")
    assert upgrade(url).problems == ()
    engine = open_engine(parse(url))
    indexes = {index["name"] for index in sa.inspect(engine).get_indexes("event_outbox")}
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT event_id FROM event_outbox").all()
    engine.dispose()
    assert "ix_event_outbox_shard" not in indexes
    assert rows == [("e-1",)]


def test_check_misses_what_readers_of_the_outbox_need(url, execute):
    init(url)
    execute("ALTER TABLE event_outbox_cursor DROP COLUMN fence")
    execute("DROP TABLE event_outbox_mark")
    found = "\n".join(check(url).problems)
    assert "column event_outbox_cursor.fence is missing" in found
    assert "event_outbox_mark was made and is gone" in found


def test_a_table_that_is_gone_is_not_promised_by_upgrade(url, execute):
    init(url)
    execute("DROP TABLE event_outbox_seq")
    [problem] = upgrade(url).problems
    assert "event_outbox_seq was made and is gone" in problem
    execute("DELETE FROM semel_schema WHERE part = 'outbox'")
    assert init(url).ok


def test_check_wants_events_to_be_unique(url, execute):
    init(url)
    on = " ON event_outbox" if "mysql" in url or "mariadb" in url else ""
    execute(f"DROP INDEX ux_event_outbox_event{on}")
    execute("CREATE INDEX ux_event_outbox_event ON event_outbox (event_id)")
    assert check(url).problems == ("index ux_event_outbox_event is to be unique",)


def test_check_wants_ids_one_by_one_on_postgresql(postgres_url):
    init(postgres_url)
    engine = open_engine(parse(postgres_url))
    with engine.connect() as connection:
        for option in ("CACHE 20", "CACHE 1 INCREMENT BY 2", "INCREMENT BY 1 CYCLE"):
            connection.exec_driver_sql(f"ALTER SEQUENCE event_outbox_id_seq {option}")
            [problem] = check(postgres_url).problems
            assert "is to be CACHE 1 INCREMENT BY 1 NO CYCLE" in problem
        connection.exec_driver_sql("ALTER SEQUENCE event_outbox_id_seq NO CYCLE")
        assert check(postgres_url).ok
        connection.exec_driver_sql("ALTER SEQUENCE event_outbox_id_seq RENAME TO mine")
        [problem] = check(postgres_url).problems
        assert "sequence event_outbox_id_seq is missing" in problem
    engine.dispose()


@pytest.mark.parametrize("url", ["mariadb", "sqlite"], indirect=True)
def test_check_wants_ids_that_are_never_given_out_again(url, execute):
    init(url)
    if url.startswith("sqlite"):
        execute("DROP TABLE event_outbox")
        for statement in ddl("sqlite"):
            if "event_outbox " in statement:
                execute(statement.replace("AUTOINCREMENT", ""))
    else:
        execute("ALTER TABLE event_outbox MODIFY id BIGINT NOT NULL")
    [problem] = check(url).problems
    assert "event_outbox.id is to be AUTO" in problem


def test_an_engine_will_do_in_place_of_a_url(url, tmp_path):
    sync = sa.create_engine(open_engine(parse(url)).url)
    assert init(sync).ok
    assert check(sync).ok
    sync.dispose()
    if url.startswith("sqlite"):
        assert check(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/ledger.db")).ok


def test_a_store_without_its_table_says_what_to_do(url):
    store = SQLStore(url)
    with pytest.raises(SettingsError, match="semel db init"):
        run(store.ledger(SYNC).look(b"0" * 32))
    store.close()


def test_a_server_that_is_not_there_is_unavailable():
    with pytest.raises(StoreUnavailableError):
        check("postgresql://nobody@127.0.0.1:1/x")
    with pytest.raises(StoreUnavailableError):
        init("mysql://nobody@127.0.0.1:1/x")


def with_statements(page: str) -> str:
    """The page with each of its SQL blocks replaced by what is really run."""
    titles = {"PostgreSQL": "postgresql", "MariaDB and MySQL": "mysql", "SQLite": "sqlite"}
    for title, name in titles.items():
        statements = ";\n\n".join(ddl(name))
        block = f"## {title}\n\n```sql\n{statements};\n```\n"
        pattern = rf"## {re.escape(title)}\n\n```sql\n.*?```\n"
        page, found = re.subn(pattern, lambda _, block=block: block, page, flags=re.DOTALL)
        assert found == 1, title
    return page


def test_the_page_shows_the_statements_that_are_run():
    page = DOCS.read_text()
    assert page == with_statements(page), "run: python tests/unit/test_sql_schema.py"


def test_the_page_names_every_column():
    page = DOCS.read_text()
    columns = {c.name for part in PARTS for table in part.tables for c in table.columns}
    assert [name for name in columns if f"`{name}`" not in page] == []


if __name__ == "__main__":
    DOCS.write_text(with_statements(DOCS.read_text()))
