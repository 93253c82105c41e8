"""What a request comes to, on one standing of its room. Pure.

Whatever the rules raise goes through: whoever asks sees to it.
"""

from __future__ import annotations

import math

from semel.rooms.news import finished, written
from semel.rooms.requests import Reply, Request, kept
from semel.rooms.room import Accepted, Context, Refused
from semel.rooms.standing import Standing, plain, said
from semel.stores.log_rules import following, mark_of, seal_of
from semel.values import value

__all__ = ["Decided", "decide"]


@value
class Decided:
    """What a request comes to, on one standing, and its reply as it is kept.

    Where nothing changes, `after` and `entry` are None.
    """

    reply: Reply
    kept: bytes
    after: Standing | None = None
    entry: bytes | None = None
    ends_s: float = math.inf
    """When the turn that begins by it is over."""


def decide(tip: Standing, request: Request, ctx: Context, most_bytes: int) -> Decided:
    """`most_bytes`: of a state, an entry and a reply, each."""
    expected = request.expected_version
    if expected is not None and expected != tip.version:
        return _refused(tip, "STATE_STALE_VERSION", f"the version is {tip.version}")
    if request.timeout is None:
        decision = tip.room.apply(tip.state(), request.action, ctx)
    else:
        decision = tip.room.timeout(tip.state(), request.timeout, ctx)
    match decision:
        case Refused(code, message):
            return _refused(tip, code, message)
        case Accepted():
            return _accepted(tip, request, decision, most_bytes)
        case _:
            raise TypeError(
                f"apply gave a {type(decision).__name__}; it is to give Accepted or Refused"
            )


def _accepted(tip: Standing, request: Request, decision: Accepted, most: int) -> Decided:
    text = said(decision.state)
    # Sealed: another server may have carried out the same request, with other cards.
    mark = mark_of(request.id, request.fingerprint) + seal_of(text.encode())
    position = following(tip.position, mark)
    after = Standing(tip.room, position, text)
    after.check(decision.state)
    deadline = after.deadline  # rules that cannot tell fail here
    after.finished = finished(tip, after)
    entry = written(request.room_id, tip, after, decision.events).encode()
    reply = Reply(position.offset, plain(decision.reply, "reply"))  # as it is when it comes again
    answer = kept(reply)  # what cannot be kept fails here, before anything is sent
    if (size := max(len(text.encode()), len(entry), len(answer))) > most:
        return _refused(
            tip, "TOO_LARGE", f"the room would have {size:,} bytes, and may have {most:,}"
        )
    return Decided(reply, answer, after, entry, math.inf if deadline is None else deadline.at_s)


def _refused(tip: Standing, code: str, message: str) -> Decided:
    reply = Reply(tip.version, None, str(code) or "INVALID", str(message))
    return Decided(reply, kept(reply))
