"""Runs a guest through `clients/vectors/room`; the README there says what the words mean.

clients/typescript/test/room_vectors.mjs is the same for the other client.
"""

from __future__ import annotations

import json
from pathlib import Path

from semel.client.room_rules import Guest
from semel.client.room_values import (
    ActionError,
    ActionResult,
    ActionTimeoutError,
    Became,
    Deliver,
    Event,
    HangUp,
    Open,
    Over,
    Presence,
    Result,
    RoomError,
    Send,
    Settle,
    State,
    Terms,
    Trouble,
    Wait,
)
from support.feed_vectors import cursor_of

FOLDER = Path(__file__).parents[2] / "clients" / "vectors" / "room"
TABLE = "t"


def cases(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


# --- messages -----------------------------------------------------------------------------------


def version_of(place):
    return int(str(place).partition(".")[0])


def message(kind, payload, request_id=None):
    said = {"type": kind, "payload": {"tableId": TABLE, **payload}}
    return said if request_id is None else {**said, "requestId": request_id}


def joined(*, resumed=False, head=0, viewer=None, heartbeat_ms=15_000, message_bytes=None):
    told = {"viewer": viewer, "head": cursor_of(head), "stateVersion": version_of(head)}
    beat = {"serverTime": 1, "heartbeatMs": heartbeat_ms, "resumed": resumed}
    most = {} if message_bytes is None else {"messageBytes": message_bytes}
    return message("JOINED", {**told, **beat, **most})


def snapshot(*, version, state, reason="join", viewer=None):
    at = {"stateVersion": version_of(version), "position": cursor_of(version)}
    return message("TABLE_SNAPSHOT", {**at, "state": state, "viewer": viewer, "reason": reason})


def update(*, to, patch, events=(), **told):
    since = told["from"]
    now = {"stateVersion": version_of(to), "position": cursor_of(to)}
    before = {"previousVersion": version_of(since), "previous": cursor_of(since)}
    return message("TABLE_STATE_UPDATE", {**now, **before, "patch": patch, "events": list(events)})


def result(*, version, cached=False, error=None, reply=None, action=None):
    told = {"stateVersion": version, "cached": cached, "action": action}
    ending = {"success": True, "reply": reply}
    if error is not None:
        ending = {"success": False, "error": {"message": "no", **error}}
    return message("ACTION_RESULT", {**told, **ending})


def heartbeat(head):
    said = {"serverTime": 1, "heads": {TABLE: cursor_of(head)}}
    return {"type": "HEARTBEAT", "payload": said}


def hand_result(*, version, result):
    at = {"stateVersion": version_of(version), "position": cursor_of(version)}
    return message("HAND_RESULT", {**at, "result": result})


ANSWERS = {"joined": joined, "snapshot": snapshot, "update": update, "result": result}
ANSWERS["hand_result"] = hand_result


# --- what a user brings -------------------------------------------------------------------------


def add(state, action):
    """What `optimistic: add` means: it fits a state with a count."""
    state["count"] += action["by"]  # changing what is given changes nothing else
    return state


def enabled_when(wanted):
    return lambda state: all(state.get(name) == found for name, found in wanted.items())


# --- walking ------------------------------------------------------------------------------------


class Walk:
    """A guest, a clock that stands still unless told, and what has been seen."""

    def __init__(self, options, chance):
        options = dict(options)
        self.now_s = 1000.0
        self.chance = chance
        self.made = 0
        self.seen, self.statuses = [], []
        self.is_opening = self.is_over = False
        self.within_s = 0.0
        at, state = options.pop("at", None), options.pop("state", None)
        viewer, most = options.pop("viewer", None), options.pop("message_bytes", None)
        self.is_enabled = enabled_when(options.pop("enabled_when", {}))
        optimistic = {"add": add, None: None}[options.pop("optimistic", None)]
        self.guest = Guest(
            TABLE,
            Terms(buffered=options.pop("buffered", 256), pending=options.pop("pending", 1000)),
            lambda: chance,
            letters=self.letters,
            wall_s=lambda: round(self.now_s * 1000) / 1000 + 1e-7,  # or it is a millisecond less
            client_id="c",
            optimistic=optimistic,
            **options,
        )
        self.ids = {}
        self.advance()
        if at is not None:
            self.take({"connect": None})
            self.take({"joined": {"head": at, "viewer": viewer, "message_bytes": most}})
            self.take({"snapshot": {"version": at, "state": state, "viewer": viewer}})
            self.seen, self.statuses = [], []

    def letters(self):
        self.made += 1
        self.ids[self.made] = f"c-{round(self.now_s * 1000)}-{self.made:06d}"
        return f"{self.made:06d}"

    def advance(self):
        """Do all that can be done without the world."""
        while True:
            step = self.guest.next(self.now_s)
            match step:
                case Wait():
                    self.within_s = step.within_s
                    return
                case Over():
                    if not self.is_over:
                        self.seen.append({"over": step.error and step.error.code})
                    self.is_over = True
                    return
                case Open():
                    self.is_opening = True
                case Deliver(news=Became(status=status, turned_away=None)):
                    self.statuses.append(status)
                case Deliver(news=Became(status=status, turned_away=why)):
                    self.statuses.append({status: why.code, "message": why.message})
                case _:
                    self.is_opening = self.is_opening and not isinstance(step, HangUp)
                    self.seen.append(self.said(step))

    def take(self, step):
        """A step is its name and what is told, and what else there is besides."""
        (name, told), *rest = step.items()
        besides = dict(rest)
        if name in ANSWERS:
            self.receive(ANSWERS[name](**told), **besides)
        else:
            getattr(self, f"on_{name}")(told, **besides)
        self.advance()

    def receive(self, said, id=None):
        if id is not None:
            said = {**said, "requestId": self.ids.get(id, id)}
        self.guest.received(self.now_s, json.dumps(said))

    def on_connect(self, token):
        while not self.is_opening:
            self.on_pass_ms(self.within_s * 1000)
        self.is_opening = False
        self.guest.opened(self.now_s, token)

    def on_heartbeat(self, head):
        self.receive(heartbeat(head))

    def on_message(self, said, id=None):
        self.receive(said, id)

    def on_text(self, text):
        self.guest.received(self.now_s, text)

    def on_close(self, code):
        self.is_opening = False
        self.guest.closed(self.now_s, code)

    def on_pass_ms(self, told):
        until_s = self.now_s + self.span(told) / 1000
        while self.now_s + self.within_s <= until_s + 1e-9 and not self.is_over:
            self.now_s += max(self.within_s, 1e-9)
            self.advance()
        self.now_s = max(self.now_s, until_s)

    def span(self, told):
        """A number, or the shortest and the longest that chance may make of it."""
        if not isinstance(told, list):
            return told
        least, most = told
        return least + self.chance * (most - least)

    def on_act(self, action, *, request=None, guard=True, request_id=None):
        request_id = self.ids.get(request_id, request_id)
        id = self.guest.act(self.now_s, action, guard=guard, request_id=request_id)
        assert id == self.ids.get(request, request)

    def on_manual(self, told):
        self.guest.request_snapshot(self.now_s)

    def on_stop(self, told):
        self.guest.stop()

    # --- looking ----------------------------------------------------------------------------

    def on_expect(self, wanted):
        seen, self.seen = self.seen, []
        assert seen == [self.meant(each) for each in wanted]

    def on_statuses(self, wanted):
        statuses, self.statuses = self.statuses, []
        assert statuses == wanted

    def on_opening(self, wanted):
        assert self.is_opening == wanted

    def on_button(self, wanted):
        guest = self.guest
        assert (guest.is_settled and self.is_enabled(guest.confirmed)) == wanted

    def on_ids(self, wanted):
        assert {str(n): id for n, id in self.ids.items()} == wanted

    def on_is(self, wanted):
        for name, found in wanted.items():
            there = getattr(self.guest, name)
            assert there == (cursor_of(found) if name == "cursor" else found), name

    def meant(self, wanted):
        if "hang_up" in wanted:
            return {**wanted, "after_ms": round(self.span(wanted["after_ms"]))}
        return wanted

    def number(self, id):
        """Which of the ids that were made it is."""
        return next((n for n, made in self.ids.items() if made == id), id)

    def said(self, step):
        match step:
            case Send(message=message):
                return self.sent(json.loads(json.dumps(message)))
            case Deliver(news=news):
                return told(news)
            case Settle(request_id=id, answer=answer):
                return {**settled(answer), "id": self.number(id)}
            case HangUp(after_s=after_s, why=why):
                return {"hang_up": why, "after_ms": round(after_s * 1000)}

    def sent(self, message):
        payload = message.pop("payload")
        assert payload.pop("tableId") == TABLE
        if "cursor" in payload:
            offset = version_of(payload["cursor"])
            is_usual = payload["cursor"] == cursor_of(offset)
            payload["cursor"] = offset if is_usual else payload["cursor"]
        said = {"send": message.pop("type"), "id": self.number(message.pop("requestId"))}
        if "clientSeq" in message:
            assert message.pop("clientId") == "c"
            said["seq"] = message.pop("clientSeq")
        assert not message
        return {**said, **payload}


def told(news):
    match news:
        case State():
            found = {"state": news.state, "version": news.version}
            if news.confirmed != news.state:
                found["confirmed"] = news.confirmed
            if news.viewer is not None:
                found["viewer"] = news.viewer
            return {**found, "pending": news.pending} if news.pending else found
        case Event():
            return {"event": news.data, "version": news.version}
        case Result():
            return {"result": news.result, "version": news.version}
        case Presence():
            return {"presence": list(news.users), "spectators": news.spectators}
        case Trouble():
            return {"trouble": news.code}


def settled(answer):
    match answer:
        case ActionResult():
            found = {"done": answer.reply, "version": answer.version}
            return {**found, "cached": True} if answer.cached else found
        case ActionTimeoutError():
            assert answer.request_id in str(answer) or not answer.was_sent
            return {"unanswered": "sent" if answer.was_sent else "never sent"}
        case ActionError():
            found = {"refused": answer.code}
            return found if answer.was_sent else {**found, "never_sent": True}
        case RoomError():
            return {"ended": answer.code}
