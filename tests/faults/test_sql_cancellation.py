"""Cancelled tasks return every SQL connection: none is left to the garbage collector.

The garbage collector cannot close the connection of an async driver: its event loop may be closed.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import Pool

from semel.stores.sql import init
from semel.stores.sql.lines import AsyncLines, open_async_engine, parse, with_driver


@pytest.fixture(params=["postgres", "mariadb", "sqlite"])
def url(request, tmp_path):
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.db"
    else:
        url = request.getfixturevalue(f"{request.param}_url")
    init(url)
    return parse(url)


@pytest.fixture(params=["own", "borrowed"])
async def lines(request, url):
    is_own = request.param == "own"
    engine = open_async_engine(url) if is_own else create_async_engine(with_driver(url, "async"))
    yield AsyncLines(engine, own=is_own)
    await engine.dispose()


@pytest.fixture
def checked_out():
    """The number of connections that are checked out of a pool."""
    counted = Counter()

    def count(number):
        return lambda *_: counted.update(connections=number)

    listeners = {"checkout": count(1), "checkin": count(-1)}
    for name, listener in listeners.items():
        event.listen(Pool, name, listener)
    yield lambda: counted["connections"]
    for name, listener in listeners.items():
        event.remove(Pool, name, listener)


async def cancel_twice(task):
    """Cancel the task, and again while it cleans up."""
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_task_cancelled_twice_in_the_middle_of_work_returns_its_connection(
    lines, checked_out
):
    started = asyncio.Event()

    async def work(link):
        await link.fetch("SELECT 1")
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(lines.use(work))
    await started.wait()
    await cancel_twice(task)
    assert checked_out() == 0


async def test_task_cancelled_twice_while_it_prepares_a_connection_returns_it(
    lines, checked_out, monkeypatch
):
    started = asyncio.Event()

    async def hang(_, connection):
        started.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(AsyncLines, "_link", hang)
    task = asyncio.create_task(lines.use(lambda link: link.fetch("SELECT 1")))
    await started.wait()
    await cancel_twice(task)
    assert checked_out() == 0


def test_thread_of_a_cancelled_sqlite_connect_ends_before_the_event_loop(tmp_path, monkeypatch):
    """Otherwise the thread raises `RuntimeError: Event loop is closed`."""
    url, connect, connecting = parse(f"sqlite:///{tmp_path}/ledger.db"), sqlite3.connect, []

    def connect_slowly(*args, **kwargs):
        connecting.append(threading.current_thread())
        time.sleep(0.05)
        return connect(*args, **kwargs)

    async def use_and_cancel():
        lines = AsyncLines(open_async_engine(url), own=True)
        task = asyncio.create_task(lines.use(lambda link: link.fetch("SELECT 1")))
        while not connecting:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        await lines.close()

    monkeypatch.setattr(sqlite3, "connect", connect_slowly)
    asyncio.run(use_and_cancel())
    connecting[0].join(5)  # it has answered the event loop, and may need a moment to end
    assert not connecting[0].is_alive()


async def test_close_that_is_cancelled_returns_the_connection(lines, checked_out):
    await lines.use(lambda link: link.fetch("SELECT 1"))
    task = asyncio.create_task(lines.close())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert checked_out() == 0


async def test_close_waits_for_work_that_is_opening_a_connection(lines, checked_out):
    task = asyncio.create_task(lines.use(lambda link: link.fetch("SELECT 1")))
    await asyncio.sleep(0)
    await lines.close()
    assert [tuple(row) for row in await task] == [(1,)]
    assert checked_out() == 0
