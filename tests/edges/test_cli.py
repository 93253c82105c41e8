"""The command line, on every kind of store, from inside and as a process of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from datetime import datetime

import pytest
import sqlalchemy as sa
from rich.cells import cell_len
from typer.main import get_command
from typer.testing import CliRunner

import semel
from semel import connect, idempotent, once, step
from semel.admin import Admin
from semel.cli import show
from semel.cli.app import app, invoke
from semel.colour import SYNC, run
from semel.errors import CorruptRecordError, OutcomeUnknownError, ReplayedError
from semel.keys import make_key, new_attempt
from semel.stores import SQLStore
from semel.values import Outcome, Terms
from support.cli_reference import REFERENCE, documented_fields

PASSWORD = "s3kret/and@more"

IN_ORDER = {"ok": True, "version": 1, "problems": [], "notes": []}
SQL_IN_ORDER = IN_ORDER | {"version": 2}


class CutOffError(BaseException):
    pass


# --- stores with a story ------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "file", "redis", "postgres", "mariadb"])
def url(request, tmp_path):
    """An empty store, made ready."""
    return open_url(request, tmp_path, request.param)


@pytest.fixture
def sqlite_url(tmp_path):
    return f"sqlite:///{tmp_path / 'semel.db'}"


def open_url(request, tmp_path, kind):
    match kind:
        case "sqlite":
            return f"sqlite:///{tmp_path / 'semel.db'}"
        case "file":
            return f"file://{tmp_path / 'ledger'}"
        case "redis":
            return request.getfixturevalue("redis_url")
        case _:
            url = request.getfixturevalue(f"{kind}_url")
            assert semel_cli("db", "init", url).exit_code == 0
            return url


def fill(url):
    """One record of each state."""
    store = connect(url)

    @idempotent(store=store, key="paid:{number}")
    def paid(number):
        step("reserve", lambda: (number, "reserved"))
        return {"paid": number}

    @idempotent(store=store, key="declined:{number}")
    def declined(number):
        raise LookupError("[red]no[/red]\x1b[31m\tfunds")

    @idempotent(store=store, key="vanished:{number}", on_crash="hold", scope="acme")
    def vanished(number):
        raise CutOffError

    paid(7)
    with pytest.raises(LookupError):
        declined(7)
    with pytest.raises(CutOffError):
        vanished(7)
    terms = Terms(lease_s=600)
    run(store.ledger(SYNC).claim(make_key("running:7"), attempt=new_attempt(), terms=terms))
    store.close()


def do(url, key, value=None, **settings):
    """One record, done."""
    store = connect(url)
    with once(key, store=store, **settings) as attempt:
        attempt.done(value)
    store.close()


@pytest.fixture
def filled(sqlite_url, monkeypatch):
    # A layout depends on the length of the holder's name, and that on the process's number.
    monkeypatch.setattr("semel.keys.attempt._Holder.name", "web-1:12345/")
    fill(sqlite_url)
    return sqlite_url


VANISHED = ("vanished:7", "--tenant", "acme")


def call_again(url):
    """What the vanished call gets when it is made again."""
    store = connect(url)

    @idempotent(
        store=store,
        key="vanished:{number}",
        on_crash="hold",
        scope="acme",
        operation=f"{__name__}.fill.<locals>.vanished",
    )
    def vanished(number):
        return "ran"

    try:
        return vanished(7)
    finally:
        store.close()


def semel_cli(*args, **kwargs):
    return CliRunner().invoke(app, list(args), **kwargs)


def answer(*args, **kwargs):
    """The JSON of a command that succeeds."""
    result = semel_cli(*args, "--json", **kwargs)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# --- on every store -----------------------------------------------------------------------------


def test_looking_and_settling_on_every_store(url):
    fill(url)

    page = answer("ledger", "list", url)
    states = {record["key"]: record["state"] for record in page["records"]}
    assert states == {
        "paid:7": "COMPLETED",
        "declined:7": "FAILED",
        "vanished:7": "UNKNOWN",
        "running:7": "PENDING",
    }
    assert answer("ledger", "explain", url, "paid:7")["outcome"]["text"] == "{'paid': 7}"
    does = {
        key: answer("ledger", "explain", url, *key.split())["next_call"]["does"]
        for key in ("paid:7", "declined:7", "running:7", " ".join(VANISHED))
    }
    assert list(does.values()) == ["replay", "run", "busy", "unknown"]

    with pytest.raises(OutcomeUnknownError):
        call_again(url)
    settled = answer("ledger", "resolve", url, *VANISHED, "--value", '{"id": "ch_1"}', "--yes")
    assert settled == {"resolved": True, "why": None}
    assert call_again(url) == {"id": "ch_1"}

    assert answer("ledger", "forget", url, *VANISHED, "--yes") == {"forgotten": True, "why": None}
    assert call_again(url) == "ran"
    assert answer("ledger", "sweep", url) == {"swept": 0}
    assert answer("ledger", "guarantees", url)["shared"] is True


def test_pages_and_filters_on_every_store(url):
    fill(url)

    first = answer("ledger", "list", url, "--limit", "3")
    rest = answer("ledger", "list", url, "--after", first["next"])
    ids = [record["id"] for record in first["records"] + rest["records"]]

    assert ids == sorted(ids)
    assert len(ids) == 4
    assert rest["next"] is None
    for options, keys in [
        (("--tenant", "acme"), ["vanished:7"]),
        (("--state", "failed"), ["declined:7"]),
        (("--operation", f"{__name__}.fill.<locals>.paid"), ["paid:7"]),
        (("--tenant", "nobody"), []),
    ]:
        found = answer("ledger", "list", url, *options)["records"]
        assert [record["key"] for record in found] == keys, options


# --- explain ------------------------------------------------------------------------------------


def test_a_story_for_people(filled):
    result = semel_cli("ledger", "explain", filled, "paid:7")

    assert result.exit_code == 0
    assert "state\tCOMPLETED\n" in result.stdout
    assert "value\t{'paid': 7}\n" in result.stdout
    assert "reserve\t(7, 'reserved')\n" in result.stdout
    assert "The next call gets the recorded result, until 20" in result.stdout


def test_a_key_is_found_by_its_id(filled):
    listed = semel_cli("ledger", "list", filled, "--ids", "--tenant", "acme")
    id = listed.stdout.splitlines()[1].split("\t")[-1]

    assert answer("ledger", "explain", filled, id)["key"] == "vanished:7"


def test_version_and_operation_may_be_part_of_the_key(sqlite_url):
    do(sqlite_url, "k:1", version="2", operation="pay", per_operation=True)

    identity = ("--version", "2", "--operation", "pay", "--per-operation")

    assert answer("ledger", "explain", sqlite_url, "k:1", *identity)["state"] == "COMPLETED"
    assert semel_cli("ledger", "explain", sqlite_url, "k:1").exit_code == 1


def test_what_is_not_recorded_is_not_found(filled):
    plain = semel_cli("ledger", "explain", filled, "paid:8")
    as_json = semel_cli("ledger", "explain", filled, "paid:8", "--json")

    why = "nothing is recorded for 'paid:8'"
    assert plain.exit_code == as_json.exit_code == 1
    assert plain.stdout == as_json.stderr == ""
    assert why in plain.stderr
    told = json.loads(as_json.stdout)
    assert (told["found"], list(told)) == (False, ["found", "why"])
    assert why in told["why"]


def test_the_url_may_come_from_the_environment(filled):
    env = {"SEMEL_URL": filled}

    assert answer("ledger", "explain", "paid:7", env=env)["state"] == "COMPLETED"
    assert len(answer("ledger", "list", env=env)["records"]) == 4


@pytest.mark.parametrize("command", ["list", "guarantees", "sweep"])
def test_a_missing_url_is_asked_for(command, monkeypatch):
    monkeypatch.delenv("SEMEL_URL", raising=False)
    result = semel_cli("ledger", command)

    assert result.exit_code == 2
    assert "give the store's URL, or set SEMEL_URL" in result.stderr


@pytest.mark.parametrize("words", [(), ("paid:7",)])
def test_a_missing_url_or_key_is_asked_for(words, monkeypatch):
    monkeypatch.delenv("SEMEL_URL", raising=False)
    result = semel_cli("ledger", "explain", *words)

    assert result.exit_code == 2
    assert "SEMEL_URL" in result.stderr


def test_tries_that_are_no_longer_kept_are_mentioned(sqlite_url):
    store = connect(sqlite_url)
    ledger = store.ledger(SYNC)
    for _ in range(20):
        won = run(ledger.claim(make_key("k"), attempt=new_attempt(), terms=Terms()))
        run(ledger.release(won.claim))
    store.close()

    assert (
        "The first 4 tries are no longer kept."
        in semel_cli("ledger", "explain", sqlite_url, "k").stdout
    )


# --- what others wrote --------------------------------------------------------------------------


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_stored_reaches_the_terminal_as_markup_or_control(filled, terminal, monkeypatch):
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "300")
    result = semel_cli("ledger", "explain", filled, "declined:7", color=True)

    assert r"[red]no[/red]\x1b[31m\tfunds" in result.stdout
    assert "\x1b[31m" not in result.stdout


def test_a_terminal_gets_tables(filled, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")

    listed = semel_cli("ledger", "list", filled, color=True).stdout
    told = semel_cli("ledger", "explain", filled, "paid:7", color=True).stdout

    assert "\t" not in listed + told
    assert "\x1b[2m" in listed
    assert "COMPLETED" in listed
    assert "reserve" in told


LONG = "order:2026-11-15:customer-000000012345:item-77777:the-last-one"


def on_a_terminal(monkeypatch, columns, *args):
    """What a terminal of this width shows, row by row, without the colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    result = semel_cli("ledger", *args, color=True)
    assert result.exit_code == 0, result.output
    return re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines(), result.stderr


