"""What an inbox says to Redis and what it says back: one script per decision, pure.

Everything about the sequences of one slot (of 256) for one consumer lies in one slot of a cluster:
the keys begin with `semel:<namespace>:{<consumer>/<slot>}:inbox`. So a mark, what waits behind it,
when that is due and who settled it change together, in one call.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import lru_cache
from importlib.resources import files
from typing import Any
from urllib.parse import quote, unquote

import hiredis

from semel.messages import Audit, Message, ParkedMessage, Why
from semel.stores.redis.scripts import Call, Script, text, untext
from semel.stores.rules import EPOCH, moment
from semel.values import value

_LUA = files("semel.stores") / "lua" / "inbox"


def _script(*parts: str) -> Script:
    return Script(*parts, folder=_LUA)


BEGIN = _script("sequence", "begin")
APPLY = _script("sequence", "ended", "apply")
FAIL = _script("sequence", "ended", "fail")
HEAD = _script("sequence", "head")
RENEW = _script("sequence", "renew")
RELEASE = _script("sequence", "release")
LOOK = _script("sequence", "look")
SETTLE = _script("sequence", "settle")
DUE = _script("due")
BASELINE = _script("baseline")
LISTED = _script("listed")
AUDITS = _script("audits")
FORGET = _script("forget")


# --- where it lies ------------------------------------------------------------------------------


@value
class Place:
    """Where the sequences of one slot lie, for one consumer."""

    namespace: str
    consumer: str
    slot: int

    @property
    def before(self) -> bytes:
        return _before(self.namespace, self.consumer, self.slot)

    def call(self, script: Script, id: bytes, *args: Any) -> Call:
        """About one sequence."""
        keys = _keys(self.before, id)
        return _call(script, keys, id, *args)

    def call_all(self, script: Script, name: bytes, *args: Any) -> Call:
        """About what its sequences share."""
        return _call(script, [self.before + name], *args)


def _call(script: Script, keys: Sequence[bytes], *args: Any) -> Call:
    words: Any = (b"EVALSHA", script.sha, len(keys), *keys, *args)
    return Call(script, keys[0], hiredis.pack_command(words))


@lru_cache(maxsize=4096)
def _before(namespace: str, consumer: str, slot: int) -> bytes:
    return f"semel:{namespace}:{{{quote(consumer, safe=':/')}/{slot:02x}}}:inbox:".encode()


def _keys(before: bytes, id: bytes) -> Sequence[bytes]:
    own = before + urlsafe_b64encode(id).rstrip(b"=")
    shared = (before + b"due", before + b"waits", before + b"begins", before + b"audit")
    return (own, own + b":rows", own + b":order", *shared)


def forgetting(key: bytes, older_than_us: int) -> Call:
    return _call(FORGET, [key], older_than_us)


def is_state(key: bytes) -> bool:
    """Is it the hash of one sequence? What a slot's sequences share has a shorter name."""
    return len(key.rpartition(b":")[2]) == STATE_CHARS


# An identity has 32 bytes.
STATE_CHARS = 43


def pattern(namespace: str, name: str) -> str:
    """For the keys of this name, of all slots and consumers."""
    return f"semel:{namespace}:{{*}}:inbox:{name}"


def place_of(namespace: str, key: bytes) -> Place | None:
    """The place whose key this is; None when it is nobody's of ours."""
    try:
        tag = key.decode().removeprefix(f"semel:{namespace}:{{").partition("}")[0]
        consumer, _, slot = tag.rpartition("/")
        place = Place(namespace, unquote(consumer), int(slot, 16))
    except ValueError:
        return None
    return place if key.startswith(place.before) else None


# --- what lies there ----------------------------------------------------------------------------


def written(message: Message) -> bytes:
    """A message as it waits: all of it, to the byte."""
    fields = asdict(message) | {"time": message.time.isoformat(), "headers": dict(message.headers)}
    return text(json.dumps(fields, ensure_ascii=False, separators=(",", ":")))


def message_in(document: bytes) -> Message:
    fields: dict[str, Any] = json.loads(untext(document))
    fields["time"] = datetime.fromisoformat(fields["time"])
    return Message(**fields)


def meta(row: ParkedMessage) -> bytes:
    return f"{row.why} {row.attempts} {_us(row.parked_at)} {row.edited}".encode()


def due_us(row: ParkedMessage) -> bytes:
    return b"" if row.due_at is None else b"%d" % _us(row.due_at)


def _us(at: datetime) -> int:
    return (at - EPOCH) // timedelta(microseconds=1)


def row_of(
    id: bytes, consumer: str, document: bytes, meta: bytes, error: bytes, due: bytes = b""
) -> ParkedMessage:
    words = meta.decode().split(" ")
    why: Why = words[0]  # type: ignore[assignment]
    return ParkedMessage(
        sequence=id,
        consumer=consumer,
        message=message_in(document),
        state="parked" if why in {"poison", "crash"} else "waiting",
        why=why,
        attempts=int(words[1]),
        error=untext(error),
        parked_at=moment(int(words[2])),
        due_at=moment(int(due)) if due else None,
        edited=int(words[3]),
    )


def audit_text(audit: Audit) -> bytes:
    fields = asdict(audit) | {"at": audit.at.isoformat(), "sequence": audit.sequence.hex()}
    return text(json.dumps(fields, ensure_ascii=False))


def audit_in(document: bytes) -> Audit:
    fields: Mapping[str, Any] = json.loads(untext(document))
    at, sequence = datetime.fromisoformat(fields["at"]), bytes.fromhex(fields["sequence"])
    return Audit(**{**fields, "at": at, "sequence": sequence})
