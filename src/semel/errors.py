"""What can go wrong, and what to do next.

    SemelError
    ├── DuplicateExecutionError      it was done before, and you asked to be told
    │   └── InProgressError          it is being done right now
    ├── IdempotencyConflictError     the key was used for something else
    ├── ClaimLostError               somebody took over while you were away
    ├── OutcomeUnknownError          it was begun and nobody knows how it ended
    ├── ResultLostError              it happened, but its result could not be stored
    ├── ReplayedError                it failed before, with an error that cannot be rebuilt
    ├── StoreUnavailableError        the store did not answer
    │   └── CorruptRecordError       the store answered with something we never wrote
    │       └── DamagedStoreError    and it is not that one record alone
    ├── BrokerUnavailableError       the broker did not answer, or did not confirm
    ├── BackPressureError            it cannot be taken now: send it again later
    ├── StaleAttemptError            a later attempt at the stage has begun: stop
    ├── JobEndedError                the job has ended, and takes nothing more
    ├── ConcurrentActionError        this user's last action in the room is not answered yet
    └── SettingsError                you asked for something that cannot work

Every message says what happened and what to do about it.
"""

from __future__ import annotations

from typing import Any


class SemelError(Exception):
    """The root of every error Semel raises on its own account."""


class DuplicateExecutionError(SemelError):
    """This call was made before and `on_duplicate="raise"` asked to be told.

    `key` names the record; `result` is what the first call returned, if it can be had.
    """

    def __init__(self, message: str, *, key: str = "", result: Any = None) -> None:
        super().__init__(message)
        self.key = key
        self.result = result


class InProgressError(DuplicateExecutionError):
    """The same call is running right now.

    `retry_after` is the number of seconds after which asking again makes sense.
    """

    def __init__(self, message: str, *, key: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, key=key)
        self.retry_after = retry_after


class IdempotencyConflictError(SemelError):
    """The key belongs to another operation or other arguments. Nothing was run."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ClaimLostError(SemelError):
    """The lease ran out and somebody else took over; what this attempt did is not recorded.

    `result` is what this attempt's body returned, if it got that far.
    """

    def __init__(self, message: str, *, key: str = "", result: Any = None) -> None:
        super().__init__(message)
        self.key = key
        self.result = result


class OutcomeUnknownError(SemelError):
    """An earlier attempt vanished in the middle. It stays so until `resolve` settles it."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ResultLostError(SemelError):
    """The effect happened once, but its result could not be stored, so it cannot be replayed."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ReplayedError(SemelError):
    """A recorded failure whose own type is not loaded here. `type_path` names it."""

    def __init__(self, message: str, *, type_path: str = "") -> None:
        super().__init__(message)
        self.type_path = type_path


class StoreUnavailableError(SemelError):
    """The store could not be reached, or did not answer in time.

    When the effect had already happened, `happened` is true and `result` is what it returned.
    `again` is false when asking again is no use: the transaction is dead, or the record is.
    """

    again = True

    def __init__(
        self, message: str, *, happened: bool = False, result: Any = None, again: bool | None = None
    ) -> None:
        super().__init__(message)
        self.happened = happened
        self.result = result
        if again is not None:
            self.again = again


class CorruptRecordError(StoreUnavailableError):
    """The stored record cannot be read. It is left as it is, and nothing is run."""

    again = False


class DamagedStoreError(CorruptRecordError):
    """It is the store that cannot be read, or part of it, and not one record alone."""


class BrokerUnavailableError(SemelError):
    """The broker could not be reached, or did not confirm. What was sent may be there or not."""


class BackPressureError(SemelError):
    """Whoever reads is too far behind. Nothing was added; send the same again.

    `retry_after` is the number of seconds after which that makes sense.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StaleAttemptError(SemelError):
    """A later attempt at this stage of the job has begun: stop. Nothing was added.

    `attempt` is the later one's number.
    """

    def __init__(self, message: str, *, attempt: int = 0) -> None:
        super().__init__(message)
        self.attempt = attempt


class JobEndedError(SemelError):
    """The job has ended, and takes nothing more. Nothing was added."""


class ConcurrentActionError(SemelError):
    """Another action of this user is on its way in this room. Nothing was done; ask again."""


class SettingsError(SemelError, ValueError):
    """A setting that cannot work, or that would void the guarantee."""


def in_one_line(error: BaseException) -> str:
    """What it says, for a log: drivers write several lines."""
    return " ".join(said_by(error).split()) or type(error).__name__


def said_by(error: BaseException) -> str:
    """What it says, or its name if it says nothing, or cannot: the error may be anybody's."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 - a broken __str__ is no reason to lose the failure
        return type(error).__name__
