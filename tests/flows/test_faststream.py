"""The how-to for FastStream, on a real Redis: our relay's broker writes, FastStream reads."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from semel.brokers.redis import RedisBroker
from semel.messages import Batch, Tail

SNIPPET = Path(__file__).parents[2] / "docs" / "snippets" / "faststream_app.py"


@pytest.fixture
def page(tmp_path, monkeypatch, redis_url):
    """The snippet as a module, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDIS_URL", redis_url)
    spec = importlib.util.spec_from_file_location("page_faststream", SNIPPET)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def invoices(page):
    async with page.engine.connect() as connection:
        return (await connection.execute(sa.text("SELECT id, total FROM invoices"))).all()


async def read_to_the_end(ours, page):
    [group] = (await ours.backlog("orders", 0)).groups
    return len(await invoices(page)) == 2 and group.pending == 0 and not group.unread


async def test_each_event_has_its_effect_once_and_what_fails_waits_with_its_own(page, redis_url):
    async with page.engine.begin() as connection:
        await connection.execute(sa.text("CREATE TABLE invoices (id TEXT, total INT)"))
    ours = RedisBroker(redis_url, groups={"orders": [page.GROUP]})
    first = page.next_message()
    spoilt = replace(page.next_message(), position=2, payload='{"total": {"not": "a number"}}')
    behind = replace(spoilt, position=3, id="behind", seq=2, payload='{"total": 1}')
    other = replace(page.next_message(), position=4)
    batch = [first, spoilt, behind, other, replace(first, position=5)]
    await page.broker.start()
    try:
        await ours.publish(Batch("orders", 0, 1, Tail(), batch))
        async with asyncio.timeout(20):
            while not await read_to_the_end(ours, page):
                await asyncio.sleep(0.05)
        assert await invoices(page) == [(first.aggregate_id, 40), (other.aggregate_id, 40)]
        [waits] = await page.inbox.sequences(consumer=page.GROUP)
        assert (waits.head.message.id, waits.behind) == (spoilt.id, 1)
    finally:
        await page.broker.stop()
        await ours.aclose()
        await page.inbox.aclose()
        await page.engine.dispose()
