from __future__ import annotations

import asyncio

import pytest

from semel.errors import StoreUnavailableError
from semel.stores.batch import LARGEST, Batcher


class Server:
    """Answers a batch when it is told to."""

    def __init__(self):
        self.sizes = []
        self.gate = asyncio.Semaphore(0)

    async def run(self, ops):
        self.sizes.append(len(ops))
        await self.gate.acquire()
        return [op * 10 for op in ops]


@pytest.fixture
def server():
    return Server()


async def answers(batcher, server, count):
    futures = [batcher.submit(n) for n in range(count)]
    while not all(future.done() for future in futures):
        server.gate.release()
        await asyncio.sleep(0)
    assert [future.result() for future in futures] == [n * 10 for n in range(count)]


async def test_a_lone_caller_goes_out_alone(server):
    await answers(Batcher(server.run), server, 1)
    assert server.sizes == [1]


async def test_callers_at_once_go_out_together(server):
    await answers(Batcher(server.run), server, 100)
    assert server.sizes == [100]


async def test_a_crowd_goes_out_by_halves_until_there_is_just_enough(server):
    await answers(Batcher(server.run, enough=32), server, 100)
    assert server.sizes == [50, 32, 18]


async def test_no_batch_is_larger_than_the_largest(server):
    await answers(Batcher(server.run), server, 2 * LARGEST + 1)
    assert server.sizes == [LARGEST, LARGEST, 1]


async def test_one_that_cannot_be_said_is_its_own_callers_error_alone():
    async def run(ops):
        return [op.upper() for op in ops]

    batcher = Batcher(run)
    futures = [batcher.submit(op) for op in ("a", 7, "b")]
    answers = await asyncio.gather(*futures, return_exceptions=True)
    assert (answers[0], answers[2]) == ("A", "B")
    assert isinstance(answers[1], AttributeError)


async def test_a_store_that_fails_is_not_asked_for_each_of_them():
    sizes = []

    async def run(ops):
        sizes.append(len(ops))
        raise StoreUnavailableError("gone")

    batcher = Batcher(run)
    answers = await asyncio.gather(*map(batcher.submit, range(5)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["gone"] * 5
    assert sizes == [5]


async def test_what_comes_meanwhile_is_the_next_batch(server):
    batcher = Batcher(server.run)
    first = batcher.submit(1)
    await asyncio.sleep(0)
    later = [batcher.submit(n) for n in (2, 3, 4)]
    server.gate.release()
    server.gate.release()
    assert await asyncio.gather(first, *later) == [10, 20, 30, 40]
    assert server.sizes == [1, 3]