@pytest.mark.parametrize("columns", [50, 60, 80, 100, 120, 260])
def test_a_listing_fits_its_terminal(filled, monkeypatch, columns):
    do(filled, LONG)

    rows, hint = on_a_terminal(monkeypatch, columns, "list", filled)

    assert len(rows) == 6, "no row is wrapped"
    assert max(map(len, rows)) <= columns
    assert {"key", "state"} <= set(rows[0].split())
    assert ("--wide" in hint) == (columns < 260)


def test_what_matters_most_is_left_out_last(filled, monkeypatch):
    do(filled, LONG)
    shown = {
        columns: on_a_terminal(monkeypatch, columns, "list", filled)[0][0].split()
        for columns in (200, 100, 80, 60, 40)
    }

    everything = ["key", "tenant", "operation", "state", "try", "holder", "started", "expires"]
    assert shown[200] == everything
    assert shown[100] == everything[:-1]
    assert shown[80] == ["key", "tenant", "operation", "state", "holder", "started"]
    assert shown[60] == ["key", "tenant", "state", "started"]
    assert shown[40] == ["key", "tenant", "state"]


def test_a_long_key_keeps_both_its_ends(filled, monkeypatch):
    do(filled, LONG)

    rows, _ = on_a_terminal(monkeypatch, 80, "list", filled)

    (row,) = [row for row in rows if row.startswith("order")]
    assert re.match(r"order\S*…\S*-one ", row)


