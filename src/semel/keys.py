"""From a call to the key it goes by.

Two calls are the same effect exactly when their keys are equal, so this part decides what happens
once. A key that is too wide swallows an effect; one that is too narrow lets it happen twice. It
never guesses: `1`, `True`, `1.0` and `"1"` are four arguments, and an argument whose meaning
cannot be written down, such as a connection, is refused by name.

`canonical` writes an argument, `Binder` finds which argument went to which parameter, `auto_key`
and `Template` make a key of them, `make_key` gives it its identity.

The easy mistake is to join parts with a character that may be inside a part. Identities are
hashes of length-prefixed parts, and a template escapes its own separators in values. What is
hashed is a format: to change it is to forget every stored key, so it carries a version.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import os
import platform
import re
import string
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar, NoReturn
from uuid import UUID

from semel.codec import (
    TAG,
    Tree,
    Walk,
    Writer,
    find_loaded,
    is_dataclass,
    is_plain,
    is_pydantic,
    plain_base,
    read_field,
    to_sorted_text,
    type_path,
)
from semel.errors import SettingsError
from semel.values import Key

__all__ = [
    "AutoKey",
    "Binder",
    "Template",
    "auto_key",
    "canonical",
    "canonical_call",
    "child_key",
    "fingerprint",
    "identity",
    "make_key",
    "new_attempt",
    "operation_of",
]

VERSION = b"semel1"

# What every store can index, and what the header draft's users send; longer keys are hashed by
# whoever has them.
LIMIT = 255

# Hex digits of SHA-256, and the colon before them.
DIGEST_ROOM = 65


# --- identity -----------------------------------------------------------------------------------


def identity(tenant: str, key: bytes, *extra: bytes) -> bytes:
    """The 32 bytes under which a tenant's key is stored."""
    return _digest(VERSION, tenant.encode("utf-8", "surrogatepass"), key, *extra)


def fingerprint(*parts: bytes) -> bytes:
    """32 bytes that differ when any part differs, or is cut elsewhere."""
    framed = [_length(len(part)) + part for part in parts]
    return hashlib.sha256(b"".join((_OF_FINGERPRINT, *framed))).digest()


def child_key(id: bytes, name: str) -> str:
    """A key to hand to a provider: the same for every attempt, another for every name.

    A UUID (version 8, RFC 9562 section 5.8), which is what providers accept.
    """
    digest = bytearray(_digest(VERSION + b"c", id, name.encode("utf-8", "surrogatepass"))[:16])
    digest[6] = digest[6] & 0x0F | 0x80
    digest[8] = digest[8] & 0x3F | 0x80
    return str(UUID(bytes=bytes(digest)))


_length = struct.Struct(">Q").pack


def _framed(part: bytes) -> bytes:
    return _length(len(part)) + part


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join([_length(len(part)) + part for part in parts])).digest()


# The beginning of `identity` for everybody who has one tenant only, hashed a million times.
_OF_NO_TENANT = _framed(VERSION) + _framed(b"")

# The same for `fingerprint`.
_OF_FINGERPRINT = _framed(VERSION + b"f")


def make_key(
    text: str | bytes,
    *,
    tenant: str = "",
    operation: str = "",
    per_operation: bool = False,
    version: str = "",
) -> Key:
    """The key with its identity: tenant and text, and what else is asked to be part of it.

    A str and the bytes of its UTF-8 are two keys. Nothing is trimmed, folded or normalised.
    """
    data = _key_bytes(text)
    if tenant == "" and version == "" and not per_operation:
        hashed = _OF_NO_TENANT + _length(len(data)) + data
        return Key(hashlib.sha256(hashed).digest(), _readable(text), tenant, operation)
    _check_name("tenant", tenant)
    _check_name("version", version)
    extra = []
    if per_operation:
        extra.append(b"o" + _operation_bytes(operation))
    if version:
        extra.append(b"v" + version.encode())
    return Key(identity(tenant, data, *extra), _readable(text), tenant, operation)


