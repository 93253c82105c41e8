"""A patch, as a server sends it, made to a state: it fits, or nothing is changed. Pure.

`semel.rooms.patches` says what a patch is, and makes them. This one looks at every operation, as
does its twin (patches.ts): a server may be wrong, and Python takes `-1` and `True` for indexes.

What is changed is copied once for the whole patch: a few thousand changes of one list would be as
many copies of it.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from semel.client.room_reading import whole

__all__ = ["PatchError", "patched"]

# Nobody's state is deeper, and Python's own stack ends somewhere behind it.
DEEPEST: Final = 200

# What it names is not said: anything may be there, of any size.
NOWHERE: Final = "there is no such place"


Ours: TypeAlias = dict[int, Any]
"""By identity: what was copied for this patch, and nobody else has."""


class PatchError(ValueError):
    """The patch is none, or not for this state."""


def patched(state: Any, patch: Any) -> Any:
    """The state with the changes made. What it was made from stays as it is."""
    ours: Ours = {}
    for operation in _list(patch):
        path, *value = _list(operation) or [None]
        if len(value) > 1 or len(_list(path)) > DEEPEST:
            raise PatchError("no operation")
        state = _with(state, path, value, ours)
    return state


def _list(found: Any) -> list[Any]:
    if not isinstance(found, list):
        raise PatchError("no list")
    return found


def _with(state: Any, path: list[Any], value: list[Any], ours: Ours) -> Any:
    if not path:
        if not value:
            raise PatchError("the whole cannot be removed")
        return value[0]
    key, rest = path[0], path[1:]
    if isinstance(state, dict) and isinstance(key, str):
        return _in_mapping(state, key, rest, value, ours)
    index = whole(key)
    if isinstance(state, list) and index is not None and index <= len(state):
        return _in_list(state, index, rest, value, ours)
    raise PatchError(NOWHERE)


def _in_mapping(
    state: dict[str, Any], key: str, rest: list[Any], value: list[Any], ours: Ours
) -> Any:
    if key not in state and (rest or not value):
        raise PatchError(NOWHERE)
    copy = _ours(state, ours)
    if not rest and not value:
        del copy[key]
    else:
        copy[key] = _with(state[key], rest, value, ours) if rest else value[0]
    return copy


def _in_list(state: list[Any], index: int, rest: list[Any], value: list[Any], ours: Ours) -> Any:
    if index == len(state) and (rest or not value):
        raise PatchError(NOWHERE)
    copy = _ours(state, ours)
    if not rest and not value:
        del copy[index]
    else:
        copy[index : index + 1] = [_with(state[index], rest, value, ours) if rest else value[0]]
    return copy


def _ours(state: Any, ours: Ours) -> Any:
    """A copy that may be changed: the one that this patch has made already, or another one."""
    if id(state) in ours:
        return state
    copy = state.copy()
    ours[id(copy)] = copy
    return copy
