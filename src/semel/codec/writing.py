"""From a value to a JSON tree.

Types are compared exactly, and what could not be rebuilt is refused with `EncodingError` that
names the spot: first result and replay never differ.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, ClassVar, NoReturn, TypeAlias
from uuid import UUID
from zoneinfo import ZoneInfo

from semel.codec.classes import (
    collide,
    find_loaded,
    has_slots_beside,
    is_dataclass,
    is_enum,
    is_namedtuple,
    is_pydantic,
    more_than,
    type_path,
)
from semel.codec.errors import EncodingError
from semel.codec.plain import (
    CHARACTERS,
    DEPTH,
    SCALARS,
    TAG,
    TOO_MANY_CHARACTERS,
    TOO_MANY_VALUES,
    VALUES,
    to_sorted_text,
    to_text,
)

Tree: TypeAlias = Any
Writer: TypeAlias = "Callable[[Walk, Any], Tree]"

# Python refuses to print integers beyond a limit that a process may lower to 640 digits, which is
# 2126 bits; larger ones are written in hexadecimal, where there is no limit.
PRINTABLE_BITS = 2100

# As how many values one counts that is no scalar: it takes longer to write, and more room.
TAGGED = 4

COLLIDING = "too many of its members have one hash: make it a list"

# What a spot in an error message shows of a long key.
SHOWN_KEY = 40


class Walk:
    """One pass over a value that makes a JSON tree of it.

    `trail` is the way from the root to here. It names the spot in an error, and its length is
    the depth. `values` and `characters` are how many may still come. A walk that raised is thrown
    away.
    """

    writers: ClassVar[Mapping[type, Writer]] = {}
    shapes: ClassVar[tuple[tuple[Callable[[type], bool], Writer], ...]] = ()

    def __init__(self, root: str) -> None:
        self.root = root
        self.trail: list[tuple[str, Any]] = []
        self.values = VALUES
        self.characters = CHARACTERS

    def tree(self, value: Any) -> Tree:
        kind = type(value)
        self.values -= 1 if kind in SCALARS else TAGGED
        if self.values < 0:
            del self.trail[4:]
            self.refuse_size(kind, TOO_MANY_VALUES)
        writer = self.writers.get(kind) or self._shape_of(kind)
        return writer(self, value)

    def item(self, key: Any, value: Any) -> Tree:
        """What sits at an index or a key."""
        return self._down("[{}]", key, value)

    def attribute(self, name: str, value: Any) -> Tree:
        return self._down(".{}", name, value)

    def text(self, kind: type, text: str) -> str:
        """Text that goes into the tree, counted."""
        self.characters -= len(text)
        if self.characters < 0:
            self.refuse_size(kind, TOO_MANY_CHARACTERS)
        return text

    def path_of(self, kind: type) -> str:
        """The class's name, under which it must be found again."""
        path = type_path(kind)
        if find_loaded(path) is not kind:
            self.refuse(kind, "define the class at the top of a module, where a replay finds it")
        return path

    def order(self, trees: list[Tree]) -> list[Tree]:
        """Pairs of a dict keep their order."""
        return trees

    def advice(self, kind: type) -> str:
        plain = plain_base(kind)
        if plain is not None:
            return f"it would come back as a plain {plain.__name__}: return one"
        return "return plain data, a dataclass or a pydantic model"

    def refuse(self, kind: type, advice: str) -> NoReturn:
        raise EncodingError(f"{self.spot()}: {kind} cannot be stored; {advice}, or give codec=")

    def refuse_size(self, kind: type, advice: str) -> NoReturn:
        """Refuse a value that is too large or too deep."""
        self.refuse(kind, advice)

    def spot(self) -> str:
        return self.root + "".join(_shown(form, name) for form, name in self.trail)

    def _down(self, form: str, name: Any, value: Any) -> Tree:
        self.trail.append((form, name))
        if len(self.trail) > DEPTH:
            del self.trail[4:]
            self.refuse_size(
                type(value), f"it contains itself or is nested deeper than {DEPTH}: flatten it"
            )
        tree = self.tree(value)
        self.trail.pop()
        return tree

    def _shape_of(self, kind: type) -> Writer:
        for fits, writer in self.shapes:
            if fits(kind):
                return writer
        return self.refuse(kind, self.advice(kind))


