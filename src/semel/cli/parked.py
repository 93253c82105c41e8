"""`semel parked`: what waits in an inbox, and what people do about it.

A sequence is named by the beginning of its id, as many digits as a listing shows. Each change is
written down with who made it; `--dry-run` says what a change would do, and changes nothing.
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from semel.cli import show, show_parked
from semel.cli.command import (
    BAD_INPUT,
    ENV,
    REFUSED,
    Command,
    Json,
    Yes,
    confirm,
    fail,
    reporting,
)
from semel.cli.database import Database, open_store
from semel.errors import SettingsError
from semel.messages import Audit, ParkedMessage, ParkedSequence, Settled
from semel.parked import Parked

if TYPE_CHECKING:
    from semel.stores.redis.inbox import RedisInbox
    from semel.stores.sql.inbox import SQLInbox

__all__ = ["parked"]

T = TypeVar("T")

parked = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look at messages that wait, and settle them.",
)

ID_DIGITS = 64
AMBIGUOUS = "more than one sequence begins with {}; give more of its digits"

# Among so many changes, the last ones, a sequence is looked for by the beginning of its id.
AUDITS = 10_000

First = Annotated[
    str | None,
    typer.Argument(
        metavar="[URL]",
        show_default=False,
        help=f"The inbox' database; may be left out when {ENV} is set.",
    ),
]
Second = Annotated[
    str | None,
    typer.Argument(
        metavar="SEQUENCE",
        show_default=False,
        help="The sequence: its id, or the beginning of it, as `parked list` shows it.",
    ),
]
Consumer = Annotated[str | None, typer.Option(help="Only of this consumer.")]
Topic = Annotated[str | None, typer.Option(help="Only of this topic.")]
Tenant = Annotated[str | None, typer.Option(help="Only of this tenant.")]
Event = Annotated[str | None, typer.Option(metavar="ID", help="The message with this event id.")]
Note = Annotated[str, typer.Option(help="Why, for the audit.", show_default=False)]
Who = Annotated[
    str | None, typer.Option(help="Who does it, for the audit; user@host unless given.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it would do.")]


class State(enum.StrEnum):
    """Does it run by itself, or wait for people?"""

    WAITING = "waiting"
    PARKED = "parked"


Work = Callable[[Parked], Coroutine[Any, Any, T]]


# --- opening ------------------------------------------------------------------------------------


def _with(url: str, work: Work[T], *, who: str | None = None) -> T:
    """Do the work on the inbox of this URL."""

    async def opened() -> T:
        inbox = _inbox(url)
        try:
            return await work(Parked(inbox, who=who))
        finally:
            await inbox.aclose()

    with reporting(url):
        return asyncio.run(opened())


def _inbox(url: str) -> SQLInbox | RedisInbox:
    if url.lower().startswith(("redis", "unix")):
        from semel.stores.redis.inbox import RedisInbox

        return RedisInbox(url)
    store = open_store(url, "an inbox")
    from semel.stores.sql.inbox import SQLInbox

    return SQLInbox(store)


def _url_and_sequence(
    first: str | None, second: str | None, *, instead: str = ""
) -> tuple[str, str]:
    """Two words are URL and sequence; one is the sequence, if the URL is in the environment."""
    if first is not None and second is not None:
        return first, second
    url = os.environ.get(ENV)
    if first is None or not url:
        fail(
            f"give the inbox' URL and the sequence, or set {ENV} and give the sequence{instead}",
            BAD_INPUT,
        )
    return url, first


def _digits(given: str) -> str:
    digits = given.lower()
    if len(digits) > ID_DIGITS or not set(digits) <= set("0123456789abcdef"):
        fail(f"{given!r} is not the beginning of a sequence's id, as `parked list` shows it", 2)
    return digits


async def _found(desk: Parked, given: str) -> ParkedSequence:
    """The one sequence whose id begins like this."""
    digits = _digits(given)
    first = int(digits.ljust(ID_DIGITS, "0"), 16)
    before = (first - 1).to_bytes(32, "big") if first else None
    near = await desk.list(after=before, limit=2)
    found = [each for each in near if each.sequence.hex().startswith(digits)]
    if not found:
        fail(f"no sequence that begins with {given} waits; `semel parked list` shows those that do")
    if len(found) > 1:
        fail(AMBIGUOUS.format(given), BAD_INPUT)
    return found[0]


# --- looking ------------------------------------------------------------------------------------


@parked.command("list", cls=Command)
def list_sequences(
    url: Database = "",
    consumer: Consumer = None,
    topic: Topic = None,
    tenant: Tenant = None,
    state: Annotated[
        State | None,
        typer.Option(
            help="Only those that are waiting, or parked for people.", case_sensitive=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 100,
    after: Annotated[
        str | None, typer.Option(help="Go on behind this id, the `next` of the last page.")
    ] = None,
    wide: Annotated[
        bool, typer.Option("--wide", help="Whole rows, however narrow the terminal is.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List sequences that wait: the first message of each, and why."""
    chosen: Any = None if state is None else state.value

    def work(desk: Parked) -> Coroutine[Any, Any, Sequence[ParkedSequence]]:
        return desk.list(
            consumer=consumer, topic=topic, tenant=tenant, state=chosen, limit=limit, after=after
        )

    page = _with(url, work)
    following = page[-1].sequence.hex() if len(page) == limit else None
    if as_json:
        found = [show_parked.sequence_json(each) for each in page]
        show.print_json({"sequences": found, "next": following})
        return
    show_parked.print_sequences(page, wide=wide)
    if following:
        show.print_error(f"there may be more: --after {following}")


