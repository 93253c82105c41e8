"""The HTTP door in a world that goes wrong.

A seed draws a rule, a few clients that retry with one key over lines that lose, double and cut
what they carry, a few server processes, and the faults of this run: processes die and are started
again, stand still for longer than a lease, are cut off from their store; servers cancel the
requests of clients that hung up; handlers fail before and after their effect. The door is the
real one, and so are the exchange, the guard's flow and the ledger's rules behind it. What must
hold is in `web_promises`.

    python tests/simulation/web_world.py --seed 123

tells what happened under one seed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent))
from web_promises import (
    LEASE_S,
    MADE_BY,
    MAX_RUN_S,
    Answer,
    Arrival,
    Content,
    Subject,
    WebPromises,
)

from semel import call as guard_call
from semel import keys
from semel.guard import CannotTell, Recovered, Retry
from semel.http import IdempotencyMiddleware, Response, Rule, attempt_of, protocol
from semel.testing.scenario import HANG_S, PATIENCE_S, QUIET_S, STORE, Machine, Report, Tally
from semel.testing.scenario import _Rooms as Rooms
from semel.testing.simulator import (
    DeadlockError,
    FaultyLedger,
    Host,
    LivelockError,
    Network,
    Server,
    SimLoop,
    Weather,
)
from semel.values import Outcome

SHORT_TTL_S = 1.25 * LEASE_S
LINGER_S = 0.2
MAX_RESPONSE = 600
PATIENT_S = 4 * MAX_RUN_S

SOMETIMES = (
    # faults
    "crash", "pause", "cancel", "cut_off", "outage", "skew", "request_lost", "reply_lost",
    "doubled", "late", "hang", "sweep", "line_request_lost", "line_reply_lost", "line_doubled",
    "line_cut", "hung_up", "hung_up_while_sending_body", "heard_disconnect",
    # ledger
    "takeover", "orphan", "mismatch", "expired", "withdrawn", "renewed",
    # door
    "replayed", "adopted", "ran_after_failure", "recorded_without_body", "sent_unrecorded",
    "live", "failed_midway",
    "told_in-progress", "told_key-reused", "told_store-unavailable", "told_outcome-unknown",
    "told_response-not-kept", "told_interrupted", "told_failed", "recovered", "recover_retry",
    "cannot_tell", "resolved",
    # the impossible, where it is impossible
    "double release",
)  # fmt: skip

REQUEST: contextvars.ContextVar[Arrival] = contextvars.ContextVar("semel_request")


class HandlerError(Exception):
    """What a handler raises that fails."""


# --- the line between a client and a server -----------------------------------------------------


@dataclass(slots=True)
class Fates:
    """How likely each fault of a line is, per request, and how long clients wait."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    doubled: float = 0.0
    cut: float = 0.0
    timeouts_s: tuple[float, ...] = (PATIENT_S,)


