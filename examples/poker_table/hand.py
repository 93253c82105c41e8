"""One hand of no-limit hold'em, by the rules of pokerkit. Pure.

A hand is what JSON can say: the deck in its order, who plays with how much, and what they did. How
it stands follows from that: pokerkit plays it, card by card. `standing` knows everybody's cards;
what of it somebody may see is the table's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

from pokerkit import (
    Automation,
    BetCollection,
    BlindOrStraddlePosting,
    BoardDealing,
    Card,
    CheckingOrCalling,
    ChipsPushing,
    CompletionBettingOrRaisingTo,
    Deck,
    Folding,
    HoleCardsShowingOrMucking,
    HoleDealing,
    NoLimitTexasHoldem,
    Operation,
    StandardHighHand,
    State,
)

# What somebody did, as a number; any other is the bet that was made, or to which it was raised.
FOLD = -1
CALL = 0

# All but dealing: pokerkit would deal from a deck that it has shuffled itself.
AUTOMATIONS = (
    Automation.ANTE_POSTING,
    Automation.BET_COLLECTION,
    Automation.BLIND_OR_STRADDLE_POSTING,
    Automation.HOLE_CARDS_SHOWING_OR_MUCKING,
    Automation.HAND_KILLING,
    Automation.CHIPS_PUSHING,
    Automation.CHIPS_PULLING,
)

# Hands of as many tables, at their last acts. Nothing depends on it but how fast the next one is.
KEPT = 512

Start = tuple[str, tuple[int, ...], tuple[int, ...]]


def new_hand(players: Sequence[str], stacks: Sequence[int], blinds: Sequence[int], chance: Random):
    """Players in their order behind the button, who is the last of them."""
    deck = [repr(card) for card in Deck.STANDARD]
    chance.shuffle(deck)
    return {
        "deck": "".join(deck),
        "players": list(players),
        "stacks": list(stacks),
        "blinds": list(blinds),
        "acts": [],
    }


@dataclass(frozen=True)
class Standing:
    """How a hand stands. Lists are by player; a player's number is the place among `players`."""

    is_over: bool
    actor: int | None
    to_call: int
    raise_to: tuple[int, int] | None
    stacks: list[int]
    bets: list[int]
    pots: list[int]
    board: list[str]
    cards: list[list[str]]
    holding: list[bool]
    shown: dict[int, list[str]]
    says: dict[int, str]
    won: list[dict[int, int]]
    happened: list[dict[str, Any]]

    @property
    def pot(self) -> int:
        return sum(self.pots) + sum(self.bets)

    @property
    def in_passing(self) -> int:
        """What is done for somebody who is not there: nothing that costs."""
        return FOLD if self.to_call else CALL


def standing(hand: Mapping[str, Any]) -> Standing:
    start = (hand["deck"], tuple(hand["stacks"]), tuple(hand["blinds"]))
    return _standing(start, tuple(hand["acts"]))


# --- playing ------------------------------------------------------------------------------------


@lru_cache(KEPT)
def _played(start: Start, acts: tuple[int, ...]) -> State:
    """Whoever is given it must not change it: it is the beginning of the next one."""
    deck, stacks, blinds = start
    if not acts:
        state = NoLimitTexasHoldem.create_state(
            AUTOMATIONS, True, 0, blinds, blinds[-1], stacks, len(stacks)
        )
    else:
        state = _copied(_played(start, acts[:-1]))
        _act(state, acts[-1])
    _deal(state, deck)
    return state


def _copied(state: State) -> State:
    """Ten times as fast as deepcopy, which would copy every card. Not for a hand that is over: its
    pots are changed in place, and would be both's.
    """
    other = copy(state)
    for name, content in vars(state).items():
        if isinstance(content, list | deque | set):
            vars(other)[name] = type(content)(map(_item, content))
    return other


def _item(content: Any) -> Any:
    return copy(content) if isinstance(content, list | deque) else content


def _act(state: State, act: int) -> None:
    if act == FOLD:
        state.fold()
    elif act == CALL:
        state.check_or_call()
    else:
        state.complete_bet_or_raise_to(act)


def _deal(state: State, deck: str) -> None:
    """Burn, deal and turn over what is due, from the top of what is left of the deck."""
    while state.can_burn_card() or state.can_deal_hole() or state.can_deal_board():
        if state.can_burn_card():
            state.burn_card(_top(state, deck, 1))
        elif state.can_deal_hole():
            state.deal_hole(_top(state, deck, 1))
        else:
            state.deal_board(_top(state, deck, state.board_dealing_count or 0))


