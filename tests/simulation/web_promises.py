"""What the HTTP door promises, checked from outside: when a handler begins, with every byte that
is sent, when a request is over, and when all is quiet.

An `Arrival` is one request as it came to one server process: what befell it, what its handler
did, what was sent. A response names the arrival whose handler made it, so that it is known of
every byte whose it is. The ledger's own answers are heard by the guard's `Oracle`.

A second run is real in one place, by no fault of ours: where the rule says that a crash releases
the key, and there was one. A client that hangs up is no crash.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.http.rule import NEVER_STORED, NO_ROUTE
from semel.stores.rules import Claiming, Completing, Operation, Renewing, Row, key_of
from semel.testing.oracle import Oracle, Story
from semel.testing.promises import FAULTS_SURVIVED, LEASE_S, MAX_RUN_S
from semel.testing.scenario import Machine
from semel.testing.simulator import Server
from semel.values import Kept, Outcome, State, Won

Header = tuple[bytes, bytes]

MADE_BY = b"x-made-by"
REPLAYED = (b"idempotent-replayed", b"true")
PERSONAL = (b"set-cookie", b"date")
TYPE = "urn:semel:problem:"


# --- what is known about a request --------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Subject:
    """One tenant's key."""

    tenant: str
    name: str
    id: bytes | None = None
    troubled: bool = False
    arrivals: list[Arrival] = field(default_factory=list)
    executions: list[Arrival] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    @property
    def place(self) -> str:
        return f"{self.tenant}/{self.name}"