class Line:
    """One request on its way, and its response: what an ASGI server gives its app.

    A server tells an app by OSError that its client is gone, or not at all (`loud`).
    """

    def __init__(self, world: World, body: bytes, *, cut_at: int | None, delivers: bool) -> None:
        half = len(body) // 2
        self._world = world
        self._pieces = [body[:half], body[half:]] if world.chance() < 0.3 else [body]
        self._cut_at = cut_at
        self._delivers = delivers
        self._loud = world.chance() < 0.7
        self._broken = False
        self._count = itertools.count(1)
        self.arrival: Arrival | None = None
        self.reply: asyncio.Future[Answer] = world.loop.create_future()
        self.gone = asyncio.Event()
        self.answer: Answer | None = None

    async def receive(self) -> dict[str, Any]:
        if self._pieces:
            await asyncio.sleep(self._world.chance() * 0.02)
        if self.gone.is_set() and self._pieces:
            self._world.hit("hung_up_while_sending_body")
        elif self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(self._world.chance() * 0.01)
        if not self._broken:
            self._write(message)
        if next(self._count) == self._cut_at and not self.gone.is_set():
            self._world.hit("line_cut")
            self.gone.set()
        if self.gone.is_set():
            if self._loud:
                self._broken = True
                raise OSError("the client is gone")
        elif self.answer is not None and self.answer.whole:
            self._deliver(self.answer)

    def _write(self, message: dict[str, Any]) -> None:
        assert self.arrival is not None
        promises, answer = self._world.promises, self.answer
        if message["type"] == "http.response.early_hint":
            return
        if message["type"] == "http.response.start":
            if answer is not None:
                promises.wrong("two responses to one request")
            self.answer = Answer(message["status"], tuple(message["headers"]), whole=False)
            promises.sending(self.arrival, self.answer, to_somebody=not self.gone.is_set())
            return
        if answer is None or answer.whole:
            promises.wrong("a body without its head, or after its end")
            return
        body = answer.body + message.get("body", b"")
        self.answer = replace(answer, body=body, whole=not message.get("more_body", False))
        if self.answer.whole:
            promises.sending(self.arrival, self.answer, to_somebody=not self.gone.is_set())
            promises.sent(self.arrival, self.answer)

    def _deliver(self, answer: Answer) -> None:
        if self._delivers:
            delay_s = self._world.chance() * 0.02
            self._world.loop.after(delay_s, _settle, self.reply, answer, context=OUTSIDE)


OUTSIDE = contextvars.Context()


def _settle(reply: asyncio.Future[Answer], answer: Answer) -> None:
    if not reply.done():
        reply.set_result(answer)


# --- servers ------------------------------------------------------------------------------------


class Process(Machine):
    """A server process: an app behind its door."""

    def __init__(self, name: str, ledger: FaultyLedger, app: Callable[..., Any]) -> None:
        super().__init__(name, ledger)
        self.app = app
        self.arrivals: list[Arrival] = []

    @property
    def running(self) -> list[Arrival]:
        return [arrival for arrival in self.arrivals if not arrival.over]


@dataclass(frozen=True)
class Plant:
    """What a test replaces to see whether the campaign notices."""

    server: type[Server] = Server
    ledger: type[FaultyLedger] = FaultyLedger
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


HONEST = Plant()


# --- the world ----------------------------------------------------------------------------------


