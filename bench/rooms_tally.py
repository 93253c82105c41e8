"""The room that is measured: a number that everybody may add to, and who has added how often.

Its state has some 150 bytes with five users. `note` is whatever an action brings along: it comes
back in the reply to whoever acts, and in the update to everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semel.rooms import Accepted, Context, Decision, Refused, Room

__all__ = ["Tally", "tally"]


class Tally(Room):
    """As small as a room with a state worth sharing can be."""

    def begin(self, room_id: str) -> Any:
        return {"room": room_id, "count": 0, "note": "", "by": {}}

    def apply(self, state: Any, action: Mapping[str, Any], ctx: Context) -> Decision:
        if action["actionType"] != "add":
            return Refused("INVALID", "there is nothing to do but add")
        by = state["by"]
        return Accepted(
            {
                "room": state["room"],
                "count": state["count"] + 1,
                "note": action["note"],
                "by": {**by, str(ctx.user): by.get(ctx.user, 0) + 1},
            },
            reply={"count": state["count"] + 1, "note": action["note"]},
        )

    def view(self, state: Any, viewer: str | None) -> Any:
        return state


tally = Tally()
