"""Killed, frozen or cut off between any two steps: every message has its effect once, in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url

from semel.errors import SettingsError, StoreUnavailableError
from semel.inbox import PoisonError, SQLInbox
from semel.parked import Parked
from semel.testing.inboxes import ALL, endings, message, messages
from support.inbox_bench import INSERT, close, database, file_database
from support.nursery import Nursery
from support.process import wait_until
from support.proxy import Proxy

TESTS = Path(__file__).parents[1]

# The flow is one for both colours, so each database has one of them.
COLOURS = {"postgres": "sync", "mariadb": "async", "sqlite": "sync"}

STEPS = ["before-handler", "in-handler", "before-marks", "before-commit", "after-commit"]

BATCH = [("7", 1), ("7", 2), ("8", 1), ("7", 3)]


@pytest.fixture(scope="module", params=COLOURS)
def bench(request):
    if request.param == "sqlite":
        folder = request.getfixturevalue("tmp_path_factory").mktemp("inbox")
        made = file_database(folder)
    else:
        made = database(request.getfixturevalue(f"{request.param}_server"))
    with made as bench:
        bench.colour = COLOURS[request.param]
        yield bench


@pytest.fixture
def consumer():
    return f"stock-{uuid.uuid4().hex[:12]}"


class Others(Nursery):
    """Other processes at the same inbox."""

    def go(self, bench, consumer, verb, **asked):
        asked |= {"url": bench.url, "consumer": consumer, "verb": verb, "colour": bench.colour}
        return self.start(**asked)

    def gone(self, pid):
        wait_until(lambda: not is_there(pid), f"the end of {pid}")


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def server():
    others = Others("support.inbox_process")
    yield others
    others.close()


@pytest.fixture
def others(server):
    yield server
    server.end_all()


@pytest.fixture
async def inbox(bench):
    inbox = bench.open("sync")
    yield inbox
    await close(inbox)


def handle(consumer, fails=()):
    def write(each, session):
        session.execute(INSERT, {"said": f"{consumer} {each.aggregate_id}:{each.seq or each.id}"})
        if each.id in fails:
            raise PoisonError("bad")

    return write


def stands(bench, consumer):
    found = [said.split(" ") for said in bench.effects()]
    return [said for whose, said in found if whose == consumer]


def all_messages(batch):
    return [message(seq, aggregate) for aggregate, seq in batch]


# --- killed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["apply", "singly"])
@pytest.mark.parametrize("step", STEPS)
async def test_killed_at_any_step_a_batch_has_its_effects_once(
    bench, inbox, others, consumer, verb, step
):
    pid = others.go(bench, consumer, verb, messages=BATCH, at=step)
    others.heard("trap", pid=pid)
    others.gone(pid)
    left = stands(bench, consumer)
    if verb == "apply":
        assert left == (["7:1", "7:2", "8:1", "7:3"] if step == "after-commit" else [])
    singly = await inbox.apply(consumer, all_messages(BATCH), handle(consumer), singly=True)
    expected = ["seen"] * len(left) + ["applied"] * (4 - len(left))
    assert endings(singly) == expected
    assert stands(bench, consumer) == ["7:1", "7:2", "8:1", "7:3"]
    assert bench.rows(f"SELECT 1 FROM inbox_started WHERE consumer = '{consumer}'") == []


@pytest.mark.parametrize("step", ["before-handler", "in-handler", "before-commit", "after-commit"])
async def test_killed_at_any_step_what_waits_has_its_effects_once(
    bench, inbox, others, consumer, step
):
    await inbox.apply(consumer, messages(1, 2), handle(consumer, {"orders-7-1"}))
    [waiting] = await Parked(inbox).list(consumer=consumer)
    await Parked(inbox).replay(waiting.sequence)
    pid = others.go(bench, consumer, "retry", at=step)
    others.heard("trap", pid=pid)
    others.gone(pid)
    assert stands(bench, consumer) == (["7:1", "7:2"] if step == "after-commit" else [])
    ran = endings(await inbox.retry(consumer, ALL, handle(consumer)))
    assert ran == ([] if step == "after-commit" else ["1 applied", "2 applied"])
    assert stands(bench, consumer) == ["7:1", "7:2"]
    assert list(await Parked(inbox).list(consumer=consumer)) == []


@pytest.mark.parametrize("step", ["before-commit", "after-commit"])
async def test_killed_while_people_settle_it_is_settled_and_audited_or_neither(
    bench, inbox, others, consumer, step
):
    await inbox.apply(consumer, messages(1, 2), handle(consumer, {"orders-7-1"}))
    [waiting] = await Parked(inbox).list(consumer=consumer)
    pid = others.go(bench, consumer, "skip", sequence=waiting.sequence.hex(), at=step)
    others.heard("trap", pid=pid)
    others.gone(pid)
    audits = await Parked(inbox).audit(sequence=waiting.sequence)
    assert len(audits) == (1 if step == "after-commit" else 0)
    ran = endings(await inbox.retry(consumer, ALL, handle(consumer)))
    assert ran == (["2 applied"] if step == "after-commit" else [])


async def test_a_message_that_kills_is_parked_after_three_and_the_rest_goes_on(
    bench, inbox, others, consumer
):
    for verb in ("apply", "singly", "singly", "singly"):
        pid = others.go(bench, consumer, verb, messages=[("7", 1)], at="in-handler")
        others.heard("trap", pid=pid)
        others.gone(pid)
    done = await inbox.apply(consumer, all_messages(BATCH), handle(consumer), singly=True)
    assert endings(done) == ["crash", "behind", "applied", "behind"]
    assert stands(bench, consumer) == ["8:1"]


# --- frozen -------------------------------------------------------------------------------------


async def frozen(others, bench, consumer, step, **asked):
    pid = others.go(bench, consumer, "apply", messages=BATCH, at=step, action="stop", **asked)
    await asyncio.to_thread(others.heard, "trap", pid=pid)
    return pid


@pytest.mark.parametrize("step", ["before-handler", "in-handler", "before-marks", "before-commit"])
async def test_one_that_was_frozen_and_wakes_up_late_changes_nothing(
    bench, inbox, others, consumer, step
):
    """Its transaction may hold locks: the server ends it. SQLite has none: there, it must die."""
    pid = await frozen(others, bench, consumer, step, idle_s=1.0)
    if bench.name == "sqlite":
        os.kill(pid, signal.SIGKILL)
        others.gone(pid)
    done = None
    deadline = time.monotonic() + 20
    while done is None and time.monotonic() < deadline:
        with contextlib.suppress(StoreUnavailableError):
            done = await inbox.apply(consumer, all_messages(BATCH), handle(consumer), singly=True)
    assert endings(done) == ["applied"] * 4
    if bench.name != "sqlite":
        os.kill(pid, signal.SIGCONT)
        told = await asyncio.to_thread(others.heard, "done", "error", pid=pid)
        assert told.get("done", ["seen"] * 4) == ["seen"] * 4
    assert sorted(stands(bench, consumer)) == ["7:1", "7:2", "7:3", "8:1"]


# --- many at once, killed and frozen ------------------------------------------------------------


@pytest.mark.slow
async def test_many_at_once_killed_again_and_again(bench, inbox, others, consumer):
    wanted = [(str(n), seq) for seq in range(1, 41) for n in range(5)]
    for turn in range(6):
        party = [others.go(bench, consumer, "much", messages=wanted) for _ in range(2)]
        await asyncio.sleep(0.3 + 0.1 * (turn % 3))
        for pid in party:
            os.kill(pid, signal.SIGKILL)
        for pid in party:
            others.gone(pid)
    for start in range(0, len(wanted), 50):
        part = all_messages(wanted[start : start + 50])
        await inbox.apply(consumer, part, handle(consumer), singly=start == 0)
    while await inbox.retry(consumer, ALL, handle(consumer)):
        pass
    await Parked(inbox).replay_all(consumer=consumer, state=None)
    while await inbox.retry(consumer, ALL, handle(consumer)):
        pass
    found = stands(bench, consumer)
    for n in range(5):
        mine = [each for each in found if each.startswith(f"{n}:")]
        assert mine == [f"{n}:{seq}" for seq in range(1, 41)]
    assert list(await Parked(inbox).list(consumer=consumer)) == []


# --- cut off ------------------------------------------------------------------------------------


@pytest.fixture
async def cut_off(bench):
    """An inbox through a wire that can be cut."""
    url = make_url(bench.url)
    with Proxy(url.port) as proxy:
        through = url.set(host=proxy.host, port=proxy.port)
        if bench.name == "postgresql":
            through = through.update_query_dict({"sslmode": "disable"})
        inbox = SQLInbox(through.render_as_string(hide_password=False))
        yield inbox, proxy
        proxy.pass_through()
        await inbox.aclose()


def on_servers(test):
    """A file has no wire to be cut."""
    return pytest.mark.parametrize("bench", ["postgres", "mariadb"], indirect=True, scope="module")(
        test
    )


async def write(each, session):
    await session.execute(INSERT, {"said": f"{write.consumer} {each.aggregate_id}:{each.seq}"})


@on_servers
@pytest.mark.parametrize("committed", [True, False])
async def test_a_commit_without_an_answer_finds_out_by_itself(
    bench, inbox, cut_off, consumer, committed
):
    write.consumer = consumer
    through, proxy = cut_off
    await through.apply(consumer, messages(1), write)
    (proxy.cut_after_request if committed else proxy.cut_before_request)(b"COMMIT")
    with pytest.raises(StoreUnavailableError):
        await through.apply(consumer, messages(2, 3), write)
    assert proxy.cuts == 1
    assert stands(bench, consumer) == ["7:1", *(["7:2", "7:3"] if committed else [])]
    again = endings(await through.apply(consumer, messages(2, 3), write))
    assert again == (["seen"] if committed else ["applied"]) * 2
    assert stands(bench, consumer) == ["7:1", "7:2", "7:3"]
    assert list(await Parked(inbox).list(consumer=consumer)) == []


@on_servers
async def test_cut_at_any_answer_nothing_is_doubled_lost_or_counted(
    bench, inbox, cut_off, consumer
):
    """The n-th answer is cut, for every n until none is left to cut."""
    write.consumer = consumer
    through, proxy = cut_off
    seq = answers = 0
    while True:
        batch = messages(seq + 1, seq + 2)
        seq += 2
        cuts = proxy.cuts
        proxy.cut_after_replies(answers)
        for _ in range(10):
            try:
                done = endings(await through.apply(consumer, batch, write))
                break
            except StoreUnavailableError:
                continue
        assert set(done) <= {"applied", "seen"}
        proxy.pass_through()
        if proxy.cuts == cuts:
            break
        answers += 1
    assert answers >= 5
    assert stands(bench, consumer) == [f"7:{n}" for n in range(1, seq + 1)]
    assert list(await Parked(inbox).list(consumer=consumer)) == []


@on_servers
async def test_a_server_that_is_not_there_is_an_outage(bench, inbox, cut_off, consumer):
    write.consumer = consumer
    through, proxy = cut_off
    await through.apply(consumer, messages(1), write)
    proxy.refuse()
    for verb in (
        lambda: through.apply(consumer, messages(2), write),
        lambda: through.apply(consumer, messages(2), write, singly=True),
        lambda: through.retry(consumer, ALL, write),
        lambda: through.baseline(consumer, "orders"),
        lambda: through.sweep(older_than_s=1),
        lambda: Parked(through).list(),
    ):
        with pytest.raises(StoreUnavailableError):
            await verb()
    proxy.pass_through()
    assert endings(await through.apply(consumer, messages(1, 2), write)) == ["seen", "applied"]


@on_servers
async def test_a_connection_that_died_in_the_pool_is_replaced_unseen(
    bench, inbox, cut_off, consumer
):
    write.consumer = consumer
    through, proxy = cut_off
    await through.apply(consumer, messages(1), write)
    proxy.cut()
    assert endings(await through.apply(consumer, messages(2), write)) == ["applied"]
    proxy.cut()
    assert list(await through.retry(consumer, ALL, write)) == []


@on_servers
async def test_outages_while_run_alone_are_not_counted_as_crashes(bench, inbox, cut_off, consumer):
    write.consumer = consumer
    through, proxy = cut_off
    for _ in range(5):
        proxy.cut_before_request(b"effect")
        with pytest.raises(StoreUnavailableError):
            await through.apply(consumer, messages(1), write, singly=True)
    assert endings(await through.apply(consumer, messages(1), write, singly=True)) == ["applied"]


# --- what the usual designs get wrong -----------------------------------------------------------


async def test_a_handler_that_fails_after_its_effect_leaves_nothing(bench, inbox, consumer):
    """A marker that is deleted on failure lets the retry do it twice."""
    done = await inbox.apply(consumer, messages(1), handle(consumer, {"orders-7-1"}))
    assert endings(done) == ["poison"]
    assert stands(bench, consumer) == []


@on_servers  # on SQLite nobody can even look: its one writer is alone
async def test_a_message_is_not_seen_while_it_is_only_being_run(bench, inbox, consumer):
    """Who skips what somebody else has merely begun loses it when that one fails."""
    begun, go = threading.Event(), threading.Event()

    def slow(each, session):
        session.execute(INSERT, {"said": f"{consumer} slow"})
        begun.set()
        assert go.wait(30)
        raise PoisonError("bad")

    first = asyncio.create_task(inbox.apply(consumer, messages(1), slow))
    await asyncio.to_thread(begun.wait, 30)
    other = bench.open("sync")
    assert endings(await other.apply(consumer, messages(1), handle(consumer))) == ["applied"]
    go.set()
    assert endings(await first) == ["seen"]
    assert stands(bench, consumer) == ["7:1"]
    await close(other)


async def test_a_replay_beyond_memory_is_refused(bench, inbox, consumer):
    """After the ids are swept nobody knows whether it has had its effect."""
    each = message(None, id=f"u-{consumer}")
    await inbox.apply(consumer, [each], handle(consumer, {each.id}))
    bench.age(8 * 86_400)
    await inbox.sweep()
    [waiting] = await Parked(inbox).list(consumer=consumer)
    with pytest.raises(SettingsError, match="force"):
        await Parked(inbox).replay(waiting.sequence)
    assert list(await inbox.retry(consumer, ALL, handle(consumer))) == []


async def test_effect_and_memory_are_one_transaction(bench, inbox, consumer):
    """A mark elsewhere than its effect is a dual write: one of them can be missing."""

    def look(each, session):
        handle(consumer)(each, session)
        seen.append(
            session.scalar(
                sa.text("SELECT count(*) FROM inbox_mark WHERE consumer = :c"), {"c": consumer}
            )
        )

    seen = []
    await inbox.apply(consumer, messages(1), look)
    assert seen == [0]
    select = f"SELECT seq, head, turn FROM inbox_mark WHERE consumer = '{consumer}'"
    assert bench.rows(select) == [(1, None, 1)]
