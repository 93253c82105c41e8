from __future__ import annotations

import pytest

from semel.bus import SEQ_RANGES, Stages, get_next_seq
from semel.bus.stages import MOST_SEQ
from semel.errors import SettingsError


@pytest.mark.parametrize(
    ("stage", "seq"), [(name, first) for name, (first, _) in SEQ_RANGES.items()]
)
def test_a_stages_events_are_numbered_within_its_range(stage, seq):
    assert get_next_seq(stage) == seq
    assert get_next_seq(stage, 3) == seq + 3
    assert get_next_seq(stage, 9) == seq + 9


def test_a_stage_that_nobody_has_named_has_the_numbers_0_to_9():
    assert get_next_seq("sorting") == 0
    assert get_next_seq("sorting", 9) == 9


@pytest.mark.parametrize("stage", ["vision", "done", "failed", "sorting"])
@pytest.mark.parametrize("sub_seq", [10, 1_000, -1])
def test_a_number_outside_the_range_is_never_another_stages(stage, sub_seq):
    with pytest.raises(OverflowError, match="wider range"):
        get_next_seq(stage, sub_seq)


def test_the_last_stage_ends_the_job_and_no_other_does():
    stages = Stages()
    assert [stage for stage in SEQ_RANGES if stages.ends(stage)] == ["done"]
    assert not stages.ends("sorting")


def test_a_job_that_has_failed_has_ended_with_a_number_above_all_others():
    stages = Stages({"load": (100, 199), "store": (200, 249)})
    assert stages.ends("failed")
    assert stages.next_seq("failed") == 250
    assert get_next_seq("failed") > max(last for _, last in SEQ_RANGES.values())


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ({}, "at least one stage"),
        ({"a": (5, 4)}, "cannot have the numbers 5 to 4"),
        ({"a": (-1, 4)}, "cannot have the numbers -1 to 4"),
        ({"a": (0, MOST_SEQ + 1)}, "cannot have"),
        ({"a": (0, MOST_SEQ)}, "'failed' cannot have"),
        ({"a": (0, 9), "b": (9, 10)}, "numbers of its own"),
        ({"done": (50, 59), "vision": (10, 19)}, "in their order"),
        ({"failed": (0, 9)}, "need not be named"),
    ],
)
def test_stages_that_cannot_work_are_refused(ranges, why):
    with pytest.raises(SettingsError, match=why):
        Stages(ranges)


@pytest.mark.parametrize(
    ("stage", "seq"), [("vision", 20), ("vision", 9), ("done", 60), ("sorting", 10), ("failed", 59)]
)
def test_a_number_of_another_stage_is_refused(stage, seq):
    with pytest.raises(SettingsError, match=f"seq={seq} is no number of stage '{stage}'"):
        Stages().check(stage, seq)


@pytest.mark.parametrize(
    ("stage", "seq"), [("vision", 10), ("vision", 19), ("sorting", 0), ("failed", 60)]
)
def test_a_number_of_its_own_is_taken(stage, seq):
    Stages().check(stage, seq)


def test_with_stages_of_ones_own_another_name_is_a_mistake():
    own = Stages({"upload": (1, 99), "published": (100, 109)})
    for ask in (lambda: own.next_seq("publishd"), lambda: own.check("publishd", 0)):
        with pytest.raises(SettingsError, match="no stage 'publishd', only 'upload', 'published'"):
            ask()
    with pytest.raises(SettingsError, match="next_seq of the publisher's own Stages"):
        own.check("upload", 100)
    with pytest.raises(SettingsError, match="are no stages"):
        Stages(["upload"])


# --- the number that ends a job -----------------------------------------------------------------


def test_final_number_given_ends_job_from_that_number_on():
    seed = Stages(final=51)
    assert not seed.ends("done", 50)
    assert seed.ends("done", 51)
    assert seed.ends("done", 101)
    assert seed.ends("failed", 60)
    assert not seed.ends("reward", 51)


def test_final_number_left_out_ends_job_at_any_number_of_last_stage():
    assert Stages().ends("done", 50)
    assert Stages().ends("done")


def test_final_number_with_own_ranges_ends_job_from_that_number_on():
    own = Stages({"upload": (1, 99), "published": (100, 109)}, final=105)
    assert [own.ends("published", seq) for seq in (100, 104, 105, 109)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("final", [49, 60, "51", True, 51.0])
def test_final_number_outside_last_stage_is_refused(final):
    with pytest.raises(SettingsError, match=r"final=.*'done'.*50 to 59"):
        Stages(final=final)


@pytest.mark.parametrize(
    ("stages", "stage", "first"),
    [
        (Stages(), "progress", 1),
        (Stages(), "vision", 10),
        (Stages(), "done", 50),
        (Stages(final=51), "done", 51),
        (Stages(), "failed", 60),
        (Stages({"all": (0, 9)}), "all", 1),
    ],
)
def test_first_automatic_number_is_first_of_range_and_at_least_one(stages, stage, first):
    assert stages.least_seq(stage) == first
