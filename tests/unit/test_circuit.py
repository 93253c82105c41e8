"""A circuit: who waits how long, and what is said of it. In simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from semel.circuit import FIRST_S, MOST_S, Circuit
from semel.errors import BrokerUnavailableError
from semel.testing.simulator import SimLoop

DOWN = BrokerUnavailableError("refused")


def run(story: Callable[[Circuit], Awaitable[Any]]) -> Any:
    async def told() -> Any:
        return await story(Circuit("the broker"))

    return SimLoop(1).run(told())


async def wait_s(circuit: Circuit, who: object = None) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await circuit.wait(asyncio.Event(), who)
    return loop.time() - began


def test_waits_grow_up_to_a_limit_and_are_spread() -> None:
    async def story(circuit: Circuit) -> list[float]:
        waits = []
        for _ in range(20):
            circuit.failed(DOWN)
            waits.append(await wait_s(circuit))
        return waits

    waits = run(story)
    for number, waited_s in enumerate(waits):
        full_s = min(MOST_S, FIRST_S * 2**number)
        assert 0.5 * full_s <= waited_s <= 1.5 * full_s
    assert len({round(waited_s, 6) for waited_s in waits[10:]}) > 5


def test_whoever_got_through_begins_with_short_waits_again() -> None:
    async def story(circuit: Circuit) -> None:
        for _ in range(10):
            circuit.failed(DOWN)
            await circuit.wait(asyncio.Event())
        circuit.passed()
        circuit.failed(DOWN)
        assert await wait_s(circuit) <= 1.5 * FIRST_S

    run(story)


def test_an_error_of_several_lines_is_told_in_one(caplog: pytest.LogCaptureFixture) -> None:
    async def story(circuit: Circuit) -> str:
        circuit.failed(BrokerUnavailableError("refused\n\tIs the server\n running?\n"))
        return circuit.error

    assert run(story) == "refused Is the server running?"
    assert caplog.messages == [
        "semel: the broker does not answer, waiting for it: refused Is the server running?"
    ]


def test_an_ending_ends_the_wait() -> None:
    async def story(circuit: Circuit) -> None:
        ending = asyncio.Event()
        for _ in range(10):
            circuit.failed(DOWN)
            await circuit.wait(asyncio.Event())
        asyncio.get_running_loop().call_later(0.01, ending.set)
        began = asyncio.get_running_loop().time()
        await circuit.wait(ending)
        assert asyncio.get_running_loop().time() - began < 0.02
        await circuit.wait(ending)

    run(story)


def test_it_is_open_until_the_last_who_failed_got_through() -> None:
    async def story(circuit: Circuit) -> None:
        circuit.failed(DOWN, "a")
        circuit.failed(ValueError(), "b")
        circuit.passed("c")
        circuit.passed("a")
        assert circuit.is_open
        assert circuit.error == "ValueError"
        circuit.passed("b")
        assert not circuit.is_open
        assert circuit.error == ""

    run(story)


def test_who_gives_up_does_not_keep_it_open() -> None:
    async def story(circuit: Circuit) -> None:
        circuit.failed(DOWN, "a")
        circuit.gave_up("a")
        circuit.gave_up("a")
        assert not circuit.is_open

    run(story)


def test_each_has_waits_of_its_own() -> None:
    async def story(circuit: Circuit) -> None:
        for _ in range(10):
            circuit.failed(DOWN, "a")
            await circuit.wait(asyncio.Event(), "a")
        circuit.failed(DOWN, "b")
        assert await wait_s(circuit, "b") <= 1.5 * FIRST_S
        assert await wait_s(circuit, "a") >= 0.5 * MOST_S

    run(story)


def test_opening_and_closing_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def story(circuit: Circuit) -> None:
        for who in "abab":
            circuit.failed(DOWN, who)
            await asyncio.sleep(1)
        for who in "abcab":
            circuit.passed(who)

    run(story)
    assert [record.getMessage() for record in caplog.records] == [
        "semel: the broker does not answer, waiting for it: refused",
        "semel: the broker answers again after 4.0 s",
    ]
