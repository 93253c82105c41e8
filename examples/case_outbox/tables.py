"""The rows of a case: what the people in the office write, and what each service makes of it."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The tables that the example makes for itself."""


# --- the office
class Case(Base):
    """What everything is about."""

    __tablename__ = "cases"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    title: Mapped[str] = mapped_column(sa.String(200))
    deadline: Mapped[str | None] = mapped_column(sa.String(64), default=None)
    outcome: Mapped[str | None] = mapped_column(sa.String(200), default=None)


class Document(Base):
    """A scan that belongs to a case."""

    __tablename__ = "documents"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    case_id: Mapped[str] = mapped_column(sa.String(64), index=True)
    scan: Mapped[str] = mapped_column(sa.String(200))


# --- the services
class Analysis(Base):
    """Vision's: how much has happened to a case."""

    __tablename__ = "vision_analyses"

    case_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    events: Mapped[int] = mapped_column(default=0)
    words: Mapped[int] = mapped_column(default=0)


class Ontology(Base):
    """Synapse's: what is known of a case, with a version for every event."""

    __tablename__ = "synapse_ontologies"

    case_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    version: Mapped[int] = mapped_column(default=0)
    known: Mapped[str] = mapped_column(sa.Text, default="")


class Reminder(Base):
    """Watch's: the deadline that counts, which is the last one that was set."""

    __tablename__ = "watch_reminders"

    case_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    deadline: Mapped[str] = mapped_column(sa.String(64))


class Reading(Base):
    """The OCR worker's: what a scan says."""

    __tablename__ = "worker_readings"

    document_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    text: Mapped[str] = mapped_column(sa.Text)


class Done(Base):
    """What each group has done, in that order. Nothing here would refuse an event twice."""

    __tablename__ = "done"

    id: Mapped[int] = mapped_column(primary_key=True)
    group_name: Mapped[str] = mapped_column(sa.String(64))
    case_id: Mapped[str] = mapped_column(sa.String(64))
    seq: Mapped[int]
    event_id: Mapped[str] = mapped_column(sa.String(64))
