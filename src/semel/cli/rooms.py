"""`semel rooms`: rooms of the application's own over WebSocket, until it is told to end."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Annotated, Any

import typer

from semel.cli import process
from semel.cli.application import named
from semel.cli.command import (
    FOREVER,
    needed,
    refuse_memory,
    reporting,
    seconds,
    seconds_or_forever,
)
from semel.cli.connections import HEAD_TIMEOUT_S, PER_ADDRESS, Waiting
from semel.cli.process import GRACE, Grace, Http, Quiet
from semel.cli.serving import (
    HeadTimeout,
    PerAddress,
    Serving,
    allow_files,
    listening,
    loop,
    refuse_without_server,
    url_of,
)
from semel.errors import SettingsError
from semel.http.ws import Limits, RoomDoor, Spectator, Visitor
from semel.rooms import Room, Rooms

__all__ = ["rooms"]

log = logging.getLogger("semel")


def rooms(
    where: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            show_default=False,
            help="The room: an instance of your class of Room, or the class.",
        ),
    ],
    store: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="SEMEL_URL",
            show_default=False,
            help="Where the rooms are kept.",
        ),
    ] = "",
    name: Annotated[
        str, typer.Option(help="Tells this kind of room from others in the same store.")
    ] = "table",
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 to be reached from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.", min=0, max=65535)] = 8000,
    authorise: Annotated[
        str,
        typer.Option(
            metavar="MODULE:NAME",
            show_default=False,
            help="Your function of a visitor and a room's id: the user's name. Else, everybody "
            "may look, and nobody act.",
        ),
    ] = "",
    trust: Annotated[
        bool,
        typer.Option("--trust", help="For trying out: whoever gives a name as token is that user."),
    ] = False,
    origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            show_default=False,
            help="An origin whose pages may connect, or *; may be given again. Else, the same "
            "host's.",
        ),
    ] = None,
    heartbeat: Annotated[
        str, typer.Option(metavar="TIME", help="How often there is a sign of life.")
    ] = "15s",
    requests: Annotated[
        str, typer.Option(metavar="TIME", help="How long a request is remembered, at least.")
    ] = "5m",
    replay: Annotated[
        int, typer.Option(help="Changes that are kept for those who come back.", min=1)
    ] = 1000,
    connections: Annotated[
        int, typer.Option(help="So many at once, and no more.", min=1)
    ] = Limits().connections,
    forget: Annotated[
        str,
        typer.Option(metavar="TIME", help="A room in which nothing happens for so long is gone."),
    ] = FOREVER,
    per_address: PerAddress = PER_ADDRESS,
    head_timeout: HeadTimeout = f"{HEAD_TIMEOUT_S:g}s",
    drain: Annotated[
        str, typer.Option(metavar="TIME", help="How long connections are closed, told to end.")
    ] = "10s",
    http: Http = "",
    grace: Grace = GRACE,
    quiet: Quiet = False,
) -> None:
    """Open rooms of yours to clients, until it is told to end."""
    heartbeat_s, drain_s = seconds("--heartbeat", heartbeat), seconds("--drain", drain)
    requests_s = seconds("--requests", requests)
    head_timeout_s = seconds("--head-timeout", head_timeout)
    forget_s = seconds_or_forever("--forget", forget)
    found = named(where, "games.poker:table", _hint)
    asks = named(authorise, "games.login:user_of") if authorise else None

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Serving]:
        allowed = allow_files(connections)
        made = Rooms(
            store,
            _room(found, where),
            name=name,
            replay=replay,
            requests_s=requests_s,
            forget_s=forget_s,
        )
        door = RoomDoor(
            made,
            authorise=asks or (_by_name if trust else None),
            origins=origin,
            heartbeat_s=heartbeat_s,
            limits=Limits(connections=allowed),
        )
        if trust:
            log.warning("semel: --trust: everybody is who they say they are; not for real users")
        elif asks is None:
            log.warning(
                "semel: nobody says who somebody is: everybody may look, and nobody act; give "
                "--authorise MODULE:NAME, or, to try it out, --trust"
            )
        try:
            door.start()
            with listening(host, port) as sock:
                at = f"rooms at {url_of(sock, 'ws')}"
                waiting = Waiting(allowed, per_address, head_timeout_s)
                yield Serving(door, door, sock, at, drain_s, waiting, **_WEBSOCKET)
        finally:
            await door.aclose()

    with reporting(store):
        refuse_memory(needed(store))
        if trust and authorise:
            raise SettingsError("--trust and --authorise both say who somebody is; give one")
        refuse_without_server("rooms", "websockets")
        process.run(
            opened,
            about=f"{where} in {store}, under the name {name!r}; another --name has other rooms",
            http=http,
            grace=grace,
            quiet=quiet,
            urls=(store,),
            loop=loop(),
        )


# Larger messages are refused by the door, which says so; much larger ones by the server.
_WEBSOCKET: dict[str, Any] = {
    "ws": "websockets-sansio",
    "ws_max_size": Limits().frame_bytes,
    "ws_per_message_deflate": False,
}


def _by_name(visitor: Visitor, _: str) -> str | Spectator:
    return visitor.token or Spectator()


def _hint(module: ModuleType) -> str:
    found = [name for name, each in vars(module).items() if _is_room(each)]
    if not found:
        return "; name an instance of a class of Room"
    return f"; its rooms are {', '.join(f'{module.__name__}:{name}' for name in found)}"


def _is_room(each: Any) -> bool:
    return isinstance(each, Room) or (
        isinstance(each, type) and issubclass(each, Room) and each is not Room
    )


def _room(found: Any, where: str) -> Room:
    if not _is_room(found):
        raise SettingsError(
            f"{where} is a {type(found).__name__}, not a Room; name an instance of your class of "
            "Room, or the class"
        )
    if isinstance(found, Room):
        return found
    if missing := sorted(found.__abstractmethods__):
        raise SettingsError(
            f"{where} has no {' and no '.join(missing)}; a class of Room says what becomes of an "
            "action by apply, and what is shown of a state by view"
        )
    takes = inspect.signature(found)
    try:
        takes.bind()
    except TypeError:
        raise SettingsError(
            f"{where} cannot be made without its arguments, {takes}; make one in the module, as "
            f"in room = {found.__name__}(...), and name that: {where.partition(':')[0]}:room"
        ) from None
    made: Room = found()
    return made
