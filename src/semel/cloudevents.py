"""Messages as CloudEvents 1.0, in both of its modes.

Structured: one JSON document that says everything. Binary: attributes apart, as a protocol's own
headers or fields, and the payload alone as the body. What an outbox row has beyond CloudEvents
travels as extension attributes: `position`, `seq`, `topic`, `tenant`, `aggregatetype`,
`aggregateid`, and `headers`, which is JSON. `traceparent` and `tracestate` are attributes of their
own besides, because that is where others look for them.

The payload is written into the document as it is: it is JSON already, and stays so to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring as _quoted
from typing import Any

from semel.errors import SemelError
from semel.messages import Message

__all__ = [
    "JSON",
    "STRUCTURED",
    "NotAnEventError",
    "from_binary",
    "from_json",
    "to_binary",
    "to_json",
]

JSON = "application/json"
STRUCTURED = "application/cloudevents+json; charset=utf-8"
SPEC = "1.0"
SOURCE = "/semel/outbox"

# What is looked for by others under its own name.
TRACE = ("traceparent", "tracestate")


class NotAnEventError(SemelError, ValueError):
    """What was read is no CloudEvent, or lacks what Semel needs of one."""


quoted = lru_cache(maxsize=4096)(_quoted)
"""For what comes back again and again: types, topics, tenants."""


# --- structured ---------------------------------------------------------------------------------


def to_json(message: Message) -> str:
    """The whole message as one JSON document."""
    m = message
    seq = "" if m.seq is None else f',"seq":{m.seq}'
    tenant = f',"tenant":{quoted(m.tenant)}' if m.tenant else ""
    headers = _headers_json(m.headers) if m.headers else ""
    return (
        f'{{"specversion":"1.0","id":{_quoted(m.id)},"source":{quoted(m.source or SOURCE)},'
        f'"type":{quoted(m.type)},"subject":{_quoted(f"{m.aggregate_type}/{m.aggregate_id}")},'
        f'"time":"{_stamp(m.time)}","datacontenttype":"application/json",'
        f'"position":"{m.position}"{seq},"topic":{quoted(m.topic)}{tenant},'
        f'"aggregatetype":{quoted(m.aggregate_type)},"aggregateid":{_quoted(m.aggregate_id)}'
        f'{headers},"data":{m.payload}}}'
    )


def _headers_json(headers: Mapping[str, str]) -> str:
    text = json.dumps(dict(headers), ensure_ascii=False, separators=(",", ":"))
    lifted = "".join(f',"{n}":{_quoted(headers[n])}' for n in TRACE if headers.get(n))
    return f'{lifted},"headers":{_quoted(text)}'


def from_json(document: str | bytes) -> Message:
    """The message in a structured document."""
    try:
        text = document.decode() if isinstance(document, bytes) else document
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAnEventError(f"this is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise NotAnEventError("this is no CloudEvent: JSON, but not an object")
    if "data_base64" in found:
        raise NotAnEventError("this CloudEvent has binary data, and Semel's are JSON")
    return _message(found, _payload(text, found))


# Where our own writer puts the payload: behind everything else.
_DATA = ',"data":'


def _payload(text: str, found: dict[str, Any]) -> str:
    """To the byte as it was written, where it is the last member; otherwise what it says.

    The first `,"data":` outside of it is the member itself: within a text, a quote is escaped.
    """
    plain = all(not isinstance(found[name], dict | list) for name in found if name != "data")
    if plain and list(found)[-1] == "data" and text.endswith("}"):
        return text[text.index(_DATA) + len(_DATA) : -1]
    return json.dumps(found.get("data"), ensure_ascii=False, separators=(",", ":"))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


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
        attributes |= {name: m.headers[name] for name in TRACE if m.headers.get(name)}
        attributes["headers"] = json.dumps(
            dict(m.headers), ensure_ascii=False, separators=(",", ":")
        )
    return attributes, m.payload.encode()


def from_binary(attributes: Mapping[str, str], body: bytes) -> Message:
    """The message whose attributes and body these are."""
    try:
        payload = body.decode()
    except UnicodeDecodeError as error:
        raise NotAnEventError(f"the body is no UTF-8: {error}") from error
    if not _is_json(payload):
        raise NotAnEventError("the body is no JSON")
    return _message(attributes, payload)


# --- both ---------------------------------------------------------------------------------------


def _message(found: Mapping[str, Any], payload: str) -> Message:
    if str(found.get("specversion")) != SPEC:
        raise NotAnEventError(f"specversion is {found.get('specversion')!r}, not {SPEC}")
    try:
        kind, _, id = str(found.get("subject", "")).partition("/")
        seq = found.get("seq")
        headers = json.loads(found.get("headers") or "{}")
        return Message(
            position=int(found.get("position") or 0),
            id=_text(found, "id"),
            type=_text(found, "type"),
            topic=str(found.get("topic", "")),
            tenant=str(found.get("tenant", "")),
            aggregate_type=str(found.get("aggregatetype", kind)),
            aggregate_id=str(found.get("aggregateid", id)),
            seq=None if seq is None else int(seq),
            payload=payload,
            time=_moment(found.get("time")),
            headers={str(name): str(text) for name, text in headers.items()},
            source=_text(found, "source"),
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise NotAnEventError(f"an attribute cannot be read: {error}") from error


def _text(found: Mapping[str, Any], name: str) -> str:
    text = found.get(name)
    if not isinstance(text, str) or not text:
        raise NotAnEventError(f"the CloudEvent has no {name}")
    return text


_NEVER = datetime(1970, 1, 1, tzinfo=UTC)


def _stamp(time: datetime) -> str:
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _moment(text: Any) -> datetime:
    return _NEVER if text is None else datetime.fromisoformat(str(text))
