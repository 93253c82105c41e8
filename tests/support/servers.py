"""Private real servers: Redis and Valkey in all their forms, PostgreSQL, MariaDB, NATS, RabbitMQ.

Every server listens on 127.0.0.1 only, on a port of its own, with its data in a folder of its
own, and belongs to the process that started it. Settings are the fast ones that still keep every
acknowledged write through a SIGKILL. None of this says anything about power loss.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from support import binaries
from support.binaries import Binary
from support.process import (
    HOST,
    Identity,
    ServerProcess,
    free_port,
    new_folder,
    not_root,
    wait_until,
    works,
)

# --- Redis and Valkey ---------------------------------------------------------------------------

SENTINEL_NAME = "mm"
SLOTS = 16_384


class RedisServer(ServerProcess):
    """One Redis-like server, or a sentinel, which speaks the same protocol."""

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def probe(self) -> None:
        command(self.port, "PING")

    def empty(self) -> None:
        """Forget every key and every loaded script."""
        try:
            command(self.port, "FLUSHALL")
        except RuntimeError:  # a test left a password or a master behind; a restart forgets both
            self.restart()
            command(self.port, "FLUSHALL")
        command(self.port, "SCRIPT", "FLUSH")


def start_redis(binary: Binary | None = None, *settings: str) -> RedisServer:
    """A single server. `settings` are further words for its command line."""
    binary = binary or binaries.find("redis")
    folder, port = new_folder(binary.kind), free_port()
    words = [
        *("--port", str(port), "--bind", HOST, "--dir", str(folder), "--daemonize", "no"),
        *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
        *("--repl-diskless-sync-delay", "0"),  # a replica is in step after 0.1 s instead of 5
        *settings,
    ]
    return RedisServer(binary, words, port, folder).start()


def command(port: int, *words: str | int, timeout_s: float = 5.0) -> Any:
    """One command to one Redis-like server, without a driver, its pool or its retries."""
    encoded = [str(word).encode() for word in words]
    request = b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(w), w) for w in encoded)
    with socket.create_connection((HOST, port), timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.sendall(request)
        with connection.makefile("rb") as replies:
            return _read_reply(replies.readline, replies.read)


def replication(server: RedisServer) -> dict[str, str]:
    """What a server says of who copies whom, and how far."""
    lines = command(server.port, "INFO", "replication").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _read_reply(line: Callable[[], bytes], read: Callable[[int], bytes]) -> Any:
    head = line()
    if not head:
        raise ConnectionError("the server closed the connection")
    kind, rest = head[:1], head[1:-2].decode()
    if kind == b"-":
        raise RuntimeError(rest)
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == "-1" else read(int(rest) + 2)[:-2].decode()
    if kind == b"*":
        return [_read_reply(line, read) for _ in range(int(rest))]
    return rest


# --- Redis Cluster ------------------------------------------------------------------------------


@dataclass
class RedisCluster:
    """Masters that share the slots, without replicas: a killed one is missed until it restarts."""

    nodes: list[RedisServer]

    @property
    def url(self) -> str:
        return f"redis+cluster://{HOST}:{self.nodes[0].port}"

    def ensure_running(self) -> None:
        for node in self.nodes:
            node.ensure_running()
        wait_until(self._whole, "the cluster to cover all slots")

    def empty(self) -> None:
        for node in self.nodes:
            node.empty()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def _whole(self) -> bool:
        known = f"cluster_known_nodes:{len(self.nodes)}\r\n"
        answers = [command(node.port, "CLUSTER", "INFO") for node in self.nodes]
        return all("cluster_state:ok\r\n" in answer and known in answer for answer in answers)


def start_redis_cluster(binary: Binary | None = None, *, masters: int = 3) -> RedisCluster:
    """A cluster, joined over the protocol. It takes 2 s: Redis waits that long before it serves."""
    cluster_mode = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000")
    cluster = RedisCluster([])
    try:
        for _ in range(masters):
            cluster.nodes.append(start_redis(binary, *cluster_mode))
        _join(cluster)
        cluster.ensure_running()
    except BaseException:
        cluster.stop()
        raise
    return cluster


def _join(cluster: RedisCluster) -> None:
    ports = [node.port for node in cluster.nodes]
    for index, port in enumerate(ports):
        first, end = (SLOTS * bound // len(ports) for bound in (index, index + 1))
        command(port, "CLUSTER", "ADDSLOTS", *range(first, end))
        command(port, "CLUSTER", "SET-CONFIG-EPOCH", index + 1)
    for port in ports[1:]:
        command(ports[0], "CLUSTER", "MEET", HOST, port)


# --- Redis Sentinel -----------------------------------------------------------------------------


@dataclass
class RedisSentinel:
    """Two data servers, one copying the other, and three sentinels that choose the master."""

    data: list[RedisServer]
    sentinels: list[RedisServer]

    @property
    def url(self) -> str:
        addresses = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{addresses}/{SENTINEL_NAME}"

    @property
    def master(self) -> RedisServer:
        """The server the sentinels call master just now."""
        words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SENTINEL_NAME)
        _, port = command(self.sentinels[0].port, *words)
        return next(server for server in self.data if server.port == int(port))

    @property
    def replica(self) -> RedisServer:
        """The other one."""
        master = self.master
        return next(server for server in self.data if server is not master)

    def ensure_running(self) -> None:
        for server in self.data:
            server.ensure_running()
        for sentinel in self.sentinels:
            sentinel.ensure_running()
            _look_often(sentinel)
        wait_until(self._agreed, "the sentinels to agree on a master")
        # The sentinels would get round to this too, some ten seconds later.
        command(self.replica.port, "REPLICAOF", HOST, self.master.port)
        wait_until(self._in_step, "the replica to be in step, and the sentinels to know it")

    def empty(self) -> None:
        self.master.empty()

    def stop(self) -> None:
        for sentinel in self.sentinels:
            sentinel.stop()
        for server in self.data:
            server.stop()

    def _agreed(self) -> bool:
        try:
            return len({self._view(sentinel) for sentinel in self.sentinels}) == 1
        except (OSError, _NotYet):
            return False

    def _view(self, sentinel: RedisServer) -> str:
        """The master's port as one sentinel sees it, once it sees everybody and no trouble."""
        answer = command(sentinel.port, "SENTINEL", "MASTER", SENTINEL_NAME)
        state = dict(zip(answer[::2], answer[1::2], strict=True))
        everybody = (str(len(self.sentinels) - 1), str(len(self.data) - 1))
        if (state["num-other-sentinels"], state["num-slaves"]) != everybody:
            raise _NotYet
        if state["flags"] != "master":
            raise _NotYet
        return str(state["port"])

    def _in_step(self) -> bool:
        replication = command(self.replica.port, "INFO", "replication")
        to_master = f"master_port:{self.master.port}\r\n"
        followed = "master_link_status:up\r\n" in replication and to_master in replication
        return followed and all(map(self._would_promote, self.sentinels))

    def _would_promote(self, sentinel: RedisServer) -> bool:
        """Does this sentinel know a replica that could be the next master?"""
        (answer,) = command(sentinel.port, "SENTINEL", "REPLICAS", SENTINEL_NAME)
        state = dict(zip(answer[::2], answer[1::2], strict=True))
        at_master = state["master-port"] == str(self.master.port)
        return at_master and (state["flags"], state["master-link-status"]) == ("slave", "ok")


