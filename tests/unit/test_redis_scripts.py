"""Names, numbers and replies; the scripts themselves are asked on a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta

import hiredis
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from semel.colour import SYNC, run
from semel.errors import CorruptRecordError
from semel.keys import make_key
from semel.stores.redis import RedisStore, scripts
from semel.stores.redis.ledger import RedisLedger
from semel.stores.redis.scripts import Names
from semel.values import Claim, Kept, Key, Lost, Outcome, Terms, Won

TERMS = Terms(lease_s=30, ttl_s=600)
PAY = make_key("order-1", operation="pay")
NAME = Names("default").of(PAY.id)


@pytest.fixture
def admin(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def ledger(redis_url):
    store = RedisStore(redis_url)
    yield store.ledger(SYNC)
    store.close()


def ask(ledger, attempt, terms=TERMS):
    return run(ledger.claim(PAY, attempt=attempt, fingerprint=b"f", terms=terms))


# --- names -------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32))
def test_a_name_leads_back_to_its_id(id):
    names = Names("shop")
    assert names.id_of(names.of(id)) == id


def test_a_name_is_readable_and_lies_in_one_slot():
    name = Names("shop").of(b"\xff" * 32)
    assert name == b"semel:shop:{" + b"_" * 42 + b"8}:ledger"


@pytest.mark.parametrize(
    "name",
    [b"semel:shop:{???}:ledger", b"semel:shop:{A}:ledger", b"semel:shop:{}}}:ledger", b"other"],
)
def test_a_name_that_is_not_ours_has_no_id(name):
    assert Names("shop").id_of(name) is None


# --- numbers -----------------------------------------------------------------------------------


def test_a_fence_near_the_limit_of_a_double_is_exact(ledger, admin):
    fence = 2**53 - 10
    won = ask(ledger, "h/1")
    admin.hset(NAME, mapping={"e": fence, "s": "F"})
    won = ask(ledger, "h/2")
    assert won.claim.fence == fence + 1
    assert admin.hget(NAME, "e") == str(fence + 1).encode()
    assert run(ledger.complete(won.claim, Outcome("value", b"1"))) == Kept()


@pytest.mark.parametrize("how", ["released", "lapsed", "given up"])
def test_a_fence_that_lies_in_the_future_is_exceeded(ledger, admin, how):
    """The clock went back, or another master's was ahead: the next fence is larger all the same."""
    first = ask(ledger, "h/1").claim
    ahead = first.fence + 3_600_000_000
    admin.hset(NAME, "e", ahead)
    first = replace(first, fence=ahead)
    if how == "released":
        assert run(ledger.release(first)) == Kept()
    elif how == "given up":
        assert run(ledger.renew(first, lease_s=0)) == Kept()
    else:
        admin.hset(NAME, "l", 1)
    second = ask(ledger, "h/2").claim
    assert second.fence == ahead + 1
    assert admin.hget(NAME, "e") == str(ahead + 1).encode()
    assert run(ledger.complete(first, Outcome("value", b"1"))) == Lost()
    assert run(ledger.complete(second, Outcome("value", b"1"))) == Kept()


@pytest.mark.parametrize("ttl_s", [9e9, 1e15, 1e300])
def test_a_ttl_beyond_the_clock_is_for_ever(ledger, admin, ttl_s):
    won = ask(ledger, "h/1", Terms(lease_s=30, ttl_s=ttl_s))
    assert isinstance(won, Won)
    assert admin.pttl(NAME) == -1
    assert run(ledger.complete(won.claim, Outcome("value", b"1"))) == Kept()
    assert admin.pttl(NAME) == -1


def test_the_last_sixteen_tries_are_remembered(ledger, admin):
    for number in range(40):
        won = ask(ledger, f"h/{number}")
        assert won.claim.number == number + 1
        if number % 2:
            run(ledger.release(won.claim, error=f"e{number}"))
        else:
            admin.hset(NAME, "l", 1)
    record = run(ledger.look(PAY.id))
    assert [past.number for past in record.past] == list(range(25, 41))
    assert {past.ending for past in record.past if past.number % 2} == {"lease ran out"}
    assert record.past[-1].ending == "failed: e39"
    assert len(admin.hkeys(NAME)) < 40


@pytest.mark.parametrize("ended", ["lease ran out", 'failed: x,5,"lease ran out', "released"])
def test_a_repeated_claim_is_told_again_whom_it_took_over_from(ledger, admin, ended):
    first = ask(ledger, "h/1")
    if ended == "lease ran out":
        admin.hset(NAME, "l", 1)
    else:
        error = None if ended == "released" else ended.removeprefix("failed: ")
        run(ledger.release(first.claim, error=error))
    second = ask(ledger, "h/2")
    assert (second.orphan is not None) == (ended == "lease ran out")
    assert ask(ledger, "h/2") == second


@pytest.mark.parametrize("ttl_s", [0.0004, 0.0016, 7.5, 600])
def test_a_record_never_goes_before_its_time(ledger, ttl_s):
    """Redis counts in milliseconds, from the one in which the script began."""
    for number in range(20):
        key = make_key(f"k{number}")
        terms = Terms(lease_s=30, ttl_s=ttl_s)
        run(ledger.claim(key, attempt="h/1", terms=terms))
        record = run(ledger.look(key.id))
        spare = record.expires_at - record.lease_until - timedelta(seconds=ttl_s)
        assert timedelta(0) <= spare < timedelta(seconds=1)


