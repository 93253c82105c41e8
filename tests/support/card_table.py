"""A card table: hidden cards, chips that are neither made nor lost, and turns by the clock.

Every card is a text that names whose it is, so that whoever reads what a client was sent can tell
whether it was meant for it.
"""

from __future__ import annotations

import json
import re

from semel.rooms import ALL, Accepted, Deadline, Refused, Room

TOTAL = 10_000
STAKE = 100
TURN_S = 0.35
PLAYING = 3  # in one hand

CARD = re.compile(r"card-of-([a-z]+)-")


class CardTable(Room):
    """Everybody may sit down, deal, and hand over a chip; the rest is done in turn, in time."""

    def __init__(self, turn_s=TURN_S):
        self.turn_s = turn_s

    def begin(self, room_id):
        counters = {"bank": TOTAL, "pot": 0, "hand": 0}
        return {**counters, "chips": {}, "cards": {}, "left": [], "until": 0, "last": None}

    def apply(self, state, action, ctx):
        kind, user = action["actionType"], ctx.user
        if kind == "sit":
            return self._sit(state, user)
        if user not in state["chips"]:
            return Refused("NO_SEAT", "sit down first")
        if kind == "crash":
            raise RuntimeError(json.dumps(state))
        if kind == "deal":
            return self._deal(state, ctx)
        if kind == "tip":
            return self._tip(state, user, action["to"])
        if kind not in {"bet", "fold", "draw"}:
            return Refused("INVALID", kind)
        if state["left"][:1] != [user]:
            return Refused("NOT_YOUR_TURN", "wait")
        return self._turn(state, kind, user, ctx)

    def _sit(self, state, user):
        if user in state["chips"]:
            return Refused("SEATED", "once is enough")
        state["bank"] -= STAKE
        state["chips"][user] = STAKE
        return Accepted(state, reply={"chips": STAKE}, events=[(ALL, {"sits": user})])

    def _tip(self, state, user, to):
        if state["chips"][user] < 1 or to not in state["chips"]:
            return Refused("NO_CHIPS", "")
        state["chips"][user] -= 1
        state["chips"][to] += 1
        return Accepted(state, reply={"left": state["chips"][user]})

    def _deal(self, state, ctx):
        if state["left"]:
            return Refused("PLAYING", "")
        chance = ctx.random
        users = sorted(state["chips"])
        left = chance.sample(users, min(PLAYING, len(users)))
        cards = {user: [card(user, chance) for _ in range(2)] for user in left}
        state |= {"hand": state["hand"] + 1, "left": left, "cards": cards, "last": None}
        told = [([user], {"dealt": cards[user]}) for user in left]
        return Accepted(self._clocked(state, ctx), events=[(ALL, {"hand": state["hand"]}), *told])

    def _turn(self, state, kind, user, ctx):
        reply, chance = {"turn": turn_of(state)}, ctx.random
        if kind == "fold":
            state["cards"].pop(user, None)
        elif kind == "draw":
            reply["card"] = card(user, chance)
            state["cards"][user].append(reply["card"])
        elif state["chips"][user]:
            state["chips"][user] -= 1
            state["pot"] += 1
        return Accepted(self._next(state, ctx), reply=reply)

    def _next(self, state, ctx):
        state["left"] = state["left"][1:]
        if state["left"]:
            return self._clocked(state, ctx)
        winner = ctx.random.choice(sorted(state["cards"]) or sorted(state["chips"]))
        state["chips"][winner] += state["pot"]
        state |= {"last": {"winner": winner, "won": state["pot"]}, "pot": 0}
        return state

    def _clocked(self, state, ctx):
        return {**state, "until": ctx.now_s + self.turn_s}

    def deadline(self, state):
        return Deadline(turn_of(state), state["until"]) if state["left"] else None

    def timeout(self, state, turn, ctx):
        state["cards"].pop(state["left"][0], None)
        return Accepted(self._next(state, ctx), events=[(ALL, {"late": turn})])

    def members(self, state):
        return list(state["chips"])

    def view(self, state, viewer):
        shown = {name: what for name, what in state.items() if name != "cards"}
        shown["held"] = {user: len(cards) for user, cards in state["cards"].items()}
        shown["cards"] = state["cards"].get(viewer, [])
        return shown

    def result(self, state, viewer):
        if state["last"] is None:
            return None
        return {**state["last"], "hand": state["hand"], "yours": state["cards"].get(viewer)}


def card(user, chance):
    return f"card-of-{user}-{chance.randrange(1 << 32):08x}"


def turn_of(state):
    return f"{state['hand']}-{len(state['left'])}"


def chips_in(view):
    return view["bank"] + view["pot"] + sum(view["chips"].values())
