"""Which store a guard uses when it names none.

In order: the one given to `configure`, the one at the URL in `SEMEL_URL`, else one
`MemoryStore` for this process, with a warning that says so once.
"""

from __future__ import annotations

import logging
import os
import threading

from semel.errors import SettingsError
from semel.ports import Broker, LogStore, Store

log = logging.getLogger("semel")

_lock = threading.Lock()
_store: Store | None = None
_configured: Store | None = None


def configure(*, store: Store | str | None) -> None:
    """Set the store of every guard that names none: a store, a URL, or None to unset it."""
    global _configured, _store
    opened = None if store is None else as_store(store)
    with _lock:
        _configured, _store = opened, None


def as_store(store: Store | str) -> Store:
    """The store itself, or the one at this URL."""
    if isinstance(store, str):
        from semel.stores import connect

        return connect(store)
    if not isinstance(store, Store):
        raise _no_store(store)
    return store


def as_log_store(store: LogStore | str) -> LogStore:
    """The store itself, or the one at this URL, if it has a log."""
    opened = as_store(store)
    if not isinstance(opened, LogStore):
        raise SettingsError(
            f"a {type(opened).__name__} has no log; give a MemoryStore, SQLiteStore, SQLStore or "
            "RedisStore, from semel.stores, or the URL of one"
        )
    return opened


def as_broker(broker: Broker | str) -> Broker:
    """The broker itself, or the one at this URL."""
    if isinstance(broker, str):
        from semel.brokers import connect

        return connect(broker)
    if not hasattr(broker, "shards"):
        raise SettingsError(
            f"give a broker or its URL, not a {type(broker).__name__}: "
            "connect('redis://localhost?shards=8'), from semel.brokers"
        )
    return broker


def _no_store(given: object) -> SettingsError:
    """Named by its type: a client's repr fills the screen and may have a password in it."""
    kind = type(given)
    home = kind.__module__.partition(".")[0]
    wrapped = {"redis": "RedisStore(client)", "sqlalchemy": "SQLStore(engine)"}.get(home)
    if wrapped:
        return SettingsError(
            f"store= was given a {kind.__name__} of {home}, which is not a store; write {wrapped}, "
            "from semel.stores"
        )
    if isinstance(given, os.PathLike):
        return SettingsError(
            f"store= was given a path; write SQLiteStore(path), from semel.stores, or "
            f"'sqlite:///{os.fspath(given)}'"
        )
    return SettingsError(
        f"store= was given a {kind.__name__}, which is not a store; give one from semel.stores, "
        "or a URL such as 'sqlite:///semel.db'"
    )


def default_store() -> Store:
    """The store for guards that name none."""
    global _store  # noqa: PLW0603 - one default store per process, made on first use
    if _configured is not None:
        return _configured
    with _lock:
        if _store is None:
            _store = _from_environment()
        return _store


def _from_environment() -> Store:
    from semel.stores import connect

    url = os.environ.get("SEMEL_URL")
    if url:
        return connect(url)
    log.warning(
        "semel: no store given, so records live in this process's memory only: other processes "
        "do not see them and a restart forgets them. Call semel.configure(store=...) or set "
        "SEMEL_URL."
    )
    return connect("memory://")