@parked.command("show", cls=Command)
def show_sequence(
    first: First = None,
    second: Second = None,
    event: Event = None,
    limit: Annotated[int, typer.Option(help="At most so many messages.", min=1)] = 100,
    as_json: Json = False,
) -> None:
    """Show what waits of a sequence, or one message with its payload."""
    url, given = _url_and_sequence(first, second)

    async def work(desk: Parked) -> tuple[ParkedSequence, Sequence[ParkedMessage]]:
        found = await _found(desk, given)
        if event is not None:
            return found, [await _message(desk, found, event)]
        return found, await desk.show(found.sequence, limit=limit)

    found, messages = _with(url, work)
    if as_json:
        told = [show_parked.message_json(each) for each in messages]
        show.print_json({**show_parked.sequence_json(found), "messages": told})
    elif event is not None:
        show_parked.print_message(messages[0])
    else:
        show_parked.print_sequence(found, messages)


async def _message(desk: Parked, found: ParkedSequence, event: str | None) -> ParkedMessage:
    """The message with this id, or the first one."""
    if event is None or found.head.message.id == event:
        return found.head
    page = await desk.show(found.sequence)
    while page:
        for each in page:
            if each.message.id == event:
                return each
        last = page[-1].message.seq
        page = await desk.show(found.sequence, after=last) if last else ()
    return fail(f"event {event} does not wait in sequence {_short(found)}")


def _short(found: ParkedSequence) -> str:
    return found.sequence.hex()[: show_parked.SHORT]


