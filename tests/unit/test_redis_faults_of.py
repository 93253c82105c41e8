"""What is told of a refusal, and of no answer."""

from __future__ import annotations

import pytest
import redis

from semel.brokers.redis.scripts import JOIN
from semel.errors import CorruptRecordError, StoreUnavailableError
from semel.stores.redis.faults import has_moved, refused, unreachable, was_demoted
from semel.stores.redis.scripts import CLAIM, call_of

CALL = call_of(CLAIM, b"semel:default:{id}:ledger")


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        ("WRONGTYPE Operation against a key", CorruptRecordError, "not a hash"),
        ("CORRUPT it is odd", CorruptRecordError, "it is odd"),
        ("OOM command not allowed", StoreUnavailableError, "raise maxmemory"),
        ("ERR something new", StoreUnavailableError, "something new"),
    ],
)
def test_a_refusal_says_what_to_do(error, kind, told):
    refusal = refused(CALL, Exception(error))
    assert type(refusal) is kind
    assert told in str(refusal)


UNNAMED = "The user executing the script can't run this command or subcommand"
LINE_OF_TIME = CLAIM.source[: CLAIM.source.index(b"call('TIME')")].count(b"\n") + 1


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        ("NOPERM this user has no permissions to run the 'evalsha' command", "+evalsha"),
        ("NOPERM User u has no permissions to run the 'eval' command", "+eval"),
        ("NOPERM this user has no permissions to access one of the keys", "~semel:*"),
        ("NOPERM No permissions to access a channel", "&semel:*"),
        ("ERR ACL failure in script: No permissions to access a key script: x", "~semel:*"),
        ("ERR ACL failure in script: User u has no permissions to run the 'time' command", "+time"),
        (f"ERR {UNNAMED} script: 1ab, on @user_script:{LINE_OF_TIME}.", "+time"),
        (f"ERR Error running script: @user_script: {LINE_OF_TIME}: {UNNAMED}", "+time"),
    ],
)
def test_refusal_by_acl_names_the_missing_rule(message, rule):
    """As Redis 6.2, 7.0, 8.2 and Valkey word it, outside of a script and inside."""
    assert str(refused(CALL, Exception(message))).endswith(f" ACL SETUSER <user> {rule}")


def test_refusal_without_a_line_names_what_the_script_catches():
    refusal = refused(call_of(JOIN, b"orders"), Exception(f"ERR {UNNAMED}"))
    assert str(refusal).endswith("<user> +xgroup|create")


INSIDE_A_SCRIPT = (
    "ERR Error running script (call to f_1): @user_script:1: @user_script: 1: "
    "-READONLY You can't write against a read only replica."
)


@pytest.mark.parametrize(
    ("reply", "demoted", "moved"),
    [
        (1, False, False),
        ([b"READONLY"], False, False),
        (Exception("OOM"), False, False),
        (Exception("MOVED 5 h:1"), False, True),
        (Exception("ASK 5 h:1"), False, True),
        (Exception("LOADING"), False, True),
        (Exception("READONLY You can't"), True, True),
        (Exception(INSIDE_A_SCRIPT), True, True),
    ],
)
def test_who_should_be_asked_instead(reply, demoted, moved):
    assert was_demoted(reply) == demoted
    assert has_moved(reply) == moved


def test_a_server_that_was_never_reached_leaves_no_doubt():
    refused_us = redis.ConnectionError("Error 111 connecting to h:1. Connection refused.")
    assert ".." not in str(unreachable(refused_us))
    assert "unknown" not in str(unreachable(refused_us))
    assert "unknown" in str(unreachable(redis.TimeoutError("Timeout reading from h:1")))


def test_a_wrong_password_is_not_called_a_missing_one():
    wrong = redis.AuthenticationError("invalid username-password pair or user is disabled.")
    assert "check the user and password in the URL" in str(unreachable(wrong))
