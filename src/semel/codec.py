"""What a function returned, as bytes, and back: equal to the original, of the same types.

The bytes are JSON. Plain values look as they do anywhere. Everything else is an object whose "$"
says what it was: `(1, 2)` is `{"$":"tuple","v":[1,2]}`. A dict with a "$" of its own is written
as pairs, so it is never taken for one of ours.

Reading imports nothing and runs no constructor. Classes are looked up among the modules that are
loaded, and only data classes, enums, named tuples and pydantic models are rebuilt, field by
field. Whoever can write to the store can choose among those, and no more. Bytes that cannot be
read raise `DecodingError` and nothing else.

The easy mistake is to trust `json` with types: it turns a tuple into a list, an `IntEnum` into a
number and the key 1 into "1", without a word. So types are compared exactly, and what could not
be rebuilt is refused with `EncodingError` that names the spot: first result and replay never
differ.
"""

from __future__ import annotations

import binascii
import dataclasses
import enum
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from functools import cached_property
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from types import MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from semel.errors import ReplayedError, SemelError

__all__ = [
    "CODEC",
    "Codec",
    "DecodingError",
    "EncodingError",
    "JSONCodec",
    "decode_error",
    "encode_error",
]

T = TypeVar("T")
Tree: TypeAlias = Any
Writer: TypeAlias = "Callable[[Walk, Any], Tree]"

TAG = "$"
SCALARS = frozenset({type(None), bool, int, float, str})

# Deep enough for any result a person would read, and far from Python's recursion limit: a tagged
# value takes up to three levels of JSON. A value that contains itself ends here too.
DEPTH = 64

# Python refuses to print integers beyond a limit that a process may lower to 640 digits, which is
# 2126 bits; larger ones are written in hexadecimal, where there is no limit.
PRINTABLE_BITS = 2100

# What a spot in an error message shows of a long key.
SHOWN_KEY = 40


class EncodingError(SemelError, TypeError):
    """The value cannot be stored so that it comes back as it was. The message names the spot."""


class DecodingError(SemelError, ValueError):
    """The bytes cannot be turned back into a value here. The message says what would help."""


class Codec(Protocol):
    """Turns results into bytes.

    What `decode` gives for the bytes of `encode` equals the original. A value for which that
    cannot be promised is refused with `EncodingError`.
    """

    def encode(self, value: Any) -> bytes:
        """The value as bytes."""
        ...

    def decode(self, data: bytes) -> Any:
        """The value again; `DecodingError` when the bytes cannot be read here."""
        ...


class JSONCodec:
    """The codec used unless another is given: readable JSON, type-faithful, no pickle."""

    def encode(self, value: Any) -> bytes:
        """The value as JSON in UTF-8, valid for any reader."""
        scalar = PLAIN_TEXT.get(type(value))
        try:
            if scalar is not None:
                return scalar(value).encode()
            if is_plain(value):
                return to_text(value).encode()
        except (ValueError, TypeError, RuntimeError):
            # NaN, a huge integer, a lone surrogate, or a value that another thread changes
            # under us: the walk writes it, or names it.
            pass
        return _encode_walking(value)

    def decode(self, data: bytes) -> Any:
        """The value again, rebuilt from loaded modules only."""
        scan = _scan_tagged if b'"$"' in data else _scan_plain
        try:
            text = data.decode()
            value, end = scan(text, 0)
        except DecodingError:
            raise
        except StopIteration:
            raise DecodingError("the stored result is not JSON; was it written by us?") from None
        except Exception as error:
            raise DecodingError(
                f"the stored result cannot be read: {type(error).__name__}: {error}"
            ) from error
        if end != len(text):
            raise DecodingError("the stored result goes on after its end; was it written by us?")
        return value


CODEC: Codec = JSONCodec()


# --- plain values -------------------------------------------------------------------------------


def is_plain(value: Any, depth: int = DEPTH) -> bool:
    """Would `json` write this faithfully, as far as types tell? The hot path of every result."""
    kind = type(value)
    if kind in SCALARS:
        return True
    if kind is dict:
        for key in value:
            if type(key) is not str or key == TAG:
                return False
        value = value.values()
    elif kind is not list:
        return False
    for item in value:
        if type(item) not in SCALARS and not is_plain(item, depth - 1):
            return False
    return depth > 0


def _unexpected(value: Any) -> NoReturn:
    raise TypeError(f"{type(value)} among plain values")


