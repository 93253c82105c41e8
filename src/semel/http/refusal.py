"""Which answers of the application's `authorise` and `scope` functions are refusals."""

from __future__ import annotations

import inspect

__all__ = ["is_refusal"]


def is_refusal(answer: object) -> bool:
    """Return whether the answer is a refusal.

    Refusals are falsy answers (None, False, "", 0, an empty collection), generators, awaitables,
    exceptions and NotImplemented. An empty cookie or header must not become a principal or a
    tenant. A generator, or an awaitable that was not awaited, has decided nothing yet. An exception
    that a function returns was meant to be raised. An answer whose truth value raises is an error
    of the function, which is not caught here.
    """
    if inspect.iscoroutine(answer):
        answer.close()  # Python would warn that it was never awaited
    return (
        answer is NotImplemented
        or isinstance(answer, BaseException)
        or inspect.isawaitable(answer)
        or inspect.isgenerator(answer)
        or inspect.isasyncgen(answer)
        or not answer
    )
