"""What people do with a case: each command changes rows and tells of it, in one transaction.

The caller's transaction is all there is: a command that is rolled back has told nobody.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from pieces import EVENTS, WATCHES, WORKERS
from sqlalchemy.orm import Session
from tables import Case, Document

from semel.outbox import Event, Outbox

# --- who hears of what
outbox = Outbox(
    routes={
        "case.created": EVENTS,
        "document.uploaded": EVENTS,
        "document.read": EVENTS,
        "case.closed": EVENTS,
        "case.deadline_set": WATCHES,
        "ocr.requested": WORKERS,
    }
)


def tell(session: Session, case_id: str, what: str, **payload: Any) -> None:
    """Have the event committed with whatever else the session has done."""
    outbox.add(
        session, Event(type=what, aggregate_type="case", aggregate_id=case_id, payload=payload)
    )


# --- commands
def open_case(session: Session, case_id: str, title: str) -> None:
    session.add(Case(id=case_id, title=title))
    tell(session, case_id, "case.created", title=title)


def upload_document(session: Session, case_id: str, document_id: str, scan: str) -> None:
    session.add(Document(id=document_id, case_id=case_id, scan=scan))
    tell(session, case_id, "document.uploaded", document=document_id)
    tell(session, case_id, "ocr.requested", document=document_id, scan=scan)


def set_deadline(session: Session, case_id: str, deadline: str) -> None:
    session.execute(sa.update(Case).where(Case.id == case_id).values(deadline=deadline))
    tell(session, case_id, "case.deadline_set", deadline=deadline)


def close_case(session: Session, case_id: str, outcome: str) -> None:
    session.execute(sa.update(Case).where(Case.id == case_id).values(outcome=outcome))
    tell(session, case_id, "case.closed", outcome=outcome)
