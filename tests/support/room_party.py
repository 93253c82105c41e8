"""Those who play at a card table, and the servers they play through, to be killed at any time.

    python -m support.room_party       # then a line for each server that is to start:
    serve URL PORT

Some clients are written by hand, as somebody would who has only the
protocol: they take nothing for granted that they were not told. The others are ours. All keep every
frame.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random

from websockets.asyncio.client import connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from semel.cli.app import app
from semel.client.room import ActionError, ActionTimeoutError, Terms, room
from support.card_table import CARD, CardTable
from support.nursery import serve
from support.process import HOST

TABLE = "t1"
SILENCE_S = 2.5
ANSWERED_S = 0.4
PAUSE_S = (0.0, 0.05)
QUICK = Terms(2.0, 0.5, 0.5, 1.0, 1.0, 0.02, 0.1)


# --- a client -----------------------------------------------------------------------------------


def patched(state, patch):
    """By the word of the protocol, and by nobody's code but this."""
    state = copy.deepcopy(state)
    for path, *values in patch:
        if not path:
            state = values[0] if values else None
            continue
        at = state
        for key in path[:-1]:
            at = at[key]
        if not values:
            del at[path[-1]]
        elif isinstance(at, list) and path[-1] == len(at):
            at.append(values[0])
        else:
            at[path[-1]] = values[0]
    return state


class WrongError(AssertionError):
    """A client was told what cannot be."""


class Player:
    """Plays at random, over one connection after the other, until it is told to stop.

    `is_numbered`: its requests have numbers. `spectates`: it may only look; without `sits`, it
    could sit down and does not.
    """

    def __init__(self, user, ports, seed, *, is_numbered=False, spectates=False, sits=True):
        self.user = user
        self.ports = ports
        self.chance = random.Random(f"{seed} {user}")
        self.spectates = spectates
        self.sits = sits
        self.frames = []
        self.state = self.position = None
        self.sent = {}
        """By request id: what was asked."""
        self.answers = {}
        """By request id: all that were final, as (success, version, reply or code)."""
        self.conflicts = 0
        self.resets = []
        self.connects = 0
        self._line = None
        self._is_in = asyncio.Event()
        self._answered = asyncio.Event()
        self._numbers = itertools.count(1) if is_numbered else None
        self._seen = {}  # offset -> position
        self._asks = itertools.count()
        self._wait_s = 0.0
        self.is_over = False

    @property
    def version(self):
        return -1 if self.position is None else int(self.position.split(".")[0])

    # --- its connections ------------------------------------------------------------------------

    async def live(self):
        while not self.is_over:
            url = f"ws://{HOST}:{self.chance.choice(self.ports)}/"
            try:
                async with connect(
                    url, open_timeout=2, close_timeout=0.1, ping_interval=None, compression=None
                ) as line:
                    self.connects += 1
                    await self._listen(line)
            except (OSError, TimeoutError, WebSocketException, InvalidHandshake):
                pass
            finally:
                self._line = None
                self._is_in.clear()
                self._answered.set()
            await asyncio.sleep(self.chance.uniform(0.01, 0.05))

    async def _listen(self, line):
        join = {"tableId": TABLE, "token": self.user, "spectate": self.spectates}
        if self.position is not None:
            join["cursor"] = self.position
        await line.send(json.dumps({"type": "JOIN", "requestId": "join", "payload": join}))
        while not self.is_over:
            async with asyncio.timeout(SILENCE_S):
                frame = await line.recv()
            self.frames.append(frame)
            message = json.loads(frame)
            handle = getattr(self, f"_on_{message['type'].lower()}")
            if handle(message, message["payload"]) is False:
                return
            if self._is_in.is_set():
                self._line = line

    def _on_joined(self, message, payload):
        if payload["resumed"]:
            self._is_in.set()

    def _on_heartbeat(self, message, payload):
        pass

    def _on_presence(self, message, payload):
        pass

    def _on_hand_result(self, message, payload):
        pass

    def _on_error(self, message, payload):
        if not payload.get("retry"):
            raise WrongError(f"{self.user} was told {payload}")
        return payload["code"] == "RATE_LIMITED"  # else, there is no joining here

    def _on_table_snapshot(self, message, payload):
        self._is_in.set()
        offset = int(payload["position"].split(".")[0])
        if payload["reason"] in {"ahead", "forked", "gone"}:
            self.resets.append(payload["reason"])
        elif offset < self.version:
            return  # asked for before that was told
        self._seen = {} if payload["reason"] in {"ahead", "forked", "gone"} else self._seen
        self._stand(payload["position"], payload["state"])

    def _on_table_state_update(self, message, payload):
        if payload["previous"] == self.position:
            self._stand(payload["position"], patched(self.state, payload["patch"]))
        elif self._seen.get(payload["stateVersion"]) != payload["position"]:
            raise WrongError(f"{self.user} is at {self.position}, and was told {payload}")

    def _stand(self, position, state):
        self.position, self.state = position, state
        self._seen[self.version] = position

    def _on_action_result(self, message, payload):
        rid, error = message["requestId"], payload.get("error", {})
        if error.get("retry"):
            self._wait_s = min(payload["error"]["retryAfterMs"] / 1000, 0.2)
        elif error.get("code") == "REQUEST_CONFLICT":
            self.conflicts += 1
        elif payload["action"]["type"] != self.asked(rid):
            raise WrongError(f"{rid} was answered {message}, and is something else")
        else:
            said = error.get("code") if error else payload["reply"]
            version = None if error.get("code") == "FAILED" else payload.get("stateVersion")
            self.answers.setdefault(rid, []).append((payload["success"], version, said))
        self._answered.set()

    # --- what it does ---------------------------------------------------------------------------

    async def play(self, is_over):
        while not is_over.is_set():
            action = self._idea()
            if action is None:
                await asyncio.sleep(0.02)
                continue
            await self.act(action)
            await asyncio.sleep(self.chance.uniform(*PAUSE_S))

    def _idea(self):
        state, chance = self.state, self.chance
        if state is None or self.spectates:
            return None
        if self.user not in state["chips"]:
            kind = "sit" if self.sits else chance.choice(["tip", "bet", None, None, None])
            return None if kind is None else {"actionType": kind}
        if state["left"][:1] == [self.user] and chance.random() < 0.8:
            return {"actionType": chance.choice(["bet", "bet", "fold", "draw"])}
        if not state["left"] and chance.random() < 0.5:
            return {"actionType": "deal"}
        kind = chance.choices(["tip", "fold", "crash", None], [40, 4, 1, 60])[0]
        to = chance.choice(sorted(state["chips"]))
        return None if kind is None else {"actionType": kind, "to": to}

    async def act(self, action):
        """Until it is answered; now and then twice, or with a version, or with another content."""
        message = self._request(action)
        rid = message["requestId"]
        if self.chance.random() < 0.1 and action["actionType"] != "crash":
            message["payload"]["expectedVersion"] = self.version
        self.sent[rid] = message
        await self._said_until_answered(message, twice=self.chance.random() < 0.2)
        if self.answers[rid][-1][0] and self.chance.random() < 0.1:
            await self._conflict(message)

    def _request(self, action):
        rid = f"{self.user}-{len(self.sent)}-{self.chance.randrange(1 << 24):06x}"
        message = {"type": "ACTION_REQUEST", "requestId": rid}
        if self._numbers is not None:
            message |= {"clientId": f"{self.user}-1", "clientSeq": next(self._numbers)}
        return {**message, "payload": {"tableId": TABLE, **action}}

    async def _said_until_answered(self, message, *, twice=False):
        rid = message["requestId"]
        before = len(self.answers.get(rid, ()))
        while len(self.answers.get(rid, ())) == before:
            await self._say(message, twice=twice)

    async def _conflict(self, message):
        other = {**message, "payload": {**message["payload"], "actionType": "another"}}
        before = self.conflicts
        while self.conflicts == before:
            await self._say(other)

    async def _say(self, message, *, twice=False):
        """Once over this connection, and then wait for a word, or for its end."""
        await self._is_in.wait()
        self._answered.clear()
        line = self._line
        if line is None:
            await asyncio.sleep(0.01)
            return
        try:
            for _ in range(1 + twice):
                await line.send(json.dumps(message))
        except WebSocketException:
            await asyncio.sleep(0.01)
            return
        try:
            async with asyncio.timeout(ANSWERED_S * (1 + self.chance.random())):
                await self._answered.wait()
        except TimeoutError:
            line.transport.abort()  # somebody else may be faster
            await asyncio.sleep(0.01)
        if self._wait_s:
            await asyncio.sleep(self._wait_s)
            self._wait_s = 0.0

    async def ask_again(self, count):
        """The same requests, long after; their answers are compared with the rest."""
        kept = sorted(rid for rid, found in self.answers.items() if found[0][2] != "FAILED")
        for rid in self.chance.sample(kept, min(count, len(kept))):
            await self._said_until_answered(self.sent[rid])

    # --- what it was told -----------------------------------------------------------------------

    def asked(self, rid):
        return self.sent[rid]["payload"]["actionType"]

    def strangers_cards(self):
        mine = None if self.spectates else self.user
        return [
            frame for frame in self.frames if any(owner != mine for owner in CARD.findall(frame))
        ]


