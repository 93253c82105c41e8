"""Databases with an inbox and a table for effects in them."""

from __future__ import annotations

import contextlib
import uuid

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from semel.inbox import SQLInbox
from semel.stores.sql import init
from semel.stores.sql.lines import open_engine, parse, with_driver
from support.servers import driver_settings

INSERT = sa.text("INSERT INTO effect (said) VALUES (:said)")

MADE = {
    "postgresql": "CREATE TABLE effect (id serial PRIMARY KEY, said text)",
    "mysql": "CREATE TABLE effect (id int AUTO_INCREMENT PRIMARY KEY, said text)",
    "sqlite": "CREATE TABLE effect (id INTEGER PRIMARY KEY AUTOINCREMENT, said text)",
}

OLDER = {
    "postgresql": "{c} - {s} * interval '1 second'",
    "mysql": "{c} - INTERVAL {s} SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', {c}, '-{s} seconds') || '000'",
}

TIMES = {
    "event_parked": ("due_at", "parked_at"),
    "inbox_message": ("received_at",),
    "inbox_started": ("updated_at",),
}


class Bench:
    """A database with the tables in it, and what a test does to them by hand."""

    def __init__(self, url):
        self.url = url
        self.engine = open_engine(parse(url))
        self.name = self.engine.dialect.name.replace("mariadb", "mysql")
        init(url)
        self.do(MADE[self.name])

    def do(self, *statements):
        with self.engine.connect() as connection:
            for statement in statements:
                connection.execute(sa.text(statement.replace(":", "\\:")))

    def rows(self, select):
        with self.engine.connect() as connection:
            return connection.execute(sa.text(select)).all()

    def age(self, seconds):
        older = OLDER[self.name]
        for table, columns in TIMES.items():
            sets = ", ".join(f"{c} = {older.format(c=c, s=seconds)}" for c in columns)
            self.do(f"UPDATE {table} SET {sets}")

    def effects(self):
        return [said for (said,) in self.rows("SELECT said FROM effect ORDER BY id")]

    def open(self, kind, **settings):
        """An inbox by URL, or over an engine that is closed with it."""
        if kind == "url":
            return SQLInbox(self.url, **settings)
        make = sa.create_engine if kind == "sync" else create_async_engine
        given = driver_settings(self.url)
        return SQLInbox(make(with_driver(parse(self.url), kind), connect_args=given), **settings)


async def close(inbox):
    await inbox.aclose()
    engine = inbox.store.engine_or_url
    if isinstance(engine, sa.Engine):
        engine.dispose()
    elif not isinstance(engine, str):
        await engine.dispose()


@contextlib.contextmanager
def database(server, options=""):
    server.ensure_running()
    name = f"inbox_{uuid.uuid4().hex[:12]}"
    server.create_database(name, options)
    bench = Bench(server.url(name))
    yield bench
    bench.engine.dispose()
    server.ensure_running()
    server.drop_database(name)


@contextlib.contextmanager
def file_database(folder):
    bench = Bench(f"sqlite:///{folder}/inbox.db")
    yield bench
    bench.engine.dispose()
