"""What is said to Redis and what it says back: one script per verb, pure.

An operation becomes a `Call`, a script with the record's key and its arguments; a reply becomes
the verb's answer. The scripts state the rules of `semel.stores.rules` next to the data
(`stores/lua`; the fields of a record are written down in `record.lua`).
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import urlsafe_b64decode
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import hiredis

from semel.errors import CorruptRecordError
from semel.stores.rules import (
    KEPT,
    NO_STEPS,
    Noting,
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
    Key,
    Kind,
    Lost,
    Mismatch,
    Orphan,
    Outcome,
    State,
    Terms,
    Verdict,
    Won,
)

_LUA = files("semel.stores") / "lua"


# A Redis command in the Lua source. One script gives `pcall` the name `add`. XINFO and XGROUP are
# the only commands with subcommands in these scripts.
_COMMAND = re.compile(rb"\b(call|pcall|add)\(\s*'((?:(?:XINFO|XGROUP)', ')?[A-Z]+)'")


class Script:
    """A verb's Lua, known to the server by its hash once it has seen the source."""

    def __init__(self, *parts: str, folder: Traversable = _LUA) -> None:
        self.name = parts[-1]
        source = "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in parts)
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()
        self.by_hash = b"$7\r\nEVALSHA\r\n" + _bulk(self.sha)
        self.in_full = b"$4\r\nEVAL\r\n" + _bulk(self.source)

    def commands(self, line: int | None) -> list[str]:
        """Return the Redis commands on a line of the source, as ACL rules name them.

        Without a line, return those that the script calls with `pcall`: for other commands, Redis
        reports the line.
        """
        found = []
        for match in _COMMAND.finditer(self.source):
            begins = self.source.count(b"\n", 0, match.start()) + 1
            ends = begins + match[0].count(b"\n")
            if match[1] != b"call" if line is None else begins <= line <= ends:
                found.append(match[2].lower().replace(b"', '", b"|").decode())
        return list(dict.fromkeys(found))

    def opening(self, arguments: int) -> bytes:
        """How a command of the script with one key and so many arguments begins."""
        return b"*%d\r\n%b$1\r\n1\r\n" % (4 + arguments, self.by_hash)


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


CLAIM = Script("record", "fresh", "shape", "claim")
COMPLETE = Script("record", "shape", "held", "complete")
RELEASE = Script("record", "shape", "held", "release")
RENEW = Script("record", "shape", "held", "renew")
NOTE = Script("record", "shape", "held", "note")
RESOLVE = Script("record", "shape", "resolve")
FORGET = Script("forget")
LOOK = Script("look")


class Call:
    """One script with its key and arguments, packed for a server that knows the script."""

    __slots__ = ("key", "packed", "script")

    def __init__(self, script: Script, key: bytes, packed: bytes) -> None:
        self.script = script
        self.key = key
        self.packed = packed

    def in_full(self) -> bytes:
        """Packed for a server that does not: it remembers the script from then on."""
        return self.packed.replace(self.script.by_hash, self.script.in_full, 1)

    def words(self) -> tuple[Any, ...]:
        """The command in full, for redis-py, whose router compares the command's name as text."""
        reader = hiredis.Reader()
        reader.feed(self.packed)
        return ("EVAL", self.script.source, *reader.gets()[2:])


def call_of(script: Script, key: bytes, *args: bytes) -> Call:
    parts = map(_bulk, (key, *args))
    return Call(script, key, script.opening(len(args)) + b"".join(parts))


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
def _span(seconds: float) -> bytes:
    return b"%d" % micros(seconds)


# A time further away than this is never: microseconds must stay exact in a double.
FOR_EVER_US = 2**52


