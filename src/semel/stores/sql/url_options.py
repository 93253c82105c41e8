"""The options in a database URL: a name that no driver knows is an error of the settings.

Without this check it fails at each connect, and looks like an outage.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module

from sqlalchemy.engine import URL

from semel.errors import SettingsError
from semel.stores.sql.pooler import OPTION

# SQLAlchemy makes the argument `ssl` of MySQL's drivers from these.
_MYSQL_TLS = {f"ssl_{name}" for name in ("ca", "key", "cert", "capath", "cipher", "check_hostname")}


def refuse_unknown(url: URL, drivers: Iterable[str]) -> None:
    """Raise if the URL has an option that none of these installed drivers knows."""
    if not url.query:
        return
    drivers = list(drivers)
    known = set[str]().union(*map(_options_of, drivers))
    for name in url.query:
        if name in known:
            continue
        # Not shown if it is not a plain name: after an unquoted ? it may be a part of a password.
        shown = f"{name!r} " if name.isidentifier() else ""
        near = get_close_matches(name, sorted(known), 1)
        advice = f"write {near[0]!r}, or remove it" if near else "remove it"
        raise SettingsError(
            f"the option {shown}in the database URL is unknown to {', '.join(drivers)}; {advice}. "
            "For other settings of the driver give an engine: SQLStore(create_engine(...))"
        )


def _options_of(driver: str) -> set[str]:
    if driver == "psycopg":
        from psycopg.pq import Conninfo

        return {option.keyword.decode() for option in Conninfo.get_defaults()} | {OPTION}
    return {*inspect.signature(import_module(driver).connect).parameters} | _MYSQL_TLS
