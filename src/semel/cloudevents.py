"""Messages as CloudEvents 1.0, in both of its modes.

Structured: one JSON document that says everything. Binary: attributes apart, as a protocol's own
headers or fields, and the payload alone as the body. What an outbox row has beyond CloudEvents
travels as extension attributes: `position`, `seq`, `topic`, `tenant`, `aggregatetype`,
`aggregateid`, and `headers`, which is JSON. Numbers among them are texts, for an Integer of
CloudEvents has 32 bits. `traceparent` and `tracestate` are attributes of their own besides,
because that is where others look for them. `semelrefused` is there for a stand-in only, whose data
is null.

The payload is written into the document as it is: it is JSON already, and stays so to the byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring as _quoted
from json.encoder import encode_basestring_ascii as _ascii
from typing import Any, NoReturn

from semel.errors import SemelError
from semel.messages import Message

__all__ = [
    "JSON",
    "STRUCTURED",
    "NotAnEventError",
    "from_binary",
    "from_json",
    "is_clean",
    "to_binary",
    "to_json",
]

JSON = "application/json"
STRUCTURED = "application/cloudevents+json; charset=utf-8"
SPEC = "1.0"
SOURCE = "/semel/outbox"

# Why a broker would not have the event that this one stands for.
REFUSED = "semelrefused"

# What is looked for by others under its own name.
TRACE = ("traceparent", "tracestate")


# A place in a shard and a number in a sequence are 64-bit columns everywhere.
MOST = 2**63 - 1


class NotAnEventError(SemelError, ValueError):
    """What was read is no CloudEvent, or lacks what Semel needs of one."""


# --- structured ---------------------------------------------------------------------------------


def to_json(message: Message) -> str:
    """The whole message as one JSON document."""
    m = message
    before, behind = _frame(m.source, m.type, m.topic, m.tenant, m.aggregate_type)
    id = _quoted(m.aggregate_id)
    seq = "" if m.seq is None else f',"seq":"{m.seq}"'
    headers = _headers_json(m.headers) if m.headers else ""
    refused = f',"{REFUSED}":{_quoted(m.refused)}' if m.refused else ""
    return (
        f'{{"specversion":"1.0","id":{_quoted(m.id)}{before}{id[1:]},"time":"{_stamp(m.time)}"'
        f',"datacontenttype":"application/json","position":"{m.position}"{seq}{behind}{id}'
        f'{headers}{refused},"data":{m.payload}}}'
    )


@lru_cache(maxsize=4096)
def _frame(source: str, kind: str, topic: str, tenant: str, aggregate_type: str) -> tuple[str, str]:
    """What comes back again and again: before the id in the subject, and behind the position."""
    of = _quoted(aggregate_type)
    whose = f',"tenant":{_quoted(tenant)}' if tenant else ""
    return (
        f',"source":{_quoted(source or SOURCE)},"type":{_quoted(kind)},"subject":{of[:-1]}/',
        f',"topic":{_quoted(topic)}{whose},"aggregatetype":{of},"aggregateid":',
    )


def _headers_json(headers: Mapping[str, str]) -> str:
    lifted = "".join(f',"{name}":{_quoted(text)}' for name, text in _lifted(headers).items())
    return f'{lifted},"headers":{_quoted(_headers_text(headers))}'


def from_json(document: str | bytes) -> Message:
    """The message in a structured document."""
    try:
        text = document.decode() if isinstance(document, bytes) else _utf8(document)
        found, payload = _ours(text) or _anybodys(text)
    except (ValueError, RecursionError) as error:
        raise NotAnEventError(f"this is no CloudEvent in JSON: {error}") from error
    if found.get("data_base64") is not None:
        raise NotAnEventError("this CloudEvent has binary data, and Semel's are JSON")
    return _message(found, payload)


# Where our own writer puts the payload: behind everything else.
_DATA = ',"data":'


def _ours(text: str) -> tuple[dict[str, Any], str] | None:
    """Attributes and payload, where the payload is the last member; None where it is not.

    What is before the first `,"data":` is a whole object only if that is the member itself:
    within a text its quotes are escaped, and a nested object would be left open.
    """
    head, data, rest = text.partition(_DATA)
    if not data or not rest.endswith("}"):
        return None
    payload = rest[:-1]
    try:
        found = _READ(head + "}")
        _READ(payload)
    except ValueError:
        return None
    return None if "data" in found else (found, payload)


def _anybodys(text: str) -> tuple[dict[str, Any], str]:
    found = _READ(text)
    if not isinstance(found, dict):
        raise NotAnEventError("this is no CloudEvent: JSON, but not an object")
    return found, _data_of(text) if "data" in found else "null"


_NEXT = re.compile(r"[ \t\n\r:,]*").match


def _data_of(text: str) -> str:
    """The member `data` of a valid object, to the byte. Of two, the last counts, as for `found`."""
    payload, at = "", text.index("{") + 1
    while text[at := _NEXT(text, at).end()] != "}":  # type: ignore[union-attr]
        name, at = _JSON.raw_decode(text, at)
        begins = _NEXT(text, at).end()  # type: ignore[union-attr]
        _, at = _JSON.raw_decode(text, begins)
        if name == "data":
            payload = text[begins:at]
    return payload


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# Numbers stay texts: some are longer than Python would read, and nobody calculates here.
_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refused)
_READ = _JSON.decode


# --- binary -------------------------------------------------------------------------------------


def to_binary(message: Message) -> tuple[dict[str, str], bytes]:
    """The attributes by name, without any protocol's prefix, and the body."""
    m = message
    attributes = {
        "specversion": SPEC,
        "id": m.id,
        "source": m.source or SOURCE,
        "type": m.type,
        "subject": f"{m.aggregate_type}/{m.aggregate_id}",
        "time": _stamp(m.time),
        "datacontenttype": JSON,
        "position": str(m.position),
        "topic": m.topic,
        "aggregatetype": m.aggregate_type,
        "aggregateid": m.aggregate_id,
    }
    if m.seq is not None:
        attributes["seq"] = str(m.seq)
    if m.tenant:
        attributes["tenant"] = m.tenant
    if m.headers:
        attributes |= _lifted(m.headers)
        attributes["headers"] = _headers_text(m.headers)
    if m.refused:
        attributes[REFUSED] = m.refused
    return attributes, m.payload.encode()


