"""What is said to Redis and what it says back: one script per verb, pure.

An operation becomes a `Call`, a script with the record's key and its arguments; a reply becomes
the verb's answer. The scripts state the rules of `semel.stores.rules` next to the data
(`stores/lua`; the fields of a record are written down in `record.lua`).
"""

from __future__ import annotations

import hashlib
import json
from base64 import urlsafe_b64decode
from binascii import b2a_base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import hiredis

from semel.errors import CorruptRecordError
from semel.stores.rules import (
    Claiming,
    Completing,
    Noting,
    Operation,
    Releasing,
    Renewing,
    Row,
    micros,
    moment,
    settlement,
)
from semel.values import (
    Answer,
    Busy,
    Claim,
    Done,
    Kept,
    Key,
    Kind,
    Lost,
    Mismatch,
    Orphan,
    Outcome,
    State,
    Verdict,
    Won,
)

_LUA = files("semel.stores") / "lua"


class Script:
    """A verb's Lua, known to the server by its hash once it has seen the source."""

    def __init__(self, *parts: str) -> None:
        self.name = parts[-1]
        source = "\n".join((_LUA / f"{part}.lua").read_text("utf-8") for part in parts)
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


CLAIM = Script("record", "claim")
COMPLETE = Script("record", "held", "complete")
RELEASE = Script("record", "held", "release")
RENEW = Script("record", "held", "renew")
NOTE = Script("record", "held", "note")
RESOLVE = Script("record", "resolve")
FORGET = Script("forget")
LOOK = Script("look")


class Call:
    """One script with its key and arguments."""

    __slots__ = ("args", "key", "script")

    def __init__(self, script: Script, key: bytes, args: tuple[bytes, ...]) -> None:
        self.script = script
        self.key = key
        self.args = args

    def by_hash(self) -> tuple[bytes, ...]:
        """The command for a server that knows the script."""
        return (b"EVALSHA", self.script.sha, b"1", self.key, *self.args)

    def in_full(self) -> tuple[bytes, ...]:
        """The command for a server that does not: it remembers the script from then on."""
        return (b"EVAL", self.script.source, b"1", self.key, *self.args)


