"""The rules of the simulated rooms: a small game with chips, turns, clocks and hidden cards.

Players put chips into a pot, one after another; the highest card has it. Everything in a state can
be checked from outside: it counts its changes, the chips are always the same, and a hidden card
says whose it is, so that whoever is shown another one's is found out by a look at the text.

The rules do not look at which turn it is that has timed out: that the right one has is promised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from semel.rooms import ALL, Accepted, Context, Deadline, Decision, Event, Refused, Room

TURN_S = 3.0
BETWEEN_S = 2.0
CHIPS = 1000

# Of turns in a row that nobody has played: then the table waits for somebody to deal.
PATIENCE = 3

# The result of one hand in so many stays while the next one is played.
STAYS = 3

MOST_BYTES = 4000


class CardTable(Room):
    """The state is `n` changes old. `order` are those who are still in the hand.

    `over` is what came of the last hand, until the next one is dealt, or at times is over, too.
    """

    def begin(self, room_id: str) -> Any:
        return {
            "n": 0, "bank": CHIPS, "seats": {}, "pot": 0, "hand": 0, "turn": 0, "phase": "open",
            "order": [], "next": 0, "cards": {}, "until": None, "idle": 0, "did": {}, "said": "",
            "over": None,
        }  # fmt: skip

    def apply(self, state: Any, action: Mapping[str, Any], ctx: Context) -> Decision:
        assert ctx.user is not None
        state["did"][ctx.user] = state["did"].get(ctx.user, 0) + 1
        try:
            events = self._verb(action["actionType"])(state, action, ctx)
        except _NoError as no:
            own = state["cards"].get(ctx.user)
            return Refused(no.code, f"{of(action)} by {ctx.user}, who has {own}")
        state["n"] += 1
        told = {"n": state["n"], "of": of(action), "by": ctx.user, "click": action.get("click")}
        return Accepted(state, {**told, "card": state["cards"].get(ctx.user)}, events)

    def _verb(self, kind: str) -> Callable[..., list[Event]]:
        known = {
            "sit": self._sit, "stand": self._stand, "deal": self._deal, "bet": self._bet,
            "fold": self._fold, "chat": self._chat, "boom": _boom, "odd": _odd,
        }  # fmt: skip
        return known.get(kind, _unknown)

    # --- what players do ------------------------------------------------------------------------

    def _sit(self, state: Any, action: Any, ctx: Context) -> list[Event]:
        _must(ctx.user not in state["seats"], "SEATED")
        state["seats"][ctx.user] = 100
        state["bank"] -= 100
        return []

    def _stand(self, state: Any, action: Any, ctx: Context) -> list[Event]:
        _must(ctx.user in state["seats"] and ctx.user not in state["order"], "NOT_NOW")
        state["bank"] += state["seats"].pop(ctx.user)
        state["cards"].pop(ctx.user, None)
        return []

    def _deal(self, state: Any, action: Any, ctx: Context) -> list[Event]:
        _must(state["phase"] != "playing" and ctx.user in state["seats"], "NOT_NOW")
        state["idle"] = 0
        return self._dealt(state, ctx)

    def _bet(self, state: Any, action: Any, ctx: Context) -> list[Event]:
        _must_be_on_turn(state, ctx)
        amount = action.get("amount")
        _must(isinstance(amount, int) and 0 <= amount <= state["seats"][ctx.user], "INVALID")
        state["seats"][ctx.user] -= amount
        state["pot"] += amount
        state["idle"] = 0
        state["next"] += 1
        return self._go_on(state, ctx)

    def _fold(self, state: Any, action: Any, ctx: Context) -> list[Event]:
        _must_be_on_turn(state, ctx)
        state["idle"] = 0
        state["order"].remove(ctx.user)
        return self._go_on(state, ctx)

    def _chat(self, state: Any, action: Any, ctx: Context) -> list[Event]:
        state["said"] = action.get("text", "")
        return [(ALL, {"chat": state["n"] + 1})]

    # --- hands ----------------------------------------------------------------------------------

    def _dealt(self, state: Any, ctx: Context) -> list[Event]:
        players = [user for user, chips in state["seats"].items() if chips]
        _must(len(players) > 1, "ALONE")
        chance = ctx.random
        state["hand"] += 1
        state.update(phase="playing", order=players, next=0)
        hand = state["hand"]
        if hand % STAYS != 0:
            state["over"] = None
        cards = {user: f"card/{user}/{hand}/{chance.randrange(10_000)}" for user in players}
        state["cards"] = cards
        for user in players:
            state["seats"][user] -= 1
            state["pot"] += 1
        self._clock(state, ctx, TURN_S)
        return [([user], {"dealt": card}) for user, card in cards.items()]

    def _go_on(self, state: Any, ctx: Context) -> list[Event]:
        order = state["order"]
        if len(order) > 1 and state["next"] < len(order):
            self._clock(state, ctx, TURN_S)
            return [(ALL, {"turn": state["turn"]})]
        winner = max(order, key=lambda user: rank(state["cards"][user]))
        state["seats"][winner] += state["pot"]
        cards = dict(state["cards"])
        ranks = {user: rank(card) for user, card in cards.items()}
        over = {"hand": state["hand"], "won": winner, "ranks": ranks, "cards": cards}
        state.update(pot=0, phase="done", order=[], next=0, over=over)
        self._clock(state, ctx, BETWEEN_S)
        if state["idle"] >= PATIENCE:
            state["until"] = None
        return [(ALL, {"won": winner})]

    def _clock(self, state: Any, ctx: Context, turn_s: float) -> None:
        state["turn"] += 1
        state["until"] = ctx.now_s + turn_s

    def deadline(self, state: Any) -> Deadline | None:
        until = state["until"]
        return None if until is None else Deadline(f"{state['hand']}.{state['turn']}", until)

    def timeout(self, state: Any, turn: str, ctx: Context) -> Decision:
        state["n"] += 1
        state["idle"] += 1
        if state["phase"] != "playing":
            try:
                return Accepted(state, None, self._dealt(state, ctx))
            except _NoError:
                state["until"] = None
                return Accepted(state)
        del state["order"][state["next"]]
        return Accepted(state, None, self._go_on(state, ctx))

    # --- who sees what --------------------------------------------------------------------------

    def members(self, state: Any) -> list[str]:
        return list(state["seats"])

    def view(self, state: Any, viewer: str | None) -> Any:
        over = state["over"]
        shown = {**state, "cards": _own(state["cards"], viewer), "held": len(state["cards"])}
        return {**shown, "over": over and {**over, "cards": _own(over["cards"], viewer)}}

    def result(self, state: Any, viewer: str | None) -> Any:
        over = state["over"]
        if over is None:
            return None
        told = {name: over[name] for name in ("hand", "won", "ranks")}
        return {**told, "own": over["cards"].get(viewer)}


class _NoError(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


def _must(holds: bool, code: str) -> None:
    if not holds:
        raise _NoError(code)


def _must_be_on_turn(state: Any, ctx: Context) -> None:
    order = state["order"]
    _must(bool(order) and order[state["next"]] == ctx.user, "NOT_YOUR_TURN")


def _boom(state: Any, action: Any, ctx: Context) -> list[Event]:
    raise ZeroDivisionError("these rules have a defect")


def _odd(state: Any, action: Any, ctx: Context) -> list[Event]:
    state["odd"] = {1, 2, 3}  # which JSON cannot say
    return []


def _unknown(state: Any, action: Any, ctx: Context) -> list[Event]:
    raise _NoError("INVALID")


def of(action: Mapping[str, Any]) -> str:
    """What an action is, in short; its text may be long."""
    told = {name: action[name] for name in ("actionType", "amount", "seen") if name in action}
    return json.dumps(told, sort_keys=True)


def _own(cards: Mapping[str, str], viewer: str | None) -> dict[str, str]:
    return {user: card for user, card in cards.items() if user == viewer}


def rank(card: str) -> int:
    return int(card.rpartition("/")[2])


def chips(state: Any) -> int:
    return int(state["bank"] + state["pot"] + sum(state["seats"].values()))