def _text_maker(*, sort_keys: bool) -> Callable[[Any], str]:
    """`json.JSONEncoder.encode`, with the C encoder built once instead of for every call.

    That is half of the time for a small dict. Where the C encoder is missing or has changed, the
    public way is taken.
    """
    settings: dict[str, Any] = {"ensure_ascii": False, "check_circular": False, "allow_nan": False}
    public = json.JSONEncoder(separators=(",", ":"), sort_keys=sort_keys, **settings)
    try:
        quote = json.encoder.c_encode_basestring  # type: ignore[attr-defined]
        chunks = json.encoder.c_make_encoder(  # type: ignore[attr-defined]
            None, _unexpected, quote, None, ":", ",", sort_keys, False, False
        )
        chunks({"": [0.5]}, 0)
    except (AttributeError, TypeError):
        return public.encode
    return lambda value: "".join(chunks(value, 0))


to_text = _text_maker(sort_keys=False)
to_sorted_text = _text_maker(sort_keys=True)


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError
    return float.__repr__(value)


# What `to_text` makes of a scalar, in a tenth of the time. Raises ValueError like it.
PLAIN_TEXT: dict[type, Callable[[Any], str]] = {
    str: json.encoder.encode_basestring,
    int: int.__repr__,
    float: _float_text,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}


# --- writing ------------------------------------------------------------------------------------


class Walk:
    """One pass over a value that makes a JSON tree of it.

    `trail` is the way from the root to here. It names the spot in an error, and its length is
    the depth. A walk that raised is thrown away.
    """

    writers: ClassVar[Mapping[type, Writer]] = {}
    shapes: ClassVar[tuple[tuple[Callable[[type], bool], Writer], ...]] = ()

    def __init__(self, root: str) -> None:
        self.root = root
        self.trail: list[tuple[str, Any]] = []

    def tree(self, value: Any) -> Tree:
        kind = type(value)
        writer = self.writers.get(kind) or self._shape_of(kind)
        return writer(self, value)

    def item(self, key: Any, value: Any) -> Tree:
        """What sits at an index or a key."""
        return self._down("[{}]", key, value)

    def attribute(self, name: str, value: Any) -> Tree:
        return self._down(".{}", name, value)

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

    def spot(self) -> str:
        return self.root + "".join(_shown(form, name) for form, name in self.trail)

    def _down(self, form: str, name: Any, value: Any) -> Tree:
        self.trail.append((form, name))
        if len(self.trail) > DEPTH:
            del self.trail[4:]
            self.refuse(
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


def _encode_walking(value: Any) -> bytes:
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


def _write_int(_: Walk, value: int) -> Tree:
    if value.bit_length() <= PRINTABLE_BITS:
        return value
    return {TAG: "int", "v": f"{value:x}"}


def _write_float(_: Walk, value: float) -> Tree:
    return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}


def _write_str(_: Walk, value: str) -> Tree:
    if _is_unicode(value):
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
        return {key: walk.item(key, item) for key, item in value.items()}
    pairs = [[walk.item(key, key), walk.item(key, item)] for key, item in value.items()]
    return {TAG: "dict", "v": walk.order(pairs)}


def _write_list(walk: Walk, value: Iterable[Any]) -> Tree:
    return [walk.item(at, item) for at, item in enumerate(value)]


def _write_tuple(walk: Walk, value: Iterable[Any]) -> Tree:
    return {TAG: "tuple", "v": _write_list(walk, value)}


def _write_set(walk: Walk, value: Collection[Any]) -> Tree:
    """Sorted, so that equal sets are equal bytes in every process."""
    trees = [walk.item(item, item) for item in value]
    return {TAG: type(value).__name__, "v": sorted(trees, key=to_sorted_text)}


def _write_bytes(_: Walk, value: bytes | bytearray) -> Tree:
    return {TAG: type(value).__name__, "v": _base64(value)}


def _base64(data: bytes | bytearray) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _write_complex(walk: Walk, value: complex) -> Tree:
    return {TAG: "complex", "v": _write_list(walk, (value.real, value.imag))}


