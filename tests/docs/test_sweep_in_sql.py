"""The sweep that the how-to gives to pg_cron, run as pg_cron would."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg

from semel.brokers import MemoryBroker
from semel.outbox import Event, Outbox
from semel.stores.sql import SQLStore, init
from semel.stores.sql.outbox_reading import Lane, OutboxReader
from support.outbox_party import engine_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "relay-events-to-a-broker.md"


def recipe():
    [command] = re.findall(r"cron\.schedule\([^$]*\$\$(.*?)\$\$", PAGE.read_text(), re.DOTALL)
    return command


async def test_it_deletes_what_is_old_and_published_and_nothing_else(postgres_url):
    init(postgres_url)
    engine = engine_of(postgres_url)
    outbox = Outbox()
    for number in range(6):
        with engine.begin() as connection:
            event = Event("case.opened", "case", number, {}, topic="cases")
            outbox.add(connection, event)
    engine.dispose()
    store = SQLStore(postgres_url)
    reader = OutboxReader(store, shards=MemoryBroker().shards)
    cursor = await reader.take(0, 1)
    with psycopg.connect(postgres_url, autocommit=True) as link:

        def swept():
            link.execute(recipe())
            return link.execute("SELECT count(*) FROM event_outbox").fetchone()[0]

        link.execute("UPDATE event_outbox SET created_at = now() - interval '2 hours' WHERE id < 5")
        assert swept() == 6, "nothing is published"
        page = await reader.read(cursor, Lane("", 0), limit=3, bound=await reader.news())
        cursor = await reader.advance(cursor, position=page.upto, tails={}, lanes={})
        await reader.keep(2)
        assert swept() == 4
        assert await reader.swept_to() == 3
        link.execute("DELETE FROM event_outbox WHERE id = 2")
        await reader.advance(cursor, position=await reader.news(), tails={}, lanes={})
        assert swept() == 2, "what is left is young"
        assert await reader.swept_to() == 4
    await store.aclose()