def _top(state: State, deck: str, count: int) -> str:
    taken = 2 * (len(Deck.STANDARD) - len(state.deck_cards))
    return deck[taken : taken + 2 * count]


# --- reading ------------------------------------------------------------------------------------


@lru_cache(KEPT)
def _standing(start: Start, acts: tuple[int, ...]) -> Standing:
    state = _played(start, acts)
    told = list(_happened(state.operations))
    least = state.min_completion_betting_or_raising_to_amount
    most = state.max_completion_betting_or_raising_to_amount
    won = _won(state.operations)
    shown = {each["player"]: each["cards"] for each in told if each["event"] == "shown"}
    board = [repr(card) for cards in state.board_cards for card in cards]
    return Standing(
        is_over=not state.status,
        actor=state.actor_index,
        to_call=state.checking_or_calling_amount or 0,
        raise_to=None if least is None or most is None else (least, most),
        stacks=list(state.stacks),
        bets=list(state.bets),
        pots=[sum(pot.values()) for pot in won] or [pot.amount for pot in state.pots],
        board=board,
        cards=_cards(state),
        holding=_holding(state),
        shown=shown,
        says={player: _says(cards, board) for player, cards in shown.items()},
        won=won,
        happened=told,
    )


def _cards(state: State) -> list[list[str]]:
    """As they were dealt: pokerkit forgets those of a hand that was given up."""
    cards: list[list[str]] = [[] for _ in state.player_indices]
    for each in state.operations:
        if isinstance(each, HoleDealing):
            cards[each.player_index] += _names(each.cards)
    return cards


def _holding(state: State) -> list[bool]:
    given_up = {
        each.player_index
        for each in state.operations
        if isinstance(each, Folding)
        or (isinstance(each, HoleCardsShowingOrMucking) and not each.hole_cards)
    }
    return [player not in given_up for player in state.player_indices]


def _won(operations: Sequence[Operation]) -> list[dict[int, int]]:
    """By pot, how much of it each winner got."""
    pots: dict[int, dict[int, int]] = {}
    for each in operations:
        if isinstance(each, ChipsPushing):
            pot = pots.setdefault(each.pot_index, {})
            for player, amount in _shares(each):
                pot[player] = pot.get(player, 0) + amount
    return [pots[index] for index in sorted(pots)]


def _says(cards: Sequence[str], board: Sequence[str]) -> str:
    """What two cards make of the board: "two pair"."""
    best = StandardHighHand.from_game_or_none("".join(cards), "".join(board))
    return "" if best is None else str(best.entry.label.value).lower()


def _happened(operations: Sequence[Operation]) -> Iterator[dict[str, Any]]:
    """What everybody at the table has seen, in order."""
    highest = 0
    for each in operations:
        yield from _seen(each, highest)
        match each:
            case BlindOrStraddlePosting() | CompletionBettingOrRaisingTo():
                highest = max(highest, each.amount)
            case BetCollection():
                highest = 0


def _seen(each: Operation, highest: int) -> Iterator[dict[str, Any]]:
    match each:
        case BlindOrStraddlePosting():
            yield _told("blind", each.player_index, amount=each.amount)
        case Folding():
            yield _told("folded", each.player_index)
        case CheckingOrCalling():
            word = "called" if each.amount else "checked"
            yield _told(word, each.player_index, amount=each.amount)
        case CompletionBettingOrRaisingTo():
            word = "raised" if highest else "bet"
            yield _told(word, each.player_index, amount=each.amount)
        case BoardDealing():
            yield {"event": "board", "cards": _names(each.cards)}
        case HoleCardsShowingOrMucking():
            word = "shown" if each.hole_cards else "mucked"
            yield _told(word, each.player_index, cards=_names(each.hole_cards))
        case ChipsPushing():
            for player, amount in _shares(each):
                yield _told("won", player, amount=amount, pot=each.pot_index)


def _shares(pushing: ChipsPushing) -> Iterator[tuple[int, int]]:
    return ((player, amount) for player, amount in enumerate(pushing.amounts) if amount)


def _told(event: str, player: int, **more: Any) -> dict[str, Any]:
    return {"event": event, "player": player, **more}


def _names(cards: Sequence[Card]) -> list[str]:
    return [repr(card) for card in cards]
