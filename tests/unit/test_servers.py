"""The servers the other tests stand on: do they start, answer, crash, come back and freeze?

RabbitMQ takes seconds for each of these, so it is looked at where it is used anyway, in
contract/test_rabbit_broker.py.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import nats
import psycopg
import pymysql
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from support import binaries, process, servers

pytestmark = [pytest.mark.servers]


def impatient(port: int) -> redis.Redis:
    return redis.Redis(port=port, socket_timeout=0.3, retry=Retry(NoBackoff(), 0))


@pytest.mark.parametrize("url_fixture", ["redis_url", "valkey_url"])
def test_a_redis_keeps_what_it_acknowledged_through_a_crash(url_fixture, request):
    url = request.getfixturevalue(url_fixture)
    server = request.getfixturevalue(url_fixture.replace("url", "server"))
    with redis.Redis.from_url(url) as client:
        assert client.set("k", "v", nx=True)
        server.kill()
        with pytest.raises(redis.ConnectionError):
            impatient(server.port).get("k")
        server.restart()
        assert client.get("k") == b"v"


def test_redis_and_valkey_are_two_programs(redis_server, valkey_server):
    assert "redis_version" in servers.command(redis_server.port, "INFO", "server")
    assert "valkey_version" not in servers.command(redis_server.port, "INFO", "server")
    assert "valkey_version" in servers.command(valkey_server.port, "INFO", "server")


def test_each_redis_test_begins_empty_first(redis_url, redis_server):
    assert servers.command(redis_server.port, "DBSIZE") == 0
    servers.command(redis_server.port, "SET", "left", "over")


def test_each_redis_test_begins_empty_second(redis_url, redis_server):
    assert servers.command(redis_server.port, "DBSIZE") == 0
    servers.command(redis_server.port, "SET", "left", "over")


def test_a_paused_redis_is_silent_until_it_resumes(redis_url, redis_server):
    with impatient(redis_server.port) as client:
        assert client.ping()
        with redis_server.paused(), pytest.raises(redis.TimeoutError):
            client.ping()
        assert client.ping()


def test_ensure_running_undoes_a_pause_and_a_kill(redis_server):
    redis_server.ensure_running()
    redis_server.pause()
    redis_server.ensure_running()
    assert servers.command(redis_server.port, "PING") == "PONG"
    redis_server.kill()
    redis_server.ensure_running()
    assert servers.command(redis_server.port, "PING") == "PONG"


def test_a_password_left_behind_does_not_lock_out_the_next_test(redis_url, redis_server):
    servers.command(redis_server.port, "CONFIG", "SET", "requirepass", "forgotten")
    redis_server.empty()
    assert servers.command(redis_server.port, "DBSIZE") == 0


def test_a_server_started_by_a_thread_outlives_the_thread(redis_server):
    restarter = threading.Thread(target=redis_server.restart)
    restarter.start()
    restarter.join()
    assert servers.command(redis_server.port, "PING") == "PONG"
    assert redis_server.running


def test_a_cluster_spreads_keys_and_comes_back_whole(redis_cluster_url, redis_cluster):
    port = int(redis_cluster_url.rpartition(":")[2])
    with redis.RedisCluster(host="127.0.0.1", port=port) as client:
        for number in range(30):
            client.set(f"k{number}", number)
    sizes = [servers.command(node.port, "DBSIZE") for node in redis_cluster.nodes]
    assert sum(sizes) == 30
    assert all(sizes)
    redis_cluster.nodes[1].kill()
    redis_cluster.ensure_running()
    with redis.RedisCluster(host="127.0.0.1", port=port) as client:
        assert client.get("k7") == b"7"


@pytest.mark.slow
def test_sentinels_choose_a_new_master(redis_sentinel_url, redis_sentinel):
    places, _, name = redis_sentinel_url.removeprefix("redis+sentinel://").partition("/")
    addresses = [(host, int(port)) for host, port in (p.split(":") for p in places.split(","))]
    assert len(addresses) == 3
    assert redis.Sentinel(addresses, socket_timeout=1).discover_master(name)
    old, heir = redis_sentinel.master, redis_sentinel.replica
    servers.command(old.port, "SET", "k", "v")
    # Not WAIT: it knows only of what its own connection has written.
    process.wait_until(lambda: servers.command(heir.port, "GET", "k") == "v", "the copy")
    old.kill()
    process.wait_until(lambda: redis_sentinel.master is not old, "a new master")
    process.wait_until(lambda: _is_master(redis_sentinel.master), "the new master to serve")
    assert servers.command(redis_sentinel.master.port, "GET", "k") == "v"
    redis_sentinel.ensure_running()
    assert redis_sentinel.replica is old
    servers.command(redis_sentinel.sentinels[0].port, "SENTINEL", "FAILOVER", servers.SENTINEL_NAME)
    process.wait_until(lambda: redis_sentinel.master is old, "the old master to be master again")
    redis_sentinel.ensure_running()
    assert redis_sentinel.master is old


def _is_master(server: servers.RedisServer) -> bool:
    return servers.command(server.port, "ROLE")[0] == "master"


def test_postgres_keeps_what_it_committed_through_a_crash(postgres_url, postgres_server):
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE t (k text PRIMARY KEY)")
        connection.execute("INSERT INTO t VALUES ('a')")
    postgres_server.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(postgres_url, connect_timeout=2)
    postgres_server.restart()
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT count(*) FROM t").fetchone() == (1,)


def test_a_kill_of_postgres_leaves_no_backend_behind(postgres_url, postgres_server):
    with psycopg.connect(postgres_url) as connection:
        backend = connection.info.backend_pid
        family = process.family(postgres_server.pid)
        assert len(family) > 2
        postgres_server.kill()
        process.wait_until(lambda: not any(map(_alive, family)), "the backends to end")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert backend


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_paused_postgres_does_not_answer_open_connections(postgres_url, postgres_server):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        answered = threading.Event()

        def ask() -> None:
            connection.execute("SELECT 1")
            answered.set()

        with postgres_server.paused():
            asker = threading.Thread(target=ask)
            asker.start()
            assert not answered.wait(0.3)
        asker.join(10)
        assert answered.is_set()


@pytest.mark.parametrize("turn", [1, 2])
def test_each_postgres_test_has_a_database_of_its_own(postgres_url, turn):
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE only_here (k text)")


def test_mariadb_keeps_what_it_committed_through_a_crash(mariadb_url, mariadb_server):
    with _mariadb(mariadb_url) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE t (k varchar(99) PRIMARY KEY) ENGINE=InnoDB")
        cursor.execute("INSERT INTO t VALUES ('a')")
        connection.commit()
    mariadb_server.kill()
    with pytest.raises(pymysql.OperationalError):
        _mariadb(mariadb_url)
    mariadb_server.restart()
    with _mariadb(mariadb_url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM t")
        assert cursor.fetchone() == (1,)


def test_a_paused_mariadb_does_not_answer(mariadb_url, mariadb_server):
    with _mariadb(mariadb_url) as connection, connection.cursor() as cursor:
        with mariadb_server.paused(), pytest.raises(pymysql.OperationalError):
            _mariadb(mariadb_url, read_timeout=0.3)
        cursor.execute("SELECT 1")
        assert cursor.fetchone() == (1,)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_transaction_left_open_does_not_hold_up_the_next_test(mariadb_url, turn):
    connection = _mariadb(mariadb_url)
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE only_here (k int PRIMARY KEY) ENGINE=InnoDB")
        cursor.execute("INSERT INTO only_here VALUES (1)")
    _abandoned.append(connection)


_abandoned: list[pymysql.connections.Connection] = []


@pytest.fixture(scope="module", autouse=True)
def _close_abandoned():
    yield
    for connection in _abandoned:
        if connection.open:
            connection._force_close()


def _mariadb(url: str, **settings: float) -> pymysql.connections.Connection:
    address, _, database = url.removeprefix("mysql://root@").partition("/")
    host, _, port = address.partition(":")
    return pymysql.connect(host=host, port=int(port), user="root", database=database, **settings)


@pytest.mark.parametrize("driver", ["asyncmy", "pymysql"])
async def test_sqlalchemy_reaches_mariadb_through_both_drivers(mariadb_url, driver):
    from sqlalchemy import create_engine, text
    from sqlalchemy.ext.asyncio import create_async_engine

    url = mariadb_url.replace("mysql://", f"mysql+{driver}://")
    statement = text("SELECT 6 * :seven")
    if driver == "pymysql":
        engine = create_engine(url)
        with engine.begin() as connection:
            assert connection.scalar(statement, {"seven": 7}) == 42
        engine.dispose()
    else:
        async_engine = create_async_engine(url)
        async with async_engine.begin() as async_connection:
            assert await async_connection.scalar(statement, {"seven": 7}) == 42
        await async_engine.dispose()


async def test_nats_keeps_what_it_acknowledged_through_a_crash(nats_url, nats_server):
    client = await _nats(nats_url)
    await client.jetstream().add_stream(name="s", subjects=["s.*"])
    await client.jetstream().publish("s.1", b"kept")
    nats_server.kill()
    await client.close()
    with pytest.raises(nats.errors.NoServersError):
        await _nats(nats_url)
    nats_server.restart()
    client = await _nats(nats_url)
    assert (await client.jetstream().get_last_msg("s", "s.1")).data == b"kept"
    await client.close()


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_nats_test_begins_without_streams(nats_url, turn):
    client = await _nats(nats_url)
    assert await client.jetstream().streams_info() == []
    await client.jetstream().add_stream(name="left", subjects=["over"])
    await client.close()


async def test_a_paused_nats_is_silent_until_it_resumes(nats_url, nats_server):
    client = await _nats(nats_url)
    with nats_server.paused(), pytest.raises(nats.errors.TimeoutError):
        await client.request("$JS.API.INFO", timeout=0.3)
    await client.request("$JS.API.INFO", timeout=5)
    await client.close()


async def _nats(url: str) -> nats.aio.client.Client:
    async def quiet(error: Exception) -> None:
        """The default prints a traceback for what is raised anyway."""

    once = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0}
    return await nats.connect(url, error_cb=quiet, **once)


@pytest.mark.parametrize("kind", ["redis", "nats"])
def test_a_killed_test_run_takes_its_servers_with_it(kind):
    if not process._dies_with_us():
        pytest.skip("setpriv is not here: the kernel is not asked to end servers with us")
    script = f"from support import servers; print(servers.start_{kind}().pid, flush=True); input()"
    run = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        assert _alive(pid)
        run.kill()
    process.wait_until(lambda: not _alive(pid), "the orphaned server to end")
    process.sweep()
    for folder in process.fast_folder().glob(f"{process.FOLDER_PREFIX}*"):
        assert not (folder / "owner").read_text().startswith(f"{run.pid} ")


def test_ports_are_never_given_out_twice():
    ports = [process.free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert all(port in process.PORTS for port in ports)


def test_a_server_that_cannot_start_says_why():
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="Bad directive"):
        servers.start_redis(None, "--no-such-setting", "1")
    assert time.monotonic() - started < process.READY_WITHIN_S


def test_a_missing_server_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("SEMEL_TEST_FROM", "nowhere")
    for kind in binaries.KINDS:
        monkeypatch.delenv(f"SEMEL_TEST_{kind.upper()}_BIN", raising=False)
        with pytest.raises(binaries.Unavailable, match=f"{kind}.*make servers"):
            binaries.find(kind)


def test_servers_listen_on_this_machine_only(redis_server):
    assert process.HOST == "127.0.0.1"
    with socket.create_connection((process.HOST, redis_server.port)) as connection:
        assert connection.getpeername()[0] == "127.0.0.1"


@pytest.mark.contract
def test_every_redis_engine_runs_scripts(redis_url, redis_server):
    script = "return redis.call('INCR', KEYS[1])"
    assert servers.command(redis_server.port, "EVAL", script, 1, "k") == 1
    assert redis_server.binary.version in servers.command(redis_server.port, "INFO", "server")


@pytest.mark.contract
def test_every_postgres_is_the_version_it_says(postgres_url, postgres_server):
    with psycopg.connect(postgres_url) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    assert row
    assert row[0].startswith(postgres_server.binary.version)
