"""`semel parked`: what waits, and what people do about it, on every kind of inbox."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import stat
import sys
import threading
from datetime import UTC, datetime

import pytest
from typer.testing import CliRunner

from semel.cli.app import app, invoke
from semel.errors import SettingsError
from semel.inbox import PoisonError, RedisInbox, SQLInbox
from semel.messages import Message
from semel.parked import Parked
from semel.stores.sql import schema
from support.cli_reference import documented_fields

HAPPENED = datetime(2026, 11, 16, 12, tzinfo=UTC)


def message(aggregate, seq, payload='{"total":40}', *, topic="orders", tenant="acme", **more):
    return Message(
        position=seq or 1,
        id=f"{aggregate}-{seq}",
        type="order.placed",
        topic=topic,
        tenant=tenant,
        aggregate_type="order",
        aggregate_id=aggregate,
        seq=seq,
        payload=payload,
        time=HAPPENED,
        headers={"trace": "abc"},
        **more,
    )


async def refuse(message, session):
    if message.aggregate_id == "sick":
        raise LookupError("try me later")
    raise PoisonError("[red]no[/red] such\x1b[31m customer")


STORY = (
    # Parked, with two behind it; waits for another try; for one that has not come; alone.
    *(message("dead", n) for n in (1, 2, 3)),
    message("sick", 1),
    message("gap", 3, topic="watches", tenant=""),
    message("lone", None),
)


def open_inbox(url):
    return RedisInbox(url) if url.startswith("redis") else SQLInbox(url)


def apply(url, *messages, handle=refuse):
    async def work():
        inbox = open_inbox(url)
        try:
            return await inbox.apply("billing", messages, handle)
        finally:
            await inbox.aclose()

    return asyncio.run(work())


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """An inbox with a story, in a file to be copied."""
    path = tmp_path_factory.mktemp("template") / "shop.db"
    filled(f"sqlite:///{path}")
    return path


@pytest.fixture
def url(template, tmp_path):
    shutil.copy(template, tmp_path / "shop.db")
    return f"sqlite:///{tmp_path}/shop.db"


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def any_url(request):
    if request.param == "sqlite":
        return request.getfixturevalue("url")
    return filled(request.getfixturevalue(f"{request.param}_url"))


def filled(url):
    if not url.startswith("redis"):
        schema.init(url)
    apply(url, *STORY)
    return url


def semel_cli(*args, **kwargs):
    return CliRunner().invoke(app, ["parked", *args], **kwargs)


def answer(*args, **kwargs):
    result = semel_cli(*args, "--json", **kwargs)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def ids(url):
    """The sequences, by aggregate."""
    return {each["aggregate_id"]: each["sequence"] for each in answer("list", url)["sequences"]}


def heads(url):
    return {
        each["aggregate_id"]: (each["head"]["event_id"], each["head"]["state"])
        for each in answer("list", url)["sequences"]
    }


# --- on every inbox -----------------------------------------------------------------------------


def test_looking_and_settling_on_every_inbox(any_url):
    url = any_url
    found = {each["aggregate_id"]: each for each in answer("list", url)["sequences"]}
    told = {
        name: (each["head"]["state"], each["head"]["why"], each["behind"], each["mark"])
        for name, each in found.items()
    }
    assert told == {
        "dead": ("parked", "poison", 2, 0),
        "sick": ("waiting", "retry", 0, 0),
        "gap": ("waiting", "gap", 0, 0),
        "lone": ("parked", "poison", 0, None),
    }
    dead, gap, lone = (found[name]["sequence"] for name in ("dead", "gap", "lone"))

    shown = answer("show", url, dead[:12])
    assert [each["event_id"] for each in shown["messages"]] == ["dead-1", "dead-2", "dead-3"]

    answer("edit", url, dead, "--payload", '{"total":1}', "--note", "a typo", "--who", "ann")
    assert answer("show", url, dead)["head"]["payload"] == '{"total":1}'
    assert answer("replay", url, dead)["replayed"]
    assert heads(url)["dead"] == ("dead-1", "waiting")
    assert answer("skip", url, dead, "--event", "dead-1", "--yes")["event_id"] == "dead-1"
    assert heads(url)["dead"] == ("dead-2", "waiting")
    assert answer("skip", url, gap, "--yes")["told"].startswith("goes on without numbers 1 to 2")
    again = semel_cli("skip", url, gap, "--yes")
    assert (again.exit_code, "gap-3" in again.stderr, "--event" in again.stderr) == (1, True, True)
    assert heads(url)["gap"] == ("gap-3", "waiting")
    assert answer("show", url, gap)["head"]["why"] == "retry"
    assert answer("skip", url, lone, "--yes")["skipped"]
    assert "lone" not in heads(url)

    audit = answer("audit", url)["audit"]
    did = [(each["verb"], each["event_id"]) for each in reversed(audit)]
    assert did == [
        ("edit", "dead-1"),
        ("replay", "dead-1"),
        ("skip", "dead-1"),
        ("skip", "gap-3"),
        ("skip", "lone-None"),
    ]
    assert audit[-1]["who"] == "ann"
    assert "a typo" in audit[-1]["note"]
    assert (audit[-1]["before"], audit[-1]["after"]) == ('{"total":40}', '{"total":1}')
    for digits in (dead, dead[:12], dead[:12].upper()):
        assert len(answer("audit", url, "--sequence", digits)["audit"]) == 3
    assert len(answer("audit", url, "--sequence", dead[:12], "--limit", "2")["audit"]) == 2
    assert answer("audit", url, "--sequence", "0" * 63 + "7")["audit"] == []
    assert semel_cli("audit", url, "--sequence", "").exit_code == 2


def test_what_is_replayed_runs_and_what_waits_behind_it_follows(any_url):
    ran = []

    async def handle(message, session):
        ran.append(message.id)

    assert answer("replay", any_url, ids(any_url)["dead"])["replayed"]

    async def work():
        inbox = open_inbox(any_url)
        try:
            while await inbox.retry("billing", (0, 255), handle):
                pass
        finally:
            await inbox.aclose()

    asyncio.run(work())
    assert [id for id in ran if id.startswith("dead")] == ["dead-1", "dead-2", "dead-3"]
    assert "dead" not in heads(any_url)


# --- list and show ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--consumer", "billing"), {"dead", "sick", "gap", "lone"}),
        (("--consumer", "nobody"), set()),
        (("--topic", "watches"), {"gap"}),
        (("--tenant", "acme"), {"dead", "sick", "lone"}),
        (("--state", "PARKED"), {"dead", "lone"}),
        (("--state", "waiting", "--tenant", "acme"), {"sick"}),
    ],
)
def test_filters(url, options, names):
    found = answer("list", url, *options)["sequences"]
    assert {each["aggregate_id"] for each in found} == names


def test_pages(url):
    first = answer("list", url, "--limit", "3")
    rest = answer("list", url, "--limit", "3", "--after", first["next"])

    assert len(first["sequences"]) == 3
    assert len(rest["sequences"]) == 1
    assert rest["next"] is None
    assert f"--after {first['next']}" in semel_cli("list", url, "--limit", "3").stderr


def test_a_pipe_gets_one_line_per_sequence_and_nothing_reaches_the_terminal(url):
    lines = semel_cli("list", url).stdout.splitlines()

    assert len(lines) == 5
    assert {line.count("\t") for line in lines} == {9}
    [dead] = [line for line in lines if "order/dead" in line]
    assert "PoisonError: [red]no[/red] such\\x1b[31m customer" in dead


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_listing_fits_its_terminal(url, monkeypatch, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    result = semel_cli("list", url, color=True)
    rows = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout).splitlines()

    assert len(rows) == 5, "no row is wrapped"
    assert max(map(len, rows)) <= columns
    assert {"sequence", "aggregate", "why"} <= set(rows[0].split())
    assert "--wide" in result.stderr


def test_a_listing_has_what_an_error_says_and_wide_where_it_comes_from(url):
    def sick(*options):
        lines = semel_cli("list", url, *options).stdout.splitlines()
        return next(line.split("\t")[-1] for line in lines if "order/sick" in line)

    assert sick() == "LookupError: try me later"
    assert re.fullmatch(r"LookupError: try me later \(.*test_cli_parked\.py:\d+\)", sick("--wide"))


def test_a_sequence_for_people(url):
    shown = semel_cli("show", url, ids(url)["dead"][:8]).stdout

    assert "consumer\tbilling\n" in shown
    assert "aggregate\torder/dead\n" in shown
    assert "done\tup to number 0\n" in shown
    assert "2\tdead-2\torder.placed\twaiting\tbehind\t0\t\t\n" in shown
    assert shown.endswith('payload of event dead-1: {"total":40}\n')


def test_a_message_for_people(url):
    shown = semel_cli("show", url, ids(url)["dead"], "--event", "dead-3").stdout

    assert 'payload\t{"total":40}\n' in shown
    assert "header trace\tabc\n" in shown
    assert "number\t3\n" in shown


def test_of_a_stand_in_is_shown_what_to_do_until_it_is_done(any_url):
    url = any_url
    apply(url, message("large", 1, "null", refused="2 MB, 1 is taken"), message("large", 2))
    large = ids(url)["large"]
    assert answer("show", url, large)["head"]["refused"] == "2 MB, 1 is taken"
    for options in [(), ("--event", "large-1")]:
        shown = semel_cli("show", url, large, *options).stdout
        assert "event large-1 came without its payload" in shown
        assert f"semel parked edit URL {large[:12]} --event large-1 --file FILE" in shown
        assert f"semel parked replay URL {large[:12]}" in shown
        assert "event_outbox" in shown
        assert "payload of event" not in shown
    assert "without its payload" not in semel_cli("show", url, large, "--event", "large-2").stdout
    answer("edit", url, large, "--event", "large-1", "--payload", '{"total":1}')
    assert answer("show", url, large)["head"]["refused"] == ""
    assert "without its payload" not in semel_cli("show", url, large).stdout


def test_what_does_not_fit_is_mentioned(url):
    dead = ids(url)["dead"]
    assert "and 2 more" in semel_cli("show", url, dead, "--limit", "1").stdout
    assert len(answer("show", url, dead, "--limit", "1")["messages"]) == 1


def test_the_url_may_come_from_the_environment(url):
    env = {"SEMEL_URL": url}

    assert len(answer("list", env=env)["sequences"]) == 4
    assert answer("show", ids(url)["dead"], env=env)["aggregate_id"] == "dead"
    assert answer("replay", "--all", env=env)["replayed"] == 2


# --- edit ---------------------------------------------------------------------------------------


def payload_of(url, event="dead-1"):
    return answer("show", url, ids(url)["dead"], "--event", event)["messages"][0]["payload"]


def test_another_message_than_the_first_may_be_edited(url):
    answer("edit", url, ids(url)["dead"], "--event", "dead-2", "--payload", "2")

    assert (payload_of(url), payload_of(url, "dead-2")) == ('{"total":40}', "2")


def test_a_payload_may_come_from_a_file_or_from_stdin(url, tmp_path):
    (tmp_path / "new.json").write_text('{"total": 41}\n')
    answer("edit", url, ids(url)["dead"], "--file", str(tmp_path / "new.json"))
    assert payload_of(url) == '{"total": 41}'

    answer("edit", url, ids(url)["dead"], "--file", "-", input='{"total": 42}\n')
    assert payload_of(url) == '{"total": 42}'


def editor(tmp_path, script):
    path = tmp_path / "editor with a space"
    path.write_text(f"#!{sys.executable}\nimport sys, pathlib\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return {"EDITOR": f"'{path}' --wait", "VISUAL": ""}


CHANGE = "p = pathlib.Path(sys.argv[-1]); p.write_text(p.read_text().replace('40', '43'))"


def test_a_payload_may_be_edited_with_ones_editor(url, tmp_path):
    seen = tmp_path / "seen"
    env = editor(tmp_path, f"{CHANGE}; pathlib.Path({str(seen)!r}).write_text(p.read_text())")
    result = semel_cli("edit", url, ids(url)["dead"], env=env)

    assert result.stdout == "gives event dead-1 (order.placed, number 1) another payload\n"
    assert seen.read_text() == '{\n  "total": 43\n}\n'
    assert payload_of(url) == '{"total":43}'


def test_what_would_read_back_otherwise_is_edited_as_it_is(url, tmp_path):
    odd = '{"total":  1.40, "id": 12345678901234567890.0}'
    answer("edit", url, ids(url)["dead"], "--payload", odd)
    semel_cli("edit", url, ids(url)["dead"], env=editor(tmp_path, CHANGE))

    assert payload_of(url) == odd.replace("40", "43")


@pytest.mark.parametrize(
    ("script", "code", "why"),
    [
        ("pass", 1, "the payload was not edited; nothing was changed"),
        (f"{CHANGE}; sys.exit(1)", 1, "the payload was not edited; nothing was changed"),
        ("pathlib.Path(sys.argv[-1]).write_text('{')", 2, "the payload is no JSON"),
    ],
)
def test_what_an_editor_leaves_may_be_no_change(url, tmp_path, script, code, why):
    result = semel_cli("edit", url, ids(url)["dead"], env=editor(tmp_path, script))

    assert result.exit_code == code
    assert why in result.stderr
    assert payload_of(url) == '{"total":40}'


def test_without_an_editor_a_payload_is_asked_for(url, monkeypatch):
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    result = semel_cli("edit", url, ids(url)["dead"])

    assert result.exit_code == 2
    assert "give --payload or --file, or set EDITOR" in result.stderr


# --- replay and skip ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "options", "word"),
    [("edit", ("--payload", "1"), "edited"), ("replay", (), "replayed"), ("skip", (), "skipped")],
)
def test_a_dry_run_says_what_it_would_do_and_changes_nothing(url, verb, options, word):
    before = answer("list", url)
    words = (verb, url, ids(url)["dead"], *options, "--dry-run")
    plain = semel_cli(*words)
    told = answer(*words)

    assert plain.stdout.startswith("dry run: ")
    assert told[word] is False
    assert told["why"] == "dry run"
    assert f"dry run: {told['told']}\n" == plain.stdout
    assert answer("list", url) == before
    assert answer("audit", url)["audit"] == []


def test_all_that_is_parked_may_be_replayed(url):
    dry = semel_cli("replay", url, "--all", "--dry-run")
    assert dry.stdout.splitlines()[-1] == "2 sequences would be replayed"
    assert answer("replay", url, "--all", "--topic", "watches")["replayed"] == 0

    done = semel_cli("replay", url, "--all", "--note", "fixed in 1.2")
    assert done.stdout.splitlines()[-1] == "2 sequences are replayed"
    assert heads(url)["dead"] == ("dead-1", "waiting")


def test_one_is_one(url):
    answer("skip", url, ids(url)["lone"], "--yes")
    assert semel_cli("replay", url, "--all").stdout.endswith("\n1 sequence is replayed\n")


def test_what_cannot_be_replayed_is_told_beside_the_rest(url, monkeypatch):
    plain = Parked.replay

    async def picky(desk, sequence, **settings):
        if sequence.hex() == ids_[0]:
            raise SettingsError("not this one")
        return await plain(desk, sequence, **settings)

    ids_ = sorted(v for k, v in ids(url).items() if k in ("dead", "lone"))
    monkeypatch.setattr(Parked, "replay", picky)
    result = semel_cli("replay", url, "--all", "--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert (told["replayed"], told["refused"]) == (1, ["not this one"])
    assert "not this one" in semel_cli("replay", url, "--all").stderr


def test_skipping_asks_first_and_no_is_no(url):
    result = semel_cli("skip", url, ids(url)["dead"], input="n\n")

    assert result.exit_code == 1
    assert "billing at sqlite:///" in result.stderr
    assert "order.placed of order/dead waits (poison): PoisonError" in result.stderr
    assert "This goes on without event dead-1 (order.placed, number 1)" in result.stderr
    assert "What is skipped is never run. Do it? [y/N]" in result.stderr
    assert heads(url)["dead"] == ("dead-1", "parked")


def test_yes_is_yes(url):
    told = answer("skip", url, ids(url)["dead"], input="y\n")

    assert told["skipped"]
    assert heads(url)["dead"] == ("dead-2", "waiting")


def test_a_message_that_waits_for_others_may_be_skipped_by_its_name(url):
    told = answer("skip", url, ids(url)["gap"], "--event", "gap-3", "--yes")

    assert told["told"].startswith("goes on without event gap-3")
    assert "gap" not in heads(url)


@pytest.mark.parametrize("aggregate", ["dead", "gap"])
def test_what_was_shown_is_what_is_skipped(url, monkeypatch, aggregate):
    """While the person reads the question, somebody else skips, or what was missing comes."""
    sequence = ids(url)[aggregate]

    class Person(io.StringIO):
        def readline(self, *_):
            if aggregate == "dead":
                in_a_thread(lambda: answer("skip", url, sequence, "--yes"))
            else:
                missing = [message("gap", n, topic="watches", tenant="") for n in (1, 2)]
                in_a_thread(lambda: apply(url, *missing))
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Person())
    assert invoke(["parked", "skip", url, sequence]) == 1
    expected = {"dead": ("dead-2", "waiting"), "gap": ("gap-1", "parked")}
    assert heads(url)[aggregate] == expected[aggregate]


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# --- when it does not work ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("show", "{url}", "xyz"), 2, "'xyz' is not the beginning of a sequence's id"),
        (("show", "{url}", "0" * 65), 2, "is not the beginning of a sequence's id"),
        (("show", "{url}", ""), 2, "more than one sequence begins with"),
        (("show", "{url}", "0" * 64), 1, "no sequence that begins with 000"),
        (("show", "{url}", "{dead}", "--event", "x"), 1, "event x does not wait in sequence"),
        (("show", "{url}", "{lone}", "--event", "x"), 1, "event x does not wait in sequence"),
        (("show",), 2, "give the inbox' URL and the sequence, or set SEMEL_URL"),
        (("list", "{url}", "--state", "done"), 2, "--state"),
        (("list", "{url}", "--after", "xyz"), 2, "names no sequence"),
        (("list", "{url}", "--limit", "0"), 2, "--limit"),
        (("list", "memory://"), 2, "lives inside the process"),
        (("list", "nonsense://x"), 2, "is not the URL of an SQL database, and an inbox is in one"),
        (("list", "sqlite:////no/such.db"), 2, "there is nothing at '/no/such.db'"),
        (("list", "sqlite:///{empty}"), 2, "semel db init"),
        (("list", "postgresql://127.0.0.1:1/x"), 3, "did not answer"),
        (("list", "redis://127.0.0.1:1"), 3, "did not answer"),
        (("edit", "{url}", "{dead}", "--payload", "{{"), 2, "the payload is no JSON"),
        (("edit", "{url}", "{dead}", "--payload", "1", "--file", "-"), 2, "give only one"),
        (("edit", "{url}", "{dead}", "--file", "/no/such/file"), 2, "cannot be read"),
        (("edit", "{url}", "{dead}", "--payload", "1", "--who", " "), 2, "must name whoever"),
        (("replay", "{url}", "{gap}"), 1, "waits for numbers 1 to 2, which has not come"),
        (("replay", "{url}", "{dead}", "--all"), 2, "with --all, give the inbox' URL"),
        (("replay", "{url}", "{dead}", "--topic", "x"), 2, "go with --all"),
        (("replay", "{url}"), 2, "or --all for every sequence that is parked"),
        (("skip", "{url}", "{dead}", "--event", "dead-2", "--yes"), 1, "first in its sequence is"),
        (("audit", "{url}", "--sequence", "xyz"), 2, "is not the beginning of a sequence's id"),
    ],
)
def test_a_mistake_is_said_and_nothing_changed(url, tmp_path, words, code, why, monkeypatch):
    monkeypatch.delenv("SEMEL_URL", raising=False)
    (tmp_path / "empty.db").touch()
    named = {**ids(url), "url": url, "empty": tmp_path / "empty.db"}
    before = answer("list", url)
    result = semel_cli(*(word.format(**named) for word in words))

    assert result.exit_code == code, result.output
    assert why in result.stderr
    assert "Traceback" not in result.stderr
    assert answer("list", url) == before


def test_a_refusal_in_json(url):
    result = semel_cli("replay", url, ids(url)["gap"], "--json")

    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert list(told) == ["replayed", "event_id", "told", "why"]
    assert not told["replayed"]
    assert "which has not come" in told["why"]


def test_whoever_did_it_is_this_user_unless_said_otherwise(url, monkeypatch):
    monkeypatch.setenv("LOGNAME", "berta")
    answer("replay", url, ids(url)["dead"])

    [audit] = answer("audit", url)["audit"]
    assert audit["who"] == f"berta@{os.uname().nodename}"
    shown = semel_cli("audit", url).stdout
    assert "berta@" in shown
    assert "\treplay\t" in shown


def test_the_reference_names_the_fields_of_every_answer(url):
    page = answer("list", url)
    shown = answer("show", url, ids(url)["dead"])
    sequence = page["sequences"][0]

    assert documented_fields("`parked list`") == list(page)
    assert documented_fields("A parked sequence") == list(sequence)
    assert documented_fields("A parked message") == list(sequence["head"])
    more = [name for name in shown if name not in sequence]
    assert documented_fields("`parked show`") == more
    settled = documented_fields("`parked edit`, `parked replay`, `parked skip`")
    assert settled == list(answer("replay", url, ids(url)["dead"]))[1:]
    assert documented_fields("`parked replay --all`") == list(answer("replay", url, "--all"))
    audit = answer("audit", url)
    assert documented_fields("`parked audit`") == list(audit)
    assert documented_fields("What was done by hand") == list(audit["audit"][0])
