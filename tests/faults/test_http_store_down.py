"""The store of a door is down, comes back, or is lost while a handler runs; on a real server."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from sqlalchemy.engine import make_url

from semel.stores.sql import init
from support.process import wait_until
from support.proxy import Proxy
from support.web import fetch, start_web

PATIENCE_S = 0.5


@pytest.fixture(scope="module", params=["redis", "postgres"])
def store(request):
    """A server, its port, and a URL on it for a port in front of it."""
    server = request.getfixturevalue(f"{request.param}_server")
    server.ensure_running()
    if request.param == "redis":
        server.empty()
        yield server, lambda port: f"redis://127.0.0.1:{port}/0"
        return
    name = f"test_{uuid.uuid4().hex[:12]}"
    server.create_database(name)
    init(server.url(name))
    url = make_url(server.url(name))
    yield server, lambda port: url.set(port=port).render_as_string(hide_password=False)
    server.ensure_running()
    server.drop_database(name)


@pytest.fixture(scope="module")
def lines(store):
    """The server of the store behind a network that can fail, and a web server before it."""
    server, url_at = store
    with Proxy(server.port) as proxy:
        web = start_web(url_at(proxy.port))
        yield proxy, web
        web.stop()


@pytest.fixture
def proxy(lines):
    yield lines[0]
    lines[0].pass_through()


@pytest.fixture
def web(lines, proxy):
    return lines[1]


@pytest.fixture
def key():
    return uuid.uuid4().hex


async def recovered(web, path, key):
    """What a client gets that comes again until the store is back."""
    async with asyncio.timeout(30):
        while (reply := await fetch(web, path, key)).status == 503:
            await asyncio.sleep(0.02)
        return reply


async def settled(web, path, key):
    """The same, and until nobody holds the key."""
    async with asyncio.timeout(30):
        while (reply := await recovered(web, path, key)).problem == "in-progress":
            await asyncio.sleep(0.02)
        return reply


async def reached(web, key):
    await asyncio.to_thread(wait_until, lambda: len(web.runs(key)) == 1, "the handler", within_s=10)


def refused(reply):
    assert reply.status == 503
    assert reply.problem == "store-unavailable"
    assert reply.header("retry-after") == "1"
    return True


# --- down ---------------------------------------------------------------------------------------


async def test_while_the_store_is_down_nothing_is_done_and_then_all_is_well(web, proxy, key):
    assert (await fetch(web, "/charge", f"{key}-before")).status == 201
    proxy.refuse()
    replies = await asyncio.gather(*[fetch(web, "/charge", key) for _ in range(30)])
    assert all(refused(reply) for reply in replies)
    assert refused(await fetch(web, "/waiting/charge", f"{key}-waiting"))
    assert web.runs(key) == []
    proxy.pass_through()
    assert (await recovered(web, "/charge", key)).status == 201
    assert (await fetch(web, "/charge", key)).replayed
    assert (await fetch(web, "/charge", f"{key}-before")).replayed
    assert len(web.runs(key)) == 1


async def test_requests_without_a_key_need_no_store(web, proxy):
    proxy.refuse()
    before = len(web.effects())
    reader, writer = await asyncio.open_connection("127.0.0.1", web.port)
    writer.write(
        b"POST /charge HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    )
    assert (await reader.read()).startswith(b"HTTP/1.1 201")
    writer.close()
    assert len(web.effects()) == before + 1


async def test_a_store_that_dies_and_comes_back_remembers(web, store, key):
    server, _ = store
    first = await fetch(web, "/charge", key)
    server.kill()
    try:
        assert refused(await fetch(web, "/charge", key))
    finally:
        await asyncio.to_thread(server.restart)
    again = await recovered(web, "/charge", key)
    assert again.replayed
    assert again.body == first.body
    assert len(web.runs(key)) == 1


async def test_a_store_that_says_nothing_is_down(redis_server, redis_url, key):
    with Proxy(redis_server.port) as proxy:
        web = start_web(f"redis://127.0.0.1:{proxy.port}/0", patience_s=PATIENCE_S)
        try:
            assert (await fetch(web, "/charge", f"{key}-before")).status == 201
            proxy.freeze()
            asking = [fetch(web, "/brief/charge", key) for _ in range(10)]
            assert all(refused(reply) for reply in await asyncio.gather(*asking))
            assert web.runs(key) == []
            proxy.pass_through()
            # What was on its way may have claimed the key for nobody: that ends with its lease.
            assert (await settled(web, "/brief/charge", key)).status == 201
            assert len(web.runs(key)) == 1
        finally:
            web.stop()


# --- lost while a handler runs ------------------------------------------------------------------


async def lost_inside(web, proxy, path, key):
    """A request whose store is gone when its handler has run."""
    asking = asyncio.create_task(fetch(web, f"{path}?until={key}", key))
    await reached(web, key)
    proxy.refuse()
    web.open_gate(key)
    return asking


async def test_a_store_that_is_back_in_time_has_the_record(web, proxy, key):
    asking = await lost_inside(web, proxy, "/charge", key)
    await asyncio.sleep(0.2)
    assert not asking.done()  # what has happened is not said before it is written down
    proxy.pass_through()
    first = await asking
    assert first.status == 201
    again = await fetch(web, f"/charge?until={key}", key)
    assert again.replayed
    assert again.body == first.body
    assert len(web.runs(key)) == 1


async def test_a_store_that_stays_away_does_not_turn_success_into_failure(web, proxy, key):
    """An error would make the client try again, and that is the one thing it must not do."""
    first = await (await lost_inside(web, proxy, "/brief/charge", key))
    assert first.status == 201
    assert not first.replayed
    assert refused(await fetch(web, f"/brief/charge?until={key}", key))
    proxy.pass_through()
    # Nobody wrote it down. To be run again is the risk of a rule that does not hold.
    assert (await settled(web, f"/brief/charge?until={key}", key)).status == 201
    assert len(web.runs(key)) == 2


async def test_a_store_that_stays_away_leaves_a_held_request_unknown(web, proxy, key):
    path = f"/held/charge?until={key}"
    assert (await (await lost_inside(web, proxy, "/held/charge", key))).status == 201
    proxy.pass_through()
    assert (await settled(web, path, key)).problem == "outcome-unknown"
    assert len(web.runs(key)) == 1


async def test_a_store_that_is_away_for_a_while_does_not_cost_the_lease(web, proxy, key):
    asking = asyncio.create_task(fetch(web, f"/charge?until={key}", key))
    await reached(web, key)
    proxy.refuse()
    await asyncio.sleep(0.3)
    proxy.pass_through()
    busy = await recovered(web, f"/charge?until={key}", key)
    assert busy.problem == "in-progress"
    web.open_gate(key)
    assert (await asking).status == 201
    assert len(web.runs(key)) == 1


@pytest.mark.parametrize("moment", ["request", "reply"])
async def test_a_record_whose_reply_is_lost_is_written_once(web, proxy, key, moment):
    """Cut at the claim: asked again by the same attempt. Cut at the record: written again."""
    path = f"/charge?until={key}"
    await fetch(web, "/charge", f"{key}-warm")
    if moment == "request":
        proxy.cut_after_replies(0)
        web.open_gate(key)
        first = await recovered(web, path, key)
    else:
        asking = asyncio.create_task(fetch(web, path, key))
        await reached(web, key)
        proxy.cut_after_replies(0)
        web.open_gate(key)
        first = await asking
    assert proxy.cuts
    assert first.status == 201
    assert (await fetch(web, path, key)).body == first.body
    assert len(web.runs(key)) == 1