def from_binary(attributes: Mapping[str, str], body: bytes) -> Message:
    """The message whose attributes and body these are."""
    try:
        payload = body.decode() if body else "null"
        _READ(payload)
    except (ValueError, RecursionError) as error:
        raise NotAnEventError(f"the body is no JSON: {error}") from error
    return _message(attributes, payload)


# --- both ---------------------------------------------------------------------------------------


def _message(found: Mapping[str, Any], payload: str) -> Message:
    if found.get("specversion") != SPEC:
        raise NotAnEventError(f"specversion is {found.get('specversion')!r}, not {SPEC}")
    subject = _text(found, "subject")
    kind, _, id = subject.partition("/") if "/" in subject else ("", "", subject)
    return Message(
        _number(found, "position") or 0,
        _needed(found, "id"),
        _needed(found, "type"),
        _text(found, "topic"),
        _text(found, "tenant"),
        _text(found, "aggregatetype", kind),
        _text(found, "aggregateid", id),
        _number(found, "seq"),
        payload,
        _moment(_text(found, "time")),
        _headers(found),
        _needed(found, "source"),
        _text(found, REFUSED),
    )


# What a String of CloudEvents must not hold: control characters, surrogates, noncharacters.
_ODD = re.compile(
    "[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef"
    + "".join(f"{chr(plane << 16 | 0xFFFE)}{chr(plane << 16 | 0xFFFF)}" for plane in range(17))
    + "]"
)


def is_clean(text: str) -> bool:
    """Can an attribute hold it, of CloudEvents, and of the protocols below?"""
    return text.isprintable() or not _ODD.search(text)


def _text(found: Mapping[str, Any], name: str, otherwise: str = "") -> str:
    text = found.get(name)
    if text is None:  # as good as absent, says the specification
        return otherwise
    if not isinstance(text, str) or not is_clean(text):
        raise NotAnEventError(f"the CloudEvent's {name} is no text: {text!r:.80}")
    return text


def _needed(found: Mapping[str, Any], name: str) -> str:
    if not (text := _text(found, name)):
        raise NotAnEventError(f"the CloudEvent has no {name}")
    return text


_DIGITS = re.compile("[0-9]{1,19}").fullmatch


def _number(found: Mapping[str, Any], name: str) -> int | None:
    text = found.get(name)
    if text is None:
        return None
    if isinstance(text, str) and _DIGITS(text) and (number := int(text)) <= MOST:
        return number
    raise NotAnEventError(f"the CloudEvent's {name} is no number from 0 to 2^63-1: {text!r:.80}")


def _lifted(headers: Mapping[str, str]) -> dict[str, str]:
    found = [(name, headers[name]) for name in TRACE if name in headers]
    return {name: text for name, text in found if text and is_clean(text)}


def _headers_text(headers: Mapping[str, str]) -> str:
    """In ASCII: headers may hold what attributes must not."""
    return "{" + ",".join([f"{_ascii(name)}:{_ascii(headers[name])}" for name in headers]) + "}"


def _headers(found: Mapping[str, Any]) -> dict[str, str]:
    lifted = {name: text for name in TRACE if (text := _text(found, name))}
    if not (written := _text(found, "headers")):
        return lifted
    try:
        headers: dict[str, str] = _READ(written)
        _utf8("".join([*headers, *headers.values()]))
        return headers | {name: text for name, text in lifted.items() if name not in headers}
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise NotAnEventError(f"the CloudEvent's headers are no texts by name: {error}") from error


def _utf8(text: str) -> str:
    """The text, where it is one: a lone surrogate is none."""
    if not text.isascii():
        text.encode()
    return text


_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


def _stamp(time: datetime) -> str:
    utc = time if time.tzinfo is UTC else time.astimezone(UTC)
    return f"{utc.isoformat()[:-6]}Z"


def _moment(text: str) -> datetime:
    if not text:
        return _NEVER
    try:
        time = datetime.fromisoformat(text)
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise NotAnEventError(f"the CloudEvent's time cannot be read: {error}") from error
