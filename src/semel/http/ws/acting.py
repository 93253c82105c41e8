"""An action that a client asks for, and what it is answered, whatever becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.errors import (
    ConcurrentActionError,
    CorruptRecordError,
    IdempotencyConflictError,
    SettingsError,
    StoreUnavailableError,
)
from semel.rooms import Request, messages
from semel.rooms.asking import Act

if TYPE_CHECKING:
    from semel.http.ws.door import House

__all__ = ["RETRY_BUSY_S", "RETRY_STORE_S", "acted"]

RETRY_BUSY_S = 0.2
RETRY_STORE_S = 1.0


async def acted(house: House, act: Act, user: str) -> str:
    """What the client is told."""
    try:
        return await _settled(house, act, user)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told of
        house.rooms.failures.tell(
            error, "semel: an action in room %r could not be answered", act.room_id
        )
        return messages.unsettled(act, "FAILED", "this could not be answered")


async def _settled(house: House, act: Act, user: str) -> str:
    retry_s, failures = None, house.rooms.failures
    try:
        request = _request(act, user)
    except SettingsError as error:
        return _undecided(house, act, "INVALID", str(error))
    try:
        return messages.result(act, await house.rooms.settle(request))
    except ConcurrentActionError as error:
        code, why, retry_s = "CONCURRENT_ACTION", str(error), RETRY_BUSY_S
    except IdempotencyConflictError as error:
        code, why = "REQUEST_CONFLICT", str(error)
    except CorruptRecordError as error:
        failures.tell(error, "semel: room %r cannot be read: %s", act.room_id, error)
        code, why = "FAILED", "this room cannot be read"
    except (StoreUnavailableError, SettingsError) as error:
        if isinstance(error, SettingsError):  # of the store, as without its tables
            failures.tell(error, "semel: room %r cannot be read: %s", act.room_id, error)
        code, why, retry_s = "UNAVAILABLE", "nobody knows; send the same again", RETRY_STORE_S
    return _undecided(house, act, code, why, retry_s)


def _undecided(house: House, act: Act, code: str, why: str, retry_s: float | None = None) -> str:
    house.counts.refused[code] += 1
    return messages.unsettled(act, code, why, retry_s=retry_s)


def _request(act: Act, user: str) -> Request:
    return Request(
        act.room_id,
        user,
        act.request_id,
        act.action,
        act.expected_version,
        act.client_id,
        act.client_seq,
    )
