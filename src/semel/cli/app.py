"""The commands.

Each one opens the store, runs one flow of `admin`, and shows the answer.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.main import get_command

import semel
from semel import admin, keys
from semel.admin import Admin, Identity, Recovered, Refused, Retry, Settlement, Story
from semel.cli import disk, show
from semel.cli.command import (
    BAD_INPUT,
    DEFECT,
    ENV,
    REFUSED,
    Command,
    Json,
    Url,
    Yes,
    confirm,
    fail,
    on_disk,
    refuse_empty,
    refuse_memory,
    reporting,
    url_and,
)
from semel.cli.doctor import doctor
from semel.cli.gateway import gateway
from semel.cli.outbox import outbox
from semel.cli.parked import parked
from semel.cli.relay import relay
from semel.cli.rooms import rooms
from semel.cli.router import router
from semel.cli.tail import tail
from semel.cli.worker import worker
from semel.errors import (
    CorruptRecordError,
    ReplayedError,
    SettingsError,
)
from semel.stores import connect
from semel.values import State

# No pretty tracebacks: they print local variables, and one of them is the URL.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Semel: an effect that happens once.",
)
ledger = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look into a ledger and settle its records."
)
db = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make and check what a store on disk or in SQL needs.",
)
app.add_typer(ledger, name="ledger")
app.add_typer(db, name="db")
app.command(cls=Command)(relay)
app.add_typer(outbox, name="outbox")
app.command(cls=Command)(worker)
app.add_typer(parked, name="parked")
app.command(cls=Command)(router)
app.command(cls=Command)(gateway)
app.command(cls=Command)(rooms)
app.command(cls=Command)(tail)
app.command(cls=Command)(doctor)

First = Annotated[
    str | None,
    typer.Argument(
        metavar="[URL]",
        show_default=False,
        help=f"The store, e.g. sqlite:///semel.db; may be left out when {ENV} is set.",
    ),
]
Second = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY", show_default=False, help="The key: its text, or its id in hexadecimal."
    ),
]
Tenant = Annotated[str, typer.Option(help="The key's tenant.", show_default=False)]
Operation = Annotated[
    str, typer.Option(help="The key's operation, with --per-operation.", show_default=False)
]
PerOperation = Annotated[
    bool,
    typer.Option("--per-operation", help="The operation is part of the key's identity."),
]
Version = Annotated[str, typer.Option(help="The version= of the guard.", show_default=False)]
Http = Annotated[bool, typer.Option("--http", help="The key came in an Idempotency-Key header.")]


# --- running ------------------------------------------------------------------------------------


def invoke(args: Sequence[str]) -> int:
    """Run one command and return its exit code. No password leaves with an error."""
    _print_anything()
    try:
        code = get_command(app).main(list(args), prog_name="semel", standalone_mode=False)
    except typer.Abort:
        show.print_error("not confirmed; nothing was changed. In a script, use --yes")
        return REFUSED
    except Exception as error:  # noqa: BLE001 - the last one to see it
        return _report(error, args)
    return code if isinstance(code, int) else 0


def _print_anything() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(error: Any, args: Sequence[str]) -> int:
    """A usage error as typer words it, or a defect with its traceback."""
    text = io.StringIO()
    if hasattr(error, "show") and hasattr(error, "exit_code"):
        error.show(text)
        code = int(error.exit_code)
    else:
        traceback.print_exception(error, file=text)
        code = DEFECT
    said = text.getvalue()
    for url in (os.environ.get(ENV, ""), *args):
        said = show.redact(said, url)
    sys.stderr.write(said)
    return code


@contextmanager
def _opened(url: str) -> Iterator[Admin]:
    with reporting(url):
        refuse_empty(url)
        with Admin(disk.meant(url)) as desk:
            yield desk


def _identity(
    tenant: str, operation: str, per_operation: bool, version: str, http: bool
) -> Identity:
    return {
        "tenant": tenant,
        "operation": operation,
        "per_operation": per_operation,
        "version": version,
        "http": http,
    }


OPTIONS = "--tenant, --version, --operation with --per-operation, or --http if it came in a request"


def _missing(key: str, identity: Identity) -> Refused:
    return admin.missing(key, identity, OPTIONS)


def _spelled(answer: admin.Answer, key: str, identity: Identity) -> admin.Answer:
    """The answer in the words of the command line."""
    is_missing = isinstance(answer, Refused) and answer.missing
    return _missing(key, identity) if is_missing else answer


def _print_version(wanted: bool) -> None:
    if wanted:
        show.print_line(f"semel {semel.__version__}")
        raise typer.Exit


@app.callback()
def _semel(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    pass


# --- looking ------------------------------------------------------------------------------------


@ledger.command("list", cls=Command)
def list_records(
    url: Url = "",
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    operation: Annotated[str | None, typer.Option(help="Only this operation's.")] = None,
    state: Annotated[
        State | None,
        typer.Option(help="Only pending, completed, failed or unknown ones.", case_sensitive=False),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 100,
    after: Annotated[
        str | None, typer.Option(help="Go on behind this id, the `next` of the last page.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show the ids too.")] = False,
    wide: Annotated[
        bool, typer.Option("--wide", help="Whole rows, however narrow the terminal is.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List records, in the order of their ids."""
    with _opened(url) as desk:
        page = desk.records(
            tenant=tenant, operation=operation, state=state, limit=limit, after=_hex(after)
        )
    following = page[-1].key.id.hex() if len(page) == limit else None
    if as_json:
        show.print_json({"records": [show.record_json(r) for r in page], "next": following})
        return
    show.print_records(page, ids=ids, wide=wide)
    if following:
        show.print_error(f"there may be more: --after {following}")


