"""A process that holds a key and can be killed or frozen at a named point.

    python -m support.holder URL KEY --colour sync --at POINT --do kill|stop --crash retry|hold|ask

The receiver of the effect is a file in $HOLDER_FOLDER, one line per effect, written by one
`write`; it dedupes by the key it is given, as a payment provider would (`--receiver plain` does
not). With `--crash ask` a vanished attempt is looked up there. After the effect the body returns,
or `--then` it fails, lingers for two leases, or stays until the trap springs. The process prints
the result it got, or the name of the error.

A point is one of `POINTS`, or `before-VERB` or `after-VERB` of any verb, `in-recover`,
`in-replay`, or `before-write`: between a row that was read and the row that is written, on
databases where these are two statements.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

import semel
from semel.codec import JSONCodec
from semel.guard import Recovered, Retry
from support.wrapped import HOT

POINTS = (
    "before-claim",
    "after-claim",
    "before-effect",
    "after-effect",
    "after-step",
    "before-complete",
    "after-complete",
)


PAUSES_S = {"linger": 1.0, "stay": 60.0}


class Receiver:
    """Applies an effect, and remembers by whom. Two at once are applied one after the other."""

    def __init__(self, folder, dedupes):
        self._file = Path(folder) / "effects"
        self._dedupes = dedupes

    def effects(self):
        return self._file.read_text().splitlines() if self._file.exists() else []

    def find(self, key):
        """The receipt for this key, or None."""
        return next((line.split()[1] for line in self.effects() if line.split()[0] == key), None)

    def apply(self, key):
        with self._file.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if self._dedupes and (receipt := self.find(key)):
                return receipt
            receipt = f"by-{os.getpid()}"
            file.write(f"{key} {receipt}\n")
        return receipt


class Trap:
    """Springs once, at its point."""

    def __init__(self, point, action):
        self._point = point
        self._action = action

    def at(self, point):
        if point == self._point:
            self._point = None
            print("trap", flush=True)
            os.kill(os.getpid(), signal.SIGKILL if self._action == "kill" else signal.SIGSTOP)


class TrappedLedger:
    def __init__(self, ledger, trap):
        self._ledger = ledger
        self._trap = trap

    def __getattr__(self, verb):
        inner = getattr(self._ledger, verb)
        if verb not in HOT:
            return inner

        async def trapped(*args, **kwargs):
            self._trap.at(f"before-{verb}")
            answer = await inner(*args, **kwargs)
            self._trap.at(f"after-{verb}")
            return answer

        return trapped


class TrappedStore:
    def __init__(self, store, trap):
        self._store = store
        self._trap = trap
        self._ledgers = {}

    def ledger(self, colour):
        if colour.name not in self._ledgers:
            self._ledgers[colour.name] = TrappedLedger(self._store.ledger(colour), self._trap)
        return self._ledgers[colour.name]

    def close(self):
        self._store.close()

    async def aclose(self):
        await self._store.aclose()


class TrappedCodec(JSONCodec):
    def __init__(self, trap):
        self._trap = trap

    def decode(self, data):
        self._trap.at("in-replay")
        return super().decode(data)


def trap_writes(trap):
    """Make this process spring between reading a row and writing it."""
    from semel.stores.sql import generic

    write = generic.write

    async def trapped(link, before, after):
        if after:
            trap.at("before-write")
        return await write(link, before, after)

    generic.write = trapped


def ask_the_world(receiver, trap):
    def recover(attempt):
        trap.at("in-recover")
        receipt = receiver.find(attempt.child_key("charge"))
        return Retry() if receipt is None else Recovered(receipt)

    return recover


def go_on(then):
    """What the body does when the effect has happened."""
    if then == "fail":
        raise LookupError("declined")
    if then in PAUSES_S:
        time.sleep(PAUSES_S[then])


async def ago_on(then):
    if then in PAUSES_S:
        await asyncio.sleep(PAUSES_S[then])
    else:
        go_on(then)


def guarded(store, receiver, trap, options):
    """The function under test, in either colour, with the effect as a step of its own."""
    asks = options.crash == "ask"
    settings = {
        "store": store,
        "key": "{key}",
        "operation": "charge",
        "on_duplicate": "wait",
        "on_crash": ask_the_world(receiver, trap) if asks else options.crash,
        "on_failure": options.failure,
        "lease": options.lease,
        "ttl": 600,
        "wait_timeout": 60,
        "codec": TrappedCodec(trap),
    }

    def effect():
        trap.at("before-effect")
        receipt = receiver.apply(semel.current().child_key("charge"))
        trap.at("after-effect")
        return receipt

    def charge(key):
        receipt = semel.step("charge", effect)
        trap.at("after-step")
        go_on(options.then)
        return receipt

    async def acharge(key):
        receipt = await semel.step("charge", effect)
        trap.at("after-step")
        await ago_on(options.then)
        return receipt

    if options.colour == "sync":
        return semel.idempotent(**settings)(charge)
    painted = semel.idempotent(**settings)(acharge)

    def call(key):
        async def whole():
            try:
                return await painted(key)
            finally:
                await store.aclose()

        return asyncio.run(whole())

    return call


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("key")
    parser.add_argument("--colour", default="sync")
    parser.add_argument("--at", default=None)
    parser.add_argument("--do", default="kill")
    parser.add_argument("--crash", default="retry")
    parser.add_argument("--failure", default="unlock")
    parser.add_argument("--then", default="return")
    parser.add_argument("--lease", type=float, default=0.5)
    parser.add_argument("--receiver", default="dedupes")
    options = parser.parse_args()
    trap = Trap(options.at, options.do)
    receiver = Receiver(os.environ["HOLDER_FOLDER"], options.receiver == "dedupes")
    store = TrappedStore(semel.connect(options.url), trap)
    if options.at == "before-write":
        trap_writes(trap)
    call = guarded(store, receiver, trap, options)
    try:
        print(f"result {call(options.key)}", flush=True)
    except (semel.SemelError, LookupError) as error:
        print(f"error {type(error).__name__}", flush=True)
    finally:
        store.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
