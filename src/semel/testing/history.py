"""Random histories of a ledger, and the ledger on paper that says what each move is answered.

The model is written apart from the stores' own rules on purpose: two descriptions of one
behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from semel.keys import new_attempt
from semel.values import Claim, Done, Key, Outcome, Terms, Won

LEASE_S = 30.0
TTL_S = 600.0
TERMS = Terms(lease_s=LEASE_S, ttl_s=TTL_S)
HOLD = Terms(lease_s=LEASE_S, ttl_s=TTL_S, takeover=False, hold=True)
RECOVER = Terms(lease_s=LEASE_S, ttl_s=TTL_S, takeover=True, hold=True)
FP = b"f" * 32
OTHER_FP = b"g" * 32

POLICIES = {"retry": TERMS, "hold": HOLD, "recover": RECOVER}


@dataclass(frozen=True)
class Move:
    """One step of a random history."""

    verb: str
    key: int = 0
    who: int = 0
    policy: str = "retry"
    fp: bytes = FP
    seconds: float = 0.0
    data: bytes = b""


@dataclass
class Slot:
    """One key in the model; `claims` are the attempts by caller, `owner` the current caller."""

    owner: int
    fp: bytes
    held: bool
    lease_end: float
    expiry: float | None
    status: str = "running"
    result: bytes | None = None
    steps: dict[str, bytes] = field(default_factory=dict[str, bytes])
    tries: int = 1


def moves() -> st.SearchStrategy[Move]:
    key, who = st.integers(0, 1), st.integers(0, 3)
    data = st.binary(max_size=3)
    return st.one_of(
        st.builds(
            Move,
            st.just("claim"),
            key,
            who,
            st.sampled_from(sorted(POLICIES)),
            st.sampled_from([FP, FP, FP, OTHER_FP]),
        ),
        st.builds(Move, st.sampled_from(["complete", "note"]), key, who, data=data),
        st.builds(Move, st.sampled_from(["release", "renew", "abandon"]), key, who),
        st.builds(
            Move,
            st.just("age"),
            seconds=st.sampled_from([10.0, LEASE_S + 3, TTL_S + 3, LEASE_S + TTL_S + 7]),
        ),
        st.builds(Move, st.sampled_from(["forget", "sweep"]), key),
    )


class Model:
    """The ledger on paper: who owns a key, until when, and how it ended."""

    def __init__(self) -> None:
        self.time = 0.0
        self.slots: dict[int, Slot] = {}
        self.claims: dict[tuple[int, int], Claim] = {}
        self.fence: dict[int, int] = {}

    def slot(self, key: int) -> Slot | None:
        slot = self.slots.get(key)
        if slot is not None and slot.expiry is not None and slot.expiry <= self.time:
            del self.slots[key]
            return None
        return slot

    def claim(self, move: Move) -> str:
        slot, terms = self.slot(move.key), POLICIES[move.policy]
        if slot is None:
            return "Won"
        if slot.fp != move.fp:
            return "Mismatch"
        if slot.status == "done":
            return "Done"
        if slot.status == "failed":
            return "Won"
        if slot.lease_end > self.time:
            return "Busy"
        if not terms.takeover or (slot.held and not terms.hold):
            return "Orphan"
        return "Won"

    def won(self, move: Move, claim: Claim) -> None:
        before, terms = self.slot(move.key), POLICIES[move.policy]
        expiry = None if terms.hold else self.time + LEASE_S + TTL_S
        slot = Slot(move.who, move.fp, terms.hold, self.time + LEASE_S, expiry)
        if before is not None:
            slot.steps, slot.tries = before.steps, before.tries + 1
        self.slots[move.key] = slot
        self.claims[move.key, move.who] = claim
        assert claim.number == slot.tries
        assert claim.fence > self.fence.get(move.key, 0), "fences grow"
        self.fence[move.key] = claim.fence

    def change(self, move: Move) -> str:
        claim = self.claims[move.key, move.who]
        # A row past its expiry may still be there: its own holder may still finish it.
        slot = self.slots.get(move.key)
        if slot is None or slot.owner != move.who or claim.fence != self.fence[move.key]:
            return "Lost"
        if slot.status == "failed":
            return "Kept" if move.verb == "release" else "Lost"
        if slot.status == "done":
            same = move.verb == "complete" and slot.result == move.data
            return "Kept" if same else "Lost"
        if slot.status == "given up" and move.verb in ("renew", "note"):
            return "Lost"
        self._change(slot, claim, move)
        return "Kept"

    def _change(self, slot: Slot, claim: Claim, move: Move) -> None:
        hold = claim.terms.hold
        if move.verb == "complete":
            slot.status, slot.result, slot.expiry = "done", move.data, self.time + TTL_S
        elif move.verb == "release":
            slot.status, slot.expiry = "failed", self.time + TTL_S
        else:
            lease = 0.0 if move.verb == "abandon" else LEASE_S
            slot.status = "given up" if move.verb == "abandon" else slot.status
            slot.lease_end = self.time + lease
            slot.expiry = None if hold else self.time + lease + TTL_S
            if move.verb == "note":
                slot.steps = {**slot.steps, "s": move.data}


async def make(
    contract: Any, store: Any, ledger: Any, model: Model, prefix: str, move: Move
) -> None:
    if move.verb == "age":
        await contract.age(store, move.seconds)
        model.time += move.seconds
        for key in list(model.slots):  # expired rows may be gone: only then are they out of play
            if model.slot(key) is None:
                await ledger.forget(contract.key(f"{prefix}{key}").id, force=True)
        return
    key = contract.key(f"{prefix}{move.key}")
    if move.verb == "sweep":
        await ledger.sweep()
    elif move.verb == "forget":
        await ledger.forget(key.id, force=True)
        model.slots.pop(move.key, None)
    elif move.verb == "claim":
        await _claim(ledger, model, key, move)
    elif (move.key, move.who) in model.claims:
        await _change(ledger, model, move)


async def _claim(ledger: Any, model: Model, key: Key, move: Move) -> None:
    expected = model.claim(move)
    answer = await ledger.claim(
        key, attempt=new_attempt(), fingerprint=move.fp, terms=POLICIES[move.policy]
    )
    assert type(answer).__name__ == expected, (answer, expected)
    slot = model.slot(move.key)
    if isinstance(answer, Won):
        assert dict(answer.steps) == ({} if slot is None else slot.steps)
        model.won(move, answer.claim)
    elif isinstance(answer, Done):
        assert slot is not None
        assert answer.outcome.data == slot.result


async def _change(ledger: Any, model: Model, move: Move) -> None:
    claim = model.claims[move.key, move.who]
    expected = model.change(move)
    verdict = await {
        "complete": lambda: ledger.complete(claim, Outcome("value", move.data)),
        "release": lambda: ledger.release(claim),
        "renew": lambda: ledger.renew(claim),
        "abandon": lambda: ledger.renew(claim, lease_s=0),
        "note": lambda: ledger.note(claim, "s", move.data),
    }[move.verb]()
    assert type(verdict).__name__ == expected, (move, verdict, expected)