def _hex(id: str | None) -> bytes | None:
    try:
        return None if id is None else bytes.fromhex(id)
    except ValueError:
        fail(f"--after {id!r} is not an id in hexadecimal", BAD_INPUT)


@ledger.command(cls=Command)
def explain(
    first: First = None,
    second: Second = None,
    tenant: Tenant = "",
    operation: Operation = "",
    per_operation: PerOperation = False,
    version: Version = "",
    http: Http = False,
    child: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show what child_key(NAME) was, to look for at a provider.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell a key's whole story, and what the next call will get."""
    url, key = url_and("key", first, second)
    identity = _identity(tenant, operation, per_operation, version, http)
    with _opened(url) as desk:
        story = desk.explain(key, **identity)
    if story is None:
        _show_answer(_missing(key, identity), "found", as_json=as_json)
        return
    made = None if child is None else keys.child_key(story.record.key.id, child)
    if as_json:
        show.print_json(show.story_json(story, made))
    else:
        show.print_story(story, made)


@ledger.command(cls=Command)
def guarantees(url: Url = "", as_json: Json = False) -> None:
    """Say what the store survives, as it is configured right now."""
    with _opened(url) as desk:
        found = desk.guarantees()
    if as_json:
        show.print_json(show.guarantees_json(found))
    else:
        show.print_guarantees(found)


# --- settling -----------------------------------------------------------------------------------


@ledger.command(cls=Command)
def resolve(
    first: First = None,
    second: Second = None,
    value: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="It happened: duplicates get this result."),
    ] = None,
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="It is over: duplicates raise ReplayedError, saying so; requests get it as the "
            "detail of 500 interrupted.",
        ),
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="It did not happen: the next call runs it.")
    ] = False,
    ttl: Annotated[
        float, typer.Option(metavar="SECONDS", help="Keep the settlement so long; 0: for ever.")
    ] = admin.DAY_S,
    status: Annotated[
        int | None,
        typer.Option(
            min=admin.STATUSES.start,
            max=admin.STATUSES.stop - 1,
            help="With --http and --value: the status of the response; 200 unless given.",
            show_default=False,
        ),
    ] = None,
    fence: Annotated[
        int | None,
        typer.Option(help="Settle only the attempt with this fence.", show_default=False),
    ] = None,
    tenant: Tenant = "",
    operation: Operation = "",
    per_operation: PerOperation = False,
    version: Version = "",
    http: Http = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Settle an attempt that vanished. Say how it ended: --value, --error or --retry."""
    url, key = url_and("key", first, second)
    settlement = _settlement(value, error, retry)
    _refuse_status(status, settlement)
    identity = _identity(tenant, operation, per_operation, version, http)
    with _opened(url) as desk:
        story = desk.explain(key, **identity)
        named: admin.KeyLike = key
        if story is not None and not yes:
            confirm(_about(url, story), _intent(settlement, status))
            named = story.record.key
        # What was shown is what is settled, or nothing is.
        shown = None if story is None else story.record.fence
        answer = desk.resolve(
            named,
            settlement,
            fence=shown if fence is None else fence,
            ttl=ttl or None,
            status=status,
            **identity,
        )
    _show_answer(_spelled(answer, key, identity), "resolved", as_json=as_json)


def _settlement(value: str | None, error: str | None, retry: bool) -> Settlement:
    ways = {"--value": value is not None, "--error": error is not None, "--retry": retry}
    given = [name for name, is_given in ways.items() if is_given]
    if not given:
        fail("say how it ended: give one of --value JSON, --error TEXT or --retry", BAD_INPUT)
    if len(given) > 1:
        listed = f"{', '.join(given[:-1])} and {given[-1]}"
        fail(f"{listed} were given; give only one, as it ended only one way", BAD_INPUT)
    if value is not None:
        return Recovered(_parsed(value))
    return Retry() if error is None else ReplayedError(error)


def _parsed(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as problem:
        fail(f"--value is not JSON: {problem}. A text needs its quotes: '\"paid\"'", BAD_INPUT)


def _refuse_status(status: int | None, settlement: Settlement) -> None:
    if status is not None and not isinstance(settlement, Recovered):
        fail(
            "--status goes with --value; to settle with a refusal: "
            """--value '{"detail": "card declined"}' --status 402""",
            BAD_INPUT,
        )


def _intent(settlement: Settlement, status: int | None) -> str:
    match settlement:
        case Recovered(value):
            said = "" if status is None else f"{status} and "
            return f"Record that it happened, with {said}{value!r}?"
        case Retry():
            return "Record that it did not happen, and let the next call run it?"
        case error:
            return f"Record that it is over, with the error {str(error)!r}?"


@ledger.command(cls=Command)
def forget(
    first: First = None,
    second: Second = None,
    force: Annotated[
        bool, typer.Option("--force", help="Even while its holder's lease is live.")
    ] = False,
    tenant: Tenant = "",
    operation: Operation = "",
    per_operation: PerOperation = False,
    version: Version = "",
    http: Http = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Delete a record. The next call then runs, even if it happened before."""
    url, key = url_and("key", first, second)
    identity = _identity(tenant, operation, per_operation, version, http)
    with _opened(url) as desk:
        named: admin.KeyLike | None = key
        if not yes:
            named, about = _about_forgetting(desk, url, key, identity)
            if named is not None:
                confirm(
                    about,
                    "Delete its record, and let the next call run, even if it happened before?",
                )
        answer: admin.Answer = _missing(key, identity)
        if named is not None:
            answer = desk.forget(named, force=force, **identity)
    _show_answer(_spelled(answer, key, identity), "forgotten", as_json=as_json)


