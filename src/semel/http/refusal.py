"""Which answers of the application's `authorise` and `scope` functions are refusals."""

from __future__ import annotations

import inspect

__all__ = ["is_refusal"]


def is_refusal(answer: object) -> bool:
    """Return whether the answer is falsy (None, False, "", 0, an empty collection) or a generator.

    An empty cookie or header must not become a principal or a tenant. A function with `yield` in it
    returns a generator and has decided nothing yet. An answer whose truth value raises is an
    error of the function, which is not caught here.
    """
    return not answer or inspect.isgenerator(answer) or inspect.isasyncgen(answer)
