"""`make demo`: a double charge without Semel, one charge with it, and a process killed mid-charge.

Everything runs on SQLite in a temporary folder: no server, no question asked. Exits 0 when the
money moved as often as it should have.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
STARTED = time.monotonic()


def say(text: str = "") -> None:
    """A line, with a moment to read it."""
    print(text, flush=True)
    time.sleep(float(os.environ.get("DEMO_PAUSE_S", "0.7")))


def title(text: str) -> None:
    say()
    say(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text)


def start(how: str, order: str, folder: str, **env: str) -> subprocess.Popen[bytes]:
    """A customer's click, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "shop.py"), how, order],
        env={**os.environ, "SHOP_FOLDER": folder, **env},
    )


def click_twice(how: str, order: str, folder: str) -> None:
    clicks = [start(how, order, folder) for _ in range(2)]
    for click in clicks:
        click.wait()


def charged(order: str, folder: str) -> int:
    bank = Path(folder, "bank.jsonl")
    return bank.read_text().count(f'"{order}"') if bank.exists() else 0


def verdict(order: str, folder: str, expected: int) -> bool:
    times = charged(order, folder)
    say(f"   -> the bank moved the money {times} time{'' if times == 1 else 's'}")
    return times == expected


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="semel-demo-") as folder:
        say("Semel (Latin: once). A shop charges 40 for an order; the customer is impatient.")

        title("1. Without Semel: the customer double-clicks")
        click_twice("hopefully", "order-1", folder)
        good = verdict("order-1", folder, 2)

        title("2. With @semel.idempotent: the same double click, two processes, one SQLite file")
        click_twice("guarded", "order-2", folder)
        good &= verdict("order-2", folder, 1)
        say("      both got the same receipt: the second waited for the first")

        title("3. The process is killed right after the charge, before it could answer")
        start("guarded", "order-3", folder, DIE_HERE="1").wait()
        say("      the customer tries again; the dead process holds the key until its lease ends")
        start("guarded", "order-3", folder).wait()
        good &= verdict("order-3", folder, 1)
        mails = Path(folder, "mail.txt").read_text().count("order-3")
        say(f"      resumed behind the charge: mail sent {mails} time")
        good &= mails == 1

        title("4. What the ledger remembers of that order")
        explain(folder)

        say()
        say("What Semel cannot do: make a stranger forget. Between the bank's answer and our")
        say("record lies a moment; the shop closes it by handing the bank `child_key`, which is")
        say("the same on every attempt. Where the receiver knows no keys, choose on_crash=.")
        say()
        took = time.monotonic() - STARTED
        say(f"{'All as promised' if good else 'NOT as promised'}, in {took:.0f} seconds.")
        return 0 if good else 1


def explain(folder: str) -> None:
    from semel.admin import Admin

    story = Admin(f"sqlite:///{folder}/semel.db").explain("charge:order-3")
    assert story is not None
    for attempt in story.tries:
        print(f"      attempt {attempt.number} by {attempt.attempt}: {attempt.ending}")
    for name, reading in story.steps.items():
        print(f"      step {name}: {reading.text}")
    say(f"      the next call {story.next_call.sentence}")


if __name__ == "__main__":
    sys.exit(main())
