"""What must hold of a ledger, whatever happens around it, said without its rules.

The oracle stands beside the simulated server and hears every operation and its answer. From the
promises made so far (a lease until then, a record until then, an outcome for that long) it knows
which answers are still honest. It keeps no rows and shares no code with `rules`, so a defect in
those cannot hide here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from semel.stores.rules import (
    Claiming,
    Completing,
    Noting,
    Operation,
    Releasing,
    Renewing,
    Row,
    key_of,
)
from semel.values import Busy, Done, Lost, Mismatch, Orphan, Outcome, Terms, Won

EVER_US = 1 << 62


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)


@dataclass(slots=True)
class Story:
    """What was promised about one key so far."""

    state: str = "none"
    attempt: str = ""
    fence: int = 0
    lifetime: int = 0
    owner: tuple[str, bytes] = ("", b"")
    terms: Terms = field(default_factory=Terms)
    lease_until_us: int = 0
    kept_until_us: int = 0
    took_over: bool = False
    outcome: Outcome | None = None
    recorded: list[Outcome] = field(default_factory=list[Outcome])
    notes: dict[str, int] = field(default_factory=dict[str, int])
    lifetimes: dict[int, int] = field(default_factory=dict[int, int])
    free_since_us: int = 0

    def alive(self, now_us: int) -> bool:
        return self.kept_until_us > now_us

    def leased(self, now_us: int) -> bool:
        return self.state == "held" and self.lease_until_us > now_us

    def free_for_us(self, now_us: int) -> int:
        """For how long nobody has been in the way of a claim."""
        if self.leased(now_us):
            return 0
        return now_us - max(self.free_since_us, min(self.lease_until_us, now_us))


class Oracle:
    """Hears every operation; `wrong` is called with what was dishonest about an answer."""

    def __init__(self, wrong: Callable[[str], None], hit: Callable[[str], None]) -> None:
        self.stories: dict[bytes, Story] = {}
        self.robbed: Callable[[str], None] = lambda _: None
        self._wrong = wrong
        self._hit = hit

    def story(self, id: bytes) -> Story:
        story = self.stories.get(id)
        if story is None:
            story = self.stories[id] = Story()
        return story

    def watch(
        self, op: Operation, before: Row | None, answer: Any, after: Row | None, now_us: int
    ) -> None:
        story = self.story(key_of(op).id)
        if story.alive(now_us) and before is None:
            self._wrong("a record vanished before its time")
        if isinstance(op, Claiming):
            self._watch_claim(story, op, answer, now_us)
            unchanged = not isinstance(answer, Won)
        else:
            self._watch_change(story, op, answer, now_us)
            unchanged = isinstance(answer, Lost)
        if unchanged and after is not before and after is not None:
            self._wrong(f"{type(op).__name__} was refused and changed the record all the same")

    # --- claims -------------------------------------------------------------------------------

    def _watch_claim(self, story: Story, op: Claiming, answer: Any, now_us: int) -> None:
        if not story.alive(now_us):
            if not isinstance(answer, Won):
                self._wrong(f"no record is left, and a claim was answered {answer}")
            else:
                self._grant_first(story, op, answer, now_us)
            return
        if story.owner != (op.key.operation, op.fingerprint):
            self._hit("mismatch")
            if not isinstance(answer, Mismatch):
                self._wrong(f"other arguments under the same key were answered {answer}")
            return
        match answer:
            case Mismatch():
                self._wrong("the same arguments were refused as other ones")
            case Done():
                self._watch_done(story, answer)
            case Busy():
                self._watch_busy(story, op, now_us)
            case Orphan():
                self._watch_orphan(story, op, now_us)
            case Won():
                self._watch_won(story, op, answer, now_us)

    def _watch_done(self, story: Story, answer: Done) -> None:
        if story.outcome is None or answer.outcome != story.outcome:
            self._wrong(f"replayed {answer.outcome}, recorded was {story.outcome}")

    def _watch_busy(self, story: Story, op: Claiming, now_us: int) -> None:
        if story.attempt == op.attempt and story.state in ("failed", "unknown"):
            self._hit("late_claim_refused")
        elif story.attempt == op.attempt:
            self._wrong("the holder itself was locked out")
        elif not story.leased(now_us):
            self._wrong(f"answered Busy while the key was {story.state} and nobody's lease ran")

    def _watch_orphan(self, story: Story, op: Claiming, now_us: int) -> None:
        self._hit("orphan")
        if story.state not in ("held", "unknown") or story.leased(now_us):
            self._wrong(f"answered Orphan while the key was {story.state}")
        elif op.terms.takeover and (op.terms.hold or not story.terms.hold):
            self._wrong("answered Orphan to somebody who may take over")

    def _watch_won(self, story: Story, op: Claiming, answer: Won, now_us: int) -> None:
        if story.attempt == op.attempt and story.state == "held":
            self._hit("claim_repeated")
            if story.took_over and answer.orphan is None:
                self._wrong("a repeated claim forgot that it took over from somebody")
            if answer.claim.fence != story.fence:
                self._wrong("a repeated claim got another fence")
            self._lease(story, op.terms, op.terms.lease_s, now_us)
            return
        if story.attempt == op.attempt:
            self._wrong("a doubled claim was granted after its attempt was over")
        if story.leased(now_us):
            self._wrong("two live claims on one key")
        if story.state == "done":
            self._wrong("a recorded outcome was forgotten")
        if not set(story.notes) <= set(answer.steps):
            self._wrong("a recorded step was forgotten")
        lapsed = story.state in ("held", "unknown")
        if lapsed:
            self._watch_takeover(story, op, answer)
        self._grant(story, op, answer, now_us, took_over=lapsed)

    def _watch_takeover(self, story: Story, op: Claiming, answer: Won) -> None:
        self._hit("takeover")
        if not op.terms.takeover or (story.terms.hold and not op.terms.hold):
            self._wrong("a held record was taken over")
        if answer.orphan is None:
            self._wrong("a takeover was not told that it is one")
        if story.state == "held":
            self.robbed(story.attempt)

    def _grant_first(self, story: Story, op: Claiming, answer: Won, now_us: int) -> None:
        if story.lifetime:
            self._hit("expired")
        story.lifetime += 1
        story.outcome = None
        story.notes.clear()
        story.owner = (op.key.operation, op.fingerprint)
        self._grant(story, op, answer, now_us, took_over=False)

    def _grant(
        self, story: Story, op: Claiming, answer: Won, now_us: int, *, took_over: bool
    ) -> None:
        if answer.claim.fence <= story.fence:
            self._wrong("a new holder got a fence that is not larger")
        story.attempt, story.fence = op.attempt, answer.claim.fence
        story.lifetimes[story.fence] = story.lifetime
        story.took_over = took_over
        self._lease(story, op.terms, op.terms.lease_s, now_us)

    def _lease(self, story: Story, terms: Terms, lease_s: float, now_us: int) -> None:
        story.state = "held" if lease_s else "unknown"
        story.terms = terms
        story.lease_until_us = now_us + _us(lease_s)
        for_ever = terms.hold or terms.ttl_s is None
        story.kept_until_us = EVER_US if for_ever else story.lease_until_us + _us(terms.ttl_s or 0)

    # --- changes ------------------------------------------------------------------------------

    def _watch_change(self, story: Story, op: Any, answer: Any, now_us: int) -> None:
        claim = op.claim
        holds = story.attempt == claim.attempt and claim.fence in (0, story.fence)
        running = story.state == "held" or (story.state == "unknown" and _may_follow_giving_up(op))
        if isinstance(answer, Lost):
            self._watch_lost(story, op, answer, now_us, ours=holds and running)
        elif not holds:
            self._wrong(f"{type(op).__name__} of somebody who no longer holds the key was kept")
        elif not running:
            self._watch_repeat(story, op)
        else:
            self._keep(story, op, now_us)

    def _watch_lost(self, story: Story, op: Any, answer: Lost, now_us: int, *, ours: bool) -> None:
        if ours and story.alive(now_us):
            self._wrong(f"{type(op).__name__} of the one who holds the key was refused")
        if answer.outcome is None:
            return
        if answer.outcome != story.outcome:
            self._wrong("a late holder was handed an outcome that is not the recorded one")
        if story.owner != (op.claim.key.operation, op.claim.fingerprint):
            self._wrong("a late holder was handed somebody else's outcome")

    def _watch_repeat(self, story: Story, op: Any) -> None:
        if isinstance(op, Completing) and story.state == "done" and op.outcome == story.outcome:
            self._hit("complete_repeated")
        elif not (isinstance(op, Releasing) and story.state == "failed"):
            self._wrong(f"{type(op).__name__} was kept although the key was {story.state}")

    def _keep(self, story: Story, op: Any, now_us: int) -> None:
        terms = op.claim.terms
        match op:
            case Renewing():
                self._lease(story, terms, op.lease_s, now_us)
            case Noting():
                self._lease(story, terms, terms.lease_s, now_us)
                story.notes[op.name] = story.fence
            case Releasing():
                self._finish(story, "failed", terms, now_us)
                if op.claim.fence == 0:
                    self._hit("withdrawn")
            case Completing():
                self._finish(story, "done", terms, now_us)
                story.outcome = op.outcome
                story.recorded.append(op.outcome)

    def _finish(self, story: Story, state: str, terms: Terms, now_us: int) -> None:
        story.state = state
        story.free_since_us = now_us
        story.lease_until_us = now_us
        story.kept_until_us = EVER_US if terms.ttl_s is None else now_us + _us(terms.ttl_s)

    # --- settled by hand ----------------------------------------------------------------------

    def resolved(self, id: bytes, outcome: Outcome | None) -> None:
        """Somebody found out how it ended, for good."""
        story = self.story(id)
        story.kept_until_us = EVER_US
        story.state = "failed" if outcome is None else "done"
        if outcome is not None:
            story.outcome = outcome
            story.recorded.append(outcome)


def _may_follow_giving_up(op: Any) -> bool:
    """Whoever gave up may still say how it ended; nothing else makes the attempt live again."""
    return isinstance(op, (Completing, Releasing)) or (isinstance(op, Renewing) and not op.lease_s)
