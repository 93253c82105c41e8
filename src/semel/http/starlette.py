"""Exception handlers for FastAPI and Starlette: errors of Semel become problem documents.

    app = FastAPI()
    add_exception_handlers(app)

    app = Starlette(routes=..., exception_handlers=exception_handlers)

A handler that calls a guarded function, or `SqlAlchemyIdempotency`, then needs no `except`. Each
error gets the document that the middleware sends for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

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

__all__ = ["add_exception_handlers", "exception_handlers"]

log = logging.getLogger("semel")


def add_exception_handlers(app: Starlette) -> None:
    """Answer errors of Semel with problem documents; handlers that the app has already stay."""
    for kind, handler in exception_handlers.items():
        if kind not in app.exception_handlers:
            app.add_exception_handler(kind, handler)


async def _answer(connection: HTTPConnection, error: Any) -> StarletteResponse:
    if connection.scope["type"] != "http":  # Starlette would close a WebSocket without a word
        raise error
    _keep_unrecorded(connection, error)
    answer = _document(error)
    if "origin" in connection.headers:
        answer = Response(answer.status, (*answer.headers, protocol.EXPOSED), answer.body)
    response = StarletteResponse(answer.body, answer.status)
    response.raw_headers = list(answer.headers)
    return response


def _document(error: SemelError) -> Response:
    if isinstance(error, (StoreUnavailableError, OutcomeUnknownError)):
        log.warning("semel: a request was refused: %s", error)
    if isinstance(error, StoreUnavailableError) and error.happened:
        return protocol.problem(
            "store-unavailable",
            "This request took effect, but that could not be recorded. If it is sent again, its "
            "effect may be repeated.",
        )
    if isinstance(error, DuplicateExecutionError) and not isinstance(error, InProgressError):
        return _duplicate(error.result)
    return protocol.refusal(error)


def _duplicate(result: Any) -> Response:
    """Return the response that `lock` found, or the problem `duplicate` if it was a guard."""
    if hasattr(result, "response") and hasattr(result, "status_code"):
        found = protocol.as_json(result.status_code or 200, result.response)
        return Response(found.status, (*found.headers, protocol.REPLAYED), found.body)
    return protocol.described(
        "duplicate", 409, "This was done before", "It was done before, and is not repeated."
    )


def _keep_unrecorded(connection: HTTPConnection, error: SemelError) -> None:
    """Let a middleware treat the answer as the exception it stands for.

    Recorded, a 409 that says "ask again" would be the answer to every retry.
    """
    attempt = connection.scope.get(ATTEMPT)
    call = None if attempt is None else attempt._call  # noqa: SLF001 - `call` raises if it has ended
    if isinstance(call, Exchange):
        call.raised = error


# An error that is not here is an error of the server: `SettingsError`, and `ReplayedError`, which
# stands for an exception of the application.
exception_handlers: Mapping[Any, Any] = MappingProxyType(
    dict.fromkeys(
        (
            InProgressError,
            DuplicateExecutionError,
            ClaimLostError,
            IdempotencyConflictError,
            OutcomeUnknownError,
            ResultLostError,
            StoreUnavailableError,
        ),
        _answer,
    )
)
"""Handlers by exception class, for `Starlette(exception_handlers=...)`."""
