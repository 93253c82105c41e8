"""PyMySQL reads every certificate of this machine for each connection: a tenth of a second of a
core. One context serves them all here; a test that brings settings of its own gets its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from pymysql.connections import Connection

_Connection: Any = Connection
_create = _Connection._create_ssl_ctx


@cache
def _shared() -> Any:
    return _create(_Connection.__new__(_Connection), {})


def _create_ssl_ctx(self: Any, settings: Any) -> Any:
    return _create(self, settings) if settings else _shared()


_Connection._create_ssl_ctx = _create_ssl_ctx
