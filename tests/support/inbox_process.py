"""Processes that let messages have their effects, and are killed or frozen at a named point.

    Nursery("support.inbox_process").start(url=..., consumer=..., verb=..., at=...)

Each says how its messages ended.

Points: `before-handler`, `in-handler` (its effect is sent), `before-marks`, `before-commit`,
`after-commit` (nothing was acknowledged yet).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from semel.errors import SemelError
from semel.inbox import SQLInbox
from semel.parked import Parked
from semel.stores.sql import inbox_flow
from semel.stores.sql.lines import parse, with_driver
from semel.testing.inboxes import ALL, endings, message
from support.inbox_bench import INSERT
from support.nursery import say, serve


class Trap:
    def __init__(self, asked):
        self._point, self._action = asked.get("at"), asked.get("action", "kill")

    def at(self, point):
        if point == self._point:
            self._point = None
            say(trap=point)
            if self._action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            # To this very thread: sent to the process, another one might take it, a little later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class Handler:
    def __init__(self, asked, trap):
        self.consumer, self.trap, self._colour = asked["consumer"], trap, asked["colour"]

    def colour(self, _):
        return self._colour

    def __call__(self, each, session):
        self.trap.at("before-handler")
        said = {"said": f"{self.consumer} {each.aggregate_id}:{each.seq or each.id}"}
        written = session.execute(INSERT, said)
        if self._colour == "async":
            return self.after(written)
        return self.trap.at("in-handler")

    async def after(self, written):
        await written
        self.trap.at("in-handler")


def trap_marks(trap):
    for words in inbox_flow.WORDS.values():
        keep = words.keep

        async def trapped(link, course, keep=keep):
            trap.at("before-marks")
            await keep(link, course)

        words.keep = trapped


async def work(asked, inbox, handler):
    batch = [message(seq, aggregate) for aggregate, seq in asked.get("messages", ())]
    match asked["verb"]:
        case "apply":
            return endings(await inbox.apply(asked["consumer"], batch, handler))
        case "singly":
            return endings(await inbox.apply(asked["consumer"], batch, handler, singly=True))
        case "retry":
            return endings(await inbox.retry(asked["consumer"], ALL, handler))
        case "skip":
            return (await Parked(inbox).skip(asked["sequence"])).told
        case "much":
            return await much(asked, inbox, handler, batch)


async def much(asked, inbox, handler, batch):
    """Whatever comes, in batches as a broker would deliver them, again and again."""
    dice = random.Random(os.getpid())
    while True:
        start = dice.randrange(len(batch))
        part = batch[start : start + dice.randint(1, 20)]
        singly = dice.random() < 0.2
        try:
            await inbox.apply(asked["consumer"], part, handler, singly=singly)
            await inbox.retry(asked["consumer"], ALL, handler)
        except SemelError as error:
            say(error=str(error))


async def main(asked):
    trap = Trap(asked)
    trap_marks(trap)
    is_sync = asked["colour"] == "sync"
    make = sa.create_engine if is_sync else create_async_engine
    engine = make(with_driver(parse(asked["url"]), asked["colour"]))
    sa.event.listen(
        engine if is_sync else engine.sync_engine, "commit", lambda _: trap.at("before-commit")
    )
    inbox = SQLInbox(engine, idle_s=asked.get("idle_s", 60.0))
    try:
        done = await work(asked, inbox, Handler(asked, trap))
        trap.at("after-commit")
        say(done=done)
    except SemelError as error:
        say(error=type(error).__name__)


if __name__ == "__main__":
    serve(lambda asked: asyncio.run(main(asked)))
