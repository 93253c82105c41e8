"""What a table is, in the words of each database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Column:
    """A column's type in each database, and what else is said of it there; no type: no column."""

    name: str
    postgresql: str
    mysql: str
    sqlite: str
    null: bool = False
    more: Mapping[str, str] = field(default_factory=dict[str, str])

    def kind(self, database: str) -> str:
        kind: str = getattr(self, database)
        return kind


@dataclass(frozen=True, slots=True)
class Index:
    """An index, and the columns it is on; `only` in one database, if it says so."""

    name: str
    columns: tuple[str, ...]
    unique: bool = False
    only: str = ""

    @property
    def word(self) -> str:
        return "UNIQUE INDEX" if self.unique else "INDEX"

    @property
    def on(self) -> str:
        return f"({', '.join(self.columns)})"


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and the columns that are its primary key."""

    name: str
    columns: tuple[Column, ...]
    indexes: tuple[Index, ...] = ()
    key: tuple[str, ...] = ("id",)

    def columns_in(self, database: str) -> list[Column]:
        return [column for column in self.columns if column.kind(database)]

    def indexes_in(self, database: str) -> list[Index]:
        return [index for index in self.indexes if index.only in {"", database}]


@dataclass(frozen=True, slots=True)
class Part:
    """Tables that belong together and have a version.

    `steps` says for each version what leads to it from the one before. The first makes the tables
    as they are today, where they are not; whatever of the others is done by then is passed over.
    """

    name: str
    version: int
    tables: tuple[Table, ...]
    steps: Mapping[int, Callable[[str], tuple[str, ...]]]


def time_column(name: str, *, null: bool = False, more: Mapping[str, str] | None = None) -> Column:
    return Column(name, "TIMESTAMP WITH TIME ZONE", "DATETIME(6)", "TEXT", null, more or {})


def default(postgresql: str, *, mysql: str = "", sqlite: str = "") -> Mapping[str, str]:
    """Return a column's default, which is the same in each database unless it is given."""
    said = {
        "postgresql": postgresql,
        "mysql": mysql or postgresql,
        "sqlite": sqlite or postgresql,
    }
    return {database: f" DEFAULT {what}" for database, what in said.items()}


def name_column(name: str) -> Column:
    """Return a column for a name of at most 255 characters.

    TEXT on PostgreSQL, where a name takes more with escapes for characters that the encoding lacks.
    """
    return Column(name, "TEXT", "VARCHAR(255)", "TEXT")


# Compared byte by byte: MariaDB's default collation takes 'AbC' and 'abc' for the same.
OPTIONS = {"mysql": " ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin"}


def making(*tables: Table) -> Callable[[str], tuple[str, ...]]:
    """The step that makes these tables from nothing."""

    def step(database: str) -> tuple[str, ...]:
        return tuple(statement for table in tables for statement in _create(table, database))

    return step


def _create(table: Table, database: str) -> tuple[str, ...]:
    lines = [column_line(column, table, database) for column in table.columns_in(database)]
    if len(table.key) > 1:
        lines.append(f"PRIMARY KEY ({', '.join(table.key)})")
    apart = table.indexes_in(database)
    if database == "mysql":  # which cannot be told to make an index only where there is none
        lines += [f"{index.word} {index.name} {index.on}" for index in apart]
        apart = []
    body = ",\n    ".join(lines)
    options = OPTIONS.get(database, "")
    return (
        f"CREATE TABLE IF NOT EXISTS {table.name} (\n    {body}\n){options}",
        *(f"CREATE {i.word} IF NOT EXISTS {i.name} ON {table.name} {i.on}" for i in apart),
    )


def column_line(column: Column, table: Table, database: str) -> str:
    null = "" if column.null else " NOT NULL"
    key = " PRIMARY KEY" if table.key == (column.name,) else ""
    return f"{column.name} {column.kind(database)}{null}{key}{column.more.get(database, '')}"
