"""A card room, a store that counts and fails on command, and clients that are spoken to by hand.

In the room everybody who sits has a card that nobody else ever sees, but the one that wins; they
are played in turn. No chip is made or lost: those of the seats and of the pot are 100 a seat.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections import Counter

from semel.errors import StoreUnavailableError
from semel.http.ws import RoomDoor, Spectator
from semel.rooms import ALL, Accepted, Deadline, Refused, Room, Rooms
from semel.rooms.patches import patched
from semel.rooms.standing import Standing
from semel.stores import MemoryStore
from semel.testing.simulator import SimClock, SimLoop
from support.web import scope_of

ROOM = "t1"
STREAM = f"table:room:{ROOM}"
NOTES = "table:timers"


# --- the room -----------------------------------------------------------------------------------


class Cards(Room):
    """`turn_s`: so long a turn may take. The methods named in `fails` raise.

    `gives` is what comes of the action `give`: a function of state and context.
    """

    def __init__(self, turn_s=None):
        self.turn_s = turn_s
        self.fails = set()
        self.gives = None

    def _asked(self, method):
        if method in self.fails:
            raise ZeroDivisionError(f"{method} has failed")

    def begin(self, room_id):
        self._asked("begin")
        return {"seats": {}, "turn": None, "number": 0, "ends_s": None, "pot": 0, "won": None}

    def apply(self, state, action, ctx):
        self._asked("apply")
        seats, user = state["seats"], ctx.user
        match action["actionType"]:
            case "sit":
                seats[user] = {"card": None, "chips": 100}
                return Accepted(state, {"seat": len(seats)}, [(ALL, {"sat": user})])
            case "leave":
                del seats[user]
                return Accepted(state)
            case "deal":
                for seat in seats.values():
                    seat["card"] = None
                chance = ctx.random
                for seat in seats.values():
                    seat["card"] = chance.randbytes(8).hex()
                state |= {"number": state["number"] + 1, "won": None}
                self._turn(state, next(iter(seats)), ctx)
                own = [([name], {"yours": seat["card"]}) for name, seat in seats.items()]
                return Accepted(state, None, own)
            case "play":
                return self._play(state, action.get("amount", 1), ctx)
            case "rest":
                state |= {"turn": None, "ends_s": None, "won": None}
                return Accepted(state)
            case "say":
                return Accepted(state, action.get("text"), [(ALL, {"said": action.get("text")})])
            case "give":
                return self.gives(state, ctx)
            case other:
                return Refused("INVALID", f"nobody can {other}")

    def _play(self, state, amount, ctx):
        if state["turn"] != ctx.user:
            return Refused("NOT_YOUR_TURN", f"it is the turn of {state['turn']}")
        seat = state["seats"][ctx.user]
        if seat["chips"] < amount:
            return Refused("POOR", "so much you do not have")
        seat["chips"] -= amount
        state["pot"] += amount
        self._next(state, ctx)
        return Accepted(state, {"pot": state["pot"]})

    def _turn(self, state, user, ctx):
        ends_s = None if self.turn_s is None else ctx.now_s + self.turn_s
        state |= {"turn": user, "ends_s": ends_s, "turns": state.get("turns", 0) + 1}

    def _next(self, state, ctx):
        names = list(state["seats"])
        at = names.index(state["turn"]) + 1
        if at < len(names):
            self._turn(state, names[at], ctx)
            return
        best = max(state["seats"], key=lambda name: state["seats"][name]["card"])
        state["seats"][best]["chips"] += state["pot"]
        won = {"by": best, "card": state["seats"][best]["card"], "pot": state["pot"]}
        state |= {"turn": None, "ends_s": None, "pot": 0, "won": won}

    def view(self, state, viewer):
        self._asked("view")
        seats = {name: {"chips": seat["chips"]} for name, seat in state["seats"].items()}
        if viewer is not None:
            seats[viewer]["card"] = state["seats"][viewer]["card"]
        return {**state, "seats": seats}

    def members(self, state):
        self._asked("members")
        return state["seats"]

    def deadline(self, state):
        self._asked("deadline")
        if state["ends_s"] is None:
            return None
        return Deadline(f"turn-{state['turns']}", state["ends_s"])

    def timeout(self, state, turn, ctx):
        self._asked("timeout")
        state["passed"] = [*state.get("passed", []), turn]
        self._next(state, ctx)
        return Accepted(state, None, [(ALL, {"passed": turn})])

    def result(self, state, viewer):
        self._asked("result")
        if state["won"] is None:
            return None
        mine = None if viewer is None else state["seats"][viewer]["card"]
        return {**state["won"], "mine": mine}


def chips_of(state):
    return state["pot"] + sum(seat["chips"] for seat in state["seats"].values())


# --- the store ----------------------------------------------------------------------------------


class WiredStore:
    """A store behind a line that counts what is asked, is slow, is cut, and loses answers.

    `held`: these verbs on these streams wait until `let_go`, or else their answers do.
    """

    def __init__(self, inner, clock=None):
        self.inner = inner
        self.clock = clock
        self.asked = Counter()
        self.is_down = False
        self.error = StoreUnavailableError
        self.delay_s = 0.0
        self.late_s = 0.0
        self.deaf_s = 0.0
        self.lose_reply = Counter()
        self.lose_request = Counter()
        self.held = {}

    def wall(self):
        return self.clock.now_us() / 1e6

    def hold(self, stream=STREAM, *verbs, answers=False):
        """Those, or else appends; with `answers`, they are late, and not the questions."""
        self.held[stream] = asyncio.Event(), verbs or ("append",), answers

    def let_go(self, stream=STREAM):
        self.held.pop(stream)[0].set()

    def log(self, colour):
        return _WiredLog(self, self.inner.log(colour))

    def bell(self):
        return _WiredBell(self, self.inner.bell())

    def ledger(self, colour):
        return self.inner.ledger(colour)

    def close(self):
        self.inner.close()

    async def aclose(self):
        await self.inner.aclose()

    def count(self, stream=STREAM):
        """How often each verb was asked since the last time."""
        counted = {verb: n for (verb, name), n in self.asked.items() if name == stream}
        for verb in counted:
            del self.asked[verb, stream]
        return counted


class _WiredLog:
    def __init__(self, store, inner):
        self._store = store
        self._inner = inner

    def __getattr__(self, verb):
        async def asked(stream, *words, **more):
            store = self._store
            name = stream if isinstance(stream, str) else None
            store.asked[verb, name] += 1
            await asyncio.sleep(store.delay_s)
            event, verbs, is_late = store.held.get(name, (None, (), False))
            if verb in verbs and not is_late:
                await event.wait()
            self._cut(verb, name, store.lose_request)
            answer = await getattr(self._inner, verb)(stream, *words, **more)
            if verb in verbs and is_late:
                await event.wait()
            if store.late_s:
                await asyncio.sleep(store.late_s)
            self._cut(verb, name, store.lose_reply)
            return answer

        return asked

    def _cut(self, verb, name, lost):
        if self._store.is_down or lost[verb, name] > 0:
            lost[verb, name] -= 1
            raise self._store.error("the line is cut")


class _WiredBell:
    """To begin to listen is a round trip, as on a server."""

    def __init__(self, store, inner):
        self._store = store
        self._inner = inner

    def __getattr__(self, verb):
        return getattr(self._inner, verb)

    async def listen(self, *words):
        if self._store.deaf_s:
            await asyncio.sleep(self._store.deaf_s)
        await self._inner.listen(*words)


def simulated(*seeds, budget=2_000_000):
    """Run a test in simulated time, once for each seed; it is given a store."""

    def decorate(test):
        @functools.wraps(test)
        def run(**fixtures):
            for seed in seeds or (1, 2):
                loop = SimLoop(seed, budget=budget)
                clock = SimClock(loop)
                loop.run(test(WiredStore(MemoryStore(clock=clock), clock), **fixtures))

        # pytest would look for a fixture called store
        wanted = inspect.signature(test)
        others = [each for name, each in wanted.parameters.items() if name != "store"]
        run.__signature__ = wanted.replace(parameters=others)
        return run

    return decorate


def rooms_on(store, room=None, **more):
    """On the same time as the store, unless told otherwise."""
    return Rooms(store, room or Cards(), **{"wall": store.wall, **more})


async def acted(rooms, user, name, id=None, room=ROOM, **more):
    """The reply to an action; without an id, to one of its own."""
    how = {key: more.pop(key) for key in tuple(more) if key in HOW}
    id = id or f"{name}-{next(_NUMBERS)}"
    return await rooms.act(room, user, id, {"actionType": name, **more}, **how)


HOW = ("expected_version", "client_id", "client_seq")
_NUMBERS = iter(range(1, 10**9))


async def dealt(rooms, *users, room=ROOM):
    """These sit, and have a card each; the first is to play."""
    for user in users:
        assert (await acted(rooms, user, "sit", room=room)).success
    reply = await acted(rooms, users[0], "deal", room=room)
    assert reply.success
    return reply


async def state_of(rooms, room=ROOM):
    """As the log has it now; a standing may be one that somebody else has asked for before."""
    snapshot = await rooms.log.load(rooms.stream_of(room))
    return Standing.of(rooms.room, room, snapshot).state()


# --- clients ------------------------------------------------------------------------------------


def by_token(visitor, room_id):
    """Whoever says a name is that user."""
    return visitor.token or Spectator()


def door_to(rooms, **more):
    return RoomDoor(rooms, **{"authorise": by_token, "presence": False, **more})


class Client:
    """One connection to a door. Keeps every message as it came, and what they make of the room."""

    def __init__(self, door, *, user=None, room=ROOM, headers=(), extensions=()):
        self.user, self.room = user, room
        self.texts = []
        self.accepted = False
        self.code = self.refused = None
        self.stuck = False
        self._moved = asyncio.Event()
        self._said = asyncio.Queue()
        self._said.put_nowait({"type": "websocket.connect"})
        scope = scope_of("/rooms", headers=headers)
        scope |= {"type": "websocket", "extensions": {name: {} for name in extensions}}
        self.task = asyncio.ensure_future(door(scope, self._said.get, self._send))

    async def _send(self, message):
        while self.stuck:
            self._moved.clear()
            await self._moved.wait()
        await asyncio.sleep(0)
        match message["type"]:
            case "websocket.accept":
                self.accepted = True
            case "websocket.send":
                assert self.accepted
                assert self.code is None, "something behind the end"
                message["text"].encode()  # as a server does
                self.texts.append(message["text"])
            case "websocket.close":
                self.code = message["code"]
            case "websocket.http.response.start":
                self.refused = message["status"]

    def stick(self, stuck=True):
        self.stuck = stuck
        self._moved.set()

    # --- saying -------------------------------------------------------------------------------

    def raw(self, text):
        self._said.put_nowait({"type": "websocket.receive", "text": text})

    def say(self, kind, id=None, room=None, **payload):
        outside = {key: payload.pop(key) for key in ("clientId", "clientSeq") if key in payload}
        message = {"type": kind, **outside, "payload": {"tableId": room or self.room, **payload}}
        self.raw(json.dumps(message if id is None else {**message, "requestId": id}))

    async def join(self, room=None, *, wait="TABLE_SNAPSHOT", **more):
        """The answer to it; when there is one, also what follows it at once."""
        number = len(self.texts)
        token = {} if self.user is None else {"token": self.user}
        self.say("JOIN", f"join-{number}", room, **{**token, **more})
        answer = await self.answer(f"join-{number}")
        if answer["type"] == "JOINED" and not answer["payload"]["resumed"]:
            await self.until(lambda c: any(m["type"] == wait for m in c.messages[number:]))
        return answer

    async def act(self, name, id=None, **more):
        """The payload of its answer."""
        id = id or f"{name}-{next(_NUMBERS)}"
        number = len(self.texts)
        self.say("ACTION_REQUEST", id, actionType=name, **more)
        return (await self.answer(id, number))["payload"]

    async def answer(self, id, begin=0):
        await self.until(lambda c: c.answers(id, begin))
        return self.answers(id, begin)[0]

    def answers(self, id, begin=0):
        return [
            message
            for message in self.messages[begin:]
            if message.get("requestId") == id and message["type"] != "TABLE_STATE_UPDATE"
        ]

    def updates_by(self, id):
        """The updates that say that this request has made them."""
        return [
            message
            for message in self.messages
            if message.get("requestId") == id and message["type"] == "TABLE_STATE_UPDATE"
        ]

    async def hang_up(self):
        self._said.put_nowait({"type": "websocket.disconnect", "code": 1001})
        async with asyncio.timeout(60):
            await self.task

    # --- hearing ------------------------------------------------------------------------------

    @property
    def messages(self):
        return [json.loads(text) for text in self.texts]

    def all(self, kind, room=None):
        """The payloads of one kind of message, of one room."""
        found = [m["payload"] for m in self.messages if m["type"] == kind]
        return [each for each in found if each.get("tableId", room) == (room or self.room)]

    @property
    def kinds(self):
        return [message["type"] for message in self.messages]

    @property
    def replica(self):
        """What its messages make of the room: position and view. Checks that they fit."""
        position = view = None
        for message in self.messages:
            payload = message["payload"]
            if payload.get("tableId") != self.room:
                continue
            if message["type"] == "TABLE_SNAPSHOT":
                position, view = payload["position"], payload["state"]
            elif message["type"] == "TABLE_STATE_UPDATE":
                assert payload["previous"] == position, "a hole, or something twice"
                assert payload["stateVersion"] == payload["previousVersion"] + 1
                position, view = payload["position"], patched(view, payload["patch"])
        return position, view

    @property
    def cursor(self):
        return self.replica[0]

    @property
    def view(self):
        return self.replica[1]

    async def until(self, condition, within_s=60):
        async with asyncio.timeout(within_s):
            while not condition(self):
                if self.task.done():
                    self.task.result()
                    assert condition(self), f"it has ended with {self.code}: {self.texts}"
                await asyncio.sleep(0.01)
        return self

    async def at(self, version):
        return await self.until(lambda c: c.cursor and int(c.cursor.partition(".")[0]) == version)

    async def ended(self):
        """The code it was closed with; None when it was cut."""
        async with asyncio.timeout(7200):
            await self.task
        return self.code


class Unhurried(Client):
    """Takes a message in `each_s`, and all of them in the end."""

    each_s = 1.0

    async def _send(self, message):
        await asyncio.sleep(self.each_s)
        await super()._send(message)


async def seated(door, *users, room=ROOM):
    """A client of each of these, in the room; None only looks."""
    clients = [Client(door, user=user, room=room) for user in users]
    for client in clients:
        assert (await client.join())["type"] == "JOINED"
    return clients


async def closed(*doors):
    await asyncio.gather(*(door.aclose() for door in doors))
