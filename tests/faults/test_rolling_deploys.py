"""Two versions of the code on one store: every row of the table in docs/how-to/deploy-behind.md.

Each row has an old and a new module of the same name. A process with one of them makes a call, and
a process with the other one repeats it. Both directions are tested.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest

from support.proxies import PAGE

TABLE = PAGE.read_text("utf-8").partition("\n| You change |")[2].partition("\n\n")[0]
ROWS = {
    row.split("|")[1].strip(): [cell.strip().strip("*") for cell in row.split("|")[2:4]]
    for row in TABLE.splitlines()[2:]
}
"""What changes, and what a repeat does in new code and in old code."""

PLAIN = """
@semel.idempotent(key="charge:{order}", store=store)
def charge(order, amount):
    ran.append(order)
    return amount
"""

ARGUMENT = """
@dataclass(frozen=True)
class Order:
    id: str
    amount: int

@semel.idempotent(key="charge:{order.id}", store=store)
def charge_order(order):
    ran.append(order)
    return order.amount

def charge(id, amount):
    return charge_order(Order(id, amount))
"""

RESULT = """
@dataclass
class Receipt:
    order: str
    amount: int

@semel.idempotent(key="charge:{order}", store=store)
def charge(order, amount):
    ran.append(order)
    return Receipt(order, amount)
"""

ENUM = """
class State(enum.Enum):
    PAID = "paid"

@semel.idempotent(key="charge:{order}", store=store)
def charge(order, amount):
    ran.append(order)
    return State.PAID
"""


@dataclass
class Change:
    """From an old module to a new one. `edits`: text of the old one, and what replaces it.

    `before`: edits of the old module itself.
    """

    old: str
    edits: dict[str, str]
    before: dict[str, str] | None = None

    def modules(self):
        old = edited(self.old, self.before or {})
        return old, edited(old, self.edits)


def edited(text, edits):
    for before, after in edits.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


SIGNATURE = {"(order, amount):": "(order, amount, currency='EUR'):"}
COMPARED = {"store=store": "store=store, fingerprint=lambda order, *_, **__: order"}
RENAMED = {"def charge": "def pay", "return amount": "return amount\n\ncharge = pay"}
NO_KEY = {'key="charge:{order}", ': ""}
FIELD = {"    amount: int\n": "    amount: int\n    currency: str = 'EUR'\n"}
REQUIRED_FIELD = {
    "    amount: int\n": "    amount: int\n    currency: str\n",
    "Receipt(order, amount)": "Receipt(order, amount, 'EUR')",
}
LESS = {"    amount: int\n": "", "Receipt(order, amount)": "Receipt(order)"}
ALIASED = {
    "Receipt": "Bill",
    "return Bill(order, amount)": "return Bill(order, amount)\n\nReceipt = Bill",
}
SETTLED = {'PAID = "paid"': 'SETTLED = "paid"', "State.PAID": "State.SETTLED"}
BOTH_NAMES = {'PAID = "paid"': 'SETTLED = "paid"\n    PAID = "paid"', "State.PAID": "State.SETTLED"}
LATE = {'PAID = "paid"': 'PAID = "paid"\n    LATE = "late"', "State.PAID": "State.LATE"}

CHANGES = {
    "the body": Change(PLAIN, {"return amount": "return amount * 2"}),
    'add `version="2"`': Change(PLAIN, {"store=store": 'store=store, version="2"'}),
    "add a parameter with a default, with `key=`": Change(PLAIN, SIGNATURE),
    "add a parameter with a default, with `fingerprint=` in both versions": Change(
        PLAIN, SIGNATURE, COMPARED
    ),
    "add a parameter with a default, without `key=`": Change(PLAIN, SIGNATURE, NO_KEY),
    "rename a parameter, with `key=`": Change(PLAIN, {"amount": "cents"}),
    "rename a parameter, without `key=`": Change(PLAIN, {"amount": "cents"}, NO_KEY),
    "rename or move the function, with `key=`": Change(PLAIN, RENAMED),
    "rename or move the function, without `key=`": Change(PLAIN, RENAMED, NO_KEY),
    "rename the function, with `operation=` in the new version": Change(
        PLAIN, RENAMED | {"store=store": 'store=store, operation="shop.charge"'}
    ),
    "add a field with a default to a dataclass in the arguments": Change(ARGUMENT, FIELD),
    "add a field with a default to a dataclass in the result": Change(RESULT, FIELD),
    "add a field without a default to a dataclass in the result": Change(RESULT, REQUIRED_FIELD),
    "remove a field of a dataclass in the result": Change(RESULT, LESS),
    "rename or move a dataclass in the result": Change(RESULT, {"Receipt": "Bill"}),
    "rename a dataclass in the result, with an alias": Change(RESULT, ALIASED),
    "change the value of an Enum member in the result": Change(ENUM, {'"paid"': '"settled"'}),
    "rename an Enum member in the result": Change(ENUM, SETTLED),
    "rename an Enum member in the result, with an alias": Change(ENUM, BOTH_NAMES),
    "add an Enum member and return it": Change(ENUM, LATE),
}


CALLER = """
import json
import sys
import types

