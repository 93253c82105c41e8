"""From one view of a state to the next, as the shortest list of changes that is easy to make. Pure.

A patch is a list of operations. `[path, value]` sets what is at a path, `[path]` removes it. A path
is a list of keys and indexes; the empty one is the whole. A list grows at its end, by setting the
index that follows its last, and shrinks from there.

Both clients do the same; clients/vectors/room/patches.json holds all three to it. The easy mistake
is to take `1`, `1.0` and `True` for the same, as Python does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

__all__ = ["Patch", "diff", "patched"]

Path: TypeAlias = list[str | int]
Patch: TypeAlias = Sequence[Sequence[Any]]


def diff(before: Any, after: Any) -> list[list[Any]]:
    """The changes that make the one from the other."""
    return list(_changes(before, after, []))


def _changes(before: Any, after: Any, path: Path) -> Iterator[list[Any]]:
    if before is after:
        return
    if type(before) is dict and type(after) is dict:
        yield from _of_mapping(before, after, path)
    elif type(before) is list and type(after) is list:
        yield from _of_list(before, after, path)
    elif type(before) is not type(after) or before != after or _is_other_zero(before, after):
        yield [path, after]


def _is_other_zero(before: Any, after: Any) -> bool:
    """To Python 0.0 and -0.0 are equal, and they are not written the same."""
    return before == 0 and type(before) is float and repr(before) != repr(after)


def _of_mapping(before: dict[str, Any], after: dict[str, Any], path: Path) -> Iterator[list[Any]]:
    for key in before:
        if key not in after:
            yield [[*path, key]]
    for key, now in after.items():
        if key in before:
            yield from _changes(before[key], now, [*path, key])
        else:
            yield [[*path, key], now]


def _of_list(before: list[Any], after: list[Any], path: Path) -> Iterator[list[Any]]:
    for index in range(len(before) - 1, len(after) - 1, -1):
        yield [[*path, index]]
    for index, now in enumerate(after):
        if index < len(before):
            yield from _changes(before[index], now, [*path, index])
        else:
            yield [[*path, index], now]


def patched(state: Any, patch: Patch) -> Any:
    """The state with the changes made. What it was made from stays as it is."""
    for path, *value in patch:
        state = _with(state, path, value)
    return state


def _with(state: Any, path: Sequence[str | int], value: list[Any]) -> Any:
    if not path:
        return value[0]
    key, rest = path[0], path[1:]
    copy: Any = dict(state) if isinstance(key, str) else list(state)
    if not rest and not value:
        del copy[key]
    elif not rest and key == len(copy) and isinstance(copy, list):
        copy.append(value[0])
    else:
        copy[key] = value[0] if not rest else _with(copy[key], rest, value)
    return copy
