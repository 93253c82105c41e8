"""The page of `poker_table` in a real browser, several tabs of it, while everything breaks."""

from __future__ import annotations

import itertools
import json
import re
from urllib.parse import quote

import httpx
import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from support.poker_table import Player, start_table
from support.process import HOST, wait_until
from support.proxy import Proxy

pytestmark = pytest.mark.timeout(180)

NAMES = itertools.count(1)
POSITION = re.compile(r"\d+\.[0-9a-f]{12}")


@pytest.fixture(scope="module")
def table():
    # Nobody is late here, and a hand is dealt when somebody says so.
    started = start_table(turn_s=600, show_s=600)
    yield started
    assert "Traceback" not in started.log_tail(100_000)
    started.stop()


@pytest.fixture
def room():
    """A table that nobody has been at."""
    return f"t{next(NAMES)}"


@pytest.fixture
def tabs(browser, table, room):
    """`tabs("ann")` opens another one; None only watches."""
    first = browser.current_window_handle

    def open_tab(user, port=table.port):
        browser.switch_to.new_window("tab")
        return Tab(browser, f"http://{HOST}:{port}/?table={room}", user)

    yield open_tab
    for handle in set(browser.window_handles) - {first}:
        browser.switch_to.window(handle)
        browser.close()
    browser.switch_to.window(first)


@pytest.fixture
def proxy(table):
    """Between one tab and the servers."""
    with Proxy(table.port) as between:
        yield between


class Tab:
    """What somebody sees, and what their page says it holds."""

    def __init__(self, browser, url, user):
        self.browser, self.user = browser, user
        self.handle = browser.current_window_handle
        who = "watch" if user is None else f"name={quote(user)}"
        browser.get(f"{url}&{who}")
        wait_until(lambda: self.seen is not None, "the table")

    def run(self, script, *arguments):
        self.browser.switch_to.window(self.handle)
        return self.browser.execute_script(script, *arguments)

    def reload(self):
        self.run("")  # the right tab
        self.browser.refresh()
        wait_until(lambda: self.seen is not None, "the table")

    def click(self, selector):
        self.run("")  # the right tab
        self.browser.find_element(By.CSS_SELECTOR, selector).click()

    def click_all(self, *selectors):
        """One after another, faster than anybody could."""
        self.run("for (const each of arguments) document.querySelector(each).click()", *selectors)

    def sit(self, seat):
        self.click(f"[data-seat='{seat}'] .sit")
        wait_until(lambda: self.is_at(seat), f"{self.user} to sit")

    def is_at(self, seat):
        there = self.confirmed["seats"][seat]
        return there is not None and there["user"] == self.user

    def deal(self):
        hand = self.confirmed["hand"]
        self.click("[data-act=deal]")
        wait_until(lambda: self.confirmed["hand"] > hand, "the cards")

    @property
    def seen(self):
        return self.run("return window.seen ?? null")

    @property
    def confirmed(self):
        return self.seen["confirmed"]

    @property
    def version(self):
        return self.seen["version"]

    @property
    def server(self):
        return self.run("return document.getElementById('line').dataset.server")

    @property
    def status(self):
        return self.run("return document.getElementById('line').dataset.status")

    @property
    def frames(self):
        """What its connections have brought, after `record_frames`."""
        return [json.loads(frame) for frame in self.run("return window.frames")]

    def text(self, selector):
        [text] = self.texts(selector)
        return text

    def texts(self, selector):
        found = "Array.from(document.querySelectorAll(arguments[0]), (each) => each.textContent)"
        return self.run(f"return {found}", selector)

    def cards(self, selector):
        cards = f"{selector} [data-card]"
        found = "Array.from(document.querySelectorAll(arguments[0]), (each) => each.dataset.card)"
        return self.run(f"return {found}", cards)

    def stack(self, seat):
        [text] = self.texts(f"[data-seat='{seat}'] .stack")
        return int(text)

    def can(self, button):
        return not self.run("return document.getElementById(arguments[0]).disabled", button)

    def wait_for_turn(self):
        wait_until(lambda: self.confirmed["actor"] == self.user, f"the turn of {self.user}")

    def wait_for_version(self, version):
        wait_until(lambda: self.version >= version, f"version {version}")