def _write_decimal(_: Walk, value: Decimal) -> Tree:
    return {TAG: "decimal", "v": str(value)}


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
    """Attributes that are no fields but belong to the object, as `__post_init__` may set them."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    more = {
        name: item
        for name, item in held.items()
        if name not in names
        and name != "__orig_class__"
        and not isinstance(getattr(type(value), name, None), cached_property)
    }
    return {"more": _write_dict(walk, more)} if more else {}


def is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def is_dataclass(kind: type) -> bool:
    return dataclasses.is_dataclass(kind)


def is_pydantic(kind: type) -> bool:
    """A model of pydantic 2; without pydantic loaded there can be none."""
    base = getattr(sys.modules.get("pydantic.main"), "BaseModel", None)
    return base is not None and issubclass(kind, base) and hasattr(base, "model_fields")


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


# --- classes by name ----------------------------------------------------------------------------


def type_path(kind: Any) -> str:
    """`module:qualname` of a class or function."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_loaded(path: str) -> Any:
    """What a loaded module holds under this name, or None.

    Namespaces are read directly: a module's `__getattr__` may import, and a lazy module does.
    """
    module, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module)
    if not isinstance(found, ModuleType):
        return None
    space: Mapping[str, Any] = object.__getattribute__(found, "__dict__")
    for name in qualname.split("."):
        found = space.get(name)
        space = type.__getattribute__(found, "__dict__") if isinstance(found, type) else {}
    return found


def _class_at(node: dict[str, Any], fits: Callable[[type], bool], what: str) -> Any:
    path = _need(node, "type", str)
    kind = find_loaded(path)
    if kind is None:
        raise DecodingError(
            f"{path} is not loaded here; import its module before the result is replayed, or, if "
            "it was renamed, keep the old name as an alias until the record has expired"
        )
    if not isinstance(kind, type) or not fits(kind):
        raise DecodingError(f"{path} is not {what}; it has changed since the result was stored")
    return kind


# --- reading ------------------------------------------------------------------------------------


def _need(node: dict[str, Any], name: str, kind: type[T]) -> T:
    value = node.get(name)
    if type(value) is not kind:
        raise DecodingError(f"a stored {node.get(TAG)!r} has no valid {name!r}")
    return value


def _read_float(node: dict[str, Any]) -> float:
    return float(_need(node, "v", str))


def _read_int(node: dict[str, Any]) -> int:
    return int(_need(node, "v", str), 16)


def _read_str(node: dict[str, Any]) -> str:
    return _read_bytes(node).decode("utf-8", "surrogatepass")


def _read_dict(node: dict[str, Any]) -> dict[Any, Any]:
    return dict(_need(node, "v", list))


def _read_tuple(node: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(_need(node, "v", list))


def _read_set(node: dict[str, Any]) -> set[Any]:
    return set(_need(node, "v", list))


def _read_frozenset(node: dict[str, Any]) -> frozenset[Any]:
    return frozenset(_need(node, "v", list))


def _read_bytes(node: dict[str, Any]) -> bytes:
    return binascii.a2b_base64(_need(node, "v", str), strict_mode=True)


def _read_bytearray(node: dict[str, Any]) -> bytearray:
    return bytearray(_read_bytes(node))


def _read_complex(node: dict[str, Any]) -> complex:
    real, imag = _need(node, "v", list)
    return complex(real, imag)


def _read_decimal(node: dict[str, Any]) -> Decimal:
    return Decimal(_need(node, "v", str))


def _read_uuid(node: dict[str, Any]) -> UUID:
    return UUID(_need(node, "v", str))


def _read_date(node: dict[str, Any]) -> date:
    return date.fromisoformat(_need(node, "v", str))


def _read_timedelta(node: dict[str, Any]) -> timedelta:
    days, seconds, microseconds = _need(node, "v", list)
    return timedelta(days, seconds, microseconds)


def _read_datetime(node: dict[str, Any]) -> datetime:
    return _in_zone(node, datetime.fromisoformat(_need(node, "v", str)))


def _read_time(node: dict[str, Any]) -> time:
    return _in_zone(node, time.fromisoformat(_need(node, "v", str)))


Moment = TypeVar("Moment", datetime, time)


def _in_zone(node: dict[str, Any], moment: Moment) -> Moment:
    offset = moment.utcoffset()
    if "zone" in node:
        moment = moment.replace(tzinfo=_zone(_need(node, "zone", str)))
    elif "name" in node and offset is not None:
        moment = moment.replace(tzinfo=timezone(offset, _need(node, "name", str)))
    return moment.replace(fold=1) if "fold" in node else moment


def _zone(key: str) -> ZoneInfo:
    """A time zone is a file: only a name that looks like one is looked up."""
    if not re.fullmatch(r"\w[\w+-]*(/\w[\w+-]*)*", key, re.ASCII):
        raise DecodingError(f"{key!r} is not the name of a time zone")
    return ZoneInfo(key)


_PATHS = {kind.__name__: kind for kind in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)}


