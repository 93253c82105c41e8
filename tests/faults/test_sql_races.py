"""Between one statement and the next somebody else changes the row: it is looked at again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.colour import ASYNC, SYNC, SyncColour, run
from semel.keys import make_key
from semel.stores.rules import Claiming
from semel.stores.sql import SQLStore, init, inspection, postgres
from semel.stores.sql.generic import AGAIN
from semel.stores.sql.ledger import perform
from semel.stores.sql.lines import SyncLines, open_engine, parse
from semel.values import Busy, Kept, Lost, Outcome, State, Terms, Won

TERMS = Terms(lease_s=30, ttl_s=600)
BRIEF = Terms(lease_s=0.0, ttl_s=600)
KEY = make_key("order-1", operation="pay")
VALUE = Outcome("value", b'"paid"')
MINE = "me/1"


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    return url


@pytest.fixture
def store(url):
    store = SQLStore(url)
    yield store
    store.close()


@pytest.fixture
def ledger(store):
    return store.ledger(SYNC)


@pytest.fixture
def engine(url):
    """Somebody else's, who may do anything to the table."""
    engine = open_engine(parse(url))
    yield engine
    engine.dispose()


@pytest.fixture
def change(engine):
    """Change the one row there is."""

    def change(sets):
        with engine.connect() as connection:
            connection.exec_driver_sql(f"UPDATE idempotency SET {sets}")

    return change


@pytest.fixture
def lines(url):
    lines = SyncLines(open_engine(parse(url)), own=True)
    yield lines
    lines.close()


def ask(ledger, *, key=KEY, attempt="you/1", terms=TERMS):
    return run(ledger.claim(key, attempt=attempt, fingerprint=b"f", terms=terms))


class Between:
    """A link behind whose back something is done, once, before a statement with this word."""

    def __init__(self, link, word, meddle):
        self._link, self._word, self._meddle = link, word, meddle

    def __getattr__(self, name):
        verb = getattr(self._link, name)
        if name not in {"ask", "fetch", "change"}:
            return verb

        async def told(statement, params=()):
            if self._meddle is not None and self._word in statement:
                meddle, self._meddle = self._meddle, None
                meddle()
            return await verb(statement, params)

        return told


def claim_between(lines, word, meddle, terms=TERMS):
    op = Claiming(KEY, MINE, b"f", terms)
    return run(lines.use(lambda link: perform(Between(link, word, meddle), [op])))[0]


# --- PostgreSQL: seen as free, and judged again under the lock ----------------------------------

TAKES = "FOR UPDATE"
LATER = "clock_timestamp() + interval '1 hour'"
EARLIER = "clock_timestamp() - interval '1 hour'"
LAPSED = f"state = 'PENDING', lease_until = {EARLIER}"

postgres_only = pytest.mark.parametrize("url", ["postgres"], indirect=True)


@postgres_only
@pytest.mark.parametrize(
    ("meanwhile", "terms"),
    [
        ("operation = 'other'", TERMS),
        ("request_hash = 'aa'", TERMS),
        (f"attempt = '{MINE}'", TERMS),
        (f"attempt = '{MINE}', state = 'UNKNOWN', lease_until = {EARLIER}", TERMS),
        (f"state = 'PENDING', lease_until = {LATER}", TERMS),
        (f"state = 'UNKNOWN', lease_until = {LATER}", TERMS),
        (f"{LAPSED}, hold = true", TERMS),
        (LAPSED, Terms(takeover=False)),
        ("state = 'COMPLETED'", TERMS),
        ("state = 'ODD'", TERMS),
    ],
)
def test_a_row_that_is_no_longer_free_is_not_taken(ledger, lines, change, meanwhile, terms):
    run(ledger.release(ask(ledger).claim))
    answer = claim_between(lines, TAKES, lambda: change(meanwhile), terms)
    assert answer is AGAIN


@postgres_only
@pytest.mark.parametrize(
    ("meanwhile", "terms", "number", "attempts"),
    [
        (LAPSED, TERMS, 2, ["you/1", "you/1"]),
        (f"{LAPSED}, hold = true", Terms(hold=True), 2, ["you/1", "you/1"]),
        (f"attempt = '{MINE}', state = 'PENDING'", TERMS, 1, ["you/1"]),
        (f"operation = 'other', expires_at = {EARLIER}", TERMS, 1, []),
    ],
)
def test_what_is_taken_is_taken_as_it_is_by_then(
    ledger, lines, change, meanwhile, terms, number, attempts
):
    run(ledger.release(ask(ledger).claim))
    won = claim_between(lines, TAKES, lambda: change(meanwhile), terms)
    record = run(ledger.look(KEY.id))
    assert (won.claim.number, record.number, record.held) == (number, number, terms.hold)
    assert [past.attempt for past in record.past] == attempts
    assert record.attempt == MINE


@postgres_only
def test_a_row_that_is_locked_meanwhile_is_not_waited_for(ledger, lines, engine):
    run(ledger.release(ask(ledger).claim))
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:

        def lock():
            other.exec_driver_sql("SELECT 1 FROM idempotency FOR UPDATE")

        async def impatient(link):
            await link.change("SET lock_timeout = '1s'")
            op = Claiming(KEY, MINE, b"f", TERMS)
            return await postgres.perform(Between(link, TAKES, lock), [op])

        assert run(lines.use(impatient)) == [AGAIN]