# The command as it goes over the wire; hiredis' own stub allows one word only.
pack: Callable[[tuple[bytes, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


# --- names --------------------------------------------------------------------------------------


_URLSAFE = bytes.maketrans(b"+/", b"-_")


class Names:
    """The Redis keys of one namespace: `semel:<namespace>:{<id>}:ledger`.

    The id is in braces, so that everything about one record lies in one slot of a cluster.
    """

    def __init__(self, namespace: str) -> None:
        self._before = f"semel:{namespace}:{{".encode()
        self.pattern = self._before + b"*}:ledger"

    def of(self, id: bytes) -> bytes:
        return self._before + b2a_base64(id, newline=False).translate(_URLSAFE, b"=") + b"}:ledger"

    def id_of(self, name: bytes) -> bytes | None:
        """The id in a key's name, None when the name is not one of ours."""
        coded = name[len(self._before) : -len(b"}:ledger")]
        try:
            id = urlsafe_b64decode(coded + b"=" * (-len(coded) % 4))
        except ValueError:
            return None
        return id if self.of(id) == name else None


# --- from operations to calls -------------------------------------------------------------------


def text(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:  # a lone surrogate is a legal key in Python: kept, not refused
        return value.encode("utf-8", "surrogatepass")


def untext(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


@lru_cache(maxsize=256)
def _span(seconds: float | None) -> bytes:
    return b"" if seconds is None else b"%d" % micros(seconds)


def _flag(value: bool) -> bytes:
    return b"1" if value else b"0"


def _status(outcome: Outcome) -> bytes:
    return b"" if outcome.status is None else b"%d" % outcome.status


_LETTERS: dict[Kind, bytes] = {"value": b"v", "error": b"e", "lost": b"l"}
_KINDS: dict[bytes, Kind] = {letter: kind for kind, letter in _LETTERS.items()}


def call_of(op: Operation, name: bytes) -> Call:
    """The call that carries the operation out on the record with this name."""
    match op:
        case Claiming():
            return Call(CLAIM, name, _claiming(op))
        case Completing():
            return Call(COMPLETE, name, (*_held(op.claim), *_completing(op)))
        case Releasing():
            return Call(RELEASE, name, (*_held(op.claim), *_releasing(op)))
        case Renewing():
            return Call(RENEW, name, (*_held(op.claim), *_leasing(op.claim, op.lease_s)))
        case Noting():
            leasing = _leasing(op.claim, op.claim.terms.lease_s)
            return Call(NOTE, name, (*_held(op.claim), *leasing, text(op.name), op.data))


def _claiming(op: Claiming) -> tuple[bytes, ...]:
    key, terms = op.key, op.terms
    return (
        text(op.attempt),
        text(key.operation),
        op.fingerprint,
        _span(terms.lease_s),
        _span(terms.ttl_s),
        _flag(terms.takeover),
        _flag(terms.hold),
        text(key.text),
        text(key.tenant),
    )


def _held(claim: Claim) -> tuple[bytes, ...]:
    return text(claim.attempt), b"%d" % claim.fence, text(claim.key.operation), claim.fingerprint


def _completing(op: Completing) -> tuple[bytes, ...]:
    outcome = op.outcome
    kind = _LETTERS[outcome.kind]
    return kind, outcome.data, _status(outcome), _span(op.claim.terms.ttl_s)


def _releasing(op: Releasing) -> tuple[bytes, ...]:
    ttl = _span(op.claim.terms.ttl_s)
    if op.error is None:
        return ttl, b"released"
    error = text(op.error)
    return ttl, b"failed: " + error, error


def _leasing(claim: Claim, lease_s: float) -> tuple[bytes, ...]:
    return _span(lease_s), _span(claim.terms.ttl_s), _flag(claim.terms.hold)


def resolving(name: bytes, fence: int, outcome: Outcome | None, ttl_s: float | None) -> Call:
    ending = text(settlement(outcome))
    args: tuple[bytes, ...] = (b"%d" % fence, _span(ttl_s), ending)
    if outcome is not None:
        args += (_LETTERS[outcome.kind], outcome.data, _status(outcome))
    return Call(RESOLVE, name, args)


def forgetting(name: bytes, force: bool) -> Call:
    return Call(FORGET, name, (_flag(force),))


def looking(name: bytes) -> Call:
    return Call(LOOK, name, ())


# --- from replies to answers --------------------------------------------------------------------


def answer_of(op: Operation, name: bytes, reply: Any) -> Answer | Verdict:
    """What the script's reply says."""
    try:
        return _claimed(op, reply) if isinstance(op, Claiming) else _verdict(reply)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise corrupt(name, f"its reply was {reply!r}") from error


def _claimed(op: Claiming, reply: list[Any]) -> Answer:
    match reply[0]:
        case 1:
            return _won(op, reply)
        case 2:
            return Done(_outcome(reply[2:]), reply[1])
        case 3:
            return Busy(reply[1] / 1e6)
        case 4:
            return Mismatch(reply[1].decode())
        case 5:
            return Orphan(reply[1], moment(reply[2]))
        case unknown:
            raise ValueError(unknown)


def _won(op: Claiming, reply: list[Any]) -> Won:
    _, fence, *earlier = reply
    if not earlier:
        return Won(Claim(op.key, op.attempt, op.fingerprint, op.terms, fence))
    number, flat, *orphaned = earlier
    claim = Claim(op.key, op.attempt, op.fingerprint, op.terms, fence, number)
    steps = {untext(name): data for name, data in zip(flat[::2], flat[1::2], strict=True)}
    orphan = Orphan(orphaned[0], moment(orphaned[1])) if orphaned else None
    return Won(claim, steps, orphan)


def _verdict(reply: Any) -> Verdict:
    if reply == 1:
        return Kept()
    return Lost(_outcome(reply[1:]) if len(reply) > 1 else None)


def _outcome(parts: Sequence[Any]) -> Outcome:
    kind, data, status = parts
    if not isinstance(data, bytes):
        raise TypeError("a completed record has no data")
    return Outcome(_KINDS[kind], data, None if status is None else int(status))


def corrupt(name: bytes, why: str) -> CorruptRecordError:
    shown = name.decode("utf-8", "backslashreplace")
    return CorruptRecordError(
        f"the record at the Redis key {shown} cannot be read: {why}. Nothing was run and nothing "
        f"changed. Look at it (`redis-cli type '{shown}'`); if something else wrote it, give the "
        "store another namespace; to start over, `forget` it with force=True"
    )


# --- the whole record ---------------------------------------------------------------------------

_STATES = {
    b"P": State.PENDING.value,
    b"C": State.COMPLETED.value,
    b"F": State.FAILED.value,
    b"U": State.UNKNOWN.value,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A record as it was at a moment."""

    row: Row
    now_us: int


def seen_of(id: bytes, name: bytes, reply: list[Any]) -> Seen | None:
    """What `look` found, None when there is no record."""
    now_us, expires_ms, flat = reply
    if not flat:
        return None
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    expires_us = None if expires_ms < 0 else expires_ms * 1000
    try:
        return Seen(_row(id, fields, expires_us), now_us)
    except (KeyError, TypeError, ValueError) as error:
        raise corrupt(name, "its fields are not those of a record") from error


def _row(id: bytes, fields: Mapping[bytes, bytes], expires_us: int | None) -> Row:
    fence = int(fields[b"e"])
    return Row(
        key=_key(id, fields),
        fingerprint=fields.get(b"f", b""),
        attempt=untext(fields[b"a"]),
        fence=fence,
        number=int(fields.get(b"n", 1)),
        state=_STATES[fields[b"s"]],
        hold=b"h" in fields,
        created_us=int(fields.get(b"c", fence)),
        started_us=int(fields.get(b"b", fence)),
        lease_us=int(fields[b"l"]),
        completed_us=int(fields[b"d"]) if b"d" in fields else None,
        expires_us=expires_us,
        outcome=_outcome([fields.get(f) for f in (b"k", b"r", b"t")]) if b"k" in fields else None,
        error=untext(fields[b"x"]) if b"x" in fields else None,
        steps={untext(f[1:]): data for f, data in fields.items() if f[:1] == b"S"},
        past=_past(fields),
    )


def _key(id: bytes, fields: Mapping[bytes, bytes]) -> Key:
    return Key(
        id=id,
        text=untext(fields.get(b"K", b"")),
        tenant=untext(fields.get(b"T", b"")),
        operation=untext(fields.get(b"o", b"")),
    )


def _past(fields: Mapping[bytes, bytes]) -> str:
    numbers = sorted(int(field[1:]) for field in fields if field[:1] == b"p")
    return json.dumps([[n, *json.loads(untext(fields[b"p%d" % n]))] for n in numbers])
