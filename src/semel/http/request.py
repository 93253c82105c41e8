"""What both doors ask of a request before anything is claimed, and what they leave for the app."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from semel import keys
from semel.errors import SettingsError
from semel.http import protocol
from semel.http.body import Body
from semel.http.exchange import RequestAttempt
from semel.http.parts import Header
from semel.http.protocol import Refusal, Request
from semel.http.refusal import is_refusal
from semel.http.rule import Ruling
from semel.values import Key

# Where the ASGI scope or the WSGI environ has the attempt.
ATTEMPT = "semel.attempt"

# A response that is meant to be read while it is made.
STREAMS = (
    b"text/event-stream",
    b"application/x-ndjson",
    b"application/jsonl",
    b"multipart/x-mixed-replace",
)

# A path may be as long as a server allows; what people look at need not.
SHOWN = 200


def key_of(found: list[bytes]) -> str:
    if found:
        return protocol.parse_key(found)
    raise Refusal(
        protocol.problem("key-missing", "This request needs an Idempotency-Key; send a new UUID.")
    )


def operation_of(request: Request) -> str:
    """What is compared even where nothing else is, so it must tell long paths apart."""
    path = request.compared_path
    if len(path) > SHOWN:
        whole = hashlib.sha256(path.encode("utf-8", "surrogatepass"))
        path = f"{path[:SHOWN]}...{whole.hexdigest()[:16]}"
    return f"{request.method} {path}"


def record_key(ruling: Ruling, request: Request, text: str, tenant: str) -> Key:
    """The key of the record, for the key that came with the request."""
    return keys.make_key(
        text,
        tenant=tenant,
        operation=operation_of(request),
        per_operation=ruling.per_operation,
        version=keys.HTTP,
    )


def checked_tenant(tenant: Any) -> str:
    """Return the tenant that `scope` gave.

    Raise `Refusal` if it gave none, or one that not every store can hold. Raise `SettingsError` if
    it is not a str.
    """
    if is_refusal(tenant):
        raise Refusal(
            protocol.problem(
                "tenant-missing", "Send the credentials that say which tenant you are."
            )
        )
    if isinstance(tenant, str):
        try:
            keys.check_name("tenant", tenant)
        except SettingsError as error:
            said = f"Nothing was done, because no record can have this tenant: {error}."
            raise Refusal(protocol.problem("tenant-malformed", said)) from error
        return tenant
    raise SettingsError(
        f"scope= gave {tenant!r}; a tenant is a str. To refuse a caller, return None, or raise "
        "semel.http.Refusal"
    )


def fingerprint_of(ruling: Ruling, request: Request, body: Body) -> bytes:
    if ruling.fingerprint == "bytes":
        digest = protocol.Digest(request)
        body.feed(digest.update)
        return digest.digest()
    return protocol.compared(ruling.fingerprint, request, body.whole())


def is_stream(headers: Iterable[Header]) -> bool:
    for name, content in headers:
        if name.lower() == b"content-type":
            return content.lower().startswith(STREAMS)
    return False


def attempt_of(request: Any) -> RequestAttempt | None:
    """The attempt behind a request (or an ASGI scope, or a WSGI environ); None without a key."""
    found = getattr(request, "scope", None) or getattr(request, "environ", None) or request
    attempt: RequestAttempt | None = found.get(ATTEMPT)
    return attempt
