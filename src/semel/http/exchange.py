"""One keyed request, from its claim to what is sent: written once for both colours.

The handler runs under a claim. What it answers is recorded, and then sent: a client that saw a
byte of it gets the same bytes when it asks again, and one that hung up finds them waiting. A
response that is sent while the handler makes it keeps the claim until its last byte.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from typing import Any, TypeVar

from semel.admin import STATUSES
from semel.attempt import CURRENT, Attempt, leave
from semel.call import Call, Raised, told
from semel.colour import Colour
from semel.errors import OutcomeUnknownError, SemelError, SettingsError, StoreUnavailableError
from semel.guard import require, step
from semel.http import coding, protocol
from semel.http.protocol import Request, Response
from semel.http.rule import FIRST_SERVER_ERROR, INTERRUPTED, Ruling, interrupted
from semel.ports import Store
from semel.stores.rules import LAPSED
from semel.values import Claim, Done, Kept, Key, Lost, Orphan, Outcome, Verdict
from semel.waiting import ROOM

log = logging.getLogger("semel")

R = TypeVar("R")

# How much the last request counts for how long the next one will take.
PACE_SHARE = 0.2


class Pace:
    """How long requests take here, roughly: what `Retry-After` is made of."""

    seconds = 0.0

    def took(self, seconds: float) -> None:
        self.seconds += (seconds - self.seconds) * PACE_SHARE


class RequestAttempt(Attempt):
    """The attempt of a handler that answers a keyed request."""

    keyed = True

    def bind(self, session: Any) -> None:
        """Let the commit of this session carry the recorded response.

        From here on the session is committed by the door, together with the record, when the
        handler has answered with a status below 400, and rolled back otherwise. The store must be
        an `SQLStore` over the session's database.
        """
        call = self.call
        assert isinstance(call, Exchange)
        call.bind(session)

    def step(self, name: str, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """`semel.step` of this attempt; await it in an async handler."""
        token = CURRENT.set(self)
        try:
            return step(name, fn, *args, **kwargs)
        finally:
            leave(token)


class Exchange(Call):
    """The call behind one keyed request: `open`, then the handler, then `close` or `failed`."""

    attempt_type = RequestAttempt
    closed = False
    live: Response | None = None
    """Head of the response that is sent while the handler makes it and the claim is held."""
    live_routed = True
    raised: tuple[SemelError, int] | None = None
    """The exception that an exception handler turned into a response, and its status."""
    _bound = False

    def __init__(
        self,
        ruling: Ruling,
        store: Store,
        colour: Colour,
        key: Key,
        fingerprint: bytes,
        request: Request,
        pace: Pace,
    ) -> None:
        super().__init__(ruling.policy, store.ledger(colour), colour, key, fingerprint)
        self._ruling = ruling
        self._store = store
        self._request = request
        self._pace = pace

    async def open(self) -> Response | None:
        """Ask for the right to run the handler: None, or the answer to send instead."""
        try:
            if self.policy.require:
                await self._check_requirements()
            answer = await self.ask()
            if isinstance(answer, Done):
                return self._shown(self.replay(answer.outcome))
            self.begin(answer)
            if answer.orphan is not None and self.policy.recover is not None:
                found = await self.recovered(answer.orphan)
                if found is not None:
                    return await self._settle_for(self._found(found.value))
        except SemelError as error:
            return self._refused(error)
        return None

    async def _withdraw(self) -> None:
        """A claim that never began: "store" answers for those that did, and this is none."""
        if self.policy.recover is interrupted:
            await self._tidy(self._take_back)
            ROOM.ring(self.key.id)
        else:
            await super()._withdraw()

    async def _take_back(self) -> Verdict:
        claim = Claim(self.key, self._attempt_id, self._fingerprint, self.policy.terms)
        found = await self._ledger.look(self.key.id)
        if found is not None and found.past and found.past[-1].ending == LAPSED:
            return await self._ledger.renew(claim, lease_s=0)  # it took over from one that began
        return await self._ledger.release(claim, error="cut off before it began")

    async def _check_requirements(self) -> None:
        if self._ledger not in self._ruling.met_by:
            await require(self._ledger, self.policy.require, "the idempotency middleware")
            self._ruling.met_by.add(self._ledger)

    def _found(self, found: Any) -> Response:
        if isinstance(found, Response):
            return found
        raise SettingsError(
            f"on_crash answered Recovered({type(found).__name__}); a request is answered with a "
            "semel.http.Response"
        )

    async def _settle_for(self, found: Response) -> Response:
        """What was found out is the answer, whatever its status: no handler has failed."""
        self.closed = True
        return self._sent(found, await self.succeed(found))

    def bind(self, session: Any) -> None:
        bind = getattr(self._store, "bind", None)
        if bind is None:
            raise SettingsError(
                f"{type(self._store).__name__} cannot share a transaction; give the door "
                "SQLStore(url) over the session's own database"
            )
        self._ledger = bind(session, commit=True).ledger(self.colour)
        self._bound = True

    async def go_live(self, response: Response, *, routed: bool = True) -> Response:
        """Return what to send: this response, or what the client gets after a takeover.

        The claim is held until `end_live` or `failed`. In two cases the record is written before
        the first byte is sent. With a bound session, both are committed together. After `max_run`,
        the lease is no longer renewed.
        """
        if self._bound or self._ran_s() > self.policy.max_run_s:
            return await self.close(response, routed=routed)
        try:
            verdict = Kept() if self._is_copy() else await self._ledger.renew(self._claimed())
        except StoreUnavailableError:
            verdict = Kept()  # the timer renews again; the store may be back by then
        if isinstance(verdict, Lost):
            self.closed = True
            self._end()
            return self._shown(self._superseded(verdict, response))
        self.live, self.live_routed = response, routed
        return response

    def is_complete(self, size: int) -> bool:
        """Return whether `size` bytes are all of the live response, by its Content-Length."""
        if self.live is None or self.closed:
            return False
        return 0 < protocol.length_of(self.live, self._request.method) <= size

    async def end_live(self, size: int | None = None) -> None:
        """Record that the live response has ended.

        `size`: the bytes of the whole body. None if the handler has not ended: the client has left,
        or `max_run` is over.
        """
        response = self.live
        assert response is not None
        answer = await self.close(response, routed=self.live_routed, size=size)
        if answer not in (response, INTERRUPTED):
            log.warning(
                "semel: a response to %r was sent, but a retry gets another answer: another "
                "attempt took over the claim, or the store refused the record",
                self.key.text,
            )

    def _ran_s(self) -> float:
        return self.colour.now() - self._started

    async def _renew(self) -> None:
        if self.live is None or self.closed or self._ran_s() <= self.policy.max_run_s:
            await super()._renew()
        else:
            # If the lease expired here, a retry would run beside a handler that is still sending.
            log.warning(
                "semel: the response to %r is still being sent after max_run=%gs; it is recorded "
                "as if it had ended",
                self.key.text,
                self.policy.max_run_s,
            )
            await self.end_live()

    async def close(
        self, response: Response, *, routed: bool = True, size: int | None = None
    ) -> Response:
        """Record how the handler answered; the answer is what to send.

        That is the response itself, or what another attempt has recorded meanwhile. A body of
        `size` bytes that is shorter than its Content-Length has failed: `on_error` applies.
        """
        status = response.status
        if size is not None and size < protocol.length_of(response, self._request.method):
            error = BrokenOffError(f"the app ended this {status} after {size} bytes of its body")
            return await self.failed(error) or response
        if self.raised is not None and self.raised[1] == status:
            return await self.failed(self.raised[0]) or response
        failed = status >= FIRST_SERVER_ERROR
        kept = failed or self._ruling.keeps(status, routed=routed)  # yours, and it may raise
        self.closed = True
        self._pace.took(self._ran_s())
        if failed and self._ruling.on_error != "store":
            return await self._server_error(response)
        if not kept:
            return self._sent(response, await self.fail(Unrecorded(status)))
        return self._sent(response, await self.succeed(response))

    async def _server_error(self, response: Response) -> Response:
        said = Unrecorded(response.status)
        if self._ruling.on_error == "hold":
            await self.interrupt(said)
            return response
        return self._sent(response, await self.fail(said))

    def _sent(self, response: Response, settled: object) -> Response:
        if settled is response:
            return response
        if not isinstance(settled, Raised):
            return self._shown(settled)
        error = settled.error
        if isinstance(error, Unrecorded):
            return response
        if isinstance(error, StoreUnavailableError) and error.happened:
            # It is true, and whoever hears it will not ask again: an error would make them.
            log.error("semel: a response is sent without a record of it: %s", error)
            return response
        if isinstance(error, StoreUnavailableError):
            log.warning("semel: %s", error)
            return self._for_browser(protocol.unsettled())
        return self._shown(settled)

    async def failed(self, error: Exception) -> Response | None:
        """The handler raised: None when that is for the server to answer."""
        self.closed = True
        match self._ruling.on_error:
            case "store":
                return self._sent(INTERRUPTED, await self.succeed(INTERRUPTED))
            case "hold":
                await self.interrupt(error)
                return None
            case "release":
                settled = await self.fail(error)
                return None if type(settled) is Raised else self._shown(settled)

    def _shown(self, replay: Any) -> Response:
        """What was recorded, as a replay, or why it cannot be shown."""
        if type(replay) is not Raised:
            return self._replayed(replay)
        if isinstance(replay.error, SemelError):
            return self._refused(replay.error)
        raise replay.error

    def _replayed(self, recorded: Response) -> Response:
        most = self._ruling.max_response
        try:
            response = coding.accepted(recorded, self._request, most)
        except coding.NotAcceptedError as error:
            return self._for_browser(
                protocol.problem(
                    "coding-not-accepted",
                    "The request with this key was processed once. Its response was recorded with "
                    f"Content-Encoding: {error.codings}. Send the request again with the same key "
                    "and an Accept-Encoding that allows this coding.",
                )
            )
        return protocol.replayed(response, self._request)

    def _unknown(self, orphan: Orphan) -> OutcomeUnknownError:
        """For the log: the client is told what everybody may know."""
        command = _settling(self.key, per_operation=self._ruling.per_operation)
        return OutcomeUnknownError(
            f"{self.key.operation!r} with the key {self.key.text!r} vanished at "
            f"{orphan.since:%Y-%m-%d %H:%M:%S} UTC and nobody knows whether it took effect. Find "
            f"out, then settle it with: {command}",
            key=self.key.text,
        )

    def _refused(self, error: SemelError) -> Response:
        if isinstance(error, StoreUnavailableError):
            log.warning("semel: %r was refused: %s", self.key.text, error)
        elif isinstance(error, OutcomeUnknownError):
            log.warning("semel: %s", error)
        # One that was frozen for hours tells nobody to come back in hours.
        pace_s = min(self._pace.seconds, self.policy.terms.lease_s)
        return self._for_browser(protocol.refusal(error, pace_s))

    def _for_browser(self, answer: Response) -> Response:
        if not self._request.from_browser:
            return answer
        return Response(answer.status, (*answer.headers, protocol.EXPOSED), answer.body)

    # --- how a response is kept ---------------------------------------------------------------

    def replay(self, outcome: Outcome) -> Any:
        if outcome.kind != "value":
            return super().replay(outcome)
        try:
            return protocol.read(outcome.data)
        except ValueError:
            return self._settled(outcome)

    def _settled(self, outcome: Outcome) -> Any:
        """A value that `semel ledger resolve` recorded: what the caller gets as JSON."""
        found = super().replay(outcome)
        if isinstance(found, Raised):
            return found
        status = outcome.status or 200
        try:
            # A server breaks on a number that is no status, which somebody may have typed.
            return protocol.as_json(status if status in STATUSES else 200, found)
        except ValueError as error:
            return Raised(self._result_lost("cannot be read", told(error).encode()))

    def _outcome(self, value: Any) -> Outcome:
        response: Response = value
        most = self._ruling.max_response
        if response.body is None or (len(response.body) > most and response is not INTERRUPTED):
            why = f"the body of this {response.status} has more than max_response={most} bytes"
            return Outcome("lost", why.encode(), response.status)
        data = protocol.written(response, self._ruling.never_kept)
        return Outcome("value", data, response.status)


def _settling(key: Key, *, per_operation: bool) -> str:
    """A line to paste into a shell; by its id where the words would be taken for something else."""
    named = [key.text, "--http", "--tenant", key.tenant]
    if per_operation:
        named += ["--operation", key.operation, "--per-operation"]
    if key.text.startswith("-") or not "".join(named).isprintable():
        named = [key.id.hex(), "--http"]
    return shlex.join(["semel", "ledger", "resolve", "URL", *named])


class BrokenOffError(Exception):
    """The handler ended its response before its Content-Length."""


class Unrecorded(Exception):  # noqa: N818 - a status, not a mishap
    """The handler answered with a status that is not recorded."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")


def is_part_of(wanted: BaseException, error: BaseException | None) -> bool:
    """Return whether `wanted` is `error`, or one of its causes, contexts or group members."""
    pending, seen = [error], set()
    while pending:
        found = pending.pop()
        if found is wanted:
            return True
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            pending += [found.__cause__, found.__context__, *getattr(found, "exceptions", ())]
    return False
