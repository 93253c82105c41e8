"""The table of `poker_table`: its chips are pokerkit's, and nobody is sent a card of another's."""

from __future__ import annotations

import json
import random

import pytest
from pokerkit import (
    Automation,
    Card,
    Deck,
    HoleCardsShowingOrMucking,
    HoleDealing,
    NoLimitTexasHoldem,
)

from semel.rooms.patches import diff, patched
from semel.rooms.room import ALL, Accepted, Context, Refused
from support.poker_table import PokerTable, Rules

HANDS = 1_000
PARTS = 4
CARDS = {repr(card) for card in Deck.STANDARD}
PEOPLE = ["ann", "ben", "cleo", "dora", "emil", "finn"]
NOW_S = 1_700_000_000.0


class Table:
    """A room without a server: one state, and everything that anybody is sent of it."""

    def __init__(self, seed=0, **rules):
        self.room = PokerTable(Rules(**rules))
        self.state = self.room.begin("t1")
        self.version = 0
        self.now_s = NOW_S
        self.chance = random.Random(seed)
        self.sent = []  # (to whom, what)
        self.held = {}  # by viewer, what a client holds that applies patches
        self.events = []

    def context(self, user):
        entropy = self.chance.randbytes(32)
        return Context("t1", user, self.version + 1, self.now_s, entropy)

    def act(self, user, name, **more):
        action = {"actionType": name, **more}
        return self._take(self.room.apply(self.state, action, self.context(user)), user)

    def pass_turn(self):
        deadline = self.room.deadline(self.state)
        self.now_s = deadline.at_s
        return self._take(self.room.timeout(self.state, deadline.turn, self.context(None)), None)

    def _take(self, decision, user):
        if isinstance(decision, Refused):
            self.sent.append((user, [decision.code, decision.message]))
            return decision
        before = json.dumps(self.state)
        views = {viewer: self.view(viewer) for viewer in self.viewers}
        assert json.dumps(self.state) == before
        self.state = json.loads(json.dumps(decision.state))
        self.version += 1
        self.sent.append((user, decision.reply))
        self._send(views, decision.events)
        self.check_chips()
        return decision

    def _send(self, views, events):
        self.events = events
        for viewer in self.viewers:
            after = self.view(viewer)
            patch = diff(views.get(viewer), after)
            heard = [event for to, event in events if to == ALL or viewer in to]
            self.sent.append((viewer, [patch, heard, after, self.room.result(self.state, viewer)]))
            self.held[viewer] = patched(self.held.get(viewer, views.get(viewer)), patch)
            assert self.held[viewer] == after
        self.held = {viewer: self.held[viewer] for viewer in self.viewers}

    @property
    def viewers(self):
        return [None, *self.room.members(self.state)]

    def view(self, viewer):
        return self.room.view(self.state, viewer)

    def check_chips(self):
        state, seen = self.state, self.view(None)
        there = state["bought"] - state["cashed"]
        assert sum(chair["stack"] for chair in state["seats"] if chair) == there
        shown = sum(chair["stack"] + chair["bet"] for chair in seen["seats"] if chair)
        assert shown + sum(seen["pots"]) == there

    @property
    def stacks(self):
        return {chair["user"]: chair["stack"] for chair in self.state["seats"] if chair}

    def sit(self, *stacks):
        for seat, (user, stack) in enumerate(zip(PEOPLE, stacks, strict=False)):
            assert isinstance(self.act(user, "sit", seat=seat, buyIn=stack), Accepted)

    @property
    def actor(self):
        return self.view(None)["actor"]


# --- 1,000 hands --------------------------------------------------------------------------------

DIRECT = (
    Automation.ANTE_POSTING,
    Automation.BET_COLLECTION,
    Automation.BLIND_OR_STRADDLE_POSTING,
    Automation.HOLE_CARDS_SHOWING_OR_MUCKING,
    Automation.HAND_KILLING,
    Automation.CHIPS_PUSHING,
    Automation.CHIPS_PULLING,
)


class Direct:
    """pokerkit alone, with the same deck, told the same."""

    def __init__(self, hand):
        self.deck = list(Card.parse(hand["deck"]))
        stacks, blinds = hand["stacks"], hand["blinds"]
        self.state = NoLimitTexasHoldem.create_state(
            DIRECT, True, 0, tuple(blinds), blinds[1], tuple(stacks), len(stacks)
        )
        self.deal()
        for act in hand["acts"]:
            self.act(act)

    def deal(self):
        state = self.state
        while True:
            if state.can_burn_card():
                state.burn_card(self.deck.pop(0))
            elif state.can_deal_hole():
                state.deal_hole(self.deck.pop(0))
            elif state.can_deal_board():
                state.deal_board([self.deck.pop(0) for _ in range(state.board_dealing_count)])
            else:
                return

    def act(self, act):
        if act < 0:
            self.state.fold()
        elif act == 0:
            self.state.check_or_call()
        else:
            self.state.complete_bet_or_raise_to(act)
        self.deal()

    def seen_by(self, player):
        """The cards that somebody may know of; None is nobody at the table."""
        seen = {repr(card) for cards in self.state.board_cards for card in cards}
        for each in self.state.operations:
            if isinstance(each, HoleDealing) and each.player_index == player:
                seen |= {repr(card) for card in each.cards}
            if isinstance(each, HoleCardsShowingOrMucking):
                seen |= {repr(card) for card in each.hole_cards}
        return seen