class World:
    """One seed's world: it draws what happens, and has it checked."""

    kinds = (
        "crash", "pause", "cancel", "cut_off", "outage", "skew", "network", "failure", "hang",
        "line", "hang_up",
    )  # fmt: skip

    def __init__(self, seed: int, plant: Plant = HONEST) -> None:
        self.loop = loop = SimLoop(seed)
        self.chance = loop.chance.random
        self.choose = loop.chance.choice
        self.server = plant.server(loop)
        self.rule, self.on_crash = self._draw_rule()
        self.promises = self._promises()
        self.hit = self.promises.hit
        self._faults = self._draw_faults()
        self.network = Network(loop, self._draw_weather())
        self.network.faulted = self.faulted
        self.network.arrived = self.arrived
        self._fates = self._draw_fates()
        self._top: dict[str, int] = {}
        self._plant = plant
        self._count = itertools.count(1)
        self._names = (f"p{n}" for n in itertools.count())
        self.subjects = self._draw_subjects()
        self.processes = [self._start() for _ in range(loop.chance.randint(1, 3))]
        self._strikes = 0.05 if self.chance() < 0.5 else 0.0
        self.quiet = False

    # What is drawn once.

    def _draw_rule(self) -> tuple[Rule, str]:
        on_error = self.choose(("release", "release", "store", "hold"))
        crashes: tuple[Any, ...] = (None, None, "hold", self.recover)
        if on_error != "hold":
            crashes = (None, None, "release", "store", "hold", self.recover)
        on_crash = self.choose(crashes)
        rule = Rule(
            on_error=on_error,
            on_crash=on_crash,
            wait=self.choose((0, 0, 2 * LEASE_S)),
            ttl=SHORT_TTL_S if self.chance() < 0.15 else 86_400,
            fingerprint=self.choose(("bytes", "json")),
            lease=LEASE_S,
            max_run=MAX_RUN_S,
            max_response=MAX_RESPONSE,
            linger=LINGER_S,
        )
        chosen = on_error if on_crash is None else on_crash
        return rule, "recover" if callable(chosen) else chosen

    def _promises(self) -> WebPromises:
        return WebPromises(self.server, on_error=self.rule.on_error, on_crash=self.on_crash)

    def _draw_faults(self) -> list[str]:
        """A different mixture for every seed: a rare pair of faults is not rare in all of them."""
        likely = self.choose((0.2, 0.4, 0.6))
        return [kind for kind in self.kinds if self.chance() < likely]

    def _draw_weather(self) -> Weather:
        if "network" not in self._faults:
            return Weather()
        return Weather(*(self.chance() * self.choose((0.0, 0.1, 0.3)) for _ in range(4)))

    def _draw_fates(self) -> Fates:
        fates = Fates()
        if "line" in self._faults:
            fates = Fates(*(self.chance() * self.choose((0.0, 0.2, 0.5)) for _ in range(4)))
        if "hang_up" in self._faults:
            fates.timeouts_s = (0.05, 0.3, LEASE_S, PATIENT_S)
        return fates

    def _draw_subjects(self) -> list[Subject]:
        subjects = [Subject("acme", "order-1")]
        if self.chance() < 0.3:
            subjects.append(Subject("globex", "order-1"))
        return subjects

    def _start(self) -> Process:
        name = next(self._names)
        ledger = self._plant.ledger(self.server, self.network)
        process = Process(name, ledger, self.door())
        process.offset = 1000.0 * self.chance()
        if "skew" in self._faults:
            self.hit("skew")
            process.rate = 0.95 + 0.1 * self.chance()
            process.skew_s = self.choose((-30.0, 0.0, 30.0))
        return process

    def door(self) -> Callable[..., Any]:
        """The app as a process runs it."""
        return IdempotencyMiddleware(self.app, scope=tenant_of, store=STORE, rule=self.rule)

    # The run.

    async def live(self) -> None:
        """All of it: trouble, then quiet, then the questions."""
        self.loop.create_task(self._nemesis())
        clients = [
            self.loop.spawn(Host(f"c{n}"), self._client())
            for n in range(self.loop.chance.randint(1, 4))
        ]
        _, left = await asyncio.wait(clients, timeout=PATIENCE_S)
        if left:
            self.promises.wrong("a client never got an answer, nor gave up")
        for client in clients:
            if client.done():
                client.result()
        self._calm_down()
        await asyncio.sleep(QUIET_S)
        for subject in self.subjects:
            await self._settle(subject)

    def _calm_down(self) -> None:
        self.quiet = True
        self.network.weather = Weather()
        self.network.can_be_cut = False
        self._fates = Fates()

    # What clients do.

    async def _client(self) -> None:
        await asyncio.sleep(self.chance() * self.choose((0.02, 0.3, 1.5)))
        subject, content = self.choose(self.subjects), self._draw_content()
        for _ in range(self.choose((1, 3, 6))):
            answer = await self.ask(subject, content)
            if self._is_final(answer) and self.chance() < 0.5:
                return
            await asyncio.sleep(self.chance() * self.choose((0.05, 0.5, LEASE_S)))

    def _draw_content(self) -> Content:
        if self.chance() < 0.1:
            return self.choose((Content(amount=2), Content(path="/refunds")))
        return Content()

    def _is_final(self, answer: Answer | None) -> bool:
        if answer is None or answer.status in (401, 429):
            return False
        return answer.status < 500 and answer.problem != "in-progress"

    async def ask(self, subject: Subject, content: Content, *, calm: bool = False) -> Answer | None:
        """Send a request, and wait for its answer for as long as this client does."""
        fates, timeout_s = self._fates, self.choose(self._fates.timeouts_s)
        line = self._line(subject, content, delivers=not self._is("reply_lost", fates.reply_lost))
        if not self._is("request_lost", fates.request_lost):
            self._send(line, subject, content, self.chance() * 0.02, calm=calm)
        if self._is("doubled", fates.doubled):
            twin = self._line(subject, content, delivers=False)
            self._send(twin, subject, content, self.chance() * self.choose((0.05, 3.0)))
        await asyncio.wait([line.reply], timeout=timeout_s)
        if line.reply.done():
            return line.reply.result()
        self._hang_up(line)
        return None

    def _line(self, subject: Subject, content: Content, *, delivers: bool) -> Line:
        cut_at = self.choose((1, 1, 2, 3)) if self.chance() < self._fates.cut else None
        return Line(self, self._written(content), cut_at=cut_at, delivers=delivers)

    def _written(self, content: Content) -> bytes:
        """The same bytes every time, or the same JSON, where that is what is compared."""
        spaced = self.rule.fingerprint == "json" and self.chance() < 0.5
        asked = {"amount": content.amount, "currency": "EUR"}
        if spaced:
            return json.dumps(dict(reversed(asked.items())), indent=1).encode()
        return json.dumps(asked).encode()

    def _send(
        self, line: Line, subject: Subject, content: Content, after_s: float, *, calm: bool = False
    ) -> None:
        accept = (self._accept, line, subject, content, calm)
        self.loop.after(after_s, *accept, context=OUTSIDE)

    def _is(self, kind: str, likely: float) -> bool:
        if likely and self.chance() < likely:
            self.hit(f"line_{kind}")
            self.loop.note(f"line_{kind}")
            return True
        return False

    def _hang_up(self, line: Line) -> None:
        self.hit("hung_up")
        self.loop.note("hung_up")
        line.gone.set()
        arrival = line.arrival
        if arrival is not None and "cancel" in self._faults and self.chance() < 0.3:
            self.loop.after(self.chance() * 0.1, self._cut, arrival, context=OUTSIDE)

    # What servers do.

    def _accept(self, line: Line, subject: Subject, content: Content, calm: bool) -> None:
        process = self.choose([p for p in self.processes if not p.dead])
        name = f"{process.name}/{next(self._count)}"
        line.arrival = arrival = Arrival(process, subject, content, name, calm)
        arrival.paused = process.paused_until > self.loop.clock_s
        self.promises.arrivals[name] = arrival
        subject.arrivals.append(arrival)
        process.arrivals.append(arrival)
        self.loop.note("request", name, subject.tenant, content)
        arrival.task = self.loop.spawn(process, self._serve(arrival, line))

    async def _serve(self, arrival: Arrival, line: Line) -> None:
        """As a server runs an app."""
        REQUEST.set(arrival)
        ended: BaseException | None = None
        try:
            await arrival.process.app(_scope(arrival), line.receive, line.send)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  (it is checked)
            ended = error
            if line.answer is None and not isinstance(error, asyncio.CancelledError):
                with suppress(OSError):
                    await _say_500(line)
        self.loop.note("end", arrival.id, repr(ended) if ended else "")
        if ended is None and not line.gone.is_set() and not (line.answer and line.answer.whole):
            self.promises.wrong("a request was left without a whole response")
        self.promises.ended(arrival, ended)

    def new_attempt(self) -> str:
        return REQUEST.get().id

    # The app.

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        arrival = REQUEST.get()
        await self._read(arrival, receive)
        attempt = attempt_of(scope)
        self.promises.handler_begins(arrival, 0 if attempt is None else attempt.fence)
        style = "plain" if arrival.calm else self.choose(STYLES)
        try:
            status = await self._work(arrival)
        except HandlerError as error:
            self.promises.handler_raises(arrival, error)
            raise
        if arrival.routed:
            scope["endpoint"] = self.app
        made = self._make(arrival, status, style)
        if not arrival.calm and self.chance() < 0.15:
            await send({"type": "http.response.early_hint", "links": [b"</style.css>"]})
        self.promises.handler_answers(arrival, made)
        await self._respond(style, made, receive, send)

    async def _read(self, arrival: Arrival, receive: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        if json.loads(body)["amount"] != arrival.content.amount:
            self.promises.wrong("a handler was given another body than was sent")

    async def _work(self, arrival: Arrival) -> int:
        """The effect, with time before and after it; the status of the response."""
        await asyncio.sleep(self._work_s(arrival))
        status = self._draw_failure(arrival, (None, 400, 402, 404, 429, 401, 500, 503))
        if status is not None:
            return status
        self._act(arrival)
        await asyncio.sleep(self._work_s(arrival))
        return self._draw_failure(arrival, (None, 500)) or 201

    def _work_s(self, arrival: Arrival) -> float:
        if arrival.calm:
            return 0.0
        if "hang" in self._faults and self.chance() < 0.05:
            self.hit("hang")
            arrival.subject.troubled = True
            return HANG_S
        return self.chance() * self.choose((0.02, 0.02, 0.3, 2 * LEASE_S))

    def _draw_failure(self, arrival: Arrival, statuses: tuple[int | None, ...]) -> int | None:
        """A status to answer with, or None to go on; it may also raise."""
        if arrival.calm or "failure" not in self._faults or self.chance() > 0.3:
            return None
        status = self.choose(statuses)
        if status is None:
            self._fail(arrival, "raised")
        arrival.routed = status != 404 or self.chance() < 0.5
        return status

    def _fail(self, arrival: Arrival, why: str) -> NoReturn:
        raise HandlerError(f"{arrival.id} {why}")

    def _act(self, arrival: Arrival) -> None:
        """The effect. Its receiver refuses whoever was declared dead by somebody who asked it."""
        place = arrival.subject.place
        if self.on_crash == "recover" and arrival.fence < self._top.get(place, 0):
            self._fail(arrival, "came too late")
        arrival.acted = True
        self.promises.effects.setdefault(place, []).append(arrival)
        self.loop.note("effect", arrival.id)

    async def recover(self, attempt: Any) -> Any:
        """Ask the receiver whether it happened."""
        arrival = REQUEST.get()
        subject = arrival.subject
        await asyncio.sleep(0 if arrival.calm else self.chance() * 0.05)
        self._top[subject.place] = attempt.fence
        lifetime = self.promises.story(subject).lifetimes.get(attempt.fence)
        if not arrival.calm and self.chance() < 0.1:
            self.hit("cannot_tell")
            return CannotTell()
        ran = [e for e in subject.executions if e.lifetime == lifetime]
        if any(e.acted and not e.excused for e in ran):
            self.hit("recovered")
            arrival.made = self._make(arrival, 200, "plain")
            return Recovered(Response(200, arrival.made.headers, arrival.made.body))
        self.hit("recover_retry")
        for earlier in ran:
            earlier.excused = True
        return Retry()

    def _make(self, arrival: Arrival, status: int, style: str) -> Answer:
        said = {"tenant": arrival.subject.tenant, "amount": arrival.content.amount}
        body = json.dumps({**said, "receipt": arrival.id}).encode()
        body += b" " * (2 * MAX_RESPONSE if style == "large" else 0)
        kind = b"text/event-stream" if style == "stream" else b"application/json"
        headers = [
            (b"content-type", kind),
            (MADE_BY, arrival.id.encode()),
            (b"link", b"</a>; rel=next"),
            (b"link", b"</b>; rel=up"),
            (b"set-cookie", b"session=" + arrival.id.encode()),
            (b"date", b"%d" % self.loop.clock_s),
        ]
        if style in ("plain", "pieces", "large"):
            headers.append((b"content-length", b"%d" % len(body)))
        return Answer(status, tuple(headers), body)

    async def _respond(self, style: str, made: Answer, receive: Any, send: Any) -> None:
        start = {
            "type": "http.response.start",
            "status": made.status,
            "headers": list(made.headers),
        }
        if style in ("plain", "large"):
            await send(start)
            await send({"type": "http.response.body", "body": made.body})
            return
        listening = asyncio.ensure_future(_disconnect(receive)) if self.chance() < 0.8 else None
        try:
            await send(start)
            await self._send_pieces(style, made.body, listening, send)
        finally:
            if listening is not None:
                listening.cancel()

    async def _send_pieces(
        self, style: str, body: bytes, listening: asyncio.Future[None] | None, send: Any
    ) -> None:
        """Piece by piece, and no further when the client is gone, as frameworks do."""
        third = len(body) // 3
        pauses = (0.0, 0.02, 2 * LINGER_S) if style in ("slow", "stream") else (0.0, 0.02)
        for piece in (body[:third], body[third:]):
            if listening is not None and listening.done():
                self.hit("heard_disconnect")
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(self.chance() * self.choose(pauses))
            if "failure" in self._faults and self.chance() < 0.1:
                self._fail_midway()
        await send({"type": "http.response.body", "body": b""})

    def _fail_midway(self) -> NoReturn:
        arrival = REQUEST.get()
        error = HandlerError(f"{arrival.id} raised in the middle of its response")
        self.hit("failed_midway")
        self.promises.handler_raises(arrival, error)
        raise error

    # What goes wrong.

    async def _nemesis(self) -> None:
        for _ in range(self.loop.chance.randint(0, 4)):
            await asyncio.sleep(self.chance() * LEASE_S)
            self._strike(self.choose(self.processes))
            if self.chance() < 0.3:
                self.hit("sweep")
                await self.server.sweep()

    def _strike(self, process: Process) -> None:
        possible = ("crash", "pause", "cancel", "cut_off", "outage")
        kinds = [kind for kind in possible if kind in self._faults]
        if not kinds or self.quiet or process.dead:
            return
        kind = self.choose(kinds)
        self.loop.note(kind, process.name)
        self.hit(kind)
        getattr(self, f"_{kind}")(process)

    def _crash(self, process: Process) -> None:
        self._trouble(process)
        process.dead = True
        self.processes.append(self._start())

    def _pause(self, process: Process) -> None:
        self._trouble(process)
        until = self.loop.clock_s + self.chance() * 3 * LEASE_S
        process.paused_until = max(process.paused_until, until)
        for arrival in process.running:
            arrival.paused = True

    def _outage(self, process: Process) -> None:
        until_s = self.loop.clock_s + self.chance() * 2 * LEASE_S
        for each in self.processes:
            self._cut_off(each, until_s)

    def _cut_off(self, process: Process, until_s: float | None = None) -> None:
        self._trouble(process)
        process.cut_off_until = until_s or self.loop.clock_s + self.chance() * 2 * LEASE_S
        for arrival in process.running:
            arrival.cut_off = True

    def _cancel(self, process: Process) -> None:
        if process.running:
            self._cut(self.choose(process.running))

    def _cut(self, arrival: Arrival) -> None:
        if not arrival.over and arrival.task is not None:
            arrival.cancelled = arrival.subject.troubled = True
            arrival.task.cancel()

    def _trouble(self, process: Process) -> None:
        for arrival in process.running:
            arrival.subject.troubled = True

    def faulted(self, kind: str) -> None:
        self.hit(kind)
        arrival = REQUEST.get()
        arrival.faults += 1
        arrival.faults_since_lease += 1
        arrival.subject.troubled = True
        self.loop.note(kind, arrival.id)

    def arrived(self, host: Host | None) -> None:
        if self._strikes and isinstance(host, Process) and self.chance() < self._strikes:
            self._strike(host)

    # When all is quiet.

    async def _settle(self, subject: Subject) -> None:
        """Every key comes to an end, and whoever asks now gets an answer."""
        self.promises.check_free(subject)
        content, last = await self._last_answer(subject)
        if last is not None and last.problem == "outcome-unknown":
            await self._resolve(subject, content)
            content, last = await self._last_answer(subject)
        self.promises.check_settled(subject, last)

    async def _last_answer(self, subject: Subject) -> tuple[Content, Answer | None]:
        """Under whichever content the key was used first."""
        contents = [Content(), Content(amount=2), Content(path="/refunds")]
        content, last = contents[0], None
        self.processes.append(self._start())
        for content in contents:
            last = await self.ask(subject, content, calm=True)
            if last is None or last.problem != "key-reused":
                break
        return content, last

    async def _resolve(self, subject: Subject, content: Content) -> None:
        """What a person does about an unknown outcome: find out, and write it down."""
        row = self.server.row(subject.id or b"")
        fence = 0 if row is None else row.fence
        outcome = self._found_out(subject, content, fence)
        id = subject.id or b""
        if not await self.server.resolve(id, fence=fence, outcome=outcome, ttl_s=None):
            self.promises.wrong("an unknown outcome could not be resolved")
        self.hit("resolved")
        self.promises.resolved(id, outcome)

    def _found_out(self, subject: Subject, content: Content, fence: int) -> Outcome | None:
        """None if nothing happened: then it may run again."""
        lifetime = self.promises.story(subject).lifetimes.get(fence)
        ran = [e for e in subject.executions if e.lifetime == lifetime]
        if not any(e.acted for e in ran):
            for earlier in ran:
                earlier.excused = True
            return None
        person = Arrival(self.processes[-1], subject, content, f"hand/{next(self._count)}")
        person.made = made = self._make(person, 201, "plain")
        kept = protocol.written(Response(made.status, made.headers, made.body))
        person.recorded = Outcome("value", kept, made.status)
        self.promises.arrivals[person.id] = person
        return person.recorded


STYLES = ("plain", "plain", "plain", "pieces", "wrapped", "slow", "stream", "large")


def tenant_of(request: Any) -> str:
    tenant: str = request.header("x-tenant")
    return tenant


def _scope(arrival: Arrival) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": arrival.content.path,
        "query_string": b"",
        "headers": [
            (b"idempotency-key", f'"{arrival.subject.name}"'.encode()),
            (b"x-tenant", arrival.subject.tenant.encode()),
        ],
    }


