from __future__ import annotations

from semel.rooms import Context


def context(entropy=bytes(32)):
    return Context("r", "ann", 1, 0.0, entropy)


def drawn(ctx):
    return [ctx.random.randrange(1_000_000) for _ in range(6)]


def test_chance_goes_on_within_a_try_and_is_the_same_for_the_same_one():
    numbers = drawn(context())
    assert len(set(numbers)) == 6
    assert drawn(context()) == numbers
    assert drawn(context(b"x" * 32)) != numbers


def test_chance_is_no_part_of_what_a_try_is():
    used, unused = context(), context()
    drawn(used)
    assert used == unused
    assert hash(used) == hash(unused)
    assert repr(used) == repr(unused)
