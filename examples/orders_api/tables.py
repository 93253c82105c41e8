"""The shop's own rows: who may order, and what was ordered."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The tables that the shop makes for itself."""


class Customer(Base):
    """Whoever has an API key; the key itself is nowhere to be found."""

    __tablename__ = "customers"

    api_key_hash: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(sa.String(64))
    may_order: Mapped[bool] = mapped_column(default=True)


class Order(Base):
    """One order, charged."""

    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(sa.String(36), primary_key=True)
    tenant: Mapped[str] = mapped_column(sa.String(64), index=True)
    item: Mapped[str] = mapped_column(sa.String(200))
    cents: Mapped[int] = mapped_column(sa.BigInteger)
    receipt: Mapped[str] = mapped_column(sa.String(64))
    placed_at: Mapped[datetime] = mapped_column(
        sa.DateTime(timezone=True), default=lambda: datetime.now(UTC)
    )


def hashed(api_key: str) -> str:
    return hashlib.sha256(api_key.encode()).hexdigest()


# For whoever tries the example.
CUSTOMERS = {"key-of-ann": "ann", "key-of-bob": "bob"}
