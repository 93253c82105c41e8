"""What an event costs the transaction that carries it: eight clients, with and without.

Each client is a process with one connection and a session of SQLAlchemy. The transaction is a small
business one: an order is put, stock is taken. The three kinds take turns in blocks of a second.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from semel.outbox import Event, Outbox
from semel.stores.sql import init
from semel.stores.sql.lines import parse, with_driver

CLIENTS = 8
Kind = Literal["bare", "event", "unordered"]
KINDS: tuple[Kind, ...] = ("bare", "event", "unordered")

ORDER = sa.text("INSERT INTO bench_order (item, total, note) VALUES (:item, :total, :note)")
STOCK = sa.text("UPDATE bench_stock SET left_over = left_over - 1 WHERE item = :item")
ITEMS = 1000
NOTE = "a" * 190


def prepare(url: str) -> None:
    init(url)
    engine = sa.create_engine(with_driver(parse(url), "sync"))
    with engine.begin() as connection:
        connection.execute(
            sa.text(
                "CREATE TABLE bench_order (id BIGSERIAL PRIMARY KEY, item INT, total INT, "
                "note TEXT)"
            )
        )
        connection.execute(
            sa.text("CREATE TABLE bench_stock (item INT PRIMARY KEY, left_over BIGINT)")
        )
        connection.execute(
            sa.text(f"INSERT INTO bench_stock SELECT n, 0 FROM generate_series(0, {ITEMS}) n")
        )
    engine.dispose()


class Client:
    """One process: waits to be told a kind and a time, and tells how many it committed."""

    def __init__(self, url: str, number: int) -> None:
        # One engine each: where an outbox is, it listens.
        self._sessions = {kind: _session(url) for kind in KINDS}
        self._outbox = Outbox(routes={"order.placed": "orders"})
        self._chance = random.Random(number)
        self._number = number

    def produce(self, kind: Kind, seconds: float) -> int:
        session = self._sessions[kind]
        made, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            item = self._chance.randrange(ITEMS)
            session.execute(ORDER, {"item": item, "total": made, "note": NOTE})
            session.execute(STOCK, {"item": item})
            if kind != "bare":
                self._outbox.add(session, self._event(made, kind))
            session.commit()
            made += 1
        return made

    def _event(self, made: int, kind: Kind) -> Event:
        return Event(
            type="order.placed",
            aggregate_type="order",
            aggregate_id=f"{self._number}-{made % 500}",
            payload={"note": NOTE},
            ordered=kind == "event",
        )


def _session(url: str) -> Session:
    return Session(sa.create_engine(with_driver(parse(url), "sync"), pool_size=1))


def _serve(url: str, number: int, pipe: Any) -> None:
    client = Client(url, number)
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        pipe.send(client.produce(*told))


class Clients:
    """All of them at once."""

    def __init__(self, pipes: list[Any]) -> None:
        self._pipes = pipes

    def rate(self, kind: Kind, seconds: float) -> float:
        for pipe in self._pipes:
            pipe.send((kind, seconds))
        return sum(pipe.recv() for pipe in self._pipes) / seconds


@contextmanager
def clients(url: str) -> Iterator[Clients]:
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for number in range(CLIENTS):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(url, number, theirs), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    try:
        yield Clients(pipes)
    finally:
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(10)
