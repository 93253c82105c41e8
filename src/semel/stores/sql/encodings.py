"""Which characters a database takes in its text columns, found once per engine.

PostgreSQL stores text in the encoding of the database and refuses a character that this encoding
lacks. `Dialect.codec` names a Python codec that has no other characters than the encoding; `rows`
escapes the characters that the codec lacks.
MariaDB and MySQL store text as utf8mb4, because the tables say so. There the connection's character
set matters: the server replaces a character that it lacks by a question mark, without an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from semel.errors import SettingsError
from semel.stores.sql.dialects import Dialect

# Families of PostgreSQL's names, and what Python calls the same single-byte encodings.
SINGLE_BYTE = {"LATIN": "latin", "ISO_8859_": "iso8859_", "WIN": "cp"}


def codec_of(encoding: str) -> str:
    """Return the Python codec for a PostgreSQL encoding, or ASCII, which every encoding includes.

    ASCII is used for multi-byte encodings, because Python and PostgreSQL differ about some of their
    characters, and for encodings that are not in `SINGLE_BYTE`.
    """
    if encoding == "UTF8":
        return "utf-8"
    for name, codec in SINGLE_BYTE.items():
        if encoding.startswith(name):
            return codec + encoding.removeprefix(name)
    return "ascii"


def learn(dialect: Dialect, connection: sa.Connection) -> None:
    """Set the dialect's codec from the first connection of an engine.

    Raises `SettingsError` if the connection cannot carry what other connections have written.
    """
    if dialect.is_known:
        return
    if dialect.name == "postgresql":
        dialect.codec = _postgres_codec(connection.connection.driver_connection)
    elif dialect.name == "mysql":
        _refuse_character_set(connection.connection.dbapi_connection)
        _refuse_damaged_bytes(connection.connection.driver_connection)
    dialect.is_known = True


def _postgres_codec(driver: Any) -> str:
    if not hasattr(driver, "info"):  # asyncpg, whose connections are in UTF-8
        return codec_of(driver.get_settings().server_encoding)
    server = driver.info.parameter_status("server_encoding")
    client = driver.info.parameter_status("client_encoding")
    if client != "UTF8" and (client != server or server == "SQL_ASCII"):
        raise _wrong_client_encoding(client, server)
    return codec_of(server)


@contextmanager
def explaining_bytes(engine: sa.Engine | sa.Connection) -> Iterator[None]:
    """Raise `SettingsError` where SQLAlchemy cannot connect because psycopg returns texts as bytes.

    SQLAlchemy raises a bare `TypeError` then.
    """
    try:
        yield
    except TypeError as error:
        if engine.dialect.name != "postgresql" or "bytes-like" not in str(error):
            raise
        raise _wrong_client_encoding("SQL_ASCII", "SQL_ASCII") from error


def _wrong_client_encoding(client: str, server: str) -> SettingsError:
    return SettingsError(
        f"this engine's connections have the client_encoding {client}, and the database has the "
        f"encoding {server}: not everything that is stored there could be read. Write "
        'create_engine(..., client_encoding="utf8")'
    )


def _refuse_character_set(driver: Any) -> None:
    name = driver.character_set_name()
    if name != "utf8mb4":
        raise SettingsError(
            f"this engine's connections have the character set {name}: the server would replace "
            "characters that it lacks by question marks. Add ?charset=utf8mb4 to the URL"
        )


# Flag in the status that MariaDB and MySQL send with each answer: NO_BACKSLASH_ESCAPES is set.
NO_BACKSLASH_ESCAPES = 512


def _refuse_damaged_bytes(driver: Any) -> None:
    """Raise `SettingsError` if asyncmy would send other bytes than it was given.

    PyMySQL escapes bytes as the server reads them; asyncmy 0.2 always writes backslashes.
    """
    if type(driver).__module__.startswith("asyncmy.") and (
        driver.server_status & NO_BACKSLASH_ESCAPES
    ):
        raise SettingsError(
            "this engine's connections have NO_BACKSLASH_ESCAPES in their sql_mode, and asyncmy "
            "escapes bytes with backslashes: the server would read other bytes. Write "
            'create_async_engine(..., connect_args={"sql_mode": "STRICT_ALL_TABLES"})'
        )
