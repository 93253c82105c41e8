"""The stores, and `connect`: from a URL to a store.

Each store lives in a module of its own and is imported when it is asked for, so that nobody
needs a driver for a store they do not use.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from semel.errors import SettingsError
from semel.imports import importing

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

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _HOMES)

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


def connect(url: str) -> Store:
    """Open the store at a URL. Nothing is sent before its first use."""
    if not isinstance(url, str):
        raise _no_url(url)
    scheme = url.partition("://")[0].lower() if "://" in url else ""
    match scheme.partition("+")[0]:
        case "memory":
            from semel.stores.memory import MemoryStore

            return MemoryStore()
        case "file":
            from semel.stores.file import FileStore

            return FileStore(path_of(url))
        case "sqlite" if scheme == "sqlite":
            from semel.stores.sqlite import SQLiteStore

            return SQLiteStore(path_of(url))
        case "postgresql" | "postgres" | "mysql" | "mariadb" | "sqlite":
            _refuse_without_sqlalchemy(scheme)
            from semel.stores.sql import SQLStore

            return SQLStore(url)
        case "redis" | "rediss" | "unix":
            from semel.stores.redis import RedisStore

            return RedisStore(url)
    raise _no_url(url)


def with_plain_scheme(url: str) -> str:
    """Return the URL with its scheme in lower case, as every driver reads it."""
    scheme, slashes, rest = url.partition("://")
    return f"{scheme.lower()}://{rest}" if slashes else url


def _no_url(given: object) -> SettingsError:
    path = str(given) if isinstance(given, str | os.PathLike) else ""
    if hint := _meant(path):
        return SettingsError(f"{path!r} is not a store's URL; did you mean {hint}?")
    shown = repr(given) if isinstance(given, str) else f"a {type(given).__name__}"
    return SettingsError(f"{shown} is not a store's URL; write one of {', '.join(SCHEMES)}")


# A separator, or the ending of a database.
_PATH = re.compile(r"[/\\]|\.(db|sqlite3?)$")
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):(?P<rest>.*)", re.IGNORECASE)


def _meant(given: str) -> str:
    """The URL of a path, or of one behind a scheme that lacks its slashes; "" if it is neither."""
    if "://" in given:
        return ""
    found = _SCHEME.fullmatch(given)
    if found is None:
        return f"'sqlite:///{given}'" if _PATH.search(given) else ""
    rest = found["rest"]
    match found["scheme"].lower():
        case "sqlite" if rest.startswith("/"):
            return f"'sqlite:///{rest}' (from the root) or 'sqlite://{rest}' (here)"
        case "sqlite" if rest:
            return f"'sqlite:///{rest}'"
        case "file" if rest.startswith("/"):
            return f"'file://{rest}'"
    return ""


def _refuse_without_sqlalchemy(scheme: str) -> None:
    """The extra for this URL has the driver too; SQLAlchemy alone would be half of the answer."""
    if find_spec("sqlalchemy") is not None:
        return
    database = scheme.partition("+")[0]
    extra = {"sqlite": "sql", "postgresql": "postgres", "mariadb": "mysql"}.get(database, database)
    raise SettingsError(f"SQLAlchemy is not installed: pip install 'semel[{extra}]'")


def path_of(url: str) -> str:
    """The path in a URL.

    `sqlite:///a.db` is a.db here and `sqlite:////var/a.db` is /var/a.db, as SQLAlchemy has it;
    a `file` path is always absolute. A URL with an option or a fragment is refused.
    """
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        option = parts.query.partition("=")[0] or f"#{parts.fragment}"
        raise SettingsError(
            f"{url!r} has an option {option!r}, and a {parts.scheme} URL has none; in a path write "
            "? as %3F and # as %23"
        )
    if parts.netloc:
        raise SettingsError(
            f"{url!r} has a host name where the path should begin; write three slashes, as in "
            f"{parts.scheme}:///{parts.netloc}{parts.path}"
        )
    path = unquote(parts.path)
    if parts.scheme == "file":
        return path
    if len(path) < 2:  # noqa: PLR2004 - a slash alone
        raise SettingsError(
            f"{url!r} has no path; write sqlite:///semel.db for a file, or sqlite:///:memory: for "
            "records that no other process sees and that end with this one"
        )
    return path[1:]
