"""One-time tickets, for those who cannot send a header.

A browser's `EventSource` sends cookies and nothing else. Where there is no cookie (another origin,
a token in memory), a page asks its own backend for a ticket, and connects with it:

    ticket = await tickets.issue(user.id, job_id)          # behind the application's own login
    new EventSource(`/jobs/${job}?ticket=${ticket}`)

A ticket is good once, for one job, for half a minute: in a log file it is worth nothing. It says
who somebody is. Whether they may see the job is still asked of `authorise`, which finds it in
`request.ticket`, at every connect and again every so often.

The easy mistake is to leave reconnecting to `EventSource`: it asks for the same URL, and so with
the same ticket, which is used up, and it gives up at the 401. So either a page makes a new
`EventSource` with a new ticket and `after=` its last id when the old one fails and the job has not
ended (our clients do so when they are given a function for the URL), or there is a cookie as well,
and `authorise` reads it when `request.ticket` is None. A used ticket gives None; it does not refuse
the request.
"""

from __future__ import annotations

import json
import secrets

from semel.colour import ASYNC
from semel.errors import SettingsError
from semel.keys import make_key, new_attempt
from semel.ports import Store
from semel.settings import as_store
from semel.values import Key, Outcome, Terms, Won, value

__all__ = ["Ticket", "Tickets"]

# From the answer that brings it to the connection that uses it.
WITHIN_S = 30.0

# 128 random bits.
RANDOM_BYTES = 16
MOST_CHARACTERS = 64


@value
class Ticket:
    """Who was given it, for which job."""

    principal: str
    job_id: str


class Tickets:
    """Tickets in a store's ledger, so that every gateway at that store takes them."""

    def __init__(self, store: Store | str, *, within_s: float = WITHIN_S) -> None:
        self._ledger = as_store(store).ledger(ASYNC)
        self._within_s = within_s

    async def issue(self, principal: str, job_id: str) -> str:
        """A ticket for this job, good once, and not for long."""
        if not principal:
            raise SettingsError("a ticket is given to a name; this one is empty")
        ticket = secrets.token_urlsafe(RANDOM_BYTES)
        said = json.dumps({"principal": principal, "job_id": job_id}).encode()
        await self._record(_key(ticket, "issued"), said, self._within_s)
        return ticket

    async def redeem(self, ticket: str, job_id: str) -> Ticket | None:
        """Who it was given to; None if it is not good for this job, or was used before."""
        if not 0 < len(ticket) <= MOST_CHARACTERS:
            return None
        record = await self._ledger.look(_key(ticket, "issued").id)
        if record is None or record.outcome is None:
            return None
        found = Ticket(**json.loads(record.outcome.data))
        # Remembered for longer than the ticket is good.
        if found.job_id != job_id or not await self._record(
            _key(ticket, "used"), b"", 2 * self._within_s
        ):
            return None
        return found

    async def _record(self, key: Key, data: bytes, for_s: float) -> bool:
        """Is this the first time?"""
        terms = Terms(lease_s=for_s, ttl_s=for_s, takeover=False)
        answer = await self._ledger.claim(key, attempt=new_attempt(), terms=terms)
        if not isinstance(answer, Won):
            return False
        await self._ledger.complete(answer.claim, Outcome("value", data))
        return True


def _key(ticket: str, what: str) -> Key:
    return make_key(ticket, operation=f"semel.ticket.{what}", per_operation=True)