def _key_bytes(text: str | bytes) -> bytes:
    """Tagged by type; its length is checked without the tag."""
    if isinstance(text, str):
        data = b"s" + (text.encode() if text.isascii() else text.encode("utf-8", "surrogatepass"))
    elif isinstance(text, bytes):
        data = b"b" + text
    else:
        raise SettingsError(
            f"a key is a str or bytes, not {type(text)}; write it as text, such as "
            'f"order:{order_id}"'
        )
    if 1 < len(data) <= LIMIT + 1:
        return data
    if len(data) == 1:
        raise SettingsError("a key must not be empty; name what is to happen once")
    raise SettingsError(
        f"a key has at most {LIMIT} bytes, this one has {len(data) - 1}; keep its head and "
        "replace the rest by a hash of it"
    )


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def _check_name(what: str, name: str) -> None:
    """Tenants are columns to search by, so only what every store can hold and compare."""
    if name == "":
        return
    if not isinstance(name, str):
        raise SettingsError(f"a {what} is a str, not {type(name)}; write it as text")
    if _UNSTORABLE.search(name):
        raise SettingsError(f"a {what} must not contain NUL or a lone surrogate; encode it")
    if len(name) * 4 > LIMIT and len(name.encode()) > LIMIT:
        raise SettingsError(f"a {what} has at most {LIMIT} bytes; use its id or a hash of it")


def _operation_bytes(operation: str) -> bytes:
    if not operation:
        raise SettingsError("per_operation=True needs an operation; give operation=")
    return operation.encode("utf-8", "surrogatepass")


def _readable(text: str | bytes) -> str:
    """The key for people: what does not print is escaped, and the whole still fits a column."""
    if type(text) is str and text.isascii() and text.isprintable():
        return text[:LIMIT]
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    if not text.isprintable():
        text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(text) * 4 <= LIMIT:
        return str.__str__(text)
    return text.encode()[:LIMIT].decode("utf-8", "ignore")


# --- arguments ----------------------------------------------------------------------------------


def canonical(value: Any, *, where: str, remedy: str = "") -> bytes:
    """The one way to write this argument: equal bytes mean the same type and the same value.

    The order of a dict or set does not matter. An aware datetime is its reading and its offset.
    A dataclass counts with the fields that it is compared by; a pydantic model with its fields
    and extras. An object may speak for itself with `__idempotency_key__()`. `where` names the
    parameter in the refusal, `remedy` what to write instead of giving a key.
    """
    try:
        if is_plain(value):
            return to_sorted_text(value).encode()
    except (ValueError, TypeError, RuntimeError):
        pass  # NaN, a huge integer, a lone surrogate: the walk writes it
    return _text(_walk(where, remedy).tree(value))


def canonical_call(operation: str, bound: Mapping[str, Any], *, remedy: str = "") -> bytes:
    """The arguments of a call, as `canonical` would write their dict, named one by one."""
    try:
        if is_plain(bound):
            return to_sorted_text(bound).encode()
    except (ValueError, TypeError, RuntimeError):
        pass
    return _text(
        {
            name: _walk(f"{operation}: parameter {name}", remedy).tree(value)
            for name, value in bound.items()
        }
    )


def _walk(where: str, remedy: str) -> _Canon:
    walk = _Canon(where)
    walk.remedy = remedy or walk.remedy
    return walk


def _text(tree: Tree) -> bytes:
    return to_sorted_text(tree).encode()


class _Canon(Walk):
    """The walk of the codec, for equality instead of rebuilding."""

    remedy = "give key= with what identifies the call"

    def path_of(self, kind: type) -> str:
        return type_path(kind)

    def order(self, trees: list[Tree]) -> list[Tree]:
        return sorted(trees, key=to_sorted_text)

    def advice(self, kind: type) -> str:
        plain = plain_base(kind)
        if plain is not None:
            return f"pass a plain {plain.__name__}"
        return "give the class a method __idempotency_key__()"

    def refuse(self, kind: type, advice: str) -> NoReturn:
        raise SettingsError(
            f"{self.spot()}: {kind} cannot be part of a key; {advice}, or {self.remedy}"
        )


def _write_instant(_: Walk, value: datetime) -> Tree:
    """Reading and offset; by which rule the offset was found does not matter."""
    node = {TAG: "datetime", "v": value.isoformat()}
    return node | {"fold": 1} if value.fold and value.utcoffset() is None else node


def _write_own_key(walk: Walk, value: Any) -> Tree:
    own = value.__idempotency_key__()
    return {
        TAG: "own",
        "type": walk.path_of(type(value)),
        "v": walk.attribute("__idempotency_key__()", own),
    }


def _write_compared(walk: Walk, value: Any) -> Tree:
    names = [field.name for field in fields(value) if field.compare]
    return _write_fields(walk, value, {name: read_field(walk, value, name) for name in names})


