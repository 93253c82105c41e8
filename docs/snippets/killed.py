import os
from pathlib import Path

import semel

BANK = Path("bank.txt")  # the bank's own book: one line per charge


def bank_charge(order, amount, key):
    """Like most providers, it answers a key it has seen with the first receipt."""
    book = BANK.read_text().splitlines() if BANK.exists() else []
    if not any(line.startswith(key) for line in book):
        with BANK.open("a") as bank:
            bank.write(f"{key} {order} {amount}\n")
    return {"receipt": key[:8]}


@semel.idempotent(key="charge:{order}", store="sqlite:///semel.db", on_duplicate="wait", lease=1)
def charge(order, amount):
    key = semel.current().child_key("charge")  # the same on every attempt
    receipt = bank_charge(order, amount, key)
    if semel.current().number == 1:
        os._exit(9)  # killed: no `finally`, no goodbye, nothing recorded
    return receipt


if os.fork() == 0:
    charge("o-7", 40)  # the child dies in here

os.wait()
receipt = charge("o-7", 40)  # waits for the lease to end, takes over, asks the bank again
print(receipt, BANK.read_text())
assert len(BANK.read_text().splitlines()) == 1
