"""Plain values, which `json` writes faithfully: the hot path of every result and argument.

Two things are easy to get wrong. `json` must not be trusted with types, so those are compared
exactly first. And a value in memory may be small and still come to more than any disk holds once
it is written, as when each of sixty lists holds the one before twice: what it comes to is counted
before it is written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

TAG = "$"
SCALARS = frozenset({type(None), bool, int, float, str})

# Deep enough for any result a person would read, and far from Python's recursion limit: a tagged
# value takes up to three levels of JSON. A value that contains itself ends here too.
DEPTH = 64


# More values than any result that somebody meant to keep; a MiB of JSON has room for half of them.
VALUES = 1 << 20

# The same in characters. Up to FEW values are not measured: they cannot come to many times of what
# is in memory already.
CHARACTERS = 1 << 26
FEW = 64


class TooMuchError(ValueError):
    """The value comes to more than VALUES or CHARACTERS when it is written out."""


TOO_MANY_VALUES = (
    f"it contains itself, or the same part so often that it comes to more than {VALUES} values: "
    "leave something out"
)
TOO_MANY_CHARACTERS = f"it comes to more than {CHARACTERS} characters: leave something out"


def is_plain(value: Any, depth: int = DEPTH) -> bool:
    """Would `json` write this faithfully, as far as types tell?"""
    if type(value) in SCALARS:
        return True
    left = _left(value, depth, VALUES)
    return left >= VALUES - FEW or (left >= 0 and _measured(value))


def _left(value: Any, depth: int, left: int) -> int:
    """How many more values may come after this list or dict; less than none if it is not plain."""
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str or key == TAG:
                return -1
        value = value.values()
    elif kind is not list:
        return -1
    left -= len(value)
    if left < 0:
        raise TooMuchError(TOO_MANY_VALUES)
    for item in value:
        if type(item) not in SCALARS:
            left = _left(item, depth - 1, left)
            if left < 0:
                return -1
    return left if depth > 0 else -1


def _measured(value: Any) -> bool:
    """A plain value of many parts; True, or it is too much."""
    size, level = 0, [value]
    while level:
        below: list[Any] = []
        for held in level:
            parts = (*held, *held.values()) if type(held) is dict else held
            size += sum([len(part) for part in parts if type(part) is str])
            size += sum([part.bit_length() >> 2 for part in parts if type(part) is int])
            if size > CHARACTERS:
                raise TooMuchError(TOO_MANY_CHARACTERS)
            below += [part for part in parts if type(part) not in SCALARS]
        level = below
    return True


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


_quoted = json.encoder.encode_basestring

# What `to_text` makes of a scalar, without the detour. Raises ValueError like it.
PLAIN_TEXT: dict[type, Callable[[Any], str]] = {
    str: _quoted,
    int: int.__repr__,
    float: _float_text,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}

# Up to this many entries, looking at a dict and writing it in one loop of Python is faster than
# looking first and leaving the writing to C.
SMALL = 8


def small_text(value: dict[Any, Any]) -> str | None:
    """What `to_text` makes of a dict of scalars; None if it is not plain, or not flat."""
    parts = []
    for key, item in value.items():
        write = PLAIN_TEXT.get(type(item))
        if write is None or type(key) is not str or key == TAG:
            return None
        parts.append(f"{_quoted(key)}:{write(item)}")
    return f"{{{','.join(parts)}}}"
