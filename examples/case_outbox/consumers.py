"""Four services, each a group of its own: what they do with an event is rows in the same database.

    semel worker consumers:vision
    semel worker consumers:synapse
    semel worker consumers:watch
    semel worker consumers:ocr

Effect and memory of it are one commit, the inbox's. So a service that is killed has done an event
or has not, and whoever comes next knows which.
"""

from __future__ import annotations

from cases import tell
from pieces import DATABASE, EVENTS, LEASE_S, WATCHES, WORKERS, broker
from sqlalchemy.orm import Session
from tables import Analysis, Done, Ontology, Reading, Reminder

from semel.inbox import Retry, SQLInbox
from semel.messages import Message
from semel.worker import Worker

inbox = SQLInbox(DATABASE, retry=Retry(attempts=3, first_s=0.2))


def note(session: Session, group: str, message: Message) -> None:
    """For whoever wants to count afterwards."""
    session.add(
        Done(
            group_name=group,
            case_id=message.aggregate_id,
            seq=message.seq,
            event_id=message.id,
        )
    )


# --- vision: how much has happened
vision = Worker(broker, "vision_group", inbox, lease_s=LEASE_S)


@vision.on(topic=EVENTS)
def analyse(message: Message, session: Session) -> None:
    analysis = session.get(Analysis, message.aggregate_id)
    if analysis is None:
        analysis = Analysis(case_id=message.aggregate_id, events=0, words=0)
        session.add(analysis)
    analysis.events += 1
    if message.type == "document.read":
        analysis.words += len(message.data["text"].split())
    note(session, "vision_group", message)


# --- synapse: what is known, in the order in which it came to be known
synapse = Worker(broker, "synapse_group", inbox, lease_s=LEASE_S)


@synapse.on(topic=EVENTS)
def learn(message: Message, session: Session) -> None:
    ontology = session.get(Ontology, message.aggregate_id)
    if ontology is None:
        ontology = Ontology(case_id=message.aggregate_id, version=0, known="")
        session.add(ontology)
    ontology.version += 1
    ontology.known += f"{ontology.version}: {message.type}\n"
    note(session, "synapse_group", message)


# --- watch: the deadline that counts
watch = Worker(broker, "watch_cep_group", inbox, lease_s=LEASE_S)


@watch.on("case.deadline_set", topic=WATCHES)
def remind(message: Message, session: Session) -> None:
    session.merge(Reminder(case_id=message.aggregate_id, deadline=message.data["deadline"]))
    note(session, "watch_cep_group", message)


# --- ocr: reads, and tells of it in the same transaction
ocr = Worker(broker, "worker_group", inbox, lease_s=LEASE_S)


class UnreadableError(Exception):
    """There is nothing on the scan that anybody could read."""


@ocr.on("ocr.requested", topic=WORKERS)
def read_document(message: Message, session: Session) -> None:
    document, scan = message.data["document"], message.data["scan"]
    if "coffee" in scan:
        raise UnreadableError(f"scan of {document} shows {scan}")
    session.add(Reading(document_id=document, text=scan))
    tell(session, message.aggregate_id, "document.read", document=document, text=scan)
    note(session, "worker_group", message)
