"""Doors for HTTP: a request with an `Idempotency-Key` takes effect once.

protocol    the header, the fingerprint, the stored message, the problems: pure
rule        what a key means for which requests
request     what is asked of a request before the claim
exchange    from the claim to what is sent, for both colours
asgi, wsgi  the edges
fastapi     a dependency that documents itself
sqlalchemy  the same in a handler of your own, step by step
"""

from typing import TYPE_CHECKING

from semel.http.asgi import IdempotencyMiddleware
from semel.http.exchange import RequestAttempt
from semel.http.protocol import Refusal, Request, Response, problem
from semel.http.request import attempt_of
from semel.http.rule import Rule
from semel.http.wsgi import WSGIMiddleware
from semel.imports import importing

__all__ = [
    "IdempotencyMiddleware",
    "Refusal",
    "Request",
    "RequestAttempt",
    "Response",
    "Rule",
    "WSGIMiddleware",
    "attempt_of",
    "problem",
]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)
