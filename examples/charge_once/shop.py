"""A shop that charges a card, twice over: once as most code does it, once with Semel.

The bank is a file with one line per charge, written by the receiver, so nobody can argue about
how often money moved. Like a real payment provider it honours an idempotency key when it is
given one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import semel

FOLDER = Path(os.environ["SHOP_FOLDER"])
BANK = FOLDER / "bank.jsonl"


def charges(order: str) -> list[dict[str, object]]:
    """What the bank has on record for an order."""
    lines = BANK.read_text().splitlines() if BANK.exists() else []
    return [charge for charge in map(json.loads, lines) if charge["order"] == order]


def bank_charge(order: str, amount: int, key: str | None = None) -> str:
    """Move money. With a key, the bank answers a repeated request with the first receipt."""
    for charge in charges(order):
        if key is not None and charge["key"] == key:
            return str(charge["receipt"])
    receipt = f"r-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    with BANK.open("a") as bank:
        bank.write(json.dumps({"order": order, "amount": amount, "key": key, "receipt": receipt}))
        bank.write("\n")
    return receipt


def charge_card_hopefully(order: str, amount: int) -> str:
    """The code most of us have written."""
    return bank_charge(order, amount)


@semel.idempotent(
    key="charge:{order}",
    store=f"sqlite:///{FOLDER}/semel.db",
    on_duplicate="wait",
    lease=2,
    ttl=3600,
)
def charge_card(order: str, amount: int) -> str:
    """The same, guarded. Two effects, each a step that is done once."""
    receipt = semel.step("charge", charge_at_the_bank, order, amount)
    if os.environ.get("DIE_HERE") and semel.current().number == 1:
        print(f"      process {os.getpid()}: charged, and now killed before it can answer")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    semel.step("mail", send_mail, order)
    return receipt


def charge_at_the_bank(order: str, amount: int) -> str:
    return bank_charge(order, amount, key=semel.current().child_key("charge"))


def send_mail(order: str) -> None:
    with (FOLDER / "mail.txt").open("a") as mail:
        mail.write(f"receipt for {order}\n")


if __name__ == "__main__":
    how, order = sys.argv[1], sys.argv[2]
    charge = charge_card if how == "guarded" else charge_card_hopefully
    # In one write: `print` may take two, and the other click's line falls between them.
    sys.stdout.write(f"      process {os.getpid()}: receipt {charge(order, 40)}\n")
