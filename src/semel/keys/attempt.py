"""A name for one try."""

from __future__ import annotations

import os
import platform
from typing import ClassVar


class _Holder:
    """Host and process, worked out once per process: after a fork the number is another."""

    name: ClassVar[str] = ""

    @classmethod
    def named(cls) -> None:
        cls.name = f"{platform.node()[:40]}:{os.getpid()}/"


_Holder.named()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Holder.named)


def new_attempt() -> str:
    """A name for one try: `host:pid/` and 64 random bits.

    The bits come from the kernel each time. Whatever a process keeps, a seed or a count, is
    there twice once the machine has been cloned or resumed from a snapshot, and two attempts of
    one name would both be told that they have won.
    """
    return _Holder.name + os.urandom(8).hex()
