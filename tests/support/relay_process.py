"""`semel relay` and `semel worker` as processes of their own, and events for them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import sqlalchemy as sa
from sqlalchemy import orm

from semel.brokers import connect
from semel.outbox import Event, Outbox
from semel.stores.sql.lines import parse, with_driver
from support.process import wait_until

# As people start it: unlike `python -m`, it does not find the modules of this folder by itself.
SEMEL = Path(sys.executable).parent / "semel"


def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(with_driver(parse(url), "sync"))


def add(url: str, numbers: Iterable[int], *, topic: str = "orders", aggregates: int = 20) -> None:
    """Committed events, the number of each in its payload."""
    engine = engine_of(url)
    _commit(engine, numbers, topic, aggregates)
    engine.dispose()


def _commit(engine: sa.Engine, numbers: Iterable[int], topic: str, aggregates: int) -> None:
    outbox = Outbox()
    with orm.Session(engine) as session:
        for number in numbers:
            event = Event(
                type="order.placed",
                aggregate_type="order",
                aggregate_id=number % aggregates,
                payload={"n": number},
                topic=topic,
            )
            outbox.add(session, event)
        session.commit()


@contextmanager
def producing(url: str) -> Iterator[list[int]]:
    """Events, ten at a time, while the block runs; gives the numbers that are committed."""
    stop, numbers, engine = threading.Event(), [], engine_of(url)

    def produce() -> None:
        while not stop.wait(0.02):
            more = range(len(numbers), len(numbers) + 10)
            _commit(engine, more, "orders", aggregates=20)
            numbers.extend(more)

    thread = threading.Thread(target=produce)
    thread.start()
    try:
        yield numbers
    finally:
        stop.set()
        thread.join()
        engine.dispose()


class Running:
    """A command that runs until it is told to end."""

    def __init__(self, *words: str, http: bool = True, **popen) -> None:
        options = ("--http", "127.0.0.1:0") if http else ()
        self._popen = subprocess.Popen(
            [str(SEMEL), *words, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **{"env": {**os.environ, "PYTHONUNBUFFERED": "1"}, **popen},
        )
        self.said = ""
        self._reading = threading.Thread(target=self._read)
        self._reading.start()
        self._http = http

    def _read(self) -> None:
        for line in self._popen.stderr:
            self.said += line

    def __enter__(self) -> Self:
        if self._http:
            self.until(lambda: "health at" in self.said, "it to listen")
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reading.join()
        self._popen.stdout.close()
        self._popen.stderr.close()

    def until(self, condition, what: str, within_s: float = 30) -> None:
        def met() -> bool:
            met = condition()
            assert met or self._popen.poll() is None, f"it has ended:\n{self.said}"
            return met

        try:
            wait_until(met, what, within_s=within_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.said}") from error

    @property
    def pid(self) -> int:
        return self._popen.pid

    # --- asking -----------------------------------------------------------------------------

    def ask(self, path: str) -> tuple[int, str]:
        url = re.search(r"health at (\S+)", self.said)[1]
        try:
            with urllib.request.urlopen(f"{url}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    @property
    def ready(self) -> dict:
        return json.loads(self.ask("/readyz")[1])

    @property
    def status(self) -> dict:
        return self.ready["parts"][0]

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def until_owned(self, shards: int, within_s: float = 30) -> None:
        self.until(lambda: len(self.status["owned"]) == shards, f"{shards} shards", within_s)

    # --- ending -----------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()

    def ended(self, within_s: float = 30) -> int:
        """Its exit code, once it has one; all it said is there then."""
        code = self._popen.wait(within_s)
        self._reading.join()
        return code

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.ended()


async def lying_in(to: str, topic: str = "orders") -> list:
    """Every message in the broker, shard by shard."""
    broker = connect(to)
    try:
        await broker.join(topic, "test")
        found = []
        for shard in range(broker.shards):
            reader = await broker.consumer(topic, "test", shard, name="test", fence=1)
            while page := await reader.read(1000):
                found += [delivery.message for delivery in page]
                await reader.ack(page)
        return found
    finally:
        await broker.aclose()


def numbers_of(messages) -> list[int]:
    return sorted(message.data["n"] for message in messages)


def are_in_order(messages) -> bool:
    """Does each aggregate's every number follow the one before, beginning with 1?"""
    last: dict[str, int] = {}
    for message in messages:
        if message.seq != last.get(message.aggregate_id, 0) + 1:
            return False
        last[message.aggregate_id] = message.seq
    return True
