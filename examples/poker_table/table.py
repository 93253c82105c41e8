"""A table of no-limit hold'em, as a room: what may be done, and what everybody may see of it.

    rooms = Rooms("sqlite:///poker.db", PokerTable(), name="poker")

The state has everything, the deck as well. What leaves here is made by `view`, `result` and the
events, and each of them shows cards in one place only; tests/unit/test_poker_rules.py looks for
every other card in everything that anybody is sent.

Chips are moved, never made: what the seats have, as long as no hand is played, is what was bought
less what was cashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hand import Standing, standing
from play import NOT_YOUR_TURN, Play, RefusalError, Rules

from semel.rooms.room import Accepted, Context, Deadline, Decision, Refused, Room

HIDDEN = "??"

ACTIONS = {
    "sit": Play.sit,
    "buy": Play.buy,
    "leave": Play.leave,
    "away": Play.away,
    "back": Play.back,
    "deal": Play.deal,
    "fold": Play.fold,
    "check": Play.check,
    "call": Play.call,
    "bet": Play.bet,
    "raise": Play.raise_,
}
STREETS = {0: "preflop", 3: "flop", 4: "turn", 5: "river"}


class PokerTable(Room):
    """Up to six players, and whoever likes to watch."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()

    def begin(self, room_id: str) -> dict[str, Any]:
        return {
            "rules": self.rules.told,
            "seats": [None] * self.rules.seats,
            "button": self.rules.seats,
            "number": 0,
            "hand": None,  # the last one, until the next is dealt
            "turn": None,
            "until": None,
            "bought": 0,
            "cashed": 0,
        }

    # --- what is done ---------------------------------------------------------------------------

    def apply(self, state: dict[str, Any], action: Mapping[str, Any], ctx: Context) -> Decision:
        name = action.get("actionType")
        if not isinstance(name, str) or name not in ACTIONS:
            return Refused("INVALID", f"actionType must be one of {', '.join(ACTIONS)}")
        meant = action.get("turn", state["turn"])
        if meant != state["turn"]:
            return Refused(NOT_YOUR_TURN, "the turn that was meant is over")
        play = Play(self.rules, state, ctx)
        try:
            ACTIONS[name](play, action)
        except RefusalError as no:
            return Refused(no.code, str(no))
        return done(play, {"type": name, **amounts(action)})

    def timeout(self, state: dict[str, Any], turn: str, ctx: Context) -> Decision:
        if turn != state["turn"]:
            return Refused("INVALID", "this turn is over")
        play = Play(self.rules, state, ctx)
        if play.is_on:
            play.pass_turn()
        else:
            play.deal_hand()
        return done(play, {"type": "timeout"})

    def deadline(self, state: dict[str, Any]) -> Deadline | None:
        return Deadline(state["turn"], state["until"]) if state["turn"] else None

    # --- what is seen ---------------------------------------------------------------------------

    def members(self, state: dict[str, Any]) -> Iterable[str]:
        return [chair["user"] for chair in state["seats"] if chair]

    def view(self, state: dict[str, Any], viewer: str | None) -> dict[str, Any]:
        hand = state["hand"]
        now = standing(hand) if hand else None
        return {
            **state["rules"],
            "hand": state["number"],
            "phase": phase(now),
            "street": STREETS[len(now.board)] if now else "preflop",
            "button": state["button"],
            "turn": state["turn"],
            "until": milliseconds(state["until"]),
            "actor": hand["players"][now.actor] if now and now.actor is not None else None,
            "can": possible(now),
            "board": list(now.board) if now else [],
            "pots": list(now.pots) if now and not now.is_over else [],
            "seats": [seen(chair, hand, now, viewer) for chair in state["seats"]],
            "cards": own(hand, now, viewer),
        }

    def result(self, state: dict[str, Any], viewer: str | None) -> dict[str, Any] | None:
        hand = state["hand"]
        if hand is None or not (now := standing(hand)).is_over:
            return None
        players = hand["players"]
        return {
            "hand": state["number"],
            "board": list(now.board),
            "pots": [
                {"amount": sum(pot.values()), "won": {players[p]: pot[p] for p in pot}}
                for pot in now.won
            ],
            "shown": {
                players[p]: {"cards": list(cards), "says": now.says[p]}
                for p, cards in now.shown.items()
            },
        }


def done(play: Play, action: dict[str, Any]) -> Accepted:
    play.go_on()
    reply = {"action": action, "turn": play.state["turn"]}
    return Accepted(play.state, reply=reply, events=play.events)


def amounts(action: Mapping[str, Any]) -> dict[str, Any]:
    return {name: action[name] for name in ("seat", "buyIn", "amount") if name in action}


def phase(now: Standing | None) -> str:
    if now is None:
        return "waiting"
    return "over" if now.is_over else "playing"


def possible(now: Standing | None) -> dict[str, Any] | None:
    """What whoever is next may do. Everybody at the table can work it out."""
    if now is None or now.is_over:
        return None
    return {"call": now.to_call, "raise": list(now.raise_to) if now.raise_to else None}


def seen(
    chair: Mapping[str, Any] | None,
    hand: Mapping[str, Any] | None,
    now: Standing | None,
    viewer: str | None,
) -> dict[str, Any] | None:
    """A seat, with the cards that lie in front of it."""
    if chair is None:
        return None
    told = {name: chair[name] for name in ("user", "stack", "away", "leaving")}
    if hand is None or now is None or chair["user"] not in hand["players"]:
        return {**told, "bet": 0, "cards": [], "isIn": False}
    player = hand["players"].index(chair["user"])
    return {
        **told,
        "stack": chair["stack"] if now.is_over else now.stacks[player],
        "bet": now.bets[player],
        "cards": laid(now, player, is_own=chair["user"] == viewer),
        "isIn": now.holding[player],
    }


def laid(now: Standing, player: int, *, is_own: bool) -> list[str]:
    if player in now.shown:
        return list(now.shown[player])
    if not now.holding[player]:
        return []
    return list(now.cards[player]) if is_own else [HIDDEN, HIDDEN]


def own(hand: Mapping[str, Any] | None, now: Standing | None, viewer: str | None) -> list[str]:
    """Also those that were given up: whoever has seen them may look again."""
    if hand is None or now is None or viewer not in hand["players"]:
        return []
    return list(now.cards[hand["players"].index(viewer)])


def milliseconds(at_s: float | None) -> int | None:
    return None if at_s is None else round(at_s * 1000)
