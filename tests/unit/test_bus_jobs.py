from __future__ import annotations

import enum
import json

import pytest

from semel.bus import jobs
from semel.bus.jobs import event_of, id_in_shard, shard_of, state_of, stream_of
from semel.colour import ASYNC
from semel.entries import FieldValue, Position, Snapshot
from semel.errors import SettingsError
from semel.stores import MemoryStore


def event(job_id="job-1", stage="vision", seq=10, data=None, attempt=1, **more):
    return jobs.event("scan", job_id, stage, seq, data, attempt, **more)


def envelope(**changed):
    told = json.loads(event(data={"n": 1}).written().entry) | changed
    return json.dumps({name: value for name, value in told.items() if value is not ...})


# --- events -------------------------------------------------------------------------------------


def test_an_event_comes_back_from_its_entry():
    made = event(data={"b": [1, None], "a": "é"})
    assert event_of(made.written().entry) == made
    assert list(json.loads(made.written().entry)) == [
        "job_id",
        "domain",
        "stage",
        "seq",
        "data",
        "timestamp",
        "attempt",
    ]


def test_the_envelope_of_the_seed_has_no_attempt_and_may_have_more():
    found = event_of(envelope(attempt=..., trace="7"))
    assert found.attempt == 1


def test_only_the_data_tell_a_repeat_from_another_event_in_whatever_order_they_are():
    assert (
        event(data={"a": 1, "b": 2}).written().fingerprint
        == event(data={"b": 2, "a": 1}).written().fingerprint
    )
    assert (
        event(data={"a": 1}).written().fingerprint != event(data={"a": True}).written().fingerprint
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"7",
        b"null",
        b"\xff",
        b"[" * 100_000,
        *(envelope(**{name: ...}) for name in ("job_id", "domain", "stage", "seq", "timestamp")),
        envelope(job_id=7),
        envelope(job_id=""),
        envelope(stage="a:b"),
        envelope(stage=None),
        envelope(seq="10"),
        envelope(seq=True),
        envelope(seq=-1),
        envelope(seq=2**32),
        envelope(attempt=0),
        envelope(attempt=1.0),
        envelope(attempt=2**21),
        envelope(failed_in=7),
    ],
)
def test_what_is_no_event_is_a_value_error(data):
    with pytest.raises(ValueError):
        event_of(data)


class Stage(str, enum.Enum):  # noqa: UP042 - formats as "Stage.VISION", unlike a StrEnum
    VISION = "vision"


def test_a_member_of_an_enum_is_the_text_it_stands_for():
    assert event(stage=Stage.VISION).id == event().id


@pytest.mark.parametrize(
    "wrong",
    [
        {"job_id": 7},
        {"job_id": ""},
        {"job_id": "j" * 250},
        {"job_id": "\ud800"},
        {"job_id": "a\0b"},
        {"stage": "a:b"},
        {"stage": "s" * 251},
        {"seq": 1.0},
        {"attempt": 0},
    ],
)
def test_what_no_jobs_log_could_keep_is_refused_before_it_is_put_into_a_shard(wrong):
    with pytest.raises(SettingsError):
        id_in_shard(event(**wrong))


@pytest.mark.parametrize("text", ["é", "\n", '"{', "\x7f\u2028", "😀"])
def test_an_entry_is_json_whatever_its_texts(text):
    made = event(job_id=text, stage=text, data={"b": text, "a": [text]}, failed_in=text)
    assert event_of(made.written().entry) == made
    assert b"\n" not in made.written().entry


def test_the_largest_attempt_and_number_have_an_exact_rank():
    top = event(seq=2**32 - 1, attempt=2**21 - 1).rank
    assert top < 2**53
    assert event(seq=0, attempt=2).rank > event(seq=2**32 - 1, attempt=1).rank


# --- names --------------------------------------------------------------------------------------


def test_a_job_is_in_the_same_shard_for_everybody_and_for_ever():
    """As the seed has it: int(md5(job_id).hexdigest(), 16) % shards."""
    assert [shard_of(f"job-{n}", 8) for n in range(8)] == [0, 4, 3, 6, 3, 6, 5, 1]


def test_no_two_events_of_a_shard_have_one_id():
    ids = [
        id_in_shard(event(job_id=job, stage=stage, failed_in=failed_in))
        for job, stage, failed_in in [
            ("a", "b", ""),
            ("a:b", "c", ""),
            ("a:b:1:10", "c", ""),
            ("a", "c", ""),
            ("a", "b", "c"),
            ("a", "b", "d"),
            ("a:b", "1", "10"),
            ("a:b:1:10", "1", "10"),
            ("j" * 240, "b", ""),
            ("j" * 240, "b", "c"),
        ]
    ]
    assert len(set(ids)) == len(ids)
    assert all(len(id.encode()) <= 255 for id in ids)


def test_no_job_has_the_name_of_a_shard_or_of_another_domains_job():
    assert stream_of("scan", "events:0") != jobs.shard_stream_of("scan", 0)
    for domain in ("", "a:b", "scan:events", "x" * 256):
        with pytest.raises(SettingsError):
            jobs.checked_domain(domain)


# --- the state ----------------------------------------------------------------------------------


async def test_the_state_is_the_furthest_stages_event_and_each_stages_last():
    log = MemoryStore().log(ASYNC)
    for made in (
        event(seq=11, data=1),
        event(stage="rule", seq=20, data=2),
        event(seq=10, data="late"),
        event(seq=10, data="again", attempt=2),
    ):
        await jobs.append(log, made, made.written(), ends=False, keep=jobs.KEEP_JOB)

    state = state_of(await log.load(stream_of("scan", "job-1")))
    assert (state["stage"], state["seq"], state["data"]) == ("rule", 20, 2)
    assert {name: told["data"] for name, told in state["stages"].items()} == {
        "vision": "again",
        "rule": 2,
    }
    assert state["life"] == "open"


def test_of_stages_with_the_same_number_every_store_tells_the_same():
    def said(stage):
        return FieldValue(rank=5, data=json.dumps({"stage": stage}).encode())

    for names in (("zeta", "alpha", "mid"), ("mid", "zeta", "alpha")):
        snapshot = Snapshot(Position(3, "0" * 12), "open", None, {n: said(n) for n in names})
        state = state_of(snapshot)
        assert (state["stage"], list(state["stages"])) == ("zeta", ["alpha", "mid", "zeta"])


async def test_of_a_job_that_is_not_there_there_is_no_state():
    log = MemoryStore().log(ASYNC)
    state = state_of(await log.load(stream_of("scan", "job-1")))
    assert (state["stages"], state["life"]) == ({}, "unknown")
