"""What every door has: a store, and how long its requests take."""

from __future__ import annotations

from semel.colour import Colour
from semel.http.exchange import Exchange, Pace
from semel.http.protocol import Request
from semel.http.request import record_key
from semel.http.rule import Ruling
from semel.ports import Store
from semel.settings import as_store, default_store


class Door:
    """Where requests of one colour become exchanges."""

    def __init__(self, store: Store | str | None, colour: Colour) -> None:
        self._store = None if store is None else as_store(store)
        self._colour = colour
        self._pace = Pace()
        if self._store is not None:
            self._store.ledger(colour)  # refuses a store of the other colour, here and now

    @property
    def store(self) -> Store:
        return self._store if self._store is not None else default_store()

    def exchange(
        self, ruling: Ruling, request: Request, text: str, tenant: str, fingerprint: bytes
    ) -> Exchange:
        """The exchange for a request that brought this key."""
        key = record_key(ruling, request, text, tenant)
        return Exchange(ruling, self.store, self._colour, key, fingerprint, request, self._pace)
