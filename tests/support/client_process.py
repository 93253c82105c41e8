"""A client with a durable key that can be killed at a named point.

    python -m support.client_process KIND URL FILE --at after-key|after-answer

`after-key` is before anything was sent, `after-answer` before the answer was noted. Without a
point the process prints the answer's status and body.
"""

from __future__ import annotations

import argparse
import os
import signal

from semel.client import Intents
from support.client_kinds import KINDS, client

POINTS = ("after-key", "after-answer")


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("url")
    parser.add_argument("file")
    parser.add_argument("--at", choices=POINTS)
    options = parser.parse_args()
    intents = Intents(options.file)
    header = intents.headers("invoice-7")
    if options.at == "after-key":
        die()
    if options.at == "after-answer":
        intents.answered = die
    with client(options.kind, intents=intents) as asking:
        got = asking.ask("POST", options.url, json={"total": 40}, headers=header, timeout=30)
    print(got.status, got.body.decode())


if __name__ == "__main__":
    main()