@dataclass(frozen=True, slots=True)
class Content:
    """What a request asks for."""

    path: str = "/orders"
    amount: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, as it was made or as it was sent; `whole` when its last byte was."""

    status: int
    headers: tuple[Header, ...]
    body: bytes = b""
    whole: bool = True

    def header(self, name: bytes) -> bytes | None:
        return next((content for found, content in self.headers if found == name), None)

    @property
    def problem(self) -> str | None:
        """The name of what the door says instead of a response."""
        if self.header(b"content-type") != b"application/problem+json":
            return None
        return str(json.loads(self.body)["type"]).removeprefix(TYPE)


@dataclass(slots=True, eq=False)
class Arrival:
    """One request as it came to one server process."""

    process: Machine
    subject: Subject
    content: Content
    id: str
    calm: bool = False
    task: asyncio.Task[Any] | None = None

    # What its surroundings did to it.
    faults: int = 0
    faults_since_lease: int = 0
    paused: bool = False
    cut_off: bool = False
    cancelled: bool = False

    # What its handler did.
    ran: bool = False
    began_s: float = 0.0
    fence: int = 0
    lifetime: int = 0
    routed: bool = True
    acted: bool = False
    made: Answer | None = None
    raised: Exception | None = None
    excused: bool = False

    # What the ledger heard from it.
    recorded: Outcome | None = None
    lost: bool = False
    withdrew: bool = False
    over: bool = False

    @property
    def clean(self) -> bool:
        """Did nothing come between this request and the store?"""
        touched = self.faults or self.paused or self.cut_off or self.cancelled
        return not (touched or self.process.dead)

    @property
    def copes(self) -> bool:
        """Is what befell it no more than what a request is built to survive?"""
        return not self.paused and self.faults_since_lease <= FAULTS_SURVIVED


# --- what must hold -----------------------------------------------------------------------------


class WebPromises:
    """Watches the ledger, the handlers and the lines; `violations` says what did not hold."""

    def __init__(self, server: Server, *, on_error: str, on_crash: str) -> None:
        self.hits: Counter[str] = Counter()
        self.violations: list[str] = []
        self.arrivals: dict[str, Arrival] = {}
        self.effects: dict[str, list[Arrival]] = {}
        self._server = server
        self._on_error = on_error
        self._on_crash = on_crash
        self._oracle = Oracle(self.wrong, self.hit)
        self._oracle.robbed = self._check_robbery
        self.resolved = self._oracle.resolved
        server.watch = self._watch

    def hit(self, what: str) -> None:
        self.hits[what] += 1

    def wrong(self, what: str) -> None:
        self._server.loop.note("WRONG", what)
        self.violations.append(what)

    def story(self, subject: Subject) -> Story:
        return self._oracle.story(subject.id or b"")

    # The ledger.

    def _watch(self, op: Operation, before: Row | None, answer: Any, after: Row | None) -> None:
        attempt = op.attempt if isinstance(op, Claiming) else op.claim.attempt
        self._server.loop.note(type(op).__name__, attempt, type(answer).__name__)
        arrival = self.arrivals.get(attempt)
        if arrival is not None and arrival.subject.id is None:
            arrival.subject.id = key_of(op).id
        self._oracle.watch(op, before, answer, after, self._server.now_us())
        if arrival is not None:
            self._learn(arrival, op, answer)

    def _learn(self, arrival: Arrival, op: Any, answer: Any) -> None:
        if isinstance(answer, (Won, Kept)):
            arrival.faults_since_lease = 0
        if isinstance(op, Completing) and isinstance(answer, Kept):
            arrival.recorded = op.outcome
            self._check_kept(arrival, op.outcome)
        elif isinstance(op, Completing):
            arrival.lost = True
        if isinstance(op, Renewing) and not op.lease_s:
            arrival.withdrew = True
        if isinstance(op, Renewing) and op.lease_s and isinstance(answer, Kept):
            self.hit("renewed")
        if not isinstance(op, Claiming) and not op.claim.fence:
            arrival.withdrew = True

    def _check_kept(self, arrival: Arrival, outcome: Outcome) -> None:
        made = arrival.made if arrival.raised is None else None
        if made is not None and not self.storable(arrival, made.status):
            self.wrong(f"a {made.status} was recorded as the answer for good")
        if outcome.kind == "lost":
            self.hit("recorded_without_body")

    def storable(self, maker: Arrival, status: int) -> bool:
        """Does the rule say that this response is the answer from now on?"""
        if status >= 500:
            return self._on_error == "store"
        return not (status in NEVER_STORED or (status in NO_ROUTE and not maker.routed))

    def _check_robbery(self, attempt: str) -> None:
        arrival = self.arrivals.get(attempt)
        if arrival is None or arrival.over or not arrival.ran or arrival.cancelled:
            return
        if arrival.copes and not arrival.process.dead and not self._hangs(arrival):
            self.wrong("a healthy handler's lease ran out")

    def _hangs(self, arrival: Arrival) -> bool:
        ran_s = self._server.loop.clock_s - arrival.began_s if arrival.ran else 0.0
        return ran_s > MAX_RUN_S * 0.9

    # The handler.

    def handler_begins(self, arrival: Arrival, fence: int) -> None:
        """Nobody else may have run for this key, unless its failure let go of it."""
        subject, story = arrival.subject, self.story(arrival.subject)
        arrival.ran, arrival.began_s, arrival.fence = True, self._server.loop.clock_s, fence
        arrival.lifetime = story.lifetimes.get(fence, story.lifetime)
        self._server.loop.note("handler", arrival.id)
        same = [e for e in subject.executions if e.lifetime == arrival.lifetime]
        subject.executions.append(arrival)
        if arrival.lifetime in subject.seen:
            self.wrong("a handler ran again although its response had been seen")
        if any(not earlier.excused for earlier in same):
            self._double(subject)
        elif same:
            self.hit("ran_after_failure")

    def _double(self, subject: Subject) -> None:
        self.hit(f"double {self._on_crash}")
        if self._on_crash != "release":
            self.wrong(f"a handler ran twice under on_crash={self._on_crash}")
        elif not subject.troubled:
            self.wrong("a handler ran twice without a crash")

    def handler_answers(self, arrival: Arrival, made: Answer) -> None:
        """It has its response ready: whether it is kept follows from its status."""
        arrival.made = made
        if not self.storable(arrival, made.status):
            arrival.excused = made.status < 500 or self._on_error == "release"

    def handler_raises(self, arrival: Arrival, error: Exception) -> None:
        arrival.raised = error
        arrival.excused = self._on_error == "release"

    # The line.

    def sending(self, arrival: Arrival, answer: Answer, *, to_somebody: bool) -> None:
        """Check, before the head of a response is sent and before its end, that it is recorded.

        The head of a response without a length may be sent earlier, while the response is made.
        """
        maker = self._maker(arrival, answer)
        if maker is None:
            return
        if not self.storable(maker, answer.status):
            if maker is not arrival:
                self.wrong(f"a {answer.status} was replayed, which is never recorded")
            return
        if maker.recorded is not None:
            if to_somebody:
                maker.subject.seen.add(maker.lifetime)
        elif maker is arrival and not answer.whole and answer.header(b"content-length") is None:
            self.hit("live")
        elif maker.lost and not (maker.faults or maker.cut_off or maker.paused):
            self.wrong("a client was shown another response than the recorded one")
        elif maker is not arrival or not self._cannot_record(arrival):
            self.wrong("a response was sent before it was recorded")
        else:
            self.hit("sent_unrecorded")

    def _maker(self, arrival: Arrival, answer: Answer) -> Arrival | None:
        """Whose handler made this; None for what the door or the server says itself."""
        name = answer.header(MADE_BY)
        if name is None:
            return None
        maker = self.arrivals[name.decode()]
        if maker.subject.tenant != arrival.subject.tenant:
            self.wrong("a client was shown another tenant's response")
        elif maker.subject is not arrival.subject:
            self.wrong("a client was shown the response for another key")
        if maker.content != arrival.content:
            self.wrong("a client was shown the response for another payload")
        return maker

    def _cannot_record(self, arrival: Arrival) -> bool:
        """Was the store out of reach for longer than a lease?"""
        troubled = arrival.faults > FAULTS_SURVIVED or arrival.paused or arrival.cut_off
        return troubled or self._hangs(arrival)

    def sent(self, arrival: Arrival, answer: Answer) -> None:
        """The last byte has left."""
        self._server.loop.note("sent", arrival.id, answer.status, answer.problem or "")
        maker = self._maker(arrival, answer)
        if maker is None:
            self._sent_by_the_door(arrival, answer)
        elif maker.made is not None:
            self._check_bytes(arrival, maker, maker.made, answer)

    def _check_bytes(self, arrival: Arrival, maker: Arrival, made: Answer, answer: Answer) -> None:
        """The first one as its handler made it, every other the same but for what is personal."""
        headers: Sequence[Header] = made.headers
        if maker is not arrival:
            self.hit("replayed" if not arrival.ran else "adopted")
            headers = [h for h in headers if h[0] not in PERSONAL] + [REPLAYED]
        if answer.body != made.body or answer.status != made.status:
            self.wrong("a response changed on its way")
        if list(answer.headers) != list(headers):
            self.wrong("a response has other headers than it should")

    def _sent_by_the_door(self, arrival: Arrival, answer: Answer) -> None:
        name = answer.problem
        check = getattr(self, f"_said_{(name or 'failed').replace('-', '_')}", None)
        if check is None:
            self.wrong(f"a client was told {name or answer.status}")
        else:
            self.hit(f"told_{name or 'failed'}")
            check(arrival)

    def _said_failed(self, arrival: Arrival) -> None:
        """The server's own 500: for a handler that raised."""
        if arrival.raised is None:
            self.wrong("the server answered 500, and no handler had raised")
        elif self._on_error == "store":
            self.wrong("an exception that is to be stored was left to the server")

    def _said_in_progress(self, arrival: Arrival) -> None:
        if arrival.subject.arrivals == [arrival]:
            self.wrong("the only request there is was told that it is in progress")
        if arrival.ran and arrival.clean and not self._hangs(arrival):
            self.wrong("a handler ran to its end, and its client was told that it is in progress")

    def _said_key_reused(self, arrival: Arrival) -> None:
        self._check_not_run(arrival, "the key is used for something else")
        if all(other.content == arrival.content for other in arrival.subject.arrivals):
            self.wrong("the same request was refused as another one")

    def _said_store_unavailable(self, arrival: Arrival) -> None:
        self._check_not_run(arrival, "the store is down")
        if not arrival.faults and not arrival.paused:
            self.wrong("a client was told that the store is down, and it was not")

    def _said_outcome_unknown(self, arrival: Arrival) -> None:
        self._check_not_run(arrival, "nobody knows how it ended")
        if self._on_crash not in ("hold", "recover"):
            self.wrong(f"on_crash={self._on_crash} left an outcome unknown")

    def _said_response_not_kept(self, arrival: Arrival) -> None:
        recorded = self.story(arrival.subject).recorded
        if not any(outcome.kind == "lost" for outcome in recorded):
            self.wrong("a response was called lost that nobody recorded as lost")

    def _said_interrupted(self, arrival: Arrival) -> None:
        if "store" not in (self._on_error, self._on_crash):
            self.wrong("a client was told that it was interrupted, and that is not stored here")

    def _check_not_run(self, arrival: Arrival, told: str) -> None:
        if arrival.ran:
            self.wrong(f"a handler ran, and its client was told that {told}")

    # When a request is over.

    def ended(self, arrival: Arrival, error: BaseException | None) -> None:
        """May it end like this, and may it leave this behind?"""
        arrival.over = True
        if isinstance(error, asyncio.CancelledError):
            if not arrival.cancelled:
                self.wrong("a request was cancelled by nobody")
        elif error is not None and error is not arrival.raised and not isinstance(error, OSError):
            self.wrong(f"the door itself raised {error!r}")
        self._check_left_behind(arrival)

    def _check_left_behind(self, arrival: Arrival) -> None:
        story = self.story(arrival.subject)
        alive = story.alive(self._server.now_us())
        if not arrival.clean or story.attempt != arrival.id or not alive:
            return
        if story.state == "held" and not arrival.withdrew:
            self.wrong("a request is over and still holds its key")
        made = arrival.made if arrival.raised is None else None
        if made is not None and self.storable(arrival, made.status) and story.state != "done":
            self.wrong(f"a handler came to its end and left the key {story.state}")
        failed = arrival.raised is not None or (made is not None and made.status >= 500)
        if failed and self._on_error == "hold" and story.state != "unknown":
            self.wrong(f"a failure that is to be held left the key {story.state}")

    # When all is quiet.

    def check_free(self, subject: Subject) -> None:
        """After the last fault, a key is held for one lease at most."""
        row = self._server.row(subject.id or b"")
        if row is not None and row.state == State.PENDING and row.lease_us > self._server.now_us():
            self.wrong("all is quiet, and a key is still held")

    def check_settled(self, subject: Subject, last: Answer | None) -> None:
        """Whoever asks at the very end gets an answer that stays."""
        if last is None:
            self.wrong("after all faults, a last request was not answered")
        elif last.header(MADE_BY) is None and last.problem not in (
            "response-not-kept",
            "interrupted",
        ):
            self.wrong(f"after all faults, a last client was told {last.problem or last.status}")


__all__ = ["LEASE_S", "MAX_RUN_S", "Answer", "Arrival", "Content", "Subject", "WebPromises"]
