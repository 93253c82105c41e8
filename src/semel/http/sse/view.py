"""What a viewer is shown: everything, or what `project` leaves of it.

There is one way from an entry to what is shown, for what comes, for what is replayed and for the
state, so that nobody is shown later what was kept from them before. The easy mistake is to share:
`project` is given an event of its own each time, since it may change it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from semel.bus.jobs import state_of
from semel.bus.watching import seq_in
from semel.entries import Entry, FieldValue, Snapshot
from semel.errors import SettingsError
from semel.failures import Failures
from semel.feed import Reset
from semel.feed.values import Burst
from semel.http.sse import frames

__all__ = ["Everything", "NotShownError", "Project", "Some", "View"]

Project: TypeAlias = Callable[[Any, Any], Any]
"""From an event and a principal to what the principal is shown of it; None is nothing.

The same for the same: it must not look at anything else, or a replay would differ.
"""

# Resets that are kept as they are sent: a crowd that comes back is told the same.
MOST_RESETS = 64

# The `retry:` of an `error` event: how long a browser waits after `project` has failed before it
# reconnects, in milliseconds. Longer than the default of `retry_ms`, because the same event will
# usually fail again.
FAILED_RETRY_MS = 10_000


class NotShownError(Exception):
    """Raised after `project` has failed; the failure was logged."""


class Everything:
    """For those from whom nothing is kept: all are given the very same bytes."""

    has_failed = False

    def __init__(self) -> None:
        self._resets: dict[tuple[str, str], bytes] = {}

    def shown(self, burst: Burst) -> bytes:
        return burst.frames

    def reset(self, reset: Reset) -> bytes:
        asked = reset.reason, str(reset.snapshot.position)
        found = self._resets.get(asked)
        if found is None:
            if len(self._resets) >= MOST_RESETS:
                self._resets.clear()
            found = _reset(reset, self.state(reset.snapshot))
            self._resets[asked] = found
        return found

    def state(self, snapshot: Snapshot) -> Mapping[str, Any]:
        return state_of(snapshot)


class Some:
    """For one viewer: what `project` leaves, and only numbers above `last_seq`, if there is one.

    Where `project` raises, an `error` event takes the place of the entry, and `has_failed` is set:
    nothing may follow it.
    """

    __slots__ = ("_failures", "_last_seq", "_project", "has_failed", "principal")

    def __init__(
        self,
        project: Project | None,
        principal: object,
        last_seq: int | None,
        failures: Failures,
    ) -> None:
        self._project = project
        self.principal = principal
        self._last_seq = last_seq
        self._failures = failures
        self.has_failed = False

    def shown(self, burst: Burst) -> bytes:
        shown = []
        try:
            for entry in burst.entries:
                shown.append(self._frame(entry))  # noqa: PERF401 - those before a failure are kept
        except NotShownError:
            shown.append(self._error())
        return b"".join(shown)

    def _error(self) -> bytes:
        self.has_failed = True
        return frames.error(FAILED_RETRY_MS)

    def _frame(self, entry: Entry) -> bytes:
        if self._last_seq is not None and seq_in(entry) <= self._last_seq:
            return frames.hidden(entry.position)
        data = self._shown(entry.data)
        if data is None:
            return frames.hidden(entry.position)
        return frames.message(data, entry.position)

    def _shown(self, data: bytes) -> bytes | None:
        if self._project is None:
            return data
        try:
            return self._projected(self._project, data)
        except Exception as error:
            self._failures.tell(error, "semel: project failed; the viewer's connection ends")
            raise NotShownError from error

    def _projected(self, project: Project, data: bytes) -> bytes | None:
        left = project(json.loads(data), self.principal)
        if left is None:
            return None
        if not isinstance(left, dict):
            raise SettingsError(
                f"project gave a {type(left).__name__}; it is to give what is left of the event, "
                "a dict, or None for nothing"
            )
        return frames.written(left)

    def reset(self, reset: Reset) -> bytes:
        self._last_seq = None  # whatever it had seen, it begins anew from this
        try:
            return _reset(reset, self.state(reset.snapshot))
        except NotShownError:
            return self._error()

    def state(self, snapshot: Snapshot) -> Mapping[str, Any]:
        """Return the state as `project` leaves it; raise `NotShownError` if it fails."""
        fields: dict[str, FieldValue] = {}
        for name, held in snapshot.fields.items():
            data = self._shown(held.data)
            if data is not None:
                fields[name] = FieldValue(held.rank, data)
        return state_of(replace(snapshot, fields=fields, state=None))


View: TypeAlias = Everything | Some


def _reset(reset: Reset, state: Mapping[str, Any]) -> bytes:
    return frames.reset(reset.reason, reset.snapshot.position, state)
