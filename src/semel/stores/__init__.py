"""The stores, and `connect`: from a URL to a store.

Each store lives in a module of its own and is imported when it is asked for, so that nobody
needs a driver for a store they do not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from semel.errors import SettingsError

if TYPE_CHECKING:
    from semel.ports import Store
    from semel.stores.file import FileStore
    from semel.stores.memory import MemoryStore
    from semel.stores.redis import RedisStore
    from semel.stores.sql import SQLStore
    from semel.stores.sqlite import SQLiteStore

__all__ = ["FileStore", "MemoryStore", "RedisStore", "SQLStore", "SQLiteStore", "connect"]

_HOMES = {
    "FileStore": "semel.stores.file",
    "MemoryStore": "semel.stores.memory",
    "RedisStore": "semel.stores.redis",
    "SQLStore": "semel.stores.sql",
    "SQLiteStore": "semel.stores.sqlite",
}

SCHEMES = (
    "memory://",
    "file:///path",
    "sqlite:///path.db",
    "postgresql://",
    "mysql://",
    "redis://",
    "rediss://",
    "redis+sentinel://",
    "redis+cluster://",
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def connect(url: str) -> Store:
    """Open the store at a URL. Nothing is sent before its first use."""
    scheme = url.partition("://")[0].lower() if "://" in str(url) else ""
    match scheme.partition("+")[0]:
        case "memory":
            from semel.stores.memory import MemoryStore

            return MemoryStore()
        case "file":
            from semel.stores.file import FileStore

            return FileStore(_path(url))
        case "sqlite" if scheme == "sqlite":
            from semel.stores.sqlite import SQLiteStore

            return SQLiteStore(_path(url) or ":memory:")
        case "postgresql" | "postgres" | "mysql" | "mariadb" | "sqlite":
            from semel.stores.sql import SQLStore

            return SQLStore(url)
        case "redis" | "rediss" | "unix":
            from semel.stores.redis import RedisStore

            return RedisStore(url)
    raise SettingsError(f"{url!r} is not a store's URL; write one of {', '.join(SCHEMES)}")


def _path(url: str) -> str:
    """The path in a URL.

    `sqlite:///a.db` is a.db here and `sqlite:////var/a.db` is /var/a.db, as SQLAlchemy has it;
    a `file` path is always absolute.
    """
    parts = urlsplit(url)
    if parts.netloc:
        raise SettingsError(
            f"{url!r} has a host name where the path should begin; write three slashes, as in "
            f"{parts.scheme}:///{parts.netloc}{parts.path}"
        )
    path = unquote(parts.path)
    return path if parts.scheme == "file" else path[1:]