def _about_forgetting(
    desk: Admin, url: str, key: str, identity: Identity
) -> tuple[admin.KeyLike | None, str]:
    """Return the record to forget, None if there is none, and the question about it."""
    try:
        story = desk.explain(key, **identity)
    except CorruptRecordError as error:
        return key, show.redact(str(error), url)
    return (None, "") if story is None else (story.record.key, _about(url, story))


def _about(url: str, story: Story) -> str:
    record, last = story.record, story.tries[-1]
    return (
        f"{record.key.text!r} at {show.redact(url, url)} is {record.state}; try {last.number} by "
        f"{last.holder}, begun {show.when(last.started_at)}: {last.ending}"
    )


def _show_answer(answer: admin.Answer, word: str, *, as_json: bool) -> None:
    why = answer.why if isinstance(answer, Refused) else None
    if as_json:
        show.print_json({word: why is None, "why": why})
    elif why is None:
        show.print_line(word)
    else:
        show.print_error(why)
    if why is not None:
        raise typer.Exit(REFUSED)


@ledger.command(cls=Command)
def sweep(
    url: Url = "",
    limit: Annotated[int, typer.Option(help="Delete so many at a time.", min=1)] = 1000,
    one: Annotated[bool, typer.Option("--one", help="Stop after the first chunk.")] = False,
    as_json: Json = False,
) -> None:
    """Delete expired records, chunk by chunk, and count them."""
    with _opened(url) as desk:
        count = desk.sweep(all=not one, limit=limit)
    if as_json:
        show.print_json({"swept": count})
    else:
        show.print_line(f"{count} expired record{'' if count == 1 else 's'} deleted")


