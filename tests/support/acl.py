"""The Redis users that docs/reference/stores.md tells operators to make, for tests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support import servers

PAGE = Path(__file__).parents[2] / "docs/reference/stores.md"
SECTION = PAGE.read_text("utf-8").partition("### Redis ACL\n")[2].partition("\n## ")[0]

_LINES = re.findall(r"^ACL SETUSER (\S+) (.+)$", SECTION, re.MULTILINE)
USERS: dict[str, list[str]] = {name: rules.split() for name, rules in _LINES}
"""The rules of each user in the page's block."""

_LISTED = re.findall(r"^- (.*?):\s+`ACL SETUSER (\S+) ([^`]+)`", SECTION, re.MULTILINE | re.DOTALL)
TASKS: dict[str, tuple[str, list[str]]] = {
    task: (user, rules.split()) for task, user, rules in _LISTED
}
"""The user and further rules of each task in the page's list."""


def task(words: str) -> list[str]:
    """The rules of the one task whose line contains these words."""
    (found,) = [rules for name, (_, rules) in TASKS.items() if words in name]
    return found


def commands(rules: Sequence[str]) -> list[str]:
    """The commands that the rules permit."""
    return [rule[1:] for rule in rules if rule.startswith("+")]


@contextmanager
def user_on(ports: Sequence[int], name: str, *rules: str) -> Iterator[str]:
    """Make a user on these servers while the block runs; gives `user:password@`."""
    for port in ports:
        servers.command(port, "ACL", "SETUSER", name, *rules)
        servers.command(port, "ACL", "LOG", "RESET")
    try:
        yield f"{name}:secret@"
    finally:
        for port in ports:
            servers.command(port, "ACL", "DELUSER", name)


def refusals(port: int) -> set[str]:
    """What the server has refused since the user was made: commands, keys and channels.

    From Redis 7.2 on, redis-py names itself with CLIENT SETINFO, and does without it.
    """
    found: list[list[Any]] = servers.command(port, "ACL", "LOG", 128)
    return {str(row[row.index("object") + 1]) for row in found} - {"client|setinfo"}