def command(browser, name, **params):
    """Of Chromium's own, to the tab that we are in."""
    url = f"{browser.server.url}/session/{browser.session_id}/goog/cdp/execute"
    httpx.post(url, json={"cmd": name, "params": params}, timeout=10).raise_for_status()


def stacks(view):
    return {seat["user"]: seat["stack"] + seat["bet"] for seat in view["seats"] if seat}


# --- clicks -------------------------------------------------------------------------------------


def test_clicks_count_once_however_often_and_whatever_else_is_clicked(tabs):
    ann, ben = tabs("ann"), tabs("ben")
    ann.click_all("[data-seat='0'] .sit", "[data-seat='0'] .sit")
    wait_until(lambda: ann.is_at(0), "ann to sit")
    ben.sit(1)
    assert ben.version == 2
    ben.click_all("[data-act=deal]", "[data-act=deal]")
    ann.wait_for_turn()
    assert ann.version == 3
    assert not ben.can("call")

    ann.click("[data-part=half]")
    [said] = ann.texts("#raise")
    ann.click_all("#raise", "#raise", "#fold", "#call")
    ben.wait_for_turn()
    assert ben.version == 4
    amount = int(said.removeprefix("Raise to "))
    assert stacks(ben.confirmed) == {"ann": 2000, "ben": 2000}
    assert ben.confirmed["seats"][0]["bet"] == amount
    assert ben.texts("#story li")[-1] == f"ann raises to {amount}"


def test_what_was_clicked_is_shown_at_once_and_then_confirmed(tabs, proxy):
    ben, ann = tabs("ben"), tabs("ann", proxy.port)
    ann.sit(0)
    ben.sit(1)
    ben.deal()
    ann.wait_for_turn()
    proxy.freeze()
    ann.click("#call")
    assert ann.texts("[data-seat='0'] .bet") == ["20"]
    assert ann.stack(0) == 1980
    assert not ann.can("call")
    assert ann.seen["pending"] == 1
    assert ann.confirmed["seats"][0]["bet"] == 10
    proxy.pass_through()
    ben.wait_for_turn()
    wait_until(lambda: ann.seen["pending"] == 0, "the answer")
    assert ann.confirmed["seats"][0]["bet"] == 20


# --- loaded again, killed, cut ------------------------------------------------------------------


def test_a_page_that_is_loaded_again_has_the_same_cards_and_chips(tabs):
    ann, ben = tabs("ann"), tabs("ben")
    ann.sit(0)
    ben.sit(3)
    ben.deal()
    ann.wait_for_turn()
    ann.click("#raise")
    ben.wait_for_turn()
    ann.wait_for_version(ben.version)
    before, cards = ann.confirmed, ann.cards("#mine")
    assert len(cards) == 2
    ann.reload()
    assert ann.confirmed == before
    assert ann.cards("#mine") == cards
    assert ann.cards("[data-seat='0']") == cards
    assert ann.cards("[data-seat='3']") == ["??", "??"]
    ben.click("#call")
    ben.wait_for_turn()
    ben.click("#call")
    ann.wait_for_turn()
    assert len(ann.cards("#board")) == 3


def test_a_server_that_is_killed_in_the_middle_of_a_hand_takes_nothing_with_it(tabs):
    ann, ben, cleo = tabs("ann"), tabs("ben"), tabs("cleo")
    for seat, tab in enumerate((ann, ben, cleo)):
        tab.sit(seat)
    ann.deal()
    tabs_ = {"ann": ann, "ben": ben, "cleo": cleo}
    cards = {user: tab.confirmed["cards"] for user, tab in tabs_.items()}
    for tab in (ann, ben, cleo):
        tab.wait_for_turn()
        server = tab.server
        # What is clicked while nobody is there is done by whoever is there next.
        tab.run("document.getElementById('kill').click()")
        wait_until(lambda tab=tab: tab.status != "open", "the server to die")
        tab.click("#call")
        wait_until(lambda tab=tab: tab.confirmed["actor"] != tab.user, "the other server")
        assert tab.server != server
    wait_until(lambda: len(ann.confirmed["board"]) == 3, "the flop")
    version = ann.version
    for user, tab in tabs_.items():
        tab.wait_for_version(version)
        assert tab.confirmed["cards"] == cards[user]
        assert stacks(tab.confirmed) == {"ann": 1980, "ben": 1980, "cleo": 1980}
        assert tab.confirmed["pots"] == [60]
    assert version == 3 + 1 + 3  # sat down, dealt, called