import semel

HEAD = '''
import enum
from dataclasses import dataclass

import semel

ran = []
store = semel.connect(URL)
'''


def module(code, url):
    shop = sys.modules["shop"] = types.ModuleType("shop")
    shop.URL = url
    exec(HEAD + code, shop.__dict__)
    return shop


def became(shop, order):
    try:
        result = shop.charge(order, 5)
    except semel.IdempotencyConflictError:
        return "conflict"
    except semel.ResultLostError:
        return "lost"
    finally:
        shop.store.close()
    return "runs again" if shop.ran else "replays", repr(result)


for line in sys.stdin:
    code, url, order = json.loads(line)
    try:
        said = became(module(code, url), order)
    except Exception as error:
        said = repr(error)
    print(json.dumps(said), flush=True)
"""


class Process:
    """A process that has one version of the code at a time, each with a store of its own."""

    def __init__(self):
        self._popen = subprocess.Popen(
            [sys.executable, "-c", CALLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, code, url, order):
        print(json.dumps([code, url, order]), file=self._popen.stdin, flush=True)
        return json.loads(self._popen.stdout.readline())

    def end(self):
        self._popen.stdin.close()
        self._popen.stdout.close()
        assert self._popen.wait(10) == 0


@pytest.fixture(scope="module")
def processes():
    made = [Process(), Process()]
    yield made
    for process in made:
        process.end()


def told(became):
    return became if isinstance(became, str) else became[0]


def test_table_has_every_change():
    assert [*CHANGES] == [*ROWS]


@pytest.mark.parametrize("change", CHANGES)
def test_repeat_in_the_other_version_does_what_the_page_says(change, processes, tmp_path):
    old, new = CHANGES[change].modules()
    first, second = processes
    url = f"sqlite:///{tmp_path}/semel.db"
    assert told(first.call(old, url, "old")) == "runs again", "for the first time"
    assert told(second.call(new, url, "new")) == "runs again"
    in_new, in_old = second.call(new, url, "old"), first.call(old, url, "new")
    page_new, page_old = ROWS[change]
    assert [told(in_new), told(in_old)] == [page_new.split(",")[0], page_old.split(",")[0]]


def test_added_field_is_replayed_with_its_default(processes, tmp_path):
    old, new = CHANGES["add a field with a default to a dataclass in the result"].modules()
    url = f"sqlite:///{tmp_path}/semel.db"
    processes[0].call(old, url, "o")
    assert "currency='EUR'" in processes[1].call(new, url, "o")[1]


def test_version_gives_each_version_an_effect_of_its_own(processes, tmp_path):
    old, new = CHANGES['add `version="2"`'].modules()
    url = f"sqlite:///{tmp_path}/semel.db"
    for process, code in zip(processes, (old, new), strict=True):
        assert told(process.call(code, url, "o")) == "runs again"
        assert told(process.call(code, url, "o")) == "replays"
