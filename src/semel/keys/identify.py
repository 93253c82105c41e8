"""A call's key and fingerprint in one go: what every guarded call does first.

`identifier` answers what `Binder.bind`, `render`, `make_key`, `canonical_call` and `fingerprint`
answer one after another, to the byte. It works out beforehand what does not depend on the call:
a function is compiled that binds the arguments and writes them in one expression, and what
stands before and after them in a hash is kept. An argument that is not simple sends the call the
long way, which is also the one that knows the error messages.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

from semel.codec.writing import PRINTABLE_BITS
from semel.keys.argument import SIMPLE, LeaveOut, canonical_call
from semel.keys.binding import Binder
from semel.keys.digest import (
    LIMIT,
    OF_FINGERPRINT,
    VERSION,
    fingerprint,
    frame,
    framed,
    length,
    make_key,
    plain,
    shows_as_is,
)
from semel.keys.readable import readable_call
from semel.keys.template import Template
from semel.values import Key

Identify: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Key, bytes]]

# Largest canonical arguments, in bytes, that a key keeps to write its text later. The text of
# larger ones is written at once, to save memory.
KEPT_BYTES = 512

# Hex digits of SHA-256, and the colon before them.
DIGEST_ROOM = 65

# What an argument raises that is not simple, and a call that does not bind.
NOT_SIMPLE = (LookupError, ValueError, TypeError, AttributeError, RuntimeError)

# An integer that is beyond PRINTABLE_BITS is written differently beside a tagged value. Nothing
# else has that many digits in a row, or it is not worth knowing what has.
HUGE_DIGITS = len(str(1 << PRINTABLE_BITS))
HUGE = re.compile(rb"\d{%d}" % HUGE_DIGITS)


class AutoKey:
    """All arguments are the key: `module.qualname:` and the hash of operation and arguments.

    The identity is made of that. The text shows `name` and the arguments.
    """

    def __init__(self, operation: str, name: str = "") -> None:
        self._operation = operation
        self._name = name or operation
        self.head = operation.encode()[: LIMIT - DIGEST_ROOM].decode("utf-8", "ignore") + ":"
        self.hashed = b"".join(framed(part) for part in (VERSION + b"f", operation.encode()))

    def render(self, bound: Mapping[str, Any]) -> str:
        """The key of a call with these arguments."""
        return self.head + self._digits(canonical_call(self._operation, bound))

    def _digits(self, arguments: bytes) -> str:
        return sha256(self.hashed + framed(arguments)).hexdigest()

    def key(self, bound: Mapping[str, Any], make: Callable[[str], Key]) -> Key:
        """The key of a call: `make` gives the identity, and the text names the arguments."""
        arguments = canonical_call(self._operation, bound)
        digits = self._digits(arguments)
        made = make(self.head + digits)
        return self.described(made.id, made.tenant, made.operation, tuple(bound), arguments, digits)

    def described(
        self,
        id: bytes,
        tenant: str,
        operation: str,
        names: Sequence[str],
        arguments: bytes,
        digits: str,
    ) -> Key:
        """Return a key whose text shows the call. That of large arguments is written at once."""
        write = functools.partial(readable_call, self._name, names, arguments, digits)
        if len(arguments) > KEPT_BYTES:
            return Key(id, write(), tenant, operation)
        return Key.described(id, tenant, operation, write)


def auto_key(operation: str, bound: Mapping[str, Any]) -> str:
    """The key of one call of a function that has no key of its own."""
    return AutoKey(operation).render(bound)


def identifier(
    binder: Binder,
    key: AutoKey | Template,
    *,
    operation: str,
    tenant: str = "",
    per_operation: bool = False,
    version: str = "",
    compares: bool = False,
    remedy: str = "",
    leave_out: LeaveOut | None = None,
) -> Identify:
    """From `(args, kwargs)` to key and fingerprint.

    The fingerprint is empty unless it `compares`: then it covers all arguments but the object of
    a method. `remedy` and `leave_out` are those of `canonical_call`.
    """
    settings = _Settings(operation, tenant, per_operation, version, compares, remedy, leave_out)
    return settings.identify(binder, key)


class _Settings:
    """What of a key does not depend on the call."""

    def __init__(
        self,
        operation: str,
        tenant: str,
        per_operation: bool,
        version: str,
        compares: bool,
        remedy: str,
        leave_out: LeaveOut | None,
    ) -> None:
        self.operation = plain("operation", operation)
        self.tenant = plain("tenant", tenant)
        self.compares = compares
        self.write_call = functools.partial(
            canonical_call, operation, remedy=remedy, leave_out=leave_out
        )
        self.before, self.after = frame(tenant, operation if per_operation else None, version)
        self.make_key = functools.partial(
            make_key,
            tenant=tenant,
            operation=operation,
            per_operation=per_operation,
            version=version,
        )

    def identify(self, binder: Binder, key: AutoKey | Template) -> Identify:
        at_length = self.at_length(binder, key)
        if binder.holds:
            return at_length
        if isinstance(key, Template):
            return self.by_template(binder, key, at_length)
        return self.by_arguments(binder, key, at_length) if shows_as_is(key.head) else at_length

    def at_length(self, binder: Binder, key: AutoKey | Template) -> Identify:
        """One after another: right for every call, and the measure of the short ways."""

        def identify(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, bytes]:
            bound = binder.bind(args, kwargs)
            made = (
                key.key(bound, self.make_key)
                if isinstance(key, AutoKey)
                else self.make_key(key.render(bound))
            )
            if not self.compares:
                return made, b""
            bound.pop(binder.self_name or "", None)
            return made, fingerprint(self.write_call(bound))

        return identify

    def by_arguments(self, binder: Binder, key: AutoKey, at_length: Identify) -> Identify:
        kind, write = binder.free("kind"), binder.free("write")
        text_of = binder.compiled(
            _arguments(binder.names, kind, write), {kind: type, write: SIMPLE}
        )
        hashed, head, tenant, operation = key.hashed, key.head, self.tenant, self.operation
        after, names, described = self.after, binder.names, key.described
        # The key is this head and 64 digits, tagged as text.
        before = self.before + length(len(head) + DIGEST_ROOM) + b"s" + head.encode()

        def identify(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, bytes]:
            try:
                text = text_of(*args, **kwargs).encode()
            except NOT_SIMPLE:
                text = b""
            if not text or (len(text) >= HUGE_DIGITS and HUGE.search(text)):
                return at_length(args, kwargs)
            digits = sha256(hashed + length(len(text)) + text).hexdigest()
            id = sha256(before + digits.encode() + after).digest()
            return described(id, tenant, operation, names, text, digits), b""

        return identify

    def by_template(self, binder: Binder, key: Template, at_length: Identify) -> Identify:
        texts_of = self._texts_of(binder, key)
        before, after, compares = self.before, self.after, self.compares
        tenant, operation = self.tenant, self.operation

        def identify(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, bytes]:
            try:
                written, text = texts_of(*args, **kwargs)
                compared = written.encode()
            except NOT_SIMPLE:
                text, compared = "", b""
            if not text or len(text) > LIMIT or not shows_as_is(text):
                return at_length(args, kwargs)
            id = sha256(before + length(len(text) + 1) + b"s" + text.encode() + after).digest()
            if not compares:
                return Key(id, text, tenant, operation), b""
            if len(compared) >= HUGE_DIGITS and HUGE.search(compared):
                return at_length(args, kwargs)
            seen = sha256(OF_FINGERPRINT + length(len(compared)) + compared).digest()
            return Key(id, text, tenant, operation), seen

        return identify

    def _texts_of(self, binder: Binder, key: Template) -> Callable[..., tuple[str, str]]:
        """The arguments to compare, and the key: in this order, since a field may run a property
        and the arguments run nothing.
        """
        kind, write, show = binder.free("kind"), binder.free("write"), binder.free("show")
        compared = [name for name in binder.names if name != binder.self_name]
        written = _arguments(compared, kind, write) if self.compares else "''"
        return binder.compiled(
            f"({written}, {key.source(kind, show)})",
            {kind: type, write: SIMPLE, show: key.shows},
        )


def _arguments(names: Iterable[str], kind: str, write: str) -> str:
    """The source of what `canonical_call` writes for these parameters."""
    pairs = (f'"{name}":{{{write}[{kind}({name})]({name})}}' for name in sorted(names))
    return f"f'{{{{{','.join(pairs)}}}}}'"