def _look_often(sentinel: RedisServer) -> None:
    """Its servers are asked every ten seconds by default, and a failover needs fresher news.

    Redis 6.2 has no such command. There a set is ready ten seconds later, and a failover still
    comes: a sentinel asks every second once the master is down.
    """
    try:
        command(sentinel.port, "SENTINEL", "DEBUG", "INFO-PERIOD", 500)
    except RuntimeError as refusal:
        if "unknown" not in str(refusal).lower():
            raise


class _NotYet(Exception):  # noqa: N818 - not an error
    """The sentinels are still finding each other."""


def start_redis_sentinel(binary: Binary | None = None) -> RedisSentinel:
    """A master, a replica and three sentinels, which fail over some three seconds after a crash."""
    binary = binary or binaries.find("redis")
    group = RedisSentinel([], [])
    try:
        group.data.append(start_redis(binary))
        port = group.data[0].port
        group.data.append(start_redis(binary, "--replicaof", HOST, str(port)))
        for _ in range(3):
            group.sentinels.append(_start_sentinel(binary, master_port=port))
        group.ensure_running()
    except BaseException:
        group.stop()
        raise
    return group


def _start_sentinel(binary: Binary, *, master_port: int) -> RedisServer:
    folder, port = new_folder("sentinel"), free_port()
    settings = folder / "sentinel.conf"
    settings.write_text(
        f"port {port}\n"
        f"bind {HOST}\n"
        f"dir {folder}\n"
        # A sentinel reconnects at most once a second. With less patience than that, it takes a
        # new master it has not reached yet for a dead one, and the two roles swap for ever.
        f"sentinel monitor {SENTINEL_NAME} {HOST} {master_port} 2\n"
        f"sentinel down-after-milliseconds {SENTINEL_NAME} 1500\n"
        f"sentinel failover-timeout {SENTINEL_NAME} 3000\n"
    )
    return RedisServer(binary, [str(settings), "--sentinel"], port, folder).start()