@pytest.mark.parametrize("columns", [40, 80])
def test_wide_shows_whole_rows(filled, monkeypatch, columns):
    do(filled, LONG)

    rows, hint = on_a_terminal(monkeypatch, columns, "list", filled, "--wide", "--ids")

    assert len(rows) == 6
    (row,) = [row for row in rows if row.startswith(LONG)]
    assert make_key(LONG).id.hex() in row
    assert "once" in row
    assert hint == ""


def test_an_id_is_never_cut(filled, monkeypatch):
    rows, _ = on_a_terminal(monkeypatch, 80, "list", filled, "--ids")

    assert make_key("paid:7").id.hex() in "\n".join(rows)


def test_tenants_that_nobody_has_take_no_room(sqlite_url, monkeypatch):
    do(sqlite_url, "k:1")

    rows, hint = on_a_terminal(monkeypatch, 120, "list", sqlite_url)

    assert "tenant" not in rows[0]
    assert hint == ""


def test_an_empty_listing_is_its_heading(sqlite_url, monkeypatch):
    do(sqlite_url, "k:1")
    answer("ledger", "forget", sqlite_url, "k:1", "--yes")

    rows, _ = on_a_terminal(monkeypatch, 80, "list", sqlite_url)

    assert len(rows) == 1
    assert rows[0].startswith("key")


def test_wide_characters_are_counted_as_wide(sqlite_url, monkeypatch):
    do(sqlite_url, "注文" * 30)

    rows, _ = on_a_terminal(monkeypatch, 80, "list", sqlite_url)

    assert len(rows) == 2
    assert max(map(cell_len, rows)) <= 80


def test_a_story_fits_its_terminal(filled, monkeypatch):
    rows, _ = on_a_terminal(monkeypatch, 80, "explain", filled, "declined:7")

    told = rows[: next(n for n, row in enumerate(rows) if row.startswith("The next call"))]
    assert max(map(len, told)) <= 80
    (heading,) = [row.split() for row in told if row.startswith("try")]
    assert heading == ["try", "holder", "fence", "started", "ending"]


def test_held_is_said_only_of_what_is_open(filled):
    held = {
        key: answer("ledger", "explain", filled, *key.split())["held"]
        for key in ("paid:7", "declined:7", "running:7", " ".join(VANISHED))
    }
    assert list(held.values()) == [None, None, False, True]
    assert "held\tuntil its outcome is known\n" in (
        semel_cli("ledger", "explain", filled, *VANISHED).stdout
    )
    answer("ledger", "resolve", filled, *VANISHED, "--value", "1", "--yes")
    assert answer("ledger", "explain", filled, *VANISHED)["held"] is None
    assert "held" not in semel_cli("ledger", "explain", filled, *VANISHED).stdout


def test_a_pipe_gets_one_line_per_record(filled):
    lines = semel_cli("ledger", "list", filled).stdout.splitlines()

    assert len(lines) == 5
    assert {line.count("\t") for line in lines} == {7}


def test_a_long_result_is_cut_for_people_and_whole_in_json(sqlite_url):
    do(sqlite_url, "k:1", "x" * 5000)

    assert "... (5002 characters)" in semel_cli("ledger", "explain", sqlite_url, "k:1").stdout
    assert len(answer("ledger", "explain", sqlite_url, "k:1")["outcome"]["text"]) == 5002


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (61, "1 min 1 s"), (7380, "2 h 3 min"), (90_000, "1 d 1 h")],
)
def test_spans_for_people(seconds, text):
    assert show.span(seconds) == text


# --- resolve ------------------------------------------------------------------------------------


def test_resolving_with_an_error(filled):
    answer("ledger", "resolve", filled, *VANISHED, "--error", "card declined", "--yes")

    with pytest.raises(ReplayedError, match="card declined"):
        call_again(filled)
    told = answer("ledger", "explain", filled, *VANISHED)["tries"]
    assert [each["ending"] for each in told] == ["resolved by hand: it failed"]


def test_resolving_with_retry(filled):
    assert (
        "resolved" in semel_cli("ledger", "resolve", filled, *VANISHED, "--retry", "--yes").stdout
    )

    assert call_again(filled) == "ran"


@pytest.mark.parametrize(
    ("options", "question"),
    [
        (("--value", "null"), "Record that it happened, with None?"),
        (("--error", "no"), "Record that it is over, with the error 'no'?"),
        (("--retry",), "Record that it did not happen, and let the next call run it?"),
    ],
)
def test_it_asks_first_and_no_is_no(filled, options, question):
    result = semel_cli("ledger", "resolve", filled, *VANISHED, *options, input="n\n")

    assert result.exit_code == 1
    assert question in result.stderr
    assert "'vanished:7' at sqlite:///" in result.stderr
    assert result.stdout == ""
    with pytest.raises(OutcomeUnknownError):
        call_again(filled)


def test_yes_is_yes_and_stdout_is_for_the_answer(filled):
    settled = answer("ledger", "resolve", filled, *VANISHED, "--value", "1", input="y\n")

    assert settled == {"resolved": True, "why": None}