def test_a_held_record_has_no_expiry_while_it_runs(ledger, admin):
    hold = Terms(lease_s=30, ttl_s=600, hold=True)
    won = ask(ledger, "h/1", hold)
    assert admin.pttl(NAME) == -1
    run(ledger.note(won.claim, "step", b"1"))
    run(ledger.renew(won.claim))
    assert admin.pttl(NAME) == -1
    run(ledger.complete(won.claim, Outcome("value", b"1")))
    assert 599_000 < admin.pttl(NAME) <= 600_001


def test_a_typical_record_is_small(ledger, admin):
    """Redis keeps a hash compact while every field is at most 64 bytes: hence the short names."""
    won = ask(ledger, f"host-1:4242/{os.urandom(8).hex()}")
    run(ledger.complete(won.claim, Outcome("value", b'{"paid":true}')))
    assert admin.object("encoding", NAME) in (b"listpack", b"ziplist")
    assert admin.memory_usage(NAME) < 400


# --- texts -------------------------------------------------------------------------------------

ODD = ["", "\0", "\ud800", 'quo"te\\', "ключ ✓", "a\nb", "{x}", "x" * 255]


@pytest.mark.parametrize("odd", ODD)
def test_odd_texts_come_back_as_they_were(ledger, admin, odd):
    key = Key(b"k" * 32, odd, odd, odd)
    won = run(ledger.claim(key, attempt=f"h/{odd}", fingerprint=b"", terms=TERMS))
    run(ledger.note(won.claim, odd, b"\x00\xff"))
    run(ledger.release(won.claim, error=odd))
    record = run(ledger.look(key.id))
    assert record.key == key
    assert record.attempt == record.past[0].attempt == f"h/{odd}"
    assert record.error == odd
    assert record.past[0].ending == f"failed: {odd}"
    assert record.steps == {odd: b"\x00\xff"}
    again = run(ledger.claim(key, attempt="h/2", fingerprint=b"", terms=TERMS))
    assert again.steps == {odd: b"\x00\xff"}


# --- replies -----------------------------------------------------------------------------------


class Says:
    """A line on which Redis says what the test wants."""

    def __init__(self, reply):
        self.reply = reply

    async def call(self, call):
        return self.reply


SENSELESS = [
    [9],
    [],
    None,
    b"",
    [None, b"data", None, b"5"],
    [b"z", b"data", None, b"5"],
    [b"v", None, None, b"5"],
    [b"v", b"", b"x", b"5"],
    [b"v", b"", None, b"x"],
    [b"v", b"", None],
]


@pytest.mark.parametrize("reply", SENSELESS, ids=repr)
def test_a_reply_that_makes_no_sense_names_the_record(reply):
    said = Says(reply)
    ledger = RedisLedger(lambda: said, Names("default"), "redis", spare=False)
    with pytest.raises(CorruptRecordError, match=NAME.decode()):
        ask(ledger, "h/1")


@pytest.mark.parametrize("reply", [2, None, [0, b"z", b"", None], [0, b"v"]], ids=repr)
def test_a_verdict_that_makes_no_sense_names_the_record(reply):
    said = Says(reply)
    ledger = RedisLedger(lambda: said, Names("default"), "redis", spare=False)
    with pytest.raises(CorruptRecordError, match=NAME.decode()):
        run(ledger.complete(Claim(PAY, "h/1", b"f", TERMS, 5), Outcome("value", b"1")))


# --- commands ----------------------------------------------------------------------------------


def spoken(packed):
    reader = hiredis.Reader()
    reader.feed(packed)
    words = reader.gets()
    assert not reader.has_data()
    return words


@pytest.mark.parametrize("tenant", ["", "shop"])
def test_a_claim_is_packed_as_any_packer_would(tenant):
    key = Key(PAY.id, "order \u2713", tenant, "pay")
    call = scripts.claiming(NAME, key, "h/1", b"\r\n%d", Terms(30, 600, hold=tenant == ""))
    expiry = b"" if tenant == "" else b"630001"
    hold = b"1" if tenant == "" else b"0"
    words = [NAME, b"h/1", b"pay", b"\r\n%d", b"30000000", expiry, b"1", hold]
    words += ["order \u2713".encode(), *([tenant.encode()] if tenant else [])]
    assert spoken(call.packed) == [b"EVALSHA", scripts.CLAIM.sha, b"1", *words]
    assert spoken(call.in_full()) == [b"EVAL", scripts.CLAIM.source, b"1", *words]
    assert call.words() == ("EVAL", scripts.CLAIM.source, b"1", *words)


@pytest.mark.parametrize("status", [None, 201])
def test_a_completion_is_packed_as_any_packer_would(status):
    claim = Claim(PAY, "h/1", b"", Terms(30, 0.0005), 77)
    call = scripts.completing(NAME, claim, Outcome("error", b"%b\0", status))
    code = b"" if status is None else b"201"
    words = [NAME, b"h/1", b"77", b"pay", b"", b"e", b"%b\0", code, b"2"]
    assert spoken(call.packed) == [b"EVALSHA", scripts.COMPLETE.sha, b"1", *words]
    assert spoken(call.in_full()) == [b"EVAL", scripts.COMPLETE.source, b"1", *words]


# --- drivers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("absence", "told"),
    [
        ("sys.modules['redis'] = None", "pip install 'semel[redis]'"),
        ("sys.modules['hiredis'] = None", "pip install 'semel[redis]'"),
        ("import redis; redis.VERSION = (5, 0, 8)", "pip install --upgrade 'semel[redis]'"),
    ],
)
def test_a_missing_driver_is_named(absence, told):
    code = (
        f"import sys; {absence}\n"
        "try:\n from semel.stores.redis import RedisStore; RedisStore('redis://h')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("SettingsError")
    assert told in said.stdout
