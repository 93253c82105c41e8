"""The text of a default key: the function's name and its arguments, for people.

It is written from the canonical arguments, so that no `__repr__` of the caller's runs. The text is
not the identity. Two different calls of one function still have different texts: one that does not
show every argument in full ends with the first digits of the hash of operation and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from semel.codec.plain import TAG
from semel.keys.digest import LIMIT, printable

# Characters that one argument may take. A UUID takes 36.
VALUE_CHARS = 40

# Hex digits of the hash, after a "#": enough to tell the calls of one function apart.
DIGEST_CHARS = 12

CUT = "..."

# A str that is shown without quotes. None of these reads like a number or a constant.
_BARE = re.compile(r"(?!(?:True|False|None|nan|inf)\Z)[A-Za-z_][\w.@/+-]*", re.ASCII)

_DEFAULT = re.compile(rf":\w+=|\(\)\Z|#[0-9a-f]{{{DIGEST_CHARS}}}\Z")


def looks_default(text: str) -> bool:
    """Return whether this may be the text of a default key."""
    return _DEFAULT.search(text) is not None


def readable_call(name: str, parameters: Sequence[str], arguments: bytes, digits: str) -> str:
    """Write a call as `name:parameter=value:parameter=value`, in at most 255 bytes.

    `arguments` are the canonical ones, `digits` is their hash.
    """
    bound: dict[str, Any] = json.loads(arguments)
    values = [_value(bound[parameter]) for parameter in parameters]
    pairs = [f":{name}={_cut(value)}" for name, value in zip(parameters, values, strict=True)]
    text = printable(name + ("".join(pairs) or "()"))
    exact = not any(type(value) in (list, dict) for value in bound.values())
    if exact and max(map(len, values), default=0) <= VALUE_CHARS and len(text.encode()) <= LIMIT:
        return text
    return _fitted(text, LIMIT - DIGEST_CHARS - 1) + "#" + digits[:DIGEST_CHARS]


def _cut(value: str) -> str:
    return value if len(value) <= VALUE_CHARS else value[: VALUE_CHARS - len(CUT)] + CUT


def _fitted(text: str, size: int) -> str:
    data = text.encode()
    return text if len(data) <= size else data[: size - len(CUT)].decode("utf-8", "ignore") + CUT


def _value(tree: Any) -> str:
    """Write a value, or enough of it to be cut."""
    if type(tree) is str:
        return tree if _BARE.fullmatch(tree) else repr(tree[: VALUE_CHARS + 1])
    if type(tree) is list:
        return f"[{_joined(map(_value, tree))}]"
    if type(tree) is not dict:
        return repr(tree)
    if TAG in tree:
        return _tagged(tree)
    return f"{{{_joined(f'{_value(name)}: {_value(item)}' for name, item in tree.items())}}}"


def _tagged(node: dict[str, Any]) -> str:
    """Write a value that JSON has no type for: `40.00`, `2026-11-15`, `Order(id=7)`."""
    inner = node["v"]
    if node[TAG] == "fields":
        shown = _joined(f"{name}={_value(item)}" for name, item in inner)
    else:
        shown = inner[: VALUE_CHARS + 1] if type(inner) is str else _value(inner)
    return f"{_short(node['type'])}({shown})" if "type" in node else shown


def _short(path: str) -> str:
    return re.split("[.:]", path)[-1]


def _joined(parts: Iterable[str]) -> str:
    """Join parts by commas, as many as can be shown."""
    shown, size = list[str](), 0
    for part in parts:
        shown.append(part)
        size += len(part)
        if size > VALUE_CHARS:
            break
    return ", ".join(shown)