@parked.command(cls=Command)
def audit(
    url: Database = "",
    sequence: Annotated[
        str | None,
        typer.Option(
            help="Only of this sequence: its id, or the beginning of it.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 100,
    as_json: Json = False,
) -> None:
    """List what was changed by hand, by whom and when, the last first."""

    async def work(desk: Parked) -> Sequence[Audit]:
        if sequence is None:
            return await desk.audit(limit=limit)
        whole = await _audited(desk, sequence)
        return [] if whole is None else await desk.audit(sequence=whole, limit=limit)

    found = _with(url, work)
    if as_json:
        show.print_json({"audit": [show_parked.audit_json(each) for each in found]})
    else:
        show_parked.print_audit(found)


async def _audited(desk: Parked, given: str) -> bytes | None:
    """The one that was settled and whose id begins like this; it need not wait any more."""
    digits = _digits(given)
    if len(digits) == ID_DIGITS:
        return bytes.fromhex(digits)
    ids = {each.sequence for each in await desk.audit(limit=AUDITS)}
    found = [id for id in ids if id.hex().startswith(digits)]
    if len(found) > 1:
        fail(AMBIGUOUS.format(given), BAD_INPUT)
    return found[0] if found else None


# --- settling -----------------------------------------------------------------------------------


@parked.command(cls=Command)
def edit(
    first: First = None,
    second: Second = None,
    event: Event = None,
    payload: Annotated[
        str | None, typer.Option(metavar="JSON", help="The new payload.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="A file with the new payload; - for stdin.", show_default=False),
    ] = None,
    note: Note = "",
    who: Who = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Give a message another payload: --payload, --file or $EDITOR."""
    url, given = _url_and_sequence(first, second)
    if payload is not None and file is not None:
        fail("--payload and --file were given; give only one", BAD_INPUT)
    written = _read(file) if file is not None else payload

    async def work(desk: Parked) -> Settled:
        found = await _found(desk, given)
        row = await _message(desk, found, event)
        text = _edited(row.message.payload) if written is None else written.strip()
        return await desk.edit(found.sequence, row.message.id, text, note=note, dry_run=dry_run)

    _settle(url, work, "edited", who=who, as_json=as_json)


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}", BAD_INPUT)


def _edited(payload: str) -> str:
    """What somebody makes of it. Where nothing is lost by it, they see it laid out."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor:
        fail("give --payload or --file, or set EDITOR to edit the payload with it", BAD_INPUT)
    laid_out = _laid_out(payload)
    with tempfile.TemporaryDirectory(prefix="semel-") as folder:  # readable by us alone
        path = Path(folder) / "payload.json"
        path.write_text(laid_out)
        ended = subprocess.run([*shlex.split(editor), str(path)], check=False)  # noqa: S603
        text = path.read_text()
    if ended.returncode or text == laid_out:
        fail("the payload was not edited; nothing was changed")
    return _compact(text) if laid_out != payload else text.strip()


def _laid_out(payload: str) -> str:
    """Only what reads back to the byte: a number could come back as another one."""
    value = json.loads(payload)
    if json.dumps(value, ensure_ascii=False, separators=(",", ":")) != payload:
        return payload
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"


def _compact(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    except ValueError:
        return text  # refused by the inbox, with the reason


@parked.command(cls=Command)
def replay(
    first: First = None,
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="[SEQUENCE]",
            show_default=False,
            help="The sequence: its id, or the beginning of it, as `parked list` shows it; none "
            "with --all.",
        ),
    ] = None,
    all_of_them: Annotated[
        bool, typer.Option("--all", help="Every parked sequence that the filters leave.")
    ] = False,
    consumer: Consumer = None,
    topic: Topic = None,
    tenant: Tenant = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Even what the inbox may have forgotten the effect of."),
    ] = False,
    note: Note = "",
    who: Who = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Have a sequence run again, in order, by its worker; or --all."""
    if all_of_them:
        told = _with(
            _only_url(first, second),
            lambda desk: desk.replay_all(
                consumer=consumer,
                topic=topic,
                tenant=tenant,
                force=force,
                note=note,
                dry_run=dry_run,
            ),
            who=who,
        )
        _show_all(told, dry_run=dry_run, as_json=as_json)
        return
    if consumer or topic or tenant:
        fail("--consumer, --topic and --tenant go with --all; a sequence is one already", BAD_INPUT)
    url, given = _url_and_sequence(
        first, second, instead=", or --all for every sequence that is parked"
    )

    async def work(desk: Parked) -> Settled:
        found = await _found(desk, given)
        return await desk.replay(found.sequence, force=force, note=note, dry_run=dry_run)

    _settle(url, work, "replayed", who=who, as_json=as_json)


def _only_url(first: str | None, second: str | None) -> str:
    url = first or os.environ.get(ENV)
    if second is not None or not url:
        fail(f"with --all, give the inbox' URL, or set {ENV}, and no sequence", BAD_INPUT)
    return url


def _show_all(told: Sequence[Settled | SettingsError], *, dry_run: bool, as_json: bool) -> None:
    done = [one for one in told if isinstance(one, Settled)]
    refused = [str(one) for one in told if isinstance(one, SettingsError)]
    if as_json:
        show.print_json(
            {
                "replayed": 0 if dry_run else len(done),
                "told": [one.told for one in done],
                "refused": refused,
            }
        )
    else:
        for one in done:
            show.print_line(_line(one))
        for why in refused:
            show.print_error(why)
        count = f"{len(done)} sequence{'' if len(done) == 1 else 's'}"
        verb = "would be" if dry_run else "is" if len(done) == 1 else "are"
        show.print_line(f"{count} {verb} replayed")
    if refused:
        raise typer.Exit(REFUSED)


@parked.command(cls=Command)
def skip(
    first: First = None,
    second: Second = None,
    event: Event = None,
    note: Note = "",
    who: Who = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Go on without the first message, or those that never came."""
    url, given = _url_and_sequence(first, second)

    async def work(desk: Parked) -> Settled:
        found = await _found(desk, given)
        shown = await desk.skip(found.sequence, event, dry_run=True)
        if dry_run:
            return shown
        if not yes:
            _ask(url, found, shown)
        # What was shown is what is skipped, or nothing is.
        if await desk.skip(found.sequence, event, dry_run=True) != shown:
            raise SettingsError("it has changed meanwhile, and nothing was skipped; look again")
        named = event if found.head.why == "gap" else shown.event_id
        return await desk.skip(found.sequence, named, note=note)

    _settle(url, work, "skipped", who=who, as_json=as_json)


def _ask(url: str, found: ParkedSequence, shown: Settled) -> None:
    head = found.head
    about = (
        f"{head.consumer} at {show.redact(url, url)}: {head.message.type} of "
        f"{show_parked.aggregate(head)} waits ({head.why}): {head.error}"
    )
    confirm(about, f"This {shown.told}. What is skipped is never run. Do it?")


def _settle(url: str, work: Work[Settled], word: str, *, who: str | None, as_json: bool) -> None:
    """Show what was settled, or why it was not."""

    async def told(desk: Parked) -> Settled | SettingsError:
        try:
            return await work(desk)
        except SettingsError as refusal:
            if type(refusal) is not SettingsError:  # no tables, for one
                raise
            return refusal

    answer = _with(url, told, who=who)
    if isinstance(answer, Settled):
        if as_json:
            show.print_json(show_parked.settled_json(word, answer))
        else:
            show.print_line(_line(answer))
        return
    if as_json:
        show.print_json({word: False, "event_id": None, "told": None, "why": str(answer)})
    else:
        show.print_error(str(answer))
    raise typer.Exit(REFUSED)


def _line(settled: Settled) -> str:
    return f"dry run: {settled.told}" if settled.dry_run else settled.told
