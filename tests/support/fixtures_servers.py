"""Fixtures for real servers, each started when the first test asks for it.

A test takes a URL (`redis_url`, `postgres_url` ...) and gets an empty store on a running server.
A test that wants to hurt the server takes the server too (`redis_server.kill()`); whatever
it did is undone before the next test. Servers belong to one pytest worker, so tests never share.

    SEMEL_TEST_REQUIRE=redis,postgres    a server that is missing ends the run
    --engines=all                        redis_url and postgres_url once per version found
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import pytest
import sqlalchemy as sa

from semel.stores.sql import init
from semel.stores.sql.lines import open_engine, parse
from semel.stores.sql.schema import VERSIONS
from support import binaries, process, servers
from support.binaries import Binary
from support.typescript import built

if TYPE_CHECKING:
    from support.browser import Browser

REQUIRED = "SEMEL_TEST_REQUIRE"
ENGINES = "SEMEL_TEST_ENGINES"

VERSIONED = {
    "redis_server": ("redis", "valkey"),
    "redis_cluster": ("redis", "valkey"),
    "redis_sentinel": ("redis", "valkey"),
    "postgres_server": ("postgres",),
}
"""The fixtures that `--engines=all` repeats, and the kinds of server each can stand on."""

Server = TypeVar("Server")
SQLServer: TypeAlias = servers.PostgresServer | servers.PgBouncerServer | servers.MariaDBServer


# --- what is here -------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engines",
        choices=("default", "all"),
        default=os.environ.get(ENGINES, "default"),
        help="run tests on redis_url and postgres_url once for every version found",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # the controller has looked already
    process.sweep()
    required = {kind for kind in os.environ.get(REQUIRED, "").split(",") if kind}
    if unknown := required - set(binaries.KINDS):
        raise pytest.UsageError(f"{REQUIRED} names no server of ours: {', '.join(sorted(unknown))}")
    if absent := required & set(binaries.missing()):
        hints = "\n".join(f"  {kind}: {binaries.HOW_TO_GET[kind]}" for kind in sorted(absent))
        raise pytest.UsageError(f"{REQUIRED} asks for servers that are not here:\n{hints}")


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("engines") == "all":
        found = [binary for kind in binaries.KINDS for binary in binaries.engines(kind)]
    else:
        found = [binary for kind in binaries.KINDS for binary in binaries.candidates(kind)[:1]]
    return "servers: " + (", ".join(map(str, found)) or "none")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if absent := binaries.missing():
        terminalreporter.section("SERVERS NOT AVAILABLE", sep="!", red=True, bold=True)
        for kind in absent:
            terminalreporter.line(f"{kind}: its tests were skipped. {binaries.HOW_TO_GET[kind]}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.config.getoption("engines") != "all":
        return
    for fixture, kinds in VERSIONED.items():
        if fixture in metafunc.fixturenames and (found := binaries.engines(*kinds)):
            labels = [binary.label for binary in found]
            metafunc.parametrize(fixture, found, ids=labels, indirect=True, scope="session")


def _or_skip(start: Callable[[], Server]) -> Server:
    try:
        return start()
    except binaries.Unavailable as absent:
        pytest.skip(str(absent))


# --- servers, one per worker --------------------------------------------------------------------


class Engines:
    """The servers of this worker that come in several versions, each started once.

    Tests run in random order, so a fixture that stopped one version to start the next would
    spend the run on that.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[Binary, str], Any] = {}

    def get(self, binary: Binary, start: Callable[[Binary], Server]) -> Server:
        wanted = (binary, start.__name__)
        if wanted not in self._running:
            self._running[wanted] = start(binary)
        server: Server = self._running[wanted]
        return server

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    running = Engines()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def redis_server(request: pytest.FixtureRequest, engines: Engines) -> servers.RedisServer:
    """A real Redis; with `--engines=all`, every Redis and Valkey in turn."""
    return engines.get(_chosen(request, "redis"), servers.start_redis)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[servers.RedisServer]:
    server = _or_skip(lambda: servers.start_redis(binaries.find("valkey")))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def redis_cluster(request: pytest.FixtureRequest, engines: Engines) -> servers.RedisCluster:
    """Three masters, no replicas."""
    return engines.get(_chosen(request, "redis"), servers.start_redis_cluster)


