"""The page of `poker_table` in a real browser, several tabs of it, while everything breaks."""

from __future__ import annotations

import itertools
import json
import re

import httpx
import pytest
from selenium.webdriver.common.by import By

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
        who = "watch" if user is None else f"name={user}"
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
    command = {"cmd": "Page.addScriptToEvaluateOnNewDocument", "params": {"source": RECORD}}
    url = f"{browser.server.url}/session/{browser.session_id}/goog/cdp/execute"
    httpx.post(url, json=command, timeout=10).raise_for_status()


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
