"""Inboxes: what a consumer has had its effects of, remembered beside the effects themselves.

    inbox = SQLInbox(engine)          # marks and effects in one transaction
    inbox = RedisInbox(url)           # for handlers without SQL
    inbox = MemoryInbox()             # for tests

Each lives in a module of its own and is imported when it is asked for. `Retry` says how often a
message that fails is tried; a handler that knows better raises `PoisonError`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from semel.errors import SettingsError
from semel.imports import importing
from semel.stores.inbox_rules import RETENTION_S, PoisonError, Retry

if TYPE_CHECKING:
    from semel.ports import Inbox
    from semel.stores.memory_inbox import MemoryInbox
    from semel.stores.redis.inbox import RedisInbox
    from semel.stores.sql.inbox import SQLInbox

__all__ = ["RETENTION_S", "MemoryInbox", "PoisonError", "RedisInbox", "Retry", "SQLInbox"]

_HOMES = {
    "MemoryInbox": "semel.stores.memory_inbox",
    "RedisInbox": "semel.stores.redis.inbox",
    "SQLInbox": "semel.stores.sql.inbox",
}

if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _HOMES)


def as_inbox(inbox: Inbox | str) -> Inbox:
    """The inbox itself, or one at this URL: of Redis, or of a database."""
    if isinstance(inbox, str):
        scheme = inbox.partition("://")[0].partition("+")[0].lower()
        home = "RedisInbox" if scheme in ("redis", "rediss", "unix") else "SQLInbox"
        opened: Inbox = getattr(import_module(_HOMES[home]), home)(inbox)
        return opened
    if not hasattr(inbox, "apply"):
        raise SettingsError(
            f"give an inbox or its URL, not a {type(inbox).__name__}: "
            "SQLInbox('postgresql://app@db/shop') or RedisInbox(url), from semel.inbox"
        )
    return inbox
