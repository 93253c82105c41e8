"""What went wrong, told so that somebody can do something about it.

A refusal is an answer: nothing was changed. Silence and a broken connection are none: the call may
have taken effect, and asking again is safe.
"""

from __future__ import annotations

import re
from typing import Any

import hiredis
import redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
)

from semel.errors import StoreUnavailableError
from semel.stores.redis.scripts import Call, corrupt

# What goes wrong on the way to a server; another one helps unless it is one of the second kind.
BROKEN = (redis.RedisError, RedisClusterException, hiredis.HiredisError, OSError)
STUCK = (AuthenticationError, redis.TimeoutError, TimeoutError)

# How a server of a cluster says that another one should be asked.
_MOVED = ("MOVED ", "ASK ", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "LOADING")


def is_forgotten(reply: Any) -> bool:
    """Does the server not know the script?"""
    return isinstance(reply, Exception) and str(reply).startswith("NOSCRIPT")


def was_demoted(reply: Any) -> bool:
    """Is this server no master any more? Connecting again asks the sentinels who is.

    Before 7.0, what a script was refused is told inside the script's own error.
    """
    return isinstance(reply, Exception) and "READONLY" in str(reply)


def has_moved(reply: Any) -> bool:
    """Should another server of the cluster be asked?"""
    return was_demoted(reply) or (isinstance(reply, Exception) and str(reply).startswith(_MOVED))


_HINTS = {
    "invalid username-password pair": "check the user and password in the URL",
    "HELLO must be called": "give the password in the URL: redis://user:password@host",
    "unauthenticated": "give the password in the URL: redis://user:password@host",
    "NOAUTH": "give the password in the URL: redis://user:password@host",
    "WRONGPASS": "check the user and password in the URL",
    "OOM": "Redis is out of memory: raise maxmemory; an evicting maxmemory-policy would forget "
    "what has been done",
    "LOADING": "Redis is loading its data after a restart: try again shortly",
    "MISCONF": "Redis cannot write to its disk: look at its log",
    "READONLY": "this server is a replica: connect to the master, or through redis+sentinel://",
    "CLUSTERDOWN": "the cluster does not serve all slots: look at CLUSTER INFO",
}


# redis-py turns these codes into classes and drops them from the message.
_CODES: dict[type[Exception], str] = {
    AuthenticationError: "NOAUTH ",
    BusyLoadingError: "LOADING ",
    ClusterDownError: "CLUSTERDOWN ",
    NoPermissionError: "NOPERM ",
    OutOfMemoryError: "OOM ",
    ReadOnlyError: "READONLY ",
}


# Redis does not say which.
_OF_A_STREAM = "it, or one of the two beside it, which end in :log and :state, is of another type"


def refused(call: Call, error: Exception) -> Exception:
    """Redis answered with an error: the record is unreadable, or the server is."""
    message = _CODES.get(type(error), "") + str(error)
    if "WRONGTYPE" in message:
        return corrupt(
            call.key, _OF_A_STREAM if call.key.endswith(b"}:meta") else "it is not a hash"
        )
    if message.startswith("CORRUPT "):
        return corrupt(call.key, message.removeprefix("CORRUPT "))
    hint = _hint(message, call)
    return StoreUnavailableError(f"Redis refused to {call.script.name}: {message}{hint}")


def refused_command(error: Exception) -> StoreUnavailableError:
    """Return the error to raise when Redis refused a command outside of a script."""
    message = _CODES.get(type(error), "") + str(error)
    return StoreUnavailableError(f"Redis refused: {message}{_hint(message)}")


def _hint(message: str, call: Call | None = None) -> str:
    if any(words in message for words in _FORBIDDEN):
        rule = _missing_rule(message, call)
        dot = "" if message.endswith(".") else "."
        return f"{dot} Add what this user's ACL lacks: ACL SETUSER <user> {rule}" if rule else ""
    return next((f". {hint}" for code, hint in _HINTS.items() if code in message), "")


# A refusal by ACL, in the words of each release. Inside a script, none of them has the code NOPERM.
_FORBIDDEN = ("NOPERM", "no permissions", "No permissions", "The user executing the script can't")
_NAMED = re.compile(r"run the '([^']+)' command")
_LINE = re.compile(r"@user_script: ?(\d+)")


def _missing_rule(message: str, call: Call | None) -> str:
    """Return the ACL rules that would permit what was refused.

    Redis 6.2 and 7.0 do not name a command that was refused inside a script. They name the
    script's line, which has the command.
    """
    if named := _NAMED.search(message):
        return f"+{named[1]}"
    if "channel" in message:
        return "&semel:*"
    if call is None:
        return "~semel:*" if "key" in message else ""
    if "key" in message:
        topic = "" if call.key.startswith(b"semel:") else f"~{call.key.decode()} "
        return f"{topic}~semel:*"
    line = _LINE.search(message)
    return " ".join(f"+{name}" for name in call.script.commands(int(line[1]) if line else None))


def unreachable(error: Exception) -> StoreUnavailableError:
    """No answer: the call may have taken effect, unless no connection was opened for it."""
    error = _forbidden(error) or error
    reason = _CODES.get(type(error), "") + (str(error) or type(error).__name__).rstrip(".")
    if hint := _hint(reason):
        return StoreUnavailableError(f"Redis cannot serve us: {reason}{hint}")
    doubt = "Whether Redis carried it out is unknown. "
    return StoreUnavailableError(
        f"Redis did not answer: {reason}. {'' if ' connecting to ' in reason else doubt}"
        "Check that the server runs and can be reached from here"
    )


def _forbidden(error: BaseException | None) -> Exception | None:
    """The refusal by ACL that redis-py reports as "Cluster mode is not enabled on this node"."""
    while error is not None and not isinstance(error, NoPermissionError):
        error = error.__cause__ or error.__context__
    return error