@lru_cache(maxsize=256)
def _expiry(*spans: float | None) -> bytes:
    """After how many milliseconds, beginning now, a record goes; empty for never.

    Redis counts from the millisecond in which the script began, so one more is added: a record
    never goes before its time.
    """
    us = sum(FOR_EVER_US if span is None else micros(span) for span in spans)
    return b"" if us >= FOR_EVER_US else b"%d" % (-(-us // 1000) + 1)


def _leased_expiry(lease_s: float, ttl_s: float | None, hold: bool) -> bytes:
    """A record without an outcome outlives its lease by the ttl; a held one waits for it."""
    return b"" if hold else _expiry(lease_s, ttl_s)


def _flag(value: bool) -> bytes:
    return b"1" if value else b"0"


def _status(outcome: Outcome) -> bytes:
    return b"" if outcome.status is None else b"%d" % outcome.status


_LETTERS: dict[Kind, bytes] = {"value": b"v", "error": b"e", "lost": b"l"}
_KINDS: dict[bytes, Kind] = {letter: kind for kind, letter in _LETTERS.items()}


# The two verbs of every first call are packed by templates: what stays the same from call to call
# is packed once, and the rest costs half of what a general packer takes.
_WORD = b"$%d\r\n%b\r\n"
_CLAIMING = CLAIM.opening(8) + 4 * _WORD + b"%b" + _WORD
_CLAIMING_FOR_TENANT = CLAIM.opening(9) + 4 * _WORD + b"%b" + 2 * _WORD
_COMPLETING = COMPLETE.opening(8) + 5 * _WORD + b"$1\r\n%b\r\n" + 2 * _WORD + b"%b"


def claiming(name: bytes, key: Key, attempt: str, fingerprint: bytes, terms: Terms) -> Call:
    who, what, written = text(attempt), text(key.operation), text(key.text)
    words: tuple[Any, ...] = (
        len(name), name, len(who), who, len(what), what, len(fingerprint), fingerprint,
        _packed_terms(terms.lease_s, terms.ttl_s, terms.takeover, terms.hold),
        len(written), written,
    )  # fmt: skip
    if not key.tenant:
        return Call(CLAIM, name, _CLAIMING % words)
    tenant = text(key.tenant)
    return Call(CLAIM, name, _CLAIMING_FOR_TENANT % (*words, len(tenant), tenant))


@lru_cache(maxsize=256)
def _packed_terms(lease_s: float, ttl_s: float | None, takeover: bool, hold: bool) -> bytes:
    expiry = _leased_expiry(lease_s, ttl_s, hold)
    return b"".join(map(_bulk, (_span(lease_s), expiry, _flag(takeover), _flag(hold))))


def completing(name: bytes, claim: Claim, outcome: Outcome) -> Call:
    who, fence, what = text(claim.attempt), b"%d" % claim.fence, text(claim.key.operation)
    fingerprint, data, status = claim.fingerprint, outcome.data, _status(outcome)
    words = (
        len(name), name, len(who), who, len(fence), fence, len(what), what,
        len(fingerprint), fingerprint, _LETTERS[outcome.kind], len(data), data,
        len(status), status, _packed_expiry(claim.terms.ttl_s),
    )  # fmt: skip
    return Call(COMPLETE, name, _COMPLETING % words)


@lru_cache(maxsize=256)
def _packed_expiry(ttl_s: float | None) -> bytes:
    return _bulk(_expiry(ttl_s))


def changing(name: bytes, op: Releasing | Renewing | Noting) -> Call:
    held = _held(op.claim)
    match op:
        case Releasing():
            return call_of(RELEASE, name, *held, *_releasing(op))
        case Renewing():
            return call_of(RENEW, name, *held, *_leasing(op.claim, op.lease_s))
        case Noting():
            leasing = _leasing(op.claim, op.claim.terms.lease_s)
            return call_of(NOTE, name, *held, *leasing, text(op.name), op.data)


def _held(claim: Claim) -> tuple[bytes, ...]:
    return text(claim.attempt), b"%d" % claim.fence, text(claim.key.operation), claim.fingerprint


def _releasing(op: Releasing) -> tuple[bytes, ...]:
    expiry = _expiry(op.claim.terms.ttl_s)
    if op.error is None:
        return expiry, b"released"
    error = text(op.error)
    return expiry, b"failed: " + error, error


def _leasing(claim: Claim, lease_s: float) -> tuple[bytes, bytes]:
    return _span(lease_s), _leased_expiry(lease_s, claim.terms.ttl_s, claim.terms.hold)


def resolving(name: bytes, fence: int, outcome: Outcome | None, ttl_s: float | None) -> Call:
    ending = text(settlement(outcome))
    args: tuple[bytes, ...] = (b"%d" % fence, _expiry(ttl_s), ending)
    if outcome is not None:
        args += (_LETTERS[outcome.kind], outcome.data, _status(outcome))
    return call_of(RESOLVE, name, *args)


def forgetting(name: bytes, force: bool) -> Call:
    return call_of(FORGET, name, _flag(force))


def looking(name: bytes) -> Call:
    return call_of(LOOK, name)


# --- from replies to answers --------------------------------------------------------------------


# What reading a reply raises that is none of ours.
SENSELESS = (KeyError, IndexError, TypeError, ValueError)


def claimed(key: Key, attempt: str, fingerprint: bytes, terms: Terms, reply: Any) -> Answer:
    """What the reply to a claim says."""
    if type(reply) is int:
        return Won(Claim(key, attempt, fingerprint, terms, reply), NO_STEPS)
    match reply[0]:
        case bytes():
            return Done(_outcome(reply[:3]), int(reply[3]))
        case 1:
            return _won(Claim(key, attempt, fingerprint, terms, reply[1], reply[2]), reply[3:])
        case 3:
            return Busy(reply[1] / 1e6)
        case 4:
            return Mismatch(reply[1].decode())
        case 5:
            return Orphan(reply[1], moment(reply[2]))
        case unknown:
            raise ValueError(unknown)


def _won(claim: Claim, found: Sequence[Any]) -> Won:
    flat, *orphaned = found
    steps = {untext(name): data for name, data in zip(flat[::2], flat[1::2], strict=True)}
    orphan = Orphan(orphaned[0], moment(orphaned[1])) if orphaned else None
    return Won(claim, steps, orphan)


def verdict(reply: Any) -> Verdict:
    """What the reply to a change says."""
    if reply == 1:
        return KEPT
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
        "store another namespace; to start over, delete it (or `forget` it with force=True)"
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