class Sitter(Player):
    """The same, by our own client."""

    def __init__(self, user, port, seed, *, spectates=False):
        super().__init__(user, [port], seed, spectates=spectates)
        told = {"table_id": TABLE, "token": user, "spectate": spectates, "terms": QUICK}
        self._table = room(f"ws://{HOST}:{port}/", **told)
        self._received = self._table.received
        self._table.received = self._keep

    def _keep(self, line, said):
        self.frames.append(said)
        self._received(line, said)
        self.position, self.state = self._table.cursor, self._table.confirmed

    async def live(self):
        async with self._table as table:
            async for _ in table:
                self.connects += table.status == "connecting"

    async def act(self, action):
        rid = self._request(action)["requestId"]
        self.sent[rid] = action
        await self._said_until_answered(action, rid)

    async def _said_until_answered(self, action, rid):
        while True:
            try:
                result = await self._table.act(action, guard=False, request_id=rid)
                answer = True, result.version, result.reply
            except ActionTimeoutError:
                continue
            except ActionError as error:
                answer = False, None, error.code
            self.answers.setdefault(rid, []).append(answer)
            return

    async def ask_again(self, count):
        kept = sorted(rid for rid, found in self.answers.items() if found[0][2] != "FAILED")
        for rid in self.chance.sample(kept, min(count, len(kept))):
            await self._said_until_answered(self.sent[rid], rid)

    def asked(self, rid):
        return self.sent[rid]["actionType"]


# --- a server -----------------------------------------------------------------------------------

ROOM = CardTable()


def play(asked):
    role, url, port = asked["words"].split()
    assert role == "serve"
    served = ("rooms", "support.room_party:ROOM", "--store", url, "--port", port)
    how = ("--trust", "--heartbeat", "1s", "--replay", "100000", "--quiet", "--drain", "1s")
    app([*served, *how], standalone_mode=False)


if __name__ == "__main__":
    serve(play)
