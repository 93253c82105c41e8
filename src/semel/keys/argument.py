"""An argument as bytes: equal exactly when type and value are.

The walk is the codec's, for equality instead of rebuilding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from datetime import date, datetime, timedelta
from decimal import Decimal
from types import BuiltinFunctionType, FunctionType
from typing import Any, NoReturn, TypeAlias
from uuid import UUID

from semel.codec.classes import (
    find_loaded,
    has_slots_beside,
    is_dataclass,
    is_pydantic,
    more_than,
    type_path,
)
from semel.codec.plain import DEPTH, PLAIN_TEXT, TAG, TooMuchError, is_plain, to_sorted_text
from semel.codec.writing import Tree, Walk, Writer, plain_base, read_field
from semel.errors import SettingsError

SPEAK = "give the class a method __idempotency_key__()"


def canonical(value: Any, *, where: str, remedy: str = "") -> bytes:
    """The one way to write this argument: equal bytes mean the same type and the same value.

    The order of a dict or set does not matter. An aware datetime is its reading and its offset.
    A dataclass counts with the fields that it is compared by; a pydantic model with its fields
    and extras; one that holds anything besides is refused. An object may speak for itself with
    `__idempotency_key__()`. `where` names the parameter in the refusal, `remedy` what to write
    instead of giving a key.
    """
    try:
        if is_plain(value):
            return to_sorted_text(value).encode()
    except TooMuchError as much:
        _walk(where, remedy).refuse_size(type(value), str(much))
    except (ValueError, TypeError, RuntimeError):
        pass  # NaN, a huge integer, a lone surrogate: the walk writes it
    return _text(_walk(where, remedy).tree(value))


LeaveOut: TypeAlias = Callable[[str, SettingsError], None]
"""Takes the name of a parameter, and why it or a part of it cannot be written."""

LEFT_OUT: Tree = {TAG: "left out"}
"""Written in place of a value that has no canonical form."""


def canonical_call(
    operation: str,
    bound: Mapping[str, Any],
    *,
    remedy: str = "",
    leave_out: LeaveOut | None = None,
) -> bytes:
    """The arguments of a call, as `canonical` would write their dict, named one by one.

    With `leave_out`, a value that cannot be written is left out, and `leave_out` is called with the
    parameter's name and the reason. The values around it, as in a dataclass, are written.
    """
    try:
        if is_plain(bound):
            return to_sorted_text(bound).encode()
    except TooMuchError:
        for name, value in bound.items():  # one of them, most likely, and it is to be named
            canonical(value, where=_parameter(operation, name), remedy=remedy)
    except (ValueError, TypeError, RuntimeError):
        pass
    trees: dict[str, Tree] = {}
    for name, value in bound.items():
        walk = _walk(_parameter(operation, name), remedy)
        if leave_out is not None:
            walk.leave_out = functools.partial(leave_out, name)
        try:
            trees[name] = walk.tree(value)
        except SettingsError as error:  # too large or too deep
            if leave_out is None:
                raise
            leave_out(name, error)
            trees[name] = LEFT_OUT
    return _text(trees)


def _parameter(operation: str, name: str) -> str:
    return f"{operation}: parameter {name}"


def _walk(where: str, remedy: str) -> _Canon:
    walk = _Canon(where)
    walk.remedy = remedy or walk.remedy
    return walk


def _text(tree: Tree) -> bytes:
    return to_sorted_text(tree).encode()


class _Canon(Walk):
    """The walk of the codec, for equality instead of rebuilding."""

    remedy = "give key= with what identifies the call"
    leave_out: Callable[[SettingsError], None] | None = None
    has_left_out = False

    def tree(self, value: Any) -> Tree:
        if self.leave_out is None:
            return super().tree(value)
        depth = len(self.trail)
        try:
            return super().tree(value)
        except _NotWritableError as error:
            del self.trail[depth:]
            if not self.has_left_out:
                self.has_left_out = True
                self.leave_out(error)
            return LEFT_OUT

    def path_of(self, kind: type) -> str:
        return type_path(kind)

    def order(self, trees: list[Tree]) -> list[Tree]:
        return sorted(trees, key=to_sorted_text)

    def advice(self, kind: type) -> str:
        plain = plain_base(kind)
        if plain is not None:
            return f"pass a plain {plain.__name__}"
        return SPEAK

    def refuse(self, kind: type, advice: str) -> NoReturn:
        if self.has_left_out:  # only the first message is used, and each takes 40 microseconds
            raise _NotWritableError
        self._refuse(SettingsError if self.leave_out is None else _NotWritableError, kind, advice)

    def refuse_size(self, kind: type, advice: str) -> NoReturn:
        self._refuse(SettingsError, kind, advice)

    def _refuse(self, error: type[SettingsError], kind: type, advice: str) -> NoReturn:
        raise error(f"{self.spot()}: {kind} cannot be part of a key; {advice}, or {self.remedy}")


class _NotWritableError(SettingsError):
    """A value has no canonical form."""


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
    kind = type(value)
    if not _is_its_fields(kind):
        walk.refuse(kind, f"it has an __eq__ of its own or a built-in base: {SPEAK}")
    _need_no_more(walk, value, [field.name for field in fields(value)])
    names = [field.name for field in fields(value) if field.compare]
    return _write_fields(walk, value, {name: read_field(walk, value, name) for name in names})


def _is_its_fields(kind: type) -> bool:
    """Is it compared by its fields and nothing else?

    `dataclass` makes `__eq__` by `exec`, and leaves alone one that the class has already.
    """
    if any(_is_built_in(base) for base in kind.__mro__[:-1]):
        return False
    equal: Any = kind.__eq__
    return equal is object.__eq__ or (
        isinstance(equal, FunctionType) and equal.__code__.co_filename == "<string>"
    )


def _is_built_in(base: type) -> bool:
    """Made in C: it may hold what no field names. `typing.Generic` is, and holds nothing."""
    made = isinstance(vars(base).get("__new__"), BuiltinFunctionType)
    return made and base.__module__ != "typing"


def _need_no_more(walk: Walk, value: Any, names: Collection[str]) -> None:
    if more_than(names, value) or has_slots_beside(names, value):
        walk.refuse(type(value), f"it holds more than its fields: {SPEAK}")


def _write_model(walk: Walk, value: Any) -> Tree:
    kind = type(value)
    if not kind.__eq__.__module__.startswith("pydantic."):
        walk.refuse(kind, f"it has an __eq__ of its own: {SPEAK}")
    if value.__pydantic_private__:
        walk.refuse(kind, f"it has private attributes: {SPEAK}")
    named = {name: read_field(walk, value, name) for name in kind.model_fields}
    _need_no_more(walk, value, named)
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


# --- simple ones --------------------------------------------------------------------------------


def _plain_text(value: Any) -> str:
    # One level of the depth is the dict of the arguments.
    if not is_plain(value, DEPTH - 1):
        raise ValueError
    return to_sorted_text(value)


def _tagged_text(writer: Writer) -> Callable[[Any], str]:
    nowhere = Walk("")
    return lambda value: to_sorted_text(writer(nowhere, value))


# What `canonical_call` writes for an argument of exactly this type, for those whose writing asks
# nothing of the walk. It raises where they are not as simple as they look.
SIMPLE: dict[type, Callable[[Any], str]] = {
    **PLAIN_TEXT,
    dict: _plain_text,
    list: _plain_text,
    **{
        kind: _tagged_text(_Canon.writers[kind])
        for kind in (bytes, UUID, Decimal, date, datetime, timedelta)
    },
}
