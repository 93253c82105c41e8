"""The settings of a broker, in its URL and beside it.

A name that nobody knows is refused. The easy mistake is to leave it to the driver: most drivers
pass over what they do not know, and `?shard=8` is one shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import unquote_plus

from semel.errors import SettingsError

__all__ = ["check_names", "check_query", "in_a_url", "split"]


def _settings(broker: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = inspect.signature(broker).parameters.values()
    return [p for p in parameters if p.kind is p.KEYWORD_ONLY]


def check_names(broker: Any, names: Collection[str]) -> None:
    """Refuse what is no setting of this broker."""
    known = [p.name for p in _settings(broker)]
    for name in names:
        if name not in known:
            raise SettingsError(
                f"{broker.__name__} has no setting {name!r}; it has {', '.join(known)}"
            )


def check_query(
    broker: Any, url: str, *, driver: str = "", known: Collection[str] = (), such: str = ""
) -> None:
    """Refuse what neither we nor the driver know. Our own are not in the URL any more by now."""
    query = url.partition("?")[2].partition("#")[0]
    for option in query.split("&") if query else ():
        name = option.partition("=")[0]
        if name in known:
            continue
        # Behind an unquoted ? it may be a part of a password.
        shown = repr(name) if name.isidentifier() else "like that"
        theirs = f", and settings of {driver} such as {such}" if driver else ""
        keyword = ""
        if name in [p.name for p in _settings(broker)]:
            keyword = f": give {name}=... beside it"
            keyword += ", or open it with connect(url)" if name in in_a_url(broker) else ""
        raise SettingsError(
            f"the URL of a {broker.__name__} has no setting {shown}{keyword}. With connect(url) it "
            f"can have {', '.join(in_a_url(broker))}{theirs}"
        )


def in_a_url(broker: Callable[..., Any]) -> dict[str, type]:
    """What may stand in the URL: the broker's settings that are a number, a text or a bool.

    Any other setting that defaults to None is an object, and cannot be written in a URL.
    """
    return {
        p.name: int if p.default is None else type(p.default)
        for p in _settings(broker)
        if isinstance(p.default, bool | int | float | str) or p.annotation == "int | None"
    }


def split(url: str, kinds: dict[str, type]) -> tuple[str, dict[str, Any]]:
    """The URL without what is for the broker, and that. What stays is left to the byte."""
    before, _, query = url.partition("?")
    others: list[str] = []
    ours: dict[str, Any] = {}
    for option in query.split("&") if query else ():
        name, _, text = option.partition("=")
        if name in kinds:
            ours[name] = _read(name, unquote_plus(text), kinds[name])
        else:
            others.append(option)
    return before + ("?" if others else "") + "&".join(others), ours


_SAID = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _read(name: str, text: str, kind: type) -> Any:
    if text.lower() == "none":
        return None
    try:
        return _SAID[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {int: "a whole number", float: "a number", bool: "true or false"}[kind]
        raise SettingsError(f"{name}={text!r} in the URL is not {wanted}") from None
