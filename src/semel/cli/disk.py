"""What is on disk where a URL points, for `semel db`: a ledger of ours, or why it is none.

Looking never makes anything: a store makes its own place when it is opened, so that a mistyped
path would be answered with a new and empty ledger.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from semel.errors import DamagedStoreError, StoreUnavailableError
from semel.stores import path_of
from semel.stores.sqlite_file import refuse_unsafe

__all__ = ["Found", "look", "maker", "meant", "without_outbox"]

INIT = "`semel db init URL` makes a ledger there"


def without_outbox(path: str) -> str:
    """What a new file of SQLiteStore is not."""
    other = shlex.quote(f"sqlite+pysqlite:///{path}")
    return (
        f"{path} is for a ledger and a log; if you want an outbox or an inbox there, delete it and "
        f"run `semel db init {other}`"
    )


@dataclass(frozen=True, slots=True)
class Found:
    """The format's version, 0 where nothing is ours, and what is not in order.

    `free`: nobody else's, so that a ledger can be made there.
    """

    path: str
    version: int = 0
    problem: str = ""
    free: bool = False


def look(url: str) -> Found:
    """Look at the store of a `sqlite:` or `file:` URL, and change nothing."""
    path, is_folder = path_of(url), url.lower().startswith("file:")
    try:
        if not os.path.lexists(path):
            if not is_folder:
                refuse_unsafe(os.path.realpath(path))
            problem = f"there is nothing at {path!r}{_advice(url, path)}"
            return Found(path, problem=problem, free=True)
        return _folder(path) if is_folder else _file(path)
    except (StoreUnavailableError, DamagedStoreError) as error:
        return Found(path, problem=str(error))
    except OSError as error:
        return Found(path, problem=f"{path} cannot be read: {error.strerror}")


def _advice(url: str, path: str) -> str:
    """A file store makes the folders above it; SQLite does not."""
    if url.lower().startswith("sqlite:") and not Path(path).parent.is_dir():
        return ", nor a folder to make it in; check the path"
    return f"; {INIT}, if the path is right"


def _folder(path: str) -> Found:
    from semel.stores.file.disk import MARK, MARK_NAME, mark_error

    if not Path(path).is_dir():
        return Found(path, problem=f"{path} is not a directory; a file store is one")
    names = {entry.name for entry in Path(path).iterdir()}
    if not names:
        return Found(path, problem=f"{path} is empty; {INIT}", free=True)
    if MARK_NAME not in names:
        return Found(path, problem=f"{path} is not a ledger: it has files, but no {MARK_NAME}")
    mark = f"{path}/{MARK_NAME}"
    found = Path(mark).read_bytes()
    if found == MARK:
        return Found(path, version=1)
    if MARK.startswith(found):
        short = (
            f"{mark} is damaged: it ends after {len(found)} bytes; `semel db init URL` repairs it"
        )
        return Found(path, problem=short, free=True)
    return Found(path, problem=str(mark_error(mark, found)))


def _file(path: str) -> Found:
    from semel.stores.sqlite.connections import Connections

    if Path(path).is_dir():
        return Found(path, problem=f"{path} is a directory; a SQLite store is a file")
    connections = Connections(path)  # opens a file, and never creates one
    try:
        return connections.read(lambda connection: _tables(path, connection))
    finally:
        connections.close()


def maker(path: str) -> str:
    """The store of ours that made this file, "" for none, or for one that cannot be read."""
    from semel.stores.sqlite import schema
    from semel.stores.sqlite.connections import Connections

    if not Path(path).is_file():
        return ""
    connections = Connections(path)
    try:
        return connections.read(schema.maker)
    except (StoreUnavailableError, DamagedStoreError):
        return ""
    finally:
        connections.close()


def meant(url: str) -> str:
    """`sqlite:` opens a file as the store that made it; for the library it is SQLiteStore alone."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "sqlite" and maker(path_of(url)) == "SQLStore":
        return f"sqlite+pysqlite://{rest}"
    return url


def _tables(path: str, connection: sqlite3.Connection) -> Found:
    from semel.stores.sqlite.schema import FLOOR, SELECT, VERSION, foreign, user_version

    version = user_version(connection)
    if problem := foreign(connection, path):
        return Found(path, problem=problem)
    if version < VERSION:
        return Found(path, problem=f"{path} has no tables of SQLiteStore; {INIT}", free=True)
    if version > VERSION:
        newer = (
            f"{path} has user_version {version}, this version of Semel knows {VERSION}; upgrade "
            "Semel, or check the path"
        )
        return Found(path, version, newer)
    connection.execute(SELECT, (b"",)).fetchone()
    connection.execute(FLOOR).fetchone()
    return Found(path, version)
