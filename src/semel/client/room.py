"""Sit at a table over WebSocket: see what happens, and act, each once, through every cut.

    async with room("wss://poker.example/rooms", table_id="t1", token=token) as table:
        async for news in table:
            match news:
                case State(state=state): draw(state)
                case Event(data=data): tell(data)
                case Result(result=result): celebrate(result)

    result = await table.act({"actionType": "raise", "amount": 100})

It connects again by itself, from where it was, for as long as that may help; `RoomError` says when
it does not. An action is sent as often as it takes, and done once: `ActionError` says that it was
refused, `ActionTimeoutError` that nobody knows. What happens is decided by `room_rules`, and done
here and by `room_line`.

The easy mistake is to act again after a timeout without the `request_id` that it tells.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import string
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, assert_never
from weakref import WeakSet

from semel.client.flow import World, place_of
from semel.client.room_button import Button, button
from semel.client.room_line import Address, Line, Token, address_of, websockets
from semel.client.room_listener import Listener
from semel.client.room_reading import spoken
from semel.client.room_requests import Optimistic
from semel.client.room_rules import Guest
from semel.client.room_values import (
    ActionError,
    ActionResult,
    ActionTimeoutError,
    Became,
    Deliver,
    Event,
    HangUp,
    News,
    Open,
    Over,
    Presence,
    Result,
    RoomError,
    Send,
    Settle,
    State,
    Status,
    Step,
    Terms,
    Trouble,
    TurnedAway,
    Wait,
)
from semel.errors import SettingsError

__all__ = [
    "ActionError",
    "ActionResult",
    "ActionTimeoutError",
    "Became",
    "Button",
    "Event",
    "News",
    "Presence",
    "Result",
    "RoomError",
    "State",
    "Status",
    "Table",
    "Terms",
    "Trouble",
    "TurnedAway",
    "button",
    "room",
]

log = logging.getLogger("semel")

_DEFAULT = Terms()
_LETTERS = string.ascii_lowercase + string.digits


def room(
    url: str,
    *,
    table_id: str,
    token: Token = None,
    spectate: bool = False,
    client_id: str | None = None,
    client_seq: int | None = None,
    optimistic: Optimistic | None = None,
    timeout_s: float | None = None,
    headers: Mapping[str, str] | None = None,
    limit: int = 8 << 20,
    terms: Terms = _DEFAULT,
    world: World | None = None,
) -> Table:
    """A table of the rooms at this address.

    `token` says who we are, or is a function that is asked at every connection. `optimistic` is
    given a state and an action, and says what will come of it. `timeout_s` is how long an action
    may take. `client_id` is what the ids of requests begin with, by default something random; with
    `client_seq`, the number of the last request under it, requests are numbered from there on.
    `limit` is the size of the largest message, in bytes; `terms` say how patient it is, and `world`
    is time and chance, for tests.
    """
    websockets()
    if not table_id:
        raise SettingsError("table_id= is empty: which table?")
    if client_seq is not None and client_id is None:
        raise SettingsError("client_seq= goes on with the numbers of a client_id=: give both")
    if timeout_s is not None and not timeout_s > 0:
        raise SettingsError(f"timeout_s={timeout_s!r} must be seconds, more than 0")
    address = address_of(url, token=token, headers=headers, limit=limit)
    world = world or World()
    guest = Guest(
        table_id,
        terms if timeout_s is None else replace(terms, timeout_s=timeout_s),
        world.chance,
        letters=lambda: letters(6),
        wall_s=world.wall_s,
        client_id=client_id or letters(12),
        # Numbers under a name that somebody else may have, or had: they would be taken for old.
        seq=0 if client_id is None else client_seq,
        spectate=spectate,
        renews=callable(token),
        optimistic=optimistic,
    )
    return Table(guest, address, world)


def letters(count: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(count))


class Table:
    """A place at a table; `room` makes one. Belongs to one event loop.

    `async with` sits down and leaves; `async for` is what happens from then on, for as many loops
    as there are. One that is slow is not told of states that were replaced meanwhile.
    """

    def __init__(self, guest: Guest, address: Address, world: World) -> None:
        self._guest = guest
        self._address = address
        self._world = world
        self._line: Line | None = None
        self._lines: set[Line] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._answers: dict[str, asyncio.Future[ActionResult]] = {}
        self._listeners: WeakSet[Listener] = WeakSet()
        self._is_open = False
        self._misses = 0  # connections in a row that came to nothing
        self._reason = ""

    # --- how things stand ---------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """The confirmed state, with our actions that are not in it; None before there is one."""
        return self._guest.state

    @property
    def confirmed(self) -> Any:
        """The state as the server has it."""
        return self._guest.confirmed

    @property
    def version(self) -> int | None:
        return self._guest.version

    @property
    def cursor(self) -> str | None:
        return self._guest.cursor

    @property
    def viewer(self) -> str | None:
        return self._guest.viewer

    @property
    def status(self) -> Status:
        return self._guest.status

    @property
    def turned_away(self) -> TurnedAway | None:
        """Why the server did not let us in, if it has said so and has not done so since."""
        return self._guest.turned_away

    @property
    def pending(self) -> int:
        """How many of our actions are not answered, or not to be seen yet."""
        return self._guest.pending

    @property
    def is_settled(self) -> bool:
        """Is nothing of ours on its way, and all to be seen that was answered?"""
        return self._guest.is_settled

    # --- acting -------------------------------------------------------------------------------

    def act(
        self,
        action: Mapping[str, Any],
        *,
        guard: str | bool = True,
        request_id: str | None = None,
    ) -> asyncio.Future[ActionResult]:
        """Ask for this, now; to be awaited for what came of it.

        While an action with the same `guard` is on its way, this is that one: the action itself, or
        the text that is given; False is none. `request_id` is that of a request that was given up.
        """
        if not isinstance(action.get("actionType"), str):
            raise SettingsError(f"action={action!r:.80} has no actionType, which is text")
        self._check()
        id = self._guest.act(self._now_s(), action, guard=guard, request_id=request_id)
        answer = self._answers.get(id)
        if answer is None:
            answer = self._answers[id] = asyncio.get_running_loop().create_future()
        self._advance()
        # Whoever stops waiting takes nothing back, and whoever never does is not told.
        waiting = asyncio.shield(answer)
        waiting.add_done_callback(_heard)
        return waiting

    def request_snapshot(self) -> None:
        """Ask for the whole state anew."""
        self._check()
        self._guest.request_snapshot(self._now_s())
        self._advance()

    def _check(self) -> None:
        over = self._guest.over
        if over is not None:
            raise over.error or RoomError("this table is closed", code="CLOSED")
        if self._timer is None:
            raise SettingsError("sit down first: async with room(...) as table")

    # --- its life -----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._advance()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave. Loops end, and nobody hears what became of actions that are on their way."""
        self._guest.stop()
        self._advance()
        for line in tuple(self._lines):
            await line.ended()

    def __aiter__(self) -> AsyncIterator[News]:
        """What happens from now on; first how things stand."""
        listener = Listener(self._guest)
        self._listeners.add(listener)
        return listener.news()

    # --- doing what is to be done -------------------------------------------------------------

    def _now_s(self) -> float:
        return self._world.now_s()

    def _advance(self) -> None:
        """Do all that can be done now, and come back when there may be more."""
        if self._timer is not None:
            self._timer.cancel()
        while True:
            step = self._guest.next(self._now_s())
            if isinstance(step, Wait):
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(step.within_s, self._advance)
                return
            self._do(step)
            if isinstance(step, Over):
                return

    def _do(self, step: Step) -> None:
        match step:
            case Open(within_s=within_s):
                self._open(within_s)
            case HangUp():
                self._log(step)
                self._hang_up()
            case Send(message=message):
                assert self._line is not None
                self._line.say(spoken(message))
            case Deliver(news=news):
                self._tell(news)
            case Settle(request_id=id, answer=answer):
                self._settle(id, answer)
            case Over():
                self._hang_up()
                self._tell(None)
            case Wait():
                pass
            case _:
                assert_never(step)

    def _open(self, within_s: float) -> None:
        self._is_open = False
        self._line = Line(self._address, within_s, self)
        self._lines.add(self._line)
        self._line.when_ended(self._lines.discard)

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.hang_up()

    def _tell(self, news: News | None) -> None:
        for listener in self._listeners:
            listener.tell(news)

    def _settle(self, id: str, answer: ActionResult | Exception) -> None:
        waiting = self._answers.pop(id, None)
        if waiting is None:
            return
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
            _heard(waiting)
        else:
            waiting.set_result(answer)

    # --- what a line says ---------------------------------------------------------------------

    def opened(self, line: Line, token: str | None) -> None:
        if line is self._line:
            self._is_open = True
            self._reason = ""
            self._guest.opened(self._now_s(), token)
            self._advance()

    def received(self, line: Line, said: str | bytes) -> None:
        if line is self._line:
            self._guest.received(self._now_s(), said)
            self._advance()

    def closed(self, line: Line, code: int | None, reason: str) -> None:
        if line is self._line:
            self._misses = 0 if self._is_open else self._misses + 1
            self._reason = reason
            self._guest.closed(self._now_s(), code, reason)
            self._advance()

    def failed(self, line: Line, error: RoomError) -> None:
        if line is self._line:
            self._guest.fail(error)
            self._advance()

    def _log(self, step: HangUp) -> None:
        """Say why, and what is news: that a server is not to be had is, but once."""
        said = "semel: %s: table %s: connecting again in %.2f s, behind %s (%s)"
        why = self._reason or self._guest.turned_away or step.why
        level = logging.WARNING if self._misses == 1 else logging.INFO
        place, guest = place_of(self._address.url), self._guest
        log.log(level, said, place, guest.table_id, step.after_s, guest.cursor, why)


def _heard(answer: asyncio.Future[ActionResult]) -> None:
    """Or Python would complain of an error that nobody wanted to know."""
    if not answer.cancelled():
        answer.exception()