def _write_model(walk: Walk, value: Any) -> Tree:
    named = {name: read_field(walk, value, name) for name in type(value).model_fields}
    return _write_fields(walk, value, named | (value.__pydantic_extra__ or {}))


def _write_fields(walk: Walk, value: Any, named: dict[str, Any]) -> Tree:
    pairs = [[walk.attribute(name, name), walk.attribute(name, named[name])] for name in named]
    return {TAG: "fields", "type": walk.path_of(type(value)), "v": walk.order(pairs)}


def _write_named(walk: Walk, value: Any) -> Tree:
    """A function or class that its module holds under its own name."""
    path = type_path(value)
    if find_loaded(path) is not value:
        walk.refuse(type(value), "define it at the top of a module")
    return {TAG: "named", "v": path}


def _has_own_key(kind: type) -> bool:
    return hasattr(kind, "__idempotency_key__")


def _is_named(kind: type) -> bool:
    return issubclass(kind, (FunctionType, BuiltinFunctionType, type))


_OWN_SHAPES: dict[Any, Writer] = {is_dataclass: _write_compared, is_pydantic: _write_model}

_Canon.writers = {**Walk.writers, datetime: _write_instant}
_Canon.shapes = (
    (_has_own_key, _write_own_key),
    *((fits, _OWN_SHAPES.get(fits, writer)) for fits, writer in Walk.shapes),
    (_is_named, _write_named),
)


# --- calls --------------------------------------------------------------------------------------


