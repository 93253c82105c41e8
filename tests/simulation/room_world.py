"""The real rooms, their door and the client rules in a simulated world.

Servers with the same rooms die at any await, freeze in the middle of an action and wake, drain, are
cut off, and have clocks that are wrong; at times there is none. Their log is a `MemoryLog`, behind
a network that loses, delays and doubles; it is trimmed, is away, and fails over to an earlier copy,
from which it gives the same versions again. Rings are lost, in some worlds all of them, and come
before who listens knows that it does. Lines are cut at any message, stick, and lose, repeat or swap
what is on them. Clients click twice, act out of turn, send again what they sent before, and
something else under its name; they come with cursors that are old, another room's, or none at all,
and many show what they have clicked before it is answered.

What must hold is in `room_history` (of the log), `room_clients` (of what is told and shown) and
`room_overlay` (of what is shown beforehand); and when everything is calm: a turn that nobody plays
is timed out, everybody shows what there is, and whoever asks is answered.

    python tests/simulation/room_world.py --seed 123
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import random
import sys
from asyncio import taskgroups
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any
from unittest import mock

from party_world import CALM, LEASE_S, PartyWorld, Report, main, silence
from room_clients import Client
from room_history import ROOM
from room_members import InOrder, Plan, ServerHere

from semel.feed import subscription, window
from semel.http.ws import Spectator, Visitor
from semel.rooms import messages, news, timers
from semel.testing.simulator import Host, LivelockError

TABLES = ("t1", "t2")

# When nothing fails any more: pauses run out, everybody comes back, and turns that nobody plays.
SETTLES_WITHIN_S = 60.0

# The net's second, a sign of life, the client's patience, a pause, and the way.
SOON_S = 6.0

# Until a change is read: when a bell has rung, and when none has, or the log did not answer.
RUNG_S = 0.15
NET_S = 1.5

# A turn is over: somebody looks, at the latest after a second, and a stranger a little later.
TIMED_OUT_WITHIN_S = 5.0

SOMETIMES = (
    "Appended", "Repeated", "Mismatch", "Fenced", "VersionConflict", "done", "cached", "forgotten",
    "forked", "taken_back", "trimmed", "timeout", "timeout_taken_back",
    "not_due", "played_in_time", "stranger", "noted",
    "notes_trimmed", "note_renewed", "look_soon", "pipelined", "server_died", "freeze", "stumble",
    "cut_off", "black_out", "asleep", "drained", "log_away", "banned", "nobody_there", "cut",
    "slow", "stuck", "swallowed", "echoed", "overtaken", "ring_lost", "spurious", "last_ring_lost",
    "rung_early", "on_top",
    "request_lost", "reply_lost", "late", "doubled", "double_click", "sent_again", "other_payload",
    "number_again", "asked_again", "unknown_outcome", "never_sent", "odd", "left", "presence",
    "walked_out", "resumed", "not_resumed", "snapshot_join", "snapshot_reconnect", "snapshot_gap",
    "snapshot_manual", "snapshot_stale", "snapshot_trimmed", "snapshot_ahead", "snapshot_forked",
    "snapshot_gone", "snapshot_unreadable", "snapshot_overrun", "hung_up_ended", "hung_up_silence",
    "hung_up_drained", "hung_up_overloaded", "hung_up_told", "hung_up_unauthorized", "hung_up_left",
    "closed_1001", "closed_1013", "CONCURRENT_ACTION", "REQUEST_CONFLICT", "SUPERSEDED",
    "STATE_STALE_VERSION", "NOT_YOUR_TURN", "INVALID", "UNAUTHORIZED", "UNAVAILABLE", "FAILED",
    "TOO_LARGE", "RATE_LIMITED",
)  # fmt: skip


class World(PartyWorld):
    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(seed)
        chance = self.chance
        self.plan = plan
        self.tables = plan.tables(self)
        self.clients: list[Client] = []
        self.away: set[str] = set()
        self.banned: set[str] = set()
        self.on_the_way: Counter[tuple[Host | None, str]] = Counter()
        self.cache: dict[str, tuple[Any, float]] = {}
        """Of those who keep markers beside the log."""
        self.is_playing = True
        self.is_asleep = self.is_to_fail_over = False
        self.newcomer: Any = None
        """The only server to which anybody comes, if there is one."""
        self.open_at = 0.0
        """When everybody was back, and nothing failed any more."""
        self.pace_s = chance.choice([0.3, 1.0, 3.0])
        self.retries = chance.choice([0, 1])
        self.tells_presence = chance.random() < 0.5
        self.deafness = self._if("rings", chance.choice([0.0, 0.2, 1.0]))
        self.listens_s = chance.choice([0.02, 0.4])
        self.stumbles = self._if("stumble", chance.choice([0.0, 0.0, 0.01]))
        # A world of few faults has those that it has.
        self.boxes = self._if(
            "boxes", chance.choice([0.0, 0.0, 0.05] if plan.faults is None else [0.05])
        )
        self.box_faults = 1000
        self.is_last = False
        """From now on only changes are lost on the way, of which nothing later tells."""
        self.cuts = self._if("cut", chance.choice([0.0, 0.3, 0.6]))
        self.page = int(self._if("small", chance.choice([256, 256, 2])) or 256)
        self.replay_most = chance.choice([3, 1000]) if self.page == 2 else 1000
        self.replay = chance.choice([3, 1000]) if self.may("trim") else 1000
        self.requests_s = chance.choice([2.0, 300.0]) if self.may("trim") else 300.0
        self.per_s = chance.choice([4.0, 50.0]) if self.may("limits") else 50.0
        self.most_notes = chance.choice([3, 1000])
        self.skews = (0.0, -40.0, 7.0, 100.0) if self.may("skew") else (0.0,)
        if not self.may("weather"):
            self.network.weather = CALM

    def may(self, fault: str) -> bool:
        return self.plan.faults is None or fault in self.plan.faults

    def _if(self, fault: str, value: float) -> float:
        return value if self.may(fault) else 0.0

    def doubt_s(self) -> float:
        """How far off the store's clock is, as whoever asks knows it: half of a call."""
        return (1 + self.retries) * self.network.weather.timeout_s / 2

    def another(self, table: str) -> str:
        return next(each for each in TABLES if each != table)

    def authorise(self, visitor: Visitor, room_id: str) -> Any:
        user = (visitor.token or "").partition(":")[0]
        if user in self.banned:
            self.hit("banned")
            return None
        return user or Spectator()

    # Servers.

    def some_server(self) -> Any:
        """One that is there, or is about to end: whoever shows the way does not know yet."""
        there = self.there() if self.newcomer is None else [self.newcomer]
        ending = [
            member
            for member, running in self.members
            if member._stopping.is_set() and not (member.host.dead or running.done())
        ]
        return self.chance.choice([*there, *ending]) if there else None

    def join(self) -> None:
        if len(self.there()) < 3:
            self._enter()

    def _enter(self) -> None:
        self.enter(lambda host: ServerHere(self, host))

    def crash(self) -> None:
        if member := self.somebody():
            self._kill(member)

    def _kill(self, member: Any) -> None:
        self.hit("server_died")
        self.loop.note("died", member.host)
        member.host.dead = True
        for client in self.clients:
            if client.line is not None and client.line.server is member:
                client.line.cut()

    def black_out(self) -> None:
        """Nobody is there for a while, and turns run out meanwhile."""
        self.hit("black_out")
        for member in self.there():
            self._kill(member)
        self.loop.after(1.0 + 5.0 * self.chance.random(), self._light)

    def _light(self) -> None:
        if not self.there():
            self._enter()

    # Other misfortunes.

    def fail_over(self) -> None:
        """And those who were not answered, or are not sure, say the last they said again."""
        self.is_to_fail_over = False
        self.tables.fail_over()
        for client in self.clients if self.is_playing else ():
            if client.line is not None and client.sent and self.chance.random() < 0.5:
                client.line.say(client.sent[-1])

    def arm(self) -> None:
        self.tables.is_armed = True

    def fail_over_soon(self) -> None:
        """When the timeout was read: nobody misses what nobody has seen, until somebody comes."""
        self.hit("timeout_taken_back")
        self.is_to_fail_over = True
        is_read_at_once = self.network.weather is CALM and not self.deafness
        read_s = RUNG_S if is_read_at_once else NET_S
        self.loop.after(read_s + 0.5 * self.chance.random(), self.fail_over, context=Context())

    def toggle(self) -> None:
        self.hit("log_away")
        self.away ^= {"log"}

    def ban(self) -> None:
        users = sorted({client.user for client in self.clients if client.user})
        self.banned = set() if self.banned else {self.chance.choice(users)}

    def ring(self) -> None:
        self.hit("spurious")
        self.tables._tower.ring(f"{ROOM}{self.chance.choice(TABLES)}")

    def trim(self) -> None:
        stream = f"{ROOM}{self.chance.choice(TABLES)}"
        upto = self.chance.randrange(self.tables.now[stream].offset + 1)
        if stream in self.tables._streams:
            self.tables._streams[stream].trim(upto)

    def cut_lines(self) -> None:
        for client in self.clients:
            if client.line is not None and self.chance.random() < 0.6:
                self.chance.choice([client.line.cut, client.line.cut_soon])()

    def stick(self) -> None:
        """Somebody takes nothing for a while, or has closed its lid."""
        for each in self.clients:
            if self.chance.random() < 0.4:
                self.hit("stuck")
                each.stuck_until = self.loop.clock_s + 8.0 * self.chance.random()
                if each.line is not None and self.chance.random() < 0.5:
                    each.line.cut()

    def _misfortunes(self) -> list[Callable[[], None]]:
        known: dict[str, tuple[Callable[[], None], ...]] = {
            "crash": (self.crash, self.crash),
            "freeze": (self.freeze, self.freeze),
            "cut_off": (self.cut,),
            "stop": (self.stop,),
            "black_out": (self.black_out,),
            "cut": (self.cut_lines, self.cut_lines),
            "stick": (self.stick,),
            "failover": (self.fail_over, self.fail_over, self.fail_over, self.arm),
            "away": (self.toggle,),
            "trim": (self.trim,),
            "spurious": (self.ring,),
            "ban": (self.ban,),
        }
        allowed = [each for fault, many in known.items() if self.may(fault) for each in many]
        return [*allowed, self.join, self.join]

    # The story.

    async def story(self) -> None:
        for table in TABLES:
            self.tables.begin(f"{ROOM}{table}")
        self._enter()
        self._enter()
        self._arrive()
        for _ in range(self.chance.randint(6, 14)):
            await self.pause(1.5)
            if self.may("failover") and self.chance.random() < 0.5:
                self.tables.keep_a_copy()
                await self.pause(0.7)
            misfortune = self.chance.choice(self._misfortunes())
            self.loop.note("misfortune", misfortune.__name__)
            misfortune()
            self._look_after()
        await self._perhaps_fall_silent()
        self._calm_down()
        await asyncio.sleep(2 * LEASE_S)  # nobody is frozen any more
        await self._wake_up()
        self.is_playing = self.tables.is_armed = False
        self._look_after()
        await self._until(self._is_open, "somebody does not come back")
        self.open_at = self.loop.clock_s
        await self._until(self._is_quiet, "a turn is never over")
        self.box_faults = 0
        await self._until(self._is_answered, "somebody waits for ever")
        await self._until(self._is_shown, "somebody has not what the log has", SOON_S)
        self.is_last, self.box_faults = bool(self.boxes), 8
        await self._last_words()
        self._say_again()
        await asyncio.sleep(1.0)
        await self._until(self._is_shown, "somebody has not heard of everything", SOON_S)
        if self.may("cut"):
            await self._come_in_the_middle()
        self._look_after()

    async def _perhaps_fall_silent(self) -> None:
        """Nobody plays any more; and then nobody is there when the turn is over."""
        drawn = self.chance.random()
        if drawn < 0.25 and self.may("failover"):
            await self._take_back_a_timeout()
        elif drawn < 0.45 and self.may("failover"):
            self.tables.keep_a_copy()
            self._deal()
            await self.pause(0.7)
            self.fail_over()
            await self.pause(0.4)
            self._go_to_sleep()
        elif drawn < 0.8 and self.may("black_out"):
            self._go_to_sleep()
            self.black_out()
            await self.pause(6.0)

    async def _take_back_a_timeout(self) -> None:
        """Of the only server there is, which lives on; and nobody asks it for anything."""
        self._deal()
        await self.pause(0.7)
        self.is_playing = False
        for member in self.there()[1:]:
            member.stop()
        self.arm()
        await asyncio.sleep(4.0)

    def _deal(self) -> None:
        for client in self.clients:
            if client.user is not None:
                client.click({"actionType": "deal"})

    def _go_to_sleep(self) -> None:
        """Whoever comes back sees to the turn. If all others do without is what is asked here."""
        self.is_playing = False
        self.is_asleep = self.chance.random() < 0.7
        for client in self.clients if self.is_asleep else ():
            client.stuck_until = math.inf
            if client.line is not None:
                client.line.cut()

    async def _wake_up(self) -> None:
        if self.is_asleep and not self.tables.has_lost_notes:
            self.hit("asleep")
            await self._until(self._is_in_time, "nobody is there, and a turn is never over", 1.0)
        for each in self.clients:
            each.stuck_until = 0.0

    def _is_in_time(self) -> bool:
        return self.tables.overdue_s() < TIMED_OUT_WITHIN_S

    def _arrive(self) -> None:
        chance = self.chance
        users = ["ann", "bob", "cid", "dan"][: chance.randint(2, 4)]
        for user in users:
            self.clients.append(Client(self, f"{user}0", user, "t1"))
        self.clients.append(Client(self, f"{users[0]}1", users[0], chance.choice(TABLES)))
        self.clients.append(Client(self, "eve0", "eve", "t2"))
        self.clients.append(Client(self, "nobody0", None, "t1"))

    def _look_after(self) -> None:
        for member, running in self.members:
            is_there = not member.host.dead and not member._stopping.is_set()
            if is_there and (member.has_failed or running.done()):
                self.wrong("a server has failed")

    def _calm_down(self) -> None:
        self.network.weather = self.line.weather = CALM
        self.stumbles = self.cuts = 0.0
        self.away.clear()
        self.banned = set()
        if not self.there():
            self._enter()

    async def _until(
        self, holds: Callable[[], bool], otherwise: str, within_s: float = SETTLES_WITHIN_S
    ) -> None:
        until = self.loop.clock_s + within_s
        while not holds():
            if self.loop.clock_s > until:
                self.wrong(otherwise)
                return
            await asyncio.sleep(0.05)

    def _is_open(self) -> bool:
        return not self.is_to_fail_over and all(client.is_open for client in self.clients)

    def _is_answered(self) -> bool:
        return not any(client.guest._requests._queue for client in self.clients)

    def _is_quiet(self) -> bool:
        late_s = min(self.tables.overdue_s(), self.loop.clock_s - self.open_at)
        if late_s > TIMED_OUT_WITHIN_S:
            self.wrong("a turn was over, and nobody has timed it out")
            return True
        return self.tables.is_quiet

    def _is_shown(self) -> bool:
        return all(client.is_at_head for client in self.clients)

    async def _last_words(self) -> None:
        """Whoever asks is answered; and of that perhaps no bell tells."""
        if self.may("rings") and self.chance.random() < 0.5:
            self.hit("last_ring_lost")
            self.deafness = 1.0
        for client in self.clients:
            if client.user is not None:
                before = self.tables.now[client.stream].offset
                client.say_last()
                await self._until(
                    lambda client=client, before=before: self._is_done(client, before),
                    "somebody asks, and is not answered",
                    SOON_S,
                )

    def _is_done(self, client: Client, before: int) -> bool:
        return client.guest.is_settled and self.tables.now[client.stream].offset > before

    async def _come_in_the_middle(self) -> None:
        """Somebody comes to a server that begins to listen, and somebody else has the last word."""
        self._enter()
        self.newcomer = self.there()[-1]
        here = [each for each in self.clients if each.table == "t1"]
        speaker = self.chance.choice([each for each in here if each.user is not None])
        comer = self.chance.choice([each for each in here if each is not speaker])
        if comer.line is not None:
            comer.line.cut()
        await asyncio.sleep(0.05)
        await self._until(lambda: comer.is_open, "somebody does not get in")
        await self.pause(0.1)
        speaker.say_last()
        await self._until(self._is_shown, "somebody comes, and does not hear of the last", SOON_S)

    def _say_again(self) -> None:
        """What was sent long ago, when nobody remembers its name."""
        for client in self.clients:
            if client.line is not None and client.sent:
                for text in dict.fromkeys((client.sent[0], self.chance.choice(client.sent))):
                    client.line.say(text)