# --- tables -------------------------------------------------------------------------------------


@db.command("init", cls=Command)
def init_tables(url: Url = "", as_json: Json = False) -> None:
    """Make the tables, or the store on disk, where there are none."""
    _tables("init", url, as_json=as_json)


@db.command("upgrade", cls=Command)
def upgrade_tables(url: Url = "", as_json: Json = False) -> None:
    """Bring the tables to the version this release needs."""
    _tables("upgrade", url, as_json=as_json)


@db.command("check", cls=Command)
def check_tables(url: Url = "", as_json: Json = False) -> None:
    """Compare the tables with what is needed. Nothing is changed."""
    _tables("check", url, as_json=as_json)


def _tables(verb: str, url: str, *, as_json: bool) -> None:
    with reporting(url):
        _refuse_without_tables(url)
        url = disk.meant(url)
        if on_disk(url):
            _show_disk(verb, url, as_json=as_json)
            return
        from semel.stores.sql import schema

        report = getattr(schema, verb)(url)
    where = f"{show.redact(report.database, url)}: {report.told}"
    _show_report(where, report.version, report.problems, report.notes, as_json=as_json)


def _show_disk(verb: str, url: str, *, as_json: bool) -> None:
    """A store on disk makes its own tables when it is opened; there is no older format to lift."""
    found = disk.look(url)
    if verb == "init" and found.free:
        connect(url).close()
        found = disk.look(url)
        if found.version and url.lower().startswith("sqlite:") and not as_json:
            show.print_error(disk.without_outbox(found.path))
    where = f"{found.path}: format version {found.version}" if found.version else ""
    problems = [found.problem] if found.problem else []
    _show_report(where, found.version, problems, as_json=as_json)


def _refuse_without_tables(url: str) -> None:
    refuse_memory(url)
    scheme = url.partition("://")[0].lower()
    kind = scheme.partition("+")[0]
    if on_disk(url) or kind in ("postgresql", "postgres", "mysql", "mariadb", "sqlite"):
        return
    raise SettingsError(
        f"{url!r} is not a SQL store, so there are no tables to make; `semel db` is for "
        "postgresql://, mysql://, mariadb:// and stores on disk"
    )


def _show_report(
    where: str,
    version: int,
    problems: Sequence[str],
    notes: Sequence[str] = (),
    *,
    as_json: bool,
) -> None:
    if as_json:
        found = {"ok": not problems, "version": version, "problems": [str(p) for p in problems]}
        show.print_json({**found, "notes": list(notes)})
    else:
        if where:
            show.print_line(f"{where}{'' if problems else ', in order'}")
        for said in (*problems, *notes):
            show.print_error(said)
    if problems:
        raise typer.Exit(REFUSED)
