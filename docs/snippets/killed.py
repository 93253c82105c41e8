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


@semel.idempotent(key="charge:{order}", store="sqlite:///killed.db", on_duplicate="wait", lease=1)
def charge(order, amount):
    key = semel.current().child_key("charge")  # the same on every attempt
    receipt = bank_charge(order, amount, key)
    if semel.current().number == 1:
        os._exit(9)  # killed: no `finally`, no goodbye, nothing recorded
    return receipt


print(charge("o-7", 40))
print(BANK.read_text())
