"""The `__getattr__` of packages: import a name on first use, or say which module has it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from opcode import opmap
from types import FrameType
from typing import Any

PUBLIC = {
    "semel": "ClaimLostError DuplicateExecutionError IdempotencyConflictError InProgressError "
    "OutcomeUnknownError ReplayedError ResultLostError SemelError SettingsError "
    "StoreUnavailableError configure current idempotent once step",
    "semel.admin": "Admin Changed Recovered Refused",
    "semel.brokers": "MemoryBroker NatsBroker RabbitBroker RedisBroker SQLiteBroker",
    "semel.bus": "SEQ_RANGES BackPressureError BlockingPublisher JobEndedError Publisher Router "
    "Stages StaleAttemptError Watcher get_next_seq publish_event",
    "semel.client": "Intents Patience Unanswered",
    "semel.client.feed": "Feed FeedError FeedEvent Reset Update",
    "semel.client.httpx": "AsyncIdempotentTransport IdempotentTransport",
    "semel.client.requests": "IdempotentAdapter",
    "semel.client.room": "ActionError ActionResult ActionTimeoutError Event Presence Result "
    "RoomError State Table TurnedAway",
    "semel.cloudevents": "NotAnEventError",
    "semel.codec": "CODEC Codec DecodingError EncodingError JSONCodec",
    "semel.colour": "ASYNC SYNC",
    "semel.entries": "Appended Ended Entry Fenced Field Keep Page Position Repeated Replace "
    "Snapshot VersionConflict",
    "semel.errors": "BrokerUnavailableError CorruptRecordError DamagedStoreError",
    "semel.feed": "Feed",
    "semel.guard": "CannotTell Recovered Retry",
    "semel.http": "IdempotencyMiddleware Refusal Request RequestAttempt Response Rule "
    "WSGIMiddleware attempt_of",
    "semel.http.fastapi": "Idempotency IdempotentRoute add_exception_handlers exception_handlers",
    "semel.http.sqlalchemy": "IdempotencyRecord IdempotencyStore SqlAlchemyIdempotency "
    "hash_request",
    "semel.http.sse": "Gateway GatewayStatus Limits Ticket Tickets abortable",
    "semel.http.starlette": "add_exception_handlers exception_handlers",
    "semel.http.ws": "Limits RoomDoor Spectator Visitor",
    "semel.inbox": "MemoryInbox PoisonError RedisInbox Retry SQLInbox",
    "semel.messages": "Message",
    "semel.outbox": "BlockingEventReader Event EventReader Outbox",
    "semel.parked": "Parked",
    "semel.relay": "Relay RelayStatus",
    "semel.rooms": "ALL Accepted Context Deadline Event Refused Request Room Rooms",
    "semel.stores": "FileStore MemoryStore RedisStore SQLStore SQLiteStore",
    "semel.stores.sql": "NoTableError ddl init",
    "semel.testing.clock": "FakeClock",
    "semel.testing.contracts": "LedgerContract",
    "semel.values": "Record Terms",
    "semel.worker": "Worker WorkerStatus",
}
"""Public names by module. Names of submodules, such as `feed`, are not listed."""


def importing(package: str, lazy: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    It imports a name in `lazy` from the module given there. For a public name of another package,
    an import statement gets an ImportError that says what to write; `hasattr` returns False.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        if lazy and name in lazy:
            return getattr(import_module(lazy[name]), name)
        lines = [f"from {m} import {name}" for m, names in PUBLIC.items() if name in names.split()]
        if not lines:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        advice = f"{name} is not in {package}. Write: {' or '.join(lines)}"
        raise ImportError(advice) if _is_import(sys._getframe(1)) else AttributeError(advice)  # noqa: SLF001

    return __getattr__


def _is_import(caller: FrameType) -> bool:
    """Return whether an import statement looks the name up: at a package, or at a module."""
    if caller.f_code.co_name == "_handle_fromlist":
        return True
    return caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]
