"""The example `orders_api`, run for real: a server of its own, on SQLite and on PostgreSQL."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import schemathesis
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from semel.stores.sql.lines import parse, with_driver
from support.process import HOST, ServerProcess, free_port, new_folder, wait_until
from support.web import Python

TESTS = Path(__file__).parents[1]
EXAMPLE = TESTS.parent / "examples" / "orders_api"
HOW_TO = TESTS.parent / "docs" / "how-to" / "an-orders-api.md"
BOOK = {"item": "book", "cents": 4000, "card": "visa-1"}
LEASE_S = 2

pytestmark = pytest.mark.timeout(180)


@dataclass
class Api(ServerProcess):
    """The example under uvicorn, and its two databases."""

    databases: dict[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def url(self):
        return f"http://{HOST}:{self.port}"

    def probe(self):
        httpx.get(f"{self.url}/openapi.json", timeout=5).raise_for_status()

    def order(self, key, wanted=BOOK, *, api_key="key-of-ann"):
        headers = {"X-API-Key": api_key}
        if key is not None:
            headers["Idempotency-Key"] = f'"{key}"'
        return httpx.post(f"{self.url}/orders", json=wanted, headers=headers, timeout=30)

    def get(self, path, *, api_key="key-of-ann"):
        return httpx.get(f"{self.url}{path}", headers={"X-API-Key": api_key}, timeout=30)

    def sql(self, statement, *, of="ORDERS_URL"):
        engine = sa.create_engine(with_driver(parse(self.databases[of]), "sync"))
        with engine.begin() as connection:
            done = connection.execute(sa.text(statement))
            found = done.scalars().all() if done.returns_rows else []
        engine.dispose()
        return found

    def counts(self):
        """Charges, orders, events."""
        return (
            *self.sql("SELECT count(*) FROM bank_charges", of="BANK_URL"),
            *self.sql("SELECT count(*) FROM orders"),
            *self.sql("SELECT count(*) FROM event_outbox"),
        )


def start_api(url, *, bank_answers_after_s=0.0, app="shop:app", **more):
    folder = new_folder("orders")
    databases = {
        "ORDERS_URL": url or f"sqlite:///{folder}/orders.db",
        "BANK_URL": url or f"sqlite:///{folder}/bank.db",
    }
    variables = {
        **databases,
        "BANK_ANSWERS_AFTER_S": str(bank_answers_after_s),
        "ORDERS_LEASE_S": str(LEASE_S),
        "PYTHONPATH": str(TESTS),
        "PAUSED": str(folder / "paused"),
        **more,
    }
    python = Python("orders_api", Path(sys.executable), "venv", tuple(variables.items()))
    port = free_port()
    words = [
        *("-m", "uvicorn", app, "--app-dir", str(EXAMPLE)),
        *("--host", HOST, "--port", str(port), "--log-level", "warning"),
    ]
    return Api(python, words, port, folder, databases=databases).start()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request):
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else None


@pytest.fixture
def api(database_url):
    server = start_api(database_url)
    yield server
    server.stop()


@pytest.fixture
def slow_bank_api(database_url):
    """Its bank moves the money at once and says so a good while later."""
    server = start_api(database_url, bank_answers_after_s=1.5)
    yield server
    server.stop()


def told(answer):
    assert answer.headers["content-type"] == "application/problem+json"
    return answer.status_code, answer.json()["type"].removeprefix("urn:semel:problem:")


def test_an_order_is_placed_once_and_can_be_read(api):
    key = str(uuid4())
    first, again = api.order(key), api.order(key)
    assert first.status_code == 201, api.log_tail()
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert api.counts() == (1, 1, 1)
    order = first.json()
    assert api.get("/orders").json() == [order]
    assert api.get(f"/orders/{order['id']}").json() == order
    assert api.get(f"/orders/{order['id']}", api_key="key-of-bob").status_code == 404
    assert api.get("/orders", api_key="key-of-bob").json() == []

    # Whatever is refused leaves nothing behind.
    assert told(api.order(key, {**BOOK, "item": "pen"})) == (422, "key-reused")
    assert told(api.order(None)) == (400, "key-missing")
    assert api.order(str(uuid4()), {**BOOK, "cents": 0}).status_code == 422
    assert api.counts() == (1, 1, 1)

    # A refusal of the bank's is an answer too.
    broke = str(uuid4())
    for replayed in (None, "true"):
        declined = api.order(broke, {**BOOK, "card": "empty"})
        assert declined.status_code == 402
        assert declined.headers.get("idempotent-replayed") == replayed
    assert api.counts() == (1, 1, 1)

    # The same key of somebody else is another key.
    assert api.order(key, api_key="key-of-bob").json()["id"] != order["id"]
    assert api.counts() == (2, 2, 2)

    # Who may not order any more is not shown what was answered before.
    api.sql("UPDATE customers SET may_order = false WHERE tenant = 'ann'")
    assert api.order(key).status_code == 403
    assert api.order(key, api_key="key-of-eve").status_code == 401
    api.sql("UPDATE customers SET may_order = true WHERE tenant = 'ann'")
    assert api.order(key).content == first.content


def test_many_clicks_are_one_order(slow_bank_api):
    api, key = slow_bank_api, str(uuid4())
    with ThreadPoolExecutor(8) as clicks:
        answers = list(clicks.map(lambda _: api.order(key), range(8)))
    placed = [answer for answer in answers if answer.status_code == 201]
    assert len({answer.content for answer in placed}) == 1
    assert {told(a) for a in answers if a.status_code != 201} <= {(409, "in-progress")}
    assert api.counts() == (1, 1, 1)


# --- killed -------------------------------------------------------------------------------------

KILLED = {
    "before the payment": (0, 0, 0),
    "while the bank answers": (1, 0, 0),
    "after the receipt is recorded": (1, 0, 0),
    "before the commit": (1, 0, 0),
    "after the commit": (1, 1, 1),
}
"""Where, and what there is then: charges, orders, events."""


def test_the_page_tells_of_every_place():
    places = re.findall(r"^\| ([a-z ]+) \|", HOW_TO.read_text(), flags=re.MULTILINE)
    assert places == list(KILLED)


# Two starts of a server each: PostgreSQL where it is its own commit that counts.
@pytest.mark.parametrize(
    ("database_url", "place"),
    [("sqlite", place) for place in KILLED]
    + [("postgres", "before the commit"), ("postgres", "after the commit")],
    indirect=["database_url"],
)
def test_a_server_killed_in_the_middle_is_made_good_by_the_retry(database_url, place):
    api = start_api(database_url, app="support.orders_paused:app", PAUSE_AT=place)
    try:
        check_killed(api, place)
    finally:
        api.stop()


def check_killed(api, place):
    key = str(uuid4())
    with ThreadPoolExecutor(1) as clicks:
        cut = clicks.submit(api.order, key)
        wait_until((api.folder / "paused").exists, f"the server to stop {place}")
        api.kill()
        with pytest.raises(httpx.TransportError):
            cut.result()
    assert api.counts() == KILLED[place]

    api.start()
    answers = []

    def answered():
        answers.append(api.order(key))
        return answers[-1].status_code == 201

    wait_until(answered, "the dead server's lease to end")
    *waiting, placed = answers
    assert {told(answer) for answer in waiting} <= {(409, "in-progress")}
    assert ("idempotent-replayed" in placed.headers) is (place == "after the commit")
    assert api.order(key).content == placed.content
    assert api.counts() == (1, 1, 1)
    receipt = [placed.json()["receipt"]]
    assert api.sql("SELECT receipt FROM orders") == receipt
    assert api.sql("SELECT receipt FROM bank_charges", of="BANK_URL") == receipt


# --- its OpenAPI --------------------------------------------------------------------------------

# Quick, thorough enough to leave every documented answer behind, and the same each time.
SEARCH = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_the_api_answers_as_its_openapi_says(api):
    """Schemathesis makes requests of the schema, right and wrong ones, and checks the answers."""
    schema = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    asked = []
    for found in schema.get_all_operations():
        for mode in schemathesis.GenerationMode:

            @SEARCH
            @given(case=found.ok().as_strategy(generation_mode=mode))
            def check(case):
                asked.append(ask(case))

            check()
    statuses = {response.status_code for response in asked}
    assert {200, 201, 400, 404, 422} <= statuses
    assert max(statuses) < 500
    orders = {response.json()["id"] for response in asked if response.status_code == 201}
    assert api.counts() == (len(orders),) * 3


def ask(case):
    response = case.call(headers={"X-API-Key": "key-of-ann"})
    # No schema can say which keys were used before.
    reused = b"urn:semel:problem:key-reused" in response.content
    case.validate_response(response, excluded_checks=[positive_data_acceptance] if reused else [])
    return response


def test_the_demo_ends_as_promised():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "try"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 charges, 2 orders, 2 events" in done.stdout
    assert "403: this API key may not order any more" in done.stdout