def some_action(chance, seen):
    """Mostly sensible, and all in more often than people are."""
    to_call, span = seen["can"]["call"], seen["can"]["raise"]
    what = chance.random()
    if what < 0.15 and to_call:
        return "fold", {}
    if what < 0.55 and span:
        highest = max(chair["bet"] for chair in seen["seats"] if chair)
        amount = chance.choice([*span, chance.randint(*span)])
        return ("raise" if highest else "bet"), {"amount": amount}
    return ("call" if to_call else "check"), {}


def check_no_leak(table, direct, players):
    """Nothing that was sent names a card that whoever got it has not seen."""
    hidden = {user: CARDS - direct.seen_by(players.index(user)) for user in players}
    of_nobody = CARDS - direct.seen_by(None)
    for viewer, content in table.sent:
        text = json.dumps(content)
        leaked = [card for card in hidden.get(viewer, of_nobody) if card in text]
        assert not leaked, (viewer, text)
    table.sent.clear()


def play_hand(chance, count):
    table = Table(chance.randrange(2**32), buy_in=(1, 10_000))
    table.sit(*(chance.randint(1, chance.choice([60, 2_000])) for _ in range(count)))
    assert isinstance(table.pass_turn(), Accepted)
    players, direct = table.state["hand"]["players"], Direct(table.state["hand"])
    check_no_leak(table, direct, players)
    while (actor := table.actor) is not None:
        other = chance.choice(PEOPLE[:count])
        if other != actor:
            assert table.act(other, "fold").code == "NOT_YOUR_TURN"
        assert table.act(actor, "raise", amount=10**6).code == "INVALID"
        name, more = some_action(chance, table.view(actor))
        answer = table.act(actor, name, turn=table.state["turn"], **more)
        assert isinstance(answer, Accepted), (answer, name, more)
        direct.act(table.state["hand"]["acts"][-1])
        check_no_leak(table, direct, players)
    assert not direct.state.status
    assert table.stacks == dict(zip(players, direct.state.stacks, strict=True))
    return table, direct


@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_hands_end_with_the_stacks_of_pokerkit_and_no_card_is_leaked(part):
    chance = random.Random(part)
    hands = HANDS // PARTS
    side_pots = all_ins = unseen = 0
    for number in range(hands):
        count = 2 + (number % 10 if number % 10 < 5 else 0)
        table, direct = play_hand(chance, count)
        result = table.room.result(table.state, None)
        for pot in result["pots"]:
            assert sum(pot["won"].values()) == pot["amount"]
        side_pots += len(result["pots"]) > 1
        all_ins += bool(direct.state.all_in_status)
        unseen += not result["shown"]
    assert side_pots > hands / 20
    assert all_ins > hands / 4
    assert unseen > hands / 20


# --- an evening ---------------------------------------------------------------------------------


def something(chance, table):
    """Whatever people do at a table, in time or not, allowed or not."""
    user, seen = chance.choice(PEOPLE), table.view(None)
    if seen["actor"] and chance.random() < 0.7:
        name, more = some_action(chance, seen)
        return table.act(seen["actor"], name, **more)
    match chance.randrange(8):
        case 0 | 1:
            return table.act(user, "sit", seat=chance.randrange(7), buyIn=chance.randint(300, 900))
        case 2:
            return table.act(user, "buy", amount=chance.randint(1, 900))
        case 3 | 4 if table.state["turn"]:
            return table.pass_turn()
        case 5:
            return table.act(user, chance.choice(["leave", "away", "back", "back"]))
        case 6:
            return table.act(user, "deal")
        case _:
            return table.act(user, chance.choice(["fold", "check", "call"]))


@pytest.mark.parametrize("seed", range(2))
def test_people_come_and_go_and_no_chip_and_no_card_gets_lost(seed):
    table, chance = Table(seed), random.Random(seed)
    turns, named = [None], set()
    for _ in range(600):
        answer = something(chance, table)
        if table.state["hand"]:
            hand = table.state["hand"]
            check_no_leak(table, Direct(hand), hand["players"])
        if table.state["turn"] not in {turns[-1], None}:
            assert table.state["turn"] not in named, answer
            named.add(table.state["turn"])
        turns.append(table.state["turn"])
    assert table.state["number"] > 20
    for user in list(table.stacks):
        table.act(user, "leave")
    assert table.stacks == {}
    assert table.state["bought"] == table.state["cashed"]