def test_a_tab_that_was_cut_off_for_five_versions_sees_what_the_others_see(
    tabs, proxy, table, room
):
    ben = tabs("ben", proxy.port)
    ben.sit(1)
    with Player(table, "ann", room) as ann, Player(table, "cleo", room) as cleo:
        ann.act("sit", seat=0, buyIn=2000)
        cleo.act("sit", seat=2, buyIn=2000)
        ann.act("deal")
        wait_until(lambda: ben.confirmed["hand"] == 1, "the cards")
        told, version = len(ben.texts("#story li")), ben.version
        proxy.refuse()
        wait_until(lambda: ben.status != "open", "the cut")
        assert ann.act("raise", amount=60)["success"]
        others = (
            (ann, "away"),  # away, and back: each is a version
            (ann, "back"),
            (cleo, "away"),
            (cleo, "back"),
        )
        for player, name in others:
            assert player.act(name)["success"]
        last = cleo.act("away")["stateVersion"]
        assert last >= version + 5
        assert ben.version == version
        proxy.pass_through()
        ben.wait_for_version(last)
    with Player(table, "ben", room) as other:
        other.wait_until(lambda _: True)
        assert ben.confirmed == other.view
    assert ben.texts("#story li")[told:] == [
        "ann raises to 60",
        *("ann is away", "ann is back", "cleo is away", "cleo is back", "cleo is away"),
    ]
    ben.click("#call")
    wait_until(lambda: ben.confirmed["street"] == "flop", "the flop")


def test_a_click_that_nobody_could_be_told_of_is_given_up_and_one_can_click_again(tabs, proxy):
    ben, ann = tabs("ben"), tabs("ann", proxy.port)
    ann.sit(0)
    ben.sit(1)
    ben.deal()
    ann.wait_for_turn()
    proxy.refuse()
    wait_until(lambda: ann.status != "open", "the cut")
    ann.click("#call")
    assert not ann.can("call")
    wait_until(lambda: "nothing was done" in ann.text("#hint"), "it to be given up")
    assert ann.can("call")
    proxy.pass_through()
    wait_until(lambda: ann.status == "open", "a connection")
    assert ann.confirmed["actor"] == "ann"
    ann.click("#call")
    ben.wait_for_turn()


# --- who only watches ---------------------------------------------------------------------------

RECORD = """
const Real = WebSocket;
window.frames = [];
window.WebSocket = class extends Real {
  constructor(...given) {
    super(...given);
    this.addEventListener("message", ({ data }) => window.frames.push(data));
  }
};
"""


def record_frames(browser):
    """In this tab, of every page that is opened from now on."""
    command(browser, "Page.addScriptToEvaluateOnNewDocument", source=RECORD)


def test_who_only_watches_is_never_sent_a_card_that_is_not_shown(tabs, table, room):
    watcher = tabs(None)
    record_frames(watcher.browser)
    watcher.reload()
    with Player(table, "ann", room) as ann, Player(table, "ben", room) as ben:
        ann.act("sit", seat=0, buyIn=2000)
        ben.act("sit", seat=1, buyIn=2000)
        ann.act("deal")
        for player in (ann, ben):
            player.wait_until(lambda view: view["cards"])
        hidden = [*ann.view["cards"], *ben.view["cards"]]
        assert ann.act("call")["success"]
        assert ben.act("check")["success"]
        wait_until(lambda: watcher.cards("#board"), "the flop")
        check_hidden(watcher, hidden, "TABLE_STATE_UPDATE")
        watcher.reload()
        check_hidden(watcher, hidden, "TABLE_SNAPSHOT")
        assert ben.act("bet", amount=100)["success"]
        watcher.wait_for_version(ann.act("fold")["stateVersion"])
        check_hidden(watcher, hidden, "HAND_RESULT")
        watcher.reload()
        check_hidden(watcher, hidden, "HAND_RESULT")
        assert watcher.texts("#said") == ["ben wins 40"]
    assert not watcher.run("return document.getElementById('acts').checkVisibility()")


