"""A process that holds a key and can be killed or frozen at a named point.

    python -m support.holder URL KEY --colour sync --at POINT --do kill|stop --crash retry|hold

The receiver of the effect is a file in $HOLDER_FOLDER, one line per effect, written by one
`write`; it dedupes by the key it is given, as a payment provider would (`--receiver plain` does
not). The process prints the result it got, or the name of the error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import semel

POINTS = (
    "before-claim",
    "after-claim",
    "before-effect",
    "after-effect",
    "after-step",
    "before-complete",
    "after-complete",
)


class Receiver:
    """Applies an effect, and remembers by whom."""

    def __init__(self, folder, dedupes):
        self._file = Path(folder) / "effects"
        self._dedupes = dedupes

    def effects(self):
        return self._file.read_text().splitlines() if self._file.exists() else []

    def apply(self, key):
        for line in self.effects():
            if self._dedupes and line.split()[0] == key:
                return line.split()[1]
        receipt = f"by-{os.getpid()}"
        with self._file.open("a") as file:
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
        if verb not in ("claim", "complete"):
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


def guarded(store, receiver, trap, *, colour, crash, lease):
    """The function under test, in either colour, with the effect as a step of its own."""
    settings = {
        "store": store,
        "key": "{key}",
        "operation": "charge",
        "on_duplicate": "wait",
        "on_crash": crash,
        "lease": lease,
        "ttl": 600,
        "wait_timeout": 60,
    }

    def effect():
        trap.at("before-effect")
        receipt = receiver.apply(semel.current().child_key("charge"))
        trap.at("after-effect")
        return receipt

    def charge(key):
        receipt = semel.step("charge", effect)
        trap.at("after-step")
        return receipt

    async def acharge(key):
        receipt = await semel.step("charge", effect)
        trap.at("after-step")
        return receipt

    if colour == "sync":
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
    parser.add_argument("--lease", type=float, default=0.5)
    parser.add_argument("--receiver", default="dedupes")
    options = parser.parse_args()
    trap = Trap(options.at, options.do)
    receiver = Receiver(os.environ["HOLDER_FOLDER"], options.receiver == "dedupes")
    store = TrappedStore(semel.connect(options.url), trap)
    call = guarded(
        store, receiver, trap, colour=options.colour, crash=options.crash, lease=options.lease
    )
    try:
        print(f"result {call(options.key)}", flush=True)
    except semel.SemelError as error:
        print(f"error {type(error).__name__}", flush=True)
    finally:
        store.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
