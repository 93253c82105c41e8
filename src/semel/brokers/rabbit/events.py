"""Messages as RabbitMQ has them, and back: CloudEvents' binding for AMQP.

Structured: the body is the whole CloudEvent, and the content type says so. Binary: each attribute
is a header `cloudEvents:<name>`, and the body is the payload. Both are read, whatever is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, Literal, TypeAlias

from aio_pika import DeliveryMode
from aio_pika import Message as Parcel

from semel.cloudevents import (
    JSON,
    STRUCTURED,
    NotAnEventError,
    from_binary,
    from_json,
    to_binary,
    to_json,
)
from semel.messages import Message, Refused

Mode: TypeAlias = Literal["structured", "binary"]

PREFIX = "cloudEvents:"
PREFIXES = (PREFIX, "cloudEvents_")
"""The second is what others write, for those who cannot have a colon in a name."""

# A name of RabbitMQ's, and so a message's id, has at most so many bytes.
SHORT = 255


def write(
    messages: Iterable[Message], mode: Mode
) -> tuple[list[tuple[Message, Parcel]], Refused | None]:
    """The messages as they are sent, up to the first that cannot be written."""
    written: list[tuple[Message, Parcel]] = []
    for message in messages:
        try:
            written.append((message, _parcel(message, mode)))
        except UnicodeEncodeError as error:
            return written, Refused(message, f"it cannot be written as UTF-8: {error}")
    return written, None


def _parcel(message: Message, mode: Mode) -> Parcel:
    headers: dict[str, Any] = {}
    if mode == "structured":
        kind, body = STRUCTURED, to_json(message).encode()
    else:
        attributes, body = to_binary(message)
        kind = attributes.pop("datacontenttype", JSON)
        headers = {f"{PREFIX}{name}": text for name, text in attributes.items()}
        for text in attributes.values():
            text.encode()  # refused here, not when half of the batch is sent
    return Parcel(
        body,
        headers=headers,
        content_type=kind,
        message_id=_short(message.id),
        delivery_mode=DeliveryMode.PERSISTENT,
    )


def _short(id: str) -> str:
    """What is returned to us is known again by this; it needs to be ours alone, not readable."""
    return id if len(id.encode()) <= SHORT else sha256(id.encode()).hexdigest()


def read(content_type: str | None, headers: Mapping[str, Any], body: bytes) -> Message:
    if (content_type or "").startswith("application/cloudevents"):
        return from_json(body)
    attributes: dict[str, str] = {}
    for name, text in headers.items():
        if name.startswith(PREFIXES):
            attributes[name[len(PREFIX) :]] = _text(text)
    if not attributes:
        raise NotAnEventError(
            f"this is no CloudEvent: its content type is {content_type!r}, and it has no headers "
            f"{PREFIX}..."
        )
    return from_binary(attributes, body)


def _text(value: Any) -> str:
    """Others may write an attribute as a number, a truth or a time."""
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