def encode_walking(value: Any) -> bytes:
    try:
        return to_text(Walk("result").tree(value)).encode()
    except EncodingError:
        raise
    except Exception as error:
        raise EncodingError(
            f"result: {type(value)} cannot be stored, reading it raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _shown(form: str, name: Any) -> str:
    if form == ".{}":
        return form.format(name)
    if type(name) is str:
        short = name if len(name) <= SHOWN_KEY else name[:SHOWN_KEY] + "…"
        return form.format(json.dumps(short))
    return form.format(name if type(name) is int else f"<{type(name).__name__}>")


def plain_base(kind: type) -> type | None:
    """The built-in that this class is a variety of, as OrderedDict is of dict."""
    known = (dict, list, tuple, set, frozenset, str, int, float, bytes, datetime, date, UUID)
    return next((plain for plain in known if issubclass(kind, plain)), None)


def _as_is(_: Walk, value: Any) -> Tree:
    return value


def _write_int(walk: Walk, value: int) -> Tree:
    if value.bit_length() <= PRINTABLE_BITS:
        return value
    return {TAG: "int", "v": walk.text(int, f"{value:x}")}


def _write_float(_: Walk, value: float) -> Tree:
    return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}


def _write_str(walk: Walk, value: str) -> Tree:
    if _is_unicode(walk.text(str, value)):
        return value
    return {TAG: "str", "v": _base64(value.encode("utf-8", "surrogatepass"))}


def _is_unicode(text: str) -> bool:
    """Lone surrogates have no UTF-8; two halves side by side would come back as one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write_dict(walk: Walk, value: dict[Any, Any]) -> Tree:
    if all(type(key) is str and key != TAG and _is_unicode(key) for key in value):
        return {walk.text(dict, key): walk.item(key, item) for key, item in value.items()}
    if collide(value):
        walk.refuse(type(value), COLLIDING)
    pairs = [[walk.item(key, key), walk.item(key, item)] for key, item in value.items()]
    return {TAG: "dict", "v": walk.order(pairs)}


def _write_list(walk: Walk, value: Iterable[Any]) -> Tree:
    return [walk.item(at, item) for at, item in enumerate(value)]


def _write_tuple(walk: Walk, value: Iterable[Any]) -> Tree:
    return {TAG: "tuple", "v": _write_list(walk, value)}


def _write_set(walk: Walk, value: Collection[Any]) -> Tree:
    """Sorted, so that equal sets are equal bytes in every process."""
    if collide(value):
        walk.refuse(type(value), COLLIDING)
    trees = [walk.item(item, item) for item in value]
    return {TAG: type(value).__name__, "v": sorted(trees, key=to_sorted_text)}


def _write_bytes(walk: Walk, value: bytes | bytearray) -> Tree:
    return {TAG: type(value).__name__, "v": walk.text(type(value), _base64(value))}


def _base64(data: bytes | bytearray) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _write_complex(walk: Walk, value: complex) -> Tree:
    return {TAG: "complex", "v": _write_list(walk, (value.real, value.imag))}


def _write_decimal(walk: Walk, value: Decimal) -> Tree:
    return {TAG: "decimal", "v": walk.text(Decimal, str(value))}


def _write_uuid(_: Walk, value: UUID) -> Tree:
    return {TAG: "uuid", "v": str(value)}


def _write_date(_: Walk, value: date) -> Tree:
    return {TAG: "date", "v": value.isoformat()}


def _write_timedelta(_: Walk, value: timedelta) -> Tree:
    return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}


def _write_moment(walk: Walk, value: datetime | time) -> Tree:
    """A datetime or time: the clock's reading with its offset, or with the name of its zone."""
    node: dict[str, Tree] = {TAG: type(value).__name__}
    zone = value.tzinfo
    if zone is None or type(zone) is timezone:
        if zone is not None and timedelta() != abs(zone.utcoffset(None)) < timedelta(seconds=1):
            # `fromisoformat` takes an offset below a second for none at all.
            walk.refuse(type(zone), "give it an offset of whole seconds")
        node["v"] = value.isoformat()
        node |= _name_of(zone)
    elif type(zone) is ZoneInfo and zone.key:
        node |= {"v": value.replace(tzinfo=None).isoformat(), "zone": zone.key}
    else:
        walk.refuse(type(zone), "use zoneinfo or convert it with .astimezone(timezone.utc)")
    if value.fold:
        node["fold"] = 1
    return node