def check_hidden(watcher, cards, kind):
    """None of these is anywhere in what it has heard, a message of this kind among it."""
    wait_until(lambda: kind in [message["type"] for message in watcher.frames], kind)
    heard = json.dumps([message.get("payload") for message in watcher.frames])
    heard = POSITION.sub("", heard)  # random digits and letters, 7d among them
    shown = {*watcher.cards("body"), *watcher.run("return document.body.innerText").split()}
    assert not [card for card in cards if card in heard or card in shown]
    assert watcher.confirmed["cards"] == []


# --- what is waited for -------------------------------------------------------------------------


def seconds(words, told):
    """Of "Next hand in 5 s", where that is what the table says."""
    found = re.fullmatch(rf"{re.escape(words)} (\d+) s", told)
    assert found, told
    return int(found[1])


def test_the_table_says_what_it_waits_for_and_how_long(tabs):
    ann, ben, watcher = tabs("ann"), tabs("ben"), tabs(None)
    assert ann.text("#wait") == "Waiting for two players "
    assert ann.text("#hint") == "Take a seat."
    ann.sit(0)
    assert ann.text("#wait") == watcher.text("#wait") == "Waiting for a second player "
    ben.sit(1)
    first = seconds("First hand in", ben.text("#wait"))
    assert 500 < first <= 600
    wait_until(lambda: seconds("First hand in", ben.text("#wait")) < first, "a second to pass")
    ben.deal()
    ann.wait_for_turn()
    seconds("Your turn ·", ann.text("#wait"))
    assert ann.run("return document.title") == "Your turn: ann · Hold'em"
    clocks = "Array.from(arguments, (each) => document.querySelector(each).style.cssText)"
    ours, others = ann.run(f"return {clocks}", "[data-user=ann]", "[data-user=ben]")
    assert 0.8 < float(ours.removeprefix("--left: ").removesuffix(";")) <= 1
    assert others == "--left: 0;"
    for other in (ben, watcher):
        other.wait_for_version(ann.version)
        seconds("Waiting for ann ·", other.text("#wait"))
    ann.click("#fold")
    wait_until(lambda: ann.confirmed["phase"] == "over", "the end of the hand")
    wait_until(lambda: ann.text("#said") == "ben wins 10", "the result")
    seconds("Next hand in", ann.text("#wait"))
    ann.click("[data-act=away]")
    wait_until(lambda: ann.confirmed["turn"] is None, "nobody to be dealt to")
    assert ann.text("#wait") == "Waiting for a second player "
    assert ann.text("#hint") == "You sit out until you say that you are back."


def test_who_does_not_answer_is_passed_over_and_everybody_sees_it(tabs):
    quick = start_table(turn_s=1.5, show_s=600)
    try:
        ann, ben = tabs("ann", quick.port), tabs("ben", quick.port)
        ann.sit(0)
        ben.sit(1)
        ben.deal()
        for tab in (ann, ben):
            wait_until(lambda tab=tab: tab.text("#said") == "ben wins 10", "the end of the turn")
            assert tab.texts("#story li")[-3:] == ["ann took too long", "ann folds", "ben wins 10"]
            assert not tab.can("call")
    finally:
        quick.stop()


# --- on a phone ---------------------------------------------------------------------------------

PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}

