"""A request that nobody knows the end of is settled by hand, and answered so."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import shlex
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from semel import admin, idempotent
from semel.admin import Admin, Recovered, Retry
from semel.cli.app import app as cli
from semel.colour import SYNC, run
from semel.errors import SettingsError
from semel.http import IdempotencyMiddleware, Response, Rule, WSGIMiddleware
from semel.keys import child_key, make_key
from semel.stores import MemoryStore, SQLiteStore
from semel.values import Outcome, Record

KEY = {"Idempotency-Key": '"k"'}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "semel.db"


@pytest.fixture
def desk(path):
    with Admin(f"sqlite:///{path}") as desk:
        yield desk


@pytest.fixture
async def client(path):
    """A door that holds what failed; its handler fails until it is told to work."""
    runs: list[str] = []

    async def app(scope, receive, send):
        runs.append(scope["path"])
        if len(runs) == 1:
            raise ConnectionError("the bank did not answer")
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    store = SQLiteStore(path)
    door = IdempotencyMiddleware(app, store=store, scope="shop", rule=Rule(on_error="hold"))
    transport = httpx.ASGITransport(door, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        client.runs = runs
        assert (await client.post("/orders", headers=KEY)).status_code == 500
        assert (await client.post("/orders", headers=KEY)).status_code == 409
        yield client
    await store.aclose()


def settle(desk, settlement, **more):
    answer = desk.resolve("k", settlement, tenant="shop", http=True, **more)
    assert isinstance(answer, admin.Changed)


async def test_what_was_held_can_be_told_to_have_happened(client, desk):
    settle(desk, Recovered({"order": 7}), status=201)
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.json()) == (201, {"order": 7})
    assert answer.headers["idempotent-replayed"] == "true"
    assert len(client.runs) == 1


async def test_without_a_status_it_is_200(client, desk):
    settle(desk, Recovered(None))
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.json()) == (200, None)


async def test_what_was_held_can_be_told_to_have_failed(client, desk):
    settle(desk, admin.ReplayedError("the bank refused"))
    answer = await client.post("/orders", headers=KEY)
    assert answer.status_code == 500
    assert answer.json()["type"] == "urn:semel:problem:interrupted"
    assert "the bank refused" in answer.json()["detail"]
    assert len(client.runs) == 1


async def test_what_was_held_can_be_let_run(client, desk):
    settle(desk, Retry())
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.content) == (201, b"made")
    assert len(client.runs) == 2


async def test_a_value_that_is_no_json_is_told_to_be_lost(client, desk):
    settle(desk, Recovered({1, 2}))
    answer = await client.post("/orders", headers=KEY)
    assert answer.status_code == 410
    assert json.loads(answer.content)["type"] == "urn:semel:problem:response-not-kept"


async def test_a_recorded_response_can_be_read_by_people(client, desk):
    settle(desk, Retry())
    await client.post("/orders", headers=KEY)
    story = desk.explain("k", tenant="shop", http=True)
    assert story.outcome.text == "201 | made"
    assert story.record.outcome.status == 201
    assert story.record.key.operation == "POST /orders"


async def test_a_guard_of_the_same_key_is_not_blocked_by_a_client(client, desk, path):
    assert desk.explain("k", tenant="shop") is None


# --- a status that cannot be ----------------------------------------------------------------------


@pytest.mark.parametrize("status", [42, 0, -1, 100, 199, 600, True, 201.0, "201"])
def test_a_status_that_is_none_is_refused_and_nothing_changes(client, desk, status):
    with pytest.raises(SettingsError, match="200 to 599"):
        settle(desk, Recovered(1), status=status)
    assert desk.explain("k", tenant="shop", http=True).outcome is None


@pytest.mark.parametrize("settlement", [Retry(), ValueError("card declined")], ids=repr)
def test_a_status_goes_with_a_value(client, desk, settlement):
    with pytest.raises(SettingsError, match="status goes with Recovered"):
        settle(desk, settlement, status=402)
    assert desk.explain("k", tenant="shop", http=True).outcome is None


async def test_a_refusal_is_a_value_with_its_status(client, desk):
    settle(desk, Recovered({"detail": "card declined"}), status=402)
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.json()) == (402, {"detail": "card declined"})


@pytest.mark.parametrize("status", [204, 205, 304])
async def test_a_status_without_a_body_is_answered_without_one(client, desk, status):
    settle(desk, Recovered(None), status=status)
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.content) == (status, b"")
    assert "content-length" not in answer.headers
    assert "content-type" not in answer.headers


@pytest.mark.parametrize("status", [42, 1000, -1])
async def test_an_odd_status_that_is_there_already_is_read_as_200(client, desk, path, status):
    settle_past_the_checks(desk, path, Outcome("value", b'{"order":7}', status))
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.json()) == (200, {"order": 7})


async def test_a_recorded_message_with_an_odd_status_is_told_to_be_lost(client, desk, path):
    settle_past_the_checks(desk, path, Outcome("value", b"42\r\n\r\nmade", 42))
    answer = await client.post("/orders", headers=KEY)
    assert answer.status_code == 410
    assert answer.json()["type"] == "urn:semel:problem:response-not-kept"


def settle_past_the_checks(desk, path, outcome):
    """As a release did that took any number."""
    record = desk.explain("k", tenant="shop", http=True).record
    store = SQLiteStore(path)
    settled = store.ledger(SYNC).resolve(
        record.key.id, fence=record.fence, outcome=outcome, ttl_s=None
    )
    assert run(settled)
    store.close()


def test_an_odd_status_does_not_break_a_wsgi_door():
    store = MemoryStore()

    def app(environ, start_response):
        raise ConnectionError("the bank did not answer")

    door = WSGIMiddleware(app, store=store, scope="shop", rule=Rule(on_error="hold"))
    with httpx.Client(transport=httpx.WSGITransport(door), base_url="http://shop") as client:
        with pytest.raises(ConnectionError):
            client.post("/orders", headers=KEY)
        record = Admin(store).explain("k", tenant="shop", http=True).record
        odd = Outcome("value", b"7", 42)
        ledger = store.ledger(SYNC)
        assert run(ledger.resolve(record.key.id, fence=record.fence, outcome=odd, ttl_s=None))
        assert client.post("/orders", headers=KEY).status_code == 200


# --- a whole response -----------------------------------------------------------------------------


async def test_it_may_be_settled_with_a_whole_response(client, desk):
    headers = ((b"content-type", b"text/plain"), (b"location", b"/orders/7"))
    settle(desk, Recovered(Response(201, headers, b"order 7")))
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.text) == (201, "order 7")
    assert answer.headers["location"] == "/orders/7"
    assert answer.headers["idempotent-replayed"] == "true"
    story = desk.explain("k", tenant="shop", http=True)
    assert story.record.outcome.status == 201
    assert story.outcome.text.startswith("201 | content-type: text/plain | ")


async def test_a_response_keeps_what_a_door_would_keep(client, desk):
    headers = ((b"set-cookie", b"session=1"), (b"content-length", b"99"), (b"x-order", b"7"))
    settle(desk, Recovered(Response(201, headers, b"made")))
    answer = await client.post("/orders", headers=KEY)
    assert answer.content == b"made"
    assert answer.headers["x-order"] == "7"
    assert "set-cookie" not in answer.headers


async def test_a_response_without_its_body_was_not_kept(client, desk):
    settle(desk, Recovered(Response(201, (), None)))
    answer = await client.post("/orders", headers=KEY)
    assert answer.status_code == 410
    assert desk.explain("k", tenant="shop", http=True).record.outcome.status == 201


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (Response(42, (), b""), "200 to 599"),
        (Response(201, (), "made"), "bytes"),
        (Response(204, (), b"made"), "204 has no body"),
        (Response(201, (("x-order", "7"),), b""), "bytes"),
        (Response(201, {b"x-order": b"7"}, b""), "pairs of bytes"),
    ],
)
def test_a_response_that_cannot_be_sent_is_refused(client, desk, response, why):
    with pytest.raises(SettingsError, match=why):
        settle(desk, Recovered(response))
    assert desk.explain("k", tenant="shop", http=True).outcome is None


def test_a_response_has_a_status_of_its_own(client, desk):
    with pytest.raises(SettingsError, match="Response has its own status"):
        settle(desk, Recovered(Response(201, (), b"")), status=202)


def test_a_guarded_function_may_return_a_response():
    """It was recorded by the codec, and is settled by it."""
    store, runs = MemoryStore(), []

    @idempotent(store=store, key="page", on_crash="hold")
    def page():
        runs.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        page()
    assert Admin(store).resolve("page", Recovered(Response(201, (), b"made")))
    assert page() == Response(201, (), b"made")
    assert len(runs) == 1


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def semel(path):
    """The command line, on the store behind the door."""

    def semel(verb, *words, key="k", typed=""):
        named = ("--http", "--tenant", "shop")
        args = ["ledger", verb, f"sqlite:///{path}", key, *named, *words]
        return CliRunner().invoke(cli, args, input=typed)

    return semel


async def test_a_request_is_settled_from_the_command_line(client, semel):
    settled = semel("resolve", "--value", '{"order": 7}', "--status", "201", "--yes")
    assert settled.exit_code == 0, settled.output
    answer = await client.post("/orders", headers=KEY)
    assert (answer.status_code, answer.json()) == (201, {"order": 7})


@pytest.mark.parametrize("status", ["42", "199", "600", "0", "-1", "x"])
def test_the_command_line_takes_no_status_that_is_none(client, semel, status):
    refused = semel("resolve", "--value", "1", "--status", status, typed="y\n")
    assert refused.exit_code == 2
    assert "[y/N]" not in refused.output, "it is refused before anybody is asked"
    assert semel("explain", "--json").stdout.count('"outcome": null') == 1


@pytest.mark.parametrize("way", [("--error", "card declined"), ("--retry",)], ids=str)
def test_the_command_line_says_how_to_settle_with_a_refusal(client, semel, way):
    refused = semel("resolve", *way, "--status", "402", "--yes")
    assert refused.exit_code == 2
    assert (
        "--status goes with --value; to settle with a refusal: "
        """--value '{"detail": "card declined"}' --status 402"""
    ) in refused.stderr


def test_the_question_names_the_status(client, semel):
    asked = semel("resolve", "--value", '{"order": 7}', "--status", "201")
    assert "Record that it happened, with 201 and {'order': 7}?" in asked.stderr


def test_a_version_and_http_are_too_much(client, semel):
    refused = semel("explain", "--version", "2")
    assert refused.exit_code == 2
    assert "--http" in refused.stderr


def test_what_is_not_found_is_looked_for_with_the_options_of_the_command_line(client, semel):
    for verb in (("explain",), ("resolve", "--retry", "--yes"), ("forget", "--yes")):
        said = semel(*verb, key="other")
        assert said.exit_code == 1
        for option in ("--tenant", "--version", "--operation", "--per-operation", "--http"):
            assert option in said.stderr
        assert "http=True" not in said.stderr


def test_the_key_that_a_provider_has_got_is_told(client, semel, desk):
    id = desk.explain("k", tenant="shop", http=True).record.key.id
    wanted = child_key(id, "charge")
    assert f"child key\t{wanted}\n" in semel("explain", "--child", "charge").stdout
    told = json.loads(semel("explain", "--child", "charge", "--json").stdout)
    assert told["child_key"] == wanted
    assert json.loads(semel("explain", "--json").stdout)["child_key"] is None
    assert "child key" not in semel("explain").stdout


def test_a_child_key_is_made_of_an_id_in_either_form():
    id = make_key("k").id
    assert child_key(id.hex(), "charge") == child_key(id, "charge")
    assert child_key(id.hex().upper(), "charge") == child_key(id, "charge")


@pytest.mark.parametrize("id", ["k", "ab", "", "zz" * 32, b"k", None, make_key("k")])
def test_what_is_no_id_has_no_child_key(id):
    with pytest.raises(SettingsError, match="64 hexadecimal digits"):
        child_key(id, "charge")


# --- in words -------------------------------------------------------------------------------------


async def test_an_unknown_outcome_is_told_in_the_words_of_requests(client, desk, semel):
    for key, named in (("k", {"tenant": "shop", "http": True}), (id_of(desk), {})):
        story = desk.explain(key, **named)
        assert story.http
        assert "is answered with 409 outcome-unknown" in story.next_call.sentence
        assert "raises" not in story.next_call.sentence
    assert "The next request is answered with 409" in semel("explain").stdout


def id_of(desk):
    return desk.explain("k", tenant="shop", http=True).record.key.id.hex()


async def test_what_a_settled_request_gets_is_told_with_its_status(client, desk, semel):
    settle(desk, Recovered({"order": 7}), status=201)
    story = desk.explain("k", tenant="shop", http=True)
    assert story.outcome.text == "201 | {'order': 7}"
    assert "is answered with the recorded response" in story.next_call.sentence
    assert "value\t201 | {'order': 7}\n" in semel("explain").stdout


async def test_without_a_status_it_is_told_as_200(client, desk):
    settle(desk, Recovered([1]))
    assert desk.explain("k", tenant="shop", http=True).outcome.text == "200 | [1]"
    assert desk.explain(id_of(desk)).outcome.text == "200 | [1]"


async def test_a_response_without_headers_and_body_is_told_as_one(client, desk):
    settle(desk, Recovered(Response(200, (), b"")))
    assert desk.explain("k", tenant="shop", http=True).outcome.text == "200 | "


async def test_what_a_failed_request_gets_is_told(client, desk):
    settle(desk, admin.ReplayedError("the bank refused"))
    sentence = desk.explain("k", tenant="shop", http=True).next_call.sentence
    assert "is answered with 500 interrupted" in sentence


async def test_what_was_not_kept_is_told(client, desk):
    settle(desk, Recovered(Response(201, (), None)))
    sentence = desk.explain("k", tenant="shop", http=True).next_call.sentence
    assert "is answered with 410 response-not-kept" in sentence


def test_a_running_request_is_told_in_the_words_of_requests():
    store, told = MemoryStore(), []

    def app(environ, start_response):
        told.append(Admin(store).explain("k", tenant="shop", http=True).next_call.sentence)
        start_response("201 Created", [])
        return [b"made"]

    door = WSGIMiddleware(app, store=store, scope="shop")
    with httpx.Client(transport=httpx.WSGITransport(door), base_url="http://shop") as client:
        client.post("/orders", headers=KEY)
    assert "is answered with 409 in-progress" in told[0]


def held_door(store, *, scope="acme", per_operation=False):
    def app(environ, start_response):
        raise ConnectionError("the bank did not answer")

    rule = Rule(on_error="hold", per_operation=per_operation)
    return WSGIMiddleware(app, store=store, scope=scope, rule=rule)


def refused_at(door, key, path="/orders"):
    """Ask twice, so that the second one is told that nobody knows."""
    with httpx.Client(transport=httpx.WSGITransport(door), base_url="http://shop") as client:
        with pytest.raises(ConnectionError):
            client.post(path, headers={"Idempotency-Key": json.dumps(key)})
        again = client.post(path, headers={"Idempotency-Key": json.dumps(key)})
        assert again.status_code == 409


@pytest.mark.parametrize(
    ("key", "scope", "per_operation", "command"),
    [
        ("h4", "acme", False, "semel ledger resolve URL h4 --http --tenant acme"),
        ("h 4", "a'b", False, """semel ledger resolve URL 'h 4' --http --tenant 'a'"'"'b'"""),
        (
            "h4",
            "acme",
            True,
            (
                "semel ledger resolve URL h4 --http --tenant acme "
                "--operation 'POST /orders' --per-operation"
            ),
        ),
        ("--yes", "acme", False, "semel ledger resolve URL {id} --http"),
        ("h4", "a\nb", False, "semel ledger resolve URL {id} --http"),
    ],
)
def test_the_log_says_what_to_type(path, caplog, key, scope, per_operation, command):
    store = SQLiteStore(path)
    with caplog.at_level(logging.WARNING, "semel"):
        refused_at(held_door(store, scope=scope, per_operation=per_operation), key)
    [said] = [r.getMessage() for r in caplog.records if "settle it with" in r.getMessage()]
    [record] = Admin(store).records()
    store.close()

    _, _, typed = said.partition("settle it with: ")
    assert typed == command.format(id=record.key.id.hex())
    words = [w.replace("URL", f"sqlite:///{path}") for w in shlex.split(typed)[1:]]
    settled = CliRunner().invoke(cli, [*words, "--value", "7", "--yes"])
    assert settled.exit_code == 0, settled.output


def test_a_path_does_not_break_the_line_of_a_log(caplog):
    with caplog.at_level(logging.WARNING, "semel"):
        refused_at(held_door(MemoryStore(), per_operation=True), "h4", "/orders%0Aforged")
    assert all("\n" not in record.getMessage() for record in caplog.records)


# --- the pages ------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"
HOW_TO = (DOCS / "how-to" / "settle-an-unknown-outcome.md").read_text()
SECTION = HOW_TO.partition("## A key that came in a request\n")[2].partition("\n## ")[0]


def held_h4(folder):
    """The request of the page, held, and its door."""
    store = SQLiteStore(folder / "settle.db")
    door = held_door(store, scope="ann")
    refused_at(door, "h4")
    return store, door


def asked_again(door):
    with httpx.Client(transport=httpx.WSGITransport(door), base_url="http://shop") as client:
        return client.post("/orders", headers={"Idempotency-Key": '"h4"'})


def test_the_commands_of_the_page_settle_a_request(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, door = held_h4(tmp_path)
    explain, resolve = re.findall(r"^\$ semel (.*)$", SECTION, re.MULTILINE)
    told = CliRunner().invoke(cli, shlex.split(explain))
    assert "child key" in told.stdout
    assert CliRunner().invoke(cli, shlex.split(resolve), input="y\n").exit_code == 0
    answer = asked_again(door)
    store.close()
    assert (answer.status_code, answer.json()) == (201, {"order": 7})


ROWS = re.findall(r"^\| [^|]+ \| `(--[^`]+)` \| ([^|]+) \|$", SECTION, re.MULTILINE)


@pytest.mark.parametrize(("options", "status"), [(o, s) for o, s in ROWS if o != "--retry"])
def test_a_row_of_the_page_is_true(tmp_path, options, status):
    store, door = held_h4(tmp_path)
    named = ["h4", "--http", "--tenant", "ann", "--yes", *shlex.split(options)]
    settled = CliRunner().invoke(
        cli, ["ledger", "resolve", f"sqlite:///{tmp_path / 'settle.db'}", *named]
    )
    assert settled.exit_code == 0, settled.output
    answer = asked_again(door)
    store.close()
    assert str(answer.status_code) in status
    if "interrupted" in status:
        assert answer.json()["type"] == "urn:semel:problem:interrupted"
        assert answer.json()["detail"] == shlex.split(options)[1]
    else:
        assert answer.json() == json.loads(shlex.split(options)[1])
        assert answer.headers["idempotent-replayed"] == "true"


def test_the_page_has_its_rows():
    assert len(ROWS) == 5


def test_the_reference_names_all_of_admin():
    page = (DOCS / "reference" / "admin.md").read_text()
    for name in {*admin.__all__, *dir(Admin)} - {"Answer", "Settlement"}:
        assert name.startswith("_") or f"`{name}" in page, name
    for shown in (admin.Story, admin.Try, admin.Reading, admin.NextCall, admin.Refused, Record):
        for field in dataclasses.fields(shown):
            assert f"`{field.name}`" in page, field.name
    for option in admin.Identity.__annotations__:
        assert f"`{option}`" in page
