"""Two worker processes of a real server behind one port: many at once, killed, and frozen.

The effect is a line in a file outside, one per execution.
"""

from __future__ import annotations

import asyncio
import os
import signal
import uuid

import pytest

import semel
from semel.colour import SYNC, run
from semel.stores.sql import init
from semel.values import State
from support.http_app import LEASE_S, STEADY_S
from support.process import wait_until
from support.web import fetch, start_web, until

CROWD = 200


@pytest.fixture(scope="module", params=["redis", "postgres"])
def store_url(request):
    server = request.getfixturevalue(f"{request.param}_server")
    server.ensure_running()
    if request.param == "redis":
        server.empty()
        yield server.url
        return
    name = f"test_{uuid.uuid4().hex[:12]}"
    server.create_database(name)
    init(server.url(name))
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture(scope="module")
def web(store_url):
    web = start_web(store_url, workers=2)
    yield web
    web.stop()


@pytest.fixture
def key():
    return uuid.uuid4().hex


def record(store_url, key):
    store = semel.connect(store_url)
    try:
        found = run(store.ledger(SYNC).records(tenant="shop", limit=1000))
    finally:
        store.close()
    return next(one for one in found if one.key.text == key)


async def reached(web, key, runs=1):
    """The process in which the key is being worked on."""
    await asyncio.to_thread(
        wait_until, lambda: len(web.runs(key)) == runs, f"{runs} runs", within_s=10
    )
    return web.runs(key)[-1]


# --- many at once -------------------------------------------------------------------------------


async def test_two_hundred_at_once_are_one_execution_and_clean_answers(web, key):
    asking = [asyncio.create_task(fetch(web, f"/charge?until={key}", key)) for _ in range(CROWD)]
    await until(lambda: sum(task.done() for task in asking) == CROWD - 1, within_s=30)
    web.open_gate(key)
    replies = await asyncio.gather(*asking)
    first = [reply for reply in replies if reply.status == 201]
    busy = [reply for reply in replies if reply.status == 409]
    assert (len(first), len(busy)) == (1, CROWD - 1)
    assert {reply.problem for reply in busy} == {"in-progress"}
    assert all(1 <= int(reply.header("retry-after")) <= 30 for reply in busy)
    again = await asyncio.gather(*[fetch(web, f"/charge?until={key}", key) for _ in range(CROWD)])
    assert {reply.body for reply in again} == {first[0].body}
    assert all(reply.replayed for reply in again)
    assert len(web.runs(key)) == 1


async def test_two_hundred_that_wait_all_get_the_same_bytes(web, key):
    replies = await asyncio.gather(
        *[fetch(web, "/waiting/charge?pause=0.3", key) for _ in range(CROWD)]
    )
    assert {reply.status for reply in replies} == {201}
    assert len({reply.body for reply in replies}) == 1
    assert sum(reply.replayed for reply in replies) == CROWD - 1
    assert len(web.runs(key)) == 1


async def test_two_hundred_keys_at_once_do_not_stand_in_each_others_way(web):
    keys = [uuid.uuid4().hex for _ in range(CROWD)]
    replies = await asyncio.gather(*[fetch(web, "/charge", key) for key in keys])
    assert {reply.status for reply in replies} == {201}
    assert len({reply.body for reply in replies}) == CROWD
    assert not any(reply.replayed for reply in replies)


# --- killed and frozen --------------------------------------------------------------------------


async def killed(web, path, key):
    """A request whose worker is killed in the middle of its handler."""
    asking = asyncio.create_task(fetch(web, f"{path}?until={key}", key))
    os.kill(await reached(web, key), signal.SIGKILL)
    with pytest.raises(OSError):
        await asking


async def settled(web, path, key):
    """What a client gets that comes again as long as it is told to."""
    async with asyncio.timeout(60):
        while (reply := await fetch(web, path, key)).problem == "in-progress":
            await asyncio.sleep(0.02)
        return reply


async def test_a_killed_workers_key_is_free_when_its_lease_is_over(web, key, store_url):
    await killed(web, "/brief/charge", key)
    web.open_gate(key)
    reply = await settled(web, f"/brief/charge?until={key}", key)
    assert reply.status == 201
    assert len(web.runs(key)) == 2
    assert (await fetch(web, f"/brief/charge?until={key}", key)).replayed
    found = record(store_url, key)
    assert found.state is State.COMPLETED
    assert [past.ending for past in found.past] == ["lease ran out"]


async def test_a_killed_workers_outcome_is_unknown_where_it_is_held(web, key, store_url):
    await killed(web, "/held/charge", key)
    web.open_gate(key)
    for _ in range(2):
        reply = await settled(web, f"/held/charge?until={key}", key)
        assert reply.status == 409
        assert reply.problem == "outcome-unknown"
        assert reply.header("retry-after") is None
    assert len(web.runs(key)) == 1
    assert record(store_url, key).state is State.UNKNOWN


async def test_a_frozen_worker_shows_what_another_recorded_meanwhile(web, key, store_url):
    late = asyncio.create_task(fetch(web, f"/brief/charge?until={key}", key))
    frozen = await reached(web, key)
    os.kill(frozen, signal.SIGSTOP)
    try:
        await asyncio.sleep(LEASE_S)
        web.open_gate(key)
        winner = await settled(web, f"/brief/charge?until={key}", key)
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert winner.status == 201
    assert not winner.replayed
    reply = await late
    assert reply.body == winner.body
    assert reply.replayed
    assert len(web.runs(key)) == 2
    assert record(store_url, key).number == 2
    assert (await fetch(web, f"/brief/charge?until={key}", key)).replayed


async def test_a_worker_that_runs_long_keeps_its_key(web, key):
    first = asyncio.create_task(fetch(web, f"/steady/charge?until={key}", key))
    await reached(web, key)
    clock = asyncio.get_running_loop().time
    begun = clock()
    while clock() < begun + 1.3 * STEADY_S:
        assert (await fetch(web, f"/steady/charge?until={key}", key)).problem == "in-progress"
        await asyncio.sleep(0.05)
    web.open_gate(key)
    assert (await first).status == 201
    assert len(web.runs(key)) == 1


# --- what a client may send ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/%00", "/%ED%A0%80", "/%FF", "/" + "x" * 3000, "/a%0D%0Ab"])
async def test_no_path_makes_the_server_fall_over(web, key, path):
    assert (await fetch(web, path, key)).status == 201
    assert (await fetch(web, path, key)).replayed
