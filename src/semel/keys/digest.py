"""Hashes of parts: what a key is stored under, and what it is compared by.

The easy mistake is to join parts with a character that may be inside a part. Every part is
hashed behind its length. What is hashed is a format: to change it is to forget every stored key,
so it carries a version.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Callable
from uuid import UUID

from semel.errors import SettingsError
from semel.values import Key

VERSION = b"semel1"

# What every store can index, and what the header draft's users send; longer keys are hashed by
# whoever has them.
LIMIT = 255

# Keys that come in a request live apart from those of guards: a client that guesses the key of a
# job of yours must not be able to block it.
HTTP = "http"


def identity(tenant: str, key: bytes, *extra: bytes) -> bytes:
    """The 32 bytes under which a tenant's key is stored."""
    return _digest(VERSION, tenant.encode("utf-8", "surrogatepass"), key, *extra)


def fingerprint(*parts: bytes) -> bytes:
    """32 bytes that differ when any part differs, or is cut elsewhere."""
    hashed = OF_FINGERPRINT + b"".join([framed(part) for part in parts])
    return hashlib.sha256(hashed).digest()


def child_key(id: bytes | str, name: str) -> str:
    """A key to hand to a provider: the same for every attempt, another for every name.

    A UUID (version 8, RFC 9562 section 5.8), which is what providers accept. `id` is that of the
    record, as bytes or as a listing shows it.
    """
    parts = VERSION + b"c", _id_bytes(id), name.encode("utf-8", "surrogatepass")
    digest = bytearray(_digest(*parts)[:16])
    digest[6] = digest[6] & 0x0F | 0x80
    digest[8] = digest[8] & 0x3F | 0x80
    return str(UUID(bytes=bytes(digest)))


_HEX_ID = re.compile(r"[0-9a-fA-F]{64}")


def _id_bytes(id: object) -> bytes:
    if isinstance(id, str) and _HEX_ID.fullmatch(id):
        return bytes.fromhex(id)
    if isinstance(id, bytes) and len(id) == 32:  # noqa: PLR2004 - a SHA-256
        return id
    raise SettingsError(
        f"{id!r} is not the id of a record; give its 32 bytes, such as record.key.id, or the 64 "
        "hexadecimal digits that `semel ledger list --ids` shows"
    )


length: Callable[[int], bytes] = struct.Struct(">Q").pack


def framed(part: bytes) -> bytes:
    return length(len(part)) + part


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join([length(len(part)) + part for part in parts])).digest()


# The beginning of `identity` for everybody who has one tenant only, hashed a million times.
_OF_NO_TENANT = framed(VERSION) + framed(b"")

# The same for `fingerprint`.
OF_FINGERPRINT = framed(VERSION + b"f")


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
    tenant = plain("tenant", tenant)
    if tenant == "" and version == "" and not per_operation:
        hashed = _OF_NO_TENANT + length(len(data)) + data
    else:
        before, after = frame(tenant, operation if per_operation else None, version)
        hashed = before + length(len(data)) + data + after
    return Key(
        hashlib.sha256(hashed).digest(),
        readable(text),
        tenant,
        plain("operation", operation),
    )


def plain(what: str, name: str) -> str:
    """The name as nothing but text: drivers and formats know no members of a `StrEnum`."""
    if type(name) is str:
        return name
    if not isinstance(name, str):
        raise SettingsError(f"a {what} is a str, not {type(name)}; write it as text")
    return str.__str__(name)


@functools.lru_cache(maxsize=1024)  # the same few tenants, over and over
def frame(tenant: str, operation: str | None, version: str) -> tuple[bytes, bytes]:
    """What is hashed before and after the key itself; operation None: it is no part of it."""
    check_name("tenant", tenant)
    check_name("version", version)
    before = framed(VERSION) + framed(tenant.encode())
    after = b"" if operation is None else framed(b"o" + _operation_bytes(operation))
    return before, after + framed(b"v" + version.encode()) if version else after


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


def check_name(what: str, name: str) -> None:
    """Raise `SettingsError` for a name that not every store can hold and compare."""
    if name == "":
        return
    if not isinstance(name, str):
        raise SettingsError(f"a {what} is a str, not {type(name)}; write it as text")
    if _UNSTORABLE.search(name):
        raise SettingsError(f"a {what} must not contain NUL or a lone surrogate; encode it")
    if len(name) * 4 > LIMIT and (size := len(name.encode())) > LIMIT:
        raise SettingsError(
            f"a {what} has at most {LIMIT} bytes, this one has {size}; use its id or a hash of it"
        )


def _operation_bytes(operation: str) -> bytes:
    if not operation:
        raise SettingsError("per_operation=True needs an operation; give operation=")
    return operation.encode("utf-8", "surrogatepass")


def shows_as_is(text: str) -> bool:
    return text.isascii() and text.isprintable()


def readable(text: str | bytes) -> str:
    """The key for people: what does not print is escaped, and the whole still fits a column."""
    if type(text) is str and shows_as_is(text):
        return text[:LIMIT]
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    text = printable(text)
    if len(text) * 4 <= LIMIT:
        return str.__str__(text)
    return text.encode()[:LIMIT].decode("utf-8", "ignore")


def printable(text: str) -> str:
    """Escape what does not print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
