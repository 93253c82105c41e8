"""Exception handlers for FastAPI and Starlette: errors of Semel become problem documents.

    app = FastAPI()
    add_exception_handlers(app)

    app = Starlette(routes=..., exception_handlers=exception_handlers)

A handler that calls a guarded function, or `SqlAlchemyIdempotency`, then needs no `except`. The
documents have the statuses and types of the middleware's. Their texts speak of the operation: the
handler may have done other things, and the request may have no `Idempotency-Key`.
`DuplicateExecutionError` gets `duplicate`, or the recorded response.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

try:
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection
    from starlette.responses import Response as StarletteResponse
except ImportError as error:  # pragma: no cover - every test environment has it
    from semel.errors import SettingsError

    raise SettingsError(f"{error.name} is not installed: pip install starlette") from error

from semel.errors import (
    ClaimLostError,
    DuplicateExecutionError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ResultLostError,
    SemelError,
    StoreUnavailableError,
)
from semel.http import protocol
from semel.http.exchange import Exchange
from semel.http.protocol import Response
from semel.http.request import ATTEMPT
from semel.imports import importing

__all__ = ["add_exception_handlers", "exception_handlers"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)

log = logging.getLogger("semel")


def add_exception_handlers(app: Starlette) -> None:
    """Answer errors of Semel with problem documents; handlers that the app has already stay."""
    for kind, handler in exception_handlers.items():
        if kind not in app.exception_handlers:
            app.add_exception_handler(kind, handler)


async def _answer(connection: HTTPConnection, error: Any) -> StarletteResponse:
    if connection.scope["type"] != "http":  # Starlette would close a WebSocket without a word
        raise error
    answer = _document(error)
    if not _is_recorded(error):
        _keep_unrecorded(connection, error, answer.status)
    if "origin" in connection.headers:
        answer = Response(answer.status, (*answer.headers, protocol.EXPOSED), answer.body)
    response = StarletteResponse(answer.body, answer.status)
    response.raw_headers = list(answer.headers)
    return response


def _document(error: Any) -> Response:
    if _is_recorded(error):
        found = protocol.as_json(error.result.status_code or 200, error.result.response)
        return Response(found.status, (*found.headers, protocol.REPLAYED), found.body)
    if isinstance(error, (StoreUnavailableError, OutcomeUnknownError)):
        log.warning("semel: a request was refused: %s", error)
    if isinstance(error, StoreUnavailableError) and error.happened:
        return HAPPENED
    return next(answer for kind, answer in DOCUMENTS.items() if isinstance(error, kind))


def _is_recorded(error: SemelError) -> bool:
    """Return whether this is the response that `SqlAlchemyIdempotency.lock` found."""
    locking = sys.modules.get("semel.http.sqlalchemy")  # not imported where it is not used
    if locking is None or not isinstance(error, DuplicateExecutionError):
        return False
    return isinstance(error.result, locking.IdempotencyRecord)


def _keep_unrecorded(connection: HTTPConnection, error: SemelError, status: int) -> None:
    """Tell the middleware which exception a response with this status replaces.

    Recorded, a 409 that says "ask again" would be the answer to every retry.
    """
    attempt = connection.scope.get(ATTEMPT)
    call = None if attempt is None else attempt._call  # noqa: SLF001 - `call` raises if it has ended
    if isinstance(call, Exchange):
        call.raised = error, status


# --- what each error is answered with -----------------------------------------------------------

# What `Retry-After` says, in seconds.
RETRY_S = 1.0

IN_PROGRESS = "in-progress", 409, "The operation is in progress"
UNAVAILABLE = "store-unavailable", 503, "The operation cannot be guaranteed right now"

HAPPENED = protocol.described(
    *UNAVAILABLE,
    "The operation took effect, but that could not be recorded. If it is requested again, its "
    "effect may be repeated.",
)

# An error that is not here is an error of the server: `SettingsError`, and `ReplayedError`, which
# stands for an exception of the application. `InProgressError` is a `DuplicateExecutionError`, and
# so comes before it.
DOCUMENTS: Mapping[type[SemelError], Response] = {
    InProgressError: protocol.described(
        *IN_PROGRESS, "The same operation is in progress. Retry later.", retry_after=RETRY_S
    ),
    ClaimLostError: protocol.described(
        *IN_PROGRESS,
        "Another attempt at the operation has taken over. Retry later.",
        retry_after=RETRY_S,
    ),
    DuplicateExecutionError: protocol.described(
        "duplicate",
        409,
        "The operation was done before",
        "The operation was done before, and is not repeated.",
    ),
    IdempotencyConflictError: protocol.described(
        "key-reused",
        422,
        "The operation's key is already used",
        "The key of this operation was used before with other arguments. The operation was not "
        "run.",
    ),
    OutcomeUnknownError: protocol.described(
        "outcome-unknown",
        409,
        "The outcome of the operation is not known",
        "An earlier attempt at the operation ended without a recorded outcome. The operation is "
        "not repeated until its outcome is settled.",
    ),
    ResultLostError: protocol.described(
        "response-not-kept",
        410,
        "The result of the operation was not kept",
        "The operation was done before. Its result could not be kept, so it cannot be shown again.",
    ),
    StoreUnavailableError: protocol.described(
        *UNAVAILABLE,
        "The store did not answer, so it is not known whether the operation was done. Retry later.",
        retry_after=RETRY_S,
    ),
}

exception_handlers: Mapping[Any, Any] = MappingProxyType(dict.fromkeys(DOCUMENTS, _answer))
"""Handlers by exception class, for `Starlette(exception_handlers=...)`."""
