"""What a statement for PostgreSQL is given: the values of one operation, or of many.

Each of our statements comes in two shapes that differ only in `ask`, the table of what is asked,
numbered by `n` from 1. For one operation its values are parameters. For many, each column is one
parameter: texts joined by a separator, ids end to end. Joining a hundred values takes a fraction
of what a driver needs to dump them as an array, and every driver can send a text.

The terms of a batch (lease, ttl and so on) are mostly the same few. Each of them is sent once, and
a byte per operation says which are its own.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from semel.stores.sql.links import Link, Rows
from semel.stores.sql.rows import (
    NOTHING,
    SEPARATOR,
    shortened,
    shortened_texts,
    stored_text,
    stored_texts,
)
from semel.values import Terms

# As many as one byte can tell apart; a batch is never larger.
MOST_ROWS = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of column: in SQL as one value and as an array, and how both are made.

    `single` and `join` are given the codec of the database, to escape characters that it lacks.
    """

    one: str
    many: str
    single: Callable[[Any, str], Any]
    join: Callable[[Sequence[Any], str], Any]
    element: str = "u.{name}"
    """How one element of the array is read."""


def _same(value: Any, _: str) -> Any:
    return value


def _end_to_end(values: Sequence[bytes], _: str) -> bytes:
    return b"".join(values)


def _joined(values: Sequence[Any], _: str) -> str | None:
    try:
        return SEPARATOR.join(values)
    except TypeError:  # some of them are None
        if values.count(None) == len(values):
            return None
        return SEPARATOR.join([NOTHING if value is None else value for value in values])


def _text(value: str | None, codec: str) -> str | None:
    return None if value is None else stored_text(value, codec)


def _texts(values: Sequence[Any], codec: str) -> str | None:
    if None in values:
        return _joined([_text(value, codec) for value in values], codec)
    return stored_texts(values, codec)


def _ints(values: Sequence[int | None], _: str) -> str | None:
    if None not in values:
        return ",".join(map(str, values))
    return ",".join(["" if value is None else str(value) for value in values])


def _truths(values: Sequence[bool], _: str) -> str:
    return ",".join(["t" if value else "f" for value in values])


def _encoded(values: Sequence[bytes | None], codec: str) -> str | None:
    return _joined([v if v is None else base64.b64encode(v).decode() for v in values], codec)


_ARRAY = "string_to_array(?::text, chr(31), chr(30))"

_ELEMENT = "substring(g.id FROM (u.n * 32 - 31)::int FOR 32)"

ID = Kind("?::bytea", "?::bytea", _same, _end_to_end, _ELEMENT)
PLAIN = Kind("?::text", _ARRAY, _same, _joined)
TEXT = Kind("?::text", _ARRAY, _text, _texts)
INT = Kind("?::int8", "string_to_array(?::text, ',', '')::int8[]", _same, _ints)
BOOL = Kind("?::bool", "string_to_array(?::text, ',')::bool[]", _same, _truths)
BYTES = Kind("?::bytea", _ARRAY, _same, _encoded, "decode(u.{name}, 'base64')")


def cut_at(limit: int) -> Kind:
    """Text of at most so many characters."""
    return Kind(
        "?::text",
        _ARRAY,
        lambda text, codec: shortened(text, limit, codec),
        lambda texts, codec: shortened_texts(texts, limit, codec),
    )


Columns = dict[str, Kind]


def _one(columns: Columns, terms: Columns) -> str:
    given = ", ".join(f"{kind.one} AS {name}" for name, kind in (columns | terms).items())
    return f"ask AS MATERIALIZED (SELECT 1 AS n, now, {given} FROM clock)"  # noqa: S608


def _many(columns: Columns, terms: Columns) -> str:
    arrays = [name for name, kind in columns.items() if kind is not ID]
    given = [
        *(f"{kind.many} AS {name}" for name, kind in columns.items()),
        "?::bytea AS places",
        *(f"{kind.many} AS {name}" for name, kind in terms.items()),
    ]
    asked = [
        *(f"{kind.element.format(name=name)} AS {name}" for name, kind in columns.items()),
        *(f"g.{name}[get_byte(g.places, (u.n - 1)::int) + 1] AS {name}" for name in terms),
    ]
    return f"""
given AS MATERIALIZED (SELECT now, {", ".join(given)} FROM clock),
ask AS MATERIALIZED (
    SELECT u.n, g.now, {", ".join(asked)}
    FROM given AS g,
        unnest({", ".join(f"g.{name}" for name in arrays)})
        WITH ORDINALITY AS u ({", ".join(arrays)}, n)
)"""  # noqa: S608 - every part is a constant


def dense(statement: str) -> str:
    """Without its layout: a statement is sent, and looked up, by its text."""
    return re.sub(r"\s*([(),=+])\s*", r"\1", " ".join(statement.split()))


class Question:
    """A statement in both shapes, and what it is to be given.

    `values` takes operations and a codec and returns their values, a list per column. `spans` takes
    an operation's terms and returns the values that follow from them.
    """

    def __init__(
        self,
        columns: Columns,
        terms: Columns,
        body: str,
        *,
        values: Callable[[Sequence[Any], str], list[list[Any]]],
        terms_of: Callable[[Any], Terms],
        spans: Callable[[Terms], tuple[Any, ...]],
    ) -> None:
        clock = "WITH clock AS MATERIALIZED (SELECT clock_timestamp() AS now),"
        self.one = dense(f"{clock} {_one(columns, terms)} {body}")
        self.many = dense(f"{clock} {_many(columns, terms)} {body}")
        self._kinds = list(columns.values())
        self._term_kinds = list(terms.values())
        self._values = values
        self._terms_of = terms_of
        self._spans = lru_cache(maxsize=256)(spans)

    async def ask(self, link: Link, ops: Sequence[Any]) -> Rows:
        """The lines of the answer, each beginning with the number of its operation, from 1."""
        codec = link.dialect.codec
        if len(ops) == 1:
            return await link.ask(self.one, self._single(ops, codec))
        return await link.ask(self.many, self._together(ops, codec))

    def _single(self, ops: Sequence[Any], codec: str) -> list[Any]:
        given = [
            kind.single(value, codec)
            for kind, (value,) in zip(self._kinds, self._values(ops, codec), strict=True)
        ]
        given += self._spans(self._terms_of(ops[0]))
        return given

    def _together(self, ops: Sequence[Any], codec: str) -> list[Any]:
        assert len(ops) <= MOST_ROWS, "a batch is never larger"
        given = [
            kind.join(values, codec)
            for kind, values in zip(self._kinds, self._values(ops, codec), strict=True)
        ]
        places, terms = _told_apart(list(map(self._terms_of, ops)))
        given.append(places)
        spans = zip(*map(self._spans, terms), strict=True)
        given += [kind.join(v, codec) for kind, v in zip(self._term_kinds, spans, strict=True)]
        return given


def _told_apart(terms: Sequence[Terms]) -> tuple[bytes, list[Terms]]:
    """Which terms each operation has, and the terms. Alike is not enough: `is` costs nothing."""
    seen: dict[int, int] = {}
    places = bytes([seen.setdefault(id(each), len(seen)) for each in terms])
    by_id = {id(each): each for each in terms}
    return places, [by_id[number] for number in seen]
