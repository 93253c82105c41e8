"""What a viewer is told instead of a stream: `application/problem+json`."""

from __future__ import annotations

import random
from collections.abc import Mapping

from semel.http.parts import Header
from semel.http.protocol import Refusal, Response, described

__all__ = ["PROBLEMS", "forbidden", "later", "refused", "unauthorised"]

PROBLEMS: Mapping[str, tuple[int, str]] = {
    "unauthorised": (401, "Say who you are"),
    "forbidden": (403, "This job is not yours to see"),
    "job-unknown": (404, "There is no such job"),
    "method-not-allowed": (405, "A job can only be read"),
    "job-gone": (410, "This job has ended, and its events are not kept any more"),
    "too-many-connections": (429, "You watch too many jobs at once"),
    "not-shown": (500, "This job cannot be shown"),
    "overloaded": (503, "There are too many viewers right now"),
    "draining": (503, "This gateway is about to end"),
    "undecided": (503, "Nobody has said yet whether you may see this"),
    "store-unavailable": (503, "The events cannot be read right now"),
}


def refused(
    name: str,
    detail: str,
    *,
    retry_after: float | None = None,
    headers: tuple[Header, ...] = (),
) -> Refusal:
    said = described(name, *PROBLEMS[name], detail, retry_after=retry_after)
    return Refusal(Response(said.status, said.headers + headers, said.body))


def later(name: str, detail: str, seconds: float) -> Refusal:
    """Come back in a while; those who are told so together do not come back together."""
    return refused(name, detail, retry_after=seconds * (1 + random.random()))  # noqa: S311


def unauthorised(detail: str = "Log in, or bring a ticket.") -> Refusal:
    """To be raised by `authorise`: nobody knows who this is."""
    return refused("unauthorised", detail)


def forbidden(detail: str = "You may not see this job.") -> Refusal:
    """To be raised by `authorise`: this is somebody who may not."""
    return refused("forbidden", detail)