# --- read, decide, write if unchanged -----------------------------------------------------------


@pytest.mark.parametrize("url", ["mariadb", "sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("meanwhile", "answer"),
    [
        ("lease_until = '2999-01-01 00:00:00.000000'", Busy),
        ("attempt = 'them/1', lease_until = '2999-01-01 00:00:00.000000'", Busy),
        ("fence = fence + 5", Won),
        ("state = 'FAILED'", Won),
    ],
)
def test_a_row_that_is_not_as_it_was_read_is_read_again(ledger, lines, change, meanwhile, answer):
    ask(ledger, terms=BRIEF)
    before = run(ledger.look(KEY.id))
    found = claim_between(lines, "UPDATE idempotency", lambda: change(meanwhile))
    assert isinstance(found, answer)
    if meanwhile.startswith("fence"):
        assert found.orphan.fence == before.fence + 5
    if meanwhile.startswith("state"):
        assert found.orphan is None


@pytest.mark.parametrize("url", ["mariadb", "sqlite"], indirect=True)
def test_a_row_that_is_renewed_under_a_sweep_is_left(ledger, lines, change):
    ask(ledger, terms=Terms(lease_s=0.0, ttl_s=0.0))
    revive = "expires_at = '2999-01-01 00:00:00.000000'"

    def sweep(link):
        return inspection.sweep(Between(link, link.dialect.begin, lambda: change(revive)), 10)

    assert run(lines.use(sweep)) == (1, 0)
    assert run(ledger.look(KEY.id)) is not None


# --- fences and terms ---------------------------------------------------------------------------


@pytest.mark.parametrize("ended", ["released", "lapsed", "expired"])
def test_a_fence_from_the_future_is_exceeded(ledger, change, ended):
    """A clock that was put back must not make a new holder's fence smaller than an old one's."""
    terms = {"released": TERMS, "lapsed": BRIEF, "expired": Terms(lease_s=0.0, ttl_s=0.0)}[ended]
    won = ask(ledger, terms=terms)
    if ended == "released":
        run(ledger.release(won.claim))
    future = won.claim.fence + 10**12
    change(f"fence = {future}")
    assert ask(ledger, attempt=MINE).claim.fence == future + 1
    assert run(ledger.look(KEY.id)).fence == future + 1


def test_who_takes_over_brings_terms_of_their_own(ledger):
    ask(ledger, terms=BRIEF)
    won = ask(ledger, attempt=MINE, terms=Terms(lease_s=0.0, ttl_s=0.0, hold=True))
    record = run(ledger.look(KEY.id))
    assert (won.claim.number, record.held, record.expires_at) == (2, True, None)
    assert record.state is State.UNKNOWN  # and held: nobody without `hold` gets it
    assert not isinstance(ask(ledger, attempt="them/1"), Won)


async def test_of_many_at_once_only_current_claims_change_anything(store):
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}", operation="pay") for i in range(4)]
    asked = (ledger.claim(key, attempt=MINE, fingerprint=b"f", terms=TERMS) for key in keys)
    claims = [won.claim for won in await asyncio.gather(*asked)]
    stale = replace(claims[0], fence=claims[0].fence - 1)
    foreign = replace(claims[1], attempt="them/1")
    mixed = [stale, foreign, *claims[2:]]
    wanted = [Lost(), Lost(), Kept(), Kept()]
    assert await asyncio.gather(*(ledger.renew(claim) for claim in mixed)) == wanted
    assert await asyncio.gather(*(ledger.complete(claim, VALUE) for claim in mixed)) == wanted
    states = [(await ledger.look(key.id)).state for key in keys]
    assert states == [State.PENDING] * 2 + [State.COMPLETED] * 2
    await store.aclose()


async def test_of_many_at_once_what_was_given_up_is_not_renewed(store):
    ledger = store.ledger(ASYNC)
    keys = [make_key(f"k{i}", operation="pay") for i in range(4)]
    asked = (ledger.claim(key, attempt=MINE, fingerprint=b"f", terms=TERMS) for key in keys)
    claims = [won.claim for won in await asyncio.gather(*asked)]
    assert await ledger.renew(claims[0], lease_s=0) == Kept()
    renewed = await asyncio.gather(*(ledger.renew(claim) for claim in claims))
    assert renewed == [Lost(), Kept(), Kept(), Kept()]
    given_up = await asyncio.gather(*(ledger.renew(claim, lease_s=0) for claim in claims))
    assert given_up == [Kept()] * 4
    await store.aclose()


# --- asked again --------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["postgres", "mariadb"], indirect=True)
def test_a_row_that_is_free_again_a_moment_later_is_had(ledger, engine):
    ask(ledger, terms=BRIEF)
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as other:
        other.exec_driver_sql("SELECT 1 FROM idempotency FOR UPDATE")

        class Unlocking(SyncColour):
            async def sleep(self, seconds):
                other.rollback()

        ledger.colour = Unlocking()
        assert isinstance(ask(ledger, attempt=MINE), Won)
