"""A payment provider, as far as a shop can see one: it moves money, and it honours keys.

Its books are a database of its own, so nothing it does is undone when the shop rolls back, and
what it has done is still there when the shop is killed. A charge with a key that it knows is
answered with the first receipt; that is what makes `child_key` worth handing over.
"""

from __future__ import annotations

import asyncio
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

BOOKS = sa.MetaData()

CHARGES = sa.Table(
    "bank_charges",
    BOOKS,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("receipt", sa.String(64), nullable=False),
    sa.Column("card", sa.String(32), nullable=False),
    sa.Column("cents", sa.BigInteger, nullable=False),
)


class DeclinedError(Exception):
    """The card has no money on it."""


class Bank:
    """`answers_after_s` is how long it takes to say what it has done already."""

    def __init__(self, url: sa.URL, *, answers_after_s: float = 0.0) -> None:
        self._engine = create_async_engine(url)
        self._answers_after_s = answers_after_s

    async def open(self) -> None:
        async with self._engine.begin() as books:
            await books.run_sync(BOOKS.create_all)

    async def charge(self, card: str, cents: int, *, key: str) -> str:
        """Move the money once per key, and give the receipt."""
        if card == "empty":
            raise DeclinedError(card)
        try:
            receipt = await self._move(card, cents, key)
        except sa.exc.IntegrityError:
            receipt = await self._receipt_of(key)
        await asyncio.sleep(self._answers_after_s)
        return receipt

    async def _move(self, card: str, cents: int, key: str) -> str:
        receipt = f"r-{uuid4()}"
        moved = {"key": key, "receipt": receipt, "card": card, "cents": cents}
        async with self._engine.begin() as books:
            await books.execute(CHARGES.insert().values(moved))
        return receipt

    async def _receipt_of(self, key: str) -> str:
        async with self._engine.connect() as books:
            found = await books.execute(sa.select(CHARGES.c.receipt).where(CHARGES.c.key == key))
            return str(found.scalar_one())

    async def close(self) -> None:
        await self._engine.dispose()