class Binder:
    """Says which argument goes to which parameter, the way the function itself would.

    `names` are the parameters; `self_name` is the one that stands for the object of a method. A
    partial counts with what it holds, a bound method with its object.

    Binding by `inspect.Signature.bind` takes longer than claiming a key in memory. So a stub with
    the function's own parameters is compiled once, and Python binds: at its speed, and with the
    very TypeError of the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn, self._held, self._named = _opened(fn)
        try:
            parameters = list(inspect.signature(self._fn).parameters.values())
        except (ValueError, TypeError) as error:
            raise SettingsError(
                f"the parameters of {type(fn)} cannot be read; wrap it in a function"
            ) from error
        self.names = tuple(parameter.name for parameter in parameters)
        self.self_name = _self_name(self._fn, self.names)
        self._stub = _stub(self._fn, parameters)
        kinds = inspect.Parameter
        in_order = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        self._positional = [p.name for p in parameters if p.kind in in_order]
        self._by_name = [p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY]
        self._star = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None)
        self._stars = next((p.name for p in parameters if p.kind is kinds.VAR_KEYWORD), None)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every parameter with its argument, defaults included."""
        if self._held or self._named:
            args, kwargs = (*self._held, *args), {**self._named, **kwargs}
        bound: dict[str, Any] = self._stub(*args, **kwargs)
        return bound

    def spread(
        self, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call as if every default had been spelled out.

        What a partial holds was never the caller's to give, so its calls stay as they are.
        """
        if self._held or self._named:
            return args, kwargs
        spelled = tuple(bound[name] for name in self._positional)
        if self._star:
            spelled += bound[self._star]
        named = {name: bound[name] for name in self._by_name}
        if self._stars:
            named |= bound[self._stars]
        return spelled, named


def _opened(fn: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The function inside a partial, a bound method or a callable object, and what those hold."""
    if isinstance(fn, functools.partial):
        inner, held, named = _opened(fn.func)
        return inner, (*held, *fn.args), {**named, **fn.keywords}
    if isinstance(fn, MethodType):
        return fn.__func__, (fn.__self__,), {}
    if isinstance(fn, (FunctionType, BuiltinFunctionType, type)):
        return fn, (), {}
    return _opened_object(fn)


def _opened_object(fn: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A decorator that is an object, such as `functools.cache`, stands for what it wraps."""
    if hasattr(fn, "__wrapped__"):
        return fn, (), {}
    call = type(fn).__call__
    if not isinstance(call, FunctionType):
        raise SettingsError(f"the parameters of {type(fn)} cannot be read; wrap it in a function")
    return call, (fn,), {}


def _self_name(fn: Any, names: tuple[str, ...]) -> str | None:
    """Inside a class body the class does not exist yet: the name and the place are all there is."""
    owner = getattr(fn, "__qualname__", "").rpartition(".")[0]
    in_class = bool(owner) and not owner.endswith("<locals>")
    return names[0] if in_class and names and names[0] in {"self", "cls"} else None


def _stub(fn: Any, parameters: list[inspect.Parameter]) -> Callable[..., dict[str, Any]]:
    """A function with these parameters that answers a dict of them.

    The source holds nothing but the parameters' names, which Python has checked to be names.
    Defaults are handed over as they are. `inspect.signature` may have followed `__wrapped__`.
    """
    names = ", ".join(f"{parameter.name!r}: {parameter.name}" for parameter in parameters)
    source = f"lambda {', '.join(_declared(parameters))}: {{{names}}}"
    stub: FunctionType = eval(source, {"__builtins__": {}})  # noqa: S307
    given = [p for p in parameters if p.default is not p.empty]
    stub.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
    stub.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    stub.__qualname__ = getattr(fn, "__qualname__", type(fn).__qualname__)
    return stub


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def _declared(parameters: list[inspect.Parameter]) -> Iterable[str]:
    """The parameters as they stand in a `def`, with `/` and `*` where they belong."""
    by_kind = {
        kind: [_STARS.get(kind, "") + p.name for p in group]
        for kind, group in itertools.groupby(parameters, lambda p: p.kind)
    }
    for kind, declared in by_kind.items():
        if kind is inspect.Parameter.KEYWORD_ONLY and inspect.Parameter.VAR_POSITIONAL not in (
            by_kind
        ):
            yield "*"
        yield from declared
        if kind is inspect.Parameter.POSITIONAL_ONLY:
            yield "/"


def operation_of(fn: Any) -> str:
    """The name that a function goes by: `module.qualname`.

    A function inside another keeps one name from run to run. A lambda has none.
    """
    inner = _opened(fn)[0]
    name = getattr(inner, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise SettingsError(
            "a lambda has no name to know it by in the next process; give operation=, or use def"
        )
    return f"{inner.__module__}.{name}"


class AutoKey:
    """All arguments are the key: `module.qualname:` and the hash of operation and arguments.

    The name is for people and may be cut; the hash covers all of it.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._head = operation.encode()[: LIMIT - DIGEST_ROOM].decode("utf-8", "ignore") + ":"
        self._hashed = b"".join(_framed(part) for part in (VERSION + b"f", operation.encode()))

    def render(self, bound: Mapping[str, Any]) -> str:
        """The key of a call with these arguments."""
        arguments = _framed(canonical_call(self._operation, bound))
        return self._head + hashlib.sha256(self._hashed + arguments).hexdigest()


def auto_key(operation: str, bound: Mapping[str, Any]) -> str:
    """The key of one call of a function that has no key of its own."""
    return AutoKey(operation).render(bound)


# --- templates ----------------------------------------------------------------------------------


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
        self._escape = str.maketrans(
            {char: _escaped(char) for char in ("%", *_separators(self._fields))}
        )

    def render(self, bound: Mapping[str, Any]) -> str:
        """The key of a call."""
        parts = [
            field.literal + _shown(field, field.value(bound)).translate(self._escape)
            for field in self._fields
        ]
        return "".join(parts) + self._tail


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


def _shown(field: _Field, value: Any) -> str:
    show = _SHOWN.get(type(value)) or (_enum_name if isinstance(value, Enum) else None)
    if value is None or (type(value) is str and not value):
        raise SettingsError(
            f"the key template's {{{field.source}}} is {value!r} in this call; a key must name "
            "something, so give the value or leave the field out of the template"
        )
    if show is None:
        raise SettingsError(
            f"the key template's {{{field.source}}} is a {type(value)}; name its id, or use a "
            "function as key="
        )
    return show(value)


def _enum_name(value: Any) -> str:
    return str(value.name)


_SHOWN: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys((str, bool, int, UUID, Decimal), str),
    float: repr,
    **dict.fromkeys((date, datetime, time), lambda value: value.isoformat()),
}


# --- attempts -----------------------------------------------------------------------------------


class _Holder:
    """Host and process, worked out once per process: after a fork the number is another."""

    pid: ClassVar[int] = 0
    prefix: ClassVar[str] = ""
    count: ClassVar[Iterator[int]] = itertools.count()


def new_attempt() -> str:
    """A name for one try: `host:pid/`, 64 bits drawn once per process, and a count.

    As unlikely to meet another's as 64 random bits each time, without a system call each time.
    """
    pid = os.getpid()
    if pid != _Holder.pid:
        _Holder.prefix = f"{platform.node()[:40]}:{pid}/{os.urandom(8).hex()}"
        _Holder.pid = pid
    return f"{_Holder.prefix}{next(_Holder.count):x}"
