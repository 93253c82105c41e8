"""SIGKILL in the gaps that are easily forgotten: while failing, renewing, asking and replaying,
between reading a row and writing it, and around the commit of a bound session."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

import semel
from semel.colour import SYNC, run
from semel.keys import make_key
from semel.stores.sql import init
from semel.stores.sql.lines import parse, with_driver
from semel.values import State
from support.holder import Receiver
from support.process import wait_until
from support.proxy import Proxy
from support.zygote import spawn

LONG_S = 300  # a lease that no test here outlives

# The flow is one for both colours, so each engine has one of them.
COLOURS = {"sqlite": "sync", "redis": "async", "postgres": "sync", "mariadb": "async"}


@pytest.fixture(params=COLOURS)
def engine(request):
    return request.param


@pytest.fixture
def colour(engine):
    return COLOURS[engine]


@pytest.fixture
def url(request, tmp_path, engine):
    if engine == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url = request.getfixturevalue(f"{engine}_url")
    if engine != "redis":
        init(url)
    return url


@pytest.fixture
def receiver(tmp_path):
    """Applies whatever it is told, as often as it is told."""
    return Receiver(tmp_path, dedupes=False)


@pytest.fixture
def start(tmp_path):
    """Starts processes, and ends them with the test."""
    started = []

    def start(url, *flags, module="holder", **options):
        words = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        named = ["order-1", "--receiver", "plain"] if module == "holder" else []
        arguments = [url, *named, *words, *flags]
        process = spawn(f"support.{module}", arguments, {"HOLDER_FOLDER": str(tmp_path)})
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def killed(process):
    """It came to its point, and no further."""
    assert process.stdout.readline() == "trap\n"
    assert process.wait(timeout=30) == -signal.SIGKILL


def answer(process):
    out, _ = process.communicate(timeout=60)
    return out.strip().splitlines()[-1]


def record(url):
    store = semel.connect(url)
    try:
        return run(store.ledger(SYNC).look(make_key("order-1").id))
    finally:
        store.close()


# --- a failure ----------------------------------------------------------------------------------


def test_killed_before_a_failure_is_released_the_lease_decides(url, start, receiver, colour):
    killed(start(url, at="before-release", then="fail", colour=colour))
    left = record(url)
    assert (left.state, left.number, left.error) == (State.PENDING, 1, None)

    assert answer(start(url, colour=colour)).startswith("result by-")
    assert record(url).number == 2
    assert len(receiver.effects()) == 1, "the step of the first attempt was noted"


def test_killed_before_a_failure_is_released_under_hold_is_unknown(url, start, colour):
    killed(start(url, at="before-release", then="fail", crash="hold", colour=colour))

    assert answer(start(url, crash="hold", colour=colour)) == "error OutcomeUnknownError"
    assert record(url).state is State.UNKNOWN


def test_killed_after_a_failure_is_released_the_next_call_runs_at_once(url, start, colour):
    killed(start(url, at="after-release", then="fail", lease=LONG_S, colour=colour))
    left = record(url)
    assert (left.state, left.error) == (State.FAILED, "LookupError: declined")

    assert answer(start(url, lease=LONG_S, colour=colour)).startswith("result by-")
    assert record(url).number == 2


def test_killed_before_a_failure_is_locked_the_next_call_runs(url, start, colour):
    lock = {"failure": "lock", "colour": colour}
    killed(start(url, at="before-complete", then="fail", **lock))
    assert record(url).state is State.PENDING

    assert answer(start(url, **lock)).startswith("result by-")
    assert record(url).number == 2


def test_killed_after_a_failure_is_locked_the_next_call_gets_it(url, start, colour):
    lock = {"failure": "lock", "colour": colour}
    killed(start(url, at="after-complete", then="fail", **lock))

    assert answer(start(url, **lock)) == "error LookupError"
    assert record(url).number == 1


# --- a renewal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before-renew", "after-renew"])
def test_killed_while_renewing_is_killed_in_the_body(url, start, receiver, point, colour):
    killed(start(url, at=point, then="stay", colour=colour))
    assert record(url).number == 1

    assert answer(start(url, colour=colour)).startswith("result by-")
    assert record(url).number == 2
    assert len(receiver.effects()) == 1, "the step of the first attempt was noted"


@pytest.mark.parametrize("point", ["before-renew", "after-renew"])
def test_killed_while_renewing_under_hold_is_unknown(url, start, receiver, point):
    killed(start(url, at=point, then="stay", crash="hold"))

    assert answer(start(url, crash="hold")) == "error OutcomeUnknownError"
    assert len(receiver.effects()) == 1


# --- asking the world ---------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["before-effect", "after-effect"])
def test_killed_while_recover_asks_the_next_call_asks_again(url, start, receiver, point, colour):
    options = {"crash": "ask", "colour": colour}
    killed(start(url, at=point, **options))
    killed(start(url, at="in-recover", **options))
    left = record(url)
    assert (left.number, left.held, left.outcome) == (2, True, None)
    happened = list(receiver.effects())

    assert answer(start(url, **options)) == f"result {receiver.effects()[0].split()[1]}"
    assert len(receiver.effects()) == 1
    assert len(happened) == (1 if point == "after-effect" else 0)
    assert record(url).number == 3


# --- a replay -----------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["after-claim", "in-replay"])
def test_killed_while_replaying_changes_nothing(url, start, receiver, point, colour):
    first = answer(start(url, colour=colour))
    before = record(url)
    killed(start(url, at=point, colour=colour))

    assert unseen(record(url)) == unseen(before)
    assert answer(start(url, colour=colour)) == first
    assert len(receiver.effects()) == 1


def unseen(record):
    """The record, whenever it was looked at."""
    return replace(record, seen_at=datetime(2000, 1, 1, tzinfo=UTC))


# --- between reading a row and writing it ---------------------------------------------------------


both_colours = pytest.mark.parametrize("colour", ["sync", "async"])


@pytest.fixture
def reading_url(mariadb_url):
    """Where a claim is two statements."""
    init(mariadb_url)
    return mariadb_url


@both_colours
def test_killed_between_reading_and_writing_a_claim_leaves_nothing(
    reading_url, start, receiver, colour
):
    killed(start(reading_url, at="before-write", lease=LONG_S, colour=colour))
    assert record(reading_url) is None

    assert answer(start(reading_url, lease=LONG_S, colour=colour)).startswith("result by-")
    assert record(reading_url).number == 1
    assert len(receiver.effects()) == 1


@both_colours
def test_killed_between_reading_and_writing_a_takeover_leaves_the_old_row(
    reading_url, start, receiver, colour
):
    killed(start(reading_url, at="before-effect", colour=colour))
    before = record(reading_url)
    killed(start(reading_url, at="before-write", colour=colour))
    assert unseen(record(reading_url)) == unseen(before)

    assert answer(start(reading_url, colour=colour)).startswith("result by-")
    assert record(reading_url).number == 2
    assert len(receiver.effects()) == 1


@both_colours
def test_a_row_that_changes_between_reading_and_writing_is_read_again(
    reading_url, start, receiver, colour
):
    killed(start(reading_url, at="before-effect", colour=colour))
    slow = start(reading_url, at="before-write", do="stop", colour=colour)
    assert slow.stdout.readline() == "trap\n"
    winner = answer(start(reading_url, colour=colour))
    slow.send_signal(signal.SIGCONT)

    assert answer(slow) == winner
    assert record(reading_url).number == 2
    assert len(receiver.effects()) == 1


# --- a bound session ----------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def sql_url(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite+pysqlite:///{tmp_path}/ledger.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    return url


def table_at(url):
    """Makes the table that the effect goes to; the answer counts its rows."""
    engine = sa.create_engine(with_driver(parse(url), "sync"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE charge (amount INTEGER)")

    def charges():
        with engine.connect() as connection:
            return connection.exec_driver_sql("SELECT count(*) FROM charge").scalar_one()

    return charges


@pytest.fixture
def charges(sql_url):
    return table_at(sql_url)


def bound(start, url, *flags, **options):
    return start(url, *flags, module="bound_holder", **options)


@pytest.mark.parametrize(
    "point", ["after-claim", "after-rows", "before-complete", "after-complete", "before-commit"]
)
def test_bound_killed_before_the_commit_leaves_a_lease_and_no_rows(sql_url, charges, start, point):
    killed(bound(start, sql_url, at=point))
    left = record(sql_url)
    assert (left.state, left.outcome, charges()) == (State.PENDING, None, 0)

    wait_until(lambda: runs_again(start, sql_url), "the lease to end")
    assert charges() == 1
    assert (record(sql_url).state, record(sql_url).number) == (State.COMPLETED, 2)


def runs_again(start, url):
    said = answer(bound(start, url))
    assert said in ("result charged", "error InProgressError")
    return said == "result charged"


def test_bound_killed_after_the_commit_has_happened(sql_url, charges, start):
    killed(bound(start, sql_url, at="after-commit"))

    assert (record(sql_url).state, charges()) == (State.COMPLETED, 1)
    assert answer(bound(start, sql_url)) == "error DuplicateExecutionError"
    assert charges() == 1


@pytest.mark.parametrize("point", ["before-rollback", "after-rollback", "after-release"])
def test_bound_killed_while_a_failed_block_is_undone(sql_url, charges, start, point):
    killed(bound(start, sql_url, at=point, then="fail"))
    state = State.FAILED if point == "after-release" else State.PENDING
    assert (record(sql_url).state, charges()) == (state, 0)

    wait_until(lambda: runs_again(start, sql_url), "the lease to end")
    assert (charges(), record(sql_url).number) == (1, 2)


@pytest.fixture(params=["postgres", "mariadb"])
def proxied(request):
    """A URL, and the same through a network that can fail."""
    url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    direct = make_url(url)
    with Proxy(direct.port) as proxy:
        yield url, proxy, direct.set(port=proxy.port).render_as_string(hide_password=False)


@pytest.mark.parametrize("arrives", [False, True], ids=["lost", "arrives"])
def test_bound_killed_during_the_commit_has_both_or_neither(proxied, start, arrives):
    url, proxy, through = proxied
    charges = table_at(url)
    holder = bound(start, through, "--wait")
    assert holder.stdout.readline() == "ready\n"
    # From here on nobody hears whether it was committed.
    proxy.drop_replies() if arrives else proxy.freeze()
    holder.stdin.close()
    if arrives:
        wait_until(lambda: charges() == 1, "the commit to arrive")
    holder.kill()
    assert holder.wait() == -signal.SIGKILL
    proxy.cut()

    if arrives:
        assert record(url).state is State.COMPLETED
        assert answer(bound(start, url)) == "error DuplicateExecutionError"
    else:
        assert (record(url).state, charges()) == (State.PENDING, 0)
        wait_until(lambda: runs_again(start, url), "the lease to end")
    assert charges() == 1


@pytest.mark.parametrize("cut", ["cut_before_request", "cut_after_request"])
def test_bound_an_error_from_the_commit_is_settled_by_calling_again(proxied, start, cut):
    url, proxy, through = proxied
    charges = table_at(url)
    holder = bound(start, through, "--wait")
    assert holder.stdout.readline() == "ready\n"
    getattr(proxy, cut)(b"COMMIT")
    assert answer(holder) == "error OperationalError"
    assert proxy.cuts == 1

    if cut == "cut_after_request":
        assert answer(bound(start, url)) == "error DuplicateExecutionError"
    else:
        wait_until(lambda: runs_again(start, url), "the lease to end")
    assert charges() == 1
    assert record(url).state is State.COMPLETED
