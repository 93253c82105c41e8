"""What people do at a table, one action at a time, on a copy of its state.

A hand that is being played belongs to its players until it is over. So whoever leaves, or does not
answer, is played for (nothing that costs), and is paid out behind the last card.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hand import CALL, FOLD, Standing, new_hand, standing

from semel.rooms.room import ALL, Context, Event

NOT_YOUR_TURN = "NOT_YOUR_TURN"

FEWEST = 2


@dataclass(frozen=True)
class Rules:
    """What is agreed before anybody sits down."""

    seats: int = 6
    blinds: tuple[int, int] = (10, 20)
    buy_in: tuple[int, int] = (400, 4_000)
    turn_s: float = 30.0
    # Long enough to see who has won, and with what.
    show_s: float = 8.0
    # So often somebody may let a turn pass before the next hands are dealt without them.
    patience: int = 2

    @property
    def told(self) -> dict[str, Any]:
        """What everybody sees of them. It is in the state: a view depends on nothing else."""
        return {
            "blinds": list(self.blinds),
            "buyIn": list(self.buy_in),
            "turnMs": round(self.turn_s * 1000),
        }


class RefusalError(Exception):
    """It is not done, and this is why."""

    def __init__(self, message: str, code: str = "INVALID") -> None:
        super().__init__(message)
        self.code = code


class Play:
    """A state that is being changed, and what is told of that."""

    def __init__(self, rules: Rules, state: dict[str, Any], ctx: Context) -> None:
        self.rules = rules
        self.state = {**deepcopy(state), "rules": rules.told}
        self.ctx = ctx
        self.events: list[Event] = []

    # --- by name: what somebody asks for --------------------------------------------------------

    def sit(self, action: Mapping[str, Any]) -> None:
        user, seats = self._user, self.state["seats"]
        if (held := self._seat_of(user)) is not None:
            raise RefusalError(f"you have seat {held}")
        seat = whole(action, "seat")
        if not 0 <= seat < len(seats) or seats[seat] is not None:
            free = [str(number) for number, each in enumerate(seats) if each is None]
            raise RefusalError(f"seat {seat} is not free; free: {', '.join(free) or 'none'}")
        chips = self._bought(action, "buyIn", 0)
        seats[seat] = {"user": user, "stack": chips, "late": 0, "away": False, "leaving": False}
        self._tell("sat", user, seat=seat, amount=chips)

    def buy(self, action: Mapping[str, Any]) -> None:
        chair = self._chair
        if self._is_playing(self._user):
            raise RefusalError("chips are bought between two hands")
        chips = self._bought(action, "amount", chair["stack"])
        chair["stack"] += chips
        self._tell("bought", self._user, amount=chips)

    def leave(self, action: Mapping[str, Any]) -> None:
        chair = self._chair
        chair["leaving"] = True
        if self._is_playing(self._user):
            self._tell("leaving", self._user)
        else:
            self._pay_out(self._user)

    def away(self, action: Mapping[str, Any]) -> None:
        if self._chair["away"]:
            raise RefusalError("you are away")
        self._be_away(self._chair)

    def back(self, action: Mapping[str, Any]) -> None:
        if not (self._chair["away"] or self._chair["leaving"]):
            raise RefusalError("you are here")
        self._chair.update(away=False, leaving=False, late=0)
        self._tell("back", self._user)

    def deal(self, action: Mapping[str, Any]) -> None:
        self._check_seated()
        if self.is_on:
            raise RefusalError("a hand is being played")
        if len(self._ready) < FEWEST:
            raise RefusalError("at least two must have chips, and be there")
        self.deal_hand()

    def fold(self, action: Mapping[str, Any]) -> None:
        if not self._mine().to_call:
            raise RefusalError("there is nothing to call: check, it costs nothing")
        self._act(FOLD)

    def check(self, action: Mapping[str, Any]) -> None:
        if to_call := self._mine().to_call:
            raise RefusalError(f"there are {to_call} to call: call, raise or fold")
        self._act(CALL)

    def call(self, action: Mapping[str, Any]) -> None:
        if not self._mine().to_call:
            raise RefusalError("there is nothing to call: check or bet")
        self._act(CALL)

    def bet(self, action: Mapping[str, Any]) -> None:
        if highest := max(self._mine().bets):
            raise RefusalError(f"there is a bet of {highest}: raise, call or fold")
        self._raise_to(whole(action, "amount"))

    def raise_(self, action: Mapping[str, Any]) -> None:
        if not max(self._mine().bets):
            raise RefusalError("there is no bet to raise: bet or check")
        self._raise_to(whole(action, "amount"))

    def _raise_to(self, amount: int) -> None:
        match self._mine().raise_to:
            case None:
                raise RefusalError("nobody could answer a raise: call or fold")
            case least, most if not least <= amount <= most:
                raise RefusalError(f"{amount} is not possible: {least} to {most} in all")
        self._act(amount)

    # --- what nobody asks for -------------------------------------------------------------------

    def pass_turn(self) -> None:
        """Of somebody who did not answer in time."""
        now = standing(self.state["hand"])
        assert now.actor is not None
        user = self.state["hand"]["players"][now.actor]
        chair = self._chair_of(user)
        chair["late"] += 1
        self._tell("late", user)
        if chair["late"] >= self.rules.patience:
            self._be_away(chair)
        else:
            self._put(now.in_passing)

    def deal_hand(self) -> None:
        state, ready = self.state, self._ready
        state["button"] = button = following(ready, state["button"])
        order = [following(ready, seat) for seat in rotated(ready, button)]
        chairs = [state["seats"][seat] for seat in order]
        players = [chair["user"] for chair in chairs]
        stacks = [chair["stack"] for chair in chairs]
        state["number"] += 1
        state["hand"] = new_hand(players, stacks, self.rules.blinds, self.ctx.random)
        self._tell("dealt", players[-1], hand=state["number"], players=players)
        for user, cards in zip(players, standing(state["hand"]).cards, strict=True):
            self.events.append(([user], {"event": "cards", "cards": list(cards)}))
        self._report(0)

    def go_on(self) -> None:
        """Play for those who are not there, and start the clock of whoever is next."""
        while self.is_on and self._absent(now := standing(self.state["hand"])):
            self._put(now.in_passing)
        state, ctx = self.state, self.ctx
        if self.is_on:
            turn, within_s = f"h{state['number']}-a{len(state['hand']['acts'])}", self.rules.turn_s
        elif len(self._ready) < FEWEST:
            turn, within_s = None, 0.0
        elif str(state["turn"]).startswith("deal-"):
            return  # it is waited for already
        else:
            # By the version, which no other turn has: somebody may go, and come again.
            turn, within_s = f"deal-{ctx.version}", self.rules.show_s
        if turn != state["turn"]:
            state["turn"], state["until"] = turn, ctx.now_s + within_s if turn else None

    # --- parts ----------------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        hand = self.state["hand"]
        return hand is not None and not standing(hand).is_over

    @property
    def _user(self) -> str:
        if self.ctx.user is None:
            raise RefusalError("nobody is known to have asked")
        return self.ctx.user

    @property
    def _chair(self) -> dict[str, Any]:
        self._check_seated()
        return self._chair_of(self._user)

    def _check_seated(self) -> None:
        if self._seat_of(self._user) is None:
            raise RefusalError("take a seat first")

    def _chair_of(self, user: str) -> dict[str, Any]:
        seat = self._seat_of(user)
        assert seat is not None
        chair: dict[str, Any] = self.state["seats"][seat]
        return chair

    def _seat_of(self, user: str) -> int | None:
        for seat, chair in enumerate(self.state["seats"]):
            if chair is not None and chair["user"] == user:
                return seat
        return None

    @property
    def _ready(self) -> list[int]:
        """The seats of those who are dealt in next."""
        return [
            seat
            for seat, chair in enumerate(self.state["seats"])
            if chair and chair["stack"] and not chair["away"] and not chair["leaving"]
        ]

    def _is_playing(self, user: str) -> bool:
        return self.is_on and user in self.state["hand"]["players"]

    def _absent(self, now: Standing) -> bool:
        assert now.actor is not None
        chair = self._chair_of(self.state["hand"]["players"][now.actor])
        return bool(chair["away"] or chair["leaving"])

    def _mine(self) -> Standing:
        """How the hand stands, if it waits for this user."""
        self._check_seated()
        if not self.is_on:
            raise RefusalError("no hand is being played", NOT_YOUR_TURN)
        now = standing(self.state["hand"])
        assert now.actor is not None
        if (actor := self.state["hand"]["players"][now.actor]) != self._user:
            raise RefusalError(f"it is the turn of {actor}", NOT_YOUR_TURN)
        return now

    def _act(self, act: int) -> None:
        self._chair["late"] = 0
        self._put(act)

    def _put(self, act: int) -> None:
        hand = self.state["hand"]
        told = len(standing(hand).happened)
        hand["acts"].append(act)
        self._report(told)

    def _report(self, told: int) -> None:
        """Tell what has happened since; when the hand is over, everybody has what they won."""
        hand = self.state["hand"]
        now = standing(hand)
        for event in now.happened[told:]:
            self.events.append((ALL, named(event, hand["players"])))
        if now.is_over:
            self._settle(dict(zip(hand["players"], now.stacks, strict=True)))

    def _settle(self, stacks: Mapping[str, int]) -> None:
        for chair in filter(None, list(self.state["seats"])):
            if chair["user"] in stacks:
                chair["stack"] = stacks[chair["user"]]
                if chair["leaving"]:
                    self._pay_out(chair["user"])

    def _bought(self, action: Mapping[str, Any], name: str, held: int) -> int:
        chips, (least, most) = whole(action, name), self.rules.buy_in
        if chips < 1 or not least <= held + chips <= most:
            raise RefusalError(f"{name} {chips}: {max(1, least - held)} to {most - held}")
        self.state["bought"] += chips
        return chips

    def _pay_out(self, user: str) -> None:
        seat = self._seat_of(user)
        assert seat is not None
        chips = self.state["seats"][seat]["stack"]
        self.state["seats"][seat] = None
        self.state["cashed"] += chips
        self._tell("left", user, seat=seat, amount=chips)

    def _be_away(self, chair: dict[str, Any]) -> None:
        chair["away"] = True
        self._tell("away", chair["user"])

    def _tell(self, event: str, user: str, **more: Any) -> None:
        self.events.append((ALL, {"event": event, "user": user, **more}))


def whole(action: Mapping[str, Any], name: str) -> int:
    number = action.get(name)
    if type(number) is not int:  # True is an int
        raise RefusalError(f"{name} must be a whole number")
    return number


def named(event: Mapping[str, Any], players: list[str]) -> dict[str, Any]:
    """With the player's name, where there is a number."""
    told = dict(event)
    if "player" in told:
        told["user"] = players[told.pop("player")]
    return told


def following(seats: list[int], seat: int) -> int:
    """The next of these behind a seat, around the table."""
    return next((each for each in seats if each > seat), seats[0])


def rotated(seats: list[int], button: int) -> list[int]:
    """From the button on: whoever follows each of these is in the order of a hand."""
    at = seats.index(button)
    return seats[at:] + seats[:at]