def vanished_invoice(url):
    """A call with a default key that was claimed and never ended; its key."""
    store = connect(url)

    @idempotent(store=store, on_crash="hold")
    def create_invoice(number):
        return number

    key = create_invoice.key_for(7)
    terms = Terms(lease_s=0.001, takeover=False, hold=True)
    run(store.ledger(SYNC).claim(key, attempt=new_attempt(), terms=terms))
    store.close()
    return key


def test_text_of_a_default_key_names_a_record_only_where_a_person_has_seen_it(filled):
    key = vanished_invoice(filled)
    for verb, *how in (("resolve", "--retry"), ("forget",)):
        refused = semel_cli("ledger", verb, filled, "create_invoice:number=7", *how, "--yes")
        assert refused.exit_code == 1
        assert f"give an id: {key.id.hex()}" in refused.stderr.replace("\n", " ")
    explained = answer("ledger", "explain", filled, "create_invoice:number=7")
    assert explained["key"] == "create_invoice:number=7"
    for verb, *how in (("resolve", "--retry"), ("forget",)):
        done = semel_cli("ledger", verb, filled, "create_invoice:number=7", *how, input="y\n")
        assert done.exit_code == 0, done.output


def test_what_was_shown_is_what_is_settled(filled, monkeypatch):
    """Another attempt begins while the person reads the question."""

    class Person(io.StringIO):
        def readline(self, *_):
            store = connect(filled)
            terms = Terms(lease_s=0.000001, hold=True)
            operation = f"{__name__}.fill.<locals>.vanished"
            key = make_key("vanished:7", tenant="acme", operation=operation)
            fingerprint = Admin(store).explain(key).record.fingerprint
            run(
                store.ledger(SYNC).claim(
                    key, attempt=new_attempt(), fingerprint=fingerprint, terms=terms
                )
            )
            store.close()
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Person())

    assert invoke(["ledger", "resolve", filled, *VANISHED, "--retry"]) == 1
    assert answer("ledger", "explain", filled, *VANISHED)["number"] == 2


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("running:7", "only an attempt whose lease has run out can be settled"),
        ("paid:7", "has an outcome already"),
        ("declined:7", "the next call runs it again"),
        ("paid:8", "nothing is recorded"),
    ],
)
def test_a_refusal_says_why(filled, key, why):
    plain = semel_cli("ledger", "resolve", filled, key, "--retry", "--yes")
    as_json = semel_cli("ledger", "resolve", filled, key, "--retry", "--yes", "--json")

    assert plain.exit_code == as_json.exit_code == 1
    assert why in plain.stderr
    assert why in json.loads(as_json.stdout)["why"]
    assert json.loads(as_json.stdout)["resolved"] is False


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--retry", "--value", "1"),
        ("--retry", "--error", "no"),
        ("--value", "not json"),
        ("--retry", "--ttl", "-1"),
    ],
)
def test_a_settlement_that_cannot_be_is_bad_input(filled, options):
    result = semel_cli("ledger", "resolve", filled, *VANISHED, *options, "--yes")

    assert result.exit_code == 2
    assert answer("ledger", "explain", filled, *VANISHED)["state"] == "UNKNOWN"


@pytest.mark.parametrize(
    ("options", "given"),
    [
        (("--retry", "--value", "1"), "--value and --retry were given"),
        (("--retry", "--error", "no"), "--error and --retry were given"),
        (("--retry", "--error", "no", "--value", "1"), "--value, --error and --retry were given"),
    ],
)
def test_two_settlements_are_said_to_be_too_many(filled, options, given):
    result = semel_cli("ledger", "resolve", filled, *VANISHED, *options, "--yes")

    assert f"{given}; give only one" in result.stderr


def test_a_fence_and_a_ttl_may_be_named(filled):
    wrong = semel_cli("ledger", "resolve", filled, *VANISHED, "--retry", "--yes", "--fence", "1")
    assert wrong.exit_code == 1

    fence = str(answer("ledger", "explain", filled, *VANISHED)["fence"])
    settle = ("ledger", "resolve", filled, *VANISHED, "--value", "1", "--yes")
    answer(*settle, "--fence", fence, "--ttl", "0")

    assert answer("ledger", "explain", filled, *VANISHED)["expires_at"] is None


# --- forget and sweep ---------------------------------------------------------------------------


def test_a_live_record_is_forgotten_by_force(filled):
    refused = semel_cli("ledger", "forget", filled, "running:7", "--yes")
    assert refused.exit_code == 1
    assert "force" in refused.stderr

    assert answer("ledger", "forget", filled, "running:7", "--force", "--yes")["forgotten"]


def test_forgetting_asks_first(filled):
    no = semel_cli("ledger", "forget", filled, "paid:7", input="\n")
    assert no.exit_code == 1
    assert "is COMPLETED; try 1 by" in no.stderr

    assert semel_cli("ledger", "forget", filled, "paid:7", input="yes\n").stdout == "forgotten\n"

    gone = semel_cli("ledger", "forget", filled, "paid:7", input="yes\n")
    assert gone.exit_code == 1
    assert "nothing is recorded" in gone.stderr
    assert "[y/N]" not in gone.stderr


def test_a_record_that_cannot_be_read_can_be_forgotten(filled, monkeypatch):
    def unreadable(self, key, **_):
        raise CorruptRecordError(f"{key!r} cannot be read")

    monkeypatch.setattr(Admin, "explain", unreadable)

    assert semel_cli("ledger", "explain", filled, "paid:7").exit_code == 3
    result = semel_cli("ledger", "forget", filled, "paid:7", input="y\n")
    assert result.exit_code == 0
    assert "'paid:7' cannot be read" in result.stderr


