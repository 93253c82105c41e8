"""The verbs for people over what is parked; what they do is in the contract of inboxes."""

from __future__ import annotations

import getpass

import pytest

from semel.errors import SettingsError
from semel.inbox import MemoryInbox, PoisonError
from semel.parked import Parked
from semel.testing.inboxes import message


@pytest.fixture
async def inbox():
    inbox = MemoryInbox()

    def bad(each, session):
        raise PoisonError("bad")

    await inbox.apply("stock", [message(1)], bad)
    return inbox


async def sequence_in(inbox):
    [waiting] = await Parked(inbox).list()
    return waiting.sequence


async def test_who_changes_something_is_named(inbox):
    sequence = await sequence_in(inbox)
    await Parked(inbox).replay(sequence)
    await Parked(inbox, who="ann").replay(sequence)
    named = [each.who for each in await Parked(inbox).audit()]
    assert named[0] == "ann"
    assert named[1].startswith(f"{getpass.getuser()}@")
    for nobody in ("", " "):
        with pytest.raises(SettingsError, match="who="):
            Parked(inbox, who=nobody)


async def test_a_user_without_a_name_is_no_obstacle(inbox, monkeypatch):
    def nameless():
        raise KeyError("uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    await Parked(inbox).replay(await sequence_in(inbox))
    [audit] = await Parked(inbox).audit()
    assert audit.who.startswith("unknown@")


@pytest.mark.parametrize("wrong", ["", "x", "00", b"short", 7, "g" * 64])
async def test_what_names_no_sequence_is_refused(inbox, wrong):
    with pytest.raises(SettingsError, match="names no sequence"):
        await Parked(inbox).skip(wrong)


async def test_a_sequence_may_be_named_as_it_is_shown(inbox):
    sequence = await sequence_in(inbox)
    told = await Parked(inbox).skip(sequence.hex().upper(), note="agreed with Bob")
    assert told.sequence == sequence
    [audit] = await Parked(inbox).audit(sequence=sequence.hex())
    assert audit.note.endswith(": agreed with Bob")
    assert list(await Parked(inbox).audit(sequence=b"\0" * 32)) == []


async def test_the_audit_ends_where_it_is_told(inbox):
    sequence = await sequence_in(inbox)
    for _ in range(3):
        await Parked(inbox).replay(sequence)
    assert len(await Parked(inbox).audit(limit=2)) == 2
