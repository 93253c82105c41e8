"""One guarded call, from asking to recording: the flow, written once for both colours.

A call asks the ledger for the right to run. It runs and records how it ended, or it replays what
was recorded, or it is told why it can do neither. The gaps, and how each ends if the process
dies there, are listed in docs/explanation/guarantees.md; the one that no record can close lies
between the effect and `complete`, and `on_crash` says what to do about it.

What is easy to get wrong: a caller may be cut off at any await. Every verb can be repeated, so
whatever was cut off is done again, shielded, before the cut is let through.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from semel import keys
from semel.attempt import CURRENT, Attempt, leave
from semel.codec import DecodingError, EncodingError, decode_error, encode_error, message_of
from semel.colour import ASYNC, Colour, Timer
from semel.errors import (
    ClaimLostError,
    CorruptRecordError,
    DuplicateExecutionError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ResultLostError,
    SemelError,
    SettingsError,
    StoreUnavailableError,
)
from semel.policy import CannotTell, Policy, Recovered, Retry
from semel.ports import StoreLedger
from semel.values import (
    Answer,
    Busy,
    Claim,
    Done,
    Kept,
    Key,
    Lost,
    Mismatch,
    Orphan,
    Outcome,
    Verdict,
    Won,
)
from semel.waiting import ROOM

log = logging.getLogger("semel")

# A waiter in front asks soon at first, since most calls are short, and then ever more rarely.
FIRST_POLL_S = 0.01
LAST_POLL_S = 0.25

# Renewing three times per lease: two renewals in a row may fail before the lease is at risk.
RENEWALS_PER_LEASE = 3

# How often a claim may arrive after its own lease before the call is given up.
LATE_CLAIMS = 3

# Errors of ours that say nothing about the effect: they are never recorded as its outcome.
PASSING = (SettingsError, InProgressError, ClaimLostError, StoreUnavailableError)

# What is recorded of a step whose value the store refuses; short, because there may be little room.
REFUSED_STEP = b"lthe store refused it; the log of that attempt has the reason"

Write: TypeAlias = Callable[[str, bytes], Awaitable[Verdict]]
"""Writes a step's name and data to the ledger; returns the ledger's verdict."""

UNFINISHED = (inspect.isawaitable, inspect.isgenerator, inspect.isasyncgen)


@dataclass(frozen=True, slots=True)
class Raised:
    """An error on its way to the caller.

    Carried as a value, because a coroutine cannot raise StopIteration: Python would turn it
    into a RuntimeError.
    """

    error: BaseException


class Call:
    """One guarded call: `ask`, then `perform` or `replay`."""

    attempt_type = Attempt
    busy_advice = "Retry later, or wait for its result with on_duplicate='wait'"
    lost_error: str | None = None
    """The error that a repeat raises for a lost result; None: `on_duplicate` decides."""
    attempt: Attempt | None = None
    home: asyncio.AbstractEventLoop | None = None
    _deadline = 0.0
    _late = 0
    _started = 0.0
    _timer: Timer | None = None
    _waited = False
    _warned = False

    def __init__(
        self, policy: Policy, ledger: StoreLedger, colour: Colour, key: Key, fingerprint: bytes
    ) -> None:
        self.policy = policy
        self.colour = colour
        self.key = key
        self._ledger = ledger
        self._fingerprint = fingerprint
        self._attempt_id = keys.new_attempt()

    # --- asking -------------------------------------------------------------------------------

    async def ask(self) -> Won | Done:
        """Claim the key, waiting for it if the policy says so; every other answer is raised."""
        if CURRENT.get() is not None:
            self._refuse_recursion()
        answer = await self._claim()
        if isinstance(answer, Busy) and self.policy.on_duplicate == "wait":
            answer = await self._wait(answer)
        match answer:
            case Won() | Done():
                return answer
            case Busy():
                raise self._in_progress(answer)
            case Mismatch():
                raise self._conflict(answer)
            case Orphan():
                raise self._unknown(answer)

    def _refuse_recursion(self) -> None:
        outer = CURRENT.get()
        while outer is not None:
            if outer._active and outer._key.id == self.key.id:
                raise InProgressError(
                    f"{self.key.text!r} is held by this very call chain; a guarded call cannot "
                    "wait for itself. Give the inner call a key of its own",
                    key=self.key.text,
                    retry_after=0.0,
                )
            outer = outer._parent

    async def _claim(self) -> Answer:
        # The lease is measured from before the claim is sent: the store's starts later.
        sent = self.colour.now()
        try:
            answer = await self._ledger.claim(
                self.key,
                attempt=self._attempt_id,
                fingerprint=self._fingerprint,
                terms=self.policy.terms,
            )
        except StoreUnavailableError as error:
            # The claim may be ours without our knowing it. Elsewhere its lease ends by itself; a
            # held one would be called unknown, although nothing was begun.
            if self.policy.terms.hold and error.again:
                await self._withdraw()
            raise
        except Exception:
            raise
        except BaseException:
            # Cut off in the middle of asking: as above.
            await self.colour.shield(self._withdraw())
            raise
        self._started = sent
        self._deadline = sent + self.policy.terms.lease_s
        if isinstance(answer, Won) and self.colour.now() >= self._deadline:
            return await self._claim_again()
        return answer

    async def _claim_again(self) -> Answer:
        """The claim came when its lease was over: somebody may have taken over, so ask again."""
        self._late += 1
        if self._late < LATE_CLAIMS:
            return await self._claim()
        await self.colour.shield(self._withdraw())
        raise StoreUnavailableError(
            f"the store takes longer to answer than lease={self.policy.terms.lease_s:g}s lasts; "
            f"{self.key.text!r} was not run. Make lease longer"
        )

    async def _withdraw(self) -> None:
        claim = Claim(self.key, self._attempt_id, self._fingerprint, self.policy.terms)
        if self.policy.recover is None:
            await self._tidy(lambda: self._ledger.release(claim, error="cut off before it began"))
        else:
            # It may have taken over from somebody of whom nobody has asked the world yet.
            await self._tidy(lambda: self._ledger.renew(claim, lease_s=0))
        ROOM.ring(self.key.id)

    def has_record(self, error: StoreUnavailableError) -> bool:
        """Is there a record, though we cannot see it now? Then somebody works, or has worked."""
        return self._waited or isinstance(error, CorruptRecordError)

    async def _wait(self, answer: Answer) -> Answer:
        self._waited = True
        until = self.colour.now() + self.policy.wait_s
        poll_s = FIRST_POLL_S
        waiter = self.colour.waiter()
        with ROOM.seat(self.key.id, self._ledger, waiter, self.policy.max_waiters) as seat:
            while isinstance(answer, Busy):
                left_s = until - self.colour.now()
                if left_s <= 0:
                    return answer
                rung = await waiter.wait(min(left_s, poll_s) if seat.in_front else left_s)
                # Whoever is in front may hang in its own asking: nobody leaves without asking.
                if rung or seat.in_front or self.colour.now() >= until:
                    answer = await self._claim()
                poll_s = min(poll_s * 1.6, LAST_POLL_S)
        if not isinstance(answer, Won):
            ROOM.ring(self.key.id)
        return answer

    def _in_progress(self, answer: Busy) -> InProgressError:
        if self._waited:
            advice = f"This call has waited for {self.policy.wait_s:g}s (wait_timeout). Retry later"
        else:
            advice = self.busy_advice
        return InProgressError(
            f"{self.key.text!r} is held by another call, which is running or has died; its lease "
            f"ends in {answer.left_s:.1f}s unless that call renews it. {advice}",
            key=self.key.text,
            retry_after=answer.left_s,
        )

    def _conflict(self, answer: Mismatch) -> IdempotencyConflictError:
        if answer.what == "operation":
            what = f"for another operation than {self.key.operation!r}"
            advice = (
                "For a new effect use a new key, or set per_operation=True. If it is the same "
                "function under a new name, keep the old one with operation=; `semel ledger "
                "explain` shows it"
            )
        else:
            what = "with other arguments"
            advice = "Use a new key for a new effect, or choose with fingerprint= what is compared"
        return IdempotencyConflictError(
            f"{self.key.text!r} was used before {what}; nothing was run. {advice}",
            key=self.key.text,
        )

    def _unknown(self, orphan: Orphan) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"an attempt at {self.key.text!r} vanished at {orphan.since:%Y-%m-%d %H:%M:%S} UTC "
            "and nobody knows whether its effect happened. Find out, then settle it with "
            "`semel ledger resolve`",
            key=self.key.text,
        )

    # --- replaying ----------------------------------------------------------------------------

    def duplicate(self, done: Done) -> Any:
        """What a duplicate gets: the recorded outcome, or the news that there is one."""
        value = self.replay(done.outcome)
        if self.policy.on_duplicate == "raise":
            return Raised(self.duplicate_error(value))
        return value

    def duplicate_error(self, result: Any) -> DuplicateExecutionError:
        if not isinstance(result, Raised):
            said = "was done before; the first result is in this error's `result`"
            return DuplicateExecutionError(
                f"{self.key.text!r} {said}", key=self.key.text, result=result
            )
        duplicate = DuplicateExecutionError(self._first_error(result.error), key=self.key.text)
        duplicate.__cause__ = result.error
        return duplicate

    def _first_error(self, error: BaseException) -> str:
        """Describe the outcome of a first call that left no result."""
        if isinstance(error, ResultLostError):
            return f"{self.key.text!r} was done before, and its result was lost: {error}"
        return (
            f"{self.key.text!r} was done before and failed; its error is this error's "
            f"`__cause__`: {summary(error)}"
        )

    def replay(self, outcome: Outcome) -> Any:
        """The recorded value, or the recorded error as `Raised`."""
        try:
            match outcome.kind:
                case "value":
                    return self.policy.codec.decode(outcome.data)
                case "error":
                    return Raised(decode_error(outcome.data))
                case "lost":
                    return Raised(self._result_lost("could not be stored", outcome.data))
        except Exception as error:  # noqa: BLE001 - a codec of the user's may raise anything
            why = told(error).encode(errors="backslashreplace")
            return Raised(self._result_lost("cannot be read", why))

    def _result_lost(self, what: str, why: bytes) -> ResultLostError:
        return ResultLostError(
            f"{self.key.text!r} happened, but its result {what}: {why.decode(errors='replace')}",
            key=self.key.text,
        )

    # --- running ------------------------------------------------------------------------------

    async def perform(self, won: Won, body: Callable[[], Any]) -> Any:
        """Run the body under the claim and record how it ended."""
        token = None
        try:
            token = CURRENT.set(self.begin(won))
            if won.orphan is not None and self.policy.recover is not None:
                found = await self.recovered(won.orphan)
                if found is not None:
                    return await self.succeed(found.value)
            try:
                value = await body() if self.colour is ASYNC else body()
            except Exception as error:  # noqa: BLE001 - the caller's own error, given back to it
                return await self.fail(error)
            except BaseException as error:
                await self.interrupt(error)
                raise
            return await self.succeed(value)
        finally:
            self.let_go()
            if token is not None:
                leave(token)

    def begin(self, won: Won) -> Attempt:
        """Make the attempt, and keep its lease alive from now on."""
        self.attempt = attempt = self.attempt_type(self.key, won.claim, self)
        self.home = self.colour.home()
        if won.steps:
            attempt._steps = won.steps
        self._keep_lease(self.policy.terms.lease_s / RENEWALS_PER_LEASE)
        return attempt

    def _keep_lease(self, delay_s: float) -> None:
        self._timer = self.colour.later(delay_s, self._renew)

    async def _renew(self) -> None:
        attempt, now = self.attempt, self.colour.now()
        if attempt is None or not attempt._active or self._hung(now):
            return
        try:
            verdict = await self._ledger.renew(self._claimed())
        except StoreUnavailableError as error:
            self._renew_soon(attempt, now, error)
            return
        if isinstance(verdict, Lost):
            attempt.lost = attempt._active
            return
        self._deadline = max(self._deadline, now + self.policy.terms.lease_s)
        if attempt._active:
            self._keep_lease(self.policy.terms.lease_s / RENEWALS_PER_LEASE)

    def _hung(self, now: float) -> bool:
        if now - self._started <= self.policy.max_run_s:
            return False
        log.warning(
            "semel: %r has run for more than max_run=%gs; its lease is no longer renewed",
            self.key.text,
            self.policy.max_run_s,
        )
        return True

    def _renew_soon(self, attempt: Attempt, now: float, error: StoreUnavailableError) -> None:
        """A failed renewal is not a lost lease: only the store can say that it is lost.

        By our own reckoning it may be over, while in the store nobody has taken it, or a doubled
        request of ours has made it longer.
        """
        if not attempt._active:
            return
        if now >= self._deadline and not self._warned:
            self._warned = True
            log.warning("semel: the lease on %r could not be renewed: %s", self.key.text, error)
        self._keep_lease(self.policy.terms.lease_s / (4 * RENEWALS_PER_LEASE))

    def _claimed(self) -> Claim:
        assert self.attempt is not None
        assert self.attempt.claim is not None
        return self.attempt.claim

    async def recovered(self, orphan: Orphan) -> Recovered | None:
        """After a crash, ask the world how it ended; None means run."""
        try:
            finding = await self._ask_the_world()
            if isinstance(finding, CannotTell):
                raise self._unknown(orphan)
        except BaseException as error:
            await self.interrupt(error)
            raise
        return finding if isinstance(finding, Recovered) else None

    async def _ask_the_world(self) -> Recovered | Retry | CannotTell:
        assert self.policy.recover is not None
        assert self.attempt is not None
        finding: Any = self.policy.recover(self.attempt)
        if self.colour is ASYNC and inspect.isawaitable(finding):
            finding = await finding
        if isinstance(finding, (Recovered, Retry, CannotTell)):
            return finding
        raise SettingsError(
            f"recover answered {finding!r}; answer Recovered(value), Retry() or CannotTell() "
            "from semel.guard"
        )

    # --- recording ----------------------------------------------------------------------------

    async def succeed(self, value: Any) -> Any:
        """Record the value; the answer is it, or the winner's if somebody took over."""
        try:
            outcome = self._outcome(value)
        except SettingsError as error:
            return await self.fail(error)
        except BaseException as error:
            await self.interrupt(error)
            raise
        try:
            verdict = await self._settle(lambda: self._ledger.complete(self._claimed(), outcome))
        except StoreUnavailableError as error:
            # A record in the caller's own transaction goes with it: nothing has happened.
            happened = error.again or isinstance(error, CorruptRecordError)
            return Raised(self._unrecorded(value, error) if happened else error)
        return value if isinstance(verdict, Kept) else self._superseded(verdict, value)

    def _superseded(self, verdict: Lost, value: Any) -> Any:
        """Return the result of the attempt that took over, or `ClaimLostError` as `Raised`."""
        if verdict.outcome is not None:
            return self.replay(verdict.outcome)
        return Raised(
            ClaimLostError(
                f"the claim on {self.key.text!r} was lost before its result could be recorded; "
                "another attempt is, or will be, responsible for it",
                key=self.key.text,
                result=value,
            )
        )

    def _unrecorded(self, value: Any, error: StoreUnavailableError) -> StoreUnavailableError:
        unrecorded = StoreUnavailableError(
            f"{self.key.text!r} happened, but that could not be recorded: {error}. What it "
            "returned is in this error's `result`; a retry may repeat the effect",
            happened=True,
            result=value,
        )
        unrecorded.__cause__ = error
        return unrecorded

    def _outcome(self, value: Any) -> Outcome:
        try:
            data = self.policy.codec.encode(value)
        except Exception as error:  # noqa: BLE001 - it has happened, whatever a codec says
            self._refuse_unfinished(value)
            return self._lost(told(error))
        if type(data) is not bytes:
            return self._lost(f"its codec gave {type(data).__name__} instead of bytes")
        if len(data) > self.policy.max_result:
            return self._lost(
                f"it takes {len(data)} bytes, more than max_result={self.policy.max_result}"
            )
        return Outcome("value", data)

    def _refuse_unfinished(self, value: Any) -> None:
        """A coroutine or generator that came back is work not done yet, not a result."""
        if inspect.iscoroutine(value):
            value.close()
        elif not any(unfinished(value) for unfinished in UNFINISHED):
            return
        raise SettingsError(
            f"{self.key.operation} returned a {type(value).__name__}, which has not run yet; "
            "guard the async function itself, or return a finished result"
        )

    def _lost(self, why: str) -> Outcome:
        duplicate = self.policy.on_duplicate == "raise"
        log.warning(
            "semel: the result of %r cannot be stored, so a repeat of this call will raise %s: %s",
            self.key.text,
            self.lost_error or ("DuplicateExecutionError" if duplicate else "ResultLostError"),
            why,
        )
        return Outcome("lost", why.encode(errors="backslashreplace"))

    async def fail(self, error: Exception) -> Any:
        """Record the failure as the policy says; the answer is it, or a winner's outcome."""
        unrecorded = self.attempt is not None and self.attempt._unrecorded
        if unrecorded or isinstance(error, OutcomeUnknownError):
            # A step that happened and is not written down, or a body that says it cannot tell:
            # that is a crash, not a failure.
            await self.interrupt(error)
            return Raised(error)
        try:
            verdict = await self._settle(self._failure(error))
        except StoreUnavailableError as trouble:
            log.warning(
                "semel: %r failed, and that could not be recorded: %s", self.key.text, trouble
            )
            return Raised(error)
        if isinstance(verdict, Lost) and verdict.outcome is not None:
            return self.replay(verdict.outcome)
        return Raised(error)

    def _failure(self, error: Exception) -> Callable[[], Coroutine[Any, Any, Verdict]]:
        claim = self._claimed()
        if self.policy.on_failure == "lock" and not isinstance(error, PASSING):
            outcome = Outcome("error", encode_error(error))
            return lambda: self._ledger.complete(claim, outcome)
        return lambda: self._ledger.release(claim, error=summary(error))

    async def _settle(self, work: Callable[[], Coroutine[Any, Any, Verdict]]) -> Verdict:
        """Write the ending down. Cut off meanwhile, write it again: twice is once."""
        if self._is_copy():
            return Kept()
        try:
            try:
                return await work()
            except StoreUnavailableError as error:
                return await self._insist(work, error)
        except Exception:
            raise
        except BaseException:
            await self.colour.shield(self._tidy(work))
            raise
        finally:
            self._end()

    async def _insist(
        self, work: Callable[[], Awaitable[Verdict]], error: StoreUnavailableError
    ) -> Verdict:
        """It has happened: keep trying to write it down until the lease is over."""
        pause_s = 0.05
        deadline = self._deadline  # as of now: renewals that still succeed must not move it
        while error.again and self.colour.now() + pause_s <= deadline:
            await self.colour.sleep(pause_s)
            try:
                return await work()
            except StoreUnavailableError as again:
                error = again
            pause_s = min(2 * pause_s, 1.0)
        raise error

    async def interrupt(self, error: BaseException) -> None:
        """The body was cut off in the middle: a crash, as far as its effect is concerned."""
        if self._is_copy():
            return
        self._end()
        await self.colour.shield(self._tidy(lambda: self._give_up(error)))
        ROOM.ring(self.key.id)

    def _give_up(self, error: BaseException) -> Coroutine[Any, Any, Verdict]:
        if self.policy.interrupted == "release":
            return self._ledger.release(self._claimed(), error=summary(error))
        return self._ledger.renew(self._claimed(), lease_s=0)

    def _is_copy(self) -> bool:
        """Is this a forked child on its way out of its parent's body?"""
        return self.attempt is not None and self.attempt._copied

    async def _tidy(self, work: Callable[[], Coroutine[Any, Any, Verdict]]) -> None:
        try:
            await work()
        except SemelError as error:
            log.warning("semel: could not tidy up after %r: %s", self.key.text, error)

    def let_go(self) -> None:
        """End what nobody has ended: cut off by a signal in between, it would be renewed for ever.

        The lease then ends by itself, and what was begun counts as a crash.
        """
        if self.attempt is not None and self.attempt._active:
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.attempt is not None:
            self.attempt._active = False
            self.attempt._call = None  # or the two would wait for the garbage collector
        ROOM.ring(self.key.id)

    # --- steps --------------------------------------------------------------------------------

    async def step(
        self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A recovery point: done once, replayed to later attempts."""
        attempt = self.attempt
        assert attempt is not None
        if name in attempt._taken:
            raise SettingsError(
                f"step {name!r} was taken already in this attempt; give each step its own name, "
                f'such as f"{name}:{{item}}" in a loop'
            )
        attempt._taken |= {name}
        if name in attempt._steps:
            return self._replay_step(name, attempt._steps[name])
        attempt.raise_if_lost()
        try:
            value = fn(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await self._awaited_step(name, value)
        except BaseException as error:
            attempt._taken -= {name}  # it failed: the body may try it again
            if isinstance(error, StopIteration):
                return Raised(error)
            raise
        await self._note(attempt, name, value)
        return value

    async def _awaited_step(self, name: str, value: Awaitable[Any]) -> Any:
        if self.colour is ASYNC:
            return await value
        if inspect.iscoroutine(value):
            value.close()
        raise SettingsError(
            f"step {name!r} is async, but the guarded function around it is not; make that "
            "function async, or the step sync"
        )

    async def _note(self, attempt: Attempt, name: str, value: Any) -> None:
        data = self._step_data(name, value)
        attempt._unrecorded = True
        try:
            await self._noting(attempt, name, data, self._write_firmly)
        except Exception:
            raise
        except BaseException:
            # Cut off while it was written: written twice is written once.
            await self.colour.shield(self._note_again(attempt, name, data))
            raise
        attempt.raise_if_lost()

    async def _noting(self, attempt: Attempt, name: str, data: bytes, write: Write) -> None:
        """Record the step. If the store refuses its value for good, record the value as lost."""
        try:
            self._noted(attempt, name, data, await write(name, data))
        except SemelError as error:
            if not is_refusal(error):
                raise
            await self._note_lost(attempt, name, error, write)

    async def _note_lost(
        self, attempt: Attempt, name: str, refusal: SemelError, write: Write
    ) -> None:
        try:
            self._noted(attempt, name, REFUSED_STEP, await write(name, REFUSED_STEP))
        except SemelError as error:
            kind = SettingsError if isinstance(error, SettingsError) else StoreUnavailableError
            raise kind(
                f"step {name!r} of {self.key.text!r} happened, but that could not be recorded, so "
                f"a later attempt may repeat it: {error}"
            ) from refusal
        self._warn_of_lost_step(name, str(refusal))

    async def _write_firmly(self, name: str, data: bytes) -> Verdict:
        try:
            return await self._write_once(name, data)
        except StoreUnavailableError as error:
            return await self._insist(lambda: self._write_once(name, data), error)

    async def _write_once(self, name: str, data: bytes) -> Verdict:
        return await self._ledger.note(self._claimed(), name, data)

    async def _note_again(self, attempt: Attempt, name: str, data: bytes) -> None:
        try:
            await self._noting(attempt, name, data, self._write_once)
        except SemelError as error:
            log.warning("semel: step %r of %r is not recorded: %s", name, self.key.text, error)

    def _noted(self, attempt: Attempt, name: str, data: bytes, verdict: Verdict) -> None:
        attempt._unrecorded = False
        if isinstance(verdict, Lost):
            attempt.lost = True
        else:
            attempt._steps = {**attempt._steps, name: data}

    def _step_data(self, name: str, value: Any) -> bytes:
        """The value with a tag in front: `v` for a value, `l` for one that could not be stored."""
        try:
            data = self.policy.codec.encode(value)
            why = "" if len(data) <= self.policy.max_result else "it is larger than max_result"
            if type(data) is not bytes:
                why = f"its codec gave {type(data).__name__} instead of bytes"
        except Exception as error:  # noqa: BLE001 - as in _outcome
            data, why = b"", told(error)
        if not why:
            return b"v" + data
        self._warn_of_lost_step(name, why)
        return b"l" + why.encode(errors="backslashreplace")

    def _warn_of_lost_step(self, name: str, why: str) -> None:
        log.warning(
            "semel: step %r of %r happened, but its result cannot be stored: %s",
            name,
            self.key.text,
            why,
        )

    def _replay_step(self, name: str, data: bytes) -> Any:
        if data[:1] == b"v":
            # Not self.replay: a call of another kind may replay otherwise, a step is a value.
            return Call.replay(self, Outcome("value", data[1:]))
        return Raised(self._result_lost(f"of step {name!r} could not be stored", data[1:]))


def summary(error: BaseException) -> str:
    """An error in one line, for the record's story."""
    said = message_of(error)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text[:1000]


def told(error: Exception) -> str:
    """Why a codec failed: ours explains itself, another's error needs its name."""
    return str(error) if isinstance(error, (EncodingError, DecodingError)) else summary(error)


def is_refusal(error: SemelError) -> bool:
    """Return whether the store refuses a value for good, as opposed to an outage."""
    if isinstance(error, StoreUnavailableError):
        return not error.again and not isinstance(error, CorruptRecordError)
    return isinstance(error, SettingsError)


def unwrap(result: Any) -> Any:
    """Return the result, or raise the error it carries."""
    if type(result) is Raised:
        raise result.error
    return result


class Unguarded(Call):
    """A body that runs without a claim. Its steps run, and nothing is recorded."""

    def __init__(self, policy: Policy, colour: Colour, key: Key) -> None:
        super().__init__(policy, cast("StoreLedger", None), colour, key, b"")

    async def go(self, body: Callable[[], Any]) -> Any:
        claim = Claim(self.key, self._attempt_id, b"", self.policy.terms)
        self.attempt = self.attempt_type(self.key, claim, self)
        self.home = self.colour.home()
        token = CURRENT.set(self.attempt)
        try:
            value = body()
            return await value if self.colour is ASYNC else value
        except StopIteration as error:
            return Raised(error)
        finally:
            self.let_go()
            leave(token)

    async def _note(self, attempt: Attempt, name: str, value: Any) -> None:
        pass