# Of all that is shown, what is not between the left and the right edge; and whether one can scroll.
OUTSIDE = """
const wide = document.documentElement.scrollWidth - arguments[0];
return [...document.querySelectorAll("body *")]
  .filter((each) => each.checkVisibility() && each.getClientRects().length)
  .filter((each) => {
    const { left, right } = each.getBoundingClientRect();
    return left < 0 || right > arguments[0];
  })
  .map((each) => `${each.tagName}#${each.id}.${each.className}`)
  .concat(wide > 0 ? [`${wide} too wide`] : []);
"""
BELOW = """
const shown = [...arguments].flatMap((each) => [...document.querySelectorAll(each)]);
return shown
  .filter((each) => each.checkVisibility() && each.getBoundingClientRect().bottom > innerHeight)
  .map((each) => each.id || each.className);
"""
PLAYED_WITH = ("#line", "#seats li", "#board", "#pot", "#wait", "#acts button", "#acts input")


def on_a_phone(tab):
    tab.run("")  # the right tab
    command(tab.browser, "Emulation.setDeviceMetricsOverride", **PHONE)
    wait_until(lambda: tab.run("return innerWidth") == PHONE["width"], "the phone")
    return tab


def check_fits(tab):
    assert tab.run(OUTSIDE, PHONE["width"]) == []
    assert tab.run(BELOW, *PLAYED_WITH) == []


def test_on_a_phone_all_that_one_plays_with_is_on_one_screen(tabs, table, room):
    ann, watcher = on_a_phone(tabs("ann")), on_a_phone(tabs(None))
    check_fits(ann)
    ann.sit(0)
    check_fits(ann)  # waiting
    names = ("W" * 20, "cleo", "dora", "emil", "m" * 20)
    others = [Player(table, name, room) for name in names]
    for seat, player in enumerate(others, 1):
        assert player.act("sit", seat=seat, buyIn=4000)["success"]
    others[0].act("deal")
    for player in others[2:]:
        player.wait_until(lambda view, user=player.user: view["actor"] == user)
        assert player.act("call")["success"]
    ann.wait_for_turn()
    check_fits(ann)  # in turn
    ann.click("[data-part=max]")
    ann.click("#raise")
    wait_until(lambda: ann.confirmed["actor"] != "ann", "the bet")
    check_fits(ann)
    assert others[0].act("raise", amount=4000)["success"]
    for player in others[1:]:
        player.wait_until(lambda view, user=player.user: view["actor"] == user)
        assert player.act("call")["success"]
    for tab in (ann, watcher):
        wait_until(lambda tab=tab: tab.texts("#said") != [""], "the result")
        check_fits(tab)
    for player in others:
        player.close()


def test_on_a_phone_one_can_come_in_and_hears_that_there_is_no_connection(tabs, browser, proxy):
    ann = on_a_phone(tabs("ann", proxy.port))
    ann.sit(0)
    proxy.refuse()
    wait_until(lambda: ann.status != "open", "the cut")
    check_fits(ann)
    ann.click("[data-act=away]")
    wait_until(lambda: ann.text("#hint").startswith("It is sent as soon as"), "that it is kept")
    check_fits(ann)
    proxy.pass_through()
    wait_until(lambda: ann.confirmed["seats"][0]["away"], "what was clicked")
    ann.click("#out")
    wait_until(
        lambda: ann.run("return document.getElementById('name').checkVisibility()"), "a form"
    )
    check_fits(ann)


# --- who plays tricks ---------------------------------------------------------------------------


def test_any_name_is_only_a_name(tabs, table, room):
    ann = tabs("constructor")
    ann.sit(0)
    with Player(table, "<b>b</b>", room) as ben, Player(table, "🂡 Zoë", room) as zoe:
        ben.act("sit", seat=1, buyIn=2000)
        zoe.act("sit", seat=2, buyIn=2000)
        ben.act("deal")
        ann.wait_for_turn()
        ann.click("#raise")
        for player in (ben, zoe):
            player.wait_until(lambda view, user=player.user: view["actor"] == user)
            assert player.act("fold")["success"]
    wait_until(lambda: ann.text("#said") == "constructor wins 30", "the result")
    assert ann.texts("#seats b")[:3] == ["constructor", "<b>b</b>", "🂡 Zoë"]
    assert ann.texts("#story li b b, #here b b, #seats b b") == []