def expire(url, *names):
    """Records that were done and have expired; a guard would not be so hasty."""
    store = connect(url)
    for name in names:
        terms = Terms(lease_s=600, ttl_s=0.001)
        won = run(store.ledger(SYNC).claim(make_key(name), attempt=new_attempt(), terms=terms))
        run(store.ledger(SYNC).complete(won.claim, Outcome("value", b"1")))
    store.close()
    time.sleep(0.01)


def test_sweeping_counts_what_it_deletes(sqlite_url):
    expire(sqlite_url, *"abcde")
    result = semel_cli("ledger", "sweep", sqlite_url, "--limit", "2")
    assert result.stdout == "5 expired records deleted\n"
    assert answer("ledger", "list", sqlite_url)["records"] == []
    assert answer("ledger", "sweep", sqlite_url, "--one") == {"swept": 0}

    expire(sqlite_url, "f")
    assert semel_cli("ledger", "sweep", sqlite_url).stdout == "1 expired record deleted\n"


def test_guarantees_for_people(filled):
    result = semel_cli("ledger", "guarantees", filled)

    assert "survives\tpower_loss, process_crash\n" in result.stdout


# --- db -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["postgres", "mariadb", "sqlite+pysqlite"])
def test_tables_are_missing_then_made_then_in_order(request, kind, tmp_path):
    if kind == "sqlite+pysqlite":
        url = f"sqlite+pysqlite:///{tmp_path / 'a.db'}"
    else:
        url = request.getfixturevalue(f"{kind}_url")

    missing = semel_cli("db", "check", url)
    assert missing.exit_code == 1
    assert "semel db init" in missing.stderr
    found = json.loads(semel_cli("db", "check", url, "--json").stdout)
    assert not found["ok"]
    assert found["problems"]

    made = semel_cli("db", "init", url)
    assert made.exit_code == 0
    assert "schema version ledger 2, outbox 2, inbox 1, log 1, in order" in made.stdout
    assert semel_cli("db", "init", url).exit_code == 0
    assert answer("db", "upgrade", url)["ok"]
    assert answer("db", "check", url) == SQL_IN_ORDER


def test_tables_of_a_release_before_the_outbox_are_upgraded(tmp_path):
    path = tmp_path / "a.db"
    url = f"sqlite+pysqlite:///{path}"
    assert semel_cli("db", "init", url).exit_code == 0
    older = sqlite3.connect(path)
    older.executescript(
        "DROP TABLE event_outbox; DROP TABLE event_outbox_seq; "
        "DELETE FROM semel_schema WHERE part = 'outbox'"
    )
    older.close()
    missing = semel_cli("db", "check", url)
    assert missing.exit_code == 1
    assert "outbox: schema version is 0, wanted 2; run `semel db upgrade URL`" in missing.stderr
    assert answer("db", "upgrade", url) == SQL_IN_ORDER
    assert answer("db", "check", url)["ok"]


@pytest.fixture(params=["sqlite", "file"])
def disk_url(request, tmp_path):
    return open_url(request, tmp_path, request.param)


def test_a_store_on_disk_is_missing_then_made_then_in_order(disk_url, tmp_path):
    for verb in ("check", "upgrade"):
        missing = semel_cli("db", verb, disk_url)
        assert missing.exit_code == 1
        assert "there is nothing at" in missing.stderr
        assert "semel db init" in missing.stderr
    assert list(tmp_path.iterdir()) == []

    made = semel_cli("db", "init", disk_url)
    assert made.exit_code == 0
    assert "format version 1, in order" in made.stdout
    for verb in ("init", "upgrade", "check"):
        assert answer("db", verb, disk_url) == IN_ORDER


def test_a_store_on_disk_in_use_is_in_order(disk_url):
    store = connect(disk_url)
    with once("k:1", store=store) as attempt:
        attempt.done(1)
        assert answer("db", "check", disk_url)["ok"]
    store.close()


def foreign_files(path):
    """Files and folders that no store of ours made, by what is to be said of them."""
    (path / "source.py").write_text("print('hello')\n" * 100)
    (path / "empty.db").touch()
    other = sqlite3.connect(path / "other.db")
    other.execute("CREATE TABLE orders (id TEXT)")
    other.close()
    theirs = SQLStore(f"sqlite:///{path / 'sql.db'}", create=True)
    run(theirs.ledger(SYNC).look(b"none"))
    theirs.close()
    newer = sqlite3.connect(path / "newer.db")
    newer.execute("PRAGMA user_version = 9")
    newer.close()
    hollow = sqlite3.connect(path / "hollow.db")
    hollow.execute("PRAGMA user_version = 1")
    hollow.close()
    for folder in ("void", "full", "later", "damaged", "short"):
        (path / folder).mkdir()
    (path / "full" / "passwd").touch()
    (path / "later" / "semel.json").write_text('{"semel": "ledger", "format": 2}\n')
    (path / "damaged" / "semel.json").write_text('{"semel": "lodger", "format": 1}\n')
    (path / "short" / "semel.json").write_text('{"semel": "le')
    return {
        f"sqlite:///{path}/source.py": "file is not a database",
        f"sqlite:///{path}/empty.db": "no tables of SQLiteStore",
        f"sqlite:///{path}/other.db": f"has other tables; for tables in your application's "
        f"database use sqlite+pysqlite:///{path}/other.db",
        f"sqlite:///{path}/newer.db": "upgrade Semel",
        f"sqlite:///{path}/hollow.db": "no such table",
        f"sqlite:///{path}/nodir/x.db": "nor a folder to make it in",
        f"sqlite:///{path}/void": "is a directory",
        f"file://{path}/source.py": "is not a directory",
        f"file://{path}/void": "is empty",
        f"file://{path}/full": "not a ledger",
        f"file://{path}/later": "upgrade Semel",
        f"file://{path}/damaged": f"{path}/damaged/semel.json is damaged",
        f"file://{path}/short": "it ends after 13 bytes",
    }


