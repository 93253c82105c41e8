"""A patch, as a server sends it, made to a state: it fits, or nothing is changed. Pure.

`semel.rooms.patches` says what a patch is, and makes them. This one looks at every operation, as
does its twin (patches.ts): a server may be wrong, and Python takes `-1` and `True` for indexes.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["PatchError", "patched"]

# Nobody's state is deeper, and Python's own stack ends somewhere behind it.
DEEPEST: Final = 200


class PatchError(ValueError):
    """The patch is none, or not for this state."""


def patched(state: Any, patch: Any) -> Any:
    """The state with the changes made. What it was made from stays as it is."""
    for operation in _list(patch):
        path, *value = _list(operation) or [None]
        if len(value) > 1 or len(_list(path)) > DEEPEST:
            raise PatchError(f"no operation: {operation!r}")
        state = _with(state, path, value)
    return state


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise PatchError(f"no list: {found!r}")
    return found


def _with(state: Any, path: list[Any], value: list[Any]) -> Any:
    if not path:
        if not value:
            raise PatchError("the whole cannot be removed")
        return value[0]
    key, rest = path[0], path[1:]
    if isinstance(state, dict) and isinstance(key, str):
        return _in_mapping(state, key, rest, value)
    if isinstance(state, list) and type(key) is int and 0 <= key <= len(state):
        return _in_list(state, key, rest, value)
    raise PatchError(f"there is no {key!r} here")


def _in_mapping(state: dict[str, Any], key: str, rest: list[Any], value: list[Any]) -> Any:
    if key not in state and (rest or not value):
        raise PatchError(f"there is no {key!r} here")
    copy = dict(state)
    if not rest and not value:
        del copy[key]
    else:
        copy[key] = _with(state[key], rest, value) if rest else value[0]
    return copy


def _in_list(state: list[Any], index: int, rest: list[Any], value: list[Any]) -> Any:
    if index == len(state) and (rest or not value):
        raise PatchError(f"there is no {index} here")
    copy = list(state)
    if not rest and not value:
        del copy[index]
    else:
        copy[index : index + 1] = [_with(state[index], rest, value) if rest else value[0]]
    return copy
