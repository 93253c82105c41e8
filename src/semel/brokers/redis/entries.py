"""Messages as entries of a stream, and back.

Structured: one field `event`, the whole CloudEvent. Binary: the attributes as fields, and `data`.
Both are read, whatever is written. The entry's id is the message's position, and is believed
before what the document says of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from semel.cloudevents import NotAnEventError, from_binary, from_json, to_binary, to_json
from semel.messages import Delivery, Message
from semel.values import value

Mode: TypeAlias = Literal["structured", "binary"]

EVENT = b"event"
DATA = b"data"


def position_of(id: bytes) -> int:
    return int(id.partition(b"-")[0])


# --- writing ------------------------------------------------------------------------------------


@value
class Unfit:
    """A message that Redis would not take, however often it is asked."""

    message: Message
    why: str
    is_large: bool = False


def write(
    messages: Iterable[Message], mode: Mode, most: int
) -> tuple[list[Any], int, Unfit | None]:
    """What the script is told of each message, up to an unfit one, and how many that are."""
    words: list[Any] = []
    count = 0
    for message in messages:
        try:
            *before, body = _words(message, mode)
        except UnicodeEncodeError as error:
            return words, count, Unfit(message, f"it cannot be written as UTF-8: {error}")
        if len(body) > most:
            why = f"it has {len(body)} bytes, and Redis takes {most} (proto-max-bulk-len)"
            return words, count, Unfit(message, why, is_large=True)
        words += (f"{message.position}-0", *before, body)
        count += 1
    return words, count, None


def _words(message: Message, mode: Mode) -> Sequence[Any]:
    """The document alone, or how many words come, attributes by turns, and the data."""
    if mode == "structured":
        return (to_json(message).encode(),)
    attributes, body = to_binary(message)
    flat = [word.encode() for pair in attributes.items() for word in pair]
    return (len(flat) + 2, *flat, DATA, body)


# --- reading ------------------------------------------------------------------------------------


def delivery(
    entry: Sequence[Any], topic: str, *, count: int = 1, consumer: str = "", idle_s: float = 0.0
) -> Delivery:
    """An entry in somebody's hands, readable or not."""
    id, words = entry
    try:
        message = _message(words)
    except NotAnEventError as error:
        raw = words[1] if len(words) == 2 else b"\n".join(words)  # noqa: PLR2004
        return Delivery(id, None, count, consumer, idle_s, problem=str(error), raw=raw)
    position = position_of(id)
    if message.position != position or not message.topic:
        message = replace(message, position=position, topic=message.topic or topic)
    return Delivery(id, message, count, consumer, idle_s)


def event_id(entry: Sequence[Any]) -> str:
    """Which event an entry is, "" when it is none."""
    try:
        return _message(entry[1]).id
    except NotAnEventError:
        return ""


def _message(words: Sequence[bytes]) -> Message:
    if words[0] == EVENT and len(words) == 2:  # noqa: PLR2004 - a name and a value
        return from_json(words[1])
    fields = dict(zip(words[::2], words[1::2], strict=True))
    if b"specversion" not in fields:
        raise NotAnEventError(
            "this entry has neither a field `event` alone nor the fields of a CloudEvent"
        )
    body = fields.pop(DATA, b"")
    try:
        return from_binary({name.decode(): text.decode() for name, text in fields.items()}, body)
    except UnicodeDecodeError as error:
        raise NotAnEventError(f"an attribute is no UTF-8: {error}") from error