def everything_below(path):
    return {p: p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def test_check_looks_at_what_is_on_disk_and_changes_nothing(tmp_path):
    strangers = foreign_files(tmp_path)
    before = everything_below(tmp_path)
    for url, what in strangers.items():
        for verb in ("check", "upgrade"):
            found = semel_cli("db", verb, url)
            assert found.exit_code == 1, url
            assert "in order" not in found.stdout
            assert what in found.stderr
            as_json = json.loads(semel_cli("db", verb, url, "--json").stdout)
            assert not as_json["ok"]
            assert what in as_json["problems"][0]
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        "sqlite:///{}/source.py",
        "sqlite:///{}/other.db",
        "file://{}/full",
        "file://{}/damaged",
    ],
)
def test_init_makes_nothing_in_a_strangers_place(name, tmp_path):
    foreign_files(tmp_path)
    before = everything_below(tmp_path)
    assert semel_cli("db", "init", name.format(tmp_path)).exit_code == 1
    assert everything_below(tmp_path) == before


def test_init_completes_a_mark_that_is_cut_short(tmp_path):
    foreign_files(tmp_path)
    assert semel_cli("db", "init", f"file://{tmp_path}/short").exit_code == 0
    assert answer("db", "check", f"file://{tmp_path}/short")["ok"]


@pytest.mark.parametrize("words", [("ledger", "list"), ("db", "check"), ("db", "init")])
def test_an_sqlite_file_is_opened_as_the_store_that_made_it(words, tmp_path):
    engine = sa.create_engine(f"sqlite:///{tmp_path}/shop.db")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE orders (id TEXT)")
        connection.exec_driver_sql("PRAGMA user_version = 7")  # as the application's migrations do
    run(SQLStore(engine, create=True).ledger(SYNC).look(b"none"))
    engine.dispose()

    for scheme in ("sqlite", "sqlite+pysqlite"):
        opened = semel_cli(*words, f"{scheme}:///{tmp_path}/shop.db")
        assert opened.exit_code == 0, opened.stderr


def test_a_new_sqlite_ledger_says_that_it_is_no_outbox(tmp_path):
    new = f"{tmp_path}/new.db"
    made = semel_cli("db", "init", f"sqlite:///{new}")
    assert made.exit_code == 0
    assert "is for a ledger and a log" in made.stderr
    told = re.search(r"`semel db init (sqlite\+pysqlite:///\S+)`", made.stderr)
    assert told is not None, made.stderr
    assert "is for a ledger and a log" not in semel_cli("db", "check", f"sqlite:///{new}").stderr
    (tmp_path / "new.db").unlink()
    assert semel_cli("db", "init", told[1]).exit_code == 0
    assert semel_cli("outbox", "status", f"sqlite:///{new}").exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("outbox", "status"),
        ("parked", "list"),
        ("doctor", "--no-canary"),
        ("relay", "--to", "redis://localhost"),
        ("db", "init"),
        ("db", "check"),
    ],
)
@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite"])
def test_a_ledger_of_its_own_is_told_from_a_database_with_an_outbox(filled, words, scheme):
    first, *more = words
    url = filled.replace("sqlite:", f"{scheme}:")
    found = (
        semel_cli(*words, url)
        if first in ("db", "outbox", "parked")
        else semel_cli(first, url, *more)
    )
    if (first, scheme) == ("db", "sqlite"):  # which is right as it is
        assert found.exit_code == 0
        return
    assert found.exit_code in (1, 2)
    assert "made by SQLiteStore" in found.stderr
    assert "another file" in found.stderr


def test_the_url_in_a_report_is_the_one_to_paste(tmp_path):
    url = f"sqlite+pysqlite:///{tmp_path}/shop.db"
    for verb in ("check", "init"):
        shown = semel_cli("db", verb, url).stdout.partition(": schema version")[0]
        assert shown == url


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("memory://", "lives inside the process"),
        ("sqlite:///:memory:", "lives inside the process"),
        ("sqlite://", "has no path"),
        ("sqlite:///", "has no path"),
    ],
)
def test_a_store_in_memory_has_nothing_to_check(url, why):
    for words in (("db", "check"), ("db", "init"), ("ledger", "list")):
        result = semel_cli(*words, url)
        assert result.exit_code == 2
        assert why in result.stderr


def test_check_knows_a_file_of_the_other_sqlite_store(filled):
    url = filled.replace("sqlite:", "sqlite+pysqlite:")
    found = semel_cli("db", "check", url, "--json")
    assert found.exit_code == 1
    [problem] = json.loads(found.stdout)["problems"]
    assert "made by SQLiteStore" in problem


@pytest.mark.parametrize("url", [f"redis://:{PASSWORD}@localhost/0", "nonsense"])
def test_a_store_without_tables_is_bad_input(url):
    result = semel_cli("db", "init", url)

    assert result.exit_code == 2
    assert "is not a SQL store" in result.stderr
    assert PASSWORD not in result.output


