"""Who is at the door, and whether they may come in."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from semel.colour import in_own_task
from semel.errors import SettingsError
from semel.failures import Failures
from semel.http.parts import NotSentError
from semel.http.protocol import Refusal, Request
from semel.http.refusal import is_refusal
from semel.rooms.names import MOST_USER, named
from semel.values import value

__all__ = [
    "Authorise",
    "NotLetIn",
    "Origins",
    "Spectator",
    "Visitor",
    "check_authorise",
    "let_in",
    "visitor_of",
]

log = logging.getLogger("semel")

# Whoever says who may do what has so long for it.
DECIDED_WITHIN_S = 30.0
RETRY_S = 1.0

NO_USER = "nobody can say who you are; this has to be mended on the server"

DEFAULT_PORTS = {"http": ":80", "https": ":443"}

# Origins that were refused and are told of, each once: strangers can think of many.
MOST_TOLD = 20


class Visitor(Request):
    """A client that wants to join a room, as `authorise` sees it.

    It is the head of the request that opened the connection, with what the client said when it
    joined: its `token`, and whether it wants to `spectate`.
    """

    def __init__(
        self, *head: Any, token: str | None = None, spectate: bool = False, **more: Any
    ) -> None:
        super().__init__(*head, **more)
        self.token = token
        self.spectate = spectate

    def joining(self, token: str | None, *, spectate: bool) -> Visitor:
        """Return a copy for one join. A connection may join several rooms."""
        found = copy(self)
        found.token, found.spectate = token, spectate
        return found


@value
class Spectator:
    """Somebody who may look, and do nothing. Shown what everybody is."""


Authorise: TypeAlias = Callable[[Visitor, str], Any]
"""From a visitor and a room's id to the user's name, or `Spectator()`, sync or async. Every falsy
answer is a refusal, and so is a `Refusal` that it raises."""


def check_authorise(authorise: Authorise) -> None:
    """`SettingsError` for what could never be asked. What cannot be inspected passes."""
    if not callable(authorise):
        raise SettingsError(f"authorise={authorise!r:.80} is no function")
    try:
        takes = inspect.signature(authorise)
    except Exception:  # noqa: BLE001 - in C, or with annotations that cannot be evaluated
        return
    try:
        takes.bind("visitor", "room_id")
    except TypeError:
        name = getattr(authorise, "__name__", type(authorise).__name__)
        raise SettingsError(
            f"authorise={name}{takes} is asked as {name}(visitor, room_id), and does not take "
            "these two"
        ) from None


class NotLetIn(Exception):  # noqa: N818 - a situation: the client is told
    """`retry_s`: nothing was decided, and the same may be asked again then."""

    def __init__(
        self, message: str, code: str = "UNAUTHORIZED", retry_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_s = retry_s


async def let_in(
    authorise: Authorise | None, visitor: Visitor, room_id: str, failures: Failures
) -> str | None:
    """The user, None for a spectator; `NotLetIn` for whoever may not."""
    found: Any = Spectator()
    if authorise is not None:
        found = await _decided(authorise, visitor, room_id, failures)
    match found:
        case str():
            user = _user(found, failures)
            return None if visitor.spectate else user
        case Spectator():
            return None
        case None:
            raise NotLetIn("you may not join this room")
        case _:
            wrong = TypeError(f"{type(found).__name__} is not a user's name")
            failures.tell(
                wrong,
                "semel: authorise gave a %s; it is to give the user's name, Spectator(), or None",
                type(found).__name__,
            )
            raise NotLetIn(NO_USER, "FAILED")


def _user(found: str, failures: Failures) -> str:
    """Return the name if it is valid; otherwise raise `NotLetIn`.

    A client may choose the name and repeat an invalid one, so `failures` limits the log.
    """
    try:
        return named("user", found, MOST_USER)
    except SettingsError as error:
        failures.tell(error, "semel: authorise returned an invalid name: %s", error)
        raise NotLetIn(NO_USER, "FAILED") from None


async def _decided(authorise: Authorise, visitor: Visitor, room_id: str, failures: Failures) -> Any:
    """Return what `authorise` returned, None for every refusal.

    A `Refusal` that it raises is a refusal, as in a gateway. So is reading a header, cookie or
    query parameter that the client has not sent. An `authorise` that raises another error has not
    refused: its database may be unavailable for a moment.
    """
    waiting = asyncio.timeout(DECIDED_WITHIN_S)
    try:
        found = authorise(visitor, room_id)
        if inspect.isawaitable(found):
            async with waiting:
                found = await in_own_task(found)  # a cancelled one has not decided
        return None if is_refusal(found) else found
    except (Refusal, NotSentError):
        return None
    except Exception as error:  # noqa: BLE001 - somebody else's code; it is told of
        if waiting.expired():
            failures.tell(error, "semel: authorise has not answered for %g s", DECIDED_WITHIN_S)
        else:
            failures.tell(
                error, "semel: authorise failed; whoever wants to join is asked to try again"
            )
        raise NotLetIn("nobody can say now who may join", "UNAVAILABLE", RETRY_S) from None


def visitor_of(scope: Mapping[str, Any]) -> Visitor:
    headers, query = scope["headers"], scope.get("query_string", b"")
    return Visitor("GET", scope["path"], query, headers, scope)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname and not parts.path.strip("/"))


class Origins:
    """Pages of which origins may connect. A browser says where a page comes from, and sends its
    cookies along, whoever made the page: without this, any page could play for its visitor.

    Without a list, those of the very same host; "*" is all. Whoever is no browser says nothing, and
    may come.
    """

    def __init__(self, origins: Iterable[str] | str | None) -> None:
        named = [origins] if isinstance(origins, str) else list(origins or ())
        for origin in named:
            if origin != "*" and not _is_origin(origin):
                raise SettingsError(
                    f'origins={origin!r}: write scheme and host, as in "https://shop.example"'
                )
        self._named = frozenset(origin.rstrip("/").lower() for origin in named)
        self._told: set[str] = set()

    def allows(self, visitor: Visitor) -> bool:
        origin = visitor.header("origin")
        is_allowed = self._allows(origin, visitor)
        if not is_allowed and len(self._told) < MOST_TOLD and str(origin) not in self._told:
            self._told.add(str(origin))
            log.warning(
                "semel: a page of %.100r was refused; if it is yours, name it: origins=[...], or "
                "semel rooms --origin",
                origin,
            )
        return is_allowed

    def _allows(self, origin: str | None, visitor: Visitor) -> bool:
        if origin is None or "*" in self._named:
            return True
        if self._named:
            return origin.lower() in self._named
        # An origin without a host, such as "null", "file://" or "http://:80", matches no Host, and
        # an empty Host matches no origin.
        host = (visitor.header("host") or "").lower()
        if not host or not _is_origin(origin):
            return False
        parts = urlsplit(origin.lower())
        port = DEFAULT_PORTS.get(parts.scheme, "")  # which browsers leave out, and proxies may not
        return parts.netloc.removesuffix(port) == host.removesuffix(port)