@pytest.fixture(scope="session")
def redis_sentinel(request: pytest.FixtureRequest, engines: Engines) -> servers.RedisSentinel:
    """A master and a replica under three sentinels."""
    return engines.get(_chosen(request, "redis"), servers.start_redis_sentinel)


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest, engines: Engines) -> servers.PostgresServer:
    return engines.get(_chosen(request, "postgres"), servers.start_postgres)


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: servers.PostgresServer) -> Iterator[servers.PgBouncerServer]:
    """PgBouncer in transaction mode, with four server connections per database."""
    server = _or_skip(lambda: servers.start_pgbouncer(postgres_server))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[servers.MariaDBServer]:
    server = _or_skip(servers.start_mariadb)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def nats_server() -> Iterator[servers.NatsServer]:
    server = _or_skip(servers.start_nats)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[servers.RabbitServer]:
    server = _or_skip(servers.start_rabbitmq)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real Chromium. A test leaves it on a blank page, so that nothing goes on behind it."""
    from support.browser import start_browser  # half a second, for one test in thousands

    started = _or_skip(start_browser)
    yield started
    started.stop()


@pytest.fixture(scope="session")
def node() -> Binary:
    return _or_skip(lambda: binaries.find("node"))


@pytest.fixture(scope="session")
def typescript_client(node: Binary) -> Path:
    """The folder of the TypeScript client's modules."""
    return built(node)


def _chosen(request: pytest.FixtureRequest, kind: str) -> Binary:
    """The version this test is repeated for, or the first choice."""
    return getattr(request, "param", None) or _or_skip(lambda: binaries.find(kind))


# --- an empty store for one test ----------------------------------------------------------------


@pytest.fixture
def redis_url(redis_server: servers.RedisServer) -> str:
    return _emptied(redis_server)


@pytest.fixture
def valkey_url(valkey_server: servers.RedisServer) -> str:
    return _emptied(valkey_server)


@pytest.fixture
def redis_cluster_url(redis_cluster: servers.RedisCluster) -> str:
    return _emptied(redis_cluster)


@pytest.fixture
def redis_sentinel_url(redis_sentinel: servers.RedisSentinel) -> str:
    return _emptied(redis_sentinel)


@pytest.fixture
def postgres_url(postgres_server: servers.PostgresServer) -> Iterator[str]:
    yield from _database(postgres_server)


@pytest.fixture
def mariadb_url(mariadb_server: servers.MariaDBServer) -> Iterator[str]:
    yield from _database(mariadb_server)


@pytest.fixture
def postgres_tables_url(postgres_server: servers.PostgresServer, tables: Tables) -> str:
    """With our tables in it: to make them takes longer than most tests."""
    return tables.emptied(postgres_server)


@pytest.fixture
def pgbouncer_url(pgbouncer_server: servers.PgBouncerServer) -> Iterator[str]:
    yield from _database(pgbouncer_server)


@pytest.fixture
def pgbouncer_tables_url(pgbouncer_server: servers.PgBouncerServer, tables: Tables) -> str:
    return tables.emptied(pgbouncer_server)


@pytest.fixture
def mariadb_tables_url(mariadb_server: servers.MariaDBServer, tables: Tables) -> str:
    return tables.emptied(mariadb_server)


# A database in LATIN1 lacks "€"; one in SQL_ASCII stores bytes and knows no encoding.
LATIN1 = "ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'"
SQL_ASCII = "ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"


@pytest.fixture
def latin1_tables_url(postgres_server: servers.PostgresServer, tables: Tables) -> str:
    return tables.emptied(postgres_server, LATIN1)


@pytest.fixture
def sql_ascii_tables_url(postgres_server: servers.PostgresServer, tables: Tables) -> str:
    return tables.emptied(postgres_server, SQL_ASCII)


@pytest.fixture(scope="session")
def tables() -> Tables:
    return Tables()


class Tables:
    """A database with our tables per server, for tests that only put rows there."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], str] = {}

    def emptied(self, server: SQLServer, options: str = "") -> str:
        """`options` of CREATE DATABASE: there is one database for each."""
        server.ensure_running()
        place = server.port, options
        if place not in self._made:
            self._made[place] = f"tables_{uuid.uuid4().hex[:12]}"
            server.create_database(self._made[place], options)
            init(server.url(self._made[place]))
        url = server.url(self._made[place])
        engine = open_engine(parse(url))
        with engine.begin() as connection:
            for table in sorted({*sa.inspect(connection).get_table_names()} - {VERSIONS}):
                connection.exec_driver_sql(f"DELETE FROM {table}")
        return url


@pytest.fixture
def nats_url(nats_server: servers.NatsServer) -> str:
    return _emptied(nats_server)


@pytest.fixture
def rabbit_url(rabbit_server: servers.RabbitServer) -> Iterator[str]:
    yield from _database(rabbit_server)


def _emptied(
    server: servers.RedisServer | servers.RedisCluster | servers.RedisSentinel | servers.NatsServer,
) -> str:
    server.ensure_running()
    server.empty()
    return server.url


def _database(
    server: SQLServer | servers.RabbitServer,
) -> Iterator[str]:
    server.ensure_running()
    name = f"test_{uuid.uuid4().hex[:12]}"
    server.create_database(name)
    yield server.url(name)
    server.ensure_running()
    server.drop_database(name)