# --- PostgreSQL ---------------------------------------------------------------------------------

POSTGRES_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",  # socket paths are limited to 107 bytes; TCP is not
    "fsync": "off",  # the page cache outlives a killed process
    "full_page_writes": "off",
    "synchronous_commit": "on",  # off loses acknowledged commits on SIGKILL
    "dynamic_shared_memory_type": "mmap",  # else every kill leaves a segment behind in /dev/shm
    "max_connections": "200",
    "shared_buffers": "64MB",
    "log_min_messages": "warning",
}


class PostgresServer(ServerProcess):
    """One PostgreSQL cluster; the superuser is `postgres`, trusted from here."""

    stop_signal = signal.SIGINT  # "fast": does not wait for clients to leave

    def probe(self) -> None:
        import psycopg

        psycopg.connect(self.url(), connect_timeout=2).close()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/{database}"

    def execute(self, statement: str) -> None:
        """One statement outside any transaction, as CREATE DATABASE demands."""
        import psycopg

        with psycopg.connect(self.url(), autocommit=True, connect_timeout=10) as connection:
            connection.execute(statement.encode())

    def create_database(self, name: str, options: str = "") -> None:
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY file_copy {options}")

    def drop_database(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def start_postgres(binary: Binary | None = None) -> PostgresServer:
    binary = binary or binaries.find("postgres")
    folder, port, identity = new_folder("postgres"), free_port(), not_root()
    if identity.uid is not None:
        os.chown(folder, identity.uid, identity.uid)
        binary = _reachable(binary, identity)
    data = folder / "data"
    _run(
        binary.path.parent / "initdb",
        *("-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8"),
        *("--no-locale", "--no-sync", "--no-instructions"),
        env=binary.environment(),
        identity=identity,
    )
    settings = POSTGRES_SETTINGS | {"port": str(port)}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    words = ["-D", str(data), *options]
    return PostgresServer(binary, words, port, folder, identity).start()


def _reachable(binary: Binary, identity: Identity) -> Binary:
    """The same program where nobody can reach it: a wheel under /root is behind a closed door."""
    if works([str(binary.path), "--version"], env=binary.environment(), **identity.popen):
        return binary
    package = binary.path.parents[2]
    copies = Path(tempfile.gettempdir()) / f"semel-postgres-{binary.path.stat().st_mtime_ns}"
    if not copies.exists():
        parts = Path(tempfile.mkdtemp(dir=copies.parent))
        parts.chmod(0o755)
        for part in (package, package.with_name(f"{package.name}.libs")):
            if part.exists():
                shutil.copytree(part, parts / part.name, symlinks=True)
        parts.rename(copies)
    path = copies / binary.path.relative_to(package.parent)
    return Binary(binary.kind, path, binary.source)


# --- PgBouncer ----------------------------------------------------------------------------------


@dataclass
class PgBouncerServer(ServerProcess):
    """A connection pooler in front of a PostgreSQL server, which its databases belong to."""

    postgres: PostgresServer = field(kw_only=True)

    def probe(self) -> None:
        import psycopg

        psycopg.connect(self.url(), connect_timeout=2).close()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/{database}"

    def ensure_running(self) -> None:
        self.postgres.ensure_running()
        super().ensure_running()

    def create_database(self, name: str, options: str = "") -> None:
        self.postgres.create_database(name, options)

    def drop_database(self, name: str) -> None:
        self.postgres.drop_database(name)


def start_pgbouncer(
    postgres: PostgresServer, mode: str = "transaction", pool: int = 4
) -> PgBouncerServer:
    """Start a pooler that opens at most `pool` server connections per database."""
    binary = binaries.find("pgbouncer")
    folder, port = new_folder("pgbouncer"), free_port()
    user = "user = nobody\n" if os.geteuid() == 0 else ""  # it refuses to run as root
    settings = folder / "pgbouncer.ini"
    settings.write_text(
        f"[databases]\n"
        f"* = host={HOST} port={postgres.port} user=postgres\n"
        f"[pgbouncer]\n"
        f"listen_addr = {HOST}\n"
        f"listen_port = {port}\n"
        f"unix_socket_dir =\n"
        f"auth_type = any\n"
        f"pool_mode = {mode}\n"
        f"default_pool_size = {pool}\n"
        f"max_client_conn = 500\n"
        f"query_wait_timeout = 60\n"
        f"log_connections = 0\n"
        f"log_disconnections = 0\n"
        f"{user}"
    )
    _pooled_ports.add(port)
    return PgBouncerServer(binary, [str(settings)], port, folder, postgres=postgres).start()


_pooled_ports: set[int] = set()


def driver_settings(url: str) -> dict[str, Any]:
    """What an application gives to the driver of its engine, as our pages tell it to."""
    if url.startswith("sqlite"):
        return {"timeout": 60}
    if urlsplit(url).port in _pooled_ports:
        return {"prepare_threshold": None}
    return {}


# --- MariaDB ------------------------------------------------------------------------------------


class MariaDBServer(ServerProcess):
    """One MariaDB server; `root` needs no password from here."""

    def probe(self) -> None:
        import pymysql

        pymysql.connect(host=HOST, port=self.port, user="root", connect_timeout=2).close()

    def url(self, database: str = "mysql") -> str:
        return f"mysql://root@{HOST}:{self.port}/{database}"

    def execute(self, statement: str) -> None:
        """One statement on a connection of its own."""
        import pymysql

        with (
            pymysql.connect(host=HOST, port=self.port, user="root") as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)

    def create_database(self, name: str, options: str = "") -> None:
        self.execute(f"CREATE DATABASE {name} {options}")

    def drop_database(self, name: str) -> None:
        self._end_connections(name)
        self.execute(f"DROP DATABASE IF EXISTS {name}")

    def _end_connections(self, database: str) -> None:
        """A transaction left open would hold DROP DATABASE up; PostgreSQL has FORCE for this."""
        import pymysql

        with (
            pymysql.connect(host=HOST, port=self.port, user="root") as connection,
            connection.cursor() as cursor,
        ):
            query = "SELECT id FROM information_schema.processlist WHERE db = %s"
            cursor.execute(query, (database,))
            for (number,) in cursor.fetchall():
                _ignoring_absent(cursor, f"KILL {number:d}")


def _ignoring_absent(cursor: Any, statement: str) -> None:
    import pymysql

    try:
        cursor.execute(statement)
    except pymysql.err.OperationalError as error:
        if error.args[0] != 1094:  # unknown thread id: it has just left by itself
            raise


def start_mariadb(binary: Binary | None = None) -> MariaDBServer:
    binary = binary or binaries.find("mariadb")
    folder, port = new_folder("mariadb"), free_port()
    base = binary.path.resolve().parent.parent
    ours = [
        "--no-defaults",
        f"--basedir={base}",
        f"--datadir={folder / 'data'}",
        *(["--user=root"] if os.geteuid() == 0 else []),  # it runs as root only when told to
    ]
    _run(
        base / "bin" / "mariadb-install-db",
        *ours,
        *("--skip-test-db", "--auth-root-authentication-method=normal"),
        env=binary.environment(),
    )
    settings = [
        f"--port={port}",
        f"--bind-address={HOST}",
        f"--socket={folder / 'socket'}",
        f"--pid-file={folder / 'pid'}",
        f"--tmpdir={folder}",
        "--skip-name-resolve",
        "--innodb-flush-log-at-trx-commit=2",  # written at commit: outlives a SIGKILL
        "--sync-binlog=0",
        "--innodb-buffer-pool-size=64M",
        "--character-set-server=utf8mb4",
        "--max-connections=300",
        *_mariadb_share(base),
    ]
    return MariaDBServer(binary, [*ours, *settings], port, folder).start()


def _mariadb_share(base: Path) -> Iterator[str]:
    """The paths compiled into an unpacked Debian package point to where it was not installed."""
    share = base / "share" / "mysql"
    if share.exists():
        yield f"--lc-messages-dir={share}"
        yield f"--character-sets-dir={share / 'charsets'}"
        yield f"--plugin-dir={base / 'lib' / 'mysql' / 'plugin'}"


# --- NATS ---------------------------------------------------------------------------------------


class NatsServer(ServerProcess):
    """One NATS server with JetStream, which keeps its streams in files."""

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    def probe(self) -> None:
        """A server greets, and answers a PING once it can serve."""
        with socket.create_connection((HOST, self.port), 1) as connection:
            connection.settimeout(1)
            connection.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
            with connection.makefile("rb") as answers:
                if not answers.readline().startswith(b"INFO ") or answers.readline() != b"PONG\r\n":
                    raise ConnectionError("it does not serve yet")

    def empty(self) -> None:
        """Forget every stream. A fresh start takes less time than asking for each."""
        self.kill()
        shutil.rmtree(self.folder / "streams", ignore_errors=True)
        self.start()


def start_nats(binary: Binary | None = None, *settings: str) -> NatsServer:
    """A single server. `settings` are further words for its command line."""
    binary = binary or binaries.find("nats")
    folder, port = new_folder("nats"), free_port()
    words = [
        *("--addr", HOST, "--port", str(port)),
        *("--jetstream", "--store_dir", str(folder / "streams")),
        *settings,
    ]
    return NatsServer(binary, words, port, folder).start()


# --- RabbitMQ -----------------------------------------------------------------------------------


RABBIT_TAKES = 4 * 1024 * 1024
"""The largest message, in bytes; by default it is too large for a test."""


class PortMapper(ServerProcess):
    """Erlang's register of nodes.

    A node would start one by itself, as a daemon that outlives everybody. This one is ours.
    """

    def probe(self) -> None:
        socket.create_connection((HOST, self.port), 1).close()


@dataclass
class RabbitServer(ServerProcess):
    """One RabbitMQ node; `guest` may do everything from here. It takes six seconds to start."""

    mapper: PortMapper = field(kw_only=True)
    node_port: int = field(kw_only=True, default_factory=free_port)

    def url(self, vhost: str = "%2F") -> str:
        return f"amqp://guest:guest@{HOST}:{self.port}/{vhost}"

    def probe(self) -> None:
        """Speak first, and in its words: it logs whoever connects and says nothing."""
        with socket.create_connection((HOST, self.port), 1) as connection:
            connection.settimeout(1)
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            if not connection.recv(1):
                raise ConnectionError("it does not serve yet")

    def start(self) -> Self:
        self.mapper.ensure_running()
        return super().start()

    def stop(self) -> None:
        super().stop()
        self.mapper.stop()

    def environment(self) -> dict[str, str]:
        own, env = self.folder, self.mapper.environment()
        return env | {
            "PATH": f"{self.mapper.binary.path.parent}{os.pathsep}{env['PATH']}",  # of Erlang
            "HOME": str(own),  # of the cookie
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self.mapper.port),
            "ERL_CRASH_DUMP": os.devnull,
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self.node_port),
            "RABBITMQ_CONFIG_FILE": str(own / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(own / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(own / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(own / "plugins"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(own / "feature_flags"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(own / "generated"),
            "RABBITMQ_MNESIA_BASE": str(own / "data"),
            "RABBITMQ_LOG_BASE": str(own / "log"),
            "RABBITMQ_PID_FILE": str(own / "pid"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none",  # no thread that spins
            "RUNNING_UNDER_SYSTEMD": "true",  # the script becomes the node, so that its pid is ours
        }

    @property
    def node(self) -> str:
        return f"semel{self.port}@localhost"

    def create_database(self, name: str) -> None:
        """A virtual host: exchanges and queues of its own."""
        everything = '<<".*">>, <<".*">>, <<".*">>'
        self._call(
            f'rabbit_vhost:add(<<"{name}">>, <<"guest">>), '
            f"rabbit_auth_backend_internal:set_permissions("
            f'<<"guest">>, <<"{name}">>, {everything}, <<"guest">>).'
        )

    def drop_database(self, name: str) -> None:
        self._call(f'rabbit_vhost:delete(<<"{name}">>, <<"guest">>).')

    def _call(self, expression: str) -> None:
        """Inside the node. `rabbitmqctl` does the same, and starts an Erlang of its own first."""
        cookie = (self.folder / ".erlang.cookie").read_text().strip()
        answer = subprocess.run(
            [self.mapper.binary.path.with_name("erl_call"), "-e", "-n", self.node, "-c", cookie],
            input=f"{expression}\n",
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if not answer.stdout.startswith("{ok, ok}"):
            raise RuntimeError(f"{expression} failed:\n{answer.stdout}{answer.stderr}")


def start_rabbitmq(binary: Binary | None = None) -> RabbitServer:
    binary = binary or binaries.find("rabbitmq")
    folder, port = new_folder("rabbitmq"), free_port()
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = {HOST}:{port}\n"
        f"distribution.listener.interface = {HOST}\n"
        f"log.console = true\n"
        f"log.console.level = warning\n"
        f"disk_free_limit.absolute = 10MB\n"
        f"vm_memory_high_watermark.absolute = 512MB\n"
        f"max_message_size = {RABBIT_TAKES}\n"
    )
    (folder / "plugins").write_text("[].\n")
    server = RabbitServer(binary, [], port, folder, mapper=_port_mapper(binary))
    try:
        return server.start()
    except BaseException:
        server.stop()
        raise


def _port_mapper(binary: Binary) -> PortMapper:
    port = free_port()
    program = Binary("epmd", _erlang(binary) / "epmd", binary.source)
    return PortMapper(program, ["-port", str(port), "-address", HOST], port, new_folder("epmd"))


def _erlang(binary: Binary) -> Path:
    """Where its Erlang has its programs."""
    unpacked = binaries.DEB_ROOT / "usr/lib/erlang/bin"
    if binary.source == "deb" and unpacked.exists():
        return unpacked
    found = shutil.which("erl")
    if found is None:
        raise binaries.Unavailable("rabbitmq: there is no Erlang on PATH")
    root = subprocess.run(
        [found, "-noshell", "-eval", "io:put_chars(code:root_dir()), halt()."],
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(root.stdout.strip()) / "bin"


def _run(
    program: Path, *words: str, env: Mapping[str, str], identity: Identity | None = None
) -> None:
    """A set-up step that must succeed; its last words are the error."""
    identity = identity or Identity()
    done = subprocess.run(
        [*identity.prefix, str(program), *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        **identity.popen,
    )
    if done.returncode:
        raise RuntimeError(f"{program.name} failed:\n{(done.stdout + done.stderr)[-1500:]}")
