"""What a scan goes through: vision, rule, answer, reward, done. Once, whoever dies on the way.

Each stage is a step of a guarded function. A worker that dies leaves its claim behind; when the
lease has ended, another one claims the scan as the next attempt, is handed the results of the
stages that were finished, and begins with the one that was not.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence

from pieces import CRASH, LEASE_S, PACE_S, URL, opened, publisher

from semel import current, idempotent, step
from semel.bus import get_next_seq
from semel.colour import ASYNC
from semel.errors import JobEndedError

WORKER = os.environ.get("SCAN_WORKER", "worker")

RULES = {
    "bottle": ("plastic", "rinse it, and put it with the plastics"),
    "can": ("metal", "put it with the metals"),
    "newspaper": ("paper", "tie it up, and put it with the paper"),
}
POINTS = 10

store = opened(URL)
events = publisher(store)
rewards = store.log(ASYNC)


# --- once
class BlurredError(Exception):
    """Nobody can tell what is in the picture, and looking again is no use."""


@idempotent(key="scan:{scan_id}", lease=LEASE_S, store=store)
async def scan(scan_id: str, picture: str) -> str:
    """From a picture to points; another call for the same scan gets the first one's answer."""
    try:
        return await stages(scan_id, picture)
    except JobEndedError:
        # The attempt before told the end, and died before that was recorded.
        return "ended"


async def stages(scan_id: str, picture: str) -> str:
    try:
        label = await step("vision", vision, scan_id, picture)
    except BlurredError as error:
        await events.fail(scan_id, {"note": str(error), "worker": WORKER}, current().number)
        return "failed"
    kind = await step("rule", rule, scan_id, label)
    answer = await step("answer", write_answer, scan_id, label, kind)
    points = await step("reward", reward, scan_id)
    await tell(scan_id, "done", [f"{answer} ({points} points)"])
    return answer


# --- stages
async def vision(scan_id: str, picture: str) -> str:
    await tell(scan_id, "vision", ["looks at the picture", "finds its edges"])
    if picture not in RULES:
        raise BlurredError("the picture is blurred")
    await tell(scan_id, "vision", [f"sees a {picture}"], first=2)
    return picture


async def rule(scan_id: str, label: str) -> str:
    kind, _ = RULES[label]
    await tell(scan_id, "rule", [f"looks up the rule for a {label}", f"it is {kind}"])
    return kind


async def write_answer(scan_id: str, label: str, kind: str) -> str:
    _, answer = RULES[label]
    await tell(scan_id, "answer", [f"writes about {kind}", "reads it once more"])
    return answer


async def reward(scan_id: str) -> int:
    """Whoever repeats this after a crash gives nothing: the scan's id is known there."""
    await tell(scan_id, "reward", [f"gives {POINTS} points"])
    await rewards.append("scan:rewards", b"%d" % POINTS, id=scan_id)
    await tell(scan_id, "reward", ["they are given"], first=1)
    return POINTS


# --- telling
async def tell(scan_id: str, stage: str, notes: Sequence[str], *, first: int = 0) -> None:
    """Say how it goes on; and perhaps die, before or after that was heard."""
    for number, note in enumerate(notes, first):
        die_perhaps()
        told = {"note": note, "worker": WORKER}
        await events.publish(scan_id, stage, get_next_seq(stage, number), told, current().number)
        die_perhaps()
        await asyncio.sleep(random.uniform(0.5, 1.5) * PACE_S)


def die_perhaps() -> None:
    """As a machine does: nothing is closed, nobody is told."""
    if random.random() < CRASH / 2:
        os._exit(137)