# --- running one --------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_in(world: World, seed: int) -> Iterator[None]:
    """What servers have of chances and sizes, from this world."""
    before = random.getstate()
    random.seed(seed)
    messages._public.cache_clear()
    news._told.cache_clear()
    patches: list[tuple[Any, str, Any]] = [
        (os, "urandom", world.chance.randbytes),
        (window, "KEEP_ENTRIES", world.page),
        (subscription, "PAGE", world.page),
        (subscription, "REPLAY_MOST", world.replay_most),
        (timers, "MOST_NOTES", world.most_notes),
        (taskgroups, "set", InOrder),
        *world.plan.patches,
        *world.plan.sound,
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            is_new = owner is taskgroups
            stack.enter_context(mock.patch.object(owner, name, value, create=is_new))
        yield
    random.setstate(before)


def run_rooms(seed: int, plan: Plan | None = None) -> Report:
    world = World(seed, plan or Plan())
    with silence(), _as_in(world, seed):
        try:
            world.loop.run(world.story())
        except LivelockError as error:
            world.violations.append(str(error))
    told = repr((world.hits, world.violations, world.loop.steps, world.tables.now))
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Report(seed, world.violations, world.hits, digest, world.loop.trace)


if __name__ == "__main__":
    sys.exit(main(run_rooms))
