"""Those who play and watch in simulated rooms: the real client rules, and hands that misbehave.

Whatever comes over a line is checked at once: nobody is told another one's card, or an answer that
was not decided. Whatever the rules hand over is checked, too: what a client shows is what somebody
like it is to see of its version, and follows what it showed before, or came as a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

from room_history import ROOM, Node
from room_members import LATENCY_S, Line, message
from room_overlay import ON_TOP, Overlay, guess
from room_table import of

from semel.client.room_rules import Guest
from semel.client.room_values import (
    ActionError,
    ActionResult,
    ActionTimeoutError,
    Deliver,
    Event,
    HangUp,
    Open,
    Over,
    Result,
    Send,
    Settle,
    State,
    Terms,
    Wait,
)
from semel.testing.simulator import Host

if TYPE_CHECKING:
    from room_world import World

TERMS = Terms(timeout_s=4.0, resync_s=1.0, grace_s=0.5, connect_s=2.0, backoff_s=0.3, longest_s=3.0)

CARD = re.compile(r"card/(\w+)/")

GARBAGE = (
    "", "{", "[]", "null", '"JOIN"', "{}", '{"type": 7}', '{"type": "JOIN"}', '{"type": "DANCE"}',
    '{"type": "ACTION_REQUEST"}', '{"type": "ACTION_REQUEST", "requestId": "x", "payload": []}',
    '{"type": "ACTION_REQUEST", "requestId": 7, "payload": {"tableId": "t1", "actionType": "x"}}',
    '{"type": "JOIN", "payload": {"tableId": NaN}}', '{"type": "REQUEST_SNAPSHOT", "payload": {}}',
)  # fmt: skip

CURSORS = ("0", "1.", "-1.000000000000", "7.9f3c00d1a2b3", "\N{SNOWMAN}", "9" * 40)

# Answers that decide on nothing: the same request may get another one.
OPEN = frozenset({"FAILED", "SUPERSEDED"})


class Client:
    """One tab of a user's; `user` is None for those who only watch. It numbers what it asks if
    `is_numbered`.
    """

    def __init__(self, world: World, name: str, user: str | None, table: str) -> None:
        self.world = world
        self.name = name
        self.user = user
        self.table = table
        self.stream = f"{ROOM}{table}"
        self.is_numbered = world.chance.random() < 0.5
        self.host = Host(name)
        self.woken = asyncio.Event()
        self.line: Line | None = None
        self.nodes: set[Node] = set()
        """What it shows; two histories may look the same to it."""
        self.is_odd = world.chance.random() < 0.3
        """It comes with any cursor."""
        self.stuck_until = 0.0
        self.has_failed = False
        self.sent: list[str] = []
        """Requests as they were sent."""
        self._snapshots: list[str] = []
        self._events: set[tuple[str, str]] = set()
        self._results: set[Node] = set()
        """What came of hands, by where it came to be."""
        self._clicked: dict[str, str] = {}
        """By request, what was clicked."""
        self._ids: dict[str, str] = {}
        """By that, the request as the log knows it."""
        decided = world.tables.decided
        self._overlay = Overlay(self.wrong, self._ids, lambda id: len(decided[self.stream, id]) > 1)
        self._count = self._clicks = 0
        self._unknown: list[tuple[str, Any]] = []
        self._tokens = 0
        self.guest = self._guest()
        world.loop.spawn(self.host, self._live())
        if user is not None:
            world.loop.spawn(self.host, self._play())

    def _guest(self) -> Guest:
        chance = self.world.chance
        return self.world.plan.guest(
            self.table,
            TERMS,
            chance.random,
            letters=lambda: f"{chance.randrange(10**6):06}",
            wall_s=lambda: self.world.loop.clock_s,
            client_id=self.name,
            seq=0 if self.is_numbered else None,
            spectate=self.user is None,
            renews=True,
            optimistic=guess if chance.random() < 0.7 else None,
        )

    def wrong(self, what: str) -> None:
        self.world.wrong(f"{what} ({self.name} at {self.table})")

    @property
    def is_at_head(self) -> bool:
        now = self.world.tables.now[self.stream]
        guest = self.guest
        is_there = guest.cursor == str(now.position) and guest.is_settled
        return is_there and guest.state == guest.confirmed == now.view(self.user)

    @property
    def is_open(self) -> bool:
        return self.guest.status == "open"

    # --- doing what the rules say ---------------------------------------------------------------

    async def _live(self) -> None:
        guest = self.guest
        while True:
            now = self.world.loop.clock_s
            match guest.next(now):
                case Open():
                    self._open(now)
                case Send(told):
                    self._send(json.dumps(told))
                case HangUp(_, why):
                    self.world.hit(f"hung_up_{why}")
                    self._hang_up()
                case Deliver(news):
                    self._handed(news)
                case Settle(id, answer):
                    self._settled(id, answer)
                case Wait(within_s):
                    await self._wait(within_s)
                case Over(error):
                    self.wrong(f"somebody gave up: {error}")
                    return

    def _open(self, now: float) -> None:
        self._hang_up()
        server = self.world.some_server()
        if server is None:
            self.world.hit("nobody_there")
            self.guest.closed(now)
            return
        self.line = Line(self.world, server, self)
        if self.world.chance.random() < self.world.cuts:
            self.line.cut_soon()

    def _hang_up(self) -> None:
        if self.line is not None:
            self.line.hang_up()
            self.line = None

    def _send(self, text: str) -> None:
        if self.line is not None:
            if '"ACTION_REQUEST"' in text:
                self.sent.append(text)
            self.line.say(text)

    async def _wait(self, within_s: float) -> None:
        while self.stuck_until > self.world.loop.clock_s:
            await asyncio.sleep(0.2)
        if not (self.line is not None and self.line.came):
            self.woken.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(within_s, 30.0)):
                    await self.woken.wait()
        while self.line is not None and self.line.came and not self.guest._steps:
            self._take(self.line.take())

    def _take(self, what: str | int | None) -> None:
        now = self.world.loop.clock_s
        match what:
            case None:
                self._tokens += 1
                self.guest.opened(now, f"{self.user or ''}:{self._tokens}")
            case int():
                self.line = None
                self.guest.closed(now, what)
            case _:
                self._heard(what)
                self.guest.received(now, what)

    # --- what it wants --------------------------------------------------------------------------

    async def _play(self) -> None:
        chance = self.world.chance
        await self.world.pause(1.0)
        self.click({"actionType": "sit"})
        while self.world.is_playing:
            await self.world.pause(self.world.pace_s)
            if self.guest.confirmed is None:
                continue
            drawn = chance.random()
            if drawn < 0.7 or not self.world.may("odd"):
                self._do(self._wish())
            elif drawn < 0.85 and self.sent:
                self._say_again()
            else:
                self._be_odd()

    def _do(self, action: dict[str, Any]) -> None:
        """Who leaves the table may be gone before the page shows that they have."""
        self.click(action)
        chance, line = self.world.chance, self.line
        is_leaving = action["actionType"] == "stand" and line is not None
        if is_leaving and chance.random() < 2 * self.world.cuts:
            self.world.hit("walked_out")
            # The server has heard of it by then.
            self.world.loop.after(LATENCY_S + 0.05 * chance.random(), line.cut)

    def _wish(self) -> dict[str, Any]:
        chance, state = self.world.chance, self.guest.confirmed
        order, drawn = state["order"], chance.random()
        if self.user not in state["seats"] and drawn < 0.6:
            return {"actionType": "sit"}
        if state["phase"] != "playing" and drawn < 0.6:
            return {"actionType": "deal"}
        if self.user not in order and drawn < 0.75:
            return {"actionType": "stand"}
        if order and order[state["next"]] == self.user and drawn < 0.7:
            verb = chance.choice(["bet", "bet", "bet", "fold"])
            return {"actionType": verb, "amount": chance.randrange(3)}
        return dict(chance.choice(self._other_wishes()))

    def _other_wishes(self) -> list[dict[str, Any]]:
        chat = {"actionType": "chat", "text": f"{self.world.chance.randrange(1000)}"}
        if not self.world.may("odd"):
            return [chat]
        seen = max(0, (self.guest.version or 0) - self.world.chance.choice([0, 0, 0, 1]))
        stale = {"actionType": "chat", "text": "!", "seen": seen, "expectedVersion": seen}
        kinds = ("stand", "deal", "bet", "fold", "boom", "odd", "fly")
        rest = [{"actionType": kind, "amount": 1} for kind in kinds]
        return [chat, chat, chat, stale, stale, *rest, {"actionType": "chat", "text": "x" * 4000}]

    def new_id(self) -> str:
        """The same as others have theirs, which are others' business."""
        tab = self.name[-1]
        if self.is_numbered:
            return f"{tab}#{(self.guest._requests._seq or 0) + 1}"
        self._count += 1
        return f"{tab}-{self._count}"

    def click(self, action: dict[str, Any]) -> str:
        now, chance = self.world.loop.clock_s, self.world.chance
        self.woken.set()
        if self._unknown and chance.random() < 0.5:
            id, action = self._unknown.pop()
            self.world.hit("asked_again")
            return self.guest.act(now, action, request_id=id)
        self._clicks += 1
        action = {**action, "click": f"{self.name}/{self._clicks}"}
        with mock.patch.object(self.guest, "_new_id", self.new_id):
            id = self.guest.act(now, action)
            if chance.random() < 0.2 and self.guest.act(now, action) == id:
                self.world.hit("double_click")
        click = self._clicked.setdefault(id, action["click"])
        self._ids[click] = f"{len(self.user or '')}:{self.user}:{id}"
        return id

    def say_last(self) -> None:
        self._unknown.clear()
        self.click({"actionType": "chat", "text": "good bye"})

    def _say_again(self) -> None:
        """What was sent before, or something else under its name."""
        chance, text = self.world.chance, self.world.chance.choice(self.sent[-6:])
        if chance.random() < 0.5:
            self.world.hit("sent_again")
        else:
            told = json.loads(text)
            if chance.random() < 0.5:
                told["payload"]["amount"] = 77
                self.world.hit("other_payload")
            elif "clientSeq" in told:
                told["requestId"] += "b"
                self.world.hit("number_again")
            text = json.dumps(told)
        if self.line is not None:
            for _ in range(chance.choice([1, 1, 2])):
                self.line.say(text)

    def _be_odd(self) -> None:
        chance, tables = self.world.chance, self.world.tables
        cursors = [key[1] for key in tables.places]
        cursor = chance.choice([*CURSORS, *chance.sample(cursors, min(6, len(cursors)))])
        other = self.world.another(self.table)
        table, token = chance.choice([self.table, other]), f"{self.user or ''}:again"
        joined = table if self.is_odd else other
        text = chance.choice(
            [
                chance.choice(GARBAGE),
                message("JOIN", "odd", tableId=joined, cursor=cursor, token=token),
                message("JOIN", "odd", tableId=joined, cursor=cursor, token=token),
                message("REQUEST_SNAPSHOT", "odd", tableId=table, reason="manual"),
                message("LEAVE", "odd", tableId=table),
                message("PING", None),
            ]
        )
        self.world.hit("odd")
        if self.line is not None:
            self.line.say(text)

    # --- what comes over the line ---------------------------------------------------------------

    def _heard(self, text: str) -> None:
        self.world.loop.note("heard", self.name, text[:300])
        for owner in CARD.findall(text):
            if owner != self.user:
                self.wrong(f"somebody was told {owner}'s card: {text[:80]}")
        told = json.loads(text)
        payload = told["payload"]
        match told["type"]:
            case "ACTION_RESULT":
                self._answered(told["requestId"], payload)
            case "TABLE_SNAPSHOT":
                self._stands(payload)
            case "HEARTBEAT":
                self._ends(payload["heads"])
            case "JOINED":
                self.world.hit("resumed" if payload["resumed"] else "not_resumed")
            case "ERROR":
                self.world.hit(payload["code"])
            case "LEFT" | "PRESENCE" as kind:
                self.world.hit(kind.lower())
            case _:
                pass

    def _stands(self, payload: Any) -> None:
        self.world.hit(f"snapshot_{payload['reason']}")
        if payload["tableId"] == self.table:
            self._snapshots = [*self._snapshots[-2:], payload["position"]]
            self._overlay.may_go()

    def _ends(self, heads: Any) -> None:
        if heads.get(self.table) == self.guest.cursor:
            self._overlay.may_go()

    def _answered(self, id: str, payload: Any) -> None:
        error = payload.get("error", {})
        code = error.get("code", "cached" if payload["cached"] else "done")
        self.world.hit(code)
        if "stateVersion" not in payload or code in OPEN:
            return
        assert self.user is not None
        key = f"{ROOM}{payload['tableId']}", f"{len(self.user)}:{self.user}:{id}"
        told = {"reply": payload["reply"]} if payload["success"] else error
        decided = self.world.tables.decided.get(key, [])
        if not any(_is_same(told, payload["stateVersion"], *each) for each in decided):
            self.wrong(f"somebody was told what was not decided: {id} {told} {decided}")
        else:
            self._check_reply(id, payload)

    def _check_reply(self, id: str, payload: Any) -> None:
        action = payload["action"]
        asked = of({**action, "actionType": action["type"]})
        if not payload["success"]:
            message = payload["error"]["message"]
            if " by " in message and not message.startswith(f"{asked} by {self.user},"):
                self.wrong(f"somebody was told why something else was refused: {id}")
            return
        reply = payload["reply"]
        if reply["by"] != self.user:
            self.wrong(f"somebody was told another one's reply: {id}")
        elif reply["of"] != asked:
            self.wrong(f"somebody was told what came of something else: {id}")
        elif action.get("seen", reply["n"] - 1) != reply["n"] - 1:
            self.wrong(f"something was done to another version than was expected: {id}")

    # --- what the rules hand over ---------------------------------------------------------------

    def _handed(self, news: Any) -> None:
        match news:
            case State(_, confirmed, version):
                self._shown(version, confirmed)
                self._check_shown(news)
            case Event(version, data):
                self._happened(version, data)
            case Result(version, result):
                self._finished(version, result)
            case _:
                pass

    def _shown(self, version: int, confirmed: Any) -> None:
        """R1 and R2: it follows what was shown before, and is what the server has."""
        meant = {node for node in self._nodes(version) if node.view(self.user) == confirmed}
        if not meant:
            self.wrong(f"what is shown of version {version} is nothing that ever was")
        before = self.nodes
        follow = {node for node in meant if node in before or node.parent in before}
        told = {node for node in meant if str(node.position) in self._snapshots}
        self.nodes = follow | told
        if meant and not self.nodes:
            self.wrong(f"{meant} was shown after {before}")
        elif not follow and self._is_back(version, before):
            self.wrong(f"{meant} was shown after {before}, which is still true")

    def _check_shown(self, news: State) -> None:
        if self.stream in self.world.tables.shaken:
            self._overlay.may_go()
        if news.pending:
            self.world.hit("on_top" if ON_TOP in news.state else "pending")
        self._overlay.shown(news, self.nodes)
        # Not of what is replayed: a line may have been cut between an update and its result.
        told = [node.finished for node in self.nodes if str(node.position) in self._snapshots[-1:]]
        is_missed = bool(told) and None not in told and self._results.isdisjoint(told)
        if is_missed and not self.world.boxes:
            self.wrong("a hand is shown as finished, and nobody has told what came of it")

    def _nodes(self, version: int) -> list[Node]:
        found = self.world.tables.by_version(self.stream, version)
        return [node for _, nodes in found for node in nodes]

    def _is_back(self, version: int, before: set[Node]) -> bool:
        return not self.is_shaken and any(version < node.offset for node in before)

    @property
    def is_shaken(self) -> bool:
        """May it be shown again what it was shown before?"""
        return self.is_odd or self.stream in self.world.tables.shaken

    def _happened(self, version: int, data: Any) -> None:
        key = str(version), json.dumps(data)
        if key in self._events and not self.is_shaken:
            self.wrong("an event was handed over twice")
        self._events.add(key)

    def _finished(self, version: int, result: Any) -> None:
        meant = [node for node in self._nodes(version) if node.result(self.user) == result]
        since = {node.finished for node in meant if node.finished is not None}
        if not since:
            self.wrong("somebody was told another result than there was")
        elif since <= self._results and not self.is_shaken:
            self.wrong("a result was handed over twice")
        self._results |= since

    def _settled(self, id: str, answer: Any) -> None:
        match answer:
            case ActionResult():
                self.world.hit("done_and_told")
            case ActionError(code=code):
                self.world.hit(f"told_{code}")
                self._overlay.refused(self._clicked[id])
            case ActionTimeoutError(was_sent=True):
                self.world.hit("unknown_outcome")
                self._overlay.unknown(self._clicked[id])
                if action := self._action_of(id):
                    self._unknown.append((id, action))
            case _:
                self.world.hit("never_sent")
                self._overlay.unknown(self._clicked[id])

    def _action_of(self, id: str) -> Any:
        for text in reversed(self.sent):
            told = json.loads(text)
            if told["requestId"] == id:
                return {name: what for name, what in told["payload"].items() if name != "tableId"}
        return None


def _is_same(told: Any, version: int, decided_at: int, reply: bytes) -> bool:
    return version == decided_at and json.loads(reply) == told