def test_a_name_that_cannot_be_had_is_asked_for_again(tabs, browser, table, room):
    ann = tabs("ann")
    browser.get(f"http://{HOST}:{table.port}/?table={room}&name={'x' * 21}")
    wait_until(lambda: "cannot be had" in ann.text("#refused"), "the refusal")
    name = browser.find_element(By.ID, "name")
    name.clear()
    name.send_keys(" Ann Lee ", "\n")
    wait_until(lambda: ann.seen is not None, "the table")
    ann.user = "Ann Lee"
    ann.sit(0)
    ann.reload()
    assert ann.is_at(0)
    assert ann.text("#out") == "I am not Ann Lee"


def test_whatever_is_typed_is_raised_within_what_is_possible(tabs):
    ann, ben = tabs("ann"), tabs("ben")
    ann.sit(0)
    ben.sit(1)
    ben.deal()
    ann.wait_for_turn()
    ann.run("")  # the right tab
    exact = ann.browser.find_element(By.ID, "exact")
    for typed, raised in {"": 40, "-5": 40, "0": 40, "61.4": 61, "1e9": 2000, "1999": 1999}.items():
        exact.send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE, typed)
        words = f"Raise to {raised}" if raised < 2000 else "All in, 2000"
        assert ann.text("#raise") == words, typed
        exact.send_keys("\n")  # which is no click
        assert ann.run("return arguments[0].valueAsNumber", exact) == raised
    ann.click("#raise")
    ben.wait_for_turn()
    assert ben.confirmed["seats"][0]["bet"] == 1999
    assert ann.text("#hint") == ""


def test_who_sits_down_twice_has_one_seat_and_is_told_so_for_a_while(tabs):
    ann, same = tabs("ann"), tabs("ann")
    ann.click_all("[data-seat='0'] .sit", "[data-seat='2'] .sit")
    same.click_all("[data-seat='3'] .sit")
    for tab in (ann, same):
        wait_until(lambda tab=tab: "you have seat" in tab.text("#hint"), "to be told")
    taken = [seat for seat in ann.confirmed["seats"] if seat]
    assert [seat["user"] for seat in taken] == ["ann"]
    for tab in (ann, same):
        wait_until(lambda tab=tab: tab.text("#hint") == "", "it to be over")


def test_who_goes_back_to_the_page_is_at_the_table_again(tabs, browser, table):
    ann, ben = tabs("ann"), tabs("ben")
    ann.sit(0)
    ben.sit(1)
    ann.deal()
    cards = ann.confirmed["cards"]
    browser.get(f"http://{HOST}:{table.port}/page/page.css")
    browser.back()
    wait_until(lambda: ann.seen is not None and ann.status == "open", "the table")
    assert ann.confirmed["cards"] == cards
    ann.wait_for_turn()
    ann.click("#call")
    ben.wait_for_turn()


def test_a_table_without_a_name_is_the_main_one(tabs, browser, table):
    ann = tabs("ann")
    browser.get(f"http://{HOST}:{table.port}/?table=&name=ann")
    wait_until(lambda: ann.seen is not None, "the table")
    browser.get(f"http://{HOST}:{table.port}/?table=%00&watch")
    wait_until(lambda: "can be printed" in ann.text("#line"), "what is wrong with it")


def test_two_tabs_of_one_player_are_one_player(tabs):
    ann, same, ben = tabs("ann"), tabs("ann"), tabs("ben")
    ann.sit(0)
    wait_until(lambda: same.is_at(0), "the seat")
    assert not same.run("return document.querySelector('.sit').checkVisibility()")
    ben.sit(1)
    ben.deal()
    same.wait_for_turn()
    ann.wait_for_turn()
    cards = ann.cards("#mine")
    assert same.cards("#mine") == cards
    same.click("#raise")
    ben.wait_for_turn()
    ann.wait_for_version(ben.version)
    assert not ann.can("call")
    ann.click("[data-act=leave]")
    wait_until(lambda: same.text("#hint") == "You leave when this hand is over.", "it to be told")
    same.click("[data-act=back]")
    wait_until(lambda: ann.text("#hint") == "", "them to stay")
    ben.click("#fold")
    wait_until(lambda: same.confirmed["phase"] == "over", "the end of the hand")
    assert ann.stack(0) == same.stack(0) == 2020