def _name_of(zone: timezone | None) -> dict[str, str]:
    """Fixed offsets may carry a name of their own, such as "CET"."""
    if zone is None or zone.tzname(None) == timezone(zone.utcoffset(None)).tzname(None):
        return {}
    return {"name": zone.tzname(None)}


def _write_path(walk: Walk, value: PurePath) -> Tree:
    return {TAG: "path", "type": type(value).__name__, "v": _write_str(walk, str(value))}


def _write_enum(walk: Walk, value: enum.Enum) -> Tree:
    kind = type(value)
    if kind.__members__.get(value.name) is value:
        return {TAG: "enum", "type": walk.path_of(kind), "v": value.name}
    if isinstance(value, enum.Flag):
        return {TAG: "flag", "type": walk.path_of(kind), "v": _write_int(walk, value.value)}
    return walk.refuse(kind, "give the member a name")


def _write_namedtuple(walk: Walk, value: Any) -> Tree:
    kind = type(value)
    if len(value) != len(kind._fields) or getattr(value, "__dict__", None):
        walk.refuse(kind, "it holds more than its fields: use a dataclass")
    fields = {
        name: walk.attribute(name, item) for name, item in zip(kind._fields, value, strict=True)
    }
    return {TAG: "namedtuple", "type": walk.path_of(kind), "v": fields}


def _write_dataclass(walk: Walk, value: Any) -> Tree:
    kind = type(value)
    _need_plain_new(walk, kind)
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: walk.attribute(name, read_field(walk, value, name)) for name in names}
    return {
        TAG: "dataclass",
        "type": walk.path_of(kind),
        "v": fields,
        **_write_more(walk, value, names),
    }


def _write_pydantic(walk: Walk, value: Any) -> Tree:
    """The state that pydantic itself pickles: validators must not run twice."""
    kind = type(value)
    _need_plain_new(walk, kind)
    names = list(kind.model_fields)
    node = {
        TAG: "pydantic",
        "type": walk.path_of(kind),
        "v": _write_dict(walk, {name: read_field(walk, value, name) for name in names}),
        "set": sorted(value.__pydantic_fields_set__),
        **_write_more(walk, value, names),
    }
    for part in ("extra", "private"):
        state = getattr(value, f"__pydantic_{part}__")
        if state is not None:
            node[part] = _write_dict(walk, state)
    return node


def _need_plain_new(walk: Walk, kind: type) -> None:
    if kind.__new__ is not object.__new__:  # type: ignore[comparison-overlap]
        walk.refuse(kind, "it has a __new__ of its own or a built-in base: use a simpler class")


def read_field(walk: Walk, value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except AttributeError:
        walk.refuse(type(value), f"its field {name!r} has no value: set it")


def _write_more(walk: Walk, value: Any, names: Collection[str]) -> dict[str, Tree]:
    if has_slots_beside(names, value):
        walk.refuse(type(value), "it holds more than its fields, in slots: make them fields")
    more = more_than(names, value)
    return {"more": _write_dict(walk, more)} if more else {}


Walk.writers = {
    type(None): _as_is,
    bool: _as_is,
    int: _write_int,
    float: _write_float,
    str: _write_str,
    dict: _write_dict,
    list: _write_list,
    tuple: _write_tuple,
    set: _write_set,
    frozenset: _write_set,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    complex: _write_complex,
    Decimal: _write_decimal,
    UUID: _write_uuid,
    date: _write_date,
    datetime: _write_moment,
    time: _write_moment,
    timedelta: _write_timedelta,
    PurePosixPath: _write_path,
    PureWindowsPath: _write_path,
    PosixPath: _write_path,
    WindowsPath: _write_path,
}
Walk.shapes = (
    (is_enum, _write_enum),
    (is_namedtuple, _write_namedtuple),
    (is_dataclass, _write_dataclass),
    (is_pydantic, _write_pydantic),
)
