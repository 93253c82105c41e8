"""The event bus: workers say how a job goes on, and everybody who watches it hears it in order."""

from typing import TYPE_CHECKING

from semel.bus.publisher import BlockingPublisher, Publisher, publish_event
from semel.bus.router import Router, RouterStatus
from semel.bus.stages import SEQ_RANGES, Stages, get_next_seq
from semel.bus.watching import Watcher
from semel.errors import BackPressureError, JobEndedError, StaleAttemptError
from semel.imports import importing

__all__ = [
    "SEQ_RANGES",
    "BackPressureError",
    "BlockingPublisher",
    "JobEndedError",
    "Publisher",
    "Router",
    "RouterStatus",
    "Stages",
    "StaleAttemptError",
    "Watcher",
    "get_next_seq",
    "publish_event",
]

if not TYPE_CHECKING:
    __getattr__ = importing(__name__)
