"""From JSON back to a value.

Reading imports nothing and runs no constructor. Classes are looked up among the modules that are
loaded, and only data classes, enums, named tuples and pydantic models are rebuilt, field by
field. Whoever can write to the store can choose among those, and no more.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import json
import re
from collections.abc import Callable, Collection
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, NoReturn, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from semel.codec.classes import (
    collide,
    find_loaded,
    is_dataclass,
    is_enum,
    is_namedtuple,
    is_pydantic,
)
from semel.codec.errors import DecodingError
from semel.codec.plain import TAG

T = TypeVar("T")


def _class_at(node: dict[str, Any], fits: Callable[[type], bool], what: str) -> Any:
    path = need(node, "type", str)
    kind = find_loaded(path)
    if kind is None:
        raise DecodingError(
            f"{path} is not loaded here; import its module before the result is replayed, or, if "
            "it was renamed, keep the old name as an alias until the record has expired"
        )
    if not isinstance(kind, type) or not fits(kind):
        raise DecodingError(f"{path} is not {what}; it has changed since the result was stored")
    return kind


def need(node: dict[str, Any], name: str, kind: type[T]) -> T:
    value = node.get(name)
    if type(value) is not kind:
        raise DecodingError(f"a stored {node.get(TAG)!r} has no valid {name!r}")
    return value


def _read_float(node: dict[str, Any]) -> float:
    return float(need(node, "v", str))


def _read_int(node: dict[str, Any]) -> int:
    return int(need(node, "v", str), 16)


def _read_str(node: dict[str, Any]) -> str:
    return _read_bytes(node).decode("utf-8", "surrogatepass")


def _read_dict(node: dict[str, Any]) -> dict[Any, Any]:
    pairs = need(node, "v", list)
    _need_spread([key for key, _ in pairs])
    return dict(pairs)


def _read_tuple(node: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(need(node, "v", list))


def _read_set(node: dict[str, Any]) -> set[Any]:
    return set(_need_spread(need(node, "v", list)))


def _read_frozenset(node: dict[str, Any]) -> frozenset[Any]:
    return frozenset(_need_spread(need(node, "v", list)))


def _need_spread(members: list[Any]) -> list[Any]:
    if collide(members):
        raise DecodingError("too many stored members have one hash; was it written by us?")
    return members


def _read_bytes(node: dict[str, Any]) -> bytes:
    return binascii.a2b_base64(need(node, "v", str), strict_mode=True)


def _read_bytearray(node: dict[str, Any]) -> bytearray:
    return bytearray(_read_bytes(node))


def _read_complex(node: dict[str, Any]) -> complex:
    real, imag = need(node, "v", list)
    return complex(real, imag)


def _read_decimal(node: dict[str, Any]) -> Decimal:
    return Decimal(need(node, "v", str))


def _read_uuid(node: dict[str, Any]) -> UUID:
    return UUID(need(node, "v", str))


def _read_date(node: dict[str, Any]) -> date:
    return date.fromisoformat(need(node, "v", str))


def _read_timedelta(node: dict[str, Any]) -> timedelta:
    days, seconds, microseconds = need(node, "v", list)
    return timedelta(days, seconds, microseconds)


def _read_datetime(node: dict[str, Any]) -> datetime:
    return _in_zone(node, datetime.fromisoformat(need(node, "v", str)))


def _read_time(node: dict[str, Any]) -> time:
    return _in_zone(node, time.fromisoformat(need(node, "v", str)))


Moment = TypeVar("Moment", datetime, time)


def _in_zone(node: dict[str, Any], moment: Moment) -> Moment:
    offset = moment.utcoffset()
    if "zone" in node:
        moment = moment.replace(tzinfo=_zone(need(node, "zone", str)))
    elif "name" in node and offset is not None:
        moment = moment.replace(tzinfo=timezone(offset, need(node, "name", str)))
    return moment.replace(fold=1) if "fold" in node else moment


def _zone(key: str) -> ZoneInfo:
    """A time zone is a file: only a name that looks like one is looked up."""
    if not re.fullmatch(r"\w[\w+-]*(/\w[\w+-]*)*", key, re.ASCII):
        raise DecodingError(f"{key!r} is not the name of a time zone")
    return ZoneInfo(key)


_PATHS = {kind.__name__: kind for kind in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)}


def _read_path(node: dict[str, Any]) -> PurePath:
    return _PATHS[need(node, "type", str)](need(node, "v", str))


def _read_enum(node: dict[str, Any]) -> enum.Enum:
    kind = _class_at(node, is_enum, "an enum")
    name = need(node, "v", str)
    member: enum.Enum | None = kind.__members__.get(name)
    if member is None:
        raise DecodingError(
            f"{node['type']} has no member {name!r} any more; keep the old name as an alias"
        )
    return member


def _read_flag(node: dict[str, Any]) -> enum.Flag:
    kind = _class_at(node, lambda kind: issubclass(kind, enum.Flag), "a flag")
    flag: enum.Flag = kind(need(node, "v", int))
    return flag


def _read_namedtuple(node: dict[str, Any]) -> Any:
    kind = _class_at(node, is_namedtuple, "a named tuple")
    fields = _filled(node, kind._fields, kind._field_defaults.__getitem__)
    return tuple.__new__(kind, fields.values())


def _read_dataclass(node: dict[str, Any]) -> Any:
    """Fields are set behind `__init__`, `__post_init__` and `frozen`: they ran the first time."""
    kind = _class_at(node, is_dataclass, "a dataclass")
    by_name = {field.name: field for field in dataclasses.fields(kind)}
    made = object.__new__(kind)
    for name, value in _filled(node, by_name, lambda name: _default(by_name[name])).items():
        object.__setattr__(made, name, value)
    if "more" in node:
        vars(made).update(need(node, "more", dict))
    return made


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise KeyError(field.name)


def _read_pydantic(node: dict[str, Any]) -> Any:
    kind = _class_at(node, is_pydantic, "a pydantic model")
    made = object.__new__(kind)
    fields = _filled(node, kind.model_fields, lambda name: _model_default(kind, name))
    state = {
        "__dict__": fields | node.get("more", {}),
        "__pydantic_fields_set__": set(_need_spread(need(node, "set", list))),
        "__pydantic_extra__": node.get("extra"),
        "__pydantic_private__": node.get("private"),
    }
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made


def _model_default(kind: Any, name: str) -> Any:
    field = kind.model_fields[name]
    if field.is_required():
        raise KeyError(name)
    return field.get_default(call_default_factory=True)


def _filled(
    node: dict[str, Any], names: Collection[str], default: Callable[[str], Any]
) -> dict[str, Any]:
    """The stored fields, and defaults for those that the class has got since."""
    stored = need(node, "v", dict)
    if unknown := [name for name in stored if name not in names]:
        raise DecodingError(f"{node['type']} has no field {unknown[0]!r} any more; {_CHANGED}")
    try:
        return {name: stored[name] if name in stored else default(name) for name in names}
    except KeyError as missing:
        raise DecodingError(
            f"{node['type']} has got a field {missing} without a default; {_CHANGED}"
        ) from None


_CHANGED = "keep the class readable until its records have expired, or give the guard a version="

_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "float": _read_float,
    "int": _read_int,
    "str": _read_str,
    "dict": _read_dict,
    "tuple": _read_tuple,
    "set": _read_set,
    "frozenset": _read_frozenset,
    "bytes": _read_bytes,
    "bytearray": _read_bytearray,
    "complex": _read_complex,
    "decimal": _read_decimal,
    "uuid": _read_uuid,
    "date": _read_date,
    "datetime": _read_datetime,
    "time": _read_time,
    "timedelta": _read_timedelta,
    "path": _read_path,
    "enum": _read_enum,
    "flag": _read_flag,
    "namedtuple": _read_namedtuple,
    "dataclass": _read_dataclass,
    "pydantic": _read_pydantic,
}


def _revive(node: dict[str, Any]) -> Any:
    if TAG not in node:
        return node
    reader = _READERS.get(need(node, TAG, str))
    if reader is None:
        raise DecodingError(
            f"the stored result holds a {node[TAG]!r}, which this version does not know; it was "
            "written by a newer one"
        )
    return reader(node)


def _refuse_constant(name: str) -> NoReturn:
    raise DecodingError(f"the stored result holds a bare {name}, which is not JSON")


def _scanner(hook: Callable[[dict[str, Any]], Any] | None) -> Callable[[str, int], Any]:
    """`raw_decode` without the two searches for white space, which we never write."""
    decoder = json.JSONDecoder(object_hook=hook, parse_constant=_refuse_constant)
    scan: Callable[[str, int], Any] = decoder.scan_once  # type: ignore[attr-defined]
    return scan


scan_plain = _scanner(None)
scan_tagged = _scanner(_revive)
