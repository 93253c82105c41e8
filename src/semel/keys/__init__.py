"""From a call to the key it goes by.

Two calls are the same effect exactly when their keys are equal, so this part decides what happens
once. A key that is too wide swallows an effect; one that is too narrow lets it happen twice. It
never guesses: `1`, `True`, `1.0` and `"1"` are four arguments, and an argument whose meaning
cannot be written down, such as a connection, is refused by name.

    argument    `canonical` writes an argument
    binding     `Binder` finds which argument went to which parameter
    template    `Template` makes a key of them, as a sentence
    digest      `make_key` gives a key its identity
    identify    `AutoKey`, and `identifier`: all of it in one go
    readable    `readable_call` writes the text of an `AutoKey`
    attempt     `new_attempt` names one try
"""

from semel.keys.argument import canonical, canonical_call
from semel.keys.attempt import new_attempt
from semel.keys.binding import Binder, operation_of, short_name
from semel.keys.digest import (
    HTTP,
    LIMIT,
    check_name,
    child_key,
    fingerprint,
    identity,
    make_key,
    plain,
)
from semel.keys.identify import AutoKey, Identify, auto_key, identifier
from semel.keys.readable import looks_default
from semel.keys.template import Template

__all__ = [
    "HTTP",
    "LIMIT",
    "AutoKey",
    "Binder",
    "Identify",
    "Template",
    "auto_key",
    "canonical",
    "canonical_call",
    "check_name",
    "child_key",
    "fingerprint",
    "identifier",
    "identity",
    "looks_default",
    "make_key",
    "new_attempt",
    "operation_of",
    "plain",
    "short_name",
]