# --- when it does not work ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "code", "what"),
    [
        ("nonsense", 2, "is not a store's URL"),
        ("memory://", 2, "lives inside the process that made it"),
        ("sqlite:////no/such/semel.db", 2, "there is nothing at '/no/such/semel.db'"),
        ("file:///no/such/folder", 2, "there is nothing at '/no/such/folder'"),
        ("redis://127.0.0.1:1", 3, "did not answer"),
        ("postgresql://127.0.0.1:1/x", 3, "did not answer"),
    ],
)
def test_a_store_that_cannot_be_opened(url, code, what):
    result = semel_cli("ledger", "list", url)

    assert result.exit_code == code
    assert what in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_cursor_that_is_no_id_is_bad_input(filled):
    assert semel_cli("ledger", "list", filled, "--after", "xyz").exit_code == 2
    assert semel_cli("ledger", "list", filled, "--limit", "0").exit_code == 2
    assert semel_cli("ledger", "list", filled, "--state", "open").exit_code == 2


def test_not_confirmed_is_said_without_a_traceback(filled, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    assert invoke(["ledger", "forget", filled, "paid:7"]) == 1
    assert "nothing was changed. In a script, use --yes" in capsys.readouterr().err


def test_a_defect_shows_a_traceback_without_the_password(monkeypatch, capsys, filled):
    def broken(self, **_):
        raise RuntimeError(f"cannot talk to redis://user:{PASSWORD}@host/0")

    monkeypatch.setattr(Admin, "records", broken)

    assert invoke(["ledger", "list", filled]) == 70
    shown = capsys.readouterr().err
    assert "RuntimeError: cannot talk to redis://user:***@host/0" in shown
    assert PASSWORD not in shown


# --- secrets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("ledger", "list", "{url}"),
        ("ledger", "list", "{url}", "{url}"),
        ("ledger", "list", "--limit", "{url}"),
        ("ledger", "explain", "{url}", "key"),
        ("ledger", "explain", "{url}", "key", "{url}"),
        ("ledger", "{url}"),
        ("db", "check", "{url}"),
        ("db", "init", "{url}"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3kret@127.0.0.1:1/0",
        "redis://:s3kret@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=s3kret",
        "postgresql://user:s3kret@127.0.0.1:1/shop",
        "mysql://user:s3kret@127.0.0.1:1/shop",
        "sqlite://user:s3kret@host/shop",
        "nonsense://user:s3kret@host/shop",
        "postgresql:user:s3kret@host/shop",
        "postgresql://user:s3kret@host:port/shop",
        "postgresql://user:s3kret/more@127.0.0.1:1/shop",
        "postgresql://user:s3kret@more@127.0.0.1:1/shop",
        "redis://user:s3kret/more@127.0.0.1:1/0",
        "redis://user:more/s3kret@127.0.0.1:1/0",
    ],
)
def test_no_password_is_ever_printed(args, url, capsys):
    code = invoke([arg.format(url=url) for arg in args])

    shown = capsys.readouterr()
    assert code in (2, 3)
    assert shown.err
    assert "s3kret" not in shown.out + shown.err


@pytest.mark.parametrize(
    ("text", "url", "shown"),
    [
        ("at redis://u:p@h/0", "", "at redis://u:***@h/0"),
        ("at redis://u:p@w/x@h/0 now", "", "at redis://u:***@h/0 now"),
        ("at redis://h:6379/0 by a@b", "", "at redis://h:6379/0 by a@b"),
        ("login 'a b' failed", "redis://u:a%20b@h", "login '***' failed"),
        ("x?user=u&Password=p&db=1", "", "x?user=u&Password=***&db=1"),
        ("x?sslpassword=p", "", "x?sslpassword=***"),
        ("broken", "redis://[::1", "broken"),
        ("to nats://t0ken@h", "nats://t0ken@h", "to nats://***@h"),
        ("no host w0rd", "redis://u:pass/w0rd@h", "no host ***"),
    ],
)
def test_redaction(text, url, shown):
    assert show.redact(text, url) == shown


@pytest.mark.parametrize("part", ["a", "a.b+", "://", "a://", "a://b:", "a://b:@", "?token", "&-"])
def test_redaction_of_a_long_text_takes_linear_time(part):
    text = part * (1 << 17)
    begun = time.perf_counter()
    show.redact(f"{text} {text}@", "redis://:secret@localhost")
    assert time.perf_counter() - begun < 2


# --- as a process -------------------------------------------------------------------------------


def process(*args, module="semel", **kwargs):
    env = {**os.environ, **kwargs.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", module, *args],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
        **kwargs,
    )


@pytest.mark.parametrize("module", ["semel", "semel.cli"])
def test_it_runs_as_a_module(module):
    result = process("--version", module=module)

    assert result.stdout == f"semel {semel.__version__}\n"
    assert result.returncode == 0


def test_a_process_of_its_own_sees_the_records(filled):
    listed = process("ledger", "list", "--json", env={"SEMEL_URL": filled})
    absent = process("ledger", "explain", filled, "paid:8")
    bad = process("ledger", "resolve", filled, *VANISHED)
    unasked = process("ledger", "forget", filled, "paid:7", stdin=subprocess.DEVNULL)

    assert len(json.loads(listed.stdout)["records"]) == 4
    codes = [listed.returncode, absent.returncode, bad.returncode, unasked.returncode]
    assert codes == [0, 1, 2, 1]
    assert "Traceback" not in absent.stderr + bad.stderr + unasked.stderr


