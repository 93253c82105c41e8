"""`semel tail`: one job in the terminal, line by line as it happens.

From the store itself, or through a gateway, by the kind of URL. It ends with the job. On stdout are
the events; whatever else is to be said is on stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote

import typer
from rich.console import Console
from rich.text import Text

from semel import feed as feeds
from semel.bus.jobs import checked_domain, state_of
from semel.bus.watching import checked_stream
from semel.cli import disk, show
from semel.cli.command import BAD_INPUT, Json, fail, refuse_empty, reporting, url_and
from semel.cli.router import Domain
from semel.client.feed_rules import FeedError
from semel.colour import ASYNC
from semel.entries import Position
from semel.settings import as_log_store
from semel.stores.log_rules import name_of

__all__ = ["tail"]

Told: TypeAlias = dict[str, Any]
"""What is told of a job: `kind` is update, reset or end."""


def tail(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL]",
            show_default=False,
            help="The store, e.g. redis://localhost, or a gateway, e.g. https://live.example/jobs; "
            "may be left out when SEMEL_URL is set.",
        ),
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="JOB", show_default=False, help="The job's id.")
    ] = None,
    domain: Domain = "scan",
    after: Annotated[
        str,
        typer.Option(metavar="CURSOR", help="Go on behind this one.", show_default=False),
    ] = "",
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:VALUE",
            help="Sent to the gateway; may be given again.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Follow a job, line by line, until it has ended."""
    url, job_id = url_and("job", first, second)
    if after and Position.parse(after) is None:
        fail(f"--after {after!r} is no cursor; it looks like 42.9f3c00d1a2b3", BAD_INPUT)
    is_gateway = url.lower().startswith(("http://", "https://"))
    with reporting(url):
        name_of(job_id, "job")
        if is_gateway:
            told = _at_gateway(url, job_id, after, _headers(header or []))
        else:
            told = _in_store(url, checked_domain(domain), job_id, after)
        _follow(told, _shown_json if as_json else _Lines().show, url)


def _headers(given: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for each in given:
        name, colon, text = each.partition(":")
        if not colon or not name.strip():
            fail(f"--header {name!r} is not NAME:VALUE", BAD_INPUT)
        headers[name.strip()] = text.strip()
    return headers


def _follow(told: AsyncIterator[Told], shown: Callable[[Told], None], url: str) -> None:
    """Until the job has ended, or whoever looks has seen enough."""
    cursor = ""

    async def follow() -> None:
        nonlocal cursor
        async with aclosing(told):  # type: ignore[type-var]
            async for each in told:
                shown(each)
                cursor = each["cursor"]

    try:
        asyncio.run(follow())
    except FeedError as error:  # not there, gone, or not for us
        fail(str(error), url=url)
    except KeyboardInterrupt:
        show.print_error(f"to go on from here: --after {cursor}" if cursor else "nothing came")
    except BrokenPipeError:  # `| head` has what it wanted; nothing is to be flushed to it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# --- where it comes from ------------------------------------------------------------------------


async def _in_store(url: str, domain: str, job_id: str, after: str) -> AsyncIterator[Told]:
    stream = checked_stream(domain, job_id)
    refuse_empty(url)
    store = as_log_store(disk.meant(url))
    try:
        # What does not answer, or has no tables, is told at once: later it would be waited for.
        if (await store.log(ASYNC).load(stream)).life == "unknown":
            show.print_error(
                f"nothing is known of job {job_id!r} of {domain!r} yet; waiting for it"
            )
        async with feeds.Feed(store) as feed:
            async for news in feed.subscribe(stream, after or None):
                match news:
                    case feeds.Update(entry):
                        yield _update(str(entry.position), _read(entry.data))
                    case feeds.Reset(reason, snapshot):
                        yield _reset(str(snapshot.position), reason, state_of(snapshot))
                    case feeds.End(position):
                        yield _end(str(position))
    finally:
        await store.aclose()


async def _at_gateway(
    url: str, job_id: str, after: str, headers: dict[str, str]
) -> AsyncIterator[Told]:
    from semel.client.feed import Reset, Update, feed

    where = f"{url.rstrip('/')}/{quote(job_id, safe='')}"
    async with feed(where, after=after or None, headers=headers) as events:
        async for event in events:
            match event:
                case Update():
                    yield _update(event.id, event.data)
                case Reset():
                    yield _reset(event.id, event.reason, event.state)
        yield _end(events.cursor or "")


def _read(data: bytes) -> Any:
    """A stream may be anybody's."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def _update(cursor: str, event: Any) -> Told:
    return {"kind": "update", "cursor": cursor, "event": event}


def _reset(cursor: str, reason: str, state: Any) -> Told:
    return {"kind": "reset", "cursor": cursor, "reason": reason, "state": state}


def _end(cursor: str) -> Told:
    return {"kind": "end", "cursor": cursor}


# --- how it looks -------------------------------------------------------------------------------


def _shown_json(told: Told) -> None:
    print(json.dumps(told), flush=True)  # noqa: T201 - answers go to stdout


class _Lines:
    """Time, stage, seq, attempt and data of each event; parted by tabs where nobody looks."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._console = console if console.is_terminal else None

    def show(self, told: Told) -> None:
        match told:
            case {"kind": "update", "event": event}:
                self._print(_cells(event))
            case {"kind": "reset", "reason": reason, "state": state, "cursor": cursor}:
                stages = state.get("stages", {}) if isinstance(state, dict) else {}
                stands = "; it stands so:" if stages else ""
                show.print_error(f"what came before {cursor} cannot be had ({reason}){stands}")
                for event in stages.values():
                    self._print(_cells(event))
            case _:
                show.print_error("the job has ended")

    def _print(self, cells: tuple[str, ...]) -> None:
        if self._console is None:
            show.print_line_of(cells)
            sys.stdout.flush()
            return
        time, stage, seq, attempt, data = (show.clean(show.shorten(cell)) for cell in cells)
        line = Text.assemble((f"{time} ", "dim"), (f"{stage:<8} ", "bold"))
        line.append(f"{seq:>4} {attempt:>3}  {data}")
        self._console.print(line, soft_wrap=True)


def _cells(event: Any) -> tuple[str, ...]:
    """What somebody is shown need not be a whole event: a gateway may show less."""
    whole = event if isinstance(event, dict) else {"data": event}
    names = ("stage", "seq", "attempt")
    rest = (
        whole.get("data") if "data" in whole else {k: v for k, v in whole.items() if k not in names}
    )
    written = json.dumps(rest, ensure_ascii=False)
    return _time(whole.get("timestamp")), *(str(whole.get(name, "")) for name in names), written


def _time(stamp: Any) -> str:
    try:
        moment = datetime.fromisoformat(stamp).astimezone(UTC)
    except (TypeError, ValueError):
        return ""
    return f"{moment:%Y-%m-%d %H:%M:%S}.{moment.microsecond // 1000:03}Z"