# --- seats --------------------------------------------------------------------------------------


def words(answer, *, code="INVALID"):
    assert isinstance(answer, Refused), answer
    assert answer.code == code
    return answer.message


@pytest.fixture
def table():
    return Table()


def test_a_seat_has_one_person_and_a_person_one_seat(table):
    table.sit(1000, 1000)
    assert words(table.act("cleo", "sit", seat=0, buyIn=500)) == (
        "seat 0 is not free; free: 2, 3, 4, 5"
    )
    assert words(table.act("ann", "sit", seat=3, buyIn=500)) == "you have seat 0"
    assert "free: 2, 3, 4, 5" in words(table.act("cleo", "sit", seat=-1, buyIn=500))


@pytest.mark.parametrize("chips", [0, -5, 399, 4001, True, 400.0, "400", None])
def test_chips_are_whole_and_within_the_limits(table, chips):
    words(table.act("ann", "sit", seat=0, buyIn=chips))
    assert table.state["bought"] == 0


def test_who_has_no_seat_does_nothing(table):
    table.sit(1000, 1000)
    table.pass_turn()
    for name in ("fold", "check", "call", "deal", "leave", "away", "back", "buy"):
        assert words(table.act("cleo", name)) == "take a seat first"


def test_chips_are_bought_between_two_hands(table):
    table.sit(400, 400)
    table.act("ann", "buy", amount=600)
    assert table.stacks["ann"] == 1000
    assert words(table.act("ann", "buy", amount=3001)) == "amount 3001: 1 to 3000"
    table.pass_turn()
    assert "between two hands" in words(table.act("ann", "buy", amount=100))


def test_whoever_has_lost_everything_waits_until_they_buy_more(table):
    table.sit(400, 400)
    table.pass_turn()
    table.act(table.actor, "raise", amount=400)
    table.act(table.actor, "call")
    [loser] = [user for user, stack in table.stacks.items() if not stack] or [None]
    assert loser
    assert table.state["turn"] is None
    assert "at least two" in words(table.act("ann", "deal"))
    table.act(loser, "buy", amount=400)
    assert table.state["turn"].startswith("deal-")


# --- turns --------------------------------------------------------------------------------------


def test_two_who_sit_down_are_dealt_a_hand_by_itself(table):
    table.sit(1000)
    assert table.room.deadline(table.state) is None
    table.act("ben", "sit", seat=4, buyIn=500)
    deadline = table.room.deadline(table.state)
    assert deadline.at_s == NOW_S + table.room.rules.show_s
    table.pass_turn()
    assert table.state["turn"] == "h1-a0"
    assert table.room.deadline(table.state).at_s == table.now_s + table.room.rules.turn_s


def test_a_deal_that_was_called_off_is_another_one_later(table):
    table.sit(1000, 1000)
    first = table.state["turn"]
    table.act("ben", "leave")
    assert table.state["turn"] is None
    table.act("ben", "sit", seat=1, buyIn=1000)
    assert table.state["turn"] not in {first, None}
    late = table.room.timeout(table.state, first, table.context(None))
    assert words(late) == "this turn is over"


def test_the_button_goes_around_and_posts_the_small_blind_when_there_are_two(table):
    table.sit(1000, 1000)
    for button, other in (("ann", "ben"), ("ben", "ann"), ("ann", "ben")):
        table.act("ann", "deal")
        bets = {chair["user"]: chair["bet"] for chair in table.view(None)["seats"] if chair}
        assert bets == {button: 10, other: 20}
        assert table.actor == button
        table.act(button, "fold")


@pytest.mark.parametrize("late", ["h1-a1", "h2-a0", "deal-1", None, 7])
def test_a_click_that_meant_another_turn_is_refused(table, late):
    table.sit(1000, 1000)
    table.pass_turn()
    actor = table.actor
    assert "is over" in words(table.act(actor, "call", turn=late), code="NOT_YOUR_TURN")
    assert isinstance(table.act(actor, "call", turn="h1-a0"), Accepted)


