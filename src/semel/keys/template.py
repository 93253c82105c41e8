"""Keys written as a sentence with fields in it."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from semel.errors import SettingsError


@dataclass(frozen=True, slots=True)
class _Field:
    """A `{parameter.attribute[index]}` of a template, and the text before it."""

    literal: str
    source: str
    name: str
    steps: tuple[tuple[str, str | int], ...]

    def value(self, bound: Mapping[str, Any]) -> Any:
        found = bound[self.name]
        try:
            for form, step in self.steps:
                found = getattr(found, str(step)) if form == "." else found[step]
        except (AttributeError, LookupError, TypeError) as error:
            raise SettingsError(
                f"the key template's {{{self.source}}} cannot be read from this call: "
                f"{type(error).__name__}: {error}"
            ) from error
        return found


class Template:
    """A key written as a sentence: `Template("invoice:{user_id}:{amount}", names)`.

    Parameters may be followed to attributes and items, `{order.customer[id]}`, and nothing is
    called or formatted. Values are text, numbers, UUIDs, enum members (by name), dates and times;
    `1` and `"1"` read alike here. Every character that separates two fields is percent-escaped
    in values, and so is `%`, so ("a:b", "c") and ("a", "b:c") are two keys. Empty values are
    refused: an id that is missing must not become everybody's key.
    """

    def __init__(self, text: str, names: Collection[str]) -> None:
        self.text = text
        self._fields, self._tail = _parse(text, names)
        # "%" first: it is part of what the others become.
        self._escapes = [(char, _escaped(char)) for char in ("%", *_separators(self._fields))]
        # How a value of a type is shown; and, by its place, a field that has to be read first.
        self.shows: dict[Any, Callable[[Any], str]] = {
            **{kind: self._shower(show) for kind, show in _SHOWN.items()},
            **{at: self._reader(field) for at, field in enumerate(self._fields) if field.steps},
        }

    def render(self, bound: Mapping[str, Any]) -> str:
        """The key of a call."""
        parts = [field.literal + self._shown(field, field.value(bound)) for field in self._fields]
        return "".join(parts) + self._tail

    def source(self, kind: str, show: str) -> str:
        """The source of what `render` answers, where `kind` is `type` and `show` is `shows`.

        It raises where `render` would refuse, and for an enum. Written out for speed.
        """
        parts = [
            _literal(field.literal)
            + f"{{{show}[{at if field.steps else f'{kind}({field.name})'}]({field.name})}}"
            for at, field in enumerate(self._fields)
        ]
        return f"f'{''.join(parts)}{_literal(self._tail)}'"

    def _shown(self, field: _Field, value: Any) -> str:
        if value is None or (type(value) is str and not value):
            raise SettingsError(
                f"the key template's {{{field.source}}} is {value!r} in this call; a key must name "
                "something, so give the value or leave the field out of the template"
            )
        if isinstance(value, Enum):
            return self.shows[str](str(value.name))
        if type(value) not in self.shows:
            raise SettingsError(
                f"the key template's {{{field.source}}} is a {type(value)}; name its id, or use a "
                "function as key="
            )
        return self.shows[type(value)](value)

    def _shower(self, show: Callable[[Any], str]) -> Callable[[Any], str]:
        escapes = self._escapes

        def shown(value: Any) -> str:
            text = show(value)
            if not text:
                raise ValueError
            if not text.isalnum():  # no separator is
                for char, escaped in escapes:
                    text = text.replace(char, escaped)
            return text

        return shown

    def _reader(self, field: _Field) -> Callable[[Any], str]:
        def read(argument: Any) -> str:
            value = field.value({field.name: argument})
            return self.shows[type(value)](value)

        return read


def _literal(text: str) -> str:
    """The text as it stands between the quotes of an f-string."""
    escaped = text.encode("unicode_escape").decode().replace("'", r"\'")
    return escaped.replace("{", "{{").replace("}", "}}")


_FIELD = re.compile(r"([^\W\d]\w*)((?:\.[^\W\d_]\w*|\[[^\[\]{}]+\])*)")
_STEP = re.compile(r"\.(\w+)|\[([^\[\]]+)\]")


def _parse(text: str, names: Collection[str]) -> tuple[list[_Field], str]:
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError as error:
        raise SettingsError(f"the key template {text!r} cannot be read: {error}") from None
    found: list[_Field] = []
    literal = ""
    for before, source, spec, conversion in pieces:
        literal += before
        if source is None:
            continue
        if spec or conversion:
            raise SettingsError(f"the key template {text!r} formats {{{source}}}; name it only")
        found.append(_field(text, literal, source, names))
        literal = ""
    return found, literal


def _field(text: str, literal: str, source: str, names: Collection[str]) -> _Field:
    match = _FIELD.fullmatch(source)
    if match is None:
        raise SettingsError(
            f"the key template {text!r} has {{{source}}}; name a parameter, with attributes and "
            "items if need be: {order.id} or {command[order_id]}"
        )
    if match[1] not in names:
        raise SettingsError(
            f"the key template {text!r} names {match[1]!r}, which is no parameter; there are: "
            + (", ".join(names) or "none")
        )
    return _Field(literal, source, match[1], tuple(_steps(match[2])))


def _steps(rest: str) -> Iterable[tuple[str, str | int]]:
    for match in _STEP.finditer(rest):
        if match[1]:
            yield ".", match[1]
        else:
            yield "[", int(match[2]) if match[2].isdecimal() else match[2]


def _separators(found: list[_Field]) -> set[str]:
    """What ends a value: the first character between it and the next one.

    A value never holds that character unescaped, so a key can be read back in one way only. A
    letter or digit will not do, as escapes are made of them.
    """
    ends = {field.literal[:1] for field in found[1:]}
    for end in ends:
        if not end or end.isalnum() or end == "%":
            raise SettingsError(
                "a key template needs a sign such as ':' between two fields, right behind the "
                f"first; it has {end!r}"
            )
    return ends


def _escaped(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogatepass"))


_SHOWN: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((str, bool, int, UUID, Decimal), str),
    float: repr,
    **dict.fromkeys((date, datetime, time), lambda value: value.isoformat()),
}
