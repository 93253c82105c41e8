"""From a URL to redis-py's clients.

    redis://host:port/db    rediss:// with TLS    unix:///path/to/socket
    redis+sentinel://h1:p1,h2:p2/master-name/db
    redis+cluster://h1:p1,h2:p2

User and password go before the hosts (`redis://user:password@host`); settings of redis-py go
behind a question mark (`?health_check_interval=30`). `rediss+sentinel` and `rediss+cluster` use
TLS. The sentinels' own password is `?sentinel_password=`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.cluster
import redis.connection
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry

from semel.errors import SettingsError
from semel.stores import with_plain_scheme

driver: Any = redis  # its constructors carry no types
# As many threads as may talk to Redis at once; redis-py refuses the next one.
MAX_CONNECTIONS = 4096
SENTINEL_PORT = 26379
REDIS_PORT = 6379


@dataclass(frozen=True, slots=True)
class Address:
    """Where Redis is: how to make a client of either colour, and what kind of client that is."""

    shown: str
    is_cluster: bool
    open_sync: Callable[[], Any]
    open_async: Callable[[], Any]


def address_of(url: str, timeout_s: float) -> Address:
    url = with_plain_scheme(url)
    scheme, _, kind = _split(url).scheme.partition("+")
    settings = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    _check_query(url)
    try:
        if kind == "sentinel" and scheme in {"redis", "rediss"}:
            return _sentinel(url, settings)
        if kind == "cluster" and scheme in {"redis", "rediss"}:
            return _cluster(url, settings)
        if kind == "" and scheme in {"redis", "rediss", "unix"}:
            return _single(url, settings)
    except ValueError as error:
        raise SettingsError(f"the Redis URL {shown(url)!r} cannot be read: {error}") from error
    raise SettingsError(
        f"{shown(url)!r} is no Redis URL: write redis://host:6379/0, rediss://, unix://, "
        "redis+sentinel://host:26379,host:26379/master-name or redis+cluster://host:6379,host:6379"
    )


def _check_query(url: str) -> None:
    """Refuse what redis-py does not know: at each call it would look as if Redis were away."""
    query = _split(url).query
    for option in query.split("&") if query else ():
        name = option.partition("=")[0]
        if name not in in_a_url():
            # Behind an unquoted ? it may be a part of a password.
            told = repr(name) if name.isidentifier() else "like that"
            raise SettingsError(
                f"the URL of a Redis store has no setting {told}; it can have those of redis-py, "
                "such as health_check_interval; quote a ? in a password as %3F"
            )


def shown(url: str) -> str:
    """The URL without its password."""
    if "://" not in url:
        return url.rpartition("@")[2]
    parts = _split(url)
    place = parts.hosts + parts.path
    # An unquoted slash in a password ends the host too early: what is behind the last @ is safe.
    return f"{parts.scheme}://{place if parts.scheme == 'unix' else place.rpartition('@')[2]}"


@dataclass(frozen=True, slots=True)
class _Parts:
    scheme: str
    access: str
    hosts: str
    path: str
    query: str


def _split(url: str) -> _Parts:
    """The URL's parts, unread: newer releases of `urlsplit` refuse `a:1,[::1]:2` as a host."""
    scheme, _, rest = url.partition("://") if "://" in url else ("", "", url)
    rest, _, query = rest.partition("#")[0].partition("?")
    place, slash, path = rest.partition("/")
    access, _, hosts = place.rpartition("@")
    return _Parts(scheme.lower(), access, hosts, slash + path, query)


@functools.cache
def in_a_url() -> frozenset[str]:
    """The settings that redis-py has, whichever of its clients a URL leads to."""
    kinds: list[Any] = [
        driver.connection.ConnectionPool,
        driver.connection.AbstractConnection,
        driver.connection.Connection,
        driver.connection.UnixDomainSocketConnection,
        driver.connection.SSLConnection,
        driver.asyncio.cluster.RedisCluster,
    ]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    names -= {"kwargs", "connection_kwargs", "connection_class"}
    return frozenset({*names, "sentinel_username", "sentinel_password"})


def _single(url: str, settings: dict[str, Any]) -> Address:
    # A URL that cannot be read is refused now, not at the first call.
    driver.connection.parse_url(url)
    parts = _split(url)
    database = unquote(parts.path).strip("/")
    # redis-py takes a database that is no number for none at all, which is database 0.
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ValueError(
            "the database is not a number; write redis://host:6379/0, and a slash in a password "
            "as %2F"
        )
    return Address(
        shown(url),
        is_cluster=False,
        open_sync=lambda: redis.Redis.from_url(
            url, **settings, retry=Retry(NoBackoff(), 0), max_connections=MAX_CONNECTIONS
        ),
        open_async=lambda: redis.asyncio.Redis.from_url(url, **settings, retry=_never()),
    )


def _never() -> redis.asyncio.retry.Retry:
    # The line retries once, by itself and with a deadline; retries below it would multiply.
    return redis.asyncio.retry.Retry(NoBackoff(), 0)


def _sentinel(url: str, settings: dict[str, Any]) -> Address:
    hosts, path, settings = _taken_apart(url, settings, SENTINEL_PORT)
    master, _, db = path.partition("/")
    if not master:
        raise ValueError("the master's name is missing: redis+sentinel://host:26379/master-name")
    settings["db"] = int(db or 0)
    access = {
        name: settings.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in settings
    }
    sentinel_settings = {k: v for k, v in settings.items() if k.startswith("socket_")} | access

    # A sentinel that does not answer is not asked again: the next one may.
    def open_sync() -> Any:
        once: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)}
        sentinel = driver.sentinel.Sentinel(hosts, sentinel_kwargs=sentinel_settings | once)
        return sentinel.master_for(master, max_connections=MAX_CONNECTIONS, **once, **settings)

    def open_async() -> Any:
        once: dict[str, Any] = {"retry": _never()}
        sentinel = driver.asyncio.sentinel.Sentinel(hosts, sentinel_kwargs=sentinel_settings | once)
        return sentinel.master_for(master, **once, **settings)

    return Address(shown(url), is_cluster=False, open_sync=open_sync, open_async=open_async)


def all_of(client: Any) -> list[Any]:
    """The client, and the sentinels' clients behind it, which redis-py leaves open."""
    pool = getattr(client, "connection_pool", None)
    manager = getattr(pool, "sentinel_manager", None)
    return [client, *getattr(manager, "sentinels", ())]


def _cluster(url: str, settings: dict[str, Any]) -> Address:
    hosts, _, settings = _taken_apart(url, settings, REDIS_PORT)

    def open_sync() -> Any:
        nodes = [driver.cluster.ClusterNode(host, port) for host, port in hosts]
        return driver.cluster.RedisCluster(
            startup_nodes=nodes, max_connections=MAX_CONNECTIONS, **settings
        )

    def open_async() -> Any:
        nodes = [driver.asyncio.cluster.ClusterNode(host, port) for host, port in hosts]
        return driver.asyncio.cluster.RedisCluster(startup_nodes=nodes, **settings)

    return Address(shown(url), is_cluster=True, open_sync=open_sync, open_async=open_async)


def _taken_apart(
    url: str, settings: dict[str, Any], port: int
) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """Hosts, path, and the settings a URL with several hosts asks for."""
    parts = _split(url)
    asked = driver.connection.parse_url(f"redis://{parts.access}@host?{parts.query}")
    del asked["host"]
    if parts.scheme.startswith("rediss"):
        asked["ssl"] = True
    found = [_host(host, port) for host in parts.hosts.split(",")]
    return found, parts.path.strip("/"), settings | asked


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is missing")
    return parts.hostname, parts.port or port
