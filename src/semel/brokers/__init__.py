"""The brokers, and `connect`: from a URL to a broker.

Each broker lives in a module of its own and is imported when it is asked for, so that nobody
needs a driver for a broker they do not use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from semel.errors import SettingsError
from semel.imports import importing

if TYPE_CHECKING:
    from semel.brokers.memory import MemoryBroker
    from semel.brokers.nats import NatsBroker
    from semel.brokers.rabbit import RabbitBroker
    from semel.brokers.redis import RedisBroker
    from semel.brokers.sqlite import SQLiteBroker
    from semel.ports import Broker

__all__ = ["MemoryBroker", "NatsBroker", "RabbitBroker", "RedisBroker", "SQLiteBroker", "connect"]

_HOMES = {
    "MemoryBroker": "semel.brokers.memory",
    "NatsBroker": "semel.brokers.nats",
    "RabbitBroker": "semel.brokers.rabbit",
    "RedisBroker": "semel.brokers.redis",
    "SQLiteBroker": "semel.brokers.sqlite",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _HOMES)

# The broker behind each scheme.
_SCHEMES = {
    "memory": "MemoryBroker",
    "sqlite": "SQLiteBroker",
    "redis": "RedisBroker",
    "rediss": "RedisBroker",
    "redis+sentinel": "RedisBroker",
    "rediss+sentinel": "RedisBroker",
    "redis+cluster": "RedisBroker",
    "rediss+cluster": "RedisBroker",
    "unix": "RedisBroker",
    "nats": "NatsBroker",
    "nats+tls": "NatsBroker",
    "amqp": "RabbitBroker",
    "amqps": "RabbitBroker",
}

_EXTRAS = {"RedisBroker": "redis", "NatsBroker": "nats", "RabbitBroker": "rabbitmq"}

SCHEMES = (
    "memory://",
    "sqlite:///path.db",
    "redis://",
    "rediss://",
    "redis+sentinel://",
    "redis+cluster://",
    "unix://",
    "nats://",
    "nats+tls://",
    "amqp://",
    "amqps://",
)


def connect(url: str, **settings: Any) -> Broker:
    """Open the broker at a URL. Nothing is sent before its first use.

    `settings` are the broker's own, and may stand in the URL instead: `sqlite:///a.db?shards=8`.
    What else the URL asks for is the driver's; what is nobody's is refused. Each `memory://` is a
    broker of its own; share the object.
    """
    from semel.brokers.urls import check_names, in_a_url, split
    from semel.stores import with_plain_scheme

    name = _broker_at(url)
    broker = _imported(name)
    check_names(broker, settings)
    rest, written = split(with_plain_scheme(url), in_a_url(broker))
    for option, value in written.items():
        if settings.setdefault(option, value) != value:
            raise SettingsError(
                f"{option}={settings[option]!r} is given, and the URL says {value!r}; say it once"
            )
    if name != "MemoryBroker":
        made: Broker = broker(rest, **settings)
        return made
    if rest.rstrip("/") != "memory:":
        raise SettingsError(f"write memory:// and settings behind it, not {rest!r}")
    return broker(**settings)  # type: ignore[no-any-return]


def _broker_at(url: object) -> str:
    if not isinstance(url, str):
        raise _no_url(f"a {type(url).__name__}")
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    if scheme not in _SCHEMES:
        # What is behind the scheme may be a password.
        raise _no_url(f"{scheme}://" if scheme else repr(url), _hint(scheme))
    return _SCHEMES[scheme]


def _no_url(shown: str, hint: str = "") -> SettingsError:
    return SettingsError(f"{shown} is not a broker's URL; write one of {', '.join(SCHEMES)}{hint}")


def _hint(scheme: str) -> str:
    match scheme.partition("+")[0]:
        case "sqlite":
            return ". A broker in SQLite needs no SQLAlchemy: sqlite:///path.db"
        case "postgresql" | "postgres" | "mysql" | "mariadb":
            return ". That database holds the outbox, and a relay brings it to a broker"
        case "kafka":
            return ". There is no adapter for Kafka yet; Debezium reads the outbox table"
        case "tls":
            return ". NATS over TLS is nats+tls://"
    return ""


def _imported(name: str) -> Callable[..., Any]:
    from importlib import import_module

    try:
        module = import_module(_HOMES[name])
    except ModuleNotFoundError as missing:
        if name not in _EXTRAS or str(missing.name).startswith("semel"):
            raise
        raise SettingsError(
            f"{missing.name} is not installed: pip install 'semel[{_EXTRAS[name]}]'"
        ) from missing
    broker: Callable[..., Any] = getattr(module, name)
    return broker
