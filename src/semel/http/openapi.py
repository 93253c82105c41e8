"""What an API says of its keys, in OpenAPI: the header, the problems, how long a response is kept.

The draft of `Idempotency-Key` makes publishing this a duty of whoever offers it. Pure: a rule goes
in, a part of an operation object comes out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from semel import keys
from semel.http.protocol import PROBLEMS, TYPE
from semel.http.rule import Ruling

SCHEMA = "IdempotencyProblem"
PROBLEM_JSON = "application/problem+json"

# A string in double quotes, or a bare word, as `protocol.parse_key` takes them.
PATTERN = r'^("([ !#-\[\]-~]|\\["\\])+"|[!#-+\--:<-\[\]-~]+)$'

# Told with a moment at which asking again makes sense.
RETRIED = ("in-progress", "store-unavailable")

REPLAYED: dict[str, Any] = {
    "description": "`true` when this is the response of an earlier request with the same key.",
    "schema": {"type": "string", "enum": ["true"]},
}
RETRY_AFTER: dict[str, Any] = {
    "description": "In how many seconds to ask again, with the same key.",
    "schema": {"type": "integer", "minimum": 1},
}

NONE: Mapping[str, str] = MappingProxyType({})


def operation(
    ruling: Ruling, success: str, told: Collection[str], usual: Mapping[str, str] = NONE
) -> dict[str, Any]:
    """What to add to an operation whose usual answer is `success`.

    `told` are the statuses that the API describes in its own words; `usual` has what its framework
    says of a status, which ours comes behind.
    """
    responses: dict[str, Any] = {s: {"description": f"{words}."} for s, words in usual.items()}
    responses[success] = {"headers": {"Idempotent-Replayed": REPLAYED}}
    said: dict[str, Any] = {
        "parameters": [parameter(ruling)],
        "responses": responses,
        "x-idempotency-retention": ruling.policy.terms.ttl_s,
    }
    for name in problems(ruling):
        _add(said["responses"], name, told)
    return said


def parameter(ruling: Ruling) -> dict[str, Any]:
    """The header."""
    return {
        "name": "Idempotency-Key",
        "in": "header",
        "required": ruling.required,
        "description": (
            "A new random string, such as a UUID, for every new request, and the same one when "
            f"that request is sent again. {retention(ruling)}"
        ),
        "schema": {
            "type": "string",
            "minLength": 1,
            "maxLength": keys.LIMIT,
            "pattern": PATTERN,
        },
        "example": "8e03978e-40d5-43dd-bc93-6894a57f9324",
    }


def retention(ruling: Ruling) -> str:
    """How long a response is kept, as a sentence."""
    ttl_s = ruling.policy.terms.ttl_s
    if ttl_s is None:
        return "The response is kept for good."
    return f"The response is kept for {duration(ttl_s)}."


UNITS = ((86_400, "day"), (3600, "hour"), (60, "minute"))


def duration(seconds: float) -> str:
    """In the largest unit that it is a whole number of; up to two days are told in hours."""
    for length, unit in UNITS:
        count, rest = divmod(seconds, length)
        if not rest and count > (2 if unit == "day" else 0):
            return f"{count:g} {unit}{'' if count == 1 else 's'}"
    return f"{seconds:g} second{'' if seconds == 1 else 's'}"


def problems(ruling: Ruling) -> Iterator[str]:
    """The names of what may be said instead of a response, under this rule."""
    on_crash = ruling.on_error if ruling.rule.on_crash is None else ruling.rule.on_crash
    never = {
        "key-missing": not ruling.required,
        "tenant-malformed": isinstance(ruling.scope, str),
        "tenant-missing": isinstance(ruling.scope, str),
        "body-malformed": ruling.fingerprint != "json",
        "outcome-unknown": on_crash in ("release", "store"),
        "interrupted": "store" not in (ruling.on_error, on_crash),
    }
    return (name for name in PROBLEMS if not never.get(name, False))


def _add(responses: dict[str, Any], name: str, told: Collection[str]) -> None:
    status, title = PROBLEMS[name]
    response: dict[str, Any] = responses.setdefault(str(status), {})
    if str(status) not in told:
        line = f"{title} (`{TYPE}{name}`)."
        before = response.get("description")
        response["description"] = line if before is None else f"{before} {line}"
    response.setdefault("content", {})[PROBLEM_JSON] = {
        "schema": {"$ref": f"#/components/schemas/{SCHEMA}"}
    }
    if name in RETRIED:
        response.setdefault("headers", {})["Retry-After"] = RETRY_AFTER
