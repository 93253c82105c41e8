"""Opening the database of an outbox or an inbox, for a command.

Nothing is made by opening it: a mistyped path is an error, not an empty database.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from semel.cli import disk
from semel.cli.command import ENV, needed, refuse_absent, refuse_memory
from semel.errors import SettingsError
from semel.stores import path_of

if TYPE_CHECKING:
    from semel.stores.sql import SQLStore

__all__ = ["Database", "is_sql", "open_store"]

Database = Annotated[
    str,
    typer.Argument(
        metavar="[URL]",
        envvar=ENV,
        show_default=False,
        callback=needed,
        help="The database, e.g. postgresql://app@db/shop.",
    ),
]

SQL = ("postgresql", "postgres", "mysql", "mariadb", "sqlite")


def is_sql(url: str) -> bool:
    return _kind(url) in SQL


def _kind(url: str) -> str:
    return url.partition("://")[0].lower().partition("+")[0]


def open_store(url: str, what: str = "an outbox") -> SQLStore:
    """The SQL database at this URL; `what` is looked for there."""
    refuse_memory(url)
    if not is_sql(url):
        raise SettingsError(
            f"{url!r} is not the URL of an SQL database, and {what} is in one; write "
            "postgresql://, mysql://, mariadb:// or sqlite:///path.db"
        )
    if _kind(url) == "sqlite":
        _refuse_file(path_of(url), what)
    from semel.stores.sql import SQLStore

    return SQLStore(url)


def _refuse_file(path: str, what: str) -> None:
    refuse_absent(path)
    if disk.maker(path) == "SQLiteStore":
        raise SettingsError(
            f"{path} was made by SQLiteStore, for a ledger and a log; {what} is in another file: "
            "`semel db init sqlite+pysqlite:///PATH` makes one"
        )
