"""The rules of a room's client, without a client: the vectors that every client is held to."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.client.room_patches import PatchError, patched
from semel.client.room_values import Settle
from semel.rooms import patches
from support.room_vectors import FOLDER, Walk, cases, message, snapshot, update

FILES = (
    *("versions", "snapshots", "requests", "optimistic", "clicks"),
    *("connection", "pauses", "garbage", "never_sent"),
)
WALKS = [case for file in FILES for case in cases(file)]
PATCHES = cases("patches")


def named(cases):
    return {"ids": [case["name"] for case in cases]}


# --- the vectors --------------------------------------------------------------------------------


class Reader(Walk):
    """Reads what an error says of why a request was never sent."""

    def said(self, step):
        if isinstance(step, Settle):
            _, _, self.words = str(step.answer).partition("nothing was changed by it")
        return super().said(step)

    def on_close(self, code, reason=""):
        self.is_opening = False
        self.guest.closed(self.now_s, code, reason)

    def on_words(self, wanted):
        assert self.words.removeprefix("; ") == wanted


@pytest.mark.parametrize("case", WALKS, **named(WALKS))
@pytest.mark.parametrize("chance", [0.0, 1.0], ids=["least", "most"])
def test_a_guest_does_what_is_written(case, chance):
    walk = Reader(case.get("options", {}), chance)
    for step in case["steps"]:
        walk.take(step)
    assert walk.seen == []  # nothing happened that nobody expected


def test_every_file_is_run():
    assert {path.stem for path in FOLDER.glob("*.json")} == {*FILES, "patches"}


@pytest.mark.parametrize("rule", [f"f{n}" for n in range(1, 10)])
def test_every_rule_of_versions_has_its_case(rule):
    assert [case for case in WALKS if case["name"].startswith(f"{rule}:")]


@pytest.mark.parametrize("case", PATCHES, **named(PATCHES))
def test_a_patch_does_what_is_written(case):
    before = copy.deepcopy(case["before"])
    if case.get("refused"):
        with pytest.raises(PatchError):
            patched(before, case["patch"])
    else:
        assert printed(patched(before, case["patch"])) == printed(case["after"])
        assert printed(patches.patched(before, case["patch"])) == printed(case["after"])
    assert before == case["before"]  # what it was made from stays as it is


MADE = [case for case in PATCHES if case.get("diff")]


@pytest.mark.parametrize("case", MADE, **named(MADE))
def test_a_server_makes_the_patch_that_is_written(case):
    assert printed(patches.diff(case["before"], case["after"])) == printed(case["patch"])


def printed(found):
    """Told apart as JSON does it: Python takes 1 for True."""
    return json.dumps(found)


# --- what nobody wrote down ---------------------------------------------------------------------

LEAVES = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "0", "é"])
KEYS = st.sampled_from(["", "a", "b", "0", "__proto__"])
STATES = st.recursive(
    LEAVES, lambda s: st.lists(s, max_size=4) | st.dictionaries(KEYS, s, max_size=4), max_leaves=12
)


@given(STATES, STATES)
@settings(max_examples=300, deadline=None)
def test_both_make_the_same_of_a_patch(before, after):
    was, patch = copy.deepcopy(before), patches.diff(before, after)
    assert sorted_(patched(before, patch)) == sorted_(after)
    assert sorted_(patches.patched(before, patch)) == sorted_(after)
    assert before == was


def sorted_(found):
    return json.dumps(found, sort_keys=True)


OPERATIONS = st.lists(st.lists(KEYS | st.integers(-1, 3), max_size=3) | STATES, max_size=3)


@given(STATES, st.lists(OPERATIONS, max_size=3) | STATES)
@settings(max_examples=300, deadline=None)
def test_a_patch_fits_or_changes_nothing(before, patch):
    was = copy.deepcopy((before, patch))
    try:
        made = patched(before, patch)
    except PatchError:
        made = None
    if made is not None:
        assert sorted_(made) == sorted_(patches.patched(before, patch))
    assert (before, patch) == was


MESSAGES = st.one_of(
    st.builds(
        lambda since, by, tag: update(
            **{"from": since}, to=f"{since + by}.{tag * 12}", patch=[[["n"], since + by]]
        ),
        st.integers(0, 9),
        st.integers(1, 3),
        st.sampled_from("0b"),
    ),
    st.integers(1, 12).map(lambda n: update(**{"from": n - 1}, to=n, patch=[[["n"], n]])),
    st.integers(0, 12).map(lambda n: snapshot(version=n, state={"n": n})),
    st.dictionaries(st.sampled_from(["stateVersion", "position", "patch"]), STATES).map(
        lambda payload: message("TABLE_STATE_UPDATE", payload)
    ),
    STATES.map(lambda state: {"type": "HEARTBEAT", "payload": {"heads": state}}),
)


@given(st.lists(MESSAGES, max_size=30), st.sampled_from([0.0, 0.5, 1.0]))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_the_state_is_that_of_its_version(said, chance):
    """Every update and snapshot above says its number: so does the state, at any time."""
    walk = Walk({"at": 3, "state": {"n": 3}}, chance)
    for each in said:
        walk.take({"message": each})
        walk.take({"pass_ms": 300})
        assert walk.guest.confirmed == {"n": walk.guest.version}
    shown = [each["version"] for each in walk.seen if "state" in each]
    assert all(each["state"] == {"n": each["version"]} for each in walk.seen if "state" in each)
    assert walk.guest.version == (shown[-1] if shown else 3)
    asked = [each for each in walk.seen if each.get("send") == "REQUEST_SNAPSHOT"]
    assert len(asked) <= len(said) + 1  # and one that was not answered


@given(st.permutations(range(4, 12)), st.sampled_from([0.0, 1.0]))
@settings(max_examples=100, deadline=None)
def test_updates_in_any_order_are_made_in_theirs_and_events_come_once(order, chance):
    walk = Walk({"at": 3, "state": {"n": 3}}, chance)
    for n in order:
        walk.take({"update": {"from": n - 1, "to": n, "patch": [[["n"], n]], "events": [n]}})
    assert walk.guest.version == 11
    assert [each["event"] for each in walk.seen if "event" in each] == list(range(4, 12))
    assert len([each for each in walk.seen if each.get("send")]) <= 1  # one question, if any


@given(
    st.lists(st.sampled_from(["act", "answer", "retry", "refuse", "cut", "pass"]), max_size=40),
    st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_each_request_is_settled_once_and_sent_with_one_number(doings, chance):
    walk = Walk({"at": 3, "state": {"count": 0}, "optimistic": "add"}, chance)
    asked = []
    for doing in doings:
        do(walk, doing, asked)
    walk.take({"pass_ms": 60_000})
    settled = [each["id"] for each in walk.seen if ANSWERS & set(each)]
    assert sorted(settled) == asked
    sent = {(each["id"], each["seq"]) for each in walk.seen if each.get("send") == ACTION}
    assert len(sent) == len({id for id, _ in sent}) == len({seq for _, seq in sent})
    assert walk.guest.state == walk.guest.confirmed
    assert walk.guest.pending == 0


ACTION = "ACTION_REQUEST"
ANSWERS = {"done", "refused", "unanswered"}


def do(walk, doing, asked):
    sent = [each["id"] for each in walk.seen if each.get("send") == ACTION]
    match doing:
        case "act":
            asked.append(walk.made + 1)
            walk.take({"act": {"actionType": "add", "by": walk.made}, "request": walk.made + 1})
        case "answer" | "retry" | "refuse" if sent:
            error = {"code": "NO", "retry": doing == "retry"}
            told = {"version": 3} if doing == "answer" else {"version": 3, "error": error}
            walk.take({"result": told, "id": sent[-1]})
        case "cut":
            walk.take({"close": 1006})
            walk.take({"connect": None})
            walk.take({"joined": {"head": 3, "resumed": True}})
        case "pass":
            walk.take({"pass_ms": 700})


def test_what_is_on_its_way_keeps_its_number_and_what_is_over_is_forgotten():
    walk = Walk({"at": 3, "state": 3}, 0.0)
    for n in range(600):
        walk.take({"act": {"actionType": "a", "n": n}, "request": walk.made + 1})
    walk.take({"close": 1006})
    walk.take({"connect": None})
    walk.take({"joined": {"head": 3, "resumed": True}})
    sent = [(each["id"], each["seq"]) for each in walk.seen if each.get("send") == ACTION]
    assert sent == [(2, 1), (2, 1)]
    requests = walk.guest._requests
    for id in [each.id for each in requests._queue]:
        walk.take({"result": {"version": 3}, "id": walk.number(id)})
    walk.take({"act": {"actionType": "a"}, "request": walk.made + 1})
    assert len(requests._numbers) == 256
    assert requests._sent <= set(requests._numbers)
    for _ in range(300):  # and none is answered any more
        walk.take({"act": {"actionType": "a"}, "request": walk.made + 1, "guard": False})
        requests._queue[0].until_s = walk.now_s
        walk.advance()
    assert len(requests._unanswered) <= 256


OWN = 1000  # what an action of ours adds; one of others adds 1


class Behind:
    """A server that tells what has happened and what it has answered in any order of the two."""

    def __init__(self, chance):
        self.walk = Walk({"at": 0, "state": {"count": 0}, "optimistic": "add"}, chance)
        self.log = []  # who has made each version, and in which history
        self.history = 0
        self.asked, self.answers, self.news = [], [], []
        self.looked = 0
        # What the client knows: what it was told, sent and was answered; of which of its actions
        # nobody can tell whether that has them, or which were taken back.
        self.told = []
        self.is_current = True
        self.acted, self.sent, self.done, self.before = [], [], {}, {}
        self.unsure, self.over = set(), set()

    def count(self, log):
        return sum(1 if who is None else OWN for who, _ in log)

    def hear(self):
        """What the client has said since, and whether it has shown everything once."""
        for each in self.walk.seen[self.looked :]:
            if each.get("send") == ACTION:
                self.asked.append(each["id"])
                self.sent.append(each["id"])
            if "done" in each:
                self.done[each["id"]] = each["version"]
                self.compare()
            if "state" in each:
                assert each["version"] == len(self.told)
                there = {who for who, _ in self.told}
                missing = (self.unsure | self.over) - there
                shown = OWN * (len(self.acted) - len(missing))
                others = sum(1 for who, _ in self.told if who is None)
                assert each["state"]["count"] == others + shown
        self.looked = len(self.walk.seen)

    def take(self, step):
        self.walk.take(step)
        self.hear()

    def position(self, version):
        history = self.log[version - 1][1] if version else 0
        return f"{version}.{'bcdef'[history - 1] * 12}" if history else version

    def update(self, to):
        who, _ = self.log[to - 1]
        patch = [[["count"], self.count(self.log[:to])]]
        at = {"from": self.position(to - 1), "to": self.position(to)}
        step = {"update": {**at, "patch": patch}}
        self.news.append((step if who is None else {**step, "id": who}, self.log[:to]))

    def append(self, who):
        self.log.append((who, self.history))
        self.update(len(self.log))

    def act(self):
        self.acted.append(self.walk.made + 1)
        action = {"actionType": "add", "by": OWN}
        self.take({"act": action, "request": self.walk.made + 1, "guard": False})

    def decide(self):
        if not self.asked:
            return
        id = self.asked.pop(0)
        is_cached = id in [who for who, _ in self.log]
        if not is_cached:
            self.append(id)
        version = [who for who, _ in self.log].index(id) + 1
        self.answers.append({"result": {"version": version, "cached": is_cached}, "id": id})

    def tell(self):
        step, self.told = self.news.pop(0)
        self.is_current = True
        self.compare()
        if "snapshot" in step:
            self.unsure |= set(self.sent) - set(self.done)
            if step["snapshot"]["reason"] == "reconnect":
                self.over |= set(self.before)
        self.take(step)

    def compare(self):
        """What was answered with the version that is there, if that is of the same history."""
        if self.is_current:
            self.unsure -= set(self.done)
            self.over |= {id for id, version in self.done.items() if version <= len(self.told)}

    def cut(self, *, resumes):
        self.asked, self.answers, self.news = [], [], []
        self.before = {**self.done}
        at, head = len(self.told), len(self.log)
        self.is_current = resumes = resumes and self.told == self.log[:at]
        self.take({"close": 1006})
        self.take({"connect": None})
        self.take({"joined": {"head": self.position(head), "resumed": resumes}})
        if not resumes:
            self.snapshot("reconnect")
            return
        for to in range(at + 1, head + 1):
            self.update(to)

    def snapshot(self, reason="overrun"):
        if any(step.get("snapshot", {}).get("reason") == "reconnect" for step, _ in self.news):
            reason = "reconnect"  # the first one after a join is that of the join
        told = {"version": self.position(len(self.log)), "state": {"count": self.count(self.log)}}
        # It stands for all that was not told.
        self.news = [({"snapshot": {**told, "reason": reason}}, [*self.log])]

    def beat(self):
        """What was answered, and is not there by then, was taken back."""
        self.take({"pass_ms": 2000})
        self.over |= set(self.done) - {who for who, _ in self.log}
        self.take({"heartbeat": self.position(len(self.log))})

    def do(self, doing):
        match doing:
            case "act":
                self.act()
            case "others":
                self.append(None)
            case "decide":
                self.decide()
            case "answer" if self.answers:
                self.take(self.answers.pop(0))
            case "tell" if self.news:
                self.tell()
            case "snapshot":
                self.snapshot()
            case "cut" | "cut and resume":
                self.cut(resumes=doing != "cut")
            case "failover":
                del self.log[-2:]
                self.history += 1
                self.cut(resumes=False)


SERVING = ("act", "others", "decide", "answer", "tell", "snapshot")
CUTS = ("cut", "cut and resume", "failover")


@given(
    st.lists(st.sampled_from(SERVING), max_size=20),
    st.sampled_from(CUTS),
    st.lists(st.sampled_from(SERVING), max_size=20),
    st.sampled_from(CUTS),
    st.lists(st.sampled_from(SERVING), max_size=10),
    st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_what_was_done_is_shown_once_whatever_comes_first(one, cut, other, again, last, chance):
    server = Behind(chance)
    for doing in [*one, cut, *other, again, *last]:
        server.do(doing)
    while server.asked or server.answers or server.news:
        for doing in ("decide", "tell", "answer"):
            server.do(doing)
    server.beat()
    guest = server.walk.guest
    assert guest.pending == 0
    assert guest.state == guest.confirmed == {"count": server.count(server.log)}
    done = [who for who, _ in server.log if who is not None]
    assert len(done) == len(set(done))
    assert set(done) <= set(server.done)
    assert sorted(server.done) == sorted(server.acted)