def _read_path(node: dict[str, Any]) -> PurePath:
    return _PATHS[_need(node, "type", str)](_need(node, "v", str))


def _read_enum(node: dict[str, Any]) -> enum.Enum:
    kind = _class_at(node, is_enum, "an enum")
    name = _need(node, "v", str)
    member: enum.Enum | None = kind.__members__.get(name)
    if member is None:
        raise DecodingError(
            f"{node['type']} has no member {name!r} any more; keep the old name as an alias"
        )
    return member


def _read_flag(node: dict[str, Any]) -> enum.Flag:
    kind = _class_at(node, lambda kind: issubclass(kind, enum.Flag), "a flag")
    flag: enum.Flag = kind(_need(node, "v", int))
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
        vars(made).update(_need(node, "more", dict))
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
        "__pydantic_fields_set__": set(_need(node, "set", list)),
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
    stored = _need(node, "v", dict)
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
    reader = _READERS.get(_need(node, TAG, str))
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


_scan_plain = _scanner(None)
_scan_tagged = _scanner(_revive)


# --- errors as outcomes -------------------------------------------------------------------------


def encode_error(error: BaseException) -> bytes:
    """A failure as bytes: its type, its message, and what is needed to build it again.

    Never refuses: an error whose arguments or attributes cannot be stored keeps its message.
    """
    record: dict[str, Any] = {"type": type_path(type(error)), "message": message_of(error)}
    if notes := _notes(error):
        record["notes"] = notes
    if isinstance(error, BaseExceptionGroup):
        record["parts"] = [_line(part) for part in error.exceptions]
    if error.__cause__ is not None:
        record["cause"] = [type_path(type(error.__cause__)), message_of(error.__cause__)]
    try:
        return CODEC.encode(record | _ingredients(error))
    except EncodingError:
        return CODEC.encode(record)


def decode_error(data: bytes) -> BaseException:
    """The recorded failure, to be raised again; a `ReplayedError` where its type cannot be had.

    Its `str()` is that of the original. Only an `Exception` comes back as itself: a stored
    `SystemExit` or cancellation must not stop whoever replays it.
    """
    record = CODEC.decode(data)
    try:
        path, message = _need(record, "type", str), _need(record, "message", str)
        error = _rebuilt(record) or ReplayedError(message, type_path=path)
        return _with_context(error, record)
    except Exception as problem:
        raise DecodingError("the stored error is not a record of one") from problem


def message_of(error: BaseException) -> str:
    """What the error says; nothing, if saying it fails."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ is no reason to lose the failure
        return ""


def _line(error: BaseException) -> str:
    return f"{type_path(type(error))}: {message_of(error)}"


def _notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", ()) if type(note) is str]


def _ingredients(error: BaseException) -> dict[str, Any]:
    """Arguments and attributes. Slots are not read: such a class is not rebuilt."""
    kind = type(error)
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        return {}
    given, state = _reduced(error)
    state = {name: value for name, value in state.items() if name != "__notes__"}
    return {"args": error.args, "given": given, "state": state}


def _reduced(error: BaseException) -> tuple[Any, dict[str, Any]]:
    """C code knows what `args` leaves out, such as the file name of an OSError."""
    reduced: Any = ()
    if isinstance(type(error).__reduce__, MethodDescriptorType):
        reduced = error.__reduce__()
    given = reduced[1] if len(reduced) > 1 else error.args
    return given, reduced[2] if len(reduced) > 2 and reduced[2] else vars(error)  # noqa: PLR2004


def _rebuilt(record: dict[str, Any]) -> Exception | None:
    """The original again, or None unless it is sure to be the same."""
    kind = find_loaded(record["type"])
    if "args" not in record or not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    try:
        error = _made(kind, record["given"])
        for name, value in {**record["state"], "args": record["args"]}.items():
            object.__setattr__(error, name, value)
        return error if type(error) is kind and str(error) == record["message"] else None
    except Exception:  # noqa: BLE001 - whatever the class does when built, the message is left
        return None


def _made(kind: type[Exception], given: tuple[Any, ...]) -> Exception:
    """A constructor in Python may want other arguments than `args`; one in C does not."""
    if isinstance(kind.__init__, WrapperDescriptorType):
        return kind(*given)
    return kind.__new__(kind, *given)


def _with_context(error: Exception, record: dict[str, Any]) -> Exception:
    for note in [*record.get("notes", ()), *record.get("parts", ())]:
        error.add_note(note)
    if "cause" in record:
        path, message = record["cause"]
        error.__cause__ = ReplayedError(message, type_path=path)
    return error
