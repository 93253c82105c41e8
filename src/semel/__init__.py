"""Semel (Latin: once): an effect that happens once, through retries, races and crashes."""

from typing import TYPE_CHECKING

from semel.errors import (
    ClaimLostError,
    DuplicateExecutionError,
    IdempotencyConflictError,
    InProgressError,
    OutcomeUnknownError,
    ReplayedError,
    ResultLostError,
    SemelError,
    SettingsError,
    StoreUnavailableError,
)
from semel.guard import current, idempotent, once, step
from semel.imports import importing
from semel.settings import configure
from semel.stores import connect

__version__ = "0.1.0"

__all__ = [
    "ClaimLostError",
    "DuplicateExecutionError",
    "IdempotencyConflictError",
    "InProgressError",
    "OutcomeUnknownError",
    "ReplayedError",
    "ResultLostError",
    "SemelError",
    "SettingsError",
    "StoreUnavailableError",
    "__version__",
    "configure",
    "connect",
    "current",
    "idempotent",
    "once",
    "step",
]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)
