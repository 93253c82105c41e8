"""The client's half: one key per logical request, kept over every try.

    client = httpx.Client(transport=IdempotentTransport())          # semel.client.httpx
    client = httpx.AsyncClient(transport=AsyncIdempotentTransport())
    session.mount("https://", IdempotentAdapter())                  # semel.client.requests

A server can only tell a repeat from a second request by its `Idempotency-Key`. So the key is made
above the loop that retries, and nothing without one is sent twice unless its method allows that.
`Patience` says when to try again; `Intents` keeps keys in a file, for clients that may be killed.

The easy mistake is a retry around these: a second call to the client is a second request, with
a key of its own, unless an intent names it.

What happens on the server is followed with `semel.client.feed`: each entry once, in order. At a
table of rooms one sits with `semel.client.room`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.client.intents import Intents, Unanswered
from semel.client.retry import Patience
from semel.imports import importing

__all__ = ["Intents", "Patience", "Unanswered"]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)
