"""What rooms, users, requests and clients may be called, over the line and in Python. Pure.

Every name ends up in a log, in messages of one line each, and in front of people: so it is text
that can be printed, and short enough that a log takes it together with what stands beside it.
"""

from __future__ import annotations

from typing import Any

from semel.entries import MOST_NUMBER
from semel.errors import SettingsError

__all__ = [
    "MOST_CLIENT",
    "MOST_KIND",
    "MOST_REQUEST",
    "MOST_ROOM",
    "MOST_TURN",
    "MOST_USER",
    "TIMEOUT",
    "named",
    "numbered",
]

# In bytes: user and request, user and client, kind and room are each one name of a log (255).
MOST_USER = 128
MOST_REQUEST = 100
MOST_CLIENT = 64
MOST_ROOM = 200
MOST_KIND = 48

# What the id of a turn's timeout begins with; the turn comes behind it.
TIMEOUT = "timeout:"
MOST_TURN = MOST_REQUEST - len(TIMEOUT)


def named(what: str, name: Any, most: int) -> str:
    """The name as nothing but text; `SettingsError` says what is to be done about another one."""
    if not isinstance(name, str):
        raise SettingsError(
            f"a {what} is text, and this is a {type(name).__name__}: write it as text"
        )
    size = len(name.encode("utf-8", "replace"))
    if not 0 < size <= most:
        raise SettingsError(
            f"a {what} has 1 to {most} bytes, and {name!r:.40} has {size:,}: "
            + ("hash a longer one" if size else "give it one")
        )
    if not name.isprintable():
        odd = next(letter for letter in name if not letter.isprintable())
        raise SettingsError(
            f"a {what} has only characters that can be printed, and {name!r:.40} has {odd!r}: "
            "leave it out"
        )
    return name if type(name) is str else str.__str__(name)


def numbered(what: str, number: Any, least: int = 0) -> int:
    """The number itself, if it is one that every client can tell from its neighbours."""
    if type(number) is not int or not least <= number <= MOST_NUMBER:
        raise SettingsError(f"{what} is a whole number, from {least} to 2**53 - 1")
    return number