def test_keys_that_the_terminal_cannot_show_are_escaped(sqlite_url):
    do(sqlite_url, "zażółć")

    result = process("ledger", "list", sqlite_url, env={"PYTHONIOENCODING": "ascii"})

    assert r"za\u017c\xf3\u0142\u0107" in result.stdout


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("typer", (), "cli"),
        ("rich", ("ledger", "list"), "cli"),
        ("typer", ("rooms", "games:Matches"), "rooms"),
        ("rich", ("gateway",), "gateway"),
    ],
)
def test_without_its_libraries_it_says_what_to_install(library, words, extra):
    code = f"import sys; sys.modules[{library!r}] = None; from semel.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 2
    assert f"pip install 'semel[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


# --- the reference page -------------------------------------------------------------------------

MARK = "<!-- Everything below is written by tests/edges/test_cli.py with SEMEL_WRITE_DOCS=1. -->\n"


def reference():
    """The commands as the page lists them."""
    return "\n".join(part for path, command in commands() for part in section(path, command))


def commands():
    for each in get_command(app).commands.values():
        if not hasattr(each, "commands"):
            yield f"semel {each.name}", each
            continue
        for command in each.commands.values():
            yield f"semel {each.name} {command.name}", command


def section(path, command):
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    yield f"## `{path}`\n"
    yield f"{command.help}\n"
    yield f"    {' '.join([path, '[OPTIONS]', *(p.metavar for p in arguments)])}\n"
    yield "| | |\n|---|---|"
    for parameter in arguments + options:
        yield f"| `{names(parameter)}` | {parameter.help}{default(parameter)} |"
    yield ""


def names(parameter):
    if parameter.param_type_name == "argument":
        return parameter.metavar.strip("[]")
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    otherwise = f" / {parameter.secondary_opts[0]}" if parameter.secondary_opts else ""
    return ", ".join(reversed(parameter.opts)) + otherwise + value


def default(parameter):
    if parameter.envvar:
        return f" Default: `{parameter.envvar}` in the environment."
    if parameter.default in (None, "", False) or parameter.param_type_name == "argument":
        return ""
    given = parameter.opts[0] if parameter.secondary_opts else parameter.default
    return f" Default: {given}."


def test_the_reference_lists_every_command_as_it_is():
    page = REFERENCE.read_text()
    head, mark, _ = page.partition(MARK)
    wanted = f"{head}{mark}\n{reference()}"
    if os.environ.get("SEMEL_WRITE_DOCS"):
        REFERENCE.write_text(wanted)
        page = wanted
    assert page == wanted, "run this test with SEMEL_WRITE_DOCS=1"


@pytest.mark.parametrize("group", [(), ("ledger",), ("db",), ("outbox",), ("parked",)])
def test_no_summary_is_cut(group):
    shown = process(*group, "--help", env={**os.environ, "COLUMNS": "80"})

    assert "Commands:" in shown.stdout
    assert "..." not in shown.stdout.partition("Commands:")[2]


def test_the_reference_names_the_fields_of_every_answer(filled):
    page = answer("ledger", "list", filled)
    story = answer("ledger", "explain", filled, "paid:7")
    record = page["records"][0]

    assert documented_fields("`ledger list`") == list(page)
    assert documented_fields("A record") == list(record)
    assert documented_fields("`ledger explain`") == [name for name in story if name not in record]
    assert documented_fields("A try") == list(story["tries"][0])
    assert documented_fields("A stored value") == list(story["outcome"])
    assert set(story["steps"]["reserve"]) == set(story["outcome"]) - {"status"}
    assert documented_fields("The next call") == list(story["next_call"])
    changes = [
        ("`ledger resolve`", ("resolve", filled, *VANISHED, "--retry", "--yes")),
        ("`ledger forget`", ("forget", filled, *VANISHED, "--yes")),
        ("`ledger sweep`", ("sweep", filled)),
        ("`ledger guarantees`", ("guarantees", filled)),
    ]
    for heading, args in changes:
        assert documented_fields(heading) == list(answer("ledger", *args))
    assert documented_fields("`db init`, `db upgrade`, `db check`") == list(
        answer("db", "check", filled)
    )


def test_times_are_iso_8601_and_values_are_whole(filled):
    story = answer("ledger", "explain", filled, "paid:7")

    assert datetime.fromisoformat(story["completed_at"]).tzinfo is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", story["started_at"])
    assert base64.b64decode(story["outcome"]["base64"]) == b'{"paid":7}'


def test_the_page_about_settling_is_true(tmp_path, monkeypatch, capsys):
    """Its blocks run in order, against a provider that has seen the charge."""
    page = REFERENCE.parents[1] / "how-to" / "settle-an-unknown-outcome.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    world = {"__name__": "shop"}
    exec(blocks[0], world)
    world["provider"] = Provider()
    with pytest.raises(CutOffError):
        world["charge"](7, 500)
    listed = semel_cli("ledger", "list", "sqlite:///settle.db", "--state", "unknown")
    assert "invoice:7" in listed.stdout

    for block in blocks[1:]:
        exec(block, world)

    assert world["charge"](7, 500) == "receipt"
    assert asyncio.run(world["story_of"](7)).outcome.value == "receipt"
    with pytest.raises(CutOffError):
        world["charge_and_recover"](8, 500)
    assert world["charge_and_recover"](8, 500) == "receipt"
    assert capsys.readouterr().out == ""
    asyncio.run(world["store"].aclose())


class Provider:
    """Takes the money and cuts the line."""

    def __init__(self):
        self.seen = set()

    def charge(self, cents, idempotency_key):
        self.seen.add(idempotency_key)
        raise CutOffError

    def find(self, key):
        return "receipt" if key in self.seen else None