def test_what_is_not_possible_is_refused_with_what_is(table):
    table.sit(1000, 1000)
    assert "no hand" in words(table.act("ann", "check"), code="NOT_YOUR_TURN")
    table.pass_turn()
    assert words(table.act("ann", "check")) == "there are 10 to call: call, raise or fold"
    assert words(table.act("ann", "bet", amount=40)) == "there is a bet of 20: raise, call or fold"
    assert words(table.act("ann", "raise", amount=39)) == "39 is not possible: 40 to 1000 in all"
    assert words(table.act("ann", "raise", amount="all")) == "amount must be a whole number"
    assert words(table.act("ben", "call"), code="NOT_YOUR_TURN") == "it is the turn of ann"
    table.act("ann", "call")
    assert words(table.act("ben", "call")) == "there is nothing to call: check or bet"
    assert words(table.act("ben", "fold")) == "there is nothing to call: check, it costs nothing"
    table.act("ben", "check")
    assert words(table.act("ben", "raise", amount=40)) == "there is no bet to raise: bet or check"
    table.act("ben", "bet", amount=980)
    assert (
        words(table.act("ann", "raise", amount=990)) == "nobody could answer a raise: call or fold"
    )
    assert "must be one of sit, buy" in words(table.act("ann", "win"))
    assert "must be one of" in words(table.act("ann", ["fold"]))


def test_a_turn_that_is_not_played_is_checked_or_folded_and_two_of_them_are_enough(table):
    table.sit(1000, 1000, 1000)
    table.pass_turn()
    assert table.actor == "ann"
    table.pass_turn()
    heard = [event["event"] for _, event in table.events]
    assert heard == ["late", "folded"]
    table.act("ben", "call")
    table.pass_turn()  # cleo may check
    assert [event["event"] for _, event in table.events] == ["late", "checked", "board"]
    table.pass_turn()  # ben, for the first time
    table.pass_turn()  # cleo, for the second
    assert [event["event"] for _, event in table.events][:3] == ["late", "away", "checked"]
    assert table.view(None)["seats"][2]["away"]
    table.act("ben", "bet", amount=100)
    assert table.view(None)["phase"] == "over"  # cleo is played for, without waiting
    table.pass_turn()
    assert "cleo" not in table.state["hand"]["players"]
    table.act("cleo", "back")
    assert not table.view(None)["seats"][2]["away"]


def test_whoever_leaves_in_a_hand_is_played_for_and_paid_out_behind_it(table):
    table.sit(1000, 1000, 1000)
    table.pass_turn()
    table.act("ann", "raise", amount=100)
    table.act("ann", "leave")
    assert "ann" in table.stacks
    table.act("ben", "call")
    table.act("cleo", "fold")
    table.act("ben", "bet", amount=50)
    assert "ann" not in table.stacks
    assert table.state["cashed"] == 900
    assert table.stacks["ben"] == 1120
    assert table.view(None)["phase"] == "over"


# --- what is seen -------------------------------------------------------------------------------


def test_cards_are_told_to_whoever_has_them_and_seen_by_nobody_else(table):
    table.sit(1000, 1000)
    table.pass_turn()
    told = {tuple(to): event["cards"] for to, event in table.events if to != ALL}
    for user, other in (("ann", "ben"), ("ben", "ann")):
        seen = table.view(user)
        cards = {chair["user"]: chair["cards"] for chair in seen["seats"] if chair}
        assert cards == {user: told[user,], other: ["??", "??"]}
        assert seen["cards"] == told[user,]
    watching = table.view(None)
    assert watching["cards"] == []
    assert [chair["cards"] for chair in watching["seats"] if chair] == [["??", "??"]] * 2


def test_a_hand_that_nobody_called_is_not_shown_and_one_that_was_given_up_is_still_ones_own(table):
    table.sit(1000, 1000)
    table.pass_turn()
    cards = table.view("ann")["cards"]
    table.act("ann", "fold")
    assert table.room.result(table.state, None) == {
        "hand": 1,
        "board": [],
        "pots": [{"amount": 10, "won": {"ben": 10}}],
        "shown": {},
    }
    seen = table.view("ann")
    assert seen["cards"] == cards
    assert [chair["cards"] for chair in seen["seats"] if chair] == [[], ["??", "??"]]
    table.pass_turn()
    assert table.room.result(table.state, None) is None


def test_what_is_shown_down_everybody_sees_with_what_it_says(table):
    table.sit(400, 400)
    table.pass_turn()
    table.act(table.actor, "raise", amount=400)
    table.act(table.actor, "call")
    result = table.room.result(table.state, None)
    assert set(result["shown"]) == {"ann", "ben"}
    for user, shown in result["shown"].items():
        assert shown["says"]
        assert table.view(user)["cards"] == shown["cards"]
    assert len(result["board"]) == 5


def test_the_deck_is_another_one_every_time_and_nobody_knows_it_before():
    decks = set()
    for seed in range(20):
        table = Table(seed)
        table.sit(1000, 1000)
        table.pass_turn()
        decks.add(table.state["hand"]["deck"])
    assert len(decks) == 20