async def _say_500(line: Line) -> None:
    headers = [(b"content-type", b"text/plain")]
    await line.send({"type": "http.response.start", "status": 500, "headers": headers})
    await line.send({"type": "http.response.body", "body": b"Internal Server Error"})


async def _disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --- runs ---------------------------------------------------------------------------------------


class _Ear(logging.Handler):
    """Background work that dies is a violation; everything else the door says is expected."""

    def __init__(self, promises: WebPromises) -> None:
        super().__init__(logging.ERROR)
        self._promises = promises

    def emit(self, record: logging.LogRecord) -> None:
        if "background" in record.msg:
            self._promises.wrong(f"background work failed: {record.exc_info}")


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Put the world's chances and rooms in the place of the process's own."""
    log, ear = logging.getLogger("semel"), _Ear(world.promises)
    new_attempt, room, propagate = keys.new_attempt, guard_call.ROOM, log.propagate
    keys.new_attempt, guard_call.ROOM = world.new_attempt, Rooms()
    log.propagate = False
    log.addHandler(ear)
    try:
        yield
    finally:
        keys.new_attempt, guard_call.ROOM = new_attempt, room
        log.propagate = propagate
        log.removeHandler(ear)


def run_world(world: World, seed: int, plant: Plant = HONEST) -> Report:
    """Live through it."""
    with simulated(world), plant.patch():
        try:
            world.loop.run(world.live())
        except (LivelockError, DeadlockError) as error:
            world.promises.wrong(str(error))
    promises, loop = world.promises, world.loop
    return Report(seed, promises.violations, promises.hits, loop.steps, loop.trace)


def run_seed(seed: int, plant: Plant = HONEST) -> Report:
    return run_world(World(seed, plant), seed, plant)


def tally(first: int, count: int, run: Callable[[int], Report] = run_seed) -> Tally:
    """Run `count` seeds, one after another."""
    total = Tally()
    for seed in range(first, first + count):
        report = run(seed)
        total.seeds += 1
        total.steps += report.steps
        total.hits.update(report.hits)
        total.violations += [(seed, wrong) for wrong in report.violations]
    return total


def main(run: Callable[[int], Report]) -> int:
    """Tell what happened under one seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    report = run(parser.parse_args().seed)
    print(report.told(trace=True))  # noqa: T201
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main(run_seed))
