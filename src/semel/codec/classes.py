"""Classes that values are made of: what kind they are, and by which name they are found again."""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from functools import cached_property
from types import MemberDescriptorType, ModuleType
from typing import Any

# Members of a set, or keys of a dict, with one and the same hash: each is compared with each. Only
# numbers, and what is made of them, can be chosen to have it, and nobody does so by accident.
ONE_HASH = 100


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


def more_than(names: Collection[str], value: Any) -> dict[str, Any]:
    """Attributes that are no fields but belong to the object, as `__post_init__` may set them."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    return {
        name: item
        for name, item in held.items()
        if name not in names
        and name != "__orig_class__"
        and not isinstance(getattr(type(value), name, None), cached_property)
    }


def has_slots_beside(names: Collection[str], value: Any) -> bool:
    """Does it hold something in a slot, of a class above it perhaps, that is no field?"""
    return any(
        isinstance(member, MemberDescriptorType)
        and name not in names
        and not name.startswith("__pydantic_")
        and _is_set(member, value)
        for base in type(value).__mro__
        if vars(base).get("__slots__")
        for name, member in vars(base).items()
    )


def _is_set(member: MemberDescriptorType, value: Any) -> bool:
    try:
        member.__get__(value)
    except AttributeError:
        return False
    return True


def collide(members: Collection[Hashable]) -> bool:
    """Would a set of these take a time that grows with the square of their number?

    It knows by equal hashes. Numbers of different hashes that meet in the same places of a table
    cost far less and are harder to find; the size of a result bounds them.
    """
    if len(members) <= ONE_HASH:
        return False
    return max(Counter(map(hash, members)).values()) > ONE_HASH
