"""Walks that nobody wrote: anything may happen to a room's client, and both clients do the same.

Each is a case like those in `clients/vectors/room`, whose `expect` is what the Python client did.
clients/typescript/test/room_walks.mjs takes the other client along the same way.
"""

from __future__ import annotations

from support.room_vectors import Walk

DOINGS = (
    *("act", "act", "act", "again", "update", "update", "update", "update", "snapshot", "snapshot"),
    *("result", "result", "result", "refusal", "retry", "heartbeat", "close", "join", "join"),
    *("pass_ms", "pass_ms", "pass_ms", "error", "manual", "hand_result", "text", "stop"),
)


class Wanderer:
    """Chooses by `chance`, a `random.Random`, what happens, and writes down what came of it."""

    def __init__(self, chance):
        self.chance = chance
        self.options = self.chosen_options()
        self.walk = Walk(self.options, 0.0)
        self.steps = []

    def case(self, length):
        for _ in range(length):
            step = getattr(self, f"to_{self.chance.choice(DOINGS)}")()
            if step is not None:
                self.go(step)
        return {"options": self.options, "steps": self.steps}

    def go(self, step):
        walk, guest = self.walk, self.walk.guest
        if "act" in step:
            step = {**step, "request": self.acted(**step)}
            walk.advance()
        else:
            walk.take(step)
        seen, walk.seen = walk.seen, []
        names = ("version", "pending", "state", "status")
        stands = {name: getattr(guest, name) for name in names}
        looks = [{"expect": [exactly(each) for each in seen]}, {"is": stands}]
        self.steps += [step, *looks, {"button": guest.is_settled}]

    def acted(self, *, act, guard=True, request_id=None):
        walk = self.walk
        named = walk.ids.get(request_id)
        return walk.number(walk.guest.act(walk.now_s, act, guard=guard, request_id=named))

    # --- what may happen --------------------------------------------------------------------

    def chosen_options(self):
        options = {"at": 5, "state": {"count": 5}}
        may = {"optimistic": "add", "message_bytes": 150, "viewer": "ann", "buffered": 2}
        return options | {name: found for name, found in may.items() if self.is_likely(0.5)}

    def is_likely(self, how):
        return self.chance.random() < how

    @property
    def at(self):
        return self.walk.guest.version or 0

    def place(self, *offsets):
        """Near the version that the client has, at times of another history."""
        there = max(0, self.at + self.chance.choice(offsets))
        return there if self.is_likely(0.85) else f"{there}.bbbbbbbbbbbb"

    def about(self, step, likely):
        """Perhaps an answer to something."""
        ids = list(self.walk.ids)[-4:]
        return {**step, "id": self.chance.choice(ids)} if ids and self.is_likely(likely) else step

    def to_act(self):
        if self.walk.is_over:
            return None
        action = {"actionType": "add", "by": self.chance.randrange(1, 4)}
        if self.is_likely(0.2):
            action["note"] = "é" * self.chance.randrange(60)
        return {"act": action, "guard": self.chance.choice([True, True, False, "g"])}

    def to_again(self):
        if self.walk.is_over or not self.walk.ids:
            return None
        asked = self.chance.choice(list(self.walk.ids))
        return {"act": {"actionType": "add", "by": 1}, "request_id": asked}

    def to_update(self):
        since = self.place(-1, 0, 0, 0, 0, 1, 2)
        cursor = self.walk.guest.cursor
        told = {"from": cursor if since == self.at and cursor else since}
        told["to"] = int(str(since).partition(".")[0]) + self.chance.choice([1, 1, 1, 2])
        patch = [["count"], self.chance.randrange(100)] if self.is_likely(0.9) else [["x", "y"], 1]
        events = [self.chance.randrange(9)]
        return self.about({"update": {**told, "patch": [patch], "events": events}}, 0.4)

    def to_snapshot(self):
        reason = self.chance.choice(["gap", "overrun", "forked", "reconnect"])
        told = {"version": self.place(-2, -1, 0, 1, 3), "reason": reason}
        state = {"count": self.chance.randrange(100)}
        viewer = self.options.get("viewer")
        return self.about({"snapshot": {**told, "state": state, "viewer": viewer}}, 0.6)

    def to_result(self, error=None):
        queue = self.walk.guest._requests._queue
        version = max(0, self.at + self.chance.choice([-1, 0, 1, 1, 2]))
        told = {"version": version, "cached": self.is_likely(0.2)}
        step = {"result": told if error is None else {**told, "error": error}}
        if queue and self.is_likely(0.85):
            return {**step, "id": self.walk.number(queue[0].id)}
        return self.about(step, 1.0)

    def to_refusal(self):
        return self.to_result(
            {"code": self.chance.choice(["NOT_YOUR_TURN", "STATE_STALE_VERSION"])}
        )

    def to_retry(self):
        after_ms = self.chance.choice([0, 500, 3000])
        return self.to_result({"code": "RATE_LIMITED", "retry": True, "retryAfterMs": after_ms})

    def to_heartbeat(self):
        return {"heartbeat": self.place(-1, 0, 0, 1)}

    def to_close(self):
        return {"close": self.chance.choice([1006, 1001, 1013, None])}

    def to_join(self):
        if self.walk.is_over:
            return None
        if self.walk.guest.status != "open":
            self.go({"connect": self.chance.choice([None, "a", "b"])})
        viewer = self.options.get("viewer") if self.is_likely(0.9) else "bob"
        told = {"head": self.place(0, 0, 1, 2), "resumed": self.is_likely(0.5), "viewer": viewer}
        return {"joined": {**told, "message_bytes": self.chance.choice([150, 1000])}}

    def to_pass_ms(self):
        return {"pass_ms": self.chance.choice([1, 100, 500, 1000, 2000, 2500, 5000, 10000])}

    def to_error(self):
        code = self.chance.choice(["INVALID", "TOO_LARGE", "UNAVAILABLE", "UNAUTHORIZED"])
        told = {"code": code, "message": "no", "retry": self.is_likely(0.3)}
        return self.about({"message": {"type": "ERROR", "payload": told}}, 0.5)

    def to_manual(self):
        return {"manual": True}

    def to_hand_result(self):
        return {"hand_result": {"version": self.at + 1, "result": 1}}

    def to_text(self):
        return {"text": self.chance.choice(["{", "null", "[]"])}

    def to_stop(self):
        return {"stop": True} if self.is_likely(0.05) else None


def exactly(seen):
    return {**seen, "after_ms": [seen["after_ms"]] * 2} if "hang_up" in seen else seen
